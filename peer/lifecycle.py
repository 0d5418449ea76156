"""A running peer: its life as a table of states and events, and what it does in each state.

    peer = Peer("anna", learner, Settings(swarm="garden"), connect("mqtt://localhost"))
    await peer.run()

Presence, gossip, training and metrics are tasks of one event loop. Two objects hold what a session knows: the
Link belongs to the event loop, the Engine to the peer's own thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from ..gossip import Hook, Transport, TransportError, Will, topics
from ..models import Learner, Metrics
from .engine import Engine
from .exits import NotHandedIn, NotSaved, PeerError, Replaced, first_error
from .link import Link, Record, SessionOver
from .machine import Machine, Worker
from .membership import (
    HAND_OVER_SHARE,
    Credentials,
    Settling,
    claim_name,
    deliver_goodbye,
    goodbye_of,
    hand_over,
    make_security,
    wait_for_others,
)
from .presence import Phase, Status
from .settings import Limits, Settings

_log = logging.getLogger(__name__)


class State(Enum):
    """Where a session stands."""

    CONNECTING = auto()
    """Reaching the broker; nobody knows of this session yet."""
    CLAIMING = auto()
    """Making sure that the name is free."""
    WAITING = auto()
    """In the swarm; waiting for expected peers, and to count."""
    TRAINING = auto()
    AVERAGING = auto()
    SETTLING = auto()
    """All rounds are trained; gossip goes on until the peer agrees with its neighbours."""
    DONE = auto()
    """Agreed; others may not have."""
    HANDING_OVER = auto()
    """Asked to leave early: all mass goes to neighbours that stay."""
    LEAVING = auto()
    """The ending is written down; the goodbye is on its way."""
    CLOSED = auto()
    """The goodbye was taken."""
    UNTOLD = auto()
    """No broker took the goodbye; it stays in the checkpoint for the next start."""
    ABANDONED = auto()
    """The others have given this session up; another one follows."""
    ABORTED = auto()
    """Ended without a goodbye: the last will speaks."""


class Event(Enum):
    """What happened to a session."""

    CONNECTED = auto()
    ENDING_FOUND = auto()
    """The checkpoint holds an ending that was begun."""
    NAME_FREE = auto()
    STARTED = auto()
    TRAINED = auto()
    AVERAGED = auto()
    ROUNDS_OVER = auto()
    AGREED = auto()
    LOST_AGREEMENT = auto()
    ALL_DONE = auto()
    ASKED_TO_LEAVE = auto()
    HANDED_OVER = auto()
    GOODBYE_TAKEN = auto()
    GOODBYE_LOST = auto()
    SESSION_OVER = auto()
    """The lease is over, or neighbours or an operator have given the session up."""
    ERROR = auto()
    """Something that waiting does not cure."""
    ABORT = auto()
    """Nothing may be said any more: the checkpoint cannot be written, or the name is another device's."""


_S, _E = State, Event
_RUNNING: Final = (_S.WAITING, _S.TRAINING, _S.AVERAGING, _S.SETTLING, _S.DONE)

TABLE: Final[dict[tuple[State, Event], State]] = {
    (_S.CONNECTING, _E.CONNECTED): _S.CLAIMING,
    (_S.CONNECTING, _E.ENDING_FOUND): _S.LEAVING,
    (_S.CLAIMING, _E.NAME_FREE): _S.WAITING,
    (_S.WAITING, _E.STARTED): _S.AVERAGING,  # a round that a crash interrupted is averaged first
    (_S.AVERAGING, _E.AVERAGED): _S.TRAINING,
    (_S.AVERAGING, _E.ROUNDS_OVER): _S.SETTLING,
    (_S.TRAINING, _E.TRAINED): _S.AVERAGING,
    (_S.SETTLING, _E.AGREED): _S.DONE,
    (_S.DONE, _E.LOST_AGREEMENT): _S.SETTLING,
    (_S.DONE, _E.ALL_DONE): _S.LEAVING,
    **{(state, _E.ASKED_TO_LEAVE): _S.HANDING_OVER for state in _RUNNING},
    (_S.CLAIMING, _E.ASKED_TO_LEAVE): _S.ABORTED,  # nobody knows of it: nothing to hand over
    (_S.CONNECTING, _E.ASKED_TO_LEAVE): _S.ABORTED,
    (_S.HANDING_OVER, _E.HANDED_OVER): _S.LEAVING,
    **{
        (state, _E.SESSION_OVER): _S.ABANDONED
        for state in (_S.CLAIMING, *_RUNNING, _S.HANDING_OVER, _S.LEAVING)
    },
    # LEAVING too: a task beside the work may fail in the very moment in which the work is done.
    **{(state, _E.ERROR): _S.LEAVING for state in (*_RUNNING, _S.HANDING_OVER, _S.LEAVING)},
    (_S.CONNECTING, _E.ERROR): _S.ABORTED,
    (_S.CLAIMING, _E.ERROR): _S.ABORTED,  # the others do not know of this session
    **{(state, _E.ABORT): _S.ABORTED for state in _S},
    (_S.LEAVING, _E.GOODBYE_TAKEN): _S.CLOSED,
    (_S.LEAVING, _E.GOODBYE_LOST): _S.UNTOLD,
}

FINAL: Final = frozenset({_S.CLOSED, _S.UNTOLD, _S.ABANDONED, _S.ABORTED})

PHASES: Final[dict[State, Phase]] = {
    _S.WAITING: "starting",
    _S.TRAINING: "training",
    _S.AVERAGING: "training",
    _S.SETTLING: "settling",
    _S.DONE: "done",
}
"""What others are told of a state; states that are not here leave the phase as it was."""


class Lifecycle:
    """Where one session stands."""

    def __init__(self) -> None:
        self.state = State.CONNECTING

    def fire(self, event: Event) -> State:
        """Move on; an event that the table does not know in this state is a mistake of ours."""
        following = TABLE.get((self.state, event))
        if following is None:
            raise RuntimeError(f"a peer cannot {event.name} while {self.state.name}")
        self.state = following
        return following


PROGRESS = 10.0
"""Seconds between two log lines about a peer's progress, at the least."""


class Connect(Protocol):
    """Makes a peer's transport: `lambda client_id, will, on_connect: MqttTransport(url, …)`."""

    def __call__(self, client_id: str, will: Will, on_connect: Hook) -> Transport:
        """Return a transport that is not connected yet."""
        ...


@dataclass(frozen=True)
class Report:
    """What a session leaves behind: its last test, its accounts and its counters."""

    peer: str
    session: str
    rounds: int
    accuracy: float
    ended: str
    """finished: all rounds were trained. left: asked to leave early. failed: could not take part."""
    reason: str
    weight: dict[str, list[int]]
    """Per partial model: held, in open transfers, injected."""
    open: list[list[Any]]
    """Transfers whose fate is not known: receiver, its session, partial model, sequence, weight."""
    reclaimed: list[list[Any]]
    """Transfers that were taken back without their receivers' word, in the same form."""
    abandoned: list[dict[str, Any]]
    """Former sessions of this peer that have no report of their own: session, reason, and accounts."""
    members: dict[str, list[int]]
    """Per shared partial model: members whose weight counts, and members, as far as this peer knew."""
    gossip: dict[str, int]
    dropped: dict[str, int]
    transport: dict[str, int]
    privacy: dict[str, float]
    """With differential privacy: epsilon, delta, and the releases that it is made of."""
    compression: dict[str, dict[str, float]]
    """Per partial model that was compressed or whose pushes were skipped: messages, bytes, distortion."""


@dataclass
class _Progress:
    """What a peer knows of its own training, over all sessions of one process."""

    accuracy: float = float("nan")
    told: float = float("-inf")
    own_accuracy: float | None = None
    tested_alone: bool = False


class Peer:
    """One member of a swarm.

    name: unique in the swarm; two peers of one name would take each other's mail. With trust, the
        label of the peer's key; the attribute `name` is then the whole one, `label@id`.
    learner: what trains the peer's network; see gossamer.models.Learner.
    connect: makes the transport.
    samples: how much the peer counts with `weights = "samples"`.
    checkpoint: a file to survive crashes with. A peer started with the checkpoint of a killed process
        goes on where that stopped, and finishes an ending that it had begun; without one a crash loses
        the mass that the peer held. A peer that left early keeps what it learnt there, and brings new
        weight in a new session. The file is locked while the peer runs.
    machine: clocks, files and a thread; by default those of this machine.
    limits: times and sizes that users do not set.
    on_record: called with every metrics record, which is also published.
    on_report: called, on the peer's own thread, with the report of a session that has ended, before its
        checkpoint is removed: write down here what the peer takes home. May be called again with the same
        report after a crash.
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
        limits: Limits | None = None,
        on_record: Callable[[Record], None] = lambda _: None,
        on_report: Callable[[Report], None] = lambda _: None,
    ):
        topics.check_name("peer", name)
        topics.check_name("swarm", settings.swarm)
        self._credentials = Credentials.load(name, settings)
        self.name = name if self._credentials is None else self._credentials.identity.name
        self.learner, self.settings, self._machine = learner, settings, machine or Machine()
        self._connect, self._on_record, self._on_report = connect, on_record, on_report
        self._checkpoint = checkpoint
        self._make_engine = partial(
            Engine, self.name, learner, settings,
            samples=samples, checkpoint=checkpoint, seed=seed, machine=self._machine, limits=limits,
        )  # fmt: skip
        self._leave = asyncio.Event()
        self._leave_reason = ""
        self._progress = _Progress()
        self.link: Link | None = None
        """The peer's present session, as the event loop sees it."""
        self._life = Lifecycle()

    @property
    def state(self) -> State:
        """Where the peer's present session stands."""
        return self._life.state

    def leave(self, reason: str = "asked to leave") -> None:
        """Ask the peer to hand over its mass and go.

        `run` returns when it has, or when `leave_timeout` is over; a round of training that has
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
        """Live one session after the other, until one ends well."""
        engine = await worker.run(self._make_engine)
        while True:
            try:
                return await self._live(engine, worker)
            except SessionOver as over:
                _log.warning("peer %s: %s; rejoining with a new session", self.name, over)
                await worker.run(engine.start_new_session, str(over))

    async def _live(self, engine: Engine, worker: Worker) -> Report:
        """Live one session, from its connection to its goodbye."""
        link = Link(engine, worker, on_record=self._on_record)
        link.security = make_security(self._credentials, link)
        await worker.run(engine.set_security, link.security)
        if engine.ending is None:
            await worker.run(engine.record_session)
            await link.save()
        self.link, self._life, self._settling = link, Lifecycle(), Settling(link)
        self._training: Metrics | None = None
        """What the last round of this session was trained to; None before the first."""
        will = Status("offline", link.session, reason="connection lost", generation=link.generation)
        link.transport = self._connect(
            f"{self.name}-{link.session}",
            Will(link.topic("status"), link.security.will(will.encode())),
            link.announce,
        )
        report = await self._connected_life(link)
        if engine.ending is not None:
            # Not before the connection was closed: a process that is killed until then leaves its last will
            # behind its goodbye, and must be able to say goodbye once more.
            await worker.run(engine.finish)
        return report

    async def _connected_life(self, link: Link) -> Report:
        """Live a session for as long as it is connected."""
        connected = False
        try:
            async with link.transport as transport:
                connected = True
                try:
                    for kind in ("card", "status", "death"):
                        await transport.subscribe(topics.every(self.settings.swarm, kind))
                    inboxes = topics.inboxes(self.settings.swarm, self.name)
                    for pattern in (inboxes, *link.security.patterns()):
                        await transport.subscribe(pattern)
                    return await self._through(link)
                except BaseException as error:
                    if self.state not in FINAL:
                        self._life.fire(Event.ABORT)
                    # Else nobody knows of this session, or has heard its goodbye, or the name is another's.
                    if link.joined and not isinstance(error, Replaced):
                        await transport.abort()  # the last will speaks
                    raise
        except TransportError as error:
            if connected or link.engine.ending is None:
                raise
            # Only a goodbye is left to say: a broker that is away is not the end of it.
            raise self._not_handed_in(str(error)) from None

    async def _through(self, link: Link) -> Report:
        """Go from state to state to the end of the session."""
        life = self._life
        failure: PeerError | None = None
        if link.engine.ending is not None:
            life.fire(Event.ENDING_FOUND)
            _log.info("peer %s: finishes the ending that was begun before", self.name)
        else:
            life.fire(Event.CONNECTED)
            try:
                await self._take_part(link)
            except SessionOver:
                life.fire(Event.SESSION_OVER)
                raise
            except (NotSaved, Replaced):
                raise
            except PeerError as error:
                failure = error
                life.fire(Event.ERROR)
        if life.state is State.ABORTED:
            if failure is not None:
                raise failure
            # Nobody ever heard of this session.
            engine, own = await link.worker.run(link.engine.report), self._own_part(link)
            return Report(**engine, **own, ended="left", reason=self._leave_reason)
        return await self._end(link, failure)

    async def _take_part(self, link: Link) -> None:
        """Run the session's tasks until its state is LEAVING or final."""
        jobs = {
            "receive": link.receive(),
            "gossip": link.gossip(),
            "lease": link.renew_lease(),
            "status": link.keep_status(),
            "card": link.keep_card(),
        }
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(job, name=f"{self.name} {what}") for what, job in jobs.items()
                ]
                while self.state is not State.LEAVING and self.state not in FINAL:
                    self._life.fire(await self._next_event(link))
                    phase = PHASES.get(self.state)
                    if phase is not None and phase != link.phase:
                        link.enter_phase(phase)
                for task in background:
                    task.cancel()
        except* Exception as errors:
            # Where nobody knows of the session any more, nobody cares what its tasks met.
            if self.state not in FINAL:
                raise first_error(errors) from None

    async def _next_event(self, link: Link) -> Event:
        """Do what is to be done in the present state, unless the peer is asked to leave."""
        handlers: dict[State, Callable[[Link], Awaitable[Event]]] = {
            State.CLAIMING: self._claim,
            State.WAITING: self._wait,
            State.TRAINING: self._train,
            State.AVERAGING: self._average,
            State.SETTLING: self._settle,
            State.DONE: self._stay,
        }
        state = self.state
        if state is State.HANDING_OVER:
            return await self._hand_over(link)
        work = asyncio.ensure_future(handlers[state](link))
        asked = asyncio.ensure_future(self._leave.wait())
        try:
            await asyncio.wait((work, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            if not work.done():
                if self._leave.is_set():
                    link.announce_leaving()  # now: a round of training that has begun is finished first
                work.cancel()
                await asyncio.wait((work,))
        if not work.cancelled():
            return work.result()
        _log.info("peer %s is about to leave: %s", self.name, self._leave_reason)
        return Event.ASKED_TO_LEAVE

    # --- what is done in each state -------------------------------------------------------------

    async def _claim(self, link: Link) -> Event:
        progress, engine = self._progress, link.engine
        if self.settings.trained and not engine.returning and progress.own_accuracy is None:
            # What it knew before it heard of the others.
            progress.own_accuracy = (await link.worker.run(self.learner.test)).accuracy
        await claim_name(link, engine.undelivered_ending)
        if engine.must_leave:
            self.leave("it was asked to leave before it was interrupted")
        return Event.NAME_FREE

    async def _wait(self, link: Link) -> Event:
        progress = self._progress
        await wait_for_others(link)
        if link.view.round:
            _log.info(
                "peer %s goes on after round %d of %d",
                self.name, link.view.round, self.settings.rounds,
            )  # fmt: skip
        link.enter_phase("training")
        if progress.own_accuracy is not None and not progress.tested_alone:
            progress.tested_alone = True
            await link.publish_record({"own_accuracy": progress.own_accuracy})
        return Event.STARTED

    async def _train(self, link: Link) -> Event:
        self._training = await link.worker.run(link.engine.train)
        link.wake()
        await link.next_turn()  # pushes leave, and what arrived meanwhile comes in
        return Event.TRAINED

    async def _average(self, link: Link) -> Event:
        while not link.view.averaged:
            await link.next_turn()
        number, last, training = link.view.round, self.settings.rounds, self._training
        if training is None:
            pass  # a crash interrupted the round, and nothing was trained since
        elif number % self.settings.test_every == 0 or number == last:
            accuracy, now = await self._test(link), self._machine.monotonic()
            if number == last or now >= self._progress.told + PROGRESS:
                self._progress.told = now
                _log.info(
                    "peer %s: round %d of %d, accuracy %.3f", self.name, number, last, accuracy
                )
        else:
            await link.publish_record({"training_loss": training.mean_loss})
        if number < last:
            return Event.AVERAGED
        if busy := {*link.roster.still_training(), *link.roster.offline_unfinished()}:
            _log.info(
                "peer %s has trained all its rounds; it stays until these are through: %s",
                self.name, ", ".join(sorted(busy)),
            )  # fmt: skip
        return Event.ROUNDS_OVER

    async def _settle(self, link: Link) -> Event:
        if self._settles(link):
            await self._settling.settle()
        if link.view.waiting:  # nobody was heard for as long as it could wait
            await link.worker.run(link.engine.count_everywhere)
        return Event.AGREED

    async def _stay(self, link: Link) -> Event:
        settling = self._settling
        await settling.confirm_presence()
        if self._settles(link):
            if not await settling.stay():
                return Event.LOST_AGREEMENT
            await link.worker.run(link.engine.gossiper.close)
            link.announce_leaving()  # it gives and takes nothing any more: a newcomer need not wait for it
            await self._test(link)
        else:
            await link.publish_record({})  # or the last that a watcher hears of us is "training"
        await settling.drain()
        return Event.ALL_DONE

    async def _hand_over(self, link: Link) -> Event:
        link.announce_leaving()
        await hand_over(link)
        return Event.HANDED_OVER

    def _settles(self, link: Link) -> bool:
        return self.settings.mode == "async" and (
            link.view.has_neighbours or bool(link.view.waiting)
        )

    async def _test(self, link: Link) -> float:
        """Test the network and publish how good it is; returns its accuracy."""
        test = await link.worker.run(self.learner.test)
        self._progress.accuracy = test.accuracy
        await link.publish_record({"accuracy": test.accuracy, "loss": test.mean_loss})
        return test.accuracy

    # --- the end --------------------------------------------------------------------------------

    async def _end(self, link: Link, failure: PeerError | None) -> Report:
        """Write the ending down, tell the others, and leave the report behind."""
        engine, run = link.engine, link.worker.run
        asked = self._leave.is_set() and failure is None
        if engine.ending is None:
            # Whoever is back in a new session has trained its rounds, and may not count there yet.
            unfinished = link.view.round < self.settings.rounds or bool(link.view.waiting)
            early = asked and unfinished
            kind = "failed" if failure is not None else "left" if early else "finished"
            reason = str(failure) if failure else self._leave_reason or "its training is over"
            own, events = self._own_part(link), link.take_events()
            await run(engine.end, kind, reason, link.phase, own, events)
            await link.save()
        ending = engine.ending
        assert ending is not None
        within = self.settings.leave_timeout * (1.0 - HAND_OVER_SHARE if asked else 1.0)
        why, earlier = await deliver_goodbye(link, goodbye_of(ending, link.generation), within)
        # Once it was taken, others have acted on it: what they said since does not change it any more.
        if not ending.told and await run(engine.amend, earlier):
            await link.save()
            ending = engine.ending
            assert ending is not None
            why, _ = await deliver_goodbye(link, goodbye_of(ending, link.generation), within)
        if why:
            self._life.fire(Event.GOODBYE_LOST)
            _log.warning(
                "peer %s left swarm %s: %s; the broker did not take its goodbye within %g s (%s)",
                self.name, self.settings.swarm, ending.reason, within, why,
            )  # fmt: skip
            if failure is not None:
                raise failure
            if self._checkpoint is not None:
                raise self._not_handed_in(why)
        else:
            self._life.fire(Event.GOODBYE_TAKEN)
            _log.info("peer %s left swarm %s: %s", self.name, self.settings.swarm, ending.reason)
            await run(engine.confirm_goodbye)
            await link.save()  # before the report: a restart must write the same one
        if failure is not None:
            raise failure
        report = Report(**ending.report)
        if losses := {**report.dropped, **report.transport}:
            counted = ", ".join(f"{cause} {count}" for cause, count in sorted(losses.items()))
            _log.info("peer %s counted in this session: %s", self.name, counted)
        await run(self._on_report, report)
        return report

    def _own_part(self, link: Link) -> dict[str, Any]:
        """Return what the event loop adds to a report."""
        return {
            "accuracy": self._progress.accuracy,
            "members": link.members(),
            "transport": dict(link.transport.counters + link.dropped),
        }

    def _not_handed_in(self, why: str) -> NotHandedIn:
        return NotHandedIn(
            f"peer {self.name}: no broker took its goodbye ({why}); {self._checkpoint} keeps it: start the "
            "peer again to hand it in"
        )
