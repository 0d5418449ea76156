"""What happens on a peer's own thread: training, gossip turns, checkpoints. No IO but the checkpoint.

The event loop hands in what arrived and gets back what to send. Every message that leaves was
covered by a checkpoint first (if the peer has one), so that a killed process forgets nothing that
anybody was told.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..gossip.messages import Give
from ..gossip.modes_paced import PacedMode
from ..gossip.modes_rounds import RoundsMode
from ..gossip.modes_server import ServerMode
from ..gossip.pushsum import ONE
from ..gossip.trust import NoTrust, Trusting
from ..gossip.trust.intake import Intake
from ..gossip.wire import Buffer
from ..models import Learner, Metrics, Weighted
from .agreement import Agreement
from .allocator import give_back
from .arrival import Arrival, PeerGuards
from .clock import clock, mark
from .compression import Compression
from .errors import PeerError
from .matched_store import MatchedStore
from .outgoing import Dispatch, Outgoing
from .presence import Event, Gone, Offline, Online
from .privacy import Privacy
from .room import Room
from .saving import Saver
from .sessions import Sessions
from .settings import Settings
from .store import schema_hashes

_log = logging.getLogger(__name__)


class Engine:
    """One peer's network, learner and gossiper, driven from one thread.

    max_packet: the largest payload that the transport takes.
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
    ):
        self.name, self.learner, self.settings = name, learner, settings
        self.network = learner.network
        self.store = MatchedStore(self.network, settings.matching, trained=settings.trained)
        self.schemas = schema_hashes(self.network, self.store.common)
        self.weight = ONE * (samples if settings.weights == "samples" else 1)
        self.round = 0
        """Rounds trained so far."""
        self._earlier = 0
        """How many of them in former sessions: lockstep modes count from the start of their own."""
        self._over = False
        """Whether this session has said goodbye, or is about to."""
        self.dropped: Counter[str] = Counter()
        self.received = 0
        """Messages taken in so far."""
        self.in_touch = self._began = clock()
        """When the others could last hear of this session, by `clock`; and when it began."""
        self._saver = Saver(name, settings, checkpoint, self._tree)
        self._saved: tuple[str, int] | None = None
        """The session, and how much it had promised to others, when it was last saved."""
        sizes = {vector: self.store.read(vector).size for vector in self.schemas}
        self.room = Room(name, sizes, settings.dtype)
        """How much of what others send may wait."""
        self._reassembler = self.room.reassembler()
        self._guards = None
        if settings.bounds is not None:
            self._guards = PeerGuards(settings.bounds, on_change=self._shun)
            self._guards.weight = self.weight
        self._privacy = Privacy(name, settings, self.schemas)
        self.compression = Compression(
            name, settings,
            {vector: self.store.entries(vector) for vector in self.schemas},
            sizes,
        )  # fmt: skip
        self._met: dict[str, Online] = {}
        """The peers that can be reached now, as presence announced them."""
        self._shunned: set[str] = set()
        self._memory: dict[str, Any] = {}
        self.trust: Trusting = NoTrust(name)
        self._dispatch = Dispatch(name, self.schemas, settings.dtype, self.compression, self.trust)
        self.set_trust(self.trust)
        self._agreement = Agreement(self.schemas, self.store)
        self._arrival = Arrival(name, settings, self.store, learner, self.weight)
        self._sessions = Sessions(
            name, settings, self.schemas, self.store,
            compression=self.compression, guards=self._guards, seed=seed,
        )  # fmt: skip
        self.lived = False
        """Whether the peer was in the swarm before: a crash or a lost lease lies behind it."""
        self.restored = self._restore()
        """Whether it goes on in the session of its former life."""
        if isinstance(learner, Weighted):
            learner.weight_of = lambda vector: self.gossiper.weight(vector) / ONE
        self.averaged = self._is_averaged()
        """Whether to go on training, as of the last turn: the round's averaging is over, or, in async
        mode, neighbours keep up with what is pushed to them. Any thread may look."""

    @property
    def session(self) -> str:
        """The name of this life of the peer's books."""
        return self.gossiper.session

    # --- life -----------------------------------------------------------------------------------

    def set_trust(self, trust: Trusting) -> None:
        """Seal and open with the trust of a new session."""
        if trust is not self.trust:
            self.dropped.update(self.trust.counters)
        self.trust = trust
        self._dispatch.set_trust(trust)
        self._intake = Intake(
            trust, self.schemas,
            guards=self._guards, reassembler=self._reassembler, drop=self._drop,
        )  # fmt: skip

    def memory(self) -> dict[str, Any]:
        """What the trust of a next session should remember of the ones before."""
        return self.trust.snapshot() or self._memory

    def found(self, newcomer: bool) -> None:
        """Let the peer's own weight count: at once, or after hearing from a neighbour."""
        self._arrival.begin(self.gossiper, newcomer)
        self.save()

    def counts(self) -> bool:
        """Whether the peer's own weight counts in everything that it shares."""
        return all(self.gossiper.account(vector).injected for vector in self.gossiper.vectors)

    def disowned(self) -> str:
        """Why this session is over, if a neighbour said so and is to be believed: after a restart, when
        our books may be old, and else once in a lease, or liars could make us lose our mass all the time.
        """
        believed = self.restored or clock() - self._began > self.settings.lease
        return self.gossiper.disowned if believed else ""

    def renew(self, why: str = "was away for longer than its lease") -> None:
        """Start a new session with the values of the old one, whose mass counts no more."""
        if self.settings.mode != "async":
            raise PeerError(
                f"peer {self.name}: {why}, and {self.settings.mode} mode cannot be joined midway; raise "
                f"the lease of {self.settings.lease:g} s"
            )
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.gossiper, self.mode = self._sessions.begin()
        self.lived, self.restored = True, False
        self.in_touch = self._began = clock()
        self._earlier, self._over = self.round, False
        self._arrival.renew()
        self._met.clear()
        self._dispatch.renew()
        self._agreement.forget()

    def train(self) -> Metrics:
        """One round's training; in lockstep modes it also opens the round's averaging.

        In async mode the pushes are made here and now: mass that arrived while we trained must stay
        for the next stretch. Passed on at once it would travel for ever without learning anything.
        """
        give_back()  # what the gossip before has freed
        before = self._privacy.before(self.network)
        metrics = self.learner.train(self.settings.every)
        self._privacy.release(self.network, before)
        self.round += 1
        if isinstance(self.mode, RoundsMode | ServerMode):
            number = self.round - self._earlier - 1
            self._privacy.enter(self.gossiper, number, self.trust)
            self.mode.begin_round(self.gossiper, number)
        else:
            self.mode.request()
            self.gossiper.tick(time.monotonic())
        self.averaged = self._is_averaged()
        return metrics

    def _is_averaged(self) -> bool:
        if isinstance(self.mode, RoundsMode | ServerMode):
            number = self.round - self._earlier - 1
            over = number < 0 or self.mode.finished(number)
            if over:
                self._privacy.over()
            return over
        return self.mode.caught_up(self.gossiper)

    def request_push(self) -> None:
        """Async mode: push every vector once more, without training."""
        if isinstance(self.mode, PacedMode):
            self.compression.links.dense = True  # nobody trains: agree, and leave
            self.mode.request(anyway=True)

    def turn(
        self,
        arrived: Sequence[tuple[str, bytes | memoryview]],
        events: Sequence[Event],
        now: float,
        max_packet: int,
    ) -> list[Outgoing]:
        """Take in packets and events, let time pass, and return what to send."""
        for event in events:
            self._apply(event)
        self.room.fit(self._reassembler, len(self._met))
        for vector, packet in arrived:
            self._take(vector, packet, now)
        for vector, packet in self.trust.early():
            self._take(vector, packet, now)
        if self._guards is not None and self._shunned:
            self._guards.quarantined(now)  # whose time is over is reinstated
        self._arrival.look(self.gossiper)
        self.gossiper.tick(now)
        self.averaged = self._is_averaged()
        self.store.forget()  # what a push has read would only take up memory
        messages = self.gossiper.poll()
        if messages and self._saved != (self.session, self.gossiper.ledger.promises):
            self.save()  # what is only said again, the last one knows
        else:
            self._saver.save_now_and_then(self.round)
        return self._dispatch.pack(messages, self.session, max_packet)

    def disagreement(self) -> dict[str, float]:
        """Per vector that was heard of, the largest relative distance to lately received values."""
        return self._agreement.disagreement()

    def agrees(self, tolerance: float) -> bool:
        """Whether values agree to a relative distance with all that was received lately."""
        return self._agreement.reached(self.gossiper, tolerance)

    def shared(self) -> bool:
        """Whether any vector has a neighbour to share it with."""
        return any(self.gossiper.neighbours(vector) for vector in self.gossiper.vectors)

    def close(self) -> list[list[Any]]:
        """Take in nothing more, and say what became of all that was received.

        The checkpoint says that the session is over before anybody is told: the others refuse it for
        good, and take back what it did not credit.
        """
        self.gossiper.close()
        self._over = True
        self.save()
        return self.gossiper.statement()

    def handed_over(self) -> bool:
        """Whether a leaving peer has nothing left that anybody could take."""
        gossiper = self.gossiper
        held = any(gossiper.weight(v) and gossiper.heirs(v) for v in gossiper.vectors)
        return not gossiper.ledger.open and not held

    # --- checkpoints ----------------------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint, if the peer has one."""
        self._saver.save()
        self._saved = self.session, self.gossiper.ledger.promises

    def _tree(self) -> dict[str, Any]:
        return {
            "peer": self.name,
            "in_touch": mark(self.in_touch),
            "schemas": self.schemas,
            "round": self.round,
            "earlier": self._earlier,
            "over": self._over,
            "newcomer": self._arrival.snapshot(),
            "network": self.network.flat,
            "store": self.store.snapshot(),
            "learner": self.learner.state(),
            "gossip": self.gossiper.snapshot(values=False),
            "trust": self.memory(),
            "releases": self._privacy.count,
            "guards": self._guards.snapshot(time.monotonic()) if self._guards else {},
        }

    def _restore(self) -> bool:
        """Continue from the checkpoint if there is a usable one; else start a new session."""
        tree = self._saver.load(self.schemas)
        if tree is None:
            self.gossiper, self.mode = self._sessions.begin()
            return False
        with self._saver.fitting():
            self.network.flat.copy_(tree["network"])
            self.store.restore(tree["store"])
            self.learner.restore(tree["learner"])
            self.round, self._memory = tree["round"], tree["trust"]
            self._privacy.restore(tree["releases"])
            if self._guards is not None:
                self._guards.restore(tree["guards"], time.monotonic())
            touched = self._saver.in_touch(tree)
            if touched is None:
                self._begin_anew()
                self.lived = self.round > 0  # who never trained starts as if for the first time
                return False
            if clock() - touched > self.settings.lease:
                away = f"was away for {clock() - touched:.0f} s, longer than its lease"
                self.renew(away)
                _log.warning("peer %s %s: it returns as a newcomer", self.name, away)
                return False
            self.lived, self.in_touch = True, touched
            self._earlier = tree["earlier"]
            self._arrival.restore(tree["newcomer"])
            self.gossiper, self.mode = self._sessions.resume(tree["gossip"])
            return True

    # --- insides --------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        match event:
            case Online():
                self._met[event.peer] = event
                vectors = () if event.peer in self._shunned else event.vectors
                self.gossiper.peer_online(event.peer, event.session, vectors, leaving=event.leaving)
            case Offline():
                self._met.pop(event.peer, None)
                self.gossiper.peer_offline(event.peer)
            case Gone():
                if event.peer in self._met and self._met[event.peer].session == event.session:
                    del self._met[event.peer]
                self._dispatch.gone(event.peer)
                self._privacy.gone(self.gossiper, event.peer)
                before = self._agreement.values()
                self.gossiper.peer_gone(event.peer, event.session, event.statement)
                # Old mass may have come back: then agree anew.
                self._agreement.moved(before, self.settings.settle_tolerance)

    def _take(self, vector: str, packet: Buffer, now: float) -> None:
        """Put one packet in; whatever is wrong with it is counted and logged, never raised."""
        message = self._intake.take(vector, packet, now)
        if message is None:
            return
        self.received += 1
        if isinstance(message, Give):
            unpacked = self.gossiper.unpacked(message)
            message = message if isinstance(unpacked, str) else unpacked
        before = self.gossiper.counters["credited"]
        self.store.forget()
        self.gossiper.handle(message, now)
        mine = self.store.forget()  # as it was when the message was credited
        credited = self.gossiper.counters["credited"] > before
        if credited:
            self._privacy.credited(message.sender, vector)
        if credited and isinstance(message, Give) and mine is not None:
            self._agreement.heard(vector, mine, message.value)

    def _shun(self, peer: str, out: bool) -> None:
        """Push nothing more to a peer in quarantine until it is reinstated.

        Only where nobody waits for what is pushed: in lockstep modes a peer that was put there
        wrongly would never finish its round, nor would those who wait for it.
        """
        if self.settings.mode != "async":
            return
        (self._shunned.add if out else self._shunned.discard)(peer)
        if peer in self._met:
            self._apply(self._met[peer])

    def _drop(self, cause: str, text: str) -> None:
        self.dropped[cause] += 1
        count = self.dropped[cause]
        if count & (count - 1) == 0:  # 1, 2, 4, 8, …: a flood cannot flood the log
            _log.warning(
                "peer %s dropped a message: %s: %s (%d so far)", self.name, cause, text, count
            )

    def report(self) -> dict[str, Any]:
        """Where the weight is and what was counted, as JSON-friendly data."""
        accounts = {v: self.gossiper.account(v) for v in self.gossiper.vectors}
        return {
            "weight": {v: [a.held, a.open, a.injected] for v, a in accounts.items()},
            "gossip": dict(self.gossiper.counters),
            "privacy": self._privacy.report(),
            "compression": self.compression.report(),
            "dropped": dict(self.dropped + self.trust.counters + self._guard_counters()),
        }

    def _guard_counters(self) -> Counter[str]:
        counted = {} if self._guards is None else self._guards.counters
        return Counter({f"guards-{cause}": count for cause, count in counted.items()})
