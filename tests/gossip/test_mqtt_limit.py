"""Brokers that disconnect on large packets, or drop them: packets become smaller, or one error says why."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from ports import unused_port
from waiting import turns, until

from gossamer.gossip.transport import MqttOptions, MqttTransport, TransportError
from gossamer.gossip.transport.mqtt import (
    FAILURES_TO_GIVE_UP,
    FAILURES_TO_HALVE,
    MIN_PROBED_PACKET,
    PacketLimit,
)
from gossamer.peer import Broker, BrokerSettings

BROKER = "mqtt://broker"
INBOX, CARD, ECHO = (
    "gossamer/v1/x/peer/y/inbox/v",
    "x/peer/a/card",
    "gossamer/v1/x/peer/y/inbox/@echo",
)
LIMIT = 20_000


def lose(
    limit: PacketLimit, size: int, *, cause: str = "unreachable", unsplittable: bool = False
) -> bool:
    """Lose one connection after a packet of this size; return whether the limit was halved."""
    limit.connected(None)
    limit.sending(size, unsplittable=unsplittable)
    return limit.connection_lost(cause)


# --- counting --------------------------------------------------------------------------------------


def test_packets_are_halved_after_three_lost_connections_in_a_row():
    limit = PacketLimit(BROKER, 1 << 20)
    assert [lose(limit, 100_000) for _ in range(FAILURES_TO_HALVE)] == [False] * (
        FAILURES_TO_HALVE - 1
    ) + [True]
    assert limit.size == 50_000
    assert limit.allows(100_000), "a packet that cannot be split is still tried"


def test_a_packet_that_got_through_does_not_halve_the_limit():
    limit = PacketLimit(BROKER, 1 << 20)
    for _ in range(10 * FAILURES_TO_HALVE):
        limit.connected(None)
        limit.sending(100_000, unsplittable=False)
        limit.got_through(100_000)
        limit.sending(90_000, unsplittable=False)
        assert not limit.connection_lost("unreachable")
    for _ in range(10):
        assert not any(lose(limit, 100_000) for _ in range(FAILURES_TO_HALVE - 1))
        limit.got_through(100_000)  # so the losses before were not in a row
    assert limit.size == 1 << 20


def test_small_packets_that_get_through_do_not_clear_a_large_one():
    limit = PacketLimit(BROKER, 1 << 20)
    for number in range(FAILURES_TO_HALVE):
        limit.connected(None)
        limit.got_through(3000)  # the card, after every reconnection
        limit.sending(100_000, unsplittable=False)
        assert limit.connection_lost("unreachable") == (number == FAILURES_TO_HALVE - 1)


@pytest.mark.parametrize("cause", ["no-delivery", "no-answer", "silent", "refused"])
def test_only_connections_that_the_broker_closed_count(cause):
    limit = PacketLimit(BROKER, 1 << 20)
    assert not any(lose(limit, 100_000, cause=cause) for _ in range(10 * FAILURES_TO_GIVE_UP))
    assert not limit.connection_lost("unreachable"), (
        "an attempt that failed is not blamed on an older packet"
    )
    assert not any(lose(limit, MIN_PROBED_PACKET) for _ in range(10 * FAILURES_TO_GIVE_UP))
    assert limit.size == 1 << 20


def test_a_search_halves_at_once_and_ends_with_a_packet_that_gets_through():
    limit = PacketLimit(BROKER, 1 << 20)
    while not lose(limit, 64_000):
        pass
    assert lose(limit, 32_000)
    assert lose(limit, 16_000)
    limit.got_through(7900)
    assert not lose(limit, 7900)
    assert limit.size == 8000


def test_the_limit_is_halved_at_once_if_the_broker_answers_too_large():
    limit = PacketLimit(BROKER, 1 << 20)
    assert lose(limit, 64_000, cause="too-large")
    assert limit.size == 32_000


@pytest.mark.parametrize("unsplittable", [True, False])
def test_a_packet_that_cannot_be_smaller_is_one_error(unsplittable):
    limit = PacketLimit(BROKER, 1 << 20)
    assert not any(
        lose(limit, 500, unsplittable=unsplittable) for _ in range(FAILURES_TO_GIVE_UP - 1)
    )
    with pytest.raises(TransportError, match=f"{BROKER} closed .* 500 bytes.*max_packet_size") as e:
        lose(limit, 500, unsplittable=unsplittable)
    assert e.value.cause == "too-large"
    assert limit.size == 1 << 20, "the failure of a small packet proves nothing about larger ones"


def test_an_announced_limit_is_kept_between_connections_and_never_halved():
    limit = PacketLimit(BROKER, 1 << 20)
    limit.connected(5000)
    for _ in range(10 * FAILURES_TO_GIVE_UP):
        limit.sending(5000, unsplittable=False)
        assert not limit.connection_lost("unreachable")
        assert limit.size == 5000
    assert not limit.allows(5001)
    limit.connected(None)
    assert limit.size == 1 << 20


# --- with a broker that hangs up ---------------------------------------------------------------------


class Strict:
    """A minimal MQTT 3.1.1 broker that closes the connection on packets longer than its limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.connections = limit, 0
        self.published: list[tuple[str, int]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"mqtt://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    def cut(self) -> None:
        self._writers[-1].transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                first = (await reader.readexactly(1))[0]
                size = shift = 0
                head = bytearray((first,))
                while True:
                    head += await reader.readexactly(1)
                    size, shift = size | (head[-1] & 127) << shift, shift + 7
                    if head[-1] < 128:
                        break
                if size > self.limit:
                    break
                self._answer(bytes(head), await reader.readexactly(size), writer)
        writer.close()

    def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        first, packet = head[0], head + body
        kind = first >> 4
        if kind == 1:
            writer.write(b"\x20\x02\x00\x00")
        elif kind == 8:
            writer.write(b"\x90\x03" + body[:2] + b"\x01")
        elif kind == 3:
            end = 2 + int.from_bytes(body[:2], "big")
            self.published.append((body[2:end].decode(), len(body)))
            if first & 0b0110:
                writer.write(b"\x40\x02" + body[end : end + 2])
            else:
                writer.write(packet)  # every client is subscribed to its own topics


QUICK = MqttOptions(first_delay=0.01, longest_delay=0.05, connect_timeout=120.0)


async def push(transport: MqttTransport) -> None:
    """Publish chunks of the largest allowed size, up to 300,000 bytes, until cancelled."""
    while True:
        await transport.publish(INBOX, bytes(min(300_000, transport.max_payload(INBOX))))
        await turns(20)


def test_chunks_shrink_until_the_broker_accepts_them(run, caplog):
    caplog.set_level(logging.WARNING)

    async def scenario():
        async with (
            Strict(LIMIT) as broker,
            MqttTransport(broker.url, "a", options=QUICK, echo=ECHO) as a,
        ):
            pushing = asyncio.create_task(push(a))
            await until(lambda: any(topic == INBOX for topic, _ in broker.published))
            pushing.cancel()
            assert LIMIT / 2 - 100 < a.max_payload(INBOX) < LIMIT
            assert a.counters["packets-halved"] == 4  # 300, 150, 75, 37.5, 18.75 thousand
            assert a.counters["reconnects"] == FAILURES_TO_HALVE + 3

    run(scenario())
    assert [record.getMessage().count("max_packet_size") for record in caplog.records] == [1]


def test_a_card_that_is_too_large_ends_in_one_error(run):
    async def scenario():
        async with Strict(LIMIT) as broker:
            async with MqttTransport(broker.url, "a", options=QUICK, echo=ECHO) as a:
                with pytest.raises(TransportError) as error:
                    await a.publish(CARD, bytes(LIMIT), retain=True)
                assert a.connection.state == "failed"
            assert error.value.cause == "too-large"
            for part in (broker.url, str(LIMIT)[:2], "max_packet_size"):
                assert part in str(error.value)
            assert broker.connections == FAILURES_TO_GIVE_UP

    run(scenario())


def test_lost_connections_after_a_delivered_probe_do_not_halve_the_limit(run):
    """After the probe of a large packet was delivered, a lost connection is not due to its size."""

    async def scenario():
        async with (
            Strict(1 << 20) as broker,
            MqttTransport(broker.url, "a", options=QUICK, echo=ECHO) as a,
        ):
            await a.subscribe("gossamer/v1/x/peer/y/inbox/+")
            most = a.max_payload(INBOX)
            for number in range(2 * FAILURES_TO_HALVE):
                await until(lambda count=number: a.counters["reconnects"] == count)
                await until(lambda: a.connection.state == "connected")
                assert await a.publish(INBOX, bytes(100_000))
                await until(lambda: a.packet_limit.largest_delivered >= 100_000)
                broker.cut()
            assert a.max_payload(INBOX) == most
            assert a.counters["packets-halved"] == 0

    run(scenario())


# --- with mosquitto ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_mosquitto_with_a_low_limit_takes_what_we_send(run, mosquitto, version):
    async def scenario():
        options = QUICK.updated(version=version)
        async with (
            Broker(BrokerSettings(max_packet=LIMIT), kind="mosquitto") as broker,
            MqttTransport(broker.url, "a", options=options, echo=ECHO) as a,
        ):
            await a.subscribe("gossamer/v1/x/peer/y/inbox/+")
            pushing = asyncio.create_task(push(a))
            arrived = await anext(a.messages())
            pushing.cancel()
            assert LIMIT / 2 - 100 < len(arrived.payload) < LIMIT
            told = version == "5"
            assert a.counters["reconnects"] == (0 if told else FAILURES_TO_HALVE + 3)
            assert a.counters["packets-halved"] == (0 if told else 4)

    run(scenario())


def test_a_lower_limit_after_a_restart_of_mosquitto_applies_in_mqtt_5(run, mosquitto):
    async def scenario():
        port = unused_port()
        births = 0

        async def birth() -> None:
            nonlocal births
            births += 1
            await a.publish(CARD, bytes(10_000))

        options = QUICK.updated(version="5")
        url = f"mqtt://127.0.0.1:{port}"
        a = MqttTransport(url, "a", options=options, on_connect=birth)
        async with contextlib.AsyncExitStack() as stack:
            async with Broker(BrokerSettings(port=port, max_packet=40_000), kind="mosquitto"):
                await stack.enter_async_context(a)
                assert 39_900 < a.max_payload(INBOX) < 40_000
            assert 39_900 < a.max_payload(INBOX) < 40_000, "the last that is known"
            async with Broker(BrokerSettings(port=port, max_packet=5000), kind="mosquitto"):
                with pytest.raises(TransportError) as error:
                    await anext(a.messages())
                assert error.value.cause == "too-large"
                assert births == 2

    run(scenario())


DROPPING = BrokerSettings(mosquitto_options=(f"message_size_limit {LIMIT}",))


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_chunks_shrink_until_they_are_not_dropped(run, mosquitto, caplog, version):
    caplog.set_level(logging.WARNING)

    async def scenario():
        async with (
            Broker(DROPPING, kind="mosquitto") as broker,
            MqttTransport(broker.url, "a", options=QUICK.updated(version=version), echo=ECHO) as a,
        ):
            await a.subscribe("gossamer/v1/x/peer/y/inbox/+")
            pushing = asyncio.create_task(push(a))
            arrived = await anext(a.messages())
            await until(lambda: a.packet_limit.largest_delivered > LIMIT / 2)
            pushing.cancel()
            assert LIMIT / 2 - 1000 < len(arrived.payload) <= LIMIT
            assert a.counters["packets-halved"] == 4  # 300, 150, 75, 37.5, 18.75 thousand
            assert a.counters["reconnects"] == 0
            return broker.url

    url = run(scenario())
    told = [r.getMessage() for r in caplog.records if r.name == "gossamer.gossip.transport.mqtt"]
    assert len(told) == 1
    assert told[0].startswith(f"{url} drops packets of 300")
    assert "(mosquitto: message_size_limit)" in told[0]


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_a_card_that_is_dropped_ends_in_one_error(run, mosquitto, version):
    async def scenario():
        async with (
            Broker(DROPPING, kind="mosquitto") as broker,
            MqttTransport(broker.url, "a", options=QUICK.updated(version=version), echo=ECHO) as a,
        ):
            await a.subscribe("gossamer/v1/x/peer/y/inbox/+")

            async def introduce() -> None:
                await a.publish(CARD, bytes(LIMIT + 1000), retain=True)
                await anext(a.messages())

            with pytest.raises(TransportError, match="message_size_limit") as error:
                await introduce()
            assert error.value.cause == "too-large"
            assert a.counters["reconnects"] == 0

    run(scenario())


@pytest.mark.parametrize("kind", ["mosquitto", "nats"])
def test_a_delivered_packet_is_not_probed_again(run, mosquitto, kind):
    async def scenario():
        async with (
            Broker(kind=kind) as broker,
            MqttTransport(broker.url, "a", options=QUICK, echo=ECHO) as a,
            MqttTransport(broker.url, "b", options=QUICK) as b,
        ):
            await a.subscribe("gossamer/v1/x/peer/y/inbox/+")
            await b.subscribe("gossamer/v1/x/peer/y/inbox/+")
            most = a.max_payload(INBOX)
            for _ in range(3):
                assert await a.publish(INBOX, bytes(100_000))
            await until(lambda: a.packet_limit.largest_delivered > 100_000)
            assert await a.publish(INBOX, bytes(100_010))
            assert await a.publish("gossamer/v1/x/peer/y/inbox/end", b"")
            sizes = {}
            async for topic, payload, _ in b.messages():
                sizes.setdefault(topic, []).append(len(payload))
                if topic == "gossamer/v1/x/peer/y/inbox/end":
                    break
            assert sizes[INBOX] == [100_000] * 3 + [100_010]
            assert sum(size > 1 for size in sizes[ECHO]) == 1
            assert a.max_payload(INBOX) == most

    run(scenario())


# --- with a link that loses packets ------------------------------------------------------------------


class Forgetful:
    """A connection that delivers probes up to `most` bytes, but loses the first `lost` of them."""

    answer_timeout = 5.0

    def __init__(self, limit: PacketLimit, most: int, lost: int = 0) -> None:
        self._limit, self._most, self.lost, self.tried = limit, most, lost, 0

    async def publish(self, topic: str, payload: bytes, qos: int, retain: bool) -> bool:
        if len(payload) > 1:
            self.tried += 1
            if len(payload) > self._most or self.tried <= self.lost:
                return True
        self._limit.echo_received(len(payload))
        return True


def tried(run, link: Forgetful, limit: PacketLimit, size: int, *, unsplittable: bool) -> None:
    async def scenario():
        limit.connected(None)
        limit.sending(size, unsplittable=unsplittable)
        asking = asyncio.ensure_future(limit.probe(link, ECHO, lambda _: True))  # type: ignore[arg-type]
        done = asyncio.ensure_future(
            until(lambda: limit.largest_delivered >= size or limit.size < 1 << 20)
        )
        await asyncio.wait((asking, done), return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        asking.cancel()
        if asking.done():
            asking.result()

    run(scenario())


def test_a_packet_that_is_lost_sometimes_does_not_halve_the_limit(run):
    limit = PacketLimit("mqtt://broker", 1 << 20)
    link = Forgetful(limit, 1 << 20, lost=FAILURES_TO_HALVE - 1)
    tried(run, link, limit, 100_000, unsplittable=False)
    assert limit.size == 1 << 20
    assert link.tried == FAILURES_TO_HALVE


def test_packets_that_are_never_delivered_are_halved(run):
    limit = PacketLimit("mqtt://broker", 1 << 20)
    link = Forgetful(limit, 50_000)
    tried(run, link, limit, 100_000, unsplittable=False)
    assert limit.size == 50_000
    assert link.tried == FAILURES_TO_HALVE


@pytest.mark.parametrize(("size", "unsplittable"), [(100_000, True), (400, False)])
def test_a_packet_that_is_never_delivered_and_cannot_be_smaller_is_one_error(
    run, size, unsplittable
):
    limit = PacketLimit("mqtt://broker", 1 << 20)
    link = Forgetful(limit, 300)
    with pytest.raises(TransportError, match=f"{size} bytes.*cannot be made smaller"):
        tried(run, link, limit, size, unsplittable=unsplittable)
    assert link.tried == FAILURES_TO_GIVE_UP
    assert limit.size == 1 << 20


def test_packets_are_probed_again_on_the_next_connection(run):
    """The broker may have been restarted with a lower limit, which it does not announce."""
    limit = PacketLimit("broker", 1 << 20)
    limit.connected(None)
    limit.got_through(1 << 20)
    link = Forgetful(limit, 1 << 20)
    tried(run, link, limit, 300_000, unsplittable=False)
    assert link.tried == 1
