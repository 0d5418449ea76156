"""`gossamer bench`: runs benchmarks, each of which compares a measurement with a baseline.

This file has what all benchmarks share: rows of results, timing of work and baseline, and the command.
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
        "codec": "gossip:codec",
        "throughput": "live:throughput",
        "checkpoint": "live:checkpoint",
        "memory": "live:memory",
        "presence": "gossip:presence",
        "arena": "arena:arena",
        "scale": "arena:scale",
        "shards": "arena:shards",
        "most-peers": "arena:most_peers",
        "peers": "peers:peers",
        "matching": "models:matching",
        "networks": "models:networks",
        "auto": "models:auto",
        "steady": "gossip:steady",
        "topology": "views:topology",
        "virtual": "arena:virtual",
        "trust": "gossip:trust",
        "page": "views:page",
        "device": "device:device",
    }
)
"""Every benchmark as module:function of this package; the function returns rows. Add new benchmarks here."""

REPEATS = 7
"""Timed repetitions of the work and of its baseline; results are their medians."""
PAUSE = 0.05
"""Seconds to wait before each repetition, until threads of the previous one have stopped spinning."""


@dataclass(frozen=True)
class Row:
    """One row of the table of results: `measured` compared with `baseline`, both in `unit`.

    wanted: the bound that is claimed for the ratio; None claims nothing.
    sense: whether the ratio should be at least or at most `wanted`.
    speedup: whether the ratio is baseline / measured instead of measured / baseline.
    A row that could not be measured has neither value, and its note says why.
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
        """The ratio of the two values; None if one is missing."""
        if self.measured is None or self.baseline is None:
            return None
        return self.baseline / self.measured if self.speedup else self.measured / self.baseline

    @property
    def met(self) -> bool | None:
        """Whether the claim holds; None if nothing is claimed, or nothing was measured."""
        if self.wanted is None or self.ratio is None:
            return None
        return self.ratio >= self.wanted if self.sense == "at least" else self.ratio <= self.wanted

    def record(self) -> dict[str, Any]:
        """The row, its ratio and whether the claim holds, for JSON."""
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


def race(
    name: str,
    work: Callable[[], object],
    baseline: Callable[[], object],
    wanted: float | None = None,
    note: str = "",
    repeats: int = REPEATS,
) -> Row:
    """Time work against a baseline that does the same; the ratio is how many times faster the work is."""
    measured, compared = median_seconds(work, baseline, repeats=repeats)
    return Row(name, "s", measured, compared, wanted, note=note, speedup=True)


def within_limit(name: str, unit: str, measured: float, limit: float, note: str = "") -> Row:
    """Return the row of a measurement that is claimed to be at most a limit, which is its baseline."""
    notes = "; ".join(text for text in (note, "baseline: the limit") if text)
    return Row(name, unit, measured, limit, 1.0, "at most", notes)


def median_seconds(
    *functions: Callable[[], object],
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the median seconds of each function.

    They run alternately, so that the load of the machine is the same for all.
    """
    if repeats < 1:
        raise ValueError(f"a median of {repeats} repetitions: at least one is needed")
    for function in functions:
        function()  # warms up caches and allocates memory
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, seconds in zip(functions, times, strict=True):
            time.sleep(PAUSE)
            started = clock()
            function()
            seconds.append(clock() - started)
    return [median(seconds) for seconds in times]


def row_texts(row: Row) -> Sequence[str]:
    """The texts of a row in the printed table, one for each column of HEADER; the note is below the name."""
    sign = "≥" if row.sense == "at least" else "≤"
    claim = "" if row.wanted is None else f"{sign} {row.wanted:g}"
    verdict = {None: "", True: "yes", False: "NO"}[row.met]
    name = f"{row.name}\n  {row.note}" if row.note else row.name
    return [
        name, _number(row.measured), _number(row.baseline), row.unit, _number(row.ratio), claim,
        verdict,
    ]  # fmt: skip


HEADER = ["what", "measured", "baseline", "unit", "ratio", "wanted", "met"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def run_benchmarks(
    names: Sequence[str],
    results: Results,
    benchmarks: Mapping[str, Callable[..., list[Row]]] | None = None,
    options: Mapping[str, Mapping[str, object]] | None = None,
) -> list[Row]:
    """Run the named benchmarks (all, if none is named), print their table and write it to bench.json.

    A claim that does not hold is printed, not raised.

    benchmarks: functions by name; those of this package if left out.
    options: for some of the functions, by name, the arguments of their call.
    """
    available = BENCHMARKS if benchmarks is None else benchmarks
    selected = list(names or available)
    if unknown := [name for name in selected if name not in available]:
        raise ConfigError(
            f"no benchmark is called {unknown[0]!r}; there are {', '.join(available)}"
        )
    load = os.getloadavg()[0]
    rows: list[Row] = []
    for name in selected:
        console.err.print(f"benchmark {name} …")
        function = _load(BENCHMARKS[name]) if benchmarks is None else benchmarks[name]
        rows += function(**(options or {}).get(name, {}))
    console.table("benchmarks", HEADER, [row_texts(row) for row in rows])
    machine = {
        "processors": os.cpu_count(),
        "load_before": load,
        "python": platform.python_version(),
    }
    with results.run_folder() as folder:
        path = folder / "bench.json"
        write_json(path, {"machine": machine, "rows": [row.record() for row in rows]})
    console.print_written([path])
    return rows


def _load(entry: str) -> Callable[..., list[Row]]:
    module, _, function = entry.partition(":")
    return getattr(import_module(f".{module}", __name__), function)


def in_own_process(function: Callable[..., T], *arguments: object, **environment: str) -> T:
    """Call a module's function in a new process and return its result.

    The process's peak memory is then that of the function. environment: variables of the new process, which
    may limit its threads.
    """
    previous = dict(os.environ)
    os.environ.update(environment)
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()
    finally:
        os.environ.clear()
        os.environ.update(previous)


# --- networks of several benchmarks -----------------------------------------------------------------

PAPER = "784=300=100=10"
"""The layout of the perceptron in the paper."""
PARAMETERS = 266_610
"""The number of parameters of that perceptron."""


def perceptron(layout: str) -> nn.Sequential:
    """A multi-layer perceptron with sigmoid activations."""
    from ...models import mlp  # imports torch, which some benchmarks do not need

    return mlp(layout, activation="sigmoid", output="sigmoid")


def sliced_perceptron(peer: str, layout: str = PAPER, level: int = 100) -> SlicedNetwork:
    """A peer's network that shares all inputs and `level` % of the cells of every other layer with all."""
    from ...models import SlicedNetwork

    inputs, *rest = (int(count) for count in layout.split("="))
    shared = [inputs, *(count * level // 100 for count in rest)]
    slices = {"global": "-".join(map(str, shared))}
    return SlicedNetwork(perceptron(layout), slices, peer=peer, seed=1)
