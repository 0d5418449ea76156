"""How training is cut into tasks, and the threads that run them: every measured choice in one place.

Measured on two cores with 512 KB of L2 each and 32 MB of L3; `gossamer bench arena` shows what the
choices are worth. None of them depends on the number of threads, so neither does any result.

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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import ceil
from typing import TypeVar

import torch

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
"""Samples, over the steps that are deferred together; see kernel.py."""
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
            for future in waiting:
                if not future.cancelled():
                    future.exception()
