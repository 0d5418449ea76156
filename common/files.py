"""Files that are whole or not there at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield the name of a file to write in the place of `path`, which it becomes when the block ends.

    The rename is atomic; if the block fails, `path` is as it was. sync: force the bytes and the rename to
    the disk, which also makes disks that only notice then that they are full say so.
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
            part.unlink(missing_ok=True)  # half a file on a full disk helps nobody


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> Path:
    """Write a file with these rights, whole or not at all; return its path."""
    with replacing(path) as part:
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
