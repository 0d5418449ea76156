"""What two peers have in common: a secret that nobody else can compute, and packets numbered once.

Every life of a peer draws an X25519 key, shown on its signed card. Two of them make a secret that only
the two peers have, so that what is sealed with it names its sender: no other member can make it. The
secret lives as long as both lives do: seized disks do not open recorded traffic.
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


def life_tag(name: str, exchange: bytes) -> bytes:
    """8 bytes by which a receiver finds the sender of a packet: one life of one peer."""
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


class Channel:
    """This life of ours and that life of one peer's.

    name, exchange, session, since: the other peer's. `number` is the last packet's: it counts everything
    that is sealed for this life of the peer, whatever the key, so that no key ever meets a nonce twice.
    Make it with `Channels.open`, which lets it go on where another between these lives has stopped.
    """

    __slots__ = ("_secret", "exchange", "in_tag", "name", "number", "session", "since", "window")

    def __init__(
        self,
        swarm: str,
        own: tuple[str, X25519PrivateKey],
        name: str,
        exchange: bytes,
        session: str,
        since: float,
    ) -> None:
        own_name, private = own
        own_exchange = private.public_key().public_bytes_raw()
        shared = agree(private, name, exchange)
        ends = sorted([own_name.encode() + b"\0" + own_exchange, name.encode() + b"\0" + exchange])
        self._secret = derive(shared, "pair", swarm, *ends)
        self.name, self.exchange, self.session, self.since = name, exchange, session, since
        self.in_tag = life_tag(name, exchange)
        self.number = 0
        self.window = Window()

    def key(self, model_key: bytes, *context: str | bytes | int) -> bytes:
        """The key for one direction, partial model and epoch: of the pair *and* of the group."""
        return derive(self._secret + model_key, "packet", *context)

    def take_number(self) -> int:
        """A number that was never taken before."""
        self.number += 1
        return self.number
