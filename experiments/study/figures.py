"""Helpers to draw and save figures with matplotlib, without a display."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..results import read_records, write_bytes

if TYPE_CHECKING:
    from . import Frame

# Okabe and Ito's colours, which colour-blind readers can distinguish, and markers for black-and-white print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY_BLUE, BLACK, GREY = COLOURS
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def draw_lines(
    path: Path,
    frame: Frame,
    columns: Sequence[str],
    *,
    title: str,
    x_label: str,
    y_label: str = "accuracy",
    caption: str = "",
    legend: str | None = "",
    ticks: Mapping[float, str] | None = None,
) -> list[Path]:
    """Draw the lines of a table into one figure, saved as PNG and SVG; returns the files.

    columns: the names of the table's columns, in the order of the parameters of `plot_lines`.
    legend: its title; None draws no legend, as of a single line.
    """
    figure, axes = canvas(caption)
    plot_lines(axes, frame, *columns)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    if ticks:
        axes.set_xticks(list(ticks), list(ticks.values()))
    if legend is not None:
        place_legend(axes, legend)
    return save(figure, path)


def plot_lines(
    axes: Axes, frame: Frame, label: str, x: str, y: str, low: str = "", high: str = ""
) -> None:
    """Plot one line for every value in the column `label`, in the order of the table.

    x, y: the columns of coordinates; a row without x is a dashed horizontal line.
    low, high: the columns with the ends of error bars, if any.
    """
    for index, (name, rows) in enumerate(frame.groupby(label, sort=False)):
        for height in rows.loc[rows[x].isna(), y]:
            axes.axhline(height, color=COLOURS[index % len(COLOURS)], linestyle="--", linewidth=1)
        rows = rows.dropna(subset=[x]).sort_values(x, kind="stable")
        bars = [rows[y] - rows[low], rows[high] - rows[y]] if low else []
        axes.errorbar(
            rows[x], rows[y], yerr=[bar.clip(0) for bar in bars] or None, label=str(name),
            capsize=2.5, linewidth=1.6, markersize=5,
            color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)],
            linestyle="-" if index < len(COLOURS) else ":",
        )  # fmt: skip


def canvas(caption: str = "", width: float = 7.5, height: float = 4.6) -> tuple[Figure, Axes]:
    """Return a figure with one set of axes, a light grid and a caption below, wrapped to fit."""
    figure, ((axes,),) = panels(1, 1, caption, width, height)
    return figure, axes


def panels(
    rows: int,
    columns: int,
    caption: str = "",
    width: float = 7.5,
    height: float = 4.6,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with rows of axes; the caption is added below `width` × `height` inches of axes."""
    letters = int(14.5 * width)  # as many as fit into a line of the caption
    caption = "\n".join(textwrap.fill(line, letters) for line in caption.split("\n"))
    figure = Figure(
        figsize=(width, height + 0.17 * (caption.count("\n") + 1)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    for axes in grid.flat:
        tidy(axes)
    if caption:
        figure.supxlabel(caption, fontsize=8, color="#444444", x=0.02, ha="left")
    return figure, [list(row) for row in grid]


def tidy(axes: Axes) -> None:
    """Give axes a light grid, and remove the frame at the top and right."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def whole_rounds(axes: Axes) -> None:
    """Give a horizontal axis of rounds ticks at whole numbers only."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def band(
    axes: Axes, curve: Mapping[Any, Sequence[float]], colour: str = BLUE, label: str = ""
) -> None:
    """Draw a line for the mean of many peers, and a band from the worst peer to the best.

    curve: the values of all peers by x.
    """
    x = sorted(curve)
    worst, best = [min(curve[i]) for i in x], [max(curve[i]) for i in x]
    axes.fill_between(x, worst, best, color=colour, alpha=0.15, linewidth=0)
    mean = [sum(curve[i]) / len(curve[i]) for i in x]
    axes.plot(x, mean, color=colour, linewidth=2, label=label or None)


MOST_METRICS = 12
"""The most metrics in one picture."""


def draw_metrics(folder: Path, title: str, x_label: str = "round") -> list[Path]:
    """Draw the named metrics in a run's metrics.jsonl, one panel for each; nothing if it has none."""
    curves: dict[str, dict[float, dict[str, float]]] = {}
    for record in read_records(folder / "metrics.jsonl"):
        x = record["round"] if x_label == "round" else record["time"]
        for name, value in record.get("metrics", {}).items():
            if isfinite(value):
                curves.setdefault(name, {}).setdefault(x, {})[record["peer"]] = value
    names = sorted(curves)[:MOST_METRICS]
    if not names:
        return []
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    caption = f"{title}: line: mean over peers, band: lowest to highest peer"
    figure, grid = panels(rows, columns, caption, 3.4 * columns, 2.6 * rows, sharex=True)
    all_axes = [axes for row in grid for axes in row]
    for name, axes in zip(names, all_axes, strict=False):
        band(axes, {x: list(values.values()) for x, values in curves[name].items()})
        axes.set_title(name, fontsize=10)
        if x_label == "round":
            whole_rounds(axes)
    for axes in all_axes[len(names) :]:
        axes.set_visible(False)
    for axes in all_axes[max(len(names) - columns, 0) : len(names)]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(x_label)
    return save(figure, folder / "metrics")


def place_legend(axes: Axes, title: str = "") -> None:
    """Put a legend to the right of the axes, where it hides nothing."""
    axes.legend(
        title=title, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9
    )


def save(figure: Figure, path: Path, dpi: int = 150) -> list[Path]:
    """Write PNG, with `dpi` pixels per inch, and SVG.

    The SVG has no date and fixed ids, so that equal figures give equal files; it is dark where the reader
    prefers that. The PNG has a palette, which makes it a third as large.
    """
    # not with_suffix: the name may contain dots
    files = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
    svg, pixels = io.BytesIO(), FigureCanvasAgg(figure)
    figure.set_dpi(dpi)
    pixels.draw()  # not savefig, which would draw once more to lay the figure out
    figure.set_layout_engine(None)  # laid out already
    with mpl.rc_context({"svg.hashsalt": "gossamer"}):
        figure.savefig(svg, format="svg", metadata={"Date": None})
    write_bytes(files[0], with_palette(pixels))
    write_bytes(files[1], svg.getvalue().replace(b"<defs>", b"<defs>" + _DARK_STYLE, 1))
    return files


_DARK_STYLE = (
    b"<style>@media (prefers-color-scheme: dark) "
    b"{svg {filter: invert(0.93) hue-rotate(180deg)}}</style>"
)
"""Inverts lightness and keeps hues: dark grey behind light letters, and lines in their colours."""


def with_palette(drawn: FigureCanvasAgg) -> bytes:
    """Return what was drawn as a PNG with at most 256 colours."""
    from PIL import Image

    png = io.BytesIO()
    image = Image.fromarray(np.asarray(drawn.buffer_rgba()))
    quantized = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    quantized.save(png, "png", optimize=True)
    return png.getvalue()
