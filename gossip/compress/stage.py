"""What a compressor is: it makes a vector shorter, or its numbers smaller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from .packed import Array, Facts, Reader, Shapes

Expand: TypeAlias = Callable[[Array], Array]
"""Makes the vector from the values that are left of it."""


class Reducer(Protocol):
    """Leaves fewer values of a vector, and a few facts and side arrays to find their places.

    Works on float32 vectors. `unbiased` says whether the expanded vector is the original on average.
    """

    unbiased: bool

    def fit(self, shapes: Shapes) -> None:
        """Raise CompressError if vectors made of such blocks cannot be compressed this way."""
        ...

    def reduce(
        self, values: Array, rng: np.random.Generator, shapes: Shapes
    ) -> tuple[Facts, list[Array], Array]:
        """Facts, side arrays, and the values that are left."""
        ...

    @staticmethod
    def expander(facts: Facts, reader: Reader, length: int) -> tuple[int, Expand]:
        """How many values were left of `length`, and what makes the vector from them."""
        ...


class Quantizer(Protocol):
    """Writes every value with fewer bits."""

    unbiased: bool

    def quantize(self, values: Array, rng: np.random.Generator) -> tuple[Facts, list[Array]]:
        """Facts and arrays that stand for the values."""
        ...

    @staticmethod
    def restore(facts: Facts, reader: Reader, length: int) -> Array:
        """The values again, float32."""
        ...
