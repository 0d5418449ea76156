"""`rounds = "forever"` in configs: live peers take it, simulations refuse it in one line."""

from __future__ import annotations

from math import inf

import pytest

from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.config.tables import Config, ConfigError, parse_config
from gossamer.experiments.live.layout import plan
from gossamer.experiments.study.sweep import expand
from gossamer.peer import BrokerAddress

TINY = {
    "peers": 2,
    "data": {"samples": 20},
    "network": {"layout": "64=4=10"},
    "models": [{"name": "global", "layout": "64-4-10"}],
}
REFUSED = "tiny.toml: key 'rounds': only live peers learn for ever"


def config(**changes: object) -> Config:
    return parse_config(TINY | {"rounds": "forever"} | changes, "tiny.toml")


def test_live_peers_have_no_last_round(tmp_path):
    spec = plan(config(), tmp_path, BrokerAddress("mqtt://localhost"), "tiny.toml")
    assert {peer.settings.last_round for peer in spec.peers} == {inf}


def test_a_simulation_is_refused_before_anything_is_built():
    with pytest.raises(ConfigError, match=REFUSED):
        Simulation.of(config(), "tiny.toml")


def test_a_sweep_is_refused():
    with pytest.raises(ConfigError, match=REFUSED):
        expand(config(sweep={"seeds": 2}), "tiny.toml")


@pytest.mark.parametrize("wrong", [0, "for ever", 1.5, True])
def test_other_values_are_one_line(wrong):
    with pytest.raises(ConfigError, match='should be a number of rounds, or "forever"') as caught:
        config(rounds=wrong)
    assert "\n" not in str(caught.value)
