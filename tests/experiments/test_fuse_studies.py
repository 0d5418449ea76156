"""Studies of matching: baselines, pairing, and a runner that goes on where it stopped."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gossamer.experiments.bench import models as bench
from gossamer.experiments.cli.fuse import accuracy, logits
from gossamer.experiments.papers import PAPERS, StudyEntry
from gossamer.experiments.papers.matching import (
    Cell,
    FigureOptions,
    differences,
    matching_study,
    mean_outcomes,
    run_cell,
)
from gossamer.experiments.papers.matching_methods import (
    METHODS,
    Outcome,
    Peers,
    Setting,
    average,
    chain_of,
    distill,
    dp_means,
    ensemble_outputs,
    magi,
    new_network,
    run_stream,
    split_data,
    train,
)
from gossamer.experiments.results import Results
from gossamer.experiments.study import Job, run_study
from gossamer.models import ModelError
from gossamer.models.matching import match

torch.set_num_threads(1)

SMALL = Setting("digits", peers=3, layers=1, width=12, alpha=0.5, epochs=2)


@pytest.fixture(scope="module")
def peers() -> Peers:
    found = Peers(SMALL)
    assert len(found.own) == 3
    return found


def test_every_sample_has_one_peer_and_the_seed_decides() -> None:
    for alpha in (None, 0.2):
        setting = replace(SMALL, alpha=alpha, peers=7)
        one, two = split_data(setting), split_data(setting)
        assert sum(len(share.y) for share in one.shares) == 1400
        assert len(one.test.y) == 397
        assert all(torch.equal(a.x, b.x) for a, b in zip(one.shares, two.shares, strict=True))
        other = split_data(replace(setting, seed=1))
        assert not torch.equal(one.shares[0].y, other.shares[0].y)
    even = split_data(replace(SMALL, alpha=None, peers=7)).counts
    assert (even.max(axis=0) - even.min(axis=0) <= 1).all()


def test_unknown_data_is_named() -> None:
    with pytest.raises(ModelError, match="'cifar' here; there are mnist-5k, digits, mnist"):
        Setting("cifar")


def test_the_answers_are_torchs(peers: Peers) -> None:
    module = new_network("64=12=10", 3)
    x = peers.split.test.x
    assert torch.allclose(logits(chain_of(module), x).float(), module(x), atol=1e-5)
    two = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    assert accuracy(two, torch.tensor([1, 1])) == 0.5
    assert accuracy(torch.tensor([[0.3], [-0.3]]), torch.tensor([1, 0])) == 1.0


def test_the_average_of_equal_networks_is_themselves(peers: Peers) -> None:
    chain = peers.own[0]
    mean = average([chain, chain], np.array([1, 3]))
    assert all(
        np.allclose(a.weight, b.weight) for a, b in zip(mean.layers, chain.layers, strict=True)
    )
    pulled = average(peers.own[:2], np.array([1.0, 3.0])).layers[0].weight
    own = [chain.layers[0].weight for chain in peers.own[:2]]
    assert np.allclose(pulled, 0.25 * own[0] + 0.75 * own[1])


def test_a_weighted_ensemble_uses_only_peers_with_samples_of_the_class(peers: Peers) -> None:
    x = peers.split.test.x[:5]
    counts = np.zeros((3, 10))
    counts[0, :5] = 1
    counts[2, 5:] = 1
    found = ensemble_outputs(peers.own, x, counts)
    each = [torch.softmax(logits(chain, x), dim=1) for chain in peers.own]
    assert torch.allclose(found[:, :5], each[0][:, :5])
    assert torch.allclose(found[:, 5:], each[2][:, 5:])
    assert torch.allclose(ensemble_outputs(peers.own, x), sum(each) / 3)  # type: ignore[arg-type]


def test_downpour_learns_with_one_exchange_per_epoch(peers: Peers) -> None:
    outcomes = {
        epochs: METHODS["downpour SGD"](Peers(replace(SMALL, alpha=None, epochs=epochs)))
        for epochs in (1, 12)
    }
    assert outcomes[12].cells == SMALL.width
    assert outcomes[12].accuracy > outcomes[1].accuracy + 0.1


def test_clusters_of_copies_are_the_network_itself(peers: Peers) -> None:
    """Three copies have a third of their cells' number of distinct ones: DP-means finds them."""
    chain = peers.own[0]
    counts = np.ones((3, 10))
    found = dp_means([chain] * 3, counts)
    x = peers.split.test.x
    assert found.widths == chain.widths
    assert torch.allclose(logits(found, x), logits(chain, x), atol=1e-6)


def test_a_distilled_network_learns_only_from_the_outputs(peers: Peers) -> None:
    """It imitates networks trained on labels that it never sees: here, wrong ones."""
    shares = peers.split.shares
    wrong = [replace_labels(share, 0) for share in shares]
    teacher = [
        chain_of(train(new_network("64=12=10", j), s, epochs=3, seed=j))
        for j, s in enumerate(wrong)
    ]
    student = distill(teacher, shares, "64=16=10", epochs=2, seed=0)
    assert (logits(student, peers.split.test.x).argmax(dim=1) == 0).double().mean() > 0.9


def replace_labels(share: Any, label: int) -> Any:
    return replace(share, y=torch.full_like(share.y, label))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "distillation"])
def test_every_method_has_an_outcome(name: str, peers: Peers) -> None:
    found = METHODS[name](peers)
    assert 0.05 < found.accuracy <= 1
    assert found.cells >= 12
    assert found.parameters >= 12 * 75
    if name.startswith(("PFNM", "MAGI")):
        assert 12 <= found.cells <= 36


def test_a_stream_gives_every_step_and_method() -> None:
    found = run_stream(replace(SMALL, epochs=1), 3)
    assert list(found) == [1, 2, 3]
    assert set(found[1]) == {"PFNM streaming", "ensemble", "weighted ensemble", "local"}
    sizes = [found[step]["PFNM streaming"].cells for step in found]
    assert sizes == sorted(sizes)  # atoms are never forgotten
    with pytest.raises(ValueError, match="one hidden layer"):
        run_stream(replace(SMALL, layers=2), 3)


def tiny(seed: int) -> list[Cell]:
    return [
        Cell(panel, x, replace(SMALL, peers=x, epochs=1, seed=seed), ("PFNM", magi(0.1)))
        for panel in ("left", "right")
        for x in (2, 3)
    ]


def test_a_study_leaves_tables_and_a_figure_for_every_panel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = StudyEntry("tiny", "nowhere", "", "Tiny")
    study = matching_study(
        entry, [cell for seed in range(2) for cell in tiny(seed)],
        x_label="peers", caption="quick", options=FigureOptions(measures=("accuracy",)),
        printed={("left", 2, "PFNM"): 50.0},
    )  # fmt: skip
    _, files = run_study(study, Results(tmp_path, "paper tiny"), on="local:1")
    names = {file.name for file in files}
    assert {"summary.csv", "differences.csv", "figure-left-accuracy.png"} <= names
    assert all(file.exists() for file in files)
    with (tmp_path / "latest" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    first = rows[0]
    assert (first["panel"], first["peers"], first["method"], first["seeds"]) == (
        "left", "2", "PFNM", "2",
    )  # fmt: skip
    assert first["accuracy, paper"] == "0.5000"
    shown = capsys.readouterr().out
    assert "paired differences" in shown
    assert "mean of 2 seeds" in (tmp_path / "latest" / "figure-left-accuracy.svg").read_text()


def record(seed: int, **accuracies: float) -> dict[str, Any]:
    return {
        "panel": "p",
        "seed": seed,
        "outcomes": [
            {"x": 1, "method": name.replace("MAGI", "MAGI λ=0.1"), "accuracy": value,
             "cells": 10 * (seed + 1), "parameters": 5}
            for name, value in accuracies.items()
        ],
    }  # fmt: skip


def test_means_and_standard_errors() -> None:
    mark = mean_outcomes([record(0, PFNM=0.6), record(1, PFNM=0.8)]).iloc[0]
    assert (mark["seeds"], mark["accuracy"], mark["cells"]) == (2, pytest.approx(0.7), 15)
    assert mark["error"] == pytest.approx(0.1)  # sd 0.1414 over √2


def test_differences_are_paired_by_seed() -> None:
    """Seeds that differ by 20 points hide nothing: MAGI gains one point on each of them."""
    found = differences(
        [
            record(0, PFNM=0.6, MAGI=0.61),
            record(1, PFNM=0.8, MAGI=0.81),
            record(2, PFNM=0.7, MAGI=0.71),
        ]
    )
    assert len(found) == 1
    assert found.iloc[0]["points"] == pytest.approx(1.0)
    assert found.iloc[0]["error"] == pytest.approx(0.0, abs=1e-9)
    assert not len(differences([record(0, PFNM=0.6)]))


@pytest.mark.parametrize(
    "name", [name for name, entry in PAPERS.items() if entry.make.startswith("matching:")]
)
@pytest.mark.parametrize("quick", [True, False])
def test_studies_are_well_formed(name: str, quick: bool) -> None:
    cells = PAPERS[name].study(quick=quick, runs=2).cells
    assert len({cell.key for cell in cells}) == len(cells)
    assert all(method in METHODS for cell in cells for method in cell.methods)
    assert not quick or all(cell.setting.data == "digits" for cell in cells)


def test_the_papers_sizes_are_the_papers() -> None:
    grids = {
        name: PAPERS[name].study(runs=1).cells
        for name in ("pfnm-figure2", "pfnm-figure4", "pfnm-streaming")
    }
    assert [cell.x for cell in grids["pfnm-figure2"]] == [2, 5, 10, 15, 20, 25, 30] * 2
    assert [cell.setting.layers for cell in grids["pfnm-figure4"]] == [1, 2, 3, 4, 5, 6] * 2
    assert {cell.steps for cell in grids["pfnm-streaming"]} == {15}


@pytest.mark.parametrize("name", ["pfnm-table", "magi-table1"])
def test_printed_figures_stand_beside_runs_of_the_same_name(name: str) -> None:
    """A run for every row, so that the column of printed accuracies has its place for all of them."""
    study = PAPERS[name].study(runs=1)
    records = [
        {
            "panel": cell.line, "seed": 0,
            "outcomes": [
                {"x": cell.x, "method": method, "accuracy": 0.5, "cells": 9, "parameters": 9}
                for method in cell.methods
            ],
        }
        for cell in study.cells
    ]  # fmt: skip
    summary = study.table(records)["summary"]
    assert (summary.iloc[:, -1] != "").sum() == {"pfnm-table": 36, "magi-table1": 30}[name]


def test_a_worker_returns_what_it_was_given(tmp_path: Path) -> None:
    cell = tiny(0)[0]
    found = run_cell(cell, Job(tmp_path))
    outcome = Outcome(**{k: found["outcomes"][0][k] for k in ("accuracy", "cells", "parameters")})
    assert 0 <= outcome.accuracy <= 1


def test_the_benchmarks_naive_matching_groups_cells_in_the_same_way() -> None:
    peers = [bench.Cells.of(peer.values * 3) for peer in bench.planted(6, inputs=20)]
    found = list(match(peers).assignments)
    slow = bench.match_naively(peers)
    assert bench.same_partition(found, slow)
    slow[0] = slow[0][::-1].copy()
    assert not bench.same_partition(found, slow)
