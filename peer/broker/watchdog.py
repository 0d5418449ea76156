"""Runs a broker and ends it with its parent: `python watchdog.py FOLDER COMMAND…`, see broker.py.

A process that is killed can stop nothing and clean up nothing. This one stands between it and its broker:
its standard input ends with the parent, and then the broker is stopped and the temporary folder removed.
It imports nothing of this package, so that it starts fast.
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
"""How the names of brokers' temporary folders begin: no other folder is ever removed."""
LINGER = 3.0
"""Seconds that the broker outlives its parent: the peers have lost theirs too, and hand over and leave."""
STOP_SECONDS = 5.0
"""Seconds that the broker has to end by itself once it is asked to; then it is killed."""
_PR_SET_PDEATHSIG = 1


def main(folder: str, command: list[str]) -> int:
    """Run the command until it ends, a signal asks it to, or the parent is gone; its exit code."""
    ended, orphaned = threading.Event(), threading.Event()
    asked: SimpleQueue[None] = SimpleQueue()  # the one that bears a signal within a signal
    # Before the broker runs: a watchdog that dies of a signal leaves it behind.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.put(None))
    broker = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_dying_with_us())

    def follow_parent() -> None:
        while os.read(0, 1024):
            pass
        orphaned.set()
        ended.wait(LINGER)
        asked.put(None)

    def stop_when_asked() -> None:
        asked.get()
        broker.terminate()  # does nothing to one that has ended
        if not ended.wait(STOP_SECONDS):
            broker.kill()

    for task in (follow_parent, stop_when_asked):
        threading.Thread(target=task, daemon=True).start()
    code = broker.wait()
    ended.set()
    if orphaned.is_set() and os.path.basename(folder).startswith(FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _dying_with_us() -> Callable[[], Any] | None:
    """On Linux the kernel kills the broker when its watchdog is killed; elsewhere nobody does."""
    if not sys.platform.startswith("linux"):
        return None
    libc, us = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != us:  # it was quicker
            os._exit(1)

    return ask


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
