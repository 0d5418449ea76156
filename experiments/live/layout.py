"""Turns a config into the settings of live peers: neighbours, servers, credentials."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx

from ...gossip.security import Identity, TrustError, invite, public_text, save_invitation
from ...models import ModelError
from ...models.sharing import MIN_SAMPLES, Assignment
from ...peer import (
    AUTO_MODELS,
    BrokerAddress,
    NeighbourSettings,
    PeerSpec,
    Settings,
    SwarmSpec,
)
from ..arena import AutoSharing
from ..build import (
    Member,
    PeerFacts,
    Swarm,
    check_compression,
    choose_twins,
    shared_models,
    trained_file,
)
from ..config.needs import refuse_conflicts, warn_unused_keys
from ..config.tables import (
    Config,
    ConfigError,
    needs_matching,
    without_networks,
)
from ..graphs.swarm import (
    SwarmGraph,
    check_robust,
    check_steady,
    print_graph_notes,
    pushes_of,
    swarm_graph,
    warn_without_score,
)

DEFAULT_ENTRY = "gossamer.experiments.build:make_learner"
"""The entry point that builds the learner of a peer that a config describes."""
MAX_PEERS_FOR_DIAMETER = 500
"""The most peers of a connected graph whose exact diameter is computed, which takes less than a second."""
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
        refuse_conflicts("live", config, source)
        if config.sharing == "auto":
            refuse_conflicts("live auto", config, source)
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
        if config.sharing == "auto":
            members = self.members if config.models else [swarm.member(0)]
            self.initial_assignment = _initial_assignment(members, source)
        # self.peers_of_model builds every network: only evaluate it if there is a topology.
        has_topology = config.topology is not None
        self.graph = swarm_graph(config, self.peers_of_model if has_topology else {}, source)
        if self.graph is not None and self.graph.changing and gossip.mode != "async":
            raise ConfigError(
                f"{source}: key 'topology': a graph that changes over time runs live only in async mode; "
                'name a graph that does not change, set gossip.mode = "async", or run gossamer simulate'
            )
        if gossip.robust != "none":
            check_robust(config, source)
        if gossip.mode == "steady":
            check_steady(config, self.graph, self.peers_of_model if has_topology else {}, source)
        if private_models:
            _check_private(config, self.peers_of_model, source)
        if gossip.compress is not None or gossip.drift is not None:
            check_compression(config, self.members, self.peers_of_model, source)
        self._exchanges = gossip.exchanges or _exchanges(config, self.graph)

    initial_assignment: Assignment | None = None
    """With `sharing = "auto"`: what is shared at first; without models in the config, built from peer 0."""

    @cached_property
    def _hops(self) -> int:
        """An upper bound of the links on the shortest path between two peers; the default without a graph."""
        if self.graph is None:
            return Settings.model_fields["hops"].default
        links = self.graph.graph.to_undirected()
        farthest = 1
        for peers in nx.connected_components(links):
            part = links.subgraph(peers)
            if len(part) <= MAX_PEERS_FOR_DIAMETER:
                farthest = max(farthest, nx.diameter(part))
            else:  # the diameter is at most twice the longest distance from any one peer
                distances = nx.single_source_shortest_path_length(part, next(iter(part)))
                farthest = max(farthest, 2 * max(distances.values()))
        return farthest

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
            "swarm": config.name,
            "trust": config.trust.kind,
            # The prior "own" is built into the learner, so the peer has nothing to compute.
            "prior": "auto" if config.training.prior == "auto" else "none",
            "gain": float(index in choose_twins(config.gain, config.peers, config.seed)),
            "exchanges": self._exchanges,
            "neighbours": neighbours,
            "hops": self._hops,
            "sources": in_neighbours,
            "turns": _neighbours_by_push(self.graph, names, index),
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
        has_auto = config.sharing == "auto" or config.training.prior == "auto"
        if has_auto and (contradiction := settings.contradiction()):
            raise ConfigError(f"{self.source}: {contradiction}")
        config_json = json.dumps(_config_for_process(config).model_dump(mode="json"))
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

    def spec(self, peers: list[PeerSpec], folder: Path, broker: BrokerAddress) -> SwarmSpec:
        """Return the specification of a swarm of these peers."""
        gossip = self.config.gossip
        address = broker.with_defaults(gossip)
        return SwarmSpec(self.config.name, address, folder, peers, gossip.per_process)

    def peer_specs(self, folder: Path) -> list[PeerSpec]:
        """Return the specifications of all peers. Raises ConfigError if the config cannot run live.

        If the config sets trust, this writes the peers' keys and invitations to `folder / "trust"`.
        """
        config = self.config
        if config.sharing == "auto":
            fewest = min(range(config.peers), key=lambda index: self.facts(index).samples)
            if (samples := self.facts(fewest).samples) < MIN_SAMPLES:
                raise ConfigError(
                    f"{self.source}: key 'sharing': peer {fewest} has {samples} training samples, and "
                    f"holding some out to decide takes {MIN_SAMPLES}; give it more, or leave sharing out"
                )
        names, credentials = self.labels, [{}] * config.peers
        if config.trust.kind == "swarm":
            patterns = AUTO_MODELS if config.sharing == "auto" else ()
            names, credentials = make_credentials(
                folder / "trust", config.name, self.members, patterns
            )
        peers = [
            self.peer(index, names, **peer_credentials)
            for index, peer_credentials in enumerate(credentials)
        ]
        if self.graph is not None:
            print_graph_notes(self.graph)
        if config.gossip.mode == "steady":
            warn_without_score(self.swarm.member(0).learner, self.source)
        return peers

    def _servers(self, names: Sequence[str]) -> dict[str, str]:
        """Return which peer is the server of each partial model, round-robin; empty in other modes."""
        if self.config.gossip.mode != "server":
            return {}
        numbered = enumerate(self.peers_of_model.items())
        return {model: names[peers[number % len(peers)]] for number, (model, peers) in numbered}

    def facts(self, index: int) -> PeerFacts:
        """Return the facts about one peer, cached; builds only that peer unless all are built already."""
        if index not in self._facts:
            all_built = "members" in self.__dict__
            member = self.members[index] if all_built else self.swarm.member(index)
            self._facts[index] = PeerFacts.of(member)
        return self._facts[index]


def plan(config: Config, folder: Path, broker: BrokerAddress, source: str = "config") -> SwarmSpec:
    """Return the specification of a config's swarm; see `SwarmLayout.peer_specs`."""
    layout = SwarmLayout(config, source, Swarm(config, source))
    return layout.spec(layout.peer_specs(folder), folder, broker)


def _config_for_process(config: Config) -> Config:
    """Return the config from which a process builds its peer: without trained networks and prior = "auto".

    The network is read from the peer's file, and live peers compute the prior by gossip.
    """
    config = without_networks(config)
    if config.training.prior != "auto":
        return config
    return config.model_copy(
        update={"training": config.training.model_copy(update={"prior": "none"})}
    )


def _initial_assignment(members: Sequence[Member], source: str) -> Assignment:
    """Return what peers share before anything is decided; ConfigError if there is nothing to decide about."""
    try:
        sharing = AutoSharing(keep_models=True)
        assignment = sharing.first_assignment([member.learner for member in members])
        if assignment.scheme_of.all():  # none is GLOBAL
            raise ModelError(
                "no cells are left that all peers share, so there is nothing to decide; leave it out"
            )
    except ModelError as error:
        raise ConfigError(f"{source}: key 'sharing': {error}") from None
    return assignment


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


def _neighbours_by_push(
    topology: SwarmGraph | None, names: tuple[str, ...], index: int
) -> tuple[tuple[str, ...], ...]:
    """Return a peer's neighbours in each step of a graph that changes over time; () for any other graph."""
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
    if config.gossip.robust != "none":
        return 1
    if topology is None:  # all peers are neighbours: one exchange of equal shares gives the mean
        return pushes_of(config) if config.gossip.paced else 1
    spread = 10 * max(config.trust.private.values(), default=0.0) * math.sqrt(config.peers)
    return topology.exchanges(config, config.gossip.tolerance / max(spread, 1.0))


def make_credentials(
    folder: Path, swarm: str, members: Iterable[Member], patterns: Collection[str] = ()
) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """Make a key for the swarm's owner and for every peer, and an invitation for every peer.

    An invitation is valid only for the models that the peer implements, and for those that match the
    patterns. Returns the peers' names, of the form label@id, and each peer's credentials (see
    CredentialSettings). Keys of a former run in the same folder are replaced. The owner's private key is
    saved in the same folder: `gossamer revoke` needs it to exclude a peer while the swarm runs.
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
                owner, swarm, identity.label, identity.public, models={*models, *patterns}
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
