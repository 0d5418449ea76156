"""The inbox yields many messages per iteration of the event loop, but lets other tasks run in between."""

from __future__ import annotations

import asyncio
from collections import Counter

from gossamer.gossip import topics
from gossamer.gossip.transport import YIELD_INTERVAL, Inbox, Received

COUNT = 2000


def callbacks_while_reading(run, interval: float) -> int:
    """Return how often another callback of the event loop runs while a full inbox is read."""

    async def scenario() -> int:
        inbox = Inbox(Counter(), COUNT, yield_interval=interval)
        topic = topics.inbox("nest", "a", "global")
        for number in range(COUNT):
            assert inbox.offer(Received(topic, number.to_bytes(4, "big"), False))
        inbox.close()
        callbacks, reading = -1, True

        def other() -> None:
            nonlocal callbacks
            callbacks += 1
            if reading:
                asyncio.get_running_loop().call_soon(other)

        other()
        read = [int.from_bytes(message.payload, "big") async for message in inbox.messages()]
        reading = False
        assert read == list(range(COUNT))
        assert inbox.held_bytes == 0
        return callbacks

    return run(scenario())


def test_many_messages_are_read_in_one_iteration_of_the_loop(run) -> None:
    assert callbacks_while_reading(run, 1e9) == 0


def test_a_full_inbox_does_not_starve_other_tasks(run) -> None:
    assert callbacks_while_reading(run, 0.0) >= COUNT - 1


def test_the_yield_interval_is_short_but_longer_than_a_message_takes() -> None:
    assert 1e-3 <= YIELD_INTERVAL <= 20e-3
