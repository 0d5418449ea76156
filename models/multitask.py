"""Federated multi-task learning (MOCHA): linear models whose relations are learned with them.

    result = multitask(tasks, MultiTaskOptions(relation=0.1))     # with a server
    Arena([MultiTaskLearner(task, test, t, len(tasks)) …])        # by gossip, as live peers too

There is a linear model per task, and a matrix Ω that says how tasks are related:

    F(W, Ω) = Σ_t Σ_i ℓ(w_t·x_ti, y_ti) + λ1·tr(W Ω Wᵀ) + λ2·‖W‖² + λ1·µ·tr(Ω),    tr(Ω⁻¹) = 1

W is [features, tasks]. The last term (µ, `floor`, small) keeps Ω finite where tasks' models coincide or
are 0; with it the best Ω for given W is known in closed form, and F falls whenever W or Ω is improved.
For a fixed Ω the problem is convex in W, and its dual couples the tasks only through V = [X_tᵀα_t]:
W = V·K with K = ½(λ1·Ω + λ2·I)⁻¹. So a task's node needs V and Ω, and nobody's samples.

Given w_t, a node looks for Δα that minimises

    G(Δα) = Σ ℓ*(−α − Δα) + w_t·v + q/2·‖v‖²,    v = X_tᵀΔα,    q = σ'·K_tt

by coordinate steps over its own samples. MOCHA's θ is what is left of the possible gain: 0 for an exact
solution, 1 for a node that did nothing this round. Any θ < 1 on average is enough for the whole to converge,
so a straggler hands in what it has.

Without a server, V is the one partial model that nodes share, a matrix to which node t adds the changes of
v_t in its own row; K, W and Ω are functions of V that each node works out by itself. Push-sum's mean times m
is V itself: everybody's contributions are in other rows. A node whose neighbours are late computes with
older rows of theirs; its own row it always knows.
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
from .learner import Metrics
from .network import SlicedNetwork
from .slicing import stream

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
        check_number("relation (λ1)", self.relation, least=0)
        check_number("shrink (λ2)", self.shrink, above=0)
        check_number("floor (µ)", self.floor, above=0)
        check_choice("loss", self.loss, get_args(LossName))


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


def improve(
    task: LinearTask,
    alpha: Array,
    w: Array,
    q: float,
    loss: LossName,
    steps: int,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """`steps` coordinate steps in random order: (Δα, v)."""
    x, y, change, local = task.x, task.y, np.zeros(len(task.y)), w.astype(np.float64, copy=True)
    curvature = q * (x**2).sum(axis=1)
    done = 0
    while done < steps:
        for i in rng.permutation(len(y))[: steps - done]:
            score, now = float(x[i] @ local), alpha[i] + change[i]
            if loss == "hinge":
                if curvature[i] == 0.0:
                    best = y[i]  # an empty sample always loses; its multiplier is at its bound
                else:
                    free = y[i] * now + (1.0 - y[i] * score) / curvature[i]
                    best = y[i] * min(max(free, 0.0), 1.0)
            else:
                best = now + (y[i] - score - now) / (1.0 + curvature[i])
            if best != now:
                change[i] += best - now
                local += q * (best - now) * x[i]
        done += min(len(y), steps - done)
    return change, x.T @ change


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
        matrix = coupling(result.omega, options)
        scale = safe_scale(matrix)
        before = objective(result.weights, result.omega, tasks, options)
        weights = np.stack([node.v for node in nodes], axis=1) @ matrix
        for done in range(1, max(rounds, most) + 1):
            for t, node in enumerate(nodes):
                node.step(weights[:, t], scale * matrix[t, t], effort(result.rounds, t))
            result.rounds += 1
            weights = np.stack([node.v for node in nodes], axis=1) @ matrix
            if done < rounds:
                continue
            after = objective(weights, result.omega, tasks, options)
            if after <= before:
                result.weights, before = weights, after
                break
        result.objectives.append(before)
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

    def step(self, w: Array, q: float, epochs: float) -> None:
        """Improve the dual variables for so many epochs."""
        steps = round(epochs * len(self.task.y))
        if steps >= 1:
            change, v = improve(self.task, self.alpha, w, q, self._options.loss, steps, self._rng)
            self.alpha = self.alpha + change
            self.v = self.v + v

    def random(self) -> str:
        """The state of the node's dice, as text: its integers are too long for msgpack."""
        return json.dumps(self._rng.bit_generator.state)

    def restore(self, alpha: Array, random: str) -> None:
        """Go on with these dual variables and dice."""
        self.alpha = alpha
        self.v = self.task.x.T @ alpha
        self._rng.bit_generator.state = json.loads(random)


MODEL = "tasks"


class TaskSums(nn.Module):
    """V / m as gossip knows it, and the model of one's own task that follows from it."""

    def __init__(self, tasks: int, features: int):
        super().__init__()
        self.sums = nn.Parameter(
            torch.zeros(tasks, features, dtype=torch.float64), requires_grad=False
        )
        self.own = torch.zeros(features, dtype=torch.float64)

    def anatomy(self) -> Anatomy:
        """One cell per task: rows are tasks on every node alike."""
        parts = (Part("task", len(self.sums)),)
        axes = (*dense_axes(parts, 0), None)
        return Anatomy(parts, (ParameterMap("sums", tuple(self.sums.shape), axes),))

    def forward(self, x: Tensor) -> Tensor:
        """The score of each input by the own task's model."""
        return x @ self.own


class MultiTaskLearner:
    """One task's node in a swarm.

    task, index, tasks
        Its samples, its number, and how many tasks there are: one node for each.
    test
        Its held-out samples.
    epochs
        How far it solves its subproblem in one step; a slow node gives less, down to 0.
    every
        Steps between two looks at Ω. The first models should be there before tasks are related.
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
        self._node = Node(task, self.options, stream(seed, "mocha", index))
        self.omega: Array = unrelated(tasks)
        self.weight_of: Callable[[str], float] = lambda model: 1.0
        """The weight that this node holds while it trains; whoever runs it sets it where it is not 1."""
        self._told: Array = self._node.v.copy()
        self._rounds = 0

    def weights(self) -> Array:
        """W as this node sees it, [features, tasks]."""
        return self._sums() @ coupling(self.omega, self.options)

    def train(self, steps: int = 1) -> Metrics:
        """Look at Ω if it is time, then improve the own model; the metrics are the task's own loss."""
        if self._rounds and self._rounds % self._every == 0:
            self.omega = relationship(self.weights(), self.options.floor)
        matrix = coupling(self.omega, self.options)
        scale = safe_scale(matrix) * matrix[self._index, self._index]
        w = self._sums() @ matrix[:, self._index]
        self._node.step(w, scale, self._epochs * steps)
        self._tell(self.weight_of(MODEL))
        self._rounds += 1
        return self._metrics(self._node.task, w)

    def test(self) -> Metrics:
        """The own model on the held-out samples."""
        w = self.weights()[:, self._index]
        self._module.own = torch.from_numpy(w)
        return self._metrics(self._test, w)

    def state(self) -> dict[str, Any]:
        """Dual variables, Ω, and the random state."""
        return {
            "alpha": torch.from_numpy(self._node.alpha.copy()),
            "told": torch.from_numpy(self._told.copy()),
            "omega": torch.from_numpy(self.omega.copy()),
            "rounds": self._rounds,
            "random": self._node.random(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken."""
        self._node.restore(torch.as_tensor(state["alpha"]).numpy().copy(), state["random"])
        self._told = torch.as_tensor(state["told"]).numpy().copy()
        self.omega = torch.as_tensor(state["omega"]).numpy().copy()
        self._rounds = int(state["rounds"])

    def _metrics(self, task: LinearTask, w: Array) -> Metrics:
        scores = task.x @ w
        loss = float(losses(scores, task.y, self.options.loss).sum())
        return Metrics(loss, int((np.sign(scores) == task.y).sum()), len(scores))

    @torch.no_grad()
    def _tell(self, weight: float) -> None:
        """Put what is new of v_t into the own row; it waits while there is no mass to put it into."""
        if weight > 0:
            news = (self._node.v - self._told) / weight
            self._module.sums[self._index] += torch.from_numpy(news).to(self._module.sums)
            self._told = self._node.v.copy()

    def _sums(self) -> Array:
        """V [features, tasks]: what gossip says, except for the own row, which is known."""
        found = self._module.sums.detach().double().cpu().numpy().T * len(self.omega)
        found[:, self._index] = self._node.v
        return found
