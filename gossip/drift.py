"""Dynamic averaging: do not push what has hardly moved since it was last pushed.

After Kamp et al. (Efficient Decentralized Deep Learning by Dynamic Model Averaging), whose peers stay
silent while their model is near the last one that all agreed on. Here there is no such moment, so a peer
looks at the value that it gave away last: what it learnt and what it was given since both count as news.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from .compress.links import Traffic
from .pushsum import Array


def check_drift(bound: float | Mapping[str, float]) -> None:
    """Raise ValueError unless every bound is a number that a relative distance can be compared with."""
    for name, each in bound.items() if isinstance(bound, Mapping) else [("", bound)]:
        if not (math.isfinite(each) and each >= 0):
            where = f" of {name!r}" if name else ""
            raise ValueError(
                f"drift{where} is {each:g}: give a relative distance of 0 or more, as in 0.05"
            )


class Drift:
    """How far vectors have moved since they were last pushed.

    bound: the relative distance below which a push is skipped, for all vectors or each by name (others
        are always pushed). Raise it to save messages while values move little; too high, and peers
        learn from each other too late. It keeps one copy of each vector.
    traffic: where skipped messages are counted.
    """

    def __init__(self, bound: float | Mapping[str, float], traffic: Mapping[str, Traffic]) -> None:
        check_drift(bound)
        self._bound, self._traffic = bound, traffic
        self._last: dict[str, Array] = {}

    def bound(self, vector: str) -> float:
        """The bound of one vector; 0 if it has none."""
        return self._bound.get(vector, 0.0) if isinstance(self._bound, Mapping) else self._bound

    def small(self, vector: str, value: Array) -> bool:
        """Whether a vector has moved less than its bound. If not, its value is remembered as pushed."""
        bound = self.bound(vector)
        if bound <= 0:
            return False
        last = self._last.get(vector)
        if last is not None:
            moved = float(np.linalg.norm(value - last))
            if moved < bound * float(np.linalg.norm(last)):
                return True
        self._last[vector] = np.array(value)
        return False

    def skip(self, vector: str, messages: int, values: int) -> None:
        """Count messages that were not sent, of so many float32 values each."""
        self._traffic[vector].skip(messages, messages * 4 * values)
