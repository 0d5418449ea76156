"""A peer's metrics file: what cannot be written is said once, and never ends the peer."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from disk_kit import largest_file

from gossamer.files import RecordFile


def test_records_are_lines_and_an_old_file_is_gone_on_with(tmp_path):
    path = tmp_path / "a.jsonl"
    for number in range(2):
        with RecordFile(path) as file:
            file.write({"round": number, "name": "ä"})
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [0, 1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_warning(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING), RecordFile(path) as file:
        for number in range(3):
            file.write({"round": number})
    (record,) = caplog.records
    assert f"{path}: cannot be written: No space left on device" in record.getMessage()


def test_a_file_that_cannot_be_opened_is_one_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), RecordFile(tmp_path / "none" / "a.jsonl") as file:
        file.write({"round": 1})
        file.write({"round": 2})
    assert len(caplog.records) == 1


def test_a_record_without_room_is_left_out_whole(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    with RecordFile(path) as file:
        file.write({"round": 1})
        with largest_file(path.stat().st_size + 5):
            file.write({"round": 2})
            file.write({"round": 3})
            assert path.read_text() == '{"round": 1}\n'
        file.write({"round": 4})
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 4]
    assert len(caplog.records) == 1
    assert file.unwritten == 2
    assert file.failure is not None


def test_after_a_line_that_was_cut_short_the_next_has_its_own(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"round": 1}\n{"rou')
    with RecordFile(path) as file:
        file.write({"round": 2})
        file.write({"round": 3})
    assert path.read_text().splitlines()[1:] == ['{"rou', '{"round": 2}', '{"round": 3}']


def test_a_fresh_file_forgets_what_was_there(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"round": 1}\n')
    with RecordFile(path, overwrite=True) as file:
        file.write({"round": 2})
    assert path.read_text() == '{"round": 2}\n'


def test_a_file_of_records_is_bounded_and_keeps_the_newest(tmp_path):
    path = tmp_path / "anna.jsonl"
    for start in (0, 50):  # the second is a restart, which appends
        with RecordFile(path, limit=300) as file:
            for number in range(start, start + 50):
                file.write({"number": number})
        assert file.unwritten == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["anna.jsonl", "anna.jsonl.1"]
    assert all(0 < each.stat().st_size <= 300 for each in tmp_path.iterdir())
    text = (tmp_path / "anna.jsonl.1").read_text() + path.read_text()
    numbers = [json.loads(line)["number"] for line in text.splitlines()]
    assert numbers == list(range(100 - len(numbers), 100))


def test_a_record_beyond_the_limit_is_written_whole(tmp_path):
    path = tmp_path / "anna.jsonl"
    with RecordFile(path, limit=10) as file:
        file.write({"number": "x" * 50})
        file.write({"number": 2})
    assert json.loads(path.read_text())["number"] == 2
    assert json.loads((tmp_path / "anna.jsonl.1").read_text())["number"] == "x" * 50
