"""The transfers of one peer: those that are open, its verdicts on received ones, and its neighbours.

A receiver's *verdict* on a transfer is "credited", or "void": it will never be credited, and the sender takes
its mass back. A sender that waits too long for the verdict *recalls* the transfer (`Recall`): the receiver
answers with its verdict, which is "void" if the transfer has not arrived. A sender *reclaims* a transfer if
it takes the mass back without a verdict, because the receiver is gone or the sender itself must end.

Per (neighbour, model) at most one transfer is open, and sequence numbers rise. So a receiver needs to
remember only one verdict per (sender, session, model): that on the last sequence number. Earlier transfers
were closed by their sender and can be ignored.

`Neighbours` knows the neighbours' sessions and models and whether they can be reached, and `Delays` when a
transfer to one of them is late.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from math import inf
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from .pushsum import MAX_WEIGHT, ONE
from .wire import Give, Packed, Tag, Verdict

Edge: TypeAlias = tuple[str, str]
"""(neighbour, model): on each edge at most one transfer is open."""

RECLAIMED_KEPT = 1024
"""The most reclaimed transfers that are remembered: the goodbye lists them, and must fit into one packet."""

SESSIONS_KEPT = 64
"""The most sessions of one sender that are remembered. A transfer could be credited twice only if its
duplicate arrived after the sender had begun that many newer sessions."""


def is_reclaimed_row(row: object) -> bool:
    """Return whether data received from a peer has the types of a row of `Ledger.reclaimed`."""
    return _has_names(row) and all(type(n) is int and 0 <= n <= MAX_WEIGHT for n in row[3:])


def is_verdict_row(row: object) -> bool:
    """Return whether data received from a peer has the types of a row that `Ledger.verdicts` yields."""
    return _has_names(row) and isinstance(row[3], int) and isinstance(row[4], str)


def _has_names(row: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Return whether data is a row of three names and two other fields."""
    if not isinstance(row, list | tuple) or len(row) != 5:
        return False
    return all(isinstance(name, str) for name in row[:3])


@dataclass(frozen=True, slots=True)
class Transfer:
    """An open transfer: debited here, and not yet acknowledged with the receiver's verdict."""

    give: Give
    opened: float | None
    """When it was first sent; None after a restart, until `Gossiper.tick` sends it again."""
    sent: float
    """When it was last sent."""
    attempts: int = 1
    recalling: bool = False
    """Whether it was recalled; the answer has not arrived yet."""
    overdue: bool = False
    """Whether its acknowledgement is overdue, so that training does not wait for it any longer."""


class Ledger:
    """Open outgoing transfers, and the last verdict per (sender, session, model) of incoming ones."""

    def __init__(self, peer: str, session: str) -> None:
        self.peer = peer
        self.session = session
        self.open: dict[Edge, Transfer] = {}
        self.open_weight: Counter[str] = Counter()
        """The weight in open transfers, by model."""
        self.revision = 0
        """Rises with every change that must be in the checkpoint before a message about it is sent: debits,
        verdicts, and reclaimed transfers that are settled."""
        self.reclaimed: list[list[Any]] = []
        """Transfers taken back before the receiver answered, because it was declared gone or this peer had
        to end: rows of receiver, its session, model, sequence, weight. If the receiver had credited one, the
        weight exists twice, and one side must remove it: see `Gossiper.peer_gone`."""
        self._sequences: dict[Edge, int] = {}
        """The last sequence number used per (receiver, model)."""
        self._verdicts: dict[str, dict[str, dict[str, tuple[int, Verdict, int]]]] = {}
        """Sender → its session → model → the last sequence received, its verdict, and its weight."""

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
        """Open a transfer. The caller must have subtracted the mass from its balance before.

        tag: (round, exchange) in lockstep modes. packed: the compressed value, if it is sent compressed.
        """
        edge = (receiver, model)
        if edge in self.open:
            raise ValueError(f"transfer of {model!r} to {receiver!r}: another one is still open")
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
        """Remove an open transfer that was not acknowledged, and remember that it was taken back."""
        transfer = self.close(edge)
        give = transfer.give
        if give.weight:  # without weight (steady mode) nothing can be credited twice
            row = [give.receiver, give.receiver_session, give.model, give.sequence, give.weight]
            self.reclaimed.append(row)
            del self.reclaimed[:-RECLAIMED_KEPT]
        return transfer

    def settle_reclaimed(self, receiver: str, session: str) -> list[tuple[str, int, int]]:
        """Remove and return the reclaimed transfers to a receiver whose goodbye lists what it credited.

        Return rows of model, sequence, weight.
        """
        rows = [row for row in self.reclaimed if row[:2] == [receiver, session]]
        for row in rows:
            self.reclaimed.remove(row)
            self.revision += 1
        return [(model, sequence, weight) for _, _, model, sequence, weight in rows]

    def last_sequence(self, receiver: str, model: str) -> int:
        """Return the sequence number of the last transfer of a model to a receiver; 0 if there was none."""
        return self._sequences.get((receiver, model), 0)

    def verdict(self, sender: str, session: str, model: str) -> tuple[int, Verdict]:
        """Return the last sequence received and its verdict; (0, "void") if there was none."""
        return self._last(sender, session, model)[:2]

    def weight_received(self, sender: str, session: str, model: str) -> int:
        """Return the weight of the last transfer received; 0 if there was none."""
        return self._last(sender, session, model)[2]

    def _last(self, sender: str, session: str, model: str) -> tuple[int, Verdict, int]:
        return self._verdicts.get(sender, {}).get(session, {}).get(model, (0, "void", 0))

    def decide(
        self,
        sender: str,
        session: str,
        model: str,
        sequence: int,
        verdict: Verdict,
        weight: int = 0,
    ) -> None:
        """Record the final verdict on a received transfer of this weight."""
        self.revision += 1
        sessions = self._verdicts.pop(sender, {})
        self._verdicts[sender] = sessions  # the last one is the sender heard last
        sessions.setdefault(session, {})[model] = (sequence, verdict, weight)
        if len(sessions) > SESSIONS_KEPT:
            del sessions[next(iter(sessions))]

    def forget(self, model: str) -> None:
        """Forget all transfers of a model that has ended; none of them may be open."""
        self._sequences = {edge: n for edge, n in self._sequences.items() if edge[1] != model}
        for sessions in self._verdicts.values():
            for models in sessions.values():
                models.pop(model, None)

    def verdicts(self) -> Iterator[tuple[str, str, str, int, Verdict]]:
        """Yield (sender, session, model, last sequence, verdict); the sender heard last comes last."""
        for sender, sessions in self._verdicts.items():
            for session, models in sessions.items():
                for model, (sequence, verdict, _) in models.items():
                    yield sender, session, model, sequence, verdict

    def snapshot(self) -> dict[str, Any]:
        """Return the ledger as plain data; a value that several transfers share is stored once.

        A compressed transfer is stored decompressed, and after a restart it is sent uncompressed.
        """
        arrays: dict[int, np.ndarray[Any, Any]] = {}
        indices: dict[int, int] = {}
        rows: list[list[Any]] = []
        for transfer in self.open.values():
            give = transfer.give
            index = indices.setdefault(id(give.value), len(indices))
            arrays[index] = give.value
            tag = None if give.tag is None else list(give.tag)
            head = give.model, give.receiver, give.receiver_session, give.sequence, give.weight
            rows.append([*head, index, tag, transfer.recalling])
        return {
            "peer": self.peer,
            "session": self.session,
            "open": rows,
            "values": [arrays[i] for i in range(len(arrays))],
            "reclaimed": [list(row) for row in self.reclaimed],
            "sequences": [[*edge, sequence] for edge, sequence in self._sequences.items()],
            "seen": [list(row) for row in self.verdicts()],
            "seen_weights": [self.weight_received(*row[:3]) for row in self.verdicts()],
        }

    @classmethod
    def restore(cls, data: dict[str, Any]) -> Ledger:
        """Rebuild a ledger from a snapshot; the next `Gossiper.tick` sends open transfers again."""
        ledger = cls(data["peer"], data["session"])
        for model, receiver, session, sequence, weight, index, tag, recalling in data["open"]:
            give = Give(
                model, ledger.peer, ledger.session, sequence, receiver, session, weight,
                data["values"][index], None if tag is None else (tag[0], tag[1]),
            )  # fmt: skip
            # Counted as a second attempt, because repeated transfers are not used to estimate delays.
            transfer = Transfer(give, None, 0.0, attempts=2, recalling=recalling)
            ledger.open[receiver, model] = transfer
            ledger.open_weight[model] += weight
        ledger.reclaimed = [list(row) for row in data["reclaimed"]]
        for receiver, model, sequence in data["sequences"]:
            ledger._sequences[receiver, model] = sequence
        weights = data.get("seen_weights", repeat(MAX_WEIGHT))  # older snapshots lack them
        for row, weight in zip(data["seen"], weights, strict=False):
            sender, session, model, sequence, verdict = row
            models = ledger._verdicts.setdefault(sender, {}).setdefault(session, {})
            models[model] = sequence, verdict, weight
        return ledger


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The state of one neighbour, as far as presence events have told it.

    models: the partial models that may be pushed to it.
    leaving: whether it is about to leave: it hands over its mass and refuses transfers.
    weight: the push-sum weight that it says it injects; only steady mode uses it.
    """

    session: str
    models: frozenset[str]
    online: bool = True
    leaving: bool = False
    weight: int = ONE


class Neighbours:
    """All present neighbours, and the sessions that are gone for good."""

    def __init__(self) -> None:
        self._neighbours: dict[str, Neighbour] = {}
        self._receivers_cache: dict[tuple[str, bool], list[str]] = {}
        """Results of `receivers`, which is called at every turn; cleared when a neighbour changes."""
        self.gone: set[tuple[str, str]] = set()
        """(peer, session) pairs that are gone for good."""
        self.left: set[tuple[str, str]] = set()
        """The gone sessions that said goodbye. The others were given up: their peers may still be running."""
        self.returned: set[tuple[str, str]] = set()
        """The gone sessions that were given up and came online again."""

    def get(self, peer: str) -> Neighbour | None:
        """Return the state of a neighbour, or None."""
        return self._neighbours.get(peer)

    def put(self, peer: str, neighbour: Neighbour) -> None:
        """Set the state of a neighbour."""
        self._receivers_cache.clear()
        self._neighbours[peer] = neighbour

    def retire(self, peer: str, session: str, *, left: bool) -> None:
        """Note that a session is gone for good; left: whether it said goodbye."""
        self._receivers_cache.clear()
        self.gone.add((peer, session))
        if left:
            self.left.add((peer, session))
        neighbour = self._neighbours.get(peer)
        if neighbour is not None and neighbour.session == session:
            del self._neighbours[peer]

    def sessions(self) -> dict[str, str]:
        """Return the session of every neighbour."""
        return {peer: neighbour.session for peer, neighbour in self._neighbours.items()}

    def snapshot(self) -> dict[str, Any]:
        """Return the neighbours and the gone sessions as plain rows."""
        neighbours = self._neighbours.items()
        return {
            "gone": sorted(map(list, self.gone)),
            "left": sorted(map(list, self.left)),
            "returned": sorted(map(list, self.returned)),
            "neighbours": [[peer, n.session, sorted(n.models)] for peer, n in neighbours],
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Restore the rows of a snapshot; neighbours are offline until a presence event says otherwise."""
        self._receivers_cache.clear()
        self.gone, self.left, self.returned = (
            {(peer, session) for peer, session in data.get(name, ())}
            for name in ("gone", "left", "returned")
        )
        for peer, session, models in data.get("neighbours", []):
            self._neighbours[peer] = Neighbour(session, frozenset(models), online=False)

    def reachable(self, peer: str) -> bool:
        """Return False if a neighbour is offline; True for unknown peers, which may be online."""
        neighbour = self._neighbours.get(peer)
        return neighbour is None or neighbour.online

    def receivers(self, model: str, *, online_only: bool = False) -> list[str]:
        """Return the neighbours that a model may be pushed to, sorted by name."""
        key = model, online_only
        if key not in self._receivers_cache:
            self._receivers_cache[key] = sorted(
                peer
                for peer, neighbour in self._neighbours.items()
                if model in neighbour.models and (neighbour.online or not online_only)
            )
        return list(self._receivers_cache[key])

    def is_receiver(self, peer: str, model: str) -> bool:
        """Return whether a model may be pushed to a peer, online or not."""
        return peer in self._neighbours and model in self._neighbours[peer].models

    def staying_receivers(self, model: str) -> list[str]:
        """Return the neighbours that a model may be pushed to and that are not about to leave."""
        return [peer for peer in self.receivers(model) if not self._neighbours[peer].leaving]


# --- delays and timeouts -------------------------------------------------------------------------

MAX_EARLY_RECALLS = 6
"""After this many recalls in a row that came too early, the timeout before a recall stops growing."""
LARGE_VALUE_BYTES = 1 << 20
"""From this size on, the time that sending a value takes depends mainly on its size."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to repeat an unacknowledged transfer, and when to recall it, that is, ask for its mass back.

    Timeouts are computed from measured acknowledgement delays; the first ones from the defaults here.
    """

    first: float = 1.0
    """Delay in seconds assumed before one was measured. Raise it on slow links to avoid a burst of repeats
    at the start; lower it for simulations."""
    rate: float = 40e6
    """Bytes per second assumed for a large value before the delay of one of its size was measured. Lower it
    on slow links, for the same reason."""
    resend_quantile: float = 0.95
    """Quantile of the delays from which the timeout before a repeat is computed. Lower it if messages are
    lost often and bandwidth is plentiful."""
    resend_factor: float = 1.5
    """Repeat after this many times that quantile. Raise it if `Gossiper.counters["repeat"]` is large although
    few messages are lost."""
    backoff: float = 2.0
    """Each repeat of one transfer waits this many times longer than the one before."""
    recall_quantile: float = 0.99
    """Quantile of the delays from which the timeout before a recall is computed."""
    recall_factor: float = 20.0
    """Recall after this many times that quantile. Raise it if neighbours pause for long and recalls are
    answered "credited" in the end; lower it if peers that vanish lock up mass for too long."""
    recall_longest: float = inf
    """Recall after this many seconds at the latest. Lower it if neighbours are known to stall: it is safe,
    because a transfer that they have credited is not taken back."""
    shortest: float = 0.02
    """The shortest time between two repeats, in seconds."""
    longest: float = 30.0
    """The longest time between two repeats, in seconds."""
    remembered: int = 256
    """How many delays are kept. Lower it to follow changing links faster."""


class Delays:
    """The latest acknowledgement delays, and the timeouts computed from them.

    size: the size in bytes of the values whose transfers are measured.
    """

    def __init__(self, retry: RetryPolicy, size: int = 0) -> None:
        self._policy = retry
        self._first = retry.first + (size / retry.rate if size >= LARGE_VALUE_BYTES else 0.0)
        self._early_recalls = 0
        """Recalls in a row that were answered "void": the transfer had not arrived yet."""
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._backoff = 1.0
        """The factor by which repeats have raised the timeout before a repeat; see `acknowledged`."""

    def acknowledged(self, delay: float, attempts: int) -> None:
        """Note an acknowledgement that came `delay` seconds after the transfer was first sent.

        After a repeat it is not known which copy was acknowledged, so the delay is not used. Instead the
        backed-off timeout stays until a transfer is acknowledged at its first attempt (Karn's algorithm).
        """
        if attempts == 1:
            self._remember(max(0.0, delay))
            self._backoff = 1.0
        else:
            self._backoff = max(self._backoff, self._backoff_after(attempts))

    def recalled(self, arrived: bool) -> None:
        """Note the answer to a recall: whether the transfer had arrived, or was recalled too early.

        Early recalls raise the timeout: otherwise every transfer that takes longer would be recalled again.
        """
        self._early_recalls = 0 if arrived else min(self._early_recalls + 1, MAX_EARLY_RECALLS)

    def repeat_timeout(self, attempts: int) -> float:
        """Return how long after the last of `attempts` copies a transfer is sent again."""
        p = self._policy
        base = p.resend_factor * self._quantile(p.resend_quantile)
        backoff = max(self._backoff, self._backoff_after(attempts))
        return min(max(base, p.shortest) * backoff, p.longest)

    def _backoff_after(self, attempts: int) -> float:
        return self._policy.backoff ** min(max(attempts - 1, 0), 64)  # a higher power overflows

    def recall_timeout(self) -> float:
        """Return the age at which an open transfer is recalled."""
        age = self.overdue_timeout() * self._policy.backoff**self._early_recalls
        return min(age, self._policy.recall_longest)

    def overdue_timeout(self) -> float:
        """Return the age from which on a transfer is overdue: training does not wait for its verdict."""
        p = self._policy
        return p.recall_factor * max(self._quantile(p.recall_quantile), p.shortest)

    def _remember(self, delay: float) -> None:
        self._latest.append(delay)
        insort(self._sorted, delay)
        if len(self._latest) > self._policy.remembered:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]

    def _quantile(self, q: float) -> float:
        """Return the interpolated quantile; called at every tick, so the delays are kept sorted."""
        if not self._sorted:
            return self._first
        index = q * (len(self._sorted) - 1)
        low = int(index)
        high = min(low + 1, len(self._sorted) - 1)
        return self._sorted[low] + (index - low) * (self._sorted[high] - self._sorted[low])


class DelaysBySize:
    """One `Delays` per class of sizes, because large values take longer.

    All values below `LARGE_VALUE_BYTES` share one `Delays`; larger ones have one per power of two.
    """

    def __init__(self, retry: RetryPolicy) -> None:
        self._policy = retry
        self._classes: dict[int, Delays] = {}

    def of(self, size: int) -> Delays:
        """Return the delays of values of this size in bytes."""
        size_class = (size // LARGE_VALUE_BYTES).bit_length()
        if size_class not in self._classes:
            self._classes[size_class] = Delays(self._policy, size)
        return self._classes[size_class]
