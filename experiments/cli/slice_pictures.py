"""What a slicing says, in numbers: who has which cells of every part, and who averages its values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve

from ...models import Slicing
from ..study.figures import COLOURS, canvas, save


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


MOST_CELLS = 16
"""Cells drawn of one part; of wider parts every model is shown in proportion."""
MOST_PARTS = 40
"""Parts drawn; of deeper networks the first and the last."""
PRIVATE = "#B8B8B8"


def draw_slices(slicing: Slicing, path: Path, title: str) -> list[Path]:
    """Draw a sliced network as PNG and SVG; returns the files.

    Parameters between neighbouring rows are lines between cells; between rows that are not neighbours,
    and inside one part (recurrent weights, residual branches), they are arcs beside the rows, one for
    every owner.
    """
    rows, left_out = _rows(len(slicing.anatomy.parts))
    caption = _caption(slicing, left_out)
    height = 0.62 * (len(rows) + bool(left_out)) + 1.1
    figure, axes = canvas(caption, width=8.5, height=height)
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=11)
    colours = _colours(slicing)
    heights = {part: -float(row) for row, part in enumerate(rows)}
    if left_out:
        half = len(rows) // 2
        heights |= {part: -float(row + 1) for row, part in enumerate(rows) if row >= half}
        text = f"… {left_out} more parts …"
        axes.text(0.5, -half, text, ha="center", va="center", fontsize=8, color="#555555")
    shown = {part: _shown(slicing, part) for part in rows}
    joined = [one for one in links(slicing) if one.first in heights and one.second in heights]
    beside = 0
    for link in joined:
        apart = abs(heights[link.first] - heights[link.second])
        if apart == 1 and link.first != link.second:
            _edges(axes, slicing, link, shown, heights, colours)
        else:
            beside += 1
            _arcs(axes, slicing, link, heights, colours, lane=beside)
    for part in rows:
        _cells(axes, slicing, part, shown[part], heights[part], colours)
    axes.set_xlim(-0.3, 1.08 + (0.28 if beside else 0.0))
    lowest = min(heights.values())
    axes.set_ylim(lowest - 0.5, 0.5)
    _legend(axes, slicing, colours)
    return save(figure, path)


def _rows(parts: int) -> tuple[list[int], int]:
    """The parts that are drawn, and how many are not."""
    if parts <= MOST_PARTS:
        return list(range(parts)), 0
    half = MOST_PARTS // 2
    return [*range(half), *range(parts - half, parts)], parts - 2 * half


def _shown(slicing: Slicing, part: int) -> list[str]:
    """The model of every cell that is drawn of a part, models side by side."""
    counts = {m: len(slicing.cells[m][part]) for m in slicing.models if len(slicing.cells[m][part])}
    total = sum(counts.values())
    if total > MOST_CELLS:
        counts = {m: max(1, round(MOST_CELLS * n / total)) for m, n in counts.items()}
    return [model for model, count in counts.items() for _ in range(count)]


def _places(count: int) -> np.ndarray:
    """Where the cells of a row stand; rows of few cells are narrower, as in the paper."""
    width = min(1.0, 0.12 * (count - 1)) if count > 1 else 0.0
    return 0.5 + width * np.linspace(-0.5, 0.5, count)


def _edges(
    axes: Axes,
    slicing: Slicing,
    link: Link,
    shown: dict[int, list[str]],
    heights: dict[int, float],
    colours: dict[str, str],
) -> None:
    lines: dict[str, list[list[tuple[float, float]]]] = {}
    top, bottom = shown[link.first], shown[link.second]
    for x, model in zip(_places(len(top)), top, strict=True):
        for below, other in zip(_places(len(bottom)), bottom, strict=True):
            owner = _owner(slicing, link, model, other)
            ends = [(float(x), heights[link.first]), (float(below), heights[link.second])]
            lines.setdefault(owner, []).append(ends)
    for owner in sorted(lines):  # private ones, whose name is empty, first: at the bottom
        axes.add_collection(
            LineCollection(
                lines[owner], colors=colours[owner], linewidths=0.7, alpha=0.45, zorder=1
            )
        )


def _arcs(
    axes: Axes,
    slicing: Slicing,
    link: Link,
    heights: dict[int, float],
    colours: dict[str, str],
    lane: int,
) -> None:
    """One arc per owner to the right of the rows; longer ones reach farther out."""
    pairs = {
        _owner(slicing, link, one, other)
        for one in slicing.models
        for other in slicing.models
        if len(slicing.cells[one][link.first]) and len(slicing.cells[other][link.second])
    }
    top, bottom = heights[link.first], heights[link.second]
    reach = 0.06 + 0.035 * min(top - bottom, 6.0) + 0.008 * (lane % 4)
    if link.first == link.second:
        top, bottom = top + 0.18, bottom - 0.18
    for index, owner in enumerate(sorted(pairs)):
        far = 1.04 + reach + 0.012 * index
        curve = Curve(
            [(1.04, top), (far, top), (far, bottom), (1.04, bottom)],
            [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4],
        )
        axes.add_patch(
            PathPatch(curve, fill=False, edgecolor=colours[owner], linewidth=1.1, alpha=0.8)
        )


def _cells(
    axes: Axes,
    slicing: Slicing,
    part: int,
    shown: list[str],
    height: float,
    colours: dict[str, str],
) -> None:
    one = slicing.anatomy.parts[part]
    x = _places(len(shown))
    axes.scatter(
        x, np.full(len(x), height), s=70, c=[colours[model] for model in shown], edgecolors="white",
        linewidths=0.8, zorder=3,
    )  # fmt: skip
    name = one.name if len(one.name) <= 26 else f"…{one.name[-25:]}"
    text = f"{name} ({one.cells:,})"
    axes.text(-0.04, height, text, ha="right", va="center", fontsize=8, color="#222222")


def _owner(slicing: Slicing, link: Link, one: str, other: str) -> str:
    """Who averages a parameter between cells of two models; an empty name for nobody."""
    if link.private:
        return ""
    return slicing.graph.owner((one, other), cross=slicing.cross) or ""


def _colours(slicing: Slicing) -> dict[str, str]:
    owners = [*slicing.models, *(one for one in slicing.owners if one not in slicing.models)]
    found = {owner: COLOURS[index % (len(COLOURS) - 1)] for index, owner in enumerate(owners)}
    return found | {"": PRIVATE}


def _legend(axes: Axes, slicing: Slicing, colours: dict[str, str]) -> None:
    handles = [
        Line2D(
            [], [], color=colours[owner], linewidth=1.4, label=owner,
            marker="o" if owner in slicing.models else None,
        )
        for owner in colours
        if owner
    ]  # fmt: skip
    if len(slicing.private):
        handles.append(Line2D([], [], color=PRIVATE, linewidth=1.4, label="private"))
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=min(len(handles), 5),
        frameon=False, fontsize=8.5,
    )  # fmt: skip


def _caption(slicing: Slicing, left_out: int) -> str:
    parts = slicing.anatomy.parts
    text = "Rows are parts, with the number of their cells. Cells have the colour of their model, edges that "
    text += "of the model that averages them; what stays private is grey."
    text += " Arcs join rows that are not neighbours, and parts with themselves."
    if any(part.cells > MOST_CELLS for part in parts):
        text += f" Of parts with more than {MOST_CELLS} cells some are drawn, models in proportion."
    if left_out:
        text += f" {left_out} parts are not drawn."
    return text
