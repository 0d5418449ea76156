"""Fewer bits per value: half precision, and whole numbers drawn so that they are right on average."""

from __future__ import annotations

from typing import Final

import numpy as np

from .packed import Array, CompressError, Facts, PackError, Reader, check_count, check_facts

BLOCK: Final = 256
"""Values that share a scale: 4 bytes for 256 values, and no outlier spoils more than its block."""
MAX_BLOCK: Final = 1 << 20
_LARGEST_HALF: Final = 65504.0


class Full:
    """Every value as float32: what is left when no quantizer was asked for."""

    unbiased = True

    def quantize(self, values: Array, rng: np.random.Generator) -> tuple[Facts, list[Array]]:
        """As they are."""
        return ["float32"], [values.astype("<f4", copy=False)]

    @staticmethod
    def restore(facts: Facts, reader: Reader, length: int) -> Array:
        """As they are."""
        check_facts(facts, 0)
        return reader.take("<f4", length)


class Half:
    """Every value as float16. Beyond its range it is cut off: what is cut off stays in the sender."""

    unbiased = False

    def quantize(self, values: Array, rng: np.random.Generator) -> tuple[Facts, list[Array]]:
        """Rounded to the nearest."""
        return ["float16"], [np.clip(values, -_LARGEST_HALF, _LARGEST_HALF).astype("<f2")]

    @staticmethod
    def restore(facts: Facts, reader: Reader, length: int) -> Array:
        """Wider again."""
        check_facts(facts, 0)
        return reader.take("<f2", length).astype(np.float32)


class Whole:
    """Every value as a whole number of `bits` bits times its block's scale, rounded at random.

    A value between two levels goes up with the probability of its distance from the lower one, so the
    result is right on average, whatever the values. Fewer bits: shorter messages, more noise; below 4
    expect to need more rounds.
    """

    unbiased = True

    def __init__(self, bits: int = 8) -> None:
        if not 2 <= bits <= 8:
            raise CompressError(f"int{bits}: values have 2 to 8 bits: int2 … int8")
        self.bits = bits

    def quantize(self, values: Array, rng: np.random.Generator) -> tuple[Facts, list[Array]]:
        """Scales of the blocks, then the numbers, packed bit by bit below 8."""
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
        """Numbers times scales."""
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
