"""Running a study: side by side in worker processes, resumable, every finished run on disk at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path

import torch

from ..config import ConfigError
from ..figures import draw_lines
from ..results import Record, RecordFile, read_records, write_csv, write_json
from .study import Cell, Point, Study, lines, points, run_cell


def run_study(
    study: Study,
    out: Path,
    *,
    quick: bool,
    runs: int | None = None,
    jobs: int | None = None,
    select: Callable[[Cell], bool] = lambda _: True,
    on_start: Callable[[int, int], None] = lambda done, total: None,
    on_record: Callable[[Record], None] = lambda _: None,
) -> tuple[list[Point], list[Path]]:
    """Run what is not yet in `out`/runs.jsonl, then draw all of it.

    Interrupt it when you like: finished runs are kept and the next call goes on from there. `select`
    leaves out cells of the grid; `jobs` is the number of worker processes (default: one per core).
    """
    seeds = range(runs or (study.quick_runs if quick else study.runs))
    cells = [cell for seed in seeds for cell in study.cells(quick, seed) if select(cell)]
    wanted = {cell.key for cell in cells}
    path = out / "runs.jsonl"
    records = {r["key"]: r for r in read_records(path) if r.get("key") in wanted}
    left = [cell for cell in cells if cell.key not in records]
    on_start(len(records), len(cells))
    try:
        # Closed at once when interrupted: left to the garbage collector, it would first run them all.
        with (
            RecordFile(path, fresh=False) as file,
            closing(_in_parallel(left, jobs or os.cpu_count() or 1)) as finished,
        ):
            for record in finished:
                records[record["key"]] = record
                file.write(record)
                on_record(record)
    finally:
        ordered = [records[cell.key] for cell in cells if cell.key in records]
        summary = points(ordered)
        files = _report(study, summary, out, quick=quick) if summary else []
    return summary, files


def _in_parallel(cells: list[Cell], jobs: int) -> Generator[Record, None, None]:
    """Yield records as they are finished; the rest is cancelled when the caller stops."""
    if not cells:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(cells)), context, initializer=_prepare_worker) as pool:
        waiting: set[Future[Record]] = {pool.submit(run_cell, cell) for cell in cells}
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


def _prepare_worker() -> None:
    """Threads inside one product fight with the other workers for the same cores.

    Ctrl-C reaches workers too: they end at once and without a word, for the parent says what there is
    to say.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _report(study: Study, summary: list[Point], out: Path, *, quick: bool) -> list[Path]:
    table = out / "summary.csv"
    header = [
        study.legend,
        study.x_label,
        "runs",
        "median",
        "second quintile",
        "third quintile",
        "mean",
    ]
    write_csv(
        table,
        header,
        (
            [p.line, f"{p.x:g}", p.runs, *(f"{v:.4f}" for v in (p.median, p.low, p.high, p.mean))]
            for p in summary
        ),
    )
    write_json(out / "study.json", {"name": study.name, "quick": quick, "section": study.section})
    count = f"{min(p.runs for p in summary)}" if summary else "0"
    caption = (
        f"{study.section}; median of {count} runs, bars: second and third quintile.\n"
        f"{study.caption(quick)}"
    )
    figures = draw_lines(
        out / "figure",
        lines(summary),
        title=study.title,
        x_label=study.x_label,
        legend=study.legend,
        caption=caption,
    )
    return [table, *figures]
