"""How a peer comes in: its name must be free, those it expects be there, and the models be the same."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from .cards import Status
from .engine import Ending
from .errors import PeerError, Replaced
from .link import Link, SessionOver, replaced

_log = logging.getLogger(__name__)

WAITING_NEWS = 5.0
"""Seconds between two log lines that say for whom a peer waits."""


async def claim_name(link: Link, unsaid: Ending | None) -> None:
    """Make sure that the name is ours, and write the session down. The others do not know of it yet.

    unsaid: a goodbye of the former session that no broker took; it goes first.
    """
    generation = await _free_generation(link)
    _refuse_midway(link, _others_train(link))
    if unsaid is not None:
        await link.say(goodbye_of(unsaid, generation))
    await link.open(generation)
    if link.settings.founder and not link.engine.returning:
        # Before anybody knows the name: whoever was quicker may give to it at once, and what comes in
        # must find the founder's own mass there, or it would take the place of its values.
        await _begin(link, found=True)


async def wait_for_others(link: Link) -> None:
    """Tell the others of us, and wait for those that are expected and for our weight to count."""
    link.born = True
    await link.birth()
    _log.info("peer %s joins swarm %s in session %s", link.name, link.settings.swarm, link.session)
    await _wait_for_expected(link)
    _refuse_mismatch(link)
    await link.up_to_date()
    # One of them may have been offline before, and is back only now.
    _refuse_midway(link, await link.worker.run(link.engine.neighbours_went_on))
    settings, view = link.settings, link.view
    if not (settings.founder and not link.engine.returning):
        # Late comers were refused in lockstep modes: whoever trains by now started together with us.
        await _begin(link, found=settings.mode != "async" and bool(view.waiting))
    deadline = link.machine.monotonic() + settings.silence
    while link.view.waiting and link.machine.monotonic() < deadline:
        await link.next_turn()
    for model, (counting, members) in link.members().items():
        _log.info("peer %s: model %s counts: %d of %d", link.name, model, counting, members)


def goodbye_of(ending: Ending, generation: int) -> Status:
    """Return the status that tells the others how a session ended."""
    return Status(
        "left",
        ending.report["session"],
        ending.phase,
        ending.reason,
        ending.statement,
        counts=ending.counts,
        generation=generation,
        reclaimed=ending.reclaimed,
    )


async def _begin(link: Link, *, found: bool) -> None:
    complete = bool(link.settings.expect) and not link.engine.returning
    now = link.machine.monotonic()
    await link.worker.run(link.engine.begin, now, found=found, complete=complete)


async def _wait_for_expected(link: Link) -> None:
    settings = link.settings
    began = news = link.machine.monotonic()
    # Who returns to a swarm that trains finds there whoever is left; lockstep modes start together.
    returning = link.engine.returning and (link.engine.restored or settings.mode == "async")
    expected = set() if returning else set(settings.expect) - {link.name}
    while missing := sorted(expected - link.roster.met()):
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
    grace = link.machine.monotonic() + link.engine.fixed.name_grace
    first, replace = not link.engine.has_claimed, link.settings.replace
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
            return (
                max(link.generation, generation) + 1
            )  # the broker may have forgotten the other device
        if generation > link.generation and not first and not replace:
            raise Replaced(replaced(link.name, link.settings.swarm))
        if status is None or status.session in link.engine.own_sessions:
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


def _others_train(link: Link) -> bool:
    return any(status.phase != "starting" for status in link.roster.online().values())


def _refuse_mismatch(link: Link) -> None:
    """Of two peers that cannot average a model, the one that came later gives up; where they expect
    each other, both do."""
    for (other, _), difference in link.roster.mismatches.items():
        since = link.roster.since(other)
        came_first = since is not None and (since, other) < (link.since, link.name)
        if came_first or other in link.settings.expect:
            raise PeerError(f"peer {link.name}: cannot average with peer {other}: {difference}")
