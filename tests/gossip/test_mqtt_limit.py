"""Brokers that hang up on large packets: packets become smaller, or one error says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from waiting import turns, until

from gossamer.gossip.transport import MqttOptions, MqttTransport, TransportError
from gossamer.gossip.transport.packet_limit import CUTS, LAST_CUTS, MIN_PROBED_PACKET, PacketLimit
from gossamer.peer import Broker, BrokerSettings, free_port

BROKER = "mqtt://broker"
INBOX, CARD, ECHO = "x/inbox/v", "x/card", "x/inbox/@echo"
LIMIT = 20_000


def cut(limit: PacketLimit, size: int, *, cause: str = "unreachable", whole: bool = False) -> bool:
    """One connection that ends after a packet of this size."""
    limit.connected(None)
    limit.sending(size, whole=whole)
    return limit.lost(cause)


# --- counting --------------------------------------------------------------------------------------


def test_packets_are_halved_after_three_cuts_in_a_row():
    limit = PacketLimit(BROKER, 1 << 20)
    assert [cut(limit, 100_000) for _ in range(CUTS)] == [False] * (CUTS - 1) + [True]
    assert limit.size == 50_000
    assert limit.allows(100_000), "what cannot be cut is still tried"


def test_a_packet_that_got_through_is_not_blamed():
    limit = PacketLimit(BROKER, 1 << 20)
    for _ in range(10 * CUTS):
        limit.connected(None)
        limit.took(limit.sending(100_000, whole=False))
        limit.sending(90_000, whole=False)
        assert not limit.lost("unreachable")
    for _ in range(10):
        assert not any(cut(limit, 100_000) for _ in range(CUTS - 1))
        limit.took(limit.sending(100_000, whole=False))  # so the cuts before were not in a row
    assert limit.size == 1 << 20


def test_small_packets_that_get_through_do_not_clear_a_large_one():
    limit = PacketLimit(BROKER, 1 << 20)
    for number in range(CUTS):
        limit.connected(None)
        limit.took(limit.sending(3000, whole=True))  # the card, after every reconnection
        limit.sending(100_000, whole=False)
        assert limit.lost("unreachable") == (number == CUTS - 1)


@pytest.mark.parametrize("cause", ["deaf", "no-answer", "silent", "refused"])
def test_only_a_broker_that_hangs_up_counts(cause):
    limit = PacketLimit(BROKER, 1 << 20)
    assert not any(cut(limit, 100_000, cause=cause) for _ in range(10 * LAST_CUTS))
    assert not limit.lost("unreachable"), "an attempt that failed is not blamed on an older packet"
    assert not any(cut(limit, MIN_PROBED_PACKET) for _ in range(10 * LAST_CUTS))
    assert limit.size == 1 << 20


def test_a_search_halves_at_once_and_ends_with_a_packet_that_gets_through():
    limit = PacketLimit(BROKER, 1 << 20)
    while not cut(limit, 64_000):
        pass
    assert cut(limit, 32_000)
    assert cut(limit, 16_000)
    limit.took(limit.sending(7900, whole=False))
    limit.lost("unreachable")
    assert not cut(limit, 7900)
    assert limit.size == 8000


def test_a_broker_that_says_too_large_is_believed_at_once():
    limit = PacketLimit(BROKER, 1 << 20)
    assert cut(limit, 64_000, cause="too-large")
    assert limit.size == 32_000


@pytest.mark.parametrize("whole", [True, False])
def test_what_cannot_be_smaller_is_one_error(whole):
    limit = PacketLimit(BROKER, 1 << 20)
    assert not any(cut(limit, 500, whole=whole) for _ in range(LAST_CUTS - 1))
    with pytest.raises(
        TransportError, match=f"{BROKER} closed .* 500 bytes.* max_packet_size"
    ) as e:
        cut(limit, 500, whole=whole)
    assert e.value.cause == "too-large"
    assert limit.size == 1 << 20, "it says nothing about larger ones"


def test_a_named_limit_is_kept_between_connections_and_never_doubted():
    limit = PacketLimit(BROKER, 1 << 20)
    limit.connected(5000)
    for _ in range(10 * LAST_CUTS):
        limit.sending(5000, whole=False)
        assert not limit.lost("unreachable")
        assert limit.size == 5000
    assert not limit.allows(5001)
    limit.connected(None)
    assert limit.size == 1 << 20


# --- with a broker that hangs up ---------------------------------------------------------------------


class Strict:
    """Speaks just enough MQTT 3.1.1; hangs up on packets above its limit, as soon as it sees their length."""

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
                while True:
                    byte = (await reader.readexactly(1))[0]
                    size, shift = size | (byte & 127) << shift, shift + 7
                    if byte < 128:
                        break
                if size > self.limit:
                    break
                self._answer(first, await reader.readexactly(size), writer)
        writer.close()

    def _answer(self, first: int, body: bytes, writer: asyncio.StreamWriter) -> None:
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


QUICK = MqttOptions(first_delay=0.01, longest_delay=0.05, connect_timeout=120.0)


async def push(transport: MqttTransport) -> None:
    """Send a chunk, as large as the transport says, whenever there is a connection."""
    while True:
        await transport.publish(INBOX, bytes(min(300_000, transport.max_payload(INBOX))))
        await turns(20)


def test_chunks_shrink_until_the_broker_takes_them(run, caplog):
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
            assert a.counters["reconnects"] == CUTS + 3

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
            assert broker.connections == LAST_CUTS

    run(scenario())


def test_a_failing_link_is_not_taken_for_a_strict_broker(run):
    """A large packet is followed by one that must be answered, so that a later loss proves nothing."""

    async def scenario():
        async with (
            Strict(1 << 20) as broker,
            MqttTransport(broker.url, "a", options=QUICK, echo=ECHO) as a,
        ):
            most = a.max_payload(INBOX)
            for number in range(2 * CUTS):
                await until(lambda count=number: a.counters["reconnects"] == count)
                await until(lambda: a.connection.state == "connected")
                assert await a.publish(INBOX, bytes(100_000))
                assert a.packet_limit.suspect()
                await until(lambda: not a.packet_limit.suspect())
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
            await a.subscribe("x/inbox/+")
            pushing = asyncio.create_task(push(a))
            arrived = await anext(a.messages())
            pushing.cancel()
            assert LIMIT / 2 - 100 < len(arrived.payload) < LIMIT
            told = version == "5"
            assert a.counters["reconnects"] == (0 if told else CUTS + 3)
            assert a.counters["packets-halved"] == (0 if told else 4)

    run(scenario())


def test_mosquitto_5_that_returns_with_a_lower_limit_is_heeded(run, mosquitto):
    async def scenario():
        port = free_port()
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
