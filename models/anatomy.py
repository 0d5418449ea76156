"""What a network is made of: parts, their cells, and which cells every parameter touches.

This is the seam between *finding* parts (discovery.py, one way per kind of network) and *cutting*
them (slicing.py, one way for all). An axis of a parameter is a list of cell numbers, so a weight
matrix, a convolution kernel flattened into a dense layer, or four stacked LSTM gates all look alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .errors import ModelError


@dataclass(frozen=True)
class Part:
    """Interchangeable cells: permuting them, with all their weights, leaves the function unchanged."""

    name: str
    cells: int


@dataclass(frozen=True, eq=False)
class ParameterMap:
    """One parameter tensor: for every axis the cell that each index touches, or None for no cell.

    Cells are numbered through the whole network: `Anatomy.first(part)` plus the index in the part.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[np.ndarray | None, ...]

    @property
    def size(self) -> int:
        """How many coordinates the parameter has."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Anatomy:
    """Parts in order, and every parameter in the order of `module.named_parameters()`."""

    parts: tuple[Part, ...]
    parameters: tuple[ParameterMap, ...]

    def __post_init__(self) -> None:
        if duplicates := _repeated([part.name for part in self.parts]):
            raise ModelError(f"two parts are named {duplicates[0]!r}")
        for parameter in self.parameters:
            lengths = tuple(
                size if axis is None else len(axis)
                for size, axis in zip(parameter.shape, parameter.axes, strict=True)
            )
            if lengths != parameter.shape:
                raise ModelError(
                    f"parameter {parameter.name!r} has shape {parameter.shape}, but its cells were "
                    f"given for {lengths}"
                )
            if all(axis is None for axis in parameter.axes):
                raise ModelError(
                    f"parameter {parameter.name!r} touches no cell, so nothing says who averages it; "
                    "give it one value per cell (nn.PReLU takes num_parameters=cells)"
                )

    @cached_property
    def firsts(self) -> np.ndarray:
        """The number of each part's first cell, and the total at the end."""
        return np.concatenate([[0], np.cumsum([part.cells for part in self.parts], dtype=np.int64)])

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each parameter starts in the flat parameter vector."""
        starts, offset = {}, 0
        for parameter in self.parameters:
            starts[parameter.name] = offset
            offset += parameter.size
        return starts

    @property
    def size(self) -> int:
        """The length of the flat parameter vector."""
        return sum(parameter.size for parameter in self.parameters)

    def cells(self, part: int) -> np.ndarray:
        """The numbers of a part's cells: what to put on an axis that the part spans."""
        return np.arange(self.firsts[part], self.firsts[part + 1])

    def parameter_at(self, coordinate: int) -> str:
        """The name of the parameter that a coordinate of the flat vector belongs to (for messages)."""
        starts = np.array(list(self.offsets.values()))
        index = int(np.searchsorted(starts, coordinate, side="right")) - 1
        return self.parameters[index].name


def dense_axes(parts: Sequence[Part], *spanned: int) -> tuple[np.ndarray, ...]:
    """Axes that each span one whole part: `dense_axes(parts, 1, 0)` for a weight from part 0 to 1."""
    firsts = np.concatenate([[0], np.cumsum([part.cells for part in parts], dtype=np.int64)])
    return tuple(np.arange(firsts[part], firsts[part + 1]) for part in spanned)


def _repeated(names: list[str]) -> list[str]:
    return [name for index, name in enumerate(names) if name in names[:index]]
