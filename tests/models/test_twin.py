"""Lone twins: copies of learners that train alone, and their comparison with the peers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from copy import deepcopy
from math import isnan, nan
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from gossamer.models import (
    Adam,
    AssociativeLearner,
    AssociativeNetwork,
    Difference,
    Gain,
    Learner,
    LoneTwin,
    Metrics,
    ModelError,
    SgdLearner,
    SlicedNetwork,
    SwarmGain,
    average,
    draws_twin,
    mlp,
    sparse_vectors,
)
from gossamer.models.fednp import FedNPLearner, FedNPOptions


def sgd(peer: str = "0", module: nn.Module | None = None, **options: Any) -> SgdLearner:
    network = SlicedNetwork(
        module or mlp("6=8=4"), {"global": 1.0}, peer=peer, seed=None if module else 3
    )
    random = torch.Generator().manual_seed(int(peer))
    x, y = torch.rand(30, 6, generator=random), torch.randint(0, 4, (30,), generator=random)
    options = {"local_samples": 12, "batch": 5, "rate": 0.2, "seed": 1} | options
    return SgdLearner(network, (x[:20], y[:20]), (x[20:], y[20:]), **options)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def associator() -> AssociativeLearner:
    network = SlicedNetwork(AssociativeNetwork("50<>20"), {"global": "50-12"}, seed=3)
    _, partial, expected = sparse_vectors(100, 12)
    return AssociativeLearner(network, sparse_vectors(0, 6)[0], (partial, expected))


LEARNERS: dict[str, Callable[[], Learner]] = {
    "plain": sgd,
    "momentum": lambda: sgd(optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "adam": lambda: sgd(optimizer=lambda p: Adam(p, 0.01)),
    "proximal": lambda: sgd(proximal=0.1),
    "batch norm": lambda: sgd(module=normed()),
    "scheduled": lambda: sgd(optimizer="AdamW", scheduler={"name": "StepLR", "step_size": 2}),
    "associative": associator,
}


@pytest.mark.parametrize("kind", LEARNERS)
def test_a_twin_is_the_peer_that_trains_alone(kind: str) -> None:
    peer, alone = LEARNERS[kind](), LEARNERS[kind]()
    twin = LoneTwin(peer)
    for _ in range(4):
        peer.train(2)
        with torch.no_grad():  # what averaging does to the peer
            peer.network.flat.mul_(0.5)
        twin.train(2)
        alone.train(2)
    assert torch.equal(twin.alone.network.flat, alone.network.flat)
    assert twin.alone.test() == alone.test()
    assert twin.trainings == 4
    assert not torch.equal(peer.network.flat, alone.network.flat)


@pytest.mark.parametrize("kind", LEARNERS)
def test_a_peer_trains_the_same_with_and_without_a_twin(kind: str) -> None:
    peer, other = LEARNERS[kind](), LEARNERS[kind]()
    twin = LoneTwin(peer)
    for _ in range(3):
        assert peer.train(1) == other.train(1)
        twin.train(1)
        twin.gain()
        assert torch.equal(peer.network.flat, other.network.flat)


def test_dropout_of_a_twin_does_not_change_the_random_numbers_of_its_peer() -> None:
    def make() -> SgdLearner:
        torch.manual_seed(0)
        return sgd(module=nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 4)))

    peer = make()
    twin = LoneTwin(peer)
    for _ in range(2):
        peer.train(1)
        twin.train(1)
    other = make()
    other.train(1)
    other.train(1)
    assert torch.equal(peer.network.flat, other.network.flat)


def test_a_twin_shares_samples_and_nothing_else() -> None:
    peer = sgd(optimizer=lambda p: Adam(p, 0.01))
    peer.train(1)
    twin = LoneTwin(peer).alone
    assert isinstance(twin, SgdLearner)
    assert twin.samples[0] is peer.samples[0]
    assert twin.held_out[1] is peer.held_out[1]
    own, twins = peer.network, twin.network
    assert own.flat.untyped_storage().data_ptr() != twins.flat.untyped_storage().data_ptr()
    assert twin.generator is not peer.generator
    states = [learner.optimizer.state_dict()["state"][0]["exp_avg"] for learner in (peer, twin)]
    assert torch.equal(*states)
    assert states[0].data_ptr() != states[1].data_ptr()


def test_averaging_the_swarm_has_no_partial_model_of_a_twin() -> None:
    peer, other = sgd("0"), sgd("1")
    twin = LoneTwin(peer)
    other.train(1)
    before = twin.alone.network.flat.clone()
    assert "global" not in twin.alone.network.averaged_models
    average([peer.network, other.network, twin.alone.network])
    assert torch.equal(twin.alone.network.flat, before)


@pytest.mark.parametrize("kind", LEARNERS)
def test_a_restored_twin_continues_where_it_stopped(kind: str) -> None:
    peer = LEARNERS[kind]()
    twin = LoneTwin(peer)
    twin.train(1)
    state = deepcopy(twin.state())
    restarted = LoneTwin(LEARNERS[kind]())
    restarted.restore(state)
    for each in (twin, restarted):
        each.train(1)
    assert torch.equal(twin.alone.network.flat, restarted.alone.network.flat)
    assert twin.trainings == restarted.trainings == 2


# --- learners that cannot have a twin ---------------------------------------------------------------


class Custom:
    """A user's own learner: every round adds `step` to its network, and its test is a constant."""

    def __init__(self, network: SlicedNetwork):
        self.network = network

    def train(self, steps: int) -> Metrics:
        self.network.flat += steps
        return Metrics(0.0, 0, 1)

    def test(self) -> Metrics:
        return Metrics(float(self.network.flat[0]), 1, 2)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def test_a_learner_that_cannot_test_sample_by_sample_has_a_gain_without_interval() -> None:
    learner = Custom(SlicedNetwork(mlp("2=2"), {}, seed=0))
    learner.network.flat.zero_()
    twin = LoneTwin(learner)
    learner.train(3)
    twin.train(2)
    gain = twin.gain()
    assert gain.loss == Difference(0.5, None, 2)
    assert gain.accuracy == Difference(0.0, None, 2)
    assert (gain.alone_loss, gain.alone_accuracy) == (1.0, 0.5)


def test_a_learner_that_cannot_be_copied_is_refused_in_one_line() -> None:
    learner = Custom(SlicedNetwork(mlp("2=2"), {}, peer="ann", seed=0))
    learner.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(
        ModelError, match=r"peer 'ann': .*cannot be copied .*leave out `gain`"
    ) as error:
        LoneTwin(learner)
    assert "\n" not in str(error.value)


def test_a_copy_that_trains_the_peer_itself_is_detected() -> None:
    learner = Custom(SlicedNetwork(mlp("2=2"), {}, peer="ann", seed=0))
    train = learner.train
    learner.train = lambda steps: train(steps)  # type: ignore[method-assign]
    twin = LoneTwin(learner)
    with pytest.raises(ModelError, match=r"peer 'ann': .*changed the peer's own network"):
        twin.train(1)


def test_a_learner_that_needs_other_peers_is_refused() -> None:
    learner = FedNPLearner(sgd(), FedNPOptions(), counting_peer=True)
    with pytest.raises(ModelError, match="FedNPLearner learns together with other peers"):
        LoneTwin(learner)


# --- which peers have one ---------------------------------------------------------------------------


def test_a_peer_that_does_not_know_the_others_draws_by_its_name() -> None:
    drawn = [draws_twin(0.1, "garden", f"device-{number}") for number in range(2000)]
    assert stats.binomtest(sum(drawn), 2000, 0.1).pvalue > 0.001
    assert drawn == [draws_twin(0.1, "garden", f"device-{number}") for number in range(2000)]
    assert drawn != [draws_twin(0.1, "yard", f"device-{number}") for number in range(2000)]
    assert not any(draws_twin(0.0, "garden", str(number)) for number in range(100))
    assert all(draws_twin(1.0, "garden", str(number)) for number in range(100))


# --- intervals --------------------------------------------------------------------------------------


def test_the_interval_is_that_of_the_paired_t_test() -> None:
    random = np.random.default_rng(0)
    own, alone = random.normal(0.3, 1, 40), random.normal(0, 2, 40)
    difference = Difference.of(own - alone)
    expected = stats.ttest_rel(own, alone).confidence_interval(0.95)
    assert difference.mean == pytest.approx((own - alone).mean())
    assert difference.interval == pytest.approx((expected.low, expected.high))
    assert difference.count == 40


def test_the_interval_contains_the_mean_in_95_of_100_cases() -> None:
    random = np.random.default_rng(1)
    intervals = [Difference.of(random.normal(1.0, 3.0, 4)).interval for _ in range(4000)]
    covered = sum(each is not None and each[0] <= 1.0 <= each[1] for each in intervals)
    assert stats.binomtest(covered, 4000, 0.95).pvalue > 0.001


def test_a_peer_is_compared_sample_by_sample() -> None:
    peer = sgd()
    twin = LoneTwin(peer)
    peer.train(3)
    gain = twin.gain()
    module, alone = peer.network.module, twin.alone.network.module
    inputs, labels = peer.held_out

    def scores(module: nn.Module) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            outputs = module(inputs)
        loss = nn.functional.cross_entropy(outputs, labels, reduction="none")
        return loss, (outputs.argmax(dim=1) == labels).double()

    for own, twins, difference in zip(
        scores(module), scores(alone), (gain.loss, gain.accuracy), strict=True
    ):
        expected = stats.ttest_rel(own.double(), twins.double()).confidence_interval(0.95)
        assert difference.interval == pytest.approx((expected.low, expected.high), abs=1e-6)
    assert gain.accuracy.mean == pytest.approx(peer.test().accuracy - twin.alone.test().accuracy)
    assert gain.loss.mean == pytest.approx(peer.test().mean_loss - twin.alone.test().mean_loss)
    assert gain.alone_accuracy == pytest.approx(twin.alone.test().accuracy)


def test_regression_has_a_gain_in_loss_alone() -> None:
    network = SlicedNetwork(mlp("3=1"), {}, seed=0)
    x = torch.rand(20, 3)
    data = (x, x.sum(dim=1))
    learner = SgdLearner(network, data, data, loss=lambda out, y: (out[:, 0] - y).square())
    twin = LoneTwin(learner)
    learner.train(1)
    gain = twin.gain()
    assert gain.loss.mean < 0
    assert isnan(gain.accuracy.mean)
    assert gain.accuracy.interval is None
    swarm = SwarmGain.of([gain], 4)
    assert str(swarm).startswith("loss -")


def test_a_peer_without_test_samples_has_no_gain() -> None:
    network = SlicedNetwork(mlp("3=2"), {}, seed=0)
    x, y = torch.rand(4, 3), torch.tensor([0, 1, 0, 1])
    gain = LoneTwin(SgdLearner(network, (x, y), (x[:0], y[:0]))).gain()
    assert isnan(gain.accuracy.mean)
    assert isnan(gain.alone_loss)
    text = str(SwarmGain.of([gain], 3))
    assert text == "unknown, as no peer with a lone twin was tested"


def gain_of(accuracy: float, loss: float, count: int = 10) -> Gain:
    return Gain("0", Difference(accuracy, None, count), Difference(loss, None, count), 0.5, 1.0)


def test_the_swarms_interval_is_over_peers() -> None:
    accuracy, loss = [0.02, 0.05, 0.03], [-0.1, -0.2, -0.3]
    gains = [gain_of(*each) for each in zip(accuracy, loss, strict=True)]
    gain = SwarmGain.of([*gains, gain_of(nan, nan, 0)], 16)  # the last has no test samples
    expected = stats.t.interval(0.95, 2, np.mean(accuracy), stats.sem(accuracy))
    assert gain.accuracy.interval == pytest.approx(expected)
    assert str(gain) == (
        "accuracy +0.033 (95 % interval -0.005 … +0.071), loss -0.200 (95 % interval -0.448 … +0.048); "
        "3 of 16 peers"
    )


def test_one_peer_has_no_interval() -> None:
    gain = SwarmGain.of([gain_of(0.041, -0.12)], 16)
    assert gain.accuracy.interval is None
    assert str(gain) == (
        "accuracy +0.041, loss -0.120; 1 of 16 peers: no interval can be given for one peer"
    )


def test_the_loss_of_a_twin_that_diverged_is_not_left_out_of_the_mean() -> None:
    gain = SwarmGain.of([gain_of(0.1, -0.1), gain_of(0.3, nan)], 16)
    assert isnan(gain.loss.mean)
    assert gain.loss.interval is None
    assert gain.accuracy.count == 2


@pytest.mark.parametrize("interval", [None, (-0.1, 0.3)])
def test_a_gain_survives_json(interval: tuple[float, float] | None) -> None:
    gain = Gain("ann", Difference(0.1, interval, 20), Difference(-0.5, None, 20), 0.8, 1.0)
    assert Gain.from_dict(json.loads(json.dumps(gain.as_dict()))) == gain
