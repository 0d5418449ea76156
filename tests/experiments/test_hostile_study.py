"""The study of hostile members, at a small size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cli_kit import runs

from gossamer.experiments.papers.hostile import (
    ATTACKS,
    CLEAN,
    HostileRun,
    forge_value,
    graph_of,
    hostile_peers,
    hostile_tables,
    run_hostile,
)
from gossamer.experiments.study import Job

JOB = Job(Path())
study = runs("study")
SMALL = {"peers": 12, "hostile": 1, "rounds": 8}


def accuracy(attack: str, rule: str) -> float:
    return run_hostile(HostileRun(attack, rule, 0, **SMALL), JOB)["accuracy"]


def test_an_attack_that_ruins_push_sum_costs_steady_gossip_little():
    clean = accuracy(CLEAN, "steady")
    assert accuracy("1e30", "steady") > clean - 0.05
    assert accuracy("dissensus", "steady") > clean - 0.1
    assert accuracy("1e30", "push-sum") < clean - 0.2


@pytest.mark.parametrize("rule", ["clipped", "trimmed"])
def test_robust_means_in_lockstep_withstand_huge_values(rule):
    assert accuracy("1e30", rule) > accuracy(CLEAN, rule) - 0.1


def test_hostile_members_are_apart_and_everybody_has_four_links():
    for seed in range(3):
        cell = HostileRun(CLEAN, "steady", seed)
        graph = graph_of(cell)
        chosen = hostile_peers(cell, graph)
        assert len(chosen) == 3
        assert max(len({*graph[peer]} & {*chosen}) for peer in graph if peer not in chosen) == 1
    karate = graph_of(HostileRun(CLEAN, "steady", 0, graph="karate", peers=34))
    assert min(degree for _, degree in karate.degree) == 4
    hub = hostile_peers(
        HostileRun(CLEAN, "steady", 0, graph="karate", peers=34, place="hub"), karate
    )
    assert karate.degree[hub[0]] == max(degree for _, degree in karate.degree)


def test_an_adaptive_attack_sends_what_moves_the_receiver_most():
    class Scene:
        def __init__(self):
            self.graph, self.hostile = {0: [1, 2], 1: [0], 2: [0]}, [2]
            self.starts = [np.zeros(2)] * 3

        def value(self, peer):
            return np.array([0.0, 1.0]) if peer else np.zeros(2)

    def respond(value):
        return value if np.linalg.norm(value) <= 1 else None  # what is far is void

    scene = Scene()
    sent = forge_value("shared noise", scene, 2, 0, respond)
    assert np.linalg.norm(sent) == pytest.approx(1.0)
    assert np.linalg.norm(forge_value("shared noise", scene, 2, 0, None)) == pytest.approx(5.0)


def test_the_table_has_a_row_for_every_attack():
    records = [
        {"attack": attack, "rule": rule, "setting": "digits", "accuracy": 0.9, "worst": 0.8}
        for attack in (CLEAN, *ATTACKS)
        for rule in ("steady", "push-sum")
        for _ in range(2)
    ]
    other = {"attack": CLEAN, "rule": "steady", "setting": "MNIST", "accuracy": 0.7, "worst": 0.6}
    tables = hostile_tables([*records, other])
    assert tables["elsewhere"].to_numpy().tolist() == [["MNIST", CLEAN, "0.700", "0.600"]]
    shown = tables["summary"]
    assert [*shown["attack"]] == [CLEAN, *ATTACKS]
    assert [*shown.columns] == ["attack", "steady", "steady, worst", "push-sum", "push-sum, worst"]
    assert shown.iloc[0].tolist() == [CLEAN, "0.900", "0.800", "0.900", "0.800"]


def test_the_study_is_shown_and_written(study, tmp_path):
    result = study("hostile", "--quick", "--on", "local:1", "--only", CLEAN, "-o", "out")
    assert "3 of 16 peers hostile" in result.out
    assert CLEAN in (tmp_path / "out" / "summary.csv").read_text()
    assert (tmp_path / "out" / "hostile.png").exists()
