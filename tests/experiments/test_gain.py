"""What peers gain by taking part: lone twins in simulations, from the arena to the command line."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_kit import Run, runs
from scipy import stats
from stack_kit import associators, perceptrons, pictures
from torch import nn

from gossamer.experiments.arena import (
    Arena,
    AutoSharing,
    LearningSimulation,
    Simulation,
    Wire,
    simulate,
)
from gossamer.experiments.arena.lockstep import Gossip
from gossamer.experiments.build import choose_twins
from gossamer.experiments.config.needs import refuse_unused_axes, warn_unused_keys
from gossamer.experiments.config.tables import Config, ConfigError, parse_config
from gossamer.experiments.federated.comparison import parse_comparison
from gossamer.experiments.live.layout import plan
from gossamer.experiments.live.run import print_outcome, run_live
from gossamer.experiments.results import Results, read_records
from gossamer.models import ModelError, SgdLearner
from gossamer.peer import Broker, BrokerAddress

KINDS: dict[str, Any] = {
    "perceptrons": perceptrons,
    "many": lambda: perceptrons(peers=40),  # split into tasks whose size depends on their number
    "large": lambda: perceptrons(peers=3, layout="300=120=4"),
    "adam": lambda: perceptrons(optimizer=lambda p: torch.optim.Adam(p, 0.01)),
    "pictures": pictures,
    "associators": associators,
}


@pytest.mark.parametrize("kind", KINDS)
def test_peers_are_the_same_with_and_without_twins(kind: str) -> None:
    with_twins, without = KINDS[kind](), KINDS[kind]()
    arena, plain = Arena(with_twins, twins=[0, 2]), Arena(without)
    for one, other in zip(arena.run(4), plain.run(4), strict=True):
        assert (one.training, one.tests) == (other.training, other.tests)
        assert [gain.peer for gain in one.gains] == [
            without[0].network.peer,
            without[2].network.peer,
        ]
        assert not other.gains
    for learner, other in zip(with_twins, without, strict=True):
        assert torch.equal(learner.network.flat, other.network.flat)


def test_gains_are_those_of_peers_on_another_device() -> None:
    """Their own values are copies of those on the device, and must be current when they are compared."""
    for here, there in zip(
        Arena(perceptrons(), twins=[0]).run(2),
        Arena(perceptrons(), twins=[0], device="cpu:0").run(2),
        strict=True,
    ):
        assert here.gains == there.gains


@pytest.mark.parametrize("kind", KINDS)
def test_twins_are_the_peers_that_train_alone(kind: str) -> None:
    alone = [KINDS[kind]()[index] for index in (0, 2)]
    for learner in alone:  # their own names for all partial models: nothing is averaged
        learner.network.reslice({f"of-{learner.network.peer}": 1.0})
    arena = Arena(KINDS[kind](), twins=[0, 2], every=2)
    *_, last = arena.run(3)
    *_, expected = Arena(alone, every=2).run(3)
    assert arena.twins is not None
    for twin, learner in zip(arena.twins.alone, alone, strict=True):
        assert torch.equal(twin.network.flat, learner.network.flat)
    for gain, test in zip(last.gains, expected.tests, strict=True):
        assert gain.alone_accuracy == test.accuracy
        assert gain.alone_loss == pytest.approx(test.mean_loss, rel=1e-6)


def test_dropout_and_batch_norm_of_twins_leave_their_peers_alone() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 4))

    values = []
    for twins in ((), (0, 2)):
        learners = perceptrons(layout="6=8=4", make=make, level=1.0, rate=0.01)
        torch.manual_seed(5)
        list(Arena(learners, twins=twins).run(3))
        values.append([learner.network.flat.tolist() for learner in learners])
    assert values[0] == values[1]


def test_gains_are_measured_when_peers_are_tested() -> None:
    learners = perceptrons()
    rounds = list(Arena(learners, twins=[1], test_every=2).run(3))
    assert [len(one.gains) for one in rounds] == [0, 1, 1]
    gain, test = rounds[-1].gains[0], rounds[-1].tests[1]
    assert gain.accuracy.mean == pytest.approx(test.accuracy - gain.alone_accuracy)
    assert gain.loss.mean == pytest.approx(test.mean_loss - gain.alone_loss)


def test_twins_over_a_wire_leave_the_bytes_and_values_of_peers_alone() -> None:
    import networkx as nx

    sent = []
    for twins in ((), (0, 3)):
        learners = perceptrons()
        arena = Arena(
            learners, mixing=Gossip(nx.cycle_graph(5)), wire=Wire(compress="int8"), twins=twins
        )
        list(arena.run(3))
        assert arena.wire_simulation is not None
        counted = [(model, size) for model, size, _ in arena.wire_simulation.traffic_by_model()]
        sent.append((counted, [learner.network.flat.tolist() for learner in learners]))
    assert sent[0] == sent[1]


def test_a_twin_trains_on_samples_that_its_peer_sets_aside() -> None:
    """A swarm that decides what to share holds samples out; a peer alone would train on all of them."""
    (alone, *_), learners = perceptrons(), perceptrons()
    peer, sizes, gains = learners[0], set[int](), ()
    assert isinstance(peer, SgdLearner)
    for round in Arena(learners, sharing=AutoSharing(), twins=[0]).run(20):
        sizes.add(len(peer.samples[1]))
        gains = round.gains
    assert len(sizes) == 2  # held out, and given back
    *_, expected = Arena([alone]).run(20)
    assert gains[0].alone_loss == pytest.approx(expected.tests[0].mean_loss, rel=1e-6)


def test_a_twin_may_diverge_where_its_peer_does_not() -> None:
    learners = perceptrons(activation="relu", output="none", rate=1e-3)
    arena = Arena(learners, twins=[0])
    first = next(iter(arena.run(1)))
    assert first.gains[0].loss.interval is not None
    with torch.no_grad():
        learners[0].network.flat[:] = 1e30
    broken = Arena(learners, twins=[0])
    with torch.no_grad():
        learners[0].network.flat[:] = 0.01
    *_, last = broken.run(2)
    assert last.gains[0].loss.interval is None  # the twin's loss is not finite
    assert last.tests[0].mean_loss < 10


def test_an_arena_with_twins_cannot_take_new_samples() -> None:
    with pytest.raises(ModelError, match="build a new Arena"):
        Arena(perceptrons(), twins=[0]).renew()


# --- configs ----------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "peers": 8,
    "rounds": 4,
    "gain": 0.25,
    "data": {"samples": 30, "partition": "iid"},
    "models": [{"name": "global", "share": 1.0}],
}


def config(**changes: Any) -> Config:
    return parse_config(BASE | changes)


@pytest.mark.parametrize("gain", [-0.1, 1.1, True])
def test_a_gain_is_a_fraction(gain: Any) -> None:
    with pytest.raises(ConfigError, match="key 'gain'"):
        config(gain=gain)


def test_a_config_says_which_fraction_of_peers_has_a_twin() -> None:
    *_, last = Simulation.of(config()).rounds()
    assert [int(gain.peer) for gain in last.gains] == choose_twins(0.25, 8, 0)
    assert len(last.gains) == 2
    *_, last = Simulation.of(config(gain=0)).rounds()
    assert not last.gains


def test_a_simulation_writes_what_its_peers_gain(tmp_path: Path) -> None:
    results = Results(tmp_path / "out", "simulate", exact=True)
    written = simulate(Simulation.of(config(test_every=2)), results)
    assert tmp_path / "out" / "gain.json" in written
    table = json.loads((tmp_path / "out" / "gain.json").read_text())
    assert table["swarm"]["peers"] == 8
    assert table["swarm"]["accuracy"]["count"] == 2
    assert [each["peer"] for each in table["peers"]] == [str(p) for p in choose_twins(0.25, 8, 0)]
    records = list(read_records(tmp_path / "out" / "metrics.jsonl"))
    alone = [record for record in records if "alone_accuracy" in record]
    assert [(record["round"], record["peer"]) for record in alone] == [
        (round, each["peer"]) for round in (2, 4) for each in table["peers"]
    ]
    for record, each in zip(alone[-2:], table["peers"], strict=True):
        difference = record["accuracy"] - record["alone_accuracy"]
        assert each["accuracy"]["mean"] == pytest.approx(difference)


def test_virtual_time_trains_a_twin_as_often_as_its_peer() -> None:
    changes: dict[str, Any] = {"time": {"training": "lognormal:1:0.5", "stragglers": 0.25}}
    run = LearningSimulation(config(**changes))
    run.run()
    plain = LearningSimulation(config(gain=0, **changes))
    plain.run()
    for one, other in zip(run.members, plain.members, strict=True):
        assert torch.equal(one.network.flat, other.network.flat)
    chosen = choose_twins(0.25, 8, 0)
    assert [gain.peer for gain in run.gains] == [str(peer) for peer in chosen]
    for peer, gain in zip(chosen, run.gains, strict=True):
        alone = Simulation.of(config(gain=0)).members[peer].learner
        alone.train(run.rounds[peer])
        assert run.rounds[peer] > 0
        assert gain.alone_loss == pytest.approx(alone.test().mean_loss, rel=1e-3)


def test_peers_that_left_are_not_compared() -> None:
    changes: dict[str, Any] = {"time": {"churn": {"leave": 0.3, "arrive": 0.0}}, "rounds": 10}
    run = LearningSimulation(config(gain=1, **changes))
    run.run()
    online = [
        str(peer) for peer, present in enumerate(run.world.present_at(run.seconds)) if present
    ]
    assert [gain.peer for gain in run.gains] == online
    assert len(online) < 8


command = runs(
    "simulate",
    some='peers = 8\nrounds = 2\ngain = 0.25\n[data]\nsamples = 30\n[[models]]\nname = "global"\nshare = 1.0',
)


def test_the_command_prints_the_mean_gain(command: Run) -> None:
    result = command("some.toml", "--out", "out")
    assert result.code == 0
    assert "what peers gain by taking part: accuracy " in result.out
    assert "2 of 8 peers" in result.out


def test_fednp_has_no_lone_twin() -> None:
    with pytest.raises(
        ConfigError, match="key 'gain': not with fednp: a peer that trains with FedNP"
    ):
        Simulation.of(config(fednp={}))


def test_a_sweep_of_the_gain_is_refused() -> None:
    runs = [config(gain=gain) for gain in (0.1, 0.2)]
    with pytest.raises(ConfigError, match=r"key 'sweep.gain': .* a sweep does not measure it"):
        refuse_unused_axes({"gain": [0.1, 0.2]}, runs)


def test_a_comparison_has_its_own_peers_that_train_alone() -> None:
    with pytest.raises(ConfigError, match=r"key 'gain': .*method local"):
        warn_unused_keys(parse_comparison({"gain": 0.1}), "compare")


# --- live swarms ------------------------------------------------------------------------------------


def test_live_peers_have_the_twins_that_simulated_ones_have(tmp_path: Path) -> None:
    spec = plan(config(), tmp_path / "out", BrokerAddress("mqtt://127.0.0.1:1"))
    chosen = choose_twins(0.25, 8, 0)
    assert [peer.settings.gain for peer in spec.peers] == [float(p in chosen) for p in range(8)]


def test_lone_twins_and_differential_privacy_exclude_each_other(tmp_path: Path) -> None:
    private = config(trust={"dp": {"clip": 1.0, "noise": 1.0}})
    with pytest.raises(ConfigError, match=r"key 'gain': .*'trust.dp'.*leave out one of them"):
        plan(private, tmp_path / "out", BrokerAddress("mqtt://127.0.0.1:1"))


@pytest.mark.live
def test_a_live_swarm_says_what_its_peers_gain(
    tmp_path: Path, empty_broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(peers=3, rounds=3, gain=0.6, gossip={"per_process": 3})
    broker = nullcontext(BrokerAddress(empty_broker.url))
    outcome = run_live(settings, tmp_path / "out", broker, quiet=True)
    assert outcome.gain is not None
    assert outcome.gain.accuracy.count == 2
    for peer in choose_twins(0.6, 3, 0):
        report = json.loads((tmp_path / "out" / f"{peer}.report.json").read_text())
        alone = Simulation.of(settings).members[peer].learner
        alone.train(3)
        assert report["gain"]["alone_accuracy"] == alone.test().accuracy
    table = json.loads((tmp_path / "out" / "outcome.json").read_text())
    assert table["gain"]["accuracy"]["mean"] == outcome.gain.accuracy.mean
    print_outcome(settings, outcome)
    assert "what peers gain by taking part" in capsys.readouterr().out


def test_the_seed_chooses_a_fraction_of_the_peers_and_at_least_one() -> None:
    assert choose_twins(0.0, 16, 0) == []
    assert len(choose_twins(0.1, 16, 0)) == 2
    assert len(choose_twins(0.01, 16, 0)) == 1
    assert choose_twins(1.0, 5, 0) == list(range(5))
    assert len({tuple(choose_twins(0.1, 16, seed)) for seed in range(10)}) > 5
    counts = np.bincount([peer for seed in range(500) for peer in choose_twins(0.25, 8, seed)])
    assert stats.chisquare(counts).pvalue > 0.001
