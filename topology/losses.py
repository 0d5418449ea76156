"""Losing peers and links: how much of the swarm still holds together, and how fast it mixes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    items = _items(graph, kind)
    runs = []
    for _ in range(draws):
        order = [items[i] for i in rng.permutation(len(items))]
        runs.append(
            (_walk(graph, kind, order, shares, rule, tolerance), _split(graph, kind, order))
        )
    points = tuple(
        Point(
            share,
            float(np.mean([walk[i].whole for walk, _ in runs])),
            float(np.mean([walk[i].exchanges for walk, _ in runs])),
        )
        for i, share in enumerate(shares)
    )
    splits = [split for _, split in runs if split is not None]
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
    found = []
    fewest = fewest_to_split(graph, kind)
    for name, score in ATTACKS[kind].items():
        order = _attack(graph, kind, score, fewest, shares)
        points = _walk(graph, kind, order, shares, rule, tolerance)
        found.append((sum(point.whole for point in points), name, order, points))
    _, name, order, points = min(found, key=lambda attack: attack[:2])
    first = len(fewest) / len(_items(graph, kind)) if fewest else None
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


def _items(graph: nx.Graph, kind: Kind) -> list[Item]:
    return sorted(graph.nodes) if kind == "peers" else sorted(graph.edges)


def without(graph: nx.Graph, kind: Kind, lost: Sequence[Item]) -> nx.Graph:
    """A copy of the graph after a loss."""
    left = graph.copy()
    if kind == "peers":
        left.remove_nodes_from(lost)
    else:
        left.remove_edges_from(lost)  # pyright: ignore[reportArgumentType]
    return left


def _attack(
    graph: nx.Graph,
    kind: Kind,
    score: Callable[[nx.Graph], Scores],
    first: Sequence[Item],
    shares: Sequence[float],
) -> list[Item]:
    """An order of loss: `first`, then the highest scores, computed anew at every share."""
    total = len(_items(graph, kind))
    order: list[Item] = list(first)
    for share in shares:
        wanted = round(share * total) - len(order)
        if wanted <= 0:
            continue
        left = without(graph, kind, order)
        scores = score(left)
        items = _items(left, kind)
        items.sort(key=lambda item: -scores.get(item, 0.0))  # stable: ties go by number
        order += items[:wanted]
    return order


def _walk(
    graph: nx.Graph,
    kind: Kind,
    order: Sequence[Item],
    shares: Sequence[float],
    rule: Rule,
    tolerance: float,
) -> list[Point]:
    total = len(_items(graph, kind))
    points = []
    for share in shares:
        left = without(graph, kind, order[: round(share * total)])
        parts = components(left)
        if not parts:
            points.append(Point(share, 0.0, inf))
            continue
        part = left.subgraph(parts[0])
        gap = spectral_gap(mixing_matrix(part, rule))
        points.append(Point(share, len(part) / len(left), predicted_exchanges(gap, tolerance)))
    return points


def _split(graph: nx.Graph, kind: Kind, order: Sequence[Item], steps: int = 50) -> float | None:
    """The share lost, to one part in `steps`, when the survivors first fall apart."""
    nodes = sorted(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    ends = np.array([(index[u], index[v]) for u, v in graph.edges], dtype=np.intp).reshape(-1, 2)
    rank = {item: place for place, item in enumerate(order)}
    if kind == "peers":
        gone = np.array([rank[node] for node in nodes])  # when each peer goes
        link_gone = np.minimum(gone[ends[:, 0]], gone[ends[:, 1]])
    else:
        gone = np.full(len(nodes), len(order))
        link_gone = np.array([rank[edge] for edge in graph.edges])
    for count in sorted({max(1, round(len(order) * step / steps)) for step in range(1, steps + 1)}):
        left = int((gone >= count).sum())
        some = ends[link_gone >= count]
        links = csr_array(
            (np.ones(len(some)), (some[:, 0], some[:, 1])), shape=(len(nodes), len(nodes))
        )
        parts, _ = connected_components(links, graph.is_directed(), connection="strong")
        if left and parts - (len(nodes) - left) > 1:  # the lost count as parts of their own
            return count / len(order)
    return None
