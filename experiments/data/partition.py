"""Partitions of a data set over peers: pure functions that return one array of sample indices for each peer.

No two peers have the same index. `seed` is an int or a numpy Generator; the same int gives the same
partition. Pass each array to `Samples.take`.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np
from torch import Tensor

from .sources import DataError

Seed = int | np.random.Generator
"""The type of every `seed` parameter."""


def iid(n: int, peers: int, size: int | None = None, seed: Seed = 0) -> list[np.ndarray]:
    """Give each peer `size` random samples; without `size`, divide all `n` samples evenly."""
    return _deal_in_order(np.random.default_rng(seed).permutation(n), peers, size)


def successive(n: int, peers: int, size: int | None = None) -> list[np.ndarray]:
    """Give each peer `size` consecutive samples, in the order of the source (section V.3 of paper 003).

    Without `size`, divide all `n` samples evenly.
    """
    return _deal_in_order(np.arange(n), peers, size)


def dirichlet(
    y: Tensor | np.ndarray | Sequence[int],
    peers: int,
    alpha: float,
    seed: Seed = 0,
    minimum: int = 1,
) -> list[np.ndarray]:
    """Divide all samples; the peers' shares of each class are drawn from Dirichlet(alpha).

    alpha: lower it for more skew: 100 is nearly iid, 0.5 is usual, with 0.1 most peers have a few classes.
    minimum: the least samples of a peer; a peer with fewer gets random samples from the peers with most.
        Raise it if a mini-batch needs more samples than the smallest peer has.
    """
    labels = _as_array(y)
    _check_peers(peers)
    if not alpha > 0:
        raise DataError(f"dirichlet: alpha must be above 0, not {alpha}")
    if minimum < 0:
        raise DataError(f"dirichlet: minimum must be 0 or more, not {minimum}")
    if peers * minimum > len(labels):
        raise DataError(
            f"dirichlet: {peers} peers with at least {minimum} samples each need "
            f"{peers * minimum}, there are {len(labels)}: lower peers or minimum"
        )
    rng = np.random.default_rng(seed)
    by_peer: list[list[int]] = [[] for _ in range(peers)]
    for label in np.unique(labels):
        class_indices = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(peers, alpha))
        ends = (np.cumsum(shares)[:-1] * len(class_indices)).astype(int)
        for peer, indices in enumerate(np.split(class_indices, ends)):
            by_peer[peer].extend(indices)
    # Only the peer with most, the first of the heap, loses samples: other entries never become too large.
    heap = [(-len(indices), peer) for peer, indices in enumerate(by_peer)]
    heapify(heap)
    for indices in by_peer:
        while len(indices) < minimum:
            largest = by_peer[heap[0][1]]
            indices.append(largest.pop(int(rng.integers(len(largest)))))
            heapreplace(heap, (-len(largest), heap[0][1]))
    return [rng.permutation(np.array(indices, dtype=np.int64)) for indices in by_peer]


def shards(
    y: Tensor | np.ndarray | Sequence[int], peers: int, per_peer: int, seed: Seed = 0
) -> list[np.ndarray]:
    """Sort samples by label, cut them into `peers × per_peer` equal shards, and give each peer random shards.

    per_peer: the number of shards of each peer. Lower it for more skew: with 2, a peer has about two classes.
    """
    labels = _as_array(y)
    _check_peers(peers)
    count = peers * per_peer
    if per_peer < 1 or count > len(labels):
        raise DataError(
            f"shards: {peers} peers with {per_peer} shards each need {count} samples or more, there are "
            f"{len(labels)}: per_peer must be between 1 and {len(labels) // peers}"
        )
    rng = np.random.default_rng(seed)
    all_shards = np.array_split(np.argsort(labels, kind="stable"), count)
    numbers_by_peer = rng.permutation(count).reshape(peers, per_peer)
    return [np.concatenate([all_shards[k] for k in numbers]) for numbers in numbers_by_peer]


def by_group(
    group: Tensor | np.ndarray | Sequence[int] | None,
    peers: int,
    size: int | None = None,
    seed: Seed = 0,
) -> list[np.ndarray]:
    """Give each peer one natural group (writer, subject, node), the largest groups first.

    This is section V.2 of paper 003.

    Each group's samples are shuffled, since their order in the source is biased, then truncated to `size`, or
    without it to the size of the smallest of these groups, so that all peers have equally many.
    """
    if group is None:
        raise DataError("by_group: this data set has no natural groups; use iid or dirichlet")
    ids = _as_array(group)
    _check_peers(peers)
    values, counts = np.unique(ids, return_counts=True)
    largest_first = np.lexsort((values, -counts))
    if peers > len(values):
        raise DataError(f"by_group: {peers} peers need {peers} groups, there are {len(values)}")
    largest_groups = largest_first[:peers]
    smallest = int(counts[largest_groups[-1]])
    if size is not None and not 1 <= size <= smallest:
        large_groups = int((counts >= size).sum())
        raise DataError(
            f"by_group: {peers} peers need {peers} groups of {size} samples, but {large_groups} groups "
            f"have that many and the {peers} largest have at least {smallest}: size must be 1 to {smallest}, "
            "or use fewer peers"
        )
    rng = np.random.default_rng(seed)
    length = smallest if size is None else size
    return [rng.permutation(np.flatnonzero(ids == values[row]))[:length] for row in largest_groups]


def split(
    indices: np.ndarray | Sequence[int], test: int | float, seed: Seed = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Divide one peer's indices at random into (train, test); both keep the order of `indices`.

    test: the number of test samples (int), or their fraction (float between 0 and 1, rounded).
    """
    array = np.asarray(indices, dtype=np.int64)
    count = round(test * len(array)) if isinstance(test, float) else test
    if (isinstance(test, float) and not 0 <= test < 1) or not 0 <= count < max(len(array), 1):
        raise DataError(
            f"split: {test} test samples were asked of {len(array)}: give a smaller number, or a "
            "fraction between 0 and 1, so that at least one is left to train on"
        )
    is_test = np.zeros(len(array), dtype=bool)
    is_test[np.random.default_rng(seed).permutation(len(array))[:count]] = True
    return array[~is_test], array[is_test]


def with_class_shares(
    test_labels: Tensor | np.ndarray, train_labels: Tensor | np.ndarray, classes: int
) -> np.ndarray:
    """Return the indices of test samples in which classes are as frequent as in a peer's training samples.

    As many as possible are selected; a class whose share is less than one sample is left out.

    test_labels: of all test samples. train_labels: of the peer's training samples.
    """
    test_labels, train_labels = _as_array(test_labels), _as_array(train_labels)
    shares = np.bincount(train_labels, minlength=classes) / len(train_labels)
    available = np.bincount(test_labels, minlength=classes)
    scale = min(available[k] / shares[k] for k in range(classes) if shares[k])
    counts = np.floor(scale * shares + 1e-9).astype(int)
    by_class = [np.flatnonzero(test_labels == k)[: counts[k]] for k in range(classes)]
    if not sum(map(len, by_class)):
        raise DataError(
            "a peer has a class that is not among the test samples: raise data.test, or set "
            'data.tested = "common"'
        )
    return np.sort(np.concatenate(by_class))


def _deal_in_order(order: np.ndarray, peers: int, size: int | None) -> list[np.ndarray]:
    """Give each peer the next `size` indices of `order`, or an equal number if `size` is None."""
    _check_peers(peers)
    min_size = 1 if size is None else size
    if min_size < 1 or peers * min_size > len(order):
        most = len(order) // peers
        remedy = (
            f"the samples of a peer must be between 1 and {most}" if most else "use fewer peers"
        )
        raise DataError(
            f"{peers} peers with {min_size} samples each need {peers * min_size}, there are {len(order)}: "
            f"{remedy}"
        )
    if size is None:
        return np.array_split(order, peers)
    return [order[peer * size : (peer + 1) * size] for peer in range(peers)]


def _check_peers(peers: int) -> None:
    """Raise DataError for fewer than one peer."""
    if peers < 1:
        raise DataError(f"a partition needs at least one peer, not {peers}")


def _as_array(values: Tensor | np.ndarray | Sequence[int]) -> np.ndarray:
    """Return a column of labels or groups as an array."""
    return values.numpy() if isinstance(values, Tensor) else np.asarray(values)
