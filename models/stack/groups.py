"""Groups of learners that train together: equal ones share a stack, the rest run one by one.

Chains of Linear layers are batched matrix products, forward and backward (kernel.py does them). Large
networks are worked on in place, in their rows of the stack, with products that fill the processor by
themselves; small ones are first packed layer by layer, because batched products of small matrices want
each layer contiguous. Any other module runs under torch's vmap.
"""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from .. import AssociativeLearner, Loss, Right, cross_entropy, squared_error
from ..discovery import CONVOLUTIONS
from ..learner import Learner, Metrics, Plain, SgdLearner, UpdateRule
from ..network import SlicedNetwork
from . import kernel, plan
from .stack import Alone, OptimizerStates, Pool, Stack, as_rows, draw, read_rule


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
        nothing, seen = pool.new_empty(0), []
        for number, index, goal in job.steps():
            x = pool.index_select(0, index.reshape(-1))
            if len(index) > 1:
                x = x.view(*index.shape, -1)
            else:
                goal = goal[0]
            outputs, _ = kernel.step(
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


Task = Callable[[], list[tuple[int, Metrics]]]
"""A piece of work for one thread: what it measured, by the learner's place among all learners."""

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module()))


class Group(ABC):
    """Learners that train together. `places` are theirs among all learners; rows follow that order."""

    def __init__(self, kind: Kind, learners: Sequence[Any], stack: Stack | None = None):
        self.places, self._learners, self.stacked = kind.places, list(learners), stack is not None
        self.stacks = [stack] if stack else [Alone(one.network) for one in learners]

    @abstractmethod
    def train(self, rows: Sequence[int], repeats: int) -> list[Task]:
        """Return the tasks of some peers' training, independent of each other.

        All of them must be run: the optimizers' steps are counted here.
        repeats: how often each trains as many samples as its learner does between two averagings.
        """

    @abstractmethod
    def test(self, rows: Sequence[int]) -> list[Task]:
        """Return the tasks of some peers' test."""

    def locate(self, row: int) -> tuple[Stack | Alone, int]:
        """Return the stack that holds a learner's network, and the row there."""
        return (self.stacks[0], row) if self.stacked else (self.stacks[row], 0)

    def refresh(self) -> None:
        """Take in what changed outside of the group."""
        for stack in self.stacks:
            stack.refresh()

    def publish(self) -> None:
        """Let learners on another device see what changed inside the group."""
        for stack in self.stacks:
            stack.publish()

    def release(self) -> None:
        """Give learners memory of their own again."""
        self.publish()
        for stack in self.stacks:
            stack.release()

    def _named(self, rows: Sequence[int], metrics: Sequence[Metrics]) -> list[tuple[int, Metrics]]:
        return [(self.places[row], found) for row, found in zip(rows, metrics, strict=True)]


class StackedGroup(Group):
    """Learners whose networks are rows of one stack."""

    def __init__(self, kind: Kind, learners: Sequence[Any], device: torch.device):
        self._stack, self._device = Stack([one.network for one in learners], device), device
        super().__init__(kind, learners, self._stack)
        self._values = self._stack.values

    @contextmanager
    def _rows(self, rows: Sequence[int], *more: Tensor) -> Iterator[list[Tensor]]:
        """Lend some peers' rows of the stack, and of what lies like it, to be changed in place."""
        where, held = as_rows(rows, self._device), (self._values, *more)
        lent = [whole[where] for whole in held]
        yield lent
        if not isinstance(where, slice):  # scattered rows were copied together
            for whole, part in zip(held, lent, strict=True):
                whole[where] = part


class SgdGroup(StackedGroup):
    """Stacked gradient descent: equal networks, losses, batches and optimizers; data of their own."""

    def __init__(
        self, kind: Kind, learners: Sequence[SgdLearner], engine: Engine, device: torch.device
    ):
        super().__init__(kind, learners, device)
        assert kind.rule is not None
        self._engine, shared = engine, self._stack.shared
        self._slots = OptimizerStates(self._learners, kind.rule, self._values, shared)
        self._samples = [Pool([one.samples[k] for one in learners], device) for k in (0, 1)]
        self._tests = [Pool([one.held_out[k] for one in learners], device) for k in (0, 1)]
        if shared:  # learners hold views of what was copied together
            for index, learner in enumerate(self._learners):
                learner.samples = self._samples[0].view(index), self._samples[1].view(index)
                learner.held_out = self._tests[0].view(index), self._tests[1].view(index)
        step = learners[0].batch * engine.activations
        self._size = plan.peers_per_task(len(learners), self._values.shape[1], step)

    def train(self, rows: Sequence[int], repeats: int) -> list[Task]:
        rule, alike = self._slots.rule(), _alike(rows, self._slots.taken)
        self._slots.count(rows, len(self._step_ends(repeats)))
        return [
            lambda rows=some, taken=taken: self._train(rows, repeats, rule, taken)
            for taken, same in alike
            for some in _cut(same, self._size)
        ]

    def test(self, rows: Sequence[int]) -> list[Task]:
        return [
            lambda rows=some: self._test(rows)
            for _, alike in _alike(rows, self._tests[1].counts)
            for some in _cut(alike, self._size)
        ]

    def refresh(self) -> None:
        super().refresh()
        self._slots.refresh()

    def publish(self) -> None:
        super().publish()
        self._slots.publish()

    def _train(
        self, rows: Sequence[int], repeats: int, rule: UpdateRule, taken: int
    ) -> list[tuple[int, Metrics]]:
        """Peers whose optimizers have taken so many steps."""
        learners = [self._learners[row] for row in rows]
        one, where = learners[0], as_rows(rows, self._device)
        order = draw(learners, repeats * one.local_samples).to(self._device)
        inputs, labels = self._samples
        index = order + inputs.starts[where, None]
        seen_labels = labels.rows[order + labels.starts[where, None]]
        mean, ends = one.reduction == "mean", self._step_ends(repeats)
        job = TrainingJob(inputs.rows, index, seen_labels, ends, rule, mean, taken)
        with self._rows(rows, *self._slots.values) as (values, *state):
            outputs = self._engine.train(values, state, job)
        return self._named(rows, score(outputs, seen_labels, one.loss, one.right))

    def _test(self, rows: Sequence[int]) -> list[tuple[int, Metrics]]:
        """Peers with equally many test samples."""
        one, (inputs, labels) = self._learners[0], self._tests
        values = self._values[as_rows(rows, self._device)]
        metrics = [Metrics()] * len(rows)
        # A thousand at once for one peer, as the learner itself does.
        some, samples = max(1, min(1000, plan.TEST_ROWS // len(rows))), labels.counts[rows[0]]
        for at in range(0, samples, some):
            count = min(some, samples - at)
            outputs = self._engine.outputs(values, inputs.window(rows, at, count))
            scores = score(outputs, labels.window(rows, at, count), one.loss, one.right)
            metrics = [a + b for a, b in zip(metrics, scores, strict=True)]
        return self._named(rows, metrics)

    def _step_ends(self, repeats: int) -> list[int]:
        """Where each gradient step ends; a batch does not reach beyond a repeat."""
        local, batch = self._learners[0].local_samples, self._learners[0].batch
        ends = [min(first + batch, local) for first in range(0, local, batch)]
        return [repeat * local + end for repeat in range(repeats) for end in ends]


class AssociativeGroup(StackedGroup):
    """Associative learners with equal layouts, thresholds, local samples and rates."""

    def __init__(self, kind: Kind, learners: Sequence[AssociativeLearner], device: torch.device):
        super().__init__(kind, learners, device)
        self._samples = Pool([learner.samples for learner in learners], device)
        self._counts = torch.tensor(self._samples.counts, device=device)
        # Not products but sweeps over all weights: many peers at once, as long as they stay in cache.
        fit = plan.TASK_BYTES // (4 * self._values.shape[1])
        self._size = max(1, min(fit, -(-len(learners) // plan.TASKS)))

    def train(self, rows: Sequence[int], repeats: int) -> list[Task]:
        return [lambda rows=some: self._train(rows, repeats) for some in _cut(rows, self._size)]

    def test(self, rows: Sequence[int]) -> list[Task]:
        self.publish()
        return [
            # Each learner's own test is one product already.
            lambda rows=some: self._named(rows, [self._learners[row].test() for row in rows])
            for some in _cut(rows, self._size)
        ]

    @torch.no_grad()
    def _train(self, rows: Sequence[int], repeats: int) -> list[tuple[int, Metrics]]:
        learners, where = [self._learners[row] for row in rows], as_rows(rows, self._device)
        one, count = learners[0], repeats * learners[0].local_samples
        module, into_hidden = one.module, one.module.hidden.numel()
        starts, counts = self._samples.starts[where], self._counts[where]
        positions = torch.tensor([one.state()["next"] for one in learners], device=self._device)
        with self._rows(rows) as (values,):
            hidden = values[:, :into_hidden].unflatten(1, tuple(module.hidden.shape))
            visible = values[:, into_hidden:].unflatten(1, tuple(module.visible.shape))
            for _ in range(count):
                vectors = self._samples.rows[starts + positions]
                _learn(hidden, visible, vectors, module.threshold, one.rate)
                positions = (positions + 1) % counts
        for learner, position in zip(learners, positions.tolist(), strict=True):
            learner.restore({"next": position})
        return self._named(rows, [Metrics(samples=count)] * len(rows))


def _learn(hidden: Tensor, visible: Tensor, vectors: Tensor, threshold: float, rate: float) -> None:
    """One vector for each peer: `AssociativeNetwork.learn`, stacked."""
    fires = (torch.bmm(vectors[:, None], hidden.mT)[:, 0] >= threshold).to(vectors.dtype)
    half = rate / 2
    hidden += half * vectors[:, None, :] * ((2 * fires - 1)[:, :, None] - hidden)
    visible += half * fires[:, None, :] * ((2 * vectors - 1)[:, :, None] - visible)


class LoopGroup(Group):
    """Learners that cannot be stacked train one after the other, each by its own code."""

    def train(self, rows: Sequence[int], repeats: int) -> list[Task]:
        return [
            lambda row=row: [(self.places[row], self._learners[row].train(repeats))] for row in rows
        ]

    def test(self, rows: Sequence[int]) -> list[Task]:
        return [lambda row=row: [(self.places[row], self._learners[row].test())] for row in rows]


def _alike(rows: Sequence[int], marks: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Rows by what they are marked with, in the order of each mark's first row."""
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(marks[row], []).append(row)
    return list(found.items())


def _cut(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    """Rows in pieces of at most `size`."""
    return [rows[at : at + size] for at in range(0, len(rows), size)]


# --- which learners are alike -------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Learners that may share a stack, or (`stackable` is False) have to run by themselves."""

    key: Hashable
    rule: UpdateRule | None = None
    stackable: bool = True
    places: list[int] = field(default_factory=list)


def sort_learners(learners: Sequence[Learner]) -> list[Kind]:
    """Return the learners by kind, in the order of each kind's first learner."""
    kinds: dict[Hashable, Kind] = {}
    for place, learner in enumerate(learners):
        kind = _kind(learner)
        kinds.setdefault(kind.key, kind).places.append(place)
    return list(kinds.values())


def form_group(kind: Kind, learners: Sequence[Learner], device: torch.device | None) -> Group:
    """Stack the learners of a kind, or leave them as they are."""
    chosen: list[Any] = [learners[place] for place in kind.places]
    if not kind.stackable:
        return LoopGroup(kind, chosen)
    where = device or chosen[0].network.flat.device
    if isinstance(chosen[0], AssociativeLearner):
        return AssociativeGroup(kind, chosen, where)
    one: SgdLearner = chosen[0]
    chain = None if one.right else read_chain(one.network.module, one.loss)
    if chain is not None:
        return SgdGroup(kind, chosen, ChainEngine(chain, one.loss), where)
    inputs, labels = one.samples[0][:1].to(where), one.samples[1][:1].to(where)
    engine = ModuleEngine(one.network, one.loss, inputs, where)
    if not engine.can_stack(one.network.flat[None].to(where), inputs[None], labels[None]):
        return LoopGroup(kind, chosen)
    return SgdGroup(kind, chosen, engine, where)


def _kind(learner: Learner) -> Kind:
    flat = learner.network.flat
    if type(learner) is AssociativeLearner:
        module = learner.module
        shape, threshold = tuple(module.hidden.shape), module.threshold
        settings = (learner.local_samples, learner.rate, flat.dtype, flat.device)
        return Kind(("associative", shape, threshold, settings, learner.samples.dtype))
    if type(learner) is not SgdLearner:
        return Kind(type(learner), stackable=False)
    if not len(learner.samples[1]):
        return Kind("no training samples", stackable=False)
    rule, module = read_rule(learner), learner.network.module
    if rule is None:
        return Kind("an optimizer without a stacked form", stackable=False)
    if not all(parameter.requires_grad for parameter in module.parameters()):
        return Kind("frozen parameters", stackable=False)
    chain = None if learner.right else read_chain(module, learner.loss)
    if chain is None and any(True for _ in module.buffers()):
        return Kind("buffers", stackable=False)
    large = learner.batch * learner.samples[0][0].numel() > plan.LARGE_IMAGES
    if large and any(isinstance(layer, CONVOLUTIONS) for layer in module.modules()):
        return Kind("convolutions that are faster one by one", stackable=False)
    key = (
        chain or _signature(module), rule, learner.loss, learner.local_samples, learner.batch,
        learner.reduction, flat.dtype, flat.device, tuple(learner.samples[0].shape[1:]),
        learner.held_out[0].dtype, learner.right, learner.samples[1].dtype,
        tuple(learner.samples[1].shape[1:]),
    )  # fmt: skip
    return Kind(key, rule)


def _signature(module: nn.Module) -> Hashable:
    """What decides how a module computes, besides the values of its parameters."""
    found: list[Hashable] = []
    for name, part in module.named_modules():
        own = {key: _token(value) for key, value in vars(part).items() if key not in _OF_TORCH}
        hooked = id(part) if has_hooks(part) else 0
        found.append((name, type(part), tuple(sorted(own.items())), hooked))
    shapes = tuple((name, tuple(value.shape)) for name, value in module.named_parameters())
    return tuple(found), shapes


def _token(value: Any) -> str:
    """Plain values by what they are, anything else by which object it is."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return repr([_token(item) for item in value])
    return f"{type(value).__qualname__} at {id(value)}"
