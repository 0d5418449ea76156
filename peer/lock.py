"""One running peer per checkpoint: an advisory lock on a file beside it.

The operating system drops the lock with the process that held it, however that ended, so that a crash
never leaves one behind. Where it knows no such locks, nothing is locked.
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


class CheckpointLock:
    """Held from `acquire` to `release`."""

    def __init__(self, checkpoint: Path):
        self._checkpoint = checkpoint
        self._path = checkpoint.with_name(checkpoint.name + ".lock")
        self._file: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise a PeerError if another peer holds it."""
        while self._file is None:
            try:
                file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as error:
                raise PeerError(
                    f"{self._checkpoint}: cannot be locked: {error.strerror}; give the peer a "
                    "checkpoint in a folder that it may write to"
                ) from None
            if not _lock(file):
                os.close(file)
                raise PeerError(
                    f"{self._checkpoint}: another running peer uses this checkpoint; stop it, or give "
                    "each peer its own file"
                )
            if _same(file, self._path):
                self._file = file
            else:  # its last holder removed the file between our opening and our locking it
                os.close(file)

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
