"""The benchmark's bare clients: interrupted, or left by their broker, they make no fuss."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiomqtt
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


def talking_to(port: int) -> int:
    """Sockets of clients on this machine whose other end is, or was, at this port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    open_or_left = ("01", "08")
    return sum(row[2].endswith(f":{port:04X}") and row[3] in open_or_left for row in rows)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
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
        for _ in range(10_000):  # both clients are to have noticed before the turn begins
            if not talking_to(broker.port):
                break
            time.sleep(0.02)
        else:
            pytest.fail("a bare client still holds its connection")
        gates.open(0)
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


@pytest.mark.parametrize("kind", ["bare", "aiomqtt"])
def test_broker_that_hangs_up_before_a_write_leaves_no_late_writer(run, broker, kind):
    """The case of aiomqtt itself shows that the bare client's workaround is still needed."""

    async def scenario() -> list[str]:
        late: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, what: late.append(str(what.get("handle"))))
        if kind == "bare":
            client = bare.connection(broker.port, "x")
        else:
            client = aiomqtt.Client("127.0.0.1", broker.port)
        async with client:
            paho = client._client
            paho.publish("x", b"y")  # is to be written in the loop's next turn
            paho.socket().shutdown(socket.SHUT_RDWR)
            paho.loop_read()  # in this turn paho reads the end of the connection, and closes it
            for _ in range(3):
                await asyncio.sleep(0)
        assert isinstance(client._disconnected.exception(), aiomqtt.MqttError)
        return [handle for handle in late if "add_writer" in handle]

    assert len(run(scenario())) == (kind == "aiomqtt")
