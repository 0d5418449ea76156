"""Synchronous push-sum: the paper's "train, then average", in lockstep with the neighbours.

In every exchange each peer splits its mass over itself and its out-neighbours, and goes on when it
has credited the mass of all its in-neighbours. Mass of a later exchange is held back until its turn,
so that the result is that of a matrix power, whatever the network drops, repeats or reorders.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from .messages import Give
from .pushsum import portion

if TYPE_CHECKING:
    from .gossiper import Gossiper


def exchanges_for(tolerance: float, rate: float) -> int:
    """Return how many exchanges shrink disagreement by `tolerance` when each multiplies it by `rate`.

    The rate of a topology is |λ2| of its column-stochastic matrix.
    """
    if not (0 < tolerance < 1 and 0 <= rate < 1):
        raise ValueError(f"tolerance {tolerance} and rate {rate} must lie between 0 and 1")
    return 1 if rate <= tolerance else math.ceil(math.log(tolerance) / math.log(rate))


@dataclass(slots=True)
class _Course:
    """How far one vector has come: exchange `at` of round `round`; idle after the last exchange."""

    round: int = -1
    at: int = 0
    pushed: bool = False
    idle: bool = True
    sources: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)


class RoundsMode:
    """Rounds of a fixed number of exchanges; `exchanges_for` turns a tolerance into that number.

    The driver calls `begin_round(gossiper, r)` with r = 0, 1, 2, … after training, ticks until
    `finished(r)`, and trains again. All peers of a vector use the same numbers.

    exchanges: exchanges per round. Raise it for a better average, at that many messages per edge.
    sources: per vector, the in-neighbours to wait for; by default the peers it is pushed to, which
        is right for undirected graphs.
    shares: per vector, the fraction given to each out-neighbour (the peer's column of a
        column-stochastic matrix, itself left out); by default equal parts for all and itself.
    """

    def __init__(
        self,
        exchanges: int,
        *,
        sources: Mapping[str, Collection[str]] | None = None,
        shares: Mapping[str, Mapping[str, float | Fraction]] | None = None,
    ) -> None:
        if exchanges < 1:
            raise ValueError(f"rounds mode: exchanges is {exchanges}, must be at least 1")
        self.exchanges = exchanges
        self._sources = sources
        self._shares = shares
        self._courses: dict[str, _Course] = {}

    def begin_round(self, gossiper: Gossiper, number: int) -> None:
        """Start averaging all vectors; every one must have weight and the last round be finished."""
        for vector in gossiper.vectors:
            course = self._courses.setdefault(vector, _Course())
            if not course.idle or number <= course.round:
                raise ValueError(
                    f"round {number} of {vector!r} cannot begin: round {course.round} is "
                    f"{'over' if course.idle else 'not finished'}"
                )
            if gossiper.weight(vector) == 0:
                raise ValueError(
                    f"round {number}: peer {gossiper.peer!r} holds no weight of {vector!r}, and its "
                    f"neighbours would wait in vain; inject some first"
                )
            neighbours = gossiper.neighbours(vector)
            sources = neighbours if self._sources is None else self._sources.get(vector, ())
            self._courses[vector] = _Course(number, 0, False, False, set(sources))

    def finished(self, number: int) -> bool:
        """Whether this round is over for every vector."""
        return bool(self._courses) and all(
            c.round > number or (c.round == number and c.idle) for c in self._courses.values()
        )

    def admit(self, give: Give) -> bool:
        """Hold what belongs to a later exchange. Late or untagged mass (a leaver's) joins at once."""
        if give.tag is None:
            return True
        course = self._courses.get(give.vector, _Course())
        if course.idle:
            return give.tag[0] <= course.round
        now = (course.round, course.at)
        return give.tag < now or (give.tag == now and course.pushed)

    def credited(self, give: Give) -> None:
        """Strike the sender off the list of those still to come in this exchange."""
        course = self._courses.get(give.vector)
        if course is not None and give.tag == (course.round, course.at):
            course.missing.discard(give.sender)

    def refused(self, give: Give) -> None:
        """Wait for its sender no longer: nothing else will come from it in this exchange."""
        self.credited(give)

    def returned(self, give: Give) -> None:
        """Need no note: what came back joins the mass of the exchange under way."""

    def gone(self, peer: str) -> None:
        """Wait for this peer no longer, in this round."""
        for course in self._courses.values():
            course.sources.discard(peer)
            course.missing.discard(peer)

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Go on, in every vector, as far as what has arrived allows."""
        for vector, course in self._courses.items():
            while not course.idle and self._advance(gossiper, vector, course, now):
                pass

    def snapshot(self) -> dict[str, Any]:
        """Return how far every vector has come."""
        return {
            vector: [c.round, c.at, c.pushed, c.idle, sorted(c.sources), sorted(c.missing)]
            for vector, c in self._courses.items()
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over how far every vector had come."""
        for vector, (number, at, pushed, idle, sources, missing) in data.items():
            self._courses[vector] = _Course(number, at, pushed, idle, set(sources), set(missing))

    def _advance(self, gossiper: Gossiper, vector: str, course: _Course, now: float) -> bool:
        """Push, or end an exchange that is complete; say whether anything moved."""
        if not course.pushed:
            if not self._push(gossiper, vector, (course.round, course.at), now):
                return False
            course.pushed = True
            course.missing = set(course.sources)
            gossiper.release(vector)
            return True
        if course.missing:
            return False
        course.at += 1
        course.pushed = False
        course.idle = course.at == self.exchanges
        return True

    def _push(self, gossiper: Gossiper, vector: str, tag: tuple[int, int], now: float) -> bool:
        """Split the mass over the out-neighbours at once; not while one of the edges is busy."""
        neighbours = gossiper.neighbours(vector)
        if len(gossiper.free_neighbours(vector, online_only=False)) < len(neighbours):
            return False
        weight = gossiper.weight(vector)
        if self._shares is None:
            part = weight // (len(neighbours) + 1)
            shares = dict.fromkeys(neighbours, part)
        else:
            column = self._shares[vector]
            shares = {p: portion(weight, column[p]) for p in neighbours if p in column}
        if not shares:
            return True
        if min(shares.values()) < 1:
            gossiper.counters["starved"] += 1
            return False
        # What cannot be written stays here: neighbours that know this need not wait for it.
        return gossiper.push(vector, shares, now, tag) or gossiper.skip(vector, shares, now, tag)
