"""What a peer asks of the machine it runs on: clocks, names of new sessions, a thread, memory, checkpoints.

A simulation hands in a machine of its own, so that one seed gives one history.

A checkpoint is any tree of plain data, arrays and tensors, written whole or not at all: one safetensors file,
the arrays as they are, the rest as JSON in its metadata. Nothing is pickled, so reading one runs no code.
What others are about to be told must be saved before, and is tried again for a while if the disk is full. A
peer that nobody hears saves now and then, so that a crash costs it seconds of training, not all of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gossamer.files import FileLock, atomic_path

from .exits import NotSaved, PeerError
from .settings import Limits, Settings

_log = logging.getLogger(__name__)


P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """The peer's own thread: `await worker.run(function, …)` runs a function on it; an async context."""

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"peer-{name}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # A round of training may still run, and other peers share this event loop.
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` after everything that was asked for before it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))


class Files:
    """Where a peer keeps what must survive its process: checkpoints on the disk."""

    def save(self, path: Path, tree: dict[str, Any], *, sync: bool) -> None:
        """Replace a checkpoint, whole or not at all; OSError if that cannot be done."""
        save_checkpoint(path, tree, sync=sync)

    def load(self, path: Path) -> dict[str, Any] | None:
        """Return a checkpoint, or None if there is none; PeerError if it cannot be read."""
        return load_checkpoint(path)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, if it is there."""
        path.unlink(missing_ok=True)

    def lock(self, path: Path) -> CheckpointLock:
        """Return the lock of a checkpoint, not taken yet."""
        return CheckpointLock(path)


class Machine:
    """The machine that this process runs on. A simulated one overrides every method."""

    def __init__(self) -> None:
        self.files = Files()

    def monotonic(self) -> float:
        """Return seconds of a clock that is never set: the one that the event loop keeps."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds since 1970, by a clock that may be set."""
        return time.time()

    def uptime(self) -> float:
        """Return seconds that go on while the device sleeps, unlike `monotonic` on Linux."""
        since_boot = getattr(time, "CLOCK_BOOTTIME", None)
        return time.time() if since_boot is None else time.clock_gettime(since_boot)

    def boot(self) -> str | None:
        """Return the name of this run of the machine, another one after every start.

        None where there are no such names: Linux has them.
        """
        return _boot_id()

    def new_session(self) -> str:
        """Draw the name of a new session: never drawn before, and never again."""
        return secrets.token_hex(8)

    def worker(self, name: str) -> Worker:
        """Return the thread that owns a peer's values, not started yet."""
        return Worker(name)


@cache
def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip() or None
    except (OSError, ValueError):
        return None


def portable_time(machine: Machine, at: float) -> dict[str, Any]:
    """Return a time of `uptime` as plain data that another process can compare with its own."""
    return {"boot": machine.boot(), "clock": at, "wall": machine.wall() - (machine.uptime() - at)}


def uptime_of(machine: Machine, then: dict[str, Any]) -> float | None:
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


FORMAT = "gossamer-checkpoint-4"
_REMEDY = "move it away to begin anew, or put back a copy"


def save_checkpoint(path: Path, tree: dict[str, Any], *, sync: bool = False) -> None:
    """Replace the checkpoint at `path`.

    The rename is atomic, which is all that a killed process needs. After a power cut the file may be an
    older one, or cut: `sync` also forces the bytes and the rename to the disk, at a disk write per
    exchange. A peer can do without where it can tell that the machine has started anew (see `moment`): it
    then keeps values and rounds alone, for which an older file will do.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_pack(tree, tensors))
    with atomic_path(path, sync=sync) as part:
        metadata = {"format": FORMAT, "tree": text, "checksum": _checksum(text, tensors)}
        save_file(tensors, part, metadata)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The tree that was saved, or None if there is no file. PeerError if it is not what was saved."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise PeerError(
                    f"{path}: is not a checkpoint of this version of the program; move it away to begin "
                    "anew, or run the version that wrote it"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = metadata["tree"]
        if metadata["checksum"] != _checksum(text, tensors):
            raise PeerError(f"{path}: is damaged: its checksum is wrong; {_REMEDY}")
        return _unpack(json.loads(text), tensors)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise PeerError(
            f"{path}: cannot be read as a checkpoint, it may be cut: {error}; {_REMEDY}"
        ) from None


def _checksum(text: str, tensors: dict[str, torch.Tensor]) -> str:
    """Of all that a file says: a flipped bit is a valid number too, and would spread to every peer."""
    found = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].cpu()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Move tensors and arrays out, leaving their names; wrap what JSON would change."""
    if isinstance(value, torch.Tensor | np.ndarray):
        is_array = isinstance(value, np.ndarray)
        name = str(len(tensors))
        tensors[name] = torch.tensor(value) if is_array else value.detach().clone().contiguous()
        return {"$array" if is_array else "$tensor": name}
    if isinstance(value, dict):
        return {"$dict": [[_pack(k, tensors), _pack(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return [_pack(item, tensors) for item in value]
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def _unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$bytes" in value:
        return bytes.fromhex(value["$bytes"])
    if "$array" in value:
        return tensors[value["$array"]].numpy()
    return {_unpack(k, tensors): _unpack(v, tensors) for k, v in value["$dict"]}


class CheckpointLock:
    """The lock of a checkpoint, on a file beside it. Held from `acquire` to `release`."""

    def __init__(self, checkpoint: Path):
        self._checkpoint = checkpoint
        self._lock = FileLock(checkpoint.with_name(checkpoint.name + ".lock"))

    def acquire(self) -> None:
        """Take the lock, or raise a PeerError if another peer holds it."""
        try:
            taken = self._lock.acquire()
        except OSError as error:
            raise PeerError(
                f"{self._checkpoint}: cannot be locked: {error.strerror}; give the peer a "
                "checkpoint in a folder that it may write to"
            ) from None
        if not taken:
            raise PeerError(
                f"{self._checkpoint}: another running peer uses this checkpoint; stop it, or give "
                "each peer its own file"
            )

    def release(self) -> None:
        """Let go, and leave no file behind."""
        self._lock.release()


class Saver:
    """One peer's checkpoint file.

    path: None saves nothing. tree: returns what to save, when it is saved.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        path: Path | None,
        tree: Callable[[], dict[str, Any]],
        machine: Machine,
        limits: Limits,
    ):
        self.path = path
        self._name, self._settings, self._tree = name, settings, tree
        self._limits = limits
        self._machine = machine
        # A power cut may bring an older file back. Where boots have names it is known to be old, and
        # its session is not resumed. Else every save must reach the disk; and so must, everywhere,
        # the count of what was released with noise, or the report would state too small an epsilon.
        self._sync = machine.boot() is None or settings.dp is not None
        self._last, self._cost, self._round = machine.monotonic(), 0.0, 0
        self._failing = False
        self._blocked_since: float | None = None
        """Since when others cannot be told anything, because it cannot be saved."""
        self._retry_at = self._pause = 0.0

    # --- a former process -----------------------------------------------------------------------

    def load(self, schemas: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the checkpoint of a former process, if there is one; PeerError if it is bad."""
        tree = None if self.path is None else self._machine.files.load(self.path)
        if tree is None:
            return None
        with self.checkpoint_errors():
            if tree["peer"] != self._name or tree["schemas"] != schemas:
                raise PeerError(
                    f"{self.path}: holds another network or peer ({tree['peer']}); "
                    "point the peer at another file, or move this one away"
                )
            if not torch.isfinite(tree["network"]).all():
                raise PeerError(
                    f"{self.path}: holds values that are NaN or infinite, of a training that diverged; "
                    "move it away to begin anew"
                )
        return tree

    @contextmanager
    def checkpoint_errors(self) -> Iterator[None]:
        """Turn whatever a checkpoint lacks into a PeerError that names it."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise PeerError(
                f"{self.path}: does not fit this version of the program, or this learner "
                f"({type(error).__name__}: {error}); run the version that wrote it, or move it away to "
                "begin anew"
            ) from error

    def require_same_settings(self, written: Mapping[str, str], now: Mapping[str, str]) -> None:
        """Refuse a checkpoint of a session that began with other settings than these."""
        for key, value in now.items():
            if written.get(key) != value:
                raise PeerError(
                    f"peer {self._name}: {self.path} was written with {key} = {written.get(key)!r}, and the "
                    f"settings now say {value!r}; put {key} back, or move the checkpoint away to begin anew"
                )

    # --- this process ---------------------------------------------------------------------------

    def save(self, *, durable: bool = False) -> bool:
        """Write what others are about to be told; False if it failed and is to be tried again.

        durable: force it to the disk, whatever the machine can tell after a power cut.

        NotSaved once it has failed for `save_retry` seconds. Asked too soon after a failure, it does nothing.
        """
        if self.path is None:
            return True
        blocked = self._blocked_since
        if blocked is not None and self._machine.monotonic() < self._retry_at:
            return False
        if (why := self._write(self._tree(), durable=durable)) is None:
            return True
        first, longest = self._limits.save_pauses
        if blocked is None:
            self._pause, blocked = first, self._last
        else:
            self._pause = min(2 * self._pause, longest)
        self._blocked_since, self._retry_at = blocked, self._last + self._pause
        if self._last - blocked >= self._limits.save_retry:
            raise NotSaved(
                f"peer {self._name}: its checkpoint {self.path} cannot be written: {why}; make "
                f"room, and start it again within its lease of {self._settings.lease:g} s: it then "
                "goes on where it was"
            )
        return False

    def save_periodically(self, number: int) -> None:
        """Save after this round if it is time to. Nobody was told anything: no harm if it fails.

        Without a new round too, now and then: the file says when the peer was last in touch.
        """
        if self.path is None:
            return
        rest = max(self._settings.save_every, self._cost / self._limits.save_share)
        if number == self._round:
            rest = max(rest, self._settings.lease / 4)
        if self._machine.monotonic() - self._last >= rest:
            self._write(self._tree())

    def remove(self) -> None:
        """Remove the checkpoint: its session has ended, and nothing of it is needed any more."""
        if self.path is not None:
            self._machine.files.remove(self.path)

    def _write(self, tree: dict[str, Any], *, durable: bool = False) -> str | None:
        """Write the file; returns what went wrong, if anything did. An operator hears of it once."""
        assert self.path is not None
        began = self._machine.monotonic()
        try:
            self._machine.files.save(self.path, tree, sync=self._sync or durable)
        except (OSError, SafetensorError) as error:
            self._last = self._machine.monotonic()
            why = getattr(error, "strerror", None) or str(error)
            if not self._failing:
                self._failing = True
                _log.warning(
                    "peer %s: cannot write its checkpoint %s: %s; it tries again",
                    self._name, self.path, why,
                )  # fmt: skip
            return why
        self._last, self._blocked_since = self._machine.monotonic(), None
        self._cost, self._round = self._last - began, tree["books"]["round"]
        if self._failing:
            self._failing = False
            _log.info("peer %s: could write its checkpoint again", self._name)
        return None
