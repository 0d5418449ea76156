"""What a peer asks of the machine it runs on: clocks, names of new sessions, files, and a thread.

A simulation hands in a machine of its own, so that one seed gives one history.
"""

from __future__ import annotations

import secrets
import time
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from .checkpoint import load_checkpoint, save_checkpoint
from .lock import CheckpointLock
from .worker import ThreadWorker, Worker

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Lock(Protocol):
    """Held by one running peer at a time."""

    def acquire(self) -> None:
        """Take the lock; PeerError if another process holds it."""
        ...

    def release(self) -> None:
        """Let go."""
        ...


class Files(Protocol):
    """Where a peer keeps what must survive its process."""

    def save(self, path: Path, tree: dict[str, Any], *, sync: bool) -> None:
        """Replace a checkpoint, whole or not at all; OSError if that cannot be done."""
        ...

    def load(self, path: Path) -> dict[str, Any] | None:
        """Return a checkpoint, or None if there is none; PeerError if it cannot be read."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, if it is there."""
        ...

    def lock(self, path: Path) -> Lock:
        """Return the lock of a checkpoint, not taken yet."""
        ...


class Machine(Protocol):
    """Clocks, randomness, files and a thread."""

    files: Files

    def monotonic(self) -> float:
        """Return seconds of a clock that is never set: the one that the event loop keeps."""
        ...

    def wall(self) -> float:
        """Return seconds since 1970, by a clock that may be set."""
        ...

    def uptime(self) -> float:
        """Return seconds that go on while the device sleeps, unlike `monotonic` on Linux."""
        ...

    def boot(self) -> str | None:
        """Return the name of this run of the machine, another one after every start, if it has names."""
        ...

    def new_session(self) -> str:
        """Draw the name of a new session: never drawn before, and never again."""
        ...

    def worker(self, name: str) -> Worker:
        """Return the thread that owns a peer's values, not started yet."""
        ...


class DiskFiles:
    """Checkpoints on the disk."""

    def save(self, path: Path, tree: dict[str, Any], *, sync: bool) -> None:
        """See Files."""
        save_checkpoint(path, tree, sync=sync)

    def load(self, path: Path) -> dict[str, Any] | None:
        """See Files."""
        return load_checkpoint(path)

    def remove(self, path: Path) -> None:
        """See Files."""
        path.unlink(missing_ok=True)

    def lock(self, path: Path) -> Lock:
        """See Files."""
        return CheckpointLock(path)


class RealMachine:
    """The machine that this process runs on."""

    def __init__(self) -> None:
        self.files: Files = DiskFiles()

    def monotonic(self) -> float:
        """See Machine."""
        return time.monotonic()

    def wall(self) -> float:
        """See Machine."""
        return time.time()

    def uptime(self) -> float:
        """See Machine."""
        since_boot = getattr(time, "CLOCK_BOOTTIME", None)
        return time.time() if since_boot is None else time.clock_gettime(since_boot)

    def boot(self) -> str | None:
        """See Machine; Linux gives every boot a name."""
        return _boot_id()

    def new_session(self) -> str:
        """See Machine."""
        return secrets.token_hex(8)

    def worker(self, name: str) -> Worker:
        """See Machine."""
        return ThreadWorker(name)


@cache
def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text("ascii").strip() or None
    except (OSError, ValueError):
        return None


def mark(machine: Machine, at: float) -> dict[str, Any]:
    """Return a time of `uptime` as plain data that another process can compare with its own."""
    return {"boot": machine.boot(), "clock": at, "wall": machine.wall() - (machine.uptime() - at)}


def moment(machine: Machine, then: dict[str, Any]) -> float | None:
    """Return the time of a mark by the `uptime` of now.

    None if the machine has started anew since, or if the time is yet to come because a clock was set
    back: nobody can tell then how long ago it was.
    """
    if then["boot"] != machine.boot():
        return None
    now = machine.uptime()
    at = then["clock"] if machine.boot() is not None else now - (machine.wall() - then["wall"])
    return min(at, now) if at <= now + 1.0 else None
