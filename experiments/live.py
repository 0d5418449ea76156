"""From a config to a live swarm: which peer talks to whom, who serves what, what runs where."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import networkx as nx

from ..gossip.compress import CompressError
from ..gossip.compress import parse as parse_compressor
from ..models import implementers
from ..peer.compression import blocks
from ..peer.host import BrokerAddress, PeerSpec
from ..peer.settings import Settings
from ..peer.store import schema_entries
from ..peer.swarm import SwarmSpec
from ..topology import Bridging, static
from .build import Member, Swarm
from .config import Config, ConfigError
from .config_matching import starts_apart, without_networks
from .config_needs import heed
from .graphs.swarm import PUSHES, SwarmGraph, require_push, swarm_graph, tell
from .swarm_papers import make_papers


def plan(config: Config, folder: Path, broker: BrokerAddress, source: str = "config") -> SwarmSpec:
    """Lay out a config's swarm; everything that can be wrong with it is found before it starts.

    With trust the peers' keys and invitations are made, in the folder's `trust`.
    """
    require_push(config, source, "live peers", "run it in the arena with gossamer simulate")
    heed(config, "live", source)
    swarm = Swarm(config, source)
    members = swarm.members()
    owners = shared_owners(members)
    _check_founder(config, swarm, owners)
    found = swarm_graph(config, owners, source)
    if found is not None:
        tell(found)
        if found.graph is None and config.gossip.mode != "async":
            raise ConfigError(
                f"{source}: key 'topology': this one changes over time, which live peers follow in async "
                "mode only; name one graph, or run it in the arena with gossamer simulate"
            )
    graph = None if found is None else found.union()
    names = tuple(member.name for member in members)
    _check_private(config, owners, source)
    check_compression(config, members, owners, source)
    papers = None
    if config.trust.kind == "swarm":
        papers = make_papers(folder / "trust", swarm_name(config), members)
        names = papers.names
    servers = {
        owner: names[who[place % len(who)]] for place, (owner, who) in enumerate(owners.items())
    }
    text = json.dumps(without_networks(config).model_dump(mode="json"))
    # Of peers with values of their own the first one gives the order, into which the others come.
    apart = starts_apart(config)
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
            compress=gossip.compress,
            drift=gossip.drift,
            neighbours=neighbours,
            sources=sources,
            turns=_turns(found, names, index),
            servers=servers,
            expect=names,
            founder=index == 0 or not apart,
            trained=apart,
            matching=swarm.matching(index),
            settle_tolerance=gossip.settle_tolerance,
            lease=gossip.lease,
            start_timeout=gossip.start_timeout,
            settle_timeout=gossip.settle_timeout,
            leave_timeout=gossip.leave_timeout,
            trust=config.trust.kind,
            identity=papers and papers.key(member.name),
            invitation=papers and papers.invitation(member.name),
            owner=papers and papers.owner,
            guards=config.trust.guards,
            private=config.trust.private,
            dp=config.trust.dp,
        )
        peers.append(
            PeerSpec(
                member.name,
                "gossamer.experiments.entry:make_learner",
                {"config": text, "index": index, "source": str(Path(source).resolve())},
                settings,
                samples=member.samples,
                seed=index,
                checkpoint=gossip.checkpoint,
                network=_text(swarm.trained_file(index)),
            )
        )
    if broker.max_packet is None:
        broker = replace(broker, max_packet=gossip.max_packet)
    if broker.keepalive is None:
        broker = replace(broker, keepalive=gossip.keepalive)
    return SwarmSpec(swarm_name(config), broker, folder, peers, gossip.per_process)


def _check_founder(config: Config, swarm: Swarm, owners: dict[str, list[int]]) -> None:
    """Peers with values of their own need one whose order the others take over, in every model."""
    if not starts_apart(config):
        return
    if config.gossip.mode != "async":
        raise ConfigError(
            f"{swarm.source}: key 'gossip.mode': peers with values of their own are matched as they come in, "
            "which only async mode allows"
        )
    for owner, who in owners.items():
        if who[0] != 0:
            raise ConfigError(
                f"{swarm.source}: key 'models': peer 0 gives the order of cells that the others take over, "
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
    return found.graph


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
    if found is None or found.graph is not None:
        return ()
    graphs = (found.schedule.graph(step) for step in range(found.steps))
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
    unknown = sorted(set(gossip.drift if isinstance(gossip.drift, dict) else ()) - set(owners))
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


def _exchanges(config: Config, graph: nx.Graph | None, owners: dict[str, list[int]]) -> int:
    """How many exchanges an averaging needs. Masks start values farther apart, by their scale."""
    if config.trust.private and config.gossip.exchanges is None:
        farther = 10 * max(config.trust.private.values()) * math.sqrt(config.peers)
        tolerance = config.gossip.tolerance / max(farther, 1.0)
        gossip = config.gossip.model_copy(update={"tolerance": tolerance})
        config = config.model_copy(update={"gossip": gossip})
    if graph is not None:
        return SwarmGraph(static(graph), graph, Bridging((), True)).count(config, owners)
    # everybody gives everybody an equal part: the mean, at once
    return PUSHES if config.gossip.mode == "async" else 1
