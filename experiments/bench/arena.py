"""The stacked arena against a plain torch loop, and stacked averaging against one dense product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import networkx as nx
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ...models import SgdLearner, SlicedNetwork, mlp
from ...topology import build, metropolis, mixing_matrix, uniform_push
from ..arena import Arena, ExactMean, Gossip, Mixing
from . import Row, alternate

THREADS = 2
"""Of the arena, and inside torch for the loop, if it is faster so."""
REPEATS = 5
TRIAL = 16
"""Peers of the loop that find out with how many threads it is faster."""


def _module(layout: str) -> nn.Sequential:
    """The paper's perceptron."""
    return mlp(layout, activation="sigmoid", output="sigmoid")


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
                SlicedNetwork(_module(self.layout), self.slices, peer=str(index), seed=1),
                own, own, local_samples=self.batch * self.steps, batch=self.batch,
                reduction=self.reduction, loss="squared", rate=0.1, seed=index,
            )
            for index, own in enumerate(data)
        ]  # fmt: skip

    def mix(self) -> Mixing:
        """How the arena averages."""
        if self.mixing == "mean":
            return ExactMean()
        return Gossip(self.graph(), self.mixing)


# --- the baseline: a loop over torch modules, as one writes it in an afternoon ------------------------


@dataclass
class PlainPeer:
    """A module, its optimizer, and its samples in random order."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    labels: Tensor

    def train(self, batch: int, steps: int, mean: bool) -> None:
        """Some gradient steps; every epoch is a fresh permutation."""
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            if len(order) < batch:
                order = torch.cat([order, torch.randperm(len(self.labels))])
            chosen, order = order[:batch], order[batch:]
            outputs = self.module(self.inputs[chosen])
            goals = F.one_hot(self.labels[chosen], outputs.shape[1])
            losses = 0.5 * (outputs - goals).square().sum(dim=1)
            self.optimizer.zero_grad()
            (losses.mean() if mean else losses.sum()).backward()
            self.optimizer.step()


class Loop:
    """All peers one after the other, then one exchange of their shared coordinates."""

    def __init__(self, work: Work, peers: Sequence[PlainPeer], shared: Tensor | None):
        self._work, self.peers, self._shared = work, peers, shared
        count = len(peers)
        self._weights = torch.ones(count, dtype=torch.float64)
        if work.mixing != "mean":
            rule = metropolis if work.mixing == "plain" else uniform_push
            self._matrix = torch.from_numpy(rule(work.graph()).toarray())

    @classmethod
    def of(
        cls, work: Work, data: Sequence[tuple[Tensor, Tensor]], networks: Sequence[SlicedNetwork]
    ) -> Loop:
        """Modules that start where the networks are, with data of their own."""
        peers = []
        for network, (inputs, labels) in zip(networks, data, strict=True):
            module = _module(work.layout)
            module.load_state_dict(network.module.state_dict())
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            peers.append(PlainPeer(module, optimizer, inputs.clone(), labels.clone()))
        coordinates = networks[0].slicing.coordinates("global")
        whole = len(coordinates) == len(networks[0].flat)
        return cls(work, peers, None if whole else torch.from_numpy(np.array(coordinates)))

    def train(self, peers: int | None = None) -> None:
        """Every peer's steps, or those of the first few."""
        work = self._work
        for peer in self.peers[:peers]:
            peer.train(work.batch, work.steps, work.reduction == "mean")

    def round(self) -> None:
        """Train, then average."""
        self.train()
        with torch.no_grad():
            self._exchange()

    def _exchange(self) -> None:
        vectors = [parameters_to_vector(peer.module.parameters()) for peer in self.peers]
        shared = vectors if self._shared is None else [v[self._shared] for v in vectors]
        for peer, vector, mixed in zip(self.peers, vectors, self._mixed(shared), strict=True):
            if self._shared is None:
                vector = mixed.clone()  # parameters become views of it
            else:
                vector[self._shared] = mixed
            vector_to_parameters(vector, peer.module.parameters())

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


# --- the benchmarks ---------------------------------------------------------------------------------

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
