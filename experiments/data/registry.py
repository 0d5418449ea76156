"""Data sets by name. A new one is a function that loads it, and a line in `_ENTRIES`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from gossamer.entry import EntryError, describe_error, load_entry
from gossamer.names import hint

from .files import DataError, Places, places

if TYPE_CHECKING:
    from .dataset import Dataset


@dataclass(frozen=True)
class _Entry:
    family: str  # the folder its files are in
    loader: str  # module:function, so that names can be listed without torch


_ENTRIES: Mapping[str, _Entry] = MappingProxyType(
    {
        "digits": _Entry("digits", ".digits:digits"),
        "mnist": _Entry("mnist", ".digits:mnist"),
        "mnist-writers": _Entry("mnist", ".digits:mnist_writers"),
        "femnist-a": _Entry("femnist", ".femnist:femnist_a"),
        "femnist-m": _Entry("femnist", ".femnist:femnist_m"),
        "femnist-d": _Entry("femnist", ".femnist:femnist_d"),
        "pendigits": _Entry("handwriting", ".digits:pendigits"),
        "vsn": _Entry("sensors", ".sensors:vsn"),
        "vsn-binary": _Entry("sensors", ".sensors:vsn_binary"),
        "hapt": _Entry("sensors", ".sensors:hapt"),
        "hapt-sitstand": _Entry("sensors", ".sensors:hapt_sitstand"),
        "hapt-raw": _Entry("sensors", ".sensors:hapt_raw"),
        "cifar10": _Entry("cifar", ".cifar:cifar10"),
    }
)


def names() -> tuple[str, ...]:
    """Every name that `load` knows; "digits" is built in, "mnist" downloads, others are files."""
    return tuple(_ENTRIES)


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
        return _own(name, seed, folder)
    if name not in _ENTRIES:
        near = hint(name, _ENTRIES, cutoff=0)
        raise DataError(
            f"no data set is called {name!r}: {near} "
            f"There are {', '.join(_ENTRIES)}; or name a function of yours, module:function"
        )
    entry = _ENTRIES[name]
    # the built-in digits need no files: a GOSSAMER_DATA that is wrong must not stop them
    where = Places(()) if entry.family == "digits" else places(entry.family, root)
    module, function = entry.loader.split(":")
    return getattr(import_module(module, __package__), function)(where)


def _own(named: str, seed: int = 0, folder: Path | None = None) -> Dataset:
    """What the function returns; it is given `seed` if it has an argument of that name.

    Its module stands in `folder` (beside the config), in the folder that one starts from, or is
    installed. Whatever goes wrong in it is one line that names the function.
    """
    from .dataset import Dataset  # torch: only for those who load something

    beside = str((folder or Path()).resolve())
    if beside not in sys.path:
        sys.path.insert(0, beside)
    try:
        function = load_entry(named)
    except EntryError as error:
        raise DataError(str(error)) from None
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C: it says nothing of its arguments
        known = {}
    try:
        found = function(seed=seed) if "seed" in known else function()
    except DataError as error:
        raise DataError(f"{named}: {error}") from None
    except Exception as error:
        raise DataError(describe_error(named, error)) from error
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
