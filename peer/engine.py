"""The part of a peer that runs on its worker thread: network, learner, gossiper and history.

Its only IO is the checkpoint. The event loop passes received packets in and gets the packets to send back.
Before a message is sent, the state that it reveals is saved in the checkpoint (if the peer has one), so that
a process that is killed and restarted never contradicts what other peers have received. The event loop reads
only `view`, an immutable summary that every call replaces, and attributes that do not change while a session
runs or are replaced as a whole (samples, schemas, limits, the last session's goodbye); all other calls run on
the worker thread, or, if short, on the event loop while that thread is idle.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gossamer.logs import log_repeated

from ..gossip import (
    FANOUT,
    ONE,
    Array,
    Buffer,
    Give,
    Gossiper,
    Message,
    PacedMode,
    RobustMean,
    RoundsMode,
    ServerMode,
    SteadyMode,
    as_sent,
    schema_hash,
    sufficient_dtype,
    tolerated,
)
from ..gossip.security import (
    MAX_ELDERS,
    Guards,
    InitialEstimate,
    Intake,
    NullSecurity,
    SecurityLayer,
    guard,
    id_of,
)
from ..models import (
    Learner,
    Metrics,
    ModelError,
    PeerCountAware,
    Scorer,
    WeightAware,
)
from .bootstrap import Bootstrap, OtherPeers
from .exits import PeerError
from .machine import Machine, Saver, from_saved, portable_time, trim_heap, uptime_of
from .presence import Event, Goodbye, Offline, Online, Phase, SessionEnded, Statement, first_of
from .settings import Limits, Settings
from .store import Agreement, MatchedStore
from .summary import Journal
from .traffic import Compression, Dispatch, InboundLimits, Outgoing, Privacy
from .training import LocalTraining

if TYPE_CHECKING:
    from .sharing import LiveSharing

_log = logging.getLogger(__name__)

ESTIMATE_WAIT = 5.0
"""Seconds for which a newcomer with guards collects values before it starts from their median."""

PeerMode: TypeAlias = PacedMode | SteadyMode | RoundsMode | ServerMode

MAX_FORMER_SESSIONS = 64
"""Number of former sessions that a peer remembers in its checkpoint."""
SHORT_TURN_VALUES = 1 << 20
"""The largest network, in values, whose turns are short; see `Engine.has_short_turns`."""


@dataclass(frozen=True)
class View:
    """Summary of an engine for the event loop, as of the engine's last call."""

    session: str
    round: int
    """Rounds trained so far."""
    averaged: bool
    """Whether the next round may be trained: the round's averaging is over, or, in async mode, neighbours
    acknowledge pushes fast enough."""
    counting_rounds: Mapping[str, int]
    """Partial models in which the peer's weight counts (it has been added to the push-sum average), and for
    how many rounds it has counted."""
    waiting: frozenset[str]
    """Partial models in which the peer's weight does not count yet."""
    open_transfers: int
    """Number of transfers that their receivers have not acknowledged."""
    has_neighbours: bool
    """Whether any partial model has a neighbour to share it with."""
    rejection: str
    """Why this session must end, if neighbours have credibly rejected it; else empty."""
    received: int
    """Number of messages received so far."""
    plan: int
    """The number of the plan of what the swarm shares, from 1; 0 without one."""
    announcements: int
    """How often what our card says about plans has changed."""
    decided: tuple[str, ...]
    """The latest decisions that this peer has made for the swarm, a sentence each."""
    awaits_others: bool
    """Whether others must follow the same plan before the next round is trained."""
    weights: Mapping[str, float]
    """The push-sum weight that the peer holds of each partial model; 1.0 is the weight of one peer."""
    diverged: Sequence[str]
    """Partial models with values that are NaN or infinite."""
    last_end: Mapping[str, Any] | None
    """Why the peer's former session ended; see PeerHistory."""


@dataclass(frozen=True)
class Ending:
    """How a session ended. It is saved before the goodbye is published, so that a restart can finish leaving.

    kind: "finished": all rounds are trained. "left": asked to leave early. "failed": could not take part.
    statement, reclaimed, counts, phase: as in the goodbye; see presence.Status.
    told: whether the broker has accepted the goodbye.
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
class PeerHistory:
    """What a peer remembers from one session to the next; a part of its checkpoint."""

    generation: int = 1
    """1 for the first device of this name; each device that replaces another one has the next number."""
    round: int = 0
    """Rounds trained so far, in all sessions."""
    earlier: int = 0
    """Rounds trained in former sessions: in lockstep modes (rounds and server) a session counts its rounds
    from 0."""
    counted: dict[str, int] = field(default_factory=dict)
    """The round in which the peer's weight began to count, per partial model."""
    claimed: bool = False
    """Whether this device has already joined the swarm under its name."""
    sessions: list[str] = field(default_factory=list)
    """The sessions under which this device has connected to a broker, newest last."""
    goodbye: dict[str, Any] | None = None
    """The fields of the last goodbye that this device published; see presence.Goodbye."""
    abandoned: list[dict[str, Any]] = field(default_factory=list)
    """Accounts of former sessions that did not end with a report."""
    goodbyes: dict[str, str] = field(default_factory=dict)
    """Goodbyes of other peers, kept on our card for peers that were offline; see presence.Card."""
    last_end: dict[str, Any] | None = None
    """Why and when the former session ended, in the fields of summary.Ended."""


class Engine:
    """One peer's network, learner and gossiper; all methods are called from the peer's worker thread.

    samples: number of training samples, the peer's weight with `weights = "samples"`.
    checkpoint: the file from which a restarted process continues; None for no checkpoint.
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
        if contradiction := settings.contradiction():
            raise PeerError(f"peer {name}: {contradiction}")
        if settings.mode == "steady" and not isinstance(learner, Scorer):
            _log.warning(
                "peer %s: its learner has no method score, so values of other peers are bounded by their "
                "distance alone, whatever their loss", name,
            )  # fmt: skip
        self.name, self.learner, self.settings = name, learner, settings
        self.limits = limits or Limits()
        """Times and sizes that are not user settings."""
        self.machine, self.samples = machine or Machine(), samples
        self.network = learner.network
        self.store = MatchedStore(self.network, settings.matching, trained=settings.trained)
        self.training = LocalTraining(name, learner, self.store, settings)
        """What the peer trains by itself: its samples, its log-prior and its lone twin."""
        self.sharing: LiveSharing | None = None
        """Decides with the other peers which cells are shared; None if the partial models are given."""
        if settings.sharing == "auto":
            from .sharing import LiveSharing  # memory that most peers do not need

            self.sharing = LiveSharing(name, learner, self.store, settings)
        self.weight = self._weight_of(samples)
        self.history = PeerHistory()
        self.ending: Ending | None = None
        self.dropped: Counter[str] = Counter()
        self._received = 0
        self.last_contact = self._session_start = self.machine.uptime()
        """When this session was last connected to the broker, by the machine's uptime."""
        self._saver = Saver(name, settings, checkpoint, self._tree, self.machine, self.limits)
        self.has_short_turns = (
            checkpoint is None
            and settings.mode != "steady"
            and self.sharing is None
            and self.network.flat.numel() <= SHORT_TURN_VALUES
        )
        """Whether a turn takes about a millisecond: it writes no file, scores nothing, adds few values."""
        self._saved_revision: tuple[str, int] | None = None
        """The session and the revision of its ledger that the last checkpoint holds."""
        self._must_save = False
        """Whether the next turn must write a checkpoint: after a goodbye, which is not repeated and which a
        restarted broker has lost, and after a change of the plan, before others see it on our card."""
        self._unsent_messages: list[Message] = []
        """Messages that may not be sent before a checkpoint is written."""
        self._guards = None if settings.bounds is None else Guards(settings.bounds)
        self._others = OtherPeers()
        self._pushed_to_us: dict[str, tuple[str, ...]] = {}
        """The partial models that other peers push to us, of those with which we exchange values."""
        self._initial_estimate: InitialEstimate | None = None
        """Collects the first values that a newcomer receives; only with guards."""
        self._former_security: dict[str, Any] = {}
        self.security: SecurityLayer = NullSecurity(name)
        self._schemas_ever: dict[str, str] = {}
        """Schema hashes of all partial models that this session has had, except some that ended long ago."""
        self.compression = Compression(name, settings)
        """How the peer's messages are compressed."""
        self._largest_size = 0
        """Number of values of the largest partial model that this peer has had."""
        self._describe_models()
        self.journal = Journal(name, self.machine.wall)
        """What happened to the peer lately, in this process."""
        self.bootstrap = Bootstrap(name, settings, self.store, learner, self.weight, self.journal)
        self._rng = np.random.default_rng(seed)
        self.undelivered_ending: Ending | None = None
        """The ending of a former session that failed, if no broker accepted its goodbye."""
        self.restored = False
        """Whether this process continues the session of a former process."""
        self.returning = False
        """Whether the peer took part before, in this session or in a former one."""
        self._restore()
        if isinstance(learner, WeightAware):
            learner.weight_of = lambda model: self.gossiper.weight(model) / ONE
        if isinstance(learner, PeerCountAware):
            learner.peers_seen = lambda: 1 + len(self._others.known)
        self.view = self._make_view()

    gossiper: Gossiper
    mode: PeerMode

    def _describe_models(self) -> None:
        """Make everything that depends on which partial models there are, and on their sizes."""
        name, settings, store = self.name, self.settings, self.store
        self.schema_entries = {model: store.schema(model) for model in store.names()}
        """Per partial model: names and shapes of the parameters in its vector, as published on the card."""
        self.schemas = {model: schema_hash(each) for model, each in self.schema_entries.items()}
        # Transfers of former models are still acknowledged, repeated and taken back.
        self._schemas_ever = {**self._schemas_ever, **self.schemas}
        sizes = {model: store.read(model).size for model in self.schemas}
        self._largest_size = max([self._largest_size, *sizes.values()])
        self.inbound_limits = InboundLimits(name, sizes, settings.dtype, self._largest_size)
        """How many bytes of received packets may wait, and of which size."""
        self._reassembler = self.inbound_limits.make_reassembler(len(self._others.known))
        self._privacy = Privacy(name, settings, self.schemas)
        exact = store.extra.keys()  # a plan decides by small differences of what peers measure
        self.compression.set_models(self.schema_entries, sizes, exact)
        self._dispatch = Dispatch(
            name, self._schemas_ever, settings.dtype, self.compression, self.security,
            self.limits.max_pieces,
        )  # fmt: skip
        self.set_security(self.security)
        if self._guards is not None:
            self._guards.forget_models(self.schemas)
        # Peers need not agree on what they measure.
        self.agreement = Agreement(self.schemas.keys() - store.extra.keys(), store)

    @property
    def session(self) -> str:
        """The current session."""
        return self.gossiper.session

    @property
    def must_leave(self) -> bool:
        """Whether a former process was killed while it handed over its mass in a lockstep mode.

        It has no mass to average with before the next round, so this process must finish leaving.
        """
        return self.restored and self.ending is None and self.gossiper.leaving

    def _make_view(self) -> View:
        gossiper = self.gossiper
        waiting = frozenset(filter(self._is_waiting, gossiper.models))
        counted = self.history.counted
        for model in gossiper.models:
            if model not in waiting:
                counted.setdefault(model, self.history.round)
        return View(
            session=gossiper.session,
            round=self.history.round,
            averaged=self._is_averaged(),
            counting_rounds={m: self.history.round - since for m, since in sorted(counted.items())},
            waiting=waiting,
            open_transfers=len(gossiper.ledger.open),
            has_neighbours=any(gossiper.neighbours(model) for model in gossiper.models),
            rejection=self._rejection(),
            received=self._received,
            plan=0 if self.sharing is None else self.sharing.plan_number,
            announcements=0 if self.sharing is None else self.sharing.announcements,
            decided=() if self.sharing is None else self.sharing.sentences,
            awaits_others=self.sharing is not None
            and self.sharing.awaits_others(self._others.online_now()),
            weights={model: gossiper.weight(model) / ONE for model in gossiper.models},
            diverged=gossiper.diverged,
            last_end=self.history.last_end,
        )

    # --- the start of a session -----------------------------------------------------------------

    def set_security(self, security: SecurityLayer) -> None:
        """Encrypt and decrypt packets with the security layer of a new session."""
        if security is not self.security:
            self.dropped.update(self.security.counters)
        self.security = security
        security.set_models(self.schemas, self._schemas_ever)
        self._dispatch.set_security(security)
        self._intake = Intake(
            security, self._schemas_ever,
            guards=self._guards, reassembler=self._reassembler, drop=self._drop,
        )  # fmt: skip

    def security_memory(self) -> dict[str, Any]:
        """Return what the security layer of the next session must remember from former sessions."""
        return self.security.snapshot() or self._former_security

    def record_session(self) -> None:
        """Note the session before it connects: the broker may publish its last will after a crash."""
        history = self.history
        if self.session not in history.sessions:
            history.sessions = [*history.sessions, self.session][-MAX_FORMER_SESSIONS:]

    def open_session(self, session_began: float, generation: int) -> dict[str, str]:
        """Prepare the session that is about to be announced; return digests of its starting values.

        session_began: by the wall clock, as on its card. generation: see PeerHistory.
        """
        self.history.generation, self.history.claimed = generation, True
        self.undelivered_ending = None
        self._count_in_means()
        start_digests = self.bootstrap.begin_session(self.gossiper, session_began)
        self._collect_initial_values()
        return start_digests

    def _collect_initial_values(self) -> None:
        """With guards, and in steady mode, let a newcomer collect values before it judges any.

        It cannot judge them by its untrained ones.
        """
        steady = self.settings.mode == "steady"
        collects = self.settings.paced and (self._guards or steady) and not self.store.is_staging
        self._initial_estimate = None
        if collects:
            sizes = {model: self.store.read(model).size for model in self.bootstrap.waiting}
            # In steady mode hostile members may be a third: of 2b+1 values a majority is honest.
            others = len(self.settings.neighbours or self._others.known)
            elders = 2 * tolerated(self.settings.hostile, others) + 1 if steady else MAX_ELDERS
            self._initial_estimate = InitialEstimate(sizes, max_elders=elders, wait=ESTIMATE_WAIT)

    def _count_in_means(self) -> None:
        """Let the peer's weight count at once where measured values are averaged; others need not have it."""
        for model in self.store.extra:
            if not self.gossiper.injected(model):
                self.gossiper.inject(model, self.weight)

    def begin(self, now: float, *, as_founder: bool, all_online: bool) -> None:
        """Let the peer's own weight count as soon as that is allowed; see Bootstrap.start_deciding."""
        self.bootstrap.start_deciding(
            self.gossiper, now, as_founder=as_founder, all_online=all_online
        )
        self.view = self._make_view()

    def neighbours_are_ahead(self) -> bool:
        """Return whether a neighbour has trained more than one round: then the swarm started without us."""
        return any(
            rounds > 1 and model in other.models
            for other in self._others.known.values()
            for model, rounds in other.counting_rounds.items()
        )

    def inject_everywhere(self) -> None:
        """Let the peer's own weight count in all models without waiting any longer: training is over."""
        self.bootstrap.inject_everywhere(self.gossiper)
        self.view = self._make_view()

    def _rejection(self) -> str:
        """Return which neighbour rejected this session and why; empty if none did so credibly.

        A rejection is believed right after a restart (the checkpoint may be stale), when all neighbours
        that can be reached agree on it, and otherwise once per lease, so that a malicious neighbour cannot
        force repeated resets.
        """
        rejections = self.gossiper.rejections
        if not rejections:
            return ""
        gossiper = self.gossiper
        reachable = {p for m in gossiper.models for p in gossiper.reachable_neighbours(m)}
        age = self.machine.uptime() - self._session_start
        unanimous = bool(reachable) and reachable <= rejections.keys()
        if self.restored or age > self.settings.full_lease or unanimous:
            return next(iter(rejections.values()))
        return ""

    def start_new_session(self, reason: str) -> None:
        """Abandon the session for this reason, and start a new one with the same values and no mass."""
        if not self.settings.paced:
            raise PeerError(
                f"peer {self.name}: {reason}, and {self.settings.mode} mode cannot be joined midway; raise "
                f"the lease of {self.settings.full_lease:g} s"
            )
        self._record_abandoned(reason)
        self._begin_new_session()
        self.journal.add("rejoined", f"rejoins with a new session: {reason}", log=False)
        self.view = self._make_view()

    def _record_abandoned(self, reason: str) -> None:
        """Add the accounts of a session that will have no report of its own to the history."""
        self._note_end("lost", reason, self.machine.wall())
        if self._has_accounts():
            account = {"session": self.session, "reason": reason, **self._accounts()}
            self.history.abandoned = [*self.history.abandoned, account][-MAX_FORMER_SESSIONS:]

    def _note_end(self, kind: str, reason: str, when: float) -> None:
        """Remember why a session ended, for the next one's summary."""
        self.history.last_end = {"kind": kind, "reason": reason, "time": when}

    def _has_accounts(self) -> bool:
        """Return whether this session has made transfers, or has weight that counts."""
        return bool(self.gossiper.ledger.revision) or self._counts_anywhere()

    def _counts_anywhere(self) -> bool:
        """Return whether the peer's weight counts in a partial model; measured values always have it."""
        injected = self._injected_weights()
        return any(injected[model] for model in injected.keys() - self.store.extra.keys())

    def _injected_weights(self) -> dict[str, int]:
        return {model: self.gossiper.injected(model) for model in self.gossiper.models}

    def _begin_new_session(self) -> None:
        """Reset everything that belongs to one session; values, rounds and history stay."""
        self.training.reset()
        if self.sharing is not None:
            self.sharing.reset()
        self._make_gossiper()
        self.restored, self.returning, self.ending = False, self.history.round > 0, None
        self.last_contact = self._session_start = self.machine.uptime()
        self.history.earlier = self.history.round
        self.history.counted = {}
        self.bootstrap.reset()
        self._others.clear()
        self._pushed_to_us.clear()
        self._unsent_messages.clear()
        self._dispatch.reset()
        self.agreement.forget()

    def _make_gossiper(self, snapshot: dict[str, Any] | None = None) -> None:
        """Make the gossiper and the mode of a new session, or restore those of a snapshot."""
        links = self.compression.links
        self.mode = self._make_mode()
        options: dict[str, Any] = {
            "mode": self.mode,
            "seed": self._rng,
            "retry": self.limits.retry,
            "lossy": self._as_float16 if self.settings.dtype == "float16" else None,
            "links": links,
        }
        if snapshot is None:
            links.forget()  # receivers do not have the compression state of an older session
            session = self.machine.new_session()
            self.gossiper = Gossiper(self.name, session, self.store, **options)
        else:
            self.gossiper = Gossiper.restore(snapshot, self.store, **options)
        self.gossiper.refuses = self.is_banned
        self.gossiper.observe = lambda give, own, distance: self.agreement.add(
            give.model, own, distance
        )
        if self._guards is not None:
            # What peers measure differs from peer to peer.
            guard(
                self.gossiper, self._guards,
                comparable=lambda model: model not in self.store.extra, weight_to_come=self.weight,
            )  # fmt: skip

    def _make_mode(self) -> PeerMode:
        settings = self.settings
        robust = (
            None if settings.robust == "none" else RobustMean(settings.robust, settings.hostile)
        )
        match settings.mode:
            case "steady":
                fanout = settings.exchanges if "exchanges" in settings.model_fields_set else FANOUT
                return SteadyMode(fanout, hostile=settings.hostile, score=self._score, key_of=id_of)
            case "async":
                return PacedMode(
                    settings.exchanges, fraction=settings.fraction,
                    neighbours_by_push=settings.turns, drift=self.compression.drift(),
                )  # fmt: skip
            case "rounds":
                sources = None if settings.sources is None else self._sources_of
                return RoundsMode(settings.exchanges, sources=sources, robust=robust)
            case "server":
                servers = {model: self._server_of(model) for model in self.schemas}
                return ServerMode(self.name, servers, self._server_of, robust=robust)

    def _sources_of(self, model: str) -> list[str]:
        """Return the in-neighbours on a directed graph that push a model to us, in rounds mode."""
        return [p for p in self.settings.sources or () if model in self._pushed_to_us.get(p, ())]

    def _score(self, model: str, value: Array | None) -> float:
        """Return the loss on own samples with a value of a model, or the own one for None; see Score."""
        learner = self.learner
        if not isinstance(learner, Scorer):
            return math.nan
        return learner.score({} if value is None else {model: value})

    def _server_of(self, model: str) -> str:
        """Return the peer that averages a model in server mode: this one, if the model is local."""
        if self.sharing is not None:
            return self.sharing.server_of(model)
        if model in self.store.extra:
            return first_of({*self.settings.expect, self.name})
        return self.settings.servers.get(model, self.name)

    def _as_float16(self, model: str, value: Array) -> Array:
        """Return a value as its receiver decodes it from float16."""
        is_exact = self.compression.links.is_exact(model)
        return value if is_exact else as_sent(value, sufficient_dtype(value, "float16"))

    # --- training and turns ---------------------------------------------------------------------

    def _follow_plan(self) -> None:
        """Follow the newest plan of what the swarm shares: some partial models end, others begin.

        Weight counts in new models at once, at the present values, unless the peer has not started yet.
        """
        if self.sharing is None:
            return
        announced = self.sharing.announcements
        models_change = self.sharing.follow()
        self._must_save |= self.sharing.announcements != announced
        if not models_change:
            return
        has_started = not self.bootstrap.waiting
        self._describe_models()
        self.gossiper.update_models()
        known = {*self.gossiper.models, *self.gossiper.retired_models}
        for model in self._schemas_ever.keys() - known:
            del self._schemas_ever[model]
        self._count_in_means()
        for model in self.gossiper.models:
            if has_started and not self.gossiper.injected(model):
                self.gossiper.inject(model, self.weight)
        self.bootstrap.update_models(self.gossiper)
        self._collect_initial_values()
        models = self.gossiper.models
        counted = self.history.counted
        self.history.counted = {m: since for m, since in counted.items() if m in models}

    def announced_plan(self) -> tuple[dict[str, Any] | None, frozenset[str]] | None:
        """Return the plan that is followed, for the card, and the models that groups of peers share.

        None while the checkpoint lacks that plan: after a crash, the peer would contradict its card.
        """
        assert self.sharing is not None
        if self._must_save:
            return None
        return self.sharing.as_card_entry(), self.sharing.group_models

    def begin_round(self) -> None:
        """Prepare a round: set the log-prior, and follow the newest plan of what the swarm shares."""
        self.training.after_averaging(1 + len(self._others.known))
        if self.sharing is not None:
            if isinstance(self.mode, PacedMode):
                self.sharing.after_averaging(self.history.round, self._others.online_now())
            self._follow_plan()
            self.view = self._make_view()

    def train(self) -> Metrics:
        """Train one round, then begin the round's averaging (rounds and server mode) or push (async mode).

        In async mode the pushes are made before packets that arrived during training are processed: their
        mass must stay here for the next round, or it would be passed on for ever without being trained.
        """
        trim_heap()  # return what gossip has freed since the last round
        self.training.take_samples()
        before = self._privacy.values_before_training(self.network)
        if self.sharing is not None:
            self.sharing.before_training()
        metrics = self.learner.train(self.settings.every)
        self._privacy.release(self.network, before)
        self.history.round += 1
        self.training.after_training(self.gossiper)
        if self.sharing is not None:
            self.sharing.after_training(metrics, self.gossiper)
        if isinstance(self.mode, RoundsMode | ServerMode):
            number = self.history.round - self.history.earlier - 1
            self._privacy.begin_round(self.gossiper, number, self.security)
            self.mode.begin_round(self.gossiper, number)
        else:
            self.mode.request()
            self.gossiper.tick(self.machine.monotonic())
        self.view = self._make_view()
        return metrics

    def _is_averaged(self) -> bool:
        if isinstance(self.mode, RoundsMode | ServerMode):
            number = self.history.round - self.history.earlier - 1
            is_finished = number < 0 or self.mode.finished(number)
            if is_finished:
                self._privacy.end_round()
                if self.sharing is not None:
                    return not self.sharing.awaits_plan(self.history.round)
            return is_finished
        return self.mode.caught_up(self.gossiper)

    def request_push(self) -> None:
        """Async mode: push every model once more, without training."""
        if isinstance(self.mode, PacedMode):
            # Quantized at most: after training peers should agree up to settle_tolerance.
            self.compression.links.dense = True
            self.mode.request(ignore_drift=True)

    def turn(
        self,
        packets: Sequence[tuple[str, bytes | memoryview]],
        events: Sequence[Event],
        now: float,
        max_packet: int,
        last_contact: float | None = None,
    ) -> list[Outgoing]:
        """Process received packets and presence events, do what is due by `now`, and return what to send.

        packets: the partial model and the bytes of each. max_packet: bytes of the largest packet to send.
        last_contact: when we were last connected to the broker, by the machine's uptime.
        """
        if last_contact is not None:
            self.last_contact = last_contact
        # A peer that is given up does not say what it credited, so its acknowledgements that have arrived are
        # read first: what it passed on would exist twice if we took it back.
        given_up = (
            i for i, e in enumerate(events) if isinstance(e, SessionEnded) and e.statement is None
        )
        before_packets = next(given_up, len(events))
        for event in events[:before_packets]:
            self._apply(event)
        if events:
            self.inbound_limits.adjust(self._reassembler, len(self._others.known))
        if self.bootstrap.waiting and not self.history.round:
            self._follow_plan()  # a newcomer: others have a plan already
        for model, packet in packets:
            self._receive(model, packet, now)
        for event in events[before_packets:]:
            self._apply(event)
        self._start_from_initial_estimates(now)
        self.bootstrap.update(self.gossiper, self._others, now)
        self.gossiper.tick(now)
        if self.sharing is not None and isinstance(self.mode, RoundsMode | ServerMode):
            number = self.history.round - self.history.earlier - 1
            if not self.bootstrap.waiting and (number < 0 or self.mode.finished(number)):
                self.sharing.after_averaging(self.history.round, self._others.online_now())
        messages = self._save_before_sending([*self._unsent_messages, *self.gossiper.poll()])
        outgoing = self._dispatch.pack(messages, self.session, max_packet)
        self.view = self._make_view()
        return outgoing

    def _save_before_sending(self, messages: list[Message]) -> list[Message]:
        """Write a checkpoint if one is needed; return all messages, or none if it could not be written."""
        self._unsent_messages = []
        revision = (self.session, self.gossiper.ledger.revision)
        if (messages and self._saved_revision != revision) or self._must_save:
            if not self.save():
                self._unsent_messages = messages  # until `save` succeeds or raises
                return []
        else:
            self._saver.save_periodically(self.history.round)
        return messages

    # --- the end of a session -------------------------------------------------------------------

    def hand_over(self) -> bool:
        """Give all mass to neighbours that stay; return True when nothing is left that one could take.

        Open transfers to peers that cannot be reached are taken back first.
        """
        gossiper = self.gossiper
        gossiper.reclaim(stranded_only=True)
        if not gossiper.closed and not gossiper.leaving:
            gossiper.hand_over(self.machine.monotonic())
        has_transferable_mass = not gossiper.closed and any(
            gossiper.weight(model)
            and set(gossiper.heirs(model)).intersection(gossiper.reachable_neighbours(model))
            for model in gossiper.models
        )
        self.view = self._make_view()
        return not gossiper.ledger.open and not has_transferable_mass

    def end(
        self,
        kind: str,
        reason: str,
        phase: Phase,
        report: dict[str, Any],
        events: Sequence[Event] = (),
    ) -> None:
        """Set `ending`; `save` must succeed before the goodbye is published.

        Open transfers are taken back, and the goodbye lists them. kind: see Ending.
        report: the event loop's part of the report. events: presence events since the last turn; a goodbye
        among them decides whether its sender has credited our open transfers.
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
            dict(self._make_view().counting_rounds),
            {**report, **self.report(), "ended": kind, "reason": reason},
        )

    def amend(self, events: Sequence[Event]) -> bool:
        """Apply goodbyes that reached the broker before our own; return whether they change our ending.

        Of two peers that leave at the same time, the one whose goodbye reaches the broker first decides what
        became of the transfers between them; the other peer amends its ending accordingly.
        """
        assert self.ending is not None
        before = self._accounts(), self.gossiper.statement()
        for event in events:
            if isinstance(event, SessionEnded):
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

    def confirm_goodbye(self) -> None:
        """Note that the broker has accepted the goodbye."""
        assert self.ending is not None
        self.ending = replace(self.ending, told=True)

    def finish(self) -> None:
        """Clean up after a session whose report is written.

        A peer that has trained all its rounds removes its checkpoint. A peer that left early keeps it with
        its values, and starts a new session from them, with new weight, when it is started again.
        """
        assert self.ending is not None
        if self.ending.kind == "finished":
            self._saver.remove()
        elif self.ending.kind == "left":
            self._note_end("left", self.ending.reason, self.machine.wall())
            self._remember_goodbye(self.ending)
            self._begin_new_session()
            self._saver.save()

    @property
    def last_session_goodbye(self) -> Goodbye | None:
        """The goodbye of this device's last session, for the card of the next."""
        goodbye = self.history.goodbye
        return None if goodbye is None else from_saved(Goodbye, goodbye)

    def keep_goodbyes(self, goodbyes: dict[str, str]) -> None:
        """Keep these goodbyes of other peers; the next turn writes them to the checkpoint."""
        self.history.goodbyes, self._must_save = goodbyes, True

    def _remember_goodbye(self, ending: Ending) -> None:
        """Keep a goodbye for the next session's card: the next status will replace it at the broker."""
        self.history.goodbye = {
            "session": self.session,
            "statement": ending.statement,
            "reclaimed": ending.reclaimed,
        }

    def report(self) -> dict[str, Any]:
        """Return the accounts of the peer's weight and all counters, as JSON-friendly data."""
        guard_counters = {} if self._guards is None else self._guards.counters
        refused = {f"guards-{cause}": count for cause, count in guard_counters.items()}
        return {
            "peer": self.name,
            "session": self.session,
            "rounds": self.history.round,
            **self._accounts(),
            "abandoned": list(self.history.abandoned),
            "gossip": dict(self.gossiper.counters),
            "privacy": self._privacy.report(),
            "compression": self.compression.report(),
            "sharing": None if self.sharing is None else self.sharing.report(),
            "dropped": dict(self.dropped + self.security.counters + Counter(refused)),
        }

    def _accounts(self) -> dict[str, Any]:
        """Return where the peer's weight is: held, in open transfers, or taken back from transfers."""
        gossiper = self.gossiper
        models = (*gossiper.models, *gossiper.retired_models)
        accounts = {model: gossiper.account(model) for model in models}
        gives = (transfer.give for transfer in gossiper.ledger.open.values())
        if (forgotten := gossiper.forgotten).injected:
            accounts["ended models"] = forgotten
        return {
            "weight": {model: [a.held, a.open, a.injected] for model, a in accounts.items()},
            "open": [
                [g.receiver, g.receiver_session, g.model, g.sequence, g.weight] for g in gives
            ],
            "reclaimed": gossiper.reclaimed,
        }

    # --- checkpoints ----------------------------------------------------------------------------

    def save(self, *, durable: bool = False) -> bool:
        """Write the checkpoint, if the peer has one; return False if the caller must try again.

        durable: the file must survive a power failure. Raises NotSaved once saving has failed for too long.
        """
        if not self._saver.save(durable=durable):
            return False
        self._saved_revision = self.session, self.gossiper.ledger.revision
        self._must_save = False
        return True

    def _tree(self) -> dict[str, Any]:
        """Return the data of a checkpoint; its keys are part of the file format."""
        return {
            "peer": self.name,
            "agreed": self._session_settings(),
            "samples": self.samples,
            "in_touch": portable_time(self.machine, self.last_contact),
            "schemas": self.schemas,
            "schemas_ever": self._schemas_ever,
            "books": dict(self.history.__dict__),
            "ending": None if self.ending is None else dict(self.ending.__dict__),
            "network": self.network.flat,
            "store": self.store.snapshot(),
            "sharing": None if self.sharing is None else self.sharing.snapshot(),
            "learner": self.learner.state(),
            "gossip": self.gossiper.snapshot(values=False),
            "trust": self.security_memory(),
            "releases": self._privacy.count,
            **({} if self.sharing is None else {"largest_size": self._largest_size}),
            **self.training.snapshot(),
        }

    def _session_settings(self) -> dict[str, str]:
        """Return the settings that must stay the same for a whole session."""
        return {key: getattr(self.settings, key) for key in ("mode", "weights", "dtype", "trust")}

    def _restore(self) -> None:
        """Continue from the checkpoint if there is a usable one; else start a new session."""
        tree = self._saver.load()
        if tree is None:
            self._begin_new_session()
            return
        with self._saver.checkpoint_errors():
            if self.sharing is not None:
                self.sharing.restore(tree["sharing"])
                self._schemas_ever = dict(tree["schemas_ever"])
                self._largest_size = tree.get("largest_size", 0)
                self._describe_models()
            self._saver.require_same_models(tree, self.schemas)
            self.network.flat.copy_(tree["network"])
            self.store.restore(tree["store"])
            self.learner.restore(tree["learner"])
            self.history = from_saved(PeerHistory, tree["books"])
            self._former_security = tree["trust"]
            self.training.restore(tree, self.history.round)
            self._privacy.restore(tree["releases"])
            ending = None if tree["ending"] is None else from_saved(Ending, tree["ending"])
            unfinished = ending is not None and ending.kind != "failed"
            former_samples = tree["samples"]
            # None after a reboot: the file may then be older than what other peers have received.
            last_contact = uptime_of(self.machine, tree["in_touch"])
            if tree["gossip"]["ledger"]["session"] not in self.history.sessions:
                self._begin_new_session()  # the saved session never connected, as after leaving early
                return
            if not unfinished:
                self._saver.require_same_settings(tree["agreed"], self._session_settings())
            self._make_gossiper(tree["gossip"])
        if unfinished:
            self.restored, self.ending = True, ending
            return
        has_started = bool(self.history.round) or self._counts_anywhere()
        offline_seconds = 0.0 if last_contact is None else self.machine.uptime() - last_contact
        if ending is not None:
            self.undelivered_ending = None if ending.told else ending
            self._remember_goodbye(ending)
            self._record_abandoned(ending.reason)
            self._note_end(ending.kind, ending.reason, tree["in_touch"]["wall"])
            self._begin_new_session()
        elif last_contact is None:
            _log.warning(
                "peer %s: cannot tell how long it was away (the machine was restarted, or its clock was set "
                "back); rejoining with the same values in a new session",
                self.name,
            )
            self._record_abandoned("the machine was restarted, or its clock was set back")
            self._begin_new_session()
        elif offline_seconds > self.settings.full_lease and not self._has_accounts():
            self._begin_new_session()
        elif offline_seconds > self.settings.full_lease:
            reason = f"lease expired ({offline_seconds:.0f} s > {self.settings.full_lease:g} s)"
            _log.warning("peer %s: %s; rejoining with a new session", self.name, reason)
            self.start_new_session(reason)
        else:
            self.restored, self.returning, self.last_contact = True, has_started, last_contact
            reason = "its process ended without a goodbye"
            self._note_end("lost", reason, tree["in_touch"]["wall"])
            text = f"continues after round {self.history.round}: {reason}"
            self.journal.add("restarted", text, log=False)
            if self.settings.paced:
                self.gossiper.leaving = False  # only the former process was asked to leave
            self._adjust_weight(former_samples)

    def _adjust_weight(self, former_samples: int) -> None:
        """Inject the difference in weight if the number of samples has changed since the checkpoint."""
        if former_samples == self.samples or self.settings.weights != "samples":
            return
        _log.info(
            "peer %s: number of samples changed from %d to %d; its weight is adjusted",
            self.name, former_samples, self.samples,
        )  # fmt: skip
        for model, injected in self._injected_weights().items():
            if injected:
                self.gossiper.adjust(model, self.weight)

    # --- events and messages --------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        self._others.apply(event)
        match event:
            case Online():
                self._note_plan(event)
                is_banned = self.is_banned(event.peer)
                exchanges = self._started_together(event) and not is_banned
                models = event.models if exchanges else ()
                self._pushed_to_us[event.peer] = event.models_pushed_to_us if exchanges else ()
                if is_banned and event.peer not in self.gossiper.known_sessions():
                    text = f"exchanges nothing with peer {event.peer}: it is banned here"
                    self.journal.add("banned", text, peer=event.peer)
                self.gossiper.peer_online(
                    event.peer, event.session, models, leaving=event.leaving,
                    weight=self._weight_of(event.samples),
                )  # fmt: skip
                self._welcome(event)
            case Offline():
                self.gossiper.peer_offline(event.peer)
            case SessionEnded():
                self._must_save = self._must_save or event.statement is not None
                if event.peer not in self._others.known:
                    self._pushed_to_us.pop(event.peer, None)
                self._dispatch.forget_peer(event.peer)
                self._privacy.remove_masks(self.gossiper, event.peer)
                before = self.agreement.values()
                self.gossiper.peer_gone(event.peer, event.session, event.statement, event.reclaimed)
                # Mass that was taken back may have changed our values: then agreement must be reached again.
                self.agreement.reset_changed(before, self.settings.settle_tolerance)

    def _weight_of(self, samples: int) -> int:
        """Return the weight that a peer with so many samples has in averages."""
        return ONE * (samples if self.settings.weights == "samples" else 1)

    def _note_plan(self, event: Online) -> None:
        if self.sharing is None or event.plan is None:
            return
        try:
            self.sharing.read_card_entry(event.peer, event.plan)
        except ModelError as error:
            self._drop("plan", f"{event.peer}: {error}")

    def _started_together(self, event: Online) -> bool:
        """Return whether a session may be averaged with: in lockstep modes, only if it did not join midway.

        A session that joins midway starts at the first round, and both peers would wait for each other.
        """
        return (
            isinstance(self.mode, PacedMode | SteadyMode)
            or self.history.round == self.history.earlier
            or self.gossiper.known_sessions().get(event.peer) == event.session
        )

    def _welcome(self, event: Online) -> None:
        """Push as soon as possible to a neighbour that waits for its first value of a model."""
        if isinstance(self.mode, PacedMode | SteadyMode) and not event.leaving:
            for model in event.models:
                if model not in event.counting_rounds and not self._is_waiting(model):
                    self.mode.welcome(model, event.peer)

    def _is_waiting(self, model: str) -> bool:
        return not self.gossiper.injected(model)

    def _receive(self, model: str, packet: Buffer, now: float) -> None:
        """Process one packet; an invalid packet is counted and logged, never raised."""
        message = self._intake.take(model, packet, now)
        if message is None:
            return
        self._received += 1
        if isinstance(message, Give) and self._initial_estimate is not None:
            unpacked = self.gossiper.unpacked(message)
            message = message if isinstance(unpacked, str) else unpacked
            if self._initial_estimate.hold(message, now):
                return
        self._handle(message, now)

    def _handle(self, message: Message, now: float) -> None:
        """Pass a message to the gossiper; if it was credited, update the masks."""
        before = self.gossiper.counters["credited"]
        self.gossiper.handle(message, now)
        if self.gossiper.counters["credited"] > before:
            self._privacy.note_credited(message.sender, message.model)

    def _start_from_initial_estimates(self, now: float) -> None:
        """Start a newcomer's models from the median of the values collected so far; see InitialEstimate.

        Only then are the collected messages handled, so that guards judge them by that median.
        """
        if self._initial_estimate is None:
            return
        for model in self._initial_estimate.pending:
            if not self._is_waiting(model):  # the peer has founded the model meanwhile
                gives = self._initial_estimate.drop(model)
            else:
                counting = sum(
                    model in other.counting_rounds for other in self._others.online_senders(model)
                )
                estimate = self._initial_estimate.estimate(model, counting, now)
                if estimate is None:
                    continue
                self.store.write(model, estimate.value.astype(self.store.read(model).dtype))
                self.bootstrap.inject(self.gossiper, model)
                self.journal.add("counted", f"begins to count in {model}, at received values")
                gives = estimate.gives
            for give in gives:
                self._handle(give, now)

    def is_banned(self, peer: str) -> bool:
        """Return whether the settings ban a peer: by its name, or by the id in it."""
        banned = self.settings.banned
        return bool(banned) and not {peer, id_of(peer)}.isdisjoint(banned)

    def _drop(self, cause: str, text: str) -> None:
        """Count a dropped message; log only some of many."""
        # While peers change what they share, one may push what another does not have yet; it repeats it.
        expected = cause == "unknown-model" and self.sharing is not None
        log_repeated(
            _log, self.dropped, cause, "peer %s dropped a message: %s: %s", self.name, cause, text,
            level=logging.INFO if expected else logging.WARNING,
        )  # fmt: skip
