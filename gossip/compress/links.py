"""Compression between two peers: they send differences to earlier values, and senders keep the error.

Push-sum sends a share of the weight with a value v. A compressor turns v into v̂; the receiver credits the
weight at v̂, and the sender keeps the compression error of the sum, weight · (v − v̂), so the total is
conserved with any compressor. But v̂ must be near v, or these errors accumulate: the largest hundredth of v,
with zeros elsewhere, would be a poor estimate. So both ends of an edge remember the last values that were
credited on it, in either direction, as *references*, and a sender compresses the difference to the latest
reference that both have. This difference is small and vanishes as peers agree, and the compressor's noise
with it. In server mode it is the client's update: what it learnt since it received the mean.

If weight moves and its value does not follow, values diverge (with random masks and two-bit numbers they grew
without bound in trials). So two factors damp each message, computed from the message itself. The difference d̂
that the receiver gets is multiplied by its least-squares gain ⟨d, d̂⟩ / ‖d̂‖², so that it never increases the
distance. And only the fraction cos(d, d̂) of the weight is sent: all of it if the compressor loses nothing.
The exponent 1 of this cosine was found by trial: with exponent 0, values grew under masks; with 2, peers
agreed as well but learnt more slowly, because less weight moved.

Two alternatives were rejected. A separate weight for every coordinate would have to be sent too, and takes
more bytes than sparse values save. One reference for all edges of a sender would have to reach all
neighbours with every push.

References cost memory, up to three vectors per edge, limited by `max_bytes`; the oldest are dropped first.
Dropping them is safe. A sender without a reference sends the vector itself. A receiver without the reference
that a message needs (after a restart, say) answers "void"; the sender then takes its mass back, drops its
references of that edge and sends the vector itself next time. So references need not be in checkpoints.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ..pushsum import Array, is_finite
from ..wire import Packed, PackError
from .compressors import Pipeline, Shapes, distortion, unpack

if TYPE_CHECKING:
    from ..wire import Give

MAX_REFERENCE_BYTES = 256 << 20
"""The most bytes of references that one peer keeps."""
_NO_DAMPING = 0.99
"""Gain and cosine above which a message is not damped."""
SENT_KEPT = 2
"""Sent values kept per edge and model: the neighbour's message that refers to the last but one may arrive
after its acknowledgement of the last."""


@dataclass(slots=True)
class Traffic:
    """Traffic counters of one partial model at one peer. They add with `+`."""

    messages: int = 0
    """Compressed messages that were sent, including repeats."""
    bytes: int = 0
    """Bytes of these messages, including headers."""
    plain_bytes: int = 0
    """Bytes that these messages would have without compression."""
    packed: int = 0
    """Values that were compressed; repeats do not count."""
    distortion: float = 0.0
    """Sum of the relative distortions of these values, ‖value − value that the receiver reads‖ / ‖value‖."""
    worst: float = 0.0
    """The largest of these distortions."""
    skipped: int = 0
    """Messages that were not sent because the model had changed little."""
    skipped_bytes: int = 0
    """Bytes that the skipped messages would have without compression."""

    def count_packed(self, distortion: float) -> None:
        """Count a value that was compressed."""
        self.packed += 1
        self.distortion += distortion
        self.worst = max(self.worst, distortion)

    def count_sent(self, size: int, plain_size: int) -> None:
        """Count a message that was sent."""
        self.messages += 1
        self.bytes += size
        self.plain_bytes += plain_size

    def count_skipped(self, messages: int, plain_size: int) -> None:
        """Count messages that were not sent."""
        self.skipped += messages
        self.skipped_bytes += plain_size

    @property
    def saved(self) -> int:
        """Bytes saved in comparison with an uncompressed run that skips nothing."""
        return self.plain_bytes - self.bytes + self.skipped_bytes

    @property
    def mean_distortion(self) -> float:
        """The mean relative distortion of a compressed value; 0 if there was none."""
        return self.distortion / self.packed if self.packed else 0.0

    def __add__(self, other: Traffic) -> Traffic:
        counts, other_counts = asdict(self), asdict(other)
        total = Traffic(**{name: counts[name] + other_counts[name] for name in counts})
        total.worst = max(self.worst, other.worst)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """The value of a credited transfer from or to a neighbour, which both ends of the edge have."""

    session: str
    """The neighbour's session."""
    sequence: int
    """The sequence number that the transfer's sender gave it."""
    value: Array


@dataclass(slots=True, eq=False)
class _Edge:
    """The references of one model on the edge to one neighbour, from sent and received transfers."""

    sent: deque[_Reference] = field(default_factory=lambda: deque(maxlen=SENT_KEPT))
    received: _Reference | None = None
    latest: _Reference | None = None
    """The newest of them, in either direction."""

    @property
    def nbytes(self) -> int:
        references = [*self.sent, *([] if self.received is None else [self.received])]
        return sum(reference.value.nbytes for reference in references)


_EMPTY_EDGE = _Edge()
"""Stands for an edge without references; never changed."""


class Links:
    """Compresses values for each neighbour and decompresses received ones; keeps the references of all edges.

    pipeline: how to compress sent values; None sends them uncompressed, and still decompresses received ones.
    shapes: the blocks of each model, for compressors that work on matrices.
    max_bytes: bytes of references to keep. Raise it if neighbours count `refused-no-reference` although no
        peer was restarted.
    """

    def __init__(
        self,
        pipeline: Pipeline | None = None,
        shapes: Mapping[str, Shapes] | None = None,
        *,
        max_bytes: int = MAX_REFERENCE_BYTES,
    ) -> None:
        self.pipeline = pipeline
        self.dense = False
        """Whether to send every value, only quantized: set while peers settle after training."""
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._shapes = shapes or {}
        self._exact: frozenset[str] = frozenset()
        self._max_bytes = max_bytes
        self._edges: OrderedDict[tuple[str, str], _Edge] = OrderedDict()
        """By (neighbour, model), least recently updated first."""
        self.held_bytes = 0
        """Bytes that all references take."""

    def set_models(self, shapes: Mapping[str, Shapes], exact: Collection[str] = ()) -> None:
        """Compress these models from now on; references of models that have ended are dropped.

        exact: models that are never compressed.
        """
        self._shapes, self._exact = shapes, frozenset(exact)
        for edge in [edge for edge in self._edges if edge[1] not in shapes]:
            self._drop(edge)

    # --- sending --------------------------------------------------------------------------------

    def compresses(self, model: str) -> bool:
        """Return whether values of a model are compressed."""
        return self.pipeline is not None and not self.is_exact(model)

    def is_exact(self, model: str) -> bool:
        """Return whether a model is never compressed, and no push of it is skipped."""
        return model in self._exact

    def pack(
        self, model: str, receiver: str, session: str, value: Array, rng: np.random.Generator
    ) -> tuple[Array, Packed, float] | None:
        """Compress a value for a receiver.

        Return the value that the receiver will read, its compressed form, and the fraction of the weight to
        send with it. None if the value must be sent uncompressed.
        """
        assert self.pipeline is not None
        with np.errstate(over="ignore"):
            plain = np.asarray(value, dtype=np.float32)
        edge = self._edges.get((receiver, model), _EMPTY_EDGE)
        base = edge.latest
        if base is not None and (base.session != session or base.value.shape != plain.shape):
            base = None
        with np.errstate(over="ignore", invalid="ignore"):
            change = plain if base is None else plain - base.value
            if not is_finite(change):
                return None
            if base is None:
                packed = self.pipeline.dense.pack(change, rng)
            else:
                pipeline = self.pipeline.dense if self.dense else self.pipeline
                sequence = -base.sequence if base is edge.received else base.sequence
                packed = pipeline.pack(change, rng, self._shapes.get(model), sequence)
            try:
                unpacked = unpack(packed, plain.size)
                gain, fraction = _damping(change, unpacked)
                packed = replace(packed, gain=gain)
                read_value = self._add(unpacked, gain, None if base is None else base.value)
            except PackError:  # the result is beyond the range of float32
                return None
        self.traffic[model].count_packed(distortion(plain, read_value))
        return read_value, packed, fraction

    def acknowledged(self, give: Give, *, credited: bool) -> None:
        """Note the acknowledgement of a sent transfer: its value becomes a reference if it was credited."""
        if not credited:
            self._drop((give.receiver, give.model))
        elif give.packed is not None:
            edge = self._edge(give.receiver, give.model)
            old_size = edge.nbytes
            edge.latest = _Reference(give.receiver_session, give.sequence, _values(give))
            edge.sent.append(edge.latest)
            self._add_bytes(edge.nbytes - old_size)

    def forget_peer(self, peer: str) -> None:
        """Drop the references of the edges to a peer that is gone."""
        for edge in [edge for edge in self._edges if edge[0] == peer]:
            self._drop(edge)

    def forget(self) -> None:
        """Drop all references: in a new session of this peer no neighbour has the same ones."""
        self._edges.clear()
        self.held_bytes = 0

    # --- receiving ------------------------------------------------------------------------------

    def unpack(self, give: Give, length: int, in_flight: Give | None = None) -> Array:
        """Return the value of a compressed transfer, read-only; raise PackError if its bytes are invalid.

        in_flight: our own open transfer on the same edge, if there is one. The sender may have credited it
            already and refer to it.
        """
        packed = give.packed
        assert packed is not None
        base_value = None
        if packed.base:
            base_value = self._base_value(give, packed.base, in_flight)
            if base_value is None or base_value.size != length:
                raise PackError(
                    "no-reference",
                    f"{give.model!r} from {give.sender}: a difference to the value of transfer "
                    f"{abs(packed.base)}, which this peer does not have",
                )
        value = self._add(unpack(packed, length), packed.gain, base_value)
        value.setflags(write=False)
        return value

    def credited(self, give: Give) -> None:
        """Keep the value of a received, credited transfer as a reference, if it was compressed."""
        if give.packed is not None:
            edge = self._edge(give.sender, give.model)
            old_size = edge.nbytes
            edge.received = edge.latest = _Reference(give.session, give.sequence, _values(give))
            self._add_bytes(edge.nbytes - old_size)

    def _base_value(self, give: Give, base: int, in_flight: Give | None) -> Array | None:
        """Return the value of the sender's transfer `base`, or of our transfer -base; None if not kept."""
        edge = self._edges.get((give.sender, give.model), _EMPTY_EDGE)
        received = [] if edge.received is None else [edge.received]
        for reference in edge.sent if base < 0 else received:
            if (reference.session, reference.sequence) == (give.session, abs(base)):
                return reference.value
        if base < 0 and in_flight is not None and in_flight.packed is not None:
            is_base = (in_flight.receiver_session, in_flight.sequence) == (give.session, -base)
            return _values(in_flight) if is_base else None
        return None

    def _edge(self, peer: str, model: str) -> _Edge:
        self._edges.setdefault((peer, model), _Edge())
        self._edges.move_to_end((peer, model))
        return self._edges[peer, model]

    def _add_bytes(self, size: int) -> None:
        """Count the bytes of a new reference, and drop the oldest edges beyond the limit."""
        self.held_bytes += size
        while self.held_bytes > self._max_bytes:
            self._drop(next(iter(self._edges)))

    def _drop(self, edge: tuple[str, str]) -> None:
        self.held_bytes -= self._edges.pop(edge, _EMPTY_EDGE).nbytes

    @staticmethod
    def _add(values: Array, gain: float, base_value: Array | None) -> Array:
        """Return base_value + gain · values; PackError if a coordinate of it is not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            total = values if gain == 1 else values * np.float32(gain)
            total = total if base_value is None else total + base_value
        if not is_finite(total):
            raise PackError(
                "non-finite", "a decompressed value is NaN or beyond the range of float32"
            )
        return total


def _values(give: Give) -> Array:
    """Return a transfer's value as float32, without a copy if it has this dtype."""
    return np.asarray(give.value, dtype=np.float32)


def _damping(change: Array, unpacked: Array) -> tuple[float, float]:
    """Return the gain and the fraction of the weight (the cosine) that damp a message, each from 0 to 1.

    Both are exactly 1 if they are near 1, because a gain costs a multiplication and gains nothing there.
    """
    original, result = change.astype(np.float64), unpacked.astype(np.float64)
    inner, squares = float(original @ result), (float(original @ original), float(result @ result))
    if not all(squares):
        return 1.0, 1.0 if squares[0] == 0 else 0.0
    cosine = min(1.0, max(0.0, inner) / math.sqrt(squares[0] * squares[1]))
    gain = min(1.0, max(0.0, inner / squares[1]))
    if cosine > _NO_DAMPING and gain > _NO_DAMPING:
        return 1.0, 1.0
    return float(np.float32(gain)), cosine
