"""`gossamer paper pfnm-…` and `magi-…`: run what is not yet on disk, then tell."""

from __future__ import annotations

from pathlib import Path

from ..cli import console
from ..config.tables import ConfigError
from ..papers.fusing_report import show, write_report
from ..papers.fusing_studies import FUSION_STUDIES
from ..papers.fusing_study import FusionStudy, run_all
from ..results import Record, Results
from ..study.sweep_run import open_runs


def run_fusion_study(
    study: FusionStudy,
    results: Results,
    *,
    full: bool,
    seeds: int | None = None,
    jobs: int | None = None,
    only: list[str] | None = None,
) -> tuple[list[Record], list[Path]]:
    """Run and report; interrupted, it keeps what is finished and goes on from there next time.

    `only` names panels of the study.
    """
    count = seeds or (study.seeds if full else study.quick_seeds)
    runs = [run for seed in range(count) for run in study.runs(full, seed)]
    panels = list(dict.fromkeys(run.panel for run in runs))
    if only and (unknown := [name for name in only if name not in panels]):
        raise ConfigError(
            f"{study.name} has no panel {unknown[0]!r}; panels are {', '.join(map(repr, panels))}"
        )
    chosen = [run for run in runs if not only or run.panel in only]
    files: list[Path] = []
    with open_runs(results, chosen) as (out, grid):
        try:
            with console.progress("runs") as bar:
                task = bar.add_task(study.name, total=None, latest="")
                grid.go(
                    run_all,
                    jobs=jobs,
                    on_start=lambda done, total: bar.update(task, completed=done, total=total),
                    on_record=lambda record: bar.update(
                        task, advance=1, latest=f"{record['panel']}, seed {record['seed']}"
                    ),
                )
        finally:
            if records := grid.records():
                files = write_report(study, records, out, full=full)
    return records, files


def paper_fusion(
    name: str,
    *,
    quick: bool,
    runs: int | None,
    jobs: int | None,
    only: list[str] | None,
    results: Results,
) -> None:
    """The command behind `gossamer paper NAME` for the studies of matching."""
    study = FUSION_STUDIES[name]
    records, files = run_fusion_study(
        study, results, full=not quick, seeds=runs, jobs=jobs, only=only
    )
    show(study, records)
    console.wrote([results.folder / "runs.jsonl", *files])
