"""All that a peer's own thread owns: network, learner, gossiper and books. No IO but the checkpoint.

The event loop hands in what arrived and gets back what to send. Every message that leaves was covered by a
checkpoint first (if the peer has one), so that a killed process forgets nothing that anybody was told. The
loop reads `view`, an immutable summary that every job replaces; whatever else it asks runs here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gossamer.logs import is_milestone

from ..gossip import (
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    ONE,
    Array,
    Buffer,
    Give,
    Gossiper,
    Message,
    PacedMode,
    Reassembler,
    RoundsMode,
    ServerMode,
    WireDtype,
    as_sent,
    wide_enough,
)
from ..gossip.security import FirstOpinion, Intake, NullSecurity, SecurityLayer, guard
from ..models import Learner, Metrics, PeerCounting, Weighted
from .bootstrap import Bootstrap, Others, PeerGuards
from .exits import PeerError
from .machine import Machine, Saver, mark, moment, trim_heap
from .outgoing import Compression, Dispatch, Outgoing, Privacy
from .presence import Event, Gone, Goodbye, Offline, Online, Phase, Statement
from .settings import Limits, Settings
from .store import Agreement, MatchedStore, schema_hashes

_log = logging.getLogger(__name__)

OPINION_WAIT = 5.0
"""Seconds for which a newcomer gathers its elders' values before it forms an opinion of its own."""

PeerMode: TypeAlias = PacedMode | RoundsMode | ServerMode

ABANDONED_KEPT = 64
"""Former sessions whose accounts a peer remembers."""

MESSAGE_OVERHEAD = 2 * MAX_HEADER_BYTES
"""Bytes of a message besides its value, and more."""
VALUE_BYTES: Mapping[WireDtype, int] = {"float16": 2, "float32": 4, "float64": 8}
MAX_VALUE_BYTES = 8
"""Bytes of a value, at most. Whoever sends it decides, and each message says so."""
MIN_WAITING_BYTES = 4 << 20
"""Bytes that may wait, however small the models are: answers and keys come beside them."""
MAX_WAITING_BYTES = 1 << 30
"""Bytes that may wait, however many the neighbours are, unless a single message takes more."""

MIN_UNFINISHED = 64
"""Messages of which some chunks may be missing, however few the neighbours are."""


class InboundLimits:
    """How much memory a peer has for what others send: what its own models make likely, and no more.

    sizes: values of each partial model. dtype: how the peer writes them. PeerError, by name, for one that
    no message can carry.
    """

    def __init__(self, name: str, sizes: Mapping[str, int], dtype: WireDtype) -> None:
        width = VALUE_BYTES[dtype]
        for model, size in sizes.items():
            if (total := size * width + MESSAGE_OVERHEAD) > MAX_MESSAGE_BYTES:
                raise PeerError(
                    f"peer {name}: model {model}: its {size} values make a message of {total} bytes, and "
                    f"{MAX_MESSAGE_BYTES} are the most: share it as several partial models"
                    + ("" if width == 2 else ", or send float16")
                )
        self._each = sum(size * width + MESSAGE_OVERHEAD for size in sizes.values())
        """One message about every partial model."""
        self._models = len(sizes)
        widest = max(sizes.values(), default=0) * MAX_VALUE_BYTES + MESSAGE_OVERHEAD
        self.largest = min(MAX_MESSAGE_BYTES, widest)
        """Bytes of the largest message that can be of any use here."""

    def waiting(self, neighbours: int) -> int:
        """Bytes that may wait while the peer trains: twice what each of its neighbours, and one who is
        not known yet, has to say about every partial model."""
        likely = 2 * self._each * (neighbours + 1)
        return max(MIN_WAITING_BYTES, 2 * self.largest, min(likely, MAX_WAITING_BYTES))

    def reassembler(self) -> Reassembler:
        """One that takes every message which is of use, and from each sender one that waits besides."""
        sender = 2 * (self._each + self.largest)
        made = Reassembler(max_message_bytes=self.largest, max_sender_bytes=sender)
        self.fit(made, 0)
        return made

    def fit(self, reassembler: Reassembler, neighbours: int) -> None:
        """Let it hold what so many neighbours may have on its way at once."""
        reassembler.max_total_bytes = 2 * (self._each + self.largest) + self.waiting(neighbours)
        reassembler.max_unfinished = max(MIN_UNFINISHED, 2 * self._models * (neighbours + 1))


@dataclass(frozen=True)
class View:
    """What the event loop may know of an engine, as of its last job."""

    session: str
    round: int
    """Rounds trained so far."""
    averaged: bool
    """Whether training may go on: the round's averaging is over, or, in async mode, neighbours keep up."""
    counts: Mapping[str, int]
    """Partial models in which the peer's weight counts, and for how many rounds."""
    waiting: frozenset[str]
    """Partial models in which it does not count yet."""
    open: int
    """Transfers that nobody has acknowledged."""
    neighbours: bool
    """Whether any partial model has a neighbour to share it with."""
    rejected: str
    """Why this session must end, if neighbours who are to be believed say so."""
    received: int
    """Messages taken in so far."""


@dataclass(frozen=True)
class Ending:
    """How a session ended: written down before anybody is told, so that a restart finishes what was begun.

    kind: finished: all rounds are trained. left: asked to leave early. failed: could not take part.
    told: whether the broker took the goodbye.
    """

    kind: str
    reason: str
    phase: Phase
    statement: Statement
    reclaimed: Statement
    counts: dict[str, int]
    report: dict[str, Any]
    told: bool = False


@dataclass
class Books:
    """What a peer remembers beyond one session."""

    generation: int = 1
    """How often this name was given to another device, this one included."""
    round: int = 0
    earlier: int = 0
    """Rounds trained in former sessions: lockstep modes count from the start of their own."""
    counted: dict[str, int] = field(default_factory=dict)
    """The round in which the peer's weight began to count, per partial model."""
    claimed: bool = False
    """Whether this device has taken part under its name."""
    sessions: list[str] = field(default_factory=list)
    """The sessions under which this device has connected to a broker, newest last."""
    goodbye: dict[str, Any] | None = None
    """What the last session that ended with a goodbye said in it."""
    abandoned: list[dict[str, Any]] = field(default_factory=list)
    """Accounts of former sessions that did not end with a report."""
    goodbyes: dict[str, str] = field(default_factory=dict)
    """Goodbyes of others that are kept for peers who were away, as on the card."""


class Engine:
    """One peer's network, learner and gossiper, driven from one thread.

    checkpoint: the file to survive crashes with; None runs without.
    """

    def __init__(
        self,
        name: str,
        learner: Learner,
        settings: Settings,
        *,
        samples: int = 1,
        checkpoint: Path | None = None,
        seed: int = 0,
        machine: Machine | None = None,
        limits: Limits | None = None,
    ):
        if why := settings.contradiction():
            raise PeerError(f"peer {name}: {why}")
        self.name, self.learner, self.settings = name, learner, settings
        self.fixed = limits or Limits()
        """Times and sizes that no user sets."""
        self.machine, self.samples = machine or Machine(), samples
        self.network = learner.network
        self.store = MatchedStore(self.network, settings.matching, trained=settings.trained)
        self.schemas = schema_hashes(self.network, self.store.common)
        self.entries = {model: self.store.entries(model) for model in self.schemas}
        """What each partial model is made of, as on the card."""
        self.weight = ONE * (samples if settings.weights == "samples" else 1)
        self.books = Books()
        self.ending: Ending | None = None
        self.dropped: Counter[str] = Counter()
        self._received = 0
        self.in_touch = self._began = self.machine.uptime()
        """When the others could last hear of this session, by the machine's uptime."""
        self._saver = Saver(name, settings, checkpoint, self._tree, self.machine, self.fixed)
        self._saved: tuple[str, int] | None = None
        """The session, and the revision of its ledger, when it was last saved."""
        self._heard_goodbye = False
        """Whether a goodbye was heard since: the broker may forget it, and nobody would say it again."""
        self._unsent: list[Message] = []
        """Messages that wait for a checkpoint that covers them."""
        sizes = {model: self.store.read(model).size for model in self.schemas}
        self.limits = InboundLimits(name, sizes, settings.dtype)
        """How much of what others send may wait."""
        self._reassembler = self.limits.reassembler()
        self._guards = None
        if settings.bounds is not None:
            self._guards = PeerGuards(settings.bounds)
            self._guards.weight = self.weight
        self._privacy = Privacy(name, settings, self.schemas)
        self.compression = Compression(name, settings, self.entries, sizes)
        self._others = Others()
        self._opinion = FirstOpinion({})
        self._memory: dict[str, Any] = {}
        self.security: SecurityLayer = NullSecurity(name)
        self._dispatch = Dispatch(
            name, self.schemas, settings.dtype, self.compression, self.security, self.fixed.max_pieces
        )  # fmt: skip
        self.set_security(self.security)
        self.agreement = Agreement(self.schemas, self.store)
        self.bootstrap = Bootstrap(name, settings, self.store, learner, self.weight)
        self._rng = np.random.default_rng(seed)
        self.unsaid: Ending | None = None
        """How a former session failed, if no broker took its goodbye."""
        self.restored = False
        """Whether the peer goes on in the session of a former process."""
        self.returning = False
        """Whether the peer took part before: a crash, a goodbye or a lost lease lies behind it."""
        self._restore()
        if isinstance(learner, Weighted):
            learner.weight_of = lambda model: self.gossiper.weight(model) / ONE
        if isinstance(learner, PeerCounting):
            learner.peers_seen = lambda: 1 + len(self._others.known)
        self.view = self._look()

    gossiper: Gossiper
    mode: PeerMode

    @property
    def session(self) -> str:
        """The session whose books these are."""
        return self.gossiper.session

    @property
    def must_leave(self) -> bool:
        """Whether a former process was killed while it handed its mass over in a lockstep mode.

        Nobody gives it any before its next round; it can only go on leaving.
        """
        return self.restored and self.ending is None and self.gossiper.leaving

    def _look(self) -> View:
        gossiper = self.gossiper
        waiting = frozenset(filter(self._is_waiting, gossiper.models))
        counted = self.books.counted
        for model in gossiper.models:
            if model not in waiting:
                counted.setdefault(model, self.books.round)
        return View(
            session=gossiper.session,
            round=self.books.round,
            averaged=self._is_averaged(),
            counts={v: self.books.round - since for v, since in sorted(counted.items())},
            waiting=waiting,
            open=len(gossiper.ledger.open),
            neighbours=any(gossiper.neighbours(v) for v in gossiper.models),
            rejected=self._rejected(),
            received=self._received,
        )

    # --- a session's beginning ------------------------------------------------------------------

    def set_security(self, security: SecurityLayer) -> None:
        """Seal and open with the security layer of a new session."""
        if security is not self.security:
            self.dropped.update(self.security.counters)
        self.security = security
        self._dispatch.set_security(security)
        self._intake = Intake(
            security, self.schemas,
            guards=self._guards, reassembler=self._reassembler, drop=self._drop,
        )  # fmt: skip

    def memory(self) -> dict[str, Any]:
        """Return what the security layer of a next session should remember of the ones before."""
        return self.security.snapshot() or self._memory

    def connecting(self) -> None:
        """Write down the session under which we are about to connect: its last will may outlive us."""
        books = self.books
        if self.session not in books.sessions:
            books.sessions = [*books.sessions, self.session][-ABANDONED_KEPT:]

    def open(self, since: float, generation: int) -> dict[str, str]:
        """Prepare the session that is about to be announced; returns digests of its starting values.

        since: when it began, as on its card.
        """
        self.books.generation, self.books.claimed = generation, True
        self.unsaid = None
        starts = self.bootstrap.open(self.gossiper, since)
        judges = self._guards is not None and self.settings.mode == "async" and not self.store.apart
        waiting = self.bootstrap.waiting if judges else ()
        sizes = {model: self.store.read(model).size for model in waiting}
        self._opinion = FirstOpinion(sizes, wait=OPINION_WAIT)
        return starts

    def begin(self, now: float, *, found: bool, complete: bool) -> None:
        """Let the peer's own weight count, as soon as its bootstrap says so; see Bootstrap.begin."""
        self.bootstrap.begin(self.gossiper, now, found=found, complete=complete)
        self.view = self._look()

    def neighbours_went_on(self) -> bool:
        """Return whether a neighbour has trained a second round, which takes all who started together."""
        return any(
            rounds > 1 and model in other.models
            for other in self._others.known.values()
            for model, rounds in other.counts.items()
        )

    def count_everywhere(self) -> None:
        """Let the peer's own weight count in all models, whoever was heard: its training is over."""
        self.bootstrap.count_everywhere(self.gossiper)
        self.view = self._look()

    def _rejected(self) -> str:
        """Return which neighbour rejected this session and why, or nothing.

        A rejection is believed right after a restart (the checkpoint may be stale), when all neighbours
        that can be reached agree on it, and otherwise once per lease, so that a malicious neighbour cannot
        force repeated resets.
        """
        rejections = self.gossiper.rejections
        if not rejections:
            return ""
        gossiper = self.gossiper
        reachable = {p for v in gossiper.models for p in gossiper.reachable_neighbours(v)}
        age = self.machine.uptime() - self._began
        everybody = bool(reachable) and reachable <= rejections.keys()
        if self.restored or age > self.settings.lease or everybody:
            return next(iter(rejections.values()))
        return ""

    def renew(self, why: str) -> None:
        """Start a new session with the values of the old one, whose mass counts no more."""
        if self.settings.mode != "async":
            raise PeerError(
                f"peer {self.name}: {why}, and {self.settings.mode} mode cannot be joined midway; raise "
                f"the lease of {self.settings.lease:g} s"
            )
        self._abandon(why)
        self._begin_anew()
        self.view = self._look()

    def _abandon(self, why: str) -> None:
        """Write down the accounts of a session that will have no report of its own."""
        if self._has_books():
            account = {"session": self.session, "reason": why, **self._accounts()}
            self.books.abandoned = [*self.books.abandoned, account][-ABANDONED_KEPT:]

    def _has_books(self) -> bool:
        """Return whether anybody was given, or may have been told, anything in this session."""
        return bool(self.gossiper.ledger.revision) or any(self._weights().values())

    def _weights(self) -> dict[str, int]:
        return {v: self.gossiper.injected(v) for v in self.gossiper.models}

    def _begin_anew(self) -> None:
        self._make_gossiper()
        self.restored, self.returning, self.ending = False, self.books.round > 0, None
        self.in_touch = self._began = self.machine.uptime()
        self.books.earlier = self.books.round
        self.books.counted = {}
        self.bootstrap.renew()
        self._others.clear()
        self._unsent.clear()
        self._dispatch.renew()
        self.agreement.forget()

    def _make_gossiper(self, snapshot: dict[str, Any] | None = None) -> None:
        """Give a new session, or that of a snapshot, a gossiper and a mode of its own."""
        links = self.compression.links
        self.mode = _make_mode(self.name, self.settings, self.schemas, self.compression)
        options: dict[str, Any] = {
            "mode": self.mode,
            "seed": self._rng,
            "retry": self.fixed.retry,
            "lossy": _as_float16 if self.settings.dtype == "float16" else None,
            "links": links,
        }
        if snapshot is None:
            links.forget()  # nobody knows what was compressed in an older session
            session = self.machine.new_session()
            self.gossiper = Gossiper(self.name, session, self.store, **options)
        else:
            self.gossiper = Gossiper.restore(snapshot, self.store, **options)
        if self._guards is not None:
            guard(self.gossiper, self._guards, self.machine.monotonic)

    # --- training and turns ---------------------------------------------------------------------

    def train(self) -> Metrics:
        """Train one round; in lockstep modes it also opens the round's averaging.

        In async mode the pushes are made here and now: mass that arrived while we trained must stay
        for the next round. Passed on at once it would travel for ever without learning anything.
        """
        trim_heap()  # what the gossip before has freed
        before = self._privacy.before(self.network)
        metrics = self.learner.train(self.settings.every)
        self._privacy.release(self.network, before)
        self.books.round += 1
        if isinstance(self.mode, RoundsMode | ServerMode):
            number = self.books.round - self.books.earlier - 1
            self._privacy.enter(self.gossiper, number, self.security)
            self.mode.begin_round(self.gossiper, number)
        else:
            self.mode.request()
            self.gossiper.tick(self.machine.monotonic())
        self.view = self._look()
        return metrics

    def _is_averaged(self) -> bool:
        if isinstance(self.mode, RoundsMode | ServerMode):
            number = self.books.round - self.books.earlier - 1
            over = number < 0 or self.mode.finished(number)
            if over:
                self._privacy.over()
            return over
        return self.mode.caught_up(self.gossiper)

    def request_push(self) -> None:
        """Async mode: push every model once more, without training."""
        if isinstance(self.mode, PacedMode):
            self.compression.links.dense = True  # nobody trains: agree, and leave
            self.mode.request(anyway=True)

    def turn(
        self,
        arrived: Sequence[tuple[str, bytes | memoryview]],
        events: Sequence[Event],
        now: float,
        max_packet: int,
        in_touch: float | None = None,
    ) -> list[Outgoing]:
        """Take in packets and events, let time pass, and return what to send.

        in_touch: when the others could last hear of us, by the machine's uptime.
        """
        if in_touch is not None:
            self.in_touch = in_touch
        for event in events:
            self._apply(event)
        self.limits.fit(self._reassembler, len(self._others.known))
        for model, packet in arrived:
            self._take(model, packet, now)
        self._mute_quarantined(now)
        self._form_opinions(now)
        self.bootstrap.look(self.gossiper, self._others, now)
        self.gossiper.tick(now)
        self.store.forget()  # what a push has read would only take up memory
        messages = self._covered([*self._unsent, *self.gossiper.poll()])
        outgoing = self._dispatch.pack(messages, self.session, max_packet)
        self.view = self._look()
        return outgoing

    def _covered(self, messages: list[Message]) -> list[Message]:
        """Return the messages that may leave: all, once the checkpoint knows what they say."""
        self._unsent = []
        news = messages and self._saved != (self.session, self.gossiper.ledger.revision)
        if news or self._heard_goodbye:
            if not self.save():
                self._unsent = messages  # the saver raises when it has failed for too long
                return []
        else:
            self._saver.save_now_and_then(self.books.round)
        return messages

    # --- a session's end ------------------------------------------------------------------------

    def hand_over(self) -> bool:
        """Give all mass to neighbours that stay; returns whether nothing is left that anybody could take.

        What is on its way to peers that cannot be reached is taken back first: nobody can wait for them.
        """
        gossiper = self.gossiper
        gossiper.reclaim(stranded_only=True)
        if not gossiper.closed and not gossiper.leaving:
            gossiper.hand_over(self.machine.monotonic())
        held = not gossiper.closed and any(
            gossiper.weight(model)
            and set(gossiper.heirs(model)).intersection(gossiper.reachable_neighbours(model))
            for model in gossiper.models
        )
        self.view = self._look()
        return not gossiper.ledger.open and not held

    def end(
        self,
        kind: str,
        reason: str,
        phase: Phase,
        report: dict[str, Any],
        events: Sequence[Event] = (),
    ) -> None:
        """End the session in the books; `save` must succeed before anybody is told.

        Transfers that nobody has acknowledged are taken back; the goodbye says so.
        report: what the event loop adds to the report. events: what presence said since the last turn; a
        goodbye among it tells what became of transfers whose receiver can give nothing up any more.
        """
        self.gossiper.close()
        for event in events:
            self._apply(event)
        self.gossiper.reclaim()
        self.security.end_session()
        self.ending = Ending(
            kind,
            reason,
            phase,
            self.gossiper.statement(),
            self.gossiper.reclaimed,
            dict(self._look().counts),
            {**report, **self.report(), "ended": kind, "reason": reason},
        )

    def amend(self, events: Sequence[Event]) -> bool:
        """Take in goodbyes that reached the broker before our own; returns whether our ending changes.

        Of two peers that end at the same time, the one whose goodbye comes first is right about the
        transfers between them, and the other one's ending is amended.
        """
        assert self.ending is not None
        before = self._accounts(), self.gossiper.statement()
        for event in events:
            if isinstance(event, Gone):
                self._apply(event)
        if before == (self._accounts(), self.gossiper.statement()):
            return False
        self.ending = replace(
            self.ending,
            statement=self.gossiper.statement(),
            reclaimed=self.gossiper.reclaimed,
            report={**self.ending.report, **self._accounts()},
        )
        return True

    def ended(self) -> None:
        """Note that the broker took the goodbye."""
        assert self.ending is not None
        self.ending = replace(self.ending, told=True)

    def finish(self) -> None:
        """Close the books of a session whose report is written.

        A peer that has trained all its rounds needs its checkpoint no more. One that left early keeps what
        it learnt, and brings new weight in a new session when it is started again.
        """
        assert self.ending is not None
        if self.ending.kind == "finished":
            self._saver.remove()
        elif self.ending.kind == "left":
            self._remember(self.ending)
            self._begin_anew()
            self._saver.save()

    @property
    def former(self) -> Goodbye | None:
        """The goodbye of this device's last session, for the card of the next."""
        found = self.books.goodbye
        return None if found is None else Goodbye(**found)

    def keep_goodbyes(self, goodbyes: dict[str, str]) -> None:
        """Write these down with the next checkpoint, in this turn."""
        self.books.goodbyes, self._heard_goodbye = goodbyes, True

    def _remember(self, ending: Ending) -> None:
        """Keep a goodbye beyond its session: a new status will replace it at the broker."""
        self.books.goodbye = {
            "session": self.session,
            "statement": ending.statement,
            "reclaimed": ending.reclaimed,
        }

    def report(self) -> dict[str, Any]:
        """Return where the weight is and what was counted, as JSON-friendly data."""
        counted = {} if self._guards is None else self._guards.counters
        refused = {f"guards-{cause}": count for cause, count in counted.items()}
        return {
            "peer": self.name,
            "session": self.session,
            "rounds": self.books.round,
            **self._accounts(),
            "abandoned": list(self.books.abandoned),
            "gossip": dict(self.gossiper.counters),
            "privacy": self._privacy.report(),
            "compression": self.compression.report(),
            "dropped": dict(self.dropped + self.security.counters + Counter(refused)),
        }

    def _accounts(self) -> dict[str, Any]:
        gossiper = self.gossiper
        accounts = {v: gossiper.account(v) for v in gossiper.models}
        gives = (transfer.give for transfer in gossiper.ledger.open.values())
        return {
            "weight": {v: [a.held, a.open, a.injected] for v, a in accounts.items()},
            "open": [
                [g.receiver, g.receiver_session, g.model, g.sequence, g.weight] for g in gives
            ],
            "reclaimed": gossiper.reclaimed,
        }

    # --- checkpoints ----------------------------------------------------------------------------

    def save(self, *, durable: bool = False) -> bool:
        """Write the checkpoint, if the peer has one; False if it has to be tried again.

        durable: it must outlive a power cut. NotSaved if it could not be written for too long.
        """
        if not self._saver.save(durable=durable):
            return False
        self._saved = self.session, self.gossiper.ledger.revision
        self._heard_goodbye = False
        return True

    def _tree(self) -> dict[str, Any]:
        return {
            "peer": self.name,
            "agreed": self._agreed(),
            "samples": self.samples,
            "in_touch": mark(self.machine, self.in_touch),
            "schemas": self.schemas,
            "books": dict(self.books.__dict__),
            "ending": None if self.ending is None else dict(self.ending.__dict__),
            "network": self.network.flat,
            "store": self.store.snapshot(),
            "learner": self.learner.state(),
            "gossip": self.gossiper.snapshot(values=False),
            "trust": self.memory(),
            "releases": self._privacy.count,
            "guards": self._guards.snapshot(self.machine.monotonic()) if self._guards else {},
        }

    def _agreed(self) -> dict[str, str]:
        """Return the settings that a session cannot change, in the words of a config."""
        return {key: getattr(self.settings, key) for key in ("mode", "weights", "dtype", "trust")}

    def _restore(self) -> None:
        """Continue from the checkpoint if there is a usable one; else start a new session."""
        tree = self._saver.load(self.schemas)
        if tree is None:
            self._begin_anew()
            return
        with self._saver.fitting():
            self.network.flat.copy_(tree["network"])
            self.store.restore(tree["store"])
            self.learner.restore(tree["learner"])
            self.books, self._memory = Books(**tree["books"]), tree["trust"]
            self._privacy.restore(tree["releases"])
            if self._guards is not None:
                self._guards.restore(tree["guards"], self.machine.monotonic())
            ending = None if tree["ending"] is None else Ending(**tree["ending"])
            unfinished = ending is not None and ending.kind != "failed"
            samples = tree["samples"]
            # None if the machine was started anew since: the file may be older than what others were told.
            touched = moment(self.machine, tree["in_touch"])
            if tree["gossip"]["ledger"]["session"] not in self.books.sessions:
                self._begin_anew()  # never announced, as after leaving early: it is as good as new
                return
            if not unfinished:
                self._saver.require_agreed(tree["agreed"], self._agreed())
            self._make_gossiper(tree["gossip"])
        if unfinished:
            self.restored, self.ending = True, ending
            return
        started = bool(self.books.round) or any(self._weights().values())
        away = 0.0 if touched is None else self.machine.uptime() - touched
        if ending is not None:
            self.unsaid = None if ending.told else ending
            self._remember(ending)
            self._abandon(ending.reason)
            self._begin_anew()
        elif touched is None:
            _log.warning(
                "peer %s: cannot tell how long it was away (the machine was restarted, or its clock was set "
                "back); keeping what it learnt, in a new session",
                self.name,
            )
            self._abandon("the machine was restarted, or its clock was set back")
            self._begin_anew()
        elif away > self.settings.lease and not self._has_books():
            self._begin_anew()
        elif away > self.settings.lease:
            why = f"lease expired ({away:.0f} s > {self.settings.lease:g} s)"
            _log.warning("peer %s: %s; rejoining with a new session", self.name, why)
            self.renew(why)
        else:
            self.restored, self.returning, self.in_touch = True, started, touched
            if self.settings.mode == "async":
                self.gossiper.leaving = False  # the process that was asked to leave is no more
            self._adjust(samples)

    def _adjust(self, samples: int) -> None:
        """Let another number of samples count: the difference is injected."""
        if samples == self.samples or self.settings.weights != "samples":
            return
        _log.info(
            "peer %s: has %d samples now, and had %d: its weight changes by the difference",
            self.name, self.samples, samples,
        )  # fmt: skip
        for model, injected in self._weights().items():
            if injected:
                self.gossiper.adjust(model, self.weight)

    # --- insides --------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        self._others.apply(event)
        match event:
            case Online():
                models = event.models if self._started_together(event) else ()
                self.gossiper.peer_online(event.peer, event.session, models, leaving=event.leaving)
                self._welcome(event)
            case Offline():
                self.gossiper.peer_offline(event.peer)
            case Gone():
                self._heard_goodbye = self._heard_goodbye or event.statement is not None
                self._dispatch.gone(event.peer)
                self._privacy.gone(self.gossiper, event.peer)
                before = self.agreement.values()
                self.gossiper.peer_gone(event.peer, event.session, event.statement, event.reclaimed)
                # Old mass may have come back: then agree anew.
                self.agreement.moved(before, self.settings.settle_tolerance)

    def _started_together(self, event: Online) -> bool:
        """Return whether a session can be averaged with: in lockstep modes, none that came midway.

        It would begin at the first round, and both would wait for each other.
        """
        return (
            isinstance(self.mode, PacedMode)
            or self.books.round == self.books.earlier
            or self.gossiper.known_sessions().get(event.peer) == event.session
        )

    def _welcome(self, event: Online) -> None:
        """Push to a neighbour that waits to hear from somebody who counts, as soon as possible."""
        if isinstance(self.mode, PacedMode) and not event.leaving:
            for model in event.models:
                if model not in event.counts and not self._is_waiting(model):
                    self.mode.welcome(model, event.peer)

    def _is_waiting(self, model: str) -> bool:
        return not self.gossiper.injected(model)

    def _take(self, model: str, packet: Buffer, now: float) -> None:
        """Put one packet in; whatever is wrong with it is counted and logged, never raised."""
        message = self._intake.take(model, packet, now)
        if message is None:
            return
        self._received += 1
        if isinstance(message, Give):
            unpacked = self.gossiper.unpacked(message)
            message = message if isinstance(unpacked, str) else unpacked
            if self._opinion.hold(message, now):
                return
        self._handle(message, now)

    def _handle(self, message: Message, now: float) -> None:
        """Let the gossiper take a message in, and note what it did to agreement and masks."""
        model = message.model
        before = self.gossiper.counters["credited"]
        self.store.forget()
        self.gossiper.handle(message, now)
        mine = self.store.forget()  # as it was when the message was credited
        credited = self.gossiper.counters["credited"] > before
        if credited:
            self._privacy.credited(message.sender, model)
        if credited and isinstance(message, Give) and mine is not None:
            self.agreement.heard(model, mine, message.value)

    def _form_opinions(self, now: float) -> None:
        """Let a newcomer count at the median of what its elders hold, and only then judge them."""
        for model in self._opinion.open:
            if not self._is_waiting(model):  # founded meanwhile
                gives = self._opinion.drop(model)
            else:
                elders = sum(model in other.counts for other in self._others.online(model))
                formed = self._opinion.form(model, elders, now)
                if formed is None:
                    continue
                self.store.write(model, formed.value.astype(self.store.read(model).dtype))
                self.bootstrap.count(self.gossiper, model)
                gives = formed.gives
            for give in gives:
                self._handle(give, now)

    def _mute_quarantined(self, now: float) -> None:
        """Push nothing to peers in quarantine; they stay neighbours.

        Only where nobody waits for what is pushed: in lockstep modes a peer that was put there wrongly
        would never finish its round, nor would those who wait for it.
        """
        if self._guards is not None and self.settings.mode == "async":
            for peer in self._others.known:
                self.gossiper.mute(peer, self._guards.is_quarantined(peer, now))

    def _drop(self, cause: str, text: str) -> None:
        self.dropped[cause] += 1
        count = self.dropped[cause]
        if is_milestone(count):
            _log.warning(
                "peer %s dropped a message: %s: %s (%d so far)", self.name, cause, text, count
            )


def _make_mode(
    name: str, settings: Settings, models: Iterable[str], compression: Compression
) -> PeerMode:
    match settings.mode:
        case "async":
            return PacedMode(
                settings.exchanges, fraction=settings.fraction, turns=settings.turns,
                drift=compression.drift(),
            )  # fmt: skip
        case "rounds":
            sources = None
            if settings.sources is not None:
                sources = {model: set(settings.sources) for model in models}
            return RoundsMode(settings.exchanges, sources=sources)
        case "server":
            # A model without a server is the peer's own: it averages it by itself.
            return ServerMode(name, {model: settings.servers.get(model, name) for model in models})


def _as_float16(_model: str, value: Array) -> Array:
    return as_sent(value, wide_enough(value, "float16"))
