"""Threads that run tasks side by side, with one torch thread inside each."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Answer = TypeVar("Answer")


def processors() -> int:
    """How many cores this process may use; one in a worker process, whose siblings use the others."""
    if multiprocessing.parent_process() is not None:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """Runs tasks on `threads` threads; torch's own threads stay out of it.

    Torch's setting belongs to a thread, but the last one set is also what new threads begin with: it
    is put back, so that a program's other threads find what they expect.
    """

    def __init__(self, threads: int):
        self.threads = threads
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
        """Answers in the order of the tasks. The first error is raised when what runs has ended."""
        waiting: list[Future[Answer]] = [self._pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in waiting]
        finally:
            for future in waiting:
                future.cancel()
            for future in waiting:
                if not future.cancelled():
                    future.exception()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
