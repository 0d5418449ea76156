"""How training is cut into tasks, the threads that run them, and the memory that it will need.

All choices were measured, on two cores with 512 KB of L2 each and 32 MB of L3; `gossamer bench arena` shows
what they are worth. None of them depends on the number of threads, so neither does any result.

- Every product runs on one thread, and peers run side by side. Torch's threads inside a product split
  it too finely for networks of this size, and collapse when another process holds a core.
- Peer-major: a task is all that some peers train between two averagings, so that their weights stay in
  cache. Step-major, every step of every peer, reads the whole stack from memory once per step.
- Large networks go few at a time, in place; with large batches one at a time, for then their products
  take so long that calls do not count. Small ones go many at a time, packed: a product takes less than
  calling it does.
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
"""Parameters from which a network is large: its own products keep a core busy, and packing it is not free."""
LARGE_PER_TASK = 4
"""Large networks that share the cost of calls…"""
LARGE_STEP = 65_536
"""… unless one step of one of them fills so many values that the cost of calls is nothing to it."""
LARGE_IMAGES = 4096
"""Values that one step of a convolutional network reads, from which peers are faster one by one: stacked,
their convolutions become one with groups, which is 1.5 to 3.5 times as fast below and slower above."""
TASK_BYTES = 2 << 20
"""Parameters and one step's activations of the peers in a task: more falls out of the cache."""
TASKS = 4
"""Tasks that a small swarm is cut into at least, so that there is something to run side by side, and a
large one into multiples of, so that threads end together…"""
MIN_PER_TASK = 8
"""… unless that leaves fewer peers than this in a task, when calls would cost more than products."""
DEFERRED_ROWS = 100
"""Samples, over the steps that are deferred together; see engines.py."""
TEST_ROWS = 8192
"""Test samples, over all peers of a task, that go through the network at once."""

Answer = TypeVar("Answer")


def peers_per_task(peers: int, parameters: int, activations: int) -> int:
    """Return how many peers train together; `activations`: values that one step of one peer fills."""
    if parameters >= LARGE_NETWORK:
        return 1 if activations >= LARGE_STEP else LARGE_PER_TASK
    fit = TASK_BYTES // (4 * max(parameters + activations, 1))
    size = max(1, min(fit, max(ceil(peers / TASKS), MIN_PER_TASK)))
    if size * TASKS >= peers:
        return size
    return ceil(peers / (TASKS * ceil(peers / (TASKS * size))))


def deferred_steps(parameters: int, cells: int, inputs: int, batch: int) -> int:
    """Return how many steps of plain descent share one product of the first layer, `cells` × `inputs`.

    Worth it where the first layer is most of a large network. More steps cost more products of inputs
    with each other, fewer read the weights more often.
    """
    if parameters < LARGE_NETWORK or 2 * cells * inputs < parameters:
        return 1
    return max(1, min(DEFERRED_ROWS, inputs // 4) // batch)


def processors() -> int:
    """Return how many cores this process may use; one in a worker process, whose siblings use the others."""
    if multiprocessing.parent_process() is not None:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Runs tasks on `threads` threads, with one torch thread inside each.

    Torch's setting belongs to a thread, but the last one set is also what new threads begin with: it
    is put back, so that a program's other threads find what they expect.
    """

    def __init__(self, threads: int):
        before = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="gossamer arena")
        barrier = threading.Barrier(threads)

        def prepare() -> None:
            torch.set_num_threads(1)
            barrier.wait()  # or one quick thread would prepare twice, and another never

        for future in [self._pool.submit(prepare) for _ in range(threads)]:
            future.result()
        torch.set_num_threads(before)

    def run(self, tasks: Sequence[Callable[[], Answer]]) -> list[Answer]:
        """Return answers in the order of the tasks. The first error is raised when what runs has ended."""
        waiting: list[Future[Answer]] = [self._pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in waiting]
        finally:
            for future in waiting:
                future.cancel()
            wait(waiting)


WORK = "work space"
BLOCK_BYTES = 1 << 20
"""One block of averaging, peers × coordinates: read, mixed and written back while in cache."""


@dataclass(frozen=True)
class Term:
    """One kind of memory. `held`: bytes of it that are taken already, by the learners themselves."""

    name: str
    bytes: int
    held: int = 0


@dataclass(frozen=True)
class Needs:
    """All that a swarm needs; `str()` of it is one line."""

    terms: tuple[Term, ...]

    @property
    def total(self) -> int:
        """Bytes of all terms."""
        return sum(term.bytes for term in self.terms)

    @property
    def more(self) -> int:
        """Bytes that are not taken yet."""
        return sum(max(term.bytes - term.held, 0) for term in self.terms)

    @property
    def largest(self) -> Term:
        """The term with the most bytes."""
        return max(self.terms, key=lambda term: term.bytes)

    def __str__(self) -> str:
        parts = [
            f"{term.name} {amount(term.bytes)}"
            for term in sorted(self.terms, key=lambda term: -term.bytes)
            if term.bytes
        ]
        return f"memory: {amount(self.total)} ({', '.join(parts)})"

    def refuse_beyond(self, room: int | None) -> None:
        """Raise, naming the largest term, if what is still needed does not fit into `room` bytes."""
        if room is None or self.more <= room:
            return
        raise ModelError(
            f"this swarm needs {amount(self.more)} more memory and {amount(room)} are free; the largest "
            f"term is {self.largest.name} with {amount(self.largest.bytes)}: take fewer peers, a smaller "
            "network or fewer samples"
        )


def amount(count: float) -> str:
    """Return a number of bytes with a unit: 1.5 kB, 2.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def estimate(
    *,
    peers: int,
    parameters: int,
    slots: int = 0,
    sample_bytes: int = 0,
    test_bytes: int = 0,
    index_bytes: int = 0,
    threads: int = 1,
    step_values: int = 0,
    element: int = 4,
    held: bool = False,
) -> Needs:
    """Return the needs of one group of alike peers, before any of them is built.

    slots: values that the optimizer keeps per parameter (momentum 1, Adam 2). sample_bytes,
    test_bytes: of all peers together. index_bytes: of the coordinates of partial models that do not
    follow each other without a gap. step_values: activations of one step of one peer. held: whether
    the learners exist, with values and samples of their own.
    """
    values = peers * parameters * element
    together = peers_per_task(peers, parameters, step_values)
    task = together * (3 * parameters + 2 * step_values) * element
    work = threads * (task + 3 * BLOCK_BYTES)
    own = {
        f"parameters of {peers:,} peers": values,
        "training samples": sample_bytes,
        "test samples": test_bytes,
        "coordinates of partial models": index_bytes,
    }
    terms = [Term(name, size, size if held else 0) for name, size in own.items()]
    return Needs((*terms, Term("optimizer state", slots * values), Term(WORK, work)))


def combine(needs: Iterable[Needs]) -> Needs:
    """Return the needs of several groups; work space is used by one after the other."""
    terms: dict[str, Term] = {}
    for term in (term for need in needs for term in need.terms):
        old = terms.get(term.name, Term(term.name, 0))
        most = max(old.bytes, term.bytes) if term.name == WORK else old.bytes + term.bytes
        terms[term.name] = Term(term.name, most, old.held + term.held)
    return Needs(tuple(terms.values()))


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be taken on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(min(psutil.virtual_memory().available, _control_group()))


def _control_group() -> float:
    """What a container is still allowed to take; page cache, which can be dropped, counts as free."""
    folder = Path("/sys/fs/cgroup")
    try:
        most = (folder / "memory.max").read_text("utf-8").strip()
        used = int((folder / "memory.current").read_text("utf-8"))
        lines = (folder / "memory.stat").read_text("utf-8").splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return inf
    return inf if most == "max" else max(int(most) - used + cached, 0)
