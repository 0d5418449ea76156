"""Networks in memory, faults included: one that carries messages between gossipers, a broker for whole peers.

Everything follows from the seed: the same messages sent at the same times have the same outcome.

    broker = MemoryBroker(FaultPlan(loss=0.1, duplicate=0.1), seed=1)
    async with MemoryTransport(broker, "ann-1") as ann, MemoryTransport(broker, "bob-1") as bob:
        ...

A broker's time is the event loop's own turns: a delay of 3 is three turns, however long they take.
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
from .topics import is_state, matches
from .transport.base import HEADER_BYTES, Payload, Received, Transport, TransportError, Will
from .wire import Message

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Partition:
    """From `start` until `end` nothing passes between the peers of `side` and the others.

    Peers are named as their network names them: by strings here, by numbers in the arena.
    """

    start: float
    end: float
    side: frozenset[Any]

    def separates(self, a: Any, b: Any, now: float) -> bool:
        """Return whether messages from a to b sent now are lost."""
        return self.start <= now < self.end and (a in self.side) != (b in self.side)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What a network does to messages; probabilities are per message.

    loss, duplicate: probabilities of losing a message, and of delivering it a second time.
    delay: (least, most) time on the way, drawn uniformly, in the unit of the network's clock: seconds, or
        turns of the event loop for a `MemoryBroker`.
    reorder: probability of being held up by one to two times the largest delay, and overtaken.
    partitions: when which peers are cut off from the others; a `MemoryBroker` has none.
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
        self, rng: np.random.Generator, counters: Counter[str], tick: float
    ) -> list[tuple[float, bool]]:
        """Draw what becomes of one message: for each copy that arrives its delay, and if it is overtaken.

        tick: the least time by which a message is held up.
        """
        if rng.random() < self.loss:
            counters["lost"] += 1
            return []
        copies = 1
        if rng.random() < self.duplicate:
            counters["duplicated"] += 1
            copies = 2
        least, most = self.delay
        drawn: list[tuple[float, bool]] = []
        for _ in range(copies):
            delay, overtaken = rng.uniform(least, most), bool(rng.random() < self.reorder)
            if overtaken:
                counters["reordered"] += 1
                delay += max(most, tick) * (1 + rng.random())
            drawn.append((delay, overtaken))
        return drawn


class MemoryNetwork(Generic[M]):
    """Carries messages between peers. `counters` says what became of them.

    seed: an int or a numpy Generator.
    faults: what to do to messages, which arrive after 0.01 s and in order if left out; may be replaced at
        any time. Messages keep their order per link unless reordered.
    """

    def __init__(
        self, seed: int | np.random.Generator = 0, faults: FaultPlan | None = None
    ) -> None:
        self.faults = faults or FaultPlan(delay=(0.01, 0.01))
        self.counters: Counter[str] = Counter()
        self._rng = np.random.default_rng(seed)
        self._queue: list[tuple[float, int, M]] = []
        self._last: dict[tuple[str, str], float] = {}
        self._number = 0

    def send(self, message: M, now: float) -> None:
        """Put a message on its way, or lose it, as the faults have it."""
        self.counters["sent"] += 1
        link = (message.sender, message.receiver)
        if any(each.separates(*link, now) for each in self.faults.partitions):
            self.counters["partitioned"] += 1
            return
        for delay, overtaken in self.faults.outcome(self._rng, self.counters, 0.01):
            arrival = now + delay
            if not overtaken:
                arrival = self._last[link] = max(arrival, self._last.get(link, 0.0))
            self._number += 1  # ties keep the order of sending
            heapq.heappush(self._queue, (arrival, self._number, message))

    def deliver(self, now: float) -> list[M]:
        """Return the messages that have arrived by now, in order of arrival."""
        due: list[M] = []
        while self._queue and self._queue[0][0] <= now:
            due.append(heapq.heappop(self._queue)[2])
        self.counters["delivered"] += len(due)
        return due


def introduce(
    gossipers: Iterable[Gossiper], edges: Collection[tuple[str, str]] | None = None
) -> None:
    """Tell every gossiper that the others are online, for the models that both have.

    edges: directed (from, to) pairs along which mass may be pushed; by default all.
    """
    everyone = list(gossipers)
    for a in everyone:
        for b in everyone:
            if a is not b:
                along = edges is None or (a.peer, b.peer) in edges
                a.peer_online(b.peer, b.session, b.models if along else ())


def run(
    gossipers: Mapping[str, Gossiper],
    network: MemoryNetwork,
    *,
    start: float = 0.0,
    seconds: float = 60.0,
    step: float = 0.01,
    until: Callable[[], bool] | None = None,
) -> float:
    """Drive gossipers over a network for some virtual seconds, or until a condition holds.

    Returns the virtual time at the end. Messages to peers that are not in `gossipers` vanish.
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
