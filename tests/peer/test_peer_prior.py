"""Live peers average totals of their class counts, and so know the log-priors that a simulation computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peer_kit import Nest, begin, quick
from waiting import until

from gossamer.gossip import ONE
from gossamer.models import SgdLearner, SlicedNetwork, log_priors, mlp
from gossamer.peer import PeerError
from gossamer.peer.engine import Engine
from gossamer.peer.lifecycle import Report

NAMES = tuple("abcde")
CLASSES = 3
COUNTS = np.array([[20, 5, 5], [3, 18, 9], [2, 2, 26], [10, 10, 10], [27, 3, 0]])


def make(name: str, counts: np.ndarray = COUNTS) -> SgdLearner:
    """A learner with as many samples of each class as `counts` says."""
    row = counts[NAMES.index(name)]
    labels = torch.from_numpy(np.repeat(np.arange(CLASSES), row))
    inputs = torch.nn.functional.one_hot(labels, 4).float()
    network = SlicedNetwork(mlp(f"4={CLASSES}"), {"all": 1.0}, peer=name, rest=None, seed=0)
    return SgdLearner(network, (inputs, labels), (inputs, labels), local_samples=8, rate=0.1)


def check_accounts(reports: list[Report]) -> None:
    """Check that the weight of every partial model, and of the class counts, adds up."""
    for model in reports[0].weight:
        held, on_its_way, injected = np.sum([report.weight[model] for report in reports], axis=0)
        assert held + on_its_way == injected > 0


@pytest.mark.parametrize("mode", ["async", "rounds", "server"])
@pytest.mark.parametrize("weights", ["peers", "samples"])
def test_peers_know_the_priors_of_a_simulation(run, mode: str, weights: str) -> None:
    learners = {name: make(name) for name in NAMES}
    expected = log_priors(COUNTS, "auto")
    assert expected is not None

    def is_close(name: str) -> bool:
        prior = learners[name].log_prior
        row = expected[NAMES.index(name)]
        return prior is not None and np.allclose(prior.numpy(), row, atol=0.02)

    async def scenario() -> list[Report]:
        endless = mode == "async"
        settings = quick(
            rounds=10**6 if endless else 4, expect=NAMES, prior="auto", mode=mode, weights=weights,
            servers={"all": "a"} if mode == "server" else {}, settle_tolerance=1e-2,
        )  # fmt: skip
        nest = Nest(settings)
        for name, learner in learners.items():
            nest.start(name, learner, samples=int(COUNTS[NAMES.index(name)].sum()))
        if not endless:
            return await nest.all()
        await until(lambda: all(map(is_close, NAMES)))
        return await nest.finish(3)

    reports = run(scenario())
    if mode != "async":
        assert all(map(is_close, NAMES))
    check_accounts(reports)


def test_equal_shares_give_no_prior(run) -> None:
    learners = {name: make(name, np.full((5, 3), 10)) for name in NAMES}

    async def scenario() -> list[Report]:
        nest = Nest(quick(rounds=4, expect=NAMES, prior="auto", mode="rounds"))
        for name, learner in learners.items():
            nest.start(name, learner)
        return await nest.all()

    check_accounts(run(scenario()))
    assert all(learner.log_prior is None for learner in learners.values())


def test_a_restart_goes_on_with_the_counts_that_it_knew(tmp_path: Path) -> None:
    settings = quick(prior="auto", rounds=20)
    engine = begin(Engine("a", make("a"), settings, checkpoint=tmp_path / "x"))
    engine.begin_round()
    engine.train()
    assert engine.save()
    again = Engine("a", make("a"), settings, checkpoint=tmp_path / "x")
    assert again.gossiper.account("class-counts") == engine.gossiper.account("class-counts")
    assert again.gossiper.account("class-counts").held == ONE
    value = again.gossiper.value("class-counts")
    assert np.array_equal(value, engine.gossiper.value("class-counts"))
    assert value[3:].tolist() == COUNTS[0].tolist()


def test_own_needs_nobody_else() -> None:
    learner = make("b")
    engine = Engine("b", learner, quick(prior="own"))
    expected = log_priors(COUNTS[1:2], "own")
    assert expected is not None
    assert learner.log_prior is not None
    np.testing.assert_allclose(learner.log_prior.numpy(), expected[0], rtol=1e-6)
    assert "class-counts" not in engine.gossiper.models


def test_a_learner_without_classes_is_refused() -> None:
    network = SlicedNetwork(mlp("4=1"), {"all": 1.0}, peer="a", rest=None, seed=0)
    inputs, targets = torch.rand(8, 4), torch.rand(8)
    learner = SgdLearner(
        network, (inputs, targets), (inputs, targets),
        loss=lambda out, y: (out[:, 0] - y).square(),
    )  # fmt: skip
    with pytest.raises(PeerError, match="one output for each class"):
        Engine("a", learner, quick(prior="auto"))
