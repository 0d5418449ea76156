"""Entry points: `module:function` names that a user gives on a command line or in a config."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError


class EntryError(GossamerError):
    """An entry point that cannot be imported or called."""


def load_entry(name: str) -> Callable[..., Any]:
    """Return the function that `module:function` names; modules in the current folder are found too."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise EntryError(f"{name!r} is not an entry point: write module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EntryError(
            f"entry point {name!r}: module {module_name!r} cannot be imported: {error}"
        ) from None
    except Exception as error:  # whatever the user's module does while it is imported
        raise EntryError(f"entry point {name!r}: {describe_error(module_name, error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise EntryError(f"entry point {name!r}: {module_name!r} has no function {function_name!r}")
    return function


def call_entry(name: str, arguments: Mapping[str, Any]) -> Any:
    """Return what the function that `module:function` names returns.

    Errors of other families become an EntryError that names the function, the error and its place.
    """
    function = load_entry(name)
    try:
        return function(**arguments)
    except GossamerError:
        raise
    except Exception as error:
        raise EntryError(describe_error(name, error)) from error


def describe_error(name: str, error: Exception) -> str:
    """Return one line on what a user's `module:function` raised, and where in the user's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    module = sys.modules.get(name.partition(":")[0])
    own = [frame for frame in frames if frame.filename == getattr(module, "__file__", None)]
    words = f"{name} raised {type(error).__name__}: {' '.join(str(error).split())}"
    if not own:  # while it was imported, or in code that stands in another module
        own = [frame for frame in frames if not frame.filename.startswith("<")][-1:]
    return words + "".join(f", at {frame.filename}:{frame.lineno}" for frame in own[-1:])
