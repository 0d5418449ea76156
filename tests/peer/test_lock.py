"""One running peer per checkpoint."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest
from peer_kit import Clocks, Nest, Still, make_learner, quick
from waiting import PATIENCE, until

from gossamer.peer.exits import PeerError
from gossamer.peer.machine import CheckpointLock, Files


def test_the_second_is_refused_until_the_first_lets_go(tmp_path):
    path = tmp_path / "a.checkpoint"
    first, second = CheckpointLock(path), CheckpointLock(path)
    first.acquire()
    with pytest.raises(PeerError, match=r"peer a runs here already, .*a\.checkpoint"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    second.release()  # twice does no harm
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_a_killed_process_is_free(tmp_path):
    path = tmp_path / "a.checkpoint"
    file = tmp_path / "a.checkpoint.lock"
    # The lock inside a CheckpointLock, which takes a second less to load.
    code = (
        "import os, sys, pathlib\n"
        "from gossamer.files import FileLock\n"
        "assert FileLock(pathlib.Path(sys.argv[1])).acquire()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], check=False)
    assert done.returncode == -9
    assert file.exists()
    lock = CheckpointLock(path)
    lock.acquire()
    lock.release()


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(PeerError, match=r"cannot be locked: No such file or directory; give"):
        CheckpointLock(tmp_path / "nowhere" / "a.checkpoint").acquire()


class SlowLock(CheckpointLock):
    """A lock on a disk that takes its time."""

    begun, may_go_on = threading.Event(), threading.Event()

    def acquire(self):
        self.begun.set()
        assert self.may_go_on.wait(PATIENCE)
        super().acquire()


class SlowFiles(Files):
    def lock(self, path):
        return SlowLock(path)


def test_a_peer_that_is_cancelled_while_it_takes_the_lock_does_not_keep_it(run, tmp_path):
    path, machine = tmp_path / "a.checkpoint", Clocks()
    machine.files = SlowFiles()

    async def swarm():
        life = Nest(quick()).start("a", checkpoint=path, machine=machine)
        await until(SlowLock.begun.is_set)
        life.task.cancel()
        SlowLock.may_go_on.set()
        await asyncio.gather(life.task, return_exceptions=True)

    run(swarm())
    CheckpointLock(path).acquire()


def test_a_peer_holds_the_lock_while_it_runs(run, tmp_path):
    path = tmp_path / "a.checkpoint"

    async def swarm():
        nest = Nest(quick(rounds=10**9))
        life = nest.start("a", Still(make_learner("a"), 1.0), checkpoint=path)
        await until(life.trains)
        with pytest.raises(
            PeerError, match=f"peer a runs here already, as process {os.getpid()}, with"
        ):
            await Nest(quick(swarm="other")).start("a", checkpoint=path).task
        life.peer.leave()
        await life.task

    run(swarm())
    CheckpointLock(path).acquire()
