"""Cutting a network: which coordinates each partial model averages, in an order all peers share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from .allotment import SliceSpec, allot
from .anatomy import Anatomy, ParameterMap
from .errors import ModelError
from .graph import ModelGraph, check_name
from .layout import Layout

# What an owner averages, block by block: a parameter's name, then the model and the number of entries
# on each of its axes.
Schema = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]

_PRIVATE = -1


class Slicing:
    """One peer's network cut into slices.

    slices
        For every partial model that the peer implements, the cells it gives to it: a layout, which
        takes the first free cells of every part, or explicit indices per part (a list of lists, or a
        dict from part name to list). The order of explicit indices matters: the k-th cell of a slice is
        averaged with the k-th cell of the same slice on every other peer.
    graph
        The dependency order; without one no model depends on another. It must name every model in
        `slices`, and a peer that implements a model must implement all that it depends on.
    rest
        The name of a model that takes every cell no other slice claimed; None (the default) makes
        unclaimed cells an error. Give each peer's rest a name of its own, or peers will share it.
    cross
        Average weights between unrelated models among the peers that implement both (Algorithm 2).
    """

    def __init__(
        self,
        anatomy: Anatomy,
        slices: Mapping[str, SliceSpec],
        *,
        graph: ModelGraph | None = None,
        rest: str | None = None,
        cross: bool = False,
    ):
        self.anatomy = anatomy
        self.graph = graph or ModelGraph()
        self.cross = cross
        self.cells = allot(anatomy, slices, rest)
        self._check_models(rest)
        self.models: tuple[str, ...] = tuple(sorted(self.cells))
        self._coordinates, self._schemas = self._own()
        self.owners: tuple[str, ...] = tuple(sorted(name for name in self._coordinates if name))
        """Models, and pairs of models with `cross`, that own at least one coordinate."""

    def coordinates(self, owner: str) -> np.ndarray:
        """Indices into the flat parameter vector that `owner` averages, in the swarm's common order."""
        where = self.where(owner)
        return np.arange(where.start, where.stop) if isinstance(where, slice) else where

    def where(self, owner: str) -> slice | np.ndarray:
        """The same as `coordinates`, but as a slice where they follow each other without a gap."""
        if not owner or owner not in self._coordinates:
            raise ModelError(f"{owner!r} owns nothing here; owners are {', '.join(self.owners)}")
        return self._coordinates[owner]

    @property
    def private(self) -> np.ndarray:
        """Coordinates between unrelated models, which nobody averages."""
        where = self._coordinates.get("", np.empty(0, dtype=np.int64))
        return np.arange(where.start, where.stop) if isinstance(where, slice) else where

    def schema(self, owner: str) -> Schema:
        """What `owner` averages, block by block: equal on two peers iff they may average it."""
        self.coordinates(owner)
        return self._schemas[owner]

    def layout(self, model: str) -> Layout:
        """The cells per part of one of the peer's slices."""
        return Layout(tuple(len(cells) for cells in self.cells[model]))

    def _check_models(self, rest: str | None) -> None:
        known = self.graph.models
        for model, cells in self.cells.items():
            check_name(model)
            if known and model not in known and model != rest:
                raise ModelError(
                    f"unknown model {model!r}: the dependency order knows {', '.join(sorted(known))}"
                )
            if not any(len(part) for part in cells):
                raise ModelError(f"model {model!r} is empty: it has no cell in any part")
            if lacking := sorted(self.graph.dependencies(model) - set(self.cells)):
                raise ModelError(
                    f"model {model!r} depends on {lacking[0]!r}, which this peer does not implement; "
                    f"give {lacking[0]!r} a slice too"
                )

    def _own(self) -> tuple[dict[str, slice | np.ndarray], dict[str, Schema]]:
        """Coordinates and schema of every owner; the private ones are under the empty name."""
        model_of, rank_of, part_of = self._cell_facts()
        names: list[str] = []
        found: dict[str, list[np.ndarray]] = {}
        schemas: dict[str, list[tuple[str, tuple[tuple[str, int], ...]]]] = {}
        for parameter in self.anatomy.parameters:
            spans = [axis for axis in parameter.axes if axis is not None]
            orders = [_canonical(axis, model_of, part_of, rank_of) for axis in spans]
            models = [model_of[axis[order]] for axis, order in zip(spans, orders, strict=True)]
            owner_of = self._owner_table(len(spans), names)
            owners = owner_of[np.ix_(*models)]
            where = _permuted_coordinates(parameter, self.anatomy.offsets[parameter.name], orders)
            # Axes without cells come last in `where`, so one owner mask serves all of them.
            for owner in np.unique(owners):
                name = "" if owner == _PRIVATE else names[owner]
                found.setdefault(name, []).append(where[owners == owner].ravel())
            for block in itertools.product(*(np.unique(axis) for axis in models)):
                owner = owner_of[block]
                if owner != _PRIVATE:
                    sizes = tuple(
                        (self.models[model], int((axis == model).sum()))
                        for model, axis in zip(block, models, strict=True)
                    )
                    rest = _cell_free(parameter)
                    schemas.setdefault(names[owner], []).append(
                        (parameter.name, sizes + ((("", rest),) if rest > 1 else ()))
                    )
        return (
            {name: _compact(np.concatenate(pieces)) for name, pieces in found.items()},
            {name: tuple(blocks) for name, blocks in schemas.items()},
        )

    def _cell_facts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For every cell: its model's index in `self.models`, its rank in the slice, its part."""
        total = int(self.anatomy.firsts[-1])
        model_of, rank_of = np.zeros(total, np.int64), np.zeros(total, np.int64)
        part_of = np.repeat(np.arange(len(self.anatomy.parts)), np.diff(self.anatomy.firsts))
        for index, model in enumerate(self.models):
            for part, cells in enumerate(self.cells[model]):
                numbers = self.anatomy.firsts[part] + cells
                model_of[numbers] = index
                rank_of[numbers] = np.arange(len(cells))
        return model_of, rank_of, part_of

    def _owner_table(self, axes: int, names: list[str]) -> np.ndarray:
        """Owner of a coordinate by the models of its cells; `names` grows with owners not yet seen."""
        table = np.full((len(self.models),) * axes, _PRIVATE, dtype=np.int64)
        for block in np.ndindex(table.shape):
            owner = self.graph.owner({self.models[index] for index in block}, cross=self.cross)
            if owner is not None:
                if owner not in names:
                    names.append(owner)
                table[block] = names.index(owner)
        return table


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


def _cell_free(parameter: ParameterMap) -> int:
    sizes = [
        size for size, axis in zip(parameter.shape, parameter.axes, strict=True) if axis is None
    ]
    return int(np.prod(sizes, dtype=np.int64))
