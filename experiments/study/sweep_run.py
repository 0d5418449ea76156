"""Running many runs: side by side in worker processes, each finished one on disk at once, resumable."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

import torch

from ..cli import console
from ..config.tables import ConfigError
from ..results import Record, RecordFile, Results, read_records


class Keyed(Protocol):
    """Anything that names itself by all that decides its result."""

    @property
    def key(self) -> str:
        """The name."""
        ...


C = TypeVar("C", bound=Keyed)
Run: TypeAlias = Callable[[list[C], int], list[Record]]
"""(cells of a batch, threads) → a record for each."""


def one_by_one(cells: list[C]) -> list[list[C]]:
    """Batches of one."""
    return [[cell] for cell in cells]


class Runs(Generic[C]):
    """The records of a grid of runs, kept in a JSONL file.

        runs = Runs(cells, folder / "runs.jsonl")
        try:
            runs.go(run_cells, on_record=print)
        finally:
            report(runs.records())      # whatever is finished, also when interrupted

    Interrupt it when you like, by Ctrl-C or by killing it: every finished run is in the file, and runs
    whose key is in the file are not run again. Records of other keys in the file are left alone.

    earlier: files of other grids. Records that they have in common with this one are copied to its own
        file; `copied` says how many, by file.
    """

    def __init__(self, cells: Sequence[C], path: Path, earlier: Sequence[Path] = ()):
        self._cells, self._path = list({cell.key: cell for cell in cells}.values()), path
        wanted = {cell.key for cell in cells}
        self._records = {r["key"]: r for r in read_records(path) if r.get("key") in wanted}
        self._copies: list[Record] = []
        self.copied: dict[Path, int] = {}
        for file in earlier:
            for record in read_records(file):
                if (key := record.get("key")) in wanted and key not in self._records:
                    self._records[key] = record
                    self._copies.append(record)
                    self.copied[file] = self.copied.get(file, 0) + 1

    def records(self) -> list[Record]:
        """What is finished, in the order of the cells."""
        known = self._records
        return [known[cell.key] for cell in self._cells if cell.key in known]

    def go(
        self,
        run: Run[C],
        *,
        batches: Callable[[list[C]], list[list[C]]] = one_by_one,
        jobs: int | None = None,
        on_start: Callable[[int, int], None] = lambda done, total: None,
        on_record: Callable[[Record], None] = lambda _: None,
    ) -> None:
        """Run what is left.

        run: what a worker does with a batch, and the number of threads it may use: a record for each
            cell, with the cell's "key" in it. A function of a module, since workers import it.
        batches: which cells go to a worker together, to be run in one stack.
        jobs: worker processes, one per core if left out.
        """
        # Batches are those of a run from the beginning, whatever is left of them: who shares a stack may
        # change the last bit of a sum, and an interruption must not change a result.
        left = [
            batch
            for batch in batches(self._cells)
            if any(cell.key not in self._records for cell in batch)
        ]
        on_start(len(self._records), len(self._cells))
        # Closed at once when interrupted: left to the garbage collector, it would first run them all.
        with (
            RecordFile(self._path, fresh=False) as file,
            closing(in_parallel(run, left, jobs or os.cpu_count() or 1)) as finished,
        ):
            while self._copies:
                file.write(self._copies.pop(0))
            for records in finished:
                for record in records:
                    if record["key"] in self._records:
                        continue
                    self._records[record["key"]] = record
                    file.write(record)
                    on_record(record)


@contextmanager
def open_runs(results: Results, cells: Sequence[C]) -> Iterator[tuple[Path, Runs[C]]]:
    """A folder for a grid of runs, and its runs: those of an unfinished grid of the same cells go on."""
    keys = "\n".join(sorted({cell.key for cell in cells}))
    with results.begun(hashlib.sha256(keys.encode()).hexdigest()[:16]) as folder:
        runs = Runs(cells, folder / "runs.jsonl", [one / "runs.jsonl" for one in results.earlier()])
        for file, count in runs.copied.items():
            console.err.print(
                f"{count} of {len(cells)} runs are copied from {file.parent}; --force runs them again",
                soft_wrap=True,
            )
        yield folder, runs


def in_parallel(
    run: Run[C], batches: list[list[C]], jobs: int
) -> Generator[list[Record], None, None]:
    """Yield records as they are finished; the rest is cancelled when the caller stops."""
    if not batches:
        return
    context = multiprocessing.get_context("spawn")
    workers = min(jobs, len(batches))
    threads = max(1, (os.cpu_count() or 1) // workers)
    with ProcessPoolExecutor(workers, context, initializer=_prepare_worker) as pool:
        with _later_interrupts():
            waiting: set[Future[list[Record]]] = {
                pool.submit(run, batch, threads) for batch in batches
            }
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise ConfigError(
                "a worker process was killed, perhaps for lack of memory: finished runs are kept, "
                "start again with fewer --jobs"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _later_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait until the block is over; processes started in it let it wait until they are ready.

    A new worker imports for seconds, and would answer with a traceback from wherever it is by then.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker() -> None:
    """Threads inside one product fight with the other workers for the same cores.

    Ctrl-C reaches workers too: they end at once and without a word, for the parent says what there is
    to say. If the parent is killed, nobody wants what they compute.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one that waited ends us here
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
