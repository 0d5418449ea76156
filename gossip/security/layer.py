"""All of a peer's security behind one object: what it publishes is signed, what it hears is checked. No IO.

    security = SwarmSecurity(identity, admission, owner, swarm="garden", session=…, models=…, since=…)
    publish(card topic, security.card(body))             # body: what presence wants to say
    for heard in security.hear(topic, payload): …        # genuine cards and statuses, for presence
    packet = security.seal(receiver, model, chunk)       # before it is published
    opened = security.open(model, packet)                # before chunks are put together
    packets, heard = security.tick()                     # revocation lists, for the receivers' inboxes

A `SecurityLayer` is what a peer asks: `SwarmSecurity` answers with keys, `NullSecurity` believes everything.
`Intake` is the way in for packets.

Every packet and every signed status says which revocation list its sender has. Two peers give each other
nothing until the numbers agree, and whoever is ahead hands over the list, which its owner signed: so a peer
that the broker keeps uninformed learns it from the first member that it talks to.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, ParamSpec, TypeAlias, TypeVar

from gossamer.logs import is_milestone

from .. import topics
from ..chunks import HEADER_BYTES, Reassembler
from ..wire import Buffer, Message, WireError, decode, require_schema
from . import signed
from .channels import MAX_NAMES, OVERHEAD, REPLY, REQUEST, Keyring
from .guards import Guards
from .identity import Identity, MisdatedCard, TrustError
from .invitation import CLOCK_SKEW, Admission, Revocations, check, revocation_topic
from .members import (
    NAMED,
    CardHead,
    EarlyStatuses,
    MisdatedCards,
    NameClaim,
    Register,
    StatusHead,
    Unanswered,
    read_death,
    sign_card,
    sign_status,
)

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

CARD_INTERVAL: Final = 12 * 3600.0
"""Seconds after which our card is issued again: well before the others find it too old."""
EXCHANGE_INTERVAL: Final = 24 * 3600.0
"""Seconds for which an exchange key is used: what was sealed with it can be read by whoever has it."""
USUAL: Final = ("behind", "ahead", "unanswered")
"""Causes that are no attack: lists take a moment to travel, and whoever crashed left a status behind."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What presence should know.

    kind: card, status: a genuine one. former: a status of our own key that nobody alive may stand behind.
    death: a notice (see `Death.decode`). out: the peer is no member any more. reissue-card, reissue-status:
    our own should be published again.
    """

    kind: Literal["card", "status", "former", "death", "out", "reissue-card", "reissue-status"]
    peer: str
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Opened:
    """A packet that may be looked at: who sealed it, in which session, and the chunk inside."""

    sender: str
    session: str
    packet: Buffer


class NullSecurity:
    """Believes everything: anybody with access to the broker can read, forge and disturb."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.overhead = 0
        """Bytes that sealing adds to a packet."""
        self.largest_list = 0
        """Bytes of the largest revocation list that a packet may bring."""
        self.counters: Counter[str] = Counter()
        """What was refused, by cause."""

    def patterns(self) -> list[str]:
        """Nothing more to hear."""
        return []

    def card(self, body: bytes) -> bytes:
        """As it is."""
        return body

    status = will = card

    def hear(self, topic: str, payload: bytes) -> list[Heard]:
        """As it is."""
        where = topics.parse(topic)
        if where.kind not in ("card", "status", "death") or (where.kind == "death" and not payload):
            return []
        return [Heard(where.kind, where.peer, payload)]

    def seal(self, receiver: str, model: str, packet: bytes) -> bytes | None:
        """As it is."""
        return packet

    def expects(self, model: str, packet: Buffer) -> bool:
        """Always."""
        return True

    def open(self, model: str, packet: Buffer) -> Opened | None:
        """As it is, from whomever."""
        return Opened("", "", packet)

    def genuine(self, opened: Opened, message: Message) -> bool:
        """Always."""
        return True

    def gone(self, peer: str, session: str) -> None:
        """Need no note."""

    def tick(self) -> tuple[list[tuple[str, str, bytes]], list[Heard]]:
        """Nothing is ever due."""
        return [], []

    def end_session(self) -> None:
        """Nothing to delete."""

    def snapshot(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}


class SwarmSecurity:
    """One start of a peer in a swarm whose owner decides who takes part.

    identity, admission: who the peer is, and the invitation that lets it in.
    owner: the public key of the swarm's owner.
    session, since: as on the card that presence writes.
    models: the partial models that the peer implements.
    memory: the `snapshot` of a former start: tickets' holders, the newest cards and revocations seen, and
        the key of the session's masks.
    wall, clock: seconds since 1970, for expiry; and any clock that goes on, for repeats.
    max_names: peers that it can meet before it must be started again.

    Raises TrustError if this peer's own invitation does not let it in.
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
        memory: dict[str, Any] | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        max_names: int = MAX_NAMES,
    ) -> None:
        self.identity, self.swarm = identity, swarm
        self.name, self.overhead = identity.name, OVERHEAD
        self.largest_list = signed.MAX_BYTES
        self.counters: Counter[str] = Counter()
        self._admission, self._wall, self._clock = admission, wall, clock
        self._claims = check(admission, owner, swarm, identity.name, identity.public, wall())
        self._out_already = False
        memory = memory or {}
        self._list: bytes = memory.get("revocations", b"")
        known = Revocations.read(self._list, owner, swarm) if self._list else Revocations()
        self.register = Register(
            swarm, owner, revocations=known,
            ticket_holders=memory.get("tickets"), editions=memory.get("editions"),
        )  # fmt: skip
        if self._is_revoked():
            raise TrustError("revoked", f"{self.name} was revoked: ask the swarm's owner")
        if refused := sorted(model for model in models if not self._claims.admits(model)):
            raise TrustError(
                "not-a-member",
                f"{self.name} implements {', '.join(refused)}, which invitation {self._claims.number} "
                "does not admit it to: ask the owner for one that does, or leave the model out",
            )
        self._since, self._session, self._models = since, session, frozenset(models)
        masks = memory.get("masks") or {}
        mask_key = masks["key"] if masks.get("session") == session else None
        self.keyring = Keyring(
            identity, owner, session, swarm, models, mask_key=mask_key, max_names=max_names
        )
        self.keyring.set_list(known.number, self._list, clock())
        self._renewed = (wall(), clock())
        """When our exchange key was drawn, by both clocks: one stands still while a device sleeps, the
        other can be set."""
        self._cards = self._statuses = 0
        self._issued: float | None = None
        """When our newest card was issued."""
        self._former_issued = float("-inf")
        """When the newest card that another incarnation of ours left at the broker was issued."""
        self._name_claim = NameClaim(self.keyring.incarnation)
        self._unanswered = Unanswered(self.name)
        self._early, self._misdated = EarlyStatuses(), MisdatedCards()

    def _is_revoked(self) -> bool:
        return self.register.revocations.names(self.name, self._claims.number)

    # --- what we say ----------------------------------------------------------------------------

    def patterns(self) -> list[str]:
        """Topics to subscribe to besides those of presence and gossip."""
        return [revocation_topic(self.swarm)]

    def card(self, body: bytes) -> bytes:
        """Our card, signed, with our invitation. From now on the name is ours."""
        self._name_claim.ours = True
        self._cards += 1
        self._issued = self._date()
        keyring, admission = self.keyring, self._admission
        head = CardHead(
            self._issued, keyring.incarnation, self._cards, keyring.exchange, keyring.mask_public,
            self._session, self._since, self._models, admission.invitation, admission.endorsement,
        )  # fmt: skip
        return sign_card(self.identity, self.swarm, head, body)

    def _date(self) -> float:
        """Return the time, but not one before our former card: our clock may have been set back since, and
        the others take the newest card alone."""
        now = self._wall()
        later = self._former_issued + 0.001
        return later if now < later <= now + CLOCK_SKEW else now

    def card_due(self) -> bool:
        """Whether our card should be issued again: it has grown old, or the clock was set since."""
        return self._issued is not None and abs(self._wall() - self._issued) >= CARD_INTERVAL

    def status(self, body: bytes) -> bytes:
        """Our status, signed; it replaces those before it. Our goodbye shows our invitation, too."""
        self._statuses += 1
        head = self._status_head(self._statuses, answers=tuple(self._name_claim.met))
        if signed.state_of(body) == "left":
            head = replace(
                head, issued=self._wall(),
                invitation=self._admission.invitation, endorsement=self._admission.endorsement,
            )  # fmt: skip
        return sign_status(self.identity, self.swarm, head, body)

    def will(self, body: bytes) -> bytes:
        """Our last will, signed beforehand."""
        return sign_status(self.identity, self.swarm, self._status_head(0, will=True), body)

    def _status_head(self, number: int, **options: Any) -> StatusHead:
        known = self.register.revocations.number
        return StatusHead(self.keyring.incarnation, number, known, **options)

    # --- what we hear ---------------------------------------------------------------------------

    def hear(self, topic: str, payload: bytes) -> list[Heard]:
        """Take in a card, a status, a death notice or a revocation list; what is not genuine is counted and
        logged."""
        return self._trusted(topic, self._hear, topic, payload) or []

    def _hear(self, topic: str, payload: bytes) -> list[Heard]:
        if topic == revocation_topic(self.swarm):
            return self._revocations(payload)
        where = topics.parse(topic)
        if where.swarm != self.swarm:
            raise TrustError("malformed", f"from swarm {where.swarm!r}; this is {self.swarm!r}")
        if where.kind not in ("card", "status", "death") or not payload:
            return []  # an empty payload clears a topic: whoever did it, it says nothing
        if where.kind == "death":
            body = read_death(payload, self.register.owner, self.swarm, where.peer)
            return [Heard("death", where.peer, body)]
        if where.peer == self.name:
            return self._own(where.kind, payload)
        if where.kind == "status":
            return self._status(where.peer, payload)
        return self._card(where.peer, payload)

    def _card(self, peer: str, payload: bytes) -> list[Heard]:
        try:
            member, body = self.register.card(peer, payload, self._wall())
        except MisdatedCard as error:
            self._misdated.keep(peer, payload, error.issued)
            raise
        self.keyring.admit(member, self._clock())
        self.register.take(member)
        heard = [Heard("card", peer, body)]
        early = self._early.pop(peer)
        if early is not None:
            heard += self._status(peer, early)
        return heard

    def _status(self, peer: str, payload: bytes) -> list[Heard]:
        try:
            head, body = self.register.status(peer, payload, self._wall())
        except TrustError as error:
            if error.cause != "unknown-sender":
                raise
            self._early.keep(peer, payload)
            return []
        online = signed.state_of(body) == "online"
        self.keyring.note_status(peer, head, self._clock(), online=online)
        return [Heard("status", peer, body)]

    def _own(self, kind: str, payload: bytes) -> list[Heard]:
        """Our own topic: what another incarnation of ours says there, if it is running.

        A card proves nobody alive, but tells the generation of whoever had the name, which last wills do not,
        and when it was issued.
        """
        place = (topics.card if kind == "card" else topics.status)(self.swarm, self.name)
        head, body = signed.read(payload, place, lambda _: self.identity.public)
        if kind == "card":
            card = signed.parse(CardHead, head, "a card under our own name")
            if card.incarnation != self.keyring.incarnation:
                self._former_issued = max(self._former_issued, card.issued)
            return [Heard("card", self.name, body)]
        try:
            status = signed.parse(StatusHead, head, "a status under our own name")
            return [Heard("status", self.name, body)] if self._name_claim.hear(status, body) else []
        except TrustError as error:
            if error.cause != "unanswered":
                raise
            self._refused(error, topics.status(self.swarm, self.name))
            return [Heard("former", self.name, body)]

    def _revocations(self, payload: bytes) -> list[Heard]:
        before = self.register.revocations.number
        out = self.register.revoke(payload) if payload else []
        number = self.register.revocations.number
        if number == before:
            return []
        self._list = payload
        self.keyring.set_list(number, payload, self._clock())
        heard = self._out(out, "revoked") + self._out_oneself(self._is_revoked())
        return [*heard, Heard("reissue-status", self.name)]  # it says which list we have

    def _out(self, peers: list[str], why: str) -> list[Heard]:
        for peer in peers:
            _log.warning("peer %s is no longer a member: %s", peer, why)
            self.keyring.retire(peer)
        return [Heard("out", peer) for peer in peers]

    def _out_oneself(self, out: bool) -> list[Heard]:
        """Say, once, that this peer itself may take part no longer."""
        if not out or self._out_already:
            return []
        self._out_already = True
        return [Heard("out", self.name)]

    # --- packets --------------------------------------------------------------------------------

    def seal(self, receiver: str, model: str, packet: bytes) -> bytes | None:
        """A chunk sealed for a member; None, counted, if it cannot be (yet): the ledger repeats it."""
        where = f"a packet for {receiver}"
        return self._trusted(where, self.keyring.seal, receiver, model, packet)

    def expects(self, model: str, packet: Buffer) -> bool:
        """Whether a packet may be worth keeping until it can be opened; if not, it is counted by cause.

        Cheap: whoever is no member cannot fill the memory of a peer that is busy.
        """
        where = f"the inbox of {model}"
        return self._trusted(where, self.keyring.claimed_channel, model, packet) is not None

    def open(self, model: str, packet: Buffer) -> Opened | None:
        """The genuine chunk in a packet; None, counted by cause, if there is none."""
        where = f"the inbox of {model}"
        found = self._trusted(where, self.keyring.open, model, packet, self._clock())
        return None if found is None else Opened(*found)

    def genuine(self, opened: Opened, message: Message) -> bool:
        """Whether a decoded message speaks for the peer that sealed its last chunk, and to us."""
        if (message.sender, message.session) == (opened.sender, opened.session):
            return True
        cause = TrustError(
            "impersonated", f"{opened.sender} sealed a message that names {message.sender}"
        )
        self._refused(cause, f"the inbox of {message.model}")
        return False

    # --- time -----------------------------------------------------------------------------------

    def gone(self, peer: str, session: str) -> None:
        """Note that a session left or was given up: nothing is sealed for it any more.

        Not if a newer session of the peer has come meanwhile: that one is a member.
        """
        member = self.register.members.get(peer)
        if member is not None and member.session == session:
            self.register.forget(peer)
            self.keyring.retire(peer)

    def tick(self) -> tuple[list[tuple[str, str, bytes]], list[Heard]]:
        """Packets that are due (receiver, model, packet), and what else presence should know.

        Packets hand revocation lists over, and answer those who did. Presence should know of members that are
        out (a list of another member names them, their invitations expired), of cards whose date our clock
        got wrong, and that our own card should be published again: it grows old, has a new exchange key, or
        nobody answers it. Ask once our card is out.
        """
        now, clock = self._wall(), self._clock()
        out: list[Heard] = []
        for peer, card in self._misdated.due(now):
            out += self.hear(topics.card(self.swarm, peer), card)
        for peer, payload in self.keyring.take_requests():
            if payload:
                out += self.hear(revocation_topic(self.swarm), payload)
            self.keyring.send_control([peer], REPLY)
        out += self._out(self.register.expire(now), "its invitation has expired")
        out += self._out_oneself(now >= self._claims.expires)
        others = [] if self.keyring.has_received else self.keyring.online_members()
        step = self._unanswered.look(others, clock)
        if step == "ask":
            self.keyring.send_control(others[:NAMED], REQUEST)
        if self._renew_exchange(now) or self.card_due() or step == "reissue":
            out.append(Heard("reissue-card", self.name))
        return self.keyring.tick(clock), out

    def _renew_exchange(self, now: float) -> bool:
        """Renew our exchange key if its day is over; whether it was."""
        wall, clock = self._renewed
        if max(now - wall, self._clock() - clock) < EXCHANGE_INTERVAL:
            return False
        self._renewed = (now, self._clock())
        self.keyring.renew_exchange(self._clock())
        return True

    def end_session(self) -> None:
        """Delete the key of the session's masks, so that `snapshot` keeps it no longer.

        Call it when no private round can follow, before the session's last checkpoint is written.
        """
        self.keyring.mask_key = None

    def snapshot(self) -> dict[str, Any]:
        """What the next start should remember: `memory`. Keep it as secret as the peer's values."""
        found: dict[str, Any] = {
            "tickets": self.register.snapshot(),
            "editions": self.register.editions(self._wall()),
            "revocations": self._list,
        }
        if (key := self.keyring.mask_key) is not None:
            found["masks"] = {"session": self._session, "key": key}
        return found

    def _trusted(
        self, where: str, call: Callable[P, T], *args: P.args, **named: P.kwargs
    ) -> T | None:
        """Return what a call returns; None if what was heard `where` is not trusted: counted, and logged.

        Whatever else goes wrong, a stranger must not end a peer with it.
        """
        try:
            return call(*args, **named)
        except TrustError as error:
            self._refused(error, where)
        except Exception as error:
            text = f"{type(error).__name__}: {error!s:.100}"
            self._refused(TrustError("malformed", text), where)
        return None

    def _refused(self, error: TrustError, where: str) -> None:
        cause = f"untrusted-{error.cause}"
        self.counters[cause] += 1
        count = self.counters[cause]
        if is_milestone(count):
            _log.log(
                logging.INFO if error.cause in USUAL else logging.WARNING,
                "peer %s refused %s: %s: %s (%d so far)",
                self.name, where, error.cause, error, count,
            )  # fmt: skip


SecurityLayer: TypeAlias = NullSecurity | SwarmSecurity
"""What a peer asks of its security."""


# --- the way in for packets ---------------------------------------------------------------------------

_COUNT = struct.Struct("<I")
_COUNT_AT: Final = 28  # in a chunk's header
MIN_SHARE: Final = 1 / 64
"""What one packet counts for at least, however many chunks it says that its message has."""


class Intake:
    """The way in: from a packet in an inbox to a message that may be handled. Nothing that arrives raises.

    open (is it genuine?) → rate → put chunks together → decode → is it about what we have? → does it speak
    for the peer that sealed it? Whatever fails is counted by cause and goes no further.

    schemas: the hash of every partial model that this peer has. drop: called with (cause, text) for whatever
    is not taken in; what security refuses is counted and logged there.
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

    def take(self, vector: str, packet: Buffer, now: float) -> Message | None:
        """The message that this packet completes, if it does."""
        opened = self.security.open(vector, packet)
        if opened is None:
            return None
        known = opened.sender  # nobody in particular, without security
        share = message_share(opened.packet)
        if known and self.guards is not None and not self.guards.allow(known, now, share):
            self._drop("rate", f"{opened.sender} sends faster than its bound")
            return None
        try:
            whole = self.reassembler.add(opened.packet)
            if whole is None:
                return None
            decoded = decode(whole)
            message = decoded.message
            if message.model != vector:
                raise WireError("garbage", f"a message about {message.model!r} in the wrong inbox")
            if vector not in self._schemas:
                self._drop("unknown-model", f"nobody here implements {vector!r}")
                return None
            require_schema(decoded, self._schemas[vector])
        except WireError as error:
            self._drop(error.cause, str(error))
            return None
        return message if self.security.genuine(opened, message) else None


def message_share(packet: Buffer) -> float:
    """The part of a message that a chunk is, so that rates count messages: large ones are no floods.

    Not below MIN_SHARE: a member who says that its messages have a million chunks gains little by it.
    """
    if len(packet) < HEADER_BYTES:
        return 1.0
    (count,) = _COUNT.unpack_from(packet, _COUNT_AT)
    return max(MIN_SHARE, 1 / max(count, 1))
