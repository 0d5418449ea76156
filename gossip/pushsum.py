"""Push-sum, as pure functions on mass.

Mass is kept as (value, weight); the sum of push-sum is weight · value. Kept this way, training moves
the value in place with no bookkeeping, giving away a share leaves the value as it is, and no second
copy of the parameters is ever needed.

Weights are integers, in units of 2^-32 of a peer, so that splitting and absorbing them is exact, bit
for bit. Values are 1-D arrays of float32, float64, or (for proofs) of `fractions.Fraction` objects,
with which the sums are exact too.
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
"""Below this weight a peer keeps what it has (about a millionth of a peer). It keeps halvings far
from the last integer unit, where shares would round to nothing; a neighbour's gift lifts it again."""

MAX_WEIGHT = (1 << 63) - 1
"""The largest weight, so that every weight fits a signed 64-bit integer on the wire."""


@dataclass(frozen=True, slots=True, eq=False)
class Mass:
    """`weight` units at `value`. With weight 0 the value counts for nothing: a newcomer's start."""

    value: Array
    weight: int

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= MAX_WEIGHT:
            raise ValueError(f"mass: weight {self.weight} is outside 0..{MAX_WEIGHT}")


def portion(weight: int, fraction: float | Fraction) -> int:
    """Return `fraction` of an integer weight, rounded down (the rest stays with the owner)."""
    top, bottom = fraction.as_integer_ratio()
    return weight * top // bottom


def split(mass: Mass, share: int, sent: Array | None = None) -> tuple[Mass, Mass]:
    """Split `share` units off: returns (kept, given); their sums add up to the sum of `mass`.

    `sent` is what the receiver will read, if that differs from the value (float16 on the wire, a
    compressor): what was lost on the way stays in the kept value. With nothing kept there is
    nowhere for it to stay, so give everything only at full precision.
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
    lost = np.subtract(value, sent, dtype=value.dtype, casting="same_kind")
    lost *= as_factor(given, kept, lost)
    lost += value
    return lost


def absorb(mass: Mass, other: Mass) -> Mass:
    """Add `other` to `mass`; the result keeps the dtype of `mass.value`.

    Computed as x + (w'/(w + w'))·(x' - x) in one new array: equal values stay equal to the last bit,
    and no float64 copy of a float32 vector is made.
    """
    weight = mass.weight + other.weight
    if weight == 0:
        return mass
    if mass.weight == 0:
        return Mass(other.value.astype(mass.value.dtype, casting="same_kind"), weight)
    step = np.subtract(other.value, mass.value, dtype=mass.value.dtype, casting="same_kind")
    step *= as_factor(other.weight, weight, step)
    step += mass.value
    return Mass(step, weight)


def total(masses: Iterable[Mass]) -> tuple[Any, int]:
    """Return (sum of weight·value, sum of weights): the two things that gossip must conserve."""
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
    """Return whether every entry is finite; exact numbers (object arrays) always are."""
    if value.dtype == object:
        return True
    # An entry that is not finite makes the sum of squares so too: 10 µs for 100,000 float32, where their sum
    # takes 58. Unlike dot, vdot says nothing when it overflows, and so needs no errstate.
    if value.dtype.itemsize >= 4 and math.isfinite(np.vdot(value, value)):
        return True
    return bool(np.isfinite(value).all())


def as_factor(top: int, bottom: int, like: Array) -> Any:
    """top/bottom as a number that keeps the dtype of `like` when multiplied with it."""
    return Fraction(top, bottom) if like.dtype == object else top / bottom
