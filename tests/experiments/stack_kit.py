"""Learners of every kind that the arena stacks, and the plain loop that it must agree with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.experiments.arena import Arena
from gossamer.models import (
    Adam,
    Anatomy,
    AssociativeLearner,
    AssociativeNetwork,
    Learner,
    ParameterMap,
    Part,
    Sgd,
    SgdLearner,
    SlicedNetwork,
    Start,
    dense_axes,
    mlp,
    sparse_vectors,
)

torch.set_num_threads(1)

Make = Callable[[], list[Learner]]


class SmallCnn(nn.Module):
    """Two channels of 3 × 3 on 6 × 6 pictures, then four classes."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.relu):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.out = nn.Linear(2 * 16, 4)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.conv(x)).flatten(1))

    def anatomy(self) -> Anatomy:
        parts = (Part("input", 1), Part("conv", 2), Part("out", 4))
        return Anatomy(
            parts,
            (
                ParameterMap("conv.weight", (2, 1, 3, 3), (*dense_axes(parts, 1, 0), None, None)),
                ParameterMap("conv.bias", (2,), dense_axes(parts, 1)),
                ParameterMap(
                    "out.weight",
                    (4, 32),
                    (dense_axes(parts, 2)[0], torch.arange(1, 3).repeat_interleave(16).numpy()),
                ),
                ParameterMap("out.bias", (4,), dense_axes(parts, 2)),
            ),
        )


def samples(
    seed: int, shape: tuple[int, ...], classes: int, count: int = 23
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, *shape, generator=generator)
    return inputs, torch.randint(0, classes, (count,), generator=generator)


def perceptrons(
    peers: int = 5,
    layout: str = "6=8=5=4",
    activation: str = "sigmoid",
    output: str = "sigmoid",
    name: str = "",
    level: str | float | None = None,
    make: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> list[Learner]:
    """Perceptrons with data of their own; settings as the learner takes them."""
    cells = [int(part) for part in layout.split("=")]
    usual = {"local_samples": 10, "batch": 4, "rate": 0.2, "loss": "squared", "reduction": "sum"}
    options = usual | options
    found: list[Learner] = []
    for index in range(peers):
        torch.manual_seed(index)  # a layer of one cell keeps the bias that torch draws
        module = make() if make else mlp(layout, activation=activation, output=output)
        slices: dict[str, Any] = {
            "global": level or "-".join([str(cells[0]), *("2" for _ in cells[1:])])
        }
        network = SlicedNetwork(module, slices, peer=f"{name}{index}", seed=3)
        classes = max(cells[-1], 2)
        own = samples(index, (cells[0],), classes, count=20 + index)
        found.append(
            SgdLearner(network, own, samples(99, (cells[0],), classes), seed=index, **options)
        )
    return found


def pictures(
    peers: int = 4, act: Callable[[Tensor], Tensor] = torch.relu, **options: Any
) -> list[Learner]:
    options = {"local_samples": 8, "batch": 4, "rate": 0.1, "reduction": "sum"} | options
    return [
        SgdLearner(
            SlicedNetwork(SmallCnn(act), {"global": "1-1-2"}, peer=str(index), seed=3),
            samples(index, (1, 6, 6), 4),
            samples(99, (1, 6, 6), 4),
            seed=index,
            **options,
        )
        for index in range(peers)
    ]


def associators(peers: int = 4) -> list[Learner]:
    start = Start("uniform", 0.3, by_fan_in=False)
    found: list[Learner] = []
    for index in range(peers):
        network = SlicedNetwork(
            AssociativeNetwork("50<>20"), {"global": "50-12"}, peer=str(index), seed=3, start=start
        )
        whole, _, _ = sparse_vectors(index, 6 + index)
        _, partial, expected = sparse_vectors(100, 12)
        found.append(AssociativeLearner(network, whole, (partial, expected), local_samples=5))
    return found


def plain_loop(learners: list[Learner], rounds: int) -> list[Any]:
    """Train, then the mean of what each model owns, in the plainest words."""
    history = []
    for _ in range(rounds):
        training = [learner.train(1) for learner in learners]
        for owner in {owner for learner in learners for owner in learner.network.averaged_models}:
            who = [
                learner.network for learner in learners if owner in learner.network.averaged_models
            ]
            mean = torch.stack([network.read(owner).double() for network in who]).mean(dim=0)
            for network in who:
                network.write(owner, mean)
        history.append((training, [learner.test() for learner in learners]))
    return history


def assert_same(
    make: Make, rounds: int, tolerance: float = 1e-5, stacked: int | None = None
) -> Arena:
    """The arena's networks, metrics and later training are the loop's."""
    mine, plain = make(), make()
    arena = Arena(mine, threads=2)
    wanted = len(mine) if stacked is None else stacked
    assert repr(arena).startswith(f"Arena({wanted} learners in ")
    history = plain_loop(plain, rounds)
    for round, (training, tests) in zip(arena.run(rounds), history, strict=True):
        for a, b in zip(round.training + round.tests, training + tests, strict=True):
            assert (a.correct, a.samples) == (b.correct, b.samples)
            assert a.loss == pytest.approx(b.loss, rel=1e-4, abs=1e-5)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=tolerance)
        a.train(2)
        b.train(2)  # orders, generators and optimizers went along
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=2 * tolerance)
    return arena


SGD = torch.optim.SGD
OPTIMIZERS: dict[str, Any] = {
    "plain": None,
    "torch-sgd": lambda p: SGD(p, 0.2),
    "momentum": lambda p: SGD(p, 0.05, momentum=0.9),
    "nesterov": lambda p: SGD(p, 0.05, momentum=0.8, nesterov=True, weight_decay=1e-3),
    "decay": lambda p: SGD(p, 0.1, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adam-decay": lambda p: torch.optim.Adam(p, 0.01, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "own-momentum": lambda p: Sgd(p, 0.05, momentum=0.9),
    "own-adam": lambda p: Adam(p, 0.01),
}
