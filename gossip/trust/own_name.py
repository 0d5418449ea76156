"""Whether somebody else lives under our own name, told so that old words do not count. No IO.

A peer that starts asks on its own status topic whether the name is free. What our key has signed there
may come from another life that goes on (the same key on two devices), or from one that is long over and
whose words the broker kept or an outsider brings back. No number tells them apart: a new life does not
know how far the others have counted. So every status names the lives that its signer has heard under its
name, and while we ask, only a life that names ours counts: ours is new, and nobody could name it before.

A life that goes on may be slow to answer. If one was heard to be online, we hold back the echo of our own
question, so that whoever waits for it waits as long as it can, and not only for the echo.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from .errors import TrustError

MAX_MET: Final = 8
"""Other lives that a status names, the newest ones."""


class OwnName:
    """What is heard on our own status topic. exchange: the key that tells this life of ours."""

    def __init__(self, exchange: bytes) -> None:
        self.ours = False
        """Whether our card is out: then every word counts, for we contradict it."""
        self._exchange = exchange
        self._met: dict[bytes, None] = {}
        self._alive: set[bytes] = set()
        self._doubt = b""
        """A life that was online and has not answered yet."""

    @property
    def met(self) -> list[bytes]:
        """The other lives under our name that were heard of lately."""
        return list(self._met)

    def hear(self, head: Mapping[str, Any], body: bytes) -> bool:
        """Take in a status that our key has signed: whether presence should know it (now).

        TrustError if it must not count.
        """
        exchange, answers = head.get("exchange"), head.get("answers", [])
        if not isinstance(exchange, bytes) or len(exchange) != 32 or not isinstance(answers, list):
            raise TrustError("malformed", "a status under our own name lacks what trust needs")
        if exchange == self._exchange:
            return self.ours or not self._doubt
        self._met.pop(exchange, None)
        self._met[exchange] = None
        if len(self._met) > MAX_MET:
            del self._met[next(iter(self._met))]
        if self._exchange in answers:
            self._alive.add(exchange)
        if not self.ours and exchange not in self._alive:
            if is_online(body):
                self._doubt = exchange
            elif self._doubt == exchange:
                self._doubt = b""
            raise TrustError(
                "unanswered", "a status under our own name, of a life that does not answer ours"
            )
        return True


def is_online(body: bytes) -> bool:
    """Whether a status says that its peer is there; no if it cannot be read."""
    try:
        return json.loads(body)["state"] == "online"
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
