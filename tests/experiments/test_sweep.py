"""Sweeps: every combination once, side by side or in one stack, and an interruption costs nothing."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gossamer.experiments.cli.app import app
from gossamer.experiments.config.tables import ConfigError, load_config, parse_config
from gossamer.experiments.results import Record, read_records
from gossamer.experiments.study import sweep_run
from gossamer.experiments.study.sweep import Cell, axes_of, expand
from gossamer.experiments.study.sweep_outcome import outcome, outcomes, run_cells, stackable
from gossamer.experiments.study.sweep_report import combine, report
from gossamer.experiments.study.sweep_run import Runs

torch.set_num_threads(1)

TOML = """
name = "tiny"
peers = 3
rounds = 2

[data]
samples = 20
test = 30

[network]
layout = "64=6=10"

[training]
stretch = 20

[[models]]
name = "global"
layout = "64-4-10"

[sweep]
seeds = 2
training.rate = [0.1, 0.5]
models.0.layout = ["64-2-10", "64-4-10"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TOML, "utf-8")
    return path


def table(**sweep: Any) -> dict[str, Any]:
    return {
        "peers": 3,
        "rounds": 2,
        "data": {"samples": 20, "test": 30},
        "network": {"layout": "64=6=10"},
        "models": [{"name": "global", "layout": "64-4-10"}],
        "training": {"stretch": 20},
        "sweep": sweep,
    }


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The cells that were really run; here in this process, since starting others takes seconds."""
    seen: list[Cell] = []

    def serially(run: Any, batches: Sequence[list[Cell]], jobs: int) -> Any:
        for batch in batches:
            seen.extend(batch)
            yield run(batch)

    monkeypatch.setattr(sweep_run, "in_parallel", serially)
    return seen


def test_every_combination_is_a_cell(file: Path) -> None:
    config = load_config(file)
    assert list(axes_of(config)) == ["training.rate", "models.0.layout", "seed"]
    cells = expand(config, str(file))
    assert [tuple(cell.settings.values()) for cell in cells] == [
        (rate, layout, seed)
        for rate in (0.1, 0.5)
        for layout in ("64-2-10", "64-4-10")
        for seed in (0, 1)
    ]
    for cell in cells:
        rate, layout, seed = cell.settings.values()
        assert (cell.config.training.rate, cell.config.seed) == (rate, seed)
        assert cell.config.models[0].layout == layout
        assert (cell.config.rounds, cell.config.sweep) == (2, {})
        assert cell.source == str(file)
    assert len({cell.key for cell in cells}) == 8


def test_keys_may_be_written_in_any_way() -> None:
    nested = expand(parse_config(table(training={"rate": [0.1, 0.5]})))
    quoted = expand(parse_config(table(**{"training.rate": [0.1, 0.5]})))
    assert nested == quoted


def test_without_a_sweep_there_is_one_cell() -> None:
    (cell,) = expand(parse_config(table()))
    assert cell.settings == {}


def test_tables_that_were_left_out_can_be_swept() -> None:
    cells = expand(parse_config(table(**{"time.loss": [0.0, 0.5]})))
    assert [cell.config.time.loss for cell in cells if cell.config.time] == [0.0, 0.5]


def test_whole_lists_can_be_swept() -> None:
    models = [[], [{"name": "all", "layout": "64-6-10"}]]
    cells = expand(parse_config(table(models=models)))
    assert [len(cell.config.models) for cell in cells] == [0, 1]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"training.rte": [1.0]}, "unknown key 'training.rte'; did you mean 'rate'?"),
        ({"trainin.rate": [1.0]}, "unknown key 'trainin'; did you mean 'training'?"),
        ({"training.rate": []}, "key 'sweep.training.rate': is an empty list"),
        ({"training.rate": 0.1}, "key 'sweep.training.rate': should be a list of values"),
        ({"training.rate": [0.1, 0.1]}, "names 0.1 twice"),
        (
            {"training.rate": [-0.1]},
            "key 'training.rate': input should be greater than 0, not -0.1",
        ),
        ({"training.rate": ["fast"]}, "key 'training.rate'"),
        ({"models.3.layout": ["64-6-10"]}, "key 'sweep.models.3.layout': the list has 1 entries"),
        ({"rounds.x": [1]}, "key 'sweep.rounds.x': rounds is not a table"),
        ({"rounds.x.y": [1]}, "key 'sweep.rounds.x.y': there is no table"),
        ({"seeds": 0}, "key 'sweep.seeds': should be a number of seeds, not 0"),
        ({"seeds": 2, "seed": [1]}, "key 'sweep.seed': is there twice"),
        ({"time.delay": ["expo:1"]}, "unknown distribution 'expo'"),
    ],
)
def test_mistakes_are_named(sweep: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(parse_config(table(**sweep)), "tiny.toml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("tiny.toml")
    assert "\n" not in str(caught.value)


def test_a_run_in_virtual_time_has_an_outcome_too() -> None:
    made = table() | {"time": {"delay": 0.1}}
    one, again = (outcome(parse_config(made)) for _ in range(2))
    assert one == again
    assert 0 <= one.worst <= one.accuracy <= 1


def test_runs_in_one_stack_are_the_same_runs() -> None:
    made = table(**{"seed": [0, 1, 2], "training.rate": [0.1, 1.0]})
    made["models"].append({"name": "pair", "layout": "0-1-0", "peers": 2, "depends": ["global"]})
    made |= {"rounds": 5, "weights": "samples", "cross": True}
    cells = expand(parse_config(made))
    assert [len(batch) for batch in stackable(cells)] == [6]
    together = outcomes([cell.config for cell in cells], ["config"] * 6)
    apart = [outcome(cell.config) for cell in cells]
    for one, other in zip(together, apart, strict=True):
        assert one.accuracy == pytest.approx(
            other.accuracy, abs=1 / 30
        )  # rounding may turn a sample
        assert one.worst == pytest.approx(other.worst, abs=2 / 30)
    assert len({one.accuracy for one in apart}) > 2


def test_only_what_fits_is_stacked() -> None:
    small = expand(parse_config(table(rounds=[2, 3], seeds=20)))
    sizes = [len(batch) for batch in stackable(small)]
    assert sum(sizes) == 40
    assert sizes == [8, 8, 4, 8, 8, 4]
    for batch in stackable(small):
        assert len({cell.config.rounds for cell in batch}) == 1
    for change in (
        {"network.layout": ["64=9000=10"]},
        {"time.loss": [0.1]},
        {"topology": ["ring"]},
    ):
        cells = expand(parse_config(table(**change, seeds=3)))
        assert [len(batch) for batch in stackable(cells)] == [1, 1, 1]


def records_of(path: Path) -> dict[str, Record]:
    return {record["key"]: record for record in read_records(path)}


def test_a_killed_sweep_goes_on_where_it_stopped(
    file: Path, tmp_path: Path, ran: list[Cell]
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        f"""
import os, signal
from pathlib import Path
from gossamer.experiments.config.tables import load_config
from gossamer.experiments.study.sweep import expand
from gossamer.experiments.study.sweep_outcome import run_cells
from gossamer.experiments.study.sweep_run import Runs

seen = []
def die(record):
    seen.append(record)
    if len(seen) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    cells = expand(load_config({str(file)!r}), "tiny.toml")
    Runs(cells, Path({str(tmp_path)!r}) / "runs.jsonl").go(run_cells, jobs=1, on_record=die)
""",
        "utf-8",
    )
    killed = subprocess.run([sys.executable, str(script)], timeout=280, check=False)
    assert killed.returncode == -signal.SIGKILL
    finished = records_of(tmp_path / "runs.jsonl")
    assert len(finished) == 3
    with (tmp_path / "runs.jsonl").open("a", encoding="utf-8") as cut_off:
        cut_off.write('{"key": "cut o')

    cells = expand(load_config(file), "tiny.toml")
    started: list[tuple[int, int]] = []
    again = Runs(cells, tmp_path / "runs.jsonl")
    again.go(run_cells, on_start=lambda done, total: started.append((done, total)))
    assert started == [(3, 8)]
    assert {cell.key for cell in ran} == {cell.key for cell in cells} - set(finished)
    whole = Runs(cells, tmp_path / "whole.jsonl")
    whole.go(run_cells)
    assert again.records() == whole.records()
    assert records_of(tmp_path / "runs.jsonl") == records_of(tmp_path / "whole.jsonl")
    ran.clear()
    Runs(cells, tmp_path / "runs.jsonl").go(run_cells)
    assert ran == []


def test_a_batch_that_was_half_written_is_finished(tmp_path: Path, ran: list[Cell]) -> None:
    cells = expand(parse_config(table(seeds=4)))
    path = tmp_path / "runs.jsonl"

    def stop(record: Record) -> None:
        if len(records_of(path)) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Runs(cells, path).go(run_cells, batches=stackable, on_record=stop)
    assert len(records_of(path)) == 2
    runs = Runs(cells, path)
    runs.go(run_cells, batches=stackable)
    assert [record["seed"] for record in runs.records()] == [0, 1, 2, 3]
    assert len(list(read_records(path))) == 4  # what was there is not written twice


def test_combinations_are_summarised_over_seeds(tmp_path: Path) -> None:
    records: list[Record] = [
        {
            "settings": {"a": a, "b": b, "seed": seed},
            "accuracy": a / 10 + seed / 100,
            "worst": 0.1 * seed,
        }
        for b in ("x", "y")
        for a in (2, 1)
        for seed in (0, 1, 2)
    ]
    found = combine(records)
    assert [(one.settings, one.runs) for one in found] == [
        ({"a": a, "b": b}, 3) for b in ("x", "y") for a in (2, 1)
    ]
    assert found[0].median == pytest.approx(0.21)
    assert found[0].mean == pytest.approx(0.21)
    assert found[0].deviation == pytest.approx(0.01)
    assert found[0].worst == 0.0
    files = report(found, tmp_path, "title")
    assert {file.name for file in files} == {"summary.csv", "figure.png", "figure.svg"}
    with (tmp_path / "summary.csv").open(newline="") as file:
        header, first, *_ = csv.reader(file)
    assert header == ["a", "b", "runs", "mean", "± sd", "median", "worst peer"]
    assert first == ["2", "x", "3", "0.2100", "0.0100", "0.2100", "0.0000"]
    assert "mean of 3 runs, bars: one standard deviation" in (tmp_path / "figure.svg").read_text()
    once = combine([record for record in records if record["settings"]["seed"] == 0])
    assert once[0].deviation is None
    assert once[0].row()[2:5] == ["1", "0.2000", ""]
    report(once, tmp_path, "title")
    assert "one run each" in (tmp_path / "figure.svg").read_text()
    only_words = [{**record, "settings": {"b": record["settings"]["b"]}} for record in records]
    assert [file.name for file in report(combine(only_words), tmp_path, "t")] == ["summary.csv"]
    assert report([], tmp_path, "t") == []


def test_the_command(file: Path, tmp_path: Path, ran: list[Cell]) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["sweep", str(file), "--out", str(out)], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert {path.name for path in out.iterdir()} == {
        *("run.json", "runs.jsonl", "config.json", "summary.csv", "figure.png", "figure.svg")
    }
    assert parse_config(json.loads((out / "config.json").read_text())) == load_config(file)
    assert len(ran) == len(records_of(out / "runs.jsonl")) == 8
    assert "64-2-10" in result.stdout


def test_simulate_points_to_sweep(file: Path) -> None:
    with pytest.raises(ConfigError, match="run it with gossamer sweep"):
        CliRunner().invoke(app, ["simulate", str(file)], catch_exceptions=False)
