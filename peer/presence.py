"""Presence: the cards and statuses that peers publish, and a roster of the other peers. No IO.

A peer publishes two retained messages: a *card* (its partial models, and the settings that must be the same
on all peers) and a *status* (whether it is online, its session, and its phase). Its last will sets the status
to offline. The roster reads the other peers' cards and statuses and turns them into events for the engine;
each change is logged in one line with its cause.

Every client of the broker can publish anything under any name. Therefore payloads are validated strictly: a
card or a status needs all fields of version 1.0, each of the right type. Peers of different versions may
share a swarm: fields that this version does not know are ignored, and a field that was added after 1.0 has
its default if the sender does not know it.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from math import inf
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from gossamer.logs import log_repeated

from ..gossip import SchemaEntry, check_name, is_reclaimed_row, is_verdict_row, schema_difference
from ..gossip.security import Death, TrustError

_log = logging.getLogger(__name__)


Phase = Literal["starting", "training", "settling", "done"]
State = Literal["online", "offline", "left"]
Statement = list[list[Any]]
"""Rows of a session's ledger; see Goodbye."""
T = TypeVar("T", bound="Card | Status")

MAX_KEPT_BYTES = 32 << 10
"""Most bytes of other peers' goodbyes on one card. The newest are kept: a goodbye is useful only until the
leases of the peers that missed it have expired."""

MAX_GENERATION = 1 << 31
"""Highest generation accepted: a forged card with a larger one would block its name for ever."""


def limit_goodbyes(goodbyes: dict[str, str]) -> dict[str, str]:
    """Drop the oldest goodbyes beyond MAX_KEPT_BYTES in all; they are given and returned oldest first."""
    kept, total = dict[str, str](), 0
    for peer, text in reversed(goodbyes.items()):
        total += len(text)
        if total > MAX_KEPT_BYTES:
            break
        kept[peer] = text
    return dict(reversed(kept.items()))


def _rows_validator(is_row: Callable[[Any], bool]) -> AfterValidator:
    """Return a pydantic validator of a statement: `is_row` must be true of each of its rows."""

    def check(rows: Statement) -> Statement:
        if not all(map(is_row, rows)):
            raise ValueError("a row of the statement is not valid")
        return rows

    return AfterValidator(check)


def _printable(text: str) -> str:
    """Return the printable ones of the first 200 characters."""
    return "".join(filter(str.isprintable, text[:200]))


# A session is part of every message to its peer, so it must be a valid name. A reason is only logged.
Session = Annotated[str, AfterValidator(partial(check_name, "session"))]
Reason = Annotated[str, AfterValidator(_printable)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Generation = Annotated[int, Field(ge=1, le=MAX_GENERATION)]
Credited = Annotated[Statement, _rows_validator(is_verdict_row)]
Reclaimed = Annotated[Statement, _rows_validator(is_reclaimed_row)]


@dataclass(frozen=True)
class Goodbye:
    """The transfers that a session reported when it ended, in rows of its ledger.

    statement: for each sender and partial model the last transfer, and whether it was credited.
    reclaimed: transfers that the peer took back although their receivers had not declined them.
    """

    session: Session
    statement: Credited
    reclaimed: Reclaimed

    def concerns(self, peer: str) -> bool:
        """Return whether this goodbye reports transfers from or to a peer."""
        return any(row[0] == peer for row in (*self.statement, *self.reclaimed))


@dataclass(frozen=True)
class Card:
    """What other peers must know of a peer to average with it.

    It stays the same for a whole session, except for the models of a swarm that decides what it shares.

    since: when the session began, by the peer's wall clock; of several waiting peers the earliest founds.
    models: for each partial model, the names, shapes and dtypes of the parameters in its vector.
    generation: 1 for the first device of this name; each device that replaces another one has the next
        number. The device with the highest one is valid.
    lease: seconds after which other peers give this peer up when it is offline.
    agree: settings that must be the same on all peers, by name.
    starts: for each partial model, a digest of the values that the session began with.
    former: the goodbye of the device's last session, which this session's status has replaced at the broker.
    goodbyes: the last statuses of peers that have left, by name, in base64. They are for neighbours that
        were offline then, because a broker that restarts may lose its retained messages.
    plan: with `sharing = "auto"`, what the swarm shares and measures, as this peer knows it; see sharing.py.
    asleep: seconds for which the device is regularly offline; its lease takes them into account.
    """

    session: Session
    since: Seconds
    samples: Count
    models: dict[str, list[tuple[str, Sequence[Count], str]]]
    generation: Generation = 1
    lease: Annotated[Seconds, AfterValidator(partial(max, 0.0))] = 600.0
    agree: dict[str, str] = field(default_factory=dict)
    starts: dict[str, str] = field(default_factory=dict)
    former: Goodbye | None = None
    goodbyes: Annotated[dict[str, str], AfterValidator(limit_goodbyes)] = field(
        default_factory=dict
    )
    plan: dict[str, Any] | None = None
    asleep: Annotated[Seconds, AfterValidator(partial(max, 0.0))] = 0.0

    def encode(self) -> bytes:
        """Return the card as JSON."""
        table = dict(self.__dict__)
        table["former"] = None if self.former is None else self.former.__dict__
        return json.dumps(table).encode()


@dataclass(frozen=True)
class Status:
    """Whether a peer is online, and its phase. A *goodbye* is a status with the state "left".

    statement, reclaimed: only in a goodbye; see Goodbye.
    leaving: the peer is online but about to leave, and accepts no more mass; in a goodbye, that it was told
        to stop.
    counts: the partial models in which the peer's own weight counts, and for how many rounds it has counted.
    hops: on a graph, two numbers of links, from what neighbours have published: all peers fewer than the
        first number of links away have finished training, and all fewer than the second are done. 0 if the
        peer itself has not finished training, or is not done.
    """

    state: State
    session: Session
    phase: Phase = "starting"
    reason: Reason = ""
    statement: Credited = field(default_factory=list)
    leaving: bool = False
    counts: dict[str, Count] = field(default_factory=dict)
    generation: Generation = 1
    reclaimed: Reclaimed = field(default_factory=list)
    hops: tuple[Count, Count] = (0, 0)

    def encode(self) -> bytes:
        """Return the status as JSON."""
        return json.dumps(self.__dict__).encode()


def read_card(payload: bytes) -> Card | None:
    """Return the card in a payload; None if the payload is not a valid card."""
    return read_presence(Card, payload)


def read_status(payload: bytes) -> Status | None:
    """Return the status in a payload; None if the payload is not a valid status."""
    return read_presence(Status, payload)


SINCE = "since"
"""A key of a dataclass field's metadata, for fields that were added after 1.0 to what peers publish or save;
its value is the version that added it: `field(default=0.0, metadata={SINCE: "1.1"})`. Where such a field is
missing, it has its default."""


def read_presence(message_type: type[T], payload: bytes) -> T | None:
    """Return the card or status in a payload; None if a field is invalid, or required and missing."""
    adapter, required = _validator_of(message_type)
    try:
        message = adapter.validate_json(payload, strict=True)
    except ValidationError:
        return None
    return message if required <= json.loads(payload).keys() else None


@cache
def _validator_of(message_type: type[Any]) -> tuple[TypeAdapter[Any], frozenset[str]]:
    """Return what validates a card or status, and the names of the fields that it must have."""
    required = (field.name for field in fields(message_type) if SINCE not in field.metadata)
    return TypeAdapter(message_type), frozenset(required)


FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two publications of a card that other clients keep overwriting: the pause doubles from the
first to the longest. It starts again with the first once the card has stayed intact for the longest."""


class OwnCard:
    """Compares what the broker delivers on our own card topic with the card that we published."""

    def __init__(self) -> None:
        self.is_intact = True
        """Whether the last delivered card is ours; also True before we have published one."""
        self._current = self._previous = b""
        self._pause, self._restored_at = 0.0, -inf

    def about_to_publish(self, payload: bytes) -> None:
        """Note the card to be published next. The previous one may still be delivered when we reconnect."""
        if payload != self._current:
            self._current, self._previous = payload, self._current

    def receive(self, payload: bytes) -> bool:
        """Check a delivered payload; return True if it shows that our card has just been overwritten.

        Once the current card was delivered, the previous one counts as overwriting it: it may contain an
        exchange key that is no longer used.
        """
        was_intact = self.is_intact
        self.is_intact = not self._current or (
            bool(payload) and payload in (self._current, self._previous)
        )
        if payload == self._current:
            self._previous = b""
        return was_intact and not self.is_intact

    def pause_after_restoring(self, now: float) -> float:
        """Note that the card was published again; return how many seconds to wait before the next time."""
        stayed_intact = now - self._restored_at > self._pause + LONGEST_PAUSE
        self._pause = FIRST_PAUSE if stayed_intact else min(2 * self._pause, LONGEST_PAUSE)
        self._restored_at = now
        return self._pause


RETURN_GRACE = 30.0
"""Seconds after our own reconnection within which another peer must reconnect too; twice the longest pause
between its attempts."""

STATUSES_PER_LEASE = 4
"""How many times per lease a peer publishes its status. A retained status does not prove that its peer is
alive: if a peer dies while the broker is down, its last will is never published."""

LEASE_MARGIN = 1.25
"""Number of leases after which other peers give up an offline peer. The peer itself ends its session after
one lease, so it never continues a session that the others have given up."""


@dataclass(frozen=True)
class Online:
    """A peer can be reached.

    models: the partial models that we may push to it. models_pushed_to_us: those that it may
        push to us; the two differ in directed graphs.
    counting_rounds: the models in which its own weight counts, and for how many rounds it has counted.
    session_began, starts: as on its card, where the first is called `since`.
    is_live: whether it has published a status since we connected; a retained status does not prove that the
        peer is alive.
    plan, samples: as on its card.
    """

    peer: str
    session: str
    models: tuple[str, ...]
    leaving: bool = False
    models_pushed_to_us: tuple[str, ...] = ()
    counting_rounds: Mapping[str, int] = field(default_factory=dict)
    session_began: float = 0.0
    starts: Mapping[str, str] = field(default_factory=dict)
    is_live: bool = True
    plan: dict[str, Any] | None = None
    samples: int = 1


@dataclass(frozen=True)
class Offline:
    """A neighbour cannot be reached for now."""

    peer: str


@dataclass(frozen=True)
class SessionEnded:
    """A session has ended and never continues.

    statement, reclaimed: as in its goodbye; statement is None if it ended without one.
    """

    peer: str
    session: str
    statement: Statement | None
    reclaimed: Statement = field(default_factory=list)


Event = Online | Offline | SessionEnded


@dataclass
class _Entry:
    """One other peer in the roster. Times are of the monotonic clock."""

    card: Card | None = None
    status: Status | None = None
    offline_since: float | None = None
    unconfirmed_since: float | None = None
    """When we reconnected to the broker, if no status of the peer was delivered since then."""
    announced_session: str | None = None
    """The session that was announced to the engine with an Online event."""
    former_session: str | None = None
    """The announced session before that one."""
    dead_session: str | None = None
    """The session that the last death notice names."""
    last_status: float = -inf
    """When the peer's status was last delivered."""
    is_live: bool = False
    """Whether the peer has published a status since we connected; a retained one does not count."""
    phase: Phase = "starting"
    """The peer's phase when it was last online."""

    @property
    def is_online(self) -> bool:
        return self.status is not None and self.status.state == "online"

    @property
    def has_current_card(self) -> bool:
        """Whether card and status are known, and of the same session."""
        card, status = self.card, self.status
        return card is not None and status is not None and card.session == status.session


class Roster:
    """The other peers of the swarm, from the cards, statuses and death notices that the broker delivers.

    models: this peer's own partial models and their fields, to compare with those of other peers.
    neighbours: the peers to push to; None for all peers that share a model.
    pushing_peers: the peers that push to us; None if they are the neighbours.
    lease: seconds after which an offline peer is given up if its card, which has its own lease, is missing.
    shared_settings: settings that must be the same on all peers; on a card, `agree`.
    dropped: counter of invalid payloads.
    """

    def __init__(
        self,
        peer: str,
        models: Mapping[str, list[SchemaEntry]],
        *,
        neighbours: Iterable[str] | None = None,
        pushing_peers: Iterable[str] | None = None,
        lease: float = 600.0,
        shared_settings: Mapping[str, str] | None = None,
        dropped: Counter[str] | None = None,
    ):
        self.peer = peer
        self._models, self._group_models = dict(models), frozenset[str]()
        self._neighbours = None if neighbours is None else frozenset(neighbours)
        self._pushing_peers = (
            self._neighbours if pushing_peers is None else frozenset(pushing_peers)
        )
        self._lease, self._shared_settings = lease, dict(shared_settings or {})
        self.dropped: Counter[str] = Counter() if dropped is None else dropped
        self._entries: dict[str, _Entry] = {}
        self._connected_since = -inf
        self._last_message = inf
        """When the broker last delivered anything; infinity before `note_delivery` was first called."""
        self.mismatches: dict[tuple[str, str], str] = {}
        """(peer, partial model or setting) → the difference between that peer and us, as text."""

    def set_models(
        self, models: Mapping[str, list[SchemaEntry]], group_models: Iterable[str]
    ) -> list[Event]:
        """Compare with other partial models from now on; return the events that announce all peers again.

        group_models: those that are averaged with every peer that has them, neighbour or not.
        """
        self._models, self._group_models = dict(models), frozenset(group_models)
        announced = [peer for peer, entry in self._entries.items() if entry.announced_session]
        return [event for peer in announced for event in self._announce(peer)]

    def restore_neighbours(self, sessions: Mapping[str, str], now: float) -> None:
        """Add the neighbours of a former process as offline; later they come online or are given up."""
        for peer, session in sessions.items():
            entry = self._entry(peer)
            entry.announced_session, entry.offline_since, entry.last_status = session, now, now

    # --- what the broker delivers ---------------------------------------------------------------

    def receive_card(self, peer: str, payload: bytes) -> list[Event]:
        """Process a card and return the events; an empty payload, which clears the topic, has no effect."""
        if peer == self.peer or not payload:
            return []
        card = read_card(payload)
        if card is None:
            return self._drop_unreadable(peer, "card")
        entry = self._entry(peer)
        if _is_replaced(card, entry):
            return []
        entry.card = card
        return self._announce(peer)

    def receive_status(
        self, peer: str, payload: bytes, now: float, *, retained: bool = False
    ) -> list[Event]:
        """Process a status and return the events.

        retained: the broker had it before we subscribed, so it does not prove that the peer is alive.
        """
        if peer == self.peer or not payload:
            return []
        status = read_status(payload)
        if status is None:
            return self._drop_unreadable(peer, "status")
        entry = self._entry(peer)
        before = entry.status
        if _is_obsolete(status, before, entry) or _is_replaced(status, entry):
            return []  # it does not prove that the peer is alive: a live peer publishes a newer one
        entry.unconfirmed_since, entry.last_status, entry.status = None, now, status
        entry.is_live = entry.is_live or not retained
        if status.state == "online":
            if entry.offline_since is not None and entry.announced_session == status.session:
                # Without a former status, our own process was restarted, and the peer was never offline.
                _log.info("peer %s is %s online", peer, "still" if before is None else "again")
            entry.offline_since, entry.phase = None, status.phase
            return self._announce(peer)
        if status.state == "left":
            return self._receive_goodbye(peer, entry, status)
        if entry.offline_since is None:
            entry.offline_since = now
            if entry.announced_session is not None:
                reason = status.reason or "connection lost"
                if entry.card is not None and entry.card.asleep > 0:
                    reason += " (it sleeps regularly)"
                _log.info("peer %s is offline: %s", peer, reason)
        return [Offline(peer)] if entry.announced_session is not None else []

    def receive_death(self, peer: str, payload: bytes) -> list[Event]:
        """Process a death notice, published by an operator: the session in it never comes back."""
        if peer == self.peer or not payload:
            return []
        try:
            notice = Death.decode(payload)
        except TrustError:
            return self._drop_unreadable(peer, "death notice")
        entry = self._entry(peer)
        entry.dead_session = notice.session
        if entry.announced_session != notice.session:
            return []
        by = f" by {notice.by}" if notice.by else ""
        _log.warning(
            "peer %s was declared dead%s: %s", peer, by, notice.reason or "no reason given"
        )
        return self._give_up(peer, entry)

    def _receive_goodbye(self, peer: str, entry: _Entry, status: Status) -> list[Event]:
        """Process a goodbye: the announced session has ended, or one that we missed."""
        session, entry.announced_session, entry.offline_since = entry.announced_session, None, None
        if session is None:
            return self._end_unannounced(peer, status)
        goodbye = SessionEnded(peer, status.session, status.statement, status.reclaimed)
        _log.info("peer %s left: %s", peer, status.reason or "no reason given")
        # The goodbye may be of a later session, while we were offline: then the announced one ended too.
        earlier = [] if session == status.session else [SessionEnded(peer, session, None)]
        return [*earlier, goodbye]

    def receive_kept_goodbye(self, peer: str, payload: bytes) -> list[Event]:
        """Process a goodbye that another peer has kept on its card for peers that were offline."""
        status = read_status(payload)
        if peer == self.peer or status is None or status.state != "left":
            return []
        entry = self._entry(peer)
        if entry.announced_session == status.session:
            entry.status = status
            return self._receive_goodbye(peer, entry, status)
        # The peer may be online again in a newer session: keep its status, and only settle the transfers.
        return self._end_unannounced(peer, status)

    def goodbye_was_missed(self, peer: str) -> bool:
        """Return whether a peer has left with a goodbye that a peer concerned by it may have missed."""
        entry = self._entries.get(peer)
        if entry is None or entry.status is None or entry.status.state != "left":
            return False
        status = entry.status
        offline = {
            name
            for name, other in self._entries.items()
            if other.announced_session and not other.is_online
        }
        # A receiver of a reclaimed transfer may seem online although it has lost its connection.
        return bool(status.reclaimed) or any(row[0] in offline for row in status.statement)

    def remove(self, peer: str) -> list[Event]:
        """Remove a peer whose invitation was revoked or has expired, and end its session."""
        entry = self._entries.pop(peer, None)
        if entry is None or entry.announced_session is None:
            return []
        return [SessionEnded(peer, entry.announced_session, None)]

    def reconnected(self, now: float, since: float) -> None:
        """Mark peers as unconfirmed after our own reconnection: they may have left or died meanwhile.

        Peers with a status delivered over the new connection, which began at `since`, are confirmed already.
        """
        self._connected_since = now
        for entry in self._entries.values():
            entry.is_live = entry.is_live and entry.last_status >= since
            if (
                entry.announced_session
                and entry.offline_since is None
                and entry.last_status < since
            ):
                entry.unconfirmed_since = now

    def note_delivery(self, now: float) -> None:
        """Note that the broker delivered a message, which proves that our connection works."""
        self._last_message = now

    def tick(self, now: float, *, connected: bool = True) -> list[Event]:
        """Set peers offline that did not reconnect after the broker did; give up peers whose lease is over.

        connected: whether we are connected to the broker, so that statuses could be delivered.
        """
        events: list[Event] = []
        for peer, entry in self._entries.items():
            since = entry.unconfirmed_since if connected else None
            if since is not None and now - since > RETURN_GRACE and entry.status is not None:
                _log.warning("peer %s is offline: it did not reconnect after the broker did", peer)
                entry.status = replace(entry.status, state="offline")
                entry.offline_since, entry.unconfirmed_since = since, None
                events.append(Offline(peer))
        for peer, entry in self._entries.items():
            since, session = entry.offline_since, entry.announced_session
            lease = self._lease if entry.card is None else entry.card.lease
            if since is None and connected:
                # A live peer publishes its status several times per lease; a last will can get lost.
                since = max(entry.last_status, self._connected_since)
            # While nothing at all is delivered, our own connection may be dead without our noticing.
            until = min(now, self._last_message)
            # An offline peer may have come back while we were away: let its status arrive first.
            grace = min(RETURN_GRACE, LEASE_MARGIN * lease)
            if entry.offline_since is not None and until - self._connected_since <= grace:
                continue
            if since is not None and session is not None and until - since > LEASE_MARGIN * lease:
                _log.warning(
                    "peer %s is given up: no status for %.0f s, its lease is %g s",
                    peer, until - since, lease,
                )  # fmt: skip
                events += self._give_up(peer, entry)
        return events

    # --- queries --------------------------------------------------------------------------------

    def online(self) -> dict[str, Status]:
        """Return all peers that are online and were announced to the engine, neighbours or not."""
        return {
            peer: entry.status
            for peer, entry in self._entries.items()
            if entry.announced_session and entry.is_online and entry.status
        }

    def still_training(self) -> list[str]:
        """Return the peers that are online and have not finished training."""
        busy = ("starting", "training")
        return [peer for peer, status in self.online().items() if status.phase in busy]

    def offline_unfinished(self) -> list[str]:
        """Return the peers that are offline but not given up, and were not done when last online."""
        return [
            peer
            for peer, entry in self._entries.items()
            if entry.announced_session
            and (entry.status is None or entry.status.state == "offline")
            and entry.phase != "done"
        ]

    def hops(self, phase: Phase, limit: int) -> tuple[int, int]:
        """Return our `Status.hops` in this phase, from our neighbours' statuses; neither exceeds `limit`.

        Our numbers are one more than the least of our neighbours', so those of all peers grow, status by
        status, as soon as the last peer has finished.
        """
        online, trained, done = self.online().values(), 0, 0
        if phase not in ("starting", "training"):
            trained = 1 + min((status.hops[0] for status in online), default=limit)
        if phase == "done":
            theirs = [status.hops[1] if status.phase == "done" else 0 for status in online]
            theirs += [0 for _ in self.offline_unfinished()]
            done = 1 + min(theirs, default=limit)
        return min(limit, trained), min(limit, done)

    def online_with_card(self) -> set[str]:
        """Return the peers that are online and have published the card of their session."""
        entries = self._entries.items()
        return {peer for peer, entry in entries if entry.is_online and entry.has_current_card}

    def left_before_training(self) -> set[str]:
        """Return the peers that were asked to leave before they trained, and left while we were connected."""
        return {
            peer
            for peer, entry in self._entries.items()
            if entry.is_live and (status := entry.status) is not None
            and status.state == "left" and status.leaving and status.phase == "starting"
        }  # fmt: skip

    def incomplete(self, names: Iterable[str]) -> list[str]:
        """Return which of these and of the online peers lack a card or status, or have a card of another
        session."""
        online = (peer for peer, entry in self._entries.items() if entry.is_online)
        complete = {peer for peer, entry in self._entries.items() if entry.has_current_card}
        return sorted({*names, *online} - complete - {self.peer})

    def session_start(self, peer: str) -> float | None:
        """Return when the session on a peer's card began; None if no card is known."""
        entry = self._entries.get(peer)
        return None if entry is None or entry.card is None else entry.card.since

    def neighbours(self) -> list[str]:
        """Return the peers that are online and that we push at least one partial model to, in order."""
        return sorted(
            peer
            for peer, entry in self._entries.items()
            if entry.announced_session and entry.is_online and entry.card is not None
            and self._pushed_models(peer, entry.card)
        )  # fmt: skip

    def count_members(self, model: str) -> tuple[int, int]:
        """Return how many other peers count in a partial model, and how many other peers share it."""
        sharing = [
            entry
            for entry in self._entries.values()
            if entry.announced_session and entry.card is not None and model in entry.card.models
        ]
        counting = [e for e in sharing if e.status is not None and model in e.status.counts]
        return len(counting), len(sharing)

    # --- internals ------------------------------------------------------------------------------

    def _end_unannounced(self, peer: str, status: Status) -> list[Event]:
        """Return the end of a session that is not announced, if its goodbye reports transfers from or to us.

        The peer may have taken back a transfer that we credited, or credited one that we took back.
        """
        goodbye = Goodbye(status.session, status.statement, status.reclaimed)
        if not goodbye.concerns(self.peer):
            return []
        return [SessionEnded(peer, status.session, status.statement, status.reclaimed)]

    def _give_up(self, peer: str, entry: _Entry) -> list[Event]:
        """Return the end of the announced session, without a goodbye."""
        session, entry.announced_session, entry.offline_since = entry.announced_session, None, None
        assert session is not None
        entry.former_session = session
        return [SessionEnded(peer, session, None)]

    def _drop_unreadable(self, peer: str, message: str) -> list[Event]:
        """Count and log a card, status or death notice that is not valid; return no events."""
        cause = f"unreadable-{message.replace(' ', '-')}"
        text = "peer %s published a %s that cannot be read; it is ignored"
        log_repeated(_log, self.dropped, cause, text, peer, message)
        return []

    def _is_neighbour(self, peer: str) -> bool:
        return self._neighbours is None or peer in self._neighbours

    def _pushed_models(self, peer: str, card: Card) -> bool:
        """Return whether a peer's card has a partial model that we push to it, if the models match."""
        ours = self._models.keys() if self._is_neighbour(peer) else self._group_models
        return not ours.isdisjoint(card.models)

    def _entry(self, peer: str) -> _Entry:
        return self._entries.setdefault(peer, _Entry())

    def _announce(self, peer: str) -> list[Event]:
        """Return the events that announce a peer, once its card and its status are of the same session."""
        entry = self._entry(peer)
        card, status = entry.card, entry.status
        if card is None or status is None or not (entry.is_online and entry.has_current_card):
            return []
        if entry.dead_session == status.session:
            return []
        events: list[Event] = []
        former, announced = card.former, entry.announced_session
        if announced is None:
            _log.info("peer %s is online", peer)
        elif announced != status.session:
            _log.info("peer %s has a new session; its former session has ended", peer)
            if former is None or former.session != announced:
                events.append(SessionEnded(peer, announced, None))
            entry.former_session = announced
        # We may have missed the goodbye that this status has replaced at the broker.
        concerns_us = former and (former.session == announced or former.concerns(self.peer))
        if former is not None and concerns_us and announced != status.session:
            events.append(SessionEnded(peer, former.session, former.statement, former.reclaimed))
        entry.announced_session = status.session
        shared = self._shared_models(peer, card)
        may_push_to_us = self._pushing_peers is None or peer in self._pushing_peers
        within_group = tuple(model for model in shared if model in self._group_models)
        online = Online(
            peer, status.session, shared if self._is_neighbour(peer) else within_group, status.leaving,
            shared if may_push_to_us else within_group, status.counts, card.since, card.starts,
            entry.is_live, card.plan, card.samples,
        )  # fmt: skip
        return [*events, online]

    def _shared_models(self, peer: str, card: Card) -> tuple[str, ...]:
        """Return the partial models that can be averaged with a peer; log each mismatch once."""
        differences = {
            key: f"{key} is {value!r} here and {card.agree[key]!r} there"
            for key, value in self._shared_settings.items()
            if key in card.agree and card.agree[key] != value
        }
        shared = []
        for model, entries in card.models.items():
            if model not in self._models:
                continue
            difference = schema_difference(self._models[model], entries)
            if difference is None:
                shared.append(model)
            else:
                differences[model] = f"model {model!r} is not the same: {difference}"
        for other, name in list(self.mismatches):
            if other == peer and name not in differences:
                del self.mismatches[other, name]
        for name, difference in differences.items():
            if self.mismatches.get((peer, name)) != difference:
                self.mismatches[peer, name] = difference
                _log.warning("peer %s cannot be averaged with: %s", peer, difference)
        if any(key in differences for key in self._shared_settings):
            return ()
        return tuple(shared)


def _is_replaced(message: Card | Status, entry: _Entry) -> bool:
    """Return True for a card or status of a device that another, announced one of its name has replaced.

    The newer device's generation is read from its card: its last will was made before it had a generation.
    """
    card = entry.card
    if card is None or card.session != entry.announced_session or card.session == message.session:
        return False
    return message.generation < card.generation


def _is_obsolete(status: Status, before: Status | None, entry: _Entry) -> bool:
    """Return True for a last will or goodbye that a newer status of the peer has made obsolete."""
    if before is None:
        return False
    if before.session == status.session:
        # If a peer is killed while it disconnects, its last will is published after its goodbye.
        return before.state == "left" and status.state == "offline"
    if before.state != "online":
        return False
    if status.state == "left":
        return status.session == entry.former_session
    return status.state == "offline"


def first_of(names: Collection[str]) -> str:
    """Return the first name by `name_order`: of some peers, the one that makes plans, or is the server."""
    return min(names, key=name_order)


def name_order(name: str) -> tuple[int, str]:
    """Return a sort key: shorter names first, so that the names 0, 1, … 10 are in the order of numbers."""
    return len(name), name
