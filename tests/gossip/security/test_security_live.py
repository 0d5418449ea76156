"""On a real mosquitto, with an outsider that reads everything and publishes what it likes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from security_kit import SWARM, group, received

from gossamer.gossip import Give, decode, topics
from gossamer.gossip.transport import MqttTransport

MODEL = "global"


async def listen(transport, count):
    """The next `count` payloads."""
    found = []
    async for _, payload, _ in transport.messages():
        found.append(payload)
        if len(found) == count:
            break
    return found


def test_an_outsider_on_the_broker_gets_nowhere(mosquitto, run):
    (anna, ben), _ = group("anna", "ben")
    give = anna.give(ben, size=20_000)
    chunks = anna.chunks(give, limit=16_384)
    inbox = topics.inbox(SWARM, ben.name, MODEL)

    async def scenario():
        async with (
            MqttTransport(mosquitto.url, "anna") as sender,
            MqttTransport(mosquitto.url, "ben") as receiver,
            MqttTransport(mosquitto.url, "outsider") as outsider,
        ):
            await receiver.subscribe(inbox)
            # Not what else is retained on a broker that other tests use too.
            await outsider.subscribe(topics.of_all(SWARM, "inbox"))
            sealed = [anna.security.seal(ben.name, MODEL, chunk) for chunk in chunks]
            for packet in sealed:
                await sender.publish(inbox, packet)
            async with asyncio.timeout(240):
                mine, captured = await asyncio.gather(
                    listen(receiver, len(sealed)), listen(outsider, len(sealed))
                )
            # It reads: nothing.
            raw = give.value.tobytes()
            everything = b"".join(captured)
            assert sorted(captured) == sorted(sealed)
            assert not any(raw[at : at + 8] in everything for at in range(0, len(raw), 8))
            # The true one arrives.
            (whole,) = received(ben, mine)
            np.testing.assert_array_equal(decode(whole).message.value, give.value)
            # It replays, injects, changes, impersonates and reorders: nothing.
            forged = replace(give, sequence=2, value=np.zeros(8, np.float32))
            attempts = [
                *captured,
                *anna.chunks(forged),
                captured[0][:-1] + bytes([captured[0][-1] ^ 1]),
                captured[0][:32] + captured[1][32:],
                captured[1][:16] + captured[0][16:24] + captured[1][24:],
            ]
            for packet in attempts:
                await outsider.publish(inbox, packet)
            async with asyncio.timeout(240):
                assert received(ben, await listen(receiver, len(attempts))) == []
            return len(attempts)

    attempts = run(scenario())
    assert sum(ben.security.counters.values()) == attempts
    assert ben.security.counters["untrusted-replayed"] >= len(chunks)
    assert isinstance(
        decode(b"".join(c[40:] for c in chunks)).message, Give
    )  # unsealed, it would be read
