"""Steady gossip from a config: in lockstep, in virtual time, and what it cannot be combined with."""

from __future__ import annotations

from typing import Any

import networkx as nx
import pytest

from gossamer.experiments.arena import Arena, LearningSimulation, Simulation, Steady, Wire
from gossamer.experiments.config.tables import Config, ConfigError
from gossamer.experiments.graphs.swarm import steady_graph
from gossamer.experiments.live.layout import plan
from gossamer.models import ModelError
from gossamer.peer import BrokerAddress


def config(**changes: Any) -> Config:
    table: dict[str, Any] = {
        "peers": 8,
        "rounds": 12,
        "test_every": 12,
        "topology": "regular:4",
        "data": {"set": "digits", "samples": 40},
        "network": {"layout": "64=16=10"},
        "models": [{"name": "global", "layout": "64-16-10"}],
        "training": {"local_samples": 80, "rate": 0.3},
        "gossip": {"mode": "steady"},
    }
    gossip = {"mode": "steady", **changes.pop("gossip", {})}
    return Config.model_validate({**table, **changes, "gossip": gossip})


def accuracy(settings: Config) -> float:
    *_, last = Simulation.of(settings).rounds()
    return last.accuracy


def test_peers_learn_from_each_other_in_lockstep():
    steady = accuracy(config())
    alone = accuracy(config(gossip={"mode": "async"}, topology=None, models=[]))
    assert steady > alone + 0.05


def test_peers_learn_from_each_other_in_virtual_time_and_one_seed_is_one_result():
    settings = config(time={"loss": 0.05, "delay": "exponential:0.2"})
    runs = [LearningSimulation(settings, threads=threads) for threads in (1, 2)]
    for run in runs:
        run.run()
    means = [run.tests.mean(run.seconds).accuracy for run in runs]
    assert means[0] == means[1]
    assert means[0] > 0.75
    for gossiper in runs[0].events.gossipers.values():
        account = gossiper.account("global")
        assert (account.held, account.open) == (account.injected, 0), "no weight is on its way"
        assert gossiper.counters["credited"] > 10


def test_peers_count_by_their_samples_on_request():
    data = {"set": "digits", "partition": "dirichlet", "alpha": 1.0, "total": 400}
    run = LearningSimulation(config(data=data, weights="samples", time={}))
    gossiper, (other, *_) = run.events.gossipers[0], run.events.gossipers[0].neighbours("global")
    theirs = run.events.gossipers[int(other)].injected("global")
    assert gossiper.claimed_weight(other) == theirs != gossiper.injected("global")
    run.run()
    assert run.tests.mean(run.seconds).accuracy > 0.6


def test_private_parts_stay_in_place_when_values_are_scored():
    partial = {"name": "global", "share": 0.5}
    settings = config(models=[partial], time={})
    run = LearningSimulation(settings)
    before = [member.network.flat.clone() for member in run.members]
    run._score(0, "global", run.events.gossipers[1].value("global"))
    assert all(
        bool((member.network.flat == flat).all())
        for member, flat in zip(run.members, before, strict=True)
    )
    run.run()
    assert run.tests.mean(run.seconds).accuracy > 0.6


def test_a_returning_peer_starts_from_the_median_of_others(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("2,leave,0\n6,arrive,0\n", "utf-8")
    settings = config(time={"seconds": 12.0, "churn": {"trace": str(trace)}})
    run = LearningSimulation(settings, str(tmp_path / "config.toml"))
    run.run()
    returned = run.events.gossipers[0]
    assert returned.injected("global") > 0
    assert returned.counters["refused-collected"] >= 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gossip": {"hostile": 2}}, "needs 5; these have fewer: 0 (4), 1 (4)"),
        ({"gossip": {"hostile": 2}}, "gossamer topology advise --hostile 2"),
        ({"gossip": {"hostile": -1}}, 'should be a number of neighbours, or "auto"'),
        ({"topology": "one-peer-exponential"}, "neighbours change before they are known"),
        ({"gossip": {"compress": "int8"}}, "'gossip.compress': not with gossip.mode = 'steady'"),
        ({"gossip": {"drift": 0.1}}, "'gossip.drift': not with"),
        ({"models": [{"name": "global", "layout": "64-16-10", "matching": "align"}]}, "matching"),
    ],
)
@pytest.mark.parametrize("time", [None, {}])
def test_what_steady_gossip_cannot_do_is_said_before_it_trains(changes, message, time):
    def start() -> None:
        settings = config(**changes, time=time)
        if time is None:
            Simulation.of(settings)
        else:
            LearningSimulation(settings)

    with pytest.raises((ConfigError, ValueError)) as error:
        start()
    assert message in str(error.value)


def test_peers_do_not_decide_what_they_share_in_it():
    with pytest.raises(ConfigError, match="one hostile member could decide what all share"):
        Simulation.of(config(sharing="auto", models=[]))


def test_a_directed_graph_is_refused_with_the_reason(tmp_path):
    for graph in (
        nx.DiGraph(nx.circulant_graph(8, [1, 2])),
        nx.gn_graph(8),
    ):  # the second has no way back
        nx.write_graphml(graph, tmp_path / "graph.graphml")
        settings = config(topology=str(tmp_path / "graph.graphml"))
        with pytest.raises(ConfigError, match="cannot choose whom it listens to"):
            Simulation.of(settings)


def test_peers_with_few_neighbours_are_named(capsys):
    Simulation.of(config(topology="ring"))
    said = " ".join(capsys.readouterr().err.split())
    assert "fewer than 4 neighbours do not withstand a hostile one among them: 0 (2), 1 (2)" in said
    assert "gossamer topology advise --hostile 1" in said


@pytest.mark.parametrize("live", [False, True])
def test_learners_that_cannot_score_are_named_before_training(capsys, live, tmp_path):
    settings = config(fednp={})
    if live:
        plan(settings, tmp_path, BrokerAddress("mqtt://localhost:1"))
    else:
        Simulation.of(settings)
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "no method score, so what another peer's value may change is limited by its distance"
        in said
    )


@pytest.mark.parametrize(("hostile", "needed"), [("auto", 4), (2, 5)])
def test_bridge_adds_links_until_everybody_has_enough_neighbours(capsys, hostile, needed):
    settings = config(topology="ring", bridge=True, gossip={"hostile": hostile})
    graph = steady_graph(settings, {"global": range(8)})
    assert min(degree for _, degree in graph.degree) >= needed
    told = " ".join(capsys.readouterr().out.split())
    assert f"links added to give every peer {needed} neighbours" in told


def test_bridge_links_all_peers_of_a_small_model_and_says_that_they_are_too_few(capsys):
    settings = config(topology="ring", bridge=True)
    models = {"global": range(8), "small": [0, 2, 4]}
    graph = steady_graph(settings, models)
    assert nx.density(graph.subgraph(models["small"])) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "0 (2), 2 (2), 4 (2); let 5 or more peers share small" in told
    with pytest.raises(
        ConfigError, match=r"lower gossip\.hostile, or let 5 or more peers share small"
    ):
        steady_graph(config(topology="ring", bridge=True, gossip={"hostile": 1}), models)


def test_an_arena_needs_a_wire_for_it():
    learners = [member.learner for member in Simulation.of(config()).members]
    graph = nx.circulant_graph(8, [1, 2])
    with pytest.raises(ModelError, match=r"wire=Wire\(\)"):
        Arena(learners, mixing=Steady(graph))
    arena = Arena(learners, mixing=Steady(graph), wire=Wire())
    assert [round.index for round in arena.run(2)] == [1, 2]


# --- robust means in lockstep ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["rounds", "server"])
@pytest.mark.parametrize("robust", ["clipped", "trimmed", "median"])
def test_peers_learn_with_a_robust_mean(mode, robust):
    topology = None if mode == "server" else "regular:4"
    found = accuracy(config(topology=topology, gossip={"mode": mode, "robust": robust}))
    exact = accuracy(config(topology=topology, gossip={"mode": mode}))
    assert abs(found - exact) < 0.06


@pytest.mark.parametrize(
    ("gossip", "changes", "message"),
    [
        (
            {"mode": "async"},
            {},
            "'gossip.robust': it is for the modes rounds and server, not for 'async'",
        ),
        (
            {"mode": "steady"},
            {},
            "'gossip.robust': it is for the modes rounds and server, not for 'steady'",
        ),
        ({"mode": "rounds", "compress": "int8"}, {}, "'gossip.compress'"),
        ({"mode": "rounds", "drift": 0.1}, {}, "'gossip.drift': .* every value"),
        (
            {"mode": "rounds"},
            {"topology": "random-matchings"},
            "'topology': a graph that changes in steps is not supported with gossip.robust",
        ),
        ({"mode": "server"}, {}, "'topology': in server mode peers exchange only with servers"),
        (
            {"mode": "server"},
            {"topology": None, "bridge": True},
            "'bridge': there is no 'topology'",
        ),
        ({"mode": "rounds"}, {"weights": "samples"}, "'weights': .* without weight"),
    ],
)
def test_what_does_not_go_with_a_robust_mean(gossip, changes, message):
    with pytest.raises(ConfigError, match=message):
        Simulation.of(config(gossip=gossip | {"robust": "trimmed"}, **changes))


@pytest.mark.parametrize("mode", ["async", "steady"])
def test_robust_means_are_not_for_virtual_time(mode):
    settings = config(gossip={"mode": mode, "robust": "trimmed"}, time={})
    with pytest.raises(
        ConfigError, match=r"'gossip\.robust': it is for the modes rounds and server"
    ):
        LearningSimulation(settings)
