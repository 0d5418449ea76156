"""The tables and the picture of `gossamer paper networks-…`, from the records of its runs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..results import Record, write_csv
from ..study.figures import COLOURS, MARKERS, save
from .networks_papers import APART, REFERENCES, SCHEMES
from .networks_study import Cell, Setting

Table = tuple[str, list[str], list[list[str]]]
"""Title, header, rows."""

HEADER = [
    "scheme",
    "seeds",
    "shared",
    "own",
    "common",
    "worst",
    *(f"− {name}" for name in REFERENCES),
]


def report(
    folder: Path, title: str, cells: Sequence[Cell], records: Sequence[Record]
) -> tuple[list[Table], list[Path]]:
    """A table for every network, all of them in one file, and the picture of whatever is finished."""
    settings = {cell.line: cell.setting for cell in cells}
    lines = [line for line in settings if any(r["line"] == line for r in records)]
    tables = [_table(line, [r for r in records if r["line"] == line]) for line in lines]
    file = folder / "summary.csv"
    rows = [[line, *row] for line, _, found in tables for row in found]
    write_csv(file, ["network", *tables[0][1]], rows)
    note = caption([settings[line] for line in lines])
    pictures = draw(folder / "figure", title, note, {t[0]: t for t in tables}, records)
    return tables, [file, *pictures]


def paired(
    records: Sequence[Record], scheme: str, reference: str, what: str = "own"
) -> tuple[float, float, int]:
    """Mean of the differences to another scheme seed by seed, its standard error, and how many seeds.

    The error is NaN where there are fewer than two.
    """
    mine = {r["seed"]: r[what] for r in records if r["scheme"] == scheme}
    theirs = {r["seed"]: r[what] for r in records if r["scheme"] == reference}
    found = np.array([mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())])
    if not len(found):
        return float("nan"), float("nan"), 0
    error = found.std(ddof=1) / np.sqrt(len(found)) if len(found) > 1 else float("nan")
    return float(found.mean()), float(error), len(found)


def _table(line: str, records: Sequence[Record]) -> Table:
    schemes = list(dict.fromkeys(r["scheme"] for r in records))
    rows = []
    for scheme in schemes:
        mine = [r for r in records if r["scheme"] == scheme]
        means = [f"{np.mean([r[what] for r in mine]):.3f}" for what in ("own", "common", "worst")]
        differences = [
            "" if scheme == reference else _shown(*paired(records, scheme, reference))
            for reference in REFERENCES
        ]
        rows.append([scheme, str(len(mine)), f"{mine[0]['shared']:.0%}", *means, *differences])
    return line, HEADER, rows


def _shown(mean: float, error: float, seeds: int) -> str:
    if not seeds:
        return ""
    return f"{mean:+.3f}" if np.isnan(error) else f"{mean:+.3f} ± {error:.3f}"


def caption(settings: Sequence[Setting]) -> str:
    """What a reader must know."""
    one = settings[0]
    if one.data == "hapt-raw":
        dealt = (
            f"{one.peers} people of HAPT as peers, each with {one.samples} windows of 128×6 to learn from "
            f"(out of the first half of each activity's recording) and {one.test} out of the second half; "
            "own test: the peer's of these, common test: everybody's"
        )
    else:
        dealt = (
            f"{one.data}: {one.peers} peers, {one.samples} samples on average, classes by Dirichlet "
            f"{one.alpha:g}; common test: {one.test} samples; own test: the same, classes weighted as among "
            "the peer's own samples"
        )
    rates = ", ".join(f"{s.network} {s.rate:g}" for s in settings)
    return (
        f"{dealt}. {one.rounds} rounds of {one.stretch} samples in batches of {one.batch}, plain SGD "
        f"(rate: {rates}), exact averages, all peers the same weight. Means over peers and seeds, bars: "
        "standard error over seeds (seeds differ alike for all: see the paired differences of the table). "
        "Partial: that share of the cells of every hidden part is averaged; outputs are own unless "
        "named; weights between own and shared cells stay with the peer, under either order of dependence. "
        "FedPer: all but the outputs. All peers start equal, own cells too, but 'apart' (dotted) draws own "
        "cells peer by peer. Batch statistics: averaged with full averaging, kept with their norms under "
        "FedBN, taken anew from own samples otherwise."
    )


def draw(
    path: Path, title: str, note: str, tables: dict[str, Table], records: Sequence[Record]
) -> list[Path]:
    """Accuracy over rounds: a row for every network, own test left, common test right."""
    wrapped = textwrap.fill(note, 165)
    height = 3.6 * len(tables) + 0.3 + 0.16 * (wrapped.count("\n") + 1)
    figure = Figure(figsize=(11.5, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(tables), 2, squeeze=False, sharex=True)
    for row, line in zip(grid, tables, strict=True):
        mine = [r for r in records if r["line"] == line]
        for axes, place, what in zip(row, (1, 2), ("own test", "common test"), strict=True):
            _curves(axes, mine, place)
            axes.set(title=f"{line}: {what}", ylabel="accuracy")
    for axes in grid[-1]:
        axes.set_xlabel("rounds")
    fullest = max(
        (row[0] for row in grid), key=lambda axes: len(axes.get_legend_handles_labels()[0])
    )
    figure.legend(
        *fullest.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9
    )
    figure.suptitle(title)
    figure.supxlabel(wrapped, fontsize=8, color="#444444", x=0.02, ha="left")
    return save(figure, path)


def _curves(axes: Axes, records: Sequence[Record], place: int) -> None:
    looks = [scheme.name for scheme in SCHEMES if APART not in scheme.name]
    for scheme in dict.fromkeys(r["scheme"] for r in records):
        curves = np.array([r["by_round"] for r in records if r["scheme"] == scheme])
        if not len(curves):
            continue
        values = curves[:, :, place]
        error = values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else None
        look = looks.index(scheme.removesuffix(APART))  # dotted beside its twin
        axes.errorbar(
            curves[0, :, 0], values.mean(0), yerr=error, label=scheme, capsize=2, linewidth=1.5,
            markersize=5, color=COLOURS[look], marker=MARKERS[look],
            linestyle=":" if APART in scheme else "-",
        )  # fmt: skip
    axes.set_xticks([at for at, *_ in records[0]["by_round"]])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
