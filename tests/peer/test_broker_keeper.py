"""A broker's process ends when it should: not with a Ctrl-C for its parent, and never after its parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest

from gossamer.peer.broker import Broker, serve
from gossamer.peer.signals import stop_signals

PROGRAM = """
import signal, sys
from gossamer.peer.broker import Broker
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
with Broker(kind=sys.argv[1]) as broker:
    print(broker.port, broker._folder.name, flush=True)
    while True:
        signal.pause()
"""


@pytest.fixture(params=["mosquitto", "amqtt"])
def kind(request):
    if request.param == "mosquitto":
        request.getfixturevalue("mosquitto")
    return request.param


@pytest.fixture
def parent(kind, tmp_path):
    """A process of a terminal's group that runs a broker."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        yield process
        process.kill()


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until_silent(port: int) -> None:
    """The test's own timeout is the limit."""
    while listening(port):
        time.sleep(0.05)


def test_ctrl_c_is_not_for_the_broker(parent):
    port = int(parent.stdout.readline().split()[0])
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.stdout.readline() == "interrupted\n"
    time.sleep(0.5)  # what was sent to the broker too would have ended it by now
    assert listening(port)


def test_a_broker_and_its_folder_end_with_a_killed_parent(parent):
    port, folder = parent.stdout.readline().split()
    assert Path(folder).is_dir()
    parent.kill()
    until_silent(int(port))
    while Path(folder).exists():
        time.sleep(0.05)


def test_a_broker_ends_with_its_killed_keeper(kind):
    with Broker(kind=kind) as broker:
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        until_silent(broker.port)


def test_serve_ends_when_its_terminal_is_closed(kind):
    out = StringIO()
    assert serve(kind=kind, out=out, ready=lambda _: os.kill(os.getpid(), signal.SIGHUP)) == 0
    assert not listening(int(out.getvalue().rsplit(":", 1)[1]))


def test_who_was_told_to_ignore_a_closed_terminal_does():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
