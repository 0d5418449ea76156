"""The studies of partial sharing: what each scheme averages, each peer's test samples, table and figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.experiments.data import DataError, Dataset, load
from gossamer.experiments.data.dataset import samples
from gossamer.experiments.papers import StudyEntry
from gossamer.experiments.papers import networks as papers
from gossamer.experiments.papers.networks import (
    MODEL,
    Cell,
    Setting,
    draw,
    make_learners,
    make_network,
    networks_study,
    run_cell,
    split_data,
    table,
)
from gossamer.experiments.results import Results
from gossamer.experiments.study import Job, run_study
from gossamer.models import ModelGraph, SlicedNetwork, discover, small_cnn

TINY = Setting(
    "digits", "small-cnn", "images", {"widths": (4, 6), "hidden": 8, "norm": True},
    peers=3, samples=40, test=100, rounds=2, test_every=1, local_samples=20, batch=10,
)  # fmt: skip
SERIES = replace(TINY, network="lstm", layout="series", options={"hidden": 6})
SETTINGS = {"CNN": TINY, "LSTM": SERIES}
JOB = Job(Path())
TITLE = StudyEntry("tiny", "here", "", "Tiny")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def learners(scheme, setting=TINY):
    data = load(setting.data)
    split = split_data(setting, data, 0)
    return make_learners(Cell(scheme.name, "", setting, scheme, 0), data.classes, split)


@pytest.mark.parametrize("scheme", papers.SCHEMES, ids=lambda scheme: scheme.name)
def test_what_the_schemes_share(scheme):
    network = learners(scheme)[0].network
    slicing = network.slicing
    names = [parameter.name for parameter in slicing.anatomy.parameters]
    owned = slicing.coordinates(MODEL) if MODEL in network.averaged_models else []
    shared = {slicing.anatomy.parameter_at(int(at)) for at in owned}
    head, norm = {name for name in names if name.startswith("11.")}, {"1.weight", "5.bias"}
    assert head
    assert norm < set(names)
    match scheme.name:
        case "local":
            assert not shared
        case "full averaging":
            assert len(owned) == len(network.flat)
            assert "1.running_mean" in shared
        case "FedBN":
            assert shared == {name for name in names if name.split(".")[0] not in ("1", "5")}
        case _:
            assert bool(shared & head) == (scheme.outputs == "shared")
            assert norm < shared
            # Whether outputs are private or shared: that share of the cells of every hidden layer, rounded.
            cells = [len(part) for part in slicing.cells[MODEL][1:-1]]
            assert cells == [round(scheme.share * width) for width in (4, 6, 8)]


def test_all_peers_have_the_same_initial_values_unless_drawn_per_peer():
    everyone = [one.network.flat for one in learners(papers.FULL)]
    own = [one.network.flat for one in learners(papers.PARTIAL)]
    parameters = sum(p.numel() for p in learners(papers.LOCAL)[0].network.module.parameters())
    for flat in (*everyone, *own):
        torch.testing.assert_close(flat[:parameters], everyone[0][:parameters], rtol=0, atol=0)
    per_peer = [one.network for one in learners(replace(papers.PARTIAL, init="per peer"))]
    assert torch.equal(per_peer[0].read(MODEL), per_peer[1].read(MODEL))
    assert not torch.equal(per_peer[0].flat, per_peer[1].flat)


def test_either_order_of_dependence_averages_the_same():
    """A local model has one peer only, so its parameters are never averaged, as the figure's caption says."""
    module = small_cnn(1, 8, widths=(4, 6), hidden=8, norm=True)
    anatomy = discover(module, torch.zeros(1, 1, 8, 8))
    plain = make_network(module, anatomy, papers.PARTIAL, "anna", 0).slicing
    graph = ModelGraph({"local-anna": [MODEL]})
    slices = papers.PARTIAL.slices(anatomy.parts[-1].name)
    lower = SlicedNetwork(
        module, slices, anatomy=anatomy, peer="anna", graph=graph, buffers="recompute"
    ).slicing
    assert len(plain.private)
    assert not len(lower.private)
    np.testing.assert_array_equal(plain.coordinates(MODEL), lower.coordinates(MODEL))


def test_own_test_has_the_classes_of_the_peer():
    data = load("digits")
    split = split_data(replace(TINY, alpha=0.2), data, 3)
    for own, weights in zip(split.train, split.own_test_weights, strict=True):
        counts = torch.bincount(split.test.y, weights, minlength=10)
        torch.testing.assert_close(counts, torch.bincount(own.y, minlength=10) / len(own))


def groups():
    """Three people, two activities of twenty windows each, every window another number."""
    x = np.arange(120, dtype=np.float32).reshape(-1, 1, 1) * np.ones((1, 4, 2), np.float32)
    y = np.tile(np.repeat([0, 1], 20), 3)
    return Dataset("people", samples(x, y, np.repeat([7, 8, 9], 40)), None, 2)


def test_people_are_tested_on_later_windows_than_they_learn_from():
    split = split_data(replace(SERIES, samples=12, test=10), groups(), 0)
    inputs, labels = split.test.x, split.test.y
    assert len(inputs) == 30
    for peer, learned in enumerate(split.train):
        x, y = learned.x, learned.y
        own = split.own_test_weights[peer] > 0
        assert float(split.own_test_weights[peer].sum()) == pytest.approx(1)
        assert int(own.sum()) == 10
        person = {int(window) // 40 for window in (*x[:, 0, 0], *inputs[own][:, 0, 0])}
        assert len(person) == 1
        for label in (0, 1):
            assert x[y == label].max() < inputs[own][labels[own] == label].min()


def test_too_many_windows_are_refused():
    with pytest.raises(
        DataError, match="peer 0's training half has only 20 samples, 21 requested: lower samples"
    ):
        split_data(replace(SERIES, samples=21, test=10), groups(), 0)


def test_a_run_is_repeatable_and_learns_what_it_says():
    cell = Cell("", "CNN", replace(TINY, rounds=8, test_every=8, local_samples=80), papers.FULL, 0)
    record = run_cell(cell, JOB)
    assert record == run_cell(cell, JOB)
    assert record["by_round"] == [(8, record["own"], record["common"])]
    assert record["common"] > 0.3  # guessing gets 0.1
    assert record["shared"] == 1.0
    # Peers that have averaged everything have the same network, with the same statistics.
    assert np.mean(record["by_peer"]) == pytest.approx(record["own"])
    assert record["worst"] == min(record["by_peer"])


def test_series_are_read_by_both_kinds_of_network():
    for setting in (SERIES, replace(SERIES, network="cnn1d", layout="channels", options={})):
        assert run_cell(Cell("", "", setting, papers.PARTIAL, 0), JOB)["shared"] > 0.3


def test_fedbn_only_for_networks_with_batch_norm():
    cells = networks_study(TITLE, SETTINGS, range(2)).cells
    schemes = {(cell.network, cell.line) for cell in cells}
    assert ("CNN", "FedBN") in schemes
    assert ("LSTM", "FedBN") not in schemes
    assert len({cell.key for cell in cells}) == len(cells)


def record(network, scheme, seed, own):
    rounds = [(1, own - 0.1, 0.3), (2, own, 0.4)]
    return {
        "network": network, "scheme": scheme, "seed": seed, "own": own, "common": 0.4, "worst": own - 0.2,
        "shared": 0.5, "by_round": rounds,
    }  # fmt: skip


def test_differences_are_paired_by_seed():
    found = [record("CNN", "local", seed, 0.5 + 0.1 * seed) for seed in range(4)]
    found += [record("CNN", "FedBN", seed, 0.6 + 0.1 * seed) for seed in range(3)]
    rows = table(found)["summary"].set_index("scheme")
    assert rows.loc["FedBN", "− local"] == "+0.100 ± 0.000"
    assert rows.loc["FedBN", "− full averaging"] == rows.loc["local", "− local"] == ""
    assert table(found[:5])["summary"].set_index("scheme").loc["FedBN", "− local"] == "+0.100"


def test_report_of_whatever_is_finished(tmp_path):
    found = [record("CNN", "local", seed, 0.5) for seed in range(2)]
    found += [record("CNN", papers.PARTIAL.name, seed, 0.6 + 0.02 * seed) for seed in range(2)]
    found += [record("LSTM", papers.PARTIAL.name + papers.PER_PEER_SUFFIX, 0, 0.7)]
    rows = table(found)["summary"]
    assert [*rows["network"]] == ["CNN", "CNN", "LSTM"]
    assert "+0.110 ± 0.010" in [*rows["− local"]]  # partial 0.8 less local
    files = draw(tmp_path / "figure", "Tiny", SETTINGS, found)
    assert all(file.stat().st_size > 100 for file in files)


def test_the_study_goes_on_where_it_was(tmp_path):
    study = networks_study(TITLE, {"CNN": TINY}, range(1))
    run_study(study.only(["local"]), Results(tmp_path, "paper tiny"), on="local:1")
    run_study(
        study.only(["local", "full averaging"]), Results(tmp_path, "paper tiny"), on="local:1"
    )
    lines = (tmp_path / "002" / "runs.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["scheme"] for line in lines] == ["local", "full averaging"]
    assert (tmp_path / "002" / "figure.png").exists()
