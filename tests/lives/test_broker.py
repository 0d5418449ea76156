"""The simulated broker keeps the promises of MQTT that peers rely on."""

from __future__ import annotations

import asyncio
import random

import pytest

from gossamer.gossip import TransportError, Will

from .broker import Network, SimBroker, SimTransport
from .loop import SimLoop
from .world import Device, Process

STATUS = "gossamer/v1/lives/peer/{}/status"
INBOX = "gossamer/v1/lives/peer/ann/inbox/global"
EVERYBODY = "gossamer/v1/lives/peer/+/status"


class Bench:
    """A broker, and clients on devices of their own."""

    def __init__(self, network=None, seed=0):
        self.loop = SimLoop(random.Random(seed))
        self.broker = SimBroker(self.loop, random.Random(seed), network)
        self.births = []

    def client(self, name, process=None):
        if process is None:
            process = Process(Device(name, self.loop, random.Random(0)))

        async def birth():
            self.births.append(name)

        return SimTransport(
            self.broker, process, name, Will(STATUS.format(name), b"offline"), birth
        )

    def run(self, main):
        async def bounded():
            async with asyncio.timeout(10_000):
                return await main

        try:
            return self.loop.run_until_complete(bounded())
        finally:
            self.loop.close()


async def read(transport, count):
    """Return the next payloads."""
    seen = []
    async for message in transport.messages():
        seen.append(bytes(message.payload))
        if len(seen) == count:
            return seen
    return seen


def test_messages_keep_their_order_and_retained_ones_wait_for_subscribers():
    bench = Bench(Network(delay=(0.0, 1.0)))

    async def main():
        async with bench.client("ann") as ann, bench.client("ben") as ben:
            await ann.publish(STATUS.format("ann"), b"online", retain=True)
            await ben.subscribe(EVERYBODY)
            assert await read(ben, 1) == [b"online"]
            await ann.subscribe(INBOX)
            await asyncio.sleep(5)
            for number in range(50):
                await ben.publish(INBOX, bytes([number]))
            return await read(ann, 50)

    assert bench.run(main()) == [bytes([number]) for number in range(50)]


def test_qos_0_is_lost_and_doubled_and_status_is_not():
    bench = Bench(Network(drop=0.5, duplicate=0.5))

    async def main():
        async with bench.client("ann") as ann, bench.client("ben") as ben:
            await ann.subscribe(INBOX)
            await ann.subscribe(EVERYBODY)
            await asyncio.sleep(1)
            for number in range(100):
                await ben.publish(INBOX, b"gossip")
                await ben.publish(STATUS.format("ben"), str(number).encode())
            await asyncio.sleep(10)
            await ann.__aexit__()
            return [payload async for _, payload, _ in ann.messages()]

    seen = bench.run(main())
    assert [p for p in seen if p != b"gossip"] == [str(number).encode() for number in range(100)]
    assert 20 < seen.count(b"gossip") < 130


def test_a_killed_process_says_nothing_more_and_its_will_is_published():
    bench = Bench()

    async def main():
        ann, ben = bench.client("ann"), bench.client("ben")

        async def live():
            async with ann:
                try:
                    await asyncio.sleep(1e6)
                finally:
                    await ann.publish(STATUS.format("ann"), b"left", retain=True)

        ann.process.start(live())
        async with ben:
            await ben.subscribe(EVERYBODY)
            await asyncio.sleep(1)
            ann.process.kill()
            bench.broker.die(ann.process, silently=False)
            return await read(ben, 1), bench.loop.time()

    seen, at = bench.run(main())
    assert seen == [b"offline"]
    assert at < 2
    assert bench.broker.retained == {STATUS.format("ann"): b"offline"}


@pytest.mark.parametrize("how", ["cut", "freeze", "power"])
def test_who_falls_silent_is_missed_after_a_while(how):
    bench = Bench(Network(keepalive=4.0))

    async def main():
        async with bench.client("ann") as ann, bench.client("ben") as ben:
            await ben.subscribe(EVERYBODY)
            await asyncio.sleep(1)
            if how == "cut":
                bench.broker.cut(ann.process.device)
            elif how == "freeze":
                bench.broker.freeze(ann.process)
            else:
                bench.broker.die(ann.process, silently=True)
            seen = await read(ben, 1)
            return seen, bench.loop.time()

    seen, at = bench.run(main())
    assert seen == [b"offline"]
    assert at == pytest.approx(7.0, abs=0.1)


def test_a_short_cut_only_delays():
    bench = Bench(Network(keepalive=20.0))

    async def main():
        async with bench.client("ann") as ann, bench.client("ben") as ben:
            await ann.subscribe(INBOX)
            await asyncio.sleep(1)
            bench.broker.cut(ann.process.device)
            await ben.publish(INBOX, b"gossip")
            await asyncio.sleep(5)
            assert ann.connection.state == "connected"
            bench.broker.heal(ann.process.device)
            return await read(ann, 1), bench.births

    assert bench.run(main()) == ([b"gossip"], ["ann", "ben"])


@pytest.mark.parametrize("forget", [False, True])
def test_clients_return_to_a_broker_that_restarts(forget):
    bench = Bench()

    async def main():
        async with bench.client("ann") as ann:
            await ann.publish(STATUS.format("ann"), b"online", retain=True)
            bench.broker.stop(forget=forget)
            kept = dict(bench.broker.retained)
            await asyncio.sleep(10)
            assert ann.connection.state in ("lost", "connecting")
            assert not await ann.publish(INBOX, b"gossip")  # QoS 0 does not wait
            waiting = asyncio.create_task(ann.publish(STATUS.format("ann"), b"back", retain=True))
            await asyncio.sleep(10)
            assert not waiting.done()
            bench.broker.start()
            assert await waiting
            return kept

    kept = bench.run(main())
    assert kept == ({} if forget else {STATUS.format("ann"): b"online"})
    assert bench.births == ["ann", "ann"]
    assert bench.broker.retained == {STATUS.format("ann"): b"back"}


def test_a_second_client_of_one_id_ends_the_first():
    bench = Bench()

    async def main():
        async with bench.client("ann") as first, bench.client("ann"):
            with pytest.raises(TransportError, match="another client connected as 'ann'"):
                await read(first, 1)

    bench.run(main())


def test_abort_publishes_the_will_and_a_goodbye_does_not():
    bench = Bench()

    async def main():
        async with bench.client("ann") as ann:
            await ann.abort()
        async with bench.client("ben"):
            pass
        await asyncio.sleep(30)

    bench.run(main())
    assert bench.broker.retained == {STATUS.format("ann"): b"offline"}
