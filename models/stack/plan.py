"""How stacked training is split into tasks, the threads that run them, and the memory it needs.

All constants were measured on two cores with 512 KB of L2 cache each and 32 MB of L3 cache; `gossamer bench
arena` measures their effect. None depends on the number of threads, so results do not either.

- Every matrix product runs on one thread, and different peers run in parallel. Splitting one product among
  torch's threads does not pay for networks of this size, and is very slow when another process uses a core.
- A task trains some peers for all steps between two averagings, so that their weights stay in cache. Doing
  one step of every peer, then the next, would read the whole stack from memory at every step.
- Large networks are trained a few per task, in place; with large batches one per task, because then the cost
  of calling torch is negligible. Small networks are trained many per task, with their layers copied to
  contiguous memory ("packed"), because calling torch takes longer than their products.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from .. import ModelError

LARGE_NETWORK = 32_768
"""Parameters from which a network counts as large: its products keep a core busy, and packing costs time."""
LARGE_PER_TASK = 4
"""Large networks per task, which share the cost of calling torch."""
LARGE_STEP = 65_536
"""Activations of one step from which a large network gets its own task: calls cost little beside products."""
LARGE_IMAGES = 4096
"""Input values of one step from which peers with convolutions are trained one by one. Stacked, their
convolutions become one grouped convolution: 1.5 to 3.5 times as fast below this size, and slower above."""
TASK_BYTES = 2 << 20
"""Limit of a task's parameters and activations of one step: more does not fit into the cache."""
TASKS = 4
"""A small swarm is split into this many tasks, so that several threads have work. A large swarm is split into
a multiple of it, so that all threads finish at about the same time. MIN_PER_TASK takes precedence."""
MIN_PER_TASK = 8
"""Peers per task at least: with fewer, calling torch would take longer than the products."""
DEFERRED_ROWS = 100
"""Samples, summed over steps, for which one update of the first layer is deferred: see engines.py."""
TEST_ROWS = 8192
"""Test samples, summed over the peers of a task, in one forward pass."""

Result = TypeVar("Result")


def peers_per_task(peers: int, parameters: int, activations: int) -> int:
    """Return how many peers one task trains; `activations`: values computed in one step of one peer."""
    if parameters >= LARGE_NETWORK:
        return 1 if activations >= LARGE_STEP else LARGE_PER_TASK
    fit_into_cache = TASK_BYTES // (4 * max(parameters + activations, 1))
    size = max(1, min(fit_into_cache, max(ceil(peers / TASKS), MIN_PER_TASK)))
    if size * TASKS >= peers:
        return size
    rounds = ceil(peers / (TASKS * size))  # TASKS tasks in each
    return ceil(peers / (TASKS * rounds))


def deferred_steps(parameters: int, cells: int, inputs: int, batch: int) -> int:
    """Return how many steps of plain SGD share one product with the first layer's `cells` × `inputs` weights.

    That is faster if the first layer holds most weights of a large network. More steps at once need more
    products of inputs with each other; fewer steps read the weights from memory more often.
    """
    if parameters < LARGE_NETWORK or 2 * cells * inputs < parameters:
        return 1
    return max(1, min(DEFERRED_ROWS, inputs // 4) // batch)


def available_cores() -> int:
    """Return how many cores this process may use: one in a worker process, as other workers use the rest."""
    if multiprocessing.parent_process() is not None:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Runs tasks on `threads` threads, each of which uses one torch thread.

    `torch.set_num_threads` acts on the calling thread, but the last value set is also the default of new
    threads: it is restored, so that the program's other threads are not affected.
    """

    def __init__(self, threads: int):
        default_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="gossamer arena")
        barrier = threading.Barrier(threads)

        def prepare() -> None:
            torch.set_num_threads(1)
            barrier.wait()  # so that every thread runs this function exactly once

        for future in [self._pool.submit(prepare) for _ in range(threads)]:
            future.result()
        torch.set_num_threads(default_threads)

    def run(self, tasks: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return results in the order of the tasks.

        If a task raises, tasks that have not begun are cancelled; the error is raised when the others end.
        """
        futures: list[Future[Result]] = [self._pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)


WORK_SPACE = "work space"
"""The name of the memory item that groups use one after the other: temporary tensors of running tasks."""
BLOCK_BYTES = 1 << 21
"""Size of a block (peers × coordinates) in averaging, which is read, averaged and written back while it is in
the cache."""


@dataclass(frozen=True)
class MemoryItem:
    """Memory with one purpose, `name`. `allocated`: how many of its bytes the learners hold already."""

    name: str
    bytes: int
    allocated: int = 0


@dataclass(frozen=True)
class MemoryNeeds:
    """The memory that a swarm needs, item by item; `str()` of it is one line."""

    items: tuple[MemoryItem, ...]

    @property
    def total(self) -> int:
        """Bytes of all items."""
        return sum(item.bytes for item in self.items)

    @property
    def to_allocate(self) -> int:
        """Bytes that are not allocated yet."""
        return sum(max(item.bytes - item.allocated, 0) for item in self.items)

    @property
    def largest(self) -> MemoryItem:
        """The item with the most bytes."""
        return max(self.items, key=lambda item: item.bytes)

    def __str__(self) -> str:
        texts = [
            f"{item.name} {format_bytes(item.bytes)}"
            for item in sorted(self.items, key=lambda item: -item.bytes)
            if item.bytes
        ]
        return f"memory: {format_bytes(self.total)} ({', '.join(texts)})"

    def check_fits(self, free: int | None) -> None:
        """Raise, naming the largest item, if more than `free` bytes must still be allocated."""
        if free is None or self.to_allocate <= free:
            return
        raise ModelError(
            f"this swarm needs {format_bytes(self.to_allocate)} more memory and {format_bytes(free)} are "
            f"free; the largest item is {self.largest.name} with {format_bytes(self.largest.bytes)}: take "
            "fewer peers, a smaller network or fewer samples"
        )


def format_bytes(count: float) -> str:
    """Return a number of bytes with a unit: 1.5 kB, 2.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def estimate_memory(
    *,
    peers: int,
    parameters: int,
    optimizer_values: int = 0,
    sample_bytes: int = 0,
    test_bytes: int = 0,
    index_bytes: int = 0,
    threads: int = 1,
    step_values: int = 0,
    bytes_per_value: int = 4,
    learners_exist: bool = False,
) -> MemoryNeeds:
    """Return the memory needs of one group of peers, also before any of them is built.

    optimizer_values: values that the optimizer stores per parameter (momentum 1, Adam 2). sample_bytes,
    test_bytes: of all peers together. index_bytes: of the arrays of coordinates of partial models whose
    coordinates are not contiguous. step_values: activations of one step of one peer. learners_exist: whether
    the learners are built already, with parameters and samples in memory.
    """
    parameter_bytes = peers * parameters * bytes_per_value
    task_peers = peers_per_task(peers, parameters, step_values)
    task_bytes = task_peers * (3 * parameters + 2 * step_values) * bytes_per_value
    work_bytes = threads * (task_bytes + 3 * BLOCK_BYTES)
    learner_bytes = {
        f"parameters of {peers:,} peers": parameter_bytes,
        "training samples": sample_bytes,
        "test samples": test_bytes,
        "coordinates of partial models": index_bytes,
    }
    items = [
        MemoryItem(name, size, size if learners_exist else 0)
        for name, size in learner_bytes.items()
    ]
    items.append(MemoryItem("optimizer state", optimizer_values * parameter_bytes))
    return MemoryNeeds((*items, MemoryItem(WORK_SPACE, work_bytes)))


def combine_needs(needs: Iterable[MemoryNeeds]) -> MemoryNeeds:
    """Return the needs of several groups together; groups use the work space one after the other."""
    items: dict[str, MemoryItem] = {}
    for item in (item for group in needs for item in group.items):
        old = items.get(item.name, MemoryItem(item.name, 0))
        is_work = item.name == WORK_SPACE
        size = max(old.bytes, item.bytes) if is_work else old.bytes + item.bytes
        items[item.name] = MemoryItem(item.name, size, old.allocated + item.allocated)
    return MemoryNeeds(tuple(items.values()))


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(min(psutil.virtual_memory().available, _container_memory()))


def _container_memory() -> float:
    """Return the bytes that the container's cgroup may still allocate, droppable page cache included."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text("utf-8").strip()
        used = int((folder / "memory.current").read_text("utf-8"))
        lines = (folder / "memory.stat").read_text("utf-8").splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return inf
    return inf if limit == "max" else max(int(limit) - used + cached, 0)
