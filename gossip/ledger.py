"""The books of one peer: which transfers are open, and what became of those it received.

Per (neighbour, model) at most one transfer is open, and its sequence number rises. So a receiver
needs to remember one line per (sender, session, model): the last sequence and its verdict. Whatever
is older has been closed by its sender and may be ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from .compress.packed import Packed
from .messages import Give, Tag, Verdict
from .pushsum import MAX_WEIGHT

Edge: TypeAlias = tuple[str, str]
"""(neighbour, model)"""

RECLAIMED_KEPT = 1024
"""How many reclaimed transfers are remembered: the goodbye lists them, and must fit into one packet."""

SESSIONS_KEPT = 64
"""How many sessions of one sender are remembered. A transfer could be credited twice only if its duplicate
arrived after the sender had begun that many newer sessions."""


def is_reclaimed(row: object) -> bool:
    """Return whether data received from a peer has the form of a row of `Ledger.reclaimed`."""
    if not isinstance(row, list | tuple) or len(row) != 5:
        return False
    *names, sequence, weight = row
    return all(isinstance(name, str) for name in names) and all(
        type(number) is int and 0 <= number <= MAX_WEIGHT for number in (sequence, weight)
    )


def is_line(row: object) -> bool:
    """Return whether data received from a peer has the form of what `Ledger.lines` yields."""
    if not isinstance(row, list | tuple) or len(row) != 5:
        return False
    *names, sequence, verdict = row
    return (
        all(isinstance(name, str) for name in names)
        and isinstance(sequence, int)
        and isinstance(verdict, str)
    )


@dataclass(frozen=True, slots=True)
class Transfer:
    """An open transfer: debited here, not yet known to be credited or void there."""

    give: Give
    opened: float | None
    """When it was first sent; None after a restart, until the clock is known again."""
    sent: float
    attempts: int = 1
    recalling: bool = False
    """Whether its receiver was asked to give it back (`Recall`)."""
    late: bool = False
    """Whether its answer is overdue: it may still come, but nobody waits for it any more."""


class Ledger:
    """Open transfers going out, and one line per (sender, session, model) coming in."""

    def __init__(self, peer: str, session: str) -> None:
        self.peer = peer
        self.session = session
        self.open: dict[Edge, Transfer] = {}
        self.open_weight: Counter[str] = Counter()
        """The weight in open transfers, by model."""
        self.revision = 0
        """Rises with every change that must be in the checkpoint before a message about it leaves: debits,
        verdicts, reclaimed transfers that are settled."""
        self.reclaimed: list[list[Any]] = []
        """Transfers taken back before the receiver answered, because it was declared dead or this peer had
        to end: rows of receiver, its session, model, sequence, weight. If the receiver had credited one, the
        weight exists twice, and one side must remove it: see `Gossiper.peer_gone`."""
        self._sequences: dict[Edge, int] = {}
        self._seen: dict[str, dict[str, dict[str, tuple[int, Verdict]]]] = {}
        """Sender → its session → model → the last sequence received, and its verdict."""

    def debit(
        self,
        model: str,
        receiver: str,
        receiver_session: str,
        weight: int,
        value: np.ndarray[Any, Any],
        now: float,
        tag: Tag | None = None,
        packed: Packed | None = None,
    ) -> Transfer:
        """Open a transfer. The caller must have subtracted the mass from its own balance."""
        edge = (receiver, model)
        if edge in self.open:
            raise ValueError(f"transfer of {model!r} to {receiver!r}: one is open already")
        sequence = self._sequences.get(edge, 0) + 1
        self._sequences[edge] = sequence
        self.revision += 1
        give = Give(
            model, self.peer, self.session, sequence,
            receiver, receiver_session, weight, value, tag, packed,
        )  # fmt: skip
        self.open[edge] = Transfer(give, now, now)
        self.open_weight[model] += weight
        return self.open[edge]

    def update(self, edge: Edge, **changes: Any) -> Transfer:
        """Replace some fields of an open transfer and return it."""
        self.open[edge] = replace(self.open[edge], **changes)
        return self.open[edge]

    def close(self, edge: Edge) -> Transfer:
        """Remove an open transfer and return it; the caller decides what becomes of its mass."""
        transfer = self.open.pop(edge)
        self.open_weight[edge[1]] -= transfer.give.weight
        return transfer

    def reclaim(self, edge: Edge) -> Transfer:
        """Remove an open transfer whose fate is not known, and remember that it was taken back."""
        transfer = self.close(edge)
        give = transfer.give
        if give.weight:
            row = [give.receiver, give.receiver_session, give.model, give.sequence, give.weight]
            self.reclaimed.append(row)
            del self.reclaimed[:-RECLAIMED_KEPT]
        return transfer

    def settle_reclaimed(self, receiver: str, session: str) -> list[tuple[str, int, int]]:
        """Forget what was reclaimed of transfers to a receiver whose goodbye says what it credited.

        Returns rows of model, sequence, weight.
        """
        rows = [row for row in self.reclaimed if row[:2] == [receiver, session]]
        for row in rows:
            self.reclaimed.remove(row)
            self.revision += 1
        return [(model, sequence, weight) for _, _, model, sequence, weight in rows]

    def given(self, receiver: str, model: str) -> int:
        """Return the last sequence that was given on an edge; 0 if none was."""
        return self._sequences.get((receiver, model), 0)

    def verdict(self, sender: str, session: str, model: str) -> tuple[int, Verdict]:
        """Return the last sequence seen and its verdict; (0, "void") if none was."""
        return self._seen.get(sender, {}).get(session, {}).get(model, (0, "void"))

    def decide(
        self, sender: str, session: str, model: str, sequence: int, verdict: Verdict
    ) -> None:
        """Remember, for good, what became of a received sequence."""
        self.revision += 1
        sessions = self._seen.setdefault(sender, {})
        sessions.setdefault(session, {})[model] = (sequence, verdict)
        if len(sessions) > SESSIONS_KEPT:
            del sessions[next(iter(sessions))]

    def lines(self) -> Iterator[tuple[str, str, str, int, Verdict]]:
        """Yield (sender, session, model, last sequence, verdict) of all that was received."""
        for sender, sessions in self._seen.items():
            for session, models in sessions.items():
                for model, (sequence, verdict) in models.items():
                    yield sender, session, model, sequence, verdict

    def snapshot(self) -> dict[str, Any]:
        """Return the books as plain data; transfers that share a value share it here too.

        Of a compressed transfer the decompressed value is kept; after a restart it is sent uncompressed.
        """
        arrays: dict[int, np.ndarray[Any, Any]] = {}
        index: dict[int, int] = {}
        rows: list[list[Any]] = []
        for transfer in self.open.values():
            give = transfer.give
            at = index.setdefault(id(give.value), len(index))
            arrays[at] = give.value
            tag = None if give.tag is None else list(give.tag)
            to = give.receiver, give.receiver_session
            rows.append([give.model, *to, give.sequence, give.weight, at, tag, transfer.recalling])
        return {
            "peer": self.peer,
            "session": self.session,
            "open": rows,
            "values": [arrays[i] for i in range(len(arrays))],
            "reclaimed": [list(row) for row in self.reclaimed],
            "sequences": [[*edge, sequence] for edge, sequence in self._sequences.items()],
            "seen": [list(line) for line in self.lines()],
        }

    @classmethod
    def restore(cls, data: dict[str, Any]) -> Ledger:
        """Rebuild the books; open transfers are due to be sent again at once."""
        ledger = cls(data["peer"], data["session"])
        for model, receiver, session, sequence, weight, at, tag, recalling in data["open"]:
            give = Give(
                model, ledger.peer, ledger.session, sequence, receiver, session, weight,
                data["values"][at], None if tag is None else (tag[0], tag[1]),
            )  # fmt: skip
            # Two attempts: a repeated transfer is not used to estimate delays, and a restart is in this one.
            transfer = Transfer(give, None, 0.0, attempts=2, recalling=recalling)
            ledger.open[receiver, model] = transfer
            ledger.open_weight[model] += weight
        ledger.reclaimed = [list(row) for row in data["reclaimed"]]
        for receiver, model, sequence in data["sequences"]:
            ledger._sequences[receiver, model] = sequence
        for sender, session, model, sequence, verdict in data["seen"]:
            seen = ledger._seen.setdefault(sender, {}).setdefault(session, {})
            seen[model] = sequence, verdict
        return ledger
