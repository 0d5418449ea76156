"""New samples reach a running peer from a folder; what cannot be used costs one log line."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_kit import make_learner
from peer_kit import Still, begin

from gossamer.models import ModelError, SgdLearner
from gossamer.peer import Engine, PeerError, Settings


def write(folder: Path, name: str, *, first: int = 0, count: int = 4, at: int = 0, **other) -> Path:
    """Write `count` samples whose inputs are first, first + 1, …; at: the file's time."""
    x = np.repeat(np.arange(first, first + count, dtype=np.float64)[:, None], 4, axis=1)
    arrays = {"x": x, "y": np.arange(count, dtype=np.int32) % 2} | other
    path = folder / name
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    os.utime(path, (1000 + at, 1000 + at))
    return path


def numbers(learner: SgdLearner) -> list[float]:
    return learner.samples[0][:, 0].tolist()


def engine_of(folder: Path, learner=None, **settings) -> Engine:
    learner = make_learner("ann", samples=0) if learner is None else learner
    return begin(Engine("ann", learner, Settings(samples_folder=str(folder), **settings)))


def test_files_are_taken_in_the_order_of_their_times_and_the_oldest_samples_forgotten(tmp_path):
    write(tmp_path, "b.npz", first=10, at=1)
    write(tmp_path, "a.npz", first=20, at=2)
    engine = engine_of(tmp_path, window=6)
    engine.train()
    assert numbers(engine.learner) == [12, 13, 20, 21, 22, 23]
    write(tmp_path, "c.npz", first=30, count=2, at=3)
    engine.train()
    assert numbers(engine.learner) == [20, 21, 22, 23, 30, 31]
    assert engine.learner.samples[0].untyped_storage().nbytes() == 6 * 4 * 4
    engine.train()
    assert numbers(engine.learner) == [20, 21, 22, 23, 30, 31]


def test_at_the_start_only_files_that_fill_the_window_are_read(tmp_path, caplog):
    (tmp_path / "old.npz").write_bytes(b"damaged")
    os.utime(tmp_path / "old.npz", (500, 500))
    write(tmp_path, "new.npz", first=10, count=9)
    engine = engine_of(tmp_path, window=6)
    with caplog.at_level(logging.WARNING):
        engine.train()
    assert numbers(engine.learner) == [13, 14, 15, 16, 17, 18]
    assert "old.npz" not in caplog.text


def test_a_file_that_a_users_own_learner_cannot_take_costs_no_other_file(tmp_path, caplog):
    class Picky(SgdLearner):
        def add_samples(self, inputs, labels):
            if inputs[0, 0] == 10:
                raise RuntimeError("no tens")
            super().add_samples(inputs, labels)

    for at, first in enumerate((0, 10, 20)):
        write(tmp_path, f"{at}.npz", first=first, count=2, at=at)
    learner = make_learner("ann", samples=0)
    learner.__class__ = Picky
    engine = engine_of(tmp_path, learner)
    with caplog.at_level(logging.WARNING):
        engine.train()
    assert numbers(learner) == [0, 1, 20, 21]
    assert f"{tmp_path / '1.npz'} is left out: RuntimeError: no tens" in caplog.text


BAD = {
    "damaged": (lambda path: path.write_bytes(b"PK not really"), "not an .npz file"),
    "without labels": (lambda path: write(path.parent, path.name, y=None), "no array"),
    "of another length": (lambda path: write(path.parent, path.name, y=np.zeros(9)), "4 inputs"),
    "with unknown labels": (
        lambda path: write(path.parent, path.name, y=np.array([0, 1, 2, 7])),
        "labels run from 0 to 7",
    ),
    "of another width": (
        lambda path: write(path.parent, path.name, x=np.zeros((4, 5))),
        "do not fit the network",
    ),
    "with NaN": (
        lambda path: write(path.parent, path.name, x=np.full((4, 4), np.nan)),
        "NaN or infinite",
    ),
    "of objects": (
        lambda path: write(path.parent, path.name, x=np.array([{}] * 4, dtype=object)),
        "not an .npz file of numbers",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_cannot_be_used_is_one_line_and_the_others_are_taken(kind, tmp_path, caplog):
    spoil, reason = BAD[kind]
    write(tmp_path, "good.npz", first=10)
    spoil(tmp_path / "bad.npz")
    engine = engine_of(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            engine.train()
    lines = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(lines) == 1
    assert "bad.npz" in lines[0]
    assert reason in lines[0]
    assert "\n" not in lines[0]
    assert numbers(engine.learner) == [10, 11, 12, 13]


def test_a_file_that_was_refused_is_read_again_when_it_has_changed(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"half")
    engine = engine_of(tmp_path)
    engine.train()
    assert numbers(engine.learner) == []
    write(tmp_path, "a.npz", first=5)
    engine.train()
    assert numbers(engine.learner) == [5, 6, 7, 8]


def test_a_folder_that_is_missing_is_one_line_until_it_is_there(tmp_path, caplog):
    engine = engine_of(tmp_path / "inbox")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            engine.train()
    assert caplog.text.count("cannot be read") == 1
    (tmp_path / "inbox").mkdir()
    write(tmp_path / "inbox", "a.npz")
    engine.train()
    assert len(numbers(engine.learner)) == 4


def test_a_data_function_is_called_between_rounds_and_its_errors_are_survived(caplog):
    arrivals = [None, (torch.ones(2, 4), torch.tensor([0, 1])), ZeroDivisionError("no sensor")]

    def data():
        arrival = arrivals.pop(0)
        if isinstance(arrival, Exception):
            raise arrival
        return arrival

    learner = make_learner("ann", samples=0)
    learner.data = data
    engine = begin(Engine("ann", learner, Settings()))
    with caplog.at_level(logging.WARNING):
        for count in (0, 2, 2):
            engine.train()
            assert len(learner.samples[1]) == count
    assert "ZeroDivisionError: no sensor" in caplog.text


def test_a_learner_with_a_penalty_takes_samples_too(tmp_path):
    write(tmp_path, "a.npz")
    learner = make_learner("ann", samples=0)
    learner.proximal = 0.1
    engine_of(tmp_path, learner, window=3).train()
    assert numbers(learner) == [1, 2, 3]


def test_samples_of_another_kind_change_nothing():
    learner = make_learner("ann", samples=4)
    before = learner.samples
    with pytest.raises(ModelError, match="do not fit the network"):
        learner.add_samples(torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64))
    assert learner.samples is before


def test_an_order_of_samples_that_are_gone_is_not_restored():
    learner = make_learner("ann", samples=4)
    learner.add_samples(torch.zeros(30, 4), torch.zeros(30, dtype=torch.int64))
    learner.train(1)
    again = make_learner("ann", samples=4)
    again.restore(learner.state())
    assert again.train(1).samples == 10


@pytest.mark.parametrize(
    ("learner", "settings", "reason"),
    [
        (Still(make_learner("ann"), 0.5), {"samples_folder": "x"}, "a Still takes no new samples"),
        (Still(make_learner("ann"), 0.5), {"window": 5}, "window: a Still takes no new samples"),
        (make_learner("ann"), {"samples_folder": "x", "gain": 1.0}, "leave out gain"),
    ],
)
def test_what_excludes_new_samples_is_one_line(learner, settings, reason):
    with pytest.raises(PeerError, match=reason):
        Engine("ann", learner, Settings(**settings))
