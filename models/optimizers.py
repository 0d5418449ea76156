"""Optimizers: SGD with or without momentum, and Adam, which compute the same steps as torch's.

The first torch optimizer of a process loads torch's compiler, which takes seconds and 100 MB: much for a
small device. The optimizers here load nothing. Those of torch, and its schedulers of the learning rate, are
found by name (`find_optimizer`, `find_scheduler`). An update rule computes the steps; `models/stack` uses the
rules for many learners at once. The state has torch's names and shapes, so a saved state of torch's can be
loaded.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import hint

from .errors import ModelError, check_number

Tensors = Sequence[Tensor]
"""One tensor per parameter."""
States = Sequence[Tensors]
"""For every name in `UpdateRule.state_names`, one tensor per parameter."""


@dataclass(frozen=True)
class UpdateRule(ABC):
    """The update rule and settings of an optimizer. Learners with equal rules can share a stack."""

    rate: float

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names, as in torch, of the state that the optimizer stores per coordinate."""
        return ()

    @property
    def counts_steps(self) -> bool:
        """Whether the number of steps taken so far is a part of the optimizer's state."""
        return False

    @abstractmethod
    def step(self, values: Tensors, gradients: Tensors, state: States, count: int) -> None:
        """Update `values` and `state` in place; `count` is the number of this step, from 1; 0 unless
        the rule counts steps."""


class PlainRule(UpdateRule):
    """Plain SGD: `w −= rate · gradient`."""

    def step(self, values: Tensors, gradients: Tensors, state: States, count: int) -> None:
        for value, gradient in zip(values, gradients, strict=True):
            value.add_(gradient, alpha=-self.rate)


@dataclass(frozen=True)
class MomentumRule(UpdateRule):
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
                # The buffer starts at zero, so the first velocity is the gradient itself, as in torch.
                velocity = state[0][index].mul_(self.momentum).add_(gradient)
                gradient = (
                    gradient.add(velocity, alpha=self.momentum) if self.nesterov else velocity
                )
            value.add_(gradient, alpha=-self.rate)


@dataclass(frozen=True)
class AdamRule(UpdateRule):
    """torch.optim.Adam; AdamW if `decoupled`."""

    betas: tuple[float, float]
    epsilon: float
    decay: float
    decoupled: bool

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @property
    def counts_steps(self) -> bool:
        return True

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


class RuleOptimizer:
    """Takes the steps of an update rule, with the methods of a torch optimizer.

    Attributes:
        rule: The update rule.
        state: By parameter, what the rule stores for it, under torch's names.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], rule: UpdateRule):
        self.parameters, self.rule = list(parameters), rule
        self.state: defaultdict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)

    @property
    def rate(self) -> float:
        """The learning rate; it may be set between two steps."""
        return self.rule.rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self.rule = replace(self.rule, rate=rate)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Take one step with the parameters' gradients; a parameter without gradient does not change."""
        # Parameters by the number of the step: one group, unless some had no gradient in an earlier step.
        groups: dict[int, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                groups.setdefault(self._count_step(parameter), []).append(parameter)
        for count, group in groups.items():
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]
            state = [
                [self._state(parameter, name) for parameter in group]
                for name in self.rule.state_names
            ]
            self.rule.step(group, gradients, state, count)

    def _count_step(self, parameter: nn.Parameter) -> int:
        """Add 1 to a parameter's number of steps and return it; 0 if the rule does not count steps."""
        if not self.rule.counts_steps:
            return 0
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros(())
        state["step"] += 1
        return int(state["step"])

    def _state(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return an entry of a parameter's state; it is zero at first."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        return state[name]

    def state_dict(self) -> dict[str, Any]:
        """Return the state by the parameter's index, as torch's optimizers do, but without settings.

        The dict is empty for an optimizer that has no state.
        """
        state = {
            index: dict(self.state[parameter])
            for index, parameter in enumerate(self.parameters)
            if self.state.get(parameter)
        }
        return {"state": state} if state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of what `state_dict`, of this class or of torch's optimizer, returned.

        Settings do not change. Raises ModelError if the state does not fit the parameters.
        """
        loaded: list[tuple[nn.Parameter, dict[str, Tensor]]] = []
        for index, entries in state_dict.get("state", {}).items():
            parameter = self.parameters[index] if 0 <= index < len(self.parameters) else None
            shapes = [entries[name].shape for name in self.rule.state_names if name in entries]
            if parameter is None or any(shape != parameter.shape for shape in shapes):
                raise ModelError(
                    "the optimizer's saved state belongs to another network: use the network that it was "
                    "saved with, or begin without it"
                )
            entries_to_load = {
                name: entries[name].to(parameter).clone()
                for name in self.rule.state_names
                if name in entries
            }
            if self.rule.counts_steps and "step" in entries:
                steps = torch.as_tensor(entries["step"], dtype=torch.float32)
                entries_to_load["step"] = steps.clone()
            loaded.append((parameter, entries_to_load))
        self.state.clear()
        self.state.update(loaded)


class Sgd(RuleOptimizer):
    """Stochastic gradient descent, with or without momentum and weight decay, as torch.optim.SGD.

    parameters
        The parameters to train.
    rate
        The learning rate.
    momentum
        The factor of the last step in the next one; 0.9 is usual, 0 turns momentum off.
    weight_decay
        The factor by which each parameter is multiplied and added to its gradient.
    nesterov
        Whether to use Nesterov's form of momentum, which looks one step ahead.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        rate: float,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ):
        for name, value in (("rate", rate), ("momentum", momentum), ("weight_decay", weight_decay)):
            check_number(name, value, least=0)
        if nesterov and not momentum:
            raise ModelError("nesterov is a form of momentum: give a momentum above 0, such as 0.9")
        is_plain = not momentum and not weight_decay
        rule = PlainRule(rate) if is_plain else MomentumRule(rate, momentum, weight_decay, nesterov)
        super().__init__(parameters, rule)


class Adam(RuleOptimizer):
    """Adam, as torch.optim.Adam; with `decoupled` weight decay AdamW.

    parameters
        The parameters to train.
    rate
        The learning rate.
    betas
        The factors by which the running means of gradients and of their squares decay at each step.
    epsilon
        Added to the root of the mean square, so that it is not 0.
    weight_decay
        The factor by which each parameter is multiplied and added to its gradient; if `decoupled`, the
        parameter is reduced by rate times this factor at each step instead.
    decoupled
        Whether the optimizer is AdamW: see `weight_decay`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        rate: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ):
        for name, value in (("rate", rate), ("epsilon", epsilon), ("weight_decay", weight_decay)):
            check_number(name, value, least=0)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ModelError(f"betas {betas}: give two numbers, each from 0 to below 1")
        super().__init__(parameters, AdamRule(rate, betas, epsilon, weight_decay, decoupled))


OptimizerFactory = Callable[[list[nn.Parameter]], RuleOptimizer | torch.optim.Optimizer]
"""A function that makes the optimizer of a network's parameters."""
Scheduler = torch.optim.lr_scheduler.LRScheduler
SchedulerFactory = Callable[[torch.optim.Optimizer], Scheduler]
"""A function that makes the scheduler of an optimizer's learning rate."""


# --- by name --------------------------------------------------------------------------------------

NameOrTable = str | Mapping[str, Any]
"""The name of a class, or a table with its name and arguments: `{"name": "SGD", "momentum": 0.9}`."""

_BUILT_IN: dict[str, tuple[type[RuleOptimizer], str, dict[str, Any]]] = {
    "sgd": (Sgd, "SGD", {}),
    "momentum": (Sgd, "SGD", {"momentum": 0.9}),
    "adam": (Adam, "Adam", {}),
}
"""The optimizers of this module by name: the class, torch's name for it, and its default arguments."""
_UNSUPPORTED = ("LBFGS", "SparseAdam")
"""Torch's optimizers that a learner cannot use: they call the loss themselves, or need sparse gradients."""


def read_name(kind: str, name_or_table: NameOrTable) -> tuple[str, dict[str, Any]]:
    """Return name and arguments; raise ModelError, which begins with `kind`, if there is no name."""
    if isinstance(name_or_table, str):
        return name_or_table, {}
    options = dict(name_or_table)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ModelError(
            f'{kind}: a table needs the name, as in {{name = "AdamW", weight_decay = 0.1}}'
        )
    return name, options


def find_class(
    kind: str, name: str, module: Any, base: type, other_names: Sequence[str] = ()
) -> type[Any]:
    """Return the class of this name in a module of torch; raise ModelError with the nearest name if none is.

    other_names: names outside the module that the error may suggest too.
    """
    members = {key: getattr(module, key) for key in module.__all__}
    classes = {
        key: value
        for key, value in members.items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }
    if name in classes:
        return classes[name]
    names = [key for key in classes if key not in _UNSUPPORTED]
    raise ModelError(f"unknown {kind} {name!r}; {hint(name, [*other_names, *names])}")


def check_arguments(
    kind: str, name: str, torch_class: type[Any], options: Mapping[str, Any], positional: int
) -> None:
    """Raise ModelError for an argument in `options` that a class does not have, or for one that is missing.

    positional: how many arguments of the class are passed by position, before `options`.
    """
    parameters = list(inspect.signature(torch_class).parameters.values())[positional:]
    known = [item.name for item in parameters if item.name not in ("args", "kwargs")]
    if unknown := [key for key in options if key not in known]:
        nearest = hint(unknown[0], known, are="it has")
        raise ModelError(f"{kind} {name!r} has no argument {unknown[0]!r}; {nearest}")
    required = [
        item.name
        for item in parameters
        if item.default is inspect.Parameter.empty and item.name in known
    ]
    if missing := [key for key in required if key not in options]:
        raise ModelError(
            f'{kind} {name!r} needs {missing[0]}: write {{name = "{name}", {missing[0]} = …}}'
        )


def call(kind: str, name: str, function: Callable[..., Any], *values: Any, **options: Any) -> Any:
    """Call a class or method of torch; errors about its arguments become a ModelError."""
    try:
        return function(*values, **options)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ModelError(f"{kind} {name!r}: {' '.join(str(error).split())}") from None


def find_optimizer(
    name_or_table: NameOrTable, rate: float, *, in_torch: bool = False, **defaults: Any
) -> OptimizerFactory:
    """Return a function that makes an optimizer by name: sgd, momentum, adam, or a class of torch.optim.

    in_torch: use torch's class for the first three too, as a scheduler needs it. defaults: arguments that the
    table may override.
    """
    name, options = read_name("optimizer", name_or_table)
    if "lr" in options or "rate" in options:
        raise ModelError(f"optimizer {name!r}: its learning rate is `rate`, not an argument")
    if name in _UNSUPPORTED:
        raise ModelError(
            f"optimizer {name!r} cannot be used: it calls the loss itself, or needs sparse gradients; take "
            "another, such as 'AdamW'"
        )
    optimizer_class: type[Any]
    if name in _BUILT_IN:
        optimizer_class, torch_name, usual = _BUILT_IN[name]
        options = {**usual, **defaults, **options}
        if in_torch:
            optimizer_class = getattr(torch.optim, torch_name)
    else:
        base = torch.optim.Optimizer
        optimizer_class = find_class("optimizer", name, torch.optim, base, list(_BUILT_IN))
        options = {**defaults, **options}
    check_arguments("optimizer", name, optimizer_class, options, 2)
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}

    def make(parameters: list[nn.Parameter]) -> Any:
        return call("optimizer", name, optimizer_class, parameters, rate, **options)

    make([nn.Parameter(torch.zeros(1, 1))])  # raises for arguments of a wrong type or size
    return make


def find_scheduler(name_or_table: NameOrTable) -> SchedulerFactory:
    """Return a function that makes the scheduler of this name, a class of torch.optim.lr_scheduler."""
    name, options = read_name("scheduler", name_or_table)
    scheduler_class = find_class("scheduler", name, torch.optim.lr_scheduler, Scheduler)
    check_arguments("scheduler", name, scheduler_class, options, 1)

    def make(optimizer: torch.optim.Optimizer) -> Any:
        return call("scheduler", name, scheduler_class, optimizer, **options)

    # A first step, with a throw-away optimizer, raises for arguments of a wrong type or size.
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1, 1))], 0.1, momentum=0.9)
    scheduler = make(optimizer)
    optimizer.step()
    loss = [0.0] if scheduler_class is torch.optim.lr_scheduler.ReduceLROnPlateau else []
    call("scheduler", name, scheduler.step, *loss)
    return make
