"""One peer's part in deciding what its swarm shares: it holds samples out, measures, and follows plans.

Besides its network, a peer keeps copies of the output layer and of the norm statistics that are trained but
never averaged. They show differences between peers for which one round of training is too short.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..anatomy import Anatomy
from ..errors import ModelError
from ..learner import SgdLearner
from ..metrics import Metrics
from ..optimizers import UpdateRule
from ..slicing import Coordinates, seeded_rng
from ..stack import read_rule
from .assignment import GLOBAL
from .candidates import NORM_PARTS, NORM_STATISTICS
from .decisions import AutoOptions, Plan
from .statistics import SKETCH_SIZE, cell_of_coordinates, coordinates_into, outputs_of, sketch

MIN_SAMPLES = 10
"""The fewest training samples of a peer from which some can be held out."""
OUTPUT_COPY_SAMPLES = 160
"""The most samples per round on which the copy of a peer's output layer is trained."""


class SharingMember:
    """Takes part in a swarm's decisions for one peer: it measures, and follows the swarm's plans.

        contribution = member.before_averaging(metrics_of_training)
        ...                               # average the network, and contributions over all peers
        member.after_averaging(mean)
        if round >= member.plan.until:
            member.follow(planner.next(member.plan, Statistics(member.plan.layout, mean)))

    seed: seeds which samples are held out. name: the peer's name in plans; by default its network's.

    Where one averaging does not take contributions to all peers (`Plan.spread`), losses are measured when
    they have arrived, with the values of the plan's first round.
    """

    def __init__(
        self,
        learner: SgdLearner,
        plan: Plan,
        options: AutoOptions,
        *,
        seed: int = 0,
        name: str | None = None,
    ):
        self.learner, self.plan, self._options, self._seed = learner, plan, options, seed
        self._name = learner.network.peer if name is None else name
        self.is_slow = False
        """Whether the present plan's first averaging did not take the values of all peers to this one."""
        self._peer_number = self._peer_number_in(plan)
        anatomy = plan.assignment.anatomy
        self._coordinates = {part: coordinates_into(anatomy, part) for part in anatomy.names}
        self._output_part = outputs_of(anatomy)
        self._cell_of = cell_of_coordinates(anatomy, 0)
        self._layer_of = _layer_of_coordinates(learner.network.module, anatomy)
        self._norm_copy = _NormCopy(learner, anatomy)
        self._movement = _Movement.none(anatomy.size, int(anatomy.first_cells[-1]))
        self._samples = self._not_held_out = learner.samples
        # Whether the learner's samples exclude the held-out ones; None if it must get new ones in any case.
        self._excludes_held_out: bool | None = False
        # The network's values in this peer's contribution, and after the last training.
        self._contributed = self._trained = np.zeros(0, np.float32)
        self.values_before_release: np.ndarray | None = None
        """The values before this peer began to train on its held-out samples too; None if it never did. Later
        values of its own fit these samples better than values that other peers have trained."""
        self._statistics: np.ndarray | None = None
        self._apply_assignment()
        self._start_measuring()
        self._reset_movement()
        if self._measures_under(plan):
            self._set_held_out()
        self._choose_samples()

    def before_training(self) -> None:
        """Remember the values that training begins with, if one averaging does not take values to all peers.

        How peers differ is then measured by how far training moves the values. How far averaging moves them
        would depend on which neighbours a peer has.
        """
        if self.plan.spread and self.plan.deciding:
            self._values_before_training = self._read_values()

    def before_averaging(self, training: Metrics, added: np.ndarray | None = None) -> np.ndarray:
        """Keep the values after training; return this peer's contribution to the swarm's statistics.

        added: what this peer has contributed to the statistics so far; None for nothing.
        """
        if self.plan.deciding:
            self._trained = self._read_values()
            self._norm_copy.train(self._trained)
            if len(self._values_before_training):
                moved = self._trained - self._values_before_training
                self._moved_by_training = 0.7 * self._moved_by_training + moved
            if not self.plan.spread or not len(self._contributed):
                self._contribute_trained()
        movement = self._movement
        vector = self.plan.layout.pack(
            self._peer_number, training.mean_loss, movement.products, movement.squares,
            self._losses, self._sketch,
            {"values": self._contributed, "copies": self._contributed_copies},
        )  # fmt: skip
        return self._contribute_once(vector, added) if self.plan.spread else vector

    def _contribute_once(self, vector: np.ndarray, added: np.ndarray | None) -> np.ndarray:
        """Return the contribution if values spread slowly: each number is contributed once, never changed.

        Losses are contributed when they have been measured, all others at the beginning. When a mean is read,
        it is divided by an entry to which peers contributed 1 together with it. That entry would have spread
        farther than a later change.
        """
        measured = self.plan.layout.measured
        if added is None:
            vector[measured] = 0.0
            return vector
        contribution = added.copy()
        if self.has_measured and not added[measured].any():
            contribution[measured] = vector[measured]
        return contribution

    def after_averaging(self, statistics: np.ndarray, *, complete: bool = True) -> bool:
        """Measure how averaging changed the values, and held-out losses; do nothing unless the swarm decides.

        Returns True if the next round is trained on other samples.

        statistics: the mean over peers of their contributions, as this peer knows it. complete: whether the
        contributions of all peers are in it; if not, this peer waits for them before it measures losses, but
        not for longer than twice `spread` rounds.
        """
        if not self.plan.deciding or self._peer_number is None or not len(self._contributed):
            return False
        after = self._read_values()
        difference = self._trained - after
        # A neighbour of a hub receives values only in some rounds.
        has_received = not self.plan.spread or bool(difference.any())
        if not has_received and not self._rounds:
            return False  # no values of other peers have arrived: they may not follow the plan yet
        if has_received:
            self._movement.add(difference, self._cell_of)
        self._norm_copy.measure_distance(after)
        self._rounds += 1
        if self._rounds == 1:
            self._first_averaged, self.is_slow = after, not complete
        must_wait = not complete and self._rounds <= 2 * self.plan.spread
        if self.plan.candidates and not self._has_losses and not must_wait:
            self._losses = np.array(self._measure(self._first_averaged, statistics))
            self._has_losses = True
        self._statistics = statistics
        if self._output_copy is not None:
            self._output_copy.train(self._not_held_out)
        total, reference = self._movement.total, after
        if self.plan.spread:  # the planner subtracts the mean over peers
            total, reference = self._moved_by_training, self._values_when_copied
        copy_difference = self._with_copies(reference) - reference
        moved: dict[str, np.ndarray] = {}
        for part, coordinates in self._coordinates.items():
            is_copied = part == self._output_part and self._output_copy is not None
            is_copied = is_copied or part == NORM_STATISTICS
            moved[part] = (copy_difference if is_copied else total)[coordinates]
        self._sketch = sketch(self.plan.assignment.anatomy, moved)
        return self._choose_samples()

    def follow(self, plan: Plan) -> bool:
        """Follow another plan; return True if slices or samples have changed."""
        old_plan, self.plan = self.plan, plan
        self._peer_number = self._peer_number_in(plan)
        old_slices, _ = old_plan.assignment.slices(self._name)
        is_resliced = plan.assignment.slices(self._name)[0] != old_slices
        if is_resliced:
            if plan.version == old_plan.version + 1:
                self._start_with_chosen(old_plan, plan.chosen)
            self._apply_assignment()
            self._reset_movement()
        if self._measures_under(plan) and not self._measures_under(old_plan):
            self._set_held_out()
        if plan.round != old_plan.round or plan.layout.name != old_plan.layout.name:
            self._start_measuring()
        return self._choose_samples() or is_resliced

    def _start_with_chosen(self, plan: Plan, chosen: int | None) -> None:
        """Give the network the values that it would have if a plan's chosen candidate had applied already.

        Do nothing if no candidate was chosen, or this peer has not measured.
        """
        if chosen is None or chosen >= len(plan.candidates):
            return
        statistics = self._statistics
        if statistics is None or not len(self._contributed):
            return
        if self.plan.spread:  # the means in the statistics are old: use this peer's newer values
            self._contribute_trained()
            statistics = None
        self._set_trial(plan, 1 + chosen, statistics)  # the first trial is not a candidate's
        self._norm_copy.measure_distance(self._read_values())

    def _contribute_trained(self) -> None:
        """Contribute the values after the last training, and the copies as they are now."""
        self._contributed = self._trained
        self._contributed_copies = self._with_copies(self._trained)

    def replace_samples(self, samples: tuple[Tensor, Tensor]) -> None:
        """Give the peer other training samples."""
        self._samples, self._excludes_held_out = samples, None
        if self._measures_under(self.plan):
            self._set_held_out()
        self._choose_samples()

    @torch.no_grad()
    def held_out_losses(self, values: np.ndarray) -> np.ndarray:
        """Return the losses of held-out samples if the network had these values."""
        present, (inputs, labels) = self._read_values(), self._held_out
        self._set_values(slice(None), values)
        outputs = self.learner.network.module.eval()(inputs)
        self._set_values(slice(None), present)
        return self.learner.losses(outputs, labels).cpu().numpy()

    def _measures_under(self, plan: Plan) -> bool:
        """Return whether this peer holds samples out and measures: if the plan is deciding, or it is new."""
        return plan.deciding or self._is_new(plan)

    def _is_new(self, plan: Plan) -> bool:
        """Return whether this peer is not in a plan, or still looks for its groups."""
        return self._peer_number_in(plan) is None or self._name in plan.newcomers

    @property
    def has_measured(self) -> bool:
        """Whether this peer has measured what the plan needs: losses, or how training moves values."""
        if not self.plan.deciding:
            return True
        return self._has_losses if self.plan.candidates else self._rounds >= self.plan.spread

    def _peer_number_in(self, plan: Plan) -> int | None:
        """Return the peer's number in a plan; None if the plan was made before it joined."""
        peers = plan.assignment.peers
        return peers.index(self._name) if self._name in peers else None

    # --- samples and values ---------------------------------------------------------------------

    def _start_measuring(self) -> None:
        """Forget earlier measurements, and measure for the present plan."""
        layout = self.plan.layout
        self._losses, self._has_losses = np.zeros(layout.losses), False
        self._rounds = 0
        if self.plan.spread:
            self._contributed = np.zeros(0, np.float32)
        self._contributed_copies = self._first_averaged = self._contributed
        self._first_layers = [self._first_layer(trial) for trial in range(len(layout.trials))]

    def _first_layer(self, trial: int) -> int:
        """Return the number of the first layer in which a trial changes this peer's values."""
        _, groups = self.plan.layout.trials[trial]
        columns_of_groups = [groups[number][1] for number in self._groups_of(self.plan, trial)]
        layers = (int(self._layer_of[columns].min()) for columns in columns_of_groups)
        return min(layers, default=0)

    def _set_held_out(self) -> None:
        """Choose the training samples that are held out, and forget what was measured before."""
        inputs, labels = self._samples
        count = min(int(self._options.held_out * len(labels)), self._options.max_held_out)
        generator = seeded_rng(self._seed, "held-out", self.learner.network.peer)
        order = torch.from_numpy(generator.permutation(len(labels)))
        held_out, others = order[:count], order[count:]
        self._held_out = inputs[held_out], labels[held_out]
        self._not_held_out = inputs[others], labels[others]
        self._norm_copy.reset()
        self._reset_movement()

    def _reset_movement(self) -> None:
        """Forget how training moved the values, and make a new copy of the output layer."""
        self._movement.forget()
        self._values_before_training = np.zeros(0, np.float32)
        self._values_when_copied = self._read_values()
        self._moved_by_training = np.zeros_like(self._values_when_copied)
        self._sketch = np.zeros((len(self._coordinates), SKETCH_SIZE))
        self._output_copy = _OutputCopy.of(self.learner)

    def _choose_samples(self) -> bool:
        """Choose the samples of the next round; return True if they change, and so a new epoch begins.

        Held-out samples are not trained on in the first round of a plan, in which its candidates get their
        values. In other rounds they are, while all peers share all cells: what these rounds learn from them
        is in the average and in the candidates alike. Once some cells are not shared, they are excluded as
        long as the swarm decides: a peer's own cells would remember them, and sharing these cells again would
        seem to raise the loss (norms have too few values for that). A newcomer excludes them too, because it
        compares its own values with those of groups.
        """
        plan, excluded = self.plan, self._excludes_held_out
        is_compared = bool(plan.candidates) and not self._rounds
        assignment = plan.assignment
        shares_cells = all(
            len(assignment.cells(part, GLOBAL)) == assignment.anatomy.parts[index].cells
            for index, part in enumerate(assignment.anatomy.names)
            if part not in NORM_PARTS
        )
        is_tested = plan.deciding and (is_compared or not shares_cells)
        self._excludes_held_out = is_tested or self._is_new(plan)
        if self._excludes_held_out == excluded:
            return False
        if excluded and self.values_before_release is None:
            self.values_before_release = self._read_values()
        self.learner.samples = self._not_held_out if self._excludes_held_out else self._samples
        self.learner.order = self.learner.order[:0]
        return True

    def _apply_assignment(self) -> None:
        """Slice the network as the plan's assignment says."""
        network, assignment = self.learner.network, self.plan.assignment
        slices, graph = assignment.slices(self._name)
        network.reslice(slices, graph, anatomy=assignment.anatomy)

    def _read_values(self) -> np.ndarray:
        """Return a copy of the network's flat parameter vector."""
        return self.learner.network.flat.cpu().numpy().copy()

    def _set_values(self, columns: Coordinates, values: np.ndarray) -> None:
        """Write values to some coordinates of the network's flat parameter vector."""
        flat = self.learner.network.flat
        index = columns if isinstance(columns, slice) else torch.from_numpy(columns)
        flat[index] = torch.from_numpy(values).to(flat.device)

    # --- measuring ------------------------------------------------------------------------------

    @torch.no_grad()
    def _measure(self, after: np.ndarray, statistics: np.ndarray) -> list[float]:
        """Return held-out losses with the values `after` averaging, and with those of every trial."""
        inputs, labels = self._held_out
        module = self.learner.network.module.eval()
        forward = _CachedForward(module, _channels_last(module, inputs))

        def loss(first_layer: int) -> float:
            return float(self.learner.losses(forward.outputs(first_layer), labels).mean())

        present = None
        if self.plan.spread:
            present = self._read_values()
            self._set_values(slice(None), after)
        losses = [loss(0)]
        loss_of: dict[tuple[object, ...], float] = {}
        for trial, first_layer in enumerate(self._first_layers):
            source, groups = self.plan.layout.trials[trial]
            own_groups = [groups[number] for number in self._groups_of(self.plan, trial)]
            # Two groupings often have this peer's group in common: its loss is computed once.
            key = (source, *((group, id(columns)) for group, columns in own_groups))
            if key not in loss_of:
                self._set_trial(self.plan, trial, statistics)
                loss_of[key] = loss(first_layer)
                for _, columns in own_groups:
                    self._set_values(columns, after[columns])
            losses.append(loss_of[key])
        if present is not None:
            self._set_values(slice(None), present)
        return losses

    def _set_trial(self, plan: Plan, trial: int, statistics: np.ndarray | None) -> None:
        """Write the values of a trial of a plan to the network: the means of this peer's groups.

        statistics: the vector that has the group means; None to use the peer's own values in their place.
        """
        source, groups = plan.layout.trials[trial]
        for number in self._groups_of(plan, trial):
            group, columns = groups[number]
            if self._peer_number is not None and len(group) > 1 and statistics is not None:
                self._set_values(columns, plan.layout.group_mean(statistics, trial, number))
            elif source == "copies":
                copies = self._contributed_copies
                if not self.plan.spread:
                    copies = self._with_copies(self._contributed)
                self._set_values(columns, copies[columns])
            else:
                self._set_values(columns, self._contributed[columns])

    def _groups_of(self, plan: Plan, trial: int) -> list[int]:
        """Return the numbers of a trial's groups that this peer is in; all if the plan does not know it."""
        _, groups = plan.layout.trials[trial]
        return [
            number
            for number, (group, _) in enumerate(groups)
            if self._peer_number is None or self._peer_number in group
        ]

    # --- copies that are never averaged ----------------------------------------------------------

    def _with_copies(self, values: np.ndarray) -> np.ndarray:
        """Return a copy of `values` with those of the copied output layer and norm statistics in it."""
        if not len(values):
            return values
        values = values.copy()
        if self._output_copy is not None:
            self._output_copy.write(values)
        self._norm_copy.write(values)
        return values


def check_learner(learner: object) -> SgdLearner:
    """Return the learner if it can take part in deciding; otherwise raise ModelError."""
    if type(learner) is not SgdLearner:
        raise ModelError(
            "deciding what to share needs learners with a loss per sample (SgdLearner), not "
            f"{type(learner).__name__}"
        )
    if learner.proximal:
        raise ModelError(
            "deciding what to share compares losses, and this learner adds a proximal term of "
            f"{learner.proximal} to them: leave it out"
        )
    return learner


def frozen_parts(learner: SgdLearner, anatomy: Anatomy) -> frozenset[str]:
    """Return the parts that are not trained: no parameter that leads into their cells is.

    Statistics of norm layers are not parameters, and change even if nothing is trained.
    """
    default_groups = [{"params": list(learner.network.parameters.values())}]
    trained = {
        id(parameter)
        for group in getattr(learner.optimizer, "param_groups", default_groups)
        for parameter in group["params"]
        if parameter.requires_grad and group.get("lr", 1.0) != 0
    }
    is_trained = np.ones(anatomy.size, bool)
    for name, parameter in learner.network.parameters.items():
        is_trained[anatomy.spans[name]] = id(parameter) in trained
    return frozenset(
        part for part in anatomy.names if not is_trained[coordinates_into(anatomy, part)].any()
    )


def _chain(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a Sequential with their names, for `_CachedForward`; of another module, itself.

    All layers must be torch's own and not work in place, because that would change cached values. A layer
    that is used twice is not supported.
    """
    layers = [*module.named_children()] if type(module) is nn.Sequential else []
    are_supported = all(
        type(layer).__module__.startswith("torch.nn.") and not getattr(layer, "inplace", False)
        for layer in module.modules()
    )
    is_repeated = type(module) is nn.Sequential and len(layers) != len(module)
    return layers if layers and are_supported and not is_repeated else [("", module)]


def _layer_of_coordinates(module: nn.Module, anatomy: Anatomy) -> np.ndarray:
    """Return, for every coordinate, the number of the layer in `_chain` that has it."""
    numbers = {name: number for number, (name, _) in enumerate(_chain(module))}
    layers = np.zeros(anatomy.size, np.int64)
    for name, span in anatomy.spans.items():
        layers[span] = numbers.get(name.partition(".")[0], 0)
    return layers


def _channels_last(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return images with channels last in memory, in which order torch pools and convolves faster.

    Other inputs, and those of modules that are not a chain of torch's layers, are returned as they are.
    """
    is_chain = _chain(module)[0][1] is not module
    is_image = is_chain and inputs.ndim == 4
    return inputs.contiguous(memory_format=torch.channels_last) if is_image else inputs


class _CachedForward:
    """Computes the outputs of the same inputs repeatedly, while only some layers of a network change.

    Layers before the first that has changed are not computed again.
    """

    def __init__(self, module: nn.Module, inputs: Tensor):
        self._layers = [layer for _, layer in _chain(module)]
        self._layer_inputs = [inputs]

    def outputs(self, first_layer: int) -> Tensor:
        """Return the outputs; the layers before `first_layer` are as they were in the first pass."""
        is_first_pass = len(self._layer_inputs) == 1
        values = self._layer_inputs[first_layer]
        for layer in self._layers[first_layer:]:
            values = layer(values)
            if is_first_pass:
                self._layer_inputs.append(values)
        return values


@dataclass
class _Movement:
    """How training moves this peer's values away from the average, over the last rounds.

    total
        The movement of each coordinate, summed over rounds; older rounds count less.
    products, squares
        Summed over the coordinates of each cell: the product of the movements in two successive rounds, and
        the square of the movement; running means over rounds.
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
        """Forget the movement of earlier rounds, because other values are averaged from now on."""
        self.total[:] = 0
        self.last = None


class _NormCopy:
    """A copy of a peer's norm statistics that is never averaged.

    Norm statistics are running means, of which one round of training replaces only a part. So the values
    before averaging do not yet show what a peer's own statistics would be. Training adds the same to the
    network's statistics and to the copy, and lets old values decay at the same rate, so it is enough to keep
    the distance between the two.
    """

    def __init__(self, learner: SgdLearner, anatomy: Anatomy):
        module = learner.network.module
        steps = ceil(learner.local_samples / learner.batch)
        self._columns = np.zeros(0, np.int64)
        # The factor by which a round of training reduces the distance.
        decay = np.zeros(anatomy.size, np.float32)
        if NORM_STATISTICS in anatomy.names:
            self._columns = coordinates_into(anatomy, NORM_STATISTICS)
            for name, span in anatomy.spans.items():
                layer = name.rpartition(".")[0]
                momentum = getattr(module.get_submodule(layer), "momentum", None)
                decay[span] = 0.0 if momentum is None else (1 - momentum) ** steps
        self._decay = decay[self._columns]
        self.reset()

    def reset(self) -> None:
        """Make the copy equal to the present statistics again."""
        self._copy = self._distance = np.zeros_like(self._decay)

    def train(self, values: np.ndarray) -> None:
        """Update the copy after a round of training; values: those of the network after it."""
        self._copy = values[self._columns] + self._decay * self._distance

    def measure_distance(self, values: np.ndarray) -> None:
        """Measure how far the copy is from the network's values after averaging or another change of them."""
        self._distance = self._copy - values[self._columns]

    def write(self, row: np.ndarray) -> None:
        """Write the copy to its coordinates of a flat vector."""
        row[self._columns] = self._copy


class _OutputCopy:
    """A copy of a peer's output layer that is trained on the network's features, and never averaged."""

    def __init__(self, learner: SgdLearner, name: str, layer: nn.Linear, rule: UpdateRule):
        self._learner, self._layer, self._rule = learner, layer, rule
        self._spans = learner.network.slicing.anatomy.spans
        self._values = {
            f"{name}.{key}".lstrip("."): value.detach().clone().requires_grad_()
            for key, value in layer.named_parameters()
        }
        self._state = [
            [torch.zeros_like(value) for value in self._values.values()] for _ in rule.state_names
        ]
        self._steps = 0
        self._generator = torch.Generator().manual_seed(0)

    @classmethod
    def of(cls, learner: SgdLearner) -> _OutputCopy | None:
        """Return a new copy; None unless the last layer is linear and is trained by a known optimizer.

        None too if another layer has its weights, as that of an embedding: a copy would change both.
        """
        module = learner.network.module
        leaves = [
            (name, layer) for name, layer in module.named_modules() if not list(layer.children())
        ]
        rule = read_rule(learner)
        name, layer = leaves[-1]
        is_trained = all(parameter.requires_grad for parameter in layer.parameters())
        all_parameters = [id(value) for _, value in module.named_parameters(remove_duplicate=False)]
        is_tied = any(all_parameters.count(id(parameter)) > 1 for parameter in layer.parameters())
        if not isinstance(layer, nn.Linear) or rule is None or not is_trained or is_tied:
            return None
        output_copy, inputs = cls(learner, name, layer, rule), learner.samples[0][:2]
        with torch.no_grad():
            outputs = module.eval()(inputs)
            computed = F.linear(output_copy._features(inputs), *output_copy._values.values())
        # The last layer by name need not be the one that computes the outputs.
        is_same = computed.shape == outputs.shape and torch.allclose(computed, outputs, atol=1e-5)
        return output_copy if is_same else None

    def train(self, samples: tuple[Tensor, Tensor]) -> None:
        """Train on some of the samples, in batches as the learner does."""
        learner, (inputs, labels) = self._learner, samples
        count = min(learner.local_samples, OUTPUT_COPY_SAMPLES)
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
            row[self._spans[name]] = value.detach().cpu().numpy().ravel()

    @torch.no_grad()
    def _features(self, inputs: Tensor) -> Tensor:
        """Return the inputs of the output layer."""
        layer_inputs: list[Tensor] = []
        handle = self._layer.register_forward_pre_hook(lambda _, args: layer_inputs.append(args[0]))
        try:
            module = self._learner.network.module.eval()
            module(_channels_last(module, inputs))
        finally:
            handle.remove()
        return layer_inputs[-1]
