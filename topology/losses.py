"""Robustness of a graph: how connected it stays, and how fast it mixes, when peers or links are removed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from types import MappingProxyType
from typing import Any, Literal

import networkx as nx
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from .spectrum import MAX_DENSE, predicted_exchanges, spectral_gap
from .structure import (
    Edge,
    Rule,
    Seed,
    TopologyError,
    components,
    mixing_matrix,
    require_connected,
    weak_spots,
)

ItemKind = Literal["peers", "links"]
"""What is removed."""
Item = int | Edge
"""A peer or a link."""
Scores = Mapping[Any, float]
"""The score of each peer or link by an attack."""

DEFAULT_SHARES = tuple(np.linspace(0, 0.5, 11).round(3).tolist())
"""The shares of peers or links after whose removal a swarm is evaluated."""

MAX_EXACT_PEERS = 64
"""The number of peers up to which the smallest set that splits a swarm is searched exactly."""


@dataclass(frozen=True)
class Point:
    """A swarm after a loss.

    `share` is the share of peers or links that were removed, `whole` the share of the remaining peers in the
    largest component, and `exchanges` the predicted number for that component.
    """

    share: float
    whole: float
    exchanges: float


@dataclass(frozen=True)
class Loss:
    """A swarm that loses more and more peers or links: at random, or by the worst known attack.

    `points` is the state of the swarm after every lost share. `first_split` is the lost share at which the
    swarm was first disconnected (None: it never was). `first` are the peers or links that an attack removes
    first, and `attack` is the attack's name in ATTACKS.
    """

    kind: ItemKind
    how: Literal["random", "worst"]
    points: tuple[Point, ...]
    first_split: float | None
    first: tuple[Item, ...]
    attack: str = ""


def _peers_by_paths(graph: nx.Graph) -> Scores:
    """Score each peer by the number of shortest paths through it, estimated from 64 peers."""
    return nx.betweenness_centrality(graph, k=min(len(graph), 64), seed=1)


def _links_by_paths(graph: nx.Graph) -> Scores:
    """Score each link by the number of shortest paths over it, estimated from 64 peers."""
    return nx.edge_betweenness_centrality(graph, k=min(len(graph), 64), seed=1)


def _links_by_slowest_mode(graph: nx.Graph) -> Scores:
    """Score each link of the largest component by how much the slowest mode changes across it.

    The slowest mode is the eigenvector of the second eigenvalue: links across which it changes most are those
    on which mixing depends most.
    """
    largest = graph.subgraph(components(graph)[0])
    if len(largest) < 3 or len(largest) > MAX_DENSE or largest.is_directed():
        return {}
    nodes = sorted(largest.nodes)
    _, vectors = np.linalg.eigh(mixing_matrix(largest, "metropolis").toarray())
    mode = dict(zip(nodes, vectors[:, -2].tolist(), strict=True))
    return {(u, v): (mode[u] - mode[v]) ** 2 for u, v in largest.edges}


ATTACKS: Mapping[ItemKind, Mapping[str, Callable[[nx.Graph], Scores]]] = MappingProxyType(
    {
        "peers": {"most links": lambda graph: dict(graph.degree()), "most paths": _peers_by_paths},
        "links": {"most paths": _links_by_paths, "slowest mode": _links_by_slowest_mode},
    }
)
"""Attacks by name: functions that score peers or links. Those with the highest scores are removed first."""


def random_loss(
    graph: nx.Graph,
    kind: ItemKind,
    shares: Sequence[float] = DEFAULT_SHARES,
    rule: Rule = "push",
    tolerance: float = 1e-6,
    draws: int = 5,
    seed: Seed = 0,
) -> Loss:
    """Return the loss of peers or links at random: the means over `draws` random orders of removal.

    Raise `draws` for smoother curves.
    """
    rng = np.random.default_rng(seed)
    removal = _Removal(graph, kind, shares, rule, tolerance)
    items = removal.items
    orders = [[items[i] for i in rng.permutation(len(items))] for _ in range(draws)]
    runs = [removal.points(order) for order in orders]
    splits = [split for split in map(removal.first_split, orders) if split is not None]
    points = tuple(
        Point(
            share,
            float(np.mean([point.whole for point in points])),
            float(np.mean([point.exchanges for point in points])),
        )
        for share, *points in zip(shares, *runs, strict=True)
    )
    return Loss(kind, "random", points, float(np.mean(splits)) if splits else None, ())


def worst_loss(
    graph: nx.Graph,
    kind: ItemKind,
    shares: Sequence[float] = DEFAULT_SHARES,
    rule: Rule = "push",
    tolerance: float = 1e-6,
) -> Loss:
    """Return the loss by the most harmful of ATTACKS; each attack computes its scores again at every share.

    Every attack begins with the set of `fewest_to_split`. None is proven to be the worst possible.
    """
    require_connected(graph)
    removal = _Removal(graph, kind, shares, rule, tolerance)
    fewest = fewest_to_split(graph, kind)
    attacks = []
    for name, score in ATTACKS[kind].items():
        order = removal.attack(score, fewest)
        points = removal.points(order)
        attacks.append((sum(point.whole for point in points), name, order, points))
    _, name, order, points = min(attacks, key=lambda attack: attack[:2])
    first_split = len(fewest) / len(removal.items) if fewest else None
    first = tuple(order[: max(len(fewest), 1)])
    return Loss(kind, "worst", tuple(points), first_split, first, name)


def fewest_to_split(graph: nx.Graph, kind: ItemKind) -> list[Item]:
    """Return a small set of peers (or links) whose removal splits the swarm; empty if there is none.

    It is the smallest if one item is enough, or on undirected graphs up to `MAX_EXACT_PEERS` peers.
    Otherwise it is the neighbours (or links) of the peer with the fewest links, which is often as small.
    """
    if isinstance(graph, nx.DiGraph) and not nx.is_strongly_connected(graph):
        raise TopologyError(
            "this graph is disconnected already: nothing has to be removed to split it"
        )
    if len(graph) < 2:
        return []
    bridges, cut_peers = weak_spots(graph)
    splits_alone = bridges if kind == "links" else cut_peers
    if splits_alone:
        return [splits_alone[0]]
    exact = len(graph) <= MAX_EXACT_PEERS and not graph.is_directed()
    # Peers by their number of links (of outgoing ones in a directed graph).
    by_degree = sorted(graph, key=lambda peer: (len(graph[peer]), peer))
    if kind == "links":
        if exact:
            return sorted(nx.minimum_edge_cut(graph))
        links = list(graph.edges(by_degree[0]))
        return sorted(links if graph.is_directed() else [(min(e), max(e)) for e in links])
    # Removing all neighbours of a peer isolates it, unless all other peers are its neighbours.
    can_be_isolated = [peer for peer in by_degree if len(graph[peer]) < len(graph) - 1]
    if not can_be_isolated:
        return []  # a clique stays connected
    return sorted(nx.minimum_node_cut(graph) if exact else graph[can_be_isolated[0]])


def without(graph: nx.Graph, kind: ItemKind, lost: Sequence[Item]) -> nx.Graph:
    """Return a copy of the graph without the lost peers or links."""
    remaining = graph.copy()
    if kind == "peers":
        remaining.remove_nodes_from(lost)
    else:
        remaining.remove_edges_from(lost)  # pyright: ignore[reportArgumentType]
    return remaining


def _items(graph: nx.Graph, kind: ItemKind) -> list[Item]:
    """Return all peers or all links of a graph."""
    return sorted(graph.nodes) if kind == "peers" else sorted(graph.edges)


@dataclass(frozen=True)
class _Removal:
    """Removes peers or links of a graph in some order, and evaluates the graph after given shares."""

    graph: nx.Graph
    kind: ItemKind
    shares: Sequence[float]
    rule: Rule
    tolerance: float

    @cached_property
    def items(self) -> list[Item]:
        """All peers or all links."""
        return _items(self.graph, self.kind)

    def attack(self, score: Callable[[nx.Graph], Scores], first: Sequence[Item]) -> list[Item]:
        """Return an order of removal: `first`, then the highest scores, computed again at every share."""
        order = list(first)
        for share in self.shares:
            count = round(share * len(self.items)) - len(order)
            if count > 0:
                remaining = without(self.graph, self.kind, order)
                scores = score(remaining)
                # A stable sort: equal scores stay in the order of their numbers.
                items = _items(remaining, self.kind)
                order += sorted(items, key=lambda item: -scores.get(item, 0.0))[:count]
        return order

    def points(self, order: Sequence[Item]) -> list[Point]:
        """Return the state of the swarm after each share."""
        points = []
        for share in self.shares:
            remaining = without(self.graph, self.kind, order[: round(share * len(self.items))])
            if not remaining:
                points.append(Point(share, 0.0, inf))
                continue
            largest = remaining.subgraph(components(remaining)[0])
            gap = spectral_gap(mixing_matrix(largest, self.rule))
            exchanges = predicted_exchanges(gap, self.tolerance)
            points.append(Point(share, len(largest) / len(remaining), exchanges))
        return points

    def first_split(self, order: Sequence[Item], steps: int = 50) -> float | None:
        """Return the lost share at which the swarm is first disconnected, to within 1 / `steps`."""
        nodes = sorted(self.graph.nodes)
        index = {node: i for i, node in enumerate(nodes)}
        edges = list(self.graph.edges)
        ends = np.array([(index[u], index[v]) for u, v in edges], dtype=np.intp).reshape(-1, 2)
        removed_at = {item: number for number, item in enumerate(order)}
        if self.kind == "peers":
            peer_removed_at = np.array([removed_at[node] for node in nodes])
            link_removed_at = peer_removed_at[ends].min(axis=1)
        else:
            peer_removed_at = np.full(len(nodes), len(order))
            link_removed_at = np.array([removed_at[edge] for edge in edges])
        shape, directed = (len(nodes), len(nodes)), self.graph.is_directed()
        counts = {max(1, round(len(order) * step / steps)) for step in range(1, steps + 1)}
        for count in sorted(counts):
            peers_left = int((peer_removed_at >= count).sum())
            ends_left = ends[link_removed_at >= count]
            links = csr_array((np.ones(len(ends_left)), tuple(ends_left.T)), shape=shape)
            components_left, _ = connected_components(links, directed, connection="strong")
            removed_peers = len(nodes) - peers_left  # each is a component of its own
            if peers_left and components_left - removed_peers > 1:
                return count / len(order)
        return None
