"""Residual networks in real processes, their messages in several packets, on a broker with a low limit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.config.tables import Config, parse_config
from gossamer.experiments.live.layout import plan
from gossamer.experiments.live.run import collect
from gossamer.experiments.results import RecordFile
from gossamer.peer import Broker, BrokerAddress, BrokerSettings, LocalSwarm, find_mosquitto

pytestmark = pytest.mark.live

PACKET = 8192


def residual() -> Config:
    return parse_config(
        {
            "name": "residual",
            "peers": 4,
            "rounds": 3,
            "data": {"set": "digits", "samples": 40, "test": 100},
            "network": {"name": "resnet", "options": {"widths": [8, 16]}},
            "models": [{"name": "global", "share": {"*": 0.8, "input": 1, "7": 0}}],
            "training": {
                "local_samples": 40, "rate": 0.05, "reduction": "mean", "loss": "cross-entropy",
            },
            "gossip": {"mode": "rounds", "per_process": 2},
        }
    )  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
def test_four_peers_in_two_processes_learn_what_the_arena_does(tmp_path: Path) -> None:
    config = residual()
    simulation = Simulation.of(config)
    vector = simulation.members[0].network.read("global")
    assert 4 * len(vector) > PACKET, "a message must take several packets"
    with Broker(BrokerSettings(max_packet=PACKET), kind="mosquitto") as broker:
        # MQTT 5: the broker says how large packets may be
        spec = plan(config, tmp_path, BrokerAddress(broker.url, version="5"))
        with RecordFile(tmp_path / "metrics.jsonl") as file:
            asyncio.run(LocalSwarm(spec, on_record=file.write).run())
    outcome = collect(config, spec, [])
    held, injected = outcome.weight["global"]
    assert held == injected == 4
    assert outcome.bytes > 4 * config.rounds * 4 * len(vector)
    tests = list(simulation.rounds())[-1].tests
    for member, test in zip(simulation.members, tests, strict=True):
        state = load_file(tmp_path / f"{member.name}.safetensors")
        for name, value in member.network.module.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-3, msg=name)
        assert abs(outcome.accuracy[member.name] - test.accuracy) <= 0.05
