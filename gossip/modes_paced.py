"""Asynchronous gossip at the pace of training: push when the driver says so, never wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from .drift import Drift
from .modes import ManualMode
from .pushsum import FLOOR, portion

if TYPE_CHECKING:
    from .gossiper import Gossiper


class PacedMode(ManualMode):
    """Every request is one push of each vector, in equal parts to a few random neighbours.

    Where `AsyncMode` keeps to a clock, this keeps to the work done: a slow machine gossips as often
    per training step as a fast one. What cannot be pushed now (no neighbour is free) is pushed later,
    but no more than `backlog` pushes per vector pile up.

    fanout: neighbours that share in one push. Raise it if peers disagree too much while training:
        four in one push mix better than four pushes to one, because weights stay more even.
    fraction: the share of the held weight that one push gives away, between 0 and 1 exclusive; by
        default an equal part for each of the neighbours and for the peer itself.
    ahead: transfers of one vector that may be on their way before `caught_up` is false. Training moves
        only the weight that is held, so what is on its way learns nothing: raise it from 0 only where
        links are slow and training is not.
    floor: do not push while a share or the rest would fall below this weight.
    turns: for graphs that change over time: the neighbours that push after push may be given to, over and
        over. A turn in which nobody can be reached passes.
    drift: skips a push of what has hardly moved since the last one.
    """

    def __init__(
        self,
        fanout: int = 1,
        *,
        fraction: float | None = None,
        ahead: int = 0,
        backlog: int = 2,
        floor: int = FLOOR,
        turns: Sequence[Collection[str]] = (),
        drift: Drift | None = None,
    ) -> None:
        if fanout < 1:
            raise ValueError(f"paced mode: fanout is {fanout}, must be at least 1")
        if fraction is not None and not 0 < fraction < 1:
            raise ValueError(f"paced mode: fraction is {fraction}, must lie between 0 and 1")
        self.fanout, self.fraction = fanout, fraction
        self.ahead = ahead
        self.backlog, self.floor = backlog, floor
        self._requested = 0
        self._owed: Counter[str] = Counter()
        self._turns = [frozenset(turn) for turn in turns]
        self._turn: Counter[str] = Counter()
        self._drift = drift
        self._welcomes: set[tuple[str, str]] = set()

    def welcome(self, vector: str, peer: str) -> None:
        """Push to a neighbour that counts for nothing yet as soon as it is free, not after training."""
        self._welcomes.add((vector, peer))

    def request(self, *, anyway: bool = False) -> None:
        """Ask for one more push of every vector; `anyway`, from now on, however little they moved."""
        self._requested += 1
        if anyway:
            self._drift = None

    def caught_up(self, gossiper: Gossiper) -> bool:
        """Whether neighbours keep up with what is pushed to them; if not, a driver trains later.

        It is no barrier: whoever answers lets the peer go on, and who cannot be reached is not
        waited for.
        """
        return all(gossiper.in_flight(vector) <= self.ahead for vector in gossiper.vectors)

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Push what is owed, as far as neighbours are free."""
        for vector in gossiper.vectors:
            self._owed[vector] = min(self._owed[vector] + self._requested, self.backlog)
            while self._owed[vector] and self._push(gossiper, vector, now):
                self._owed[vector] -= 1
        self._requested = 0
        for vector, peer in sorted(self._welcomes):
            weight = gossiper.weight(vector)
            share = portion(weight, Fraction(1, self.fanout + 1))
            # Below the floor too: a newcomer that hears nothing never gives, and nobody else may be there
            # to lift a weight that was lost to somebody who died.
            if min(share, weight - share) < 1:
                continue
            if peer not in gossiper.reachable_neighbours(vector):
                self._welcomes.discard((vector, peer))
            elif peer in gossiper.free_neighbours(vector):
                self._welcomes.discard((vector, peer))
                gossiper.push(vector, {peer: share}, now)

    def _push(self, gossiper: Gossiper, vector: str, now: float) -> bool:
        free = gossiper.free_neighbours(vector)
        if self._turns:
            whose = self._turns[self._turn[vector] % len(self._turns)]
            free = [peer for peer in free if peer in whose]
            if not free and not whose.intersection(gossiper.reachable_neighbours(vector)):
                self._turn[vector] += 1
                return True
        if not free:
            return False
        chosen = gossiper.rng.permutation(len(free))[: self.fanout]
        weight = gossiper.weight(vector)
        if self.fraction is None:
            share = portion(weight, Fraction(1, len(chosen) + 1))
        else:
            share = portion(weight, self.fraction) // len(chosen)
        if min(share, weight - share * len(chosen)) < self.floor:
            return False
        self._turn[vector] += 1
        if self._drift is not None:
            value = gossiper.value(vector)
            if self._drift.small(vector, value):
                self._drift.skip(vector, len(chosen), value.size)
                return True
        return gossiper.push(vector, {free[index]: share for index in chosen}, now)
