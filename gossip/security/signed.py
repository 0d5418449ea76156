"""Sign and verify public statements: cards, statuses, invitations, revocation lists, death notices.

Layout:   4 bytes magic "GSMS", 1 byte version, 3 zero bytes, 64 bytes signature, msgpack [head, body]

The signature covers the *context* (the topic of the statement, or "invitation") and all bytes after the
signature exactly as they were sent. They are not decoded and encoded again before the check, and a statement
signed for one context is not valid in another.

A valid signature says who wrote a statement, not that its fields are well-formed. The fields of a head are
declared once, as a dataclass: `head_of` writes them, and `parse` checks the type of each without converting
it. Converting would be dangerous: `bytes(field)` of a number allocates that many bytes, and `str(field)` of a
list nested a thousand levels deep raises RecursionError.
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
"""The longest statement. A card with a thousand partial models takes a tenth of it."""
_PREFIX = struct.Struct("<4sB3x64s")


def sign(identity: Identity, context: str, head: dict[str, Any], body: bytes = b"") -> bytes:
    """Return a statement signed by `identity`, valid only in this context; TrustError if it is too long."""
    content = bytes(msgpack.packb([head, body]) or b"")
    data = _PREFIX.pack(MAGIC, VERSION, identity.sign(_signed_bytes(context, content))) + content
    if len(data) > MAX_BYTES:
        raise TrustError("malformed", f"a statement of {len(data)} bytes; the limit is {MAX_BYTES}")
    return data


def read(
    data: bytes, context: str, signer: Callable[[dict[str, Any]], bytes]
) -> tuple[dict[str, Any], bytes]:
    """Return the head and body of a statement, if its signature is valid in this context.

    `signer` returns the public key that must have signed it, given the head. Raise TrustError, and no other
    exception, whatever the bytes are.
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
        head, body = msgpack.unpackb(content, max_ext_len=0, max_map_len=1024, max_array_len=65536)
        if not isinstance(head, dict) or not all(isinstance(key, str) for key in head):
            raise ValueError("no head")
        if not isinstance(body, bytes):
            raise ValueError("no body")
        public = signer(head)
    except TrustError:
        raise
    except Exception as error:  # msgpack raises half a dozen unrelated types on bad input
        raise TrustError("malformed", f"an unreadable statement: {error!s:.100}") from None
    if not verify(public, signature, _signed_bytes(context, content)):
        raise TrustError("signature", f"a statement for {context} has a wrong signature")
    return head, body


def _signed_bytes(context: str, content: bytes) -> bytes:
    return b"gossamer statement v1\0" + context.encode() + b"\0" + content


# --- heads --------------------------------------------------------------------------------------------

# Types of fields. A value of another type is refused, not converted.
Text: TypeAlias = Annotated[str, Strict()]
Names: TypeAlias = frozenset[Text]
Data: TypeAlias = Annotated[bytes, Strict()]
Key: TypeAlias = Annotated[bytes, Strict(), Field(min_length=32, max_length=32)]
Flag: TypeAlias = Annotated[bool, Strict()]
Number: TypeAlias = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
_Head = TypeVar("_Head")


def head_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as the head of a statement."""
    head = {field.name: getattr(value, field.name) for field in fields(value)}
    return {key: sorted(v) if isinstance(v, frozenset) else v for key, v in head.items()}


def parse(
    datatype: type[_Head], head: dict[str, Any] | bytes, what: str, cause: Cause = "malformed"
) -> _Head:
    """Parse a head, or its JSON text, as a dataclass; TrustError if a field is missing or of the wrong type.

    what: the name of the statement in the error message.
    """
    try:
        adapter = _adapter(datatype)
        is_json = isinstance(head, bytes)
        return adapter.validate_json(head) if is_json else adapter.validate_python(head)
    except ValidationError:
        raise TrustError(
            cause, f"{what} with missing fields, or fields of the wrong type"
        ) from None


@cache
def _adapter(datatype: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(datatype)


def state_of(body: bytes) -> str | None:
    """Return the peer's state in the body of a status; None if the body cannot be read."""
    try:
        state = json.loads(body)["state"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return state if isinstance(state, str) else None
