"""What a peer asks of the machine it runs on: clocks, names of new sessions, files, a thread, and memory.

A simulation hands in a machine of its own, so that one seed gives one history.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from .checkpoint import CheckpointLock, load_checkpoint, save_checkpoint

P = ParamSpec("P")
T = TypeVar("T")


class Worker(Protocol):
    """`await worker.run(function, …)` runs a function on the peer's own thread; an async context."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` after everything that was asked for before it."""
        ...


class ThreadWorker:
    """A worker that is a real thread."""

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"peer-{name}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # A round of training may still run, and other peers share this event loop.
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See Worker."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))


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


class HeapTrimmer:
    """Returns freed memory to the system, at most once per `pause` seconds. Any thread may call it.

    A peer allocates and frees megabytes with every message. glibc keeps what is freed, scattered over the
    heap, so that after a burst of gossip a process holds many copies of its networks.

    trim: gives all free memory back; None where malloc cannot do that.
    pause: what is given back has to be asked for again, page by page, so not more often than this.
    """

    def __init__(
        self,
        trim: Callable[[], object] | None,
        *,
        pause: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trim, self._pause, self._clock = trim, pause, clock
        self._guard, self._last = threading.Lock(), -inf

    def __call__(self) -> bool:
        """Trim the heap, unless that was done a moment ago; True if it was done now."""
        if self._trim is None:
            return False
        with self._guard:
            now = self._clock()
            if now - self._last < self._pause:
                return False
            self._last = now
        self._trim()
        return True


def _malloc_trim() -> Callable[[], object] | None:
    """Return glibc's function that gives free memory back; None where malloc is not glibc's."""
    if not sys.platform.startswith("linux"):
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else partial(trim, 0)


trim_heap = HeapTrimmer(_malloc_trim())
"""The one of this process, which has one heap."""
