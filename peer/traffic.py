"""What a peer sends and receives: limits on received messages, and how values become packets to send.

Values get noise (differential privacy) and masks (private averaging); messages are compressed, encoded, split
into packets and encrypted. Noise, masks and compression are off by default; settings that do not work
together raise PeerError at the start.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..gossip import (
    HEADER_BYTES,
    MAX_HEADER_BYTES,
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
    Reassembler,
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
from .store import blocks

_log = logging.getLogger(__name__)


MESSAGE_OVERHEAD = 2 * MAX_HEADER_BYTES
"""Upper bound of a message's bytes besides its values."""
VALUE_BYTES: Mapping[WireDtype, int] = {"float16": 2, "float32": 4, "float64": 8}
MAX_VALUE_BYTES = 8
"""Bytes of one value in the widest dtype. The sender chooses the dtype, and each message states it."""
MIN_WAITING_BYTES = 4 << 20
"""Bytes of received packets that may always wait, even for small models: acknowledgements wait with them."""
MAX_WAITING_BYTES = 1 << 30
"""Most bytes of received packets that may wait, for any number of neighbours; two messages always fit."""

MIN_UNFINISHED = 64
"""Number of messages that may always be incomplete (some chunks missing), even with few neighbours."""


class InboundLimits:
    """How many bytes of received messages a peer holds, computed from the sizes of its own partial models.

    sizes: number of values of each partial model. dtype: of values in the peer's own messages. former_size:
        of the largest partial model that has ended: transfers of it that are still under way are answered.

    Raises PeerError, which names the partial model, if its values do not fit into one message.
    """

    def __init__(
        self, name: str, sizes: Mapping[str, int], dtype: WireDtype, former_size: int = 0
    ) -> None:
        value_bytes = VALUE_BYTES[dtype]
        for model, size in sizes.items():
            if (total := size * value_bytes + MESSAGE_OVERHEAD) > MAX_MESSAGE_BYTES:
                raise PeerError(
                    f"peer {name}: model {model}: its {size} values make a message of {total} bytes, and "
                    f"{MAX_MESSAGE_BYTES} are the most: share it as several partial models"
                    + ("" if value_bytes == 2 else ", or send float16")
                )
        self._bytes_per_peer = sum(size * value_bytes + MESSAGE_OVERHEAD for size in sizes.values())
        """Bytes that one neighbour sends with one message about each partial model."""
        self._model_count = len(sizes)
        largest = max([former_size, *sizes.values()]) * MAX_VALUE_BYTES + MESSAGE_OVERHEAD
        self.max_message_bytes = min(MAX_MESSAGE_BYTES, largest)
        """Bytes of the largest message that this peer can use; longer ones are dropped."""

    def max_waiting_bytes(self, neighbours: int) -> int:
        """Return how many bytes of received packets may wait while the peer trains.

        They hold two messages about each partial model from every neighbour, and from one unknown peer.
        """
        expected = 2 * self._bytes_per_peer * (neighbours + 1)
        return max(MIN_WAITING_BYTES, 2 * self.max_message_bytes, min(expected, MAX_WAITING_BYTES))

    def make_reassembler(self, neighbours: int = 0) -> Reassembler:
        """Return a reassembler with these limits, for so many neighbours; see `adjust`."""
        largest = self.max_message_bytes
        sender_bytes = 2 * (self._bytes_per_peer + largest)
        reassembler = Reassembler(max_message_bytes=largest, max_sender_bytes=sender_bytes)
        self.adjust(reassembler, neighbours)
        return reassembler

    def adjust(self, reassembler: Reassembler, neighbours: int) -> None:
        """Set the reassembler's limits so that all these neighbours can have messages under way at once."""
        sender_bytes = 2 * (self._bytes_per_peer + self.max_message_bytes)
        reassembler.max_total_bytes = sender_bytes + self.max_waiting_bytes(neighbours)
        reassembler.max_unfinished = max(MIN_UNFINISHED, 2 * self._model_count * (neighbours + 1))


class Privacy:
    """One peer's masks (private averaging) and noisy releases of its values (differential privacy)."""

    def __init__(self, name: str, settings: Settings, models: Collection[str]):
        self._name, self._local_model = name, f"local-{name.partition('@')[0]}"  # it is never sent
        self._rounds: dict[str, PrivateRound] = {}
        self._credited: set[tuple[str, str]] = set()
        """(sender, partial model) of the transfers credited in this round."""
        with peer_errors(name):
            self._releases = None if settings.dp is None else Releases(settings.dp)
            plans = {model: MaskPlan(scale) for model, scale in settings.private.items()}
        self._plans = {model: plan for model, plan in plans.items() if model in models}

    # --- differential privacy -------------------------------------------------------------------

    def values_before_training(self, network: SlicedNetwork) -> dict[str, Any]:
        """Return a copy of each partial model's values, for `release`; empty without differential privacy."""
        if self._releases is None:
            return {}
        shared = [model for model in network.averaged_models if model != self._local_model]
        return {model: network.read(model).cpu().numpy().copy() for model in shared}

    def release(self, network: SlicedNetwork, before: dict[str, Any]) -> None:
        """Replace the trained values by those before training plus the clipped, noisy change."""
        for model, old in before.items():
            assert self._releases is not None
            try:
                new = self._releases.release(old, network.read(model).cpu().numpy())
            except PrivacyError as error:
                network.write(model, old)  # values without noise must not be sent
                raise PeerError(f"peer {self._name}: {error}") from None
            network.write(model, new)

    # --- masks ----------------------------------------------------------------------------------

    def begin_round(self, gossiper: Gossiper, number: int, security: SecurityLayer) -> None:
        """Mask the values of private models, just before round `number` begins."""
        self._credited.clear()
        if not self._plans:
            return
        assert isinstance(security, SwarmSecurity)
        with peer_errors(self._name):
            secret = security.keyring.mask_secret
            self._rounds = enter_round(gossiper, number, secret, self._plans)

    def note_credited(self, sender: str, model: str) -> None:
        """Note that a neighbour's masked mass was credited in this round."""
        if model in self._plans:
            self._credited.add((sender, model))

    def remove_masks(self, gossiper: Gossiper, peer: str) -> None:
        """Remove the masks shared with a neighbour that has left, unless its own masked mass was credited."""
        masked = {m: r for m, r in self._rounds.items() if peer in r.secrets}
        removable = {m: r for m, r in masked.items() if (peer, m) not in self._credited}
        leave_round(gossiper, removable, peer)
        for model in masked.keys() - removable.keys():
            _log.warning(
                "peer %s: %s left in the middle of a private round: the average of %s contains a part of "
                "its masks", self._name, peer, model,
            )  # fmt: skip

    def end_round(self) -> None:
        """Forget a round that is finished: its masks cancel each other, even if a peer leaves now."""
        self._rounds.clear()

    # --- accounting -----------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of releases so far, those of former processes included."""
        return 0 if self._releases is None else self._releases.count

    def restore(self, count: int) -> None:
        """Continue from the number of releases of former processes."""
        if self._releases is not None:
            self._releases.count = count

    def report(self) -> dict[str, float]:
        """Return epsilon and what it was computed from; empty without differential privacy."""
        return {} if self._releases is None else self._releases.report()


class Compression:
    """Compression of a peer's messages, and the rule by which it skips messages with little change (drift).

    Call `set_models` before anything is sent.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self._name, self._settings = name, settings
        self._is_checked = False
        with peer_errors(name):
            self.links = Links(None if settings.compress is None else parse(settings.compress))
            self.drift()

    def set_models(
        self,
        entries: Mapping[str, Sequence[SchemaEntry]],
        sizes: Mapping[str, int],
        exact: Collection[str] = (),
    ) -> None:
        """Compress these partial models from now on; PeerError if at the first call none can be compressed.

        entries: per partial model, its parameters; see schema_entries. sizes: its number of values.
        exact: models that are pushed every time, at full precision.
        """
        shapes = _shapes(entries, sizes)
        if self.links.pipeline is not None and shapes and not self._is_checked:
            with peer_errors(self._name):
                _require_any_compressible(self.links.pipeline.check_shapes, shapes)
        self._is_checked = True
        self.links.set_models(shapes, exact)

    def drift(self) -> Drift | None:
        """Return a new drift rule, which skips pushes of models that have changed little; None if not set."""
        bound = self._settings.drift
        return None if bound is None else Drift(bound, self.links.traffic, self.links.is_exact)

    def count_sent(self, message: Message, buffers: Sequence[Buffer]) -> None:
        """Count the bytes of a message that is sent, if it is compressed."""
        if isinstance(message, Give) and message.packed is not None:
            size, packed = sum(len(buffer) for buffer in buffers), message.packed
            uncompressed = size - packed.nbytes + 4 * packed.length  # as float32
            self.links.traffic[message.model].count_sent(size, uncompressed)

    def report(self) -> dict[str, dict[str, float]]:
        """Return the counters of each model that was compressed or skipped, as JSON-friendly data."""
        return {
            model: {**asdict(counters), "mean_distortion": counters.mean_distortion}
            for model, counters in self.links.traffic.items()
        }

    def record(self) -> dict[str, Any]:
        """Return a summary of the counters for metrics; empty if nothing was compressed or skipped."""
        traffic = self.links.traffic
        if not traffic:
            return {}
        return {
            "saved_bytes": sum(each.saved for each in traffic.values()),
            "distortion": {
                m: [each.mean_distortion, each.worst] for m, each in traffic.items() if each.packed
            },
            "skipped": sum(each.skipped for each in traffic.values()),
        }


def _shapes(
    entries: Mapping[str, Sequence[SchemaEntry]], sizes: Mapping[str, int]
) -> dict[str, Shapes]:
    """Return the parameters' shapes of each model; leave out models with other values besides them."""
    shapes = {model: blocks(model_entries) for model, model_entries in entries.items()}
    return {
        model: model_shapes
        for model, model_shapes in shapes.items()
        if sum(map(math.prod, model_shapes)) == sizes[model]
    }


def _require_any_compressible(
    check: Callable[[Shapes], object], shapes: Mapping[str, Shapes]
) -> None:
    """Raise CompressError if `check` raises it for every model: not all of them need to be compressible."""
    errors = []
    for model, model_shapes in shapes.items():
        try:
            check(model_shapes)
        except CompressError as error:
            errors.append(f"model {model!r}: {error}")
    if len(errors) == len(shapes):
        raise CompressError(errors[0])


WARN_AFTER_TRIES = 5
"""Number of unacknowledged attempts to send a message of several packets after which a warning is logged."""


@dataclass(slots=True)
class _Tries:
    """Attempts to send mass of one partial model to one neighbour since the last acknowledgement.

    sequence: of the last transfer. sent: number of attempts. recalled: whether the last transfer was asked
    back. warned: whether a warning was logged.
    """

    sequence: int = 0
    sent: int = 0
    recalled: bool = False
    warned: bool = False


@dataclass(frozen=True)
class Outgoing:
    """Packets for one neighbour's inbox; the iterator makes each packet when it is needed."""

    receiver: str
    model: str
    packets: Iterator[Payload]


class Dispatch:
    """Turns messages into packets, on the peer's worker thread.

    schemas: the schema hash of each of the peer's partial models. dtype: of values on the wire.
    compression: counts sent bytes. max_pieces: most packets of one message.
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
        """By receiver and partial model."""
        self.set_security(security)

    def set_security(self, security: SecurityLayer) -> None:
        """Encrypt with the security layer of a new session."""
        self._security = security
        self._chunker: Chunker | None = None

    def reset(self) -> None:
        """Forget the attempts of an old session."""
        self._tries.clear()
        self._chunker = None

    def forget_peer(self, peer: str) -> None:
        """Forget the attempts to send to a peer that has left."""
        self._tries = {key: tries for key, tries in self._tries.items() if key[0] != peer}

    def pack(self, messages: list[Message], session: str, max_packet: int) -> list[Outgoing]:
        """Return the packets, of at most `max_packet` bytes, of all messages that can be sent now."""
        overhead = self._security.overhead
        limit = max_packet - overhead
        if self._chunker is None or self._chunker.limit != limit:
            self._chunker = Chunker(f"{self._name}/{session}", limit)
        outgoing = []
        for message in messages:
            buffers = encode(message, self._schemas[message.model], self._dtype_of(message))
            total = sum(len(buffer) for buffer in buffers)
            self._check_size(message.model, total, limit - HEADER_BYTES)
            self._count_tries(message, total, -(-total // (limit - HEADER_BYTES)))
            self._compression.count_sent(message, buffers)
            packets: Iterator[Payload] = self._chunker.split_views(buffers)
            if overhead:
                sealed = self._seal(message, packets)
                if sealed is None:
                    # The receiver was removed, or lacks a revocation list: the gossiper repeats the message.
                    continue
                packets = iter(sealed)
            outgoing.append(Outgoing(message.receiver, message.model, packets))
        return outgoing

    def _check_size(self, model: str, total: int, body: int) -> None:
        """Raise PeerError if a message of so many bytes is too long. body: bytes of it in each packet."""
        if total > MAX_MESSAGE_BYTES:  # possible only in a wider dtype than usual: see `_dtype_of`
            raise PeerError(
                f"peer {self._name}: model {model}: a message has {total} bytes, and {MAX_MESSAGE_BYTES} "
                "are the most: its values overflow the dtype on the wire and need a wider one; lower the "
                "learning rate, or share it as several partial models"
            )
        if total > self._max_pieces * body:
            raise PeerError(
                f"peer {self._name}: model {model}: a message has {total} bytes, and a packet takes {body}: "
                f"that makes {-(-total // body)} packets, more than {self._max_pieces}; raise max_packet and "
                "the broker's packet limit (mosquitto: max_packet_size or message_size_limit)"
            )

    def _count_tries(self, message: Message, total: int, packets: int) -> None:
        """Count attempts to send a message to a neighbour; warn once if it acknowledges no large one.

        total, packets: bytes of the message, and packets that it makes. A new sequence number without a
        recall in between means that the last message was acknowledged.
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
        if tries.sent >= WARN_AFTER_TRIES and packets > 1 and not tries.warned:
            tries.warned = True
            _log.warning(
                "peer %s: model %s: a message of %d bytes in %d packets was sent to %s %d times without an "
                "acknowledgement in time: it may be busy, or packets get lost; use fewer and larger packets: "
                "raise max_packet and the broker's packet limit (mosquitto: max_packet_size or "
                "message_size_limit), or its max_queued_messages, or compress",
                self._name, message.model, total, packets, message.receiver, tries.sent,
            )  # fmt: skip

    def _dtype_of(self, message: Message) -> WireDtype:
        """Return the dtype of a message's values: wider than usual only if they would overflow."""
        if not isinstance(message, Give) or message.packed is not None:
            return self._dtype
        exact = self._compression.links.is_exact(message.model)
        dtype: WireDtype = "float32" if exact and self._dtype == "float16" else self._dtype
        return sufficient_dtype(message.value, dtype)

    def _seal(self, message: Message, packets: Iterator[Payload]) -> list[bytes] | None:
        """Return a message's packets, encrypted for its receiver; None if that is not possible now."""
        sealed = []
        for packet in packets:
            sealed_packet = self._security.seal(message.receiver, message.model, bytes(packet))
            if sealed_packet is None:
                return None
            sealed.append(sealed_packet)
        return sealed
