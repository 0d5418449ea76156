"""What to know of a graph before a swarm lives on it: is every partial model's subgraph connected, which
least set of links would make it so, and how fast does it mix?

A partial model gossips on the subgraph of the peers that implement it. Bridging several models at
once is a set-cover problem, since one link may serve many models: it is solved exactly as an integer
program whose constraints (cuts that some link must cross) are added as they are found violated.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations

import networkx as nx
import numpy as np
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import csr_array

from .spectrum import predicted_exchanges, spectral_gap
from .structure import (
    DisconnectedError,
    Edge,
    Seed,
    TopologyError,
    components,
    effective_diameter,
    name_components,
    name_peers,
    require_connected,
    weak_spots,
)
from .weights import Rule, mixing_matrix

Members = Mapping[str, Collection[int]]
"""Which peers implement each partial model."""

EXACT = 4000
"""Candidate links up to which the least set is sought; beyond, a good one is taken."""

KEPT = 1e-12
"""A share that is no more than rounding."""


@dataclass(frozen=True)
class Reach:
    """The parts in which one partial model can gossip: one part when all is well."""

    model: str
    components: tuple[frozenset[int], ...]

    @property
    def connected(self) -> bool:
        """True when every peer of the model can reach every other."""
        return len(self.components) <= 1

    def __str__(self) -> str:
        if self.connected:
            return f"{self.model}: connected"
        return (
            f"{self.model}: {len(self.components)} components: {name_components(self.components)}"
        )


@dataclass(frozen=True)
class Bridging:
    """Links to add. `least` is False when the swarm was too large to prove that none is spare."""

    edges: tuple[Edge, ...]
    least: bool


def subgraphs(graph: nx.Graph, members: Members) -> dict[str, nx.Graph]:
    """Each partial model's own graph (views); peers that `graph` lacks are an error."""
    for model, peers in members.items():
        missing = set(peers) - set(graph.nodes)
        if missing:
            raise TopologyError(
                f"partial model {model!r} names peers {name_peers(missing)}, which the graph of "
                f"{len(graph)} peers does not have"
            )
    return {model: graph.subgraph(peers) for model, peers in members.items()}


def flowing(graph: nx.Graph, rule: Rule = "push") -> nx.Graph:
    """The graph of the links that carry something: all, but under the rule `edges` those of weight 0."""
    silent = [(u, v) for u, v, weight in graph.edges(data="weight") if weight == 0]
    if rule != "edges" or not silent:
        return graph
    copy = graph.copy()
    copy.remove_edges_from(silent)
    return copy


def check_models(graph: nx.Graph, members: Members, rule: Rule = "push") -> list[Reach]:
    """What each partial model reaches, in the order given. Directed: strongly connected parts."""
    parts = subgraphs(flowing(graph, rule), members)
    return [Reach(model, tuple(components(part))) for model, part in parts.items()]


def require_models_connected(graph: nx.Graph, members: Members, rule: Rule = "push") -> None:
    """Raise `DisconnectedError` naming each partial model that cannot gossip, and its components.

    Links count by what they carry under the rule. A rule that does not fit the graph, or under which
    peers would never agree, is a `TopologyError`.
    """
    torn = [reach for reach in check_models(graph, members, rule) if not reach.connected]
    if torn:
        lines = "\n  ".join(str(reach) for reach in torn)
        silent = flowing(graph, rule) is not graph
        raise DisconnectedError(
            f"{len(torn)} of {len(members)} partial models cannot gossip among all their peers"
            f"{', since links of weight 0 carry nothing' * silent}:\n  {lines}\n"
            "Add links between the components; gossamer.topology.bridge lists the fewest that do",
            torn[0].components,
        )
    for model, part in subgraphs(graph, members).items() if rule != "push" else ():
        _require_settling(model, mixing_matrix(part, rule))


def _require_settling(model: str, matrix: csr_array) -> None:
    """Connected peers of whom nobody keeps anything may pass their mass round and round."""
    flow = csr_array(matrix * (matrix > KEPT))
    flow.eliminate_zeros()
    if not flow.diagonal().any() and not nx.is_aperiodic(
        nx.from_scipy_sparse_array(flow, create_using=nx.DiGraph)
    ):
        raise TopologyError(
            f"{model}: all its peers give away all that they have, and pass it round for ever without "
            "agreeing: let the weights of some peer's edges sum to less than 1"
        )


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


# --- facts in one object ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What one graph does to gossip.

    `exchanges` is the prediction from the slowest start to `tolerance`; `messages` is exchanges ×
    links used per exchange (both directions of an undirected link). Losing one of `cut_edges` or
    `bridge_peers` cuts the swarm apart.
    """

    peers: int
    links: int
    directed: bool
    least_degree: int
    mean_degree: float
    most_degree: int
    gap: float
    tolerance: float
    exchanges: float
    effective_diameter: float
    cut_edges: tuple[Edge, ...]
    bridge_peers: tuple[int, ...]

    @property
    def second(self) -> float:
        """|λ2|: the factor by which the error shrinks per exchange."""
        return 1.0 - self.gap

    @property
    def messages(self) -> float:
        """Messages that the swarm sends until the tolerance is met."""
        return self.exchanges * self.links * (1 if self.directed else 2)


def facts(
    graph: nx.Graph,
    rule: Rule = "push",
    tolerance: float = 1e-6,
    seed: Seed = 0,
    what: str = "the graph",
    sources: int = 64,
) -> Facts:
    """Degrees, spectrum, distances and weak spots of a connected graph.

    A disconnected one raises `DisconnectedError` with its components. `seed` and `sources` choose
    where distances are sampled from when there are more peers than `sources`. Links that carry nothing
    under the rule do not count.
    """
    whole, graph = graph, flowing(graph, rule)
    if graph is not whole:
        what = f"{what} without its links of weight 0"
    require_connected(graph, what)
    gap = spectral_gap(mixing_matrix(graph, rule))
    degrees = [
        d for _, d in (graph.out_degree() if isinstance(graph, nx.DiGraph) else graph.degree())
    ]
    edges, peers = weak_spots(graph)
    return Facts(
        peers=len(graph),
        links=graph.number_of_edges(),
        directed=graph.is_directed(),
        least_degree=min(degrees),
        mean_degree=sum(degrees) / len(degrees),
        most_degree=max(degrees),
        gap=gap,
        tolerance=tolerance,
        exchanges=predicted_exchanges(gap, tolerance),
        effective_diameter=effective_diameter(graph, sources=sources, seed=seed),
        cut_edges=tuple(edges),
        bridge_peers=tuple(peers),
    )


def model_facts(
    graph: nx.Graph, members: Members, rule: Rule = "push", tolerance: float = 1e-6, seed: Seed = 0
) -> Mapping[str, Facts]:
    """Facts of each partial model on the subgraph of the peers that implement it."""
    return {
        model: facts(part, rule, tolerance, seed, f"the subgraph of partial model {model!r}")
        for model, part in subgraphs(graph, members).items()
    }
