"""One contract, every transport: what the rest of the program may rely on."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from waiting import until

from gossamer.gossip import Chunker, Reassembler
from gossamer.gossip.transport import Connection, TransportError, Will

_fresh = itertools.count()


@pytest.fixture
def base() -> str:
    """A place in the topic tree of this test's own: brokers are shared, and retain."""
    return f"contract/{next(_fresh)}"


async def take(transport: Any, count: int) -> list[tuple[str, bytes, bool]]:
    messages = transport.messages()
    return [tuple(await anext(messages)) for _ in range(count)]


async def counted(transport: Any, name: str, count: int) -> None:
    await until(lambda: transport.counters[name] >= count, f"{count} times {name}")


def test_publish_reaches_subscribers_in_order(rig, run, base):
    async def scenario():
        async with rig.client("a") as a, rig.client("b") as b:
            await b.subscribe(f"{base}/inbox/v")
            for number in range(50):
                assert await a.publish(f"{base}/inbox/v", b"%d" % number)
            got = await take(b, 50)
        assert got == [(f"{base}/inbox/v", b"%d" % number, False) for number in range(50)]

    run(scenario())


def test_retained_message_waits_for_late_subscribers_and_can_be_cleared(rig, run, base):
    async def scenario():
        async with rig.client("a") as a:
            await a.publish(f"{base}/a/card", b"old", retain=True)
            await a.publish(f"{base}/a/card", b"new", retain=True)
            await a.publish(f"{base}/b/card", b"gone", retain=True)
            await a.publish(f"{base}/b/card", b"", retain=True)
            await a.publish(f"{base}/c/card", b"not kept")
            async with rig.client("late") as late:
                await late.subscribe(f"{base}/+/card")
                await a.publish(f"{base}/end/card", b"end")
                got = await take(late, 2)
        assert got == [(f"{base}/a/card", b"new", True), (f"{base}/end/card", b"end", False)]

    run(scenario())


def test_state_that_is_published_while_others_subscribe_reaches_them(rig, run, base):
    """Every client hears every card, whether it was retained before the client came or not."""
    names = [f"{base}/{number}/card" for number in range(20)]

    async def one(client: Any, name: str, start: asyncio.Event) -> None:
        async with client:
            await start.wait()
            await client.subscribe(f"{base}/+/card")
            await client.publish(name, b"here", retain=True)
            missing = set(names)
            async for topic, _, _ in client.messages():
                missing.discard(topic)
                if not missing:
                    return

    async def scenario():
        start = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number, name in enumerate(names):
                group.create_task(one(rig.client(f"crowd-{number}"), name, start))
            start.set()

    run(scenario())


def test_wildcards_select(rig, run, base):
    async def scenario():
        async with rig.client("a") as a, rig.client("one") as one, rig.client("all") as everything:
            await one.subscribe(f"{base}/+/inbox/+")
            await everything.subscribe(f"{base}/#")
            for tail in ("p/inbox/v", "p/metrics", "q/inbox/w", "q/inbox/w/deeper", "r/inbox/end"):
                await a.publish(f"{base}/{tail}", tail.encode())
            few = [payload for _, payload, _ in await take(one, 3)]
            many = [payload for _, payload, _ in await take(everything, 5)]
        assert few == [b"p/inbox/v", b"q/inbox/w", b"r/inbox/end"]
        assert len(set(many)) == 5

    run(scenario())


def test_will_is_published_after_abrupt_death_only(rig, run, base):
    async def scenario():
        async with rig.client("watch") as watch:
            await watch.subscribe(f"{base}/+/status")
            polite = rig.client("polite", will=Will(f"{base}/polite/status", b"dead"))
            async with polite:
                await polite.publish(f"{base}/polite/status", b"alive", retain=True)
                # Heard first: brokers may reorder what is said at different QoS.
                got = await take(watch, 1)
            abrupt = rig.client("abrupt", will=Will(f"{base}/abrupt/status", b"dead"))
            async with abrupt:
                await abrupt.publish(f"{base}/abrupt/status", b"alive", retain=True)
                got += await take(watch, 1)
                await abrupt.abort()
            got += await take(watch, 1)
            async with rig.client("late") as late:
                await late.subscribe(f"{base}/abrupt/status")
                kept = await take(late, 1)
        assert [payload for _, payload, _ in got] == [b"alive", b"alive", b"dead"]
        assert kept == [(f"{base}/abrupt/status", b"dead", True)]

    run(scenario())


def test_two_megabytes_arrive_whole(rig, run, base):
    async def scenario():
        payload = bytes(range(256)) * 8192
        async with rig.client("a") as a, rig.client("b") as b:
            await b.subscribe(f"{base}/inbox/v")
            assert await a.publish(f"{base}/inbox/v", payload)
            for chunk in Chunker("a").split([payload]):
                assert await a.publish(f"{base}/inbox/v", chunk)
            whole = await take(b, 1)
            assert whole[0][1] == payload
            reassembler = Reassembler()
            parts = [reassembler.add(part) for _, part, _ in await take(b, 3)]
            assert parts[:2] == [None, None]
            assert bytes(parts[2]) == payload

    run(scenario())


def test_subscriptions_and_birth_return_after_broker_restart(rig, run, base):
    async def scenario():
        births = 0
        states: list[Connection] = []
        again = asyncio.Event()

        async def birth() -> None:
            nonlocal births
            births += 1
            await b.publish(f"{base}/b/status", b"born %d" % births, retain=True)
            if births == 2:
                again.set()

        b = rig.client("b", on_connect=birth, on_state=states.append)
        async with rig.client("a") as a, b:
            await b.subscribe(f"{base}/inbox/v")
            await rig.restart()
            await again.wait()
            # QoS 1: waits for a's own return, then the broker acknowledges it.
            assert await a.publish(f"{base}/inbox/v", b"after", qos=1)
            assert (await take(b, 1))[0][1] == b"after"
            await a.subscribe(f"{base}/b/status")
            assert await take(a, 1) == [(f"{base}/b/status", b"born 2", True)]
        names = [state.state for state in states]
        assert names[:3] == ["connecting", "connected", "lost"]
        assert names[-1] == "closed"
        assert states[2].cause

    run(scenario())


def test_full_inbox_drops_gossip_and_counts_it_but_keeps_state(rig, run, base):
    async def scenario():
        async with rig.client("a") as a, rig.client("b", max_inbound_messages=4) as b:
            await b.subscribe(f"{base}/#")
            for number in range(20):
                await a.publish(f"{base}/inbox/v", b"%d" % number, qos=1)
            for peer in range(6):
                await a.publish(f"{base}/{peer}/status", b"old")
                await a.publish(f"{base}/{peer}/status", b"new")
            await counted(b, "inbound-full", 16)
            await counted(b, "inbound-superseded", 6)
            got = await take(b, 10)
        assert [payload for _, payload, _ in got] == [b"0", b"1", b"2", b"3"] + [b"new"] * 6
        assert b.counters["inbound-full"] == 16

    run(scenario())


def test_inbox_is_bounded_in_bytes(rig, run, base):
    async def scenario():
        async with rig.client("a") as a, rig.client("b", max_inbound_bytes=2500) as b:
            await b.subscribe(f"{base}/#")
            for _ in range(5):
                await a.publish(f"{base}/inbox/v", bytes(1000), qos=1)
            await counted(b, "inbound-full", 3)
            assert len(await take(b, 2)) == 2

    run(scenario())


def test_too_large_is_refused_before_it_is_sent(rig, run, base):
    async def scenario():
        async with rig.client("a") as a:
            topic = f"{base}/inbox/v"
            with pytest.raises(TransportError) as error:
                await a.publish(topic, bytes(a.max_payload(topic) + 1))
            assert error.value.cause == "too-large"
            assert a.connection.state == "connected"

    run(scenario())


def test_closed_transport_says_so_and_ends_its_messages(rig, run, base):
    async def scenario():
        async with rig.client("a") as a:
            await a.subscribe(f"{base}/#")
        assert [message async for message in a.messages()] == []
        with pytest.raises(TransportError) as error:
            await a.publish(f"{base}/inbox/v", b"x")
        assert error.value.cause == "closed"

    run(scenario())
