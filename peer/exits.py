"""How a process that runs peers ends: errors, exit codes, and the signals that ask it to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from gossamer.errors import GossamerError


class ExitCode(IntEnum):
    """What a process that ran peers says to whoever started it; any other code is a crash."""

    FINISHED = 0
    """Every peer finished, or left because it was asked to."""
    CANNOT_TAKE_PART = 2
    """Somebody must act before a restart helps; the last line on stderr says what to do."""
    GOODBYE_NOT_DELIVERED = 3
    """The peer has ended, but no broker accepted its goodbye. Start it again to deliver it."""
    REPLACED = 4
    """Another device has taken this one's name. A service manager must not start it again."""
    INTERRUPTED = 130
    """Ctrl-C during start-up, before there was a peer to shut down cleanly."""


class PeerError(GossamerError):
    """A failure that retrying does not fix; the text is one line that says what to do."""

    exit_code: ExitCode = ExitCode.CANNOT_TAKE_PART


class NotSaved(PeerError):
    """The checkpoint cannot be written. The peer stops as if killed, without a goodbye: others were told
    nothing that is not in the last checkpoint written, so a restart can go on from it."""


class GoodbyeNotDelivered(PeerError):
    """The peer has ended, but no broker accepted its goodbye, which stays in the checkpoint."""

    exit_code = ExitCode.GOODBYE_NOT_DELIVERED


class Replaced(PeerError):
    """Another device has taken this peer's name."""

    exit_code = ExitCode.REPLACED

    def __init__(self, name: str, swarm: str) -> None:
        super().__init__(
            f"peer {name}: another device has taken its place in swarm {swarm!r} (it was started with "
            "--replace); start this one with --replace to take the name back, or give it another name"
        )


@contextmanager
def peer_errors(peer: str) -> Iterator[None]:
    """Turn a wrong value into a PeerError that names the peer."""
    try:
        yield
    except ValueError as error:
        raise PeerError(f"peer {peer}: {error}") from None


def first_error(errors: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first single error of a group: tasks fail one at a time, the others are then cancelled."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


INTERRUPTED = ExitCode.INTERRUPTED
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
