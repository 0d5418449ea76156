"""Cutting a network: which coordinates each partial model averages, in an order all peers share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from weakref import WeakValueDictionary

import numpy as np

from .allotment import SliceSpec, allot
from .anatomy import Anatomy
from .errors import ModelError
from .graph import ModelGraph, check_name, pair_name
from .layout import Layout
from .ownership import Ownership, own

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
