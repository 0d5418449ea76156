"""Push-sum, as pure functions on mass.

Mass is stored as (value, weight); the sum of push-sum is weight · value. In this form training can change
the value in place without updating anything else, sending a share leaves the value as it is, and no second
copy of the parameters is needed.

Weights are integers, in units of 2^-32 of a peer, so that splitting and adding them is exact. Values are 1-D
arrays of float32 or float64 or, in exact tests, of `fractions.Fraction` objects, with which the sums are
exact too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

ONE = 1 << 32
"""The weight of one peer. Sample-weighted averages use ONE · samples; only ratios matter."""

FLOOR = 1 << 12
"""The smallest weight that a peer sends or keeps when it splits its mass: about a millionth of a peer. A peer
with too little weight for that only receives, until transfers from neighbours have raised its weight again.
Otherwise repeated halving would reach a single unit, of which any share rounds to 0."""

MAX_WEIGHT = (1 << 63) - 1
"""The largest weight, so that every weight fits a signed 64-bit integer on the wire."""


@dataclass(frozen=True, slots=True, eq=False)
class Mass:
    """A value and its integer weight; the sum is weight · value.

    With weight 0 the value does not contribute to the average: a newcomer's initial parameters.
    """

    value: Array
    weight: int

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= MAX_WEIGHT:
            raise ValueError(f"mass: weight {self.weight} is outside 0..{MAX_WEIGHT}")


def portion(weight: int, fraction: float | Fraction) -> int:
    """Return `fraction` of an integer weight, rounded down."""
    top, bottom = fraction.as_integer_ratio()
    return weight * top // bottom


def split(mass: Mass, share: int, sent: Array | None = None) -> tuple[Mass, Mass]:
    """Split `share` units of weight off: return (kept, given), whose sums add up to the sum of `mass`.

    `sent` is the value that the receiver will read, if it differs from the value of `mass` (float16 on the
    wire, compression). The compression error is kept in the sender's value, so that nothing is lost. If the
    whole weight is given, no value is kept that could hold the error: then send at full precision.
    """
    if not 0 < share <= mass.weight:
        raise ValueError(f"split: cannot take {share} units from a weight of {mass.weight}")
    kept = mass.weight - share
    if sent is None:
        return Mass(mass.value, kept), Mass(mass.value, share)
    value = remainder(mass.value, sent, share, kept) if kept else mass.value
    return Mass(value, kept), Mass(sent, share)


def remainder(value: Array, sent: Array, given: int, kept: int) -> Array:
    """Return the value to keep so that kept·result + given·sent = (kept + given)·value."""
    # In place: value + (value - sent)·given/kept
    result = np.subtract(value, sent, dtype=value.dtype, casting="same_kind")
    result *= as_factor(given, kept, result)
    result += value
    return result


def absorb(mass: Mass, other: Mass) -> Mass:
    """Add `other` to `mass`; the result keeps the dtype of `mass.value`.

    Computed as x + (w'/(w + w'))·(x' - x) in one new array: equal values stay exactly equal, and no float64
    copy of a float32 vector is made.
    """
    weight = mass.weight + other.weight
    if weight == 0:
        return mass
    if mass.weight == 0:
        return Mass(other.value.astype(mass.value.dtype, casting="same_kind"), weight)
    result = np.subtract(other.value, mass.value, dtype=mass.value.dtype, casting="same_kind")
    result *= as_factor(other.weight, weight, result)
    result += mass.value
    return Mass(result, weight)


def total(masses: Iterable[Mass]) -> tuple[Any, int]:
    """Return (sum of weight·value, sum of weights): the two quantities that gossip must conserve."""
    vector: Any = 0
    weight = 0
    for mass in masses:
        if mass.weight:
            vector = vector + mass.value * as_factor(mass.weight, 1, mass.value)
            weight += mass.weight
    return vector, weight


@np.errstate(over="ignore", invalid="ignore")
def absorb_finite(mass: Mass, other: Mass) -> Mass | None:
    """Add `other` to `mass` as `absorb` does; None if the result is not finite."""
    result = absorb(mass, other)
    return result if is_finite(result.value) else None


def is_finite(value: Array) -> bool:
    """Return whether every entry is finite; True for object arrays, whose fractions are always finite."""
    if value.dtype == object:
        return True
    # Fast path: if the sum of squares is finite, all entries are. It takes 10 µs for 100,000 float32; np.sum
    # takes 58 µs. Unlike np.dot, np.vdot gives no warning on overflow, so no errstate is needed.
    if value.dtype.itemsize >= 4 and math.isfinite(np.vdot(value, value)):
        return True
    return bool(np.isfinite(value).all())


def as_factor(top: int, bottom: int, like: Array) -> Any:
    """Return top/bottom as a number that can be multiplied with `like` without changing its dtype."""
    return Fraction(top, bottom) if like.dtype == object else top / bottom
