"""Synchronous push-sum: matrix powers, consensus on standard graphs, and the predicted rate."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest

from gossamer.gossip import (
    ONE,
    DictStore,
    FaultPlan,
    Gossiper,
    MemoryNetwork,
    RetryPolicy,
    RoundsMode,
    introduce,
    run,
)

FINE = ONE << 20  # a thousandth of a unit matters at 1e-12, so weights get more of them
QUICK = RetryPolicy(first=0.05)


def directed() -> nx.DiGraph:
    graph = nx.DiGraph(nx.cycle_graph(10, create_using=nx.DiGraph))
    graph.add_edges_from([(0, 3), (2, 7), (5, 1), (8, 4), (6, 9)])
    return graph


GRAPHS = {
    "ring": nx.cycle_graph(12),
    "torus": nx.convert_node_labels_to_integers(nx.grid_2d_graph(4, 5, periodic=True)),
    "random 4-regular": nx.random_regular_graph(4, 16, seed=3),
    "clique": nx.complete_graph(7),
    "directed": directed(),
}


def column_stochastic(graph: nx.DiGraph) -> np.ndarray:
    matrix = np.zeros((len(graph), len(graph)))
    for node in graph:
        part = 1 / (1 + graph.out_degree(node))
        matrix[node, node] = part
        for other in graph.successors(node):
            matrix[other, node] = part
    return matrix


def constantly(sources: list[str]) -> Callable[[str], list[str]]:
    """The same in-neighbours in every round."""
    return lambda _model: sources


class World:
    def __init__(
        self,
        graph: nx.Graph,
        exchanges: int,
        *,
        faults: FaultPlan | None = None,
        weights: list[int] | None = None,
    ) -> None:
        self.graph = nx.DiGraph(graph)
        rng = np.random.default_rng(5)
        self.start = rng.normal(size=(len(graph), 3))
        self.weights = weights or [1] * len(graph)
        self.network: MemoryNetwork = MemoryNetwork(1, faults or FaultPlan())
        self.modes: dict[str, RoundsMode] = {}
        self.peers: dict[str, Gossiper] = {}
        for node in sorted(self.graph):
            sources = [f"{p}" for p in self.graph.pred[node]]
            mode = RoundsMode(exchanges, sources=constantly(sources))
            store = DictStore({"v": self.start[node]})
            peer = Gossiper(f"{node}", f"s{node}", store, mode=mode, retry=QUICK)
            peer.inject("v", FINE * self.weights[node])
            self.peers[peer.peer], self.modes[peer.peer] = peer, mode
        introduce(self.peers.values(), {(f"{a}", f"{b}") for a, b in self.graph.edges})
        self.now = 0.0

    def values(self) -> np.ndarray:
        rows = [self.peers[f"{n}"].value("v") for n in sorted(self.graph)]
        return np.array(rows)

    def round(self, number: int, seconds: float = 100.0) -> None:
        for name, mode in self.modes.items():
            mode.begin_round(self.peers[name], number)
        self.now = run(
            self.peers,
            self.network,
            start=self.now,
            seconds=seconds,
            until=lambda: all(m.finished(number) for m in self.modes.values()),
        )
        assert all(m.finished(number) for m in self.modes.values())


@pytest.mark.parametrize("name", GRAPHS)
def test_consensus_at_the_rate_of_the_spectrum(name: str) -> None:
    world = World(GRAPHS[name], 1)
    moduli = np.sort(np.abs(np.linalg.eigvals(column_stochastic(world.graph))))
    rate = moduli[-2]
    mean = world.start.mean(axis=0)
    errors = [np.linalg.norm(world.start - mean)]
    while errors[-1] > 1e-10 * errors[0] and len(errors) < 600:
        world.round(len(errors))
        errors.append(float(np.linalg.norm(world.values() - mean)))
    assert errors[-1] < 1e-6 * np.linalg.norm(mean)
    if rate < 1e-9:  # a clique agrees in one exchange
        assert len(errors) == 2
        return
    half = len(errors) // 2
    measured = (errors[-1] / errors[half]) ** (1 / (len(errors) - 1 - half))
    assert np.log(measured) == pytest.approx(np.log(rate), rel=0.1)
    assert measured == pytest.approx(rate, rel=0.1)
    assert len(errors) - 1 <= 1.5 * np.log(1e-10) / np.log(rate) + 10


@pytest.mark.parametrize(
    "faults",
    [
        FaultPlan(),
        FaultPlan(delay=(0.0, 0.08)),
        FaultPlan(loss=0.2, duplicate=0.2, reorder=0.3, delay=(0.0, 0.03)),
    ],
    ids=["clean", "slow", "faulty"],
)
@pytest.mark.parametrize("name", ["ring", "directed"])
def test_exchanges_are_a_matrix_power(name: str, faults: FaultPlan) -> None:
    weights = [1 + n % 3 for n in GRAPHS[name]]
    world = World(GRAPHS[name], 5, faults=faults, weights=weights)
    world.round(0)
    power = np.linalg.matrix_power(column_stochastic(world.graph), 5)
    w = np.array(weights, dtype=float)
    wanted = (power @ (w[:, None] * world.start)) / (power @ w)[:, None]
    np.testing.assert_allclose(world.values(), wanted, rtol=0, atol=1e-12)
    if faults.loss:
        assert world.network.counters["lost"] > 0
        assert sum(p.counters["duplicate"] for p in world.peers.values()) > 0


def test_given_columns_are_used() -> None:
    graph = nx.complete_graph(3)
    world = World(graph, 3)
    column = {("0", "1"): 0.5, ("0", "2"): 0.25, ("1", "2"): 0.125, ("2", "0"): 0.75}
    matrix = np.eye(3)
    for (a, b), part in column.items():
        matrix[int(b), int(a)] += part
        matrix[int(a), int(a)] -= part
    for name, peer in world.peers.items():
        out = {b: part for (a, b), part in column.items() if a == name}
        sources = [a for (a, b) in column if b == name]
        mode = RoundsMode(3, sources=constantly(sources), shares={"v": out})
        peer.mode = world.modes[name] = mode
    world.round(0)
    power = np.linalg.matrix_power(matrix, 3)
    wanted = (power @ world.start) / power.sum(axis=1)[:, None]
    np.testing.assert_allclose(world.values(), wanted, rtol=0, atol=1e-12)


def test_later_exchanges_are_held_and_a_crash_resumes_the_round() -> None:
    """One peer is restored from its snapshot after every single tick; nothing changes."""
    world = World(nx.cycle_graph(4), 4, faults=FaultPlan(loss=0.2, delay=(0.0, 0.05)))
    for name, mode in world.modes.items():
        mode.begin_round(world.peers[name], 0)
    for _ in range(4000):
        world.now = run(world.peers, world.network, start=world.now + 0.01, seconds=0)
        if all(m.finished(0) for m in world.modes.values()):
            break
        old = world.peers["0"]
        snapshot = old.snapshot()
        mode = RoundsMode(4, sources=constantly(["1", "3"]))
        store = DictStore({"v": np.zeros(3)})
        new = Gossiper.restore(snapshot, store, mode=mode, retry=QUICK)
        world.peers["0"], world.modes["0"] = new, mode
        for other in ("1", "3"):
            new.peer_online(other, f"s{other}", ["v"])
    assert all(m.finished(0) for m in world.modes.values())
    power = np.linalg.matrix_power(column_stochastic(world.graph), 4)
    np.testing.assert_allclose(world.values(), power @ world.start, rtol=0, atol=1e-12)
    assert sum(p.counters["held"] for p in world.peers.values()) > 0


def test_a_gone_neighbour_is_not_waited_for() -> None:
    world = World(nx.complete_graph(3), 3)
    for name in ("0", "1"):
        world.modes[name].begin_round(world.peers[name], 0)
    lone = {n: world.peers[n] for n in ("0", "1")}
    run(lone, world.network, seconds=5)
    assert not world.modes["0"].finished(0)
    for peer in lone.values():
        peer.peer_gone("2", "s2")
    run(lone, world.network, start=6.0, seconds=5)
    assert world.modes["0"].finished(0)
    assert world.modes["1"].finished(0)
    assert sum(p.account("v").held + p.account("v").open for p in lone.values()) == 2 * FINE


def test_a_peer_with_too_little_weight_to_divide_does_not_hold_up_the_others() -> None:
    """As when a goodbye has taken weight away that was passed on before."""
    gossipers = {
        name: Gossiper(name, f"s{name}", DictStore({"v": np.zeros(1)}), mode=RoundsMode(2))
        for name in "ab"
    }
    gossipers["a"].inject("v", 1)
    gossipers["b"].inject("v", ONE)
    introduce(gossipers.values())
    for gossiper in gossipers.values():
        gossiper.mode.begin_round(gossiper, 0)
    run(gossipers, MemoryNetwork())
    assert all(gossiper.mode.finished(0) for gossiper in gossipers.values())
    assert gossipers["a"].counters["starved"] == 1
    assert gossipers["a"].weight("v") > 1
    assert sum(gossiper.weight("v") for gossiper in gossipers.values()) == ONE + 1


def test_mistakes_are_named() -> None:
    world = World(nx.cycle_graph(3), 2)
    world.round(0)
    with pytest.raises(ValueError, match="round 0 of 'v' cannot begin: round 0 is over"):
        world.modes["0"].begin_round(world.peers["0"], 0)
    world.modes["0"].begin_round(world.peers["0"], 1)
    with pytest.raises(ValueError, match="round 1 is not finished"):
        world.modes["0"].begin_round(world.peers["0"], 2)
    poor = Gossiper("x", "s", DictStore({"v": np.zeros(1)}), mode=RoundsMode(1))
    with pytest.raises(ValueError, match=r"holds no weight of 'v'.*inject"):
        RoundsMode(1).begin_round(poor, 0)
    with pytest.raises(ValueError, match="at least 1"):
        RoundsMode(0)


@pytest.mark.parametrize("delay", [(0.0, 0.0), (0.0, 0.08)], ids=["prompt", "slow"])
def test_a_refused_transfer_does_not_hold_up_its_round(delay: tuple[float, float]) -> None:
    world = World(nx.complete_graph(4), 3, faults=FaultPlan(delay=delay))
    odd = Gossiper("3", "s3", DictStore({"v": np.ones(5)}), mode=world.modes["3"], retry=QUICK)
    odd.inject("v", FINE)
    world.peers["3"] = odd  # five values where the others have three: nobody can take them
    introduce(world.peers.values())
    for number in range(2):
        world.round(number)
    run(world.peers, world.network, start=world.now, seconds=1)  # the last answers arrive
    for peer in world.peers.values():
        assert peer.counters["refused-wrong-length"] >= 6
    assert sum(peer.weight("v") for peer in world.peers.values()) == 4 * FINE
    mean = world.start[:3].mean(axis=0)
    near = np.array([world.peers[f"{n}"].value("v") for n in range(3)])
    assert np.abs(near - mean).max() < np.abs(world.start[:3] - mean).max()


def test_a_peer_with_too_little_weight_to_divide_does_not_stall_its_neighbours() -> None:
    """Peer 0 gives away all that it has in the first exchange and gets nothing back."""
    world = World(nx.DiGraph([(0, 1), (1, 2), (2, 1)]), 3)
    for name, sources, shares in (
        ("0", [], {"1": 1.0}),
        ("1", ["0", "2"], {"2": 0.5}),
        ("2", ["1"], {"1": 0.5}),
    ):
        mode = RoundsMode(3, sources=constantly(sources), shares={"v": shares})
        world.peers[name].mode = world.modes[name] = mode
    world.round(0)
    assert world.peers["0"].counters["starved"] == 2
    assert world.peers["0"].weight("v") == 0
    assert sum(peer.account("v").held for peer in world.peers.values()) == 3 * FINE


def test_a_round_that_cannot_begin_for_one_model_begins_for_none() -> None:
    store = DictStore({"a": np.zeros(1), "b": np.zeros(1)})
    mode = RoundsMode(1)
    peer = Gossiper("x", "s", store, mode=mode)
    peer.inject("a", ONE)
    with pytest.raises(ValueError, match="holds no weight of 'b'"):
        mode.begin_round(peer, 0)
    peer.inject("b", ONE)
    mode.begin_round(peer, 0)
    peer.tick(0.0)
    assert mode.finished(0)


def test_a_model_without_an_entry_is_named() -> None:
    mode = RoundsMode(1, shares={"a": {}})
    peer = Gossiper("x", "s", DictStore({"a": np.zeros(1), "b": np.zeros(1)}), mode=mode)
    with pytest.raises(ValueError, match=r"shares has no entry for \['b'\]"):
        mode.begin_round(peer, 0)


def test_a_round_of_a_peer_without_models_is_over_once_it_has_begun() -> None:
    mode = RoundsMode(1)
    peer = Gossiper("x", "s", DictStore({}), mode=mode)
    assert not mode.finished(0)
    mode.begin_round(peer, 0)
    assert mode.finished(0)
