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
Slots = Sequence[Tensors]


@dataclass(frozen=True)
class UpdateRule(ABC):
    """One kind of descent with its settings; equal rules may share a stack."""

    rate: float

    @property
    def slots(self) -> tuple[str, ...]:
        """The optimizer's names for the state that it keeps per coordinate."""
        return ()

    @abstractmethod
    def step(self, values: Tensors, gradients: Tensors, state: Slots, count: int) -> None:
        """Move `values` in place; `state` has one list per slot; `count` is the step's number, from 1."""


class Plain(UpdateRule):
    """`w −= rate · gradient`."""

    def step(self, values: Tensors, gradients: Tensors, state: Slots, count: int) -> None:
        for value, gradient in zip(values, gradients, strict=True):
            value.add_(gradient, alpha=-self.rate)


@dataclass(frozen=True)
class Momentum(UpdateRule):
    """torch.optim.SGD with momentum, Nesterov's or not, and weight decay."""

    momentum: float
    decay: float
    nesterov: bool

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def step(self, values: Tensors, gradients: Tensors, state: Slots, count: int) -> None:
        for place, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            if self.decay:
                gradient = gradient.add(value, alpha=self.decay)
            if self.momentum:
                # From a buffer of zeros the first step gives the gradient itself, as torch does.
                pace = state[0][place].mul_(self.momentum).add_(gradient)
                gradient = gradient.add(pace, alpha=self.momentum) if self.nesterov else pace
            value.add_(gradient, alpha=-self.rate)


@dataclass(frozen=True)
class Adam(UpdateRule):
    """torch.optim.Adam, and AdamW where decay is decoupled."""

    betas: tuple[float, float]
    epsilon: float
    decay: float
    decoupled: bool

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def step(self, values: Tensors, gradients: Tensors, state: Slots, count: int) -> None:
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


def read_rule(learner: SgdLearner) -> UpdateRule | None:
    """Return the rule of a learner's optimizer as it is set now; None if a stack cannot follow it."""
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


class SlotStack:
    """The optimizers' state of a group, stacked like its parameters.

    The optimizers' own entries become views of it, so that a learner's `state()` tells the truth.
    """

    def __init__(
        self, learners: Sequence[SgdLearner], rule: UpdateRule, like: Tensor, shared: bool
    ):
        self._learners, self._names, self._shared = learners, rule.slots, shared
        self.values = [torch.zeros_like(like) for _ in rule.slots]
        counted = isinstance(rule, Adam)
        width = len(list(learners[0].network.module.parameters())) if counted else 0
        self._steps = torch.zeros(len(learners), width)
        self.refresh()

    def refresh(self) -> None:
        """Take in what optimizers hold that is not ours: before the first round, or after a restore."""
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
        """Every entry of every optimizer: the parameter's state, the entry's name, and our place for it."""
        for row, learner in enumerate(self._learners if self._names else ()):
            states, offset = _states(learner), 0
            for place, parameter in enumerate(learner.network.module.parameters()):
                state, end = states[parameter], offset + parameter.numel()
                for name, values in zip(self._names, self.values, strict=True):
                    yield state, name, values[row, offset:end].view(parameter.shape)
                if self._steps.shape[1]:
                    yield state, "step", self._steps[row, place]
                offset = end


def _states(learner: SgdLearner) -> Any:
    """A torch optimizer's state by parameter; reading a parameter that has none yet makes it."""
    return getattr(learner.optimizer, "state", {})
