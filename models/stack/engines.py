"""What runs some peers of a stack through their network, and scores what comes out.

Chains of Linear layers are batched matrix products, forward and backward. Large networks are worked on in
place, in their rows of the stack, with products that fill the processor by themselves; small ones are first
packed layer by layer, because batched products of small matrices want each layer contiguous. Any other module
runs under torch's vmap.

The kernel, the innermost loop of chains, is run by torch's own interpreter: its functions are plain Python in
the subset that TorchScript reads. Scripted, all that some peers train between two averagings is one call that
neither waits for Python's interpreter nor keeps other threads from it; without TorchScript (it is deprecated,
and may go) the same functions run as they are, slower.

Deferred steps. Plain descent adds −rate · slopeᵀ · input to the first weights W in every step. What later
steps see of W is W·x before all of them, less rate · (x·x') · slope for every earlier input x' and the
slope it got. Inputs are known beforehand: so one product with W serves several steps, a small one with
the inputs' own products corrects it step by step, and W is written once. The result is the same to
rounding, and W, which does not fit into a core's own cache, is read and written once for all of them.

A layer is [weight, bias, activation, slope]: places in `values`, −1 for none; activations are 0 none,
1 sigmoid, 2 tanh, 3 ReLU, 4 PReLU. A loss is 0 for the squared error, 1 for cross-entropy.
Tensors are [peers, samples, cells], or [samples, cells] for one peer; vectors have one row.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from math import nan, prod
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap

from .. import Loss, Metrics, Right, SlicedNetwork, cross_entropy, squared_error
from ..learner import Plain, UpdateRule
from . import plan


@dataclass(frozen=True)
class TrainingJob:
    """What some peers train before the next averaging.

    pool: samples of all peers. index, labels: [peers, samples] for these peers, in their order.
    ends: where each step ends in that order. mean: whether a step descends by the mean of its losses or
    by their sum. taken: steps that were taken before.
    """

    pool: Tensor
    index: Tensor
    labels: Tensor
    ends: list[int]
    rule: UpdateRule
    mean: bool
    taken: int

    def steps(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of every step: its number, from 1, and [peers, batch] of `index` and of `labels`."""
        for number, (first, last) in enumerate(pairwise((0, *self.ends)), start=self.taken + 1):
            yield number, self.index[:, first:last], self.labels[:, first:last]


# Engines run networks of one architecture; `rows` are some peers' rows of a stack, `activations` the values
# that one sample fills on its way through the network and back. `train` works in place and returns the
# outputs seen on the way, in either form that `score` reads; `outputs` returns [peers, samples, classes].

# --- the kernel -----------------------------------------------------------------------------------


def _script(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(function)
    except (AttributeError, RuntimeError, OSError):  # no TorchScript, or no source to read
        return function


@_script
def draw_orders(
    orders: list[Tensor], generators: list[Generator], samples: list[int], count: int
) -> tuple[Tensor, list[Tensor]]:
    """Do what `SgdLearner.draw` does, for many learners: [learners, count], and the orders that are left.

    Scripted, it does not hold the interpreter's lock: with 1024 small learners on two threads a round is
    about a fifth shorter than with a loop over `SgdLearner.draw`.
    """
    chosen: list[Tensor] = []
    left: list[Tensor] = []
    for learner, order in enumerate(orders):
        if order.size(0) < count:
            epochs = [order]
            for _ in range((count - order.size(0) + samples[learner] - 1) // samples[learner]):
                epochs.append(torch.randperm(samples[learner], generator=generators[learner]))
            order = torch.cat(epochs)
        chosen.append(order[:count])
        left.append(order[count:])
    return torch.stack(chosen), left


@_script
def narrow(samples: int, cells: int) -> bool:
    """Whether a layer's outputs lie transposed: products with few columns are slow, with few rows not."""
    return cells < 16 and samples >= 16


@_script
def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x · weightᵀ + bias; an empty bias is none."""
    if narrow(x.size(-2), weight.size(-2)):
        if bias.numel() == 0:
            return torch.matmul(weight, x.mT).mT
        if x.dim() == 3:
            return torch.baddbmm(bias.mT, weight, x.mT).mT
        return torch.addmm(bias.mT, weight, x.mT).mT
    if bias.numel() == 0:
        return torch.matmul(x, weight.mT)
    if x.dim() == 3:
        return torch.baddbmm(bias, x, weight.mT)
    return torch.nn.functional.linear(x, weight, bias[0])


@_script
def into(target: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """target += scale · left · right."""
    if target.dim() == 3:
        target.baddbmm_(left, right, beta=1.0, alpha=scale)
    else:
        target.addmm_(left, right, beta=1.0, alpha=scale)


@_script
def activate(z: Tensor, kind: int, slope: Tensor) -> Tensor:
    """A layer's activation, in place where it can be."""
    if kind == 1:
        return z.sigmoid_()
    if kind == 2:
        return z.tanh_()
    if kind == 3:
        return z.clamp_(min=0.0)
    if kind == 4:
        return torch.where(z > 0, z, z * slope)
    return z


@_script
def forward(
    values: list[Tensor], layers: list[list[int]], x: Tensor, first: Tensor, before: list[Tensor]
) -> list[Tensor]:
    """Every layer's activations. `first`: what layer 0 gives before its activation, unless empty.

    `before` receives, for every layer, what a PReLU was given.
    """
    nothing = x.new_empty([0])
    found: list[Tensor] = []
    for index, layer in enumerate(layers):
        if index == 0 and first.numel() > 0:
            z = first
        else:
            z = affine(x, values[layer[0]], values[layer[1]] if layer[1] >= 0 else nothing)
        before.append(z if layer[2] == 4 else nothing)
        x = activate(z, layer[2], values[layer[3]] if layer[3] >= 0 else nothing)
        found.append(x)
    return found


@_script
def loss_slope(outputs: Tensor, labels: Tensor, loss: int) -> Tensor:
    """How the summed loss changes with the outputs: what they are, less 1 where the label is."""
    single = outputs.size(-1) == 1
    if loss == 0:
        slope = outputs.clone()
    elif single:
        slope = outputs.sigmoid()
    else:
        slope = outputs.softmax(-1)
    where = labels.unsqueeze(-1)
    if single:
        return slope.sub_(where)
    return slope.scatter_add_(-1, where, slope.new_full([1], -1.0).expand_as(where))


@_script
def step(
    values: list[Tensor],
    layers: list[list[int]],
    x: Tensor,
    labels: Tensor,
    loss: int,
    mean: bool,
    rate: float,
    gradients: list[Tensor],
    first: Tensor,
) -> tuple[Tensor, Tensor]:
    """One step; the outputs, and how the loss changed with what layer 0 gave before its activation.

    With `gradients`, they are written there, one for each of `values`, and nothing else; without,
    values descend at once by `rate`. With `first`, layer 0 is left to the caller.
    """
    noting = len(gradients) > 0
    before: list[Tensor] = []
    seen = forward(values, layers, x, first, before)
    outputs = seen[-1]
    slope = loss_slope(outputs, labels, loss)
    if mean:
        slope = slope.div_(outputs.size(-2))
    ones = x.new_ones([1, x.size(-2)])
    if x.dim() == 3:
        ones = ones.expand([x.size(0), 1, x.size(1)])
    for back in range(len(layers)):
        index = len(layers) - 1 - back
        layer = layers[index]
        after = seen[index]
        kind = layer[2]
        if kind == 1:
            slope = slope.mul_(after)
            slope = slope.addcmul_(slope, after, value=-1.0)
        elif kind == 2:
            slope = slope.addcmul_(slope * after, after, value=-1.0)
        elif kind == 3:
            slope = slope.mul_(after > 0)
        elif kind == 4:
            leak, z = values[layer[3]], before[index]
            negative = z <= 0
            change = (slope * z * negative).sum(-2, keepdim=True)
            if leak.size(-1) == 1:
                change = change.sum(-1, keepdim=True)
            slope = torch.where(negative, slope * leak, slope)
            if noting:
                gradients[layer[3]].copy_(change)
            else:
                leak.sub_(change, alpha=rate)
        if index == 0 and first.numel() > 0:
            break
        below = slope
        if index > 0:
            below = torch.matmul(slope, values[layer[0]])
        under = seen[index - 1] if index > 0 else x
        if noting:
            gradients[layer[0]].copy_(torch.matmul(slope.mT, under))
            if layer[1] >= 0:
                gradients[layer[1]].copy_(torch.matmul(ones, slope))
        else:
            into(values[layer[0]], slope.mT, under, -rate)
            if layer[1] >= 0:
                into(values[layer[1]], ones, slope, -rate)
        if index > 0:
            slope = below
    return outputs, slope


@_script
def descend(
    values: list[Tensor],
    layers: list[list[int]],
    pool: Tensor,
    index: Tensor,
    labels: Tensor,
    ends: list[int],
    together: int,
    loss: int,
    mean: bool,
    rate: float,
) -> list[Tensor]:
    """Plain descent until the next averaging; the outputs of every step.

    index, labels: [peers, samples]. ends: where each step ends. together: steps deferred
    together, 1 for none.
    """
    many = index.size(0) > 1
    nothing = pool.new_empty([0])
    none: list[Tensor] = []
    seen: list[Tensor] = []
    at = 0
    for block in range((len(ends) + together - 1) // together):
        steps = ends[block * together : (block + 1) * together]
        begin, end = at, steps[-1]
        inputs = pool.index_select(0, index[:, begin:end].reshape(-1))
        if many:
            inputs = inputs.view(index.size(0), end - begin, -1)
        late = together > 1 and len(steps) > 1
        weight = values[layers[0][0]]
        bias = values[layers[0][1]] if layers[0][1] >= 0 else nothing
        whole, products, slopes = nothing, nothing, nothing
        if late:
            whole = affine(inputs, weight, bias)
            slopes = torch.empty_like(whole)
            products = torch.matmul(inputs, inputs.mT)
            if bias.numel() > 0:
                products += 1.0  # a bias is a weight from an input that is always 1
        for last in steps:
            a, b = at - begin, last - begin
            first = nothing
            if late:
                first = whole[..., a:b, :]
                if a > 0:
                    into(first, products[..., a:b, :a], slopes[..., :a, :], -rate)
            goals = labels[:, at:last]
            goals = goals if many else goals[0]
            outputs, slope = step(
                values, layers, inputs[..., a:b, :], goals, loss, mean, rate, none, first
            )
            if late:
                slopes[..., a:b, :] = slope
            seen.append(outputs)
            at = last
        if late:
            into(weight, slopes.mT, inputs, -rate)
            if bias.numel() > 0:
                bias.sub_(slopes.sum(-2, keepdim=True), alpha=rate)
    return seen


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
            seen = descend(
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
        found = forward(self._pieces(rows), self._layers, x, x.new_empty(0), [])[-1]
        return found if len(rows) > 1 else found[None]

    def _follow(
        self, values: list[Tensor], state: list[list[Tensor]], pool: Tensor, job: TrainingJob
    ) -> list[Tensor]:
        """Train by a rule that wants gradients; the outputs of every step."""
        gradients = [torch.empty_like(value) for value in values]
        nothing, seen = pool.new_empty(0), []
        for number, index, goal in job.steps():
            x = pool.index_select(0, index.reshape(-1))
            if len(index) > 1:
                x = x.view(*index.shape, -1)
            else:
                goal = goal[0]
            outputs, _ = step(
                values, self._layers, x, goal, self._loss, job.mean, 0.0, gradients, nothing
            )
            job.rule.step(values, gradients, state, number)
            seen.append(outputs)
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

    def __init__(self, network: SlicedNetwork, loss: Loss, sample: Tensor, device: torch.device):
        self._module, self._loss, self._device = network.module, loss, device
        self._pieces = network.slicing.anatomy.views
        self._own = threading.local()
        # What a module keeps for its backward pass is not known; some multiples of its input are.
        self.activations = 16 * sample[0].numel()

    def train(self, rows: Tensor, state: list[Tensor], job: TrainingJob) -> Tensor:
        values = self._pieces(rows)
        held = [list(self._pieces(slot).values()) for slot in state]
        gradients_of = vmap(grad(self._loss_of(job.mean), has_aux=True))
        seen: list[Tensor] = []
        for number, index, labels in job.steps():
            gradients, outputs = gradients_of(values, job.pool[index], labels)
            ordered = [gradients[name] for name in values]
            job.rule.step(list(values.values()), ordered, held, number)
            seen.append(outputs)
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


Engine = ChainEngine | ModuleEngine

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
