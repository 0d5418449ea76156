"""Simulated networks: durations of training and messages, losses, presence of peers and partitions; and
timetables: which peer pushes to which neighbours, when, and the outcome of each transfer.

All of this is computed from a seed and from schedules given in advance. It does not depend on the peers'
values, so the outcome of a transfer is known when it is sent. Therefore a whole window of virtual time is
planned for all peers first, and the values are computed afterwards (`vectorised.py`, `events.py`). Durations
are named distributions, written as in a config:

"constant:1"    "uniform:0.5:1.5"    "exponential:2"    "lognormal:1:0.5"    "gamma:1:4"
{kind = "lognormal", median = 1, sigma = 0.5}    {kind = "gamma", mean = 0.2, shape = 4, fixed = true}
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, TypeAlias

import networkx as nx
import numpy as np
from scipy import special

from gossamer.errors import hint

from ...gossip import Partition
from ...topology import Event, churn
from ..errors import ConfigError

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Hashes: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1, _MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class TimeError(ConfigError):
    """Invalid times, losses or schedules; the message says what to write instead."""


# --- random numbers ---------------------------------------------------------------------------------


class Draws:
    """Random numbers that depend on their purpose, not on the order in which they are drawn.

    Every draw is a hash of (seed, purpose, keys). So the twelfth message from peer 3 to peer 7 has the same
    delay whether events are handled one by one or ten thousand at a time, on one thread or on many.
    """

    def __init__(self, seed: int):
        self._seed = np.uint64(seed % (1 << 64))

    def hashes(self, purpose: str, *keys: Ints) -> Hashes:
        """One 64-bit hash per element; `keys` are arrays of one length."""
        state = _mix(np.array([self._seed ^ np.uint64(zlib.crc32(purpose.encode()) << 17)]))
        for key in keys:
            state = _mix(state ^ key.astype(np.uint64))
        return state

    def uniform(self, purpose: str, *keys: Ints) -> Floats:
        """Numbers strictly between 0 and 1, one per element."""
        hashes = self.hashes(purpose, *keys)
        return ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(state: Hashes) -> Hashes:
    """One step of the splitmix64 generator: each bit of the result depends on all bits of the input."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return state ^ (state >> np.uint64(31))


# --- durations --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A family of distributions: the names of its parameters, its mean, and its quantile function."""

    names: tuple[str, ...]
    mean: Callable[..., float]
    quantile: Callable[..., Floats]


FAMILIES: Mapping[str, Family] = {
    "constant": Family(("value",), lambda value: value, lambda u, value: np.full_like(u, value)),
    "uniform": Family(
        ("low", "high"),
        lambda low, high: (low + high) / 2,
        lambda u, low, high: low + (high - low) * u,
    ),
    "exponential": Family(("mean",), lambda mean: mean, lambda u, mean: -mean * np.log1p(-u)),
    "lognormal": Family(
        ("median", "sigma"),
        lambda median, sigma: median * math.exp(sigma**2 / 2),
        lambda u, median, sigma: median * np.exp(sigma * special.ndtri(u)),
    ),
    "gamma": Family(
        ("mean", "shape"),
        lambda mean, shape: mean,
        lambda u, mean, shape: mean / shape * special.gammaincinv(shape, u),
    ),
}
"""The distributions by the name that a config uses."""

MAX_SIGMA = 30
"""The largest sigma of a lognormal distribution, whose mean would overflow beyond 37."""


@dataclass(frozen=True)
class Distribution:
    """A distribution of durations in seconds. `at(u)` turns uniform random numbers into durations.

    kind, parameters: as in the table `FAMILIES`.
    fixed: one duration is drawn for each peer or link and kept, so that some are always slow; otherwise a new
        duration is drawn each time.
    """

    kind: str
    parameters: tuple[float, ...]
    fixed: bool = False

    @property
    def mean(self) -> float:
        """The mean duration."""
        return FAMILIES[self.kind].mean(*self.parameters)

    def at(self, uniform: Floats) -> Floats:
        """The quantiles at numbers between 0 and 1."""
        return FAMILIES[self.kind].quantile(uniform, *self.parameters)

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{value:g}" for value in self.parameters)])


def parse(spec: str | Mapping[str, Any] | float, what: str = "duration") -> Distribution:
    """Parse a distribution; a plain number is a constant. Error messages begin with `what`."""
    if _is_number(spec):
        table: dict[str, Any] = {"kind": "constant", "value": spec}
    elif isinstance(spec, str):
        kind, *arguments = spec.split(":")
        names = FAMILIES[kind].names if kind in FAMILIES else ()
        if names and len(arguments) != len(names):
            raise TimeError(f"{what} is {spec!r}: write {':'.join([kind, *names])}, with numbers")
        table = {"kind": kind, **dict(zip(names, arguments, strict=False))}
    elif isinstance(spec, Mapping):
        table = dict(spec)
    else:
        raise TimeError(f"{what} is {spec!r}: write a number, 'exponential:1', or a table")
    kind = table.pop("kind", None)
    if not isinstance(kind, str):
        raise TimeError(f"{what} needs a kind, one of {', '.join(FAMILIES)}")
    if kind not in FAMILIES:
        suggestion = hint(kind, FAMILIES, are="known are")
        raise TimeError(f"{what}: unknown distribution {kind!r}; {suggestion}")
    names = FAMILIES[kind].names
    fixed = table.pop("fixed", False)
    if not isinstance(fixed, bool):
        raise TimeError(f"{what}: fixed is {fixed!r}, not true or false")
    for name in (name for name in table if name not in names):
        suggestion = hint(name, names, are="it takes")
        raise TimeError(f"{what}: {kind} has no parameter {name!r}; {suggestion}")
    for name in names:
        if name not in table:
            raise TimeError(f"{what}: {kind} needs {name!r}")
        if not _is_number(table[name]):
            raise TimeError(f"{what}: {name} is {table[name]!r}, not a number")
        if not 0 < float(table[name]) < math.inf:
            raise TimeError(f"{what}: {name} is {table[name]}, it must be positive")
    values = tuple(float(table[name]) for name in names)
    if kind == "uniform" and values[0] > values[1]:
        raise TimeError(f"{what}: uniform's low, {values[0]:g}, is above its high, {values[1]:g}")
    if kind == "lognormal" and values[1] > MAX_SIGMA:
        raise TimeError(f"{what}: lognormal's sigma is {values[1]:g}: give at most {MAX_SIGMA}")
    return Distribution(kind, values, fixed)


def _is_number(spec: Any) -> bool:
    try:
        float(spec)
    except (TypeError, ValueError):
        return False
    return not isinstance(spec, bool)


# --- conditions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conditions:
    """How peers and links behave, in virtual seconds.

    training: how long the local steps of one round take.
    every: rounds of local steps between two pushes; the drawn time counts for each of them.
    delay: how long a message takes; an answer takes another delay.
    stragglers: the share of peers that train `slowdown` times slower, drawn by the seed.
    loss: the probability that a message, or the answer to it, is lost.
    timeout: after so many seconds without an answer, the sender asks the receiver about a transfer, and takes
        back mass that did not arrive. Lower it if messages are often lost; far below twice the delay, mass
        that is merely late is taken back as well. By default ten mean delays.
    events, step: a churn trace (`topology.draw_events`), and the seconds that one of its steps lasts. The
        mass of a peer that leaves is lost; a peer that arrives joins the average with its own weight after
        its first received transfer.
    partitions: times during which some peers are cut off from the others.
    """

    training: Distribution
    delay: Distribution
    stragglers: float = 0.0
    slowdown: float = 10.0
    loss: float = 0.0
    timeout: float | None = None
    events: tuple[Event, ...] = ()
    step: float = 1.0
    partitions: tuple[Partition, ...] = ()
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
        for partition in self.partitions:
            if not 0 <= partition.start < partition.end:
                raise TimeError(
                    f"a partition from {partition.start:g} to {partition.end:g}: it must start at 0 or later "
                    "and end after it started"
                )

    @property
    def push_interval(self) -> float:
        """The mean time between two pushes of a peer that is not slow."""
        return self.training.mean * self.every

    @property
    def transfer_timeout(self) -> float:
        """The timeout, by default ten mean delays."""
        return 10 * self.delay.mean if self.timeout is None else self.timeout


class World:
    """Conditions applied to peers 0 … n−1 of a graph. All methods take and return whole arrays.

    starts, ends: for each peer the times at which its sessions begin and end, padded with infinity.
    """

    def __init__(self, conditions: Conditions, graph: nx.Graph, seed: int):
        self.conditions = conditions
        self.peers = len(graph)
        self.draws = Draws(seed)
        all_peers = np.arange(self.peers)
        straggler_draws = self.draws.uniform("straggler", all_peers)
        count = round(conditions.stragglers * self.peers)
        self._slowness = np.full(self.peers, float(conditions.every))
        self._slowness[np.argsort(straggler_draws, kind="stable")[:count]] *= conditions.slowdown
        # (start, end, whether each peer is on the partition's first side)
        self._partitions = [
            (partition.start, partition.end, np.isin(all_peers, sorted(partition.side)))
            for partition in conditions.partitions
        ]
        for peer in (peer for partition in conditions.partitions for peer in partition.side):
            if not 0 <= peer < self.peers:
                raise TimeError(
                    f"a partition names peer {peer}, but peers are 0 to {self.peers - 1}"
                )
        self._tabulate(graph)

    # --- durations and losses -------------------------------------------------------------------

    def training(self, peer: Ints, count: Ints) -> Floats:
        """How long each peer trains between its pushes number `count` − 1 and `count`."""
        duration = self.conditions.training
        keys = np.zeros_like(count) if duration.fixed else count
        return duration.at(self.draws.uniform("training", peer, keys)) * self._slowness[peer]

    def delay(self, lane: int, sender: Ints, receiver: Ints, count: Ints, message: str) -> Floats:
        """How long each message takes; fixed delays depend only on the link, in both directions.

        lane: see Timetable. count: the number of the transfer's push. message: "give" or "answer".
        """
        duration = self.conditions.delay
        if duration.fixed:
            a, b = np.minimum(sender, receiver), np.maximum(sender, receiver)
            return duration.at(self.draws.uniform("link", a, b))
        if duration.kind == "constant":
            return duration.at(np.zeros(len(sender)))
        return duration.at(self.draws.uniform(f"{message} {lane}", sender, receiver, count))

    def lost(
        self, lane: int, sender: Ints, receiver: Ints, count: Ints, message: str, time: Floats
    ) -> Flags:
        """Whether a message sent at `time` is lost: by chance, a failed link or a partition; see `delay`."""
        lost = ~self.link_up(sender, receiver, time)
        if self.conditions.loss:
            chance = self.draws.uniform(f"loss {message} {lane}", sender, receiver, count)
            lost |= chance < self.conditions.loss
        for start, end, side in self._partitions:
            lost |= (start <= time) & (time < end) & (side[sender] != side[receiver])
        return lost

    def link_up(self, sender: Ints, receiver: Ints, time: Floats) -> Flags:
        """Whether the link between two peers works."""
        if not len(self._link_keys):
            return np.ones(len(sender), bool)
        keys = sender * self.peers + receiver
        rows = np.minimum(np.searchsorted(self._link_keys, keys), len(self._link_keys) - 1)
        changes = (self._link_changes[rows] <= time[:, None]).sum(axis=1)
        return (self._link_keys[rows] != keys) | (changes % 2 == 0)  # the first change is a failure

    # --- presence -------------------------------------------------------------------------------

    def session(self, peer: Ints, time: Floats) -> Ints:
        """The number of the session that a peer is in, or was in last; −1 before the first."""
        return np.asarray((self.starts[peer] <= time[:, None]).sum(axis=1) - 1, np.int64)

    def present(self, peer: Ints, time: Floats) -> Flags:
        """Whether each peer is online at its time."""
        if not self.churns:
            return np.ones(len(peer), bool)
        return (time < self.end(peer, self.session(peer, time))) & (time >= self.starts[peer, 0])

    def present_at(self, time: float) -> Flags:
        """Whether each peer of the world is online at one time."""
        return self.present(np.arange(self.peers), np.full(self.peers, time))

    def start(self, peer: Ints, session: Ints) -> Floats:
        """When a session begins; infinity if there is no such session."""
        return self.starts[peer, np.minimum(session, self.starts.shape[1] - 1)]

    def end(self, peer: Ints, session: Ints) -> Floats:
        """When a session ends."""
        return self.ends[peer, session]

    def changes(self, start: float, end: float) -> tuple[Ints, Floats, Flags]:
        """The arrivals and departures in [start, end): peers, times, and True for arrivals."""
        columns = []
        for table, arrives in ((self.ends, False), (self.starts, True)):
            peer, column = np.nonzero((table >= start) & (table < end) & (table > 0))
            columns.append((peer, table[peer, column], np.full(len(peer), arrives)))
        peer, time, arrival = (np.concatenate(arrays) for arrays in zip(*columns, strict=True))
        return peer, time, arrival

    def _tabulate(self, graph: nx.Graph) -> None:
        """Make tables of when each peer's sessions start and end, and of when links fail and heal."""
        events = sorted(self.conditions.events, key=lambda event: event.step)
        first_event: dict[int, str] = {}
        for event in events:
            if event.other is None:
                first_event.setdefault(event.peer, event.kind)
        absent = [peer for peer, kind in first_event.items() if kind == "arrive"]
        if events:
            churn(graph, events, absent)  # raises if events contradict each other
        starts = [[0.0] for _ in range(self.peers)]
        ends: list[list[float]] = [[] for _ in range(self.peers)]
        for peer in absent:
            starts[peer].clear()
        links: dict[int, list[float]] = {}
        for event in events:
            time = event.step * self.conditions.step
            if event.kind == "arrive":
                starts[event.peer].append(time)
            elif event.kind == "leave":
                ends[event.peer].append(time)
            else:
                assert event.other is not None
                links.setdefault(event.peer * self.peers + event.other, []).append(time)
                if not graph.is_directed():
                    links.setdefault(event.other * self.peers + event.peer, []).append(time)
        self.churns = any(event.other is None for event in events)
        # One more column of infinity: the start of the session after the last.
        self.starts = _padded(starts, 1)
        self.ends = _padded(ends, self.starts.shape[1] - max(map(len, ends)))
        self._link_keys = np.array(sorted(links), dtype=np.int64)
        self._link_changes = _padded([links[key] for key in sorted(links)], 0)


def _padded(rows: Iterable[list[float]], extra: int) -> Floats:
    """Rows of unequal length as one array, padded with infinity."""
    lists = list(rows)
    width = max((len(row) for row in lists), default=0) + extra
    table = np.full((len(lists), max(width, 1)), np.inf)
    for index, row in enumerate(lists):
        table[index, : len(row)] = row
    return table


# --- timetables -------------------------------------------------------------------------------------

# Kinds of events. A peer's events at the same time happen in this order.
CHANGE, CREDIT, SETTLE, TRAIN, PUSH = range(5)

_KEY_BITS = (
    44  # bits of a 64-bit sort key that are random; the higher bits are the index of the push
)


@dataclass(frozen=True)
class Transfers:
    """Transfers, one per row of each array. `push` is the index of the transfer's push in the same plan.

    arrives: when it is credited; infinity if it never is.
    closes: when the sender receives the answer, or settles the transfer; then the link is free again.
    acknowledged: whether the answer reached the sender before its timeout.
    returns: whether the sender takes the mass back when the transfer closes.
    credited_then_lost: whether the mass that returns had been credited to a receiver that left afterwards.
    sender_died: whether the sender has left before the mass could return, so that this mass is lost.
    """

    push: Ints
    sender: Ints
    receiver: Ints
    arrives: Floats
    closes: Floats
    acknowledged: Flags
    returns: Flags
    credited_then_lost: Flags
    sender_died: Flags

    def __len__(self) -> int:
        return len(self.push)

    def where(self, mask: Flags) -> Self:
        """The transfers for which `mask` is True."""
        return type(self)(*(getattr(self, each.name)[mask] for each in fields(self)))

    def extended(self, others: Self) -> Self:
        """These transfers, followed by `others`."""
        columns = ((getattr(self, each.name), getattr(others, each.name)) for each in fields(self))
        return type(self)(*map(np.concatenate, columns))


@dataclass(frozen=True)
class Plan:
    """The pushes of a window of virtual time: peer, time, number of neighbours (`fan`), and their transfers.

    `idle` counts pushes for which no neighbour was free.
    """

    peer: Ints
    time: Floats
    fan: Ints
    transfers: Transfers
    idle: int


class Clock:
    """Computes when peers finish their local steps. Peers that are offline do not train."""

    def __init__(self, world: World, peers: Ints):
        self._world, self._peers = world, peers
        self._count = np.zeros(len(peers), np.int64)
        self._session = np.zeros(len(peers), np.int64)
        self._due = world.start(peers, self._session) + world.training(peers, self._count)
        self._skip_absences(np.arange(len(peers)))

    def until(self, end: float) -> Iterator[tuple[Ints, Ints, Floats, Ints]]:
        """Yield (indices, peers, times, counts) of all local steps that end before `end`.

        A peer appears at most once in every array, and its times increase from one array to the next.
        """
        while len(indices := np.flatnonzero(self._due < end)):
            peer, time = self._peers[indices], self._due[indices].copy()
            count = self._count[indices].copy()
            self._count[indices] += 1
            self._due[indices] = _after(time, self._world.training(peer, self._count[indices]))
            self._skip_absences(indices)
            yield indices, peer, time, count

    def _skip_absences(self, indices: Ints) -> None:
        """Restart local steps that a peer could not finish in the peer's next session."""
        if not self._world.churns:
            return
        while True:
            peer, session = self._peers[indices], self._session[indices]
            interrupted = np.isfinite(self._due[indices]) & (
                self._due[indices] >= self._world.end(peer, session)
            )
            if not interrupted.any():
                return
            indices = indices[interrupted]
            self._session[indices] += 1
            starts = self._world.start(self._peers[indices], self._session[indices])
            self._due[indices] = starts + self._world.training(
                self._peers[indices], self._count[indices]
            )


class Timetable:
    """Plans the pushes of one vector on one graph.

    A peer trains, then pushes to a few random neighbours to which it has no open transfer. The time of the
    push, its targets, and the arrivals of messages and answers are computed from the seed, the world's
    schedules and the peer's own earlier pushes.

    graph: which peers may push to which; its nodes are numbers below `world.peers`, not necessarily all.
    fanout: neighbours that receive a share in one push.
    lane: the number of this vector, so that its random choices are independent of other vectors'.
    in_turn: whether neighbours that have waited longest come first; else they are random.
    """

    def __init__(
        self,
        world: World,
        graph: nx.Graph,
        *,
        fanout: int = 1,
        lane: int = 0,
        in_turn: bool = False,
    ):
        self._world, self._fanout, self._lane = world, fanout, lane
        self._in_turn = in_turn
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
        self._last_push = np.full(len(pairs), -1, np.int64)
        """The number of the sender's push in which a link was last used."""
        self._session = np.zeros(len(pairs), np.int64)
        """The sender's session in which a link's last transfer was opened."""

    def until(self, end: float) -> Plan:
        """Plan all pushes before `end` that were not planned before."""
        # Empty columns of each type, for a window without pushes.
        ints, floats, flags = np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool)
        pushes = [(ints, floats, ints)]
        transfers: list[tuple[Any, ...]] = [(ints, ints, ints, floats, floats, *[flags] * 4)]
        idle, number = 0, 0
        for indices, peer, time, count in self._clock.until(end):
            edge, push = self._choose(indices, time, count)
            fan = np.bincount(push, minlength=len(indices))
            has_targets = fan > 0
            idle += len(indices) - int(has_targets.sum())
            index = number + np.cumsum(has_targets) - 1
            number += int(has_targets.sum())
            pushes.append((peer[has_targets], time[has_targets], fan[has_targets]))
            outcomes = self._outcomes(edge, time[push], count[push])
            transfers.append((index[push], self.sender[edge], self.receiver[edge], *outcomes))
        peer, time, fan = (np.concatenate(column) for column in zip(*pushes, strict=True))
        columns = (np.concatenate(column) for column in zip(*transfers, strict=True))
        return Plan(peer, time, fan, Transfers(*columns), idle)

    def _choose(self, indices: Ints, time: Floats, count: Ints) -> tuple[Ints, Ints]:
        """The links used by pushes of the peers at `indices`, and for each the position of its push there."""
        degree = self._degree[indices]
        push = np.repeat(np.arange(len(indices)), degree)
        within = np.arange(len(push)) - np.repeat(np.cumsum(degree) - degree, degree)
        edge = self._first[indices][push] + within
        push_time = time[push]
        is_open = self._closes[edge] > push_time
        if self._world.churns:  # a new session does not have the open transfers of the old one
            is_open &= self._session[edge] == self._world.session(self.sender[edge], push_time)
        free = ~is_open & self._world.link_up(self.sender[edge], self.receiver[edge], push_time)
        free &= self._world.present(self.receiver[edge], push_time)
        edge, push = edge[free], push[free]
        purpose = f"target {self._lane}"
        keys = self._world.draws.hashes(
            purpose, self.sender[edge], self.receiver[edge], count[push]
        )
        keys = (push.astype(np.uint64) << np.uint64(_KEY_BITS)) | (
            keys >> np.uint64(64 - _KEY_BITS)
        )
        order = np.argsort(keys, kind="stable")
        if self._in_turn:
            order = np.lexsort((keys, self._last_push[edge], push))
        edge, push = edge[order], push[order]
        first = np.searchsorted(push, push)
        chosen = np.arange(len(push)) - first < self._fanout
        self._last_push[edge[chosen]] = count[push[chosen]]
        return edge[chosen], push[chosen]

    def _outcomes(self, edge: Ints, time: Floats, count: Ints) -> tuple[Floats | Flags, ...]:
        """The outcomes of transfers along links: the columns of `Transfers` from `arrives` on."""
        world, lane = self._world, self._lane
        sender, receiver = self.sender[edge], self.receiver[edge]
        latest = time + world.conditions.transfer_timeout
        arrives = _after(time, world.delay(lane, sender, receiver, count, "give"))
        credited = ~world.lost(lane, sender, receiver, count, "give", time) & (arrives < latest)
        leaves = comes_back = np.full(len(edge), np.inf)
        if world.churns:
            session = world.session(receiver, time)
            leaves, comes_back = world.end(receiver, session), world.start(receiver, session + 1)
            credited &= arrives < leaves
        answer = _after(arrives, world.delay(lane, receiver, sender, count, "answer"))
        acknowledged = credited & (answer < latest) & (answer < comes_back)
        acknowledged &= ~world.lost(lane, receiver, sender, count, "answer", arrives)
        receiver_died = ~acknowledged & (leaves <= latest)
        returns = ~credited | receiver_died
        # When a receiver comes back in a new session, its old ledger is lost: mass of transfers that were
        # not answered until then returns, whether it was credited or not.
        closes = np.where(
            acknowledged, answer, np.where(receiver_died, np.minimum(latest, comes_back), latest)
        )
        sender_died = np.zeros(len(edge), bool)
        if world.churns:
            sender_session = world.session(sender, time)
            self._session[edge] = sender_session
            sender_died = returns & (closes >= world.end(sender, sender_session))
        self._closes[edge] = closes
        arrives = np.where(credited, arrives, np.inf)
        return arrives, closes, acknowledged, returns, credited & returns, sender_died


def _after(time: Floats, duration: Floats) -> Floats:
    """The end of a duration, which is always later than its start, even after rounding."""
    return np.maximum(time + duration, np.nextafter(time, np.inf))
