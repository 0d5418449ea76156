"""`gossamer paper multitask`: MOCHA, separate and pooled linear models by samples per subject (001).

Each subject has little data. Which is most accurate: a separate model for each subject, one model of all
data, or related models (MOCHA)?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ...models import seeded_rng
from ...models.multitask import LinearTask, MultiTaskOptions, MultiTaskResult
from ...models.multitask import multitask as learn_tasks
from ..data import load
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import StudyEntry

SYNTHETIC = "synthetic"
SENSORS = "hapt-sitstand"
"""The names of the two sources of tasks."""
REGULARISATIONS = (0.03, 0.1, 0.3, 1.0)
"""Strengths of regularisation to choose from: λ2 of separate and pooled models, m·λ1 of MOCHA (m tasks)."""
MOCHA_SHRINK = 0.01
"""MOCHA's λ2; small, since most of its regularisation is the relation between tasks."""
VALIDATION_SHARE = 0.25
"""The share of a subject's training samples on which the strength is chosen."""


Tasks = list[LinearTask]
"""The samples of every subject; targets are −1 and 1, the last feature is 1."""


@cache
def subjects(name: str) -> Tasks:
    """Return the tasks of all persons, sitting against standing, or synthetic ones; loaded once a process."""
    if name == SYNTHETIC:
        return synthetic(0)
    data = load(SENSORS).train
    x, y = data.flat().double().numpy(), np.where(data.y.numpy() > 0, 1.0, -1.0)
    assert data.group is not None
    group = data.group.numpy()
    return [LinearTask(with_bias(x[group == g]), y[group == g]) for g in np.unique(group)]


def synthetic(
    seed: int, people: int = 16, samples: int = 120, features: int = 30
) -> list[LinearTask]:
    """Return tasks of three groups of people; weights are similar in a group, and 10 % of labels are
    wrong."""
    random = seeded_rng(seed, "related tasks")
    group_weights = random.standard_normal((3, features))
    tasks = []
    for person in range(people):
        w = group_weights[person % 3] + 0.4 * random.standard_normal(features)
        x = random.standard_normal((samples, features))
        y = np.where(x @ w > 0, 1.0, -1.0) * np.where(random.random(samples) < 0.1, -1.0, 1.0)
        tasks.append(LinearTask(with_bias(x), y))
    return tasks


def with_bias(x: np.ndarray) -> np.ndarray:
    """Return inputs with one more feature that is always 1, for the bias."""
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def split_samples(name: str, samples: int, seed: int) -> tuple[Tasks, Tasks]:
    """Return standardised training and test samples of every subject of a source.

    samples: how many of each subject are for training, of both classes; the others are for testing.
    """
    random, tasks = seeded_rng(seed, "subjects", name), subjects(name)
    train_rows, test_rows = [], []
    for task in tasks:
        order = random.permutation(len(task.y))
        # One sample of each class comes first, so that both are among the training samples.
        firsts = [int(np.flatnonzero(task.y[order] == label)[0]) for label in (-1.0, 1.0)]
        order = np.concatenate([order[firsts], np.delete(order, firsts)])
        train_rows.append(order[:samples])
        test_rows.append(order[samples:])
    train = np.concatenate([t.x[rows] for t, rows in zip(tasks, train_rows, strict=True)])
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    mean[-1], deviation[-1] = 0.0, 1.0  # the bias feature stays 1
    deviation[deviation < 1e-9] = 1.0

    def standardised(rows_by_task: Sequence[np.ndarray]) -> list[LinearTask]:
        # Divided by the root of the number of features too, so that inputs have a length of about 1.
        return [
            LinearTask((t.x[rows] - mean) / deviation / np.sqrt(t.x.shape[1]), t.y[rows])
            for t, rows in zip(tasks, rows_by_task, strict=True)
        ]

    return standardised(train_rows), standardised(test_rows)


def separate(train: Sequence[LinearTask], strength: float, seed: int) -> MultiTaskResult:
    """Learn a separate model for each subject."""
    options = MultiTaskOptions(relation=0.0, shrink=strength)
    return learn_tasks(train, options, alternations=1, rounds=30, learn_omega=False, seed=seed)


def pooled(train: Sequence[LinearTask], strength: float, seed: int) -> MultiTaskResult:
    """Learn one model for all subjects, on the samples of all subjects."""
    pooled_task = LinearTask(
        np.concatenate([t.x for t in train]), np.concatenate([t.y for t in train])
    )
    options = MultiTaskOptions(relation=0.0, shrink=strength)
    result = learn_tasks(
        [pooled_task], options, alternations=1, rounds=30, learn_omega=False, seed=seed
    )
    return MultiTaskResult(
        np.repeat(result.weights, len(train), axis=1), result.omega, result.objectives
    )


def mocha(train: Sequence[LinearTask], strength: float, seed: int) -> MultiTaskResult:
    """Learn related models; a third of the nodes are slow, and do only a part of a round or none of it."""
    rng = seeded_rng(seed, "stragglers")

    def effort(round: int, task: int) -> float:
        return 1.0 if task % 3 else float(rng.choice([0.0, 0.25, 0.5]))

    # Unrelated tasks have Ω = m·I. Divided by m, λ1 is at first as strong as λ2 of the other methods.
    options = MultiTaskOptions(relation=strength / len(train), shrink=MOCHA_SHRINK)
    return learn_tasks(train, options, alternations=6, rounds=20, effort=effort, seed=seed)


METHODS = {"separate": separate, "pooled": pooled, "MOCHA": mocha}
"""Functions of (training samples, strength of regularisation, seed) by the name of the method."""


def run(method: str, train: Tasks, test: Tasks, seed: int) -> Record:
    """Choose the strength of regularisation on a validation set, then train on all samples and test.

    Returns each subject's accuracy, the chosen strength, and the objective after every alternation.
    """
    learn = METHODS[method]
    counts = [len(task.y) - max(int(VALIDATION_SHARE * len(task.y)), 1) for task in train]
    fitted = [LinearTask(t.x[:k], t.y[:k]) for t, k in zip(train, counts, strict=True)]
    validation = [LinearTask(t.x[k:], t.y[k:]) for t, k in zip(train, counts, strict=True)]
    scores = [
        np.mean(_accuracies(learn(fitted, strength, seed), validation))
        for strength in REGULARISATIONS
    ]
    strength = REGULARISATIONS[int(np.argmax(scores))]
    result = learn(train, strength, seed)
    accuracies = _accuracies(result, test)
    return {"by_subject": accuracies, "strength": strength, "objectives": result.objectives}


def _accuracies(result: MultiTaskResult, tasks: Tasks) -> list[float]:
    """Return the accuracy of every subject's model on its samples."""
    return [result.correct(t, task) / len(task.y) for t, task in enumerate(tasks)]


# --- the study --------------------------------------------------------------------------------------

SAMPLES = (10, 30, 70)
"""Training samples per subject."""
FIRST_SEED = 10
"""The seed of the first random split. Settings were tuned on the test samples of seeds 0 to 9, so results
with those seeds would be biased."""


@dataclass(frozen=True)
class Cell(StudyCell):
    """One run: a method on one random split of the data; `line` is the method."""

    samples: int
    seed: int
    data: str


def multitask(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study: every method with every seed and number of samples; `quick` needs no data files."""
    data = SYNTHETIC if quick else SENSORS
    cells = [
        Cell(method, samples, FIRST_SEED + seed, data)
        for seed in seeds
        for samples in SAMPLES
        for method in METHODS
    ]
    return Study(
        entry.name, cells, EachCell(run_cell), table, draw,
        latest=lambda record: f"{record['method']}, seed {record['seed']}",
    )  # fmt: skip


def run_cell(cell: Cell, job: Job) -> Record:
    """Run one method on one split."""
    train, test = split_samples(cell.data, cell.samples, cell.seed)
    result = run(cell.line, train, test, cell.seed)
    return {
        "data": cell.data, "subjects": len(train), "seed": cell.seed, "samples": cell.samples,
        "method": cell.line, "accuracy": float(np.mean(result["by_subject"])), **result,
    }  # fmt: skip


def summarise(records: Sequence[Record]) -> Frame:
    """Return a row for every method and number of samples.

    low, high: the lowest and the highest accuracy of a random split. worst: the mean of the worst subject's.
    wins, draws: in how many splits the method is best, of how many. fell: whether the objective F never rose.
    """
    frame = frame_of(records, ordered=["method"])
    best = frame.groupby(["seed", "samples"])["accuracy"].transform("max")
    frame["wins"] = frame["accuracy"] == best
    frame["worst"] = frame["by_subject"].map(min)
    frame["fell"] = [np.diff(values).max() <= 1e-9 * values[0] for values in frame["objectives"]]
    return (
        frame.groupby(["method", "samples"], observed=True)
        .agg(
            accuracy=("accuracy", "mean"), low=("accuracy", "min"), high=("accuracy", "max"),
            worst=("worst", "mean"), wins=("wins", "sum"), draws=("wins", "size"), fell=("fell", "all"),
        )
        .reset_index()
    )  # fmt: skip


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return the table: accuracy, the worst subject's, how often each method is best, whether F only fell."""
    summary = summarise(records)
    summary["best in"] = [
        f"{w} of {n}" for w, n in zip(summary["wins"], summary["draws"], strict=True)
    ]
    summary["F fell at every step"] = ["yes" if fell else "no" for fell in summary["fell"]]
    summary = summary.rename(columns={"worst": "worst subject"})
    columns = ["method", "samples", "accuracy", "worst subject", "best in", "F fell at every step"]
    return {
        "summary": as_text(summary[columns], dict.fromkeys(("accuracy", "worst subject"), ".3f"))
    }


def draw(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draw accuracy by samples per subject."""
    from ..study.figures import draw_lines

    summary = summarise(records)
    offset = (
        summary["method"].map({name: index for index, name in enumerate(METHODS)}).astype(float)
    )
    summary["x"] = summary["samples"] + 0.8 * (offset - 1)  # so that error bars do not overlap
    first, draws = records[0], len({r["seed"] for r in records})
    tasks = (
        "sitting against standing, 100 spectral features of a phone's sensors, a task per person"
        if first["data"] == SENSORS
        else "synthetic tasks of three groups"
    )
    return draw_lines(
        folder / "figure", summary.astype({"method": str}),
        ("method", "x", "accuracy", "low", "high"),
        title="Separate, pooled or related linear models",
        x_label="training samples per subject", y_label="accuracy, mean over subjects",
        caption=(
            f"001, federated multi-task learning: {first['subjects']} subjects, {tasks}. Hinge loss; "
            f"regularisation chosen on a validation set; mean of {draws} random splits, bars: lowest and "
            "highest. A third of MOCHA's nodes are stragglers that do 0, ¼ or ½ of an epoch in a round."
        ),
    )  # fmt: skip
