"""The part of a session that runs on the event loop: the connection, presence, and received packets.

While the peer gossips and trains, only the tasks `keep_status` and `keep_card` wait for the broker to accept
a status or a card, so that an unreachable broker blocks neither gossip nor training. Gossip packets and
metrics are not acknowledged (QoS 0): `publish` returns once they are written to the socket, and drops them
while there is no connection. Joining, reconnecting and leaving wait in `announce`, `send_status` and
`publish_goodbye`.

The engine's methods are called through the peer's worker, one at a time; engine.py says what the event loop
reads without it. `Link.__init__` also reads its history and gossiper: the worker has nothing to do then.

A *turn* is one pass of the gossip loop: received packets and presence events go to the engine, and the
packets that it returns are sent.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import json
import logging
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any

from gossamer import __version__
from gossamer.errors import GossamerError
from gossamer.logs import should_log_repeat

from ..gossip import HEADER_BYTES, MIN_PACKET_BYTES, Transport, TransportError, topics
from ..gossip.security import Death, SecurityEvent, SecurityLayer, TrustError
from .engine import Engine, View
from .exits import PeerError, Replaced, Revoked
from .machine import Worker, from_saved
from .presence import (
    STATUSES_PER_LEASE,
    Card,
    Event,
    Online,
    OwnCard,
    Phase,
    Roster,
    SessionEnded,
    Status,
    limit_goodbyes,
    read_card,
    read_status,
)
from .settings import FOREVER, MAX_PIECES, Settings
from .summary import (
    MAX_NAMES,
    MAX_SUMMARY_BYTES,
    Ended,
    ModelSummary,
    Record,
    Summary,
    discovery_records,
    finite,
    state_payload,
)
from .traffic import Outgoing

_log = logging.getLogger(__name__)

MAX_PENDING = 2 * MAX_PIECES
"""Most received packets that may wait while the peer is busy. Further ones, and those beyond the bytes that
InboundLimits allows, are dropped and counted; their senders repeat them. Two messages of the largest number
of packets fit."""


SUMMARY_PAUSE = 2.0
"""Least seconds between two summaries: only observers read them, and they change in every round."""

FIRST_ASK, LONGEST_ASK = 3.0, 60.0
"""Seconds after which cards and statuses that are missing are asked for again, from the first pause, which
doubles, to the longest. A cluster that has just lost a node may answer a subscription before it has all
retained messages (measured with three nats-servers: 15 of 40 new subscribers lacked a card after 2 s)."""

ANSWER_PAUSE = 1.0
"""Least seconds between two statuses that are published because another peer waits for one."""


class SessionOver(GossamerError):
    """The other peers have given up this session, or will; the text says why."""


class Link:
    """One session of a peer on the event loop.

    Set `transport` and `security` before calling any method.
    """

    transport: Transport
    security: SecurityLayer

    def __init__(
        self, engine: Engine, worker: Worker, *, on_record: Callable[[Record], None]
    ) -> None:
        self.name, self.settings, self.machine = engine.name, engine.settings, engine.machine
        self.engine, self.worker = engine, worker
        self.session = engine.view.session
        self._lease = self.settings.full_lease
        """Seconds offline after which other peers give this session up."""
        self._longest_topic = topics.longest_inbox(self.settings.swarm)
        self.generation = engine.history.generation
        """1 for the first device of this name; each device that replaces another one has the next number."""
        self.shared_settings = shared_settings(self.settings)
        self.dropped: Counter[str] = Counter()
        """How many messages were not processed, or not sent, by cause."""
        self.roster = Roster(
            self.name, engine.schema_entries,
            neighbours=self.settings.neighbours, pushing_peers=self.settings.sources,
            lease=self.settings.lease, shared_settings=self.shared_settings, dropped=self.dropped,
        )  # fmt: skip
        self.roster.restore_neighbours(engine.gossiper.known_sessions(), self.machine.monotonic())
        self.joined = False
        """Whether we have joined the swarm: the name is ours, and other peers may have our card."""
        self.phase: Phase = "starting"
        """What our status tells other peers of our state: starting, training, settling or done."""
        self.leaving = False
        """Whether we are about to leave, and accept no more mass."""
        self.session_began = self.machine.wall()
        """When this process began or continued the session, by the wall clock."""
        self.last_contact = engine.last_contact if engine.restored else self.machine.uptime()
        """When we were last connected to the broker, by the uptime clock, which also runs while the
        machine or the process is suspended. A restarted process has this time from its checkpoint; after a
        reboot it is not known, and a new session begins."""
        self.status_under_our_name: Status | None = None
        """The last status delivered on our own status topic, except offline statuses of our own session (our
        probe, our last will). It may be of another device with our name."""
        self.name_in_use = False
        """Whether a running process has said, since this was last reset, that it is online under our name."""
        self.highest_generation = 0
        """The highest generation on any card under our name, or on an unconfirmed status (which may be a
        replay). A current status may have a lower one: it may be a last will, which is made before its
        session has a generation."""
        self.dead_session = ""
        """The session in the last death notice under our name. The swarm's owner, or the supervisor that saw
        the process end, publishes such a notice."""
        self.probe_delivered = asyncio.Event()
        """Set when our *probe* was delivered back to us or answered: an offline status that we publish on our
        own status topic before joining, to learn whether another device uses our name (membership.py)."""
        self.packets = self.bytes = 0  # sent so far
        self._bytes_to: Counter[str] = Counter()  # by receiver
        self.received_packets = self.received_bytes = 0
        self.state = "connecting"
        """The state of the session, for its summary; see lifecycle.State."""
        self._metrics: dict[str, float | None] = {}
        self._disagreement: dict[str, float] = {}
        self._round_ended: float | None = None
        self.last_summary: Summary | None = None
        """The summary that was made last. It is immutable, so other threads may read it."""
        self._is_discoverable = False
        """Whether the records by which Home Assistant knows of this peer are published."""
        self._noted_mismatches: dict[tuple[str, str], str] = {}
        self._noted_events = 0
        """How many of the journal's events were in the last summary, or made it due."""
        self._summary_due = asyncio.Event()
        """Set to let `keep_summary` publish a summary."""
        self._inbound_limits = engine.inbound_limits
        self._pending: list[tuple[str, bytes | memoryview]] = []
        """Received packets that wait for the next turn, each with its partial model."""
        self._pending_bytes, self._pending_limit = 0, engine.inbound_limits.max_waiting_bytes(0)
        self._roster_checked = -inf
        self._events: list[Event] = []
        """Presence events that wait for the next turn."""
        self._has_announced = False
        """Whether our card was published: other peers need it to decrypt our packets."""
        self._newly_connected = False
        """Whether a connection was established, the first or a later one, since the last turn."""
        self._on_record = on_record
        self._sent_goodbye = b""
        """Our goodbye as published, by which we recognise it when it is delivered back to us."""
        self._start_digests: dict[str, str] = {}
        """For our card: per partial model, a digest of the values that the session began with."""
        self._kept_goodbyes = engine.history.goodbyes
        """Goodbyes of other peers, kept on our card for peers that were offline then; see presence.Card."""
        self._goodbyes_unsaved = False
        """Whether the kept goodbyes have changed since they were passed to the engine's checkpoint."""
        self._plan: dict[str, Any] | None = None
        """For our card: with `sharing = "auto"`, the plan that we follow."""
        self._told = ""
        """The last of our decisions for the swarm that is in the journal."""
        self._announcement = 0
        self._published_hops = (0, 0)
        self._published_rounds: dict[str, int] = {}
        """The view's `counting_rounds` in the status that we last published."""
        self._status_requested, self._answered_at = False, -inf
        """Whether a neighbour waits for a new status of ours, and when we last published one for that."""
        self._wake = asyncio.Event()
        """Set to begin the next turn before its tick."""
        self._turn_over = asyncio.Condition()
        """Notified at the end of every turn."""
        self._status_due = asyncio.Event()
        """Set to let `keep_status` publish the status; the card before it, if `_card_due`."""
        self._card_due = False
        self._own_card = OwnCard()
        self._card_overwritten = asyncio.Event()
        """Set to let `keep_card` publish the card again."""
        self._presence_lock = asyncio.Lock()
        """Held while a card or a status is published, so that the newest one arrives last."""

    @property
    def view(self) -> View:
        """The engine's summary, as of its last call."""
        return self.engine.view

    @property
    def phase_is_confirmed(self) -> bool:
        """Whether the broker has delivered our current phase back to us, and so all messages before it."""
        status = self.status_under_our_name
        return status is not None and status.session == self.session and status.phase == self.phase

    @property
    def announces_plan(self) -> bool:
        """Whether what we say about plans is not on our card yet."""
        return self.view.announcements != self._announcement

    def presence_patterns(self, kinds: Iterable[topics.Kind], of: Iterable[str] = ()) -> list[str]:
        """Return the topics of these kinds to subscribe to: of all peers, or of ourselves and our neighbours.

        of: on a graph, only of these peers.
        """
        swarm, watched = self.settings.swarm, self.settings.watched
        if watched is None:
            return [topics.of_all(swarm, kind) for kind in kinds]
        names = sorted(of or {self.name, *watched})
        return [str(topics.Topic(swarm, name, kind)) for kind in kinds for name in names]

    def others_train(self) -> bool:
        """Return whether another peer is known to train: any online one, or on a graph one within `hops`."""
        if self.settings.watched is None:
            return bool(self.roster.still_training())
        return self._hops()[0] <= self.settings.hops

    def all_done(self) -> bool:
        """Return whether all other peers are done, and no offline peer may come back to train."""
        if self.settings.watched is not None:
            return self._hops()[1] > self.settings.hops
        statuses = self.roster.online().values()
        all_done = all(status.phase == "done" for status in statuses)
        return all_done and not self.roster.offline_unfinished()

    def _hops(self) -> tuple[int, int]:
        return self.roster.hops(self.phase, self.settings.hops + 1)

    def topic(self, kind: topics.Kind) -> str:
        """Return one of this peer's own topics."""
        return str(topics.Topic(self.settings.swarm, self.name, kind))

    # --- presence -------------------------------------------------------------------------------

    async def open(self, generation: int) -> None:
        """Open the session with this generation, and save it before other peers see it."""
        self.generation = generation
        self._start_digests = await self.worker.run(
            self.engine.open_session, self.session_began, generation
        )
        await self.save()

    async def save(self) -> None:
        """Write a checkpoint that survives a power failure, and try again while that fails.

        Used at the start and the end of a session, which must not be lost. `engine.save` raises NotSaved once
        it has failed for too long.
        """
        while not await self.worker.run(self.engine.save, durable=True):  # noqa: ASYNC110
            await asyncio.sleep(self.settings.tick)

    def enter_phase(self, phase: Phase) -> None:
        """Enter a phase; `keep_status` publishes it."""
        self.phase = phase
        self._status_due.set()

    def announce_leaving(self) -> None:
        """Publish that we are about to leave, so that no peer pushes mass to us."""
        self.leaving = True
        self._status_due.set()

    async def announce(self) -> None:
        """Publish card and status, if we have joined; runs at the first connection and every later one."""
        self.roster.reconnected(self.machine.monotonic(), since=self.transport.connection.since)
        self._newly_connected = True
        async with self._presence_lock:
            if self._may_publish():
                await self._publish_card()
                await self._publish_status()
                self._has_announced = True

    async def keep_status(self) -> None:
        """Publish the status whenever it is due. If it changes while it waits for the broker, it becomes due
        again, so that the newest status is published last."""
        while True:
            await self._status_due.wait()
            self._status_due.clear()
            async with self._presence_lock:
                if self._may_publish():
                    if self._card_due:
                        self._card_due = False
                        await self._publish_card()
                    await self._publish_status()

    async def keep_summary(self) -> None:
        """Publish a summary whenever something in it has changed, at most every SUMMARY_PAUSE seconds, and
        with every status, so several times per lease: its time shows that the peer is alive."""
        while True:
            await self._summary_due.wait()
            self._summary_due.clear()
            if self._may_publish():
                await self._publish_summary()
            await asyncio.sleep(SUMMARY_PAUSE)

    async def publish_last_summary(self, kind: str, reason: str) -> None:
        """Publish how and why the session ends, for observers; it is dropped if that is not possible now."""
        with contextlib.suppress(TransportError):
            await self._publish_summary(Ended(kind, reason, self.machine.wall()), qos=0)

    async def _publish_summary(self, ended: Ended | None = None, qos: int | None = None) -> None:
        topic = self.topic("summary")
        room = self.transport.max_payload(topic) - self.security.statement_overhead
        body = self.summary(ended).encode(min(MAX_SUMMARY_BYTES, room))
        if body is None:
            self.dropped["summary-too-large"] += 1
            return
        await self.transport.publish(topic, self.security.summary(body), retain=True, qos=qos)
        if self.settings.discovery:
            await self._publish_discovery(qos)

    async def _publish_discovery(self, qos: int | None) -> None:
        """Publish what Home Assistant shows of this peer; before that, once, that there is such a peer."""
        swarm = self.settings.swarm
        if not self._is_discoverable:
            if qos == 0:
                return  # it leaves: it must not wait for the broker
            records = discovery_records(swarm, self.name, self._lease)
            for topic, record in records.items():
                await self.transport.publish(topic, record, retain=True, qos=1)
            self._is_discoverable = True
        assert self.last_summary is not None
        values = state_payload(self.last_summary)
        await self.transport.publish(self.topic("state"), values, retain=True, qos=qos)

    def summary(self, ended: Ended | None = None) -> Summary:
        """Return what observers may know of this peer, as of the engine's last call."""
        view, members, journal = self.view, self.members(), self.engine.journal
        neighbours = self.roster.neighbours()
        models = {
            model: ModelSummary(
                counts=model in view.counting_rounds,
                rounds=view.counting_rounds.get(model, 0),
                counting=counting,
                members=sharing,
                disagreement=finite(self._disagreement.get(model, inf)),
                weight=view.weights.get(model, 0.0),
                diverged=model in view.diverged,
            )
            for model in sorted(self.engine.schema_entries)
            for counting, sharing in [members.get(model, (int(model in view.counting_rounds), 1))]
        }
        mismatches, online = sorted(self.roster.mismatches.items()), self.roster.online()
        refused = {peer: text for (peer, _), text in mismatches if peer in online}
        refused |= {peer: "banned here" for peer in online if self.engine.is_banned(peer)}
        self._noted_events = journal.count
        self.last_summary = Summary(
            session=self.session,
            time=self.machine.wall(),
            since=self.session_began,
            state=self.state,
            phase=self.phase,
            round=view.round,
            rounds=None if self.settings.rounds == FOREVER else self.settings.rounds,
            version=__version__,
            round_ended=self._round_ended,
            models=models,
            metrics=self._metrics,
            neighbours=tuple(neighbours[:MAX_NAMES]),
            neighbour_bytes=tuple(self._bytes_to[name] for name in neighbours[:MAX_NAMES]),
            neighbour_count=len(neighbours),
            sent_bytes=self.bytes,
            sent_packets=self.packets,
            received_bytes=self.received_bytes,
            received_packets=self.received_packets,
            refused=dict(list(refused.items())[:MAX_NAMES]),
            ended=ended,
            last_end=None if view.last_end is None else from_saved(Ended, view.last_end),
            events=journal.events,
        )
        return self.last_summary

    async def keep_card(self) -> None:
        """Publish the card again whenever another client cleared or overwrote it, until it stays."""
        while True:
            await self._card_overwritten.wait()
            self._card_overwritten.clear()
            while not self._own_card.is_intact:
                async with self._presence_lock:
                    if self._may_publish() and not self._name_taken():
                        _log.warning(
                            "peer %s publishes its card again: another client cleared or overwrote it",
                            self.name,
                        )
                        await self._publish_card()
                await asyncio.sleep(self._own_card.pause_after_restoring(self.machine.monotonic()))

    async def ask_for_missing(self) -> None:
        """Subscribe again while we lack cards or statuses: the broker then sends all that it retains."""
        pause, since = FIRST_ASK, 0.0
        while True:
            await asyncio.sleep(pause)
            connection = self.transport.connection
            if connection.state != "connected":
                continue
            if connection.since != since:  # a new connection
                since, pause = connection.since, FIRST_ASK
            elif incomplete := self.roster.incomplete(self._awaited()):
                pause = min(2 * pause, LONGEST_ASK)
                for pattern in self.presence_patterns(("card", "status"), incomplete):
                    await self.transport.subscribe(pattern)

    def _awaited(self) -> frozenset[str]:
        """Return the peers that we must hear of: neighbours, or the expected ones while we wait for them."""
        if self.settings.watched is not None:
            return self.settings.watched
        return frozenset(self.settings.expect if self.state == "waiting" else ())

    async def publish_goodbye(self, status: Status) -> None:
        """Clear our card, and publish our last status."""
        self.joined = False  # a reconnection must not announce us again
        self._sent_goodbye = self.security.status(status.encode())
        async with self._presence_lock:
            await self.transport.publish(self.topic("card"), b"", retain=True)
            await self.transport.publish(self.topic("status"), self._sent_goodbye, retain=True)

    async def earlier_goodbyes(self) -> list[Event]:
        """Receive until our own goodbye is delivered back; return the events that came before it.

        So two peers that leave at the same time agree on which goodbye was first. This assumes that the
        broker delivers statuses to all clients in the same order, as a single broker process usually does;
        MQTT promises an order only for the messages of one publisher. `receive` has been cancelled before, so
        that no other task reads the messages.
        """
        others = topics.of_all(self.settings.swarm, "status")
        own = self.topic("status")
        async for topic, payload, _ in self.transport.messages():
            if topic == own and bytes(payload) == self._sent_goodbye:
                break
            # Only statuses matter now. Invalid topics are ignored: any client can publish them.
            if topic != own and topics.matches(others, topic):
                with contextlib.suppress(topics.TopicError):
                    self._apply_presence(self.security.receive(topic, bytes(payload)))
        return self.take_events()

    async def send_status(self, status: Status, *, retain: bool = True) -> None:
        """Publish a status under our name, signed by the security layer."""
        signed = self.security.status(status.encode())
        await self.transport.publish(self.topic("status"), signed, retain=retain)

    def _may_publish(self) -> bool:
        """Return whether to publish card and status: not if the name is not ours or the lease is over."""
        return self.joined and not self._lease_over()

    def _name_taken(self) -> bool:
        """Return whether another session is online under our name: both would overwrite each other's card."""
        status = self.status_under_our_name
        return (
            status is not None
            and status.state == "online"
            and status.session != self.session
            # A lower generation is that of a device that we have replaced.
            and status.generation >= self.generation
        )

    async def _publish_card(self) -> None:
        card = Card(
            self.session, self.session_began, self.engine.samples, self.engine.schema_entries,
            self.generation, self._lease, self.shared_settings, self._start_digests,
            self.engine.last_session_goodbye, self._kept_goodbyes, self._plan,
            self.settings.asleep,
        )  # fmt: skip
        signed = self.security.card(card.encode())
        self._own_card.about_to_publish(signed)
        await self.transport.publish(self.topic("card"), signed, retain=True)

    async def _publish_status(self) -> None:
        self._published_rounds = dict(self.view.counting_rounds)
        if self.settings.watched is not None:
            self._published_hops = self._hops()
        status = Status(
            "online", self.session, self.phase,
            leaving=self.leaving, counts=self._published_rounds, generation=self.generation,
            hops=self._published_hops,
        )  # fmt: skip
        self._summary_due.set()
        await self.send_status(status)

    def _publish_changed_rounds(self) -> None:
        """Make the status due if we count in a model that our published status lacks, or if the number of
        rounds for which we have counted in a model has about doubled since then; on a graph also if we know
        more, or less, of which peers have finished."""

        def magnitudes(rounds_by_model: Mapping[str, int]) -> dict[str, int]:
            return {model: rounds.bit_length() for model, rounds in rounds_by_model.items()}

        if magnitudes(self.view.counting_rounds) != magnitudes(self._published_rounds):
            self._status_due.set()
        if self.settings.watched is not None and self._hops() != self._published_hops:
            self._status_due.set()

    def _answer_waiting_peers(self, events: list[Event]) -> None:
        """Publish the status again if a neighbour waits for a first value in a model in which we count.

        That neighbour may have only our retained status, which does not prove that we are alive. It waits
        only for peers that push to it, so the models are those that we push to it. This is not part of a
        turn: while a round is trained on the worker, which may take long, the engine's turn waits in line.
        """
        self._status_requested = self._status_requested or any(
            isinstance(event, Online)
            and not event.leaving
            and any(
                model in self.view.counting_rounds and model not in event.counting_rounds
                for model in event.models
            )
            for event in events
        )
        now = self.machine.monotonic()
        if self._status_requested and now >= self._answered_at + ANSWER_PAUSE:
            self._status_requested, self._answered_at = False, now
            self._status_due.set()

    async def publish_record(self, values: Record) -> None:
        """Complete a metrics record, pass it to `on_record`, and publish it.

        received: messages from other peers so far. counts: whether our weight counts in all our partial
        models. neighbours: the peers that are online, also those that we do not push to.
        """
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
            **({"decided": list(view.decided)} if view.decided else {}),
        }
        self._note_record(values, record["disagreement"])
        self._on_record(record)
        await self.transport.publish(self.topic("metrics"), json.dumps(record).encode())

    def _note_record(self, values: Record, disagreement: dict[str, float]) -> None:
        """Keep what a metrics record says for the summary."""
        numbers = {key: value for key, value in values.items() if key != "metrics"}
        numbers |= values.get("metrics", {})
        self._metrics |= {key: finite(value) for key, value in numbers.items()}
        self._disagreement, self._round_ended = disagreement, self.machine.wall()
        self._summary_due.set()

    def members(self) -> dict[str, list[int]]:
        """Return, per shared partial model, how many members count and how many there are, us included."""
        members = {}
        for model in self.engine.schema_entries:
            counting, sharing = self.roster.count_members(model)
            if sharing:
                members[model] = [counting + (model in self.view.counting_rounds), sharing + 1]
        return members

    # --- the lease ------------------------------------------------------------------------------
    # Other peers give up a session that was offline for longer than its lease; its peer then starts a
    # new session.

    async def renew_lease(self) -> None:
        """Note when we are connected, and publish the status several times per lease.

        While the process is suspended or not connected, the time of the last contact stays as it is.
        """
        pause, published_at = self.settings.lease / STATUSES_PER_LEASE, self.machine.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self.settings.lease / 8))
            self.check_lease()
            self._answer_waiting_peers([])  # an answer that ANSWER_PAUSE has delayed
            if self.transport.connection.state == "connected":
                self.last_contact = self.machine.uptime()
                if self.machine.monotonic() >= published_at + pause:
                    published_at = self.machine.monotonic()
                    self._status_due.set()

    def check_lease(self) -> None:
        """Raise SessionOver if we are connected and the lease has expired, or the session was rejected.

        Neighbours that have given up our session reject it in their acknowledgements; Engine says when such
        rejections are credible.
        """
        if self.transport.connection.state != "connected":
            return
        if self._lease_over():
            offline = self.machine.uptime() - self.last_contact
            raise SessionOver(f"lease expired ({offline:.0f} s > {self._lease:g} s)")
        if self.view.rejection:
            raise SessionOver(f"its session was rejected: {self.view.rejection}")

    def _lease_over(self) -> bool:
        """Return whether we were not connected for a whole lease: other peers may have given us up."""
        return self.machine.uptime() - self.last_contact > self._lease

    # --- turns ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let the next turn begin now, not at the next tick."""
        self._wake.set()

    async def next_turn(self) -> None:
        """Wait until the next turn is over."""
        async with self._turn_over:
            await self._turn_over.wait()

    async def wait_for_engine(self) -> None:
        """Wait until the engine has processed all presence events received so far."""
        while self._events:
            await self.next_turn()
        await self.next_turn()  # the turn that processes the last of them

    async def gossip(self) -> None:
        """Run turn after turn, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):  # woken up, or after a tick
                async with asyncio.timeout(self.settings.tick):
                    await self._wake.wait()
            self._wake.clear()
            self.check_lease()
            now = self.machine.monotonic()
            if self._newly_connected:
                self._newly_connected = False
                # Other peers may be connecting too: wait for them before a waiting model is founded.
                await self.worker.run(self.engine.bootstrap.restart_wait_for_counting_peers, now)
            if self._goodbyes_unsaved:
                self._goodbyes_unsaved = False
                await self.worker.run(self.engine.keep_goodbyes, self._kept_goodbyes)
            limit = self._max_packet()
            # No await between taking the events and the turn: if we were cancelled there, the events would be
            # lost, since only the handler below puts them back.
            connected = self.transport.connection.state == "connected"
            events = self.take_events()
            # Once per tick, not in every turn: it looks at all peers, and leases are much longer.
            check_roster = now >= self._roster_checked + self.settings.tick
            if check_roster:
                self._roster_checked = now
                events += self.roster.tick(now, connected=connected)
            if check_roster or events:
                self._pending_limit = self._inbound_limits.max_waiting_bytes(
                    len(self.roster.online())
                )
            packets, self._pending, self._pending_bytes = self._pending, [], 0
            run = self.worker.run_short if self.engine.has_short_turns else self.worker.run
            try:
                outgoing = await run(
                    self.engine.turn, packets, events, now, limit, self.last_contact
                )
            except asyncio.CancelledError:
                # The engine may have run the turn or not; applying an event twice does no harm.
                self._events = [*events, *self._events]
                raise
            packets.clear()  # frees megabytes before the next turn
            for event in events:
                if isinstance(event, SessionEnded):
                    # Only after the turn: with private averaging (gossip/masking.py), removing our mask may
                    # need the neighbour's secret.
                    self.security.remove(event.peer, event.session)
            if self.announces_plan:
                await self._announce_plan()
            self._publish_changed_rounds()
            if self._noted_events != self.engine.journal.count:
                self._summary_due.set()
            await self._send(outgoing)
            if self._has_announced:
                await self._send_revocation_lists()
            async with self._turn_over:
                self._turn_over.notify_all()

    async def _announce_plan(self) -> None:
        """Publish the plan that we follow now, and compare our new partial models with those of others.

        Has no effect before the turn in which the plan is saved.
        """
        announcement = self.view.announcements
        announced = await self.worker.run(self.engine.announced_plan)
        if announced is None:
            return
        self._announcement = announcement
        self._plan, group_models = announced
        self._inbound_limits = self.engine.inbound_limits
        self._events += self.roster.set_models(self.engine.schema_entries, group_models)
        if self.view.decided and self.view.decided[-1] != self._told:
            self._told = self.view.decided[-1]
            self.engine.journal.add("decided", f"decides: {self._told}", log=False)
        self._card_due = True
        self._status_due.set()

    def take_events(self) -> list[Event]:
        """Return the presence events since the last call."""
        events, self._events = self._events, []
        return events

    def _max_packet(self) -> int:
        """Return the bytes of the largest packet; the broker's limit may change when it is restarted."""
        broker_limit = self.transport.max_payload(self._longest_topic)
        required = MIN_PACKET_BYTES + self.security.overhead
        if broker_limit < required:
            raise PeerError(
                f"peer {self.name}: the broker accepts at most {broker_limit} bytes per message, and gossip "
                f"needs {required}: raise the broker's packet limit (mosquitto: max_packet_size)"
            )
        return min(broker_limit, self.engine.limits.max_packet)

    async def _send_revocation_lists(self) -> None:
        """Send revocation lists to peers that lack them; remove peers whose invitation has expired.

        A list is sent to the inbox of one of the receiver's partial models, although it concerns all models.
        """
        packets, events = self.security.tick()
        self._apply_presence(events)
        await self._send([Outgoing(peer, model, iter([packet])) for peer, model, packet in packets])

    async def _send(self, outgoing: list[Outgoing]) -> None:
        for message in outgoing:
            topic = topics.inbox(self.settings.swarm, message.receiver, message.model)
            for packet in message.packets:
                if len(packet) > self.transport.max_payload(topic):
                    # The limit was lowered after the message was split; the gossiper repeats the message.
                    self.dropped["cut-too-large"] += 1
                    break
                if await self.transport.publish(topic, packet):
                    self.packets += 1
                    self.bytes += len(packet)
                    self._bytes_to[message.receiver] += len(packet)

    # --- received messages ----------------------------------------------------------------------

    async def receive(self) -> None:
        """Sort received messages: gossip packets wait for the next turn, presence is processed at once."""
        async for topic, payload, retained in self.transport.messages():
            self.roster.note_delivery(self.machine.monotonic())
            try:
                if topics.is_gossip(topic):
                    self.received_packets += 1
                    self.received_bytes += len(payload)
                    self._queue(topics.parse(topic), payload)
                else:
                    self._check_own_topic(topic, bytes(payload))
                    verified = self.security.receive(topic, bytes(payload))
                    self._apply_presence(verified, retained=retained)
                    self._keep_missed_goodbye(topic, bytes(payload), verified)
            except topics.TopicError:
                self.dropped["topic"] += 1
                continue
            del payload  # frees its memory while we wait for the next message
            self.wake()

    def _queue(self, topic: topics.Topic, payload: bytes | memoryview) -> None:
        if topic.model is None:  # a card or status, if the swarm or a peer has the name "inbox"
            return
        if not self.security.expects(topic.model, payload):
            return  # the security layer counts it; packets of uninvited senders take up no memory
        max_message = self._inbound_limits.max_message_bytes + HEADER_BYTES
        largest = max(max_message, self.security.largest_list)
        if len(payload) > largest + self.security.overhead:
            self.dropped["packet-too-large"] += 1
        elif (
            len(self._pending) < MAX_PENDING
            and self._pending_bytes + len(payload) <= self._pending_limit
        ):
            self._pending.append((topic.model, payload))
            self._pending_bytes += len(payload)
        else:
            self.dropped["busy"] += 1

    def _check_own_topic(self, topic: str, payload: bytes) -> None:
        """Notice if another client cleared or overwrote our retained card, or cleared our retained status."""
        if topic == self.topic("card"):
            if self._own_card.receive(payload):
                self._card_overwritten.set()
        elif topic == self.topic("status") and not payload and self.joined:
            self._status_due.set()

    def _apply_presence(self, verified: list[SecurityEvent], *, retained: bool = False) -> None:
        """Pass presence messages that the security layer has verified to the roster."""
        first_new = len(self._events)
        for each in verified:
            is_our_name = each.peer == self.name
            match each.kind:
                case "card":
                    card = read_card(each.body)
                    if is_our_name and card is not None:
                        self.highest_generation = max(self.highest_generation, card.generation)
                    self._events += self.roster.receive_card(each.peer, each.body)
                    if not is_our_name and card is not None:
                        self._apply_kept_goodbyes(card)
                case "status":
                    if is_our_name:
                        self._receive_status_under_our_name(each.body, retained=retained)
                    now = self.machine.monotonic()
                    self._events += self.roster.receive_status(
                        each.peer, each.body, now, retained=retained
                    )
                case "death":
                    if is_our_name:
                        self._receive_death_under_our_name(each.body)
                    self._events += self.roster.receive_death(each.peer, each.body)
                case "removed" if is_our_name:
                    if each.body == b"revoked":
                        raise Revoked(self.name)
                    raise PeerError(
                        f"peer {self.name}: its invitation has expired; ask the swarm's owner for a new one"
                    )
                case "removed":
                    self._events += self.roster.remove(each.peer)
                case "reissue-card" | "reissue-status":
                    # Another peer could not use ours: it was too old, had another key, or was refused.
                    self._card_due |= each.kind == "reissue-card"
                    self._status_due.set()
                case "unconfirmed-status":  # authentic and under our name, but it may be a replay
                    self._receive_unconfirmed_status(each.body)
        if len(self._events) > first_new:
            self._summary_due.set()  # it names our neighbours
        self._answer_waiting_peers(self._events[first_new:])
        self._note_mismatches()

    def _note_mismatches(self) -> None:
        """Note the peers that cannot be averaged with; the roster has logged why."""
        found = dict(self.roster.mismatches)
        for (peer, _), text in found.items() - self._noted_mismatches.items():
            text = f"refuses peer {peer}: {text}"
            self.engine.journal.add("refused", text, peer=peer, log=False)
        self._noted_mismatches = found

    def _keep_missed_goodbye(
        self, topic: str, payload: bytes, verified: list[SecurityEvent]
    ) -> None:
        """Put a goodbye on our card if a peer that it concerns is offline: a restarted broker may lose it.

        payload: as it was published. verified: what the security layer has read from it.
        """
        statuses = [read_status(each.body) for each in verified if each.kind == "status"]
        if not any(status is not None and status.state == "left" for status in statuses):
            return
        leaver = topics.parse(topic)
        if leaver.kind != "status" or not self.roster.goodbye_was_missed(leaver.peer):
            return
        text = b64encode(payload).decode()
        if self._kept_goodbyes.get(leaver.peer) != text:
            others = {
                peer: each for peer, each in self._kept_goodbyes.items() if peer != leaver.peer
            }
            self._kept_goodbyes = limit_goodbyes({**others, leaver.peer: text})
            self._goodbyes_unsaved = self._card_due = True
            self._status_due.set()

    def _apply_kept_goodbyes(self, card: Card) -> None:
        """Process the goodbyes that another peer has kept on its card, verified like retained statuses."""
        for peer, text in card.goodbyes.items():
            with contextlib.suppress(binascii.Error, ValueError, topics.TopicError):
                topic = str(topics.Topic(self.settings.swarm, peer, "status"))
                for each in self.security.receive(topic, b64decode(text, validate=True)):
                    if each.kind == "status" and each.peer == peer:
                        self._events += self.roster.receive_kept_goodbye(peer, each.body)

    def _receive_status_under_our_name(self, payload: bytes, *, retained: bool) -> None:
        """Process a status under our own name: it shows whether another device uses the name."""
        status = read_status(payload)
        if status is None:
            if payload:
                self.dropped["unreadable-status"] += 1
            return
        is_our_session = status.session == self.session
        # We publish no online status before we have joined: this one answers our probe.
        is_answer = status.state == "online" and not retained and not self.joined
        self.name_in_use |= is_answer
        if is_our_session or is_answer:
            self.probe_delivered.set()
        elif status.generation > self.generation and self.joined:
            raise Replaced(self.name, self.settings.swarm)
        if not (is_our_session and status.state == "offline"):  # not our probe or last will
            self.status_under_our_name = status
        if status.state == "online" and not is_our_session and self.joined:
            self.dropped["name-taken"] += 1
            if should_log_repeat(self.dropped["name-taken"]):
                _log.warning("peer %s: another device came online under this name", self.name)
        is_replaced = status.generation < self.generation
        if (status.state != "online" or is_replaced) and self.joined:
            # It was a late last will of ours, a session that left or that ours replaced, or a device that
            # probes whether the name is free. Our status must be the retained one again.
            self._status_due.set()

    def _receive_unconfirmed_status(self, payload: bytes) -> None:
        """Process a status under our own name that has a valid signature of our key, but may be a replay.

        Any client can replay an old status, so it does not show that the name is in use; but its generation
        is authentic.
        """
        status = read_status(payload)
        if status is None or status.session == self.session:
            return
        if status.generation > self.generation and self.joined:
            raise Replaced(self.name, self.settings.swarm)
        self.highest_generation = max(self.highest_generation, status.generation)

    def _receive_death_under_our_name(self, payload: bytes) -> None:
        try:
            notice = Death.decode(payload)
        except TrustError:
            return
        self.dead_session = notice.session
        # The notice is retained: a restarted process receives it before it announces its session again.
        if notice.session == self.session:
            by = f" by {notice.by}" if notice.by else ""
            raise SessionOver(f"it was declared dead{by}: {notice.reason or 'no reason given'}")


def shared_settings(settings: Settings) -> dict[str, str]:
    """Return the settings that must be the same on all peers, with their names as in a config."""
    shared = {"mode": settings.mode, "weights": settings.weights}
    if settings.mode == "rounds":
        shared["exchanges"] = str(settings.exchanges)
    if settings.robust != "none":
        shared["robust"] = settings.robust
    return shared
