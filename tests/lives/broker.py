"""A broker in virtual time, and the transport that talks to it.

It does what MQTT brokers do with clean sessions: retained messages, last wills, one connection per client
id, order kept per connection, QoS 1 repeated by the client until it is acknowledged, QoS 0 lost with its
connection. A connection is a pair of pipes, which a partition or a frozen client blocks without closing
them; either side gives such a connection up after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from gossamer.gossip import (
    Hook,
    Payload,
    Received,
    Transport,
    TransportError,
    Will,
    default_qos,
    is_retained_topic,
    matches,
)

from .loop import SimLoop
from .world import Device, Process

MAX_PACKET = 1 << 20


@dataclass(frozen=True)
class Network:
    """What the network does to messages.

    delay: seconds on the way to or from the broker, drawn anew for every message.
    drop, duplicate, reorder: probabilities for messages at QoS 0, per delivery.
    keepalive: seconds after which either side gives up a connection over which nothing comes.
    first_delay, longest_delay: seconds between two attempts to reconnect.
    """

    delay: tuple[float, float] = (0.001, 0.01)
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    keepalive: float = 3.0
    first_delay: float = 0.2
    longest_delay: float = 4.0


class Pipe:
    """One direction of a connection: what goes in comes out later, in order, unless it is reordered."""

    def __init__(self, broker: SimBroker, blocked: Callable[[], bool]) -> None:
        self._broker, self._blocked = broker, blocked
        self._queue: deque[Callable[[], None]] = deque()
        self._stuck: list[Callable[[], None]] = []
        self._last = 0.0
        self.closed = False

    def send(self, deliver: Callable[[], None], *, overtaken: bool = False) -> None:
        """Call `deliver` after a delay, unless the pipe is closed by then."""
        network = self._broker.network
        at = self._broker.loop.time() + self._broker.rng.uniform(*network.delay)
        if overtaken:
            at += self._broker.rng.uniform(0.0, 10 * network.delay[1])
            self._at(at, lambda: self._arrive(deliver))
        else:
            self._last = max(self._last, at)
            self._queue.append(deliver)
            # Whichever of several timers of one time runs first takes the first of the queue.
            self._at(self._last, lambda: self._arrive(self._queue.popleft()))

    def unblock(self) -> None:
        """Deliver what was stuck in the pipe."""
        stuck, self._stuck = self._stuck, []
        for deliver in stuck:
            self.send(deliver)

    def _arrive(self, deliver: Callable[[], None]) -> None:
        if self.closed:
            return
        if self._blocked():
            self._stuck.append(deliver)
        else:
            deliver()

    def _at(self, when: float, callback: Callable[[], None]) -> None:
        self._broker.loop.call_at(when, callback, context=self._broker.context)


class Wire:
    """One connection of a client, as both sides see it."""

    def __init__(self, broker: SimBroker, client: SimTransport) -> None:
        self.broker, self.client = broker, client
        self.will = client.will
        self.patterns: list[str] = []
        self.up = Pipe(broker, self._blocked_up)
        self.down = Pipe(broker, lambda: client.is_cut)
        self.open_at_broker = True
        self.silent_since: float | None = None
        """Since when the broker hears nothing, not even keepalives."""

    def _blocked_up(self) -> bool:
        return self.client.is_cut

    def close(self) -> None:
        """Deliver nothing more in either direction."""
        self.up.closed = self.down.closed = True


class SimBroker:
    """Topics, retained messages, last wills and faults.

    on_publish: told (client id, topic, payload, retain) about every message that the broker takes.
    """

    def __init__(
        self,
        loop: SimLoop,
        rng: random.Random,
        network: Network | None = None,
        on_publish: Callable[[str, str, bytes, bool], None] = lambda *_: None,
    ) -> None:
        self.loop, self.rng = loop, rng
        self.network = network or Network()
        self.retained: dict[str, bytes] = {}
        self.counters: Counter[str] = Counter()
        self.last_drop: dict[str, float] = {}
        """Topic → when a message to it was last lost."""
        self.running = True
        self.context = contextvars.Context()
        self._wires: dict[str, Wire] = {}
        self._clients: list[SimTransport] = []
        self._on_publish = on_publish

    # --- faults ---------------------------------------------------------------------------------

    def stop(self, *, forget: bool) -> None:
        """Cut every connection; `forget` loses the retained messages. Wills die with the broker."""
        self.running = False
        if forget:
            self.retained.clear()
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.open_at_broker = False
            wire.close()
            if not wire.client.is_cut:
                self.loop.call_soon(wire.client.lose, wire, "broker stopped", context=self.context)
            # else the client finds out by its own keepalive

    def start(self) -> None:
        """Accept connections again."""
        self.running = True

    def cut(self, device: Device) -> None:
        """Let nothing pass between a device and the broker; both sides notice after a keepalive."""
        device.is_cut = True
        for client in self._on(device):
            wire = client.wire
            if wire is not None:
                self._doubt(wire)
                wait = self.network.keepalive * self.rng.uniform(0.5, 2.0)
                self.loop.call_later(wait, client.miss, wire, context=self.context)

    def heal(self, device: Device) -> None:
        """Let everything pass again."""
        device.is_cut = False
        for client in self._on(device):
            wire = client.wire
            if wire is None:
                continue
            if wire.open_at_broker:
                wire.silent_since = None
                wire.up.unblock()
                wire.down.unblock()
            else:  # the broker answers the next packet with a reset
                self.loop.call_soon(client.lose, wire, "connection reset", context=self.context)

    def freeze(self, process: Process) -> None:
        """Note that a process says nothing any more, not even keepalives, though its socket is open."""
        for client in self._of(process):
            if client.wire is not None:
                self._doubt(client.wire)

    def thaw(self, process: Process) -> None:
        """Note that it does again."""
        for client in self._of(process):
            if client.wire is not None and not client.is_cut:
                client.wire.silent_since = None

    def die(self, process: Process, *, silently: bool) -> None:
        """End the connections of a killed process: at once, or silently, as when its power is cut."""
        for client in self._of(process):
            client.inert = True
            wire = client.wire
            if wire is None or not wire.open_at_broker:
                continue
            if silently or client.is_cut:
                wire.up.closed = True
                self._doubt(wire)
            else:
                wire.up.send(lambda wire=wire: self.reset(wire))

    def _of(self, process: Process) -> list[SimTransport]:
        return [client for client in self._clients if client.process is process]

    def _on(self, device: Device) -> list[SimTransport]:
        return [client for client in self._clients if client.process.device is device]

    def _doubt(self, wire: Wire) -> None:
        """Give a silent connection up after one and a half keepalives."""
        since = wire.silent_since = self.loop.time()

        def look() -> None:
            if wire.open_at_broker and wire.silent_since == since:
                self.reset(wire)

        self.loop.call_later(1.5 * self.network.keepalive, look, context=self.context)

    def reset(self, wire: Wire) -> None:
        """Close a connection from the broker's side, and publish its will."""
        if not wire.open_at_broker:
            return
        wire.open_at_broker = False
        if self._wires.get(wire.client.client_id) is wire:
            del self._wires[wire.client.client_id]
        wire.close()
        if wire.will is not None:
            self.publish(
                wire.client.client_id, wire.will.topic, wire.will.payload, wire.will.retain
            )
        if not wire.client.is_cut:
            self.loop.call_soon(wire.client.lose, wire, "connection reset", context=self.context)

    # --- what transports call -------------------------------------------------------------------

    def add(self, client: SimTransport) -> None:
        """Get to know a client."""
        self._clients.append(client)

    def accept(self, client: SimTransport) -> Wire:
        """Let a client in; an older connection under its id is closed, and its will published."""
        old = self._wires.get(client.client_id)
        if old is not None:
            self.reset(old)
            if old.client is not client and not old.client.inert:
                old.client.fail("taken-over", f"another client connected as {client.client_id!r}")
        wire = self._wires[client.client_id] = Wire(self, client)
        return wire

    def disconnect(self, wire: Wire) -> None:
        """Close a connection that its client took leave of: without a will."""
        wire.will = None
        if wire.open_at_broker:
            self.reset(wire)

    def subscribe(self, wire: Wire, pattern: str) -> None:
        """Send what matches from now on, and what is retained already."""
        if pattern not in wire.patterns:
            wire.patterns.append(pattern)
        for topic, payload in list(self.retained.items()):
            if matches(pattern, topic):
                wire.down.send(lambda t=topic, p=payload: wire.client.receive(Received(t, p, True)))

    def publish(self, sender: str, topic: str, payload: bytes, retain: bool) -> None:
        """Send to every subscriber, each delivery with its own luck."""
        self._on_publish(sender, topic, payload, retain)
        if retain:
            if payload:
                self.retained[topic] = payload
            else:
                self.retained.pop(topic, None)
        message = Received(topic, payload, False)
        for wire in list(self._wires.values()):
            if any(matches(pattern, topic) for pattern in wire.patterns):
                self._deliver(wire, message)

    def _deliver(self, wire: Wire, message: Received) -> None:
        def deliver() -> None:
            wire.client.receive(message)

        if is_retained_topic(message.topic):
            wire.down.send(deliver)
            return
        network, rng = self.network, self.rng
        if rng.random() < network.drop:
            self.counters["dropped"] += 1
            self.last_drop[message.topic] = self.loop.time()
            return
        for _ in range(2 if rng.random() < network.duplicate else 1):
            wire.down.send(deliver, overtaken=rng.random() < network.reorder)


class SimTransport(Transport):
    """A client of a SimBroker; see `gossamer.gossip.transport.Transport` for what it does."""

    def __init__(
        self,
        broker: SimBroker,
        process: Process,
        client_id: str,
        will: Will | None,
        on_connect: Hook | None,
    ) -> None:
        super().__init__(client_id, will=will, on_connect=on_connect)
        self.process = process
        self.wire: Wire | None = None
        self.inert = not process.alive
        """Whether the process was killed: nothing gets out any more."""
        self._broker = broker
        self._closing = asyncio.Event()
        self._lost = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        broker.add(self)

    @property
    def is_cut(self) -> bool:
        """Whether nothing passes between this client's device and the broker."""
        return self.process.device.is_cut

    def max_payload(self, topic: str) -> int:
        return MAX_PACKET - len(topic.encode()) - 16

    async def __aenter__(self) -> Self:
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._runner = asyncio.create_task(self._run(first), name=f"link {self.client_id}")
        try:
            await first
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        if self._runner is not None:
            await self._runner

    async def abort(self) -> None:
        """See `Transport.abort`: the socket is closed without a word, so the will is published."""
        self._closing.set()
        wire, self.wire = self.wire, None
        self._lost.set()
        if wire is not None and not self.inert:
            wire.up.send(lambda: self._broker.reset(wire))
        if self._runner is not None:
            await self._runner

    async def publish(
        self, topic: str, payload: Payload, *, retain: bool = False, qos: int | None = None
    ) -> bool:
        if len(payload) > self.max_payload(topic):
            raise TransportError("too-large", f"{len(payload)} bytes to {topic} in one publish")
        qos = default_qos(topic) if qos is None else qos
        while not self.inert:
            self._raise_unless_open()
            if self.wire is not None:
                if await self._send(topic, payload, retain, qos):
                    return True
            elif qos == 0:
                self.counters["outbound-offline"] += 1
                return False
            else:
                await self._outcome_known.wait()
                await asyncio.sleep(0)
        return False

    async def _send(self, topic: str, payload: Payload, retain: bool, qos: int) -> bool:
        wire, data = self.wire, bytes(payload)
        assert wire is not None
        if qos == 0:
            wire.up.send(lambda: self._broker.publish(self.client_id, topic, data, retain))
            await asyncio.sleep(0)
            return True
        if await self._acknowledged(wire, topic, data, retain):
            return True
        self.counters["outbound-lost"] += 1
        await asyncio.sleep(self._broker.network.first_delay / 10)
        return False

    async def _acknowledged(self, wire: Wire, topic: str, data: bytes, retain: bool) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def take() -> None:
            self._broker.publish(self.client_id, topic, data, retain)
            wire.down.send(lambda: None if answer.done() else answer.set_result(True))

        wire.up.send(take)
        lost = asyncio.ensure_future(self._until_lost(wire))
        try:
            await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        return answer.done()

    async def _until_lost(self, wire: Wire) -> None:
        while self.wire is wire and not self.inert:
            await self._lost.wait()

    async def subscribe(self, pattern: str) -> None:
        await super().subscribe(pattern)
        await asyncio.sleep(0)

    @property
    def _online(self) -> bool:
        return self.wire is not None

    async def _subscribe(self, pattern: str) -> None:
        if (wire := self.wire) is not None:
            wire.up.send(lambda: self._broker.subscribe(wire, pattern))

    # --- what the broker and the network call ---------------------------------------------------

    def receive(self, message: Received) -> None:
        """Take a delivery, if it was asked for."""
        if not self.inert and self.wants(message.topic):
            self._inbox.offer(message)

    def lose(self, wire: Wire, cause: str) -> None:
        """Note that a connection is gone; the runner makes a new one."""
        if self.wire is wire:
            wire.close()
            self.wire = None
            self._set("lost", cause)
            self._lost.set()

    def miss(self, wire: Wire) -> None:
        """Give up a connection over which nothing has come for a keepalive."""
        if self.is_cut:
            self.lose(wire, "no answer to keepalives")

    def fail(self, cause: str, text: str) -> None:
        """End for good."""
        self._error = TransportError(cause, text)
        self.wire = None
        self._lost.set()
        self._closing.set()

    # --- the connection's life ------------------------------------------------------------------

    async def _run(self, first: asyncio.Future[None]) -> None:
        network, failures = self._broker.network, 0
        try:
            while not self._closing.is_set() and not self.inert:
                self._set("connecting")
                if await self._connect():
                    failures = 0
                    if not first.done():
                        first.set_result(None)
                    await self._either(self._lost)
                    if self._closing.is_set():
                        break
                else:
                    self._set("lost", "no connection")
                delay = min(network.longest_delay, network.first_delay * 2.0 ** min(failures, 30))
                failures += 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay * self._broker.rng.uniform(0.5, 1.0)):
                        await self._closing.wait()
        except Exception as error:
            self._error = TransportError("hook", f"the on_connect hook failed: {error!r}")
            self._error.__cause__ = error
        finally:
            wire, self.wire = self.wire, None
            self._lost.set()
            if wire is not None and not self.inert:
                wire.up.send(lambda: self._broker.disconnect(wire))
            self._end(self._error)
            if not first.done():
                first.set_exception(self._error or TransportError("closed", "closed"))
                first.exception()

    async def _connect(self) -> bool:
        """Connect, subscribe and run the hook; False if that failed or the connection was lost."""
        broker = self._broker
        await asyncio.sleep(broker.rng.uniform(*broker.network.delay))
        if not broker.running or self.is_cut or self.inert or self._closing.is_set():
            return False
        wire = broker.accept(self)
        for pattern in self._patterns:
            broker.subscribe(wire, pattern)
        self._lost.clear()
        self.wire = wire
        self._set("connected")
        if self._on_connect is None:
            return True
        hook = asyncio.ensure_future(_call(self._on_connect))
        try:
            await self._either(self._lost, hook)
        finally:
            if not hook.done():
                hook.cancel()
                await asyncio.wait((hook,))
        if hook.cancelled():
            return False
        try:
            hook.result()
        except TransportError as error:
            if error.cause != "closed":
                raise
            return False
        return True

    async def _either(self, event: asyncio.Event, *also: asyncio.Future[Any]) -> None:
        """Wait until an event is set, something else is done, or the transport is closed."""
        waits = [asyncio.ensure_future(each.wait()) for each in (event, self._closing)]
        try:
            await asyncio.wait((*waits, *also), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _raise_unless_open(self) -> None:
        super()._raise_unless_open()
        if self._closing.is_set():
            raise TransportError("closed", "this transport is not open")


async def _call(hook: Hook) -> None:
    await hook()
