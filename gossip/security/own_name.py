"""Whether somebody else is online under our own name, told so that old statuses do not count. No IO.

A peer that starts asks on its own status topic whether the name is free. What our key has signed there
may come from another incarnation that goes on (the same key on two devices), or from one that is long over
and whose statuses the broker kept or an outsider brings back. No number tells them apart: a new incarnation
does not know how far the others have counted. So every status names the incarnations that its signer has
heard under its name, and while we ask, only one that names ours counts: ours is new, and nobody could name
it before.

An incarnation that goes on may be slow to answer. If one was heard to be online, we hold back the echo of
our own question, so that whoever waits for it waits as long as it can, and not only for the echo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from . import fields
from .errors import TrustError
from .register import INCARNATION_BYTES

MAX_MET: Final = 8
"""Other incarnations that a status names, the newest ones."""


class OwnName:
    """What is heard on our own status topic. incarnation: which start of the peer is ours."""

    def __init__(self, incarnation: bytes) -> None:
        self.ours = False
        """Whether our card is out: then every status counts, for we contradict it."""
        self._incarnation = incarnation
        self._met: dict[bytes, None] = {}
        self._alive: set[bytes] = set()
        self._doubt = b""
        """An incarnation that was online and has not answered yet."""

    @property
    def met(self) -> list[bytes]:
        """The other incarnations under our name that were heard of lately."""
        return list(self._met)

    def hear(self, head: Mapping[str, Any], body: bytes) -> bool:
        """Take in a status that our key has signed: whether presence should know it (now).

        TrustError if it must not count.
        """
        other, answers = head.get("incarnation"), head.get("answers", [])
        if (
            not isinstance(other, bytes)
            or len(other) != INCARNATION_BYTES
            or not isinstance(answers, list)
        ):
            raise TrustError("malformed", "a status under our own name lacks what trust needs")
        if other == self._incarnation:
            return self.ours or not self._doubt
        self._met.pop(other, None)
        self._met[other] = None
        if len(self._met) > MAX_MET:
            del self._met[next(iter(self._met))]
        if self._incarnation in answers:
            self._alive.add(other)
        if not self.ours and other not in self._alive:
            if fields.state_of(body) == "online":
                self._doubt = other
            elif self._doubt == other:
                self._doubt = b""
            raise TrustError(
                "unanswered",
                "a status under our own name, of an incarnation that does not answer ours",
            )
        return True
