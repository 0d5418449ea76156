"""Advice on graphs: the fewest links that connect all partial models, and topologies ranked within a budget.

Bridging (adding links until every partial model's subgraph is connected) is a set-cover problem, since one
link may serve many models. It is solved exactly, as an integer program. Each of its constraints says that one
of the added links must leave a certain component; constraints are added when a solution violates them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from math import ceil, log

import networkx as nx
import numpy as np
from scipy.optimize import LinearConstraint, milp

from .graphs import REASONS, SCHEDULES, Schedule, static
from .spec import build, build_schedule, parse
from .spectrum import Pace, predict_pace
from .structure import (
    DisconnectedError,
    Edge,
    Members,
    Seed,
    TopologyError,
    components,
    subgraphs,
    weak_spots,
)

MAX_EXACT_LINKS = 4000
"""The number of candidate links up to which the smallest set is searched; beyond, a heuristic chooses."""


@dataclass(frozen=True)
class Bridging:
    """Links to add, and what for. `is_smallest`: whether it is known that no smaller set exists."""

    edges: tuple[Edge, ...]
    is_smallest: bool
    purpose: str = "connect partial models"


def bridge(graph: nx.Graph, members: Members, max_exact_links: int = MAX_EXACT_LINKS) -> Bridging:
    """Return the smallest set of links whose addition connects every partial model's subgraph.

    Links between peers with few links are preferred. `bridged` adds the links to the graph.

    members: the peers of each partial model.
    """
    disconnected = {
        model: subgraph
        for model, subgraph in subgraphs(graph, members).items()
        if len(components(subgraph)) > 1
    }
    if not disconnected:
        return Bridging((), is_smallest=True)
    peers_by_model = [frozenset(subgraph) for subgraph in disconnected.values()]
    if not graph.is_directed() and _are_nested(peers_by_model):
        return Bridging(tuple(sorted(_chain_components(graph, disconnected))), is_smallest=True)
    candidates = _candidate_links(graph, disconnected, max_exact_links)
    chosen = _smallest_set(graph, disconnected, candidates) if candidates is not None else None
    if chosen is not None:
        return Bridging(tuple(sorted(chosen)), is_smallest=True)
    return Bridging(tuple(sorted(_chain_components(graph, disconnected))), is_smallest=False)


def bridged(graph: nx.Graph, bridging: Bridging) -> nx.Graph:
    """Return a copy of `graph` with the links added, each with the attribute `bridge=True`."""
    copy = graph.copy()
    copy.add_edges_from(bridging.edges, bridge=True)
    return copy


def _candidate_links(
    graph: nx.Graph, disconnected: Mapping[str, nx.Graph], max_links: int
) -> list[Edge] | None:
    """Return links among which a smallest set is to be found; None if they would be more than `max_links`.

    Peers that have the same models, and are in the same component of each, are interchangeable: they form a
    class. So one link between two classes is enough, if it joins components of at least one model.
    """
    components_of_peer: dict[int, list[tuple[str, int]]] = {}
    for model, subgraph in disconnected.items():
        for number, component in enumerate(components(subgraph)):
            for peer in component:
                components_of_peer.setdefault(peer, []).append((model, number))
    classes: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for peer in sorted(components_of_peer, key=lambda peer: (graph.degree(peer), peer)):
        classes.setdefault(tuple(components_of_peer[peer]), []).append(peer)
    if len(classes) ** 2 > 2 * max_links:  # about half of that is the number of pairs
        return None
    uses: Counter[int] = Counter()  # how many of the links each peer has
    edges: list[Edge] = []
    pairs = permutations if graph.is_directed() else combinations
    for a, b in pairs(classes, 2):
        # Whether in some model that both classes have they are in different components.
        components_of_b = dict(b)
        joins_components = any(components_of_b.get(model, number) != number for model, number in a)
        if joins_components:
            u, v = (min(classes[end], key=lambda peer: uses[peer]) for end in (a, b))
            uses.update((u, v))
            edges.append((u, v))
    return edges


def _smallest_set(
    graph: nx.Graph, disconnected: Mapping[str, nx.Graph], candidates: list[Edge]
) -> list[Edge] | None:
    """Return the fewest candidates that connect all models; None if that takes too long or fails.

    Each constraint says that at least one of certain candidates must be chosen. Constraints that a solution
    violates are added, and the program is solved again, until it violates none.
    """
    members = {model: frozenset(subgraph.nodes) for model, subgraph in disconnected.items()}
    constraints: list[list[bool]] = []  # for each, which candidates satisfy it
    chosen: list[Edge] = []
    for _ in range(200):
        old_count = len(constraints)
        for model, subgraph in disconnected.items():
            joined = subgraph.copy()
            joined.add_edges_from(edge for edge in chosen if members[model].issuperset(edge))
            constraints += [
                [
                    _link_leaves(edge, peers, members[model], graph.is_directed())
                    for edge in candidates
                ]
                for peers in _closed_sets(joined)
            ]
        if len(constraints) == old_count:
            return chosen
        matrix = np.array(constraints, dtype=float)
        at_least_one = LinearConstraint(matrix, lb=1)  # pyright: ignore[reportArgumentType]
        ones = np.ones(len(candidates))
        solution = milp(
            ones, integrality=ones, bounds=(0, 1), constraints=at_least_one,
            options={"time_limit": 20},
        )  # fmt: skip
        if not solution.success:
            return None
        chosen = [edge for edge, value in zip(candidates, solution.x, strict=True) if value > 0.5]
    return None


def _link_leaves(
    edge: Edge, peers: frozenset[int], members: frozenset[int], directed: bool
) -> bool:
    """Return whether a link leads from `peers` to another member; an undirected link leads both ways."""
    u, v = edge
    if u not in members or v not in members:
        return False
    return (u in peers and v not in peers) or (not directed and v in peers and u not in peers)


def _closed_sets(graph: nx.Graph) -> Iterator[frozenset[int]]:
    """Yield sets of peers that no link leaves; to connect the graph, added links must leave each of them.

    They are the components; of a directed graph, the strongly connected components without links to others
    (sinks), and the complements of those without links from others (sources). A connected graph has none.
    """
    if not isinstance(graph, nx.DiGraph):
        closed = components(graph)
        yield from closed if len(closed) > 1 else ()
        return
    condensed = nx.condensation(graph)
    if len(condensed) == 1:
        return
    all_peers = frozenset(graph.nodes)
    for component in condensed:
        peers = frozenset(condensed.nodes[component]["members"])
        is_sink, is_source = not condensed.out_degree(component), not condensed.in_degree(component)
        if is_sink:
            yield peers
        if is_source:
            yield all_peers - peers


def _are_nested(models: Sequence[frozenset[int]]) -> bool:
    """Return whether of any two models one contains the other, or they have no peer in common.

    Then no search is needed. Models are connected one by one, the smallest first; each needs one link less
    than it has components, and a larger model gains the same from whichever links connect a smaller one.
    """
    return all(a <= b or b <= a or not a & b for a, b in combinations(models, 2))


def _chain_components(graph: nx.Graph, disconnected: Mapping[str, nx.Graph]) -> set[Edge]:
    """Return links that join each model's components in a chain, the smallest models first.

    Links that were added for smaller models count for the larger ones.
    """
    added: set[Edge] = set()
    degree = Counter(dict(graph.degree()))
    for subgraph in sorted(disconnected.values(), key=len):
        joined = subgraph.copy()
        joined.add_edges_from(edge for edge in added if edge[0] in joined and edge[1] in joined)
        if isinstance(joined, nx.DiGraph):
            # Links in a circle through all strongly connected components that are sources or sinks.
            condensed = nx.condensation(joined)
            sources_and_sinks = [
                condensed.nodes[node]["members"]
                for node in condensed
                if not (condensed.in_degree(node) and condensed.out_degree(node))
            ]
            circle = sources_and_sinks if len(condensed) > 1 else []
            pairs = list(pairwise([*circle, circle[0]])) if len(circle) > 1 else []
        else:
            pairs = list(pairwise(components(joined)))
        for pair in pairs:
            u, v = (min(component, key=lambda peer: (degree[peer], peer)) for component in pair)
            degree.update((u, v))
            added.add((u, v))
    return added


# --- topologies within a budget -------------------------------------------------------------------

RATED_STEPS = 16
"""A schedule (a graph that changes over time) without a period is rated as if its first 16 steps repeated."""
ALL_PEERS = "everybody"
"""The name of the model of all peers, which is rated like the partial models."""


@dataclass(frozen=True)
class Candidate:
    """A topology that fits the budget.

    `topology` is its name for configs. `slowest` is the partial model that averages most slowly, `rate` its
    |λ2| (the factor by which an exchange reduces the error), and `exchanges` its number of exchanges until
    the tolerance is reached. `sends` is the number of messages that the busiest peer sends in one exchange,
    `messages` the mean number per peer until the tolerance is reached. `reason` says why it is fast or slow.
    `added` are the bridging links. `error` is the fraction of the initial error that remains when the byte
    budget is spent (None without a budget).
    """

    topology: str
    rate: float
    sends: int
    messages: float
    exchanges: float
    reason: str
    slowest: str = ""
    added: tuple[Edge, ...] = ()
    error: float | None = None


@dataclass(frozen=True)
class Advice:
    """Candidates, best first, and topologies that do not fit, each with the reason."""

    ranked: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...] = ()


def candidate_specs(peers: int, degree: int | None, groups: int = 1) -> Iterator[str]:
    """Yield topologies to try for a swarm of `peers` peers with about `degree` links each.

    groups: the number of groups of peers, for topologies of clusters.
    """
    links = min(degree if degree is not None else ceil(log(max(peers, 2), 2)), peers - 1)
    yield from ("ring", "torus", "hypercube", "clique", "exponential", "expander")
    for count in range(links, 2, -1):
        if peers * count % 2 == 0 and count < peers:
            yield f"regular:{count}"
            break
    for count in (links // 2 * 2, (links - 2) // 2 * 2):  # the two largest even numbers
        if 4 <= count < peers:
            yield f"watts-strogatz:{count}:0.3"
    if groups > 1:
        # Groups form a circle, and each is a regular graph. Two groups that are neighbours in the circle are
        # joined by as many links as a group has peers, by two links, or by one.
        size = peers // groups
        adjacent = 1 if groups == 2 else 2  # groups next to each group
        for inner_degree, links_between in (
            (links - adjacent, size), (links - 1, 2), (links - adjacent, 1),
        ):  # fmt: skip
            if inner_degree > 1 and _has_regular_groups(peers, groups, inner_degree):
                yield f"clusters:{groups}:{links_between}:{inner_degree}"
    yield "one-peer-exponential"
    yield from (f"random-matchings:{RATED_STEPS}", f"rotating-rings:{RATED_STEPS}")


def _has_regular_groups(peers: int, groups: int, degree: int) -> bool:
    """Return whether all of so many groups, of about equal sizes, can be regular graphs of this degree."""
    sizes = {peers // groups, ceil(peers / groups)}
    return all(size * degree % 2 == 0 and degree < size for size in sizes)


def links_to_add(graph: nx.Graph, members: Members, needed: int) -> tuple[Edge, ...]:
    """Return links with which every peer has `needed` neighbours in each of its partial models, or all other
    peers of the model as neighbours if they are fewer.

    The choice is greedy, so there may be a smaller set: peers with the fewest links come first, and are
    linked with others that have few.
    """
    grown = nx.Graph(graph)
    added: list[Edge] = []
    for peers in members.values():
        enough = min(needed, len(peers) - 1)
        subgraph = nx.subgraph(grown, peers)
        while True:
            degrees = {peer: subgraph.degree(peer) for peer in sorted(peers)}
            degree, peer = min((degree, peer) for peer, degree in degrees.items())
            if degree >= enough:
                break
            others = [
                other for other in degrees if other != peer and not grown.has_edge(peer, other)
            ]
            # Of peers with equally few links, choose the farthest: long links also make averaging faster.
            hops = nx.single_source_shortest_path_length(grown, peer)
            other = min(others, key=lambda end: (degrees[end], -hops.get(end, len(grown)), end))
            grown.add_edge(peer, other)
            added.append((peer, other))
    return tuple(added)


def advise(
    peers: int,
    degree: int | None = None,
    *,
    budget: float | None = None,
    message: float = 1.0,
    members: Members | None = None,
    tolerance: float = 1e-6,
    seed: Seed = 0,
    specs: Sequence[str] | None = None,
) -> Advice:
    """Rank topologies for `peers` peers.

    degree
        Messages that a peer may send in one exchange; None for any number.
    budget, message
        Bytes that a peer may send in one averaging (the mean over peers), and bytes of one message. With a
        budget, topologies are ranked by the error that remains when it is spent, else by exchanges.
    members
        The peers of partial models. Models that a topology does not connect are bridged, if `degree` allows
        the links. A topology is rated by the model that averages most slowly.
    tolerance
        The fraction of the initial error at which averaging ends.
    specs
        The topologies to rank; by default those of `candidate_specs`.
    """
    if peers < 2:
        raise TopologyError(f"a swarm has at least 2 peers, not {peers}")
    if degree is not None and degree < 1:
        raise TopologyError(f"degree is a number of links per peer, 1 or more, not {degree}")
    if budget is not None and budget < message:
        raise TopologyError(
            f"a budget of {budget:.3g} bytes is less than one message of {message:.3g}: raise it"
        )
    models = {ALL_PEERS: range(peers), **(members or {})}
    ranked: list[Candidate] = []
    refused: list[tuple[str, str]] = []
    for spec in specs or candidate_specs(peers, degree, max(len(members or {}), 1)):
        try:
            ranked.append(
                _rate_topology(spec, peers, degree, budget, message, models, tolerance, seed)
            )
        except TopologyError as error:
            refused.append((spec, " ".join(str(error).split())))
    # Exchanges come before the rate: a schedule that averages exactly has rate 0, but needs its whole period.
    ranked.sort(
        key=lambda candidate: (
            candidate.error or 0.0, candidate.exchanges, round(candidate.rate, 9), candidate.messages
        )
    )  # fmt: skip
    return Advice(tuple(ranked), tuple(refused))


def _rate_topology(
    spec: str,
    peers: int,
    degree: int | None,
    budget: float | None,
    message: float,
    models: Members,
    tolerance: float,
    seed: Seed,
) -> Candidate:
    """Return a topology with its ratings; raise TopologyError if it does not fit peers or degree.

    The parameters are those of `advise`; models: `members`, with the model of all peers.
    """
    kind, _ = parse(spec)
    added: tuple[Edge, ...] = ()
    reason = REASONS.get(kind, "")
    if kind in SCHEDULES:
        schedule = build_schedule(spec, peers, seed)
        most_sends, mean_sends = _traffic(schedule)
        _check_degree(most_sends, degree)
    else:
        graph = build(spec, peers, seed)
        _check_degree(_traffic(static(graph))[0], degree)
        bridging = bridge(graph, models)
        graph, added = bridged(graph, bridging), bridging.edges
        schedule = static(graph)
        most_sends, mean_sends = _traffic(schedule)
        if added:
            _check_degree(most_sends, degree, f", {len(added)} of them to connect partial models")
        bridges, cut_peers = weak_spots(graph)
        if bridges or cut_peers:
            weak = f"{len(cut_peers)} peers and {len(bridges)} links"
            reason += f"; losing any one of {weak} splits it"
    slowest, pace = _slowest(schedule, models, tolerance)
    error = None
    if budget is not None:
        affordable = int(budget // (message * mean_sends))  # exchanges
        # Some schedules average exactly at the end of their period. Before it nothing is known: count all of
        # the initial error as remaining.
        period = pace.exact_after
        error = pace.rate**affordable if period is None else float(affordable < period)
    if len(models) > 1 and slowest != ALL_PEERS:
        reason += f"; the slowest model is {slowest}"
    messages = pace.exchanges * mean_sends
    return Candidate(
        spec, pace.rate, most_sends, messages, pace.exchanges, reason, slowest, added, error
    )


def _check_degree(sends: int, degree: int | None, note: str = "") -> None:
    """Raise TopologyError if the busiest peer sends more messages in an exchange than `degree`.

    note: added to the error message after the number of links.
    """
    if degree is not None and sends > degree:
        raise TopologyError(f"its busiest peer has {sends} links{note}, the limit is {degree}")


def _traffic(schedule: Schedule) -> tuple[int, float]:
    """Return how many messages a peer sends in one exchange: at most, and on average."""
    busiest, total = 0, 0
    steps = schedule.period or RATED_STEPS
    for step in range(steps):
        graph = schedule.graph(step)
        sends = [len(graph[peer]) for peer in graph]
        busiest, total = max(busiest, *sends), total + sum(sends)
    return busiest, total / steps / schedule.peers


def _slowest(schedule: Schedule, models: Members, tolerance: float) -> tuple[str, Pace]:
    """Return the partial model that averages most slowly, and its pace."""
    paces: dict[str, Pace] = {}
    steps = schedule.period or RATED_STEPS
    for model, peers in models.items():
        model_schedule = schedule.restricted_to(peers)
        groups = components(model_schedule.union(0, steps))
        if len(groups) > 1:
            raise DisconnectedError(
                f"the peers of {model!r} are never connected: a schedule cannot be bridged", groups
            )
        paces[model] = predict_pace(model_schedule, tolerance=tolerance, steps=steps)
    slowest = max(paces, key=lambda model: paces[model].rate)
    return slowest, paces[slowest]
