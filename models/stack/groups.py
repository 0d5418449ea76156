"""Train learners in groups: similar learners are stacked and trained together, the others one by one.

A stack holds networks of one architecture as the rows of one tensor. The state of their optimizers and the
peers' samples are stacked likewise.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import AssociativeLearner, Learner, Metrics, ModelError, SgdLearner, SlicedNetwork
from ..discovery import CONVOLUTIONS
from ..optimizers import AdamRule, MomentumRule, PlainRule, RuleOptimizer, UpdateRule
from . import plan
from .engines import (
    Chain,
    ChainEngine,
    Engine,
    ModuleEngine,
    TrainingJob,
    draw_orders,
    has_hooks,
    read_chain,
    score,
)


class Stack:
    """Networks as the rows of `values`, [peers, coordinates].

    Each network's flat tensor is a view of its row, so nothing is copied: training the stack changes
    `network.flat` and the module's parameters, and `network.write` changes the stack. Networks are moved into
    the stack one by one, so that there are never two copies of all of them.

    If the stack is on another device than the networks, memory cannot be shared: `write_back` copies the rows
    to the networks.
    """

    def __init__(self, networks: Sequence[SlicedNetwork], device: torch.device):
        first = networks[0].flat
        self.networks = list(networks)
        self.shares_memory = device == first.device
        """Whether the networks are on the stack's device, and so are views of its rows."""
        self.values = torch.empty(len(networks), len(first), dtype=first.dtype, device=device)
        self.refresh()

    def refresh(self) -> None:
        """Copy into the stack every network whose memory is elsewhere now, and make it a view again.

        A network's memory changes when it joins another stack, or when a user calls `rebind`.
        """
        for row, network in zip(self.values, self.networks, strict=True):
            if not self.shares_memory:
                row.copy_(network.flat)
            elif network.flat.data_ptr() != row.data_ptr():
                row.copy_(network.flat)
                network.rebind(row)

    def write_back(self) -> None:
        """Copy rows back to networks that live on another device."""
        if not self.shares_memory:
            for row, network in zip(
                self.values.to(self.networks[0].flat), self.networks, strict=True
            ):
                network.flat.copy_(row)

    def release(self) -> None:
        """Copy every network to memory of its own, so that it can be copied or pickled without the stack."""
        self.write_back()
        if self.shares_memory:
            for network in self.networks:
                network.rebind(network.flat.clone())


class SingleNetwork:
    """A network that is not stacked, with the interface of a stack of one row."""

    def __init__(self, network: SlicedNetwork):
        self.networks = [network]

    @property
    def values(self) -> Tensor:
        """The network's flat tensor as one row."""
        return self.networks[0].flat[None]

    def refresh(self) -> None:
        """Do nothing: `values` always returns the network's current tensor."""

    write_back = release = refresh


def row_index(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return an index for some rows of a tensor: a slice, which needs no copy, if they are evenly spaced."""
    steps = {b - a for a, b in pairwise(rows)}
    if len(steps) <= 1 and (step := steps.pop() if steps else 1) > 0:
        return slice(rows[0], rows[-1] + 1, step)
    return torch.tensor(rows, device=device)


# --- samples ------------------------------------------------------------------------------------


class SamplePool:
    """The samples (or labels) of many peers in one tensor, `rows`; those of peer i begin at `first_rows[i]`.

    Peers whose tensors are views of one tensor share its rows. Otherwise all samples are copied into one new
    tensor, and peers can keep `view(i)` instead of their own copy.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device):
        self.counts = [len(tensor) for tensor in tensors]
        base = _common_base(tensors)
        if base is not None:
            width = max(base[0].numel(), 1) if len(base) else 1
            self.rows = base.to(device)
            self.first_rows = [int(tensor.storage_offset()) // width for tensor in tensors]
        else:
            self.rows, self.first_rows = _concatenate(tensors, device)
        self.first_row_tensor = torch.tensor(self.first_rows, device=device)

    def view(self, index: int) -> Tensor:
        """Return the samples of one peer."""
        first = self.first_rows[index]
        return self.rows[first : first + self.counts[index]]

    def window(self, peers: Sequence[int], begin: int, count: int) -> Tensor:
        """Return samples begin … begin+count of each peer, [peers, count, …]; a view if all have the same."""
        first = self.first_rows[peers[0]]
        if all(self.first_rows[peer] == first for peer in peers):
            shared = self.rows[first + begin : first + begin + count]
            return shared.expand(len(peers), *shared.shape)
        offsets = torch.arange(begin, begin + count, device=self.rows.device)
        return self.rows[self.first_row_tensor[list(peers), None] + offsets]


def _common_base(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor over the memory that all tensors share; None if they do not share it row by row."""
    first = tensors[0]
    storage = first.untyped_storage()
    width = first[0].numel() if len(first) else 0
    if not width:
        return None
    for tensor in tensors:
        fits = tensor.is_contiguous() and tensor.storage_offset() % width == 0
        if not fits or tensor.untyped_storage().data_ptr() != storage.data_ptr():
            return None
        if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
            return None
    rows = storage.nbytes() // (first.element_size() * width)
    return first.as_strided((rows, *first.shape[1:]), (width, *first.stride()[1:]), 0)


def _concatenate(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[int]]:
    """Copy all tensors into a new one, identical tensors once; also return each tensor's first row in it."""
    first_row_of: dict[tuple[int, int, tuple[int, ...]], int] = {}
    first_rows: list[int] = []
    distinct: list[Tensor] = []
    total = 0
    for tensor in tensors:
        key = (tensor.data_ptr(), len(tensor), tensor.stride())
        if key not in first_row_of:
            first_row_of[key] = total
            total += len(tensor)
            distinct.append(tensor)
        first_rows.append(first_row_of[key])
    rows = tensors[0].new_empty((total, *tensors[0].shape[1:]), device=device)
    targets = rows.split([len(tensor) for tensor in distinct])
    for target, tensor in zip(targets, distinct, strict=True):
        target.copy_(tensor)
    return rows, first_rows


# --- optimizers ---------------------------------------------------------------------------------


def read_rule(learner: SgdLearner) -> UpdateRule | None:
    """Return the update rule of a learner's optimizer with its current settings.

    Returns None if the optimizer, or one of its settings, is not supported for stacked training.
    """
    optimizer, rule = learner.optimizer, _rule_of(learner.optimizer)
    if rule is None:
        return None
    optimized: list[nn.Parameter] = (
        optimizer.parameters
        if isinstance(optimizer, RuleOptimizer)
        else optimizer.param_groups[0]["params"]
    )
    parameters = list(learner.network.parameters.values())
    pairs = zip(parameters, optimized, strict=False)
    if len(parameters) != len(optimized) or any(a is not b for a, b in pairs):
        return None
    if len({int(state["step"]) for state in _states(learner).values() if "step" in state}) > 1:
        return None  # some parameters have taken more steps than others
    return rule


def _rule_of(optimizer: object) -> UpdateRule | None:
    """Return the update rule of an optimizer with its current settings; None if it is not supported."""
    if isinstance(optimizer, RuleOptimizer):
        return optimizer.rule
    if isinstance(optimizer, torch.optim.Optimizer) and len(optimizer.param_groups) == 1:
        return _rule_of_torch(optimizer)
    return None


def _rule_of_torch(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """Return the update rule of a torch optimizer; None if it is not supported."""
    settings: dict[str, Any] = optimizer.param_groups[0]
    if any(settings.get(key) for key in ("maximize", "capturable", "differentiable", "amsgrad")):
        return None
    if any(isinstance(settings.get(key), Tensor) for key in ("lr", "betas")):
        return None
    rate, decay = settings["lr"], settings.get("weight_decay", 0)
    if type(optimizer) is torch.optim.SGD and not settings["dampening"]:
        if not settings["momentum"] and not decay:
            return PlainRule(rate)
        return MomentumRule(rate, settings["momentum"], decay, bool(settings["nesterov"]))
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = settings.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
        return AdamRule(rate, tuple(settings["betas"]), settings["eps"], decay, bool(decoupled))
    return None


class OptimizerStates:
    """The state of a group's optimizers (momentum, Adam's moments), stacked like the parameters.

    parameters: the stack of the group's parameters, whose shape and device the state has.
    shares_memory: whether stack and optimizers are on one device. Then the tensors in the optimizers' state
        are views of the stack, and a learner's `state()` is always current; otherwise `write_back` copies.
    """

    def __init__(
        self,
        learners: Sequence[SgdLearner],
        rule: UpdateRule,
        parameters: Tensor,
        shares_memory: bool,
    ):
        self._learners, self._shares_memory = learners, shares_memory
        self._names = rule.state_names
        for learner in learners:
            if isinstance(learner.optimizer, RuleOptimizer):
                learner.optimizer.rule = rule  # an equal one: one object is faster to compare
        self.values = [torch.zeros_like(parameters) for _ in rule.state_names]
        # By learner and parameter, the steps taken so far.
        step_counters = len(learners[0].network.parameters) if rule.counts_steps else 0
        self._steps = torch.zeros(len(learners), step_counters)
        self.refresh()

    def refresh(self) -> None:
        """Copy state into the stack that is not a view of it: before the first round, or after a restore."""
        for state, name, stacked in self._entries():
            value = state.get(name)
            if not isinstance(value, Tensor):
                stacked.zero_()  # an optimizer that has not stepped yet, or was reset
            elif value.data_ptr() != stacked.data_ptr():
                stacked.copy_(value)
            if self._shares_memory:
                state[name] = stacked

    def rules(self, rows: Iterable[int]) -> dict[int, tuple[UpdateRule, int]]:
        """Return, by row, the update rule of some optimizers with the settings that they have now, and the
        number of steps that they have taken (0 for rules that do not count them).

        A scheduler may have changed their rate.
        """
        counts_steps, checked_rule = self._steps.numel() > 0, None
        steps = self._steps[:, 0].int().tolist() if counts_steps else []
        rules: dict[int, tuple[UpdateRule, int]] = {}
        for row in rows:
            rule = _rule_of(self._learners[row].optimizer)
            if rule is None or rule is not checked_rule:
                if rule is None or rule.state_names != self._names:
                    raise ModelError(
                        f"peer {self._learners[row].network.peer!r}: its optimizer was changed in a way that "
                        "its stack does not support: build a new Arena"
                    )
                checked_rule = rule
            rules[row] = rule, steps[row] if counts_steps else 0
        return rules

    def add_steps(self, rows: Sequence[int], steps: int) -> None:
        """Add `steps` to the step counters of some peers' optimizers."""
        if self._steps.numel():
            self._steps[torch.tensor(rows)] += steps

    def write_back(self) -> None:
        """Copy the state back to optimizers on another device."""
        device = self._learners[0].network.flat.device
        for state, name, stacked in () if self._shares_memory else self._entries():
            state[name] = stacked.clone() if name == "step" else stacked.to(device)

    def _entries(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """Yield (state of a parameter, name of an entry, its tensor in the stack) for every optimizer."""
        for row, learner in enumerate(self._learners if self._names else ()):
            network, states = learner.network, _states(learner)
            views = [network.slicing.anatomy.views(values[row]) for values in self.values]
            for index, (key, parameter) in enumerate(network.parameters.items()):
                state = states[parameter]
                for name, views_of_entry in zip(self._names, views, strict=True):
                    yield state, name, views_of_entry[key]
                if self._steps.shape[1]:
                    yield state, "step", self._steps[row, index]


def _states(learner: SgdLearner) -> Any:
    """Return an optimizer's state by parameter: a defaultdict, so looking up a parameter inserts it."""
    return getattr(learner.optimizer, "state", {})


# --- groups -------------------------------------------------------------------------------------

NO_SAMPLES = "no training samples"
NO_VMAP = "modules that torch's vmap does not support"

Task = Callable[[], list[tuple[int, Metrics]]]
"""Work for one thread; returns (index among all learners, metrics) for every learner it trained or tested."""

Key = TypeVar("Key", bound=Hashable)
_COMPARED_BY_VALUE = (int, float, str, bool, type(None), torch.dtype, torch.device)
_ATTRIBUTES_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Group(ABC):
    """Learners that train together. Row i of the group is the learner at `indices[i]` among all learners."""

    def __init__(self, spec: GroupSpec, learners: Sequence[Any], stack: Stack | None = None):
        self.indices, self._learners, self.stacked = spec.indices, list(learners), stack is not None
        self.stacks = [stack] if stack else [SingleNetwork(item.network) for item in learners]

    @abstractmethod
    def train(self, rows: Sequence[int], repeats: int) -> list[Task]:
        """Return tasks that train some peers; they can run in any order, also in parallel.

        All of them must be run, because this call already adds to the optimizers' step counters.
        repeats: how many times each peer trains its `local_samples`.
        """

    @abstractmethod
    def test(self, rows: Sequence[int]) -> list[Task]:
        """Return tasks that test some peers."""

    def locate(self, row: int) -> tuple[Stack | SingleNetwork, int]:
        """Return the stack that holds a learner's network, and its row in that stack."""
        return (self.stacks[0], row) if self.stacked else (self.stacks[row], 0)

    def refresh(self) -> None:
        """Copy into the stacks what was changed outside of them: see `Stack.refresh`."""
        for stack in self.stacks:
            stack.refresh()

    def write_back(self) -> None:
        """Copy values back to learners on another device."""
        for stack in self.stacks:
            stack.write_back()

    def release(self) -> None:
        """Copy every network to memory of its own: see `Stack.release`."""
        self.write_back()
        for stack in self.stacks:
            stack.release()

    def _with_indices(
        self, rows: Sequence[int], metrics: Sequence[Metrics]
    ) -> list[tuple[int, Metrics]]:
        """Return the metrics of some rows, each with the index among all learners, as a Task does."""
        indices = (self.indices[row] for row in rows)
        return list(zip(indices, metrics, strict=True))


class StackedGroup(Group):
    """Learners whose networks are rows of one stack."""

    def __init__(self, spec: GroupSpec, learners: Sequence[Any], device: torch.device):
        self._stack = Stack([learner.network for learner in learners], device)
        self._device = device
        super().__init__(spec, learners, self._stack)
        self._values = self._stack.values

    @contextmanager
    def _selected(self, rows: Sequence[int], *states: Tensor) -> Iterator[list[Tensor]]:
        """Yield some rows of the stack and of its optimizer state; changes made to them are kept."""
        index, stacked = row_index(rows, self._device), (self._values, *states)
        selected = [tensor[index] for tensor in stacked]
        yield selected
        if not isinstance(index, slice):  # then the selected rows are copies
            for tensor, changed in zip(stacked, selected, strict=True):
                tensor[index] = changed


class SgdGroup(StackedGroup):
    """Stacked gradient descent: equal architectures, losses, batch sizes and optimizers, different data."""

    def __init__(
        self, spec: GroupSpec, learners: Sequence[SgdLearner], engine: Engine, device: torch.device
    ):
        super().__init__(spec, learners, device)
        assert spec.rule is not None
        self._engine, shares_memory = engine, self._stack.shares_memory
        self._states = OptimizerStates(self._learners, spec.rule, self._values, shares_memory)
        self._pooled: list[tuple[Any, Any]] = []
        self._pool_samples()
        step_values = learners[0].batch * engine.activations
        self._peers_per_task = plan.peers_per_task(
            len(learners), self._values.shape[1], step_values
        )

    def _pool_samples(self) -> None:
        """Stack the learners' samples; do nothing if they are those that were stacked last."""
        samples = [(learner.samples, learner.held_out) for learner in self._learners]
        if self._pooled and all(
            a is c and b is d for (a, b), (c, d) in zip(samples, self._pooled, strict=True)
        ):
            return
        # Two pools each: inputs and labels.
        self._samples, self._tests = (
            [SamplePool([pair[kind][k] for pair in samples], self._device) for k in (0, 1)]
            for kind in (0, 1)
        )
        if (
            self._stack.shares_memory
        ):  # learners keep views of the pools instead of their own copies
            for index, learner in enumerate(self._learners):
                learner.samples = self._samples[0].view(index), self._samples[1].view(index)
                learner.held_out = self._tests[0].view(index), self._tests[1].view(index)
        self._pooled = [(learner.samples, learner.held_out) for learner in self._learners]

    def train(self, rows: Sequence[int], repeats: int) -> list[Task]:
        self._pool_samples()
        # Peers of a stack have the same kind of rule, but schedulers may have set different rates.
        groups = _group_rows(rows, self._states.rules(rows))
        self._states.add_steps(rows, len(self._step_ends(repeats)))
        return [
            lambda rows=chunk, rule=rule, taken=taken: self._train(rows, repeats, rule, taken)
            for (rule, taken), group in groups
            for chunk in _chunks(group, self._peers_per_task)
        ]

    def test(self, rows: Sequence[int]) -> list[Task]:
        self._pool_samples()
        return [
            lambda rows=chunk: self._test(rows)
            for _, group in _group_rows(rows, self._tests[1].counts)
            for chunk in _chunks(group, self._peers_per_task)
        ]

    def refresh(self) -> None:
        super().refresh()
        self._states.refresh()

    def write_back(self) -> None:
        super().write_back()
        self._states.write_back()

    def _train(
        self, rows: Sequence[int], repeats: int, rule: UpdateRule, steps_taken: int
    ) -> list[tuple[int, Metrics]]:
        """Train peers whose optimizers have all taken `steps_taken` steps."""
        learners = [self._learners[row] for row in rows]
        first, selected = learners[0], row_index(rows, self._device)
        inputs, labels = self._samples
        chain = self._engine if isinstance(self._engine, ChainEngine) else None
        fused = chain is not None and chain.is_fused(self._values, inputs.rows, rule)
        count = repeats * first.local_samples
        order = draw_orders(learners, count, fused=fused).to(self._device)
        index = order + inputs.first_row_tensor[selected, None]
        drawn_labels = labels.rows[order + labels.first_row_tensor[selected, None]]
        mean, ends = first.reduction == "mean", self._step_ends(repeats)
        priors = self._priors(rows)
        job = TrainingJob(inputs.rows, index, drawn_labels, ends, rule, mean, steps_taken, priors)
        if fused and chain is not None and chain.are_classes(drawn_labels):
            metrics = chain.train_fused(self._values, rows, job)
        else:
            with self._selected(rows, *self._states.values) as (values, *state):
                outputs = self._engine.train(values, state, job)
            metrics = score(outputs, drawn_labels, first.loss, first.right)
        for learner, peer_metrics in zip(learners, metrics, strict=True):
            if learner.scheduler is not None:
                learner.advance_schedule(peer_metrics, stacked=True)
        return self._with_indices(rows, metrics)

    def _test(self, rows: Sequence[int]) -> list[tuple[int, Metrics]]:
        """Test peers that have the same number of test samples."""
        first, (inputs, labels) = self._learners[0], self._tests
        values = self._values[row_index(rows, self._device)]
        metrics, priors = [Metrics()] * len(rows), self._priors(rows)
        # At most 1000 samples of a peer at once, like SgdLearner.test.
        batch, samples = max(1, min(1000, plan.TEST_ROWS // len(rows))), labels.counts[rows[0]]
        kept: list[Tensor] = []
        for begin in range(0, samples, batch):
            count = min(batch, samples - begin)
            outputs = self._engine.outputs(values, inputs.window(rows, begin, count))
            if priors is not None:
                outputs = outputs + priors[:, None]
            kept += [outputs.clone()] if first.metrics else []  # `score` may overwrite them
            scores = score(outputs, labels.window(rows, begin, count), first.loss, first.right)
            metrics = [total + batch for total, batch in zip(metrics, scores, strict=True)]
        if kept:
            by_peer = zip(
                metrics, torch.cat(kept, dim=1), labels.window(rows, 0, samples), strict=True
            )
            metrics = [
                replace(total, named=first.measure(outputs, targets))
                for total, outputs, targets in by_peer
            ]
        return self._with_indices(rows, metrics)

    def _priors(self, rows: Sequence[int]) -> Tensor | None:
        """Return some peers' log-priors, [peers, classes], 0 for a peer without one; None if no peer has one.

        They are read each time, because a learner's `log_prior` may be set while it is in the stack.
        """
        priors = [self._learners[row].log_prior for row in rows]
        first = next((prior for prior in priors if prior is not None), None)
        if first is None:
            return None
        zero = torch.zeros_like(first)
        return torch.stack([zero if prior is None else prior for prior in priors]).to(self._device)

    def _step_ends(self, repeats: int) -> list[int]:
        """Return how many samples are used up after each gradient step; no batch spans two repeats."""
        local, batch = self._learners[0].local_samples, self._learners[0].batch
        ends = [min(first + batch, local) for first in range(0, local, batch)]
        return [repeat * local + end for repeat in range(repeats) for end in ends]


class AssociativeGroup(StackedGroup):
    """Stacked associative learners with equal layouts, thresholds, numbers of local samples and rates."""

    def __init__(
        self, spec: GroupSpec, learners: Sequence[AssociativeLearner], device: torch.device
    ):
        super().__init__(spec, learners, device)
        self._samples = SamplePool([learner.samples for learner in learners], device)
        self._counts = torch.tensor(self._samples.counts, device=device)
        # A step updates all weights one by one, without matrix products, so a task trains as many peers as
        # fit into the cache.
        fit_into_cache = plan.TASK_BYTES // (4 * self._values.shape[1])
        self._peers_per_task = max(1, min(fit_into_cache, ceil(len(learners) / plan.TASKS)))

    def train(self, rows: Sequence[int], repeats: int) -> list[Task]:
        return [
            lambda rows=chunk: self._train(rows, repeats)
            for chunk in _chunks(rows, self._peers_per_task)
        ]

    def test(self, rows: Sequence[int]) -> list[Task]:
        self.write_back()
        return [
            # A learner's own test is already one matrix product.
            lambda rows=chunk: self._with_indices(
                rows, [self._learners[row].test() for row in rows]
            )
            for chunk in _chunks(rows, self._peers_per_task)
        ]

    @torch.no_grad()
    def _train(self, rows: Sequence[int], repeats: int) -> list[tuple[int, Metrics]]:
        learners, selected = [self._learners[row] for row in rows], row_index(rows, self._device)
        rate, count = learners[0].rate, repeats * learners[0].local_samples
        module, hidden_size = learners[0].module, learners[0].module.hidden.numel()
        first_rows, counts = self._samples.first_row_tensor[selected], self._counts[selected]
        next_vectors = [learner.state()["next"] for learner in learners]
        positions = torch.tensor(next_vectors, device=self._device)
        with self._selected(rows) as (values,):
            hidden = values[:, :hidden_size].unflatten(1, tuple(module.hidden.shape))
            visible = values[:, hidden_size:].unflatten(1, tuple(module.visible.shape))
            for _ in range(count):
                vectors = self._samples.rows[first_rows + positions]
                sums = torch.bmm(vectors[:, None], hidden.mT)[:, 0]
                fires = (sums >= module.threshold).to(vectors.dtype)
                module.associate(hidden, visible, vectors, fires, rate)
                positions = (positions + 1) % counts
        for learner, position in zip(learners, positions.tolist(), strict=True):
            learner.restore({"next": position})
        return self._with_indices(rows, [Metrics(samples=count)] * len(rows))


class LoopGroup(Group):
    """Learners that cannot be stacked: each trains and tests by its own code, as a task of its own.

    Attributes:
        reason: Why they are not stacked, in a few words.
        seconds: Processor time that their training has taken so far, over all threads.
    """

    def __init__(self, spec: GroupSpec, learners: Sequence[Any]):
        super().__init__(spec, learners)
        self.reason = NO_VMAP
        if not spec.stackable:
            is_class = isinstance(spec.key, type)
            self.reason = f"learners of class {spec.key.__name__}" if is_class else str(spec.key)
        self.seconds, self._lock = 0.0, threading.Lock()

    def train(self, rows: Sequence[int], repeats: int) -> list[Task]:
        return [lambda row=row: [(self.indices[row], self._train(row, repeats))] for row in rows]

    def _train(self, row: int, repeats: int) -> Metrics:
        """Train one learner, and count the processor time that it takes."""
        begin = time.thread_time()
        try:
            return self._learners[row].train(repeats)
        finally:
            with self._lock:
                self.seconds += time.thread_time() - begin

    def test(self, rows: Sequence[int]) -> list[Task]:
        return [lambda row=row: [(self.indices[row], self._learners[row].test())] for row in rows]


def _group_rows(
    rows: Sequence[int], keys: Sequence[Key] | Mapping[int, Key]
) -> list[tuple[Key, list[int]]]:
    """Group rows by `keys[row]`; groups are in the order of their first row."""
    groups: dict[Key, list[int]] = {}
    last, group = None, list[int]()
    for row in rows:
        if (key := keys[row]) != last:  # comparing is faster than hashing, and most keys are equal
            last, group = key, groups.setdefault(key, [])
        group.append(row)
    return list(groups.items())


def _chunks(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    """Split rows into chunks of at most `size`."""
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


# --- which learners form a group ----------------------------------------------------------------


@dataclass(frozen=True)
class GroupSpec:
    """The indices of learners that form a group: they have equal keys.

    rule: the update rule of their optimizers, for learners by gradient descent. stackable: False for learners
    that cannot be stacked; their key is the reason.
    """

    key: Hashable
    rule: UpdateRule | None = None
    stackable: bool = True
    indices: list[int] = field(default_factory=list)


def group_learners(learners: Sequence[Learner]) -> list[GroupSpec]:
    """Group learners that can share a stack; groups are in the order of their first learner."""
    groups: dict[Hashable, GroupSpec] = {}
    for index, learner in enumerate(learners):
        group = _group_of(learner)
        groups.setdefault(group.key, group).indices.append(index)
    return list(groups.values())


def form_group(spec: GroupSpec, learners: Sequence[Learner], device: torch.device | None) -> Group:
    """Build the group of the learners at `spec.indices`; its stack is on `device`, by default theirs."""
    members: list[Any] = [learners[index] for index in spec.indices]
    if not spec.stackable:
        return LoopGroup(spec, members)
    stack_device: torch.device = device or members[0].network.flat.device
    if isinstance(members[0], AssociativeLearner):
        return AssociativeGroup(spec, members, stack_device)
    first: SgdLearner = members[0]
    chain = _chain_of(first)
    if chain is not None:
        return SgdGroup(spec, members, ChainEngine(chain, first.loss), stack_device)
    inputs, labels = first.samples[0][:1].to(stack_device), first.samples[1][:1].to(stack_device)
    engine = ModuleEngine(first.network, first.loss, inputs, stack_device)
    if not engine.can_stack(first.network.flat[None].to(stack_device), inputs[None], labels[None]):
        return LoopGroup(spec, members)
    return SgdGroup(spec, members, engine, stack_device)


def _group_of(learner: Learner) -> GroupSpec:
    """Return the group of one learner, still without indices."""
    flat = learner.network.flat
    if type(learner) is AssociativeLearner:
        module = learner.module
        shape, threshold = tuple(module.hidden.shape), module.threshold
        settings = (learner.local_samples, learner.rate, flat.dtype, flat.device)
        return GroupSpec(("associative", shape, threshold, settings, learner.samples.dtype))
    if type(learner) is not SgdLearner:
        return GroupSpec(type(learner), stackable=False)
    if not len(learner.samples[1]):
        return GroupSpec(NO_SAMPLES, stackable=False)
    if learner.proximal:
        return GroupSpec("a proximal term", stackable=False)
    rule, module = read_rule(learner), learner.network.module
    if rule is None:
        return GroupSpec("an optimizer that cannot be stacked", stackable=False)
    if not all(parameter.requires_grad for parameter in learner.network.parameters.values()):
        return GroupSpec("parameters frozen after the network was wrapped", stackable=False)
    chain = _chain_of(learner)
    if chain is None and any(True for _ in module.buffers()):
        return GroupSpec("buffers", stackable=False)
    is_large = learner.batch * learner.samples[0][0].numel() > plan.LARGE_IMAGES
    if is_large and any(isinstance(layer, CONVOLUTIONS) for layer in module.modules()):
        return GroupSpec("convolutions that are faster one by one", stackable=False)
    key = (
        chain or _signature(module), rule, learner.loss, learner.local_samples, learner.batch,
        learner.reduction, flat.dtype, flat.device, learner.right, learner.metrics,
        tuple((x.dtype, tuple(x.shape[1:])) for x in (*learner.samples, *learner.held_out)),
        learner.network.frozen_digest(),
    )  # fmt: skip
    return GroupSpec(key, rule)


def _chain_of(learner: SgdLearner) -> Chain | None:
    """Return the network of a learner as a chain of layers; None if the kernel for chains cannot train it."""
    if learner.right or learner.network.frozen:
        return None
    return read_chain(learner.network.module, learner.loss)


def _signature(module: nn.Module) -> Hashable:
    """Return a key that is equal for modules that compute the same, given equal parameter values."""
    submodules: list[Hashable] = []
    for name, submodule in module.named_modules():
        attributes = {
            key: _token(value)
            for key, value in vars(submodule).items()
            if key not in _ATTRIBUTES_OF_EVERY_MODULE
        }
        # Hooks cannot be compared, so a module with hooks equals only itself.
        identity = id(submodule) if has_hooks(submodule) else 0
        submodules.append((name, type(submodule), tuple(sorted(attributes.items())), identity))
    shapes = tuple((name, tuple(value.shape)) for name, value in module.named_parameters())
    return tuple(submodules), shapes


def _token(value: Any) -> str:
    """Return a text that compares plain values by value, and other objects by identity."""
    if isinstance(value, _COMPARED_BY_VALUE):
        return repr(value)
    if isinstance(value, tuple | list):
        return repr([_token(item) for item in value])
    return f"{type(value).__qualname__} at {id(value)}"


# --- the memory that groups need ----------------------------------------------------------------


def memory_needs(
    groups: Sequence[GroupSpec], learners: Sequence[Learner], threads: int, other_device: bool
) -> plan.MemoryNeeds:
    """Return the memory that training needs, of which the existing learners already hold a part.

    other_device: the stacks will be on another device than the learners, so that they share no memory.
    """
    return plan.combine_needs(
        _needs_of_group(group, [learners[index] for index in group.indices], threads, other_device)
        for group in groups
    )


def _needs_of_group(
    group: GroupSpec, learners: Sequence[Learner], threads: int, other_device: bool
) -> plan.MemoryNeeds:
    """Return the memory that one group needs; `learners` are its members."""
    network = learners[0].network
    step_values = 0
    train: list[Tensor] = []
    test: list[Tensor] = []
    index_bytes: dict[int, int] = {}
    for learner in learners:
        if isinstance(learner, SgdLearner | AssociativeLearner):
            samples = learner.samples
            train += [samples] if isinstance(samples, Tensor) else samples
            test += learner.held_out
        slicing = learner.network.slicing
        for model in slicing.averaged_models:
            coordinates = slicing.coordinates_or_slice(model)
            if not isinstance(coordinates, slice):
                index_bytes[id(coordinates)] = coordinates.nbytes
    if isinstance(learners[0], SgdLearner):
        cells = sum(part.cells for part in network.slicing.anatomy.parts)
        longest = max(one.local_samples for one in learners if isinstance(one, SgdLearner))
        step_values = 2 * min(learners[0].batch, longest) * cells
    return plan.estimate_memory(
        peers=len(learners),
        parameters=len(network.flat),
        optimizer_values=len(group.rule.state_names) if group.rule is not None else 0,
        sample_bytes=_unique_bytes(train),
        test_bytes=_unique_bytes(test),
        index_bytes=sum(index_bytes.values()),
        threads=threads,
        step_values=step_values,
        bytes_per_value=network.flat.element_size(),
        learners_exist=not other_device,
    )


def _unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors; a tensor that several learners share is counted once."""
    sizes = {
        (tensor.data_ptr(), tensor.numel()): tensor.numel() * tensor.element_size()
        for tensor in tensors
    }
    return sum(sizes.values())
