"""One peer's part in deciding what its swarm shares: it holds samples out, measures, and follows plans."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..anatomy import Anatomy
from ..errors import ModelError
from ..learner import Metrics, SgdLearner, UpdateRule
from ..slicing import Places, seeded_rng
from ..stack import read_rule
from .decisions import AutoOptions, Plan
from .statistics import SKETCH, cell_of_coordinates, coordinates_into, outputs_of, sketch

MIN_PEERS = 4
"""With fewer peers a standard error over peers says nothing."""
MIN_SAMPLES = 10
"""The fewest training samples of a peer from which some can be held out."""
HEAD_SAMPLES = 160
"""The most samples per round on which the separate output layer of each peer is trained."""


class SharingMember:
    """Measures for one peer, and follows the swarm's plans.

        contribution = member.before_averaging(metrics_of_training)
        ...                               # average the network, and contributions over all peers
        member.after_averaging(mean)
        if round >= member.plan.until:
            member.follow(planner.next(member.plan, Statistics(member.plan.layout, mean)))

    seed: seeds which samples are held out. name: the peer's name in plans; its network's if left out. spread:
    rounds in which gossip takes values to the others before losses are measured, all with the values of the
    plan's first round; 0 if one averaging takes them to all.
    """

    def __init__(
        self,
        learner: SgdLearner,
        plan: Plan,
        options: AutoOptions,
        *,
        seed: int = 0,
        name: str | None = None,
        spread: int = 0,
    ):
        self.learner, self.plan, self._options, self._seed = learner, plan, options, seed
        self._name = learner.network.peer if name is None else name
        self._spread = spread
        self._peer = self._place(plan)
        anatomy = plan.assignment.anatomy
        self._coordinates = {part: coordinates_into(anatomy, part) for part in anatomy.names}
        self._outputs = outputs_of(anatomy)
        self._cell_of = cell_of_coordinates(anatomy, 0)
        self._layer_of = _layer_of_coordinates(learner.network.module, anatomy)
        self._movement = _Movement.none(anatomy.size, int(anatomy.first_cells[-1]))
        self._samples = learner.samples
        self._before = self._trained = np.zeros(0, np.float32)
        self._statistics: np.ndarray | None = None
        self._slice()
        self._begin()
        self._forget()
        if self._holds_out(plan):
            self._hold_out()

    def before_averaging(self, training: Metrics) -> np.ndarray:
        """Keep the values that training has led to; return what this peer adds to the swarm's statistics."""
        if self.plan.deciding:
            self._trained = self._values()
            if not self._spread or not len(self._before):
                self._before, self._heads = self._trained, self._with_head(self._trained)
        losses = self._losses / max(self._measured, 1)
        movement = self._movement
        return self.plan.layout.pack(
            self._peer, training.mean_loss, movement.products, movement.squares, losses,
            self._sketch, {"values": self._before, "heads": self._heads},
        )  # fmt: skip

    def after_averaging(self, statistics: np.ndarray) -> None:
        """Compare the values with those before, and measure held-out losses, while the swarm decides.

        statistics: the mean over peers of what they added, as this peer knows it.
        """
        if not self.plan.deciding or self._peer is None or not len(self._before):
            return
        after = self._values()
        self._movement.add(self._trained - after, self._cell_of)
        self._rounds += 1
        if self._rounds == 1:
            self._after = after
        if self.plan.candidates and self._spread:
            if self._rounds == 1 + self._spread:
                self._losses, self._measured = np.array(self._measure(self._after, statistics)), 1
        elif self.plan.candidates and self._measured < self.plan.until - self.plan.round - 1:
            # What is measured in a plan's last round arrives too late.
            self._losses += self._measure(after, statistics)
            self._measured += 1
        self._statistics = statistics
        if self._head is not None:
            self._head.train()
        moved = {part: self._movement.total[each] for part, each in self._coordinates.items()}
        if self._head is not None:
            outputs = self._coordinates[self._outputs]
            moved[self._outputs] = (self._with_head(after) - after)[outputs]
        self._sketch = sketch(self.plan.assignment.anatomy, moved)

    def follow(self, plan: Plan) -> bool:
        """Follow another plan; returns True if slices or samples have changed."""
        before, self.plan = self.plan, plan
        self._peer = self._place(plan)
        resliced = plan.assignment.slices(self._name)[0] != before.assignment.slices(self._name)[0]
        if resliced:
            measured = self._statistics is not None and len(self._before)
            chosen = plan.chosen if plan.version == before.version + 1 else None
            if chosen is not None and chosen < len(before.candidates) and measured:
                statistics = self._statistics
                if self._spread:  # the means in the statistics are old: begin with newer own values
                    self._before, self._heads = self._trained, self._with_head(self._trained)
                    statistics = None
                self._mix(before, 1 + chosen, statistics)  # the first mix is not a candidate's
            self._slice()
            self._forget()
        held_out, holds_out = self._holds_out(before), self._holds_out(plan)
        if holds_out and not held_out:
            self._hold_out()
        elif held_out and not holds_out:
            self._replace_samples(self._samples)
        if plan.round != before.round or plan.layout.name != before.layout.name:
            self._begin()
        return resliced or holds_out != held_out

    def replace_samples(self, samples: tuple[Tensor, Tensor]) -> None:
        """Give the peer other training samples."""
        self._samples = samples
        if self._holds_out(self.plan):
            self._hold_out()
        else:
            self._replace_samples(samples)

    @torch.no_grad()
    def held_out_loss(self, values: np.ndarray) -> float:
        """Return the loss on held-out samples with other values than the present ones."""
        present, (inputs, labels) = self._values(), self._held_out
        self._put(slice(None), values)
        outputs = self.learner.network.module.eval()(inputs)
        self._put(slice(None), present)
        return float(self.learner.losses(outputs, labels).mean())

    def _holds_out(self, plan: Plan) -> bool:
        """Return whether a plan needs held-out samples of this peer; a newcomer's do not depend on others."""
        is_newcomer = self._place(plan) is None or self._name in plan.newcomers
        return plan.deciding or is_newcomer

    @property
    def has_measured(self) -> bool:
        """Whether what the plan asks for is measured: losses, or how training moves values."""
        enough = self._measured if self.plan.candidates else self._rounds >= self._spread
        return not self.plan.deciding or bool(enough)

    def _place(self, plan: Plan) -> int | None:
        """Return the peer's number in a plan; None if the plan was made before it joined."""
        peers = plan.assignment.peers
        return peers.index(self._name) if self._name in peers else None

    # --- samples and values ---------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin to measure for a plan."""
        layout = self.plan.layout
        self._losses, self._measured, self._rounds = np.zeros(layout.losses), 0, 0
        if self._spread:
            self._before = np.zeros(0, np.float32)
        self._heads = self._after = self._before
        self._first_layers = [
            min(
                (
                    int(self._layer_of[layout.mixes[mix][1][number][1]].min())
                    for number in self._groups_of(self.plan, mix)
                ),
                default=0,
            )
            for mix in range(len(layout.mixes))
        ]

    def _hold_out(self) -> None:
        inputs, labels = self._samples
        count = min(int(self._options.held_out * len(labels)), self._options.max_held_out)
        generator = seeded_rng(self._seed, "held-out", self.learner.network.peer)
        order = torch.from_numpy(generator.permutation(len(labels)))
        held_out, trained = order[:count], order[count:]
        self._held_out = inputs[held_out], labels[held_out]
        self._replace_samples((inputs[trained], labels[trained]))
        self._forget()

    def _forget(self) -> None:
        """Begin to measure movements anew, and copy the output layer.

        The copy is trained on but never averaged. It shows differences between peers that one round of
        training is too short to show.
        """
        self._movement.forget()
        self._sketch = np.zeros((len(self._coordinates), SKETCH))
        self._head = _Head.of(self.learner)

    def _replace_samples(self, samples: tuple[Tensor, Tensor]) -> None:
        self.learner.samples = samples
        self.learner.order = self.learner.order[:0]

    def _slice(self) -> None:
        network, assignment = self.learner.network, self.plan.assignment
        slices, graph = assignment.slices(self._name)
        network.reslice(slices, graph, anatomy=assignment.anatomy)

    def _values(self) -> np.ndarray:
        return self.learner.network.flat.cpu().numpy().copy()

    def _put(self, columns: Places, values: np.ndarray) -> None:
        flat = self.learner.network.flat
        places = columns if isinstance(columns, slice) else torch.from_numpy(columns)
        flat[places] = torch.from_numpy(values).to(flat.device)

    # --- measuring ------------------------------------------------------------------------------

    @torch.no_grad()
    def _measure(self, after: np.ndarray, statistics: np.ndarray) -> list[float]:
        """Return held-out losses as things are, with averaged output layers, and under each candidate."""
        inputs, labels = self._held_out
        module = self.learner.network.module.eval()
        passes = _Passes(module, _channels_last(module, inputs))

        def loss(first_layer: int) -> float:
            return float(self.learner.losses(passes.outputs(first_layer), labels).mean())

        present = None
        if self._spread:
            present = self._values()
            self._put(slice(None), after)
        losses = [loss(0)]
        known: dict[tuple[object, ...], float] = {}
        for mix, first_layer in enumerate(self._first_layers):
            source, groups = self.plan.layout.mixes[mix]
            mine = [groups[number] for number in self._groups_of(self.plan, mix)]
            # Two groupings often have this peer's group in common.
            key = (source, *((group, id(columns)) for group, columns in mine))
            if key not in known:
                self._mix(self.plan, mix, statistics)
                known[key] = loss(first_layer)
                for _, columns in mine:
                    self._put(columns, after[columns])
            losses.append(known[key])
        if present is not None:
            self._put(slice(None), present)
        return losses

    def _mix(self, plan: Plan, mix: int, statistics: np.ndarray | None) -> None:
        """Give the network values that are averaged as a mix of the plan says, where it says so.

        statistics: where group means are; None to put the peer's own values in their place.
        """
        source, groups = plan.layout.mixes[mix]
        for number in self._groups_of(plan, mix):
            group, columns = groups[number]
            if self._peer is not None and len(group) > 1 and statistics is not None:
                self._put(columns, plan.layout.group_mean(statistics, mix, number))
            elif source == "heads":
                heads = self._heads if self._spread else self._with_head(self._before)
                self._put(columns, heads[columns])
            else:
                self._put(columns, self._before[columns])

    def _groups_of(self, plan: Plan, mix: int) -> list[int]:
        """Return the numbers of the groups of a mix that this peer is in; all, if the plan leaves it out."""
        _, groups = plan.layout.mixes[mix]
        return [
            number
            for number, (group, _) in enumerate(groups)
            if self._peer is None or self._peer in group
        ]

    # --- the output layer that is never averaged ------------------------------------------------

    def _with_head(self, values: np.ndarray) -> np.ndarray:
        if self._head is None or not len(values):
            return values
        values = values.copy()
        self._head.write(values)
        return values


def check_learner(learner: object) -> SgdLearner:
    """Return the learner if it can take part in deciding; otherwise raise ModelError."""
    if type(learner) is not SgdLearner:
        raise ModelError(
            f"deciding what to share needs learners with a loss per sample (SgdLearner), not "
            f"{type(learner).__name__}"
        )
    return learner


def frozen_parts(learner: SgdLearner, anatomy: Anatomy) -> frozenset[str]:
    """Return the parts whose values training never changes: no parameter that leads into them is trained.

    Statistics of norm layers are not parameters, and change even if nothing is trained.
    """
    every = [{"params": list(learner.network.module.parameters())}]
    trained = {
        id(parameter)
        for group in getattr(learner.optimizer, "param_groups", every)
        for parameter in group["params"]
        if parameter.requires_grad and group.get("lr", 1.0) != 0
    }
    changes = np.ones(anatomy.size, bool)
    for name, parameter in learner.network.module.named_parameters():
        changes[anatomy.spans[name]] = id(parameter) in trained
    return frozenset(
        part for part in anatomy.names if not changes[coordinates_into(anatomy, part)].any()
    )


def _chain(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a module that runs one after the other, with their names; else the module.

    Only torch's own layers count, none of which works in place: it would change what it has received.
    """
    layers = [*module.named_children()] if type(module) is nn.Sequential else []
    known = all(
        type(one).__module__.startswith("torch.nn.") and not getattr(one, "inplace", False)
        for one in module.modules()
    )
    repeated = type(module) is nn.Sequential and len(layers) != len(module)
    return layers if layers and known and not repeated else [("", module)]


def _layer_of_coordinates(module: nn.Module, anatomy: Anatomy) -> np.ndarray:
    """Return, for every coordinate, the number of the layer in `_chain` that has it."""
    numbers = {name: number for number, (name, _) in enumerate(_chain(module))}
    layers = np.zeros(anatomy.size, np.int64)
    for name, span in anatomy.spans.items():
        layers[span] = numbers.get(name.partition(".")[0], 0)
    return layers


def _channels_last(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return images in the memory order in which torch pools and convolves faster.

    Only for layers in a chain: others may ask for the order of their own.
    """
    in_chain = _chain(module)[0][1] is not module
    is_image = in_chain and inputs.ndim == 4
    return inputs.contiguous(memory_format=torch.channels_last) if is_image else inputs


class _Passes:
    """Repeated passes of the same inputs through a network of which only some layers change.

    Layers before the first that has changed are not computed again.
    """

    def __init__(self, module: nn.Module, inputs: Tensor):
        self._layers = [layer for _, layer in _chain(module)]
        self._received = [inputs]

    def outputs(self, first_layer: int) -> Tensor:
        """Return the outputs; the layers before `first_layer` are as they were in the first pass."""
        keep = len(self._received) == 1
        values = self._received[first_layer]
        for layer in self._layers[first_layer:]:
            values = layer(values)
            if keep:
                self._received.append(values)
        return values


@dataclass
class _Movement:
    """What training moves away from the average, over the last rounds.

    total
        Per coordinate, the sum over rounds, older rounds counting less.
    products, squares
        Per cell, the sum of the products of two successive rounds' movements, and of squares, the mean over
        the last rounds.
    """

    total: np.ndarray
    products: np.ndarray
    squares: np.ndarray
    last: np.ndarray | None = None

    @classmethod
    def none(cls, size: int, cells: int) -> _Movement:
        """Return the movement before the first round."""
        return cls(np.zeros(size, np.float32), np.zeros(cells), np.zeros(cells))

    def add(self, moved: np.ndarray, cell_of: np.ndarray) -> None:
        """Add one round: `moved` is values before averaging minus values after."""
        self.total = 0.7 * self.total + moved
        if self.last is not None:
            for sums, products in (
                (self.products, moved * self.last),
                (self.squares, moved * moved),
            ):
                sums *= 0.75
                sums += 0.25 * np.bincount(cell_of, products, len(sums))
        self.last = moved

    def forget(self) -> None:
        """Begin anew: other values are averaged from now on."""
        self.total[:] = 0
        self.last = None


class _Head:
    """A copy of a peer's output layer that is trained on the network's features, and never averaged."""

    def __init__(self, learner: SgdLearner, name: str, layer: nn.Linear, rule: UpdateRule):
        self._learner, self._layer, self._rule = learner, layer, rule
        self._spans = learner.network.slicing.anatomy.spans
        self._values = {
            f"{name}.{key}": value.detach().clone().requires_grad_()
            for key, value in layer.named_parameters()
        }
        self._state = [
            [torch.zeros_like(value) for value in self._values.values()] for _ in rule.state_names
        ]
        self._steps = 0
        self._generator = torch.Generator().manual_seed(0)

    @classmethod
    def of(cls, learner: SgdLearner) -> _Head | None:
        """Return a new head; None unless the network ends with a linear layer and a known optimizer."""
        layers = [(name, one) for name, one in learner.network.module.named_modules() if name]
        leaves = [(name, one) for name, one in layers if not list(one.children())]
        rule = read_rule(learner)
        name, layer = leaves[-1] if leaves else ("", learner.network.module)
        trained = all(parameter.requires_grad for parameter in layer.parameters())
        if not isinstance(layer, nn.Linear) or rule is None or not trained:
            return None
        head, inputs = cls(learner, name, layer, rule), learner.samples[0][:2]
        with torch.no_grad():
            outputs = learner.network.module.eval()(inputs)
            computed = F.linear(head._features(inputs), *head._values.values())
        # The last layer by name need not be the one that computes the outputs.
        same = computed.shape == outputs.shape and torch.allclose(computed, outputs, atol=1e-5)
        return head if same else None

    def train(self) -> None:
        """Train on some of the peer's samples, in batches as the learner does."""
        learner = self._learner
        inputs, labels = learner.samples
        count = min(learner.local_samples, HEAD_SAMPLES)
        order = torch.cat(
            [
                torch.randperm(len(labels), generator=self._generator)
                for _ in range(ceil(count / len(labels)))
            ]
        )[:count]
        features = self._features(inputs[order])
        values = list(self._values.values())
        for batch, targets in zip(
            features.split(learner.batch), labels[order].split(learner.batch), strict=True
        ):
            losses = learner.losses(F.linear(batch, *values), targets)
            loss = losses.sum() if learner.reduction == "sum" else losses.mean()
            gradients = torch.autograd.grad(loss, values)
            self._steps += 1
            with torch.no_grad():
                self._rule.step(values, list(gradients), self._state, self._steps)

    def write(self, row: np.ndarray) -> None:
        """Write the layer's values to their coordinates of a flat vector."""
        for name, value in self._values.items():
            row[self._spans[name]] = value.detach().numpy().ravel()

    @torch.no_grad()
    def _features(self, inputs: Tensor) -> Tensor:
        """Return what the output layer receives."""
        received: list[Tensor] = []
        handle = self._layer.register_forward_pre_hook(lambda _, given: received.append(given[0]))
        try:
            module = self._learner.network.module.eval()
            module(_channels_last(module, inputs))
        finally:
            handle.remove()
        return received[-1]
