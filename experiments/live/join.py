"""The file that an edge device joins with: what to train, how to behave, and whose settings count.

A setting is, in this order: what the command line states, what the device's file states, what the swarm
config says of the peer at `index`, the default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ...gossip import Count, GossipSettings, LinkSettings
from ...gossip.security import Identity, TrustError
from ...peer import (
    BrokerAddress,
    CredentialSettings,
    LifeSettings,
    MatchingSettings,
    PeerSpec,
    PlaceSettings,
    ScheduleSettings,
    Settings,
)
from ...peer import label as label_of
from ..build import Swarm
from ..cli import console
from ..cli.options import broker_password, with_user
from ..config.reading import read_table
from ..config.tables import (
    Config,
    ConfigError,
    PeerTrust,
    PeerTrustTable,
    first_mistake,
    load_config,
    without_networks,
)
from .layout import SwarmLayout

AGREED = ("mode", "weights", "dtype", "trust", "private")
"""Settings on which the peers of a swarm must agree: a device's file cannot overrule the config's."""
OTHERS_NAMES = ("expect", "neighbours", "sources", "turns", "servers")
"""Settings that name other peers."""


class JoinConfig(
    ScheduleSettings, GossipSettings, LifeSettings, PlaceSettings, MatchingSettings, LinkSettings
):
    """A device's file. Give either an entry point of your own, or a swarm config and an index in it.

    The settings are those of any peer: see peer/tables.py, gossip/settings.py and gossip/mqtt_options.py.
    With `config`, those that are not stated here are the config's.
    """

    name: str | None = None
    """The peer's name, unique in the swarm. If left out, the label of its key, or its name in `config`."""
    entry: str | None = None
    """`module:function`; the function is called with `arguments` and returns a Learner."""
    arguments: dict[str, Any] = {}
    """What the entry point is called with."""
    config: str | None = None
    """A swarm config, beside this file, whose data, network and settings to use, and …"""
    index: Annotated[int, Field(ge=0)] | None = None
    """… which of its peers to be, counted from 0."""
    samples: Count | None = None
    """How much the peer counts with weights = "samples". If left out, as many as it has in `config`, or 1."""
    seed: int | None = None
    """Of its random choices. If left out, the peer's index in `config`, or a number made from its name."""
    network: str | None = None
    """A network that was trained before (safetensors), beside this file: what it knows counts with the
    peer's weight, once `matching` has brought its cells into the others' order."""
    password_file: str | None = None
    """A file beside this one whose first line is the password of the user that the broker's URL names; if
    it names none, of the peer's own name (`label@id` with trust). A password in the URL would show in the
    list of processes."""
    trust: PeerTrustTable = PeerTrust()
    """`[trust]`: the peer's key and invitation; without it, whoever reaches the broker is believed."""


@dataclass(frozen=True)
class JoinPlan:
    """A device that is about to join.

    origins: where values come from that are not defaults, by the names of fields of Settings, PeerSpec and
        BrokerAddress: "config", "device file", "command line" or "environment".
    """

    spec: PeerSpec
    broker: BrokerAddress
    origins: Mapping[str, str]


def read_join(path: Path) -> JoinConfig:
    """Read a device's file."""
    try:
        return JoinConfig.model_validate(read_table(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_mistake(error, JoinConfig)}") from None


def load_join(
    path: Path,
    broker: BrokerAddress,
    *,
    name: str | None = None,
    network: Path | None = None,
    password_file: Path | None = None,
    **options: Any,
) -> JoinPlan:
    """Read a device's file into what its process needs.

    All other arguments are what the command line says, and go before the file; options are values of
    Settings, None if not given. ConfigError names the file and key of what cannot be.
    """
    join = read_join(path)
    if (join.entry is None) == (join.config is None):
        raise ConfigError(f"{path}: give either 'entry' or 'config' (with 'index')")
    if unused := (join.model_fields_set & {"index" if join.entry else "arguments"}):
        given = "config" if join.entry else "entry"
        raise ConfigError(
            f"{path}: key {unused.pop()!r}: is for a device with {given!r}; leave it out"
        )
    command = {key: value for key, value in options.items() if value is not None}
    device = _stated(join, path.parent)
    for layer in (device, command):
        if "identity" in layer and "trust" not in device:
            layer["trust"] = "swarm"
    origins: dict[str, str] = {}
    own = _own_spec(join, path, name, network, origins)
    identity = _identity((device | command).get("identity"))
    label = own.pop("name", None) or (identity and identity.label)
    config = None
    if join.config is None:
        if label is None:
            raise ConfigError(f"{path}: key 'name': a peer needs a name; add it, or use --name")
        spec = PeerSpec(label, str(join.entry), join.arguments, Settings(), seed=seed_of(label))
        origins["entry"] = "device file"
    else:
        found = path.parent / join.config
        config = load_config(found)
        spec = _spec_of(config, found, join, path, (identity and identity.name) or label)
        if label not in (None, spec.name) and identity is None:
            console.err.print(
                f"{path}: key 'name': the other peers of {found} know peer {join.index} as {spec.name!r}: "
                f"unless their files name {label!r}, leave it out",
                soft_wrap=True,
                markup=False,
            )
        if label is not None:
            spec = replace(spec, name=label)
        _check_agreement(spec.settings, device | command, path, found)
        _check_trust(spec, device | command, path, found)
        origins = dict.fromkeys(("entry", "samples", "seed"), "config") | origins
    stated = device | command
    if "network" in own:
        stated["trained"], origins["trained"] = True, origins["network"]
    base = _without_founder(spec, stated)
    spec = replace(spec, settings=base.updated(**stated), **own)
    origins = dict.fromkeys(base.model_fields_set, "config") | origins
    origins |= dict.fromkeys(device, "device file") | dict.fromkeys(command, "command line")
    user = identity.name if identity else spec.name
    return JoinPlan(
        spec, _broker(broker, join, config, path, password_file, user, origins), origins
    )


def seed_of(name: str) -> int:
    """Return a seed for a peer that has no other: the same for the same name, on any machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _stated(join: JoinConfig, folder: Path) -> dict[str, Any]:
    """The settings that a device's file states."""
    keys = join.model_fields_set & Settings.model_fields.keys() - {"trust"}
    values = {key: getattr(join, key) for key in keys}
    for key in join.trust.model_fields_set:
        value = getattr(join.trust, key)
        if key in ("identity", "invitation") and value is not None:
            value = str(folder / value)
        values["trust" if key == "kind" else key] = value
    return values


def _own_spec(
    join: JoinConfig, path: Path, name: str | None, network: Path | None, origins: dict[str, str]
) -> dict[str, Any]:
    """What the command line and the file state of the peer apart from settings."""
    command = {"name": name, "network": None if network is None else str(network)}
    file = None if join.network is None else str(path.parent / join.network)
    device = {"name": join.name, "samples": join.samples, "seed": join.seed, "network": file}
    own: dict[str, Any] = {}
    for source, values in (("device file", device), ("command line", command)):
        given = {key: value for key, value in values.items() if value is not None}
        own |= given
        origins |= dict.fromkeys(given, source)
    return own


def _spec_of(
    config: Config, found: Path, join: JoinConfig, path: Path, name: str | None
) -> PeerSpec:
    """What `gossamer swarm` would give the peer at the device's index, under the device's name."""
    if join.index is None or join.index >= config.peers:
        raise ConfigError(
            f"{path}: key 'index': say which peer of {found} this device is, 0 to {config.peers - 1}"
        )
    if join.matching:
        raise ConfigError(f"{path}: key 'matching': {found} says how cells are matched")
    layout = SwarmLayout(config, str(found), Swarm(without_networks(config), str(found)))
    names = list(layout.labels)
    names[join.index] = name or names[join.index]
    return layout.peer(join.index, names)


def _check_agreement(said: Settings, own: Mapping[str, Any], path: Path, found: Path) -> None:
    """Raise if a device contradicts the config where all peers must agree."""
    for key in AGREED:
        if key in own and own[key] != getattr(said, key):
            place = {"trust": "trust.kind", "private": "trust.private"}.get(key, key)
            raise ConfigError(
                f"{path}: key {place!r}: is {own[key]!r} for this device, but {getattr(said, key)!r} in "
                f"{found}, and the peers of a swarm must agree: leave it out, or change it there"
            )


def _check_trust(spec: PeerSpec, own: Mapping[str, Any], path: Path, found: Path) -> None:
    """Raise if a device lacks what it must know in a swarm with trust."""
    if spec.settings.trust != "swarm":
        return
    if missing := [key for key in CredentialSettings.model_fields if key not in own]:
        raise ConfigError(
            f"{path}: key 'trust.{missing[0]}': {found} has trust = \"swarm\", which needs the device's "
            f"{', '.join(missing)}: give them in [trust], or as --{' and --'.join(missing)}"
        )
    for key in OTHERS_NAMES:
        if key in spec.settings.model_fields_set and key not in own:
            raise ConfigError(
                f"{path}: key {key!r}: {found} has trust, so other peers' names end in the ids of their keys "
                f"(label@id), which {found.name} does not know: write {key} with these names"
                + (", or expect = [] to wait for nobody" if key == "expect" else "")
            )


def _without_founder(spec: PeerSpec, stated: Mapping[str, Any]) -> Settings:
    """The config's settings. That a peer founds the swarm holds if it starts with all others, as they do."""
    said = spec.settings
    waits_for = {label_of(name) for name in stated.get("expect", said.expect)}
    together = waits_for >= {label_of(name) for name in said.expect} - {label_of(spec.name)}
    if together and "trained" not in stated:
        return said
    keys = said.model_fields_set - {"founder"}
    return Settings(**{key: getattr(said, key) for key in keys})


def _broker(
    broker: BrokerAddress,
    join: JoinConfig,
    config: Config | None,
    path: Path,
    password_file: Path | None,
    user: str,
    origins: dict[str, str],
) -> BrokerAddress:
    """The broker's address, with what the file and the config say of the link; notes the origins.

    user: whose password a password file holds if the broker's URL does not say.
    """
    origins |= dict.fromkeys(broker.model_fields_set, "command line")
    where = "command line" if password_file else "environment"
    if password_file is None and join.password_file is not None:
        password_file, where = path.parent / join.password_file, "device file"
    if password_file is not None:
        broker = broker.updated(url=with_user(broker.url, user))
    password = broker_password(broker.url, password_file)
    if password is not None:
        broker, origins["password"] = broker.updated(password=password), where
    layers: list[tuple[str, LinkSettings]] = [("device file", join)]
    if config is not None:
        layers.append(("config", config.gossip))
    for source, link in layers:
        known = broker.model_fields_set
        broker = broker.with_defaults(link)
        origins |= dict.fromkeys(broker.model_fields_set - known, source)
    return broker


def _identity(file: str | None) -> Identity | None:
    """The key that a peer proves itself with."""
    if file is None:
        return None
    try:
        return Identity.load(Path(file))
    except TrustError as error:
        raise ConfigError(str(error)) from None
