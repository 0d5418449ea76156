"""Push-sum averaging (Kempe et al. 2003): mass as pure functions, and the mass that one peer holds.

Every peer holds a sum vector and a weight, together its *mass*. To send, a peer splits off a share of both;
to receive, it adds what arrives to its own. The totals over all peers never change, so everywhere
sum / weight, the *value*, tends to the average of all peers.

A `Mass` stores the value and the weight; the sum vector is weight · value. In this form training can change
the value in place without updating anything else, sending a share leaves the value as it is, and no second
copy of the parameters is needed.

Weights are integers, so that splitting and adding them is exact; a peer starts with 2^32 (`ONE`). Values are
1-D arrays of float32 or float64 or, in exact tests, of `fractions.Fraction` objects, with which the sums are
exact too.

`Balances` is the mass that a peer holds: a weight per partial model, beside the values in a `Store`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from .wire import Give, Packed

Array: TypeAlias = np.ndarray[Any, Any]

ONE = 1 << 32
"""The weight that a peer starts with. In averages weighted by samples it starts with ONE · samples; only the
ratios of weights matter."""

MIN_WEIGHT = 1 << 12
"""The smallest weight that a peer sends or keeps when it splits its mass: about a millionth of `ONE`. A peer
with too little weight for that only receives, until transfers from neighbours have raised its weight again.
Otherwise repeated halving would reach a weight of 1, of which any share rounds to 0."""

MAX_WEIGHT = (1 << 63) - 1
"""The largest weight, so that every weight fits a signed 64-bit integer on the wire."""


@dataclass(frozen=True, slots=True, eq=False)
class Mass:
    """A value and its integer weight; together they stand for the sum vector weight · value.

    A value of weight 0 does not contribute to the average. A newcomer's initial parameters are such a value.
    """

    value: Array
    weight: int

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= MAX_WEIGHT:
            raise ValueError(f"a mass needs a weight from 0 to {MAX_WEIGHT}, not {self.weight}")


def portion(weight: int, fraction: float | Fraction) -> int:
    """Return `fraction` of an integer weight, rounded down."""
    # In integers: the product of a large weight and a float would be rounded.
    numerator, denominator = fraction.as_integer_ratio()
    return weight * numerator // denominator


def split(mass: Mass, share: int, sent_value: Array | None = None) -> tuple[Mass, Mass]:
    """Split `share` units of weight off a mass; return the mass that is kept and the mass that is sent.

    Their sums add up to the sum of `mass`. `sent_value` is the value that the receiver will read, if it
    differs from the value of `mass` (float16 on the wire, compression). The difference is added to the value
    that the sender keeps, so that nothing is lost. If the whole weight is sent, no value is kept that could
    hold the difference: see `Balances.residue`.
    """
    if not 0 < share <= mass.weight:
        raise ValueError(
            f"split: the share must be from 1 to the weight {mass.weight} of the mass, not {share}"
        )
    kept_weight = mass.weight - share
    if sent_value is None:
        return Mass(mass.value, kept_weight), Mass(mass.value, share)
    kept_value = mass.value
    if kept_weight:
        # kept_weight·kept_value + share·sent_value = mass.weight·mass.value, solved for kept_value:
        # mass.value + (mass.value - sent_value)·share/kept_weight, computed in one new array.
        kept_value = np.subtract(
            mass.value, sent_value, dtype=mass.value.dtype, casting="same_kind"
        )
        kept_value *= as_factor(share, kept_weight, kept_value)
        kept_value += mass.value
    return Mass(kept_value, kept_weight), Mass(sent_value, share)


def absorb(mass: Mass, other: Mass, difference: Array | None = None) -> Mass:
    """Return the sum of two masses, whose value has the dtype of `mass.value`.

    The value is computed as x + (w'/(w + w'))·(x' - x), where x and w are the value and weight of `mass`, x'
    and w' those of `other`. So equal values stay exactly equal, and no float64 copy of a float32 vector is
    made.

    difference: x' - x, as `subtract` returns it, if the caller has it; it is overwritten.
    """
    weight = mass.weight + other.weight
    if weight == 0:
        return mass
    if mass.weight == 0:
        return Mass(other.value.astype(mass.value.dtype, casting="same_kind"), weight)
    result = subtract(other.value, mass.value) if difference is None else difference
    result *= as_factor(other.weight, weight, result)
    result += mass.value
    return Mass(result, weight)


def subtract(value: Array, own: Array) -> Array:
    """Return value - own, in the dtype of `own`."""
    return np.subtract(value, own, dtype=own.dtype, casting="same_kind")


def total(masses: Iterable[Mass]) -> tuple[Any, int]:
    """Return the sum vector and the weight of all masses: the two quantities that gossip must conserve."""
    sum_vector: Any = 0
    weight = 0
    for mass in masses:
        if mass.weight:  # a value of weight 0 may be infinite, and 0 · inf is NaN
            sum_vector = sum_vector + mass.value * as_factor(mass.weight, 1, mass.value)
            weight += mass.weight
    return sum_vector, weight


def is_finite(value: Array) -> bool:
    """Return whether no coordinate is infinite or NaN; fractions, in object arrays, never are."""
    if value.dtype == object:
        return True
    if value.dtype.itemsize > 2:  # a sum of squares in float16 is slow, and overflows
        # If the sum of squares is finite, so is every coordinate: this makes no array of booleans.
        with np.errstate(over="ignore"):
            if np.isfinite(np.vdot(value, value)):
                return True
    return bool(np.isfinite(value).all())


def norm(value: Array) -> float:
    """Return the Euclidean norm; infinite, without a warning, on overflow."""
    if value.dtype.itemsize == 2:
        value = value.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(np.vdot(value, value)))


def as_factor(numerator: int, denominator: int, values: Array) -> Any:
    """Return the ratio of two weights as a factor for `values`, whose product with it keeps their dtype.

    A fraction for arrays of fractions, so that their products are exact, else a float.
    """
    return Fraction(numerator, denominator) if values.dtype == object else numerator / denominator


def _as_sum(value: Array, read_value: Array, share: int) -> Array:
    """Return share · (value − read value): the error of a transfer, in the dtype of `value`."""
    return np.subtract(value, read_value, dtype=value.dtype) * as_factor(share, 1, value)


# --- the mass that one peer holds ----------------------------------------------------------------


class Store(Protocol):
    """The values of partial models, each a flat vector of fixed length and dtype.

    After models were added or removed, `Balances.update_models` must be called.
    """

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


Debited: TypeAlias = "dict[str, tuple[Array, Packed | None, int]]"
"""By receiver: the value that it will read, its compressed form if it has one, and the weight to send."""


class Balances:
    """The mass that a peer holds. Each method changes weight and value together, so that no mass is lost."""

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
        """Compression errors, and rounding errors of mass that was sent whole, as sums (weight · value); they
        are added to the next mass that is credited."""
        self.retired: set[str] = set()
        """Models that the store no longer has. Their weights stay in the accounts, without values."""
        self.forgotten = (0, 0)
        """The weight held and injected of all models whose names are forgotten; see `forget`."""
        self._shapes = self._read_shapes()

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
        self._shapes = self._read_shapes()

    def _read_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return the shape and dtype of every model; slow if the store must gather the values."""
        shapes = {}
        for model in self.models:
            value = self.store.read(model)
            shapes[model] = value.shape, value.dtype
        return shapes

    def forget(self, model: str) -> None:
        """Forget the name of a retired model, and keep its weight in one account with others."""
        self.retired.discard(model)
        held = self.weights.pop(model) - self.debts.pop(model, 0)
        self.forgotten = self.forgotten[0] + held, self.forgotten[1] + self.injected.pop(model)

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
        self, model: str, shares: Mapping[str, int], lossy: Callable[[str, Array], Array] | None
    ) -> Debited | None:
        """Debit shares, 0 to send a value without weight; return None if the value is not finite.

        lossy: returns a model's value as the receiver will read it; None if that is the value itself.
        """
        if self.residue and self.weights[model] and model in self.residue:
            self._set(model, self._mass(model))  # adds the residue, so that it is sent too
        value = np.array(self.store.read(model))
        if not is_finite(value):
            return None
        rounded = None if lossy is None else np.asarray(lossy(model, value))
        if debit := sum(shares.values()):
            rest, _ = split(Mass(value, self.weights[model]), debit, rounded)
            if rest.value is not value:
                self.store.write(model, rest.value)
            elif rounded is not None:  # no weight is kept, nor any value that could hold the error
                self._add_residue(model, _as_sum(value, rounded, debit))
            self.weights[model] = rest.weight
        sent = value if rounded is None else rounded
        sent.setflags(write=False)  # shared by all transfers of this push
        return {receiver: (sent, None, share) for receiver, share in shares.items()}

    def take_packed(
        self,
        model: str,
        shares: Mapping[str, int],
        pack: Callable[[str, Array], tuple[Array, Packed, float] | None],
        *,
        exact_shares: bool,
    ) -> Debited | None:
        """Debit shares with compressed values; return None if the value is not finite.

        pack: `Links.pack` for a receiver and a value. The fraction that it returns reduces the share, unless
        `exact_shares`; where it returns None, the value is sent uncompressed.

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
        debited: Debited = {}
        for receiver, full_share in shares.items():
            read_value, packed, fraction = pack(receiver, value) or (value, None, 1.0)
            share = full_share if exact_shares else max(1, portion(full_share, fraction))
            read_value.setflags(write=False)
            error += _as_sum(value, read_value, share)
            debited[receiver] = read_value, packed, share
            self.weights[model] -= share
        self._add_residue(model, error)
        return debited

    def _add_residue(self, model: str, error: Array) -> None:
        if error.any():
            self.residue[model] = self.residue.get(model, 0) + error

    def size(self, model: str) -> int:
        """Return the number of coordinates of a model."""
        return self._shapes[model][0][0]

    def defect(self, give: Give, open_weight: int) -> str | None:
        """Return the cause to refuse a transfer, or None; whether its values are finite is not checked.

        open_weight: weight of this model in our own open transfers, all of which may come back.
        """
        if (cause := self.value_defect(give)) is not None:
            return cause
        return None if 0 < give.weight <= self._free_weight(give.model) - open_weight else "weight"

    def value_defect(self, give: Give) -> str | None:
        """Return the cause to refuse a value of a wrong type or length, or None."""
        shape, dtype = self._shapes[give.model]
        if give.value.dtype != dtype and not np.can_cast(give.value.dtype, dtype, "same_kind"):
            return "bad-dtype"
        return None if give.value.shape == shape else "wrong-length"

    def _free_weight(self, model: str) -> int:
        """Return how much weight may still be credited.

        The weight that this peer will inject is reserved; half the range while that weight is not known.
        """
        reserved = self.promised.get(model, 0)
        if not reserved and not self.injected[model]:
            reserved = MAX_WEIGHT // 2
        return MAX_WEIGHT - self.weights[model] - reserved

    def credit(
        self, give: Give, observe: Callable[[Array, float], None] | None = None
    ) -> str | None:
        """Absorb a transfer; return "not-finite", and change nothing, if the result would not be finite.

        observe: called with the own value before it changes, and its distance from the transfer's.
        """
        model, distance = give.model, 0.0
        held = self._mass(model)
        # Finite values may overflow: numpy's warning about that would tell nothing more than the cause.
        with np.errstate(over="ignore", invalid="ignore"):
            difference = subtract(give.value, held.value)
            if observe is not None:
                distance = float(np.linalg.norm(difference))
            result = absorb(held, Mass(give.value, give.weight), difference)
        # If the distance is finite, so are both values, and the result lies between them.
        measured = observe is not None and math.isfinite(distance)
        if not measured and not is_finite(result.value):
            return "not-finite"
        if observe is not None:
            observe(held.value, distance)
        self._set(model, result)
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
        # One unit is kept: a value without any weight has no meaning.
        paid = min(debt, max(self.weights[model] - 1, 0))
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
            **({"forgotten": list(self.forgotten)} if any(self.forgotten) else {}),
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
            present = self.store.read(model)
            if present.shape != value.shape:
                raise ValueError(
                    f"gossip snapshot: partial model {model!r} has {value.size} values, the store's "
                    f"{present.size}: restore with the same network, or start without a snapshot"
                )
            self.store.write(model, np.array(value))
        self.weights, self.retired = dict(data["weights"]), retired
        self.forgotten = tuple(data.get("forgotten", (0, 0)))
        self.injected = dict(data["injected"])
        self.promised = dict(data["promised"])
        self.debts = dict(data["debts"])
        self.residue = {model: np.array(sums) for model, sums in data.get("residue", {}).items()}

    def _mass(self, model: str) -> Mass:
        return Mass(self.store.read(model), self.weights[model])

    def _set(self, model: str, mass: Mass) -> None:
        """Make `mass` the held mass, then add the model's residue and pay its debt."""
        value = mass.value
        if self.residue and mass.weight and model in self.residue:
            value = value + self.residue.pop(model) * as_factor(1, mass.weight, value)
        self.store.write(model, value)
        self.weights[model] = mass.weight
        if model in self.debts:
            self._pay_debt(model)
