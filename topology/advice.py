"""Which graph should a swarm use? The fewest links that join torn partial models; candidates within a budget,
ranked by their predicted rate.

Bridging several models at once is a set-cover problem, since one link may serve many models: it is solved
exactly as an integer program whose constraints (cuts that some link must cross) are added as they are found
violated.
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

EXACT = 4000
"""Candidate links up to which the least set is sought; beyond, a good one is taken."""


@dataclass(frozen=True)
class Bridging:
    """Links to add. `least` is False when the swarm was too large to prove that none is spare."""

    edges: tuple[Edge, ...]
    least: bool


def bridge(graph: nx.Graph, members: Members, exact: int = EXACT) -> Bridging:
    """The least set of links whose addition connects every partial model's subgraph.

    Among equals, peers with few links are taken first. Add the result with `bridged`.

    exact: candidate links up to which the least set is sought; beyond, a good one is taken.
    """
    torn = {
        model: part
        for model, part in subgraphs(graph, members).items()
        if len(components(part)) > 1
    }
    if not torn:
        return Bridging((), True)
    if not graph.is_directed() and _nested([frozenset(part) for part in torn.values()]):
        return Bridging(tuple(sorted(_chained(graph, torn))), True)
    candidates = _candidates(graph, torn, exact)
    chosen = _least(graph, torn, candidates) if candidates is not None else None
    if chosen is not None:
        return Bridging(tuple(sorted(chosen)), True)
    return Bridging(tuple(sorted(_chained(graph, torn))), False)


def bridged(graph: nx.Graph, bridging: Bridging) -> nx.Graph:
    """A copy of `graph` with the links added, each marked `bridge=True`."""
    copy = graph.copy()
    copy.add_edges_from(bridging.edges, bridge=True)
    return copy


def _candidates(graph: nx.Graph, torn: Mapping[str, nx.Graph], exact: int) -> list[Edge] | None:
    """One link for each way in which a link can help; None when there are too many ways.

    Peers that lie in the same component of the same models are interchangeable.
    """
    place: dict[int, list[tuple[str, int]]] = {}
    for model, part in torn.items():
        for number, component in enumerate(components(part)):
            for peer in component:
                place.setdefault(peer, []).append((model, number))
    classes: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for peer in sorted(place, key=lambda peer: (graph.degree(peer), peer)):
        classes.setdefault(tuple(place[peer]), []).append(peer)
    if len(classes) ** 2 > 2 * exact:
        return None
    used: Counter[int] = Counter()
    edges: list[Edge] = []
    pairs = permutations if graph.is_directed() else combinations
    for a, b in pairs(classes, 2):
        parts_of_b = dict(b)
        if any(parts_of_b.get(model, number) != number for model, number in a):
            u, v = (min(classes[side], key=lambda peer: used[peer]) for side in (a, b))
            used.update((u, v))
            edges.append((u, v))
    return edges


def _least(
    graph: nx.Graph, torn: Mapping[str, nx.Graph], candidates: list[Edge]
) -> list[Edge] | None:
    """Integer program with lazy cuts; None when the solver gives up."""
    members = {model: frozenset(part.nodes) for model, part in torn.items()}
    rows: list[np.ndarray] = []
    chosen: list[Edge] = []
    for _ in range(200):
        before = len(rows)
        for model, part in torn.items():
            whole = part.copy()
            whole.add_edges_from(e for e in chosen if members[model].issuperset(e))
            rows += [
                np.array(
                    [
                        _crosses(edge, side, members[model], graph.is_directed())
                        for edge in candidates
                    ]
                )
                for side in _open_sides(whole)
            ]
        if len(rows) == before:
            return chosen
        cuts = LinearConstraint(np.array(rows, dtype=float), lb=1)  # pyright: ignore[reportArgumentType]
        ones = np.ones(len(candidates))
        found = milp(
            ones, integrality=ones, bounds=(0, 1), constraints=cuts, options={"time_limit": 20}
        )
        if not found.success:
            return None
        chosen = [edge for edge, taken in zip(candidates, found.x, strict=True) if taken > 0.5]
    return None


def _crosses(edge: Edge, side: frozenset[int], members: frozenset[int], directed: bool) -> bool:
    u, v = edge
    if u not in members or v not in members:
        return False
    return (u in side and v not in side) or (not directed and v in side and u not in side)


def _open_sides(graph: nx.Graph) -> Iterator[frozenset[int]]:
    """Sets of peers that some added link must leave; none when the graph is connected."""
    if not isinstance(graph, nx.DiGraph):
        parts = components(graph)
        yield from parts if len(parts) > 1 else ()
        return
    order = nx.condensation(graph)
    if len(order) == 1:
        return
    everybody = frozenset(graph.nodes)
    for part in order:
        inside = frozenset(order.nodes[part]["members"])
        if order.out_degree(part) == 0:
            yield inside
        if order.in_degree(part) == 0:
            yield everybody - inside


def _nested(models: Sequence[frozenset[int]]) -> bool:
    """Whether of any two models one lies inside the other or they share nobody.

    Then each needs one link less than it has parts, smaller ones first: whichever links join a small
    model, to the larger ones around it they are worth the same. No search is needed.
    """
    return all(a <= b or b <= a or not a & b for a, b in combinations(models, 2))


def _chained(graph: nx.Graph, torn: Mapping[str, nx.Graph]) -> set[Edge]:
    """Join each model's parts one after the other, small models first, counting links already added."""
    added: set[Edge] = set()
    degree = Counter(dict(graph.degree()))
    for part in sorted(torn.values(), key=len):
        whole = part.copy()
        whole.add_edges_from(edge for edge in added if edge[0] in whole and edge[1] in whole)
        if isinstance(whole, nx.DiGraph):  # a circle through all sources and sinks joins everything
            order = nx.condensation(whole)
            ends = [p for p in order if not (order.in_degree(p) and order.out_degree(p))]
            parts = [order.nodes[p]["members"] for p in ends] if len(order) > 1 else []
            steps = list(pairwise([*parts, parts[0]])) if len(parts) > 1 else []
        else:
            steps = list(pairwise(components(whole)))
        for here, there in steps:
            u, v = (min(side, key=lambda peer: (degree[peer], peer)) for side in (here, there))
            degree.update((u, v))
            added.add((u, v))
    return added


# --- candidates -----------------------------------------------------------------------------------

WINDOW = 16
"""Steps over which a schedule that draws afresh is rated: its first so many, repeated."""


@dataclass(frozen=True)
class Candidate:
    """A graph that fits the budget.

    `topology` is what a config writes. `rate` is |λ2| per exchange of the slowest partial model,
    `sends` the messages of the busiest peer in one exchange, `error` what is left of the
    disagreement when the byte budget is spent (None without one).
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
    """Candidates, best first, and what did not fit with the reason."""

    ranked: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...] = ()


def specs(peers: int, degree: int | None, groups: int = 1) -> Iterator[str]:
    """Topologies worth asking about, for a swarm of this size and this many links per peer."""
    links = min(degree if degree is not None else ceil(log(max(peers, 2), 2)), peers - 1)
    yield from ("ring", "torus", "hypercube", "clique", "exponential", "expander")
    for count in range(links, 2, -1):
        if peers * count % 2 == 0 and count < peers:
            yield f"regular:{count}"
            break
    for count in (links // 2 * 2, (links - 2) // 2 * 2):
        if 4 <= count < peers:
            yield f"watts-strogatz:{count}:0.3"
    if groups > 1:  # a link to the next group for everybody, or a few for the whole group
        size, sides = peers // groups, 1 if groups == 2 else 2
        for inner, joints in ((links - sides, size), (links - 1, 2), (links - sides, 1)):
            if inner > 1 and _even(peers, groups, inner):
                yield f"clusters:{groups}:{joints}:{inner}"
    yield from ("one-peer-exponential", f"random-matchings:{WINDOW}", f"rotating-rings:{WINDOW}")


def _even(peers: int, groups: int, degree: int) -> bool:
    sizes = {peers // groups, -(-peers // groups)}
    return all(size * degree % 2 == 0 and degree < size for size in sizes)


def advise(
    peers: int,
    degree: int | None = None,
    *,
    budget: float | None = None,
    message: float = 1.0,
    members: Members | None = None,
    tolerance: float = 1e-6,
    seed: Seed = 0,
    asked: Sequence[str] | None = None,
) -> Advice:
    """Rank topologies for `peers` peers.

    degree
        Messages that a peer may send in one exchange; None leaves them free.
    budget, message
        Bytes that a peer may send, on the average, in one averaging, and bytes of one message. With a
        budget the rank is by the disagreement left when it is spent, else by the rate per exchange.
    members
        Partial models that must be connected: torn ones are bridged, within `degree`, and the slowest
        model counts.
    """
    if peers < 2:
        raise TopologyError(f"a swarm has at least 2 peers, not {peers}")
    if degree is not None and degree < 1:
        raise TopologyError(f"degree is a number of links per peer, 1 or more, not {degree}")
    if budget is not None and budget < message:
        raise TopologyError(
            f"a budget of {budget:.3g} bytes is less than one message of {message:.3g}: raise it"
        )
    models = {"everybody": range(peers), **(members or {})}
    ranked: list[Candidate] = []
    refused: list[tuple[str, str]] = []
    for spec in asked or specs(peers, degree, max(len(members or {}), 1)):
        try:
            ranked.append(_judge(spec, peers, degree, budget, message, models, tolerance, seed))
        except TopologyError as error:
            refused.append((spec, " ".join(str(error).split())))
    # exchanges before rate: an exact schedule has rate 0, and still needs its whole period
    ranked.sort(key=lambda one: (one.error or 0.0, one.exchanges, round(one.rate, 9), one.messages))
    return Advice(tuple(ranked), tuple(refused))


def _judge(
    spec: str,
    peers: int,
    degree: int | None,
    budget: float | None,
    message: float,
    models: Members,
    tolerance: float,
    seed: Seed,
) -> Candidate:
    kind, _ = parse(spec)
    added: tuple[Edge, ...] = ()
    reason = REASONS.get(kind, "")
    if kind in SCHEDULES:
        schedule = build_schedule(spec, peers, seed)
        sends, per_exchange = _traffic(schedule)
        _within(sends, degree)
    else:
        graph = build(spec, peers, seed)
        _within(_traffic(static(graph))[0], degree)
        bridging = bridge(graph, models)
        graph, added = bridged(graph, bridging), bridging.edges
        schedule = static(graph)
        sends, per_exchange = _traffic(schedule)
        if added:
            _within(sends, degree, f", {len(added)} of them to join torn models")
        edges, cut = weak_spots(graph)
        if edges or cut:
            reason += f"; {len(cut)} peers and {len(edges)} links alone can split it"
    slowest, pace = _slowest(schedule, models, tolerance)
    error = None
    if budget is not None:
        affordable = int(budget // (message * per_exchange))
        # an exact schedule has averaged nothing for certain before its period is over
        exact = pace.exact_after
        error = pace.rate**affordable if exact is None else float(affordable < exact)
    if len(models) > 1 and slowest != "everybody":
        reason += f"; slowest is {slowest}"
    messages = pace.exchanges * per_exchange
    return Candidate(
        spec, pace.rate, sends, messages, pace.exchanges, reason, slowest, added, error
    )


def _within(sends: int, degree: int | None, why: str = "") -> None:
    if degree is not None and sends > degree:
        raise TopologyError(f"its busiest peer has {sends} links{why}, the budget is {degree}")


def _traffic(schedule: Schedule) -> tuple[int, float]:
    """Messages of the busiest peer in one exchange, and per peer on the average."""
    most, total = 0, 0
    steps = schedule.period or WINDOW
    for step in range(steps):
        graph = schedule.graph(step)
        sends = [len(graph[peer]) for peer in graph]
        most, total = max(most, *sends), total + sum(sends)
    return most, total / steps / schedule.peers


def _slowest(schedule: Schedule, models: Members, tolerance: float) -> tuple[str, Pace]:
    """The partial model that averages most slowly, and its pace."""
    paces: dict[str, Pace] = {}
    window = schedule.period or WINDOW
    for model, who in models.items():
        part = schedule.restricted_to(who)
        parts = components(part.union(0, window))
        if len(parts) > 1:
            raise DisconnectedError(
                f"{model!r} never meets on it: a schedule cannot be bridged", parts
            )
        paces[model] = predict_pace(part, tolerance=tolerance, steps=window)
    slowest = max(paces, key=lambda model: paces[model].rate)
    return slowest, paces[slowest]
