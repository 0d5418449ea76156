"""What matching is compared with: averages, clusters, ensembles, distillation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...models.matching import Chain, Layer
from .fusing_local import chain_of, fresh, logits, train
from .fusing_setting import Share

DISTILLED_WIDTH = 500
"""Cells per hidden part of a distilled network, as in the paper."""


def average(chains: Sequence[Chain], weights: np.ndarray) -> Chain:
    """One-shot FedAvg: cell k with cell k, peers weighted by their samples."""
    share = weights / weights.sum()

    def mean(values: Sequence[np.ndarray]) -> np.ndarray:
        return np.tensordot(share, np.stack(values), axes=1)

    return Chain(
        tuple(
            replace(
                layer,
                weight=mean([chain.layers[index].weight for chain in chains]),
                own={n: mean([chain.layers[index].own[n] for chain in chains]) for n in layer.own},
            )
            for index, layer in enumerate(chains[0].layers)
        )
    )


def answers(chains: Sequence[Chain], x: Tensor, counts: np.ndarray | None = None) -> Tensor:
    """An ensemble's class probabilities; `counts` [peers, classes] weight a peer class by class."""
    each = torch.stack([torch.softmax(logits(chain, x), dim=1) for chain in chains])
    if counts is None:
        return each.mean(dim=0)
    total = counts.sum(axis=0)
    shares = torch.from_numpy(counts / np.where(total > 0, total, 1))
    return (each * shares[:, None]).sum(dim=0)


def distill(
    chains: Sequence[Chain], shares: Sequence[Share], layout: str, *, epochs: int, seed: int
) -> Chain:
    """A new network that learns the ensemble's answers on all peers' samples, pooled."""
    pooled = Share(torch.cat([s.x for s in shares]), torch.cat([s.y for s in shares]))
    targets = answers(chains, pooled.x).to(pooled.x.dtype)
    return chain_of(train(fresh(layout, seed), pooled, epochs=epochs, seed=seed, targets=targets))


def dp_means(
    chains: Sequence[Chain], counts: np.ndarray, *, limit: int = 700, passes: int = 20
) -> Chain:
    """Cluster all peers' cells without minding who they come from (one hidden part).

    A cell farther from every centre than the penalty makes a new one. The penalty is the distance at
    which as many centres as a peer has cells, each taken as far from the others as possible, reach all
    cells. Outputs are averaged by the peers' shares of each class, as in matching.
    """
    if chains[0].hidden != 1:
        raise ValueError("clusters of cells are defined for one hidden part")
    first, last = chains[0].layers
    inputs, own = first.weight.shape[1], list(first.own)
    rows = np.concatenate([_rows(chain) for chain in chains])
    peer = np.repeat(np.arange(len(chains)), [chain.widths[1] for chain in chains])
    total = counts.sum(axis=0)
    shares = np.where(total > 0, counts / np.where(total > 0, total, 1), 1 / len(chains))
    penalty = _farthest_first(rows, chains[0].widths[1])
    centres = rows.mean(axis=0, keepdims=True)
    label = np.zeros(len(rows), dtype=np.int64)
    for _ in range(passes):
        distance = _distances(rows, centres)
        while (far := int(distance.min(axis=1).argmax())) is not None:
            if distance[far].min() <= penalty or len(centres) >= limit:
                break
            centres = np.vstack([centres, rows[far]])
            distance = np.hstack([distance, _distances(rows, rows[far][None])])
        kept, new = np.unique(distance.argmin(axis=1), return_inverse=True)
        settled = len(kept) == len(centres) and np.array_equal(new, label)
        label = new
        members = np.zeros((len(kept), len(rows)))
        members[label, np.arange(len(rows))] = 1
        centres = members @ rows / members.sum(axis=1, keepdims=True)
        if settled:
            break
    members = np.zeros((centres.shape[0], len(rows)))
    members[label, np.arange(len(rows))] = 1
    weight = shares[peer]
    amount = members @ weight
    out = members @ (rows[:, -weight.shape[1] :] * weight) / np.where(amount > 0, amount, 1)
    hidden = replace(
        first,
        weight=centres[:, :inputs],
        own={name: centres[:, inputs + index] for index, name in enumerate(own)},
    )
    tops = {
        name: np.einsum("jk,jk->k", shares, np.stack([c.layers[1].own[name] for c in chains]))
        for name in last.own
    }
    return Chain((hidden, Layer(out.T, tops, last.weight_name)))


def _rows(chain: Chain) -> np.ndarray:
    first, last = chain.layers
    own = [value[:, None] for value in first.own.values()]
    return np.hstack([first.weight, *own, last.weight.T])


def _farthest_first(rows: np.ndarray, count: int) -> float:
    """Squared distance that `count` centres leave, each the point farthest from those before."""
    nearest = _distances(rows, rows.mean(axis=0, keepdims=True))[:, 0]
    for _ in range(count):
        chosen = rows[int(nearest.argmax())]
        nearest = np.minimum(nearest, _distances(rows, chosen[None])[:, 0])
    return float(nearest.max())


def _distances(rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
    squared = (rows**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1) - 2 * rows @ centres.T
    return np.maximum(squared, 0)
