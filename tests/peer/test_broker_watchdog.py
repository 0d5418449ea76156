"""A broker's process ends when it should: not with a Ctrl-C for its parent, and never after its parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from waiting import wait_until

from gossamer.peer import Broker, serve
from gossamer.peer.broker.watchdog import FOLDER_PREFIX
from gossamer.peer.exits import stop_signals

PROGRAM = """
import signal, sys
from gossamer.peer import Broker
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
with Broker(kind=sys.argv[1]) as broker:
    print(broker.port, broker.folder, broker.pid, flush=True)
    while True:
        signal.pause()
"""


@pytest.fixture(params=["mosquitto", "nats"])
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
    wait_until(lambda: not listening(port), "the broker to end")


def test_ctrl_c_is_not_for_the_broker(parent):
    port, _, pid = parent.stdout.readline().split()
    assert os.getpgid(parent.pid) == parent.pid
    assert os.getpgid(int(pid)) != parent.pid  # a terminal interrupts a group of processes
    for _ in range(2):
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.readline() == "interrupted\n"
        assert listening(int(port))


def test_a_broker_and_its_folder_end_with_a_killed_parent(parent):
    port, folder, _ = parent.stdout.readline().split()
    assert Path(folder).is_dir()
    parent.kill()
    until_silent(int(port))
    wait_until(lambda: not Path(folder).exists(), "its folder to go")


def test_a_broker_ends_with_its_killed_watchdog(kind):
    with Broker(kind=kind) as broker:
        assert broker.pid is not None
        os.kill(broker.pid, signal.SIGKILL)
        until_silent(broker.port)


WATCHDOG = """
import os, signal, subprocess, sys
from gossamer.peer.broker import watchdog
watchdog.LINGER, watchdog.STOP_SECONDS = 0.1, float(sys.argv[3])
start = subprocess.Popen
def Popen(*arguments, **options):  # a signal comes before the watchdog knows its broker
    broker = start(*arguments, **options, stdout=subprocess.PIPE)
    assert broker.stdout.readline().strip() == b"ready"
    if "signal" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)
    return broker
subprocess.Popen = Popen
sys.exit(watchdog.main(sys.argv[1], [sys.executable, "-c", sys.argv[2]]))
"""
BROKER = """
import signal, sys
signal.signal(signal.SIGTERM, {action})
print("ready", flush=True)
while True:
    signal.pause()
"""
WILLING, STUBBORN = "lambda *_: sys.exit(7)", "signal.SIG_IGN"
PATIENCE = {
    WILLING: "250",
    STUBBORN: "0.1",
}  # seconds: who is willing is never killed for being slow


def keep(folder: Path, action: str, *options: str) -> subprocess.Popen[bytes]:
    """A watchdog in the folder; its broker does this when it is asked to end."""
    told = [str(folder), BROKER.format(action=action), PATIENCE[action], *options]
    command = [sys.executable, "-c", WATCHDOG, *told]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


@pytest.mark.parametrize(
    ("action", "code"),
    [(WILLING, 7), (STUBBORN, 128 + signal.SIGKILL)],
    ids=["willing", "stubborn"],
)
def test_a_watchdog_asked_at_once_ends_when_its_broker_has(tmp_path, action, code):
    """The broker is asked to end, and killed when it does not; its watchdog never ends before it."""
    with keep(tmp_path, action, "signal") as watchdog:
        assert watchdog.wait() == code


@pytest.mark.parametrize("name", [FOLDER_PREFIX + "x", "somebody-s-own"])
def test_only_a_broker_s_own_folder_is_removed(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    with keep(folder, WILLING) as watchdog:
        watchdog.stdin.close()  # the parent is gone
        assert watchdog.wait() == 7
    assert folder.exists() == (not name.startswith(FOLDER_PREFIX))


@contextmanager
def hangup(action: signal.Handlers) -> Iterator[None]:
    """A SIGHUP that this process was started with: ignored under nohup, else left to the system."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_serve_ends_when_its_terminal_is_closed(kind):
    out = StringIO()
    with hangup(signal.SIG_DFL):
        assert serve(kind=kind, out=out, ready=lambda _: os.kill(os.getpid(), signal.SIGHUP)) == 0
    assert not listening(int(out.getvalue().rsplit(":", 1)[1]))


def test_serve_under_nohup_outlives_its_terminal(kind):
    outlived = []

    def ready(broker: Broker) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        outlived.append(listening(broker.port))
        os.kill(os.getpid(), signal.SIGTERM)

    with hangup(signal.SIG_IGN):
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
        assert serve(kind=kind, out=StringIO(), ready=ready) == 0
    assert outlived == [True]
