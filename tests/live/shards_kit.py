"""Functions that run in the ranks of a test: learners of one swarm, whole and divided among ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import networkx as nx
import numpy as np
import torch
import torch.distributed as dist

from gossamer.experiments.arena import Arena, ExactMean, Gossip, Mixing
from gossamer.experiments.arena.shards import RankGroup, Shard, divide_peers, join_ranks
from gossamer.experiments.data import Dataset, load, partition
from gossamer.models import Adam, Sgd, SgdLearner, SlicedNetwork, mlp

PEERS, ROUNDS = 9, 3
OPTIMIZERS = {
    "sgd": None,
    "momentum": partial(Sgd, rate=0.1, momentum=0.9),
    "adam": partial(Adam, rate=0.01),
}
SLICES: dict[str, Any] = {"whole": {"all": 1.0}, "partial": {"all": "64-8-6", "some": "0-4-0"}}
# The second model of "partial" is that of some peers only.
SOME = (1, 2, 5, 8)


@cache
def digits() -> Dataset:
    return load("digits")


def learner(peer: int, slices: str, optimizer: str, dtype: torch.dtype) -> SgdLearner:
    """One peer, the same whatever the others are."""
    data = digits()
    assert data.test is not None
    own = data.train.take(partition.iid(len(data.train), PEERS, 20, 0)[peer])
    models = {
        name: cells for name, cells in SLICES[slices].items() if name != "some" or peer in SOME
    }
    layout = mlp("64=12=10", activation="tanh", output="none").to(dtype)
    network = SlicedNetwork(layout, models, peer=str(peer), seed=3)
    test = data.test.flat()[:100].to(dtype), data.test.y[:100]
    return SgdLearner(
        network, (own.flat().to(dtype), own.y), test, local_samples=20, batch=5,
        optimizer=OPTIMIZERS[optimizer], seed=peer,
    )  # fmt: skip


def mixing(kind: str) -> tuple[Mixing, nx.Graph | None]:
    graph = nx.connected_watts_strogatz_graph(PEERS, 4, 0.3, seed=2)
    graph.add_edges_from([(1, 2), (2, 5), (5, 8)])
    return (Gossip(graph, exchanges=2), graph) if kind == "gossip" else (ExactMean(), None)


def run(
    case: Sequence[Any], peers: Sequence[int], shard: Any = None
) -> tuple[list[np.ndarray], list[float]]:
    """The peers' values and numbers of correct test samples after some rounds."""
    kind, slices, optimizer, dtype = case
    learners = [learner(peer, slices, optimizer, getattr(torch, dtype)) for peer in peers]
    made = None if shard is None else shard([one.network for one in learners])
    weights = [1.0 + peer % 3 for peer in peers]
    arena = Arena(learners, mixing=mixing(kind)[0], weights=weights, threads=1, shard=made)
    *_, last = arena.run(ROUNDS)
    values = [one.network.flat.detach().numpy().copy() for one in learners]
    return values, [test.correct for test in last.tests]


def cases() -> Iterator[tuple[str, str, str, str]]:
    return product(("gossip", "exact"), SLICES, OPTIMIZERS, ("float32", "float64"))


def compare(counts: Sequence[int]) -> list[tuple[Any, ...]]:
    """Run every case divided among several numbers of ranks; rank 0 returns how they differ from whole."""
    torch.set_num_threads(1)
    rows: list[tuple[Any, ...]] = []
    with join_ranks() as everyone:
        rank = everyone.rank
        groups = {count: dist.new_group(list(range(count))) for count in counts}
        for case in cases():
            whole = run(case, range(PEERS)) if rank == 0 else None
            for count in (count for count in counts if rank < count):
                ranks = RankGroup(groups[count])
                rank_of = divide_peers(PEERS, count, mixing(case[0])[1])
                own = np.flatnonzero(rank_of == rank).tolist()
                divided = run(case, own, partial(Shard, ranks, rank_of))
                gathered = ranks.gather((own, *divided))
                if whole is None or gathered is None:
                    continue
                norm = elementwise = correct = 0.0
                for peers, values, right in gathered:
                    for peer, value, number in zip(peers, values, right, strict=True):
                        expected = whole[0][peer]
                        difference = value - expected
                        norm = max(norm, np.linalg.norm(difference) / np.linalg.norm(expected))
                        elementwise = max(elementwise, np.abs(difference).max())
                        correct = max(correct, abs(number - whole[1][peer]))
                rows.append((count, *case, float(norm), float(elementwise), correct))
    return rows


def simulate_each(configs: Sequence[str], folder: str) -> None:
    """`gossamer simulate` on every rank, each with a config of its own."""
    from gossamer.experiments.cli.app import main

    main(["simulate", configs[int(os.environ["RANK"])], "--out", folder])
