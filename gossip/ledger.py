"""The books of one peer: the mass it holds, which transfers are open, what became of those it received.

Per (neighbour, model) at most one transfer is open, and its sequence number rises. So a receiver
needs to remember one line per (sender, session, model): the last sequence and its verdict. Whatever
is older has been closed by its sender and may be ignored.

`Balances` is the mass that is held: a weight per partial model, beside the values in a `Store`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from .compress.packed import Packed
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
from .wire import Give, Tag, Verdict

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


class Store(Protocol):
    """The values of partial models, each a flat vector; names, lengths and dtypes stay fixed in a session."""

    def names(self) -> Iterable[str]:
        """Return the names of all partial models, in any order."""
        ...

    def read(self, name: str) -> Array:
        """Return a model's values, as a view or a fresh copy; the caller will not change it."""
        ...

    def write(self, name: str, value: Array) -> None:
        """Replace a model's values; `value` may be kept, the caller will not change it."""
        ...


class DictStore:
    """A store that is a plain dict of arrays: for tests, simulations and small programs."""

    def __init__(self, models: Mapping[str, Array]) -> None:
        self._models = {name: np.array(value) for name, value in models.items()}

    def names(self) -> Iterable[str]:
        """Return the names of all models."""
        return self._models.keys()

    def read(self, name: str) -> Array:
        """Return the stored array itself."""
        return self._models[name]

    def write(self, name: str, value: Array) -> None:
        """Store an array; its dtype and length become the model's."""
        self._models[name] = value


class Balances:
    """Held mass. Every change of a weight comes with the change of value that keeps sums right."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.models: tuple[str, ...] = tuple(sorted(store.names()))
        self.weights: dict[str, int] = dict.fromkeys(self.models, 0)
        self.injected: dict[str, int] = dict.fromkeys(self.models, 0)
        self.promised: dict[str, int] = {}
        """Weight to inject after the first mass was absorbed."""
        self.debts: dict[str, int] = {}
        """Weight to give up as soon as that much more is held; see `give_up`."""
        self.residue: dict[str, Array] = {}
        """Sums (weight · value) that compressors left behind; they join the next mass that comes in."""
        # Read once: a store may have to gather a model, and its shape never changes in a session.
        self._kinds = {v: (own.shape, own.dtype) for v in self.models for own in [store.read(v)]}

    def inject(self, model: str, weight: int, *, after_hearing: bool = False) -> None:
        """Add weight at the current value, or promise to when the first mass was absorbed."""
        held = self.weights[model]
        if not 0 < weight <= MAX_WEIGHT - held:
            raise ValueError(f"inject {model!r}: weight {weight} is out of range; use ONE·samples")
        if after_hearing and held == 0:
            self.promised[model] = weight
        else:
            self.promised.pop(model, None)  # or the same weight would come in once more
            self.weights[model] += weight
            self.injected[model] += weight

    def adjust(self, model: str, weight: int) -> None:
        """Change the weight that was injected, at the current value."""
        more = weight - self.injected[model]
        if more > 0:
            self.inject(model, more)
        elif more < 0:
            self.injected[model] = weight
            self.give_up(model, -more)

    def take(
        self, model: str, share: int, lossy: Callable[[str, Array], Array] | None
    ) -> Array | None:
        """Debit `share` units and return the value to send with them; None if it is not finite."""
        if self.residue and self.weights[model] and model in self.residue:
            self._set(model, self._mass(model))  # nothing stays behind of what goes in full
        value = np.array(self.store.read(model))
        if not is_finite(value):
            return None
        sent = None if lossy is None else np.asarray(lossy(model, value))
        kept, given = split(Mass(value, self.weights[model]), share, sent)
        given.value.setflags(write=False)  # shared by all transfers of this push
        if kept.value is not value:
            self.store.write(model, kept.value)
        self.weights[model] = kept.weight
        return given.value

    def take_packed(
        self,
        model: str,
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
        value = np.array(self.store.read(model))
        if not is_finite(value):
            return None
        if sum(shares.values()) > self.weights[model]:
            raise ValueError(f"push {model!r}: shares exceed a weight of {self.weights[model]}")
        lost = np.zeros_like(value)
        sent: dict[str, tuple[Array, Packed | None, int]] = {}
        for receiver, asked in shares.items():
            read, packed, part = pack(receiver, value) or (value, None, 1.0)
            share = asked if whole else max(1, portion(asked, part))
            read.setflags(write=False)
            lost += np.subtract(value, read, dtype=value.dtype) * as_factor(share, 1, value)
            sent[receiver] = read, packed, share
            self.weights[model] -= share
        if lost.any():
            self.residue[model] = self.residue.get(model, 0) + lost
        return sent

    def size(self, model: str) -> int:
        """Return how many values a model has."""
        return self._kinds[model][0][0]

    def defect(self, give: Give, on_its_way: int) -> str | None:
        """Return what is wrong with a transfer, apart from values that are not finite.

        on_its_way: weight of this model in own open transfers, all of which may come back.
        """
        shape, dtype = self._kinds[give.model]
        if give.value.dtype != dtype and not np.can_cast(give.value.dtype, dtype, "same_kind"):
            return "bad-dtype"
        if give.value.shape != shape:
            return "wrong-length"
        return None if 0 < give.weight <= self._room(give.model) - on_its_way else "weight"

    def _room(self, model: str) -> int:
        """Return the weight that may still come in; half the range waits for own weight to be injected."""
        own = self.promised.get(model, 0)
        if not own and not self.injected[model]:
            own = MAX_WEIGHT // 2
        return MAX_WEIGHT - self.weights[model] - own

    def credit(self, give: Give) -> str | None:
        """Absorb a transfer; a cause, and nothing changed, if the result would not be finite."""
        model = give.model
        mass = absorb_finite(self._mass(model), Mass(give.value, give.weight))
        if mass is None:
            return "not-finite"
        self._set(model, mass)
        promised = self.promised.pop(model, 0)
        if promised:
            self.inject(model, promised)
        return None

    def give_up(self, model: str, weight: int) -> None:
        """Remove weight that its sender took back after it was credited here.

        The value stays as it is: what was credited has long mixed with the rest. What is not held any
        more, because it was passed on, is a debt that the next mass pays.
        """
        self.debts[model] = self.debts.get(model, 0) + weight
        self._pay(model)

    def _pay(self, model: str) -> None:
        debt = self.debts.pop(model, 0)
        paid = min(debt, max(self.weights[model] - 1, 0))  # one unit keeps the value alive
        self.weights[model] -= paid
        if debt > paid:
            self.debts[model] = debt - paid

    def take_back(self, give: Give) -> None:
        """Absorb the mass of an own transfer that was not credited."""
        self._set(give.model, absorb(self._mass(give.model), Mass(give.value, give.weight)))

    def snapshot(self, *, values: bool) -> dict[str, Any]:
        """Return weights and, on request, copies of the values, as plain data."""
        stored = {v: np.array(self.store.read(v)) for v in self.models} if values else {}
        return {
            "weights": dict(self.weights),
            "injected": dict(self.injected),
            "promised": dict(self.promised),
            "debts": dict(self.debts),
            "residue": dict(self.residue),
            "values": stored,
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over weights and, if there, values; the store must have the same models."""
        if set(data["weights"]) != set(self.models):
            raise ValueError(
                f"gossip snapshot holds the partial models {sorted(data['weights'])}, the store "
                f"{list(self.models)}: restore with the same partial models, or start afresh"
            )
        for model, value in data["values"].items():
            own = self.store.read(model)
            if own.shape != value.shape:
                raise ValueError(
                    f"gossip snapshot: partial model {model!r} has {value.size} values, the store's "
                    f"{own.size}: restore with the same network, or start afresh"
                )
            self.store.write(model, np.array(value))
        self.weights = dict(data["weights"])
        self.injected = dict(data["injected"])
        self.promised = dict(data["promised"])
        self.debts = dict(data["debts"])
        self.residue = {v: np.array(each) for v, each in data.get("residue", {}).items()}

    def _mass(self, model: str) -> Mass:
        return Mass(self.store.read(model), self.weights[model])

    def _set(self, model: str, mass: Mass) -> None:
        value = mass.value
        if self.residue and mass.weight and model in self.residue:
            value = value + self.residue.pop(model) * as_factor(1, mass.weight, value)
        self.store.write(model, value)
        self.weights[model] = mass.weight
        if model in self.debts:
            self._pay(model)
