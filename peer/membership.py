"""What the tasks of one peer share while it is in its swarm: one session, from joining to leaving.

Nobody but `keep_status` and `keep_card` waits for the broker to take a status or a card, so that a broker
that is away holds up neither gossip nor training nor leaving.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from ..gossip import topics
from ..gossip.transport import Transport
from ..gossip.trust import Trusting
from ..gossip.wire import SchemaEntry
from .engine import Engine
from .machine import Machine
from .own_card import OwnCard
from .presence import Card, Event, Phase, Roster, Status
from .settings import Settings
from .worker import Worker

_log = logging.getLogger(__name__)

Record = dict[str, Any]


class LeaseOver(Exception):
    """The others have given this session up; the text says why, after the peer's name."""


class Membership:
    """One session of a peer.

    `transport` and `trust` are set before anything else is asked of it.
    """

    transport: Transport
    trust: Trusting

    def __init__(
        self,
        name: str,
        settings: Settings,
        engine: Engine,
        worker: Worker,
        vectors: dict[str, list[SchemaEntry]],
        *,
        samples: int,
        machine: Machine,
        on_record: Callable[[Record], None],
    ):
        self.name, self.settings, self.engine, self.worker = name, settings, engine, worker
        self.session = engine.session
        self.machine = machine
        self.roster = Roster(
            name, vectors,
            neighbours=settings.neighbours, lease=settings.lease, dropped=engine.dropped,
        )  # fmt: skip
        self.roster.remember(engine.gossiper.known_sessions(), self.machine.monotonic())
        self.pending: list[tuple[str, bytes | memoryview]] = []
        """Packets that wait for the next turn, with the vector that each is about."""
        self.pending_bytes = 0
        self.pending_limit = engine.room.waiting(0)
        """Bytes of packets that may wait."""
        self.events: list[Event] = []
        """What became known about the others since the last turn."""
        self.born = False
        """Whether the name is ours, and the others may know of us."""
        self.introduced = False
        """Whether the others can know our card, without which they cannot read what we seal."""
        self.phase: Phase = "starting"
        self.leaving = False
        """Whether we are about to go, and take nothing any more."""
        self.since = self.machine.wall()
        self.own_status: Status | None = None
        """What was last heard on our own status topic, if somebody lives there."""
        self.asked = asyncio.Event()
        """Set when our own words on our status topic came back to us."""
        self.packets = self.bytes = 0
        self._vectors, self._samples, self._on_record = vectors, samples, on_record
        self._wake = asyncio.Event()
        self._turned = asyncio.Condition()
        self._status_due = asyncio.Event()
        self._card_due = False
        self._own_card = OwnCard()
        self._card_lost = asyncio.Event()
        self._speaking = asyncio.Lock()
        """Held while card and status are published, so that the last word is the last to arrive."""
        if not engine.restored:
            engine.in_touch = self.machine.uptime()

    def topic(self, kind: topics.Kind) -> str:
        """One of this peer's own topics."""
        return str(topics.Topic(self.settings.swarm, self.name, kind))

    # --- presence -------------------------------------------------------------------------------

    def enter(self, phase: Phase) -> None:
        """Go on to another phase; the others hear of it as soon as the broker does."""
        self.phase = phase
        self._status_due.set()

    def depart(self) -> None:
        """Tell the others that we are about to go, so that nobody leaves its mass to us."""
        self.leaving = True
        self._status_due.set()

    def contradict(self) -> None:
        """Say again that we live: somebody said, or asked whether, we do not."""
        self._status_due.set()

    def introduce_again(self) -> None:
        """Show our card once more: nobody has answered us, and it may have been refused."""
        self._card_due = True
        self._status_due.set()

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

    def hear_own(self, topic: str, payload: bytes) -> None:
        """Look after our card and status at the broker, without which nobody who comes later finds us."""
        if topic == self.topic("card"):
            if self._own_card.hear(payload):
                self._card_lost.set()
        elif topic == self.topic("status") and not payload and self.born:
            self.contradict()

    async def keep_card(self) -> None:
        """Publish the card again when somebody cleared or replaced it, for as long as it takes."""
        while True:
            await self._card_lost.wait()
            self._card_lost.clear()
            while not self._own_card.stands:
                async with self._speaking:
                    if self._in() and not self._name_taken():
                        _log.warning(
                            "peer %s publishes its card again: somebody cleared or replaced it",
                            self.name,
                        )
                        await self._publish_card()
                await asyncio.sleep(self._own_card.pause(self.machine.monotonic()))

    async def birth(self) -> None:
        """Publish card and status; runs again after every reconnection."""
        self.roster.reconnected(self.machine.monotonic(), since=self.transport.connection.since)
        async with self._speaking:
            if self._in():
                await self._publish_card()
                await self._publish_status()
                self.introduced = True

    async def goodbye(self, status: Status) -> None:
        """Take back the card, and publish the last status."""
        self.born = False  # a reconnection must not bring us back to life
        async with self._speaking:
            await self.transport.publish(self.topic("card"), b"", retain=True)
            await self.say(status)

    async def say(self, status: Status, *, retain: bool = True) -> None:
        """Publish a status under our name, signed where there is trust."""
        signed = self.trust.status(status.encode())
        await self.transport.publish(self.topic("status"), signed, retain=retain)

    def _in(self) -> bool:
        """Whether to tell the others: else the name may be somebody else's, or the session be over."""
        return self.born and not self.lease_over()

    def _name_taken(self) -> bool:
        """Whether another life is online under our name: it would put its card back as we do ours."""
        status = self.own_status
        return status is not None and status.state == "online" and status.session != self.session

    async def _publish_card(self) -> None:
        card = Card(self.session, self.since, self._samples, self._vectors)
        signed = self.trust.card(card.encode())
        self._own_card.published(signed)
        await self.transport.publish(self.topic("card"), signed, retain=True)

    async def _publish_status(self) -> None:
        await self.say(Status("online", self.session, self.phase, leaving=self.leaving))

    async def publish_record(self, values: Record) -> None:
        """Hand a metrics record on, and tell whoever watches the swarm."""
        record = {
            "peer": self.name,
            "session": self.session,
            "time": self.machine.wall(),
            "round": self.engine.round,
            "phase": self.phase,
            **values,
            "disagreement": await self.worker.run(self.engine.disagreement),
            "received": self.engine.received,
            "counts": await self.worker.run(self.engine.counts),
            "packets": self.packets,
            "bytes": self.bytes,
            **await self.worker.run(self.engine.compression.record),
            "neighbours": len(self.roster.online()),
        }
        self._on_record(record)
        await self.transport.publish(self.topic("metrics"), json.dumps(record).encode())

    # --- the lease ------------------------------------------------------------------------------

    async def keep_in_touch(self) -> None:
        """Note when we were last connected; a frozen process or a lost link leaves a gap."""
        while True:
            await asyncio.sleep(min(1.0, self.settings.lease / 8))
            self.check_lease()
            if self.transport.connection.state == "connected":
                self.engine.in_touch = self.machine.uptime()

    def check_lease(self) -> None:
        """Raise LeaseOver once we are back after too long a time, or were told that we are given up."""
        if self.transport.connection.state != "connected":
            return
        if self.lease_over():
            raise LeaseOver("was out of touch for longer than its lease")
        if why := self.engine.disowned():
            raise LeaseOver(f"must end its session: {why}")

    def lease_over(self) -> bool:
        """Whether the others may have given us up."""
        return self.machine.uptime() - self.engine.in_touch > self.settings.lease

    # --- turns ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let the next turn begin now, not at the next tick."""
        self._wake.set()

    async def rest(self) -> None:
        """Until something is to be done, or a tick has passed."""
        try:
            async with asyncio.timeout(self.settings.tick):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def turned(self) -> None:
        """Tell those who wait in `next_turn` that one is over."""
        async with self._turned:
            self._turned.notify_all()

    async def next_turn(self) -> None:
        """Until the next turn is over."""
        async with self._turned:
            await self._turned.wait()

    async def until_averaged(self) -> None:
        """Turn after turn, until the engine says that training may go on."""
        while not self.engine.averaged:
            await self.next_turn()
