"""Fetch one file from the first mirror that has it: progress, checksum, all or nothing on disk."""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from .files import DataError

_CHUNK = 1 << 16


def download(
    urls: Sequence[str],
    target: Path,
    sha256: str,
    *,
    console: Console | None = None,
    timeout: float = 30.0,
) -> Path:
    """Fetch `target` from the first of `urls` that delivers content with checksum `sha256`.

    The content is written beside the target under a temporary name, checked, then renamed: the
    target is either whole and correct or absent, also after Ctrl-C or with two programs at once.
    `console` shows the progress bar (standard error by default). `timeout` is how many seconds a
    mirror may stay silent: raise it on a very slow link. DataError names every mirror and what went
    wrong there.
    """
    failures: list[str] = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise DataError(
            f"{target} cannot be written ({error}): set XDG_CACHE_HOME to a folder that can be"
        ) from error
    partial = Path(name)
    try:
        for url in urls:
            try:
                found = _fetch(url, partial, target.name, console, timeout)
            except (OSError, http.client.HTTPException) as error:
                failures.append(f"{url}: {error}")
                continue
            if found != sha256:
                failures.append(f"{url}: expected SHA-256 {sha256}, found {found}")
                continue
            os.replace(partial, target)
            return target
    finally:
        partial.unlink(missing_ok=True)
    raise DataError(
        f"{target.name} could not be downloaded ({'; '.join(failures)}): go online, or put "
        f"the file (SHA-256 {sha256}) into {target.parent} by hand"
    )


def _fetch(url: str, partial: Path, label: str, console: Console | None, timeout: float) -> str:
    """Write what `url` delivers into `partial` and return its SHA-256."""
    digest = hashlib.sha256()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with (
        urllib.request.urlopen(url, timeout=timeout) as response,
        partial.open("wb") as file,
        Progress(*columns, console=console or Console(stderr=True)) as progress,
    ):
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdigit() else None
        bar = progress.add_task(label, total=total)
        received = 0
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            digest.update(chunk)
            received += len(chunk)
            progress.advance(bar, len(chunk))
        # read() with a size ends quietly when the other side hangs up early
        if total is not None and received < total:
            raise OSError(f"connection closed after {received} of {total} bytes")
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
