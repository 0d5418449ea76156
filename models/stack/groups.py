"""Groups of learners that train together: equal ones share a stack, the rest run one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import AssociativeLearner, Learner, Metrics, ModelError, SgdLearner
from . import plan
from .engines import ChainEngine, Engine, ModuleEngine, TrainingJob, has_hooks, read_chain, score
from .optimizers import OptimizerStates, UpdateRule, rate_of, read_rule, steps_taken
from .stack import Alone, Pool, Stack, as_rows, draw

Task = Callable[[], list[tuple[int, Metrics]]]
"""A piece of work for one thread: what it measured, by the learner's place among all learners."""

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module()))
_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


class Group(ABC):
    """Learners that train together. `places` are theirs among all learners; rows follow that order."""

    stacked = True

    def __init__(self, places: Sequence[int], stacks: Sequence[Stack | Alone]):
        self.places, self.stacks = places, stacks

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


class SgdGroup(Group):
    """Stacked gradient descent: equal networks, losses, batches and optimizers; data of their own."""

    def __init__(
        self,
        places: Sequence[int],
        learners: Sequence[SgdLearner],
        engine: Engine,
        rule: UpdateRule,
        device: torch.device,
    ):
        first = learners[0]
        self._learners, self._engine, self._rule = list(learners), engine, rule
        self._stack, self._device = Stack([one.network for one in learners], device), device
        super().__init__(places, [self._stack])
        self._slots = OptimizerStates(self._learners, rule, self._stack.values, self._stack.shared)
        self._samples = [Pool([one.samples[k] for one in learners], device) for k in (0, 1)]
        self._tests = [Pool([one.held_out[k] for one in learners], device) for k in (0, 1)]
        if self._stack.shared:  # learners hold views of what was copied together
            for index, learner in enumerate(self._learners):
                learner.samples = self._samples[0].view(index), self._samples[1].view(index)
                learner.held_out = self._tests[0].view(index), self._tests[1].view(index)
        self._size = plan.peers_per_task(
            len(learners), len(first.network.flat), first.batch * engine.activations
        )

    def train(self, rows: Sequence[int], repeats: int) -> list[Task]:
        self._rule = self._present_rule()
        alike = _alike(rows, self._slots.taken)
        self._slots.count(rows, len(self._step_ends(repeats)))
        return [
            lambda rows=some, count=count: self._train(rows, repeats, count)
            for count, same in alike
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

    def _train(self, rows: Sequence[int], repeats: int, count: int) -> list[tuple[int, Metrics]]:
        """Peers whose optimizers have taken `count` steps."""
        learners = [self._learners[row] for row in rows]
        one, where = learners[0], as_rows(rows, self._device)
        order = draw(learners, repeats * one.local_samples).to(self._device)
        inputs, labels = self._samples
        seen_labels = labels.rows[order + labels.starts[where, None]]
        job = TrainingJob(
            inputs.rows,
            order + inputs.starts[where, None],
            seen_labels,
            self._step_ends(repeats),
            self._rule,
            one.reduction == "mean",
            count,
        )
        held = [self._stack.values, *self._slots.values]
        values, *state = [whole[where] for whole in held]
        outputs = self._engine.train(values, state, job)
        if not isinstance(where, slice):  # scattered rows were copied together
            for whole, part in zip(held, (values, *state), strict=True):
                whole[where] = part
        return self._named(rows, score(outputs, seen_labels, one.loss, one.right))

    def _test(self, rows: Sequence[int]) -> list[tuple[int, Metrics]]:
        """Peers with equally many test samples."""
        one, (inputs, labels) = self._learners[0], self._tests
        values = self._stack.values[as_rows(rows, self._device)]
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

    def _present_rule(self) -> UpdateRule:
        """The rule with the learning rate that the optimizers have now: a schedule may have moved it."""
        rates = {rate_of(learner) for learner in self._learners}
        if len(rates) > 1:
            raise ModelError(
                f"peers {self._learners[0].network.peer!r} … were stacked with one learning rate and now "
                f"have {len(rates)}: make a new Arena after changing the rates of some peers only"
            )
        return replace(self._rule, rate=rates.pop())


class AssociativeGroup(Group):
    """Associative learners with equal layouts, thresholds, local samples and rates."""

    def __init__(
        self, places: Sequence[int], learners: Sequence[AssociativeLearner], device: torch.device
    ):
        self._learners = list(learners)
        self._stack, self._device = Stack([one.network for one in learners], device), device
        super().__init__(places, [self._stack])
        self._samples = Pool([learner.samples for learner in learners], device)
        self._counts = torch.tensor(self._samples.counts, device=device)
        size = len(learners[0].network.flat)
        # Not products but sweeps over all weights: many peers at once, as long as they stay in cache.
        self._size = max(1, min(plan.TASK_BYTES // (4 * size), -(-len(learners) // plan.TASKS)))

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
        values = self._stack.values[where]
        module, into_hidden = one.module, one.module.hidden.numel()
        hidden = values[:, :into_hidden].unflatten(1, tuple(module.hidden.shape))
        visible = values[:, into_hidden:].unflatten(1, tuple(module.visible.shape))
        starts, counts = self._samples.starts[where], self._counts[where]
        positions = torch.tensor([one.state()["next"] for one in learners], device=self._device)
        for _ in range(count):
            vectors = self._samples.rows[starts + positions]
            _learn(hidden, visible, vectors, module.threshold, one.rate)
            positions = (positions + 1) % counts
        if not isinstance(where, slice):  # scattered rows were copied together
            self._stack.values[where] = values
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

    stacked = False

    def __init__(self, places: Sequence[int], learners: Sequence[Learner]):
        super().__init__(places, [Alone(learner.network) for learner in learners])
        self._learners = learners

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
        return LoopGroup(kind.places, chosen)
    where = device or chosen[0].network.flat.device
    if isinstance(chosen[0], AssociativeLearner):
        return AssociativeGroup(kind.places, chosen, where)
    one: SgdLearner = chosen[0]
    assert kind.rule is not None
    chain = None if one.right else read_chain(one.network.module, one.loss)
    if chain is not None:
        return SgdGroup(kind.places, chosen, ChainEngine(chain, one.loss), kind.rule, where)
    inputs, labels = one.samples[0][:1].to(where), one.samples[1][:1].to(where)
    engine = ModuleEngine(one.network.module, one.loss, inputs, where)
    if not engine.can_stack(one.network.flat[None].to(where), inputs[None], labels[None]):
        return LoopGroup(kind.places, chosen)
    return SgdGroup(kind.places, chosen, engine, kind.rule, where)


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
    rule, count, module = read_rule(learner), steps_taken(learner), learner.network.module
    if rule is None or count is None:
        return Kind("an optimizer without a stacked form", stackable=False)
    if not all(parameter.requires_grad for parameter in module.parameters()):
        return Kind("frozen parameters", stackable=False)
    chain = None if learner.right else read_chain(module, learner.loss)
    if chain is None and any(True for _ in module.buffers()):
        return Kind("buffers", stackable=False)
    large = learner.batch * learner.samples[0][0].numel() > plan.LARGE_IMAGES
    if large and any(isinstance(layer, _CONVOLUTIONS) for layer in module.modules()):
        return Kind("convolutions that are faster one by one", stackable=False)
    key = (
        chain or _signature(module), rule, count, learner.loss, learner.local_samples, learner.batch,
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
