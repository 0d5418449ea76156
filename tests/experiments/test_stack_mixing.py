"""Stacked averaging is exact averaging, synchronous gossip or push-sum on each partial model."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.experiments.arena import Arena, Gossip
from gossamer.experiments.arena.lockstep import subrange_of_tiles, tiles
from gossamer.models import ModelError, ModelGraph, SgdLearner, SlicedNetwork, Start, average, mlp
from gossamer.models.stack import Stack
from gossamer.topology import (
    TopologyError,
    build,
    metropolis,
    one_peer_exponential,
    random_matchings,
    uniform_push,
)

torch.set_num_threads(1)

NOTHING = (torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))


def learner(network: SlicedNetwork) -> SgdLearner:
    return SgdLearner(network, NOTHING, NOTHING)


def swarm(
    peers: int = 6,
    layout: str = "6=8=4",
    cross: bool = False,
    kind: str = "layouts",
    name: str = "",
) -> list[SgdLearner]:
    """A global model, two groups that depend on it, and a third pair across the groups."""
    graph = ModelGraph({"global": [], "g0": ["global"], "g1": ["global"], "side": []})
    found = []
    for index in range(peers):
        group = f"g{index % 2}"
        slices: dict[str, Any] = {"global": "6-3-1", group: "0-2-1", "side": "0-2-1"}
        if kind == "scattered":  # every peer has its cells elsewhere
            order = np.random.default_rng(index).permutation(8).tolist()
            slices = {
                "global": [list(range(6)), order[:3], [0]],
                group: [[], order[3:5], [1]],
                "side": [[], order[5:7], [2]],
            }
        network = SlicedNetwork(
            mlp(layout), slices, graph=graph, peer=f"{name}{index}", seed=index, cross=cross,
            start=Start(equal=False),
        )  # fmt: skip
        found.append(learner(network))
    return found


@pytest.mark.parametrize("kind", ["layouts", "scattered"])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0, 4.0, 5.0, 6.5]])
def test_the_mean_is_models_average(kind: str, cross: bool, weights: list[float] | None) -> None:
    mine, plain = (swarm(cross=cross, kind=kind) for _ in range(2))
    arena = Arena(mine, weights=weights)
    arena.average()
    average([one.network for one in plain], weights)
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-6)


def test_equal_values_average_to_themselves_and_own_ones_stay_bit_for_bit() -> None:
    learners = swarm()
    arena = Arena(learners, weights=[0.1, 0.2, 0.3, 0.7, 1.1, 1.3])
    arena.average()
    before = [one.network.flat.clone() for one in learners]
    arena.average()
    for one, flat in zip(learners, before, strict=True):
        assert torch.equal(one.network.flat, flat)


def test_networks_of_two_shapes_share_their_common_slice() -> None:
    def make() -> list[SgdLearner]:
        return [*swarm(4), *swarm(3, "6=11=5", name="wide")][::-1]

    mine, plain = make(), make()
    Arena(mine).average()
    average([one.network for one in plain])
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-6)


def whole(peers: int) -> list[SgdLearner]:
    """Everything is everybody's, and everybody starts elsewhere."""
    start = Start(equal=False)
    return [
        learner(
            SlicedNetwork(mlp("6=8=4"), {"all": "6-8-4"}, peer=str(index), seed=index, start=start)
        )
        for index in range(peers)
    ]


def values(learners: list[SgdLearner], owner: str = "all") -> np.ndarray:
    return torch.stack([one.network.read(owner) for one in learners]).double().numpy()


@pytest.mark.parametrize("exchanges", [1, 3, 40])
def test_plain_gossip_is_a_product_with_the_mixing_matrix(exchanges: int) -> None:
    graph = build("regular:4", 12, 1)
    learners = whole(12)
    before = values(learners)
    Arena(learners, mixing=Gossip(graph, "plain", exchanges=exchanges)).average()
    power = np.linalg.matrix_power(metropolis(graph).toarray(), exchanges)
    np.testing.assert_allclose(values(learners), power @ before, atol=2e-6)


def test_many_peers_on_a_sparse_graph() -> None:
    graph = build("ring", 150)
    learners = whole(150)
    before = values(learners)
    Arena(learners, mixing=Gossip(graph, "plain", exchanges=2)).average()
    matrix = metropolis(graph).toarray()
    np.testing.assert_allclose(values(learners), matrix @ matrix @ before, atol=2e-6)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]])
def test_push_sum_on_a_directed_graph_tends_to_the_weighted_mean(
    weights: list[float] | None,
) -> None:
    graph = nx.DiGraph([(i, (i + 1) % 7) for i in range(7)] + [(0, 3), (2, 6), (5, 1)])
    learners = whole(7)
    before = values(learners)
    arena = Arena(learners, weights=weights, mixing=Gossip(graph))
    shares = np.array(weights or np.ones(7))
    sums, mass = before * shares[:, None], shares.copy()
    matrix = uniform_push(graph).toarray()
    for _ in range(3):
        arena.average()
        sums, mass = matrix @ sums, matrix @ mass
        np.testing.assert_allclose(values(learners), sums / mass[:, None], atol=2e-6)
    for _ in range(150):
        arena.average()
    mean = np.average(before, axis=0, weights=shares)
    np.testing.assert_allclose(values(learners), np.tile(mean, (7, 1)), atol=1e-5)


def test_what_a_peer_learns_between_exchanges_counts_by_its_weight() -> None:
    graph = nx.DiGraph([(i, (i + 1) % 5) for i in range(5)] + [(0, 2), (0, 3)])
    learners = whole(5)
    arena = Arena(learners, mixing=Gossip(graph))
    matrix = uniform_push(graph).toarray()
    sums, mass = values(learners), np.ones(5)
    for step in range(4):
        arena.average()
        sums, mass = matrix @ sums, matrix @ mass
        learners[step].network.flat += 0.25
        sums[step] += 0.25 * mass[step]
    np.testing.assert_allclose(values(learners), sums / mass[:, None], atol=2e-6)


@pytest.mark.parametrize("period", [None, 3])
def test_a_schedule_moves_on_with_every_exchange(period: int | None) -> None:
    schedule = random_matchings(8, period, seed=4)
    learners = whole(8)
    before = values(learners)
    arena = Arena(learners, mixing=Gossip(schedule, exchanges=2))
    for _ in range(3):
        arena.average()
    for step in range(6):
        before = schedule.matrix(step, "push").toarray() @ before
    np.testing.assert_allclose(values(learners), before, atol=2e-6)


def test_the_exponential_schedule_is_exact_after_three_exchanges_of_eight_peers() -> None:
    learners = whole(8)
    mean = values(learners).mean(axis=0)
    Arena(learners, mixing=Gossip(one_peer_exponential(8), exchanges=3)).average()
    np.testing.assert_allclose(values(learners), np.tile(mean, (8, 1)), atol=1e-6)


def test_each_model_gossips_on_the_peers_that_implement_it() -> None:
    graph = nx.complete_graph(6)
    learners, plain = swarm(cross=True), swarm(cross=True)
    Arena(learners, mixing=Gossip(graph, "plain")).average()  # complete: one exchange is the mean
    average([one.network for one in plain])
    for a, b in zip(learners, plain, strict=True):
        torch.testing.assert_close(a.network.flat, b.network.flat, rtol=0, atol=1e-6)


def test_threads_do_not_change_a_bit() -> None:
    found = []
    for threads in (1, 2):
        learners = whole(40)
        Arena(learners, mixing=Gossip(build("ring", 40), exchanges=3), threads=threads).average()
        found.append(values(learners))
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    ("mixing", "weights", "message"),
    [
        (lambda: Gossip(nx.path_graph(3)), None, "3 nodes and there are 4 learners"),
        (lambda: Gossip(nx.path_graph(4), "plain"), [1, 1, 1, 2], "plain gossip cannot weigh"),
        (lambda: Gossip(random_matchings(6)), None, "for 6 peers, but there are 4"),
        (lambda: Gossip(nx.path_graph(4), "push"), None, "unknown gossip 'push'"),
        (lambda: Gossip(nx.path_graph(4), exchanges=0), None, "at least one"),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(mixing: Any, weights: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Arena(whole(4), mixing=mixing(), weights=weights)


def test_a_model_that_falls_apart_on_the_graph_is_named() -> None:
    graph = nx.cycle_graph(6)  # even peers have only odd neighbours
    with pytest.raises(TopologyError, match="g0"):
        Arena(swarm(), mixing=Gossip(graph))


def test_a_value_that_is_not_finite_is_traced_to_its_peer() -> None:
    learners = whole(4)
    arena = Arena(learners)
    learners[2].network.flat[50] = float("nan")
    with pytest.raises(ModelError, match=r"peer '2', model 'all': 1 values .* '0\.bias'"):
        arena.average()


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0, 1.0, 1.0]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ModelError, match="weight"):
        Arena(whole(4), weights=weights)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(16, 40)),
        min_size=1,
        max_size=4,
    ),
    st.data(),
)
def test_tiles_are_the_coordinates(parts: list[tuple[int, int, int]], data: st.DataObject) -> None:
    pieces, at = [], 0
    for gap, count, length in parts:
        stride = length + gap
        pieces += [np.arange(at + k * stride, at + k * stride + length) for k in range(count)]
        at += count * stride + 1
    where = np.concatenate(pieces)
    found = tiles(where)
    assert found is not None
    first = data.draw(st.integers(0, len(where) - 1))
    last = data.draw(st.integers(first + 1, len(where)))
    rows = torch.arange(2 * (at + 100)).view(2, -1)
    cut = [tile.view(rows).reshape(2, -1) for tile in subrange_of_tiles(found, first, last)]
    assert torch.equal(torch.cat(cut, dim=1), rows[:, torch.from_numpy(where[first:last])])


def test_a_stack_on_another_device_is_written_back() -> None:
    learners = whole(3)
    networks = [one.network for one in learners]
    stack = Stack(networks, torch.device("cpu:0"))  # as good as another: it is not "cpu"
    assert not stack.shares_memory
    stack.values += 1
    before = networks[1].flat.clone()
    stack.write_back()
    torch.testing.assert_close(networks[1].flat, before + 1)
    networks[2].flat.zero_()
    stack.refresh()
    assert not stack.values[2].any()


def test_a_swarm_on_another_device_learns_the_same() -> None:
    def run(device: str | None) -> torch.Tensor:
        inputs = torch.rand(30, 6, generator=torch.Generator().manual_seed(0))
        own = inputs, torch.arange(30) % 4
        learners = [
            SgdLearner(
                SlicedNetwork(mlp("6=8=4"), {"all": "6-8-4"}, peer=str(index), seed=1), own, own,
                local_samples=10, seed=index, optimizer=lambda p: torch.optim.Adam(p, 0.01),
            )
            for index in range(3)
        ]  # fmt: skip
        arena = Arena(learners, device=device)
        list(arena.run(3))
        list(arena.run(2))
        learners[0].train(1)  # its optimizer was written back too
        return torch.stack([one.network.flat for one in learners])

    assert torch.equal(run("cpu:0"), run(None))


def test_an_unknown_device_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"device 'gpu7': torch .* there is cpu"):
        Arena(whole(2), device="gpu7")
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match=r"torch \S+ finds no such device"):
            Arena(whole(2), device="cuda")
