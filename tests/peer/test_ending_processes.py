"""Peers' processes end well: signals that come twice, a parent that was killed, a closed standard input."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from peer_kit import quick
from waiting import turns, until, wait_until

from gossamer.gossip import ONE
from gossamer.peer.process import PeerSpec, ProcessSpec, run_process
from gossamer.peer.spec import BrokerAddress

HERE = Path(__file__).parent


@pytest.fixture
def spec(tmp_path, empty_broker, monkeypatch):
    """Two peers of one process that would train for ever."""
    monkeypatch.chdir(HERE)
    settings = quick(
        rounds=10**9, expect=("a", "b"), founder=True, test_every=10**9, leave_timeout=200.0
    )
    peers = [PeerSpec(n, "learner_kit:make_learner", {"name": n}, settings) for n in "ab"]
    return ProcessSpec(BrokerAddress(empty_broker.url), str(tmp_path), peers)


async def until_trained(spec: ProcessSpec) -> None:
    files = [Path(spec.folder) / f"{peer.name}.jsonl" for peer in spec.peers]
    await until(lambda: all(file.exists() and file.stat().st_size for file in files))


@pytest.fixture
def pipe():
    """What a process reads in place of its standard input, and the end that the test holds."""
    theirs, ours = os.pipe()
    yield theirs, ours
    os.close(theirs)


def test_signals_that_come_again_do_not_disturb_the_leaving(run, spec):
    async def scenario():
        host = asyncio.create_task(run_process(spec))
        await until_trained(spec)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            await turns(10)
        return await host

    reports = run(scenario())
    assert sum(sum(report.weight["global"][:2]) for report in reports) == 2 * ONE


def test_peers_leave_when_their_supervisor_is_gone(run, spec, pipe, caplog):
    caplog.set_level("INFO")

    async def scenario():
        host = asyncio.create_task(run_process(spec, parent=pipe[0]))
        await until_trained(spec)
        os.close(pipe[1])
        return await host

    assert len(run(scenario())) == 2
    assert caplog.text.count("left swarm nest: it was told to stop") == 2


@pytest.mark.live
def test_peers_without_a_supervisor_do_not_mind_a_closed_standard_input(run, spec, tmp_path):
    spec.write(tmp_path / "host.json")
    command = [sys.executable, "-m", "gossamer.peer", str(tmp_path / "host.json")]
    with subprocess.Popen(command, cwd=HERE, stdin=subprocess.DEVNULL) as process:
        try:
            run(until_trained(spec))
            assert process.poll() is None
            process.terminate()
            assert process.wait() == 0
        finally:
            process.kill()


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from gossamer.peer.process import PeerSpec
from gossamer.peer.spec import BrokerAddress
from gossamer.peer.settings import Settings
from gossamer.peer.swarm import LocalSwarm, SwarmSpec
folder = Path(sys.argv[1])
peers = [PeerSpec(name, "nobody:calls", {}, Settings()) for name in "ab"]
spec = SwarmSpec("nest", BrokerAddress(sys.argv[2]), folder, peers)
asyncio.run(LocalSwarm(spec, python=str(folder / "python")).run())
"""


@pytest.mark.timeout(300)  # torch is loaded, on whatever machine this is
@pytest.mark.live
def test_processes_hear_of_a_killed_supervisor(tmp_path, empty_broker):
    """A shell script in the peers' place says when its standard input ends."""
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\ntouch "$3$4.begun"\ncat\ntouch "$3$4.ended"\n')
    script.chmod(0o755)
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path), empty_broker.url]
    )
    try:
        wait_for_files(tmp_path, "begun", supervisor)
        # A process that begins now, with a closed standard input, has ended before theirs.
        control = [str(script), "", "", str(tmp_path / "control"), ""]
        subprocess.run(control, stdin=subprocess.DEVNULL, check=True)
        (tmp_path / "control.ended").unlink()
        assert not list(tmp_path.glob("*.ended"))
    finally:
        supervisor.kill()
        supervisor.wait()
    wait_for_files(tmp_path, "ended")


def wait_for_files(
    folder: Path, what: str, supervisor: subprocess.Popen[bytes] | None = None
) -> None:
    """Wait for what both scripts write, unless their supervisor has ended before."""
    files = [folder / f"host-{index}.json--with-parent.{what}" for index in (0, 1)]

    def written() -> bool:
        assert supervisor is None or supervisor.poll() is None
        return all(file.exists() for file in files)

    wait_until(written, what)
