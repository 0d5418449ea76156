"""What is heard too early: statuses before their cards, and cards before our clock is right. No IO.

The broker may hand us a status first. Whoever has no card may be anybody, with as many names as it likes:
what is kept of them is little.
"""

from __future__ import annotations

from typing import Final

from .errors import TrustError
from .register import is_recent

MAX_WAITING: Final = 256
"""Statuses that wait; the oldest give way."""
MAX_STATUS: Final = 4096
"""Bytes of a status that may wait. Only that of a peer that has left can be longer, and who was never here
need not be known to have left."""

MAX_MISDATED: Final = 1024
"""Cards that wait for a clock: each is of a member, with a paper that the owner signed."""


class Waiting:
    """The last status of each peer whose card has not come yet."""

    def __init__(self) -> None:
        self._statuses: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._statuses)

    def keep(self, peer: str, payload: bytes) -> None:
        """Let a status wait for its peer's card; TrustError says if one was dropped, this or another."""
        if len(payload) > MAX_STATUS:
            raise TrustError(
                "malformed",
                f"a status of {len(payload)} bytes of {peer}, whose card is not known; the limit "
                f"is {MAX_STATUS}",
            )
        self._statuses.pop(peer, None)
        self._statuses[peer] = payload
        if len(self._statuses) > MAX_WAITING:
            oldest = next(iter(self._statuses))
            del self._statuses[oldest]
            raise TrustError(
                "unknown-sender",
                f"over {MAX_WAITING} statuses of peers whose card is not known: the oldest, of "
                f"{oldest}, is dropped",
            )

    def pop(self, peer: str) -> bytes | None:
        """The status that waited for this peer's card, if any did."""
        return self._statuses.pop(peer, None)


class MisdatedCards:
    """Members' cards that were dated ahead of our time, or too long ago: once our clock is set right, they
    are heard again.

    They come once, when we connect, and a device without a battery may connect before it knows the time.
    """

    def __init__(self) -> None:
        self._cards: dict[str, tuple[float, bytes]] = {}

    def keep(self, peer: str, card: bytes, issued: float) -> None:
        """Let a card wait; only its peer's last."""
        if peer in self._cards or len(self._cards) < MAX_MISDATED:
            self._cards[peer] = (issued, card)

    def due(self, now: float) -> list[tuple[str, bytes]]:
        """The cards whose date has become right, to be heard once more."""
        due = {p: card for p, (issued, card) in self._cards.items() if is_recent(issued, now)}
        for peer in due:
            del self._cards[peer]
        return list(due.items())
