"""All of a peer's trust behind one object: what it publishes is signed, what it hears is checked. No IO.

    trust = Trust(identity, admission, owner, swarm="garden", session=…, models=…, since=time.time())
    publish(card topic, trust.card(body))            # body: what presence wants to say
    for heard in trust.hear(topic, payload): …       # genuine cards and statuses, for presence
    packet = trust.seal(receiver, model, chunk)      # before it is published
    opened = trust.open(model, packet)               # before chunks are put together
    for receiver, model, packet in trust.tick(): …   # keys, for the receivers' inboxes

`NoTrust` has the same methods and believes everything: see trusting.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Final

from gossamer.logs import is_milestone

from .. import topics
from ..messages import Message
from ..wire import Buffer
from . import fields, signed
from .death import read_death
from .errors import MisdatedCard, TrustError
from .identity import Identity
from .invitation import CLOCK_SKEW, Admission, check
from .keyring import OVERHEAD, Keyring
from .opened import Opened
from .own_name import OwnName
from .register import Claim, Edition, Register, sign_card, sign_status
from .revocation import Revocations, revocation_topic
from .trusting import Heard
from .unanswered import Unanswered
from .waiting import MisdatedCards, Waiting

_log = logging.getLogger(__name__)

MAX_EARLY: Final = 64
MAX_EARLY_BYTES: Final = 16 << 20
"""Packets kept that came before the key that opens them. More are dropped: their senders repeat them."""

CARD_INTERVAL: Final = 12 * 3600.0
"""Seconds after which our card is issued again: well before the others find it too old."""
EXCHANGE_INTERVAL: Final = 24 * 3600.0
"""Seconds for which an exchange key is used: what was sealed with it can be read by whoever has it."""


class Trust:
    """One start of a peer in a swarm whose owner decides who takes part.

    identity, admission: who the peer is, and the paper that lets it in.
    owner: the public key of the swarm's owner.
    session, since: as on the card that presence writes.
    models: the partial models that the peer implements.
    memory: the `snapshot` of a former start: tickets' holders, the newest cards and revocations seen, and
        the key of the session's masks.
    wall, clock: seconds since 1970, for expiry; and any clock that goes on, for repeats.

    Raises TrustError if this peer's own paper does not let it in.
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
    ) -> None:
        self.identity, self.swarm = identity, swarm
        self.name, self.overhead = identity.name, OVERHEAD
        self.counters: Counter[str] = Counter()
        self._admission, self._wall, self._clock = admission, wall, clock
        self._terms = terms = check(admission, owner, swarm, identity.name, identity.public, wall())
        self._out_already = False
        memory = memory or {}
        revocations = None
        if memory.get("revocations"):
            revocations = Revocations.read(memory["revocations"], owner, swarm)
        self._list: bytes = memory.get("revocations", b"")
        self.register = Register(
            swarm, owner, revocations=revocations,
            ticket_holders=memory.get("tickets"), editions=memory.get("editions"),
        )  # fmt: skip
        if self.register.revocations.names(self.name, terms.number):
            raise TrustError("revoked", f"{self.name} was revoked: ask the swarm's owner")
        if refused := sorted(model for model in models if not terms.admits(model)):
            raise TrustError(
                "not-a-member",
                f"{self.name} implements {', '.join(refused)}, which paper {terms.number} does not "
                "admit it to: ask the owner for one that does, or leave the model out",
            )
        self._since, self._session = since, session
        masks = memory.get("masks") or {}
        mask_key = masks["key"] if masks.get("session") == session else None
        self.keyring = Keyring(
            identity, session, since, swarm, frozenset(models), mask_key=mask_key
        )  # fmt: skip
        self._renewed = (wall(), clock())
        """When our exchange key was drawn, by both clocks: one stands still while a device sleeps, the
        other can be set."""
        self._cards = 0
        self._issued: float | None = None
        """When our newest card was issued."""
        self._former_issued = float("-inf")
        """When the newest card that another incarnation of ours left at the broker was issued."""
        self._models = frozenset(models)
        self._number = 0
        self._own_name = OwnName(self.keyring.incarnation)
        self._unanswered = Unanswered(self.name)
        self._waiting, self._misdated = Waiting(), MisdatedCards()
        self._early: list[tuple[str, Buffer]] = []
        self._early_bytes = self._epochs = 0

    # --- what we say ----------------------------------------------------------------------------

    def patterns(self) -> list[str]:
        """Topics to subscribe to besides those of presence and gossip."""
        return [revocation_topic(self.swarm)]

    def card(self, body: bytes) -> bytes:
        """Our card, signed, with our paper. From now on the name is ours."""
        self._own_name.ours = True
        self._cards += 1
        self._issued = self._date()
        keyring = self.keyring
        edition = Edition(self._issued, keyring.incarnation, self._cards)
        claim = Claim(
            edition, keyring.exchange, keyring.masks, self._session, self._since, self._models
        )
        return sign_card(self.identity, self.swarm, self._admission, claim, body)

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
        """Our status, signed; it replaces those before it. Our goodbye shows our paper, too."""
        self._number += 1
        leaves = fields.state_of(body) == "left"
        return sign_status(
            self.identity, self.swarm, self.keyring.incarnation, self._number, body,
            answers=self._own_name.met, goodbye=(self._admission, self._wall()) if leaves else None,
        )  # fmt: skip

    def will(self, body: bytes) -> bytes:
        """Our last will, signed beforehand."""
        return sign_status(self.identity, self.swarm, self.keyring.incarnation, 0, body, will=True)

    # --- what we hear ---------------------------------------------------------------------------

    def hear(self, topic: str, payload: bytes) -> list[Heard]:
        """Take in a card, a status, a death notice or a revocation list; what is not genuine is counted and
        logged."""
        try:
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
        except TrustError as error:
            if isinstance(error, MisdatedCard):
                self._misdated.keep(topics.parse(topic).peer, payload, error.issued)
            self._refused(error, topic)
        except Exception as error:  # whatever else it is, a stranger must not end a peer with it
            self._refused(_malformed(error), topic)
        return []

    def _card(self, peer: str, payload: bytes) -> list[Heard]:
        member, body = self.register.card(peer, payload, self._wall())
        self.keyring.admit(member, self._clock())
        self.register.take(member)
        heard = [Heard("card", peer, body)]
        waiting = self._waiting.pop(peer)
        if waiting is not None:
            heard += self._status(peer, waiting)
        return heard

    def _status(self, peer: str, payload: bytes) -> list[Heard]:
        try:
            body = self.register.status(peer, payload, self._wall())
        except TrustError as error:
            if error.cause != "unknown-sender":
                raise
            self._waiting.keep(peer, payload)
            return []
        if fields.state_of(body) == "online":
            self.keyring.seen(peer)
        return [Heard("status", peer, body)]

    def _own(self, kind: str, payload: bytes) -> list[Heard]:
        """Our own topic: what another incarnation of ours says there, if it is running.

        A card proves nobody alive, but tells the generation of whoever had the name, which last wills do not,
        and when it was issued.
        """
        place = (topics.card if kind == "card" else topics.status)(self.swarm, self.name)
        head, body = signed.read(payload, place, lambda _: self.identity.public)
        if kind == "card":
            if head.get("incarnation") != self.keyring.incarnation:
                self._former_issued = max(self._former_issued, fields.number(head["issued"]))
            return [Heard("card", self.name, body)]
        try:
            return [Heard("status", self.name, body)] if self._own_name.hear(head, body) else []
        except TrustError as error:
            if error.cause != "unanswered":
                raise
            self._refused(error, topics.status(self.swarm, self.name))
            return [Heard("former", self.name, body)]

    def _revocations(self, payload: bytes) -> list[Heard]:
        if not payload:
            return []
        out = self.register.revoke(payload)
        self._list = payload
        revoked = self.register.revocations.names(self.name, self._terms.number)
        return self._out(out, "revoked") + self._out_oneself(revoked)

    def _out(self, peers: list[str], why: str) -> list[Heard]:
        for peer in peers:
            _log.warning("peer %s is no longer a member: %s", peer, why)
            self.keyring.retire(peer, self._clock())
        return [Heard("out", peer) for peer in peers]

    def _out_oneself(self, out: bool) -> list[Heard]:
        """Say, once, that this peer itself may take part no longer."""
        if not out or self._out_already:
            return []
        self._out_already = True
        return [Heard("out", self.name)]

    # --- packets --------------------------------------------------------------------------------

    def can_seal(self, receiver: str, model: str) -> bool:
        """Whether `seal` would work now; if not, it may when more cards and keys have come."""
        return self.keyring.can_seal(receiver, model)

    def seal(self, receiver: str, model: str, packet: bytes) -> bytes | None:
        """A chunk sealed for a member; None, counted, if it cannot be (yet): the ledger repeats it."""
        try:
            return self.keyring.seal(receiver, model, packet)
        except TrustError as error:
            self._refused(error, f"a packet for {receiver}")
            return None

    def expects(self, model: str, packet: Buffer) -> bool:
        """Whether a packet may be worth keeping until it can be opened; if not, it is counted by cause.

        Cheap: whoever is no member cannot fill the memory of a peer that is busy.
        """
        try:
            self.keyring.claimed(model, packet)
        except TrustError as error:
            self._refused(error, f"the inbox of {model}")
            return False
        return True

    def open(self, model: str, packet: Buffer) -> Opened | None:
        """The genuine chunk in a packet; None, counted by cause, if there is none."""
        try:
            return self.keyring.open(model, packet, self._clock())
        except TrustError as error:
            self._refused(error, f"the inbox of {model}")
            if error.cause == "no-key":
                self._keep_early(model, packet)
            return None
        except Exception as error:
            self._refused(_malformed(error), f"the inbox of {model}")
            return None

    def early(self) -> list[tuple[str, Buffer]]:
        """Packets to `open` once more, because a key has come since they did: (model, packet)."""
        epochs = self.keyring.epochs()
        if epochs == self._epochs:
            return []
        self._epochs, self._early_bytes = epochs, 0
        early, self._early = self._early, []
        return early

    def _keep_early(self, model: str, packet: Buffer) -> None:
        size = self._early_bytes + len(packet)
        if len(self._early) < MAX_EARLY and size <= MAX_EARLY_BYTES:
            self._early.append((model, packet))
            self._early_bytes = size

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
        """Note that a session left or was given up: keys that it knew are replaced.

        Not if a newer session of the peer has come meanwhile: that one is a member.
        """
        member = self.register.members.get(peer)
        if member is not None and member.session == session:
            self.register.forget(peer)
            self.keyring.retire(peer, self._clock())

    def tick(self) -> tuple[list[tuple[str, str, bytes]], list[Heard]]:
        """Key messages that are due (receiver, model, packet), and what else presence should know.

        That is members whose papers expired, cards whose date our clock got wrong, and that our own card
        should be published again: it grows old, has a new exchange key, or nobody answers it. Ask once our
        card is out.
        """
        now = self._wall()
        out: list[Heard] = []
        for peer, card in self._misdated.due(now):
            out += self.hear(topics.card(self.swarm, peer), card)
        out += self._out(self.register.expire(now), "its paper has expired")
        out += self._out_oneself(now >= self._terms.expires)
        keys = self.keyring.tick(self._clock())
        others = [] if self.keyring.answered else self.keyring.present()
        unanswered = self._unanswered.look(others, self._clock())
        if self._renew_exchange(now) or self.card_due() or unanswered:
            out.append(Heard("reissue-card", self.name))
        return keys, out

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

    def _refused(self, error: TrustError, where: str) -> None:
        cause = f"untrusted-{error.cause}"
        self.counters[cause] += 1
        count = self.counters[cause]
        if is_milestone(count):
            # Keys are always a moment behind those who come and go, and whoever crashed left a status
            # behind: that is no attack.
            _log.log(
                logging.INFO if error.cause in ("no-key", "unanswered") else logging.WARNING,
                "peer %s refused %s: %s: %s (%d so far)",
                self.name, where, error.cause, error, count,
            )  # fmt: skip


def _malformed(error: Exception) -> TrustError:
    return TrustError("malformed", f"{type(error).__name__}: {error!s:.100}")
