"""Benchmarks: every figure is a ratio against a baseline measured beside it.

What all share: rows of results, work timed alternately with its baseline, and the command.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

from ..cli import console
from ..errors import ConfigError
from ..results import Results, write_json

BENCHMARKS: Mapping[str, str] = MappingProxyType(
    {
        "codec": "wire:codec",
        "throughput": "live:throughput",
        "checkpoint": "live:checkpoint",
        "memory": "live:memory",
        "arena": "arena:arena",
        "scale": "growth:scale",
        "matching": "models:matching",
        "networks": "models:networks",
        "topology": "graphs:topology",
        "virtual": "growth:virtual",
        "trust": "wire:trust",
    }
)
"""Every benchmark as module:function of this package; the function returns rows. To add one, add a line."""
PLACE = Path("results/bench")

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


def run_benchmarks(
    names: Sequence[str] | None,
    results: Results,
    benchmarks: Mapping[str, Callable[[], list[Row]]] | None = None,
) -> list[Row]:
    """Run the named benchmarks (all, if None), print their table and leave their rows in bench.json.

    benchmarks: by name; those of this package if left out.
    """
    known = BENCHMARKS if benchmarks is None else benchmarks
    wanted = list(known) if names is None else list(names)
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"no benchmark is called {unknown[0]!r}; there are {', '.join(known)}")
    load = os.getloadavg()[0]
    rows: list[Row] = []
    for name in wanted:
        console.err.print(f"benchmark {name} …")
        rows += (_load(BENCHMARKS[name]) if benchmarks is None else benchmarks[name])()
    console.table("benchmarks", HEADER, [cells(row) for row in rows])
    machine = {
        "processors": os.cpu_count(),
        "load_before": load,
        "python": platform.python_version(),
    }
    with results.begun() as folder:
        path = folder / "bench.json"
        write_json(path, {"machine": machine, "rows": [row.record() for row in rows]})
    console.print_written([path])
    return rows


def _load(entry: str) -> Callable[[], list[Row]]:
    module, _, function = entry.partition(":")
    return getattr(import_module(f".{module}", __name__), function)


def main_bench(only: list[str] | None = None) -> None:
    """Run, print, write. A missed claim is shown, and is no error."""
    run_benchmarks(only or None, Results(PLACE, "bench"))


def in_own_process(function: Callable[..., Any], *arguments: object, **environment: str) -> Any:
    """Return what a function of a module returns, as JSON knows it, from a process of its own.

    Its peak of memory is its own, and so are the threads that `environment` allows it.
    """
    program = (
        "import json, sys; from importlib import import_module; "
        "module, name, *rest = json.loads(sys.argv[1]); "
        "print(json.dumps(getattr(import_module(module), name)(*rest)))"
    )
    call = json.dumps([function.__module__, function.__name__, *arguments])
    answer = subprocess.run(
        [sys.executable, "-c", program, call], env={**os.environ, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if answer.returncode:
        what = f"{function.__name__}{arguments}"
        raise RuntimeError(f"benchmark {what} failed: {answer.stderr.strip()[-500:]}")
    return json.loads(answer.stdout)
