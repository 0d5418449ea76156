"""A running peer: a state machine of its session, and what it does in each state.

    peer = Peer("anna", learner, Settings(swarm="garden"), mqtt_connect(BrokerAddress("mqtt://localhost")))
    await peer.run()

Presence, gossip, training and metrics are tasks of one event loop. Two objects hold a session's data: the
Link belongs to the event loop, the Engine to the peer's worker thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final, Protocol

from torch import Tensor

from ..gossip import Hook, Transport, TransportError, Will, end_task, topics
from ..models import (
    Callback,
    CallbackList,
    Gain,
    Learner,
    Metrics,
    ModelError,
    as_record,
    predicted_classes,
)
from ..models import Progress as TrainingProgress
from .engine import Engine
from .exits import GoodbyeNotDelivered, NotSaved, PeerError, Replaced, Revoked, first_error
from .link import Link, Record, SessionOver
from .machine import Machine, Worker, from_saved
from .membership import (
    HAND_OVER_SHARE,
    Credentials,
    Reminders,
    Settling,
    claim_name,
    deliver_goodbye,
    goodbye_of,
    hand_over,
    make_security,
    wait_for_others,
)
from .presence import Phase, Status
from .settings import FOREVER, Limits, Settings
from .store import NetworkCopy, NetworkFile

_log = logging.getLogger(__name__)


class State(Enum):
    """State of one session."""

    CONNECTING = auto()
    """Connecting to the broker; other peers cannot see this session yet."""
    CLAIMING = auto()
    """Checking that the name is free."""
    WAITING = auto()
    """Announced to the swarm; waiting for the expected peers, and until the peer's weight counts."""
    TRAINING = auto()
    AVERAGING = auto()
    SETTLING = auto()
    """All rounds are trained; gossip continues until the peer agrees with its neighbours."""
    DONE = auto()
    """The peer agrees with its neighbours; it continues to gossip until all peers are done."""
    HANDING_OVER = auto()
    """Asked to leave early: all mass is handed over to neighbours that stay."""
    LEAVING = auto()
    """The ending is being saved and the goodbye published."""
    CLOSED = auto()
    """The broker has accepted the goodbye."""
    UNDELIVERED = auto()
    """No broker accepted the goodbye; it stays in the checkpoint, and the next start publishes it."""
    ABANDONED = auto()
    """The other peers have given up this session; a new session follows."""
    ABORTED = auto()
    """Ended without a goodbye: the broker publishes the last will, if other peers could see the session."""


class Event(Enum):
    """What moves a session from one state to the next."""

    CONNECTED = auto()
    ENDING_RESTORED = auto()
    """The checkpoint holds an ending that a former process did not finish."""
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
    GOODBYE_ACCEPTED = auto()
    GOODBYE_FAILED = auto()
    SESSION_OVER = auto()
    """The lease has expired, neighbours have rejected the session, or an operator has declared it dead."""
    ERROR = auto()
    """A failure that waiting does not fix."""
    ABORT = auto()
    """Nothing more may be published: the checkpoint cannot be written, or another device has the name."""


_S, _E = State, Event
_RUNNING: Final = (_S.WAITING, _S.TRAINING, _S.AVERAGING, _S.SETTLING, _S.DONE)

TABLE: Final[dict[tuple[State, Event], State]] = {
    (_S.CONNECTING, _E.CONNECTED): _S.CLAIMING,
    (_S.CONNECTING, _E.ENDING_RESTORED): _S.LEAVING,
    (_S.CLAIMING, _E.NAME_FREE): _S.WAITING,
    (_S.WAITING, _E.STARTED): _S.AVERAGING,  # a round that a crash interrupted is averaged first
    (_S.AVERAGING, _E.AVERAGED): _S.TRAINING,
    (_S.AVERAGING, _E.ROUNDS_OVER): _S.SETTLING,
    (_S.TRAINING, _E.TRAINED): _S.AVERAGING,
    (_S.SETTLING, _E.AGREED): _S.DONE,
    (_S.DONE, _E.LOST_AGREEMENT): _S.SETTLING,
    (_S.DONE, _E.ALL_DONE): _S.LEAVING,
    **{(state, _E.ASKED_TO_LEAVE): _S.HANDING_OVER for state in _RUNNING},
    (_S.CLAIMING, _E.ASKED_TO_LEAVE): _S.ABORTED,  # not announced yet: nothing to hand over
    (_S.CONNECTING, _E.ASKED_TO_LEAVE): _S.ABORTED,
    (_S.HANDING_OVER, _E.HANDED_OVER): _S.LEAVING,
    **{
        (state, _E.SESSION_OVER): _S.ABANDONED
        for state in (_S.CLAIMING, *_RUNNING, _S.HANDING_OVER, _S.LEAVING)
    },
    # Also from LEAVING: a background task may fail just after the last state has finished.
    **{(state, _E.ERROR): _S.LEAVING for state in (*_RUNNING, _S.HANDING_OVER, _S.LEAVING)},
    (_S.CONNECTING, _E.ERROR): _S.ABORTED,
    (_S.CLAIMING, _E.ERROR): _S.ABORTED,  # not announced yet: no goodbye needed
    **{(state, _E.ABORT): _S.ABORTED for state in _S},
    (_S.LEAVING, _E.GOODBYE_ACCEPTED): _S.CLOSED,
    (_S.LEAVING, _E.GOODBYE_FAILED): _S.UNDELIVERED,
}

FINAL: Final = frozenset({_S.CLOSED, _S.UNDELIVERED, _S.ABANDONED, _S.ABORTED})

PHASES: Final[dict[State, Phase]] = {
    _S.WAITING: "starting",
    _S.TRAINING: "training",
    _S.AVERAGING: "training",
    _S.SETTLING: "settling",
    _S.DONE: "done",
}
"""The phase that is published for a state; states that are not listed leave the phase as it was."""


class Lifecycle:
    """State machine of one session."""

    def __init__(self) -> None:
        self.state = State.CONNECTING

    def fire(self, event: Event) -> State:
        """Move to the next state and return it; RuntimeError if the table has no entry: that is a bug."""
        next_state = TABLE.get((self.state, event))
        if next_state is None:
            raise RuntimeError(f"no transition for event {event.name} in state {self.state.name}")
        self.state = next_state
        return next_state


PROGRESS_INTERVAL = 10.0
"""Least seconds between two log lines about a peer's progress. For a peer that learns for ever it doubles
with every line, up to LONGEST_PROGRESS_INTERVAL, so that the log of a device is quiet."""
LONGEST_PROGRESS_INTERVAL = 3600.0

REMINDER_INTERVAL = 3600.0
"""Seconds between two checks whether an invitation or certificate will soon expire; see Reminders."""


class Connect(Protocol):
    """Makes a peer's transport: `lambda client_id, will, on_connect: MqttTransport(url, …)`."""

    def __call__(self, client_id: str, will: Will, on_connect: Hook) -> Transport:
        """Return a transport that is not connected yet."""
        ...


@dataclass(frozen=True)
class Report:
    """Result of a session: its last test, the accounts of its weight, and its counters."""

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
    """Transfers that were not acknowledged: receiver, its session, partial model, sequence, weight."""
    reclaimed: list[list[Any]]
    """Transfers that were taken back although their receivers had not declined them, in the same form."""
    abandoned: list[dict[str, Any]]
    """Former sessions of this peer that have no report of their own: session, reason, and accounts."""
    members: dict[str, list[int]]
    """Per shared partial model: number of members whose weight counts, and of all members known."""
    gossip: dict[str, int]
    dropped: dict[str, int]
    transport: dict[str, int]
    privacy: dict[str, float]
    """With differential privacy: epsilon, delta, and the number of releases they are computed from."""
    compression: dict[str, dict[str, float]]
    """Per partial model that was compressed or whose pushes were skipped: messages, bytes, distortion."""
    sharing: dict[str, Any] | None = None
    """With `sharing = "auto"`: what was shared over time, and what this peer decided; see SharingReport."""
    gain: dict[str, Any] = field(default_factory=dict)
    """With a lone twin: what the peer gained by taking part, by its last test; see gossamer.models.Gain."""


@dataclass
class _Progress:
    """Progress of a peer's training, over all sessions of one process.

    accuracy: of the last test. gain: of the last test, if the peer has a lone twin.
    next_round: when the next round may begin, by `round_every`.
    last_log: time of the last log line about progress. log_interval: least seconds until the next one.
    own_accuracy: of a network that was trained before it joined, tested before any value was received.
    callbacks_started: whether the callbacks' `start` was called. stopped: whether one has stopped the peer.
    """

    accuracy: float = float("nan")
    gain: Gain | None = None
    next_round: float = -inf
    last_log: float = -inf
    log_interval: float = PROGRESS_INTERVAL
    own_accuracy: float | None = None
    own_accuracy_published: bool = False
    callbacks_started: bool = False
    stopped: bool = False


class Peer:
    """One member of a swarm.

    name: unique in the swarm, because it is part of the peer's topics. With trust, the label of the peer's
        key; the attribute `name` is then the full name, `label@id`.
    learner: trains the peer's network; see gossamer.models.Learner.
    connect: makes the transport.
    samples: the peer's weight with `weights = "samples"`.
    checkpoint: a file from which a restarted process continues the session of a killed one, or finishes
        leaving. Without it, a crash loses the mass that the peer held. A peer that left early keeps its
        values in it, and starts a new session from them. The file is locked while the peer runs.
    machine: clocks, files and a worker thread; by default those of this machine.
    limits: times and sizes that are not user settings.
    callbacks: follow the peer, and may let it leave by returning True; see gossamer.models.Callback. They
        are called on the worker thread: gossip waits for them.
    on_record: called with every metrics record, which is also published.
    network_file: where to write the network while the peer learns; see NetworkFile.
    keep_copy: whether `predict` works, which needs memory for a second network.
    expiries: when the certificates of its connection expire; see Reminders, which also has its invitation.
    on_report: called on the worker thread with the report of a session that has ended, before its checkpoint
        is removed: save the results here. It may be called again with the same report after a crash.
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
        network_file: NetworkFile | None = None,
        keep_copy: bool = True,
        expiries: Mapping[str, float] | None = None,
        callbacks: Sequence[Callback] = (),
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
        expiries = dict(expiries or {})
        if self._credentials is not None:
            key = "its invitation expires: ask the swarm's owner for a new one"
            expiries[key] = self._credentials.expires
        self._reminders = Reminders(self.name, expiries)
        self._network_file = network_file
        self._copy = NetworkCopy(learner.network) if keep_copy else None
        self._leave = asyncio.Event()
        self._leave_reason = ""
        self._progress = _Progress()
        self._callbacks = CallbackList(callbacks)
        self.link: Link | None = None
        """The current session."""
        self._lifecycle = Lifecycle()

    @property
    def state(self) -> State:
        """State of the current session."""
        return self._lifecycle.state

    @property
    def network(self) -> NetworkCopy:
        """The network as it was after the last round: `peer.network(x)` returns its outputs.

        Any thread may call it, before, while and after the peer runs.
        """
        if self._copy is None:
            raise PeerError(f"peer {self.name}: it was made with keep_copy=False")
        return self._copy

    def predict(self, inputs: Tensor) -> Tensor:
        """Return the class of each input, by the network as it was after the last round; see `network`."""
        return predicted_classes(self.learner, self.network(inputs))

    def leave(self, reason: str = "asked to leave") -> None:
        """Ask the peer to hand over its mass and leave.

        `run` returns when the peer has left, or when `leave_timeout` is over; a round of training that has
        begun is finished first.
        """
        if not self._leave.is_set():
            self._leave_reason = reason
            self._leave.set()
            _log.info("peer %s is about to leave: %s", self.name, reason)

    async def run(self) -> Report:
        """Join the swarm, train and gossip all rounds, and leave. PeerError says what went wrong."""
        async with self._machine.worker(self.name) as worker:
            if self._checkpoint is None:
                return await self._run(worker)
            lock = self._machine.files.lock(self._checkpoint)
            try:
                await worker.run(lock.acquire)
                return await self._run(worker)
            finally:
                await worker.run(lock.release)

    async def _run(self, worker: Worker) -> Report:
        """Run one session after the other, until one ends with a report."""
        engine = await worker.run(self._make_engine)
        await worker.run(self._update_network_copies, engine)
        report = None
        try:
            while report is None:
                try:
                    report = await self._run_session(engine, worker)
                except SessionOver as over:
                    _log.warning("peer %s: %s; rejoining with a new session", self.name, over)
                    await worker.run(engine.start_new_session, str(over))
            return report
        finally:
            if self._callbacks:
                await worker.run(self._callbacks.end, after_error=report is None)

    async def _run_session(self, engine: Engine, worker: Worker) -> Report:
        """Run one session, from connecting to the goodbye."""
        link = Link(engine, worker, on_record=self._on_record)
        link.security = make_security(self._credentials, link)
        await worker.run(engine.set_security, link.security)
        if engine.ending is None:
            await worker.run(engine.record_session)
            await link.save()
        self.link, self._lifecycle, self._settling = link, Lifecycle(), Settling(link)
        self._training_metrics: Metrics | None = None
        """Of the last round; None before the first round of this session."""
        will = Status("offline", link.session, reason="connection lost", generation=link.generation)
        # With the process in the client id: of two clients with one id, a broker disconnects the first.
        link.transport = self._connect(
            f"{self.name}-{link.machine.process_id()}-{link.session}",
            Will(link.topic("status"), link.security.will(will.encode())),
            link.announce,
        )
        report = await self._run_connected(link)
        if engine.ending is not None:
            # Only after the connection was closed: if the process is killed before that, the broker publishes
            # the last will after the goodbye, and a restart must be able to publish the goodbye again.
            await worker.run(engine.finish)
        return report

    async def _run_connected(self, link: Link) -> Report:
        """Connect, subscribe, and run the session's states; on an error, abort the connection."""
        connected = False
        try:
            async with AsyncExitStack() as stack:
                connecting = asyncio.ensure_future(stack.enter_async_context(link.transport))
                if not await self._done_before_leaving(connecting, link, starts=True):
                    self._fire(Event.ASKED_TO_LEAVE)
                    if link.engine.ending is not None:
                        raise self._not_delivered(self._leave_reason)
                    return await self._report_without_goodbye(link)
                transport, connected = connecting.result(), True
                try:
                    presence = link.presence_patterns(("card", "status", "death"))
                    inboxes = topics.inboxes(self.settings.swarm, self.name)
                    for pattern in (*presence, inboxes, *link.security.patterns()):
                        await transport.subscribe(pattern)
                    return await self._run_states(link)
                except BaseException as error:
                    if self.state not in FINAL:
                        self._fire(Event.ABORT)
                    # Not if other peers cannot see this session, or another device has the name.
                    if link.joined and not isinstance(error, Replaced):
                        await transport.abort()  # the broker then publishes the last will
                    raise
        except TransportError as error:
            if connected or link.engine.ending is None:
                raise
            # Only the goodbye remains to be published: a later start can still do that.
            raise self._not_delivered(str(error)) from None

    async def _run_states(self, link: Link) -> Report:
        """Run from the first state to a final one, and return the report."""
        failure: PeerError | None = None
        if link.engine.ending is not None:
            self._fire(Event.ENDING_RESTORED)
            _log.info("peer %s: continues leaving where a former process stopped", self.name)
        else:
            self._fire(Event.CONNECTED)
            try:
                await self._run_tasks(link)
            except SessionOver:
                self._fire(Event.SESSION_OVER)
                raise
            except (NotSaved, Replaced):
                raise
            except PeerError as error:
                failure = error
                self._fire(Event.ERROR)
        if self.state is State.ABORTED:
            if failure is not None:
                raise failure
            return await self._report_without_goodbye(link)
        return await self._end(link, failure)

    async def _report_without_goodbye(self, link: Link) -> Report:
        """Return the report of a peer that was asked to leave before its session was announced."""
        engine_report = await link.worker.run(link.engine.report)
        loop_report = self._loop_report(link)
        return Report(**engine_report, **loop_report, ended="left", reason=self._leave_reason)

    async def _run_tasks(self, link: Link) -> None:
        """Run background tasks and the handlers of states, until the state is LEAVING or final."""
        jobs = {
            "receive": link.receive(),
            "gossip": link.gossip(),
            "lease": link.renew_lease(),
            "status": link.keep_status(),
            "card": link.keep_card(),
            "ask": link.ask_for_missing(),
            "summary": link.keep_summary(),
            "reminders": self._log_reminders(),
            "network": self._write_network_after_training(link),
        }
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(job, name=f"{self.name} {title}")
                    for title, job in jobs.items()
                ]
                while self.state is not State.LEAVING and self.state not in FINAL:
                    self._fire(await self._next_event(link))
                for task in background:
                    task.cancel()
        except* Exception as errors:
            # In a final state errors of background tasks no longer matter.
            if self.state not in FINAL:
                raise first_error(errors) from None

    def _fire(self, event: Event) -> None:
        """Move to the next state; the link publishes it in its summary, and its phase in its status."""
        assert self.link is not None
        state = self._lifecycle.fire(event)
        self.link.state = state.name.lower()
        phase = PHASES.get(state)
        if phase is not None and phase != self.link.phase:
            self.link.enter_phase(phase)

    async def _log_reminders(self) -> None:
        """Log once a day what will soon expire."""
        while True:
            self._reminders.check(self._machine.wall())
            await asyncio.sleep(REMINDER_INTERVAL)

    async def _write_network_after_training(self, link: Link) -> None:
        """Write the network from time to time while the peer still averages after its last round."""
        while True:
            await asyncio.sleep(self.settings.save_network_every)
            if self.state in (State.SETTLING, State.DONE):
                await link.worker.run(self._update_network_copies, link.engine)

    async def _next_event(self, link: Link) -> Event:
        """Run the handler of the current state; cancel it if the peer is asked to leave."""
        handlers: dict[State, Callable[[Link], Awaitable[Event]]] = {
            State.CLAIMING: self._claim,
            State.WAITING: self._wait,
            State.TRAINING: self._train,
            State.AVERAGING: self._average,
            State.SETTLING: self._settle,
            State.DONE: self._wait_for_all_done,
        }
        state = self.state
        if state is State.HANDING_OVER:
            return await self._hand_over(link)
        work = asyncio.ensure_future(handlers[state](link))
        # If it still claims its name: then it can say goodbye, and peers that expect it do not wait.
        if await self._done_before_leaving(work, link, starts=state is State.CLAIMING):
            return work.result()
        return Event.ASKED_TO_LEAVE

    async def _done_before_leaving(
        self, work: asyncio.Future[Any], link: Link, *, starts: bool
    ) -> bool:
        """Wait until `work` is done; cancel it and return False if the peer is asked to leave before.

        starts: whether it then gets some seconds more, because the peer cannot say goodbye yet.
        """
        leave_request = asyncio.ensure_future(self._leave.wait())
        try:
            await asyncio.wait((work, leave_request), return_when=asyncio.FIRST_COMPLETED)
            if starts:
                await asyncio.wait((work,), timeout=link.engine.limits.name_grace)
        finally:
            leave_request.cancel()
            if not work.done() and self._leave.is_set():
                link.announce_leaving()  # at once: a round in training delays leaving
            await end_task(work)
        return not work.cancelled()

    # --- handlers of states ---------------------------------------------------------------------

    async def _claim(self, link: Link) -> Event:
        progress, engine = self._progress, link.engine
        if self.settings.trained and not engine.returning and progress.own_accuracy is None:
            # Test the trained network before any value is received.
            progress.own_accuracy = (await link.worker.run(self.learner.test)).accuracy
        await claim_name(link, engine.undelivered_ending)
        if engine.must_leave:
            self.leave("it was asked to leave before it was interrupted")
        return Event.NAME_FREE

    async def _wait(self, link: Link) -> Event:
        progress = self._progress
        await wait_for_others(link)
        if link.view.round:
            after = self._round_text(link.view.round)
            _log.info("peer %s continues after round %s", self.name, after)
        link.enter_phase("training")
        if not progress.callbacks_started:
            progress.callbacks_started = True
            await self._run_callbacks(link, self._callbacks.start)
            if progress.stopped:
                return self._stop()
        if progress.own_accuracy is not None and not progress.own_accuracy_published:
            progress.own_accuracy_published = True
            await link.publish_record({"own_accuracy": progress.own_accuracy})
        return Event.STARTED

    async def _train(self, link: Link) -> Event:
        progress, clock = self._progress, self._machine.monotonic
        if (pause := progress.next_round - clock()) > 0:
            await asyncio.sleep(pause)
        progress.next_round = clock() + self.settings.round_every
        await link.worker.run(link.engine.begin_round)
        if link.engine.sharing is not None:
            link.wake()
            while link.view.awaits_others or link.announces_plan:
                await link.next_turn()
        self._training_metrics = await link.worker.run(link.engine.train)
        link.wake()
        await link.next_turn()  # sends the pushes, and processes what arrived during training
        if link.engine.training.has_twin:
            await link.worker.run(link.engine.training.train_twin, link.view.round)
        return Event.TRAINED

    async def _average(self, link: Link) -> Event:
        while not link.view.averaged:
            await link.next_turn()
        number, last, metrics = link.view.round, self.settings.last_round, self._training_metrics
        if metrics is not None:
            await self._run_callbacks(link, self._callbacks.round)
        if metrics is None:
            pass  # the round was trained before a crash; no metrics to publish
        elif number % self.settings.test_every == 0 or number == last or self._progress.stopped:
            accuracy, now = await self._test(link), self._machine.monotonic()
            progress = self._progress
            if number == last or now >= progress.last_log + progress.log_interval:
                if last == inf and progress.last_log > -inf:
                    doubled = 2 * progress.log_interval
                    progress.log_interval = min(doubled, LONGEST_PROGRESS_INTERVAL)
                progress.last_log = now
                text = self._round_text(number)
                _log.info("peer %s: round %s, accuracy %.3f", self.name, text, accuracy)
        else:
            await link.publish_record({"training_loss": metrics.mean_loss})
        await link.worker.run(self._update_network_copies, link.engine, force=number >= last)
        if number < last:
            return self._stop() if self._progress.stopped else Event.AVERAGED
        if unfinished := {*link.roster.still_training(), *link.roster.offline_unfinished()}:
            _log.info(
                "peer %s has trained all its rounds; it waits until these peers have, too: %s",
                self.name, ", ".join(sorted(unfinished)),
            )  # fmt: skip
        return Event.ROUNDS_OVER

    async def _settle(self, link: Link) -> Event:
        if self._must_agree(link):
            await self._settling.settle()
        if link.view.waiting:  # no first value was received within the timeout
            await link.worker.run(link.engine.inject_everywhere)
        await link.worker.run(self._update_network_copies, link.engine, force=True)
        return Event.AGREED

    async def _wait_for_all_done(self, link: Link) -> Event:
        settling = self._settling
        await settling.confirm_presence()
        if self._must_agree(link):
            if not await settling.keep_pushing():
                return Event.LOST_AGREEMENT
            await link.worker.run(link.engine.gossiper.close)
            link.announce_leaving()  # averaging is over: newcomers need not wait for a value from us
            await self._test(link)
        else:
            await link.publish_record({})  # publishes the new phase to observers of the metrics
        await settling.wait_for_transfers()
        return Event.ALL_DONE

    async def _hand_over(self, link: Link) -> Event:
        link.announce_leaving()
        await hand_over(link)
        return Event.HANDED_OVER

    def _update_network_copies(self, engine: Engine, *, force: bool = False) -> None:
        """Bring the copy of the network up to date, and its file if it is due; runs on the worker.

        force: write the file even if it is not due.
        """
        if self._copy is not None:
            self._copy.update(engine.history.round)
        if self._network_file is not None:
            self._network_file.write_if_due(
                self.learner.network, self._machine.monotonic(), self._machine.wall(),
                force=force, **self._about(engine),
            )  # fmt: skip

    def _about(self, engine: Engine) -> dict[str, Any]:
        """Return fields of store.About, which describes the network's file."""
        return {
            "peer": self.name, "swarm": self.settings.swarm, "session": engine.session,
            "round": engine.history.round, "accuracy": self._progress.accuracy,
        }  # fmt: skip

    def _round_text(self, round_number: int) -> str:
        """Return the number of a round for log lines: `3 of 30`, or only `3` if there is no last one."""
        rounds = self.settings.rounds
        return str(round_number) if rounds == FOREVER else f"{round_number} of {rounds}"

    def _must_agree(self, link: Link) -> bool:
        """Return whether the peer averages until it agrees with its neighbours, before it is done."""
        return self.settings.mode == "async" and (
            link.view.has_neighbours or bool(link.view.waiting)
        )

    async def _test(self, link: Link) -> float:
        """Test the network and publish its accuracy and loss; return the accuracy.

        Published too, if the peer has a lone twin: the twin's accuracy and loss.
        """
        test = await link.worker.run(self.learner.test)
        self._progress.accuracy = test.accuracy
        record = as_record(test)
        training = link.engine.training
        if training.has_twin:
            self._progress.gain = await link.worker.run(training.measure_gain, link.view.round)
        if (gain := self._progress.gain) is not None:
            record |= {"alone_accuracy": gain.alone_accuracy, "alone_loss": gain.alone_loss}
        await link.publish_record(record)
        await self._run_callbacks(link, self._callbacks.test, {self.name: test})
        return test.accuracy

    async def _run_callbacks(
        self,
        link: Link,
        method: Callable[[TrainingProgress], bool],
        tests: Mapping[str, Metrics] | None = None,
    ) -> None:
        """Run one method of all callbacks on the worker thread; note whether one of them stops the peer."""
        if not self._callbacks:
            return
        rounds = None if self.settings.rounds == FOREVER else self.settings.rounds
        training = {} if (metrics := self._training_metrics) is None else {self.name: metrics}
        progress = TrainingProgress(link.view.round, rounds, [self.learner], training, tests or {})
        try:
            stop = await link.worker.run(method, progress)
        except ModelError as error:
            raise PeerError(f"peer {self.name}: {error}") from error
        self._progress.stopped = self._progress.stopped or stop

    def _stop(self) -> Event:
        """Ask the peer to leave because a callback has stopped it."""
        self.leave("a callback stopped it")
        return Event.ASKED_TO_LEAVE

    # --- leaving --------------------------------------------------------------------------------

    async def _end(self, link: Link, failure: PeerError | None) -> Report:
        """Save the ending, publish the goodbye, and return the report; raise `failure` if there is one."""
        engine, run = link.engine, link.worker.run
        was_asked = self._leave.is_set() and failure is None
        if engine.ending is None:
            # In a new session after a lost lease all rounds may be trained, but the weight not count yet.
            unfinished = link.view.round < self.settings.last_round or bool(link.view.waiting)
            kind = "failed" if failure else "left" if was_asked and unfinished else "finished"
            reason = self._leave_reason or "its training is over"
            if failure:
                reason = str(failure).removeprefix(f"peer {self.name}: ")
            loop_report, events = self._loop_report(link), link.take_events()
            await run(engine.end, kind, reason, link.phase, loop_report, events)
            await link.save()
        ending = engine.ending
        assert ending is not None
        within = self.settings.leave_timeout * (1.0 - HAND_OVER_SHARE if was_asked else 1.0)
        how = "revoked" if isinstance(failure, Revoked) else ending.kind
        await link.publish_last_summary(how, ending.reason)
        error, earlier = await deliver_goodbye(link, goodbye_of(ending, link.generation), within)
        # Unless a former process has delivered the goodbye: other peers have acted on it.
        if not ending.told and await run(engine.amend, earlier):
            await link.save()
            ending = engine.ending
            assert ending is not None
            error, _ = await deliver_goodbye(link, goodbye_of(ending, link.generation), within)
        if error:
            self._fire(Event.GOODBYE_FAILED)
            _log.warning(
                "peer %s left swarm %s: %s; the broker did not accept its goodbye within %g s (%s)",
                self.name, self.settings.swarm, ending.reason, within, error,
            )  # fmt: skip
            if failure is not None:
                raise failure
            if self._checkpoint is not None:
                raise self._not_delivered(error)
        else:
            self._fire(Event.GOODBYE_ACCEPTED)
            _log.info("peer %s left swarm %s: %s", self.name, self.settings.swarm, ending.reason)
            await run(engine.confirm_goodbye)
            await link.save()  # before the report: a restarted process must write the same one
        if failure is not None:
            raise failure
        report = from_saved(Report, ending.report)
        if counters := {**report.dropped, **report.transport}:
            text = ", ".join(f"{cause} {count}" for cause, count in sorted(counters.items()))
            _log.info("peer %s: counters of this session: %s", self.name, text)
        await run(self._on_report, report)
        return report

    def _loop_report(self, link: Link) -> dict[str, Any]:
        """Return the event loop's part of a report."""
        gain = self._progress.gain
        return {
            "accuracy": self._progress.accuracy,
            "gain": {} if gain is None else gain.as_dict(),
            "members": link.members(),
            "transport": dict(link.transport.counters + link.dropped),
        }

    def _not_delivered(self, error: str) -> GoodbyeNotDelivered:
        return GoodbyeNotDelivered(
            f"peer {self.name}: no broker accepted its goodbye ({error}); {self._checkpoint} keeps it: start "
            "the peer again to deliver it"
        )
