"""Compressors by name; several are applied one after the other, as in `top-k:0.05+int8`.

| name | what is sent | unbiased |
| --- | --- | --- |
| `float16` | every value in 2 bytes | no |
| `int8` … `int2` | every value in 8 … 2 bits, rounded at random | yes |
| `mask:0.1` | a random tenth of the values; sender and receiver draw it from the same seed | no |
| `subsample:0.1` | the same, divided by 0.1 | yes |
| `top-k:0.01` | the largest hundredth, with their indices | no |
| `low-rank:4` | each matrix as the product of two matrices of rank 4 | no |

The errors of an unbiased compressor average out over many messages. Whatever the error of a message is, the
sender keeps it and sends it later.

Compressors that keep fewer values (`Reducer`) come first, in any number; one that uses fewer bits per value
(`Quantizer`) may come last. To add a compressor, write a subclass of one of the two and `register` it. The
constructor and `reduce` or `quantize` run on the sender; `expansion` or `restore` run on the receiver, which
knows only the header and the bytes.

A flat vector consists of *blocks*, one per parameter, such as a weight matrix. `int8` divides it instead into
*groups* of 256 consecutive values.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np

from gossamer.errors import GossamerError

from ..pushsum import Array, is_finite
from ..wire import (
    MAX_BLOCKS,
    MAX_STAGES,
    CompressorHeader,
    Packed,
    PackError,
    Reader,
    as_buffer,
    check_count,
    check_header,
)

Shapes: TypeAlias = Sequence[tuple[int, ...]]
"""The shapes of the blocks of a flat vector, in order. A block has the values of one parameter: `[(300, 784),
(300,)]` for a layer's weights and biases."""


class CompressError(GossamerError, ValueError):
    """A compressor cannot be used: its name, its number or a shape is wrong. The message says which."""


Generator: TypeAlias = np.random.Generator

GROUP_SIZE: Final = 256
"""How many values share a scale, which takes 4 bytes. In a group of this size the scale costs little, and a
very large value makes only the 255 others coarser."""
MAX_GROUP_SIZE: Final = 1 << 20
"""The largest group that a receiver accepts."""
_MAX_FLOAT16: Final = 65504.0
_RATE_ONE: Final = 1 << 32
"""The integer that stands for a rate of 1 in the header of a mask. Rates are sent as integers, so that sender
and receiver select exactly the same values."""
_ITERATIONS: Final = 2
"""Subspace iterations: the error is then within a few percent of the smallest possible at this rank."""


class Quantized(NamedTuple):
    """What a quantizer sends."""

    header: CompressorHeader
    arrays: list[Array]


class Reduced(NamedTuple):
    """What a reducer sends, and the values that the next compressor compresses further.

    side_arrays: arrays that are sent as they are, such as indices.
    """

    header: CompressorHeader
    side_arrays: list[Array]
    kept: Array


class Expansion(NamedTuple):
    """How a receiver makes a whole vector from the values that a reducer kept.

    kept_count: how many values were kept, which the receiver must know before it can read them.
    expand: makes the whole vector from them.
    """

    kept_count: int
    expand: Callable[[Array], Array]


class Compressor(ABC):
    """A compressor of float32 vectors."""

    name: ClassVar[str]
    """The name on the wire, with which the compressor's header begins."""
    usage: ClassVar[str]
    """How a user writes the compressor; "" if users cannot choose it."""
    unbiased: ClassVar[bool]
    """Whether the expected value of the decompressed vector is the original."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self | None:
        """Return the compressor that `text` describes, or None if it describes one of another class.

        Raises CompressError if the number in the text is wrong.
        """


class Reducer(Compressor):
    """Keeps only some values, or replaces them by fewer numbers; a user writes `name:number`."""

    example: ClassVar[str]
    """How to write it with a sensible number, for errors."""
    needs_integer: ClassVar[bool] = False
    """Whether the number must be an integer."""

    def __init__(self, number: float) -> None:
        """Make a compressor with the number after the colon; CompressError if it is out of range."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        name, _, number_text = text.partition(":")
        if name != cls.name:
            return None
        try:
            number = float(number_text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or (cls.needs_integer and not number.is_integer()):
            raise CompressError(f"{text!r}: {name} needs a number, as in {cls.example}")
        return cls(number)

    def check_shapes(self, shapes: Shapes) -> None:
        """Raise CompressError if this compressor is of no use for vectors made of such blocks."""

    @abstractmethod
    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return what to send, and the kept values; `shapes` are the blocks of `values`."""

    @staticmethod
    @abstractmethod
    def expansion(header: CompressorHeader, reader: Reader, length: int) -> Expansion:
        """Read the side arrays; return how many of `length` values were kept, and how to expand them."""


class Quantizer(Compressor):
    """Writes every value with fewer bits."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        return cls() if text == cls.usage else None

    @abstractmethod
    def quantize(self, values: Array, rng: Generator) -> Quantized:
        """Return what to send."""

    @staticmethod
    @abstractmethod
    def restore(header: CompressorHeader, reader: Reader, length: int) -> Array:
        """Read the arrays and return the `length` values, float32."""


CompressorClass = TypeVar("CompressorClass", bound=type[Compressor])
Kind = TypeVar("Kind", bound=Compressor)
_COMPRESSORS: dict[str, type[Compressor]] = {}
"""All compressors by their name on the wire."""


def register(compressor: CompressorClass) -> CompressorClass:
    """Add a class of compressors to those that users can choose and receivers understand."""
    _COMPRESSORS[compressor.name] = compressor
    return compressor


def _ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient of two integers, rounded up."""
    return -(-dividend // divisor)


# --- fewer bits per value ------------------------------------------------------------------------


@register
class Float32(Quantizer):
    """Sends every value unchanged; used if the user chose no quantizer."""

    name, usage, unbiased = "float32", "", True

    def quantize(self, values: Array, rng: Generator) -> Quantized:
        return Quantized(["float32"], [values.astype("<f4", copy=False)])

    @staticmethod
    def restore(header: CompressorHeader, reader: Reader, length: int) -> Array:
        check_header(header, 0)
        return reader.take("<f4", length)


@register
class Float16(Quantizer):
    """Sends every value as float16. Values beyond its range are clipped, or they would become infinite."""

    name, usage, unbiased = "float16", "float16", False

    def quantize(self, values: Array, rng: Generator) -> Quantized:
        clipped = np.clip(values, -_MAX_FLOAT16, _MAX_FLOAT16)
        return Quantized(["float16"], [clipped.astype("<f2")])

    @staticmethod
    def restore(header: CompressorHeader, reader: Reader, length: int) -> Array:
        check_header(header, 0)
        return reader.take("<f2", length).astype(np.float32)


@register
class Integers(Quantizer):
    """Sends every value as an integer of `bits` bits, to be multiplied by the scale of its group.

    A value between two multiples of the scale is rounded up with a probability proportional to its distance
    from the lower one, so the result is unbiased. Fewer bits give shorter messages and more noise; below 4
    bits expect to need more rounds.
    """

    name, usage, unbiased = "int", "int8", True

    def __init__(self, bits: int = 8) -> None:
        if not 2 <= bits <= 8:
            raise CompressError(f"int{bits}: values have 2 to 8 bits; write one of int2 … int8")
        self.bits = bits

    @classmethod
    def parse(cls, text: str) -> Self | None:
        match = re.fullmatch(r"int(\d{1,3})", text)
        return None if match is None else cls(int(match[1]))

    def quantize(self, values: Array, rng: Generator) -> Quantized:
        """Return the scales of the groups, then the integers, packed into bits if they have fewer than 8."""
        largest = _largest_integer(self.bits)
        group_count = _ceil_div(values.size, GROUP_SIZE)
        padded = np.zeros(group_count * GROUP_SIZE, dtype=np.float32)
        padded[: values.size] = values
        groups = padded.reshape(group_count, GROUP_SIZE)
        scales = (np.abs(groups).max(axis=1) / np.float32(largest)).astype("<f4")
        # A group of zeros has scale 0.
        divisors = np.where(scales > 0, scales, np.float32(1))[:, None]
        # Float64: in float32 a random number next to 1 would be rounded up, which biases the mean.
        rounded = np.floor(groups / divisors.astype(np.float64) + rng.random(groups.shape))
        # The scale is rounded to float32, so the group's largest value may exceed `largest` scales a little.
        integers = np.clip(rounded, -largest, largest).astype(np.int8).reshape(-1)[: values.size]
        return Quantized(["int", self.bits, GROUP_SIZE], [scales, _pack_bits(integers, self.bits)])

    @staticmethod
    def restore(header: CompressorHeader, reader: Reader, length: int) -> Array:
        check_header(header, 2)
        bits = check_count(header[1], 2, 8, "int: the number of bits")
        group_size = check_count(header[2], 1, MAX_GROUP_SIZE, "int: the size of a group")
        scales = reader.take("<f4", _ceil_div(length, group_size))
        if not np.isfinite(scales).all():
            raise PackError("non-finite", "int: the scale of a group is NaN or infinite")
        if bits == 8:
            integers = reader.take("i1", length)
        else:
            integers = _unpack_bits(reader.take("u1", _ceil_div(length * bits, 8)), bits, length)
        with np.errstate(over="ignore"):  # `unpack` refuses infinite values, without a warning
            return integers.astype(np.float32) * np.repeat(scales, group_size)[:length]


def _largest_integer(bits: int) -> int:
    """Return the largest integer that is sent in this many bits; the smallest is its negative."""
    return (1 << (bits - 1)) - 1


def _pack_bits(integers: Array, bits: int) -> Array:
    """Return the integers as bytes, `bits` bits for each after `_largest_integer` was added to it."""
    if bits == 8:
        return integers
    unsigned = (integers + np.int8(_largest_integer(bits))).astype(np.uint8)
    lowest_bits = np.unpackbits(unsigned[:, None], axis=1)[:, 8 - bits :]
    return np.packbits(lowest_bits)


def _unpack_bits(packed: Array, bits: int, length: int) -> Array:
    """Return the integers that `_pack_bits` packed."""
    bits_of_bytes = np.zeros((length, 8), dtype=np.uint8)
    unpacked = np.unpackbits(packed, count=length * bits)
    bits_of_bytes[:, 8 - bits :] = unpacked.reshape(length, bits)
    unsigned = np.packbits(bits_of_bytes, axis=1)[:, 0]
    return unsigned.astype(np.int16) - _largest_integer(bits)


# --- some of the values --------------------------------------------------------------------------


def _check_rate(name: str, rate: float) -> float:
    """Return `rate`, the fraction of the values that is sent; CompressError if it is not in (0, 1]."""
    if not 0 < rate <= 1:
        raise CompressError(
            f"{name}:{rate:g}: the fraction of values to send must be above 0 and at most 1, as in {name}:0.1"
        )
    return rate


@register
class Mask(Reducer):
    """Sends a random selection of values, each selected with the same probability, and the selection's seed.

    rate: the probability. The sender keeps what is not sent for later messages; so this mask, whose values
        are never larger than the original ones, works better than the unbiased `Subsample`.
    """

    name, usage, unbiased, example = "mask", "mask:RATE", False, "mask:0.1"

    def __init__(self, rate: float) -> None:
        self.scaled_rate = max(1, round(_check_rate(self.name, rate) * _RATE_ONE))

    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return the seed of the selection, and the selected values."""
        seed = int(rng.integers(1 << 62))
        selected = _select(seed, self.scaled_rate, values.size)
        return Reduced([self.name, seed, self.scaled_rate], [], values[selected])

    @staticmethod
    def expansion(header: CompressorHeader, reader: Reader, length: int) -> Expansion:
        """Draw the same selection from the seed; the other values are zeros."""
        check_header(header, 2)
        seed = check_count(header[1], 0, (1 << 62) - 1, f"{header[0]}: the seed")
        scaled_rate = check_count(header[2], 1, _RATE_ONE, f"{header[0]}: the rate")
        indices = np.flatnonzero(_select(seed, scaled_rate, length))
        return Expansion(indices.size, lambda kept: _scatter(indices, kept, length))


@register
class Subsample(Mask):
    """Sends a random selection of values divided by the rate, so that the result is unbiased."""

    name, usage, unbiased, example = "subsample", "subsample:RATE", True, "subsample:0.1"

    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return the seed of the selection, and the selected values divided by the rate."""
        header, side_arrays, kept = super().reduce(values, rng, shapes)
        with np.errstate(over="ignore"):  # the receiver refuses infinite values
            scaled = kept * np.float32(_RATE_ONE / self.scaled_rate)
        return Reduced(header, side_arrays, scaled)


@register
class TopK(Reducer):
    """Sends the values of largest magnitude, with their indices; the other values become 0.

    rate: the fraction that is sent. Every value costs its own bytes and 2 for its index (4 in vectors of
        more than 65536 values), so that a rate above one half saves little or nothing.
    """

    name, usage, unbiased, example = "top-k", "top-k:RATE", False, "top-k:0.1"

    def __init__(self, rate: float) -> None:
        self.rate = _check_rate("top-k", rate)

    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return the indices in ascending order, and the values there."""
        count = min(values.size, max(1, round(self.rate * values.size)))
        left_out = values.size - count
        if left_out:
            indices = np.sort(np.argpartition(np.abs(values), left_out)[left_out:])
        else:
            indices = np.arange(values.size)
        sent_indices = indices.astype(_index_dtype(values.size))
        return Reduced(["top-k", count], [sent_indices], values[indices])

    @staticmethod
    def expansion(header: CompressorHeader, reader: Reader, length: int) -> Expansion:
        """Put the values at their indices; the other values are zeros."""
        check_header(header, 1)
        count = check_count(header[1], 0, length, "top-k: the number of values")
        indices = reader.take(_index_dtype(length), count).astype(np.int64)
        if count and (indices[-1] >= length or (np.diff(indices) <= 0).any()):
            raise PackError(
                "garbage", "top-k: the indices are not in ascending order, or outside the vector"
            )
        return Expansion(count, lambda kept: _scatter(indices, kept, length))


def _select(seed: int, scaled_rate: int, length: int) -> Array:
    """Return a boolean array that is True where a value is selected, the same on every machine.

    It uses the generator's raw 64-bit numbers, half of one for each value: numpy does not promise that its
    distributions stay the same from version to version.
    """
    raw = np.random.PCG64(seed).random_raw(_ceil_div(length, 2))
    halves = np.asarray(raw, dtype="<u8").view("<u4")
    return halves[:length] < np.uint64(scaled_rate)


def _scatter(indices: Array, kept: Array, length: int) -> Array:
    """Return a vector of zeros except for the kept values at their indices."""
    values = np.zeros(length, dtype=np.float32)
    values[indices] = kept
    return values


def _index_dtype(length: int) -> str:
    """Return the smallest type for indices of a vector of this length."""
    return "<u2" if length <= 1 << 16 else "<u4"


# --- matrices of low rank ------------------------------------------------------------------------


@register
class LowRank(Reducer):
    """Sends every block of two or more dimensions as the product of two matrices, m×rank and rank×n.

    Blocks that have no more values than their two factors would (biases, small matrices) are sent unchanged.

    rank: raise it for less distortion; each increment costs m + n values per block.
    """

    name, usage, unbiased, example = "low-rank", "low-rank:RANK", False, "low-rank:4"
    needs_integer = True

    def __init__(self, rank: float) -> None:
        if rank < 1:
            raise CompressError(f"low-rank:{rank:g}: the rank must be at least 1, as in low-rank:4")
        self.rank = int(rank)

    def check_shapes(self, shapes: Shapes) -> None:
        if not any(_is_shorter(_matrix(shape), self.rank) for shape in shapes):
            blocks = ", ".join("×".join(map(str, shape)) for shape in shapes) or "none"
            raise CompressError(
                f"low-rank:{self.rank} makes no block shorter (the blocks are {blocks}); lower the rank, or "
                "choose another compressor"
            )
        if len(shapes) > MAX_BLOCKS:
            raise CompressError(
                f"low-rank: {len(shapes)} blocks are more than the {MAX_BLOCKS} that a message may have; "
                "choose another compressor"
            )

    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return the factors of each block for which they are shorter, and the other blocks unchanged."""
        if sum(math.prod(shape) for shape in shapes) != values.size:
            raise CompressError(
                f"low-rank: blocks of {list(shapes)} do not make up a vector of {values.size} values"
            )
        pieces, start = [], 0
        matrices = [_matrix(shape) for shape in shapes]
        for rows, columns in matrices:
            block = values[start : start + rows * columns]
            start += rows * columns
            if _is_shorter((rows, columns), self.rank):
                pieces += _factors(block.reshape(rows, columns), self.rank, rng)
            else:
                pieces.append(block)
        kept = np.concatenate([piece.reshape(-1) for piece in pieces]) if pieces else values
        return Reduced(["low-rank", self.rank, [list(m) for m in matrices]], [], kept)

    @staticmethod
    def expansion(header: CompressorHeader, reader: Reader, length: int) -> Expansion:
        """Multiply the factors of each block; the header has the blocks' sizes as matrices."""
        check_header(header, 2)
        rank = check_count(header[1], 1, 1 << 31, "low-rank: the rank")
        matrices = _check_matrices(header[2], length)
        kept_count = sum(
            rank * (rows + columns) if _is_shorter((rows, columns), rank) else rows * columns
            for rows, columns in matrices
        )
        return Expansion(kept_count, lambda kept: _multiply(kept, matrices, rank, length))


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a block as a matrix: its first dimension and the product of the others.

    A block of one dimension is a matrix of one row.
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def _is_shorter(matrix: tuple[int, int], rank: int) -> bool:
    """Return whether the two factors of a matrix have fewer values than the matrix."""
    rows, columns = matrix
    return rank * (rows + columns) < rows * columns


def _factors(matrix: Array, rank: int, rng: Generator) -> list[Array]:
    """Return two factors whose product is near the best approximation of this rank (subspace iteration)."""
    # Scaled, because products of very large or very small values leave the range of float32.
    scale = float(np.abs(matrix).max()) or 1.0
    scaled = matrix.astype(np.float64) / scale
    left = scaled @ rng.standard_normal((matrix.shape[1], rank))
    for _ in range(_ITERATIONS):
        left = scaled @ (scaled.T @ np.linalg.qr(left)[0])
    left = np.linalg.qr(left)[0]
    return [left.astype(np.float32), (scale * (left.T @ scaled)).astype(np.float32)]


def _multiply(kept: Array, matrices: list[tuple[int, int]], rank: int, length: int) -> Array:
    """Return the vector of all blocks, each the product of its factors or unchanged.

    Products are sums of outer products: a matrix product may differ in its last bit between machines, and
    sender and receiver must get the same vector.
    """
    values = np.empty(length, dtype=np.float32)
    start = position = 0  # in `values` and in `kept`
    # `unpack` refuses values that are not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        for rows, columns in matrices:
            block = values[start : start + rows * columns]
            start += rows * columns
            if not _is_shorter((rows, columns), rank):
                block[:] = kept[position : position + block.size]
                position += block.size
                continue
            left = kept[position : position + rows * rank].reshape(rows, rank)
            position += rows * rank
            right = kept[position : position + rank * columns].reshape(rank, columns)
            position += rank * columns
            block[:] = 0
            for k in range(rank):
                block += np.multiply.outer(left[:, k], right[k]).reshape(-1)
    return values


def _check_matrices(received: Any, length: int) -> list[tuple[int, int]]:
    """Return the (rows, columns) of all blocks in a received header; PackError if they are wrong."""
    if not isinstance(received, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in received
    ):
        raise PackError("garbage", "low-rank: the blocks are not a list of rows and columns")
    most = max(length, 1)  # an empty block has one row
    matrices = [
        (
            check_count(rows, 0, most, "low-rank: the number of rows"),
            check_count(columns, 0, most, "low-rank: the number of columns"),
        )
        for rows, columns in received
    ]
    if sum(rows * columns for rows, columns in matrices) != length:
        raise PackError("garbage", f"low-rank: the blocks do not have {length} values in all")
    return matrices


# --- pipelines of compressors --------------------------------------------------------------------

_USAGES: Final = ", ".join(kind.usage for kind in _COMPRESSORS.values() if kind.usage)
"""How users write the compressors that they can choose, for errors."""


@dataclass(frozen=True)
class Pipeline:
    """Compressors in the order in which they are applied: any number of reducers, then a quantizer.

    name: what the user wrote, as in `top-k:0.05+int8`; `parse` reads it.
    """

    name: str
    reducers: tuple[Reducer, ...]
    quantizer: Quantizer

    @property
    def unbiased(self) -> bool:
        """Whether the expected value of the decompressed vector is the original."""
        return all(stage.unbiased for stage in (*self.reducers, self.quantizer))

    @property
    def dense(self) -> Pipeline:
        """A pipeline of the quantizer only, which sends every value.

        Used for the first vector that is sent to a receiver, which has no earlier value to which a few
        changes could be added.
        """
        return Pipeline(self.name, (), self.quantizer)

    def check_shapes(self, shapes: Shapes) -> None:
        """Raise CompressError if a compressor is of no use for vectors made of such blocks."""
        # Only the first reducer gets the blocks; the others get the flat vector that it keeps.
        if self.reducers:
            self.reducers[0].check_shapes(shapes)

    def pack(
        self, values: Array, rng: Generator, shapes: Shapes | None = None, base: int = 0
    ) -> Packed:
        """Compress a flat vector.

        shapes: its blocks; by default the vector is one block.
        base: if `values` are a difference, the number of the transfer that it refers to: see `Packed`.
        """
        kept = np.ascontiguousarray(values, dtype=np.float32)
        kept_shapes: Shapes = [kept.shape] if shapes is None else shapes
        headers: list[CompressorHeader] = []
        arrays: list[Array] = []
        for reducer in self.reducers:
            header, side_arrays, kept = reducer.reduce(kept, rng, kept_shapes)
            headers.append(header)
            arrays += side_arrays
            kept_shapes = [kept.shape]
        last_header, quantized = self.quantizer.quantize(kept, rng)
        data = tuple(as_buffer(array) for array in (*arrays, *quantized))
        return Packed(values.size, (*headers, last_header), data, base)


def parse(name: str) -> Pipeline:
    """Parse a name such as `top-k:0.05+int8`; CompressError says what is wrong with it."""
    reducers: list[Reducer] = []
    quantizer: Quantizer | None = None
    quantizer_text = ""
    for text in name.split("+"):
        if quantizer is not None:
            raise CompressError(
                f"{name!r}: nothing can follow {quantizer_text!r}; put {text!r} before it"
            )
        candidates = (
            compressor.parse(text.strip())
            for compressor in _COMPRESSORS.values()
            if compressor.usage
        )
        match next(filter(None, candidates), None):
            case LowRank() if reducers:
                raise CompressError(
                    f"{name!r}: low-rank needs the vector's own matrices; put it first"
                )
            case Reducer() as reducer:
                reducers.append(reducer)
            case Quantizer() as last:
                quantizer, quantizer_text = last, text
            case _:
                raise CompressError(
                    f"{name!r}: no compressor is called {text.strip()!r}; there are {_USAGES}, joined by +"
                )
    if len(reducers) >= MAX_STAGES:
        raise CompressError(
            f"{name!r}: more than {MAX_STAGES - 1} compressors before the last one; leave some out"
        )
    return Pipeline(name, tuple(reducers), quantizer or Float32())


def unpack(packed: Packed, length: int) -> Array:
    """Decompress a vector to float32; PackError if it does not have the expected `length`.

    Whatever the bytes are, it raises nothing but PackError, and allocates no more than a few vectors of that
    length.
    """
    if packed.length != length:
        raise PackError(
            "garbage", f"a compressed vector has {packed.length} values where {length} are expected"
        )
    reader = Reader(packed)
    expansions: list[Expansion] = []
    count = length
    for header in packed.stages[:-1]:
        expansion = _find_compressor(header, Reducer).expansion(header, reader, count)
        count = expansion.kept_count
        if count > length:
            raise PackError("too-large", f"{header[0]} keeps {count} values of {length}")
        expansions.append(expansion)
    last_header = packed.stages[-1]
    values = _find_compressor(last_header, Quantizer).restore(last_header, reader, count)
    reader.end()
    for expansion in reversed(expansions):
        values = expansion.expand(values)
    if not is_finite(values):
        raise PackError("non-finite", "a compressed value holds a NaN or an infinity")
    return values


def _find_compressor(header: CompressorHeader, kind: type[Kind]) -> type[Kind]:
    """Return the class of the compressor that a header names; PackError unless it is of this kind."""
    compressor = _COMPRESSORS.get(header[0], Compressor)
    if not issubclass(compressor, kind):
        raise PackError(
            "garbage", f"{header[0]!r:.40} is not the name of a {kind.__name__.lower()}"
        )
    return compressor


def distortion(values: Array, other: Array) -> float:
    """Return the distance of `other` from `values`, relative to the norm of `values` unless that is 0."""
    norm = float(np.linalg.norm(values))
    distance = float(np.linalg.norm(np.subtract(values, other, dtype=np.float64)))
    return distance / norm if norm else distance


def roundtrip(
    name: str, values: Array, rng: Generator, shapes: Shapes | None = None
) -> tuple[Array, int]:
    """Compress and decompress `values`; return what a receiver reads, and the number of bytes sent.

    name: the compressors, as for `parse`. shapes: the blocks of `values`, as for `Pipeline.pack`.
    """
    pipeline = parse(name)
    if shapes is not None:
        pipeline.check_shapes(shapes)
    packed = pipeline.pack(values, rng, shapes)
    return unpack(packed, values.size), packed.nbytes
