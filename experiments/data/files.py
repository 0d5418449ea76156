"""Where data files are looked for, how they are checked, and downloads. Every complaint is a DataError."""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from gossamer.errors import GossamerError

_CHUNK = 1 << 16

KNOWN: dict[str, str] = {
    key: sha256
    for sha256, key in map(
        str.split,
        """
    440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609 mnist/train-images-idx3-ubyte.gz
    3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c mnist/train-labels-idx1-ubyte.gz
    8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6 mnist/t10k-images-idx3-ubyte.gz
    f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6 mnist/t10k-labels-idx1-ubyte.gz
    ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db mnist/train-images-idx3-ubyte
    65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5 mnist/train-labels-idx1-ubyte
    0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7 mnist/t10k-images-idx3-ubyte
    ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2 mnist/t10k-labels-idx1-ubyte
    283137e3bc3fa89a8fbe0ebb5fe3608ebe859df1bdb9267746f943b658ce6829 mnist/mnist_writers.npz
    ef61526f24cfa6db78e4fb9eccfbbb6ce13c257fb6efcae64e8dc4143f2cbdd7 femnist/femnist_pool.npz
    6dc441308192c80c6de52249ecb59afa5a4b34e92210eec1f270b4cacd0a1d57 femnist/femnist_pseudo_writers.npz
    c6ae245f4481bed2ee75432ae9f74c88b73dd5d1d9689227c2ef2a0b4bde5c31 handwriting/pendigits_writers.npz
    0991c5b1585d8acd04f5089e047d1def62b048e9b4e8401c7c17ab3639694715 sensors/sensit300.npz
    313ffdad50be2f0096d28b3b92af1f8ce19fceb5af48a9f19aadb132bccfbc3e sensors/hapt_fft100.npz
    a9a0d98ac24effbd23977578142346890d8e85a9936a10faeaa464f8961f22a4 sensors/hapt_raw128.npz
    7d659541ed95237ea4e04e2d33389e1104c1953861748ff53d660d6c8d6654f9 cifar/cifar10_train_0.webp
    51af9519a93c50876c6e10004965e1e5959387da1f8d7b96f16f7ca26219af79 cifar/cifar10_train_1.webp
    df199aec7516a004a23ad02816a63a368d2208347ff1c4011eaa91a2503201fc cifar/cifar10_test.webp
    b09a6619f967265807f2a05864fb46e152895782c29ca0637dff1335d9f80820 cifar/cifar10_labels.npz
    """.strip().splitlines(),
    )
}
"""SHA-256 of the files whose content is known, by family and name: MNIST as published and unpacked, derived
files. A file is checked before it is read, so that a figure never rests on a damaged or different copy."""


class DataError(GossamerError, ValueError):
    """Data that cannot be found, read or used as asked. One line, which says what to do."""


@dataclass(frozen=True)
class Places:
    """The folders where one family of files may lie, in the order in which they are tried.

    The last one is in the user's cache: downloads go there.
    """

    folders: tuple[Path, ...]

    @property
    def cache(self) -> Path:
        """Where a download of this family is kept."""
        return self.folders[-1]

    def find(self, *names: str) -> Path | None:
        """The first file that bears one of `names`, folder by folder; None if there is none."""
        for folder in self.folders:
            for name in names:
                if (folder / name).is_file():
                    return folder / name
        return None

    def glob(self, *patterns: str) -> list[Path]:
        """Sorted files of the first folder in which one of `patterns` matches."""
        for folder in self.folders:
            for pattern in patterns:
                found = sorted(path for path in folder.glob(pattern) if path.is_file())
                if found:
                    return found
        return []

    def need(self, dataset: str, key: str, advice: str) -> Path:
        """The file `key` names (`family/file`), with its checksum verified, or a DataError."""
        name = key.split("/", 1)[1]
        path = self.find(name)
        if path is None:
            raise self.missing(dataset, [name], advice, key)
        verify(path, key)
        return path

    def missing(self, dataset: str, names: Sequence[str], advice: str, key: str = "") -> DataError:
        """The error for a file that is in none of the folders."""
        looked = ", ".join(str(folder) for folder in self.folders)
        expected = f" (SHA-256 {KNOWN[key]})" if key in KNOWN else ""
        return DataError(
            f"{dataset}: {' or '.join(names)}{expected} was not found; looked in {looked}; {advice}"
        )


def places(family: str, root: str | Path | None = None) -> Places:
    """Folders for `family` ("mnist", "femnist", …): `root`, else GOSSAMER_DATA, then the cache."""
    base = os.environ.get("GOSSAMER_DATA") if root is None else root
    cache = _cache() / family
    if not base:
        return Places((cache,))
    if not Path(base).is_dir():
        origin = "GOSSAMER_DATA" if root is None else "the data root"
        raise DataError(f"{origin} is {base}, which is not a folder: correct it or leave it unset")
    return Places((Path(base) / family, cache))


def _cache() -> Path:
    chosen = os.environ.get("XDG_CACHE_HOME")
    return (Path(chosen) if chosen else Path.home() / ".cache") / "gossamer"


def verify(path: Path, key: str) -> None:
    """Compare a file with the checksum known for `key`; files without a known one pass."""
    expected = KNOWN.get(key)
    if expected is None:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DataError(
            f"{path} is damaged or is not the original file: expected SHA-256 {expected}, "
            f"found {found}; replace it, or delete it so that another copy is used"
        )


def read_npz(path: Path, *keys: str) -> list[np.ndarray]:
    """The arrays named `keys`. Never unpickles."""
    try:
        # opened here, because np.load leaves a damaged file open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            absent = [key for key in keys if key not in arrays]
            if not absent:
                return [arrays[key] for key in keys]
            found = ", ".join(arrays)
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        # TypeError: a single array (npy) under an npz name
        raise DataError(f"{path} cannot be read as npz ({error}): replace it") from error
    raise DataError(
        f"{path} has no array {absent[0]!r}, only {found}: it is another file than its name says"
    )


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
