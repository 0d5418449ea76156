"""Data sets by name, and their files: where they are looked for, checksums and downloads.

A new data set is a function that loads it, and a line in `_LOADERS`. Nothing here loads torch, so that names
are listed at once. Whatever is wrong with a file is a DataError.
"""

from __future__ import annotations

import hashlib
import http.client
import inspect
import os
import shutil
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import wrap_file

from gossamer.entry import EntryError, call_entry, load_entry
from gossamer.errors import GossamerError
from gossamer.names import hint

if TYPE_CHECKING:
    from .dataset import Dataset

_LOADERS = {
    "digits": ("", "digits:digits"),
    "mnist": ("mnist", "digits:mnist"),
    "mnist-writers": ("mnist", "digits:mnist_writers"),
    "femnist-a": ("femnist", "femnist:femnist_a"),
    "femnist-m": ("femnist", "femnist:femnist_m"),
    "femnist-d": ("femnist", "femnist:femnist_d"),
    "pendigits": ("handwriting", "digits:pendigits"),
    "vsn": ("sensors", "sensors:vsn"),
    "vsn-binary": ("sensors", "sensors:vsn_binary"),
    "hapt": ("sensors", "sensors:hapt"),
    "hapt-sitstand": ("sensors", "sensors:hapt_sitstand"),
    "hapt-raw": ("sensors", "sensors:hapt_raw"),
    "cifar10": ("cifar", "cifar:cifar10"),
}
"""By name: the family, which is the folder its files are in, and module:function of this package."""


class DataError(GossamerError, ValueError):
    """Data that cannot be found, read or used as asked. One line, which says what to do."""


def names() -> tuple[str, ...]:
    """Every name that `load` knows; "digits" is built in, "mnist" downloads, others are files."""
    return tuple(_LOADERS)


def load(
    name: str, root: str | Path | None = None, *, seed: int = 0, folder: Path | None = None
) -> Dataset:
    """Load a data set by name, or what a function of yours returns, `module:function`.

    Files are looked for in the family's folder (`mnist/`, `femnist/`, `handwriting/`, `sensors/`,
    `cifar/`) under `root`, or under the folder that the environment variable GOSSAMER_DATA names if
    `root` is None, then under the cache folder (`$XDG_CACHE_HOME` or `~/.cache`, then `gossamer/`).
    DataError says which file is missing or damaged, and what to do.

    A function returns a Dataset, and may take a `seed`; its module is looked for in `folder`, and in the
    folder that one starts from.
    """
    if ":" in name:
        return _load_own(name, seed, folder)
    if name not in _LOADERS:
        near = hint(name, _LOADERS, cutoff=0)
        raise DataError(
            f"no data set is called {name!r}: {near} "
            f"There are {', '.join(_LOADERS)}; or name a function of yours, module:function"
        )
    family, loader = _LOADERS[name]
    module, function = loader.split(":")
    return getattr(import_module(f".{module}", __package__), function)(_places(name, family, root))


def _load_own(named: str, seed: int, folder: Path | None) -> Dataset:
    """Return what the user's function returns; it is given `seed` if it has an argument of that name.

    Its module stands in `folder` (beside the config), in the folder that one starts from, or is
    installed. Whatever goes wrong in it is one line that names the function.
    """
    from .dataset import Dataset  # torch: only for those who load something

    beside = str((folder or Path()).resolve())
    if beside not in sys.path:
        sys.path.insert(0, beside)
    try:
        function = load_entry(named)
        try:
            known = inspect.signature(function).parameters
        except (TypeError, ValueError):  # written in C: it says nothing of its arguments
            known = {}
        found = call_entry(named, {"seed": seed} if "seed" in known else {})
    except EntryError as error:
        raise DataError(str(error)) from error.__cause__
    except GossamerError as error:
        raise DataError(f"{named}: {error}") from None
    if not isinstance(found, Dataset):
        raise DataError(
            f"{named} returned {type(found).__name__} instead of a gossamer.experiments.data.Dataset, "
            "as in Dataset('mine', samples(x, y), None, classes=3)"
        )
    if not len(found.train):
        raise DataError(f"{named} returned a Dataset without training samples")
    if found.test is not None and not len(found.test):
        raise DataError(
            f"{named} returned a Dataset with an empty test set: with None, samples are held out"
        )
    return found


def load_once(name: str, seed: int = 0, folder: Path | None = None) -> Dataset:
    """Load a data set, or take the one that was loaded for the last run of this process."""
    return _kept(name, seed, folder) if ":" in name else _kept(name)  # files are for all seeds


@lru_cache(maxsize=2)
def _kept(name: str, seed: int = 0, folder: Path | None = None) -> Dataset:
    return load(name, seed=seed, folder=folder)


# --- files ------------------------------------------------------------------------------------------

_SUMS = Path(__file__).with_name("SHA256SUMS").read_text("ascii").splitlines()
KNOWN = {name: sha256 for sha256, name in map(str.split, _SUMS)}
"""SHA-256 of the files whose content is known, by family and name: MNIST as published and unpacked, derived
files. A file is checked before it is read, so that a figure never rests on a damaged or different copy."""


@dataclass(frozen=True)
class Places:
    """The folders where a data set's family of files may lie, in the order in which they are tried.

    The last one is in the user's cache: downloads go there.
    """

    dataset: str
    family: str
    folders: tuple[Path, ...] = ()

    def find(self, *names: str) -> Path | None:
        """Return the first file that bears one of `names`, folder by folder; None if there is none."""
        paths = (folder / name for folder in self.folders for name in names)
        return next((path for path in paths if path.is_file()), None)

    def glob(self, *patterns: str) -> list[Path]:
        """Return the sorted files of the first folder in which one of `patterns` matches."""
        for folder in self.folders:
            for pattern in patterns:
                if found := sorted(path for path in folder.glob(pattern) if path.is_file()):
                    return found
        return []

    def need(self, *names: str, advice: str = "") -> Path:
        """Return the file that bears one of `names`, its checksum verified if known, or raise DataError.

        advice: what to do without the file, if more can be done than to set GOSSAMER_DATA.
        """
        path = self.find(*names)
        if path is None:
            sha256 = KNOWN.get(f"{self.family}/{names[0]}")
            expected = f" (SHA-256 {sha256})" if sha256 else ""
            looked = ", ".join(map(str, self.folders))
            advice = advice or f"set GOSSAMER_DATA to the folder above {self.family}/"
            raise DataError(
                f"{self.dataset}: {names[0]}{expected} was not found; looked in {looked}; {advice}"
            )
        self.verify(path, path.name)
        return path

    def arrays(self, name: str, *keys: str, advice: str = "") -> list[np.ndarray]:
        """Return the arrays named `keys` of an npz file; `advice` as for `need`."""
        return read_npz(self.need(name, advice=advice), *keys)

    def verify(self, path: Path, name: str) -> None:
        """Compare a file with the checksum known for `name`; files without a known one pass."""
        expected = KNOWN.get(f"{self.family}/{name}")
        if expected and (found := _sha256(path)) != expected:
            raise DataError(
                f"{path} is damaged or is not the original file: expected SHA-256 {expected}, "
                f"found {found}; replace it, or delete it so that another copy is used"
            )


def _places(dataset: str, family: str, root: str | Path | None) -> Places:
    if not family:  # built in: a GOSSAMER_DATA that is wrong must not stop it
        return Places(dataset, family)
    chosen = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(chosen) if chosen else Path.home() / ".cache") / "gossamer" / family
    base = os.environ.get("GOSSAMER_DATA") if root is None else root
    if not base:
        return Places(dataset, family, (cache,))
    if not Path(base).is_dir():
        origin = "GOSSAMER_DATA" if root is None else "the data root"
        raise DataError(f"{origin} is {base}, which is not a folder: correct it or leave it unset")
    return Places(dataset, family, (Path(base) / family, cache))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        beside = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise DataError(
            f"{target} cannot be written ({error}): set XDG_CACHE_HOME to a folder that can be"
        ) from error
    with beside as folder:
        partial = Path(folder) / target.name
        for url in urls:
            try:
                _fetch(url, partial, console or Console(stderr=True), timeout)
                found = _sha256(partial)
            except (OSError, http.client.HTTPException) as error:
                failures.append(f"{url}: {error}")
                continue
            if found == sha256:
                return partial.replace(target)
            failures.append(f"{url}: expected SHA-256 {sha256}, found {found}")
    raise DataError(
        f"{target.name} could not be downloaded ({'; '.join(failures)}): go online, or put "
        f"the file (SHA-256 {sha256}) into {target.parent} by hand"
    )


def _fetch(url: str, partial: Path, console: Console, timeout: float) -> None:
    with urllib.request.urlopen(url, timeout=timeout) as response, partial.open("wb") as file:
        total = int(response.headers.get("Content-Length", 0))
        with wrap_file(response, total, description=partial.name, console=console) as content:
            shutil.copyfileobj(content, file)
        if file.tell() < total:  # reading ends quietly when the other side hangs up early
            raise OSError(f"connection closed after {file.tell()} of {total} bytes")
        file.flush()
        os.fsync(file.fileno())
