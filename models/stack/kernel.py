"""The innermost loop: steps of descent through a chain of Linear layers, by torch's own interpreter.

Every function here is plain Python in the subset that TorchScript reads. Scripted, all that some peers
train between two averagings is one call that neither waits for Python's interpreter nor keeps other
threads from it; without TorchScript (it is deprecated, and may go) the same functions run as they are,
slower.

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

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor


def _script(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(function)
    except (AttributeError, RuntimeError, OSError):  # no TorchScript, or no source to read
        return function


@_script
def draw(
    orders: list[Tensor], generators: list[Generator], samples: list[int], count: int
) -> tuple[Tensor, list[Tensor]]:
    """What `SgdLearner.draw` takes for each of some learners, [learners, count], and what it leaves."""
    chosen: list[Tensor] = []
    left: list[Tensor] = []
    for place, order in enumerate(orders):
        if order.size(0) < count:
            epochs = [order]
            for _ in range((count - order.size(0) + samples[place] - 1) // samples[place]):
                epochs.append(torch.randperm(samples[place], generator=generators[place]))
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
