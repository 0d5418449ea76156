"""`[fednp]` in configs, and the studies of FedNP and multi-task learning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gossamer.experiments.arena.simulation import Simulation
from gossamer.experiments.build import Swarm
from gossamer.experiments.config.tables import Config, ConfigError, parse_config
from gossamer.experiments.data import DataError
from gossamer.experiments.papers import PAPERS, fednp, multitask
from gossamer.experiments.results import Results
from gossamer.experiments.study import run_study
from gossamer.models.fednp import FedNPLearner


def table(**changes):
    return {
        "peers": 3, "rounds": 2,
        "data": {"samples": 20, "test": 50},
        "network": {"layout": "64=8=10"},
        "models": [{"name": "global", "layout": "64-8-10"}],
        "training": {"local_samples": 20},
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize("weights", ["peers", "samples"])
def test_a_config_with_the_table_runs_fednp_on_the_digits(weights):
    config = parse_config(
        table(weights=weights, fednp={"strength": 0.1, "dimensions": 2, "hidden": 4})
    )
    simulation = Simulation.of(config)
    rounds = list(simulation.rounds())
    assert rounds[-1].accuracy > 0
    learners = [member.learner for member in simulation.members]
    assert all(isinstance(learner, FedNPLearner) for learner in learners)
    counted = [round(learner.total_weight(), 3) for learner in learners]
    assert counted == [3.0 if weights == "peers" else 60.0] * 3


@pytest.mark.parametrize(
    ("fednp", "text"),
    [
        ({"strength": -0.1}, "fednp.strength"),
        ({"damping": 0.0}, "fednp.damping"),
        ({"rate": 0.5}, "fednp.rate.*auxiliary_rate"),
        ({"nodes": 1}, "fednp.nodes"),
        ({"moments": "printed"}, "fednp.moments"),
        ({"strenght": 1.0}, "strength"),
    ],
)
def test_knobs_out_of_range_are_named(fednp, text):
    with pytest.raises(ConfigError, match=text):
        parse_config(table(fednp=fednp))


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ConfigError, match=r"training\.proximal"):
        Swarm(parse_config(table(fednp={}, training={"proximal": 0.1}))).members()
    with pytest.raises(ConfigError, match=r"key 'fednp': peer 0: .*features"):
        Swarm(parse_config(table(fednp={"features": "nowhere"}))).members()
    sparse = Config.model_validate(
        {
            "data": {"set": "sparse"},
            "network": {"layout": "50<>20"},
            "fednp": {},
            "models": [{"name": "global", "layout": "50-20"}],
        }
    )
    with pytest.raises(ConfigError, match="no last layer"):
        Swarm(sparse).members()


def test_the_toys_data_are_the_same_for_a_seed_and_lie_in_their_ranges():
    one, two, other = fednp.draw_samples(1), fednp.draw_samples(1), fednp.draw_samples(2)
    assert [len(x) for x, _ in one] == list(fednp.SIZES)
    for (x, _), (again, _), (low, high) in zip(one, two, fednp.RANGES, strict=True):
        assert x.tolist() == again.tolist()
        assert low <= float(x.min()) <= float(x.max()) <= high
    assert one[0][0].tolist() != other[0][0].tolist()


def test_the_toy_study_leaves_a_table_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(fednp, "ROUNDS", 1)
    small = fednp.OPTIONS.model_copy(update={"dimensions": 1, "hidden": 2})
    monkeypatch.setattr(fednp, "METHODS", {"FedAvg": None, "FedNP": small})
    study = PAPERS["fednp-toy"].study(runs=1)
    records, files = run_study(study, Results(tmp_path, "paper fednp-toy"), on="local:1")
    rows = study.table(records)["summary"]
    assert [*rows["method"]] == ["FedAvg", "FedNP", fednp.BOUND]
    assert [*rows["below FedAvg"]][::2] == ["", ""]
    assert all(file.stat().st_size for file in files)
    bound = next(record["mse"] for record in records if record["method"] == fednp.BOUND)
    assert all(record["mse"] >= bound - 1e-6 for record in records)


def test_the_multitask_study_leaves_a_table_and_a_picture(tmp_path):
    study = PAPERS["multitask"].study(quick=True, runs=1)
    samples = min(multitask.SAMPLES)
    study = replace(study, cells=[cell for cell in study.cells if cell.samples == samples])
    records, files = run_study(study, Results(tmp_path, "paper multitask"), on="local:1")
    rows = study.table(records)["summary"]
    assert [*rows["F fell at every step"]] == ["yes"] * 3
    assert [*rows["method"]] == [*multitask.METHODS]
    assert all(file.stat().st_size for file in files)


def test_splits_keep_train_and_test_apart_and_both_classes_in_training():
    learned, tested = multitask.split_samples(multitask.SYNTHETIC, 10, seed=0)
    for train, test in zip(learned, tested, strict=True):
        assert set(train.y) == {-1.0, 1.0}
        assert (len(train.y), len(test.y)) == (10, 110)
        assert not (train.x[:, None] == test.x[None]).all(axis=2).any()
    assert np.allclose(np.concatenate([t.x for t in learned])[:, :-1].mean(axis=0), 0)


def test_the_multitask_study_needs_sensor_files_except_in_its_quick_size(tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    full, quick = (PAPERS["multitask"].study(quick=quick, runs=1) for quick in (False, True))
    assert {cell.data for cell in full.cells} == {multitask.SENSORS}
    assert {cell.data for cell in quick.cells} == {multitask.SYNTHETIC}
    assert len(multitask.subjects(multitask.SYNTHETIC)) == 16
    with pytest.raises(DataError, match="set GOSSAMER_DATA"):
        multitask.subjects.__wrapped__(multitask.SENSORS)
