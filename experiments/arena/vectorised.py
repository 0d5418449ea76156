"""Push-sum of many peers in virtual time: peers × coordinates in one array, no object per event.

The fast path of the event-driven simulator, for one vector per peer and nothing to learn. Time advances in
windows. A window's timetable is laid out first; then its events are applied in waves: a wave holds, for every
peer, its next event, if the push that this event waits for has been made. Each peer's events thus happen in
order of time, whatever the length of the window, and peers of a wave are all different, so that a wave is a
few operations on arrays, in as many threads as one likes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import networkx as nx
import numpy as np

from ...gossip import FLOOR, ONE
from .network import (
    CHANGE,
    CREDIT,
    PUSH,
    SETTLE,
    Conditions,
    Flags,
    Floats,
    Ints,
    Plan,
    Timetable,
    Transfers,
    World,
    share_rule,
)

_BLOCK_BYTES = 1 << 18  # two of these fit the second-level cache of any machine of today
_WORTH_A_THREAD = 1 << 20
_NOBODY = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool))


@dataclass(frozen=True)
class Sample:
    """The peers at one moment.

    error: how far estimates are from the average of all mass, relative to the start.
    events: pushes, arrivals and returns so far: what moved mass.
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
    weights: units of push-sum weight per peer (`gossip.ONE` is one peer's), all the same if left out.
    fanout: neighbours that share in one push.
    fraction: the share of its weight that a peer gives away in one push; equal parts for the chosen
        neighbours and the peer itself if left out.
    window: virtual seconds that are laid out at once. It changes speed and memory, never a result.
    threads: likewise.

    `estimates` are the peers' estimates of the average, as they are now, and `weights` their weights: 0 for
    those that are away, or have arrived and heard nobody yet; their estimates mean nothing.
    `counters` says what happened; "idle" are pushes for which no neighbour was free.
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
    ):
        if values.ndim != 2 or len(values) != len(graph):
            raise ValueError(
                f"values have shape {values.shape}: give one row for each of the {len(graph)} peers"
            )
        peers, coordinates = values.shape
        self.world = World(conditions, graph, seed)
        self.now = 0.0
        self.counters: Counter[str] = Counter()
        self.estimates = np.array(values, dtype=np.float64)
        self._own = np.full(peers, ONE) if weights is None else np.array(weights, np.int64)
        self._present = self.world.present_at(0.0)
        self.weights: Ints = np.where(self._present, self._own, 0)
        self._injected, self._died = Tally(coordinates), Tally(coordinates)
        self._injected.add(self.estimates, self.weights)
        self._rows, self._pool = Rows(self.estimates, threads), Pool(coordinates)
        self._share = share_rule(fraction)
        self._timetable = Timetable(self.world, graph, fanout=fanout)
        self._open = Open.of(self._timetable.until(0.0).transfers)  # none yet
        self._window = window or conditions.push_interval
        self._spread = self._distance()

    @property
    def events(self) -> int:
        """Pushes, arrivals and returns so far."""
        return sum(self.counters[kind] for kind in ("push", "arrival", "return"))

    def run(self, seconds: float, every: float | None = None) -> Iterator[Sample]:
        """Let time pass; yield a sample every so many virtual seconds, and at the end."""
        start, end, turn = self.now, self.now + seconds, 0
        while self.now < end:
            turn += 1
            stop = end if every is None else min(start + turn * every, end)
            while self.now < stop:
                self._advance(min(self.now + self._window, stop))
            yield Sample(self.now, self.error(), self.events)

    def error(self) -> float:
        """Root mean square distance of the estimates from the average, relative to the start."""
        return self._distance() / self._spread if self._spread else 0.0

    def average(self) -> Floats:
        """What the estimates tend to: the average of all mass, held or on its way."""
        vector, weight = self.total()
        return vector / weight

    def total(self) -> tuple[Floats, int]:
        """The sums of weight · value and of weight, over what is held and what is on its way."""
        flying = self._open.where((self._open.arrives >= self.now) & (self._open.share > 0))
        vector = flying.share.astype(np.float64) @ self._pool.values[flying.row]
        vector = vector + self.weights.astype(np.float64) @ self.estimates
        return vector, int(flying.share.sum()) + int(self.weights.sum())

    def balance(self) -> dict[str, tuple[Floats, int]]:
        """Sums over all time: what was injected is what there is (`total`) and what died."""
        tallies = {"injected": self._injected, "died": self._died}
        return {"total": self.total()} | {n: (t.vector, t.weight) for n, t in tallies.items()}

    def _distance(self) -> float:
        """Root mean square distance from the average, over peers that are there and have a weight."""
        average, counted = self.average(), self._present & (self.weights > 0)
        if not counted.any():
            return 0.0
        total = 0.0
        for part in np.array_split(np.flatnonzero(counted), max(1, counted.sum() // 4096)):
            total += float(np.square(self.estimates[part] - average).sum())
        return float(np.sqrt(total / counted.sum()))

    # --- one window -----------------------------------------------------------------------------

    def _advance(self, end: float) -> None:
        """Let the events of a window happen, in waves of events that do not depend on each other."""
        plan = self._timetable.until(end)
        self.counters["idle"] += plan.idle
        fresh = len(self._open)
        open_ = self._open.and_then(Open.of(plan.transfers))
        events = Events.of(self.world, plan, open_, fresh, self.now, end)
        fan = plan.fan
        first = fresh + np.cumsum(fan) - fan
        uses = np.isfinite(open_.arrives[fresh:]).astype(np.int64) + open_.returns[fresh:]
        uses = np.bincount(plan.transfers.push, uses, len(fan)).astype(np.int64)
        done = np.zeros(len(fan) + 1, bool)
        done[-1] = True  # what −1 waits for
        edges = np.flatnonzero(np.diff(events.peer, prepend=-1, append=-1))
        at, stop = edges[:-1].copy(), edges[1:]
        while len(at):
            ready = done[events.wait[at]]
            wave = at[ready]
            kind, what, peer = events.kind[wave], events.what[wave], events.peer[wave]
            if (mine := kind == CREDIT).any():
                self.counters["arrival"] += int(mine.sum())
                self._absorb(peer[mine], what[mine], open_)
            if (mine := kind == SETTLE).any():
                self._settle(peer[mine], what[mine], open_)
            if (mine := kind == PUSH).any():
                place = what[mine]
                self._push(peer[mine], fan[place], first[place], uses[place], open_)
                done[place] = True
            if (mine := kind == CHANGE).any():
                self._change(peer[mine], what[mine] == 1)
            at += ready
            left = at < stop
            at, stop = at[left], stop[left]
        coming = (open_.arrives >= end) & (open_.arrives < np.inf)
        self._open = open_.where(coming | (open_.returns & (open_.closes >= end)))
        self.now = end

    def _push(self, peer: Ints, fan: Ints, first: Ints, uses: Ints, open_: Open) -> None:
        """Take a share for each of `fan` neighbours; from a weight too small to be split, take nothing."""
        weight = self.weights[peer]
        share = self._share(weight, fan)
        share[np.minimum(share, weight - share * fan) < FLOOR] = 0
        self.weights[peer] = weight - share * fan
        rows = self._pool.take(uses)
        self._rows.copy(peer, self._pool.values, rows)
        within = np.arange(fan.sum()) - np.repeat(np.cumsum(fan) - fan, fan)
        which = np.repeat(first, fan) + within
        open_.share[which] = np.repeat(share, fan)
        open_.row[which] = np.repeat(rows, fan)
        self.counters["push"] += len(peer)
        self.counters["too little to split"] += int((share == 0).sum())

    def _absorb(self, peer: Ints, which: Ints, open_: Open) -> None:
        """Credit transfers to peers, all different. A newcomer then adds its own weight at that value."""
        every_row = open_.row[which]
        some = open_.share[which] > 0
        peer, row, share = peer[some], every_row[some], open_.share[which][some]
        before = self.weights[peer]
        after = before + share
        self._rows.mix(peer, self._pool.values, row, share / after)
        self.weights[peer] = after
        new = before == 0
        if new.any():
            newcomer = peer[new]
            self.estimates[newcomer] = self._pool.values[row[new]]
            self.weights[newcomer] += self._own[newcomer]
            self._injected.add(self.estimates[newcomer], self._own[newcomer])
        self._pool.used(every_row)

    def _settle(self, peer: Ints, which: Ints, open_: Open) -> None:
        """Mass returns to its sender, unless that is gone. What died with a receiver lives again."""
        died, lost = open_.sender_died[which], open_.credited_then_lost[which]
        for flag, sign in ((died & ~lost, 1), (lost & ~died, -1)):
            if flag.any():
                share, row = open_.share[which[flag]], open_.row[which[flag]]
                self._died.add(self._pool.values[row], share, sign)
        self.counters["return"] += int((~died).sum())
        self._absorb(peer[~died], which[~died], open_)
        self._pool.used(open_.row[which[died]])

    def _change(self, peer: Ints, arrives: Flags) -> None:
        """Peers leave with what they hold, or arrive without weight until they hear from a neighbour."""
        leaving = peer[~arrives]
        self._died.add(self.estimates[leaving], self.weights[leaving])
        self.weights[leaving] = 0
        self._present[peer] = arrives


class Tally:
    """A sum of masses: weight · value, and weight."""

    def __init__(self, coordinates: int):
        self.vector = np.zeros(coordinates)
        self.weight = 0

    def add(self, values: Floats, weights: Ints, sign: int = 1) -> None:
        """Add mass; with sign −1 take it away."""
        self.vector += sign * (weights.astype(np.float64) @ values)
        self.weight += sign * int(weights.sum())


@dataclass(frozen=True)
class Open(Transfers):
    """Transfers with something still to happen; `share` and `row` say what they carry."""

    share: Ints
    row: Ints

    @classmethod
    def of(cls, new: Transfers) -> Open:
        """Transfers whose push is still to come."""
        blank = np.zeros(len(new), np.int64)
        return cls(**vars(new), share=blank, row=blank.copy())


@dataclass
class Events:
    """What happens in a window, sorted by peer and time. `wait` is the push that must come before."""

    peer: Ints
    kind: Ints
    what: Ints
    wait: Ints

    @classmethod
    def of(
        cls, world: World, plan: Plan, open_: Open, fresh: int, start: float, end: float
    ) -> Events:
        """All events of [start, end). Transfers from number `fresh` on belong to the plan's pushes."""
        credit = np.flatnonzero((open_.arrives >= start) & (open_.arrives < end))
        settle = np.flatnonzero(open_.returns & (open_.closes < end))
        wait = np.full(len(credit), -1)
        young = credit >= fresh
        wait[young] = plan.transfers.push[credit[young] - fresh]
        who, when, arrives = world.changes(start, end) if world.churns else _NOBODY
        receiver, sender = open_.receiver[credit], open_.sender[credit]
        giver, other = open_.sender[settle], open_.receiver[settle]
        columns = (
            # peer, time, kind, other (breaks ties), what, wait
            (who, when, CHANGE, arrives, arrives, -1),
            (receiver, open_.arrives[credit], CREDIT, sender, credit, wait),
            (giver, open_.closes[settle], SETTLE, other, settle, -1),
            (plan.peer, plan.time, PUSH, 0, np.arange(len(plan.peer)), -1),
        )
        filled = [[np.broadcast_to(c, len(rows[0])) for c in rows] for rows in columns]
        peer, time, kind, other, what, wait = (np.concatenate(c) for c in zip(*filled, strict=True))
        order = np.lexsort((kind * world.peers + other, time, peer))
        return cls(peer[order], kind[order], what[order], wait[order])


class Pool:
    """Rows of values on their way, in one array that is reused: each is kept until its last use."""

    def __init__(self, coordinates: int, rows: int = 64):
        self.values = np.empty((rows, coordinates))
        self._uses = np.zeros(rows, np.int64)
        self._free = np.arange(rows)

    def take(self, uses: Ints) -> Ints:
        """Reserve a row for each number of uses, and return where they are."""
        if len(uses) > len(self._free):
            self._grow(len(uses) - len(self._free))
        rows, self._free = self._free[: len(uses)], self._free[len(uses) :]
        self._uses[rows] = uses
        return rows

    def used(self, rows: Ints) -> None:
        """Note that rows were used once; one that may occur twice is counted twice."""
        np.subtract.at(self._uses, rows, 1)
        done = rows[self._uses[rows] == 0]
        if len(done):
            self._free = np.concatenate([np.unique(done), self._free])

    def _grow(self, missing: int) -> None:
        old = len(self.values)
        more = max(missing, old // 2)
        self.values = np.concatenate([self.values, np.empty((more, self.values.shape[1]))])
        self._uses = np.concatenate([self._uses, np.zeros(more, np.int64)])
        self._free = np.concatenate([self._free, np.arange(old, old + more)])


class Rows:
    """The rows of `table`, one per peer, moved a cacheful at a time and on as many threads as wanted.

    Peers named in one call must all be different.
    """

    def __init__(self, table: Floats, threads: int = 1):
        self.table = table
        self._block = max(1, _BLOCK_BYTES // (8 * max(table.shape[1], 1)))
        self._executor = ThreadPoolExecutor(threads) if threads > 1 else None

    def copy(self, peer: Ints, target: Floats, rows: Ints) -> None:
        """target[rows] = table[peer]"""

        def work(part: slice) -> None:
            target[rows[part]] = np.take(self.table, peer[part], axis=0, mode="clip")

        self._share_out(len(peer), work)

    def mix(self, peer: Ints, source: Floats, rows: Ints, ratio: Floats) -> None:
        """Move table[peer] by `ratio` of the way to source[rows]: push-sum's absorb."""

        def work(part: slice) -> None:
            mine = np.take(self.table, peer[part], axis=0, mode="clip")
            step = np.take(source, rows[part], axis=0, mode="clip")
            step -= mine
            step *= ratio[part, None]
            step += mine
            self.table[peer[part]] = step

        self._share_out(len(peer), work)

    def _share_out(self, count: int, work: Callable[[slice], None]) -> None:
        """Rows are independent of each other, so which thread does which of them changes nothing."""
        parts = [slice(i, min(i + self._block, count)) for i in range(0, count, self._block)]
        if self._executor is None or count * self.table.shape[1] * 8 < _WORTH_A_THREAD:
            for part in parts:
                work(part)
        else:
            list(self._executor.map(work, parts))


def peak_memory() -> int:
    """The most bytes that this process has held so far."""
    import resource  # Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
