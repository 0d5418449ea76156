"""`gossamer slices`: what a network is made of, who shares which cells of it, in numbers and as a picture."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...models import READY
from ..errors import ConfigError
from . import console
from .console import Output, command, load_torch

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes

    from ...models import SlicedNetwork, SliceSpec, Slicing

CLASSES = 10
NETWORK_HELP = (
    f"A ready network ({', '.join(READY)}), a layout (64=32=10), module:function, or a config file."
)


@command("slices")
def slices_command(
    module: Annotated[str, typer.Argument(help=NETWORK_HELP)],
    *,
    give: list[str] | None = None,
    depends: list[str] | None = None,
    shape: Annotated[str | None, typer.Option("--input")] = None,
    option: list[str] | None = None,
    buffers: str = "average",
    peer: Annotated[int, typer.Option(min=0)] = 0,
    output: Output,
) -> None:
    """Print the parts of a network, whose cells they are and who averages what, and draw it.

    A module that cannot be traced is an error that says which call is to blame.

    Args:
        give: MODEL=SHARE or MODEL=LAYOUT: global=0.8, 'global=*:0.8,head:0', group=0-8-10; repeat for
            more. global=0.8 if left out.
        depends: MODEL=OTHER: the first depends on the second.
        shape: The shape of one sample, as in 3x32x32.
        option: An argument of the network's function: hidden=64, 'widths=[8, 16]'.
        buffers: Batch statistics: average, local or recompute.
        peer: Of a config: whose network to show.
    """
    if module.endswith(".toml"):
        given = {"--give": give, "--depends": depends, "--input": shape, "--option": option}
        if extra := [name for name, value in given.items() if value]:
            raise ConfigError(f"{extra[0]}: the config {module} says that already; leave it out")
        network, name = _of_config(Path(module), peer)
    else:
        network, name = _of_name(module, give or ["global=0.8"], depends, shape, option, buffers)
    file = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    results = output.results(f"results/slices/{file}", "slices")
    table = part_table(network.slicing)
    table.loc["all"] = table.sum()
    rows = [[part, *row] for part, row in zip(table.index, table.to_numpy(), strict=True)]
    console.table(f"{name}: {len(network.flat):,} values", ["part", *table.columns], rows)
    with results.begun() as folder:
        title = f"{name}, {len(network.flat):,} values"
        console.print_written(draw_slices(network.slicing, folder / file, title))


def _of_config(path: Path, peer: int) -> tuple[SlicedNetwork, str]:
    from ..config.tables import load_config

    config = load_config(path)
    if peer >= config.peers:
        raise ConfigError(f"--peer {peer}: peers of {path} are 0 to {config.peers - 1}")
    load_torch()
    from ..build import Swarm

    return Swarm(config, str(path)).member(peer).network, config.name


def _of_name(
    name: str,
    give: Sequence[str],
    depends: Sequence[str] | None,
    shape: str | None,
    option: Sequence[str] | None,
    buffers: str,
) -> tuple[SlicedNetwork, str]:
    slices = {model: _spec(text, f"--give {model}") for model, text in _pairs(give, "--give")}
    order: dict[str, list[str]] = {model: [] for model in slices}
    for model, other in _pairs(depends or (), "--depends"):
        order.setdefault(model, []).append(other)
    load_torch()
    import torch

    from ...models import ModelGraph, SlicedNetwork, discover, mlp
    from ..networks import example_input, find_function, make_module, oriented

    if "=" in name:
        if shape or option:
            raise ConfigError("--input and --option: a layout says it all; leave them out")
        example, built = None, mlp(name)
    else:
        usual = READY[name].sample if name in READY else (3, 32, 32)
        size = _shape(shape) if shape else usual
        options = {key: _value(text, key) for key, text in _pairs(option or (), "--option")}
        built = make_module(name, find_function(name), size, CLASSES, options)
        example = oriented(name, example_input(size))
    torch.manual_seed(0)
    network = SlicedNetwork(
        built,
        slices,
        graph=ModelGraph(order),
        peer="peer",
        rest="local",
        anatomy=discover(built, example),
        buffers=buffers,  # type: ignore[arg-type]
    )
    return network, name


def _pairs(texts: Sequence[str], option: str) -> list[tuple[str, str]]:
    found = [text.partition("=") for text in texts]
    for text, (name, sign, value) in zip(texts, found, strict=True):
        if not (name and sign and value):
            raise ConfigError(f"{option} {text!r}: write NAME=VALUE")
    return [(name.strip(), value.strip()) for name, _, value in found]


def _spec(text: str, option: str) -> SliceSpec:
    """`0.8`, `*:0.8,head:0` or a layout."""
    if ":" in text:
        entries = (entry.rpartition(":") for entry in text.split(","))
        return {part.strip(): _number(share, option) for part, _, share in entries}
    return text if "-" in text else _number(text, option)


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"{option}: {text.strip()!r} is not a share; write 0.8, '*:0.8,head:0', or a layout such as "
            "64-24-10"
        ) from None


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.replace("×", "x").split("x")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise ConfigError(f"--input {text!r}: write the shape of one sample, as in 3x32x32")
    return tuple(int(size) for size in sizes)


def _value(text: str, name: str) -> Any:
    """A value as a config would have it; what is no number, list or table is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if re.fullmatch(r"[A-Za-z][\w.-]*", text):
            return text
        raise ConfigError(f"--option {name}={text}: {text!r} is not a value of TOML") from None


# --- what a slicing says, in numbers ----------------------------------------------------------------


def part_table(slicing: Slicing) -> pd.DataFrame:
    """A row for every part: its cells by model, its values (parameters, averaged statistics) by owner.

    A parameter between two parts, such as a layer's weights, counts at the part of its first axis: the
    one that it leads to.
    """
    import numpy as np
    import pandas as pd

    anatomy, part_of = slicing.anatomy, _part_of_cells(slicing)
    starts = [anatomy.offsets[one.name] for one in anatomy.parameters]
    cells = [
        next(_axes(one.axes))[0] if one.cell is None else one.cell for one in anatomy.parameters
    ]

    def count(coordinates: np.ndarray) -> np.ndarray:
        parameters = np.searchsorted(starts, coordinates, side="right") - 1
        return np.bincount(part_of[cells][parameters], minlength=len(anatomy.parts))

    columns = {"cells": [part.cells for part in anatomy.parts]}
    columns |= {f"of {model}": list(map(len, slicing.cells[model])) for model in slicing.models}
    columns |= {f"values of {one}": count(slicing.coordinates(one)) for one in slicing.owners}
    columns["private"] = count(slicing.private)
    return pd.DataFrame(columns, index=pd.Index([part.name for part in anatomy.parts]))


def links(slicing: Slicing) -> dict[tuple[int, int], bool]:
    """Pairs of parts between which there are parameters, the earlier part first; a part may be joined to
    itself. The value is True if nobody averages any of these parameters."""
    import numpy as np

    part_of = _part_of_cells(slicing)
    found: dict[tuple[int, int], bool] = {}
    for parameter in slicing.anatomy.parameters:
        spans = [np.unique(part_of[axis]).tolist() for axis in _axes(parameter.axes)]
        for one, other in combinations(spans, 2):
            for a, b in product(one, other):
                pair = (min(a, b), max(a, b))
                found[pair] = found.get(pair, True) and parameter.private
    return dict(sorted(found.items()))


def _part_of_cells(slicing: Slicing) -> np.ndarray:
    import numpy as np

    parts = slicing.anatomy.parts
    return np.repeat(np.arange(len(parts)), [part.cells for part in parts])


def _axes(axes: tuple[np.ndarray | None, ...]) -> Iterator[np.ndarray]:
    return (axis for axis in axes if axis is not None)


# --- the picture ------------------------------------------------------------------------------------

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
    from ..study.figures import canvas, save  # matplotlib takes a second

    rows, left_out = drawn_parts(len(slicing.anatomy.parts))
    caption = (
        "Rows are parts, with the number of their cells. Cells have the colour of their model, edges that "
        "of the model that averages them; what stays private is grey. Arcs join rows that are not "
        "neighbours, and parts with themselves."
    )
    if any(part.cells > MOST_CELLS for part in slicing.anatomy.parts):
        caption += (
            f" Of parts with more than {MOST_CELLS} cells some are drawn, models in proportion."
        )
    if left_out:
        caption += f" {left_out} parts are not drawn."
    figure, axes = canvas(caption, width=8.5, height=0.62 * (len(rows) + bool(left_out)) + 1.1)
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=11)
    half = len(rows) // 2
    heights = {part: -float(row + (left_out and row >= half)) for row, part in enumerate(rows)}
    if left_out:
        text = f"… {left_out} more parts …"
        axes.text(0.5, -half, text, ha="center", va="center", fontsize=8, color="#555555")
    _Picture(slicing, axes, heights).draw()
    return save(figure, path)


def drawn_parts(parts: int) -> tuple[list[int], int]:
    """The parts that are drawn, and how many are not."""
    if parts <= MOST_PARTS:
        return list(range(parts)), 0
    half = MOST_PARTS // 2
    return [*range(half), *range(parts - half, parts)], parts - 2 * half


def drawn_cells(slicing: Slicing, part: int) -> list[str]:
    """The model of every cell that is drawn of a part, models side by side."""
    counts = {model: len(slicing.cells[model][part]) for model in slicing.models}
    total = sum(counts.values())
    if total > MOST_CELLS:
        counts = {m: max(1, round(MOST_CELLS * n / total)) for m, n in counts.items() if n}
    return [model for model, count in counts.items() for _ in range(count)]


class _Picture:
    """A slicing on axes. heights: where the rows of those parts are that are drawn."""

    def __init__(self, slicing: Slicing, axes: Axes, heights: dict[int, float]):
        from ..study.figures import COLOURS

        self._slicing, self._axes, self._heights = slicing, axes, heights
        self._cells = {part: drawn_cells(slicing, part) for part in heights}
        owners = dict.fromkeys([*slicing.models, *slicing.owners])
        self._colours = {
            owner: COLOURS[index % (len(COLOURS) - 1)] for index, owner in enumerate(owners)
        } | {"": PRIVATE}

    def draw(self) -> None:
        """Draw edges and arcs, the cells over them, and a legend."""
        arcs = 0
        for (first, second), private in links(self._slicing).items():
            if first in self._heights and second in self._heights:
                if self._heights[first] - self._heights[second] == 1:
                    self._draw_edges(first, second, private)
                else:
                    arcs += 1
                    self._draw_arcs(first, second, private, lane=arcs)
        for part in self._heights:
            self._draw_cells(part)
        self._axes.set_xlim(-0.3, 1.36 if arcs else 1.08)
        self._axes.set_ylim(min(self._heights.values()) - 0.5, 0.5)
        self._draw_legend()

    def _owner(self, one: str, other: str, private: bool) -> str:
        """Who averages a parameter between cells of two models; an empty name for nobody."""
        slicing = self._slicing
        return "" if private else slicing.graph.owner((one, other), cross=slicing.cross) or ""

    def _places(self, part: int) -> np.ndarray:
        """Where the cells of a row stand; rows of few cells are narrower, as in the paper."""
        import numpy as np

        count = len(self._cells[part])
        return 0.5 + min(1.0, 0.12 * (count - 1)) * np.linspace(-0.5, 0.5, count)

    def _draw_edges(self, first: int, second: int, private: bool) -> None:
        from matplotlib.collections import LineCollection

        lines: dict[str, list[list[tuple[float, float]]]] = {}
        tops = zip(self._places(first), self._cells[first], strict=True)
        bottoms = zip(self._places(second), self._cells[second], strict=True)
        for (x, model), (below, other) in product(tops, bottoms):
            ends = [(float(x), self._heights[first]), (float(below), self._heights[second])]
            lines.setdefault(self._owner(model, other, private), []).append(ends)
        for owner in sorted(lines):  # private ones, whose name is empty, first: at the bottom
            colour = self._colours[owner]
            drawn = LineCollection(
                lines[owner], colors=colour, linewidths=0.7, alpha=0.45, zorder=1
            )
            self._axes.add_collection(drawn)

    def _draw_arcs(self, first: int, second: int, private: bool, lane: int) -> None:
        """Half an ellipse per owner to the right of the rows; longer ones reach farther out."""
        import numpy as np

        cells = self._slicing.cells
        owners = {
            self._owner(one, other, private)
            for one, other in product(self._slicing.models, repeat=2)
            if len(cells[one][first]) and len(cells[other][second])
        }
        top, bottom = self._heights[first], self._heights[second]
        reach = 0.045 + 0.026 * min(top - bottom, 6.0) + 0.006 * (lane % 4)
        half = (top - bottom) / 2 or 0.18  # a part with itself
        angles = np.linspace(0, np.pi, 40)
        y = (top + bottom) / 2 + half * np.cos(angles)
        for index, owner in enumerate(sorted(owners)):
            x = 1.04 + (reach + 0.009 * index) * np.sin(angles)
            self._axes.plot(x, y, color=self._colours[owner], linewidth=1.1, alpha=0.8)

    def _draw_cells(self, part: int) -> None:
        one, height = self._slicing.anatomy.parts[part], self._heights[part]
        x, colours = self._places(part), [self._colours[model] for model in self._cells[part]]
        self._axes.scatter(
            x, [height] * len(x), s=70, c=colours, edgecolors="white", linewidths=0.8, zorder=3
        )
        name = one.name if len(one.name) <= 26 else f"…{one.name[-25:]}"
        text = f"{name} ({one.cells:,})"
        self._axes.text(-0.04, height, text, ha="right", va="center", fontsize=8, color="#222222")

    def _draw_legend(self) -> None:
        from matplotlib.lines import Line2D

        handles = [
            Line2D(
                [], [], color=colour, linewidth=1.4, label=owner or "private",
                marker="o" if owner in self._slicing.models else None,
            )
            for owner, colour in self._colours.items()
            if owner or len(self._slicing.private)
        ]  # fmt: skip
        self._axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0),
            ncols=min(len(handles), 5), frameon=False, fontsize=8.5,
        )  # fmt: skip
