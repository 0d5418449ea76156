"""The event loop in virtual time: what asyncio builds on it must work, and every seed gives one order."""

from __future__ import annotations

import asyncio
import contextvars
import random

import pytest

from .loop import OWNER, Deadlock, Livelock, SimLoop


def run(main, seed=0):
    loop = SimLoop(random.Random(seed))
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def test_time_jumps_to_the_next_timer():
    async def main():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3600)
        assert loop.time() == 3600
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 5)
        return loop.time()

    assert run(main()) == 3610


def test_primitives_of_asyncio_work():
    async def main():
        done, condition, lock = [], asyncio.Condition(), asyncio.Lock()

        async def wait():
            async with condition:
                await condition.wait()
            done.append("woken")

        async def locked(number):
            async with lock:
                await asyncio.sleep(1)
                done.append(number)

        async with asyncio.TaskGroup() as group:
            group.create_task(wait())
            for number in range(3):
                group.create_task(locked(number))
            await asyncio.sleep(0.5)
            async with condition:
                condition.notify_all()
        assert await asyncio.to_thread(lambda: 7) == 7
        return done

    done = run(main())
    assert done[0] == "woken"
    assert sorted(done[1:]) == [0, 1, 2]


def test_a_failing_task_cancels_its_group():
    cleaned = []

    async def forever():
        try:
            await asyncio.sleep(1e9)
        finally:
            cleaned.append(True)

    async def fail():
        await asyncio.sleep(1)
        raise ValueError("broken")

    async def main():
        async with asyncio.TaskGroup() as group:
            group.create_task(forever())
            group.create_task(fail())

    with pytest.raises(ExceptionGroup):
        run(main())
    assert cleaned == [True]


def order(seed):
    async def main():
        seen = []

        async def step(number):
            await asyncio.sleep(0)
            seen.append(number)

        await asyncio.gather(*(step(number) for number in range(6)))
        return tuple(seen)

    return run(main(), seed)


def test_a_seed_gives_one_order_and_seeds_differ():
    assert order(3) == order(3)
    assert len({order(seed) for seed in range(20)}) > 10


def test_callbacks_of_a_held_owner_wait():
    async def main():
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        context.run(OWNER.set, "device")
        ticks = []

        async def tick():
            while len(ticks) < 5:
                await asyncio.sleep(1)
                ticks.append(loop.time())

        task = loop.create_task(tick(), context=context)
        await asyncio.sleep(1.5)
        loop.hold("device")
        await asyncio.sleep(10)
        loop.release("device")
        await task
        return ticks

    assert run(main()) == [1, 11.5, 12.5, 13.5, 14.5]


def test_deadlock_and_livelock_are_errors():
    async def stuck():
        await asyncio.Event().wait()

    async def busy():
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="nothing is ready at time 0"):
        run(stuck())
    with pytest.raises(Livelock, match="callbacks at time 0"):
        run(busy())
