"""One simulation over several real processes: the same results, and one line if a process fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import shards_kit
from safetensors.numpy import load_file

from gossamer.experiments.arena.shards import launch

pytestmark = pytest.mark.live

CONFIG = """
name = "tiny"
peers = 5
rounds = 2
gain = 0.5
topology = "ring"
weights = "samples"
data = {{ samples = 30, test = 60 }}
network = {network}
models = [{{ name = "all", share = 1.0 }}]
training = {{ local_samples = 30, rate = {rate} }}
"""
LAYOUT = '{ layout = "64=12=10" }'


def write(path: Path, rate: float = 0.1, network: str = LAYOUT) -> str:
    path.write_text(CONFIG.format(rate=rate, network=network), "utf-8")
    return str(path)


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gossamer", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_divided_swarm_learns_what_a_whole_one_learns() -> None:
    """Two and three ranks, gossip and exact means, partial and whole models, every optimizer."""
    rows, *_ = launch(3, shards_kit.compare, (2, 3))
    assert len(rows) == 2 * len(list(shards_kit.cases()))
    for *case, dtype, norm, elementwise, correct in rows:
        assert norm <= 1e-6, (case, dtype)
        assert dtype == "float32" or elementwise <= 1e-9, case
        assert correct <= 1, (case, dtype)


def test_the_command_writes_the_same_results_from_several_processes(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.toml")
    for folder, options in (("one", []), ("two", ["--shards", "2"])):
        run = simulate(path, "--out", str(tmp_path / folder), "--networks", *options)
        assert run.returncode == 0, run.stderr
    assert run.stderr.count("2/2 rounds") == 1  # one progress bar
    one, two = tmp_path / "one", tmp_path / "two"
    # Only a run that took long has a page, so a busy machine decides which of both has one.
    files = [{file.name for file in folder.iterdir()} - {"report.html"} for folder in (one, two)]
    assert files[0] == files[1]
    assert (one / "peers.json").read_text() == (two / "peers.json").read_text()
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (one, two)
    ]
    for first, second in zip(*lines, strict=True):
        assert first.pop("loss") == pytest.approx(second.pop("loss"), rel=1e-5)
        assert first.keys() == second.keys()
        assert (first["peer"], first["round"]) == (second["peer"], second["round"])
        assert first["accuracy"] == pytest.approx(second["accuracy"], abs=1.01 / 60)
    for peer in range(5):
        values = [load_file(folder / f"{peer}.safetensors") for folder in (one, two)]
        for name, value in values[0].items():
            assert value == pytest.approx(values[1][name], abs=1e-6)


def test_a_process_that_dies_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "killed_rank.py").write_text(
        "import os\nfrom torch import nn\n\ndef net():\n"
        "    if os.environ.get('RANK') == '1':\n        os.kill(os.getpid(), 9)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n",
        "utf-8",
    )
    path = write(tmp_path / "tiny.toml", network='{ entry = "killed_rank:net" }')
    run = simulate(path, "--out", str(tmp_path / "out"), "--shards", "2")
    assert run.returncode == 2
    lines = [line for line in run.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, run.stderr
    assert lines[0].startswith("error: rank 1 of 2 died")


def test_processes_with_different_configs_are_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = [write(tmp_path / "one.toml"), write(tmp_path / "two.toml", rate=0.2)]
    with pytest.raises(SystemExit) as stop:
        launch(2, shards_kit.simulate_each, paths, str(tmp_path / "out"))
    assert stop.value.code == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert "key 'training.rate' is 0.1 on rank 0 and 0.2 on rank 1" in lines[0]
    assert not (tmp_path / "out").exists()
