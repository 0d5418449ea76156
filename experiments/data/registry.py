"""Data sets by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from .cifar import cifar10
from .dataset import Dataset
from .digits import digits
from .femnist import femnist_a, femnist_d, femnist_m
from .files import DataError, Places, places
from .hapt import hapt, hapt_raw, hapt_sitstand
from .mnist import mnist, mnist_writers
from .pendigits import pendigits
from .vsn import vsn, vsn_binary


@dataclass(frozen=True)
class _Entry:
    family: str  # the folder its files are in
    loader: Callable[[Places], Dataset]


_ENTRIES: Mapping[str, _Entry] = MappingProxyType(
    {
        "digits": _Entry("digits", digits),
        "mnist": _Entry("mnist", mnist),
        "mnist-writers": _Entry("mnist", mnist_writers),
        "femnist-a": _Entry("femnist", femnist_a),
        "femnist-m": _Entry("femnist", femnist_m),
        "femnist-d": _Entry("femnist", femnist_d),
        "pendigits": _Entry("handwriting", pendigits),
        "vsn": _Entry("sensors", vsn),
        "vsn-binary": _Entry("sensors", vsn_binary),
        "hapt": _Entry("sensors", hapt),
        "hapt-sitstand": _Entry("sensors", hapt_sitstand),
        "hapt-raw": _Entry("sensors", hapt_raw),
        "cifar10": _Entry("cifar", cifar10),
    }
)


def names() -> tuple[str, ...]:
    """Every name that `load` knows; "digits" is built in, "mnist" downloads, others are files."""
    return tuple(_ENTRIES)


def load(name: str, root: str | Path | None = None) -> Dataset:
    """Load a data set by name.

    Files are looked for in the family's folder (`mnist/`, `femnist/`, `handwriting/`, `sensors/`,
    `cifar/`) under `root`, or under the folder that the environment variable GOSSAMER_DATA names if
    `root` is None, then under the cache folder (`$XDG_CACHE_HOME` or `~/.cache`, then `gossamer/`).
    DataError says which file is missing or damaged, and what to do.
    """
    if name not in _ENTRIES:
        near = difflib.get_close_matches(name, _ENTRIES, n=1, cutoff=0)
        raise DataError(
            f"no data set is called {name!r}: did you mean {near[0]!r}? "
            f"There are {', '.join(_ENTRIES)}"
        )
    entry = _ENTRIES[name]
    # the built-in digits need no files: a GOSSAMER_DATA that is wrong must not stop them
    where = Places(()) if entry.family == "digits" else places(entry.family, root)
    return entry.loader(where)
