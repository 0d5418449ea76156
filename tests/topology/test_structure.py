import networkx as nx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from gossamer.topology import (
    DisconnectedError,
    TopologyError,
    build,
    check_stochastic,
    components,
    edge_weights,
    effective_diameter,
    facts,
    has_weights,
    max_degree,
    metropolis,
    mixing_matrix,
    model_facts,
    partition,
    require_connected,
    uniform_push,
    weak_spots,
)


def whole(graph: nx.Graph) -> bool:
    return len(components(graph)) <= 1


def brute_weak_spots(graph: nx.Graph) -> tuple[list, list]:
    edges, peers = [], []
    for edge in graph.edges:
        less = graph.copy()
        less.remove_edge(*edge)
        if not whole(less):
            edges.append(edge if graph.is_directed() else (min(edge), max(edge)))
    for peer in graph:
        less = graph.copy()
        less.remove_node(peer)
        if not whole(less):
            peers.append(peer)
    return sorted(edges), sorted(peers)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**31), st.booleans())
def test_weak_spots_are_those_whose_loss_cuts(peers: int, seed: int, directed: bool) -> None:
    graph = nx.gnp_random_graph(peers, 0.15, seed=seed, directed=directed)
    for a, b in nx.utils.pairwise(
        range(peers)
    ):  # a path (there and back): connected, many weak spots
        graph.add_edge(a, b)
        if directed and a % 3:
            graph.add_edge(b, a)
    if directed:
        nx.add_cycle(graph, range(0, peers, 3))
        graph.remove_edges_from(list(nx.selfloop_edges(graph)))
        largest = max(nx.strongly_connected_components(graph), key=len)
        graph = graph.subgraph(largest).copy()
    assert weak_spots(graph) == brute_weak_spots(graph)


@pytest.mark.parametrize(
    "kind", ["ring", "watts-strogatz", "exponential", "star", "barabasi-albert:1"]
)
def test_effective_diameter_is_the_90th_percentile(kind: str) -> None:
    graph = build(kind, 150, seed=2)
    hops = [
        d for u, row in nx.all_pairs_shortest_path_length(graph) for v, d in row.items() if u != v
    ]
    reached = [np.mean(np.array(hops) <= k) for k in range(max(hops) + 1)]
    expected = np.interp(0.9, reached, range(len(reached)))
    assert effective_diameter(graph, sources=150) == pytest.approx(expected, abs=1e-9)
    assert effective_diameter(graph, seed=1) == pytest.approx(expected, rel=0.25)


def test_unreachable_pairs_make_it_infinite() -> None:
    assert effective_diameter(nx.empty_graph(4)) == float("inf")
    assert effective_diameter(nx.disjoint_union(nx.path_graph(3), nx.path_graph(3))) == float("inf")
    assert effective_diameter(nx.empty_graph(1)) == 0


def test_disconnected_names_components() -> None:
    graph = nx.Graph([(0, 1), (2, 3), (3, 4)])
    with pytest.raises(DisconnectedError, match=r"2 components: \{2, 3, 4\}; \{0, 1\}") as caught:
        facts(graph)
    assert caught.value.components == (frozenset({2, 3, 4}), frozenset({0, 1}))
    with pytest.raises(DisconnectedError, match="not strongly connected"):
        require_connected(nx.DiGraph([(0, 1)]))


def test_facts_of_the_karate_club() -> None:
    club = nx.karate_club_graph()
    found = facts(club)
    assert (found.peers, found.links, found.most_degree) == (34, 78, 17)
    assert found.cut_edges == ((0, 11),)
    assert found.bridge_peers == (0,)
    assert found.messages == found.exchanges * 156
    groups = {
        side: [peer for peer, club_of in club.nodes(data="club") if club_of == side]
        for side in ("Mr. Hi", "Officer")
    }
    by_group = model_facts(club, groups)
    assert by_group["Mr. Hi"].peers + by_group["Officer"].peers == 34
    assert all(f.rate < found.rate for f in by_group.values())


def test_model_facts_name_the_torn_model() -> None:
    with pytest.raises(DisconnectedError, match="partial model 'ends'"):
        model_facts(nx.path_graph(4), {"all": range(4), "ends": [0, 3]})


def test_large_random_regular_graph_meets_alon_boppana() -> None:
    found = facts(build("regular:4", 20_000, seed=0))
    assert 0.10 < found.gap < 0.12  # Alon–Boppana: 1 − (1 + 2√3)/5 = 0.107
    assert found.cut_edges == ()


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
    with pytest.raises(TopologyError, match=r"of several types.*topology\.normalize_graph"):
        mixing_matrix(nx.path_graph(["a", 1, 2]))


def test_a_graph_is_weighted_by_anything_but_ones() -> None:
    graph = nx.path_graph(3)
    assert not has_weights(graph)
    nx.set_edge_attributes(graph, 1.0, "weight")
    assert not has_weights(graph)
    graph[0][1]["weight"] = 0
    assert has_weights(graph)


@example(peers=2, density=0.0, parts=5, seed=0)
@given(st.integers(2, 60), st.floats(0, 0.5), st.integers(1, 7), st.integers(0, 99))
def test_parts_are_balanced_and_depend_on_the_graph_alone(
    peers: int, density: float, parts: int, seed: int
) -> None:
    graph = nx.gnp_random_graph(peers, density, seed=seed)
    part_of = partition(graph, parts)
    sizes = np.bincount(part_of, minlength=parts)
    assert len(sizes) == parts
    assert sizes.max() - sizes.min() <= 1
    shuffled = nx.Graph()
    shuffled.add_nodes_from(reversed(range(peers)))
    shuffled.add_edges_from(reversed(list(graph.edges)))
    assert (partition(shuffled, parts) == part_of).all()


def links_between(graph: nx.Graph, part_of: np.ndarray) -> int:
    return sum(part_of[u] != part_of[v] for u, v in graph.edges)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_few_links_run_between_parts(parts: int) -> None:
    order = np.random.default_rng(0).permutation(240).tolist()
    ring = nx.relabel_nodes(nx.cycle_graph(240), dict(enumerate(order)))
    assert links_between(ring, partition(ring, parts)) <= 2 * parts
    groups = nx.random_partition_graph([30] * 8, 0.5, 0.01, seed=1)
    groups = nx.relabel_nodes(nx.Graph(groups.edges), dict(enumerate(order)))
    at_random = links_between(groups, np.arange(240) % parts)
    assert links_between(groups, partition(groups, parts)) < 0.5 * at_random


def test_two_halves_of_a_random_regular_graph_share_a_fifth_of_its_links() -> None:
    graph = nx.random_regular_graph(4, 1000, seed=3)
    assert links_between(graph, partition(graph, 2)) < 0.2 * graph.number_of_edges()
