"""What a reproduction is: a grid of configs whose results become a table and the paper's figure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..config.tables import Config
from ..results import Record
from .figures import Line
from .sweep_outcome import outcomes


@dataclass(frozen=True)
class Cell:
    """One run: where it goes in the figure, and its config (seed included)."""

    line: str
    x: float
    config: Config

    @property
    def key(self) -> str:
        """Names the run by all that decides its result, so that finished runs are not run again."""
        text = f"{self.line}|{self.x}|{self.config.model_dump_json(exclude_defaults=True)}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Study:
    """A figure of a paper.

    `cells(quick, seed)` lists the runs of one seed: the small size on the built-in digits, or the
    paper's own. `caption(quick)` says what a reader of the figure must know.
    """

    name: str
    title: str
    section: str
    x_label: str
    legend: str
    runs: int
    cells: Callable[[bool, int], Sequence[Cell]]
    caption: Callable[[bool], str]
    quick_runs: int = 3


def run_cells(cells: list[Cell], threads: int = 1) -> list[Record]:
    """Run configs that can share a stack: for each the mean over peers of the last round's accuracy."""
    found = outcomes([cell.config for cell in cells], ["config"] * len(cells), threads)
    return [
        {
            "key": cell.key,
            "line": cell.line,
            "x": cell.x,
            "seed": cell.config.seed,
            "accuracy": one.accuracy,
            "worst": one.worst,
        }
        for cell, one in zip(cells, found, strict=True)
    ]


def run_cell(cell: Cell) -> Record:
    """Run one config."""
    return run_cells([cell])[0]


@dataclass(frozen=True)
class Point:
    """The runs behind one mark of a figure: median, and second and third quintile as in the paper."""

    line: str
    x: float
    runs: int
    mean: float
    median: float
    low: float
    high: float


def points(records: Sequence[Record]) -> list[Point]:
    """Summarise records by line and x, in the order in which lines first appear."""
    groups: dict[tuple[str, float], list[float]] = {}
    for record in records:
        groups.setdefault((record["line"], record["x"]), []).append(record["accuracy"])
    order = list(dict.fromkeys(line for line, _ in groups))
    found = []
    for (line, x), values in sorted(groups.items(), key=lambda g: (order.index(g[0][0]), g[0][1])):
        low, median, high = np.quantile(values, [0.4, 0.5, 0.6])
        found.append(
            Point(
                line, x, len(values), float(np.mean(values)), float(median), float(low), float(high)
            )
        )
    return found


def lines(summary: Sequence[Point]) -> list[Line]:
    """The figure's curves."""
    found = []
    for label in dict.fromkeys(point.line for point in summary):
        mine = [point for point in summary if point.line == label]
        found.append(
            Line(
                label,
                [p.x for p in mine],
                [p.median for p in mine],
                [p.low for p in mine],
                [p.high for p in mine],
            )
        )
    return found
