"""Benchmarks of large graphs: time and memory of `topology show` and of `facts`, on up to 100,000 peers.

Each measurement is made in a new process, without torch, so that its memory is that of the work.
"""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from math import log
from pathlib import Path

from . import Row, in_own_process

SECONDS, BYTES = 30.0, 2e9
"""The limits on time and memory."""
SIZES = (1_000, 10_000, 100_000)
SHOWN_PEERS = 10_000


def topology() -> list[Row]:
    """Measure `show` on 10,000 peers, `facts` on random 4-regular graphs, and how its time grows."""
    cost = in_own_process(work, "show", SHOWN_PEERS)
    rows = _rows(f"topology show, {SHOWN_PEERS:,} peers", *cost)
    costs = {size: in_own_process(work, "facts", size) for size in SIZES}
    rows += _rows(f"topology facts, {SIZES[-1]:,} peers", *costs[SIZES[-1]])
    for small, large in pairwise(SIZES):
        small_seconds, large_seconds = costs[small][0], costs[large][0]
        power = log(large_seconds / small_seconds) / log(large / small)
        note = f"ten times the peers; time grows as peers^{power:.2f}"
        name = f"facts, {large:,} against {small:,} peers"
        rows.append(Row(name, "s", large_seconds, small_seconds, note=note))
    return rows


def _rows(name: str, seconds: float, peak: float) -> list[Row]:
    limit = "baseline: the limit"
    return [
        Row(name, "s", seconds, SECONDS, 1.0, "at most", limit),
        Row(f"{name}, memory", "GB", peak / 1e9, BYTES / 1e9, 1.0, "at most",
            f"peak of the whole process; {limit}"),
    ]  # fmt: skip


def work(what: str, peers: int) -> tuple[float, float]:
    """Return the seconds of `show` or of `facts` without imports, and the peak bytes of this process."""
    from ...topology import facts
    from ..arena import peak_memory
    from ..graphs import load_graph
    from ..graphs.show import examine, show

    started = time.perf_counter()
    topology = load_graph("regular:4", peers, check_connected=False)  # facts() checks it
    if what == "show":
        with tempfile.TemporaryDirectory(prefix="gossamer-bench-") as folder:
            show(examine(topology), Path(folder))
    else:
        facts(topology.graph)
    return time.perf_counter() - started, float(peak_memory())
