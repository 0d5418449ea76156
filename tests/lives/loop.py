"""An event loop in virtual time that draws the next ready callback from a seed.

Time stands still while anything is ready, and jumps to the next timer when nothing is. Callbacks have an
owner, taken from the context that they were scheduled in; those of a held owner do not run until it is
released, which is how a frozen process is simulated.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")

OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("OWNER", default="")
"""Whose callbacks these are: the name of a simulated process, or nothing for the world around it."""

MAX_STEPS_AT_ONE_TIME = 100_000


class SimError(Exception):
    """The simulation cannot go on."""


class Deadlock(SimError):
    """Nothing is ready, and no timer will ever make anything so."""


class Livelock(SimError):
    """Callbacks run for ever without time passing."""


class _Call:
    """A callback that is ready, or will be."""

    __slots__ = ("args", "callback", "context", "handle", "owner")

    def __init__(
        self,
        handle: asyncio.Handle,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context,
    ) -> None:
        self.handle, self.callback, self.args, self.context = handle, callback, args, context
        self.owner: str = context.get(OWNER, "")


class _SimFuture(asyncio.Future[Any]):
    """A future that is hashed by a number: the order of a set must not follow from addresses in memory."""

    def __init__(self, number: int, loop: SimLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _SimTask(asyncio.Task[Any]):
    """A task that is hashed by a number, for the same reason."""

    def __init__(self, number: int, coro: Any, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.AbstractEventLoop):
    """A single-threaded event loop without sockets, signals or threads.

    rng: draws the next of the ready callbacks.
    on_step: called with the owner of every callback before it runs.
    """

    def __init__(self, rng: random.Random, on_step: Callable[[str], None] | None = None) -> None:
        self._rng = rng
        self._on_step = on_step
        self._now = 0.0
        self._ready: list[_Call] = []
        self._timers: list[tuple[float, int, _Call]] = []
        self._number = 0
        self._held: dict[str, list[_Call]] = {}
        self._running = False
        self._closed = False
        self.steps = 0
        self.errors: list[dict[str, Any]] = []
        """What was passed to `call_exception_handler`."""

    # --- owners ---------------------------------------------------------------------------------

    def hold(self, owner: str) -> None:
        """Run no callback of this owner until `release`."""
        self._held.setdefault(owner, [])

    def release(self, owner: str) -> None:
        """Let the callbacks of an owner run again, those that became due meanwhile first of all."""
        self._ready += self._held.pop(owner, [])

    # --- scheduling -----------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(_Call(handle, callback, args, context))
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, _Call(handle, callback, args, context)))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """See AbstractEventLoop; a cancelled timer is skipped when its time has come."""

    def create_future(self) -> asyncio.Future[Any]:
        self._number += 1
        return _SimFuture(self._number, self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        self._number += 1
        return _SimTask(self._number, coro, loop=self, name=name, context=context)

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run `func` here and now: there are no threads."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    # --- running --------------------------------------------------------------------------------

    def run_until_complete(self, future: Generator[Any, None, T] | Any) -> T:
        """Run until a future or coroutine is done, and return its result."""
        if self._running:
            raise RuntimeError("this loop is running already")
        asyncio._set_running_loop(self)
        self._running = True
        try:
            task = asyncio.ensure_future(future, loop=self)
            at, steps = self._now, 0
            recent: Counter[str] = Counter()
            while not task.done():
                if self._now != at:
                    at, steps = self._now, 0
                    recent.clear()
                steps += 1
                if steps > MAX_STEPS_AT_ONE_TIME - 1000:
                    recent[self._describe_next()] += 1
                if steps > MAX_STEPS_AT_ONE_TIME:
                    often = "; ".join(what for what, _ in recent.most_common(3))
                    raise Livelock(f"{steps} callbacks at time {at:.3f}, most of them: {often}")
                self._step()
            return task.result()
        finally:
            self._running = False
            asyncio._set_running_loop(None)

    def _step(self) -> None:
        ready = self._ready
        if not ready:
            self._jump()
        index = self._rng.randrange(len(ready)) if len(ready) > 1 else 0
        ready[index], ready[-1] = ready[-1], ready[index]
        call = ready.pop()
        owner = call.owner
        if call.handle.cancelled():
            return
        if owner and owner not in self._held and self._on_step is not None:
            self._on_step(owner)  # which may freeze or kill it
        if owner in self._held:
            self._held[owner].append(call)
        elif not call.handle.cancelled():
            self.steps += 1
            try:
                call.context.run(call.callback, *call.args)
            except Exception as error:
                self.call_exception_handler(
                    {"message": f"callback {call.callback!r} failed", "exception": error}
                )

    def _jump(self) -> None:
        """Move on to the next timer, and make everything ready that is due then."""
        timers = self._timers
        while timers and timers[0][2].handle.cancelled():
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(
                f"nothing is ready at time {self._now:.3f}, and no timer is set"
                + (f"; held: {', '.join(sorted(self._held))}" if self._held else "")
            )
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            call = heapq.heappop(timers)[2]
            if not call.handle.cancelled():
                self._ready.append(call)

    def _describe_next(self) -> str:
        return repr(self._ready[-1].handle) if self._ready else "nothing"

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def stop(self) -> None:
        raise SimError("this loop is stopped by the end of what it runs")

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        self._held.clear()

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        pass

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do: generators that nobody holds any more are closed at once."""

    async def shutdown_default_executor(self) -> None:
        """Nothing to do: there are no threads."""
