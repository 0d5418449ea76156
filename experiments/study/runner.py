"""Running a study: a sweep of the paper's own grid, and its figure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..results import Record, Results, write_csv, write_json
from .figures import draw_lines
from .study import Cell, Point, Study, lines, points, run_cells
from .sweep_outcome import stackable
from .sweep_run import open_runs


def run_study(
    study: Study,
    results: Results,
    *,
    quick: bool,
    runs: int | None = None,
    jobs: int | None = None,
    select: Callable[[Cell], bool] = lambda _: True,
    on_start: Callable[[int, int], None] = lambda done, total: None,
    on_record: Callable[[Record], None] = lambda _: None,
) -> tuple[list[Point], list[Path]]:
    """Run what no earlier call at the same place has run, then draw all of it.

    Interrupt it when you like: finished runs are kept and the next call goes on from there. `select`
    leaves out cells of the grid; `jobs` is the number of worker processes (default: one per core).
    """
    seeds = range(runs or (study.quick_runs if quick else study.runs))
    cells = [cell for seed in seeds for cell in study.cells(quick, seed) if select(cell)]
    with open_runs(results, cells) as (out, grid):
        try:
            grid.go(run_cells, batches=stackable, jobs=jobs, on_start=on_start, on_record=on_record)
        finally:
            summary = points(grid.records())
            files = _report(study, summary, out, quick=quick) if summary else []
    return summary, files


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
        f"{study.section}; median of {count} runs, bars as in the paper: second and third quintile "
        f"(quantiles 0.4 and 0.6, a fifth of the runs).\n"
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
