"""Brokers that answer only some packets: a transport detects this, and connects again."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Self

import pytest
from proxy import read_packet
from waiting import until

from gossamer.gossip import MqttOptions, MqttTransport

ECHO = "deaf/a/inbox/@echo"
# Patient by itself, so that a slow machine is not taken for a bad broker; each test shortens one wait.
QUICK = MqttOptions(first_delay=0.01, longest_delay=0.05, keepalive=3600, connect_timeout=200.0)
CONNECT, PUBLISH, SUBSCRIBE, PING, DISCONNECT = 1, 3, 8, 12, 14


class HalfBroker:
    """Speaks just enough MQTT; each connection in turn leaves out what `faults` says.

    no-delivery: acknowledges every message and delivers none. no-suback, no-puback: does not send these
    answers. good: delivers every message to its sender.
    """

    def __init__(self, *faults: str) -> None:
        self.faults = list(faults)
        self.connections = 0
        self.published: list[tuple[str, str]] = []
        """The fault and topic of every message that came."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"mqtt://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = self.faults[min(self.connections, len(self.faults) - 1)]
        self.connections += 1
        try:
            while True:
                packet = await read_packet(reader)
                kind = packet[0] >> 4
                if kind == CONNECT:
                    writer.write(b"\x20\x02\x00\x00")
                elif kind == PING:
                    writer.write(b"\xd0\x00")
                elif kind == SUBSCRIBE and fault != "no-suback":
                    writer.write(b"\x90\x03" + packet[2:4] + b"\x01")
                elif kind == PUBLISH:
                    self._take(packet, writer, fault)
                elif kind == DISCONNECT:
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        writer.close()

    def _take(self, packet: bytes, writer: asyncio.StreamWriter, fault: str) -> None:
        size = int.from_bytes(packet[2:4], "big")
        topic = packet[4 : 4 + size].decode()
        self.published.append((fault, topic))
        if fault != "no-puback" and packet[0] & 0b0110:
            writer.write(b"\x40\x02" + packet[4 + size : 6 + size])
        if fault == "good":
            writer.write(packet)


def listener(broker: HalfBroker) -> MqttTransport:
    """Return a transport that publishes to its echo topic and tests whether the broker delivers that."""
    return MqttTransport(broker.url, "a", options=QUICK, echo=ECHO, echo_timeout=0.3)


def test_a_transport_that_receives_no_echo_connects_again(run, caplog):
    caplog.set_level(logging.INFO)

    async def scenario():
        async with (
            HalfBroker("no-delivery", "good") as broker,
            listener(broker) as a,
        ):
            await a.subscribe("deaf/a/inbox/+")
            began = a.connection.since
            await until(lambda: ("good", ECHO) in broker.published)
            assert ("no-delivery", ECHO) in broker.published
            assert a.connection.since > began  # another connection
            assert a.counters["no-delivery"] == 1
            assert a.counters["reconnects"] == 1

    run(scenario())
    assert "delivers none, not even our own; trying again" in caplog.text


def test_a_transport_that_receives_its_echo_stays_and_does_not_pass_it_on(run):
    async def scenario():
        async with (
            HalfBroker("good") as broker,
            listener(broker) as a,
        ):
            await a.subscribe("deaf/a/inbox/+")
            await until(lambda: broker.published.count(("good", ECHO)) >= 4)
            await a.publish("deaf/a/inbox/model", b"news")
            assert (await anext(a.messages())).payload == b"news"
            assert a.counters["no-delivery"] == 0
            assert broker.connections == 1

    run(scenario())


def test_an_echo_that_nobody_subscribed_to_is_not_waited_for(run):
    """A second transport, opened later, which did subscribe, has failed the test by then."""

    async def scenario():
        async with (
            HalfBroker("no-delivery") as broker,
            listener(broker) as a,
            HalfBroker("no-delivery") as control,
            listener(control) as b,
        ):
            await b.subscribe("deaf/a/inbox/+")
            await until(lambda: b.counters["no-delivery"] == 1)
            assert broker.connections == 1
            assert broker.published == []
            assert a.connection.state == "connected"

    run(scenario())


def test_a_subscription_without_an_answer_starts_over(run, caplog):
    caplog.set_level(logging.INFO)

    async def scenario():
        async with (
            HalfBroker("no-suback", "good") as broker,
            MqttTransport(broker.url, "a", options=QUICK) as a,
        ):
            a._broker_connection._client.timeout = 0.2  # of this connection alone
            await a.subscribe("deaf/#")
            await a.publish("deaf/status", b"state")
            await until(lambda: broker.connections == 2)
            await a.publish("deaf/inbox", b"again")
            messages = a.messages()
            assert {(await anext(messages)).topic} <= {"deaf/status", "deaf/inbox"}

    run(scenario())
    assert "did not answer a subscription" in caplog.text


def test_a_message_without_an_acknowledgement_is_said_again(run, caplog):
    caplog.set_level(logging.INFO)

    async def scenario():
        async with (
            HalfBroker("no-puback", "good") as broker,
            MqttTransport(broker.url, "a", options=QUICK) as a,
        ):
            a._broker_connection.answer_timeout = 0.2  # of this connection alone
            assert await a.publish("deaf/status", b"state")
            assert [topic for _, topic in broker.published] == ["deaf/status"] * 2
            assert a.counters["outbound-lost"] == 1

    run(scenario())
    assert "did not acknowledge a message" in caplog.text


@pytest.mark.parametrize("fault", ["no-puback", "no-suback"])
def test_closing_waits_for_no_answer(run, fault):
    """With a keepalive of an hour only the closing itself can end what waits."""
    patient = MqttOptions(keepalive=3600, connect_timeout=3600.0)

    async def scenario():
        async with HalfBroker("good", fault) as broker:
            started = asyncio.Event()

            async def birth() -> None:
                if broker.connections == 2:
                    started.set()
                    await a.publish("deaf/status", b"born")

            a = MqttTransport(broker.url, "a", options=patient, on_connect=birth)
            async with a:
                await a.subscribe("deaf/inbox")
                assert a._broker_connection is not None
                a._broker_connection.hang_up()
                await until(lambda: broker.connections == 2)
                if fault == "no-puback":
                    await started.wait()
            assert a.connection.state == "closed"

    run(scenario())
