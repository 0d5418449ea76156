"""Figures of virtual time: who counts, the last round too, and nothing is lost to a mistake or to Ctrl-C."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_kit import runner
from results_kit import Watch, at

from gossamer.experiments.arena import (
    Arena,
    LearningSimulation,
    Mean,
    PeerTestResult,
    simulate_in_time,
)
from gossamer.experiments.arena.run_files import AccuracyLog, read_presence, summarise
from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.study.sweep import outcome
from gossamer.models import Metrics

torch.set_num_threads(1)


def table(**time: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "peers": 4,
        "rounds": 10,
        "data": {"samples": 40, "test": 60},
        "network": {"layout": "64=8=10"},
        "models": [{"name": "global", "layout": "64-8-10"}],
        "training": {"local_samples": 40, "rate": 0.3},
        "time": {"training": 1, "delay": 0.1} | time,
    }


TRACE = "3,leave,0\n3,leave,1\n6,arrive,1\n"


def leaving(folder: Path) -> str:
    """A config whose peer 0 leaves early and knows little, and whose peer 1 comes back."""
    (folder / "trace.csv").write_text(TRACE, "utf-8")
    return str(folder / "config.toml")


def mean_of(folder: Path) -> tuple[str, str]:
    with (folder / "summary.csv").open(newline="") as file:
        name, _, _, accuracy, there = list(csv.reader(file))[-1]
    assert name == "mean"
    return accuracy, there


def test_who_has_left_counts_no_more() -> None:
    tests = AccuracyLog({"b": [(0.0, 2.5), (4.0, 5.0)]})
    for test in (("a", 3.0, 2, 0.7), ("a", 1.0, 1, 0.5), ("b", 2.0, 1, 0.1)):
        tests.add(*test)
    assert tests.at(0.5) == {}
    assert tests.at(2.0) == {"a": 0.5, "b": 0.1}
    assert tests.at(2.5) == {"a": 0.5}
    assert tests.at(4.0) == {"a": 0.7, "b": 0.1}
    assert tests.mean(4.5) == Mean(4.5, pytest.approx(0.4), 2)
    curve = tests.curve()
    assert min(curve) == 1.0
    assert curve[1.0] == [0.5]
    assert curve[2.0] == [0.5, 0.1]
    assert curve[3.0] == [0.7]
    gone = AccuracyLog({"b": [(0.0, 1.5)]})
    gone.add("b", 2.0, 1, 0.1)
    assert gone.curve() == {}


def test_presence_is_written_and_read(tmp_path: Path) -> None:
    config = parse_config(table(churn={"trace": "trace.csv"}))
    simulate_in_time(config, at(tmp_path / "out"), leaving(tmp_path))
    inf = float("inf")
    assert read_presence(tmp_path / "out" / "presence.csv") == {
        "0": [(0.0, 3.0)],
        "1": [(0.0, 3.0), (6.0, inf)],
        "2": [(0.0, inf)],
        "3": [(0.0, inf)],
    }
    assert read_presence(tmp_path / "none.csv") == {}


@pytest.mark.parametrize("seconds", [None, 25.0])
def test_a_run_and_a_sweep_say_the_same(seconds: float | None, tmp_path: Path) -> None:
    time = {"churn": {"trace": "trace.csv"}} | ({"seconds": seconds} if seconds else {})
    config = parse_config(table(**time))
    source, watch = leaving(tmp_path), Watch()
    simulate_in_time(config, at(tmp_path / "out"), source, callbacks=[watch])
    found = outcome(config, source)
    assert mean_of(tmp_path / "out") == (f"{found.accuracy:.4f}", "3")
    last = watch.told("end")[-1]
    assert last.time == (seconds or 10.0)
    assert last.value("accuracy") == pytest.approx(found.accuracy)
    assert len(last.tests) == 3
    drawn = (tmp_path / "out" / "accuracy.svg").read_text()
    assert "peers online at the time" in drawn
    assert f"{found.accuracy:.3f}, the mean of 3" in drawn.replace("\n", " ")
    (tmp_path / "out" / "presence.csv").unlink()  # the file is what tells who has left
    summarise(tmp_path / "out", "tiny")
    assert mean_of(tmp_path / "out")[1] == "4"


def test_a_swarm_that_everybody_left_has_no_accuracy(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("".join(f"3,leave,{peer}\n" for peer in range(4)), "utf-8")
    config = parse_config(table(churn={"trace": "trace.csv"}))
    watch = Watch()
    simulate_in_time(config, at(tmp_path / "out"), str(tmp_path / "config.toml"), callbacks=[watch])
    assert not watch.told("end")[-1].tests
    with pytest.raises(ConfigError, match=r"key 'time\.churn': all peers have left by the end"):
        outcome(config, str(tmp_path / "config.toml"))


@pytest.mark.parametrize("pace", [1, 0.1, 0.7])
@pytest.mark.parametrize("rounds", [3, 10])
def test_the_round_that_ends_with_the_run_counts(pace: float, rounds: int) -> None:
    tests: list[PeerTestResult] = []
    config = parse_config(table(training=pace) | {"rounds": rounds})
    swarm = LearningSimulation(config, on_test=tests.append)
    swarm.run()
    assert swarm.rounds == [rounds] * 4
    final = [test for test in tests if test.round == rounds]
    assert [(test.peer, test.time) for test in final] == [(p, swarm.seconds) for p in range(4)]


def test_the_command_shows_the_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.csv").write_text(TRACE, "utf-8")
    (tmp_path / "tiny.toml").write_text(
        """
name = "tiny"
peers = 4
rounds = 10
data = {samples = 40, test = 60}
network = {layout = "64=8=10"}
models = [{name = "global", layout = "64-8-10"}]
training = {local_samples = 40, rate = 0.3}
time = {training = 1, delay = 0.1, churn = {trace = "trace.csv"}}
""",
        "utf-8",
    )
    result = runner(tmp_path, monkeypatch, capsys)("simulate", "tiny.toml", "-o", "out")
    assert not result.code
    accuracy = float(mean_of(tmp_path / "out")[0])
    assert f"accuracy {accuracy:.3f}: the mean over the 3 of 4 peers that are present" in result.out


def test_a_mistake_leaves_earlier_results_alone(tmp_path: Path) -> None:
    simulate_in_time(parse_config(table()), at(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before["metrics.jsonl"].count(b"\n") > 20
    wrong = parse_config(table(partitions=[{"start": 1.0, "end": 2.0, "peers": [99]}]))
    with pytest.raises(ConfigError, match="names peer 99"):
        simulate_in_time(wrong, at(tmp_path, force=True))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_training_that_is_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    own = table() | {"models": [{"name": "global", "layout": "64-4-10"}]}  # four cells are private
    swarm = LearningSimulation(parse_config(own))
    train, calls = Arena.train, []
    held: list[torch.Tensor] = []

    def interrupted(arena: Arena, peers: list[int]) -> tuple[Metrics, ...]:
        held[:] = [member.network.flat.clone() for member in swarm.members]
        metrics = train(arena, peers)
        calls.append(peers)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return metrics

    monkeypatch.setattr(Arena, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swarm.run()
    trained = calls[-1]
    assert any(not torch.equal(swarm.members[p].network.flat, held[p]) for p in trained)
    swarm.write_networks()
    for peer in trained:
        network = swarm.members[peer].network
        network.write("global", torch.zeros_like(network.read("global")))
        now = network.flat.clone()
        network.flat.copy_(held[peer])
        network.write("global", torch.zeros_like(network.read("global")))
        assert torch.equal(now, network.flat)


def test_interrupted_networks_have_what_their_peers_held(tmp_path: Path) -> None:
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"

    def stop(tested: PeerTestResult) -> None:
        if tested.time > 4.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate_in_time(parse_config(table()), at(stopped), networks=True, on_test=stop)
    simulate_in_time(parse_config(table()), at(whole), networks=True)
    swarm = LearningSimulation(parse_config(table()))
    networks = [member.network for member in swarm.members]
    fresh = [network.flat.clone() for network in networks]
    for peer, network in enumerate(networks):
        network.load(stopped / f"{peer}.safetensors")
        early = network.flat.clone()
        network.load(whole / f"{peer}.safetensors")
        # learned, but not to the end
        assert not torch.equal(early, fresh[peer])
        assert not torch.equal(early, network.flat)
