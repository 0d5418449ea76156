"""Running benchmarks: one table on the terminal, the same rows as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..cli import console
from ..config.tables import ConfigError
from ..results import Results, write_json
from .arena import arena
from .codec import codec
from .harness import HEADER, Row, cells
from .matching import matching
from .memory import memory
from .networks import networks
from .scale import scale
from .throughput import checkpoint, throughput
from .topology import topology
from .trust import trust
from .virtual import virtual

BENCHMARKS: Mapping[str, Callable[[], list[Row]]] = {
    "codec": codec,
    "throughput": throughput,
    "checkpoint": checkpoint,
    "memory": memory,
    "arena": arena,
    "scale": scale,
    "matching": matching,
    "networks": networks,
    "topology": topology,
    "virtual": virtual,
    "trust": trust,
}
PLACE = Path("results/bench")


def run_benchmarks(
    names: Sequence[str] | None,
    results: Results,
    benchmarks: Mapping[str, Callable[[], list[Row]]] = BENCHMARKS,
) -> list[Row]:
    """Run the named benchmarks (all, if None), print their table and leave their rows in bench.json."""
    wanted = list(benchmarks) if names is None else list(names)
    if unknown := [name for name in wanted if name not in benchmarks]:
        raise ConfigError(
            f"no benchmark is called {unknown[0]!r}; there are {', '.join(benchmarks)}"
        )
    load = os.getloadavg()[0]
    rows: list[Row] = []
    for name in wanted:
        console.err.print(f"benchmark {name} …")
        rows += benchmarks[name]()
    console.table("benchmarks", HEADER, [cells(row) for row in rows])
    machine = {
        "processors": os.cpu_count(),
        "load_before": load,
        "python": platform.python_version(),
    }
    with results.begun() as folder:
        path = folder / "bench.json"
        write_json(path, {"machine": machine, "rows": [row.record() for row in rows]})
    console.wrote([path])
    return rows


def main_bench(only: list[str] | None = None) -> None:
    """The command: run, print, write. A missed claim is shown, and is no error."""
    run_benchmarks(only or None, Results(PLACE, "bench"))
