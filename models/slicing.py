"""Cutting a network: which coordinates each partial model averages, in an order all peers share.

Cells are given to partial models (layouts, shares, explicit indices, the rest); R(π) says who owns the
parameters between them; coordinates follow, ordered by nothing that differs from peer to peer.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from .anatomy import Anatomy, ParameterMap, Part
from .errors import ModelError
from .graph import ModelGraph, check_name, pair_name


@dataclass(frozen=True)
class Layout:
    """Cells per part, in order.

    `Layout.network("784=300=100=10")` reads a whole network, `Layout.slice("784-250-80-10")` the
    share of it that belongs to one partial model. Only a slice may have parts with no cell.
    """

    cells: tuple[int, ...]

    @classmethod
    def network(cls, text: str) -> Layout:
        """Read `784=300=100=10`: at least two parts, none of them empty."""
        layout = cls(_numbers(text, "="))
        if len(layout.cells) < 2:
            raise ModelError(
                f"network layout {text!r} has one part; write at least two, as in 64=32=10"
            )
        for part, count in enumerate(layout.cells):
            if count == 0:
                raise ModelError(f"network layout {text!r}: part {part} has no cells")
        return layout

    @classmethod
    def slice(cls, text: str) -> Layout:
        """Read `784-250-80-10`: the cells of one partial model in every part, zeros allowed."""
        return cls(_numbers(text, "-"))

    def as_network(self) -> str:
        """Write the layout as a network's."""
        return "=".join(map(str, self.cells))

    def as_slice(self) -> str:
        """Write the layout as a slice's."""
        return "-".join(map(str, self.cells))


def _numbers(text: str, separator: str) -> tuple[int, ...]:
    if not re.fullmatch(rf"\d+(?:{separator}\d+)*", text):
        kind, example = (
            ("network", "784=300=100=10") if separator == "=" else ("slice", "784-250-80-10")
        )
        raise ModelError(
            f"{text!r} is not a {kind} layout: write whole numbers joined by {separator!r}, as in {example}"
        )
    return tuple(int(number) for number in text.split(separator))


Share = float | Mapping[str, float]
"""A fraction of every hidden part, or fractions by part name or glob; the last that matches counts."""


def is_share(spec: object) -> bool:
    """Whether a slice is given as shares rather than as indices or a layout."""
    if isinstance(spec, Mapping):
        return bool(spec) and all(_is_number(value) for value in spec.values())
    return _is_number(spec)


def take_shares(
    anatomy: Anatomy, shares: Mapping[str, Share], free: list[np.ndarray]
) -> dict[str, tuple[np.ndarray, ...]]:
    """The cells of every model with a share, the first free ones of each part; marks them as taken.

    `0.8`, which is short for `{"*": 0.8}`, is that fraction of every hidden part. Inputs and outputs
    mean something by their place: they go whole to the first model here, unless a name or a glob
    other than `*` says otherwise. Counts are rounded so that shares that add up to 1 take everything;
    a share above 0 is at least one cell.
    """
    for model, share in shares.items():
        _check_share(anatomy, model, share)
    taken: dict[str, list[np.ndarray]] = {model: [] for model in shares}
    for part, mask in zip(anatomy.parts, free, strict=True):
        fractions = _fractions(shares, part.name, hidden=part.name not in (anatomy.ends or ()))
        for model, count in _counts(part, fractions).items():
            cells = np.flatnonzero(mask)[:count]
            if len(cells) < count:
                raise ModelError(
                    f"model {model!r}: a share of {fractions[model]:g} is {count} of the {part.cells} cells "
                    f"of part {part.name!r}, of which {len(cells)} are free"
                )
            mask[cells] = False
            taken[model].append(cells)
    return {model: tuple(cells) for model, cells in taken.items()}


def _fractions(shares: Mapping[str, Share], part: str, *, hidden: bool) -> dict[str, float]:
    """The fraction of a part that every model asks for."""
    found: dict[str, float] = {}
    for model, share in shares.items():
        fraction = _fraction(share, part, hidden=hidden)
        if fraction is None:
            fraction = 0.0 if hidden or found else 1.0  # ends go to the first model
        found[model] = fraction
        if sum(found.values()) > 1 + 1e-9:
            raise ModelError(
                f"the shares of part {part!r} add up to {sum(found.values()):g} with model {model!r}; a "
                "part can be given away once"
            )
    return found


def _counts(part: Part, fractions: Mapping[str, float]) -> dict[str, int]:
    """Whole cells: sums are rounded, not the shares themselves, and nobody who asked gets nothing."""
    ends = np.rint(np.cumsum([0.0, *fractions.values()]) * part.cells).astype(int)
    counts = dict(zip(fractions, np.diff(ends).tolist(), strict=True))
    counts = {model: max(count, int(fractions[model] > 0)) for model, count in counts.items()}
    while sum(counts.values()) > part.cells:
        widest = max(counts, key=lambda model: counts[model])
        if counts[widest] == 1:
            asking = [model for model, fraction in fractions.items() if fraction > 0]
            raise ModelError(
                f"the share of model {asking[-1]!r} leaves it empty in part {part.name!r}: "
                f"{len(asking)} models want a share of its {part.cells} cells; override it, as in "
                f"{{'*': …, {part.name!r}: 0}}"
            )
        counts[widest] -= 1
    return counts


def _fraction(share: Share, part: str, *, hidden: bool) -> float | None:
    """The fraction that applies to a part; None where nothing does."""
    if not isinstance(share, Mapping):
        return float(share) if hidden else None
    found = None
    for pattern, value in share.items():
        if fnmatchcase(part, pattern) and (hidden or pattern != "*"):
            found = float(value)
    return found


def _check_share(anatomy: Anatomy, model: str, share: Share) -> None:
    given = share if isinstance(share, Mapping) else {"*": share}
    names = [part.name for part in anatomy.parts]
    for pattern, value in given.items():
        if not 0 <= value <= 1:
            raise ModelError(
                f"model {model!r}: a share is between 0 and 1, not {value} (for {pattern!r})"
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                f"model {model!r}: no part is called {pattern!r}; parts are {', '.join(names)}"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# A slice is a layout (`"784-250-80-10"`), a share (`0.8`, `{"*": 0.8, "head": 0}`), or the peer's own
# cell indices for every part.
SliceSpec = str | Layout | Share | Sequence[Sequence[int]] | Mapping[str, Sequence[int]]


def allot(
    anatomy: Anatomy, slices: Mapping[str, SliceSpec], rest: str | None
) -> dict[str, tuple[np.ndarray, ...]]:
    """Give every cell to one model: explicit indices first, then layouts, then shares, then the rest."""
    if not slices and rest is None:
        raise ModelError("a network needs at least one slice")
    free = [np.ones(part.cells, dtype=bool) for part in anatomy.parts]
    allotted: dict[str, tuple[np.ndarray, ...]] = {}
    holder: list[dict[int, str]] = [{} for _ in anatomy.parts]
    shares: dict[str, Any] = {model: spec for model, spec in slices.items() if is_share(spec)}
    for model, spec in slices.items():
        if model not in shares and not isinstance(spec, str | Layout):
            allotted[model] = _explicit(anatomy, model, spec, free, holder)
    for model, spec in slices.items():
        if isinstance(spec, str | Layout):
            layout = Layout.slice(spec) if isinstance(spec, str) else spec
            allotted[model] = _first_free(anatomy, model, layout, free)
    allotted |= take_shares(anatomy, shares, free)
    left = tuple(np.flatnonzero(mask) for mask in free)
    if any(len(cells) for cells in left):
        if rest is None:
            part = next(index for index, cells in enumerate(left) if len(cells))
            raise ModelError(
                f"part {anatomy.parts[part].name!r} has {anatomy.parts[part].cells} cells, but the slices "
                f"{', '.join(slices)} take only {anatomy.parts[part].cells - len(left[part])}; "
                "give the others to a model, or name one for them with rest="
            )
        if rest in allotted:
            raise ModelError(
                f"model {rest!r} has a slice already, so it cannot take the rest as well"
            )
        allotted[rest] = left
    return allotted


def _first_free(
    anatomy: Anatomy, model: str, layout: Layout, free: list[np.ndarray]
) -> tuple[np.ndarray, ...]:
    if len(layout.cells) != len(anatomy.parts):
        raise ModelError(
            f"model {model!r}: layout {layout.as_slice()} has {len(layout.cells)} parts, the network "
            f"has {len(anatomy.parts)} ({', '.join(part.name for part in anatomy.parts)})"
        )
    taken = []
    for part, count, mask in zip(anatomy.parts, layout.cells, free, strict=True):
        cells = np.flatnonzero(mask)[:count]
        if len(cells) < count:
            raise ModelError(
                f"model {model!r} wants {count} cells of part {part.name!r}, which has {part.cells}, "
                f"{len(cells)} of them free"
            )
        mask[cells] = False
        taken.append(cells)
    return tuple(taken)


def _explicit(
    anatomy: Anatomy, model: str, spec: Any, free: list[np.ndarray], holder: list[dict[int, str]]
) -> tuple[np.ndarray, ...]:
    if isinstance(spec, Mapping):
        names = [part.name for part in anatomy.parts]
        if unknown := [name for name in spec if name not in names]:
            raise ModelError(
                f"model {model!r}: the network has no part {unknown[0]!r}; parts are {', '.join(names)}"
            )
        for name, cells in spec.items():
            if isinstance(cells, int | float):
                raise ModelError(
                    f"model {model!r}: part {name!r} is given as a share ({cells}) and others as lists of "
                    "cells; use one or the other"
                )
        lists = [spec.get(name, ()) for name in names]
    else:
        lists = list(spec)
        if len(lists) != len(anatomy.parts):
            raise ModelError(
                f"model {model!r}: indices were given for {len(lists)} parts, the network has "
                f"{len(anatomy.parts)} ({', '.join(part.name for part in anatomy.parts)})"
            )
    taken = []
    for part, indices, mask, held in zip(anatomy.parts, lists, free, holder, strict=True):
        cells = np.asarray(indices, dtype=np.int64).reshape(-1)
        for cell in cells.tolist():
            if not 0 <= cell < part.cells:
                raise ModelError(
                    f"model {model!r}: part {part.name!r} has cells 0 to {part.cells - 1}, not {cell}"
                )
            if not mask[cell]:
                raise ModelError(
                    f"cell {cell} of part {part.name!r} was given to {held[cell]!r} and to {model!r}"
                )
            mask[cell] = False
            held[cell] = model
        taken.append(cells)
    return tuple(taken)


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


# What an owner averages, block by block: a parameter's name, then the model and the number of entries
# on each of its axes.
Schema = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


class Slicing:
    """One peer's network cut into slices.

    slices
        For every partial model that the peer implements, the cells it gives to it: a layout, which
        takes the first free cells of every part; a share (0.8) of every hidden part, or shares by part
        (`{"*": 0.8, "head": 0}`, see allotment.py); or explicit indices per part (a list of lists, or a
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
        self._owned = self._own()
        self._coordinates = {
            pair_name(self.models[index] for index in owner): where
            for owner, where in self._owned.coordinates.items()
        }
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
        self.where(owner)
        number = {model: index for index, model in enumerate(self.models)}
        blocks = self._owned.blocks[tuple(sorted(number[model] for model in owner.split("&")))]
        return tuple(
            (
                block.parameter,
                tuple((self.models[index], count) for index, count in block.axes)
                + ((("", block.free),) if block.free > 1 else ()),
            )
            for block in blocks
        )

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

    def _own(self) -> Ownership:
        """Who owns what, by numbers of models; shared by all peers that are cut alike."""
        cells = [self.cells[model] for model in self.models]
        below = tuple(
            tuple(self.graph.depends(lower, higher) for higher in self.models)
            for lower in self.models
        )
        key = (self.anatomy.digest, _digest(cells), below, self.cross)
        found = _SHARED.get(key)
        if found is None:
            found = _SHARED[key] = own(self.anatomy, cells, below, cross=self.cross)
        return found


# Peers that are cut alike share their coordinates, which would be most of the memory of a large swarm.
_SHARED: WeakValueDictionary[tuple[object, ...], Ownership] = WeakValueDictionary()


def _digest(cells: list[tuple[np.ndarray, ...]]) -> bytes:
    found = hashlib.blake2b()
    for parts in cells:
        for part in parts:
            found.update(len(part).to_bytes(8, "little"))
            found.update(np.ascontiguousarray(part, np.int64).tobytes())
    return found.digest()
