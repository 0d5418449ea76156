"""Brokers that drop large messages without a word: packets become smaller, or one error says what to do."""

from __future__ import annotations

import asyncio
import logging

import pytest
from waiting import turns, until

from gossamer.gossip.transport import MqttOptions, MqttTransport, TransportError
from gossamer.gossip.transport.packet_limit import CUTS, LAST_CUTS, PacketLimit
from gossamer.peer import Broker, BrokerSettings

INBOX, CARD, ECHO = "x/inbox/v", "x/peer/a/card", "x/inbox/@echo"
LIMIT = 20_000


DROPPING = BrokerSettings(mosquitto_options=(f"message_size_limit {LIMIT}",))


def options(version: str) -> MqttOptions:
    return MqttOptions(version=version, first_delay=0.01, longest_delay=0.05)  # type: ignore[arg-type]


async def push(transport: MqttTransport, size: int) -> None:
    while True:
        await transport.publish(INBOX, bytes(min(size, transport.max_payload(INBOX))))
        await turns(20)


# --- with mosquitto ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_chunks_shrink_until_they_are_not_dropped(run, mosquitto, caplog, version):
    caplog.set_level(logging.WARNING)

    async def scenario():
        async with (
            Broker(DROPPING, kind="mosquitto") as broker,
            MqttTransport(broker.url, "a", options=options(version), echo=ECHO) as a,
        ):
            await a.subscribe("x/inbox/+")
            pushing = asyncio.create_task(push(a, 300_000))
            arrived = await anext(a.messages())
            await until(lambda: a.packet_limit.proven > LIMIT / 2)
            pushing.cancel()
            assert LIMIT / 2 - 1000 < len(arrived.payload) <= LIMIT
            assert a.counters["packets-halved"] == 4  # 300, 150, 75, 37.5, 18.75 thousand
            assert a.counters["reconnects"] == 0
            return broker.url

    url = run(scenario())
    told = [
        r.getMessage() for r in caplog.records if r.name == "gossamer.gossip.transport.packet_limit"
    ]
    assert len(told) == 1
    assert told[0].startswith(f"{url} drops packets of 300")
    assert "(mosquitto: message_size_limit)" in told[0]


@pytest.mark.parametrize("version", ["3.1.1", "5"])
def test_a_card_that_is_dropped_ends_in_one_error(run, mosquitto, version):
    async def scenario():
        async with (
            Broker(DROPPING, kind="mosquitto") as broker,
            MqttTransport(broker.url, "a", options=options(version), echo=ECHO) as a,
        ):
            await a.subscribe("x/inbox/+")

            async def introduce() -> None:
                await a.publish(CARD, bytes(LIMIT + 1000), retain=True)
                await anext(a.messages())

            with pytest.raises(TransportError, match="message_size_limit") as error:
                await introduce()
            assert error.value.cause == "too-large"
            assert a.counters["reconnects"] == 0

    run(scenario())


@pytest.mark.parametrize("kind", ["mosquitto", "nats"])
def test_what_comes_back_is_not_tried_again(run, mosquitto, kind):
    async def scenario():
        async with (
            Broker(kind=kind) as broker,
            MqttTransport(broker.url, "a", options=options("3.1.1"), echo=ECHO) as a,
            MqttTransport(broker.url, "b", options=options("3.1.1")) as b,
        ):
            await a.subscribe("x/inbox/+")
            await b.subscribe("x/inbox/+")
            whole = a.max_payload(INBOX)
            for _ in range(3):
                assert await a.publish(INBOX, bytes(100_000))
            await until(lambda: a.packet_limit.proven > 100_000)
            assert await a.publish(INBOX, bytes(100_010))
            assert await a.publish("x/inbox/end", b"")
            sizes = {}
            async for topic, payload, _ in b.messages():
                sizes.setdefault(topic, []).append(len(payload))
                if topic == "x/inbox/end":
                    break
            assert sizes[INBOX] == [100_000] * 3 + [100_010]
            assert sum(size > 1 for size in sizes[ECHO]) == 1
            assert a.max_payload(INBOX) == whole

    run(scenario())


# --- counting ----------------------------------------------------------------------------------------


class Forgetful:
    """A link that brings back what is no larger than its limit, and the rest when it feels like it."""

    patience = 5.0

    def __init__(self, limit: PacketLimit, most: int, lost: int = 0) -> None:
        self._limit, self._most, self.lost, self.tried = limit, most, lost, 0

    async def publish(self, topic: str, payload: bytes, qos: int, retain: bool) -> bool:
        if len(payload) > 1:
            self.tried += 1
            if len(payload) > self._most or self.tried <= self.lost:
                return True
        self._limit.heard(len(payload))
        return True


def tried(run, link: Forgetful, limit: PacketLimit, size: int, *, whole: bool) -> None:
    async def scenario():
        limit.connected(None)
        limit.sending(size, whole=whole)
        asking = asyncio.ensure_future(limit.ask(link, ECHO, lambda _: True))  # type: ignore[arg-type]
        done = asyncio.ensure_future(until(lambda: limit.proven >= size or limit.size < 1 << 20))
        await asyncio.wait((asking, done), return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        asking.cancel()
        if asking.done():
            asking.result()

    run(scenario())


def test_a_packet_that_is_lost_now_and_then_is_not_blamed(run):
    limit = PacketLimit("mqtt://broker", 1 << 20)
    link = Forgetful(limit, 1 << 20, lost=CUTS - 1)
    tried(run, link, limit, 100_000, whole=False)
    assert limit.size == 1 << 20
    assert link.tried == CUTS


def test_packets_that_never_come_back_are_halved(run):
    limit = PacketLimit("mqtt://broker", 1 << 20)
    link = Forgetful(limit, 50_000)
    tried(run, link, limit, 100_000, whole=False)
    assert limit.size == 50_000
    assert link.tried == CUTS


@pytest.mark.parametrize(("size", "whole"), [(100_000, True), (400, False)])
def test_what_cannot_be_smaller_is_one_error(run, size, whole):
    limit = PacketLimit("mqtt://broker", 1 << 20)
    link = Forgetful(limit, 300)
    with pytest.raises(TransportError, match=f"{size} bytes .*cannot be cut smaller"):
        tried(run, link, limit, size, whole=whole)
    assert link.tried == LAST_CUTS
    assert limit.size == 1 << 20


def test_what_came_back_from_one_broker_is_tried_anew_with_the_next():
    """It was restarted with a lower limit, say, and names none."""
    limit = PacketLimit("broker", 1 << 20)
    limit.connected(None)
    limit.proven = 1 << 20
    limit.connected(None)
    limit.sending(300_000, whole=False)
    assert limit._unsure.is_set()
