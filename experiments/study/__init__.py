"""Runs studies: a study is a grid of cells, a function that runs them, a table and a figure.

    study = Study("digits", cells, run_cells, table, figure)
    records, files = run_study(study, Results(Path("results/digits"), "sweep"))

Sweeps, comparisons and the studies of papers all use this runner. Every run is written to disk when it is
finished; after Ctrl-C or a crash, the same command runs only what is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from ..cli import console
from ..errors import ConfigError, Stopped
from ..results import Record, RecordFile, Results, read_records, write_csv, write_json

Frame: TypeAlias = Any
"""A pandas DataFrame. The type is Any, since type checkers cannot follow pandas' types."""


PARENT_CHECK_SECONDS = 1.0
"""Seconds between a worker's checks whether its parent process is still running."""


@dataclass(frozen=True)
class StudyCell:
    """One run of a study. Subclasses add the fields that the run's result depends on.

    line: the name of the line in the study's figure that this run belongs to; `--only` selects runs by it.
    """

    line: str

    @cached_property
    def key(self) -> str:
        """A hash of all fields, by which a finished run is recognised; computed once."""
        values = json.dumps(asdict(self), default=lambda model: model.model_dump(mode="json"))
        return key_of(f"{type(self).__module__}|{values}")


C = TypeVar("C", bound=StudyCell)


@dataclass(frozen=True)
class Job:
    """What a batch of runs may use: the study's folder, and a number of threads."""

    folder: Path
    threads: int = 1

    def empty_folder(self, name: str) -> Path:
        """Return a folder for one run's files, after removing the files of an interrupted run."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name


@dataclass(frozen=True)
class EachCell(Generic[C]):
    """Runs the cells of a batch one after the other; each cell's key is added to its record."""

    run: Callable[[C, Job], Record]

    def __call__(self, cells: list[C], job: Job) -> list[Record]:
        """Run the cells and return their records."""
        return [{"key": cell.key, **self.run(cell, job)} for cell in cells]


@dataclass(frozen=True)
class Study(Generic[C]):
    """A grid of runs, and how to present their records.

    cells: all runs. List them seed by seed, so that an interrupted study has all lines for some seeds.
    run: runs a batch of cells and returns a record for each, with the cell's key as "key". `EachCell` makes
        such a function from one that runs a single cell. Must be at the top level of a module, since worker
        processes import it.
    table: makes text tables of the records, by name, "summary" first. Each is printed under its title in
        `titles` and written as NAME.csv.
    figure: draws files into a folder; None draws nothing.
    batches: divides the cells into batches, each for one worker; one cell per batch if left out.
    latest: describes a record for the progress bar.
    always_run: lines that are run even if --only does not name them.
    json_files: JSON files that are written beside the results, such as the study's settings: content by name.
    note: printed below the tables.
    live: whether runs start processes and do not repeat exactly. They are then run one after the other in
        this process, and none is copied from an earlier folder.
    """

    name: str
    cells: Sequence[C]
    run: Callable[[list[C], Job], list[Record]]
    table: Callable[[Sequence[Record]], Mapping[str, Frame]]
    figure: Callable[[Path, Sequence[Record]], list[Path]] | None = None
    titles: Mapping[str, str] = field(default_factory=dict)
    batches: Callable[[Sequence[C]], list[list[C]]] = lambda cells: [[cell] for cell in cells]
    latest: Callable[[Record], str] = lambda record: ""
    always_run: Collection[str] = ()
    json_files: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    live: bool = False

    def only(self, lines: Sequence[str] | None) -> Study[C]:
        """Return the study with only these lines, or all of it if `lines` is empty; raises ConfigError."""
        if not lines:
            return self
        all_lines = list(dict.fromkeys(cell.line for cell in self.cells))
        if unknown := [line for line in lines if line not in all_lines]:
            raise ConfigError(
                f"{self.name} has no line {unknown[0]!r}; lines are {', '.join(map(repr, all_lines))}"
            )
        selected = {*lines, *self.always_run}
        return replace(self, cells=[cell for cell in self.cells if cell.line in selected])


def key_of(text: str) -> str:
    """Return a short hash of a text that contains everything a result depends on."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def frame_of(rows: Any, columns: list[str] | None = None, ordered: Sequence[str] = ()) -> Frame:
    """Return a pandas table of records, tuples or named columns.

    ordered: columns whose values are sorted and grouped in the order in which they first appear.
    """
    import pandas as pd

    frame = pd.DataFrame(rows, columns=columns)
    for name in ordered:
        frame[name] = pd.Categorical(frame[name], list(dict.fromkeys(frame[name])))
    return frame


def as_text(frame: Frame, formats: Mapping[Any, str]) -> Frame:
    """Return a table as text; formats: format specs by column. Missing values become empty."""
    import pandas as pd

    return frame_of(
        {
            name: ["" if pd.isna(v) else format(v, formats.get(name, "")) for v in values]
            for name, values in frame.items()
        }
    )


def run_study(
    study: Study[C], results: Results, *, jobs: int | None = None
) -> tuple[list[Record], list[Path]]:
    """Run the cells whose records are not in the results folder yet; print and write tables and figures.

    jobs: worker processes, one per core if left out; 1 runs everything in this process.

    Returns the records of all cells and the files. After Ctrl-C, the tables and figures of the finished runs
    are written, and Stopped is raised, whose message says how many runs are finished.
    """
    grid = key_of("\n".join(sorted({cell.key for cell in study.cells})))
    with results.run_folder(grid) as folder:
        path = folder / "runs.jsonl"
        earlier = [] if study.live else [old / "runs.jsonl" for old in results.earlier_runs()]
        runs = Runs(study.cells, path, earlier)
        for file, count in runs.copied.items():
            console.err.print(
                f"{count} of {len(study.cells)} runs are copied from {file.parent}; --force runs them again",
                soft_wrap=True,
            )
        files: list[Path] = []
        try:
            with console.progress("runs") as bar:
                done, total = len(runs.records()), len(study.cells)
                task = bar.add_task(study.name, completed=done, total=total, latest="")
                for record in runs.finish(study, Job(folder), jobs):
                    bar.update(task, advance=1, latest=study.latest(record))
        except KeyboardInterrupt:
            raise Stopped(
                f"interrupted; {len(runs.records())} of {len(study.cells)} runs are saved in {folder}; the "
                "same command runs the rest"
            ) from None
        finally:
            if records := runs.records():
                files = _report(study, records, folder)
    console.print_written([path, *files])
    console.offer_report(folder)
    return records, files


def _report(study: Study[C], records: list[Record], folder: Path) -> list[Path]:
    files = []
    for name, content in study.json_files.items():
        write_json(folder / name, content)
    for name, frame in study.table(records).items():
        header, rows = [*map(str, frame.columns)], [*frame.itertuples(index=False, name=None)]
        title = study.titles.get(name, study.name if name == "summary" else name)
        console.table(title, header, rows)
        files.append(folder / f"{name}.csv")
        write_csv(files[-1], header, rows)
    if study.note:
        console.out.print(study.note, soft_wrap=True)
    return files + (study.figure(folder, records) if study.figure else [])


class Runs(Generic[C]):
    """The records of a study's runs, in a JSONL file.

    Runs whose key is in the file are not run again; records with other keys are ignored.

    earlier: files of earlier studies. Records of runs that this study has too are copied from them; `copied`
        is the number of copies by file.
    """

    def __init__(self, cells: Sequence[C], path: Path, earlier: Sequence[Path] = ()):
        self._cells, self._path = list({cell.key: cell for cell in cells}.values()), path
        keys = {cell.key for cell in cells}
        self._records = {r["key"]: r for r in read_records(path) if r.get("key") in keys}
        self._copies: list[Record] = []
        self.copied: dict[Path, int] = {}
        for file in earlier:
            for record in read_records(file):
                if (key := record.get("key")) in keys and key not in self._records:
                    self._records[key] = record
                    self._copies.append(record)
                    self.copied[file] = self.copied.get(file, 0) + 1

    def records(self) -> list[Record]:
        """Return the records of finished runs, in the order of the cells."""
        finished = self._records
        return [finished[cell.key] for cell in self._cells if cell.key in finished]

    def finish(self, study: Study[C], job: Job, jobs: int | None = None) -> Iterator[Record]:
        """Run the cells without a record; yield each record when it is written to the file."""
        # Batches are made of all cells, finished or not, since the networks that share a stack may change
        # the last bit of a sum: results must not depend on interruptions.
        unfinished = [
            batch
            for batch in study.batches(self._cells)
            if any(cell.key not in self._records for cell in batch)
        ]
        workers = 1 if study.live else min(jobs or os.cpu_count() or 1, len(unfinished))
        threads = max(1, (os.cpu_count() or 1) // max(workers, 1))
        run_batches = _in_parallel if workers > 1 else _one_by_one
        # The generator is closed when interrupted; the garbage collector would let it run all batches first.
        batches = run_batches(study.run, unfinished, replace(job, threads=threads), workers)
        with RecordFile(self._path, fresh=False) as file, closing(batches) as finished:
            while self._copies:
                file.write(self._copies.pop(0))
            for records in finished:
                for record in records:
                    if record["key"] in self._records:
                        continue
                    self._records[record["key"]] = record
                    file.write(record)
                    yield record


def _one_by_one(
    run: Callable[[list[C], Job], list[Record]], batches: list[list[C]], job: Job, _workers: int
) -> Generator[list[Record], None, None]:
    for batch in batches:
        yield run(batch, job)


def _in_parallel(
    run: Callable[[list[C], Job], list[Record]], batches: list[list[C]], job: Job, workers: int
) -> Generator[list[Record], None, None]:
    """Yield the records of each batch when it is finished; closing the generator cancels the others."""
    import joblib

    # One torch thread in each worker, since there is a worker per core.
    processes = joblib.parallel_config(
        "loky", inner_max_num_threads=1, initializer=_prepare_worker, initargs=(os.getpid(),)
    )
    options: dict[str, Any] = {"batch_size": 1, "max_nbytes": None}
    with _ignored_interrupts(), processes:
        parallel = joblib.Parallel(workers, return_as="generator_unordered", **options)
        finished: Any = parallel(joblib.delayed(run)(batch, job) for batch in batches)
    with closing(finished):
        try:
            yield from finished
        except BrokenProcessPool:
            raise ConfigError(
                "a worker process was killed, perhaps for lack of memory: finished runs are saved; run the "
                "command again with fewer --jobs"
            ) from None


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
