"""The stacked arena against a plain torch loop, averaging against one dense product, and how cost grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
from ...models.stack import format_bytes
from ...topology import build, mixing_matrix
from ..arena import Arena, ExactMean, Gossip, Mixing, peak_memory
from ..cli import console
from ..data import DataError, load
from ..results import RecordFile, Results, read_records
from . import PAPER, Row, in_own_process, perceptron, race, sliced_perceptron

THREADS = 2
"""Of the arena, and inside torch for the loop, if it is faster so."""
REPEATS = 5
TRIAL = 16
"""Peers of the loop that find out with how many threads it is faster."""

Samples = tuple[Tensor, Tensor]
"""Inputs and labels."""


@dataclass(frozen=True)
class Work:
    """One round: every peer takes `steps` steps of `batch` samples, then all average at `level` %."""

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

    def matrix(self) -> Tensor:
        """What one exchange multiplies values with, where peers gossip."""
        rule = "metropolis" if self.mixing == "plain" else "push"
        return torch.from_numpy(mixing_matrix(build("regular:4", self.peers, 1), rule).toarray())

    def data(self) -> list[Samples]:
        """Random samples for each peer: what is in them costs no time."""
        generator = torch.Generator().manual_seed(0)
        features, *_, classes = (int(count) for count in self.layout.split("="))
        return [
            (
                torch.rand(self.samples, features, generator=generator),
                torch.randint(0, classes, (self.samples,), generator=generator),
            )
            for _ in range(self.peers)
        ]

    def learners(self, data: Sequence[Samples], test: Samples | None = None) -> list[SgdLearner]:
        """The peers as the arena takes them; test: for all of them, else each has its own samples."""
        return [
            SgdLearner(
                sliced_perceptron(str(index), self.layout, self.level),
                own, test or own, local_samples=self.batch * self.steps, batch=self.batch,
                reduction=self.reduction, loss="squared", rate=0.1, seed=index,
            )
            for index, own in enumerate(data)
        ]  # fmt: skip

    def mix(self) -> Mixing:
        """How the arena averages."""
        if self.mixing == "mean":
            return ExactMean()
        return Gossip(build("regular:4", self.peers, 1), self.mixing)


class Loop:
    """The baseline, as one writes it in an afternoon: torch modules one after the other, then an exchange.

    The modules start where the networks are, with data of their own.
    """

    def __init__(self, work: Work, data: Sequence[Samples], networks: Sequence[SlicedNetwork]):
        self._work = work
        self._data = [(inputs.clone(), labels.clone()) for inputs, labels in data]
        self.modules = [perceptron(work.layout) for _ in networks]
        for module, network in zip(self.modules, networks, strict=True):
            module.load_state_dict(network.module.state_dict())
        self._optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in self.modules]
        coordinates = networks[0].slicing.coordinates("global")
        whole = len(coordinates) == len(networks[0].flat)
        self._shared = None if whole else torch.from_numpy(np.array(coordinates))
        self._weights = torch.ones(len(networks), dtype=torch.float64)
        if work.mixing != "mean":
            self._matrix = work.matrix()

    def round(self) -> None:
        """Train, then average."""
        self.train()
        with torch.no_grad():
            self._exchange()

    def train(self, peers: int | None = None) -> None:
        """Every peer's steps, or those of the first few; every epoch is a fresh permutation."""
        batch = self._work.batch
        sides = zip(self.modules, self._optimizers, self._data, strict=True)
        for module, optimizer, (inputs, labels) in list(sides)[:peers]:
            order = torch.empty(0, dtype=torch.int64)
            for _ in range(self._work.steps):
                if len(order) < batch:
                    order = torch.cat([order, torch.randperm(len(labels))])
                chosen, order = order[:batch], order[batch:]
                outputs = module(inputs[chosen])
                goals = F.one_hot(labels[chosen], outputs.shape[1])
                losses = 0.5 * (outputs - goals).square().sum(dim=1)
                optimizer.zero_grad()
                (losses.mean() if self._work.reduction == "mean" else losses.sum()).backward()
                optimizer.step()

    def _exchange(self) -> None:
        vectors = [parameters_to_vector(module.parameters()) for module in self.modules]
        shared = vectors if self._shared is None else [v[self._shared] for v in vectors]
        for module, vector, mixed in zip(self.modules, vectors, self._mixed(shared), strict=True):
            if self._shared is None:
                vector = mixed.clone()  # parameters become views of it
            else:
                vector[self._shared] = mixed
            vector_to_parameters(vector, module.parameters())

    def _mixed(self, shared: list[Tensor]) -> Sequence[Tensor]:
        """What every peer holds after the exchange."""
        values = torch.stack(shared)
        if self._work.mixing == "mean":
            return [values.mean(dim=0)] * len(shared)
        if self._work.mixing == "plain":
            return list(self._matrix.float() @ values)
        sums = (self._matrix * self._weights).float() @ values
        self._weights = self._matrix @ self._weights
        return list(sums / self._weights[:, None].float())


# --- against the baseline ---------------------------------------------------------------------------

SMALL = "64=32=10"
WORKS = (
    Work("16 peers, batch 500, gossip", PAPER, 16, 500, 1, "mean", 100, "plain", 1000, 1.2),
    Work("256 peers, 20 × batch 10, level 80", PAPER, 256, 10, 20, "sum", 80, "mean", 200, 4.0),
    Work("1024 small peers, push-sum", SMALL, 1024, 32, 20, "mean", 100, "push-sum", 100, 50.0),
)


def arena() -> list[Row]:
    """Rounds against the loop; then averaging alone against a dense product."""
    return [*(rounds(work) for work in WORKS), averaging()]


def rounds(work: Work, repeats: int = REPEATS) -> Row:
    """One round in the arena against the same round as a loop over modules."""
    data = work.data()
    learners = work.learners(data)
    loop = Loop(work, data, [learner.network for learner in learners])
    swarm = Arena(learners, mixing=work.mix(), threads=THREADS)
    threads = best_threads(loop)

    def stacked() -> None:
        swarm.train()
        swarm.average()

    def baseline() -> None:
        with intra_op(threads):
            loop.round()

    note = f"baseline: a torch loop, {threads} thread{'s' * (threads > 1)}"
    with intra_op(1):
        return race(work.name, stacked, baseline, work.wanted, note, repeats)


def averaging(peers: int = 256, repeats: int = REPEATS) -> Row:
    """Level 80 of 256 peers on a 4-regular graph, against numpy's product with all coordinates' bytes."""
    name = f"averaging alone: {peers} peers, level 80"
    work = Work(name, PAPER, peers, 10, 1, "sum", 80, "plain", 1, 0.8)
    learners = work.learners(work.data())
    swarm = Arena(learners, mixing=work.mix(), threads=THREADS)
    matrix = work.matrix().float().numpy()
    coordinates = len(learners[0].network.slicing.coordinates("global"))
    values = np.random.default_rng(0).standard_normal((peers, coordinates), dtype=np.float32)
    target = np.empty_like(values)

    def product() -> None:
        np.matmul(matrix, values, out=target)

    note = f"baseline: numpy, {peers}×{peers} by {peers}×{coordinates:,}"
    return race(name, swarm.average, product, work.wanted, note, repeats)


@contextmanager
def intra_op(threads: int) -> Iterator[None]:
    """Torch's threads inside one product, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def best_threads(loop: Loop) -> int:
    """With how many threads inside a product, 1 or THREADS, the loop is at its best."""
    taken: dict[int, float] = {}
    for threads in (1, THREADS):
        with intra_op(threads):
            loop.train(TRIAL)
            started = perf_counter()
            loop.train(TRIAL)
            taken[threads] = perf_counter() - started
    return min(taken, key=lambda threads: taken[threads])


# --- how cost grows with the swarm ------------------------------------------------------------------

OWN = 60
"""Samples that each peer holds."""
KINDS = {
    "small": Work(
        f"{SMALL}, digits, push-sum on a 4-regular graph", SMALL, 0, 32, 20, "sum", 100, "push-sum", OWN
    ),
    "large": Work(
        f"{PAPER}, MNIST, exact average at level 80", PAPER, 0, 10, 50, "sum", 80, "mean", OWN
    ),
}  # fmt: skip
DATA = {"small": "digits", "large": "mnist"}
SIZES = {"small": (16, 64, 256, 1024, 4096, 10_000), "large": (16, 64, 256, 1000)}


@dataclass(frozen=True)
class Size:
    """What one size took: seconds to build, per round of training and averaging, and peak bytes."""

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
            f"{self.peers:,} peers of {KINDS[self.kind].name}: built in {self.build:.1f} s, "
            f"{self.round:.3g} s a round ({self.average:.2g} s averaging), peak {format_bytes(self.peak)} "
            f"(arena's estimate {format_bytes(self.needs)}), accuracy {self.accuracy:.3f}"
        )


def scale() -> list[Row]:
    """Measure every size in a process of its own, write and draw the growth, and show every size."""
    rows: list[Row] = []
    with Results(Path("results/scale"), "bench scale").begun() as folder:
        with RecordFile(folder / "sizes.jsonl") as file:
            for kind, work in KINDS.items():
                try:
                    load(DATA[kind])
                except DataError as error:
                    rows.append(Row(f"peers of {work.name}", "s", note=str(error)))
                    continue
                for peers in SIZES[kind]:
                    size = in_own_process(measure, kind, peers)
                    file.write(asdict(size))
                    console.warn(str(size))
                    name, note = f"{peers:,} × {work.layout}", f"peak {format_bytes(size.peak)}"
                    rows.append(Row(name, "s a round", size.round, note=note))
        console.print_written(draw(folder))
    return rows


def measure(kind: str, peers: int, rounds: int = 8) -> Size:
    """Build a swarm of one size and run some rounds of it."""
    torch.set_num_threads(1)
    started = perf_counter()
    work = replace(KINDS[kind], peers=peers)
    arena = Arena(work.learners(*_windows(DATA[kind], peers)), mixing=work.mix())
    built = perf_counter() - started
    whole: list[float] = []
    averaging: list[float] = []
    for _ in range(rounds):
        started = perf_counter()
        arena.train()
        middle = perf_counter()
        arena.average()
        whole.append(perf_counter() - started)
        averaging.append(perf_counter() - middle)
    peak, needs = peak_memory(), arena.needs().total
    accuracy = fmean(test.accuracy for test in arena.test())
    return Size(kind, peers, built, median(whole), median(averaging), peak, needs, accuracy)


def _windows(name: str, peers: int) -> tuple[list[Samples], Samples]:
    """Every peer's samples, windows of one tensor so that nothing is copied; and what all are tested on."""
    data = load(name)
    assert data.test is not None
    order = torch.randperm(len(data.train.y), generator=torch.Generator().manual_seed(0))
    inputs, labels = data.train.flat()[order], data.train.y[order]
    starts = [index * OWN % (len(labels) - OWN + 1) for index in range(peers)]
    windows = [(inputs[start : start + OWN], labels[start : start + OWN]) for start in starts]
    return windows, (data.test.flat()[:200], data.test.y[:200])


def draw(folder: Path) -> list[Path]:
    """Time and memory against the number of peers, from the file that was written."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    from ..study.figures import COLOURS, MARKERS, panels, save

    sizes = [Size(**record) for record in read_records(folder / "sizes.jsonl")]
    figure, (row,) = panels(1, 2, "", 9, 4.03)
    columns = (("round", 1, "seconds a round"), ("peak", 1e9, "peak memory, GB"))
    for axes, (field, unit, label) in zip(row, columns, strict=True):
        for index, kind in enumerate(kind for kind in KINDS if any(s.kind == kind for s in sizes)):
            some = [size for size in sizes if size.kind == kind]
            axes.loglog(
                [size.peers for size in some], [getattr(size, field) / unit for size in some],
                color=COLOURS[index], marker=MARKERS[index], label=KINDS[kind].name, linewidth=1.6,
                markersize=5,
            )  # fmt: skip
        axes.set(xlabel="peers", ylabel=label)
        ticks = sorted({size.peers for size in sizes} - {1000})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    handles = row[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=1, frameon=False, fontsize=9)
    return save(figure, folder / "growth")
