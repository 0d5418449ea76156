"""A device that learns for ever: its data change three times, it is killed twice, and its network answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from waiting import let_run, wait_until

from gossamer.models import SgdLearner, SlicedNetwork, mlp
from gossamer.peer import Broker, BrokerSettings, read_about

pytestmark = pytest.mark.live

SHIFTS = 3
SAMPLES = (4_000, 4_000, 800_000)
"""New samples of each change of the data: more than the window. The last ones take 32 MB."""
GROWTH = 20e6
"""Bytes by which the process may grow at the last change; all of its samples would not fit."""
DEVICE = """
name = "anna"
entry = "test_forever_device:make_learner"
rounds = "forever"
founder = true
samples_folder = "samples"
window = 400
save_network_every = 0.2
test_every = 1000000
"""


def network() -> SlicedNetwork:
    return SlicedNetwork(mlp("8=16=2"), {"global": "8-16-2"}, peer="anna", seed=0)


def make_learner() -> SgdLearner:
    """The device's learner: it has no samples at first, and finds some in its folder."""

    class Paced(SgdLearner):
        def train(self, steps: int = 1):
            let_run(0.01)
            return super().train(steps)

    none = torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64)
    return Paced(network(), none, none, local_samples=100, rate=0.2)


def draw(shift: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples after a change of the data: the same input then has another class."""
    x = np.random.default_rng([shift, seed]).normal(size=(count, 8)).astype(np.float32)
    return x, ((x[:, shift] * (-1) ** shift) > 0).astype(np.int64)


def write_samples(folder: Path, shift: int) -> None:
    x, y = draw(shift, SAMPLES[shift], seed=0)
    unfinished = folder / f".{shift}"
    with unfinished.open("wb") as file:
        np.savez(file, x=x, y=y)
    unfinished.rename(folder / f"{shift}.npz")


def resident(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_device_learns_through_changes_and_kills_and_always_answers(tmp_path: Path) -> None:
    samples, file = tmp_path / "samples", tmp_path / "out" / "anna.safetensors"
    samples.mkdir()
    (tmp_path / "anna.toml").write_text(DEVICE)
    answered, running = 0, None

    def start(url: str) -> subprocess.Popen[bytes]:
        join = ["join", "--broker", url, "--swarm", "soil", "--config", "anna.toml", "--out", "out"]
        here = Path(__file__).parent
        path = os.pathsep.join((str(here), str(here.parent)))
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "gossamer", *join], cwd=tmp_path, stdout=log, stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            )  # fmt: skip

    def accuracy(shift: int) -> float:
        """Of the network as it is written now; whatever happens to the device, it can be read."""
        nonlocal answered
        if not file.exists():
            assert not answered, "a network that was written is gone"
            return 0.0
        written = network()
        written.load(file)
        x, y = draw(shift, 500, seed=99)
        with torch.no_grad():
            outputs = written.module(torch.from_numpy(x))
        answered += 1
        return float((outputs.argmax(1).numpy() == y).mean())

    with Broker(BrokerSettings()) as broker:
        running = start(broker.url)
        try:
            rounds = []
            for shift in range(SHIFTS):
                before = resident(running.pid)
                write_samples(samples, shift)
                wait_until(lambda shift=shift: accuracy(shift) > 0.9, f"learns change {shift}")
                rounds.append(read_about(file)["round"])
                if shift < SHIFTS - 1:
                    running.send_signal(signal.SIGKILL)
                    running.wait()
                    # Written again since, perhaps, after samples that happened to teach it less.
                    assert accuracy(shift) > 0.75, "the network answers while the device is down"
                    running = start(broker.url)
                    newer = rounds[-1]
                    wait_until(lambda newer=newer: read_about(file)["round"] > newer, "goes on")
                elif Path("/proc").exists():
                    assert resident(running.pid) - before < GROWTH
            running.send_signal(signal.SIGTERM)
            assert running.wait() == 0, (tmp_path / "log").read_text()
        finally:
            running.kill()
            running.wait()
    assert rounds == sorted(rounds)
    assert "Traceback" not in (tmp_path / "log").read_text()
