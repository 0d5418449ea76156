"""Shape of a graph: its parts, how far apart peers are, which links and peers it cannot lose; and its mixing
matrix: how much of its mass each peer sends to whom in one exchange.

Convention everywhere: `W[i, j]` is the share of peer j's mass that goes to peer i, so that one exchange is
`W @ x` and columns sum to 1 (mass is conserved). Rows and columns follow the sorted nodes.

Also what a bad graph raises, and how its messages name peers.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array, diags_array
from scipy.sparse.csgraph import dijkstra

from gossamer.errors import GossamerError

Edge = tuple[int, int]

Members = Mapping[str, Collection[int]]
"""Which peers implement each partial model."""

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
        # Preorder numbers, and how many nodes hang below each: a subtree is a run of numbers.
        tree = nx.DiGraph((up, node) for node, up in above.items())
        order = list(nx.dfs_preorder_nodes(tree, root)) if above else [root]
        entry = {node: number for number, node in enumerate(order)}
        size = Counter(order)
        for node in reversed(order[1:]):
            size[above[node]] += size[node]
        for node, up in above.items():
            # the link is the only way in: all other ways into `node` come from beyond it
            if flow.has_edge(up, node) and all(
                0 <= entry[other] - entry[node] < size[node]
                for other in flow.predecessors(node)
                if other != up
            ):
                edges.add((node, up) if backwards else (up, node))
    rest = graph.subgraph(node for node in graph if node != root)
    if len(components(rest)) > 1:
        peers.add(root)
    return sorted(edges), sorted(peers)


# --- mixing matrices ------------------------------------------------------------------------------

Rule = Literal["push", "metropolis", "max-degree", "edges"]
"""Names of weight rules. Swarms run `push` unless told otherwise, and so everything here is about it."""


def _links(graph: nx.Graph, undirected: str = "") -> csr_array:
    """The links of a graph that has a mixing matrix; `undirected` names a rule that needs such a graph."""
    if graph.is_multigraph():
        raise TopologyError("parallel links: use nx.Graph or nx.DiGraph, not a multigraph")
    if undirected and graph.is_directed():
        raise TopologyError(
            f"{undirected} weights need an undirected graph; use push on a directed one"
        )
    if not graph:
        raise TopologyError("the graph has no peers")
    if loops := list(nx.nodes_with_selfloops(graph)):
        raise TopologyError(
            f"self-loops at {name_peers(loops)}: remove them (what a peer keeps is what it does "
            "not send)"
        )
    try:
        return adjacency(graph)
    except TypeError:
        raise TopologyError(
            f"peers {name_peers(graph)} are names of several types, which have no order: "
            "gossamer.topology.plain(graph) numbers them"
        ) from None


def _with_kept(sent: csr_array) -> csr_array:
    """Add the diagonal: each peer keeps what it does not send."""
    kept = 1.0 - np.asarray(sent.sum(axis=0)).ravel()
    return csr_array(sent + diags_array(kept, format="csr"))


def metropolis(graph: nx.Graph) -> csr_array:
    """Metropolis–Hastings: 1 / (1 + larger degree) on each link. Symmetric; needs no global fact.

    The safe choice on undirected graphs: plain averages, no weights needed, hubs slow nobody down.
    """
    matrix = _links(graph, "metropolis")
    degree = np.asarray(matrix.sum(axis=1)).ravel()
    links = coo_array(matrix)
    row, column = links.coords
    share = 1.0 / (1.0 + np.maximum(degree[row], degree[column]))
    return _with_kept(csr_array((share, (row, column)), shape=matrix.shape))


def max_degree(graph: nx.Graph) -> csr_array:
    """1 / (1 + largest degree of the swarm) on each link. Symmetric; slow when one hub is large."""
    matrix = _links(graph, "max-degree")
    top = float(np.asarray(matrix.sum(axis=1)).max())
    return _with_kept(csr_array(matrix / (1.0 + top)))


def uniform_push(graph: nx.Graph) -> csr_array:
    """Equal shares to oneself and every out-neighbour: push-sum's default, for any graph."""
    matrix = _links(graph)
    out = np.asarray(matrix.sum(axis=1)).ravel()
    return _with_kept(csr_array(matrix.T @ diags_array(1.0 / (1.0 + out))))


def edge_weights(graph: nx.Graph, attribute: str = "weight") -> csr_array:
    """Shares written on the edges: edge (u, v) carries the share of u's mass that v gets.

    The rest is kept. An edge without the attribute, a share outside 0 … 1, or a peer that sends
    more than it has is an error that names it.
    """
    _links(graph)  # for its checks
    nodes = sorted(graph)
    index = {node: i for i, node in enumerate(nodes)}
    rows, columns, shares = [], [], []
    for u, v, share in graph.edges(data=attribute):
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise TopologyError(f"edge ({u}, {v}): {attribute} is {share!r}, not a share 0 … 1")
        ends = [(u, v)] if graph.is_directed() else [(u, v), (v, u)]
        for a, b in ends:
            rows.append(index[b])
            columns.append(index[a])
            shares.append(float(share))
    shape = (len(nodes), len(nodes))
    sent = csr_array((np.array(shares, dtype=float), (rows, columns)), shape=shape)
    total = np.asarray(sent.sum(axis=0)).ravel()
    for at in np.flatnonzero(total > 1 + 1e-12):
        raise TopologyError(
            f"peer {nodes[at]} sends away {total[at]:.9g} of its mass: the {attribute}s of its "
            "edges must sum to at most 1"
        )
    return _with_kept(sent)


RULES = MappingProxyType(
    {
        "push": uniform_push,
        "metropolis": metropolis,
        "max-degree": max_degree,
        "edges": edge_weights,
    }
)
"""Weight rules by the name a config uses."""


def weighted(graph: nx.Graph) -> bool:
    """Whether weights are written on the links: any other than 1. Only the rule `edges` uses them."""
    return any(weight not in (None, 1) for *_, weight in graph.edges(data="weight"))


def mixing_matrix(graph: nx.Graph, rule: Rule = "push") -> csr_array:
    """The matrix of one exchange on `graph` under the named rule, checked."""
    if rule not in RULES:
        raise TopologyError(f"unknown weight rule {rule!r}: use {', '.join(RULES)}")
    matrix = RULES[rule](graph)
    check_stochastic(matrix, names=sorted(graph.nodes))
    return matrix


def check_stochastic(
    matrix: csr_array,
    columns: bool = True,
    rows: bool = False,
    names: Sequence[int] | None = None,
    tolerance: float = 1e-9,
) -> None:
    """Raise unless all shares are ≥ 0 and the asked sums are 1; the error names peer and sum.

    Push-sum needs columns (mass conserved); plain averaging without weights needs rows as well.
    """
    height, width = matrix.shape  # pyright: ignore[reportGeneralTypeIssues]
    if height != width:
        raise TopologyError(f"a mixing matrix is square, not {height} × {width}")
    label = list(range(width)) if names is None else list(names)
    entries = coo_array(matrix)
    bad = np.flatnonzero(~(entries.data >= -tolerance))  # ~(≥) also catches NaN
    if bad.size:
        receiver, sender = (int(axis[bad[0]]) for axis in entries.coords)
        raise TopologyError(
            f"peer {label[sender]} gives peer {label[receiver]} the share "
            f"{entries.data[bad[0]]:.9g}: shares are 0 or more"
        )
    asked = [(0, "column", "sends and keeps")] * columns + [(1, "row", "receives")] * rows
    for axis, word, verb in asked:
        sums = np.asarray(matrix.sum(axis=axis)).ravel()
        wrong = np.flatnonzero(~(np.abs(sums - 1.0) <= tolerance))
        if wrong.size:
            at = int(wrong[0])
            raise TopologyError(
                f"not {word}-stochastic: peer {label[at]} {verb} {sums[at]:.9g} in all, not 1 "
                f"({wrong.size} of {len(label)} peers are off)"
            )


# --- partial models, each on the subgraph of its peers ---------------------------------------------


def subgraphs(graph: nx.Graph, members: Members) -> dict[str, nx.Graph]:
    """Each partial model's own graph (views); peers that `graph` lacks are an error."""
    for model, peers in members.items():
        missing = set(peers) - set(graph.nodes)
        if missing:
            raise TopologyError(
                f"partial model {model!r} names peers {name_peers(missing)}, which the graph of "
                f"{len(graph)} peers does not have"
            )
    return {model: graph.subgraph(peers) for model, peers in members.items()}


def flowing(graph: nx.Graph, rule: Rule = "push") -> nx.Graph:
    """The graph of the links that carry something: all, but under the rule `edges` those of weight 0."""
    silent = [(u, v) for u, v, weight in graph.edges(data="weight") if weight == 0]
    if rule != "edges" or not silent:
        return graph
    copy = graph.copy()
    copy.remove_edges_from(silent)
    return copy


def check_models(
    graph: nx.Graph, members: Members, rule: Rule = "push"
) -> dict[str, list[frozenset[int]]]:
    """The (strongly) connected parts in which each partial model can gossip: one when all is well."""
    parts = subgraphs(flowing(graph, rule), members)
    return {model: components(part) for model, part in parts.items()}


def require_models_connected(graph: nx.Graph, members: Members, rule: Rule = "push") -> None:
    """Raise `DisconnectedError` naming each partial model that cannot gossip, and its components.

    Links count by what they carry under the rule. A rule that does not fit the graph, or under which
    peers would never agree, is a `TopologyError`.
    """
    torn = {m: parts for m, parts in check_models(graph, members, rule).items() if len(parts) > 1}
    if torn:
        lines = "\n  ".join(
            f"{model}: {len(parts)} components: {name_components(parts)}"
            for model, parts in torn.items()
        )
        silent = flowing(graph, rule) is not graph
        raise DisconnectedError(
            f"{len(torn)} of {len(members)} partial models cannot gossip among all their peers"
            f"{', since links of weight 0 carry nothing' * silent}:\n  {lines}\n"
            "Add links between the components; gossamer.topology.bridge lists the fewest that do",
            next(iter(torn.values())),
        )
    for model, part in subgraphs(graph, members).items() if rule != "push" else ():
        _require_settling(model, mixing_matrix(part, rule))


def _require_settling(model: str, matrix: csr_array) -> None:
    """Connected peers of whom nobody keeps anything may pass their mass round and round."""
    flow = csr_array(matrix * (matrix > 1e-12))  # not what is left by rounding
    flow.eliminate_zeros()
    if not flow.diagonal().any() and not nx.is_aperiodic(
        nx.from_scipy_sparse_array(flow, create_using=nx.DiGraph)
    ):
        raise TopologyError(
            f"{model}: all its peers give away all that they have, and pass it round for ever without "
            "agreeing: let the weights of some peer's edges sum to less than 1"
        )
