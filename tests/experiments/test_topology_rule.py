"""The graph that is described is the graph that runs: one rule for tables, predictions and swarms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from cli_kit import Result, runner

from gossamer.experiments import Arena, parse_config
from gossamer.experiments.arena import Gossip, LearningSimulation
from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.config.tables import Config, ConfigError
from gossamer.experiments.graphs import mixing_of, swarm_graph
from gossamer.experiments.live.layout import plan
from gossamer.experiments.study.sweep import outcome, stackable
from gossamer.models import ModelError, SgdLearner, SlicedNetwork, mlp
from gossamer.peer import BrokerAddress
from gossamer.topology import DisconnectedError, TopologyError, build, mixing_matrix

torch.set_num_threads(1)
EVERYBODY = {"all": list(range(6))}
NOWHERE = BrokerAddress("mqtt://localhost:1")
WEIGHTS = (0.001, 0.45, 0.001, 0.45, 0.001, 0.45)


@pytest.fixture
def topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Runs `gossamer topology …` in this process, in a folder of its own."""
    return runner(tmp_path, monkeypatch, capsys, "topology")


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


def test_the_exchanges_shown_are_those_an_arena_needs(
    topology: Callable[..., Result], tmp_path: Path
) -> None:
    names = ["star", "torus", "ring"]
    assert topology("compare", *names, "--peers", "16", "--no-learn", "-o", "c").code == 0
    compared = json.loads((tmp_path / "c/compare.json").read_text())["graphs"]
    for name, entry in zip(names, compared, strict=True):
        assert topology("show", name, "--peers", "16", "-o", name).code == 0
        shown = json.loads((tmp_path / name / "topology.json").read_text())["facts"]["exchanges"]
        assert shown == entry["predicted"] == pytest.approx(needed(build(name, 16)), abs=1), name


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


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    """A ring whose links carry a lot and next to nothing in turn, and the place of a config beside it."""
    lines = [f"{i} {(i + 1) % 6} {weight}\n" for i, weight in enumerate(WEIGHTS)]
    (tmp_path / "ring.edges").write_text("".join(lines))
    return tmp_path / "swarm.toml"


def test_a_config_is_shown_by_its_own_rule(topology: Callable[..., Result], ring: Path) -> None:
    found = []
    for rule in ("push", "metropolis", "edges"):
        ring.write_text(
            'name = "six"\npeers = 6\ntopology = "ring.edges"\n[data]\nsamples = 5\n'
            '[network]\nlayout = "64=4=10"\n[[models]]\nname = "all"\nlayout = "64-4-10"\n'
            f'[gossip]\nmode = "rounds"\nrule = "{rule}"\n'
        )
        result = topology("show", "swarm.toml", "-o", rule)
        assert result.code == 0
        assert ("six: weights on the topology's links are not used" in result.out) == (
            rule != "edges"
        )
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
        "weights on the topology's links are not used: peers give equal parts; "
        'in lockstep gossip.rule = "edges" takes them for shares\n'
    )
    assert losses("ring.edges", rule="edges") != plain
    assert capsys.readouterr().out == ""


def test_live_peers_are_told_that_weights_are_not_used(
    ring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(config(topology="ring.edges"), ring.parent / "live", NOWHERE, str(ring))
    told = capsys.readouterr().out
    assert told == "weights on the topology's links are not used: peers give equal parts\n"


def test_where_a_rule_has_no_meaning_it_is_refused_by_name(ring: Path) -> None:
    source, edges = str(ring), {"rule": "edges"}
    on_graph: dict[str, Any] = {"topology": "ring.edges", "gossip": edges}
    lossy = {"rule": "edges", "compress": "int8"}
    for run, table, message in (
        (lambda c: plan(c, ring.parent, NOWHERE, source), on_graph, "live peers give equal parts"),
        (lambda c: LearningSimulation(c, source), on_graph | {"time": {}}, r"leave out \[time\]"),
        (lambda c: Simulation.of(c, source), on_graph | {"gossip": lossy}, "'gossip.compress'"),
        (lambda c: Simulation.of(c, source), {"gossip": edges}, "there is no 'topology'"),
        (lambda c: outcome(c, source), {"gossip": edges}, "there is no 'topology'"),
    ):
        with pytest.raises(ConfigError, match=f"swarm.toml: key 'gossip.rule': .*{message}"):
            run(config(**table))


def test_a_sweep_does_not_stack_runs_past_the_check() -> None:
    class Cell:
        config = config(gossip={"rule": "edges"})

    assert len(stackable([Cell(), Cell()])) == 2


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
    assert "gossamer.topology.plain(graph) numbers them" in line
    with pytest.raises(ModelError) as refused:
        Arena(swarm, mixing=Gossip(nx.path_graph(nodes[:3])))
    assert "plain" not in str(refused.value)  # numbers would not make them more


def test_no_topology_leaves_the_default_rule_alone() -> None:
    assert swarm_graph(config(gossip={"rule": "push"}), EVERYBODY) is None
