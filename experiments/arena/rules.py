"""How stacked parameters descend: what torch's optimizers do, on many peers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...models import PlainSgd, SgdLearner

Tensors = Sequence[Tensor]


class Rule(Protocol):
    """One kind of descent with its settings; equal rules may share a stack."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The optimizer's names for the state that it keeps per coordinate."""
        ...

    def step(
        self, values: Tensors, gradients: Tensors, state: Sequence[Tensors], count: int
    ) -> None:
        """Move `values` in place; `state` has one list per slot; `count` is the step's number, from 1."""
        ...


@dataclass(frozen=True)
class Plain:
    """`w −= rate · gradient`."""

    rate: float

    @property
    def slots(self) -> tuple[str, ...]:
        return ()

    def step(
        self, values: Tensors, gradients: Tensors, state: Sequence[Tensors], count: int
    ) -> None:
        for value, gradient in zip(values, gradients, strict=True):
            value.add_(gradient, alpha=-self.rate)


@dataclass(frozen=True)
class Momentum:
    """torch.optim.SGD with momentum, Nesterov's or not, and weight decay."""

    rate: float
    momentum: float
    decay: float
    nesterov: bool

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def step(
        self, values: Tensors, gradients: Tensors, state: Sequence[Tensors], count: int
    ) -> None:
        for place, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            if self.decay:
                gradient = gradient.add(value, alpha=self.decay)
            if self.momentum:
                # From a buffer of zeros the first step gives the gradient itself, as torch does.
                pace = state[0][place].mul_(self.momentum).add_(gradient)
                gradient = gradient.add(pace, alpha=self.momentum) if self.nesterov else pace
            value.add_(gradient, alpha=-self.rate)


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam, and AdamW where decay is decoupled."""

    rate: float
    betas: tuple[float, float]
    epsilon: float
    decay: float
    decoupled: bool

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def step(
        self, values: Tensors, gradients: Tensors, state: Sequence[Tensors], count: int
    ) -> None:
        first, second = self.betas
        length = self.rate / (1 - first**count)
        spread = (1 - second**count) ** 0.5
        for place, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            mean, square = state[0][place], state[1][place]
            if self.decay and self.decoupled:
                value.mul_(1 - self.rate * self.decay)
            elif self.decay:
                gradient = gradient.add(value, alpha=self.decay)
            mean.lerp_(gradient, 1 - first)
            square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            value.addcdiv_(mean, square.sqrt().div_(spread).add_(self.epsilon), value=-length)


def read_rule(learner: SgdLearner) -> Rule | None:
    """The rule of a learner's optimizer with its present settings; None if a stack cannot follow it."""
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
    if any(isinstance(settings[key], Tensor) for key in ("lr", "betas") if key in settings):
        return None
    rate, decay = settings["lr"], settings.get("weight_decay", 0)
    if type(optimizer) is torch.optim.SGD:
        if settings["dampening"]:
            return None
        if not settings["momentum"] and not decay:
            return Plain(rate)
        return Momentum(rate, settings["momentum"], decay, bool(settings["nesterov"]))
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = settings.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
        return Adam(rate, tuple(settings["betas"]), settings["eps"], decay, bool(decoupled))
    return None


def rate_of(learner: SgdLearner) -> float:
    """The learning rate that a learner's optimizer has now."""
    optimizer = learner.optimizer
    if isinstance(optimizer, PlainSgd):
        return optimizer.rate
    return float(optimizer.param_groups[0]["lr"])


def steps_taken(learner: SgdLearner) -> int | None:
    """How many steps the optimizer has counted; None if its parameters disagree."""
    counts = {int(state["step"]) for state in _states(learner).values() if "step" in state} or {0}
    return counts.pop() if len(counts) == 1 else None


class SlotStack:
    """The optimizers' state of a group, stacked like its parameters.

    The optimizers' own entries become views of it, so that a learner's `state()` tells the truth.
    """

    def __init__(self, learners: Sequence[SgdLearner], rule: Rule, like: Tensor, shared: bool):
        self._learners, self._names, self._shared = learners, rule.slots, shared
        self.values = [torch.zeros_like(like) for _ in rule.slots]
        counted = isinstance(rule, Adam)
        width = len(list(learners[0].network.module.parameters())) if counted else 0
        self._steps = torch.zeros(len(learners), width)
        self.refresh()

    def refresh(self) -> None:
        """Take in what optimizers hold that is not ours: before the first round, or after a restore."""
        for row, learner in enumerate(self._learners):
            if not self._names:
                return
            states, offset = _states(learner), 0
            for place, parameter in enumerate(learner.network.module.parameters()):
                size, state = parameter.numel(), states[parameter]
                for name, values in zip(self._names, self.values, strict=True):
                    mine = values[row, offset : offset + size].view(parameter.shape)
                    self._take(state, name, mine)
                if self._steps.shape[1]:
                    self._take(state, "step", self._steps[row, place])
                offset += size

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
        if self._shared or not self._names:
            return
        for row, learner in enumerate(self._learners):
            states, offset = _states(learner), 0
            for place, parameter in enumerate(learner.network.module.parameters()):
                size = parameter.numel()
                for name, values in zip(self._names, self.values, strict=True):
                    own = values[row, offset : offset + size].view(parameter.shape)
                    states[parameter][name] = own.to(parameter.device)
                if self._steps.shape[1]:
                    states[parameter]["step"] = self._steps[row, place].clone()
                offset += size

    def _take(self, state: dict[str, Any], name: str, mine: Tensor) -> None:
        held = state.get(name)
        if not isinstance(held, Tensor):
            mine.zero_()  # an optimizer that has not stepped yet, or was reset
        elif held.data_ptr() != mine.data_ptr():
            mine.copy_(held)
        if self._shared:
            state[name] = mine


def _states(learner: SgdLearner) -> Any:
    """A torch optimizer's state by parameter; reading a parameter that has none yet makes it."""
    return getattr(learner.optimizer, "state", {})
