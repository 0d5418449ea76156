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
from .rules import Rule, SlotStack
from .samples import Pool, Shelf, batches, draw
from .scores import score
from .stack import Alone, Stack

Task = Callable[[], list[tuple[int, Metrics]]]
"""A piece of work for one thread: what it measured, by the learner's place in the arena."""


class Group(Protocol):
    """Peers that train together."""

    stacked: bool
    places: Sequence[int]
    """Which of the arena's learners they are; rows of the stacks follow this order."""
    stacks: Sequence[Stack | Alone]

    def train(self, stretches: int) -> list[Task]:
        """The tasks of one round's training, independent of each other."""
        ...

    def trained(self, stretches: int) -> None:
        """All tasks of a round's training are done."""
        ...

    def test(self) -> list[Task]:
        """The tasks of one test."""
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

    def train(self, stretches: int) -> list[Task]:
        self._rule = self._present_rule()
        return [lambda a=a, b=b: self._train(a, b, stretches) for a, b in self._cuts()]

    def trained(self, stretches: int) -> None:
        first = self._learners[0]
        self._slots.count(len(batches(first.stretch, first.batch, stretches)))

    def test(self) -> list[Task]:
        return [lambda a=a, b=b: self._test(a, b) for a, b in self._cuts()]

    def refresh(self) -> None:
        self._stack.refresh()
        self._slots.refresh()

    def publish(self) -> None:
        self._stack.publish()
        self._slots.publish()

    def release(self) -> None:
        self._stack.release()
        self._slots.publish()

    def _train(self, first: int, last: int, stretches: int) -> list[tuple[int, Metrics]]:
        learners = self._learners[first:last]
        one = learners[0]
        total = stretches * one.stretch
        order = draw(learners, total).to(self._device)
        inputs, labels = self._train_shelf.inputs, self._train_shelf.labels
        seen_labels = labels.rows[order + self._starts[1][first:last, None]]
        work = Stretch(
            inputs.rows,
            order + self._starts[0][first:last, None],
            seen_labels,
            batches(one.stretch, one.batch, stretches),
            self._rule,
            one.reduction == "mean",
            self._slots.taken,
        )
        state = [slot[first:last] for slot in self._slots.values]
        outputs = self._engine.train(self._stack.values[first:last], state, work)
        return list(
            zip(self.places[first:last], score(outputs, seen_labels, one.loss), strict=True)
        )

    def _test(self, first: int, last: int) -> list[tuple[int, Metrics]]:
        """Peers with as many test samples as their neighbours in the stack are tested together."""
        counts = self._test_shelf.labels.counts
        found: list[tuple[int, Metrics]] = []
        while first < last:
            end = first + 1
            while end < last and counts[end] == counts[first]:
                end += 1
            found += zip(self.places[first:end], self._test_alike(first, end), strict=True)
            first = end
        return found

    def _test_alike(self, first: int, last: int) -> list[Metrics]:
        inputs, labels = self._test_shelf.inputs, self._test_shelf.labels
        rows, loss = self._stack.values[first:last], self._learners[0].loss
        metrics = [Metrics()] * (last - first)
        # A thousand at once for one peer, as the learner itself does.
        some = max(1, min(1000, plan.TEST_ROWS // (last - first)))
        for at in range(0, labels.counts[first], some):
            count = min(some, labels.counts[first] - at)
            outputs = self._engine.outputs(rows, _window(inputs, first, last, at, count))
            scores = score(outputs, _window(labels, first, last, at, count), loss)
            metrics = [a + b for a, b in zip(metrics, scores, strict=True)]
        return metrics

    def _cuts(self) -> list[tuple[int, int]]:
        peers = len(self._learners)
        return [(a, min(a + self._size, peers)) for a in range(0, peers, self._size)]

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
        optimizers = [learner.optimizer for learner in self._learners]
        if not isinstance(optimizers[0], torch.optim.Optimizer):
            return self._rule
        rates = {float(o.param_groups[0]["lr"]) for o in optimizers}  # type: ignore[union-attr]
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

    def train(self, stretches: int) -> list[Task]:
        return [
            lambda place=place, learner=learner: [(place, learner.train(stretches))]
            for place, learner in zip(self.places, self._learners, strict=True)
        ]

    def trained(self, stretches: int) -> None:
        pass

    def test(self) -> list[Task]:
        return [
            lambda place=place, learner=learner: [(place, learner.test())]
            for place, learner in zip(self.places, self._learners, strict=True)
        ]

    def refresh(self) -> None:
        pass

    def publish(self) -> None:
        pass

    def release(self) -> None:
        pass


def _window(pool: Pool, first: int, last: int, at: int, count: int) -> Tensor:
    """Samples at … at+count of some peers, [peers, count, …]; a view where they share them."""
    starts = pool.firsts[first:last]
    if all(start == starts[0] for start in starts):
        rows = pool.rows[starts[0] + at : starts[0] + at + count]
        return rows.expand(last - first, *rows.shape)
    index = torch.tensor(starts, device=pool.rows.device)[:, None] + torch.arange(
        at, at + count, device=pool.rows.device
    )
    return pool.rows[index]
