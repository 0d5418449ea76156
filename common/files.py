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
        """Return whether the lock is free, and take it then; raise OSError if its file cannot be created."""
        while self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            if not _lock(descriptor):
                os.close(descriptor)
                return False
            if _is_open_file(descriptor, self._path):
                self._descriptor = descriptor
            else:  # the last holder removed the file after it was opened and before it was locked
                os.close(descriptor)
        return True

    def release(self) -> None:
        """Release the lock and remove its file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # Windows cannot remove an open file
                self._path.unlink(missing_ok=True)
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
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
