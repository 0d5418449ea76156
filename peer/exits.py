"""How a process that runs peers ends: its errors, exit codes, and the signals that stop it."""

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
    """Exit code of a process that ran peers; any other code is a crash."""

    FINISHED = 0
    """Every peer finished, or left because it was asked to."""
    CANNOT_TAKE_PART = 2
    """A restart does not help before a user acts; the last line on stderr says what to do."""
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
    """The checkpoint cannot be written. The peer stops without a goodbye, as if it were killed. It has sent
    nothing that is not in its last checkpoint, so a restarted process can continue from that."""


class GoodbyeNotDelivered(PeerError):
    """The peer has ended, but no broker accepted its goodbye, which stays in the checkpoint."""

    exit_code = ExitCode.GOODBYE_NOT_DELIVERED


class Replaced(PeerError):
    """Another device has taken this peer's name."""

    exit_code = ExitCode.REPLACED

    def __init__(self, name: str, swarm: str) -> None:
        super().__init__(
            f"peer {name}: another device has replaced it in swarm {swarm!r} (it was started with "
            "--replace); start this one with --replace to take the name back, or give it another name"
        )


@contextmanager
def peer_errors(peer: str) -> Iterator[None]:
    """Turn a ValueError into a PeerError that names the peer."""
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
    """Let Ctrl-C end the process at once and without output: for imports, when there is nothing to save yet.

    A KeyboardInterrupt in the middle of an import shows a traceback, and a library may turn it into
    another error. Has no effect outside the main thread, or if Ctrl-C is ignored.
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
    """Return the signals that stop a process: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (the terminal closed).

    SIGHUP is left out if it is ignored, as with nohup, and where it does not exist.
    """
    always = (signal.SIGINT, signal.SIGTERM)
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return always
    return (*always, hangup)
