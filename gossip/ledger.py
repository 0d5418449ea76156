"""The books of one peer: which transfers are open, and what became of those it received.

Per (neighbour, vector) at most one transfer is open, and its sequence number rises. So a receiver
needs to remember one line per (sender, session, vector): the last sequence and its verdict. Whatever
is older has been closed by its sender and may be ignored.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from .compress.packed import Packed
from .messages import Give, Tag, Verdict

Edge: TypeAlias = tuple[str, str]
"""(neighbour, vector)"""

SESSIONS_KEPT = 64
"""How many sessions of one sender are remembered. A duplicate would have to be delayed across that
many fresh starts of its sender to be credited twice."""


@dataclass(frozen=True, slots=True)
class Patience:
    """When to repeat an unacknowledged transfer, and when to ask for it back.

    Waiting times follow the acknowledgement delays that were seen, not fixed constants.
    """

    first: float = 1.0
    """Delay in seconds assumed before any was seen. Raise it on slow links to avoid a burst of
    repeats at the start; lower it for simulations."""
    resend_quantile: float = 0.95
    """Quantile of delays on which repeating is based. Lower it if messages are lost often and
    bandwidth is plentiful."""
    resend_factor: float = 1.5
    """Repeat after this many times that quantile. Raise it if `counters["repeat"]` is large
    although little is lost."""
    backoff: float = 2.0
    """Each repeat of one transfer waits this many times longer than the one before."""
    recall_quantile: float = 0.99
    """Quantile of delays on which recalling is based."""
    recall_factor: float = 20.0
    """Ask for the mass back after this many times that quantile. Raise it if neighbours pause for
    long and the recalls are answered "credited" anyway; lower it if mass is locked up by peers that
    vanish."""
    shortest: float = 0.02
    """Never repeat faster than this, in seconds."""
    longest: float = 30.0
    """Never wait longer than this between two repeats, in seconds."""
    remembered: int = 256
    """How many delays are remembered. Lower it to follow changing links faster."""


class Delays:
    """The acknowledgement delays seen lately, and the waiting times that follow from them."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._seen: deque[float] = deque()
        self._sorted: list[float] = []
        self._scale = 1.0

    def acknowledged(self, delay: float, attempts: int) -> None:
        """Learn from an acknowledgement that came `delay` after the transfer was first sent.

        After a repeat nobody knows which copy was answered, so such a delay is not learnt; instead
        the backed-off wait stays in force until a transfer is answered at its first attempt.
        """
        if attempts == 1:
            self._remember(max(0.0, delay))
            self._scale = 1.0
        else:
            self._scale = max(self._scale, self._patience.backoff ** (attempts - 1))

    def resend_after(self, attempts: int) -> float:
        """Return how long to wait for an answer to the latest of `attempts` copies."""
        p = self._patience
        base = p.resend_factor * self._quantile(p.resend_quantile)
        scale = max(self._scale, p.backoff ** min(max(attempts - 1, 0), 64))
        return min(max(base, p.shortest) * scale, p.longest)

    def recall_after(self) -> float:
        """Return the age at which an open transfer is stale."""
        p = self._patience
        return p.recall_factor * max(self._quantile(p.recall_quantile), p.shortest)

    def _remember(self, delay: float) -> None:
        self._seen.append(delay)
        insort(self._sorted, delay)
        if len(self._seen) > self._patience.remembered:
            del self._sorted[bisect_left(self._sorted, self._seen.popleft())]

    def _quantile(self, q: float) -> float:
        """The quantile, interpolated; asked for at every tick, so the delays are kept in order."""
        if not self._sorted:
            return self._patience.first
        place = q * (len(self._sorted) - 1)
        low = int(place)
        high = min(low + 1, len(self._sorted) - 1)
        return self._sorted[low] + (place - low) * (self._sorted[high] - self._sorted[low])


def is_line(row: object) -> bool:
    """Whether plain data that came from elsewhere is a line as `Ledger.lines` yields them."""
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


class Ledger:
    """Open transfers going out, and one line per (sender, session, vector) coming in."""

    def __init__(self, peer: str, session: str) -> None:
        self.peer = peer
        self.session = session
        self.open: dict[Edge, Transfer] = {}
        self._sequences: dict[Edge, int] = {}
        self._seen: dict[str, dict[str, dict[str, tuple[int, Verdict]]]] = {}

    def debit(
        self,
        vector: str,
        receiver: str,
        receiver_session: str,
        weight: int,
        value: np.ndarray[Any, Any],
        now: float,
        tag: Tag | None = None,
        packed: Packed | None = None,
    ) -> Transfer:
        """Open a transfer; the caller has taken its mass from what it holds."""
        edge = (receiver, vector)
        if edge in self.open:
            raise ValueError(f"transfer of {vector!r} to {receiver!r}: one is open already")
        sequence = self._sequences.get(edge, 0) + 1
        self._sequences[edge] = sequence
        give = Give(
            vector,
            self.peer,
            self.session,
            sequence,
            receiver,
            receiver_session,
            weight,
            value,
            tag,
            packed,
        )
        self.open[edge] = Transfer(give, now, now)
        return self.open[edge]

    def update(self, edge: Edge, **changes: Any) -> Transfer:
        """Change the timing of an open transfer and return it."""
        self.open[edge] = replace(self.open[edge], **changes)
        return self.open[edge]

    def close(self, edge: Edge) -> Transfer:
        """Strike an open transfer off; what becomes of its mass is the caller's business."""
        return self.open.pop(edge)

    def verdict(self, sender: str, session: str, vector: str) -> tuple[int, Verdict]:
        """Return the last sequence seen and its verdict; (0, "void") if none was."""
        return self._seen.get(sender, {}).get(session, {}).get(vector, (0, "void"))

    def decide(
        self, sender: str, session: str, vector: str, sequence: int, verdict: Verdict
    ) -> None:
        """Write down, once and for all, what became of a received sequence."""
        sessions = self._seen.setdefault(sender, {})
        sessions.setdefault(session, {})[vector] = (sequence, verdict)
        if len(sessions) > SESSIONS_KEPT:
            del sessions[next(iter(sessions))]

    def lines(self) -> Iterator[tuple[str, str, str, int, Verdict]]:
        """Yield (sender, session, vector, last sequence, verdict) of all that was received."""
        for sender, sessions in self._seen.items():
            for session, vectors in sessions.items():
                for vector, (sequence, verdict) in vectors.items():
                    yield sender, session, vector, sequence, verdict

    def snapshot(self) -> dict[str, Any]:
        """Return the books as plain data; transfers that share a value share it here too.

        A compressed value is kept as its receiver reads it, and sent again as that.
        """
        arrays: dict[int, np.ndarray[Any, Any]] = {}
        index: dict[int, int] = {}
        rows: list[list[Any]] = []
        for transfer in self.open.values():
            give = transfer.give
            at = index.setdefault(id(give.value), len(index))
            arrays[at] = give.value
            rows.append(
                [
                    give.vector,
                    give.receiver,
                    give.receiver_session,
                    give.sequence,
                    give.weight,
                    at,
                    None if give.tag is None else list(give.tag),
                    transfer.recalling,
                ]
            )
        return {
            "peer": self.peer,
            "session": self.session,
            "open": rows,
            "values": [arrays[i] for i in range(len(arrays))],
            "sequences": [[*edge, sequence] for edge, sequence in self._sequences.items()],
            "seen": [list(line) for line in self.lines()],
        }

    @classmethod
    def restore(cls, data: dict[str, Any]) -> Ledger:
        """Rebuild the books; open transfers are due to be sent again at once."""
        ledger = cls(data["peer"], data["session"])
        for vector, receiver, session, sequence, weight, at, tag, recalling in data["open"]:
            give = Give(
                vector,
                ledger.peer,
                ledger.session,
                sequence,
                receiver,
                session,
                weight,
                data["values"][at],
                None if tag is None else (tag[0], tag[1]),
            )
            # No delay can be learnt from a transfer that lived through a restart: 2 attempts.
            transfer = Transfer(give, None, 0.0, attempts=2, recalling=recalling)
            ledger.open[receiver, vector] = transfer
        for receiver, vector, sequence in data["sequences"]:
            ledger._sequences[receiver, vector] = sequence
        for sender, session, vector, sequence, verdict in data["seen"]:
            ledger._seen.setdefault(sender, {}).setdefault(session, {})[vector] = (
                sequence,
                verdict,
            )
        return ledger
