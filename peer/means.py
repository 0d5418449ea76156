"""Vectors of measured values, whose means over all peers gossip finds like those of partial models."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..gossip import ONE, Array, Gossiper
from .store import NetworkStore


class SwarmMean:
    """The mean over peers of a vector that each of them may change from time to time.

    It is averaged under its own name, as one of the store's `extra` vectors. A peer adds what has changed in
    its own vector to its estimate of the mean, so gossip need not begin anew. Every peer counts once,
    whatever its weight is.
    """

    def __init__(self, store: NetworkStore, name: str, size: int):
        self._store, self.name = store, name
        self._added: Array | None = None
        store.extra[name] = np.zeros(size, np.float32)

    @property
    def has_own(self) -> bool:
        """Whether this peer's own vector is part of the mean."""
        return self._added is not None

    @property
    def added(self) -> Array | None:
        """This peer's own vector as it is part of the mean; None before the first."""
        return self._added

    @property
    def value(self) -> Array:
        """The mean as this peer knows it."""
        return self._store.extra[self.name]

    def add(self, gossiper: Gossiper, own: Array) -> None:
        """Replace this peer's own vector; nothing changes while it holds no weight."""
        weight = gossiper.weight(self.name)
        if weight:
            change = own if self._added is None else own - self._added
            # The estimate is sum / weight, and a peer's share of the sum is its vector times ONE.
            self._store.extra[self.name] = self.value + (change * (ONE / weight)).astype(np.float32)
            self._added = own

    def reset(self) -> None:
        """Begin anew, without weight."""
        self._store.extra[self.name] = np.zeros_like(self.value)
        self._added = None

    def remove(self) -> None:
        """Average it no longer."""
        del self._store.extra[self.name]

    def snapshot(self) -> dict[str, Any]:
        """Return what a restart needs."""
        return {"value": self.value, "added": self._added}

    def restore(self, data: dict[str, Any]) -> None:
        """Continue from a snapshot."""
        self._store.extra[self.name] = np.array(data["value"])
        self._added = None if data["added"] is None else np.array(data["added"])
