"""Metrics of small runs: `gossamer simulate` again, and compared with what it gave before.

On one machine a run gives the same bits again. Other processors sum in another order, which moves a loss
by some 1e-8 of its value; measured with torch and MKL restricted to SSE and to AVX2, and with two threads
instead of one. Where values are rounded for the wire, such a difference can move a value to the next step,
and a loss by some 1e-5. Hence the two tolerances. Accuracies are counts: they must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

FOLDER = Path(__file__).parent / "runs"
TOLERANCES = {
    "exact": 1e-6,
    "ring": 1e-6,
    "ring-int8": 5e-5,
    "time": 1e-6,
    "server": 5e-5,
    "fuse": 1e-6,
}
"""The runs, and how far a loss or a time may move, relative to its value."""

Records = Sequence[dict[str, Any]]


def config(name: str) -> Path:
    """The config of a run."""
    return FOLDER / f"{name}.toml"


def metrics(name: str) -> Path:
    """The metrics that a run gave when they were last written."""
    return FOLDER / f"{name}.jsonl"


def simulate(name: str, out: Path) -> Path:
    """Run `gossamer simulate` in this process; returns the metrics that it left in a folder."""
    from gossamer.experiments.cli.app import app

    command = ["simulate", str(config(name)), "--out", str(out)]
    result = CliRunner().invoke(app, command)
    if result.exit_code != 0:
        raise RuntimeError(
            f"gossamer {' '.join(command)}: exit code {result.exit_code}\n{result.output}"
        ) from result.exception
    return out / "metrics.jsonl"


def differences(name: str, now: Records, before: Records) -> list[str]:
    """What moved, a line each that names run, round, peer and metric. New keys of a record are fine."""
    found = []
    if len(now) != len(before):
        found.append(f"{name}: {len(now)} records, there were {len(before)}")
    for number, (new, old) in enumerate(zip(now, before, strict=False), 1):
        where = f"{name}, record {number} (round {old['round']}, peer {old['peer']})"
        for key, value in old.items():
            if key not in new:
                found.append(f"{where}: has no {key} any more, it was {value!r}")
            elif not _same(key, new[key], value, TOLERANCES[name]):
                found.append(f"{where}: {key} is {new[key]!r}, it was {value!r}")
    return found


def _same(key: str, new: Any, old: Any, tolerance: float) -> bool:
    if key in ("loss", "time"):
        return math.isclose(new, old, rel_tol=tolerance)
    return new == old
