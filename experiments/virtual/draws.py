"""Random numbers that depend on what they are for, not on when they are asked for.

Every draw is a hash of (seed, purpose, who, whom, count). So the twelfth message from peer 3 to peer 7
has the same delay whether events are handled one by one or ten thousand at a time, on one thread or
on many.
"""

from __future__ import annotations

import zlib
from typing import Any, TypeAlias

import numpy as np

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Hashes: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53


class Draws:
    """The random numbers of one seed."""

    def __init__(self, seed: int):
        self._seed = np.uint64(seed % (1 << 64))

    def hashes(self, purpose: str, *keys: Ints) -> Hashes:
        """One 64-bit hash per element; `keys` are arrays of one length."""
        start = np.array([self._seed ^ np.uint64(zlib.crc32(purpose.encode()) << 17)])
        state = _mix(start)
        for key in keys:
            state = _mix(state ^ key.astype(np.uint64))
        return state

    def uniform(self, purpose: str, *keys: Ints) -> Floats:
        """Numbers strictly between 0 and 1, one per element."""
        return ((self.hashes(purpose, *keys) >> np.uint64(11)).astype(np.float64) + 0.5) * _UNIT


def _mix(state: Hashes) -> Hashes:
    """One step of the splitmix64 generator: every bit of the result depends on every bit given."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))
