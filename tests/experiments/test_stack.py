"""Stacked training is a loop over learners, to rounding: networks, losses, optimizers, orders, groups."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.experiments.arena import Arena
from gossamer.models import (
    Anatomy,
    AssociativeLearner,
    AssociativeNetwork,
    Learner,
    Metrics,
    ParameterMap,
    Part,
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
    output: str | None = None,
    name: str = "",
    level: str | None = None,
    make: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> list[Learner]:
    """Perceptrons with data of their own; settings as the learner takes them."""
    cells = [int(part) for part in layout.split("=")]
    options = {"stretch": 10, "batch": 4, "rate": 0.2} | options
    found: list[Learner] = []
    for index in range(peers):
        torch.manual_seed(index)  # a layer of one cell keeps the bias that torch draws
        module = make() if make else mlp(layout, activation=activation, output=output)
        slices = {"global": level or "-".join([str(cells[0]), *("2" for _ in cells[1:])])}
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
    options = {"stretch": 8, "batch": 4, "rate": 0.1, "loss": "cross-entropy"} | options
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
        found.append(AssociativeLearner(network, whole, (partial, expected), stretch=5))
    return found


def plain_loop(learners: list[Learner], rounds: int) -> list[Any]:
    """Train, then the mean of what each model owns, in the plainest words."""
    history = []
    for _ in range(rounds):
        training = [learner.train(1) for learner in learners]
        for owner in {owner for learner in learners for owner in learner.network.owners}:
            who = [learner.network for learner in learners if owner in learner.network.owners]
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
    assert sum(len(group.places) for group in arena._groups if group.stacked) == wanted
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
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_perceptron_after_a_hundred_steps(optimizer: str) -> None:
    # Stretches of 10 in batches of 4, 4 and 2: 3 steps a round.
    assert_same(lambda: perceptrons(optimizer=OPTIMIZERS[optimizer]), rounds=34)


MIXED: dict[str, Make] = {
    "associative": lambda: associators(7),
    **{
        name: lambda name=name: [
            *perceptrons(5, optimizer=OPTIMIZERS[name], rate=0.05),
            *perceptrons(2, name="own", optimizer=lambda p: torch.optim.Rprop(p, 0.01)),
        ]
        for name in ("plain", "momentum", "adam")
    },
}


@pytest.mark.parametrize("make", MIXED.values(), ids=MIXED)
def test_some_peers_may_train_more_often_than_others(make: Make) -> None:
    mine, plain = make(), make()
    arena = Arena(mine, threads=2)
    for peers in ([4, 0, 2], [1], [0, 1, 3, 6], [5, 2, 0]):
        for peer, found in zip(peers, arena.train(peers), strict=True):
            wanted = plain[peer].train(1)
            assert (found.correct, found.samples) == (wanted.correct, wanted.samples)
    for peer, found in zip([6, 2], arena.test([6, 2]), strict=True):
        assert found.correct == plain[peer].test().correct
    arena.train()
    for a, b in zip(mine, plain, strict=True):
        b.train(1)
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
@pytest.mark.parametrize(
    ("activation", "output"),
    [("sigmoid", None), ("tanh", "none"), ("relu", "none"), ("prelu", "none"), ("none", "prelu")],
)
def test_every_activation_and_loss(
    activation: str, output: str | None, loss: str, reduction: str
) -> None:
    assert_same(
        lambda: perceptrons(
            3, activation=activation, output=output, loss=loss, reduction=reduction, rate=0.05
        ),
        rounds=12,
    )


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_one_output_is_a_yes_or_no(loss: str) -> None:
    assert_same(lambda: perceptrons(4, "6=5=1", loss=loss, level="6-5-1"), rounds=12)


def test_large_peers_train_one_by_one_in_place() -> None:
    assert_same(
        lambda: perceptrons(3, "300=120=4", optimizer=OPTIMIZERS["momentum"], rate=0.05), rounds=8
    )
    assert_same(lambda: perceptrons(3, "300=120=4", rate=0.05), rounds=34)


@pytest.mark.parametrize("layout", ["6=8=5=4", "6=40=4", "300=120=4"])
@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_batches_that_are_larger_than_layers(layout: str, loss: str) -> None:
    # Then narrow layers are multiplied transposed; 20, 20 and 10 samples are both sides of it.
    for optimizer in (None, OPTIMIZERS["momentum"]):
        assert_same(
            lambda o=optimizer: perceptrons(
                3, layout, loss=loss, stretch=50, batch=20, reduction="mean", optimizer=o
            ),
            rounds=12,
        )


def test_narrow_layers_without_bias() -> None:
    def module() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))

    assert_same(
        lambda: perceptrons(4, "6=8=4", make=module, stretch=40, batch=20, rate=0.01), rounds=12
    )


def test_layers_without_bias_and_nested_chains() -> None:
    def module() -> nn.Module:
        last = nn.Sequential(nn.Linear(8, 4), nn.Identity())
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), last)

    assert_same(lambda: perceptrons(4, "6=8=4", make=module), rounds=20)


@pytest.mark.parametrize("optimizer", ["plain", "momentum", "adam"])
def test_a_small_cnn_after_a_hundred_steps(optimizer: str) -> None:
    assert_same(lambda: pictures(optimizer=OPTIMIZERS[optimizer]), rounds=50)


def test_a_loss_of_ones_own_under_vmap() -> None:
    def steep(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs[:, 0] - labels).abs().pow(1.5)

    assert_same(lambda: perceptrons(4, loss=steep, rate=0.01), rounds=20)


def test_the_associative_network_after_a_hundred_vectors() -> None:
    assert_same(associators, rounds=20)


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


def test_modules_with_buffers_are_left_to_the_loop() -> None:
    assert_same(lambda: perceptrons(3, make=Scaled), rounds=5, stacked=0)


def test_dropout_is_left_to_the_loop() -> None:
    arena = Arena(perceptrons(2, make=Dropping))
    assert not any(group.stacked for group in arena._groups)


def test_modules_that_differ_in_more_than_their_shapes_are_kept_apart() -> None:
    learners = [*pictures(2, torch.relu), *pictures(2, torch.tanh)]
    for index, learner in enumerate(learners):
        learner.network.peer = str(index)
    assert len(Arena(learners)._groups) == 2


@pytest.mark.parametrize("make", [lambda: perceptrons(20), pictures, lambda: associators(9)])
def test_one_seed_one_result_on_any_number_of_threads(make: Make) -> None:
    def run(threads: int) -> Tensor:
        learners = make()
        list(Arena(learners, threads=threads).run(6))
        return torch.stack([learner.network.flat for learner in learners])

    one, again, two = run(1), run(1), run(2)
    assert torch.equal(one, again)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def test_a_network_is_its_row() -> None:
    learners = perceptrons(3)
    arena = Arena(learners)
    list(arena.run(2))
    network = learners[1].network
    weight = next(network.module.parameters())
    network.write("global", torch.zeros_like(network.read("global")))
    assert (weight[:2] == 0).all()
    before = network.flat.clone()
    list(arena.run(1))
    assert not torch.equal(network.flat, before)


def test_two_arenas_one_after_the_other_go_on_where_the_first_stopped() -> None:
    mine, plain = (perceptrons(optimizer=OPTIMIZERS["momentum"]) for _ in range(2))
    first, second = Arena(mine), Arena(mine)
    for arena in (first, second, first):
        list(arena.run(3))
    plain_loop(plain, 9)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-5)


def test_states_saved_from_the_arena_restore_elsewhere() -> None:
    mine = perceptrons(3, optimizer=OPTIMIZERS["adam"])
    arena = Arena(mine)
    list(arena.run(5))
    states = [deepcopy(learner.state()) for learner in mine]
    flats = [learner.network.flat.clone() for learner in mine]
    list(arena.run(4))
    fresh = perceptrons(3, optimizer=OPTIMIZERS["adam"])
    for learner, state, flat in zip(fresh, states, flats, strict=True):
        learner.network.flat.copy_(flat)
        learner.restore(state)
    list(Arena(fresh).run(4))
    for a, b in zip(mine, fresh, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-6)
    for learner, state, flat in zip(mine, states, flats, strict=True):
        learner.network.flat.copy_(flat)
        learner.restore(state)
    list(arena.run(4))  # the same arena takes a restored state in as well
    for a, b in zip(mine, fresh, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-6)


def test_release_gives_networks_memory_of_their_own() -> None:
    learners = perceptrons(4)
    arena = Arena(learners)
    list(arena.run(1))
    network = learners[0].network
    size = network.flat.numel() * 4
    assert network.flat.untyped_storage().nbytes() == 4 * size
    arena.release()
    assert network.flat.untyped_storage().nbytes() == size
    assert next(network.module.parameters()).data_ptr() == network.flat.data_ptr()


def test_a_learning_rate_schedule_is_followed() -> None:
    mine, plain = (perceptrons(3, optimizer=OPTIMIZERS["momentum"]) for _ in range(2))
    rounds = Arena(mine).run(6)
    for index in range(6):
        next(rounds)
        plain_loop(plain, 1)
        for learner in (*mine, *plain):
            assert isinstance(learner, SgdLearner)
            learner.optimizer.param_groups[0]["lr"] = 0.05 / (index + 2)  # type: ignore[union-attr]
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-5)


def test_the_kernel_runs_without_torchscript_too() -> None:
    code = (
        "from test_stack import perceptrons\n"
        "from gossamer.experiments.arena import Arena, kernel\n"
        "assert not hasattr(kernel.descend, 'graph')\n"
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
