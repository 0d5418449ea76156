"""What is heard too early: statuses before their cards, and cards before our clock is right. No IO.

The broker may hand us a status first. Whoever has no card may be anybody, with as many names as it likes:
what is kept of them is little.
"""

from __future__ import annotations

from typing import Final

from .errors import TrustError

MAX_WAITING: Final = 256
"""Statuses that wait; the oldest give way."""
MAX_STATUS: Final = 4096
"""Bytes of a status that may wait. Only that of a peer that has left can be longer, and who was never here
need not be known to have left."""

MAX_AHEAD: Final = 1024
"""Cards that wait for a clock: each is of a member, with a paper that the owner signed."""
AGAIN: Final = 30.0
"""Seconds between two looks at them."""


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


class Ahead:
    """Members' cards that were dated ahead of our time: once our clock is set, they are heard again.

    They come once, when we connect, and a device without a battery may connect before it knows the time.
    """

    def __init__(self) -> None:
        self._cards: dict[str, bytes] = {}
        self._since: float | None = None

    def keep(self, peer: str, card: bytes) -> None:
        """Let a card wait; only its peer's last."""
        if peer in self._cards or len(self._cards) < MAX_AHEAD:
            self._cards[peer] = card

    def due(self, now: float) -> list[tuple[str, bytes]]:
        """The cards to hear once more, at most every `AGAIN` seconds. Those still ahead come back here."""
        if self._since is None or now - self._since < AGAIN:
            self._since = now if self._since is None else self._since
            return []
        self._since = now
        cards, self._cards = self._cards, {}
        return list(cards.items())
