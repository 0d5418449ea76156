"""Entry points: `module:function` names that a user gives on a command line or in a config."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError, hint


class EntryError(GossamerError):
    """An entry point that cannot be imported or called."""


class ArgumentsError(EntryError):
    """Arguments that the function of an entry point does not take."""


def import_from(folder: Path) -> None:
    """Let modules in this folder be imported: users' functions are beside their config."""
    if (path := str(folder.resolve())) not in sys.path:
        sys.path.insert(0, path)


def split_entry(name: str) -> tuple[str, str]:
    """Return the module and the function that `module:function` names; EntryError if there is none."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise EntryError(f"{name!r} is not an entry point: write module:function")
    return module, function


def require_module(name: str) -> None:
    """Raise EntryError if the module of `module:function` is not found. Does not import it: that may be slow.

    The module may be in the current folder.
    """
    module, _ = split_entry(name)
    import_from(Path.cwd())
    top = module.partition(".")[0]
    if top in sys.modules or importlib.util.find_spec(top) is not None:
        return
    prefixes = (sys.prefix, sys.base_prefix)
    users_folders = [
        path for path in sys.path
        if Path(path).is_dir() and not path.startswith(prefixes) and "-packages" not in path
    ]  # fmt: skip
    places = " or ".join(dict.fromkeys([str(Path.cwd()), *users_folders]))
    raise EntryError(
        f"entry point {name!r}: there is no module {top!r} in {places}, and none of that name is installed"
    )


def load_entry(name: str) -> Callable[..., Any]:
    """Return the function that `module:function` names; the module may be in the current folder."""
    module_name, function_name = split_entry(name)
    require_module(name)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EntryError(
            f"entry point {name!r}: module {module_name!r} cannot be imported: {error}"
        ) from None
    except Exception as error:  # the user's module may raise anything while it is imported
        raise EntryError(f"entry point {name!r}: {describe_error(module_name, error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        public = {k: v for k, v in vars(module).items() if callable(v) and not k.startswith("_")}
        own = [k for k, v in public.items() if getattr(v, "__module__", None) == module_name]
        known = hint(function_name, own or public, are="it has")  # a package has its modules' names
        raise EntryError(
            f"entry point {name!r}: {module_name!r} has no function or class {function_name!r}; "
            f"{textwrap.shorten(known, 300, placeholder=' …')}"
        )
    return function


def call_entry(name: str, arguments: Mapping[str, Any]) -> Any:
    """Call the function that `module:function` names, and return its result.

    Any error but a GossamerError becomes an EntryError with the function, the error, its file and line.
    """
    function = load_entry(name)
    _check_arguments(name, function, arguments)
    try:
        return function(**arguments)
    except GossamerError:
        raise
    except Exception as error:
        raise EntryError(describe_error(name, error)) from error


def _check_arguments(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise ArgumentsError if a function does not take these arguments, or needs others."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of a function written in C
        return
    kinds = {each.kind for each in parameters.values()}
    unknown = [each for each in arguments if each not in parameters]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        near = hint(unknown[0], parameters, are="it has")
        raise ArgumentsError(f"{name} has no argument {unknown[0]!r}; {near}")
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ArgumentsError(f"{name}: {error}") from None


def describe_error(name: str, error: Exception) -> str:
    """Describe in one line the error of a user's `module:function`, with its line in the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    module = sys.modules.get(name.partition(":")[0])
    in_module = [frame for frame in frames if frame.filename == getattr(module, "__file__", None)]
    if not in_module:  # the module failed to import, or its function comes from another module
        in_module = [frame for frame in frames if not frame.filename.startswith("<")][-1:]
    location = "".join(f", at {frame.filename}:{frame.lineno}" for frame in in_module[-1:])
    return f"{name} raised {type(error).__name__}: {' '.join(str(error).split())}{location}"
