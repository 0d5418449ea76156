"""A broker inside the process, and the transport that talks to it: deterministic, faults included.

    broker = MemoryBroker(FaultPlan(loss=0.1, duplicate=0.1), seed=1)
    async with MemoryTransport(broker, "ann-1") as ann, MemoryTransport(broker, "bob-1") as bob:
        ...

Time is the event loop's own turns: a delay of 3 is three turns, however long they take, so that
the same seed and the same tasks give the same deliveries.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from ..memory import FaultPlan
from ..topics import is_state, matches
from .base import HEADER_BYTES, Payload, Received, Transport, TransportError, Will

_HOLD_UP = 4
"""Loop turns by which a reordered message is held up at least."""


class MemoryBroker:
    """Topics, retained messages, last wills and faults, without a network.

    `stop()` forgets retained messages and cuts every connection, as a broker without persistence
    does; `start()` lets the transports come back. `faults` happen to QoS 0 messages, per delivery: cards and
    status always arrive. `retained`: by topic, what later subscribers will hear.
    """

    def __init__(
        self,
        faults: FaultPlan | None = None,
        *,
        seed: int | np.random.Generator | None = 0,
        max_packet: int = 64 * 1024 * 1024,
    ) -> None:
        self.faults = faults or FaultPlan()
        self.max_packet = max_packet
        self.counters: Counter[str] = Counter()
        self._random = np.random.default_rng(seed)
        self._clients: dict[str, MemoryTransport] = {}
        self.retained: dict[str, bytes] = {}
        self._held: list[tuple[int, str, Received]] = []
        self._turn = 0
        self._ticking = False
        self._running = True

    def stop(self) -> None:
        """Cut every connection and forget everything."""
        self._running = False
        clients, self._clients = self._clients, {}
        self.retained.clear()
        self._held.clear()
        for client in clients.values():
            client.lose("broker stopped")

    async def start(self, clients: Iterable[MemoryTransport] = ()) -> None:
        """Accept connections again, and reconnect the given transports in that order."""
        self._running = True
        for client in clients:
            await client.reconnect()

    # --- what transports call ------------------------------------------------------------------

    def connect(self, client: MemoryTransport) -> None:
        """Let a client in; one with the same id is kicked off, as MQTT demands."""
        if not self._running:
            raise TransportError("refused", "the memory broker is stopped: start() it first")
        other = self._clients.pop(client.client_id, None)
        self._clients[client.client_id] = client
        if other is not None:
            other.fail("taken-over", f"another client connected as {client.client_id!r}")

    def disconnect(self, client: MemoryTransport, will: Will | None) -> None:
        """Let a client go; its will is published if there is one to publish."""
        if self._clients.get(client.client_id) is client:
            del self._clients[client.client_id]
            if will is not None:
                self.publish(client.client_id, will.topic, will.payload, will.retain)

    def replay(self, client: MemoryTransport, pattern: str) -> None:
        """Hand a new subscriber what is retained."""
        for topic, payload in self.retained.items():
            if matches(pattern, topic):
                self._deliver(client.client_id, Received(topic, payload, True))

    def publish(self, sender: str, topic: str, payload: bytes, retain: bool) -> None:
        """Send to every subscriber, each delivery with its own luck."""
        if retain:
            if payload:
                self.retained[topic] = payload
            else:
                self.retained.pop(topic, None)
        message = Received(topic, payload, False)
        for name, client in self._clients.items():
            if not client.wants(topic):
                continue
            if is_state(topic):
                self._deliver(name, message)
            else:
                self._gossip(name, message)

    def _gossip(self, receiver: str, message: Received) -> None:
        for delay, _ in self.faults.outcome(self._random, self.counters, _HOLD_UP):
            if turns := round(delay):
                self._held.append((self._turn + turns, receiver, message))
                self._tick_soon()
            else:
                self._deliver(receiver, message)

    def _tick_soon(self) -> None:
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._turn += 1
        due = [item for item in self._held if item[0] <= self._turn]
        self._held = [item for item in self._held if item[0] > self._turn]
        for _, receiver, message in sorted(due, key=lambda item: item[0]):
            self._deliver(receiver, message)
        if self._held:
            self._tick_soon()

    def _deliver(self, receiver: str, message: Received) -> None:
        client = self._clients.get(receiver)
        if client is not None:
            client.receive(message)


class MemoryTransport(Transport):
    """A client of a MemoryBroker; see `Transport` for what it does and its options."""

    def __init__(self, broker: MemoryBroker, client_id: str, **options: Any) -> None:
        super().__init__(client_id, **options)
        self._broker = broker

    def max_payload(self, topic: str) -> int:
        """See `Transport.max_payload`."""
        return self._broker.max_packet - len(topic.encode()) - HEADER_BYTES

    async def __aenter__(self) -> Self:
        await self.reconnect()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._leave(None)

    async def abort(self) -> None:
        """See `Transport.abort`."""
        self._leave(self.will)

    async def reconnect(self) -> None:
        """Connect, subscribe again, and run the hook."""
        self._set("connecting")
        self._broker.connect(self)
        self._set("connected")
        for pattern in self._patterns:
            self._broker.replay(self, pattern)
        if self._on_connect is not None:
            await self._on_connect()

    async def publish(
        self, topic: str, payload: Payload, *, retain: bool = False, qos: int | None = None
    ) -> bool:
        """See `Transport.publish`."""
        if len(payload) > self.max_payload(topic):
            raise TransportError("too-large", f"{len(payload)} bytes to {topic} in one publish")
        await asyncio.sleep(0)  # a real transport yields here too
        return await super().publish(topic, payload, retain=retain, qos=qos)

    async def _send(self, topic: str, payload: Payload, retain: bool, qos: int) -> bool:
        self._broker.publish(self.client_id, topic, bytes(payload), retain)
        return True

    async def _subscribe(self, pattern: str) -> None:
        self._broker.replay(self, pattern)

    # --- what the broker calls -----------------------------------------------------------------

    def receive(self, message: Received) -> None:
        """Take a delivery."""
        self._inbox.offer(message)

    def lose(self, cause: str) -> None:
        """The connection is gone, for now."""
        self._set("lost", cause)

    def fail(self, cause: str, text: str) -> None:
        """The connection is gone for good."""
        self._end(TransportError(cause, text))

    def _leave(self, will: Will | None) -> None:
        if self.connection.state not in ("closed", "failed"):
            self._broker.disconnect(self, will)
            self._end()
