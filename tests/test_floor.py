"""The floor of the house: versions, hints, files that are whole, and log lines at milestones."""

from __future__ import annotations

import stat
import subprocess
import sys
from importlib.metadata import version

import pytest

import gossamer
from gossamer.errors import hint
from gossamer.files import atomic_path, write_atomically
from gossamer.logs import should_log_repeat


def test_the_version_is_that_of_the_distribution() -> None:
    assert gossamer.__version__ == version("gossamer")
    told = subprocess.run(
        [sys.executable, "-m", "gossamer", "--version"], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"gossamer {gossamer.__version__}\n"


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("rign", ["ring", "torus"], "did you mean 'ring'?"),
        ("zzz", ["ring", "torus"], "known are ring, torus"),
        ("zzz", [], "known are none"),
    ],
)
def test_a_hint_names_the_nearest_or_all(name, known, text) -> None:
    assert hint(name, known) == text


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path, sync) -> None:
    path = tmp_path / "a"
    path.write_text("before")

    def fail() -> None:
        with atomic_path(path, sync=sync) as part:
            part.write_text("half of")
            raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        fail()
    assert path.read_text() == "before"
    with atomic_path(path, sync=sync) as part:
        part.write_text("after")
    assert path.read_text() == "after"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_rights_hold_from_the_first_byte(tmp_path) -> None:
    path = write_atomically(tmp_path / "key", "secret", 0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == "secret"


def test_repeating_events_are_logged_ever_more_rarely() -> None:
    assert [count for count in range(1, 20) if should_log_repeat(count)] == [1, 2, 4, 8, 16]
