"""Groups of learners that train together: equal ones share a stack, the rest run one by one.

Networks of one architecture, their optimizers' states and their peers' samples are rows of one tensor each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .. import AssociativeLearner, Learner, Metrics, ModelError, SgdLearner, SlicedNetwork
from ..discovery import CONVOLUTIONS
from ..learner import Adam, Momentum, Plain, PlainSgd, UpdateRule
from . import plan
from .engines import (
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
    """Networks as the rows of `values`, [peers, coordinates]: each network's flat tensor *is* its row.

    Nothing is copied back and forth: what the stack learns, `network.flat`, `network.read` and the
    module itself show at once, and what is written into a network is in the stack. Networks are moved
    one by one, so that two copies of all of them never exist.

    On another device than the networks' own, rows cannot be shared: there `write_back` copies them back.
    """

    def __init__(self, networks: Sequence[SlicedNetwork], device: torch.device):
        first = networks[0].flat
        self.networks = list(networks)
        self.shared = device == first.device
        self.values = torch.empty(len(networks), len(first), dtype=first.dtype, device=device)
        self.refresh()

    def refresh(self) -> None:
        """Take in networks that were given other memory since, by another stack or by a user."""
        for row, network in zip(self.values, self.networks, strict=True):
            if not self.shared:
                row.copy_(network.flat)
            elif network.flat.data_ptr() != row.data_ptr():
                row.copy_(network.flat)
                network.rebind(row)

    def write_back(self) -> None:
        """Copy rows back to networks that live on another device."""
        if not self.shared:
            for row, network in zip(
                self.values.to(self.networks[0].flat), self.networks, strict=True
            ):
                network.flat.copy_(row)

    def release(self) -> None:
        """Give every network memory of its own again, of its own size: to copy or to send it."""
        self.write_back()
        if self.shared:
            for network in self.networks:
                network.rebind(network.flat.clone())


class Alone:
    """A network that no stack took in, seen as a stack of one row."""

    def __init__(self, network: SlicedNetwork):
        self.networks = [network]

    @property
    def values(self) -> Tensor:
        """The network's own flat tensor, wherever it is now."""
        return self.networks[0].flat[None]

    def refresh(self) -> None:
        """Do nothing: `values` is read anew every time."""

    write_back = release = refresh


def as_rows(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return row numbers as a slice where they are evenly spaced, which needs no copy."""
    steps = {b - a for a, b in pairwise(rows)}
    if len(steps) <= 1 and (step := steps.pop() if steps else 1) > 0:
        return slice(rows[0], rows[-1] + 1, step)
    return torch.tensor(rows, device=device)


# --- samples ------------------------------------------------------------------------------------


class Pool:
    """Tensors of many peers as ranges of the rows of one; `firsts[i]` is where those of peer i begin.

    Peers that were given the same tensor, or views of one, share its rows. Otherwise rows are copied
    together once, and `view` is what a peer may hold instead of its own copy.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device):
        self.counts = [len(tensor) for tensor in tensors]
        base = _common_base(tensors)
        if base is not None:
            width = max(base[0].numel(), 1) if len(base) else 1
            self.rows = base.to(device)
            self.firsts = [int(tensor.storage_offset()) // width for tensor in tensors]
        else:
            self.rows, self.firsts = _copied(tensors, device)
        self.starts = torch.tensor(self.firsts, device=device)

    def view(self, index: int) -> Tensor:
        """Return the rows of one peer."""
        first = self.firsts[index]
        return self.rows[first : first + self.counts[index]]

    def window(self, peers: Sequence[int], at: int, count: int) -> Tensor:
        """Return samples at … at+count of some peers, [peers, count, …]; a view where they share them."""
        first = self.firsts[peers[0]]
        if all(self.firsts[peer] == first for peer in peers):
            shared = self.rows[first + at : first + at + count]
            return shared.expand(len(peers), *shared.shape)
        steps = torch.arange(at, at + count, device=self.rows.device)
        return self.rows[self.starts[list(peers), None] + steps]


def _common_base(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor over the memory that all of them share, if they do and whole rows fit."""
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


def _copied(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[int]]:
    """All rows in one new tensor, equal tensors once, and where each tensor begins."""
    places: dict[tuple[int, int, tuple[int, ...]], int] = {}
    firsts: list[int] = []
    fresh: list[Tensor] = []
    total = 0
    for tensor in tensors:
        key = (tensor.data_ptr(), len(tensor), tensor.stride())
        if key not in places:
            places[key] = total
            total += len(tensor)
            fresh.append(tensor)
        firsts.append(places[key])
    rows = tensors[0].new_empty((total, *tensors[0].shape[1:]), device=device)
    for target, tensor in zip(rows.split([len(each) for each in fresh]), fresh, strict=True):
        target.copy_(tensor)
    return rows, firsts


def read_rule(learner: SgdLearner) -> UpdateRule | None:
    """Return the stacked form of a learner's optimizer with its present settings; None if there is none."""
    optimizer = learner.optimizer
    if type(optimizer) is PlainSgd:
        return Plain(optimizer.rate)
    if not isinstance(optimizer, torch.optim.Optimizer) or len(optimizer.param_groups) != 1:
        return None
    settings: dict[str, Any] = optimizer.param_groups[0]
    own = list(learner.network.module.parameters())
    listed: list[Tensor] = settings["params"]
    if len(own) != len(listed) or any(a is not b for a, b in zip(own, listed, strict=True)):
        return None
    if any(settings.get(key) for key in ("maximize", "capturable", "differentiable", "amsgrad")):
        return None
    if any(isinstance(settings.get(key), Tensor) for key in ("lr", "betas")):
        return None
    if len({int(state["step"]) for state in _states(learner).values() if "step" in state}) > 1:
        return None  # parameters that have not taken the same steps
    rate, decay = settings["lr"], settings.get("weight_decay", 0)
    if type(optimizer) is torch.optim.SGD and not settings["dampening"]:
        if not settings["momentum"] and not decay:
            return Plain(rate)
        return Momentum(rate, settings["momentum"], decay, bool(settings["nesterov"]))
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = settings.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
        return Adam(rate, tuple(settings["betas"]), settings["eps"], decay, bool(decoupled))
    return None


class OptimizerStates:
    """The optimizers' state of a group, stacked like its parameters.

    shared: stack and optimizers are on one device, so the optimizers' entries are views of the stack, and
        a learner's `state()` is always current. Else `write_back` copies them back.
    """

    def __init__(
        self, learners: Sequence[SgdLearner], rule: UpdateRule, like: Tensor, shared: bool
    ):
        self._learners, self._rule, self._shared = learners, rule, shared
        self._names = rule.state_names
        self.values = [torch.zeros_like(like) for _ in rule.state_names]
        keeps_steps = isinstance(rule, Adam)
        parameters = len(list(learners[0].network.module.parameters())) if keeps_steps else 0
        self._steps = torch.zeros(len(learners), parameters)
        self.refresh()

    def refresh(self) -> None:
        """Copy in state that is not a view of this stack: before the first round, or after a restore."""
        for state, name, mine in self._entries():
            held = state.get(name)
            if not isinstance(held, Tensor):
                mine.zero_()  # an optimizer that has not stepped yet, or was reset
            elif held.data_ptr() != mine.data_ptr():
                mine.copy_(held)
            if self._shared:
                state[name] = mine

    def rule(self) -> UpdateRule:
        """The rule with the learning rate that the optimizers have now: a schedule may have moved it."""
        rates = {
            float(one.rate if isinstance(one, PlainSgd) else one.param_groups[0]["lr"])
            for one in (learner.optimizer for learner in self._learners)
        }
        if len(rates) > 1:
            raise ModelError(
                f"peers {self._learners[0].network.peer!r} … were stacked with one learning rate and now "
                f"have {len(rates)}: make a new Arena after changing the rates of some peers only"
            )
        return replace(self._rule, rate=rates.pop())

    def count(self, rows: Sequence[int], steps: int) -> None:
        """Remember that some peers took `steps` more steps."""
        if self._steps.numel():
            self._steps[torch.tensor(rows)] += steps

    @property
    def taken(self) -> list[int]:
        """Steps that each peer has taken, where the rule counts them; 0 where it does not."""
        if not self._steps.numel():
            return [0] * len(self._learners)
        return self._steps[:, 0].int().tolist()

    def write_back(self) -> None:
        """Copy back to optimizers that live on another device."""
        home = self._learners[0].network.flat.device
        for state, name, mine in () if self._shared else self._entries():
            state[name] = mine.clone() if name == "step" else mine.to(home)

    def _entries(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """Every entry of every optimizer: the parameter's state, the entry's name, and its tensor here."""
        for row, learner in enumerate(self._learners if self._names else ()):
            network, states = learner.network, _states(learner)
            views = [network.slicing.anatomy.views(values[row]) for values in self.values]
            for index, (key, parameter) in enumerate(network.module.named_parameters()):
                state = states[parameter]
                for name, mine in zip(self._names, views, strict=True):
                    yield state, name, mine[key]
                if self._steps.shape[1]:
                    yield state, "step", self._steps[row, index]


def _states(learner: SgdLearner) -> Any:
    """Return a torch optimizer's state by parameter, a defaultdict: reading a new parameter inserts it."""
    return getattr(learner.optimizer, "state", {})


# --- groups -------------------------------------------------------------------------------------

Task = Callable[[], list[tuple[int, Metrics]]]
"""A piece of work for one thread: the metrics that it measured, by the learner's index among all learners."""

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module()))


class Group(ABC):
    """Learners that train together. `indices` are those among all learners; rows follow that order."""

    def __init__(self, kind: Kind, learners: Sequence[Any], stack: Stack | None = None):
        self.indices, self._learners, self.stacked = kind.indices, list(learners), stack is not None
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

    def write_back(self) -> None:
        """Copy values back to learners on another device."""
        for stack in self.stacks:
            stack.write_back()

    def release(self) -> None:
        """Give learners memory of their own again."""
        self.write_back()
        for stack in self.stacks:
            stack.release()

    def _named(self, rows: Sequence[int], metrics: Sequence[Metrics]) -> list[tuple[int, Metrics]]:
        return [(self.indices[row], found) for row, found in zip(rows, metrics, strict=True)]


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

    def write_back(self) -> None:
        super().write_back()
        self._slots.write_back()

    def _train(
        self, rows: Sequence[int], repeats: int, rule: UpdateRule, taken: int
    ) -> list[tuple[int, Metrics]]:
        """Peers whose optimizers have taken so many steps."""
        learners = [self._learners[row] for row in rows]
        one, where = learners[0], as_rows(rows, self._device)
        count = repeats * one.local_samples
        order, left = draw_orders(
            [learner.order for learner in learners],
            [learner.generator for learner in learners],
            [len(learner.samples[1]) for learner in learners],
            count,
        )
        for learner, rest in zip(learners, left, strict=True):
            learner.order = rest
        order = order.to(self._device)
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
        self.write_back()
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
                sums = torch.bmm(vectors[:, None], hidden.mT)[:, 0]
                fires = (sums >= module.threshold).to(vectors.dtype)
                module.associate(hidden, visible, vectors, fires, one.rate)
                positions = (positions + 1) % counts
        for learner, position in zip(learners, positions.tolist(), strict=True):
            learner.restore({"next": position})
        return self._named(rows, [Metrics(samples=count)] * len(rows))


class LoopGroup(Group):
    """Learners that cannot be stacked train one after the other, each by its own code."""

    def train(self, rows: Sequence[int], repeats: int) -> list[Task]:
        return [
            lambda row=row: [(self.indices[row], self._learners[row].train(repeats))]
            for row in rows
        ]

    def test(self, rows: Sequence[int]) -> list[Task]:
        return [lambda row=row: [(self.indices[row], self._learners[row].test())] for row in rows]


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
    indices: list[int] = field(default_factory=list)


def group_learners(learners: Sequence[Learner]) -> list[Kind]:
    """Group learners that may share a stack, in the order of each group's first learner."""
    kinds: dict[Hashable, Kind] = {}
    for index, learner in enumerate(learners):
        kind = _kind(learner)
        kinds.setdefault(kind.key, kind).indices.append(index)
    return list(kinds.values())


def form_group(kind: Kind, learners: Sequence[Learner], device: torch.device | None) -> Group:
    """Stack the learners of a kind, or leave them as they are."""
    chosen: list[Any] = [learners[index] for index in kind.indices]
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


# --- the memory that they need ------------------------------------------------------------------


def needs_of(
    kinds: Sequence[Kind], learners: Sequence[Learner], threads: int, moved: bool
) -> plan.Needs:
    """Return the needs of learners that exist. `moved`: the stack is on another device, nothing is shared."""
    return plan.combine(
        _of_kind(kind, [learners[index] for index in kind.indices], threads, moved)
        for kind in kinds
    )


def _of_kind(kind: Kind, learners: Sequence[Learner], threads: int, moved: bool) -> plan.Needs:
    network = learners[0].network
    step_values = 0
    train: list[Tensor] = []
    test: list[Tensor] = []
    index: dict[int, int] = {}
    for learner in learners:
        if isinstance(learner, SgdLearner | AssociativeLearner):
            own = learner.samples
            train += [own] if isinstance(own, Tensor) else own
            test += learner.held_out
        slicing = learner.network.slicing
        for model in slicing.owners:
            where = slicing.where(model)
            if not isinstance(where, slice):
                index[id(where)] = where.nbytes
    if isinstance(learners[0], SgdLearner):
        cells = sum(part.cells for part in network.slicing.anatomy.parts)
        step_values = 2 * learners[0].batch * cells
    return plan.estimate(
        peers=len(learners),
        parameters=len(network.flat),
        slots=len(kind.rule.state_names) if kind.rule is not None else 0,
        sample_bytes=_unique_bytes(train),
        test_bytes=_unique_bytes(test),
        index_bytes=sum(index.values()),
        threads=threads,
        step_values=step_values,
        element=network.flat.element_size(),
        held=not moved,
    )


def _unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory behind some tensors, what they share counted once."""
    found = {
        (tensor.data_ptr(), tensor.numel()): tensor.numel() * tensor.element_size()
        for tensor in tensors
    }
    return sum(found.values())
