"""Metrics in a file, one JSON table a line. A full disk costs lines, never the peer."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_log = logging.getLogger(__name__)


class RecordFile:
    """Appends records to a file: `with RecordFile(path) as file: file.write(record)`.

    Every record is one unbuffered write of a whole line, so that a process that is killed leaves whole
    lines. A record that cannot be written is left out, whole, and the first failure is logged.

    fresh: empty the file first, instead of going on with it.
    lost: records that could not be written. failure: why the first of them could not.
    """

    def __init__(self, path: Path, *, fresh: bool = False):
        self._path = path
        self.lost = 0
        self.failure: OSError | None = None
        self._file: FileIO | None = None
        self._torn = False  # whether the file ends inside a line
        try:
            if fresh:
                path.open("wb").close()
            self._file = path.open("a+b", buffering=0)  # nothing is left to fail when it is closed
            self._torn = _ends_inside_a_line(self._file)
        except OSError as error:
            self._fail(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; after a line that was cut short, on a line of its own."""
        if self._file is None:
            self.lost += 1
            return
        line = (("\n" if self._torn else "") + json.dumps(record) + "\n").encode()
        start = 0
        try:
            start = self._file.seek(0, os.SEEK_END)
            written = self._file.write(line) or 0
            while written < len(line):  # writing the rest fails, and says why
                written += self._file.write(line[written:]) or 0
        except OSError as error:
            with contextlib.suppress(OSError):  # a device cannot be cut
                self._file.truncate(start)
            self.lost += 1
            self._fail(error)
        else:
            self._torn = False

    def _fail(self, error: OSError) -> None:
        """Note a record, or the whole file, that cannot be written."""
        if self.failure is None:
            why = error.strerror or str(error)
            _log.warning("%s: cannot be written: %s; its records are left out", self._path, why)
            self.failure = error


def _ends_inside_a_line(file: FileIO) -> bool:
    """Return True if the file's last line was cut short, by a power cut for example."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
