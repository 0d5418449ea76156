"""The stacked arena against a plain torch loop, and stacked averaging against one dense product."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import networkx as nx
import numpy as np
import torch

from ...models import SgdLearner, SlicedNetwork, mlp
from ...topology import build, mixing_matrix
from ..arena import Arena, ExactMean, Gossip, Mixing
from .harness import Row, alternate
from .loop import Loop

THREADS = 2
"""Of the arena, and inside torch for the loop, if it is faster so."""
REPEATS = 5
TRIAL = 16
"""Peers of the loop that find out with how many threads it is faster."""


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
    wanted: float

    @property
    def cells(self) -> list[int]:
        """Cells of every part."""
        return [int(count) for count in self.layout.split("=")]

    @property
    def slices(self) -> dict[str, str]:
        """The share of cells, in per cent, that is everybody's; inputs are whole."""
        inputs, *rest = self.cells
        counts = [inputs, *(count * self.level // 100 for count in rest)]
        return {"global": "-".join(map(str, counts))}

    def graph(self) -> nx.Graph:
        """Who exchanges with whom."""
        return build("regular:4", self.peers, 1)

    def data(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Random samples for each peer: what is in them costs no time."""
        generator = torch.Generator().manual_seed(0)
        return [
            (
                torch.rand(self.samples, self.cells[0], generator=generator),
                torch.randint(0, self.cells[-1], (self.samples,), generator=generator),
            )
            for _ in range(self.peers)
        ]

    def learners(self, data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[SgdLearner]:
        """The peers as the arena takes them."""
        return [
            SgdLearner(
                SlicedNetwork(mlp(self.layout), self.slices, peer=str(index), seed=1),
                own, own, stretch=self.batch * self.steps, batch=self.batch,
                reduction=self.reduction, rate=0.1, seed=index,
            )
            for index, own in enumerate(data)
        ]  # fmt: skip

    def mix(self) -> Mixing:
        """How the arena averages."""
        if self.mixing == "mean":
            return ExactMean()
        return Gossip(self.graph(), self.mixing)


PAPER = "784=300=100=10"
WORKS = (
    Work("16 peers, batch 500, gossip", PAPER, 16, 500, 1, "mean", 100, "plain", 1000, 1.2),
    Work("256 peers, 20 × batch 10, level 80", PAPER, 256, 10, 20, "sum", 80, "mean", 200, 4.0),
    Work(
        "1024 small peers, push-sum", "64=32=10", 1024, 32, 20, "mean", 100, "push-sum", 100, 50.0
    ),
)


def arena() -> list[Row]:
    """Rounds against the loop; then averaging alone against a dense product."""
    return [*(rounds(work) for work in WORKS), averaging()]


def rounds(work: Work, repeats: int = REPEATS) -> Row:
    """One round in the arena against the same round as a loop over modules."""
    data = work.data()
    learners = work.learners(data)
    loop = Loop.of(work, data, [learner.network for learner in learners])
    swarm = Arena(learners, mixing=work.mix(), threads=THREADS)

    def stacked() -> None:
        swarm.train()
        swarm.average()

    threads = best_threads(loop)

    def baseline() -> None:
        with intra_op(threads):
            loop.round()

    with intra_op(1):
        mine, plain = alternate(stacked, baseline, repeats=repeats)
    note = f"baseline: a torch loop, {threads} thread{'s' * (threads > 1)}"
    return Row(work.name, "s", mine, plain, plain / mine, work.wanted, note=note)


def averaging(peers: int = 256, repeats: int = REPEATS) -> Row:
    """Level 80 of 256 peers on a 4-regular graph, against numpy's product with all coordinates' bytes."""
    work = Work("averaging", PAPER, peers, 10, 1, "sum", 80, "plain", 1, 0.8)
    learners = work.learners(work.data())
    swarm = Arena(learners, mixing=work.mix(), threads=THREADS)
    matrix = mixing_matrix(work.graph()).toarray().astype(np.float32)
    coordinates = len(learners[0].network.slicing.coordinates("global"))
    values = np.random.default_rng(0).standard_normal((peers, coordinates), dtype=np.float32)
    target = np.empty_like(values)
    mine, plain = alternate(
        swarm.average, lambda: np.matmul(matrix, values, out=target), repeats=repeats
    )
    return Row(
        f"averaging alone: {peers} peers, level 80", "s", mine, plain, plain / mine, 0.8,
        note=f"baseline: numpy, {peers}×{peers} by {peers}×{coordinates:,}",
    )  # fmt: skip


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
