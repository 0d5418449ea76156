"""Compressors by name; several are applied one after the other, as in `top-k:0.05+int8`.

| name | what is sent | unbiased |
| --- | --- | --- |
| `float16` | every value in 2 bytes | no |
| `int8` … `int2` | every value in 8 … 2 bits, rounded at random | yes |
| `mask:0.1` | a random tenth of the values; sender and receiver draw it from the same seed | no |
| `subsample:0.1` | the same, divided by 0.1 | yes |
| `top-k:0.01` | the largest hundredth, with their indices | no |
| `low-rank:4` | each matrix as the product of two of rank 4 | no |

Compressors that keep fewer values (`Reducer`) come first, in any number; one that uses fewer bits per value
(`Quantizer`) may come last. To add a compressor, write a subclass of one of the two and `register` it.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self, TypeAlias, TypeVar

import numpy as np

from ..pushsum import is_finite
from .packed import (
    MAX_BLOCKS,
    MAX_STAGES,
    Array,
    CompressError,
    Packed,
    PackError,
    Reader,
    Shapes,
    StageHeader,
    as_buffer,
    check_count,
    check_header,
)

Generator: TypeAlias = np.random.Generator
Quantized: TypeAlias = tuple[StageHeader, list[Array]]
Reduced: TypeAlias = tuple[StageHeader, list[Array], Array]
"""The stage's header, side arrays (such as indices), and the kept values."""
Expand: TypeAlias = Callable[[Array], Array]
"""Makes the whole vector from its kept values."""
Expander: TypeAlias = tuple[int, Expand]
"""The number of kept values, and the function that makes the whole vector from them."""

BLOCK: Final = 256
"""Values that share a scale: 4 bytes per 256 values, and an outlier worsens only the values of its block."""
MAX_BLOCK: Final = 1 << 20
_MAX_FLOAT16: Final = 65504.0
_CHANCE_ONE: Final = 1 << 32
"""The integer that stands for probability 1 in the header of a mask."""
_ITERATIONS: Final = 2
"""Subspace iterations: the error is then within a few percent of the smallest possible at this rank."""


class Stage(ABC):
    """One compressor, which works on float32 vectors."""

    name: ClassVar[str]
    """The name on the wire, first in the stage's header."""
    usage: ClassVar[str]
    """How a user writes it; "" if users cannot choose it."""
    unbiased: ClassVar[bool]
    """Whether the expected value of the decompressed vector is the original."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self | None:
        """Return the compressor if `text` names this one, else None; CompressError if its number is wrong."""


class Reducer(Stage):
    """Keeps only some values, or fewer numbers than values; the header tells how to expand them."""

    example: ClassVar[str]
    needs_integer: ClassVar[bool] = False
    """Whether the number after the colon must be an integer."""

    def __init__(self, number: float) -> None:
        """Make a compressor with the number after the colon; CompressError if it is out of range."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse `name:number`."""
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
        """Return the header, side arrays, and the kept values."""

    @staticmethod
    @abstractmethod
    def expander(header: StageHeader, reader: Reader, length: int) -> Expander:
        """Return how many of `length` values were kept, and a function that expands them."""


class Quantizer(Stage):
    """Writes every value with fewer bits."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a name without a number."""
        return cls() if text == cls.usage else None

    @abstractmethod
    def quantize(self, values: Array, rng: Generator) -> Quantized:
        """Return the header and the arrays to send."""

    @staticmethod
    @abstractmethod
    def restore(header: StageHeader, reader: Reader, length: int) -> Array:
        """Read the arrays and return the values, float32."""


S = TypeVar("S", bound=type[Stage])
K = TypeVar("K", bound=Stage)
_STAGES: dict[str, type[Stage]] = {}
"""All compressors by their name on the wire."""


def register(stage: S) -> S:
    """Add a compressor to those that users can choose and receivers understand."""
    _STAGES[stage.name] = stage
    return stage


# --- fewer bits per value ------------------------------------------------------------------------


@register
class Float32(Quantizer):
    """Every value unchanged: used when the user chose no quantizer."""

    name, usage, unbiased = "float32", "", True

    def quantize(self, values: Array, rng: Generator) -> Quantized:
        """Return the values."""
        return ["float32"], [values.astype("<f4", copy=False)]

    @staticmethod
    def restore(header: StageHeader, reader: Reader, length: int) -> Array:
        """Return the values."""
        check_header(header, 0)
        return reader.take("<f4", length)


@register
class Float16(Quantizer):
    """Every value as float16. Values beyond its range are clipped; the sender keeps the difference."""

    name, usage, unbiased = "float16", "float16", False

    def quantize(self, values: Array, rng: Generator) -> Quantized:
        """Round to the nearest float16."""
        return ["float16"], [np.clip(values, -_MAX_FLOAT16, _MAX_FLOAT16).astype("<f2")]

    @staticmethod
    def restore(header: StageHeader, reader: Reader, length: int) -> Array:
        """Convert back to float32."""
        check_header(header, 0)
        return reader.take("<f2", length).astype(np.float32)


@register
class Integers(Quantizer):
    """Every value as an integer of `bits` bits times its block's scale, with stochastic rounding.

    A value between two levels is rounded up with a probability proportional to its distance from the lower
    one, so the result is unbiased. Fewer bits give shorter messages and more noise; below 4 bits expect to
    need more rounds.
    """

    name, usage, unbiased = "int", "int8", True

    def __init__(self, bits: int = 8) -> None:
        if not 2 <= bits <= 8:
            raise CompressError(f"int{bits}: values have 2 to 8 bits: int2 … int8")
        self.bits = bits

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse `int` and the number of bits."""
        bits = re.fullmatch(r"int(\d{1,3})", text)
        return None if bits is None else cls(int(bits[1]))

    def quantize(self, values: Array, rng: Generator) -> Quantized:
        """Return the scales of the blocks, then the integers, packed into bits if they have fewer than 8."""
        largest = (1 << (self.bits - 1)) - 1
        blocks = -(-values.size // BLOCK)
        padded = np.zeros(blocks * BLOCK, dtype=np.float32)
        padded[: values.size] = values
        padded = padded.reshape(blocks, BLOCK)
        scales = (np.abs(padded).max(axis=1) / np.float32(largest)).astype("<f4")
        steps = np.where(scales > 0, scales, np.float32(1))[:, None]
        # Float64: in float32 a random number next to 1 would be rounded up, which biases the mean.
        levels = np.floor(padded / steps.astype(np.float64) + rng.random(padded.shape))
        numbers = np.clip(levels, -largest, largest).astype(np.int8).reshape(-1)[: values.size]
        return ["int", self.bits, BLOCK], [scales, _pack_bits(numbers, self.bits, largest)]

    @staticmethod
    def restore(header: StageHeader, reader: Reader, length: int) -> Array:
        """Multiply the integers by their scales."""
        check_header(header, 2)
        bits = check_count(header[1], 2, 8, "int: bits")
        block = check_count(header[2], 1, MAX_BLOCK, "int: values per block")
        scales = reader.take("<f4", -(-length // block))
        if not np.isfinite(scales).all():
            raise PackError("non-finite", "a block's scale is a NaN or an infinity")
        if bits == 8:
            numbers = reader.take("i1", length)
        else:
            packed = reader.take("u1", -(-length * bits // 8))
            numbers = _unpack_bits(packed, bits, length)
        with np.errstate(over="ignore"):
            return numbers.astype(np.float32) * np.repeat(scales, block)[:length]


def _pack_bits(numbers: Array, bits: int, largest: int) -> Array:
    if bits == 8:
        return numbers
    unsigned = (numbers + np.int8(largest)).astype(np.uint8)
    return np.packbits(np.unpackbits(unsigned[:, None], axis=1)[:, 8 - bits :])


def _unpack_bits(packed: Array, bits: int, length: int) -> Array:
    table = np.zeros((length, 8), dtype=np.uint8)
    table[:, 8 - bits :] = np.unpackbits(packed, count=length * bits).reshape(length, bits)
    return np.packbits(table, axis=1)[:, 0].astype(np.int16) - ((1 << (bits - 1)) - 1)


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
    """A random selection of values, each with the same probability; only the seed of the selection is sent.

    rate: the probability. The sender keeps the difference and sends it later, so this mask, which never
        overshoots, works better than the unbiased `Subsample`.
    """

    name, usage, unbiased, example = "mask", "mask:RATE", False, "mask:0.1"

    def __init__(self, rate: float) -> None:
        self.chance = max(1, round(_check_rate(self.name, rate) * _CHANCE_ONE))

    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return the seed of the selection, and the selected values."""
        seed = int(rng.integers(1 << 62))
        return [self.name, seed, self.chance], [], values[_draw(seed, self.chance, values.size)]

    @staticmethod
    def expander(header: StageHeader, reader: Reader, length: int) -> Expander:
        """Repeat the selection; the other values are zeros."""
        check_header(header, 2)
        seed = check_count(header[1], 0, (1 << 62) - 1, f"{header[0]}: the seed")
        chance = check_count(header[2], 1, _CHANCE_ONE, f"{header[0]}: the chance")
        indices = np.flatnonzero(_draw(seed, chance, length))
        return indices.size, lambda kept: _scatter(indices, kept, length)


@register
class Subsample(Mask):
    """A mask whose values are divided by the rate, so that the result is unbiased."""

    name, usage, unbiased, example = "subsample", "subsample:RATE", True, "subsample:0.1"

    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return the seed of the selection, and the selected values divided by the rate."""
        header, side_arrays, kept = super().reduce(values, rng, shapes)
        with np.errstate(over="ignore"):
            return header, side_arrays, kept * np.float32(_CHANCE_ONE / self.chance)


@register
class TopK(Reducer):
    """The largest values by magnitude, with their indices; the other values become 0.

    rate: the fraction that is sent. Every value costs its own bytes and 2 for its index (4 in vectors of
        more than 65536 values), so above one half it saves nothing.
    """

    name, usage, unbiased, example = "top-k", "top-k:RATE", False, "top-k:0.1"

    def __init__(self, rate: float) -> None:
        self.rate = _check_rate("top-k", rate)

    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return the indices in ascending order, and the values there."""
        count = min(values.size, max(1, round(self.rate * values.size)))
        first = values.size - count
        if first:
            indices = np.sort(np.argpartition(np.abs(values), first)[first:])
        else:
            indices = np.arange(values.size)
        return ["top-k", count], [indices.astype(_index_dtype(values.size))], values[indices]

    @staticmethod
    def expander(header: StageHeader, reader: Reader, length: int) -> Expander:
        """Put the values at their indices; the other values are zeros."""
        check_header(header, 1)
        count = check_count(header[1], 0, length, "top-k: the number of values")
        indices = reader.take(_index_dtype(length), count).astype(np.int64)
        if count and (indices[-1] >= length or (np.diff(indices) <= 0).any()):
            raise PackError("garbage", "top-k: indices out of order or outside the vector")
        return count, lambda kept: _scatter(indices, kept, length)


def _draw(seed: int, chance: int, length: int) -> Array:
    """Return a boolean array of the selected values, from raw generator output: the same on every machine."""
    raw = np.random.PCG64(seed).random_raw(-(-length // 2))
    return np.asarray(raw, dtype="<u8").view("<u4")[:length] < np.uint64(chance)


def _scatter(indices: Array, kept: Array, length: int) -> Array:
    values = np.zeros(length, dtype=np.float32)
    values[indices] = kept
    return values


def _index_dtype(length: int) -> str:
    return "<u2" if length <= 1 << 16 else "<u4"


# --- matrices of low rank ------------------------------------------------------------------------


@register
class LowRank(Reducer):
    """Every block of two or more dimensions as the product of an m×rank and a rank×n matrix.

    Blocks for which the two factors are not shorter (biases, small matrices) are sent unchanged.

    rank: raise it for less distortion; each rank costs m + n values per block.
    """

    name, usage, unbiased, example = "low-rank", "low-rank:RANK", False, "low-rank:4"
    needs_integer = True

    def __init__(self, rank: float) -> None:
        if rank < 1:
            raise CompressError(f"low-rank:{rank:g}: the rank must be at least 1, as in low-rank:4")
        self.rank = int(rank)

    def check_shapes(self, shapes: Shapes) -> None:
        """Raise CompressError if no block would get shorter."""
        if not any(_is_shorter(_matrix(shape), self.rank) for shape in shapes):
            blocks = ", ".join("×".join(map(str, shape)) for shape in shapes) or "none"
            raise CompressError(
                f"low-rank:{self.rank} makes no block shorter, the blocks are {blocks}: lower the rank, or "
                "choose another compressor"
            )
        if len(shapes) > MAX_BLOCKS:
            raise CompressError(
                f"low-rank: {len(shapes)} blocks are more than {MAX_BLOCKS}: choose another compressor"
            )

    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return the factors of every block that they make shorter, and the other blocks unchanged."""
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
        return ["low-rank", self.rank, [list(m) for m in matrices]], [], kept

    @staticmethod
    def expander(header: StageHeader, reader: Reader, length: int) -> Expander:
        """Multiply the factors."""
        check_header(header, 2)
        rank = check_count(header[1], 1, 1 << 31, "low-rank: the rank")
        matrices = _check_matrices(header[2], length)
        count = sum(
            rank * (rows + columns) if _is_shorter((rows, columns), rank) else rows * columns
            for rows, columns in matrices
        )
        return count, lambda kept: _multiply(kept, matrices, rank, length)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a block as a matrix: its first dimension, and the product of the others."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def _is_shorter(matrix: tuple[int, int], rank: int) -> bool:
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
    start = position = 0
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


def _check_matrices(rows_and_columns: Any, length: int) -> list[tuple[int, int]]:
    """Return the (rows, columns) of all blocks in a received header; PackError if they are wrong."""
    pairs = rows_and_columns
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise PackError("garbage", "low-rank: the blocks are not a list of matrix shapes")
    most = max(length, 1)  # an empty block has one row
    matrices = [
        (check_count(p[0], 0, most, "low-rank: rows"), check_count(p[1], 0, most, "columns"))
        for p in pairs
    ]
    if sum(rows * columns for rows, columns in matrices) != length:
        raise PackError("garbage", f"low-rank: the blocks do not make up {length} values")
    return matrices


# --- pipelines of compressors --------------------------------------------------------------------

NAMES: Final = ", ".join(stage.usage for stage in _STAGES.values() if stage.usage)
"""The compressors that users can choose, for help and errors."""


@dataclass(frozen=True)
class Pipeline:
    """Compressors in the order in which they are applied; see `parse`."""

    name: str
    reducers: tuple[Reducer, ...]
    quantizer: Quantizer

    @property
    def unbiased(self) -> bool:
        """Whether the expected value of the decompressed vector is the original."""
        return all(stage.unbiased for stage in (*self.reducers, self.quantizer))

    @property
    def dense(self) -> Pipeline:
        """The quantizer only, so that every value is sent: for a first vector without a reference."""
        return Pipeline(self.name, (), self.quantizer)

    def check_shapes(self, shapes: Shapes) -> None:
        """Raise CompressError if a compressor is of no use for vectors made of such blocks."""
        for reducer in self.reducers[
            :1
        ]:  # only the first gets the blocks; the next get a flat vector
            reducer.check_shapes(shapes)

    def pack(
        self, values: Array, rng: Generator, shapes: Shapes | None = None, base: int = 0
    ) -> Packed:
        """Compress a flat vector.

        shapes: its blocks; by default one block. base: the transfer it is a difference to: see `Packed`.
        """
        kept = np.ascontiguousarray(values, dtype=np.float32)
        blocks: Shapes = [kept.shape] if shapes is None else shapes
        stages: list[Any] = []
        arrays: list[Array] = []
        for reducer in self.reducers:
            header, side_arrays, kept = reducer.reduce(kept, rng, blocks)
            stages.append(header)
            arrays += side_arrays
            blocks = [kept.shape]
        header, numbers = self.quantizer.quantize(kept, rng)
        data = tuple(as_buffer(array) for array in (*arrays, *numbers))
        return Packed(values.size, (*stages, header), data, base)


def parse(name: str) -> Pipeline:
    """Parse a name such as `top-k:0.05+int8`; CompressError says what is wrong with it."""
    reducers: list[Reducer] = []
    quantizer: tuple[str, Quantizer] | None = None
    for part in name.split("+"):
        if quantizer is not None:
            raise CompressError(
                f"{name!r}: nothing can follow {quantizer[0]!r}; put {part!r} before it"
            )
        parsed = (stage.parse(part.strip()) for stage in _STAGES.values() if stage.usage)
        match next(filter(None, parsed), None):
            case LowRank() if reducers:
                raise CompressError(
                    f"{name!r}: low-rank needs the vector's own matrices; put it first"
                )
            case Reducer() as reducer:
                reducers.append(reducer)
            case Quantizer() as last:
                quantizer = part, last
            case _:
                raise CompressError(
                    f"{name!r}: no compressor is called {part.strip()!r}; there are {NAMES}, joined by +"
                )
    if len(reducers) >= MAX_STAGES:
        raise CompressError(f"{name!r}: more than {MAX_STAGES - 1} compressors before the last one")
    return Pipeline(name, tuple(reducers), Float32() if quantizer is None else quantizer[1])


def unpack(packed: Packed, length: int) -> Array:
    """Decompress a vector to float32; PackError if it does not have the expected `length`.

    Whatever the bytes are, it raises nothing but PackError, and allocates no more than a few vectors of that
    length.
    """
    if packed.length != length:
        raise PackError("garbage", f"a vector of {packed.length} values, ours has {length}")
    reader = Reader(packed)
    expand_functions: list[Expand] = []
    count = length
    for header in packed.stages[:-1]:
        count, expand = _stage_class(header, Reducer).expander(header, reader, count)
        if count > length:
            raise PackError("too-large", f"{header[0]} keeps {count} values of {length}")
        expand_functions.append(expand)
    last = packed.stages[-1]
    values = _stage_class(last, Quantizer).restore(last, reader, count)
    reader.end()
    for expand in reversed(expand_functions):
        values = expand(values)
    if not is_finite(values):
        raise PackError("non-finite", "a compressed value holds a NaN or an infinity")
    return values


def _stage_class(header: StageHeader, base: type[K]) -> type[K]:
    """Return the compressor class that a header names, a subclass of `base`; PackError if there is none."""
    stage = _STAGES.get(header[0], Stage)
    if not issubclass(stage, base):
        raise PackError(
            "garbage", f"{header[0]!r:.40} is not the name of a {base.__name__.lower()}"
        )
    return stage


def distortion(values: Array, other: Array) -> float:
    """Return the distance of `other` from `values`, relative to the norm of `values`."""
    norm = float(np.linalg.norm(values))
    distance = float(np.linalg.norm(np.subtract(values, other, dtype=np.float64)))
    return distance / norm if norm else distance


def roundtrip(
    name: str, values: Array, rng: Generator, shapes: Shapes | None = None
) -> tuple[Array, int]:
    """Compress and decompress `values`; return what a receiver reads, and the number of bytes sent.

    For simulations, which compress the difference to a value that the receiver has, and keep the error.
    """
    pipeline = parse(name)
    if shapes is not None:
        pipeline.check_shapes(shapes)
    packed = pipeline.pack(values, rng, shapes)
    return unpack(packed, values.size), packed.nbytes
