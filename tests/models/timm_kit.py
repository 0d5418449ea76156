"""timm without torchvision.

timm names torchvision at import, for image transforms and detection heads that no test here runs, and
torchvision has no build for every torch. Where it is missing, empty stand-ins take its place while timm
is imported, and are gone afterwards.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from typing import Any

import pytest


class _AnyName(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def load_timm() -> Any:
    """The timm package; skips the test where it is not installed."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed (make test installs it)")
    finder = _Finder()
    missing = importlib.util.find_spec("torchvision") is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if missing:
            sys.meta_path.insert(0, finder)
        try:
            return importlib.import_module("timm")
        finally:
            if missing:
                sys.meta_path.remove(finder)
                for name in [one for one in sys.modules if one.partition(".")[0] == "torchvision"]:
                    del sys.modules[name]
