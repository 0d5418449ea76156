"""From a config to a live swarm: which peer talks to whom, who serves what, what runs where."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx

from ...gossip.compress import CompressError
from ...gossip.compress import parse as parse_compressor
from ...gossip.security import Identity, TrustError, invite, public_text, save_invitation
from ...models import implementers
from ...peer import (
    BrokerAddress,
    PeerSpec,
    PlaceSettings,
    Settings,
    SwarmSpec,
    blocks,
    schema_entries,
)
from ..build import Member, Swarm, trained_file
from ..config.needs import warn_unused_keys
from ..config.tables import Config, ConfigError, starts_apart, without_networks
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
        self._links = None if self.graph is None else self.graph.graph
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
        neighbours, sources = _around(self._links, names, index)
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
        return PeerSpec(
            self.labels[index],
            ENTRY,
            {"config": text, "index": index, "source": str(Path(self.source).resolve())},
            settings,
            samples=self._samples(index),
            seed=index,
            network=_text(trained_file(config, self.source, index)),
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
    members = layout.members
    if layout.graph is not None:
        tell(layout.graph)
    if config.trust.kind == "swarm":
        papers = make_papers(folder / "trust", swarm_name(config), members)
        peers = [
            layout.peer(
                index,
                papers.names,
                identity=papers.key(member.name),
                invitation=papers.invitation(member.name),
                owner=papers.owner,
            )
            for index, member in enumerate(members)
        ]
    else:
        peers = [layout.peer(index) for index in range(config.peers)]
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


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


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


def _around(
    graph: nx.Graph | None, names: tuple[str, ...], index: int
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Whom a peer gives to, and, on directed graphs, whom it hears from."""
    if graph is None:
        return None, None
    if isinstance(graph, nx.DiGraph):
        return (
            tuple(names[other] for other in graph.successors(index)),
            tuple(names[other] for other in graph.predecessors(index)),
        )
    return tuple(names[other] for other in graph.neighbors(index)), None


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


@dataclass(frozen=True, slots=True)
class SwarmPapers:
    """Where everybody's files are, and what everybody is called."""

    folder: Path
    owner: str
    names: tuple[str, ...]

    def key(self, label: str) -> str:
        """A peer's key file."""
        return str(self.folder / f"{label}.key")

    def invitation(self, label: str) -> str:
        """A peer's invitation."""
        return str(self.folder / f"{label}.invitation")


def make_papers(folder: Path, swarm: str, members: Iterable[Member]) -> SwarmPapers:
    """New keys for an owner and every peer; an invitation admits to what its peer implements alone.

    Keys of a former run in the same folder are replaced. The owner's is kept beside them: with it
    `gossamer revoke` can put a peer out while the swarm runs.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = _new_key(folder, "owner")
        names = []
        for member in members:
            identity = _new_key(folder, member.name)
            models = {part for each in member.network.owners for part in each.split("&")}
            paper = invite(owner, swarm, identity.label, identity.public, models=models)
            save_invitation(folder / f"{member.name}.invitation", paper)
            names.append(identity.name)
    except (TrustError, OSError) as error:
        raise ConfigError(f"{folder}: no keys can be made for the swarm: {error}") from None
    return SwarmPapers(folder, public_text(owner.public), tuple(names))


def _new_key(folder: Path, label: str) -> Identity:
    path = folder / f"{label}.key"
    path.unlink(missing_ok=True)
    identity = Identity.generate(label)
    identity.save(path)
    return identity
