"""The first opinion of a newcomer: the median of what several elders hold, formed before it judges anybody.

A newcomer's own values are untrained. Judged by them, a trained elder looks like an attacker, and the first
value that comes in would be followed whoever sent it. So a newcomer holds the first transfers back, as if
they were still under way, until enough elders were heard or a wait is over. The coordinate-wise median of
their values is its own value from then on: fewer than half of the elders cannot move it beyond the others'.
Then the transfers are handed on, and guards judge them by it. No IO.

    opinion = FirstOpinion({"global": 7850})
    if opinion.hold(give, now): …                    # do not handle it yet: its sender is not answered
    formed = opinion.form("global", elders=5, now)   # None while there is something to wait for
    write formed.value, count at it, and handle formed.gives
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..messages import Give
from ..pushsum import Array, is_finite
from .identity import id_of

ENOUGH: Final = 5
"""Elders whose values make an opinion. More bear more liars (fewer than half), and cost memory: each is a
whole value."""
WAIT: Final = 30.0
"""Seconds after the first value for which the other elders are waited for. Raise it if rounds take longer:
elders give when they have trained."""
_COLUMNS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Formed:
    """An opinion, and the transfers that were held back for it."""

    value: Array
    gives: tuple[Give, ...]


@dataclass(slots=True)
class _Heard:
    since: float
    gives: dict[str, Give]
    """The newest transfer of every elder, by its id."""


class FirstOpinion:
    """What a newcomer has heard so far of the partial models in which it does not count yet.

    sizes: the length of each of them.
    """

    def __init__(
        self, sizes: Mapping[str, int], *, enough: int = ENOUGH, wait: float = WAIT
    ) -> None:
        if enough < 1 or not wait >= 0:
            raise ValueError(f"first opinion: enough is {enough} and wait {wait}: at least 1 and 0")
        self._sizes, self._enough, self._wait = dict(sizes), enough, wait
        self._heard: dict[str, _Heard] = {}

    @property
    def open(self) -> list[str]:
        """The partial models of which no opinion was formed yet."""
        return sorted(self._sizes)

    def hold(self, give: Give, now: float) -> bool:
        """Whether a transfer must not be handled yet, because the opinion it belongs to is not formed.

        Transfers that can be no opinion (of another length, not finite) are for the guards to refuse.
        """
        size = self._sizes.get(give.model)
        if size is None or give.value.shape != (size,) or not is_finite(give.value):
            return False
        heard = self._heard.setdefault(give.model, _Heard(now, {}))
        elder = id_of(give.sender)
        if elder in heard.gives or len(heard.gives) < self._enough:
            heard.gives[elder] = (
                give  # of others nothing is kept: they repeat it until it is answered
            )
        return True

    def form(self, model: str, elders: int, now: float) -> Formed | None:
        """Return the opinion of a partial model if enough elders were heard, or the wait is over.

        elders: how many neighbours count in it, so that nobody waits for more than there are. None while
        there is something to wait for, and for a model of which nobody has been heard.
        """
        heard = self._heard.get(model)
        if heard is None:
            return None
        if len(heard.gives) < min(self._enough, elders) and now - heard.since < self._wait:
            return None
        gives = tuple(heard.gives.values())
        del self._heard[model], self._sizes[model]
        return Formed(_median([give.value for give in gives]), gives)

    def drop(self, model: str) -> tuple[Give, ...]:
        """Form no opinion of a partial model; returns the transfers that were held back for it."""
        self._sizes.pop(model, None)
        heard = self._heard.pop(model, None)
        return () if heard is None else tuple(heard.gives.values())


def _median(values: list[Array]) -> Array:
    """The coordinate-wise median, in pieces: a stack of whole models would double their memory."""
    found = np.empty_like(values[0])
    for start in range(0, found.size, _COLUMNS):
        piece = slice(start, start + _COLUMNS)
        found[piece] = np.median([value[piece] for value in values], axis=0)
    return found
