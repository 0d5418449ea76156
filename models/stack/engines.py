"""What runs some peers of a stack through their network, and scores what comes out.

Chains of Linear layers are batched matrix products, forward and backward (kernel.py does them). Large
networks are worked on in place, in their rows of the stack, with products that fill the processor by
themselves; small ones are first packed layer by layer, because batched products of small matrices want
each layer contiguous. Any other module runs under torch's vmap.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import nan, prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from .. import Loss, Metrics, Right, cross_entropy, squared_error
from . import kernel, plan
from .optimizers import Plain, UpdateRule


@dataclass(frozen=True)
class TrainingJob:
    """What some peers train before the next averaging.

    pool: samples of all peers. index, labels: [peers, samples] for these peers, in their order.
    ends: where each step ends in that order. mean: whether a step descends by the mean of its losses or
    by their sum. count: steps that were taken before.
    """

    pool: Tensor
    index: Tensor
    labels: Tensor
    ends: list[int]
    rule: UpdateRule
    mean: bool
    count: int


class Engine(Protocol):
    """Runs networks of one architecture; `rows` are some peers' rows of a stack."""

    activations: int
    """Values that one sample fills on its way through the network and back."""

    def train(self, rows: Tensor, state: list[Tensor], job: TrainingJob) -> Tensor:
        """Train in place; return the outputs seen on the way, in either form that `score` reads."""
        ...

    def outputs(self, rows: Tensor, inputs: Tensor) -> Tensor:
        """Return outputs [peers, samples, classes] for inputs [peers, samples, …]."""
        ...


# --- chains of Linear layers --------------------------------------------------------------------

_ACTIVATIONS: dict[type[nn.Module], int] = {nn.Sigmoid: 1, nn.Tanh: 2, nn.ReLU: 3, nn.PReLU: 4}


@dataclass(frozen=True)
class Chain:
    """What a module computes, if it is a chain of Linear layers and activations."""

    layers: tuple[tuple[int, ...], ...]
    """As the kernel reads them."""
    shapes: tuple[tuple[int, ...], ...]
    """Of every parameter, in the module's order."""


def read_chain(module: nn.Module, loss: Loss) -> Chain | None:
    """Return the chain that a module is, or None: then it has to be run by its own code."""
    if loss not in (squared_error, cross_entropy):
        return None
    layers: list[list[int]] = []
    shapes: list[tuple[int, ...]] = []
    for leaf in _leaves(module):
        kind, at = type(leaf), len(shapes)
        if has_hooks(leaf):
            return None
        shapes += [tuple(parameter.shape) for parameter in leaf.parameters()]
        if kind is nn.Linear:
            layers.append([at, at + 1 if len(shapes) > at + 1 else -1, 0, -1])
        elif kind in _ACTIVATIONS and layers and not layers[-1][2]:
            layers[-1][2:] = _ACTIVATIONS[kind], at if kind is nn.PReLU else -1
        elif kind is nn.Flatten and isinstance(leaf, nn.Flatten):
            if layers or (leaf.start_dim, leaf.end_dim) != (1, -1):
                return None
        elif kind is not nn.Identity:
            return None
    whole = sum(parameter.numel() for parameter in module.parameters())
    if not layers or whole != sum(prod(shape) for shape in shapes):  # a layer that is used twice
        return None
    return Chain(tuple(tuple(layer) for layer in layers), tuple(shapes))


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential:
        for child in module:
            yield from _leaves(child)
    else:
        yield module


def has_hooks(module: nn.Module) -> bool:
    """Return whether code of somebody's own runs with the module's passes; torch has no question for it."""
    kept = vars(module).items()
    return any(value for key, value in kept if key.endswith("hooks") and "state_dict" not in key)


class ChainEngine:
    """Linear layers and activations as batched matrix products."""

    def __init__(self, chain: Chain, loss: Loss):
        self._layers = [list(layer) for layer in chain.layers]
        self._shapes = [shape if len(shape) == 2 else (1, *shape) for shape in chain.shapes]
        self._sizes = [prod(shape) for shape in chain.shapes]
        self._loss = 0 if loss is squared_error else 1
        cells = sum(chain.shapes[layer[0]][0] for layer in chain.layers)
        self.activations = 2 * cells + chain.shapes[0][1]

    def train(self, rows: Tensor, state: list[Tensor], job: TrainingJob) -> Tensor:
        held = [rows, *state]
        values, *slots = [self._pieces(each) for each in held]
        pool = job.pool.flatten(1)
        if isinstance(job.rule, Plain):
            cells, inputs = self._shapes[0]
            together = plan.deferred_steps(rows.shape[1], cells, inputs, job.ends[0])
            seen = kernel.descend(
                values, self._layers, pool, job.index, job.labels, job.ends, together,
                self._loss, job.mean, job.rule.rate,
            )  # fmt: skip
        else:
            seen = self._follow(values, slots, pool, job)
        if _is_packed(rows):
            for whole, pieces in zip(held, (values, *slots), strict=True):
                for block, piece in zip(whole.split(self._sizes, 1), pieces, strict=True):
                    block.copy_(piece.reshape(block.shape))
        if len(rows) == 1:
            return torch.cat(seen)[None]
        if all(outputs.shape == seen[0].shape for outputs in seen):
            if seen[0].stride(-1) == 1:
                return torch.stack(seen)
            # Transposed ones stay so: turning them costs more than copying.
            return torch.stack([outputs.mT for outputs in seen]).mT
        return torch.cat(seen, dim=1)

    def outputs(self, rows: Tensor, inputs: Tensor) -> Tensor:
        x = inputs.flatten(2) if len(rows) > 1 else inputs.flatten(2)[0]
        found = kernel.forward(self._pieces(rows), self._layers, x, x.new_empty(0), [])[-1]
        return found if len(rows) > 1 else found[None]

    def _follow(
        self, values: list[Tensor], state: list[list[Tensor]], pool: Tensor, job: TrainingJob
    ) -> list[Tensor]:
        """Train by a rule that wants gradients; the outputs of every step."""
        gradients = [torch.empty_like(value) for value in values]
        nothing, seen, first = pool.new_empty(0), [], 0
        for number, last in enumerate(job.ends, start=1):
            x = pool.index_select(0, job.index[:, first:last].reshape(-1))
            goal = job.labels[:, first:last]
            if len(job.index) > 1:
                x = x.view(len(job.index), last - first, -1)
            else:
                goal = goal[0]
            outputs, _ = kernel.step(
                values, self._layers, x, goal, self._loss, job.mean, 0.0, gradients, nothing
            )
            job.rule.step(values, gradients, state, job.count + number)
            seen.append(outputs)
            first = last
        return seen

    def _pieces(self, rows: Tensor) -> list[Tensor]:
        """Every parameter as [peers, …] (no peers axis for one), vectors as one row."""
        blocks = zip(rows.split(self._sizes, 1), self._shapes, strict=True)
        if _is_packed(rows):
            return [
                block.clone(memory_format=torch.contiguous_format).view(-1, *shape)
                for block, shape in blocks
            ]
        return [b.unflatten(1, shape) if len(rows) > 1 else b.view(shape) for b, shape in blocks]


def _is_packed(rows: Tensor) -> bool:
    return len(rows) > 1 and rows.shape[1] < plan.LARGE_NETWORK


# --- any module ---------------------------------------------------------------------------------


class ModuleEngine:
    """Any module without buffers or randomness, by functional_call under vmap."""

    def __init__(self, module: nn.Module, loss: Loss, sample: Tensor, device: torch.device):
        self._module, self._loss = module, loss
        self._own = threading.local()
        self._device = device
        self._shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
        # What a module keeps for its backward pass is not known; some multiples of its input are.
        self.activations = 16 * sample[0].numel()

    def train(self, rows: Tensor, state: list[Tensor], job: TrainingJob) -> Tensor:
        values = self._pieces(rows)
        held = [list(self._pieces(slot).values()) for slot in state]
        gradients_of = vmap(grad(self._loss_of(job.mean), has_aux=True))
        seen: list[Tensor] = []
        first = 0
        for number, last in enumerate(job.ends, start=1):
            inputs = job.pool[job.index[:, first:last]]
            gradients, outputs = gradients_of(values, inputs, job.labels[:, first:last])
            ordered = [gradients[name] for name in values]
            job.rule.step(list(values.values()), ordered, held, job.count + number)
            seen.append(outputs)
            first = last
        return torch.cat(seen, dim=1)

    @torch.no_grad()
    def outputs(self, rows: Tensor, inputs: Tensor) -> Tensor:
        module = self._skeleton().eval()
        return vmap(lambda values, x: functional_call(module, values, (x,)))(
            self._pieces(rows), inputs
        )

    def can_stack(self, rows: Tensor, inputs: Tensor, labels: Tensor) -> bool:
        """Return whether this module can be stacked: by one step that changes nothing, and one test."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # that vmap would fall back to a loop of its own
                values = {name: value.clone() for name, value in self._pieces(rows).items()}
                vmap(grad(self._loss_of(False), has_aux=True))(values, inputs, labels)
                # Some modules take another way when they are not trained.
                self.outputs(rows, inputs)
        except (RuntimeError, ValueError, TypeError, UserWarning):
            return False
        return True

    def _loss_of(self, mean: bool) -> Any:
        module, loss = self._skeleton().train(), self._loss

        def loss_of(values: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            outputs = functional_call(module, values, (x,))
            losses = loss(outputs, y)
            return (losses.mean() if mean else losses.sum()), outputs

        return loss_of

    def _skeleton(self) -> nn.Module:
        """A copy for each thread: functional_call lends a module its parameters while it runs."""
        if not hasattr(self._own, "module"):
            self._own.module = deepcopy(self._module).to(self._device)
        return self._own.module

    def _pieces(self, rows: Tensor) -> dict[str, Tensor]:
        blocks = rows.split([prod(shape) for shape in self._shapes.values()], 1)
        return {
            name: block.unflatten(1, shape or (1,))
            for block, (name, shape) in zip(blocks, self._shapes.items(), strict=True)
        }


# --- scores -------------------------------------------------------------------------------------


def score(outputs: Tensor, labels: Tensor, loss: Loss, own: Right | None = None) -> list[Metrics]:
    """Return every peer's metrics, from outputs and labels [peers, samples], as learners would count them.

    Outputs are [peers, samples, classes], or [steps, peers, batch, classes] as they were computed.
    own: the learners' own word for what is right, which comes with modules' outputs, as targets that are
    no classes do; both are [peers, samples, …].
    """
    if own is not None or labels.is_floating_point():
        return [_score_one(one, goal, loss, own) for one, goal in zip(outputs, labels, strict=True)]
    peers, samples = labels.shape
    classes, axis = outputs.shape[-1], outputs.ndim - 3
    if axis:
        labels = labels.view(peers, outputs.shape[0], -1).transpose(0, 1).contiguous()
    if classes == 1:
        threshold = 0.0 if loss is cross_entropy else 0.5
        right = (outputs[..., 0] > threshold) == (labels > 0)
    else:
        right = _right(outputs, labels)
    if loss is squared_error:  # the same, without one-hot labels
        errors = outputs - labels[..., None] if classes == 1 else _moved(outputs, labels, -1.0)
        losses = errors.square_().sum(dim=-1).mul_(0.5)
    else:
        losses = loss(outputs.reshape(-1, classes), labels.reshape(-1)).view(labels.shape)
    others = tuple(dim for dim in range(labels.ndim) if dim != axis)
    totals = losses.sum(dim=others, dtype=torch.float64).tolist()
    counts = right.sum(dim=others).tolist()
    return [Metrics(total, count, samples) for total, count in zip(totals, counts, strict=True)]


def _score_one(outputs: Tensor, labels: Tensor, loss: Loss, own: Right | None) -> Metrics:
    """Of one peer, by functions that know nothing of stacks."""
    total = float(loss(outputs, labels).sum(dtype=torch.float64))
    return Metrics(total, nan if own is None else int(own(outputs, labels).sum()), len(labels))


def _right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether the most active output is the label's; of equal ones the first counts.

    Torch finds the largest value much faster than its place. The place is only asked for if that does
    not decide it: when a label's output equals the largest of the others, or one is not a number.
    """
    own = outputs.gather(-1, labels[..., None])[..., 0]
    others = _moved(outputs, labels, -torch.inf).amax(dim=-1)
    right = own > others
    if bool((right | (own < others)).all()):
        return right
    return outputs.max(dim=-1).indices == labels


def _moved(outputs: Tensor, labels: Tensor, change: float) -> Tensor:
    """A copy in which each label's own output is changed; adding is faster than writing."""
    where = labels[..., None]
    return outputs.clone().scatter_add_(-1, where, outputs.new_full((1,), change).expand_as(where))
