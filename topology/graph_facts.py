"""Everything worth knowing about a graph before a swarm lives on it, in one object."""

from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx

from .check import Members, flowing, subgraphs
from .errors import TopologyError
from .graphs import Seed
from .schedule import Schedule
from .spectrum import Method, period_rate, predicted_exchanges, spectral_gap
from .structure import Edge, effective_diameter, require_connected, weak_spots
from .weights import Rule, mixing_matrix


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


def schedule_rate(
    schedule: Schedule, rule: Rule = "push", steps: int | None = None, method: Method = "auto"
) -> float:
    """|λ2| per exchange over one period; 0 when a period averages exactly.

    A schedule without a period needs `steps`, the window to take instead; raise it until the rate
    settles.
    """
    window = steps or schedule.period
    if window is None:
        raise TopologyError("this schedule never repeats: give steps, the window to measure over")
    return period_rate([schedule.matrix(step, rule) for step in range(window)], method)
