"""Runs studies: a study is a grid of cells, a function that runs them, a table and a figure.

    study = Study("digits", cells, run_cells, table, figure)
    records, files = run_study(study, Results(Path("results/digits"), "sweep"))

Sweeps, comparisons and the studies of papers all use this runner. Every run is written to disk when it is
finished; after Ctrl-C or a crash, the same command runs only what is missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from ..cli import console
from ..errors import ConfigError, Stopped
from ..results import Record, RecordFile, Results, read_records, write_csv, write_json
from .workers import Failure, Job, Workers, run_batches

Frame: TypeAlias = Any
"""A pandas DataFrame. The type is Any, since type checkers cannot follow pandas' types."""


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
    warnings: sentences about the records, printed below the tables and kept in run.json.
    shown: returns the rows of a table, by its name, that are printed; its file has all.
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
    warnings: Callable[[Sequence[Record]], Sequence[str]] = lambda records: ()
    shown: Callable[[str, Frame], Frame] = lambda name, frame: frame
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


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads for one operation within the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    study: Study[C], results: Results, *, on: str | None = None
) -> tuple[list[Record], list[Path]]:
    """Run the cells whose records are not in the results folder yet; print and write tables and figures.

    on: where to compute, as `Workers.parse` reads it: one process per core of this machine if left out;
        "local:1" is this process.

    Returns the records of all cells and the files. After Ctrl-C, the tables and figures of the finished runs
    are written, and Stopped is raised, whose message says how many runs are finished. Runs that fail do not
    stop the others; the first error is raised when all others are finished.
    """
    workers = Workers(count=1) if study.live else Workers.parse(on)
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
                for result in runs.finish(study, Job(folder), workers):
                    failed = isinstance(result, Failure)
                    latest = "" if failed else study.latest(result)
                    bar.update(task, advance=not failed, latest=f"{latest} {runs.state}".strip())
        except KeyboardInterrupt:
            raise Stopped(
                f"interrupted; {len(runs.records())} of {len(study.cells)} runs are saved in {folder}; the "
                "same command runs the rest"
            ) from None
        finally:
            if records := runs.records():
                files = _report(study, records, folder)
        runs.raise_failure(folder)
    console.print_written([path, *files])
    console.leave_report(folder)
    return records, files


def _report(study: Study[C], records: list[Record], folder: Path) -> list[Path]:
    files = []
    for name, content in study.json_files.items():
        write_json(folder / name, content)
    for name, frame in study.table(records).items():
        header, shown = [*map(str, frame.columns)], study.shown(name, frame)
        title = study.titles.get(name, study.name if name == "summary" else name)
        console.table(title, header, [*shown.itertuples(index=False, name=None)])
        files.append(folder / f"{name}.csv")
        write_csv(files[-1], header, frame.itertuples(index=False, name=None))
    for sentence in study.warnings(records):
        console.warn(sentence)
    if study.note:
        console.out.print(study.note, soft_wrap=True)
    return files + (study.figure(folder, records) if study.figure else [])


class Runs(Generic[C]):
    """The records of a study's runs, in a JSONL file.

    Runs whose key is in the file are not run again; records with other keys are ignored.

    earlier: JSONL files of earlier results of this study, from which records are copied if their keys are
        those of its cells; `copied` is the number of copies by file.
    """

    def __init__(self, cells: Sequence[C], path: Path, earlier: Sequence[Path] = ()):
        self._cells, self._path = list({cell.key: cell for cell in cells}.values()), path
        keys = {cell.key for cell in cells}
        self._records = {r["key"]: r for r in read_records(path) if r.get("key") in keys}
        self._copies: list[Record] = []
        self._unfinished: dict[int, list[C]] = {}
        self._failures: list[tuple[list[C], Failure]] = []
        self._slots = 1
        """How many batches are computed at the same time."""
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

    @property
    def state(self) -> str:
        """How many runs are running and have failed, for the progress bar."""
        running = sum(len(batch) for batch in islice(self._unfinished.values(), self._slots))
        failed = sum(len(batch) for batch, _ in self._failures)
        return ", ".join(
            f"{n} {what}" for n, what in ((running, "running"), (failed, "failed")) if n
        )

    def finish(self, study: Study[C], job: Job, workers: Workers) -> Iterator[Record | Failure]:
        """Run the cells without a record; yield each record when it is written, and each failure."""
        # Batches are made of all cells, finished or not, since the networks that share a stack may change
        # the last bit of a sum: results must not depend on interruptions.
        batches = [
            batch
            for batch in study.batches(self._cells)
            if any(cell.key not in self._records for cell in batch)
        ]
        with RecordFile(self._path, fresh=False) as file:
            while self._copies:
                file.write(self._copies.pop(0))
            yield from self._run(batches, study, job, workers, file)

    def _run(
        self, batches: list[list[C]], study: Study[C], job: Job, workers: Workers, file: RecordFile
    ) -> Iterator[Record | Failure]:
        """Run batches; of one that fails, run the cells one by one, since the others may do without it."""
        self._unfinished, single = dict(enumerate(batches)), []
        # The generator is closed when interrupted; the garbage collector would let it run all batches first.
        results = run_batches(study.run, batches, job, workers, on_start=self._set_slots)
        with closing(results) as finished:
            for index, result in finished:
                batch = self._unfinished.pop(index)
                if isinstance(result, Failure) and len(batch) > 1:
                    single += [[cell] for cell in batch if cell.key not in self._records]
                    continue
                if isinstance(result, Failure):
                    self._failures.append((batch, result))
                    yield result
                    continue
                for record in result:
                    if record["key"] in self._records:
                        continue
                    self._records[record["key"]] = record
                    file.write(record)
                    yield record
        if single:
            yield from self._run(single, study, job, workers, file)

    def _set_slots(self, slots: int) -> None:
        self._slots = slots

    def raise_failure(self, folder: Path) -> None:
        """Raise the error of the first batch that failed, if any; write the tracebacks of all of them."""
        if not self._failures:
            return
        traces = folder / "failed.txt"
        texts = [
            f"{[cell.line for cell in batch]}\n{failure.trace}" for batch, failure in self._failures
        ]
        traces.write_text("\n".join(texts), "utf-8")
        error = self._failures[0][1].error
        if not self._records:
            raise error
        failed = sum(len(batch) for batch, _ in self._failures)
        raise ConfigError(
            f"{failed} of {len(self._cells)} runs failed, the first with: {error} (tracebacks are in "
            f"{traces}); the others are saved, and the same command runs only those that failed"
        ) from error
