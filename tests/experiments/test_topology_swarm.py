"""`topology` and `bridge` in a config: the same graph for the arena and for live peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from cli_kit import Run, runs

from gossamer.experiments import Arena, Swarm, load_config, parse_config
from gossamer.experiments.arena import Gossip, LearningSimulation
from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.build import shared_models
from gossamer.experiments.config.tables import Config, ConfigError
from gossamer.experiments.graphs import load_graph, mixing_of, swarm_graph
from gossamer.experiments.graphs.swarm import push_graph
from gossamer.experiments.live.layout import plan
from gossamer.experiments.study.sweep import outcome, stackable_batches
from gossamer.models import ModelError, SgdLearner, SlicedNetwork, average, mlp
from gossamer.peer import BrokerAddress, ProcessSpec
from gossamer.topology import (
    DisconnectedError,
    Schedule,
    TopologyError,
    build,
    mixing_matrix,
    predicted_exchanges,
    spectral_gap,
    uniform_push,
)

torch.set_num_threads(1)
KARATE = Path(__file__).parents[2] / "experiments/configs/karate.toml"
NOWHERE = BrokerAddress("mqtt://localhost:1")
EVERYBODY = {"all": list(range(6))}


def config(**table: Any) -> Config:
    base = {
        "peers": 6,
        "rounds": 3,
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
        push_graph(config(**TORN), members, "swarm.toml")
    assert "swarm.toml: key 'topology'" in str(refused.value)
    assert "odd: 3 components: {1}; {3}; {5}" in str(refused.value)
    assert "bridge = true" in str(refused.value)
    assert "\n" not in str(refused.value)

    whole = push_graph(config(**TORN, bridge=True), members)
    assert nx.is_connected(whole.subgraph([1, 3, 5]))
    assert whole.number_of_edges() == 6 + 2
    told = capsys.readouterr().out
    assert "bridged: 2 links added to connect partial models (the fewest possible)" in told
    for u, v in whole.edges:
        if not build("ring", 6).has_edge(u, v):
            assert f"{min(u, v)}–{max(u, v)}" in told


def test_live_peers_get_the_bridged_neighbours(tmp_path: Path) -> None:
    spec = plan(config(**TORN, bridge=True), tmp_path, NOWHERE)
    whole = push_graph(config(**TORN, bridge=True), Swarm(config(**TORN)).members())
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
    with pytest.raises(ConfigError, match="changes over time runs live only in async mode"):
        plan(swarm, tmp_path, NOWHERE)
    with pytest.raises(ConfigError, match="no links can be added"):
        swarm_graph(config(topology="random-matchings:8", bridge=True), EVERYBODY)


def test_async_peers_follow_a_schedule_turn_by_turn(tmp_path: Path) -> None:
    spec = plan(config(topology="one-peer-exponential"), tmp_path, NOWHERE)
    count = len(spec.peers)
    hops = [1 << hop for hop in range((count - 1).bit_length())]
    for index, peer in enumerate(spec.peers):
        to = [str((index + hop) % count) for hop in hops]
        assert peer.settings.turns == tuple((name,) for name in to)
        assert set(peer.settings.neighbours or ()) == set(to)
    ProcessSpec(NOWHERE, str(tmp_path), spec.peers).write(tmp_path / "host.json")
    assert ProcessSpec.read(tmp_path / "host.json").peers[0].settings == spec.peers[0].settings


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"topology": "networkx:karate_club_graph"}, "more peers than the swarm: 34, not 6"),
        ({"topology": "networkx:petersen_graph", "peers": 12}, "fewer peers .* 10, not 12"),
        ({"topology": "nowhere.graphml"}, "nowhere.graphml: there is no such file"),
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
    owners = shared_models(members)
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


WEIGHTS = (0.001, 0.45, 0.001, 0.45, 0.001, 0.45)


topology = runs("topology")


def learners(start: np.ndarray) -> list[SgdLearner]:
    """A learner in float64 for each value, which stands in all its parameters."""
    found = []
    nothing = torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    for peer, value in enumerate(start):
        network = SlicedNetwork(mlp("2=2").double(), {"all": "2-2"}, peer=str(peer))
        network.flat.fill_(float(value))
        found.append(SgdLearner(network, nothing, nothing))
    return found


def values(found: list[SgdLearner]) -> np.ndarray:
    return np.array([float(learner.network.flat[0]) for learner in found])


def needed(graph: nx.Graph, tolerance: float = 1e-6) -> int:
    """Exchanges that an arena makes from the slowest start until disagreement is `tolerance` of it."""
    sizes, modes = np.linalg.eig(mixing_matrix(graph, "push").toarray())
    swarm = learners(modes[:, np.argsort(-np.abs(sizes))[1]].real)
    arena = Arena(swarm, mixing=Gossip(graph))
    mean = values(swarm).mean()
    first = np.abs(values(swarm) - mean).max()
    count = 0
    while np.abs(values(swarm) - mean).max() > tolerance * first:
        arena.average()
        count += 1
    return count


def test_the_exchanges_shown_are_those_an_arena_needs(topology: Run, tmp_path: Path) -> None:
    names = ["star", "ring"]
    assert topology("compare", *names, "--peers", "16", "--no-learn", "-o", "c").code == 0
    compared = json.loads((tmp_path / "c/compare.json").read_text())["graphs"]
    for name, entry in zip(names, compared, strict=True):
        assert topology("show", name, "--peers", "16", "-o", name).code == 0
        shown = json.loads((tmp_path / name / "topology.json").read_text())["facts"]["exchanges"]
        assert shown == entry["predicted"] == pytest.approx(needed(build(name, 16)), abs=1), name


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    """A ring whose links carry a lot and next to nothing in turn, and the place of a config beside it."""
    lines = [f"{i} {(i + 1) % 6} {weight}\n" for i, weight in enumerate(WEIGHTS)]
    (tmp_path / "ring.edges").write_text("".join(lines))
    return tmp_path / "swarm.toml"


def test_a_config_is_shown_by_its_own_rule(topology: Run, ring: Path) -> None:
    found = []
    for rule in ("push", "metropolis", "edges"):
        ring.write_text(
            'name = "six"\npeers = 6\ntopology = "ring.edges"\n[data]\nsamples = 5\n'
            '[network]\nlayout = "64=4=10"\n[[models]]\nname = "all"\nlayout = "64-4-10"\n'
            f'[gossip]\nmode = "rounds"\nrule = "{rule}"\n'
        )
        result = topology("show", "swarm.toml", "-o", rule)
        assert result.code == 0
        assert "weights on the topology" not in result.out  # its author has chosen
        facts = json.loads((ring.parent / rule / "topology.json").read_text())["facts"]
        swarm = config(topology="ring.edges", gossip={"mode": "rounds", "rule": rule})
        mixing = mixing_of(swarm, EVERYBODY, str(ring))
        assert mixing is not None
        assert facts["exchanges"] == mixing.exchanges
        found.append(facts["exchanges"])
    assert found[0] == found[1] < found[2] / 50  # a regular graph, then its weak links


def test_weights_change_a_run_under_their_rule_alone(
    ring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def losses(topology: str, **gossip: Any) -> list[float]:
        simulation = Simulation.of(config(topology=topology, gossip=gossip), str(ring))
        return [test.mean_loss for round in simulation.rounds() for test in round.tests]

    plain = losses("ring")
    assert capsys.readouterr().out == ""
    assert losses("ring.edges") == plain
    assert capsys.readouterr().out == (
        "weights on the topology's links are not used: peers send equal shares; "
        'in lockstep gossip.rule = "edges" uses them as shares\n'
    )
    assert losses("ring.edges", rule="push") == plain
    assert capsys.readouterr().out == ""
    assert losses("ring.edges", rule="edges") != plain
    assert capsys.readouterr().out == ""


def test_live_peers_are_told_that_weights_are_not_used(
    ring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(config(topology="ring.edges"), ring.parent / "live", NOWHERE, str(ring))
    told = capsys.readouterr().out
    assert told == "weights on the topology's links are not used: peers send equal shares\n"


def test_where_a_rule_has_no_meaning_it_is_refused_by_name(ring: Path) -> None:
    source, edges = str(ring), {"rule": "edges"}
    on_graph: dict[str, Any] = {"topology": "ring.edges", "gossip": edges}
    lossy = {"rule": "edges", "compress": "int8"}
    for run, table, message in (
        (
            lambda c: plan(c, ring.parent, NOWHERE, source),
            on_graph,
            "not with live peers: .*the rule .push.",
        ),
        (
            lambda c: LearningSimulation(c, source),
            on_graph | {"time": {}},
            r"not in virtual time: .*or \[time\]",
        ),
        (
            lambda c: Simulation.of(c, source),
            on_graph | {"gossip": lossy},
            "not with gossip.compress",
        ),
        (lambda c: Simulation.of(c, source), {"gossip": edges}, "there is no 'topology'"),
        (lambda c: outcome(c, source), {"gossip": edges}, "there is no 'topology'"),
    ):
        with pytest.raises(ConfigError, match=f"swarm.toml: key 'gossip.rule': .*{message}"):
            run(config(**table))


def test_a_sweep_does_not_stack_runs_past_the_check() -> None:
    class Cell:
        config = config(gossip={"rule": "edges"})

    assert len(stackable_batches([Cell(), Cell()])) == 2


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"topology": "ring", "gossip": {"rule": "edges"}}, "weight is None, not a share"),
        ({"topology": "one-peer-exponential", "gossip": {"rule": "metropolis"}}, "use push"),
        ({"topology": "zero.edges", "gossip": {"rule": "edges"}}, "links of weight 0 carry"),
        (
            {"topology": "torn.edges", "bridge": True, "gossip": {"rule": "edges"}},
            "no weight; .*0–3",
        ),
        (
            {"topology": "faint.edges", "gossip": {"mode": "rounds", "rule": "edges"}},
            "exchanges in",
        ),
    ],
)
def test_a_rule_that_does_not_fit_names_its_key(
    tmp_path: Path, table: dict[str, Any], message: str
) -> None:
    path = [f"{i} {i + 1}" for i in range(5)]
    for name, middle in (("zero", ["2 3 0"]), ("faint", ["2 3 1e-30"]), ("torn", [])):
        rest = [f"{link} 0.3" for link in path if link != "2 3"]
        (tmp_path / f"{name}.edges").write_text("\n".join(rest + middle))
    with pytest.raises(ConfigError, match=rf"c.toml: key 'gossip\.rule': .*{message}") as refused:
        mixing_of(config(**table), EVERYBODY, str(tmp_path / "c.toml"))
    assert "\n" not in str(refused.value)


def test_an_arena_counts_links_by_what_they_carry() -> None:
    graph = nx.Graph()
    graph.add_weighted_edges_from([(0, 1, 0.4), (1, 2, 0.0), (2, 3, 0.5)])
    swarm = learners(np.arange(4.0))
    with pytest.raises(DisconnectedError, match=r"weight 0 carry nothing.*\s.*\{0, 1\}; \{2, 3\}"):
        Arena(swarm, mixing=Gossip(graph, rule="edges"))
    Arena(swarm, mixing=Gossip(graph))  # equal parts go over every link
    graph[1][2]["weight"] = 0.1
    Arena(swarm, mixing=Gossip(graph, rule="edges", exchanges=400)).average()
    assert values(swarm) == pytest.approx(1.5)
    with pytest.raises(TopologyError, match="need an undirected graph"):
        Arena(swarm, mixing=Gossip(nx.cycle_graph(4, nx.DiGraph), rule="metropolis"))


@pytest.mark.parametrize("nodes", [["a", 1, 2, 3], ["a", "b", "c", "d"], [1, 2, 3, 4]])
def test_nodes_with_other_names_are_told_the_remedy(nodes: list[Any]) -> None:
    swarm = learners(np.arange(4.0))
    with pytest.raises(ModelError) as refused:
        Arena(swarm, mixing=Gossip(nx.path_graph(nodes)))
    line = str(refused.value)
    assert "\n" not in line
    assert f"begin with {nodes[0]!r}, " in line
    assert "gossamer.topology.normalize_graph(graph) numbers them" in line
    with pytest.raises(ModelError) as refused:
        Arena(swarm, mixing=Gossip(nx.path_graph(nodes[:3])))
    assert "normalize_graph" not in str(refused.value)  # numbers would not make them more


def test_no_topology_leaves_the_default_rule_alone() -> None:
    assert swarm_graph(config(gossip={"rule": "push"}), EVERYBODY) is None
