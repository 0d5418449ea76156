"""What is known of a swarm up to one moment: its peers, their curves, links and events.

Whatever the source is (a broker, or a results folder), it becomes `Observation`s and `Event`s, which are
applied to a `History` in order of time. Pages and reports draw a `History`, and know no source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Literal

MOST_POINTS = 240
"""The most points of a curve; then every second one is dropped, so that a page may stay open for months."""
MOST_EVENTS = 500
"""The most events that are kept; the oldest are dropped."""
MOST_GROUPS = 12
"""The most groups that are shown; peers that have more tasks than that are not grouped by them."""
NO_GROUP = "all peers"

Kind = Literal[
    "joined", "back", "rejoined", "restarted", "founded", "counted", "aligned", "fused",
    "decided", "offline", "banned", "refused", "lost", "dead", "left", "note",
]  # fmt: skip
GONE = frozenset({"left", "dead", "lost", "refused"})
"""States of peers that do not take part any more."""
_DIGITS = re.compile(r"([0-9]+)")
_RETURNS = frozenset({"joined", "back", "rejoined", "restarted"})


@dataclass(frozen=True)
class Observation:
    """What one message says about one peer; None and NaN: it says nothing about that.

    time: the position on the x axis: seconds or rounds. state: a phase of a live peer, or one of `GONE`.
    disagreement: by partial model, the peer's relative distance from its neighbours' values.
    bytes: what its process has sent. neighbours: names of the peers that it sends to. bytes_to: what it has
    sent to each of them.
    metrics: the named metrics of the peer's learner.
    gain: accuracy minus that of a twin that learns alone.
    checked: what is to be known about its signature: empty if it was checked or the swarm has none.
    """

    peer: str
    time: float
    round: int | None = None
    accuracy: float = nan
    loss: float = nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    bytes: int | None = None
    state: str | None = None
    reason: str | None = None
    group: str | None = None
    models: Sequence[str] | None = None
    neighbours: Sequence[str] | None = None
    bytes_to: Mapping[str, int] = field(default_factory=dict)
    disagreement: Mapping[str, float] = field(default_factory=dict)
    gain: float = nan
    checked: str | None = None


@dataclass(frozen=True)
class Event:
    """Something that happened to a peer, or, with an empty name, to the swarm."""

    time: float
    kind: Kind
    peer: str
    text: str


@dataclass
class Curve:
    """A line of at most MOST_POINTS points, in order of x."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        """Add a point; a second one at the same x replaces the first. NaN is left out."""
        if not isfinite(y):
            return
        if self.x and self.x[-1] == x:
            self.y[-1] = y
            return
        self.x.append(x)
        self.y.append(y)
        if len(self.x) > MOST_POINTS:
            # The last point stays, whether their number is even or odd.
            del self.x[-2::-2], self.y[-2::-2]


@dataclass
class PeerState:
    """The latest that is known of a peer, and its accuracy so far."""

    name: str
    group: str = NO_GROUP
    state: str = "starting"
    reason: str = ""
    round: int = 0
    accuracy: float = nan
    loss: float = nan
    metrics: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    """What it has sent, former processes included."""
    counter: int = 0
    """What its present process has sent."""
    bytes_to: Mapping[str, int] = field(default_factory=dict)
    gain: float = nan
    checked: str = ""
    models: tuple[str, ...] = ()
    disagreement: dict[str, float] = field(default_factory=dict)
    spread: float = nan
    """In the lab: how much of a value that one peer started with has arrived; 1: the average."""
    seen: float = nan
    curve: Curve = field(default_factory=Curve)

    @property
    def gone(self) -> bool:
        """Whether the peer does not take part any more."""
        return self.state in GONE


class History:
    """A swarm's peers, curves, links and events, up to `now`.

    name: shown as the title. x_label: what time is counted in. origin: the wall clock's time at 0, for a
    history of now; None for one of the past.
    """

    def __init__(self, name: str, x_label: str = "seconds", origin: float | None = None):
        self.name, self.x_label, self.origin = name, x_label, origin
        self.now = 0.0
        self.peers: dict[str, PeerState] = {}
        self._links_of: dict[str, set[tuple[str, str]]] = {}
        self.events: list[Event] = []
        self.mean, self.sent = Curve(), Curve()
        self.groups: dict[str, Curve] = {}
        self.disagreement: dict[str, Curve] = {}
        self.metrics: dict[str, Curve] = {}
        """The mean over peers of each named metric."""

    def apply(self, seen: Observation) -> None:
        """Take over what a message says."""
        peer = self.peers.setdefault(seen.peer, PeerState(seen.peer))
        self.now = max(self.now, seen.time)
        peer.seen = seen.time
        if isfinite(seen.accuracy):
            peer.accuracy = seen.accuracy
            peer.curve.add(seen.time, seen.accuracy)
        peer.loss = seen.loss if isfinite(seen.loss) else peer.loss
        peer.gain = seen.gain if isfinite(seen.gain) else peer.gain
        peer.disagreement |= seen.disagreement
        peer.metrics |= {name: value for name, value in seen.metrics.items() if isfinite(value)}
        if seen.state is not None:
            peer.reason = ""  # that of an earlier state
        if seen.bytes is not None:
            # The counter of a peer that was killed begins again.
            peer.bytes += seen.bytes - peer.counter if seen.bytes >= peer.counter else seen.bytes
            peer.counter = seen.bytes
        for name in ("round", "state", "reason", "group", "checked"):
            if (value := getattr(seen, name)) is not None:
                setattr(peer, name, value)
        if seen.models is not None:
            peer.models = tuple(seen.models)
        peer.bytes_to = seen.bytes_to or peer.bytes_to
        if seen.neighbours is not None:
            self.connect(seen.peer, seen.neighbours)

    def connect(self, peer: str, neighbours: Iterable[str]) -> None:
        """Replace the links on which a peer sends; those on which others send to it stay."""
        self._links_of[peer] = {pair(peer, other) for other in neighbours if other != peer}

    @property
    def links(self) -> set[tuple[str, str]] | None:
        """All links; None as long as none is known: then every peer may reach every other."""
        return set().union(*self._links_of.values()) if self._links_of else None

    def record(self, event: Event) -> None:
        """Add an event to the timeline alone: what it means for its peer is known from elsewhere."""
        self.events.append(event)
        del self.events[:-MOST_EVENTS]

    def add(self, event: Event) -> None:
        """Add an event, and note what it says about the state of its peer."""
        self.now = max(self.now, event.time)
        self.record(event)
        peer = self.peers.get(event.peer)
        if peer is None:
            return
        if event.kind in GONE:
            peer.state, peer.reason = event.kind, event.text
        elif event.kind in _RETURNS and (peer.gone or peer.state == "offline"):
            peer.state, peer.reason = "starting", event.text

    def sample(self, time: float) -> None:
        """Add a point at this time to the curves of the swarm, its groups and its partial models."""
        self.now = max(self.now, time)
        present = [peer for peer in self.peers.values() if not peer.gone]
        self.mean.add(time, _mean(peer.accuracy for peer in present))
        by_group: dict[str, list[float]] = {}
        for peer in present:
            by_group.setdefault(peer.group, []).append(peer.accuracy)
        for group, accuracies in by_group.items():
            self.groups.setdefault(group, Curve()).add(time, _mean(accuracies))
        for name in sorted({name for peer in present for name in peer.metrics}):
            values = (peer.metrics.get(name, nan) for peer in present)
            self.metrics.setdefault(name, Curve()).add(time, _mean(values))
        largest: dict[str, float] = {}
        for peer in present:
            for model, distance in peer.disagreement.items():
                if isfinite(distance):
                    largest[model] = max(largest.get(model, 0.0), distance)
        for model, distance in largest.items():
            if distance > 0:
                self.disagreement.setdefault(model, Curve()).add(time, distance)
        if total := sum(peer.bytes for peer in self.peers.values()):
            self.sent.add(time, total / 1e6)

    @property
    def shared_models(self) -> list[str]:
        """The partial models that more than one peer implements, the one with most peers first."""
        counts: dict[str, int] = {}
        for peer in self.peers.values():
            for model in peer.models:
                counts[model] = counts.get(model, 0) + 1
        shared = [model for model, count in counts.items() if count > 1]
        return sorted(shared, key=lambda model: (-counts[model], model))

    def accuracies(self) -> dict[str, float]:
        """The latest accuracy of every peer that takes part and was tested."""
        return {
            peer.name: peer.accuracy
            for peer in self.peers.values()
            if not peer.gone and isfinite(peer.accuracy)
        }


def pair(a: str, b: str) -> tuple[str, str]:
    """Return a link's two ends in a fixed order."""
    return (a, b) if natural(a) <= natural(b) else (b, a)


def natural(name: str) -> list[str | int]:
    """Sort key of names: by the alphabet, and numbers in them by their value, peer-2 before peer-10."""
    return [int(part) if index % 2 else part for index, part in enumerate(_DIGITS.split(name))]


def group_peers(tasks: Mapping[str, str], models: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return each peer's group: its task, or else the partial models that only some of the peers share.

    Tasks make no groups if every peer has one of its own.
    """
    peers = len(tasks)
    for names in (tasks, _semi_local(models, peers)):
        if 1 < len(set(names.values())) <= min(MOST_GROUPS, peers - 1):
            return dict(names)
    return dict.fromkeys(tasks, NO_GROUP)


def _semi_local(models: Mapping[str, Sequence[str]], peers: int) -> dict[str, str]:
    counts: dict[str, int] = {}
    for names in models.values():
        for name in names:
            counts[name] = counts.get(name, 0) + 1
    return {
        peer: " + ".join(name for name in names if 1 < counts[name] < peers) or "no group"
        for peer, names in models.items()
    }


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if isfinite(value)]
    return sum(finite) / len(finite) if finite else nan
