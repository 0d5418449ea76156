"""Atomic writes, so that a file is never seen half written, and locks between processes."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    try:
        import fcntl
    except ImportError:  # a platform without Unix locks
        fcntl = None


@contextlib.contextmanager
def atomic_path(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file to write; it replaces `path` when the block ends.

    The rename is atomic; if the block fails, `path` is unchanged. sync: flush the bytes and the rename to the
    disk with fsync, which also raises the errors of disks that report only then that they are full.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        if sync:
            _force(part, os.O_RDWR)
        part.replace(path)
        if sync and os.name == "posix":  # elsewhere a folder cannot be opened
            _force(path.parent, os.O_RDONLY)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)  # do not leave a partial file on a full disk


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> Path:
    """Write a file with these permissions, completely or not at all; return its path."""
    with atomic_path(path) as part:
        part.unlink(missing_ok=True)
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
    return path


def _force(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FileLock:
    """A lock that one process at a time holds, from `acquire` to `release`.

    path: the lock's own file, which is made when the lock is taken and removed when it is let go.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: int | None = None

    def acquire(self) -> bool:
        """Take the lock; False if somebody else holds it, OSError if its file cannot be made."""
        while self._file is None:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            if not _lock(file):
                os.close(file)
                return False
            if _same(file, self._path):
                self._file = file
            else:  # its last holder removed the file between our opening and our locking it
                os.close(file)
        return True

    def release(self) -> None:
        """Let go, and leave no file behind."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # Windows removes no open file
                self._path.unlink(missing_ok=True)
            os.close(file)


def _lock(file: int) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        elif fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Anything else means that this file system has no locks.
        return error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
    return True


def _same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
