"""How a peer's stay ends: by agreement with the others, by leaving early, and with a goodbye.

Every wait here has an end, whatever becomes of the broker and the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ..gossip.transport import TransportError
from ..gossip.trust import TrustError
from ..models import Learner
from .membership import Membership
from .presence import Status

_log = logging.getLogger(__name__)

HAND_OVER_SHARE = 0.8
"""The part of leave_timeout that goes into handing mass over; the goodbye has the rest."""


class Settling:
    """After training: agree with the neighbours, then wait for what is on its way.

    on_test is told the accuracy of the values agreed upon.
    """

    def __init__(self, member: Membership, learner: Learner, on_test: Callable[[float], None]):
        self._member, self._learner, self._on_test = member, learner, on_test
        self._engine, self._settings = member.engine, member.settings
        self._run = member.worker.run

    async def finish(self) -> None:
        """Until everybody is through, or settle_timeout has passed; twice that with agreement."""
        member = self._member
        if self._settings.mode == "async" and self._engine.shared():
            await self._agree()
            # Who no longer pushes must no longer absorb, or it drains the mass that others mix with.
            await self._run(self._engine.gossiper.close)
            test = await self._run(self._learner.test)
            self._on_test(test.accuracy)
            await member.publish_record({"accuracy": test.accuracy, "loss": test.mean_loss})
            member.enter("done")
        else:
            member.enter("done")
            await member.publish_record({})  # or the last that a watcher hears of us is "training"
        try:
            async with asyncio.timeout(self._settings.settle_timeout):
                while await open_transfers(member) or not self._all_done():
                    await member.next_turn()
        except TimeoutError:
            count = await open_transfers(member)
            _log.warning("peer %s: leaves with %d transfers open", member.name, count)

    async def _agree(self) -> None:
        """Push until we agree with what we hear and everybody else does too.

        A peer that agreed may be disturbed again, by mass that comes late (from one who was away, or
        taken back from one who died): then it takes back its "done", so that nobody leaves too early.
        """
        member = self._member
        try:
            async with asyncio.timeout(self._settings.settle_timeout) as limit:
                while True:
                    member.enter("settling")
                    await self._push_until(self._agreed, limit)
                    member.enter("done")
                    # Others may still need our values to agree.
                    await self._push_until(self._all_done_or_disturbed, limit)
                    # Who was disturbed a moment ago, and is not now, has not seen everybody done.
                    if not await self._disturbed() and self._all_done():
                        return
        except TimeoutError:
            _log.warning("peer %s: stopped settling after a while", member.name)

    async def _push_until(
        self, reached: Callable[[], Awaitable[bool]], limit: asyncio.Timeout
    ) -> None:
        """Push without training until `reached`; the time limit runs while nobody trains."""
        member, tick = self._member, self._settings.tick
        while not await reached():
            await self._run(self._engine.request_push)
            member.wake()
            await member.next_turn()
            # Those who still train have better things to do than to hear from us all the time.
            others = member.roster.online().values()
            busy = any(status.phase in ("starting", "training") for status in others)
            if busy:
                now = asyncio.get_running_loop().time()
                limit.reschedule(now + self._settings.settle_timeout)
            await asyncio.sleep(10 * tick if busy else tick / 5)

    async def _agreed(self) -> bool:
        others = self._member.roster.online().values()
        return all(status.phase in ("settling", "done") for status in others) and (
            not others or await self._run(self._engine.agrees, self._settings.settle_tolerance)
        )

    async def _disturbed(self) -> bool:
        """Whether what we heard lately is farther from our values than agreement allows."""
        others = self._member.roster.online()
        tolerance = 3 * self._settings.settle_tolerance
        return bool(others) and not await self._run(self._engine.agrees, tolerance)

    async def _all_done_or_disturbed(self) -> bool:
        return self._all_done() or await self._disturbed()

    def _all_done(self) -> bool:
        """Whether nobody is left to wait for; who is offline may come back, to finish its training."""
        roster = self._member.roster
        return all(s.phase == "done" for s in roster.online().values()) and not roster.awaited()


async def open_transfers(member: Membership) -> int:
    """How many transfers nobody has acknowledged yet."""
    return await member.worker.run(lambda: len(member.engine.gossiper.ledger.open))


async def hand_over(member: Membership) -> None:
    """Give all mass to neighbours before leaving early. A peer that has already agreed with them
    keeps its own, as it would have done anyway, and waits for its open transfers alone."""
    engine, run = member.engine, member.worker.run
    try:
        async with asyncio.timeout(HAND_OVER_SHARE * member.settings.leave_timeout):
            if engine.gossiper.closed:
                while await open_transfers(member):
                    await member.next_turn()
                return
            await run(engine.gossiper.hand_over, member.machine.monotonic())
            while not await run(engine.handed_over):
                member.wake()
                await member.next_turn()
            if not await run(engine.gossiper.drained):
                _log.info(
                    "peer %s: keeps its mass, for nobody stays who could take it", member.name
                )
    except TimeoutError:
        _log.warning("peer %s: leaves with mass that nobody took in time", member.name)


async def say_goodbye(member: Membership, reason: str, within: float) -> None:
    """Tell the others that we leave, why, and what became of what they sent. One line says so."""
    statement = await member.worker.run(member.engine.close)
    goodbye = Status("left", member.session, member.phase, reason, statement)
    try:
        async with asyncio.timeout(within):
            await _tell(member, goodbye)
    except (TimeoutError, TransportError, TrustError) as error:
        cause = str(error) or member.transport.connection.cause or "it does not answer"
        _log.warning(
            "peer %s left swarm %s: %s; the broker did not take its goodbye within %g s (%s)",
            member.name, member.settings.swarm, reason, within, cause,
        )  # fmt: skip
    else:
        _log.info("peer %s left swarm %s: %s", member.name, member.settings.swarm, reason)


async def _tell(member: Membership, goodbye: Status) -> None:
    """Say goodbye with as much of its statement as fits: whoever came first is the likeliest to be gone."""
    while True:
        try:
            return await member.goodbye(goodbye)
        except (TransportError, TrustError) as error:
            rows = goodbye.statement
            if not rows or error.cause not in ("too-large", "malformed"):
                raise
            kept = rows[(len(rows) + 1) // 2 :]
            _log.warning(
                "peer %s: its goodbye is too long (%s); of %d lines on what it received it tells %d",
                member.name, error, len(rows), len(kept),
            )  # fmt: skip
            goodbye = replace(goodbye, statement=kept)
