"""Learners: what each offers, metrics that add up, gradient descent over own samples, and FedProx."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import inf, nan
from numbers import Real
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .discovery import run_once
from .errors import ModelError
from .network import SlicedNetwork


@dataclass(frozen=True)
class Metrics:
    """Totals over samples; `a + b` is what training or testing on both would have counted.

    Where samples are neither right nor wrong, as in regression, `correct` is NaN.
    """

    loss: float = 0.0
    correct: float = 0
    samples: int = 0

    def __add__(self, other: Metrics) -> Metrics:
        return Metrics(
            self.loss + other.loss, self.correct + other.correct, self.samples + other.samples
        )

    @property
    def accuracy(self) -> float:
        """The share of samples that were right; NaN when there were none, or nothing is right or wrong."""
        return self.correct / self.samples if self.samples else nan

    @property
    def mean_loss(self) -> float:
        """The loss per sample; NaN when there were none."""
        return self.loss / self.samples if self.samples else nan


@runtime_checkable
class Learner(Protocol):
    """Anything that can improve a network between two averagings.

    One of its steps is what the paper calls a mini-batch: the training between two averagings, many
    gradient steps long. `state` and `restore` carry what a restart needs besides the network itself.
    """

    network: SlicedNetwork

    def train(self, steps: int) -> Metrics:
        """Train `steps` times as much as between two averagings."""
        ...

    def test(self) -> Metrics:
        """Measure the network on the peer's own test data, without changing it."""
        ...

    def state(self) -> dict[str, Any]:
        """Optimizer, position in the data and random state, as plain data and tensors."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken."""
        ...


@runtime_checkable
class Weighted(Protocol):
    """A learner that must know how much of each average its peer holds: whoever runs it says so."""

    weight_of: Callable[[str], float]
    """The weight that the peer holds of a partial model now, in peers."""


@runtime_checkable
class PeerCounting(Protocol):
    """A learner that must know how many peers there are at most: whoever runs it says so."""

    peers_seen: Callable[[], float]
    """How many peers of its swarm the peer knows of now, itself included."""


# A loss takes outputs [n, classes] and labels [n] and returns one number per sample.
Loss = Callable[[Tensor, Tensor], Tensor]
IsCorrect = Callable[[Tensor, Tensor], Tensor]
"""Of outputs and labels, whether each sample is right."""
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Half the squared distance to the one-hot label, summed over outputs: the paper's loss.

    A network with one output is a binary classifier whose target is the label itself.
    """
    return 0.5 * (outputs - _targets(outputs, labels)).square().sum(dim=1)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The usual softmax cross-entropy; one output means a logistic loss on its logit."""
    if outputs.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(
            outputs[:, 0], labels.to(outputs.dtype), reduction="none"
        )
    return F.cross_entropy(outputs, labels, reduction="none")


LOSSES: dict[str, Loss] = {"squared": squared_error, "cross-entropy": cross_entropy}


class PlainSgd:
    """`w −= rate · gradient`, and nothing else.

    torch.optim.SGD does the same, but the first torch optimizer of a process loads torch's compiler:
    seconds of start-up for every peer.
    """

    def __init__(self, parameters: list[nn.Parameter], rate: float):
        self._parameters, self.rate = parameters, rate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Descend once."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-self.rate)

    def state_dict(self) -> dict[str, Any]:
        """There is no state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is no state."""


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


class SgdLearner:
    """Trains a network on some samples of its own between two averagings.

    network
        The peer's sliced network.
    train, test
        Inputs [n, …] and integer labels [n]; with a loss of your own also float targets [n, …]. Without
        training samples a peer learns nothing and passes on what it hears; without test samples its
        accuracy is NaN, and means over peers leave it out.
    local_samples
        Samples between two averagings: what the paper calls the mini-batch size. Raise it to talk less
        often; lower it when peers drift apart between averagings.
    batch
        Samples per gradient step. 1 is the paper's per-sample descent; 10 with `reduction="sum"` learns
        alike in a tenth of the steps.
    reduction
        Of a batch's losses: `mean`, or `sum` (the paper's meaning: a step as long as its samples' own steps
        together).
    rate, optimizer
        Plain SGD at `rate`, or any torch optimizer: `optimizer=lambda p: torch.optim.Adam(p, 1e-3)`.
        Rate 0 learns nothing: a control.
    loss
        `cross-entropy` (the outputs are logits), `squared`, or a function of (outputs, labels) giving one
        number per sample.
    right
        A function of (outputs, labels) that says of each sample whether it is right, for accuracy. If left
        out, the most active output counts; a single one says yes above one half, or above 0 with
        `cross-entropy`: a loss of your own on a logit wants `right=lambda out, y: (out[:, 0] > 0) == y`.
        Float targets are then neither right nor wrong, and accuracy is NaN: look at the loss.
    seed
        Orders the samples: every epoch is a fresh permutation, and training goes on where it stopped in it.
    """

    def __init__(
        self,
        network: SlicedNetwork,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        *,
        local_samples: int = 500,
        batch: int = 10,
        reduction: Literal["sum", "mean"] = "mean",
        rate: float = 0.1,
        optimizer: OptimizerFactory | None = None,
        loss: str | Loss = "cross-entropy",
        right: IsCorrect | None = None,
        seed: int = 0,
    ):
        if local_samples < 1 or batch < 1:
            raise ModelError(
                f"local_samples ({local_samples}) and batch ({batch}) must be at least 1"
            )
        if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= rate < inf:
            raise ModelError(
                f"rate {rate!r}: give a number from 0 (which learns nothing) up, as in 0.1"
            )
        if len(train[0]) != len(train[1]):
            raise ModelError(
                f"peer {network.peer!r}: {len(train[0])} training inputs with {len(train[1])} labels"
            )
        if isinstance(optimizer, str) or (optimizer is not None and not callable(optimizer)):
            raise ModelError(
                f"optimizer {optimizer!r}: give a function of the parameters, as in "
                "lambda p: torch.optim.Adam(p, 1e-3)"
            )
        if isinstance(loss, str) and loss not in LOSSES:
            raise ModelError(f"unknown loss {loss!r}: there are {', '.join(LOSSES)}")
        self.loss: Loss = LOSSES[loss] if isinstance(loss, str) else loss
        own = None if self.loss in LOSSES.values() else self.loss
        for what, (inputs, labels) in (("training", train), ("test", test)):
            _check_samples(network, what, inputs, labels, own)
        self.network = network
        self.samples, self.held_out = train, test
        self.local_samples, self.batch, self.reduction = local_samples, batch, reduction
        self.right = right
        # Where a single output says yes: a logit at 0, a probability at one half.
        self._threshold = 0.0 if self.loss is cross_entropy else 0.5
        parameters = list(network.module.parameters())
        self.optimizer = optimizer(parameters) if optimizer else PlainSgd(parameters, float(rate))
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.int64)

    def train(self, steps: int = 1) -> Metrics:
        """Train `local_samples` samples `steps` times; the metrics are those seen while training."""
        if not len(self.samples[1]):
            return Metrics()
        self.network.module.train()
        loss, correct, left = 0.0, 0.0, steps * self.local_samples
        while left:
            # No batch reaches beyond the local samples, so that averaging falls where it was asked for.
            within = (left - 1) % self.local_samples + 1
            chosen = self.draw(min(self.batch, within))
            inputs, labels = self.samples[0][chosen], self.samples[1][chosen]
            outputs = self.network.module(inputs)
            losses = self.loss(outputs, labels)
            self.optimizer.zero_grad(set_to_none=True)
            (losses.sum() if self.reduction == "sum" else losses.mean()).backward()
            self.optimizer.step()
            loss += float(losses.detach().sum())
            correct += self._right(outputs, labels)
            left -= len(labels)
        return Metrics(loss, correct, steps * self.local_samples)

    @torch.no_grad()
    def test(self) -> Metrics:
        """Accuracy and loss on the held-out samples.

        With `buffers="recompute"`, batch statistics are first taken anew from the training samples:
        averaging has moved the weights under them.
        """
        inputs, labels = self.held_out
        if self.network.buffers == "recompute" and len(labels) and len(self.samples[1]):
            self.network.recompute(self.samples[0])
        self.network.module.eval()
        total = Metrics()
        for first in range(0, len(labels), 1000):
            outputs = self.network.module(inputs[first : first + 1000])
            some = labels[first : first + 1000]
            losses = self.loss(outputs, some)
            total += Metrics(float(losses.sum()), self._right(outputs, some), len(some))
        return total

    def state(self) -> dict[str, Any]:
        """The optimizer's state, the samples to come this epoch, the random state, own statistics."""
        state: dict[str, Any] = {
            "optimizer": _copied(self.optimizer.state_dict()),
            "order": self.order.clone(),
            "generator": self.generator.get_state(),
        }
        if own := self.network.own_buffers():
            state["buffers"] = {name: value.clone() for name, value in own.items()}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.order = state["order"].clone()
        self.generator.set_state(state["generator"])
        for name, value in self.network.own_buffers().items():
            if name in state.get("buffers", {}):
                value.copy_(state["buffers"][name])

    def draw(self, count: int) -> Tensor:
        """The indices of the next `count` samples, which count as seen.

        Every epoch is a fresh permutation; a batch may span the end of one epoch and the next.
        """
        order = self.order
        if len(order) < count:
            samples = len(self.samples[1])
            fresh = -(-(count - len(order)) // samples)
            epochs = (torch.randperm(samples, generator=self.generator) for _ in range(fresh))
            order = torch.cat([order, *epochs])
        self.order = order[count:]
        return order[:count]

    def _right(self, outputs: Tensor, labels: Tensor) -> float:
        """How many samples are right: the most active output wins."""
        if self.right is not None:
            return int(self.right(outputs, labels).sum())
        if labels.is_floating_point():
            return nan
        if outputs.shape[1] == 1:
            return int(((outputs[:, 0] > self._threshold) == (labels > 0)).sum())
        return int((outputs.argmax(dim=1) == labels).sum())


def _copied(value: Any) -> Any:
    """A deep copy that takes of every tensor only what it shows, not all the memory behind it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return deepcopy(value)


def _targets(outputs: Tensor, labels: Tensor) -> Tensor:
    if outputs.shape[1] == 1:
        return labels.to(outputs.dtype)[:, None]
    return F.one_hot(labels, outputs.shape[1]).to(outputs.dtype)


_REGRESSION = "loss=lambda out, y: (out[:, 0] - y).square()"


@torch.no_grad()
def _check_samples(
    network: SlicedNetwork, what: str, inputs: Tensor, labels: Tensor, loss: Loss | None
) -> None:
    """Find out now, with the peer's name, what torch would say deep in the first training step.

    loss: the user's own, if it is that; only such a one has targets that are no classes.
    """
    peer = f"peer {network.peer!r}, {what} samples"
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor):
        raise ModelError(f"{peer}: give inputs and labels as torch tensors")
    count, dtype, targets = len(inputs), network.flat.dtype, labels.is_floating_point()
    # Integers are tokens for an embedding, whatever the network computes in.
    if inputs.is_floating_point() and inputs.dtype != dtype:
        raise ModelError(f"{peer}: inputs are {inputs.dtype}, the network is {dtype}")
    given = f"not {labels.dtype} of shape {tuple(labels.shape)}"
    if targets and loss is not None:
        if labels.dtype != dtype or labels.ndim < 1 or len(labels) != count:
            raise ModelError(
                f"{peer}: targets must be {dtype}, as the network is, and {count}, one for each input, "
                f"{given}"
            )
    elif labels.dtype != torch.int64 or labels.shape != (count,):
        hint = f"; targets that are no classes need a loss of your own, as in {_REGRESSION}"
        raise ModelError(
            f"{peer}: labels must be int64 of shape ({count},), {given}{hint if targets else ''}"
        )
    if not count:
        return
    try:
        outputs = run_once(network.module, inputs[:2])
    except RuntimeError as error:
        raise ModelError(
            f"{peer}: inputs of shape {tuple(inputs.shape[1:])} do not fit the network: {error}"
        ) from None
    if loss is not None:
        _check_loss(peer, loss, outputs, labels[:2])
    if targets:
        return
    if outputs.ndim < 2:
        raise ModelError(
            f"{peer}: the network's outputs have the shape {tuple(outputs.shape)} for {len(outputs)} "
            "samples; classes want one row of outputs for each sample"
        )
    low, high, classes = int(labels.min()), int(labels.max()), max(outputs.shape[1], 2)
    if low < 0 or high >= classes:
        raise ModelError(
            f"{peer}: labels run from {low} to {high}, but the network's {outputs.shape[1]} outputs allow 0 "
            f"to {classes - 1}"
        )


def _check_loss(peer: str, loss: Loss, outputs: Tensor, labels: Tensor) -> None:
    shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(labels.shape)}"
    try:
        losses: Any = loss(outputs, labels)
    except (RuntimeError, ValueError, IndexError) as error:
        raise ModelError(
            f"{peer}: the loss failed on {shapes}: {' '.join(str(error).split())}"
        ) from error
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != (len(labels),):
        raise ModelError(
            f"{peer}: a loss gives one number for each sample, so shape ({len(labels)},) for {shapes}, not "
            f"{shape}; as in {_REGRESSION}, or reduction='none' of torch's own"
        )


GradientTerm = Callable[[Tensor], Tensor]
"""From a network's flat parameters to what is added to their gradient."""


class Corrected:
    """An optimizer before each of whose steps something is done to the gradients."""

    def __init__(self, inner: Any, correct: Callable[[], None]):
        self._inner, self._correct = inner, correct

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self) -> None:
        """Correct the gradients, then descend."""
        self._correct()
        self._inner.step()


@contextmanager
def adding_to_gradient(learner: SgdLearner, term: GradientTerm) -> Iterator[None]:
    """While inside, every step of the learner descends along gradient + term(parameters)."""
    optimizer, network = learner.optimizer, learner.network

    @torch.no_grad()
    def add() -> None:
        addition = network.slicing.anatomy.views(term(network.flat))
        for name, parameter in network.module.named_parameters():
            piece = addition[name]
            parameter.grad = piece.clone() if parameter.grad is None else parameter.grad + piece

    learner.optimizer = Corrected(optimizer, add)  # type: ignore[assignment]
    try:
        yield
    finally:
        learner.optimizer = optimizer


class Proximal:
    """A learner that is held near what it got from the last averaging (FedProx, Li et al. 2020).

        h(w) = F(w) + μ/2 · ‖w − w_t‖²,    w_t: the values when training began

    In `server` mode with one model of all cells this is FedProx. In the other modes, and for partial
    models, it is the same pull without a server: w_t is what gossip has left in the network.

    mu
        Raise it when peers' data differ and training drifts apart, lower it to learn faster. It stands
        beside the mean loss of a batch, also where the learner sums.
    """

    def __init__(self, learner: SgdLearner, mu: float):
        if not 0 <= mu < float("inf"):
            raise ModelError(f"the proximal term's strength must be 0 or more, not {mu}")
        self.network, self._learner = learner.network, learner
        self._pull = mu * (learner.batch if learner.reduction == "sum" else 1)

    def train(self, steps: int) -> Metrics:
        """Train `steps` times, pulled back to where training began."""
        w = self.network.flat.detach().clone()
        with adding_to_gradient(self._inner(), lambda y: self._pull * (y - w)):
            return self._learner.train(steps)

    def test(self) -> Metrics:
        """The learner's own test."""
        return self._inner().test()

    def state(self) -> dict[str, Any]:
        """The learner's own state: between two trainings there is no other."""
        return self._learner.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken."""
        self._learner.restore(state)

    def _inner(self) -> SgdLearner:
        """The learner, on the network that this one has now: it may have been replaced from outside."""
        self._learner.network = self.network
        return self._learner
