"""The signals that ask a process to end well."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""The exit code that shells report for a command that Ctrl-C ended."""


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once, without a word: for imports, when nothing is to be kept yet.

    A KeyboardInterrupt in the middle of an import shows a traceback, and a library may turn it into
    another error. In other threads than the main one, and where Ctrl-C is ignored, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, a supervisor's request, and a terminal that was closed.

    The last one only where nobody said, as nohup does, that it is to be ignored.
    """
    asked = (signal.SIGINT, signal.SIGTERM)
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return asked
    return (*asked, hangup)
