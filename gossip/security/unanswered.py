"""Noticing that nobody answers: the others may refuse our card, and only they are told why. No IO.

Members that share a model exchange keys as soon as they know each other's cards, so a peer that sees
others there, and to which none of them ever seals anything, is not one of them in their eyes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

_log = logging.getLogger(__name__)

PATIENCE: Final = 120.0
"""Seconds that others may take to answer us; raise it if a stretch of training takes longer."""
NAMED: Final = 3
"""Others that the warning names."""


class Unanswered:
    """Watches over one life of a peer, from its first card until somebody has answered it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._since: float | None = None
        self._told = False

    def look(self, others: Collection[str], now: float) -> bool:
        """Whether our card should be shown again: dated anew, it may be believed. Warns once.

        others: who should have answered, as of now; nobody, once anybody has.
        """
        if not others:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if now - self._since < PATIENCE:
            return False
        self._since = now
        if not self._told:
            self._told = True
            names = ", ".join(sorted(others)[:NAMED])
            more = len(others) - NAMED
            _log.warning(
                "peer %s: nobody has answered for %g s, though others are there (%s%s): they may "
                "refuse its card, and their logs say why; is its clock right?",
                self._name, PATIENCE, names, f" and {more} more" if more > 0 else "",
            )  # fmt: skip
        return True
