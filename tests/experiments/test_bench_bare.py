"""The benchmark's bare clients: interrupted, or left by their broker, they make no fuss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gossamer.experiments.bench import gate
from gossamer.peer.broker import Broker

SCRIPT = Path(gate.__file__).with_name("bare.py")
# A parent in the background may have told its children to ignore Ctrl-C: undo that first.
PROGRAM = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[3], run_name='__main__')"
)


@pytest.fixture
def broker():
    with Broker(kind="amqtt") as broker:
        yield broker


def talking_to(port: int) -> int:
    """Sockets of clients on this machine whose other end is, or was, at this port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    open_or_left = ("01", "08")
    return sum(row[2].endswith(f":{port:04X}") and row[3] in open_or_left for row in rows)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("how", ["interrupted", "without a broker"])
def test_bare_clients_end_quietly(tmp_path, broker, how):
    names = ("a", "b")
    gates = gate.Gates(tmp_path, "bare", 1, names, lambda: None)
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
            str(SCRIPT.parent),
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
        for _ in range(10_000):  # both clients are to have noticed before the turn begins
            if not talking_to(broker.port):
                break
            time.sleep(0.02)
        else:
            pytest.fail("a bare client still holds its connection")
        os.close(gates._locks[0])
        _, said = process.communicate()
    finally:
        process.kill()
    if how == "interrupted":
        assert (process.returncode, said) == (130, "")
    else:
        assert process.returncode == 1
        assert said.startswith("bare client: ")
        # What aiomqtt's own futures say as they are collected is not ours to silence.
        assert "Task exception was never retrieved" not in said
