"""Losing peers and links, delayed links, and advice: against small cases that are known."""

from itertools import combinations
from math import inf

import networkx as nx
import numpy as np
import pytest

from gossamer.topology import (
    DisconnectedError,
    TopologyError,
    build,
    components,
    delayed_matrix,
    fewest_to_split,
    link_delays,
    mixing_matrix,
    random_loss,
    spectral_gap,
    without,
    worst_loss,
)


def splits(graph: nx.Graph, kind, lost) -> bool:
    return len(components(without(graph, kind, lost))) > 1


@pytest.mark.parametrize("seed", range(6))
def test_the_fewest_that_split_are_the_fewest(seed: int) -> None:
    graph = build("erdos-renyi:0.45", 8, seed=seed)
    for kind, items in (("peers", list(graph)), ("links", list(graph.edges))):
        found = fewest_to_split(graph, kind)
        assert splits(graph, kind, found)
        for size in range(len(found)):
            assert not any(splits(graph, kind, lost) for lost in combinations(items, size))


def test_what_cannot_be_split_by_losing_peers() -> None:
    assert fewest_to_split(build("clique", 5), "peers") == []
    assert len(fewest_to_split(build("clique", 5), "links")) == 4
    assert worst_loss(build("clique", 8), "peers").first_split is None


@pytest.mark.parametrize("kind", ["peers", "links"])
def test_large_and_directed_graphs_are_split_by_what_is_named(kind) -> None:
    for graph in (build("regular:4", 100, seed=1), build("exponential", 32), build("torus", 81)):
        found = fewest_to_split(graph, kind)
        assert splits(graph, kind, found)
        assert len(found) <= 5


def test_a_star_dies_with_its_hub_and_hardly_by_chance() -> None:
    star = build("star", 20)
    worst, random = worst_loss(star, "peers"), random_loss(star, "peers", seed=1)
    assert worst.first == (0,)
    assert worst.first_split == 1 / 20
    assert worst.points[1].whole == pytest.approx(1 / 19)
    assert random.points[1].whole > 0.8  # mean of five draws of one peer
    assert random.points[0].exchanges == worst.points[0].exchanges


def test_worst_links_fall_between_clusters() -> None:
    graph = build("clusters:2:3", 20, seed=0)
    loss = worst_loss(graph, "links")
    total = graph.number_of_edges()
    assert loss.first_split == 3 / total
    between = {e for e in graph.edges if graph.nodes[e[0]]["group"] != graph.nodes[e[1]]["group"]}
    assert {tuple(sorted(link)) for link in loss.first} == between  # type: ignore[arg-type]
    assert loss.points[1].whole == 0.5


def test_random_links_split_a_path_at_once() -> None:
    loss = random_loss(build("path", 12), "links", seed=2)
    assert loss.first_split == pytest.approx(1 / 11)
    assert loss.points[0].whole == 1


def test_a_loss_does_not_touch_the_graph_and_parts_are_refused() -> None:
    graph = build("ring", 6)
    worst_loss(graph, "links")
    assert graph.number_of_edges() == 6
    with pytest.raises(DisconnectedError, match="2 components"):
        worst_loss(nx.Graph([(0, 1), (2, 3)]), "peers")
    with pytest.raises(TopologyError, match="disconnected already"):
        fewest_to_split(nx.DiGraph([(0, 1)]), "peers")


@pytest.mark.parametrize("kind", ["torus", "exponential", "geographic"])
@pytest.mark.parametrize("most", [1, 3])
def test_late_links_are_a_post_office(kind: str, most: int) -> None:
    """Message by message, every share arrives when its link says: the matrix does the same."""
    graph = link_delays(build(kind, 16, seed=3), most, seed=5)
    matrix = delayed_matrix(graph)
    assert np.allclose(np.asarray(matrix.sum(axis=0)).ravel(), 1)
    shares = mixing_matrix(graph).toarray()
    late = np.zeros((16, 16), int)
    for u, v, steps in graph.edges(data="delay_steps"):
        late[v, u] = steps
        if not graph.is_directed():
            late[u, v] = steps
    assert late.max() == most
    value = np.random.default_rng(1).normal(size=16)
    state = np.concatenate([value, np.zeros(16 * most)])
    post = [np.zeros(16) for _ in range(most + 1)]
    for _ in range(30):
        for j in range(16):
            for i in range(16):
                post[late[i, j]][i] += shares[i, j] * value[j]
        value = post.pop(0)
        post.append(np.zeros(16))
        state = matrix @ state
        assert np.allclose(state[:16], value, rtol=0, atol=1e-13)
        assert state.sum() == pytest.approx(value.sum() + sum(box.sum() for box in post))


def test_delays_follow_distance_and_bad_ones_are_refused() -> None:
    graph = link_delays(build("geographic", 20, seed=1), 4)
    for *_, data in graph.edges(data=True):
        top = max(d for *_, d in graph.edges(data="delay"))
        assert data["delay_steps"] == round(4 * data["delay"] / top)
    none = delayed_matrix(link_delays(build("ring", 6), 0))
    assert abs(none - mixing_matrix(build("ring", 6))).max() == 0
    assert spectral_gap(delayed_matrix(link_delays(build("ring", 6), 2))) < spectral_gap(none) < inf
    with pytest.raises(TopologyError, match="not -1"):
        link_delays(graph, -1)
