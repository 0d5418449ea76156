"""A peer's identity: an Ed25519 key in a private file, and a name that proves it; and the package's errors.

A peer with an identity is called `label@id`. The id is the beginning of its public key's SHA-256, so the
name itself says which key must sign what is published under it; the label is for people.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from gossamer.errors import GossamerError

from ..topics import check_name

Cause: TypeAlias = Literal[
    "malformed",  # not what it claims to be: too short, too long, unreadable
    "signature",  # signed by another key, for another topic, or changed on the way
    "identity",  # a key that does not belong to the name it speaks for
    "second-name",  # a key that is a member under another name
    "uninvited",  # no invitation, or one that the owner did not sign
    "expired",
    "used-up",  # an open ticket that as many peers hold as it admits
    "revoked",
    "stale",  # older than what is known already
    "clock",  # dated in the future: somebody's clock is wrong
    "old-card",  # issued too long ago: its peer is gone, or somebody's clock is wrong
    "unanswered",  # under our own name, by another incarnation that does not answer us
    "unknown-sender",  # no admitted card of this incarnation is known
    "not-a-member",  # an admitted peer, but not to this partial model
    "behind",  # of a peer that lacks the revocation list that we have
    "ahead",  # of a peer that has a revocation list that we lack
    "forged",  # sealed with another key, for another place, or changed on the way
    "replayed",
    "impersonated",  # a sealed message whose inside names another sender
    "file",
]


class TrustError(GossamerError, ValueError):
    """Something that is not trusted, or a file that cannot be; `cause` is a slug to count by."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause: Cause = cause


class MisdatedCard(TrustError):
    """A card that is sound but dated ahead of our time, or too long ago; `issued` says when."""

    def __init__(self, cause: Cause, message: str, issued: float) -> None:
        super().__init__(cause, message)
        self.issued = issued


ID_LENGTH: Final = 20
"""Characters of an id: 100 bits. Finding a key for somebody else's id takes 2^100 attempts; two keys of
one's own with one id (2^50) gain nothing, because peers pin the whole key behind a name."""
MAX_LABEL: Final = 40
_HEADER: Final = "gossamer-ed25519-private:"
_PUBLIC: Final = "gossamer-ed25519:"


def peer_id(public: bytes) -> str:
    """The id of a public key: lower-case base32, fit for topics."""
    digest = hashlib.sha256(b"gossamer identity v1\0" + public).digest()
    return base64.b32encode(digest).decode().lower()[:ID_LENGTH]


def check_label(label: str) -> str:
    """`label` itself, if a peer may be called so; else TopicError or TrustError says why not."""
    check_name("peer", label)
    if "@" in label or len(label) > MAX_LABEL:
        raise TrustError(
            "identity", f"the label {label!r} has an @ or over {MAX_LABEL} characters in it"
        )
    return label


def id_of(name: str) -> str:
    """The id in a name `label@id`; the whole name where there is none, as without trust."""
    return name.rpartition("@")[2]


def check_key(name: str, public: bytes) -> None:
    """Raise unless `public` is the key that may speak for `name`."""
    _, at, known = name.rpartition("@")
    if not at or known != peer_id(public):
        raise TrustError("identity", f"{name!r} is not the name of the key {peer_id(public)}")


def verify(public: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` over `data` was made with the private half of `public`."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair and the label of its holder."""

    label: str
    public: bytes
    _private: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def generate(cls, label: str) -> Identity:
        """A new identity, unlike any other."""
        return cls._of(label, Ed25519PrivateKey.generate())

    @classmethod
    def _of(cls, label: str, private: Ed25519PrivateKey) -> Identity:
        check_label(label)
        return cls(label, private.public_key().public_bytes_raw(), private)

    @property
    def id(self) -> str:
        """The part of the name that follows from the key."""
        return peer_id(self.public)

    @property
    def name(self) -> str:
        """What the peer is called in topics and messages."""
        return f"{self.label}@{self.id}"

    def sign(self, data: bytes) -> bytes:
        """64 bytes that only the holder of this identity can make."""
        return self._private.sign(data)

    def secret(self) -> bytes:
        """The private key; whoever has it is this peer."""
        return self._private.private_bytes_raw()

    # --- files --------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the private key to a new file that only this user can read."""
        write_secret(path, f"{_HEADER}{self.label}:{to_text(self.secret())}\n")

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a file that `save` wrote; refused if other users can read it too."""
        text = read_secret(path)
        label, _, key = text.strip().removeprefix(_HEADER).partition(":")
        try:
            if not text.startswith(_HEADER):
                raise ValueError("it does not start as one")
            return cls._of(label, Ed25519PrivateKey.from_private_bytes(from_text(key)))
        except ValueError as error:
            raise TrustError("file", f"{path}: is not a key file: {error}") from None

    @classmethod
    def from_secret(cls, label: str, secret: bytes) -> Identity:
        """The identity of a private key."""
        return cls._of(label, Ed25519PrivateKey.from_private_bytes(secret))


def public_text(public: bytes, label: str = "") -> str:
    """A public key in the form that people hand to each other; with its peer's label, for `invite`."""
    return f"{_PUBLIC}{to_text(public)}" + (f":{label}" if label else "")


def read_labelled(text: str) -> tuple[str, bytes]:
    """The label and the key in a line that `public_text` made for a peer."""
    key = read_public(text)
    label = text.strip().removeprefix(_PUBLIC).partition(":")[2]
    if not label:
        raise TrustError(
            "malformed",
            f"{text.strip()[:80]!r} names no label: use the whole line that `gossamer keygen` prints",
        )
    return check_label(label), key


def read_public(text: str) -> bytes:
    """The key in a line that `public_text` made."""
    try:
        key = from_text(text.strip().removeprefix(_PUBLIC).partition(":")[0])
        if len(key) != 32:
            raise ValueError(f"{len(key)} bytes, not 32")
    except ValueError as error:
        raise TrustError(
            "malformed",
            f"{text.strip()[:80]!r} is not a public key ({error}): `gossamer keygen` prints it",
        ) from None
    return key


def write_secret(path: Path, text: str) -> None:
    """Write a new file with rights 0600; an existing one is never overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise TrustError(
            "file", f"{path}: is there already; keep it, or move it away and try again"
        ) from None
    except OSError as error:
        raise TrustError("file", f"{path}: cannot be written: {error.strerror}") from None
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        os.fchmod(out.fileno(), 0o600)  # whatever the umask says
        out.write(text)


def read_secret(path: Path) -> str:
    """Read a file that nobody else may read."""
    try:
        with path.open(encoding="utf-8") as file:
            rights = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if rights & 0o077:
                raise TrustError(
                    "file",
                    f"{path}: others can read it (rights {rights:o}): chmod 600 it, or make a new key",
                )
            return file.read(65536)
    except UnicodeDecodeError:
        raise TrustError("file", f"{path}: is not a key file") from None
    except OSError as error:
        raise TrustError("file", f"{path}: cannot be read: {error.strerror}") from None


def to_text(data: bytes) -> str:
    """Bytes as text without spaces or padding."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_text(text: str) -> bytes:
    """The bytes that `to_text` wrote; ValueError if it did not."""
    if not text.isascii():
        raise ValueError("not base64")
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
