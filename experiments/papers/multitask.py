"""`gossamer paper multitask`: MOCHA, separate and pooled linear models by samples per subject (001)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ..federated import mocha
from ..results import Record
from ..study import EachCell, Frame, Job, Study, as_text, frame_of, key_of
from . import Paper

SAMPLES = (10, 30, 70)
FIRST = 10
"""The first draw. Settings were tried out on those before, by their test samples: they prove nothing."""


@dataclass(frozen=True)
class Cell:
    """One run: a method on one draw of the data."""

    line: str
    samples: int
    seed: int
    data: str

    @property
    def key(self) -> str:
        """Names the run by all that decides its result."""
        return key_of(f"multitask|{self.data}|{self.line}|{self.samples}|{self.seed}")


def multitask(paper: Paper, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study: every method on every draw and number of samples."""
    data = subjects().name
    cells = [
        Cell(method, samples, FIRST + seed, data)
        for seed in seeds
        for samples in SAMPLES
        for method in mocha.METHODS
    ]
    return Study(
        paper.name, cells, EachCell(run_cell), table, draw,
        titles={"summary": f"{paper.title} ({paper.section})"},
        latest=lambda record: f"{record['method']}, seed {record['seed']}",
    )  # fmt: skip


@cache
def subjects() -> mocha.Subjects:
    """Return the people and their samples, read once by every process."""
    return mocha.subjects()


def run_cell(cell: Cell, job: Job) -> Record:
    """Run a method."""
    people = subjects()
    run = mocha.run(cell.line, mocha.split(people, cell.samples, cell.seed), cell.seed)
    return {
        "data": people.name, "subjects": len(people.tasks), "seed": cell.seed,
        "samples": cell.samples, "method": cell.line, "accuracy": float(np.mean(run.accuracy)),
        "by_subject": run.accuracy, "strength": run.strength, "objectives": run.objectives,
    }  # fmt: skip


def summarise(records: Sequence[Record]) -> Frame:
    """Return a row for every method and number of samples."""
    frame = frame_of(records, ordered=["method"])
    best = frame.groupby(["seed", "samples"])["accuracy"].transform("max")
    frame["wins"] = frame["accuracy"] == best
    frame["worst"] = frame["by_subject"].map(min)
    frame["fell"] = [np.diff(each).max() <= 1e-9 * each[0] for each in frame["objectives"]]
    return (
        frame.groupby(["method", "samples"], observed=True)
        .agg(
            accuracy=("accuracy", "mean"), low=("accuracy", "min"), high=("accuracy", "max"),
            worst=("worst", "mean"), wins=("wins", "sum"), draws=("wins", "size"), fell=("fell", "all"),
        )
        .reset_index()
    )  # fmt: skip


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return accuracies, the worst subject's, in how many draws a method is best, and whether F fell."""
    found = summarise(records)
    found["best in"] = [f"{w} of {n}" for w, n in zip(found["wins"], found["draws"], strict=True)]
    found["F fell at every step"] = ["yes" if fell else "no" for fell in found["fell"]]
    found = found.rename(columns={"worst": "worst subject"})
    columns = ["method", "samples", "accuracy", "worst subject", "best in", "F fell at every step"]
    return {"summary": as_text(found[columns], dict.fromkeys(("accuracy", "worst subject"), ".3f"))}


def draw(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draw accuracy by samples per subject."""
    from ..study.figures import draw_lines, lines_of

    found = summarise(records)
    place = found["method"].map({name: at for at, name in enumerate(mocha.METHODS)}).astype(float)
    found["beside"] = found["samples"] + 0.8 * (place - 1)  # so that bars do not hide bars
    first, draws = records[0], len({r["seed"] for r in records})
    what = (
        "sitting against standing, 100 spectral features of a phone's sensors, a task per person"
        if first["data"] == mocha.SENSORS
        else "made-up tasks of three kinds, for want of the sensor data (set GOSSAMER_DATA)"
    )
    return draw_lines(
        folder / "figure",
        lines_of(found.astype({"method": str}), "method", "beside", "accuracy", "low", "high"),
        title="One linear model each, one for all, or related ones",
        x_label="training samples per subject", y_label="accuracy, mean over subjects",
        caption=(
            f"001, federated multi-task learning: {first['subjects']} subjects, {what}. Hinge loss; "
            f"regularisation chosen on held-back training samples; mean of {draws} draws, bars: lowest and "
            "highest. A third of MOCHA's nodes are stragglers that do 0, ¼ or ½ of an epoch in a round."
        ),
    )  # fmt: skip
