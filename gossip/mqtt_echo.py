"""Hearing oneself: the one test of the whole way to a broker and back.

A connection can be up, its pings answered and its messages acknowledged, while the broker has forgotten
what we subscribed to. Only a message of our own that comes back shows that the others' would too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .mqtt_link import Link

_STEPS = 10  # counted, not measured: a process that was frozen has not listened meanwhile


class Echo:
    """Says something to itself every half keepalive, and notices when nothing at all comes back.

    topic: where; None never listens. Anything that arrives counts as hearing, so that a broker that is
    slow because it is busy is not taken for a deaf one.
    """

    def __init__(self, topic: str | None, keepalive: float) -> None:
        self._topic = topic
        self._interval = keepalive / 2
        self._patience = float(keepalive)
        self._heard = False

    def heard(self, topic: str) -> bool:
        """Note that something arrived; True if it was our own call."""
        self._heard = True
        return topic == self._topic

    async def listen(self, link: Link, covered: Callable[[str], bool]) -> None:
        """Return once a connection is deaf; ends never on a good one.

        covered: whether we are subscribed to a topic, by now.
        """
        while True:
            await asyncio.sleep(self._interval)
            if self._topic is None or not covered(self._topic):
                continue
            self._heard = False
            call = asyncio.ensure_future(link.publish(self._topic, b"", 1, False))
            try:
                silence = 0
                while silence < _STEPS and not self._heard:
                    await asyncio.sleep(self._patience / _STEPS)
                    silence += not link.congested()
            finally:
                call.cancel()
            if not self._heard:
                return
