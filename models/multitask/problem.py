"""MOCHA's problem: a linear model per task, and a matrix Ω that says how tasks are related.

    F(W, Ω) = Σ_t Σ_i ℓ(w_t·x_ti, y_ti) + λ1·tr(W Ω Wᵀ) + λ2·‖W‖² + λ1·µ·tr(Ω),    tr(Ω⁻¹) = 1

W is [features, tasks]. The last term (µ, `floor`, small) keeps Ω finite where tasks' models coincide or
are 0; with it the best Ω for given W is known in closed form, and F falls whenever W or Ω is improved.
For a fixed Ω the problem is convex in W, and its dual couples the tasks only through V = [X_tᵀα_t]:
W = V·K with K = ½(λ1·Ω + λ2·I)⁻¹. So a task's node needs V and Ω, and nobody's samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import ModelError

Array = np.ndarray[Any, np.dtype[np.float64]]
LossName = Literal["hinge", "squared"]


@dataclass(frozen=True, eq=False)
class LinearTask:
    """One node's samples: x [samples, features], y −1 or 1 for the hinge loss, any number for squared.

    Append a feature that is 1 to give the models an offset.
    """

    x: Array
    y: Array

    def __post_init__(self) -> None:
        if self.x.ndim != 2 or self.y.shape != (len(self.x),) or not len(self.x):
            raise ModelError(
                f"a task needs inputs [samples, features] and as many targets, not {self.x.shape} "
                f"and {self.y.shape}"
            )
        if not (np.isfinite(self.x).all() and np.isfinite(self.y).all()):
            raise ModelError("a task has inputs or targets that are not finite")


@dataclass(frozen=True)
class MultiTaskOptions:
    """The knobs of the problem.

    relation
        λ1: how much tasks learn from each other. Raise it when tasks have few samples.
    shrink
        λ2: plain weight decay.
    floor
        µ. Raise it when Ω follows noise in W.
    loss
        `hinge` (linear support vector machines) or `squared` (½ of it, for regression).
    """

    relation: float = 0.1
    shrink: float = 0.01
    floor: float = 1e-3
    loss: LossName = "hinge"

    def __post_init__(self) -> None:
        for name, value, least in (
            ("relation (λ1)", self.relation, 0.0),
            ("shrink (λ2)", self.shrink, None),
            ("floor (µ)", self.floor, None),
        ):
            if not math.isfinite(value) or value < 0 or (value == 0 and least is None):
                bound = "above 0" if least is None else "at least 0"
                raise ModelError(f"{name} must be {bound} and finite, not {value}")
        if self.loss not in ("hinge", "squared"):
            raise ModelError(f"unknown loss {self.loss!r}: there are hinge, squared")


def check_tasks(tasks: Sequence[LinearTask], loss: LossName) -> None:
    """Raise, naming the task, what is wrong with tasks that should learn together."""
    if not tasks:
        raise ModelError("there are no tasks to learn")
    for index, task in enumerate(tasks):
        if task.x.shape[1] != tasks[0].x.shape[1]:
            raise ModelError(
                f"task {index} has {task.x.shape[1]} features, task 0 has {tasks[0].x.shape[1]}"
            )
        if loss == "hinge" and not np.isin(task.y, (-1, 1)).all():
            raise ModelError(f"task {index}: the hinge loss needs targets −1 and 1")


def losses(scores: Array, y: Array, loss: LossName) -> Array:
    """One number per sample."""
    if loss == "hinge":
        return np.maximum(0.0, 1.0 - y * scores)
    return 0.5 * (scores - y) ** 2


def objective(
    weights: Array, omega: Array, tasks: Sequence[LinearTask], options: MultiTaskOptions
) -> float:
    """F(W, Ω)."""
    fit = sum(
        float(losses(task.x @ weights[:, t], task.y, options.loss).sum())
        for t, task in enumerate(tasks)
    )
    related = float(np.einsum("dt,ts,ds->", weights, omega, weights))
    decay = options.shrink * float((weights**2).sum())
    return fit + options.relation * (related + options.floor * float(np.trace(omega))) + decay


def dual_objective(
    alphas: Sequence[Array], omega: Array, tasks: Sequence[LinearTask], options: MultiTaskOptions
) -> float:
    """The dual's value, never above F; the gap bounds how far W is from the best for this Ω."""
    sums = np.stack([task.x.T @ alpha for task, alpha in zip(tasks, alphas, strict=True)], axis=1)
    fit = sum(
        conjugate(alpha, task.y, options.loss) for task, alpha in zip(tasks, alphas, strict=True)
    )
    quadratic = 0.5 * float(np.einsum("dt,ts,ds->", sums, coupling(omega, options), sums))
    return options.relation * options.floor * float(np.trace(omega)) - fit - quadratic


def conjugate(alpha: Array, y: Array, loss: LossName) -> float:
    """Σ ℓ*(−α): for the hinge loss α·y must lie in [0, 1]."""
    if loss == "hinge":
        return -float((alpha * y).sum())
    return float((0.5 * alpha**2 - alpha * y).sum())


def unrelated(tasks: int) -> Array:
    """Ω before anything is known: tasks have nothing to do with each other."""
    return np.eye(tasks) * tasks


def relationship(weights: Array, floor: float) -> Array:
    """The best Ω for given W: tr(S)·S⁻¹ with S = (WᵀW + µI)^½."""
    values, vectors = np.linalg.eigh(weights.T @ weights + floor * np.eye(weights.shape[1]))
    roots = np.sqrt(np.maximum(values, floor))
    omega = (vectors * (roots.sum() / roots)) @ vectors.T
    return 0.5 * (omega + omega.T)


def coupling(omega: Array, options: MultiTaskOptions) -> Array:
    """K: W = V·K. Entry (t, s) is how much of task s's samples task t's model is made of."""
    matrix = 2.0 * (options.relation * omega + options.shrink * np.eye(len(omega)))
    inverse = np.linalg.inv(matrix)
    return 0.5 * (inverse + inverse.T)


def safe_scale(matrix: Array) -> float:
    """σ': with it, steps that nodes take without asking each other never add up to too much."""
    return float((np.abs(matrix).sum(axis=1) / np.diag(matrix)).max())
