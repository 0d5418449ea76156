"""Simulated networks with faults: `MemoryNetwork` between gossipers, `MemoryBroker` between complete peers.

All randomness comes from the seed: the same messages sent at the same times have the same outcome.

    broker = MemoryBroker(FaultPlan(loss=0.1, duplicate=0.1), seed=1)
    async with MemoryTransport(broker, "ann-1") as ann, MemoryTransport(broker, "bob-1") as bob:
        ...

A broker measures time in iterations of the event loop: a delay of 3 is three iterations, however long each
takes.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np

from .gossiper import Gossiper
from .topics import is_retained_topic, matches
from .transport.base import HEADER_BYTES, Payload, Received, Transport, TransportError, Will
from .wire import Message

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Partition:
    """From `start` until `end` all messages between the peers in `side` and the other peers are lost.

    side: names of peers, strings here and integers in the arena.
    """

    start: float
    end: float
    side: frozenset[Any]

    def separates(self, a: Any, b: Any, now: float) -> bool:
        """Return whether messages from a to b sent now are lost."""
        return self.start <= now < self.end and (a in self.side) != (b in self.side)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of a network; probabilities are per message.

    loss, duplicate: probabilities of losing a message, and of delivering it a second time.
    delay: (least, most) time until delivery, drawn uniformly, in the unit of the network's clock: seconds, or
        iterations of the event loop for a `MemoryBroker`.
    reorder: probability that a message is delayed by another one to two times the largest delay, so that
        later messages may overtake it.
    partitions: network partitions; a `MemoryBroker` ignores them.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay: tuple[float, float] = (0.0, 0.0)
    partitions: tuple[Partition, ...] = ()

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "reorder"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"fault plan: {name} is {getattr(self, name)}, not within 0..1")
        if not 0 <= self.delay[0] <= self.delay[1]:
            raise ValueError(f"fault plan: delay {self.delay} is not (least, most)")

    def outcome(
        self, rng: np.random.Generator, counters: Counter[str], reorder_delay: float
    ) -> list[tuple[float, bool]]:
        """Draw the fate of one message: (delay, whether it is reordered) of each copy that is delivered.

        reorder_delay: the least time by which a reordered message is delayed further.
        """
        if rng.random() < self.loss:
            counters["lost"] += 1
            return []
        copies = 1
        if rng.random() < self.duplicate:
            counters["duplicated"] += 1
            copies = 2
        least, most = self.delay
        deliveries: list[tuple[float, bool]] = []
        for _ in range(copies):
            delay, reordered = rng.uniform(least, most), bool(rng.random() < self.reorder)
            if reordered:
                counters["reordered"] += 1
                delay += max(most, reorder_delay) * (1 + rng.random())
            deliveries.append((delay, reordered))
        return deliveries


class MemoryNetwork(Generic[M]):
    """Carries messages between gossipers. `counters` counts them by their fate.

    seed: an int or a numpy Generator.
    faults: by default messages are delivered after 0.01 s and in order; may be replaced at any time. Messages
        from one peer to another keep their order unless a fault reorders them.
    """

    def __init__(
        self, seed: int | np.random.Generator = 0, faults: FaultPlan | None = None
    ) -> None:
        self.faults = faults or FaultPlan(delay=(0.01, 0.01))
        self.counters: Counter[str] = Counter()
        self._rng = np.random.default_rng(seed)
        self._queue: list[tuple[float, int, M]] = []
        self._last_arrival: dict[tuple[str, str], float] = {}
        self._sent_count = 0

    def send(self, message: M, now: float) -> None:
        """Send a message at the time `now`, subject to the faults."""
        self.counters["sent"] += 1
        edge = (message.sender, message.receiver)
        if any(partition.separates(*edge, now) for partition in self.faults.partitions):
            self.counters["partitioned"] += 1
            return
        for delay, reordered in self.faults.outcome(self._rng, self.counters, 0.01):
            arrival = now + delay
            if not reordered:
                arrival = max(arrival, self._last_arrival.get(edge, 0.0))
                self._last_arrival[edge] = arrival
            self._sent_count += 1  # messages that arrive at the same time keep the order of sending
            heapq.heappush(self._queue, (arrival, self._sent_count, message))

    def deliver(self, now: float) -> list[M]:
        """Remove and return the messages that have arrived by the time `now`, in order of arrival."""
        due: list[M] = []
        while self._queue and self._queue[0][0] <= now:
            due.append(heapq.heappop(self._queue)[2])
        self.counters["delivered"] += len(due)
        return due


def introduce(
    gossipers: Iterable[Gossiper], edges: Collection[tuple[str, str]] | None = None
) -> None:
    """Tell every gossiper that the others are online, for the models that both have.

    edges: directed (from, to) pairs of peers along which mass may be pushed; all pairs by default.
    """
    all_gossipers = list(gossipers)
    for a in all_gossipers:
        for b in all_gossipers:
            if a is not b:
                may_push = edges is None or (a.peer, b.peer) in edges
                a.peer_online(b.peer, b.session, b.models if may_push else ())


def run(
    gossipers: Mapping[str, Gossiper],
    network: MemoryNetwork,
    *,
    start: float = 0.0,
    seconds: float = 60.0,
    step: float = 0.01,
    until: Callable[[], bool] | None = None,
) -> float:
    """Run gossipers over a network for some virtual seconds, or until a condition holds.

    Returns the virtual time at the end. Messages to peers that are not in `gossipers` are dropped.
    """
    ticks = round(seconds / step)
    now = start
    for tick in range(ticks + 1):
        now = start + tick * step
        for message in network.deliver(now):
            if message.receiver in gossipers:
                gossipers[message.receiver].handle(message, now)
            else:
                network.counters["no-such-peer"] += 1
        for gossiper in gossipers.values():
            gossiper.tick(now)
            for message in gossiper.poll():
                network.send(message, now)
        if until is not None and until():
            break
    return now


# --- a broker, and its clients -----------------------------------------------------------------------

_REORDER_DELAY = 4
"""Iterations of the event loop by which a reordered message is delayed at least."""


class MemoryBroker:
    """An MQTT broker inside the process: topics, retained messages, last wills and faults.

    `stop()` deletes retained messages and closes all connections, as a broker without persistence does;
    `start()` accepts connections again. `faults` apply to each delivery of a message at QoS 0: cards and
    status always arrive. `retained`: the retained message of each topic.
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
        self._delayed: list[tuple[int, str, Received]] = []
        """Iteration of the event loop in which a message is due, its receiver, and the message."""
        self._iteration = 0
        self._tick_scheduled = False
        self._running = True

    def stop(self) -> None:
        """Close all connections, and delete retained and delayed messages."""
        self._running = False
        clients, self._clients = self._clients, {}
        self.retained.clear()
        self._delayed.clear()
        for client in clients.values():
            client.lose("broker stopped")

    async def start(self, clients: Iterable[MemoryTransport] = ()) -> None:
        """Accept connections again, and reconnect the given transports in that order."""
        self._running = True
        for client in clients:
            await client.reconnect()

    # --- called by transports ------------------------------------------------------------------

    def connect(self, client: MemoryTransport) -> None:
        """Connect a client; disconnect another one with the same id, as MQTT demands."""
        if not self._running:
            raise TransportError("refused", "the memory broker is stopped: start() it first")
        replaced = self._clients.pop(client.client_id, None)
        self._clients[client.client_id] = client
        if replaced is not None:
            replaced.fail("taken-over", f"another client connected as {client.client_id!r}")

    def disconnect(self, client: MemoryTransport, will: Will | None) -> None:
        """Disconnect a client and publish `will`, if given."""
        if self._clients.get(client.client_id) is client:
            del self._clients[client.client_id]
            if will is not None:
                self.publish(client.client_id, will.topic, will.payload, will.retain)

    def replay(self, client: MemoryTransport, pattern: str) -> None:
        """Send a new subscriber the retained messages that match its pattern."""
        for topic, payload in self.retained.items():
            if matches(pattern, topic):
                self._deliver(client.client_id, Received(topic, payload, True))

    def publish(self, sender: str, topic: str, payload: bytes, retain: bool) -> None:
        """Deliver a message to all subscribers; faults are drawn for each delivery."""
        if retain:
            if payload:
                self.retained[topic] = payload
            else:
                self.retained.pop(topic, None)
        message = Received(topic, payload, False)
        for name, client in self._clients.items():
            if not client.wants(topic):
                continue
            if is_retained_topic(topic):
                self._deliver(name, message)
                continue
            for delay, _ in self.faults.outcome(self._random, self.counters, _REORDER_DELAY):
                if iterations := round(delay):
                    self._delayed.append((self._iteration + iterations, name, message))
                    self._tick_soon()
                else:
                    self._deliver(name, message)

    def _tick_soon(self) -> None:
        if not self._tick_scheduled:
            self._tick_scheduled = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._tick_scheduled = False
        self._iteration += 1
        due = [item for item in self._delayed if item[0] <= self._iteration]
        self._delayed = [item for item in self._delayed if item[0] > self._iteration]
        for _, receiver, message in sorted(due, key=lambda item: item[0]):
            self._deliver(receiver, message)
        if self._delayed:
            self._tick_soon()

    def _deliver(self, receiver: str, message: Received) -> None:
        client = self._clients.get(receiver)
        if client is not None:
            client.receive(message)


class MemoryTransport(Transport):
    """A client of a MemoryBroker; see `Transport` for its methods and options."""

    def __init__(self, broker: MemoryBroker, client_id: str, **options: Any) -> None:
        super().__init__(client_id, **options)
        self._broker = broker

    def max_payload(self, topic: str) -> int:
        return self._broker.max_packet - len(topic.encode()) - HEADER_BYTES

    async def __aenter__(self) -> Self:
        await self.reconnect()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._leave(None)

    async def abort(self) -> None:
        self._leave(self.will)

    async def reconnect(self) -> None:
        """Connect, repeat all subscriptions, and run the on_connect hook."""
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
        if len(payload) > self.max_payload(topic):
            raise TransportError("too-large", f"{len(payload)} bytes to {topic} in one publish")
        await asyncio.sleep(0)  # a real transport yields here too
        return await super().publish(topic, payload, retain=retain, qos=qos)

    async def _send(self, topic: str, payload: Payload, retain: bool, qos: int) -> bool:
        self._broker.publish(self.client_id, topic, bytes(payload), retain)
        return True

    async def _subscribe(self, pattern: str) -> None:
        self._broker.replay(self, pattern)

    # --- called by the broker -----------------------------------------------------------------

    def receive(self, message: Received) -> None:
        """Queue a message for the consumer."""
        self._inbox.offer(message)

    def lose(self, cause: str) -> None:
        """Mark the connection as lost; `reconnect` opens it again."""
        self._set("lost", cause)

    def fail(self, cause: str, text: str) -> None:
        """Mark the transport as failed: it cannot be connected again."""
        self._end(TransportError(cause, text))

    def _leave(self, will: Will | None) -> None:
        if self.connection.state not in ("closed", "failed"):
            self._broker.disconnect(self, will)
            self._end()
