"""The worker thread of a peer: functions one after the other, short ones on the event loop if it is idle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from gossamer.peer.machine import Worker


def test_short_functions_run_on_the_event_loop_if_the_thread_is_idle(run: Callable[[Any], Any]):
    async def scene() -> None:
        async with Worker("anna") as worker:
            assert await worker.run_short(threading.get_ident) == threading.get_ident()
            assert await worker.run(threading.get_ident) != threading.get_ident()
            assert await worker.run_short(threading.get_ident) == threading.get_ident()

    run(scene())


def test_short_functions_wait_for_a_function_that_nobody_awaits_any_more(run: Callable[[Any], Any]):
    begun, may_end, order = threading.Event(), threading.Event(), list[str]()

    def long() -> None:
        begun.set()
        assert may_end.wait(60)
        order.append("long")

    async def scene() -> None:
        async with Worker("anna") as worker:
            first = asyncio.create_task(worker.run(long))
            queued = asyncio.create_task(worker.run(order.append, "never"))
            await asyncio.to_thread(begun.wait, 60)
            for task in (queued, first):
                task.cancel()
            await asyncio.gather(first, queued, return_exceptions=True)
            short = asyncio.create_task(worker.run_short(order.append, "short"))
            await asyncio.sleep(0)
            assert not short.done()
            may_end.set()
            await short

    run(scene())
    assert order == ["long", "short"]
