"""Who is there: cards and statuses of the other peers, and what follows from them. No IO.

A peer publishes a *card* (what it can average) and a *status* (whether it lives, its session, and how
far it is), both retained. Its last will turns the status to offline. The roster reads the others' and
says, as events, what the gossiper must know; every change is logged in one line with its cause.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from ..gossip.wire import SchemaEntry, schema_difference
from .cards import Card, Phase, Statement, Status, read_card, read_status

_log = logging.getLogger(__name__)

RETURN_GRACE = 30.0
"""Seconds that a peer has to come back after we did; twice the longest wait between its attempts."""


@dataclass(frozen=True)
class Online:
    """A neighbour can be reached, for these vectors."""

    peer: str
    session: str
    vectors: tuple[str, ...]
    leaving: bool = False


@dataclass(frozen=True)
class Offline:
    """A neighbour cannot be reached for now."""

    peer: str


@dataclass(frozen=True)
class Gone:
    """A session is gone for good; the statement says what it had credited, if it said goodbye."""

    peer: str
    session: str
    statement: Statement | None


Event = Online | Offline | Gone


@dataclass
class _Entry:
    card: Card | None = None
    status: Status | None = None
    offline_since: float | None = None
    doubted_since: float | None = None
    """Since when we are back at the broker without having heard of the peer again."""
    announced: str | None = None
    former: str | None = None
    """The session that was announced before this one."""
    heard: float = -inf
    """When its status was last heard."""
    phase: Phase = "starting"
    """How far it was when it was last online."""


class Roster:
    """What one peer knows of the others.

    vectors: this peer's own vectors and their fields, to compare with the others'.
    neighbours: only these peers are talked to; None talks to all that share a vector.
    lease: seconds after which an offline peer is given up.
    dropped: where to count what cannot be read.
    """

    def __init__(
        self,
        peer: str,
        vectors: Mapping[str, list[SchemaEntry]],
        *,
        neighbours: Iterable[str] | None = None,
        lease: float = 600.0,
        dropped: Counter[str] | None = None,
    ):
        self.peer = peer
        self._vectors = dict(vectors)
        self._neighbours = None if neighbours is None else frozenset(neighbours)
        self._lease = lease
        self.dropped: Counter[str] = Counter() if dropped is None else dropped
        self._entries: dict[str, _Entry] = {}
        self.mismatches: dict[tuple[str, str], str] = {}
        """(peer, vector) → the field on which we differ."""

    def remember(self, sessions: Mapping[str, str], now: float) -> None:
        """Take over the neighbours of a former life, as offline: they must come back or be given up."""
        for peer, session in sessions.items():
            entry = self._entry(peer)
            entry.announced, entry.offline_since = session, now

    def card(self, peer: str, payload: bytes) -> list[Event]:
        """Take in a card; an empty payload clears it."""
        if peer == self.peer or not payload:
            return []
        card = read_card(payload)
        if card is None:
            return self._unreadable(peer, "card")
        self._entry(peer).card = card
        return self._announce(peer)

    def status(self, peer: str, payload: bytes, now: float) -> list[Event]:
        """Take in a status."""
        if peer == self.peer or not payload:
            return []
        status = read_status(payload)
        if status is None:
            return self._unreadable(peer, "status")
        entry, before = self._entry(peer), self._entry(peer).status
        if _is_late(status, before, entry):
            return []  # and no sign of life: who lives contradicts it
        entry.doubted_since, entry.heard, entry.status = None, now, status
        if status.state == "online":
            if entry.offline_since is not None and entry.announced == status.session:
                # After a restart of our own it is we who were away.
                _log.info("peer %s is %s", peer, "still there" if before is None else "back")
            entry.offline_since, entry.phase = None, status.phase
            return self._announce(peer)
        known = entry.announced
        was_known = known is not None
        if status.state == "left":
            entry.announced = None
            if known is None:
                return []
            _log.info("peer %s left: %s", peer, status.reason or "it said goodbye")
            goodbye = Gone(peer, status.session, status.statement)
            # It may have come back and left while we were away: the life we know will never answer.
            return [goodbye] if known == status.session else [Gone(peer, known, None), goodbye]
        if entry.offline_since is None:
            entry.offline_since = now
            if was_known:
                _log.info("peer %s is offline: %s", peer, status.reason or "connection lost")
        return [Offline(peer)] if was_known else []

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
        for entry in self._entries.values():
            if entry.announced and entry.offline_since is None and entry.heard < since:
                entry.doubted_since = now

    def tick(self, now: float) -> list[Event]:
        """Note who did not come back with the broker, and give up peers whose lease is over."""
        events: list[Event] = []
        for peer, entry in self._entries.items():
            doubted = entry.doubted_since
            if doubted is not None and now - doubted > RETURN_GRACE and entry.status is not None:
                _log.warning("peer %s is offline: it did not come back with the broker", peer)
                entry.status = replace(entry.status, state="offline")
                entry.offline_since, entry.doubted_since = doubted, None
                events.append(Offline(peer))
        for peer, entry in self._entries.items():
            # A quarter longer than the peer itself waits, so that it never believes it is still in.
            since, known = entry.offline_since, entry.announced
            if since is not None and known is not None and now - since > 1.25 * self._lease:
                _log.warning("peer %s is given up: offline for over %g s", peer, self._lease)
                events.append(Gone(peer, known, None))
                entry.announced = entry.offline_since = None
        return events

    def online(self) -> dict[str, Status]:
        """The peers that are online and share a vector with us, with their statuses."""
        return {
            peer: entry.status
            for peer, entry in self._entries.items()
            if entry.announced and entry.status is not None and entry.status.state == "online"
        }

    def awaited(self) -> list[str]:
        """The peers that are offline, not given up yet, and were not through when last heard of."""
        return [
            peer
            for peer, entry in self._entries.items()
            if entry.announced
            and (entry.status is None or entry.status.state == "offline")
            and entry.phase != "done"
        ]

    def all_online(self) -> dict[str, tuple[Card | None, Status]]:
        """Every other peer that says it is online, neighbour or not."""
        return {
            peer: (entry.card, entry.status)
            for peer, entry in self._entries.items()
            if entry.status is not None and entry.status.state == "online"
        }

    def _unreadable(self, peer: str, what: str) -> list[Event]:
        self.dropped[f"unreadable-{what}"] += 1
        count = self.dropped[f"unreadable-{what}"]
        if count & (count - 1) == 0:  # 1, 2, 4, 8, …: a flood cannot flood the log
            _log.warning(
                "peer %s published a %s that cannot be read; it is ignored (%d so far)",
                peer, what, count,
            )  # fmt: skip
        return []

    def _entry(self, peer: str) -> _Entry:
        return self._entries.setdefault(peer, _Entry())

    def _announce(self, peer: str) -> list[Event]:
        """The peer is usable once its card and its status speak of the same session."""
        entry = self._entry(peer)
        card, status = entry.card, entry.status
        if card is None or status is None or status.state != "online":
            return []
        if card.session != status.session:
            return []
        events: list[Event] = []
        if entry.announced is None:
            _log.info("peer %s is online", peer)
        elif entry.announced != status.session:
            _log.info("peer %s started afresh: its old session is gone", peer)
            events.append(Gone(peer, entry.announced, None))
            entry.former = entry.announced
        entry.announced = status.session
        shared = self._shared(peer, card)
        return [*events, Online(peer, status.session, shared, status.leaving)]

    def _shared(self, peer: str, card: Card) -> tuple[str, ...]:
        shared = []
        for vector, fields in card.vectors.items():
            if vector not in self._vectors:
                continue
            difference = schema_difference(self._vectors[vector], fields)
            if difference is None:
                self.mismatches.pop((peer, vector), None)
                if self._neighbours is None or peer in self._neighbours:
                    shared.append(vector)
            elif self.mismatches.get((peer, vector)) != difference:
                self.mismatches[peer, vector] = difference
                _log.warning("peer %s: model %s is not averaged: %s", peer, vector, difference)
        return tuple(shared)


def _is_late(status: Status, before: Status | None, entry: _Entry) -> bool:
    """Whether it is the will or the goodbye of a life that another one has followed already."""
    if before is None or before.state != "online" or before.session == status.session:
        return False
    if status.state == "left":
        return status.session == entry.former
    return status.state == "offline"
