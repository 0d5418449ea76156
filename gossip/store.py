"""Where the averaged values live: behind three methods, because a peer's network owns the memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from .pushsum import Array


class Store(Protocol):
    """Named flat vectors. The set of names, lengths and dtypes stays fixed during a session."""

    def names(self) -> Iterable[str]:
        """Return the names of all vectors, in any order."""
        ...

    def read(self, name: str) -> Array:
        """Return a vector, as a view or a fresh copy; the caller will not change it."""
        ...

    def write(self, name: str, value: Array) -> None:
        """Replace a vector's values; `value` may be kept, the caller will not change it."""
        ...


class DictStore:
    """A store that is a plain dict of arrays: for tests, simulations and small programs."""

    def __init__(self, vectors: Mapping[str, Array]) -> None:
        self._vectors = {name: np.array(value) for name, value in vectors.items()}

    def names(self) -> Iterable[str]:
        """Return the names of all vectors."""
        return self._vectors.keys()

    def read(self, name: str) -> Array:
        """Return the stored array itself."""
        return self._vectors[name]

    def write(self, name: str, value: Array) -> None:
        """Store an array; its dtype and length become the vector's."""
        self._vectors[name] = value
