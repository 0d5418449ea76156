"""Figures of the paper on partial models: how runs are summarised, and grids that are the paper's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.build import Swarm
from gossamer.experiments.config.tables import Config, Data, Model, Network, Training
from gossamer.experiments.papers import PAPERS, StudyEntry
from gossamer.experiments.papers.partial_models import figure_study, points
from gossamer.experiments.results import Results
from gossamer.experiments.study import Job, run_study
from gossamer.experiments.study.sweep import Cell, run_cells, stackable

torch.set_num_threads(1)

NAMES = [name for name, entry in PAPERS.items() if entry.make.startswith("partial_models:")]


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
    assert found.iloc[0, 2:].tolist() == pytest.approx([5, 0.2, 0.16, 0.24, 0.2])
    assert [*found.columns] == ["line", "x", "runs", "median", "low", "high", "mean"]


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
    records, files = run_study(study, Results(tmp_path, "paper tiny"), jobs=1)
    assert [file.name for file in files] == ["summary.csv", "figure.png", "figure.svg"]
    assert len(records) == 2 * 4  # seeds × cells
    header, *rows = (tmp_path / "latest" / "summary.csv").read_text().splitlines()
    assert header == "speed,level,runs,median,second quintile,third quintile,mean"
    assert [row.split(",")[:3] for row in rows] == [
        [line, x, "2"] for line in ("slow", "fast") for x in "03"
    ]
    assert "median of 2 runs" in (tmp_path / "latest" / "figure.svg").read_text()


def test_the_papers_own_size_is_one_command() -> None:
    cells = PAPERS["averaging-level"].study().cells
    assert len(cells) == len({cell.key for cell in cells}) == 10 * 6 * 7
    # Large networks: a worker process for each, so that an interruption loses little.
    assert all(len(batch) == 1 for batch in stackable(cells))


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
        assert shared(config) == layouts[int(cell.settings["x"])]
        assert [(t.kind, t.labels, t.peers) for t in config.tasks] == [("swap", (8, 9), 7)]
        assert cell.line == f"{config.training.local_samples}"
    sizes = {cell.config.training.local_samples for cell in cells}
    assert (min(sizes), max(sizes)) == (50, 3000)
    assert {500, 1500} <= sizes
    assert {(c.line, c.settings["x"]) for c in cells} == {
        (f"{s}", level) for s in sizes for level in layouts
    }
    assert PAPERS["averaging-level"].runs == 10


def test_v3d_semi_local() -> None:
    cells = grid("semi-local")
    models = {
        "no averaging": [],
        "100": [("global", "784-300-100-10")],
        "100 per class": [("{task}", "784-300-100-10")],
        "80": [("global", "784-250-80-10")],
        "80 + 20 per class, no dependency": [("global", "784-250-80-10"), ("{task}", "0-50-20-0")],
        "80 + 20 per class, dependency": [("global", "784-250-80-10"), ("{task}", "0-50-20-0")],
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
        if cell.line.startswith("70 + 30"):
            first, *others = config.models
            assert [
                (first.name, first.layout, first.peers),
                *((model.layout, model.peers) for model in others),
            ] == pairs
            expected = ["global"] if cell.line.endswith(", dependency") else []
            assert [model.depends for model in others] == [expected, expected]
    assert {cell.line for cell in cells} == {
        "no averaging",
        "100",
        "100 per class",
        "80",
        "70 + 30 / 15, no dependency",
        "70 + 30 / 15, dependency",
    }
    assert (min(c.settings["x"] for c in cells), max(c.settings["x"] for c in cells)) == (100, 800)
    assert PAPERS["semi-local-and-local"].runs == 20


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
    assert {cell.line for cell in cells} <= {cell.line for cell in grid(name)} or (
        name == "averaging-level"  # its lines are sizes of mini-batches
    )
    for cell in {cell.line: cell for cell in cells}.values():
        Swarm(cell.config).member(cell.config.peers - 1)


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_is_another_run(name: str) -> None:
    cells = PAPERS[name].study(quick=True, runs=2).cells
    one, two = cells[: len(cells) // 2], cells[len(cells) // 2 :]
    assert not {cell.key for cell in one} & {cell.key for cell in two}
    assert [(cell.line, cell.settings["x"]) for cell in one] == [
        (cell.line, cell.settings["x"]) for cell in two
    ]
