"""What a network is made of: parts, their cells, and which cells every parameter touches.

This is the seam between *finding* parts (discovery.py, one way per kind of network) and *cutting*
them (slicing.py, one way for all). An axis of a parameter is a list of cell numbers, so a weight
matrix, a convolution kernel flattened into a dense layer, or four stacked LSTM gates all look alike.

Cells change places by an array `take`: cell c becomes what cell `take[c]` was. If it stays inside parts the
network computes the same function, because every axis that a part spans moves together.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from .errors import ModelError

if TYPE_CHECKING:  # settings are read without torch
    from torch import Tensor

Buffers = Literal["average", "local", "recompute"]
"""What peers do with batch statistics."""


@dataclass(frozen=True)
class Part:
    """Interchangeable cells: permuting them, with all their weights, leaves the function unchanged."""

    name: str
    cells: int


@dataclass(frozen=True, eq=False)
class ParameterMap:
    """One parameter tensor: for every axis the cell that each index touches, or None for no cell.

    Cells are numbered through the whole network: `Anatomy.firsts[part]` plus the index in the part.

    cell
        For a parameter none of whose axes has cells (a scalar): the cell it belongs to.
    private
        Nobody averages it, whatever its cells (norms under FedBN).
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[np.ndarray | None, ...]
    cell: int | None = None
    private: bool = False

    @property
    def size(self) -> int:
        """How many coordinates the parameter has."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Anatomy:
    """Parts in order, and every parameter in the order of `module.named_parameters()`.

    buffers
        Statistics that have a value per cell (batch norm's), like parameters.
    ends
        Names of the parts that are inputs or outputs of the network, whose cells mean something by
        their place; by default the first part and the last.
    """

    parts: tuple[Part, ...]
    parameters: tuple[ParameterMap, ...]
    buffers: tuple[ParameterMap, ...] = ()
    ends: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if duplicates := [name for name in self.names if self.names.count(name) > 1]:
            raise ModelError(f"two parts are named {duplicates[0]!r}")
        if self.ends is None and self.parts:
            object.__setattr__(self, "ends", frozenset((self.parts[0].name, self.parts[-1].name)))
        for parameter in (*self.parameters, *self.buffers):
            if parameter.cell is not None and any(axis is not None for axis in parameter.axes):
                raise ModelError(
                    f"parameter {parameter.name!r} has cells on its axes, so it cannot have one of its own"
                )
            lengths = tuple(
                size if axis is None else len(axis)
                for size, axis in zip(parameter.shape, parameter.axes, strict=True)
            )
            if lengths != parameter.shape:
                raise ModelError(
                    f"parameter {parameter.name!r} has shape {parameter.shape}, but its cells were "
                    f"given for {lengths}"
                )
            if parameter.cell is None and all(axis is None for axis in parameter.axes):
                raise ModelError(
                    f"parameter {parameter.name!r} touches no cell, so nothing says who averages it; "
                    "give it one value per cell (nn.PReLU takes num_parameters=cells)"
                )

    @property
    def names(self) -> list[str]:
        """The names of the parts."""
        return [part.name for part in self.parts]

    def find(self, name: str, context: str = "") -> int:
        """The index of a part; raises, beginning with `context`, if there is none of that name."""
        if name not in self.names:
            raise ModelError(
                f"{context}the network has no part {name!r}; parts are {', '.join(self.names)}"
            )
        return self.names.index(name)

    @cached_property
    def firsts(self) -> np.ndarray:
        """The number of each part's first cell, and the total at the end."""
        return first_cells(self.parts)

    @cached_property
    def spans(self) -> dict[str, slice]:
        """Where each parameter is in the flat parameter vector."""
        ends = itertools.accumulate(one.size for one in self.parameters)
        return {
            one.name: slice(end - one.size, end)
            for one, end in zip(self.parameters, ends, strict=True)
        }

    @property
    def offsets(self) -> dict[str, int]:
        """Where each parameter starts in the flat parameter vector."""
        return {name: span.start for name, span in self.spans.items()}

    @property
    def size(self) -> int:
        """The length of the flat parameter vector."""
        return sum(parameter.size for parameter in self.parameters)

    @cached_property
    def digest(self) -> bytes:
        """Equal for anatomies that say the same, so that peers can share what follows from them."""
        found = hashlib.blake2b(repr([(part.name, part.cells) for part in self.parts]).encode())
        for one in self.parameters:
            found.update(repr((one.name, one.shape, one.cell, one.private)).encode())
            for axis in one.axes:
                found.update(b"-" if axis is None else np.ascontiguousarray(axis).tobytes())
        return found.digest()

    def with_buffers(self, how: Buffers) -> Anatomy:
        """The anatomy for one way of treating statistics: see SlicedNetwork."""
        if how == "average":
            return replace(self, parameters=self.parameters + self.buffers, buffers=())
        if how == "local":
            norms = {one.name.rpartition(".")[0] for one in self.buffers}
            parameters = tuple(
                replace(one, private=True) if one.name.rpartition(".")[0] in norms else one
                for one in self.parameters
            )
            return replace(self, parameters=parameters)
        if how == "recompute":
            return self
        raise ModelError(f"buffers {how!r} is unknown; there are average, local, recompute")

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters in a flat vector, or in each row of a stack of them, as views of it."""
        return {
            one.name: flat[..., self.spans[one.name]].view((*flat.shape[:-1], *one.shape))
            for one in self.parameters
        }

    def cells(self, part: int) -> np.ndarray:
        """The numbers of a part's cells: what to put on an axis that the part spans."""
        return np.arange(self.firsts[part], self.firsts[part + 1])

    def part_of(self, axis: np.ndarray | None) -> int | None:
        """The part that a parameter's axis spans, by its first cell."""
        if axis is None or not len(axis):
            return None
        return int(np.searchsorted(self.firsts, axis[0], side="right")) - 1

    def parameter_at(self, coordinate: int) -> str:
        """The name of the parameter that a coordinate of the flat vector belongs to (for messages)."""
        return next(name for name, span in self.spans.items() if coordinate < span.stop)

    def flat_order(self, take: np.ndarray) -> np.ndarray:
        """For every coordinate of the flat vector the one to take its value from when cells change places."""
        order = np.arange(self.size, dtype=np.int64)
        for one in self.parameters:
            grid = order[self.spans[one.name]].reshape(one.shape)
            for index, axis in enumerate(one.axes):
                if axis is not None:
                    grid = np.take(grid, _axis_order(axis, take), axis=index)
            order[self.spans[one.name]] = grid.ravel()
        return order

    def permute(self, tensors: Mapping[str, Tensor], take: np.ndarray) -> None:
        """Let the cells in named tensors change places."""
        moved = take != np.arange(len(take))
        for one in {map.name: map for map in (*self.parameters, *self.buffers)}.values():
            data = tensors[one.name].data
            for index, axis in enumerate(one.axes):
                if axis is not None and moved[axis].any():
                    data.copy_(data[(slice(None),) * index + (_axis_order(axis, take),)])


def first_cells(parts: Sequence[Part]) -> np.ndarray:
    """The number of each part's first cell, and the total at the end."""
    return np.concatenate([[0], np.cumsum([part.cells for part in parts], dtype=np.int64)])


def dense_axes(parts: Sequence[Part], *spanned: int) -> tuple[np.ndarray, ...]:
    """Axes that each span one whole part: `dense_axes(parts, 1, 0)` for a weight from part 0 to 1."""
    firsts = first_cells(parts)
    return tuple(np.arange(firsts[part], firsts[part + 1]) for part in spanned)


def _axis_order(axis: np.ndarray, take: np.ndarray) -> np.ndarray:
    """Where each index of an axis comes from: a cell's k-th position from the k-th of the other's."""
    by_cell = np.argsort(axis, kind="stable")
    return by_cell[np.searchsorted(axis[by_cell], take[axis]) + repeats(axis)]


def repeats(values: np.ndarray) -> np.ndarray:
    """For every entry how many equal ones come before it."""
    by_value = np.argsort(values, kind="stable")
    ordered = values[by_value]
    found = np.empty(len(values), np.int64)
    found[by_value] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return found
