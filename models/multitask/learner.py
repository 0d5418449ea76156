"""MOCHA without a server: V is gossiped, and every node derives Ω and its own model from it.

All that couples tasks is V = [v_1 … v_m], a vector per task (see problem.py): K, W and Ω are functions of
V that each node can work out by itself, and do so alike once they agree on V. So V is the one partial
model that nodes share, a matrix to which node t adds the changes of v_t in its own row. Push-sum's mean
times m is V itself: everybody's contributions are in other rows, so none has to be told apart.

A node whose neighbours are late computes with older rows of theirs; its own row it always knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..anatomy import Anatomy, ParameterMap, Part, dense_axes
from ..errors import ModelError
from ..learner import Metrics
from ..network import SlicedNetwork
from ..seeds import stream
from .alternate import Node
from .problem import (
    Array,
    LinearTask,
    MultiTaskOptions,
    check_tasks,
    coupling,
    losses,
    relationship,
    safe_scale,
    unrelated,
)

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
        How far it solves its subproblem in a stretch; a slow node gives less, down to 0.
    every
        Stretches between two looks at Ω. The first models should be there before tasks are related.
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
        task = self._node.task
        found = losses(task.x @ w, task.y, self.options.loss)
        return Metrics(float(found.sum()), int((np.sign(task.x @ w) == task.y).sum()), len(found))

    def test(self) -> Metrics:
        """The own model on the held-out samples."""
        w = self.weights()[:, self._index]
        self._module.own = torch.from_numpy(w)
        scores = self._test.x @ w
        found = losses(scores, self._test.y, self.options.loss)
        return Metrics(float(found.sum()), int((np.sign(scores) == self._test.y).sum()), len(found))

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
