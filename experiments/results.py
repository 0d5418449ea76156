"""Results on disk: JSON lines as they are computed, a resolved config beside them, tables from both."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from .errors import ConfigError

Record = dict[str, Any]


class RecordFile:
    """Appends records to a JSONL file, one line each, flushed at once: an interrupted run keeps them."""

    def __init__(self, path: Path, *, fresh: bool = True):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w" if fresh else "a", encoding="utf-8")
            if not fresh and _is_cut_off(path):
                self._file.write("\n")  # or the next record would be lost with the broken line
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, record: Record) -> None:
        """Append one record."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def require_folder(path: Path) -> Path:
    """`path`, if it is a folder to write into or can become one; nothing is made yet.

    Commands ask before they work, since results that have no place are lost. Raises ConfigError.
    """
    there = next(one for one in (path, *path.parents) if os.path.exists(one))
    if not there.is_dir():
        raise ConfigError(f"{path}: cannot be a folder: {there} is a file; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: the folder {there} cannot be written to; name another")
    return path


def make_folder(path: Path) -> Path:
    """`path`, a folder to write into, made if it is not there; raises as `require_folder` does."""
    try:
        require_folder(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made: {error.strerror}") from None
    return path


def _is_cut_off(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_records(path: Path) -> Iterator[Record]:
    """The records of a JSONL file; a line that was cut off while being written is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def write_csv(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a table; cells with a comma are quoted."""

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
