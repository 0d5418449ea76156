"""Large graphs: what `show` costs on 10,000 peers, and the facts of up to 100,000.

Each figure comes from a process of its own, so that its memory is its own: `python -m
gossamer.experiments.bench.topology show 10000` prints seconds and bytes as JSON.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from math import log
from pathlib import Path

from .harness import Row

SECONDS, BYTES = 30.0, 2e9
"""What a figure may cost."""
SIZES = (1_000, 10_000, 100_000)
SHOWN = 10_000


def topology() -> list[Row]:
    """`show` on 10,000 peers; the facts of random 4-regular graphs, and how their cost grows."""
    rows = [*_rows(f"topology show, {SHOWN:,} peers", *_measured("show", SHOWN))]
    costs = {size: _measured("facts", size) for size in SIZES}
    rows += _rows(f"topology facts, {SIZES[-1]:,} peers", *costs[SIZES[-1]])
    for small, large in pairwise(SIZES):
        few, many = costs[small][0], costs[large][0]
        power = log(many / few) / log(large / small)
        rows.append(
            Row(f"facts, {large:,} against {small:,} peers", "s", many, few, many / few,
                note=f"ten times the peers; time grows as peers^{power:.2f}")
        )  # fmt: skip
    return rows


def _rows(name: str, seconds: float, peak: float) -> list[Row]:
    return [
        Row(name, "s", seconds, SECONDS, seconds / SECONDS, 1.0, "at most", "baseline: the limit"),
        Row(f"{name}, memory", "GB", peak / 1e9, BYTES / 1e9, peak / BYTES, 1.0, "at most",
            "peak of the whole process; baseline: the limit"),
    ]  # fmt: skip


def _measured(what: str, peers: int) -> tuple[float, float]:
    """Seconds of the work without imports, and the peak bytes of its process."""
    answer = subprocess.run(
        [sys.executable, "-m", "gossamer.experiments.bench.topology", what, str(peers)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if answer.returncode:
        raise RuntimeError(f"topology benchmark {what} {peers}: {answer.stderr.strip()[-500:]}")
    found = json.loads(answer.stdout)
    return found["seconds"], found["peak"]


def work(what: str, peers: int) -> dict[str, float]:
    """Do one piece of work in this process and say what it cost."""
    from ...topology import facts
    from ..graphs.given import take
    from ..graphs.show import examine, show

    started = time.perf_counter()
    given = take("regular:4", peers, whole=False)  # facts checks that it hangs together
    if what == "show":
        with tempfile.TemporaryDirectory(prefix="gossamer-bench-") as folder:
            show(examine(given), Path(folder))
    else:
        facts(given.graph)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak": float(peak)}


if __name__ == "__main__":
    print(json.dumps(work(sys.argv[1], int(sys.argv[2]))))
