"""A peer's metrics file: what cannot be written is said once, and never ends the peer."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from gossamer.peer.record_file import RecordFile


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


def test_after_half_a_line_the_next_has_its_own(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    with RecordFile(path) as file:
        whole = file._file

        class Nearly:
            """A disk with room for five bytes."""

            def write(self, data: bytes) -> int:
                return os.write(whole.fileno(), data[:5])

            def close(self) -> None:
                whole.close()

        file._file = Nearly()
        file.write({"round": 1})
        file._file = whole
        file.write({"round": 2})
        file.write({"round": 3})
    lines = path.read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines[1:]] == [2, 3]
    assert len(caplog.records) == 1
