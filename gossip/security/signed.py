"""Public statements with a signature: cards, statuses, invitations, revocation lists, death notices.

Layout:   4 bytes magic "GSMS", 1 byte version, 3 zero, 64 bytes signature, msgpack [head, body]

The signature covers the *place* (a topic, or the kind of document) and every byte after it, as they
were sent: nothing is encoded again before it is checked, and nothing signed for one place counts in
another.

A signature says who wrote a statement, not that it is sound. `as_bytes` and its like check the fields of a
head and never convert them: `bytes(field)` of a number would allocate as many bytes, `int(field)` of an
infinity raises what nobody expects, `str(field)` of a list that is nested a thousand deep too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from math import isfinite
from typing import Any, Final, TypeGuard

import msgpack

from .identity import Identity, TrustError, verify

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


# --- fields of a head: ValueError if one is not what it should be ------------------------------------


def as_bytes(value: Any, length: int | None = None) -> bytes:
    """Bytes, of a certain length if one is named."""
    if not isinstance(value, bytes) or length not in (None, len(value)):
        raise ValueError("not bytes, or of another length")
    return value


def as_text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError("not a text")
    return value


def as_texts(value: Any) -> list[str]:
    """A list of texts."""
    if not isinstance(value, list):
        raise ValueError("not a list")
    return [as_text(each) for each in value]


def as_number(value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError("not a number")
    return float(value)


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number that fits 63 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def as_count(value: Any) -> int:
    """A whole number that fits 63 bits."""
    if not is_count(value):
        raise ValueError("not a count")
    return value


def state_of(body: bytes) -> str | None:
    """The state that a status says its peer is in; None if it cannot be read."""
    try:
        state = json.loads(body)["state"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return state if isinstance(state, str) else None
