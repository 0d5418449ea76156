"""The live table shows only valid records of the swarm's peers, whatever is published."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from gossamer.experiments.config.tables import Config
from gossamer.experiments.live.run import Board

RECORD = {
    "peer": "1@key", "session": "abcdefgh", "time": 1.5, "round": 3, "phase": "training",
    "accuracy": 0.25, "disagreement": {"global": 0.1}, "received": 1, "packets": 2,
    "bytes": 3_000_000, "neighbours": 1,
}  # fmt: skip


def shown(board: Board) -> str:
    file = StringIO()
    Console(file=file, width=160).print(board.table())
    return file.getvalue()


def rows(board: Board) -> list[list[str]]:
    return [line.split() for line in shown(board).replace("│", " ").splitlines()]


def test_a_peers_record_is_shown_in_its_row():
    board = Board(Config(name="small", peers=2, rounds=5), [])
    board.update(RECORD)
    assert ["0", "starting"] in rows(board)
    (row,) = [row for row in rows(board) if row[:1] == ["1"]]
    assert row[1:9] == ["abcdef", "training", "3/5", "0.250", "global", "1e-01", "2", "3.0"]


def test_groups_and_decisions_are_shown_while_peers_decide_what_they_share():
    board = Board(Config(name="small", peers=2, rounds=5, sharing="auto"), [])
    members = {
        "global-93cb5b44": [16, 16], "group2-1-93cb5b44": [5, 5], "statistics-93cb5b44-8": [3, 3],
        "group2-1-93cb5b44&group3-0-93cb5b44": [4, 4], "groups-93cb5b44": [3, 3],
    }  # fmt: skip
    sentence = "all outputs became those of 3 groups of 6, 5 and 5 peers after round 25"
    for _ in range(2):
        board.update(RECORD | {"members": members, "decided": [sentence]})
    (row,) = [row for row in rows(board) if row[:1] == ["1"]]
    assert row[3:8] == ["all", "group2-1", "of", "5", "3/5"]
    assert shown(board).count(sentence) == 1
    board.update(RECORD | {"decided": [[]]})
    assert shown(board).count(sentence) == 1


@pytest.mark.parametrize(
    "record",
    [{"peer": "zz"}, {"peer": "1"}, {}, RECORD | {"peer": "zz"}, RECORD | {"session": "[/b]"},
     RECORD | {"session": None}, RECORD | {"disagreement": {"global": "far"}},
     RECORD | {"accuracy": "high"}, RECORD | {"bytes": 10**400}, [], None,
     RECORD | {"members": []}, RECORD | {"members": {"global": 5}},
     RECORD | {"members": {"global": [5]}}, RECORD | {"members": {"global": ["a", 5]}},
     RECORD | {"members": {"[/b]": [4, 5]}}],
    ids=lambda record: str(record)[:30],
)  # fmt: skip
def test_invalid_records_and_records_of_other_peers_are_ignored(record):
    board = Board(Config(name="small", peers=2, rounds=5), [])
    before = rows(board)[1:]  # without the time in the title
    board.update(record)
    assert rows(board)[1:] == before


def test_square_brackets_in_events_are_not_taken_for_markup():
    """An event may quote any line of a log, and rich takes square brackets for markup."""
    board = Board(Config(name="small", peers=1), ["peer 0 crashed: no [/such] thing"])
    assert "no [/such] thing" in shown(board)
