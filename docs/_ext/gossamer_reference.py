"""Generates the reference pages of commands, keys and the Python interface while the site is built.

A line `<!-- generated: keys -->` in a page is replaced by the text of the generator of that name.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer.main
from pydantic import BaseModel

from gossamer.experiments.cli.app import app as command_line
from gossamer.experiments.config.reference import FILE_TITLES, Key, TableReference, reference
from gossamer.experiments.data import descriptions

if TYPE_CHECKING:
    from sphinx.application import Sphinx

LONGEST_LINE = 90
ROOT = Path(__file__).parents[2]
SECURITY = re.compile(r"\]\((?:\.\./)+SECURITY\.md")
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
COMMANDS_FOR = {
    "config": "`gossamer simulate`, `sweep` and `swarm`",
    "comparison": "`gossamer compare`",
    "device": "`gossamer join --config`",
}
PACKAGES = {
    "gossamer.experiments": "experiments",
    "gossamer.experiments.arena": "experiments/arena",
    "gossamer.experiments.data": "experiments/data",
    "gossamer.experiments.federated": "experiments/federated",
    "gossamer.models": "models",
    "gossamer.topology": "topology",
    "gossamer.peer": "peer",
    "gossamer.gossip": "gossip",
}
"""The packages that the page of the Python interface shows, and their folders."""


# --- keys ---------------------------------------------------------------------------------------------


def keys() -> str:
    """Return the reference of all keys of all files as Markdown."""
    parts = []
    for file, title in FILE_TITLES.items():
        parts.append(f"## {title[0].upper()}{title[1:]}\n\nRead by {COMMANDS_FOR[file]}.")
        parts += [_table(table) for table in reference() if table.file == file]
    return "\n\n".join(parts)


def _table(table: TableReference) -> str:
    heading = "Top level" if not table.path else f"`{table.heading}`"
    anchor = f"({table.file}-{table.path.lower().replace('.', '-') or 'top'})="
    return "\n\n".join([f"{anchor}\n### {heading}", table.text, *map(_key, table.keys)])


def _key(key: Key) -> str:
    text = key.text.replace("\n", "\n: ")
    in_words = key.default in ("required", "none (optional)")
    default = key.default if in_words else f"`{key.default}`"
    if key.default == "the defaults below":
        default = "its defaults"
    return (
        f"`{key.name}`\n: *{key.values}; default: {default}*\n\n  {' '.join(text.split())}".replace(
            " : ", " "
        )
    )


# --- commands -----------------------------------------------------------------------------------------


def commands() -> str:
    """Return the reference of all commands as Markdown."""
    group = typer.main.get_command(command_line)
    return "\n\n".join(_commands(group, "gossamer"))


def _commands(command: Any, name: str) -> Iterator[str]:
    usage = _usage(command, name)
    pieces = [f"## {name}", _unescaped(command.help), f"```text\n{usage}\n```"]
    rows = [_parameter(parameter) for parameter in command.params if not _is_help(parameter)]
    if rows:
        pieces += rows
    yield "\n\n".join(pieces)
    for inner, each in getattr(command, "commands", {}).items():
        yield from _commands(each, f"{name} {inner}")


def _usage(command: Any, name: str) -> str:
    arguments = [
        str(each.name).upper() if each.required else f"[{str(each.name).upper()}]"
        for each in command.params
        if each.param_type_name == "argument"
    ]
    options = ["[OPTIONS]"] if any(each.opts[0].startswith("--") for each in command.params) else []
    inner = ["COMMAND …"] if getattr(command, "commands", {}) else []
    return " ".join([name, *options, *arguments, *inner])


def _is_help(parameter: Any) -> bool:
    return "--help" in parameter.opts


def _unescaped(text: str | None) -> str:
    """Return a text of the command line without the escapes of rich's markup."""
    return (text or "").replace("\\[", "[")


def _parameter(parameter: Any) -> str:
    text = _unescaped(parameter.help).replace("<", "\\<")
    if parameter.param_type_name == "argument":
        name = str(parameter.name).upper()
    else:
        name = ", ".join([*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    shown = default is not None and not callable(default) and default not in (False, (), [])
    return f"`{name}`\n: {text or 'See above.'}{f' Default: `{default}`.' if shown else ''}"


# --- data sets ----------------------------------------------------------------------------------------


def datasets() -> str:
    """Return a table of the data sets that have a name, as Markdown."""
    rows = [f"| `{name}` | {text} | {folder} |" for name, (text, folder) in descriptions().items()]
    return "\n".join(["| name | what it is | folder |", "| --- | --- | --- |", *rows])


# --- the Python interface -----------------------------------------------------------------------------


def python() -> str:
    """Return the classes and functions that each package exports, as Markdown.

    Docstrings here are plain text with `code` and *emphasis*, which autodoc would read as reStructuredText.
    """
    seen: set[int] = set()
    return "\n\n".join(_package(name, ROOT / folder, seen) for name, folder in PACKAGES.items())


def _package(name: str, folder: Path, seen: set[int]) -> str:
    module = import_module(name)
    stub_file = folder / "__init__.pyi"
    source = stub_file if stub_file.exists() else folder / "__init__.py"
    stub = ast.parse(source.read_text("utf-8"))
    exported = [
        getattr(module, alias.asname or alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not (node.level == 0 or alias.name == "annotations")
    ]
    pieces = [f"## {name}", _markdown(module.__doc__)]
    for value in exported:  # constants and type aliases are described where they are used
        if inspect.ismodule(value):
            for one in vars(value).values():
                if (
                    inspect.isfunction(one)
                    and one.__module__ == value.__name__
                    and one.__name__[0] != "_"
                ):
                    prefix = value.__name__.rpartition(".")[2]
                    pieces += _function(one, "###", f"{prefix}.{one.__name__}")
        elif id(value) in seen or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        else:
            seen.add(id(value))
            pieces += _class(value) if inspect.isclass(value) else _function(value, "###")
    return "\n\n".join(pieces)


def _function(function: Any, heading: str, name: str | None = None) -> list[str]:
    name = name or function.__name__
    return [f"{heading} {name}", _signature(name, function), _markdown(function.__doc__)]


def _class(value: type) -> list[str]:
    own_doc = (
        value.__doc__
        if value.__doc__ and not value.__doc__.startswith(f"{value.__name__}(")
        else ""
    )
    pieces = [f"### {value.__name__}", _signature(value.__name__, value), _markdown(own_doc)]
    if fields := _attributes(value):
        pieces.append("\n".join(f"- `{name}`: {_one_line(text)}" for name, text in fields.items()))
    for name, member in vars(value).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property | cached_property):
            text = member.__doc__ if isinstance(member, cached_property) else member.fget.__doc__
            pieces.append(f"`{name}`\n: {_one_line(text)}")
        elif isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
            function = getattr(value, name)
            pieces.append(f"{_signature(name, function)}\n\n{_markdown(function.__doc__)}")
    return pieces


def _attributes(value: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, with those of its base classes."""
    texts: dict[str, str] = {}
    for base in reversed(value.__mro__):
        if not base.__module__.startswith("gossamer"):
            continue
        try:
            body = ast.parse(dedent(inspect.getsource(base))).body[0]
        except (OSError, SyntaxError, IndentationError):
            continue
        statements = getattr(body, "body", [])
        for field, text in pairwise(statements):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str())
                ):
                    if not name.startswith("_"):
                        texts[name] = text.value.value
    return texts


def _signature(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    hint = signature.return_annotation
    if inspect.isclass(value) and issubclass(value, BaseModel):
        signature, hint = _fields(value), inspect.Signature.empty
    parameters = [*_parameters(signature)]
    returned = "" if hint in (inspect.Signature.empty, None, "None") else f" -> {_hint(hint)}"
    text = f"{name}({', '.join(parameters)}){returned}"
    if len(text) > LONGEST_LINE:
        text = f"{name}(\n    {f',{chr(10)}    '.join(parameters)},\n){returned}"
    return f"```text\n{text}\n```"


def _fields(model: type[BaseModel]) -> inspect.Signature:
    """Return the keyword arguments of a pydantic model: pydantic's own signature shows how it checks them."""
    model.model_rebuild()
    return inspect.Signature(
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=field.annotation,
            default=inspect.Parameter.empty
            if field.is_required()
            else field.get_default(call_default_factory=True),
        )
        for name, field in model.model_fields.items()
    )


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    keyword_only = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            yield "*"
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        keyword_only = keyword_only or stars == "*"
        hint, default = parameter.annotation, parameter.default
        text = stars + parameter.name
        text += "" if hint is parameter.empty else f": {_hint(hint)}"
        equals = "=" if hint is parameter.empty else " = "
        yield text + ("" if default is parameter.empty else f"{equals}{_default(default)}")


def _hint(hint: Any) -> str:
    """Return a type hint as one writes it: without what pydantic checks, and without package names."""
    origin, inner = get_origin(hint), [*get_args(hint)]
    if isinstance(hint, str):
        return hint.strip("'\"").replace("gossamer.", "")
    if isinstance(hint, list):  # the arguments of a Callable
        return f"[{', '.join(map(_hint, hint))}]"
    if hint is None or hint is type(None):
        return "None"
    if hint is Ellipsis:
        return "..."
    if origin is Annotated:
        return _hint(inner[0])
    if origin in (Union, UnionType):
        return " | ".join(map(_hint, inner))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inner))}]"
    name = getattr(origin or hint, "__name__", str(hint))
    return f"{name}[{', '.join(map(_hint, inner))}]" if inner else name


def _default(value: Any) -> str:
    """Return a default as text, without addresses in memory."""
    if inspect.isfunction(value):
        return "…" if value.__name__ == "<lambda>" else value.__name__
    if isinstance(value, BaseModel):
        return f"{type(value).__name__}()"
    text = repr(value).replace("gossamer.", "")
    return "…" if re.search(r"<factory>|<.* at 0x\w+>", text) else text


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("<", "\\<")


def _markdown(text: str | None) -> str:
    """Return a docstring as Markdown: parameters become a list, indented paragraphs code."""
    return "\n\n".join(_paragraph(each) for each in cleandoc(text or "").split("\n\n"))


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if lines[0].startswith("    "):
        return f"```text\n{dedent(text)}\n```"
    entry = re.compile(r"([\w*]+(?:, [\w*]+)*)(?:: (.*))?$")
    is_list = any(line.startswith("    ") for line in lines[1:]) or all(map(entry.match, lines))
    if not (is_list and entry.match(lines[0])):
        return text.replace("<", "\\<")
    items: list[list[str]] = []
    for line in lines:
        match = None if line.startswith(" ") else entry.match(line)
        if match is not None:
            items.append([f"- `{match[1]}`:", match[2] or ""])
        else:
            items[-1].append(line.strip())
    return "\n".join(" ".join(filter(None, item)).replace("<", "\\<") for item in items)


# --- Sphinx -------------------------------------------------------------------------------------------

GENERATORS: dict[str, Callable[[], str]] = {
    "keys": keys, "commands": commands, "datasets": datasets, "python": python,
}  # fmt: skip


def _fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the marks of a page by generated text, and links to SECURITY.md by its page of the site."""
    source[0] = SECURITY.sub("](/explanation/security.md", source[0])
    source[0] = MARK.sub(lambda mark: GENERATORS[mark[1]](), source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True}
