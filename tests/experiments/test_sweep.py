"""Sweeps: every combination once, side by side or in one stack, and an interruption costs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gossamer.experiments.cli.app import app
from gossamer.experiments.config.tables import ConfigError, load_config, parse_config
from gossamer.experiments.results import Record, read, read_records
from gossamer.experiments.study.sweep import (
    Cell,
    axes_of,
    combine,
    draw,
    expand,
    load_for_runs,
    outcome,
    outcomes,
    stackable_batches,
    table,
)

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
local_samples = 20

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


def tiny(**sweep: Any) -> dict[str, Any]:
    return {
        "peers": 3,
        "rounds": 2,
        "data": {"samples": 20, "test": 30},
        "network": {"layout": "64=6=10"},
        "models": [{"name": "global", "layout": "64-4-10"}],
        "training": {"local_samples": 20},
        "sweep": sweep,
    }


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


@pytest.mark.parametrize(
    "gossip", [{"mode": "steady"}, {"mode": "rounds", "robust": "median", "hostile": 1}]
)
def test_robust_averaging_is_no_mean_of_a_stack(gossip: dict[str, object]) -> None:
    config = parse_config({"peers": 6, "rounds": 2, "network": {"layout": "64=4=10"}})
    robust = parse_config({**config.model_dump(mode="json"), "gossip": gossip})
    batches = stackable_batches([Cell("a", config), Cell("b", config), Cell("c", robust)])
    assert [len(batch) for batch in batches] == [2, 1]


def test_a_default_that_is_written_out_does_not_make_another_run() -> None:
    short, long = parse_config({"peers": 3}), parse_config({"peers": 3, "training": {"batch": 10}})
    other = parse_config({"peers": 3, "training": {"batch": 20}})
    assert Cell("a", short).key == Cell("a", long).key != Cell("a", other).key


def test_keys_may_be_written_in_any_way() -> None:
    nested = expand(parse_config(tiny(training={"rate": [0.1, 0.5]})))
    quoted = expand(parse_config(tiny(**{"training.rate": [0.1, 0.5]})))
    assert nested == quoted


def test_without_a_sweep_there_is_one_cell() -> None:
    (cell,) = expand(parse_config(tiny()))
    assert cell.settings == {}


def test_tables_that_were_left_out_can_be_swept() -> None:
    cells = expand(parse_config(tiny(**{"time.loss": [0.0, 0.5]})))
    assert [cell.config.time.loss for cell in cells if cell.config.time] == [0.0, 0.5]


def test_whole_lists_can_be_swept() -> None:
    models = [[], [{"name": "all", "layout": "64-6-10"}]]
    cells = expand(parse_config(tiny(models=models)))
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
        expand(parse_config(tiny(**sweep)), "tiny.toml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("tiny.toml")
    assert "\n" not in str(caught.value)


def test_a_run_in_virtual_time_has_an_outcome_too() -> None:
    made = tiny() | {"time": {"delay": 0.1}}
    one, again = (outcome(parse_config(made)) for _ in range(2))
    assert one == again
    assert 0 <= one.worst <= one.accuracy <= 1


def test_virtual_time_ends_a_run_of_peers_that_learn_for_ever_and_has_named_metrics() -> None:
    made = tiny() | {"time": {"seconds": 2.0}, "rounds": "forever"}
    made["training"] = {"local_samples": 20, "metrics": ["f1"]}
    assert set(outcome(parse_config(made)).metrics) == {"f1"}


def test_runs_in_one_stack_are_the_same_runs() -> None:
    made = tiny(**{"seed": [0, 1, 2], "training.rate": [0.1, 1.0]})
    made["models"].append({"name": "pair", "layout": "0-1-0", "peers": 2, "depends": ["global"]})
    made |= {"rounds": 5, "weights": "samples", "cross": True}
    cells = expand(parse_config(made))
    assert [len(batch) for batch in stackable_batches(cells)] == [6]
    together = outcomes([cell.config for cell in cells], ["config"] * 6)
    apart = [outcome(cell.config) for cell in cells]
    for one, other in zip(together, apart, strict=True):
        assert one.accuracy == pytest.approx(
            other.accuracy, abs=1 / 30
        )  # rounding may turn a sample
        assert one.worst == pytest.approx(other.worst, abs=2 / 30)
    assert len({one.accuracy for one in apart}) > 2


def test_data_sets_are_kept_for_the_next_run_but_not_what_a_users_function_makes(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_kept_data.py").write_text(
        "import numpy as np\n"
        "from gossamer.experiments.data import Dataset, samples\n"
        "def make():\n"
        "    return Dataset('mine', samples(np.zeros((4, 2)), np.zeros(4, int)), None, classes=2)\n"
    )
    assert load_for_runs("digits", seed=0) is load_for_runs("digits", seed=1)
    first, second = (load_for_runs("my_kept_data:make", folder=tmp_path) for _ in range(2))
    assert first is not second


def test_only_what_fits_is_stacked() -> None:
    small = expand(parse_config(tiny(rounds=[2, 3], seeds=20)))
    sizes = [len(batch) for batch in stackable_batches(small)]
    assert sum(sizes) == 40
    assert sizes == [8, 8, 4, 8, 8, 4]
    for batch in stackable_batches(small):
        assert len({cell.config.rounds for cell in batch}) == 1
    for change in (
        {"network.layout": ["64=9000=10"]},
        {"time.loss": [0.1]},
        {"topology": ["ring"]},
        {
            "fednp.strength": [0.1]
        },  # a FedNP learner knows its network and its number of peers itself
    ):
        cells = expand(parse_config(tiny(**change, seeds=3)))
        assert [len(batch) for batch in stackable_batches(cells)] == [1, 1, 1]


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
    assert found[["a", "b", "runs"]].to_numpy().tolist() == [
        [str(a), b, 3] for b in ("x", "y") for a in (2, 1)
    ]
    first = found.iloc[0]
    assert [first[name] for name in ("mean", "± sd", "median", "worst peer")] == pytest.approx(
        [0.21, 0.01, 0.21, 0.0]
    )
    shown = table(records)["summary"]
    assert list(shown.columns) == ["a", "b", "runs", "mean", "± sd", "median", "worst peer"]
    assert [*shown.iloc[0]] == ["2", "x", "3", "0.2100", "0.0100", "0.2100", "0.0000"]
    assert {file.name for file in draw(tmp_path, records, "title")} == {"figure.png", "figure.svg"}
    assert (
        "mean of 3 runs; error bars: ± one standard deviation"
        in (tmp_path / "figure.svg").read_text()
    )


def test_one_run_has_no_deviation_and_words_have_no_figure(tmp_path: Path) -> None:
    once: list[Record] = [
        {"settings": {"a": a, "b": "x", "seed": 0}, "accuracy": a / 10, "worst": 0.0}
        for a in (2, 1)
    ]
    assert [*table(once)["summary"].iloc[0]][2:5] == ["1", "0.2000", ""]
    draw(tmp_path, once, "title")
    assert "one run each" in (tmp_path / "figure.svg").read_text()
    only_words = [{**record, "settings": {"b": "x"}} for record in once]
    assert draw(tmp_path, only_words, "title") == []
    assert [*table(only_words)["summary"]["runs"]] == ["2"]
    plain = [{**record, "settings": {"seed": seed}} for seed, record in enumerate(once)]
    assert [*table(plain)["summary"].columns] == ["runs", "mean", "± sd", "median", "worst peer"]


def test_the_command(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["sweep", str(file), "--out", str(out), "--on", "local:1"], catch_exceptions=False
    )
    assert result.exit_code == 0
    # A run that takes long, as on a slow machine, leaves a page too.
    assert {path.name for path in out.iterdir()} - {"report.html"} == {
        *("run.json", "runs.jsonl", "config.json", "summary.csv", "figure.png", "figure.svg")
    }
    assert parse_config(json.loads((out / "config.json").read_text())) == load_config(file)
    assert len({record["key"] for record in read_records(out / "runs.jsonl")}) == 8
    assert "64-2-10" in result.stdout


def test_simulate_points_to_sweep(file: Path) -> None:
    with pytest.raises(ConfigError, match="run it with gossamer sweep"):
        CliRunner().invoke(app, ["simulate", str(file)], catch_exceptions=False)


def test_named_metrics_are_in_records_and_table(file: Path, tmp_path: Path) -> None:
    text = TOML.replace("local_samples = 20", 'local_samples = 20\nmetrics = ["f1"]')
    file.write_text(text.partition("models.0")[0], "utf-8")
    result = CliRunner().invoke(
        app, ["sweep", str(file), "--out", str(tmp_path / "out"), "--on", "local:1"]
    )
    assert result.exit_code == 0, result.output
    records = read(tmp_path / "out")
    header, first, _ = (tmp_path / "out" / "summary.csv").read_text().splitlines()
    assert header.split(",")[-1] == "f1"
    mean = records[records["training.rate"] == 0.1]["f1"].mean()
    assert float(first.split(",")[-1]) == pytest.approx(mean, abs=1e-4)
