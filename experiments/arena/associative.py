"""The associative network, stacked: thresholds and a local rule, on many peers at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...models import AssociativeLearner, Metrics
from . import plan
from .group import Task, cut
from .samples import Pool
from .stack import Alone, Stack
from .tiles import as_rows


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

    def train(self, rows: Sequence[int], stretches: int) -> list[Task]:
        return [lambda rows=some: self._train(rows, stretches) for some in cut(rows, self._size)]

    def trained(self, rows: Sequence[int], stretches: int) -> None:
        pass

    def test(self, rows: Sequence[int]) -> list[Task]:
        # Each learner's own test is one product already.
        self._stack.publish()
        return [lambda rows=some: self._test(rows) for some in cut(rows, self._size)]

    def refresh(self) -> None:
        self._stack.refresh()

    def publish(self) -> None:
        self._stack.publish()

    def release(self) -> None:
        self._stack.release()

    @torch.no_grad()
    def _train(self, rows: Sequence[int], stretches: int) -> list[tuple[int, Metrics]]:
        learners, where = [self._learners[row] for row in rows], as_rows(rows, self._device)
        one, count = learners[0], stretches * learners[0].stretch
        values = self._stack.values[where]
        hidden, visible = self._pieces(values)
        starts, counts = self._starts[list(rows)], self._counts[list(rows)]
        positions = torch.tensor([learner._next for learner in learners])
        for _ in range(count):
            vectors = self._samples.rows[(starts + positions).to(self._device)]
            _learn(hidden, visible, vectors, one.module.threshold, one.rate)
            positions = (positions + 1) % counts
        if not isinstance(where, slice):  # scattered rows were copied together
            self._stack.values[where] = values
        for learner, position in zip(learners, positions.tolist(), strict=True):
            learner._next = position
        return [(self.places[row], Metrics(samples=count)) for row in rows]

    def _test(self, rows: Sequence[int]) -> list[tuple[int, Metrics]]:
        return [(self.places[row], self._learners[row].test()) for row in rows]

    def _pieces(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Weights into hidden and into visible cells, as views of the peers' values."""
        module = self._learners[0].module
        hidden = module.hidden.numel()
        return (
            values[:, :hidden].unflatten(1, tuple(module.hidden.shape)),
            values[:, hidden:].unflatten(1, tuple(module.visible.shape)),
        )


def _learn(hidden: Tensor, visible: Tensor, vectors: Tensor, threshold: float, rate: float) -> None:
    """One vector for each peer: `AssociativeNetwork.learn`, stacked."""
    fires = (torch.bmm(vectors[:, None], hidden.mT)[:, 0] >= threshold).to(vectors.dtype)
    half = rate / 2
    hidden += half * vectors[:, None, :] * ((2 * fires - 1)[:, :, None] - hidden)
    visible += half * fires[:, None, :] * ((2 * vectors - 1)[:, :, None] - visible)
