"""The associative network, stacked: thresholds and a local rule, on many peers at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...models import AssociativeLearner, Metrics
from . import plan
from .group import Task
from .samples import Pool
from .stack import Alone, Stack


class AssociativeGroup:
    """Associative learners with equal layouts, thresholds, stretches and rates."""

    stacked = True

    def __init__(
        self, places: Sequence[int], learners: Sequence[AssociativeLearner], device: torch.device
    ):
        self.places, self._learners, self._device = places, list(learners), device
        self._stack = Stack([learner.network for learner in learners], device)
        self.stacks: Sequence[Stack | Alone] = [self._stack]
        self._samples = Pool([learner.samples for learner in learners], device)
        self._starts = torch.tensor(self._samples.firsts)
        self._counts = torch.tensor(self._samples.counts)
        size = len(learners[0].network.flat)
        # Not products but sweeps over all weights: many peers at once, as long as they stay in cache.
        self._size = max(1, min(plan.TASK_BYTES // (4 * size), -(-len(learners) // plan.TASKS)))

    def train(self, stretches: int) -> list[Task]:
        return [lambda a=a, b=b: self._train(a, b, stretches) for a, b in self._cuts()]

    def trained(self, stretches: int) -> None:
        pass

    def test(self) -> list[Task]:
        # Each learner's own test is one product already.
        self._stack.publish()
        return [lambda a=a, b=b: self._test(a, b) for a, b in self._cuts()]

    def refresh(self) -> None:
        self._stack.refresh()

    def publish(self) -> None:
        self._stack.publish()

    def release(self) -> None:
        self._stack.release()

    @torch.no_grad()
    def _train(self, first: int, last: int, stretches: int) -> list[tuple[int, Metrics]]:
        learners = self._learners[first:last]
        hidden, visible = self._pieces(first, last)
        one, count = learners[0], stretches * learners[0].stretch
        starts, counts = self._starts[first:last], self._counts[first:last]
        positions = torch.tensor([learner._next for learner in learners])
        for _ in range(count):
            vectors = self._samples.rows[(starts + positions).to(self._device)]
            _learn(hidden, visible, vectors, one.module.threshold, one.rate)
            positions = (positions + 1) % counts
        for learner, position in zip(learners, positions.tolist(), strict=True):
            learner._next = position
        return [(place, Metrics(samples=count)) for place in self.places[first:last]]

    def _test(self, first: int, last: int) -> list[tuple[int, Metrics]]:
        return [
            (place, learner.test())
            for place, learner in zip(
                self.places[first:last], self._learners[first:last], strict=True
            )
        ]

    def _pieces(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Weights into hidden and into visible cells, as views of the stack."""
        rows, module = self._stack.values[first:last], self._learners[0].module
        cut = module.hidden.numel()
        return (
            rows[:, :cut].unflatten(1, tuple(module.hidden.shape)),
            rows[:, cut:].unflatten(1, tuple(module.visible.shape)),
        )

    def _cuts(self) -> list[tuple[int, int]]:
        peers = len(self._learners)
        return [(a, min(a + self._size, peers)) for a in range(0, peers, self._size)]


def _learn(hidden: Tensor, visible: Tensor, vectors: Tensor, threshold: float, rate: float) -> None:
    """One vector for each peer: `AssociativeNetwork.learn`, stacked."""
    fires = (torch.bmm(vectors[:, None], hidden.mT)[:, 0] >= threshold).to(vectors.dtype)
    half = rate / 2
    hidden += half * vectors[:, None, :] * ((2 * fires - 1)[:, :, None] - hidden)
    visible += half * fires[:, None, :] * ((2 * vectors - 1)[:, :, None] - visible)
