"""Atomic writes, so that a file is never seen half written, locks between processes, and files of records."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

if sys.platform == "win32":
    import msvcrt
else:
    try:
        import fcntl
    except ImportError:  # a platform without Unix locks
        fcntl = None

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_path(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file to write; it replaces `path` when the block ends.

    The rename is atomic; if the block fails, `path` is unchanged. sync: flush the bytes and the rename to the
    disk with fsync, which also raises the errors of disks that report only then that they are full.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        yield temporary
        if sync:
            _fsync(temporary, os.O_RDWR)
        temporary.replace(path)
        if sync and os.name == "posix":  # elsewhere a folder cannot be opened
            _fsync(path.parent, os.O_RDONLY)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # do not leave a partial file on a full disk


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> Path:
    """Write a file with these permissions, completely or not at all; return its path."""
    with atomic_path(path) as temporary:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
    return path


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileLock:
    """A lock that one process at a time holds, from `acquire` to `release`.

    path: the lock's own file, which `acquire` creates and `release` removes.
    """

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Take the lock if it is free, and return whether it was; OSError if its file cannot be created."""
        while self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            if not _lock(descriptor):
                os.close(descriptor)
                return False
            if _is_open_file(descriptor, self._path):
                self._descriptor = descriptor
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
            else:  # the last holder removed the file after it was opened and before it was locked
                os.close(descriptor)
        return True

    def holder(self) -> str:
        """Return the id of the process that holds the lock; "?" if it cannot be read."""
        try:
            return self._path.read_text("ascii") or "?"
        except (OSError, ValueError):  # Windows cannot read a locked file
            return "?"

    def release(self) -> None:
        """Release the lock and remove its file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # Windows cannot remove an open file
                self._path.unlink(missing_ok=True)
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock an open file without waiting; return False if another process holds the lock."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        elif fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Other errors mean that this file system has no locks: go ahead without one.
        return error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
    return True


def _is_open_file(descriptor: int, path: Path) -> bool:
    """Return whether `path` is the file that was opened, not a newer one or none."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


class RecordFile:
    """Appends records to a file, each as a line with one JSON object.

        with RecordFile(path) as file:
            file.write(record)

    Each line is written by one unbuffered write, so that a process that is killed leaves complete lines. A
    record that cannot be written completely is left out; nothing is raised, because a full disk must not end
    a peer. The first such error is logged.

    overwrite: empty the file first, instead of appending to it.
    limit: the largest size of the file, in bytes; None for no limit. Before it would grow beyond, it is
        renamed to its name with `.1` at the end, replacing an older file of that name, and a new one begins.
    unwritten: the number of records that were left out. failure: the first error, or None.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, limit: int | None = None):
        self._path, self._limit = path, limit
        self.unwritten = 0
        self.failure: OSError | None = None
        self._file: FileIO | None = None
        self._ends_inside_line = False
        try:
            if overwrite:
                path.open("wb").close()
            self._file = path.open("a+b", buffering=0)  # unbuffered: closing it cannot fail
            self._ends_inside_line = _last_line_is_incomplete(self._file)
        except OSError as error:
            self._note_failure(error)

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
        """Append one record as a line of its own, also if the file's last line is incomplete."""
        if self._file is None:
            self.unwritten += 1
            return
        line = (("\n" if self._ends_inside_line else "") + json.dumps(record) + "\n").encode()
        start = 0
        try:
            start = self._file.seek(0, os.SEEK_END)
            if self._limit is not None and start and start + len(line) > self._limit:
                self._file = self._rotate(self._file)
                start, line = 0, line.lstrip(b"\n")
            written = self._file.write(line) or 0
            while written < len(line):  # a full disk takes a part; writing the rest then raises
                written += self._file.write(line[written:]) or 0
        except OSError as error:
            with contextlib.suppress(OSError):  # a device file cannot be truncated
                self._file.truncate(start)
            self.unwritten += 1
            self._note_failure(error)
        else:
            self._ends_inside_line = False

    def _rotate(self, full: FileIO) -> FileIO:
        """Rename the full file, and return a new one. If that fails, the full one is still open."""
        self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        new = self._path.open("a+b", buffering=0)
        full.close()
        return new

    def _note_failure(self, error: OSError) -> None:
        """Log and keep the first error; later ones would say the same."""
        if self.failure is None:
            reason = error.strerror or str(error)
            _log.warning(
                "%s: cannot be written: %s; records are left out of it until it can be: free disk space or "
                "check access", self._path, reason,
            )  # fmt: skip
            self.failure = error


def _last_line_is_incomplete(file: FileIO) -> bool:
    """Return whether the file does not end with a line break, after a power failure for example."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
