"""The tutorial's commands and its last snippet work, one after the other, as for a reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from docs_kit import ROOT, blocks, lines, write_files


def python(folder: Path, *arguments: str) -> str:
    """Run a Python process in a folder; return what it prints."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.live
@pytest.mark.timeout(600)  # four processes that load torch, on a machine that runs other tests too
def test_the_tutorial_runs(tmp_path: Path) -> None:
    page = ROOT / "docs/tutorial.md"
    write_files(page, tmp_path)
    simulate, swarm, home = (block for block in blocks(page) if block.runs)
    for block, written in ((simulate, "accuracy.png"), (swarm, "outcome.json")):
        (words,) = lines(block)
        assert written in python(tmp_path, "-m", *words)
    outcome = json.loads((tmp_path / "results/garden-live/latest/outcome.json").read_text())
    assert outcome["weight"]["leaves"] == [6.0, 6.0]  # held and injected, as the page says
    assert python(tmp_path, "-c", home.text) == "780 parameters\n"
