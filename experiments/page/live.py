"""The history of a running swarm, from what its peers publish on the broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import nan
from typing import Any, get_args

from ...peer import ObservedPeer, Observer, TimelineEvent, label
from .history import Event, History, Kind, Observation, group_peers, natural_key

LEAST_PAUSE = 0.5
"""Seconds between two looks at the observer: several browser windows share one history."""
_KINDS = frozenset(get_args(Kind))


class LiveSource:
    """Turns the records of an `Observer` into a history; publishes nothing.

    where: the broker's address, for the page's heading. wall: the wall clock.
    """

    controls: Any = None
    whole: History | None = None

    def __init__(self, observer: Observer, where: str, wall: Callable[[], float] = time.time):
        self._observer, self._wall = observer, wall
        swarm = observer.swarm.swarm
        self.title, self.subtitle = swarm, f"live at {where}"
        self._history = History(swarm, "seconds watched", origin=wall())
        self._looked = float("-inf")
        self._applied: dict[str, ObservedPeer] = {}
        self._last_event: TimelineEvent | None = None

    @property
    def history(self) -> History:
        """What is known now."""
        return self._history

    def poll(self) -> str:
        """Apply what is new; return what is wrong with the connection or the swarm, if anything."""
        now = self._wall()
        if now - self._looked >= LEAST_PAUSE:
            self._looked = now
            self._apply(now)
        return self._problem()

    def _apply(self, now: float) -> None:
        history, state = self._history, self._observer.swarm
        origin = history.origin or 0.0
        for name, peer in sorted(state.peers.items(), key=lambda item: natural_key(item[0])):
            if self._applied.get(name) is not peer:
                self._applied[name] = peer
                history.apply(observation(peer, now - origin, origin))
        # After the records: an event names the reason, and its peer must be known.
        for event in self._new_events():
            kind: Any = event.kind if event.kind in _KINDS else "note"
            history.add_to_timeline(Event(event.time - origin, kind, label(event.peer), event.text))
        models = {name: peer.models for name, peer in history.peers.items()}
        groups = group_peers(dict.fromkeys(models, ""), models)
        for name, peer in history.peers.items():
            peer.group = groups[name]
        history.sample(now - origin)

    def _new_events(self) -> list[TimelineEvent]:
        """The events that were noticed since the last call, in the order of their times."""
        new: list[TimelineEvent] = []
        for event in reversed(self._observer.swarm.timeline):
            if event is self._last_event:
                break
            new.append(event)
        if new:
            self._last_event = new[0]
        return sorted(new, key=lambda event: event.time)

    def _problem(self) -> str:
        observer, state = self._observer, self._observer.swarm
        if not observer.connected:
            why = observer.connection_problem
            return (
                f"the broker is not connected{': ' * bool(why)}{why}; this is what was known before"
            )
        if not state.peers:
            return f"no peer of swarm {state.swarm} is on this broker yet; is that its name?"
        if not state.summaries:
            return (
                "no peer has published a summary: they run an older version of gossamer, or have only just "
                "started; only who is there can be shown"
            )
        return ""


def observation(peer: ObservedPeer, time: float, origin: float) -> Observation:
    """What a peer's record says. time: now, on the page's axis. origin: the wall clock's time at 0."""
    summary = peer.summary
    heard = time if peer.last_heard is None else peer.last_heard - origin
    checked = "" if peer.checked == "unsigned" else peer.checked
    common: dict[str, Any] = {
        "state": state_of(peer), "reason": peer.problem or peer.reason, "models": peer.models,
        "checked": checked,
    }  # fmt: skip
    if summary is None:
        return Observation(label(peer.name), heard, **common)
    accuracy = _metric(summary.metrics, "accuracy")
    neighbours = [label(name) for name in summary.neighbours]
    return Observation(
        label(peer.name), heard, round=summary.round, accuracy=accuracy,
        loss=_metric(summary.metrics, "loss"), bytes=summary.sent_bytes,
        metrics={n: v for n, v in summary.named_metrics.items() if v is not None},
        neighbours=neighbours,
        bytes_to=dict(zip(neighbours, summary.neighbour_bytes, strict=False)),
        disagreement={
            name: model.disagreement
            for name, model in summary.models.items()
            if model.disagreement is not None
        },
        gain=accuracy - _metric(summary.metrics, "alone_accuracy"), **common,
    )  # fmt: skip


def state_of(peer: ObservedPeer) -> str:
    """A peer's state in one word: what it does, or why it does not take part."""
    if peer.checked in ("refused", "revoked"):
        return "refused"
    if peer.presence != "online":
        return peer.presence
    return peer.summary.state.replace("_", " ") if peer.summary is not None else peer.phase


def _metric(metrics: Mapping[str, float | None], name: str) -> float:
    value = metrics.get(name)
    return nan if value is None else value
