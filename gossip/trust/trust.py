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

from .. import topics
from ..messages import Message
from ..wire import Buffer
from . import signed
from .errors import TrustError
from .identity import Identity
from .invitation import Admission, check
from .keyring import OVERHEAD, Keyring
from .opened import Opened
from .own_name import OwnName, is_online
from .register import Claim, Register, sign_card, sign_status
from .revocation import Revocations, revocation_topic
from .trusting import Heard
from .unanswered import Unanswered
from .waiting import Ahead, Waiting

_log = logging.getLogger(__name__)

MAX_EARLY: Final = 64
MAX_EARLY_BYTES: Final = 16 << 20
"""Packets kept that came before the key that opens them. More are dropped: their senders repeat them."""


class Trust:
    """One life of a peer in a swarm whose owner decides who takes part.

    identity, admission: who the peer is, and the paper that lets it in.
    owner: the public key of the swarm's owner.
    session, since: as on the card that presence writes.
    models: the partial models that the peer implements.
    memory: the `snapshot` of a former life: tickets' holders and the revocations seen.
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
            swarm, owner, revocations=revocations, ticket_holders=memory.get("tickets")
        )
        if self.register.revocations.names(self.name, terms.number):
            raise TrustError("revoked", f"{self.name} was revoked: ask the swarm's owner")
        if refused := sorted(model for model in models if not terms.admits(model)):
            raise TrustError(
                "not-a-member",
                f"{self.name} implements {', '.join(refused)}, which paper {terms.number} does not "
                "admit it to: ask the owner for one that does, or leave the model out",
            )
        self._since, self._session = since, session
        self.keyring = Keyring(identity, session, since, swarm, frozenset(models))
        self._models = frozenset(models)
        self._number = 0
        self._own_name = OwnName(self.keyring.exchange)
        self._unanswered = Unanswered(self.name)
        self._waiting, self._ahead = Waiting(), Ahead()
        self._early: list[tuple[str, Buffer]] = []
        self._early_bytes = self._epochs = 0

    # --- what we say ----------------------------------------------------------------------------

    def patterns(self) -> list[str]:
        """Topics to subscribe to besides those of presence and gossip."""
        return [revocation_topic(self.swarm)]

    def card(self, body: bytes) -> bytes:
        """Our card, signed, with our paper. From now on the name is ours."""
        self._own_name.ours = True
        claim = Claim(self.keyring.exchange, self._session, self._since, self._models)
        return sign_card(self.identity, self.swarm, self._admission, claim, self._wall(), body)

    def status(self, body: bytes) -> bytes:
        """Our status, signed; it replaces those before it."""
        self._number += 1
        return sign_status(
            self.identity, self.swarm, self.keyring.exchange, self._number, body,
            answers=self._own_name.met,
        )  # fmt: skip

    def will(self, body: bytes) -> bytes:
        """Our last will, signed beforehand."""
        return sign_status(self.identity, self.swarm, self.keyring.exchange, 0, body, will=True)

    # --- what we hear ---------------------------------------------------------------------------

    def hear(self, topic: str, payload: bytes) -> list[Heard]:
        """Take in a card, a status or a revocation list; what is not genuine is counted and logged."""
        try:
            if topic == revocation_topic(self.swarm):
                return self._revocations(payload)
            where = topics.parse(topic)
            if where.swarm != self.swarm:
                raise TrustError("malformed", f"from swarm {where.swarm!r}; this is {self.swarm!r}")
            if where.kind not in ("card", "status") or not payload:
                return []  # an empty payload clears a topic: whoever did it, it says nothing
            if where.peer == self.name:
                return self._own(where.kind, payload)
            if where.kind == "status":
                return self._status(where.peer, payload)
            return self._card(where.peer, payload)
        except TrustError as error:
            if error.cause == "clock":
                self._ahead.keep(topics.parse(topic).peer, payload)
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
            body = self.register.status(peer, payload)
        except TrustError as error:
            if error.cause != "unknown-sender":
                raise
            self._waiting.keep(peer, payload)
            return []
        if is_online(body):
            self.keyring.seen(peer)
        return [Heard("status", peer, body)]

    def _own(self, kind: str, payload: bytes) -> list[Heard]:
        """Our own topic: what another life of ours says there, if it lives."""
        if kind == "card":
            return []
        head, body = signed.read(
            payload, topics.status(self.swarm, self.name), lambda _: self.identity.public
        )
        return [Heard("status", self.name, body)] if self._own_name.hear(head, body) else []

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
        self._refused(cause, f"the inbox of {message.vector}")
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

        That is members whose papers expired, cards that our clock was behind, and that nobody answers us.
        Ask once our card is out.
        """
        now = self._wall()
        out: list[Heard] = []
        for peer, card in self._ahead.due(self._clock()):
            out += self.hear(topics.card(self.swarm, peer), card)
        out += self._out(self.register.expire(now), "its paper has expired")
        out += self._out_oneself(now >= self._terms.expires)
        keys = self.keyring.tick(self._clock())
        others = [] if self.keyring.answered else self.keyring.present()
        if self._unanswered.look(others, self._clock()):
            out.append(Heard("unanswered", self.name))
        return keys, out

    def snapshot(self) -> dict[str, Any]:
        """What a next life should remember: `memory`."""
        return {"tickets": self.register.snapshot(), "revocations": self._list}

    def _refused(self, error: TrustError, where: str) -> None:
        cause = f"untrusted-{error.cause}"
        self.counters[cause] += 1
        count = self.counters[cause]
        if count & (count - 1) == 0:  # 1, 2, 4, 8, …: a flood cannot flood the log
            # Keys are always a moment behind those who come and go, and whoever crashed left a status
            # behind: that is no attack.
            _log.log(
                logging.INFO if error.cause in ("no-key", "unanswered") else logging.WARNING,
                "peer %s refused %s: %s: %s (%d so far)",
                self.name, where, error.cause, error, count,
            )  # fmt: skip


def _malformed(error: Exception) -> TrustError:
    return TrustError("malformed", f"{type(error).__name__}: {error!s:.100}")
