"""A network in memory, in virtual time, with faults on demand: for tests and simulations.

Everything follows from the seed: the same sends at the same times meet the same fate.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from .gossiper import Gossiper


class Addressed(Protocol):
    """Anything with a sender and a receiver: the gossip messages, or bytes in an envelope."""

    @property
    def sender(self) -> str:
        """The name of the peer that sends it."""
        ...

    @property
    def receiver(self) -> str:
        """The name of the peer it is for."""
        ...


M = TypeVar("M", bound=Addressed)


@dataclass(frozen=True, slots=True)
class Envelope:
    """Bytes on their way from one peer to another."""

    sender: str
    receiver: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Partition:
    """From `start` until `end` nothing passes between `side` and the other peers."""

    start: float
    end: float
    side: frozenset[str]

    def cuts(self, a: str, b: str, now: float) -> bool:
        """Whether messages from a to b sent now are lost."""
        return self.start <= now < self.end and (a in self.side) != (b in self.side)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What the network does to messages; probabilities are per message.

    drop, duplicate: probabilities of losing a message, and of delivering it a second time.
    delay: (least, most) seconds on the way, drawn uniformly. Messages keep their order per link
        unless reordered.
    reorder: probability of being held up by another `most` delay or more, and overtaken.
    partitions: when which peers are cut off from the others.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay: tuple[float, float] = (0.01, 0.01)
    partitions: tuple[Partition, ...] = ()

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "reorder"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"fault plan: {name} is {getattr(self, name)}, not within 0..1")
        if not 0 <= self.delay[0] <= self.delay[1]:
            raise ValueError(f"fault plan: delay {self.delay} is not (least, most)")


class MemoryNetwork(Generic[M]):
    """Carries messages between peers. `counters` says what became of them.

    seed: an int or a numpy Generator.
    faults: what to do to messages; may be replaced at any time.
    """

    def __init__(
        self, seed: int | np.random.Generator = 0, faults: FaultPlan | None = None
    ) -> None:
        self.faults = faults or FaultPlan()
        self.counters: Counter[str] = Counter()
        self._rng = np.random.default_rng(seed)
        self._queue: list[tuple[float, int, M]] = []
        self._last: dict[tuple[str, str], float] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._queue)

    def send(self, message: M, now: float) -> None:
        """Put a message on its way, or lose it, as the faults have it."""
        self.counters["sent"] += 1
        link = (message.sender, message.receiver)
        if any(cut.cuts(*link, now) for cut in self.faults.partitions):
            self.counters["partitioned"] += 1
        elif self._rng.random() < self.faults.drop:
            self.counters["dropped"] += 1
        else:
            self._schedule(message, now)
            if self._rng.random() < self.faults.duplicate:
                self.counters["duplicated"] += 1
                self._schedule(message, now)

    def deliver(self, now: float) -> list[M]:
        """Return the messages that have arrived by now, in order of arrival."""
        due: list[M] = []
        while self._queue and self._queue[0][0] <= now:
            due.append(heapq.heappop(self._queue)[2])
        self.counters["delivered"] += len(due)
        return due

    def next_arrival(self) -> float | None:
        """Return when the next message arrives; None if none is on its way."""
        return self._queue[0][0] if self._queue else None

    def _schedule(self, message: M, now: float) -> None:
        least, most = self.faults.delay
        arrival = now + self._rng.uniform(least, most)
        link = (message.sender, message.receiver)
        if self._rng.random() < self.faults.reorder:
            self.counters["reordered"] += 1
            arrival += (most or 0.01) * (1 + self._rng.random())
        else:
            arrival = max(arrival, self._last.get(link, 0.0))
            self._last[link] = arrival
        self._number += 1  # ties keep the order of sending
        heapq.heappush(self._queue, (arrival, self._number, message))


def introduce(
    gossipers: Iterable[Gossiper], edges: Collection[tuple[str, str]] | None = None
) -> None:
    """Tell every gossiper that the others are online, for the vectors that both have.

    edges: directed (from, to) pairs along which mass may be pushed; by default all.
    """
    everyone = list(gossipers)
    for a in everyone:
        for b in everyone:
            if a is not b:
                along = edges is None or (a.peer, b.peer) in edges
                a.peer_online(b.peer, b.session, b.vectors if along else ())


def run(
    gossipers: Mapping[str, Gossiper],
    network: MemoryNetwork,
    *,
    start: float = 0.0,
    seconds: float = 60.0,
    step: float = 0.01,
    until: Callable[[], bool] | None = None,
) -> float:
    """Drive gossipers over a network for some virtual seconds, or until a condition holds.

    Returns the virtual time at the end. Messages to peers that are not in `gossipers` vanish.
    """
    ticks = round(seconds / step)
    now = start
    for tick in range(ticks + 1):
        now = start + tick * step
        for message in network.deliver(now):
            if message.receiver in gossipers:
                gossipers[message.receiver].handle(message, now)
            else:
                network.counters["no-such-peer"] += 1
        for gossiper in gossipers.values():
            gossiper.tick(now)
            for message in gossiper.poll():
                network.send(message, now)
        if until is not None and until():
            break
    return now
