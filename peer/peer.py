"""A running peer: presence, gossip, training and metrics as tasks of one event loop.

    peer = Peer("anna", learner, Settings(swarm="garden"), connect("mqtt://localhost"))
    await peer.run()

The event loop only moves bytes; all that touches the network runs on the peer's own thread. How a peer
comes in is in joining, its mail in mail, how it goes in ending; what they share is a Membership.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..gossip import topics
from ..gossip.transport import Hook, Transport, Will
from ..gossip.wire import SchemaEntry
from ..models import Learner
from . import mail
from .credentials import Credentials, begin_trust
from .ending import HAND_OVER_SHARE, Settling, hand_over, say_goodbye
from .engine import Engine
from .errors import NotSaved, PeerError
from .joining import join
from .machine import Machine, RealMachine
from .membership import LeaseOver, Membership, Record
from .presence import Status
from .settings import Settings
from .worker import Worker

_log = logging.getLogger(__name__)

PROGRESS = 10.0
"""Seconds between two log lines about a peer's progress, at the least."""

__all__ = ["Connect", "Peer", "Record", "Report"]


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
    privacy: dict[str, float]
    """With differential privacy: epsilon, delta, and the releases that it is made of."""
    compression: dict[str, dict[str, float]]
    """Per vector that was compressed or whose pushes were skipped: messages, bytes, distortion."""


class Peer:
    """One member of a swarm.

    name: unique in the swarm; two peers of one name would take each other's mail. With trust, the
        label of the peer's key; the attribute `name` is then the whole one, `label@id`.
    learner: what trains the peer's network; see gossamer.models.Learner.
    connect: makes the transport.
    samples: how much the peer counts with `weigh = "samples"`.
    checkpoint: a file to survive crashes with. A peer started with the checkpoint of its former life
        goes on where that stopped; without one a crash loses the mass that the peer held. Once it
        said goodbye it keeps what it learnt, and brings new weight in a new session. The file is
        locked while the peer runs.
    machine: clocks, files and a thread; by default those of this machine.
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
        machine: Machine | None = None,
        on_record: Callable[[Record], None] = lambda _: None,
    ):
        topics.check_name("peer", name)
        topics.check_name("swarm", settings.swarm)
        self._credentials = Credentials.load(name, settings)
        self.name = name if self._credentials is None else self._credentials.identity.name
        self.learner, self.settings = learner, settings
        self._connect, self._samples, self._seed = connect, samples, seed
        self._checkpoint, self._on_record = checkpoint, on_record
        self._machine = machine or RealMachine()
        self._leave = asyncio.Event()
        self._leave_reason = ""
        self._accuracy = float("nan")
        self._told = 0.0
        self._member: Membership | None = None

    def leave(self, reason: str = "asked to leave") -> None:
        """Ask the peer to hand over its mass and go.

        `run` returns when it has, or when `leave_timeout` is over; a stretch of training that has
        begun is finished first.
        """
        self._leave_reason = self._leave_reason or reason
        self._leave.set()

    async def run(self) -> Report:
        """Join the swarm, train and gossip to the end, and leave. PeerError says what went wrong."""
        async with self._machine.worker(self.name) as worker:
            if self._checkpoint is None:
                return await self._run(worker)
            lock = self._machine.files.lock(self._checkpoint)
            await worker.run(lock.acquire)
            try:
                return await self._run(worker)
            finally:
                await worker.run(lock.release)

    async def _run(self, worker: Worker) -> Report:
        """One session after the other, until one ends well."""
        engine = await worker.run(
            Engine, self.name, self.learner, self.settings,
            samples=self._samples, checkpoint=self._checkpoint, seed=self._seed,
            machine=self._machine,
        )  # fmt: skip
        vectors = {vector: engine.store.entries(vector) for vector in engine.schemas}
        while True:
            try:
                return await self._session(engine, worker, vectors)
            except LeaseOver as over:
                _log.warning("peer %s %s: it returns as a newcomer", self.name, over)
                await worker.run(engine.renew, str(over))

    async def _session(
        self, engine: Engine, worker: Worker, vectors: dict[str, list[SchemaEntry]]
    ) -> Report:
        """Live one session, from its connection to its goodbye."""
        self._member = member = Membership(
            self.name, self.settings, engine, worker, vectors,
            samples=self._samples, machine=self._machine, on_record=self._on_record,
        )  # fmt: skip
        member.trust = begin_trust(
            self._credentials, self.name, self.settings,
            session=member.session, since=member.since, models=engine.schemas, memory=engine.memory(),
            machine=self._machine,
        )  # fmt: skip
        await worker.run(engine.set_trust, member.trust)
        will = Status("offline", member.session, reason="connection lost")
        member.transport = self._connect(
            f"{self.name}-{member.session}",
            Will(member.topic("status"), member.trust.will(will.encode())),
            member.birth,
        )
        async with member.transport as transport:
            try:
                for pattern in (
                    topics.every(self.settings.swarm, "card"),
                    topics.every(self.settings.swarm, "status"),
                    topics.inboxes(self.settings.swarm, self.name),
                    *member.trust.patterns(),
                ):
                    await transport.subscribe(pattern)
                return await self._live(member)
            except BaseException as error:
                if member.born:
                    await self._end_badly(member, error)
                raise

    async def _end_badly(self, member: Membership, error: BaseException) -> None:
        """Say goodbye if this peer cannot take part; else let the last will speak, as for the dead."""
        if isinstance(error, PeerError) and not isinstance(error, NotSaved):
            try:
                await say_goodbye(member, str(error), self.settings.leave_timeout)
            except NotSaved as too:
                _log.warning("%s", too)
            else:
                return
        await member.transport.abort()

    async def _live(self, member: Membership) -> Report:
        """Run the peer's tasks until the learning task is through, then say goodbye."""
        jobs = {
            "receive": mail.receive(member),
            "gossip": mail.gossip(member),
            "lease": member.keep_in_touch(),
            "status": member.keep_status(),
            "card": member.keep_card(),
        }
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(job, name=f"{self.name} {what}") for what, job in jobs.items()
                ]
                learn = group.create_task(self._learn_or_leave(member), name=f"{self.name} learn")
                stayed = await learn
                for task in background:
                    task.cancel()
        except* Exception as errors:
            raise _first(errors) from None
        if member.born:
            within = self.settings.leave_timeout * (1.0 if stayed else 1.0 - HAND_OVER_SHARE)
            await say_goodbye(member, self._leave_reason or "its training is over", within)
        return await self._report(member)

    async def _learn_or_leave(self, member: Membership) -> bool:
        """Learn to the end, True; or, once asked to leave, stop wherever we are and hand over."""
        work = asyncio.ensure_future(self._learn(member))
        asked = asyncio.ensure_future(self._leave.wait())
        try:
            await asyncio.wait((work, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            if not work.done():
                if self._leave.is_set():
                    member.depart()  # now: a stretch of training that has begun is finished first
                work.cancel()
                await asyncio.wait((work,))
        if not work.cancelled():
            work.result()
            return True
        _log.info("peer %s is about to leave: %s", self.name, self._leave_reason)
        if member.born:
            await hand_over(member)
        return False

    async def _learn(self, member: Membership) -> None:
        """Train and average, round after round, then settle."""
        engine, run = member.engine, member.worker.run
        own = None
        if self.settings.trained and not engine.lived:
            own = await run(self.learner.test)  # what it knew before it heard of the others
        await join(member)
        if engine.round:
            _log.info(
                "peer %s goes on after round %d of %d",
                self.name,
                engine.round,
                self.settings.rounds,
            )
        member.enter("training")
        await member.until_averaged()  # a round that a crash interrupted
        if own is not None:
            await member.publish_record({"own_accuracy": own.accuracy})
        while engine.round < self.settings.rounds:
            training = await run(engine.train)
            member.wake()
            await member.next_turn()  # pushes leave, and what arrived meanwhile comes in
            await member.until_averaged()
            number = engine.round
            if number % self.settings.test_every == 0 or number == self.settings.rounds:
                await self._test(member)
            else:
                await member.publish_record({"training_loss": training.mean_loss})
        if busy := _still_learning(member):
            _log.info(
                "peer %s has trained all its rounds; it stays until these are through: %s",
                self.name, ", ".join(busy),
            )  # fmt: skip
        await Settling(member, self.learner, self._note).finish()

    async def _test(self, member: Membership) -> None:
        test = await member.worker.run(self.learner.test)
        self._note(test.accuracy)
        number, last = member.engine.round, self.settings.rounds
        if number == last or self._machine.monotonic() >= self._told + PROGRESS:
            self._told = self._machine.monotonic()
            _log.info(
                "peer %s: round %d of %d, accuracy %.3f", self.name, number, last, test.accuracy
            )
        await member.publish_record({"accuracy": test.accuracy, "loss": test.mean_loss})

    def _note(self, accuracy: float) -> None:
        self._accuracy = accuracy

    async def _report(self, member: Membership) -> Report:
        report = await member.worker.run(member.engine.report)
        counters = member.transport.counters
        losses = {**report["dropped"], **counters}
        if losses:
            counted = ", ".join(f"{cause} {count}" for cause, count in sorted(losses.items()))
            _log.info("peer %s counted in this life: %s", self.name, counted)
        return Report(
            peer=self.name,
            session=member.session,
            rounds=member.engine.round,
            accuracy=self._accuracy,
            transport=dict(counters),
            **report,
        )


def _still_learning(member: Membership) -> list[str]:
    """The others that have training before them, whether they are there or expected back."""
    others = member.roster.online().items()
    busy = {peer for peer, status in others if status.phase in ("starting", "training")}
    return sorted(busy | set(member.roster.awaited()))


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """The first single error of a group: tasks fail one at a time, the others are then cancelled."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(str(error))
