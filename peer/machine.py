"""What a peer needs of the machine it runs on: clocks, session names, a worker thread, memory, checkpoints.

A simulation passes its own Machine to its peers, so that the same seed gives the same run.

A checkpoint is a tree of plain data, arrays and tensors, written atomically to one safetensors file: arrays
and tensors as they are, the rest as JSON in the metadata. Nothing is pickled, so reading a file runs no code.
A peer saves before it sends, and tries again for a while if the disk is full. A peer that sends nothing saves
from time to time, so that a crash costs it only seconds of training.
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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gossamer.files import FileLock, atomic_path

from .exits import NotSaved, PeerError
from .presence import SINCE
from .settings import Limits, Settings

_log = logging.getLogger(__name__)


P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """The peer's worker thread: `await worker.run(function, …)` runs a function on it. An async context."""

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"peer-{name}")
        self._submitted: list[Future[Any]] = []
        """What the thread runs or will run, and perhaps what it has run since somebody last waited for it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # Not on the event loop, which other peers may share: a round of training may still run.
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` on the thread, after all calls made before, and return its result."""
        future = self._pool.submit(function, *args, **kwargs)
        self._submitted = [*self._running(), future]
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._submitted = self._running()

    async def run_short(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that takes about a millisecond: here if the thread is idle, otherwise as `run` does.

        Handing it over to the thread may take as long as the function itself.
        """
        if self._running():
            return await self.run(function, *args, **kwargs)
        return function(*args, **kwargs)

    def _running(self) -> list[Future[Any]]:
        """Return the functions that run or wait, even if nobody awaits them any more."""
        return [future for future in self._submitted if not future.done()]


class Files:
    """Storage of checkpoints: files on the disk."""

    def save(self, path: Path, tree: dict[str, Any], *, sync: bool) -> None:
        """Replace a checkpoint atomically; OSError if it cannot be written."""
        save_checkpoint(path, tree, sync=sync)

    def load(self, path: Path) -> dict[str, Any] | None:
        """Return a checkpoint, or None if there is none; PeerError if it cannot be read."""
        return load_checkpoint(path)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, if it exists."""
        path.unlink(missing_ok=True)

    def lock(self, path: Path) -> CheckpointLock:
        """Return the lock of a checkpoint, which is still to be acquired."""
        return CheckpointLock(path)


class Machine:
    """The machine that this process runs on. A simulated machine overrides every method."""

    def __init__(self) -> None:
        self.files = Files()

    def monotonic(self) -> float:
        """Return the seconds of a monotonic clock, the same as the event loop's."""
        return time.monotonic()

    def wall(self) -> float:
        """Return the seconds since 1970, by the wall clock, which may be set."""
        return time.time()

    def uptime(self) -> float:
        """Return the seconds of a clock that also runs while the device sleeps, unlike `monotonic`."""
        since_boot = getattr(time, "CLOCK_BOOTTIME", None)
        return time.time() if since_boot is None else time.clock_gettime(since_boot)

    def boot_id(self) -> str | None:
        """Return an id of the machine's current boot, a new one after every reboot.

        None if the operating system has no such id: Linux has one.
        """
        return _boot_id()

    def new_session(self) -> str:
        """Return a new, unique name for a session."""
        return secrets.token_hex(8)

    def process_id(self) -> str:
        """Return a text that no other process has, on any machine."""
        return secrets.token_hex(4)

    def worker(self, name: str) -> Worker:
        """Return a peer's worker thread, not started yet."""
        return Worker(name)


@cache
def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip() or None
    except (OSError, ValueError):
        return None


def portable_time(machine: Machine, at: float) -> dict[str, Any]:
    """Return a time of `uptime` as plain data that a later process can convert back with `uptime_of`."""
    wall = machine.wall() - (machine.uptime() - at)
    return {"boot": machine.boot_id(), "clock": at, "wall": wall}


def uptime_of(machine: Machine, stored: dict[str, Any]) -> float | None:
    """Return a stored `portable_time` as a time of this machine's `uptime`.

    None if it cannot be known: the machine was rebooted since, or the time is in the future because a clock
    was set back.
    """
    if stored["boot"] != machine.boot_id():
        return None
    now, has_boot_id = machine.uptime(), machine.boot_id() is not None
    at = stored["clock"] if has_boot_id else now - (machine.wall() - stored["wall"])
    return min(at, now) if at <= now + 1.0 else None


class HeapTrimmer:
    """Returns freed memory to the operating system, at most once per `pause` seconds. Thread-safe.

    A peer allocates and frees megabytes with every message. glibc does not return freed memory by itself, so
    after a burst of gossip a process would hold many times the memory of its network.

    trim: returns all free memory to the system; None if malloc has no such function.
    pause: least seconds between two calls, because later allocations must map the pages again.
    """

    def __init__(
        self,
        trim: Callable[[], object] | None,
        *,
        pause: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trim, self._pause, self._clock = trim, pause, clock
        self._lock, self._last_trim = threading.Lock(), -inf

    def __call__(self) -> bool:
        """Trim the heap, unless the last call was less than `pause` seconds ago; return whether it did."""
        if self._trim is None:
            return False
        with self._lock:
            now = self._clock()
            if now - self._last_trim < self._pause:
                return False
            self._last_trim = now
        self._trim()
        return True


def _malloc_trim() -> Callable[[], object] | None:
    """Return glibc's malloc_trim; None if malloc is not glibc's."""
    if not sys.platform.startswith("linux"):
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else partial(trim, 0)


trim_heap = HeapTrimmer(_malloc_trim())
"""The heap trimmer of this process."""


FORMAT = "gossamer-checkpoint-4"
"""Identifies the file format of checkpoints. It is that of version 1.0, which every later version reads: a
key that a version adds has a default for files without it, and keys that it does not know are ignored."""
_REMEDY = "move it away to start without it, or restore a copy"


def save_checkpoint(path: Path, tree: dict[str, Any], *, sync: bool = False) -> None:
    """Replace the checkpoint at `path`.

    The file is replaced by an atomic rename, which is enough if the process is killed. After a power failure
    the file may be an older one, or truncated, unless `sync` forces the bytes and the rename to the disk,
    which costs a disk write per exchange. A peer can do without `sync` if it can detect a reboot (see
    `uptime_of`): it then keeps only values and rounds, for which an older file is good enough.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_pack(tree, tensors))
    with atomic_path(path, sync=sync) as temporary:
        metadata = {"format": FORMAT, "tree": text, "checksum": _checksum(text, tensors)}
        save_file(tensors, temporary, metadata)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Return the saved tree, or None if there is no file; PeerError if the file is damaged."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise PeerError(
                    f"{path}: is not a checkpoint of this version of the program; move it away to start "
                    "without it, or run the version that wrote it"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = metadata["tree"]
        if metadata["checksum"] != _checksum(text, tensors):
            raise PeerError(f"{path}: is damaged: its checksum is wrong; {_REMEDY}")
        return _unpack(json.loads(text), tensors)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise PeerError(
            f"{path}: cannot be read as a checkpoint, it may be truncated: {error}; {_REMEDY}"
        ) from None


def from_saved(datatype: type[T], table: Mapping[str, Any]) -> T:
    """Return an instance of a dataclass from its fields in a checkpoint or report; ignores other keys.

    Raises TypeError if a field of version 1.0 is missing; those added later have defaults (see SINCE).
    """
    known = fields(cast("Any", datatype))
    for field in known:
        if field.name not in table and SINCE not in field.metadata:
            raise TypeError(f"the field {field.name} of {datatype.__name__} is missing")
    return datatype(**{field.name: table[field.name] for field in known if field.name in table})


def _checksum(text: str, tensors: dict[str, torch.Tensor]) -> str:
    """Return a checksum of a file's text and tensors, so that no flipped bit is restored and spreads."""
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON data: tensors and arrays move to `tensors`, and their names replace them."""
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
        """Acquire the lock; PeerError if another peer holds it."""
        try:
            is_acquired = self._lock.acquire()
        except OSError as error:
            raise PeerError(
                f"{self._checkpoint}: cannot be locked: {error.strerror}; give the peer a "
                "checkpoint in a folder that it may write to"
            ) from None
        if not is_acquired:
            raise PeerError(
                f"peer {self._checkpoint.stem} runs here already, as process {self._lock.holder()}, with the "
                f"checkpoint {self._checkpoint}; stop that process, or give this peer another folder"
            )

    def release(self) -> None:
        """Release the lock and remove its file; has no effect if it is not ours."""
        self._lock.release()


class Saver:
    """Saves and loads one peer's checkpoint.

    path: of the file; None for no checkpoint. tree: a function that returns the data to save.
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
        # After a power failure the file may be an older one. Where boots have ids, the reboot is detected and
        # the session is not continued; elsewhere every save must be forced to the disk. So must it be with
        # differential privacy: an older file lacks releases, and the report would state too small an epsilon.
        self._sync = machine.boot_id() is None or settings.dp is not None
        self._last_write, self._write_seconds, self._saved_round = machine.monotonic(), 0.0, 0
        self._failing = False
        self._blocked_since: float | None = None
        """Since when nothing can be sent, because the checkpoint cannot be written."""
        self._retry_at = self._pause = 0.0

    # --- loading the checkpoint of a former process ---------------------------------------------

    def load(self) -> dict[str, Any] | None:
        """Return the checkpoint of a former process, None if there is none; PeerError if it is not usable."""
        tree = None if self.path is None else self._machine.files.load(self.path)
        if tree is None:
            return None
        with self.checkpoint_errors():
            if not torch.isfinite(tree["network"]).all():
                raise PeerError(
                    f"{self.path}: holds values that are NaN or infinite, because training diverged; "
                    "move it away to start without it"
                )
        return tree

    def require_same_models(self, tree: Mapping[str, Any], schemas: Mapping[str, str]) -> None:
        """Raise PeerError unless a checkpoint is of this peer, and its models have these schema hashes."""
        if tree["peer"] != self._name or tree["schemas"] != schemas:
            raise PeerError(
                f"{self.path}: is the checkpoint of another network or peer ({tree['peer']}); give "
                "this peer another file, or move this one away"
            )

    @contextmanager
    def checkpoint_errors(self) -> Iterator[None]:
        """Turn errors in a checkpoint's data into a PeerError that names the file."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise PeerError(
                f"{self.path}: does not fit this version of the program, or this learner "
                f"({type(error).__name__}: {error}); run the version that wrote it, or move it away to "
                "start without it"
            ) from error

    def require_same_settings(self, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
        """Raise PeerError if the settings that a session cannot change have changed since it was saved."""
        for key, value in current.items():
            if saved.get(key) != value:
                raise PeerError(
                    f"peer {self._name}: {self.path} was written with {key} = {saved.get(key)!r}, and the "
                    f"settings now say {value!r}; change {key} back, or move the checkpoint away to start "
                    "without it"
                )

    # --- saving ---------------------------------------------------------------------------------

    def save(self, *, durable: bool = False) -> bool:
        """Write the checkpoint before something is sent; return False if the caller must try again later.

        durable: force it to the disk, even if the machine can detect a reboot.

        Raises NotSaved once saving has failed for `save_retry` seconds. During the pause after a failure it
        only returns False.
        """
        if self.path is None:
            return True
        blocked_since = self._blocked_since
        if blocked_since is not None and self._machine.monotonic() < self._retry_at:
            return False
        if (failure := self._write(durable=durable)) is None:
            return True
        first_pause, longest_pause = self._limits.save_pauses
        if blocked_since is None:
            self._pause, blocked_since = first_pause, self._last_write
        else:
            self._pause = min(2 * self._pause, longest_pause)
        self._blocked_since, self._retry_at = blocked_since, self._last_write + self._pause
        if self._last_write - blocked_since >= self._limits.save_retry:
            raise NotSaved(
                f"peer {self._name}: its checkpoint {self.path} cannot be written: {failure}; free disk "
                "space, and start the peer again within its lease of "
                f"{self._settings.full_lease:g} s to continue"
            )
        return False

    def save_periodically(self, round_number: int) -> None:
        """Save if the last save is long enough ago. Nothing is sent meanwhile, so a failure does no harm.

        Without a new round it saves less often, only to update the time of the last contact with the broker.
        """
        if self.path is None:
            return
        pause = max(self._settings.save_every, self._write_seconds / self._limits.save_share)
        if round_number == self._saved_round:
            pause = max(pause, self._settings.full_lease / 4)
        if self._machine.monotonic() - self._last_write >= pause:
            self._write()

    def remove(self) -> None:
        """Remove the checkpoint of a session that has finished."""
        if self.path is not None:
            self._machine.files.remove(self.path)

    def _write(self, *, durable: bool = False) -> str | None:
        """Write the file; return the reason if that failed, else None. Logs only the first failure."""
        assert self.path is not None
        tree = self._tree()
        start = self._machine.monotonic()
        try:
            self._machine.files.save(self.path, tree, sync=self._sync or durable)
        except (OSError, SafetensorError) as error:
            self._last_write = self._machine.monotonic()
            reason = getattr(error, "strerror", None) or str(error)
            if not self._failing:
                self._failing = True
                _log.warning(
                    "peer %s: cannot write its checkpoint %s: %s; it tries again",
                    self._name, self.path, reason,
                )  # fmt: skip
            return reason
        self._last_write, self._blocked_since = self._machine.monotonic(), None
        self._write_seconds, self._saved_round = self._last_write - start, tree["books"]["round"]
        if self._failing:
            self._failing = False
            _log.info("peer %s: can write its checkpoint again", self._name)
        return None
