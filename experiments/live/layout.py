"""Turns a config into the settings of live peers (neighbours, servers, credentials), and reads the file of a
single device that joins a swarm.

A device's settings are looked up in this order: the command line, the device's file, the swarm config's
settings of the peer at `index`, the default.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import networkx as nx
from pydantic import Field

from ...gossip import Count, GossipSettings, LinkSettings
from ...gossip.security import Identity, TrustError, invite, public_text, save_invitation
from ...peer import (
    AUTO_MODELS,
    BrokerAddress,
    CredentialSettings,
    DiscoverySettings,
    LifecycleSettings,
    MatchingSettings,
    NeighbourSettings,
    PeerSpec,
    PriorSettings,
    SampleSettings,
    ScheduleSettings,
    Settings,
    SharingSettings,
    SwarmSpec,
)
from ...peer import label as label_of
from ..build import (
    Member,
    PeerFacts,
    Swarm,
    check_compression,
    choose_twins,
    require_push,
    shared_models,
    trained_file,
)
from ..cli import console
from ..cli.live import broker_password
from ..config.needs import warn_unused_keys
from ..config.tables import (
    Config,
    ConfigError,
    PeerTrust,
    PeerTrustTable,
    load_config,
    needs_matching,
    parse_table,
    read_table,
    without_networks,
)
from ..graphs.swarm import PUSHES, SwarmGraph, print_graph_notes, swarm_graph
from .enrolment import Enrolment

DEFAULT_ENTRY = "gossamer.experiments.build:make_learner"
"""The entry point that builds the learner of a peer that a config describes."""
COMPUTED = NeighbourSettings.model_fields.keys() | {"trust", "gain", "prior"}
"""Settings that are computed here, not copied from the config."""


class SwarmLayout:
    """Computes the settings of each live peer of a config, for `gossamer swarm` and `gossamer join`.

    The constructor raises ConfigError if the config cannot run live.

    source: the config's file, for error messages and for paths relative to it.
    swarm: builds the config's peers. For a joining device pass a Swarm built from `without_networks(config)`:
        the other peers' trained files are not on this machine.
    """

    def __init__(self, config: Config, source: str, swarm: Swarm) -> None:
        require_push(config, source, "live peers", "run gossamer simulate")
        _check_auto_sharing(config, source)
        warn_unused_keys(config, "live", source)
        if config.training.prior == "auto" and (
            config.training.proximal or config.fednp is not None
        ):
            raise ConfigError(
                f"{source}: key 'training.prior': \"auto\" cannot be combined with training.proximal or "
                'fednp, live; use "own", or leave them out'
            )
        self.config, self.source, self.swarm = config, source, swarm
        self._facts: dict[int, PeerFacts] = {}
        self.labels = tuple(str(index) for index in range(config.peers))
        gossip, private_models = config.gossip, config.trust.private
        if config.gain and config.trust.dp is not None:
            raise ConfigError(
                f"{source}: key 'gain': lone twins train without the noise of 'trust.dp', and their accuracy "
                "is published; leave out one of them"
            )
        if needs_matching(config):
            _check_founder(config, source, self.peers_of_model)
        # self.peers_of_model builds every network: only evaluate it if there is a topology.
        has_topology = config.topology is not None
        self.graph = swarm_graph(config, self.peers_of_model if has_topology else {}, source)
        if self.graph is not None and self.graph.changing and gossip.mode != "async":
            raise ConfigError(
                f"{source}: key 'topology': a graph that changes over time runs live only in async mode; "
                'name a graph that does not change, set gossip.mode = "async", or run gossamer simulate'
            )
        if private_models:
            _check_private(config, self.peers_of_model, source)
        if gossip.compress is not None or gossip.drift is not None:
            check_compression(config, self.members, self.peers_of_model, source)
        self._exchanges = gossip.exchanges or _exchanges(config, self.graph)

    @cached_property
    def members(self) -> list[Member]:
        """All peers, each with its network and its data."""
        return self.swarm.members()

    @cached_property
    def peers_of_model(self) -> dict[str, list[int]]:
        """The indices of the peers of each partial model that more than one peer implements."""
        return shared_models(self.members)

    def peer(
        self, index: int, names: Sequence[str] | None = None, **credentials: str | None
    ) -> PeerSpec:
        """Return the specification of one peer's process; its settings contain only values that the config
        sets or that differ from the default.

        names: the names of all peers, by index; if left out, their labels. credentials: see
            CredentialSettings.
        """
        config, names = self.config, tuple(names or self.labels)
        tables = config, config.gossip, config.trust
        from_config = {
            key: getattr(table, key)
            for table in tables
            for key in table.model_fields_set & Settings.model_fields.keys()
        }
        neighbours = in_neighbours = None
        if self.graph is not None:
            links = self.graph.graph
            neighbours = tuple(names[other] for other in links.neighbors(index))
            if isinstance(links, nx.DiGraph):
                in_neighbours = tuple(names[other] for other in links.predecessors(index))
        # If peers start from different values, peer 0's order of cells is the reference to which the others
        # are matched.
        matched = needs_matching(config)
        computed: dict[str, Any] = {
            "swarm": swarm_name(config),
            "trust": config.trust.kind,
            # With "own", the learner is built with its prior.
            "prior": "auto" if config.training.prior == "auto" else "none",
            "gain": float(index in choose_twins(config.gain, config.peers, config.seed)),
            "exchanges": self._exchanges,
            "neighbours": neighbours,
            "sources": in_neighbours,
            "turns": _neighbours_by_step(self.graph, names, index),
            "servers": self._servers(names),
            "expect": names,
            "founder": index == 0 or not matched,
            "trained": matched,
            "matching": self.swarm.matching(index),
            **credentials,
        }
        settings = Settings(
            **{key: value for key, value in from_config.items() if key not in COMPUTED},
            **{
                key: value
                for key, value in computed.items()
                if key in from_config or value != Settings.model_fields[key].default
            },
        )
        asks_all = config.sharing == "auto" or config.training.prior == "auto"
        if asks_all and (contradiction := settings.contradiction()):
            raise ConfigError(f"{self.source}: {contradiction}")
        config_json = json.dumps(_for_one_peer(config).model_dump(mode="json"))
        network_file = trained_file(config, self.source, index)
        return PeerSpec(
            self.labels[index],
            DEFAULT_ENTRY,
            {"config": config_json, "index": index, "source": str(Path(self.source).resolve())},
            settings,
            samples=self.facts(index).samples,
            seed=index,
            network=network_file and str(network_file.resolve()),
        )

    def plan(self, folder: Path, broker: BrokerAddress) -> SwarmSpec:
        """Return the specification of the whole swarm. Raises ConfigError if the config cannot run live.

        If the config sets trust, this writes the peers' keys and invitations to `folder / "trust"`.
        """
        config = self.config
        if self.graph is not None:
            print_graph_notes(self.graph)
        names, credentials = self.labels, [{}] * config.peers
        if config.trust.kind == "swarm":
            models = AUTO_MODELS if config.sharing == "auto" else None
            names, credentials = make_credentials(
                folder / "trust", swarm_name(config), self.members, models
            )
        peers = [
            self.peer(index, names, **peer_credentials)
            for index, peer_credentials in enumerate(credentials)
        ]
        address = broker.with_defaults(config.gossip)
        return SwarmSpec(swarm_name(config), address, folder, peers, config.gossip.per_process)

    def _servers(self, names: Sequence[str]) -> dict[str, str]:
        """Return which peer is the server of each partial model, round-robin; empty in other modes."""
        if self.config.gossip.mode != "server":
            return {}
        numbered = enumerate(self.peers_of_model.items())
        return {model: names[peers[number % len(peers)]] for number, (model, peers) in numbered}

    def facts(self, index: int) -> PeerFacts:
        """Return what is known of one peer; builds only that peer, once, if not all are built."""
        if index not in self._facts:
            all_built = "members" in self.__dict__
            member = self.members[index] if all_built else self.swarm.member(index)
            self._facts[index] = PeerFacts.of(member)
        return self._facts[index]


def plan(config: Config, folder: Path, broker: BrokerAddress, source: str = "config") -> SwarmSpec:
    """Return the specification of a config's swarm; see `SwarmLayout.plan`."""
    return SwarmLayout(config, source, Swarm(config, source)).plan(folder, broker)


def _for_one_peer(config: Config) -> Config:
    """Return the config from which a process builds its own peer, without others' labels and networks."""
    config = without_networks(config)
    if config.training.prior != "auto":
        return config
    return config.model_copy(
        update={"training": config.training.model_copy(update={"prior": "none"})}
    )


def _check_auto_sharing(config: Config, source: str) -> None:
    """Raise if live peers cannot decide what they share as this config says."""
    if config.sharing != "auto":
        return
    refused = {
        "models": ("beside partial models that are given", bool(config.models)),
        "dry_run": ("in a dry run", config.dry_run),
        "fednp": ("with FedNP, whose loss is not a sum over samples", config.fednp is not None),
        "training.proximal": ("with a penalty beside the loss", config.training.proximal > 0),
        "data.set": ("of sparse vectors", config.data.set == "sparse"),
        "network.sizes": ("with networks of several sizes", bool(config.network.sizes)),
    }
    for key, (what, given) in refused.items():
        if given:
            raise ConfigError(
                f"{source}: key 'sharing': live peers cannot decide what they share {what} ({key}); leave "
                "one of them out, or run gossamer simulate"
            )


def _check_founder(config: Config, source: str, peers_of_model: dict[str, list[int]]) -> None:
    """Raise if peers start from different values but cannot be matched to peer 0's order of cells.

    That takes async mode, and every shared model must be one that peer 0 implements.
    """
    if config.gossip.mode != "async":
        raise ConfigError(
            f"{source}: key 'gossip.mode': peers that start from different values are matched when they "
            'join, which only mode = "async" supports; use it, or start all peers from the same values '
            "(network.equal_starts = true, no network.trained)"
        )
    for model, peers in peers_of_model.items():
        if peers[0] != 0:
            raise ConfigError(
                f"{source}: key 'models': the peers' cells are matched to the order of peer 0, but peer 0 "
                f"does not implement {model!r}; add peer 0 to that model, start all peers from the same "
                "values (network.equal_starts = true, no network.trained), or run gossamer simulate"
            )


def swarm_name(config: Config) -> str:
    """Return the config's name, shortened and with characters that MQTT topics do not allow replaced."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in config.name)[:64]


def _neighbours_by_step(
    topology: SwarmGraph | None, names: tuple[str, ...], index: int
) -> tuple[tuple[str, ...], ...]:
    """Return a peer's neighbours in each step of a graph that changes over time; else nothing."""
    if topology is None or topology.changing is None:
        return ()
    graphs = (topology.changing.graph(step) for step in range(topology.steps))
    return tuple(
        tuple(names[other] for other in graph.neighbors(index)) if index in graph else ()
        for graph in graphs
    )


def _check_private(config: Config, peers_of_model: dict[str, list[int]], source: str) -> None:
    """Raise if a masked model is shared by fewer than 3 peers, or if trust or mode do not allow masks."""
    for model in config.trust.private:
        if len(peers_of_model.get(model, ())) < 3:
            raise ConfigError(
                f"{source}: key 'trust.private': {model!r} must be shared by at least 3 peers: with fewer, "
                "peers can undo each other's masks"
            )
    if config.trust.private and (config.trust.kind != "swarm" or config.gossip.mode == "async"):
        raise ConfigError(
            f"{source}: key 'trust.private': "
            'masks need trust = "swarm" and gossip.mode = "rounds" or "server"'
        )


def _exchanges(config: Config, topology: SwarmGraph | None) -> int:
    """Return how many exchanges one averaging needs.

    Masks make it more: masked values start with a spread in proportion to the masks' scale.
    """
    if topology is None:  # all peers are neighbours: one exchange of equal shares gives the mean
        return PUSHES if config.gossip.mode == "async" else 1
    spread = 10 * max(config.trust.private.values(), default=0.0) * math.sqrt(config.peers)
    return topology.exchanges(config, config.gossip.tolerance / max(spread, 1.0))


def make_credentials(
    folder: Path, swarm: str, members: Iterable[Member], patterns: Collection[str] | None = None
) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """Make a key for the swarm's owner and for every peer, and an invitation for every peer.

    An invitation is valid only for models that match the patterns, or, without any, for those that the peer
    implements. Returns the peers' names, of the form
    label@id, and each peer's credentials (see CredentialSettings). Keys of a former run in the same folder
    are replaced. The owner's private key is saved in the same folder: `gossamer revoke` needs it to exclude a
    peer while the swarm runs.
    """
    names, credentials = [], []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner, _ = _new_key(folder, "owner")
        for member in members:
            identity, key = _new_key(folder, member.name)
            # 'a&b' names the parameters that the models a and b own jointly.
            models = {model for name in member.network.averaged_models for model in name.split("&")}
            invitation = invite(
                owner, swarm, identity.label, identity.public, models=patterns or models
            )
            file = folder / f"{member.name}.invitation"
            save_invitation(file, invitation)
            names.append(identity.name)
            owner_key = public_text(owner.public)
            credentials.append({"identity": key, "invitation": str(file), "owner": owner_key})
    except (TrustError, OSError) as error:
        raise ConfigError(f"{folder}: the swarm's keys cannot be created: {error}") from None
    return tuple(names), credentials


def _new_key(folder: Path, label: str) -> tuple[Identity, str]:
    """Generate a key, replacing a former one of the same label; return it and the path of its file."""
    path = folder / f"{label}.key"
    path.unlink(missing_ok=True)
    identity = Identity.generate(label)
    identity.save(path)
    return identity, str(path)


# --- a device that joins ----------------------------------------------------------------------------

COMMON_SETTINGS = ("mode", "weights", "dtype", "trust", "private")
"""Settings that must be the same on all peers of a swarm: a device's file cannot override the config."""
SPEC_FIELDS = ("name", "samples", "seed", "network")
"""Keys of a device's file that set fields of PeerSpec, not of Settings."""
SETTINGS_WITH_PEER_NAMES = ("expect", "neighbours", "sources", "turns", "servers")
"""Settings whose values contain the names of other peers."""


class JoinConfig(
    ScheduleSettings,
    SharingSettings,
    PriorSettings,
    GossipSettings,
    LifecycleSettings,
    SampleSettings,
    DiscoverySettings,
    NeighbourSettings,
    MatchingSettings,
    LinkSettings,
):
    """The keys of a device's file. Give either your own entry point, or a swarm config and an index in it.

    The settings are those of any peer: see peer/settings.py, gossip/settings.py, gossip/transport/options.py.
    With `config`, settings that the file leaves out are taken from the config.
    """

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

    origins: the source of every value that is not a default: "config", "device file", "command line" or
        "environment". Keys are names of fields of Settings, PeerSpec and BrokerAddress.
    """

    spec: PeerSpec
    broker: BrokerAddress
    origins: Mapping[str, str]


def read_join(path: Path) -> JoinConfig:
    """Read a device's file."""
    return parse_table(JoinConfig, read_table(path), str(path))


def device_of(enrolment: Enrolment, entry: str | None, path: Path) -> JoinConfig:
    """Return what a device's file would say for a device that was enrolled; path: of the enrolment."""
    if entry is None:
        raise ConfigError(
            f"{path}: does not say what the device learns: give --entry module:function, or --config FILE"
        )
    return parse_table(JoinConfig, {"entry": entry, **enrolment.settings}, str(path))


def load_join(
    path: Path,
    broker: BrokerAddress,
    *,
    join: JoinConfig | None = None,
    name: str | None = None,
    network: Path | None = None,
    password_file: Path | None = None,
    **options: Any,
) -> JoinPlan:
    """Read a device's file and return all that the device's process needs.

    join: the content of the file, if it has been read already.

    All other arguments come from the command line and override the file; raises ConfigError naming the file
    and key that is invalid. options: values of fields of Settings, None if not given.
    """
    join = join or read_join(path)
    if (join.entry is None) == (join.config is None):
        raise ConfigError(f"{path}: give either 'entry' or 'config' (with 'index')")
    if unused := (join.model_fields_set & {"index" if join.entry else "arguments"}):
        other = "config" if join.entry else "entry"
        raise ConfigError(f"{path}: key {unused.pop()!r} is only used with {other!r}; remove it")
    device_file = _device_values(join, path.parent)
    options |= {"name": name, "network": network and str(network)}
    command_line = {key: value for key, value in options.items() if value is not None}
    for values in (device_file, command_line):
        # A key is only used with trust: giving one switches trust on.
        if "identity" in values and "trust" not in device_file:
            values["trust"] = "swarm"
    overrides = device_file | command_line
    origins = dict.fromkeys(device_file, "device file") | dict.fromkeys(
        command_line, "command line"
    )
    spec_fields = {key: overrides.pop(key) for key in SPEC_FIELDS if key in overrides}
    identity = Identity.load(Path(overrides["identity"])) if overrides.get("identity") else None
    label = spec_fields.pop("name", None) or (identity and identity.label)
    config = None
    if join.config is None:
        if label is None:
            raise ConfigError(f"{path}: key 'name': a peer needs a name; add it, or use --name")
        spec = PeerSpec(label, str(join.entry), join.arguments, Settings(), seed=seed_of(label))
        origins["entry"] = "device file"
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
        origins = dict.fromkeys(("entry", "samples", "seed"), "config") | origins
    if "network" in spec_fields:
        overrides["trained"], origins["trained"] = True, origins["network"]
    base = _drop_founder_if_late(spec, overrides)
    spec = replace(spec, settings=base.updated(**overrides), **spec_fields)
    origins = dict.fromkeys(base.model_fields_set, "config") | origins
    user = identity.name if identity else spec.name
    address = _broker(broker, join, config, path, password_file, user, origins)
    return JoinPlan(spec, address, origins)


def seed_of(name: str) -> int:
    """Return the default seed of a peer: a hash of its name, the same on any machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def _device_values(join: JoinConfig, folder: Path) -> dict[str, Any]:
    """Return the values that a device's file sets for fields of Settings and PeerSpec, paths completed."""
    keys = join.model_fields_set & {*Settings.model_fields, *SPEC_FIELDS} - {"trust"}
    values = {key: getattr(join, key) for key in keys}
    for key in join.trust.model_fields_set:
        values["trust" if key == "kind" else key] = getattr(join.trust, key)
    for key in ("identity", "invitation", "network", "samples_folder"):
        if values.get(key) is not None:
            values[key] = str(folder / values[key])
    return values


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
    source = str(config_path)
    layout = SwarmLayout(config, source, Swarm(without_networks(config), source))
    names = list(layout.labels)
    names[join.index] = name or names[join.index]
    return layout.peer(join.index, names)


def _check_agreement(
    from_config: Settings, from_device: Mapping[str, Any], path: Path, config_path: Path
) -> None:
    """Raise if a device contradicts the config in a setting that must be the same on all peers."""
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
    """Raise if the config has trust and a device's credentials or the names of other peers are missing."""
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


def _broker(
    broker: BrokerAddress,
    join: JoinConfig,
    config: Config | None,
    path: Path,
    password_file: Path | None,
    user: str,
    origins: dict[str, str],
) -> BrokerAddress:
    """Return the broker's address, completed with the password and with the link settings of the device's
    file and of the config; adds their sources to `origins`.

    user: the broker user of a password file if the broker's URL names none.
    """
    origins |= dict.fromkeys(broker.model_fields_set, "command line")
    source = "command line" if password_file else "environment"
    if password_file is None and join.password_file is not None:
        password_file, source = path.parent / join.password_file, "device file"
    url = urlsplit(broker.url)
    if password_file is not None and "@" not in url.netloc:
        url_with_user = url._replace(netloc=f"{quote(user, safe='')}@{url.netloc}")
        broker = broker.updated(url=url_with_user.geturl())
    password = broker_password(broker.url, password_file)
    if password is not None:
        broker, origins["password"] = broker.updated(password=password), source
    for source, link_settings in (("device file", join), ("config", config and config.gossip)):
        if link_settings is not None:
            already_set = broker.model_fields_set
            broker = broker.with_defaults(link_settings)
            origins |= dict.fromkeys(broker.model_fields_set - already_set, source)
    return broker
