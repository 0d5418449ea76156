"""`gossamer topology …` as a person meets it: tables, files, and one line about what was wrong."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from cli_kit import Run, runs

from gossamer.experiments.bench.views import SIZES, measure_graph
from gossamer.topology import build, facts, links_to_add

torch.set_num_threads(1)


topology = runs("topology")


def test_show_tells_the_facts_and_draws_them(topology: Run, tmp_path: Path) -> None:
    result = topology("show", "networkx:karate_club_graph", "-o", "club")
    assert result.code == 0
    known = facts(build(nx.karate_club_graph()))
    assert f"{known.gap:.6g}" in result.out
    assert "1: 0–11" in result.out  # the only bridge
    record = json.loads((tmp_path / "club/topology.json").read_text())
    assert record["facts"]["exchanges"] == known.exchanges
    assert set(record["groups"]) == {"Mr. Hi", "Officer"}
    assert len(record["links"]) == 78
    for name in ("topology.png", "topology.svg"):
        assert (tmp_path / "club" / name).stat().st_size > 5000


def test_show_of_a_config_lists_every_partial_model(topology: Run, tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(
        'name = "two"\npeers = 6\ntopology = "ring"\n[data]\nsamples = 5\n'
        '[network]\nlayout = "64=4=10"\n'
        '[[models]]\nname = "all"\nlayout = "64-4-0"\n'
        '[[models]]\nname = "half"\nlayout = "0-0-10"\npeers = 3\n'
    )
    result = topology("show", "two.toml", "-o", "two")
    assert result.code == 0
    assert "each partial model on its own subgraph" in result.out
    record = json.loads((tmp_path / "two/topology.json").read_text())
    assert record["groups"] == ["half"] * 3 + ["no group"] * 3


def test_show_of_a_schedule_is_about_its_period(topology: Run) -> None:
    result = topology("show", "one-peer-exponential", "--peers", "8")
    assert result.code == 0
    assert "exact after one period" in result.out
    assert "3 steps" in result.out


def test_show_of_many_peers_has_a_summary(topology: Run, tmp_path: Path) -> None:
    assert topology("show", "regular:3", "--peers", "1000", "-o", "many").code == 0
    words = (tmp_path / "many/topology.svg").read_text()
    for word in ("links per peer", "disagreement", "more than 64 peers are not numbered"):
        assert word in words


def test_compare_predicts_measures_and_learns(topology: Run, tmp_path: Path) -> None:
    names = ["ring", "torus", "one-peer-exponential"]
    result = topology("compare", *names, "--peers", "16", "--rounds", "12", "-o", "c")
    assert result.code == 0
    record = json.loads((tmp_path / "c/compare.json").read_text())
    found = {graph["name"]: graph for graph in record["graphs"]}
    assert list(found) == names
    for graph in found.values():
        assert graph["name"] in result.out
        assert graph["learning"][-1]["megabytes"] <= record["budget_bytes"] / 1e6 * 1.0001
        assert graph["measured"] <= graph["predicted"]
    assert np.log(found["ring"]["measured_rate"]) == pytest.approx(
        np.log(found["ring"]["rate"]), rel=0.05
    )
    assert found["one-peer-exponential"]["measured"] == 4
    assert found["ring"]["messages_per_exchange"] == 32
    last = {name: graph["learning"][-1]["accuracy"] for name, graph in found.items()}
    assert last["ring"] < last["one-peer-exponential"]  # who mixes badly knows less
    assert (tmp_path / "c/compare.png").stat().st_size > 5000


def test_compare_without_learning(topology: Run, tmp_path: Path) -> None:
    result = topology("compare", "ring", "clique", "--peers", "6", "--no-learn", "-o", "c")
    assert result.code == 0
    assert "accuracy" not in result.out
    assert (tmp_path / "c/compare.svg").exists()


def test_stress_says_what_breaks_first(topology: Run, tmp_path: Path) -> None:
    result = topology("stress", "clusters:2:1", "--peers", "12", "-o", "s")
    assert result.code == 0
    assert (
        "Splits first by losing the worst links: 1 link of 31 splits the swarm: without "
        in result.out
    )
    record = json.loads((tmp_path / "s/stress.json").read_text())
    assert [(loss["how"], loss["kind"]) for loss in record["losses"]] == [
        ("random", "peers"),
        ("worst", "peers"),
        ("random", "links"),
        ("worst", "links"),
    ]
    assert record["losses"][3]["first_split"] == 1 / 31
    factors = {slow["trouble"]: slow["factor"] for slow in record["slowdowns"]}
    assert factors["links delayed by up to 4"] > factors["links delayed by up to 1"] > 1
    assert (tmp_path / "s/stress.png").stat().st_size > 5000


def test_advise_ranks_with_reasons(topology: Run, tmp_path: Path) -> None:
    result = topology("advise", "--peers", "32", "--degree", "5", "--groups", "4", "-o", "a")
    assert result.code == 0
    record = json.loads((tmp_path / "a/advice.json").read_text())
    best = record["ranked"][0]["topology"]
    assert f'in a config: topology = "{best}"' in result.out
    assert f"{best}: {record['ranked'][0]['reason']}" in result.out
    assert "not clique: its busiest peer has 31 links, the limit is 5" in result.out
    assert (tmp_path / "a/advice.png").stat().st_size > 5000


def test_a_graph_in_parts_is_bridged_on_request(topology: Run, tmp_path: Path) -> None:
    (tmp_path / "parts.edges").write_text("0 1\n1 2\n3 4\n5 6\n")
    result = topology("show", "parts.edges")
    assert (result.code, result.out) == (2, "")
    assert "parts.edges is not connected: 3 components: {0, 1, 2}; {3, 4}; {5, 6}" in result.err
    assert "--bridge" in result.err
    result = topology("show", "parts.edges", "--bridge", "-o", "p")
    assert result.code == 0
    assert "bridged: 2 links added" in result.out
    assert len(json.loads((tmp_path / "p/topology.json").read_text())["added"]) == 2


FILES = {
    "loop.edges": "0 1\n1 1\n",
    "torn.edges": "0 1\n2 3\n",
    "broken.graphml": "<graphml>\n<oops\n",
    "heavy.edges": "0 1 0.7\n1 2 0.6\n",
    "small.csv": "0,1,1\n1,0,1\n1,1,0\n",
    "two.toml": "peers = 3\n[data]\nsamples = 10\n",
    "odd.json": '{"nodes": [\n}',
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "torn.edges"), r"torn.edges is not connected: 2 components: {0, 1}; {2, 3}"),
        (("show", "loop.edges"), "loop.edges, line 2: '1 1': a self-loop; remove it"),
        (
            ("show", "heavy.edges", "--weights", "edges"),
            "peer 1 sends away 1.3 of its mass: the weights of its edges must sum to at most 1",
        ),
        (("show", "ring", "--group", "club"), "ring: no peer has the attribute 'club'"),
        (("show", "two.toml", "--peers", "5"), "two.toml: has 3 peers, not 5"),
        (
            ("show", "networkx:_cycle_graph"),
            "no function or class '_cycle_graph'; did you mean 'cycle",
        ),
        (("show", "small.csv", "--peers", "5"), "fewer peers than the swarm: 3, not 5"),
        (("show", "broken.graphml"), "broken.graphml, line 2: not XML"),
        (("show", "odd.json"), "odd.json, line 2: not JSON"),
        (("show", "none.graphml"), "none.graphml: there is no such file"),
        (("show", "regulr:4"), "unknown topology 'regulr': did you mean 'regular'?"),
        (("show", "regulr:x"), "unknown topology 'regulr': did you mean 'regular'?"),
        (("show", "no_such_module:graph"), "there is no module 'no_such_module' in "),
        (("show", "ring", "--rule", "even"), "--rule 'even': use push, metropolis"),
        (("show", "ring", "--tolerance", "2"), "--tolerance 2: give a number between 0 and 1"),
        (("compare", "ring", "small.csv"), "ring has 16, small.csv has 3 peers"),
        (("compare", "ring", "ring"), "the same graph was named twice"),
        (("compare", *["ring"] * 9), "9 graphs: compare at most 8 at once"),
        (
            ("stress", "rotating-rings"),
            "rotating-rings changes over time: stress takes only a fixed graph",
        ),
        (
            ("stress", "regular:4", "--peers", "3000"),
            "3000 peers: stress takes at most 2000",
        ),
        (("advise", "--peers", "9", "--groups", "2,3"), "sizes sum to 5, not to 9 peers"),
        (("advise", "--peers", "9", "--groups", "x"), "--groups 'x': give a number of groups"),
        (("advise", "--peers", "9", "--groups", "7"), "--groups 7: 9 peers form 1 … 4 groups"),
        (("advise", "--peers", "1"), "at least 2 peers, not 1"),
        (
            ("advise", "--graph", "ring", "--hostile", "1", "--degree", "4", "--out", "a"),
            "--degree, --out: without effect with --graph and --hostile, which only print links",
        ),
        (
            ("compare", "ring", "clique", "--no-learn", "--megabytes", "1"),
            "--megabytes is for training, which --no-learn leaves out",
        ),
        (("compare", "ring", "torus", "--megabytes", "nan"), "--megabytes nan: give a positive"),
        (
            ("advise", "--peers", "9", "--kilobytes", "nan"),
            "--kilobytes nan: give a positive number",
        ),
    ],
)
def test_bad_input_is_one_line(
    topology: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    result = topology(*arguments)
    assert (result.code, result.out) == (2, "")
    assert message in " ".join(result.err.replace("\n", " ").split())
    assert "Traceback" not in result.err
    assert not (tmp_path / "results").exists()


SCRIPT = Path(__file__).parents[2] / "docs/examples/florentine.py"


def test_thirty_lines_load_a_public_graph_run_a_swarm_and_draw_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for line in SCRIPT.read_text("utf-8").splitlines() if line.strip()]
    assert len(lines) <= 30
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert "Medici" in printed
    rounds = [line.split() for line in printed.splitlines() if line[0].isdigit()][1:]
    assert [index for index, _ in rounds] == ["10", "20", "30", "40"]
    accuracy = [float(value) for _, value in rounds]
    assert accuracy[-1] > accuracy[0]
    assert accuracy[-1] > 0.5
    assert (tmp_path / "results/florentine/topology.png").stat().st_size > 5000


def test_the_benchmark_measures_what_it_names() -> None:
    for what in ("show", "facts"):
        seconds, peak = measure_graph(what, 60)
        assert seconds > 0
        assert peak > 1e6
    assert (SIZES[0], SIZES[-1]) == (1000, 100_000)


def test_links_to_withstand_hostile_neighbours_are_named(topology: Run) -> None:
    result = topology("advise", "--graph", "ring", "--peers", "8", "--hostile", "1")
    assert "8 links to give every peer 4 neighbours: 0" in " ".join(result.out.split())
    assert "no link is needed" in topology("advise", "--graph", "regular:4", "--hostile", "1").out
    result = topology("advise", "--hostile", "1")
    assert "--graph and --hostile belong together" in result.err
    graph = nx.cycle_graph(8)
    links = links_to_add(graph, {"": range(8)}, 4)
    graph.add_edges_from(links)
    assert min(degree for _, degree in graph.degree) == 4
    assert len(links) == 8
    assert sorted(links_to_add(nx.cycle_graph(8), {"few": range(4)}, 4)) == [(0, 2), (0, 3), (1, 3)]
    result = topology("advise", "--graph", "ring", "--peers", "4", "--hostile", "1")
    assert "4 peers cannot have 4 neighbours each; let 5 or more take part" in result.err
