"""The commands `gossamer explain`, the reference in the terminal, `gossamer examples` and `gossamer new`."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from . import console
from .console import command

if TYPE_CHECKING:
    from ..config.reference import Key, TableReference

LINE = 96
"""Characters of a line of text: longer lines are hard to read."""


@command("explain", slow=True)
def explain_command(key: str | None = None) -> None:
    """Explain a key or a table of a config, a comparison or a device's file; or list all of them.

    Args:
        key: A key with or without its table (mode, gossip.mode), a table (gossip, methods.fedprox), or a
            value of a key (dirichlet); if left out, all keys are listed by table.
    """
    from ..config.reference import FILE_TITLES, explain, reference

    if key is None:
        for file, title in FILE_TITLES.items():
            console.say(title)
            for table in reference():
                if table.file == file:
                    names = ", ".join(key.name for key in table.keys)
                    console.say(_wrapped(f"{table.heading}: {names}", "  ", "      "))
        console.say("gossamer explain KEY says more about a key or a table")
        return
    tables, entries = explain(key)
    for number, table in enumerate(tables):
        if number:
            console.say("")
        _print_table(table)
    for number, entry in enumerate(entries):
        if tables or number:
            console.say("")
        for table in entry.tables:
            console.say(f"{table.full_name(entry.key)}: {table.place}")
        _print_key(entry.key)


def _print_table(table: TableReference) -> None:
    console.say(table.place)
    for paragraph in table.text.split("\n\n"):
        console.say(_wrapped(paragraph, "    ", "    "))
    for key in table.keys:
        console.say("")
        console.say(key.name)
        _print_key(key)


def _print_key(key: Key) -> None:
    console.say(f"    values: {key.values}; default: {key.default}")
    console.say(_wrapped(key.text, "    ", "    "))


def _wrapped(text: str, first: str, rest: str) -> str:
    width = min(LINE, console.out.width)
    return textwrap.fill(
        " ".join(text.split()), width, initial_indent=first, subsequent_indent=rest,
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip


@command("new")
def new_command(name: str, *, like: str = "cnn", folder: Path | None = None) -> None:
    """Write a config and a module with your own data function and network, to start from.

    NAME.toml is an example's config under this name; NAME.py has the functions that it names.

    Args:
        name: Of the config and the module.
        like: The example to start from; see gossamer examples.
        folder: Where to write both (default: here).
    """
    from ..config.examples import describe, write_project

    config, module = write_project(name, like, Path() if folder is None else folder)
    console.say(f"wrote {config} and {module}; run it: gossamer {describe(config)[0]} {config}")


@command("examples")
def examples_command(name: str | None = None) -> None:
    """List the example configs, or print one of them.

    Commands take example:NAME for the path of an example: gossamer simulate example:karate.

    Args:
        name: The example to print; if left out, all names are listed.
    """
    from ..config.examples import describe, example_path, examples

    if name is not None:
        console.say(example_path(name).read_text("utf-8").rstrip("\n"))
        return
    described = {name: describe(path) for name, path in examples().items()}
    rows = [(f"gossamer {run} example:{name}", text) for name, (run, text) in described.items()]
    console.table("examples", ["command", "what it shows"], rows)
