"""Figures for Prometheus: read by its own parser, named by its conventions, and the same as status shows."""

from __future__ import annotations

import math
import re
import urllib.request
from pathlib import Path

import pytest
from test_observer import NOW, Told, summary

from gossamer.peer.exits import ExitCode, PeerError
from gossamer.peer.monitoring import (
    PROBLEMS,
    find_problems,
    serve_metrics,
    serve_swarm_metrics,
    summary_families,
)
from gossamer.peer.summary import ModelSummary, read_summary

pytest.importorskip("prometheus_client")
yaml = pytest.importorskip("yaml")
from prometheus_client import parser  # noqa: E402


def read(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """What the server says: by name, the values by their labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    figures: dict[str, dict[tuple[str, ...], float]] = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels.pop("swarm") == "nest"
            names = sorted(sample.labels, key=lambda name: (name != "peer", name))
            labels = tuple(sample.labels[name] for name in names)
            figures.setdefault(sample.name, {})[labels] = sample.value
            kind = "counter" if sample.name.endswith("_total") else "gauge"
            assert family.type == kind, sample.name
    return figures


def told_swarm() -> Told:
    told = Told()
    told.come()
    model = ModelSummary(True, 3, 1, 1, 0.25, 1.5)
    told.tell(
        "summary",
        summary(
            models={"global": model}, metrics={"accuracy": 0.5, "loss": None}, neighbours=("eve",),
            neighbour_count=1, sent_bytes=10, sent_packets=2, received_bytes=30, received_packets=4,
        ),
    )  # fmt: skip
    told.come(peer="eve")
    told.tell("status", b"x", peer="eve")
    return told


def test_a_swarm_is_served_as_its_parser_reads_it():
    told = told_swarm()
    with serve_swarm_metrics(told.state, 0, wall=lambda: NOW) as port:
        figures = read(port)
    assert figures["gossamer_round"] == {("bob",): 3}
    assert figures["gossamer_accuracy"] == {("bob",): 0.5}
    assert math.isnan(figures["gossamer_loss"]["bob",])
    assert figures["gossamer_diverged"] == {("bob",): 1}
    assert figures["gossamer_neighbours"] == {("bob",): 1}
    assert figures["gossamer_sent_bytes_total"] == {("bob",): 10}
    assert figures["gossamer_received_bytes_total"] == {("bob",): 30}
    assert figures["gossamer_sent_packets_total"] == {("bob",): 2}
    assert figures["gossamer_weight"] == {("bob", "global"): 1.5}
    assert figures["gossamer_counts"] == {("bob", "global"): 1}
    assert figures["gossamer_disagreement_ratio"] == {("bob", "global"): 0.25}
    assert figures["gossamer_model_members"] == {("global",): 2}
    presence = figures["gossamer_peer_presence"]
    assert {labels for labels, value in presence.items() if value} == {
        ("bob", "online"), ("eve", "online"),
    }  # fmt: skip


def test_the_problems_are_those_of_status():
    told = told_swarm()
    with serve_swarm_metrics(told.state, 0, wall=lambda: NOW) as port:
        served = read(port)["gossamer_problems"]
    kinds = [problem.kind for problem in find_problems(told.state, NOW)]
    assert sorted(kinds) == ["diverged", "refused"]
    assert served == {(kind,): kinds.count(kind) for kind in PROBLEMS}


def test_a_peer_serves_its_own_summary_and_names_follow_the_conventions():
    own = read_summary(summary(metrics={"accuracy": 0.5}))
    assert own is not None
    with serve_metrics(lambda: summary_families({"bob": own}), "nest", 0) as port:
        figures = read(port)
    assert figures["gossamer_summary_timestamp_seconds"] == {("bob",): NOW}
    assert all(re.fullmatch(r"gossamer_[a-z_]+", name) for name in figures)


def test_the_alert_file_has_a_rule_for_every_problem_and_names_only_what_is_served():
    told = told_swarm()
    path = Path(__file__).parents[2] / "docs" / "alerts.yml"
    rules = [
        rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]
    ]
    with serve_swarm_metrics(told.state, 0, wall=lambda: NOW) as port:
        served = set(read(port))
    kinds: set[str] = set()
    for rule in rules:
        assert set(re.findall(r"gossamer_\w+", rule["expr"])) <= served
        for _, names in re.findall(r'kind(=~?)"([^"]+)"', rule["expr"]):
            kinds |= set(names.split("|"))
        assert rule["annotations"]["summary"]
    assert kinds == set(PROBLEMS)


def test_a_port_that_is_taken_is_one_line_after_which_systemd_tries_again():
    with (
        serve_metrics(list, "nest", 0) as port,
        pytest.raises(PeerError, match=rf"--metrics-port {port}: .*; choose another port") as error,
        serve_metrics(list, "nest", port),
    ):
        pass
    assert error.value.exit_code == ExitCode.NOT_REACHED
