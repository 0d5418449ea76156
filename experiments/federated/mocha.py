"""MOCHA against separate and pooled linear models on subjects who each have little data of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...models import stream
from ...models.multitask import LinearTask, MultiTaskOptions, MultiTaskResult, multitask
from ..data import DataError, load

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


@dataclass(frozen=True)
class Split:
    """Every subject's samples to learn from, and those to be tested with."""

    train: list[LinearTask]
    test: list[LinearTask]


@dataclass(frozen=True)
class Outcome:
    """One method on one split: each subject's accuracy, the strength chosen, and F if it alternates."""

    accuracy: list[float]
    strength: float
    objectives: list[float]


def subjects(seed: int = 0) -> Subjects:
    """Sitting against standing, a task per person; related made-up tasks where those files are absent."""
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


def split(people: Subjects, samples: int, seed: int) -> Split:
    """`samples` of every subject to learn from, at least one of each class; features standardised."""
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

    return Split(take(chosen), take(held))


def separate(train: Sequence[LinearTask], strength: float, seed: int) -> MultiTaskResult:
    """Everybody alone."""
    options = MultiTaskOptions(relation=0.0, shrink=strength)
    return multitask(train, options, alternations=1, rounds=30, learn_omega=False, seed=seed)


def pooled(train: Sequence[LinearTask], strength: float, seed: int) -> MultiTaskResult:
    """One model for everybody, from everybody's samples in one place."""
    whole = LinearTask(np.concatenate([t.x for t in train]), np.concatenate([t.y for t in train]))
    options = MultiTaskOptions(relation=0.0, shrink=strength)
    one = multitask([whole], options, alternations=1, rounds=30, learn_omega=False, seed=seed)
    return MultiTaskResult(np.repeat(one.weights, len(train), axis=1), one.omega, one.objectives)


def mocha(train: Sequence[LinearTask], strength: float, seed: int) -> MultiTaskResult:
    """A model each, and their relations; a third of the nodes is slow, and some drop out of a round."""
    dice = stream(seed, "stragglers")

    def effort(round: int, task: int) -> float:
        return 1.0 if task % 3 else float(dice.choice([0.0, 0.25, 0.5]))

    # Unrelated tasks have Ω = m·I: divided by m, λ1 begins as strong as the others' λ2.
    options = MultiTaskOptions(relation=strength / len(train), shrink=LIGHT)
    return multitask(train, options, alternations=6, rounds=20, effort=effort, seed=seed)


METHODS = {"separate": separate, "pooled": pooled, "MOCHA": mocha}


def run(method: str, data: Split, seed: int) -> Outcome:
    """Choose the strength on held-back training samples, then learn from all of them and test."""
    learn = METHODS[method]
    inner = [
        (_rows(task, slice(0, _kept(task))), _rows(task, slice(_kept(task), None)))
        for task in data.train
    ]
    scores = []
    for strength in STRENGTHS:
        found = learn([a for a, _ in inner], strength, seed)
        scores.append(np.mean([found.correct(t, b) / len(b.y) for t, (_, b) in enumerate(inner)]))
    best = STRENGTHS[int(np.argmax(scores))]
    found = learn(data.train, best, seed)
    accuracy = [found.correct(t, task) / len(task.y) for t, task in enumerate(data.test)]
    return Outcome(accuracy, best, found.objectives)


def _kept(task: LinearTask) -> int:
    return len(task.y) - max(int(HELD * len(task.y)), 1)


def _rows(task: LinearTask, rows: slice) -> LinearTask:
    return LinearTask(task.x[rows], task.y[rows])
