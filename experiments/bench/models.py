"""Benchmarks of networks: reading and writing a partial model, matching cells, deciding what to share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn import functional as F

from ...models import (
    SgdLearner,
    SlicedNetwork,
    average,
    discover,
    mlp,
    resnet,
    seeded_rng,
    small_cnn,
)
from ...models.matching import Cells, MatchOptions, match
from ...models.sharing import Assignment, AutoOptions, Plan, Planner, SharingMember, Statistics
from ..arena import Arena, AutoSharing
from ..study import torch_threads
from . import Row, in_own_process, median_seconds, race

# --- gathering and scattering against training ------------------------------------------------------

BATCH = 32
SHARED_FRACTION = 0.8
"""The fraction of the cells of every hidden layer that is averaged."""
MAX_RATIO = 0.05
"""The claim: reading and writing take at most this fraction of a training step's time."""
NETWORK_REPEATS = 3
"""Timed repetitions; few, since a training step of ResNet-18 takes seconds."""


@dataclass(frozen=True)
class Work:
    """The two functions that are timed, and how many values the network has and shares."""

    exchange: Callable[[], object]
    step: Callable[[], object]
    value_count: int
    shared_count: int


def prepare(widths: tuple[int, ...] = (64, 128, 256, 512), blocks: int = 2) -> Work:
    """Make a residual network for 32×32 images that shares most of its cells; ResNet-18 by default."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    module = resnet(widths=widths, blocks=blocks)
    network = SlicedNetwork(
        module, {"global": SHARED_FRACTION}, example=images[:1], seed=0, check=False
    )
    module.train()

    def exchange() -> None:
        """Read and write the shared values, as every averaging does."""
        network.write("global", network.read("global"))

    def step() -> None:
        """One step of plain SGD."""
        module.zero_grad(set_to_none=True)
        F.cross_entropy(module(images), labels).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.01)

    return Work(exchange, step, len(network.flat), len(network.slicing.coordinates("global")))


def networks(
    make_work: Callable[[], Work] = prepare,
    time_functions: Callable[..., Sequence[float]] = median_seconds,
) -> list[Row]:
    """Time reading and writing 80 % of the cells against one training step of batch 32, on one thread."""
    with torch_threads(1):
        work = make_work()
        exchange, step = time_functions(work.exchange, work.step, repeats=NETWORK_REPEATS)
    name = f"read and write {work.shared_count / 1e6:.1f} of {work.value_count / 1e6:.1f} million values"
    note = (
        f"ResNet-18, {SHARED_FRACTION:.0%} of the cells shared; baseline: one training step of {BATCH} "
        "images of 32×32"
    )
    return [Row(name, "s", exchange, step, MAX_RATIO, "at most", note)]


# --- matching ---------------------------------------------------------------------------------------

PEERS, INPUTS, OUTPUTS = 10, 784, 10
WIDTHS = (50, 100, 200, 400, 800)
MATCHING_REPEATS = 1
"""Timed repetitions, after one that warms up; only one, since the naive loops take seconds."""
MIN_SPEEDUP = 20.0
"""The claim: matching is at least this many times as fast as the naive loops."""


def matching() -> list[Row]:
    """Speed-up over plain loops at 100 cells, then seconds from 50 to 800 cells.

    Measured in a new process, in which numpy has one thread: on a busy machine, a product of this size waits
    longer for its second thread than it computes. The thread count is read from the environment only when
    numpy is imported.
    """
    one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return in_own_process(measure, **one_thread)


def measure() -> list[Row]:
    """Return the rows of `matching`, measured in this process."""
    peers = planted(100)
    assignments: dict[str, list[np.ndarray]] = {}

    def vectorised() -> None:
        assignments["vectorised"] = list(match(peers).assignments)

    def naive() -> None:
        assignments["naive"] = match_naively(peers)

    name = f"matching, {PEERS} peers, {INPUTS} inputs, 100 cells, to convergence"
    row = race(name, vectorised, naive, wanted=MIN_SPEEDUP, repeats=MATCHING_REPEATS)
    if not same_partition(assignments["vectorised"], assignments["naive"]):
        raise AssertionError("vectorised and naive matching grouped the cells differently")
    limited = match(peers)  # with the default limit on fused cells
    note = f"baseline: plain loops; {len(limited.atoms)} fused cells, {limited.sweeps} sweeps"
    rows = [replace(row, note=note)]
    narrowest_seconds = None
    for width in WIDTHS:
        cells = planted(width)
        started = time.perf_counter()
        unlimited = match(cells, MatchOptions(limit=None))
        seconds = time.perf_counter() - started
        narrowest_seconds = narrowest_seconds or seconds
        sizes = f"{len(unlimited.atoms)} fused cells, {unlimited.sweeps} sweeps"
        note = f"ratio: against {WIDTHS[0]} cells; {sizes}"
        rows.append(Row(f"matching, {width} cells", "s", seconds, narrowest_seconds, note=note))
    return rows


def planted(width: int, seed: int = 0, inputs: int = INPUTS) -> list[Cells]:
    """Random cells for every peer: two thirds of a common set of cells, with noise, in random order."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(width * 3 // 2, inputs + 1 + OUTPUTS)) * 0.15
    peers = []
    for _ in range(PEERS):
        chosen = common[rng.permutation(len(common))[:width]]
        peers.append(Cells.of(chosen + 0.05 * rng.normal(size=chosen.shape)))
    return peers


def match_naively(peers: list[Cells], sweeps: int = 20) -> list[np.ndarray]:
    """The algorithm of `match` as plain loops: the reference for its result, and the baseline for its speed.

    Returns the fused cell (PFNM's atom) of each cell, by peer. The sums over each atom's cells are computed
    again in every step, and costs are computed one by one, for each cell and each atom.
    """
    options = MatchOptions()
    prior, count = options.prior_precision, len(peers)
    assigned: list[np.ndarray | None] = [None] * count
    rng = np.random.default_rng(0)

    def step(j: int) -> bool:
        """Assign peer j's cells again, given all other peers' assignments; return whether any changed."""
        sums: dict[int, np.ndarray] = {}
        precision_sums: dict[int, np.ndarray] = {}
        members: dict[int, int] = {}
        for k, labels in enumerate(assigned):
            if k == j or labels is None:
                continue
            for cell, atom in enumerate(labels):
                a = int(atom)
                value = peers[k].values[cell] * peers[k].precision
                sums[a] = sums[a] + value if a in sums else value
                precision = peers[k].precision
                precision_sums[a] = (
                    precision_sums[a] + precision if a in precision_sums else precision
                )
                members[a] = members.get(a, 0) + 1
        atoms = sorted(sums)
        cells = peers[j].values
        new_atoms = min(len(cells), max((options.limit or 10**9) - len(atoms), 1))
        cost = np.empty((len(cells), len(atoms) + new_atoms))
        before = {a: np.sum(sums[a] ** 2 / (prior + precision_sums[a])) for a in atoms}
        for row, cell in enumerate(cells):
            value = cell * peers[j].precision
            for column, a in enumerate(atoms):
                after = np.sum(
                    (sums[a] + value) ** 2 / (prior + precision_sums[a] + peers[j].precision)
                )
                log_odds = math.log(members[a] / (count - members[a]))
                cost[row, column] = -(after - before[a]) - 2 * log_odds
            own_score = np.sum(value**2 / (prior + peers[j].precision))
            for rank in range(new_atoms):
                cost[row, len(atoms) + rank] = (
                    -own_score
                    - 2 * math.log(options.concentration / count)
                    + 2 * math.log(rank + 1)
                )
        _, columns = linear_sum_assignment(cost)
        next_atom = max(atoms, default=-1) + 1
        labels = np.array([atoms[c] if c < len(atoms) else next_atom + c for c in columns])
        old, assigned[j] = assigned[j], labels
        if old is None:
            return True
        shared_atoms = set(atoms)  # a cell that moves between new atoms of its own has not changed
        return any(
            int(a) != int(b) and (int(a) in shared_atoms or int(b) in shared_atoms)
            for a, b in zip(old, labels, strict=True)
        )

    for j in range(count):
        step(j)
    for _ in range(sweeps):
        changed = [step(int(j)) for j in rng.permutation(count)]
        if not any(changed):
            break
    return [labels for labels in assigned if labels is not None]


def same_partition(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    """Whether two assignments group the cells in the same way, whatever the numbers of the atoms."""
    pairs = np.unique(np.stack([np.concatenate(first), np.concatenate(second)], axis=1), axis=0)
    return len(pairs) == len(np.unique(pairs[:, 0])) == len(np.unique(pairs[:, 1]))


# --- deciding what to share against training --------------------------------------------------------

DECIDING_PEERS = 16
LOCAL_SAMPLES, DECIDING_BATCH = 500, 10
"""Samples per round and per gradient step."""
MAX_QUIET, MAX_DECIDING = 0.10, 0.35
"""The claims: what deciding costs a peer, as a share of its training, while nothing is held out and while
changes are compared."""
WARM_UP, ROUNDS = 6, 6
"""Rounds before times are measured, and measured rounds."""
DECIDING = AutoOptions(learned_loss_share=1e9, max_without_hint=10**9)
"""Compare changes in every round from the third on, whatever the losses are."""
QUIET = AutoOptions(
    learned_loss_share=1e9, max_without_hint=0, next_look_factor=1e9, alarm_factor=1e9
)
"""Hold nothing out after the first time that peers look for changes to compare, in the fifth round."""


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
                    batch=DECIDING_BATCH, rate=0.02, seed=int(seeded_rng(0, "order", peer).integers(2**31)),
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
    peers: int = DECIDING_PEERS,
    local_samples: int = LOCAL_SAMPLES,
    rounds: int = ROUNDS,
) -> list[Row]:
    """Processor time of deciding against that of training: for one peer at a time, and for the arena."""
    rows: list[Row] = []
    states = ("quiet", QUIET, MAX_QUIET), ("deciding", DECIDING, MAX_DECIDING)
    with torch_threads(1):
        for workload, (state, options, wanted) in product(workloads, states):
            swarm = OneByOne(workload.learners(peers, local_samples), options)
            seconds = swarm.measure(rounds)
            note = f"a peer's round of {local_samples} samples; baseline: training alone"
            name = f"auto, {state}, {workload.name}"
            rows.append(Row(name, "s", *seconds, wanted, "at most", note))
            rows.append(_in_arena(workload, state, options, peers, local_samples, rounds))
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
        deciding, training = (fmean(seconds) / peers for seconds in zip(*times, strict=True))
        return deciding, training

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
    sharing = AutoSharing(options)
    deciding = Arena(workload.learners(peers, local_samples), threads=1, sharing=sharing)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM_UP + rounds):
        for arena, seconds in zip((deciding, plain), times, strict=True):
            started = time.process_time()
            arena.train_and_average()
            seconds.append(time.process_time() - started)
    deciding_seconds, plain_seconds = (fmean(seconds[WARM_UP:]) for seconds in times)
    note = f"{peers} peers stacked in the arena, more than a round without; baseline: that round"
    added_seconds = deciding_seconds - plain_seconds
    return Row(f"arena, {state}, {workload.name}", "s", added_seconds, plain_seconds, note=note)
