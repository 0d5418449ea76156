"""Graphs and schedules: plain networkx graphs whose nodes are the peers 0 … n−1, and graphs that change over
time, where the graph at step t is a function of t, always the same one.

`delay` on edges, `pos` and `group` on nodes are set where a builder knows them. Every random builder takes
`seed` (an int or a numpy Generator) and gives the same graph for the same int.
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
"""Graph builders by the name a config uses."""

REASONS: dict[str, str] = {}
"""Why a kind of graph mixes as it does, in one line."""

DRAWS = 20
"""How often a random builder draws again before it gives up on a connected graph."""


def register(table: dict[str, F], reason: str = "") -> Callable[[F], F]:
    """Decorate a builder (or a schedule): a config names it as its function, with `-` for `_`."""

    def add(function: F) -> F:
        name = function.__name__.replace("_", "-")
        table[name], REASONS[name] = function, reason
        return function

    return add


def _empty(peers: int, directed: bool = False) -> nx.Graph:
    if peers < 1:
        raise TopologyError(f"a graph needs at least 1 peer, not {peers}")
    graph = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from(range(peers))
    return graph


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise TopologyError(message)


def _draw(make: Callable[[int], nx.Graph], seed: Seed, hint: str) -> nx.Graph:
    """The first connected graph among `DRAWS` draws, with nodes in order."""
    rng = np.random.default_rng(seed)
    graph = nx.Graph()
    for _ in range(DRAWS):
        drawn = make(int(rng.integers(2**32)))
        graph = _empty(drawn.number_of_nodes())
        graph.update(drawn)
        if nx.is_connected(graph):
            return graph
    parts = components(graph)
    raise DisconnectedError(
        f"none of {DRAWS} draws was connected; the last had {len(parts)} components: "
        f"{name_components(parts)}. {hint}",
        parts,
    )


@register(BUILDERS, "news walks from neighbour to neighbour: exchanges grow with n²")
def ring(peers: int) -> nx.Graph:
    """Each peer talks to two neighbours in a circle: few links, slow mixing (n² exchanges)."""
    graph = _empty(peers)
    if peers > 1:
        graph.add_edges_from((i, (i + 1) % peers) for i in range(peers))
    return graph


@register(BUILDERS, "a ring with a link cut: four times slower still")
def path(peers: int) -> nx.Graph:
    """A ring with one link cut: four times slower than the ring, and every link a weak spot."""
    graph = _empty(peers)
    graph.add_edges_from((i, i + 1) for i in range(peers - 1))
    return graph


@register(BUILDERS, "everything passes through one peer")
def star(peers: int) -> nx.Graph:
    """Everybody talks to peer 0 alone: the shape of a server, with a server's weak spot."""
    graph = _empty(peers)
    graph.add_edges_from((0, i) for i in range(1, peers))
    return graph


@register(BUILDERS, "news walks in two directions: exchanges grow with n")
def torus(peers: int, rows: int | None = None) -> nx.Graph:
    """A grid whose borders meet. `rows` must divide `peers`; left out, the squarest grid it is."""
    _need(peers >= 4, f"a torus needs at least 4 peers, not {peers}; use a ring")
    if rows is None:
        rows = next(r for r in range(isqrt(peers), 0, -1) if peers % r == 0)
        _need(rows > 1, f"{peers} is prime, so no torus has that many peers; use {peers + 1}")
    _need(
        rows > 1 and peers % rows == 0 and peers // rows > 1,
        f"a torus of {peers} peers cannot have {rows} rows: rows × columns must be {peers}, "
        "both above 1",
    )
    columns = peers // rows
    graph = _empty(peers)
    for i in range(peers):
        row, column = divmod(i, columns)
        graph.add_edge(i, row * columns + (column + 1) % columns)
        graph.add_edge(i, (row + 1) % rows * columns + column)
    return graph


@register(BUILDERS, "every peer is log2 n hops away: exchanges grow with log n")
def hypercube(peers: int) -> nx.Graph:
    """Peers differ from their log2(n) neighbours in one bit. Needs a power of two."""
    below = 1 << max(peers.bit_length() - 1, 0)
    _need(
        peers >= 1 and peers == below,
        f"a hypercube needs a power of two, not {peers} peers; the nearest are {below} and "
        f"{2 * below}",
    )
    graph = _empty(peers)
    bits = peers.bit_length() - 1
    graph.add_edges_from((i, i ^ (1 << bit)) for i in range(peers) for bit in range(bits))
    return graph


@register(BUILDERS, "everybody hears everybody: exact in one exchange")
def clique(peers: int) -> nx.Graph:
    """Everybody talks to everybody: exact in one exchange, at n² messages."""
    graph = _empty(peers)
    graph.add_edges_from(combinations(range(peers), 2))
    return graph


@register(BUILDERS, "random links are shortcuts: the gap does not fall as the swarm grows")
def regular(peers: int, degree: int = 4, seed: Seed = 0) -> nx.Graph:
    """A random graph in which everybody has `degree` neighbours: near the best mixing per link.

    Raise `degree` for faster mixing and tolerance of lost links, lower it for fewer messages; below
    3 it is no expander. `peers · degree` must be even.
    """
    _need(
        0 < degree < peers and peers * degree % 2 == 0,
        f"no graph of {peers} peers has {degree} neighbours each: the degree must be 1 … "
        f"{peers - 1} and peers × degree even",
    )
    return _draw(
        lambda s: nx.random_regular_graph(degree, peers, seed=s), seed, "Use degree 3 or more."
    )


@register(BUILDERS, "random links are shortcuts, but some peers have few of them")
def erdos_renyi(peers: int, p: float | None = None, seed: Seed = 0) -> nx.Graph:
    """Each pair is linked with probability `p`, given that the whole is connected, else an error.

    The default is twice the threshold ln(n)/n under which such graphs fall apart. Raise it when the
    error says so, lower it for fewer links.
    """
    threshold = log(max(peers, 2)) / max(peers, 2)
    chance = min(1.0, 2 * threshold) if p is None else p
    _need(0 <= chance <= 1, f"p is a probability, 0 … 1, not {chance}")
    return _draw(
        lambda s: nx.fast_gnp_random_graph(peers, chance, seed=s),
        seed,
        f"Raise p = {chance:.4g} above ln(n)/n = {threshold:.4g}.",
    )


@register(BUILDERS, "a lattice with a few shortcuts")
def watts_strogatz(peers: int, degree: int = 4, p: float = 0.1, seed: Seed = 0) -> nx.Graph:
    """A ring of near neighbours, each link rewired with probability `p`.

    `p` = 0 is a plain lattice (slow), 1 nearly a random graph (fast); a little goes a long way.
    """
    _need(
        2 <= degree < peers and degree % 2 == 0,
        f"degree must be even, 2 … {peers - 1}, not {degree}",
    )
    _need(0 <= p <= 1, f"p is a probability, 0 … 1, not {p}")
    return _draw(
        lambda s: nx.watts_strogatz_graph(peers, degree, p, seed=s), seed, "Raise the degree."
    )


@register(BUILDERS, "hubs shorten the ways, and the links of their neighbours weigh little")
def barabasi_albert(peers: int, links: int = 2, seed: Seed = 0) -> nx.Graph:
    """Newcomers link to `links` peers, popular ones first: a few hubs, many leaves.

    Raise `links` to make the hubs matter less; with 1 it is a tree and every link a weak spot.
    """
    _need(1 <= links < peers, f"links must be 1 … {peers - 1}, not {links}")
    return _draw(lambda s: nx.barabasi_albert_graph(peers, links, seed=s), seed, "Raise links.")


@register(BUILDERS, "links of length 1, 2, 4, …, one way: exchanges grow with log n")
def exponential(peers: int) -> nx.DiGraph:
    """Directed: peer i sends to i + 1, i + 2, i + 4, … . Gap 2 / (1 + log2 n) for even n."""
    graph = _empty(peers, directed=True)
    hops = (peers - 1).bit_length()
    graph.add_edges_from((i, (i + (1 << hop)) % peers) for i in range(peers) for hop in range(hops))
    return graph  # pyright: ignore[reportReturnType]


@register(BUILDERS, "explicit shortcuts: the gap does not fall as the swarm grows")
def expander(peers: int) -> nx.Graph:
    """Margulis, Gabber and Galil's explicit expander: at most 8 neighbours, no randomness.

    It lives on an m × m grid of residues; for other sizes the nodes above `peers` are merged into
    the first ones, which gives those a few more neighbours and leaves the expansion.
    """
    graph = _empty(peers)
    m = isqrt(peers - 1) + 1 if peers > 1 else 1
    for x in range(m):
        for y in range(m):
            here = (x * m + y) % peers
            for a, b in ((x + 2 * y, y), (x + 2 * y + 1, y), (x, y + 2 * x), (x, y + 2 * x + 1)):
                there = (a % m * m + b % m) % peers
                if there != here:
                    graph.add_edge(here, there)
    return graph


@register(BUILDERS, "groups mix fast inside; links between neighbouring groups carry the rest")
def clusters(
    peers: int, clusters: int = 4, links: int = 1, degree: int | None = None, seed: Seed = 0
) -> nx.Graph:
    """Tight groups in a circle, successive ones joined by `links` links; `group` on every node.

    Groups are cliques, or random regular of `degree` when given. Lower `links` to see what a thin
    cut costs; with 1 the joining peers are the swarm's weak spots.
    """
    _need(
        1 <= clusters <= peers, f"{peers} peers cannot form {clusters} clusters; give 1 … {peers}"
    )
    rng = np.random.default_rng(seed)
    groups = [[int(i) for i in part] for part in np.array_split(np.arange(peers), clusters)]
    graph = _empty(peers)
    for index, group in enumerate(groups):
        inner = clique(len(group)) if degree is None else regular(len(group), degree, rng)
        graph.add_edges_from((group[a], group[b]) for a, b in inner.edges)
        nx.set_node_attributes(graph, dict.fromkeys(group, index), "group")
    joints = clusters if clusters > 2 else clusters - 1  # two clusters meet once, not twice
    for index in range(joints):
        here, there = groups[index], groups[(index + 1) % clusters]
        pairs = len(here) * len(there)
        _need(
            1 <= links <= pairs,
            f"clusters of {len(here)} and {len(there)} peers have 1 … {pairs} links, not {links}",
        )
        if links <= min(len(here), len(there)):  # nobody carries two links while others carry none
            ends = (rng.choice(side, size=links, replace=False).tolist() for side in (here, there))
            graph.add_edges_from(zip(*ends, strict=True))
            continue
        for pick in rng.choice(pairs, size=links, replace=False):
            graph.add_edge(here[int(pick) // len(there)], there[int(pick) % len(there)])
    return graph


@register(BUILDERS)
def geographic(
    peers: int, radius: float | None = None, delay: float = 1.0, seed: Seed = 0
) -> nx.Graph:
    """Peers at random places of a unit square, linked when nearer than `radius`.

    Nodes carry `pos`, edges `delay` = distance × the delay of one unit. The default radius is 1.5
    times the one under which such graphs fall apart; raise it when the error says so.
    """
    threshold = sqrt(log(max(peers, 2)) / (pi * max(peers, 2)))
    reach = 1.5 * threshold if radius is None else radius

    def make(number: int) -> nx.Graph:
        points = np.random.default_rng(number).random((peers, 2))
        graph = _empty(peers)
        pairs = KDTree(points).query_pairs(reach, output_type="ndarray")
        lengths = np.linalg.norm(points[pairs[:, 0]] - points[pairs[:, 1]], axis=1) * delay
        for (a, b), length in zip(pairs.tolist(), lengths.tolist(), strict=True):
            graph.add_edge(a, b, delay=length)
        places = {i: (x, y) for i, (x, y) in enumerate(points.tolist())}
        nx.set_node_attributes(graph, places, "pos")
        return graph

    return _draw(make, seed, f"Raise radius = {reach:.3g} above {threshold:.3g}.")


# --- graphs that change over time -----------------------------------------------------------------


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
        if self.period is None:
            return self._matrix(step, rule)
        return self._kept_matrix(step % self.period, rule)

    @cached_property
    def _kept_matrix(self) -> Callable[[int, Rule], csr_array]:
        """The matrices of a schedule that repeats are made once."""
        return cache(self._matrix)

    def _matrix(self, step: int, rule: Rule) -> csr_array:
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

    def part(self, peers: Iterable[int]) -> "Schedule":
        """The same schedule among some peers alone, numbered anew in their order."""
        chosen = frozenset(peers)

        def graph(step: int) -> nx.Graph:
            part = self.graph(step).subgraph(chosen)
            return nx.convert_node_labels_to_integers(part, ordering="sorted")

        return Schedule(len(chosen), graph, self.period)


SCHEDULES: dict[str, Callable[..., Schedule]] = {}
"""Schedules by the name a config uses."""


def static(graph: nx.Graph) -> Schedule:
    """A graph that stays as it is."""
    return Schedule(len(graph), lambda step: graph, 1)


@register(SCHEDULES, "one message per peer and exchange, and every period reaches everybody")
def one_peer_exponential(peers: int) -> Schedule:
    """Directed: at step t everybody sends to one peer, 2^(t mod log2 n) places on.

    Exact after log2(n) steps when n is a power of two, at one message per peer and step.
    """
    _need(peers >= 2, f"this schedule needs at least 2 peers, not {peers}")
    hops = (peers - 1).bit_length()

    def graph(step: int) -> nx.Graph:
        hop = 1 << (step % hops)
        made = _empty(peers, directed=True)
        made.add_edges_from((i, (i + hop) % peers) for i in range(peers))
        return made

    return Schedule(peers, graph, hops)


@register(SCHEDULES, "one message per peer and exchange, to somebody else each time")
def random_matchings(peers: int, period: int | None = None, seed: Seed = 0) -> Schedule:
    """At each step peers pair off at random (one sits out when they are odd).

    `period` = None draws afresh for ever; a number repeats the first so many pairings, which makes the
    rate exact. Raise it when a short period leaves some peers badly joined.
    """
    return _random_schedule(
        peers, 2, period, seed, lambda order: zip(order[::2], order[1::2], strict=False)
    )


@register(SCHEDULES, "a ring in a new order each time has no slow direction")
def rotating_rings(peers: int, period: int | None = None, seed: Seed = 0) -> Schedule:
    """At each step a ring through all peers in a new random order: degree 2, and no slow direction."""
    return _random_schedule(
        peers, 3, period, seed, lambda order: zip(order, order[1:] + order[:1], strict=True)
    )


def _random_schedule(
    peers: int,
    least: int,
    period: int | None,
    seed: Seed,
    links: Callable[[list[int]], Iterable[Edge]],
) -> Schedule:
    """At each step the links among peers in a new random order."""
    _need(peers >= least, f"this schedule needs at least {least} peers, not {peers}")
    _need(period is None or period > 0, f"period is a number of steps, 1 or more, not {period}")
    # One number that stands for the seed: a generator is drawn from once, now, not at each step.
    key = seed if isinstance(seed, int) else int(seed.integers(2**63))

    def graph(step: int) -> nx.Graph:
        _need(step >= 0, f"steps count from 0, not {step}")
        rng = np.random.default_rng([key, step % period if period else step])
        made = _empty(peers)
        made.add_edges_from(links(rng.permutation(peers).tolist()))
        return made

    return Schedule(peers, graph, period)


# --- peers that come and go, links that fail ------------------------------------------------------

Kind = Literal["arrive", "leave", "link-down", "link-up"]
_KINDS = get_args(Kind)


@dataclass(frozen=True, order=True)
class Event:
    """At the start of `step`, a peer arrives or leaves, or the link (peer, other) fails or heals."""

    step: int
    kind: Kind
    peer: int
    other: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise TopologyError(f"unknown event {self.kind!r}: use {', '.join(_KINDS)}")
        if self.step < 0:
            raise TopologyError(f"steps count from 0, not {self.step}")
        if (self.other is None) == self.kind.startswith("link"):
            need = "two peers" if self.other is None else "one peer"
            raise TopologyError(f"{self.kind} names {need}")


def churn(graph: nx.Graph, events: Iterable[Event], away: Iterable[int] = ()) -> Schedule:
    """The graph at step t: `graph` after all events up to and including step t.

    `away` are peers that are not there at step 0. Events about peers or links that `graph` lacks, an
    arrival of somebody present or a departure of somebody absent are errors.
    """
    out: set[int | Link] = set(away)  # peers that are away, links that are down
    steps, states = [-1], [frozenset(out)]
    for event in sorted(events, key=lambda event: event.step):  # stable: a step's keep their order
        item = _named_by(event, graph)
        if (item in out) == (event.kind in ("leave", "link-down")):
            on, off = ("there", "away") if event.other is None else ("up", "down")
            raise TopologyError(f"{_told(event)}: it is {off if item in out else on} already")
        out ^= {item}
        if event.step != steps[-1]:
            steps.append(event.step)
            states.append(states[-1])
        states[-1] = frozenset(out)

    def at(step: int) -> nx.Graph:
        missing = states[int(np.searchsorted(steps, step, side="right")) - 1]
        made = graph.subgraph(graph.nodes - missing).copy()
        made.remove_edges_from([edge for edge in made.edges if _link(graph, *edge) in missing])
        return made

    return Schedule(len(graph), at)


Link = frozenset[int] | Edge
"""The ends of a link; in order, where it is directed."""


def _link(graph: nx.Graph, a: int, b: int) -> Link:
    return (a, b) if graph.is_directed() else frozenset((a, b))


def _told(event: Event) -> str:
    other = "" if event.other is None else f"–{event.other}"
    return f"step {event.step}: {event.kind} {event.peer}{other}"


def _named_by(event: Event, graph: nx.Graph) -> int | Link:
    """The peer or link that an event is about."""
    if event.other is None:
        if event.peer not in graph:
            raise TopologyError(f"{_told(event)}: the graph has peers {name_peers(graph.nodes)}")
        return event.peer
    if not graph.has_edge(event.peer, event.other):
        raise TopologyError(f"{_told(event)}: the graph has no such link")
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
    """A churn trace: per step, each present peer leaves and each absent one comes back by chance.

    The long-run share present is arrive / (arrive + leave); links likewise with link_up and
    link_down. Raise `leave` for more churn, `arrive` for shorter absences; at least `keep` peers stay.
    """
    chances = {"leave": leave, "arrive": arrive, "link_down": link_down, "link_up": link_up}
    for name, chance in chances.items():
        _need(0 <= chance <= 1, f"{name} is a probability per step, 0 … 1, not {chance}")
    rng = np.random.default_rng(seed)
    peers, links = [(peer,) for peer in sorted(graph.nodes)], sorted(graph.edges)
    here, up = np.ones(len(peers), bool), np.ones(len(links), bool)
    events: list[Event] = []
    for step in range(1, steps):
        for items, on, rise, fall, kinds, least in (
            (peers, here, arrive, leave, ("arrive", "leave"), keep),
            (links, up, link_up, link_down, ("link-up", "link-down"), 0),
        ):
            draw = rng.random(len(items))
            back, gone = ~on & (draw < rise), on & (draw < fall)
            spare = int(on.sum() + back.sum()) - least
            gone[np.flatnonzero(gone)[max(spare, 0) :]] = False
            on[:] = (on | back) & ~gone
            for kind, changed in zip(kinds, (back, gone), strict=True):
                events += [Event(step, kind, *items[i]) for i in np.flatnonzero(changed)]  # pyright: ignore
    return events


def read_events(path: str | Path) -> list[Event]:
    """Read a trace: one `step,event,peer[,other]` a line, `#` starts a comment.

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
        except ValueError as error:  # TopologyError is one too
            raise TopologyError(f"{path}, line {number}: {error}: {line.strip()!r}") from error
    return events


def write_events(path: str | Path, events: Sequence[Event]) -> None:
    """Write a trace that `read_events` reads back."""
    lines = ["# step,event,peer[,other]"]
    for event in events:
        other = "" if event.other is None else f",{event.other}"
        lines.append(f"{event.step},{event.kind},{event.peer}{other}")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
