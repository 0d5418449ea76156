"""Figures of the paper on partial models: how runs are summarised, and grids that are the paper's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.build import Swarm
from gossamer.experiments.config.tables import Config, Data, Model, Network, Training
from gossamer.experiments.papers import PAPERS, StudyEntry
from gossamer.experiments.papers.partial_models import figure_study, points, run_with_tests
from gossamer.experiments.results import Results
from gossamer.experiments.study import Job, run_study
from gossamer.experiments.study.sweep import Cell, run_cells, stackable_batches

torch.set_num_threads(1)

NAMES = [
    name
    for name, entry in PAPERS.items()
    if entry.make.partition(":")[0] in ("partial_models", "natural_tasks")
]


def tiny_cells(seed: int) -> list[Cell]:
    return [
        Cell(
            line,
            Config(
                seed=seed,
                peers=2,
                rounds=1,
                data=Data(samples=10, test=20),
                network=Network(layout="64=4=10"),
                models=[Model(name="global", layout=f"64-{level}-10")] if level else [],
                training=Training(local_samples=10, rate=rate),
            ),
            {"x": level},
        )
        for line, rate in (("slow", 0.1), ("fast", 1.0))
        for level in (0, 3)
    ]


def record(line: str, x: int, accuracy: float) -> dict[str, Any]:
    return {"line": line, "settings": {"x": x}, "accuracy": accuracy}


def test_quintiles_are_the_two_fifths_and_three_fifths_quantiles() -> None:
    values = [0.4, 0.0, 0.3, 0.1, 0.2]
    found = points([record("a", 1, value) for value in values])
    assert found.iloc[0, 2:].tolist() == pytest.approx([5, 0.2, 0.16, 0.24, 0.2, 0.025**0.5])
    assert [*found.columns] == ["line", "x", "runs", "median", "low", "high", "mean", "deviation"]


def test_points_keep_the_order_of_lines_and_sort_x() -> None:
    found = points([record(line, x, 0.5) for line in "ba" for x in (100, 0, 15)])
    assert found[["line", "x"]].to_numpy().tolist() == [
        [line, x] for line in "ba" for x in (0, 15, 100)
    ]


def test_a_run_is_the_mean_over_peers_after_the_last_round(tmp_path: Path) -> None:
    cell = tiny_cells(3)[3]
    (record,) = run_cells([cell], Job(tmp_path))
    *_, last = Simulation.of(cell.config).rounds()
    assert record == {
        "key": cell.key,
        "line": "fast",
        "settings": {"x": 3},
        "seed": 3,
        "accuracy": last.accuracy,
        "worst": min(test.accuracy for test in last.tests),
    }


def test_table_and_figure(tmp_path: Path) -> None:
    entry = StudyEntry("tiny", "nowhere", "", "Tiny")
    cells = [cell for seed in range(2) for cell in tiny_cells(seed)]
    study = figure_study(entry, cells, x_label="level", legend="speed", caption="quick")
    records, files = run_study(study, Results(tmp_path, "paper tiny"), on="local:1")
    assert [file.name for file in files] == ["summary.csv", "figure.png", "figure.svg"]
    assert len(records) == 2 * 4  # seeds × cells
    header, *rows = (tmp_path / "latest" / "summary.csv").read_text().splitlines()
    assert header == "speed,level,runs,median,second quintile,third quintile,mean,deviation"
    assert [row.split(",")[:3] for row in rows] == [
        [line, x, "2"] for line in ("slow", "fast") for x in "03"
    ]
    assert "median of 2 runs" in (tmp_path / "latest" / "figure.svg").read_text()


def test_the_papers_own_size_is_one_command() -> None:
    cells = PAPERS["averaging-level"].study().cells
    assert len(cells) == len({cell.key for cell in cells}) == 10 * (6 + 1) * 7  # levels, and auto
    # Large networks: a worker process for each, so that an interruption loses little.
    assert all(len(batch) == 1 for batch in stackable_batches(cells))


# The paper's own settings, written out from its text


def grid(name: str, quick: bool = False) -> list[Cell]:
    return list(PAPERS[name].study(quick=quick, runs=1).cells)


def plain(config: Config) -> dict[str, Any]:
    return {
        "peers": config.peers,
        "rounds": config.rounds,
        "every": config.every,
        "samples": config.data.samples,
        "test": config.data.test,
        "set": config.data.set,
        "layout": config.network.layout,
    }


def shared(config: Config) -> list[tuple[str, str]]:
    return [(model.name, model.layout) for model in config.models]


@pytest.mark.parametrize("name", ["averaging-level", "semi-local", "semi-local-and-local"])
def test_perceptrons_are_those_of_section_v1(name: str) -> None:
    for cell in grid(name):
        network, training = cell.config.network, cell.config.training
        assert (network.layout, network.activation, network.output) == (
            "784=300=100=10",
            "sigmoid",
            "sigmoid",
        )
        assert (training.rate, training.loss, training.reduction) == (0.1, "squared", "sum")
        assert (training.optimizer, cell.config.cross) == ("sgd", False)
        assert cell.config.data.partition == "successive"


def test_v3a_averaging_level() -> None:
    cells = grid("averaging-level")
    layouts = {
        0: [],
        15: [("global", "784-50-15-10")],
        30: [("global", "784-100-30-10")],
        60: [("global", "784-200-60-10")],
        80: [("global", "784-250-80-10")],
        100: [("global", "784-300-100-10")],
    }
    for cell in cells:
        config = cell.config
        assert plain(config) == {
            "peers": 16,
            "rounds": 30,
            "every": 1,
            "samples": 3500,
            "test": 1000,
            "set": "mnist",
            "layout": "784=300=100=10",
        }
        assert (config.sharing == "auto") == (cell.settings["x"] is None)
        if config.sharing != "auto":
            assert shared(config) == layouts[int(cell.settings["x"])]
        assert [(t.kind, t.labels, t.peers) for t in config.tasks] == [("swap", (8, 9), 7)]
        assert cell.line == f"{config.training.local_samples}"
    sizes = {cell.config.training.local_samples for cell in cells}
    assert (min(sizes), max(sizes)) == (50, 3000)
    assert {500, 1500} <= sizes
    assert {(c.line, c.settings["x"]) for c in cells if c.config.sharing != "auto"} == {
        (f"{s}", level) for s in sizes for level in layouts
    }
    assert PAPERS["averaging-level"].runs == 10


def test_v3d_semi_local() -> None:
    cells = grid("semi-local")
    models = {
        "no averaging": [],
        "global 100": [("global", "784-300-100-10")],
        "100 per task": [("{task}", "784-300-100-10")],
        "global 80": [("global", "784-250-80-10")],
        "global 80 + 20 per task, no dependency": [
            ("global", "784-250-80-10"),
            ("{task}", "0-50-20-0"),
        ],
        "global 80 + 20 per task, dependency": [
            ("global", "784-250-80-10"),
            ("{task}", "0-50-20-0"),
        ],
        "auto": [],
    }
    for cell in cells:
        config = cell.config
        assert (config.peers, config.rounds, config.every) == (12, 100, 1)
        assert (config.data.set, config.data.samples, config.data.test) == ("mnist", 200, 1000)
        assert [(t.kind, t.last, t.peers) for t in config.tasks] == [("symmetric", 3, "all")]
        assert shared(config) == models[cell.line]
        depends = [model.depends for model in config.models if model.depends]
        assert depends == ([["global"]] if cell.line.endswith(", dependency") else [])
        assert cell.settings["x"] == config.training.local_samples
    assert {cell.line for cell in cells} == set(models)
    assert (min(c.settings["x"] for c in cells), max(c.settings["x"] for c in cells)) == (25, 150)
    assert PAPERS["semi-local"].runs == 20


def test_v3e_semi_local_and_local() -> None:
    cells = grid("semi-local-and-local")
    pairs = [("global", "784-220-70-10", "all"), ("0-80-30-0", [0, 1]), ("0-40-15-0", [2, 3])]
    for cell in cells:
        config = cell.config
        assert (config.peers, config.rounds, config.every) == (4, 50, 1)
        assert (config.data.set, config.data.samples, config.data.test) == ("mnist", 1000, 1000)
        assert [(t.kind, t.labels, t.peers) for t in config.tasks] == [
            ("swap", (8, 9), [2, 3]),
            ("swap", (6, 7), [3]),
        ]
        if cell.line.startswith("global 70 + 30"):
            first, *others = config.models
            assert [
                (first.name, first.layout, first.peers),
                *((model.layout, model.peers) for model in others),
            ] == pairs
            expected = ["global"] if cell.line.endswith(", dependency") else []
            assert [model.depends for model in others] == [expected, expected]
    assert {cell.line for cell in cells} == {
        "no averaging",
        "global 100",
        "100 per task",
        "global 80",
        "global 70 + 30 or 15 per pair, no dependency",
        "global 70 + 30 or 15 per pair, dependency",
        "auto",
    }
    assert (min(c.settings["x"] for c in cells), max(c.settings["x"] for c in cells)) == (100, 800)
    assert PAPERS["semi-local-and-local"].runs == 20


LEVELS = {"0", "15", "30", "60", "80", "100", "auto"}


def swaps(config: Config) -> list[tuple[str, tuple[int, int] | None, Any]]:
    return [(task.kind, task.labels, task.peers) for task in config.tasks]


def test_v3b_convergence() -> None:
    cells = grid("convergence")
    for cell in cells:
        config = cell.config
        assert (config.peers, config.rounds, config.every, config.test_every) == (16, 3, 10, 1)
        assert (config.data.samples, config.training.local_samples) == (3500, 100)
        assert swaps(config) == [("swap", (8, 9), 7)]
    assert {cell.line for cell in cells} == {"0", "80", "100", "auto"}


def test_v3c_number_of_peers() -> None:
    cells = grid("number-of-peers")
    for cell in cells:
        config = cell.config
        assert (config.rounds, config.training.local_samples) == (30, 500)
        assert config.peers == cell.settings["x"]
        assert swaps(config) == [("swap", (8, 9), config.peers // 4)]
    assert {cell.settings["x"] for cell in cells} == {4, 8, 12, 16}
    assert {cell.line for cell in cells} == LEVELS


@pytest.mark.parametrize("name", ["difference-rate", "layouts"])
def test_v3f_and_v3i_rotate_the_last_labels_of_seven_peers(name: str) -> None:
    cells = grid(name)
    for cell in cells:
        config, rate = cell.config, cell.settings["x"]
        assert (config.peers, config.training.local_samples) == (16, 500)
        assert config.rounds == (30 if name == "difference-rate" else 50)
        cycles = [(task.kind, task.last, task.peers) for task in config.tasks]
        assert cycles == ([("cycle", rate, 7)] if rate else [])
    assert {cell.settings["x"] for cell in cells} == {0, 2, 4, 6, 8, 10}


def test_v3i_layouts() -> None:
    shared_by_line = {cell.line: (cell.config, shared(cell.config)) for cell in grid("layouts")}
    assert len(shared_by_line) == 10
    config, models = shared_by_line["5 layers: 784-300-100-10-0"]
    assert (config.network.layout, models) == (
        "784=300=100=10=10",
        [("global", "784-300-100-10-0")],
    )
    assert shared_by_line["4 layers: no averaging"][1] == []


def test_v3g_permuted_peers() -> None:
    cells = grid("permuted-peers")
    for cell in cells:
        config = cell.config
        assert (config.peers, config.rounds, config.training.local_samples) == (16, 30, 500)
        assert swaps(config) == [("swap", (8, 9), cell.settings["x"])]
    assert {cell.settings["x"] for cell in cells} == {0, 2, 4, 6, 8}
    assert PAPERS["permuted-peers"].runs == 20


def test_v3h_training_size() -> None:
    cells = grid("training-size")
    for cell in cells:
        config = cell.config
        assert (config.peers, config.rounds, config.training.local_samples) == (16, 50, 200)
        assert config.data.samples == cell.settings["x"]
    sizes = {cell.settings["x"] for cell in cells}
    assert (min(sizes), max(sizes)) == (250, 3500)


@pytest.mark.parametrize(
    ("variant", "data_set", "classes", "samples", "test", "mini_batch"),
    [
        ("a", "femnist-a", 62, 360, 60, 180),
        ("m", "femnist-m", 47, 360, 60, 180),
        ("d", "mnist-writers", 10, 100, 30, 50),
    ],
)
def test_v2_femnist(
    variant: str, data_set: str, classes: int, samples: int, test: int, mini_batch: int
) -> None:
    for cell in [*grid(f"femnist-level-{variant}"), *grid(f"femnist-scheme-{variant}")]:
        config = cell.config
        assert (config.peers, config.network.layout) == (16, f"784=300=100={classes}")
        assert (config.data.set, config.data.partition) == (data_set, "natural")
        assert (config.data.samples, config.data.test) == (samples, test)
        assert config.training.local_samples == mini_batch
    assert {cell.config.rounds for cell in grid(f"femnist-level-{variant}")} == {1000}
    for cell in grid(f"femnist-peers-{variant}"):
        config, size = cell.config, cell.settings["x"]
        assert (config.peers, config.rounds) == (64, 200)
        assert config.data.samples == (100 if variant == "d" else 350)
        if cell.line not in ("0", "auto"):
            groups = [model.peers for model in config.models]
            assert [peer for group in groups for peer in group] == list(range(64))
            assert {len(group) for group in groups} == {size}


def test_v4_vsn() -> None:
    for cell in grid("vsn"):
        config = cell.config
        assert (config.peers, config.network.layout) == (16, "100=50=20=2")
        assert (config.data.samples, config.training.local_samples) == (50, 25)
    assert {cell.line for cell in grid("vsn")} == {"0", "7", "15", "30", "40", "50", "auto"}


def test_a_run_without_x_is_tested_on_the_way(tmp_path: Path) -> None:
    config = tiny_cells(3)[3].config.model_copy(update={"rounds": 2, "every": 3})
    record = run_with_tests(Cell("fast", config), Job(tmp_path))
    assert [number for number, _ in record["tests"]] == [1, 2, 3, 4, 5, 6]
    *_, last = Simulation.of(config).rounds()
    assert record["tests"][-1][1] == record["accuracy"] == last.accuracy
    rows = points([{**record, "line": "a"}, {**record, "line": "a"}])
    assert rows[["x", "runs"]].to_numpy().tolist() == [[x, 2] for x in range(1, 7)]


def test_levels_by_the_number_of_mini_batches(tmp_path: Path) -> None:
    study = PAPERS["vsn"].study(quick=True, runs=1)
    records = [
        {"line": line, "settings": {}, "tests": [[10, low], [20, 0.5], [40, high]]}
        for line, low, high in [("0", 0.1, 0.6), ("50", 0.3, 0.8), ("auto", 0.2, 0.9)]
    ]
    table = study.table(records)["summary"]
    assert table.iloc[:, [0, 1, 3]].to_numpy().tolist() == [
        [number, level, accuracy]
        for number, values in {
            "10": ("0.1000", "0.3000", "0.2000"),
            "20": ("0.5000",) * 3,
            "40": ("0.6000", "0.8000", "0.9000"),
        }.items()
        for level, accuracy in zip(("0", "50", "auto"), values, strict=True)
    ]
    assert study.figure is not None
    assert [file.name for file in study.figure(tmp_path, records)] == ["figure.png", "figure.svg"]


def test_peers_that_share_nothing_are_run_once_for_all_sizes() -> None:
    study = PAPERS["femnist-peers-d"].study(quick=True, runs=1)
    assert [cell.settings["x"] for cell in study.cells if cell.line == "0"] == [16]
    records = [{"line": "0", "settings": {"x": 16}, "accuracy": 0.5}]
    assert study.table(records)["summary"].iloc[:, 1].tolist() == ["4", "8", "16"]


def test_v5_associative() -> None:
    cells = grid("associative")
    for cell in cells:
        config = cell.config
        assert (config.peers, config.every, config.network.layout) == (15, 1, "50<>400")
        assert (config.data.set, config.data.samples, config.data.test) == ("sparse", 9, 100)
        assert (config.training.local_samples, config.training.rate) == (3, 0.1)
        assert [(t.kind, t.peers) for t in config.tasks] == [("modified", 2)]
        # partial averaging takes the whole visible layer
        assert shared(config) == (
            [("global", f"50-{cell.settings['x']:g}")] if cell.settings["x"] else []
        )
    assert {cell.settings["x"] for cell in cells} == {0, 100, 200, 300, 350, 400}
    assert {cell.config.rounds for cell in cells} == {10, 20, 30, 40}
    assert PAPERS["associative"].runs == 100


@pytest.mark.parametrize("name", NAMES)
def test_quick_sizes_need_no_download_and_their_swarms_build(name: str) -> None:
    cells = grid(name, quick=True)
    assert {cell.config.data.set for cell in cells} <= {"digits", "sparse"}
    assert len({cell.key for cell in cells}) == len(cells)
    for cell in {cell.line: cell for cell in cells}.values():
        Swarm(cell.config).member(cell.config.peers - 1)


ONE_OF_EACH = {entry.make: name for name, entry in PAPERS.items() if name in NAMES}
"""The studies of this file's papers, without the variants of FEMNIST, which are the same if quick."""


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_a_quick_study_runs_one_cell(name: str, tmp_path: Path) -> None:
    """Peers train two samples in a round and are tested on ten, so that it takes no time."""
    study = PAPERS[name].study(quick=True, runs=1)
    cell = study.cells[0]
    training = cell.config.training.model_copy(update={"local_samples": 2})
    data = cell.config.data.model_copy(update={"test": 10})
    rounds = 2 if "x" in cell.settings else cell.config.rounds
    changed = cell.config.model_copy(update={"training": training, "data": data, "rounds": rounds})
    small = replace(cell, config=changed)
    (record,) = study.run([small], Job(tmp_path))
    assert 0 <= record["accuracy"] <= 1
    summary = study.table([record])["summary"]
    assert set(summary.iloc[:, 2]) == {"1"}  # one run at every point
    assert study.figure is not None
    if name in ("averaging-level", "femnist-level-d"):  # one function draws them all
        files = study.figure(tmp_path, [record])
        assert [file.name for file in files] == ["figure.png", "figure.svg"]


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_is_another_run(name: str) -> None:
    cells = PAPERS[name].study(quick=True, runs=2).cells
    one, two = cells[: len(cells) // 2], cells[len(cells) // 2 :]
    assert not {cell.key for cell in one} & {cell.key for cell in two}
    assert [(cell.line, str(cell.settings)) for cell in one] == [
        (cell.line, str(cell.settings)) for cell in two
    ]
