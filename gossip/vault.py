"""The mass that a peer holds: a weight per vector, beside the values in its store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .messages import Give
from .pushsum import MAX_WEIGHT, Array, Mass, absorb, is_finite, split
from .store import Store


class Vault:
    """Held mass. Every change of a weight comes with the change of value that keeps sums right."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.vectors: tuple[str, ...] = tuple(sorted(store.names()))
        self.weights: dict[str, int] = dict.fromkeys(self.vectors, 0)
        self.injected: dict[str, int] = dict.fromkeys(self.vectors, 0)
        self._promised: dict[str, int] = {}
        # Read once: a store may have to gather a vector, and its shape never changes in a session.
        self._kinds = {v: (own.shape, own.dtype) for v in self.vectors for own in [store.read(v)]}

    def inject(self, vector: str, weight: int, *, after_hearing: bool = False) -> None:
        """Add weight at the current value, or promise to when the first mass was absorbed."""
        held = self.weights[vector]
        if not 0 < weight <= MAX_WEIGHT - held:
            raise ValueError(f"inject {vector!r}: weight {weight} is out of range; use ONE·samples")
        if after_hearing and held == 0:
            self._promised[vector] = weight
        else:
            self.weights[vector] += weight
            self.injected[vector] += weight

    def take(
        self, vector: str, share: int, lossy: Callable[[str, Array], Array] | None
    ) -> Array | None:
        """Debit `share` units and return the value to send with them; None if it is not finite."""
        value = np.array(self.store.read(vector))
        if not is_finite(value):
            return None
        sent = None if lossy is None else np.asarray(lossy(vector, value))
        kept, given = split(Mass(value, self.weights[vector]), share, sent)
        given.value.setflags(write=False)  # shared by all transfers of this push
        if kept.value is not value:
            self.store.write(vector, kept.value)
        self.weights[vector] = kept.weight
        return given.value

    def defect(self, give: Give) -> str | None:
        """Say what is wrong with a transfer, apart from values that are not finite."""
        shape, dtype = self._kinds[give.vector]
        if not np.can_cast(give.value.dtype, dtype, "same_kind"):
            return "bad-dtype"
        if give.value.shape != shape:
            return "wrong-length"
        room = MAX_WEIGHT - self.weights[give.vector] - self._promised.get(give.vector, 0)
        return None if 0 < give.weight <= room else "weight"

    def credit(self, give: Give) -> str | None:
        """Absorb a transfer; a cause, and nothing changed, if the result would not be finite."""
        vector = give.vector
        with np.errstate(over="ignore", invalid="ignore"):
            mass = absorb(self._mass(vector), Mass(give.value, give.weight))
        if not is_finite(mass.value):
            return "not-finite"
        self._set(vector, mass)
        promised = self._promised.pop(vector, 0)
        if promised:
            self.inject(vector, promised)
        return None

    def take_back(self, give: Give) -> None:
        """Absorb the mass of an own transfer that was not credited."""
        self._set(give.vector, absorb(self._mass(give.vector), Mass(give.value, give.weight)))

    def snapshot(self, *, values: bool) -> dict[str, Any]:
        """Return weights and, on request, copies of the values, as plain data."""
        stored = {v: np.array(self.store.read(v)) for v in self.vectors} if values else {}
        return {
            "weights": dict(self.weights),
            "injected": dict(self.injected),
            "promised": dict(self._promised),
            "values": stored,
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over weights and, if there, values; the store must have the same vectors."""
        if set(data["weights"]) != set(self.vectors):
            raise ValueError(
                f"gossip snapshot holds the vectors {sorted(data['weights'])}, the store "
                f"{list(self.vectors)}: restore with the same partial models, or start afresh"
            )
        for vector, value in data["values"].items():
            own = self.store.read(vector)
            if own.shape != value.shape:
                raise ValueError(
                    f"gossip snapshot: vector {vector!r} has {value.size} values, the store's "
                    f"{own.size}: restore with the same network, or start afresh"
                )
            self.store.write(vector, np.array(value))
        self.weights = dict(data["weights"])
        self.injected = dict(data["injected"])
        self._promised = dict(data["promised"])

    def _mass(self, vector: str) -> Mass:
        return Mass(self.store.read(vector), self.weights[vector])

    def _set(self, vector: str, mass: Mass) -> None:
        self.store.write(vector, mass.value)
        self.weights[vector] = mass.weight
