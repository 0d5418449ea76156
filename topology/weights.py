"""Mixing matrices: how much of its mass each peer sends to whom in one exchange.

Convention everywhere: `W[i, j]` is the share of peer j's mass that goes to peer i, so that one
exchange is `W @ x` and columns sum to 1 (mass is conserved). Rows and columns follow the sorted
nodes.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Literal

import networkx as nx
import numpy as np
from scipy.sparse import coo_array, csr_array, diags_array

from .structure import TopologyError, adjacency, name_peers

Rule = Literal["push", "metropolis", "max-degree", "edges"]
"""Names of weight rules. Swarms run `push` unless told otherwise, and so everything here is about it."""


def _adjacency(graph: nx.Graph) -> tuple[csr_array, list[int]]:
    if graph.is_multigraph():
        raise TopologyError("parallel links: use nx.Graph or nx.DiGraph, not a multigraph")
    if not graph:
        raise TopologyError("the graph has no peers")
    try:
        nodes = sorted(graph.nodes)
    except TypeError:
        raise TopologyError(
            f"peers {name_peers(graph)} are names of several types, which have no order: "
            "gossamer.topology.plain(graph) numbers them"
        ) from None
    loops = sorted(nx.nodes_with_selfloops(graph))
    if loops:
        raise TopologyError(
            f"self-loops at {name_peers(loops)}: remove them (what a peer keeps is what it does "
            "not send)"
        )
    return adjacency(graph), nodes


def _undirected(graph: nx.Graph, rule: str) -> tuple[csr_array, list[int]]:
    if graph.is_directed():
        raise TopologyError(f"{rule} weights need an undirected graph; use push on a directed one")
    return _adjacency(graph)


def _with_kept(sent: csr_array) -> csr_array:
    """Add the diagonal: each peer keeps what it does not send."""
    kept = 1.0 - np.asarray(sent.sum(axis=0)).ravel()
    return csr_array(sent + diags_array(kept, format="csr"))


def metropolis(graph: nx.Graph) -> csr_array:
    """Metropolis–Hastings: 1 / (1 + larger degree) on each link. Symmetric; needs no global fact.

    The safe choice on undirected graphs: plain averages, no weights needed, hubs slow nobody down.
    """
    matrix, _ = _undirected(graph, "metropolis")
    degree = np.asarray(matrix.sum(axis=1)).ravel()
    links = coo_array(matrix)
    row, column = links.coords
    share = 1.0 / (1.0 + np.maximum(degree[row], degree[column]))
    return _with_kept(csr_array((share, (row, column)), shape=matrix.shape))


def max_degree(graph: nx.Graph) -> csr_array:
    """1 / (1 + largest degree of the swarm) on each link. Symmetric; slow when one hub is large."""
    matrix, _ = _undirected(graph, "max-degree")
    top = float(np.asarray(matrix.sum(axis=1)).max())
    return _with_kept(csr_array(matrix / (1.0 + top)))


def uniform_push(graph: nx.Graph) -> csr_array:
    """Equal shares to oneself and every out-neighbour: push-sum's default, for any graph."""
    matrix, _ = _adjacency(graph)
    out = np.asarray(matrix.sum(axis=1)).ravel()
    return _with_kept(csr_array(matrix.T @ diags_array(1.0 / (1.0 + out))))


def edge_weights(graph: nx.Graph, attribute: str = "weight") -> csr_array:
    """Shares written on the edges: edge (u, v) carries the share of u's mass that v gets.

    The rest is kept. An edge without the attribute, a share outside 0 … 1, or a peer that sends
    more than it has is an error that names it.
    """
    _, nodes = _adjacency(graph)  # for its checks
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


def with_weights(graph: nx.Graph, rule: Rule = "push") -> nx.Graph:
    """A copy with each edge's share as `weight`; directed when the two directions differ."""
    matrix = mixing_matrix(graph, rule)
    nodes = sorted(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    lopsided = not graph.is_directed() and abs(matrix - matrix.T).max() > 1e-12
    copy = graph.to_directed() if lopsided else graph.copy()
    dense = matrix.todok()
    for u, v in copy.edges:
        copy[u][v]["weight"] = float(dense[index[v], index[u]])
    return copy
