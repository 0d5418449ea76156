"""Builders of graphs, schedules of graphs that change over time, and churn.

A graph is a plain networkx graph whose nodes are the peers 0 … n−1. Some builders set attributes: `delay`
on edges, `pos` and `group` on nodes. Every random builder takes a `seed` (an int or a numpy Generator) and
returns the same graph for the same int. In a schedule the graph at step t is a function of t only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from math import isqrt, log, pi, sqrt
from pathlib import Path
from typing import Literal, TypeVar, get_args

import networkx as nx
import numpy as np
from scipy.sparse import csr_array
from scipy.spatial import KDTree

from .structure import (
    DisconnectedError,
    Edge,
    Rule,
    Seed,
    TopologyError,
    components,
    mixing_matrix,
    name_components,
    name_peers,
)

F = TypeVar("F", bound=Callable)

BUILDERS: dict[str, Callable[..., nx.Graph]] = {}
"""Graph builders by their name in configs."""

REASONS: dict[str, str] = {}
"""For each builder and schedule, one line on why its graphs mix fast or slowly."""

MAX_DRAWS = 20
"""The number of graphs that a random builder draws, at most, until one is connected."""


def register(table: dict[str, F], reason: str = "") -> Callable[[F], F]:
    """Return a decorator that adds a builder or a schedule to `table`, and its reason to REASONS.

    The name in configs is the function's, with `-` for `_`.
    """

    def decorator(function: F) -> F:
        name = function.__name__.replace("_", "-")
        table[name], REASONS[name] = function, reason
        return function

    return decorator


def _without_links(peers: int, directed: bool = False) -> nx.Graph:
    """Return a graph of `peers` peers that has no links yet."""
    if peers < 1:
        raise TopologyError(f"a graph needs at least 1 peer, not {peers}")
    graph = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from(range(peers))
    return graph


def _require(condition: bool, message: str) -> None:
    """Raise TopologyError with this message unless the condition holds."""
    if not condition:
        raise TopologyError(message)


def _draw(build: Callable[[int], nx.Graph], seed: Seed, hint: str) -> nx.Graph:
    """Return the first connected graph of at most `MAX_DRAWS` draws, with its nodes in order.

    build: returns a random graph for a seed. hint: ends the error that is raised if no graph was connected.
    """
    rng = np.random.default_rng(seed)
    graph = nx.Graph()
    for _ in range(MAX_DRAWS):
        drawn = build(int(rng.integers(2**32)))
        graph = _without_links(drawn.number_of_nodes())
        graph.update(drawn)
        if nx.is_connected(graph):
            return graph
    last_components = components(graph)
    raise DisconnectedError(
        f"none of {MAX_DRAWS} draws was connected; the last had {len(last_components)} components: "
        f"{name_components(last_components)}. {hint}",
        last_components,
    )


@register(BUILDERS, "values pass from neighbour to neighbour: exchanges grow with n²")
def ring(peers: int) -> nx.Graph:
    """Each peer has two neighbours in a circle: few links, slow mixing (n² exchanges)."""
    graph = _without_links(peers)
    if peers > 1:
        graph.add_edges_from((i, (i + 1) % peers) for i in range(peers))
    return graph


@register(BUILDERS, "a ring without one link: four times slower than the ring")
def path(peers: int) -> nx.Graph:
    """A ring without one link: four times slower than the ring, and losing any link splits the swarm."""
    graph = _without_links(peers)
    graph.add_edges_from((i, i + 1) for i in range(peers - 1))
    return graph


@register(BUILDERS, "everything passes through one peer")
def star(peers: int) -> nx.Graph:
    """All peers are linked to peer 0 only: the shape of a server, and a single point of failure."""
    graph = _without_links(peers)
    graph.add_edges_from((0, i) for i in range(1, peers))
    return graph


@register(BUILDERS, "values spread in two dimensions: exchanges grow with n")
def torus(peers: int, rows: int | None = None) -> nx.Graph:
    """A grid with opposite borders linked. `rows` must divide `peers`; by default nearest to a square."""
    _require(peers >= 4, f"a torus needs at least 4 peers, not {peers}; use a ring")
    if rows is None:
        rows = next(r for r in range(isqrt(peers), 0, -1) if peers % r == 0)
        _require(rows > 1, f"{peers} is prime, so no torus has that many peers; use {peers + 1}")
    _require(
        rows > 1 and peers % rows == 0 and peers // rows > 1,
        f"a torus of {peers} peers cannot have {rows} rows: rows × columns must be {peers}, "
        "both above 1",
    )
    columns = peers // rows
    graph = _without_links(peers)
    for i in range(peers):
        row, column = divmod(i, columns)
        graph.add_edge(i, row * columns + (column + 1) % columns)
        graph.add_edge(i, (row + 1) % rows * columns + column)
    return graph


@register(BUILDERS, "every peer is log2 n hops away: exchanges grow with log n")
def hypercube(peers: int) -> nx.Graph:
    """Peers differ from their log2(n) neighbours in one bit. Needs a power of two."""
    power = 1 << max(peers.bit_length() - 1, 0)
    _require(
        peers >= 1 and peers == power,
        f"a hypercube needs a power of two, not {peers} peers; the nearest are {power} and "
        f"{2 * power}",
    )
    graph = _without_links(peers)
    bits = peers.bit_length() - 1
    graph.add_edges_from((i, i ^ (1 << bit)) for i in range(peers) for bit in range(bits))
    return graph


@register(BUILDERS, "all peers are neighbours: exact in one exchange")
def clique(peers: int) -> nx.Graph:
    """All pairs of peers are linked: exact in one exchange, at n² messages."""
    graph = _without_links(peers)
    graph.add_edges_from(combinations(range(peers), 2))
    return graph


@register(BUILDERS, "random links are shortcuts: the gap does not fall as the swarm grows")
def regular(peers: int, degree: int = 4, seed: Seed = 0) -> nx.Graph:
    """A random graph in which every peer has `degree` neighbours: nearly the best mixing per link.

    Raise `degree` for faster mixing and to tolerate lost links, lower it for fewer messages; below
    3 the graph is no expander. `peers · degree` must be even.
    """
    _require(
        0 < degree < peers and peers * degree % 2 == 0,
        f"no graph of {peers} peers has {degree} neighbours each: the degree must be 1 … "
        f"{peers - 1} and peers × degree even",
    )
    return _draw(
        lambda s: nx.random_regular_graph(degree, peers, seed=s), seed, "Use degree 3 or more."
    )


@register(BUILDERS, "random links are shortcuts, but some peers have few of them")
def erdos_renyi(peers: int, p: float | None = None, seed: Seed = 0) -> nx.Graph:
    """Each pair is linked with probability `p`; drawn again until connected, else an error.

    The default is twice the threshold ln(n)/n below which such graphs are disconnected. Raise it when the
    error says so, lower it for fewer links.
    """
    threshold = log(max(peers, 2)) / max(peers, 2)
    probability = min(1.0, 2 * threshold) if p is None else p
    _require(0 <= probability <= 1, f"p is a probability, 0 … 1, not {probability}")
    return _draw(
        lambda s: nx.fast_gnp_random_graph(peers, probability, seed=s),
        seed,
        f"Raise p = {probability:.4g} above ln(n)/n = {threshold:.4g}.",
    )


@register(BUILDERS, "a lattice with a few shortcuts")
def watts_strogatz(peers: int, degree: int = 4, p: float = 0.1, seed: Seed = 0) -> nx.Graph:
    """A ring with links to the nearest `degree` peers, each link rewired with probability `p`.

    `p` = 0 is a plain lattice (slow), 1 nearly a random graph (fast); a small `p` is much faster than 0.
    """
    _require(
        2 <= degree < peers and degree % 2 == 0,
        f"degree must be even, 2 … {peers - 1}, not {degree}",
    )
    _require(0 <= p <= 1, f"p is a probability, 0 … 1, not {p}")
    return _draw(
        lambda s: nx.watts_strogatz_graph(peers, degree, p, seed=s), seed, "Raise the degree."
    )


@register(BUILDERS, "hubs shorten paths, but they send little over each of their many links")
def barabasi_albert(peers: int, links: int = 2, seed: Seed = 0) -> nx.Graph:
    """Each added peer links to `links` others, preferably to those with many links: a few hubs, many leaves.

    Raise `links` to depend less on the hubs; with 1 the graph is a tree, and losing any link splits it.
    """
    _require(1 <= links < peers, f"links must be 1 … {peers - 1}, not {links}")
    return _draw(lambda s: nx.barabasi_albert_graph(peers, links, seed=s), seed, "Raise links.")


@register(BUILDERS, "directed links of length 1, 2, 4, …: exchanges grow with log n")
def exponential(peers: int) -> nx.DiGraph:
    """Directed: peer i sends to i + 1, i + 2, i + 4, … . Spectral gap 2 / (1 + log2 n) for even n."""
    graph = _without_links(peers, directed=True)
    hops = (peers - 1).bit_length()
    graph.add_edges_from((i, (i + (1 << hop)) % peers) for i in range(peers) for hop in range(hops))
    return graph  # pyright: ignore[reportReturnType]


@register(BUILDERS, "explicit shortcuts: the gap does not fall as the swarm grows")
def expander(peers: int) -> nx.Graph:
    """Margulis, Gabber and Galil's explicit expander: at most 8 neighbours, no randomness.

    It is defined on an m × m grid of residues. For other sizes the nodes above `peers` are merged into
    the first ones: those get a few more neighbours, and the graph is still an expander.
    """
    graph = _without_links(peers)
    m = isqrt(peers - 1) + 1 if peers > 1 else 1
    for x in range(m):
        for y in range(m):
            peer = (x * m + y) % peers
            for a, b in ((x + 2 * y, y), (x + 2 * y + 1, y), (x, y + 2 * x), (x, y + 2 * x + 1)):
                other = (a % m * m + b % m) % peers
                if other != peer:
                    graph.add_edge(peer, other)
    return graph


@register(BUILDERS, "groups mix fast inside, but slowly over the few links between them")
def clusters(
    peers: int, clusters: int = 4, links: int = 1, degree: int | None = None, seed: Seed = 0
) -> nx.Graph:
    """Dense groups in a circle, neighbouring groups joined by `links` links; `group` on every node.

    Groups are cliques, or with `degree` random regular graphs. Lower `links` to see the cost of few links
    between groups; with 1, losing a peer at the end of such a link can split the swarm.
    """
    _require(
        1 <= clusters <= peers, f"{peers} peers cannot form {clusters} clusters; give 1 … {peers}"
    )
    rng = np.random.default_rng(seed)
    groups = [group.tolist() for group in np.array_split(np.arange(peers), clusters)]
    graph = _without_links(peers)
    for index, group in enumerate(groups):
        inner = clique(len(group)) if degree is None else regular(len(group), degree, rng)
        graph.add_edges_from((group[a], group[b]) for a, b in inner.edges)
        nx.set_node_attributes(graph, dict.fromkeys(group, index), "group")
    # In a circle each cluster is joined to the next one; two clusters are joined once, not twice.
    joints = clusters if clusters > 2 else clusters - 1
    for index in range(joints):
        group, other = groups[index], groups[(index + 1) % clusters]
        pairs = len(group) * len(other)
        _require(
            1 <= links <= pairs,
            f"clusters of {len(group)} and {len(other)} peers can have 1 … {pairs} links between them, not "
            f"{links}",
        )
        if links <= min(len(group), len(other)):  # at most one of these links per peer
            ends = (rng.choice(side, size=links, replace=False).tolist() for side in (group, other))
            graph.add_edges_from(zip(*ends, strict=True))
            continue
        for pair in rng.choice(pairs, size=links, replace=False):
            graph.add_edge(group[int(pair) // len(other)], other[int(pair) % len(other)])
    return graph


@register(BUILDERS)
def geographic(
    peers: int, radius: float | None = None, delay: float = 1.0, seed: Seed = 0
) -> nx.Graph:
    """Peers at random positions in a unit square, linked when nearer than `radius`.

    Nodes have a `pos`; edges have a `delay`, their length × `delay`. The default radius is 1.5 times the one
    below which such graphs are usually disconnected; raise it when the error says so.
    """
    threshold = sqrt(log(max(peers, 2)) / (pi * max(peers, 2)))
    distance = 1.5 * threshold if radius is None else radius
    _require(distance > 0, f"radius is a distance, above 0, not {distance}")

    def place_peers(draw_seed: int) -> nx.Graph:
        points = np.random.default_rng(draw_seed).random((peers, 2))
        graph = _without_links(peers)
        pairs = KDTree(points).query_pairs(distance, output_type="ndarray")
        delays = np.linalg.norm(points[pairs[:, 0]] - points[pairs[:, 1]], axis=1) * delay
        for (a, b), link_delay in zip(pairs.tolist(), delays.tolist(), strict=True):
            graph.add_edge(a, b, delay=link_delay)
        positions = {i: (x, y) for i, (x, y) in enumerate(points.tolist())}
        nx.set_node_attributes(graph, positions, "pos")
        return graph

    return _draw(place_peers, seed, f"Raise radius = {distance:.3g} above {threshold:.3g}.")


# --- graphs that change over time -----------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """A graph for each step.

    `graph(t)` is a pure function: steps may be requested in any order. Peers that are absent at step t are
    not in that graph. `period` is the number of steps after which the graphs repeat, or None.
    """

    peers: int
    graph: Callable[[int], nx.Graph]
    period: int | None = None

    def matrix(self, step: int, rule: Rule = "push") -> csr_array:
        """Return the mixing matrix [peers, peers] of `step`; a peer that is absent keeps its mass."""
        if self.period is None:
            return self._matrix(step, rule)
        return self._cached_matrix(step % self.period, rule)

    @cached_property
    def _cached_matrix(self) -> Callable[[int, Rule], csr_array]:
        """`_matrix` with a cache, for schedules that repeat."""
        return cache(self._matrix)

    def _matrix(self, step: int, rule: Rule) -> csr_array:
        """Return the mixing matrix of a step, computed."""
        graph = self.graph(step)
        if len(graph) < self.peers:
            graph = graph.copy()
            graph.add_nodes_from(range(self.peers))
        return mixing_matrix(graph, rule)

    def union(self, start: int, steps: int) -> nx.Graph:
        """Return a graph with the links of `steps` steps; gossip reaches all peers if it is connected."""
        graphs = [self.graph(step) for step in range(start, start + steps)]
        union = nx.DiGraph() if any(graph.is_directed() for graph in graphs) else nx.Graph()
        for graph in graphs:
            union.update(graph.to_directed() if union.is_directed() else graph)
        return union

    def restricted_to(self, peers: Iterable[int]) -> "Schedule":
        """Return the schedule of the subgraphs of some peers, which are numbered from 0 in sorted order."""
        chosen = frozenset(peers)

        def graph(step: int) -> nx.Graph:
            subgraph = self.graph(step).subgraph(chosen)
            return nx.convert_node_labels_to_integers(subgraph, ordering="sorted")

        return Schedule(len(chosen), graph, self.period)


SCHEDULES: dict[str, Callable[..., Schedule]] = {}
"""Schedules by their name in configs."""


def static(graph: nx.Graph) -> Schedule:
    """Return the schedule of a graph that does not change."""
    return Schedule(len(graph), lambda step: graph, 1)


@register(
    SCHEDULES, "one message per peer and exchange, and values reach all peers in every period"
)
def one_peer_exponential(peers: int) -> Schedule:
    """Directed: at step t peer i sends to the one peer i + 2^(t mod log2 n).

    Exact after log2(n) steps when n is a power of two, at one message per peer and step.
    """
    _require(peers >= 2, f"this schedule needs at least 2 peers, not {peers}")
    hops = (peers - 1).bit_length()

    def graph(step: int) -> nx.Graph:
        hop = 1 << (step % hops)
        step_graph = _without_links(peers, directed=True)
        step_graph.add_edges_from((i, (i + hop) % peers) for i in range(peers))
        return step_graph

    return Schedule(peers, graph, hops)


@register(SCHEDULES, "one message per peer and exchange, to another peer each time")
def random_matchings(peers: int, period: int | None = None, seed: Seed = 0) -> Schedule:
    """At each step peers form random pairs (with an odd number of peers, one has no partner).

    Without `period` every step draws new pairs. With one, the first `period` steps repeat, so the mixing
    rate can be computed exactly. Raise it when a short period connects some peers badly.
    """
    return _random_schedule(
        peers, 2, period, seed, lambda order: zip(order[::2], order[1::2], strict=False)
    )


@register(SCHEDULES, "peers that are far apart in one ring are near in another")
def rotating_rings(peers: int, period: int | None = None, seed: Seed = 0) -> Schedule:
    """At each step a ring of all peers in a new random order; `period` as for random-matchings."""
    return _random_schedule(
        peers, 3, period, seed, lambda order: zip(order, order[1:] + order[:1], strict=True)
    )


def _random_schedule(
    peers: int,
    min_peers: int,
    period: int | None,
    seed: Seed,
    links: Callable[[list[int]], Iterable[Edge]],
) -> Schedule:
    """Return a schedule with the links that `links` makes of a new random order of peers at each step."""
    _require(peers >= min_peers, f"this schedule needs at least {min_peers} peers, not {peers}")
    _require(period is None or period > 0, f"period is a number of steps, 1 or more, not {period}")
    # A generator is used only here, once, because graph(step) must not depend on earlier calls.
    number = seed if isinstance(seed, int) else int(seed.integers(2**63))

    def graph(step: int) -> nx.Graph:
        _require(step >= 0, f"steps count from 0, not {step}")
        rng = np.random.default_rng([number, step % period if period else step])
        step_graph = _without_links(peers)
        step_graph.add_edges_from(links(rng.permutation(peers).tolist()))
        return step_graph

    return Schedule(peers, graph, period)


# --- churn: peers that come and go, links that fail -----------------------------------------------

EventKind = Literal["arrive", "leave", "link-down", "link-up"]
"""What can happen to a peer or a link."""
_EVENT_KINDS = get_args(EventKind)


@dataclass(frozen=True, order=True)
class Event:
    """At the start of `step`, a peer arrives or leaves, or the link (peer, other) goes down or up."""

    step: int
    kind: EventKind
    peer: int
    other: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _EVENT_KINDS:
            raise TopologyError(f"unknown event {self.kind!r}: use {', '.join(_EVENT_KINDS)}")
        if self.step < 0:
            raise TopologyError(f"steps count from 0, not {self.step}")
        if (self.other is None) == self.kind.startswith("link"):
            expected = "two peers" if self.other is None else "one peer"
            raise TopologyError(f"{self.kind} names {expected}")


def churn(graph: nx.Graph, events: Iterable[Event], absent: Iterable[int] = ()) -> Schedule:
    """Return the schedule whose graph at step t is `graph` after all events up to and including step t.

    `absent` are the peers that are not present before the first event. Events of peers or links that `graph`
    lacks, arrivals of present peers and departures of absent ones are errors.
    """
    missing: set[int | Link] = set(absent)  # absent peers, and links that are down
    steps, missing_since = [-1], [frozenset(missing)]
    for event in sorted(events, key=lambda event: event.step):  # stable within a step
        item = _event_item(event, graph)
        if (item in missing) == (event.kind in ("leave", "link-down")):
            up, down = ("present", "absent") if event.other is None else ("up", "down")
            raise TopologyError(
                f"{_describe(event)}: it is {down if item in missing else up} already"
            )
        missing ^= {item}
        if event.step != steps[-1]:
            steps.append(event.step)
            missing_since.append(missing_since[-1])
        missing_since[-1] = frozenset(missing)

    def graph_at(step: int) -> nx.Graph:
        missing = missing_since[int(np.searchsorted(steps, step, side="right")) - 1]
        present = graph.subgraph(graph.nodes - missing).copy()
        present.remove_edges_from([e for e in present.edges if _link(graph, *e) in missing])
        return present

    return Schedule(len(graph), graph_at)


Link = frozenset[int] | Edge
"""The two ends of a link; a tuple (from, to) if the link is directed."""


def _link(graph: nx.Graph, a: int, b: int) -> Link:
    """Return the link from a to b, as a set of its ends if the graph is undirected."""
    return (a, b) if graph.is_directed() else frozenset((a, b))


def _describe(event: Event) -> str:
    """Return an event as text for errors: `step 3: link-down 0–1`."""
    other = "" if event.other is None else f"–{event.other}"
    return f"step {event.step}: {event.kind} {event.peer}{other}"


def _event_item(event: Event, graph: nx.Graph) -> int | Link:
    """Return the peer or link of an event; raise if the graph lacks it."""
    if event.other is None:
        if event.peer not in graph:
            raise TopologyError(
                f"{_describe(event)}: the graph has peers {name_peers(graph.nodes)}"
            )
        return event.peer
    if not graph.has_edge(event.peer, event.other):
        raise TopologyError(f"{_describe(event)}: the graph has no such link")
    return _link(graph, event.peer, event.other)


def draw_events(
    graph: nx.Graph,
    steps: int,
    leave: float = 0.01,
    arrive: float = 0.1,
    link_down: float = 0.0,
    link_up: float = 0.5,
    keep: int = 1,
    seed: Seed = 0,
) -> list[Event]:
    """Draw a churn trace: in each step, present peers leave and absent ones come back with a probability.

    In the long run the fraction arrive / (arrive + leave) of the peers is present; the same holds for links
    with link_up and link_down. Raise `leave` for more churn, `arrive` for shorter absences; at least `keep`
    peers stay.
    """
    probabilities = {"leave": leave, "arrive": arrive, "link_down": link_down, "link_up": link_up}
    for name, probability in probabilities.items():
        _require(
            0 <= probability <= 1, f"{name} is a probability per step, 0 … 1, not {probability}"
        )
    rng = np.random.default_rng(seed)
    peers, links = [(peer,) for peer in sorted(graph.nodes)], sorted(graph.edges)
    peer_is_up, link_is_up = np.ones(len(peers), bool), np.ones(len(links), bool)
    events: list[Event] = []
    for step in range(1, steps):
        for items, is_up, p_up, p_down, kinds, min_up in (
            (peers, peer_is_up, arrive, leave, ("arrive", "leave"), keep),
            (links, link_is_up, link_up, link_down, ("link-up", "link-down"), 0),
        ):
            draw = rng.random(len(items))
            goes_up, goes_down = ~is_up & (draw < p_up), is_up & (draw < p_down)
            max_down = max(int(is_up.sum() + goes_up.sum()) - min_up, 0)
            goes_down[np.flatnonzero(goes_down)[max_down:]] = False
            is_up[:] = (is_up | goes_up) & ~goes_down
            for kind, changed in zip(kinds, (goes_up, goes_down), strict=True):
                events += [Event(step, kind, *items[i]) for i in np.flatnonzero(changed)]  # pyright: ignore
    return events


def read_events(path: str | Path) -> list[Event]:
    """Read a churn trace: `step,event,peer[,other]` on each line; `#` starts a comment.

    Errors give file, line and reason.
    """
    events = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path}: cannot read the churn trace: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        fields = [field.strip() for field in line.split("#")[0].split(",")]
        if fields == [""]:
            continue
        try:
            if len(fields) not in (3, 4):
                raise TopologyError(f"{len(fields)} fields, not step,event,peer[,other]")
            peers = [int(field) for field in fields[2:]]
            events.append(Event(int(fields[0]), fields[1], *peers))  # pyright: ignore[reportArgumentType]
        except ValueError as error:  # TopologyError is a ValueError too
            raise TopologyError(f"{path}, line {number}: {error}: {line.strip()!r}") from error
    return events


def write_events(path: str | Path, events: Sequence[Event]) -> None:
    """Write a churn trace that `read_events` reads."""
    lines = ["# step,event,peer[,other]"]
    for event in events:
        other = "" if event.other is None else f",{event.other}"
        lines.append(f"{event.step},{event.kind},{event.peer}{other}")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
