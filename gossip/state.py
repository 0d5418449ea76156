"""What a gossiper works on: the mass it holds, its books, its neighbours, and what is to be sent."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .balances import Vault
from .compress import Links
from .ledger import Ledger
from .messages import Message
from .modes import Mode
from .neighbours import Neighbours
from .pushsum import is_finite

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class State:
    """Shared by the giving and the receiving half of one gossiper.

    Look attributes up when they are needed: mode and vault may be exchanged while the gossiper lives.
    The outbox and what the links refer to are not part of a snapshot: both can be made good.
    """

    ledger: Ledger
    vault: Vault
    mode: Mode
    links: Links
    neighbours: Neighbours = field(default_factory=Neighbours)
    counters: Counter[str] = field(default_factory=Counter[str])
    outbox: list[Message] = field(default_factory=list[Message])
    diverged: set[str] = field(default_factory=set[str])
    """Vectors of which was said that they are not finite."""
    rejections: dict[str, str] = field(default_factory=dict[str, str])
    """Neighbours whose answers say that this session must end, and why."""

    def known(self, vector: str) -> str:
        """Return the name of a vector; ValueError if there is none of this name."""
        if vector not in self.vault.weights:
            raise ValueError(
                f"peer {self.ledger.peer!r} has no vector {vector!r}, only {list(self.vault.vectors)}"
            )
        return vector

    def tell_diverged(self, vector: str) -> None:
        """Say once, for each vector, that its values are not finite, if they are not."""
        value = self.vault.store.read(vector)
        if vector in self.diverged or is_finite(value):
            return
        self.diverged.add(vector)
        _log.warning(
            "peer %s: model %s has diverged, %d of its %d values are NaN or infinite: it gives none of "
            "them to anybody, and takes none in; lower the learning rate, or look at its data",
            self.ledger.peer, vector, value.size - np.isfinite(value).sum(), value.size,
        )  # fmt: skip

    def snapshot(self, *, values: bool) -> dict[str, Any]:
        """Return what must not be forgotten as plain data; the vectors' values only on request."""
        return {
            "vault": self.vault.snapshot(values=values),
            "ledger": self.ledger.snapshot(),
            "gone": sorted([peer, session] for peer, session in self.neighbours.gone),
            "left": sorted([peer, session] for peer, session in self.neighbours.left),
            "neighbours": self.neighbours.snapshot(),
            "counters": dict(self.counters),
            "mode": self.mode.snapshot(),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Take over a snapshot."""
        self.ledger = Ledger.restore(snapshot["ledger"])
        self.vault.restore(snapshot["vault"])
        self.neighbours.gone = {(peer, session) for peer, session in snapshot["gone"]}
        self.neighbours.left = {(peer, session) for peer, session in snapshot["left"]}
        self.neighbours.restore(snapshot.get("neighbours", []))
        self.counters = Counter(snapshot["counters"])
        self.mode.restore(snapshot["mode"])
