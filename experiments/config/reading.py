"""Reading a config file: whatever is wrong with it becomes one line that names file and key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gossamer.names import hint

from ..errors import ConfigError


def read_table(path: str | Path) -> dict[str, Any]:
    """A TOML file as it is; one that cannot be read is an error that names it."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read: it is not text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def require_table(table: object, source: str, reader: str) -> None:
    """Raise unless what was given for a table is one; `reader` is what reads files."""
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: give a table (a dict), not {table!r}; {reader} reads a file")


def first_mistake(error: ValidationError, table: type[BaseModel]) -> str:
    """One sentence about the first mistake that was found in a table."""
    mistakes = error.errors()
    # A misspelt key is reported before the one that is missing because of it.
    mistake = next((m for m in mistakes if m["type"] == "extra_forbidden"), mistakes[0])
    place = [str(step) for step in mistake["loc"]]
    key = ".".join(place)
    if mistake["type"] == "extra_forbidden":
        inner = _table_at(table, place[:-1])
        if new := getattr(inner, "RENAMED", {}).get(place[-1]):
            return f"unknown key {key!r}; {new}"
        known = list(inner.model_fields)
        return f"unknown key {key!r}; {hint(place[-1], known, are='known keys are')}"
    return f"key {key!r}: {_plain_words(mistake)}"


def _plain_words(mistake: ErrorDetails) -> str:
    last, given = mistake["loc"][-1], mistake["input"]
    match mistake["type"]:
        case "missing":
            return "is missing"
        case "sentence":
            return mistake["msg"]
        case "model_type":
            return f"should be a table, not {given!r}"
        case "list_type" if isinstance(given, dict):
            return f"is a list of tables: write [[{last}]], not [{last}]"
    return f"{mistake['msg'][0].lower()}{mistake['msg'][1:]}, not {given!r}"


def _table_at(table: type[BaseModel], place: list[str]) -> type[BaseModel]:
    for step in place:
        if step.isdigit():
            continue
        annotation = table.model_fields[step].annotation
        inner = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        table = next(kind for kind in inner if issubclass(kind, BaseModel))
    return table
