"""Run a peer as a service of systemd: the text of its unit, and the messages that systemd waits for."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .exits import ExitCode, PeerError

WATCHDOG_SECONDS = 120
"""Seconds without a sign of life from the event loop after which systemd restarts a peer."""
STOP_SECONDS = 120
"""Seconds that a peer has to hand over what it holds before systemd kills it."""


def unit_text(
    description: str, command: Sequence[str], folder: Path, *, user: str, memory: str
) -> str:
    """Return the unit of a service that runs a peer.

    It is started again after a crash, and after exit code 3, when its goodbye is still to be delivered. It is
    not where a person has to mend something first, nor where another device has taken its name.

    command: the program and its arguments. folder: the working directory. memory: a limit, as in 512M.
    """
    final = f"{ExitCode.CANNOT_TAKE_PART:d} {ExitCode.REPLACED:d}"
    sections = {
        "Unit": {
            "Description": _escaped(description),
            "Wants": "network-online.target",
            "After": "network-online.target",
        },
        "Service": {
            "Type": "notify",
            "ExecStart": " ".join(map(_quoted, command)),
            "WorkingDirectory": _escaped(str(folder)),
            "User": user,
            "Restart": "on-failure",
            "RestartSec": "10",
            "RestartPreventExitStatus": final,
            "WatchdogSec": str(WATCHDOG_SECONDS),
            "TimeoutStartSec": "300",
            "TimeoutStopSec": str(STOP_SECONDS),
            "MemoryMax": memory,
        },
        "Install": {"WantedBy": "multi-user.target"},
    }
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in entries.items())
        for name, entries in sections.items()
    )


def _escaped(text: str) -> str:
    """Return a text without specifiers, which systemd writes with %."""
    if not text.isprintable():
        raise PeerError(f"{text!r} cannot stand in a unit of systemd: it is not one printable line")
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """Return one word of a command line as systemd reads it."""
    escaped = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"'


async def report_alive(environment: Mapping[str, str] = os.environ) -> None:
    """Tell systemd that the peer has started, and then again and again that its event loop still runs.

    Returns at once if systemd does not wait for messages.
    """
    address = environment.get("NOTIFY_SOCKET")
    if not address:
        return
    interval = int(environment.get("WATCHDOG_USEC", "0")) / 2e6
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.setblocking(False)
        message = b"READY=1"
        while True:
            with suppress(
                OSError
            ):  # systemd is busy, or restarting: the next message may get through
                notify.sendto(
                    message, address.replace("@", "\0", 1) if address[0] == "@" else address
                )
            if not interval:
                return
            message = b"WATCHDOG=1"
            await asyncio.sleep(interval)
