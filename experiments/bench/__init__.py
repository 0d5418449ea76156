"""Benchmarks: every figure is a ratio against a baseline measured beside it.

What all share: rows of results, work timed alternately with its baseline, and the command.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..cli import console
from ..errors import ConfigError
from ..results import Results, write_json

if TYPE_CHECKING:
    from torch import nn

    from ...models import SlicedNetwork

T = TypeVar("T")

BENCHMARKS: Mapping[str, str] = MappingProxyType(
    {
        "codec": "wire:codec",
        "throughput": "live:throughput",
        "checkpoint": "live:checkpoint",
        "memory": "live:memory",
        "arena": "arena:arena",
        "scale": "arena:scale",
        "matching": "models:matching",
        "networks": "models:networks",
        "topology": "graphs:topology",
        "virtual": "virtual:virtual",
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

    wanted: the claim about their ratio; None only informs. speedup: the ratio says how many times as fast as
    its baseline the work is. A row that could not be measured has no figures, and its note says why.
    """

    name: str
    unit: str
    measured: float | None = None
    baseline: float | None = None
    wanted: float | None = None
    sense: Literal["at least", "at most"] = "at least"
    note: str = ""
    speedup: bool = False

    @property
    def ratio(self) -> float | None:
        """What the claim is about; None if there is nothing to compare."""
        if self.measured is None or self.baseline is None:
            return None
        return self.baseline / self.measured if self.speedup else self.measured / self.baseline

    @property
    def met(self) -> bool | None:
        """Whether the claim holds; None if there is none, or nothing was measured."""
        if self.wanted is None or self.ratio is None:
            return None
        return self.ratio >= self.wanted if self.sense == "at least" else self.ratio <= self.wanted

    def record(self) -> dict[str, Any]:
        """As JSON-friendly data."""
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


def race(
    name: str,
    work: Callable[[], object],
    baseline: Callable[[], object],
    wanted: float | None = None,
    note: str = "",
    repeats: int = REPEATS,
) -> Row:
    """Time work against a baseline that does the same; the ratio says how many times as fast it is."""
    seconds = alternate(work, baseline, repeats=repeats)
    return Row(name, "s", *seconds, wanted, note=note, speedup=True)


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


def in_own_process(function: Callable[..., T], *arguments: object, **environment: str) -> T:
    """Return what a function of a module returns from a new process.

    Its peak of memory is its own, and so are the threads that `environment` allows it.
    """
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- what most of them work on ----------------------------------------------------------------------

PAPER = "784=300=100=10"
"""The paper's perceptron."""
PARAMETERS = 266_610
"""How many it has."""


def perceptron(layout: str) -> nn.Sequential:
    """A network of sigmoids."""
    from ...models import mlp  # torch, which bare clients and graphs do without

    return mlp(layout, activation="sigmoid", output="sigmoid")


def sliced_perceptron(peer: str, layout: str = PAPER, level: int = 100) -> SlicedNetwork:
    """A peer's network; all inputs and `level` % of the cells of every other part are everybody's."""
    from ...models import SlicedNetwork

    inputs, *rest = (int(count) for count in layout.split("="))
    shared = [inputs, *(count * level // 100 for count in rest)]
    slices = {"global": "-".join(map(str, shared))}
    return SlicedNetwork(perceptron(layout), slices, peer=peer, seed=1)
