"""Networks of every kind in the arena: stacked where that helps, and always what a plain loop computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gossamer.experiments.arena import Arena
from gossamer.models import (
    Anatomy,
    ParameterMap,
    Part,
    SgdLearner,
    SlicedNetwork,
    average,
    cnn1d,
    dense_axes,
    discover,
    lstm_classifier,
    resnet,
    small_cnn,
    vit,
)

torch.set_num_threads(1)


def group_norm_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip


def layer_norm_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 10)
    )


IMAGES, WINDOWS = (1, 8, 8), (6, 16)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "small-cnn": (lambda: small_cnn(1, 8, 10, widths=(4, 8), hidden=16), IMAGES, True),
    "group norm": (group_norm_cnn, IMAGES, True),
    "layer norm": (layer_norm_mlp, IMAGES, True),
    "vit": (lambda: vit(1, 8, 10, patch=4, width=16, depth=2, heads=2), IMAGES, False),
    "lstm": (lambda: lstm_classifier(6, 10, hidden=8), (5, 6), False),
    "resnet": (lambda: resnet(1, 10, widths=(4, 8)), IMAGES, False),
    "cnn1d": (lambda: cnn1d(6, 10, widths=(4,)), WINDOWS, False),
}


def samples(shape: tuple[int, ...], count: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(count, *shape, generator=generator)
    return inputs, torch.randint(10, (count,), generator=generator)


def learners(name: str, buffers: str = "average", batch: int = 10) -> list[SgdLearner]:
    make, shape, _ = NETWORKS[name]
    x, y = samples(shape)
    anatomy = discover(make(), x[:2])
    return [
        SgdLearner(
            SlicedNetwork(
                make(), {"global": 0.8}, anatomy=anatomy, peer=str(i), seed=0,
                buffers=buffers,  # type: ignore[arg-type]
            ),
            (x[i:], y[i:]), (x, y), local_samples=20, batch=batch, reduction="mean", loss="cross-entropy",
            seed=i,
        )
        for i in range(4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        *((name, "average") for name in NETWORKS),
        ("resnet", "local"),
        ("resnet", "recompute"),
        ("cnn1d", "recompute"),
    ],
)
def test_the_arena_computes_what_a_loop_does(name: str, buffers: str) -> None:
    together, alone = learners(name, buffers), learners(name, buffers)
    arena = Arena(together)
    assert repr(arena).startswith(f"Arena({4 if NETWORKS[name][2] else 0} learners in ")
    tests = list(arena.run(3))[-1].tests
    for _ in range(3):
        for learner in alone:
            learner.train()
        average([learner.network for learner in alone])
    expected = [learner.test() for learner in alone]
    assert [one.correct for one in tests] == [one.correct for one in expected]
    for mine, plain in zip(together, alone, strict=True):
        ours, theirs = mine.network.module.state_dict(), plain.network.module.state_dict()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-5, msg=key)


def test_averaged_statistics_agree_where_cells_are_shared_and_local_ones_stay() -> None:
    norm = "1.running_mean"
    spread: dict[str, Tensor] = {}
    for buffers in ("average", "local"):
        peers = learners("resnet", buffers)
        list(Arena(peers).run(2))
        means = torch.stack([peer.network.module.state_dict()[norm] for peer in peers])
        spread[buffers] = means.std(0)
    assert (spread["average"][:3] < 1e-7).all()  # three of four cells are global
    assert spread["average"][3] > 1e-5
    assert (spread["local"] > 1e-5).all()


def test_large_images_are_trained_one_by_one() -> None:
    assert "4 learners in 1 stack" in repr(Arena(learners("small-cnn", batch=10)))
    assert "4 one by one" in repr(Arena(learners("small-cnn", batch=100)))


class Otherwise(nn.Module):
    """Trains as any other, and tests in a way that cannot be stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x.flatten(1))
        return out if self.training or float(out.sum()) > 1e9 else out + 0.0

    def anatomy(self) -> Anatomy:
        parts = (Part("in", 64), Part("out", 10))
        weight = ParameterMap("body.weight", (10, 64), dense_axes(parts, 1, 0))
        return Anatomy(parts, (weight, ParameterMap("body.bias", (10,), dense_axes(parts, 1))))


def test_modules_that_cannot_be_tested_in_a_stack_are_left_to_the_loop() -> None:
    x, y = samples(IMAGES)
    peers = [
        SgdLearner(SlicedNetwork(Otherwise(), {"global": 1.0}, peer=str(i), seed=0), (x, y), (x, y))
        for i in range(2)
    ]
    arena = Arena(peers)
    assert "2 one by one" in repr(arena)
    assert len(arena.test()) == 2
