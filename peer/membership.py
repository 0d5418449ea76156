"""How a peer joins and leaves a swarm.

To join, it needs valid credentials (with trust), a free name, all expected peers online, and the same partial
models as they have. It leaves when all peers have finished and agree, or earlier when it is asked to; then it
publishes a goodbye. Every wait for other peers has a timeout. Reminders tell what will expire: the peer's
invitation, and the certificates of its connection.

Most functions take a `Link`, which is one session of the peer as the event loop sees it. Its `engine` is the
peer's state, which `worker` changes on another thread; its `roster` is what other peers publish. After a
restart, `engine.returning` says that the peer took part before, and `engine.restored` that it continues its
former session, from a checkpoint. `settings.paced` is true in the asynchronous modes (async and steady); in
the lockstep modes (rounds and server) peers train and average round by round, together.

A peer's *card* is the retained message in which it describes itself. Its *generation* numbers the devices
that have used its name, one after the other. Its weight *counts* in a partial model once it has been added to
the push-sum average (see bootstrap.py). *Mass* is what push-sum sends: a share of a sum and of its weight. A
*transfer* of mass is open until its receiver has acknowledged it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
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
    read_claims,
    read_public,
)
from .engine import Ending
from .exits import NotReached, PeerError, Replaced, peer_errors
from .link import Link, SessionOver
from .presence import Event, Status
from .settings import AUTO_MODELS, Settings
from .spec import BrokerAddress

_log = logging.getLogger(__name__)

DAY = 86400.0
REMIND_BEFORE = 7 * DAY
"""Seconds before something expires in which reminders of it are logged."""


class Reminders:
    """Logs what expires within a week, once a day.

    peer: for log lines.
    expiries: when things expire, in seconds since 1970. The keys are sentences with the word "expires", which
        log lines replace with "has expired" or "expires in 3 days": "its invitation expires: ask for …".
    """

    def __init__(self, peer: str, expiries: Mapping[str, float]) -> None:
        self._peer, self._expiries = peer, dict(expiries)
        self._last_logged = -inf

    def check(self, now: float) -> None:
        """Log what has expired or will within a week, unless that was logged in the last 24 hours.

        now: by the wall clock.
        """
        expiries = self._expiries.items()
        due = {text: expiry for text, expiry in expiries if expiry - now < REMIND_BEFORE}
        if not due or 0 <= now - self._last_logged < DAY:
            return
        self._last_logged = now
        for text, expiry in due.items():
            left = expiry - now
            when = "has expired" if left <= 0 else f"expires in {_duration(left)}"
            _log.warning("peer %s: %s", self._peer, text.replace(" expires", f" {when}", 1))


def _duration(seconds: float) -> str:
    """Return `3 days`, `5 hours` or `less than an hour`."""
    if seconds < 3600:
        return "less than an hour"
    number, unit = (seconds / DAY, "day") if seconds >= 2 * DAY else (seconds / 3600, "hour")
    return f"{int(number)} {unit}{'' if int(number) == 1 else 's'}"


def certificate_expiries(broker: BrokerAddress) -> dict[str, float]:
    """Return when a connection's certificates expire (Unix time), by the sentences that Reminders logs."""
    remedies = {
        broker.ca: "copy the new one of the broker's authority here",
        broker.certificate: "ask the broker's owner for a new one",
    }
    expiries = {}
    for file, remedy in remedies.items():
        if file is None:
            continue
        from cryptography import x509

        with contextlib.suppress(OSError, ValueError):  # connecting with it will say what is wrong
            certificate = x509.load_pem_x509_certificate(Path(file).read_bytes())
            expiry = certificate.not_valid_after_utc.timestamp()
            expiries[f"certificate {file} expires: {remedy}"] = expiry
    return expiries


WAIT_LOG_INTERVAL = 5.0
"""Seconds between two log lines about the expected peers that are missing."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A peer's key, its invitation, and the public key of the swarm's owner; with `trust = "swarm"`."""

    identity: Identity
    admission: Admission
    owner: bytes

    @classmethod
    def load(cls, name: str, settings: Settings) -> Self | None:
        """Read the files named in the settings; None without trust. PeerError says what is wrong.

        name: the full name of the key (`label@id`), or only its label.
        """
        files = {key: getattr(settings, key) for key in ("identity", "invitation", "owner")}
        present = [key for key, value in files.items() if value is not None]
        if settings.trust == "none":
            if present:
                raise PeerError(
                    f'peer {name}: {present[0]} is set, but trust is "none"; set trust = "swarm" to use it'
                )
            return None
        if missing := sorted(files.keys() - present):
            raise PeerError(f'peer {name}: trust = "swarm" needs {", ".join(missing)} too')
        with peer_errors(name):
            identity = Identity.load(Path(files["identity"]))
            admission = Admission.load(Path(files["invitation"]), identity)
            owner = read_public(files["owner"])
        if name not in (identity.label, identity.name):
            raise PeerError(
                f"peer {name}: {files['identity']} is the key of {identity.name}; "
                f"name the peer {identity.label}, or make a key for it with gossamer keygen"
            )
        return cls(identity, admission, owner)

    @property
    def expires(self) -> float:
        """When the invitation expires, in seconds since 1970."""
        try:
            return read_claims(self.admission.invitation, self.owner).expires
        except TrustError:
            return inf  # the security layer refuses it, and says why


def make_security(credentials: Credentials | None, link: Link) -> SecurityLayer:
    """Return the security layer of one session; every session has new keys for the key exchange."""
    if credentials is None:
        _log.warning(
            "peer %s: trust is off: every client of the broker can read and forge messages",
            link.name,
        )
        return NullSecurity(link.name)
    if link.settings.mode != "steady" and link.settings.robust == "none":
        remedy = 'mode = "steady"' if link.settings.mode == "async" else 'robust = "trimmed"'
        _log.info(
            "peer %s: in %s mode, a hostile member can spoil the average; to withstand a few, set %s on all "
            "peers",
            link.name, link.settings.mode, remedy,
        )  # fmt: skip
    # Patterns of the names of partial models that the swarm may form later, which the invitation must allow.
    later_models = AUTO_MODELS if link.settings.sharing == "auto" else ()
    with peer_errors(link.name):
        return SwarmSecurity(
            credentials.identity, credentials.admission, credentials.owner,
            swarm=link.settings.swarm, session=link.session, models=link.engine.schemas,
            since=link.session_began, later_models=later_models, memory=link.engine.security_memory(),
            wall=link.machine.wall, clock=link.machine.monotonic,
        )  # fmt: skip


# --- joining -----------------------------------------------------------------------------------------


async def claim_name(link: Link, undelivered_ending: Ending | None) -> None:
    """Check that the name is free, and save the session. Other peers cannot see the session yet.

    undelivered_ending: how a former session ended, if no broker accepted its goodbye; that goodbye is
        published first.
    """
    generation = await _check_name(link)
    others = link.roster.online().values()
    _refuse_late_join(link, any(status.phase != "starting" for status in others))
    if undelivered_ending is not None:
        await link.send_status(goodbye_of(undelivered_ending, generation))
    await link.open(generation)
    if link.settings.founder and not link.engine.returning:
        # Before the card is published: other peers push as soon as they see it, and a peer without mass takes
        # over the first values that it receives. A founder must keep its own.
        await _begin_counting(link, as_founder=True)


async def wait_for_others(link: Link) -> None:
    """Announce the session; wait for the expected peers; then, for a while, until our weight counts."""
    link.joined = True
    await link.announce()
    _log.info("peer %s joins swarm %s in session %s", link.name, link.settings.swarm, link.session)
    await _wait_for_expected(link)
    _refuse_mismatch(link)
    await link.wait_for_engine()
    # Check again: a peer that was offline during the first check may be online now.
    _refuse_late_join(link, await link.worker.run(link.engine.neighbours_are_ahead))
    settings = link.settings
    has_founded = settings.founder and not link.engine.returning  # in claim_name
    if not has_founded:
        # In lockstep modes a late peer was refused above, so all peers start together, each as a founder.
        await _begin_counting(link, as_founder=not settings.paced and bool(link.view.waiting))
    # `waiting` are the partial models in which our weight does not count yet. Those in which no other peer
    # counts begin with our values after this time. If some still wait then, we train meanwhile.
    deadline = link.machine.monotonic() + settings.silence
    while link.view.waiting and link.machine.monotonic() < deadline:
        await link.next_turn()
    for model, (counting, members) in link.members().items():
        _log.info(
            "peer %s: in the average of model %s, %d of %d members count",
            link.name, model, counting, members,
        )  # fmt: skip


def goodbye_of(ending: Ending, generation: int) -> Status:
    """Return the goodbye for an ending."""
    return Status(
        "left", session=ending.report["session"], phase=ending.phase, reason=ending.reason,
        statement=ending.statement, reclaimed=ending.reclaimed,
        counts=ending.counts, generation=generation, leaving=ending.kind == "left",
    )  # fmt: skip


async def _begin_counting(link: Link, *, as_founder: bool) -> None:
    """Let our weight count in each partial model as soon as that is safe.

    as_founder: let it count at once, at our own values, instead of waiting for values of peers that count.
    """
    # Expected peers were waited for, unless we took part before. Founders call this before that wait, but for
    # them the value does not matter.
    all_online = bool(link.settings.expect) and not link.engine.returning
    now = link.machine.monotonic()
    await link.worker.run(link.engine.begin, now, as_founder=as_founder, all_online=all_online)


async def _wait_for_expected(link: Link) -> None:
    """Wait until all peers of `expect` are online; on a graph, only those that are our neighbours.

    Does not wait for peers that were asked to leave meanwhile. Raises NotReached after start_timeout.
    """
    settings = link.settings
    start = last_log = link.machine.monotonic()
    # A peer that took part before does not wait, since some expected peers may have finished. In lockstep
    # modes it does wait if its session is new, because all new sessions must start together.
    skips_wait = link.engine.returning and (link.engine.restored or settings.paced)
    expected = set() if skips_wait else set(settings.expect) - {link.name}
    if settings.watched is not None:  # on a graph, we subscribe to the cards of our neighbours only
        expected &= settings.watched
    while missing := sorted(expected - link.roster.online_with_card()):
        if left := expected & link.roster.left_before_training():
            expected -= left
            continue
        _refuse_mismatch(link)  # an expected peer may have left again because of a mismatch
        now = link.machine.monotonic()
        if now - start > settings.start_timeout:
            raise NotReached(
                f"peer {link.name}: {', '.join(missing)} did not come online within "
                f"{settings.start_timeout:g} s; start them, or raise start_timeout"
            )
        if now - last_log >= WAIT_LOG_INTERVAL:
            last_log = now
            _log.info(
                "peer %s waits for %s (%.0f of %g s)",
                link.name, ", ".join(missing), now - start, settings.start_timeout,
            )  # fmt: skip
        await link.next_turn()
    if not expected:
        await asyncio.sleep(10 * settings.tick)  # let retained cards arrive


async def _check_name(link: Link) -> int:
    """Return the generation to join with; raise PeerError if another device has the name.

    Publishes a probe on our own status topic: the broker delivers a retained status before the probe, and a
    device that is online under the name answers with its status.

    This device is new if it has never joined under the name. If it has, `link.generation` is its generation,
    and a higher one under the name shows that another device has replaced it since. An answer from one of our
    own sessions shows that another process runs on a copy of our checkpoint.
    """
    probe = Status("offline", link.session, reason="asks whether its name is free")
    deadline = link.machine.monotonic() + link.engine.limits.name_grace
    is_new_device, may_replace = not link.engine.history.claimed, link.settings.replace
    own_sessions, copy_answers = (link.session, *link.engine.history.sessions), 0
    while True:
        link.name_in_use = False
        await link.send_status(probe, retain=False)
        with contextlib.suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it can lose a cancellation, and a peer asked to leave would stay.
            async with asyncio.timeout(max(0.0, deadline - link.machine.monotonic())):
                await link.probe_delivered.wait()
        await asyncio.sleep(2 * link.settings.tick)  # for the answer of a device that is online
        status = link.status_under_our_name
        highest_seen = max(link.highest_generation, 1 if status is None else status.generation)
        was_replaced = not is_new_device and highest_seen > link.generation
        if was_replaced and not may_replace:
            raise Replaced(link.name, link.settings.swarm)
        is_own_session = status is not None and status.session in own_sessions
        is_copy = is_own_session and link.name_in_use
        copy_answers = copy_answers + 1 if is_copy else 0
        if status is None or status.state == "left" or (is_own_session and not is_copy):
            # No other device has the name now.
            if was_replaced:
                return _replacing_generation(link, highest_seen)
            free_generation = max(link.generation, highest_seen)
            # The device that we replace may have used that number, and the broker lost what it published.
            may_be_used = status is None and is_new_device and may_replace
            return free_generation + 1 if may_be_used else free_generation
        if not is_new_device and status.generation < link.generation:
            return link.generation  # the status is of a device that ours has replaced
        # One answer that looks like a copy's may be a late status of our own, from before a crash.
        if may_replace and (is_new_device or was_replaced or copy_answers > 1):
            return _replacing_generation(link, highest_seen)
        if status.state == "offline":
            if not is_new_device:
                return link.generation  # we had the name before, and no device has replaced us
            if link.dead_session == status.session:
                return highest_seen  # the other device's session was declared dead
        if link.machine.monotonic() > deadline or status.state == "offline":
            raise PeerError(_name_taken(link, status, is_copy=is_copy))
        link.probe_delivered.clear()


def _replacing_generation(link: Link, highest_seen: int) -> int:
    """Return the generation with which to replace another device of our name.

    highest_seen: the highest generation of any device of our name.
    """
    if link.engine.restored:  # other peers gave up our session when the other device joined
        raise SessionOver("another device has used its name meanwhile")
    _log.warning("peer %s: replaces another device of the same name", link.name)
    return highest_seen + 1


def _name_taken(link: Link, status: Status, *, is_copy: bool) -> str:
    """Return the error text for a name that another device has; status: the other device's.

    is_copy: whether the other device has a copy of our checkpoint.
    """
    location = f"in swarm {link.settings.swarm!r} (session {status.session})"
    has_key = link.settings.trust == "swarm"
    if is_copy:
        fix = "enrol it" if has_key else "join"
        return (
            f"peer {link.name}: the name is already online {location}, from a copy of this device's files: "
            f"stop the other device, or delete the files here and {fix} under another name, or use "
            "--replace if this device replaces it"
        )
    if status.state == "online":
        fix = "give each device an enrolment of its own" if has_key else "choose another name"
        return (
            f"peer {link.name}: the name is already online {location}; {fix}, stop the other device, or use "
            "--replace if this device replaces it"
        )
    return (
        f"peer {link.name}: the name belongs to a device that is offline {location} and may come back; start "
        "that device again, with its checkpoint; or use --replace if this device replaces it; or declare it "
        "dead with gossamer forget"
    )


def _refuse_late_join(link: Link, others_are_ahead: bool) -> None:
    """Raise PeerError if other peers already train in a lockstep mode (rounds or server)."""
    if not link.settings.paced and not link.engine.restored and others_are_ahead:
        raise PeerError(
            f"peer {link.name}: swarm {link.settings.swarm!r} is already training in "
            f"{link.settings.mode} mode, which cannot be joined midway; use async mode, or start together"
        )


def _refuse_mismatch(link: Link) -> None:
    """Raise PeerError if the models or settings of a peer that joined before us, or that we expect, do not
    match ours. So of two such peers the later one fails, or both if they expect each other."""
    for (other, _model_or_setting), difference in link.roster.mismatches.items():
        since = link.roster.session_start(other)
        came_first = since is not None and (since, other) < (link.session_began, link.name)
        if came_first or other in link.settings.expect:
            raise PeerError(f"peer {link.name}: cannot average with peer {other}: {difference}")


# --- leaving -----------------------------------------------------------------------------------------

HAND_OVER_SHARE = 0.8
"""Share of leave_timeout for handing over mass; the rest is for publishing the goodbye."""


class Settling:
    """After training: reach agreement with the neighbours, then wait until all peers are done and have
    acknowledged our transfers.

    The methods are called in the order `settle`, `confirm_presence`, `keep_pushing`, `wait_for_transfers`:
    the first in the state SETTLING of lifecycle.py, the others in the state DONE.
    """

    def __init__(self, link: Link):
        self._link, self._engine, self._settings = link, link.engine, link.settings
        self._deadline: float | None = None
        """The end of settle_timeout for `settle` and `keep_pushing` together; see `_push_until`."""
        self.timed_out = False

    async def settle(self) -> None:
        """Push until the received values agree with ours, or settle_timeout is over."""
        if not await self._push_until(self._has_settled):
            self.timed_out = True
            _log.warning(
                "peer %s: stopped settling after %g s without agreement",
                self._link.name, self._settings.settle_timeout,
            )  # fmt: skip

    async def confirm_presence(self) -> None:
        """Wait until our own status is delivered back by the broker, or settle_timeout is over.

        Without that check, a peer that had lost its connection would see no other peers and end too early.
        """
        deadline = self._now() + self._settings.settle_timeout
        while not self._link.phase_is_confirmed and self._now() < deadline:
            await self._link.next_turn()
        await self._link.wait_for_engine()

    async def keep_pushing(self) -> bool:
        """Push until all peers are done; return False if we must settle again.

        We must if late mass has moved our values away from those of others: from a peer that was offline, or
        our own, taken back because its receiver was given up.
        """
        if self.timed_out:
            return True
        # Other peers may still need our values to reach agreement.
        if not await self._push_until(self._all_done_or_lost_agreement):
            self.timed_out = True
            return True
        # Agreement may have been lost and reached again meanwhile: then not all peers are done yet.
        return not await self._lost_agreement() and self._link.all_done()

    async def wait_for_transfers(self) -> None:
        """Wait until no transfer is open and all peers are done, or settle_timeout is over."""
        link = self._link
        deadline = self._now() + self._settings.settle_timeout
        if link.view.open_transfers or not link.all_done():
            _log.info(
                "peer %s has stopped averaging; it waits until all peers are done and have acknowledged its "
                "transfers (%d are open)",
                link.name, link.view.open_transfers,
            )  # fmt: skip
        while link.view.open_transfers or not link.all_done():
            if self._now() >= deadline:
                others = ", ".join(sorted(link.roster.offline_unfinished()))
                count = link.view.open_transfers
                taken_back = (
                    f"it takes back the mass of {count} transfers that were not acknowledged"
                )
                _log.warning(
                    "peer %s: stops waiting for %s%s",
                    link.name, others or "the other peers", f"; {taken_back}" if count else "",
                )  # fmt: skip
                return
            await link.next_turn()

    async def _push_until(self, reached: Callable[[], Awaitable[bool]]) -> bool:
        """Push without training until `reached` returns True; return False if settle_timeout is over first.

        The timeout starts again while another peer trains.
        """
        link, tick = self._link, self._settings.tick
        if self._deadline is None:
            self._deadline = self._now() + self._settings.settle_timeout
        while not await reached():
            if self._now() >= self._deadline:
                return False
            await link.worker.run(self._engine.request_push)
            link.wake()
            await link.next_turn()
            # Push less often while others train: processing a push takes time from their training.
            others_train = link.others_train()
            if others_train:
                self._deadline = self._now() + self._settings.settle_timeout
            await asyncio.sleep(10 * tick if others_train else tick / 5)
        return True

    def _now(self) -> float:
        return self._link.machine.monotonic()

    async def _has_settled(self) -> bool:
        """Return whether no other peer trains, and the last received values agree with ours."""
        link = self._link
        if link.view.waiting or link.others_train():
            return False  # our own weight must count first, and the others finish training
        return not link.roster.online() or await self._values_agree(self._settings.settle_tolerance)

    async def _lost_agreement(self) -> bool:
        """Return whether the last received values differ from ours by more than three tolerances."""
        return bool(self._link.roster.online()) and not await self._values_agree(
            3 * self._settings.settle_tolerance
        )

    async def _values_agree(self, tolerance: float) -> bool:
        """Return whether the last received values are within a relative distance of ours."""
        engine = self._engine
        return await self._link.worker.run(engine.agreement.reached, engine.gossiper, tolerance)

    async def _all_done_or_lost_agreement(self) -> bool:
        return self._link.all_done() or await self._lost_agreement()


async def hand_over(link: Link) -> None:
    """Give all mass to neighbours before leaving early.

    A peer that has finished averaging keeps its mass, and only waits until its transfers are acknowledged.
    """
    run, timeout = link.worker.run, HAND_OVER_SHARE * link.settings.leave_timeout
    gossiper, has_finished = link.engine.gossiper, False
    try:
        async with asyncio.timeout(timeout):
            has_finished = await run(lambda: gossiper.closed)
            while not await run(link.engine.hand_over):
                link.wake()
                await link.next_turn()
    except TimeoutError:
        done = "transfers were acknowledged" if has_finished else "mass was handed over"
        _log.warning(
            "peer %s: not all its %s within %g s; it keeps the mass of the others",
            link.name,
            done,
            timeout,
        )
        return
    if not has_finished and not await run(gossiper.is_drained):
        _log.info("peer %s: keeps its mass: no neighbour stays that could take it", link.name)


async def deliver_goodbye(link: Link, goodbye: Status, seconds: float) -> tuple[str, list[Event]]:
    """Publish our goodbye, within so many seconds.

    Returns why the broker did not accept it (empty if it did), and the presence events of other peers, such
    as their goodbyes, that the broker delivered before ours.
    """
    earlier_events: list[Event] = []
    is_published = False
    try:
        async with asyncio.timeout(seconds):
            await _publish_goodbye(link, goodbye)
            is_published = True
            earlier_events = await link.earlier_goodbyes()
    except (TimeoutError, TransportError, TrustError) as error:
        if not is_published:
            return str(error) or link.transport.connection.cause or "it does not answer", []
        # Ours was not delivered back: whatever was delivered came before it.
        earlier_events = link.take_events()
    return "", earlier_events


async def _publish_goodbye(link: Link, goodbye: Status) -> None:
    """Publish a goodbye; while it is too large, drop the older half of its statement and try again.

    The statement has a row for each sender and partial model: whether we have accepted the last transfer, in
    case our acknowledgement was lost. Rows are in the order in which their senders were heard
    last, and those heard long ago are the least likely to need theirs still.
    """
    while True:
        try:
            return await link.publish_goodbye(goodbye)
        except (TransportError, TrustError) as error:
            rows = goodbye.statement
            # The security layer calls a status that is too large for it malformed.
            if not rows or error.cause not in ("too-large", "malformed"):
                raise
            newest_rows = rows[(len(rows) + 1) // 2 :]
            _log.warning(
                "peer %s: its goodbye is too large (%s); of %d rows on received transfers, it keeps %d",
                link.name, error, len(rows), len(newest_rows),
            )  # fmt: skip
            goodbye = replace(goodbye, statement=newest_rows)
