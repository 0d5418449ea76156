"""The MQTT transport: aiomqtt underneath; reconnects, subscribes again, and bounds every queue.

One task owns the connection. It connects, subscribes, runs the birth hook, waits for the loss,
backs off and starts over, until it is told to close or meets an error that waiting does not cure:
then every call, and the iteration over messages, raises one TransportError that says why.

aiomqtt drives paho through the loop's own readers and writers: no thread but for connecting, which
blocks in name resolution and TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from ..topics import is_gossip, is_state
from .base import (
    HEADER_BYTES,
    Hook,
    Payload,
    Received,
    StateCallback,
    Transport,
    TransportError,
    Will,
)
from .connection import ALWAYS_FATAL, FATAL_AT_FIRST, REFUSALS, Link
from .options import SMALLEST_PACKET, Address, MqttOptions, TlsFiles

_log = logging.getLogger(__name__)

REPEAT_SUBSCRIPTIONS = (1.0, 9.0)
"""Seconds after which topics of state are subscribed to once more, so that a broker repeats what it retains.
nats-server 2.15 delivers a message first and retains it a little later: a client that subscribes in between
hears neither (measured: 40 clients that subscribe and publish within 0.1 s miss up to 18 of 1,600 cards)."""


class MqttTransport(Transport):
    """A client of an MQTT broker; see `Transport` for what it does.

    password: of the user that the URL names, if it is not in the URL.
    echo: a topic that one of the subscriptions covers. Now and then the transport publishes there, to
        hear itself: see `Echo`. What arrives on it is not handed on.
    echo_every: seconds in which it must hear itself; the keepalive by default.
    attempt_timeout: seconds that one attempt to connect may take; `connect_timeout` by default.

    `counters` names: inbound-full, inbound-superseded, inbound-too-large, inbound-unsolicited,
    outbound-offline, outbound-full, outbound-lost, reconnects, deaf, packets-halved.
    """

    def __init__(
        self,
        url: str,
        client_id: str,
        *,
        password: str | None = None,
        will: Will | None = None,
        tls: TlsFiles | None = None,
        options: MqttOptions | None = None,
        on_connect: Hook | None = None,
        on_state: StateCallback | None = None,
        echo: str | None = None,
        echo_every: float | None = None,
        attempt_timeout: float | None = None,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        self.options = options or MqttOptions()
        super().__init__(
            client_id, will=will, on_connect=on_connect, on_state=on_state,
            max_inbound_messages=self.options.max_inbound_messages,
            max_inbound_bytes=self.options.max_inbound_bytes,
        )  # fmt: skip
        self.address = Address.parse(url, password)
        if tls is not None and not self.address.tls:
            raise TransportError("url", f"TLS files given, but {self.address} does not use TLS")
        self._tls_files = tls or TlsFiles()
        self._tls_context: ssl.SSLContext | None = None
        self._random = np.random.default_rng(seed)
        self._new_pattern = asyncio.Event()
        self._last_state: dict[str, int | None] = {}
        """Per topic of state on this connection: the hash of its retained message, None after a live one."""
        self._echo = Echo(echo, self.options.keepalive if echo_every is None else echo_every)
        self._attempt_timeout = (
            self.options.connect_timeout if attempt_timeout is None else attempt_timeout
        )
        self.echo_topic = echo
        self.packet_limit = PacketLimit(str(self.address), self.options.max_packet, self.counters)
        self._link: Link | None = None
        self._outbound_bytes = 0
        self._runner: asyncio.Task[None] | None = None
        self._closing = False

    # --- life ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._runner is not None:
            raise RuntimeError("a transport is entered once: make a new one")
        if self.address.tls:
            self._tls_context = await asyncio.to_thread(self._tls_files.context)
        first = asyncio.get_running_loop().create_future()
        self._runner = asyncio.create_task(self._run(first), name=f"mqtt {self.client_id}")
        try:
            await asyncio.shield(first)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._closing = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait((self._runner,))

    async def abort(self) -> None:
        """See `Transport.abort`."""
        if self._link is not None:
            self._link.hang_up()
        await self.__aexit__()

    async def _run(self, first: asyncio.Future[None]) -> None:
        error: TransportError | None = None
        try:
            error = await self._stay_connected(first)
        except asyncio.CancelledError:
            if not self._closing:
                raise
        finally:
            self._end(error)
            if not first.done():
                first.set_exception(error or TransportError("closed", "closed while connecting"))
                first.exception()  # retrieved: nobody may be waiting for it any more

    async def _stay_connected(self, first: asyncio.Future[None]) -> TransportError:
        """Connect, and again after every loss; returns the error that waiting does not cure."""
        loop, options = asyncio.get_running_loop(), self.options
        deadline = loop.time() + options.connect_timeout
        failures = 0
        while True:
            started = loop.time()
            self._set("connecting")
            try:
                lost = await self._live(first)
            except TransportError as failure:
                lost = failure
                if failure.cause == "too-large":  # the birth, which will be no smaller next time
                    return failure
            except Exception as failure:  # a hook's own mistake: report it, do not loop on it
                error = TransportError("hook", f"the on_connect hook failed: {failure!r}")
                error.__cause__ = failure
                return error
            at_first = not first.done()
            if lost.cause in ALWAYS_FATAL or (
                at_first and (lost.cause in FATAL_AT_FIRST or loop.time() >= deadline)
            ):
                return lost
            try:
                halved = self.packet_limit.lost(lost.cause)
            except TransportError as failure:
                return failure
            self._set("lost", str(lost))
            level = logging.WARNING if lost.cause in REFUSALS else logging.INFO
            _log.log(level, "%s: %s; trying again", self.client_id, lost)
            if halved or loop.time() - started > options.longest_delay:
                failures = 0
            delay = min(options.longest_delay, options.first_delay * 2.0 ** min(failures, 30))
            delay *= self._random.uniform(0.5, 1.0)
            if at_first:
                delay = min(delay, max(0.0, deadline - loop.time()))
            failures += 1
            await asyncio.sleep(delay)

    async def _live(self, first: asyncio.Future[None]) -> TransportError:
        """One connection, from its start to its loss; returns why it was lost."""
        link = Link(
            self.address, self.client_id, self.receive, self.options,
            timeout=self._attempt_timeout, will=self.will, tls=self._tls_context,
        )  # fmt: skip
        await link.open()
        self._last_state.clear()
        tasks: list[asyncio.Future[None]] = []
        try:
            if self._patterns and not await link.alive(link.subscribe(self._patterns)):
                return link.why_lost()
            self.packet_limit.connected(link.max_packet)
            self._link = link
            if first.done():
                self.counters["reconnects"] += 1
            self._set("connected")
            if self._on_connect is not None and not await link.alive(self._on_connect()):
                return link.why_lost()
            if not first.done():
                first.set_result(None)
            duties = (
                self._echo.listen(link, self.wants),
                self.packet_limit.probe(link, self.echo_topic, self.wants),
                self._repeat_subscriptions(link),
            )
            tasks += [asyncio.ensure_future(duty) for duty in duties]
            await asyncio.wait((*tasks, link.lost), return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises: a packet that cannot be cut does not get through
            if not link.lost.done():
                self.counters["deaf"] += 1
                link.give_up("deaf", "takes what we say, but we hear nothing, not even ourselves")
            return link.why_lost()
        finally:
            self._link = None
            self._settled.clear()
            for task in tasks:
                task.cancel()
            await link.close()

    async def _repeat_subscriptions(self, link: Link) -> None:
        """Hear what the broker was about to retain while we subscribed; see REPEAT_SUBSCRIPTIONS."""
        while True:
            for delay in REPEAT_SUBSCRIPTIONS:
                await asyncio.sleep(delay)
                if patterns := [pattern for pattern in self._patterns if is_state(pattern)]:
                    await link.alive(link.subscribe(patterns))
            await self._new_pattern.wait()
            self._new_pattern.clear()

    def _is_repeated(self, topic: str, payload: bytes, retain: bool) -> bool:
        """Return True for a retained state that was heard already, or that a live message has replaced."""
        if not retain:
            self._last_state[topic] = None
            return False
        known = self._last_state.get(topic, 0) in (None, hash(payload))
        if not known:
            self._last_state[topic] = hash(payload)
        return known

    # --- traffic -------------------------------------------------------------------------------

    def max_payload(self, topic: str) -> int:
        """See `Transport.max_payload`. In MQTT 5 the broker's own limit counts, if it names one;
        else it becomes less when large packets do not get through: ask each time."""
        return self.packet_limit.size - len(topic.encode()) - HEADER_BYTES

    @property
    def _online(self) -> bool:
        return self._link is not None

    async def _send(self, topic: str, payload: Payload, retain: bool, qos: int) -> bool:
        link, options = self._link, self.options
        assert link is not None
        size = len(payload) + len(topic.encode()) + HEADER_BYTES
        if not self.packet_limit.allows(size):
            raise TransportError(
                "too-large",
                f"{len(payload)} bytes to {topic}; {self.address} takes {self.max_payload(topic)}: raise the "
                "broker's packet limit (mosquitto: max_packet_size), or cut the message into chunks",
            )
        waiting = self._outbound_bytes
        if qos == 0 and waiting and waiting + len(payload) > options.max_outbound_bytes:
            self.counters["outbound-full"] += 1
            return False
        self._outbound_bytes += len(payload)
        self.packet_limit.sending(size, whole=not is_gossip(topic))
        try:
            sent = await link.publish(topic, payload, qos, retain)
        finally:
            self._outbound_bytes -= len(payload)
        if not sent:
            self.counters["outbound-lost"] += 1
            if qos:
                await asyncio.sleep(options.first_delay / 10)
        elif qos and self.echo_topic is None:
            self.packet_limit.came_back(size)  # as far as anybody can tell who does not hear itself
        return sent

    async def _subscribe(self, pattern: str) -> None:
        link = self._link
        assert link is not None
        if is_state(pattern):
            self._new_pattern.set()
        await link.alive(link.subscribe([pattern]))

    def receive(self, topic: str, payload: bytes | memoryview, retain: bool) -> None:
        """Take what the broker sent (called by the link)."""
        if not self.wants(topic):
            # No broker is trusted to send only what was asked for.
            self.counters["inbound-unsolicited"] += 1
            return
        if self._echo.heard(topic):
            self.packet_limit.heard(len(payload))
            return
        if len(payload) > self.options.max_inbound_payload and not is_state(topic):
            self.counters["inbound-too-large"] += 1
            _log.warning(
                "%s dropped a message: inbound-too-large: %d bytes on %s, the limit is %d",
                self.client_id, len(payload), topic, self.options.max_inbound_payload,
            )  # fmt: skip
            return
        if not is_gossip(topic):
            payload = bytes(payload)
            if is_state(topic) and self._is_repeated(topic, payload, retain):
                return
        self._inbox.offer(Received(topic, payload, retain))

    def _raise_if_over(self) -> None:
        super()._raise_if_over()
        if self._closing:
            raise TransportError("closed", "this transport is not open")


# --- what a transport says to itself -----------------------------------------------------------------
# To notice a broker that delivers nothing, or no large packets. Both need a topic that a subscription of our
# own covers: only what comes back shows that the others' messages would too.

LARGEST = 256 * 1024 * 1024
"""Bytes of the largest packet that MQTT itself allows."""
FLOOR = SMALLEST_PACKET
MIN_PROBED_PACKET = 256
"""Packets up to this size, such as a status, are never blamed for anything."""
CUTS = 3
"""Times in a row that a packet must not get through before it is blamed: links fail for other reasons too."""
LAST_CUTS = 6
"""The same, before we give up on a packet that cannot be made smaller."""
_SLACK = 256  # a header that grows by a few bytes is no reason to try again
_PAUSE = 0.1  # seconds before a packet that did not come back is tried again; longer each time
_END = b"\0"  # what follows a packet that is tried; an echo's own calls are empty
_STEPS = 10  # counted, not measured: a process that was frozen has not listened meanwhile


class Echo:
    """Says something to itself every half keepalive, and notices when nothing at all comes back.

    A connection can be up, its pings answered and its messages acknowledged, while the broker has forgotten
    what we subscribed to.

    topic: where; None never listens. Anything that arrives counts as hearing, so that a broker that is
    slow because it is busy is not taken for a deaf one.
    """

    def __init__(self, topic: str | None, keepalive: float) -> None:
        self._topic = topic
        self._interval = keepalive / 2
        self._patience = float(keepalive)
        self._heard = False

    def heard(self, topic: str) -> bool:
        """Note that something arrived; True if it was our own call."""
        self._heard = True
        return topic == self._topic

    async def listen(self, link: Link, covered: Callable[[str], bool]) -> None:
        """Return once a connection is deaf; ends never on a good one.

        covered: whether we are subscribed to a topic, by now.
        """
        while True:
            await asyncio.sleep(self._interval)
            if self._topic is None or not covered(self._topic):
                continue
            self._heard = False
            call = asyncio.ensure_future(link.publish(self._topic, b"", 1, False))
            try:
                silence = 0
                while silence < _STEPS and not self._heard:
                    await asyncio.sleep(self._patience / _STEPS)
                    silence += not link.congested()
            finally:
                call.cancel()
            if not self._heard:
                return


class PacketLimit:
    """The largest packet to send over a transport's connections, which come one after the other.

    MQTT 5 lets a broker name its limit. One that speaks 3.1.1 hangs up on a larger packet without a word, and
    would hang up again on every repetition; others drop it without a word (mosquitto: message_size_limit). So
    whenever a packet is larger than all before, we send ourselves one of that size, and a small one after it.
    If the connection is closed before the large one is back, or the small one comes back alone, several times
    in a row, then packets must become smaller: whoever cuts messages into chunks asks for the size anew each
    time.

    broker: its address, for messages.
    ceiling: the limit to begin with; a broker may name a lower one.
    counters: where to count how often packets became smaller.
    """

    def __init__(self, broker: str, ceiling: int, counters: Counter[str] | None = None) -> None:
        self._broker = broker
        self._counters = Counter() if counters is None else counters
        self._ceiling = self._guess = ceiling
        self._named: int | None = None
        self._sent, self._whole = 0, False
        """The largest packet that went out on this connection, and whether it is one that cannot be cut."""
        self.proven = MIN_PROBED_PACKET
        """The largest packet that came back on this connection."""
        self._failures, self._blamed = 0, LARGEST
        """How often in a row one did not, and the smallest that this may be due to."""
        self._searching = self._warned = False
        self._unsure, self._ended = asyncio.Event(), asyncio.Event()
        self._echoed = 0

    @property
    def size(self) -> int:
        """Bytes of the largest packet that a chunk should make."""
        return self._guess if self._named is None else min(self._named, self._guess)

    def allows(self, size: int) -> bool:
        """Whether to try a packet at all. A guess forbids nothing, as not all packets can be cut."""
        return size <= (self._ceiling if self._named is None else min(self._named, self._ceiling))

    def connected(self, named: int | None) -> None:
        """A new connection; `named` is the limit that the broker told us, if any."""
        self._named = named
        # It may be another broker, or the same with another limit.
        self._sent, self.proven = 0, MIN_PROBED_PACKET
        self._unsure.clear()

    def sending(self, size: int, *, whole: bool) -> None:
        """Note a packet. whole: it cannot be cut into chunks."""
        if size > self._sent:
            self._sent, self._whole = size, whole
        if self._sent > self.proven:
            self._unsure.set()

    def came_back(self, size: int) -> None:
        """Note a packet that got through."""
        self.proven = max(self.proven, size)
        if size >= self._blamed:
            self._failures, self._blamed = 0, LARGEST
        if size > self._guess // 4:
            self._searching = False

    def heard(self, payload: int) -> None:
        """Note what we heard of ourselves, in bytes."""
        if payload == len(_END):
            self._ended.set()
        else:
            self._echoed = max(self._echoed, payload)

    async def probe(
        self, link: Link, topic: str | None, covered: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Try whether packets larger than all before get through, for as long as the connection lives.

        topic: where we hear ourselves. covered: whether we are subscribed to it, by now. TransportError if a
        packet never gets through and cannot be cut.
        """
        while True:
            await self._unsure.wait()
            self._unsure.clear()
            size, whole = self._sent, self._whole
            if topic is None or not covered(topic) or size <= self.proven:
                continue
            tried = max(size, min(size + _SLACK, self.size))
            payload = tried - len(topic.encode()) - HEADER_BYTES
            self._echoed = 0
            self._ended.clear()
            await link.publish(topic, bytes(payload), 0, False)
            await link.publish(topic, _END, 0, False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), link.patience)
            if self._echoed >= payload:
                self.came_back(tried)
            elif self._ended.is_set():
                what = "drops packets of {size} bytes without a word"
                if self._failed(size, whole, what, "message_size_limit"):
                    self._sent = 0
                else:
                    await asyncio.sleep(_PAUSE * self._failures)
                    self._unsure.set()

    def lost(self, cause: str) -> bool:
        """A connection is over, or did not come about; True if packets are smaller from now on.

        cause: of the TransportError. Raises another one when nothing is left to try.
        """
        size, self._sent = self._sent, 0
        if size <= self.proven or self._named is not None:
            return False  # nothing was under way that might be too large
        if cause not in ("unreachable", "too-large"):
            return False  # it was not the broker that hung up
        what = "closed the connection on packets of {size} bytes"
        told = cause == "too-large"
        return self._failed(size, self._whole, what, "max_packet_size", at_once=told)

    def _failed(
        self, size: int, whole: bool, what: str, option: str, *, at_once: bool = False
    ) -> bool:
        """Note that a packet did not get through; True if packets are smaller from now on."""
        self._failures += 1
        self._blamed = min(self._blamed, size)
        what = what.format(size=size)
        if whole or size <= FLOOR:
            if self._failures < LAST_CUTS:
                return False
            raise TransportError(
                "too-large",
                f"{self._broker} {what}, {self._failures} times in a row, and this one cannot be cut "
                f"smaller: raise the broker's packet limit (mosquitto: {option})",
            )
        if self._failures < CUTS and not self._searching and not at_once:
            return False
        self._guess = max(FLOOR, min(size, self.size) // 2)
        _log.log(
            logging.INFO if self._warned else logging.WARNING,
            "%s %s: they are cut to %d from now on; raise the broker's packet limit (mosquitto: %s) to spare "
            "this",
            self._broker, what, self._guess, option,
        )  # fmt: skip
        self._searching = self._warned = True
        self._counters["packets-halved"] += 1
        self._failures, self._blamed = 0, LARGEST
        return True
