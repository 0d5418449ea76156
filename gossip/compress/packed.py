"""The wire format of a compressed vector: the headers of the compressors applied, and their bytes.

A packed vector is self-describing: to decompress it, a receiver needs the expected length, and for a
difference the value that it refers to, but not the sender's settings.
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
StageHeader: TypeAlias = list[Any]
"""One compressor on the wire: its name, then its parameters (numbers; for low rank, lists of numbers)."""
PackCause: TypeAlias = Literal["garbage", "truncated", "trailing", "non-finite", "too-large"]

MAX_STAGES: Final = 4
MAX_BLOCKS: Final = 4096

_LENGTHS = struct.Struct("<Hqf")


class CompressError(GossamerError, ValueError):
    """A compressor cannot be used: its name, its number or a shape is wrong. The message says which."""


class PackError(GossamerError, ValueError):
    """Bytes that are not a valid compressed vector; `cause` is a short identifier for counters."""

    def __init__(self, cause: PackCause | Literal["no-reference"], message: str) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A compressed vector.

    length: number of values of the vector, according to the sender; a receiver compares it with its own.
    stages: the header of each compressor that was applied, in that order.
    data: the arrays of all compressors, as buffers to be sent one after the other.
    base: if the vector is a difference, the sequence number of the transfer whose value was subtracted;
        negative for a transfer from the receiver to the sender. 0 if it is not a difference.
    gain: the factor by which the decompressed values are multiplied.
    """

    length: int
    stages: tuple[StageHeader, ...]
    data: tuple[Buffer, ...]
    base: int = 0
    gain: float = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without the message's own header."""
        return sum(len(buffer) for buffer in self.buffers())

    def buffers(self) -> list[Buffer]:
        """Return the bytes to send."""
        header = bytes(msgpack.packb(list(self.stages)) or b"")
        return [_LENGTHS.pack(len(header), self.base, self.gain) + header, *self.data]

    @classmethod
    def parse(cls, body: memoryview, length: int) -> Packed:
        """Parse the bytes that `buffers` returned; `unpack` decompresses them later. Raises PackError."""
        if len(body) < _LENGTHS.size:
            raise PackError("truncated", f"{len(body)} bytes are too few for a compressed value")
        size, base, gain = _LENGTHS.unpack_from(body)
        start = _LENGTHS.size + size
        if len(body) < start:
            raise PackError("truncated", "a compressed value ends within its headers")
        try:
            stages = msgpack.unpackb(
                body[_LENGTHS.size : start],
                max_str_len=32, max_bin_len=0, max_ext_len=0, max_map_len=0, max_array_len=MAX_BLOCKS,
            )  # fmt: skip
        except Exception as error:  # msgpack raises half a dozen unrelated types on bad input
            raise PackError(
                "garbage", f"unreadable headers of a compressed value: {error}"
            ) from None
        is_list = isinstance(stages, list) and 1 <= len(stages) <= MAX_STAGES
        if not is_list or not all(
            isinstance(s, list) and s and isinstance(s[0], str) for s in stages
        ):
            raise PackError("garbage", "the headers of a compressed value are not a list of stages")
        if not 0 <= gain <= 1:
            raise PackError("garbage", f"a gain of {gain}: it must lie in 0..1")
        return cls(length, tuple(stages), (body[start:],), base, gain)


class Reader:
    """Reads arrays from a packed vector's bytes, as views: a false length causes no allocation."""

    def __init__(self, packed: Packed) -> None:
        data = packed.data[0] if len(packed.data) == 1 else b"".join(packed.data)
        self._unread = memoryview(data).cast("B")

    def take(self, dtype: str, count: int) -> Array:
        """Return the next `count` numbers."""
        size = count * np.dtype(dtype).itemsize
        if size > len(self._unread):
            raise PackError("truncated", f"{len(self._unread)} bytes left where {size} are needed")
        array = np.frombuffer(self._unread[:size], dtype=dtype)
        self._unread = self._unread[size:]
        return array

    def end(self) -> None:
        """Raise PackError if bytes are left."""
        if len(self._unread):
            raise PackError("trailing", f"{len(self._unread)} bytes after a compressed value")


def as_buffer(array: Array) -> memoryview:
    """Return an array's bytes; its dtype must be little-endian."""
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data.toreadonly()


def describe(value: object) -> str:
    """Return a short description of a received value, for an error.

    Of lists and maps only the type: formatting one that is nested a thousand levels deep raises
    RecursionError.
    """
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else f"{value!r:.80}"


def check_count(value: object, low: int, high: int, what: str) -> int:
    """Return a received value if it is an integer within bounds; else raise PackError."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise PackError("garbage", f"{what} is {describe(value)}, must lie in {low}..{high}")
    return value


def check_header(header: StageHeader, count: int) -> None:
    """Raise PackError unless a stage's header has this many parameters after its name."""
    if len(header) != count + 1:
        raise PackError("garbage", f"{header[0]}: {len(header) - 1} parameters, {count} are needed")
