"""Mistakes of newcomers: each is one sentence that says what was wrong, where, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from cli_kit import Result, Run, runner

from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.federated.comparison import coverage, parse_comparison
from gossamer.experiments.live.run import SCHEMES, demo_config
from gossamer.experiments.results import make_folder, require_folder
from gossamer.topology import TopologyError, build

torch.set_num_threads(1)

TINY = """
name = "tiny"
peers = 2
rounds = 1
[data]
samples = 10
test = 20
[network]
layout = "64=4=10"
"""
PEER = 'name = "anna"\nentry = "{}"\nrounds = 1\n'


@pytest.fixture
def gossamer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs the command in this process, in a folder with a config, a file and a folder."""
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "afile").write_text("ordinary")
    (tmp_path / "adir").mkdir()
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    return runner(tmp_path, monkeypatch, capsys)


def refused(result: Result, *words: str) -> None:
    """One line on stderr, with these words, and nothing that was done before."""
    assert result.code == 2
    (line,) = result.err.strip().splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert "wrote" not in result.out


# --- a comparison that was stopped ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "planned", "words"),
    [
        ({"a": 3, "b": 3}, 6, "3 seeds"),
        ({"a": 1}, 1, "1 seed"),
        ({"a": 3, "b": 2}, 6, "2 to 3 seeds; 5 of 6 runs"),
        ({"a": 1}, 6, "1 seed; 1 of 6 runs"),
        ({"a": 2, "b": 1}, None, "1 to 2 seeds"),
    ],
)
def test_a_caption_counts_the_seeds_that_there_are(
    runs: dict[str, int], planned: int | None, words: str
) -> None:
    records = [{"method": m, "seed": seed} for m, count in runs.items() for seed in range(count)]
    assert coverage(records, planned) == words


# --- where results go ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["topology", "show", "ring", "--out", "afile"],
        ["topology", "compare", "ring", "torus", "--no-learn", "--out", "afile"],
        ["topology", "stress", "ring", "--out", "afile"],
        ["topology", "advise", "--peers", "8", "--out", "afile"],
        ["slices", "64=8=10", "--out", "afile"],
        ["slices", "64=8=10", "--out", "afile/deep/er"],
        ["swarm", "tiny.toml", "--out", "afile"],
        ["demo", "--out", "afile"],
        ["virtual", "--peers", "8", "--out", "afile"],
        ["study", "private", "--out", "afile"],
        ["paper", "claims", "--out", "afile"],
        ["keygen", "anna", "--out", "afile/x"],
        ["enrol", "anna", "--swarm", "garden", "--broker", "mqtt://127.0.0.1", "--folder", "afile"],
        ["broker", "--tls", "afile"],
    ],
    ids=" ".join,
)
def test_a_file_in_the_place_of_a_folder_is_refused_before_the_work(
    gossamer: Run, tmp_path: Path, command: list[str]
) -> None:
    result = gossamer(*command)
    refused(result, "afile", "cannot be a folder: afile is a file")
    assert result.out == ""
    assert (tmp_path / "afile").read_text() == "ordinary"


def test_a_file_that_cannot_be_written_is_named(gossamer: Run) -> None:
    refused(gossamer("new", "garden", "--folder", "/dev/null/x"), "/dev/null")


def test_join_refuses_a_file_in_the_place_of_a_folder(gossamer: Run, tmp_path: Path) -> None:
    (tmp_path / "anna.toml").write_text(PEER.format("no_such_module:make"))
    address = ("--broker", "mqtt://127.0.0.1:1", "--swarm", "garden")
    refused(gossamer("join", *address, "--config", "anna.toml", "-o", "afile"), "afile is a file")


def test_a_folder_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("kept")
    assert make_folder(tmp_path / "out") == tmp_path / "out"
    assert not require_folder(tmp_path / "a" / "b").exists()
    assert make_folder(tmp_path / "a" / "b").is_dir()
    assert (tmp_path / "out" / "old").read_text() == "kept"


@pytest.mark.parametrize("name", ["../../x", "", "a/b c", "..", ".", "two words", "x" * 65])
@pytest.mark.parametrize("parse", [parse_config, parse_comparison])
def test_a_name_that_is_no_folders_is_refused(parse: Callable[..., Any], name: str) -> None:
    with pytest.raises(ConfigError, match=r"some.toml: key 'name': the config's own name"):
        parse({"name": name}, "some.toml")


def test_names_of_configs_that_may_be() -> None:
    assert parse_config({"name": "my.swarm_2-b"}).name == "my.swarm_2-b"
    assert len({demo_config(scheme).name for scheme in SCHEMES}) == len(SCHEMES)


# --- the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--port", "--websockets"])
@pytest.mark.parametrize("port", ["80000", "-1"])
def test_a_port_that_cannot_be_is_refused(gossamer: Run, option: str, port: str) -> None:
    result = gossamer("broker", f"{option}={port}")
    assert result.code == 2
    assert option in result.err
    assert f"Invalid value for '{option}'" in result.err


@pytest.mark.parametrize("command", ["show", "stress", "compare"])
def test_one_peer_is_no_swarm(gossamer: Run, command: str) -> None:
    result = gossamer("topology", command, "ring", "--peers", "1")
    refused(result, "ring", "at least 2 peers, not 1")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("adir", "cannot be read: Is a directory"),
        ("binary.toml", "cannot be read: it is not text in UTF-8"),
        ("none.toml", "there is no such file"),
    ],
)
def test_a_peers_file_that_cannot_be_read(gossamer: Run, file: str, words: str) -> None:
    address = ("--broker", "mqtt://127.0.0.1:1", "--swarm", "garden")
    refused(gossamer("join", *address, "--config", file), f"{file}: {words}")


def test_a_swarms_config_is_no_file_of_a_device(gossamer: Run) -> None:
    address = ("--broker", "mqtt://127.0.0.1:1", "--swarm", "garden")
    result = gossamer("join", *address, "--config", "tiny.toml")
    refused(result, "tiny.toml: has 'peers'", 'config = "tiny.toml"', "index = 0")


def test_what_a_users_graph_function_raises_is_told_as_its_own(
    gossamer: Run, tmp_path: Path
) -> None:
    (tmp_path / "mistaken_graphs.py").write_text(
        "def helper(table):\n    return table['sensor']\n\ndef boom(peers):\n    return helper({})\n"
    )
    refused(
        gossamer("topology", "show", "mistaken_graphs:boom", "--peers", "4"),
        "mistaken_graphs:boom raised KeyError: 'sensor', at ",
        "mistaken_graphs.py:2",
    )


def test_what_a_users_network_function_raises_is_told_as_its_own(
    gossamer: Run, tmp_path: Path
) -> None:
    (tmp_path / "mistaken_nets.py").write_text("def boom():\n    return {}['layer']\n")
    refused(
        gossamer("slices", "mistaken_nets:boom"),
        "mistaken_nets:boom raised KeyError: 'layer', at ",
        "mistaken_nets.py:2",
    )


def test_what_a_users_module_does_when_it_is_imported(gossamer: Run, tmp_path: Path) -> None:
    (tmp_path / "mistaken_import.py").write_text("ready = 1 / 0\n")
    refused(
        gossamer("topology", "show", "mistaken_import:graph"),
        "mistaken_import raised ZeroDivisionError: division by zero, at ",
        "mistaken_import.py:1",
    )


# --- graphs ----------------------------------------------------------------------------------------


def test_a_graph_with_names_is_told_by_them(gossamer: Run, tmp_path: Path) -> None:
    graph = nx.relabel_nodes(nx.path_graph(3), {0: "ann", 1: "ben", 2: "cas"})
    nx.write_graphml(graph, tmp_path / "named.graphml")
    shown = gossamer("topology", "show", "named.graphml")
    assert "2: ann–ben, ben–cas" in shown.out
    assert re.search(r"cut peers +1: ben", shown.out)


@pytest.mark.parametrize("weight", [-3.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused(tmp_path: Path, weight: float) -> None:
    graph = nx.path_graph(3)
    nx.set_edge_attributes(graph, {(0, 1): weight, (1, 2): 1.0}, "weight")
    nx.write_graphml(graph, tmp_path / "bad.graphml")
    for source in (graph, tmp_path / "bad.graphml"):
        with pytest.raises(TopologyError, match=rf"link 0–1 has the weight {weight:g}, not a fin"):
            build(source)


# --- texts that point the right way ----------------------------------------------------------------


def test_a_layout_that_does_not_fit_the_data_is_what_is_blamed(
    gossamer: Run, tmp_path: Path
) -> None:
    (tmp_path / "inputs.toml").write_text(
        TINY.replace("64=4=10", "63=4=10") + '[[models]]\nname = "global"\nlayout = "64-4-0"\n'
    )
    refused(gossamer("simulate", "inputs.toml"), "'network.layout'", "63 cells", "64 features")


def test_a_config_of_the_other_kind_is_recognised(gossamer: Run, tmp_path: Path) -> None:
    (tmp_path / "swarm.toml").write_text(TINY + '[[models]]\nname = "a"\nlayout = "64-4-0"\n')
    refused(gossamer("compare", "swarm.toml"), "swarm.toml", "swarm's config", "gossamer simulate")
    (tmp_path / "both.toml").write_text(TINY + "[methods.fedavg]\n")
    refused(gossamer("simulate", "both.toml"), "both.toml", "comparison's config", "compare")


def test_a_config_without_keys_says_so(gossamer: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    said = (
        "sets no keys, so the defaults are used: 16 peers with network 64=32=10 on data set digits"
    )
    assert f"empty.toml: {said}" in gossamer("simulate", "empty.toml", "--show-settings").err
    assert said not in gossamer("simulate", "tiny.toml", "--show-settings").err


# --- clusters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["broker", "--cluster", "2"], "a cluster of 2 nodes: use 3 or 5"),
        (["broker", "--cluster", "3", "--kind", "mosquitto"], "--cluster runs nats-servers"),
        (["broker", "--cluster", "3", "--tls", "certificates"], "use gossamer broker config"),
        (["broker", "--cluster", "3", "--swarm", "garden"], "leave --swarm out"),
        (
            ["broker", "config", "--nodes", "a,b", "--swarm", "s", "--peer", "anna@x"],
            "--nodes a,b: give 3 or 5 different hosts",
        ),
        (
            ["swarm", "tiny.toml", "--broker", "mqtt://a,mqtts://b"],
            "mqtts://b:8883 uses TLS and mqtt://a:1883 does not",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_cluster_that_cannot_be_is_refused(gossamer: Run, command: list[str], words: str) -> None:
    refused(gossamer(*command), words)
