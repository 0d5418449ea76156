"""`sharing = "auto"` in a config: peers decide what they share, and the run says what and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from results_kit import at

from gossamer.experiments.arena import simulate_in_time
from gossamer.experiments.arena.simulation import Simulation, simulate
from gossamer.experiments.build import Swarm
from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.federated.comparison import (
    Cell,
    Comparison,
    check,
    clients_of,
    parse_comparison,
)
from gossamer.experiments.federated.comparison import run as run_method
from gossamer.experiments.live.layout import SwarmLayout
from gossamer.experiments.study import Job
from gossamer.experiments.study.sweep import expand, run_cells, stackable_batches
from gossamer.topology import build

torch.set_num_threads(1)

SWAPPED = {"kind": "cycle", "last": 10, "peers": [1, 3, 5, 7, 9]}
BASE: dict[str, Any] = {
    "name": "auto",
    "peers": 10,
    "rounds": 14,
    "sharing": "auto",
    "data": {"samples": 120, "partition": "iid", "test": 60},
    "tasks": [SWAPPED],
    "network": {"layout": "64=30=10"},
    "training": {"local_samples": 120},
}


def run(folder: Path, **table: Any) -> tuple[dict[str, Any], Simulation]:
    """Simulate, and return sharing.json."""
    simulation = Simulation.of(parse_config(BASE | table))
    simulate(simulation, at(folder))
    return json.loads((folder / "sharing.json").read_text()), simulation


def test_a_run_reports_every_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, simulation = run(tmp_path)
    assert report["decisions"]
    err = capsys.readouterr().err
    for decision in report["decisions"]:
        assert err.count(decision["sentence"]) == 1
    first = report["decisions"][0]
    names = [str(peer) for peer in range(10)]
    assert sorted(name for group in first["groups"] for name in group) == sorted(names)
    assert [one["round"] for one in report["history"]] == [
        0, *(one["round"] for one in report["decisions"])
    ]  # fmt: skip
    chosen = [one for one in report["compared"] if one["chosen"]]
    assert [(one["round"], one["part"], one["gain"]) for one in chosen] == [
        (one["round"], one["part"], one["gain"]) for one in report["decisions"]
    ]
    assert report["assignment"] == report["history"][-1]["assignment"]
    assert simulation.sharing is not None
    assert report["assignment"] == simulation.sharing.assignment.as_record()
    assert (report["reason"], report["dry_run"]) == ("", False)


def test_a_dry_run_says_would_and_shares_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, simulation = run(tmp_path, dry_run=True)
    assert report["decisions"]
    assert "would become those of 2 groups of 5 and 5 peers after round" in capsys.readouterr().err
    assert len(report["history"]) == 1
    assert all(member.network.models == ("global",) for member in simulation.members)


def test_too_few_peers_is_a_warning_and_everything_is_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, simulation = run(tmp_path, peers=3, tasks=[], rounds=2)
    assert "3 peers are too few" in report["reason"]
    assert f"everything stays shared as it is: {report['reason']}" in capsys.readouterr().err
    assert all(member.network.models == ("global",) for member in simulation.members)


def test_a_frozen_layer_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "frozen_kit.py").write_text(FROZEN)
    monkeypatch.syspath_prepend(tmp_path)
    report, simulation = run(tmp_path / "out", network={"entry": "frozen_kit:make"}, rounds=2)
    assert [part["name"] for part in report["network"]["parts"]] == ["1", "3"]
    networks = [member.network for member in simulation.members]
    assert all(len(each.flat) == 8 * 10 + 10 for each in networks)
    assert len({each.frozen_digest() for each in networks}) == 1


FROZEN = """
from torch import nn
def make():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    net[1].requires_grad_(False)
    return net
"""


def test_it_works_on_a_graph_and_with_a_ready_network(tmp_path: Path) -> None:
    report, _ = run(
        tmp_path, topology="regular:4", rounds=3, network={"name": "small-cnn"},
        training={"local_samples": 10},
    )  # fmt: skip
    assert report["reason"] == ""
    assert len(report["network"]["parts"]) > 2


MODELS = [
    {"name": "global", "layout": "64-30-5"},
    {"name": "{task}", "layout": "0-0-5", "depends": ["global"]},
]


def test_models_of_some_peers_stay_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, _ = run(tmp_path, models=MODELS)
    assert "5 of 104 cells stay with the partial models given by hand" in capsys.readouterr().err
    cells = report["history"][0]["assignment"]["cells"]["2"]
    assert cells == {"0": [0, 1, 2, 3, 4], "2": [5, 6, 7, 8, 9]}
    assert [cell for cell in report["assignment"]["cells"]["2"]["2"] if cell >= 5] == [
        5,
        6,
        7,
        8,
        9,
    ]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"training": {"proximal": 0.1}}, r"training\.proximal"),
        ({"fednp": {}}, "fednp"),
        ({"topology": "ring", "gossip": {"compress": "int8"}}, r"gossip\.compress"),
        ({"data": {"set": "sparse"}, "network": {"layout": "50<>40"}, "tasks": []}, r"data\.set"),
        (
            {
                "network": {"layout": "64=30=10", "sizes": [{"layout": "64=20=10", "peers": 1}]},
            },
            r"network\.sizes",
        ),
        ({"network": {"name": "resnet", "buffers": "local"}}, "leave out buffers"),
        (
            {"models": [{"name": "global", "layout": "64-30-10", "matching": "align"}]},
            r"models\.0\.matching",
        ),
        (
            {"models": [{"name": "a", "layout": "64-30-0"}, {"name": "b", "layout": "0-0-10"}]},
            "let one model depend on the other",
        ),
    ],
)
def test_what_it_cannot_be_combined_with_is_one_line(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^c\.toml: key 'sharing': .*{words}") as caught:
        Simulation.of(parse_config(BASE | table), "c.toml", warn=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {"models": [{"name": "{task}", "layout": "64-30-10"}]},
            "no cells are left.*leave it out$",
        ),
        (
            {"models": [MODELS[0], {"name": "{task}", "layout": "0-0-5"}]},
            "average across models$",
        ),
        ({"dry_run": True}, r"dry run, which is for gossamer simulate \(dry_run\)"),
        ({"fednp": {}}, r"FedNP.*leave one of them out$"),
    ],
)
def test_what_live_peers_cannot_do_is_one_line(table: dict[str, Any], words: str) -> None:
    config = parse_config(BASE | table)
    with pytest.raises(ConfigError, match=rf"^c\.toml: key 'sharing': .*{words}"):
        SwarmLayout(config, "c.toml", Swarm(config, "c.toml"))


def test_a_live_swarm_with_too_few_samples_or_own_norm_buffers_is_one_line(tmp_path: Path) -> None:
    few = parse_config(BASE | {"data": BASE["data"] | {"samples": 9}})
    layout = SwarmLayout(few, "c.toml", Swarm(few, "c.toml"))
    with pytest.raises(
        ConfigError, match=r"'sharing': peer 0 has 9 training samples, and .* takes 10"
    ):
        layout.peer_specs(tmp_path)
    local = {"name": "resnet", "buffers": "local", "options": {"widths": [4], "blocks": 1}}
    normed = parse_config(BASE | {"network": local})
    with pytest.raises(ConfigError, match=r"'sharing': .*leave out buffers"):
        SwarmLayout(normed, "c.toml", Swarm(normed, "c.toml"))


def test_virtual_time_is_refused(tmp_path: Path) -> None:
    timed = parse_config(BASE | {"time": {}})
    with pytest.raises(ConfigError, match=r"key 'sharing': not in virtual time: .*or \[time\]"):
        simulate_in_time(timed, at(tmp_path / "timed"))


def test_a_sweep_compares_it_with_partial_models(tmp_path: Path) -> None:
    short = {"rounds": 3, "models": [{"name": "global", "layout": "64-30-10"}]}
    config = parse_config(BASE | short | {"sweep": {"sharing": ["models", "auto"], "seeds": 2}})
    cells = expand(config)
    batches = stackable_batches(cells)
    assert [len(batch) for batch in batches] == [2, 1, 1]  # decisions are made one swarm at a time
    records = [record for batch in batches for record in run_cells(batch, Job(tmp_path))]
    assert [record["settings"]["sharing"] for record in records] == ["models"] * 2 + ["auto"] * 2
    assert [record.get("decisions") for record in records] == [None, None, [], []]


def comparison(**table: Any) -> Comparison:
    base = {key: BASE[key] for key in ("peers", "data", "tasks", "network")}
    return parse_comparison(
        base
        | {"rounds": 14, "seeds": 1, "test_every": 14, "methods": {"auto": {}, "fedavg": {}}}
        | table,
        "c.toml",
    )


def test_in_a_comparison_it_is_a_method_that_counts_its_bytes() -> None:
    config = comparison()
    ends = {name: run_method(Cell(name, config, 0))["curve"][-1] for name in config.methods}
    accuracy = {name: sum(end["accuracy"]) / 10 for name, end in ends.items()}
    assert accuracy["auto"] > accuracy["fedavg"] + 0.2  # half the clients have other labels
    clients = clients_of(config, config.method("auto"), 0)
    values = len(clients[0].network.flat)
    links = build("exponential", 10, seed=0).number_of_edges()
    all_shared = 4 * values * links * 14
    # Statistics of decisions come on top; what groups share crosses fewer links.
    assert 0.5 * all_shared < ends["auto"]["bytes"] < 6 * all_shared


def test_a_comparison_warns_where_nothing_can_be_decided(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check(comparison(peers=3, tasks=[]), "c.toml")
    err = capsys.readouterr().err
    assert err.count("c.toml: in [methods.auto]: everything stays shared: 3 peers are too few") == 1
    local = {"name": "resnet", "buffers": "local", "options": {"widths": [4], "blocks": 1}}
    with pytest.raises(ConfigError, match=r"in \[methods.auto\]: .*leave out buffers"):
        check(comparison(network=local), "c.toml")
