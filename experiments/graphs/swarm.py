"""The graph of a swarm: a config's `topology` or a GRAPH of the command line, bridged if asked.

Live peers and the arena both read it here, so that one config means one graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import networkx as nx

from ...peer import PlaceSettings
from ...topology import (
    BUILDERS,
    SCHEDULES,
    Bridging,
    Members,
    Pace,
    Rule,
    Schedule,
    Spec,
    TopologyError,
    bridge,
    bridged,
    build,
    build_schedule,
    has_weights,
    parse,
    predict_pace,
    require_connected,
    require_models_connected,
    static,
)
from ..cli import console
from ..config.tables import Config, ConfigError, load_config

if TYPE_CHECKING:
    from ..arena import Gossip


PUSHES: int = PlaceSettings.model_fields["exchanges"].default
"""Pushes of an async peer after each round, unless told otherwise."""

WINDOW = 64
"""Steps over which a schedule without a period is judged."""

PEERS = 16
"""Peers of a graph that could have any number, unless told otherwise."""

GROUP_KEYS = ("group", "club", "community", "block")
"""Node attributes that are taken for groups, the first that a graph has."""

NOTHING_ADDED = Bridging((), True)


@dataclass(frozen=True)
class SwarmGraph:
    """Who may talk to whom in one swarm.

    `graph` holds all links of one period where `changing` says who talks to whom when. `models` are the
    peers of each shared partial model, where known; `added` lists the links that bridging brought; `rule`
    is the one that a swarm on it runs.
    """

    name: str
    graph: nx.Graph
    changing: Schedule | None = None
    models: Members = field(default_factory=dict)
    added: Bridging = NOTHING_ADDED
    rule: Rule = "push"

    @cached_property
    def schedule(self) -> Schedule:
        """The graph of every step."""
        return self.changing or static(self.graph)

    @property
    def steps(self) -> int:
        """After how many steps the graphs repeat, or how many are taken for all if they never do."""
        return self.schedule.period or WINDOW

    @property
    def labels(self) -> dict[int, str]:
        """What peers are called: by a file or a function; nothing for those who are not."""
        return {
            peer: str(name) for peer, name in self.graph.nodes(data="label") if name is not None
        }

    def messages(self) -> float:
        """Messages of the whole swarm in one exchange, on the average over all steps."""
        graphs = [self.schedule.graph(step) for step in range(self.steps)]
        return sum(g.number_of_edges() * (1 if g.is_directed() else 2) for g in graphs) / self.steps

    def pace(self, rule: Rule | None = None, tolerance: float = 1e-6) -> Pace:
        """Predict how fast everybody agrees; rule: the swarm's own if left out."""
        return predict_pace(self.schedule, rule or self.rule, tolerance, self.steps)

    def exchanges(self, config: Config, tolerance: float | None = None) -> int:
        """Exchanges per averaging: the config's, else what the slowest model's spectrum predicts.

        tolerance: the config's own if left out.
        """
        if config.gossip.exchanges is not None:
            return config.gossip.exchanges
        if config.gossip.mode == "async":
            return PUSHES
        tolerance = tolerance or config.gossip.tolerance
        paces = (
            predict_pace(self.schedule.restricted_to(who), self.rule, tolerance, self.steps)
            for who in self.models.values()
        )
        most = max((pace.exchanges for pace in paces), default=1.0)
        if not isfinite(most):
            raise TopologyError(
                f"peers never come to {tolerance:g} of their disagreement on this graph under the rule "
                f"{self.rule}: say how many exchanges to make, by exchanges in [gossip]"
            )
        return ceil(most)


def swarm_graph(config: Config, models: Members, source: str = "config") -> SwarmGraph | None:
    """The graph that `topology` names, or None. `models` says which peers share which partial model.

    Every model must be connected on it (a schedule's over one period), or is bridged if `bridge` is
    set; errors name the file, the key and the peers. Files and modules may stand beside the config.
    """
    if config.topology is None:
        if config.gossip.rule != "push":
            raise ConfigError(
                f"{source}: key 'gossip.rule': there is no 'topology' over whose links peers would give"
            )
        if config.bridge:
            raise ConfigError(f"{source}: key 'bridge': there is no 'topology' to add links to")
        return None
    if config.gossip.mode == "server":
        raise ConfigError(
            f"{source}: key 'topology': in server mode every peer talks to the servers alone; leave it out"
        )
    folder = Path(source).parent
    with _error_context(source, "topology"), beside(folder):
        found = _swarm_graph(config, complete_path(config.topology, folder), models)
    if config.gossip.rule != "push":
        with _error_context(source, "gossip.rule"):
            _check_rule(found)
    return found


@contextmanager
def _error_context(source: str, key: str) -> Iterator[None]:
    """Graphs know nothing of configs: say in one line which file and key an error comes from."""
    try:
        yield
    except TopologyError as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{source}: key {key!r}: {line}") from None


def _check_rule(found: SwarmGraph) -> None:
    rule = found.rule
    if rule == "edges" and found.added.edges:
        raise TopologyError(
            "links that bridging adds have no weight; add them to the graph yourself: "
            + name_links(found.added.edges)
        )
    if found.changing:
        found.changing.matrix(0, rule)  # steps are alike: a rule fits all of them or none
    else:
        require_models_connected(found.graph, found.models, rule)


def mixing_of(config: Config, models: Members, source: str = "config") -> Gossip | None:
    """How the arena averages on the config's topology: `Arena(learners, mixing=…)`; None: exactly.

    The exchanges of one averaging are those of live peers in `rounds` mode, shares included, so that
    the arena and a live swarm compute the same. For `async`, as many synchronous ones as a live peer
    makes pushes stand in. Links that bridging added are listed on the terminal.
    """
    from ..arena import Gossip  # torch: only for those who run it

    found = swarm_graph(config, models, source)
    if found is None:
        return None
    print_graph_notes(found, 'in lockstep gossip.rule = "edges" takes them for shares')
    with _error_context(source, "gossip.rule"):
        count = found.exchanges(config)
        return Gossip(found.changing or found.graph, rule=found.rule, exchanges=count)


def print_graph_notes(
    graph: SwarmGraph, hint: str = "", *, rule: Rule | None = None, named: bool = False
) -> None:
    """Print which links bridging added, and a note if the graph has link weights that are not used.

    hint: how the weights could be used. rule: the swarm's own if left out. named: begin each line with the
        graph's name.
    """
    rule, lines = rule or graph.rule, []
    if graph.added.edges:
        lines.append(describe_bridging(graph.added, graph.labels))
    if not graph.changing and rule != "edges" and has_weights(graph.graph):
        given = "peers give equal parts" if rule == "push" else f"peers give by the rule {rule}"
        line = f"weights on the topology's links are not used: {given}"
        lines.append(f"{line}; {hint}" if hint else line)
    for line in lines:
        console.say(f"{graph.name}: {line}" if named else line)


def describe_bridging(added: Bridging, labels: Mapping[int, str] | None = None) -> str:
    """One line: which links were added, and whether fewer could do."""
    links = name_links(added.edges, labels, limit=len(added.edges))
    count = f"{len(added.edges)} link{'s' * (len(added.edges) != 1)}"
    proof = "the fewest that do" if added.least else "perhaps not the fewest: too many to try"
    return f"bridged: {count} added to join torn partial models ({proof}): {links}"


def complete_path(spec: Spec, folder: Path) -> Spec:
    """The spec with a file's path completed when the file stands in `folder`."""
    if isinstance(spec, str):
        spec = spec.strip()
    if not isinstance(spec, str | Mapping):
        return spec
    kind, parameters = parse(spec)
    path = parameters.get("path")
    if kind == "file" and isinstance(path, str) and (folder / path).is_file():
        return {"kind": "file", **parameters, "path": str(folder / path)}
    return spec


@contextmanager
def beside(folder: Path) -> Iterator[None]:
    """Let a `module:function` be imported from `folder` or from where the command was started."""
    added = [str(folder.resolve()), str(Path.cwd())]
    sys.path[:0] = added
    try:
        yield
    finally:
        for path in added:
            sys.path.remove(path)


def _swarm_graph(config: Config, spec: Spec, models: Members) -> SwarmGraph:
    kind = "" if isinstance(spec, nx.Graph | Path) else parse(spec)[0]
    if kind in SCHEDULES:
        if config.bridge:
            raise TopologyError(f"{kind} changes over time: it cannot be bridged; drop 'bridge'")
        found = _changing(config.name, build_schedule(spec, config.peers, config.seed))
        require_models_connected(found.graph, models)
    else:
        graph, added = _bridged(build(spec, config.peers, config.seed), models, config.bridge)
        try:
            require_models_connected(graph, models)
        except TopologyError as error:
            raise TopologyError(f"{error}, and bridge = true adds them") from None
        found = SwarmGraph(config.name, graph, added=added)
    return replace(found, models=models, rule=config.gossip.rule)


def _changing(name: str, schedule: Schedule) -> SwarmGraph:
    return SwarmGraph(name, schedule.union(0, schedule.period or WINDOW), schedule)


def _bridged(graph: nx.Graph, models: Members, wanted: bool) -> tuple[nx.Graph, Bridging]:
    added = bridge(graph, models) if wanted else NOTHING_ADDED
    return (bridged(graph, added) if added.edges else graph), added


def name_links(
    links: Iterable[tuple[int, int]], labels: Mapping[int, str] | None = None, limit: int = 8
) -> str:
    """Write links for a table: `0–4, 3–7`, or the first few and how many follow.

    labels: what peers are called, where they are called something.
    """
    known, called = sorted(links), labels or {}
    more = f", … {len(known) - limit} more" if len(known) > limit else ""
    return ", ".join(f"{called.get(u, u)}–{called.get(v, v)}" for u, v in known[:limit]) + more


# --- a GRAPH of the command line --------------------------------------------------------------------


def load_graph(
    text: str,
    peers: int | None = None,
    *,
    seed: int = 0,
    bridging: bool = False,
    whole: bool = True,
) -> SwarmGraph:
    """The graph that `text` names: `regular:4`, `club.graphml`, `networkx:karate_club_graph`, a config.

    A builder makes `peers` peers (16 if left out); files, functions without such a parameter and
    configs bring their own number. A graph in parts is an error, or bridged, unless `whole` is off.
    """
    if text.endswith(".toml"):
        found = _from_config(Path(text))
    elif (kind := parse(text)[0]) in SCHEDULES:
        found = _changing(text, build_schedule(text, peers or PEERS, seed))
    else:
        with beside(Path.cwd()):
            graph = build(text, (peers or PEERS) if kind in BUILDERS else peers, seed)
        graph, added = _bridged(graph, {"everybody": list(graph)}, bridging)
        name = Path(text.removeprefix("file:")).name if kind == "file" else text
        if whole:
            try:
                require_connected(graph, name)
            except TopologyError as error:
                raise TopologyError(f"{error} (--bridge)") from None
        found = SwarmGraph(name, graph, added=added)
    if len(found.graph) < 2:  # nothing to average, and nothing to say about it
        raise TopologyError(f"{found.name}: a swarm has at least 2 peers, not {len(found.graph)}")
    return found


def _from_config(path: Path) -> SwarmGraph:
    from ..build import Swarm, shared_models  # torch: only for those who bring a config

    config = load_config(path)
    models = shared_models(Swarm(config, str(path)).members())
    found = swarm_graph(config, models, str(path))
    if found is None:  # no topology: everybody may talk to everybody
        return SwarmGraph(config.name, build("clique", config.peers), models=models)
    return found


def groups_of(found: SwarmGraph, key: str | None = None) -> dict[int, str]:
    """Each peer's group: by a node attribute, or by the semi-local models that it implements."""
    graph = found.graph
    for name in [key] if key else GROUP_KEYS:
        if any(name in data for _, data in graph.nodes(data=True)):
            return {peer: str(graph.nodes[peer].get(name, "none")) for peer in graph}
    models: Mapping[int, list[str]] = {peer: [] for peer in graph}
    for model, who in found.models.items():
        if len(set(who)) < len(graph):
            for peer in who:
                models[peer].append(model)
    if not any(models.values()):
        return {}
    return {peer: " + ".join(own) or "no group" for peer, own in models.items()}


def graph_of(config: Config, models: Members, source: str = "config") -> nx.Graph | None:
    """Return the config's topology; None if it has none. Raises if a shared model is not connected on it.

    Prints links that were added to keep models connected. Also None for a topology that changes over time.
    """
    topology = swarm_graph(config, models, source)
    if topology is None:
        return None
    print_graph_notes(topology)
    return None if topology.changing else topology.graph
