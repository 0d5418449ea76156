"""Split long messages into chunks that fit the broker's packet limit, and reassemble them in bounded memory.

Every packet starts with a 40-byte chunk header: magic, version, attempt, sender, message id, index, count,
total length and a checksum of the message. Chunks are of equal size (the last one may be shorter), so that
the position of a chunk follows from its own header: chunks may arrive in any order.

A message that is sent again, unchanged, keeps its id, so that chunks of all its attempts complete one
another. The number of the attempt distinguishes a repetition, which must be answered, from a duplicated
packet.

A message that fits in one packet is not copied: the receiver gets a view of the packet.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .transport.base import Buffers
from .wire import MAX_MESSAGE_BYTES, Buffer, WireError

MAGIC: Final = b"GSMC"
VERSION: Final = 2
TOPIC_ROOM: Final = 1024
"""Bytes of a packet left free for the MQTT header, the topic and properties."""
DEFAULT_LIMIT: Final = 1024 * 1024 - TOPIC_ROOM
MIN_BODY: Final = 64
"""The smallest body of a chunk, except the last one, in bytes. It bounds the number of chunks that an
untrusted sender can announce."""

_HEADER = struct.Struct("<4sBB2xQQIIII")
HEADER_BYTES: Final = _HEADER.size
MIN_PACKET_BYTES: Final = HEADER_BYTES + 2 * MIN_BODY
"""The lowest allowed limit of a packet's bytes: a message that just exceeds it is sent as two chunks with
bodies of at least MIN_BODY bytes."""
_REMEMBERED_MESSAGES = 1024
_MAX_ATTEMPTS = 256  # the attempt is one byte of the header
_COMPARED_BYTES = 4096  # of a message, to recognise a repetition, besides length and checksum


class Chunker:
    """Splits one sender's messages into payloads of at most `limit` bytes.

    sender: an id of the peer and its session. first_id: the first message's id, for tests.
    limit: raise it with the broker's packet limit, as fewer, larger packets cost less per byte; lower it if
        large packets delay small ones.
    """

    def __init__(
        self, sender: str, limit: int = DEFAULT_LIMIT, *, first_id: int | None = None
    ) -> None:
        if limit < MIN_PACKET_BYTES:
            raise ValueError(
                f"chunks of {limit} bytes are too small: use at least {MIN_PACKET_BYTES}"
            )
        self.limit = limit
        digest = hashlib.blake2b(sender.encode(), digest_size=8).digest()
        self._sender = int.from_bytes(digest, "little")
        # A restarted peer keeps its session: ids start at random so that they differ from those before.
        self._next_id = secrets.randbits(63) if first_id is None else first_id
        self._sent: OrderedDict[tuple[Any, ...], tuple[int, int]] = OrderedDict()
        """Id and attempt of recent messages, by length, checksum and first bytes; see `_identify`."""

    def split(self, buffers: Sequence[Buffer]) -> Iterator[bytes]:
        """Return an iterator over the payloads of one message, which copies each from `buffers` when reached.

        Do not write to the buffers before the iteration has ended.
        """
        return map(bytes, self.split_views(buffers))

    def split_views(self, buffers: Sequence[Buffer]) -> Iterator[Buffers]:
        """Return an iterator over the payloads of one message, which are views of `buffers`.

        Do not write to the buffers before all payloads are sent.
        """
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        total = sum(len(view) for view in views)
        if total > MAX_MESSAGE_BYTES:
            raise WireError(
                "too-large", f"a message of {total} bytes; the limit is {MAX_MESSAGE_BYTES}"
            )
        count = max(1, -(-total // (self.limit - HEADER_BYTES)))
        checksum = 0
        if count > 1:  # a single packet arrives complete or not at all: it needs no checksum
            for view in views:
                checksum = zlib.crc32(view, checksum)
        message_id, attempt = self._identify(views, total, checksum, count)
        return self._chunks(views, (message_id, attempt), total, checksum, count)

    def _identify(
        self, views: list[memoryview], total: int, checksum: int, count: int
    ) -> tuple[int, int]:
        """Return the id and attempt of a message: a new id, or its former one if it is sent again."""
        # The first buffer is the header of the message, with a sequence number that differs between messages.
        content = (total, checksum, bytes(views[0][:_COMPARED_BYTES])) if count > 1 else ()
        message_id, attempt = self._sent.pop(content, (0, _MAX_ATTEMPTS))
        attempt += 1
        if attempt >= _MAX_ATTEMPTS:
            message_id, attempt = self._next_id, 0
            self._next_id = (self._next_id + 1) % 2**64
        if count > 1:
            self._sent[content] = message_id, attempt
            if len(self._sent) > _REMEMBERED_MESSAGES:
                self._sent.popitem(last=False)
        return message_id, attempt

    def _chunks(
        self,
        views: list[memoryview],
        id_and_attempt: tuple[int, int],
        total: int,
        checksum: int,
        count: int,
    ) -> Iterator[Buffers]:
        message_id, attempt = id_and_attempt
        size = _chunk_size(total, count)
        for index in range(count):
            head = _HEADER.pack(
                MAGIC, VERSION, attempt, self._sender, message_id, index, count, total, checksum
            )
            yield Buffers([head, *_byte_range(views, index * size, (index + 1) * size)])


def _chunk_size(total: int, count: int) -> int:
    return -(-total // count)


def _byte_range(views: list[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """Yield views of the bytes from `start` to `stop` of the concatenated `views`."""
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
    """By index of a chunk: 1 if it has arrived."""
    missing: int
    """The number of chunks that have not."""
    attempt: int = 0
    """The latest attempt of which a chunk has arrived."""

    @property
    def cost(self) -> int:
        """Bytes of memory."""
        return len(self.data) + len(self.seen)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The fields of a chunk's header, and its body."""

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
    """Reassembles messages from chunks, within bounds that no sender can exceed.

    When a bound is reached, an unfinished message is dropped and counted in `dropped` by cause; its sender
    will repeat it. The message dropped is, of the sender that occupies the most memory, the one whose last
    chunk arrived longest ago: a sender that floods us displaces only its own messages. Raise the bounds in
    proportion to the size of your models and to the number of neighbours that may send at the same time.
    """

    max_message_bytes: int = 64 * 1024 * 1024
    max_sender_bytes: int = 128 * 1024 * 1024
    max_total_bytes: int = 256 * 1024 * 1024
    max_unfinished: int = 64
    dropped: Counter[str] = field(default_factory=Counter)
    """The number of unfinished messages dropped and of duplicated chunks ignored, by cause."""
    _partials: OrderedDict[tuple[int, int], _Partial] = field(default_factory=OrderedDict)
    _finished: OrderedDict[tuple[int, int], int] = field(default_factory=OrderedDict)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that unfinished messages occupy."""
        return sum(partial.cost for partial in self._partials.values())

    @property
    def unfinished(self) -> int:
        """The number of messages of which chunks are missing."""
        return len(self._partials)

    def add(self, payload: Buffer) -> memoryview | None:
        """Add one payload; return the message if this payload completes it, else None.

        Raises WireError for a payload that is not a chunk, or whose header is inconsistent.
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
        self._partials.move_to_end(key)  # messages that make progress are dropped last
        if partial.seen[chunk.index]:
            self.dropped["duplicate"] += 1
            return None
        start = chunk.index * _chunk_size(chunk.total, chunk.count)
        partial.data[start : start + len(chunk.body)] = chunk.body
        partial.seen[chunk.index] = 1
        partial.missing -= 1
        return None if partial.missing else self._finish(key, partial)

    def _open(self, key: tuple[int, int], chunk: _Chunk) -> _Partial:
        """Add a message, and drop others to make room for it; WireError if it alone exceeds a bound."""
        cost = chunk.total + chunk.count
        limit = min(self.max_sender_bytes, self.max_total_bytes)
        if cost > limit:
            raise WireError("too-large", f"a message of {chunk.total} bytes; the limit is {limit}")
        same_sender = [other for other in self._partials if other[0] == chunk.sender]
        sender_cost = sum(self._partials[other].cost for other in same_sender)
        for other in same_sender:  # oldest first
            if sender_cost + cost <= self.max_sender_bytes:
                break
            sender_cost -= self._partials[other].cost
            self._drop(other, "sender-bytes")
        while self._partials and self.held_bytes + cost > self.max_total_bytes:
            self._drop_from_largest_sender(chunk.sender, cost, lambda p: p.cost, "total-bytes")
        while self._partials and len(self._partials) >= self.max_unfinished:
            self._drop_from_largest_sender(chunk.sender, 1, lambda _: 1, "unfinished")
        partial = _Partial(
            chunk.checksum, chunk.count, bytearray(chunk.total), bytearray(chunk.count), chunk.count
        )
        self._partials[key] = partial
        return partial

    def _drop_from_largest_sender(
        self, new_sender: int, new_cost: int, cost_of: Callable[[_Partial], int], cause: str
    ) -> None:
        """Drop the oldest unfinished message of the sender whose messages cost the most, by `cost_of`.

        new_sender, new_cost: the sender and the cost of the message that is about to be opened. If several
        senders cost the same, this one's message is dropped.
        """
        usage = Counter({new_sender: new_cost})
        for (sender, _), partial in self._partials.items():
            usage[sender] += cost_of(partial)
        most = max(usage[sender] for sender, _ in self._partials)
        candidates = [key for key in self._partials if usage[key[0]] == most]  # oldest first
        self._drop(next((key for key in candidates if key[0] == new_sender), candidates[0]), cause)

    def _drop(self, key: tuple[int, int], cause: str) -> None:
        del self._partials[key]
        self.dropped[cause] += 1

    def _finish(self, key: tuple[int, int], partial: _Partial) -> memoryview:
        del self._partials[key]
        if zlib.crc32(partial.data) != partial.checksum:
            raise WireError("checksum", "the checksum of a reassembled message is wrong")
        self._finished.pop(key, None)
        self._finished[key] = partial.attempt
        if len(self._finished) > max(_REMEMBERED_MESSAGES, 2 * self.max_unfinished):
            self._finished.popitem(last=False)
        return memoryview(partial.data).toreadonly()


def _parse(payload: Buffer, max_message_bytes: int) -> _Chunk:
    view = memoryview(payload).cast("B").toreadonly()
    if len(view) < HEADER_BYTES:
        cause = "truncated" if bytes(view[:4]) == MAGIC else "garbage"
        raise WireError(cause, f"{len(view)} bytes are too few for a chunk")
    magic, version, attempt, *fields = _HEADER.unpack_from(view)
    sender, message_id, index, count, total, checksum = fields
    if magic != MAGIC:
        raise WireError("garbage", f"not a chunk: it starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise WireError("version", f"chunk version {version}; this peer supports version {VERSION}")
    if total > max_message_bytes:
        raise WireError(
            "too-large", f"a message of {total} bytes; the limit is {max_message_bytes}"
        )
    if not 0 <= index < count:
        raise WireError("garbage", f"chunk index {index} of {count} chunks is out of range")
    size = _chunk_size(total, count)
    if count > 1 and (size < MIN_BODY or (count - 1) * size >= total):
        raise WireError("garbage", f"a message of {total} bytes cannot have {count} chunks")
    body = view[HEADER_BYTES:]
    expected = min(size, total - index * size)
    if len(body) != expected:
        cause = "truncated" if len(body) < expected else "trailing"
        raise WireError(cause, f"chunk {index} of {count} has {len(body)} bytes, not {expected}")
    return _Chunk(attempt, sender, message_id, index, count, total, checksum, body)
