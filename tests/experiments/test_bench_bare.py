"""The benchmark's bare clients: interrupted, or left by their broker, they make no fuss."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.experiments.bench import bare
from gossamer.peer import Broker

SCRIPT = Path(bare.__file__)
# A parent in the background may have told its children to ignore Ctrl-C: undo that first.
PROGRAM = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_path(sys.argv[2], run_name='__main__')"
)


@pytest.fixture
def broker():
    with Broker(kind="nats") as broker:
        yield broker


@pytest.mark.parametrize("how", ["interrupted", "without a broker"])
def test_bare_clients_end_quietly(tmp_path, broker, how):
    names = ("a", "b")
    gates = bare.Gates(tmp_path, "bare", 1, names, lambda: None)
    spec = {
        "folder": str(tmp_path), "port": broker.port, "clients": {"a": ["b"], "b": ["a"]},
        "messages": 1, "bytes": 10, "turns": 1,
    }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PROGRAM,
            str(tmp_path / "spec.json"),
            str(SCRIPT),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        gates.ready(100.0)
        if how == "interrupted":
            process.send_signal(signal.SIGINT)
        else:
            broker.stop()
        gates.open(0)
        _, said = process.communicate()
    finally:
        process.kill()
    if how == "interrupted":
        assert (process.returncode, said) == (130, "")
    else:
        assert process.returncode == 1
        assert "bare client: " in said
        # What aiomqtt's own futures say as they are collected is not ours to silence.
        assert "Task exception was never retrieved" not in said
