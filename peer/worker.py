"""The one thread that owns a peer's values.

Training, averaging, encoding and checkpoints all touch the network; the event loop touches none of
them. Jobs run one after the other in the order in which they were given, so that no lock is needed and
gossip falls between two rounds of training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Worker(Protocol):
    """`await worker.run(function, …)` runs a function on the peer's own thread; an async context."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` after everything that was asked for before it."""
        ...


class ThreadWorker:
    """A worker that is a real thread."""

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"peer-{name}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # A round of training may still run, and other peers share this event loop.
        await asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See Worker."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))
