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
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from gossamer.errors import GossamerError

from ..topics import is_state, matches

YIELD_INTERVAL = 0.01
"""Seconds for which messages are handed out, and dealt with, before the event loop gets its turn. One in
every turn would not keep up with a broker, which sends hundreds of small packets in that time."""
HEADER_BYTES = 16
"""Bytes of an MQTT packet besides topic and payload: header, lengths, packet id, properties."""

Payload: TypeAlias = bytes | bytearray
Hook: TypeAlias = Callable[[], Awaitable[None]]
"""Awaited after every (re)connection, subscriptions in place: publish the birth here."""
State: TypeAlias = Literal["new", "connecting", "connected", "lost", "failed", "closed"]
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

    `since` is the event loop's time at which the attempt began that this connection came of: whatever
    was heard earlier came over another one.
    """

    state: State
    cause: str = ""
    since: float = 0.0


def default_qos(topic: str) -> int:
    """1 for cards and status, which must arrive; 0 for what is repeated anyway."""
    return 1 if is_state(topic) else 0


class Transport(ABC):
    """A client of a broker.

    client_id: how the broker knows us: the peer's id and session.
    will: what the broker publishes if we vanish.
    on_connect: see `Hook`. on_state: called with every change of `connection`.
    max_inbound_messages, max_inbound_bytes: bounds of what waits to be read; see `Inbox`.

    `connection` says whether we are connected, and why not; `counters` what was dropped, by cause: see
    `Inbox` and the implementations for the names.
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
        self._inbox = Inbox(self.counters, max_inbound_messages, max_inbound_bytes)
        self._settled = asyncio.Event()
        """Set unless a connection is being waited for."""
        self._error: TransportError | None = None

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *exc: Any) -> None: ...

    @abstractmethod
    async def abort(self) -> None:
        """Vanish as if the power was cut: no goodbye, so that the last will is published."""

    @abstractmethod
    def max_payload(self, topic: str) -> int:
        """The largest payload that one publish to `topic` can carry: cut chunks to this size."""

    async def publish(
        self, topic: str, payload: Payload, *, retain: bool = False, qos: int | None = None
    ) -> bool:
        """Send. True when handed to the broker; False when dropped (and counted).

        `qos` defaults to 1 for cards and status, else 0. QoS 0 is dropped while there is no
        connection or the outbound bound is reached; QoS 1 waits and repeats until the broker has
        it, so put a timeout around it if you cannot wait. Raises TransportError once the transport
        has failed for good, or if the payload is larger than `max_payload`.
        """
        qos = default_qos(topic) if qos is None else qos
        while True:
            self._raise_if_over()
            if self._online:
                sent = await self._send(topic, payload, retain, qos)
                if sent or qos == 0:
                    return sent
            elif qos == 0:
                self.counters["outbound-offline"] += 1
                return False
            else:
                await self._settled.wait()
                await asyncio.sleep(0)

    @abstractmethod
    async def _send(self, topic: str, payload: Payload, retain: bool, qos: int) -> bool:
        """Send over the present connection; False, and counted, if that failed."""

    async def subscribe(self, pattern: str) -> None:
        """Receive what matches `pattern`, from now on and after every reconnection."""
        self._raise_if_over()
        if pattern not in self._patterns:
            self._patterns.append(pattern)
        if self._online:  # else the next connection subscribes
            await self._subscribe(pattern)

    @abstractmethod
    async def _subscribe(self, pattern: str) -> None:
        """Subscribe on the present connection; if it is lost meanwhile, the next one does."""

    @property
    def _online(self) -> bool:
        return self.connection.state == "connected"

    def wants(self, topic: str) -> bool:
        """Whether a subscription covers the topic."""
        return any(matches(pattern, topic) for pattern in self._patterns)

    def messages(self) -> AsyncIterator[Received]:
        """What arrives, for one consumer. Ends when closed; raises if the transport failed."""
        return self._inbox.messages()

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self.connection.state in ("new", "closed"):
            raise TransportError("closed", "this transport is not open")

    def _set(self, state: State, cause: str = "") -> None:
        waiting = state in ("connecting", "lost")
        (self._settled.clear if waiting else self._settled.set)()
        now = asyncio.get_running_loop().time()
        since = now if state == "connecting" else self.connection.since
        self.connection = Connection(state, cause, since)
        if self._on_state is not None:
            self._on_state(self.connection)

    def _end(self, error: TransportError | None = None) -> None:
        """Be over, for good: closed, or failed with an error that every call raises from now on."""
        self._error = error
        self._set("closed" if error is None else "failed", "" if error is None else str(error))
        self._inbox.close(error)


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
