"""Long messages in several packets: split to the broker's limit, put together in bounded memory.

Every packet starts with a 40-byte chunk header: magic, version, attempt, who sent it, which message,
index, count, total length and a checksum of the whole. Chunks are of equal size (the last one may be
shorter), so that each header alone says where its bytes belong: any order will do.

A message that is sent again, unchanged, keeps its number, so that each attempt completes what the ones
before have brought. The attempt tells a repetition, which wants an answer, from a duplicated packet.

A message that fits one packet pays nothing: what was received is handed on as a view.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .wire import MAX_MESSAGE_BYTES, Buffer, WireError

MAGIC: Final = b"GSMC"
VERSION: Final = 2
TOPIC_ROOM: Final = 1024
"""Bytes of a packet kept free for MQTT's own header, the topic and its properties."""
DEFAULT_LIMIT: Final = 1024 * 1024 - TOPIC_ROOM
MIN_BODY: Final = 64
"""No chunk but the last may be smaller: bounds how many pieces a stranger can claim."""

_HEADER = struct.Struct("<4sBB2xQQIIII")
HEADER_BYTES: Final = _HEADER.size
MIN_LIMIT: Final = HEADER_BYTES + 2 * MIN_BODY  # two halves of a little more than one body fit
_REMEMBERED = 1024
_ATTEMPTS = 256  # as many as one byte tells apart
_HEAD = 4096  # bytes of a message by which it is known again, besides its checksum


class Chunker:
    """Cuts one sender's messages into payloads of at most `limit` bytes.

    `sender` should name the peer and its session. Raise `limit` with the broker's packet limit:
    fewer, larger packets cost less per byte; lower it when large packets hold up small ones.
    """

    def __init__(
        self, sender: str, limit: int = DEFAULT_LIMIT, *, first_id: int | None = None
    ) -> None:
        if limit < MIN_LIMIT:
            raise ValueError(f"chunks of {limit} bytes: at least {MIN_LIMIT} needed")
        self.limit = limit
        digest = hashlib.blake2b(sender.encode(), digest_size=8).digest()
        self._sender = int.from_bytes(digest, "little")
        # A restarted peer keeps its session: a random start keeps its old chunks apart from new.
        self._next = secrets.randbits(63) if first_id is None else first_id
        self._sent: OrderedDict[tuple[Any, ...], tuple[int, int]] = OrderedDict()
        """Number and attempt of the messages cut lately, by what is in them."""

    def split(self, buffers: Sequence[Buffer]) -> Iterator[bytes]:
        """Return the payloads of one message, each copied once from `buffers` when it is asked for.

        Do not write to the buffers before the last payload has been taken.
        """
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        total = sum(len(view) for view in views)
        if total > MAX_MESSAGE_BYTES:
            raise WireError("too-large", f"{total} bytes; the limit is {MAX_MESSAGE_BYTES}")
        count = max(1, -(-total // (self.limit - HEADER_BYTES)))
        checksum = 0
        if count > 1:  # one packet arrives whole or not at all: nothing to check, or to complete
            for view in views:
                checksum = zlib.crc32(view, checksum)
        message_id, attempt = self._number(views, total, checksum, count)
        return self._pieces(views, (message_id, attempt), total, checksum, count)

    def _number(
        self, views: list[memoryview], total: int, checksum: int, count: int
    ) -> tuple[int, int]:
        """Return a new number for a message, or the one that it had before, and the attempt."""
        # The first buffer is a message's own header, which has a sequence: no two are alike in that.
        known = (total, checksum, bytes(views[0][:_HEAD])) if count > 1 else ()
        message_id, attempt = self._sent.pop(known, (0, _ATTEMPTS))
        attempt += 1
        if attempt >= _ATTEMPTS:
            message_id, attempt = self._next, 0
            self._next = (self._next + 1) % 2**64
        if count > 1:
            self._sent[known] = message_id, attempt
            if len(self._sent) > _REMEMBERED:
                self._sent.popitem(last=False)
        return message_id, attempt

    def _pieces(
        self,
        views: list[memoryview],
        number: tuple[int, int],
        total: int,
        checksum: int,
        count: int,
    ) -> Iterator[bytes]:
        message_id, attempt = number
        size = _chunk_size(total, count)
        for index in range(count):
            head = _HEADER.pack(
                MAGIC, VERSION, attempt, self._sender, message_id, index, count, total, checksum
            )
            yield b"".join([head, *_cut(views, index * size, (index + 1) * size)])


def _chunk_size(total: int, count: int) -> int:
    return -(-total // count)


def _cut(views: list[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """Return the pieces of `views`, seen as one long buffer, between two offsets."""
    offset = 0
    for view in views:
        low, high = max(start - offset, 0), min(stop - offset, len(view))
        if low < high:
            yield view[low:high]
        offset += len(view)


@dataclass(slots=True)
class _Partial:
    """A message of which some chunks are still missing."""

    checksum: int
    count: int
    data: bytearray
    seen: bytearray
    missing: int
    attempt: int = 0
    """The latest of which a chunk has come."""

    @property
    def cost(self) -> int:
        return len(self.data) + len(self.seen)


@dataclass(frozen=True, slots=True)
class _Chunk:
    attempt: int
    sender: int
    message_id: int
    index: int
    count: int
    total: int
    checksum: int
    body: memoryview


@dataclass(slots=True)
class Reassembler:
    """Puts chunks together, within bounds that no sender can exceed.

    When a bound is reached an unfinished message is given up and counted in `dropped` by cause: its sender
    repeats it. It is a message of the sender that occupies the most, the one that waits the longest for
    another chunk, so that a sender who floods us displaces its own messages and nobody else's. Raise the
    bounds with the size of your models times the neighbours that may send at the same time.
    """

    max_message_bytes: int = 64 * 1024 * 1024
    max_sender_bytes: int = 128 * 1024 * 1024
    max_total_bytes: int = 256 * 1024 * 1024
    max_unfinished: int = 64
    dropped: Counter[str] = field(default_factory=Counter)
    """Unfinished messages given up, and duplicated chunks ignored, by cause."""
    _partials: OrderedDict[tuple[int, int], _Partial] = field(default_factory=OrderedDict)
    _finished: OrderedDict[tuple[int, int], int] = field(default_factory=OrderedDict)

    @property
    def held_bytes(self) -> int:
        """How much memory unfinished messages take."""
        return sum(partial.cost for partial in self._partials.values())

    @property
    def unfinished(self) -> int:
        """How many messages wait for more chunks."""
        return len(self._partials)

    def add(self, payload: Buffer) -> memoryview | None:
        """Take one payload; return the whole message when this payload completes one.

        Raises WireError for a payload that is not a chunk or belongs to no possible message.
        """
        chunk = _parse(payload, self.max_message_bytes)
        if chunk.count == 1:
            return chunk.body
        key = (chunk.sender, chunk.message_id)
        if chunk.attempt <= self._finished.get(key, -1):
            self.dropped["duplicate"] += 1
            return None
        partial = self._partials.get(key)
        if partial is None:
            partial = self._open(key, chunk)
        elif (partial.checksum, partial.count, len(partial.data)) != (
            chunk.checksum,
            chunk.count,
            chunk.total,
        ):
            raise WireError("checksum", "a chunk contradicts the others of its message")
        partial.attempt = max(partial.attempt, chunk.attempt)
        self._partials.move_to_end(key)  # what makes progress is the last to be given up
        if partial.seen[chunk.index]:
            self.dropped["duplicate"] += 1
            return None
        start = chunk.index * _chunk_size(chunk.total, chunk.count)
        partial.data[start : start + len(chunk.body)] = chunk.body
        partial.seen[chunk.index] = 1
        partial.missing -= 1
        return None if partial.missing else self._finish(key, partial)

    def _open(self, key: tuple[int, int], chunk: _Chunk) -> _Partial:
        cost = chunk.total + chunk.count
        limit = min(self.max_sender_bytes, self.max_total_bytes)
        if cost > limit:
            raise WireError("too-large", f"a message of {chunk.total} bytes; room for {limit}")
        mine = [other for other in self._partials if other[0] == chunk.sender]
        mine_cost = sum(self._partials[other].cost for other in mine)
        for other in mine:  # oldest first
            if mine_cost + cost <= self.max_sender_bytes:
                break
            mine_cost -= self._partials[other].cost
            self._give_up(other, "sender-bytes")
        while self._partials and self.held_bytes + cost > self.max_total_bytes:
            held = Counter({chunk.sender: cost})
            for (sender, _), partial in self._partials.items():
                held[sender] += partial.cost
            self._give_up(self._oldest_of_largest(held, chunk.sender), "total-bytes")
        while self._partials and len(self._partials) >= self.max_unfinished:
            held = Counter([chunk.sender])
            held.update(sender for sender, _ in self._partials)
            self._give_up(self._oldest_of_largest(held, chunk.sender), "unfinished")
        partial = _Partial(
            chunk.checksum, chunk.count, bytearray(chunk.total), bytearray(chunk.count), chunk.count
        )
        self._partials[key] = partial
        return partial

    def _oldest_of_largest(self, held: Counter[int], newest: int) -> tuple[int, int]:
        """Return the oldest message of the sender that holds the most; of equals, `newest` goes first.

        held: what every sender occupies, the message that `newest` is about to open included.
        """
        most = max(held[sender] for sender, _ in self._partials)
        equals = [key for key in self._partials if held[key[0]] == most]  # oldest first
        return next((key for key in equals if key[0] == newest), equals[0])

    def _give_up(self, key: tuple[int, int], cause: str) -> None:
        del self._partials[key]
        self.dropped[cause] += 1

    def _finish(self, key: tuple[int, int], partial: _Partial) -> memoryview:
        del self._partials[key]
        if zlib.crc32(partial.data) != partial.checksum:
            raise WireError("checksum", "the chunks of a message do not add up to its checksum")
        self._finished.pop(key, None)
        self._finished[key] = partial.attempt
        if len(self._finished) > max(_REMEMBERED, 2 * self.max_unfinished):
            self._finished.popitem(last=False)
        return memoryview(partial.data).toreadonly()


def _parse(payload: Buffer, max_message_bytes: int) -> _Chunk:
    view = memoryview(payload).cast("B").toreadonly()
    if len(view) < HEADER_BYTES:
        cause = "truncated" if bytes(view[:4]) == MAGIC else "garbage"
        raise WireError(cause, f"{len(view)} bytes are too few for a chunk")
    magic, version, attempt, *of = _HEADER.unpack_from(view)
    sender, message_id, index, count, total, checksum = of
    if magic != MAGIC:
        raise WireError("garbage", f"a payload that starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError("version", f"chunk version {version}; this peer speaks {VERSION}")
    if total > max_message_bytes:
        raise WireError("too-large", f"a message of {total} bytes; limit {max_message_bytes}")
    if not 0 <= index < count:
        raise WireError("garbage", f"chunk {index} of {count}")
    size = _chunk_size(total, count)
    if count > 1 and (size < MIN_BODY or (count - 1) * size >= total):
        raise WireError("garbage", f"{total} bytes cannot be {count} chunks")
    body = view[HEADER_BYTES:]
    expected = min(size, total - index * size)
    if len(body) != expected:
        cause = "truncated" if len(body) < expected else "trailing"
        raise WireError(cause, f"chunk {index} of {count} has {len(body)} bytes, not {expected}")
    return _Chunk(attempt, sender, message_id, index, count, total, checksum, body)
