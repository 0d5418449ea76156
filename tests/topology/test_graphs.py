import networkx as nx
import numpy as np
import pytest

from gossamer.topology import BUILDERS, DisconnectedError, TopologyError, build, graphs


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("peers", [16, 64])
def test_every_builder_gives_connected_peers_in_order(kind: str, peers: int) -> None:
    graph = build(kind, peers, seed=1)
    assert type(graph) in (nx.Graph, nx.DiGraph)
    assert list(graph.nodes) == list(range(peers))
    assert nx.number_of_selfloops(graph) == 0
    whole = nx.is_strongly_connected(graph) if graph.is_directed() else nx.is_connected(graph)
    assert whole


@pytest.mark.parametrize(
    "kind", ["regular", "erdos-renyi", "watts-strogatz", "barabasi-albert", "geographic"]
)
def test_seed_decides(kind: str) -> None:
    def edges(seed: int | np.random.Generator) -> set:
        return set(build(kind, 40, seed=seed).edges)

    assert edges(3) == edges(3)
    assert edges(3) != edges(4)
    assert edges(np.random.default_rng(3)) == edges(np.random.default_rng(3))


def test_shapes() -> None:
    assert sorted(d for _, d in graphs.star(6).degree()) == [1] * 5 + [5]
    assert graphs.clique(7).number_of_edges() == 21
    assert nx.is_isomorphic(graphs.torus(12, rows=3), nx.grid_2d_graph(3, 4, periodic=True))
    assert nx.is_isomorphic(graphs.hypercube(16), nx.hypercube_graph(4))
    assert nx.is_isomorphic(graphs.ring(9), nx.cycle_graph(9))
    assert nx.is_isomorphic(graphs.path(9), nx.path_graph(9))
    assert set(graphs.exponential(8).successors(5)) == {6, 7, 1}
    assert {d for _, d in graphs.regular(30, 5, seed=2).degree()} == {5}


@pytest.mark.parametrize("peers", [1, 2, 3, 5, 36, 50])
def test_expander_has_any_size_and_bounded_degree(peers: int) -> None:
    graph = graphs.expander(peers)
    assert nx.is_connected(graph)
    assert max(d for _, d in graph.degree()) <= 16


@pytest.mark.parametrize("peers", [1, 2])
def test_tiny_graphs(peers: int) -> None:
    for make in (
        graphs.ring,
        graphs.path,
        graphs.star,
        graphs.clique,
        graphs.hypercube,
        graphs.exponential,
    ):
        graph = make(peers)
        assert len(graph) == peers
        assert graph.to_undirected().number_of_edges() == peers - 1


def test_clusters_are_joined_by_few_links() -> None:
    graph = graphs.clusters(22, clusters=4, links=2, seed=0)
    group = nx.get_node_attributes(graph, "group")
    crossing = [edge for edge in graph.edges if group[edge[0]] != group[edge[1]]]
    assert len(crossing) == 4 * 2
    assert sorted(list(group.values()).count(g) for g in range(4)) == [5, 5, 6, 6]
    pair = graphs.clusters(10, clusters=2, links=1)
    assert len(list(nx.bridges(pair))) == 1


def test_geographic_delay_is_distance() -> None:
    graph = graphs.geographic(50, delay=3.0, seed=5)
    pos = nx.get_node_attributes(graph, "pos")
    for u, v, delay in graph.edges(data="delay"):
        assert delay == pytest.approx(3 * np.hypot(pos[u][0] - pos[v][0], pos[u][1] - pos[v][1]))


def test_disconnected_draw_names_components() -> None:
    with pytest.raises(DisconnectedError, match=r"components: \{.*Raise p") as caught:
        graphs.erdos_renyi(30, p=0.01)
    assert sum(map(len, caught.value.components)) == 30


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: graphs.ring(0), "at least 1 peer"),
        (lambda: graphs.torus(13), "13 is prime"),
        (lambda: graphs.torus(12, rows=5), "5 rows"),
        (lambda: graphs.hypercube(12), "nearest are 8 and 16"),
        (lambda: graphs.regular(5, 3), "even"),
        (lambda: graphs.regular(4, 4), "1 … 3"),
        (lambda: graphs.erdos_renyi(9, p=1.5), "probability"),
        (lambda: graphs.watts_strogatz(9, degree=3), "even"),
        (lambda: graphs.barabasi_albert(4, links=4), "1 … 3"),
        (lambda: graphs.geographic(9, radius=-1.0), "radius is a distance, above 0"),
        (lambda: graphs.clusters(4, clusters=9), "9 clusters"),
        (lambda: graphs.clusters(4, clusters=2, links=5), "links between them, not 5"),
    ],
)
def test_impossible_graphs_say_why(make, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        make()
