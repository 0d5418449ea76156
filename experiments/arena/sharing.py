"""Let a simulated swarm decide by itself which cells to share.

`AutoSharing` measures what the procedure of `models/sharing.py` needs. Each peer holds out some of its
training samples. After each averaging it compares its values with those before: what training has moved, and
by how much the loss on held-out samples would change if a candidate assignment had been in force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models import (
    Anatomy,
    Assignment,
    AutoOptions,
    Candidate,
    Decider,
    Decision,
    Metrics,
    ModelError,
    SgdLearner,
    UpdateRule,
    levels,
    norm_layers,
    propose,
    seeded_rng,
)
from ...models.stack import read_rule

MIN_PEERS = 4
"""With fewer peers a standard error over peers says nothing."""
MIN_SAMPLES = 10
"""The fewest training samples of a peer from which some can be held out."""
SKETCH = 32
"""Numbers in a sketch: random sums of the coordinates of a part, the same on every peer."""
HEAD_SAMPLES = 160
"""The most samples per round on which the separate output layer of each peer is trained."""


class AutoSharing:
    """Starts with every cell shared by all peers, and changes that where held-out loss falls.

        arena = Arena(learners, sharing=AutoSharing())
        for round in arena.run(30): ...
        print(*arena.sharing.decisions, sep="\\n")

    seed
        Seeds which samples are held out.
    dry_run
        Report decisions in `decisions`, but do not take them.
    """

    def __init__(self, options: AutoOptions | None = None, *, seed: int = 0, dry_run: bool = False):
        self.options, self.seed, self.dry_run = options or AutoOptions(), seed, dry_run
        self.decisions: list[Decision] = []
        self.reason = ""
        """Why nothing is decided in this swarm; empty if it is."""
        self.deciding = False
        """Whether samples are held out now."""

    def start(self, learners: Sequence[object]) -> None:
        """Share every cell, and hold out samples; raise if a learner is not suitable."""
        self._learners = [_suitable(learner) for learner in learners]
        networks = [learner.network for learner in self._learners]
        anatomies = {network.slicing.anatomy.digest for network in networks}
        if len(anatomies) > 1:
            raise ModelError(
                f"AutoSharing needs one architecture for all peers; there are {len(anatomies)}"
            )
        anatomy = networks[0].slicing.anatomy.with_norm_parts(norm_layers(networks[0].module))
        self.assignment = Assignment.shared(anatomy, [network.peer for network in networks])
        self._apply(self.assignment)
        self._samples = [learner.samples for learner in self._learners]
        fewest = min(len(labels) for _, labels in self._samples)
        if len(networks) < MIN_PEERS:
            self.reason = f"{len(networks)} peers are too few to compare; it takes {MIN_PEERS}"
        elif fewest < MIN_SAMPLES:
            self.reason = (
                f"a peer has {fewest} training samples; holding some out takes {MIN_SAMPLES}"
            )
        self._parts = {part: _coordinates(anatomy, part) for part in anatomy.names}
        self._decider = Decider(self.options)
        self._movement = _Movement(len(networks), anatomy.size, anatomy.first_cells[-1])
        self._cell_of = _cells(anatomy, 0)
        self._round = self._next_look = 0
        self._first_loss, self._learned = 0.0, False
        self._training_losses: list[float] = []
        if not self.reason:
            self._hold_out(self.options.first - self.options.every)

    def replace_samples(self, samples: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Give every peer other training samples, as many as before; call `Arena.renew` afterwards."""
        self._samples = list(samples)
        if self.deciding:
            self._hold_out(self._since)
        else:
            for learner, own in zip(self._learners, samples, strict=True):
                _replace_samples(learner, own)

    def before_averaging(self) -> None:
        """Keep the values that training has led to, while the swarm decides."""
        if self.deciding:
            self._before = self._values()

    def after_averaging(self, training: Sequence[Metrics]) -> bool:
        """Measure, and decide if a decision is due. Returns True if slices or samples have changed."""
        if self.reason:
            return False
        self._round += 1
        round_number = self._round
        if not self.deciding:
            return self._look_again(round_number, training)
        after = self._values()
        self._movement.add(self._before - after, self._cell_of)
        self._train_heads()
        if round_number <= self._since or not self._has_learned(round_number, training):
            return False
        if self._candidates is None:
            ratios = self._movement.ratios()
            self._candidates = propose(self.assignment, self._sketches(after), ratios, self.options)
            self._changes = np.zeros((len(self._candidates), len(self._learners)))
            self._losses = np.zeros(len(self._learners))
        losses = self._held_out_losses(after)
        with_heads = self._held_out_losses(self._with_averaged_heads(after, self.assignment))
        control = min(losses, with_heads, key=np.mean)
        self._losses += losses
        for index, candidate in enumerate(self._candidates):
            compared = control if candidate.level == 0 else losses
            self._changes[index] += self._held_out_losses(self._mixed(candidate, after)) - compared
        self._put(after)
        self._measured += 1
        if self._measured < self.options.every:
            return False
        return self._decide(round_number, after)

    # --- deciding -------------------------------------------------------------------------------

    def _decide(self, round_number: int, after: np.ndarray) -> bool:
        assert self._candidates is not None
        decision = self._decider.decide(
            round_number,
            self._candidates,
            self._losses / self._measured,
            self._changes / self._measured,
        )
        if decision is not None:
            self.decisions.append(decision)
            if not self.dry_run:
                self._put(self._mixed(decision.candidate, after))
                self.assignment = decision.candidate.assignment
                self._apply(self.assignment)
                self._movement.forget()
                self._new_heads()
        self._begin_window(round_number)
        if self._decider.quiet:
            self._release(round_number)
            return True
        return decision is not None and not self.dry_run

    def _has_learned(self, round_number: int, training: Sequence[Metrics]) -> bool:
        """Whether the training loss has fallen enough for differences between peers to show."""
        loss = float(np.mean([one.mean_loss for one in training]))
        self._first_loss = max(self._first_loss, loss)
        fallen = loss < self.options.learned * self._first_loss
        self._learned |= fallen or round_number >= self.options.latest
        return self._learned

    def _begin_window(self, since: int) -> None:
        """Forget what was measured; measure again after round `since`."""
        self._since, self._measured = since, 0
        self._candidates: list[Candidate] | None = None

    def _look_again(self, round_number: int, training: Sequence[Metrics]) -> bool:
        """While nothing is decided: whether it is time to, or the training loss has risen."""
        loss = float(np.mean([one.mean_loss for one in training]))
        recent, self._training_losses = self._training_losses[-5:], [*self._training_losses, loss]
        risen = len(recent) > 1 and loss > self.options.alarm * min(recent)
        if not risen and round_number < self._next_look:
            return False
        self._decider.wake()
        self._hold_out(round_number + 1)
        return True

    def _hold_out(self, since: int) -> None:
        self.deciding = True
        self._held_out: list[tuple[Tensor, Tensor]] = []
        for learner, (inputs, labels) in zip(self._learners, self._samples, strict=True):
            count = min(int(self.options.held_out * len(labels)), self.options.max_held_out)
            generator = seeded_rng(self.seed, "held-out", learner.network.peer)
            order = torch.from_numpy(generator.permutation(len(labels)))
            held_out, trained = order[:count], order[count:]
            self._held_out.append((inputs[held_out], labels[held_out]))
            _replace_samples(learner, (inputs[trained], labels[trained]))
        self._movement.forget()
        self._new_heads()
        self._begin_window(since)

    def _release(self, round_number: int) -> None:
        self.deciding = False
        self._training_losses = []
        self._next_look = ceil(self.options.look_again * round_number) + 1
        for learner, samples in zip(self._learners, self._samples, strict=True):
            _replace_samples(learner, samples)

    def _apply(self, assignment: Assignment) -> None:
        for learner in self._learners:
            network = learner.network
            slices, graph = assignment.slices(network.peer)
            network.reslice(slices, graph, anatomy=assignment.anatomy)

    # --- measuring ------------------------------------------------------------------------------

    def _values(self) -> np.ndarray:
        return np.stack([learner.network.flat.cpu().numpy() for learner in self._learners])

    def _put(self, rows: np.ndarray) -> None:
        for learner, row in zip(self._learners, rows, strict=True):
            learner.network.flat.copy_(torch.from_numpy(row))

    @torch.no_grad()
    def _held_out_losses(self, rows: np.ndarray) -> np.ndarray:
        """Return the mean loss of every peer on its held-out samples; leaves `rows` in the networks."""
        self._put(rows)
        losses = []
        for learner, (inputs, labels) in zip(self._learners, self._held_out, strict=True):
            module = learner.network.module.eval()
            losses.append(float(learner.loss(module(inputs), labels).mean()))
        return np.array(losses)

    def _mixed(self, candidate: Candidate, after: np.ndarray) -> np.ndarray:
        """Return the values after averaging, but with what the candidate changes averaged as it says."""
        if candidate.level == 0:
            return self._with_averaged_heads(after, candidate.assignment)
        rows, changed = after.copy(), candidate.coordinates
        rows[:, changed] = candidate.assignment.average(self._before, changed)
        return rows

    def _sketches(self, after: np.ndarray) -> dict[str, np.ndarray]:
        heads = self._with_heads(self._before) - after
        output = self._outputs
        sketches = {}
        for part, coordinates in self._parts.items():
            moved = heads if part == output and self._heads else self._movement.total
            generator = seeded_rng(0, "sketch", part)
            bucket = generator.integers(SKETCH, size=len(coordinates))
            signs = generator.choice((-1.0, 1.0), size=len(coordinates))
            sketches[part] = np.stack(
                [np.bincount(bucket, row[coordinates] * signs, SKETCH) for row in moved]
            )
        return sketches

    # --- output layers that are never averaged --------------------------------------------------

    @property
    def _outputs(self) -> str:
        """The name of the output part."""
        return next(part for level, part in levels(self.assignment.anatomy) if level == 0)

    def _new_heads(self) -> None:
        """Give every peer a copy of its output layer, which is trained on but never averaged.

        It shows differences between peers that one round of training is too short to show.
        """
        self._heads = [
            head for learner in self._learners if (head := _Head.of(learner)) is not None
        ]

    def _train_heads(self) -> None:
        for head in self._heads:
            head.train()

    def _with_averaged_heads(self, rows: np.ndarray, assignment: Assignment) -> np.ndarray:
        """Return the rows with the separate output layers, averaged as assigned, in place of their own."""
        outputs, mixed = self._parts[self._outputs], rows.copy()
        mixed[:, outputs] = assignment.average(self._with_heads(self._before), outputs)
        return mixed

    def _with_heads(self, rows: np.ndarray) -> np.ndarray:
        if not self._heads:
            return rows
        rows = rows.copy()
        for row, head in zip(rows, self._heads, strict=True):
            head.write(row)
        return rows


def _suitable(learner: object) -> SgdLearner:
    if type(learner) is not SgdLearner:
        raise ModelError(
            f"AutoSharing needs learners with a loss per sample (SgdLearner), not "
            f"{type(learner).__name__}"
        )
    return learner


def _replace_samples(learner: SgdLearner, samples: tuple[Tensor, Tensor]) -> None:
    learner.samples = samples
    learner.order = learner.order[:0]


@dataclass
class _Movement:
    """What training moves away from the average, over the last rounds.

    total
        Per peer and coordinate, the sum over rounds, older rounds counting less.
    product, square
        Per cell, the mean over peers of the products of two successive rounds' movements, and of squares.
        The noise of a peer's samples differs from round to round, so the product is what lasts.
    """

    peers: int
    size: int
    cells: int
    total: np.ndarray = field(init=False)
    product: np.ndarray = field(init=False)
    square: np.ndarray = field(init=False)
    last: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.total = np.zeros((self.peers, self.size), np.float32)
        self.product, self.square = np.zeros((2, self.cells))

    def add(self, moved: np.ndarray, cell_of: np.ndarray) -> None:
        """Add one round: `moved` is values before averaging minus values after, [peers, coordinates]."""
        self.total = 0.7 * self.total + moved
        if self.last is not None:
            scale = 1 / max(self.peers - 1, 1)
            for sums, products in ((self.product, moved * self.last), (self.square, moved**2)):
                by_cell = np.bincount(cell_of, products.sum(axis=0) * scale, self.cells)
                sums *= 0.75
                sums += 0.25 * by_cell
        self.last = moved

    def ratios(self) -> np.ndarray:
        """Return V/σ² of every cell."""
        noise = (self.square - self.product) / 2
        return np.divide(self.product, noise, out=np.zeros_like(noise), where=noise > 0)

    def forget(self) -> None:
        """Begin anew: other values are averaged from now on."""
        self.total[:] = 0
        self.last = None


def _coordinates(anatomy: Anatomy, part: str) -> np.ndarray:
    """Return the coordinates that lead into a part's cells; for the inputs, those that lead out of them."""
    index = anatomy.find(part)
    first, end = anatomy.first_cells[index : index + 2]
    for axis in (0, -1):
        cells = _cells(anatomy, axis)
        if (inside := (cells >= first) & (cells < end)).any():
            break
    return np.flatnonzero(inside)


def _cells(anatomy: Anatomy, axis: int) -> np.ndarray:
    """Return, for every coordinate, the cell on the first or last axis with cells; for norms, their own."""
    cells = np.zeros(anatomy.size, np.int64)
    for one in anatomy.parameters:
        with_cells = [number for number, each in enumerate(one.axes) if each is not None]
        grid = np.zeros(one.shape, np.int64)
        if one.extra_cell is not None:
            grid[:] = one.extra_cell
        elif with_cells:
            number = with_cells[axis]
            grid[:] = np.expand_dims(
                np.asarray(one.axes[number]),
                [other for other in range(len(one.shape)) if other != number],
            )
        elif one.cell is not None:
            grid[...] = one.cell
        cells[anatomy.spans[one.name]] = grid.ravel()
    return cells


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
        if not isinstance(layer, nn.Linear) or rule is None:
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
            losses = learner.loss(F.linear(batch, *values), targets)
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
            self._learner.network.module.eval()(inputs)
        finally:
            handle.remove()
        return received[-1]
