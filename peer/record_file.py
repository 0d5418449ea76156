"""A peer's metrics in its folder, one JSON table a line. A full disk costs lines, never the peer."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_log = logging.getLogger(__name__)


class RecordFile:
    """Appends records to a file: `with RecordFile(path) as file: file.write(record)`.

    What cannot be written is left out, and the first of it is logged.
    """

    def __init__(self, path: Path):
        self._path = path
        self._failed = self._torn = False
        try:
            self._file = path.open("ab", buffering=0)  # nothing is left to fail when it is closed
        except OSError as error:
            self._file = None
            self._fail(error.strerror or str(error))

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

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; after one that was cut short, on a line of its own."""
        if self._file is None:
            return
        line = ("\n" if self._torn else "") + json.dumps(record) + "\n"
        try:
            written = self._file.write(line.encode()) or 0
        except OSError as error:
            self._fail(error.strerror or str(error))
        else:
            self._torn = self._torn if written == 0 else written < len(line)
            if written < len(line):
                self._fail("no room for a whole line")

    def _fail(self, why: str) -> None:
        if not self._failed:
            _log.warning("%s: cannot be written: %s; the peer goes on without", self._path, why)
        self._failed = True
