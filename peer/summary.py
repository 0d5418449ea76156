"""Summaries: how a peer is doing, in one retained message for observers. No IO.

A peer's *summary* says more than its status: its round, its metrics, what it holds of every partial model,
its neighbours, its traffic, and what has happened to it lately. It has a topic of its own, because every peer
reads every status: a status is short and changes seldom, while a summary may be long and change every few
seconds, and only observers (observer.py) subscribe to summaries. With trust it is signed like a status.

Every client of the broker can publish anything under any name, so a payload is validated strictly.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from ..gossip import check_name
from .presence import Count, Phase, Reason, Seconds, Session

_log = logging.getLogger(__name__)

FORMAT = 1
"""The format of summaries, which each of them states."""
MAX_SUMMARY_BYTES = 16 << 10
"""Bytes of the longest summary. What does not fit is left out: see `Summary.encode`."""
MAX_EVENTS = 16
"""Most events in a summary, the latest ones."""
MAX_NAMES = 64
"""Most neighbours, and most refused peers, that a summary names."""
MAX_TEXT = 200
"""Most characters of a reason or of an event's text."""

Name = Annotated[str, AfterValidator(partial(check_name, "peer or model"))]
Word = Annotated[str, Field(max_length=32, pattern=r"^[a-z_-]*$")]
Metric = Annotated[float, Field(allow_inf_nan=False)] | None
"""A number; None if it is NaN or infinite, which JSON cannot express."""


@dataclass(frozen=True)
class PeerEvent:
    """Something that happened to a peer, by its own wall clock.

    kind: "founded", "counted" (its weight began to count in a model), "decided" (it follows a new plan of
        what is shared), "refused" (it refuses another peer), "quarantined" (its guards do), "diverged",
        "restarted" (its process continues an interrupted session), "rejoined" (in a new session).
    peer: the other peer, if one is concerned.
    """

    time: Seconds
    kind: Word
    text: Reason
    peer: str = ""


@dataclass(frozen=True)
class ModelSummary:
    """What a peer says of one of its partial models.

    counts: whether its own weight counts. rounds: for how many rounds it has counted.
    counting, members: how many members count and how many there are, this peer included, as far as it knows.
    disagreement: the largest relative distance of the last values that it received from its own; None if it
        has received none, or one of them is not finite.
    weight: the push-sum weight that it holds; 1.0 is the weight of one peer.
    diverged: whether some of its values are NaN or infinite.
    """

    counts: bool
    rounds: Count = 0
    counting: Count = 0
    members: Count = 1
    disagreement: Metric = None
    weight: Seconds = 0.0
    diverged: bool = False


@dataclass(frozen=True)
class Ended:
    """Why a peer's session ended, and when.

    kind: "finished" (all rounds trained), "left" (asked to leave), "failed", or "lost" (without a goodbye).
    """

    kind: Word
    reason: Reason
    time: Seconds


@dataclass(frozen=True)
class Summary:
    """How a peer is doing.

    time: when the summary was made, by the peer's wall clock. since: when its session began.
    state: of its lifecycle, in lower case (see lifecycle.State). phase: as in its status.
    round: rounds trained so far. rounds: rounds to train; None if it trains for ever.
    round_ended: when its last round was trained; None before the first.
    models: its partial models. omitted_models: how many were left out to bound the summary's size.
    metrics: the last value of each: accuracy, loss, training_loss, and with a lone twin alone_accuracy and
        alone_loss. None for a value that is not finite: a loss of None means that training has diverged.
    neighbours: the online peers that it pushes to, at most MAX_NAMES of them; neighbour_count: of all.
    sent_bytes, sent_packets, received_bytes, received_packets: of gossip, by this process.
    refused: peers that it does not average with, and why: other models or settings, or its guards.
    ended: why this session is about to end, in its last summary.
    last_end: why the peer's former session ended, if it remembers one.
    events: what happened to it lately, oldest first.
    version: of the gossamer that it runs.
    """

    session: Session
    time: Seconds
    since: Seconds
    state: Word
    phase: Phase
    round: Count
    rounds: Count | None
    version: Annotated[str, Field(max_length=32)]
    round_ended: Seconds | None = None
    models: Mapping[Name, ModelSummary] = field(default_factory=dict)
    omitted_models: Count = 0
    metrics: Mapping[Word, Metric] = field(default_factory=dict)
    neighbours: tuple[Name, ...] = ()
    neighbour_count: Count = 0
    sent_bytes: Count = 0
    sent_packets: Count = 0
    received_bytes: Count = 0
    received_packets: Count = 0
    refused: Mapping[Name, Reason] = field(default_factory=dict)
    ended: Ended | None = None
    last_end: Ended | None = None
    events: tuple[PeerEvent, ...] = ()
    format: int = FORMAT

    @property
    def diverged(self) -> tuple[str, ...]:
        """What has diverged: partial models with values that are not finite, or "its loss"."""
        models = [name for name, model in self.models.items() if model.diverged]
        losses = [self.metrics.get(name, 0.0) for name in ("loss", "training_loss")]
        return (*models, *(["its loss"] if None in losses else []))

    def encode(self, limit: int = MAX_SUMMARY_BYTES) -> bytes | None:
        """Return the summary as JSON of at most this many bytes; None if that is not possible.

        If it is too long, the older half of the events is left out, again and again; then neighbours, refused
        peers, and at last partial models.
        """
        summary = self
        while len(data := json.dumps(asdict(summary), allow_nan=False).encode()) > limit:
            shorter = summary._shortened()
            if shorter is None:
                return None
            summary = shorter
        return data

    def _shortened(self) -> Summary | None:
        """Return a copy with half of the least important entries; None if nothing can be left out."""
        if self.events:
            return replace(self, events=self.events[(len(self.events) + 1) // 2 :])
        if self.neighbours:
            return replace(self, neighbours=self.neighbours[: len(self.neighbours) // 2])
        if self.refused:
            return replace(self, refused=_first(self.refused, len(self.refused) // 2))
        if self.models:
            kept = len(self.models) // 2
            omitted = self.omitted_models + len(self.models) - kept
            return replace(self, models=_first(self.models, kept), omitted_models=omitted)
        return None


def _first(table: Mapping[str, Any], count: int) -> dict[str, Any]:
    return dict(list(table.items())[:count])


_SUMMARY = TypeAdapter(Summary)


def read_summary(payload: bytes) -> Summary | None:
    """Return the summary in a payload; None if the payload is not a valid summary of this format."""
    if len(payload) > MAX_SUMMARY_BYTES:
        return None
    try:
        summary = _SUMMARY.validate_json(payload, strict=True)
    except ValidationError:
        return None
    return summary if summary.format == FORMAT else None


def finite(value: float) -> float | None:
    """Return a number, or None if it is NaN or infinite."""
    return value if isfinite(value) else None


class Journal:
    """A peer's latest events: each is logged in one line, and kept for the summary.

    Used from the event loop and from the worker thread: a deque needs no lock for that.

    wall: the wall clock.
    """

    def __init__(self, peer: str, wall: Callable[[], float] = time.time) -> None:
        self._peer, self._wall = peer, wall
        self._events: deque[PeerEvent] = deque(maxlen=MAX_EVENTS)
        self.count = 0
        """Number of events so far."""

    @property
    def events(self) -> tuple[PeerEvent, ...]:
        """The latest events, oldest first."""
        return tuple(self._events)

    def add(
        self, kind: str, text: str, *, peer: str = "", level: int = logging.INFO, log: bool = True
    ) -> None:
        """Note an event now.

        text: what happened, to follow the peer's name: "founds model global at its own values".
        log: False if the caller has logged it already.
        """
        self._events.append(PeerEvent(self._wall(), kind, text[:MAX_TEXT], peer))
        self.count += 1
        if log:
            _log.log(level, "peer %s %s", self._peer, text)
