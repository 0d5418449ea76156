"""Entry points: `module:function` names that a user gives on a command line or in a config."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import PeerError


def load_entry(name: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules in the current folder are found too."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise PeerError(f"{name!r} is not an entry point: write module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise PeerError(
            f"entry point {name!r}: module {module_name!r} cannot be imported: {error}"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise PeerError(f"entry point {name!r}: {module_name!r} has no function {function_name!r}")
    return function
