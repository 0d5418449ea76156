"""The arena is a loop of training and averaging, and nothing else."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.experiments.arena import Arena
from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.build import Member, Swarm
from gossamer.experiments.config.tables import parse_config
from gossamer.models import Metrics, ModelError, SgdLearner, SlicedNetwork, mlp

torch.set_num_threads(1)

TABLE: dict[str, Any] = {
    "peers": 4,
    "rounds": 3,
    "data": {"partition": "dirichlet", "alpha": 0.5, "test": 50},
    "tasks": [{"kind": "swap", "labels": [8, 9], "peers": 2}],
    "network": {"layout": "64=8=10", "activation": "tanh", "output": "sigmoid"},
    "training": {"local_samples": 60, "loss": "squared", "reduction": "sum"},
    "models": [
        {"name": "global", "layout": "64-4-5"},
        {"name": "{task}", "layout": "0-2-5", "depends": ["global"]},
    ],
}


def simulation(**changes: Any) -> Simulation:
    return Simulation.of(parse_config(TABLE | changes))


def by_hand(members: list[Member], rounds: int, every: int, shares: list[float]) -> list[Any]:
    """Algorithm 1 in the plainest words: train, then the mean of what each model owns."""
    history = []
    for _ in range(rounds):
        for member in members:
            for _ in range(every):
                member.learner.train(1)
        owners = {owner for member in members for owner in member.network.averaged_models}
        for owner in owners:
            group = [i for i, m in enumerate(members) if owner in m.network.averaged_models]
            rows = [members[i].network.read(owner).double().numpy() for i in group]
            mean = np.average(rows, axis=0, weights=[shares[i] for i in group])
            for i in group:
                members[i].network.write(owner, mean)
        history.append([member.learner.test() for member in members])
    return history


@pytest.mark.parametrize("weights", ["peers", "samples"])
@pytest.mark.parametrize("every", [1, 2])
def test_equals_a_loop_written_by_hand(weights: str, every: int) -> None:
    arena = simulation(weights=weights, every=every)
    tests = [round.tests for round in arena.rounds()]
    members = simulation().members
    counts = [float(m.samples) for m in members]
    assert len(set(counts)) > 1  # or weighting by samples would show nothing
    history = by_hand(members, 3, every, counts if weights == "samples" else [1.0] * 4)
    for mine, theirs in zip(arena.members, members, strict=True):
        torch.testing.assert_close(mine.network.flat, theirs.network.flat, rtol=0, atol=1e-6)
    assert [[t.correct for t in round] for round in tests] == [
        [t.correct for t in round] for round in history
    ]


def test_weights_change_the_result() -> None:
    flats = []
    for weights in ("peers", "samples"):
        run = simulation(weights=weights)
        list(run.rounds())
        flats.append(run.members[0].network.flat)
    assert not torch.equal(*flats)


def test_shared_values_are_equal_after_a_round_and_own_ones_are_not() -> None:
    run = simulation()
    next(run.rounds())
    networks = [member.network for member in run.members]
    for owner, group in {"global": range(4), "swap-8-9": (0, 1), "identity": (2, 3)}.items():
        values = [networks[index].read(owner) for index in group]
        assert all(torch.equal(values[0], value) for value in values)
    own = [network.flat[network.slicing.private.copy()] for network in networks]
    assert not torch.equal(own[0], own[1])


def test_every_trains_that_many_times_before_averaging() -> None:
    once, twice = simulation(every=1), simulation(every=2)
    assert next(once.rounds()).training[0].samples == 60
    assert next(twice.rounds()).training[0].samples == 120


@pytest.mark.parametrize(("test_every", "tested"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_tests_fall_where_asked_and_on_the_last_round(test_every: int, tested: list[int]) -> None:
    rounds = list(simulation(rounds=5, test_every=test_every).rounds())
    assert [round.index for round in rounds] == [1, 2, 3, 4, 5]
    assert [round.index for round in rounds if round.tests] == tested
    assert all(math.isnan(round.accuracy) != bool(round.tests) for round in rounds)
    assert all(len(round.training) == 4 for round in rounds)


def test_testing_does_not_change_what_is_learned() -> None:
    often, seldom = simulation(test_every=1), simulation(test_every=3)
    for run in (often, seldom):
        list(run.rounds())
    assert torch.equal(often.members[0].network.flat, seldom.members[0].network.flat)


def test_accuracy_is_the_mean_over_peers() -> None:
    last = list(simulation().rounds())[-1]
    assert last.accuracy == pytest.approx(np.mean([test.accuracy for test in last.tests]))
    assert len({test.accuracy for test in last.tests}) > 1


def test_one_seed_one_result() -> None:
    def run(seed: int) -> tuple[list[Metrics], torch.Tensor]:
        made = simulation(seed=seed)
        metrics = [test for round in made.rounds() for test in round.tests]
        return metrics, torch.stack([member.network.flat for member in made.members])

    first, second, other = run(1), run(1), run(2)
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
    assert first[0] != other[0]


def test_stopping_early_is_leaving_the_loop() -> None:
    run = simulation()
    rounds = run.rounds()
    next(rounds)
    after_one = run.members[0].network.flat.clone()
    rounds.close()  # type: ignore[attr-defined]
    assert torch.equal(run.members[0].network.flat, after_one)


def test_an_arena_needs_learners() -> None:
    with pytest.raises(ModelError, match="at least one learner"):
        Arena([])


@pytest.mark.parametrize(
    ("made", "argument", "remedy"),
    [
        (SgdLearner, "lr", "did you mean 'rate'?"),
        (SgdLearner, "batch_size", "did you mean 'batch'?"),
        (SgdLearner, "epochs", "did you mean 'local_samples'?"),
        (SlicedNetwork, "peers", "did you mean 'peer'?"),
        (Arena, "test_evry", "did you mean 'test_every'?"),
        (Arena, "rounds", "it has learners, every, weights, test_every"),
    ],
)
def test_an_unknown_argument_is_told_with_the_one_meant(
    made: type, argument: str, remedy: str
) -> None:
    message = f"{made.__name__} has no argument '{argument}'; {remedy}"
    with pytest.raises(TypeError, match=re.escape(message)):
        made(None, **{argument: 1})


def test_partial_models_beat_averaging_everything() -> None:
    """The demo's task in small: eight peers, each with a label swap of its own."""

    def accuracy(models: list[dict[str, str]]) -> float:
        config = parse_config(
            {
                "peers": 8,
                "rounds": 25,
                "test_every": 25,
                "data": {"samples": 60},
                "tasks": [{"kind": "swaps"}],
                "network": {"layout": "64=40=10", "activation": "tanh", "output": "sigmoid"},
                "training": {
                    "local_samples": 60,
                    "rate": 0.1,
                    "loss": "squared",
                    "reduction": "sum",
                },
                "models": models,
            }
        )
        members = Swarm(config).members()
        *_, last = Arena([m.learner for m in members], test_every=25).run(25)
        return last.accuracy

    partial = accuracy([{"name": "global", "layout": "64-36-0"}])
    everything = accuracy([{"name": "global", "layout": "64-40-10"}])
    assert partial > 0.65  # both learn; a tenth is guessing
    assert partial > everything + 0.03


def test_two_peers_of_one_name_are_refused() -> None:
    learners = [
        SgdLearner(
            SlicedNetwork(mlp("2=2"), {"g": "2-1"}, peer="ann"),
            (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)),
            (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)),
        )
        for _ in range(2)
    ]
    with pytest.raises(ModelError, match="two networks have the same peer name, 'ann'"):
        Arena(learners)
