"""Death notices: the swarm's owner declares that a session is over, because its peer cannot say so.

A peer that died without a goodbye is waited for until its lease is over. An operator who knows better, or
the supervisor that saw the process end, publishes a notice (retained) at the peer's death topic. It names
one session, so it can neither be used against the next one nor be of harm when it is brought back.

With trust the notice is a statement signed by the owner; without, its body as it is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from .. import topics
from . import fields, signed
from .errors import TrustError
from .identity import Identity

MAX_TEXT: Final = 200
"""Characters of a reason, and of who signed it: both are logged."""


@dataclass(frozen=True, slots=True)
class Death:
    """What a notice says: which session is over, why, by whose word and since when (seconds since 1970)."""

    session: str
    reason: str
    by: str
    time: float

    def encode(self) -> bytes:
        """The body of a notice, as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> Death:
        """Read a body; TrustError if it is of another form."""
        try:
            table = json.loads(body)
            return cls(
                topics.check_name("session", fields.text(table["session"])),
                _printable(table["reason"]),
                _printable(table["by"]),
                fields.number(table["time"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise TrustError(
                "malformed", "a death notice of a form that is not known here"
            ) from None


def sign_death(owner: Identity, swarm: str, peer: str, death: Death) -> bytes:
    """A notice as the owner publishes it, retained, at `topics.death(swarm, peer)`."""
    return signed.sign(owner, topics.death(swarm, peer), {}, death.encode())


def read_death(payload: bytes, owner: bytes, swarm: str, peer: str) -> bytes:
    """The body of a notice about `peer`, if the owner signed it and `Death.decode` can read it."""
    _, body = signed.read(payload, topics.death(swarm, peer), lambda _: owner)
    Death.decode(body)
    return body


def _printable(value: object) -> str:
    return "".join(filter(str.isprintable, fields.text(value)[:MAX_TEXT]))
