"""One experiment of matching: which data, dealt out to how many peers, with which networks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...models import ModelError, stream
from ..data import Samples, load, partition

DATA = ("mnist-5k", "digits", "mnist")


@dataclass(frozen=True)
class Setting:
    """What decides a run; two equal settings give the same figures.

    data
        `mnist-5k`: the first 500 digits of each class of MNIST, 400 to train on and 100 to test on.
        `digits`: scikit-learn's, 1400 and 397, shuffled by the seed. `mnist`: all of it.
    alpha
        The Dirichlet's concentration; None deals out every class evenly.
    average_width
        The width of the networks that FedAvg and FedProx average, if not `width`.
    """

    data: str = "digits"
    peers: int = 10
    layers: int = 1
    width: int = 50
    alpha: float | None = 0.5
    epochs: int = 10
    average_width: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.data not in DATA:
            raise ModelError(f"no such data {self.data!r} here; there are {', '.join(DATA)}")

    @property
    def title(self) -> str:
        """For tables: data, hidden layers, split."""
        split = "homogeneous" if self.alpha is None else f"Dirichlet {self.alpha:g}"
        return f"{self.data}, {self.layers} hidden, {split}"

    def layout(self, width: int | None = None) -> str:
        """A network for this data, of the peers' width or another."""
        inputs = 64 if self.data == "digits" else 784
        return "=".join(map(str, [inputs, *[width or self.width] * self.layers, 10]))


@dataclass(frozen=True, eq=False)
class Share:
    """One peer's training samples."""

    x: Tensor
    y: Tensor

    @property
    def counts(self) -> np.ndarray:
        """Samples per class."""
        return np.bincount(self.y.numpy(), minlength=10)


@dataclass(frozen=True, eq=False)
class Dealt:
    """All peers' shares and the common test samples."""

    shares: tuple[Share, ...]
    test_x: Tensor
    test_y: Tensor

    @property
    def counts(self) -> np.ndarray:
        """Samples `[peers, classes]`."""
        return np.stack([share.counts for share in self.shares])


def deal(setting: Setting) -> Dealt:
    """Load the data and give every peer its share."""
    train, test = _samples(setting.data, setting.seed if setting.data == "digits" else 0)
    rng = stream(setting.seed, "matching", "split")
    if setting.alpha is None:
        pieces = _even(train.y.numpy(), setting.peers, rng)
    else:
        pieces = partition.dirichlet(train.y, setting.peers, setting.alpha, rng, minimum=10)
    flat = train.flat()
    shares = tuple(Share(flat[torch.as_tensor(p)], train.y[torch.as_tensor(p)]) for p in pieces)
    return Dealt(shares, test.flat(), test.y)


def _even(labels: np.ndarray, peers: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Every class in `peers` parts of nearly the same size."""
    pieces = [
        np.array_split(rng.permutation(np.flatnonzero(labels == label)), peers)
        for label in np.unique(labels)
    ]
    return [rng.permutation(np.concatenate(mine)) for mine in zip(*pieces, strict=True)]


@lru_cache(maxsize=2)
def _samples(name: str, seed: int) -> tuple[Samples, Samples]:
    if name == "digits":
        data = load("digits")
        assert data.test is not None
        whole = Samples(
            torch.cat([data.train.x, data.test.x]), torch.cat([data.train.y, data.test.y])
        )
        order = stream(seed, "matching", "digits").permutation(len(whole))
        return whole.take(order[:1400]), whole.take(order[1400:])
    data = load("mnist")
    assert data.test is not None
    if name == "mnist":
        return data.train, data.test
    labels = data.train.y.numpy()
    firsts = np.stack([np.flatnonzero(labels == label)[:500] for label in range(10)])
    return data.train.take(np.sort(firsts[:, :400], None)), data.train.take(
        np.sort(firsts[:, 400:], None)
    )
