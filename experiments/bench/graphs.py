"""Large graphs: what `show` costs on 10,000 peers, and the facts of up to 100,000.

Each figure comes from a process of its own, which loads no torch, so that its memory is its own.
"""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from math import log
from pathlib import Path

from . import Row, in_own_process

SECONDS, BYTES = 30.0, 2e9
"""What a figure may cost."""
SIZES = (1_000, 10_000, 100_000)
SHOWN = 10_000


def topology() -> list[Row]:
    """`show` on 10,000 peers; the facts of random 4-regular graphs, and how their cost grows."""
    rows = [*_rows(f"topology show, {SHOWN:,} peers", *in_own_process(work, "show", SHOWN))]
    costs = {size: in_own_process(work, "facts", size) for size in SIZES}
    rows += _rows(f"topology facts, {SIZES[-1]:,} peers", *costs[SIZES[-1]])
    for small, large in pairwise(SIZES):
        few, many = costs[small][0], costs[large][0]
        power = log(many / few) / log(large / small)
        note = f"ten times the peers; time grows as peers^{power:.2f}"
        rows.append(Row(f"facts, {large:,} against {small:,} peers", "s", many, few, note=note))
    return rows


def _rows(name: str, seconds: float, peak: float) -> list[Row]:
    limit = "baseline: the limit"
    return [
        Row(name, "s", seconds, SECONDS, 1.0, "at most", limit),
        Row(f"{name}, memory", "GB", peak / 1e9, BYTES / 1e9, 1.0, "at most",
            f"peak of the whole process; {limit}"),
    ]  # fmt: skip


def work(what: str, peers: int) -> tuple[float, float]:
    """Return seconds of one piece of work without imports, and the peak bytes of this process."""
    from ...topology import facts
    from ..arena import peak_memory
    from ..graphs import load_graph
    from ..graphs.show import examine, show

    started = time.perf_counter()
    given = load_graph("regular:4", peers, check_connected=False)  # facts() checks it
    if what == "show":
        with tempfile.TemporaryDirectory(prefix="gossamer-bench-") as folder:
            show(examine(given), Path(folder))
    else:
        facts(given.graph)
    return time.perf_counter() - started, float(peak_memory())
