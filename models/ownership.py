"""Who owns every coordinate of a network, given the cells of its models by number.

Nothing here depends on names or on a peer's own cell indices: that is what makes coordinates comparable
between peers, and lets peers that are cut alike share them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from .anatomy import Anatomy, ParameterMap

# The numbers of the models that own something together: one, or more with cross-model averaging, or
# none for what stays private.
Owner = tuple[int, ...]
_PRIVATE: Owner = ()


@dataclass(frozen=True)
class Block:
    """A piece of a parameter: on each axis with cells a model and its entries; `free` other values."""

    parameter: str
    axes: tuple[tuple[int, int], ...]
    free: int


@dataclass(frozen=True, eq=False)
class Ownership:
    """Coordinates by owner, in the swarm's common order, and what they are made of."""

    coordinates: dict[Owner, slice | np.ndarray]
    blocks: dict[Owner, tuple[Block, ...]]


def own(
    anatomy: Anatomy,
    cells: list[tuple[np.ndarray, ...]],
    below: tuple[tuple[bool, ...], ...],
    *,
    cross: bool,
) -> Ownership:
    """Give every coordinate to its owner.

    `cells` holds for every model its cells in every part; `below[i][j]` says that model i depends on j.
    """
    model_of, rank_of, part_of = _cell_facts(anatomy, cells)
    found: dict[Owner, list[np.ndarray]] = {}
    blocks: dict[Owner, list[Block]] = {}
    for parameter in anatomy.parameters:
        first = anatomy.offsets[parameter.name]
        if parameter.private:
            whole = np.arange(first, first + parameter.size, dtype=np.int64)
            found.setdefault(_PRIVATE, []).append(whole)
            continue
        spans = [axis for axis in parameter.axes if axis is not None]
        orders = [_canonical(axis, model_of, part_of, rank_of) for axis in spans]
        models = [model_of[axis[order]] for axis, order in zip(spans, orders, strict=True)]
        where = _permuted_coordinates(parameter, first, orders)
        if parameter.cell is not None:  # an axis of length 1 stands for its one cell
            models, where = [model_of[parameter.cell : parameter.cell + 1]], where[None]
        owner_of, owners_found = _owner_table(len(models), below, cross)
        owners = owner_of[np.ix_(*models)]
        # Axes without cells come last in `where`, so one owner mask serves all of them.
        present = np.unique(owners)
        for number in present.tolist():
            piece = where if len(present) == 1 else where[owners == number]
            found.setdefault(owners_found[number], []).append(piece.ravel())
        free = where[(0,) * len(models)].size
        for block in itertools.product(*(np.unique(axis).tolist() for axis in models)):
            owner = owners_found[owner_of[block]]
            if owner != _PRIVATE:
                sizes = tuple(
                    (model, int((axis == model).sum()))
                    for model, axis in zip(block, models, strict=True)
                )
                blocks.setdefault(owner, []).append(Block(parameter.name, sizes, free))
    return Ownership(
        {owner: _compact(np.concatenate(pieces)) for owner, pieces in found.items()},
        {owner: tuple(some) for owner, some in blocks.items()},
    )


def _cell_facts(
    anatomy: Anatomy, cells: list[tuple[np.ndarray, ...]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every cell: its model's number, its rank in the slice, its part."""
    total = int(anatomy.firsts[-1])
    model_of, rank_of = np.zeros(total, np.int64), np.zeros(total, np.int64)
    part_of = np.repeat(np.arange(len(anatomy.parts)), np.diff(anatomy.firsts))
    for index, parts in enumerate(cells):
        for part, own_cells in enumerate(parts):
            numbers = anatomy.firsts[part] + own_cells
            model_of[numbers] = index
            rank_of[numbers] = np.arange(len(own_cells))
    return model_of, rank_of, part_of


def _owner_table(
    axes: int, below: tuple[tuple[bool, ...], ...], cross: bool
) -> tuple[np.ndarray, list[Owner]]:
    """The paper's R(π): number of the owner by the models of the cells, and the owners numbered."""
    owners: list[Owner] = [_PRIVATE]
    table = np.zeros((len(below),) * axes, dtype=np.int64)
    for block in np.ndindex(table.shape):
        present = set(block)
        left = tuple(sorted(m for m in present if not any(below[other][m] for other in present)))
        if len(left) > 1 and not cross:
            continue
        if left not in owners:
            owners.append(left)
        table[block] = owners.index(left)
    return table, owners


def _compact(coordinates: np.ndarray) -> slice | np.ndarray:
    """A slice where it says the same: it copies faster, and takes no memory."""
    first = int(coordinates[0])
    whole = np.array_equal(coordinates, np.arange(first, first + len(coordinates)))
    return slice(first, first + len(coordinates)) if whole else coordinates


def _canonical(
    axis: np.ndarray, model_of: np.ndarray, part_of: np.ndarray, rank_of: np.ndarray
) -> np.ndarray:
    """Order an axis by model name, part, rank in the slice, then by repetition of the same cell.

    None of these depends on the peer's own cell indices, which is what makes coordinates comparable.
    """
    by_cell = np.argsort(axis, kind="stable")
    grouped = axis[by_cell]
    starts = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    counts = np.diff(np.r_[starts, len(axis)])
    repeat = np.empty(len(axis), np.int64)
    repeat[by_cell] = np.arange(len(axis)) - np.repeat(starts, counts)
    return np.lexsort((repeat, rank_of[axis], part_of[axis], model_of[axis]))


def _permuted_coordinates(
    parameter: ParameterMap, offset: int, orders: list[np.ndarray]
) -> np.ndarray:
    """Flat coordinates of a parameter, cell axes first and permuted, cell-free axes last."""
    where = offset + np.arange(parameter.size, dtype=np.int64).reshape(parameter.shape)
    spanned = [index for index, axis in enumerate(parameter.axes) if axis is not None]
    free = [index for index, axis in enumerate(parameter.axes) if axis is None]
    return where.transpose(*spanned, *free)[np.ix_(*orders)]
