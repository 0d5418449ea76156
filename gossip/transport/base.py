"""The interface of all transports: publish to topics, subscribe to patterns, iterate over messages.

    async with transport:
        await transport.subscribe(topics.inboxes(swarm, peer))
        async for topic, payload, retain in transport.messages():
            ...

Messages are delivered as in MQTT. Cards and status are sent at QoS 1 and are never dropped by a transport.
All other messages are sent at QoS 0 and may be dropped, by the network or by a full queue at either end;
drops are counted in `counters` and raise no error: the ledger repeats transfers until they are acknowledged.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from gossamer.errors import GossamerError

from ..topics import is_retained_topic, matches

YIELD_INTERVAL = 0.01
"""Seconds for which the consumer is given messages before other tasks of the event loop may run. One message
per iteration of the loop would be too slow: a broker sends hundreds of small packets in this time."""
HEADER_BYTES = 16
"""Bytes of an MQTT packet besides topic and payload: header, lengths, packet id, properties."""


class Buffers:
    """A payload in several buffers, which a socket writes one after the other without joining them first.

    They must not change until the payload is sent. `bytes(…)` returns them joined.
    """

    __slots__ = ("_length", "views")

    def __init__(self, views: Sequence[bytes | memoryview]) -> None:
        self.views = views
        self._length = sum(len(view) for view in views)

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return b"".join(self.views)


Payload: TypeAlias = bytes | bytearray | Buffers
Hook: TypeAlias = Callable[[], Awaitable[None]]
"""Awaited after every connection and reconnection, once all subscriptions are made: the place to publish a
birth message."""
State: TypeAlias = Literal["new", "connecting", "connected", "lost", "failed", "closed"]
StateCallback: TypeAlias = Callable[["Connection"], None]

REFUSALS = frozenset({"password", "not-authorised", "certificate", "tls"})
"""The broker rejected our credentials, or we rejected its certificate."""
OUTAGES = frozenset({"refused", "hung-up", "unreachable", "silent", "unknown-host"})
"""Causes that may be over at a later start, as after a power cut of the broker and of this machine."""


class TransportError(GossamerError):
    """A failure of a transport; `cause` is a short identifier such as "too-large"."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause

    @property
    def is_outage(self) -> bool:
        """Whether a later start may succeed with the same settings and files."""
        return self.cause in OUTAGES

    @property
    def is_refusal(self) -> bool:
        """Whether password, certificate or authority (CA) are not those that they should be."""
        return self.cause in REFUSALS


class Received(NamedTuple):
    """One message as it arrived. `retain`: the broker had stored it before we subscribed.

    A large payload is a view of memory that only this message uses: it need not be copied.
    """

    topic: str
    payload: bytes | memoryview
    retain: bool


@dataclass(frozen=True, slots=True)
class Will:
    """The message that the broker publishes for us if the connection ends without a DISCONNECT."""

    topic: str
    payload: bytes
    retain: bool = True
    qos: int = 1


@dataclass(frozen=True, slots=True)
class Connection:
    """The state of a transport's connection. `cause`: why it was lost or failed, as text.

    `since` is the event loop's time at which the latest attempt to connect began: any message received
    earlier came over another connection.
    """

    state: State
    cause: str = ""
    since: float = 0.0


def default_qos(topic: str) -> int:
    """Return 1 for retained topics (cards, status), which must arrive; 0 for messages that are repeated."""
    return 1 if is_retained_topic(topic) else 0


class Transport(ABC):
    """A client of a broker.

    client_id: our MQTT client id: of a peer its name, process and session.
    will: the message that the broker publishes if the connection ends without a DISCONNECT.
    on_connect: see `Hook`. on_state: called with every change of `connection`.
    max_inbound_messages, max_inbound_bytes: bounds of the queue of unread messages; see `Inbox`.

    `connection` is the state of the connection, and the cause if it is lost; `counters` has the number of
    dropped messages by cause: see `Inbox` and the subclasses for the names.
    """

    def __init__(
        self,
        client_id: str,
        *,
        will: Will | None = None,
        on_connect: Hook | None = None,
        on_state: StateCallback | None = None,
        max_inbound_messages: int = 16 * 1024,
        max_inbound_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self.client_id, self.will = client_id, will
        self.counters: Counter[str] = Counter()
        self.connection = Connection("new")
        self._on_connect, self._on_state = on_connect, on_state
        self._patterns: list[str] = []
        self._wildcards: list[str] = []
        """Those of the patterns that have wildcards; all others are topics."""
        self._inbox = Inbox(self.counters, max_inbound_messages, max_inbound_bytes)
        self._outcome_known = asyncio.Event()
        """Set while connected, failed or closed; cleared while an attempt to connect is under way."""
        self._error: TransportError | None = None

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *exc: Any) -> None: ...

    @abstractmethod
    async def abort(self) -> None:
        """Close without a DISCONNECT, as after a power failure, so that the last will is published."""

    @abstractmethod
    def max_payload(self, topic: str) -> int:
        """Return the bytes of the largest payload that one publish to `topic` can carry."""

    async def publish(
        self, topic: str, payload: Payload, *, retain: bool = False, qos: int | None = None
    ) -> bool:
        """Send a message. Return True if it was passed to the broker; False if it was dropped (and counted).

        `qos` defaults to 1 for cards and status, else 0. A message at QoS 0 is dropped while there is no
        connection or the outbound queue is full; one at QoS 1 is repeated until the broker acknowledges it:
        use a timeout if you cannot wait. Raises TransportError once the transport has failed and will not
        reconnect, or if the payload is larger than `max_payload`.
        """
        qos = default_qos(topic) if qos is None else qos
        while True:
            self._raise_unless_open()
            if self._online:
                sent = await self._send(topic, payload, retain, qos)
                if sent or qos == 0:
                    return sent
            elif qos == 0:
                self.counters["outbound-offline"] += 1
                return False
            else:
                await self._outcome_known.wait()
                await asyncio.sleep(0)

    @abstractmethod
    async def _send(self, topic: str, payload: Payload, retain: bool, qos: int) -> bool:
        """Send over the current connection; if that fails, count it and return False."""

    async def subscribe(self, pattern: str) -> None:
        """Subscribe to topics that match `pattern`, now and after every reconnection."""
        self._raise_unless_open()
        if pattern not in self._patterns:
            self._patterns.append(pattern)
            if "+" in pattern or "#" in pattern:
                self._wildcards.append(pattern)
        if self._online:  # otherwise the next connection subscribes to all patterns
            await self._subscribe(pattern)

    @abstractmethod
    async def _subscribe(self, pattern: str) -> None:
        """Subscribe on the current connection; if it is lost before the answer, the next one subscribes."""

    @property
    def _online(self) -> bool:
        return self.connection.state == "connected"

    def wants(self, topic: str) -> bool:
        """Return whether one of our subscriptions covers the topic."""
        return topic in self._patterns or any(matches(p, topic) for p in self._wildcards)

    def messages(self) -> AsyncIterator[Received]:
        """Iterate over arriving messages, for one consumer; raises if the transport has failed."""
        return self._inbox.messages()

    def _raise_unless_open(self) -> None:
        """Raise the transport's error if it has failed, and a TransportError if it is not open."""
        if self._error is not None:
            raise self._error
        if self.connection.state in ("new", "closed"):
            raise TransportError("closed", "this transport is not open")

    def _set(self, state: State, cause: str = "") -> None:
        connecting = state in ("connecting", "lost")
        (self._outcome_known.clear if connecting else self._outcome_known.set)()
        now = asyncio.get_running_loop().time()
        since = now if state == "connecting" else self.connection.since
        self.connection = Connection(state, cause, since)
        if self._on_state is not None:
            self._on_state(self.connection)

    def _end(self, error: TransportError | None = None) -> None:
        """End as closed or, given an error, as failed: every later call raises that error."""
        self._error = error
        self._set("closed" if error is None else "failed", "" if error is None else str(error))
        self._inbox.close(error)


class Inbox:
    """The bounded queue between a transport and its one consumer.

    Messages beyond `max_messages` or `max_bytes` are dropped and counted as `inbound-full`. Cards and status
    are exempt: such a message replaces an older unread one on the same topic (`inbound-superseded`), so that
    memory is bounded by the number of peers. Raise the bounds if drops are counted while your peer has memory
    to spare; lower them on small devices.
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
        """Payload bytes of all unread messages."""
        return self._bytes

    def offer(self, message: Received) -> bool:
        """Queue a message; return False if it was dropped instead. Does not block."""
        if self._closed:
            return False
        full = (
            len(self._queue) >= self._max_messages
            or self._bytes + len(message.payload) > self._max_bytes
        )
        if full and not is_retained_topic(message.topic):
            self._counters["inbound-full"] += 1
            return False
        if full:
            self._supersede(message.topic)
        self._queue.append(message)
        self._bytes += len(message.payload)
        self._ready.set()
        return True

    def _supersede(self, topic: str) -> None:
        """Drop the unread message on this topic, if there is one."""
        for index, old in enumerate(self._queue):
            if old.topic == topic:
                del self._queue[index]
                self._bytes -= len(old.payload)
                self._counters["inbound-superseded"] += 1
                return

    def close(self, error: TransportError | None = None) -> None:
        """End the iteration, with `error` if given, once the consumer has read all queued messages."""
        if not self._closed:
            self._closed, self._error = True, error
            self._ready.set()

    async def messages(self) -> AsyncIterator[Received]:
        """Iterate over the queued messages in the order of arrival."""
        now = asyncio.get_running_loop().time
        while True:
            yield_at = now() + self._yield_interval
            while self._queue:
                self._bytes -= len(self._queue[0].payload)
                yield self._queue.popleft()  # a local variable would keep the message in memory
                if now() >= yield_at:
                    await asyncio.sleep(0)  # a full inbox must not starve the other tasks
                    yield_at = now() + self._yield_interval
            if self._closed:
                if self._error is not None:
                    raise self._error
                return
            self._ready.clear()
            await self._ready.wait()


async def end_task(task: asyncio.Future[Any]) -> None:
    """Cancel a task if it still runs, and wait for its end; its error, if any, counts as seen.

    For a task whose result is read afterwards, unless the caller is cancelled: then nobody reads it, and
    asyncio would log the error with its traceback.
    """
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()
