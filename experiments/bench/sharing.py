"""Benchmarks of peers that decide what they share: their processor time against that of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import nn

from ...models import SgdLearner, SlicedNetwork, average, discover, mlp, seeded_rng, small_cnn
from ...models.sharing import (
    Assignment,
    AutoOptions,
    Plan,
    Planner,
    SharingMember,
    Statistics,
)
from ..arena import Arena, AutoSharing
from . import Row

PEERS = 16
LOCAL_SAMPLES, BATCH = 500, 10
"""Samples per round and per gradient step."""
MAX_QUIET, MAX_DECIDING = 0.10, 0.35
"""The claims: what deciding costs a peer, as a share of its training, while nothing is held out and while
changes are compared."""
WARM_UP, ROUNDS = 6, 6
"""Rounds before times are measured, and measured rounds."""
DECIDING = AutoOptions(learned=1e9, quiet=10**9)
"""Compare changes in every round from the third on, whatever the losses are."""
QUIET = AutoOptions(learned=1e9, quiet=0, look_again=1e9, alarm=1e9)
"""Hold nothing out after the first date, in the fifth round."""


@dataclass(frozen=True)
class Workload:
    """A network and the shape of its samples."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def learners(self, peers: int, local_samples: int) -> list[SgdLearner]:
        """Return learners with random samples of ten classes; their values hardly affect the time."""
        generator = torch.Generator().manual_seed(0)
        anatomy = discover(self.make(), torch.rand(2, *self.shape, generator=generator))
        centres = torch.rand(10, *self.shape, generator=generator)
        learners = []
        for peer in range(peers):
            labels = torch.randint(10, (local_samples,), generator=generator)
            inputs = centres[labels] + torch.randn(local_samples, *self.shape, generator=generator)
            network = SlicedNetwork(
                self.make(), {"global": 1.0}, anatomy=anatomy, peer=str(peer), rest=None, seed=0
            )
            samples = inputs, labels
            learners.append(
                SgdLearner(
                    network, samples, (inputs[:10], labels[:10]), local_samples=local_samples,
                    batch=BATCH, rate=0.02, seed=int(seeded_rng(0, "order", peer).integers(2**31)),
                )
            )  # fmt: skip
        return learners


WORKLOADS = (
    Workload("perceptron 196-60-30-10", lambda: mlp("196=60=30=10"), (196,)),
    Workload("perceptron 784-60-30-10", lambda: mlp("784=60=30=10"), (784,)),
    Workload("small CNN, 3×32×32", lambda: small_cnn(widths=(8, 16), hidden=64), (3, 32, 32)),
)


def auto(
    workloads: Sequence[Workload] = WORKLOADS,
    *,
    peers: int = PEERS,
    local_samples: int = LOCAL_SAMPLES,
    rounds: int = ROUNDS,
) -> list[Row]:
    """Processor time of deciding against that of training: for one peer at a time, and for the arena."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[Row] = []
    try:
        for workload in workloads:
            for state, options, wanted in (
                ("quiet", QUIET, MAX_QUIET),
                ("deciding", DECIDING, MAX_DECIDING),
            ):
                swarm = OneByOne(workload.learners(peers, local_samples), options)
                deciding, training = swarm.measure(rounds)
                note = f"a peer's round of {local_samples} samples; baseline: training alone"
                name = f"auto, {state}, {workload.name}"
                rows.append(Row(name, "s", deciding, training, wanted, "at most", note))
                rows.append(_in_arena(workload, state, options, peers, local_samples, rounds))
    finally:
        torch.set_num_threads(threads)
    return rows


class OneByOne:
    """Peers that train one after the other, as live peers do, and decide together what they share.

    Measures the processor time of a peer's training, and of what it does to decide. Averaging is not
    measured: live peers leave it to gossip.
    """

    def __init__(self, learners: Sequence[SgdLearner], options: AutoOptions):
        self._learners, self._planner = learners, Planner(options)
        networks = [learner.network for learner in learners]
        shared = Assignment.shared(
            networks[0].slicing.anatomy, [network.peer for network in networks]
        )
        self.plan: Plan = self._planner.first(shared)
        self._members = [SharingMember(learner, self.plan, options) for learner in learners]
        self._round = 0

    def measure(self, rounds: int) -> tuple[float, float]:
        """Return the seconds per round and peer of deciding and of training.

        Means over rounds, since a new plan, which takes longer, is followed in some of them.
        """
        times = [self.round() for _ in range(WARM_UP + rounds)][WARM_UP:]
        peers = len(self._learners)
        return fmean(one for one, _ in times) / peers, fmean(other for _, other in times) / peers

    def round(self) -> tuple[float, float]:
        """Run one round; return the seconds of all peers' deciding and training."""
        training = deciding = 0.0
        contributions = []
        for member in self._members:
            started = time.process_time()
            metrics = member.learner.train()
            trained = time.process_time()
            contributions.append(member.before_averaging(metrics))
            training += trained - started
            deciding += time.process_time() - trained
        average([learner.network for learner in self._learners])
        mean = np.asarray(np.mean(contributions, axis=0, dtype=np.float32))
        self._round += 1
        started = time.process_time()
        for member in self._members:
            member.after_averaging(mean)
        deciding += time.process_time() - started
        if self._round >= self.plan.until:
            self.plan = self._planner.next(self.plan, Statistics(self.plan.layout, mean))
            received, anatomy = self.plan.as_record(), self.plan.assignment.anatomy
            started = time.process_time()
            for member in self._members:  # every peer reads the plan that it has received
                member.follow(Plan.from_record(anatomy, received))
            deciding += time.process_time() - started
        return deciding, training


def _in_arena(
    workload: Workload,
    state: str,
    options: AutoOptions,
    peers: int,
    local_samples: int,
    rounds: int,
) -> Row:
    """Compare rounds of an arena whose peers decide with rounds of one whose peers do not."""
    plain = Arena(workload.learners(peers, local_samples), threads=1)
    deciding = Arena(
        workload.learners(peers, local_samples),
        threads=1,
        sharing=AutoSharing(options),
    )
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM_UP + rounds):
        for arena, seconds in zip((deciding, plain), times, strict=True):
            started = time.process_time()
            arena.train_and_average()
            seconds.append(time.process_time() - started)
    with_it, without = (fmean(seconds[WARM_UP:]) for seconds in times)
    note = f"{peers} peers stacked in the arena, more than a round without; baseline: that round"
    return Row(f"arena, {state}, {workload.name}", "s", with_it - without, without, note=note)
