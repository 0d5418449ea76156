"""From a config to a live swarm: which peer talks to whom, who serves what, what runs where."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import numpy as np

from ..models import implementers
from ..peer.host import BrokerAddress, PeerSpec
from ..peer.settings import Settings
from ..peer.swarm import SwarmSpec
from ..topology import (
    TopologyError,
    build,
    predicted_exchanges,
    require_models_connected,
    spectral_gap,
    uniform_push,
)
from .build import Member, Swarm
from .config import Config, ConfigError


def plan(config: Config, folder: Path, broker: BrokerAddress, source: str = "config") -> SwarmSpec:
    """Lay out a config's swarm; everything that can be wrong with it is found before it starts."""
    members = Swarm(config, source).members()
    owners = shared_owners(members)
    graph = graph_of(config, members, source)
    names = tuple(member.name for member in members)
    servers = {
        owner: members[who[place % len(who)]].name
        for place, (owner, who) in enumerate(owners.items())
    }
    text = json.dumps(config.model_dump(mode="json"))
    gossip = config.gossip
    peers = []
    for index, member in enumerate(members):
        neighbours, sources = _around(graph, names, index)
        settings = Settings(
            swarm=swarm_name(config),
            mode=gossip.mode,
            rounds=config.rounds,
            every=config.every,
            test_every=config.test_every,
            exchanges=gossip.exchanges or _exchanges(config, graph, owners),
            fraction=gossip.fraction,
            weigh=config.weights,
            dtype=gossip.dtype,
            neighbours=neighbours,
            sources=sources,
            servers=servers,
            expect=names,
            founder=True,
            settle_tolerance=gossip.settle_tolerance,
            lease=gossip.lease,
        )
        peers.append(
            PeerSpec(
                member.name,
                "gossamer.experiments.entry:make_learner",
                {"config": text, "index": index},
                settings,
                samples=member.samples,
                seed=index,
                checkpoint=gossip.checkpoint,
            )
        )
    return SwarmSpec(swarm_name(config), broker, folder, peers, gossip.per_process)


def swarm_name(config: Config) -> str:
    """The config's name as it may stand in a topic."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in config.name)[:64]


def shared_owners(members: list[Member]) -> dict[str, list[int]]:
    """Owners that more than one peer implements, with their peers."""
    found = implementers([member.network for member in members])
    return {owner: who for owner, who in found.items() if len(who) > 1}


def graph_of(config: Config, members: list[Member], source: str = "config") -> nx.Graph | None:
    """The config's topology, if it has one; every shared model must be connected on it."""
    if config.topology is None:
        return None
    try:
        graph = build(config.topology, config.peers, config.seed)
        require_models_connected(graph, shared_owners(members))
    except TopologyError as error:
        line = " ".join(str(error).split())  # one line, wherever it is shown
        raise ConfigError(f"{source}: key 'topology': {line}") from None
    if config.gossip.mode == "server":
        raise ConfigError(
            f"{source}: key 'topology': in server mode every peer talks to the servers alone; leave it out"
        )
    return graph


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


def _exchanges(config: Config, graph: nx.Graph | None, owners: dict[str, list[int]]) -> int:
    """How many exchanges an averaging needs: what the slowest model's spectrum predicts."""
    if config.gossip.mode == "async":
        return 2
    if graph is None or config.gossip.mode == "server":
        return 1  # everybody gives everybody an equal part: the mean, at once
    most = 1.0
    for who in owners.values():
        gap = spectral_gap(uniform_push(nx.convert_node_labels_to_integers(graph.subgraph(who))))
        most = max(most, predicted_exchanges(gap, config.gossip.tolerance))
    return int(np.ceil(most))
