"""Computes the batches of a study: in this process, in processes of this machine, or on a cluster.

`--on` names the place: "local:4" is four processes here, "dask:tcp://host:8786" the workers of a Dask
scheduler, "ray:auto" a Ray cluster. A batch whose worker is lost is computed again, and a batch that fails
does not stop the others.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from gossamer import __version__

from ..errors import ConfigError
from ..results import Record

T = TypeVar("T")

CONNECT_SECONDS = 10
"""Seconds to wait for a scheduler to answer, and for it to have a worker."""

MAX_FRUITLESS_ATTEMPTS = 2
"""Attempts in a row that lose a worker before any batch is finished, after which a study gives up."""

PARENT_CHECK_SECONDS = 1.0
"""Seconds between a worker's checks whether its parent process is still running."""


@dataclass(frozen=True)
class Job:
    """What a batch of runs may use: the study's folder, and a number of threads."""

    folder: Path
    threads: int = 1

    def empty_folder(self, name: str) -> Path:
        """Return a folder for one run's files, after removing the files of an interrupted run."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name


RunBatch = Callable[[list[T], Job], list[Record]]


@dataclass(frozen=True)
class Workers:
    """Where batches are computed.

    engine: "local", "dask" or "ray".
    address: of the scheduler or cluster.
    count: processes on this machine; None is one per core.
    """

    engine: str = "local"
    address: str = ""
    count: int | None = None

    @classmethod
    def parse(cls, text: str | None) -> Workers:
        """Return the workers that `--on` names; raises ConfigError."""
        if text is None:
            return cls()
        engine, _, rest = text.partition(":")
        if engine == "local" and (not rest or (rest.isascii() and rest.isdigit() and int(rest))):
            return cls(count=int(rest) if rest else None)
        if engine in ("dask", "ray") and rest:
            return cls(engine, rest)
        raise ConfigError(
            f"--on {text}: not a place to run on; write local:4 (four processes on this machine), "
            "dask:tcp://host:8786 (the workers of a Dask scheduler) or ray:auto (a Ray cluster)"
        )


@dataclass(frozen=True)
class Failure:
    """A batch that could not be computed: the error, and its traceback as text."""

    error: Exception
    trace: str


BatchResult = tuple[int, list[Record] | Failure]
"""The index of a batch, and its records or its failure."""


def run_batches(
    run: RunBatch[T],
    batches: Sequence[list[T]],
    job: Job,
    workers: Workers,
    on_start: Callable[[int], None] = lambda slots: None,
) -> Generator[BatchResult, None, None]:
    """Yield each batch's index with its records or its failure when it is finished.

    on_start: called with the number of batches that are computed at the same time.

    Closing the generator cancels what is not finished. Raises ConfigError if the workers cannot be reached or
    are lost again and again.
    """
    if workers.engine == "local":
        count = min(workers.count or os.cpu_count() or 1, len(batches))
        job = replace(job, threads=max(1, (os.cpu_count() or 1) // max(count, 1)))
        if count <= 1:
            for index, batch in enumerate(batches):
                yield _compute(run, index, batch, job)
            return
        workers = replace(workers, count=count)
    with _CONNECT[workers.engine](workers) as engine:
        on_start(engine.slots)
        yield from _finish(run, batches, job, engine)


@dataclass(frozen=True)
class Engine:
    """Computes batches at several places.

    slots: how many batches it computes at the same time.
    compute: called with the arguments of one `_compute` call for each batch; yields what they return, as
        they end. Raises any exception if a worker is lost.
    """

    slots: int
    compute: Callable[[list[tuple[Any, ...]]], Iterator[BatchResult]]


def _finish(
    run: RunBatch[T], batches: Sequence[list[T]], job: Job, engine: Engine
) -> Generator[BatchResult, None, None]:
    """Yield what the workers finish; start again with the rest when one is lost."""
    unfinished = dict(enumerate(batches))
    fruitless = 0
    while unfinished:
        before = len(unfinished)
        calls = [(run, index, batch, job, __version__) for index, batch in unfinished.items()]
        try:
            for index, result in engine.compute(calls):
                del unfinished[index]
                yield index, result
        except Exception as error:  # what a batch raises is a Failure: this comes from the workers
            fruitless = fruitless + 1 if len(unfinished) == before else 0
            if fruitless == MAX_FRUITLESS_ATTEMPTS:
                reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
                raise ConfigError(
                    "a worker process was killed again and again, perhaps for lack of memory "
                    f"({reason}): finished runs are saved; run the command again with fewer workers, as in "
                    "--on local:1"
                ) from None


def _compute(
    run: RunBatch[T], index: int, batch: list[T], job: Job, version: str = __version__
) -> BatchResult:
    """Run a batch, in a worker of the same version as the command that asks for it."""
    try:
        if version != __version__:
            raise ConfigError(
                f"a worker has gossamer {__version__}, and this command {version}: install the same version"
            )
        return index, run(batch, job)
    except Exception as error:
        trace = traceback.format_exc()
        try:
            type(error)(*error.args)  # as the receiving process will, when it unpickles the error
        except Exception:  # an exception class that needs more than its message
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return index, Failure(error, trace)


# --- engines -----------------------------------------------------------------------------------------------


@contextmanager
def _local(workers: Workers) -> Iterator[Engine]:
    """Processes of this machine, with one torch thread in each, since there is a process per core.

    joblib replaces a process that has grown by 300 MB since its first batch, as one does that began with
    small runs or small data, and warns of a leak. The process has returned its results by then: nothing is
    lost, and there is nothing to do.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "A worker stopped while some jobs were given", UserWarning
        )
        yield _joblib(
            workers.count or 1,
            "loky",
            inner_max_num_threads=1,
            initializer=_prepare_worker,
            initargs=(os.getpid(),),
        )


@contextmanager
def _dask(workers: Workers) -> Iterator[Engine]:
    """The workers of a Dask scheduler."""
    address = workers.address
    distributed = _import_extra("distributed", f"--on dask:{address}: Dask", "dask")
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--on dask:{address}: no scheduler answers there ({error}): start one with `dask scheduler` and "
            "workers with `dask worker ADDRESS`"
        ) from None
    with closing(client):
        slots = sum(client.nthreads().values())
        if not slots:
            raise ConfigError(
                f"--on dask:{address}: the scheduler has no workers: start some with `dask worker {address}`"
            )
        yield _joblib(slots, "dask", client=client)


def _import_extra(module: str, subject: str, extra: str) -> Any:
    """Import a package; raises ConfigError, "SUBJECT is not installed", with the remedy, if it is missing."""
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"{subject} is not installed: pip install 'gossamer[{extra}]'") from None


def _joblib(slots: int, backend: str, **options: Any) -> Engine:
    """Return an engine that computes with one of joblib's backends."""
    import joblib

    def compute(calls: list[tuple[Any, ...]]) -> Iterator[BatchResult]:
        with _ignored_interrupts(), joblib.parallel_config(backend, **options):
            one_by_one: dict[str, Any] = {"batch_size": 1, "max_nbytes": None}
            parallel = joblib.Parallel(slots, return_as="generator_unordered", **one_by_one)
            finished: Any = parallel(joblib.delayed(_compute)(*call) for call in calls)
        with closing(finished):
            yield from finished

    return Engine(slots, compute)


@contextmanager
def _ray(workers: Workers) -> Iterator[Engine]:
    """The processors of a Ray cluster; not through joblib, which returns nothing there before all is done."""
    address = workers.address
    ray = _import_extra("ray", f"--on ray:{address}: Ray", "ray")
    try:
        if ":" in address:  # Ray itself would try for minutes
            host, _, port = address.rpartition("//")[2].rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--on ray:{address}: no cluster answers there ({error}): start one with `ray start --head`"
        ) from None
    # One torch thread for each task, since a task has one processor.
    task = ray.remote(_compute).options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})

    def compute(calls: list[tuple[Any, ...]]) -> Iterator[BatchResult]:
        running = [task.remote(*call) for call in calls]
        try:
            while running:
                finished, running = ray.wait(running)
                yield ray.get(finished[0])
        finally:
            for call in running:
                ray.cancel(call, force=True)

    try:
        yield Engine(int(ray.cluster_resources().get("CPU", 1)), compute)
    finally:
        ray.shutdown()


_CONNECT = {"local": _local, "dask": _dask, "ray": _ray}


# --- processes of this machine -----------------------------------------------------------------------------


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C while worker processes are started, so that the workers inherit this and ignore it.

    The parent ends the workers. A worker that did not ignore Ctrl-C could print a traceback while importing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _prepare_worker(parent: int) -> None:
    """Make a worker end with its parent."""
    threading.Thread(
        target=_end_with_parent, args=(parent,), name="end with parent", daemon=True
    ).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:  # a process whose parent has ended gets another parent
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)
