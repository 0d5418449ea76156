"""`gossamer assignment`: says which cells are shared by whom, when and why that was decided, and draws it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_kit import Run, runs
from results_kit import at

from gossamer.experiments.arena.simulation import Simulation, simulate
from gossamer.experiments.cli.assignment import (
    cells_text,
    draw,
    group_rows,
    read_sharing,
    rows,
    scheme_names,
    sentences,
)
from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.models import discover, mlp
from gossamer.models.sharing import (
    GLOBAL,
    OWN,
    Assignment,
    Candidate,
    Compared,
    Decision,
    SharingReport,
)

torch.set_num_threads(1)
PEERS = ("anna", "ben", "carl", "dora")

assignment = runs("assignment")


def report(*, dry_run: bool = False, reason: str = "", steps: int = 3) -> dict[str, Any]:
    """A run of four peers that decides about some outputs, then hidden cells, then the other outputs."""
    anatomy = discover(mlp("6=20=4"), torch.rand(2, 6))
    present = Assignment.shared(anatomy, PEERS)
    made = SharingReport(present, dry_run=dry_run, reason=reason)
    decisions, compared = [], []
    changes: list[tuple[str, list[int], Any]] = [
        ("2", [2, 3], OWN),
        ("0", list(range(0, 20, 2)), (0, 0, 1, 1)),
        ("2", [0], (0, 1, 1, 0)),
        ("0", list(range(0, 20, 2)), GLOBAL),
    ]
    for index, (part, cells, scheme) in enumerate(changes[:steps]):
        candidate = Candidate.of(present, part, cells, scheme)
        round_number, gain = 5 + 3 * index, (0.12, 0.07, 0.02, 0.04)[index]
        decisions.append(Decision(round_number, candidate, gain, 0.01))
        compared += [
            Compared(round_number, "other", "input", -0.02, 0.01, 0.1, False),
            Compared(round_number, str(candidate), part, gain, 0.01, 9.3, True),
        ]
        if not dry_run:
            present = candidate.assignment
            made.add(round_number, present)
    return json.loads(json.dumps(made.as_record(decisions, compared)))


def test_every_cell_of_every_part_is_in_one_row_with_its_evidence() -> None:
    table = list(rows(report()))
    assert [row[:2] + row[4:] for row in table] == [
        ["input", "all 6", "by all", "11"],
        ["0", "10 of 20", "by all", ""],
        ["0", "10 of 20", "in 2 groups", 8],
        ["2 (outputs)", "1", "by all", ""],
        ["2 (outputs)", "2–3", "each peer's own", 5],
        ["2 (outputs)", "0", "in 2 groups", 11],
    ]
    assert table[0][2:4] == ["0.1", "+2.0 % ± 1.0 %"]  # the best change would have raised the loss
    assert table[4][2:4] == ["9.3", "−12 % ± 1.0 %"]


def test_cells_that_are_shared_again_are_told_in_a_sentence_and_are_nobodys_in_the_table() -> None:
    again = report(steps=4)
    assert sentences(again)[-1] == (
        "10 of 20 cells of part 0 became shared by all peers again after round 14: held-out loss fell by "
        "4.0 % ± 1.0 %"
    )
    assert [row[:2] + row[4:5] for row in rows(again) if row[0] == "0"] == [
        ["0", "all 20", "by all"]
    ]
    assert {row[2] for row in group_rows(again)} == {"2 (outputs)"}


def test_groups_are_told_by_the_names_of_their_peers() -> None:
    assert list(group_rows(report())) == [
        ["1 of 2", "anna, ben", "0"],
        ["2 of 2", "carl, dora", "0"],
        ["1 of 2", "anna, dora", "2 (outputs)"],
        ["2 of 2", "ben, carl", "2 (outputs)"],
    ]


def test_every_decision_is_a_sentence() -> None:
    assert sentences(report()) == [
        "outputs 2 and 3 became the peers' own after round 5: held-out loss fell by 12 % ± 1.0 %",
        "10 of 20 cells of part 0 became those of 2 groups of 2 and 2 peers after round 8: held-out loss "
        "fell by 7.0 % ± 1.0 %",
        "output 0 became those of 2 groups of 2 and 2 peers after round 11: held-out loss fell by 2.0 % ± "
        "1.0 %",
    ]
    assert "would become the peers' own" in sentences(report(dry_run=True))[0]
    assert sentences(report(reason="too few", steps=0)) == ["nothing was decided: too few"]
    assert "nothing was changed" in sentences(report(steps=0))[0]


def test_a_dry_run_says_would_and_keeps_cells_shared() -> None:
    table = list(rows(report(dry_run=True)))
    assert ["2 (outputs)", "all 4"] in [row[:2] for row in table]
    assert "would be each peer's own" in [row[4] for row in table]


@pytest.mark.parametrize(
    ("cells", "text"),
    [([0, 1, 2, 3], "0–3"), ([1, 3, 4], "1, 3–4"), (list(range(0, 20, 2)), "10 of 30")],
)
def test_cells_are_ranges_or_a_count(cells: list[int], text: str) -> None:
    assert cells_text(cells, 30) == text


@pytest.mark.parametrize("steps", [0, 3])
def test_the_picture_has_a_panel_for_every_decision(tmp_path: Path, steps: int) -> None:
    files = draw(report(steps=steps), tmp_path / "picture", "title")
    assert [file.name for file in files] == ["picture.png", "picture.svg"]
    found = report(steps=steps)
    assert len(found["history"]) == steps + 1
    names = list(scheme_names(found).values())
    assert names[0] == "shared by all peers"
    assert len(names) == len(set(names)) == steps + 1


def test_a_simulation_is_printed_and_drawn(tmp_path: Path, assignment: Run) -> None:
    config = parse_config(
        {
            "name": "few", "peers": 6, "rounds": 3, "sharing": "auto",
            "data": {"samples": 40}, "network": {"layout": "64=8=10"},
            "models": [
                {"name": "global", "layout": "64-8-8"},
                {"name": "half", "layout": "0-0-2", "depends": ["global"], "peers": 3},
            ],
        }
    )  # fmt: skip
    simulate(Simulation.of(config), at(tmp_path / "run"))
    result = assignment("run", "-o", "shown")
    assert result.code == 0
    assert "few: what peers share" in result.out
    assert "in 4 groups, by hand" in result.out
    assert {file.name for file in (tmp_path / "shown").iterdir()} >= {
        "assignment.png", "assignment.svg", "assignment.csv", "compared.csv"
    }  # fmt: skip
    with (tmp_path / "shown" / "assignment.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 1 + 4


def test_results_without_decisions_are_one_line(tmp_path: Path, assignment: Run) -> None:
    (tmp_path / "run").mkdir()
    result = assignment("run")
    assert result.code == 2
    assert (
        'run: has no sharing.json: name the results of a simulation with sharing = "auto"'
        in result.err
    )
    assert len(result.err.strip().splitlines()) == 1
    assert not (tmp_path / "results").exists()
    (tmp_path / "run" / "sharing.json").write_text("{")
    with pytest.raises(ConfigError, match=r"sharing.json: is not JSON"):
        read_sharing(tmp_path / "run")
