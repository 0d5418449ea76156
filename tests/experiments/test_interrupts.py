"""Ctrl-C and mistakes: workers that are just starting say nothing, and nobody loses what there was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from results_kit import at

from gossamer.experiments.arena import Round
from gossamer.experiments.config import parse_config
from gossamer.experiments.simulate import Simulation, simulate
from gossamer.models import ModelError

torch.set_num_threads(1)

SCRIPT = """
import os, signal
from pathlib import Path

if __name__ == "__mp_main__":  # a worker that is starting: the main module is what it imports first
    os.kill(os.getpid(), signal.SIGINT)

from gossamer.experiments.config import ConfigError, parse_config
from gossamer.experiments.sweep import expand
from gossamer.experiments.sweep_outcome import run_cells
from gossamer.experiments.sweep_run import Runs

if __name__ == "__main__":
    try:
        Runs(expand(parse_config({"rounds": 1})), Path("runs.jsonl")).go(run_cells, jobs=1)
    except ConfigError as error:
        print(error)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)  # the parent hears it again
"""


def test_a_worker_that_is_interrupted_while_it_starts_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, "utf-8")
    ran = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    assert "a worker process was killed" in ran.stdout
    assert ran.stderr.count("Traceback") == 1  # the parent's own
    assert "raise_signal" in ran.stderr


def simulation(**changed: Any) -> Simulation:
    base = {
        "peers": 3,
        "rounds": 3,
        "data": {"samples": 20, "test": 30},
        "network": {"layout": "64=8=10"},
        "models": [{"name": "global", "layout": "64-6-10"}],
        "training": {"stretch": 20},
    }
    return Simulation.of(parse_config(base | changed))


def test_interrupted_networks_come_home_too(tmp_path: Path) -> None:
    def stop(round: Round) -> None:
        if round.index == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(simulation(), at(tmp_path), networks=True, on_round=stop)
    whole = simulation(rounds=2)
    list(whole.rounds())
    for member, fresh in zip(whole.members, simulation().members, strict=True):
        fresh.network.load(tmp_path / f"peer-{member.name}.safetensors")
        assert torch.equal(fresh.network.flat, member.network.flat)


def test_what_does_not_fit_leaves_earlier_results_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(simulation(), at(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    refused = simulation()

    def refuse(*_: object) -> None:
        raise ModelError("does not fit")

    monkeypatch.setattr(Simulation, "arena", refuse)
    with pytest.raises(ModelError):
        simulate(refused, at(tmp_path, force=True))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
