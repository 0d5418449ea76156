"""Update rules: what torch's optimizers do, on the stacked parameters of many peers at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import PlainSgd, SgdLearner

Tensors = Sequence[Tensor]
States = Sequence[Tensors]


@dataclass(frozen=True)
class UpdateRule(ABC):
    """An optimizer's update rule with its settings. Learners with equal rules can share a stack."""

    rate: float

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state that the optimizer keeps per coordinate, as torch calls them."""
        return ()

    @abstractmethod
    def step(self, values: Tensors, gradients: Tensors, state: States, count: int) -> None:
        """Move `values` in place; `state` has one list per name; `count` is the step's number, from 1."""


class Plain(UpdateRule):
    """`w −= rate · gradient`."""

    def step(self, values: Tensors, gradients: Tensors, state: States, count: int) -> None:
        for value, gradient in zip(values, gradients, strict=True):
            value.add_(gradient, alpha=-self.rate)


@dataclass(frozen=True)
class Momentum(UpdateRule):
    """torch.optim.SGD with momentum, Nesterov's or not, and weight decay."""

    momentum: float
    decay: float
    nesterov: bool

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def step(self, values: Tensors, gradients: Tensors, state: States, count: int) -> None:
        for index, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            if self.decay:
                gradient = gradient.add(value, alpha=self.decay)
            if self.momentum:
                # From a buffer of zeros the first step gives the gradient itself, as torch does.
                velocity = state[0][index].mul_(self.momentum).add_(gradient)
                gradient = (
                    gradient.add(velocity, alpha=self.momentum) if self.nesterov else velocity
                )
            value.add_(gradient, alpha=-self.rate)


@dataclass(frozen=True)
class Adam(UpdateRule):
    """torch.optim.Adam, and AdamW where decay is decoupled."""

    betas: tuple[float, float]
    epsilon: float
    decay: float
    decoupled: bool

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def step(self, values: Tensors, gradients: Tensors, state: States, count: int) -> None:
        beta1, beta2 = self.betas
        step_size = self.rate / (1 - beta1**count)
        bias_correction2_sqrt = (1 - beta2**count) ** 0.5
        for index, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            mean, square = state[0][index], state[1][index]
            if self.decay and self.decoupled:
                value.mul_(1 - self.rate * self.decay)
            elif self.decay:
                gradient = gradient.add(value, alpha=self.decay)
            mean.lerp_(gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            root = square.sqrt().div_(bias_correction2_sqrt).add_(self.epsilon)
            value.addcdiv_(mean, root, value=-step_size)


def read_rule(learner: SgdLearner) -> UpdateRule | None:
    """Return the stacked form of a learner's optimizer with its present settings; None if there is none."""
    optimizer = learner.optimizer
    if type(optimizer) is PlainSgd:
        return Plain(optimizer.rate)
    if not isinstance(optimizer, torch.optim.Optimizer) or len(optimizer.param_groups) != 1:
        return None
    settings: dict[str, Any] = optimizer.param_groups[0]
    own = list(learner.network.module.parameters())
    listed: list[Tensor] = settings["params"]
    if len(own) != len(listed) or any(a is not b for a, b in zip(own, listed, strict=True)):
        return None
    if any(settings.get(key) for key in ("maximize", "capturable", "differentiable", "amsgrad")):
        return None
    if any(isinstance(settings.get(key), Tensor) for key in ("lr", "betas")):
        return None
    rate, decay = settings["lr"], settings.get("weight_decay", 0)
    if type(optimizer) is torch.optim.SGD and not settings["dampening"]:
        if not settings["momentum"] and not decay:
            return Plain(rate)
        return Momentum(rate, settings["momentum"], decay, bool(settings["nesterov"]))
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = settings.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
        return Adam(rate, tuple(settings["betas"]), settings["eps"], decay, bool(decoupled))
    return None


def rate_of(learner: SgdLearner) -> float:
    """Return the learning rate that a learner's optimizer has now."""
    optimizer = learner.optimizer
    if isinstance(optimizer, PlainSgd):
        return optimizer.rate
    return float(optimizer.param_groups[0]["lr"])


def steps_taken(learner: SgdLearner) -> int | None:
    """Return how many steps the optimizer has counted; None if its parameters disagree."""
    counts = {int(state["step"]) for state in _states(learner).values() if "step" in state} or {0}
    return counts.pop() if len(counts) == 1 else None


class OptimizerStates:
    """The optimizers' state of a group, stacked like its parameters.

    shared: stack and optimizers are on one device, so the optimizers' entries are views of the stack, and
        a learner's `state()` is always current. Else `publish` copies them back.
    """

    def __init__(
        self, learners: Sequence[SgdLearner], rule: UpdateRule, like: Tensor, shared: bool
    ):
        self._learners, self._names, self._shared = learners, rule.state_names, shared
        self.values = [torch.zeros_like(like) for _ in rule.state_names]
        keeps_steps = isinstance(rule, Adam)
        parameters = len(list(learners[0].network.module.parameters())) if keeps_steps else 0
        self._steps = torch.zeros(len(learners), parameters)
        self.refresh()

    def refresh(self) -> None:
        """Copy in state that is not a view of this stack: before the first round, or after a restore."""
        for state, name, mine in self._entries():
            held = state.get(name)
            if not isinstance(held, Tensor):
                mine.zero_()  # an optimizer that has not stepped yet, or was reset
            elif held.data_ptr() != mine.data_ptr():
                mine.copy_(held)
            if self._shared:
                state[name] = mine

    def count(self, rows: Sequence[int], steps: int) -> None:
        """Remember that some peers took `steps` more steps."""
        if self._steps.numel():
            self._steps[torch.tensor(rows)] += steps

    @property
    def taken(self) -> list[int]:
        """Steps that each peer has taken, where the rule counts them; 0 where it does not."""
        if not self._steps.numel():
            return [0] * len(self._learners)
        return self._steps[:, 0].int().tolist()

    def publish(self) -> None:
        """Copy back to optimizers that live on another device."""
        home = self._learners[0].network.flat.device
        for state, name, mine in () if self._shared else self._entries():
            state[name] = mine.clone() if name == "step" else mine.to(home)

    def _entries(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """Every entry of every optimizer: the parameter's state, the entry's name, and its tensor here."""
        for row, learner in enumerate(self._learners if self._names else ()):
            states, offset = _states(learner), 0
            for index, parameter in enumerate(learner.network.module.parameters()):
                state, end = states[parameter], offset + parameter.numel()
                for name, values in zip(self._names, self.values, strict=True):
                    yield state, name, values[row, offset:end].view(parameter.shape)
                if self._steps.shape[1]:
                    yield state, "step", self._steps[row, index]
                offset = end


def _states(learner: SgdLearner) -> Any:
    """Return a torch optimizer's state by parameter, a defaultdict: reading a new parameter inserts it."""
    return getattr(learner.optimizer, "state", {})
