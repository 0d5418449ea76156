"""Chains of Linear layers as batched matrix products, forward and backward (kernel.py does them).

A `Chain` reads a module once; `Pass` runs it for some peers. Large peers are worked on in place, in
their rows of the stack, with matrix products that fill the processor by themselves. Small ones are
first packed layer by layer, because batched products of small matrices want each layer contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from ...models import Loss, cross_entropy, squared_error
from . import kernel, plan
from .rules import Plain, Rule

_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.ReLU: "relu",
    nn.Identity: "none",
    nn.PReLU: "prelu",
}


@dataclass(frozen=True)
class Layer:
    """A Linear layer and its activation; places are indices into `Chain.shapes`."""

    weight: int
    bias: int | None
    activation: str
    slope: int | None


@dataclass(frozen=True)
class Chain:
    """What a module computes, if it is a chain of Linear layers and activations."""

    layers: tuple[Layer, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of every parameter, in the module's order."""

    @property
    def cells(self) -> list[int]:
        """Outputs of every layer."""
        return [self.shapes[layer.weight][0] for layer in self.layers]

    @property
    def numbers(self) -> list[list[int]]:
        """The layers as the kernel reads them."""
        return [
            [
                layer.weight,
                -1 if layer.bias is None else layer.bias,
                kernel.ACTIVATIONS.index(layer.activation),
                -1 if layer.slope is None else layer.slope,
            ]
            for layer in self.layers
        ]


def read_chain(module: nn.Module, loss: Loss) -> Chain | None:
    """The chain that a module is, or None: then it has to be run by its own code."""
    if loss not in (squared_error, cross_entropy):
        return None
    layers: list[Layer] = []
    shapes: list[tuple[int, ...]] = []
    for leaf in _leaves(module):
        kind = type(leaf)
        if leaf._forward_hooks or leaf._forward_pre_hooks or leaf._backward_hooks:
            return None
        if kind is nn.Linear:
            places = list(range(len(shapes), len(shapes) + len(list(leaf.parameters()))))
            layers.append(Layer(places[0], places[1] if len(places) > 1 else None, "none", None))
        elif kind is nn.Flatten and not layers and (leaf.start_dim, leaf.end_dim) == (1, -1):  # type: ignore[attr-defined]
            continue
        elif kind not in _ACTIVATIONS:
            return None
        elif kind is not nn.Identity:
            if not layers or layers[-1].activation != "none":
                return None
            slope = len(shapes) if kind is nn.PReLU else None
            last = layers[-1]
            layers[-1] = Layer(last.weight, last.bias, _ACTIVATIONS[kind], slope)
        shapes += [tuple(parameter.shape) for parameter in leaf.parameters()]
    whole = sum(parameter.numel() for parameter in module.parameters())
    if not layers or whole != sum(prod(shape) for shape in shapes):  # a layer that is used twice
        return None
    return Chain(tuple(layers), tuple(shapes))


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential:
        for child in module:
            yield from _leaves(child)
    else:
        yield module


class Pass:
    """Some peers' chains, ready to run: `rows` are their rows of the stack, [peers, coordinates].

    `state` are the same rows of the optimizer's state. Call `finish` after training.
    """

    def __init__(self, chain: Chain, rows: Tensor, loss: Loss, state: list[Tensor] | None = None):
        self._chain, self._rows = chain, rows
        self._loss = 0 if loss is squared_error else 1
        self._many = len(rows) > 1
        self._packed = self._many and rows.shape[1] < plan.ALONE
        self._layers = chain.numbers
        self._sources = [rows, *(state or [])]
        self._values = self._pieces(rows)
        self._state = [self._pieces(slot) for slot in state or []]

    def finish(self) -> None:
        """Put packed values back into the stack."""
        if self._packed:
            for rows, pieces in zip(self._sources, (self._values, *self._state), strict=True):
                offset = 0
                for piece in pieces:
                    size = piece[0].numel()
                    rows[:, offset : offset + size] = piece.reshape(len(rows), size)
                    offset += size

    def outputs(self, inputs: Tensor) -> Tensor:
        """Outputs for inputs [peers, samples, features]."""
        x = inputs if self._many else inputs[0]
        found = kernel.forward(self._values, self._layers, x, x.new_empty(0), [])[-1]
        return found if self._many else found[None]

    def descend(
        self, pool: Tensor, index: Tensor, labels: Tensor, ends: list[int], rule: Plain, mean: bool
    ) -> list[Tensor]:
        """A whole stretch of plain descent; the outputs of every step."""
        shape = self._chain.shapes[0]
        together = plan.deferred_steps(self._rows.shape[1], shape[0], shape[1], ends[0])
        return kernel.descend(
            self._values,
            self._layers,
            pool,
            index,
            labels,
            ends,
            together,
            self._loss,
            mean,
            rule.rate,
        )

    def follow(
        self,
        pool: Tensor,
        index: Tensor,
        labels: Tensor,
        ends: list[int],
        rule: Rule,
        mean: bool,
        count: int,
    ) -> list[Tensor]:
        """A whole stretch by a rule that wants gradients; `count` steps were taken before."""
        gradients = [torch.empty_like(value) for value in self._values]
        nothing, seen, first = pool.new_empty(0), [], 0
        for number, last in enumerate(ends, start=1):
            x = pool.index_select(0, index[:, first:last].reshape(-1))
            goal = labels[:, first:last]
            if self._many:
                x = x.view(len(index), last - first, -1)
            else:
                goal = goal[0]
            outputs, _ = kernel.step(
                self._values, self._layers, x, goal, self._loss, mean, 0.0, gradients, nothing
            )
            rule.step(self._values, gradients, self._state, count + number)
            seen.append(outputs)
            first = last
        return seen

    def _pieces(self, rows: Tensor) -> list[Tensor]:
        """Every parameter as [peers, …] (no peers axis for one), vectors as one row."""
        pieces: list[Tensor] = []
        offset = 0
        for shape in self._chain.shapes:
            size, shape = prod(shape), shape if len(shape) == 2 else (1, *shape)
            block = rows[:, offset : offset + size]
            if self._packed:
                pieces.append(block.clone(memory_format=torch.contiguous_format).view(-1, *shape))
            else:
                pieces.append(block.unflatten(1, shape) if self._many else block.view(shape))
            offset += size
        return pieces
