"""A peer's identity: an Ed25519 key, stored in a private file, and the name derived from it.

A peer with an identity is called `label@id`. The id is the beginning of the SHA-256 of its public key, so the
name itself determines which key must sign the peer's statements (see signed.py); the label is for people.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from gossamer.errors import GossamerError

from ..topics import check_name

if TYPE_CHECKING:  # 9 MB that a peer without [trust] does not load
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Cause: TypeAlias = Literal[
    "malformed",  # too short, too long, or unreadable
    "signature",  # signed by another key, for another topic, or changed on the way
    "identity",  # the public key does not belong to the peer's name, or the label is not allowed
    "second-name",  # the key belongs to a member with another name
    "uninvited",  # no invitation, or one that the owner did not sign
    "expired",  # the invitation has expired
    "used-up",  # the ticket, or a limit of this peer, admits no more peers
    "revoked",  # the peer or its invitation is on the revocation list
    "stale",  # older than the card, status, revocation list or key that is known already
    "clock",  # dated in the future: one of the two clocks is wrong
    "old-card",  # issued too long ago: its peer no longer runs, or one of the two clocks is wrong
    "unanswered",  # a status under our own name, of an incarnation that may have ended (see NameClaim)
    "unknown-sender",  # no valid card of the sender's incarnation is known
    "not-a-member",  # the peer is admitted, but not to this partial model
    "behind",  # the sender lacks our revocation list
    "ahead",  # the sender has a newer revocation list than we have
    "forged",  # a packet sealed with another key or for another receiver, or changed on the way
    "replayed",  # a packet whose number was received before
    "impersonated",  # a packet that contains a message of another sender than the one that sealed it
    "file",  # a key, invitation or list file that cannot be used
]


class TrustError(GossamerError, ValueError):
    """A statement, packet or file that is not trusted; `cause` is a short identifier for counters."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause: Cause = cause


class MisdatedCard(TrustError):
    """A card that is valid except for its date `issued`, which is in the future or too long ago for us."""

    def __init__(self, cause: Cause, message: str, issued: float) -> None:
        super().__init__(cause, message)
        self.issued = issued


ID_LENGTH: Final = 20
"""Characters of an id: 100 bits. Finding a key for another peer's id takes 2^100 attempts. Finding two keys
with the same id (2^50) gains an attacker nothing, because peers remember the whole key of a name."""
MAX_LABEL: Final = 40
_PRIVATE_PREFIX: Final = "gossamer-ed25519-private:"
_PUBLIC_PREFIX: Final = "gossamer-ed25519:"


def peer_id(public: bytes) -> str:
    """Return the id of a public key: lower-case base32, so that it can be part of a topic."""
    digest = hashlib.sha256(b"gossamer identity v1\0" + public).digest()
    return base64.b32encode(digest).decode().lower()[:ID_LENGTH]


def check_label(label: str) -> str:
    """Return `label` if it is a valid label for a peer; raise TopicError or TrustError if not."""
    check_name("peer", label)
    if "@" in label or len(label) > MAX_LABEL:
        raise TrustError(
            "identity", f"the label {label!r} contains an @ or has over {MAX_LABEL} characters"
        )
    return label


def id_of(name: str) -> str:
    """Return the id in a name `label@id`; the whole name if it has no id, as without security."""
    return name.rpartition("@")[2]


def check_key(name: str, public: bytes) -> None:
    """Raise TrustError unless the id in `name` is that of the key `public`."""
    _, at, expected_id = name.rpartition("@")
    if not at or expected_id != peer_id(public):
        raise TrustError("identity", f"{name!r} does not end with its key's id, {peer_id(public)}")


def verify(public: bytes, signature: bytes, data: bytes) -> bool:
    """Return True if `signature` over `data` was made with the private key of `public`."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair and the label of its peer or owner."""

    label: str
    public: bytes
    _private: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def generate(cls, label: str) -> Identity:
        """Return a new identity with a random key."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls._from_private(label, Ed25519PrivateKey.generate())

    @classmethod
    def _from_private(cls, label: str, private: Ed25519PrivateKey) -> Identity:
        check_label(label)
        return cls(label, private.public_key().public_bytes_raw(), private)

    @property
    def id(self) -> str:
        """The part of the name that is derived from the key."""
        return peer_id(self.public)

    @property
    def name(self) -> str:
        """The peer's name in topics and messages."""
        return f"{self.label}@{self.id}"

    def sign(self, data: bytes) -> bytes:
        """Return the 64-byte signature of `data`."""
        return self._private.sign(data)

    def secret(self) -> bytes:
        """Return the private key; anybody who has it can act as this peer."""
        return self._private.private_bytes_raw()

    # --- files --------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the private key to a new file that only this user can read."""
        write_secret(path, self.to_text())

    def to_text(self) -> str:
        """Return the content of a key file: whoever has it can act as this peer."""
        return f"{_PRIVATE_PREFIX}{self.label}:{to_base64(self.secret())}\n"

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a file that `save` wrote; TrustError if other users can read the file too."""
        text = read_secret(path)
        try:
            return cls.parse(text)
        except ValueError as error:
            raise TrustError("file", f"{path}: is not a key file: {error}") from None

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Return the identity in the content of a key file; ValueError if there is none."""
        label, _, key = text.strip().removeprefix(_PRIVATE_PREFIX).partition(":")
        if not text.startswith(_PRIVATE_PREFIX):
            raise ValueError(f"it does not start with {_PRIVATE_PREFIX!r}")
        return cls.from_secret(label, from_base64(key))

    @classmethod
    def from_secret(cls, label: str, secret: bytes) -> Identity:
        """Return the identity with this private key."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls._from_private(label, Ed25519PrivateKey.from_private_bytes(secret))


def public_text(public: bytes, label: str = "") -> str:
    """Return a public key as a line of text for people to exchange, followed by `label` if it is given."""
    return f"{_PUBLIC_PREFIX}{to_base64(public)}" + (f":{label}" if label else "")


def read_labelled_key(text: str) -> tuple[str, bytes]:
    """Return the label and the key in a line that `public_text` made for a peer."""
    key = read_public(text)
    label = text.strip().removeprefix(_PUBLIC_PREFIX).partition(":")[2]
    if not label:
        raise TrustError(
            "malformed",
            f"{text.strip()[:80]!r} has no label: use the whole line that `gossamer keygen` prints",
        )
    return check_label(label), key


def read_public(text: str) -> bytes:
    """Return the key in a line that `public_text` made; TrustError if there is none."""
    try:
        key = from_base64(text.strip().removeprefix(_PUBLIC_PREFIX).partition(":")[0])
        if len(key) != 32:
            raise ValueError(f"{len(key)} bytes, not 32")
    except ValueError as error:
        raise TrustError(
            "malformed",
            f"{text.strip()[:80]!r} is not a public key ({error}): `gossamer keygen` prints it",
        ) from None
    return key


def write_secret(path: Path, text: str) -> None:
    """Write a new file with permissions 0600; TrustError if the file exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise TrustError(
            "file", f"{path}: exists already; keep it, or move it away and try again"
        ) from None
    except OSError as error:
        raise TrustError("file", f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)  # whatever the umask is
            file.write(text)
    except OSError as error:
        path.unlink(missing_ok=True)  # part of a key would be refused as there already
        raise TrustError("file", f"{path}: cannot be written: {error.strerror}") from None


def read_secret(path: Path) -> str:
    """Read a secret file; TrustError if other users can read it too."""
    try:
        with path.open(encoding="utf-8") as file:
            permissions = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if permissions & 0o077:
                raise TrustError(
                    "file",
                    f"{path}: other users can read it (permissions {permissions:o}): chmod 600 it, or "
                    "replace it",
                )
            return file.read(65536)
    except UnicodeDecodeError:
        raise TrustError("file", f"{path}: is not a text file") from None
    except OSError as error:
        raise TrustError("file", f"{path}: cannot be read: {error.strerror}") from None


def to_base64(data: bytes) -> str:
    """Return bytes as URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_base64(text: str) -> bytes:
    """Return the bytes that `to_base64` encoded; ValueError if the text is not base64."""
    if not text.isascii():
        raise ValueError("not base64")
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
