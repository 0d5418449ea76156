"""Builds the graph of a swarm from a config's `topology` or from a GRAPH argument of the command line.

Live peers and the arena both use this module. So a config has the same graph in both, and neither begins to
train if the config has keys or a graph that steady gossip or robust means cannot use (`gossip/robust.py`).
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

from gossamer.errors import hint

from ...gossip import FANOUT, needed_neighbours, tolerated
from ...peer import NeighbourSettings
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
    links_to_add,
    parse,
    predict_pace,
    require_connected,
    require_models_connected,
    static,
)
from ..cli import console
from ..config.needs import refuse_conflicts
from ..config.tables import Config, ConfigError, load_config

if TYPE_CHECKING:
    from ..arena import Gossip
    from ..build import Member


DEFAULT_PUSHES: int = NeighbourSettings.model_fields["exchanges"].default
"""Pushes of an async peer after each round if the config has no `exchanges`."""


def pushes_of(config: Config) -> int:
    """Return how many neighbours a peer sends to after a round in async and steady mode."""
    return config.gossip.exchanges or (FANOUT if config.gossip.mode == "steady" else DEFAULT_PUSHES)


MAX_STEPS = 64
"""How many steps of a schedule that never repeats are used for the union of their graphs, and measured."""

DEFAULT_PEERS = 16
"""Peers of a graph that is built here, such as a ring, if no number is given."""

GROUP_KEYS = ("group", "club", "community", "block")
"""Node attributes that name a peer's group; the first that a graph has is used."""

NO_LINKS_ADDED = Bridging((), is_smallest=True)


@dataclass(frozen=True)
class SwarmGraph:
    """The links between the peers of one swarm.

    graph: all links; of a topology that changes over time, the links of one period together.
    changing: the graph of every step of a topology that changes over time; None for a fixed graph.
    models: the peers of each shared partial model, if known.
    added: links that were added to connect partial models' peers (`bridge` in a config).
    rule: how a peer divides what it sends: `push`, in equal shares; else by the links' weights.
    rule_is_set: whether a config names the rule, rather than having the default.
    """

    name: str
    graph: nx.Graph
    changing: Schedule | None = None
    models: Members = field(default_factory=dict)
    added: Bridging = NO_LINKS_ADDED
    rule: Rule = "push"
    rule_is_set: bool = False

    @cached_property
    def schedule(self) -> Schedule:
        """The graph of every step."""
        return self.changing or static(self.graph)

    @property
    def steps(self) -> int:
        """The number of steps after which the graphs repeat; MAX_STEPS if they never do."""
        return self.schedule.period or MAX_STEPS

    @property
    def labels(self) -> dict[int, str]:
        """The labels of peers that have one, as graphs from files and from networkx may give them."""
        return {
            peer: str(name) for peer, name in self.graph.nodes(data="label") if name is not None
        }

    def messages(self) -> float:
        """Return how many messages all peers together send in one exchange, on average over all steps."""
        graphs = [self.schedule.graph(step) for step in range(self.steps)]
        return sum(g.number_of_edges() * (1 if g.is_directed() else 2) for g in graphs) / self.steps

    def pace(self, rule: Rule | None = None, tolerance: float = 1e-6) -> Pace:
        """Predict how fast all peers agree; rule: the swarm's rule if left out."""
        return predict_pace(self.schedule, rule or self.rule, tolerance, self.steps)

    def exchanges(self, config: Config, tolerance: float | None = None) -> int:
        """Return the number of exchanges per averaging: the config's, or as predicted for the slowest model.

        tolerance: by default that of the config. Raises TopologyError if peers on this graph never agree.
        """
        if config.gossip.exchanges is not None:
            return config.gossip.exchanges
        if config.gossip.paced:
            return pushes_of(config)
        tolerance = tolerance or config.gossip.tolerance
        paces = (
            predict_pace(self.schedule.restricted_to(peers), self.rule, tolerance, self.steps)
            for peers in self.models.values()
        )
        exchanges = max((pace.exchanges for pace in paces), default=1.0)
        if not isfinite(exchanges):
            raise TopologyError(
                f"with the rule {self.rule} the peers' disagreement on this graph never falls to "
                f"{tolerance:g} of its first value: set the number of exchanges, by exchanges in [gossip]"
            )
        return ceil(exchanges)


def swarm_graph(config: Config, models: Members, source: str = "config") -> SwarmGraph | None:
    """Build the graph that the config's `topology` names; None if it names none.

    models: the peers of each shared partial model. On the graph (over one period, if it changes) the peers of
    every model must be connected; with `bridge` set, links are added until they are.
    source: the config's file, which errors name with the key and the peers. Files and modules that `topology`
        names may be in its folder.
    """
    if config.topology is None:
        if config.gossip.rule != "push":
            raise ConfigError(
                f"{source}: key 'gossip.rule': there is no 'topology' whose links it could weight"
            )
        if config.bridge:
            raise ConfigError(f"{source}: key 'bridge': there is no 'topology' to add links to")
        return None
    if config.gossip.mode == "server":
        raise ConfigError(
            f"{source}: key 'topology': in server mode peers exchange only with servers; leave it out"
        )
    folder = Path(source).parent
    with _error_context(source, "topology"), importing_from(folder):
        topology = _swarm_graph(config, complete_path(config.topology, folder), models)
    if config.gossip.rule != "push":
        with _error_context(source, "gossip.rule"):
            _check_rule(topology)
    return topology


@contextmanager
def _error_context(source: str, key: str) -> Iterator[None]:
    """Turn a TopologyError into a one-line ConfigError that names the config's file and key."""
    try:
        yield
    except TopologyError as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{source}: key {key!r}: {line}") from None


def _check_rule(topology: SwarmGraph) -> None:
    """Raise TopologyError if the rule cannot be used on the graph."""
    rule = topology.rule
    if rule == "edges" and topology.added.edges:
        raise TopologyError(
            "links that bridging adds have no weight; add them to the graph yourself: "
            + name_links(topology.added.edges)
        )
    if topology.changing:
        topology.changing.matrix(0, rule)  # a rule works for all steps of a schedule or for none
    else:
        require_models_connected(topology.graph, topology.models, rule)


def mixing_of(config: Config, models: Members, source: str = "config") -> Gossip | None:
    """Return how the arena averages on the config's topology, for `Arena(learners, mixing=…)`.

    None, if the config has no topology, means exact averages. The exchanges of one averaging and the shares
    that peers send are those of live peers in `rounds` mode, so that the arena and a live swarm compute the
    same. For mode `async`, the arena makes as many synchronous exchanges as a live peer makes pushes. Links
    that bridging added are listed on the terminal.
    """
    from ..arena import Gossip  # imports torch, which other callers do not need

    topology = swarm_graph(config, models, source)
    if topology is None:
        return None
    print_graph_notes(topology, 'in lockstep gossip.rule = "edges" uses them as shares')
    with _error_context(source, "gossip.rule"):
        count = topology.exchanges(config)
        return Gossip(topology.changing or topology.graph, rule=topology.rule, exchanges=count)


def print_graph_notes(
    graph: SwarmGraph, hint: str = "", *, rule: Rule | None = None, named: bool = False
) -> None:
    """Print which links bridging added, and a note if the graph has link weights that are not used.

    There is no such note if the config names the rule: not to use the weights is then its author's choice.

    hint: how the weights could be used. rule: the swarm's rule if left out. named: whether each line begins
        with the graph's name.
    """
    is_chosen = rule is None and graph.rule_is_set
    rule = rule or graph.rule
    lines: list[str] = []
    if graph.added.edges:
        lines.append(describe_bridging(graph.added, graph.labels))
    unused = not graph.changing and rule != "edges" and has_weights(graph.graph)
    if unused and not is_chosen:
        shares = "equal shares" if rule == "push" else f"shares by the rule {rule}"
        line = f"weights on the topology's links are not used: peers send {shares}"
        lines.append(f"{line}; {hint}" if hint else line)
    for line in lines:
        console.say(f"{graph.name}: {line}" if named else line)


def describe_bridging(added: Bridging, labels: Mapping[int, str] | None = None) -> str:
    """Return a line that says which links bridging added, and whether they are the fewest possible."""
    links = name_links(added.edges, labels, limit=len(added.edges))
    count = f"{len(added.edges)} link{'s' * (len(added.edges) != 1)}"
    note = "the fewest possible" if added.is_smallest else "perhaps not the fewest: too many to try"
    return f"bridged: {count} added to {added.purpose} ({note}): {links}"


def complete_path(spec: Spec, folder: Path) -> Spec:
    """Return the spec, with the folder added to a file's path if the file is in that folder."""
    if isinstance(spec, str):
        spec = spec.strip()
    if not isinstance(spec, str | Mapping):
        return spec
    builder, parameters = parse(spec)
    path = parameters.get("path")
    if builder == "file" and isinstance(path, str) and (folder / path).is_file():
        return {"kind": "file", **parameters, "path": str(folder / path)}
    return spec


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Return a context in which modules can be imported from `folder` and from the working directory."""
    paths = [str(folder.resolve()), str(Path.cwd())]
    sys.path[:0] = paths
    try:
        yield
    finally:
        for path in paths:
            sys.path.remove(path)


def _swarm_graph(config: Config, spec: Spec, models: Members) -> SwarmGraph:
    """Return the graph of a spec, as `swarm_graph` describes it; TopologyError if the config forbids it."""
    builder = "" if isinstance(spec, nx.Graph | Path) else parse(spec)[0]
    steady = config.gossip.mode == "steady"
    if builder in SCHEDULES:
        if steady:
            raise TopologyError(
                "not with gossip.mode = 'steady': neighbours change before they are known well enough to be "
                "judged; name a graph that does not change"
            )
        if config.bridge:
            raise TopologyError(
                f"{builder} changes over time, so no links can be added to it; leave out 'bridge'"
            )
        topology = _from_schedule(config.name, build_schedule(spec, config.peers, config.seed))
        require_models_connected(topology.graph, models)
    else:
        graph = build(spec, config.peers, config.seed)
        if steady and graph.is_directed():
            raise TopologyError(
                "not with gossip.mode = 'steady': on a directed graph a peer cannot choose whom it listens "
                "to; name an undirected one"
            )
        graph, added = _bridge_if_asked(graph, models, config.bridge)
        if config.bridge and steady:
            needed = needed_neighbours(config.gossip.hostile)
            links = links_to_add(graph, models or {"": range(config.peers)}, needed)
            purpose = f"give every peer {needed} neighbours"
            added = Bridging((*added.edges, *links), False, purpose) if links else added
            graph = bridged(graph, added)
        try:
            require_models_connected(graph, models)
        except TopologyError as error:
            raise TopologyError(f"{error}; bridge = true in the config adds links") from None
        topology = SwarmGraph(config.name, graph, added=added)
    is_set = "rule" in config.gossip.model_fields_set
    return replace(topology, models=models, rule=config.gossip.rule, rule_is_set=is_set)


def _from_schedule(name: str, schedule: Schedule) -> SwarmGraph:
    """Return the graph of a topology that changes over time."""
    return SwarmGraph(name, schedule.union(0, schedule.period or MAX_STEPS), schedule)


def _bridge_if_asked(graph: nx.Graph, models: Members, bridging: bool) -> tuple[nx.Graph, Bridging]:
    """Return the graph and the links added to it so that every model's peers are connected, if `bridging`."""
    added = bridge(graph, models) if bridging else NO_LINKS_ADDED
    return (bridged(graph, added) if added.edges else graph), added


def name_links(
    links: Iterable[tuple[int, int]], labels: Mapping[int, str] | None = None, limit: int = 8
) -> str:
    """Return links as text for a table or message: `0–4, 3–7`; at most `limit`, and how many more there are.

    labels: the labels of peers that have one; other peers are numbered.
    """
    ordered, names = sorted(links), labels or {}
    shown = ", ".join(f"{names.get(u, u)}–{names.get(v, v)}" for u, v in ordered[:limit])
    more = f", … {len(ordered) - limit} more" if len(ordered) > limit else ""
    return shown + more


# --- the GRAPH argument of the command line ---------------------------------------------------------


def load_graph(
    text: str,
    peers: int | None = None,
    *,
    seed: int = 0,
    bridging: bool = False,
    check_connected: bool = True,
) -> SwarmGraph:
    """Return the graph that `text` names.

    text: as `topology` in a config (`regular:4`, `club.graphml`, `networkx:karate_club_graph`), or the path
        of a config (`swarm.toml`).
    peers: the number of peers that a builder makes (16 if left out); files, functions without such a
        parameter and configs determine their own number.
    bridging: whether links are added to connect a disconnected graph.
    check_connected: whether a disconnected graph raises TopologyError.
    """
    if text.endswith(".toml"):
        topology = _from_config(Path(text))
        if peers not in (None, count := len(topology.graph)):
            raise TopologyError(f"{text}: has {count} peers, not {peers}")
    elif (builder := parse(text)[0]) in SCHEDULES:
        topology = _from_schedule(text, build_schedule(text, peers or DEFAULT_PEERS, seed))
    else:
        with importing_from(Path.cwd()):
            graph = build(text, (peers or DEFAULT_PEERS) if builder in BUILDERS else peers, seed)
        graph, added = _bridge_if_asked(graph, {"everybody": list(graph)}, bridging)
        name = Path(text.removeprefix("file:")).name if builder == "file" else text
        if check_connected:
            try:
                require_connected(graph, name)
            except TopologyError as error:
                raise TopologyError(f"{error}; with this command: --bridge") from None
        topology = SwarmGraph(name, graph, added=added)
    if (count := len(topology.graph)) < 2:
        raise TopologyError(f"{topology.name}: a swarm has at least 2 peers, not {count}")
    return topology


def _from_config(path: Path) -> SwarmGraph:
    """Return the graph of a swarm's config file."""
    from ..build import Swarm, shared_models  # imports torch, which other graphs do not need

    config = load_config(path)
    models = shared_models(Swarm(config, str(path)).members())
    topology = swarm_graph(config, models, str(path))
    if topology is None:  # without a topology every peer may gossip with every other
        return SwarmGraph(config.name, build("clique", config.peers), models=models)
    return topology


def groups_of(topology: SwarmGraph, key: str | None = None) -> dict[int, str]:
    """Return each peer's group: by a node attribute, or by the semi-local models that it has.

    The result is empty if there are no groups.

    key: the node attribute; if left out, the first of GROUP_KEYS that some peer has.
    """
    graph = topology.graph
    for name in [key] if key else GROUP_KEYS:
        if any(name in data for _, data in graph.nodes(data=True)):
            return {peer: str(graph.nodes[peer].get(name, "none")) for peer in graph}
    if key:
        known = {name: None for _, data in graph.nodes(data=True) for name in data}
        raise TopologyError(
            f"{topology.name}: no peer has the attribute {key!r}; {hint(key, known, are='there are')}"
        )
    semi_local: Mapping[int, list[str]] = {peer: [] for peer in graph}
    for model, peers in topology.models.items():
        if len(set(peers)) < len(graph):
            for peer in peers:
                semi_local[peer].append(model)
    if not any(semi_local.values()):
        return {}
    return {peer: " + ".join(models) or "no group" for peer, models in semi_local.items()}


def push_graph(config: Config, members: list[Member], source: str = "config") -> nx.Graph:
    """Return the graph on which peers push in virtual time or steady mode: complete without a topology.

    Raises ConfigError if the peers of a shared model are not connected. Prints links that bridging added.
    """
    from ..build import shared_models  # imports torch, which other graphs do not need

    if config.gossip.robust != "none":
        check_robust(config, source)
    models = shared_models(members)
    if config.gossip.mode == "steady":
        warn_without_score(members[0].learner, source)
        return steady_graph(config, models, source)
    remedy = "in virtual time; name one graph, and let links fail with [time.churn]"
    return fixed_graph(config, models, source, remedy)


def fixed_graph(config: Config, models: Members, source: str, remedy: str) -> nx.Graph:
    """Return the config's graph, complete without a topology; print notes on it.

    Raises ConfigError for a graph that changes over time; remedy: ends its message "… is not supported …".
    """
    topology = swarm_graph(config, models, source)
    if topology is None:
        return nx.complete_graph(config.peers)
    print_graph_notes(topology)
    if topology.changing:
        raise ConfigError(
            f"{source}: key 'topology': a graph that changes in steps is not supported {remedy}"
        )
    return topology.graph


# --- steady gossip and robust means: which keys and graphs suit them --------------------------------

MAX_NAMED = 8
"""The most peers that a message names."""


def steady_graph(config: Config, models: Members, source: str = "config") -> nx.Graph:
    """Return the graph on which peers exchange values; complete if the config has no topology.

    models: the peers of each shared partial model. Raises ConfigError for what steady gossip cannot do.
    """
    topology = swarm_graph(config, models, source)
    check_steady(config, topology, models, source)
    if topology is not None:
        print_graph_notes(topology)
    return nx.complete_graph(config.peers) if topology is None else topology.graph


def warn_without_score(learner: object, source: str) -> None:
    """Print a note if a config's learners cannot score values, as steady mode does; learner: one of them."""
    from ...models import Scorer  # loads torch, which drawing a graph does not need

    if not isinstance(learner, Scorer):
        console.warn(
            f"{source}: learners of this kind have no method score, so what another peer's value may change "
            "is limited by its distance from the own value alone, and not by its loss"
        )


def check_steady(
    config: Config, topology: SwarmGraph | None, models: Members, source: str = "config"
) -> None:
    """Raise ConfigError for keys, and for numbers of neighbours, that steady gossip cannot work with.

    With `gossip.hostile = "auto"`, peers with too few neighbours to withstand a hostile one are only named on
    the terminal. models: the peers of each shared partial model; if empty, all peers share one.
    """
    refuse_conflicts("steady", config, source)
    graph = nx.complete_graph(config.peers) if topology is None else topology.graph
    _check_neighbours(config, graph, models or {"": range(config.peers)}, source)


def check_robust(config: Config, source: str = "config") -> None:
    """Raise ConfigError for keys that do not go with `gossip.robust`."""
    if config.gossip.paced:
        raise ConfigError(
            f"{source}: key 'gossip.robust': it is for the modes rounds and server, not for "
            f"{config.gossip.mode!r}; leave one of them out"
        )
    refuse_conflicts("robust", config, source)


def _check_neighbours(config: Config, graph: nx.Graph, models: Members, source: str) -> None:
    """Raise ConfigError, or print a note, if peers have too few neighbours for `gossip.hostile`."""
    hostile = config.gossip.hostile
    needed = needed_neighbours(hostile)
    too_few = few_neighbours(graph, models, needed)
    if not too_few:
        return
    named = ", ".join(f"{peer} ({count})" for peer, count in list(too_few.items())[:MAX_NAMED])
    named += f" and {len(too_few) - MAX_NAMED} more" * (len(too_few) > MAX_NAMED)
    large_models = {model: peers for model, peers in models.items() if len(peers) > needed}
    remedies: list[str] = []
    if few_neighbours(graph, large_models, needed):
        command = f"gossamer topology advise --hostile {tolerated(hostile, 0)} --graph {source}"
        remedies.append(f"add links ({command} names them, bridge = true adds them)")
    if small_models := [model or "one model" for model in models.keys() - large_models.keys()]:
        remedies.append(f"let {needed + 1} or more peers share {', '.join(sorted(small_models))}")
    remedy = ", and ".join(remedies)
    if hostile == "auto":
        console.warn(
            f"{source}: peers with fewer than {needed} neighbours do not withstand a hostile one among them: "
            f"{named}; {remedy}"
        )
        return
    raise ConfigError(
        f"{source}: key 'gossip.hostile': to withstand {hostile} hostile neighbours a peer needs {needed}; "
        f"these have fewer: {named}; lower gossip.hostile, or {remedy}"
    )


def few_neighbours(graph: nx.Graph, models: Members, needed: int) -> dict[int, int]:
    """Return the peers that have fewer neighbours than needed in some partial model, and how many."""
    few: dict[int, int] = {}
    for peers in models.values():
        for peer, degree in nx.subgraph(graph, peers).degree:
            if degree < needed:
                few[peer] = min(degree, few[peer]) if peer in few else degree
    return dict(sorted(few.items()))
