"""Matrices as products of two thin ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .packed import (
    MAX_BLOCKS,
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

_ITERATIONS = (
    2  # of the subspace iteration: with two, within a few percent of the best such product
)


class LowRank:
    """Every block of two or more dimensions as the product of an m×rank and a rank×n matrix.

    Blocks for which that would be longer (biases, small matrices) are sent as they are.

    rank: raise it for less distortion, at m + n values per block each.
    """

    unbiased = False

    def __init__(self, rank: int) -> None:
        if rank < 1:
            raise CompressError(f"low-rank:{rank}: the rank is at least 1, as in low-rank:4")
        self.rank = rank

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

    def reduce(
        self, values: Array, rng: np.random.Generator, shapes: Shapes
    ) -> tuple[Facts, list[Array], Array]:
        """The factors of every block that they make shorter, the others as they are."""
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
    def expander(facts: Facts, reader: Reader, length: int) -> tuple[int, Expand]:
        """The products."""
        check_facts(facts, 2)
        rank = check_count(facts[1], 1, 1 << 31, "low-rank: the rank")
        matrices = _check_matrices(facts[2], length)
        count = sum(
            rank * (rows + columns) if _pays((rows, columns), rank) else rows * columns
            for rows, columns in matrices
        )
        return count, lambda left: _multiply(left, matrices, rank, length)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """A block as a matrix: the first dimension, and all others (a convolution's are its kernel)."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def _pays(matrix: tuple[int, int], rank: int) -> bool:
    rows, columns = matrix
    return rank * (rows + columns) < rows * columns


def _factors(matrix: Array, rank: int, rng: np.random.Generator) -> list[Array]:
    """Thin matrices whose product is near the best of this rank, by subspace iteration."""
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
    """The vector. One outer product after the other: a matrix product may differ in its last bit
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
    found = [
        (check_count(m[0], 0, most, "low-rank: rows"), check_count(m[1], 0, most, "columns"))
        for m in given
    ]
    if sum(rows * columns for rows, columns in found) != length:
        raise PackError("garbage", f"low-rank: the blocks do not make up {length} values")
    return found
