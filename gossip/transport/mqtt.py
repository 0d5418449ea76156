"""The MQTT transport, on top of aiomqtt: it reconnects, subscribes again, and bounds every queue.

One task owns the connection. It connects, subscribes, runs the on_connect hook, waits until the connection
is lost, backs off and starts over, until the transport is closed or an error occurs for which there is no
retry: then every call, and the iteration over messages, raises one TransportError with the cause.

aiomqtt drives paho through the event loop's readers and writers. Only connecting uses a thread, as name
resolution and the TLS handshake block.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np

from ..topics import is_gossip, is_retained_topic
from .base import (
    HEADER_BYTES,
    REFUSALS,
    Hook,
    Payload,
    Received,
    StateCallback,
    Transport,
    TransportError,
    Will,
    default_qos,
)
from .connection import ALWAYS_FATAL, FATAL_AT_FIRST, BrokerConnection
from .options import SMALLEST_PACKET, Address, MqttOptions, TlsFiles

_log = logging.getLogger(__name__)

REPEAT_SUBSCRIPTIONS = (1.0, 9.0)
"""Seconds to wait before each repeated subscription to retained topics, which makes the broker send the
retained messages again. nats-server 2.15 delivers a message first and retains it a little later: a client
that subscribes in between receives it neither way (measured: 40 clients that subscribe and publish within
0.1 s miss up to 18 of 1,600 cards)."""


REFRESH_INTERVAL = 60.0
"""Seconds before REPEAT_SUBSCRIPTIONS begins again in a cluster, where nodes may lose messages."""
RETAIN_SECONDS = 5.0
"""Seconds after a live message within which a broker may still have its predecessor as the retained one."""


class MqttTransport(Transport):
    """A client of an MQTT broker; see `Transport` for its methods and the other arguments.

    url: of the broker, or the URLs of a cluster's nodes with commas between them. It connects to one of them,
        chosen at random, and tries the next one whenever an attempt fails or the connection is lost.
    password: of the user in the URL, if the URL does not contain it.
    echo: a topic that one of the subscriptions covers. The transport publishes there from time to time, to
        test whether the broker delivers: see `Echo`. Messages on it are not passed to the consumer.
    echo_timeout: seconds within which something must be delivered after an echo message was published; the
        keepalive by default.
    attempt_timeout: seconds that one attempt to connect may take; `connect_timeout` by default.
    seed: of the random part of the delays between attempts to reconnect.
    name: what the log calls us; the client id by default.

    `counters` names: inbound-full, inbound-superseded, inbound-too-large, inbound-unsolicited,
    outbound-offline, outbound-full, outbound-lost, reconnects, no-delivery, packets-halved.
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
        echo_timeout: float | None = None,
        attempt_timeout: float | None = None,
        seed: int | np.random.Generator | None = None,
        name: str | None = None,
    ) -> None:
        self.options = options or MqttOptions()
        self._name = name or client_id
        super().__init__(
            client_id, will=will, on_connect=on_connect, on_state=on_state,
            max_inbound_messages=self.options.max_inbound_messages,
            max_inbound_bytes=self.options.max_inbound_bytes,
        )  # fmt: skip
        self._random = np.random.default_rng(seed)
        self._addresses = Address.parse_all(url, password)
        self._node = 0
        """Index of the address that is connected to, or tried next."""
        if self._is_cluster:
            self._node = int(self._random.integers(len(self._addresses)))
        if tls is not None and not self.address.tls:
            raise TransportError("url", f"TLS files given, but {self.address} does not use TLS")
        self._tls_files = tls or TlsFiles()
        self._tls_context: ssl.SSLContext | None = None
        self._new_pattern = asyncio.Event()
        self._retained = RetainedFilter(cluster=self._is_cluster)
        self._echo = Echo(echo, self.options.keepalive if echo_timeout is None else echo_timeout)
        self._attempt_timeout = (
            self.options.connect_timeout if attempt_timeout is None else attempt_timeout
        )
        self.echo_topic = echo
        broker = ",".join(map(str, self._addresses))
        self.packet_limit = PacketLimit(broker, self.options.max_packet, self.counters)
        self._broker_connection: BrokerConnection | None = None
        self._outbound_bytes = 0
        self._connection_task: asyncio.Task[None] | None = None
        self._closing = False

    # --- connecting ----------------------------------------------------------------------------

    @property
    def address(self) -> Address:
        """The address of the broker, or of the node that we are connected to or try next."""
        return self._addresses[self._node]

    @property
    def _is_cluster(self) -> bool:
        return len(self._addresses) > 1

    async def __aenter__(self) -> Self:
        if self._connection_task is not None:
            raise RuntimeError("a transport can be entered only once: make a new one")
        if self.address.tls:
            self._tls_context = await asyncio.to_thread(self._tls_files.context)
        first_connection = asyncio.get_running_loop().create_future()
        self._connection_task = asyncio.create_task(
            self._run(first_connection), name=f"mqtt {self.client_id}"
        )
        try:
            await asyncio.shield(first_connection)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._closing = True
        if self._connection_task is not None:
            self._connection_task.cancel()
            await asyncio.wait((self._connection_task,))

    async def abort(self) -> None:
        if self._broker_connection is not None:
            self._broker_connection.hang_up()
        await self.__aexit__()

    async def _run(self, first_connection: asyncio.Future[None]) -> None:
        error: TransportError | None = None
        try:
            error = await self._stay_connected(first_connection)
        except asyncio.CancelledError:
            if not self._closing:
                raise
        finally:
            self._end(error)
            if not first_connection.done():
                closed = TransportError("closed", "closed while connecting")
                first_connection.set_exception(error or closed)
                # Stops asyncio from logging "exception was never retrieved" if no caller awaits it.
                first_connection.exception()

    async def _stay_connected(self, first_connection: asyncio.Future[None]) -> TransportError:
        """Connect, and reconnect after every loss; return the first error for which there is no retry."""
        loop, options = asyncio.get_running_loop(), self.options
        deadline = loop.time() + options.connect_timeout
        failures = 0
        refused: set[int] = set()
        """The nodes at which the first connection failed for a cause that only the user can mend."""
        while True:
            started = loop.time()
            self._set("connecting")
            try:
                failure = await self._run_connection(first_connection)
            except TransportError as error:
                failure = error
                if (
                    error.cause == "too-large"
                ):  # a message that the on_connect hook would send again
                    return error
            except Exception as error:  # a bug in the hook: report it, do not retry
                hook_error = TransportError("hook", f"the on_connect hook failed: {error!r}")
                hook_error.__cause__ = error
                return hook_error
            connected_before = first_connection.done()
            if failure.cause in FATAL_AT_FIRST:
                refused.add(self._node)
            if failure.cause in ALWAYS_FATAL or (
                not connected_before
                and (len(refused) == len(self._addresses) or loop.time() >= deadline)
            ):
                return failure
            try:
                halved = self.packet_limit.connection_lost(failure.cause)
            except TransportError as error:
                return error
            self._set("lost", str(failure))
            level = logging.WARNING if failure.cause in REFUSALS else logging.INFO
            _log.log(level, "%s: %s; trying again", self._name, failure)
            if halved or loop.time() - started > options.longest_delay:
                failures = 0
            delay = min(options.longest_delay, options.first_delay * 2.0 ** min(failures, 30))
            delay *= self._random.uniform(0.5, 1.0)
            if not connected_before:
                delay = min(delay, max(0.0, deadline - loop.time()))
            failures += 1
            self._node = (self._node + 1) % len(self._addresses)
            await asyncio.sleep(delay)

    async def _run_connection(self, first_connection: asyncio.Future[None]) -> TransportError:
        """Open one connection and serve it until it is lost; return the cause of the loss."""
        connection = BrokerConnection(
            self.address, self.client_id, self.receive, self.options,
            timeout=self._attempt_timeout, will=self.will, tls=self._tls_context,
            ca=self._tls_files.ca,
        )  # fmt: skip
        await connection.open()
        self._retained = RetainedFilter(cluster=self._is_cluster)
        tasks: list[asyncio.Future[None]] = []
        try:
            subscribed = 0
            while patterns := self._patterns[subscribed:]:  # may grow while the broker answers
                subscribed += len(patterns)
                if not await connection.run_until_lost(
                    connection.subscribe(self._with_qos(patterns))
                ):
                    return connection.why_lost()
            self.packet_limit.connected(connection.max_packet)
            self._broker_connection = connection
            if first_connection.done():
                self.counters["reconnects"] += 1
                _log.info("%s: connected to %s again", self._name, self.address)
            self._set("connected")
            if self._on_connect is not None and not await connection.run_until_lost(
                self._on_connect()
            ):
                return connection.why_lost()
            if not first_connection.done():
                first_connection.set_result(None)
            checks = (
                self._echo.watch(connection, self.wants),
                self.packet_limit.probe(connection, self.echo_topic, self.wants),
                self._repeat_subscriptions(connection),
            )
            tasks += [asyncio.ensure_future(check) for check in checks]
            await asyncio.wait((*tasks, connection.lost), return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises if a packet that cannot be split does not get through
            if not connection.lost.done():
                self.counters["no-delivery"] += 1
                connection.give_up(
                    "no-delivery", "accepts our messages but delivers none, not even our own"
                )
            return connection.why_lost()
        finally:
            self._broker_connection = None
            self._outcome_known.clear()
            for task in tasks:
                task.cancel()
            await connection.close()

    async def _repeat_subscriptions(self, connection: BrokerConnection) -> None:
        """Subscribe again to retained topics, after each new subscription; see REPEAT_SUBSCRIPTIONS."""
        while True:
            for delay in REPEAT_SUBSCRIPTIONS:
                await asyncio.sleep(delay)
                if patterns := [
                    pattern for pattern in self._patterns if is_retained_topic(pattern)
                ]:
                    await connection.run_until_lost(connection.subscribe(self._with_qos(patterns)))
            timeout = REFRESH_INTERVAL if self._is_cluster else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._new_pattern.wait(), timeout)
            self._new_pattern.clear()

    # --- traffic -------------------------------------------------------------------------------

    def max_payload(self, topic: str) -> int:
        """See `Transport.max_payload`. The result may shrink while running: call this before each message.
        A limit announced by the broker (MQTT 5) also applies."""
        return self.packet_limit.size - len(topic.encode()) - HEADER_BYTES

    @property
    def _online(self) -> bool:
        return self._broker_connection is not None

    async def _send(self, topic: str, payload: Payload, retain: bool, qos: int) -> bool:
        connection, options = self._broker_connection, self.options
        assert connection is not None
        size = len(payload) + len(topic.encode()) + HEADER_BYTES
        if not self.packet_limit.allows(size):
            raise TransportError(
                "too-large",
                f"{len(payload)} bytes to {topic}; {self.address} accepts {self.max_payload(topic)}: raise "
                "the broker's packet limit (mosquitto: max_packet_size), or split the message into chunks",
            )
        queued = self._outbound_bytes
        if qos == 0 and queued and queued + len(payload) > options.max_outbound_bytes:
            self.counters["outbound-full"] += 1
            return False
        self._outbound_bytes += len(payload)
        self.packet_limit.sending(size, unsplittable=not is_gossip(topic))
        try:
            sent = await connection.publish(topic, payload, qos, retain)
        finally:
            self._outbound_bytes -= len(payload)
        if not sent:
            self.counters["outbound-lost"] += 1
            if qos:
                await asyncio.sleep(options.first_delay / 10)
        elif qos and self.echo_topic is None:
            # Without an echo topic, an acknowledgement is the only sign that a packet got through.
            self.packet_limit.got_through(size)
        return sent

    async def _subscribe(self, pattern: str) -> None:
        connection = self._broker_connection
        assert connection is not None
        if is_retained_topic(pattern):
            self._new_pattern.set()
        await connection.run_until_lost(connection.subscribe(self._with_qos([pattern])))

    def _with_qos(self, patterns: Iterable[str]) -> list[tuple[str, int]]:
        """Return each pattern with the QoS to subscribe at: 1 for cards and status, which must arrive.

        In a cluster it is 0, because nats-servers make a replicated consumer for each subscription at QoS 1.
        Measured with three nodes, one of them killed: 12 peers needed up to 57 s to subscribe on the other
        two, and less than 10 s at QoS 0. What the nodes lose on their way is asked for again.
        """
        return [(each, 0 if self._is_cluster else default_qos(each)) for each in patterns]

    def receive(self, topic: str, payload: bytes | memoryview, retain: bool) -> None:
        """Check a message from the broker and queue it for the consumer; `BrokerConnection` calls this."""
        if not self.wants(topic):
            # A broker is not trusted to send only messages that match our subscriptions.
            self.counters["inbound-unsolicited"] += 1
            return
        if self._echo.received(topic):
            self.packet_limit.echo_received(len(payload))
            return
        if len(payload) > self.options.max_inbound_payload and not is_retained_topic(topic):
            self.counters["inbound-too-large"] += 1
            _log.warning(
                "%s dropped a message: inbound-too-large: %d bytes on %s, the limit is %d",
                self._name, len(payload), topic, self.options.max_inbound_payload,
            )  # fmt: skip
            return
        if not is_gossip(topic):
            payload = bytes(payload)
            now = asyncio.get_running_loop().time()
            if is_retained_topic(topic) and self._retained.is_known(topic, payload, retain, now):
                return
        self._inbox.offer(Received(topic, payload, retain))

    def _raise_unless_open(self) -> None:
        super()._raise_unless_open()
        if self._closing:
            raise TransportError("closed", "this transport is not open")


# --- self-tests of a connection ----------------------------------------------------------------------
# They detect a broker that delivers nothing, or no large packets. They publish to an echo topic that one of
# our own subscriptions covers: a message that the broker delivers back to us shows that it delivers other
# messages.

MQTT_MAX_PACKET = 256 * 1024 * 1024
"""Bytes of the largest packet that the MQTT standard allows."""
MIN_PROBED_PACKET = 256
"""Bytes up to which a packet, such as a status, is never taken for the reason of a lost connection."""
FAILURES_TO_HALVE = 3
"""Times in a row that a packet must fail to get through before packets are halved: connections are also lost
for other reasons."""
FAILURES_TO_GIVE_UP = 6
"""Times in a row that a packet that cannot be made smaller must fail before the transport fails."""
_PROBE_MARGIN = (
    256  # extra bytes of a probe, so that a packet a few bytes larger needs no new probe
)
_PROBE_PAUSE = 0.1  # seconds before a failed probe is repeated, times the failures in a row
_END_OF_PROBE = b"\0"  # payload of the small message after a probe; those of `Echo` are empty
# The echo timeout is counted in this many short sleeps, so that time in which the process was suspended does
# not count.
_STEPS = 10


class RetainedFilter:
    """Recognises retained messages of one connection that bring nothing new, as after repeated subscriptions.

    cluster: whether the broker's nodes may lose live messages to each other.
    """

    def __init__(self, *, cluster: bool) -> None:
        self._cluster = cluster
        self._last: dict[str, tuple[int, float | None]] = {}
        """By topic: the hash of the last message, and when it came if it was live."""

    def is_known(self, topic: str, payload: bytes, retain: bool, now: float) -> bool:
        """Return True for a retained message that was received before, or that a live one has replaced.

        In a cluster, one that differs from the last live message, if that is not new, shows that a later live
        message was lost.
        """
        last, live_at = self._last.get(topic, (None, None))
        if retain and last is not None:
            was_missed = self._cluster and live_at is not None and now - live_at > RETAIN_SECONDS
            if hash(payload) == last or (live_at is not None and not was_missed):
                return True
        self._last[topic] = hash(payload), None if retain else now
        return False


class Echo:
    """Publishes a message to itself every half timeout, and detects a connection that delivers nothing.

    A connection can be up, with pings answered and messages acknowledged, although the broker has lost our
    subscriptions.

    topic: the echo topic, which only this client uses; None disables the test.
    timeout: seconds without any delivery after which the test has failed. Any message that arrives counts,
        not only the echo, so that a broker that is slow under load passes the test.
    """

    def __init__(self, topic: str | None, timeout: float) -> None:
        self._topic = topic
        self._interval = timeout / 2
        self._timeout = float(timeout)
        self._any_received = False

    def received(self, topic: str) -> bool:
        """Record that a message arrived; return True if it is on the echo topic."""
        self._any_received = True
        return topic == self._topic

    async def watch(self, connection: BrokerConnection, covered: Callable[[str], bool]) -> None:
        """Return once the connection delivers nothing; does not return while it delivers.

        covered: returns whether one of our subscriptions covers a topic at this moment.
        """
        while True:
            await asyncio.sleep(self._interval)
            if self._topic is None or not covered(self._topic):
                continue
            self._any_received = False
            echo = asyncio.ensure_future(connection.publish(self._topic, b"", 1, False))
            try:
                silent_steps = 0
                while silent_steps < _STEPS and not self._any_received:
                    await asyncio.sleep(self._timeout / _STEPS)
                    silent_steps += not connection.congested()
            finally:
                echo.cancel()
            if not self._any_received:
                return


class PacketLimit:
    """Estimates the largest packet that a broker accepts, over all connections of a transport.

    In MQTT 5 a broker can announce its limit. In 3.1.1 a broker closes the connection on a larger packet
    without giving a reason, and would do so again each time the packet is repeated; other brokers silently
    drop it (mosquitto: message_size_limit). Therefore, whenever a packet is larger than all before, we
    probe: we publish a message of that size to the echo topic, and a small one after it. If, several times
    in a row, the connection is closed before the large message is delivered, or only the small one is
    delivered, then the estimate is halved. Code that splits messages into chunks must read the limit before
    each message.

    broker: its address, for error messages.
    ceiling: the limit to begin with, in bytes; a broker may announce a lower one.
    counters: `packets-halved` is incremented here.
    """

    def __init__(self, broker: str, ceiling: int, counters: Counter[str] | None = None) -> None:
        self._broker = broker
        self._counters = Counter() if counters is None else counters
        self._ceiling = self._estimate = ceiling
        self._announced: int | None = None
        self._largest_sent, self._unsplittable = 0, False
        """Bytes of the largest packet sent on this connection, and whether it cannot be split into chunks."""
        self.largest_delivered = MIN_PROBED_PACKET
        """Bytes of the largest packet that is known to have got through on this connection."""
        self._failures, self._smallest_failed = 0, MQTT_MAX_PACKET
        """How many packets in a row did not get through, and the bytes of the smallest of them."""
        self._halving = self._warned = False
        """Whether the estimate was halved and no packet near it has got through yet; whether we warned."""
        self._probe_due, self._end_received = asyncio.Event(), asyncio.Event()
        self._largest_echo = 0

    @property
    def size(self) -> int:
        """Bytes that the packet of one chunk may have."""
        return self._estimate if self._announced is None else min(self._announced, self._estimate)

    def allows(self, size: int) -> bool:
        """Return whether a packet may be sent.

        Only known limits apply: packets that cannot be split are tried even above our estimate.
        """
        return size <= (
            self._ceiling if self._announced is None else min(self._announced, self._ceiling)
        )

    def connected(self, announced: int | None) -> None:
        """Begin a new connection; `announced` is the limit that the broker announced, if any."""
        self._announced = announced
        # It may be another broker, or the same broker with another limit: nothing is known to get through.
        self._largest_sent, self.largest_delivered = 0, MIN_PROBED_PACKET
        self._probe_due.clear()

    def sending(self, size: int, *, unsplittable: bool) -> None:
        """Record that a packet is sent. unsplittable: it cannot be split into chunks."""
        if size > self._largest_sent:
            self._largest_sent, self._unsplittable = size, unsplittable
        if self._largest_sent > self.largest_delivered:
            self._probe_due.set()

    def got_through(self, size: int) -> None:
        """Record that a packet got through."""
        self.largest_delivered = max(self.largest_delivered, size)
        if size >= self._smallest_failed:
            self._failures, self._smallest_failed = 0, MQTT_MAX_PACKET
        if size > self._estimate // 4:
            self._halving = False

    def echo_received(self, size: int) -> None:
        """Record a message on the echo topic. size: bytes of its payload."""
        if size == len(_END_OF_PROBE):
            self._end_received.set()
        else:
            self._largest_echo = max(self._largest_echo, size)

    async def probe(
        self,
        connection: BrokerConnection,
        topic: str | None,
        covered: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Test whether packets larger than all before get through, until cancelled.

        topic: the echo topic; None disables the test.
        covered: returns whether one of our subscriptions covers a topic at this moment.
        Raises TransportError if a packet that cannot be split does not get through.
        """
        while True:
            await self._probe_due.wait()
            self._probe_due.clear()
            size, unsplittable = self._largest_sent, self._unsplittable
            if topic is None or not covered(topic) or size <= self.largest_delivered:
                continue
            probe_size = max(size, min(size + _PROBE_MARGIN, self.size))
            payload = probe_size - len(topic.encode()) - HEADER_BYTES
            self._largest_echo = 0
            self._end_received.clear()
            await connection.publish(topic, bytes(payload), 0, False)
            await connection.publish(topic, _END_OF_PROBE, 0, False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end_received.wait(), connection.answer_timeout)
            if self._largest_echo >= payload:
                self.got_through(probe_size)
            elif self._end_received.is_set():
                what = "drops packets of {size} bytes without an error"
                if self._failed(size, unsplittable, what, "message_size_limit"):
                    self._largest_sent = 0
                else:
                    await asyncio.sleep(_PROBE_PAUSE * self._failures)
                    self._probe_due.set()

    def connection_lost(self, cause: str) -> bool:
        """Record that a connection was lost or could not be opened; return True if the limit was halved.

        cause: of the TransportError that ended the connection. Raises another TransportError if a packet that
        cannot be made smaller has failed too often.
        """
        size, self._largest_sent = self._largest_sent, 0
        if size <= self.largest_delivered or self._announced is not None:
            return False  # no packet was on its way that may be too large
        # A connection that the broker closed without a reason has the cause "unreachable".
        if cause not in ("unreachable", "too-large"):
            return False
        what = "closed the connection on packets of {size} bytes"
        certain = cause == "too-large"
        return self._failed(size, self._unsplittable, what, "max_packet_size", certain=certain)

    def _failed(
        self, size: int, unsplittable: bool, what: str, option: str, *, certain: bool = False
    ) -> bool:
        """Record that a packet did not get through; return True if the limit was halved.

        what, option: what the broker does, and mosquitto's option that causes it, for the message.
        certain: the broker gave the size as the reason.
        """
        self._failures += 1
        self._smallest_failed = min(self._smallest_failed, size)
        what = what.format(size=size)
        if unsplittable or size <= SMALLEST_PACKET:
            if self._failures < FAILURES_TO_GIVE_UP:
                return False
            raise TransportError(
                "too-large",
                f"{self._broker} {what}, {self._failures} times in a row, and this packet cannot be made "
                f"smaller: raise the broker's packet limit (mosquitto: {option})",
            )
        if self._failures < FAILURES_TO_HALVE and not self._halving and not certain:
            return False
        self._estimate = max(SMALLEST_PACKET, min(size, self.size) // 2)
        _log.log(
            logging.INFO if self._warned else logging.WARNING,
            "%s %s: packets are limited to %d bytes from now on; to avoid this, raise the broker's packet "
            "limit (mosquitto: %s)",
            self._broker, what, self._estimate, option,
        )  # fmt: skip
        self._halving = self._warned = True
        self._counters["packets-halved"] += 1
        self._failures, self._smallest_failed = 0, MQTT_MAX_PACKET
        return True
