"""Advisory locks on files: one running peer per checkpoint, one running command per folder of results.

The operating system drops a lock with the process that held it, however that ended, so a crash never
leaves one behind. Where it knows no such locks, nothing is locked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path

from .errors import PeerError

if sys.platform == "win32":
    import msvcrt
else:
    try:
        import fcntl
    except ImportError:  # a platform without Unix locks
        fcntl = None


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


class CheckpointLock:
    """The lock of a checkpoint, on a file beside it. Held from `acquire` to `release`."""

    def __init__(self, checkpoint: Path):
        self._checkpoint = checkpoint
        self._lock = FileLock(checkpoint.with_name(checkpoint.name + ".lock"))

    def acquire(self) -> None:
        """Take the lock, or raise a PeerError if another peer holds it."""
        try:
            taken = self._lock.acquire()
        except OSError as error:
            raise PeerError(
                f"{self._checkpoint}: cannot be locked: {error.strerror}; give the peer a "
                "checkpoint in a folder that it may write to"
            ) from None
        if not taken:
            raise PeerError(
                f"{self._checkpoint}: another running peer uses this checkpoint; stop it, or give "
                "each peer its own file"
            )

    def release(self) -> None:
        """Let go, and leave no file behind."""
        self._lock.release()


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
