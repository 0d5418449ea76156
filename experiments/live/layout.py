"""From a config to live peers: who talks to whom and serves what in a swarm of processes, and what one
device needs that joins with a file of its own.

A device's setting is, in this order: what the command line states, what the device's file states, what the
swarm config says of the peer at `index`, the default.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import networkx as nx
from pydantic import Field

from ...gossip import Count, GossipSettings, LinkSettings
from ...gossip.compress import CompressError
from ...gossip.compress import parse as parse_compressor
from ...gossip.security import Identity, TrustError, invite, public_text, save_invitation
from ...models import implementers
from ...peer import (
    BrokerAddress,
    CredentialSettings,
    LifeSettings,
    MatchingSettings,
    PeerSpec,
    PlaceSettings,
    ScheduleSettings,
    Settings,
    SwarmSpec,
    blocks,
    schema_entries,
)
from ...peer import label as label_of
from ..build import Member, Swarm, trained_file
from ..cli import console
from ..cli.live import broker_password
from ..config.needs import warn_unused_keys
from ..config.tables import (
    Config,
    ConfigError,
    PeerTrust,
    PeerTrustTable,
    load_config,
    parse_table,
    read_table,
    starts_apart,
    without_networks,
)
from ..graphs.swarm import PUSHES, SwarmGraph, swarm_graph, tell

ENTRY = "gossamer.experiments.build:make_learner"
"""What builds the learner of a config's peer."""
PLACED = PlaceSettings.model_fields.keys() | {"trust"}
"""Settings that a config's keys of the same name do not give as they stand: they are computed."""


class SwarmLayout:
    """A config's swarm as its live peers need it; `gossamer swarm` and `gossamer join` both ask it.

    What can be wrong with the config is found when it is made. A device knows no files but its own: for it,
    `swarm` builds members without the networks that the others bring along.
    """

    def __init__(self, config: Config, source: str, swarm: Swarm) -> None:
        require_push(config, source, "live peers", "run it in the arena with gossamer simulate")
        warn_unused_keys(config, "live", source)
        self.config, self.source, self.swarm = config, source, swarm
        self.labels = tuple(str(index) for index in range(config.peers))
        gossip, masked = config.gossip, config.trust.private
        if starts_apart(config):
            _check_founder(config, source, self.owners)
        # Who shares what is asked for only where it matters: it takes everybody's network.
        mixed = config.topology is not None
        self.graph = swarm_graph(config, self.owners if mixed else {}, source)
        if self.graph is not None and self.graph.changing and gossip.mode != "async":
            raise ConfigError(
                f"{source}: key 'topology': this one changes over time, which live peers follow in async "
                "mode only; name one graph, or run it in the arena with gossamer simulate"
            )
        if masked:
            _check_private(config, self.owners, source)
        if gossip.compress is not None or gossip.drift is not None:
            check_compression(config, self.members, self.owners, source)
        self._exchanges = gossip.exchanges or _exchanges(config, self.graph)

    @cached_property
    def members(self) -> list[Member]:
        """Every peer, built."""
        return self.swarm.members()

    @cached_property
    def owners(self) -> dict[str, list[int]]:
        """Partial models that more than one peer implements, with their peers."""
        return shared_owners(self.members)

    def peer(
        self, index: int, names: Sequence[str] | None = None, **credentials: str | None
    ) -> PeerSpec:
        """Return what one peer's process needs; its settings state what is not a default.

        names: what peers are called, if not by their labels. credentials: see CredentialSettings.
        """
        config, names = self.config, tuple(names or self.labels)
        tables = config, config.gossip, config.trust
        stated = {
            key: getattr(table, key)
            for table in tables
            for key in table.model_fields_set & Settings.model_fields.keys()
        }
        neighbours = sources = None
        if self.graph is not None:
            links = self.graph.graph
            neighbours = tuple(names[other] for other in links.neighbors(index))
            if isinstance(links, nx.DiGraph):
                sources = tuple(names[other] for other in links.predecessors(index))
        # Of peers with values of their own the first one gives the order, into which the others come.
        apart = starts_apart(config)
        computed: dict[str, Any] = {
            "swarm": swarm_name(config),
            "trust": config.trust.kind,
            "exchanges": self._exchanges,
            "neighbours": neighbours,
            "sources": sources,
            "turns": _turns(self.graph, names, index),
            "servers": self._servers(names),
            "expect": names,
            "founder": index == 0 or not apart,
            "trained": apart,
            "matching": self.swarm.matching(index),
            **credentials,
        }
        settings = Settings(
            **{key: value for key, value in stated.items() if key not in PLACED},
            **{
                key: value
                for key, value in computed.items()
                if key in stated or value != Settings.model_fields[key].default
            },
        )
        text = json.dumps(without_networks(config).model_dump(mode="json"))
        trained = trained_file(config, self.source, index)
        return PeerSpec(
            self.labels[index],
            ENTRY,
            {"config": text, "index": index, "source": str(Path(self.source).resolve())},
            settings,
            samples=self._samples(index),
            seed=index,
            network=trained and str(trained.resolve()),
        )

    def _servers(self, names: Sequence[str]) -> dict[str, str]:
        """Who averages each partial model, in turn."""
        if self.config.gossip.mode != "server":
            return {}
        shared = enumerate(self.owners.items())
        return {owner: names[who[place % len(who)]] for place, (owner, who) in shared}

    def _samples(self, index: int) -> int:
        built = "members" in self.__dict__
        return (self.members[index] if built else self.swarm.member(index)).samples


def plan(config: Config, folder: Path, broker: BrokerAddress, source: str = "config") -> SwarmSpec:
    """Lay out a config's swarm; everything that can be wrong with it is found before it starts.

    With trust the peers' keys and invitations are made, in the folder's `trust`.
    """
    layout = SwarmLayout(config, source, Swarm(config, source))
    if layout.graph is not None:
        tell(layout.graph)
    names, credentials = layout.labels, [{}] * config.peers
    if config.trust.kind == "swarm":
        names, credentials = make_credentials(folder / "trust", swarm_name(config), layout.members)
    peers = [layout.peer(index, names, **own) for index, own in enumerate(credentials)]
    address = broker.with_defaults(config.gossip)
    return SwarmSpec(swarm_name(config), address, folder, peers, config.gossip.per_process)


def _check_founder(config: Config, source: str, owners: dict[str, list[int]]) -> None:
    """Peers with values of their own need one whose order the others take over, in every model."""
    if config.gossip.mode != "async":
        raise ConfigError(
            f"{source}: key 'gossip.mode': peers with values of their own are matched as they come in, "
            "which only async mode allows"
        )
    for owner, who in owners.items():
        if who[0] != 0:
            raise ConfigError(
                f"{source}: key 'models': peer 0 gives the order of cells that the others take over, "
                f"but it has no part in {owner!r}; start it from equal values, or run gossamer simulate"
            )


def swarm_name(config: Config) -> str:
    """The config's name as it may stand in a topic."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in config.name)[:64]


def shared_owners(members: list[Member]) -> dict[str, list[int]]:
    """Owners that more than one peer implements, with their peers."""
    found = implementers([member.network for member in members])
    return {owner: who for owner, who in found.items() if len(who) > 1}


def graph_of(config: Config, members: list[Member], source: str = "config") -> nx.Graph | None:
    """The config's topology, if it has one; every shared model must be connected on it.

    Links that bridging added are listed on the terminal. None too when it changes over time.
    """
    found = swarm_graph(config, shared_owners(members), source)
    if found is None:
        return None
    tell(found)
    return None if found.changing else found.graph


def _turns(
    found: SwarmGraph | None, names: tuple[str, ...], index: int
) -> tuple[tuple[str, ...], ...]:
    """Whom a peer gives to, step after step, where the graph changes over time."""
    if found is None or found.changing is None:
        return ()
    graphs = (found.changing.graph(step) for step in range(found.steps))
    return tuple(
        tuple(names[other] for other in graph.neighbors(index)) if index in graph else ()
        for graph in graphs
    )


def _check_private(config: Config, owners: dict[str, list[int]], source: str) -> None:
    """Masked models must be there and have enough peers; the rest is each peer's to check."""
    for model in config.trust.private:
        if len(owners.get(model, ())) < 3:
            raise ConfigError(
                f"{source}: key 'trust.private': {model!r} is not a model that three peers share, and "
                "fewer see through each other's masks"
            )
    if config.trust.private and (config.trust.kind != "swarm" or config.gossip.mode == "async"):
        raise ConfigError(
            f"{source}: key 'trust.private': masks need trust = \"swarm\" and the mode rounds or server"
        )


def require_push(config: Config, source: str, who: str, way_out: str) -> None:
    """Raise if a config asks for another rule where peers send messages: there they give equal parts."""
    if config.gossip.rule != "push":
        raise ConfigError(
            f"{source}: key 'gossip.rule': {who} give equal parts, not by the rule "
            f"{config.gossip.rule!r}; leave it out, or {way_out}"
        )


def check_compression(
    config: Config, members: list[Member], owners: dict[str, list[int]], source: str
) -> None:
    """A compressor must fit every shared model; the rest each peer would refuse, here it is one line."""
    gossip = config.gossip
    if gossip.drift is not None and gossip.mode != "async":
        raise ConfigError(
            f"{source}: key 'gossip.drift': in {gossip.mode} mode the others wait for every push, so none "
            'can be skipped; use mode = "async"'
        )
    unknown = sorted(set(gossip.drift if isinstance(gossip.drift, Mapping) else ()) - set(owners))
    if unknown:
        raise ConfigError(
            f"{source}: key 'gossip.drift': no peers share a model {unknown[0]!r}; there are "
            f"{', '.join(owners) or 'none'}"
        )
    if gossip.compress is None:
        return
    if gossip.dtype != "float32" or config.trust.private:
        other = "trust.private" if config.trust.private else "gossip.dtype"
        raise ConfigError(
            f"{source}: key 'gossip.compress': cannot be combined with {other}; leave one of them out"
        )
    compressor = parse_compressor(gossip.compress)
    for owner, who in owners.items():
        try:
            compressor.fit(blocks(schema_entries(members[who[0]].network, owner)))
        except CompressError as error:
            raise ConfigError(
                f"{source}: key 'gossip.compress': model {owner!r}: {error}"
            ) from None


def _exchanges(config: Config, found: SwarmGraph | None) -> int:
    """How many exchanges an averaging needs. Masks start values farther apart, by their scale."""
    if found is None:  # everybody gives everybody an equal part: the mean, at once
        return PUSHES if config.gossip.mode == "async" else 1
    farther = 10 * max(config.trust.private.values(), default=0.0) * math.sqrt(config.peers)
    return found.exchanges(config, config.gossip.tolerance / max(farther, 1.0))


def make_credentials(
    folder: Path, swarm: str, members: Iterable[Member]
) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """Make keys for an owner and every peer, and invitations that admit to what a peer implements alone.

    Returns what peers are called with their keys, and what each needs (see CredentialSettings). Keys of a
    former run in the same folder are replaced. The owner's is kept beside them: with it `gossamer revoke` can
    put a peer out while the swarm runs.
    """
    names, credentials = [], []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner, _ = _new_key(folder, "owner")
        for member in members:
            identity, key = _new_key(folder, member.name)
            models = {part for each in member.network.owners for part in each.split("&")}
            invitation = invite(owner, swarm, identity.label, identity.public, models=models)
            file = folder / f"{member.name}.invitation"
            save_invitation(file, invitation)
            names.append(identity.name)
            public = public_text(owner.public)
            credentials.append({"identity": key, "invitation": str(file), "owner": public})
    except (TrustError, OSError) as error:
        raise ConfigError(f"{folder}: no keys can be made for the swarm: {error}") from None
    return tuple(names), credentials


def _new_key(folder: Path, label: str) -> tuple[Identity, str]:
    path = folder / f"{label}.key"
    path.unlink(missing_ok=True)
    identity = Identity.generate(label)
    identity.save(path)
    return identity, str(path)


# --- a device that joins ----------------------------------------------------------------------------

AGREED = ("mode", "weights", "dtype", "trust", "private")
"""Settings on which the peers of a swarm must agree: a device's file cannot overrule the config's."""
OF_SPEC = ("name", "samples", "seed", "network")
"""What a device's file and the command line say of the peer apart from settings."""
OTHERS_NAMES = ("expect", "neighbours", "sources", "turns", "servers")
"""Settings that name other peers."""


class JoinConfig(
    ScheduleSettings, GossipSettings, LifeSettings, PlaceSettings, MatchingSettings, LinkSettings
):
    """A device's file. Give either an entry point of your own, or a swarm config and an index in it.

    The settings are those of any peer: see peer/settings.py, gossip/settings.py, gossip/transport/options.py.
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
    return parse_table(JoinConfig, read_table(path), str(path))


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
    device = _stated(join, path.parent)
    options |= {"name": name, "network": network and str(network)}
    command = {key: value for key, value in options.items() if value is not None}
    for layer in (device, command):
        if "identity" in layer and "trust" not in device:
            layer["trust"] = "swarm"
    stated = device | command
    origins = dict.fromkeys(device, "device file") | dict.fromkeys(command, "command line")
    own = {key: stated.pop(key) for key in OF_SPEC if key in stated}
    identity = Identity.load(Path(stated["identity"])) if stated.get("identity") else None
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
            console.warn(
                f"{path}: key 'name': the other peers of {found} know peer {join.index} as {spec.name!r}: "
                f"unless their files name {label!r}, leave it out"
            )
        spec = replace(spec, name=label or spec.name)
        _check_agreement(spec.settings, stated, path, found)
        _check_trust(spec, stated, path, found)
        origins = dict.fromkeys(("entry", "samples", "seed"), "config") | origins
    if "network" in own:
        stated["trained"], origins["trained"] = True, origins["network"]
    base = _without_founder(spec, stated)
    spec = replace(spec, settings=base.updated(**stated), **own)
    origins = dict.fromkeys(base.model_fields_set, "config") | origins
    user = identity.name if identity else spec.name
    address = _broker(broker, join, config, path, password_file, user, origins)
    return JoinPlan(spec, address, origins)


def seed_of(name: str) -> int:
    """Return a seed for a peer that has no other: the same for the same name, on any machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _stated(join: JoinConfig, folder: Path) -> dict[str, Any]:
    """The settings that a device's file states, and what else it says of its peer."""
    keys = join.model_fields_set & {*Settings.model_fields, *OF_SPEC} - {"trust"}
    values = {key: getattr(join, key) for key in keys}
    for key in join.trust.model_fields_set:
        values["trust" if key == "kind" else key] = getattr(join.trust, key)
    for key in ("identity", "invitation", "network"):
        if values.get(key) is not None:
            values[key] = str(folder / values[key])
    return values


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
    source = "command line" if password_file else "environment"
    if password_file is None and join.password_file is not None:
        password_file, source = path.parent / join.password_file, "device file"
    where = urlsplit(broker.url)
    if password_file is not None and "@" not in where.netloc:
        named = where._replace(netloc=f"{quote(user, safe='')}@{where.netloc}")
        broker = broker.updated(url=named.geturl())
    password = broker_password(broker.url, password_file)
    if password is not None:
        broker, origins["password"] = broker.updated(password=password), source
    for source, link in (("device file", join), ("config", config and config.gossip)):
        if link is not None:
            known = broker.model_fields_set
            broker = broker.with_defaults(link)
            origins |= dict.fromkeys(broker.model_fields_set - known, source)
    return broker
