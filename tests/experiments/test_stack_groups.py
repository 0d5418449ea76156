"""Which learners the arena stacks together, and which it leaves to the loop."""

from __future__ import annotations

from typing import Any

import torch
from stack_kit import OPTIMIZERS, assert_same, perceptrons, pictures
from torch import Tensor, nn

from gossamer.experiments.arena import Arena
from gossamer.models import Anatomy, Learner, Metrics, ParameterMap, SlicedNetwork, mlp


def test_groups_of_different_architecture_share_a_model() -> None:
    def make() -> list[Learner]:
        wide = perceptrons(3, "6=9=7=4", name="wide", level="6-2-2-2")
        other = perceptrons(2, optimizer=OPTIMIZERS["adam"], name="adam")
        learners = [*perceptrons(3), *wide, *other]
        return learners[::2] + learners[1::2]  # rows of a model are not next to each other

    arena = assert_same(make, rounds=20)
    assert repr(arena).startswith("Arena(8 learners in 3 stacks;")


class Stubborn:
    """Somebody's own learner: moves every parameter towards a number."""

    def __init__(self, network: SlicedNetwork, goal: float):
        self.network, self.goal = network, goal

    def train(self, steps: int) -> Metrics:
        for _ in range(steps):
            self.network.flat.lerp_(torch.full_like(self.network.flat, self.goal), 0.1)
        return Metrics(samples=steps)

    def test(self) -> Metrics:
        return Metrics(float((self.network.flat - self.goal).abs().sum()), 0, 1)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class Wrapped(nn.Module):
    """A perceptron in a module of its own, which does more than its layers say."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp("6=8=5=4")

    def anatomy(self) -> Anatomy:
        known = SlicedNetwork(mlp("6=8=5=4"), {"g": "6-8-5-4"}).slicing.anatomy
        maps = [ParameterMap(f"body.{m.name}", m.shape, m.axes) for m in known.parameters]
        return Anatomy(known.parts, tuple(maps))


class Scaled(Wrapped):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) / (1 + 0.01 * self.calls)


class Dropping(Wrapped):
    """Draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.body(x), 0.5, self.training)


def test_what_cannot_be_stacked_runs_as_it_is() -> None:
    def make() -> list[Learner]:
        own = [
            Stubborn(
                SlicedNetwork(mlp("6=8=5=4"), {"global": "6-2-2-2"}, peer=f"own{i}", seed=3), i
            )
            for i in range(2)
        ]
        rprop = perceptrons(1, optimizer=lambda p: torch.optim.Rprop(p, 0.01), name="rprop")
        frozen = perceptrons(1, name="frozen")
        next(frozen[0].network.module.parameters()).requires_grad_(False)
        return [own[0], *perceptrons(3), own[1], *rprop, *frozen]

    arena = assert_same(make, rounds=10, stacked=3)
    assert "3 learners in 1 stack, 4 one by one" in repr(arena)


def test_frozen_layers_are_stacked_if_they_are_equal() -> None:
    def backbone(value: float) -> nn.Module:
        module = mlp("6=8=5=4")
        first = next(each for each in module.modules() if isinstance(each, nn.Linear))
        nn.init.constant_(first.weight, value)
        nn.init.constant_(first.bias, 0.1)
        first.requires_grad_(False)
        return module

    def make(*values: float) -> list[Learner]:
        made = iter(values)
        return perceptrons(
            len(values), level="8-2-2", make=lambda: backbone(next(made)), loss="cross-entropy"
        )

    assert_same(lambda: make(0.25, 0.25, 0.25), rounds=4)
    assert "4 learners in 2 stacks" in repr(Arena(make(0.25, 0.5, 0.25, 0.5)))


def test_modules_with_buffers_are_left_to_the_loop() -> None:
    assert_same(lambda: perceptrons(3, make=Scaled), rounds=5, stacked=0)


def test_dropout_is_left_to_the_loop() -> None:
    assert "0 stacks, 2 one by one" in repr(Arena(perceptrons(2, make=Dropping)))


def test_modules_that_differ_in_more_than_their_shapes_are_kept_apart() -> None:
    learners = [*pictures(2, torch.relu), *pictures(2, torch.tanh)]
    for index, learner in enumerate(learners):
        learner.network.peer = str(index)
    assert "4 learners in 2 stacks" in repr(Arena(learners))


def test_modules_with_hooks_run_them() -> None:
    called = []
    learners = perceptrons(3)
    *_, last = learners[0].network.module.children()
    last.register_full_backward_pre_hook(lambda *_: called.append(True))
    arena = Arena(learners)
    assert "2 learners in 1 stack, 1 one by one" in repr(arena)
    arena.train()
    assert called
