"""Summaries: what fits into one, what is left out, and what is not taken for one."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.peer.presence import Status
from gossamer.peer.summary import (
    MAX_EVENTS,
    MAX_SUMMARY_BYTES,
    Ended,
    Journal,
    ModelSummary,
    PeerEvent,
    Summary,
    read_summary,
)

SMALL = Summary(
    session="s1", time=100.0, since=10.0, state="averaging", phase="training", round=7, rounds=30,
    version="0.1.0", round_ended=99.0, models={"global": ModelSummary(True, 7, 3, 4, 0.01, 1.25)},
    metrics={"accuracy": 0.9, "loss": 0.3}, neighbours=("b", "c"), neighbour_count=2,
    neighbour_bytes=(70, 30),
    sent_bytes=1000, sent_packets=10, received_bytes=900, received_packets=9,
    refused={"d": "mode is 'async' here and 'rounds' there"}, ended=Ended("left", "told to", 100.0),
    last_end=Ended("lost", "its process ended without a goodbye", 5.0),
    events=(PeerEvent(11.0, "founded", "founds model global at its own values"),),
)  # fmt: skip


def large(models: int = 400) -> Summary:
    names = [f"{'n' * 58}{index:06}" for index in range(64)]
    return replace(
        SMALL,
        models={f"{'m' * 58}{index:06}": ModelSummary(True) for index in range(models)},
        neighbours=tuple(names),
        neighbour_bytes=tuple(range(len(names))),
        neighbour_count=4000,
        refused=dict.fromkeys(names, "r" * 200),
        events=tuple(PeerEvent(float(i), "refused", "t" * 200, names[0]) for i in range(16)),
    )


@pytest.mark.parametrize(
    "summary",
    [
        SMALL,
        replace(SMALL, rounds=None),
        replace(SMALL, models={}, events=(), ended=None, last_end=None, round_ended=None),
    ],
)
def test_it_is_read_as_it_was_written(summary: Summary) -> None:
    data = summary.encode()
    assert data is not None
    assert read_summary(data) == summary


def test_a_usual_one_is_short() -> None:
    data = SMALL.encode()
    assert data is not None
    assert len(data) < 1024


@pytest.mark.parametrize("limit", [MAX_SUMMARY_BYTES, 4096, 1500])
def test_whatever_is_in_it_it_is_bounded_and_says_what_it_leaves_out(limit: int) -> None:
    data = large().encode(limit)
    assert data is not None
    assert len(data) <= limit
    read = read_summary(data)
    assert read is not None
    assert len(read.models) + read.omitted_models == 400
    assert read.neighbour_count == 4000
    assert len(read.neighbour_bytes) == len(read.neighbours)
    assert (read.round, read.metrics) == (SMALL.round, SMALL.metrics)


def test_what_is_left_out_first_matters_least() -> None:
    """The newest event stays longest; neighbours stay as long as all that is too much are events."""
    summary = replace(large(models=1), refused={})
    data = summary.encode(9000)
    read = data and read_summary(data)
    assert read
    assert 0 < len(read.events) < 16
    assert read.events == summary.events[-len(read.events) :]
    assert read.neighbours == summary.neighbours


def test_a_limit_that_nothing_fits_gives_nothing() -> None:
    assert SMALL.encode(50) is None


def changed(**changes: object) -> bytes:
    data = SMALL.encode()
    assert data is not None
    return json.dumps({**json.loads(data), **changes}).encode()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"x",
        b"[]",
        b"{}",
        Status("online", "s1").encode(),
        changed(format=2),
        changed(round=-1),
        changed(round="7"),
        changed(time=float("nan")),
        changed(metrics={"accuracy": float("inf")}),
        changed(metrics={"accuracy": "0.9"}),
        changed(neighbours=["a/b"]),
        changed(models={"global": {"counts": 1}}),
        changed(models={"a b": {"counts": True}}),
        changed(state="<b>"),
        changed(version="1" * 33),
        changed(refused={"d": "x" * MAX_SUMMARY_BYTES}),
    ],
)
def test_nothing_else_is_a_summary(payload: bytes) -> None:
    assert read_summary(payload) is None


@given(st.binary(max_size=200))
def test_no_bytes_make_it_raise(payload: bytes) -> None:
    assert read_summary(payload) is None


def test_texts_of_others_are_printable_and_short() -> None:
    read = read_summary(changed(refused={"d": "\x1b[31mred\n" + "x" * 300}))
    assert read is not None
    assert read.refused["d"].startswith("[31mred")
    assert len(read.refused["d"]) <= 200


def test_it_says_what_has_diverged() -> None:
    assert SMALL.diverged == ()
    assert replace(SMALL, metrics={"accuracy": 0.1, "loss": None}).diverged == ("its loss",)
    models = {"g": ModelSummary(True, diverged=True), "h": ModelSummary(True)}
    assert replace(SMALL, models=models).diverged == ("g",)


def test_a_journal_keeps_the_latest_and_logs_each_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = iter(range(1000))
    journal = Journal("anna", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO):
        for index in range(MAX_EVENTS + 3):
            journal.add("counted", f"counts in model m{index}")
        journal.add("refused", "refuses peer ben", peer="ben", log=False)
    assert [event.time for event in journal.events] == [float(i) for i in range(4, MAX_EVENTS + 4)]
    assert journal.events[-1] == PeerEvent(MAX_EVENTS + 3.0, "refused", "refuses peer ben", "ben")
    assert journal.count == MAX_EVENTS + 4
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "peer anna counts in model m0"
    assert len(lines) == MAX_EVENTS + 3
