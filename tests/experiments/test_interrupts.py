"""Ctrl-C and mistakes: workers that are just starting say nothing, and nobody loses what there was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from results_kit import Watch, at

from gossamer.experiments.arena import Arena
from gossamer.experiments.arena.simulation import Simulation, simulate
from gossamer.experiments.config.tables import parse_config
from gossamer.models import ModelError

torch.set_num_threads(1)

STARTING = """
import runpy, signal, sys
kind, moment, module = (sys.argv.pop(1) for _ in range(3))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background
    signal.signal(signal.SIGINT, signal.default_int_handler)

class CtrlC:  # comes when this module is imported
    def find_spec(name, path, target=None):
        if name == moment and kind == "signal":
            signal.raise_signal(signal.SIGINT)
        elif name == moment:  # what an enum makes of it
            raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

sys.meta_path.insert(0, CtrlC)
if module.endswith(".py"):
    sys.argv[0] = module
    runpy.run_path(module, run_name="__main__")
else:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
sys.exit("nobody imported " + moment)
"""
GOSSAMER = str(Path(__file__).parents[2] / "common" / "__main__.py")
COMMANDS = {
    "simulate": ["simulate", "tiny.toml"],
    "swarm": ["swarm", "tiny.toml"],
    "join": ["join", "--broker", "mqtt://127.0.0.1:1", "--swarm", "s", "--config", "anna.toml"],
    "demo": ["demo"],
    "broker": ["broker", "--port", "0"],
}


def interrupted_at(
    folder: Path, moment: str, module: str, *arguments: str, kind: str = "signal"
) -> None:
    """Run a module or script; Ctrl-C as it imports `moment` ends it: code 130, no traceback."""
    ran = subprocess.run(
        [sys.executable, "-c", STARTING, kind, moment, module, *arguments],
        cwd=folder, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert "Traceback" not in ran.stderr
    assert ran.returncode == 130, ran.stderr
    assert not list(folder.rglob("*.jsonl"))


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A folder with a config and a peer's file."""
    (tmp_path / "tiny.toml").write_text("peers = 2\nrounds = 1\n")
    (tmp_path / "anna.toml").write_text('name = "anna"\nentry = "mine:make"\nrounds = 1\n')
    (tmp_path / "mine.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "moment"),
    [
        ("broker", "gossamer.experiments"),
        ("broker", "typer"),
        ("broker", "gossamer.peer.broker.broker"),
        ("simulate", "pydantic"),
        ("swarm", "torch.torch_version"),
        ("join", "torch.torch_version"),
        ("demo", "numpy"),
    ],
)
def test_ctrl_c_while_a_command_loads_leaves_no_traceback(
    device: Path, command: str, moment: str
) -> None:
    interrupted_at(device, moment, GOSSAMER, *COMMANDS[command])


@pytest.mark.parametrize("moment", ["torch.torch_version", "gossamer.peer.process"])
def test_ctrl_c_while_a_peer_loads_leaves_no_traceback(device: Path, moment: str) -> None:
    interrupted_at(device, moment, "gossamer.peer", "host-0.json")


def test_ctrl_c_that_became_another_error_leaves_no_traceback(device: Path) -> None:
    interrupted_at(device, "pydantic", GOSSAMER, *COMMANDS["simulate"], kind="error")


def simulation(**changed: Any) -> Simulation:
    base = {
        "peers": 3,
        "rounds": 3,
        "data": {"samples": 20, "test": 30},
        "network": {"layout": "64=8=10"},
        "models": [{"name": "global", "layout": "64-6-10"}],
        "training": {"local_samples": 20},
    }
    return Simulation.of(parse_config(base | changed))


def test_interrupted_networks_come_home_too(tmp_path: Path) -> None:
    interrupt = Watch(interrupt_at=2)
    with pytest.raises(KeyboardInterrupt):
        simulate(simulation(), at(tmp_path), networks=True, callbacks=[interrupt])
    whole = simulation(rounds=2)
    list(whole.rounds())
    for member, fresh in zip(whole.members, simulation().members, strict=True):
        fresh.network.load(tmp_path / f"{member.name}.safetensors")
        assert torch.equal(fresh.network.flat, member.network.flat)


class Refused(Simulation):
    def arena(self, threads: int | None = None) -> Arena:
        raise ModelError("does not fit")


def test_what_does_not_fit_leaves_earlier_results_alone(tmp_path: Path) -> None:
    fitting = simulation()
    simulate(fitting, at(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ModelError):
        simulate(Refused(fitting.config, fitting.members), at(tmp_path, force=True))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
