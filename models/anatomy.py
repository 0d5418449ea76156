"""The anatomy of a network: its parts, their cells, and the cells on the axes of every parameter.

discovery.py finds the anatomy of a network, slicing.py divides its cells among partial models. An axis of a
parameter is an array of cell numbers, so that weight matrices, convolutions flattened into a dense layer and
stacked LSTM gates are all described in the same way.

A permutation of cells is an array `old_cells`: the new cell c is the old cell `old_cells[c]`. If it permutes
cells only within parts, the network computes the same function: all axes of a part are permuted alike.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from .errors import ModelError

if TYPE_CHECKING:  # settings import this module and must not load torch
    from torch import Tensor

Buffers = Literal["average", "local", "recompute"]
"""What peers do with the statistics of batch norm: see SlicedNetwork."""


@dataclass(frozen=True)
class Part:
    """Interchangeable cells: permuting them, with all their weights, leaves the function unchanged."""

    name: str
    cells: int


@dataclass(frozen=True, eq=False)
class ParameterMap:
    """The cells of one parameter tensor.

    `axes` has, for every axis of the tensor, an array with the cell number of each index, or None if the axis
    has no cells (such as the kernel axes of a convolution).

    Cells are numbered through the whole network: `Anatomy.first_cells[part]` plus the index in the part.

    cell
        For a parameter without cells on its axes (a scalar): the cell it belongs to.
    never_averaged
        Whether no model averages it, whatever its cells: batch norm with `buffers = "local"` (FedBN).
    extra_cell
        A further cell that all values of the parameter belong to: see `Anatomy.with_norm_parts`.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[np.ndarray | None, ...]
    cell: int | None = None
    never_averaged: bool = False
    extra_cell: int | None = None

    @cached_property
    def size(self) -> int:
        """How many coordinates the parameter has."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of a network in order, and its parameters in the order of `module.named_parameters()`.

    buffers
        Buffers with a value per cell (the statistics of batch norm), described like parameters.
    ends
        Names of the input and output parts of the network, whose cells are not interchangeable; by
        default the first and the last part. Parts with cells of frozen parameters belong to them too.
    frozen
        Names of the module's parameters that no peer trains, and that are left out: see `without`.
    """

    parts: tuple[Part, ...]
    parameters: tuple[ParameterMap, ...]
    buffers: tuple[ParameterMap, ...] = ()
    ends: frozenset[str] | None = None
    frozen: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if duplicates := [name for name in self.names if self.names.count(name) > 1]:
            raise ModelError(f"two parts are named {duplicates[0]!r}")
        if self.ends is None and self.parts:
            object.__setattr__(self, "ends", frozenset((self.parts[0].name, self.parts[-1].name)))
        for parameter in (*self.parameters, *self.buffers):
            if parameter.cell is not None and any(axis is not None for axis in parameter.axes):
                raise ModelError(
                    f"parameter {parameter.name!r} has cells on its axes, so `cell` must be None"
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
                    f"parameter {parameter.name!r} touches no cell, so it belongs to no partial model; "
                    "give it one value per cell (nn.PReLU takes num_parameters=cells)"
                )

    @property
    def names(self) -> list[str]:
        """The names of the parts."""
        return [part.name for part in self.parts]

    def find(self, name: str, context: str = "") -> int:
        """Return the index of a part; raise an error that begins with `context` if there is none."""
        if name not in self.names:
            raise ModelError(f"{context}the network has no part {name!r}; {self.part_hint(name)}")
        return self.names.index(name)

    def part_hint(self, name: str) -> str:
        """Return what an error about an unknown part says: the part with the cells of that layer, or all."""
        for part, layers in self.layers.items():
            if name in layers:
                return f"the cells of layer {name!r} are those of part {part!r}: write {part!r}"
        return f"parts are {', '.join(self.names)}"

    @cached_property
    def layers(self) -> dict[str, list[str]]:
        """The layers of each part, by the module's names: several if outputs are added or normalized."""
        part_of_layer: dict[str, int] = {}
        for parameter in sorted(self.parameters, key=lambda item: len(item.shape)):  # biases first
            part = self.part_of(parameter.axes[0]) if parameter.axes else None
            if part is not None:
                part_of_layer.setdefault(_module_name(parameter), part)
        layers: dict[str, list[str]] = {name: [] for name in self.names}
        for layer in dict.fromkeys(map(_module_name, self.parameters)):
            if layer in part_of_layer:
                layers[self.names[part_of_layer[layer]]].append(layer)
        return layers

    @cached_property
    def first_cells(self) -> np.ndarray:
        """The number of each part's first cell, followed by the number of all cells."""
        return first_cells(self.parts)

    @cached_property
    def spans(self) -> dict[str, slice]:
        """The range of each parameter in the flat parameter vector."""
        ends = itertools.accumulate(parameter.size for parameter in self.parameters)
        return {
            parameter.name: slice(end - parameter.size, end)
            for parameter, end in zip(self.parameters, ends, strict=True)
        }

    @property
    def offsets(self) -> dict[str, int]:
        """The index at which each parameter begins in the flat parameter vector."""
        return {name: span.start for name, span in self.spans.items()}

    @cached_property
    def size(self) -> int:
        """The length of the flat parameter vector."""
        return sum(parameter.size for parameter in self.parameters)

    @cached_property
    def digest(self) -> bytes:
        """A hash of parts and parameters: equal anatomies have equal digests."""
        digest = hashlib.blake2b(repr([(part.name, part.cells) for part in self.parts]).encode())
        for parameter in self.parameters:
            digest.update(
                repr(
                    (
                        parameter.name,
                        parameter.shape,
                        parameter.cell,
                        parameter.never_averaged,
                        parameter.extra_cell,
                    )
                ).encode()
            )
            for axis in parameter.axes:
                digest.update(b"-" if axis is None else np.ascontiguousarray(axis).tobytes())
        return digest.digest()

    def without(self, frozen: Collection[str]) -> Anatomy:
        """Return the anatomy without frozen tensors, and without parts that no other tensor has cells of.

        A part that a frozen tensor has cells of cannot be permuted without it: it becomes one of `ends`.
        """
        tensors = (*self.parameters, *self.buffers)
        cells = int(self.first_cells[-1])
        is_used, is_fixed = np.zeros((2, cells), dtype=bool)
        for tensor in tensors:
            marked = is_fixed if tensor.name in frozen else is_used
            for axis in tensor.axes:
                if axis is not None:
                    marked[axis] = True
            for cell in (tensor.cell, tensor.extra_cell):
                if cell is not None:
                    marked[cell] = True
        ranges = [slice(*pair) for pair in itertools.pairwise(self.first_cells.tolist())]
        kept = [
            (part, its_cells)
            for part, its_cells in zip(self.parts, ranges, strict=True)
            if is_used[its_cells].any()
        ]
        new_number = np.full(cells, -1, dtype=np.int64)
        count = 0
        for part, its_cells in kept:
            new_number[its_cells] = np.arange(count, count + part.cells)
            count += part.cells

        def renumbered(tensor: ParameterMap) -> ParameterMap:
            axes = tuple(None if axis is None else new_number[axis] for axis in tensor.axes)
            cell, extra = (
                None if number is None else int(new_number[number])
                for number in (tensor.cell, tensor.extra_cell)
            )
            return replace(tensor, axes=axes, cell=cell, extra_cell=extra)

        ends = self.ends or ()
        return Anatomy(
            tuple(part for part, _ in kept),
            tuple(renumbered(tensor) for tensor in self.parameters if tensor.name not in frozen),
            tuple(renumbered(tensor) for tensor in self.buffers if tensor.name not in frozen),
            frozenset(
                part.name
                for part, its_cells in kept
                if part.name in ends or is_fixed[its_cells].any()
            ),
            frozenset(tensor.name for tensor in self.parameters if tensor.name in frozen),
        )

    @property
    def statistics(self) -> tuple[ParameterMap, ...]:
        """The running means and variances of batch norm."""
        return (*filter(_is_statistic, self.parameters), *self.buffers)

    def with_buffers(self, treatment: Buffers) -> Anatomy:
        """Return the anatomy for a treatment of batch norm's statistics: see `buffers` of SlicedNetwork.

        It may be another treatment than that of an earlier call.
        """
        buffers = self.statistics
        norms = {_module_name(buffer) for buffer in buffers} if treatment == "local" else set()
        parameters = tuple(
            replace(parameter, never_averaged=_module_name(parameter) in norms)
            for parameter in self.parameters
            if not _is_statistic(parameter)
        )
        if treatment == "average":
            return replace(self, parameters=parameters + buffers, buffers=())
        if treatment in ("local", "recompute"):
            return replace(self, parameters=parameters, buffers=buffers)
        raise ModelError(f"buffers {treatment!r} is unknown; there are average, local, recompute")

    def with_norm_parts(self, norms: Collection[str]) -> Anatomy:
        """Return the anatomy with two more parts, so that norm layers can be given to partial models.

        Each new part has one cell. All gains and biases of norm layers belong to the cell of `norms`, and all
        statistics to the cell of `norm-statistics`, besides the cells that they belong to already.

        norms: the names of the modules that are norm layers.
        """
        part_of = {
            parameter.name: "norm-statistics" if _is_statistic(parameter) else "norms"
            for parameter in self.parameters
            if _module_name(parameter) in norms
        }
        new_parts = [
            Part(name, 1) for name in ("norm-statistics", "norms") if name in part_of.values()
        ]
        cells = {part.name: int(self.first_cells[-1]) + i for i, part in enumerate(new_parts)}
        parameters = tuple(
            replace(parameter, extra_cell=cells[part_of[parameter.name]])
            if parameter.name in part_of
            else parameter
            for parameter in self.parameters
        )
        return replace(self, parts=(*self.parts, *new_parts), parameters=parameters)

    def connections(self) -> dict[tuple[int, int], bool]:
        """Return the pairs of parts that have parameters between them, the earlier part first.

        A part may be connected to itself. The value is True if no model averages these parameters, whatever
        their cells: see `ParameterMap.never_averaged`.
        """
        part_of = np.repeat(np.arange(len(self.parts)), [part.cells for part in self.parts])
        pairs: dict[tuple[int, int], bool] = {}
        for parameter in self.parameters:
            parts_by_axis = [
                np.unique(part_of[axis]).tolist() for axis in parameter.axes if axis is not None
            ]
            for parts, other_parts in itertools.combinations(parts_by_axis, 2):
                for a, b in itertools.product(parts, other_parts):
                    pair = (min(a, b), max(a, b))
                    pairs[pair] = pairs.get(pair, True) and parameter.never_averaged
        return dict(sorted(pairs.items()))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a flat vector (or of every row of a stack of them) by parameter name."""
        return {
            parameter.name: flat[..., self.spans[parameter.name]].view(
                (*flat.shape[:-1], *parameter.shape)
            )
            for parameter in self.parameters
        }

    def cells(self, part: int) -> np.ndarray:
        """Return the numbers of a part's cells: the axis of a parameter with one index per cell."""
        return np.arange(self.first_cells[part], self.first_cells[part + 1])

    def part_of(self, axis: np.ndarray | None) -> int | None:
        """Return the part of an axis, by its first cell; None for an axis without cells."""
        if axis is None or not len(axis):
            return None
        return int(np.searchsorted(self.first_cells, axis[0], side="right")) - 1

    def parameter_at(self, coordinate: int) -> str:
        """Return the name of the parameter at a coordinate of the flat vector (for messages)."""
        return next(name for name, span in self.spans.items() if coordinate < span.stop)

    def flat_order(self, old_cells: np.ndarray) -> np.ndarray:
        """Return the permutation of the flat vector that belongs to a permutation of cells.

        The new value of coordinate i is the old value of coordinate `flat_order(old_cells)[i]`.
        """
        order = np.arange(self.size, dtype=np.int64)
        for parameter in self.parameters:
            grid = order[self.spans[parameter.name]].reshape(parameter.shape)
            for index, axis in enumerate(parameter.axes):
                if axis is not None:
                    grid = np.take(grid, _axis_order(axis, old_cells), axis=index)
            order[self.spans[parameter.name]] = grid.ravel()
        return order

    def permute(self, tensors: Mapping[str, Tensor], old_cells: np.ndarray) -> None:
        """Permute the cells of named tensors in place."""
        is_moved = old_cells != np.arange(len(old_cells))
        by_name = {tensor.name: tensor for tensor in (*self.parameters, *self.buffers)}
        for parameter in by_name.values():
            data = tensors[parameter.name].data
            for index, axis in enumerate(parameter.axes):
                if axis is not None and is_moved[axis].any():
                    data.copy_(data[(slice(None),) * index + (_axis_order(axis, old_cells),)])


def _module_name(parameter: ParameterMap) -> str:
    """Return the name of the module that has a parameter or buffer."""
    return parameter.name.rpartition(".")[0]


def _is_statistic(parameter: ParameterMap) -> bool:
    """Return whether a parameter is a running statistic of batch norm, averaged like a parameter."""
    return parameter.name.rpartition(".")[2] in ("running_mean", "running_var")


def first_cells(parts: Sequence[Part]) -> np.ndarray:
    """Return the number of each part's first cell, followed by the number of all cells."""
    return np.concatenate([[0], np.cumsum([part.cells for part in parts], dtype=np.int64)])


def dense_axes(parts: Sequence[Part], *indices: int) -> tuple[np.ndarray, ...]:
    """Return axes with one index per cell: `dense_axes(parts, 1, 0)` for a weight from part 0 to part 1."""
    firsts = first_cells(parts)
    return tuple(np.arange(firsts[part], firsts[part + 1]) for part in indices)


def _axis_order(axis: np.ndarray, old_cells: np.ndarray) -> np.ndarray:
    """Return the permutation of an axis that belongs to a permutation of cells.

    A cell may have several indices on the axis: its k-th index is taken from the k-th index of the old cell.
    """
    by_cell = np.argsort(axis, kind="stable")
    return by_cell[np.searchsorted(axis[by_cell], old_cells[axis]) + repeats(axis)]


def repeats(values: np.ndarray) -> np.ndarray:
    """Return for every entry how many equal entries come before it."""
    by_value = np.argsort(values, kind="stable")
    ordered = values[by_value]
    counts = np.empty(len(values), np.int64)
    counts[by_value] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return counts
