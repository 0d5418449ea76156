"""Packages whose names are loaded when they are first used: what needs no torch should not wait for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def at_first_use(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: where its names are, as modules relative to it.

    A name whose place is a module of the same name is that module.
    """

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = import_module(places[name], package)
        if places[name] != f".{name}":
            found = getattr(found, name)
        setattr(sys.modules[package], name, found)
        return found

    return load
