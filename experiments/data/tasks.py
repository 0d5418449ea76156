"""Tasks that differ by what the labels are called, and who gets which (the paper's V.3)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from .files import DataError

Labels = TypeVar("Labels", Tensor, np.ndarray)


@dataclass(frozen=True)
class Task:
    """A permutation of the labels: a sample labelled `c` is called `labels[c]` in this task."""

    name: str
    labels: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.labels) != list(range(len(self.labels))):
            raise DataError(
                f"task {self.name!r}: {self.labels} is not a permutation of "
                f"0..{len(self.labels) - 1}: every label must occur once"
            )

    @property
    def permutation(self) -> np.ndarray:
        """`p` with `new_label = p[label]`."""
        return np.array(self.labels, dtype=np.int64)

    def apply(self, y: Labels) -> Labels:
        """The labels as this task calls them; `y` itself is left alone."""
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(self.labels):
            raise DataError(
                f"task {self.name!r} knows labels 0..{len(self.labels) - 1}, "
                f"not {int(y.min())}..{int(y.max())}: build it for the data set's classes"
            )
        if isinstance(y, Tensor):
            return torch.from_numpy(self.permutation)[y]
        return self.permutation[y]

    def then(self, other: Task) -> Task:
        """This task followed by `other`: `swap(10, 8, 9).then(swap(10, 6, 7))` swaps both pairs."""
        return Task(f"{self.name}, {other.name}", tuple(other.apply(self.permutation).tolist()))


def identity(classes: int) -> Task:
    """Every label keeps its name."""
    return Task("identity", tuple(range(_checked(classes))))


def swap(classes: int, a: int, b: int) -> Task:
    """Labels `a` and `b` change places."""
    if a == b or not (0 <= a < classes and 0 <= b < classes):
        raise DataError(f"swap: {a} and {b} must be two different labels of 0..{classes - 1}")
    labels = list(range(classes))
    labels[a], labels[b] = b, a
    return Task(f"swap {a} {b}", tuple(labels))


def cycle(classes: int, r: int) -> Task:
    """The last `r` labels move round by one: the cycle (10−r … 9) of V.3.f, for ten classes.

    `r` is the difference rate, the number of labels that differ from the identity: 0, or 2 to
    `classes`.
    """
    if r == 1 or not 0 <= r <= _checked(classes):
        raise DataError(
            f"cycle: r must be 0 or 2..{classes}, not {r}: no permutation moves exactly one label"
        )
    first = classes - r
    moved = [first + (place + 1) % r for place in range(r)]
    return Task(f"cycle {r}", (*range(first), *moved))


def symmetric(classes: int, last: int = 3) -> list[Task]:
    """All permutations of the last `last` labels, the identity first (V.3.d: S3, six tasks)."""
    if not 1 <= last <= _checked(classes):
        raise DataError(f"symmetric: last must be 1..{classes}, not {last}")
    first = classes - last
    return [
        Task(f"S{last} {' '.join(map(str, moved))}", (*range(first), *moved))
        for moved in itertools.permutations(range(first, classes))
    ]


def assign(peers: int, counts: Mapping[Task, int]) -> list[Task]:
    """One task for each peer, in order: `assign(16, {identity(10): 9, swap(10, 8, 9): 7})`."""
    if min(counts.values(), default=0) < 0 or sum(counts.values()) != peers:
        given = ", ".join(f"{task.name}: {count}" for task, count in counts.items()) or "none"
        raise DataError(
            f"assign: {peers} peers need counts of 0 or more that add up to {peers}, not {given}"
        )
    return [task for task, count in counts.items() for _ in range(count)]


def spread(peers: int, tasks: Sequence[Task]) -> list[Task]:
    """Tasks dealt round in turn: with 12 peers and 6 tasks, peers p and p + 6 share one."""
    if not tasks:
        raise DataError(f"spread: {peers} peers need at least one task")
    return [tasks[peer % len(tasks)] for peer in range(peers)]


def _checked(classes: int) -> int:
    if classes < 1:
        raise DataError(f"a task needs at least one class, not {classes}")
    return classes
