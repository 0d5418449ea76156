"""The reference of all keys of configs and device files, read from the classes that declare them.

`gossamer explain` prints it, and the documentation's page of keys is generated from it. The text of a key is
its docstring; its type and default come from the JSON schema that pydantic makes of its class.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from inspect import cleandoc
from typing import Any, Literal, get_args, get_type_hints

from pydantic import BaseModel

from ..errors import ConfigError

File = Literal["config", "comparison", "device"]
"""A kind of file. config: for `gossamer simulate`, `sweep` and `swarm`; comparison: for `gossamer compare`;
device: for `gossamer join`."""

FILE_TITLES: dict[File, str] = {
    "config": "the config of a swarm",
    "comparison": "the config of a comparison",
    "device": "the file of a device",
}
ANY_NAME = "NAME"
"""Stands in paths for a name that the user chooses."""


@dataclass(frozen=True)
class Key:
    """One key: its name, the values that it takes, its default and what it does.

    default: as TOML writes it, or "required" or "none (optional)"; for a table, "the defaults below":
        those of its keys.
    """

    name: str
    values: str
    default: str
    text: str


@dataclass(frozen=True)
class TableReference:
    """One table of a file, with its keys.

    path: the keys that lead to the table, joined by dots; empty for the top level of a file.
    repeated: whether the file has a list of such tables, `[[models]]`.
    """

    file: File
    path: str
    repeated: bool
    text: str
    keys: tuple[Key, ...]

    @property
    def heading(self) -> str:
        """The table as TOML writes it, `[gossip]` or `[[models]]`; "top level" outside of all tables."""
        if not self.path:
            return "top level"
        return f"[[{self.path}]]" if self.repeated else f"[{self.path}]"

    @property
    def place(self) -> str:
        """The table and its file in words."""
        return f"{self.heading} of {FILE_TITLES[self.file]}"

    def full_name(self, key: Key) -> str:
        """Return a key with the path of its table, as in `gossip.mode`."""
        return f"{self.path}.{key.name}" if self.path else key.name


@dataclass(frozen=True)
class Entry:
    """A key, and all tables that have a key of this name with the same values, default and text."""

    key: Key
    tables: tuple[TableReference, ...]


@cache
def reference() -> tuple[TableReference, ...]:
    """Return all tables of all files. What a comparison inherits from configs is listed there alone."""
    from ..federated import METHODS
    from ..federated.comparison import Comparison
    from ..live.device import JoinConfig
    from .tables import Config, Experiment

    config = list(_tables("config", "", Config))
    comparison = list(_tables("comparison", "", Comparison, leave_out=Experiment))
    methods = [
        table
        for name, method in METHODS.items()
        for table in _tables("comparison", f"methods.{name}", method)
    ]
    return (*config, *comparison, *methods, *_tables("device", "", JoinConfig))


def explain(name: str) -> tuple[list[TableReference], list[Entry]]:
    """Return the tables and the keys of this name; raises ConfigError if there are none.

    name: a key, with or without the path of its table (`mode`, `gossip.mode`), or a table (`gossip`,
        `[gossip]`, `[[models]]`); or, if there is neither, a value that some key may have
        (`dirichlet`). Numbers in a path are skipped: `models.0.share` is `models.share`. Where the user
        chooses a name, any may stand: `matching.everyone.kind` is `matching.NAME.kind`.
    """
    steps = [step for step in name.strip("[] ").split(".") if not step.isdigit()]
    wanted = ".".join(steps)

    def is_wanted(path: str) -> bool:
        expected = path.split(".")
        return len(steps) == len(expected) and all(
            each in (step, ANY_NAME) for step, each in zip(steps, expected, strict=True)
        )

    tables: list[TableReference] = []
    for table in reference():
        # A table that a config and a device's file have in common is explained once.
        if table.path and is_wanted(table.path) and all(table.keys != each.keys for each in tables):
            tables.append(table)
    keys = [(key, table) for table in reference() for key in table.keys]
    places: dict[Key, list[TableReference]] = {}
    for key, table in keys:
        is_table = any(each.path == table.full_name(key) for each in tables)
        if (key.name == wanted or is_wanted(table.full_name(key))) and not is_table:
            places.setdefault(key, []).append(table)
    if not tables and not places:
        for key, table in keys:
            if json.dumps(wanted) in key.values:
                places.setdefault(key, []).append(table)
    if not tables and not places:
        names = {table.full_name(key) for key, table in keys} | {key.name for key, _ in keys}
        names |= {table.path for table in reference() if table.path}
        near = get_close_matches(wanted, sorted(names), n=1, cutoff=0.5)
        advice = f"did you mean {near[0]!r}?" if near else "gossamer explain lists all of them"
        raise ConfigError(f"no key or table is called {name!r}; {advice}")
    return tables, [Entry(key, tuple(tables)) for key, tables in places.items()]


def keys_in_order(table: type[BaseModel]) -> Iterator[str]:
    """Yield the keys of a table, its own before those of its base classes.

    In pydantic's `model_fields`, a class's own fields come after those of all its base classes.
    """
    seen: set[str] = set()
    for base in table.__mro__:
        if issubclass(base, BaseModel):
            for key in base.__annotations__:
                if key in table.model_fields and key not in seen:
                    seen.add(key)
                    yield key


# --- reading the classes ------------------------------------------------------------------------------


def _tables(
    file: File, path: str, root: type[BaseModel], leave_out: type[BaseModel] | None = None
) -> Iterator[TableReference]:
    """Yield the reference of a table and of all tables in it.

    leave_out: a class whose keys are left out.
    """
    schema = root.model_json_schema()
    hidden = leave_out.model_fields.keys() if leave_out else ()
    yield from _table(file, path, False, root, schema, schema.get("$defs", {}), hidden)


def _table(
    file: File,
    path: str,
    repeated: bool,
    table: type,
    schema: dict[str, Any],
    definitions: dict[str, Any],
    hidden: Collection[str] = (),
) -> Iterator[TableReference]:
    """Yield the reference of a table, and of the tables in it; hidden: keys that are left out."""
    keys, inner = [], []
    for name, annotation in _fields(table):
        if name in hidden:
            continue
        field = schema["properties"][name]
        classes = list(_tables_in(annotation))
        # pydantic leaves out a description that is equal to the docstring of the table's class.
        text = field.get("description") or classes[0].__doc__
        required = name in schema.get("required", ())
        default = "required" if required else _default(field.get("default"), bool(classes))
        keys.append(Key(name, _values(field), default, cleandoc(text or "")))
        for inner_table in classes:
            step = f"{name}.{ANY_NAME}" if "additionalProperties" in field else name
            inner_path = f"{path}.{step}" if path else step
            inner.append((inner_path, field.get("type") == "array", inner_table))
    doc = cleandoc(table.__doc__ or "")
    yield TableReference(file, path, repeated, doc, tuple(keys))
    for inner_path, is_list, inner_table in inner:
        schema = definitions[inner_table.__name__]
        yield from _table(file, inner_path, is_list, inner_table, schema, definitions)


def _fields(table: type) -> Iterator[tuple[str, Any]]:
    """Yield the names and types of the keys of a table, a pydantic model or a dataclass."""
    if issubclass(table, BaseModel):
        for name in keys_in_order(table):
            yield name, table.model_fields[name].annotation
    else:
        hints = get_type_hints(table)
        for each in fields(table):
            yield each.name, hints[each.name]


def _tables_in(annotation: Any) -> Iterator[type]:
    """Yield the classes of tables in a type hint: that of `list[Model]` is Model."""
    if isinstance(annotation, type) and (
        issubclass(annotation, BaseModel) or is_dataclass(annotation)
    ):
        yield annotation
        return
    for argument in get_args(annotation):
        yield from _tables_in(argument)


def _default(value: Any, is_table: bool) -> str:
    """Return a default as TOML writes it, or what stands for it; see `Key`."""
    if value is None:
        return "none (optional)"
    return "the defaults below" if is_table and value else _as_toml(value)


def _as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_as_toml(each)}' for key, each in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


def _values(schema: dict[str, Any]) -> str:
    """Say which values a JSON schema allows."""
    if "anyOf" in schema:
        texts = [_values(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return _either(texts)
    if "enum" in schema:
        return _either([json.dumps(each) for each in schema["enum"]])
    if "const" in schema:
        return json.dumps(schema["const"])
    kind = schema.get("type")
    if "$ref" in schema:
        return "a table"
    if kind == "array":
        if "prefixItems" in schema:
            return f"a list of {len(schema['prefixItems'])} values"
        return f"a list of {_plural(schema.get('items', {}))}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"a table of {_plural(inner)}" if isinstance(inner, dict) else "a table"
    words = {"string": "text", "integer": "an integer", "number": "a number"}
    return words.get(str(kind), "true or false") + _bounds(schema)


def _plural(schema: dict[str, Any]) -> str:
    words = {
        "string": "texts", "integer": "integers", "number": "numbers", "array": "lists", "object": "tables",
    }  # fmt: skip
    return words.get(schema.get("type", ""), "tables" if "$ref" in schema else "values")


def _bounds(schema: dict[str, Any]) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    limits = [f"{word} {schema[key]:g}" for key, word in words.items() if key in schema]
    return f" {' and '.join(limits)}" if limits else ""


def _either(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
