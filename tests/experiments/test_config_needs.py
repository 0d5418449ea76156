"""Keys that have no effect are told, or refused where a sweep's rows or a run would not be what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_kit import Run as Command
from cli_kit import runs
from results_kit import at

from gossamer.experiments.arena import simulate_in_time
from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.config.needs import (
    NEEDS,
    Run,
    refuse_unused_axes,
    unused,
    warn_unused_keys,
)
from gossamer.experiments.config.tables import Config, ConfigError, parse_config
from gossamer.experiments.live.layout import plan
from gossamer.experiments.study.sweep import expand, outcome, sweep_study
from gossamer.peer import BrokerAddress

torch.set_num_threads(1)

SPARSE = {"data.set": "sparse", "network.layout": "50<>40"}
NAMED = {"network.name": "small-cnn"}
RING = {"topology": "ring"}
ROUNDS = {"gossip.mode": "rounds"}
SERVER = {"gossip.mode": "server"}
MEDIAN = ROUNDS | {"gossip.robust": "median"}
APART = {"network.equal_starts": False}
TIME = {"time.loss": 0.1}
TRACE = {"time.churn.trace": "trace.csv"}
TRAINED = {"network.trained": "nets/{peer}.safetensors"}
DIRICHLET, SHARDS = {"data.partition": "dirichlet"}, {"data.partition": "shards"}
MOMENTUM = {"training.optimizer": "momentum"}
NOTHING: dict[str, Any] = {}

# key, a value, what else there is where it does nothing, and where it does something; the run if not lockstep
Row = tuple[str, Any, dict[str, Any], dict[str, Any], Run | None]
ROWS: list[Row] = [
    ("rounds", 7, TIME | {"time.seconds": 5.0}, TIME, "virtual"),
    ("data.partition", "iid", SPARSE, NOTHING, None),
    ("data.alpha", 0.1, NOTHING, DIRICHLET, None),
    ("data.alpha", 0.1, SHARDS, DIRICHLET, "live"),
    ("data.shards", 3, DIRICHLET, SHARDS, None),
    ("data.minimum", 3, NOTHING, DIRICHLET, None),
    ("data.total", 300, SPARSE, NOTHING, None),
    ("data.tested", "own", SPARSE, NOTHING, None),
    ("tasks", [{"kind": "swaps", "labels": [1, 2]}], NOTHING, NOTHING, None),
    ("tasks", [{"kind": "swap", "labels": [1, 2], "last": 4}], NOTHING, NOTHING, None),
    ("network.activation", "tanh", NAMED, NOTHING, None),
    ("network.output", "tanh", SPARSE, NOTHING, None),
    ("network.buffers", "local", NOTHING, NAMED, None),
    ("network.start", "uniform", TRAINED, NOTHING, None),
    ("network.gain", 2.0, TRAINED, NOTHING, None),
    ("network.shift", 0.5, TRAINED, NOTHING, None),
    ("training.batch", 5, SPARSE, NOTHING, None),
    ("training.epochs", 2, SPARSE, NOTHING, None),
    ("training.reduction", "sum", SPARSE, NOTHING, None),
    ("training.optimizer", "adam", SPARSE, NOTHING, None),
    ("training.weight_decay", 0.1, SPARSE, NOTHING, None),
    ("training.loss", "squared", SPARSE, NOTHING, None),
    ("training.scheduler", "ExponentialLR", SPARSE, NOTHING, None),
    ("training.momentum", 0.5, SPARSE | MOMENTUM, MOMENTUM, None),
    ("training.metrics", ["f1"], SPARSE, NOTHING, None),
    ("network.sizes", [{"layout": "64=9=10", "peers": [0]}], SPARSE, NOTHING, None),
    ("dry_run", True, NOTHING, {"sharing": "auto"}, None),
    ("cross", True, {"sharing": "auto"}, NOTHING, None),
    ("gossip.mode", "rounds", NOTHING, RING, None),
    ("gossip.mode", "rounds", RING | {"gossip.exchanges": 2}, {"gossip.compress": "int8"}, None),
    ("gossip.exchanges", 3, NOTHING, RING, None),
    ("gossip.exchanges", 3, ROUNDS, ROUNDS | {"gossip.compress": "int8"}, None),
    ("gossip.exchanges", 3, SERVER, ROUNDS, "live"),
    ("gossip.tolerance", 0.1, RING, RING | ROUNDS, None),
    ("gossip.tolerance", 0.1, ROUNDS, RING | ROUNDS, "live"),
    ("gossip.tolerance", 0.1, RING | ROUNDS | {"gossip.exchanges": 2}, RING | ROUNDS, None),
    ("gossip.hostile", 1, NOTHING, {"gossip.mode": "steady"}, None),
    ("gossip.hostile", 1, MEDIAN, ROUNDS | {"gossip.robust": "trimmed"}, None),
    ("models", [{"name": "a", "share": 1.0, "matching": "align"}], NOTHING, APART, None),
    ("gossip.exchanges", 3, NOTHING, {"gossip.mode": "steady"}, None),
    ("gossip.rule", "metropolis", NOTHING, RING, None),
    ("gossip.fraction", 0.3, ROUNDS, NOTHING, "live"),
    ("time.slowdown", 4.0, NOTHING, {"time.stragglers": 0.5}, "virtual"),
    ("time.churn.leave", 0.2, TRACE, NOTHING, "virtual"),
    ("time.churn.arrive", 0.2, TRACE, NOTHING, "virtual"),
    ("time.churn.link_down", 0.2, TRACE, NOTHING, "virtual"),
    ("time.churn.link_up", 0.2, TRACE, {"time.churn.link_down": 0.1}, "virtual"),
    ("time.churn.link_up", 0.2, NOTHING, {"time.churn.link_down": 0.1}, "virtual"),
    ("time.churn.arrive", 0.2, {"time.churn.leave": 0.0}, NOTHING, "virtual"),
]
SELECTING: dict[str, dict[str, Any]] = {
    "tasks": {"kind": "swaps"},
    "models": {"name": "a", "share": 1.0},
    "network.sizes": {"layout": "64=3=10"},
    "time.partitions": {"start": 1.0, "end": 2.0},
}
LIVE_ONLY: dict[str, Any] = {
    "gossip.settle_tolerance": 0.1,
    "gossip.start_timeout": 1.0,
    "gossip.settle_timeout": 1.0,
    "gossip.leave_timeout": 1.0,
    "gossip.lease": 1.0,
    "gossip.silence": 1.0,
    "gossip.save_every": 1.0,
    "gossip.save_network_every": 1.0,
    "gossip.asleep": 1.0,
    "gossip.round_every": 1.0,
    "gossip.tick": 1.0,
    "gossip.connect_timeout": 1.0,
    "gossip.keepalive": 10,
    "gossip.checkpoint": False,
    "gossip.dtype": "float64",
    "gossip.per_process": 2,
    "gossip.max_packet": 1024,
    "gossip.banned": ["eve"],
    "trust": "swarm",
}
ELSEWHERE = {"time", "sweep", "gossip.fraction"}
"""Tested by themselves below."""


def made(**paths: Any) -> Config:
    table: dict[str, Any] = {}
    for path, value in paths.items():
        *way, last = path.split(".")
        place = table
        for step in way:
            place = place.setdefault(step, {})
        place[last] = value
    return parse_config(table)


def keys(config: Config, run: Run = "lockstep") -> list[str]:
    return [key for key, _ in unused(config, run)]


@pytest.mark.parametrize(("key", "value", "without", "within", "run"), ROWS)
def test_a_key_without_what_it_needs_is_told(
    key: str, value: Any, without: dict[str, Any], within: dict[str, Any], run: Run | None
) -> None:
    kind: Run = run or "lockstep"
    setting = {key: value}
    found = keys(made(**without, **setting), kind)
    if key == "tasks":
        assert [one.partition(".")[0] for one in found] == ["tasks"]
        assert keys(made(tasks=[{"kind": "swap", "labels": [1, 2]}]), kind) == []
        assert keys(made(tasks=[{"kind": "cycle", "last": 4}]), kind) == []
        return
    key = "models.0.matching" if key == "models" else key
    assert key in found
    assert key not in keys(made(**within, **setting), kind)
    assert key not in keys(made(**without), kind)  # left out, nobody asks for it


@pytest.mark.parametrize(("entries", "entry"), SELECTING.items())
def test_an_entry_for_no_peer_is_told(entries: str, entry: dict[str, Any]) -> None:
    for peers in (0, []):
        config = made(**{entries: [entry | {"peers": peers}]})
        assert keys(config, "virtual") == [f"{entries}.0.peers"]
    assert keys(made(**{entries: [entry | {"peers": [0]}]}), "virtual") == []


def test_the_table_is_tested_and_names_keys_that_there_are() -> None:
    known = {need.key for need in NEEDS}
    tested = {row[0] for row in ROWS} - {"tasks", "models"}
    tested |= {"tasks.*.labels", "tasks.*.last", "models.*.matching"}
    tested |= {f"{entries}.*.peers" for entries in SELECTING}
    assert known == tested | set(LIVE_ONLY) | ELSEWHERE
    assert len(known) == len(NEEDS)
    for need in NEEDS:
        fields: Any = Config
        for step in need.key.replace(".*", "").split("."):
            assert step in fields.model_fields
            annotation = fields.model_fields[step].annotation
            inner = [annotation, *getattr(annotation, "__args__", ())]
            fields = next((kind for kind in inner if hasattr(kind, "model_fields")), None)


@pytest.mark.parametrize(("key", "value"), LIVE_ONLY.items())
def test_what_live_peers_use_may_stand_in_a_simulated_config_but_not_in_a_sweep(
    key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = made(**{key: value})
    assert keys(config) == [key]
    assert keys(config, "live") == []
    warn_unused_keys(config, "lockstep")
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match=rf"key 'sweep\.{key}': has no effect here.*live peers"):
        refuse_unused_axes({key: [value, None]}, [config, made()])


SWEPT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"gossip.exchanges": [1, 3]}, "key 'sweep.gossip.exchanges': has no effect here"),
    (
        {},
        {"data.alpha": [0.05, 1.0]},
        """sweep.data.alpha'.*: it is for partition = "dirichlet\"""",
    ),
    ({}, {"test_every": [1, 2]}, "a sweep uses only the test of the last round"),
    ({}, {"name": ["a", "b"]}, "key 'sweep.name'"),
    ({}, {"gossip.fraction": [0.3, 0.6]}, "key 'sweep.gossip.fraction'.*\\[time\\] table"),
    ({}, {"trust.kind": ["none", "swarm"]}, "key 'sweep.trust.kind'.*live peers"),
    ({"tasks": [{"kind": "swaps"}]}, {"tasks.0.last": [2, 3]}, "key 'sweep.tasks.0.last'"),
    ({"time": {"seconds": 5.0}}, {"rounds": [2, 3]}, "key 'sweep.rounds'.*time.seconds"),
    ({"time": {}}, {"time.slowdown": [2.0, 3.0]}, "key 'sweep.time.slowdown'"),
]


@pytest.mark.parametrize(("base", "sweep", "message"), SWEPT)
def test_a_sweep_whose_rows_would_be_equal_is_refused(
    base: dict[str, Any], sweep: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        expand(parse_config(base | {"sweep": sweep}), "mine.toml")
    assert str(caught.value).startswith("mine.toml: key 'sweep.")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "sweep"),
    [
        (RING, {"gossip.exchanges": [1, 3]}),
        ({"time": {}}, {"gossip.exchanges": [1, 3], "gossip.fraction": [0.3, 0.6]}),
        ({}, {"data.partition": ["iid", "dirichlet"], "data.alpha": [0.1, 1.0]}),
        ({}, {"gossip.exchanges": [2]}),  # one value: nothing is compared
        ({"time": {}}, {"time.stragglers": [0.0, 0.5], "time.slowdown": [2.0, 3.0]}),
    ],
)
def test_a_key_that_does_something_in_some_runs_may_be_swept(
    base: dict[str, Any], sweep: dict[str, Any]
) -> None:
    assert expand(parse_config(base | {"sweep": sweep}))


def test_keys_that_a_sweep_does_not_use_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    table = {"name": "mine", "callbacks": ["gossamer.models:PrintProgress"], "test_every": 2}
    sweep_study(parse_config(table | {"sweep": {"training.rate": [0.1, 0.2]}}), "mine.toml")
    said = capsys.readouterr().err
    assert "mine.toml: key 'callbacks': has no effect here: a sweep does not call them" in said
    assert "key 'test_every': has no effect here" in said
    assert "key 'name'" not in said


def small(**changed: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "peers": 4,
        "rounds": 2,
        "data": {"samples": 20, "test": 30},
        "network": {"layout": "64=6=10"},
        "models": [{"name": "global", "layout": "64-6-10"}],
    }
    return base | changed


def test_the_table_is_right_about_what_does_nothing() -> None:
    """The rows that were found by running them: told to do nothing, they do nothing, and else something."""

    def results(base: dict[str, Any], key: str, values: list[Any]) -> set[tuple[float, float]]:
        above, last = key.split(".")
        found = set()
        for value in values:
            given = small(**base)
            given[above] = given.get(above, {}) | {last: value}
            one = outcome(parse_config(given))
            found.add((one.accuracy, one.worst))
        return found

    data = {"samples": 20, "test": 300}
    assert len(results({"data": data}, "data.alpha", [0.05, 100.0])) == 1
    dealt = {"data": data | {"partition": "dirichlet"}, "rounds": 5}
    assert len(results(dealt, "data.alpha", [0.05, 100.0])) == 2
    apart = {"data": data, "network": {"layout": "64=6=10", "equal_starts": False}, "rounds": 3}
    assert len(results(apart, "gossip.exchanges", [1, 9])) == 1
    assert len(results(apart | RING, "gossip.exchanges", [1, 9])) == 2


@pytest.mark.parametrize("run", ["lockstep", "virtual", "live"])
def test_a_config_of_another_kind_of_run_is_refused(run: Run, tmp_path: Path) -> None:
    def start(**changed: Any) -> None:
        config = parse_config(small(**changed))
        if run == "lockstep":
            Simulation.of(config, "mine.toml")
        elif run == "virtual":
            simulate_in_time(config, at(tmp_path), "mine.toml")
        else:
            plan(config, tmp_path, BrokerAddress("mqtt://127.0.0.1"), "mine.toml")

    with pytest.raises(ConfigError, match=r"^mine\.toml: key 'sweep': has no effect here"):
        start(sweep={"seeds": 3})
    if run != "virtual":
        with pytest.raises(ConfigError, match=r"^mine\.toml: key 'time': has no effect here"):
            start(time={"loss": 0.9})


gossamer = runs()


TOML = """
name = "tiny"
peers = 4
rounds = 2
data = {samples = 20, test = 30, alpha = 0.1}
network = {layout = "64=6=10"}
models = [{name = "global", layout = "64-6-10"}]
gossip = {exchanges = 3, lease = 5.0}
"""


def test_commands_tell_it_in_one_line_each(gossamer: Command, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TOML, "utf-8")
    result = gossamer("simulate", "tiny.toml", "-o", "out")
    said = [line for line in result.err.splitlines() if "has no effect" in line]
    assert [line.split(": has")[0] for line in said] == [
        *("tiny.toml: key 'data.alpha'", "tiny.toml: key 'gossip.exchanges'")
    ]
    (tmp_path / "sweep.toml").write_text(f"{TOML}[sweep]\ntraining.rate = [0.1, 0.2]\n", "utf-8")
    result = gossamer("sweep", "sweep.toml", "-o", "swept", "--on", "local:1")
    assert result.err.count("key 'data.alpha': has no effect here") == 1
    assert result.err.count("has no effect") == 2
