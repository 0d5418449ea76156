"""An interrupted simulation continues bit for bit, and a checkpoint of another run is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from cli_kit import runs
from results_kit import Watch, at
from torch import nn

from gossamer.experiments import ConfigError, Swarm
from gossamer.experiments.arena import Arena, AutoSharing, Gossip, Simulation, Wire, simulate
from gossamer.experiments.config.tables import Config, parse_config
from gossamer.experiments.results import read_records
from gossamer.models import ModelError, SgdLearner, SlicedNetwork
from gossamer.peer import load_checkpoint, save_checkpoint

ROUNDS, HALF = 6, 3
CASES: dict[str, dict[str, Any]] = {
    "ring gossip, momentum": {
        "topology": "ring",
        "gossip": {"mode": "rounds", "exchanges": 1},
        "weights": "samples",
        "training": {"optimizer": "momentum", "local_samples": 20},
    },
    "unequal weights, adam": {
        "topology": "star",
        "training": {"optimizer": "adam", "rate": 0.01, "local_samples": 20},
    },
    "lone twins": {"gain": 1.0},
    "fednp": {"fednp": {}},
}


def config(**changes: Any) -> Config:
    base: dict[str, Any] = {
        "name": "tiny", "peers": 4, "rounds": ROUNDS, "test_every": 2,
        "data": {"samples": 25, "test": 30}, "network": {"layout": "64=8=10"},
        "models": [{"name": "global", "layout": "64-6-10"}],
        "training": {"local_samples": 20},
    }  # fmt: skip
    return parse_config({**base, **changes})


def networks(simulation: Simulation) -> list[torch.Tensor]:
    return [member.network.flat.clone() for member in simulation.members]


def same(one: Simulation, other: Simulation) -> bool:
    return all(map(torch.equal, networks(one), networks(other)))


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_one_that_was_not_interrupted(case: str, tmp_path: Path) -> None:
    changes = CASES[case]
    whole, half, rest = (Simulation.of(config(**changes)) for _ in range(3))
    simulate(whole, at(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        simulate(
            half, at(tmp_path / "half"), checkpoint_every=HALF,
            callbacks=[Watch(interrupt_at=HALF + 2)],
        )  # fmt: skip
    assert not same(half, whole)
    watch = Watch()
    simulate(rest, at(tmp_path / "rest"), resume=tmp_path / "half", callbacks=[watch])
    assert same(rest, whole)
    assert [told.round for told in watch.told("round")] == [4, 5, 6]
    for name in ("metrics.jsonl", "summary.csv", "accuracy.svg"):
        expected = (tmp_path / "whole" / name).read_bytes()
        assert (tmp_path / "rest" / name).read_bytes() == expected
    gains = [tmp_path / folder / "gain.json" for folder in ("whole", "rest")]
    assert gains[0].exists() == gains[1].exists() == (case == "lone twins")
    if gains[0].exists():
        assert gains[0].read_bytes() == gains[1].read_bytes()


def learners() -> list[SgdLearner]:
    """Learners of a torch optimizer, whose networks draw torch's own random numbers."""
    made = []
    for peer in range(4):
        generator = torch.Generator().manual_seed(peer)
        x = torch.randn(30, 5, generator=generator)
        y = torch.randint(0, 3, (30,), generator=generator)
        module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
        network = SlicedNetwork(module, {"global": 1.0}, peer=str(peer), example=x[:2])
        optimizer = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
        made.append(
            SgdLearner(
                network, (x, y), (x, y), local_samples=10, batch=5, optimizer=optimizer, seed=peer
            )
        )
    return made


def test_an_arena_continues_from_a_file(tmp_path: Path) -> None:
    ring = nx.cycle_graph(4)
    torch.manual_seed(3)
    whole = Arena(learners(), mixing=Gossip(ring), threads=1)
    expected = list(whole.run(ROUNDS))
    torch.manual_seed(3)
    half = Arena(learners(), mixing=Gossip(ring), threads=1)
    for round in half.run(ROUNDS):
        if round.index == HALF:
            half.save(tmp_path / "state")
    torch.manual_seed(99)
    rest = Arena(learners(), mixing=Gossip(ring), threads=1)
    rest.load(tmp_path / "state")
    assert list(rest.run(ROUNDS)) == expected[HALF:]
    assert [round.index for round in rest.run(2)] == [1, 2]  # only the next run continues


def test_what_cannot_be_saved_is_refused_in_one_line(tmp_path: Path) -> None:
    for changes, key in (
        ({"sharing": "auto", "models": []}, "sharing"),
        ({"topology": "ring", "gossip": {"compress": "int8"}}, r"gossip\.compress"),
    ):
        simulation = Simulation.of(config(**changes))
        with pytest.raises(ConfigError, match=rf"config: key '{key}': checkpoints do not hold"):
            simulate(simulation, at(tmp_path / "out"), checkpoint_every=2)
        assert not (tmp_path / "out").exists()
    members = Swarm(config()).members()
    wired = Arena(
        [member.learner for member in members],
        mixing=Gossip(nx.cycle_graph(4)),
        wire=Wire(compress="int8"),
    )
    with pytest.raises(ModelError, match="an arena with `wire` cannot be saved"):
        wired.state()
    auto = Arena([m.learner for m in Swarm(config()).members()], sharing=AutoSharing())
    with pytest.raises(ModelError, match="an arena with `sharing` cannot be saved"):
        auto.state()


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "half"
    simulate(Simulation.of(config(rounds=HALF)), at(folder), checkpoint_every=HALF)
    return folder


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"training": {"local_samples": 20, "rate": 0.2}}, "training.rate"),
        ({"models": [{"name": "global", "layout": "64-5-10"}]}, "models.0.layout"),
        ({"topology": "ring"}, "topology"),
    ],
)
def test_another_config_is_refused(
    half: Path, changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"config: key '{key}': .* another value"):
        simulate(Simulation.of(config(**changes)), at(tmp_path / "rest"), resume=half)
    assert not (tmp_path / "rest").exists()


def test_another_version_is_refused(half: Path, tmp_path: Path) -> None:
    old = shutil.copytree(half, tmp_path / "old")
    tree = load_checkpoint(old / "checkpoint.safetensors")
    assert tree is not None
    save_checkpoint(old / "checkpoint.safetensors", {**tree, "gossamer": "0.9"})
    with pytest.raises(ConfigError, match=r"written by version 0\.9 of gossamer"):
        simulate(Simulation.of(config()), at(tmp_path / "rest"), resume=old)


def test_other_learners_are_refused(tmp_path: Path) -> None:
    arena = Arena(learners())
    arena.save(tmp_path / "state")
    with pytest.raises(ModelError, match="the state has the peers 0, 1, 2, 3, the arena 0, 1"):
        Arena(learners()[:2]).load(tmp_path / "state")
    with pytest.raises(ModelError, match="there is no such file"):
        arena.load(tmp_path / "absent")


def test_nothing_left_to_run_is_told(half: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"key 'rounds': .* of round 3"):
        simulate(Simulation.of(config(rounds=HALF)), at(tmp_path / "rest"), resume=half)


TOML = """
name = "tiny"
peers = 3
rounds = 4
[data]
samples = 20
test = 30
[[models]]
name = "global"
share = 1.0
"""
command = runs(
    "simulate",
    tiny=TOML,
    longer=TOML.replace("rounds = 4", "rounds = 6"),
    longest=TOML.replace("rounds = 4", "rounds = 7"),
)


def test_the_command_continues_a_run(command: Any, tmp_path: Path) -> None:
    first = command("tiny.toml", "--checkpoint", "2")
    assert first.code == 0, first.err
    second = command("longer.toml", "--resume", "results/tiny/latest")
    assert second.code == 0, second.err
    assert f"continues after round 4 of {tmp_path / 'results/tiny/001'}" in second.err
    third = command("longest.toml", "--resume", "results/tiny/latest")  # 002 has checkpoints too
    assert "continues after round 6 of" in third.err
    records = list(read_records(tmp_path / "results/tiny/002/metrics.jsonl"))
    assert [each["round"] for each in records][::3] == [1, 2, 3, 4, 5, 6]
    whole = command("longer.toml", "--out", "whole")
    assert whole.code == 0, whole.err
    assert records == list(read_records(tmp_path / "whole/metrics.jsonl"))
    assert json.loads((tmp_path / "results/tiny/002/config.json").read_text())["rounds"] == 6
    absent = command("longer.toml", "--resume", "results/other")
    assert absent.code == 2
    assert "--resume results/other: there is no checkpoint.safetensors" in absent.err
    assert "--checkpoint N" in absent.err


def test_an_interrupted_run_says_how_to_continue(command: Any, tmp_path: Path) -> None:
    (tmp_path / "interrupting.py").write_text(
        "from gossamer.models import Callback\n"
        "class CtrlC(Callback):\n"
        "    def round(self, progress):\n"
        "        if progress.round == 3:\n"
        "            raise KeyboardInterrupt\n"
        "        return False\n"
    )
    text = (tmp_path / "longer.toml").read_text()
    (tmp_path / "stopped.toml").write_text('callbacks = ["interrupting:CtrlC"]\n' + text)
    stopped = command("stopped.toml", "--checkpoint", "2")
    assert stopped.code == 130
    line = stopped.err.splitlines()[-1]
    assert line == (
        "interrupted; continue with gossamer simulate stopped.toml --resume results/tiny/001"
    )
    rest = command("longer.toml", *line.split()[-2:])
    assert rest.code == 0, rest.err
    assert "continues after round 2 of" in rest.err
