"""Cells as rows, whatever the shape of the parameters that touch them.

An axis of a parameter is a list of cells; a cell may stand on it several times (a channel flattened
into a dense layer, four stacked gates). The k-th standing of one cell means what the k-th standing of
any other cell of its part means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..anatomy import Anatomy, ParameterMap


@dataclass(frozen=True, eq=False)
class Block:
    """One parameter seen from some cells: `where` [cells, columns] are its flat coordinates.

    `others` [columns, k] are the cells that each column touches besides: none for a bias, one for a
    dense weight.
    """

    parameter: str
    where: np.ndarray
    others: np.ndarray


def standings(axis: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Positions of each cell on an axis: `[cells, standings]`, empty when they are not on it."""
    by_cell = np.argsort(axis, kind="stable")
    ordered = axis[by_cell]
    first = np.searchsorted(ordered, cells, side="left")
    count = np.searchsorted(ordered, cells, side="right") - first
    each = int(count.min()) if len(count) else 0
    return (
        by_cell[first[:, None] + np.arange(each)] if each else np.empty((len(cells), 0), np.int64)
    )


def blocks(anatomy: Anatomy, cells: np.ndarray) -> Iterator[Block]:
    """Every parameter that touches `cells`, as rows of coordinates."""
    for parameter in anatomy.parameters:
        for index, axis in enumerate(parameter.axes):
            if axis is None:
                continue
            positions = standings(axis, cells)
            if positions.shape[1]:
                yield _block(parameter, anatomy.offsets[parameter.name], index, positions)


def _block(parameter: ParameterMap, offset: int, index: int, positions: np.ndarray) -> Block:
    flat = offset + np.arange(parameter.size, dtype=np.int64).reshape(parameter.shape)
    seen = np.moveaxis(flat, index, 0)[positions]  # [cells, standings, rest…]
    rest = [axis for at, axis in enumerate(parameter.axes) if at != index]
    sizes = [size for at, size in enumerate(parameter.shape) if at != index]
    grids = np.meshgrid(
        *(np.full(n, -1) if a is None else a for a, n in zip(rest, sizes, strict=True)),
        indexing="ij",
    )
    touched = [grid.ravel() for grid, axis in zip(grids, rest, strict=True) if axis is not None]
    each = np.stack(touched, axis=1) if touched else np.empty((int(np.prod(sizes)), 0), np.int64)
    return Block(
        parameter.name,
        seen.reshape(len(positions), -1),
        np.tile(each, (positions.shape[1], 1)),
    )


def flat_order(anatomy: Anatomy, take: np.ndarray) -> np.ndarray:
    """For every coordinate of the flat vector the one to take its value from.

    `take[c]` is the cell whose place cell c gets. It must stay inside the part; then the network
    computes the same function, because every axis that a part spans moves together.
    """
    order = np.empty(anatomy.size, dtype=np.int64)
    for parameter in anatomy.parameters:
        offset = anatomy.offsets[parameter.name]
        grid = np.arange(parameter.size, dtype=np.int64).reshape(parameter.shape)
        for index, axis in enumerate(parameter.axes):
            if axis is not None:
                grid = np.take(grid, _moved(axis, take), axis=index)
        order[offset : offset + parameter.size] = offset + grid.ravel()
    return order


def _moved(axis: np.ndarray, take: np.ndarray) -> np.ndarray:
    """For every position of an axis the position to take from."""
    by_cell = np.argsort(axis, kind="stable")
    ordered = axis[by_cell]
    repeat = np.empty(len(axis), dtype=np.int64)
    repeat[by_cell] = np.arange(len(axis)) - np.searchsorted(ordered, ordered, side="left")
    return by_cell[np.searchsorted(ordered, take[axis], side="left") + repeat]
