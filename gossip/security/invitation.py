"""Invitations and revocation lists, by which the swarm's owner decides which peers may take part.

An *invitation* names one peer by its label and public key. A *ticket* names no peer: it has a key pair of its
own, and with the private key anybody can endorse a peer for it, up to a number of uses. A card contains only
the ticket's public key and the endorsement, a signature over the peer's name and key, so that a stranger who
reads cards at the broker cannot use the ticket.

Both expire: a peer whose invitation or ticket has expired is no longer a member.

Both may name the partial models that a peer is admitted to. Peers that decide by themselves what they share
begin new models while they run, whose names the owner cannot know: a *pattern* such as `group*` admits to all
models whose names begin like that.

The *revocation list* names peers and invitations that are no longer valid. It is signed by the owner,
retained by the broker, and sent from member to member (see layer.py). Its number rises with every change. A
peer keeps the list with the highest number and refuses lower ones, so that nobody can forge or replay a list.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ..topics import ROOT, TopicError, check_name
from . import signed
from .identity import (
    Identity,
    TrustError,
    check_label,
    from_base64,
    id_of,
    peer_id,
    read_secret,
    to_base64,
    verify,
    write_secret,
)

VERSION: Final = 2
"""Version of an invitation. Version 1 did not contain the peer's label, so it admitted many names."""
MAX_MODELS: Final = 256
"""The most names and patterns of partial models in an invitation."""
CLOCK_SKEW: Final = 300.0
"""Seconds by which the clocks of two devices may differ."""
_CONTEXT: Final = "invitation"
_ENDORSEMENT_CONTEXT: Final = b"gossamer ticket v2\0"
_INVITATION_PREFIX, _TICKET_PREFIX = "gossamer-invitation:", "gossamer-ticket:"


@dataclass(frozen=True, slots=True)
class Claims:
    """The content of an invitation or a ticket."""

    swarm: signed.Text
    number: signed.Text
    """A random identifier of the invitation, for revocation."""
    kind: Literal["peer", "ticket"]
    key: signed.Key
    """The invited peer's public key, or the ticket's own."""
    label: signed.Text
    """The invited peer's label; empty on a ticket."""
    models: signed.Names | None
    """The partial models that the peer is admitted to, by name or by a pattern; None means all."""
    uses: signed.Count
    issued: signed.Number
    expires: signed.Number

    def admits(self, model: str) -> bool:
        """Return True if the peer is admitted to a partial model; for a pair `a&b` it needs both.

        Given a pattern, return True if the peer is admitted to all models that the pattern matches.
        """
        return self.models is None or all(map(self._admits, model.split("&")))

    def _admits(self, name: str) -> bool:
        assert self.models is not None
        return name in self.models or any(
            name.startswith(model[:-1]) for model in self.models if is_pattern(model)
        )


def is_pattern(model: str) -> bool:
    """Return True for a pattern: the beginning of a name, at least one character, and then `*`."""
    return len(model) > 1 and model.endswith("*")


def check_pattern(model: str) -> str:
    """Return the name or pattern of a partial model in an invitation; TrustError if it is neither."""
    if model == "*":
        raise TrustError(
            "malformed",
            "the pattern * would admit to every model: leave the models out if that is meant",
        )
    name = model[:-1] if is_pattern(model) else model
    try:
        check_name("model", name)
    except TopicError as error:
        hint = "; a pattern has one *, at its end, as in group*" if "*" in name else ""
        raise TrustError("malformed", f"{error}{hint}") from None
    if is_pattern(model) and "&" in name:
        raise TrustError(
            "malformed", f"the pattern {model} is for a pair of models: name both models instead"
        )
    return model


@dataclass(frozen=True, slots=True)
class Admission:
    """The proof of admission on a peer's card: its invitation, or a ticket and its endorsement."""

    invitation: bytes
    endorsement: bytes = b""

    @classmethod
    def load(cls, path: Path, identity: Identity) -> Admission:
        """Make the admission of `identity` from an invitation or ticket file."""
        try:
            text = path.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TrustError("file", f"{path}: cannot be read: {error}") from None
        try:
            if text.startswith(_INVITATION_PREFIX):
                return cls(from_base64(text.removeprefix(_INVITATION_PREFIX)))
            if text.startswith(_TICKET_PREFIX):
                invitation, _, secret = (
                    read_secret(path).strip().removeprefix(_TICKET_PREFIX).partition(":")
                )
                return endorse(from_base64(invitation), from_base64(secret), identity)
        except TrustError:
            raise
        except ValueError:
            pass
        raise TrustError("file", f"{path}: is neither an invitation nor a ticket")


def invite(
    owner: Identity,
    swarm: str,
    label: str,
    key: bytes,
    *,
    models: Collection[str] | None = None,
    days: float = 365.0,
) -> bytes:
    """Return an invitation for the peer with this label and key; TrustError if an argument is invalid."""
    return _issue(owner, swarm, "peer", (check_label(label), key), models, 1, days)


def open_ticket(
    owner: Identity,
    swarm: str,
    *,
    uses: int = 1,
    models: Collection[str] | None = None,
    days: float = 7.0,
) -> tuple[bytes, bytes]:
    """Return a ticket for up to `uses` peers, and its private key.

    Every peer admits the first `uses` ids whose cards it receives with this ticket, and remembers them, also
    in its checkpoint. If more peers use the ticket, different members may admit different ones: then the
    ticket has leaked, and its number should be revoked.
    """
    if uses < 1:
        raise TrustError("malformed", f"a ticket for {uses} uses admits no peer: at least 1")
    ticket = Identity.generate("ticket")
    return _issue(owner, swarm, "ticket", ("", ticket.public), models, uses, days), ticket.secret()


def endorse(invitation: bytes, secret: bytes, peer: Identity) -> Admission:
    """Admit a peer with a ticket: sign its name and public key with the ticket's private key."""
    ticket = Identity.from_secret("ticket", secret)
    return Admission(invitation, ticket.sign(_endorsed_bytes(peer.name, peer.public)))


def check(
    admission: Admission,
    owner: bytes,
    swarm: str,
    name: str,
    key: bytes,
    now: float | None = None,
) -> Claims:
    """Return the claims of an invitation; TrustError if it does not admit the peer with this name and key.

    The uses of a ticket and revocations are checked by `Register`, which has the other members.
    """
    claims = check_holder(admission, owner, swarm, name, key)
    now = time.time() if now is None else now
    if now >= claims.expires:
        raise TrustError(
            "expired", f"invitation {claims.number} expired {now - claims.expires:.0f} s ago"
        )
    if now < claims.issued - CLOCK_SKEW:
        raise TrustError(
            "expired", f"invitation {claims.number} is not valid yet: is the clock right?"
        )
    return claims


def check_holder(admission: Admission, owner: bytes, swarm: str, name: str, key: bytes) -> Claims:
    """Return the claims of an invitation, expired or not; TrustError if it is for another peer or swarm."""
    claims = read_claims(admission.invitation, owner)
    if claims.swarm != swarm:
        raise TrustError("uninvited", f"invited to swarm {claims.swarm!r}, not to {swarm!r}")
    if claims.kind == "peer":
        invited_name = f"{claims.label}@{peer_id(claims.key)}"
        if (claims.key, invited_name) != (key, name):
            raise TrustError("uninvited", f"the invitation is for {invited_name}, not for {name}")
    elif not verify(claims.key, admission.endorsement, _endorsed_bytes(name, key)):
        raise TrustError("uninvited", f"ticket {claims.number} has not endorsed this peer")
    return claims


def _endorsed_bytes(name: str, key: bytes) -> bytes:
    """Return the bytes that a ticket's private key signs to endorse a peer."""
    return _ENDORSEMENT_CONTEXT + name.encode() + b"\0" + key


def read_claims(invitation: bytes, owner: bytes) -> Claims:
    """Return the claims of an invitation or ticket; TrustError if the owner did not sign it."""
    try:
        head, _ = signed.read(invitation, _CONTEXT, lambda _: owner)
    except TrustError as error:
        raise TrustError("uninvited", f"no valid invitation: {error}") from None
    version = head.get("version", 1)
    if version != VERSION:
        raise TrustError(
            "uninvited",
            f"an invitation of version {version!s:.20}; this peer reads version {VERSION}: ask the "
            "swarm's owner for a new one",
        )
    return signed.parse(Claims, head, "an invitation", "uninvited")


def invitation_text(invitation: bytes) -> str:
    """Return the content of an invitation's file."""
    return f"{_INVITATION_PREFIX}{to_base64(invitation)}\n"


def save_invitation(path: Path, invitation: bytes) -> None:
    """Write an invitation to a file. It is no secret, because only the invited peer's key can use it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(invitation_text(invitation), encoding="utf-8")
    except OSError as error:
        raise TrustError("file", f"{path}: cannot be written: {error.strerror}") from None


def save_ticket(path: Path, invitation: bytes, secret: bytes) -> None:
    """Write a ticket with its private key to a secret file: anybody who can read it can join."""
    write_secret(path, f"{_TICKET_PREFIX}{to_base64(invitation)}:{to_base64(secret)}\n")


def _issue(
    owner: Identity,
    swarm: str,
    kind: Literal["peer", "ticket"],
    label_and_key: tuple[str, bytes],
    models: Collection[str] | None,
    uses: int,
    days: float,
) -> bytes:
    if models is not None and not 0 < len(set(models)) <= MAX_MODELS:
        raise TrustError(
            "malformed", f"an invitation names 1 to {MAX_MODELS} models, not {len(set(models))}"
        )
    if not 0 < days < math.inf:
        raise TrustError(
            "malformed", f"an invitation is valid for a finite number of days above 0, not {days:g}"
        )
    now, (label, key) = time.time(), label_and_key
    admitted = None if models is None else frozenset(map(check_pattern, models))
    claims = Claims(
        swarm, secrets.token_hex(8), kind, key, label, admitted, uses, now, now + days * 86400
    )
    return signed.sign(owner, _CONTEXT, {"version": VERSION} | signed.head_of(claims))


# --- revocation ---------------------------------------------------------------------------------------

MAX_ENTRIES: Final = 10_000


def revocation_topic(swarm: str) -> str:
    """Return the topic at which the owner publishes the list, retained."""
    return f"{ROOT}/{check_name('swarm', swarm)}/owner/revocations"


@dataclass(frozen=True, slots=True)
class Revocations:
    """A revocation list: ids of peers and numbers of invitations that are no longer valid."""

    number: signed.Count = 0
    peers: signed.Names = frozenset()
    invitations: signed.Names = frozenset()

    def __post_init__(self) -> None:
        if len(self.peers) + len(self.invitations) > MAX_ENTRIES:
            raise TrustError(
                "malformed", f"over {MAX_ENTRIES} revocations: start a swarm with a new owner key"
            )

    def add(self, peers: Iterable[str] = (), invitations: Iterable[str] = ()) -> Revocations:
        """Return the next list, with more entries; `peers` are ids or whole names (`label@id`)."""
        ids = self.peers | {id_of(peer) for peer in peers}
        return Revocations(self.number + 1, ids, self.invitations | set(invitations))

    def includes(self, peer: str, invitation: str) -> bool:
        """Return True if a peer (by its whole name) or its invitation is on the list."""
        return id_of(peer) in self.peers or invitation in self.invitations

    def sign(self, owner: Identity, swarm: str) -> bytes:
        """Return the signed list, ready to publish."""
        head = signed.head_of(self) | {"issued": time.time()}
        head["papers"] = head.pop("invitations")  # the key in existing lists
        return signed.sign(owner, revocation_topic(swarm), head)

    @classmethod
    def read(cls, data: bytes, owner: bytes, swarm: str) -> Revocations:
        """Read a signed list; TrustError if the owner did not sign it."""
        head, _ = signed.read(data, revocation_topic(swarm), lambda _: owner)
        head["invitations"] = head.get("papers")
        return signed.parse(cls, head, "a revocation list")

    @classmethod
    def load(cls, path: Path, owner: bytes, swarm: str) -> Revocations:
        """Return the list in a file; an empty one if the file does not exist."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise TrustError("file", f"{path}: cannot be read: {error.strerror}") from None
        try:
            return cls.read(data, owner, swarm)
        except TrustError as error:
            raise TrustError(
                "file", f"{path}: is not this owner's list for swarm {swarm!r}: {error}"
            ) from None
