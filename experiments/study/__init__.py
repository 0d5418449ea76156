"""Studies and sweeps. A study is data: a grid of cells, a function that runs them, a table and a figure.

    study = Study("digits", cells, run_cells, table, figure)
    records, files = run_study(study, Results(Path("results/digits"), "sweep"))

One runner serves sweeps, comparisons and papers. Every finished run is on disk at once; interrupted by Ctrl-C
or killed, the same command goes on from there.
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
"""A pandas table. Any, since pandas' own types are unions that no checker can follow."""


PARENT_CHECK_SECONDS = 1.0
"""How often a worker looks whether its parent is still there."""


@dataclass(frozen=True)
class StudyCell:
    """One run of a grid. A study's own cells have further fields, which hold what decides the result.

    line: what --only chooses it by, often the label of its curve.
    """

    line: str

    @cached_property
    def key(self) -> str:
        """Names the run, so that a finished one is not run again; kept from when it was first asked for."""
        values = json.dumps(asdict(self), default=lambda model: model.model_dump(mode="json"))
        return key_of(f"{type(self).__module__}|{values}")


C = TypeVar("C", bound=StudyCell)


@dataclass(frozen=True)
class Job:
    """What a batch of runs may use: the study's folder, and so many threads."""

    folder: Path
    threads: int = 1

    def empty_folder(self, name: str) -> Path:
        """Return a folder for one run's files, without what an interrupted run left in it."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name


@dataclass(frozen=True)
class EachCell(Generic[C]):
    """Runs the cells of a batch one after the other; each cell's key is added to its record."""

    run: Callable[[C, Job], Record]

    def __call__(self, cells: list[C], job: Job) -> list[Record]:
        """Run them."""
        return [{"key": cell.key, **self.run(cell, job)} for cell in cells]


@dataclass(frozen=True)
class Study(Generic[C]):
    """A grid of runs and what is made of their records.

    cells: every run; a figure of several seeds lists them seed by seed, so that an interrupted study has
        all lines for some seeds.
    run: runs a batch of cells and returns a record for each, with the cell's key as "key"; `EachCell` makes
        one of what runs a single cell. A function of a module, since worker processes import it.
    table: makes text tables of the records, by name: "summary" first. Each is printed under its title in
        `titles` and written as NAME.csv.
    figure: draws files into a folder; None draws nothing.
    batches: which cells go to a worker together, to be run in one stack; each by itself if left out.
    latest: describes a record for the progress bar.
    always_run: lines that are run even if --only does not name them.
    about: JSON files that say what was run, by name.
    note: printed below the tables.
    live: the runs start processes of their own and never end twice alike: they take turns in this process,
        and none is copied from an earlier folder.
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
    about: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    live: bool = False

    def only(self, lines: Sequence[str] | None) -> Study[C]:
        """Return the study with these lines alone, or all of it without any; raises ConfigError."""
        if not lines:
            return self
        known = list(dict.fromkeys(cell.line for cell in self.cells))
        if unknown := [line for line in lines if line not in known]:
            raise ConfigError(
                f"{self.name} has no line {unknown[0]!r}; lines are {', '.join(map(repr, known))}"
            )
        wanted = {*lines, *self.always_run}
        return replace(self, cells=[cell for cell in self.cells if cell.line in wanted])


def key_of(text: str) -> str:
    """Return a short name for a text that holds all that decides a result."""
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
    """Return a table as text: columns by their format, what is missing as nothing."""
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
    """Run the cells that no earlier call at the same place has run; print and write tables and figures.

    jobs: worker processes, one per core if left out; 1 runs everything in this process.

    Returns the records of all cells and the files. Ctrl-C raises Stopped, which says what is kept, after
    the tables and figures of the finished runs are written.
    """
    grid = key_of("\n".join(sorted({cell.key for cell in study.cells})))
    with results.begun(grid) as folder:
        path = folder / "runs.jsonl"
        earlier = [] if study.live else [one / "runs.jsonl" for one in results.earlier_runs()]
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
                f"interrupted; {len(runs.records())} of {len(study.cells)} runs are kept in {folder}; the "
                "same command goes on from there"
            ) from None
        finally:
            if records := runs.records():
                files = _report(study, records, folder)
    console.print_written([path, *files])
    return records, files


def _report(study: Study[C], records: list[Record], folder: Path) -> list[Path]:
    files = []
    for name, content in study.about.items():
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
    """The records of a grid of runs, kept in a JSONL file.

    Runs whose key is in the file are not run again; records of other keys in it are left alone.

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
        """Return what is finished, in the order of the cells."""
        known = self._records
        return [known[cell.key] for cell in self._cells if cell.key in known]

    def finish(self, study: Study[C], job: Job, jobs: int | None = None) -> Iterator[Record]:
        """Run what is left and yield each record when it is in the file."""
        # Batches are those of a run from the beginning, whatever is left of them: who shares a stack may
        # change the last bit of a sum, and an interruption must not change a result.
        left = [
            batch
            for batch in study.batches(self._cells)
            if any(cell.key not in self._records for cell in batch)
        ]
        workers = 1 if study.live else min(jobs or os.cpu_count() or 1, len(left))
        threads = max(1, (os.cpu_count() or 1) // max(workers, 1))
        batches = _in_parallel if workers > 1 else _in_turn
        # Closed at once when interrupted: left to the garbage collector, it would first run them all.
        with (
            RecordFile(self._path, fresh=False) as file,
            closing(batches(study.run, left, replace(job, threads=threads), workers)) as finished,
        ):
            while self._copies:
                file.write(self._copies.pop(0))
            for records in finished:
                for record in records:
                    if record["key"] in self._records:
                        continue
                    self._records[record["key"]] = record
                    file.write(record)
                    yield record


def _in_turn(
    run: Callable[[list[C], Job], list[Record]], batches: list[list[C]], job: Job, _workers: int
) -> Generator[list[Record], None, None]:
    for batch in batches:
        yield run(batch, job)


def _in_parallel(
    run: Callable[[list[C], Job], list[Record]], batches: list[list[C]], job: Job, workers: int
) -> Generator[list[Record], None, None]:
    """Yield records as batches are finished; the rest is cancelled when the caller stops."""
    import joblib

    options: dict[str, Any] = {"batch_size": 1, "max_nbytes": None}
    options |= {"initializer": _prepare_worker, "initargs": (os.getpid(),)}
    parallel = joblib.Parallel(workers, return_as="generator_unordered", **options)
    with _ignored_interrupts():
        finished: Any = parallel(joblib.delayed(run)(batch, job) for batch in batches)
    with closing(finished):
        try:
            yield from finished
        except BrokenProcessPool:
            raise ConfigError(
                "a worker process was killed, perhaps for lack of memory: finished runs are kept, start "
                "again with fewer --jobs"
            ) from None


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C while worker processes are started, so that they ignore it as well.

    The parent ends them. Left to itself, one that still imports would answer with a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _prepare_worker(parent: int) -> None:
    """End with the parent; use one thread inside a product, or workers would fight for cores."""
    threading.Thread(
        target=_end_with_parent, args=(parent,), name="end with parent", daemon=True
    ).start()
    import torch

    torch.set_num_threads(1)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:  # a process whose parent has ended gets another one
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)
