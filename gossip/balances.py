"""The mass that a peer holds: a weight per vector, beside the values in its store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .compress.packed import Packed
from .messages import Give
from .pushsum import (
    MAX_WEIGHT,
    Array,
    Mass,
    absorb,
    absorb_finite,
    as_factor,
    is_finite,
    portion,
    split,
)
from .store import Store


class Vault:
    """Held mass. Every change of a weight comes with the change of value that keeps sums right."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.vectors: tuple[str, ...] = tuple(sorted(store.names()))
        self.weights: dict[str, int] = dict.fromkeys(self.vectors, 0)
        self.injected: dict[str, int] = dict.fromkeys(self.vectors, 0)
        self._promised: dict[str, int] = {}
        self.debts: dict[str, int] = {}
        """Weight to give up as soon as that much more is held; see `give_up`."""
        self.residue: dict[str, Array] = {}
        """Sums (weight · value) that compressors left behind; they join the next mass that comes in."""
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
            self._promised.pop(vector, None)  # or the same weight would come in once more
            self.weights[vector] += weight
            self.injected[vector] += weight

    def adjust(self, vector: str, weight: int) -> None:
        """Change the weight that was injected, at the current value."""
        more = weight - self.injected[vector]
        if more > 0:
            self.inject(vector, more)
        elif more < 0:
            self.injected[vector] = weight
            self.give_up(vector, -more)

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

    def settle(self, vector: str) -> None:
        """Let a residue join the mass that is held, if any is."""
        if self.weights[vector] and vector in self.residue:
            self._set(vector, self._mass(vector))

    def take_packed(
        self,
        vector: str,
        shares: Mapping[str, int],
        pack: Callable[[str, Array], tuple[Array, Packed, float] | None],
        *,
        whole: bool,
    ) -> dict[str, tuple[Array, Packed | None, int]] | None:
        """Debit shares whose values are compressed: per receiver what it reads, how it is sent, its share.

        Shares shrink with the part of the value that comes through, unless they shall stay `whole`.

        What they lose, Σ share · (value − sent), stays here as a residue and joins the next mass that
        comes in. Put into the kept value at once it would be multiplied by share / kept, and the peer
        would train on that; later it meets more weight.
        """
        value = np.array(self.store.read(vector))
        if not is_finite(value):
            return None
        if sum(shares.values()) > self.weights[vector]:
            raise ValueError(f"push {vector!r}: shares exceed a weight of {self.weights[vector]}")
        lost = np.zeros_like(value)
        sent: dict[str, tuple[Array, Packed | None, int]] = {}
        for receiver, asked in shares.items():
            read, packed, part = pack(receiver, value) or (value, None, 1.0)
            share = asked if whole else max(1, portion(asked, part))
            read.setflags(write=False)
            lost += np.subtract(value, read, dtype=value.dtype) * as_factor(share, 1, value)
            sent[receiver] = read, packed, share
            self.weights[vector] -= share
        if lost.any():
            self.residue[vector] = self.residue.get(vector, 0) + lost
        return sent

    def size(self, vector: str) -> int:
        """How many values a vector has."""
        return self._kinds[vector][0][0]

    def defect(self, give: Give) -> str | None:
        """Say what is wrong with a transfer, apart from values that are not finite."""
        shape, dtype = self._kinds[give.vector]
        if not np.can_cast(give.value.dtype, dtype, "same_kind"):
            return "bad-dtype"
        if give.value.shape != shape:
            return "wrong-length"
        return None if 0 < give.weight <= self.room(give.vector) else "weight"

    def room(self, vector: str) -> int:
        """The weight that may still come in; half the range waits for own weight to be injected."""
        own = self._promised.get(vector, 0)
        if not own and not self.injected[vector]:
            own = MAX_WEIGHT // 2
        return MAX_WEIGHT - self.weights[vector] - own

    def credit(self, give: Give) -> str | None:
        """Absorb a transfer; a cause, and nothing changed, if the result would not be finite."""
        vector = give.vector
        mass = absorb_finite(self._mass(vector), Mass(give.value, give.weight))
        if mass is None:
            return "not-finite"
        self._set(vector, mass)
        promised = self._promised.pop(vector, 0)
        if promised:
            self.inject(vector, promised)
        return None

    def give_up(self, vector: str, weight: int) -> None:
        """Remove weight that its sender took back after it was credited here.

        The value stays as it is: what was credited has long mixed with the rest. What is not held any
        more, because it was passed on, is a debt that the next mass pays.
        """
        self.debts[vector] = self.debts.get(vector, 0) + weight
        self._pay(vector)

    def _pay(self, vector: str) -> None:
        debt = self.debts.pop(vector, 0)
        paid = min(debt, max(self.weights[vector] - 1, 0))  # one unit keeps the value alive
        self.weights[vector] -= paid
        if debt > paid:
            self.debts[vector] = debt - paid

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
            "debts": dict(self.debts),
            "residue": dict(self.residue),
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
        self.debts = dict(data["debts"])
        self.residue = {v: np.array(each) for v, each in data.get("residue", {}).items()}

    def _mass(self, vector: str) -> Mass:
        return Mass(self.store.read(vector), self.weights[vector])

    def _set(self, vector: str, mass: Mass) -> None:
        value = mass.value
        if self.residue and mass.weight and vector in self.residue:
            value = value + self.residue.pop(vector) * as_factor(1, mass.weight, value)
        self.store.write(vector, value)
        self.weights[vector] = mass.weight
        if vector in self.debts:
            self._pay(vector)
