"""A running peer: presence, gossip, training and metrics as tasks of one event loop.

    peer = Peer("anna", learner, Settings(swarm="garden"), connect("mqtt://localhost"))
    await peer.run()

The event loop only moves bytes; all that touches the network runs on the peer's own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
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

NAME_GRACE = 5.0
"""Seconds that a name may stay online under another session before a peer gives it up."""

MAX_PACKET = 4 << 20
"""Bytes of the largest packet, if the broker takes it. Cutting a message costs a checksum and a copy on
either side; lower this when large packets hold up other traffic on a slow link."""

Record = dict[str, Any]


class _LeaseOver(Exception):
    """Out of touch for so long that the others have given this session up."""


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
        self._contradict = asyncio.Event()
        self._leave_reason = ""
        self._phase: Phase = "starting"
        self._own_status: Status | None = None
        self._asked = asyncio.Event()
        self._born = False
        self._in_touch = 0.0
        self._sent = [0, 0]
        self._accuracy = float("nan")
        self._since = time.time()

    def leave(self, reason: str = "asked to leave") -> None:
        """Ask the peer to hand over its mass and go; `run` returns when it has."""
        self._leave_reason = reason
        self._leave.set()

    async def run(self) -> Report:
        """Join the swarm, train and gossip to the end, and leave. PeerError says what went wrong."""
        async with Worker(self.name) as worker:
            self._worker = worker
            self._engine = await worker.run(
                Engine, self.name, self.learner, self.settings,
                samples=self._samples, checkpoint=self._checkpoint, seed=self._seed,
            )  # fmt: skip
            self._vectors = {
                v: schema_entries(self._engine.network, v) for v in self._engine.schemas
            }
            while True:
                try:
                    return await self._join()
                except _LeaseOver:
                    _log.warning(
                        "peer %s was out of touch for longer than its lease: it returns as a newcomer",
                        self.name,
                    )
                    await worker.run(self._engine.renew)

    async def _join(self) -> Report:
        """Live one session, from its connection to its goodbye."""
        session = self._engine.session
        self._roster = Roster(
            self.name, self._vectors,
            neighbours=self.settings.neighbours, lease=self.settings.lease,
        )  # fmt: skip
        self._roster.remember(self._engine.gossiper.known_sessions(), time.monotonic())
        self._pending, self._events, self._own_status = [], [], None
        self._asked.clear()
        self._born, self._phase = False, "starting"
        self._in_touch, self._since = _clock(), time.time()
        will = Status("offline", session, reason="connection lost")
        self._transport = self._connect(
            f"{self.name}-{session}", Will(self._topic("status"), will.encode()), self._birth
        )
        async with self._transport as transport:
            try:
                for pattern in (
                    topics.every(self.settings.swarm, "card"),
                    topics.every(self.settings.swarm, "status"),
                    topics.inboxes(self.settings.swarm, self.name),
                ):
                    await transport.subscribe(pattern)
                return await self._live(transport)
            except PeerError as error:
                self._leave_reason = str(error)
                if self._born:
                    await self._say_goodbye()
                raise
            except BaseException:
                if self._born:
                    await transport.abort()  # nobody said goodbye, so let the last will speak
                raise

    async def _live(self, transport: Transport) -> Report:
        """Run the peer's tasks until the learning task is through."""
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(self._receive(transport), name=f"{self.name} receive"),
                    group.create_task(self._gossip(transport), name=f"{self.name} gossip"),
                    group.create_task(self._keep_in_touch(transport), name=f"{self.name} lease"),
                ]
                await group.create_task(self._learn(), name=f"{self.name} learn")
                for task in background:
                    task.cancel()
        except* Exception as errors:
            raise _first(errors) from None
        report = await self._worker.run(self._engine.report)
        losses = {**report["dropped"], **transport.counters}
        if losses:
            counted = ", ".join(f"{cause} {count}" for cause, count in sorted(losses.items()))
            _log.info("peer %s counted in this life: %s", self.name, counted)
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
            status = Status(table["state"], table["session"])
        except (ValueError, KeyError, TypeError):
            return
        own = status.session == self._engine.session
        if own:
            self._asked.set()
        if not (own and status.state == "offline"):  # our question, or our last will
            self._own_status = status
        if status.state == "online" and not own and self._born:
            _log.warning("peer %s: somebody else came online under this name", self.name)
        if status.state == "offline" and self._born:
            # A late last will of ours, or somebody who asks whether the name is free.
            self._contradict.set()

    # --- gossip ---------------------------------------------------------------------------------

    async def _gossip(self, transport: Transport) -> None:
        """Turn after turn: what arrived goes in, what is due goes out."""
        limit = min(transport.max_payload(self._topic("metrics")), MAX_PACKET)
        while True:
            try:
                async with asyncio.timeout(self.settings.tick):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            self._check_lease(transport)
            if self._contradict.is_set():
                self._contradict.clear()
                await self._publish_status()
            now = time.monotonic()
            events, self._events = [*self._events, *self._roster.tick(now)], []
            arrived, self._pending = self._pending, []
            outgoing = await self._worker.run(self._engine.turn, arrived, events, now, limit)
            await self._send(transport, outgoing)
            async with self._turned:
                self._turned.notify_all()

    async def _keep_in_touch(self, transport: Transport) -> None:
        """Note when we were last connected; a frozen process or a lost link leaves a gap."""
        while True:
            await asyncio.sleep(min(1.0, self.settings.lease / 8))
            self._check_lease(transport)
            if transport.connection.state == "connected":
                self._in_touch = _clock()

    def _check_lease(self, transport: Transport) -> None:
        if self._lease_over() and transport.connection.state == "connected":
            raise _LeaseOver

    def _lease_over(self) -> bool:
        return _clock() - self._in_touch > self.settings.lease

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
        await self._until(self._engine.averaged)  # a round that a crash interrupted
        while self._engine.round < self.settings.rounds and not self._leave.is_set():
            training = await self._worker.run(self._engine.train)
            self._wake.set()
            await self._next_turn()  # pushes leave, and what arrived meanwhile comes in
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
        await self._refuse_taken_name()
        self._refuse_late_comer()
        self._born = True
        await self._birth()
        _log.info(
            "peer %s joins swarm %s in session %s",
            self.name,
            self.settings.swarm,
            self._engine.session,
        )
        deadline = time.monotonic() + self.settings.start_timeout
        expected = set() if self._engine.lived else set(self.settings.expect) - {self.name}
        while missing := sorted(expected - set(self._roster.all_online())):
            if self._leave.is_set():
                return
            if time.monotonic() > deadline:
                raise PeerError(
                    f"peer {self.name}: {', '.join(missing)} did not come online within "
                    f"{self.settings.start_timeout:g} s; start them, or raise start_timeout"
                )
            await self._next_turn()
        if not expected:
            await asyncio.sleep(10 * self.settings.tick)  # let retained cards arrive
        self._refuse_mismatch()
        if not self._engine.restored:
            newcomer = (
                self._engine.lived
                or self.settings.founder is False
                or (self.settings.founder is None and self._others_train())
            )
            await self._worker.run(self._engine.found, newcomer)
            if newcomer:
                _log.info("peer %s joins as a newcomer", self.name)

    async def _refuse_taken_name(self) -> None:
        """Ask on our own status topic: what is retained there comes before our own question."""
        question = Status("offline", self._engine.session, reason="asks whether its name is free")
        grace = time.monotonic() + NAME_GRACE
        while True:
            await self._transport.publish(self._topic("status"), question.encode())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), max(0.0, grace - time.monotonic()))
            await asyncio.sleep(2 * self.settings.tick)  # its owner, if there is one, answers
            status = self._own_status
            if status is None or status.state != "online":
                return
            if status.session == self._engine.session:
                return  # our own former life, which the broker has not missed yet
            if time.monotonic() > grace:
                raise PeerError(
                    f"peer {self.name}: the name is already online in swarm {self.settings.swarm!r} "
                    f"(session {status.session}); choose another name, or stop the other one"
                )
            self._asked.clear()

    def _refuse_late_comer(self) -> None:
        if self.settings.mode == "async" or self._engine.restored or not self._others_train():
            return
        raise PeerError(
            f"peer {self.name}: swarm {self.settings.swarm!r} is already training in "
            f"{self.settings.mode} mode, which nobody can join midway; use async mode, or start together"
        )

    def _others_train(self) -> bool:
        return any(status.phase != "starting" for status in self._roster.online().values())

    def _refuse_mismatch(self) -> None:
        """Of two peers that cannot average a model, the one that came later gives up; where they
        expect each other, both do."""
        for (other, vector), difference in self._roster.mismatches.items():
            card = self._roster.all_online().get(other, (None, None))[0]
            came_first = card is not None and (card.since, other) < (self._since, self.name)
            if came_first or other in self.settings.expect:
                raise PeerError(
                    f"peer {self.name}: model {vector!r} is not the same as on peer {other}: {difference}"
                )

    async def _finish(self) -> None:
        """After training: agree with the neighbours, then wait for what is on its way."""
        if self.settings.mode == "async" and self._engine.shared():
            await self._agree()
            # Who no longer pushes must no longer absorb, or it drains the mass that others mix with.
            await self._worker.run(self._engine.gossiper.close)
            test = await self._worker.run(self.learner.test)
            self._accuracy = test.accuracy
            await self._publish_record({"accuracy": test.accuracy, "loss": test.mean_loss})
        await self._enter("done")
        deadline = time.monotonic() + self.settings.settle_timeout
        while await self._open() or not await self._all_done():
            if time.monotonic() > deadline:
                open_ = await self._open()
                _log.warning("peer %s: leaves with %d transfers open", self.name, open_)
                return
            await self._next_turn()

    async def _agree(self) -> None:
        """Push until we agree with what we hear and everybody else does too.

        A peer that agreed may be disturbed again, by mass that comes late (from one who was away, or
        taken back from one who died): then it takes back its "done", so that nobody leaves too early.
        """
        deadline = time.monotonic() + self.settings.settle_timeout
        while not self._leave.is_set():
            await self._enter("settling")
            await self._push_until(self._agreed, deadline)
            await self._enter("done")
            # Others may still need our values to agree.
            await self._push_until(self._all_done_or_disturbed, deadline)
            if time.monotonic() > deadline:
                _log.warning("peer %s: stopped settling after a while", self.name)
                return
            if not await self._disturbed():
                return

    async def _push_until(self, reached: Callable[[], Awaitable[bool]], deadline: float) -> None:
        """Push without training until `reached`, or until it takes too long."""
        while not self._leave.is_set() and not await reached() and time.monotonic() < deadline:
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

    async def _disturbed(self) -> bool:
        """Whether what we heard lately is farther from our values than agreement allows."""
        others = self._roster.online()
        tolerance = 3 * self.settings.settle_tolerance
        return bool(others) and not await self._worker.run(self._engine.agrees, tolerance)

    async def _all_done_or_disturbed(self) -> bool:
        return await self._all_done() or await self._disturbed()

    async def _all_done(self) -> bool:
        """Whether nobody is left to wait for; who is offline may come back, to finish its training."""
        everybody_here = all(s.phase == "done" for s in self._roster.online().values())
        return everybody_here and not self._roster.awaited()

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
        self._roster.reconnected(time.monotonic())
        if not self._born or self._lease_over():
            return  # the name may be somebody else's, or this session may be over
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


def _clock() -> float:
    """Seconds that go on while the device sleeps, unlike time.monotonic on Linux."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.time() if boot is None else time.clock_gettime(boot)


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """The first single error of a group: tasks fail one at a time, the others are then cancelled."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(str(error))
