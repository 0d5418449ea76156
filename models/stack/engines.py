"""Engines, which train and evaluate several peers' networks at once, and the scoring of their outputs.

Chains of Linear layers are computed as batched matrix products, forward and backward. Large networks are
trained in place, in their rows of the stack. Small ones are first packed (copied layer by layer), because
batched products of small matrices are fast only if each layer is contiguous. Any other module runs under
torch's vmap.

With numba installed, plain SGD of chains runs in another kernel, one network after the other: see fused.py.

The functions of torch's kernel, the training loop of chains, are written in the subset of Python that
TorchScript compiles. Compiled, all steps of some peers between two averagings are one call that does not
hold Python's global interpreter lock. Without TorchScript (it is deprecated) the same functions run as
ordinary Python, more slowly.

Deferred steps. Let W be the first layer's weights, x the inputs of a step, and δ the gradient of the loss
with respect to W·x. Plain SGD adds −rate · δᵀ · x to W in every step. So a later step's W·x equals W·x
with the old W, minus rate · (x·x') · δ' for every earlier input x' with gradient δ'. As all inputs are known
in advance, one product with the old W serves several steps, products of inputs with inputs correct it step
by step, and W is updated once. The result is the same up to rounding, and W, which does not fit into a
core's cache, is read and written once instead of once per step.

A layer is [weight, bias, activation, PReLU slope]. Weight, bias and slope are indices into `values`, −1 for
none; activations are 0 none, 1 sigmoid, 2 tanh, 3 ReLU, 4 PReLU. A loss is 0 for squared error, 1 for
cross-entropy. (TorchScript functions cannot read named constants of a module.) Tensors are [peers, samples,
cells], or [samples, cells] for one peer; biases and slopes have one row.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import accumulate, pairwise
from math import ceil, nan, prod
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, vmap

from .. import (
    IsCorrect,
    Loss,
    Metrics,
    SgdLearner,
    SlicedNetwork,
    cross_entropy,
    decision_threshold,
    squared_error,
)
from ..discovery import leaves
from ..optimizers import PlainRule, UpdateRule
from . import plan


@dataclass(frozen=True)
class TrainingJob:
    """The training of some peers before the next averaging.

    pool: inputs of all peers. index, labels: [peers, samples], the rows of `pool` that these peers train on,
    in order, and their labels. ends: the end of each step in that order. mean: whether a step minimises the
    mean of its samples' losses, or their sum. steps_taken: steps that the optimizers have taken before.
    priors: [peers, classes], added to the outputs before the loss; None for none.
    """

    pool: Tensor
    index: Tensor
    labels: Tensor
    ends: list[int]
    rule: UpdateRule
    mean: bool
    steps_taken: int
    priors: Tensor | None = None

    def steps(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield for every step its number, from 1, and its [peers, batch] of `index` and of `labels`."""
        ranges = enumerate(pairwise((0, *self.ends)), start=self.steps_taken + 1)
        for number, (begin, end) in ranges:
            yield number, self.index[:, begin:end], self.labels[:, begin:end]


# An engine runs networks of one architecture. `rows` are some peers' rows of a stack; `activations` is the
# number of values that one sample needs in a forward and backward pass. `train` changes the rows in place
# and returns the outputs of all steps, priors added, in either form that `score` accepts; `outputs` returns
# [peers, samples, classes], without priors.

# --- the kernel -----------------------------------------------------------------------------------


def _script(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with TorchScript if possible; otherwise return it as it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(function)
    except (AttributeError, RuntimeError, OSError):  # no TorchScript, or no source to read
        return function


@_script
def _draw_epochs(generators: list[Generator], samples: list[int], epochs: list[int]) -> Tensor:
    """Return the orders of some epochs of each learner, one after the other.

    Compiled by TorchScript, it does not hold the interpreter lock, so that threads draw in parallel.
    """
    drawn: list[Tensor] = []
    for learner, generator in enumerate(generators):
        for _ in range(epochs[learner]):
            drawn.append(torch.randperm(samples[learner], generator=generator))
    return torch.cat(drawn)


@_script
def _draw_words(generators: list[Generator], steps: list[int]) -> Tensor:
    """Return the random numbers with which each generator makes some steps of permutations; see `permute`."""
    words = torch.empty(sum([(count + 1) // 2 for count in steps]), dtype=torch.int64)
    begin = 0
    for learner, count in enumerate(steps):
        generator = generators[learner]
        end = begin + count // 2
        words[begin:end].random_(-9223372036854775807 - 1, None, generator=generator)
        if count % 2 == 1:  # the last step of an epoch, which is between two samples
            words[end].random_(0, 2, generator=generator).mul_(4294967296)
        begin = end + count % 2
    return words


def _permute(generators: list[Generator], samples: list[int], epochs: list[int]) -> Tensor:
    """Do as `_draw_epochs` with the compiled kernel: one call per learner instead of one per epoch."""
    steps = [(count - 1) * number for count, number in zip(samples, epochs, strict=True)]
    words = _draw_words(generators, steps).numpy()
    sizes = [count * number for count, number in zip(samples, epochs, strict=True)]
    orders = np.empty(sum(sizes), np.int64)
    fused_kernel().permute(words, np.array(samples), np.array(epochs), orders)
    return torch.from_numpy(orders)


@cache
def _permutes_as_torch() -> bool:
    """Return whether `_permute` returns what torch.randperm does, which no version of torch promises."""
    drawn = [
        function([torch.Generator().manual_seed(seed) for seed in range(3)], [1, 2, 101], [2, 3, 3])
        for function in (_draw_epochs, _permute)
    ]
    return torch.equal(*drawn)


def draw_orders(learners: Sequence[SgdLearner], count: int, *, fused: bool = False) -> Tensor:
    """Draw like `SgdLearner.draw` for many learners; return sample indices, [learners, count].

    fused: draw with the compiled kernel, which must be there.
    """
    samples = [learner.sample_count for learner in learners]
    missing = [max(0, count - len(learner.order)) for learner in learners]
    epochs = [ceil(number / size) for number, size in zip(missing, samples, strict=True)]
    drawn = np.empty(0, np.int64)
    if any(epochs):
        # For a single epoch or two, torch is as fast.
        bulk = fused and sum(epochs) > 2 * len(epochs) and _permutes_as_torch()
        draw = _permute if bulk else _draw_epochs
        drawn = draw([learner.generator for learner in learners], samples, epochs).numpy()
    orders, begin = np.empty((len(learners), count), np.int64), 0
    for row, learner, number, size in zip(
        orders, learners, missing, map(mul, samples, epochs), strict=True
    ):
        old, new = learner.order, drawn[begin : begin + size]
        row[: count - number], row[count - number :] = old[:count], new[:number]
        learner.order = new[number:] if number else old[count:]
        begin += size
    return torch.from_numpy(orders)


@_script
def computes_transposed(samples: int, cells: int) -> bool:
    """Return whether to compute a layer transposed: few columns are slower than few rows."""
    return cells < 16 and samples >= 16


@_script
def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x · weightᵀ + bias; an empty tensor means no bias."""
    if computes_transposed(x.size(-2), weight.size(-2)):
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
def add_product(target: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Compute target += scale · left · right, in place."""
    if target.dim() == 3:
        target.baddbmm_(left, right, beta=1.0, alpha=scale)
    else:
        target.addmm_(left, right, beta=1.0, alpha=scale)


@_script
def activate(z: Tensor, activation: int, prelu_slope: Tensor) -> Tensor:
    """Apply an activation function, in place except for PReLU."""
    if activation == 1:  # sigmoid
        return z.sigmoid_()
    if activation == 2:  # tanh
        return z.tanh_()
    if activation == 3:  # ReLU
        return z.clamp_(min=0.0)
    if activation == 4:  # PReLU
        return torch.where(z > 0, z, z * prelu_slope)
    return z


@_script
def forward(
    values: list[Tensor],
    layers: list[list[int]],
    x: Tensor,
    first_z: Tensor,
    prelu_inputs: list[Tensor],
) -> list[Tensor]:
    """Return every layer's outputs.

    first_z: the result of layer 0 before its activation, if the caller has computed it; else empty.
    Appends to `prelu_inputs`, for every layer, the input of its PReLU, or an empty tensor.
    """
    empty = x.new_empty([0])
    layer_outputs: list[Tensor] = []
    for index, layer in enumerate(layers):
        if index == 0 and first_z.numel() > 0:
            z = first_z
        else:
            z = affine(x, values[layer[0]], values[layer[1]] if layer[1] >= 0 else empty)
        prelu_inputs.append(z if layer[2] == 4 else empty)
        x = activate(z, layer[2], values[layer[3]] if layer[3] >= 0 else empty)
        layer_outputs.append(x)
    return layer_outputs


@_script
def loss_gradient(outputs: Tensor, labels: Tensor, loss: int) -> Tensor:
    """Return the gradient of the summed loss with respect to the outputs: prediction − one-hot label."""
    single = outputs.size(-1) == 1
    if loss == 0:  # squared error
        gradient = outputs.clone()
    elif single:  # cross-entropy of one logit
        gradient = outputs.sigmoid()
    else:  # cross-entropy
        gradient = outputs.softmax(-1)
    label_index = labels.unsqueeze(-1)
    if single:
        return gradient.sub_(label_index)
    minus_one = gradient.new_full([1], -1.0)
    return gradient.scatter_add_(-1, label_index, minus_one.expand_as(label_index))


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
    first_z: Tensor,
    priors: Tensor,
) -> tuple[Tensor, Tensor]:
    """Take one step; return the outputs and δ, the gradient with respect to layer 0 before its activation.

    priors: one row for every peer, added to the outputs; an empty tensor for none.
    If `gradients` is not empty, the gradients of `values` are written there, and values do not change; if it
    is empty, values take a step of plain SGD. If `first_z` is not empty, it is the result of layer 0 before
    its activation, and the caller updates that layer's weight and bias.
    """
    writes_gradients = len(gradients) > 0
    prelu_inputs: list[Tensor] = []
    layer_outputs = forward(values, layers, x, first_z, prelu_inputs)
    outputs = layer_outputs[-1]
    if priors.numel() > 0:
        outputs = outputs + priors
    delta = loss_gradient(outputs, labels, loss)
    if mean:
        delta = delta.div_(outputs.size(-2))
    ones = x.new_ones([1, x.size(-2)])
    if x.dim() == 3:
        ones = ones.expand([x.size(0), 1, x.size(1)])
    for layers_done in range(len(layers)):  # backwards; TorchScript has no `reversed`
        index = len(layers) - 1 - layers_done
        layer = layers[index]
        output = layer_outputs[index]
        activation = layer[2]
        if activation == 1:  # sigmoid
            delta = delta.mul_(output)
            delta = delta.addcmul_(delta, output, value=-1.0)
        elif activation == 2:  # tanh
            delta = delta.addcmul_(delta * output, output, value=-1.0)
        elif activation == 3:  # ReLU
            delta = delta.mul_(output > 0)
        elif activation == 4:  # PReLU
            prelu_slope, z = values[layer[3]], prelu_inputs[index]
            negative = z <= 0
            slope_gradient = (delta * z * negative).sum(-2, keepdim=True)
            if prelu_slope.size(-1) == 1:
                slope_gradient = slope_gradient.sum(-1, keepdim=True)
            delta = torch.where(negative, delta * prelu_slope, delta)
            if writes_gradients:
                gradients[layer[3]].copy_(slope_gradient)
            else:
                prelu_slope.sub_(slope_gradient, alpha=rate)
        if index == 0 and first_z.numel() > 0:
            break  # the caller updates layer 0
        input_delta = delta
        if index > 0:
            input_delta = torch.matmul(delta, values[layer[0]])
        layer_input = layer_outputs[index - 1] if index > 0 else x
        if writes_gradients:
            gradients[layer[0]].copy_(torch.matmul(delta.mT, layer_input))
            if layer[1] >= 0:
                gradients[layer[1]].copy_(torch.matmul(ones, delta))
        else:
            add_product(values[layer[0]], delta.mT, layer_input, -rate)
            if layer[1] >= 0:
                add_product(values[layer[1]], ones, delta, -rate)
        if index > 0:
            delta = input_delta
    return outputs, delta


@_script
def descend(
    values: list[Tensor],
    layers: list[list[int]],
    pool: Tensor,
    index: Tensor,
    labels: Tensor,
    ends: list[int],
    steps_per_block: int,
    loss: int,
    mean: bool,
    rate: float,
    priors: Tensor,
) -> list[Tensor]:
    """Train by plain SGD until the next averaging; return the outputs of every step.

    index, labels, ends: see TrainingJob. steps_per_block: how many steps share one update of the first
    layer's weights (see "Deferred steps" above); 1 defers nothing. priors: see `step`.
    """
    several_peers = index.size(0) > 1
    empty = pool.new_empty([0])
    no_gradients: list[Tensor] = []
    outputs_of_steps: list[Tensor] = []
    step_begin = 0
    for block in range((len(ends) + steps_per_block - 1) // steps_per_block):
        step_ends = ends[block * steps_per_block : (block + 1) * steps_per_block]
        begin, end = step_begin, step_ends[-1]
        inputs = pool.index_select(0, index[:, begin:end].reshape(-1))
        if several_peers:
            inputs = inputs.view(index.size(0), end - begin, -1)
        deferred = steps_per_block > 1 and len(step_ends) > 1
        weight = values[layers[0][0]]
        bias = values[layers[0][1]] if layers[0][1] >= 0 else empty
        # For all samples of the block: layer 0 before its activation, products of inputs, and δ.
        block_z, products, deltas = empty, empty, empty
        if deferred:
            block_z = affine(inputs, weight, bias)
            deltas = torch.empty_like(block_z)
            products = torch.matmul(inputs, inputs.mT)
            if bias.numel() > 0:
                products += 1.0  # a bias is a weight from an input that is always 1
        for step_end in step_ends:
            a, b = step_begin - begin, step_end - begin
            first_z = empty
            if deferred:
                first_z = block_z[..., a:b, :]
                if a > 0:
                    add_product(first_z, products[..., a:b, :a], deltas[..., :a, :], -rate)
            step_labels = labels[:, step_begin:step_end]
            step_labels = step_labels if several_peers else step_labels[0]
            x = inputs[..., a:b, :]
            outputs, delta = step(
                values, layers, x, step_labels, loss, mean, rate, no_gradients, first_z, priors
            )
            if deferred:
                deltas[..., a:b, :] = delta
            outputs_of_steps.append(outputs)
            step_begin = step_end
        if deferred:
            add_product(weight, deltas.mT, inputs, -rate)
            if bias.numel() > 0:
                bias.sub_(deltas.sum(-2, keepdim=True), alpha=rate)
    return outputs_of_steps


# --- chains of Linear layers --------------------------------------------------------------------

_ACTIVATIONS: dict[type[nn.Module], int] = {nn.Sigmoid: 1, nn.Tanh: 2, nn.ReLU: 3, nn.PReLU: 4}


@dataclass(frozen=True)
class Chain:
    """A chain of Linear layers and activations."""

    layers: tuple[tuple[int, ...], ...]
    """The layers as described at the top of this file: (weight, bias, activation, PReLU slope)."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of every parameter, in the module's order."""


def read_chain(module: nn.Module, loss: Loss) -> Chain | None:
    """Return a module as a chain; None if it is no chain, or if the kernel does not support the loss."""
    if loss not in (squared_error, cross_entropy) or any(map(has_hooks, module.modules())):
        return None
    layers: list[list[int]] = []
    shapes: list[tuple[int, ...]] = []
    for _, leaf in leaves(module):
        layer_type, parameter = type(leaf), len(shapes)
        shapes += [tuple(value.shape) for value in leaf.parameters()]
        if layer_type is nn.Linear:
            has_bias = len(shapes) > parameter + 1
            layers.append([parameter, parameter + 1 if has_bias else -1, 0, -1])
        elif layer_type in _ACTIVATIONS and layers and not layers[-1][2]:
            slope = parameter if layer_type is nn.PReLU else -1
            layers[-1][2:] = _ACTIVATIONS[layer_type], slope
        elif layer_type is nn.Flatten and isinstance(leaf, nn.Flatten):
            if layers or (leaf.start_dim, leaf.end_dim) != (1, -1):
                return None
        elif layer_type is not nn.Identity:
            return None
    total = sum(value.numel() for value in module.parameters())
    if not layers or total != sum(prod(shape) for shape in shapes):  # a layer that is used twice
        return None
    return Chain(tuple(tuple(layer) for layer in layers), tuple(shapes))


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward or backward hooks; torch has no public function that tells."""
    attributes = vars(module).items()
    return any(v for key, v in attributes if key.endswith("hooks") and "state_dict" not in key)


@cache
def fused_kernel() -> Any:
    """Return the module fused.py; None without numba, or where numba cannot store what it compiles."""
    try:
        return import_module(".fused", __package__)
    except (ImportError, RuntimeError):
        return None


class ChainEngine:
    """Runs chains of Linear layers and activations as batched matrix products."""

    def __init__(self, chain: Chain, loss: Loss):
        self._layers = [list(layer) for layer in chain.layers]
        self._shapes = [shape if len(shape) == 2 else (1, *shape) for shape in chain.shapes]
        self._sizes = [prod(shape) for shape in chain.shapes]
        self._loss = 0 if loss is squared_error else 1
        widths = [chain.shapes[layer[0]][0] for layer in chain.layers]
        self.activations = 2 * sum(widths) + chain.shapes[0][1]
        begins = [0, *accumulate(self._sizes)]
        places = [[begins[w], begins[b] if b >= 0 else -1] for w, b, *_ in chain.layers]
        # The network in the tables that fused.py reads; None if it has PReLUs or a single output.
        self._fused: tuple[Any, ...] | None = None
        if widths[-1] > 1 and all(layer[2] != 4 for layer in chain.layers):
            functions = [layer[2] for layer in chain.layers]
            tables = ([chain.shapes[0][1], *widths], places, functions)
            self._fused = tuple(np.array(table, np.int64) for table in tables)

    def is_fused(self, values: Tensor, pool: Tensor, rule: UpdateRule) -> bool:
        """Return whether the compiled kernel can train with these values and inputs; see `train_fused`."""
        fits = values.device.type == "cpu" and values.dtype == pool.dtype == torch.float32
        fits = fits and self._fused is not None and isinstance(rule, PlainRule)
        return fits and fused_kernel() is not None

    def are_classes(self, labels: Tensor) -> bool:
        """Return whether all labels are numbers of outputs, which torch checks and the kernel does not."""
        low, high = labels.aminmax()
        return self._fused is not None and int(low) >= 0 and int(high) < self._fused[0][-1]

    def train_fused(self, values: Tensor, rows: Sequence[int], job: TrainingJob) -> list[Metrics]:
        """Train some rows of a stack in place with the compiled kernel."""
        assert self._fused is not None
        assert isinstance(job.rule, PlainRule)
        priors = job.pool.new_empty(0, 0) if job.priors is None else job.priors
        pool = job.pool.flatten(1)
        pool = pool if pool.stride(1) == 1 else pool.contiguous()
        totals, counts = fused_kernel().train(
            values.numpy(), np.asarray(rows), *self._fused, pool.numpy(), job.index.numpy(),
            job.labels.numpy(), np.array(job.ends), self._loss, job.mean, job.rule.rate, priors.numpy(),
        )  # fmt: skip
        pairs = zip(totals.tolist(), counts.tolist(), strict=True)
        return [Metrics(total, count, job.labels.shape[1]) for total, count in pairs]

    def train(self, rows: Tensor, state: list[Tensor], job: TrainingJob) -> Tensor:
        stacked = [rows, *state]
        values, *states = [self._parameters(tensor) for tensor in stacked]
        pool, priors = job.pool.flatten(1), self._priors(job)
        if isinstance(job.rule, PlainRule):
            cells, inputs = self._shapes[0]
            steps_per_block = plan.deferred_steps(rows.shape[1], cells, inputs, job.ends[0])
            outputs_of_steps = descend(
                values, self._layers, pool, job.index, job.labels, job.ends, steps_per_block,
                self._loss, job.mean, job.rule.rate, priors,
            )  # fmt: skip
        else:
            outputs_of_steps = self._train_by_gradients(values, states, pool, job, priors)
        if _is_packed(rows):
            for tensor, parameters in zip(stacked, (values, *states), strict=True):
                for block, trained in zip(tensor.split(self._sizes, 1), parameters, strict=True):
                    block.copy_(trained.reshape(block.shape))
        if len(rows) == 1:
            return torch.cat(outputs_of_steps)[None]
        first = outputs_of_steps[0]
        if all(outputs.shape == first.shape for outputs in outputs_of_steps):
            if first.stride(-1) == 1:
                return torch.stack(outputs_of_steps)
            # Outputs computed transposed stay in that memory order, because reordering is slower than
            # stacking.
            return torch.stack([outputs.mT for outputs in outputs_of_steps]).mT
        return torch.cat(outputs_of_steps, dim=1)

    def outputs(self, rows: Tensor, inputs: Tensor) -> Tensor:
        x = inputs.flatten(2) if len(rows) > 1 else inputs.flatten(2)[0]
        outputs = forward(self._parameters(rows), self._layers, x, x.new_empty(0), [])[-1]
        return outputs if len(rows) > 1 else outputs[None]

    def _train_by_gradients(
        self,
        values: list[Tensor],
        state: list[list[Tensor]],
        pool: Tensor,
        job: TrainingJob,
        priors: Tensor,
    ) -> list[Tensor]:
        """Train by an update rule that needs gradients; return the outputs of every step."""
        gradients = [torch.empty_like(value) for value in values]
        no_first_z, outputs_of_steps = pool.new_empty(0), []
        for number, index, labels in job.steps():
            x = pool.index_select(0, index.reshape(-1))
            if len(index) > 1:
                x = x.view(*index.shape, -1)
            else:
                labels = labels[0]
            outputs, _ = step(
                values, self._layers, x, labels, self._loss, job.mean, 0.0, gradients, no_first_z,
                priors,
            )  # fmt: skip
            job.rule.step(values, gradients, state, number)
            outputs_of_steps.append(outputs)
        return outputs_of_steps

    def _priors(self, job: TrainingJob) -> Tensor:
        """Return a job's priors as the kernel adds them: [peers, 1, classes]; [1, classes] for one peer."""
        if job.priors is None:
            return job.pool.new_empty(0)
        return job.priors[:, None] if len(job.priors) > 1 else job.priors

    def _parameters(self, rows: Tensor) -> list[Tensor]:
        """Return every parameter as [peers, …] (for one peer without that axis); biases get one row."""
        blocks = zip(rows.split(self._sizes, 1), self._shapes, strict=True)
        if _is_packed(rows):
            return [
                block.clone(memory_format=torch.contiguous_format).view(-1, *shape)
                for block, shape in blocks
            ]
        return [b.unflatten(1, shape) if len(rows) > 1 else b.view(shape) for b, shape in blocks]


def _is_packed(rows: Tensor) -> bool:
    """Return whether parameters are copied to contiguous memory for training: those of small networks."""
    return len(rows) > 1 and rows.shape[1] < plan.LARGE_NETWORK


# --- any module ---------------------------------------------------------------------------------


class ModuleEngine:
    """Runs any module without buffers or random numbers, by functional_call under vmap."""

    def __init__(self, network: SlicedNetwork, loss: Loss, sample: Tensor, device: torch.device):
        self._module, self._loss, self._device = network.module, loss, device
        self._parameters = network.slicing.anatomy.views
        self._thread_local = threading.local()
        # A rough guess, as the size of what a module saves for its backward pass is unknown.
        self.activations = 16 * sample[0].numel()

    def train(self, rows: Tensor, state: list[Tensor], job: TrainingJob) -> Tensor:
        values = self._parameters(rows)
        states = [list(self._parameters(tensor).values()) for tensor in state]
        prior_axis = None if job.priors is None else 0
        gradients_of = vmap(
            grad(self._loss_function(job.mean), has_aux=True), in_dims=(0, 0, 0, prior_axis)
        )
        outputs_of_steps: list[Tensor] = []
        for number, index, labels in job.steps():
            gradients, outputs = gradients_of(values, job.pool[index], labels, job.priors)
            ordered = [gradients[name] for name in values]
            job.rule.step(list(values.values()), ordered, states, number)
            outputs_of_steps.append(outputs)
        return torch.cat(outputs_of_steps, dim=1)

    @torch.no_grad()
    def outputs(self, rows: Tensor, inputs: Tensor) -> Tensor:
        module = self._module_of_thread().eval()
        return vmap(lambda values, x: functional_call(module, values, (x,)))(
            self._parameters(rows), inputs
        )

    def can_stack(self, rows: Tensor, inputs: Tensor, labels: Tensor) -> bool:
        """Return whether vmap supports this module, by trying one gradient (on copies) and one test."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # vmap warns when it falls back to a loop
                values = {name: value.clone() for name, value in self._parameters(rows).items()}
                vmap(grad(self._loss_function(False), has_aux=True))(values, inputs, labels)
                # Some modules run other code in eval mode.
                self.outputs(rows, inputs)
        except (RuntimeError, ValueError, TypeError, UserWarning):
            return False
        return True

    def _loss_function(self, mean: bool) -> Any:
        """Return a function of parameters and samples that returns (loss, outputs), for torch's `grad`."""
        module, loss = self._module_of_thread().train(), self._loss

        def loss_and_outputs(
            values: dict[str, Tensor], x: Tensor, y: Tensor, prior: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            outputs = functional_call(module, values, (x,))
            if prior is not None:
                outputs = outputs + prior
            losses = loss(outputs, y)
            return (losses.mean() if mean else losses.sum()), outputs

        return loss_and_outputs

    def _module_of_thread(self) -> nn.Module:
        """Return this thread's copy: functional_call replaces a module's parameters while it runs."""
        if not hasattr(self._thread_local, "module"):
            self._thread_local.module = deepcopy(self._module).to(self._device)
        return self._thread_local.module


Engine = ChainEngine | ModuleEngine

# --- scores -------------------------------------------------------------------------------------


def score(
    outputs: Tensor, labels: Tensor, loss: Loss, is_correct: IsCorrect | None = None
) -> list[Metrics]:
    """Return every peer's metrics, from labels [peers, samples], as `SgdLearner.test` would count them.

    Outputs are [peers, samples, classes], or [steps, peers, batch, classes] as training returns them.
    is_correct: the argument `right` of the learners, if given. With it, and with float targets, outputs and
    labels are [peers, samples, …].
    """
    if is_correct is not None or labels.is_floating_point():
        pairs = zip(outputs, labels, strict=True)
        return [_score_one(scores, targets, loss, is_correct) for scores, targets in pairs]
    peers, samples = labels.shape
    classes, peer_axis = outputs.shape[-1], outputs.ndim - 3
    if peer_axis:
        labels = labels.view(peers, outputs.shape[0], -1).transpose(0, 1).contiguous()
    if classes == 1:
        correct = (outputs[..., 0] > decision_threshold(loss)) == (labels > 0)
    else:
        correct = _is_label_largest(outputs, labels)
    if loss is squared_error:  # the same value, computed without one-hot labels
        single = classes == 1
        errors = outputs - labels[..., None] if single else _add_at_labels(outputs, labels, -1.0)
        losses = errors.square_().sum(dim=-1).mul_(0.5)
    else:
        losses = loss(outputs.reshape(-1, classes), labels.reshape(-1)).view(labels.shape)
    other_axes = tuple(axis for axis in range(labels.ndim) if axis != peer_axis)
    totals = losses.sum(dim=other_axes, dtype=torch.float64).tolist()
    counts = correct.sum(dim=other_axes).tolist()
    return [Metrics(total, count, samples) for total, count in zip(totals, counts, strict=True)]


def _score_one(
    outputs: Tensor, labels: Tensor, loss: Loss, is_correct: IsCorrect | None
) -> Metrics:
    """Return the metrics of one peer; users' functions expect the outputs of one network."""
    total = float(loss(outputs, labels).sum(dtype=torch.float64))
    correct = nan if is_correct is None else int(is_correct(outputs, labels).sum())
    return Metrics(total, correct, len(labels))


def _is_label_largest(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return whether the largest output is the label's; of equal outputs the first counts.

    In torch `amax` is much faster than `argmax`, which is only needed in ties and with NaN: when the label's
    output is neither greater nor less than the largest of the others.
    """
    at_label = outputs.gather(-1, labels[..., None])[..., 0]
    largest_other = _add_at_labels(outputs, labels, -torch.inf).amax(dim=-1)
    correct = at_label > largest_other
    if bool((correct | (at_label < largest_other)).all()):
        return correct
    return outputs.max(dim=-1).indices == labels


def _add_at_labels(outputs: Tensor, labels: Tensor, change: float) -> Tensor:
    """Return a copy of outputs with `change` added to each label's output; faster than assigning there."""
    index = labels[..., None]
    return outputs.clone().scatter_add_(-1, index, outputs.new_full((1,), change).expand_as(index))
