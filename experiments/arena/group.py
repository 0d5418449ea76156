"""Groups: peers that train together, because one tensor and one piece of code serve them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ...models import Learner, Metrics, ModelError, SgdLearner
from . import plan
from .engines import Engine, Stretch
from .rules import Rule, SlotStack, rate_of
from .samples import Pool, Shelf, batches, draw
from .scores import score
from .stack import Alone, Stack
from .tiles import as_rows

Task = Callable[[], list[tuple[int, Metrics]]]
"""A piece of work for one thread: what it measured, by the learner's place in the arena."""


class Group(Protocol):
    """Peers that train together."""

    stacked: bool
    places: Sequence[int]
    """Which of the arena's learners they are; rows of the stacks follow this order."""
    stacks: Sequence[Stack | Alone]

    def train(self, rows: Sequence[int], stretches: int) -> list[Task]:
        """The tasks of some peers' training, independent of each other; rows are counted in the group."""
        ...

    def trained(self, rows: Sequence[int], stretches: int) -> None:
        """All tasks of that training are done."""
        ...

    def test(self, rows: Sequence[int]) -> list[Task]:
        """The tasks of some peers' test."""
        ...

    def refresh(self) -> None:
        """Take in what changed outside of the arena."""
        ...

    def publish(self) -> None:
        """Let the learners see what changed inside it, where they cannot see it anyway."""
        ...

    def release(self) -> None:
        """Give learners memory of their own again."""
        ...


class SgdGroup:
    """Stacked gradient descent: equal networks, losses, batches and optimizers; data of their own."""

    stacked = True

    def __init__(
        self,
        places: Sequence[int],
        learners: Sequence[SgdLearner],
        engine: Engine,
        rule: Rule,
        device: torch.device,
    ):
        first = learners[0]
        self.places, self._learners = places, list(learners)
        self._engine, self._rule, self._device = engine, rule, device
        self._stack = Stack([learner.network for learner in learners], device)
        self.stacks: Sequence[Stack | Alone] = [self._stack]
        self._slots = SlotStack(self._learners, rule, self._stack.values, self._stack.shared)
        self._shelve()
        self._size = plan.peers_per_task(
            len(learners), len(first.network.flat), first.batch * engine.activations
        )

    def train(self, rows: Sequence[int], stretches: int) -> list[Task]:
        self._rule = self._present_rule()
        taken = self._slots.taken
        return [
            lambda rows=some, count=count: self._train(rows, stretches, count)
            for count, alike in alike_rows(rows, taken)
            for some in cut(alike, self._size)
        ]

    def trained(self, rows: Sequence[int], stretches: int) -> None:
        first = self._learners[0]
        self._slots.count(rows, len(batches(first.stretch, first.batch, stretches)))

    def test(self, rows: Sequence[int]) -> list[Task]:
        counts = self._test_shelf.labels.counts
        return [
            lambda rows=some: self._test(rows)
            for _, alike in alike_rows(rows, counts)
            for some in cut(alike, self._size)
        ]

    def refresh(self) -> None:
        self._stack.refresh()
        self._slots.refresh()

    def publish(self) -> None:
        self._stack.publish()
        self._slots.publish()

    def release(self) -> None:
        self._stack.release()
        self._slots.publish()

    def _train(self, rows: Sequence[int], stretches: int, count: int) -> list[tuple[int, Metrics]]:
        """Peers whose optimizers have taken `count` steps."""
        learners = [self._learners[row] for row in rows]
        one, where = learners[0], as_rows(rows, self._device)
        order = draw(learners, stretches * one.stretch).to(self._device)
        inputs, labels = self._train_shelf.inputs, self._train_shelf.labels
        seen_labels = labels.rows[order + self._starts[1][where, None]]
        work = Stretch(
            inputs.rows,
            order + self._starts[0][where, None],
            seen_labels,
            batches(one.stretch, one.batch, stretches),
            self._rule,
            one.reduction == "mean",
            count,
        )
        held = [self._stack.values, *self._slots.values]
        values, *state = [whole[where] for whole in held]
        outputs = self._engine.train(values, state, work)
        if not isinstance(where, slice):  # scattered rows were copied together
            for whole, part in zip(held, (values, *state), strict=True):
                whole[where] = part
        return self._named(rows, score(outputs, seen_labels, one.loss, one.right))

    def _test(self, rows: Sequence[int]) -> list[tuple[int, Metrics]]:
        """Peers with equally many test samples."""
        inputs, labels = self._test_shelf.inputs, self._test_shelf.labels
        values = self._stack.values[as_rows(rows, self._device)]
        metrics = [Metrics()] * len(rows)
        # A thousand at once for one peer, as the learner itself does.
        some, samples = max(1, min(1000, plan.TEST_ROWS // len(rows))), labels.counts[rows[0]]
        for at in range(0, samples, some):
            count = min(some, samples - at)
            outputs = self._engine.outputs(values, _window(inputs, rows, at, count))
            one = self._learners[0]
            scores = score(outputs, _window(labels, rows, at, count), one.loss, one.right)
            metrics = [a + b for a, b in zip(metrics, scores, strict=True)]
        return self._named(rows, metrics)

    def _named(self, rows: Sequence[int], metrics: Sequence[Metrics]) -> list[tuple[int, Metrics]]:
        return [(self.places[row], found) for row, found in zip(rows, metrics, strict=True)]

    def _shelve(self) -> None:
        """Samples of all peers into one place; where they share memory, the learners hold views."""
        self._train_shelf = Shelf([learner.samples for learner in self._learners], self._device)
        self._test_shelf = Shelf([learner.held_out for learner in self._learners], self._device)
        if self._stack.shared:
            for index, learner in enumerate(self._learners):
                learner.samples = self._train_shelf.pair(index)
                learner.held_out = self._test_shelf.pair(index)
        pools = (self._train_shelf.inputs, self._train_shelf.labels)
        self._starts = [torch.tensor(pool.firsts, device=self._device) for pool in pools]

    def _present_rule(self) -> Rule:
        """The rule with the learning rate that the optimizers have now: a schedule may have moved it."""
        rates = {rate_of(learner) for learner in self._learners}
        if len(rates) > 1:
            raise ModelError(
                f"peers {self._learners[0].network.peer!r} … were stacked with one learning rate and now "
                f"have {len(rates)}: make a new Arena after changing the rates of some peers only"
            )
        return replace(self._rule, rate=rates.pop())  # type: ignore[type-var]


class LoopGroup:
    """Learners that cannot be stacked train one after the other, each by its own code."""

    stacked = False

    def __init__(self, places: Sequence[int], learners: Sequence[Learner]):
        self.places, self._learners = places, learners
        self.stacks: Sequence[Stack | Alone] = [Alone(learner.network) for learner in learners]

    def train(self, rows: Sequence[int], stretches: int) -> list[Task]:
        return [
            lambda row=row: [(self.places[row], self._learners[row].train(stretches))]
            for row in rows
        ]

    def trained(self, rows: Sequence[int], stretches: int) -> None:
        pass

    def test(self, rows: Sequence[int]) -> list[Task]:
        return [lambda row=row: [(self.places[row], self._learners[row].test())] for row in rows]

    def refresh(self) -> None:
        pass

    def publish(self) -> None:
        pass

    def release(self) -> None:
        pass


def alike_rows(rows: Sequence[int], marks: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Rows by what they are marked with, in the order of each mark's first row."""
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(marks[row], []).append(row)
    return list(found.items())


def cut(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    """Rows in pieces of at most `size`."""
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _window(pool: Pool, rows: Sequence[int], at: int, count: int) -> Tensor:
    """Samples at … at+count of some peers, [peers, count, …]; a view where they share them."""
    starts = [pool.firsts[row] for row in rows]
    if all(start == starts[0] for start in starts):
        shared = pool.rows[starts[0] + at : starts[0] + at + count]
        return shared.expand(len(rows), *shared.shape)
    index = torch.tensor(starts, device=pool.rows.device)[:, None] + torch.arange(
        at, at + count, device=pool.rows.device
    )
    return pool.rows[index]
