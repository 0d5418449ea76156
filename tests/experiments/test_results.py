"""Results on disk outlive whoever was writing them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from gossamer.experiments.config import ConfigError
from gossamer.experiments.results import RecordFile, read_records, write_csv, write_json


def test_records_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "runs.jsonl"
    with RecordFile(path) as file:
        for count in range(3):
            file.write({"count": count, "name": "größer, [−1, 1]"})
            assert [record["count"] for record in read_records(path)] == list(range(count + 1))
    assert next(read_records(path))["name"] == "größer, [−1, 1]"


def test_fresh_forgets_and_otherwise_records_are_added(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for fresh, expected in ((True, [1]), (False, [1, 1]), (True, [1])):
        with RecordFile(path, fresh=fresh) as file:
            file.write({"a": 1})
        assert [record["a"] for record in read_records(path)] == expected


def test_a_line_cut_off_is_passed_over_and_the_next_record_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    assert list(read_records(path)) == [{"a": 1}]
    with RecordFile(path, fresh=False) as file:
        file.write({"a": 3})
    assert list(read_records(path)) == [{"a": 1}, {"a": 3}]


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('3\n\nnull\n{"a": 1}\n')
    assert list(read_records(path)) == [{"a": 1}]


def test_no_file_has_no_records(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "none.jsonl")) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match=r"taken.*cannot be written"):
        RecordFile(tmp_path / "taken" / "runs.jsonl")


def test_json_is_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_tables_quote_commas(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_csv(path, ["line", "x"], [["[−1, 1], own", 3]])
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["line", "x"], ["[−1, 1], own", "3"]]
