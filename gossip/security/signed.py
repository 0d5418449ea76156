"""Public statements with a signature: cards, statuses, invitations, revocation lists, death notices.

Layout:   4 bytes magic "GSMS", 1 byte version, 3 zero, 64 bytes signature, msgpack [head, body]

The signature covers the *place* (a topic, or the kind of document) and every byte after it, as they
were sent: nothing is encoded again before it is checked, and nothing signed for one place counts in
another.

A signature says who wrote a statement, not that it is sound. What a head says is declared once, as a
dataclass: `head_of` writes it, and `parse` checks every field and never converts one: `bytes(field)` of a
number would allocate as many bytes, `str(field)` of a list that is nested a thousand deep raises what nobody
expects.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgpack
from pydantic import Field, Strict, TypeAdapter, ValidationError

from .identity import Cause, Identity, TrustError, verify

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


# --- heads --------------------------------------------------------------------------------------------

Text: TypeAlias = Annotated[str, Strict()]
Names: TypeAlias = frozenset[Text]
Data: TypeAlias = Annotated[bytes, Strict()]
Key: TypeAlias = Annotated[bytes, Strict(), Field(min_length=32, max_length=32)]
Flag: TypeAlias = Annotated[bool, Strict()]
Number: TypeAlias = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
_Head = TypeVar("_Head")


def head_of(value: Any) -> dict[str, Any]:
    """The head of a statement that says what a dataclass says."""
    found = {each.name: getattr(value, each.name) for each in fields(value)}
    return {key: sorted(v) if isinstance(v, frozenset) else v for key, v in found.items()}


def parse(
    kind: type[_Head], head: dict[str, Any] | bytes, what: str, cause: Cause = "malformed"
) -> _Head:
    """A head, or the JSON text of one, as a dataclass; TrustError if a field is missing or of another kind.

    what: names it in the error.
    """
    try:
        adapter = _adapter(kind)
        is_json = isinstance(head, bytes)
        return adapter.validate_json(head) if is_json else adapter.validate_python(head)
    except ValidationError:
        raise TrustError(cause, f"{what} of a form that is not known here") from None


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def state_of(body: bytes) -> str | None:
    """The state that a status says its peer is in; None if it cannot be read."""
    try:
        state = json.loads(body)["state"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return state if isinstance(state, str) else None
