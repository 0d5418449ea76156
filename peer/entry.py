"""Entry points: `module:function` names that a user gives on a command line or in a config."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..gossip import TopicError, TransportError
from ..models import ModelError
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
    except Exception as error:  # the user's module runs here: whatever it does is told as its own
        raise PeerError(f"entry point {name!r}: {_told(module_name, error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise PeerError(f"entry point {name!r}: {module_name!r} has no function {function_name!r}")
    return function


def call_entry(name: str, arguments: Mapping[str, Any]) -> Any:
    """What the function that `module:function` names returns.

    What it raises becomes one line that names it, the error and where it was raised; errors of ours
    say enough by themselves.
    """
    function = load_entry(name)
    try:
        return function(**arguments)
    except (PeerError, ModelError, TransportError, TopicError):
        raise
    except Exception as error:
        raise PeerError(_told(name, error)) from error


def _told(name: str, error: Exception) -> str:
    from ..topology import name_raise  # networkx: only for those who fail

    return name_raise(name, error)
