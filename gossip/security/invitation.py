"""Who may take part: papers that the swarm's owner signs.

An *invitation* names one peer, its label and its key. A *ticket* is open: it has a key of its own, and
whoever holds that key's secret half may put their own peer on it, up to a number of uses. What a card
shows of a ticket is its public half and a signature over the peer's name and key, so that a stranger who
reads cards on the broker cannot use it.

Both end with their expiry: a peer whose paper has expired is no longer a member.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from . import fields, signed
from .errors import TrustError
from .identity import (
    Identity,
    check_label,
    from_text,
    peer_id,
    read_secret,
    to_text,
    verify,
    write_secret,
)

VERSION: Final = 2
"""Of what a paper says. Version 1 did not name the peer's label, so one paper admitted many names."""
MAX_MODELS: Final = 256
CLOCK_SKEW: Final = 300.0
"""Seconds that the clock of the device that checks a paper may lag behind the owner's."""
_PLACE: Final = "invitation"
_ENDORSED: Final = b"gossamer ticket v2\0"
_INVITATION, _TICKET = "gossamer-invitation:", "gossamer-ticket:"


@dataclass(frozen=True, slots=True)
class Terms:
    """What an invitation says. `models` None admits to every partial model."""

    swarm: str
    number: str
    """Names the paper, for revocation."""
    kind: Literal["peer", "ticket"]
    key: bytes
    """The invited peer's public key, or the ticket's own."""
    label: str
    """The invited peer's label; empty on a ticket."""
    models: frozenset[str] | None
    uses: int
    issued: float
    expires: float

    def admits(self, model: str) -> bool:
        """Whether a partial model may be shared; a pair of models needs both."""
        return self.models is None or all(each in self.models for each in model.split("&"))


@dataclass(frozen=True, slots=True)
class Admission:
    """What a peer's card shows: the paper and, of a ticket, its holder's signature over the peer."""

    paper: bytes
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
                paper, _, secret = read_secret(path).strip().removeprefix(_TICKET).partition(":")
                return endorse(from_text(paper), from_text(secret), identity)
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
    return _paper(owner, swarm, "peer", (check_label(label), key), models, 1, days)


def open_ticket(
    owner: Identity,
    swarm: str,
    *,
    uses: int = 1,
    models: Collection[str] | None = None,
    days: float = 7.0,
) -> tuple[bytes, bytes]:
    """A ticket for up to `uses` peers, whoever they are: (paper, secret).

    Every peer admits the first `uses` ids that it hears of under this ticket, and remembers them for
    as long as it lives (in its checkpoint too). If more turn up, different peers may admit different
    ones: then the ticket has leaked, and its number should be revoked.
    """
    if uses < 1:
        raise TrustError("malformed", f"a ticket for {uses} uses admits nobody: at least 1")
    holder = Identity.generate("ticket")
    return _paper(owner, swarm, "ticket", ("", holder.public), models, uses, days), holder.secret()


def endorse(paper: bytes, secret: bytes, peer: Identity) -> Admission:
    """Put a peer on a ticket, under its label."""
    holder = Identity.from_secret("ticket", secret)
    return Admission(paper, holder.sign(_endorsed(peer.name, peer.public)))


def check(
    admission: Admission,
    owner: bytes,
    swarm: str,
    name: str,
    key: bytes,
    now: float | None = None,
) -> Terms:
    """The terms on which the peer with this name and public key is admitted now; TrustError if it is not.

    Uses of a ticket and revocations are the register's business: they need to know the others.
    """
    terms = check_holder(admission, owner, swarm, name, key)
    now = time.time() if now is None else now
    if now >= terms.expires:
        raise TrustError("expired", f"paper {terms.number} expired {now - terms.expires:.0f} s ago")
    if now < terms.issued - CLOCK_SKEW:
        raise TrustError("expired", f"paper {terms.number} is not valid yet: is the clock right?")
    return terms


def check_holder(admission: Admission, owner: bytes, swarm: str, name: str, key: bytes) -> Terms:
    """The terms of a paper that was made out to this peer, whether it is still valid or not."""
    terms = read_terms(admission.paper, owner)
    if terms.swarm != swarm:
        raise TrustError("uninvited", f"invited to swarm {terms.swarm!r}, not to {swarm!r}")
    if terms.kind == "peer":
        invited = f"{terms.label}@{peer_id(terms.key)}"
        if (terms.key, invited) != (key, name):
            raise TrustError("uninvited", f"the invitation is for {invited}, not for {name}")
    elif not verify(terms.key, admission.endorsement, _endorsed(name, key)):
        raise TrustError("uninvited", f"ticket {terms.number} was not endorsed for this peer")
    return terms


def _endorsed(name: str, key: bytes) -> bytes:
    """What the holder of a ticket signs."""
    return _ENDORSED + name.encode() + b"\0" + key


def read_terms(paper: bytes, owner: bytes) -> Terms:
    """What a paper says, if the owner signed it."""
    try:
        head, _ = signed.read(paper, _PLACE, lambda _: owner)
    except TrustError as error:
        raise TrustError("uninvited", f"no valid invitation: {error}") from None
    version = head.get("version", 1)
    if version != VERSION:
        raise TrustError(
            "uninvited",
            f"an invitation of version {version!s:.20}; this peer reads version {VERSION}: ask the "
            "swarm's owner for a new one",
        )
    try:
        return _terms(head)
    except (KeyError, ValueError):
        raise TrustError("uninvited", "an invitation of a form that is not known here") from None


def save_invitation(path: Path, paper: bytes) -> None:
    """Write an invitation; it is no secret, because it serves one key alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{_INVITATION}{to_text(paper)}\n", encoding="utf-8")
    except OSError as error:
        raise TrustError("file", f"{path}: cannot be written: {error.strerror}") from None


def save_ticket(path: Path, paper: bytes, secret: bytes) -> None:
    """Write a ticket; whoever can read the file can join."""
    write_secret(path, f"{_TICKET}{to_text(paper)}:{to_text(secret)}\n")


def _paper(
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
    now = time.time()
    label, key = holder
    head = {
        "version": VERSION,
        "swarm": swarm,
        "number": secrets.token_hex(8),
        "kind": kind,
        "key": key,
        "label": label,
        "models": None if models is None else sorted(set(models)),
        "uses": uses,
        "issued": now,
        "expires": now + days * 86400,
    }
    return signed.sign(owner, _PLACE, head)


def _terms(head: dict[str, Any]) -> Terms:
    kind, models = head["kind"], head["models"]
    if kind not in ("peer", "ticket"):
        raise ValueError
    return Terms(
        fields.text(head["swarm"]),
        fields.text(head["number"]),
        kind,
        fields.data(head["key"], 32),
        fields.text(head["label"]),
        None if models is None else frozenset(fields.texts(models)),
        fields.count(head["uses"]),
        fields.number(head["issued"]),
        fields.number(head["expires"]),
    )
