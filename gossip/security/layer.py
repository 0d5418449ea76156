"""All of a peer's security behind one object: it signs what the peer publishes and checks what it receives.

    security = SwarmSecurity(identity, admission, owner, swarm="garden", session=…, models=…, since=…)
    publish(card topic, security.card(body))             # body: the card's content, from presence
    for event in security.receive(topic, payload): …     # genuine cards and statuses, for presence
    packet = security.seal(receiver, model, chunk)       # before a chunk is published
    opened = security.open(model, packet)                # before chunks are reassembled
    packets, events = security.tick()                    # control packets, for the receivers' inboxes

A `SecurityLayer` is either a `SwarmSecurity`, which uses keys, or a `NullSecurity`, which accepts everything.
`Intake` turns received packets into checked messages. No IO. *Presence* (peer/presence.py) is the part of a
peer that keeps track of other peers from their cards and statuses.

Every packet and every signed status says which revocation list its sender has. Two peers exchange no values
until both have the same list, and the peer with the newer list sends it to the other; the owner's signature
proves it. So a peer to which the broker does not deliver the list gets it from the first member it talks to.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, ParamSpec, TypeAlias, TypeVar

from gossamer.logs import log_repeated

from .. import topics
from ..chunks import HEADER_BYTES, Reassembler
from ..wire import Buffer, Message, WireError, decode, require_schema
from . import signed
from .channels import MAX_NAMES, OVERHEAD, REPLY, REQUEST, Keyring
from .guards import Guards
from .identity import Identity, MisdatedCard, TrustError
from .invitation import CLOCK_SKEW, Admission, Revocations, check, revocation_topic
from .members import (
    MAX_ASKED,
    SUMMARY_OVERHEAD,
    CardHead,
    EarlyStatuses,
    MisdatedCards,
    NameClaim,
    Register,
    ReplyMonitor,
    StatusHead,
    SummaryHead,
    read_death,
    sign_card,
    sign_status,
    sign_summary,
)

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

CARD_INTERVAL: Final = 12 * 3600.0
"""Seconds after which our card is issued again: well before `MAX_CARD_AGE`, when others refuse it."""
EXCHANGE_INTERVAL: Final = 24 * 3600.0
"""Seconds between renewals of our exchange key: a stolen key opens at most that much recorded traffic."""
HARMLESS_CAUSES: Final = ("behind", "ahead", "unanswered", "stale")
"""Causes of a refusal that are counted, and logged for debugging only, because they belong to every restart:
revocation lists take a moment to spread, a crashed peer leaves its retained status at the broker, the broker
repeats what it has retained, and others may still send to the keys of a session that has ended."""


@dataclass(frozen=True, slots=True)
class SecurityEvent:
    """Something that presence must handle.

    kind: card, status: a genuine card or status of `peer`. unconfirmed-status: an authentic status under our
    own name that may be a replay: its incarnation may have ended (see `NameClaim`). death: a death notice
    (see `Death.decode`). removed: `peer` is no longer a member; if that is ourselves, the body says
    why, "revoked" or "expired". reissue-card, reissue-status: publish our own card or status again.
    """

    kind: Literal[
        "card", "status", "unconfirmed-status", "death", "removed", "reissue-card", "reissue-status"
    ]
    peer: str
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened packet: its sender, the sender's session, and the chunk in it."""

    sender: str
    session: str
    packet: Buffer


class NullSecurity:
    """No security: accepts everything, so that anybody with access to the broker can read and forge."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.overhead = 0
        """Bytes that sealing adds to a packet."""
        self.statement_overhead = 0
        """Bytes that signing adds to a summary, at most."""
        self.largest_list = 0
        """Size in bytes of the largest revocation list that a packet may contain."""
        self.counters: Counter[str] = Counter()
        """Number of refusals, by cause."""

    def patterns(self) -> list[str]:
        return []

    def card(self, body: bytes) -> bytes:
        return body

    status = will = summary = card

    def receive(self, topic: str, payload: bytes) -> list[SecurityEvent]:
        """Return every card, status and death notice as an event."""
        parts = topics.parse(topic)
        if parts.kind not in ("card", "status", "death") or (parts.kind == "death" and not payload):
            return []
        return [SecurityEvent(parts.kind, parts.peer, payload)]

    def seal(self, receiver: str, model: str, packet: bytes) -> bytes | None:
        return packet

    def expects(self, model: str, packet: Buffer) -> bool:
        return True

    def open(self, model: str, packet: Buffer) -> Opened | None:
        return Opened("", "", packet)

    def is_genuine(self, opened: Opened, message: Message) -> bool:
        return True

    def set_models(self, models: Collection[str], former: Iterable[str] = ()) -> None:
        """Do nothing: every model is accepted."""

    def remove(self, peer: str, session: str) -> None:
        """Do nothing: there are no members."""

    def tick(self) -> tuple[list[tuple[str, str, bytes]], list[SecurityEvent]]:
        return [], []

    def end_session(self) -> None:
        """Do nothing: there are no keys."""

    def snapshot(self) -> dict[str, Any]:
        return {}


class SwarmSecurity:
    """The security of one incarnation of a peer, in a swarm whose owner decides who takes part.

    identity, admission: the peer's key and name, and its invitation.
    owner: the public key of the swarm's owner.
    session, since: as on the card that presence writes.
    models: the partial models that the peer implements.
    later_models: patterns of the names of partial models that may begin while it runs; see `set_models`.
    memory: the `snapshot` of the previous start: tickets' holders, the newest cards and revocation list, and
        the key of the session's masks.
    wall, clock: a wall clock (seconds since 1970) for expiry, and a monotonic clock for repetitions.
    max_names: the most peers that it can meet before it must be restarted.

    Raises TrustError if this peer's own invitation does not admit it.
    """

    def __init__(
        self,
        identity: Identity,
        admission: Admission,
        owner: bytes,
        *,
        swarm: str,
        session: str,
        models: Collection[str],
        since: float,
        later_models: Collection[str] = (),
        memory: dict[str, Any] | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        max_names: int = MAX_NAMES,
    ) -> None:
        self.identity, self.swarm = identity, swarm
        self.name, self.overhead = identity.name, OVERHEAD
        self.statement_overhead = SUMMARY_OVERHEAD
        self.largest_list = signed.MAX_BYTES
        self.counters: Counter[str] = Counter()
        self._admission, self._wall, self._clock = admission, wall, clock
        self._claims = check(admission, owner, swarm, identity.name, identity.public, wall())
        self._removal_reported = False
        memory = memory or {}
        self._signed_list: bytes = memory.get("revocations", b"")
        revocations = (
            Revocations.read(self._signed_list, owner, swarm)
            if self._signed_list
            else Revocations()
        )
        self.register = Register(
            swarm, owner, revocations=revocations,
            ticket_holders=memory.get("tickets"), editions=memory.get("editions"),
        )  # fmt: skip
        if self._is_revoked():
            raise TrustError("revoked", f"{self.name} was revoked: ask the swarm's owner")
        self._require_admission((*models, *later_models))
        self._since, self._session, self._models = since, session, frozenset(models)
        masks = memory.get("masks") or {}
        mask_key = masks["key"] if masks.get("session") == session else None
        self.keyring = Keyring(
            identity, owner, session, swarm, models, mask_key=mask_key, max_names=max_names
        )
        self.keyring.set_list(revocations.number, self._signed_list, clock())
        self._key_generated = (wall(), clock())
        """When our exchange key was generated, by both clocks: the monotonic clock stands still while a
        device sleeps, the wall clock can be set."""
        self._card_number = self._status_number = self._summary_number = 0
        """The numbers of our newest card, status and summary."""
        self._issued: float | None = None
        """When our newest card was issued."""
        self._former_issued = float("-inf")
        """When the newest card of an earlier incarnation of this peer, retained by the broker, was issued."""
        self._name_claim = NameClaim(self.keyring.incarnation)
        self._reply_monitor = ReplyMonitor(self.name)
        self._early_statuses, self._misdated_cards = EarlyStatuses(), MisdatedCards()

    def _is_revoked(self) -> bool:
        return self.register.revocations.includes(self.name, self._claims.number)

    def _require_admission(self, models: Iterable[str]) -> None:
        if refused := sorted(model for model in models if not self._claims.admits(model)):
            raise TrustError(
                "not-a-member",
                f"{self.name} implements {', '.join(refused)}, which invitation {self._claims.number} "
                "does not admit it to: ask the owner for one that does, or leave the model out",
            )

    def set_models(self, models: Collection[str], former: Iterable[str] = ()) -> None:
        """Implement other partial models from now on; packets of those before are still exchanged.

        former: further models that transfers may still be on their way for. Publish a new card afterwards.
        """
        self._require_admission(models)
        self._models = frozenset(models)
        self.keyring.add_models((*models, *former))

    # --- our own card and status ----------------------------------------------------------------

    def patterns(self) -> list[str]:
        """Return the topics to subscribe to besides those of presence and gossip."""
        return [revocation_topic(self.swarm)]

    def card(self, body: bytes) -> bytes:
        """Return our signed card, with our invitation. From now on the name counts as claimed."""
        self._name_claim.is_claimed = True
        self._card_number += 1
        self._issued = self._card_date()
        keyring, admission = self.keyring, self._admission
        head = CardHead(
            self._issued, keyring.incarnation, self._card_number, keyring.exchange, keyring.mask_public,
            self._session, self._since, self._models, admission.invitation, admission.endorsement,
        )  # fmt: skip
        return sign_card(self.identity, self.swarm, head, body)

    def _card_date(self) -> float:
        """Return the date for our next card: now, or just after our former card if the clock was set back.

        Other peers accept only cards newer than the one they have.
        """
        now = self._wall()
        later = self._former_issued + 0.001
        return later if now < later <= now + CLOCK_SKEW else now

    def card_due(self) -> bool:
        """Return True if our card should be issued again: it is old, or the clock was set since."""
        return self._issued is not None and abs(self._wall() - self._issued) >= CARD_INTERVAL

    def status(self, body: bytes) -> bytes:
        """Return our signed status, numbered above the previous one. A goodbye carries our invitation too."""
        self._status_number += 1
        head = self._status_head(self._status_number, answers=tuple(self._name_claim.others))
        if signed.state_of(body) == "left":
            head = replace(
                head, issued=self._wall(),
                invitation=self._admission.invitation, endorsement=self._admission.endorsement,
            )  # fmt: skip
        return sign_status(self.identity, self.swarm, head, body)

    def summary(self, body: bytes) -> bytes:
        """Return our signed summary, numbered above the previous one."""
        self._summary_number += 1
        head = SummaryHead(self._wall(), self.keyring.incarnation, self._summary_number)
        return sign_summary(self.identity, self.swarm, head, body)

    def will(self, body: bytes) -> bytes:
        """Return our signed last will, which the broker publishes if our connection is lost."""
        return sign_status(self.identity, self.swarm, self._status_head(0, will=True), body)

    def _status_head(self, number: int, **options: Any) -> StatusHead:
        list_number = self.register.revocations.number
        return StatusHead(self.keyring.incarnation, number, list_number, **options)

    # --- cards, statuses and lists of others ----------------------------------------------------

    def receive(self, topic: str, payload: bytes) -> list[SecurityEvent]:
        """Handle a card, status, death notice or revocation list; return the events for presence.

        A payload that is not genuine is counted and logged, and gives no event.
        """
        return self._checked(topic, self._receive, topic, payload) or []

    def _receive(self, topic: str, payload: bytes) -> list[SecurityEvent]:
        if topic == revocation_topic(self.swarm):
            return self._receive_revocations(payload)
        parts = topics.parse(topic)
        if parts.swarm != self.swarm:
            raise TrustError(
                "malformed", f"of swarm {parts.swarm!r}, but this peer is in swarm {self.swarm!r}"
            )
        if parts.kind not in ("card", "status", "death") or not payload:
            return []  # an empty payload clears a retained topic, and anybody can publish one
        if parts.kind == "death":
            body = read_death(payload, self.register.owner, self.swarm, parts.peer)
            return [SecurityEvent("death", parts.peer, body)]
        if parts.peer == self.name:
            return self._receive_own(parts.kind, payload)
        if parts.kind == "status":
            return self._receive_status(parts.peer, payload)
        return self._receive_card(parts.peer, payload)

    def _receive_card(self, peer: str, payload: bytes) -> list[SecurityEvent]:
        try:
            member, body = self.register.read_card(peer, payload, self._wall())
        except MisdatedCard as error:
            self._misdated_cards.keep(peer, payload, error.issued)
            raise
        self.keyring.admit(member, self._clock())
        self.register.add(member)
        events = [SecurityEvent("card", peer, body)]
        early_status = self._early_statuses.pop(peer)
        if early_status is not None:
            events += self._receive_status(peer, early_status)
        return events

    def _receive_status(self, peer: str, payload: bytes) -> list[SecurityEvent]:
        try:
            head, body = self.register.read_status(peer, payload, self._wall())
        except TrustError as error:
            if error.cause != "unknown-sender":
                raise
            self._early_statuses.keep(peer, payload)
            return []
        online = signed.state_of(body) == "online"
        self.keyring.note_status(peer, head, self._clock(), online=online)
        return [SecurityEvent("status", peer, body)]

    def _receive_own(self, kind: str, payload: bytes) -> list[SecurityEvent]:
        """Handle a card or status on our own topic, which an earlier or second incarnation may have signed.

        A card does not prove that its incarnation is running. Presence still needs it: it contains the
        generation of the name's previous holder, which a last will does not.
        """
        topic = (topics.card if kind == "card" else topics.status)(self.swarm, self.name)
        head, body = signed.read(payload, topic, lambda _: self.identity.public)
        if kind == "card":
            card = signed.parse(CardHead, head, "a card under our own name")
            if card.incarnation != self.keyring.incarnation:
                self._former_issued = max(self._former_issued, card.issued)
            return [SecurityEvent("card", self.name, body)]
        try:
            status = signed.parse(StatusHead, head, "a status under our own name")
            passed_on = self._name_claim.receive(status, body)
            return [SecurityEvent("status", self.name, body)] if passed_on else []
        except TrustError as error:
            if error.cause != "unanswered":
                raise
            self._refuse(error, topic)
            return [SecurityEvent("unconfirmed-status", self.name, body)]

    def _receive_revocations(self, payload: bytes) -> list[SecurityEvent]:
        previous_number = self.register.revocations.number
        revoked = self.register.revoke(payload) if payload else []
        number = self.register.revocations.number
        if number == previous_number:
            return []
        self._signed_list = payload
        self.keyring.set_list(number, payload, self._clock())
        events = self._remove(revoked, "revoked")
        if self._is_revoked():
            events += self._report_own_removal("revoked")
        return [*events, SecurityEvent("reissue-status", self.name)]  # it says which list we have

    def _remove(self, peers: list[str], reason: str) -> list[SecurityEvent]:
        """Delete the keys of peers that the register has removed, and return the events for presence."""
        for peer in peers:
            _log.warning("peer %s is no longer a member: %s", peer, reason)
            self.keyring.retire(peer)
        return [SecurityEvent("removed", peer) for peer in peers]

    def _report_own_removal(self, reason: str) -> list[SecurityEvent]:
        """Report, only once, that this peer itself is no longer a member."""
        if self._removal_reported:
            return []
        self._removal_reported = True
        return [SecurityEvent("removed", self.name, reason.encode())]

    # --- packets --------------------------------------------------------------------------------

    def seal(self, receiver: str, model: str, packet: bytes) -> bytes | None:
        """Seal a chunk for a member; None, counted by cause, if that is not possible now.

        The ledger sends the transfer again later.
        """
        where = f"a packet for {receiver}"
        return self._checked(where, self.keyring.seal, receiver, model, packet)

    def expects(self, model: str, packet: Buffer) -> bool:
        """Return True if a packet may be genuine, to be queued until it is opened; if not, count the cause.

        Cheap, so that a stranger cannot fill the queue of a busy peer.
        """
        where = f"the inbox of {model}"
        return self._checked(where, self.keyring.claimed_channel, model, packet) is not None

    def open(self, model: str, packet: Buffer) -> Opened | None:
        """Open a packet; None, counted by cause, if it is not genuine, and for control messages."""
        where = f"the inbox of {model}"
        result = self._checked(where, self.keyring.open, model, packet, self._clock())
        return None if result is None else Opened(*result)

    def is_genuine(self, opened: Opened, message: Message) -> bool:
        """Return True if a decoded message names as its sender the peer that sealed its last chunk."""
        if (message.sender, message.session) == (opened.sender, opened.session):
            return True
        error = TrustError(
            "impersonated", f"{opened.sender} sealed a message that names {message.sender}"
        )
        self._refuse(error, f"the inbox of {message.model}")
        return False

    # --- members that leave, and time -----------------------------------------------------------

    def remove(self, peer: str, session: str) -> None:
        """Remove a session that left or was given up: nothing is sealed for it any more.

        Do nothing if the peer is a member with a newer session by now.
        """
        member = self.register.members.get(peer)
        if member is not None and member.session == session:
            self.register.remove(peer)
            self.keyring.retire(peer)

    def tick(self) -> tuple[list[tuple[str, str, bytes]], list[SecurityEvent]]:
        """Return the control packets that are due, as (receiver, model, packet), and events for presence.

        The packets contain revocation lists, or replies to them. The events report removed members (on a
        list that another member sent, or with an expired invitation), cards whose date is valid by now, and
        that our own card should be published again, because it is old, has a new exchange key, or no peer
        replies to it. Call it after our first card is published.
        """
        now, clock = self._wall(), self._clock()
        events: list[SecurityEvent] = []
        for peer, card in self._misdated_cards.take_due(now):
            events += self.receive(topics.card(self.swarm, peer), card)
        for peer, revocations in self.keyring.take_requests():
            if revocations:
                events += self.receive(revocation_topic(self.swarm), revocations)
            self.keyring.send_control([peer], REPLY)
        events += self._remove(self.register.expire(now), "its invitation has expired")
        if now >= self._claims.expires:
            events += self._report_own_removal("expired")
        others = [] if self.keyring.has_received else self.keyring.online_members()
        step = self._reply_monitor.next_step(others, clock)
        if step == "ask":
            self.keyring.send_control(others[:MAX_ASKED], REQUEST)
        if self._renew_exchange(now) or self.card_due() or step == "reissue":
            events.append(SecurityEvent("reissue-card", self.name))
        return self.keyring.tick(clock), events

    def _renew_exchange(self, now: float) -> bool:
        """Renew our exchange key if `EXCHANGE_INTERVAL` is over; return whether it was renewed."""
        wall, clock = self._key_generated
        if max(now - wall, self._clock() - clock) < EXCHANGE_INTERVAL:
            return False
        self._key_generated = (now, self._clock())
        self.keyring.renew_exchange(self._clock())
        return True

    def end_session(self) -> None:
        """Delete the private key of the session's masks, so that later snapshots do not contain it.

        Call it when no private round can follow, before the session's last checkpoint is written.
        """
        self.keyring.mask_key = None

    def snapshot(self) -> dict[str, Any]:
        """Return the `memory` for the next start. It must stay as secret as the peer's values."""
        memory: dict[str, Any] = {
            "tickets": self.register.ticket_holders(),
            "editions": self.register.editions(self._wall()),
            "revocations": self._signed_list,
        }
        if (key := self.keyring.mask_key) is not None:
            memory["masks"] = {"session": self._session, "key": key}
        return memory

    def _checked(
        self, where: str, call: Callable[P, T], *args: P.args, **named: P.kwargs
    ) -> T | None:
        """Return the result of a call, or None if it raises; the error is counted, and logged with `where`.

        All exceptions are caught: no bytes that a stranger sends may end this peer.
        """
        try:
            return call(*args, **named)
        except TrustError as error:
            self._refuse(error, where)
        except Exception as error:
            text = f"{type(error).__name__}: {error!s:.100}"
            self._refuse(TrustError("malformed", text), where)
        return None

    def _refuse(self, error: TrustError, where: str) -> None:
        """Count a refusal; log the 1st, 2nd, 4th, 8th … of the same cause, if it may be an attack."""
        log_repeated(
            _log, self.counters, f"untrusted-{error.cause}",
            "peer %s refused %s: %s: %s", self.name, where, error.cause, error,
            level=logging.DEBUG if error.cause in HARMLESS_CAUSES else logging.WARNING,
        )  # fmt: skip


SecurityLayer: TypeAlias = NullSecurity | SwarmSecurity
"""The security of a peer: with keys, or none."""


# --- from packets to messages -------------------------------------------------------------------------

_COUNT = struct.Struct("<I")
_COUNT_OFFSET: Final = 28
"""Offset of the number of chunks in a chunk's header."""
MIN_SHARE: Final = 1 / 64
"""The least that one packet counts towards a sender's rate, however many chunks its header claims."""


class Intake:
    """Turns packets from an inbox into checked messages. No packet makes it raise.

    The steps: open the packet → check the sender's rate → reassemble chunks → decode → check that the message
    is about this model and schema → check that it names the peer that sealed it. A packet that fails a step
    is dropped and counted by cause.

    schemas: the schema hash of every partial model that this peer has. drop: called with (cause, text) for
    every dropped packet, except those that `security` refuses, which it counts and logs itself.
    """

    def __init__(
        self,
        security: SecurityLayer,
        schemas: Mapping[str, str],
        *,
        guards: Guards | None = None,
        reassembler: Reassembler | None = None,
        drop: Callable[[str, str], None] = lambda _cause, _text: None,
    ) -> None:
        self.security, self.guards = security, guards
        self.reassembler = reassembler if reassembler is not None else Reassembler()
        self._schemas, self._drop = schemas, drop

    def take(self, model: str, packet: Buffer, now: float) -> Message | None:
        """Return the message that this packet completes, or None."""
        opened = self.security.open(model, packet)
        if opened is None:
            return None
        sender = opened.sender  # empty without security
        share = message_share(opened.packet)
        if sender and self.guards is not None and not self.guards.allow(sender, now, share):
            self._drop("rate", f"{sender} sends faster than its rate limit")
            return None
        if model not in self._schemas:  # before its chunks take up memory, whatever their size
            self._drop("unknown-model", f"this peer does not implement {model!r}")
            return None
        try:
            complete = self.reassembler.add(opened.packet)
            if complete is None:
                return None
            decoded = decode(complete)
            message = decoded.message
            if message.model != model:
                raise WireError("garbage", f"a message about {message.model!r} in the wrong inbox")
            require_schema(decoded, self._schemas[model])
        except WireError as error:
            self._drop(error.cause, str(error))
            return None
        return message if self.security.is_genuine(opened, message) else None


def message_share(packet: Buffer) -> float:
    """Return which fraction of its message a chunk is; rates count messages, so that large ones are allowed.

    At least MIN_SHARE: claiming a million chunks per message gains a member little.
    """
    if len(packet) < HEADER_BYTES:
        return 1.0
    (count,) = _COUNT.unpack_from(packet, _COUNT_OFFSET)
    return max(MIN_SHARE, 1 / max(count, 1))
