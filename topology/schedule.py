"""Graphs that change over time: the graph at step t is a function of t, always the same one."""

from collections.abc import Callable
from dataclasses import dataclass

import networkx as nx
import numpy as np
from scipy.sparse import csr_array

from .errors import TopologyError
from .graphs import Seed
from .weights import Rule, mixing_matrix


@dataclass(frozen=True)
class Schedule:
    """Who talks to whom at each step.

    `graph(t)` is pure: any step may be asked for, in any order. Peers that are away at step t are
    missing from that graph. `period` is the number of steps after which the graphs repeat; None when
    they never do.
    """

    peers: int
    graph: Callable[[int], nx.Graph]
    period: int | None = None

    def matrix(self, step: int, rule: Rule = "push") -> csr_array:
        """The exchange at `step` as a peers × peers matrix; a peer that is away keeps its mass."""
        graph = self.graph(step)
        if len(graph) < self.peers:
            graph = graph.copy()
            graph.add_nodes_from(range(self.peers))
        return mixing_matrix(graph, rule)

    def union(self, start: int, steps: int) -> nx.Graph:
        """All links of `steps` steps together: it must be connected for gossip to reach everybody."""
        graphs = [self.graph(step) for step in range(start, start + steps)]
        whole = nx.DiGraph() if any(graph.is_directed() for graph in graphs) else nx.Graph()
        for graph in graphs:
            whole.update(graph.to_directed() if whole.is_directed() else graph)
        return whole


def static(graph: nx.Graph) -> Schedule:
    """A graph that stays as it is."""
    return Schedule(len(graph), lambda step: graph, 1)


def one_peer_exponential(peers: int) -> Schedule:
    """Directed: at step t everybody sends to one peer, 2^(t mod log2 n) places on.

    Exact after log2(n) steps when n is a power of two, at one message per peer and step.
    """
    _at_least(peers, 2)
    hops = (peers - 1).bit_length()

    def graph(step: int) -> nx.Graph:
        hop = 1 << (step % hops)
        made = nx.DiGraph()
        made.add_nodes_from(range(peers))
        made.add_edges_from((i, (i + hop) % peers) for i in range(peers))
        return made

    return Schedule(peers, graph, hops)


def random_matchings(peers: int, period: int | None = None, seed: Seed = 0) -> Schedule:
    """At each step peers pair off at random (one sits out when they are odd).

    `period` = None draws afresh for ever; a number repeats the first so many pairings, which makes the
    rate exact. Raise it when a short period leaves some peers badly joined.
    """
    _at_least(peers, 2)
    key = _key(seed)

    def graph(step: int) -> nx.Graph:
        order = _rng(key, step, period).permutation(peers).tolist()
        made = nx.Graph()
        made.add_nodes_from(range(peers))
        made.add_edges_from(zip(order[::2], order[1::2], strict=False))
        return made

    return Schedule(peers, graph, _checked_period(period))


def rotating_rings(peers: int, period: int | None = None, seed: Seed = 0) -> Schedule:
    """At each step a ring through all peers in a new random order: degree 2, and no slow direction."""
    _at_least(peers, 3)
    key = _key(seed)

    def graph(step: int) -> nx.Graph:
        order = _rng(key, step, period).permutation(peers).tolist()
        made = nx.Graph()
        made.add_nodes_from(range(peers))
        made.add_edges_from(zip(order, order[1:] + order[:1], strict=True))
        return made

    return Schedule(peers, graph, _checked_period(period))


def _at_least(peers: int, least: int) -> None:
    if peers < least:
        raise TopologyError(f"this schedule needs at least {least} peers, not {peers}")


def _checked_period(period: int | None) -> int | None:
    if period is not None and period < 1:
        raise TopologyError(f"period is a number of steps, 1 or more, not {period}")
    return period


def _key(seed: Seed) -> int:
    """One number that stands for the seed: a generator is drawn from once, now, not at each step."""
    return seed if isinstance(seed, int) else int(seed.integers(2**63))


def _rng(key: int, step: int, period: int | None) -> np.random.Generator:
    if step < 0:
        raise TopologyError(f"steps count from 0, not {step}")
    return np.random.default_rng([key, step % period if period else step])
