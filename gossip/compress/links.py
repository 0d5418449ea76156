"""Compression between two peers: what goes over an edge is a difference, and what is lost stays.

Push-sum sends a share of the weight at a value v. A compressor makes v̂ of it; the receiver credits its
weight at v̂, and the sender keeps the rest of the sum, weight · (v − v̂): nothing is lost, whatever the
compressor does. But v̂ must be near v, or sums that stay behind pile up: the largest hundredth of v, and
zeros, would be a poor estimate. So both ends remember the last values that were credited on their edge, in
either direction, and what is compressed is the difference to the latest that both have. It is small and
vanishes as peers agree, and the compressor's noise with it. Under a server it is the update: what a client
learnt since it was given the mean.

Weight that moves where its value cannot follow drives sums apart (random masks and two-bit numbers made
values grow without bound in trials), so two things are damped, by what was measured of the message itself.
The difference d̂ that arrives is multiplied by its least-squares gain ⟨d, d̂⟩ / ‖d̂‖², so that it never leads
farther away than none. And only the part cos(d, d̂) of the weight goes along: all of it if everything came
through. This exponent was found by trial: with none, values grew under masks; with cos² peers agreed as
well, but learnt more slowly, because less weight moved.

Two other ways were weighed. Giving weight to the sent values alone needs a weight for every value, on the
wire too, where it takes more room than sparse values save. One reference for all edges of a sender would
have to reach all of them with every push.

It costs memory, up to three vectors per edge, within `room`; the oldest are forgotten first. Forgetting is
safe. A sender without a reference sends the vector itself. A receiver without the one that a message names
(after a restart, say) answers "void"; the sender takes its mass back, forgets its references of that edge
too and sends the vector itself next time. So references need not be saved.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ..pushsum import is_finite
from .compressors import Pipeline, distortion, unpack
from .packed import Array, Packed, PackError, Shapes

if TYPE_CHECKING:
    from ..wire import Give

ROOM = 256 << 20
"""Bytes of references that one peer keeps."""
_NEARLY_ALL = 0.99
SENT_KEPT = 2
"""Own values remembered per edge: the neighbour may name the last but one while the last is on its way."""


@dataclass(slots=True)
class Traffic:
    """Counts of one partial model at one peer. They add with `+`."""

    messages: int = 0
    """Compressed messages that left, repeats included."""
    bytes: int = 0
    """Their bytes, headers included."""
    plain_bytes: int = 0
    """What they would have taken uncompressed."""
    packed: int = 0
    """Values compressed: each counts once for its distortion."""
    distortion: float = 0.0
    """The sum of their relative distortions, ‖value − what the receiver reads‖ / ‖value‖."""
    worst: float = 0.0
    """The largest of them."""
    skipped: int = 0
    """Messages not sent because the model had hardly moved."""
    skipped_bytes: int = 0
    """What they would have taken uncompressed."""

    def packed_one(self, distortion: float) -> None:
        """Count a value that was compressed."""
        self.packed += 1
        self.distortion += distortion
        self.worst = max(self.worst, distortion)

    def sent(self, size: int, plain: int) -> None:
        """Count a message that left."""
        self.messages += 1
        self.bytes += size
        self.plain_bytes += plain

    def skip(self, messages: int, plain: int) -> None:
        """Count messages that were not sent."""
        self.skipped += messages
        self.skipped_bytes += plain

    @property
    def saved(self) -> int:
        """Bytes that an uncompressed twin, which skips nothing, would have sent on top."""
        return self.plain_bytes - self.bytes + self.skipped_bytes

    @property
    def mean_distortion(self) -> float:
        """The mean relative distortion of a message; 0 if there was none."""
        return self.distortion / self.packed if self.packed else 0.0

    def __add__(self, other: Traffic) -> Traffic:
        mine, theirs = asdict(self), asdict(other)
        total = Traffic(**{name: mine[name] + theirs[name] for name in mine})
        total.worst = max(self.worst, other.worst)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    session: str
    """The neighbour's session in which both ends had it."""
    sequence: int
    value: Array


@dataclass(slots=True, eq=False)
class _Edge:
    """What both ends of an edge know of one model."""

    sent: deque[_Reference] = field(default_factory=lambda: deque(maxlen=SENT_KEPT))
    heard: _Reference | None = None
    latest: _Reference | None = None

    @property
    def nbytes(self) -> int:
        kept = [*self.sent, *([] if self.heard is None else [self.heard])]
        return sum(each.value.nbytes for each in kept)


_NOTHING = _Edge()


class Links:
    """The references of one peer's edges, in both directions.

    pipeline: how to compress what this peer sends; None sends plain values, and still understands
        others' compressed ones.
    shapes: the blocks of each model, for compressors that look at matrices.
    room: bytes of references to keep. Raise it if `refused-no-reference` is counted by neighbours that
        were not restarted.
    """

    def __init__(
        self,
        pipeline: Pipeline | None = None,
        shapes: Mapping[str, Shapes] | None = None,
        *,
        room: int = ROOM,
    ) -> None:
        self.pipeline = pipeline
        self.dense = False
        """Leave nothing out from now on: for the last exchanges, in which peers come to agree."""
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._shapes = shapes or {}
        self._room = room
        self._edges: OrderedDict[tuple[str, str], _Edge] = OrderedDict()
        self.held_bytes = 0
        """Memory that references take."""

    # --- sending --------------------------------------------------------------------------------

    def pack(
        self, model: str, receiver: str, session: str, value: Array, rng: np.random.Generator
    ) -> tuple[Array, Packed, float] | None:
        """Return what the receiver will read of a value, how it is sent, and which part of it came through.

        None if it must go plain.
        """
        assert self.pipeline is not None
        with np.errstate(over="ignore"):
            plain = np.asarray(value, dtype=np.float32)
        edge = self._edges.get((receiver, model), _Edge())
        known = edge.latest
        if known is not None and (known.session != session or known.value.shape != plain.shape):
            known = None
        with np.errstate(over="ignore", invalid="ignore"):
            change = plain if known is None else plain - known.value
            if not is_finite(change):
                return None
            if known is None:
                packed = self.pipeline.dense.pack(change, rng)
            else:
                pipeline = self.pipeline.dense if self.dense else self.pipeline
                base = -known.sequence if known is edge.heard else known.sequence
                packed = pipeline.pack(change, rng, self._shapes.get(model), base)
            try:
                came = unpack(packed, plain.size)
                gain, part = _damping(change, came)
                packed = replace(packed, gain=gain)
                read = self._add(came, packed.gain, None if known is None else known.value)
            except PackError:  # beyond what float32 holds, or nearly
                return None
        self.traffic[model].packed_one(distortion(plain, read))
        return read, packed, part

    def settled(self, give: Give, *, credited: bool) -> None:
        """Note what became of an own transfer: both ends know its value now, or do not."""
        if not credited:
            self._drop((give.receiver, give.model))
        elif give.packed is not None:
            edge = self._edge(give.receiver, give.model)
            before = edge.nbytes
            edge.latest = _Reference(give.receiver_session, give.sequence, _values(give))
            edge.sent.append(edge.latest)
            self._make_room(edge.nbytes - before)

    def forget_peer(self, peer: str) -> None:
        """Forget the edges to a peer that is gone."""
        for edge in [each for each in self._edges if each[0] == peer]:
            self._drop(edge)

    def forget(self) -> None:
        """Begin with no references: after the peer has taken a new session, nobody knows the old."""
        self._edges.clear()
        self.held_bytes = 0

    # --- receiving ------------------------------------------------------------------------------

    def unpack(self, give: Give, length: int, on_its_way: Give | None = None) -> Array:
        """Return the value of a compressed transfer, read only. Raises PackError, whatever was sent.

        on_its_way: our own open transfer on the same edge, if there is one. Its receiver may have
        credited it already and refer to it.
        """
        packed = give.packed
        assert packed is not None
        known = None
        if packed.base:
            known = self._named(give, packed.base, on_its_way)
            if known is None or known.size != length:
                raise PackError(
                    "no-reference",
                    f"{give.model!r}: transfer {packed.base} is not remembered here",
                )
        value = self._add(unpack(packed, length), packed.gain, known)
        value.setflags(write=False)
        return value

    def credited(self, give: Give) -> None:
        """Remember the value of a compressed transfer that was credited."""
        if give.packed is not None:
            edge = self._edge(give.sender, give.model)
            before = edge.nbytes
            edge.heard = edge.latest = _Reference(give.session, give.sequence, _values(give))
            self._make_room(edge.nbytes - before)

    def _named(self, give: Give, base: int, on_its_way: Give | None) -> Array | None:
        """Return the value that a message refers to: its sender's transfer `base`, or ours if negative."""
        edge = self._edges.get((give.sender, give.model), _Edge())
        kept = list(edge.sent) if base < 0 else [] if edge.heard is None else [edge.heard]
        for each in kept:
            if (each.session, each.sequence) == (give.session, abs(base)):
                return each.value
        if base < 0 and on_its_way is not None and on_its_way.packed is not None:
            there = (on_its_way.receiver_session, on_its_way.sequence)
            return _values(on_its_way) if there == (give.session, -base) else None
        return None

    def _edge(self, peer: str, model: str) -> _Edge:
        self._edges.setdefault((peer, model), _Edge())
        self._edges.move_to_end((peer, model))
        return self._edges[peer, model]

    def _make_room(self, more: int) -> None:
        self.held_bytes += more
        while self.held_bytes > self._room:
            self._drop(next(iter(self._edges)))

    def _drop(self, edge: tuple[str, str]) -> None:
        self.held_bytes -= self._edges.pop(edge, _NOTHING).nbytes

    @staticmethod
    def _add(values: Array, gain: float, known: Array | None) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            total = values if gain == 1 else values * np.float32(gain)
            total = total if known is None else total + known
        if not is_finite(total):
            raise PackError("non-finite", "a compressed difference leads beyond float32")
        return total


def _values(give: Give) -> Array:
    """Return a transfer's value as references are kept: without a copy, unless it is of another kind."""
    return np.asarray(give.value, dtype=np.float32)


def _damping(change: Array, came: Array) -> tuple[float, float]:
    """Return the gain of what came of a change, and the part of the change that it stands for.

    Both are 1 where nearly everything came: a gain costs a multiplication and saves nothing there.
    """
    sent, got = change.astype(np.float64), came.astype(np.float64)
    inner, sizes = float(sent @ got), (float(sent @ sent), float(got @ got))
    if not all(sizes):
        return 1.0, 1.0 if sizes[0] == 0 else 0.0
    part = min(1.0, max(0.0, inner) / math.sqrt(sizes[0] * sizes[1]))
    gain = min(1.0, max(0.0, inner / sizes[1]))
    return (
        (1.0, 1.0) if part > _NEARLY_ALL and gain > _NEARLY_ALL else (float(np.float32(gain)), part)
    )
