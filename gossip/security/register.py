"""Who is in the swarm: signed cards taken in, papers checked, members named. No IO.

A *card* is published as a signed statement whose head holds what trust needs (key, exchange key, paper,
session) and whose body is the card that presence reads. A peer that starts draws an *incarnation*, a random
number that tells this start from all others, and a new exchange key, so everything that was sealed for a
former incarnation is void. Cards of one incarnation are numbered; others are told apart by their dates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from .. import topics
from . import fields, signed
from .errors import MisdatedCard, TrustError
from .identity import Identity, check_key, id_of, peer_id
from .invitation import CLOCK_SKEW, Admission, Terms, check, check_holder
from .revocation import Revocations

VERSION: Final = 2
"""Of the heads of cards and statuses. Version 1 had no incarnation, and cards of any age counted."""
INCARNATION_BYTES: Final = 16
LAST_NUMBER: Final = 2**63 - 1
"""The number of a goodbye: no card of its incarnation comes after it."""

MAX_CARD_AGE: Final = 48 * 3600.0
"""Seconds for which a card counts, besides `CLOCK_SKEW`: its peer issues a new one every twelve hours."""

MAX_PEERS: Final = 4096
"""Peers whose cards are kept. Only invited peers get in, so this is a bound, not a policy."""

MAX_LEFT: Final = 10_000
"""Peers that are gone of which it is remembered how new their last words were; the oldest are forgotten."""


class Edition(NamedTuple):
    """When a card was issued, or a goodbye: in which incarnation, and as which of its cards."""

    issued: float
    incarnation: bytes
    number: int

    def precedes(self, other: Edition) -> bool:
        """Whether this one is the older: by number in one incarnation, where no clock is needed."""
        if self.incarnation == other.incarnation:
            return self.number < other.number
        return self[:2] < other[:2]


@dataclass(frozen=True, slots=True)
class Member:
    """An admitted peer, as its latest card has it."""

    name: str
    key: bytes
    edition: Edition
    exchange: bytes
    """Its newest X25519 key, for packets."""
    masks: bytes
    """Its X25519 key for the masks of this session, which outlives a restart."""
    session: str
    since: float
    models: frozenset[str]
    """The partial models that it implements and is admitted to."""
    terms: Terms

    @property
    def incarnation(self) -> bytes:
        """Which start of the peer this is."""
        return self.edition.incarnation


@dataclass(frozen=True, slots=True)
class Claim:
    """What a peer says of itself in the head of its card."""

    edition: Edition
    exchange: bytes
    masks: bytes
    session: str
    since: float
    models: frozenset[str]


class Register:
    """Checks what others publish against the owner's key.

    swarm, owner: which swarm, and the public key that its papers are signed with.
    revocations: the newest list known before a restart.
    ticket_holders: who was admitted on which ticket before a restart: see `snapshot`.
    editions: the newest card of every member before a restart: see `editions`.
    """

    def __init__(
        self,
        swarm: str,
        owner: bytes,
        *,
        revocations: Revocations | None = None,
        ticket_holders: Mapping[str, list[str]] | None = None,
        editions: Mapping[str, list[Any]] | None = None,
    ) -> None:
        self.swarm, self.owner = swarm, owner
        self.revocations = revocations or Revocations()
        self.members: dict[str, Member] = {}
        self._names: dict[str, str] = {}
        """The member that has an id: one name per key."""
        self._holders = {paper: dict.fromkeys(ids) for paper, ids in (ticket_holders or {}).items()}
        self._numbers: dict[str, tuple[bytes, int]] = {}
        self._left: dict[str, Edition] = {}
        """The last card or goodbye of those who are gone; oldest first."""
        self._before = {peer: Edition(*edition) for peer, edition in (editions or {}).items()}
        """The newest cards that were known before a restart, of peers that were not heard of since."""

    def snapshot(self) -> dict[str, list[str]]:
        """The holders of every ticket, to be kept in the checkpoint."""
        # Copied first: the peer's own thread asks while the event loop may take in a card.
        return {paper: list(ids) for paper, ids in list(self._holders.items())}

    def editions(self, now: float) -> dict[str, list[Any]]:
        """The newest card of every member, to be kept in the checkpoint: older ones count no more."""
        members = {peer: member.edition for peer, member in list(self.members.items())}
        known = (dict(self._before) | members).items()
        return {peer: list(card) for peer, card in known if is_recent(card.issued, now)}

    # --- cards ----------------------------------------------------------------------------------

    def card(self, peer: str, payload: bytes, now: float) -> tuple[Member, bytes]:
        """Read a card published at `peer`'s topic: the member, to `take` in, and the card for presence.

        TrustError if it is not signed by that peer, not admitted, from the future, or older than the
        one we have.
        """
        head, body = read_published(self.swarm, peer, "card", payload)
        member = self._member(peer, head, now)
        known, left = self.members.get(peer), self._left.get(peer)
        newest = self._newest(peer)
        if newest is not None and member.edition.precedes(newest):
            raise TrustError("stale", f"an older card of {peer} than the one that is known")
        if known is None and left is not None and not left.precedes(member.edition):
            raise TrustError("stale", f"a card of {peer} from before it was gone")
        if known is None and len(self.members) >= MAX_PEERS:
            raise TrustError("used-up", f"over {MAX_PEERS} peers: {peer} is not taken in")
        return member, body

    def take(self, member: Member) -> None:
        """Take in a member, as its card has it."""
        if member.terms.kind == "ticket":
            self._holders.setdefault(member.terms.number, {})[peer_id(member.key)] = None
        self.members[member.name] = member
        self._names[peer_id(member.key)] = member.name
        self._left.pop(member.name, None)
        self._before.pop(member.name, None)

    def _newest(self, peer: str) -> Edition | None:
        """The newest card that is known of a peer that is here, or was before a restart."""
        member = self.members.get(peer)
        return self._before.get(peer) if member is None else member.edition

    def _member(self, peer: str, head: Mapping[str, Any], now: float) -> Member:
        try:
            admission = Admission(fields.data(head["paper"]), fields.data(head["endorsement"]))
            exchange, masks = fields.data(head["exchange"], 32), fields.data(head["masks"], 32)
            models = fields.texts(head["models"])
            since, issued = fields.number(head["since"]), fields.number(head["issued"])
            incarnation = fields.data(head["incarnation"], INCARNATION_BYTES)
            number = fields.count(head["number"])
            session = topics.check_name("session", fields.text(head["session"]))
        except (KeyError, ValueError):
            raise TrustError("malformed", f"the card of {peer} lacks what trust needs") from None
        terms = check(admission, self.owner, self.swarm, peer, head["key"], now)
        self._allow(peer, head["key"], terms)
        if issued > now + CLOCK_SKEW:
            # Once known, it would make every card look old that its peer issues with the right time.
            raise MisdatedCard(
                "clock",
                f"the card of {peer} is dated {issued - now:.0f} s ahead of our time: its clock is "
                "ahead, or ours is behind",
                issued,
            )
        if not is_recent(issued, now):
            raise MisdatedCard(
                "old-card",
                f"the card of {peer} was issued {(now - issued) / 3600:.0f} h ago, and counts for "
                f"{MAX_CARD_AGE / 3600:.0f}: the peer is gone, its clock is behind, or ours is ahead",
                issued,
            )
        edition = Edition(issued, incarnation, number)
        admitted = frozenset(model for model in models if terms.admits(model))
        return Member(
            peer, head["key"], edition, exchange, masks, session, since, admitted, terms
        )  # fmt: skip

    def _allow(self, peer: str, key: bytes, terms: Terms) -> None:
        if self.revocations.names(peer, terms.number):
            raise TrustError("revoked", f"{peer} or its paper {terms.number} was revoked")
        known = self._names.get(peer_id(key), peer)
        if known != peer:
            raise TrustError("second-name", f"{peer} has the key of {known}, which is a member")
        holders = self._holders.get(terms.number, {})
        if terms.kind == "ticket" and peer_id(key) not in holders and len(holders) >= terms.uses:
            raise TrustError(
                "used-up", f"ticket {terms.number} admits {terms.uses}, and {peer} is one too many"
            )

    # --- statuses -------------------------------------------------------------------------------

    def status(self, peer: str, payload: bytes, now: float) -> bytes:
        """The status in a statement published at `peer`'s topic; TrustError if it is not valid.

        A last will is signed beforehand and may come at any time; every other status has a number
        that rises, so that the broker cannot bring an old one back. A goodbye shows its peer's paper and
        date, so that it counts without a card, which a peer that leaves takes away.
        """
        head, body = read_published(self.swarm, peer, "status", payload)
        incarnation, number = head.get("incarnation"), head.get("number")
        if not isinstance(incarnation, bytes) or not fields.is_count(number):
            raise TrustError("malformed", f"the status of {peer} lacks what trust needs")
        member, will = self.members.get(peer), head.get("will") is True
        if member is None or member.incarnation != incarnation:
            if will or fields.state_of(body) != "left":
                raise TrustError(
                    "unknown-sender", f"a status of {peer}, whose card is not known yet"
                )
            edition = self._goodbye(peer, head, now)
        else:
            edition = None
        if will:
            return body
        known, last = self._numbers.get(peer, (b"", -1))
        if known == incarnation and number <= last:
            raise TrustError("stale", f"an older status of {peer} than the one that is known")
        self._numbers[peer] = (incarnation, number)
        if edition is not None:
            self._note_left(peer, edition)
        return body

    def _goodbye(self, peer: str, head: Mapping[str, Any], now: float) -> Edition:
        """When a peer said goodbye of which we know no card; TrustError if it does not count."""
        try:
            admission = Admission(fields.data(head["paper"]), fields.data(head["endorsement"]))
            edition = Edition(fields.number(head["issued"]), head["incarnation"], LAST_NUMBER)
        except (KeyError, ValueError):
            raise TrustError("malformed", f"the goodbye of {peer} lacks what trust needs") from None
        terms = check_holder(admission, self.owner, self.swarm, peer, head["key"])
        if terms.kind == "ticket" and id_of(peer) not in self._holders.get(terms.number, {}):
            # Whoever holds a ticket can make up as many keys as it likes.
            raise TrustError("unknown-sender", f"a goodbye of {peer}, which was not admitted here")
        if edition.issued > now + CLOCK_SKEW:
            raise TrustError("clock", f"the goodbye of {peer} is dated ahead of our time")
        newest = self._newest(peer)
        if newest is not None and edition.precedes(newest):
            raise TrustError("stale", f"a goodbye of {peer} from before the card that is known")
        return edition

    # --- who is out -----------------------------------------------------------------------------

    def revoke(self, payload: bytes) -> list[str]:
        """Take in a list; returns the members that are on it, who are members no more."""
        new = Revocations.read(payload, self.owner, self.swarm)
        if new.number <= self.revocations.number:
            if new.number < self.revocations.number:
                raise TrustError(
                    "stale",
                    f"revocation list {new.number}; number {self.revocations.number} is known",
                )
            return []
        self.revocations = new
        return self._drop(lambda m: new.names(m.name, m.terms.number))

    def expire(self, now: float) -> list[str]:
        """Strike off members whose papers have expired; returns them."""
        return self._drop(lambda m: now >= m.terms.expires)

    def forget(self, peer: str) -> None:
        """Strike off a peer that left or was given up; its ticket stays used.

        How new its last card and status were is kept, so that the broker cannot bring older ones back.
        """
        member = self.members.pop(peer, None)
        if member is None:
            return
        del self._names[peer_id(member.key)]
        left = self._left.get(peer)
        self._note_left(peer, member.edition if left is None else left)

    def _note_left(self, peer: str, edition: Edition) -> None:
        self._before.pop(peer, None)
        self._left.pop(peer, None)
        self._left[peer] = edition
        if len(self._left) > MAX_LEFT:
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._numbers.pop(oldest, None)

    def _drop(self, out: Callable[[Member], bool]) -> list[str]:
        gone = [name for name, member in self.members.items() if out(member)]
        for name in gone:
            self.forget(name)
        return gone


def read_published(
    swarm: str, peer: str, kind: Literal["card", "status"], payload: bytes
) -> tuple[dict[str, Any], bytes]:
    """Head and body of what a peer published, if the key in its name signed it; TrustError if not.

    Whether that peer is admitted, and how new it is, is for `Register` to say.
    """
    place = str(topics.Topic(swarm, peer, kind))
    return signed.read(payload, place, lambda head: _key(head, peer))


def sign_card(
    identity: Identity, swarm: str, admission: Admission, claim: Claim, body: bytes
) -> bytes:
    """A card as it is published; `body` is what presence wants to say."""
    head = {
        "version": VERSION,
        "key": identity.public,
        **claim.edition._asdict(),
        "exchange": claim.exchange,
        "masks": claim.masks,
        "session": claim.session,
        "since": claim.since,
        "models": sorted(claim.models),
        "paper": admission.paper,
        "endorsement": admission.endorsement,
    }
    return signed.sign(identity, topics.card(swarm, identity.name), head, body)


def sign_status(
    identity: Identity,
    swarm: str,
    incarnation: bytes,
    number: int,
    body: bytes,
    *,
    will: bool = False,
    answers: Iterable[bytes] = (),
    goodbye: tuple[Admission, float] | None = None,
) -> bytes:
    """A status as it is published; numbers of one incarnation rise, a will needs none of its own.

    answers: other incarnations under the same name that were heard before: see `OwnName`.
    goodbye: the peer's paper and the time, if it leaves: see `Register.status`.
    """
    head = {
        "version": VERSION,
        "key": identity.public,
        "incarnation": incarnation,
        "number": number,
        "will": will,
        "answers": list(answers),
    }
    if goodbye is not None:
        admission, issued = goodbye
        head |= {
            "paper": admission.paper,
            "endorsement": admission.endorsement,
            "issued": issued,
        }
    return signed.sign(identity, topics.status(swarm, identity.name), head, body)


def _key(head: Mapping[str, Any], peer: str) -> bytes:
    key = head.get("key")
    if not isinstance(key, bytes) or len(key) != 32:
        raise TrustError("malformed", f"what {peer} published names no key")
    check_key(peer, key)
    version = head.get("version", 1)
    if version != VERSION:
        raise TrustError(
            "malformed",
            f"{peer} publishes cards and statuses of version {version!s:.20}; this peer reads version "
            f"{VERSION}: upgrade the older of the two",
        )
    return key


def is_recent(issued: float, now: float) -> bool:
    """Whether a card of this date counts now: neither ahead of our time nor too old."""
    return now - MAX_CARD_AGE - CLOCK_SKEW <= issued <= now + CLOCK_SKEW
