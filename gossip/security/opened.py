"""What comes out of a sealed packet: a chunk, and who sealed it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ..chunks import HEADER_BYTES
from ..wire import Buffer
from .errors import TrustError


@dataclass(frozen=True, slots=True)
class Opened:
    """A genuine packet: who sealed it, in which session, and the chunk inside."""

    sender: str
    session: str
    packet: Buffer


def check_inside(sender: str, session: str, packet: bytes) -> None:
    """Raise unless a chunk says that it comes from the peer that sealed it.

    Chunks are put together by the sender they name: a member must not be able to slip one of its own
    into another's message.
    """
    named = packet[8:16] if len(packet) >= HEADER_BYTES else b""
    if named != hashlib.blake2b(f"{sender}/{session}".encode(), digest_size=8).digest():
        raise TrustError("impersonated", f"{sender} sealed a chunk of somebody else's message")
