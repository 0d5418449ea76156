"""Losing peers and links: how much of the swarm still holds together, and how fast it mixes."""

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

from .spectrum import DENSE, predicted_exchanges, spectral_gap
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

Kind = Literal["peers", "links"]
Item = int | Edge
Scores = Mapping[Any, float]

SHARES = tuple(np.linspace(0, 0.5, 11).round(3).tolist())
"""Shares lost at which a swarm is looked at, unless told otherwise."""

SMALL = 64
"""Up to so many peers the fewest losses that split a swarm are sought exactly."""


@dataclass(frozen=True)
class Point:
    """A swarm after a loss: what share is gone, and what is left.

    `whole` is the share of the survivors in the largest part that hangs together; `exchanges` is the
    prediction for that part.
    """

    share: float
    whole: float
    exchanges: float


@dataclass(frozen=True)
class Loss:
    """One way to lose peers or links, from nothing lost to the largest share asked for.

    `first_split` is the share lost when the survivors first fell apart (None: they never did);
    `first` names who or what went first; `attack` says how the worst was chosen.
    """

    kind: Kind
    how: Literal["random", "worst"]
    points: tuple[Point, ...]
    first_split: float | None
    first: tuple[Item, ...]
    attack: str = ""


def _paths(graph: nx.Graph) -> Scores:
    return nx.betweenness_centrality(graph, k=min(len(graph), 64), seed=1)


def _link_paths(graph: nx.Graph) -> Scores:
    return nx.edge_betweenness_centrality(graph, k=min(len(graph), 64), seed=1)


def _slow_links(graph: nx.Graph) -> Scores:
    """How much each link carries of the slowest mode of the largest part: its worth for mixing."""
    part = graph.subgraph(components(graph)[0])
    if len(part) < 3 or len(part) > DENSE or part.is_directed():
        return {}
    nodes = sorted(part.nodes)
    _, vectors = np.linalg.eigh(mixing_matrix(part, "metropolis").toarray())
    at = dict(zip(nodes, vectors[:, -2].tolist(), strict=True))
    return {(u, v): (at[u] - at[v]) ** 2 for u, v in part.edges}


ATTACKS: Mapping[Kind, Mapping[str, Callable[[nx.Graph], Scores]]] = MappingProxyType(
    {
        "peers": {"most links": lambda graph: dict(graph.degree()), "most paths": _paths},
        "links": {"most paths": _link_paths, "slowest mode": _slow_links},
    }
)
"""Ways to choose the next loss badly: the items with the highest scores go first."""


def random_loss(
    graph: nx.Graph,
    kind: Kind,
    shares: Sequence[float] = SHARES,
    rule: Rule = "push",
    tolerance: float = 1e-6,
    draws: int = 5,
    seed: Seed = 0,
) -> Loss:
    """Peers or links that fail by chance: means over `draws` orders; raise it for smoother curves."""
    rng = np.random.default_rng(seed)
    losing = _Losing(graph, kind, shares, rule, tolerance)
    orders = [[losing.items[i] for i in rng.permutation(len(losing.items))] for _ in range(draws)]
    runs = [losing.points(order) for order in orders]
    splits = [split for split in map(losing.first_split, orders) if split is not None]
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
    kind: Kind,
    shares: Sequence[float] = SHARES,
    rule: Rule = "push",
    tolerance: float = 1e-6,
) -> Loss:
    """The most harmful of the known attacks, each choosing anew after every share lost.

    First to go are the fewest whose loss splits the swarm (`fewest_to_split`). No attack is proven the
    worst beyond that.
    """
    require_connected(graph)
    losing = _Losing(graph, kind, shares, rule, tolerance)
    fewest = fewest_to_split(graph, kind)
    found = []
    for name, score in ATTACKS[kind].items():
        order = losing.attack(score, fewest)
        points = losing.points(order)
        found.append((sum(point.whole for point in points), name, order, points))
    _, name, order, points = min(found, key=lambda attack: attack[:2])
    first = len(fewest) / len(losing.items) if fewest else None
    lost = tuple(order[: max(len(fewest), 1)])
    return Loss(kind, "worst", tuple(points), first, lost, name)


def fewest_to_split(graph: nx.Graph, kind: Kind) -> list[Item]:
    """Peers (or links) whose loss cuts the swarm apart; empty if none does.

    The fewest on undirected graphs up to `SMALL` peers, and where one is enough; else those around the
    peer with the fewest links, which is often as few.
    """
    if isinstance(graph, nx.DiGraph) and not nx.is_strongly_connected(graph):
        raise TopologyError("this graph is in parts already: nothing needs to be lost")
    if len(graph) < 2:
        return []
    edges, peers = weak_spots(graph)
    spots = edges if kind == "links" else peers
    if spots:
        return [spots[0]]
    exact = len(graph) <= SMALL and not graph.is_directed()
    by_links = sorted(
        graph, key=lambda peer: (len(graph[peer]), peer)
    )  # outgoing ones, if directed
    if kind == "links":
        if exact:
            return sorted(nx.minimum_edge_cut(graph))
        edges = list(graph.edges(by_links[0]))
        return sorted(edges if graph.is_directed() else [(min(e), max(e)) for e in edges])
    # Neighbourhoods that leave somebody outside, the smallest first.
    around = [peer for peer in by_links if len(graph[peer]) < len(graph) - 1]
    if not around:
        return []  # whoever is left still hears everybody
    return sorted(nx.minimum_node_cut(graph) if exact else graph[around[0]])


def without(graph: nx.Graph, kind: Kind, lost: Sequence[Item]) -> nx.Graph:
    """A copy of the graph after a loss."""
    left = graph.copy()
    if kind == "peers":
        left.remove_nodes_from(lost)
    else:
        left.remove_edges_from(lost)  # pyright: ignore[reportArgumentType]
    return left


def _items(graph: nx.Graph, kind: Kind) -> list[Item]:
    return sorted(graph.nodes) if kind == "peers" else sorted(graph.edges)


@dataclass(frozen=True)
class _Losing:
    """Peers or links of a graph that are lost in some order, looked at after some shares of them."""

    graph: nx.Graph
    kind: Kind
    shares: Sequence[float]
    rule: Rule
    tolerance: float

    @cached_property
    def items(self) -> list[Item]:
        """All that can be lost."""
        return _items(self.graph, self.kind)

    def attack(self, score: Callable[[nx.Graph], Scores], first: Sequence[Item]) -> list[Item]:
        """Return an order of loss: `first`, then the highest scores, computed anew at every share."""
        order = list(first)
        for share in self.shares:
            wanted = round(share * len(self.items)) - len(order)
            if wanted > 0:
                left = without(self.graph, self.kind, order)
                scores = score(left)
                # stable: ties go by number
                items = sorted(_items(left, self.kind), key=lambda item: -scores.get(item, 0.0))
                order += items[:wanted]
        return order

    def points(self, order: Sequence[Item]) -> list[Point]:
        """Return what is left after each share."""
        points = []
        for share in self.shares:
            left = without(self.graph, self.kind, order[: round(share * len(self.items))])
            if not left:
                points.append(Point(share, 0.0, inf))
                continue
            part = left.subgraph(components(left)[0])
            exchanges = predicted_exchanges(
                spectral_gap(mixing_matrix(part, self.rule)), self.tolerance
            )
            points.append(Point(share, len(part) / len(left), exchanges))
        return points

    def first_split(self, order: Sequence[Item], steps: int = 50) -> float | None:
        """Return the share lost, to one part in `steps`, when the survivors first fall apart."""
        nodes = sorted(self.graph.nodes)
        index = {node: i for i, node in enumerate(nodes)}
        edges = list(self.graph.edges)
        ends = np.array([(index[u], index[v]) for u, v in edges], dtype=np.intp).reshape(-1, 2)
        rank = {item: place for place, item in enumerate(order)}
        if self.kind == "peers":
            gone = np.array([rank[node] for node in nodes])  # when each peer goes
            link_gone = gone[ends].min(axis=1)
        else:
            gone = np.full(len(nodes), len(order))
            link_gone = np.array([rank[edge] for edge in edges])
        shape, directed = (len(nodes), len(nodes)), self.graph.is_directed()
        counts = {max(1, round(len(order) * step / steps)) for step in range(1, steps + 1)}
        for count in sorted(counts):
            left = int((gone >= count).sum())
            some = ends[link_gone >= count]
            links = csr_array((np.ones(len(some)), tuple(some.T)), shape=shape)
            parts, _ = connected_components(links, directed, connection="strong")
            if left and parts - (len(nodes) - left) > 1:  # the lost count as parts of their own
                return count / len(order)
        return None
