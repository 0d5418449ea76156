"""Some of the values: the largest, or those that a common random draw picks."""

from __future__ import annotations

from typing import Final

import numpy as np

from .packed import (
    Array,
    CompressError,
    Facts,
    PackError,
    Reader,
    Shapes,
    check_count,
    check_facts,
)
from .stage import Expand

_WHOLE: Final = 1 << 32


def check_rate(name: str, rate: float) -> float:
    """The part of the values that is kept, if there can be such a part."""
    if not 0 < rate <= 1:
        raise CompressError(
            f"{name}:{rate:g}: the part of the values that is sent lies above 0 and up to 1, as in {name}:0.1"
        )
    return rate


class TopK:
    """The largest values by magnitude, with their places; the rest counts as 0.

    rate: the part that is sent. Every value costs its own bytes and 2 for its place (4 in vectors of
        more than 65536), so above a half it saves nothing.
    """

    unbiased = False

    def __init__(self, rate: float) -> None:
        self.rate = check_rate("top-k", rate)

    def fit(self, shapes: Shapes) -> None:
        """Any vector will do."""

    def reduce(
        self, values: Array, rng: np.random.Generator, shapes: Shapes
    ) -> tuple[Facts, list[Array], Array]:
        """Places in rising order, and the values there."""
        count = min(values.size, max(1, round(self.rate * values.size)))
        first = values.size - count
        places = np.sort(np.argpartition(np.abs(values), first)[first:]) if first else None
        if places is None:
            places = np.arange(values.size)
        return ["top-k", count], [places.astype(_place_dtype(values.size))], values[places]

    @staticmethod
    def expander(facts: Facts, reader: Reader, length: int) -> tuple[int, Expand]:
        """Zeros but for the places named."""
        check_facts(facts, 1)
        count = check_count(facts[1], 0, length, "top-k: how many")
        places = reader.take(_place_dtype(length), count).astype(np.int64)
        if count and (places[-1] >= length or (np.diff(places) <= 0).any()):
            raise PackError("garbage", "top-k: places out of order or outside the vector")
        return count, lambda left: _scatter(places, left, length)


class Mask:
    """Every value with the same chance, by a draw that the receiver repeats: no places are sent.

    rate: the chance. scaled: divide by it, so that the vector is right on average. That is what makes
        sense where what was left out is lost; here it stays in the sender and follows later, and the
        plain mask, which never overshoots, does better.
    """

    def __init__(self, rate: float, *, scaled: bool) -> None:
        self.name = "subsample" if scaled else "mask"
        self.unbiased = scaled
        self.chance = max(1, round(check_rate(self.name, rate) * _WHOLE))

    def fit(self, shapes: Shapes) -> None:
        """Any vector will do."""

    def reduce(
        self, values: Array, rng: np.random.Generator, shapes: Shapes
    ) -> tuple[Facts, list[Array], Array]:
        """The seed of the draw, and the values that it picked."""
        seed = int(rng.integers(1 << 62))
        left = values[_draw(seed, self.chance, values.size)]
        if self.unbiased:
            with np.errstate(over="ignore"):
                left = left * np.float32(_WHOLE / self.chance)
        return [self.name, seed, self.chance], [], left

    @staticmethod
    def expander(facts: Facts, reader: Reader, length: int) -> tuple[int, Expand]:
        """Zeros but for the places drawn."""
        check_facts(facts, 2)
        seed = check_count(facts[1], 0, (1 << 62) - 1, f"{facts[0]}: the seed")
        chance = check_count(facts[2], 1, _WHOLE, f"{facts[0]}: the chance")
        places = np.flatnonzero(_draw(seed, chance, length))
        return places.size, lambda left: _scatter(places, left, length)


def _draw(seed: int, chance: int, length: int) -> Array:
    """Which values are picked: from a generator's raw output, which is the same on every machine."""
    raw = np.random.PCG64(seed).random_raw(-(-length // 2))
    return np.asarray(raw, dtype="<u8").view("<u4")[:length] < np.uint64(chance)


def _scatter(places: Array, left: Array, length: int) -> Array:
    values = np.zeros(length, dtype=np.float32)
    values[places] = left
    return values


def _place_dtype(length: int) -> str:
    return "<u2" if length <= 1 << 16 else "<u4"
