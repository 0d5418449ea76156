"""Simulated devices: clocks, disks, processes, and the one worker of each process.

A device outlives its processes. A process that is killed can neither write to the device's disk nor talk
to the broker from that moment on, whatever its cancelled tasks still try in their `finally` blocks.

Functions that run on a worker cannot give way to the event loop. When one of them sleeps or trains, its
device notes the time as `ahead`, which its clocks include, and the worker waits for that long once the
function has returned. Nobody can see the difference: only the disk is touched meanwhile, and what a
killed process would have written later than its death is taken off the disk again.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.random  # its import draws from `secrets`
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from gossamer.peer import CheckpointLock, Files, Machine, PeerError, Worker

from .loop import OWNER, SimLoop

EPOCH = 1_800_000_000.0
"""The wall clock when a history begins."""
VERSIONS_KEPT = 4
"""Writes that a power cut may undo, of those that were not synced."""


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def copy_tree(value: Any) -> Any:
    """Return a copy as a checkpoint would give it back; TypeError for what a checkpoint cannot hold."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, dict):
        return {k: v if type(v) in _PLAIN else copy_tree(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [v if type(v) in _PLAIN else copy_tree(v) for v in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    raise TypeError(f"a checkpoint cannot hold a {kind.__name__}")


@dataclass
class Write:
    """One version of a file."""

    at: float
    tree: dict[str, Any]
    synced: bool


class Device:
    """One machine with a disk. Faults are set as attributes, by the history.

    named_boots: whether the system tells one boot from another, as Linux does.
    """

    def __init__(
        self, name: str, loop: SimLoop, rng: random.Random, *, named_boots: bool = True
    ) -> None:
        self.name, self.loop, self.rng = name, loop, rng
        self.offset = 0.0
        """Seconds by which the wall clock is ahead."""
        self.is_cut = False
        """Whether it cannot reach the broker."""
        self.full_until = float("-inf")
        """Until when nothing can be written."""
        self.ahead = 0.0
        """Seconds that the function on the worker has slept so far."""
        self.disk: dict[Path, list[Write]] = {}
        self.locks: dict[Path, Process] = {}
        self.processes: list[Process] = []
        self._named_boots = named_boots
        self._boots = 0
        self._booted = 0.0

    @property
    def process(self) -> Process | None:
        """The process that runs now."""
        return self.processes[-1] if self.processes and self.processes[-1].alive else None

    def now(self) -> float:
        return self.loop.time() + self.ahead

    def wall(self) -> float:
        return EPOCH + self.now() + self.offset

    def uptime(self) -> float:
        return self.now() - self._booted if self._named_boots else self.wall()

    def boot_id(self) -> str | None:
        return f"boot-{self._boots}" if self._named_boots else None

    def cut_power(self) -> None:
        """Start anew, with whatever the disk has kept of what was not synced."""
        for path, writes in self.disk.items():
            last = max((i for i, write in enumerate(writes) if write.synced), default=0)
            kept = self.rng.randint(last, len(writes) - 1)
            self.disk[path] = writes[: kept + 1]
        self._boots += 1
        self._booted = self.loop.time()


class SimLock(CheckpointLock):
    """A lock that dies with its process."""

    def __init__(self, process: Process, path: Path) -> None:
        self._process, self._path = process, path

    def acquire(self) -> None:
        holder = self._process.device.locks.get(self._path)
        if holder is not None and holder.alive and holder is not self._process:
            raise PeerError(f"{self._path}: another process uses it: stop that one first")
        self._process.device.locks[self._path] = self._process

    def release(self) -> None:
        locks = self._process.device.locks
        if locks.get(self._path) is self._process:
            del locks[self._path]


class SimFiles(Files):
    """The device's disk, as one process sees it."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def save(self, path: Path, tree: dict[str, Any], *, sync: bool) -> None:
        process, device = self._process, self._process.device
        if not process.alive:
            return
        if device.now() < device.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write = Write(device.now(), copy_tree(tree), sync)
        writes = device.disk.setdefault(path, [])
        writes.append(write)
        del writes[:-VERSIONS_KEPT]
        process.on_save(path, write)

    def load(self, path: Path) -> dict[str, Any] | None:
        writes = self._process.device.disk.get(path)
        return copy_tree(writes[-1].tree) if writes else None

    def remove(self, path: Path) -> None:
        if self._process.alive:
            self._process.device.disk.pop(path, None)

    def lock(self, path: Path) -> SimLock:
        return SimLock(self._process, path)


class Process(Machine):
    """One process on a device: the machine of its peer, and the means to kill it.

    on_save: told about every write that reaches the disk.
    """

    def __init__(
        self,
        device: Device,
        *,
        slowness: float = 0.0,
        on_save: Callable[[Path, Write], None] = lambda _path, _write: None,
    ) -> None:
        self.device, self.on_save = device, on_save
        self.owner = f"{device.name}#{len(device.processes)}"
        self.alive = True
        self.slowness = slowness
        self.started = device.loop.time()
        self.sessions: list[str] = []
        self.files = SimFiles(self)
        self.task: asyncio.Task[Any] | None = None
        self.context = contextvars.copy_context()
        self.context.run(OWNER.set, self.owner)
        self.on_death: list[Callable[[], None]] = []
        """What else dies with it: connections."""
        device.processes.append(self)

    def start(self, main: Any) -> asyncio.Task[Any]:
        """Run a coroutine as this process."""
        self.task = self.device.loop.create_task(main, name=self.owner, context=self.context)
        return self.task

    def kill(self) -> None:
        """End it as `kill -9` would: nothing is written or sent from now on."""
        if not self.alive:
            return
        self.alive = False
        now = self.device.loop.time()
        for path, writes in list(self.device.disk.items()):
            kept = [write for write in writes if write.at <= now]
            if kept:
                self.device.disk[path] = kept
            else:
                del self.device.disk[path]
        for die in self.on_death:
            die()
        self.device.loop.release(self.owner)
        if self.task is not None:
            self.task.cancel()

    # --- Machine --------------------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.device.now()

    def wall(self) -> float:
        return self.device.wall()

    def uptime(self) -> float:
        return self.device.uptime()

    def boot_id(self) -> str | None:
        return self.device.boot_id()

    def new_session(self) -> str:
        self.sessions.append(f"{self.device.rng.getrandbits(64):016x}")
        return self.sessions[-1]

    def process_id(self) -> str:
        return self.owner

    def worker(self, name: str) -> SimWorker:
        return SimWorker(self)


class SimWorker(Worker):
    """Runs functions one after the other on the event loop, each after a drawn delay.

    As on a thread, a function that has begun is not stopped when whoever waits for it is cancelled.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._jobs: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._work(), name=f"{self._process.owner} worker")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        self._wake.set()
        assert self._task is not None
        await self._task

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._jobs.append((lambda: function(*args, **kwargs), future))
        self._wake.set()
        return await future

    async def run_short(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await self.run(function, *args, **kwargs)

    async def _work(self) -> None:
        device, slowness = self._process.device, self._process.slowness
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._jobs and not self._closing:
                function, future = self._jobs.popleft()
                if future.cancelled():
                    continue
                if slowness and self._process.alive:
                    await asyncio.sleep(device.rng.expovariate(1.0) * slowness)
                result, error = None, None
                device.ahead = 0.0
                try:
                    with _on_worker(device):
                        result = function()
                except Exception as raised:
                    error = raised
                ahead, device.ahead = device.ahead, 0.0
                if ahead and self._process.alive:
                    await asyncio.sleep(ahead)
                if future.done():
                    continue
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)
            if self._closing:
                for _, future in self._jobs:
                    future.cancel()
                return


# --- the process that simulates ----------------------------------------------------------------------

_working: list[Device] = []


@contextmanager
def _on_worker(device: Device) -> Iterator[None]:
    _working.append(device)
    try:
        yield
    finally:
        _working.pop()


def sleep_on_worker(seconds: float) -> None:
    """Let virtual time pass for the function that runs on a worker."""
    if not _working:
        raise AssertionError("time.sleep on the event loop: it would block every task of the peer")
    _working[-1].ahead += max(0.0, seconds)


@dataclass
class Entropy:
    """Stands in for the operating system's randomness and clock while a history runs.

    What a peer asks of its machine is handed in; this is for what is drawn beneath it: key pairs, numbers
    of messages and invitations. Without it, one seed would give histories that differ in their bytes.
    """

    seed: str
    _saved: list[tuple[Any, str, Any]] = field(default_factory=list)

    def __enter__(self) -> Self:
        numbers, keys = self._stream("numbers"), self._stream("keys")
        self._replace(time, "sleep", sleep_on_worker)
        self._replace(time, "time", lambda: EPOCH)
        self._replace(secrets, "token_bytes", lambda count=32: numbers.randbytes(count))
        self._replace(secrets, "token_hex", lambda count=32: numbers.randbytes(count).hex())
        self._replace(secrets, "randbits", numbers.getrandbits)
        self._replace(
            X25519PrivateKey,
            "generate",
            classmethod(lambda cls: cls.from_private_bytes(keys.randbytes(32))),
        )
        return self

    def _stream(self, what: str) -> random.Random:
        return random.Random(f"{self.seed}/{what}")

    def __exit__(self, *_: object) -> None:
        for where, name, value in reversed(self._saved):
            setattr(where, name, value)
        self._saved.clear()

    def _replace(self, where: Any, name: str, value: Any) -> None:
        self._saved.append((where, name, where.__dict__[name]))
        setattr(where, name, value)
