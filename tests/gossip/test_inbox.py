"""What transports do with the event loop: an inbox lets other tasks run, and ended tasks log nothing."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import pytest

from gossamer.gossip import topics
from gossamer.gossip.transport import YIELD_INTERVAL, Inbox, Received, end_task

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


@pytest.mark.parametrize("ends", ["with an error", "with an error when cancelled", "cancelled"])
def test_the_error_of_an_ended_task_is_not_logged(ends):
    async def work():
        if ends == "with an error":
            raise ValueError("nobody reads this")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if ends == "cancelled":
                raise
            raise ValueError("nobody reads this") from None

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logged.append(context["message"]))
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        await end_task(task)
        assert task.cancelled() == (ends == "cancelled")
        del task
        gc.collect()

    logged: list[str] = []
    asyncio.run(main())
    assert logged == []
