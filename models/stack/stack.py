"""Networks of one architecture, their optimizers' states and peers' samples, as rows of one tensor each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from ..learner import Adam, Momentum, Plain, PlainSgd, SgdLearner, UpdateRule
from ..network import SlicedNetwork
from . import kernel


class Stack:
    """Networks as the rows of `values`, [peers, coordinates]: each network's flat tensor *is* its row.

    Nothing is copied back and forth: what the stack learns, `network.flat`, `network.read` and the
    module itself show at once, and what is written into a network is in the stack. Networks are moved
    one by one, so that two copies of all of them never exist.

    On another device than the networks' own, rows cannot be shared: there `publish` copies them back.
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

    def publish(self) -> None:
        """Copy rows back to networks that live on another device."""
        if not self.shared:
            for row, network in zip(
                self.values.to(self.networks[0].flat), self.networks, strict=True
            ):
                network.flat.copy_(row)

    def release(self) -> None:
        """Give every network memory of its own again, of its own size: to copy or to send it."""
        self.publish()
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

    publish = release = refresh


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


def draw(learners: Sequence[SgdLearner], count: int) -> Tensor:
    """Return the next `count` of each learner's sample indices: those that its own `train` would take.

    The learners' orders and generators move on with it, so that they can go on training by themselves.
    """
    chosen, orders = kernel.draw(
        [learner.order for learner in learners],
        [learner.generator for learner in learners],
        [len(learner.samples[1]) for learner in learners],
        count,
    )
    for learner, order in zip(learners, orders, strict=True):
        learner.order = order
    return chosen


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
        a learner's `state()` is always current. Else `publish` copies them back.
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

    def publish(self) -> None:
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
