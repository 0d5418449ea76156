"""Settings in the terminal: their reference (`gossamer explain`), values (`--show-settings`) and examples.

What needs pydantic is imported inside functions, so that help is fast.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import console
from .console import command

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ...peer import BrokerAddress, PeerSpec
    from ..config.reference import Key, TableReference
    from ..config.tables import Config, Experiment
    from ..live.device import JoinPlan

LINE_WIDTH = 96
"""The most characters in a line of text: longer lines are hard to read."""


@command("explain", slow=True)
def explain_command(key: str | None = None) -> None:
    """Explain a key or a table of a config, a comparison or a device's file; or list all of them.

    Args:
        key: A key with or without its table (mode, gossip.mode), a table (gossip, methods.fedprox), or a
            value of a key (dirichlet); if left out, all keys are listed by table, each in one line.
    """
    from ..config.reference import explain, reference

    if not key:
        tables = reference()
        name_width = max(len(key.name) for table in tables for key in table.keys)
        for table in tables:
            console.say(table.place)
            for listed in table.keys:
                console.say(_in_one_line(f"  {listed.name:{name_width}}  ", listed.text))
            console.say("")
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


def _in_one_line(start: str, text: str) -> str:
    """Return the first sentence of a text, cut to the width of a line, after its start."""
    sentence = " ".join(text.split()).partition(". ")[0].rstrip(".")
    width = min(LINE_WIDTH, console.out.width) - len(start)
    return start + textwrap.shorten(sentence, width, placeholder=" …", break_on_hyphens=False)


def _wrapped(text: str, first: str, rest: str) -> str:
    width = min(LINE_WIDTH, console.out.width)
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


# --- the values of --show-settings ------------------------------------------------------------------

Row = tuple[str, str, str]
HEADER = ["setting", "value", "source"]
Option = tuple[Any, Any]
"""An option's value on the command line, None or False if it is not given, and its default."""
HIDDEN_PASSWORD = "(hidden)"
SPEC_FIELDS = ("name", "entry", "samples", "seed", "network")
"""The fields of PeerSpec that are shown besides the peer's settings."""


def show_config(config: Experiment, source: str, **options: Option) -> None:
    """Print the settings of `gossamer simulate` or `compare`."""
    rows = [*_config_rows(config), *_option_rows(options)]
    console.table(f"{source}: settings of the experiment", HEADER, rows)


def show_swarm(
    config: Config, source: str, broker: BrokerAddress, *, starts_broker: bool, out: Option
) -> None:
    """Print the settings of `gossamer swarm`: those of peer 0, with a note on those that differ per peer.

    starts_broker: whether the swarm starts its own broker.
    """
    from ...peer import CredentialSettings
    from ..build import Swarm
    from ..config.tables import Gossip
    from ..live.layout import SwarmLayout

    layout = SwarmLayout(config, source, Swarm(config, source))
    specs = [layout.peer(index) for index in range(config.peers)]
    address = broker.with_defaults(config.gossip)
    settings = specs[0].settings
    from_config = {*address.model_fields_set, *settings.model_fields_set, "samples", "seed", "name"}
    origins = dict.fromkeys(from_config, "config")
    origins |= dict.fromkeys(broker.model_fields_set, "command line")
    placeholders: dict[str, str] = {}
    if starts_broker:
        origins["url"], placeholders["url"] = "default", "(a broker is started)"
    if config.trust.kind == "swarm":
        folder = (out[0] or out[1]) / "trust"
        placeholders |= dict.fromkeys(CredentialSettings.model_fields, f"(created in {folder})")
    # Keys that are also settings of a peer are shown only in the second table, that of peer 0.
    peer_keys = {*type(settings).model_fields, *type(address).model_fields}
    swarm_keys_of_gossip = {*Gossip.__annotations__} - {"exchanges"}
    rows = [
        row
        for row in _config_rows(config)
        if (key := row[0].partition("."))[0] not in peer_keys
        and (key[0] != "gossip" or key[2] in swarm_keys_of_gossip)
    ]
    rows += _option_rows({"out": out})
    console.table(f"{source}: settings of the swarm", HEADER, rows)
    rows_by_peer = [_peer_rows(spec, address, origins, placeholders) for spec in specs]
    rows = [
        (key, text, origin if len({*rows}) == 1 else f"{origin}, differs per peer")
        for rows in zip(*rows_by_peer, strict=True)
        for key, text, origin in rows[:1]
    ]
    console.table("settings of its peer 0", HEADER, rows)


def show_join(plan: JoinPlan, out: Option) -> None:
    """Print the settings of `gossamer join`."""
    rows = _peer_rows(plan.spec, plan.broker, plan.origins, {}) + _option_rows({"out": out})
    if plan.origins["entry"] != "config":  # the arguments of a config's peers are the config
        text = _text(plan.spec.arguments)
        rows.insert(2, ("arguments", text, plan.origins.get("arguments", "default")))
    console.table(f"settings of {plan.spec.name}", HEADER, rows)


def _peer_rows(
    spec: PeerSpec, broker: BrokerAddress, origins: Mapping[str, str], placeholders: dict[str, str]
) -> list[Row]:
    """Return the rows of a peer: its specification, its settings, and those of its broker connection.

    origins: where values come from, by key. placeholders: texts for values that are created at the start.
    """
    from ...gossip import without_passwords
    from ..config.reference import keys_in_order

    values = {key: getattr(spec, key) for key in SPEC_FIELDS}
    values |= {key: getattr(spec.settings, key) for key in keys_in_order(type(spec.settings))}
    values |= {key: getattr(broker, key) for key in ("url", *type(broker).model_fields)}
    values["guards"] = "off" if spec.settings.bounds is None else asdict(spec.settings.bounds)
    values["url"] = without_passwords(broker.url)
    if broker.password is not None:
        values["password"] = HIDDEN_PASSWORD
    texts = {key: _text(value) for key, value in values.items()} | placeholders
    return [(key, text, origins.get(key, "default")) for key, text in texts.items()]


def _config_rows(table: BaseModel, prefix: str = "", in_config: bool = True) -> Iterator[Row]:
    """Yield the rows of a table's keys, and of the tables in it.

    prefix: the path of the table in the config. in_config: whether the config's file contains the table.
    """
    from pydantic import BaseModel

    from ..config.reference import keys_in_order

    for key in keys_in_order(type(table)):
        value, is_set = getattr(table, key), in_config and key in table.model_fields_set
        if isinstance(value, BaseModel):
            yield from _config_rows(value, f"{prefix}{key}.", is_set)
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for index, entry in enumerate(value):
                yield from _config_rows(entry, f"{prefix}{key}.{index}.", is_set)
        else:
            yield f"{prefix}{key}", _text(value), "config" if is_set else "default"


def _option_rows(options: Mapping[str, Option]) -> list[Row]:
    """Return the rows of options that exist only on the command line."""
    return [
        (key, _text(value or default), "command line" if value else "default")
        for key, (value, default) in options.items()
    ]


def _text(value: Any) -> str:
    """Return a value as a config would write it."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case Mapping():
            inside = ", ".join(f"{key} = {_text(item)}" for key, item in value.items())
            return f"{{{inside}}}"
        case str() | Path():
            return str(value)
        case Sequence():
            return f"[{', '.join(map(_text, value))}]"
    return str(value)
