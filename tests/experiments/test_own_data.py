"""Data of a user's own in configs: a function `module:function`, in every command that takes a set."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.build import Swarm, make_learner
from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.data import DataError, load
from gossamer.experiments.federated import METHODS
from gossamer.experiments.federated.comparison import clients_of, parse_comparison
from gossamer.experiments.study.sweep import outcomes
from gossamer.models import LoaderLearner

torch.set_num_threads(1)

PAGE = (Path(__file__).parents[2] / "docs/how-to/data.md").read_text("utf-8")
WRONG = """
import numpy as np
from gossamer.experiments.data import Dataset, samples
def pair(): return np.zeros((4, 2)), np.zeros(4)
def breaks(): raise KeyError("leaves")
def few(): return Dataset("few", samples(np.zeros((4, 2)), np.array([0, 1, 2, 3])), None, classes=3)
def none(): return Dataset("none", samples(np.zeros((0, 2)), np.zeros(0)), None, classes=3)
def untested():
    train = samples(np.zeros((4, 2)), np.arange(4) % 3)
    return Dataset("untested", train, samples(np.zeros((0, 2)), np.zeros(0)), classes=3)
number = 3
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A config's file, with the how-to page's module beside it, and one with mistakes."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_data.py").write_text(next(one for one in blocks if "def orchard" in one))
    (tmp_path / "wrong_data.py").write_text(WRONG)
    return str(tmp_path / "swarm.toml")


def table(**more: Any) -> dict[str, Any]:
    return {
        "peers": 4,
        "rounds": 12,
        "data": {"set": "my_data:orchard", "samples": 60},
        "network": {"layout": "12=8=3"},
        "models": [{"name": "all", "layout": "12-8-3"}],
        "training": {"local_samples": 60, "rate": 0.2, "reduction": "sum"},
    } | more


def test_the_example_learns_and_follows_the_seed(source: str) -> None:
    simulation = Simulation.of(parse_config(table(), source), source)
    first = simulation.members[0].learner.samples[0].clone()  # type: ignore[attr-defined]
    *_, last = simulation.rounds()
    assert last.accuracy > 0.6
    other = Swarm(parse_config(table(seed=1), source), source).member(0)
    assert not torch.equal(other.learner.samples[0], first)  # type: ignore[attr-defined]


def test_a_sweep_and_a_live_peers_process_find_it_too(source: str) -> None:
    configs = [parse_config(table(rounds=2, seed=seed), source) for seed in (0, 1)]
    assert len(outcomes(configs, [source, source])) == 2
    text = json.dumps(configs[0].model_dump(mode="json"))
    learner = make_learner(text, 2, source)
    member = Swarm(configs[0], source).member(2)
    assert torch.equal(learner.samples[0], member.learner.samples[0])  # type: ignore[attr-defined]


def test_a_comparison_deals_it_out(source: str) -> None:
    found = parse_comparison(
        {
            "peers": 3,
            "data": {"set": "my_data:orchard", "tested": "common"},
            "network": {"layout": "12=8=3"},
        },
        source,
    )
    one, two = (clients_of(found, METHODS["fedavg"](), seed, source) for seed in (0, 1))
    assert sum(client.sample_count for client in one) == 600
    assert not torch.equal(one[0].learner.held_out[0], two[0].learner.held_out[0])
    wrong = found.model_copy(
        update={"data": found.data.model_copy(update={"set": "wrong_data:pair"})}
    )
    with pytest.raises(ConfigError, match=r"swarm.toml: key 'data.set': wrong_data:pair returned"):
        clients_of(wrong, METHODS["fedavg"](), 0, source)


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ("nowhere_data:f", "entry point 'nowhere_data:f': there is no module 'nowhere_data' in "),
        ("wrong_data:missing", "entry point 'wrong_data:missing': 'wrong_data' has no function or class"),
        ("wrong_data:number", "'wrong_data' has no function or class 'number'"),
        ("wrong_data:pair", "wrong_data:pair returned tuple instead of a gossamer.experiments.data"),
        ("wrong_data:breaks", "wrong_data:breaks raised KeyError: 'leaves', at "),
        ("wrong_data:few", "wrong_data:few: few: train labels run from 0 to 3, but 3 classes allow"),
        ("wrong_data:none", "wrong_data:none returned a Dataset without training samples"),
        ("wrong_data:untested", "wrong_data:untested returned a Dataset with an empty test set: with None"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_with_the_key(source: str, named: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Swarm(parse_config(table(data={"set": named}), source), source)
    assert str(error.value).startswith(f"{source}: key 'data.set': ")
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_without_a_function_is_told_of_them() -> None:
    with pytest.raises(DataError, match="or name a function of yours, module:function"):
        load("orchard")


STREAMS = {
    "data": {"set": "my_streams:sensors"},
    "network": {"layout": "4=8=2"},
    "models": [{"name": "all", "layout": "4-8-2"}],
    "tasks": [{"kind": "swap", "labels": [0, 1], "peers": [3]}],
    "training": {"local_samples": 100, "rate": 0.2},
}


@pytest.fixture
def streams(tmp_path: Path) -> str:
    """A config's file, with the how-to page's module of streams beside it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_streams.py").write_text(next(one for one in blocks if "def sensors" in one))
    return str(tmp_path / "swarm.toml")


def test_data_may_be_read_while_peers_train(streams: str) -> None:
    simulation = Simulation.of(parse_config(table(**STREAMS), streams), streams)
    arena = simulation.arena()
    *_, last = simulation.rounds(arena)
    assert all(isinstance(member.learner, LoaderLearner) for member in simulation.members)
    assert [member.samples for member in simulation.members] == [400] * 4
    assert last.tests[0].samples == 400
    assert last.tests[0].accuracy > 0.7
    assert last.tests[3].accuracy < 0.3  # its labels are swapped, and all share one network
    assert "4 of 4 peers train one by one" in arena.one_by_one()[0]
    learner: Any = make_learner(json.dumps(table(**STREAMS)), 3, streams)
    x, y = learner.samples
    assert torch.equal(y, (x[:, 0] <= x[:, 1]).long())


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"data": {"set": "my_streams:sensors", "partition": "iid"}}, "data.partition"),
        ({"training": {"prior": "own"}}, "training.prior"),
        ({"gain": 0.5}, "gain"),
        ({"sharing": "auto", "models": []}, "sharing"),
    ],
)
def test_keys_that_need_all_samples_are_refused(
    streams: str, more: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"key '{key}': needs samples in memory") as error:
        Swarm(parse_config(table(**STREAMS | more), streams), streams)
    assert "leave it out" in str(error.value)


def test_a_comparison_refuses_streams(streams: str) -> None:
    with pytest.raises(DataError, match="only simulate, swarm and join can use them"):
        load("my_streams:sensors", folder=Path(streams).parent)
