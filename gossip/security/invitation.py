"""Who may take part: invitations that the swarm's owner signs, and the list of those that it revoked.

An *invitation* names one peer, its label and its key. A *ticket* is open: it has a key of its own, and
whoever holds that key's secret half may put their own peer on it, up to a number of uses. What a card
shows of a ticket is its public half and a signature over the peer's name and key, so that a stranger who
reads cards on the broker cannot use it.

Both end with their expiry: a peer whose invitation has expired is no longer a member.

The *revocation list* names peers and invitations that count no more. It is signed by the owner, retained by
the broker, and handed from member to member (see layer). Its number rises; a peer keeps the highest that it
has seen and refuses lower ones, so nobody can make a list up or bring an old one back.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ..topics import ROOT, check_name
from . import signed
from .identity import (
    Identity,
    TrustError,
    check_label,
    from_text,
    peer_id,
    read_secret,
    to_text,
    verify,
    write_secret,
)

VERSION: Final = 2
"""Of what an invitation says. Version 1 did not name the peer's label, so one admitted many names."""
MAX_MODELS: Final = 256
CLOCK_SKEW: Final = 300.0
"""Seconds that the clock of the device that checks an invitation may lag behind the owner's."""
_PLACE: Final = "invitation"
_ENDORSED: Final = b"gossamer ticket v2\0"
_INVITATION, _TICKET = "gossamer-invitation:", "gossamer-ticket:"


@dataclass(frozen=True, slots=True)
class Claims:
    """What an invitation says. `models` None admits to every partial model."""

    swarm: signed.Text
    number: signed.Text
    """Names the invitation, for revocation."""
    kind: Literal["peer", "ticket"]
    key: signed.Key
    """The invited peer's public key, or the ticket's own."""
    label: signed.Text
    """The invited peer's label; empty on a ticket."""
    models: signed.Names | None
    uses: signed.Count
    issued: signed.Number
    expires: signed.Number

    def admits(self, model: str) -> bool:
        """Whether a partial model may be shared; a pair of models needs both."""
        return self.models is None or all(each in self.models for each in model.split("&"))


@dataclass(frozen=True, slots=True)
class Admission:
    """What a peer's card shows: its invitation and, of a ticket, the holder's signature over the peer."""

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
            if text.startswith(_INVITATION):
                return cls(from_text(text.removeprefix(_INVITATION)))
            if text.startswith(_TICKET):
                invitation, _, secret = (
                    read_secret(path).strip().removeprefix(_TICKET).partition(":")
                )
                return endorse(from_text(invitation), from_text(secret), identity)
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
    """An invitation for the peer with this label and public key."""
    return _issue(owner, swarm, "peer", (check_label(label), key), models, 1, days)


def open_ticket(
    owner: Identity,
    swarm: str,
    *,
    uses: int = 1,
    models: Collection[str] | None = None,
    days: float = 7.0,
) -> tuple[bytes, bytes]:
    """A ticket for up to `uses` peers, whoever they are: (ticket, secret).

    Every peer admits the first `uses` ids that it hears of under this ticket, and remembers them for
    as long as it lives (in its checkpoint too). If more turn up, different peers may admit different
    ones: then the ticket has leaked, and its number should be revoked.
    """
    if uses < 1:
        raise TrustError("malformed", f"a ticket for {uses} uses admits nobody: at least 1")
    holder = Identity.generate("ticket")
    return _issue(owner, swarm, "ticket", ("", holder.public), models, uses, days), holder.secret()


def endorse(invitation: bytes, secret: bytes, peer: Identity) -> Admission:
    """Put a peer on a ticket, under its label."""
    holder = Identity.from_secret("ticket", secret)
    return Admission(invitation, holder.sign(_endorsed(peer.name, peer.public)))


def check(
    admission: Admission,
    owner: bytes,
    swarm: str,
    name: str,
    key: bytes,
    now: float | None = None,
) -> Claims:
    """What the invitation of the peer with this name and public key says; TrustError if it does not admit it.

    Uses of a ticket and revocations are the register's business: they need to know the others.
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
    """What an invitation says that was made out to this peer, whether it is still valid or not."""
    claims = read_claims(admission.invitation, owner)
    if claims.swarm != swarm:
        raise TrustError("uninvited", f"invited to swarm {claims.swarm!r}, not to {swarm!r}")
    if claims.kind == "peer":
        invited = f"{claims.label}@{peer_id(claims.key)}"
        if (claims.key, invited) != (key, name):
            raise TrustError("uninvited", f"the invitation is for {invited}, not for {name}")
    elif not verify(claims.key, admission.endorsement, _endorsed(name, key)):
        raise TrustError("uninvited", f"ticket {claims.number} was not endorsed for this peer")
    return claims


def _endorsed(name: str, key: bytes) -> bytes:
    """What the holder of a ticket signs."""
    return _ENDORSED + name.encode() + b"\0" + key


def read_claims(invitation: bytes, owner: bytes) -> Claims:
    """What an invitation or ticket says, if the owner signed it."""
    try:
        head, _ = signed.read(invitation, _PLACE, lambda _: owner)
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


def save_invitation(path: Path, invitation: bytes) -> None:
    """Write an invitation; it is no secret, because it serves one key alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{_INVITATION}{to_text(invitation)}\n", encoding="utf-8")
    except OSError as error:
        raise TrustError("file", f"{path}: cannot be written: {error.strerror}") from None


def save_ticket(path: Path, invitation: bytes, secret: bytes) -> None:
    """Write a ticket; whoever can read the file can join."""
    write_secret(path, f"{_TICKET}{to_text(invitation)}:{to_text(secret)}\n")


def _issue(
    owner: Identity,
    swarm: str,
    kind: Literal["peer", "ticket"],
    holder: tuple[str, bytes],
    models: Collection[str] | None,
    uses: int,
    days: float,
) -> bytes:
    if models is not None and not 0 < len(set(models)) <= MAX_MODELS:
        raise TrustError("malformed", f"{len(set(models))} models: between 1 and {MAX_MODELS}")
    if not days > 0:
        raise TrustError("malformed", f"valid for {days:g} days: it would never be")
    now, (label, key) = time.time(), holder
    admitted = None if models is None else frozenset(models)
    claims = Claims(
        swarm, secrets.token_hex(8), kind, key, label, admitted, uses, now, now + days * 86400
    )
    return signed.sign(owner, _PLACE, {"version": VERSION} | signed.head_of(claims))


# --- revocation ---------------------------------------------------------------------------------------

MAX_ENTRIES: Final = 10_000


def revocation_topic(swarm: str) -> str:
    """Where the owner publishes the list (retained)."""
    return f"{ROOT}/{check_name('swarm', swarm)}/owner/revocations"


@dataclass(frozen=True, slots=True)
class Revocations:
    """Ids of peers and numbers of invitations that count no more."""

    number: signed.Count = 0
    peers: signed.Names = frozenset()
    invitations: signed.Names = frozenset()

    def __post_init__(self) -> None:
        if len(self.peers) + len(self.invitations) > MAX_ENTRIES:
            raise TrustError(
                "malformed", f"over {MAX_ENTRIES} revocations: start a swarm with a new owner key"
            )

    def add(self, peers: Iterable[str] = (), invitations: Iterable[str] = ()) -> Revocations:
        """The next list, with more on it; `peers` are ids or whole names (`label@id`)."""
        ids = self.peers | {peer.rpartition("@")[2] for peer in peers}
        return Revocations(self.number + 1, ids, self.invitations | set(invitations))

    def names(self, peer: str, invitation: str) -> bool:
        """Whether a peer (by its whole name) or its invitation is on the list."""
        return peer.rpartition("@")[2] in self.peers or invitation in self.invitations

    def sign(self, owner: Identity, swarm: str) -> bytes:
        """The list as it is published."""
        head = signed.head_of(self) | {"issued": time.time()}
        head["papers"] = head.pop("invitations")  # as in all lists that owners have on their disks
        return signed.sign(owner, revocation_topic(swarm), head)

    @classmethod
    def read(cls, data: bytes, owner: bytes, swarm: str) -> Revocations:
        """A published list, if the owner signed it."""
        head, _ = signed.read(data, revocation_topic(swarm), lambda _: owner)
        head["invitations"] = head.get("papers")
        return signed.parse(cls, head, "a revocation list")

    @classmethod
    def load(cls, path: Path, owner: bytes, swarm: str) -> Revocations:
        """The list in a file; an empty one if there is no such file."""
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
