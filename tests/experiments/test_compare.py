"""`gossamer compare`: configs and their mistakes, dealing, curves, standings, and the command itself."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_kit import runner
from hypothesis import given
from hypothesis import strategies as st

from gossamer.experiments import compare, read
from gossamer.experiments.config.tables import ConfigError
from gossamer.experiments.data import partition
from gossamer.experiments.federated import METHODS, Local, PartialModels
from gossamer.experiments.federated.comparison import (
    Cell,
    Comparison,
    cells_of,
    check,
    choose,
    clients_of,
    common_budget,
    differences,
    draw,
    early_stops,
    load_comparison,
    parse_comparison,
    run,
    standings,
    table,
    values_within,
    worst_decile,
)
from gossamer.experiments.federated.fedavg import FedAvg, FedProx
from gossamer.experiments.federated.method import RoundContext
from gossamer.experiments.results import read_records
from gossamer.models import Callback, ModelError, SgdLearner, SlicedNetwork

torch.set_num_threads(1)
CONFIGS = Path(__file__).parents[2] / "experiments" / "configs"

SMALL: dict[str, Any] = {
    "name": "small",
    "peers": 3,
    "rounds": 3,
    "seeds": 2,
    "data": {"total": 90, "partition": "dirichlet", "minimum": 10, "tested": "own"},
    "network": {"layout": "64=8=10"},
    "methods": {"fedavg": {}, "gossamer": {}, "local": {}},
}
IID = {"total": 90, "tested": "own", "partition": "iid"}
TOML = """
name = "small"
peers = 3
rounds = 3
seeds = 2
[data]
total = 90
partition = "dirichlet"
minimum = 10
[network]
layout = "64=8=10"
[methods.fedavg]
[methods.gossamer]
[methods.local]
"""


def small(**changes: Any) -> Comparison:
    return parse_comparison({**SMALL, **changes})


# --- configs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["compare.toml", "compare-cifar.toml"])
def test_the_configs_that_come_along_have_every_method(name):
    found = load_comparison(CONFIGS / name)
    assert {found.registered_name(entry) for entry in found.methods} >= set(METHODS) - {"fednp"}
    assert found.seeds == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {"fedprox": {"mu": -1.0}}}, r"in \[methods.fedprox\]: key 'mu': .* not -1"),
        ({"methods": {"fedprox": {"mi": 1.0}}}, r"unknown key 'mi'; did you mean 'mu'"),
        ({"methods": {"feddyn": {"alpha": 0}}}, r"key 'alpha': .* greater than 0, not 0"),
        ({"methods": {"fedavg": {"rate": -0.1}}}, r"key 'rate': .* greater than 0"),
        ({"methods": {"fedavg": {"compress": "int99x"}}}, r"key 'compress': .*int99x"),
        ({"methods": {"fedavgg": {}}}, r"no method is called 'fedavgg'; did you mean 'fedavg'"),
        (
            {"methods": {"fedbn": {}}},
            r"no method is called 'fedbn'; write method = \"gossamer\", .*buffers",
        ),
        ({"methods": {"fedadam": {}}}, r"no method is called 'fedadam'; there are fedavg, fedprox"),
        (
            {"methods": {"fedprox": {"proximal_mu": 1}}},
            r"unknown key 'proximal_mu'; did you mean 'mu'",
        ),
        ({"methods": {"mine": {"method": "fedproxy"}}}, r"did you mean 'fedprox'"),
        ({"methods": {}}, r"key 'methods': is empty; .*Methods are fedavg"),
        ({"training": {"rate": 0.0}}, r"key 'training.rate': .* greater than 0, not 0"),
        ({"data": {"alpha": -1.0}}, r"key 'data.alpha'"),
        ({"split": {"kind": "iid"}}, r"unknown key 'split'; its keys are in \[data\] now"),
        ({"network": {"kind": "resnet"}}, r"unknown key 'network.kind'; it is called name now"),
        ({"data": {"set": "sparse"}}, r"methods need gradients"),
        ({"network": {"options": {"hidden": 4}}}, r"key 'network': .* a perceptron has a layout"),
        ({"peers": 1}, r"key 'peers': should be at least 2 clients, not 1"),
        ({"rounds": "30"}, r"key 'rounds'"),
        (
            {"server": False, "methods": {"fedper": {}}},
            r"'fedper' \(fedper\) needs a server, .* nearest method without one is 'gossamer'",
        ),
        (
            {"server": False, "methods": {"mine": {"method": "scaffold"}}},
            r"'mine' \(scaffold\) needs a server, .* 'gossip-sgd'",
        ),
    ],
)
def test_a_mistake_is_named(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_comparison({**SMALL, **changes}, "small.toml")
    assert str(caught.value).startswith("small.toml: ")


def test_without_a_server_the_others_are_welcome():
    methods = {name: {} for name, method in METHODS.items() if not method.needs_server}
    assert {"gossip-sgd", "gossamer"} <= set(small(server=False, methods=methods).methods)
    for method in METHODS.values():
        assert not METHODS[method.nearest_without_server].needs_server


def test_one_method_may_be_there_twice():
    found = small(methods={"weak": {"method": "fedprox", "mu": 0.1}, "fedprox": {"mu": 1.0}})
    assert [found.method(name).mu for name in found.methods] == [0.1, 1.0]  # type: ignore[attr-defined]
    assert list(choose(found, ["weak"]).methods) == ["weak"]
    with pytest.raises(ConfigError, match=r"--only week: .* did you mean 'weak'"):
        choose(found, ["week"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"total": 5000}}, "key 'data': data.total asks for 5000 .*, but there are only 1437"),
        ({"training": {"reduction": "sum"}}, "key 'training.reduction': .* the mean loss of a batch"),
        ({"training": {"local_samples": 50}}, "key 'training.local_samples': .*write training.epochs"),
        ({"network": {"layout": "64=8=10", "equal_starts": False}}, "start from the same values"),
        ({"data": {"set": "digit"}}, "did you mean 'digits'"),
        ({"network": {"layout": "60=8=10"}}, "60 cells, but digits has 64 features"),
        ({"network": {"name": "small-cnn", "options": {"width": 4}}}, "has no 'width'; it has .*widths"),
        ({"data": {"partition": "natural"}}, "no natural groups"),
        ({"methods": {"fedper": {"personal": 2}}}, r"\[methods.fedper\]: fedper: personal is 2"),
        ({"methods": {"gossip-sgd": {"topology": "rng"}}}, r"\[methods.gossip-sgd\]: .*did you mean 'ring'"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused_before_anything_runs(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check(small(**changes), "small.toml")
    assert str(caught.value).startswith("small.toml: ")


# --- dealing --------------------------------------------------------------------------------------


def test_clients_are_the_same_for_every_method_and_differ_by_seed():
    config = small()
    one, two = (clients_of(config, METHODS[m](), 0) for m in ("fedavg", "gossamer"))
    other = clients_of(config, FedAvg(), 1)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.values(), one[0].values())
        assert torch.equal(a.values(), b.values())
        assert torch.equal(a.learner.samples[0], b.learner.samples[0])
        assert torch.equal(a.learner.draw(5), b.learner.draw(5))
    assert sum(client.sample_count for client in one) == 90
    assert not torch.equal(one[0].values(), other[0].values())


def test_rate_and_epochs_of_a_method_are_its_own():
    [client, *_] = clients_of(small(), FedAvg(rate=0.7, epochs=3), 0)
    assert client.epochs == 3
    before = client.values()
    client.train_samples(10)
    [twin, *_] = clients_of(small(training={"rate": 0.35}), FedAvg(), 0)
    twin.train_samples(10)
    moved, half = client.values() - before, twin.values() - before
    assert torch.allclose(moved, 2 * half, atol=1e-6)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
)
def test_own_tests_have_the_clients_shares_of_classes(own, there):
    labels = np.repeat(np.arange(4), there)
    wanted = np.bincount(own, minlength=4) / len(own)
    try:
        chosen = partition.with_class_shares(labels, np.array(own), 4)
    except ValueError:
        assert max(there) < len(own)  # every class too rare for one whole sample
        return
    found = np.bincount(labels[chosen], minlength=4)
    scale = min(there[k] / wanted[k] for k in range(4) if wanted[k])
    assert (np.abs(found - scale * wanted) < 1 + 1e-6).all()
    assert len(set(chosen.tolist())) == len(chosen)


def test_swapped_labels_are_swapped_in_training_and_test():
    plain, swapped = (
        clients_of(small(tasks=tasks), FedAvg(), 0) for tasks in ([], [{"kind": "swaps"}])
    )
    for one, other in zip(plain, swapped, strict=True):
        for what in ("samples", "held_out"):
            (x, y), (x2, y2) = getattr(one.learner, what), getattr(other.learner, what)
            assert torch.equal(x, x2)
            assert int((y != y2).sum()) > 0
            assert len(set(zip(y.tolist(), y2.tolist(), strict=True))) <= 10


def test_common_tests_are_the_same_object_for_all():
    clients = clients_of(small(data={"total": 90, "tested": "common"}), FedAvg(), 0)
    assert len({id(client.learner.held_out[1]) for client in clients}) == 1
    assert clients[0].test().samples == 360


def test_a_network_of_ones_own_is_compared(tmp_path):
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n"
        "def make(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, classes))\n"
    )
    source = str(tmp_path / "small.toml")
    config = small(network={"entry": "own_net:make"}, methods={"fedavg": {}, "gossamer": {}})
    check(config, source)
    first = Cell("gossamer", config, 0, source)
    record = run(first)
    assert len(record["curve"][-1]["accuracy"]) == 3
    with (tmp_path / "own_net.py").open("a") as file:
        file.write("# changed\n")
    assert Cell("gossamer", config, 0, source).key != first.key


def test_a_worker_finds_a_method_beside_the_config(tmp_path):
    (tmp_path / "own_method.py").write_text(
        "from gossamer.experiments.federated import METHODS\n"
        "class Mine(METHODS['fedavg']):\n"
        "    pass\n"
    )
    source = str(tmp_path / "small.toml")
    methods = {"mine": {"method": "own_method:Mine"}}
    cell = Cell("mine", parse_comparison(SMALL | {"methods": methods}, source), 0, source)
    (tmp_path / "cell").write_bytes(pickle.dumps(cell))
    program = (
        "import pickle, sys; from pathlib import Path; "
        "from gossamer.experiments.federated.comparison import run; "
        "print(run(pickle.loads(Path(sys.argv[1]).read_bytes()))['method'])"
    )
    worker = [sys.executable, "-c", program, str(tmp_path / "cell")]
    done = subprocess.run(worker, capture_output=True, text=True, check=False)
    assert done.stdout == "mine\n", done.stderr


# --- runs and standings ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_something(name):
    config = small(methods={name: {}}, rounds=8, test_every=8, data=IID)
    record = run(Cell(name, config, 0))
    start, end = record["curve"][0], record["curve"][-1]
    assert (start["round"], end["round"]) == (0, 8)
    assert start["bytes"] == 0
    assert (end["bytes"] == 0) == METHODS[name].is_bound
    assert np.mean(end["accuracy"]) > np.mean(start["accuracy"]) + 0.1


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_networks_for_images_with_norms(name):
    network = {"name": "resnet", "options": {"widths": [3, 4]}}
    config = small(methods={name: {}}, rounds=2, test_every=2, network=network)
    record = run(Cell(name, config, 0))
    assert len(record["curve"][-1]["accuracy"]) == 3
    assert all(0 <= accuracy <= 1 for accuracy in record["curve"][-1]["accuracy"])


def test_a_run_is_its_seeds_and_nobody_elses():
    config = small()
    first, again = (run(Cell("fedavg", config, 0)) for _ in range(2))
    for record in (first, again):
        for point in record["curve"]:
            point.pop("seconds")
    assert first == again


def test_a_key_changes_with_what_decides_the_result_only():
    def key(name: str = "fedavg", **changes: Any) -> str:
        return Cell(name, small(**changes), 0).key

    assert key() == key(seeds=9) == key(methods={"fedavg": {}}) == key(name="fedavg")
    others = [
        key("gossamer"), key(rounds=4), key(training={"rate": 0.2}),
        key(methods={"fedavg": {"participation": 0.5}}),
        Cell("fedavg", small(), 1).key,
    ]  # fmt: skip
    assert len({key(), *others}) == len(others) + 1


def test_the_file_of_a_graph_is_looked_for_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "line.edges").write_text("0 1\n1 2\n")
    method = {"gossip-sgd": {"topology": "line.edges"}}
    table = small(methods=method).model_dump(mode="json")
    config = parse_comparison(table, str(tmp_path / "mine.toml"))
    clients = clients_of(config, config.method("gossip-sgd"), 0)
    state = config.method("gossip-sgd").start(clients)
    assert state.neighbours == ((1,), (0, 2), (1,))
    source = str(tmp_path / "mine.toml")
    before = Cell("gossip-sgd", config, 0, source).key
    (tmp_path / "line.edges").write_text("0 1\n0 2\n")
    assert Cell("gossip-sgd", config, 0, source).key != before


class LaterComparison(Comparison):
    """The comparison of a release that has added a key."""

    momentum: float = 0.5


def test_a_key_that_a_release_adds_keeps_finished_runs_valid():
    before = small()
    later = LaterComparison(**before.model_dump(exclude_unset=True))
    assert Cell("fedavg", later, 0).key == Cell("fedavg", before, 0).key
    changed = later.model_copy(update={"momentum": 0.9})
    assert Cell("fedavg", changed, 0).key != Cell("fedavg", before, 0).key


def test_compression_sends_less_and_still_learns():
    methods = {"plain": {"method": "fedavg"}, "int8": {"method": "fedavg", "compress": "int8"}}
    config = small(methods=methods, rounds=8, data=IID)
    plain, packed = (run(Cell(name, config, 0))["curve"][-1] for name in methods)
    assert plain["bytes"] > 1.5 * packed["bytes"]  # what comes down is not compressed
    assert abs(np.mean(plain["accuracy"]) - np.mean(packed["accuracy"])) < 0.05


def test_compressed_changes_arrive_nearly_as_they_were():
    values, since = torch.randn(500), torch.randn(500)
    context = RoundContext(np.random.default_rng(0), "int8", [(20, 20), (100,)])
    found = context.to_server(values, relative_to=since)
    assert 0 < float((found - values).abs().max()) < 0.1
    assert 500 < context.bytes_to_server < 700


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_the_worst_decile_is_at_most_the_mean_and_at_least_the_worst(accuracies):
    found = worst_decile(accuracies)
    assert min(accuracies) - 1e-12 <= found <= np.mean(accuracies) + 1e-12


def _record(method: str, seed: int, curve: list[tuple[int, list[float]]], bound: bool = False):
    points = [
        {"round": index, "bytes": sent, "seconds": 0.5 * index, "accuracy": accuracy}
        for index, (sent, accuracy) in enumerate(curve)
    ]
    return {"method": method, "seed": seed, "bound": bound, "curve": points}


def test_standings_at_equal_rounds_and_at_equal_bytes():
    records = [
        _record("dear", 0, [(0, [0.1, 0.1]), (100, [0.5, 0.3]), (200, [0.9, 0.7])]),
        _record("dear", 1, [(0, [0.1, 0.1]), (100, [0.4, 0.4]), (200, [0.6, 0.6])]),
        _record("cheap", 0, [(0, [0.1, 0.1]), (70, [0.2, 0.2]), (140, [0.5, 0.7])]),
        _record("alone", 0, [(0, [0.1, 0.1]), (0, [0.2, 0.2]), (0, [0.3, 0.5])], bound=True),
    ]
    assert common_budget(records) == 140
    assert values_within(records[0], 140) == pytest.approx([0.66, 0.46])  # between two tests
    assert values_within(records[0], 99) is None  # only the untrained network was tested by then
    assert values_within(records[0], 1000) == [0.9, 0.7]
    dear, cheap, alone = standings(records).itertuples()
    assert (dear.seeds, dear.rounds, dear.bytes) == (2, 2, 200)
    assert dear.accuracy == pytest.approx(0.7)
    assert dear.worst == pytest.approx((0.7 + 0.6) / 2)
    assert dear.at_bytes == pytest.approx((0.56 + 0.48) / 2)
    assert dear.worst_at_bytes == pytest.approx((0.46 + 0.48) / 2)
    assert cheap.at_bytes == cheap.accuracy == pytest.approx(0.6)
    assert np.isnan(alone.at_bytes)
    assert alone.bound


def test_a_cell_is_empty_where_only_the_untrained_network_was_tested():
    records = [
        _record("dear", 0, [(0, [0.1]), (500, [0.9])]),
        _record("dear", 1, [(0, [0.1]), (100, [0.9])]),
        _record("cheap", 0, [(0, [0.1]), (200, [0.5])]),
    ]
    assert common_budget(records) == 100
    dear, cheap = standings(records).itertuples()
    assert np.isnan(dear.at_bytes)  # of one seed there is none
    assert np.isnan(cheap.at_bytes)
    assert table(records)["summary"]["at 0.0001 MB"].tolist() == ["", ""]


def test_differences_are_paired_by_seed():
    base = [0.5, 0.6, 0.8]  # seeds differ by more than the methods do
    records = [
        _record(
            method,
            seed,
            [(0, [0.0] * 10), (10, [value + gain + (k == 0) * -0.2 for k in range(10)])],
        )
        for seed, value in enumerate(base)
        for method, gain in (("one", 0.0), ("two", 0.1 + 0.01 * seed))
    ]
    rows = differences(records).set_index("measure")
    row = rows.loc["accuracy"]
    assert (row.method, row.reference, row.seeds) == ("two", "one", 3)
    assert row.difference == pytest.approx(0.11)
    half = 4.302653 * 0.01 / 3**0.5  # Student's t for two degrees of freedom
    assert (row.low, row.high) == pytest.approx((0.11 - half, 0.11 + half), abs=1e-6)
    assert rows.loc["worst"].difference == pytest.approx(0.11)
    assert differences(records, "two").iloc[0].difference == pytest.approx(-0.11)
    printed = table(records)["differences"]
    assert printed["what"][0] == "two − one"
    assert printed["low"][0] == f"{0.11 - half:+.3f}"
    for seeds in (1, 2):  # too few for an interval
        few = differences(records[: 2 * seeds]).iloc[0]
        assert np.isnan(few.low)
        assert few.seeds == seeds


def test_of_a_loss_less_is_better():
    assert worst_decile([1.0, 5.0, 3.0], "loss") == 5.0
    assert worst_decile([1.0, 5.0, 3.0], "rmse") == 5.0
    assert worst_decile([1.0, 5.0, 3.0]) == 1.0
    config = small(metric="loss", seeds=1)
    record = run(Cell("fedavg", config, 0))
    end = record["curve"][-1]
    assert end["values"] != end["accuracy"]
    rows = table([record, {**record, "method": "other", "curve": [
        {**point, "values": [v / 2 for v in point["values"]]} for point in record["curve"]
    ]}])["summary"]  # fmt: skip
    assert rows["method"].tolist() == ["other", "fedavg"]
    assert "loss" in rows.columns


def test_an_unknown_metric_is_refused():
    with pytest.raises(ConfigError, match="key 'metric': tests of 'fedavg' measure no 'f1'"):
        run(Cell("fedavg", small(metric="f1"), 0))
    with pytest.raises(ConfigError, match=r"measure no 'f2'; .*did you mean 'f1'"):
        check(small(metric="f2", training={"metrics": ["f1"]}))  # before the first run
    named = small(metric="f1", training={"metrics": ["f1"]})
    assert 0 <= run(Cell("fedavg", named, 0))["curve"][-1]["values"][0] <= 1


def test_a_metric_has_its_own_name_and_the_others_have_columns_too():
    record = run(Cell("fedavg", small(metric="f1", training={"metrics": ["f1", "auc"]}), 0))
    end = record["curve"][-1]
    row = standings([record]).iloc[0]
    assert row["f1"] == pytest.approx(np.mean(end["values"]))
    assert row["accuracy"] == pytest.approx(np.mean(end["accuracy"]))
    assert row["auc"] == pytest.approx(np.mean(end["metrics"]["auc"]))
    assert {"f1", "accuracy", "auc"} <= set(table([record])["summary"].columns)
    paired = differences([record, {**record, "method": "other"}])
    assert paired["measure"][0] == "f1"


def stopped(method: str, seed: int, rounds: int, planned: int = 3):
    record = _record(method, seed, [(10 * n, [0.1 * n, 0.2 * n]) for n in range(rounds + 1)])
    return record | ({"stopped_by": "Early"} if rounds < planned else {})


def test_runs_that_a_callback_stopped_are_told_in_table_and_picture(tmp_path):
    records = [
        stopped("one", 0, 3),
        stopped("one", 1, 2),
        stopped("two", 0, 3),
        stopped("two", 1, 3),
    ]
    assert early_stops(records) == ["one: stopped by callback Early: seed 1 after round 2"]
    rows = table(records)["summary"].set_index("method")["rounds"]
    assert rows.to_dict() == {"one": "2 to 3", "two": "3"}
    assert standings(records)["stopped"].tolist() == [1, 0]
    _, svg = draw(records, tmp_path / "stopped", "tiny")
    assert "1 of 4 runs stopped early" in svg.read_text()
    complete = [stopped("one", 0, 3), stopped("two", 0, 3)]
    assert "rounds" not in table(complete)["summary"].columns
    _, svg = draw(complete, tmp_path / "complete", "tiny")
    assert "stopped early" not in svg.read_text()
    assert "bounds" not in svg.read_text()  # there is none
    assert "worst client" in svg.read_text()  # of two clients


def test_norms_of_ones_own_and_layers_by_name_are_methods():
    network = {"name": "resnet", "options": {"widths": [3, 4]}}
    methods = {
        "shared": {"method": "gossamer", "outputs": "shared"},
        "fedbn": {"method": "gossamer", "outputs": "shared", "buffers": "local"},
        "table": {"method": "gossamer", "share": {"*": 1.0}},
    }
    config = small(methods=methods, network=network)
    sizes = {}
    for name in methods:
        clients = clients_of(config, config.method(name), 0)
        config.method(name).start(clients)
        sizes[name] = len(clients[0].network.read("everyone"))
    plain = clients_of(config, config.method("shared"), 0)[0].network
    norms = [m for m in plain.module.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    own = 4 * sum(norm.num_features for norm in norms)  # gains, biases, means and variances
    assert sizes["shared"] - sizes["fedbn"] == own > 0
    assert sizes["table"] < sizes["shared"]  # outputs stay each client's own
    parts = plain.slicing.anatomy.parts
    method = PartialModels(share={"*": 1.0, parts[-1].name: 1.0})
    clients = clients_of(config, method, 0)
    method.start(clients)
    assert len(clients[0].network.read("everyone")) == sizes["shared"]
    no_norms = small(methods=methods)
    method = no_norms.method("fedbn")
    clients = clients_of(no_norms, method, 0)
    with pytest.raises(
        ModelError, match='buffers = "local" has no effect: the network has no batch'
    ):
        method.start(clients)
    with pytest.raises(ConfigError, match="a table of fractions by part"):
        small(methods={"gossamer": {"share": "half"}}).method("gossamer")


OWN = """
from torch import nn
from gossamer.experiments.federated import FedAvg

class Mine(FedAvg):
    strength: float = 1.0

def net(size, classes):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size * size, 12), nn.Tanh(), nn.Linear(12, classes)
    )
"""


def test_a_config_names_a_network_and_a_method_of_ones_own(tmp_path):
    (tmp_path / "my_methods.py").write_text(OWN, "utf-8")
    source = str(tmp_path / "own.toml")
    changes = {"network": {"entry": "my_methods:net"}, "reference": "fedavg"}
    methods = {"mine": {"method": "my_methods:Mine", "strength": 2.0}, "fedavg": {}}
    config = parse_comparison({**SMALL, **changes, "methods": methods}, source)
    mine, fedavg = (run(Cell(name, config, 0, source)) for name in methods)
    assert [p["accuracy"] for p in mine["curve"]] == [p["accuracy"] for p in fedavg["curve"]]
    assert set(table([mine, fedavg], "fedavg")["differences"]["what"]) == {"mine − fedavg"}
    before = Cell("mine", config, 0, source).key
    (tmp_path / "my_methods.py").write_text(OWN + "\n", "utf-8")
    assert Cell("mine", config, 0, source).key != before
    for method, words in (
        ("my_methods:net", "is not a subclass"),
        ("my_methods:Absent", "no function"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_comparison({**SMALL, "methods": {"mine": {"method": method}}}, source)
    with pytest.raises(ConfigError, match="key 'reference': no method is called 'fed'"):
        parse_comparison({**SMALL, "reference": "fed"})


# --- in Python ------------------------------------------------------------------------------------


def learners(seed):
    """Clients of a network of one's own, each with its own samples."""
    made = []
    for peer in range(3):
        generator = torch.Generator().manual_seed(10 * seed + peer)
        x = torch.randn(40, 6, generator=generator)
        y = (x[:, peer] > 0).long()
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        network = SlicedNetwork(module, {"everyone": 1.0}, peer=str(peer), example=x[:2])
        made.append(
            SgdLearner(
                network, (x[:30], y[:30]), (x[30:], y[30:]), batch=10, rate=0.3, seed=peer,
                reduction="mean", loss="cross-entropy", metrics=["f1"],
            )
        )  # fmt: skip
    return made


def test_compare_takes_networks_and_methods_as_objects(tmp_path):
    methods = {"fedavg": FedAvg(), "gossamer": PartialModels(share=0.5), "local": Local(epochs=2)}
    found = compare(methods, learners, rounds=4, seeds=2, test_every=2, metric="f1")
    assert found.summary["method"].tolist() == list(methods)
    assert found.summary["bound"].tolist() == [False, False, True]
    assert set(found.differences["method"]) == {"gossamer", "local"}
    clients = found.clients
    assert (
        len(clients) == 3 * 2 * 3 * 3
    )  # methods, seeds, tests (one before the first round), clients
    end = clients[(clients["method"] == "fedavg") & (clients["round"] == 4)]
    assert end["f1"].mean() == pytest.approx(found.summary["f1"][0])
    assert end["accuracy"].mean() == pytest.approx(found.summary["accuracy"][0])
    again = compare(methods, learners, rounds=4, seeds=[0, 1], test_every=2, metric="f1")
    assert again.clients.equals(clients)
    assert {file.suffix for file in found.draw(tmp_path / "mine")} == {".png", ".svg"}


def test_compare_says_what_is_wrong():
    with pytest.raises(ModelError, match="no method is called 'fedprox'"):
        compare({"fedavg": FedAvg()}, learners, reference="fedprox")
    with pytest.raises(ModelError, match="'fedavg' has a rate: give it to the learners"):
        compare({"fedavg": FedAvg(rate=0.1)}, learners)
    with pytest.raises(ModelError, match="at least one method"):
        compare({}, learners)
    with pytest.raises(ModelError, match="method 'a' is 'fedavg': give an object"):
        compare({"a": "fedavg"}, learners)  # type: ignore[dict-item]
    with pytest.raises(ModelError, match="learners: give a function that takes a seed"):
        compare({"a": FedAvg()}, learners(0))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="unknown key 'nu'; did you mean 'mu'"):
        FedProx(nu=0.1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ModelError, match=r"FedProx: key 'mu': .*not -1"):
        FedProx(mu=-1)


def test_compare_refuses_all_methods_before_the_first_run():
    class Impossible(FedAvg):
        def start(self, clients):
            raise ModelError("impossible")

    followed = []

    def follow(method, seed):
        followed.append(method)
        return ()

    methods = {"fedavg": FedAvg(), "wrong": Impossible()}
    with pytest.raises(ConfigError, match=r"in \[methods.wrong\]: impossible"):
        compare(methods, learners, callbacks=follow)
    with pytest.raises(ConfigError, match=r"measure no 'f2'; .*did you mean 'f1'"):
        compare({"fedavg": FedAvg()}, learners, metric="f2", callbacks=follow)
    assert not followed


def test_compare_runs_with_one_thread_and_leaves_torch_as_it_was():
    seen, before = set(), torch.get_num_threads()

    class Look(Callback):
        def round(self, progress):
            seen.add(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        compare({"fedavg": FedAvg()}, learners, rounds=1, seeds=1, callbacks=lambda *_: [Look()])
        assert seen == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_one_seed_has_no_deviation():
    runs = [_record("fedavg", seed, [(10**6, [0.5 + seed / 10, 0.5])]) for seed in range(2)]
    one, two = (standings(some)["deviation"][0] for some in (runs[:1], runs))
    assert np.isnan(one)
    assert two == pytest.approx(0.05 / 2**0.5)
    assert [table(some)["summary"]["± sd"][0] for some in (runs[:1], runs)] == ["", "0.035"]


def test_the_picture_has_a_panel_for_each_method_all_drawn_alike(tmp_path):
    methods = [("gossamer", False), ("fedavg", False), ("local", True)]
    records = [
        _record(name, 0, [(0, [0.1]), (10 + place, [0.4 + place / 10]), (20, [0.6])], bound)
        for place, (name, bound) in enumerate(methods)
    ]
    png, svg = draw(records, tmp_path / "picture", "tiny")
    words = re.findall(r"<!-- (.*?) -->", svg.read_text())
    assert {"gossamer  0.600", "fedavg  0.600", "local  0.600"} <= set(words)
    # No method is thicker than another: one width for the lines of methods, another for pale ones.
    widths = re.findall(
        r"stroke: #0072b2; stroke-width: ([0-9.]+); stroke-linecap: square", svg.read_text()
    )
    assert len(set(widths)) == 1
    assert png.stat().st_size < 200_000


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    (tmp_path / "small.toml").write_text(TOML, "utf-8")
    return runner(tmp_path, monkeypatch, capsys, "compare")


def test_the_command_leaves_curves_a_summary_and_a_picture_and_resumes(command, tmp_path):
    result = command("small.toml", "--on", "local:1", "--only", "fedavg", "--only", "local")
    assert result.code == 0, result.err
    place = tmp_path / "results" / "compare" / "small"
    assert len(list(read_records(place / "001" / "runs.jsonl"))) == 4
    result = command("small.toml", "--on", "local:1")  # the rest of it
    assert result.code == 0, result.err
    assert "4 of 6 runs are copied from results/compare/small/001" in result.err
    folder = place / "002"
    records = list(read_records(folder / "runs.jsonl"))
    keys = {cell.key for cell in cells_of(load_comparison(tmp_path / "small.toml"))}
    assert len(records) == 6
    assert {record["key"] for record in records} == keys
    summary = json.loads((folder / "summary.json").read_text())
    assert [one["method"] for one in summary["methods"]] == ["fedavg", "gossamer", "local"]
    assert summary["budget"] == min(
        record["curve"][-1]["bytes"] for record in records if not record["bound"]
    )
    for file in ("comparison.png", "comparison.svg", "config.json"):
        assert (folder / file).stat().st_size > 100
    for word in ("fedavg", "gossamer", "local (bound)", "worst client", "intervals take 3 seeds"):
        assert word in result.out
    differing = (folder / "differences.csv").read_text().splitlines()
    assert len(differing) == 1 + 4 + 2  # a bound has no bytes
    assert [result.out.count(f"{name} − fedavg") for name in ("gossamer", "local")] == [1, 1]
    tests = read(folder)
    assert len(tests) == 6 * 4 * 3
    assert {"method", "seed", "round", "client", "bytes", "accuracy"} <= set(tests.columns)
    ends = tests[(tests["method"] == "fedavg") & (tests["round"] == 3)]
    assert ends["accuracy"].mean() == pytest.approx(summary["methods"][0]["accuracy"])


def test_a_comparison_without_a_name_has_that_of_its_file(tmp_path):
    path = tmp_path / "my test.toml"
    path.write_text(TOML.replace('name = "small"', ""), "utf-8")
    assert load_comparison(path).name == "my-test"


def test_the_command_shows_its_settings(command, tmp_path):
    result = command("small.toml", "--show-settings", "--only", "fedavg")
    assert result.code == 0, result.err
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert "data.total 90 config" in lines
    assert "training.rate 0.1 default" in lines
    assert "methods {fedavg = {}} config" in lines
    assert not (tmp_path / "results").exists()


def test_the_command_names_the_file_of_a_mistake(command, tmp_path):
    (tmp_path / "small.toml").write_text(
        TOML.replace("[methods.fedavg]", "[methods.fedavg]\nmu = 1")
    )
    result = command("small.toml")
    assert result.code == 2
    assert "small.toml: in [methods.fedavg]: unknown key 'mu'" in " ".join(result.err.split())
    assert command("nowhere.toml").code == 2
