"""The study of swarms that decide what to share: its schemes, its benchmarks and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.experiments.papers import STUDIES
from gossamer.experiments.papers.sharing import (
    AUTO,
    BENCHMARKS,
    BY_HAND,
    FIXED_SCHEMES,
    PEERS,
    Cell,
    draw,
    fixed_assignment,
    make_learners,
    run_cell,
    table,
)
from gossamer.experiments.study import Job

torch.set_num_threads(1)
JOB = Job(Path())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_gives_each_peer_samples_and_tests(name: str) -> None:
    benchmark = BENCHMARKS[name]
    swarm = benchmark.make(3, benchmark.samples, True)
    assert len(swarm.train) == len(swarm.test) == PEERS
    assert all(len(x) == len(y) > 0 for x, y in (*swarm.train, *swarm.test))
    again = benchmark.make(3, benchmark.samples, True)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(swarm.train, again.train, strict=True))


def test_swapped_peers_differ_from_the_others_in_two_labels_only() -> None:
    swarm, plain = (BENCHMARKS[name].make(0, 80, True) for name in ("a", "c"))
    assert swarm.groups is not None
    assert sum(swarm.groups) == 7
    for group, (_, labels), (_, before) in zip(swarm.groups, swarm.train, plain.train, strict=True):
        changed = {int(label) for label in before[labels != before]}
        assert changed == ({8, 9} if group else set())


def test_fixed_schemes_share_what_their_names_say() -> None:
    benchmark = BENCHMARKS["hi"]
    swarm = benchmark.make(0, 50, True)
    networks = [learner.network for learner in make_learners(swarm, benchmark.network, 0)]
    size = networks[0].slicing.anatomy.size
    values = {
        scheme: fixed_assignment(scheme, benchmark, networks, swarm.groups).distinct_values
        for scheme in (*FIXED_SCHEMES, BY_HAND)
    }
    assert values["all shared"] == size
    assert values["local"] == PEERS * size
    assert values["outputs own"] == size + (PEERS - 1) * (30 * 10 + 10)
    assert values["norms own"] == size + (PEERS - 1) * 4 * (60 + 30)
    assert values[BY_HAND] == size + 64 * 60 + 4 * (60 + 30), "two groups for inputs and norms"


def test_the_deep_network_learns_from_images_half_of_which_are_inverted() -> None:
    benchmark = BENCHMARKS["hi, deep"]
    deep, flat = benchmark.make(0, 20, True), BENCHMARKS["hi"].make(0, 20, True)
    assert deep.groups == flat.groups
    for (images, _), (values, _) in zip(deep.train, flat.train, strict=True):
        assert torch.equal(images.flatten(1), values)
    networks = [learner.network for learner in make_learners(deep, benchmark.network, 0)]
    by_hand = fixed_assignment(BY_HAND, benchmark, networks, deep.groups)
    assert len(by_hand.anatomy.parts) >= 8
    norms = [one for one in networks[0].module.modules() if isinstance(one, nn.BatchNorm2d)]
    in_norms = 4 * sum(norm.num_features for norm in norms)
    assert by_hand.distinct_values == by_hand.anatomy.size + 9 * 6 + in_norms, (
        "first part and norms"
    )


@pytest.mark.parametrize("scheme", ["outputs own", AUTO])
def test_a_run_records_accuracies_and_changes_labels_midway(scheme: str) -> None:
    record = run_cell(Cell(scheme, "drift", 0, True, rounds=6), JOB)
    assert len(record["by_round"]) == 6
    assert record["accuracy"] == pytest.approx(np.mean(record["by_round"][-5:]))
    assert record["scheme"] == scheme


def record(scheme: str, seed: int, accuracy: float, **more: Any) -> dict[str, Any]:
    return {
        "benchmark": "a", "scheme": scheme, "seed": seed, "accuracy": accuracy, "by_round": [accuracy],
        "decisions": [], "rand": 1.0, **more,
    }  # fmt: skip


def test_the_table_compares_with_the_fixed_scheme_of_the_best_mean(tmp_path: Path) -> None:
    records = [
        record("local", 0, 0.9), record("local", 1, 0.5),
        record("all shared", 0, 0.8), record("all shared", 1, 0.8),
        record(BY_HAND, 0, 0.99), record(BY_HAND, 1, 0.99),
        record(AUTO, 0, 0.85, decisions=["round 5: outputs: all cells own"]), record(AUTO, 1, 0.79),
    ]  # fmt: skip
    tables = table(records)
    row = tables["summary"].iloc[0]
    assert row["best fixed"] == "all shared"
    assert row["auto − best"] == "+0.020"
    assert row["above"] == "1 of 2"
    assert list(tables["decisions"]["decision"]) == [
        "round 5: outputs: all cells own",
        "nothing was made own",
    ]
    assert all(path.stat().st_size > 0 for path in draw(tmp_path, records))


def test_the_study_has_every_scheme_on_every_benchmark() -> None:
    study = STUDIES["auto"].study(runs=2)
    seen = {(cell.benchmark, cell.line) for cell in study.cells}
    assert {name for name, _ in seen} == set(BENCHMARKS)
    assert ("hi", "norms own") in seen
    assert ("a", "norms own") not in seen, "no norms there"
    assert {cell.seed for cell in study.cells} == {0, 1}
