"""The inbox hands out what waits in stretches: many messages in one turn of the loop, but not all."""

from __future__ import annotations

import asyncio
from collections import Counter

from gossamer.gossip import topics
from gossamer.gossip.transport import YIELD_INTERVAL, Inbox, Received

COUNT = 2000


def turns_while_reading(run, interval: float) -> int:
    """Turns that another task of the loop gets while a full inbox is read."""

    async def scenario() -> int:
        inbox = Inbox(Counter(), COUNT, yield_interval=interval)
        topic = topics.inbox("nest", "a", "global")
        for number in range(COUNT):
            assert inbox.offer(Received(topic, number.to_bytes(4, "big"), False))
        inbox.close()
        turns, reading = -1, True

        def other() -> None:
            nonlocal turns
            turns += 1
            if reading:
                asyncio.get_running_loop().call_soon(other)

        other()
        read = [int.from_bytes(message.payload, "big") async for message in inbox.messages()]
        reading = False
        assert read == list(range(COUNT))
        assert inbox.held_bytes == 0
        return turns

    return run(scenario())


def test_a_turn_of_the_loop_hands_out_many(run) -> None:
    assert turns_while_reading(run, 1e9) == 0


def test_a_full_inbox_does_not_starve_the_others(run) -> None:
    assert turns_while_reading(run, 0.0) >= COUNT - 1


def test_stretches_are_short_but_longer_than_a_message() -> None:
    assert 1e-3 <= YIELD_INTERVAL <= 20e-3
