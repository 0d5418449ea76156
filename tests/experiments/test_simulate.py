"""`simulate` leaves what it promises, also when it is stopped."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from results_kit import Watch, at

from gossamer.experiments.arena import Simulation, simulate
from gossamer.experiments.arena.run_files import summarise
from gossamer.experiments.config.tables import parse_config
from gossamer.experiments.results import read_records

torch.set_num_threads(1)


def simulation(**table: Any) -> Simulation:
    base = {
        "name": "tiny",
        "peers": 3,
        "rounds": 3,
        "data": {"samples": 20, "test": 30},
        "tasks": [{"kind": "swap", "labels": [8, 9], "peers": 1}],
        "network": {"layout": "64=8=10"},
        "models": [{"name": "global", "layout": "64-6-10"}],
        "training": {"local_samples": 20},
    }
    return Simulation.of(parse_config(base | table))


def test_files(tmp_path: Path) -> None:
    made, watch = simulation(), Watch()
    files = simulate(made, at(tmp_path), callbacks=[watch])
    assert {file.name for file in files} == {"summary.csv", "accuracy.png", "accuracy.svg"}
    assert {file.name for file in tmp_path.iterdir()} == {
        *(file.name for file in files),
        "config.json",
        "metrics.jsonl",
        "peers.json",
        "run.json",
    }
    assert parse_config(json.loads((tmp_path / "config.json").read_text())) == made.config
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert [(r["round"], r["peer"], r["task"]) for r in records] == [
        (round, peer, task)
        for round in (1, 2, 3)
        for peer, task in (("0", "swap-8-9"), ("1", "identity"), ("2", "identity"))
    ]
    tests = [test for told in watch.told("test") for test in told.tests.values()]
    assert [r["accuracy"] for r in records] == [test.accuracy for test in tests]
    with (tmp_path / "summary.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    peers = json.loads((tmp_path / "peers.json").read_text())
    assert peers["links"] is None  # there is no topology: every peer may reach every other
    assert [(p["name"], p["task"]) for p in peers["peers"]] == [
        ("0", "swap-8-9"), ("1", "identity"), ("2", "identity"),
    ]  # fmt: skip
    assert all("global" in p["models"] for p in peers["peers"])
    assert header == ["peer", "task", "accuracy"]
    assert rows == [[r["peer"], r["task"], f"{r['accuracy']:.4f}"] for r in records[-3:]]


def test_one_seed_the_same_bytes_another_seed_others(tmp_path: Path) -> None:
    def run(name: str, seed: int) -> list[bytes]:
        simulate(simulation(seed=seed), at(tmp_path / name))
        names = ("metrics.jsonl", "summary.csv", "accuracy.svg")
        return [(tmp_path / name / file).read_bytes() for file in names]

    first = run("first", 1)
    assert first == run("second", 1)
    assert first[0] != run("third", 2)[0]


def test_interrupted_keeps_what_was_computed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate(simulation(), at(tmp_path), callbacks=[Watch(interrupt_at=3)])
    assert {r["round"] for r in read_records(tmp_path / "metrics.jsonl")} == {1, 2}
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 1 + 3
    assert (tmp_path / "accuracy.png").stat().st_size > 1000
    assert (tmp_path / "accuracy.svg").exists()


def test_rounds_that_were_not_tested_leave_no_metrics(tmp_path: Path) -> None:
    simulate(simulation(rounds=5, test_every=2), at(tmp_path))
    assert [r["round"] for r in read_records(tmp_path / "metrics.jsonl")][::3] == [2, 4, 5]


def test_networks_come_home_on_request(tmp_path: Path) -> None:
    made = simulation()
    files = simulate(made, at(tmp_path), networks=True)
    assert {f"{peer}.safetensors" for peer in range(3)} <= {file.name for file in files}
    fresh = simulation().members[1].network
    assert not torch.equal(fresh.flat, made.members[1].network.flat)
    fresh.load(tmp_path / "1.safetensors")
    assert torch.equal(fresh.flat, made.members[1].network.flat)


def test_pictures_are_drawn_from_the_files(tmp_path: Path) -> None:
    simulate(simulation(), at(tmp_path))
    before = (tmp_path / "accuracy.svg").read_bytes()
    for name in ("accuracy.svg", "accuracy.png", "summary.csv"):
        (tmp_path / name).unlink()
    summarise(tmp_path, "tiny")
    assert (tmp_path / "accuracy.svg").read_bytes() == before
    assert (tmp_path / "summary.csv").exists()


def test_nothing_computed_nothing_drawn(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert summarise(tmp_path, "tiny") == []


def test_links_of_a_topology_are_written(tmp_path: Path) -> None:
    simulate(simulation(topology="path", peers=4, rounds=1), at(tmp_path))
    links = json.loads((tmp_path / "peers.json").read_text())["links"]
    assert sorted(map(sorted, links)) == [["0", "1"], ["1", "2"], ["2", "3"]]
