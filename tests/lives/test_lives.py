"""Whole peers live through drawn histories, and no law is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .__main__ import main
from .mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def lives(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: the order of sets is part of a history."""
    return subprocess.run(
        [sys.executable, "-m", "tests.lives", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )


@pytest.mark.lives
@pytest.mark.timeout(900)
def test_no_history_breaks_a_law():
    done = lives("--seeds", "0-299", "--jobs", str(os.cpu_count() or 1))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.lives
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mutant", [each for each in MUTANTS.values() if each.laws], ids=lambda m: m.name
)
def test_a_fault_that_is_put_back_is_caught(mutant):
    laws = ",".join(mutant.laws)
    seeds = f"{mutant.seed},0-299"  # the first one shows it, unless histories have changed since
    done = lives("--seeds", seeds, "--mutant", mutant.name, "--laws", laws, "--stop")
    assert done.returncode == 1, done.stdout + done.stderr
    assert any(f"law {law}" in done.stdout for law in mutant.laws)


@pytest.mark.lives
def test_a_seed_gives_one_history():
    done = lives("--seeds", "8,24", "--twice", "--laws", "finite")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 histories, 0 broke a law")


@pytest.mark.parametrize("wrong", [("--seeds", "many"), ("--laws", "gravity"), ("--mutant", "x")])
def test_mistakes_on_the_command_line_are_one_line(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        main(list(wrong))
    assert caught.value.code == 2
    assert f"error: {wrong[0]}: " in capsys.readouterr().err


def test_a_run_is_resumed_where_it_stopped(tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    file.write_text(
        '{"seed": 1, "broken": [["ends", "did not end in time: ann"]]}\n'
        '{"seed": 2, "broken": []}\n{"seed": 3, "bro'
    )
    assert main(["--seeds", "1-2", "--summary", "--resume", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "ends: 1 of 2 histories, seeds [1]" in printed
    assert "seed 1: law ends: did not end in time: ann; reproduce: " in printed
    assert "--seeds 1 --trace" in printed
    assert "2 histories, 1 broke a law; 0 run" in printed
