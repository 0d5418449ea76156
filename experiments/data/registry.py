"""Data sets by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

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
        "mnist": _Entry("mnist", ".mnist:mnist"),
        "mnist-writers": _Entry("mnist", ".mnist:mnist_writers"),
        "femnist-a": _Entry("femnist", ".femnist:femnist_a"),
        "femnist-m": _Entry("femnist", ".femnist:femnist_m"),
        "femnist-d": _Entry("femnist", ".femnist:femnist_d"),
        "pendigits": _Entry("handwriting", ".pendigits:pendigits"),
        "vsn": _Entry("sensors", ".vsn:vsn"),
        "vsn-binary": _Entry("sensors", ".vsn:vsn_binary"),
        "hapt": _Entry("sensors", ".hapt:hapt"),
        "hapt-sitstand": _Entry("sensors", ".hapt:hapt_sitstand"),
        "hapt-raw": _Entry("sensors", ".hapt:hapt_raw"),
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
        from .own import own  # torch: only for those who load something

        return own(name, seed, folder)
    if name not in _ENTRIES:
        near = difflib.get_close_matches(name, _ENTRIES, n=1, cutoff=0)
        raise DataError(
            f"no data set is called {name!r}: did you mean {near[0]!r}? "
            f"There are {', '.join(_ENTRIES)}; or name a function of yours, module:function"
        )
    entry = _ENTRIES[name]
    # the built-in digits need no files: a GOSSAMER_DATA that is wrong must not stop them
    where = Places(()) if entry.family == "digits" else places(entry.family, root)
    module, function = entry.loader.split(":")
    return getattr(import_module(module, __package__), function)(where)


def load_once(name: str, seed: int = 0, folder: Path | None = None) -> Dataset:
    """Load a data set, or take the one that was loaded for the last run of this process."""
    return _kept(name, seed, folder) if ":" in name else _kept(name)  # files are for all seeds


@lru_cache(maxsize=2)
def _kept(name: str, seed: int = 0, folder: Path | None = None) -> Dataset:
    return load(name, seed=seed, folder=folder)
