"""Graphs that change over time: the graph at step t is a function of t, always the same one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import networkx as nx
import numpy as np
from scipy.sparse import csr_array

from .graphs import register
from .structure import Seed, TopologyError, name_peers
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
    _at_least(peers, 2)
    hops = (peers - 1).bit_length()

    def graph(step: int) -> nx.Graph:
        hop = 1 << (step % hops)
        made = nx.DiGraph()
        made.add_nodes_from(range(peers))
        made.add_edges_from((i, (i + hop) % peers) for i in range(peers))
        return made

    return Schedule(peers, graph, hops)


@register(SCHEDULES, "one message per peer and exchange, to somebody else each time")
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


@register(SCHEDULES, "a ring in a new order each time has no slow direction")
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
    ordered = sorted(
        events, key=lambda event: event.step
    )  # stable: a step's events keep their order
    present = set(graph.nodes) - set(away)
    down: set[frozenset[int] | tuple[int, int]] = set()
    steps: list[int] = [-1]
    states: list[tuple[frozenset[int], frozenset]] = [(frozenset(present), frozenset())]
    for event in ordered:
        _apply(graph, event, present, down)
        if event.step != steps[-1]:
            steps.append(event.step)
            states.append(states[-1])
        states[-1] = (frozenset(present), frozenset(down))

    def at(step: int) -> nx.Graph:
        here, failed = states[int(np.searchsorted(steps, step, side="right")) - 1]
        made = graph.subgraph(here).copy()
        made.remove_edges_from([edge for edge in made.edges if _link(graph, *edge) in failed])
        return made

    return Schedule(len(graph), at)


def _link(graph: nx.Graph, a: int, b: int) -> frozenset[int] | tuple[int, int]:
    return (a, b) if graph.is_directed() else frozenset((a, b))


def _apply(graph: nx.Graph, event: Event, present: set[int], down: set) -> None:
    where = f"step {event.step}: {event.kind} {event.peer}"
    if event.other is not None:
        where += f"–{event.other}"
        if not graph.has_edge(event.peer, event.other):
            raise TopologyError(f"{where}: the graph has no such link")
        link = _link(graph, event.peer, event.other)
        if (link in down) == (event.kind == "link-down"):
            raise TopologyError(f"{where}: it is {'down' if link in down else 'up'} already")
        down.symmetric_difference_update({link})
        return
    if event.peer not in graph:
        raise TopologyError(f"{where}: the graph has peers {name_peers(graph.nodes)}")
    if (event.peer in present) == (event.kind == "arrive"):
        raise TopologyError(
            f"{where}: it is {'there' if event.peer in present else 'away'} already"
        )
    present.symmetric_difference_update({event.peer})


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
    for name, chance in (
        ("leave", leave),
        ("arrive", arrive),
        ("link_down", link_down),
        ("link_up", link_up),
    ):
        if not 0 <= chance <= 1:
            raise TopologyError(f"{name} is a probability per step, 0 … 1, not {chance}")
    rng = np.random.default_rng(seed)
    peers, links = sorted(graph.nodes), sorted(graph.edges)
    here, up = np.ones(len(peers), bool), np.ones(len(links), bool)
    events: list[Event] = []
    for step in range(1, steps):
        draw = rng.random(len(peers))
        back, gone = ~here & (draw < arrive), here & (draw < leave)
        spare = int(here.sum() + back.sum()) - keep
        gone[np.flatnonzero(gone)[max(spare, 0) :]] = False
        here = (here | back) & ~gone
        events += [Event(step, "arrive", peers[i]) for i in np.flatnonzero(back)]
        events += [Event(step, "leave", peers[i]) for i in np.flatnonzero(gone)]
        draw = rng.random(len(links))
        healed, failed = ~up & (draw < link_up), up & (draw < link_down)
        up = (up | healed) & ~failed
        events += [Event(step, "link-up", *links[i]) for i in np.flatnonzero(healed)]
        events += [Event(step, "link-down", *links[i]) for i in np.flatnonzero(failed)]
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
