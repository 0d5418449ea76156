"""A GRAPH of the command line: a builder, a file, a function, a schedule or a whole config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import networkx as nx

from ...topology import (
    BUILDERS,
    SCHEDULES,
    Bridging,
    Members,
    Rule,
    Schedule,
    TopologyError,
    bridge,
    bridged,
    build,
    build_schedule,
    parse,
    static,
)
from ..config.tables import load_config
from .swarm import WINDOW, beside, require_whole, swarm_graph

PEERS = 16
"""Peers of a graph that could have any number, unless told otherwise."""

GROUP_KEYS = ("group", "club", "community", "block")
"""Node attributes that are taken for groups, the first that a graph has."""

NOTHING_ADDED = Bridging((), True)


@dataclass(frozen=True)
class Given:
    """A graph to look at. `graph` holds all links of one period when `schedule` changes over time.

    `rule` is the one that a swarm on it runs: a config's own, else push.
    """

    name: str
    graph: nx.Graph
    schedule: Schedule
    changes: bool = False
    models: Members = field(default_factory=dict)
    added: Bridging = NOTHING_ADDED
    rule: Rule = "push"

    @property
    def labels(self) -> dict[int, str]:
        """What peers are called: by a file or a function; nothing for those who are not."""
        return {
            peer: str(name) for peer, name in self.graph.nodes(data="label") if name is not None
        }

    @property
    def window(self) -> int:
        """Steps over which the schedule is judged: its period, if it has one."""
        return self.schedule.period or WINDOW

    def messages(self) -> float:
        """Messages of the whole swarm in one exchange, on the average over the window."""
        if not self.changes:
            return _messages(self.graph)
        return sum(_messages(self.schedule.graph(t)) for t in range(self.window)) / self.window


def _messages(graph: nx.Graph) -> int:
    return graph.number_of_edges() * (1 if graph.is_directed() else 2)


def take(
    text: str,
    peers: int | None = None,
    *,
    seed: int = 0,
    bridging: bool = False,
    whole: bool = True,
) -> Given:
    """The graph that `text` names: `regular:4`, `club.graphml`, `networkx:karate_club_graph`, a config.

    A builder makes `peers` peers (16 if left out); files, functions without such a parameter and
    configs bring their own number. A graph in parts is an error, or bridged, unless `whole` is off.
    """
    given = _take(text, peers, seed, bridging, whole)
    if len(given.graph) < 2:  # nothing to average, and nothing to say about it
        raise TopologyError(f"{given.name}: a swarm has at least 2 peers, not {len(given.graph)}")
    return given


def _take(text: str, peers: int | None, seed: int, bridging: bool, whole: bool) -> Given:
    if text.endswith(".toml"):
        return _from_config(Path(text))
    kind, _ = parse(text)
    if kind in SCHEDULES:
        schedule = build_schedule(text, peers or PEERS, seed)
        union = schedule.union(0, schedule.period or WINDOW)
        return Given(text, union, schedule, changes=True)
    with beside(Path.cwd()):
        graph = build(text, (peers or PEERS) if kind in BUILDERS else peers, seed)
    added = bridge(graph, {"everybody": list(graph)}) if bridging else NOTHING_ADDED
    graph = bridged(graph, added) if added.edges else graph
    name = Path(text.removeprefix("file:")).name if kind == "file" else text
    if whole:
        require_whole(graph, name)
    return Given(name, graph, static(graph), added=added)


def _from_config(path: Path) -> Given:
    from ..build import Swarm  # torch: only for those who bring a config
    from ..live import shared_owners

    config = load_config(path)
    models = shared_owners(Swarm(config, str(path)).members())
    found = swarm_graph(config, models, str(path))
    if found is None:  # no topology: everybody may talk to everybody
        graph = build("clique", config.peers)
        return Given(config.name, graph, static(graph), models=models)
    if found.graph is None:
        union = found.schedule.union(0, found.schedule.period or WINDOW)
        graph, changes = union, True
    else:
        graph, changes = found.graph, False
    return Given(
        config.name, graph, found.schedule, changes, models, found.added, config.gossip.rule
    )


def groups_of(given: Given, key: str | None = None) -> dict[int, str]:
    """Each peer's group: by a node attribute, or by the semi-local models that it implements."""
    graph = given.graph
    for name in [key] if key else GROUP_KEYS:
        if any(name in data for _, data in graph.nodes(data=True)):
            return {peer: str(graph.nodes[peer].get(name, "none")) for peer in graph}
    found: Mapping[int, list[str]] = {peer: [] for peer in graph}
    for model, who in given.models.items():
        if len(set(who)) < len(graph):
            for peer in who:
                found[peer].append(model)
    if not any(found.values()):
        return {}
    return {peer: " + ".join(models) or "no group" for peer, models in found.items()}
