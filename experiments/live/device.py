"""Reads and changes the file of a single device that joins a swarm, and computes the device's settings.

Each is looked up in this order: the command line, what an enrolment fixes (broker, swarm, key, invitation,
password), the device's file, the swarm config's settings of the peer at `index` or else the settings that the
enrolment suggests, the default.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from gossamer.entry import split_entry
from gossamer.files import write_atomically

from ...gossip import Count, LinkSettings, with_user
from ...gossip.security import Identity
from ...peer import BrokerAddress, CredentialSettings, DeviceSettings, PeerSpec, Settings
from ...peer import label as label_of
from ..cli import console
from ..cli.live import broker_password
from ..config.tables import (
    Config,
    ConfigError,
    PeerTrust,
    PeerTrustTable,
    load_config,
    parse_table,
    read_table,
    without_networks,
)
from .enrolment import Enrolment

COMMON_SETTINGS = ("mode", "weights", "dtype", "trust", "private")
"""Settings that must be the same on all peers of a swarm: a device's file cannot override the config."""
SPEC_FIELDS = ("name", "samples", "seed", "network")
"""Keys of a device's file that set fields of PeerSpec, not of Settings."""
SETTINGS_WITH_PEER_NAMES = ("expect", "neighbours", "sources", "turns", "servers")
"""Settings whose values contain the names of other peers."""

_BANNED_LINE = re.compile(r"^banned\s*=\s*\[[^\]]*\][^\n]*\n?", re.MULTILINE)


class JoinConfig(DeviceSettings, LinkSettings):
    """The keys of a device's file. Give either your own entry point, or a swarm config and an index in it.

    With `config`, settings that the file leaves out are taken from the config.
    """

    RENAMED: ClassVar = {
        "gossip": "the keys of a config's [gossip] stand at the top of a device's file, before any table"
    }

    name: str | None = None
    """The peer's name, unique in the swarm. If left out, the label of its key, or its name in `config`."""
    entry: str | None = None
    """`module:function`; the function is called with `arguments` and returns a Learner."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the entry point."""
    config: str | None = None
    """A swarm config whose data, network and settings this device uses; a path relative to this file."""
    index: Annotated[int, Field(ge=0)] | None = None
    """Which peer of `config` this device is, counted from 0."""
    samples: Count | None = None
    """The peer's weight in the average with weights = "samples". If left out, the number of training samples
    that it has in `config`, or 1 without `config`."""
    seed: int | None = None
    """The seed of the peer's random choices. If left out, the peer's index in `config`; without `config`, a
    number computed from its name."""
    network: str | None = None
    """A file (safetensors) of a network that was trained before, a path relative to this file: its values
    enter the average, with the peer's weight, after its cells were matched (see `matching`)."""
    password_file: str | None = None
    """A file whose first line is the broker password, a path relative to this file. The user is the one in
    the broker's URL, or else the peer's name (`label@id` with trust). A password in the URL would be visible
    in the list of processes."""
    trust: PeerTrustTable = PeerTrust()
    """`[trust]`: the peer's key and invitation; without it, peers are not authenticated."""


@dataclass(frozen=True)
class JoinPlan:
    """All that the process of a joining device needs.

    origins: the source of every value that is not a default: "enrolment", "config", "device file", "command
        line" or "environment". Keys are names of fields of Settings, PeerSpec and BrokerAddress.
    """

    spec: PeerSpec
    broker: BrokerAddress
    origins: Mapping[str, str]


def read_join(path: Path) -> JoinConfig:
    """Read a device's file."""
    table = read_table(path)
    if "peers" in table:
        raise ConfigError(
            f"{path}: has 'peers', so it is the config of a swarm; a device has a file of its own, with "
            f'config = "{path.name}" and the index of its peer, index = 0'
        )
    return parse_table(JoinConfig, table, str(path))


def change_bans(path: Path, name: str, *, lift: bool = False) -> list[str]:
    """Add a peer to `banned` in a device's file, or remove it; return the new list.

    Raises ConfigError if the file is no device's file, and if the list would stay as it is.
    """
    banned = list(read_join(path).banned)
    if lift and name not in banned:
        raise ConfigError(
            f"{path}: {name} is not banned; banned are: {', '.join(banned) or 'none'}"
        )
    if not lift and name in banned:
        raise ConfigError(f"{path}: {name} is banned already")
    banned = [each for each in banned if each != name] if lift else [*banned, name]
    text = path.read_text("utf-8")
    line = f"banned = {json.dumps(banned)}\n"  # also a list of TOML
    # A key of the file itself must come before the first table.
    changed = _BANNED_LINE.sub(line, text, count=1) if _BANNED_LINE.search(text) else line + text
    try:
        is_changed = tomllib.loads(changed).get("banned") == banned
    except tomllib.TOMLDecodeError:  # the key is written in a form that is not found
        is_changed = False
    if not is_changed:
        raise ConfigError(
            f"{path}: its key 'banned' cannot be changed; write it by hand: {line.strip()}"
        )
    write_atomically(path, changed.encode())
    return banned


def load_join(
    path: Path,
    broker: BrokerAddress,
    *,
    entry: str | None = None,
    enrolment: Enrolment | None = None,
    folder: Path | None = None,
    name: str | None = None,
    network: Path | None = None,
    password_file: Path | None = None,
    **options: Any,
) -> JoinPlan:
    """Read a device's file and return all that the device's process needs; writes nothing.

    path: of the device's file; with `entry`, of the enrolment.
    entry: module:function of the learner, which replaces a device's file.
    enrolment: the device's, which will be unpacked in `folder`; `broker` is the address in it.

    All other arguments come from the command line and override the file; raises ConfigError naming the file
    and key that is invalid. options: values of fields of Settings, None if not given.
    """
    join = (
        read_join(path) if entry is None else parse_table(JoinConfig, {"entry": entry}, str(path))
    )
    suggested = JoinConfig()
    if enrolment is not None and join.config is None:  # the config of a swarm has all settings
        suggested = parse_table(JoinConfig, enrolment.settings, f"enrolment of {enrolment.label}")
    if (join.entry is None) == (join.config is None):
        raise ConfigError(f"{path}: give either 'entry' or 'config' (with 'index')")
    if unused := (join.model_fields_set & {"index" if join.entry else "arguments"}):
        other = "config" if join.entry else "entry"
        raise ConfigError(f"{path}: key {unused.pop()!r} is only used with {other!r}; remove it")
    if join.entry is not None:
        split_entry(join.entry)  # checks only the form: importing its module may take seconds
    device_file = _device_values(join, path.parent)
    enrolled = {} if enrolment is None else _enrolled_values(enrolment, folder or Path())
    options |= {"name": name, "network": network and str(network)}
    command_line = {key: value for key, value in options.items() if value is not None}
    for values in (device_file, enrolled, command_line):
        # A key (identity) is only used with trust: giving one switches trust on.
        if "identity" in values and "trust" not in device_file:
            values["trust"] = "swarm"
    sources = {
        "suggested": _device_values(suggested, path.parent),
        "device file": device_file, "enrolment": enrolled, "command line": command_line,
    }  # fmt: skip
    overrides: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, values in sources.items():
        overrides |= values
        origins |= dict.fromkeys(values, "enrolment" if source == "suggested" else source)
    spec_fields = {key: overrides.pop(key) for key in SPEC_FIELDS if key in overrides}
    identity = None
    if enrolment is not None:
        identity = enrolment.key()
    elif overrides.get("identity"):
        identity = Identity.load(Path(overrides["identity"]))
    label = spec_fields.pop("name", None)
    if label is None and identity is not None:
        label, origins["name"] = identity.label, origins["identity"]
    config = None
    if join.config is None:
        if label is None:
            raise ConfigError(f"{path}: key 'name': a peer needs a name; add it, or use --name")
        spec = PeerSpec(label, str(join.entry), join.arguments, Settings(), seed=seed_of(label))
        origins["entry"] = "device file" if entry is None else "command line"
        if "arguments" in join.model_fields_set:
            origins["arguments"] = "device file"
    else:
        config_path = path.parent / join.config
        config = load_config(config_path)
        spec = _spec_of(config, config_path, join, path, (identity and identity.name) or label)
        if label not in (None, spec.name) and identity is None:
            console.warn(
                f"{path}: key 'name': peer {join.index} of {config_path} is named {spec.name!r} in the other "
                f"peers' settings: leave the key out, or name {label!r} in the files of those peers"
            )
        spec = replace(spec, name=label or spec.name)
        _check_agreement(spec.settings, overrides, path, config_path)
        _check_trust(spec, overrides, path, config_path)
        origins = dict.fromkeys(("name", "entry", "samples", "seed"), "config") | origins
    if "network" in spec_fields:
        overrides["trained"], origins["trained"] = True, origins["network"]
    base = _drop_founder_if_late(spec, overrides)
    spec = replace(spec, settings=base.updated(**overrides), **spec_fields)
    origins = dict.fromkeys(base.model_fields_set, "config") | origins
    user = identity.name if identity else spec.name
    origins |= dict.fromkeys(broker.model_fields_set, "command line")
    if enrolment is None:
        address = _with_password(broker, join, path, password_file, user, origins)
    else:
        address = broker.updated(url=with_user(broker.url, user), password=enrolment.password)
        origins |= dict.fromkeys(("url", "ca", "password"), "enrolment")
    links = {"device file": join, "config": config and config.gossip, "enrolment": suggested}
    for source, link_settings in links.items():
        if link_settings is not None:
            already_set = address.model_fields_set
            address = address.with_defaults(link_settings)
            origins |= dict.fromkeys(address.model_fields_set - already_set, source)
    return JoinPlan(spec, address, origins)


def seed_of(name: str) -> int:
    """Return the default seed of a peer: a hash of its name, the same on any machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _device_values(join: JoinConfig, folder: Path) -> dict[str, Any]:
    """Return the values that a device's file sets for fields of Settings and PeerSpec.

    folder: that of the file, to which its paths are relative.
    """
    keys = join.model_fields_set & {*Settings.model_fields, *SPEC_FIELDS} - {"trust"}
    values = {key: getattr(join, key) for key in keys}
    for key in join.trust.model_fields_set:
        values["trust" if key == "kind" else key] = getattr(join.trust, key)
    for key in ("identity", "invitation", "network", "samples_folder"):
        if values.get(key) is not None:
            values[key] = str(folder / values[key])
    return values


def _enrolled_values(enrolment: Enrolment, folder: Path) -> dict[str, Any]:
    """Return the values that an enrolment fixes for fields of Settings, with the paths of its files."""
    paths = {key: str(path) for key, path in enrolment.paths(folder).items() if key != "ca"}
    return {"swarm": enrolment.swarm, "owner": enrolment.owner, **paths}


def _spec_of(
    config: Config, config_path: Path, join: JoinConfig, path: Path, name: str | None
) -> PeerSpec:
    """Return the specification that `gossamer swarm` would compute for the peer at the device's index.

    name: replaces the peer's name in it; None keeps the config's.
    """
    if join.index is None or join.index >= config.peers:
        raise ConfigError(
            f"{path}: key 'index': say which peer of {config_path} this device is, 0 to "
            f"{config.peers - 1}"
        )
    if join.matching:
        raise ConfigError(
            f"{path}: key 'matching': cannot be set here, because {config_path} defines how cells are "
            "matched; remove it"
        )
    # Slow to import, and devices with their own entry point do not need it.
    from ..build import Swarm
    from .layout import SwarmLayout

    source = str(config_path)
    layout = SwarmLayout(config, source, Swarm(without_networks(config), source))
    names = list(layout.labels)
    names[join.index] = name or names[join.index]
    return layout.peer(join.index, names)


def _check_agreement(
    from_config: Settings, from_device: Mapping[str, Any], path: Path, config_path: Path
) -> None:
    """Raise ConfigError if a device differs from the config in a setting that all peers must share."""
    for key in COMMON_SETTINGS:
        if key in from_device and from_device[key] != getattr(from_config, key):
            full_key = {"trust": "trust.kind", "private": "trust.private"}.get(key, key)
            raise ConfigError(
                f"{path}: key {full_key!r}: is {from_device[key]!r} for this device, but "
                f"{getattr(from_config, key)!r} in {config_path}, and the peers of a swarm must agree: leave "
                f"it out here, or change it in {config_path}"
            )


def _check_trust(
    spec: PeerSpec, from_device: Mapping[str, Any], path: Path, config_path: Path
) -> None:
    """Raise ConfigError if the config has trust and the device's credentials or peers' names are missing."""
    if spec.settings.trust != "swarm":
        return
    if missing := [key for key in CredentialSettings.model_fields if key not in from_device]:
        raise ConfigError(
            f"{path}: key 'trust.{missing[0]}': {config_path} has trust = \"swarm\", which needs "
            f"the device's {', '.join(missing)}: give them in [trust], or as --{' and --'.join(missing)}"
        )
    for key in SETTINGS_WITH_PEER_NAMES:
        if key in spec.settings.model_fields_set and key not in from_device:
            raise ConfigError(
                f"{path}: key {key!r}: {config_path} has trust, so other peers' names end in the ids of "
                f"their keys (label@id), which {config_path.name} does not contain: set {key} to these names"
                + (", or expect = [] to wait for no other peer" if key == "expect" else "")
            )


def _drop_founder_if_late(spec: PeerSpec, overrides: Mapping[str, Any]) -> Settings:
    """Return the config's settings, without `founder` if the device may join a swarm that is running.

    The config computes `founder` for peers that all start together. That holds for a device only if it waits
    for all other peers of the config and brings no trained network; otherwise the peer decides when it joins
    (see NeighbourSettings.founder).
    """
    from_config = spec.settings
    waits_for = {label_of(name) for name in overrides.get("expect", from_config.expect)}
    other_peers = {label_of(name) for name in from_config.expect} - {label_of(spec.name)}
    if waits_for >= other_peers and "trained" not in overrides:
        return from_config
    keys = from_config.model_fields_set - {"founder"}
    return Settings(**{key: getattr(from_config, key) for key in keys})


def _with_password(
    broker: BrokerAddress,
    join: JoinConfig,
    path: Path,
    password_file: Path | None,
    user: str,
    origins: dict[str, str],
) -> BrokerAddress:
    """Return the broker's address, completed with the password; adds its source to `origins`.

    user: the broker user of a password file if the broker's URL names none.
    """
    source = "command line" if password_file else "environment"
    if password_file is None and join.password_file is not None:
        password_file, source = path.parent / join.password_file, "device file"
    if password_file is not None:
        broker = broker.updated(url=with_user(broker.url, user))
    password = broker_password(broker.url, password_file)
    if password is not None:
        broker, origins["password"] = broker.updated(password=password), source
    return broker
