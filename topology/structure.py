"""The structure of a graph (components, distances, weak spots) and its mixing matrix.

A mixing matrix W says how peers share their mass in one exchange: `W[i, j]` is the share of peer j's mass
that goes to peer i. One exchange is `W @ x`, and columns sum to 1 (mass is conserved). Rows and columns
are in the order of the sorted nodes.

The errors of this package, and the way in which messages name peers, are here too.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array, diags_array
from scipy.sparse.csgraph import dijkstra, reverse_cuthill_mckee

from gossamer.errors import GossamerError

Edge = tuple[int, int]
"""A link between two peers; from the first to the second, if the graph is directed."""

Members = Mapping[str, Collection[int]]
"""The peers that have each partial model."""

Seed = int | np.random.Generator
"""The type of every `seed` parameter."""


class TopologyError(GossamerError, ValueError):
    """A graph, file, schedule or weight that gossip cannot use; the message says what to change."""


class DisconnectedError(TopologyError):
    """Some peers can never receive values of others.

    `components` are the connected (for directed graphs: strongly connected) components, largest first: of the
    graph, or, if partial models were checked, of the first model whose subgraph is disconnected.
    """

    def __init__(self, message: str, components: Sequence[frozenset[int]]):
        super().__init__(message)
        self.components = tuple(components)


def name_peers(
    peers: Iterable[object], limit: int = 8, labels: Mapping[Any, str] | None = None
) -> str:
    """Return a set of peers as text for a message: `{0, 1, 2}`, or the first `limit` and how many more.

    labels: names of peers that have one.
    """
    in_order = list(peers)
    try:
        in_order.sort()  # pyright: ignore[reportCallIssue, reportArgumentType]
    except TypeError:  # the labels of a user's graph may have types that cannot be compared
        in_order.sort(key=str)
    shown = ", ".join(str((labels or {}).get(peer, peer)) for peer in in_order[:limit])
    more = f", … {len(in_order) - limit} more" if len(in_order) > limit else ""
    return "{" + shown + more + "}"


def name_components(components: Sequence[Iterable[object]]) -> str:
    """Return the components of a disconnected graph as text for a message, at most four of them."""
    shown = "; ".join(name_peers(component) for component in components[:4])
    more = f"; … {len(components) - 4} more" if len(components) > 4 else ""
    return shown + more


def adjacency(graph: nx.Graph) -> csr_array:
    """Return a matrix with ones where peer i has a link to peer j, in the order of the sorted nodes.

    It takes a third of the time of networkx's function, which reads every link's attributes.
    """
    index = {node: i for i, node in enumerate(sorted(graph))}
    ends = np.array([(index[u], index[v]) for u, v in graph.edges], dtype=np.intp).reshape(-1, 2)
    if not graph.is_directed():
        ends = np.concatenate([ends, ends[:, ::-1]])
    return csr_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(len(index),) * 2)


def components(graph: nx.Graph) -> list[frozenset[int]]:
    """Return the connected components (strongly connected if directed), largest first."""
    if isinstance(graph, nx.DiGraph):
        unordered = nx.strongly_connected_components(graph)
    else:
        unordered = nx.connected_components(graph)
    return sorted(map(frozenset, unordered), key=lambda peers: (-len(peers), min(peers)))


def require_connected(graph: nx.Graph, graph_name: str = "the graph") -> None:
    """Raise `DisconnectedError`, which names the components, unless every peer can reach every other.

    graph_name: the subject of the error message.
    """
    groups = components(graph)
    if len(groups) > 1:
        connected = "strongly connected" if graph.is_directed() else "connected"
        raise DisconnectedError(
            f"{graph_name} is not {connected}: {len(groups)} components: {name_components(groups)}. Add "
            "links between them, or set `bridge = true` in the config (in Python: gossamer.topology.bridge)",
            groups,
        )


def partition(graph: nx.Graph, parts: int) -> NDArray[np.int64]:
    """Divide peers into parts of equal size (to within one peer), between which few links run.

    Returns the number of each peer's part, in the order of the sorted nodes. Recursive bisection: peers are
    put into a row in which neighbours are near each other, and the row is cut. The row is the given order of
    the peers or an approximation of the graph's Fiedler vector, whichever has fewer links across the cut.
    The result depends on the graph only; 100,000 peers with 4 links each take seconds.
    """
    links = adjacency(graph)
    part_of = np.zeros(len(graph), dtype=np.int64)
    _bisect(csr_array(links + links.T), np.arange(len(graph)), range(parts), part_of)
    return part_of


def _bisect(
    links: csr_array, peers: NDArray[np.int64], parts: range, part_of: NDArray[np.int64]
) -> None:
    """Write the parts of `peers` to `part_of`, by cutting the peers in two until one part is left.

    links: those between these peers.
    """
    if len(parts) == 1 or not len(peers):  # there may be more parts than peers
        part_of[peers] = parts[0]
        return
    middle = len(parts) // 2
    left = len(peers) * middle // len(parts)
    rows = np.arange(len(peers)), _smooth_order(links)
    row = min(rows, key=lambda row: _links_across(links, row[:left]))
    for side, parts_of_side in (
        (np.sort(row[:left]), parts[:middle]),
        (np.sort(row[left:]), parts[middle:]),
    ):
        _bisect(csr_array(links[side][:, side]), peers[side], parts_of_side, part_of)


def _links_across(links: csr_array, peers: NDArray[np.int64]) -> float:
    """Return how many links run from these peers to others, each counted in both directions."""
    inside = np.zeros(len(links.indptr) - 1)
    inside[peers] = 1
    return float(inside @ (links @ (1 - inside)))


_SMOOTHING = 300
"""Steps of smoothing in `partition`; raise it to cut fewer links between communities. Two halves of a random
graph of degree 4 then have a sixth of all links between them, which is about the fewest possible."""


def _smooth_order(links: csr_array) -> NDArray[np.int64]:
    """Return peers in an order in which neighbours are near each other.

    Numbers that start as places in a breadth-first order (Cuthill–McKee) are replaced, again and again, by
    the mean of a peer's own number and those of its neighbours. What stays longest, beside the mean of all,
    is the Fiedler vector.
    """
    places = np.argsort(reverse_cuthill_mckee(links, symmetric_mode=True)).astype(np.float64)
    degrees = np.maximum(links.sum(axis=1), 1)
    for _ in range(_SMOOTHING):
        places -= (degrees @ places) / degrees.sum()
        places = (places + (links @ places) / degrees) / 2
        places /= np.abs(places).max() or 1.0
    # Rounded, so that peers that are equally far do not change places by rounding errors of another machine.
    return np.argsort(places.round(9), kind="stable")


def effective_diameter(
    graph: nx.Graph, share: float = 0.9, sources: int = 64, seed: Seed = 0
) -> float:
    """Return the hops within which `share` of the ordered pairs of peers reach each other, interpolated.

    Exact up to `sources` peers, else estimated from that many random peers: raise it for a better estimate,
    lower it for speed. `inf` if fewer pairs than `share` are connected.
    """
    nodes = sorted(graph.nodes)
    if len(nodes) < 2:
        return 0.0
    links = adjacency(graph)
    chosen = np.arange(len(nodes))
    if len(nodes) > sources:
        chosen = np.random.default_rng(seed).choice(len(nodes), sources, replace=False)
    counts = np.zeros(len(nodes))  # of pairs (source, other peer) by the hops between them
    for source in chosen.tolist():  # a matrix of all distances would not fit into memory
        hops = dijkstra(links, indices=source, unweighted=True)
        hops[source] = np.inf
        counts += np.bincount(hops[np.isfinite(hops)].astype(np.intp), minlength=len(nodes))
    reached = np.cumsum(counts) / (len(chosen) * (len(nodes) - 1))
    if reached[-1] < share:
        return float("inf")
    hops = int(np.searchsorted(reached, share))  # ≥ 1: no other peer is reached in 0 hops
    return float(hops - 1 + (share - reached[hops - 1]) / (reached[hops] - reached[hops - 1]))


def weak_spots(graph: nx.Graph) -> tuple[list[Edge], list[int]]:
    """Return bridges (links) and cut peers (cut vertices): the loss of any one of them splits the swarm.

    A directed graph is split if it is no longer strongly connected. The time is linear in the size of the
    graph: one pass over the biconnected components (undirected), or over two dominator trees (directed).
    """
    if isinstance(graph, nx.DiGraph):
        return _directed_weak_spots(graph)
    bridges: list[Edge] = []
    component_count: dict[int, int] = dict.fromkeys(graph.nodes, 0)
    for component in nx.biconnected_component_edges(graph):
        links = list(component)
        if len(links) == 1:
            a, b = links[0]
            bridges.append((min(a, b), max(a, b)))
        for peer in {end for link in links for end in link}:
            component_count[peer] += 1
    return sorted(bridges), sorted(peer for peer, count in component_count.items() if count > 1)


def _directed_weak_spots(graph: nx.DiGraph) -> tuple[list[Edge], list[int]]:
    """Return bridges and cut peers of a directed graph, by the dominator trees of one peer, the root.

    A peer or link that all paths from the root to another peer use is in the tree of the graph; one that all
    paths back to the root use is in the tree of the reversed graph. The root itself is tried by removal.
    """
    require_connected(graph, "the graph whose weak spots are wanted")
    root = min(graph.nodes)
    bridges: set[Edge] = set()
    cut_peers: set[int] = set()
    for backwards in (False, True):
        directed = graph.reverse(copy=False) if backwards else graph
        dominators = nx.immediate_dominators(directed, root)
        parent = {node: parent_node for node, parent_node in dominators.items() if node != root}
        cut_peers |= {parent_node for parent_node in parent.values() if parent_node != root}
        # In preorder, the subtree of a node is a range: from its number, as long as its size.
        tree = nx.DiGraph((parent_node, node) for node, parent_node in parent.items())
        order = list(nx.dfs_preorder_nodes(tree, root)) if parent else [root]
        number = {node: position for position, node in enumerate(order)}
        size = Counter(order)
        for node in reversed(order[1:]):
            size[parent[node]] += size[node]
        for node, parent_node in parent.items():
            # A bridge: all other links into `node` come from its own subtree.
            if directed.has_edge(parent_node, node) and all(
                0 <= number[other] - number[node] < size[node]
                for other in directed.predecessors(node)
                if other != parent_node
            ):
                bridges.add((node, parent_node) if backwards else (parent_node, node))
    others = graph.subgraph(node for node in graph if node != root)
    if len(components(others)) > 1:
        cut_peers.add(root)
    return sorted(bridges), sorted(cut_peers)


# --- mixing matrices ------------------------------------------------------------------------------

Rule = Literal["push", "metropolis", "max-degree", "edges"]
"""Names of weight rules. `push` is the default of swarms, and of all functions here."""


def _checked_adjacency(graph: nx.Graph, undirected_rule: str = "") -> csr_array:
    """Return the adjacency matrix; raise if the graph can have no mixing matrix.

    undirected_rule: the name of the weight rule, if the rule needs an undirected graph.
    """
    if graph.is_multigraph():
        raise TopologyError("parallel links: use nx.Graph or nx.DiGraph, not a multigraph")
    if undirected_rule and graph.is_directed():
        raise TopologyError(
            f"{undirected_rule} weights need an undirected graph; use push on a directed one"
        )
    if not graph:
        raise TopologyError("the graph has no peers")
    if loops := list(nx.nodes_with_selfloops(graph)):
        raise TopologyError(
            f"self-loops at {name_peers(loops)}: remove them (a peer keeps the share that it does "
            "not send)"
        )
    try:
        return adjacency(graph)
    except TypeError:
        raise TopologyError(
            f"peers {name_peers(graph)} are names of several types, which have no order: "
            "gossamer.topology.normalize_graph(graph) numbers them"
        ) from None


def _with_kept_shares(sent: csr_array) -> csr_array:
    """Return the matrix of sent shares with its diagonal: each peer keeps the share that it does not send."""
    kept = 1.0 - np.asarray(sent.sum(axis=0)).ravel()
    return csr_array(sent + diags_array(kept, format="csr"))


def metropolis(graph: nx.Graph) -> csr_array:
    """Return Metropolis–Hastings weights: 1 / (1 + the larger degree of its two peers) for each link.

    A peer needs to know only its neighbours' degrees. The matrix is symmetric, so averaging needs no push-sum
    weights, and hubs do not slow other peers down.
    """
    matrix = _checked_adjacency(graph, "metropolis")
    degree = np.asarray(matrix.sum(axis=1)).ravel()
    links = coo_array(matrix)
    row, column = links.coords
    share = 1.0 / (1.0 + np.maximum(degree[row], degree[column]))
    return _with_kept_shares(csr_array((share, (row, column)), shape=matrix.shape))


def max_degree(graph: nx.Graph) -> csr_array:
    """Return weights of 1 / (1 + the largest degree in the swarm) for each link.

    The matrix is symmetric. Averaging is slow if one hub has many links.
    """
    matrix = _checked_adjacency(graph, "max-degree")
    largest = float(np.asarray(matrix.sum(axis=1)).max())
    return _with_kept_shares(csr_array(matrix / (1.0 + largest)))


def uniform_push(graph: nx.Graph) -> csr_array:
    """Return equal shares for the peer itself and every out-neighbour: push-sum's default, for any graph."""
    matrix = _checked_adjacency(graph)
    out_degree = np.asarray(matrix.sum(axis=1)).ravel()
    return _with_kept_shares(csr_array(matrix.T @ diags_array(1.0 / (1.0 + out_degree))))


def edge_weights(graph: nx.Graph, attribute: str = "weight") -> csr_array:
    """Return the shares in an attribute of the edges: edge (u, v) has the share of u's mass that v gets.

    A peer keeps what it does not send. Raises, naming edge or peer, if an edge lacks the attribute, a share
    is outside 0 … 1, or a peer sends more than it has.
    """
    _checked_adjacency(graph)  # for its checks
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
    for i in np.flatnonzero(total > 1 + 1e-12):
        raise TopologyError(
            f"peer {nodes[i]} sends away {total[i]:.9g} of its mass: the {attribute}s of its "
            "edges must sum to at most 1"
        )
    return _with_kept_shares(sent)


RULES = MappingProxyType(
    {
        "push": uniform_push,
        "metropolis": metropolis,
        "max-degree": max_degree,
        "edges": edge_weights,
    }
)
"""Weight rules by their name in configs."""


def has_weights(graph: nx.Graph) -> bool:
    """Return whether any link has a weight other than 1. Only the rule `edges` uses weights."""
    return any(weight not in (None, 1) for *_, weight in graph.edges(data="weight"))


def mixing_matrix(graph: nx.Graph, rule: Rule = "push") -> csr_array:
    """Return the matrix of one exchange on `graph` with a weight rule; raise unless columns sum to 1."""
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
    """Raise, naming peer and sum, unless all shares are ≥ 0 and columns (or rows) sum to 1.

    Push-sum needs columns (mass is conserved); averaging without push-sum weights needs rows as well.
    """
    height, width = matrix.shape  # pyright: ignore[reportGeneralTypeIssues]
    if height != width:
        raise TopologyError(f"a mixing matrix is square, not {height} × {width}")
    peer_names = list(range(width)) if names is None else list(names)
    entries = coo_array(matrix)
    invalid = np.flatnonzero(~(entries.data >= -tolerance))  # ~(≥) also finds NaN
    if invalid.size:
        receiver, sender = (int(axis[invalid[0]]) for axis in entries.coords)
        raise TopologyError(
            f"peer {peer_names[sender]} gives peer {peer_names[receiver]} the share "
            f"{entries.data[invalid[0]]:.9g}: shares are 0 or more"
        )
    checks = [(0, "column", "sends and keeps")] * columns + [(1, "row", "receives")] * rows
    for axis, word, verb in checks:
        sums = np.asarray(matrix.sum(axis=axis)).ravel()
        wrong = np.flatnonzero(~(np.abs(sums - 1.0) <= tolerance))
        if wrong.size:
            first = int(wrong[0])
            raise TopologyError(
                f"not {word}-stochastic: peer {peer_names[first]} {verb} {sums[first]:.9g} in all, not 1 "
                f"({wrong.size} of {width} peers have a wrong sum)"
            )


# --- partial models, each on the subgraph of its peers ---------------------------------------------


def subgraphs(graph: nx.Graph, members: Members) -> dict[str, nx.Graph]:
    """Return the subgraph (a view) of each partial model's peers; raise if `graph` lacks one of them."""
    for model, peers in members.items():
        missing = set(peers) - set(graph.nodes)
        if missing:
            raise TopologyError(
                f"partial model {model!r} names peers {name_peers(missing)}, which the graph of "
                f"{len(graph)} peers does not have"
            )
    return {model: graph.subgraph(peers) for model, peers in members.items()}


def without_zero_weights(graph: nx.Graph, rule: Rule = "push") -> nx.Graph:
    """Return the graph without its links of weight 0 if the rule uses weights, else the graph itself."""
    unused = [(u, v) for u, v, weight in graph.edges(data="weight") if weight == 0]
    if rule != "edges" or not unused:
        return graph
    copy = graph.copy()
    copy.remove_edges_from(unused)
    return copy


def components_by_model(
    graph: nx.Graph, members: Members, rule: Rule = "push"
) -> dict[str, list[frozenset[int]]]:
    """Return the (strongly) connected components of each partial model's subgraph; there should be one."""
    by_model = subgraphs(without_zero_weights(graph, rule), members)
    return {model: components(subgraph) for model, subgraph in by_model.items()}


def require_models_connected(graph: nx.Graph, members: Members, rule: Rule = "push") -> None:
    """Raise `DisconnectedError`, naming components, if the subgraph of a partial model is disconnected.

    With the rule `edges`, links of weight 0 do not count. Raises `TopologyError` if the rule does not fit the
    graph, or if with this rule the peers' values would never converge.
    """
    by_model = components_by_model(graph, members, rule)
    disconnected = {model: groups for model, groups in by_model.items() if len(groups) > 1}
    if disconnected:
        lines = "\n  ".join(
            f"{model}: {len(groups)} components: {name_components(groups)}"
            for model, groups in disconnected.items()
        )
        has_unused_links = without_zero_weights(graph, rule) is not graph
        raise DisconnectedError(
            f"{len(disconnected)} of {len(members)} partial models cannot gossip among all their peers"
            f"{', since links of weight 0 carry nothing' * has_unused_links}:\n  {lines};\n"
            "add links between the components; gossamer.topology.bridge lists the fewest that are needed",
            next(iter(disconnected.values())),
        )
    # With the rule `push` every peer keeps a share of its own mass, so that mass cannot circulate for ever.
    for model, subgraph in subgraphs(graph, members).items() if rule != "push" else ():
        _require_aperiodic(model, mixing_matrix(subgraph, rule))


def _require_aperiodic(model: str, matrix: csr_array) -> None:
    """Raise TopologyError if mass would circulate for ever instead of mixing.

    It does if no peer keeps a share of its mass and the lengths of all cycles have a common factor above 1.
    """
    nonzero = csr_array(matrix * (matrix > 1e-12))  # without rounding errors
    nonzero.eliminate_zeros()
    if not nonzero.diagonal().any() and not nx.is_aperiodic(
        nx.from_scipy_sparse_array(nonzero, create_using=nx.DiGraph)
    ):
        raise TopologyError(
            f"{model}: all its peers give away all their mass, which circulates for ever, and their values "
            "never converge: let the weights of some peer's edges sum to less than 1"
        )
