"""Who is in the swarm: signed cards, statuses and death notices read, invitations checked. No IO.

A *card* is published as a signed statement whose head holds what security needs (key, exchange key,
invitation, session) and whose body is the card that presence reads. A peer that starts draws an
*incarnation*, a random number that tells this start from all others, and a new exchange key, so everything
that was sealed for a former incarnation is void. Cards of one incarnation are numbered; others are told
apart by their dates. A *status* is signed in the same way, and says besides which revocation list its peer
has.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator, Field, Strict

from .. import topics
from . import signed
from .identity import Identity, MisdatedCard, TrustError, check_key, id_of, peer_id
from .invitation import CLOCK_SKEW, Admission, Claims, Revocations, check, check_holder

_log = logging.getLogger(__name__)

VERSION: Final = 3
"""Of the heads of cards and statuses. Version 2 did not say which revocation list its peer has."""
INCARNATION_BYTES: Final = 16
Incarnation: TypeAlias = Annotated[
    bytes, Strict(), Field(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)
]
SessionName: TypeAlias = Annotated[
    signed.Text, AfterValidator(partial(topics.check_name, "session"))
]
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
class CardHead:
    """What a peer says of itself in the head of its card, besides its key."""

    issued: signed.Number
    incarnation: Incarnation
    """Which start of the peer this is."""
    number: signed.Count
    exchange: signed.Key
    """Its newest X25519 key, for packets."""
    masks: signed.Key
    """Its X25519 key for the masks of this session, which outlives a restart."""
    session: SessionName
    since: signed.Number
    models: signed.Names
    """The partial models that it implements."""
    invitation: signed.Data
    endorsement: signed.Data

    @property
    def edition(self) -> Edition:
        """How new the card is."""
        return Edition(self.issued, self.incarnation, self.number)


@dataclass(frozen=True, slots=True)
class Member(CardHead):
    """An admitted peer, as its latest card has it; `models` are those that it is admitted to."""

    name: str
    key: bytes
    claims: Claims
    """What its invitation says."""


@dataclass(frozen=True, slots=True)
class StatusHead:
    """What security needs to know of a status; numbers of one incarnation rise, a will needs none."""

    incarnation: Incarnation
    number: signed.Count
    revocations: signed.Count
    """The number of the revocation list that the peer has."""
    will: signed.Flag = False
    answers: tuple[signed.Data, ...] = ()
    """Other incarnations under the same name that were heard before: see `NameClaim`."""
    issued: signed.Number | None = None
    """When the peer said goodbye; with its invitation, that it counts without a card."""
    invitation: signed.Data = b""
    endorsement: signed.Data = b""


class Register:
    """Checks what others publish against the owner's key.

    swarm, owner: which swarm, and the public key that its invitations are signed with.
    revocations: the newest list known before a restart.
    ticket_holders: who was admitted on which ticket before a restart: see `snapshot`.
    editions: the newest card of every member before a restart: see `editions`.
    max_left: members that are gone of which it is remembered how new their last words were.
    """

    def __init__(
        self,
        swarm: str,
        owner: bytes,
        *,
        revocations: Revocations | None = None,
        ticket_holders: Mapping[str, list[str]] | None = None,
        editions: Mapping[str, list[Any]] | None = None,
        max_left: int = MAX_LEFT,
    ) -> None:
        self.swarm, self.owner, self._max_left = swarm, owner, max_left
        self.revocations = revocations or Revocations()
        self.members: dict[str, Member] = {}
        self._names: dict[str, str] = {}
        """The member that has an id: one name per key."""
        self._holders = {
            number: dict.fromkeys(ids) for number, ids in (ticket_holders or {}).items()
        }
        self._numbers: dict[str, tuple[bytes, int]] = {}
        self._left: dict[str, Edition] = {}
        """The last card or goodbye of those who are gone; oldest first."""
        self._before = {peer: Edition(*edition) for peer, edition in (editions or {}).items()}
        """The newest cards that were known before a restart, of peers that were not heard of since."""

    def snapshot(self) -> dict[str, list[str]]:
        """The holders of every ticket, to be kept in the checkpoint."""
        # Copied first: the peer's own thread asks while the event loop may take in a card.
        return {number: list(ids) for number, ids in list(self._holders.items())}

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
        if member.claims.kind == "ticket":
            self._holders.setdefault(member.claims.number, {})[peer_id(member.key)] = None
        self.members[member.name] = member
        self._names[peer_id(member.key)] = member.name
        self._left.pop(member.name, None)
        self._before.pop(member.name, None)

    def _newest(self, peer: str) -> Edition | None:
        """The newest card that is known of a peer that is here, or was before a restart."""
        member = self.members.get(peer)
        return self._before.get(peer) if member is None else member.edition

    def _member(self, peer: str, head: dict[str, Any], now: float) -> Member:
        card, key = signed.parse(CardHead, head, f"a card of {peer}"), head["key"]
        issued, admission = card.issued, Admission(card.invitation, card.endorsement)
        claims = check(admission, self.owner, self.swarm, peer, key, now)
        self._allow(peer, key, claims)
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
        admitted = frozenset(model for model in card.models if claims.admits(model))
        return Member(**asdict(replace(card, models=admitted)), name=peer, key=key, claims=claims)

    def _allow(self, peer: str, key: bytes, claims: Claims) -> None:
        if self.revocations.names(peer, claims.number):
            raise TrustError("revoked", f"{peer} or its invitation {claims.number} was revoked")
        known = self._names.get(peer_id(key), peer)
        if known != peer:
            raise TrustError("second-name", f"{peer} has the key of {known}, which is a member")
        holders = self._holders.get(claims.number, {})
        if claims.kind == "ticket" and peer_id(key) not in holders and len(holders) >= claims.uses:
            raise TrustError(
                "used-up",
                f"ticket {claims.number} admits {claims.uses}, and {peer} is one too many",
            )

    # --- statuses -------------------------------------------------------------------------------

    def status(self, peer: str, payload: bytes, now: float) -> tuple[StatusHead, bytes]:
        """Read a status published at `peer`'s topic; TrustError if it is not valid.

        A last will is signed beforehand and may come at any time; every other status has a number
        that rises, so that the broker cannot bring an old one back. A goodbye shows its peer's invitation and
        date, so that it counts without a card, which a peer that leaves takes away.
        """
        head, body = read_published(self.swarm, peer, "status", payload)
        status = signed.parse(StatusHead, head, f"a status of {peer}")
        member, edition = self.members.get(peer), None
        if member is None or member.incarnation != status.incarnation:
            if status.will or signed.state_of(body) != "left":
                raise TrustError(
                    "unknown-sender", f"a status of {peer}, whose card is not known yet"
                )
            edition = self._goodbye(peer, head["key"], status, now)
        if status.will:
            return status, body
        known, last = self._numbers.get(peer, (b"", -1))
        if known == status.incarnation and status.number <= last:
            raise TrustError("stale", f"an older status of {peer} than the one that is known")
        self._numbers[peer] = (status.incarnation, status.number)
        if edition is not None:
            self._note_left(peer, edition)
        return status, body

    def _goodbye(self, peer: str, key: bytes, status: StatusHead, now: float) -> Edition:
        """When a peer said goodbye of which we know no card; TrustError if it does not count."""
        if status.issued is None:
            raise TrustError("malformed", f"a goodbye of {peer} without a date")
        edition = Edition(status.issued, status.incarnation, LAST_NUMBER)
        admission = Admission(status.invitation, status.endorsement)
        claims = check_holder(admission, self.owner, self.swarm, peer, key)
        if claims.kind == "ticket" and id_of(peer) not in self._holders.get(claims.number, {}):
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
        """Take in a revocation list; returns the members on it, who are members no more."""
        new = Revocations.read(payload, self.owner, self.swarm)
        if new.number <= self.revocations.number:
            if new.number < self.revocations.number:
                raise TrustError(
                    "stale",
                    f"revocation list {new.number}; number {self.revocations.number} is known",
                )
            return []
        self.revocations = new
        return self._drop(lambda m: new.names(m.name, m.claims.number))

    def expire(self, now: float) -> list[str]:
        """Strike off members whose invitations have expired; returns them."""
        return self._drop(lambda m: now >= m.claims.expires)

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
        if len(self._left) > self._max_left:
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


def sign_card(identity: Identity, swarm: str, head: CardHead, body: bytes) -> bytes:
    """A card as it is published; `body` is what presence wants to say."""
    return _publish(identity, topics.card(swarm, identity.name), head, body)


def sign_status(identity: Identity, swarm: str, head: StatusHead, body: bytes) -> bytes:
    """A status as it is published; `body` is what presence wants to say."""
    return _publish(identity, topics.status(swarm, identity.name), head, body)


def _publish(identity: Identity, topic: str, head: CardHead | StatusHead, body: bytes) -> bytes:
    fields = {"version": VERSION, "key": identity.public} | signed.head_of(head)
    return signed.sign(identity, topic, fields, body)


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


# --- what is heard too early --------------------------------------------------------------------------

MAX_EARLY: Final = 256
"""Statuses that wait for their peer's card; the oldest give way."""
MAX_STATUS: Final = 4096
"""Bytes of a status that may wait. Only that of a peer that has left can be longer, and who was never here
need not be known to have left."""

MAX_MISDATED: Final = 1024
"""Cards that wait for a clock: each is of a member, with an invitation that the owner signed."""


class EarlyStatuses:
    """The last status of each peer whose card has not come yet.

    Whoever has no card may be anybody, with as many names as it likes: what is kept of them is little.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._statuses)

    def keep(self, peer: str, payload: bytes) -> None:
        """Let a status wait for its peer's card; TrustError says if one was dropped, this or another."""
        if len(payload) > MAX_STATUS:
            raise TrustError(
                "malformed",
                f"a status of {len(payload)} bytes of {peer}, whose card is not known; the limit "
                f"is {MAX_STATUS}",
            )
        self._statuses.pop(peer, None)
        self._statuses[peer] = payload
        if len(self._statuses) > MAX_EARLY:
            oldest = next(iter(self._statuses))
            del self._statuses[oldest]
            raise TrustError(
                "unknown-sender",
                f"over {MAX_EARLY} statuses of peers whose card is not known: the oldest, of "
                f"{oldest}, is dropped",
            )

    def pop(self, peer: str) -> bytes | None:
        """The status that waited for this peer's card, if any did."""
        return self._statuses.pop(peer, None)


class MisdatedCards:
    """Members' cards that were dated ahead of our time, or too long ago: once our clock is set right, they
    are heard again.

    They come once, when we connect, and a device without a battery may connect before it knows the time.
    """

    def __init__(self) -> None:
        self._cards: dict[str, tuple[float, bytes]] = {}

    def keep(self, peer: str, card: bytes, issued: float) -> None:
        """Let a card wait; only its peer's last."""
        if peer in self._cards or len(self._cards) < MAX_MISDATED:
            self._cards[peer] = (issued, card)

    def due(self, now: float) -> list[tuple[str, bytes]]:
        """The cards whose date has become right, to be heard once more."""
        due = {p: card for p, (issued, card) in self._cards.items() if is_recent(issued, now)}
        for peer in due:
            del self._cards[peer]
        return list(due.items())


# --- our own standing ---------------------------------------------------------------------------------

PATIENCE: Final = 120.0
"""Seconds that others may take to answer us; raise it if a round of training takes longer."""
NAMED: Final = 3
"""Others that are asked, and that the warning names."""


class Unanswered:
    """Notices that nobody seals anything for us: the others may refuse our card, and only they know why.

    It watches over one incarnation of a peer, from its first card until somebody has answered it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._since: float | None = None
        self._asked = self._warned = False

    def look(self, others: Collection[str], now: float) -> Literal["wait", "ask", "reissue"]:
        """What to do now: wait, ask some of the others for an answer, or publish our card again.

        A card that is dated anew may be believed. Warns once.
        others: who should have answered, as of now; nobody, once anybody has.
        """
        if not others:
            self._since = None
            return "wait"
        if self._since is None:
            self._since, self._asked = now, False
        if now - self._since >= PATIENCE:
            self._since, self._asked = now, False
            self._warn(others)
            return "reissue"
        if now - self._since >= PATIENCE / 2 and not self._asked:
            self._asked = True
            return "ask"
        return "wait"

    def _warn(self, others: Collection[str]) -> None:
        if self._warned:
            return
        self._warned = True
        names, more = ", ".join(sorted(others)[:NAMED]), len(others) - NAMED
        _log.warning(
            "peer %s: nobody has answered for %g s, though others are there (%s%s): they may "
            "refuse its card, and their logs say why; is its clock right?",
            self._name, PATIENCE, names, f" and {more} more" if more > 0 else "",
        )  # fmt: skip


MAX_MET: Final = 8
"""Other incarnations that a status names, the newest ones."""


class NameClaim:
    """Whether another incarnation is online under our own name, told so that old statuses do not count.

    A peer that starts asks on its own status topic whether the name is free. What our key has signed there
    may come from another incarnation that goes on (the same key on two devices), or from one that is long
    over and whose statuses the broker kept or an outsider brings back. No number tells them apart: a new
    incarnation does not know how far the others have counted. So every status names the incarnations that
    its signer has heard under its name, and while we ask, only one that names ours counts: ours is new, and
    nobody could name it before.

    An incarnation that goes on may be slow to answer. If one was heard to be online, we hold back the echo
    of our own question, so that whoever waits for it waits as long as it can, and not only for the echo.

    incarnation: which start of the peer is ours.
    """

    def __init__(self, incarnation: bytes) -> None:
        self.ours = False
        """Whether our card is out: then every status counts, for we contradict it."""
        self._incarnation = incarnation
        self._met: dict[bytes, None] = {}
        self._alive: set[bytes] = set()
        self._doubt = b""
        """An incarnation that was online and has not answered yet."""

    @property
    def met(self) -> list[bytes]:
        """The other incarnations under our name that were heard of lately."""
        return list(self._met)

    def hear(self, head: StatusHead, body: bytes) -> bool:
        """Take in a status that our key has signed: whether presence should know it (now).

        TrustError if it must not count.
        """
        other = head.incarnation
        if other == self._incarnation:
            return self.ours or not self._doubt
        self._met.pop(other, None)
        self._met[other] = None
        if len(self._met) > MAX_MET:
            del self._met[next(iter(self._met))]
        if self._incarnation in head.answers:
            self._alive.add(other)
        if not self.ours and other not in self._alive:
            if signed.state_of(body) == "online":
                self._doubt = other
            elif self._doubt == other:
                self._doubt = b""
            raise TrustError(
                "unanswered",
                "a status under our own name, of an incarnation that does not answer ours",
            )
        return True


# --- death notices ------------------------------------------------------------------------------------

MAX_TEXT: Final = 200
"""Characters of a reason, and of who signed it: both are logged."""


def _printable(text: str) -> str:
    return "".join(filter(str.isprintable, text[:MAX_TEXT]))


Printable: TypeAlias = Annotated[signed.Text, AfterValidator(_printable)]


@dataclass(frozen=True, slots=True)
class Death:
    """A death notice: the swarm's owner declares that a session is over, because its peer cannot say so.

    A peer that died without a goodbye is waited for until its lease is over. An operator who knows better,
    or the supervisor that saw the process end, publishes a notice (retained) at the peer's death topic. It
    names one session, so it can neither be used against the next one nor be of harm when it is brought back.
    With security on, it is a statement signed by the owner; else its body as it is.

    session: which one is over. reason, by: why, and by whose word. time: since when (seconds since 1970).
    """

    session: SessionName
    reason: Printable
    by: Printable
    time: signed.Number

    def encode(self) -> bytes:
        """The body of a notice, as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> Death:
        """Read a body; TrustError if it is of another form."""
        return signed.parse(cls, body, "a death notice")


def sign_death(owner: Identity, swarm: str, peer: str, death: Death) -> bytes:
    """A notice as the owner publishes it, retained, at `topics.death(swarm, peer)`."""
    return signed.sign(owner, topics.death(swarm, peer), {}, death.encode())


def read_death(payload: bytes, owner: bytes, swarm: str, peer: str) -> bytes:
    """The body of a notice about `peer`, if the owner signed it and `Death.decode` can read it."""
    _, body = signed.read(payload, topics.death(swarm, peer), lambda _: owner)
    Death.decode(body)
    return body
