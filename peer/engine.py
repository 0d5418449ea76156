"""What happens on a peer's own thread: training, gossip turns, checkpoints. No IO but the checkpoint.

The event loop hands in what arrived and gets back what to send. Every message that leaves was
covered by a checkpoint first (if the peer has one), so that a killed process forgets nothing that
anybody was told.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..gossip.chunks import HEADER_BYTES, Chunker, Reassembler
from ..gossip.gossiper import Gossiper, new_session
from ..gossip.messages import Give, Message
from ..gossip.modes_paced import PacedMode
from ..gossip.modes_rounds import RoundsMode
from ..gossip.modes_server import ServerMode
from ..gossip.pushsum import ONE
from ..gossip.trust import NoTrust, Trusting
from ..gossip.trust.guarded import guard
from ..gossip.trust.intake import Intake
from ..gossip.wire import Buffer, as_sent, encode
from ..models import Learner, Metrics, Weighted
from .allocator import give_back
from .arrival import Arrival, PeerGuards
from .checkpoint import load_checkpoint, save_checkpoint
from .compression import Compression
from .errors import PeerError
from .matched_store import MatchedStore
from .presence import Event, Gone, Offline, Online
from .privacy import Privacy
from .settings import Settings
from .store import schema_hashes

_log = logging.getLogger(__name__)

_RECENT = 4  # received values per vector by which a peer judges that it agrees with its neighbours


@dataclass(frozen=True)
class Outgoing:
    """Packets for one neighbour's inbox, to be taken once: each is made when it is asked for."""

    receiver: str
    vector: str
    packets: Iterator[bytes]


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
        self.weight = ONE * (samples if settings.weigh == "samples" else 1)
        self.round = 0
        """Rounds trained so far."""
        self.dropped: Counter[str] = Counter()
        self.received = 0
        """Messages taken in so far."""
        self._rng = np.random.default_rng(seed)
        self._lossy = None if settings.dtype != "float16" else _as_float16
        self._checkpoint = checkpoint
        self._reassembler = Reassembler()
        self._guards = None
        if settings.bounds is not None:
            self._guards = PeerGuards(settings.bounds, on_change=self._shun)
            self._guards.weight = self.weight
        self._privacy = Privacy(name, settings, self.schemas)
        self.compression = Compression(
            name, settings,
            {vector: self.store.entries(vector) for vector in self.schemas},
            {vector: self.store.read(vector).size for vector in self.schemas},
        )  # fmt: skip
        self._met: dict[str, Online] = {}
        """The peers that can be reached now, as presence announced them."""
        self._shunned: set[str] = set()
        self._waiting: dict[tuple[str, str, type[Message]], Message] = {}
        """Messages that cannot be sealed yet."""
        self._memory: dict[str, Any] = {}
        self.trust: Trusting = NoTrust(name)
        self.set_trust(self.trust)
        self._recent: dict[str, deque[float]] = {v: deque(maxlen=_RECENT) for v in self.schemas}
        self._arrival = Arrival(name, settings, self.store, learner, self.weight)
        self.mode = self._make_mode()
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
        self._chunker: Chunker | None = None
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

    def renew(self) -> None:
        """Start a new session with the values of the old one, whose mass counts no more."""
        if self.settings.mode != "async":
            raise PeerError(
                f"peer {self.name}: was away for longer than its lease of {self.settings.lease:g} s, and "
                f"{self.settings.mode} mode cannot be joined midway; raise the lease"
            )
        self.mode = self._make_mode()
        self.gossiper = self._new_gossiper()
        self.lived, self.restored = True, False
        self._arrival.renew()
        self._met.clear()
        self._waiting.clear()
        self._chunker = None
        for seen in self._recent.values():
            seen.clear()

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
            self._privacy.enter(self.gossiper, self.round - 1, self.trust)
            self.mode.begin_round(self.gossiper, self.round - 1)
        else:
            self.mode.request()
            self.gossiper.tick(time.monotonic())
        self.averaged = self._is_averaged()
        return metrics

    def _is_averaged(self) -> bool:
        if isinstance(self.mode, RoundsMode | ServerMode):
            over = self.round == 0 or self.mode.finished(self.round - 1)
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
        if messages:
            self.save()
        if self.trust.overhead:
            messages = self._sealable(messages)
        limit = max_packet - self.trust.overhead
        if self._chunker is None or self._chunker.limit != limit:
            self._chunker = Chunker(f"{self.name}/{self.session}", limit)
        outgoing = []
        for message in messages:
            buffers = encode(message, self.schemas[message.vector], self.settings.dtype)
            self.compression.sent(message, buffers)
            packets = self._chunker.split(buffers)
            if self.trust.overhead:
                sealed = self._seal(message, packets)
                if sealed is None:
                    continue  # just now out, or without a key: the ledger repeats or gives up
                packets = iter(sealed)
            elif sum(len(buffer) for buffer in buffers) > max_packet - HEADER_BYTES:
                packets = iter(list(packets))  # a checksum over much: not on the event loop
            outgoing.append(Outgoing(message.receiver, message.vector, packets))
        return outgoing

    def _sealable(self, messages: list[Message]) -> list[Message]:
        """What can be sealed by now; the newest of the rest waits for its receiver's card or a key."""
        for message in messages:
            self._waiting[message.receiver, message.vector, type(message)] = message
        ready = [at for at in self._waiting if self.trust.can_seal(*at[:2])]
        return [self._waiting.pop(at) for at in ready]

    def _seal(self, message: Message, packets: Iterator[bytes]) -> list[bytes] | None:
        """A message's packets as its receiver alone can open them; here, not on the event loop."""
        sealed = []
        for packet in packets:
            closed = self.trust.seal(message.receiver, message.vector, packet)
            if closed is None:
                return None
            sealed.append(closed)
        return sealed

    def disagreement(self) -> dict[str, float]:
        """Per vector that was heard of, the largest relative distance to lately received values."""
        return {vector: max(seen) for vector, seen in self._recent.items() if seen}

    def agrees(self, tolerance: float) -> bool:
        """Whether, for every vector that has neighbours, the last few values received agree.

        Values that are on their way must agree too: what is not credited is taken back, and an old
        value would disturb the agreement.
        """
        return (
            not self.gossiper.stranded()
            and all(
                len(self._recent[vector]) == _RECENT and max(self._recent[vector]) <= tolerance
                for vector in self.gossiper.vectors
                if self.gossiper.neighbours(vector)
            )
            and all(
                _distance(self.store.read(vector), transfer.give.value) <= tolerance
                for (_, vector), transfer in self.gossiper.ledger.open.items()
            )
        )

    def shared(self) -> bool:
        """Whether any vector has a neighbour to share it with."""
        return any(self.gossiper.neighbours(vector) for vector in self.gossiper.vectors)

    def close(self) -> list[list[Any]]:
        """Take in nothing more, and say what became of all that was received."""
        self.gossiper.close()
        self.save()
        return self.gossiper.statement()

    def handed_over(self) -> bool:
        """Whether a leaving peer has nothing left that anybody could take."""
        gossiper = self.gossiper
        held = any(gossiper.weight(v) and gossiper.neighbours(v) for v in gossiper.vectors)
        return not gossiper.ledger.open and not held

    # --- checkpoints ----------------------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint, if the peer has one."""
        if self._checkpoint is None:
            return
        save_checkpoint(
            self._checkpoint,
            {
                "peer": self.name,
                "saved": time.time(),
                "schemas": self.schemas,
                "round": self.round,
                "newcomer": self._arrival.snapshot(),
                "network": self.network.flat,
                "store": self.store.snapshot(),
                "learner": self.learner.state(),
                "gossip": self.gossiper.snapshot(values=False),
                "trust": self.memory(),
                "releases": self._privacy.count,
                "guards": self._guards.snapshot(time.monotonic()) if self._guards else {},
            },
        )

    def _restore(self) -> bool:
        """Continue from the checkpoint if there is a usable one; else start a new session."""
        tree = load_checkpoint(self._checkpoint) if self._checkpoint else None
        if tree is None:
            self.gossiper = self._new_gossiper()
            return False
        if tree["peer"] != self.name or tree["schemas"] != self.schemas:
            raise PeerError(
                f"{self._checkpoint}: holds another network or peer ({tree['peer']}); "
                "point the peer at another file, or move this one away"
            )
        self.lived = True
        self.network.flat.copy_(torch.as_tensor(tree["network"]))
        self.store.restore(tree["store"])
        self.learner.restore(tree["learner"])
        self.round = tree["round"]
        self._memory = tree.get("trust", {})
        self._privacy.restore(tree.get("releases", 0))
        if self._guards is not None:
            self._guards.restore(tree.get("guards", {}), time.monotonic())
        away = time.time() - tree["saved"]
        if away > self.settings.lease:
            _log.warning(
                "peer %s was away for %.0f s, longer than its lease: it returns as a newcomer",
                self.name, away,
            )  # fmt: skip
            self.renew()
            return False
        self._arrival.restore(tree["newcomer"])
        self.gossiper = self._guarded(
            Gossiper.restore(
                tree["gossip"],
                self.store,
                mode=self.mode,
                seed=self._rng,
                lossy=self._lossy,
                links=self.compression.links,
            )
        )
        return True

    def _new_gossiper(self) -> Gossiper:
        self.compression.links.forget()
        return self._guarded(
            Gossiper(
                self.name, new_session(), self.store,
                mode=self.mode, seed=self._rng, lossy=self._lossy, links=self.compression.links,
            )
        )  # fmt: skip

    def _guarded(self, gossiper: Gossiper) -> Gossiper:
        if self._guards is not None:
            guard(gossiper, self._guards, time.monotonic)
        return gossiper

    # --- insides --------------------------------------------------------------------------------

    def _make_mode(self) -> PacedMode | RoundsMode | ServerMode:
        settings = self.settings
        match settings.mode:
            case "async":
                return PacedMode(
                    settings.exchanges, fraction=settings.fraction, turns=settings.turns,
                    drift=self.compression.drift(),
                )  # fmt: skip
            case "rounds":
                sources = None
                if settings.sources is not None:
                    sources = {vector: set(settings.sources) for vector in self.schemas}
                return RoundsMode(settings.exchanges, sources=sources)
            case "server":
                # A model without a server is the peer's own: it averages it by itself.
                servers = {v: settings.servers.get(v, self.name) for v in self.schemas}
                return ServerMode(self.name, servers)

    def _apply(self, event: Event) -> None:
        match event:
            case Online():
                self._met[event.peer] = event
                vectors = () if event.peer in self._shunned else event.vectors
                self.gossiper.peer_online(event.peer, event.session, vectors)
            case Offline():
                self._met.pop(event.peer, None)
                self.gossiper.peer_offline(event.peer)
            case Gone():
                if event.peer in self._met and self._met[event.peer].session == event.session:
                    del self._met[event.peer]
                for at in [each for each in self._waiting if each[0] == event.peer]:
                    del self._waiting[at]
                self._privacy.gone(self.gossiper, event.peer)
                before = {v: self.store.read(v) for v in self._recent}
                self.gossiper.peer_gone(event.peer, event.session, event.statement)
                for vector, old in before.items():
                    moved = _distance(old, self.store.read(vector))
                    if moved > self.settings.settle_tolerance:
                        self._recent[vector].clear()  # old mass came back: agree anew

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
            self._recent[vector].append(_distance(mine, message.value))

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


def _distance(mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """How far another value is from ours, relative to ours."""
    return float(np.linalg.norm(mine - other)) / (float(np.linalg.norm(mine)) or 1.0)


def _as_float16(_vector: str, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return as_sent(value, "float16")
