"""How a process that runs peers deals with whoever started it: errors, exit codes, signals, systemd."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
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
    NOT_REACHED = 5
    """No broker could be reached, a peer of `expect` did not come online, or the port for metrics was taken.
    Start it again."""
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


class Revoked(PeerError):
    """The swarm's owner has revoked this peer."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"peer {name}: its invitation was revoked by the swarm's owner; if it may take part again, the "
            "owner enrols it under another name"
        )


class NotReached(PeerError):
    """A peer of `expect` did not come online, or a port is taken: a later start may succeed."""

    exit_code = ExitCode.NOT_REACHED


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
    """Return the first error of a nested group: when one task fails, the others are only cancelled."""
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


# --- a service of systemd: the text of its unit, and the messages that systemd waits for ---------

WATCHDOG_SECONDS = 120
"""Seconds without a sign of life from the event loop after which systemd restarts a peer."""
STOP_SECONDS = 120
"""Seconds that a peer has to hand over what it holds before systemd kills it."""


def unit_text(
    description: str,
    command: Sequence[str],
    folder: Path,
    *,
    user: str,
    memory: str,
    writes: Sequence[Path] = (),
    is_broker: bool = False,
) -> str:
    """Return the unit of a service that runs a peer, or a broker.

    systemd starts a peer again after a crash, after exit code 3 (its goodbye is still to be delivered) and
    after 5 (no broker was reached, as after a power cut), but not where a person has to mend something first,
    nor if another device has taken its name. It starts a broker again after any failure.

    The service writes nowhere but in its folder, in `writes` and in a temporary folder of its own. Devices
    such as cameras and graphics cards stay open to it.

    command: the program and its arguments. folder: the working directory. memory: a limit, as in 512M.
    writes: further folders that it writes to; for a broker, all of them.
    """
    final = f"{ExitCode.CANNOT_TAKE_PART:d} {ExitCode.REPLACED:d}"
    of_peer = {
        "Type": "notify",
        "RestartPreventExitStatus": final,
        "WatchdogSec": str(WATCHDOG_SECONDS),
        "TimeoutStartSec": "300",
        "TimeoutStopSec": str(STOP_SECONDS),
    }
    # Mixed: the process that is told to stop stops its broker itself.
    of_broker = {"Type": "exec", "KillMode": "mixed", "SystemCallFilter": "@system-service"}
    sections = {
        "Unit": {
            "Description": _escaped(description),
            "Wants": "network-online.target",
            "After": "network-online.target",
        },
        "Service": {
            "ExecStart": " ".join(map(_quoted, command)),
            "WorkingDirectory": _escaped(str(folder)),
            "User": user,
            "Restart": "on-failure",
            "RestartSec": "10",
            **(of_broker if is_broker else of_peer),
            "MemoryMax": memory,
            **_confinement([*writes] if is_broker else [folder, *writes], [folder, *command], user),
        },
        "Install": {"WantedBy": "multi-user.target"},
    }
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in entries.items())
        for name, entries in sections.items()
    )


def _confinement(writes: Sequence[Path], uses: Sequence[str | Path], user: str) -> dict[str, str]:
    """Return what keeps a service from changing anything but some folders and temporary files.

    uses: what it reads; a /tmp of its own would hide it if it is in the machine's.
    """
    shared = [Path("/tmp"), Path("/var/tmp")]
    uses_shared = any(Path(each).is_relative_to(folder) for each in uses for folder in shared)
    writable = list(dict.fromkeys([*writes, *(shared if uses_shared else ())]))
    options = {
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ReadWritePaths": " ".join(f'"{_in_quotes(str(path))}"' for path in writable),
        "PrivateTmp": "no" if uses_shared else "yes",
        "ProtectKernelModules": "yes",
        "ProtectKernelLogs": "yes",
        "ProtectControlGroups": "yes",
        "ProtectHostname": "yes",
        "ProtectProc": "invisible",
        "RestrictNamespaces": "yes",
        "RestrictRealtime": "yes",
        "RestrictSUIDSGID": "yes",
        "LockPersonality": "yes",
        "SystemCallArchitectures": "native",
    }
    if user != "root":  # without them root cannot read other users' files, such as the device's
        options["CapabilityBoundingSet"] = ""
    return options


def _escaped(text: str) -> str:
    """Return a text with % escaped, which begins a specifier in a unit of systemd."""
    if not text.isprintable():
        raise PeerError(f"{text!r} cannot be part of a systemd unit: it is not one printable line")
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """Return one word of a command line as systemd reads it."""
    return f'"{_in_quotes(word).replace("$", "$$")}"'


def _in_quotes(text: str) -> str:
    return _escaped(text).replace("\\", "\\\\").replace('"', '\\"')


async def report_alive(environment: Mapping[str, str] = os.environ) -> None:
    """Tell systemd that the peer has started, and then again and again that its event loop still runs.

    Returns at once if systemd does not wait for messages.
    """
    address = environment.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a socket without a file
        address = address.replace("@", "\0", 1)
    interval = int(environment.get("WATCHDOG_USEC", "0")) / 2e6
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.setblocking(False)
        message = b"READY=1"
        while True:
            with suppress(OSError):  # systemd is busy: it gets the message later
                notify.sendto(message, address)
                if not interval:
                    return
                message = b"WATCHDOG=1"
            await asyncio.sleep(interval or 1.0)
