"""`topology` and `bridge` in a config: the same graph for the arena and for live peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

from gossamer.experiments import Arena, Swarm, load_config, parse_config
from gossamer.experiments.config.tables import Config, ConfigError
from gossamer.experiments.graphs import load_graph, mixing_of, swarm_graph
from gossamer.experiments.live.layout import graph_of, plan, shared_owners
from gossamer.models import average
from gossamer.peer import BrokerAddress, HostSpec
from gossamer.topology import Schedule, build, predicted_exchanges, spectral_gap, uniform_push

torch.set_num_threads(1)
KARATE = Path(__file__).parents[2] / "experiments/configs/karate.toml"
NOWHERE = BrokerAddress("mqtt://localhost:1")
EVERYBODY = {"all": list(range(6))}


def config(**table: Any) -> Config:
    base = {
        "peers": 6,
        "data": {"samples": 12, "test": 20},
        "network": {"layout": "64=4=10"},
        "models": [{"name": "all", "layout": "64-4-10"}],
        "training": {"local_samples": 20},
    }
    return parse_config(base | table)


def links(graph: nx.Graph) -> set[frozenset[int]]:
    return {frozenset(edge) for edge in graph.edges}


def test_files_and_functions_beside_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "six.edges").write_text("".join(f"{i} {i + 1}\n" for i in range(5)))
    (tmp_path / "six_peers.py").write_text(
        "import networkx as nx\ndef wheel(peers):\n    return nx.wheel_graph(peers)\n"
    )
    source = str(tmp_path / "swarm.toml")
    monkeypatch.chdir("/")
    for topology, expected in (
        ("six.edges", nx.path_graph(6)),
        ("file:six.edges", nx.path_graph(6)),
        ({"kind": "file", "path": "six.edges", "format": "edges"}, nx.path_graph(6)),
        ("six_peers:wheel", nx.wheel_graph(6)),
        ("networkx:cycle_graph", nx.cycle_graph(6)),
        ({"kind": "regular", "degree": 4}, build("regular:4", 6)),
    ):
        found = swarm_graph(config(topology=topology), EVERYBODY, source)
        assert found is not None
        assert found.changing is None
        assert links(found.graph) == links(expected), topology


def test_no_topology_is_everybody() -> None:
    assert swarm_graph(config(), EVERYBODY) is None
    assert mixing_of(config(), EVERYBODY) is None
    with pytest.raises(ConfigError, match="'bridge': there is no 'topology'"):
        swarm_graph(config(bridge=True), EVERYBODY)


TORN = {
    "topology": "ring",
    "models": [
        {"name": "all", "layout": "64-4-0"},
        {"name": "odd", "layout": "0-0-10", "peers": [1, 3, 5]},
    ],
}


def test_torn_models_are_refused_by_name_or_bridged(capsys: pytest.CaptureFixture[str]) -> None:
    members = Swarm(config(**TORN)).members()
    with pytest.raises(ConfigError) as refused:
        graph_of(config(**TORN), members, "swarm.toml")
    assert "swarm.toml: key 'topology'" in str(refused.value)
    assert "odd: 3 components: {1}; {3}; {5}" in str(refused.value)
    assert "bridge = true" in str(refused.value)
    assert "\n" not in str(refused.value)

    whole = graph_of(config(**TORN, bridge=True), members)
    assert whole is not None
    assert nx.is_connected(whole.subgraph([1, 3, 5]))
    assert whole.number_of_edges() == 6 + 2
    told = capsys.readouterr().out
    assert "bridged: 2 links added to join torn partial models (the fewest that do)" in told
    for u, v in whole.edges:
        if not build("ring", 6).has_edge(u, v):
            assert f"{min(u, v)}–{max(u, v)}" in told


def test_live_peers_get_the_bridged_neighbours(tmp_path: Path) -> None:
    spec = plan(config(**TORN, bridge=True), tmp_path, NOWHERE)
    whole = graph_of(config(**TORN, bridge=True), Swarm(config(**TORN)).members())
    assert whole is not None
    for peer in spec.peers:
        expected = {str(other) for other in whole[int(peer.name)]}
        assert set(peer.settings.neighbours or ()) == expected


def test_live_and_arena_make_the_same_exchanges(tmp_path: Path) -> None:
    for gossip, expected in (
        ({"mode": "rounds", "tolerance": 1e-3}, None),
        ({"mode": "rounds", "exchanges": 7}, 7),
        ({"mode": "async"}, 2),
    ):
        swarm = config(topology="ring", gossip=gossip)
        if expected is None:
            expected = predicted_exchanges(spectral_gap(uniform_push(build("ring", 6))), 1e-3)
        mixing = mixing_of(swarm, EVERYBODY)
        assert mixing is not None
        assert mixing.exchanges == expected
        assert {p.settings.exchanges for p in plan(swarm, tmp_path, NOWHERE).peers} == {expected}


def test_the_arena_on_a_graph_tends_to_the_exact_mean() -> None:
    def values(swarm: Config) -> np.ndarray:
        learners = [member.learner for member in Swarm(swarm).members()]
        mixing = mixing_of(swarm, EVERYBODY)
        if mixing is None:
            for learner in learners:
                learner.train(1)
            average([learner.network for learner in learners])
        else:
            list(Arena(learners, mixing=mixing).run(1))
        return np.stack([learner.network.read("all").numpy() for learner in learners])

    exact = values(config())
    rounds = values(config(topology="star", gossip={"mode": "rounds"}))
    few = values(config(topology="star", gossip={"mode": "rounds", "exchanges": 1}))
    assert np.abs(rounds - exact).max() < 1e-5
    assert np.abs(few - exact).max() > 1e-3


def test_schedules_are_for_the_arena(tmp_path: Path) -> None:
    swarm = config(topology="random-matchings:8", gossip={"mode": "rounds"})
    mixing = mixing_of(swarm, EVERYBODY)
    assert mixing is not None
    assert isinstance(mixing.graph, Schedule)
    learners = [member.learner for member in Swarm(swarm).members()]
    list(Arena(learners, mixing=mixing).run(2))
    found = np.stack([learner.network.read("all").numpy() for learner in learners])
    assert np.abs(found - found.mean(axis=0)).max() < 1e-4
    with pytest.raises(
        ConfigError, match="changes over time, which live peers follow in async mode only"
    ):
        plan(swarm, tmp_path, NOWHERE)
    with pytest.raises(ConfigError, match="cannot be bridged"):
        swarm_graph(config(topology="random-matchings:8", bridge=True), EVERYBODY)


def test_async_peers_follow_a_schedule_turn_by_turn(tmp_path: Path) -> None:
    spec = plan(config(topology="one-peer-exponential"), tmp_path, NOWHERE)
    count = len(spec.peers)
    hops = [1 << hop for hop in range((count - 1).bit_length())]
    for index, peer in enumerate(spec.peers):
        to = [str((index + hop) % count) for hop in hops]
        assert peer.settings.turns == tuple((name,) for name in to)
        assert set(peer.settings.neighbours or ()) == set(to)
    HostSpec(NOWHERE, str(tmp_path), spec.peers).write(tmp_path / "host.json")
    assert HostSpec.read(tmp_path / "host.json").peers[0].settings == spec.peers[0].settings


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"topology": "networkx:karate_club_graph"}, "more peers than the swarm: 34, not 6"),
        ({"topology": "networkx:petersen_graph", "peers": 12}, "fewer peers .* 10, not 12"),
        ({"topology": "nowhere.graphml"}, "nowhere.graphml: cannot read it"),
        ({"topology": "rong"}, "unknown topology 'rong': did you mean 'ring'"),
        ({"topology": "ring", "gossip": {"mode": "server"}}, "in server mode"),
        ({"topology": {"kind": "regular", "degre": 4}}, "did you mean 'degree'"),
        ({"topology": {"kind": "function", "name": "networkx:grid_graph"}}, "cannot be called"),
    ],
)
def test_mistakes_name_the_file_and_the_key(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"club.toml: key 'topology': .*{message}"):
        swarm_graph(config(**table), EVERYBODY, "club.toml")


def test_the_karate_club(tmp_path: Path) -> None:
    club = load_config(KARATE)
    members = Swarm(club, str(KARATE)).members()
    owners = shared_owners(members)
    clubs = nx.get_node_attributes(nx.karate_club_graph(), "club")
    factions = {"mr-hi": "Mr. Hi", "officer": "Officer"}
    assert owners["club"] == list(range(34))
    for model, name in factions.items():
        assert owners[model] == [peer for peer in range(34) if clubs[peer] == name]
    spec = plan(club, tmp_path, NOWHERE, str(KARATE))
    assert set(spec.peers[0].settings.neighbours or ()) == {
        str(other) for other in nx.karate_club_graph()[0]
    }
    mixing = mixing_of(club, owners, str(KARATE))
    *_, last = Arena([member.learner for member in members], mixing=mixing, test_every=12).run(12)
    assert last.accuracy > 0.5
    assert load_graph(str(KARATE)).models == owners
