"""Waiting for what a test expects. No other file of the tests sleeps for real: `house.py` counts those.

A test says what it waits for, not how long that takes. What never happens fails, with a message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 200.0
"""Seconds after which a condition is taken never to become true: far more than any machine needs."""
PAUSE = 0.005
"""Seconds between two looks."""


async def until(
    condition: Callable[[], object],
    what: str = "what the test waits for",
    *,
    patience: float = PATIENCE,
    pause: float = PAUSE,
) -> None:
    """Let the event loop run until a condition is true; AssertionError if it never is."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {patience:g} s"
        await asyncio.sleep(pause)


def wait_until(
    condition: Callable[[], object],
    what: str = "what the test waits for",
    *,
    patience: float = PATIENCE,
    pause: float = PAUSE,
) -> None:
    """The same for threads, and for tests without an event loop."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {patience:g} s"
        time.sleep(pause)


async def turns(count: int) -> None:
    """Let every task of the event loop that can go on do so, this many times."""
    for _ in range(count):
        await asyncio.sleep(0)


def let_run(seconds: float) -> None:
    """Let real processes go on for a while that a seed has drawn, before a fault strikes them.

    For chaos alone, where the moment of a fault is what is drawn: no test may rely on what happens meanwhile.
    """
    time.sleep(seconds)
