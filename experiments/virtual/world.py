"""What happens to peers and messages: how long things take, what is lost, who is there, who is cut off.

All of it follows from the seed and from schedules given in advance, and nothing from what peers hold:
that is why a transfer's fate is known when it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
import numpy as np

from ...topology import Event, churn
from .distributions import Distribution, TimeError
from .draws import Draws, Floats, Ints

Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True)
class Cut:
    """From `start` until `end` nothing passes between the peers of `side` and the others."""

    start: float
    end: float
    side: frozenset[int]


@dataclass(frozen=True)
class Conditions:
    """The world of a swarm, in virtual seconds.

    training: how long one stretch takes.
    every: stretches between two pushes; the drawn time counts for each of them.
    delay: how long a message is on its way, each way.
    stragglers: the share of peers that train `slowdown` times slower, drawn by the seed.
    loss: the probability that a message, or the answer to it, is lost.
    timeout: a transfer that was not answered for so long is settled with its receiver: mass that did
        not arrive returns to its sender. Lower it where messages are often lost; far below twice the
        delay, what is merely late is taken back as well.
    events, step: a churn trace (`topology.draw_events`), and the seconds that one of its steps lasts. Who
        leaves takes along what it held; who arrives counts anew once it has heard a neighbour.
    cuts: partitions.
    """

    training: Distribution
    delay: Distribution
    stragglers: float = 0.0
    slowdown: float = 10.0
    loss: float = 0.0
    timeout: float | None = None
    events: tuple[Event, ...] = ()
    step: float = 1.0
    cuts: tuple[Cut, ...] = ()
    every: int = 1

    def __post_init__(self) -> None:
        for name, share in (("stragglers", self.stragglers), ("loss", self.loss)):
            if not 0 <= share <= 1:
                raise TimeError(f"{name} is a share from 0 to 1, not {share:g}")
        for name, value in (("timeout", self.timeout), ("step", self.step)):
            if value is not None and not 0 < value < np.inf:
                raise TimeError(f"{name} is {value:g}, it must be positive")
        if not 1 <= self.slowdown < np.inf:
            raise TimeError(f"slowdown is {self.slowdown:g}, it must be at least 1")
        for cut in self.cuts:
            if not 0 <= cut.start < cut.end:
                raise TimeError(
                    f"a partition from {cut.start:g} to {cut.end:g}: it must start at 0 or later and "
                    "end after it started"
                )

    @property
    def pace(self) -> float:
        """The mean time between two pushes of a peer that is not slow."""
        return self.training.mean * self.every

    @property
    def patience(self) -> float:
        """The timeout, by default ten mean delays."""
        return 10 * self.delay.mean if self.timeout is None else self.timeout


class World:
    """Conditions applied to peers 0 … n−1 of a graph. All methods take and return whole arrays."""

    def __init__(self, conditions: Conditions, graph: nx.Graph, seed: int):
        self.conditions = conditions
        self.peers = len(graph)
        self.draws = Draws(seed)
        everyone = np.arange(self.peers)
        slow = self.draws.uniform("straggler", everyone)
        count = round(conditions.stragglers * self.peers)
        self._slowness = np.full(self.peers, float(conditions.every))
        self._slowness[np.argsort(slow, kind="stable")[:count]] *= conditions.slowdown
        self._sides = [
            (cut.start, cut.end, np.isin(everyone, sorted(cut.side))) for cut in conditions.cuts
        ]
        for cut in conditions.cuts:
            if cut.side and not 0 <= min(cut.side) <= max(cut.side) < self.peers:
                stranger = next(p for p in cut.side if not 0 <= p < self.peers)
                raise TimeError(
                    f"a partition names peer {stranger}, but peers are 0 to {self.peers - 1}"
                )
        self._lives(graph)

    # --- durations ------------------------------------------------------------------------------

    def training(self, peer: Ints, count: Ints) -> Floats:
        """How long it takes a peer to get from push number `count` − 1 to the next."""
        times = self.conditions.training
        keys = np.zeros_like(count) if times.fixed else count
        return times.at(self.draws.uniform("training", peer, keys)) * self._slowness[peer]

    def delay(self, lane: int, sender: Ints, receiver: Ints, count: Ints, way: str) -> Floats:
        """How long a message takes; a fixed delay is that of the link, whatever it carries."""
        times = self.conditions.delay
        if times.fixed:
            a, b = np.minimum(sender, receiver), np.maximum(sender, receiver)
            return times.at(self.draws.uniform("link", a, b))
        if times.kind == "constant":
            return times.at(np.zeros(len(sender)))
        return times.at(self.draws.uniform(f"{way} {lane}", sender, receiver, count))

    def lost(
        self, lane: int, sender: Ints, receiver: Ints, count: Ints, way: str, time: Floats
    ) -> Flags:
        """Whether a message sent at `time` is lost: by chance, a failed link or a partition."""
        gone = ~self.link_up(sender, receiver, time)
        if self.conditions.loss:
            chance = self.draws.uniform(f"loss {way} {lane}", sender, receiver, count)
            gone |= chance < self.conditions.loss
        for start, end, side in self._sides:
            gone |= (start <= time) & (time < end) & (side[sender] != side[receiver])
        return gone

    # --- who is there ---------------------------------------------------------------------------

    def life(self, peer: Ints, time: Floats) -> Ints:
        """Which of its lives a peer is in, or was in last; −1 before the first."""
        return np.asarray((self.starts[peer] <= time[:, None]).sum(axis=1) - 1, np.int64)

    def present(self, peer: Ints, time: Floats) -> Flags:
        """Whether a peer is there."""
        if not self.churns:
            return np.ones(len(peer), bool)
        return (time < self.end(peer, self.life(peer, time))) & (time >= self.starts[peer, 0])

    def start(self, peer: Ints, life: Ints) -> Floats:
        """When a life begins; infinity if there is no such life."""
        return self.starts[peer, np.minimum(life, self.starts.shape[1] - 1)]

    def end(self, peer: Ints, life: Ints) -> Floats:
        """When a life ends."""
        return self.ends[peer, life]

    def link_up(self, sender: Ints, receiver: Ints, time: Floats) -> Flags:
        """Whether the link between two peers works."""
        if not self._links:
            return np.ones(len(sender), bool)
        keys = sender * self.peers + receiver
        at = np.minimum(np.searchsorted(self._link_keys, keys), len(self._link_keys) - 1)
        flips = (self._flips[at] <= time[:, None]).sum(axis=1)
        return (self._link_keys[at] != keys) | (flips % 2 == 0)

    def changes(self, start: float, end: float) -> tuple[Ints, Floats, Flags]:
        """Peers, times and kinds (True: arrives) of the comings and goings in [start, end)."""
        found = []
        for table, arrives in ((self.ends, False), (self.starts, True)):
            peer, column = np.nonzero((table >= start) & (table < end) & (table > 0))
            found.append((peer, table[peer, column], np.full(len(peer), arrives)))
        peer, time, kind = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return peer, time, kind

    def _lives(self, graph: nx.Graph) -> None:
        """Tables of when each peer's lives start and end, and of when links fail and heal."""
        events = sorted(self.conditions.events, key=lambda event: event.step)
        first: dict[int, str] = {}
        for event in events:
            if event.other is None:
                first.setdefault(event.peer, event.kind)
        away = [peer for peer, kind in first.items() if kind == "arrive"]
        churn(graph, events, away)  # says which event makes no sense
        step = self.conditions.step
        starts = [[0.0] for _ in range(self.peers)]
        ends: list[list[float]] = [[] for _ in range(self.peers)]
        for peer in away:
            starts[peer].clear()
        self._links: dict[int, list[float]] = {}
        for event in events:
            time = event.step * step
            if event.kind == "arrive":
                starts[event.peer].append(time)
            elif event.kind == "leave":
                ends[event.peer].append(time)
            else:
                assert event.other is not None
                self._links.setdefault(event.peer * self.peers + event.other, []).append(time)
                if not graph.is_directed():
                    self._links.setdefault(event.other * self.peers + event.peer, []).append(time)
        self.churns = any(event.other is None for event in events)
        self.starts = _padded(starts, 1)  # one column more: the life that never comes
        self.ends = _padded(ends, self.starts.shape[1] - max(map(len, ends)))
        self._link_keys = np.array(sorted(self._links), dtype=np.int64)
        self._flips = _padded([self._links[key] for key in sorted(self._links)], 0)


def _padded(rows: Iterable[list[float]], extra: int) -> Floats:
    """Rows of unequal length as one array, filled up with infinity."""
    known = list(rows)
    width = max((len(row) for row in known), default=0) + extra
    table = np.full((len(known), max(width, 1)), np.inf)
    for index, row in enumerate(known):
        table[index, : len(row)] = row
    return table
