"""The study of hostile members, at a small size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cli_kit import runs
from torch import nn

from gossamer.experiments.papers.hostile import (
    ALONE,
    ATTACKS,
    CLEAN,
    HostileRun,
    forge_value,
    graph_of,
    hostile_peers,
    hostile_tables,
    learners_of,
    run_hostile,
)
from gossamer.experiments.results import Record
from gossamer.experiments.study import Job
from gossamer.models import SgdLearner, SlicedNetwork, mlp

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


def record(attack: str, rule: str, accuracy: float, worst: float, **fields: object) -> Record:
    told = {"attack": attack, "rule": rule, "accuracy": accuracy, "worst": worst}
    return {"setting": "digits", "seed": 0, "cut off": 0, **told, **fields}


def test_the_table_has_a_row_for_every_attack():
    records = [
        record(attack, rule, 0.9, 0.8, seed=seed)
        for attack in (CLEAN, *ATTACKS)
        for rule in ("steady", "push-sum")
        for seed in range(2)
    ]
    shown = hostile_tables(records)["summary"]
    assert [*shown["attack"]] == [CLEAN, *ATTACKS]
    assert [*shown.columns] == ["attack", "steady", "steady, worst", "push-sum", "push-sum, worst"]
    assert shown.iloc[0].tolist() == [CLEAN, "0.900", "0.800", "0.900", "0.800"]


def test_costs_are_against_the_clean_run_of_the_same_seed_and_setting():
    tables = hostile_tables(
        [
            record(CLEAN, "steady", 0.90, 0.88),
            record(CLEAN, "steady", 0.80, 0.78, seed=1),
            record("spam", "steady", 0.88, 0.85),
            record("spam", "steady", 0.76, 0.71, seed=1),
            record(CLEAN, "steady", 0.70, 0.60, setting="MNIST"),
            record("spam", "steady", 0.65, 0.55, setting="MNIST"),
        ]
    )
    rows = [row for row in tables["costs"].to_numpy().tolist() if row[1] == "spam"]
    assert rows == [
        ["digits", "spam", "2", "0.820", "0.780", "0.030", "0.010", "0.070", "0.090"],
        ["MNIST", "spam", "1", "0.650", "0.550", "0.050", "", "0.150", "0.150"],
    ]


def test_bars_are_held_or_not():
    records = [
        record(CLEAN, "push-sum", 0.905, 0.9),
        record(CLEAN, "steady", 0.90, 0.88),
        record("spam", "steady", 0.88, 0.85, **{"cut off": 1}),
        record("rejoin", "steady", 0.86, 0.83),
    ]
    rows = {row[0]: row[1:] for row in hostile_tables(records)["bars"].to_numpy().tolist()}
    assert rows["without attack: cost against push-sum"] == ["0.005", "0.010", "yes", "one seed"]
    cost = rows["digits: mean cost of the worst attack"]
    assert cost == ["0.040", "0.030", "no", "rejoin"]
    assert rows["digits: worst peer below the clean mean, any seed"][2] == "yes"
    assert rows["pairs of honest neighbours cut off, all runs"][2] == "no"
    assert not any(what.startswith("MNIST") for what in rows), "MNIST was not run"


def test_no_honest_neighbour_is_cut_off_by_an_attack():
    assert (
        run_hostile(HostileRun("dissensus", "steady", 0, **SMALL | {"rounds": 14}), JOB)["cut off"]
        == 0
    )


def test_who_takes_no_part_has_no_influence():
    alone = run_hostile(HostileRun(ALONE, "push-sum", 0, **SMALL), JOB)
    assert alone["accuracy"] > accuracy("1e30", "push-sum") + 0.2
    records = [
        record(line, rule, mean, worst)
        for line, rule, mean, worst in (
            (CLEAN, "steady", 0.9, 0.8),
            (ALONE, "steady", 0.8, 0.7),
            (CLEAN, "push-sum", 0.7, 0.6),
            (ALONE, "push-sum", 0.6, 0.5),
            ("spam", "steady", 0.85, 0.75),
        )
    ]
    tables = hostile_tables(records)
    assert tables["controls"].to_numpy().tolist() == [
        ["digits", "0.700", "0.600", "0.600", "0.500", "0.900", "0.800", "0.800", "0.700"]
    ]
    bars = {row[0]: row[1] for row in tables["bars"].to_numpy().tolist()}
    assert bars["digits: mean cost of the worst attack"] == "0.050", "taking no part is no attack"


def test_slow_peers_train_less_often():
    run = run_hostile(HostileRun(CLEAN, "steady", 0, pace=4, **SMALL), JOB)
    assert 0 < run["slow"] < 1


@pytest.mark.parametrize(("count", "trained"), [(50, 50), (100, 90)])
def test_the_small_learner_trains_and_scores_as_one_in_torch(count, trained):
    # With 50 samples values are scored with training samples, with 100 by a tenth that is set aside.
    cell = HostileRun(CLEAN, "steady", 0, data=f"digits:{count}", peers=8, alpha=0.5)
    small = learners_of(cell)[0]
    samples = torch.tensor(small.samples[0]), torch.tensor(small.samples[1])
    scored = torch.tensor(small.scored[0]), torch.tensor(small.scored[1])
    assert (len(scored[1]), len(samples[1])) == (count - trained, trained)
    network = SlicedNetwork(mlp("64=32=10", activation="relu"), {"global": "64-32-10"}, seed=0)
    learner = SgdLearner(network, samples, samples, log_prior=torch.tensor(small.log_prior))
    learner.scored = scored
    for value in (small.value, small.value + 0.1):
        small.write("global", value)
        nn.utils.vector_to_parameters(torch.tensor(value), network.module.parameters())
        assert small.score("global", None) == pytest.approx(learner.score({}), rel=1e-4)
        loss = learner.losses(network.module(samples[0]), samples[1]).mean()
        gradients = torch.autograd.grad(loss, [*network.module.parameters()])
        expected = nn.utils.parameters_to_vector(gradients)
        assert torch.tensor(small.gradient(*small.samples)).allclose(expected, atol=1e-5)


def test_the_study_is_shown_and_written(study, tmp_path):
    result = study("hostile", "--quick", "--on", "local:1", "--only", CLEAN, "-o", "out")
    assert "3 of 16 peers hostile" in result.out
    assert CLEAN in (tmp_path / "out" / "summary.csv").read_text()
    assert (tmp_path / "out" / "hostile.png").exists()
