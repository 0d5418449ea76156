"""Slices of a network: which of its coordinates each partial model averages.

A coordinate is an index into the vector of all parameters of a network. Each cell of the network is given to
one partial model, by layouts, shares or lists of cells (`assign_cells`). Partial models may depend on each
other (`ModelGraph`); the paper's rule R(π) uses these dependencies to decide which model averages a parameter
between cells of two models (`averaging_model`). A model's coordinates are in the same order on every peer,
and starting values are drawn in that order (`starting_values`): shared values start equal on all peers,
private values differ.

"The paper" in this package is the one whose figures experiments/papers/partial_models.py reproduces.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import numpy as np

from .anatomy import Anatomy, Part, repeats
from .errors import ModelError

if TYPE_CHECKING:
    from networkx import DiGraph

# Names are used in MQTT topics and file names, and `&` joins two of them to the name of a pair of models.
_MODEL_NAME = re.compile(r"[A-Za-z0-9._@-]{1,31}")


class ModelGraph:
    """Which partial models depend on which: a strict partial order.

    Build it from a dict of the models that each model depends on; the others need no entry:

        ModelGraph({"quebec": ["french"], "france": ["french"]})

    A networkx DiGraph with edges *from a model to the models it depends on* is accepted as well.
    """

    def __init__(self, depends: Mapping[str, Iterable[str]] | DiGraph | None = None):
        # `adj` of a DiGraph is a mapping as well.
        mapping: Any = getattr(depends, "adj", depends) or {}
        for model, others in mapping.items():
            if isinstance(others, str):
                raise ModelError(
                    f"model {model!r}: write what it depends on as a list: [{others!r}]"
                )
        direct = {model: frozenset(others) for model, others in mapping.items()}
        self._dependencies: dict[str, frozenset[str]] = {}
        try:
            for model in TopologicalSorter(direct).static_order():
                others = direct.get(check_name(model), frozenset())
                indirect = (self._dependencies[other] for other in others)
                self._dependencies[model] = others.union(*indirect)
        except CycleError as error:
            cycle = " → ".join(map(str, reversed(error.args[1])))
            raise ModelError(f"models depend on each other in a circle: {cycle}") from None

    @property
    def models(self) -> frozenset[str]:
        """The names of all models that the graph mentions."""
        return frozenset(self._dependencies)

    def dependencies(self, model: str) -> frozenset[str]:
        """Return all models that `model` depends on, directly or through others."""
        return self._dependencies.get(model, frozenset())

    def averaging_model(self, models: Iterable[str], *, cross: bool = False) -> str | None:
        """Return the model that averages a parameter between cells of `models`; None if it stays private.

        The paper's rule R(π) drops those of `models` that another one depends on. If one model remains, it
        averages the parameter; if several do, the parameter is private.

        cross: whether several remaining models average it together, under their `pair_name` (Algorithm 2 of
        the paper), instead of leaving it private.
        """
        present = frozenset(models)
        remaining = present.difference(*(self.dependencies(model) for model in present))
        return pair_name(remaining) if len(remaining) == 1 or (remaining and cross) else None


def pair_name(models: Iterable[str]) -> str:
    """Return the name under which unrelated models average coordinates together: `green&yellow`."""
    return "&".join(sorted(models))


def check_name(model: object) -> str:
    """Return `model` if it is a valid name of a partial model; raise ModelError otherwise."""
    if not isinstance(model, str) or not _MODEL_NAME.fullmatch(model):
        raise ModelError(
            f"{model!r} cannot name a partial model: use 1 to 31 letters, digits, '.', '_', '@' or '-'"
        )
    return model


@dataclass(frozen=True)
class Layout:
    """The number of cells in every part (layer), in order, as the paper writes it.

    `Layout.network("784=300=100=10")` is a whole network, `Layout.slice("784-250-80-10")` the cells of it
    that belong to one partial model. Only a slice may have parts without cells.
    """

    cells: tuple[int, ...]

    @classmethod
    def network(cls, text: str) -> Layout:
        """Read `784=300=100=10`: at least two parts, none of them empty."""
        layout = cls(_parse_numbers(text, "=", "network", "784=300=100=10"))
        if len(layout.cells) < 2:
            raise ModelError(f"network layout {text!r} has one part; write two or more: 64=32=10")
        if 0 in layout.cells:
            raise ModelError(f"network layout {text!r}: part {layout.cells.index(0)} has no cells")
        return layout

    @classmethod
    def slice(cls, text: str) -> Layout:
        """Read `784-250-80-10`: the cells of one partial model in every part, zeros allowed."""
        return cls(_parse_numbers(text, "-", "slice", "784-250-80-10"))

    def as_slice(self) -> str:
        """Return the layout in the notation of slices: `784-250-80-10`."""
        return "-".join(map(str, self.cells))


def _parse_numbers(text: str, separator: str, kind: str, example: str) -> tuple[int, ...]:
    """Parse numbers joined by a separator; an error names the kind of layout and shows the example."""
    if not re.fullmatch(rf"\d+(?:{separator}\d+)*", text):
        raise ModelError(
            f"{text!r} is not a {kind} layout: write whole numbers joined by {separator!r}, as in {example}"
        )
    return tuple(int(number) for number in text.split(separator))


# --- giving cells to partial models -------------------------------------------------------------

Share = float | Mapping[str, float]
"""The fraction of the cells of every hidden part, or fractions by part. Keys are names or globs of parts; of
several that match a part, the last is used."""

SliceSpec = str | Layout | Share | Sequence[Sequence[int]] | Mapping[str, Sequence[int]]
"""How a user describes a slice: a layout (`"784-250-80-10"`), a share (`0.8`, `{"*": 0.8, "head": 0}`), or
lists of cells for every part, in order or by the part's name."""

Cells = tuple[np.ndarray, ...]
"""The indices of one partial model's cells, one array per part."""


def is_share(spec: object) -> bool:
    """Return whether a slice is described by a share, not by a layout or by lists of cells."""
    if isinstance(spec, Mapping):
        return bool(spec) and all(map(_is_number, spec.values()))
    return _is_number(spec)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def assign_cells(
    anatomy: Anatomy, slices: Mapping[str, SliceSpec], rest: str | None
) -> dict[str, Cells]:
    """Give every cell to one model; return the cells of each model.

    Slices that list their cells take them first, then layouts and last shares take cells that are free. Cells
    that no slice takes go to the model `rest`; if it is None, they are an error.
    """
    if not slices and rest is None:
        raise ModelError("a network needs at least one slice, or a model for the rest of its cells")
    free = [np.ones(part.cells, dtype=bool) for part in anatomy.parts]
    cells_of_model: dict[str, Cells] = {}
    shares: dict[str, Any] = {model: spec for model, spec in slices.items() if is_share(spec)}
    for model, spec in slices.items():
        if model not in shares and not isinstance(spec, str | Layout):
            cells_of_model[model] = _take_listed(anatomy, model, spec, free, cells_of_model)
    for model, spec in slices.items():
        if isinstance(spec, str | Layout):
            layout = Layout.slice(spec) if isinstance(spec, str) else spec
            _check_part_count(anatomy, model, f"layout {layout.as_slice()} has", len(layout.cells))
            cells_of_model[model] = tuple(
                _take_first_free(part, mask, count, f"model {model!r} wants {count} cells")
                for part, count, mask in zip(anatomy.parts, layout.cells, free, strict=True)
            )
    cells_of_model |= _take_shares(anatomy, shares, free)
    free_cells = tuple(np.flatnonzero(mask) for mask in free)
    for part, cells in zip(anatomy.parts, free_cells, strict=True):
        if not len(cells):
            continue
        if rest is None:
            raise ModelError(
                f"part {part.name!r} has {part.cells} cells, but the slices {', '.join(slices)} take only "
                f"{part.cells - len(cells)}; give the others to a model, or name one for them with rest="
            )
        if rest in slices:
            raise ModelError(f"model {rest!r} has a slice already: it cannot take the rest as well")
        cells_of_model[rest] = free_cells
    return cells_of_model


def _check_part_count(anatomy: Anatomy, model: str, subject: str, count: int) -> None:
    """Raise ModelError if a slice is not for as many parts as the network has; `subject` begins the text."""
    if count != len(anatomy.parts):
        raise ModelError(
            f"model {model!r}: {subject} {count} parts, but the network has {len(anatomy.parts)} "
            f"({', '.join(anatomy.names)})"
        )


def _take_listed(
    anatomy: Anatomy, model: str, spec: Any, free: list[np.ndarray], taken: Mapping[str, Cells]
) -> Cells:
    """Take the cells that a slice lists, and return them by part.

    spec: lists of cells for every part, in order or by name.
    free: for every part, which cells are free; those that are taken are marked there.
    taken: the cells that other models have already.
    """
    if isinstance(spec, Mapping):
        for name, cells in spec.items():
            anatomy.find(name, f"model {model!r}: ")
            if isinstance(cells, int | float):
                raise ModelError(
                    f"model {model!r}: part {name!r} is given as a share ({cells}) and others as lists of "
                    "cells; use one or the other"
                )
        spec = [spec.get(name, ()) for name in anatomy.names]
    if not isinstance(spec, Sequence | np.ndarray):
        raise ModelError(
            f"model {model!r}: {spec!r} describes no slice; give a layout ('784-250-80-10'), a share (0.8), "
            "or lists of cells by part"
        )
    _check_part_count(anatomy, model, "indices were given for", len(spec))
    cells_by_part = []
    for index, (part, indices) in enumerate(zip(anatomy.parts, spec, strict=True)):
        cells = np.asarray(indices).reshape(-1)
        if len(cells) and not np.issubdtype(cells.dtype, np.integer):
            raise ModelError(
                f"model {model!r}: part {part.name!r} lists {cells[0].item()!r} as a cell; give whole numbers"
            )
        cells = cells.astype(np.int64)
        for cell in cells.tolist():
            if not 0 <= cell < part.cells:
                raise ModelError(
                    f"model {model!r}: part {part.name!r} has cells 0 to {part.cells - 1}, not {cell}"
                )
            if not free[index][cell]:
                owner = next((m for m, other in taken.items() if cell in other[index]), model)
                raise ModelError(
                    f"cell {cell} of part {part.name!r} was given to {owner!r} and to {model!r}"
                )
            free[index][cell] = False
        cells_by_part.append(cells)
    return tuple(cells_by_part)


def _take_first_free(part: Part, free: np.ndarray, count: int, request: str) -> np.ndarray:
    """Take the first `count` free cells of a part; `request` begins the error if there are too few."""
    cells = np.flatnonzero(free)[:count]
    if len(cells) < count:
        raise ModelError(
            f"{request} of part {part.name!r}, which has {part.cells}, {len(cells)} of them free"
        )
    free[cells] = False
    return cells


def _take_shares(
    anatomy: Anatomy, shares: Mapping[str, Share], free: list[np.ndarray]
) -> dict[str, Cells]:
    """Give every model with a share the first free cells of each part.

    `0.8`, which is short for `{"*": 0.8}`, is that fraction of every hidden part. Cells of input and output
    parts are not interchangeable: the first model in `shares` takes them all, unless a name or a glob other
    than `*` matches the part. Counts are rounded so that shares that add up to 1 take every cell; a share
    above 0 is at least one cell.
    """
    patterns = {
        model: share if isinstance(share, Mapping) else {"*": share}
        for model, share in shares.items()
    }
    for model, share_of_pattern in patterns.items():
        for pattern, value in share_of_pattern.items():
            if not 0 <= value <= 1:
                raise ModelError(
                    f"model {model!r}: a share is between 0 and 1, not {value} (for {pattern!r})"
                )
            if not any(fnmatchcase(name, pattern) for name in anatomy.names):
                raise ModelError(
                    f"model {model!r}: no part is called {pattern!r}; {anatomy.part_hint(pattern)}"
                )
    taken: dict[str, list[np.ndarray]] = {model: [] for model in shares}
    for part, mask in zip(anatomy.parts, free, strict=True):
        fractions = _fractions_of_part(
            patterns, part.name, hidden=part.name not in (anatomy.ends or ())
        )
        for model, count in _cell_counts(part, fractions).items():
            request = f"model {model!r}: a share of {fractions[model]:g} is {count} cells"
            taken[model].append(_take_first_free(part, mask, count, request))
    return {model: tuple(cells) for model, cells in taken.items()}


def _fractions_of_part(
    shares: Mapping[str, Mapping[str, float]], part: str, *, hidden: bool
) -> dict[str, float]:
    """Return the fraction of a part's cells that each model takes.

    hidden: whether it is a hidden part; `_take_shares` says what is different for inputs and outputs.
    """
    fractions: dict[str, float] = {}
    for model, share in shares.items():
        fraction = 0.0 if hidden or fractions else 1.0
        for pattern, value in share.items():
            if fnmatchcase(part, pattern) and (hidden or pattern != "*"):
                fraction = float(value)
        fractions[model] = fraction
        if sum(fractions.values()) > 1 + 1e-9:
            raise ModelError(
                f"the shares of part {part!r} add up to {sum(fractions.values()):g} with model {model!r}; "
                "make them add up to at most 1"
            )
    return fractions


def _cell_counts(part: Part, fractions: Mapping[str, float]) -> dict[str, int]:
    """Return how many cells of a part each model takes, given their fractions.

    The cumulative sums of the fractions are rounded, not the fractions, so that fractions that add up to 1
    take all cells. A model with a fraction above 0 gets at least one cell.
    """
    ends = np.rint(np.cumsum([0.0, *fractions.values()]) * part.cells).astype(int)
    counts = dict(zip(fractions, np.diff(ends).tolist(), strict=True))
    counts = {model: max(count, int(fractions[model] > 0)) for model, count in counts.items()}
    while sum(counts.values()) > part.cells:
        largest = max(counts, key=lambda model: counts[model])
        if counts[largest] == 1:
            models = [model for model, fraction in fractions.items() if fraction > 0]
            raise ModelError(
                f"part {part.name!r} has {part.cells} cells, too few for the {len(models)} models that want "
                f"a share of it; give model {models[-1]!r} none, as in {{'*': …, {part.name!r}: 0}}"
            )
        counts[largest] -= 1
    return counts


# --- which partial model averages which coordinates ---------------------------------------------

ModelSet = tuple[int, ...]
"""The numbers of the models that average some coordinates: one model; several, with `cross`; or none, for
private coordinates. A model's number is its place among the peer's models in alphabetical order."""
_PRIVATE: ModelSet = ()

Block = tuple[str, tuple[tuple[int, int], ...], int]
"""The values of a parameter that lie between the cells of certain models. A block is described by the
parameter's name; by the model and its number of indices along each axis that has cells; and by the number of
values for each combination of these indices, such as the 9 of a 3×3 kernel."""


@dataclass(frozen=True, eq=False)
class CoordinateMap:
    """The coordinates that each set of models averages, in an order common to all peers, and their blocks.

    Models have numbers here instead of names, so that peers with equal slices share one object, whatever
    their models are called.
    """

    coordinates: dict[ModelSet, slice | np.ndarray]
    blocks: dict[ModelSet, list[Block]]


def _map_coordinates(
    anatomy: Anatomy, cells: list[Cells], dependencies: tuple[frozenset[int], ...], cross: bool
) -> CoordinateMap:
    """Assign every coordinate to the models that average it.

    cells[m]: the cells of model m in every part. dependencies[m]: the models that it depends on.
    """
    # For every cell of the network: its model, and its place in that model's slice of its part.
    model_of, rank_of = np.zeros((2, anatomy.first_cells[-1]), np.int64)
    part_of = np.repeat(np.arange(len(anatomy.parts)), np.diff(anatomy.first_cells))
    for model, parts in enumerate(cells):
        for part, indices in enumerate(parts):
            model_of[anatomy.first_cells[part] + indices] = model
            rank_of[anatomy.first_cells[part] + indices] = np.arange(len(indices))
    pieces: dict[ModelSet, list[np.ndarray]] = {}
    blocks: dict[ModelSet, list[Block]] = {}
    for parameter in anatomy.parameters:
        span = anatomy.spans[parameter.name]
        grid = np.arange(span.start, span.stop, dtype=np.int64).reshape(parameter.shape)
        if parameter.never_averaged:
            pieces.setdefault(_PRIVATE, []).append(grid.ravel())
            continue
        with_cells = [index for index, axis in enumerate(parameter.axes) if axis is not None]
        without_cells = [index for index, axis in enumerate(parameter.axes) if axis is None]
        cell_axes = [axis for axis in parameter.axes if axis is not None]
        # Indices along an axis are ordered by the model of their cell, its part and its place in the slice;
        # then by repetition, where an axis has the same cell several times.
        orders = [
            np.lexsort((repeats(axis), rank_of[axis], part_of[axis], model_of[axis]))
            for axis in cell_axes
        ]
        # For each of these axes, the model of every index.
        models = [model_of[axis[order]] for axis, order in zip(cell_axes, orders, strict=True)]
        # Axes without cells come last, so that a mask over the axes with cells selects all their values.
        grid = grid.transpose(*with_cells, *without_cells)[np.ix_(*orders)]
        if parameter.cell is not None:  # a scalar: give it one axis of length 1 for its cell
            models, grid = [model_of[parameter.cell : parameter.cell + 1]], grid[None]
        if parameter.extra_cell is not None:
            models = [model_of[parameter.extra_cell : parameter.extra_cell + 1], *models]
            grid = grid[None]
        table, model_sets = _averaging_table(len(models), dependencies, cross)
        set_numbers = table[np.ix_(*models)]  # for every value, the index of its model set
        present = np.unique(set_numbers)
        for number in present.tolist():
            piece = grid if len(present) == 1 else grid[set_numbers == number]
            pieces.setdefault(model_sets[number], []).append(piece.ravel())
        values_per_combination = grid[(0,) * len(models)].size
        for models_of_axes in itertools.product(*(np.unique(axis).tolist() for axis in models)):
            counts = (
                int((axis == m).sum()) for m, axis in zip(models_of_axes, models, strict=True)
            )
            axes = tuple(zip(models_of_axes, counts, strict=True))
            block = (parameter.name, axes, values_per_combination)
            blocks.setdefault(model_sets[table[models_of_axes]], []).append(block)
    coordinates = {
        model_set: slice_if_contiguous(np.concatenate(arrays))
        for model_set, arrays in pieces.items()
    }
    return CoordinateMap(coordinates, blocks)


def _averaging_table(
    axes: int, dependencies: tuple[frozenset[int], ...], cross: bool
) -> tuple[np.ndarray, list[ModelSet]]:
    """Tabulate the paper's rule R(π), as `averaging_model` states it, for models that are numbers.

    Returns a table with one axis per axis of the parameter, indexed by the models of the cells, and a list of
    model sets. The numbers in the table are indices into the list.
    """
    model_sets: list[ModelSet] = [_PRIVATE]
    table = np.zeros((len(dependencies),) * axes, dtype=np.int64)
    for models in np.ndindex(table.shape):
        remaining = tuple(sorted(set(models).difference(*(dependencies[m] for m in models))))
        if len(remaining) > 1 and not cross:
            continue  # private: the table holds the index 0
        if remaining not in model_sets:
            model_sets.append(remaining)
        table[models] = model_sets.index(remaining)
    return table, model_sets


Coordinates = slice | np.ndarray
"""Coordinates of the flat vector: a slice if they are contiguous, which copies faster and takes no memory."""


def slice_if_contiguous(coordinates: np.ndarray) -> Coordinates:
    """Return coordinates as a slice if they are contiguous, else as they are."""
    first = int(coordinates[0])
    contiguous = np.array_equal(coordinates, np.arange(first, first + len(coordinates)))
    return slice(first, first + len(coordinates)) if contiguous else coordinates


def _indices(coordinates: Coordinates) -> np.ndarray:
    """Return coordinates as an array."""
    return (
        np.arange(coordinates.start, coordinates.stop)
        if isinstance(coordinates, slice)
        else coordinates
    )


Schema = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
"""What a model averages, one entry per block: the name of its parameter, and for each axis the model whose
cells lie on it and the number of indices. An axis without cells has the model ""."""


class Slicing:
    """One peer's network, sliced into partial models.

    slices
        For every partial model that the peer has, its cells: a layout, which takes the first free cells of
        every part; a share (0.8) of every hidden part, or shares by part (`{"*": 0.8, "head": 0}`); or lists
        of cells per part (a list of lists, or a dict from part name to list). The order of listed cells
        matters: the k-th cell of a slice is averaged with the k-th cell of the same slice on every other
        peer.
    graph
        Which models depend on which; without a graph none does. It must name every model in `slices`, and a
        peer that has a model must have all models that it depends on.
    rest
        The name of a model that takes all cells that no slice takes; None (the default) makes such cells
        an error. Use a different name on every peer, because peers average models of the same name.
    cross
        Whether weights between models of which neither depends on the other are averaged, among the peers
        that have both (Algorithm 2 of the paper); else they are private.
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
        self.cells = assign_cells(anatomy, slices, rest)
        self._check_models(rest)
        self.models: tuple[str, ...] = tuple(sorted(self.cells))
        self._number = {model: index for index, model in enumerate(self.models)}
        self._map = self._coordinate_map()
        self._coordinates = {
            pair_name(self.models[number] for number in numbers): coordinates
            for numbers, coordinates in self._map.coordinates.items()
        }
        self.averaged_models: tuple[str, ...] = tuple(sorted(filter(None, self._coordinates)))
        """Models that average at least one coordinate and, with `cross`, pairs of models: `green&yellow`."""

    def coordinates(self, model: str) -> np.ndarray:
        """Return the coordinates that `model` averages, in the same order on all peers."""
        return _indices(self.coordinates_or_slice(model))

    def coordinates_or_slice(self, model: str) -> Coordinates:
        """Return the coordinates that `model` averages, as a slice if they are contiguous."""
        if not model or model not in self._coordinates:
            raise ModelError(
                f"model {model!r} averages nothing here; models that do are "
                f"{', '.join(self.averaged_models)}"
            )
        return self._coordinates[model]

    @property
    def private(self) -> np.ndarray:
        """The coordinates that no model averages.

        They are parameters between unrelated models, and the norms and statistics that `buffers` of a sliced
        network makes private.
        """
        return _indices(self._coordinates.get("", np.empty(0, dtype=np.int64)))

    def schema(self, model: str) -> Schema:
        """Return what `model` averages. Only peers with equal schemas can average it together."""
        self.coordinates_or_slice(model)  # raises for a model that averages nothing
        numbers = tuple(sorted(self._number[name] for name in model.split("&")))
        return tuple(
            (
                name,
                tuple((self.models[number], count) for number, count in axes)
                + ((("", values_per_combination),) if values_per_combination > 1 else ()),
            )
            for name, axes, values_per_combination in self._map.blocks[numbers]
        )

    def layout(self, model: str) -> Layout:
        """Return the number of cells per part of one of the peer's models."""
        return Layout(tuple(len(cells) for cells in self.cells[model]))

    def _check_models(self, rest: str | None) -> None:
        """Raise ModelError if a model has a bad name or no cells, or if the graph does not allow it."""
        known = self.graph.models
        for model, cells in self.cells.items():
            check_name(model)
            if known and model not in known and model != rest:
                raise ModelError(
                    f"unknown model {model!r}: the graph names {', '.join(sorted(known))}; add it there, or "
                    "leave out its slice"
                )
            if not any(len(part) for part in cells):
                raise ModelError(
                    f"model {model!r} is empty: it has no cell in any part; give it some, or leave it out"
                )
            if missing := sorted(self.graph.dependencies(model) - set(self.cells)):
                raise ModelError(
                    f"model {model!r} depends on {missing[0]!r}, which this peer does not have; "
                    f"give {missing[0]!r} a slice too"
                )

    def _coordinate_map(self) -> CoordinateMap:
        """Return the coordinate map, one object for all peers with equal slices."""
        cells = [self.cells[model] for model in self.models]
        dependencies = tuple(
            frozenset(self._number[other] for other in self.graph.dependencies(model))
            for model in self.models
        )
        digest = hashlib.blake2b()
        for indices in itertools.chain(*cells):
            digest.update(len(indices).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(indices, np.int64).tobytes())
        key = (self.anatomy.digest, digest.digest(), dependencies, self.cross)
        coordinate_map = _COORDINATE_MAPS.get(key)
        if coordinate_map is None:
            coordinate_map = _map_coordinates(self.anatomy, cells, dependencies, self.cross)
            _COORDINATE_MAPS[key] = coordinate_map
        return coordinate_map


# Peers with equal slices share one map: copies would take most of the memory of a large simulated swarm.
_COORDINATE_MAPS: WeakValueDictionary[tuple[object, ...], CoordinateMap] = WeakValueDictionary()


def seeded_rng(seed: int, *names: object) -> np.random.Generator:
    """Return a random generator seeded by `seed` and `names`, the same on every machine."""
    text = "\x1f".join([str(seed), *map(str, names)]).encode()
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text).digest()[:16], "little"))


@dataclass(frozen=True)
class Start:
    """How starting weights are drawn.

    Biases start at 0. Other parameters with one value per cell (norm gains, PReLU slopes, statistics) keep
    the module's own constant; if training has changed it, gains and variances start at 1, means at 0. Class
    tokens and position embeddings that are constant stay constant; otherwise they, other vectors and token
    embeddings are drawn such that a row has a length of about `gain`. In a module with frozen parameters, a
    weight that is 0 everywhere stays 0: an adapter that starts without effect.
    """

    distribution: Literal["normal", "uniform"] = "normal"
    """normal: of mean 0 and standard deviation gain/√fan_in. uniform: between −gain/√fan_in and gain/√fan_in.
    The fan-in is the number of inputs of a cell."""
    gain: float = 1.0
    """The factor by which the distribution is scaled."""
    by_fan_in: bool = True
    """False leaves out the division by √fan_in: `Start("uniform", 1.0, by_fan_in=False)` is [−1, 1]."""
    shift: float = 0.0
    """Added to every weight: the distribution's mean."""
    equal: bool = True
    """True gives every peer the same starting values in shared slices. False draws them independently, but
    then the first rounds of averaging shrink the weights, which costs many rounds of training."""


def starting_values(
    slicing: Slicing, current: np.ndarray, *, seed: int, peer: str, start: Start | None = None
) -> np.ndarray:
    """Return starting values for all coordinates of one peer.

    Every averaged model has its own random generator, so that all its peers draw the same values.

    current: the values that the module has now; parameters that are constant keep theirs.
    """
    start = start or Start()
    scale, values = _scales_and_means(slicing.anatomy, current, start)
    draws = [("model", model, slicing.coordinates(model)) for model in slicing.averaged_models]
    draws.append(("peer", peer, slicing.private))
    for scope, name, coordinates in draws:
        names = (scope, name) if start.equal else (scope, name, peer)
        generator = seeded_rng(seed, "start", *names)
        if start.distribution == "normal":
            drawn = generator.standard_normal(len(coordinates))
        else:
            drawn = generator.uniform(-1.0, 1.0, len(coordinates))
        values[coordinates] += drawn * scale[coordinates]
    return values


_TRAINED_STARTS = {"weight": 1.0, "running_mean": 0.0, "running_var": 1.0}
"""The starting values of norm layers that were used before, and so are no longer constant."""


def _scales_and_means(
    anatomy: Anatomy, current: np.ndarray, start: Start
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for every coordinate, the factor of its random number and the value that it is added to."""
    scale, mean = np.zeros(anatomy.size), np.zeros(anatomy.size)

    def scale_for(fan_in: int) -> float:
        return start.gain / np.sqrt(fan_in) if start.by_fan_in else start.gain

    for parameter in anatomy.parameters:
        span, axes = anatomy.spans[parameter.name], len(parameter.shape)
        if anatomy.frozen and not current[span].any():
            continue  # an adapter's last layer
        if axes > 1 and parameter.axes[0] is not None:
            # Weights whose outputs are cells: of dense, convolutional, recurrent and attention layers.
            scale[span] = scale_for(int(np.prod(parameter.shape[1:], dtype=np.int64)))
            mean[span] = start.shift
        elif axes == 1 and "bias" in parameter.name.rpartition(".")[2]:
            continue  # recognised by name: values alone do not tell a single bias from a constant gain
        elif parameter.size and bool((current[span] == current[span.start]).all()):
            mean[span] = current[span.start]  # PReLU slopes, norm gains: keep the module's constant
        elif axes == 1 and (name := parameter.name.rpartition(".")[2]) in _TRAINED_STARTS:
            mean[span] = _TRAINED_STARTS[name]
        else:
            scale[span] = scale_for(parameter.shape[-1])
    return scale, mean
