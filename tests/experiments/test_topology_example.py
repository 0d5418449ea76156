"""The example in docs runs as printed, and the large-graph benchmark does its work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gossamer.experiments.bench.graphs import SIZES, work

SCRIPT = Path(__file__).parents[2] / "docs/examples/florentine.py"


def test_thirty_lines_load_a_public_graph_run_a_swarm_and_draw_it(tmp_path: Path) -> None:
    lines = [line for line in SCRIPT.read_text("utf-8").splitlines() if line.strip()]
    assert len(lines) <= 30
    answer = subprocess.run(
        [sys.executable, str(SCRIPT)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "Medici" in answer.stdout
    rounds = [line.split() for line in answer.stdout.splitlines() if line[0].isdigit()][1:]
    assert [index for index, _ in rounds] == ["10", "20", "30", "40"]
    accuracy = [float(value) for _, value in rounds]
    assert accuracy[-1] > accuracy[0]
    assert accuracy[-1] > 0.5
    assert (tmp_path / "results/florentine/topology.png").stat().st_size > 5000


def test_the_benchmark_measures_what_it_names() -> None:
    for what in ("show", "facts"):
        seconds, peak = work(what, 60)
        assert seconds > 0
        assert peak > 1e6
    assert (SIZES[0], SIZES[-1]) == (1000, 100_000)
