import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from gossamer.topology import (
    TopologyError,
    check_stochastic,
    edge_weights,
    max_degree,
    metropolis,
    mixing_matrix,
    uniform_push,
    weighted,
)


@st.composite
def some_graphs(draw: st.DrawFn, directed: bool) -> nx.Graph:
    peers = draw(st.integers(1, 12))
    p = draw(st.floats(0, 1))
    return nx.gnp_random_graph(peers, p, seed=draw(st.integers(0, 2**31)), directed=directed)


@settings(deadline=None)
@given(some_graphs(directed=False))
def test_undirected_rules_are_doubly_stochastic_and_live_on_links(graph: nx.Graph) -> None:
    for rule in (metropolis, max_degree):
        matrix = rule(graph)
        check_stochastic(matrix, rows=True)
        dense = matrix.toarray()
        assert np.array_equal(dense, dense.T)
        links = {(int(i), int(j)) for i, j in np.argwhere(dense) if i < j}
        assert links == {(min(e), max(e)) for e in graph.edges}


@settings(deadline=None)
@given(some_graphs(directed=True))
def test_push_splits_evenly(graph: nx.DiGraph) -> None:
    dense = uniform_push(graph).toarray()
    for peer in graph:
        share = 1 / (1 + graph.out_degree(peer))
        expected = np.zeros(len(graph))
        expected[[peer, *graph.successors(peer)]] = share
        assert np.allclose(dense[:, peer], expected, atol=1e-12)


def test_metropolis_by_hand() -> None:
    expected = np.array([[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]])
    assert np.allclose(metropolis(nx.path_graph(3)).toarray(), expected)


def test_edge_shares_go_from_u_to_v() -> None:
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 1, 0.25), (1, 2, 0.5), (2, 0, 1.0)])
    expected = [[0.75, 0, 1], [0.25, 0.5, 0], [0, 0.5, 0]]
    assert np.allclose(edge_weights(graph).toarray(), expected)


def test_edge_shares_that_exceed_one_name_peer_and_sum() -> None:
    graph = nx.star_graph(3)
    nx.set_edge_attributes(graph, 0.4, "weight")
    with pytest.raises(TopologyError, match=r"peer 0 sends away 1\.2"):
        mixing_matrix(graph, "edges")
    graph[0][2]["weight"] = -1
    with pytest.raises(TopologyError, match=r"edge \(0, 2\): weight is -1"):
        mixing_matrix(graph, "edges")
    with pytest.raises(TopologyError, match=r"weight is None"):
        mixing_matrix(nx.path_graph(2), "edges")


def test_not_stochastic_names_peer_and_sum() -> None:
    matrix = csr_array(np.array([[0.5, 0.2, 0], [0.5, 0.5, 0], [0, 0, 1]]))
    with pytest.raises(
        TopologyError, match=r"column-stochastic: peer 1 sends and keeps 0\.7 in all"
    ):
        check_stochastic(matrix)
    with pytest.raises(TopologyError, match=r"row-stochastic: peer 0 receives 0\.7"):
        check_stochastic(matrix, columns=False, rows=True)
    with pytest.raises(TopologyError, match="peer 11 gives peer 10 the share -1"):
        check_stochastic(csr_array(np.array([[1.0, -1.0], [0.0, 2.0]])), names=[10, 11])
    with pytest.raises(TopologyError, match="share nan"):
        check_stochastic(csr_array(np.array([[1.0, np.nan], [0.0, 1.0]])))
    with pytest.raises(TopologyError, match="square, not 2 × 3"):
        check_stochastic(csr_array(np.ones((2, 3))))


def test_bad_graphs_are_refused() -> None:
    loop = nx.Graph([(0, 1), (1, 1)])
    with pytest.raises(TopologyError, match=r"self-loops at \{1\}"):
        mixing_matrix(loop)
    with pytest.raises(TopologyError, match="multigraph"):
        mixing_matrix(nx.MultiGraph([(0, 1), (0, 1)]))
    with pytest.raises(TopologyError, match="use push"):
        mixing_matrix(nx.DiGraph([(0, 1)]), "metropolis")
    with pytest.raises(TopologyError, match="unknown weight rule 'fast'"):
        mixing_matrix(nx.path_graph(2), "fast")  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match="no peers"):
        mixing_matrix(nx.Graph())
    with pytest.raises(TopologyError, match=r"of several types.*topology\.plain"):
        mixing_matrix(nx.path_graph(["a", 1, 2]))


def test_a_graph_is_weighted_by_anything_but_ones() -> None:
    graph = nx.path_graph(3)
    assert not weighted(graph)
    nx.set_edge_attributes(graph, 1.0, "weight")
    assert not weighted(graph)
    graph[0][1]["weight"] = 0
    assert weighted(graph)
