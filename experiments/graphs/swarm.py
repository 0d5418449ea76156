"""A config's `topology`: the graph of a swarm, bridged if asked, and how each partial model mixes on it.

Live peers and the arena both read it here, so that one config means one graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from ...peer import PlaceSettings
from ...topology import (
    SCHEDULES,
    Bridging,
    Members,
    Rule,
    Schedule,
    Spec,
    TopologyError,
    bridge,
    bridged,
    build,
    build_schedule,
    mixing_matrix,
    parse,
    predicted_exchanges,
    require_connected,
    require_models_connected,
    schedule_rate,
    spectral_gap,
    static,
    weighted,
)
from ..cli import console
from ..config.tables import Config, ConfigError

if TYPE_CHECKING:
    from ..arena import Gossip


@dataclass(frozen=True)
class SwarmGraph:
    """Who may talk to whom in one swarm.

    `graph` is None when it changes over time; `added` lists the links that bridging brought.
    """

    schedule: Schedule
    graph: nx.Graph | None
    added: Bridging

    @property
    def steps(self) -> int:
        """After how many steps the graphs repeat, or how many are taken for all if they never do."""
        return self.schedule.period or WINDOW

    def union(self) -> nx.Graph:
        """All links that there ever are."""
        return self.schedule.union(0, self.steps) if self.graph is None else self.graph

    def count(self, config: Config, models: Members) -> int:
        """Exchanges per averaging: the config's, else what the slowest model's spectrum predicts."""
        if config.gossip.exchanges is not None:
            return config.gossip.exchanges
        if config.gossip.mode == "async":
            return PUSHES
        tolerance, rule, most = config.gossip.tolerance, config.gossip.rule, 1.0
        for who in models.values():
            if self.graph is not None:
                gap = spectral_gap(mixing_matrix(_part(self.graph, who), rule))
                most = max(most, predicted_exchanges(gap, tolerance))
            else:
                part = _scheduled(self.schedule, who)
                window = part.period or WINDOW
                rate = schedule_rate(part, rule, window)
                exact = window if rate < 1e-12 else predicted_exchanges(1.0 - rate, tolerance)
                most = max(most, exact)
        if not np.isfinite(most):
            raise TopologyError(
                f"peers never come to {tolerance:g} of their disagreement on this graph under the rule "
                f"{rule}: say how many exchanges to make, by exchanges in [gossip]"
            )
        return int(np.ceil(most))


PUSHES: int = PlaceSettings.model_fields["exchanges"].default
"""Pushes of an async peer after each round, unless told otherwise."""

WINDOW = 64
"""Steps over which a schedule without a period is judged."""


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
    with _blaming(source, "topology"), beside(folder):
        found = _swarm_graph(config, found_beside(config.topology, folder), models)
    if config.gossip.rule != "push":
        with _blaming(source, "gossip.rule"):
            _check_rule(found, config.gossip.rule, models)
    return found


@contextmanager
def _blaming(source: str, key: str) -> Iterator[None]:
    """Graphs know nothing of configs: say in one line which file and key an error comes from."""
    try:
        yield
    except TopologyError as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{source}: key {key!r}: {line}") from None


def _check_rule(found: SwarmGraph, rule: Rule, models: Members) -> None:
    if rule == "edges" and found.added.edges:
        raise TopologyError(
            "links that bridging adds have no weight; add them to the graph yourself: "
            + name_links(found.added.edges)
        )
    if found.graph is None:
        found.schedule.matrix(0, rule)  # steps are alike: a rule fits all of them or none
    else:
        require_models_connected(found.graph, models, rule)


def require_push(config: Config, source: str, who: str, way_out: str) -> None:
    """Raise if a config asks for another rule where peers send messages: there they give equal parts."""
    if config.gossip.rule != "push":
        raise ConfigError(
            f"{source}: key 'gossip.rule': {who} give equal parts, not by the rule "
            f"{config.gossip.rule!r}; leave it out, or {way_out}"
        )


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
    rule = config.gossip.rule
    tell(found, rule, 'in lockstep gossip.rule = "edges" takes them for shares')
    graph = found.schedule if found.graph is None else found.graph
    with _blaming(source, "gossip.rule"):
        return Gossip(graph, rule=rule, exchanges=found.count(config, models))


def tell(found: SwarmGraph, rule: Rule = "push", way_out: str = "") -> None:
    """Say on the terminal which links bridging added, if any, and that links' weights go unused, if so."""
    if found.added.edges:
        console.out.print(describe_bridging(found.added), soft_wrap=True)
    if found.graph is not None and unused(found.graph, rule):
        line = f"{describe_unused(rule)}{f'; {way_out}' * bool(way_out)}"
        console.out.print(line, soft_wrap=True, markup=False)


def unused(graph: nx.Graph, rule: Rule) -> bool:
    """Whether a graph has weights on its links and the rule does not look at them."""
    return rule != "edges" and weighted(graph)


def describe_unused(rule: Rule) -> str:
    """One line about it."""
    given = "peers give equal parts" if rule == "push" else f"peers give by the rule {rule}"
    return f"weights on the topology's links are not used: {given}"


def describe_bridging(added: Bridging, labels: Mapping[int, str] | None = None) -> str:
    """One line: which links were added, and whether fewer could do."""
    links = name_links(added.edges, labels, limit=len(added.edges))
    count = f"{len(added.edges)} link{'s' * (len(added.edges) != 1)}"
    proof = "the fewest that do" if added.least else "perhaps not the fewest: too many to try"
    return f"bridged: {count} added to join torn partial models ({proof}): {links}"


def found_beside(spec: Spec, folder: Path) -> Spec:
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
        schedule = build_schedule(spec, config.peers, config.seed)
        union = schedule.union(0, schedule.period or WINDOW)
        if config.bridge:
            raise TopologyError(f"{kind} changes over time: it cannot be bridged; drop 'bridge'")
        require_models_connected(union, models)
        return SwarmGraph(schedule, None, Bridging((), True))
    graph = build(spec, config.peers, config.seed)
    added = bridge(graph, models) if config.bridge else Bridging((), True)
    graph = bridged(graph, added) if added.edges else graph
    try:
        require_models_connected(graph, models)
    except TopologyError as error:
        raise TopologyError(f"{error}, and bridge = true adds them") from None
    return SwarmGraph(static(graph), graph, added)


def _part(graph: nx.Graph, who: object) -> nx.Graph:
    return nx.convert_node_labels_to_integers(graph.subgraph(who), ordering="sorted")


def _scheduled(schedule: Schedule, who: object) -> Schedule:
    chosen = frozenset(who)  # pyright: ignore[reportArgumentType]
    return Schedule(len(chosen), lambda step: _part(schedule.graph(step), chosen), schedule.period)


def require_whole(graph: nx.Graph, name: str) -> None:
    """Raise with the components and the way out when a graph is in parts."""
    try:
        require_connected(graph, name)
    except TopologyError as error:
        raise TopologyError(f"{error} (--bridge)") from None


def name_links(
    links: Iterable[tuple[int, int]], labels: Mapping[int, str] | None = None, limit: int = 8
) -> str:
    """Write links for a table: `0–4, 3–7`, or the first few and how many follow.

    labels: what peers are called, where they are called something.
    """
    known, called = sorted(links), labels or {}
    more = f", … {len(known) - limit} more" if len(known) > limit else ""
    return ", ".join(f"{called.get(u, u)}–{called.get(v, v)}" for u, v in known[:limit]) + more
