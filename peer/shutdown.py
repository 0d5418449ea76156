"""How a peer's stay ends: by agreement with the others, by leaving early, and with a goodbye.

Every wait here has an end, whatever becomes of the broker and the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ..gossip import TransportError
from ..gossip.security import TrustError
from .cards import Status
from .link import Link
from .presence import Event

_log = logging.getLogger(__name__)

HAND_OVER_SHARE = 0.8
"""The part of leave_timeout that goes into handing mass over; the goodbye has the rest."""


class Settling:
    """After training: agree with the neighbours, then wait for what is on its way.

    `settle` and `stay` are what a peer does in the states SETTLING and DONE.
    """

    def __init__(self, link: Link):
        self._link, self._engine, self._settings = link, link.engine, link.settings
        self._deadline: float | None = None
        self.timed_out = False

    async def settle(self) -> None:
        """Push until we agree with what we hear, or settle_timeout is over."""
        if self._deadline is None:
            self._deadline = self._now() + self._settings.settle_timeout
        if not await self._push_until(self._agreed):
            self.timed_out = True
            _log.warning(
                "peer %s: stopped settling after %g s without agreement",
                self._link.name, self._settings.settle_timeout,
            )  # fmt: skip

    async def be_heard(self) -> None:
        """Wait until our own status comes back from the broker, or settle_timeout is over.

        A peer that was cut off does not know who else is there: it would end alone beside the others.
        """
        deadline = self._now() + self._settings.settle_timeout
        while not self._link.phase_is_known and self._now() < deadline:
            await self._link.next_turn()
        await self._link.up_to_date()

    async def stay(self) -> bool:
        """Push until everybody has agreed; False if late mass has disturbed our own agreement.

        It may come from one who was away, or be taken back from one who died.
        """
        if self.timed_out:
            return True
        # Others may still need our values to agree.
        if not await self._push_until(self._all_done_or_disturbed):
            self.timed_out = True
            return True
        # A peer that was disturbed a moment ago, and is not now, has not seen everybody done.
        return not await self._disturbed() and self._all_done()

    async def drain(self) -> None:
        """Wait until nothing is on its way any more and everybody is done, or settle_timeout is over."""
        link = self._link
        deadline = self._now() + self._settings.settle_timeout
        while link.view.open or not self._all_done():
            if self._now() >= deadline:
                others = ", ".join(sorted(link.roster.awaited()))
                _log.warning(
                    "peer %s: stops waiting for %s; transfers that are still open (%d) are taken back",
                    link.name, others or "the others", link.view.open,
                )  # fmt: skip
                return
            await link.next_turn()

    async def _push_until(self, reached: Callable[[], Awaitable[bool]]) -> bool:
        """Push without training until `reached`; False if time was over. Time runs while nobody trains."""
        link, tick = self._link, self._settings.tick
        while not await reached():
            if self._deadline is not None and self._now() >= self._deadline:
                return False
            await link.worker.run(self._engine.request_push)
            link.wake()
            await link.next_turn()
            # Those who still train have better things to do than to hear from us all the time.
            others = link.roster.online().values()
            busy = any(status.phase in ("starting", "training") for status in others)
            if busy:
                self._deadline = self._now() + self._settings.settle_timeout
            await asyncio.sleep(10 * tick if busy else tick / 5)
        return True

    def _now(self) -> float:
        return self._link.machine.monotonic()

    async def _agreed(self) -> bool:
        link = self._link
        if link.view.waiting:
            return False  # first our own weight must count
        others = link.roster.online().values()
        return all(status.phase in ("settling", "done") for status in others) and (
            not others
            or await link.worker.run(self._engine.agrees, self._settings.settle_tolerance)
        )

    async def _disturbed(self) -> bool:
        """Return whether what we heard lately is farther from our values than agreement allows."""
        others = self._link.roster.online()
        tolerance = 3 * self._settings.settle_tolerance
        return bool(others) and not await self._link.worker.run(self._engine.agrees, tolerance)

    async def _all_done_or_disturbed(self) -> bool:
        return self._all_done() or await self._disturbed()

    def _all_done(self) -> bool:
        """Return whether nobody is left to wait for; an offline peer may come back to finish its training."""
        roster = self._link.roster
        return all(s.phase == "done" for s in roster.online().values()) and not roster.awaited()


async def hand_over(link: Link) -> None:
    """Give all mass to neighbours before leaving early.

    A peer that has already agreed with them keeps its own, as it would have done anyway, and waits for its
    open transfers alone.
    """
    run, deadline = link.worker.run, HAND_OVER_SHARE * link.settings.leave_timeout
    try:
        async with asyncio.timeout(deadline):
            while not await run(link.engine.hand_over):
                link.wake()
                await link.next_turn()
    except TimeoutError:
        _log.warning(
            "peer %s: nobody took its mass within %g s; it keeps what is left", link.name, deadline
        )
        return
    if not await run(link.engine.drained):
        _log.info("peer %s: keeps its mass, for nobody stays who could take it", link.name)


async def say_goodbye(link: Link, goodbye: Status, within: float) -> tuple[str, list[Event]]:
    """Tell the others that we leave, why, and what became of what they sent.

    Returns why the broker did not take it, nothing if it did; and what others said before us.
    """
    earlier: list[Event] = []
    told = False
    try:
        async with asyncio.timeout(within):
            await _tell(link, goodbye)
            told = True
            earlier = await link.earlier_goodbyes()
    except (TimeoutError, TransportError, TrustError) as error:
        if not told:
            return str(error) or link.transport.connection.cause or "it does not answer", []
    return "", earlier


async def _tell(link: Link, goodbye: Status) -> None:
    """Say goodbye with as much of its statement as fits: the oldest rows are the likeliest to be stale."""
    while True:
        try:
            return await link.goodbye(goodbye)
        except (TransportError, TrustError) as error:
            rows = goodbye.statement
            if not rows or error.cause not in ("too-large", "malformed"):
                raise
            kept = rows[(len(rows) + 1) // 2 :]
            _log.warning(
                "peer %s: its goodbye is too long (%s); of %d lines on what it received it tells %d",
                link.name, error, len(rows), len(kept),
            )  # fmt: skip
            goodbye = replace(goodbye, statement=kept)
