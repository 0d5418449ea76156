"""Rows of values on their way: one array that is reused, however many transfers pass through it."""

from __future__ import annotations

import numpy as np

from .draws import Floats, Ints


class Pool:
    """Holds copies of values until they were used as often as announced."""

    def __init__(self, coordinates: int, rows: int = 64):
        self.values = np.empty((rows, coordinates))
        self._uses = np.zeros(rows, np.int64)
        self._free = np.arange(rows - 1, -1, -1)
        self._count = rows  # how many of `_free` are free

    def take(self, uses: Ints) -> Ints:
        """Reserve a row for each number of uses, and return where they are."""
        if len(uses) > self._count:
            self._grow(len(uses) - self._count)
        self._count -= len(uses)
        rows = self._free[self._count : self._count + len(uses)].copy()
        self._uses[rows] = uses
        return rows

    def used(self, rows: Ints) -> None:
        """Note that rows were used once; one that may occur twice is counted twice."""
        np.subtract.at(self._uses, rows, 1)
        done = rows[self._uses[rows] == 0]
        if len(done):
            done = np.unique(done)
            self._free[self._count : self._count + len(done)] = done
            self._count += len(done)

    @property
    def held(self) -> int:
        """How many rows are reserved."""
        return len(self.values) - self._count

    def _grow(self, missing: int) -> None:
        old = len(self.values)
        more = max(missing, old // 2)
        grown: Floats = np.empty((old + more, self.values.shape[1]))
        grown[:old] = self.values
        self.values = grown
        self._uses = np.concatenate([self._uses, np.zeros(more, np.int64)])
        free = np.empty(old + more, np.int64)
        free[: self._count] = self._free[: self._count]
        free[self._count : self._count + more] = np.arange(old + more - 1, old - 1, -1)
        self._free, self._count = free, self._count + more
