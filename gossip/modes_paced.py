"""Asynchronous gossip at the pace of training: push when the driver says so, never wait."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .modes import ManualMode
from .pushsum import FLOOR, portion

if TYPE_CHECKING:
    from .gossiper import Gossiper


class PacedMode(ManualMode):
    """Every request is one push of each vector to one random neighbour that is free.

    Where `AsyncMode` keeps to a clock, this keeps to the work done: a slow machine gossips as often
    per training step as a fast one. What cannot be pushed now (no neighbour is free) is pushed later,
    but no more than `backlog` pushes per vector pile up.

    fraction: the share of the held weight that is given away, between 0 and 1 exclusive.
    floor: do not push while a share or the rest would fall below this weight.
    """

    def __init__(self, *, fraction: float = 0.5, backlog: int = 4, floor: int = FLOOR) -> None:
        if not 0 < fraction < 1:
            raise ValueError(f"paced mode: fraction is {fraction}, must lie between 0 and 1")
        self.fraction, self.backlog, self.floor = fraction, backlog, floor
        self._requested = 0
        self._owed: Counter[str] = Counter()

    def request(self, pushes: int = 1) -> None:
        """Ask for `pushes` more pushes of every vector."""
        self._requested += pushes

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Push what is owed, as far as neighbours are free."""
        for vector in gossiper.vectors:
            self._owed[vector] = min(self._owed[vector] + self._requested, self.backlog)
            while self._owed[vector] and self._push(gossiper, vector, now):
                self._owed[vector] -= 1
        self._requested = 0

    def _push(self, gossiper: Gossiper, vector: str, now: float) -> bool:
        weight = gossiper.weight(vector)
        share = portion(weight, self.fraction)
        free = gossiper.free_neighbours(vector)
        if not free or min(share, weight - share) < self.floor:
            return False
        neighbour = free[gossiper.rng.integers(len(free))]
        return gossiper.push(vector, {neighbour: share}, now)
