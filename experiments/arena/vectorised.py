"""Push-sum of many peers in virtual time: peers × coordinates in one array, no object per event.

The fast path of the event-driven simulator, for one vector per peer that nothing rounds or compresses. Time
advances in windows. The pushes of a window are planned first; then its events are applied in waves. A wave
holds the next event of every peer, unless that event depends on a push that was not made yet. So each peer's
events happen in order of time, whatever the length of the window. All peers of a wave are different, so a
wave is a few array operations, which can be split among threads.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import networkx as nx
import numpy as np

from ...gossip import MIN_WEIGHT, ONE
from .events import share_rule
from .network import (
    CHANGE,
    CREDIT,
    PUSH,
    SETTLE,
    TRAIN,
    Clock,
    Conditions,
    Flags,
    Floats,
    Ints,
    Plan,
    Timetable,
    Transfers,
    World,
)

Values: TypeAlias = np.ndarray[Any, np.dtype[np.floating[Any]]]

_BLOCK_BYTES = 1 << 18  # two such blocks fit into the second-level cache of current processors
_MIN_BYTES_FOR_THREADS = 1 << 20  # below this, starting threads takes longer than the work
_NO_CHANGES = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool))


@dataclass(frozen=True)
class Sample:
    """The progress of averaging at one time.

    error: distance of the estimates from the average of all mass, relative to the distance at the start.
    events: pushes, arrivals and returns of mass so far.
    """

    time: float
    error: float
    events: int


class VectorisedPushSum:
    """Averages one row of numbers per peer by push-sum, asynchronously.

        conditions = Conditions(training=parse("exponential:1"), delay=parse("gamma:0.5:2"))
        peers = VectorisedPushSum(values, graph, conditions)
        for sample in peers.run(seconds=60, every=5):
            print(sample.time, sample.error)

    values: peers × coordinates; peer i is node i of the graph.
    weights: units of push-sum weight per peer; `gossip.ONE` each by default.
    fanout: neighbours that receive a share in one push.
    fraction: the share of its weight that a peer sends in one push; by default, the chosen neighbours and the
        peer itself get equal parts.
    window: virtual seconds that are planned at once. It affects speed and memory, not the result.
    threads: threads for array operations. They do not affect the result.
    dtype: of the estimates; by default float64.
    on_trained: called as (peers, times) when some peers have done their local steps, each before its push; it
        may change the peers' estimates. Peers must not come and go then.
    on_credit: called with some peers before mass is added to theirs.

    `estimates` are the peers' current estimates of the average, and `weights` their weights. A weight is 0 if
    the peer is offline, or has arrived and not received a transfer yet; its estimate is then meaningless.
    `credits` counts how often mass was added to each peer's. `counters` counts events; "idle" are pushes for
    which no neighbour was free, and "transfer" is what was sent.
    """

    def __init__(
        self,
        values: Floats,
        graph: nx.Graph,
        conditions: Conditions,
        *,
        weights: Ints | None = None,
        fanout: int = 1,
        fraction: float | None = None,
        seed: int = 0,
        window: float | None = None,
        threads: int = 1,
        dtype: type[np.floating[Any]] = np.float64,
        on_trained: Callable[[Ints, Floats], None] | None = None,
        on_credit: Callable[[Ints], None] = lambda peers: None,
    ):
        if values.ndim != 2 or len(values) != len(graph):
            raise ValueError(
                f"values have shape {values.shape}: give one row for each of the {len(graph)} peers"
            )
        peers, coordinates = values.shape
        self.world = World(conditions, graph, seed)
        self.now = 0.0
        self.counters: Counter[str] = Counter()
        self.estimates = np.array(values, dtype=dtype)
        self.credits = np.zeros(peers, np.int64)
        self._initial_weights = (
            np.full(peers, ONE) if weights is None else np.array(weights, np.int64)
        )
        self._present = self.world.present_at(0.0)
        self.weights: Ints = np.where(self._present, self._initial_weights, 0)
        self._injected, self._died = Tally(coordinates), Tally(coordinates)
        self._injected.add(self.estimates, self.weights)
        self._rows, self._pool = Rows(self.estimates, threads), Pool(coordinates, dtype)
        self._on_trained, self._on_credit = on_trained, on_credit
        self._clock = None if on_trained is None else Clock(self.world, np.arange(peers))
        self._share = share_rule(fraction)
        self._timetable = Timetable(self.world, graph, fanout=fanout)
        self._open = OpenTransfers.of(self._timetable.until(0.0).transfers)  # none yet
        self._window = window or conditions.push_interval
        self._initial_distance = self._distance()

    @property
    def events(self) -> int:
        """Trainings, pushes, arrivals and returns so far."""
        return sum(self.counters[kind] for kind in ("training", "push", "arrival", "return"))

    def run(self, seconds: float, every: float | None = None) -> Iterator[Sample]:
        """Let virtual time pass; yield a sample after each `every` virtual seconds, and at the end."""
        start, end, samples = self.now, self.now + seconds, 0
        while self.now < end:
            samples += 1
            stop = end if every is None else min(start + samples * every, end)
            self.advance(stop)
            yield Sample(self.now, self.error(), self.events)

    def advance(self, until: float) -> None:
        """Let virtual time pass until a given time."""
        while self.now < until:
            self._advance(min(self.now + self._window, until))

    def error(self) -> float:
        """Root mean square distance of the estimates from the average, relative to the start."""
        return self._distance() / self._initial_distance if self._initial_distance else 0.0

    def average(self) -> Floats:
        """The limit of the estimates: the average of all mass, held by peers or in transit."""
        vector, weight = self.total()
        return vector / weight

    def total(self) -> tuple[Floats, int]:
        """The sums of weight · value and of weight, over all mass held by peers or in transit."""
        in_transit = self._open.where((self._open.arrives >= self.now) & (self._open.share > 0))
        vector = in_transit.share.astype(np.float64) @ self._pool.values[in_transit.row]
        vector = vector + self.weights.astype(np.float64) @ self.estimates
        return vector, int(in_transit.share.sum()) + int(self.weights.sum())

    def balance(self) -> dict[str, tuple[Floats, int]]:
        """Sums over all time: injected mass = present mass (`total`) + mass of peers that left (`died`)."""
        tallies = {"injected": self._injected, "died": self._died}
        return {"total": self.total()} | {n: (t.vector, t.weight) for n, t in tallies.items()}

    def _distance(self) -> float:
        """Root mean square distance from the average, over peers that are online and have weight."""
        average, counted = self.average(), self._present & (self.weights > 0)
        if not counted.any():
            return 0.0
        total = 0.0
        for peers in np.array_split(np.flatnonzero(counted), max(1, counted.sum() // 4096)):
            total += float(np.square(self.estimates[peers] - average).sum())
        return float(np.sqrt(total / counted.sum()))

    # --- one window -----------------------------------------------------------------------------

    def _advance(self, end: float) -> None:
        """Apply the events of a window, in waves of events that do not depend on each other."""
        plan = self._timetable.until(end)
        self.counters["idle"] += plan.idle
        first_new = len(self._open)
        transfers = self._open.extended(OpenTransfers.of(plan.transfers))
        trained = [] if self._clock is None else [(p, t) for _, p, t, _ in self._clock.until(end)]
        events = Events.of(self.world, plan, transfers, first_new, self.now, end, trained)
        fan = plan.fan
        first = first_new + np.cumsum(fan) - fan
        # How often the value of each push will be read: by its transfers' credits and their returns.
        uses = (
            np.isfinite(transfers.arrives[first_new:]).astype(np.int64)
            + transfers.returns[first_new:]
        )
        uses = np.bincount(plan.transfers.push, uses, len(fan)).astype(np.int64)
        done = np.zeros(len(fan) + 1, bool)
        done[-1] = True  # for events with after_push = −1, which depend on no push
        # Each peer's events are those from its `position`, the next one, to its `stop`.
        boundaries = np.flatnonzero(np.diff(events.peer, prepend=-1, append=-1))
        position, stop = boundaries[:-1].copy(), boundaries[1:]
        while len(position):
            ready = done[events.after_push[position]]
            wave = position[ready]
            kind, item, peer = events.kind[wave], events.item[wave], events.peer[wave]
            if (selected := kind == CREDIT).any():
                self.counters["arrival"] += int(selected.sum())
                self._absorb(peer[selected], item[selected], transfers)
            if (selected := kind == SETTLE).any():
                self._settle(peer[selected], item[selected], transfers)
            if self._on_trained is not None and (selected := kind == TRAIN).any():
                self.counters["training"] += int(selected.sum())
                self._on_trained(peer[selected], events.time[wave][selected])
            if (selected := kind == PUSH).any():
                push = item[selected]
                self._push(peer[selected], fan[push], first[push], uses[push], transfers)
                done[push] = True
            if (selected := kind == CHANGE).any():
                self._change(peer[selected], item[selected] == 1)
            position += ready
            unfinished = position < stop
            position, stop = position[unfinished], stop[unfinished]
        arriving_later = (transfers.arrives >= end) & (transfers.arrives < np.inf)
        self._open = transfers.where(
            arriving_later | (transfers.returns & (transfers.closes >= end))
        )
        self.now = end

    def _push(
        self, peer: Ints, fan: Ints, first: Ints, uses: Ints, transfers: OpenTransfers
    ) -> None:
        """Split off a share for each of `fan` neighbours; 0 if the weight is too small to be split."""
        weight = self.weights[peer]
        share = self._share(weight, fan)
        share[np.minimum(share, weight - share * fan) < MIN_WEIGHT] = 0
        self.weights[peer] = weight - share * fan
        rows = self._pool.take(uses)
        self._rows.copy(peer, self._pool.values, rows)
        within = np.arange(fan.sum()) - np.repeat(np.cumsum(fan) - fan, fan)
        index = np.repeat(first, fan) + within
        transfers.share[index] = np.repeat(share, fan)
        transfers.row[index] = np.repeat(rows, fan)
        self.counters["push"] += len(peer)
        self.counters["transfer"] += int(fan[share > 0].sum())
        self.counters["too little to split"] += int((share == 0).sum())

    def _absorb(self, peer: Ints, index: Ints, transfers: OpenTransfers) -> None:
        """Credit transfers to different peers. A newcomer takes over the value and adds its own weight."""
        every_row = transfers.row[index]
        has_weight = transfers.share[index] > 0
        peer, row = peer[has_weight], every_row[has_weight]
        share = transfers.share[index][has_weight]
        before = self.weights[peer]
        after = before + share
        self._on_credit(peer)
        self._rows.mix(peer, self._pool.values, row, share / after)
        self.credits[peer] += 1
        self.weights[peer] = after
        new = before == 0
        if new.any():
            newcomer = peer[new]
            self.estimates[newcomer] = self._pool.values[row[new]]
            self.weights[newcomer] += self._initial_weights[newcomer]
            self._injected.add(self.estimates[newcomer], self._initial_weights[newcomer])
        self._pool.count_use(every_row)

    def _settle(self, peer: Ints, index: Ints, transfers: OpenTransfers) -> None:
        """Return mass to its sender, unless the sender has left.

        Mass that was credited to a receiver which left is counted as lost until it returns here.
        """
        died, lost = transfers.sender_died[index], transfers.credited_then_lost[index]
        for flag, sign in ((died & ~lost, 1), (lost & ~died, -1)):
            if flag.any():
                share, row = transfers.share[index[flag]], transfers.row[index[flag]]
                self._died.add(self._pool.values[row], share, sign)
        self.counters["return"] += int((~died).sum())
        self._absorb(peer[~died], index[~died], transfers)
        self._pool.count_use(transfers.row[index[died]])

    def _change(self, peer: Ints, arrives: Flags) -> None:
        """Peers leave, and their mass is lost; or arrive, without weight until they receive a transfer."""
        leaving = peer[~arrives]
        self._died.add(self.estimates[leaving], self.weights[leaving])
        self.weights[leaving] = 0
        self._present[peer] = arrives


class Tally:
    """A sum of masses: weight · value, and weight."""

    def __init__(self, coordinates: int):
        self.vector = np.zeros(coordinates)
        self.weight = 0

    def add(self, values: Values, weights: Ints, sign: int = 1) -> None:
        """Add mass; with sign −1 take it away."""
        self.vector += sign * (weights.astype(np.float64) @ values)
        self.weight += sign * int(weights.sum())


@dataclass(frozen=True)
class OpenTransfers(Transfers):
    """Transfers that are not finished. share: the weight of each. row: that of its value in the pool."""

    share: Ints
    row: Ints

    @classmethod
    def of(cls, new: Transfers) -> OpenTransfers:
        """Transfers whose push was planned and not made yet: without share and row."""
        blank = np.zeros(len(new), np.int64)
        return cls(**vars(new), share=blank, row=blank.copy())


@dataclass
class Events:
    """The events of a window, sorted by peer and time.

    item: the index of the event's transfer or push; for changes, 1 if the peer arrives, 0 if it leaves; for
        trainings, nothing.
    after_push: the index of the push that must be made before; −1 for none.
    """

    peer: Ints
    time: Floats
    kind: Ints
    item: Ints
    after_push: Ints

    @classmethod
    def of(
        cls,
        world: World,
        plan: Plan,
        transfers: OpenTransfers,
        first_new: int,
        start: float,
        end: float,
        trained: Sequence[tuple[Ints, Floats]],
    ) -> Events:
        """All events of [start, end). Transfers from index `first_new` on belong to the plan's pushes.

        trained: peers that finish their local steps, and when.
        """
        credit = np.flatnonzero((transfers.arrives >= start) & (transfers.arrives < end))
        settle = np.flatnonzero(transfers.returns & (transfers.closes < end))
        after_push = np.full(len(credit), -1)
        new = credit >= first_new
        after_push[new] = plan.transfers.push[credit[new] - first_new]
        changing, change_time, arrives = world.changes(start, end) if world.churns else _NO_CHANGES
        receiver, sender = transfers.receiver[credit], transfers.sender[credit]
        giver, other = transfers.sender[settle], transfers.receiver[settle]
        columns = (
            # peer, time, kind, other (breaks ties), item, after_push
            (changing, change_time, CHANGE, arrives, arrives, -1),
            (receiver, transfers.arrives[credit], CREDIT, sender, credit, after_push),
            (giver, transfers.closes[settle], SETTLE, other, settle, -1),
            *((of_peer, at, TRAIN, 0, 0, -1) for of_peer, at in trained),
            (plan.peer, plan.time, PUSH, 0, np.arange(len(plan.peer)), -1),
        )
        filled = [[np.broadcast_to(c, len(rows[0])) for c in rows] for rows in columns]
        joined = (np.concatenate(column) for column in zip(*filled, strict=True))
        peer, time, kind, other, item, after_push = joined
        order = np.lexsort((kind * world.peers + other, time, peer))
        return cls(peer[order], time[order], kind[order], item[order], after_push[order])


class Pool:
    """Values in transit, as rows of one array; a row is reused after its last use."""

    def __init__(self, coordinates: int, dtype: type[np.floating[Any]]):
        rows = 64  # at first
        self.values = np.empty((rows, coordinates), dtype)
        self._uses = np.zeros(rows, np.int64)
        self._free = np.arange(rows)

    def take(self, uses: Ints) -> Ints:
        """Reserve a row for each number of uses, and return the indices of the rows."""
        if len(uses) > len(self._free):
            self._grow(len(uses) - len(self._free))
        rows, self._free = self._free[: len(uses)], self._free[len(uses) :]
        self._uses[rows] = uses
        return rows

    def count_use(self, rows: Ints) -> None:
        """Count one use of each row, two of a row that is given twice; free rows after their last use."""
        np.subtract.at(self._uses, rows, 1)
        done = rows[self._uses[rows] == 0]
        if len(done):
            self._free = np.concatenate([np.unique(done), self._free])

    def _grow(self, missing: int) -> None:
        old = len(self.values)
        more = max(missing, old // 2)
        empty = np.empty((more, self.values.shape[1]), self.values.dtype)
        self.values = np.concatenate([self.values, empty])
        self._uses = np.concatenate([self._uses, np.zeros(more, np.int64)])
        self._free = np.concatenate([self._free, np.arange(old, old + more)])


class Rows:
    """Copies and mixes rows of `table`, one per peer, in blocks that fit the cache, split among threads.

    The peers of one call must all be different.
    """

    def __init__(self, table: Values, threads: int = 1):
        self.table = table
        self._block = max(1, _BLOCK_BYTES // max(table.itemsize * table.shape[1], 1))
        self._executor = ThreadPoolExecutor(threads) if threads > 1 else None

    def copy(self, peer: Ints, target: Values, rows: Ints) -> None:
        """target[rows] = table[peer]"""

        def work(block: slice) -> None:
            target[rows[block]] = np.take(self.table, peer[block], axis=0, mode="clip")

        self._run_in_blocks(len(peer), work)

    def mix(self, peer: Ints, source: Values, rows: Ints, ratio: Floats) -> None:
        """table[peer] += ratio · (source[rows] − table[peer]): credit a transfer of push-sum."""
        factor = ratio.astype(self.table.dtype)  # as `gossip.absorb` rounds it

        def work(block: slice) -> None:
            current = np.take(self.table, peer[block], axis=0, mode="clip")
            step = np.take(source, rows[block], axis=0, mode="clip")
            step -= current
            step *= factor[block, None]
            step += current
            self.table[peer[block]] = step

        self._run_in_blocks(len(peer), work)

    def _run_in_blocks(self, count: int, work: Callable[[slice], None]) -> None:
        """Run `work` on blocks of rows. Rows are independent, so the split does not affect the result."""
        blocks = [slice(i, min(i + self._block, count)) for i in range(0, count, self._block)]
        if (
            self._executor is None
            or count * self.table.shape[1] * self.table.itemsize < _MIN_BYTES_FOR_THREADS
        ):
            for block in blocks:
                work(block)
        else:
            list(self._executor.map(work, blocks))


def peak_memory() -> int:
    """The peak memory of this process so far, in bytes."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        # Unlike ru_maxrss, this does not begin with what the process had that started this one.
        fields = dict(line.split(":", 1) for line in file)
        return int(fields["VmHWM"].split()[0]) * 1024
    import resource  # not available on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
