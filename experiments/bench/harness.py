"""What all benchmarks share: rows of results, and work timed alternately with its baseline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

REPEATS = 7
"""Timed repetitions of work and of its baseline; figures are their medians."""
PAUSE = 0.05
"""Seconds before each repetition: threads that a baseline left spinning would take a core from the work."""


@dataclass(frozen=True)
class Row:
    """One line of the table: `measured` against `baseline`, both in `unit`.

    ratio: what the claim is about. wanted: the claim; None only informs. A row that could not be
    measured has no figures, and its note says why.
    """

    name: str
    unit: str
    measured: float | None
    baseline: float | None
    ratio: float | None
    wanted: float | None = None
    sense: Literal["at least", "at most"] = "at least"
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the claim holds; None if there is none, or nothing was measured."""
        if self.wanted is None or self.ratio is None:
            return None
        return self.ratio >= self.wanted if self.sense == "at least" else self.ratio <= self.wanted

    def record(self) -> dict[str, Any]:
        """As JSON-friendly data."""
        return {**asdict(self), "met": self.met}


def alternate(
    work: Callable[[], object],
    baseline: Callable[[], object],
    *,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Median seconds of `work` and of `baseline`, run in turns so that both see the same machine."""
    if repeats < 1:
        raise ValueError(f"a median of {repeats} repetitions: at least one is needed")
    taken: tuple[list[float], list[float]] = ([], [])
    for function in (work, baseline):
        function()  # caches warm, memory mapped
    for _ in range(repeats):
        for function, seconds in zip((work, baseline), taken, strict=True):
            time.sleep(PAUSE)
            started = clock()
            function()
            seconds.append(clock() - started)
    return median(taken[0]), median(taken[1])


def cells(row: Row) -> Sequence[str]:
    """A row as the table shows it; the note stands below the name."""
    sign = "≥" if row.sense == "at least" else "≤"
    claim = "" if row.wanted is None else f"{sign} {row.wanted:g}"
    verdict = {None: "", True: "yes", False: "NO"}[row.met]
    what = f"{row.name}\n  {row.note}" if row.note else row.name
    return [
        what, _number(row.measured), _number(row.baseline), row.unit, _number(row.ratio), claim,
        verdict,
    ]  # fmt: skip


HEADER = ["what", "measured", "baseline", "unit", "ratio", "wanted", "met"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
