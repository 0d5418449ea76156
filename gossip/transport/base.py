"""What every transport can do: publish to topics, subscribe to patterns, hand over what arrives.

    async with transport:
        await transport.subscribe(topics.inboxes(swarm, me))
        async for topic, payload, retain in transport.messages():
            ...

Delivery is that of MQTT. Cards and status travel at QoS 1 and are never dropped by a transport.
Everything else travels at QoS 0 and may be dropped, on the way or by a full queue at either end;
drops are counted in `counters`, never raised: the ledger repeats what matters.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias

from gossamer.errors import GossamerError

from ..topics import is_state

YIELD_INTERVAL = 0.01
"""Seconds for which messages are handed out, and dealt with, before the event loop gets its turn. One in
every turn would not keep up with a broker, which sends hundreds of small packets in that time."""

Payload: TypeAlias = bytes | bytearray
Hook: TypeAlias = Callable[[], Awaitable[None]]
"""Awaited after every (re)connection, subscriptions in place: publish the birth here."""
StateCallback: TypeAlias = Callable[["Connection"], None]


class TransportError(GossamerError):
    """A transport that cannot go on; `cause` is a slug, the message one clear line."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Received(NamedTuple):
    """One message as it arrived. `retain` says that it was stored before we subscribed.

    A large payload is a view of memory that is the receiver's own: it can be read in place.
    """

    topic: str
    payload: bytes | memoryview
    retain: bool


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker publishes for us if we vanish without a goodbye."""

    topic: str
    payload: bytes
    retain: bool = True
    qos: int = 1


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a transport stands. `cause` says why it was lost or failed.

    `since` is the time.monotonic() at which the attempt began that this connection came of: whatever
    was heard earlier came over another one.
    """

    state: Literal["new", "connecting", "connected", "lost", "failed", "closed"]
    cause: str = ""
    since: float = 0.0


class Transport(Protocol):
    """The interface; MemoryTransport and MqttTransport are its two implementations."""

    @property
    def client_id(self) -> str:
        """How the broker knows us: the peer's id and session."""
        ...

    @property
    def connection(self) -> Connection:
        """Connected or not, and why not."""
        ...

    @property
    def counters(self) -> Counter[str]:
        """What was dropped, by cause: see `Inbox` and the implementations for the names."""
        ...

    def max_payload(self, topic: str) -> int:
        """The largest payload that one publish to `topic` can carry: cut chunks to this size."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: Any) -> None: ...

    async def publish(
        self, topic: str, payload: Payload, *, retain: bool = False, qos: int | None = None
    ) -> bool:
        """Send. True when handed to the broker; False when dropped (and counted).

        `qos` defaults to 1 for cards and status, else 0. QoS 0 is dropped while there is no
        connection or the outbound bound is reached; QoS 1 waits and repeats until the broker has
        it, so put a timeout around it if you cannot wait. Raises TransportError once the transport
        has failed for good, or if the payload is larger than `max_payload`.
        """
        ...

    async def subscribe(self, pattern: str) -> None:
        """Receive what matches `pattern`, from now on and after every reconnection."""
        ...

    def messages(self) -> AsyncIterator[Received]:
        """What arrives, for one consumer. Ends when closed; raises if the transport failed."""
        ...

    async def abort(self) -> None:
        """Vanish as if the power was cut: no goodbye, so that the last will is published."""
        ...


def default_qos(topic: str) -> int:
    """1 for cards and status, which must arrive; 0 for what is repeated anyway."""
    return 1 if is_state(topic) else 0


class Inbox:
    """The bounded queue between a transport and its one consumer.

    Beyond `max_messages` or `max_bytes` what arrives is dropped and counted as `inbound-full`,
    cards and status excepted: of those, an older unread one on the same topic is replaced
    (`inbound-superseded`), so that memory is bounded by the number of peers. Raise the bounds if
    drops are counted while your peer has memory to spare; lower them on small devices.
    """

    def __init__(
        self,
        counters: Counter[str],
        max_messages: int = 1024,
        max_bytes: int = 64 * 1024 * 1024,
        yield_interval: float = YIELD_INTERVAL,
    ) -> None:
        self._counters = counters
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._yield_interval = yield_interval
        self._queue: deque[Received] = deque()
        self._bytes = 0
        self._ready = asyncio.Event()
        self._closed = False
        self._error: TransportError | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def held_bytes(self) -> int:
        """Payload bytes that wait to be read."""
        return self._bytes

    def offer(self, message: Received) -> bool:
        """Queue a message, or drop it; False if it was dropped. Never blocks."""
        if self._closed:
            return False
        full = (
            len(self._queue) >= self._max_messages
            or self._bytes + len(message.payload) > self._max_bytes
        )
        if full and not is_state(message.topic):
            self._counters["inbound-full"] += 1
            return False
        if full:
            self._supersede(message.topic)
        self._queue.append(message)
        self._bytes += len(message.payload)
        self._ready.set()
        return True

    def _supersede(self, topic: str) -> None:
        for index, old in enumerate(self._queue):
            if old.topic == topic:
                del self._queue[index]
                self._bytes -= len(old.payload)
                self._counters["inbound-superseded"] += 1
                return

    def close(self, error: TransportError | None = None) -> None:
        """Let the consumer read what is queued, then end, or raise `error`."""
        if not self._closed:
            self._closed, self._error = True, error
            self._ready.set()

    async def messages(self) -> AsyncIterator[Received]:
        """What was queued, in the order of arrival."""
        now = asyncio.get_running_loop().time
        while True:
            until = now() + self._yield_interval
            while self._queue:
                self._bytes -= len(self._queue[0].payload)
                yield self._queue.popleft()  # without a name, which would hold on to it
                if now() >= until:
                    await asyncio.sleep(0)  # a full inbox must not starve the other tasks
                    until = now() + self._yield_interval
            if self._closed:
                if self._error is not None:
                    raise self._error
                return
            self._ready.clear()
            await self._ready.wait()
