"""Public statements with a signature: cards, statuses, invitations, revocations.

Layout:   4 bytes magic "GSMS", 1 byte version, 3 zero, 64 bytes signature, msgpack [head, body]

The signature covers the *place* (a topic, or what kind of paper it is) and every byte after it, as they
were sent: nothing is written anew before it is checked, and nothing signed for one place counts in
another.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import msgpack

from .errors import TrustError
from .identity import Identity, verify

MAGIC: Final = b"GSMS"
VERSION: Final = 1
MAX_BYTES: Final = 1 << 20
"""No card or list may be longer; a card of a thousand vectors takes a tenth of it."""
_PREFIX = struct.Struct("<4sB3x64s")


def sign(identity: Identity, place: str, head: dict[str, Any], body: bytes = b"") -> bytes:
    """A statement by `identity`, valid at `place` alone."""
    content = bytes(msgpack.packb([head, body]) or b"")
    data = _PREFIX.pack(MAGIC, VERSION, identity.sign(_covered(place, content))) + content
    if len(data) > MAX_BYTES:
        raise TrustError("malformed", f"a statement of {len(data)} bytes; the limit is {MAX_BYTES}")
    return data


def read(
    data: bytes, place: str, signer: Callable[[dict[str, Any]], bytes]
) -> tuple[dict[str, Any], bytes]:
    """Head and body of a statement, if its signature holds at `place`.

    `signer` looks at the head and says whose key must have signed it. Raises TrustError and nothing
    else, whatever the bytes are.
    """
    if len(data) < _PREFIX.size or len(data) > MAX_BYTES:
        raise TrustError("malformed", f"a statement of {len(data)} bytes")
    magic, version, signature = _PREFIX.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise TrustError(
            "malformed", f"starts with {bytes(data[:5])!r}: not signed, or another version"
        )
    content = bytes(data[_PREFIX.size :])
    try:
        parts = msgpack.unpackb(content, max_ext_len=0, max_map_len=1024, max_array_len=65536)
        head, body = parts
        if not isinstance(head, dict) or not all(isinstance(key, str) for key in head):
            raise ValueError("no head")
        if not isinstance(body, bytes):
            raise ValueError("no body")
        public = signer(head)
    except TrustError:
        raise
    except Exception as error:  # msgpack raises half a dozen unrelated types on bad input
        raise TrustError("malformed", f"an unreadable statement: {error!s:.100}") from None
    if not verify(public, signature, _covered(place, content)):
        raise TrustError("signature", f"a statement for {place} has a wrong signature")
    return head, body


def _covered(place: str, content: bytes) -> bytes:
    return b"gossamer statement v1\0" + place.encode() + b"\0" + content
