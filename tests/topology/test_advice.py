from itertools import combinations, permutations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.topology import (
    SCHEDULES,
    DisconnectedError,
    TopologyError,
    advise,
    bridge,
    bridged,
    build,
    build_schedule,
    components,
    components_by_model,
    contraction,
    facts,
    mixing_matrix,
    parse,
    require_models_connected,
    spectral_gap,
)


def connected(graph: nx.Graph, members: dict) -> bool:
    return all(len(components(graph.subgraph(peers))) <= 1 for peers in members.values())


def brute_least(graph: nx.Graph, members: dict) -> int:
    pairs = permutations(graph, 2) if graph.is_directed() else combinations(graph, 2)
    missing = [pair for pair in pairs if not graph.has_edge(*pair)]
    for size in range(len(missing) + 1):
        for edges in combinations(missing, size):
            more = graph.copy()
            more.add_edges_from(edges)
            if connected(more, members):
                return size
    raise AssertionError


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.booleans())
def test_bridge_is_least(seed: int, directed: bool) -> None:
    rng = np.random.default_rng(seed)
    peers = 4 if directed else 5
    graph = nx.gnp_random_graph(peers, 0.3, seed=seed, directed=directed)
    members = {
        f"m{k}": [int(i) for i in rng.choice(peers, int(rng.integers(1, peers + 1)), replace=False)]
        for k in range(3)
    }
    found = bridge(graph, members)
    assert found.is_smallest
    assert connected(bridged(graph, found), members)
    assert len(found.edges) == brute_least(graph, members)


def test_one_link_serves_two_models() -> None:
    graph = nx.empty_graph(4)
    members = {"a": [0, 1, 2], "b": [1, 2, 3]}
    found = bridge(graph, members)
    assert len(found.edges) == 3
    assert (1, 2) in found.edges


def test_bridges_are_marked_and_the_graph_is_left_alone() -> None:
    graph = nx.Graph([(0, 1), (2, 3)])
    found = bridge(graph, {"all": range(4)})
    whole = bridged(graph, found)
    assert graph.number_of_edges() == 2
    assert [data for *edge, data in whole.edges(data="bridge") if tuple(edge) in found.edges] == [
        True
    ]
    assert bridge(whole, {"all": range(4)}).edges == ()


@pytest.mark.parametrize("directed", [False, True])
def test_large_swarms_are_bridged_without_proof(directed: bool) -> None:
    graph = nx.gnp_random_graph(60, 0.01, seed=1, directed=directed)
    members = {"all": range(60), "even": range(0, 60, 2), "third": range(0, 60, 3)}
    found = bridge(graph, members, max_exact_links=3)
    assert not found.is_smallest
    assert connected(bridged(graph, found), members)


def test_a_single_torn_model_of_many_parts_needs_one_link_less() -> None:
    found = bridge(nx.empty_graph(300), {"all": range(300), "one": [4]})
    assert (len(found.edges), found.is_smallest) == (299, True)


def test_torn_models_are_named_with_their_peers() -> None:
    graph = nx.path_graph(5)
    members = {"global": range(5), "ends": [0, 1, 4], "far": [0, 2]}
    parts = components_by_model(graph, members)
    assert parts["global"] == [set(range(5))]
    assert parts["ends"] == [{0, 1}, {4}]
    with pytest.raises(
        DisconnectedError, match=r"(?s)2 of 3.*ends: 2 components: \{0, 1\}; \{4\}.*far: 2"
    ):
        require_models_connected(graph, members)
    require_models_connected(graph, {"global": range(5), "one": [3]})


def test_strangers_are_named() -> None:
    with pytest.raises(TopologyError, match=r"'odd' names peers \{7\}"):
        components_by_model(nx.path_graph(3), {"odd": [1, 7]})


def weighted_path(*weights: float) -> nx.Graph:
    graph = nx.Graph()
    graph.add_weighted_edges_from((i, i + 1, weight) for i, weight in enumerate(weights))
    return graph


def test_links_of_weight_0_join_nobody_under_edges() -> None:
    graph = weighted_path(0.4, 0.0, 0.5)
    members = {"all": range(4), "right": [2, 3]}
    assert components_by_model(graph, members) == {"all": [{0, 1, 2, 3}], "right": [{2, 3}]}
    assert components_by_model(graph, members, "edges") == {
        "all": [{0, 1}, {2, 3}],
        "right": [{2, 3}],
    }
    with pytest.raises(DisconnectedError, match=r"1 of 2 .* since links of weight 0 carry nothing"):
        require_models_connected(graph, members, "edges")
    with pytest.raises(DisconnectedError, match="club without its links of weight 0 is not"):
        facts(graph, "edges", graph_name="club")
    assert facts(graph).links == 3
    assert graph.number_of_edges() == 3


def test_peers_that_keep_nothing_must_not_go_round_in_step() -> None:
    with pytest.raises(TopologyError, match="pair: all its peers give away all their mass"):
        require_models_connected(weighted_path(1.0), {"pair": [0, 1]}, "edges")
    require_models_connected(weighted_path(0.9), {"pair": [0, 1]}, "edges")
    three = nx.cycle_graph(3)
    nx.set_edge_attributes(three, 0.5, "weight")  # nobody keeps anything, but nobody is in step
    require_models_connected(three, {"all": range(3)}, "edges")
    with pytest.raises(TopologyError, match="weight is None"):
        require_models_connected(nx.path_graph(3), {"all": range(3)}, "edges")


def test_candidates_keep_the_budget_and_are_what_they_say() -> None:
    advice = advise(64, 4)
    names = [one.topology for one in advice.ranked]
    assert names[0] == "one-peer-exponential"
    assert names.index("regular:4") < names.index("torus") < names.index("ring")
    for one in advice.ranked:
        assert 1 <= one.sends <= 4
        assert one.reason
        if parse(one.topology)[0] not in SCHEDULES:
            matrix = mixing_matrix(build(one.topology, 64))
            assert one.rate == pytest.approx(1 - spectral_gap(matrix), abs=1e-9)
    assert [one.exchanges for one in advice.ranked] == sorted(o.exchanges for o in advice.ranked)
    refused = dict(advice.refused)
    assert refused["hypercube"] == "its busiest peer has 6 links, the limit is 4"


def test_schedules_are_rated_over_a_period() -> None:
    found = {one.topology: one for one in advise(16, 2).ranked}
    exact = found["one-peer-exponential"]
    assert (exact.rate, exact.exchanges, exact.messages) == (0, 4, 4)
    rings = found["rotating-rings:16"]
    measured = contraction(build_schedule("rotating-rings:16", 16).matrix, 320, seed=1)
    assert measured == pytest.approx(rings.rate, rel=0.05)


def test_groups_must_hold_together() -> None:
    groups = {f"g{i}": list(range(8 * i, 8 * i + 8)) for i in range(4)}
    advice = advise(32, 5, members=groups)
    assert advice.ranked
    for one in advice.ranked:
        if parse(one.topology)[0] in SCHEDULES:
            continue
        graph = build(one.topology, 32)
        graph.add_edges_from(one.added)
        assert all(len(parts) == 1 for parts in components_by_model(graph, groups).values())
        assert max(d for _, d in graph.degree()) <= 5
    assert any(one.topology.startswith("clusters:4") for one in advice.ranked)
    assert any("never connected" in reason for _, reason in advice.refused)


def test_a_byte_budget_ranks_by_what_is_left() -> None:
    advice = advise(64, budget=40e3, message=4e3)  # ten messages each
    left = [one.error for one in advice.ranked]
    assert None not in left
    assert left == sorted(left)  # type: ignore[type-var]
    found = {one.topology: one for one in advice.ranked}
    assert found["one-peer-exponential"].error == 0  # six exchanges of one message
    assert found["clique"].error == 1  # sixty-three messages: not one exchange
    regular = found["regular:6"]
    assert regular.error == pytest.approx(regular.rate)  # one exchange of six


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peers": 1}, "at least 2 peers, not 1"),
        ({"peers": 8, "degree": 0}, "1 or more, not 0"),
        ({"peers": 8, "budget": 10.0, "message": 100.0}, "less than one message"),
    ],
)
def test_bad_questions(arguments: dict, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        advise(**arguments)
