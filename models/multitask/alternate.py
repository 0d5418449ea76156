"""MOCHA with a server: improve W over the nodes, then Ω in the middle, and again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import ModelError
from ..seeds import stream
from .local import improve
from .problem import (
    Array,
    LinearTask,
    MultiTaskOptions,
    check_tasks,
    coupling,
    objective,
    relationship,
    safe_scale,
    unrelated,
)

Effort = Callable[[int, int], float]
"""(round, task) → epochs over its own samples that a node manages; 0 for one that drops out."""


@dataclass
class MultiTaskResult:
    """Where the alternation stands."""

    weights: Array
    """W [features, tasks]."""
    omega: Array
    objectives: list[float] = field(default_factory=list)
    """F before the first and after every step, W's and Ω's in turn: it never rises."""
    rounds: int = 0
    """Rounds of communication so far."""

    def correct(self, index: int, task: LinearTask) -> int:
        """How many samples the task's own model gets right."""
        return int((np.sign(task.x @ self.weights[:, index]) == task.y).sum())


def multitask(
    tasks: Sequence[LinearTask],
    options: MultiTaskOptions | None = None,
    *,
    alternations: int = 10,
    rounds: int = 10,
    most: int = 200,
    effort: Effort = lambda round, task: 1.0,
    learn_omega: bool = True,
    seed: int = 0,
) -> MultiTaskResult:
    """Learn all tasks' models and how they are related.

    alternations
        W steps, each followed by an Ω step.
    rounds, most
        Rounds of communication in a W step. W comes from dual variables, so that an early stop may leave
        F higher than before: then rounds go on, up to `most`, after which the step is not taken.
    effort
        How much a node manages in a round; see Effort. Stragglers slow the rest down by nothing.
    learn_omega
        False keeps tasks unrelated: separate models with the same total regularisation.
    """
    options = options or MultiTaskOptions()
    check_tasks(tasks, options.loss)
    if min(alternations, rounds, most) < 1:
        raise ModelError("alternations, rounds and most must each be at least 1")
    nodes = [Node(task, options, stream(seed, "mocha", t)) for t, task in enumerate(tasks)]
    features = tasks[0].x.shape[1]
    result = MultiTaskResult(np.zeros((features, len(tasks))), unrelated(len(tasks)))
    result.objectives.append(objective(result.weights, result.omega, tasks, options))
    for _ in range(alternations):
        _improve_weights(result, tasks, nodes, options, rounds, most, effort)
        if learn_omega:
            result.omega = relationship(result.weights, options.floor)
        result.objectives.append(objective(result.weights, result.omega, tasks, options))
    return result


class Node:
    """A task's node: its samples, its dual variables, and v_t = X_tᵀα_t."""

    def __init__(self, task: LinearTask, options: MultiTaskOptions, rng: np.random.Generator):
        self.task, self._options, self._rng = task, options, rng
        self.alpha: Array = np.zeros(len(task.y))
        self.v: Array = np.zeros(task.x.shape[1])

    def step(self, w: Array, q: float, epochs: float) -> Array:
        """Improve the dual variables for so many epochs; returns the change of v."""
        steps = round(epochs * len(self.task.y))
        if steps < 1:
            return np.zeros_like(self.v)
        change, v = improve(self.task, self.alpha, w, q, self._options.loss, steps, self._rng)
        self.alpha = self.alpha + change
        self.v = self.v + v
        return v

    def random(self) -> str:
        """The state of the node's dice, as text: its integers are too long for msgpack."""
        return json.dumps(self._rng.bit_generator.state)

    def restore(self, alpha: Array, random: str) -> None:
        """Go on with these dual variables and dice."""
        self.alpha = alpha
        self.v = self.task.x.T @ alpha
        self._rng.bit_generator.state = json.loads(random)


def _improve_weights(
    result: MultiTaskResult,
    tasks: Sequence[LinearTask],
    nodes: Sequence[Node],
    options: MultiTaskOptions,
    rounds: int,
    most: int,
    effort: Effort,
) -> None:
    matrix = coupling(result.omega, options)
    scale = safe_scale(matrix)
    before = objective(result.weights, result.omega, tasks, options)
    sums = np.stack([node.v for node in nodes], axis=1)
    weights = sums @ matrix
    for done in range(1, max(rounds, most) + 1):
        for t, node in enumerate(nodes):
            node.step(weights[:, t], scale * matrix[t, t], effort(result.rounds, t))
        result.rounds += 1
        sums = np.stack([node.v for node in nodes], axis=1)
        weights = sums @ matrix
        if done >= rounds:
            after = objective(weights, result.omega, tasks, options)
            if after <= before:
                result.weights = weights
                result.objectives.append(after)
                return
    result.objectives.append(before)
