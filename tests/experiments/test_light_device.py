"""A device that joins loads neither torch's compiler nor scipy: they take seconds and a hundred megabytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from docs_kit import ROOT, write_files

from gossamer.peer import Broker

HEAVY = (
    "torch._dynamo", "torch._inductor", "scipy.optimize", "scipy.stats", "matplotlib", "networkx", "pandas",
    "sklearn", "sympy", "cryptography",
)  # fmt: skip

# Runs commands one after the other, and says last how each ended and which of some modules were loaded then.
PROGRAM = """
import json, sys
from gossamer.experiments.cli.app import main
heavy, commands = json.loads(sys.argv[1])
ends = []
for command in commands:
    try:
        main(command)
    except SystemExit as stop:
        ends.append([stop.code or 0, [name for name in heavy if name in sys.modules]])
import gossamer.peer.__main__, gossamer.peer.broker
import gossamer.experiments.build, gossamer.experiments.live.layout
print(json.dumps([*ends, "matplotlib" in sys.modules]))
"""

CNN = """
import torch
from torch import nn
from gossamer.models import Adam, SgdLearner, SlicedNetwork


def make_learner():
    x, y = torch.randn(20, 1, 8, 8), torch.randint(0, 3, (20,))
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
    network = SlicedNetwork(net, {"all": {"*": 0.5}}, example=x[:2], peer="a", seed=0)
    return SgdLearner(network, (x, y), (x, y), local_samples=20, optimizer=lambda p: Adam(p, 0.01))
"""


def test_neither_the_device_of_the_guide_nor_a_traced_network_loads_what_is_heavy(
    empty_broker: Broker, tmp_path: Path
) -> None:
    """The traced network's optimizer has state. What the peers of a swarm load besides draws nothing."""
    guide, traced = tmp_path / "guide", tmp_path / "traced"
    guide.mkdir()
    write_files(ROOT / "docs" / "how-to" / "device.md", guide)
    lines = (guide / "peer.toml").read_text("utf-8").splitlines()
    kept = [line for line in lines if not line.startswith(("rounds", "expect"))]
    (guide / "peer.toml").write_text("\n".join([*kept, "rounds = 2", "founder = true"]), "utf-8")
    traced.mkdir()
    (traced / "traced_device.py").write_text(CNN, "utf-8")
    (traced / "peer.toml").write_text(
        'name = "anna"\nentry = "traced_device:make_learner"\nrounds = 2\nfounder = true\n', "utf-8"
    )
    join = ["join", "--broker", empty_broker.url]
    commands = [
        [*join, "--swarm", each.name, "--config", str(each / "peer.toml"), "-o", str(each / "out")]
        for each in (guide, traced)
    ]
    path = os.pathsep.join((str(guide), str(traced)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([HEAVY, commands])],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, []], [0, []], False], done.stderr
    for swarm in ("guide", "traced"):
        assert f"left swarm {swarm}" in done.stderr
