"""What a gossiper works on: the mass it holds, its books, its neighbours, and what is to be sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .compress import Links
from .ledger import Ledger
from .messages import Message
from .modes import Mode
from .neighbours import Neighbours
from .vault import Vault


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

    def known(self, vector: str) -> str:
        """Return the name of a vector; ValueError if there is none of this name."""
        if vector not in self.vault.weights:
            raise ValueError(
                f"peer {self.ledger.peer!r} has no vector {vector!r}, only {list(self.vault.vectors)}"
            )
        return vector

    def snapshot(self, *, values: bool) -> dict[str, Any]:
        """Return what must not be forgotten as plain data; the vectors' values only on request."""
        return {
            "vault": self.vault.snapshot(values=values),
            "ledger": self.ledger.snapshot(),
            "gone": sorted([peer, session] for peer, session in self.neighbours.gone),
            "neighbours": self.neighbours.snapshot(),
            "counters": dict(self.counters),
            "mode": self.mode.snapshot(),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Take over a snapshot."""
        self.ledger = Ledger.restore(snapshot["ledger"])
        self.vault.restore(snapshot["vault"])
        self.neighbours.gone = {(peer, session) for peer, session in snapshot["gone"]}
        self.neighbours.restore(snapshot.get("neighbours", []))
        self.counters = Counter(snapshot["counters"])
        self.mode.restore(snapshot["mode"])
