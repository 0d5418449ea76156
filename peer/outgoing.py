"""What leaves a peer: noise and masks on its values, and messages compressed, encoded, cut and sealed.

Noise, masks and compression are off unless the settings ask for them, and what cannot work is refused at
the start.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..gossip import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    Buffer,
    Chunker,
    Drift,
    Give,
    Gossiper,
    MaskPlan,
    Message,
    Payload,
    PrivacyError,
    PrivateRound,
    Recall,
    Releases,
    SchemaEntry,
    WireDtype,
    encode,
    enter_round,
    leave_round,
    sufficient_dtype,
)
from ..gossip.compress import CompressError, Links, Shapes, parse
from ..gossip.security import SecurityLayer, SwarmSecurity
from ..models import SlicedNetwork
from .exits import PeerError, peer_errors
from .settings import MAX_PIECES, Settings

_log = logging.getLogger(__name__)


class Privacy:
    """One peer's masks and releases. PeerError if the settings cannot be had together."""

    def __init__(self, name: str, settings: Settings, models: Collection[str]):
        self._name, self._own = name, f"local-{name.partition('@')[0]}"  # never leaves the peer
        self._rounds: dict[str, PrivateRound] = {}
        self._given: set[tuple[str, str]] = set()
        with peer_errors(name):
            self._releases = None if settings.dp is None else Releases(settings.dp)
            plans = {model: MaskPlan(scale) for model, scale in settings.private.items()}
        self._plans = {model: plan for model, plan in plans.items() if model in models}

    # --- differential privacy -------------------------------------------------------------------

    def before(self, network: SlicedNetwork) -> dict[str, Any]:
        """The values that training is about to move; nothing if updates are released as they are."""
        if self._releases is None:
            return {}
        return {
            v: network.read(v).cpu().numpy().copy()
            for v in network.averaged_models
            if v != self._own
        }

    def release(self, network: SlicedNetwork, before: dict[str, Any]) -> None:
        """Put what may be seen of the training in the place of what was learnt."""
        for model, old in before.items():
            assert self._releases is not None
            try:
                new = self._releases.release(old, network.read(model).cpu().numpy())
            except PrivacyError as error:
                network.write(model, old)  # nothing un-noised may leave
                raise PeerError(f"peer {self._name}: {error}") from None
            network.write(model, new)

    # --- masks ----------------------------------------------------------------------------------

    def enter(self, gossiper: Gossiper, number: int, security: SecurityLayer) -> None:
        """Mask the planned models, just before round `number` begins."""
        self._given.clear()
        if not self._plans:
            return
        assert isinstance(security, SwarmSecurity)
        with peer_errors(self._name):
            secret = security.keyring.mask_secret
            self._rounds = enter_round(gossiper, number, secret, self._plans)

    def credited(self, sender: str, model: str) -> None:
        """Note that a neighbour's masked mass has come in."""
        if model in self._plans:
            self._given.add((sender, model))

    def gone(self, gossiper: Gossiper, peer: str) -> None:
        """Take the masks shared with a vanished neighbour out, where it has given nothing yet."""
        waiting = {v: r for v, r in self._rounds.items() if peer in r.secrets}
        whole = {v: r for v, r in waiting.items() if (peer, v) not in self._given}
        leave_round(gossiper, whole, peer)
        for model in waiting.keys() - whole.keys():
            _log.warning(
                "peer %s: %s vanished in the midst of a private round: the average of %s is off by "
                "part of its masks", self._name, peer, model,
            )  # fmt: skip

    def end_round(self) -> None:
        """Forget a round that is finished: who vanishes now has done its part."""
        self._rounds.clear()

    # --- books ----------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Releases so far, of former lives too."""
        return 0 if self._releases is None else self._releases.count

    def restore(self, count: int) -> None:
        """Take over what former lives released: a restart forgets no cost."""
        if self._releases is not None:
            self._releases.count = count

    def report(self) -> dict[str, float]:
        """Epsilon and how it came about; empty without differential privacy."""
        return {} if self._releases is None else self._releases.report()


class Compression:
    """What a peer leaves out of its messages, and which messages it leaves out.

    entries: what each model is made of. sizes: how many values it has.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        entries: Mapping[str, Sequence[SchemaEntry]],
        sizes: Mapping[str, int],
    ) -> None:
        self._settings = settings
        shapes = {model: blocks(each) for model, each in entries.items()}
        # Blocks that do not make up their model are of no use to anybody.
        shapes = {
            model: found
            for model, found in shapes.items()
            if sum(math.prod(shape) for shape in found) == sizes[model]
        }
        with peer_errors(name):
            pipeline = None if settings.compress is None else parse(settings.compress)
            if pipeline is not None and shapes:
                _fit_one(pipeline.check_shapes, shapes)
            self.links = Links(pipeline, shapes)
            self.drift()

    def drift(self) -> Drift | None:
        """A new watch over how far models have moved, if the settings ask for one."""
        bound = self._settings.drift
        return None if bound is None else Drift(bound, self.links.traffic)

    def sent(self, message: Message, buffers: Sequence[Buffer]) -> None:
        """Count a message that leaves."""
        if isinstance(message, Give) and message.packed is not None:
            size, packed = sum(len(buffer) for buffer in buffers), message.packed
            plain = size - packed.nbytes + 4 * packed.length
            self.links.traffic[message.model].count_sent(size, plain)

    def report(self) -> dict[str, dict[str, float]]:
        """Per model that was compressed or skipped, what was counted, as JSON-friendly data."""
        return {
            model: {**asdict(each), "mean_distortion": each.mean_distortion}
            for model, each in self.links.traffic.items()
        }

    def record(self) -> dict[str, Any]:
        """The same in short, for metrics; nothing where nothing is compressed or skipped."""
        traffic = self.links.traffic
        if not traffic:
            return {}
        return {
            "saved_bytes": sum(each.saved for each in traffic.values()),
            "distortion": {
                v: [each.mean_distortion, each.worst] for v, each in traffic.items() if each.packed
            },
            "skipped": sum(each.skipped for each in traffic.values()),
        }


def blocks(entries: Sequence[SchemaEntry]) -> Shapes:
    """The shapes of a model's blocks."""
    return [tuple(int(size) for size in shape) for _, shape, _ in entries]


def _fit_one(fit: Any, shapes: Mapping[str, Shapes]) -> None:
    """Raise CompressError if a compressor fits none of the models; a peer's own need not be fit."""
    mistakes = []
    for model, each in shapes.items():
        try:
            fit(each)
        except CompressError as error:
            mistakes.append(f"model {model!r}: {error}")
    if len(mistakes) == len(shapes):
        raise CompressError(mistakes[0])


TRIES = 5
"""Times that a message in several packets is sent to a neighbour in vain before there is a warning."""


@dataclass(slots=True)
class _Tries:
    """What was sent to one neighbour about one partial model, and not acknowledged as far as that shows."""

    sequence: int = 0
    sent: int = 0
    recalled: bool = False
    warned: bool = False


@dataclass(frozen=True)
class Outgoing:
    """Packets for one neighbour's inbox, to be taken once: each is made when it is asked for."""

    receiver: str
    model: str
    packets: Iterator[Payload]


class Dispatch:
    """Makes packets of messages, on the peer's own thread.

    schemas: the hash of every partial model that the peer has. dtype: values on the wire. compression: counts
    what leaves. max_pieces: packets of one message, at most.
    """

    def __init__(
        self,
        name: str,
        schemas: Mapping[str, str],
        dtype: WireDtype,
        compression: Compression,
        security: SecurityLayer,
        max_pieces: int = MAX_PIECES,
    ) -> None:
        self._max_pieces = max_pieces
        self._name, self._schemas = name, schemas
        self._dtype: WireDtype = dtype
        self._compression = compression
        self._tries: dict[tuple[str, str], _Tries] = {}
        self.set_security(security)

    def set_security(self, security: SecurityLayer) -> None:
        """Seal with the security layer of a new session."""
        self._security = security
        self._chunker: Chunker | None = None

    def reset(self) -> None:
        """Forget what an old session still had to say."""
        self._tries.clear()
        self._chunker = None

    def gone(self, peer: str) -> None:
        """Forget what was sent to a peer that is gone."""
        for edge in [each for each in self._tries if each[0] == peer]:
            del self._tries[edge]

    def pack(self, messages: list[Message], session: str, max_packet: int) -> list[Outgoing]:
        """Return the packets of all messages that can leave now."""
        overhead = self._security.overhead
        limit = max_packet - overhead
        if self._chunker is None or self._chunker.limit != limit:
            self._chunker = Chunker(f"{self._name}/{session}", limit)
        outgoing = []
        for message in messages:
            buffers = encode(message, self._schemas[message.model], self._dtype_of(message))
            total = sum(len(buffer) for buffer in buffers)
            self._check(message.model, total, limit - HEADER_BYTES)
            self._count(message, total, -(-total // (limit - HEADER_BYTES)))
            self._compression.sent(message, buffers)
            packets: Iterator[Payload] = self._chunker.split_views(buffers)
            if overhead:
                sealed = self._seal(message, packets)
                if sealed is None:
                    continue  # just now out, or lacking a revocation list: the ledger repeats or gives up
                packets = iter(sealed)
            outgoing.append(Outgoing(message.receiver, message.model, packets))
        return outgoing

    def _check(self, model: str, total: int, body: int) -> None:
        if total > MAX_MESSAGE_BYTES:  # in a wider dtype than usual: see `sufficient_dtype`
            raise PeerError(
                f"peer {self._name}: model {model}: a message has {total} bytes, and {MAX_MESSAGE_BYTES} "
                "are the most: its values are too large for the dtype on the wire; train at a lower rate, or "
                "share it as several partial models"
            )
        if total > self._max_pieces * body:
            raise PeerError(
                f"peer {self._name}: model {model}: a message has {total} bytes, and a packet takes {body}: "
                f"that makes {-(-total // body)} packets, more than {self._max_pieces}; raise max_packet and "
                "the broker's packet limit (mosquitto: max_packet_size or message_size_limit)"
            )

    def _count(self, message: Message, total: int, pieces: int) -> None:
        """Warn, once, of a neighbour whom large messages do not reach.

        A next one that was not preceded by a recall means that the one before was acknowledged.
        """
        if not isinstance(message, Give | Recall):
            return
        tries = self._tries.setdefault((message.receiver, message.model), _Tries())
        if isinstance(message, Recall):
            tries.recalled = True
            return
        if message.sequence != tries.sequence and not tries.recalled:
            tries.sent, tries.warned = 0, False
        tries.sequence, tries.recalled = message.sequence, False
        tries.sent += 1
        if tries.sent >= TRIES and pieces > 1 and not tries.warned:
            tries.warned = True
            _log.warning(
                "peer %s: model %s: a message of %d bytes in %d packets was sent to %s %d times, and it "
                "acknowledged none in time: it may be busy, or packets get lost; fewer and larger ones fare "
                "better: raise max_packet and the broker's packet limit (mosquitto: max_packet_size or "
                "message_size_limit), or its max_queued_messages, or compress",
                self._name, message.model, total, pieces, message.receiver, tries.sent,
            )  # fmt: skip

    def _dtype_of(self, message: Message) -> WireDtype:
        """How a message's value is written: wider than usual only where it would not fit."""
        if not isinstance(message, Give) or message.packed is not None:
            return self._dtype
        return sufficient_dtype(message.value, self._dtype)

    def _seal(self, message: Message, packets: Iterator[Payload]) -> list[bytes] | None:
        """A message's packets as its receiver alone can open them; here, not on the event loop."""
        sealed = []
        for packet in packets:
            closed = self._security.seal(message.receiver, message.model, bytes(packet))
            if closed is None:
                return None
            sealed.append(closed)
        return sealed
