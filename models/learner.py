"""What every learner offers, and metrics that add up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from typing import Any, Protocol, runtime_checkable

from .network import SlicedNetwork


@dataclass(frozen=True)
class Metrics:
    """Totals over samples; `a + b` is what training or testing on both would have counted.

    Where samples are neither right nor wrong, as in regression, `correct` is NaN.
    """

    loss: float = 0.0
    correct: float = 0
    samples: int = 0

    def __add__(self, other: Metrics) -> Metrics:
        return Metrics(
            self.loss + other.loss, self.correct + other.correct, self.samples + other.samples
        )

    @property
    def accuracy(self) -> float:
        """The share of samples that were right; NaN when there were none, or nothing is right or wrong."""
        return self.correct / self.samples if self.samples else nan

    @property
    def mean_loss(self) -> float:
        """The loss per sample; NaN when there were none."""
        return self.loss / self.samples if self.samples else nan


@runtime_checkable
class Learner(Protocol):
    """Anything that can improve a network between two averagings.

    One of its steps is what the paper calls a mini-batch: the training between two averagings, many
    gradient steps long. `state` and `restore` carry what a restart needs besides the network itself.
    """

    network: SlicedNetwork

    def train(self, steps: int) -> Metrics:
        """Train `steps` times as much as between two averagings."""
        ...

    def test(self) -> Metrics:
        """Measure the network on the peer's own test data, without changing it."""
        ...

    def state(self) -> dict[str, Any]:
        """Optimizer, position in the data and random state, as plain data and tensors."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken."""
        ...


@runtime_checkable
class Weighted(Protocol):
    """A learner that must know how much of each average its peer holds: whoever runs it says so."""

    weight_of: Callable[[str], float]
    """The weight that the peer holds of a partial model now, in peers."""


@runtime_checkable
class PeerCounting(Protocol):
    """A learner that must know how many peers there are at most: whoever runs it says so."""

    peers_seen: Callable[[], float]
    """How many peers of its swarm the peer knows of now, itself included."""
