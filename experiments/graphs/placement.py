"""Places the peers of a graph on a map; the same graph has the same map every time."""

from __future__ import annotations

from math import pi

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra
from scipy.spatial import KDTree

Positions = NDArray[np.float64]
"""A row (x, y) for each peer."""
Distances = NDArray[np.float64]
"""Distances in hops, from one peer or from all peers to each peer."""

STRESS_LAYOUT_PEERS = 600
"""The most peers for which positions are computed from the distances between all pairs."""


PIVOTS = 50
"""The most peers from which distances are computed in larger graphs."""


def positions(graph: nx.Graph) -> Positions:
    """Return one position per peer in the unit square, in the order of the sorted peers.

    Positions are those of the node attribute `pos` if every peer has one. Otherwise they are chosen so that
    distances on the map follow distances in hops.
    """
    nodes = sorted(graph.nodes)
    from_graph = [graph.nodes[node].get("pos") for node in nodes]
    if all(position is not None and len(position) == 2 for position in from_graph):
        return spread(_fit_unit_square(np.array(from_graph, dtype=float), keep_aspect=True))
    # A copy of the graph without directions and link weights, which do not matter for distances in hops.
    undirected = nx.Graph(graph.subgraph(nodes))
    for *_, data in undirected.edges(data=True):
        data.clear()
    links = csr_array(nx.to_scipy_sparse_array(undirected, nodelist=nodes, dtype=float))
    points = spread(_fit_unit_square(_pivot_layout(links)))
    if 2 < len(nodes) <= STRESS_LAYOUT_PEERS:
        rotated = _rotate_lengthwise(_stress_layout(links, points))
        points = spread(_fit_unit_square(rotated, keep_aspect=True))
    return points


def spread(points: Positions, rounds: int = 200) -> Positions:
    """Return positions with peers pushed apart that are too close; the more peers, the closer they may be."""
    count = len(points)
    if count < 2:
        return np.full((count, 2), 0.5)
    distance = target_distance(count)
    rng = np.random.default_rng(3)
    points = points + rng.normal(0, distance / 100, points.shape)  # no two at the same point
    for _ in range(rounds):
        pairs = KDTree(points).query_pairs(distance, output_type="ndarray")
        if not len(pairs):
            break
        difference = points[pairs[:, 0]] - points[pairs[:, 1]]
        length = np.linalg.norm(difference, axis=1, keepdims=True)
        push = difference / length * (1.05 * distance - length) / 2
        np.add.at(points, pairs[:, 0], push)
        np.add.at(points, pairs[:, 1], -push)
    low, high = points.min(axis=0), points.max(axis=0)
    if low.min() < 0 or high.max() > 1:  # some peers were pushed out of the square
        points = (points - (low + high) / 2) / max(float((high - low).max()), 1e-9) + 0.5
    return points


def target_distance(count: int) -> float:
    """Return the distance that `spread` keeps between `count` peers if it can; there is room for all."""
    return 0.55 / np.sqrt(count)


def smallest_distance(points: Positions) -> float:
    """Return the distance between the two closest peers."""
    if len(points) < 2:
        return 1.0
    return float(KDTree(points).query(points, k=2)[0][:, 1].min())


def _fit_unit_square(points: Positions, keep_aspect: bool = False) -> Positions:
    """Return points scaled and shifted into the unit square, x and y by the same factor if `keep_aspect`."""
    low, high = points.min(axis=0), points.max(axis=0)
    size = np.full(2, (high - low).max()) if keep_aspect else high - low
    size = np.where(size > 1e-9, size, 1.0)
    return (points - (low + high) / 2) / size + 0.5


def _rotate_lengthwise(points: Positions) -> Positions:
    """Return points rotated so that their longest axis is horizontal, if one axis is clearly longer."""
    centred = points - points.mean(axis=0)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    if sizes[0] < 1.2 * sizes[1]:
        return points
    (x, y), _ = directions if directions[0, np.abs(directions[0]).argmax()] > 0 else -directions
    return centred @ np.array([[x, -y], [y, x]])  # a rotation, never a reflection


def _pivot_layout(links: csr_array) -> Positions:
    """Return positions by pivot MDS: multidimensional scaling of the hops to up to PIVOTS peers.

    The pivots are peers far from each other. The layout is a circle instead for fewer than 4 peers, if the
    hops give fewer than two dimensions (a path), or if many peers of a small graph would coincide.
    """
    count = len(links.indptr) - 1
    angle = 2 * pi * np.arange(count) / max(count, 1)
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if count < 4:
        return circle
    hops = np.empty((min(PIVOTS, count), count))
    closest = np.full(count, np.inf)
    pivot = 0
    for row in range(len(hops)):
        hops[row] = _finite_hops(dijkstra(links, indices=pivot, unweighted=True))
        closest = np.minimum(closest, hops[row])
        pivot = int(closest.argmax())
    squares = hops**2
    centred = squares - squares.mean(axis=0) - squares.mean(axis=1, keepdims=True) + squares.mean()
    _, values, axes = np.linalg.svd(centred, full_matrices=False)
    if values[1] < 1e-6 * max(values[0], 1e-12):
        return circle
    points = axes[:2].T
    is_crowded = len(np.unique(points.round(6), axis=0)) < 0.7 * count
    return circle if is_crowded and count <= PIVOTS else points


def _stress_layout(links: csr_array, start: Positions) -> Positions:
    """Return positions whose distances on the map differ least from hops; close pairs weigh most.

    They are found by stress majorization, which starts from the positions `start`.
    """
    hops = _finite_hops(np.asarray(dijkstra(links, unweighted=True)))
    np.fill_diagonal(hops, 1.0)
    weight = hops**-2.0
    np.fill_diagonal(weight, 0.0)
    laplacian = np.diag(weight.sum(axis=1)) - weight
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    points = start * hops.max()
    for _ in range(80):
        distances = np.linalg.norm(points[:, None] - points[None], axis=2)
        pull = -weight * hops / np.maximum(distances, 1e-9)
        np.fill_diagonal(pull, 0.0)
        np.fill_diagonal(pull, -pull.sum(axis=1))
        points = inverse @ (pull @ points)
    return points


def _finite_hops(hops: Distances) -> Distances:
    """Return hops in which infinite ones (between components) are the longest finite one plus 2."""
    finite = hops[np.isfinite(hops)]
    return np.where(np.isfinite(hops), hops, finite.max() + 2)
