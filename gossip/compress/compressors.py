"""Compressors by name, one after the other: `top-k:0.05+int8`.

| name | what is sent | unbiased |
| --- | --- | --- |
| `float16` | every value in 2 bytes | no |
| `int8` … `int2` | every value in 8 … 2 bits, rounded at random | yes |
| `mask:0.1` | a tenth of the values, picked by a draw that both sides make | no |
| `subsample:0.1` | the same, divided by 0.1 | yes |
| `top-k:0.01` | the largest hundredth, with places | no |
| `low-rank:4` | matrices as products of thin ones | no |

Compressors that leave fewer values (`Reducer`) come first, in any number; one that makes values smaller
(`Quantizer`) may come last. To add a compressor, write a registered subclass of one of the two.
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
    Facts,
    Packed,
    PackError,
    Reader,
    Shapes,
    as_buffer,
    check_count,
    check_facts,
)

Generator: TypeAlias = np.random.Generator
Quantized: TypeAlias = tuple[Facts, list[Array]]
Reduced: TypeAlias = tuple[Facts, list[Array], Array]
"""Facts, side arrays, and the values that are left."""
Expand: TypeAlias = Callable[[Array], Array]
"""Makes the vector from the values that are left of it."""
Expander: TypeAlias = tuple[int, Expand]
"""How many values were left of a vector, and what makes the vector from them."""

BLOCK: Final = 256
"""Values that share a scale: 4 bytes for 256 values, and no outlier spoils more than its block."""
MAX_BLOCK: Final = 1 << 20
_LARGEST_HALF: Final = 65504.0
_CERTAIN: Final = 1 << 32  # the chance 1, as masks write it
_ITERATIONS: Final = 2  # of the subspace iteration: within a few percent of the best such product


class Stage(ABC):
    """One compressor, which works on float32 vectors."""

    name: ClassVar[str]
    """Its name on the wire, first of its facts."""
    usage: ClassVar[str]
    """How a user writes it; "" if it cannot be asked for."""
    unbiased: ClassVar[bool]
    """Whether what is unpacked is the original on average."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self | None:
        """Return the compressor that `text` names, None if it is another; CompressError if it is wrong."""


class Reducer(Stage):
    """Leaves fewer values of a vector, and a few facts and side arrays to find their places."""

    example: ClassVar[str]
    whole: ClassVar[bool] = False
    """Whether its number must be an integer."""

    def __init__(self, number: float) -> None:
        """Take the number after the colon; CompressError if it makes no sense."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read `name:number`."""
        kind, _, knob = text.partition(":")
        if kind != cls.name:
            return None
        try:
            number = float(knob)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or (cls.whole and not number.is_integer()):
            raise CompressError(f"{text!r}: {kind} needs a number, as in {cls.example}")
        return cls(number)

    def fit(self, shapes: Shapes) -> None:
        """Raise CompressError if vectors made of such blocks cannot be compressed this way."""

    @abstractmethod
    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return facts, side arrays, and the values that are left."""

    @staticmethod
    @abstractmethod
    def expander(facts: Facts, reader: Reader, length: int) -> Expander:
        """Return how many values were left of `length`, and what makes the vector from them."""


class Quantizer(Stage):
    """Writes every value with fewer bits."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read a name without a number."""
        return cls() if text == cls.usage else None

    @abstractmethod
    def quantize(self, values: Array, rng: Generator) -> Quantized:
        """Return facts and arrays that stand for the values."""

    @staticmethod
    @abstractmethod
    def restore(facts: Facts, reader: Reader, length: int) -> Array:
        """Return the values again, float32."""


S = TypeVar("S", bound=type[Stage])
K = TypeVar("K", bound=Stage)
_STAGES: dict[str, type[Stage]] = {}


def register(stage: S) -> S:
    """Make a compressor known, by its name on the wire and to users."""
    _STAGES[stage.name] = stage
    return stage


# --- fewer bits per value ------------------------------------------------------------------------


@register
class Float32(Quantizer):
    """Every value as it is: what is left when no quantizer was asked for."""

    name, usage, unbiased = "float32", "", True

    def quantize(self, values: Array, rng: Generator) -> Quantized:
        """Return the values."""
        return ["float32"], [values.astype("<f4", copy=False)]

    @staticmethod
    def restore(facts: Facts, reader: Reader, length: int) -> Array:
        """Return the values."""
        check_facts(facts, 0)
        return reader.take("<f4", length)


@register
class Float16(Quantizer):
    """Every value as float16. Beyond its range it is cut off: what is cut off stays in the sender."""

    name, usage, unbiased = "float16", "float16", False

    def quantize(self, values: Array, rng: Generator) -> Quantized:
        """Round to the nearest."""
        return ["float16"], [np.clip(values, -_LARGEST_HALF, _LARGEST_HALF).astype("<f2")]

    @staticmethod
    def restore(facts: Facts, reader: Reader, length: int) -> Array:
        """Widen again."""
        check_facts(facts, 0)
        return reader.take("<f2", length).astype(np.float32)


@register
class Integers(Quantizer):
    """Every value as a whole number of `bits` bits times its block's scale, rounded at random.

    A value between two levels goes up with the probability of its distance from the lower one, so the
    result is right on average, whatever the values. Fewer bits: shorter messages, more noise; below 4
    expect to need more rounds.
    """

    name, usage, unbiased = "int", "int8", True

    def __init__(self, bits: int = 8) -> None:
        if not 2 <= bits <= 8:
            raise CompressError(f"int{bits}: values have 2 to 8 bits: int2 … int8")
        self.bits = bits

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read `int` and the number of bits."""
        bits = re.fullmatch(r"int(\d{1,3})", text)
        return None if bits is None else cls(int(bits[1]))

    def quantize(self, values: Array, rng: Generator) -> Quantized:
        """Return the scales of the blocks, then the numbers, packed bit by bit below 8."""
        top = (1 << (self.bits - 1)) - 1
        blocks = -(-values.size // BLOCK)
        padded = np.zeros(blocks * BLOCK, dtype=np.float32)
        padded[: values.size] = values
        padded = padded.reshape(blocks, BLOCK)
        scales = (np.abs(padded).max(axis=1) / np.float32(top)).astype("<f4")
        steps = np.where(scales > 0, scales, np.float32(1))[:, None]
        # Float64: in float32 a draw next to 1 would be rounded up, and the mean with it.
        levels = np.floor(padded / steps.astype(np.float64) + rng.random(padded.shape))
        numbers = np.clip(levels, -top, top).astype(np.int8).reshape(-1)[: values.size]
        return ["int", self.bits, BLOCK], [scales, _pack_bits(numbers, self.bits, top)]

    @staticmethod
    def restore(facts: Facts, reader: Reader, length: int) -> Array:
        """Multiply the numbers with their scales."""
        check_facts(facts, 2)
        bits = check_count(facts[1], 2, 8, "int: bits")
        block = check_count(facts[2], 1, MAX_BLOCK, "int: values per block")
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


def _pack_bits(numbers: Array, bits: int, top: int) -> Array:
    if bits == 8:
        return numbers
    unsigned = (numbers + np.int8(top)).astype(np.uint8)
    return np.packbits(np.unpackbits(unsigned[:, None], axis=1)[:, 8 - bits :])


def _unpack_bits(packed: Array, bits: int, length: int) -> Array:
    table = np.zeros((length, 8), dtype=np.uint8)
    table[:, 8 - bits :] = np.unpackbits(packed, count=length * bits).reshape(length, bits)
    return np.packbits(table, axis=1)[:, 0].astype(np.int16) - ((1 << (bits - 1)) - 1)


# --- some of the values --------------------------------------------------------------------------


def _check_rate(name: str, rate: float) -> float:
    """Return the part of the values that is kept, if there can be such a part."""
    if not 0 < rate <= 1:
        raise CompressError(
            f"{name}:{rate:g}: the part of the values that is sent lies above 0 and up to 1, as in {name}:0.1"
        )
    return rate


@register
class Mask(Reducer):
    """Every value with the same chance, by a draw that the receiver repeats: no places are sent.

    rate: the chance. What is left out stays in the sender and follows later, so the plain mask, which never
        overshoots, does better than `Subsample`.
    """

    name, usage, unbiased, example = "mask", "mask:RATE", False, "mask:0.1"

    def __init__(self, rate: float) -> None:
        self.chance = max(1, round(_check_rate(self.name, rate) * _CERTAIN))

    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return the seed of the draw, and the values that it picked."""
        seed = int(rng.integers(1 << 62))
        return [self.name, seed, self.chance], [], values[_draw(seed, self.chance, values.size)]

    @staticmethod
    def expander(facts: Facts, reader: Reader, length: int) -> Expander:
        """Fill zeros in but for the places drawn."""
        check_facts(facts, 2)
        seed = check_count(facts[1], 0, (1 << 62) - 1, f"{facts[0]}: the seed")
        chance = check_count(facts[2], 1, _CERTAIN, f"{facts[0]}: the chance")
        places = np.flatnonzero(_draw(seed, chance, length))
        return places.size, lambda left: _scatter(places, left, length)


@register
class Subsample(Mask):
    """A mask whose values are divided by the rate: right on average where what was left out is lost."""

    name, usage, unbiased, example = "subsample", "subsample:RATE", True, "subsample:0.1"

    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return the seed of the draw, and the values that it picked, enlarged."""
        facts, sides, left = super().reduce(values, rng, shapes)
        with np.errstate(over="ignore"):
            return facts, sides, left * np.float32(_CERTAIN / self.chance)


@register
class TopK(Reducer):
    """The largest values by magnitude, with their places; the rest counts as 0.

    rate: the part that is sent. Every value costs its own bytes and 2 for its place (4 in vectors of
        more than 65536), so above a half it saves nothing.
    """

    name, usage, unbiased, example = "top-k", "top-k:RATE", False, "top-k:0.1"

    def __init__(self, rate: float) -> None:
        self.rate = _check_rate("top-k", rate)

    def reduce(self, values: Array, rng: Generator, shapes: Shapes) -> Reduced:
        """Return the places in rising order, and the values there."""
        count = min(values.size, max(1, round(self.rate * values.size)))
        first = values.size - count
        if first:
            places = np.sort(np.argpartition(np.abs(values), first)[first:])
        else:
            places = np.arange(values.size)
        return ["top-k", count], [places.astype(_place_dtype(values.size))], values[places]

    @staticmethod
    def expander(facts: Facts, reader: Reader, length: int) -> Expander:
        """Fill zeros in but for the places named."""
        check_facts(facts, 1)
        count = check_count(facts[1], 0, length, "top-k: how many")
        places = reader.take(_place_dtype(length), count).astype(np.int64)
        if count and (places[-1] >= length or (np.diff(places) <= 0).any()):
            raise PackError("garbage", "top-k: places out of order or outside the vector")
        return count, lambda left: _scatter(places, left, length)


def _draw(seed: int, chance: int, length: int) -> Array:
    """Return which values are picked: from a generator's raw output, the same on every machine."""
    raw = np.random.PCG64(seed).random_raw(-(-length // 2))
    return np.asarray(raw, dtype="<u8").view("<u4")[:length] < np.uint64(chance)


def _scatter(places: Array, left: Array, length: int) -> Array:
    values = np.zeros(length, dtype=np.float32)
    values[places] = left
    return values


def _place_dtype(length: int) -> str:
    return "<u2" if length <= 1 << 16 else "<u4"


# --- matrices as products of two thin ones -------------------------------------------------------


@register
class LowRank(Reducer):
    """Every block of two or more dimensions as the product of an m×rank and a rank×n matrix.

    Blocks for which that would be longer (biases, small matrices) are sent as they are.

    rank: raise it for less distortion, at m + n values per block each.
    """

    name, usage, unbiased, example = "low-rank", "low-rank:RANK", False, "low-rank:4"
    whole = True

    def __init__(self, rank: float) -> None:
        if rank < 1:
            raise CompressError(f"low-rank:{rank:g}: the rank is at least 1, as in low-rank:4")
        self.rank = int(rank)

    def fit(self, shapes: Shapes) -> None:
        """Raise CompressError if no block would get shorter."""
        if not any(_pays(_matrix(shape), self.rank) for shape in shapes):
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
        """Return the factors of every block that they make shorter, the others as they are."""
        if sum(math.prod(shape) for shape in shapes) != values.size:
            raise CompressError(
                f"low-rank: blocks of {list(shapes)} do not make up a vector of {values.size} values"
            )
        left, start = [], 0
        matrices = [_matrix(shape) for shape in shapes]
        for rows, columns in matrices:
            block = values[start : start + rows * columns]
            start += rows * columns
            if _pays((rows, columns), self.rank):
                left += _factors(block.reshape(rows, columns), self.rank, rng)
            else:
                left.append(block)
        kept = np.concatenate([part.reshape(-1) for part in left]) if left else values
        return ["low-rank", self.rank, [list(m) for m in matrices]], [], kept

    @staticmethod
    def expander(facts: Facts, reader: Reader, length: int) -> Expander:
        """Multiply the factors."""
        check_facts(facts, 2)
        rank = check_count(facts[1], 1, 1 << 31, "low-rank: the rank")
        matrices = _check_matrices(facts[2], length)
        count = sum(
            rank * (rows + columns) if _pays((rows, columns), rank) else rows * columns
            for rows, columns in matrices
        )
        return count, lambda left: _multiply(left, matrices, rank, length)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a block as a matrix: the first dimension, and all others (a convolution's are its kernel)."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def _pays(matrix: tuple[int, int], rank: int) -> bool:
    rows, columns = matrix
    return rank * (rows + columns) < rows * columns


def _factors(matrix: Array, rank: int, rng: Generator) -> list[Array]:
    """Return thin matrices whose product is near the best of this rank, by subspace iteration."""
    # Scaled, or the products of very large or very small values leave float32's range.
    size = float(np.abs(matrix).max()) or 1.0
    scaled = matrix.astype(np.float64) / size
    basis = rng.standard_normal((matrix.shape[1], rank))
    left = scaled @ basis
    for _ in range(_ITERATIONS):
        left = scaled @ (scaled.T @ np.linalg.qr(left)[0])
    left = np.linalg.qr(left)[0]
    return [left.astype(np.float32), (size * (left.T @ scaled)).astype(np.float32)]


def _multiply(left: Array, matrices: list[tuple[int, int]], rank: int, length: int) -> Array:
    """Return the vector. One outer product after the other: a matrix product may differ in its last bit
    between machines, and sender and receiver must get the same vector."""
    values = np.empty(length, dtype=np.float32)
    at = taken = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for rows, columns in matrices:
            block = values[at : at + rows * columns]
            at += rows * columns
            if not _pays((rows, columns), rank):
                block[:] = left[taken : taken + block.size]
                taken += block.size
                continue
            first = left[taken : taken + rows * rank].reshape(rows, rank)
            taken += rows * rank
            second = left[taken : taken + rank * columns].reshape(rank, columns)
            taken += rank * columns
            block[:] = 0
            for k in range(rank):
                block += np.multiply.outer(first[:, k], second[k]).reshape(-1)
    return values


def _check_matrices(given: Any, length: int) -> list[tuple[int, int]]:
    if not isinstance(given, list) or not all(isinstance(m, list) and len(m) == 2 for m in given):
        raise PackError("garbage", "low-rank: the blocks are no list of matrices")
    most = max(length, 1)  # an empty block has one row
    matrices = [
        (check_count(m[0], 0, most, "low-rank: rows"), check_count(m[1], 0, most, "columns"))
        for m in given
    ]
    if sum(rows * columns for rows, columns in matrices) != length:
        raise PackError("garbage", f"low-rank: the blocks do not make up {length} values")
    return matrices


# --- several in a row ----------------------------------------------------------------------------

NAMES: Final = ", ".join(stage.usage for stage in _STAGES.values() if stage.usage)


@dataclass(frozen=True)
class Pipeline:
    """Compressors in the order in which they are applied; see `parse`."""

    name: str
    reducers: tuple[Reducer, ...]
    quantizer: Quantizer

    @property
    def unbiased(self) -> bool:
        """Whether what is unpacked is right on average."""
        return all(stage.unbiased for stage in (*self.reducers, self.quantizer))

    @property
    def dense(self) -> Pipeline:
        """The same without what leaves values out: for vectors of which nothing is known yet."""
        return Pipeline(self.name, (), self.quantizer)

    def fit(self, shapes: Shapes) -> None:
        """Raise CompressError if vectors made of such blocks cannot be compressed this way."""
        for reducer in self.reducers[:1]:  # only the first sees the vector's own blocks
            reducer.fit(shapes)

    def pack(
        self, values: Array, rng: Generator, shapes: Shapes | None = None, base: int = 0
    ) -> Packed:
        """Compress a flat vector. `shapes` are its blocks; one block of its length if left out."""
        left = np.ascontiguousarray(values, dtype=np.float32)
        blocks: Shapes = [left.shape] if shapes is None else shapes
        stages: list[Any] = []
        arrays: list[Array] = []
        for reducer in self.reducers:
            facts, sides, left = reducer.reduce(left, rng, blocks)
            stages.append(facts)
            arrays += sides
            blocks = [left.shape]
        facts, numbers = self.quantizer.quantize(left, rng)
        data = tuple(as_buffer(array) for array in (*arrays, *numbers))
        return Packed(values.size, (*stages, facts), data, base)


def parse(name: str) -> Pipeline:
    """Return the compressors of this name; CompressError says what is wrong with it."""
    reducers: list[Reducer] = []
    quantizer: tuple[str, Quantizer] | None = None
    for part in name.split("+"):
        if quantizer is not None:
            raise CompressError(
                f"{name!r}: nothing can follow {quantizer[0]!r}; put {part!r} before it"
            )
        read = (stage.parse(part.strip()) for stage in _STAGES.values() if stage.usage)
        match next(filter(None, read), None):
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
        raise CompressError(
            f"{name!r}: more than {MAX_STAGES - 1} compressors that leave values out"
        )
    return Pipeline(name, tuple(reducers), Float32() if quantizer is None else quantizer[1])


def unpack(packed: Packed, length: int) -> Array:
    """Return the vector that was packed, float32, if it has the `length` that the receiver expects.

    Whatever the bytes are, PackError is all that is raised, and no more is allocated than a few
    vectors of that length.
    """
    if packed.length != length:
        raise PackError("garbage", f"a vector of {packed.length} values, ours has {length}")
    reader = Reader(packed)
    expands: list[Expand] = []
    left = length
    for facts in packed.stages[:-1]:
        left, expand = _named(facts, Reducer).expander(facts, reader, left)
        if left > length:
            raise PackError("too-large", f"{facts[0]} leaves {left} values of {length}")
        expands.append(expand)
    last = packed.stages[-1]
    values = _named(last, Quantizer).restore(last, reader, left)
    reader.end()
    for expand in reversed(expands):
        values = expand(values)
    if not is_finite(values):
        raise PackError("non-finite", "a compressed value holds a NaN or an infinity")
    return values


def _named(facts: Facts, kind: type[K]) -> type[K]:
    """Return the compressor of one of the two kinds that a stage names; PackError if it names none."""
    stage = _STAGES.get(facts[0], Stage)
    if not issubclass(stage, kind):
        raise PackError(
            "garbage", f"{facts[0]!r:.40} is no {kind.__name__.lower()} that is known here"
        )
    return stage


def distortion(values: Array, other: Array) -> float:
    """Return how far `other` is from `values`, relative to the length of `values`."""
    size = float(np.linalg.norm(values))
    far = float(np.linalg.norm(np.subtract(values, other, dtype=np.float64)))
    return far / size if size else far


def roundtrip(
    name: str, values: Array, rng: Generator, shapes: Shapes | None = None
) -> tuple[Array, int]:
    """Return what a receiver reads of `values` sent through the compressor `name`, and the bytes it took.

    For simulations: compress a difference to something that the receiver has, keep what is lost.
    """
    pipeline = parse(name)
    if shapes is not None:
        pipeline.fit(shapes)
    packed = pipeline.pack(values, rng, shapes)
    return unpack(packed, values.size), packed.nbytes
