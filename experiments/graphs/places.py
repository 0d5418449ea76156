"""Where to draw peers: places in a unit square, never on top of each other, the same every time."""

from __future__ import annotations

from math import pi

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra
from scipy.spatial import KDTree

Places = NDArray[np.float64]

STRESSED = 600
"""Peers up to which distances between all pairs are worth their time and memory."""


def places(graph: nx.Graph) -> Places:
    """One place per peer, in the order of the sorted peers, inside the unit square.

    The graph's own `pos` if every peer has one; else distances on paper follow distances in hops.
    """
    nodes = sorted(graph.nodes)
    own = [graph.nodes[node].get("pos") for node in nodes]
    if all(place is not None and len(place) == 2 for place in own):
        return spread(_square(np.array(own, dtype=float), keep_shape=True))
    plain = nx.Graph(graph.subgraph(nodes))  # directions do not matter on paper
    for *_, data in plain.edges(data=True):
        data.clear()
    links = csr_array(nx.to_scipy_sparse_array(plain, nodelist=nodes, dtype=float))
    found = spread(_square(_by_pivots(links)))
    if 2 < len(nodes) <= STRESSED:
        found = spread(_square(_lying(_by_stress(links, found)), keep_shape=True))
    return found


def spread(points: Places, rounds: int = 200) -> Places:
    """Push apart whoever stands too near; the least distance falls with the number of peers."""
    count = len(points)
    if count < 2:
        return np.full((count, 2), 0.5)
    apart = least_distance(count)
    rng = np.random.default_rng(3)
    points = points + rng.normal(0, apart / 100, points.shape)  # nobody on the very same spot
    for _ in range(rounds):
        pairs = KDTree(points).query_pairs(apart, output_type="ndarray")
        if not len(pairs):
            break
        line = points[pairs[:, 0]] - points[pairs[:, 1]]
        length = np.linalg.norm(line, axis=1, keepdims=True)
        push = line / length * (1.05 * apart - length) / 2
        np.add.at(points, pairs[:, 0], push)
        np.add.at(points, pairs[:, 1], -push)
    low, high = points.min(axis=0), points.max(axis=0)
    if low.min() < 0 or high.max() > 1:  # a crowd may have pushed some over the border
        points = (points - (low + high) / 2) / max(float((high - low).max()), 1e-9) + 0.5
    return points


def least_distance(count: int) -> float:
    """How near two of `count` peers should stand; a square holds them all with room to spare."""
    return 0.55 / np.sqrt(count)


def nearest(points: Places) -> float:
    """How near the two nearest peers stand."""
    if len(points) < 2:
        return 1.0
    return float(KDTree(points).query(points, k=2)[0][:, 1].min())


def _square(points: Places, keep_shape: bool = False) -> Places:
    low, high = points.min(axis=0), points.max(axis=0)
    size = np.full(2, (high - low).max()) if keep_shape else high - low
    size = np.where(size > 1e-9, size, 1.0)
    return (points - (low + high) / 2) / size + 0.5


def _lying(points: Places) -> Places:
    """Turned so that the longer way runs across, as pages do; left alone if no way is much longer."""
    centred = points - points.mean(axis=0)
    _, sizes, ways = np.linalg.svd(centred, full_matrices=False)
    if sizes[0] < 1.2 * sizes[1]:
        return points
    (x, y), _ = ways if ways[0, np.abs(ways[0]).argmax()] > 0 else -ways
    return centred @ np.array([[x, -y], [y, x]])  # a turn, never a mirror


def _by_pivots(links: csr_array, pivots: int = 50) -> Places:
    """Classical scaling on the hops to a few far-apart peers; a circle when hops tell little."""
    count = len(links.indptr) - 1
    angle = 2 * pi * np.arange(count) / max(count, 1)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if count < 4:
        return circle
    hops = np.empty((min(pivots, count), count))
    closest = np.full(count, np.inf)
    pivot = 0
    for row in range(len(hops)):
        hops[row] = _finite(dijkstra(links, indices=pivot, unweighted=True))
        closest = np.minimum(closest, hops[row])
        pivot = int(closest.argmax())
    squares = hops**2
    centred = squares - squares.mean(axis=0) - squares.mean(axis=1, keepdims=True) + squares.mean()
    _, values, axes = np.linalg.svd(centred, full_matrices=False)
    if values[1] < 1e-6 * max(values[0], 1e-12):
        return circle
    found = axes[:2].T
    crowded = len(np.unique(found.round(6), axis=0)) < 0.7 * count
    return circle if crowded and count <= pivots else found


def _by_stress(links: csr_array, start: Places, rounds: int = 80) -> Places:
    """Distances on paper as near to distances in hops as they get, near pairs first (majorization)."""
    hops = _finite(np.asarray(dijkstra(links, unweighted=True)))
    np.fill_diagonal(hops, 1.0)
    weight = hops**-2.0
    np.fill_diagonal(weight, 0.0)
    laplacian = np.diag(weight.sum(axis=1)) - weight
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    points = start * hops.max()
    for _ in range(rounds):
        apart = np.linalg.norm(points[:, None] - points[None], axis=2)
        pull = -weight * hops / np.maximum(apart, 1e-9)
        np.fill_diagonal(pull, 0.0)
        np.fill_diagonal(pull, -pull.sum(axis=1))
        points = inverse @ (pull @ points)
    return points


def _finite(hops: Places) -> Places:
    """Parts that no path joins lie side by side."""
    known = hops[np.isfinite(hops)]
    return np.where(np.isfinite(hops), hops, known.max() + 2)
