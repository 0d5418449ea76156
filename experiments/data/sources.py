"""Loads data sets by name: finds their files, verifies checksums and downloads.

To add a data set, write a function that loads it and add it to `_LOADERS`. Importing this module does not
import torch, so that names are listed quickly. A file that is missing or damaged raises DataError.
"""

from __future__ import annotations

import hashlib
import http.client
import inspect
import os
import shutil
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

from gossamer.entry import EntryError, call_entry, import_from, load_entry
from gossamer.errors import GossamerError, hint

if TYPE_CHECKING:
    from .dataset import Dataset, PeerDatasets

_LOADERS = {
    "digits": ("", "handwriting", "digits of 8×8 pixels, 10 classes; built in"),
    "mnist": (
        "mnist",
        "handwriting",
        "digits of 28×28 pixels, 10 classes; downloaded if it is missing",
    ),
    "mnist-writers": ("mnist", "handwriting", "MNIST's training digits by writer"),
    "femnist-a": (
        "femnist",
        "handwriting",
        "FEMNIST: digits and letters of 28×28 pixels by writer, 62 classes",
    ),
    "femnist-m": (
        "femnist",
        "handwriting",
        "FEMNIST with letters that look alike merged, 47 classes",
    ),
    "femnist-d": ("femnist", "handwriting", "FEMNIST's digits, 10 classes"),
    "pendigits": (
        "handwriting",
        "handwriting",
        "pen strokes drawn as digits of 28×28 pixels, by 44 writers, 10 classes",
    ),
    "vsn": ("sensors", "sensors", "vehicles heard by sensor nodes, 100 features, 2 or 3 classes"),
    "vsn-binary": ("sensors", "sensors", "VSN without the class of noise, 2 classes"),
    "hapt": (
        "sensors",
        "sensors",
        "people's movements by person, 100 spectral features, 6 classes",
    ),
    "hapt-sitstand": ("sensors", "sensors", "sitting and standing of HAPT, 2 classes"),
    "hapt-raw": ("sensors", "sensors", "HAPT's time series, 128 steps of 6 axes, 6 classes"),
    "cifar10": ("cifar", "cifar", "images of 3×32×32 pixels, 10 classes"),
}
"""By the name of the data set: its family (the folder of its files), the module of this package with the
function of that name, with _ for -, which loads it, and what it is."""


class DataError(GossamerError, ValueError):
    """Data cannot be found, read or used; the message is one line that says what to do."""


def names() -> tuple[str, ...]:
    """Return the names of all data sets: "digits" is built in, "mnist" is downloaded, others need files."""
    return tuple(_LOADERS)


def descriptions() -> dict[str, tuple[str, str]]:
    """Return for every data set what it is, and the folder of its files; the empty text if it needs none."""
    return {name: (text, family and f"{family}/") for name, (family, _, text) in _LOADERS.items()}


def load(
    name: str, root: str | Path | None = None, *, seed: int = 0, folder: Path | None = None
) -> Dataset:
    """Load a data set by name, or by calling a function of the user, `module:function`.

    The files of a data set are searched in a subfolder (`mnist/`, `femnist/`, `handwriting/`, `sensors/` or
    `cifar/`) of `root`, or, if `root` is None, of the folder in the environment variable GOSSAMER_DATA; then
    in the same subfolder of the cache folder (`$XDG_CACHE_HOME` or `~/.cache`, then `gossamer/`). DataError
    says which file is missing or damaged, and what to do.

    A user's function returns a Dataset, and may have a parameter `seed`; its module is searched in `folder`
    and in the working directory.
    """
    dataset = load_or_stream(name, root, seed=seed, folder=folder)
    from .dataset import Dataset  # imports torch, which is not needed to refuse a name

    if not isinstance(dataset, Dataset):
        raise DataError(
            f"{name} returned PeerDatasets, which are read while peers train: only simulate, swarm and join "
            "can use them; return a Dataset here"
        )
    return dataset


def load_or_stream(
    name: str, root: str | Path | None = None, *, seed: int = 0, folder: Path | None = None
) -> Dataset | PeerDatasets:
    """Load a data set as `load` does; a user's function may return PeerDatasets too."""
    if ":" in name:
        return _load_from_function(name, seed, folder)
    if name not in _LOADERS:
        suggestion = hint(name, _LOADERS, cutoff=0)
        raise DataError(
            f"no data set is called {name!r}: {suggestion} "
            f"There are {', '.join(_LOADERS)}; or name a function of yours, module:function"
        )
    family, module, _ = _LOADERS[name]
    loader = getattr(import_module(f".{module}", __package__), name.replace("-", "_"))
    return loader(_data_files(name, family, root))


def _load_from_function(entry: str, seed: int, folder: Path | None) -> Dataset | PeerDatasets:
    """Call the user's function, with `seed` if it has a parameter of that name, and check its result.

    entry: module:function. The module is in `folder` (that of the config), in the working directory, or
    installed. Any error raises DataError with one line that names the function.
    """
    from .dataset import Dataset, PeerDatasets  # imports torch, which listing names does not need

    import_from(folder or Path())
    try:
        function = load_entry(entry)
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # functions written in C may have no signature
            parameters = {}
        dataset = call_entry(entry, {"seed": seed} if "seed" in parameters else {})
    except EntryError as error:
        raise DataError(str(error)) from error.__cause__
    except GossamerError as error:
        raise DataError(f"{entry}: {error}") from None
    if isinstance(dataset, PeerDatasets):
        return dataset
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"{entry} returned {type(dataset).__name__} instead of a gossamer.experiments.data.Dataset, "
            "as in Dataset('mine', samples(x, y), None, classes=3), or of PeerDatasets"
        )
    if not len(dataset.train):
        raise DataError(f"{entry} returned a Dataset without training samples")
    if dataset.test is not None and not len(dataset.test):
        raise DataError(
            f"{entry} returned a Dataset with an empty test set: with None, samples are held out"
        )
    return dataset


def load_once(name: str, seed: int = 0, folder: Path | None = None) -> Dataset:
    """Load a data set, or return the one that an earlier run of this process has loaded."""
    # Only a user's function depends on seed and folder.
    return _load_cached(name, seed, folder) if ":" in name else _load_cached(name)


@lru_cache(maxsize=2)
def _load_cached(name: str, seed: int = 0, folder: Path | None = None) -> Dataset:
    """Load a data set and keep it in memory."""
    return load(name, seed=seed, folder=folder)


# --- files ------------------------------------------------------------------------------------------

_CHECKSUM_LINES = Path(__file__).with_name("SHA256SUMS").read_text("ascii").splitlines()
CHECKSUMS = {name: sha256 for sha256, name in map(str.split, _CHECKSUM_LINES)}
"""SHA-256 of files by family and name: MNIST's files as published and unpacked, and files derived from other
data sets. A file is verified before it is read, so that no result comes from a damaged or different copy."""


@dataclass(frozen=True)
class DataFiles:
    """Finds the files of a data set.

    dataset: the name of the data set. family: the subfolder of its files. folders: the folders to search, in
    this order; the last one is in the user's cache, where downloads are saved.
    """

    dataset: str
    family: str
    folders: tuple[Path, ...] = ()

    def find(self, *names: str) -> Path | None:
        """Return the first file with one of these names, folder by folder; None if there is none."""
        paths = (folder / name for folder in self.folders for name in names)
        return next((path for path in paths if path.is_file()), None)

    def glob(self, *patterns: str) -> list[Path]:
        """Return the sorted files that match one of `patterns`, from the first folder with any."""
        for folder in self.folders:
            for pattern in patterns:
                if paths := sorted(path for path in folder.glob(pattern) if path.is_file()):
                    return paths
        return []

    def need(self, *names: str, advice: str = "") -> Path:
        """Return the file with one of these names, after verifying its checksum; raise DataError if missing.

        advice: what the error says that the user can do; by default, to set GOSSAMER_DATA.
        """
        path = self.find(*names)
        if path is None:
            sha256 = CHECKSUMS.get(f"{self.family}/{names[0]}")
            expected = f" (SHA-256 {sha256})" if sha256 else ""
            searched = ", ".join(map(str, self.folders))
            advice = advice or f"set GOSSAMER_DATA to the folder above {self.family}/"
            raise DataError(
                f"{self.dataset}: {names[0]}{expected} was not found; looked in {searched}; {advice}"
            )
        self.verify(path, path.name)
        return path

    def arrays(self, name: str, *keys: str, advice: str = "") -> list[np.ndarray]:
        """Return the arrays with these keys of an npz file; `advice` as for `need`."""
        return read_npz(self.need(name, advice=advice), *keys)

    def verify(self, path: Path, name: str) -> None:
        """Raise DataError if a file does not have the checksum of `name`; without a checksum, do nothing."""
        expected = CHECKSUMS.get(f"{self.family}/{name}")
        if expected and (actual := _sha256(path)) != expected:
            raise DataError(
                f"{path} is damaged or is not the original file: expected SHA-256 {expected}, "
                f"found {actual}; replace it, or delete it so that another copy is used"
            )


def _data_files(dataset: str, family: str, root: str | Path | None) -> DataFiles:
    """Return the DataFiles of a data set, with the folders that `load` describes."""
    if not family:  # a built-in data set, which works even if GOSSAMER_DATA is wrong
        return DataFiles(dataset, family)
    cache_home = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(cache_home) if cache_home else Path.home() / ".cache") / "gossamer" / family
    data_root = os.environ.get("GOSSAMER_DATA") if root is None else root
    if not data_root:
        return DataFiles(dataset, family, (cache,))
    if not Path(data_root).is_dir():
        origin = "GOSSAMER_DATA" if root is None else "the data root"
        raise DataError(
            f"{origin} is {data_root}, which is not a folder: correct it or leave it unset"
        )
    return DataFiles(dataset, family, (Path(data_root) / family, cache))


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_npz(path: Path, *keys: str) -> list[np.ndarray]:
    """Return the arrays with these keys of an npz file; arrays of pickled objects are refused."""
    try:
        # Opened here, because np.load leaves a damaged file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            missing = [key for key in keys if key not in arrays]
            if not missing:
                return [arrays[key] for key in keys]
            present_keys = ", ".join(arrays)
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        # TypeError: the file is an npy array with the name of an npz file.
        raise DataError(f"{path} cannot be read as npz ({error}): replace it") from error
    raise DataError(
        f"{path} has no array {missing[0]!r}, only {present_keys}: it is not the file that its name says"
    )


def download(
    urls: Sequence[str],
    target: Path,
    sha256: str,
    *,
    console: Console | None = None,
    timeout: float = 30.0,
) -> Path:
    """Download `target` from the first of `urls` whose content has the checksum `sha256`.

    The content is written to a temporary file in the target's folder, verified, then renamed: the target is
    either complete and correct or absent, also after Ctrl-C or if two processes download at once.

    console: shows the progress bar; standard error if left out.
    timeout: seconds without data after which a mirror is given up; raise it on a very slow connection.

    Raises DataError, which names every mirror and its error.
    """
    failures: list[str] = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise DataError(
            f"{target} cannot be written ({error}): set XDG_CACHE_HOME to a writable folder"
        ) from error
    with temporary as folder:
        temporary_file = Path(folder) / target.name
        for url in urls:
            try:
                _fetch(url, temporary_file, console or Console(stderr=True), timeout)
                actual = _sha256(temporary_file)
            except (OSError, http.client.HTTPException) as error:
                failures.append(f"{url}: {error}")
                continue
            if actual == sha256:
                return temporary_file.replace(target)
            failures.append(f"{url}: expected SHA-256 {sha256}, found {actual}")
    raise DataError(
        f"{target.name} could not be downloaded ({'; '.join(failures)}): go online, or put "
        f"the file (SHA-256 {sha256}) into {target.parent} by hand, or set GOSSAMER_DATA to the folder above "
        f"a {target.parent.name}/ that has it"
    )


def _fetch(url: str, path: Path, console: Console, timeout: float) -> None:
    """Download a URL to a file, with a progress bar; raise OSError if the content is incomplete."""
    with urllib.request.urlopen(url, timeout=timeout) as response, path.open("wb") as file:
        total = int(response.headers.get("Content-Length", 0))
        with wrap_file(response, total, description=path.name, console=console) as content:
            shutil.copyfileobj(content, file)
        # Reading ends without an error if the server closes the connection early.
        if file.tell() < total:
            raise OSError(f"connection closed after {file.tell()} of {total} bytes")
        file.flush()
        os.fsync(file.fileno())
