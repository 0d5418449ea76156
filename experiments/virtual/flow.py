"""Mass moving through a window of a timetable, in waves of events that do not depend on each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ...gossip import FLOOR
from .draws import Floats, Ints
from .holdings import Holdings, ShareRule
from .pool import Pool
from .timetable import Plan, Transfers
from .world import Flags, World

# At one moment, one peer's events happen in this order.
CHANGE, CREDIT, SETTLE, PUSH = range(4)


@dataclass
class Open:
    """Transfers with something still to happen; `share` and `row` say what they carry."""

    sender: Ints
    receiver: Ints
    arrives: Floats
    closes: Floats
    returns: Flags
    copied: Flags
    orphan: Flags
    share: Ints
    row: Ints

    @classmethod
    def of(cls, new: Transfers) -> Open:
        """Transfers whose push is still to come."""
        blank = np.zeros(len(new), np.int64)
        known = {f.name: getattr(new, f.name) for f in fields(cls) if hasattr(new, f.name)}
        return cls(**known, share=blank, row=blank.copy())

    def __len__(self) -> int:
        return len(self.sender)

    def where(self, chosen: Any) -> Open:
        """Some of them."""
        return Open(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def and_then(self, others: Open) -> Open:
        """Both, in this order."""
        both = ((getattr(self, f.name), getattr(others, f.name)) for f in fields(self))
        return Open(*(np.concatenate(pair) for pair in both))

    def total(self, pool: Pool, now: float) -> tuple[Floats, int]:
        """The mass on its way: neither credited nor taken back yet."""
        flying = self.where((self.arrives >= now) & (self.share > 0))
        vector = flying.share.astype(np.float64) @ pool.values[flying.row]
        return vector, int(flying.share.sum())


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
        push = np.arange(len(plan.pushes))
        wait = np.full(len(credit), -1)
        young = credit >= fresh
        wait[young] = plan.transfers.push[credit[young] - fresh]
        who, when, arrives = world.changes(start, end) if world.churns else _NOBODY
        columns = (
            # peer, time, kind, other (breaks ties), what, wait
            (who, when, CHANGE, arrives, arrives, -1),
            (
                open_.receiver[credit],
                open_.arrives[credit],
                CREDIT,
                open_.sender[credit],
                credit,
                wait,
            ),
            (
                open_.sender[settle],
                open_.closes[settle],
                SETTLE,
                open_.receiver[settle],
                settle,
                -1,
            ),
            (plan.pushes.peer, plan.pushes.time, PUSH, 0, push, -1),
        )
        filled = [[np.broadcast_to(c, len(rows[0])) for c in rows] for rows in columns]
        peer, time, kind, other, what, wait = (np.concatenate(c) for c in zip(*filled, strict=True))
        order = np.lexsort((kind * world.peers + other, time, peer))
        return cls(peer[order], kind[order], what[order], wait[order])


class Flow:
    """Applies plans to holdings."""

    def __init__(self, world: World, holdings: Holdings, rule: ShareRule, counters: Counter[str]):
        self._world, self._holdings, self._rule = world, holdings, rule
        self._counters = counters

    def run(self, plan: Plan, open_: Open, start: float, end: float) -> Open:
        """Let a window's events happen; returns the transfers that are open after it."""
        fresh = len(open_)
        open_ = open_.and_then(Open.of(plan.transfers))
        events = Events.of(self._world, plan, open_, fresh, start, end)
        fan = plan.pushes.fan
        self._first = fresh + np.cumsum(fan) - fan
        uses = np.isfinite(open_.arrives[fresh:]).astype(np.int64) + open_.returns[fresh:]
        self._uses = np.bincount(plan.transfers.push, uses, len(fan)).astype(np.int64)
        done = np.zeros(len(fan) + 1, bool)
        done[-1] = True  # what −1 waits for
        edges = np.flatnonzero(np.diff(events.peer, prepend=-1, append=-1))
        at, stop = edges[:-1].copy(), edges[1:]
        while len(at):
            ready = done[events.wait[at]]
            wave = at[ready]
            self._apply(events, wave, plan, open_, done)
            at += ready
            left = at < stop
            at, stop = at[left], stop[left]
        coming = (open_.arrives >= end) & (open_.arrives < np.inf)
        return open_.where(coming | (open_.returns & (open_.closes >= end)))

    def _apply(self, events: Events, wave: Ints, plan: Plan, open_: Open, done: Flags) -> None:
        kind, what, peer = events.kind[wave], events.what[wave], events.peer[wave]
        if (mine := kind == CREDIT).any():
            self._counters["arrival"] += int(mine.sum())
            self._absorb(peer[mine], what[mine], open_)
        if (mine := kind == SETTLE).any():
            self._settle(peer[mine], what[mine], open_)
        if (mine := kind == PUSH).any():
            self._push(peer[mine], what[mine], plan, open_)
            done[what[mine]] = True
        if (mine := kind == CHANGE).any():
            arrives = what[mine] == 1
            self._holdings.leave(peer[mine][~arrives])
            self._holdings.arrive(peer[mine][arrives])

    def _push(self, peer: Ints, place: Ints, plan: Plan, open_: Open) -> None:
        fan = plan.pushes.fan[place]
        share, rows = self._holdings.push(peer, fan, self._uses[place], self._rule, FLOOR)
        within = np.arange(fan.sum()) - np.repeat(np.cumsum(fan) - fan, fan)
        which = np.repeat(self._first[place], fan) + within
        open_.share[which] = np.repeat(share, fan)
        open_.row[which] = np.repeat(rows, fan)
        self._counters["push"] += len(peer)
        self._counters["too little to split"] += int((share == 0).sum())

    def _absorb(self, peer: Ints, which: Ints, open_: Open) -> None:
        share, row = open_.share[which], open_.row[which]
        some = share > 0
        self._holdings.absorb(peer[some], row[some], share[some])
        self._holdings.pool.used(row)

    def _settle(self, peer: Ints, which: Ints, open_: Open) -> None:
        """Mass returns to its sender, unless that is gone. What died with a receiver lives again."""
        orphan, copied = open_.orphan[which], open_.copied[which]
        for flag, sign in ((orphan & ~copied, 1), (copied & ~orphan, -1)):
            if flag.any():
                share, row = open_.share[which[flag]], open_.row[which[flag]]
                self._holdings.died.add(self._holdings.pool.values[row], share, sign)
        self._counters["return"] += int((~orphan).sum())
        self._absorb(peer[~orphan], which[~orphan], open_)
        self._holdings.pool.used(open_.row[which[orphan]])


_NOBODY = (np.zeros(0, np.int64), np.zeros(0), np.zeros(0, bool))
