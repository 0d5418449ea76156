"""What a peer tells observers of itself: metrics records, and summaries. No IO.

Peers publish their metrics as records (`Link.publish_record`), which are not signed. `read_record` validates
what is received: a record that it returns has all required fields, each of the right type, so that no other
code need check it again.

A peer's *summary*, one retained message, says more than its status: its round, its metrics, what it holds of
every partial model, its neighbours, its traffic, and what has happened to it lately. It has a topic of its
own, because every peer reads every status: a status is short and changes seldom, while a summary may be long
and change every few seconds, and only observers (observer.py) subscribe to summaries. With trust it is signed
like a status. Home Assistant gets some of it as plain JSON.

Every client of the broker can publish anything under any name, so a payload is validated strictly.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import ceil, isfinite, nan
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from gossamer import __version__

from ..gossip import check_name, topics
from .presence import LEASE_MARGIN, Count, Phase, Reason, Seconds, Session

_log = logging.getLogger(__name__)

Record = dict[str, Any]

MAX_RECORD_BYTES: Final = 1 << 18
"""The length of the longest record that is accepted; a record about a hundred models takes a tenth of it."""
MAX_RECORD_DEPTH: Final = 3
"""How deep objects and lists may be nested in a record, the record itself included."""


def read_record(topic: str, payload: bytes, labels: Collection[str]) -> Record | None:
    """Return the record in a payload, or None if it is not valid or not from one of these peers.

    topic: the topic that it was published on, which must belong to the peer that the record names.
    labels: the labels of the peers whose records are wanted (see `label`).
    """
    if len(payload) > MAX_RECORD_BYTES:
        return None
    try:
        record, peer = json.loads(payload), topics.parse(topic).peer
    except (ValueError, RecursionError):
        return None
    if not is_record(record) or record["peer"] != peer:
        return None
    return record if label(peer) in labels else None


def is_record(value: Any) -> bool:
    """Return whether a value has all required fields of a record, and is plain data of limited depth."""
    if not isinstance(value, dict) or not _is_plain(value, MAX_RECORD_DEPTH):
        return False
    try:
        _RecordSchema.model_validate(value)
    except ValidationError:
        return False
    return True


def label(peer: str) -> str:
    """Return the part of a peer's name that its owner chose.

    In a swarm with trust a name is `label@id`, where the id is that of the peer's key; without trust a name
    is a label and nothing else.
    """
    return peer.partition("@")[0]


def _is_plain(value: Any, depth: int) -> bool:
    """Return whether a value is text, a number or None, or nests such values at most `depth` deep."""
    if isinstance(value, dict):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return value is None or isinstance(value, str) or _is_number(value)


def _is_number(value: Any) -> bool:
    """Return True for any float, also NaN (of a network that diverged), and for an int of 64 bits."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


_Name = Annotated[str, AfterValidator(partial(topics.check_name, ""))]
_Counter = Annotated[int, Field(ge=0, lt=2**63)]


class _RecordSchema(BaseModel, strict=True):
    """The types of a record's fields. Those with a default may be missing; unknown ones may be plain data."""

    peer: _Name
    session: _Name
    time: float
    """When the record was made, in seconds since 1970 by the peer's clock."""
    round: _Counter
    """The rounds that the peer has trained."""
    phase: Literal["starting", "training", "settling", "done"]
    disagreement: dict[_Name, float]
    """By partial model, the largest relative distance between the peer's values and the last received."""
    received: _Counter
    """The messages received from other peers so far."""
    packets: _Counter
    """The packets sent so far."""
    bytes: _Counter
    """The bytes of the packets sent so far."""
    neighbours: _Counter
    """The peers that are online, also those that this peer does not push to."""
    accuracy: float = nan
    """The accuracy in the peer's last test."""
    own_accuracy: float = nan
    """The accuracy of a network that was trained before it joined, before it received anything."""
    loss: float = nan
    """The loss in the peer's last test."""
    metrics: dict[_Name, float] = {}
    """The named metrics of the peer's last test."""
    members: dict[_Name, Annotated[list[_Counter], Field(min_length=2, max_length=2)]] = {}
    """By shared partial model, how many members count and how many there are."""
    training_loss: float = nan
    alone_accuracy: float = nan
    """The accuracy of the peer's lone twin in the last test."""
    alone_loss: float = nan
    """The loss of the peer's lone twin in the last test."""


FORMAT = 1
"""The format of summaries, which is a field of each."""
MAX_SUMMARY_BYTES = 16 << 10
"""Bytes of the longest summary. What does not fit is left out: see `Summary.encode`."""
MAX_EVENTS = 16
"""Most events in a summary, the latest ones."""
MAX_NAMES = 64
"""Most neighbours, and most refused peers, that a summary names."""
MIN_METRICS = 8
"""Number of metrics that a summary keeps, even if it is too long."""
MAX_TEXT = 200
"""Most characters of a reason or of an event's text."""

Name = Annotated[str, AfterValidator(partial(check_name, "peer, model or metric"))]
Word = Annotated[str, Field(max_length=32, pattern=r"^[a-z_-]*$")]
METRICS = ("accuracy", "loss", "training_loss", "alone_accuracy", "alone_loss")
"""Names of the metrics of all learners, and of those with a lone twin."""
Metric = Annotated[float, Field(allow_inf_nan=False)] | None
"""A number; None if it is NaN or infinite, which JSON cannot express."""


@dataclass(frozen=True)
class PeerEvent:
    """Something that happened to a peer, by its own wall clock.

    kind: "founded", "counted" (its weight began to count in a model), "aligned" and "fused" (the same, after
        the cells of its trained network were matched with those of others), "decided" (it has decided for
        the swarm what is shared), "refused" (another peer's models or settings do not match), "banned" (its
        settings ban another peer), "diverged", "restarted" (its process continues an interrupted session),
        "rejoined" (in a new session).
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

    kind: "finished" (all rounds trained), "left" (asked to leave), "failed", "revoked" (by the swarm's
        owner), or "lost" (without a goodbye).
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
    metrics: the last value of each: accuracy, loss, training_loss, with a lone twin alone_accuracy and
        alone_loss, and the named metrics of the learner. None for a value that is not finite: a loss of None
        means that training has diverged.
    neighbours: the online peers that it pushes to, at most MAX_NAMES of them; neighbour_count: of all.
    neighbour_bytes: what this process has sent to each of them, in the same order; empty if it is not known.
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
    metrics: Mapping[Name, Metric] = field(default_factory=dict)
    neighbours: tuple[Name, ...] = ()
    neighbour_bytes: tuple[Count, ...] = ()
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
    def named_metrics(self) -> dict[str, float | None]:
        """The metrics that the peer's learner has named itself."""
        return {name: value for name, value in self.metrics.items() if name not in METRICS}

    @property
    def diverged(self) -> tuple[str, ...]:
        """What has diverged: partial models with values that are not finite, or "its loss"."""
        models = [name for name, model in self.models.items() if model.diverged]
        losses = [self.metrics.get(name, 0.0) for name in ("loss", "training_loss")]
        return (*models, *(["its loss"] if None in losses else []))

    def encode(self, limit: int = MAX_SUMMARY_BYTES) -> bytes | None:
        """Return the summary as JSON of at most this many bytes; None if that is not possible.

        If it is too long, the older half of the events is left out, again and again; then neighbours, refused
        peers, named metrics, and at last partial models.
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
            kept = len(self.neighbours) // 2
            named, sent = self.neighbours[:kept], self.neighbour_bytes[:kept]
            return replace(self, neighbours=named, neighbour_bytes=sent)
        if self.refused:
            return replace(self, refused=_first(self.refused, len(self.refused) // 2))
        if len(self.metrics) > MIN_METRICS:  # named ones come after those that every learner has
            kept = max(MIN_METRICS, len(self.metrics) // 2)
            return replace(self, metrics=_first(self.metrics, kept))
        if self.models:
            kept = len(self.models) // 2
            omitted = self.omitted_models + len(self.models) - kept
            return replace(self, models=_first(self.models, kept), omitted_models=omitted)
        return None


def _first(table: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the first entries of a mapping."""
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

    def add(self, kind: str, text: str, *, peer: str = "", log: bool = True) -> None:
        """Note an event now.

        text: what happened, to follow the peer's name: "founds model global at its own values".
        log: False if the caller has logged it already.
        """
        self._events.append(PeerEvent(self._wall(), kind, text[:MAX_TEXT], peer))
        self.count += 1
        if log:
            _log.info("peer %s %s", self._peer, text)


# --- Home Assistant -----------------------------------------------------------------------------
# A peer with `discovery = true` publishes, retained, one record per sensor below homeassistant/sensor/, and
# the sensors' values as plain JSON on a topic of its own. Home Assistant cannot check signatures, so neither
# is signed: with trust, whoever reaches the broker can forge what Home Assistant shows, and nothing else. A
# peer that leaves says that it is not available. For one that is killed, values expire after its lease.

DISCOVERY_PREFIX: Final = "homeassistant"
"""The first level of discovery topics, as Home Assistant expects it unless it is told otherwise."""

SENSORS: Final[dict[str, dict[str, Any]]] = {
    "state": {"name": "State", "icon": "mdi:state-machine"},
    "round": {"name": "Round", "state_class": "measurement", "icon": "mdi:counter"},
    "accuracy": {"name": "Accuracy", "state_class": "measurement", "unit_of_measurement": "%",
                 "suggested_display_precision": 1, "icon": "mdi:bullseye-arrow"},
}  # fmt: skip
"""The sensors of a peer, with the fields of their discovery records in which they differ."""


def node_of(swarm: str, peer: str) -> str:
    """Return the id of a peer's device: Home Assistant allows letters, digits, _ and - only."""
    return "gossamer_" + re.sub(r"[^A-Za-z0-9_-]", "_", f"{swarm}_{peer}")


def discovery_topics(swarm: str, peer: str) -> dict[str, str]:
    """Return the topic of each sensor's discovery record, by the sensor's name."""
    node = node_of(swarm, peer)
    return {sensor: f"{DISCOVERY_PREFIX}/sensor/{node}/{sensor}/config" for sensor in SENSORS}


def discovery_records(swarm: str, peer: str, lease: float) -> dict[str, bytes]:
    """Return the records that make a peer appear in Home Assistant, by topic; to be published retained."""
    node, state_topic = node_of(swarm, peer), topics.state(swarm, peer)
    device = {
        "identifiers": [node],
        "name": f"{peer} ({swarm})",
        "manufacturer": "Gossamer",
        "model": "peer",
        "sw_version": __version__,
    }
    shared = {
        "state_topic": state_topic,
        "availability_topic": state_topic,
        "availability_template": "{{ value_json.availability }}",
        "payload_available": "online",
        "payload_not_available": "offline",
        "expire_after": ceil(LEASE_MARGIN * lease),
        "device": device,
        "origin": {"name": "gossamer", "sw_version": __version__},
    }
    records = {}
    for sensor, topic in discovery_topics(swarm, peer).items():
        ids = {"unique_id": f"{node}_{sensor}", "value_template": f"{{{{ value_json.{sensor} }}}}"}
        records[topic] = json.dumps({**SENSORS[sensor], **ids, **shared}).encode()
    return records


def state_payload(summary: Summary) -> bytes:
    """Return the values of a peer's sensors, as plain JSON."""
    accuracy = summary.metrics.get("accuracy")
    return json.dumps({
        "availability": "online" if summary.ended is None else "offline",
        "state": summary.state.replace("_", " "),
        "round": summary.round,
        "accuracy": None if accuracy is None else round(100 * accuracy, 2),
    }).encode()  # fmt: skip
