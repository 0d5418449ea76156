import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.topology import (
    DisconnectedError,
    build,
    components,
    effective_diameter,
    facts,
    model_facts,
    require_connected,
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


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    "kind", ["ring", "watts-strogatz", "exponential", "star", "barabasi-albert:1"]
)
def test_effective_diameter_is_the_90th_percentile(kind: str, deep: bool) -> None:
    graph = build(kind, 150, seed=2)
    levels = 1 if deep else 500
    hops = [
        d for u, row in nx.all_pairs_shortest_path_length(graph) for v, d in row.items() if u != v
    ]
    reached = [np.mean(np.array(hops) <= k) for k in range(max(hops) + 1)]
    expected = np.interp(0.9, reached, range(len(reached)))
    assert effective_diameter(graph, sources=150, levels=levels) == pytest.approx(
        expected, abs=1e-9
    )
    assert effective_diameter(graph, seed=1, levels=levels) == pytest.approx(expected, rel=0.25)


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
    assert all(f.second < found.second for f in by_group.values())


def test_model_facts_name_the_torn_model() -> None:
    with pytest.raises(DisconnectedError, match="partial model 'ends'"):
        model_facts(nx.path_graph(4), {"all": range(4), "ends": [0, 3]})


def test_large_random_regular_graph_meets_alon_boppana() -> None:
    found = facts(build("regular:4", 20_000, seed=0))
    assert 0.10 < found.gap < 0.12  # Alon–Boppana: 1 − (1 + 2√3)/5 = 0.107
    assert found.cut_edges == ()
