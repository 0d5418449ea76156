"""Who is there: the cards and statuses that peers publish, and what follows from those of others. No IO.

A peer publishes a *card* (what it averages, and on which terms) and a *status* (whether it is there, its
session, and how far it is), both retained. Its last will turns the status to offline. The roster reads the
others' and says, as events, what the gossiper must know; every change is logged in one line with its cause.

Whoever reaches the broker can publish what they like under any name. So nothing is converted here, only
checked: what does not have the very form that `encode` writes is neither a card nor a status.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import inf
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from gossamer.logs import is_milestone

from ..gossip import SchemaEntry, check_name, is_line, is_reclaimed, schema_difference
from ..gossip.security import Death, TrustError

_log = logging.getLogger(__name__)


Phase = Literal["starting", "training", "settling", "done"]
State = Literal["online", "offline", "left"]
Statement = list[list[Any]]
T = TypeVar("T", "Card", "Status")

MAX_KEPT_BYTES = 32 << 10
"""Bytes of others' goodbyes on a card. The newest are kept: each is of use for one lease of who missed it."""

MAX_GENERATION = 1 << 31
"""Nobody is replaced more often; a larger number is a forgery that would lock the name for ever."""


def kept_goodbyes(goodbyes: dict[str, str]) -> dict[str, str]:
    """Return the newest of these, the last ones, that a card has room for."""
    kept, total = dict[str, str](), 0
    for peer, text in reversed(goodbyes.items()):
        total += len(text)
        if total > MAX_KEPT_BYTES:
            break
        kept[peer] = text
    return dict(reversed(kept.items()))


def _rows(is_row: Callable[[Any], bool]) -> AfterValidator:
    def check(rows: Statement) -> Statement:
        if not all(map(is_row, rows)):
            raise ValueError("not a row of the books")
        return rows

    return AfterValidator(check)


def _printable(text: str) -> str:
    return "".join(filter(str.isprintable, text[:200]))


# A session stands in every message to its peer: it must be a name. A reason is logged.
Session = Annotated[str, AfterValidator(partial(check_name, "session"))]
Reason = Annotated[str, AfterValidator(_printable)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Generation = Annotated[int, Field(ge=1, le=MAX_GENERATION)]
Credited = Annotated[Statement, _rows(is_line)]
Reclaimed = Annotated[Statement, _rows(is_reclaimed)]


@dataclass(frozen=True)
class Goodbye:
    """The last words of a session, in the books' own rows.

    statement: what became of the last transfer from each sender.
    reclaimed: transfers that the peer took back without their receivers' word.
    """

    session: Session
    statement: Credited
    reclaimed: Reclaimed

    def names(self, peer: str) -> bool:
        """Return whether it concerns a peer's transfers."""
        return any(row[0] == peer for row in (*self.statement, *self.reclaimed))


@dataclass(frozen=True)
class Card:
    """What others must know of a peer to average with it, the same for a whole session.

    since: when the session began, by the peer's wall clock; the order in which waiting peers may found.
    models: for every partial model the fields that it is made of.
    generation: how often a device of this name was replaced by another one; the highest is the real one.
    lease: seconds after which this peer, once offline, is to be given up.
    agree: settings that must be the same on all peers, by name.
    starts: for every partial model a digest of the values that the session began with.
    former: the goodbye of the device's last session, which this session's status has replaced at the broker.
    goodbyes: what peers that have left published last, by name, in base64: for neighbours of theirs that
        were away, because a broker that restarts may forget it.
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
    goodbyes: Annotated[dict[str, str], AfterValidator(kept_goodbyes)] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the card as JSON."""
        table = dict(self.__dict__)
        table["former"] = None if self.former is None else self.former.__dict__
        return json.dumps(table).encode()


@dataclass(frozen=True)
class Status:
    """Whether a peer is there, and how far it is.

    statement: with "left": what became of the last transfer from each sender.
    leaving: still online, but about to go: it takes no mass any more.
    counts: the partial models in which the peer's own weight counts, and for how many rounds it has.
    reclaimed: with "left": transfers that the peer took back without their receivers' word.
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

    def encode(self) -> bytes:
        """Return the status as JSON."""
        return json.dumps(self.__dict__).encode()


def read_card(payload: bytes) -> Card | None:
    """Return the card in a payload; None if there is none in it, whatever else is."""
    return _read(_CARD, Card, payload)


def read_status(payload: bytes) -> Status | None:
    """Return the status in a payload; None if there is none in it, whatever else is."""
    return _read(_STATUS, Status, payload)


_CARD, _STATUS = TypeAdapter(Card), TypeAdapter(Status)


def _read(adapter: TypeAdapter[T], kind: type[T], payload: bytes) -> T | None:
    try:
        news = adapter.validate_json(payload, strict=True)
    except ValidationError:
        return None
    return news if {each.name for each in fields(kind)} <= json.loads(payload).keys() else None


FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds after a card was put back before it is put back once more. They double each time, and start
over once the card was left in peace for the longest of them."""


class OwnCard:
    """What is heard on our own card topic, compared with what we published there."""

    def __init__(self) -> None:
        self.stands = True
        """Whether what was last heard there is ours. True too before we have published anything."""
        self._newest = self._before = b""
        self._pause, self._restored = 0.0, -inf

    def published(self, payload: bytes) -> None:
        """Note what we are about to publish. The one before it is ours too: a reconnection hears it."""
        if payload != self._newest:
            self._newest, self._before = payload, self._newest

    def hear(self, payload: bytes) -> bool:
        """Take in what came on the topic; whether the card has just been lost.

        Once the newest was heard, the one before it is a loss too: its exchange key may be out of use.
        """
        stood = self.stands
        self.stands = not self._newest or (
            bool(payload) and payload in (self._newest, self._before)
        )
        if payload == self._newest:
            self._before = b""
        return stood and not self.stands

    def pause(self, now: float) -> float:
        """Note that the card was put back; for how many seconds to leave it at that."""
        calm = now - self._restored > self._pause + LONGEST_PAUSE
        self._pause = FIRST_PAUSE if calm else min(2 * self._pause, LONGEST_PAUSE)
        self._restored = now
        return self._pause


RETURN_GRACE = 30.0
"""Seconds that a peer has to come back after we did; twice the longest wait between its attempts."""

STATUSES_PER_LEASE = 4
"""How often in a lease a peer says that it is there. A retained status alone proves nothing: the last will of
a peer that died while the broker was down is never published."""

LEASE_MARGIN = 1.25
"""How many leases a peer is offline before others give it up: it gives itself up after one, so it never
believes that it is still in when the others do not."""


@dataclass(frozen=True)
class Online:
    """A peer can be reached.

    models: the partial models that may be pushed to it. heard: those that it may push to us.
    counts: the models in which its own weight counts, and for how many rounds.
    since, starts: as on its card.
    is_live: whether it spoke since we are connected; a status that the broker had stored proves little.
    """

    peer: str
    session: str
    models: tuple[str, ...]
    leaving: bool = False
    incoming_models: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    since: float = 0.0
    starts: Mapping[str, str] = field(default_factory=dict)
    is_live: bool = True


@dataclass(frozen=True)
class Offline:
    """A neighbour cannot be reached for now."""

    peer: str


@dataclass(frozen=True)
class Gone:
    """A session is gone for good.

    statement: what it had credited, if it said goodbye. reclaimed: what it took back without asking.
    """

    peer: str
    session: str
    statement: Statement | None
    reclaimed: Statement = field(default_factory=list)


Event = Online | Offline | Gone


@dataclass
class _Entry:
    card: Card | None = None
    status: Status | None = None
    offline_since: float | None = None
    doubted_since: float | None = None
    """Since when we are back at the broker without having heard of the peer again."""
    announced: str | None = None
    """The session that the gossiper knows of."""
    former: str | None = None
    """The session that was announced before this one."""
    dead: str | None = None
    """The session of which a death notice was last read."""
    heard: float = -inf
    """When its status was last heard."""
    is_live: bool = False
    """Whether it published one since we are connected; else the broker had stored what we heard."""
    phase: Phase = "starting"
    """How far it was when it was last online."""

    @property
    def is_online(self) -> bool:
        return self.status is not None and self.status.state == "online"


class Roster:
    """What one peer knows of the others.

    models: this peer's own partial models and their fields, to compare with the others'.
    neighbours: only these peers are pushed to; None pushes to all that share a model.
    sources: only these push to us; None for the neighbours.
    lease: seconds after which an offline peer is given up whose card, which says so, is not known.
    agree: settings that must be the same on all peers, as on our own card.
    dropped: where to count what cannot be read.
    """

    def __init__(
        self,
        peer: str,
        models: Mapping[str, list[SchemaEntry]],
        *,
        neighbours: Iterable[str] | None = None,
        sources: Iterable[str] | None = None,
        lease: float = 600.0,
        agree: Mapping[str, str] | None = None,
        dropped: Counter[str] | None = None,
    ):
        self.peer = peer
        self._models = dict(models)
        self._neighbours = None if neighbours is None else frozenset(neighbours)
        self._sources = self._neighbours if sources is None else frozenset(sources)
        self._lease, self._agree = lease, dict(agree or {})
        self.dropped: Counter[str] = Counter() if dropped is None else dropped
        self._entries: dict[str, _Entry] = {}
        self._connected_since = -inf
        self._last_message = inf
        """When the broker last delivered anything; infinity before `heard_anything` was first called."""
        self.mismatches: dict[tuple[str, str], str] = {}
        """(peer, partial model or setting) → on what we differ, in words."""

    def remember(self, sessions: Mapping[str, str], now: float) -> None:
        """Take over the neighbours of a former process, as offline: they come back or are given up."""
        for peer, session in sessions.items():
            entry = self._entry(peer)
            entry.announced, entry.offline_since, entry.heard = session, now, now

    # --- what is heard --------------------------------------------------------------------------

    def card(self, peer: str, payload: bytes) -> list[Event]:
        """Take in a card; an empty payload clears it."""
        if peer == self.peer or not payload:
            return []
        card = read_card(payload)
        if card is None:
            return self._unreadable(peer, "card")
        entry = self._entry(peer)
        if _is_replaced(card, entry):
            return []
        entry.card = card
        return self._announce(peer)

    def status(self, peer: str, payload: bytes, now: float, *, stored: bool = False) -> list[Event]:
        """Take in a status.

        stored: the broker kept it from before we subscribed.
        """
        if peer == self.peer or not payload:
            return []
        status = read_status(payload)
        if status is None:
            return self._unreadable(peer, "status")
        entry = self._entry(peer)
        before = entry.status
        if _is_late(status, before, entry) or _is_replaced(status, entry):
            return []  # and no sign of life: a living peer contradicts it
        entry.doubted_since, entry.heard, entry.status = None, now, status
        entry.is_live = entry.is_live or not stored
        if status.state == "online":
            if entry.offline_since is not None and entry.announced == status.session:
                # After a restart of our own it is we who were away.
                _log.info("peer %s is %s", peer, "still there" if before is None else "back")
            entry.offline_since, entry.phase = None, status.phase
            return self._announce(peer)
        if status.state == "left":
            return self._left(peer, entry, status)
        if entry.offline_since is None:
            entry.offline_since = now
            if entry.announced is not None:
                _log.info("peer %s is offline: %s", peer, status.reason or "connection lost")
        return [Offline(peer)] if entry.announced is not None else []

    def death(self, peer: str, payload: bytes) -> list[Event]:
        """Take in a death notice: the session it names never comes back."""
        if peer == self.peer or not payload:
            return []
        try:
            notice = Death.decode(payload)
        except TrustError:
            return self._unreadable(peer, "death notice")
        entry = self._entry(peer)
        entry.dead = notice.session
        if entry.announced != notice.session:
            return []
        by = f" by {notice.by}" if notice.by else ""
        _log.warning(
            "peer %s was declared dead%s: %s", peer, by, notice.reason or "no reason given"
        )
        return self._give_up(peer, entry)

    def _left(self, peer: str, entry: _Entry, status: Status) -> list[Event]:
        known, entry.announced, entry.offline_since = entry.announced, None, None
        if known is None:
            return self._settled(peer, status)
        goodbye = Gone(peer, status.session, status.statement, status.reclaimed)
        _log.info("peer %s left: %s", peer, status.reason or "it said goodbye")
        # It may have come back and left while we were away: the session we know will never answer.
        return [goodbye] if known == status.session else [Gone(peer, known, None), goodbye]

    def kept_goodbye(self, peer: str, payload: bytes) -> list[Event]:
        """Take in a goodbye that another peer has kept for those who were away when it was said."""
        status = read_status(payload)
        if peer == self.peer or status is None or status.state != "left":
            return []
        entry = self._entry(peer)
        if entry.announced == status.session:
            entry.status = status
            return self._left(peer, entry, status)
        # It may be online again, in a session of which this says nothing.
        return self._settled(peer, status)

    def was_missed(self, peer: str) -> bool:
        """Return whether a peer has left with a goodbye that somebody whom it concerns did not hear."""
        entry = self._entries.get(peer)
        if entry is None or entry.status is None or entry.status.state != "left":
            return False
        status = entry.status
        away = {
            name for name, other in self._entries.items() if other.announced and not other.is_online
        }
        # What is taken back may concern peers that seem to be online and are cut off.
        return bool(status.reclaimed) or any(row[0] in away for row in status.statement)

    def expel(self, peer: str) -> list[Event]:
        """Forget a peer that may take part no longer; its session is gone, whatever it says."""
        entry = self._entries.pop(peer, None)
        if entry is None or entry.announced is None:
            return []
        return [Gone(peer, entry.announced, None)]

    def reconnected(self, now: float, since: float) -> None:
        """Doubt everybody: a broker that restarted has forgotten who left or died meanwhile.

        Not those heard of over the new connection, which began at `since`: they were there before we
        were through with our own return.
        """
        self._connected_since = now
        for entry in self._entries.values():
            entry.is_live = entry.is_live and entry.heard >= since
            if entry.announced and entry.offline_since is None and entry.heard < since:
                entry.doubted_since = now

    def heard_anything(self, now: float) -> None:
        """Note that the broker delivered a message, whatever it was: the connection works."""
        self._last_message = now

    def tick(self, now: float, *, connected: bool = True) -> list[Event]:
        """Note who did not come back with the broker, and give up peers whose lease is over.

        connected: whether we could have heard of them.
        """
        events: list[Event] = []
        for peer, entry in self._entries.items():
            doubted = entry.doubted_since
            if doubted is not None and now - doubted > RETURN_GRACE and entry.status is not None:
                _log.warning("peer %s is offline: it did not come back with the broker", peer)
                entry.status = replace(entry.status, state="offline")
                entry.offline_since, entry.doubted_since = doubted, None
                events.append(Offline(peer))
        for peer, entry in self._entries.items():
            since, known = entry.offline_since, entry.announced
            lease = self._lease if entry.card is None else entry.card.lease
            if since is None and connected:
                # It says that it is there several times per lease; its last will may have been lost.
                since = max(entry.heard, self._connected_since)
            # While nothing at all is heard, our own connection may be dead and not know it yet.
            until = min(now, self._last_message)
            if since is not None and known is not None and until - since > LEASE_MARGIN * lease:
                _log.warning(
                    "peer %s is given up: not heard of for %.0f s, its lease is %g s",
                    peer, until - since, lease,
                )  # fmt: skip
                events += self._give_up(peer, entry)
        return events

    # --- what is known --------------------------------------------------------------------------

    def online(self) -> dict[str, Status]:
        """Return the peers that are online and share a model with us, with their statuses."""
        return {
            peer: entry.status
            for peer, entry in self._entries.items()
            if entry.announced and entry.is_online and entry.status
        }

    def training(self) -> list[str]:
        """Return the peers that are online and have training before them."""
        busy = ("starting", "training")
        return [peer for peer, status in self.online().items() if status.phase in busy]

    def awaited(self) -> list[str]:
        """Return the peers that are offline, not given up yet, and were not done when last heard of."""
        return [
            peer
            for peer, entry in self._entries.items()
            if entry.announced
            and (entry.status is None or entry.status.state == "offline")
            and entry.phase != "done"
        ]

    def met(self) -> set[str]:
        """Return the peers that are online and have shown the card of their session."""
        return {
            peer
            for peer, entry in self._entries.items()
            if entry.is_online
            and entry.card
            and entry.status
            and entry.card.session == entry.status.session
        }

    def since(self, peer: str) -> float | None:
        """Return when the session on a peer's card began; None if no card is known."""
        entry = self._entries.get(peer)
        return None if entry is None or entry.card is None else entry.card.since

    def counting(self, model: str) -> tuple[int, int]:
        """Return how many of the others' weights count in a partial model, and how many others share it."""
        sharing = [
            entry
            for entry in self._entries.values()
            if entry.announced and entry.card is not None and model in entry.card.models
        ]
        counting = [e for e in sharing if e.status is not None and model in e.status.counts]
        return len(counting), len(sharing)

    # --- insides --------------------------------------------------------------------------------

    def _settled(self, peer: str, status: Status) -> list[Event]:
        """Return a goodbye of a session that is not announced, if it settles transfers of ours.

        The peer may have taken back what we credited, or have credited what we took back.
        """
        goodbye = Goodbye(status.session, status.statement, status.reclaimed)
        if not goodbye.names(self.peer):
            return []
        return [Gone(peer, status.session, status.statement, status.reclaimed)]

    def _give_up(self, peer: str, entry: _Entry) -> list[Event]:
        known, entry.announced, entry.offline_since = entry.announced, None, None
        assert known is not None
        entry.former = known
        return [Gone(peer, known, None)]

    def _unreadable(self, peer: str, what: str) -> list[Event]:
        cause = f"unreadable-{what.replace(' ', '-')}"
        self.dropped[cause] += 1
        count = self.dropped[cause]
        if is_milestone(count):
            _log.warning(
                "peer %s published a %s that cannot be read; it is ignored (%d so far)",
                peer, what, count,
            )  # fmt: skip
        return []

    def _entry(self, peer: str) -> _Entry:
        return self._entries.setdefault(peer, _Entry())

    def _announce(self, peer: str) -> list[Event]:
        """Announce a peer once its card and its status speak of the same session."""
        entry = self._entry(peer)
        card, status = entry.card, entry.status
        if card is None or status is None or status.state != "online":
            return []
        if card.session != status.session or entry.dead == status.session:
            return []
        events: list[Event] = []
        former, known = card.former, entry.announced
        if known is None:
            _log.info("peer %s is online", peer)
        elif known != status.session:
            _log.info("peer %s has a new session: its old one is gone", peer)
            if former is None or former.session != known:
                events.append(Gone(peer, known, None))
            entry.former = known
        # A goodbye that this status has replaced at the broker may be news to us.
        news = former is not None and (former.session == known or former.names(self.peer))
        if former is not None and news and known != status.session:
            events.append(Gone(peer, former.session, former.statement, former.reclaimed))
        entry.announced = status.session
        shared = self._shared(peer, card)
        may_push = self._neighbours is None or peer in self._neighbours
        may_hear = self._sources is None or peer in self._sources
        online = Online(
            peer, status.session, shared if may_push else (), status.leaving,
            shared if may_hear else (), status.counts, card.since, card.starts, entry.is_live,
        )  # fmt: skip
        return [*events, online]

    def _shared(self, peer: str, card: Card) -> tuple[str, ...]:
        """Return the partial models that are the same here and there; tell of those that are not."""
        differences = {
            key: f"{key} is {own!r} here and {card.agree[key]!r} there"
            for key, own in self._agree.items()
            if key in card.agree and card.agree[key] != own
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
        for at in [each for each in self.mismatches if each[0] == peer]:
            if at[1] not in differences:
                del self.mismatches[at]
        for what, difference in differences.items():
            if self.mismatches.get((peer, what)) != difference:
                self.mismatches[peer, what] = difference
                _log.warning("peer %s cannot be averaged with: %s", peer, difference)
        if any(key in differences for key in self._agree):
            return ()
        return tuple(shared)


def _is_replaced(news: Card | Status, entry: _Entry) -> bool:
    """Return True for news of a device that a later one has replaced, which has not gone since.

    The later one's card says so: its last will was written before it knew its generation.
    """
    card = entry.card
    if card is None or card.session != entry.announced or card.session == news.session:
        return False
    return news.generation < card.generation


def _is_late(status: Status, before: Status | None, entry: _Entry) -> bool:
    """Return True for a last will or goodbye that newer news of the peer has made void."""
    if before is None:
        return False
    if before.session == status.session:
        # A peer that is killed while it disconnects leaves its last will behind its goodbye.
        return before.state == "left" and status.state == "offline"
    if before.state != "online":
        return False
    if status.state == "left":
        return status.session == entry.former
    return status.state == "offline"
