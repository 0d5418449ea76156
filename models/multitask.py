"""Federated multi-task learning (MOCHA): a linear model for every task, and how the tasks are related.

    result = multitask(tasks, MultiTaskOptions(relation=0.1))     # with a server
    Arena([MultiTaskLearner(task, test, t, len(tasks)) …])        # by gossip; live peers can use it as well

Every task has a linear model w_t, and a matrix Ω describes how tasks are related. Both are learned by
minimising

    F(W, Ω) = Σ_t Σ_i ℓ(w_t·x_ti, y_ti) + λ1·tr(W Ω Wᵀ) + λ2·‖W‖² + λ1·µ·tr(Ω),    tr(Ω⁻¹) = 1

W = [w_1 … w_m] is [features, tasks]. The last term (µ is `floor`, a small number) keeps Ω finite if the
models of some tasks are equal or 0. With it, the best Ω for given W has a closed form, and F never rises
when W or Ω is improved. For fixed Ω the problem is convex in W. In its dual problem, with dual variables α_t
of task t's samples, the tasks are coupled only through V = [X_tᵀα_t]: W = V·K with K = ½(λ1·Ω + λ2·I)⁻¹. So
the node of a task needs V and Ω, but no samples of other tasks.

Given w_t, a node looks for the change Δα of its dual variables that minimises

    G(Δα) = Σ ℓ*(−α − Δα) + w_t·v + q/2·‖v‖²,    v = X_tᵀΔα,    q = σ'·K_tt

by coordinate descent over its own samples. MOCHA's θ is the fraction of the possible improvement that is not
reached: 0 for an exact solution, 1 for a node that did nothing this round. The method converges if θ < 1 on
average, so stragglers may stop early.

Without a server, V/m is the one partial model that all m nodes average, with one row per task. Node t adds
the changes of v_t to row t. No other node changes that row, so m times the mean is v_t. Each node computes
K, W and Ω from V. Rows of other tasks may be out of date; a node always knows its own row exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from .anatomy import Anatomy, ParameterMap, Part, dense_axes
from .errors import ModelError, check_choice, check_number
from .metrics import Metrics
from .network import SlicedNetwork
from .slicing import seeded_rng

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
    """The parameters of the objective F; see the top of this file.

    relation
        λ1: how much tasks learn from each other. Raise it when tasks have few samples.
    shrink
        λ2: weight decay.
    floor
        µ: the lower bound of the eigenvalues that Ω is computed from. Raise it when Ω fits noise in W.
    loss
        `hinge` (linear support vector machines) or `squared` (half the squared error, for regression).
    """

    relation: float = 0.1
    shrink: float = 0.01
    floor: float = 1e-3
    loss: LossName = "hinge"

    def __post_init__(self) -> None:
        check_number("relation (λ1)", self.relation, least=0)
        check_number("shrink (λ2)", self.shrink, above=0)
        check_number("floor (µ)", self.floor, above=0)
        check_choice("loss", self.loss, get_args(LossName))


def check_tasks(tasks: Sequence[LinearTask], loss: LossName) -> None:
    """Raise, naming the task, if tasks cannot be learned together."""
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
    """Return the loss of every sample."""
    if loss == "hinge":
        return np.maximum(0.0, 1.0 - y * scores)
    return 0.5 * (scores - y) ** 2


def objective(
    weights: Array, omega: Array, tasks: Sequence[LinearTask], options: MultiTaskOptions
) -> float:
    """Return F(W, Ω)."""
    loss = sum(
        float(losses(task.x @ weights[:, t], task.y, options.loss).sum())
        for t, task in enumerate(tasks)
    )
    relation_penalty = float(np.einsum("dt,ts,ds->", weights, omega, weights))  # tr(W Ω Wᵀ)
    relation_penalty += options.floor * float(np.trace(omega))
    weight_decay = options.shrink * float((weights**2).sum())
    return loss + options.relation * relation_penalty + weight_decay


def initial_omega(tasks: int) -> Array:
    """Return Ω for unrelated tasks, with which learning starts."""
    return np.eye(tasks) * tasks


def best_omega(weights: Array, floor: float) -> Array:
    """Return the best Ω for given W: tr(S)·S⁻¹ with S = (WᵀW + µI)^½."""
    values, vectors = np.linalg.eigh(weights.T @ weights + floor * np.eye(weights.shape[1]))
    roots = np.sqrt(np.maximum(values, floor))
    omega = (vectors * (roots.sum() / roots)) @ vectors.T
    return 0.5 * (omega + omega.T)


def coupling(omega: Array, options: MultiTaskOptions) -> Array:
    """Return K, with W = V·K. Entry (t, s) is the weight of task s's samples in the model of task t."""
    matrix = 2.0 * (options.relation * omega + options.shrink * np.eye(len(omega)))
    inverse = np.linalg.inv(matrix)
    return 0.5 * (inverse + inverse.T)


def safe_scale(matrix: Array) -> float:
    """Return σ', the factor by which steps are shortened so that simultaneous steps of all nodes are safe."""
    return float((np.abs(matrix).sum(axis=1) / np.diag(matrix)).max())


def descend(
    task: LinearTask,
    alpha: Array,
    w: Array,
    q: float,
    loss: LossName,
    steps: int,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """Take `steps` steps of coordinate descent on G, the samples in random order; return (Δα, v).

    alpha, w: the node's dual variables and model before. q: as in G.
    """
    x, y, change = task.x, task.y, np.zeros(len(task.y))
    local_w = w.astype(np.float64, copy=True)
    curvature = q * (x**2).sum(axis=1)
    done = 0
    while done < steps:
        for i in rng.permutation(len(y))[: steps - done]:
            score, current = float(x[i] @ local_w), alpha[i] + change[i]
            if loss == "hinge":
                if curvature[i] == 0.0:
                    best = y[i]  # the loss of an all-zero sample is constant: its α is at its bound
                else:
                    unbounded = y[i] * current + (1.0 - y[i] * score) / curvature[i]
                    best = y[i] * min(max(unbounded, 0.0), 1.0)
            else:
                best = current + (y[i] - score - current) / (1.0 + curvature[i])
            if best != current:
                change[i] += best - current
                local_w += q * (best - current) * x[i]
        done += min(len(y), steps - done)
    return change, x.T @ change


Effort = Callable[[int, int], float]
"""A function of (round, task) that returns how many epochs over its own samples a node computes; 0 for a
node that drops out."""


@dataclass
class MultiTaskResult:
    """The result of learning W and Ω by turns."""

    weights: Array
    """W [features, tasks]."""
    omega: Array
    objectives: list[float] = field(default_factory=list)
    """F at the start and after every step, a W step and an Ω step by turns: it never rises."""
    rounds: int = 0
    """Rounds of communication so far."""

    def correct(self, index: int, task: LinearTask) -> int:
        """Return how many of the task's samples its model classifies correctly."""
        return int((np.sign(task.x @ self.weights[:, index]) == task.y).sum())


def multitask(
    tasks: Sequence[LinearTask],
    options: MultiTaskOptions | None = None,
    *,
    alternations: int = 10,
    rounds: int = 10,
    max_rounds: int = 200,
    effort: Effort = lambda round, task: 1.0,
    learn_omega: bool = True,
    seed: int = 0,
) -> MultiTaskResult:
    """Learn the models of all tasks and how the tasks are related.

    alternations
        The number of W steps, each followed by an Ω step.
    rounds, max_rounds
        Rounds of communication in a W step. W is computed from dual variables, so F may be higher than
        before if a W step stops early. Then it is given more rounds, up to `max_rounds`, after which W stays
        as it was.
    effort
        How much a node computes in a round: see Effort. Other nodes do not wait for stragglers.
    learn_omega
        False keeps tasks unrelated: separate models with the same total regularisation.
    """
    options = options or MultiTaskOptions()
    check_tasks(tasks, options.loss)
    if min(alternations, rounds, max_rounds) < 1:
        raise ModelError("alternations, rounds and max_rounds must each be at least 1")
    nodes = [Node(task, options, seeded_rng(seed, "mocha", t)) for t, task in enumerate(tasks)]
    features = tasks[0].x.shape[1]
    result = MultiTaskResult(np.zeros((features, len(tasks))), initial_omega(len(tasks)))
    result.objectives.append(objective(result.weights, result.omega, tasks, options))
    for _ in range(alternations):
        matrix = coupling(result.omega, options)
        scale = safe_scale(matrix)
        best = objective(result.weights, result.omega, tasks, options)
        weights = np.stack([node.v for node in nodes], axis=1) @ matrix
        for round_number in range(1, max(rounds, max_rounds) + 1):
            for t, node in enumerate(nodes):
                node.step(weights[:, t], scale * matrix[t, t], effort(result.rounds, t))
            result.rounds += 1
            weights = np.stack([node.v for node in nodes], axis=1) @ matrix
            if round_number < rounds:
                continue
            reached = objective(weights, result.omega, tasks, options)
            if reached <= best:
                result.weights, best = weights, reached
                break
        result.objectives.append(best)
        if learn_omega:
            result.omega = best_omega(result.weights, options.floor)
        result.objectives.append(objective(result.weights, result.omega, tasks, options))
    return result


class Node:
    """The node of a task: its samples, its dual variables α_t, and v_t = X_tᵀα_t."""

    def __init__(self, task: LinearTask, options: MultiTaskOptions, rng: np.random.Generator):
        self.task, self._options, self._rng = task, options, rng
        self.alpha: Array = np.zeros(len(task.y))
        self.v: Array = np.zeros(task.x.shape[1])

    def step(self, w: Array, q: float, epochs: float) -> None:
        """Improve the dual variables by `epochs` epochs of coordinate descent."""
        steps = round(epochs * len(self.task.y))
        if steps >= 1:
            change, v = descend(self.task, self.alpha, w, q, self._options.loss, steps, self._rng)
            self.alpha = self.alpha + change
            self.v = self.v + v

    def random_state(self) -> str:
        """Return the random generator's state as text: its integers are too long for msgpack."""
        return json.dumps(self._rng.bit_generator.state)

    def restore(self, alpha: Array, random_state: str) -> None:
        """Continue from these dual variables and this state of the random generator."""
        self.alpha = alpha
        self.v = self.task.x.T @ alpha
        self._rng.bit_generator.state = json.loads(random_state)


MODEL = "tasks"
"""The name of the partial model V / m."""


class TaskSums(nn.Module):
    """The average V / m with one row per task, and the model of the node's own task computed from it."""

    def __init__(self, tasks: int, features: int):
        super().__init__()
        self.sums = nn.Parameter(
            torch.zeros(tasks, features, dtype=torch.float64), requires_grad=False
        )
        self.own_model = torch.zeros(features, dtype=torch.float64)

    def anatomy(self) -> Anatomy:
        """Return one part with one cell per task: row t belongs to task t on every node."""
        parts = (Part("task", len(self.sums)),)
        axes = (*dense_axes(parts, 0), None)
        return Anatomy(parts, (ParameterMap("sums", tuple(self.sums.shape), axes),))

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of inputs by the model of the node's own task."""
        return x @ self.own_model


class MultiTaskLearner:
    """The learner of one task in a swarm with one peer per task.

    task, index, tasks
        The task's samples, its number, and the number of tasks.
    test
        The task's held-out samples.
    epochs
        Epochs of coordinate descent in one learner step. Lower it for a slow node, down to 0.
    every
        Calls of `train` between two updates of Ω; the first call makes none, because Ω is computed from
        trained models.
    """

    def __init__(
        self,
        task: LinearTask,
        test: LinearTask,
        index: int,
        tasks: int,
        options: MultiTaskOptions | None = None,
        *,
        epochs: float = 1.0,
        every: int = 10,
        seed: int = 0,
    ):
        self.options = options or MultiTaskOptions()
        check_tasks([task, test], self.options.loss)
        if not 0 <= index < tasks:
            raise ModelError(f"task {index} of {tasks}: tasks are numbered from 0 to {tasks - 1}")
        if epochs < 0 or every < 1:
            raise ModelError(f"epochs ({epochs}) must be at least 0 and every ({every}) at least 1")
        self._index, self._epochs, self._every = index, epochs, every
        self._test = test
        self._module = TaskSums(tasks, task.x.shape[1])
        self.network = SlicedNetwork(
            self._module, {MODEL: [list(range(tasks))]}, peer=f"task-{index}", rest=None
        )
        self._node = Node(task, self.options, seeded_rng(seed, "mocha", index))
        self.omega: Array = initial_omega(tasks)
        self.weight_of: Callable[[str], float] = lambda model: 1.0
        """Returns the node's push-sum weight; a peer or simulator whose weights are not 1 replaces it."""
        self._averaged_v: Array = self._node.v.copy()  # the v_t that was last added to the average
        self._rounds = 0

    def weights(self) -> Array:
        """Return this node's estimate of W, [features, tasks]."""
        return self._estimated_v() @ coupling(self.omega, self.options)

    def train(self, steps: int = 1) -> Metrics:
        """Update Ω if it is due, then improve the model; return metrics of the task's samples before that."""
        if self._rounds and self._rounds % self._every == 0:
            self.omega = best_omega(self.weights(), self.options.floor)
        matrix = coupling(self.omega, self.options)
        scale = safe_scale(matrix) * matrix[self._index, self._index]
        w = self._estimated_v() @ matrix[:, self._index]
        self._node.step(w, scale, self._epochs * steps)
        self._add_to_average(self.weight_of(MODEL))
        self._rounds += 1
        return self._metrics(self._node.task, w)

    def test(self) -> Metrics:
        """Measure the task's model on the held-out samples."""
        w = self.weights()[:, self._index]
        self._module.own_model = torch.from_numpy(w)
        return self._metrics(self._test, w)

    def state(self) -> dict[str, Any]:
        """Return the dual variables, the v_t that was last averaged, Ω, and the random state."""
        return {
            "alpha": torch.from_numpy(self._node.alpha.copy()),
            "told": torch.from_numpy(
                self._averaged_v.copy()
            ),  # the key that older checkpoints have
            "omega": torch.from_numpy(self.omega.copy()),
            "rounds": self._rounds,
            "random": self._node.random_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._node.restore(torch.as_tensor(state["alpha"]).numpy().copy(), state["random"])
        self._averaged_v = torch.as_tensor(state["told"]).numpy().copy()
        self.omega = torch.as_tensor(state["omega"]).numpy().copy()
        self._rounds = int(state["rounds"])

    def _metrics(self, task: LinearTask, w: Array) -> Metrics:
        """Return the metrics of model w on the samples of `task`."""
        scores = task.x @ w
        loss = float(losses(scores, task.y, self.options.loss).sum())
        return Metrics(loss, int((np.sign(scores) == task.y).sum()), len(scores))

    @torch.no_grad()
    def _add_to_average(self, weight: float) -> None:
        """Add the changes of v_t to this task's row, or later if the push-sum weight is 0 now."""
        if weight > 0:
            change = (self._node.v - self._averaged_v) / weight
            self._module.sums[self._index] += torch.from_numpy(change).to(self._module.sums)
            self._averaged_v = self._node.v.copy()

    def _estimated_v(self) -> Array:
        """Return V [features, tasks]: gossip's estimate, with this task's own column replaced by v_t."""
        estimate = self._module.sums.detach().double().cpu().numpy().T * len(self.omega)
        estimate[:, self._index] = self._node.v
        return estimate
