"""Named metrics reach files, pictures, tables, pages and summaries, for simulated and for live peers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from cli_kit import Run, runs
from waiting import PATIENCE

from gossamer.experiments.cli import console
from gossamer.experiments.page.folders import RunFolder, read_folders
from gossamer.experiments.study.figures import draw_metrics
from gossamer.gossip import MemoryBroker, MemoryTransport, topics
from gossamer.models import SgdLearner, SlicedNetwork, mlp
from gossamer.peer import Peer, Settings, Summary, is_record, read_summary

CONFIG = """
name = "tiny"
peers = 2
rounds = 2
[data]
samples = 20
[network]
layout = "64=6=10"
[training]
local_samples = 20
metrics = ["f1", "tiny_metrics:top_three"]
[[models]]
name = "all"
layout = "64-6-10"
"""
OWN = """
def top_three(outputs, labels):
    near = outputs.topk(3, dim=1).indices == labels[:, None]
    return {"top_3": float(near.any(1).double().mean())}
"""
gossamer = runs("simulate", tiny=CONFIG, unknown=CONFIG.replace("f1", "aucc"))


def test_a_simulation_writes_and_draws_them(gossamer: Run) -> None:
    Path("tiny_metrics.py").write_text(OWN)
    assert gossamer("tiny.toml").code == 0
    folder = Path("results/tiny/latest")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(record["metrics"].keys() == {"f1", "top_3"} for record in records)
    with (folder / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    last = {record["peer"]: record["metrics"] for record in records}
    assert {row["peer"]: row["f1"] for row in rows} == {
        peer: f"{values['f1']:.4f}" for peer, values in last.items()
    }
    assert (folder / "metrics.png").stat().st_size > 1000
    (run_folder,) = read_folders([folder])
    assert isinstance(run_folder, RunFolder)
    history = run_folder.history()
    mean = sum(values["top_3"] for values in last.values()) / 2
    assert history.metrics["top_3"].y[-1] == pytest.approx(mean)
    assert history.peers["0"].metrics == pytest.approx(last["0"])


def test_the_lowest_panel_of_each_column_has_an_axis(tmp_path: Path) -> None:
    record = {"round": 1, "peer": "0", "metrics": {f"m{i}": 0.5 for i in range(4)}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    _, svg = draw_metrics(tmp_path, "four metrics in three columns")
    assert svg.read_text().count("<!-- round -->") == 3


def test_an_unknown_metric_is_named_with_its_key(gossamer: Run) -> None:
    Path("tiny_metrics.py").write_text(OWN)
    error = gossamer("unknown.toml").err
    assert (
        "unknown.toml: key 'training.metrics': unknown metric 'aucc'; did you mean 'auc'?" in error
    )


@pytest.mark.timeout(4 * PATIENCE)
def test_a_live_peer_publishes_them(run) -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    network = SlicedNetwork(mlp("4=5=2"), {"all": "4-5-2"}, seed=0)
    learner = SgdLearner(
        network, (x, y), (x, y), local_samples=30, metrics=["f1", "class-accuracy"]
    )
    broker, records = MemoryBroker(), []
    peer = Peer(
        "ann", learner, Settings(swarm="nest", rounds=2, expect=("ann",)),
        lambda client, will, hook: MemoryTransport(broker, client, will=will, on_connect=hook),
        on_record=records.append,
    )  # fmt: skip
    run(peer.run())
    tested = [record for record in records if "metrics" in record]
    assert tested
    assert all(map(is_record, tested))
    names = {"f1", "accuracy_0", "accuracy_1"}
    assert tested[-1]["metrics"].keys() == names
    summary = read_summary(broker.retained[topics.summary("nest", "ann")])
    assert summary is not None
    assert summary.named_metrics == tested[-1]["metrics"]
    assert summary.metrics["accuracy"] == tested[-1]["accuracy"]


def test_a_long_summary_leaves_out_named_metrics_last_of_all_but_models() -> None:
    metrics = {"accuracy": 0.5, "loss": 1.0} | {f"accuracy_{i}": 0.5 for i in range(500)}
    summary = Summary("s1", 1.0, 0.0, "training", "training", 1, 2, "1.0.0", metrics=metrics)
    data = summary.encode(limit=4096)
    assert data is not None
    told = read_summary(data)
    assert told is not None
    assert (told.metrics["accuracy"], told.metrics["loss"]) == (0.5, 1.0)
    assert 0 < len(told.named_metrics) < 500


def test_tables_of_peers_have_columns_for_a_few() -> None:
    peers = [{"f1": 0.5}, {"auc": None, "f1": 0.25}, {}]
    names = console.metric_columns(peers)
    assert names == ["auc", "f1"]
    assert console.metric_cells(peers[0], names) == ["", "0.500"]
    assert console.metric_cells(peers[1], names) == ["nan", "0.250"]
    assert len(console.metric_columns([{f"accuracy_{i}": 0.1 for i in range(9)}])) == 4
