"""Studies of lossy updates, moments and federated methods: what they measure, and that they draw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.experiments.papers import PAPERS, matching, updates
from gossamer.experiments.papers.fednp import grid_moments
from gossamer.experiments.papers.matching_methods import Setting, split_data
from gossamer.experiments.study import Job
from gossamer.models.fednp import tilted_moments

torch.set_num_threads(1)

SETTING = Setting("digits", 4, 0, 0, 0.5, epochs=1, seed=3)


def lossy(compressor: str, rounds: int = 3) -> dict[str, Any]:
    return updates.run_cell(updates.Cell(compressor, SETTING, rounds), Job(Path()))


@pytest.mark.parametrize(
    "compressor", ["low-rank:1", "mask:0.5", "subsample:0.5", "int4", "float16"]
)
def test_distance_and_lost_accuracy_are_within_their_bounds(compressor: str) -> None:
    record = lossy(compressor)
    assert 0 < record["distance"] <= record["distance_bound"]
    assert record["loss"] <= record["loss_bound"] <= 1 - record["accuracy"]
    assert 0 < record["distortion"] <= record["worst"]


def test_finer_updates_have_smaller_bounds() -> None:
    bounds = [lossy(name)["distance_bound"] for name in ("int4", "int8", "float16")]
    assert bounds[0] > 5 * bounds[1] > 25 * bounds[2]


def test_local_steps_bring_models_nearer_by_the_factor_of_the_bound() -> None:
    split = split_data(SETTING)
    x, y = updates.unit_inputs(split.shares[0].x, split), split.shares[0].y
    assert updates.RATE <= 2 / (updates.SMOOTHNESS + 2 * updates.DECAY)
    assert float(x.norm(dim=1).max()) <= 1 + 1e-6
    random = torch.Generator().manual_seed(5)
    starts = [torch.randn(10, x.shape[1], generator=random) for _ in range(2)]
    ends = [
        updates.client_update(start, x, y, updates.seeded_rng(1, "same order")) for start in starts
    ]
    factor = (1 - updates.RATE * updates.DECAY) ** ends[0][1]
    distance = float((ends[0][0] - ends[1][0]).norm())
    assert 0 < distance <= factor * float((starts[0] - starts[1]).norm())


def test_updates_that_are_not_compressed_lose_nothing() -> None:
    model, sent = updates.federated_averaging(split_data(SETTING), 2, SETTING.seed)
    assert (sent.bound, set(sent.distortions)) == (0.0, {0.0})
    assert sent.bytes == 2 * 4 * model.numel() * 4  # rounds, clients, bytes of a float


def test_a_grid_has_the_moments_of_gauss_hermite() -> None:
    mean, variance, f = (
        torch.tensor(v, dtype=torch.float64) for v in ([0.5, -2], [1, 3], [1, -0.7])
    )
    for ours, theirs in zip(
        grid_moments(mean, variance, f, 1000),
        tilted_moments(mean, variance, f, nodes=60),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_quick_studies_run_one_cell_and_draw(tmp_path: Path) -> None:
    study = PAPERS["fednp-cifar"].study(quick=True)
    records = study.run([study.cells[0]], Job(tmp_path))
    assert study.table(records)["summary"]["clients"].tolist() == ["3"]
    study = PAPERS["compressed-updates"].study(quick=True)
    cell = next(cell for cell in study.cells if cell.line == "int8")
    records = study.run([replace(cell, rounds=1)], Job(tmp_path))
    assert study.table(records)["summary"]["updates"].tolist() == ["int8"]
    assert study.figure is not None
    assert [file.name for file in study.figure(tmp_path, records)] == ["figure.png", "figure.svg"]


def test_sensitivity_changes_one_parameter_at_a_time(tmp_path: Path) -> None:
    study = PAPERS["pfnm-sensitivity"].study(quick=True, runs=1)
    cell = study.cells[0]
    small = replace(
        cell, setting=replace(cell.setting, peers=3, width=8, epochs=1), methods=cell.methods[:3]
    )
    record = matching.run_cell(small, Job(tmp_path))
    assert [outcome["method"] for outcome in record["outcomes"]] == [
        "PFNM",
        "PFNM σ0²=1",
        "PFNM σ0²=100",
    ]
