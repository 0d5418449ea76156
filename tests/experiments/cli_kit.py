"""The command in this process: what it printed, and how it ended."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gossamer.experiments.cli import app as cli
from gossamer.experiments.cli import console

for each in (console.out, console.err):
    each.width = 160  # of tables, however wide the tests' own terminal is


@dataclass(frozen=True)
class Result:
    code: object
    out: str
    err: str


Run = Callable[..., Result]


def runner(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *command: str,
) -> Run:
    """Runs `gossamer COMMAND …` in a folder of its own."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")  # of usage messages

    def run(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as stop:
            cli.main([*command, *arguments])
        return Result(stop.value.code, *capsys.readouterr())

    return run


def runs(*command: str, **files: str) -> Any:
    """A fixture: runs `gossamer COMMAND …` in a folder of its own that has these TOML files."""

    @pytest.fixture
    def run(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Run:
        for name, text in files.items():
            (tmp_path / f"{name}.toml").write_text(text)
        return runner(tmp_path, monkeypatch, capsys, *command)

    return run


def setting(result: Result, name: str) -> str:
    """The value of a setting that --show-settings printed."""
    rows = [line.split() for line in result.out.splitlines()]
    (value,) = (row[1] for row in rows if row[:1] == [name])
    return value
