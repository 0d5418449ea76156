"""Finds out whether peers can work with a broker, by connecting to it as peers do.

    findings = await check_broker(BrokerAddress("mqtt://localhost"), "check", "check")

Each check uses connections of its own, so that one that fails does not spoil the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from math import log10
from typing import TYPE_CHECKING, Literal

from ...gossip import (
    Address,
    MqttTransport,
    TransportError,
    Will,
    split_urls,
    topics,
)

if TYPE_CHECKING:
    from ..spec import BrokerAddress

Verdict = Literal["ok", "note", "fails"]

WAIT = 4.0
"""Seconds for the broker to deliver a small message; in this time retained ones are asked for twice."""
PACKET_TIMEOUT = 30.0
"""Seconds for the broker to deliver a packet of any size."""
RATE_SECONDS = 1.0
"""Seconds for which packets are sent, by default, to measure how many arrive."""
FLOOD_BYTES = 24 << 20
"""Bytes that are sent to a client that does not read."""
SIZES = tuple(1 << power for power in range(24, 9, -1))
"""Payloads, in bytes, that are tried until one gets through: 16 MB, half of it, and so on to 1 kB."""
SMALL_LIMIT = 1 << 16
"""Bytes of a packet limit below which splitting messages costs much."""
MIN_PACKET = SIZES[-1]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    subject: what was checked, as in "packet limit". verdict: "fails" if peers cannot work with this broker,
        "note" if they work less well. setting: what to change.
    """

    subject: str
    result: str
    verdict: Verdict = "ok"
    setting: str = ""


async def check_broker(
    broker: BrokerAddress,
    swarm: str,
    name: str,
    on_check: Callable[[str], None] = lambda _: None,
    *,
    rate_seconds: float = RATE_SECONDS,
) -> list[Finding]:
    """Return what a broker, or a cluster, offers to a peer of this name in this swarm.

    The peer must not be running, as its card and status are overwritten. on_check: called before each check
    with a line of text about it. rate_seconds: for how long packets are sent to measure how many arrive.
    Raises TransportError if there is no connection at all.
    """
    Address.parse_all(broker.url)
    return await _Check(broker, swarm, name, rate_seconds).run(on_check)


class _Check:
    """All checks of one broker; each is a method, whose name is shown while it runs."""

    def __init__(self, broker: BrokerAddress, swarm: str, name: str, rate_seconds: float) -> None:
        self._rate_seconds = rate_seconds
        self._nodes = [broker.updated(url=url) for url in split_urls(broker.url)]
        self._node = self._nodes[0]
        self._card, self._status = topics.card(swarm, name), topics.status(swarm, name)
        self._inbox = topics.inbox(swarm, name, "check")
        self._cards, self._statuses = topics.of_all(swarm, "card"), topics.of_all(swarm, "status")
        self._inboxes = topics.inboxes(swarm, name)
        self._largest = 0
        """Bytes of the largest payload that got through."""

    async def run(self, on_check: Callable[[str], None]) -> list[Finding]:
        findings = [await self._versions()]
        checks: list[Callable[[], Awaitable[Finding]]] = [
            self._rules, self._qos_1, self._retained, self._retained_wildcard, self._retained_again,
            *([self._retained_elsewhere] if len(self._nodes) > 1 else []),
            self._will, self._packet_limit, self._small_packets, self._large_packets, self._slow_reader,
        ]  # fmt: skip
        for check in checks:
            subject = check.__name__.strip("_").replace("_", " ")
            on_check(f"checking: {subject}")
            try:
                findings.append(await check())
            except (TransportError, OSError) as error:  # also TimeoutError
                reason = getattr(error, "strerror", None) or str(error) or "no answer in time"
                findings.append(Finding(subject, reason, "fails", "see the broker's log"))
            if (
                check in (self._rules, self._qos_1, self._retained)
                and findings[-1].verdict == "fails"
            ):
                break  # the other checks would fail for the same reason
        await self._clean_up()
        return findings

    # --- connections ----------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _client(
        self,
        *patterns: str,
        node: BrokerAddress | None = None,
        will: Will | None = None,
    ) -> AsyncIterator[MqttTransport]:
        from ..spec import mqtt_transport  # loads numpy, which a broker need not wait for

        transport = mqtt_transport(node or self._node, f"check-{secrets.token_hex(6)}", will=will)
        async with transport:
            for pattern in patterns:
                await transport.subscribe(pattern)
            yield transport

    async def _publish(
        self, transport: MqttTransport, topic: str, payload: bytes, *, retain: bool = True
    ) -> None:
        """Publish a message at QoS 1."""
        async with asyncio.timeout(2 * WAIT):
            await transport.publish(topic, payload, retain=retain, qos=1)

    @staticmethod
    async def _arrives(transport: MqttTransport, payload: bytes, within: float = WAIT) -> bool:
        """Return whether this payload is delivered in time."""
        with contextlib.suppress(TimeoutError, TransportError):
            async with asyncio.timeout(within):
                async for message in transport.messages():
                    if message.payload == payload:
                        return True
        return False

    async def _arrives_before_others(self, client: MqttTransport, payload: bytes) -> bool:
        """Return whether a payload that was sent to ourselves is delivered before those that follow it.

        Small messages follow it until one is delivered: a broker that hung up on it is connected to again.
        """

        async def follow() -> None:
            while True:
                await asyncio.sleep(WAIT / 10)
                await client.publish(self._inbox, b"small")

        following = asyncio.create_task(follow())
        try:
            async with asyncio.timeout(PACKET_TIMEOUT):
                message = await anext(client.messages())
                return len(message.payload) == len(payload)
        except TimeoutError:
            return False
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _clean_up(self) -> None:
        with contextlib.suppress(TransportError, TimeoutError):
            async with self._client() as transport:
                for topic in (self._card, self._status):
                    await self._publish(transport, topic, b"")

    # --- checks ---------------------------------------------------------------------------------

    async def _versions(self) -> Finding:
        """Find the versions of MQTT that work; the other checks use the requested one, or else the first."""
        working, errors = [], []
        requested = self._node.version
        for version in dict.fromkeys((requested, "3.1.1", "5")):
            node = self._node.updated(version=version)
            try:
                async with asyncio.timeout(node.connect_timeout + WAIT), self._client(node=node):
                    working.append(version)
            except (TransportError, TimeoutError) as error:
                errors.append(error)
        if not working:
            raise errors[0]
        verdict: Verdict = "ok"
        setting = ""
        if requested not in working:
            self._nodes = [node.updated(version=working[0]) for node in self._nodes]
            self._node, verdict, setting = self._nodes[0], "note", f"join with --mqtt {working[0]}"
        return Finding("MQTT versions", ", ".join(sorted(working)), verdict, setting)

    async def _rules(self) -> Finding:
        """Find which of the things that a peer must publish and read the broker's access rules forbid."""
        subject = "access rules"
        forbidden = []
        payload = secrets.token_bytes(16)
        # Neither retained nor at QoS 1: a broker may refuse these for other reasons, which later checks find.
        for text, topic, pattern in (
            ("its card", self._card, self._cards),
            ("its status", self._status, self._statuses),
            ("its inbox", self._inbox, self._inboxes),
        ):
            try:
                async with self._client(pattern) as reader, self._client() as writer:
                    async with asyncio.timeout(WAIT):
                        await writer.publish(topic, payload, qos=0)
                    if not await self._arrives(reader, payload, WAIT / 2):
                        forbidden.append(f"{text} is not delivered to {pattern}")
            except (TransportError, TimeoutError) as error:
                cause = f": {error}" if str(error) else ""
                forbidden.append(f"{text} cannot be published or read{cause}")
        if not forbidden:
            return Finding(subject, "own card, status and inbox can be published and read")
        remedy = "allow what gossamer broker --acl writes; check --swarm and --name"
        return Finding(subject, "; ".join(forbidden), "fails", remedy)

    async def _qos_1(self) -> Finding:
        async with self._client() as writer:
            start = time.monotonic()
            try:
                await self._publish(writer, self._card, b"one", retain=False)
            except (TransportError, TimeoutError):
                return Finding(
                    "QoS 1", "not acknowledged", "fails", "allow it (mosquitto: max_qos 1)"
                )
            taken = time.monotonic() - start
        return Finding("QoS 1", f"acknowledged after {1000 * taken:.0f} ms")

    async def _retained(self) -> Finding:
        return await self._retained_for("retained messages", self._card)

    async def _retained_wildcard(self) -> Finding:
        return await self._retained_for("retained, wildcard filters", self._cards)

    async def _retained_for(self, subject: str, pattern: str) -> Finding:
        """Find whether a new subscriber to this pattern gets a retained card."""
        payload = secrets.token_bytes(16)
        remedy = "enable retained messages (mosquitto: retain_available)"
        try:
            async with self._client() as writer:
                await self._publish(writer, self._card, payload)
        except (TransportError, TimeoutError):
            return Finding(subject, "none is accepted", "fails", remedy)
        async with self._client(pattern) as reader:
            if await self._arrives(reader, payload):
                return Finding(subject, "delivered to a new subscriber")
        if pattern == self._cards:
            remedy = "use a broker that keeps to MQTT 3.3.1.3 (RabbitMQ does not): mosquitto, nats-server"
        return Finding(subject, f"not delivered to {pattern}", "fails", remedy)

    async def _retained_again(self) -> Finding:
        payload = secrets.token_bytes(16)
        async with self._client(self._card) as reader:
            await self._publish(reader, self._card, payload)
            await reader.abort()
        async with self._client(self._card) as reader:
            if await self._arrives(reader, payload):
                return Finding("retained, after a reconnection", "delivered again")
        remedy = "keep retained messages until they are replaced"
        return Finding("retained, after a reconnection", "not delivered", "fails", remedy)

    async def _retained_elsewhere(self) -> Finding:
        subject, missing = "retained, from another node", []
        for index, source in enumerate(self._nodes):
            target = self._nodes[(index + 1) % len(self._nodes)]
            payload = secrets.token_bytes(16)
            async with self._client(node=source) as writer:
                await self._publish(writer, self._card, payload)
            async with self._client(self._card, node=target) as reader:
                if not await self._arrives(reader, payload):
                    missing.append(f"{Address.parse(source.url)} → {Address.parse(target.url)}")
        if not missing:
            return Finding(subject, f"delivered by all {len(self._nodes)} nodes")
        remedy = "make the nodes one cluster, which replicates retained messages (gossamer broker config)"
        return Finding(subject, f"not delivered: {', '.join(missing)}", "fails", remedy)

    async def _will(self) -> Finding:
        payload = secrets.token_bytes(16)
        async with (
            self._client(self._status) as reader,
            self._client(will=Will(self._status, payload)) as victim,
        ):
            await victim.abort()
            if not await self._arrives(reader, payload):
                remedy = "none: a peer that dies is given up after its lease, 600 s by default"
                return Finding("last will", "not published", "note", remedy)
        async with self._client(self._status) as newcomer:
            if await self._arrives(newcomer, payload):
                return Finding("last will", "published and retained")
        remedy = "none: a peer that joins later waits for the dead one's lease"
        return Finding("last will", "published, but not retained", "note", remedy)

    async def _packet_limit(self) -> Finding:
        """Send ever smaller packets to ourselves until one is delivered."""
        subject = "packet limit"
        setting = "raise it (mosquitto: max_packet_size, message_size_limit; nats: max_payload)"
        for size in SIZES:
            payload = bytes(size - 512)  # room for the topic
            with contextlib.suppress(TransportError):
                async with self._client(self._inboxes) as client:
                    await client.publish(self._inbox, payload)
                    if await self._arrives_before_others(client, payload):
                        self._largest = len(payload)
                        break
        if self._largest < MIN_PACKET // 2:
            return Finding(subject, "no packet got through", "fails", setting)
        shown = f"at least {_bytes(self._largest)}"
        bounds = f"{shown}, less than {_bytes(2 * self._largest)}"
        if self._largest < SMALL_LIMIT:
            return Finding(subject, bounds, "note", setting)
        if self._largest < SIZES[0] - 512:
            hint = f"peers find it by trial; --max-packet {self._largest} spares the search"
            return Finding(subject, bounds, "note", hint)
        return Finding(subject, shown)

    async def _small_packets(self) -> Finding:
        return await self._rate(1000)

    async def _large_packets(self) -> Finding:
        return await self._rate(min(1_000_000, max(1, self._largest)))

    async def _rate(self, size: int) -> Finding:
        """Measure how many packets a second come back, with at most 64, or 4 MB, on their way."""
        subject = f"packets a second at {_bytes(size)}"
        max_on_way, sent, received = max(1, min(64, (4 << 20) // size)), 0, 0
        async with self._client(self._inboxes) as client:
            start, payload = time.monotonic(), bytes(size)
            messages = client.messages()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rate_seconds + 2 * WAIT):
                    while time.monotonic() < start + self._rate_seconds:
                        while sent - received < max_on_way:
                            await client.publish(self._inbox, payload)
                            sent += 1
                        await anext(messages)
                        received += 1
            taken = time.monotonic() - start
        lost = sent - received > max_on_way
        verdict: Verdict = "note" if lost or not received else "ok"
        rate = f"{received / taken:,.0f} ({_bytes(received * size / taken)}/s)"
        return Finding(subject, rate, verdict)

    async def _slow_reader(self) -> Finding:
        """Flood a client that does not read; then let it read, and count what comes."""
        subject = "slow reader"
        address = Address.parse(self._node.url, self._node.password)
        if address.transport != "tcp" or self._node.version != "3.1.1":
            return Finding(subject, "not tested over websockets or MQTT 5", "note")
        size = min(1_000_000, self._largest) or 100
        count = max(1, FLOOD_BYTES // size)
        tls = self._node.tls_files.context() if address.tls else None
        reader = await asyncio.to_thread(_IdleClient, address, self._inboxes, tls)
        try:
            async with self._client() as writer:
                for _ in range(count):
                    await writer.publish(self._inbox, bytes(size))
                await self._publish(writer, self._card, b"after the flood")
            read_bytes, closed = await asyncio.to_thread(reader.read, count * size)
        finally:
            reader.close()
        read_messages = min(count, read_bytes // size)
        if closed:
            text = f"cut off after {_bytes(read_bytes)} of {_bytes(count * size)}; peers reconnect"
            setting = "raise the queue (nats: max_pending, write_deadline)"
            return Finding(subject, text, "note", setting)
        if read_messages < count:
            text = f"{count - read_messages} of {count} messages were dropped; peers repeat them"
            setting = "raise the queue (mosquitto: max_queued_messages, max_queued_bytes)"
            return Finding(subject, text, "note", setting)
        return Finding(subject, f"all {_bytes(count * size)} were kept for it")


class _IdleClient:
    """A client of MQTT 3.1.1 over TCP or TLS that subscribes, and then reads only in `read`."""

    def __init__(self, address: Address, pattern: str, tls: ssl.SSLContext | None) -> None:
        raw = socket.create_connection((address.host, address.port), timeout=WAIT)
        # A small receive buffer: the broker's queue must fill, not the kernel's.
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._socket = raw if tls is None else tls.wrap_socket(raw, server_hostname=address.host)
        flags, login = 0x02, b""
        for bit, text in ((0x80, address.username), (0x40, address.password)):
            if text is not None:
                flags, login = flags | bit, login + _text(text)
        client_id = _text(f"check-{secrets.token_hex(6)}")
        self._send(
            0x10, _text("MQTT") + bytes((4, flags)) + (600).to_bytes(2, "big") + client_id + login
        )
        self._socket.recv(4)  # CONNACK
        self._send(0x82, b"\0\1" + _text(pattern) + b"\0")
        self._socket.recv(5)  # SUBACK

    def _send(self, kind: int, body: bytes) -> None:
        assert len(body) < 128 * 128
        length = bytes((len(body) % 128 | 128, len(body) // 128))
        self._socket.sendall(bytes((kind,)) + length + body)

    def read(self, limit: int) -> tuple[int, bool]:
        """Read until `limit` bytes or a pause; return how many were read, and whether the broker hung up."""
        total = 0
        self._socket.settimeout(WAIT)
        while total < limit:
            try:
                data = self._socket.recv(1 << 20)
            except TimeoutError:
                return total, False
            except OSError:
                return total, True
            if not data:
                return total, True
            total += len(data)
        return total, False

    def close(self) -> None:
        self._socket.close()


def _text(text: str) -> bytes:
    """Encode a string as MQTT does."""
    data = text.encode()
    return len(data).to_bytes(2, "big") + data


def _bytes(count: float) -> str:
    """Return a number of bytes as text, with a unit."""
    power = min(3, int(log10(max(1.0, count)) / 3 + 1e-9))
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"
