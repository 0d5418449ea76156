"""Metrics records: read with caution, for nobody signs them, and appended to files.

Whoever reaches the broker can publish a record, of any form and under any name. One that is taken in has
all that a peer's record has (see `Link.publish_record`), each of its kind, so that whoever shows,
counts or stores records need not look again.
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
"""No record is longer; one of a hundred models takes a tenth of it."""
MAX_DEPTH: Final = 3
"""How deep tables and lists may lie in one another."""


def read_record(topic: str, payload: bytes, names: Collection[str]) -> Record | None:
    """The record in a payload, if one of these peers may have published it there; else None."""
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
    """Whether this has all that a record needs, and nothing that cannot be shown or stored."""
    if not isinstance(value, dict) or not _is_plain(value, MAX_DEPTH):
        return False
    try:
        _Fields.model_validate(value)
    except ValidationError:
        return False
    return True


def label(peer: str) -> str:
    """What a peer is called by whoever runs the swarm: of a name with a key (`label@id`), the label."""
    return peer.partition("@")[0]


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    return value is None or isinstance(value, str) or _is_number(value)


def _is_number(value: Any) -> bool:
    """Of any size as a float, a NaN too (of a network that diverged); as an int it must fit one."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


Name = Annotated[str, AfterValidator(partial(topics.check_name, ""))]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Fields(BaseModel, strict=True):
    """What every record has, and what some measure; whatever else is in one may be any plain data."""

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
