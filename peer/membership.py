"""How a peer enters and leaves a swarm.

It shows its credentials; its name must be free, those it expects be there, and the models be the same. It
leaves by agreement with the others, or early, and with a goodbye; every wait then has an end, whatever
becomes of the broker and the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ..gossip import TransportError
from ..gossip.security import (
    Admission,
    Identity,
    NullSecurity,
    SecurityLayer,
    SwarmSecurity,
    TrustError,
    read_public,
)
from .engine import Ending
from .exits import PeerError, Replaced, peer_errors
from .link import Link, SessionOver
from .presence import Event, Status
from .settings import Settings

_log = logging.getLogger(__name__)

WAITING_NEWS = 5.0
"""Seconds between two log lines that say for whom a peer waits."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a peer shows, and checks others by, in a swarm with `trust = "swarm"`."""

    identity: Identity
    admission: Admission
    owner: bytes

    @classmethod
    def load(cls, name: str, settings: Settings) -> Self | None:
        """Read the files that the settings name; None without trust. PeerError says what is wrong.

        name: the whole name of the key (`label@id`), or its label alone.
        """
        files = {key: getattr(settings, key) for key in ("identity", "invitation", "owner")}
        given = [key for key, value in files.items() if value is not None]
        if settings.trust == "none":
            if given:
                raise PeerError(
                    f'peer {name}: has an {given[0]}, but trust is "none"; set trust = "swarm" to use it'
                )
            return None
        if missing := sorted(files.keys() - given):
            raise PeerError(f'peer {name}: trust = "swarm" needs {", ".join(missing)} too')
        with peer_errors(name):
            identity = Identity.load(Path(files["identity"]))
            admission = Admission.load(Path(files["invitation"]), identity)
            owner = read_public(files["owner"])
        if name not in (identity.label, identity.name):
            raise PeerError(
                f"peer {name}: {files['identity']} is the key of {identity.name}; "
                f"call the peer {identity.label}, or make it a key of its own"
            )
        return cls(identity, admission, owner)


def begin_security(credentials: Credentials | None, link: Link) -> SecurityLayer:
    """Return the security layer of one session. Every one draws new keys, so that nothing outlives it."""
    if credentials is None:
        _log.warning(
            "peer %s: trust is off: whoever reaches the broker can read and forge", link.name
        )
        return NullSecurity(link.name)
    with peer_errors(link.name):
        return SwarmSecurity(
            credentials.identity, credentials.admission, credentials.owner,
            swarm=link.settings.swarm, session=link.session, models=link.engine.schemas,
            since=link.since, memory=link.engine.security_memory(),
            wall=link.machine.wall, clock=link.machine.monotonic,
        )  # fmt: skip


# --- entering ----------------------------------------------------------------------------------------


async def claim_name(link: Link, unsaid: Ending | None) -> None:
    """Make sure that the name is ours, and write the session down. The others do not know of it yet.

    unsaid: a goodbye of the former session that no broker took; it goes first.
    """
    generation = await _free_generation(link)
    others = link.roster.online().values()
    _refuse_midway(link, any(status.phase != "starting" for status in others))
    if unsaid is not None:
        await link.say(goodbye_of(unsaid, generation))
    await link.open(generation)
    if link.settings.founder and not link.engine.returning:
        # Before anybody knows the name: whoever was quicker may give to it at once, and what comes in
        # must find the founder's own mass there, or it would take the place of its values.
        await _begin(link, as_founder=True)


async def wait_for_others(link: Link) -> None:
    """Tell the others of us, and wait for those that are expected and for our weight to count."""
    link.born = True
    await link.birth()
    _log.info("peer %s joins swarm %s in session %s", link.name, link.settings.swarm, link.session)
    await _wait_for_expected(link)
    _refuse_mismatch(link)
    await link.up_to_date()
    # One of them may have been offline before, and is back only now.
    _refuse_midway(link, await link.worker.run(link.engine.neighbours_are_ahead))
    settings, view = link.settings, link.view
    if not (settings.founder and not link.engine.returning):
        # Late comers were refused in lockstep modes: whoever trains by now started together with us.
        await _begin(link, as_founder=settings.mode != "async" and bool(view.waiting))
    deadline = link.machine.monotonic() + settings.silence
    while link.view.waiting and link.machine.monotonic() < deadline:
        await link.next_turn()
    for model, (counting, members) in link.members().items():
        _log.info("peer %s: model %s counts: %d of %d", link.name, model, counting, members)


def goodbye_of(ending: Ending, generation: int) -> Status:
    """Return the status that tells the others how a session ended."""
    return Status(
        "left", ending.report["session"], ending.phase, ending.reason, ending.statement,
        counts=ending.counts, generation=generation, reclaimed=ending.reclaimed,
    )  # fmt: skip


async def _begin(link: Link, *, as_founder: bool) -> None:
    expected_online = bool(link.settings.expect) and not link.engine.returning
    now = link.machine.monotonic()
    await link.worker.run(
        link.engine.begin, now, as_founder=as_founder, expected_online=expected_online
    )


async def _wait_for_expected(link: Link) -> None:
    settings = link.settings
    began = news = link.machine.monotonic()
    # Who returns to a swarm that trains finds there whoever is left; lockstep modes start together.
    returning = link.engine.returning and (link.engine.restored or settings.mode == "async")
    expected = set() if returning else set(settings.expect) - {link.name}
    while missing := sorted(expected - link.roster.online_with_card()):
        _refuse_mismatch(link)  # it may have come, found that out, and left again
        now = link.machine.monotonic()
        if now - began > settings.start_timeout:
            raise PeerError(
                f"peer {link.name}: {', '.join(missing)} did not come online within "
                f"{settings.start_timeout:g} s; start them, or raise start_timeout"
            )
        if now - news >= WAITING_NEWS:
            news = now
            _log.info(
                "peer %s waits for %s (%.0f of %g s)",
                link.name, ", ".join(missing), now - began, settings.start_timeout,
            )  # fmt: skip
        await link.next_turn()
    if not expected:
        await asyncio.sleep(10 * settings.tick)  # let retained cards arrive


async def _free_generation(link: Link) -> int:
    """Return the generation to join with; PeerError if the name is another device's.

    Asks on our own status topic: what is retained there comes before our own question.
    """
    question = Status("offline", link.session, reason="asks whether its name is free")
    grace = link.machine.monotonic() + link.engine.limits.name_grace
    first, replace = not link.engine.history.claimed, link.settings.replace
    while True:
        await link.say(question, retain=False)
        with contextlib.suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it can lose a cancellation, and a peer asked to leave would stay.
            async with asyncio.timeout(max(0.0, grace - link.machine.monotonic())):
                await link.asked.wait()
        await asyncio.sleep(2 * link.settings.tick)  # its owner, if there is one, answers
        status = link.own_status
        generation = max(link.card_generation, 1 if status is None else status.generation)
        if status is None and first and replace:
            # The broker may have forgotten the other device.
            return max(link.generation, generation) + 1
        if generation > link.generation and not first and not replace:
            raise Replaced(link.name, link.settings.swarm)
        if status is None or status.session in (link.session, *link.engine.history.sessions):
            if generation > link.generation and not first:  # and --replace
                return _take_back(link, generation)
            return max(link.generation, generation)
        if status.state == "left":
            return max(link.generation, generation)
        if not first and status.generation < link.generation:
            return link.generation  # a device that ours has replaced, whatever it says
        if replace and (first or generation > link.generation):
            return _take_back(link, generation)
        if not first and status.state == "offline":
            return link.generation  # we had the name before, and nobody was meant to replace us
        if status.state == "offline" and link.dead_session == status.session:
            return generation
        if link.machine.monotonic() > grace or status.state == "offline":
            raise PeerError(_name_taken(link, status))
        link.asked.clear()


def _take_back(link: Link, generation: int) -> int:
    """Return the generation with which to take the place of another device of our name."""
    if link.engine.restored:  # the others gave our session up when they heard of the other device
        raise SessionOver("another device had its name meanwhile")
    _log.warning("peer %s: takes the place of another device of its name", link.name)
    return generation + 1


def _name_taken(link: Link, status: Status) -> str:
    where = f"in swarm {link.settings.swarm!r} (session {status.session})"
    if status.state == "online":
        return (
            f"peer {link.name}: the name is already online {where}; choose another name, stop the other "
            "one, or use --replace if this device takes its place"
        )
    return (
        f"peer {link.name}: the name belongs to a device that is offline {where} and may come back; start "
        "that one from its checkpoint, use --replace if this device takes its place, or declare it dead "
        "with gossamer forget"
    )


def _refuse_midway(link: Link, others_are_ahead: bool) -> None:
    """Raise PeerError if a new session finds others ahead of it in a lockstep mode."""
    if link.settings.mode != "async" and not link.engine.restored and others_are_ahead:
        raise PeerError(
            f"peer {link.name}: swarm {link.settings.swarm!r} is already training in "
            f"{link.settings.mode} mode, which nobody can join midway; use async mode, or start together"
        )


def _refuse_mismatch(link: Link) -> None:
    """Of two peers that cannot average a model, the one that came later gives up; where they expect
    each other, both do."""
    for (other, _), difference in link.roster.mismatches.items():
        since = link.roster.session_start(other)
        came_first = since is not None and (since, other) < (link.since, link.name)
        if came_first or other in link.settings.expect:
            raise PeerError(f"peer {link.name}: cannot average with peer {other}: {difference}")


# --- leaving -----------------------------------------------------------------------------------------

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
        if not await self._push_until(self._all_done_or_lost_agreement):
            self.timed_out = True
            return True
        # A peer that was disturbed a moment ago, and is not now, has not seen everybody done.
        return not await self._lost_agreement() and self._all_done()

    async def drain(self) -> None:
        """Wait until nothing is on its way any more and everybody is done, or settle_timeout is over."""
        link = self._link
        deadline = self._now() + self._settings.settle_timeout
        if link.view.open_transfers or not self._all_done():
            _log.info(
                "peer %s has stopped averaging; it waits for the others and for %d open transfers",
                link.name, link.view.open_transfers,
            )  # fmt: skip
        while link.view.open_transfers or not self._all_done():
            if self._now() >= deadline:
                others = ", ".join(sorted(link.roster.offline_unfinished()))
                _log.warning(
                    "peer %s: stops waiting for %s; transfers that are still open (%d) are taken back",
                    link.name, others or "the others", link.view.open_transfers,
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
            busy = bool(link.roster.still_training())
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
        if link.roster.still_training():
            return False
        return not link.roster.online() or await self._agrees(self._settings.settle_tolerance)

    async def _lost_agreement(self) -> bool:
        """Return whether what we heard lately is farther from our values than agreement allows."""
        return bool(self._link.roster.online()) and not await self._agrees(
            3 * self._settings.settle_tolerance
        )

    async def _agrees(self, tolerance: float) -> bool:
        engine = self._engine
        return await self._link.worker.run(engine.agreement.reached, engine.gossiper, tolerance)

    async def _all_done_or_lost_agreement(self) -> bool:
        return self._all_done() or await self._lost_agreement()

    def _all_done(self) -> bool:
        """Return whether nobody is left to wait for; an offline peer may come back to finish its training."""
        roster = self._link.roster
        return (
            all(s.phase == "done" for s in roster.online().values())
            and not roster.offline_unfinished()
        )


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
    if not await run(link.engine.gossiper.is_drained):
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
