"""What two peers have in common: secrets that nobody else can compute, and packets numbered once.

Every peer draws an X25519 key when it starts and a new one every day, shown on its signed card. Two of
them make a secret that only the two peers have, so that what is sealed with it names its sender: no other
member can make it. Whoever has one end's private key can compute the secret, so a key is deleted soon
after the next one is drawn: what a running peer holds in memory opens a day of recorded traffic at most.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .errors import TrustError

WINDOW: Final = 4096
"""Packets by which one may be overtaken and still be taken in. MQTT keeps the order, so this is ample."""
TAG_BYTES: Final = 8
MARK_BYTES: Final = 3


def exchange_tag(name: str, exchange: bytes) -> bytes:
    """8 bytes by which a receiver finds the sender of a packet: one exchange key of one peer."""
    return hashlib.blake2b(
        name.encode() + b"\0" + exchange, digest_size=TAG_BYTES, person=b"gossamer-life"
    ).digest()


def derive(secret: bytes, *context: str | bytes | int) -> bytes:
    """32 bytes from a secret and everything that they are for."""
    return HKDF(SHA256(), 32, salt=None, info=framed(("gossamer v1", *context))).derive(secret)


def agree(private: X25519PrivateKey, name: str, public: bytes) -> bytes:
    """What our private key and another peer's public one have in common."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise TrustError("malformed", f"the exchange key of {name} is not a usable key") from None


def framed(parts: Iterable[str | bytes | int]) -> bytes:
    """Parts as bytes, each with its length before it, so that no two lists look alike."""
    framed = bytearray()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        framed += len(data).to_bytes(4, "big") + data
    return bytes(framed)


class Window:
    """Which numbers have been seen: each counts once, and very late ones not at all.

    top: the highest one seen before, if any was; all up to it count as seen.
    """

    __slots__ = ("_seen", "top")

    def __init__(self, top: int = -1) -> None:
        self.top = top
        self._seen = 0 if top < 0 else (1 << WINDOW) - 1

    def fresh(self, number: int) -> bool:
        """Whether this number has not been seen and is not too late to tell."""
        behind = self.top - number
        return behind < 0 or (behind < WINDOW and not self._seen >> behind & 1)

    def note(self, number: int) -> None:
        """Note a number, once its packet proved genuine."""
        if number > self.top:
            self._seen = (self._seen << min(number - self.top, WINDOW)) & ((1 << WINDOW) - 1)
            self.top = number
        self._seen |= 1 << (self.top - number)


class ExchangeKey:
    """One of our own X25519 keys. `tag` marks the packets that we seal with it."""

    __slots__ = ("name", "private", "public", "tag")

    def __init__(self, name: str) -> None:
        self.name = name
        self.private = X25519PrivateKey.generate()
        self.public = self.private.public_key().public_bytes_raw()
        self.tag = exchange_tag(name, self.public)

    @property
    def mark(self) -> bytes:
        """3 bytes by which whoever seals for us says which of our keys it used."""
        return self.tag[:MARK_BYTES]


def packet_key(
    swarm: str, own: ExchangeKey, name: str, exchange: bytes, model_key: bytes, place: bytes
) -> bytes:
    """The key of packets between our key and that of peer `name`: of the pair *and* of the group.

    place: the direction, partial model and epoch that the packets belong to.
    """
    shared = agree(own.private, name, exchange)
    ends = sorted([own.name.encode() + b"\0" + own.public, name.encode() + b"\0" + exchange])
    return derive(derive(shared, "pair", swarm, *ends) + model_key, "packet", place)


class Channel:
    """This start of ours and one start of another peer's.

    name, incarnation, session, since: the other peer's, as on its card.
    `number` is the last packet's: it counts everything that is sealed for this incarnation of the peer,
    whatever the key, so that no key ever meets a nonce twice. Make it with `Channels.open`, which lets it
    go on where another between the same incarnations has stopped.
    """

    __slots__ = (
        "exchanges",
        "incarnation",
        "knows",
        "name",
        "number",
        "session",
        "since",
        "window",
    )

    def __init__(
        self, name: str, incarnation: bytes, exchange: bytes, session: str, since: float
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self.session, self.since = session, since
        self.exchanges = {exchange_tag(name, exchange): exchange}
        """The other's keys by the tag on its packets, oldest first: two for a while after a renewal."""
        self.knows = b""
        """The tag of our newest key that the other has used."""
        self.number = 0
        self.window = Window()

    @property
    def newest(self) -> bytes:
        """The tag of the other's newest key, which we seal for."""
        return next(reversed(self.exchanges))

    def take_number(self) -> int:
        """A number that was never taken before."""
        self.number += 1
        return self.number
