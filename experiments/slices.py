"""What a slicing says, in numbers: who has which cells of every part, and who averages its values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..models import Slicing


@dataclass(frozen=True)
class PartRow:
    """One part: its cells by model, and its values (parameters, averaged statistics) by owner.

    A parameter between two parts, such as a layer's weights, counts at the part of its first axis: the
    one that it leads to.
    """

    name: str
    cells: int
    given: dict[str, int]
    owned: dict[str, int]
    private: int


@dataclass(frozen=True)
class Link:
    """Two parts (or one, twice) between which there are parameters; `private` if nobody averages any."""

    first: int
    second: int
    private: bool


def part_rows(slicing: Slicing) -> list[PartRow]:
    """A row for every part, in the network's order."""
    anatomy = slicing.anatomy
    part_of = _part_of_cells(slicing)
    starts = np.array([anatomy.offsets[one.name] for one in anatomy.parameters])
    home = np.array(
        [
            part_of[one.cell if one.cell is not None else next(_axes(one.axes))[0]]
            for one in anatomy.parameters
        ]
    )

    def count(coordinates: np.ndarray) -> np.ndarray:
        parameters = np.searchsorted(starts, coordinates, side="right") - 1
        return np.bincount(home[parameters], minlength=len(anatomy.parts))

    owned = {owner: count(slicing.coordinates(owner)) for owner in slicing.owners}
    private = count(slicing.private)
    return [
        PartRow(
            part.name,
            part.cells,
            {model: len(slicing.cells[model][index]) for model in slicing.models},
            {owner: int(counts[index]) for owner, counts in owned.items()},
            int(private[index]),
        )
        for index, part in enumerate(anatomy.parts)
    ]


def links(slicing: Slicing) -> list[Link]:
    """Which parts are joined by parameters, each pair once, the earlier part first."""
    part_of = _part_of_cells(slicing)
    found: dict[tuple[int, int], bool] = {}
    for parameter in slicing.anatomy.parameters:
        spans = [np.unique(part_of[axis]).tolist() for axis in _axes(parameter.axes)]
        for index, one in enumerate(spans):
            for other in spans[index + 1 :]:
                for pair in ((min(a, b), max(a, b)) for a in one for b in other):
                    found[pair] = found.get(pair, True) and parameter.private
    return [Link(*pair, private) for pair, private in sorted(found.items())]


def table(slicing: Slicing) -> tuple[list[str], list[list[str]]]:
    """Header and rows for people, the sums last."""
    rows = part_rows(slicing)
    header = [
        "part", "cells", *(f"of {model}" for model in slicing.models),
        *(f"values of {owner}" for owner in slicing.owners), "private",
    ]  # fmt: skip
    numbers = [[row.cells, *row.given.values(), *row.owned.values(), row.private] for row in rows]
    numbers.append([sum(column) for column in zip(*numbers, strict=True)])
    names = [*(row.name for row in rows), "all"]
    return header, [[name, *map(str, some)] for name, some in zip(names, numbers, strict=True)]


def _part_of_cells(slicing: Slicing) -> np.ndarray:
    parts = slicing.anatomy.parts
    return np.repeat(np.arange(len(parts)), [part.cells for part in parts])


def _axes(axes: tuple[np.ndarray | None, ...]) -> Iterator[np.ndarray]:
    return (axis for axis in axes if axis is not None)
