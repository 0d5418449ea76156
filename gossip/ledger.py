"""The accounts of one peer: the mass it holds, its open transfers, and its verdicts on received transfers.

Per (neighbour, model) at most one transfer is open, and sequence numbers rise. So a receiver needs to
remember only one verdict per (sender, session, model): that on the last sequence number. Earlier transfers
were closed by their sender and can be ignored.

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
"""The most reclaimed transfers that are remembered: the goodbye lists them, and must fit into one packet."""

SESSIONS_KEPT = 64
"""The most sessions of one sender that are remembered. A transfer could be credited twice only if its
duplicate arrived after the sender had begun that many newer sessions."""


def is_reclaimed_row(row: object) -> bool:
    """Return whether data received from a peer has the types of a row of `Ledger.reclaimed`."""
    if not isinstance(row, list | tuple) or len(row) != 5:
        return False
    *names, sequence, weight = row
    return all(isinstance(name, str) for name in names) and all(
        type(number) is int and 0 <= number <= MAX_WEIGHT for number in (sequence, weight)
    )


def is_verdict_row(row: object) -> bool:
    """Return whether data received from a peer has the types of a row that `Ledger.verdicts` yields."""
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
    """An open transfer: debited here, and not yet acknowledged by the receiver as credited or void."""

    give: Give
    opened: float | None
    """When it was first sent; None after a restart, until the first tick gives the time."""
    sent: float
    """When it was last sent."""
    attempts: int = 1
    recalling: bool = False
    """Whether its receiver was asked to give it back (`Recall`)."""
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
        """Transfers taken back before the receiver answered, because it was declared dead or this peer had
        to end: rows of receiver, its session, model, sequence, weight. If the receiver had credited one, the
        weight exists twice, and one side must remove it: see `Gossiper.peer_gone`."""
        self._sequences: dict[Edge, int] = {}
        """The last sequence number used per (receiver, model)."""
        self._verdicts: dict[str, dict[str, dict[str, tuple[int, Verdict]]]] = {}
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
        """Open a transfer. The caller must have subtracted the mass from its balance before."""
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
        if give.weight:
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
        return self._verdicts.get(sender, {}).get(session, {}).get(model, (0, "void"))

    def decide(
        self, sender: str, session: str, model: str, sequence: int, verdict: Verdict
    ) -> None:
        """Record the final verdict on a received transfer."""
        self.revision += 1
        sessions = self._verdicts.setdefault(sender, {})
        sessions.setdefault(session, {})[model] = (sequence, verdict)
        if len(sessions) > SESSIONS_KEPT:
            del sessions[next(iter(sessions))]

    def verdicts(self) -> Iterator[tuple[str, str, str, int, Verdict]]:
        """Yield (sender, session, model, last sequence, verdict) for all received transfers."""
        for sender, sessions in self._verdicts.items():
            for session, models in sessions.items():
                for model, (sequence, verdict) in models.items():
                    yield sender, session, model, sequence, verdict

    def snapshot(self) -> dict[str, Any]:
        """Return the ledger as plain data; a value that several transfers share is stored once.

        Of a compressed transfer the decompressed value is stored; after a restart it is sent uncompressed.
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
        }

    @classmethod
    def restore(cls, data: dict[str, Any]) -> Ledger:
        """Rebuild a ledger from a snapshot; open transfers are sent again at the next tick."""
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
        for sender, session, model, sequence, verdict in data["seen"]:
            models = ledger._verdicts.setdefault(sender, {}).setdefault(session, {})
            models[model] = sequence, verdict
        return ledger


class Store(Protocol):
    """The values of partial models, each a flat vector; names, lengths and dtypes stay fixed in a session."""

    def names(self) -> Iterable[str]:
        """Return the names of all partial models, in any order."""
        ...

    def read(self, name: str) -> Array:
        """Return a model's values, as a view or a copy; the caller will not change them.

        A view may change with the next `write`: copy values that are kept for longer.
        """
        ...

    def write(self, name: str, value: Array) -> None:
        """Replace a model's values; the store may keep `value`, the caller will not change it."""
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
        """Store an array as it is, without a copy."""
        self._models[name] = value


class Balances:
    """Held mass. Each method changes weight and value together so that the sum of all peers' mass stays."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.models: tuple[str, ...] = tuple(sorted(store.names()))
        self.weights: dict[str, int] = dict.fromkeys(self.models, 0)
        self.injected: dict[str, int] = dict.fromkeys(self.models, 0)
        self.promised: dict[str, int] = {}
        """Weight to inject once the first transfer is credited."""
        self.debts: dict[str, int] = {}
        """Weight to give up as soon as that much more is held; see `give_up`."""
        self.residue: dict[str, Array] = {}
        """Compression errors as sums (weight · value); they are added to the next mass that is credited."""
        self.retired: set[str] = set()
        """Models that the store no longer has. Their weights stay in the accounts, without values."""
        # Read once: a store may have to gather a model, and a model's shape never changes.
        self._shapes = {v: (own.shape, own.dtype) for v in self.models for own in [store.read(v)]}

    def update_models(self) -> None:
        """Take over the models that the store has now.

        New models have no weight yet. Models that are no longer there are retired: nothing is credited to
        them or sent of them any more, and weight that comes back from open transfers is only counted. A
        retired model that is back has the weight that was left.
        """
        self.models = tuple(sorted(self.store.names()))
        for model in self.models:
            self.weights.setdefault(model, 0)
            self.injected.setdefault(model, 0)
        self.retired = self.weights.keys() - set(self.models)
        for model in self.retired:
            self.promised.pop(model, None)
            self.residue.pop(model, None)
        self._shapes = {
            v: (own.shape, own.dtype) for v in self.models for own in [self.store.read(v)]
        }

    def inject(self, model: str, weight: int, *, after_first_transfer: bool = False) -> None:
        """Add weight at the current value, or promise to do so when the first transfer is credited."""
        held = self.weights[model]
        if not 0 < weight <= MAX_WEIGHT - held:
            raise ValueError(f"inject {model!r}: weight {weight} is out of range; use ONE·samples")
        if after_first_transfer and held == 0:
            self.promised[model] = weight
        else:
            self.promised.pop(model, None)  # or the same weight would be injected twice
            self.weights[model] += weight
            self.injected[model] += weight

    def adjust(self, model: str, weight: int) -> None:
        """Change the injected weight to `weight`, at the current value."""
        difference = weight - self.injected[model]
        if difference > 0:
            self.inject(model, difference)
        elif difference < 0:
            self.injected[model] = weight
            self.give_up(model, -difference)

    def take(
        self, model: str, share: int, lossy: Callable[[str, Array], Array] | None
    ) -> Array | None:
        """Debit `share` units and return the value to send with them; None if it is not finite."""
        if self.residue and self.weights[model] and model in self.residue:
            self._set(model, self._mass(model))  # adds the residue, so that it is sent too
        value = np.array(self.store.read(model))
        if not is_finite(value):
            return None
        rounded = None if lossy is None else np.asarray(lossy(model, value))
        rest, sent = split(Mass(value, self.weights[model]), share, rounded)
        sent.value.setflags(write=False)  # shared by all transfers of this push
        if rest.value is not value:
            self.store.write(model, rest.value)
        self.weights[model] = rest.weight
        return sent.value

    def take_packed(
        self,
        model: str,
        shares: Mapping[str, int],
        pack: Callable[[str, Array], tuple[Array, Packed, float] | None],
        *,
        exact_shares: bool,
    ) -> dict[str, tuple[Array, Packed | None, int]] | None:
        """Debit shares with compressed values.

        Return per receiver the value that it will read, the packed form and the share. A share shrinks with
        the fraction of the value that is transmitted, unless `exact_shares`. None if the value is not finite.

        The compression error, Σ share · (value − read value), stays here as a residue and is added to the
        next mass that is credited. If it were added to the kept value at once, it would be multiplied by
        share / kept weight, and the peer would train on that; later it is divided by more weight.
        """
        value = np.array(self.store.read(model))
        if not is_finite(value):
            return None
        if sum(shares.values()) > self.weights[model]:
            raise ValueError(f"push {model!r}: shares exceed a weight of {self.weights[model]}")
        error = np.zeros_like(value)
        debited: dict[str, tuple[Array, Packed | None, int]] = {}
        for receiver, full_share in shares.items():
            read_value, packed, fraction = pack(receiver, value) or (value, None, 1.0)
            share = full_share if exact_shares else max(1, portion(full_share, fraction))
            read_value.setflags(write=False)
            error += np.subtract(value, read_value, dtype=value.dtype) * as_factor(share, 1, value)
            debited[receiver] = read_value, packed, share
            self.weights[model] -= share
        if error.any():
            self.residue[model] = self.residue.get(model, 0) + error
        return debited

    def size(self, model: str) -> int:
        """Return the number of coordinates of a model."""
        return self._shapes[model][0][0]

    def defect(self, give: Give, open_weight: int) -> str | None:
        """Return what is wrong with a transfer, or None; whether its values are finite is not checked.

        open_weight: weight of this model in our own open transfers, all of which may come back.
        """
        shape, dtype = self._shapes[give.model]
        if give.value.dtype != dtype and not np.can_cast(give.value.dtype, dtype, "same_kind"):
            return "bad-dtype"
        if give.value.shape != shape:
            return "wrong-length"
        return None if 0 < give.weight <= self._free_weight(give.model) - open_weight else "weight"

    def _free_weight(self, model: str) -> int:
        """Return how much weight may still be credited.

        The weight that this peer will inject is reserved; half the range while that weight is not known.
        """
        reserved = self.promised.get(model, 0)
        if not reserved and not self.injected[model]:
            reserved = MAX_WEIGHT // 2
        return MAX_WEIGHT - self.weights[model] - reserved

    def credit(self, give: Give, observe: Callable[[Array], None] | None = None) -> str | None:
        """Absorb a transfer; return a cause, and change nothing, if the result would not be finite.

        observe: called with the own value before it changes.
        """
        model = give.model
        own = self._mass(model)
        mass = absorb_finite(own, Mass(give.value, give.weight))
        if mass is None:
            return "not-finite"
        if observe is not None:
            observe(own.value)
        self._set(model, mass)
        promised = self.promised.pop(model, 0)
        if promised:
            self.inject(model, promised)
        return None

    def give_up(self, model: str, weight: int) -> None:
        """Remove weight that was credited here although its sender has taken it back.

        The value does not change: the credited value has long been averaged with others. Weight that is no
        longer held, because it was pushed on, becomes a debt, which is paid from the next mass credited.
        """
        self.debts[model] = self.debts.get(model, 0) + weight
        self._pay_debt(model)

    def _pay_debt(self, model: str) -> None:
        debt = self.debts.pop(model, 0)
        paid = min(
            debt, max(self.weights[model] - 1, 0)
        )  # a value without any weight has no meaning
        self.weights[model] -= paid
        if debt > paid:
            self.debts[model] = debt - paid

    def take_back(self, give: Give) -> None:
        """Absorb the mass of one of our transfers that was not credited."""
        if give.model in self.retired:
            self.weights[give.model] += give.weight
            self._pay_debt(give.model)
            return
        self._set(give.model, absorb(self._mass(give.model), Mass(give.value, give.weight)))

    def snapshot(self, *, values: bool) -> dict[str, Any]:
        """Return weights and, on request, copies of the values, as plain data."""
        copies = {v: np.array(self.store.read(v)) for v in self.models} if values else {}
        return {
            "weights": dict(self.weights),
            "injected": dict(self.injected),
            "promised": dict(self.promised),
            "debts": dict(self.debts),
            "residue": dict(self.residue),
            "retired": sorted(self.retired),
            "values": copies,
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Restore weights and, if the snapshot has them, values; the store must have the same models."""
        retired = set(data.get("retired", ()))
        models = data["weights"].keys() - retired
        if models != set(self.models):
            raise ValueError(
                f"gossip snapshot holds the partial models {sorted(models)}, the store "
                f"{list(self.models)}: restore with the same partial models, or start without a snapshot"
            )
        for model, value in data["values"].items():
            own = self.store.read(model)
            if own.shape != value.shape:
                raise ValueError(
                    f"gossip snapshot: partial model {model!r} has {value.size} values, the store's "
                    f"{own.size}: restore with the same network, or start without a snapshot"
                )
            self.store.write(model, np.array(value))
        self.weights, self.retired = dict(data["weights"]), retired
        self.injected = dict(data["injected"])
        self.promised = dict(data["promised"])
        self.debts = dict(data["debts"])
        self.residue = {model: np.array(sums) for model, sums in data.get("residue", {}).items()}

    def _mass(self, model: str) -> Mass:
        return Mass(self.store.read(model), self.weights[model])

    def _set(self, model: str, mass: Mass) -> None:
        value = mass.value
        if self.residue and mass.weight and model in self.residue:
            value = value + self.residue.pop(model) * as_factor(1, mass.weight, value)
        self.store.write(model, value)
        self.weights[model] = mass.weight
        if model in self.debts:
            self._pay_debt(model)
