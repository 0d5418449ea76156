"""Watches a swarm from outside: what its peers publish about themselves, as one record per peer.

    async with Observer(lambda: mqtt_transport(address, "observer-1"), "garden") as observer:
        await observer.settle()                    # what the broker has retained
        print(observer.swarm.peers)
        async for change in observer:              # from now on, until the block is left
            print(change.event or change.peer)

An observer reads cards, statuses, summaries, death notices and revocations. It publishes nothing, and has no
card, no status and no last will, so no peer knows of it or waits for it. `SwarmState` does the work without
IO: it takes messages and times, and keeps the records.

With trust, all of these are signed. Given the owner's public key, the observer checks that their peers are
members, as peers do. Without it, it only checks that each is signed by the key in its peer's name.
`ObservedPeer.checked` says which.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from gossamer import __version__

from ..gossip import Transport, topics
from ..gossip.security import (
    Death,
    Edition,
    Register,
    SummaryHead,
    TrustError,
    read_death,
    read_published,
    revocation_topic,
    signed,
)
from .presence import LEASE_MARGIN, Card, Phase, Status, read_card, read_status
from .summary import Summary, read_summary

KINDS: tuple[Literal["summary", "death", "card", "status"], ...] = (
    "summary", "death", "card", "status",
)  # fmt: skip
"""The topics of a peer that an observer reads, in the order of its subscriptions: summaries and death notices
tell since when a retained status holds."""
MAX_OBSERVED = 4096
"""Most peers that an observer keeps: any client of the broker can publish under any number of names."""
MAX_TIMELINE = 1000
"""Most events of the timeline; the oldest are dropped."""
MAX_CHANGES = 10_000
"""Most changes that wait for an iteration; the oldest are dropped."""
TICK = 1.0
"""Seconds between two checks whether a peer's lease or invitation is over."""
QUIET = 0.5
"""Seconds without a message after which all retained messages are taken to have arrived."""

REVOCATION = "revocation"
"""The key in _Entry.problems under which it is noted that the owner has revoked a peer."""

Presence: TypeAlias = Literal["online", "offline", "lost", "left", "dead", "unknown"]
"""Whether a peer takes part. online. offline: its connection was lost, and its lease still runs. lost:
nothing was heard of it for longer than its lease, so the other peers have given it up. left: with a goodbye.
dead: an operator or its supervisor has declared its session over. unknown: it has no status."""

Authenticity: TypeAlias = Literal["unsigned", "signed", "member", "refused", "revoked"]
"""What is known about who wrote a peer's messages. unsigned: nothing, the swarm has no trust. signed: the key
in the peer's name has signed them; whether the owner invited that peer could not be checked. member: the
owner did. refused: a message was not genuine or cannot be read, or the peer is not a member;
`ObservedPeer.problem` says which, and the record shows what was known before. revoked: the owner has excluded
the peer since."""


@dataclass(frozen=True)
class TimelineEvent:
    """Something that happened in the swarm.

    time: by the clock of whoever noticed it: the peer, or the observer.
    kind: "joined", "offline", "back", "lost", "left", "dead", "refused", and those of summary.PeerEvent.
    peer: whom it happened to. text: what happened, to follow the peer's name.
    other: the other peer, if one is concerned.
    """

    time: float
    kind: str
    peer: str
    text: str
    other: str = ""


@dataclass(frozen=True)
class ObservedPeer:
    """What is known of one peer.

    name: with trust, label@id. presence: see Presence. since: when that began, in seconds since 1970; None if
        it is not known. reason: why it left or is offline, in its own words or those of the notice.
    last_heard: when it last gave a sign of life: when a message of it arrived that was not retained, or else
        the time of its retained summary, by the peer's own clock. None if there is neither.
    checked, problem: who wrote this, and what is wrong with what it published last; see Authenticity.
    lease: seconds after which the others give it up if it is silent.
    session, joined, samples, models, settings: by its card: its session, when that began, its training
        samples, its partial models, and the settings that must be the same on all peers.
    counts: the models in which its weight counts, and for how many rounds, by its status.
    phase, leaving: by its status.
    summary: its last summary; None if it has published none of this version's format.
    """

    name: str
    presence: Presence = "unknown"
    since: float | None = None
    reason: str = ""
    last_heard: float | None = None
    checked: Authenticity = "unsigned"
    problem: str = ""
    session: str = ""
    joined: float | None = None
    samples: int = 0
    lease: float = 600.0
    models: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    phase: Phase = "starting"
    leaving: bool = False
    summary: Summary | None = None

    @property
    def is_present(self) -> bool:
        """Whether it takes part: online, or offline within its lease."""
        return self.presence in ("online", "offline")

    @property
    def round(self) -> int | None:
        """Rounds that it has trained, by its summary."""
        return None if self.summary is None else self.summary.round

    @property
    def accuracy(self) -> float | None:
        """Its last test accuracy, by its summary."""
        return None if self.summary is None else self.summary.metrics.get("accuracy")


@dataclass(frozen=True)
class ObservedModel:
    """What is known of one partial model, from all peers that are present.

    members: the peers that share it. counting: those whose weight counts.
    disagreement: the largest that a member reports; None if none reports one.
    weights: the least and the most push-sum weight that a member holds; None without summaries.
    """

    name: str
    members: tuple[str, ...]
    counting: tuple[str, ...]
    disagreement: float | None = None
    weights: tuple[float, float] | None = None


@dataclass(frozen=True)
class Change:
    """Something new: the name of the peer whose record has changed, or an event, or both."""

    peer: str
    event: TimelineEvent | None = None


@dataclass
class _Entry:
    """What was received of one peer, before it becomes a record."""

    first_seen: float
    card: Card | None = None
    status: Status | None = None
    status_since: float | None = None
    """When the state in the status began; None if that is not known: the status was retained."""
    summary: Summary | None = None
    summary_edition: Edition | None = None
    death: Death | None = None
    last_heard: float | None = None
    was_signed: bool = False
    is_admitted: bool = False
    """Whether the owner has invited the peer, by its card or goodbye."""
    early_status: bytes = b""
    """A signed status that came before the card that it is checked with."""
    problems: dict[str, str] = field(default_factory=dict)
    """What is wrong with the last message of each kind, and with the invitation; see also REVOCATION."""
    joined_session: str = ""
    """The session whose joining is in the timeline."""


class SwarmState:
    """The records of a swarm's peers, from the messages that an observer receives. No IO.

    owner: the public key of the swarm's owner, to check who is a member.
    """

    def __init__(self, swarm: str, owner: bytes | None = None) -> None:
        topics.check_name("swarm", swarm)
        self.swarm = swarm
        self.peers: dict[str, ObservedPeer] = {}
        """The records of all peers, by name, in the order in which they were first seen. Each is replaced
        when it changes."""
        self.timeline: deque[TimelineEvent] = deque(maxlen=MAX_TIMELINE)
        """What happened, in the order in which it was noticed."""
        self.is_signed = False
        """Whether any message was signed: the swarm has trust."""
        self.summaries = 0
        """Number of summaries received; 0 if all peers run a version without them."""
        self._register = None if owner is None else Register(swarm, owner)
        self._entries: dict[str, _Entry] = {}
        self._changes: list[Change] = []

    @property
    def models(self) -> dict[str, ObservedModel]:
        """The partial models of all peers that are present, by name."""
        present = [peer for peer in self.peers.values() if peer.is_present]
        names = sorted({model for peer in present for model in peer.models})
        return {name: _observed_model(name, present) for name in names}

    def as_record(self) -> dict[str, Any]:
        """Return the peers, their partial models and the timeline as plain data, for JSON."""
        return {
            "swarm": self.swarm,
            "signed": self.is_signed,
            "peers": {name: asdict(peer) for name, peer in sorted(self.peers.items())},
            "models": {name: asdict(model) for name, model in self.models.items()},
            "timeline": [asdict(event) for event in self.timeline],
        }

    # --- what the broker delivers ---------------------------------------------------------------

    def receive(
        self, topic: str, payload: bytes, now: float, *, retained: bool = False
    ) -> list[Change]:
        """Process a message and return what has changed: only a `problem` if the message is not genuine.

        now: the wall clock. retained: the broker had the message before we subscribed.
        """
        if topic == revocation_topic(self.swarm):
            self._receive_revocations(payload, now)
            return self._take_changes()
        try:
            parsed = topics.parse(topic)
        except topics.TopicError:
            return []
        peer, kind = parsed.peer, parsed.kind
        if parsed.swarm != self.swarm or kind not in KINDS:
            return []
        entry = self._entries.get(peer)
        if entry is None:
            if not payload or len(self._entries) >= MAX_OBSERVED:
                return []
            entry = _Entry(now)
        self._receive(peer, entry, kind, payload, now, retained)
        if entry != _Entry(entry.first_seen):  # else it was a probe whether a name is free
            self._entries[peer] = entry
            self._check_revoked(peer, entry, now)
            self._update(peer, entry, now)
        return self._take_changes()

    def tick(self, now: float) -> list[Change]:
        """Return what has changed because time has passed: peers whose lease or invitation is over."""
        expired = [] if self._register is None else self._register.expire(now)
        for peer in expired:
            text = "its invitation has expired: ask the swarm's owner for a new one"
            self._refuse(peer, self._entries[peer], "invitation", text, now)
        for peer, entry in self._entries.items():
            self._update(peer, entry, now)
        return self._take_changes()

    def _take_changes(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def _receive(
        self, peer: str, entry: _Entry, kind: str, payload: bytes, now: float, retained: bool
    ) -> None:
        if not payload:  # a cleared topic; a peer that leaves clears its card
            return
        try:
            body, edition = self._verify(peer, entry, kind, payload, now)
            if not self._apply(peer, entry, kind, body, edition, now, retained):
                return
        except TrustError as error:
            if error.cause != "stale":  # authentic, but a newer one is known
                self._refuse(peer, entry, kind, f"its {kind} is refused: {error}", now)
            return
        entry.was_signed = entry.was_signed or payload.startswith(signed.MAGIC)
        entry.problems.pop(kind, None)
        if not retained and kind != "death":
            entry.last_heard = now
        if kind == "card" and entry.early_status:
            payload, entry.early_status = entry.early_status, b""
            self._receive(peer, entry, "status", payload, now, retained=True)

    def _apply(
        self,
        peer: str,
        entry: _Entry,
        kind: str,
        body: bytes,
        edition: Edition | None,
        now: float,
        retained: bool,
    ) -> bool:
        """Keep a genuine message; return False if it cannot be read, or is of no use."""
        match kind:
            case "card":
                message = entry.card = read_card(body) or entry.card
            case "status":
                message = read_status(body)
                if message is not None and not _apply_status(entry, message, now, retained):
                    return False
            case "summary":
                message = read_summary(body)
                if message is not None and not self._apply_summary(
                    peer, entry, message, edition, now
                ):
                    return False
            case _:
                message = entry.death = Death.decode(body)
        if message is None:
            text = f"its {kind} cannot be read: it runs another version than {__version__}"
            self._refuse(peer, entry, kind, text, now)
        return message is not None

    def _verify(
        self, peer: str, entry: _Entry, kind: str, payload: bytes, now: float
    ) -> tuple[bytes, Edition | None]:
        """Return the body of a message, and the edition of a summary; TrustError if it is not genuine."""
        register = self._register
        if not payload.startswith(signed.MAGIC):
            if register is not None or entry.was_signed:
                raise TrustError("malformed", "it is not signed")
            return payload, None
        self.is_signed = True
        if kind == "death":
            if register is None:
                raise TrustError("malformed", "it cannot be checked without the owner's public key")
            return read_death(payload, register.owner, self.swarm, peer), None
        if kind == "summary":
            head, body = read_published(self.swarm, peer, "summary", payload)
            return body, signed.parse(SummaryHead, head, f"a summary of {peer}").edition
        if kind == "card":
            if register is None:
                return read_published(self.swarm, peer, "card", payload)[1], None
            member, body = register.read_card(peer, payload, now)
            register.add(member)
            entry.is_admitted = True
            return body, None
        if register is not None:
            try:
                body = register.read_status(peer, payload, now)[1]
                entry.is_admitted = True
                return body, None
            except TrustError as error:
                if error.cause != "unknown-sender":
                    raise
                # Its card has not arrived yet, or it joined with a ticket and has left: no "member" yet.
                entry.early_status = payload
        return read_published(self.swarm, peer, "status", payload)[1], None

    def _refuse(self, peer: str, entry: _Entry, kind: str, problem: str, now: float) -> None:
        """Keep what is wrong with a peer's last message of a kind; put it in the timeline if it is new."""
        if entry.problems.get(kind) != problem:
            entry.problems[kind] = problem
            self._note(TimelineEvent(now, "refused", peer, problem))

    def _apply_summary(
        self, peer: str, entry: _Entry, summary: Summary, edition: Edition | None, now: float
    ) -> bool:
        """Keep a summary, and put its new events in the timeline; return False if a newer one is known."""
        before, known = entry.summary, entry.summary_edition
        if edition is not None and known is not None and edition.precedes(known):
            return False
        entry.summary, entry.summary_edition = summary, edition
        # By the peer's clock, which may be wrong; if not retained, `_receive` sets the time of its arrival.
        entry.last_heard = max(min(summary.time, now), entry.last_heard or 0.0)
        self.summaries += 1
        noted = () if before is None else before.events
        for event in summary.events:
            if event not in noted:
                self._note(TimelineEvent(event.time, event.kind, peer, event.text, event.peer))
        return True

    def _receive_revocations(self, payload: bytes, now: float) -> None:
        if self._register is None or not payload:
            return
        try:
            revoked = self._register.revoke(payload)
        except TrustError:
            return
        for peer, entry in self._entries.items():
            self._check_revoked(peer, entry, now, is_listed=peer in revoked)
            self._update(peer, entry, now)

    def _check_revoked(
        self, peer: str, entry: _Entry, now: float, *, is_listed: bool = False
    ) -> None:
        """Note a peer that the owner has revoked; is_listed: a new list names it, for the first time."""
        register, text = self._register, "the swarm's owner has revoked it"
        if is_listed:
            self._refuse(peer, entry, REVOCATION, text, now)
        elif register is not None and register.revocations.includes(peer, ""):
            entry.problems[REVOCATION] = text

    # --- records --------------------------------------------------------------------------------

    def _update(self, peer: str, entry: _Entry, now: float) -> None:
        """Replace a peer's record if it has changed, and note what happened."""
        before = self.peers.get(peer)
        record = _record(peer, entry, now)
        if record == before:
            return
        self.peers[peer] = record
        card = entry.card
        if card is not None and entry.joined_session != card.session and record.is_present:
            entry.joined_session = card.session
            self._note(TimelineEvent(card.since, "joined", peer, f"joined {self.swarm}"))
        if before is None or before.presence != record.presence:
            self._note_presence(before, record, now)
        self._changes.append(Change(peer))

    def _note_presence(self, before: ObservedPeer | None, record: ObservedPeer, now: float) -> None:
        """Put a change of presence in the timeline, but not that a peer is online when it is first seen."""
        texts: dict[Presence, str] = {
            "offline": f"is offline: {record.reason}",
            "lost": f"is given up: {record.reason}",
            "left": f"left: {record.reason or 'no reason given'}",
            "dead": f"was declared dead: {record.reason or 'no reason given'}",
        }
        kind, when = record.presence, record.since if record.since is not None else now
        if kind in texts:
            self._note(TimelineEvent(when, kind, record.name, texts[kind]))
        elif kind == "online" and before is not None and before.presence in ("offline", "lost"):
            self._note(TimelineEvent(now, "back", record.name, "is online again"))

    def _note(self, event: TimelineEvent) -> None:
        """Put an event in the timeline."""
        self.timeline.append(event)
        self._changes.append(Change(event.peer, event))


def _apply_status(entry: _Entry, status: Status, now: float, retained: bool) -> bool:
    """Keep a status; return False if a newer one has made it obsolete."""
    before = entry.status
    known_sessions = {message.session for message in (entry.card, before) if message is not None}
    is_unknown = status.session not in known_sessions
    if status.state == "offline" and is_unknown and (known_sessions or not retained):
        return False  # a probe whether a name is free, or a late last will
    if before is not None and before.session == status.session:
        if before.state == "left" and status.state == "offline":
            return False  # killed while it disconnected: its last will comes after its goodbye
        if before.state == status.state:
            entry.status = status
            return True
    entry.status, entry.status_since = status, None if retained else now
    return True


def _record(peer: str, entry: _Entry, now: float) -> ObservedPeer:
    """Return a peer's record as of now."""
    card, status = entry.card, entry.status
    session = status.session if status is not None else card.session if card is not None else ""
    presence, since, reason = _presence(entry, now)
    record = ObservedPeer(
        peer, presence, since, reason, entry.last_heard, _authenticity(entry),
        "; ".join(entry.problems.values()), session, summary=entry.summary,
    )  # fmt: skip
    if card is not None:
        record = replace(
            record, joined=card.since, samples=card.samples, lease=card.lease,
            models=tuple(card.models), settings=card.agree,
        )  # fmt: skip
    if status is not None:
        counts, phase = status.counts, status.phase
        if status.state == "offline" and entry.summary is not None:  # a last will has neither
            models = entry.summary.models.items()
            counts = {name: model.rounds for name, model in models if model.counts}
            phase = entry.summary.phase
        record = replace(record, counts=counts, phase=phase, leaving=status.leaving)
    return record


def _authenticity(entry: _Entry) -> Authenticity:
    if REVOCATION in entry.problems:
        return "revoked"
    if entry.problems:
        return "refused"
    if not entry.was_signed:
        return "unsigned"
    return "member" if entry.is_admitted else "signed"


def _presence(entry: _Entry, now: float) -> tuple[Presence, float | None, str]:
    """Return whether a peer takes part, since when, and, if it does not, why."""
    card, status, death, since = entry.card, entry.status, entry.death, entry.status_since
    if status is None:
        return "unknown", None, ""
    if status.state == "left":
        ended = None if entry.summary is None else entry.summary.ended
        return "left", ended.time if ended is not None and since is None else since, status.reason
    if death is not None and death.session == status.session:
        by = f" (declared by {death.by})" if death.by else ""
        return "dead", death.time, f"{death.reason or 'no reason given'}{by}"
    lease = ObservedPeer.lease if card is None else card.lease
    heard = entry.last_heard
    if now - (entry.first_seen if heard is None else heard) > LEASE_MARGIN * lease:
        return "lost", heard, f"silent for longer than its lease of {lease:g} s"
    if status.state == "offline":
        return "offline", since if since is not None else heard, status.reason or "connection lost"
    return "online", None if card is None else card.since, ""


def _observed_model(name: str, present: list[ObservedPeer]) -> ObservedModel:
    members = [peer for peer in present if name in peer.models]
    summaries = [s.models[name] for peer in members if (s := peer.summary) and name in s.models]
    distances = [summary.disagreement for summary in summaries if summary.disagreement is not None]
    weights = [summary.weight for summary in summaries]
    return ObservedModel(
        name,
        tuple(peer.name for peer in members),
        tuple(peer.name for peer in members if name in peer.counts),
        max(distances, default=None),
        (min(weights), max(weights)) if weights else None,
    )


class Observer:
    """Keeps a `SwarmState` up to date over a connection to a broker; see the module's docstring.

    connect: makes a transport without a last will, not connected yet.
    owner: the public key of the swarm's owner, as bytes (see gossip.security.read_public).
    """

    def __init__(
        self, connect: Callable[[], Transport], swarm: str, *, owner: bytes | None = None
    ) -> None:
        self.swarm = SwarmState(swarm, owner)
        self._connect = connect
        self._changes: asyncio.Queue[Change | None] = asyncio.Queue()
        self._received = 0
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        self._transport = await self._connect().__aenter__()
        try:
            name = self.swarm.swarm
            for pattern in (*(topics.of_all(name, kind) for kind in KINDS), revocation_topic(name)):
                await self._transport.subscribe(pattern)
        except BaseException as error:
            await self._transport.__aexit__(type(error), error, error.__traceback__)
            raise
        self._task = asyncio.create_task(self._receive(), name=f"observer of {name}")
        self._ticks = asyncio.create_task(self._tick(), name=f"observer's clock of {name}")
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in (self._task, self._ticks):
            task.cancel()
        await asyncio.gather(self._task, self._ticks, return_exceptions=True)
        await self._transport.__aexit__(error_type, error, trace)

    @property
    def connected(self) -> bool:
        """Whether the broker is connected now; after a loss the transport reconnects by itself."""
        return self._transport.connection.state == "connected"

    @property
    def connection_problem(self) -> str:
        """Why the connection was lost; empty while the broker is connected."""
        return "" if self.connected else self._transport.connection.cause

    async def settle(self, quiet: float = QUIET, within: float = 10.0) -> None:
        """Wait until the retained messages have arrived: until nothing has come for `quiet` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                before = -1
                while before != self._received and not self._task.done():
                    before = self._received
                    await asyncio.sleep(quiet)
        self.check()

    def check(self) -> None:
        """Raise the connection's error if it has failed for good: the transport has stopped reconnecting."""
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[Change]:
        """Yield every change since the last one that was yielded; raises what `check` does."""
        while True:
            change = await self._changes.get()
            if change is None:
                self.check()
                return
            yield change

    async def _receive(self) -> None:
        try:
            async for topic, payload, retained in self._transport.messages():
                self._received += 1
                payload, now = bytes(payload), time.time()
                self._add(self.swarm.receive(topic, payload, now, retained=retained))
        except Exception as error:
            self._error = error
        finally:
            self._changes.put_nowait(None)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._add(self.swarm.tick(time.time()))

    def _add(self, changes: list[Change]) -> None:
        for change in changes:
            if self._changes.qsize() >= MAX_CHANGES:  # nobody iterates over them
                self._changes.get_nowait()
            self._changes.put_nowait(change)
