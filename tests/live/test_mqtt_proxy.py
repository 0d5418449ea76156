"""The proxy itself, and the transport behind it."""

from __future__ import annotations

import asyncio

import pytest
from proxy import FaultyProxy, read_packet
from waiting import until

from gossamer.gossip import MqttOptions, MqttTransport, Will

QUICK = MqttOptions(first_delay=0.02, longest_delay=0.2)


async def sent_through(broker, **faults) -> tuple[list[int], FaultyProxy]:
    async with (
        FaultyProxy(broker.port, seed=3, **faults) as proxy,
        MqttTransport(proxy.url, "a", options=QUICK) as a,
        MqttTransport(broker.url, "b", options=QUICK) as b,
    ):
        await b.subscribe("proxied/#")
        for number in range(200):
            await a.publish("proxied/inbox", b"%d" % number)
        await a.publish("proxied/status", b"-1")
        got = []
        async for _, payload, _ in b.messages():
            if payload == b"-1":
                break
            got.append(int(payload))
    return got, proxy


def test_honest_proxy_passes_everything(run, mosquitto):
    got, proxy = run(sent_through(mosquitto))
    assert got == list(range(200))
    assert proxy.counters["gossip"] == 200


def test_gossip_is_dropped_and_duplicated_as_asked_and_state_is_not(run, mosquitto):
    got, proxy = run(sent_through(mosquitto, drop=0.2, duplicate=0.2))
    assert 10 < proxy.counters["drop"] < 80
    assert 10 < proxy.counters["duplicate"] < 80
    assert len(got) == 200 - proxy.counters["drop"] + proxy.counters["duplicate"]
    assert got == sorted(got)
    again, _ = run(sent_through(mosquitto, drop=0.2, duplicate=0.2))
    assert again == got


def test_cut_connection_publishes_the_will_and_comes_back_subscribed(run, mosquitto):
    async def scenario():
        back = asyncio.Event()
        births = 0

        async def birth() -> None:
            nonlocal births
            births += 1
            await a.publish("cut/a/status", b"alive %d" % births)
            if births == 2:
                back.set()

        async with FaultyProxy(mosquitto.port) as proxy:
            a = MqttTransport(
                proxy.url, "a", will=Will("cut/a/status", b"dead"), options=QUICK, on_connect=birth
            )
            async with MqttTransport(mosquitto.url, "b", options=QUICK) as b:
                await b.subscribe("cut/+/status")
                async with a:
                    await a.subscribe("cut/inbox")
                    proxy.cut()
                    await back.wait()
                    await b.publish("cut/inbox", b"still here?")
                    assert (await anext(a.messages())).payload == b"still here?"
                    assert a.counters["reconnects"] == 1
            said = [payload async for _, payload, _ in b.messages()]
        assert said[0] == b"alive 1"
        assert sorted(said[1:]) == [b"alive 2", b"dead"]
        await a.abort()

    run(scenario())


def test_offline_gossip_is_dropped_and_counted_and_state_waits(run, mosquitto):
    async def scenario():
        async with (
            FaultyProxy(mosquitto.port) as proxy,
            MqttTransport(mosquitto.url, "b", options=QUICK) as b,
        ):
            await b.subscribe("offline/#")
            lost = asyncio.Event()
            a = MqttTransport(
                proxy.url,
                "a",
                options=QUICK,
                on_state=lambda connection: lost.set() if connection.state == "lost" else None,
            )
            async with a:
                proxy.cut()
                await lost.wait()
                assert not await a.publish("offline/inbox", b"gossip")
                assert a.counters["outbound-offline"] == 1
                assert await a.publish("offline/status", b"state")
                assert (await anext(b.messages())).payload == b"state"

    run(scenario())


def test_paused_link_bounds_what_waits_to_be_sent(run, mosquitto):
    async def scenario():
        options = MqttOptions(max_outbound_bytes=40_000_000)
        async with (
            FaultyProxy(mosquitto.port) as proxy,
            MqttTransport(proxy.url, "a", options=options) as a,
        ):
            proxy.pause()
            payload = bytes(8_000_000)
            sends = [asyncio.create_task(a.publish("big/inbox", payload)) for _ in range(8)]
            await until(lambda: a.counters["outbound-full"] == 3)
            assert sum(not task.done() for task in sends) <= 5
            proxy.resume()
            results = [await task for task in sends]
            assert results.count(True) == 5
            assert results.count(False) == 3

    run(scenario())


@pytest.mark.parametrize("size", [0, 1, 127, 128, 20_000, 3_000_000])
def test_packets_are_cut_where_mqtt_says(run, size):
    async def scenario():
        length, left = bytearray(), size
        while True:
            left, low = divmod(left, 128)
            length.append(low | (0x80 if left else 0))
            if not left:
                break
        packet = b"\x30" + bytes(length) + bytes(size)
        reader = asyncio.StreamReader()
        reader.feed_data(packet + b"\xe0\x00")
        assert await read_packet(reader) == packet
        assert await read_packet(reader) == b"\xe0\x00"

    run(scenario())
