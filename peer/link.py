"""All that the event loop owns of one session: the connection, presence, and packets that wait.

Nobody but `keep_status` and `keep_card` waits for the broker to take a status or a card, so that a broker
that is away holds up neither gossip nor training nor leaving. Of the engine, which belongs to the peer's own
thread, the loop reads `view` alone; everything else it asks through the worker.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import json
import logging
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

from gossamer.errors import GossamerError
from gossamer.logs import is_milestone

from ..gossip import HEADER_BYTES, MIN_LIMIT, Transport, topics
from ..gossip.security import Death, SecurityEvent, SecurityLayer, TrustError
from .engine import Engine, View
from .exits import PeerError, Replaced
from .machine import Worker
from .outgoing import Outgoing
from .presence import (
    STATUSES_PER_LEASE,
    Card,
    Event,
    Gone,
    Online,
    OwnCard,
    Phase,
    Roster,
    Status,
    newest_goodbyes,
    read_card,
    read_status,
)
from .settings import MAX_PIECES, Settings

_log = logging.getLogger(__name__)

Record = dict[str, Any]

MAX_PENDING = 2 * MAX_PIECES
"""Packets that may wait for a busy peer. More, or more bytes than InboundLimits allow, are dropped and
counted: their senders repeat them. A message in many small packets finds room as a whole."""


ANSWER_PAUSE = 1.0
"""Seconds between two statuses that are published because others wait for one, at the least."""


class SessionOver(GossamerError):
    """The others have given this session up; the text says why."""


class Link:
    """One session of a peer, as the event loop sees it.

    `transport` and `security` are set before anything else is asked of it.
    """

    transport: Transport
    security: SecurityLayer

    def __init__(
        self, engine: Engine, worker: Worker, *, on_record: Callable[[Record], None]
    ) -> None:
        self.name, self.settings, self.machine = engine.name, engine.settings, engine.machine
        self.engine, self.worker = engine, worker
        self.session = engine.view.session
        self.generation = engine.history.generation
        self.agree = agreement_of(self.settings)
        self.dropped: Counter[str] = Counter()
        self.roster = Roster(
            self.name, engine.entries,
            neighbours=self.settings.neighbours, sources=self.settings.sources,
            lease=self.settings.lease, agree=self.agree, dropped=self.dropped,
        )  # fmt: skip
        self.roster.restore_neighbours(engine.gossiper.known_sessions(), self.machine.monotonic())
        self.born = False
        """Whether the name is ours, and the others may know of us."""
        self.phase: Phase = "starting"
        self.leaving = False
        """Whether we are about to go, and take nothing any more."""
        self.since = self.machine.wall()
        self.last_contact = engine.last_contact if engine.restored else self.machine.uptime()
        """When the others could last hear of us, by the machine's uptime."""
        self.own_status: Status | None = None
        """What was last heard on our own status topic from another session, or from us."""
        self.card_generation = 0
        """The highest generation on a card under our name; last wills are older than their session's."""
        self.dead_session = ""
        """The session that was last declared dead under our name."""
        self.asked = asyncio.Event()
        """Set when our own question on our status topic came back to us."""
        self.packets = self.bytes = 0
        self._limits = engine.inbound_limits
        self._pending: list[tuple[str, bytes | memoryview]] = []
        self._pending_bytes, self._pending_limit = 0, engine.inbound_limits.max_waiting_bytes(0)
        self._events: list[Event] = []
        self._introduced = False
        """Whether the others can know our card, without which they cannot read what we seal."""
        self._returned = False
        """Whether the connection came back since the last turn."""
        self._on_record = on_record
        self._goodbye = b""
        self._starts: dict[str, str] = {}
        self._goodbyes = engine.history.goodbyes
        self._told_counts: dict[str, int] = {}
        self._asked, self._answered = False, -inf
        self._wake = asyncio.Event()
        self._turned = asyncio.Condition()
        self._status_due = asyncio.Event()
        self._card_due = self._goodbyes_due = False
        self._own_card = OwnCard()
        self._card_lost = asyncio.Event()
        self._speaking = asyncio.Lock()
        """Held while card and status are published, so that the last word is the last to arrive."""

    @property
    def view(self) -> View:
        """What the engine says of itself, as of its last job."""
        return self.engine.view

    @property
    def phase_is_known(self) -> bool:
        """Whether our present phase came back from the broker, and with it what was published before."""
        status = self.own_status
        return status is not None and status.session == self.session and status.phase == self.phase

    def topic(self, kind: topics.Kind) -> str:
        """Return one of this peer's own topics."""
        return str(topics.Topic(self.settings.swarm, self.name, kind))

    # --- presence -------------------------------------------------------------------------------

    async def open(self, generation: int) -> None:
        """Take the name: write the session down before anybody hears of it."""
        self.generation = generation
        self._starts = await self.worker.run(self.engine.open_session, self.since, generation)
        await self.save()

    async def save(self) -> None:
        """Write a checkpoint that outlives a power cut, trying for a while; NotSaved if that does not help.

        For the beginning and the end of a session, of which nothing may be forgotten.
        """
        while not await self.worker.run(self.engine.save, durable=True):  # noqa: ASYNC110
            await asyncio.sleep(self.settings.tick)

    def enter(self, phase: Phase) -> None:
        """Go on to another phase; the others hear of it as soon as the broker does."""
        self.phase = phase
        self._status_due.set()

    def depart(self) -> None:
        """Tell the others that we are about to go, so that nobody leaves its mass to us."""
        self.leaving = True
        self._status_due.set()

    async def birth(self) -> None:
        """Publish card and status; runs again after every reconnection."""
        self.roster.reconnected(self.machine.monotonic(), since=self.transport.connection.since)
        self._returned = True
        async with self._speaking:
            if self._in():
                await self._publish_card()
                await self._publish_status()
                self._introduced = True

    async def keep_status(self) -> None:
        """Publish the status whenever it changed. What waited for a broker may be out of date by the
        time it goes out; then it is due again, and the newest comes last."""
        while True:
            await self._status_due.wait()
            self._status_due.clear()
            async with self._speaking:
                if self._in():
                    if self._card_due:
                        self._card_due = False
                        await self._publish_card()
                    await self._publish_status()

    async def keep_card(self) -> None:
        """Publish the card again when somebody cleared or replaced it, for as long as it takes."""
        while True:
            await self._card_lost.wait()
            self._card_lost.clear()
            while not self._own_card.is_intact:
                async with self._speaking:
                    if self._in() and not self._name_taken():
                        _log.warning(
                            "peer %s publishes its card again: somebody cleared or replaced it",
                            self.name,
                        )
                        await self._publish_card()
                await asyncio.sleep(self._own_card.pause_after_restoring(self.machine.monotonic()))

    async def goodbye(self, status: Status) -> None:
        """Take back the card, and publish the last status."""
        self.born = False  # a reconnection must not bring us back to life
        self._goodbye = self.security.status(status.encode())
        async with self._speaking:
            await self.transport.publish(self.topic("card"), b"", retain=True)
            await self.transport.publish(self.topic("status"), self._goodbye, retain=True)

    async def earlier_goodbyes(self) -> list[Event]:
        """Listen until our own goodbye comes back; returns what others said before it.

        A broker hands all messages to everybody in one order, so that two peers that leave at the same
        time agree on who was first.
        """
        others = topics.every(self.settings.swarm, "status")
        own = self.topic("status")
        async for topic, payload, _ in self.transport.messages():
            if topic == own and bytes(payload) == self._goodbye:
                break
            # Goodbyes are all that matters now; anybody can publish anything beside them.
            if topic != own and topics.matches(others, topic):
                with contextlib.suppress(topics.TopicError):
                    self._take_heard(self.security.receive(topic, bytes(payload)))
        return self.take_events()

    async def say(self, status: Status, *, retain: bool = True) -> None:
        """Publish a status under our name, signed by the security layer."""
        signed = self.security.status(status.encode())
        await self.transport.publish(self.topic("status"), signed, retain=retain)

    def _in(self) -> bool:
        """Return whether to tell the others: else the name may be somebody else's, or the session over."""
        return self.born and not self._lease_over()

    def _name_taken(self) -> bool:
        """Return whether another session is online under our name: it would put its card back as we do."""
        status = self.own_status
        return (
            status is not None
            and status.state == "online"
            and status.session != self.session
            and status.generation >= self.generation  # else it is a device that we have replaced
        )

    async def _publish_card(self) -> None:
        card = Card(
            self.session, self.since, self.engine.samples, self.engine.entries, self.generation,
            self.settings.lease, self.agree, self._starts, self.engine.former_goodbye, self._goodbyes,
        )  # fmt: skip
        signed = self.security.card(card.encode())
        self._own_card.about_to_publish(signed)
        await self.transport.publish(self.topic("card"), signed, retain=True)

    async def _publish_status(self) -> None:
        self._told_counts = dict(self.view.counts)
        status = Status(
            "online", self.session, self.phase,
            leaving=self.leaving, counts=self._told_counts, generation=self.generation,
        )  # fmt: skip
        await self.say(status)

    def _tell_counts(self) -> None:
        """Publish anew in which models we count: when that changes, and when the rounds have doubled."""

        def coarse(counts: dict[str, int]) -> dict[str, int]:
            return {model: rounds.bit_length() for model, rounds in counts.items()}

        if coarse(dict(self.view.counts)) != coarse(self._told_counts):
            self._status_due.set()

    def _answer(self, events: list[Event]) -> None:
        """Publish the status again for neighbours that wait to hear from somebody who counts.

        All that they know of us may be a status that the broker had stored, and dead peers have those too.
        Not in a turn: there is none while a round is trained, which may take long.
        """
        self._asked = self._asked or any(
            isinstance(event, Online)
            and not event.leaving
            and any(m in self.view.counts and m not in event.counts for m in event.incoming_models)
            for event in events
        )
        now = self.machine.monotonic()
        if self._asked and now >= self._answered + ANSWER_PAUSE:
            self._asked, self._answered = False, now
            self._status_due.set()

    async def publish_record(self, values: Record) -> None:
        """Hand a metrics record on, and tell whoever watches the swarm."""
        view = self.view
        record = {
            "peer": self.name,
            "session": self.session,
            "time": self.machine.wall(),
            "round": view.round,
            "phase": self.phase,
            **values,
            "disagreement": await self.worker.run(self.engine.agreement.disagreement),
            "received": view.received,
            "counts": not view.waiting,
            "members": self.members(),
            "packets": self.packets,
            "bytes": self.bytes,
            **await self.worker.run(self.engine.compression.record),
            "neighbours": len(self.roster.online()),
        }
        self._on_record(record)
        await self.transport.publish(self.topic("metrics"), json.dumps(record).encode())

    def members(self) -> dict[str, list[int]]:
        """Return, per shared partial model, how many members' weights count, and how many members there are.

        This peer is one of them.
        """
        found = {}
        for model in self.engine.entries:
            counting, sharing = self.roster.count_members(model)
            if sharing:
                found[model] = [counting + (model in self.view.counts), sharing + 1]
        return found

    # --- the lease ------------------------------------------------------------------------------

    async def renew_lease(self) -> None:
        """Note when we were last connected, and say several times per lease that we are there.

        A frozen process or a lost link leaves a gap.
        """
        rest, said = self.settings.lease / STATUSES_PER_LEASE, self.machine.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self.settings.lease / 8))
            self.check_lease()
            self._answer([])  # what came too soon after another one
            if self.transport.connection.state == "connected":
                self.last_contact = self.machine.uptime()
                if self.machine.monotonic() >= said + rest:
                    said = self.machine.monotonic()
                    self._status_due.set()

    def check_lease(self) -> None:
        """Raise SessionOver once we are back after too long a time, or were told that we are given up."""
        if self.transport.connection.state != "connected":
            return
        if self._lease_over():
            away = self.machine.uptime() - self.last_contact
            raise SessionOver(f"lease expired ({away:.0f} s > {self.settings.lease:g} s)")
        if self.view.rejection:
            raise SessionOver(f"its session was rejected: {self.view.rejection}")

    def _lease_over(self) -> bool:
        """Return whether the others may have given us up."""
        return self.machine.uptime() - self.last_contact > self.settings.lease

    # --- turns ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let the next turn begin now, not at the next tick."""
        self._wake.set()

    async def next_turn(self) -> None:
        """Wait until the next turn is over."""
        async with self._turned:
            await self._turned.wait()

    async def up_to_date(self) -> None:
        """Wait until the engine knows everything that presence knows now."""
        while self._events:
            await self.next_turn()
        await self.next_turn()  # the one that took the last of them

    async def gossip(self) -> None:
        """Turn after turn: what arrived goes in, what is due goes out."""
        while True:
            with contextlib.suppress(
                TimeoutError
            ):  # until something is to be done, or a tick has passed
                async with asyncio.timeout(self.settings.tick):
                    await self._wake.wait()
            self._wake.clear()
            self.check_lease()
            now = self.machine.monotonic()
            if self._returned:
                self._returned = False
                await self.worker.run(self.engine.bootstrap.restart_silence, now)
            if self._goodbyes_due:
                self._goodbyes_due = False
                await self.worker.run(self.engine.keep_goodbyes, self._goodbyes)
            limit = self._max_packet()
            # Nothing is awaited between here and the turn: what a cancelled turn has taken is put back.
            connected = self.transport.connection.state == "connected"
            gone = self.roster.tick(now, connected=connected)
            events = [*self.take_events(), *gone]
            arrived, self._pending, self._pending_bytes = self._pending, [], 0
            self._pending_limit = self._limits.max_waiting_bytes(len(self.roster.online()))
            try:
                outgoing = await self.worker.run(
                    self.engine.turn, arrived, events, now, limit, self.last_contact
                )
            except asyncio.CancelledError:
                # Nobody knows whether the turn was made; to apply an event twice does no harm.
                self._events = [*events, *self._events]
                raise
            arrived.clear()  # megabytes, which would else be held until the next turn
            for event in events:
                if isinstance(event, Gone):
                    # Not before: a round that begins counts on its neighbours' secrets.
                    self.security.remove(event.peer, event.session)
            self._tell_counts()
            await self._send(outgoing)
            if self._introduced:
                await self._send_lists()
            async with self._turned:
                self._turned.notify_all()

    def take_events(self) -> list[Event]:
        """Return what presence has said since it was last asked."""
        events, self._events = self._events, []
        return events

    def _max_packet(self) -> int:
        """Return the bytes of the largest packet, as of now: a broker may come back with another limit."""
        room = self.transport.max_payload(topics.longest(self.settings.swarm))
        least = MIN_LIMIT + self.security.overhead
        if room < least:
            raise PeerError(
                f"peer {self.name}: the broker takes {room} bytes a message at most, and gossip needs "
                f"{least}: raise the broker's packet limit (mosquitto: max_packet_size)"
            )
        return min(room, self.engine.limits.max_packet)

    async def _send_lists(self) -> None:
        """Send revocation lists to those who lack them; note who is out because an invitation expired."""
        lists, out = self.security.tick()
        self._take_heard(out)
        await self._send([Outgoing(peer, model, iter([packet])) for peer, model, packet in lists])

    async def _send(self, outgoing: list[Outgoing]) -> None:
        for message in outgoing:
            topic = topics.inbox(self.settings.swarm, message.receiver, message.model)
            for packet in message.packets:
                if len(packet) > self.transport.max_payload(topic):
                    # Cut before the limit became less; the ledger repeats the message, and then it fits.
                    self.dropped["cut-too-large"] += 1
                    break
                await self.transport.publish(topic, packet)
                self.packets += 1
                self.bytes += len(packet)

    # --- what arrives ---------------------------------------------------------------------------

    async def receive(self) -> None:
        """Sort what arrives: gossip waits for the next turn, cards and statuses go to the roster."""
        async for topic, payload, stored in self.transport.messages():
            self.roster.note_delivery(self.machine.monotonic())
            try:
                if topics.is_gossip(topic):
                    self._queue(topics.parse(topic), payload)
                else:
                    self._hear_own_topic(topic, bytes(payload))
                    self._take_heard(self.security.receive(topic, bytes(payload)), stored=stored)
                    self._keep_goodbye(topic, bytes(payload))
            except topics.TopicError:
                self.dropped["topic"] += 1
                continue
            del payload  # the next message may be long in coming
            self.wake()

    def _queue(self, where: topics.Topic, payload: bytes | memoryview) -> None:
        if where.model is None:
            return
        if not self.security.expects(where.model, payload):
            return  # counted there: strangers take up no memory
        largest = max(self._limits.max_message_bytes + HEADER_BYTES, self.security.largest_list)
        if len(payload) > largest + self.security.overhead:
            self.dropped["packet-too-large"] += 1
        elif (
            len(self._pending) < MAX_PENDING
            and self._pending_bytes + len(payload) <= self._pending_limit
        ):
            self._pending.append((where.model, payload))
            self._pending_bytes += len(payload)
        else:
            self.dropped["busy"] += 1

    def _hear_own_topic(self, topic: str, payload: bytes) -> None:
        """Look after our card and status at the broker, without which nobody who comes later finds us."""
        if topic == self.topic("card"):
            if self._own_card.receive(payload):
                self._card_lost.set()
        elif topic == self.topic("status") and not payload and self.born:
            self._status_due.set()

    def _take_heard(self, heard: list[SecurityEvent], *, stored: bool = False) -> None:
        """Tell the roster what the security layer believes."""
        known = len(self._events)
        for each in heard:
            own = each.peer == self.name
            match each.kind:
                case "card":
                    card = read_card(each.body)
                    if own and card is not None:
                        self.card_generation = max(self.card_generation, card.generation)
                    self._events += self.roster.receive_card(each.peer, each.body)
                    if not own and card is not None:
                        self._take_kept_goodbyes(card)
                case "status":
                    if own:
                        self._hear_own_status(each.body)
                    now = self.machine.monotonic()
                    self._events += self.roster.receive_status(
                        each.peer, each.body, now, stored=stored
                    )
                case "death":
                    if own:
                        self._hear_own_death(each.body)
                    self._events += self.roster.receive_death(each.peer, each.body)
                case "removed" if own:
                    raise PeerError(
                        f"peer {self.name}: may take part no longer, its invitation was revoked or has "
                        "expired; ask the swarm's owner"
                    )
                case "removed":
                    self._events += self.roster.remove(each.peer)
                case "reissue-card" | "reissue-status":
                    # It is old, shows another key, or was refused.
                    self._card_due |= each.kind == "reissue-card"
                    self._status_due.set()
                case "unanswered-status":
                    self._hear_former_status(each.body)
        self._answer(self._events[known:])

    def _keep_goodbye(self, topic: str, payload: bytes) -> None:
        """Put a goodbye on our card that concerns a peer who is away: the broker may forget it until then."""
        where = topics.parse(topic)
        if where.kind != "status" or not self.roster.goodbye_was_missed(where.peer):
            return
        text = b64encode(payload).decode()
        if self._goodbyes.get(where.peer) != text:
            others = {peer: each for peer, each in self._goodbyes.items() if peer != where.peer}
            self._goodbyes = newest_goodbyes({**others, where.peer: text})
            self._goodbyes_due = self._card_due = True
            self._status_due.set()

    def _take_kept_goodbyes(self, card: Card) -> None:
        """Take in what somebody has kept for us; it is checked as if the broker had kept it."""
        for peer, text in card.goodbyes.items():
            with contextlib.suppress(binascii.Error, ValueError, topics.TopicError):
                topic = str(topics.Topic(self.settings.swarm, peer, "status"))
                for each in self.security.receive(topic, b64decode(text, validate=True)):
                    if each.kind == "status" and each.peer == peer:
                        self._events += self.roster.receive_kept_goodbye(peer, each.body)

    def _hear_own_status(self, payload: bytes) -> None:
        """Learn from our own status topic whether somebody else has our name."""
        status = read_status(payload)
        if status is None:
            if payload:
                self.dropped["unreadable-status"] += 1
            return
        own = status.session == self.session
        if own:
            self.asked.set()
        elif status.generation > self.generation and self.born:
            raise Replaced(self.name, self.settings.swarm)
        if not (own and status.state == "offline"):  # our question, or our last will
            self.own_status = status
        if status.state == "online" and not own and self.born:
            self.dropped["name-taken"] += 1
            if is_milestone(self.dropped["name-taken"]):
                _log.warning("peer %s: another device came online under this name", self.name)
        replaced_one = status.generation < self.generation
        if (status.state != "online" or replaced_one) and self.born:
            # A late last will of ours, another session that left or was replaced by ours, or somebody
            # who asks for the name.
            self._status_due.set()

    def _hear_former_status(self, payload: bytes) -> None:
        """Learn from a status that our key has signed, but nobody who is alive may stand behind.

        Whoever reaches the broker can bring an old one back, so it does not keep us from our name; but its
        generation is true.
        """
        status = read_status(payload)
        if status is None or status.session == self.session:
            return
        if status.generation > self.generation and self.born:
            raise Replaced(self.name, self.settings.swarm)
        self.card_generation = max(self.card_generation, status.generation)

    def _hear_own_death(self, payload: bytes) -> None:
        try:
            notice = Death.decode(payload)
        except TrustError:
            return
        self.dead_session = notice.session
        if notice.session == self.session:  # a restart hears this before it is announced
            by = f" by {notice.by}" if notice.by else ""
            raise SessionOver(f"it was declared dead{by}: {notice.reason or 'no reason given'}")


def agreement_of(settings: Settings) -> dict[str, str]:
    """Return the settings that must be the same on all peers, in the words of a config."""
    agree = {"mode": settings.mode, "weights": settings.weights}
    if settings.mode == "rounds":
        agree["exchanges"] = str(settings.exchanges)
    return agree
