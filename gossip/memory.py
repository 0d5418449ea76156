"""Simulated networks for tests and simulations: what goes wrong with messages, and a network that does it.

Everything follows from the seed: the same messages sent at the same times have the same outcome.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from .gossiper import Gossiper
from .wire import Message

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Partition:
    """From `start` until `end` nothing passes between the peers of `side` and the others.

    Peers are named as their network names them: by strings here, by numbers in the arena.
    """

    start: float
    end: float
    side: frozenset[Any]

    def separates(self, a: Any, b: Any, now: float) -> bool:
        """Return whether messages from a to b sent now are lost."""
        return self.start <= now < self.end and (a in self.side) != (b in self.side)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What a network does to messages; probabilities are per message.

    loss, duplicate: probabilities of losing a message, and of delivering it a second time.
    delay: (least, most) time on the way, drawn uniformly, in the unit of the network's clock: seconds, or
        turns of the event loop for a `MemoryBroker`.
    reorder: probability of being held up by one to two times the largest delay, and overtaken.
    partitions: when which peers are cut off from the others; a `MemoryBroker` has none.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay: tuple[float, float] = (0.0, 0.0)
    partitions: tuple[Partition, ...] = ()

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "reorder"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"fault plan: {name} is {getattr(self, name)}, not within 0..1")
        if not 0 <= self.delay[0] <= self.delay[1]:
            raise ValueError(f"fault plan: delay {self.delay} is not (least, most)")

    def outcome(
        self, rng: np.random.Generator, counters: Counter[str], tick: float
    ) -> list[tuple[float, bool]]:
        """Draw what becomes of one message: for each copy that arrives its delay, and if it is overtaken.

        tick: the least time by which a message is held up.
        """
        if rng.random() < self.loss:
            counters["lost"] += 1
            return []
        copies = 1
        if rng.random() < self.duplicate:
            counters["duplicated"] += 1
            copies = 2
        least, most = self.delay
        drawn: list[tuple[float, bool]] = []
        for _ in range(copies):
            delay, overtaken = rng.uniform(least, most), bool(rng.random() < self.reorder)
            if overtaken:
                counters["reordered"] += 1
                delay += max(most, tick) * (1 + rng.random())
            drawn.append((delay, overtaken))
        return drawn


class MemoryNetwork(Generic[M]):
    """Carries messages between peers. `counters` says what became of them.

    seed: an int or a numpy Generator.
    faults: what to do to messages, which arrive after 0.01 s and in order if left out; may be replaced at
        any time. Messages keep their order per link unless reordered.
    """

    def __init__(
        self, seed: int | np.random.Generator = 0, faults: FaultPlan | None = None
    ) -> None:
        self.faults = faults or FaultPlan(delay=(0.01, 0.01))
        self.counters: Counter[str] = Counter()
        self._rng = np.random.default_rng(seed)
        self._queue: list[tuple[float, int, M]] = []
        self._last: dict[tuple[str, str], float] = {}
        self._number = 0

    def send(self, message: M, now: float) -> None:
        """Put a message on its way, or lose it, as the faults have it."""
        self.counters["sent"] += 1
        link = (message.sender, message.receiver)
        if any(each.separates(*link, now) for each in self.faults.partitions):
            self.counters["partitioned"] += 1
            return
        for delay, overtaken in self.faults.outcome(self._rng, self.counters, 0.01):
            arrival = now + delay
            if not overtaken:
                arrival = self._last[link] = max(arrival, self._last.get(link, 0.0))
            self._number += 1  # ties keep the order of sending
            heapq.heappush(self._queue, (arrival, self._number, message))

    def deliver(self, now: float) -> list[M]:
        """Return the messages that have arrived by now, in order of arrival."""
        due: list[M] = []
        while self._queue and self._queue[0][0] <= now:
            due.append(heapq.heappop(self._queue)[2])
        self.counters["delivered"] += len(due)
        return due


def introduce(
    gossipers: Iterable[Gossiper], edges: Collection[tuple[str, str]] | None = None
) -> None:
    """Tell every gossiper that the others are online, for the models that both have.

    edges: directed (from, to) pairs along which mass may be pushed; by default all.
    """
    everyone = list(gossipers)
    for a in everyone:
        for b in everyone:
            if a is not b:
                along = edges is None or (a.peer, b.peer) in edges
                a.peer_online(b.peer, b.session, b.models if along else ())


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
