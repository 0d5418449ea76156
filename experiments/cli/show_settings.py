"""What `--show-settings` prints: every resolved value, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from . import console

if TYPE_CHECKING:
    from ...peer import BrokerAddress, PeerSpec
    from ..config.tables import Config, Experiment
    from ..live.layout import JoinPlan

Row = tuple[str, str, str]
HEADER = ["setting", "value", "source"]
Option = tuple[Any, Any]
"""What the command line says of an option, if anything, and what holds without it."""
SECRET = "(hidden)"
"""Shown for a password."""
OF_SPEC = ("name", "entry", "samples", "seed", "network")
"""What a peer has apart from settings; its arguments are those of the config, or the device's own."""


def show_config(config: Experiment, source: str, **options: Option) -> None:
    """Print the settings of `gossamer simulate` or `compare`."""
    rows = [*_config_rows(config), *_option_rows(options)]
    console.table(f"{source}: settings of the experiment", HEADER, rows)


def show_swarm(
    config: Config, source: str, broker: BrokerAddress, *, starts_one: bool, out: Option
) -> None:
    """Print the settings of `gossamer swarm`: those of peer 0, and which differ among the peers.

    starts_one: whether the swarm starts a broker of its own.
    """
    from ...peer import CredentialSettings
    from ..build import Swarm
    from ..config.tables import Gossip
    from ..live.layout import SwarmLayout

    layout = SwarmLayout(config, source, Swarm(config, source))
    specs = [layout.peer(index) for index in range(config.peers)]
    address = broker.with_defaults(config.gossip)
    settings = specs[0].settings
    stated = {*address.model_fields_set, *settings.model_fields_set, "samples", "seed", "name"}
    origins = dict.fromkeys(stated, "config")
    origins |= dict.fromkeys(broker.model_fields_set, "command line")
    made: dict[str, str] = {}
    if starts_one:
        origins["url"], made["url"] = "default", "(a broker is started)"
    if config.trust.kind == "swarm":
        folder = (out[0] or out[1]) / "trust"
        made |= dict.fromkeys(CredentialSettings.model_fields, f"(made in {folder})")
    shared = {*type(settings).model_fields, *type(address).model_fields}
    own = {*Gossip.__annotations__} - {"exchanges"}  # the others are shown as the peers' settings
    rows = [
        row
        for row in _config_rows(config)
        if (table := row[0].partition("."))[0] not in shared
        and (table[0] != "gossip" or table[2] in own)
    ]
    rows += _option_rows({"out": out})
    console.table(f"{source}: settings of the swarm", HEADER, rows)
    everybody = [_peer_rows(spec, address, origins, made) for spec in specs]
    rows = [
        (key, text, origin if len({*rows}) == 1 else f"{origin}, differs per peer")
        for rows in zip(*everybody, strict=True)
        for key, text, origin in rows[:1]
    ]
    console.table("settings of its peer 0", HEADER, rows)


def show_join(plan: JoinPlan, out: Option) -> None:
    """Print the settings of `gossamer join`."""
    rows = _peer_rows(plan.spec, plan.broker, plan.origins, {}) + _option_rows({"out": out})
    console.table(f"settings of {plan.spec.name}", HEADER, rows)


def _peer_rows(
    spec: PeerSpec, broker: BrokerAddress, origins: Mapping[str, str], made: dict[str, str]
) -> list[Row]:
    """A peer's rows: what it is, how it behaves, how it reaches its broker."""
    from ...gossip import Address

    values = {key: getattr(spec, key) for key in OF_SPEC}
    values |= {key: getattr(spec.settings, key) for key in _in_order(type(spec.settings))}
    values |= {key: getattr(broker, key) for key in ("url", *type(broker).model_fields)}
    values["url"] = Address.parse(broker.url)  # which does not print its password
    if broker.password is not None:
        values["password"] = SECRET
    shown = {key: _text(value) for key, value in values.items()} | made
    return [(key, text, origins.get(key, "default")) for key, text in shown.items()]


def _in_order(table: type[BaseModel]) -> Iterator[str]:
    """A table's keys, those of its own first and then base by base; pydantic lists the last base first."""
    seen: set[str] = set()
    for base in table.__mro__:
        if issubclass(base, BaseModel):
            for key in base.__annotations__:
                if key in table.model_fields and key not in seen:
                    seen.add(key)
                    yield key


def _config_rows(table: BaseModel, above: str = "", stated: bool = True) -> Iterator[Row]:
    """The rows of a config's keys, tables within tables."""
    for key in _in_order(type(table)):
        value, here = getattr(table, key), stated and key in table.model_fields_set
        if isinstance(value, BaseModel):
            yield from _config_rows(value, f"{above}{key}.", here)
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for place, each in enumerate(value):
                yield from _config_rows(each, f"{above}{key}.{place}.", here)
        else:
            yield f"{above}{key}", _text(value), "config" if here else "default"


def _option_rows(options: Mapping[str, Option]) -> list[Row]:
    """The rows of what only the command line says."""
    return [
        (key, _text(given or default), "command line" if given else "default")
        for key, (given, default) in options.items()
    ]


def _text(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case Mapping():
            inside = ", ".join(f"{key} = {_text(each)}" for key, each in value.items())
            return f"{{{inside}}}"
        case str() | Path():
            return str(value)
        case Sequence():
            return f"[{', '.join(map(_text, value))}]"
    return str(value)
