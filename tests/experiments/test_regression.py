"""Targets that are no classes, losses and scores of one's own, in a stack too; and peers without data."""

from __future__ import annotations

from math import isnan
from typing import Any

import numpy as np
import pytest
import torch
from stack_kit import assert_same
from torch import Tensor, nn

from gossamer.experiments.arena import Arena
from gossamer.experiments.data import DataError, Dataset, from_torch, samples
from gossamer.models import Metrics, ModelError, SgdLearner, SlicedNetwork, mlp

torch.set_num_threads(1)


def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def distances(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(dim=1)


def near(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs() < 0.3


def logistic(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.softplus(outputs[:, 0]) - labels * outputs[:, 0]


def above_zero(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs[:, 0] > 0) == labels


def planes(peer: int, count: int = 20, targets: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 3, generator=torch.Generator().manual_seed(peer))
    y = x.sum(dim=1)
    return x, torch.stack([y] * targets, 1) if targets else y


def learners(peers: int = 3, outputs: int = 1, targets: int = 0, **options: Any) -> list[Any]:
    options = {"local_samples": 20, "batch": 5, "rate": 0.02, "loss": distance} | options
    found = []
    for peer in range(peers):
        module = mlp(f"3=8={outputs}", activation="tanh", output="none")
        network = SlicedNetwork(module, {"all": f"3-8-{outputs}"}, peer=str(peer), seed=1)
        train, test = planes(peer, 20, targets), planes(99, 13 + peer, targets)
        found.append(SgdLearner(network, train, test, seed=peer, **options))
    return found


def test_a_stack_learns_numbers_as_the_learners_themselves_do() -> None:
    mine, alone = learners(), learners(1)[0]
    arena = Arena(mine)
    assert "3 learners in 1 stack" in repr(arena)
    rounds = list(arena.run(30))
    assert rounds[-1].loss < rounds[0].loss / 3
    assert rounds[-1].loss == pytest.approx(
        np.mean(
            [float(distance(o.network(o.held_out[0]), o.held_out[1]).detach().mean()) for o in mine]
        )
    )
    assert isnan(rounds[-1].accuracy)  # nothing is right or wrong
    metrics = alone.train(2)
    assert isnan(metrics.accuracy)
    assert metrics.mean_loss > 0
    twin = learners(1)
    list(Arena(twin, every=2).run(1))
    torch.testing.assert_close(twin[0].network.flat, alone.network.flat, rtol=0, atol=1e-5)


def test_several_targets_and_a_score_of_ones_own() -> None:
    several = learners(outputs=2, targets=2, loss=distances)
    *_, last = Arena(several).run(20)
    assert last.loss < 0.2
    assert_same(lambda: learners(right=near), 5)


def test_a_logit_is_scored_as_the_user_says() -> None:
    """By default a single output says yes above one half, which is no logit's threshold."""

    def make(right: Any) -> list[Any]:
        return [
            SgdLearner(
                one.network,
                (one.samples[0], (one.samples[1] > 1.5).long()),
                (one.held_out[0], (one.held_out[1] > 1.5).long()),
                loss=logistic,
                right=right,
                local_samples=20,
                rate=0.05,
            )
            for one in learners()
        ]

    scored = make(above_zero)
    *_, last = Arena(scored).run(10)
    for one, test in zip(scored, last.tests, strict=True):
        outputs, labels = one.network(one.held_out[0]), one.held_out[1]
        assert test.correct == int(((outputs[:, 0] > 0) == labels).sum()) == one.test().correct
    assert_same(lambda: make(above_zero), 3)
    # A built-in loss may be scored otherwise too.
    assert_same(lambda: learners_of_classes(right=lambda o, y: o[:, 0] == o[:, 0]), 2)


def learners_of_classes(**options: Any) -> list[Any]:
    return [
        SgdLearner(
            one.network, (one.samples[0], (one.samples[1] > 1.5).long()),
            (one.held_out[0], (one.held_out[1] > 1.5).long()), local_samples=20, **options,
        )
        for one in learners()
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss": "squared"}, r"labels must be int64 .* need a loss of your own, as in loss=lambda"),
        ({"loss": lambda o, y: distance(o, y).mean()}, r"one number for each sample, so shape \(2,\)"),
        ({"loss": lambda o, y: (o - y).square()}, r"outputs \(2, 1\) and targets \(2,\), not \(2, 2\)"),
        ({"loss": lambda o, y: (o[:, :1] @ y).square()}, "the loss failed on outputs"),
        ({"loss": lambda o, y: 0.0}, "not float; as in"),
    ],
)  # fmt: skip
def test_a_loss_that_does_not_fit_is_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=f"peer '0', training samples: .*{text}") as error:
        learners(**options)
    assert "\n" not in str(error.value)


def test_targets_are_of_the_networks_kind() -> None:
    one = learners(1)[0]
    x, y = one.samples
    with pytest.raises(ModelError, match=r"targets must be torch.float32, as the network is"):
        SgdLearner(one.network, (x, y.double()), one.held_out, loss=distance)


def test_samples_keep_numbers_that_are_no_classes() -> None:
    found = samples(np.zeros((3, 2)), np.array([0.7, 1.9, -0.5]))
    assert found.y.tolist() == pytest.approx([0.7, 1.9, -0.5])
    assert found.take([2, 0]).y.tolist() == pytest.approx([-0.5, 0.7])
    whole = samples([[0, 1], [1, 0]], [1.0, 0.0])
    assert (whole.y.dtype, whole.y.tolist()) == (torch.int64, [1, 0])
    read = from_torch([(torch.rand(2), 0.7), (torch.rand(2), torch.tensor([1.9]))])
    assert read.y.tolist() == pytest.approx([0.7, 1.9])
    with pytest.raises(DataError, match="plane: train labels are not whole numbers"):
        Dataset("plane", found, None, classes=2)
    with pytest.raises(DataError, match="the label of sample 1 is not finite"):
        samples(np.zeros((2, 2)), np.array([0.0, np.nan]))
    with pytest.raises(DataError, match="has shape"):
        from_torch([(torch.rand(2), 0.7), (torch.rand(2), torch.tensor([1.9, 2.0]))])


# Peers without data


def test_a_peer_without_test_samples_is_left_out_of_the_mean() -> None:
    some = learners_of_classes()
    bare = some[1]
    bare.held_out = (bare.held_out[0][:0], bare.held_out[1][:0])
    *_, last = Arena(some).run(2)
    assert isnan(last.tests[1].accuracy)
    assert isnan(bare.test().accuracy)
    tested = [last.tests[0].accuracy, last.tests[2].accuracy]
    assert last.accuracy == pytest.approx(np.mean(tested))
    assert last.loss == pytest.approx(np.mean([last.tests[0].mean_loss, last.tests[2].mean_loss]))


def test_a_peer_without_training_samples_relays() -> None:
    first, relay = learners_of_classes()[:2]
    nothing = (relay.samples[0][:0], relay.samples[1][:0])
    relay = SgdLearner(relay.network, nothing, relay.held_out, local_samples=20)
    before = relay.network.flat.clone()
    assert relay.train(3) == Metrics()
    assert torch.equal(relay.network.flat, before)
    *_, last = Arena([first, relay]).run(2)
    assert torch.equal(first.network.flat, relay.network.flat)  # all is shared
    assert not torch.equal(relay.network.flat, before)
    assert last.tests[1].samples == len(relay.held_out[1])
