"""Runs a broker and stops it when its parent ends: `python watchdog.py FOLDER COMMAND…`, see broker.py.

A process that is killed cannot stop its broker or clean up. Therefore the watchdog runs the broker: when its
parent ends, it reads end of file on standard input, stops the broker, and removes the temporary folder. It
imports nothing of this package, so that it starts fast.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

FOLDER_PREFIX = "gossamer-broker-"
"""Prefix of the names of brokers' temporary folders: the watchdog removes no other folder."""
LINGER = 3.0
"""Seconds that the broker runs after its parent has ended: the peers of that parent need it to hand over
their mass and leave."""
STOP_SECONDS = 5.0
"""Seconds for the broker to exit after SIGTERM; then it is killed."""
_PR_SET_PDEATHSIG = 1


def main(folder: str, command: list[str]) -> int:
    """Run the command until it exits, a signal stops it, or the parent has ended; return its exit code."""
    broker_ended, parent_ended = threading.Event(), threading.Event()
    # A SimpleQueue is reentrant: a signal may interrupt a signal handler.
    stop_requests: SimpleQueue[None] = SimpleQueue()
    # Before the broker starts: a watchdog killed by a signal would leave the broker running.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop_requests.put(None))
    broker = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent())
    if hasattr(signal, "SIGHUP"):  # lets a broker read its users again
        signal.signal(signal.SIGHUP, lambda *_: broker.send_signal(signal.SIGHUP))

    def follow_parent() -> None:
        while os.read(0, 1024):
            pass
        parent_ended.set()
        broker_ended.wait(LINGER)
        stop_requests.put(None)

    def stop_on_request() -> None:
        stop_requests.get()
        broker.terminate()  # has no effect if the broker has exited
        if not broker_ended.wait(STOP_SECONDS):
            broker.kill()

    for task in (follow_parent, stop_on_request):
        threading.Thread(target=task, daemon=True).start()
    code = broker.wait()
    broker_ended.set()
    if parent_ended.is_set() and os.path.basename(folder).startswith(FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _end_with_parent() -> Callable[[], Any] | None:
    """Return a function that lets Linux kill the calling process when its parent ends; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def set_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the signal was set
            os._exit(1)

    return set_death_signal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
