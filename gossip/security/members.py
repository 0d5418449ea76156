"""Keep the register of a swarm's members from their signed cards, statuses and death notices. No IO.

A *card* is published as a signed statement. Its head holds what security needs (key, exchange key,
invitation, session), its body the description of the peer that presence reads. Whenever a peer starts, it
draws an *incarnation*, a random number that identifies this start, and a new exchange key, so packets that
were sealed for a former incarnation cannot be opened. Cards of the same incarnation are ordered by number,
cards of different incarnations by date. A *status* is signed in the same way; its head also says which
revocation list the peer has.
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
"""Version of the heads of cards and statuses. Version 2 did not say which revocation list the peer has."""
INCARNATION_BYTES: Final = 16
Incarnation: TypeAlias = Annotated[
    bytes, Strict(), Field(min_length=INCARNATION_BYTES, max_length=INCARNATION_BYTES)
]
SessionName: TypeAlias = Annotated[
    signed.Text, AfterValidator(partial(topics.check_name, "session"))
]
MAX_CARD_MODELS: Final = 1024
"""The most partial models on a card. A peer that decides by itself what it shares has 400 at most."""
ModelNames: TypeAlias = Annotated[
    frozenset[Annotated[signed.Text, AfterValidator(partial(topics.check_name, "model"))]],
    Field(max_length=MAX_CARD_MODELS),
]
LAST_NUMBER: Final = 2**63 - 1
"""The card number in the edition of a goodbye: no card of the same incarnation can be newer."""

MAX_CARD_AGE: Final = 48 * 3600.0
"""Seconds for which a card is valid, plus `CLOCK_SKEW`. A peer issues a new one every twelve hours."""

MAX_PEERS: Final = 4096
"""The most members in a register. Only invited peers are admitted, so this only bounds memory."""

MAX_DEPARTED: Final = 10_000
"""The most departed peers whose last edition is remembered, so that older cards of them are refused."""


class Edition(NamedTuple):
    """The date, incarnation and number of a card or a goodbye, which tell the newer of two."""

    issued: float
    incarnation: bytes
    number: int

    def precedes(self, other: Edition) -> bool:
        """Return True if this edition is older: by number in the same incarnation, otherwise by date."""
        if self.incarnation == other.incarnation:
            return self.number < other.number
        return self[:2] < other[:2]


@dataclass(frozen=True, slots=True)
class CardHead:
    """The fields in the head of a peer's card, except its public key."""

    issued: signed.Number
    incarnation: Incarnation
    """The random number that identifies this start of the peer."""
    number: signed.Count
    exchange: signed.Key
    """The peer's newest X25519 public key for packets."""
    masks: signed.Key
    """The peer's X25519 public key for masks; it belongs to the session and survives a restart."""
    session: SessionName
    since: signed.Number
    """When the peer started, by its wall clock."""
    models: ModelNames
    """The partial models that the peer implements."""
    invitation: signed.Data
    endorsement: signed.Data

    @property
    def edition(self) -> Edition:
        """The edition of the card."""
        return Edition(self.issued, self.incarnation, self.number)


@dataclass(frozen=True, slots=True)
class Member(CardHead):
    """An admitted peer as described by its latest card; `models` holds those that it is admitted to."""

    name: str
    key: bytes
    claims: Claims
    """The content of the peer's invitation."""


@dataclass(frozen=True, slots=True)
class StatusHead:
    """The fields in the head of a status. Numbers rise within an incarnation; a last will has number 0."""

    incarnation: Incarnation
    number: signed.Count
    revocations: signed.Count
    """The number of the revocation list that the peer has."""
    will: signed.Flag = False
    answers: tuple[signed.Data, ...] = ()
    """Other incarnations under the same name whose statuses the peer has received: see `NameClaim`."""
    issued: signed.Number | None = None
    """The date of a goodbye. A goodbye carries the invitation too, so that it is valid without a card."""
    invitation: signed.Data = b""
    endorsement: signed.Data = b""


@dataclass(frozen=True, slots=True)
class SummaryHead:
    """The fields in the head of a summary, which observers read. Numbers rise within an incarnation."""

    issued: signed.Number
    incarnation: Incarnation
    number: signed.Count

    @property
    def edition(self) -> Edition:
        """The edition of the summary."""
        return Edition(self.issued, self.incarnation, self.number)


SUMMARY_OVERHEAD: Final = 256
"""Bytes that signing adds to a summary, at most."""


class Register:
    """The members of a swarm. It checks what peers publish against the owner's key.

    swarm, owner: the swarm's name, and the public key that its invitations are signed with.
    revocations: the newest revocation list known before a restart.
    ticket_holders: the peers admitted on each ticket before a restart: see the method.
    editions: the newest card of every member before a restart: see the method.
    max_departed: departed peers whose last edition is remembered.
    """

    def __init__(
        self,
        swarm: str,
        owner: bytes,
        *,
        revocations: Revocations | None = None,
        ticket_holders: Mapping[str, list[str]] | None = None,
        editions: Mapping[str, list[Any]] | None = None,
        max_departed: int = MAX_DEPARTED,
    ) -> None:
        self.swarm, self.owner, self._max_departed = swarm, owner, max_departed
        self.revocations = revocations or Revocations()
        self.members: dict[str, Member] = {}
        self._names: dict[str, str] = {}
        """Names of members by the id of their key: a key may have only one name."""
        self._ticket_holders = {
            number: dict.fromkeys(ids) for number, ids in (ticket_holders or {}).items()
        }
        self._status_numbers: dict[str, tuple[bytes, int]] = {}
        """By peer: the incarnation and number of its newest status."""
        self._departed: dict[str, Edition] = {}
        """The last card or goodbye of each departed peer, oldest first."""
        self._restored = {peer: Edition(*edition) for peer, edition in (editions or {}).items()}
        """The newest cards known before a restart, of peers whose card was not received since."""

    def ticket_holders(self) -> dict[str, list[str]]:
        """Return the ids of the peers admitted on every ticket, by its number, for the checkpoint."""
        # Copied first: the worker thread calls this while the event loop may add a member.
        return {number: list(ids) for number, ids in list(self._ticket_holders.items())}

    def editions(self, now: float) -> dict[str, list[Any]]:
        """Return the newest edition of every member's card, for the checkpoint: older ones stay refused."""
        members = {peer: member.edition for peer, member in list(self.members.items())}
        known = (dict(self._restored) | members).items()
        return {peer: list(card) for peer, card in known if is_recent(card.issued, now)}

    # --- cards ----------------------------------------------------------------------------------

    def read_card(self, peer: str, payload: bytes, now: float) -> tuple[Member, bytes]:
        """Check a card published at `peer`'s topic; return the member, not yet added, and the card's body.

        Raise TrustError if the card is not signed by that peer, the peer is not admitted, or the card is
        dated in the future or older than the known one.
        """
        head, body = read_published(self.swarm, peer, "card", payload)
        member = self._check_card(peer, head, now)
        known, departed = self.members.get(peer), self._departed.get(peer)
        newest = self._newest(peer)
        if newest is not None and member.edition.precedes(newest):
            raise TrustError("stale", f"an older card of {peer} than the one that is known")
        if known is None and departed is not None and not departed.precedes(member.edition):
            raise TrustError("stale", f"a card of {peer} from before its departure")
        if known is None and len(self.members) >= MAX_PEERS:
            raise TrustError("used-up", f"over {MAX_PEERS} peers: {peer} is not admitted")
        return member, body

    def add(self, member: Member) -> None:
        """Add a member that `read_card` returned, or replace its former entry."""
        if member.claims.kind == "ticket":
            self._ticket_holders.setdefault(member.claims.number, {})[peer_id(member.key)] = None
        self.members[member.name] = member
        self._names[peer_id(member.key)] = member.name
        self._departed.pop(member.name, None)
        self._restored.pop(member.name, None)

    def _newest(self, peer: str) -> Edition | None:
        """Return the edition of the newest known card of a member, or of one known before a restart."""
        member = self.members.get(peer)
        return self._restored.get(peer) if member is None else member.edition

    def _check_card(self, peer: str, head: dict[str, Any], now: float) -> Member:
        """Return the member that a card's head describes; TrustError if it is not admitted, or misdated."""
        card, key = signed.parse(CardHead, head, f"a card of {peer}"), head["key"]
        issued, admission = card.issued, Admission(card.invitation, card.endorsement)
        claims = check(admission, self.owner, self.swarm, peer, key, now)
        self._check_allowed(peer, key, claims)
        if issued > now + CLOCK_SKEW:
            # If it were accepted, the cards that the peer issues after correcting its clock would look old.
            raise MisdatedCard(
                "clock",
                f"the card of {peer} is dated {issued - now:.0f} s ahead of our clock: its clock is "
                "ahead, or ours is behind",
                issued,
            )
        if not is_recent(issued, now):
            raise MisdatedCard(
                "old-card",
                f"the card of {peer} was issued {(now - issued) / 3600:.0f} h ago, and is valid for "
                f"{MAX_CARD_AGE / 3600:.0f}: the peer no longer runs, its clock is behind, or ours is ahead",
                issued,
            )
        admitted = frozenset(model for model in card.models if claims.admits(model))
        return Member(**asdict(replace(card, models=admitted)), name=peer, key=key, claims=claims)

    def _check_allowed(self, peer: str, key: bytes, claims: Claims) -> None:
        """Raise TrustError if the peer is revoked, has a second name, or its ticket is used up."""
        if self.revocations.includes(peer, claims.number):
            raise TrustError("revoked", f"{peer} or its invitation {claims.number} was revoked")
        known_name = self._names.get(peer_id(key), peer)
        if known_name != peer:
            raise TrustError("second-name", f"{peer} has the key of the member {known_name}")
        holders = self._ticket_holders.get(claims.number, {})
        if claims.kind == "ticket" and peer_id(key) not in holders and len(holders) >= claims.uses:
            raise TrustError(
                "used-up",
                f"ticket {claims.number} admits {claims.uses} peers, and {peer} would be one more",
            )

    # --- statuses -------------------------------------------------------------------------------

    def read_status(self, peer: str, payload: bytes, now: float) -> tuple[StatusHead, bytes]:
        """Check a status published at `peer`'s topic, and return its head and body; TrustError if invalid.

        A last will is signed beforehand and may arrive at any time; every other status has a rising number,
        so that the broker cannot replay an old one. A goodbye is valid without a card, because a peer clears
        its card when it leaves; so the goodbye carries the peer's invitation and a date.
        """
        head, body = read_published(self.swarm, peer, "status", payload)
        status = signed.parse(StatusHead, head, f"a status of {peer}")
        member, edition = self.members.get(peer), None
        if member is None or member.incarnation != status.incarnation:
            if status.will or signed.state_of(body) != "left":
                raise TrustError(
                    "unknown-sender", f"a status of {peer}, whose card is not known yet"
                )
            edition = self._check_goodbye(peer, head["key"], status, now)
        if status.will:
            return status, body
        incarnation, last_number = self._status_numbers.get(peer, (b"", -1))
        if incarnation == status.incarnation and status.number <= last_number:
            raise TrustError("stale", f"an older status of {peer} than the one that is known")
        self._status_numbers[peer] = (status.incarnation, status.number)
        if edition is not None:
            self._note_departed(peer, edition)
        return status, body

    def _check_goodbye(self, peer: str, key: bytes, status: StatusHead, now: float) -> Edition:
        """Return the edition of a goodbye whose card is not known; TrustError if the goodbye is invalid."""
        if status.issued is None:
            raise TrustError("malformed", f"a goodbye of {peer} without a date")
        edition = Edition(status.issued, status.incarnation, LAST_NUMBER)
        admission = Admission(status.invitation, status.endorsement)
        claims = check_holder(admission, self.owner, self.swarm, peer, key)
        holders = self._ticket_holders.get(claims.number, {})
        if claims.kind == "ticket" and id_of(peer) not in holders:
            # The holder of a ticket can endorse any number of keys.
            raise TrustError("unknown-sender", f"a goodbye of {peer}, which was not admitted here")
        if edition.issued > now + CLOCK_SKEW:
            raise TrustError("clock", f"the goodbye of {peer} is dated ahead of our clock")
        newest = self._newest(peer)
        if newest is not None and edition.precedes(newest):
            raise TrustError("stale", f"a goodbye of {peer} from before the card that is known")
        return edition

    # --- removal --------------------------------------------------------------------------------

    def revoke(self, payload: bytes) -> list[str]:
        """Install a revocation list, remove the members on it, and return their names."""
        new = Revocations.read(payload, self.owner, self.swarm)
        if new.number <= self.revocations.number:
            if new.number < self.revocations.number:
                raise TrustError(
                    "stale",
                    f"revocation list {new.number} is older than the known one, {self.revocations.number}",
                )
            return []
        self.revocations = new
        return self._remove_where(lambda m: new.includes(m.name, m.claims.number))

    def expire(self, now: float) -> list[str]:
        """Remove the members whose invitations have expired, and return their names."""
        return self._remove_where(lambda m: now >= m.claims.expires)

    def remove(self, peer: str) -> None:
        """Remove a peer that left or was given up; its ticket stays used.

        The edition of its last card is remembered, so that the broker cannot replay older ones.
        """
        member = self.members.pop(peer, None)
        if member is None:
            return
        del self._names[peer_id(member.key)]
        self._note_departed(peer, self._departed.get(peer, member.edition))

    def _note_departed(self, peer: str, edition: Edition) -> None:
        self._restored.pop(peer, None)
        self._departed.pop(peer, None)
        self._departed[peer] = edition
        if len(self._departed) > self._max_departed:
            oldest = next(iter(self._departed))
            del self._departed[oldest]
            self._status_numbers.pop(oldest, None)

    def _remove_where(self, condition: Callable[[Member], bool]) -> list[str]:
        names = [name for name, member in self.members.items() if condition(member)]
        for name in names:
            self.remove(name)
        return names


def read_published(
    swarm: str, peer: str, kind: Literal["card", "status", "summary"], payload: bytes
) -> tuple[dict[str, Any], bytes]:
    """Return head and body of a card, status or summary; TrustError unless its peer's own key signed it.

    It does not check whether the peer is admitted, nor how old the statement is: `Register` does.
    """
    topic = str(topics.Topic(swarm, peer, kind))
    return signed.read(payload, topic, lambda head: _signing_key(head, peer))


def sign_card(identity: Identity, swarm: str, head: CardHead, body: bytes) -> bytes:
    """Return the signed card, ready to publish; `body` comes from presence."""
    return _sign(identity, topics.card(swarm, identity.name), head, body)


def sign_status(identity: Identity, swarm: str, head: StatusHead, body: bytes) -> bytes:
    """Return the signed status, ready to publish; `body` comes from presence."""
    return _sign(identity, topics.status(swarm, identity.name), head, body)


def sign_summary(identity: Identity, swarm: str, head: SummaryHead, body: bytes) -> bytes:
    """Return the signed summary, ready to publish."""
    return _sign(identity, topics.summary(swarm, identity.name), head, body)


def _sign(
    identity: Identity, topic: str, head: CardHead | StatusHead | SummaryHead, body: bytes
) -> bytes:
    fields = {"version": VERSION, "key": identity.public} | signed.head_of(head)
    return signed.sign(identity, topic, fields, body)


def _signing_key(head: Mapping[str, Any], peer: str) -> bytes:
    key = head.get("key")
    if not isinstance(key, bytes) or len(key) != 32:
        raise TrustError("malformed", f"a card or status of {peer} contains no public key")
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
    """Return True if a card of this date is valid now: neither dated ahead of our clock nor too old."""
    return now - MAX_CARD_AGE - CLOCK_SKEW <= issued <= now + CLOCK_SKEW


# --- statuses and cards that arrive too early ---------------------------------------------------------

MAX_EARLY: Final = 256
"""The most statuses that are kept until their peer's card arrives; the oldest are dropped."""
MAX_STATUS: Final = 4096
"""The longest status, in bytes, that is kept until its peer's card arrives. Only a goodbye can be longer, and
the goodbye of an unknown peer is of no use."""

MAX_MISDATED: Final = 1024
"""The most cards with a wrong date that are kept. Each belongs to a peer with a valid invitation."""


class EarlyStatuses:
    """The last status of each peer whose card has not arrived yet.

    Such a status may come from anybody, under any number of names, so only a few short ones are kept.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._statuses)

    def keep(self, peer: str, payload: bytes) -> None:
        """Keep a status until its peer's card arrives; TrustError if this or an older status is dropped."""
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
        """Remove and return the status that was kept for this peer, or None."""
        return self._statuses.pop(peer, None)


class MisdatedCards:
    """Invited peers' cards that are dated ahead of our clock, or too long ago, until our clock is corrected.

    The broker delivers retained cards once, when we connect, and a device without a battery-backed clock may
    connect before it has the time.
    """

    def __init__(self) -> None:
        self._cards: dict[str, tuple[float, bytes]] = {}

    def keep(self, peer: str, card: bytes, issued: float) -> None:
        """Keep a peer's card in place of any earlier one; ignored when too many are kept."""
        if peer in self._cards or len(self._cards) < MAX_MISDATED:
            self._cards[peer] = (issued, card)

    def take_due(self, now: float) -> list[tuple[str, bytes]]:
        """Remove and return the (peer, card) pairs whose date is valid by now."""
        due = {p: card for p, (issued, card) in self._cards.items() if is_recent(issued, now)}
        for peer in due:
            del self._cards[peer]
        return list(due.items())


# --- our own card and name ----------------------------------------------------------------------------

REPLY_TIMEOUT: Final = 120.0
"""Seconds that other peers may take to reply to us; raise it if a round of training takes longer."""
MAX_ASKED: Final = 3
"""The most peers that are asked for a reply, and that the warning names."""


class ReplyMonitor:
    """Notices that no peer sends us any packet: the others may refuse our card, and only their logs say why.

    It watches one incarnation of a peer, from its first card until a first packet arrives.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._since: float | None = None
        """Since when replies are awaited; None while none is."""
        self._asked = self._warned = False

    def next_step(self, others: Collection[str], now: float) -> Literal["wait", "ask", "reissue"]:
        """Return what to do now: wait, ask some peers for a reply, or publish our card again.

        A card with a new date may be accepted where the old one was refused. Logs one warning.
        others: the online peers that should have replied; empty once any packet has arrived.
        """
        if not others:
            self._since = None
            return "wait"
        if self._since is None:
            self._since, self._asked = now, False
        if now - self._since >= REPLY_TIMEOUT:
            self._since, self._asked = now, False
            self._warn(others)
            return "reissue"
        if now - self._since >= REPLY_TIMEOUT / 2 and not self._asked:
            self._asked = True
            return "ask"
        return "wait"

    def _warn(self, others: Collection[str]) -> None:
        if self._warned:
            return
        self._warned = True
        names, more = ", ".join(sorted(others)[:MAX_ASKED]), len(others) - MAX_ASKED
        _log.warning(
            "peer %s: no peer has replied for %g s, though others are online (%s%s): they may "
            "refuse its card, and their logs say why; is its clock right?",
            self._name, REPLY_TIMEOUT, names, f" and {more} more" if more > 0 else "",
        )  # fmt: skip


MAX_OTHERS: Final = 8
"""The most other incarnations that a status lists, the newest ones."""


class NameClaim:
    """Finds out whether another incarnation is running under our own name, without trusting old statuses.

    A starting peer publishes on its own status topic to learn whether the name is free. Other statuses there
    that our key has signed come from another running incarnation (the same key on two devices), or from one
    that ended long ago, whose status the broker retained or an attacker replays. Status numbers cannot tell
    the two apart, because a new incarnation does not have the numbers of the others. So every status lists
    the other incarnations whose statuses its signer has received. While we are claiming the name, a status
    counts only if it lists our incarnation: ours is new, so no old status can list it.

    Another running incarnation may be slow to answer. If a status said that one is online, we hold back the
    echo of our own status, so that a caller waiting for that echo waits for its full timeout instead.

    incarnation: the random number of our own incarnation.
    """

    def __init__(self, incarnation: bytes) -> None:
        self.is_claimed = False
        """Whether our card is published: from then on every status counts, because we respond to it."""
        self._incarnation = incarnation
        self._others: dict[bytes, None] = {}
        self._answered: set[bytes] = set()
        """Other incarnations that have listed ours, so they are running."""
        self._awaited = b""
        """An incarnation whose status said online and that has not answered yet."""

    @property
    def others(self) -> list[bytes]:
        """The other incarnations under our name whose statuses we received lately."""
        return list(self._others)

    def receive(self, head: StatusHead, body: bytes) -> bool:
        """Handle a status that our key has signed; return True if it should be passed on to presence.

        Raise TrustError if the status must not count.
        """
        other = head.incarnation
        if other == self._incarnation:
            return self.is_claimed or not self._awaited
        self._others.pop(other, None)
        self._others[other] = None
        if len(self._others) > MAX_OTHERS:
            del self._others[next(iter(self._others))]
        if self._incarnation in head.answers:
            self._answered.add(other)
        if not self.is_claimed and other not in self._answered:
            if signed.state_of(body) == "online":
                self._awaited = other
            elif self._awaited == other:
                self._awaited = b""
            raise TrustError(
                "unanswered",
                "a status under our own name, of an incarnation that does not answer ours",
            )
        return True


# --- death notices ------------------------------------------------------------------------------------

MAX_TEXT: Final = 200
"""The most characters of a notice's reason and signer, which are logged; longer texts are truncated."""


def _printable(text: str) -> str:
    return "".join(filter(str.isprintable, text[:MAX_TEXT]))


Printable: TypeAlias = Annotated[signed.Text, AfterValidator(_printable)]


@dataclass(frozen=True, slots=True)
class Death:
    """A death notice: the swarm's owner declares that a session of a crashed peer is over.

    The others wait for a peer that ended without a goodbye until its lease expires. An operator, or the
    supervisor that saw the process end, can shorten this: it publishes a retained notice at the peer's death
    topic. A notice names one session, so it does no harm to the next one, even if it is replayed. With
    security on, it is a statement signed by the owner; without, only the JSON body.

    session: the session that is over. reason: why. by: who declares it. time: since when (Unix time).
    """

    session: SessionName
    reason: Printable
    by: Printable
    time: signed.Number

    def encode(self) -> bytes:
        """Return the body of the notice, as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> Death:
        """Parse the body of a notice; TrustError if a field is missing or has another type."""
        return signed.parse(cls, body, "a death notice")


def sign_death(owner: Identity, swarm: str, peer: str, death: Death) -> bytes:
    """Return the signed notice, which the owner publishes retained at `topics.death(swarm, peer)`."""
    return signed.sign(owner, topics.death(swarm, peer), {}, death.encode())


def read_death(payload: bytes, owner: bytes, swarm: str, peer: str) -> bytes:
    """Return the body of a notice about `peer`; TrustError if it is malformed or not signed by the owner."""
    _, body = signed.read(payload, topics.death(swarm, peer), lambda _: owner)
    Death.decode(body)
    return body
