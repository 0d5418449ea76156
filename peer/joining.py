"""How a peer comes in: its name must be free, those it expects be there, and the models be the same."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from .errors import PeerError
from .membership import Membership
from .presence import Status

_log = logging.getLogger(__name__)

NAME_GRACE = 5.0
"""Seconds that a name may stay online under another session before a peer gives it up."""


async def join(member: Membership) -> None:
    """Wait for those we expect, and make sure that we may join."""
    await _refuse_taken_name(member)
    _refuse_late_comer(member)
    name, settings, engine = member.name, member.settings, member.engine
    others_were_at_it = _others_train(member)
    if settings.founder and not engine.lived:
        # Before anybody knows the name: whoever was quicker may give to it at once, and what comes in
        # must find the founder's own mass there, or it would take the place of its values.
        await member.worker.run(engine.found, False)
    member.born = True
    await member.birth()
    _log.info("peer %s joins swarm %s in session %s", name, settings.swarm, member.session)
    await _wait_for_expected(member)
    _refuse_mismatch(member)
    await _know_them(member)
    if not engine.restored:
        newcomer = _is_newcomer(member, others_were_at_it)
        await member.worker.run(engine.found, newcomer)
        if newcomer:
            _log.info("peer %s joins as a newcomer", name)


def _is_newcomer(member: Membership, others_were_at_it: bool) -> bool:
    """Whether to hear from the others before our own weight counts.

    There must be somebody to hear from: when all come back at once, as after a long outage, and each
    waited for the others, nobody's weight would ever count.
    """
    settings = member.settings
    if settings.mode != "async":
        return False  # late comers were refused: whoever trains by now started together with us
    if settings.founder is None and settings.trained:
        # Not those who train by now: they may be waiting to hear from us.
        return others_were_at_it or _others_came_first(member)
    if settings.founder is None or member.engine.lived:
        return settings.founder is False or _others_train(member)
    return not settings.founder


async def _wait_for_expected(member: Membership) -> None:
    settings = member.settings
    deadline = time.monotonic() + settings.start_timeout
    # Who returns to a swarm that trains finds there whoever is left; lockstep modes start together.
    returns = member.engine.restored or (member.engine.lived and settings.mode == "async")
    expected = set() if returns else set(settings.expect) - {member.name}
    while missing := sorted(expected - _met(member)):
        _refuse_mismatch(member)  # it may have come, found that out, and left again
        if time.monotonic() > deadline:
            raise PeerError(
                f"peer {member.name}: {', '.join(missing)} did not come online within "
                f"{settings.start_timeout:g} s; start them, or raise start_timeout"
            )
        await member.next_turn()
    if not expected:
        await asyncio.sleep(10 * settings.tick)  # let retained cards arrive


async def _know_them(member: Membership) -> None:
    """Until whoever is online now is a neighbour.

    Lockstep averaging waits for those neighbours that a round began with, and masks cancel only between
    peers that count each other.
    """
    while member.events:
        await member.next_turn()
    await member.next_turn()  # the one that took the last of them


def _met(member: Membership) -> set[str]:
    """Who is online, and has shown its card."""
    online = member.roster.all_online().items()
    return {peer for peer, (card, status) in online if card and card.session == status.session}


async def _refuse_taken_name(member: Membership) -> None:
    """Ask on our own status topic: what is retained there comes before our own question."""
    question = Status("offline", member.session, reason="asks whether its name is free")
    grace = time.monotonic() + NAME_GRACE
    while True:
        await member.say(question, retain=False)
        # Not wait_for: in Python 3.11 it can lose a cancellation, and a peer asked to leave would stay.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, grace - time.monotonic())):
                await member.asked.wait()
        await asyncio.sleep(2 * member.settings.tick)  # its owner, if there is one, answers
        status = member.own_status
        if status is None or status.state != "online":
            return
        if status.session == member.session:
            return  # our own former life, which the broker has not missed yet
        if time.monotonic() > grace:
            raise PeerError(
                f"peer {member.name}: the name is already online in swarm "
                f"{member.settings.swarm!r} (session {status.session}); choose another name, or "
                "stop the other one"
            )
        member.asked.clear()


def _refuse_late_comer(member: Membership) -> None:
    mode = member.settings.mode
    if mode == "async" or member.engine.restored or not _others_train(member):
        return
    raise PeerError(
        f"peer {member.name}: swarm {member.settings.swarm!r} is already training in {mode} mode, "
        "which nobody can join midway; use async mode, or start together"
    )


def _others_train(member: Membership) -> bool:
    return any(status.phase != "starting" for status in member.roster.online().values())


def _others_came_first(member: Membership) -> bool:
    """Of peers that bring networks of their own, the one that came first gives the order of cells."""
    me = (member.since, member.name)
    others = member.roster.all_online().items()
    return any(card is not None and (card.since, name) < me for name, (card, _) in others)


def _refuse_mismatch(member: Membership) -> None:
    """Of two peers that cannot average a model, the one that came later gives up; where they expect
    each other, both do."""
    for (other, vector), difference in member.roster.mismatches.items():
        card = member.roster.all_online().get(other, (None, None))[0]
        came_first = card is not None and (card.since, other) < (member.since, member.name)
        if came_first or other in member.settings.expect:
            raise PeerError(
                f"peer {member.name}: model {vector!r} is not the same as on peer {other}: {difference}"
            )
