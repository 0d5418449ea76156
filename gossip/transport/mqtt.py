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
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self

import numpy as np

from ..topics import is_gossip, is_state, matches
from .base import (
    Connection,
    Hook,
    Inbox,
    Payload,
    Received,
    StateCallback,
    TransportError,
    Will,
    default_qos,
)
from .broker_url import ALWAYS_FATAL, FATAL_AT_FIRST, REFUSALS, Address, TlsFiles
from .connection import Link
from .options import MqttOptions
from .packet_limit import HEADER_BYTES, PacketLimit

_log = logging.getLogger(__name__)

_STEPS = 10  # counted, not measured: a process that was frozen has not listened meanwhile
REPEAT_SUBSCRIPTIONS = (1.0, 9.0)
"""Seconds after which topics of state are subscribed to once more, so that a broker repeats what it retains.
nats-server 2.15 delivers a message first and retains it a little later: a client that subscribes in between
hears neither (measured: 40 clients that subscribe and publish within 0.1 s miss up to 18 of 1,600 cards)."""


class MqttTransport:
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
        self.client_id = client_id
        self.address = Address.parse(url, password)
        self.options = options or MqttOptions()
        self.counters: Counter[str] = Counter()
        self.connection = Connection("new")
        if tls is not None and not self.address.tls:
            raise TransportError("url", f"TLS files given, but {self.address} does not use TLS")
        self._tls_files = tls or TlsFiles()
        self._tls_context: ssl.SSLContext | None = None
        self._will = will
        self._on_connect = on_connect
        self._on_state = on_state
        self._random = np.random.default_rng(seed)
        self._patterns: list[str] = []
        self._new_pattern = asyncio.Event()
        self._last_state: dict[str, int | None] = {}
        """Per topic of state on this connection: the hash of its retained message, None after a live one."""
        self._echo = Echo(echo, self.options.keepalive if echo_every is None else echo_every)
        self._attempt_timeout = (
            self.options.connect_timeout if attempt_timeout is None else attempt_timeout
        )
        self.echo_topic = echo
        self.packet_limit = PacketLimit(str(self.address), self.options.max_packet, self.counters)
        self._inbox = Inbox(
            self.counters, self.options.max_inbound_messages, self.options.max_inbound_bytes
        )
        self._link: Link | None = None
        self._closing = asyncio.Event()
        self._settled = asyncio.Event()  # set unless a connection is being waited for
        self._error: TransportError | None = None
        self._outbound_bytes = 0
        self._runner: asyncio.Task[None] | None = None

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
        self._closing.set()
        if self._runner is not None:
            await self._runner

    async def abort(self) -> None:
        """See `Transport.abort`."""
        self._closing.set()
        if self._link is not None:
            self._link.hang_up()
        if self._runner is not None:
            await self._runner

    async def _run(self, first: asyncio.Future[None]) -> None:
        loop, options = asyncio.get_running_loop(), self.options
        deadline = loop.time() + options.connect_timeout
        failures = 0
        error: TransportError | None = None
        while not self._closing.is_set():
            started = loop.time()
            self._set("connecting")
            try:
                lost = await self._unless_closing(self._live(first))
            except TransportError as failure:
                lost = failure
                if failure.cause == "too-large":  # the birth, which will be no smaller next time
                    error = failure
                    break
            except Exception as failure:  # a hook's own mistake: report it, do not loop on it
                error = TransportError("hook", f"the on_connect hook failed: {failure!r}")
                error.__cause__ = failure
                break
            if lost is None or self._closing.is_set():
                break
            at_first = not first.done()
            if lost.cause in ALWAYS_FATAL or (
                at_first and (lost.cause in FATAL_AT_FIRST or loop.time() >= deadline)
            ):
                error = lost
                break
            try:
                halved = self.packet_limit.lost(lost.cause)
            except TransportError as failure:
                error = failure
                break
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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), delay)
        self._error = error
        self._set("closed" if error is None else "failed", "" if error is None else str(error))
        self._inbox.close(error)
        if not first.done():
            first.set_exception(error or TransportError("closed", "closed while connecting"))
            first.exception()  # retrieved: nobody may be waiting for it any more

    async def _unless_closing(
        self, life: Coroutine[Any, Any, TransportError]
    ) -> TransportError | None:
        """Why a connection was lost; None if we were told to close, whatever it was busy with."""
        task = asyncio.ensure_future(life)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((task, closing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        return None if task.cancelled() else task.result()

    async def _live(self, first: asyncio.Future[None]) -> TransportError:
        """One connection, from its start to its loss; returns why it was lost."""
        link = Link(
            self.address,
            self.client_id,
            self.receive,
            version=self.options.version,
            keepalive=self.options.keepalive,
            max_inbound_payload=self.options.max_inbound_payload,
            timeout=self._attempt_timeout,
            will=self._will,
            tls=self._tls_context,
        )
        await link.open()
        self._last_state.clear()
        try:
            if self._patterns and not await link.alive(link.subscribe(self._patterns)):
                return link.why_lost()
            self.packet_limit.connected(link.max_packet)
            self._link = link
            if first.done():
                self.counters["reconnects"] += 1
            self._set("connected")
            if self._on_connect is not None and not await link.alive(_call(self._on_connect)):
                return link.why_lost()
            if not first.done():
                first.set_result(None)
            listening = asyncio.ensure_future(self._echo.listen(link, self._covered))
            asking = asyncio.ensure_future(
                self.packet_limit.ask(link, self.echo_topic, self._covered)
            )
            repeating = asyncio.ensure_future(self._repeat_subscriptions(link))
            try:
                await asyncio.wait(
                    (listening, asking, link.lost), return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                listening.cancel()
                asking.cancel()
                repeating.cancel()
            if asking.done():
                asking.result()  # raises: a packet that cannot be cut does not get through
            if not link.lost.done():
                self.counters["deaf"] += 1
                link.give_up("deaf", "takes what we say, but we hear nothing, not even ourselves")
            return link.why_lost()
        finally:
            self._link = None
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

    def _set(self, state: Any, cause: str = "") -> None:
        began = time.monotonic() if state == "connecting" else self.connection.since
        self.connection = Connection(state, cause, began)
        if state in ("connecting", "lost"):
            self._settled.clear()
        else:
            self._settled.set()
        if self._on_state is not None:
            self._on_state(self.connection)

    # --- traffic -------------------------------------------------------------------------------

    def max_payload(self, topic: str) -> int:
        """See `Transport.max_payload`. In MQTT 5 the broker's own limit counts, if it names one;
        else it becomes less when the broker hangs up on large packets: ask each time."""
        return self.packet_limit.size - len(topic.encode()) - HEADER_BYTES

    async def publish(
        self, topic: str, payload: Payload, *, retain: bool = False, qos: int | None = None
    ) -> bool:
        """See `Transport.publish`."""
        qos = default_qos(topic) if qos is None else qos
        while True:
            self._raise_if_over()
            link = self._link
            if link is None:
                if qos == 0:
                    self.counters["outbound-offline"] += 1
                    return False
                await self._settled.wait()
                await asyncio.sleep(0)
                continue
            size = len(payload) + len(topic.encode()) + HEADER_BYTES
            if not self.packet_limit.allows(size):
                raise TransportError(
                    "too-large",
                    f"{len(payload)} bytes to {topic}; {self.address} takes "
                    f"{self.max_payload(topic)}: raise the broker's packet limit (mosquitto: "
                    "max_packet_size), or cut the message into chunks",
                )
            if (
                qos == 0
                and self._outbound_bytes
                and self._outbound_bytes + len(payload) > self.options.max_outbound_bytes
            ):
                self.counters["outbound-full"] += 1
                return False
            self._outbound_bytes += len(payload)
            mark = self.packet_limit.sending(size, whole=not is_gossip(topic))
            try:
                sent = await link.publish(topic, payload, qos, retain)
            finally:
                self._outbound_bytes -= len(payload)
            if sent:
                if qos:
                    self.packet_limit.took(mark)
                return True
            self.counters["outbound-lost"] += 1
            if qos == 0:
                return False
            await asyncio.sleep(self.options.first_delay / 10)

    async def subscribe(self, pattern: str) -> None:
        """See `Transport.subscribe`."""
        self._raise_if_over()
        if pattern not in self._patterns:
            self._patterns.append(pattern)
            self._new_pattern.set()
        link = self._link
        if link is not None:  # else, and if it is lost now, the next connection subscribes
            await link.alive(link.subscribe([pattern]))

    def messages(self) -> AsyncIterator[Received]:
        """See `Transport.messages`."""
        return self._inbox.messages()

    def receive(self, topic: str, payload: bytes | memoryview, retain: bool) -> None:
        """Take what the broker sent (called by the link)."""
        if not self._covered(topic):
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

    def _covered(self, topic: str) -> bool:
        """Whether we asked for this topic."""
        return any(matches(pattern, topic) for pattern in self._patterns)

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
        if self._runner is None or self._runner.done() or self._closing.is_set():
            raise TransportError("closed", "this transport is not open")


async def _call(hook: Hook) -> None:
    await hook()


class Echo:
    """Says something to itself every half keepalive, and notices when nothing at all comes back.

    A connection can be up, its pings answered and its messages acknowledged, while the broker has forgotten
    what we subscribed to. Only a message of our own that comes back shows that the others' would too.

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
