"""A compressed vector as it travels: what was done to it, and the few bytes that are left.

A packed vector describes itself. Whoever receives one needs its own vector's length, and for a
difference the value it was taken from, but nothing of the sender's settings.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgpack
import numpy as np

from gossamer.errors import GossamerError

Array: TypeAlias = np.ndarray[Any, Any]
Buffer: TypeAlias = bytes | bytearray | memoryview
Shapes: TypeAlias = Sequence[tuple[int, ...]]
"""The blocks of a flat vector, in order: `[(300, 784), (300,)]` for a layer's weights and biases."""
Facts: TypeAlias = list[Any]
"""One stage on the wire: its name, then numbers (and, for low rank, lists of numbers)."""
PackCause: TypeAlias = Literal["garbage", "truncated", "trailing", "non-finite", "too-large"]

MAX_STAGES: Final = 4
MAX_BLOCKS: Final = 4096

_LENGTHS = struct.Struct("<Hqf")


class CompressError(GossamerError, ValueError):
    """A compressor that cannot be used: a name, a knob or a shape is wrong. The text says which."""


class PackError(GossamerError, ValueError):
    """Bytes that are no compressed vector; `cause` is a slug to count by."""

    def __init__(self, cause: PackCause | Literal["no-reference"], message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A compressed vector.

    length: values of the vector, as the sender says; a receiver compares it with its own.
    stages: the facts of each compressor that was applied, in that order.
    data: what is left, as buffers to be sent one after the other.
    base: the sequence number of the transfer whose value the difference was taken from; negative for
        one of the receiver's to the sender, 0 for the vector itself.
    gain: what the unpacked values are multiplied with.
    """

    length: int
    stages: tuple[Facts, ...]
    data: tuple[Buffer, ...]
    base: int = 0
    gain: float = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without the message's own header."""
        return sum(len(buffer) for buffer in self.buffers())

    def buffers(self) -> list[Buffer]:
        """Return the bytes to send."""
        facts = bytes(msgpack.packb(list(self.stages)) or b"")
        return [_LENGTHS.pack(len(facts), self.base, self.gain) + facts, *self.data]

    @classmethod
    def parse(cls, body: memoryview, length: int) -> Packed:
        """Return what `buffers` wrote. Nothing is unpacked yet: see `unpack`. Raises PackError."""
        if len(body) < _LENGTHS.size:
            raise PackError("truncated", f"{len(body)} bytes are too few for a compressed value")
        size, base, gain = _LENGTHS.unpack_from(body)
        start = _LENGTHS.size + size
        if len(body) < start:
            raise PackError("truncated", "a compressed value ends before it says what it is")
        try:
            stages = msgpack.unpackb(
                body[_LENGTHS.size : start],
                max_str_len=32, max_bin_len=0, max_ext_len=0, max_map_len=0, max_array_len=MAX_BLOCKS,
            )  # fmt: skip
        except Exception as error:  # msgpack raises half a dozen unrelated types on bad input
            raise PackError("garbage", f"unreadable facts of a compressed value: {error}") from None
        well = isinstance(stages, list) and 1 <= len(stages) <= MAX_STAGES
        if not well or not all(isinstance(s, list) and s and isinstance(s[0], str) for s in stages):
            raise PackError("garbage", "the facts of a compressed value are no list of stages")
        if not 0 <= gain <= 1:
            raise PackError("garbage", f"a gain of {gain}: it lies in 0..1")
        return cls(length, tuple(stages), (body[start:],), base, gain)


class Reader:
    """Takes arrays off a packed vector's bytes: views, so nothing is allocated for a false length."""

    def __init__(self, packed: Packed) -> None:
        whole = packed.data[0] if len(packed.data) == 1 else b"".join(packed.data)
        self._left = memoryview(whole).cast("B")

    def take(self, dtype: str, count: int) -> Array:
        """Return the next `count` numbers."""
        size = count * np.dtype(dtype).itemsize
        if size > len(self._left):
            raise PackError("truncated", f"{len(self._left)} bytes left where {size} are needed")
        found = np.frombuffer(self._left[:size], dtype=dtype)
        self._left = self._left[size:]
        return found

    def end(self) -> None:
        """Raise PackError if anything is left."""
        if len(self._left):
            raise PackError("trailing", f"{len(self._left)} bytes after a compressed value")


def as_buffer(array: Array) -> memoryview:
    """An array's bytes, little-endian as its dtype should say."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data.toreadonly()


def in_short(value: object) -> str:
    """Return what came over the wire, in a few characters.

    Of lists and maps only the kind: writing out one that is nested a thousand deep raises RecursionError.
    """
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else f"{value!r:.80}"


def check_count(value: object, low: int, high: int, what: str) -> int:
    """Return a whole number that came over the wire, if it is within bounds; else PackError."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise PackError("garbage", f"{what} cannot be {in_short(value)}: it lies in {low}..{high}")
    return value


def check_facts(facts: Facts, count: int) -> None:
    """Raise PackError unless a stage has this many facts after its name."""
    if len(facts) != count + 1:
        raise PackError("garbage", f"{facts[0]}: {len(facts) - 1} facts where {count} are needed")
