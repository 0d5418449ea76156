"""How many peers there are, for a peer that is told by nobody."""

from __future__ import annotations

from math import inf
from typing import Any

_CLOSE = 0.1
"""The relative difference up to which two numbers of peers are taken for the same."""
_PATIENCE = 10
"""Trainings for which gossip's count must stay the same before it is believed, at least."""


class PeerCount:
    """The number of peers: those seen, or fewer once gossip's count has settled.

    Gossip's count is exact when push-sum has converged and off by any factor before; the peers seen (by their
    presence, or all that an arena runs) are known at once, and may include some that are gone for good.
    """

    def __init__(self) -> None:
        self._seen = 1.0
        self._reference = inf
        self._trainings = 0  # for which gossip's count was close to the reference
        self._before: float | None = None

    def observe(self, gossiped: float, seen: float) -> None:
        """Take in what is known at a training. `gossiped` is infinite if nothing was counted yet."""
        self._before = self.number(gossiped, seen)
        if _close(gossiped, self._reference):
            self._trainings += 1
        else:
            self._reference, self._trainings = gossiped, 0

    def number(self, gossiped: float, seen: float) -> float:
        """How many peers there are; infinite if that is not known at all."""
        # The most ever seen: what those who left have contributed is still in the means.
        self._seen = max(self._seen, seen)
        settled = self._trainings >= _patience(gossiped) and _close(gossiped, self._reference)
        return min(gossiped, self._seen) if settled else self._seen

    def steady(self, gossiped: float, seen: float) -> bool:
        """Whether the number is known, and about what it was at the last training."""
        now = self.number(gossiped, seen)
        return now < inf and (self._before is None or _close(now, self._before))

    def state(self) -> dict[str, Any]:
        """What a restart needs."""
        return {
            "seen": self._seen,
            "reference": self._reference,
            "trainings": self._trainings,
            "before": self._before,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken."""
        self._seen, self._reference = float(state["seen"]), float(state["reference"])
        self._trainings, self._before = int(state["trainings"]), state["before"]


def _patience(count: float) -> float:
    """Trainings after which a count that stayed the same is no longer about to change.

    On a ring, where mixing is slowest, the count of peers next to the teller grows with √(4t) in t exchanges:
    it stays within a tenth for up to count² / 18 of them. Peers far away count down from 3^hops.
    """
    return max(_PATIENCE, count * count / 4)


def _close(one: float, other: float) -> bool:
    return one < inf and other < inf and abs(one - other) <= _CLOSE * max(one, other)
