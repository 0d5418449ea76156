"""Stacked training is a loop over learners, to rounding: networks, losses, optimizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stack_kit import OPTIMIZERS, assert_same, associators, perceptrons, pictures
from torch import Tensor, nn

from gossamer.experiments.arena import Arena
from gossamer.models import IsCorrect, Learner, SgdLearner


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_perceptron_after_many_steps(optimizer: str) -> None:
    # 10 local samples in batches of 4, 4 and 2: 3 steps a round.
    assert_same(lambda: perceptrons(optimizer=OPTIMIZERS[optimizer]), rounds=6)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
@pytest.mark.parametrize(
    ("activation", "output"),
    [
        ("sigmoid", "sigmoid"),
        ("tanh", "none"),
        ("relu", "none"),
        ("prelu", "none"),
        ("none", "prelu"),
    ],
)
def test_every_activation_and_loss(activation: str, output: str, loss: str, reduction: str) -> None:
    assert_same(
        lambda: perceptrons(
            3, activation=activation, output=output, loss=loss, reduction=reduction, rate=0.05
        ),
        rounds=4,
    )


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_one_output_is_a_yes_or_no(loss: str) -> None:
    assert_same(lambda: perceptrons(4, "6=5=1", loss=loss, level="6-5-1"), rounds=12)


def with_priors(learners: list[Learner]) -> list[Learner]:
    """Give every learner but the second a strong log-prior of its own."""
    for index, learner in enumerate(learners):
        if index != 1:
            assert isinstance(learner, SgdLearner)
            learner.log_prior = Tensor([0.0, -2.0, 1.0, 0.5]).roll(index)
    return learners


@pytest.mark.parametrize("optimizer", ["plain", "momentum", "adam"])
@pytest.mark.parametrize("layout", ["6=8=5=4", "300=120=4"])
@pytest.mark.parametrize("peers", [1, 4])
def test_peers_with_and_without_priors_share_a_stack(
    optimizer: str, layout: str, peers: int
) -> None:
    def make() -> list[Learner]:
        return with_priors(
            perceptrons(
                peers, layout, output="none", loss="cross-entropy", rate=0.02, reduction="mean",
                local_samples=50, batch=20, optimizer=OPTIMIZERS[optimizer],
            )
        )  # fmt: skip

    # Adam divides by the size of gradients, and so enlarges the rounding of small ones, without priors too.
    assert_same(make, 8, tolerance=1e-4 if optimizer == "adam" else 1e-5, stacked=peers)


def test_priors_of_networks_with_an_output_activation() -> None:
    options = {"output": "sigmoid", "loss": "cross-entropy"}
    assert_same(lambda: with_priors(perceptrons(4, **options)), rounds=12)


@pytest.mark.parametrize("right", [None, lambda out, y: out.argmax(1) == y])
def test_priors_of_networks_that_are_no_chains(right: IsCorrect | None) -> None:
    assert_same(lambda: with_priors(pictures(right=right)), rounds=8)


def test_a_prior_that_is_set_in_the_stack_counts_from_then_on() -> None:
    learners = perceptrons(4, output="none", loss="cross-entropy")
    arena = Arena(learners, threads=1)
    before = arena.test()
    with_priors(learners)
    after = arena.test()
    assert after[1] == before[1]
    for learner, old, new in zip(learners, before, after, strict=True):
        assert new.loss == pytest.approx(learner.test().loss, rel=1e-5)
        assert learner is learners[1] or new.loss != pytest.approx(old.loss, rel=1e-3)


def test_large_peers_train_one_by_one_in_place() -> None:
    assert_same(
        lambda: perceptrons(3, "300=120=4", optimizer=OPTIMIZERS["momentum"], rate=0.05), rounds=8
    )
    assert_same(lambda: perceptrons(3, "300=120=4", rate=0.05), rounds=12)


@pytest.mark.parametrize("layout", ["6=8=5=4", "6=40=4", "300=120=4"])
@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_batches_that_are_larger_than_layers(layout: str, loss: str) -> None:
    # Then narrow layers are multiplied transposed; 20, 20 and 10 samples are both sides of it.
    for optimizer in (None, OPTIMIZERS["momentum"]):
        assert_same(
            lambda o=optimizer: perceptrons(
                3, layout, loss=loss, local_samples=50, batch=20, reduction="mean", optimizer=o
            ),
            rounds=4,
        )


def test_narrow_layers_without_bias() -> None:
    def module() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))

    assert_same(
        lambda: perceptrons(4, "6=8=4", make=module, local_samples=40, batch=20, rate=0.01),
        rounds=12,
    )


def test_layers_without_bias_and_nested_chains() -> None:
    def module() -> nn.Module:
        last = nn.Sequential(nn.Linear(8, 4), nn.Identity())
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), last)

    assert_same(lambda: perceptrons(4, "6=8=4", make=module), rounds=20)


@pytest.mark.parametrize("optimizer", ["plain", "momentum", "adam"])
def test_a_small_cnn_after_many_steps(optimizer: str) -> None:
    assert_same(lambda: pictures(optimizer=OPTIMIZERS[optimizer]), rounds=12)


def test_a_loss_of_ones_own_under_vmap() -> None:
    def steep(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs[:, 0] - labels).abs().pow(1.5)

    assert_same(lambda: perceptrons(4, loss=steep, rate=0.01), rounds=20)


def test_the_associative_network_after_a_hundred_vectors() -> None:
    assert_same(associators, rounds=20)


def test_the_kernel_runs_without_torchscript_too() -> None:
    code = (
        "from stack_kit import perceptrons\n"
        "from gossamer.experiments.arena import Arena\n"
        "from gossamer.models.stack import engines\n"
        "assert not hasattr(engines.descend, 'graph')\n"
        "for layout in ('6=8=5=4', '300=120=4'):\n"
        "    learners = perceptrons(3, layout); list(Arena(learners).run(3))\n"
        "    print(*(float(learner.network.flat.double().norm()) for learner in learners))"
    )
    folder = Path(__file__).parent
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder, env=os.environ | {"PYTORCH_JIT": "0"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    plain = [float(word) for word in answer.stdout.split()]
    scripted: list[float] = []
    for layout in ("6=8=5=4", "300=120=4"):
        learners = perceptrons(3, layout)
        list(Arena(learners).run(3))
        scripted += [float(learner.network.flat.double().norm()) for learner in learners]
    assert plain == pytest.approx(scripted, rel=1e-6)
