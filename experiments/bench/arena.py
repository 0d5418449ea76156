"""Benchmarks of the arena: rounds against a torch loop, averaging against a dense product, large swarms, and
simulations in virtual time: the time per event, and what simulating adds to training."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ...models import SgdLearner, SlicedNetwork
from ...models.stack import Workers, deferred_steps, format_bytes, free_memory, peers_per_task
from ...topology import build, mixing_matrix
from ..arena import (
    Arena,
    ArrayJobs,
    Conditions,
    ExactMean,
    Gossip,
    LearningSimulation,
    Mixing,
    VectorisedPushSum,
    peak_memory,
)
from ..arena import parse as parse_distribution
from ..cli import console
from ..config.tables import Config, parse_config
from ..data import DataError, load
from ..results import RecordFile, Results, read_records
from ..study import torch_threads
from . import (
    PAPER,
    Row,
    in_own_process,
    median_seconds,
    perceptron,
    race,
    sliced_perceptron,
)

THREADS = 2
"""Threads of the arena; the torch loop uses as many inside torch, or one, whichever is faster."""
REPEATS = 5
TIMED_PEERS = 16
"""Peers that are trained to find out with how many threads the loop is faster."""

Samples = tuple[Tensor, Tensor]
"""Inputs and labels."""


@dataclass(frozen=True)
class Workload:
    """One round to be timed: every peer takes `steps` steps of `batch` samples, then all peers average.

    level: the percentage of cells that are averaged.
    mixing: the exact mean, or one exchange on a 4-regular graph by a doubly stochastic matrix ("plain") or by
        push-sum.
    samples: of each peer.
    wanted: the speed-up that is claimed; None claims nothing.
    wanted_share: the share of the machine's peak that is claimed.
    """

    name: str
    layout: str
    peers: int
    batch: int
    steps: int
    reduction: Literal["sum", "mean"]
    level: int
    mixing: Literal["mean", "plain", "push-sum"]
    samples: int
    wanted: float | None = None
    wanted_share: float | None = None

    @property
    def cells(self) -> list[int]:
        """The cells of every layer, inputs first."""
        return [int(count) for count in self.layout.split("=")]

    @property
    def flops(self) -> int:
        """Multiplications and additions of a round's products: two passes over the first layer's weights for
        every sample, forwards and for its gradient, and three over the others', whose inputs have one too."""
        first, *others = (a * b for a, b in pairwise(self.cells))
        return self.peers * self.steps * self.batch * (4 * first + 6 * sum(others))

    @property
    def bytes(self) -> int:
        """The bytes that a round moves at least: training and averaging read and write all parameters, and
        every input that is trained on is read."""
        parameters = sum((a + 1) * b for a, b in pairwise(self.cells))
        return 4 * self.peers * (4 * parameters + self.steps * self.batch * self.cells[0])

    def matrix(self) -> Tensor:
        """The mixing matrix of one exchange, if peers gossip."""
        rule = "metropolis" if self.mixing == "plain" else "push"
        return torch.from_numpy(mixing_matrix(build("regular:4", self.peers, 1), rule).toarray())

    def data(self) -> list[Samples]:
        """Random samples for each peer; their values do not affect the time."""
        generator = torch.Generator().manual_seed(0)
        features, *_, classes = self.cells
        return [
            (
                torch.rand(self.samples, features, generator=generator),
                torch.randint(0, classes, (self.samples,), generator=generator),
            )
            for _ in range(self.peers)
        ]

    def learners(
        self,
        data: Sequence[Samples],
        test: Samples | None = None,
        peers: Sequence[int] | None = None,
    ) -> list[SgdLearner]:
        """The learners for the arena.

        test: the test samples of all peers; each peer's own if left out. peers: the numbers of the peers that
        the data are of; all if left out.
        """
        return [
            SgdLearner(
                sliced_perceptron(str(peer), self.layout, self.level),
                samples, test or samples, local_samples=self.batch * self.steps, batch=self.batch,
                reduction=self.reduction, loss="squared", rate=0.1, seed=peer,
            )
            for peer, samples in zip(peers or range(len(data)), data, strict=True)
        ]  # fmt: skip

    def mix(self) -> Mixing:
        """How the arena averages."""
        if self.mixing == "mean":
            return ExactMean()
        return Gossip(build("regular:4", self.peers, 1), self.mixing)


class TorchLoop:
    """The baseline, a simple program: it trains torch modules one after the other, then averages them.

    The modules start with the networks' parameters and have copies of their data.
    """

    def __init__(
        self, workload: Workload, data: Sequence[Samples], networks: Sequence[SlicedNetwork]
    ):
        self._workload = workload
        self._data = [(inputs.clone(), labels.clone()) for inputs, labels in data]
        self.modules = [perceptron(workload.layout) for _ in networks]
        for module, network in zip(self.modules, networks, strict=True):
            module.load_state_dict(network.module.state_dict())
        self._optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in self.modules]
        coordinates = networks[0].slicing.coordinates("global")
        all_shared = len(coordinates) == len(networks[0].flat)
        self._shared = None if all_shared else torch.from_numpy(np.array(coordinates))
        self._weights = torch.ones(len(networks), dtype=torch.float64)
        if workload.mixing != "mean":
            self._matrix = workload.matrix()

    def round(self) -> None:
        """Train, then average."""
        self.train()
        with torch.no_grad():
            self._exchange()

    def train(self, peers: int | None = None) -> None:
        """Train all peers, or the first few; every epoch has a new permutation of the samples."""
        batch = self._workload.batch
        members = zip(self.modules, self._optimizers, self._data, strict=True)
        for module, optimizer, (inputs, labels) in list(members)[:peers]:
            order = torch.empty(0, dtype=torch.int64)
            for _ in range(self._workload.steps):
                if len(order) < batch:
                    order = torch.cat([order, torch.randperm(len(labels))])
                indices, order = order[:batch], order[batch:]
                outputs = module(inputs[indices])
                targets = F.one_hot(labels[indices], outputs.shape[1])
                losses = 0.5 * (outputs - targets).square().sum(dim=1)
                optimizer.zero_grad()
                (losses.mean() if self._workload.reduction == "mean" else losses.sum()).backward()
                optimizer.step()

    def _exchange(self) -> None:
        vectors = [parameters_to_vector(module.parameters()) for module in self.modules]
        shared = vectors if self._shared is None else [v[self._shared] for v in vectors]
        averages = self._averaged(shared)
        for module, vector, average in zip(self.modules, vectors, averages, strict=True):
            if self._shared is None:
                vector = average.clone()  # cloned, since parameters become views of it
            else:
                vector[self._shared] = average
            vector_to_parameters(vector, module.parameters())

    def _averaged(self, shared: list[Tensor]) -> Sequence[Tensor]:
        """Every peer's shared values after the exchange."""
        values = torch.stack(shared)
        if self._workload.mixing == "mean":
            return [values.mean(dim=0)] * len(shared)
        if self._workload.mixing == "plain":
            return list(self._matrix.float() @ values)
        sums = (self._matrix * self._weights).float() @ values
        self._weights = self._matrix @ self._weights
        return list(sums / self._weights[:, None].float())


# --- against the baseline ---------------------------------------------------------------------------

SMALL = "64=32=10"
WORKLOADS = (
    Workload(
        "16 peers, batch 500, gossip", PAPER, 16, 500, 1, "mean", 100, "plain", 1000, 1.2, 0.7
    ),
    Workload(
        "256 peers, 20 × batch 10, level 80", PAPER, 256, 10, 20, "sum", 80, "mean", 200, 4.0, 0.45
    ),
    Workload(
        "1024 small peers, push-sum", SMALL, 1024, 32, 20, "mean", 100, "push-sum", 100, 50.0, 0.35
    ),
)


def arena() -> list[Row]:
    """Time rounds against the torch loop and the machine's peak; then averaging against a dense product."""
    timed = [(rounds(workload), share_of_peak(workload)) for workload in WORKLOADS]
    return [*chain.from_iterable(timed), averaging()]


def rounds(workload: Workload, repeats: int = REPEATS) -> Row:
    """Time one round in the arena against the same round in the torch loop."""
    data = workload.data()
    learners = workload.learners(data)
    loop = TorchLoop(workload, data, [learner.network for learner in learners])
    swarm = Arena(learners, mixing=workload.mix(), threads=THREADS)
    threads = best_threads(loop)

    def baseline() -> None:
        with torch_threads(threads):
            loop.round()

    note = f"baseline: a torch loop, {threads} thread{'s' * (threads > 1)}"
    with torch_threads(1):
        return race(
            workload.name, swarm.train_and_average, baseline, workload.wanted, note, repeats
        )


PEAK_SIZE = 1024
"""Rows and columns of the matrices whose product measures the peak."""
PEAK_FLOPS = 2 * PEAK_SIZE**3
"""Multiplications and additions of that product."""
COPIED_BYTES = 64 << 20
"""The size of the tensors whose copy measures the memory: larger than the caches."""


def share_of_peak(workload: Workload, repeats: int = REPEATS) -> Row:
    """Compare a round's operations a second with those of large matrix products on the same threads.

    The note says what limits a round without the compiled kernel, how fast torch's products are without
    anything around them, and how much of the memory's speed a round needs at least.
    """
    swarm = Arena(workload.learners(workload.data()), mixing=workload.mix(), threads=THREADS)
    workers = Workers(THREADS)
    memory = [torch.rand(2, COPIED_BYTES // 8) for _ in range(THREADS)]
    products = BareProducts(workload)

    def copies() -> None:
        workers.run([partial(target.copy_, source) for target, source in memory])

    def bare() -> None:
        workers.run(products.tasks())

    with torch_threads(1):
        seconds, peak, copy, product = median_seconds(
            swarm.train_and_average, large_products(THREADS), copies, bare, repeats=repeats
        )
    flops_at_peak = THREADS * PEAK_FLOPS / peak
    copied = THREADS * COPIED_BYTES / copy  # half as many bytes are read, and as many are written
    bound = products.flops / product / flops_at_peak
    moved = workload.bytes / seconds / copied
    note = (
        f"baseline: a product of {PEAK_SIZE}² matrices on each of {THREADS} threads; torch's products in "
        f"the round's shapes alone reach {bound:.2f} of it; the {format_bytes(workload.bytes)} that it moves "
        f"at least take {moved:.2f} of its time at the speed of a copy, {copied / 1e9:.1f} GB/s"
    )
    name = f"{workload.name}: share of the machine's peak"
    measured = workload.flops / seconds / 1e9
    return Row(name, "GFLOP/s", measured, flops_at_peak / 1e9, workload.wanted_share, note=note)


def large_products(threads: int) -> Callable[[], object]:
    """Return a function that computes one large matrix product on each of some threads."""
    workers = Workers(threads)
    operands = [torch.rand(3, PEAK_SIZE, PEAK_SIZE) for _ in range(threads)]
    return lambda: workers.run([partial(torch.mm, x, y, out=z) for x, y, z in operands])


class BareProducts:
    """The matrix products of a round in the shapes in which torch's kernel computes them, and nothing else.

    Steps that share an update of the first layer compute its products together; the products of inputs with
    inputs that this takes are left out, as they are no part of the work to be done.
    """

    def __init__(self, workload: Workload):
        cells, batch = workload.cells, workload.batch
        parameters = sum((a + 1) * b for a, b in pairwise(cells))
        activations = batch * (2 * sum(cells[1:]) + cells[0])
        peers = peers_per_task(workload.peers, parameters, activations)
        deferred = min(workload.steps, deferred_steps(parameters, cells[1], cells[0], batch))
        self._steps, self._deferred = workload.steps, deferred
        self._tasks = -(-workload.peers // peers)
        self.flops = workload.flops * self._tasks * peers // workload.peers
        self._layers: list[list[list[Tensor]]] = [
            [self._tensors(peers, batch * (1 if layer else deferred), *shape)
             for layer, shape in enumerate(pairwise(cells))]
            for _ in range(THREADS)
        ]  # fmt: skip

    @staticmethod
    def _tensors(peers: int, rows: int, inputs: int, outputs: int) -> list[Tensor]:
        """Inputs, outputs and weights of a layer; two dimensions for one peer, as in the arena."""
        shapes = (rows, inputs), (rows, outputs), (outputs, inputs)
        return [torch.rand(*shape) if peers == 1 else torch.rand(peers, *shape) for shape in shapes]

    def tasks(self) -> list[Callable[[], None]]:
        """One function for each thread; together they compute the products of a round."""
        share = [len(part) for part in np.array_split(np.arange(self._tasks), THREADS)]
        return [partial(self._run, *pair) for pair in zip(self._layers, share, strict=True)]

    def _run(self, layers: Sequence[Sequence[Tensor]], tasks: int) -> None:
        for _ in range(tasks):
            for step in range(self._steps):
                for layer, (x, y, weight) in enumerate(layers):
                    if layer == 0 and step % self._deferred:
                        continue
                    torch.matmul(x, weight.mT, out=y)
                    torch.matmul(y.mT, x, out=weight)
                    if layer:
                        torch.matmul(y, weight, out=x)


def averaging(peers: int = 256, repeats: int = REPEATS) -> Row:
    """Time one exchange of 80 % of the cells on a 4-regular graph against numpy's dense matrix product."""
    name = f"averaging alone: {peers} peers, level 80"
    workload = Workload(name, PAPER, peers, 10, 1, "sum", 80, "plain", 1, 0.8)
    learners = workload.learners(workload.data())
    swarm = Arena(learners, mixing=workload.mix(), threads=THREADS)
    matrix = workload.matrix().float().numpy()
    coordinates = len(learners[0].network.slicing.coordinates("global"))
    values = np.random.default_rng(0).standard_normal((peers, coordinates), dtype=np.float32)
    target = np.empty_like(values)

    def product() -> None:
        np.matmul(matrix, values, out=target)

    note = f"baseline: numpy, {peers}×{peers} by {peers}×{coordinates:,}"
    return race(name, swarm.average, product, workload.wanted, note, repeats)


def best_threads(loop: TorchLoop) -> int:
    """The number of torch threads, 1 or THREADS, with which the loop is faster."""
    seconds: dict[int, float] = {}
    for threads in (1, THREADS):
        with torch_threads(threads):
            loop.train(TIMED_PEERS)
            started = perf_counter()
            loop.train(TIMED_PEERS)
            seconds[threads] = perf_counter() - started
    return min(seconds, key=lambda threads: seconds[threads])


# --- time and memory by the number of peers ---------------------------------------------------------

SAMPLES_PER_PEER = 60
"""Training samples of each peer."""
SCALE_WORKLOADS = {
    "small": Workload(
        f"{SMALL}, digits, push-sum on a 4-regular graph", SMALL, 0, 32, 20, "sum", 100, "push-sum",
        SAMPLES_PER_PEER,
    ),
    "large": Workload(
        f"{PAPER}, MNIST, exact average at level 80", PAPER, 0, 10, 50, "sum", 80, "mean", SAMPLES_PER_PEER
    ),
}  # fmt: skip
DATA_SETS = {"small": "digits", "large": "mnist"}
PEER_COUNTS = {"small": (16, 64, 256, 1024, 4096, 10_000), "large": (16, 64, 256, 1000)}


@dataclass(frozen=True)
class SwarmCost:
    """The cost of a swarm with some number of peers.

    kind: "small" or "large" networks. build, round, average: seconds to build, per round, per averaging.
    peak, needs: bytes at the peak, measured and as the arena estimates.
    """

    kind: str
    peers: int
    build: float
    round: float
    average: float
    peak: int
    needs: int
    accuracy: float

    def __str__(self) -> str:
        return (
            f"{self.peers:,} peers of {SCALE_WORKLOADS[self.kind].name}: built in {self.build:.1f} s, "
            f"{self.round:.3g} s a round ({self.average:.2g} s averaging), peak {format_bytes(self.peak)} "
            f"(arena's estimate {format_bytes(self.needs)}), accuracy {self.accuracy:.3f}"
        )


def scale() -> list[Row]:
    """Measure swarms of growing size, each in its own process; write and draw time and memory."""
    rows: list[Row] = []
    with Results(Path("results/scale"), "bench scale").run_folder() as folder:
        with RecordFile(folder / "sizes.jsonl") as file:
            for kind, workload in SCALE_WORKLOADS.items():
                try:
                    load(DATA_SETS[kind])
                except DataError as error:
                    rows.append(Row(f"peers of {workload.name}", "s", note=str(error)))
                    continue
                for peers in PEER_COUNTS[kind]:
                    cost = in_own_process(measure, kind, peers)
                    file.write(asdict(cost))
                    console.warn(str(cost))
                    name, note = f"{peers:,} × {workload.layout}", f"peak {format_bytes(cost.peak)}"
                    rows.append(Row(name, "s a round", cost.round, note=note))
        console.print_written(draw(folder))
    return rows


def measure(kind: str, peers: int, rounds: int = 8) -> SwarmCost:
    """Build a swarm and run some rounds of it; return the medians of their times."""
    torch.set_num_threads(1)
    started = perf_counter()
    workload = replace(SCALE_WORKLOADS[kind], peers=peers)
    arena = Arena(
        workload.learners(*_windows(DATA_SETS[kind], range(peers))), mixing=workload.mix()
    )
    build_seconds = perf_counter() - started
    seconds = build_seconds, *seconds_of_rounds(arena, rounds)
    peak, needs = peak_memory(), arena.needs().total
    accuracy = fmean(test.accuracy for test in arena.test())
    return SwarmCost(kind, peers, *seconds, peak, needs, accuracy)


def seconds_of_rounds(arena: Arena, rounds: int) -> tuple[float, float]:
    """Run some rounds; return the median seconds of a round, and of its averaging."""
    stamps: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        started = perf_counter()
        arena.train()
        trained = perf_counter()
        arena.average()
        stamps.append((started, trained, perf_counter()))
    round_seconds = median(end - start for start, _, end in stamps)
    return round_seconds, median(end - trained for _, trained, end in stamps)


def _windows(name: str, peers: Sequence[int]) -> tuple[list[Samples], Samples]:
    """The training samples of some peers, which are views of one tensor, and the test samples of all."""
    data = load(name)
    assert data.test is not None
    order = torch.randperm(len(data.train.y), generator=torch.Generator().manual_seed(0))
    inputs, labels = data.train.flat()[order], data.train.y[order]
    starts = [index * SAMPLES_PER_PEER % (len(labels) - SAMPLES_PER_PEER + 1) for index in peers]
    windows = [
        (inputs[start : start + SAMPLES_PER_PEER], labels[start : start + SAMPLES_PER_PEER])
        for start in starts
    ]
    return windows, (data.test.flat()[:200], data.test.y[:200])


# --- one swarm on several ranks ---------------------------------------------------------------------

SHARDED = replace(SCALE_WORKLOADS["small"], batch=10, steps=6)
"""What peers on several ranks do in a round: one pass over their samples, then one exchange of push-sum."""
MEMORY_PEERS = 20_000
FEWEST_PEERS = 16
"""The peers of a rank that needs memory for little more than the libraries and the data."""
TIMED_ON_RANKS = 4096
MOST_PEERS, MOST_ROUNDS = 100_000, 12
MOST_BYTES = 8 * 10**9
"""The free memory that the largest swarm needs on one machine, both ranks together."""
TESTED_PEERS = 1000
"""How many peers of a rank are tested before the first round and after the last."""


@dataclass(frozen=True)
class RankCost:
    """The cost of one rank; peak: bytes, build, round: seconds, before, after: mean accuracy of its peers."""

    peak: int
    build: float = 0.0
    round: float = 0.0
    before: float = 0.0
    after: float = 0.0


def shards() -> list[Row]:
    """Measure memory and time of a swarm that is divided among two ranks."""
    from ..arena.shards import launch

    (smallest,) = launch(1, measure_rank, SHARDED, FEWEST_PEERS, 1, 1)
    (one_rank,) = launch(1, measure_rank, SHARDED, MEMORY_PEERS, 4, THREADS)
    two_ranks = launch(2, measure_rank, SHARDED, MEMORY_PEERS, 4, 1)
    peak = max(rank.peak for rank in two_ranks)
    rows = [
        Row(
            f"memory of each of 2 ranks, {MEMORY_PEERS:,} × {SMALL}", "MB",
            (peak - smallest.peak) / 1e6, (one_rank.peak - smallest.peak) / 1e6, 0.6, "at most",
            "baseline: 1 rank; "
            f"both without the {format_bytes(smallest.peak)} of a rank of {FEWEST_PEERS} peers",
        ),
        Row(
            f"{MEMORY_PEERS:,} × {SMALL} on 2 ranks", "s a round", max(rank.round for rank in two_ranks),
            note=_describe_ranks(two_ranks),
        ),
    ]  # fmt: skip
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):  # alternately, so that the load of the machine is the same for both
        for ranks, times in zip((2, 1), seconds, strict=True):
            costs = launch(ranks, measure_rank, SHARDED, TIMED_ON_RANKS, 10, THREADS // ranks)
            times.append(max(cost.round for cost in costs))
    name = f"round of {TIMED_ON_RANKS:,} × {SMALL}, 2 ranks of 1 thread"
    two, one = median(seconds[0]), median(seconds[1])
    return [*rows, Row(name, "s", two, one, note="baseline: 1 rank of 2 threads")]


def most_peers(peers: int = MOST_PEERS, rounds: int = MOST_ROUNDS) -> list[Row]:
    """Run the largest swarm that learns, one batch of each peer in a round, on two ranks."""
    from ..arena.shards import launch

    name = f"{peers:,} × {SMALL} on 2 ranks, one batch a round"
    free = free_memory(torch.device("cpu"))
    if free < (needed := MOST_BYTES * peers // MOST_PEERS):
        note = (
            f"skipped: needs {format_bytes(needed)} of free memory, there are {format_bytes(free)}"
        )
        return [Row(name, "s a round", note=note)]
    two_ranks = launch(2, measure_rank, replace(SHARDED, steps=1), peers, rounds, 1)
    note = f"{rounds} rounds; {_describe_ranks(two_ranks)}"
    return [Row(name, "s a round", max(rank.round for rank in two_ranks), note=note)]


def _describe_ranks(costs: Sequence[RankCost]) -> str:
    peaks = " and ".join(format_bytes(cost.peak) for cost in costs)
    before, after = (
        fmean(values) for values in zip(*((c.before, c.after) for c in costs), strict=True)
    )
    return (
        f"built in {max(cost.build for cost in costs):.0f} s, peak {peaks}, "
        f"accuracy {before:.3f} → {after:.3f}"
    )


def measure_rank(workload: Workload, peers: int, rounds: int, threads: int) -> RankCost:
    """Run some rounds of a swarm on the rank that this process is."""
    from ..arena.shards import Shard, divide_peers, join_ranks

    torch.set_num_threads(1)
    with join_ranks() as ranks:
        started, workload = perf_counter(), replace(workload, peers=peers)
        mixing = workload.mix()
        assert isinstance(mixing, Gossip)
        graph = mixing.schedule.graph(0)
        rank_of = divide_peers(peers, ranks.count, graph)
        peers_here = np.flatnonzero(rank_of == ranks.rank).tolist()
        learners = workload.learners(*_windows("digits", peers_here), peers_here)
        shard = Shard(ranks, rank_of, [learner.network for learner in learners])
        arena = Arena(learners, mixing=mixing, threads=threads, shard=shard)
        built = perf_counter() - started
        tested = range(0, len(peers_here), max(1, len(peers_here) // TESTED_PEERS))
        before = fmean(test.accuracy for test in arena.test(tested))
        seconds, _ = seconds_of_rounds(arena, rounds)
        after = fmean(test.accuracy for test in arena.test(tested))
        return RankCost(peak_memory(), built, seconds, before, after)


def draw(folder: Path) -> list[Path]:
    """Draw time and memory against the number of peers, from sizes.jsonl."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    from ..study.figures import COLOURS, MARKERS, panels, save

    costs = [SwarmCost(**record) for record in read_records(folder / "sizes.jsonl")]
    figure, (row,) = panels(1, 2, "", 9, 4.03)
    columns = (("round", 1, "seconds a round"), ("peak", 1e9, "peak memory, GB"))
    for axes, (field, unit, label) in zip(row, columns, strict=True):
        for index, kind in enumerate(
            kind for kind in SCALE_WORKLOADS if any(cost.kind == kind for cost in costs)
        ):
            of_kind = [cost for cost in costs if cost.kind == kind]
            axes.loglog(
                [cost.peers for cost in of_kind], [getattr(cost, field) / unit for cost in of_kind],
                color=COLOURS[index], marker=MARKERS[index], label=SCALE_WORKLOADS[kind].name, linewidth=1.6,
                markersize=5,
            )  # fmt: skip
        axes.set(xlabel="peers", ylabel=label)
        ticks = sorted({cost.peers for cost in costs} - {1000})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    handles = row[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=1, frameon=False, fontsize=9)
    return save(figure, folder / "growth")


# --- virtual time -----------------------------------------------------------------------------------
# Virtual time is the simulated clock of a swarm. An event is a push, its arrival, or the return of mass that
# did not arrive.

SMALL_SWARM, LARGE_SWARM, LARGEST_SWARM = 1_000, 10_000, 100_000
"""The peers of three swarms."""
COORDINATES = 100
"""The length of the vector that peers average."""
_EVENTS_PER_CALL = 60_000


def virtual() -> list[Row]:
    """Time an event of two large swarms against one of a small swarm, and learning against training alone."""
    large, small = EndlessSwarm(LARGE_SWARM), EndlessSwarm(SMALL_SWARM)
    large_seconds, small_seconds = median_seconds(large, small)
    large_us, small_us = 1e6 * large_seconds / large.events, 1e6 * small_seconds / small.events
    largest_rate, peak = in_own_process(events_per_second, LARGEST_SWARM)
    note = f"{1e6 / large_us:,.0f} events/s; baseline: {SMALL_SWARM:,} peers, {1e6 / small_us:,.0f} events/s"
    largest_note = f"{largest_rate:,.0f} events/s, peak memory {peak / 1e6:,.0f} MB"
    large_name, largest_name = (
        f"virtual time, {peers:,} peers" for peers in (LARGE_SWARM, LARGEST_SWARM)
    )
    return [
        Row(large_name, "µs/event", large_us, small_us, 1.5, "at most", note),
        Row(largest_name, "µs/event", 1e6 / largest_rate, small_us, note=largest_note),
        learning(),
        learning_events(),
    ]


class EndlessSwarm:
    """A simulated swarm, of which every call simulates some more seconds: about `events_per_call` events."""

    def __init__(self, peers: int, events_per_call: int = _EVENTS_PER_CALL):
        self._swarm = averaging_swarm(peers)
        # A peer pushes and receives once a second.
        self._seconds_per_call = events_per_call / (2 * peers)
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        for _ in self._swarm.run(self._seconds_per_call):
            pass

    @property
    def events(self) -> float:
        """The mean number of events per call so far."""
        return self._swarm.events / self._calls


def averaging_swarm(peers: int) -> VectorisedPushSum:
    """Return a swarm that averages random values by push-sum on a random graph with four links per peer.

    The pauses between two pushes of a peer, and the delays of messages, are exponential.
    """
    values = np.random.default_rng(0).standard_normal((peers, COORDINATES))
    conditions = Conditions(
        training=parse_distribution("exponential:1"), delay=parse_distribution("exponential:0.5")
    )
    return VectorisedPushSum(values, build("regular:4", peers, 0), conditions)


def events_per_second(peers: int, seconds: float = 5.0) -> tuple[float, int]:
    """Return how many events of a swarm are simulated per second, and the peak bytes of this process.

    seconds: the virtual time to simulate.
    """
    swarm = averaging_swarm(peers)
    started = time.perf_counter()
    for _ in swarm.run(seconds):
        pass
    return swarm.events / (time.perf_counter() - started), peak_memory()


WANTED_EVENTS = 100_000
"""Events a second of 10,000 peers that learn; through Gossipers there are about a tenth."""


def learning_events(peers: int = LARGE_SWARM, seconds: float = 8.0, threads: int = THREADS) -> Row:
    """Count the events a second of peers that train one batch of 10 samples before each of their pushes.

    seconds: the virtual time to simulate. Through Gossipers, fewer peers are simulated.
    """
    workload = replace(SCALE_WORKLOADS["small"], peers=peers, batch=10, steps=1)
    arena = Arena(workload.learners(*_windows("digits", range(peers))), threads=threads)
    parameters = arena.stacked_values()
    assert parameters is not None
    jobs = ArrayJobs(
        arena, parameters, "global", slice(0, parameters.shape[1]),
        lambda peers, times, rounds: np.zeros(len(peers), bool), lambda test: None,
        graph=build("regular:4", peers, 0), threads=threads,
        conditions=Conditions(
            training=parse_distribution("exponential:1"), delay=parse_distribution("exponential:0.2")
        ),
    )  # fmt: skip
    jobs.run(1.0)  # warms up
    gc.collect()  # so that the objects of building all peers are not collected in the time measured
    events, started = jobs.push_sum.events, time.perf_counter()
    jobs.run(1.0 + seconds)
    rate = (jobs.push_sum.events - events) / (time.perf_counter() - started)
    per_peer = jobs.push_sum.counters["training"] / jobs.push_sum.events
    note = (
        f"baseline: the wanted rate; {rate * per_peer:,.0f} trainings/s, the other events are pushes and "
        f"arrivals; through Gossipers {_events_through_gossipers():,.0f} events/s"
    )
    name = f"{peers:,} peers learn in virtual time, {SMALL}, a batch of 10 each"
    return Row(name, "events/s", rate, WANTED_EVENTS, 1.0, note=note)


def _events_through_gossipers(peers: int = 128, rounds: int = 8) -> float:
    """Return the events a second of the same peers if each has a Gossiper."""
    config = _config_in_virtual_time(
        peers, rounds, 10, SMALL.replace("=", "-"), test_every=rounds, data={"samples": 10, "test": 10},
        time={"training": "exponential:1", "delay": "exponential:0.2"},
    )  # fmt: skip
    on_arrays, through_gossipers = (
        LearningSimulation(config, arrays=arrays, threads=THREADS) for arrays in (True, False)
    )
    on_arrays.run()
    assert on_arrays.array_jobs is not None
    started = time.perf_counter()
    through_gossipers.run()
    return on_arrays.array_jobs.push_sum.events / (time.perf_counter() - started)


def _config_in_virtual_time(
    peers: int, rounds: int, local_samples: int, shared: str, **keys: object
) -> Config:
    """Return the config of a swarm that learns in virtual time; keys: further ones of it."""
    training = {"local_samples": local_samples, "rate": 0.1, "loss": "squared", "reduction": "sum"}
    table = {
        "peers": peers, "rounds": rounds, "topology": "regular:4", "training": training,
        "network": {"layout": SMALL, "activation": "sigmoid", "output": "sigmoid"},
        "models": [{"name": "global", "layout": shared}],
    }  # fmt: skip
    return parse_config(table | keys)


def learning(peers: int = 256, rounds: int = 4, repeats: int = 5) -> Row:
    """Return the row of a swarm that learns in virtual time, against as much training and nothing else."""
    config = _config_in_virtual_time(
        peers, rounds, 200, "64-32-0", data={"samples": 5},
        time={"training": "lognormal:1:0.3", "delay": "exponential:0.2", "loss": 0.1},
    )  # fmt: skip
    # A simulation runs once only: one for each repetition, and one that warms up.
    simulations = [LearningSimulation(config, threads=2) for _ in range(repeats + 1)]
    members = LearningSimulation(config).members
    trainings = 0

    def simulate() -> None:
        nonlocal trainings
        simulation = simulations.pop()
        simulation.run()
        trainings = sum(simulation.rounds)

    def train_only() -> None:
        for number in range(trainings):
            members[number % peers].learner.train(1)

    row = race(f"{peers} peers learn in virtual time", simulate, train_only, repeats=repeats)
    return replace(row, note=f"baseline: its {trainings:,} trainings, learner by learner")
