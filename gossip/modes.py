"""When and to whom a peer pushes: a mode decides, the ledger below is the same for all.

A mode is a small object that a `Gossiper` is given. It is asked whether a received transfer may be
credited now, told what was credited and who is gone, and pushes from `step`. Its state is part of
the gossiper's snapshot, so that a restart continues where the last checkpoint was.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from .messages import Give
from .pushsum import FLOOR, portion

if TYPE_CHECKING:
    from .gossiper import Gossiper


class Mode(Protocol):
    """What a gossiper asks of its mode."""

    def admit(self, give: Give) -> bool:
        """Whether to credit this transfer now; if not, it is held, unanswered, until released."""
        ...

    def credited(self, give: Give) -> None:
        """Note that a transfer was credited."""
        ...

    def refused(self, give: Give) -> None:
        """Note that a transfer was refused: its sender takes the mass back and sends no other."""
        ...

    def returned(self, give: Give) -> None:
        """Note that an own transfer was taken back: refused, recalled, or its receiver is gone."""
        ...

    def gone(self, peer: str) -> None:
        """Note that a session of this peer is gone for good: nothing more will come from it."""
        ...

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Push whatever is due."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Return the mode's state as plain data."""
        ...

    def restore(self, data: dict[str, Any]) -> None:
        """Take over the state of a snapshot."""
        ...


class ManualMode:
    """Never pushes by itself and credits everything: the driver calls `Gossiper.push`."""

    def admit(self, give: Give) -> bool:
        """Credit everything at once."""
        return True

    def credited(self, give: Give) -> None:
        """Need no note."""

    def refused(self, give: Give) -> None:
        """Need no note."""

    def returned(self, give: Give) -> None:
        """Need no note."""

    def gone(self, peer: str) -> None:
        """Need no note."""

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Push nothing."""

    def snapshot(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def restore(self, data: dict[str, Any]) -> None:
        """Take over nothing."""


class AsyncMode(ManualMode):
    """No rounds, no barriers: every `interval` seconds, per vector, push to one random neighbour.

    interval: seconds between pushes of one vector. Lower it for faster agreement, raise it to save
        bandwidth; below the acknowledgement delay it only keeps edges busy.
    fraction: the share of the held weight that is given away, between 0 and 1 exclusive. One half
        mixes well; lower it if neighbours are few and slow to give back.
    jitter: intervals vary by this fraction, so that peers do not push in step.
    floor: do not push while a share or the rest would fall below this weight.
    """

    def __init__(
        self, interval: float, *, fraction: float = 0.5, jitter: float = 0.1, floor: int = FLOOR
    ) -> None:
        if not 0 < fraction < 1:
            raise ValueError(f"async mode: fraction is {fraction}, must lie between 0 and 1")
        if not (interval > 0 and 0 <= jitter < 1):
            raise ValueError(f"async mode: interval {interval} or jitter {jitter} is out of range")
        self.interval = interval
        self.fraction = fraction
        self.jitter = jitter
        self.floor = floor
        self._due: dict[str, float] = {}

    def step(self, gossiper: Gossiper, now: float) -> None:
        """Push each vector that is due to one free neighbour; if none is free, try again later."""
        for vector in gossiper.vectors:
            if now < self._due.get(vector, -math.inf):
                continue
            weight = gossiper.weight(vector)
            share = portion(weight, self.fraction)
            if min(share, weight - share) < self.floor:
                continue
            free = gossiper.free_neighbours(vector)
            if free and gossiper.push(vector, {free[gossiper.rng.integers(len(free))]: share}, now):
                swing = self.jitter * (2 * gossiper.rng.random() - 1)
                self._due[vector] = now + self.interval * (1 + swing)
