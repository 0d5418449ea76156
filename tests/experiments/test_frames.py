"""Records and rounds as DataFrames."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer.experiments import (
    Arena,
    ConfigError,
    Results,
    Simulation,
    Swarm,
    frame,
    parse_config,
    read,
    simulate,
)

CONFIG = {
    "name": "tiny",
    "peers": 3,
    "rounds": 2,
    "data": {"samples": 20, "test": 30},
    "network": {"layout": "64=4=10"},
    "training": {"metrics": ["f1"]},
}


def test_a_run_has_a_row_for_every_test_of_a_peer(tmp_path: Path) -> None:
    config = parse_config(CONFIG)
    simulate(Simulation.of(config), Results(tmp_path / "run", "simulate"))
    tests = read(tmp_path / "run")
    assert list(tests.columns) == ["run", "round", "peer", "task", "accuracy", "loss", "f1"]
    assert len(tests) == 3 * 2
    members = Swarm(config).members()
    names = [member.name for member in members]
    rounds = frame(Arena([member.learner for member in members]).run(2), names)
    assert list(rounds.columns) == ["round", "peer", "accuracy", "loss", "f1"]
    assert rounds.to_numpy().tolist() == tests[list(rounds.columns)].to_numpy().tolist()


def test_rounds_without_names_have_numbers() -> None:
    learners = [member.learner for member in Swarm(parse_config(CONFIG)).members()]
    assert frame(Arena(learners, test_every=2).run(2))["peer"].tolist() == [0, 1, 2]


def test_runs_of_several_folders_have_their_settings_as_columns(tmp_path: Path) -> None:
    for name, accuracy in (("001", 0.5), ("002", 0.75)):
        (tmp_path / name).mkdir()
        record = {"line": "a", "seed": 0, "settings": {"peers": 4}, "accuracy": accuracy}
        (tmp_path / name / "runs.jsonl").write_text(json.dumps(record) + "\n")
    runs = read(tmp_path / "001", tmp_path / "002")
    assert runs[["line", "seed", "peers", "accuracy"]].to_numpy().tolist() == [
        ["a", 0, 4, 0.5],
        ["a", 0, 4, 0.75],
    ]
    assert read(tmp_path)["accuracy"].tolist() == [0.75]  # the latest


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no records"):
        read(tmp_path)
