"""A running peer: presence, gossip, training and metrics as tasks of one event loop.

    peer = Peer("anna", learner, Settings(swarm="garden"), connect("mqtt://localhost"))
    await peer.run()

The event loop only moves bytes; all that touches the network runs on the peer's own thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..gossip import topics
from ..gossip.transport import Hook, Transport, Will
from ..models import Learner
from .engine import Engine, Outgoing
from .errors import PeerError
from .presence import Card, Event, Phase, Roster, Status
from .settings import Settings
from .store import schema_entries
from .worker import Worker

_log = logging.getLogger(__name__)

MAX_PENDING = 256
"""Packets that may wait for a busy peer; more are dropped and counted: their senders repeat them."""

Record = dict[str, Any]


class Connect(Protocol):
    """Makes a peer's transport: `lambda client_id, will, on_connect: MqttTransport(url, …)`."""

    def __call__(self, client_id: str, will: Will, on_connect: Hook) -> Transport:
        """Return a transport that is not connected yet."""
        ...


@dataclass(frozen=True)
class Report:
    """What a peer leaves behind: its last test, its accounts and its counters."""

    peer: str
    session: str
    rounds: int
    accuracy: float
    weight: dict[str, list[int]]
    """Per vector: held, in open transfers, injected."""
    gossip: dict[str, int]
    dropped: dict[str, int]
    transport: dict[str, int]


class Peer:
    """One member of a swarm.

    name: unique in the swarm; two peers of one name would take each other's mail.
    learner: what trains the peer's network; see gossamer.models.Learner.
    connect: makes the transport.
    samples: how much the peer counts with `weigh = "samples"`.
    checkpoint: a file to survive crashes with. A peer started with the checkpoint of its former life
        goes on where that stopped; without one a crash loses the mass that the peer held.
    on_record: called with every metrics record, which is also published.
    """

    def __init__(
        self,
        name: str,
        learner: Learner,
        settings: Settings,
        connect: Connect,
        *,
        samples: int = 1,
        checkpoint: Path | None = None,
        seed: int = 0,
        on_record: Callable[[Record], None] = lambda _: None,
    ):
        topics.check_name("peer", name)
        topics.check_name("swarm", settings.swarm)
        self.name, self.learner, self.settings = name, learner, settings
        self._connect, self._samples, self._seed = connect, samples, seed
        self._checkpoint, self._on_record = checkpoint, on_record
        self._pending: list[tuple[str, bytes]] = []
        self._events: list[Event] = []
        self._wake = asyncio.Event()
        self._turned = asyncio.Condition()
        self._leave = asyncio.Event()
        self._leave_reason = ""
        self._phase: Phase = "starting"
        self._own_status: Status | None = None
        self._sent = [0, 0]
        self._accuracy = float("nan")
        self._since = time.time()

    def leave(self, reason: str = "asked to leave") -> None:
        """Ask the peer to hand over its mass and go; `run` returns when it has."""
        self._leave_reason = reason
        self._leave.set()

    async def run(self) -> Report:
        """Join the swarm, train and gossip to the end, and leave. PeerError says what went wrong."""
        with Worker(self.name) as worker:
            self._worker = worker
            self._engine = await worker.run(
                Engine, self.name, self.learner, self.settings,
                samples=self._samples, checkpoint=self._checkpoint, seed=self._seed,
            )  # fmt: skip
            engine = self._engine
            self._vectors = {v: schema_entries(engine.network, v) for v in engine.schemas}
            self._roster = Roster(
                self.name, self._vectors,
                neighbours=self.settings.neighbours, lease=self.settings.lease,
            )  # fmt: skip
            will = Status("offline", engine.session, reason="connection lost")
            own = self._topic("status")
            self._transport = self._connect(
                f"{self.name}-{engine.session}", Will(own, will.encode()), self._birth
            )
            async with self._transport as transport:
                for pattern in (
                    topics.every(self.settings.swarm, "card"),
                    topics.every(self.settings.swarm, "status"),
                    topics.inboxes(self.settings.swarm, self.name),
                ):
                    await transport.subscribe(pattern)
                return await self._live(transport)

    async def _live(self, transport: Transport) -> Report:
        """Run the peer's tasks until the learning task is through."""
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(self._receive(transport), name=f"{self.name} receive"),
                    group.create_task(self._gossip(transport), name=f"{self.name} gossip"),
                ]
                await group.create_task(self._learn(), name=f"{self.name} learn")
                for task in background:
                    task.cancel()
        except* Exception as errors:
            raise _first(errors) from None
        report = await self._worker.run(self._engine.report)
        return Report(
            peer=self.name,
            session=self._engine.session,
            rounds=self._engine.round,
            accuracy=self._accuracy,
            transport=dict(transport.counters),
            **report,
        )

    # --- receiving ------------------------------------------------------------------------------

    async def _receive(self, transport: Transport) -> None:
        async for topic, payload, _ in transport.messages():
            try:
                where = topics.parse(topic)
            except topics.TopicError:
                self._engine.dropped["topic"] += 1
                continue
            if where.kind == "inbox" and where.vector is not None:
                if len(self._pending) < MAX_PENDING:
                    self._pending.append((where.vector, payload))
                else:
                    self._engine.dropped["busy"] += 1
            elif where.kind == "card":
                self._events += self._roster.card(where.peer, payload, time.monotonic())
            elif where.kind == "status":
                if where.peer == self.name:
                    self._hear_oneself(payload)
                self._events += self._roster.status(where.peer, payload, time.monotonic())
            self._wake.set()

    def _hear_oneself(self, payload: bytes) -> None:
        """Our own status topic tells whether somebody else lives under our name."""
        try:
            table = json.loads(payload)
            self._own_status = Status(table["state"], table["session"])
        except (ValueError, KeyError, TypeError):
            return
        taken = (
            self._own_status.state == "online" and self._own_status.session != self._engine.session
        )
        if taken and self._phase != "starting":
            _log.warning("peer %s: somebody else came online under this name", self.name)

    # --- gossip ---------------------------------------------------------------------------------

    async def _gossip(self, transport: Transport) -> None:
        """Turn after turn: what arrived goes in, what is due goes out."""
        limit = min(transport.max_payload(self._topic("metrics")), 1 << 20)
        while True:
            try:
                async with asyncio.timeout(self.settings.tick):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            now = time.monotonic()
            events, self._events = [*self._events, *self._roster.tick(now)], []
            arrived, self._pending = self._pending, []
            outgoing = await self._worker.run(self._engine.turn, arrived, events, now, limit)
            await self._send(transport, outgoing)
            async with self._turned:
                self._turned.notify_all()

    async def _send(self, transport: Transport, outgoing: list[Outgoing]) -> None:
        for message in outgoing:
            topic = topics.inbox(self.settings.swarm, message.receiver, message.vector)
            for packet in message.packets:
                await transport.publish(topic, packet)
                self._sent[0] += 1
                self._sent[1] += len(packet)

    # --- learning -------------------------------------------------------------------------------

    async def _learn(self) -> None:
        await self._start()
        await self._enter("training")
        while self._engine.round < self.settings.rounds and not self._leave.is_set():
            training = await self._worker.run(self._engine.train)
            self._wake.set()
            await self._until(self._engine.averaged)
            number = self._engine.round
            if number % self.settings.test_every == 0 or number == self.settings.rounds:
                test = await self._worker.run(self.learner.test)
                self._accuracy = test.accuracy
                await self._publish_record({"accuracy": test.accuracy, "loss": test.mean_loss})
            else:
                await self._publish_record({"training_loss": training.mean_loss})
        if self._leave.is_set():
            await self._hand_over()
        else:
            await self._finish()
        await self._say_goodbye()

    async def _start(self) -> None:
        """Wait for those we expect, and make sure that we may join."""
        deadline = time.monotonic() + self.settings.start_timeout
        await self._refuse_taken_name(deadline)
        while missing := sorted(
            set(self.settings.expect) - {self.name} - set(self._roster.all_online())
        ):
            if time.monotonic() > deadline:
                raise PeerError(
                    f"peer {self.name}: {', '.join(missing)} did not come online within "
                    f"{self.settings.start_timeout:g} s; start them, or raise start_timeout"
                )
            await self._next_turn()
        if not self.settings.expect:
            await asyncio.sleep(10 * self.settings.tick)  # let retained cards arrive
        self._refuse_mismatch()
        if not self._engine.restored:
            newcomer = self.settings.founder is False or (
                self.settings.founder is None
                and any(status.phase != "starting" for status in self._roster.online().values())
            )
            await self._worker.run(self._engine.found, newcomer)
            if newcomer:
                _log.info("peer %s joins as a newcomer", self.name)

    async def _refuse_taken_name(self, deadline: float) -> None:
        """Wait for our own birth to come back; anything else under our name must go away first."""
        grace = min(deadline, time.monotonic() + 5)
        while True:
            status = self._own_status
            if status is not None and status.session == self._engine.session:
                return
            if time.monotonic() > grace:
                if status is not None and status.state == "online":
                    raise PeerError(
                        f"peer {self.name}: the name is already online in swarm {self.settings.swarm!r} "
                        f"(session {status.session}); choose another name, or stop the other one"
                    )
                return
            if status is None or status.state != "online":
                await self._birth()
            await asyncio.sleep(0.1)

    def _refuse_mismatch(self) -> None:
        """Of two peers that cannot average a model, the one that came later gives up."""
        for (other, vector), difference in self._roster.mismatches.items():
            card = self._roster.all_online().get(other, (None, None))[0]
            if card is not None and (card.since, other) < (self._since, self.name):
                raise PeerError(
                    f"peer {self.name}: model {vector!r} is not the same as on peer {other}: {difference}"
                )

    async def _finish(self) -> None:
        """After training: agree with the neighbours, then wait for what is on its way."""
        if self.settings.mode == "async" and self._engine.shared():
            await self._enter("settling")
            await self._settle(self._agreed)
            test = await self._worker.run(self.learner.test)
            self._accuracy = test.accuracy
            await self._publish_record({"accuracy": test.accuracy, "loss": test.mean_loss})
            await self._enter("done")
            await self._settle(self._all_done)  # others may still need our values to agree
        await self._enter("done")
        deadline = time.monotonic() + self.settings.settle_timeout
        while await self._open() or not await self._all_done():
            if time.monotonic() > deadline:
                open_ = await self._open()
                _log.warning("peer %s: leaves with %d transfers open", self.name, open_)
                return
            await self._next_turn()

    async def _settle(self, reached: Callable[[], Awaitable[bool]]) -> None:
        """Push without training until `reached`, or until it takes too long."""
        deadline = time.monotonic() + self.settings.settle_timeout
        while not self._leave.is_set() and not await reached():
            if time.monotonic() > deadline:
                _log.warning("peer %s: stopped settling after a while", self.name)
                return
            await self._worker.run(self._engine.request_push)
            self._wake.set()
            await self._next_turn()
            # Those who still train have better things to do than to hear from us all the time.
            busy = any(s.phase in ("starting", "training") for s in self._roster.online().values())
            await asyncio.sleep(10 * self.settings.tick if busy else self.settings.tick / 5)

    async def _agreed(self) -> bool:
        others = self._roster.online().values()
        return all(status.phase in ("settling", "done") for status in others) and (
            not others
            or await self._worker.run(self._engine.agrees, self.settings.settle_tolerance)
        )

    async def _all_done(self) -> bool:
        return all(status.phase == "done" for status in self._roster.online().values())

    async def _open(self) -> int:
        return await self._worker.run(lambda: len(self._engine.gossiper.ledger.open))

    async def _hand_over(self) -> None:
        """Give all mass to neighbours before leaving."""
        await self._worker.run(self._engine.gossiper.hand_over, time.monotonic())
        deadline = time.monotonic() + self.settings.leave_timeout
        while not await self._worker.run(self._engine.handed_over):
            if time.monotonic() > deadline:
                _log.warning("peer %s: leaves with mass that nobody took in time", self.name)
                return
            self._wake.set()
            await self._next_turn()

    async def _say_goodbye(self) -> None:
        statement = await self._worker.run(self._engine.close)
        reason = self._leave_reason or "its training is over"
        goodbye = Status("left", self._engine.session, self._phase, reason, statement)
        try:
            async with asyncio.timeout(self.settings.leave_timeout):
                await self._transport.publish(self._topic("card"), b"", retain=True)
                await self._transport.publish(self._topic("status"), goodbye.encode(), retain=True)
        except TimeoutError:
            _log.warning("peer %s: the broker did not take its goodbye", self.name)

    # --- small things ---------------------------------------------------------------------------

    async def _birth(self) -> None:
        """Publish card and status; runs again after every reconnection."""
        if self._own_status is not None and self._phase == "starting":
            other = self._own_status
            if other.state == "online" and other.session != self._engine.session:
                return  # do not overwrite the one who has the name
        card = Card(self._engine.session, self._since, self._samples, self._vectors)
        await self._transport.publish(self._topic("card"), card.encode(), retain=True)
        await self._publish_status()

    async def _publish_status(self) -> None:
        status = Status("online", self._engine.session, self._phase)
        await self._transport.publish(self._topic("status"), status.encode(), retain=True)

    async def _enter(self, phase: Phase) -> None:
        self._phase = phase
        await self._publish_status()

    async def _publish_record(self, values: Record) -> None:
        record = {
            "peer": self.name,
            "session": self._engine.session,
            "time": time.time(),
            "round": self._engine.round,
            "phase": self._phase,
            **values,
            "disagreement": await self._worker.run(self._engine.disagreement),
            "received": self._engine.received,
            "packets": self._sent[0],
            "bytes": self._sent[1],
            "neighbours": len(self._roster.online()),
        }
        self._on_record(record)
        await self._transport.publish(self._topic("metrics"), json.dumps(record).encode())

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not await self._worker.run(condition):
            await self._next_turn()

    async def _next_turn(self) -> None:
        async with self._turned:
            await self._turned.wait()

    def _topic(self, kind: topics.Kind) -> str:
        return str(topics.Topic(self.settings.swarm, self.name, kind))


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """The first single error of a group: tasks fail one at a time, the others are then cancelled."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(str(error))
