"""Who holds which samples: pure functions that return one array of indices for each peer.

No index is given to two peers. `seed` is an int or a numpy Generator; the same int gives the same
partition. Feed the result to `Samples.take`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .sources import DataError

Seed = int | np.random.Generator


def iid(n: int, peers: int, size: int | None = None, seed: Seed = 0) -> list[np.ndarray]:
    """`size` random samples for each peer; without `size` all `n` are dealt out evenly."""
    return _deal(np.random.default_rng(seed).permutation(n), peers, size)


def successive(n: int, peers: int, size: int | None = None) -> list[np.ndarray]:
    """Consecutive sequences of `size` samples in the order of the source (the paper's V.3).

    Without `size` all `n` are dealt out evenly.
    """
    return _deal(np.arange(n), peers, size)


def dirichlet(
    y: Tensor | np.ndarray | Sequence[int],
    peers: int,
    alpha: float,
    seed: Seed = 0,
    minimum: int = 1,
) -> list[np.ndarray]:
    """Every sample dealt out, each class by its own Dirichlet(alpha) draw of the peers' shares.

    Lower `alpha` for more skew: 100 is nearly iid, 0.5 is usual, 0.1 leaves most peers with a few
    classes. Peers with fewer than `minimum` samples get some at random from those that have most:
    raise it when a mini-batch needs more samples than the smallest peer has.
    """
    labels = _array(y)
    _check_peers(peers)
    if not alpha > 0:
        raise DataError(f"dirichlet: alpha must be above 0, not {alpha}")
    if minimum < 0:
        raise DataError(f"dirichlet: minimum must be 0 or more, not {minimum}")
    if peers * minimum > len(labels):
        raise DataError(
            f"dirichlet: {peers} peers with at least {minimum} samples each ask for "
            f"{peers * minimum}, there are {len(labels)}: lower peers or minimum"
        )
    rng = np.random.default_rng(seed)
    held: list[list[int]] = [[] for _ in range(peers)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(peers, alpha))
        cuts = (np.cumsum(shares)[:-1] * len(members)).astype(int)
        for peer, piece in enumerate(np.split(members, cuts)):
            held[peer].extend(piece)
    for mine in held:
        while len(mine) < minimum:
            richest = max(held, key=len)
            mine.append(richest.pop(int(rng.integers(len(richest)))))
    return [rng.permutation(np.array(mine, dtype=np.int64)) for mine in held]


def shards(
    y: Tensor | np.ndarray | Sequence[int], peers: int, per_peer: int, seed: Seed = 0
) -> list[np.ndarray]:
    """Samples sorted by label, cut into `peers × per_peer` even shards, `per_peer` dealt to each.

    Lower `per_peer` for more skew: 2 leaves each peer about two classes.
    """
    labels = _array(y)
    _check_peers(peers)
    count = peers * per_peer
    if per_peer < 1 or count > len(labels):
        raise DataError(
            f"shards: {peers} peers with {per_peer} shards each ask for {count} shards, "
            f"there are {len(labels)} samples: per_peer must be 1 or more, and small enough"
        )
    rng = np.random.default_rng(seed)
    pieces = np.array_split(np.argsort(labels, kind="stable"), count)
    order = rng.permutation(count).reshape(peers, per_peer)
    return [np.concatenate([pieces[shard] for shard in mine]) for mine in order]


def by_group(
    group: Tensor | np.ndarray | Sequence[int] | None,
    peers: int,
    size: int | None = None,
    seed: Seed = 0,
) -> list[np.ndarray]:
    """One natural group (writer, subject, node) for each peer, the largest groups first (V.2).

    Each group's samples are shuffled, since sources keep them in a biased order, then truncated to
    `size`, or without it to the smallest chosen group, so that no peer is richer than another.
    """
    if group is None:
        raise DataError("by_group: this data set has no natural groups; use iid or dirichlet")
    ids = _array(group)
    _check_peers(peers)
    values, counts = np.unique(ids, return_counts=True)
    largest_first = np.lexsort((values, -counts))
    if peers > len(values):
        raise DataError(f"by_group: {peers} peers ask for {peers} groups, there are {len(values)}")
    chosen = largest_first[:peers]
    least = int(counts[chosen[-1]])
    if size is not None and not 1 <= size <= least:
        enough = int((counts >= size).sum())
        raise DataError(
            f"by_group: {peers} groups of {size} samples were asked, {enough} groups have that "
            f"many and group number {peers} has {least}: size must be 1 to {least}, or fewer peers"
        )
    rng = np.random.default_rng(seed)
    length = least if size is None else size
    return [rng.permutation(np.flatnonzero(ids == values[place]))[:length] for place in chosen]


def split(
    indices: np.ndarray | Sequence[int], test: int | float, seed: Seed = 0
) -> tuple[np.ndarray, np.ndarray]:
    """One peer's indices divided at random into (train, test), each in the order they came in.

    `test` is a number of samples (int) or a share (float between 0 and 1, rounded).
    """
    own = np.asarray(indices, dtype=np.int64)
    count = round(test * len(own)) if isinstance(test, float) else test
    if (isinstance(test, float) and not 0 <= test < 1) or not 0 <= count < max(len(own), 1):
        raise DataError(
            f"split: {test} test samples were asked of {len(own)}: give a smaller number, or a "
            "share between 0 and 1, so that at least one is left to train on"
        )
    kept_back = np.zeros(len(own), dtype=bool)
    kept_back[np.random.default_rng(seed).permutation(len(own))[:count]] = True
    return own[~kept_back], own[kept_back]


def alike(labels: Tensor | np.ndarray, own: Tensor | np.ndarray, classes: int) -> np.ndarray:
    """Return the most of `labels`' indices whose classes have the same shares as in a peer's `own` labels.

    A class that is too rare to be given one whole sample is left out.
    """
    labels, own = _array(labels), _array(own)
    wanted = np.bincount(own, minlength=classes) / len(own)
    there = np.bincount(labels, minlength=classes)
    scale = min(there[k] / wanted[k] for k in range(classes) if wanted[k])
    counts = np.floor(scale * wanted + 1e-9).astype(int)
    chosen = [np.flatnonzero(labels == k)[: counts[k]] for k in range(classes)]
    if not sum(map(len, chosen)):
        raise DataError(
            "a peer has a class that is not among the test samples: raise data.test, or set "
            'data.tested = "common"'
        )
    return np.sort(np.concatenate(chosen))


def _deal(order: np.ndarray, peers: int, size: int | None) -> list[np.ndarray]:
    _check_peers(peers)
    wanted = 1 if size is None else size
    if wanted < 1 or peers * wanted > len(order):
        raise DataError(
            f"{peers} peers with {wanted} samples each ask for {peers * wanted}, "
            f"there are {len(order)}: size must be 1 or more, and small enough"
        )
    if size is None:
        return np.array_split(order, peers)
    return [order[peer * size : (peer + 1) * size] for peer in range(peers)]


def _check_peers(peers: int) -> None:
    if peers < 1:
        raise DataError(f"a partition needs at least one peer, not {peers}")


def _array(values: Tensor | np.ndarray | Sequence[int]) -> np.ndarray:
    return values.numpy() if isinstance(values, Tensor) else np.asarray(values)
