"""What goes wrong with trust: a cause to count by, and one line that says what to do."""

from __future__ import annotations

from typing import Literal, TypeAlias

from gossamer.errors import GossamerError

Cause: TypeAlias = Literal[
    "malformed",  # not what it claims to be: too short, too long, unreadable
    "signature",  # signed by another key, for another topic, or changed on the way
    "identity",  # a key that does not belong to the name it speaks for
    "second-name",  # a key that is a member under another name
    "uninvited",  # no invitation, or one that the owner did not sign
    "expired",
    "used-up",  # an open ticket that as many peers hold as it admits
    "revoked",
    "stale",  # older than what is known already
    "clock",  # dated in the future: somebody's clock is wrong
    "old-card",  # issued too long ago: its peer is gone, or somebody's clock is wrong
    "unanswered",  # under our own name, by another life that does not answer us: it may be long over
    "unknown-sender",  # no admitted peer's card of this life is known
    "not-a-member",  # an admitted peer, but not to this partial model
    "no-key",  # the partial model's key has not arrived yet
    "forged",  # sealed with another key, for another place, or changed on the way
    "replayed",
    "impersonated",  # a sealed message whose inside names another sender
    "file",
]


class TrustError(GossamerError, ValueError):
    """Something that is not trusted, or a file that cannot be; `cause` is a slug to count by."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause: Cause = cause


class MisdatedCard(TrustError):
    """A card that is sound but dated ahead of our time, or too long ago; `issued` says when."""

    def __init__(self, cause: Cause, message: str, issued: float) -> None:
        super().__init__(cause, message)
        self.issued = issued
