"""What a sweep leaves: a table of every combination, as CSV, and a figure along one of its keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..results import Record, write_csv

HEADER = ("runs", "mean", "± sd", "median", "worst peer")


@dataclass(frozen=True)
class Combination:
    """The runs of one combination of values, over seeds.

    `deviation` is the standard deviation over seeds, None of a single run; `worst` is the worst peer of
    the worst run.
    """

    settings: dict[str, Any]
    runs: int
    mean: float
    deviation: float | None
    median: float
    worst: float

    def row(self) -> list[str]:
        """As a line of a table."""
        figures = (self.mean, self.deviation, self.median, self.worst)
        return [
            *(show(value) for value in self.settings.values()),
            f"{self.runs}",
            *("" if figure is None else f"{figure:.4f}" for figure in figures),
        ]


def show(value: Any) -> str:
    """A value as a table shows it."""
    return value if isinstance(value, str) else json.dumps(value)


def combine(records: Sequence[Record]) -> list[Combination]:
    """One entry per combination, in the order in which they first occur."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(_apart_from_seed(record)), []).append(record)
    found = []
    for group in groups.values():
        accuracies = [record["accuracy"] for record in group]
        found.append(
            Combination(
                _apart_from_seed(group[0]),
                len(group),
                mean=float(np.mean(accuracies)),
                deviation=float(np.std(accuracies, ddof=1)) if len(group) > 1 else None,
                median=float(np.median(accuracies)),
                worst=min(record["worst"] for record in group),
            )
        )
    return found


def report(found: Sequence[Combination], out: Path, title: str) -> list[Path]:
    """Write summary.csv and, if a key has several numbers, figure.png and figure.svg along it."""
    if not found:
        return []
    table = out / "summary.csv"
    write_csv(table, [*found[0].settings, *HEADER], (one.row() for one in found))
    axis = _axis(found)
    if axis is None:
        return [table]
    from .figures import Line, draw_lines  # matplotlib takes a second

    lines: dict[str, list[Combination]] = {}
    for one in found:
        rest = {key: value for key, value in one.settings.items() if key != axis}
        label = ", ".join(show(value) for value in rest.values())
        lines.setdefault(label or "all", []).append(one)
    repeated = any(one.deviation is not None for one in found)  # else there are no bars to draw
    for line in lines.values():
        line.sort(key=lambda one: one.settings[axis])
    drawn = [
        Line(
            label,
            [one.settings[axis] for one in line],
            [one.mean for one in line],
            [one.mean - (one.deviation or 0) for one in line] if repeated else (),
            [one.mean + (one.deviation or 0) for one in line] if repeated else (),
        )
        for label, line in lines.items()
    ]
    figures = draw_lines(
        out / "figure",
        drawn,
        title=title,
        x_label=axis,
        legend=", ".join(key for key in found[0].settings if key != axis),
        caption=_caption([one.runs for one in found]),
    )
    return [table, *figures]


def _caption(runs: Sequence[int]) -> str:
    fewest, most = min(runs), max(runs)
    if most == 1:
        return "one run each, so nothing is known of the spread; seeds = 5 in [sweep] repeats them."
    counts = f"{most}" if fewest == most else f"{fewest} to {most}"
    return f"mean of {counts} runs, bars: one standard deviation over seeds to either side."


def _axis(found: Sequence[Combination]) -> str | None:
    """The last key that has several numbers and nothing else."""
    for key in reversed(found[0].settings):
        values = {json.dumps(one.settings[key]) for one in found}
        numbers = all(
            isinstance(one.settings[key], int | float) and not isinstance(one.settings[key], bool)
            for one in found
        )
        if numbers and len(values) > 1:
            return key
    return None


def _apart_from_seed(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record["settings"].items() if key != "seed"}
