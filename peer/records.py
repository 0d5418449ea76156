"""Metrics records: validated when they are received, because they are not signed, and appended to files.

Every client of the broker can publish anything under any name as a record. A record that passes validation
has all fields of a peer's record (see `Link.publish_record`), each of the right type, so that code that
shows, counts or stores records need not check them again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Collection
from functools import partial
from io import FileIO
from math import nan
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from ..gossip import topics

Record = dict[str, Any]

_log = logging.getLogger(__name__)

MAX_BYTES: Final = 1 << 18
"""Bytes of the longest record accepted; a record about a hundred models takes a tenth of that."""
MAX_DEPTH: Final = 3
"""Deepest nesting of objects and lists in a record."""


def read_record(topic: str, payload: bytes, names: Collection[str]) -> Record | None:
    """Return the record in a payload; None if it is not valid, or not of one of these peers.

    topic: the topic it was published on, which must be of the same peer. names: labels of peers.
    """
    if len(payload) > MAX_BYTES:
        return None
    try:
        record, peer = json.loads(payload), topics.parse(topic).peer
    except (ValueError, RecursionError):
        return None
    if not is_record(record) or record["peer"] != peer:
        return None
    return record if label(peer) in names else None


def is_record(value: Any) -> bool:
    """Return whether a value has all fields of a record, and contains only plain data of limited size."""
    if not isinstance(value, dict) or not _is_plain(value, MAX_DEPTH):
        return False
    try:
        _Fields.model_validate(value)
    except ValidationError:
        return False
    return True


def label(peer: str) -> str:
    """Return the label of a peer's name: with trust names are `label@id`, without it the label is all."""
    return peer.partition("@")[0]


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    return value is None or isinstance(value, str) or _is_number(value)


def _is_number(value: Any) -> bool:
    """Return True for any float, also NaN (of a network that diverged), and for an int of 64 bits."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


Name = Annotated[str, AfterValidator(partial(topics.check_name, ""))]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Fields(BaseModel, strict=True):
    """Types of a record's fields; those with a default are optional. Other fields may be any plain data."""

    peer: Name
    session: Name
    time: float
    round: Count
    phase: Literal["starting", "training", "settling", "done"]
    disagreement: dict[Name, float]
    received: Count
    packets: Count
    bytes: Count
    neighbours: Count
    accuracy: float = nan
    own_accuracy: float = nan
    loss: float = nan
    training_loss: float = nan
    alone_accuracy: float = nan
    alone_loss: float = nan


class RecordFile:
    """Appends records to a file: `with RecordFile(path) as file: file.write(record)`.

    Each record is written as one line with one unbuffered write, so that a process that is killed leaves
    complete lines. A record that cannot be written completely is left out, and the first failure is logged.

    overwrite: empty the file first, instead of appending to it.
    unwritten: number of records that could not be written. failure: the error of the first of them.
    """

    def __init__(self, path: Path, *, overwrite: bool = False):
        self._path = path
        self.unwritten = 0
        self.failure: OSError | None = None
        self._file: FileIO | None = None
        self._ends_inside_line = False
        try:
            if overwrite:
                path.open("wb").close()
            self._file = path.open("a+b", buffering=0)  # unbuffered: closing it cannot fail
            self._ends_inside_line = _ends_inside_a_line(self._file)
        except OSError as error:
            self._fail(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, record: dict[str, Any]) -> None:
        """Append one record as a line; after an incomplete line, begin a new one first."""
        if self._file is None:
            self.unwritten += 1
            return
        line = (("\n" if self._ends_inside_line else "") + json.dumps(record) + "\n").encode()
        start = 0
        try:
            start = self._file.seek(0, os.SEEK_END)
            written = self._file.write(line) or 0
            while written < len(line):  # after a short write, writing the rest raises the error
                written += self._file.write(line[written:]) or 0
        except OSError as error:
            with contextlib.suppress(OSError):  # a device file cannot be truncated
                self._file.truncate(start)
            self.unwritten += 1
            self._fail(error)
        else:
            self._ends_inside_line = False

    def _fail(self, error: OSError) -> None:
        """Keep and log the first error."""
        if self.failure is None:
            reason = error.strerror or str(error)
            _log.warning("%s: cannot be written: %s; its records are left out", self._path, reason)
            self.failure = error


def _ends_inside_a_line(file: FileIO) -> bool:
    """Return True if the file's last line is incomplete, after a power failure for example."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
