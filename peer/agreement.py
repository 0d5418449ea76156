"""Whether a peer agrees with its neighbours, by the values that it was given lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from ..gossip import Array, Gossiper, Store

_RECENT = 4  # received values per vector by which a peer judges that it agrees with its neighbours


class Agreement:
    """Remembers, per vector, how far the last few received values were from the peer's own."""

    def __init__(self, vectors: Iterable[str], store: Store) -> None:
        self._store = store
        self._recent: dict[str, deque[float]] = {v: deque(maxlen=_RECENT) for v in vectors}

    def heard(self, vector: str, mine: Array, received: Array) -> None:
        """Note a value that was credited, and the peer's own as it was then."""
        self._recent[vector].append(_distance(mine, received))

    def values(self) -> dict[str, Array]:
        """The peer's values as they are, for `moved`."""
        return {vector: self._store.read(vector) for vector in self._recent}

    def moved(self, before: dict[str, Array], tolerance: float) -> None:
        """Begin anew where values are no longer what they were: what was heard says little of them."""
        for vector, old in before.items():
            if _distance(old, self._store.read(vector)) > tolerance:
                self._recent[vector].clear()

    def forget(self) -> None:
        """Begin anew everywhere."""
        for seen in self._recent.values():
            seen.clear()

    def disagreement(self) -> dict[str, float]:
        """Per vector that was heard of, the largest relative distance to lately received values."""
        return {vector: max(seen) for vector, seen in self._recent.items() if seen}

    def reached(self, gossiper: Gossiper, tolerance: float) -> bool:
        """Whether, for every vector that has neighbours, the last few values received agree.

        Values that are on their way must agree too: what is not credited is taken back, and an old
        value would disturb the agreement.
        """
        return (
            not gossiper.stranded()
            and all(
                len(self._recent[vector]) == _RECENT and max(self._recent[vector]) <= tolerance
                for vector in gossiper.models
                if gossiper.neighbours(vector)
            )
            and all(
                _distance(self._store.read(vector), transfer.give.value) <= tolerance
                for (_, vector), transfer in gossiper.ledger.open.items()
            )
        )


def _distance(mine: Array, other: Array) -> float:
    """How far another value is from ours, relative to ours."""
    return float(np.linalg.norm(mine - other)) / (float(np.linalg.norm(mine)) or 1.0)
