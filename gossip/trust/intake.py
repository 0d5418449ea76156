"""The way in: from a packet in an inbox to a message that may be handled. Nothing that arrives raises.

open (is it genuine?) → rate → put chunks together → decode → is it about what we have? → does it speak
for the peer that sealed it? Whatever fails is counted by cause, through `drop`, and goes no further.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final

from ..chunks import HEADER_BYTES, Reassembler
from ..messages import Message
from ..wire import Buffer, WireError, decode, require_schema
from .guards import Guards
from .trusting import Trusting

_COUNT = struct.Struct("<I")
_COUNT_AT: Final = 28  # in a chunk's header
MIN_SHARE: Final = 1 / 64
"""What one packet counts for at least, however many chunks it says that its message has."""


class Intake:
    """Turns packets into messages.

    schemas: the hash of every vector that this peer has. drop: called with (cause, text) for whatever
    is not taken in; what trust refuses is counted and logged by trust itself.
    """

    def __init__(
        self,
        trust: Trusting,
        schemas: Mapping[str, str],
        *,
        guards: Guards | None = None,
        reassembler: Reassembler | None = None,
        drop: Callable[[str, str], None] = lambda _cause, _text: None,
    ) -> None:
        self.trust, self.guards = trust, guards
        self.reassembler = reassembler if reassembler is not None else Reassembler()
        self._schemas, self._drop = schemas, drop

    def take(self, vector: str, packet: Buffer, now: float) -> Message | None:
        """The message that this packet completes, if it does."""
        opened = self.trust.open(vector, packet)
        if opened is None:
            return None
        known = opened.sender  # nobody in particular, without trust
        share = message_share(opened.packet)
        if known and self.guards is not None and not self.guards.allow(known, now, share):
            self._drop("rate", f"{opened.sender} sends faster than its bound")
            return None
        try:
            whole = self.reassembler.add(opened.packet)
            if whole is None:
                return None
            decoded = decode(whole)
            message = decoded.message
            if message.model != vector:
                raise WireError("garbage", f"a message about {message.model!r} in the wrong inbox")
            if vector not in self._schemas:
                self._drop("unknown-model", f"nobody here implements {vector!r}")
                return None
            require_schema(decoded, self._schemas[vector])
        except WireError as error:
            self._drop(error.cause, str(error))
            return None
        return message if self.trust.genuine(opened, message) else None


def message_share(packet: Buffer) -> float:
    """The part of a message that a chunk is, so that rates count messages: large ones are no floods.

    Not below MIN_SHARE: a member who says that its messages have a million chunks gains little by it.
    """
    if len(packet) < HEADER_BYTES:
        return 1.0
    (count,) = _COUNT.unpack_from(packet, _COUNT_AT)
    return max(MIN_SHARE, 1 / max(count, 1))
