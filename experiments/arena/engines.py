"""What runs some peers of a stack through their network: batched products, or vmap for any module."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from ...models import Loss
from .chain import Chain, Pass
from .rules import Plain, Rule

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Stretch:
    """What some peers learn before the next averaging.

    pool: samples of all peers. index, labels: [peers, samples] for these peers, in their order.
    spans: where each step begins and ends in that order. count: steps that were taken before.
    """

    pool: Tensor
    index: Tensor
    labels: Tensor
    spans: Spans
    rule: Rule
    mean: bool
    count: int


class Engine(Protocol):
    """Runs networks of one architecture; `rows` are some peers' rows of a stack."""

    activations: int
    """Values that one sample fills on its way through the network and back."""

    def train(self, rows: Tensor, state: list[Tensor], work: Stretch) -> Tensor:
        """Train in place; the outputs seen on the way, in either form that `score` reads."""
        ...

    def outputs(self, rows: Tensor, inputs: Tensor) -> Tensor:
        """Outputs [peers, samples, classes] for inputs [peers, samples, …]."""
        ...


class ChainEngine:
    """Linear layers and activations as batched matrix products."""

    def __init__(self, chain: Chain, loss: Loss):
        self._chain, self._loss = chain, loss
        self.activations = 2 * sum(chain.cells) + chain.shapes[0][1]

    def train(self, rows: Tensor, state: list[Tensor], work: Stretch) -> Tensor:
        run = Pass(self._chain, rows, self._loss, state)
        pool, ends = work.pool.flatten(1), [last for _, last in work.spans]
        if isinstance(work.rule, Plain):
            seen = run.descend(pool, work.index, work.labels, ends, work.rule, work.mean)
        else:
            seen = run.follow(pool, work.index, work.labels, ends, work.rule, work.mean, work.count)
        run.finish()
        if len(rows) == 1:
            return torch.cat(seen)[None]
        if all(outputs.shape == seen[0].shape for outputs in seen):
            if seen[0].stride(-1) == 1:
                return torch.stack(seen)
            # Transposed ones stay so: turning them costs more than copying.
            return torch.stack([outputs.mT for outputs in seen]).mT
        return torch.cat(seen, dim=1)

    def outputs(self, rows: Tensor, inputs: Tensor) -> Tensor:
        return Pass(self._chain, rows, self._loss).outputs(inputs.flatten(2))


class ModuleEngine:
    """Any module without buffers or randomness, by functional_call under vmap."""

    def __init__(self, module: nn.Module, loss: Loss, sample: Tensor, device: torch.device):
        self._module, self._loss = module, loss
        self._own = threading.local()
        self._device = device
        self._shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
        # What a module keeps for its backward pass is not known; some multiples of its input are.
        self.activations = 16 * sample[0].numel()

    def train(self, rows: Tensor, state: list[Tensor], work: Stretch) -> Tensor:
        values = self._pieces(rows)
        names = list(values)
        held = [list(self._pieces(slot).values()) for slot in state]
        descend = vmap(grad(self._loss_of(work.mean), has_aux=True))
        seen: list[Tensor] = []
        for number, (first, last) in enumerate(work.spans, start=1):
            inputs = work.pool[work.index[:, first:last]]
            gradients, outputs = descend(values, inputs, work.labels[:, first:last])
            ordered = [gradients[name] for name in names]
            work.rule.step(list(values.values()), ordered, held, work.count + number)
            seen.append(outputs)
        return torch.cat(seen, dim=1)

    @torch.no_grad()
    def outputs(self, rows: Tensor, inputs: Tensor) -> Tensor:
        module = self._skeleton().eval()
        return vmap(lambda values, x: functional_call(module, values, (x,)))(
            self._pieces(rows), inputs
        )

    def objection(self, rows: Tensor, inputs: Tensor, labels: Tensor) -> str | None:
        """Why this module cannot be stacked, found out by one step that changes nothing, and one test."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # that vmap would fall back to a loop of its own
                values = {name: value.clone() for name, value in self._pieces(rows).items()}
                vmap(grad(self._loss_of(False), has_aux=True))(values, inputs, labels)
                # Some modules take another way when they are not trained.
                self.outputs(rows, inputs)
        except (RuntimeError, ValueError, TypeError, UserWarning) as error:
            return str(error).split("\n")[0][:100]
        return None

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
        pieces: dict[str, Tensor] = {}
        offset = 0
        for name, shape in self._shapes.items():
            size = prod(shape)
            pieces[name] = rows[:, offset : offset + size].unflatten(1, shape or (1,))
            offset += size
        return pieces
