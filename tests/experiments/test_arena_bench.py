"""The arena's benchmarks measure what they say: baseline and arena do the same work."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from gossamer.experiments.arena import Arena
from gossamer.experiments.bench.arena import Loop, Work, averaging, rounds
from gossamer.experiments.bench.growth import Size, describe, draw, measure

torch.set_num_threads(1)

# A batch of all samples has no order that could differ.
WORK = Work("tiny", "6=8=4", 8, 12, 1, "sum", 50, "mean", 12, 1.0)


@pytest.mark.parametrize("mixing", ["mean", "plain", "push-sum"])
@pytest.mark.parametrize("level", [50, 100])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_loop_computes_what_the_arena_computes(
    mixing: Literal["mean", "plain", "push-sum"], level: int, reduction: Literal["sum", "mean"]
) -> None:
    work = replace(WORK, mixing=mixing, level=level, reduction=reduction)
    data = work.data()
    learners = work.learners(data)
    loop = Loop.of(work, data, [learner.network for learner in learners])
    arena = Arena(learners, mixing=work.mix())
    for _ in range(3):
        arena.train()
        arena.average()
        loop.round()
    for learner, peer in zip(learners, loop.peers, strict=True):
        plain = parameters_to_vector(peer.module.parameters()).detach()
        torch.testing.assert_close(learner.network.flat, plain, rtol=0, atol=1e-5)


def test_a_row_has_both_figures() -> None:
    before = torch.get_num_threads()
    row = rounds(WORK, repeats=1)
    assert row.ratio is not None
    assert row.measured is not None
    assert row.baseline is not None
    assert row.ratio == pytest.approx(row.baseline / row.measured)
    assert torch.get_num_threads() == before


def test_averaging_alone_is_measured() -> None:
    row = averaging(peers=6, repeats=1)
    assert row.ratio is not None
    assert row.ratio > 0
    assert "6×208,328" in row.note  # the coordinates of level 80


def test_one_size_is_measured(tmp_path: Path) -> None:
    size = Size(**measure("small", 8, rounds=1))
    assert size.peers == 8
    assert size.round > size.average > 0
    assert size.peak > size.needs > 0
    text = describe(size)
    assert text.startswith("8 peers of 64=32=10")
    assert "peak" in text


def test_growth_is_drawn_from_the_file(tmp_path: Path) -> None:
    sizes = [
        Size(kind, peers, 1.0, 1e-3 * peers, 1e-4 * peers, 10**8 + 10**5 * peers, 10**6, 0.5)
        for kind in ("small", "large")
        for peers in (16, 256, 1000)
    ]
    lines = [json.dumps(asdict(size)) for size in sizes]
    (tmp_path / "sizes.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    files = draw(tmp_path)
    assert {file.name for file in files} == {"growth.png", "growth.svg"}
    assert "10,000 peers" not in (tmp_path / "growth.svg").read_text("utf-8")
