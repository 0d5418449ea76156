"""`gossamer slices`: prints and draws the parts of a network, and which partial model has which cells.

A part is a set of interchangeable cells (neurons, channels, hidden units): usually a layer; the inputs are a
part, too. In a network layout `=` joins the numbers of cells of all parts: 64=32=10 is a perceptron with 64
inputs, 32 hidden cells and 10 outputs. In a slice layout `-` joins the numbers of cells that a partial model
has of these parts: 64-24-10.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...models import READY_NETWORKS
from ..errors import ConfigError
from . import console
from .console import Output, command, load_torch

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes

    from ...models import SlicedNetwork, SliceSpec, Slicing

CLASSES = 10
"""The number of outputs of a network that is not from a config, which has no data set to count classes."""
NETWORK_HELP = (
    f"A ready network ({', '.join(READY_NETWORKS)}), a network layout (64=32=10), module:function, or "
    "a config file."
)


@command("slices", slow=True)
def slices_command(
    module: Annotated[str, typer.Argument(help=NETWORK_HELP)],
    *,
    give: list[str] | None = None,
    depends: list[str] | None = None,
    shape: Annotated[str | None, typer.Option("--input")] = None,
    option: list[str] | None = None,
    buffers: str | None = None,
    peer: Annotated[int | None, typer.Option(min=0)] = None,
    output: Output,
) -> None:
    """Print and draw a network's layers, and how many of their cells each partial model has and averages.

    A network that cannot be traced is an error that names the call at fault.

    Args:
        give: The cells of a partial model, MODEL=SHARE or MODEL=LAYOUT: global=0.8,
            'global=*:0.8,head:0', or a slice layout (cells per part), group=0-8-10; repeat for more models.
            global=0.8 if left out.
        depends: MODEL=OTHER: the first model depends on the second: weights between the two are then
            averaged by the first; repeat for more.
        shape: The shape of one sample, as in 3x32x32.
        option: An argument of the network's function: hidden=64, 'widths=[8, 16]'; repeat for more.
        buffers: What happens to the statistics of batch norm: average (the default), local or recompute.
        peer: With a config: the number of the peer whose network is shown, 0 if left out.
    """
    if module.endswith(".toml"):
        options = {"--give": give, "--depends": depends, "--input": shape, "--option": option}
        options["--buffers"] = buffers
        if extra := [name for name, value in options.items() if value]:
            raise ConfigError(f"{extra[0]}: the config {module} sets this already; leave it out")
        from ..config.tables import load_config

        config, peer = load_config(Path(module)), peer or 0
        if peer >= config.peers:
            raise ConfigError(f"--peer {peer}: peers of {module} are 0 to {config.peers - 1}")
        load_torch()
        from ..build import Swarm

        network, name = Swarm(config, module).member(peer).network, config.name
    elif peer is not None:
        raise ConfigError(f"--peer: is for a config, and {module} is none; leave it out")
    else:
        network, name = _network_by_name(module, give, depends, shape, option, buffers), module
    file = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    results = output.results(f"results/slices/{file}", "slices")
    table = part_table(network.slicing)
    table.loc["all"] = table.sum()
    rows = [[part, *row] for part, row in zip(table.index, table.to_numpy(), strict=True)]
    console.table(f"{name}: {len(network.flat):,} values", ["part", *table.columns], rows)
    for part, layers in network.slicing.anatomy.layers.items():
        if others := [layer for layer in layers if not f"{part}.".startswith(f"{layer}.")]:
            shown = f"{', '.join(others[:4])}{f' and {len(others) - 4} more' * (len(others) > 4)}"
            console.say(f"the cells of part {part} are also those of {shown}")
    with results.run_folder() as folder:
        title = f"{name}, {len(network.flat):,} values"
        console.print_written(draw_slices(network.slicing, folder / file, title))


def _network_by_name(
    name: str,
    give: Sequence[str] | None,
    depends: Sequence[str] | None,
    shape: str | None,
    option: Sequence[str] | None,
    buffers: str | None,
) -> SlicedNetwork:
    """Return the network that the command's arguments describe."""
    given = _pairs(give or ["global=0.8"], "--give")
    slices = {model: _spec(text, f"--give {model}") for model, text in given}
    if len(slices) < len(given):
        raise ConfigError("--give: names a model twice; give each model once")
    dependencies: dict[str, list[str]] = {model: [] for model in slices}
    for model, other in _pairs(depends or (), "--depends"):
        dependencies.setdefault(model, []).append(other)
    load_torch()
    from ...models import ModelGraph, SlicedNetwork, discover, mlp
    from ..networks import example_input, find_function, make_module, order_dimensions

    if "=" in name:
        if shape or option:
            raise ConfigError(
                "--input and --option: cannot be used with a network layout; leave them out"
            )
        example, module = None, mlp(name)
    else:
        default_shape = READY_NETWORKS[name].sample_shape if name in READY_NETWORKS else (3, 32, 32)
        sample_shape = _shape(shape) if shape else default_shape
        options = {key: _value(text, key) for key, text in _pairs(option or (), "--option")}
        module = make_module(name, find_function(name), sample_shape, CLASSES, options)
        # Some ready networks expect channels before time steps.
        example = order_dimensions(name, example_input(sample_shape))
    return SlicedNetwork(
        module,
        slices,
        graph=ModelGraph(dependencies),
        peer="peer",
        rest="local",  # the name of the model that gets the cells that --give leaves over
        anatomy=discover(module, example),
        buffers=buffers or "average",  # type: ignore[arg-type]
    )


def _pairs(texts: Sequence[str], option: str) -> list[tuple[str, str]]:
    """Split the values NAME=VALUE of an option that can be repeated."""
    pairs = [text.partition("=") for text in texts]
    for text, (name, sign, value) in zip(texts, pairs, strict=True):
        if not (name and sign and value):
            raise ConfigError(f"{option} {text!r}: write NAME=VALUE")
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def _spec(text: str, option: str) -> SliceSpec:
    """Parse the slice of a model: `0.8`, `*:0.8,head:0` or a slice layout such as `64-24-10`."""
    if ":" in text:
        entries = (entry.rpartition(":") for entry in text.split(","))
        return {part.strip(): _number(share, option) for part, _, share in entries}
    return text if "-" in text else _number(text, option)


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"{option}: {text.strip()!r} is not a share; write 0.8, '*:0.8,head:0', or a slice layout such "
            "as 64-24-10"
        ) from None


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.replace("×", "x").split("x")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise ConfigError(f"--input {text!r}: write the shape of one sample, as in 3x32x32")
    return tuple(int(size) for size in sizes)


def _value(text: str, name: str) -> Any:
    """Parse a value of --option as TOML; a plain word may be written without quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if re.fullmatch(r"[A-Za-z][\w.-]*", text):
            return text
        raise ConfigError(f"--option {name}={text}: {text!r} is not a value of TOML") from None


# --- counts -----------------------------------------------------------------------------------------


def part_table(slicing: Slicing) -> pd.DataFrame:
    """Return a table with a row per part: how many cells each model has, and how many values it averages.

    Values are parameters and, if they are averaged, batch norm's statistics; `anatomy.parameters` has both. A
    parameter between two parts, such as a layer's weight, is counted in the part of its first cell: that of
    the first index on the first axis that runs over cells, usually the layer's outputs.
    """
    import numpy as np
    import pandas as pd

    anatomy = slicing.anatomy
    part_of = np.repeat(np.arange(len(anatomy.parts)), [part.cells for part in anatomy.parts])
    offsets = [anatomy.offsets[parameter.name] for parameter in anatomy.parameters]
    # One cell for each parameter tensor, which decides the part in which the tensor is counted. A scalar has
    # no axes, but a cell.
    cells = [
        next(axis for axis in parameter.axes if axis is not None)[0]
        if parameter.cell is None
        else parameter.cell
        for parameter in anatomy.parameters
    ]

    def count(coordinates: np.ndarray) -> np.ndarray:
        parameters = np.searchsorted(offsets, coordinates, side="right") - 1
        return np.bincount(part_of[cells][parameters], minlength=len(anatomy.parts))

    columns = {"cells": [part.cells for part in anatomy.parts]}
    columns |= {
        f"cells of {model}": list(map(len, slicing.cells[model])) for model in slicing.models
    }
    # Averaged models include, with cross-model averaging, pairs of models such as `green&yellow`.
    columns |= {
        f"values of {name}": count(slicing.coordinates(name)) for name in slicing.averaged_models
    }
    columns["private"] = count(slicing.private)
    return pd.DataFrame(columns, index=pd.Index([part.name for part in anatomy.parts]))


# --- the picture ------------------------------------------------------------------------------------

MAX_DRAWN_CELLS = 16
"""A part with more cells is drawn with about this many, divided among the models in proportion."""
MAX_DRAWN_PARTS = 40
"""The most parts that are drawn; of a deeper network, the first and the last ones."""
PRIVATE_COLOUR = "#B8B8B8"


def draw_slices(slicing: Slicing, path: Path, title: str) -> list[Path]:
    """Draw a sliced network as PNG and SVG; return the files.

    Parameters between two consecutive rows are drawn as lines between cells. All others (residual
    connections, recurrent weights inside one part) are arcs beside the rows, one for each model that averages
    such parameters.
    """
    from ..study.figures import canvas, save  # matplotlib takes a second to import

    rows, left_out = drawn_parts(len(slicing.anatomy.parts))
    caption = (
        "Rows are parts (layers) with the number of their cells. A cell has the colour of its model, a line "
        "that of the model that averages its weight; grey weights are private. Arcs connect rows that are "
        "not consecutive, or a part with itself."
    )
    if any(part.cells > MAX_DRAWN_CELLS for part in slicing.anatomy.parts):
        caption += (
            f" Parts with more than {MAX_DRAWN_CELLS} cells are drawn with about {MAX_DRAWN_CELLS}, divided "
            "among the models in proportion."
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
    NetworkPicture(slicing, axes, heights).draw()
    return save(figure, path)


def drawn_parts(parts: int) -> tuple[list[int], int]:
    """Return the indices of the parts that are drawn, and how many parts are left out."""
    if parts <= MAX_DRAWN_PARTS:
        return list(range(parts)), 0
    half = MAX_DRAWN_PARTS // 2
    return [*range(half), *range(parts - half, parts)], parts - 2 * half


def models_of_drawn_cells(slicing: Slicing, part: int) -> list[str]:
    """Return the model of every cell of a part that is drawn; cells of the same model are adjacent."""
    counts = {model: len(slicing.cells[model][part]) for model in slicing.models}
    total = sum(counts.values())
    if total > MAX_DRAWN_CELLS:
        counts = {m: max(1, round(MAX_DRAWN_CELLS * n / total)) for m, n in counts.items() if n}
    return [model for model, count in counts.items() for _ in range(count)]


class NetworkPicture:
    """Draws a sliced network on matplotlib axes.

    heights: the y coordinate of each part that is drawn. colours: of the models, by name; if left out, they
    are chosen.
    """

    def __init__(
        self,
        slicing: Slicing,
        axes: Axes,
        heights: dict[int, float],
        colours: Mapping[str, str] | None = None,
    ):
        from ..study.figures import COLOURS

        self._slicing, self._axes, self._heights = slicing, axes, heights
        self._cells = {part: models_of_drawn_cells(slicing, part) for part in heights}
        models = dict.fromkeys([*slicing.models, *slicing.averaged_models])
        self._colours = {  # without the last of COLOURS, a grey like that of private weights
            model: COLOURS[index % (len(COLOURS) - 1)] for index, model in enumerate(models)
        } | {"": PRIVATE_COLOUR}
        self._colours |= colours or {}

    def draw(self, *, legend: bool = True) -> None:
        """Draw lines and arcs, the cells above them, and a legend."""
        arcs = 0
        for (first, second), never_averaged in self._slicing.anatomy.connections().items():
            if first in self._heights and second in self._heights:
                if self._heights[first] - self._heights[second] == 1:
                    self._draw_lines(first, second, never_averaged)
                else:
                    arcs += 1
                    self._draw_arcs(first, second, never_averaged, lane=arcs)
        for part in self._heights:
            self._draw_cells(part)
        self._axes.set_xlim(-0.3, 1.36 if arcs else 1.08)
        self._axes.set_ylim(min(self._heights.values()) - 0.5, 0.5)
        if legend:
            self._draw_legend()

    def _averaging_model(self, model: str, other: str, never_averaged: bool) -> str:
        """Return the model that averages weights between cells of two models; "" for private weights.

        With `cross`, weights between unrelated models are averaged too, under the name of the pair.
        """
        slicing = self._slicing
        return (
            ""
            if never_averaged
            else slicing.graph.averaging_model((model, other), cross=slicing.cross) or ""
        )

    def _x_of_cells(self, part: int) -> np.ndarray:
        """Return the x coordinates of a row's cells; rows of few cells are narrower."""
        import numpy as np

        count = len(self._cells[part])
        return 0.5 + min(1.0, 0.12 * (count - 1)) * np.linspace(-0.5, 0.5, count)

    def _draw_lines(self, first: int, second: int, never_averaged: bool) -> None:
        """Draw a line between every cell of a row and every cell of the next row."""
        from matplotlib.collections import LineCollection

        lines: dict[str, list[list[tuple[float, float]]]] = {}
        upper_row = zip(self._x_of_cells(first), self._cells[first], strict=True)
        lower_row = zip(self._x_of_cells(second), self._cells[second], strict=True)
        for (x, model), (lower_x, other) in product(upper_row, lower_row):
            ends = [(float(x), self._heights[first]), (float(lower_x), self._heights[second])]
            averaging_model = self._averaging_model(model, other, never_averaged)
            lines.setdefault(averaging_model, []).append(ends)
        for model in sorted(
            lines
        ):  # private lines, whose model is "", first: the others cover them
            colour = self._colours[model]
            self._axes.add_collection(
                LineCollection(lines[model], colors=colour, linewidths=0.7, alpha=0.45, zorder=1)
            )

    def _draw_arcs(self, first: int, second: int, never_averaged: bool, lane: int) -> None:
        """Draw half an ellipse per averaging model to the right of the rows; longer arcs are wider.

        lane: the number of the arc, by which arcs are shifted so that they do not coincide.
        """
        import numpy as np

        cells = self._slicing.cells
        averaging_models = {
            self._averaging_model(model, other, never_averaged)
            for model, other in product(self._slicing.models, repeat=2)
            if len(cells[model][first]) and len(cells[other][second])
        }
        top, bottom = self._heights[first], self._heights[second]
        width = 0.045 + 0.026 * min(top - bottom, 6.0) + 0.006 * (lane % 4)
        half_height = (top - bottom) / 2 or 0.18  # 0.18 for an arc from a part to itself
        angles = np.linspace(0, np.pi, 40)
        y = (top + bottom) / 2 + half_height * np.cos(angles)
        for index, model in enumerate(sorted(averaging_models)):
            x = 1.04 + (width + 0.009 * index) * np.sin(angles)
            self._axes.plot(x, y, color=self._colours[model], linewidth=1.1, alpha=0.8)

    def _draw_cells(self, index: int) -> None:
        part, height = self._slicing.anatomy.parts[index], self._heights[index]
        x, colours = self._x_of_cells(index), [self._colours[model] for model in self._cells[index]]
        self._axes.scatter(
            x, [height] * len(x), s=70, c=colours, edgecolors="white", linewidths=0.8, zorder=3
        )
        name = part.name if len(part.name) <= 26 else f"…{part.name[-25:]}"
        text = f"{name} ({part.cells:,})"
        self._axes.text(-0.04, height, text, ha="right", va="center", fontsize=8, color="#222222")

    def _draw_legend(self) -> None:
        from matplotlib.lines import Line2D

        handles = [
            Line2D(
                [], [], color=colour, linewidth=1.4, label=model or "private",
                marker="o" if model in self._slicing.models else None,
            )
            for model, colour in self._colours.items()
            if model or len(self._slicing.private)
        ]  # fmt: skip
        self._axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0),
            ncols=min(len(handles), 5), frameon=False, fontsize=8.5,
        )  # fmt: skip
