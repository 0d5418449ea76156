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
"""The most points of a curve. When it has more, every second one is dropped, so that curves do not grow on a
page that stays open for months."""
MOST_EVENTS = 500
"""The most events that are kept; the oldest are dropped."""
MOST_GROUPS = 12
"""The most groups that are shown. If there were more, peers would not be grouped; see `group_peers`."""
NO_GROUP = "all peers"
"""The group of every peer if peers are not grouped."""

Kind = Literal[
    "joined", "back", "rejoined", "restarted", "founded", "counted", "aligned", "fused",
    "decided", "offline", "banned", "refused", "lost", "dead", "left", "note",
]  # fmt: skip
"""Kinds of events. Those that a peer tells of itself (founded, counted, …) are explained at
`peer.summary.PeerEvent`; those that an observer notices (offline, lost, dead, left, back, …) at
`peer.observer.Presence`. "note": any other event."""
GONE = frozenset({"left", "dead", "lost", "refused"})
"""States of peers that do not take part any more, and the kinds of the events that lead to these states."""
_DIGITS = re.compile(r"([0-9]+)")
_RETURN_KINDS = frozenset({"joined", "back", "rejoined", "restarted"})
"""Kinds of events after which a peer takes part again."""


@dataclass(frozen=True)
class Observation:
    """What one message says about one peer; None, NaN or an empty mapping: it says nothing about that.

    time: the position on the x axis: seconds or rounds. state: a phase of a live peer, or one of `GONE`.
    disagreement: by partial model, the peer's relative distance from its neighbours' values.
    bytes: what its process has sent since it started. neighbours: names of the peers that it sends to.
    bytes_to: what it has sent to each of them.
    metrics: the named metrics of the peer's learner.
    gain: accuracy minus that of a twin that learns alone.
    checked: how far its signature could be checked: "signed", "member" or "refused" (explained at
        `peer.observer.Authenticity`); the empty string if peers do not sign in this swarm.
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
            # Counted from the end, so that the last point always stays.
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
    """The bytes that it has sent, those of its former processes included."""
    process_bytes: int = 0
    """The bytes that its present process has sent."""
    bytes_to: Mapping[str, int] = field(default_factory=dict)
    gain: float = nan
    checked: str = ""
    models: Sequence[str] = ()
    disagreement: dict[str, float] = field(default_factory=dict)
    spread: float = nan
    """Only in the lab, which shows how a value that one peer starts with spreads by averaging: this peer's
    estimate of it, relative to the average of all peers. 0: nothing has arrived, 1: in the end."""
    last_seen: float = nan
    """The time of the last observation."""
    curve: Curve = field(default_factory=Curve)

    @property
    def gone(self) -> bool:
        """Whether the peer does not take part any more."""
        return self.state in GONE


class History:
    """A swarm's peers, curves, links and events, up to `now`.

    name: shown as the title. x_label: what time is counted in.
    origin: for a live swarm, the wall clock's time at time 0 of the history; None for a recorded run.
    """

    def __init__(self, name: str, x_label: str = "seconds", origin: float | None = None):
        self.name, self.x_label, self.origin = name, x_label, origin
        self.now = 0.0
        self.peers: dict[str, PeerState] = {}
        self._links_of: dict[str, set[tuple[str, str]]] = {}
        """By peer: the links on which it sends."""
        self.events: list[Event] = []
        self.mean_accuracy, self.megabytes_sent = Curve(), Curve()
        self.groups: dict[str, Curve] = {}
        """The mean accuracy of each group of peers."""
        self.disagreement: dict[str, Curve] = {}
        """The largest disagreement of any peer in each partial model."""
        self.metrics: dict[str, Curve] = {}
        """The mean over peers of each named metric."""

    def apply(self, observation: Observation) -> None:
        """Update the peer that an observation is about."""
        peer = self.peers.setdefault(observation.peer, PeerState(observation.peer))
        self.now = max(self.now, observation.time)
        peer.last_seen = observation.time
        peer.curve.add(observation.time, observation.accuracy)
        peer.disagreement |= observation.disagreement
        peer.metrics |= {
            name: value for name, value in observation.metrics.items() if isfinite(value)
        }
        if observation.state is not None:
            peer.reason = ""  # the old reason belongs to an earlier state
        if observation.bytes is not None:
            # If the number has fallen, the peer was restarted, and its new process counts from 0.
            is_restarted = observation.bytes < peer.process_bytes
            peer.bytes += observation.bytes - (0 if is_restarted else peer.process_bytes)
            peer.process_bytes = observation.bytes
        for name in (
            *("accuracy", "loss", "gain"),
            *("round", "state", "reason", "group", "checked", "models"),
        ):
            value = getattr(observation, name)
            if value is not None and not (isinstance(value, float) and not isfinite(value)):
                setattr(peer, name, value)
        peer.bytes_to = observation.bytes_to or peer.bytes_to
        if observation.neighbours is not None:
            self.connect(observation.peer, observation.neighbours)

    def connect(self, peer: str, neighbours: Iterable[str]) -> None:
        """Replace the links on which a peer sends; those on which others send to it stay."""
        self._links_of[peer] = {pair(peer, other) for other in neighbours if other != peer}

    @property
    def links(self) -> set[tuple[str, str]] | None:
        """All links; None if no peer has said who its neighbours are: then all peers may be neighbours."""
        return set().union(*self._links_of.values()) if self._links_of else None

    def add_to_timeline(self, event: Event) -> None:
        """Add an event, but leave the state of its peer to observations."""
        self.events.append(event)
        del self.events[:-MOST_EVENTS]

    def add(self, event: Event) -> None:
        """Add an event, and set the state of its peer accordingly."""
        self.now = max(self.now, event.time)
        self.add_to_timeline(event)
        peer = self.peers.get(event.peer)
        if peer is None:
            return
        if event.kind in GONE:
            peer.state, peer.reason = event.kind, event.text
        elif event.kind in _RETURN_KINDS and (peer.gone or peer.state == "offline"):
            peer.state, peer.reason = "starting", event.text

    def sample(self, time: float) -> None:
        """Add the present values as a point to the curves of the swarm, its groups and its partial models."""
        self.now = max(self.now, time)
        present = [peer for peer in self.peers.values() if not peer.gone]
        self.mean_accuracy.add(time, _mean(peer.accuracy for peer in present))
        by_group: dict[str, list[float]] = {}
        for peer in present:
            by_group.setdefault(peer.group, []).append(peer.accuracy)
        for group, accuracies in by_group.items():
            self.groups.setdefault(group, Curve()).add(time, _mean(accuracies))
        for name in sorted({name for peer in present for name in peer.metrics}):
            values = (peer.metrics.get(name, nan) for peer in present)
            self.metrics.setdefault(name, Curve()).add(time, _mean(values))
        largest_distance: dict[str, float] = {}
        for peer in present:
            if peer.state == "offline":  # what it said last would hide how the others are doing
                continue
            for model, distance in peer.disagreement.items():
                if isfinite(distance):
                    largest_distance[model] = max(largest_distance.get(model, 0.0), distance)
        for model, distance in largest_distance.items():
            if distance > 0:
                self.disagreement.setdefault(model, Curve()).add(time, distance)
        if total := sum(peer.bytes for peer in self.peers.values()):
            self.megabytes_sent.add(time, total / 1e6)

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
    return (a, b) if natural_key(a) <= natural_key(b) else (b, a)


def natural_key(name: str) -> list[str | int]:
    """Sort key of names: by the alphabet, and numbers in them by their value, peer-2 before peer-10."""
    return [int(part) if index % 2 else part for index, part in enumerate(_DIGITS.split(name))]


def group_peers(tasks: Mapping[str, str], models: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return each peer's group: its task, or else the partial models that only some of the peers share.

    Neither is used if all peers would be in one group, each in one of its own, or in more than MOST_GROUPS.
    """
    peers = len(tasks)
    for names in (tasks, _semi_local_models(models, peers)):
        if 1 < len(set(names.values())) <= min(MOST_GROUPS, peers - 1):
            return dict(names)
    return dict.fromkeys(tasks, NO_GROUP)


def _semi_local_models(models: Mapping[str, Sequence[str]], peers: int) -> dict[str, str]:
    """Return the names of each peer's semi-local models: those that some, but not all, peers share.

    models: the partial models of each peer. peers: the number of peers.
    """
    counts: dict[str, int] = {}
    for names in models.values():
        for name in names:
            counts[name] = counts.get(name, 0) + 1
    return {
        peer: " + ".join(name for name in names if 1 < counts[name] < peers) or "no group"
        for peer, names in models.items()
    }


def _mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    finite = [value for value in values if isfinite(value)]
    return sum(finite) / len(finite) if finite else nan
