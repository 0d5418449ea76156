"""`gossamer paper multitask`: MOCHA, separate and pooled linear models by samples per subject (001).

Subjects have little data of their own each: one model each, one for all, or related ones?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ...models import stream
from ...models.multitask import LinearTask, MultiTaskOptions, MultiTaskResult
from ...models.multitask import multitask as learn_tasks
from ..data import DataError, load
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import Paper

SYNTHETIC = "synthetic"
SENSORS = "hapt-sitstand"
STRENGTHS = (0.03, 0.1, 0.3, 1.0)
"""What validation chooses from: λ2 of separate and pooled models, m·λ1 of MOCHA."""
LIGHT = 0.01
"""MOCHA's λ2: most of its regularisation is the relation between tasks."""
HELD = 0.25
"""The share of a subject's training samples by which strengths are chosen."""


@dataclass(frozen=True)
class Subjects:
    """Samples by subject; targets are −1 and 1, the last feature is 1."""

    name: str
    tasks: list[LinearTask]


@cache
def subjects(seed: int = 0) -> Subjects:
    """Sitting against standing, a task per person; related made-up tasks where those files are absent.

    Read once by every process.
    """
    try:
        data = load(SENSORS).train
    except DataError:
        return Subjects(SYNTHETIC, synthetic(seed))
    x, y = data.flat().double().numpy(), np.where(data.y.numpy() > 0, 1.0, -1.0)
    assert data.group is not None
    group = data.group.numpy()
    return Subjects(
        SENSORS, [LinearTask(with_one(x[group == g]), y[group == g]) for g in np.unique(group)]
    )


def synthetic(
    seed: int, people: int = 16, samples: int = 120, features: int = 30
) -> list[LinearTask]:
    """Three kinds of people: models are alike within a kind, and a tenth of the labels are wrong."""
    random = stream(seed, "related tasks")
    kinds = random.standard_normal((3, features))
    found = []
    for person in range(people):
        w = kinds[person % 3] + 0.4 * random.standard_normal(features)
        x = random.standard_normal((samples, features))
        y = np.where(x @ w > 0, 1.0, -1.0) * np.where(random.random(samples) < 0.1, -1.0, 1.0)
        found.append(LinearTask(with_one(x), y))
    return found


def with_one(x: np.ndarray) -> np.ndarray:
    """A feature that is always 1, for the offset."""
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


Tasks = list[LinearTask]


def split(people: Subjects, samples: int, seed: int) -> tuple[Tasks, Tasks]:
    """`samples` of every subject to learn from, at least one of each class, and the rest to be tested with.

    Features are standardised.
    """
    random = stream(seed, "subjects", people.name)
    chosen, held = [], []
    for task in people.tasks:
        order = random.permutation(len(task.y))
        firsts = [int(np.flatnonzero(task.y[order] == label)[0]) for label in (-1.0, 1.0)]
        order = np.concatenate([order[firsts], np.delete(order, firsts)])
        chosen.append(order[:samples])
        held.append(order[samples:])
    train = np.concatenate([t.x[c] for t, c in zip(people.tasks, chosen, strict=True)])
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    mean[-1], deviation[-1] = 0.0, 1.0  # the 1 stays 1
    deviation[deviation < 1e-9] = 1.0

    def take(rows: Sequence[np.ndarray]) -> list[LinearTask]:
        return [
            LinearTask((t.x[r] - mean) / deviation / np.sqrt(t.x.shape[1]), t.y[r])
            for t, r in zip(people.tasks, rows, strict=True)
        ]

    return take(chosen), take(held)


def separate(train: Sequence[LinearTask], strength: float, seed: int) -> MultiTaskResult:
    """Everybody alone."""
    options = MultiTaskOptions(relation=0.0, shrink=strength)
    return learn_tasks(train, options, alternations=1, rounds=30, learn_omega=False, seed=seed)


def pooled(train: Sequence[LinearTask], strength: float, seed: int) -> MultiTaskResult:
    """One model for everybody, from everybody's samples in one place."""
    whole = LinearTask(np.concatenate([t.x for t in train]), np.concatenate([t.y for t in train]))
    options = MultiTaskOptions(relation=0.0, shrink=strength)
    one = learn_tasks([whole], options, alternations=1, rounds=30, learn_omega=False, seed=seed)
    return MultiTaskResult(np.repeat(one.weights, len(train), axis=1), one.omega, one.objectives)


def mocha(train: Sequence[LinearTask], strength: float, seed: int) -> MultiTaskResult:
    """A model each, and their relations; a third of the nodes is slow, and some drop out of a round."""
    dice = stream(seed, "stragglers")

    def effort(round: int, task: int) -> float:
        return 1.0 if task % 3 else float(dice.choice([0.0, 0.25, 0.5]))

    # Unrelated tasks have Ω = m·I: divided by m, λ1 begins as strong as the others' λ2.
    options = MultiTaskOptions(relation=strength / len(train), shrink=LIGHT)
    return learn_tasks(train, options, alternations=6, rounds=20, effort=effort, seed=seed)


METHODS = {"separate": separate, "pooled": pooled, "MOCHA": mocha}


def run(method: str, train: Tasks, test: Tasks, seed: int) -> Record:
    """Choose the strength on held-back training samples, then learn from all of them and test.

    Returns each subject's accuracy, the strength chosen, and the objective after every alternation.
    """
    learn = METHODS[method]
    kept = [len(task.y) - max(int(HELD * len(task.y)), 1) for task in train]
    inner = [LinearTask(t.x[:k], t.y[:k]) for t, k in zip(train, kept, strict=True)]
    held = [LinearTask(t.x[k:], t.y[k:]) for t, k in zip(train, kept, strict=True)]
    scores = [np.mean(_accuracies(learn(inner, each, seed), held)) for each in STRENGTHS]
    strength = STRENGTHS[int(np.argmax(scores))]
    found = learn(train, strength, seed)
    accuracies = _accuracies(found, test)
    return {"by_subject": accuracies, "strength": strength, "objectives": found.objectives}


def _accuracies(found: MultiTaskResult, tasks: Tasks) -> list[float]:
    return [found.correct(t, task) / len(task.y) for t, task in enumerate(tasks)]


# --- the study --------------------------------------------------------------------------------------

SAMPLES = (10, 30, 70)
FIRST = 10
"""The first draw. Settings were tried out on those before, by their test samples: they prove nothing."""


@dataclass(frozen=True)
class Cell(StudyCell):
    """One run: a method on one draw of the data."""

    samples: int
    seed: int
    data: str


def multitask(paper: Paper, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study: every method on every draw and number of samples."""
    data = subjects().name
    cells = [
        Cell(method, samples, FIRST + seed, data)
        for seed in seeds
        for samples in SAMPLES
        for method in METHODS
    ]
    return Study(
        paper.name, cells, EachCell(run_cell), table, draw,
        latest=lambda record: f"{record['method']}, seed {record['seed']}",
    )  # fmt: skip


def run_cell(cell: Cell, job: Job) -> Record:
    """Run a method."""
    people = subjects()
    found = run(cell.line, *split(people, cell.samples, cell.seed), cell.seed)
    return {
        "data": people.name, "subjects": len(people.tasks), "seed": cell.seed, "samples": cell.samples,
        "method": cell.line, "accuracy": float(np.mean(found["by_subject"])), **found,
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
    from ..study.figures import draw_lines

    found = summarise(records)
    place = found["method"].map({name: at for at, name in enumerate(METHODS)}).astype(float)
    found["beside"] = found["samples"] + 0.8 * (place - 1)  # so that bars do not hide bars
    first, draws = records[0], len({r["seed"] for r in records})
    what = (
        "sitting against standing, 100 spectral features of a phone's sensors, a task per person"
        if first["data"] == SENSORS
        else "made-up tasks of three kinds, for want of the sensor data (set GOSSAMER_DATA)"
    )
    return draw_lines(
        folder / "figure", found.astype({"method": str}),
        ("method", "beside", "accuracy", "low", "high"),
        title="One linear model each, one for all, or related ones",
        x_label="training samples per subject", y_label="accuracy, mean over subjects",
        caption=(
            f"001, federated multi-task learning: {first['subjects']} subjects, {what}. Hinge loss; "
            f"regularisation chosen on held-back training samples; mean of {draws} draws, bars: lowest and "
            "highest. A third of MOCHA's nodes are stragglers that do 0, ¼ or ½ of an epoch in a round."
        ),
    )  # fmt: skip
