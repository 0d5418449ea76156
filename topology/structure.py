"""Shape of a graph: its parts, how far apart peers are, which links and peers it cannot lose.

Also what a bad graph raises, and how its messages name peers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from gossamer.errors import GossamerError

Edge = tuple[int, int]

Seed = int | np.random.Generator
"""What every `seed` parameter takes."""


class TopologyError(GossamerError, ValueError):
    """A graph, file, schedule or weight that gossip cannot use; the message says what to change."""


class DisconnectedError(TopologyError):
    """Some peers can never hear from others.

    `components` holds the connected (for directed graphs: strongly connected) parts, largest first.
    """

    def __init__(self, message: str, components: Sequence[frozenset[int]]):
        super().__init__(message)
        self.components = tuple(components)


def name_peers(
    peers: Iterable[object], limit: int = 8, labels: Mapping[Any, str] | None = None
) -> str:
    """Write a set of peers for a message: `{0, 1, 2}`, or the first few and how many follow.

    labels: what peers are called, where they are called something.
    """
    known = list(peers)
    try:
        known.sort()  # pyright: ignore[reportCallIssue, reportArgumentType]
    except TypeError:  # mixed labels of a user's graph have no order
        known.sort(key=str)
    shown = ", ".join(str((labels or {}).get(peer, peer)) for peer in known[:limit])
    more = f", … {len(known) - limit} more" if len(known) > limit else ""
    return "{" + shown + more + "}"


def name_components(components: Sequence[Iterable[object]], limit: int = 4) -> str:
    """Write the parts of a disconnected graph for a message."""
    shown = "; ".join(name_peers(part) for part in components[:limit])
    more = f"; … {len(components) - limit} more" if len(components) > limit else ""
    return shown + more


def adjacency(graph: nx.Graph) -> csr_array:
    """Ones where peer i has a link to peer j; rows and columns follow the sorted nodes.

    A third of the time of networkx's own, which looks at every link's attributes.
    """
    index = {node: i for i, node in enumerate(sorted(graph))}
    ends = np.array([(index[u], index[v]) for u, v in graph.edges], dtype=np.intp).reshape(-1, 2)
    if not graph.is_directed():
        ends = np.concatenate([ends, ends[:, ::-1]])
    return csr_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(index),) * 2)


def components(graph: nx.Graph) -> list[frozenset[int]]:
    """Parts that hear each other (strongly connected when directed), largest first."""
    if isinstance(graph, nx.DiGraph):
        found = nx.strongly_connected_components(graph)
    else:
        found = nx.connected_components(graph)
    return sorted((frozenset(part) for part in found), key=lambda part: (-len(part), min(part)))


def require_connected(graph: nx.Graph, what: str = "the graph") -> None:
    """Raise `DisconnectedError` naming the components, unless every peer can reach every other."""
    parts = components(graph)
    if len(parts) > 1:
        kind = "strongly connected" if graph.is_directed() else "connected"
        raise DisconnectedError(
            f"{what} is not {kind}: {len(parts)} components: {name_components(parts)}. Add links between "
            "them, or ask for bridging",
            parts,
        )


def effective_diameter(
    graph: nx.Graph, share: float = 0.9, sources: int = 64, seed: Seed = 0, levels: int = 500
) -> float:
    """Hops within which `share` of the ordered pairs of peers reach each other, interpolated.

    Exact up to `sources` peers, else from that many random sources: raise it for a finer estimate,
    lower it for speed. Graphs deeper than `levels` (long rings) are walked source by source. `inf` when
    fewer pairs than `share` are joined at all.
    """
    nodes = sorted(graph.nodes)
    if len(nodes) < 2:
        return 0.0
    links = adjacency(graph)
    picked = np.arange(len(nodes))
    if len(nodes) > sources:
        picked = np.random.default_rng(seed).choice(len(nodes), sources, replace=False)
    counts = _hop_counts(links, picked, levels)
    reached = np.cumsum(counts) / (len(picked) * (len(nodes) - 1))
    if reached[-1] < share:
        return float("inf")
    at = int(np.searchsorted(reached, share))  # ≥ 1: nobody is reached in 0 hops
    return float(at - 1 + (share - reached[at - 1]) / (reached[at] - reached[at - 1]))


def _hop_counts(links: csr_array, picked: NDArray[np.intp], levels: int) -> NDArray[np.float64]:
    """How many (source, other) pairs are 0, 1, 2, … hops apart.

    Breadth-first from 64 sources at once, one bit each: a level is one pass over the links.
    """
    into = csr_array(links.T)
    heard = np.flatnonzero(np.diff(into.indptr))
    starts = into.indptr[:-1][heard]
    counts = np.zeros(1)
    for batch in np.array_split(picked, -(-len(picked) // 64)):
        seen = np.zeros(len(into.indptr) - 1, dtype=np.uint64)
        seen[batch] = np.uint64(1) << np.arange(len(batch), dtype=np.uint64)
        found = [len(batch)]
        while heard.size and (len(found) == 1 or found[-1] > found[-2]):
            if len(found) > levels:
                return _deep_hop_counts(links, picked)
            seen[heard] |= np.bitwise_or.reduceat(seen[into.indices], starts)
            found.append(int(np.unpackbits(seen.view(np.uint8)).sum()))
        new = np.diff(found, prepend=found[0])
        counts = np.pad(counts, (0, max(0, len(new) - len(counts))))
        counts[: len(new)] += new
    return counts


def _deep_hop_counts(links: csr_array, picked: NDArray[np.intp]) -> NDArray[np.float64]:
    counts = np.zeros(len(links.indptr))
    for source in picked:
        hops = dijkstra(links, indices=int(source), unweighted=True)
        hops[source] = np.inf
        seen = np.bincount(hops[np.isfinite(hops)].astype(np.intp))
        counts[: len(seen)] += seen
    return counts


def weak_spots(graph: nx.Graph) -> tuple[list[Edge], list[int]]:
    """Cut edges and bridge peers: each one's loss alone cuts the swarm apart.

    Directed graphs lose strong connectivity instead. One pass over the biconnected parts (undirected)
    or over the dominator trees from one peer, forwards and backwards (directed).
    """
    if isinstance(graph, nx.DiGraph):
        return _directed_weak_spots(graph)
    edges: list[Edge] = []
    parts_of: dict[int, int] = dict.fromkeys(graph.nodes, 0)
    for part in nx.biconnected_component_edges(graph):
        links = list(part)
        if len(links) == 1:
            a, b = links[0]
            edges.append((min(a, b), max(a, b)))
        for peer in {end for link in links for end in link}:
            parts_of[peer] += 1
    return sorted(edges), sorted(peer for peer, count in parts_of.items() if count > 1)


def _directed_weak_spots(graph: nx.DiGraph) -> tuple[list[Edge], list[int]]:
    require_connected(graph, "weak spots need a graph that holds together, and it")
    root = min(graph.nodes)
    edges: set[Edge] = set()
    peers: set[int] = set()
    for backwards in (False, True):
        flow = graph.reverse(copy=False) if backwards else graph
        above = {
            node: up for node, up in nx.immediate_dominators(flow, root).items() if node != root
        }
        peers |= {up for up in above.values() if up != root}
        spans = _intervals(above, root)
        for node, up in above.items():
            # the link is the only way in: all other ways into `node` come from beyond it
            if flow.has_edge(up, node) and all(
                spans[node][0] <= spans[other][0] <= spans[node][1]
                for other in flow.predecessors(node)
                if other != up
            ):
                edges.add((node, up) if backwards else (up, node))
    rest = graph.subgraph(node for node in graph if node != root)
    if len(components(rest)) > 1:
        peers.add(root)
    return sorted(edges), sorted(peers)


def _intervals(above: dict[int, int], root: int) -> dict[int, tuple[int, int]]:
    """Entry number of each node in a walk down the tree, and the last entry below it."""
    below: dict[int, list[int]] = {}
    for node, up in above.items():
        below.setdefault(up, []).append(node)
    entry: dict[int, int] = {root: 0}
    last: dict[int, int] = {}
    stack: list[tuple[int, Iterator[int]]] = [(root, iter(below.get(root, ())))]
    while stack:
        node, children = stack[-1]
        child = next(children, None)
        if child is None:
            last[node] = len(entry) - 1
            stack.pop()
        else:
            entry[child] = len(entry)
            stack.append((child, iter(below.get(child, ()))))
    return {node: (entry[node], last[node]) for node in entry}
