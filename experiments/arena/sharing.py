"""Let a simulated swarm decide by itself which cells to share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ...models import Metrics, ModelError, norm_layers
from ...models.sharing import (
    GLOBAL,
    MIN_PEERS,
    MIN_SAMPLES,
    Assignment,
    AutoOptions,
    Compared,
    Decision,
    Plan,
    Planner,
    SharingMember,
    SharingReport,
    Statistics,
    check_learner,
    frozen_parts,
)

if TYPE_CHECKING:
    from .lockstep import Mixing


class AutoSharing:
    """Starts with every cell shared by all peers, and changes that for cells if held-out loss then falls.

    Parts that are not trained stay shared. Parameters that were frozen when the SlicedNetwork was made belong
    to no part: they are neither shared nor changed.

        arena = Arena(learners, sharing=AutoSharing())
        for round in arena.run(30): ...
        print(*arena.sharing.decisions, sep="\\n")

    Peers measure and decide by the code of a live swarm (`SharingMember`, `Planner`). What they measure is
    averaged by the arena's mixing; the first peer makes all plans.

    seed
        Seeds which samples are held out.
    dry_run
        Report decisions in `decisions`, but do not take them.
    keep_models
        Start with the learners' own partial models, and change only cells that all peers share.
    """

    def __init__(
        self,
        options: AutoOptions | None = None,
        *,
        seed: int = 0,
        dry_run: bool = False,
        keep_models: bool = False,
    ):
        self.options, self.seed, self._keep_models = options or AutoOptions(), seed, keep_models
        self._dry_run, self._planner = dry_run, Planner(self.options)
        self.reason = ""
        """Why this swarm cannot decide, so that everything stays as it is; empty if it can."""

    @property
    def can_decide(self) -> bool:
        """Whether changes are compared and decided in this swarm; if not, `reason` says why."""
        return not self.reason

    @property
    def decisions(self) -> list[Decision]:
        """The changes so far; with `dry_run`, those that would have been made."""
        return self._planner.decisions

    @property
    def compared(self) -> list[Compared]:
        """Every comparison so far."""
        return self._planner.compared

    @property
    def assignment(self) -> Assignment:
        """Which peers share which cells now."""
        return self.plan.assignment

    def first_assignment(self, learners: Sequence[object]) -> Assignment:
        """Return the assignment with which a swarm starts; raises ModelError if a learner is not suitable."""
        networks = [check_learner(learner).network for learner in learners]
        anatomies = {network.slicing.anatomy.digest for network in networks}
        if len(anatomies) > 1:
            raise ModelError(
                f"AutoSharing needs one architecture for all peers; there are {len(anatomies)}"
            )
        if len(networks[0].slicing.anatomy.parts) < 2:
            raise ModelError(
                "the network's layers could not be analysed, so there are no parts to share: run gossamer "
                "slices to see why"
            )
        norms = norm_layers(networks[0].module)
        if norms and any(network.buffers != "average" for network in networks):
            raise ModelError(
                'peers decide about norm layers, too: leave out buffers, or set buffers = "average"'
            )
        anatomy = networks[0].slicing.anatomy.with_norm_parts(norms)
        if self._keep_models:
            return Assignment.of(networks, anatomy)
        return Assignment.shared(anatomy, [network.peer for network in networks])

    def start(self, learners: Sequence[object], mixing: Mixing) -> None:
        """Slice the networks, and hold out samples; raises ModelError if a learner is not suitable."""
        assignment = self.first_assignment(learners)
        suitable = [check_learner(learner) for learner in learners]
        fewest = min(len(learner.samples[1]) for learner in suitable)
        self.reason = ""
        if len(suitable) < MIN_PEERS:
            self.reason = f"{len(suitable)} peers are too few to decide; it takes {MIN_PEERS}"
        elif fewest < MIN_SAMPLES:
            self.reason = (
                f"a peer has {fewest} training samples; holding some out takes {MIN_SAMPLES}"
            )
        frozen = frozenset.intersection(
            *(frozen_parts(learner, assignment.anatomy) for learner in suitable)
        )
        parts = [part for part in assignment.anatomy.names if part not in frozen]
        if self.can_decide and not any(len(assignment.cells(part, GLOBAL)) for part in parts):
            self.reason = "no part is both trained and shared by all peers"
        self._planner = Planner(self.options, dry_run=self._dry_run, frozen=frozen)
        self.plan = self._planner.first(assignment, deciding=self.can_decide)
        self._report = SharingReport(assignment, dry_run=self._dry_run, reason=self.reason)
        self._members = [
            SharingMember(learner, self.plan, self.options, seed=self.seed) for learner in suitable
        ]
        self._mean = _TrackedMean(mixing, len(suitable))
        self._round = 0

    def as_record(self) -> dict[str, Any]:
        """Return all decisions, comparisons and assignments as plain data."""
        return self._report.as_record(self.decisions, self.compared)

    def sentences(self) -> list[str]:
        """Return a sentence for every decision."""
        return [self._report.decision(decision)["sentence"] for decision in self.decisions]

    def replace_samples(self, samples: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Give every peer other training samples, as many as before; call `Arena.renew` afterwards."""
        for member, new_samples in zip(self._members, samples, strict=True):
            member.replace_samples(new_samples)

    def before_training(self) -> None:
        """Note the values that a round of training begins with."""
        for member in self._members if self.can_decide else ():
            member.before_training()

    def before_averaging(self, training: Sequence[Metrics]) -> None:
        """Collect what peers have measured, for `after_averaging`; training: the metrics of the round."""
        if self.can_decide:
            self._contributions = [
                member.before_averaging(metrics, added)
                for member, metrics, added in zip(
                    self._members, training, self._mean.added, strict=True
                )
            ]

    def after_averaging(self) -> bool:
        """Measure, and decide if a decision is due. Returns True if slices or samples have changed."""
        if not self.can_decide:
            return False
        self._round += 1
        before, everyone = self.plan, range(len(self._members))
        means = self._mean.update(self._contributions)
        changed = [
            member.after_averaging(mean, complete=before.layout.is_complete(mean, everyone))
            for member, mean in zip(self._members, means, strict=True)
        ]
        if self._round < before.until:
            return any(changed)
        plan = self.plan = self._next_plan(means[0])
        self._report.add(self._round, plan.assignment)
        # The mean starts anew if other things are measured. It also does for each new plan if values spread
        # slowly (spread > 0), as contributions cannot be changed later; an extended plan (of the same round)
        # is not new.
        if plan.layout.name != before.layout.name or (plan.spread and plan.round != before.round):
            self._mean.restart()
        changed += [member.follow(plan) for member in self._members]
        return any(changed)

    def _next_plan(self, mean: np.ndarray) -> Plan:
        """Return the next plan, made by the first peer, or the same for longer if measurements are missing.

        mean: the first peer's estimate of the mean of all measurements.
        """
        plan, planner, peers = self.plan, self._planner, len(self._members)
        statistics = Statistics(plan.layout, mean, spread=plan.spread)
        is_slow = self._members[0].is_slow
        next_plan = planner.next_if_measured(plan, statistics, self._round, peers, is_slow)
        return next_plan or planner.extended(plan, self._round)


class _TrackedMean:
    """The mean over peers of vectors that change from round to round, averaged as the arena averages models.

    On a graph by dynamic average consensus: each peer adds to its estimate of the mean by how much its own
    vector has changed since the last averaging; then estimates are mixed.
    """

    def __init__(self, mixing: Mixing, peers: int):
        self._mixing, self._peers, self._step = mixing, peers, 0
        self.restart()

    def restart(self) -> None:
        """Begin anew, perhaps with vectors of another length."""
        self._weights = np.ones(self._peers)
        self._added: np.ndarray | None = None

    @property
    def added(self) -> Sequence[np.ndarray | None]:
        """The vector that each peer had contributed at the last averaging; None before the first one on a
        graph, and always where means are exact, which need no estimates."""
        return [None] * self._peers if self._added is None else list(self._added)

    def update(self, vectors: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Return every peer's estimate after one averaging."""
        members = range(self._peers)
        # "" is no partial model: all peers mix on the whole graph.
        matrices, weights = self._mixing.matrices("", members, self._step, self._weights)
        self._step += 1
        if matrices is None:
            mean = np.asarray(np.mean(vectors, axis=0, dtype=np.float32))
            return [mean] * self._peers
        added = np.stack(vectors)
        if self._added is None:
            self._estimates = added.copy()
        else:
            self._estimates += (added - self._added) / self._weights[:, None].astype(np.float32)
        self._added, self._weights = added, weights
        for matrix in matrices:
            self._estimates = matrix.astype(np.float32) @ self._estimates
        return list(self._estimates)
