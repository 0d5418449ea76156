"""Where data files are looked for, and how they are checked. Every complaint is a DataError."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gossamer.errors import GossamerError

from . import checksums


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
        expected = f" (SHA-256 {checksums.KNOWN[key]})" if key in checksums.KNOWN else ""
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
    expected = checksums.KNOWN.get(key)
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
