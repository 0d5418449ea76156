"""The studies of FedNP and of federated multi-task learning, as `gossamer paper` knows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ..cli import console
from ..results import Record, Results

Rows = list[list[str]]


@dataclass(frozen=True)
class FederatedStudy:
    """A table and a picture; `run(folder, seeds, on_record)` makes both, matplotlib loaded only then."""

    name: str
    title: str
    section: str
    run: Callable[[Path, int, Callable[[Record], None]], tuple[Rows, list[Path]]]
    """The rows are the table's, its header first."""
    seeds: int
    steps: int
    """Records per seed."""


def _toy(out: Path, seeds: int, tell: Callable[[Record], None]) -> tuple[Rows, list[Path]]:
    from .fednp_study import run_toy

    return run_toy(out, seeds, tell)


def _tasks(out: Path, seeds: int, tell: Callable[[Record], None]) -> tuple[Rows, list[Path]]:
    from .mocha_study import run_multitask

    return run_multitask(out, seeds, tell)


FEDERATED_STUDIES: Mapping[str, FederatedStudy] = MappingProxyType(
    {
        study.name: study
        for study in (
            FederatedStudy(
                "fednp-toy", "FedNP on three stretches of a parabola, with z frozen as a control",
                "004, figure 1 and table 4", _toy, 5, 4,
            ),
            FederatedStudy(
                "multitask", "MOCHA against separate and pooled linear models",
                "001, federated multi-task learning", _tasks, 5, 9,
            ),
        )
    }
)  # fmt: skip


def paper_federated(name: str, *, runs: int | None, results: Results) -> None:
    """The command behind `gossamer paper NAME` for these studies."""
    study = FEDERATED_STUDIES[name]
    seeds = runs or study.seeds
    with results.begun() as folder, console.progress("runs") as bar:
        task = bar.add_task(name, total=seeds * study.steps, latest="")
        rows, files = study.run(
            folder,
            seeds,
            lambda record: bar.update(
                task, advance=1, latest=f"{record['method']}, seed {record['seed']}"
            ),
        )
    console.table(f"{study.title} ({study.section})", rows[0], rows[1:])
    console.wrote([folder / "runs.jsonl", *files])
