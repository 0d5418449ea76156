"""Timetables: who pushes to whom, when, how much, and the outcome; nothing here depends on values.

A peer trains, then pushes to a few random neighbours to which no transfer is open. When that is, whom it
picks, when the message arrives and whether its answer does, follow from the seed, the world's schedules
and the peer's own earlier pushes. So a whole window of virtual time is laid out at once, for all peers,
and the values flow through it afterwards (`vectorised.py`, `events.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Self

import networkx as nx
import numpy as np

from .network import Flags, Floats, Ints, World

ShareRule = Callable[[Any, Any], Any]
"""(weights, neighbours in the push) → the units of weight that each neighbour is given; ints or arrays."""

_KEY_BITS = 44  # of a sort key's 64; the rest numbers the pushes of one step


@dataclass(frozen=True)
class Pushes:
    """Moments at which a peer pushes, and to how many neighbours."""

    peer: Ints
    time: Floats
    fan: Ints

    def __len__(self) -> int:
        return len(self.peer)


@dataclass(frozen=True)
class Transfers:
    """Mass on its way. `push` is the place of the push it belongs to in the same plan.

    arrives: when it is credited; infinity if it never is.
    closes: when its sender hears of that, or settles it: from then on the link is free again.
    heard: whether the answer reached the sender before its timeout.
    returns: whether the sender then takes the mass back.
    credited_then_lost: whether the mass that returns had been credited to a receiver that died with it.
    sender_died: whether the sender is gone by then, and with it what would have returned.
    """

    push: Ints
    sender: Ints
    receiver: Ints
    arrives: Floats
    closes: Floats
    heard: Flags
    returns: Flags
    credited_then_lost: Flags
    sender_died: Flags

    def __len__(self) -> int:
        return len(self.push)

    def where(self, chosen: Flags) -> Self:
        """Some of them."""
        return type(self)(*(getattr(self, each.name)[chosen] for each in fields(self)))

    def and_then(self, others: Self) -> Self:
        """Both, in this order."""
        both = ((getattr(self, each.name), getattr(others, each.name)) for each in fields(self))
        return type(self)(*(np.concatenate(pair) for pair in both))


@dataclass(frozen=True)
class Plan:
    """A window of virtual time. `idle` counts pushes for which no neighbour was free."""

    pushes: Pushes
    transfers: Transfers
    idle: int


class Clock:
    """When peers end their local steps. Peers that are away do not train."""

    def __init__(self, world: World, peers: Ints):
        self._world, self._peers = world, peers
        self._count = np.zeros(len(peers), np.int64)
        self._session = np.zeros(len(peers), np.int64)
        self._due = world.start(peers, self._session) + world.training(peers, self._count)
        self._skip_absences(np.arange(len(peers)))

    def until(self, end: float) -> Iterator[tuple[Ints, Ints, Floats, Ints]]:
        """Yield (places, peers, times, counts) of all local steps that end before `end`.

        A peer appears once in every array that is yielded, and its times rise from one to the next.
        """
        while len(at := np.flatnonzero(self._due < end)):
            peer, time, count = self._peers[at], self._due[at].copy(), self._count[at].copy()
            self._count[at] += 1
            self._due[at] = _after(time, self._world.training(peer, self._count[at]))
            self._skip_absences(at)
            yield at, peer, time, count

    def _skip_absences(self, at: Ints) -> None:
        """Local steps that a peer does not live to end are begun again in its next session."""
        if not self._world.churns:
            return
        while True:
            peer, session = self._peers[at], self._session[at]
            cut_off = np.isfinite(self._due[at]) & (self._due[at] >= self._world.end(peer, session))
            if not cut_off.any():
                return
            at = at[cut_off]
            self._session[at] += 1
            starts = self._world.start(self._peers[at], self._session[at])
            self._due[at] = starts + self._world.training(self._peers[at], self._count[at])


class Timetable:
    """Lays out the pushes of one vector on one graph.

    graph: who may give to whom; its peers are numbers below `world.peers`, not necessarily all.
    fanout: neighbours that share in one push.
    lane: a number that sets this vector's random choices apart from those of others.
    """

    def __init__(self, world: World, graph: nx.Graph, *, fanout: int = 1, lane: int = 0):
        self._world, self._fanout, self._lane = world, fanout, lane
        self.peers = np.array(sorted(graph.nodes), dtype=np.int64)
        pairs = np.array(list(graph.edges), dtype=np.int64).reshape(-1, 2)
        if not graph.is_directed():
            pairs = np.concatenate([pairs, pairs[:, ::-1]])
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
        self.sender, self.receiver = pairs[:, 0].copy(), pairs[:, 1].copy()
        self._first = np.searchsorted(self.sender, self.peers)
        self._degree = np.searchsorted(self.sender, self.peers, side="right") - self._first
        self._clock = Clock(world, self.peers)
        self._closes = np.full(len(pairs), -np.inf)
        self._session = np.zeros(len(pairs), np.int64)
        """In which session of the sender a link's last transfer was opened."""

    def until(self, end: float) -> Plan:
        """Lay out everything that is pushed before `end` and was not laid out before."""
        none, never, no = np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool)
        pushes = [(none, never, none)]
        transfers: list[tuple[Any, ...]] = [(none, none, none, never, never, no, no, no, no)]
        idle, number = 0, 0
        for at, peer, time, count in self._clock.until(end):
            edge, push = self._choose(at, time, count)
            fan = np.bincount(push, minlength=len(at))
            used = fan > 0
            idle += len(at) - int(used.sum())
            place = number + np.cumsum(used) - 1
            number += int(used.sum())
            pushes.append((peer[used], time[used], fan[used]))
            outcomes = self._outcomes(edge, time[push], count[push])
            transfers.append((place[push], self.sender[edge], self.receiver[edge], *outcomes))
        return Plan(
            Pushes(*(np.concatenate(column) for column in zip(*pushes, strict=True))),
            Transfers(*(np.concatenate(column) for column in zip(*transfers, strict=True))),
            idle,
        )

    def _choose(self, at: Ints, time: Floats, count: Ints) -> tuple[Ints, Ints]:
        """The links that are pushed along, and for each the place of its push in `at`."""
        degree = self._degree[at]
        push = np.repeat(np.arange(len(at)), degree)
        within = np.arange(len(push)) - np.repeat(np.cumsum(degree) - degree, degree)
        edge = self._first[at][push] + within
        when = time[push]
        open_ = self._closes[edge] > when
        if self._world.churns:  # a new session knows nothing of the old one's transfers
            open_ &= self._session[edge] == self._world.session(self.sender[edge], when)
        free = ~open_ & self._world.link_up(self.sender[edge], self.receiver[edge], when)
        free &= self._world.present(self.receiver[edge], when)
        edge, push = edge[free], push[free]
        purpose = f"target {self._lane}"
        keys = self._world.draws.hashes(
            purpose, self.sender[edge], self.receiver[edge], count[push]
        )
        keys = (push.astype(np.uint64) << np.uint64(_KEY_BITS)) | (
            keys >> np.uint64(64 - _KEY_BITS)
        )
        order = np.argsort(keys, kind="stable")
        edge, push = edge[order], push[order]
        first = np.searchsorted(push, push)
        chosen = np.arange(len(push)) - first < self._fanout
        return edge[chosen], push[chosen]

    def _outcomes(self, edge: Ints, time: Floats, count: Ints) -> tuple[Floats | Flags, ...]:
        """The outcomes of transfers along links: the columns of `Transfers` from `arrives` on."""
        world, lane = self._world, self._lane
        sender, receiver = self.sender[edge], self.receiver[edge]
        latest = time + world.conditions.transfer_timeout
        arrives = _after(time, world.delay(lane, sender, receiver, count, "give"))
        given = ~world.lost(lane, sender, receiver, count, "give", time) & (arrives < latest)
        dies = back = np.full(len(edge), np.inf)
        if world.churns:
            session = world.session(receiver, time)
            dies, back = world.end(receiver, session), world.start(receiver, session + 1)
            given &= arrives < dies
        answer = _after(arrives, world.delay(lane, receiver, sender, count, "answer"))
        heard = given & (answer < latest) & (answer < back)
        heard &= ~world.lost(lane, receiver, sender, count, "answer", arrives)
        dead = ~heard & (dies <= latest)
        returns = ~given | dead
        # A receiver that comes back in a new session shows that its old ledger is gone: what was not
        # answered until then returns, credited or not.
        closes = np.where(heard, answer, np.where(dead, np.minimum(latest, back), latest))
        sender_died = np.zeros(len(edge), bool)
        if world.churns:
            own = world.session(sender, time)
            self._session[edge] = own
            sender_died = returns & (closes >= world.end(sender, own))
        self._closes[edge] = closes
        arrives = np.where(given, arrives, np.inf)
        return arrives, closes, heard, returns, given & returns, sender_died


def _after(time: Floats, duration: Floats) -> Floats:
    """The end of a duration, later than its start even if rounding would make them equal."""
    return np.maximum(time + duration, np.nextafter(time, np.inf))


def share_rule(fraction: float | None) -> ShareRule:
    """Equal parts for neighbours and peer, or a fraction of the weight, split among neighbours.

    All in whole units. The fraction is taken as a ratio of numbers small enough that products of
    weights never overflow.
    """
    if fraction is None:
        return lambda weight, fan: weight // (fan + 1)
    if not 0 < fraction < 1:
        raise ValueError(f"fraction is {fraction}, it must lie between 0 and 1")
    top, bottom = Fraction(fraction).limit_denominator(1 << 20).as_integer_ratio()
    return lambda weight, fan: (weight // bottom * top + weight % bottom * top // bottom) // fan
