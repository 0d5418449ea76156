"""Whether our own card still stands at the broker, and when to put it there again. No IO.

A card is retained for those who come later. Whoever reaches the broker can clear or replace it, and who
comes then would never learn of us: it would found a weight of its own, and give us nothing. So a peer
hears its own card topic, and publishes its card again; ever more seldom, should somebody insist.
"""

from __future__ import annotations

from math import inf

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds after a card was put back before it is put back once more. They double each time, and start
over once the card was left in peace for the longest of them."""


class OwnCard:
    """What is heard on our own card topic, compared with what we published there."""

    def __init__(self) -> None:
        self.stands = True
        """Whether what was last heard there is ours. True too before we have published anything."""
        self._newest = self._before = b""
        self._pause, self._restored = 0.0, -inf

    def published(self, payload: bytes) -> None:
        """Note what we are about to publish. The one before it is ours too: a reconnection hears it."""
        if payload != self._newest:
            self._newest, self._before = payload, self._newest

    def hear(self, payload: bytes) -> bool:
        """Take in what came on the topic; whether the card has just been lost.

        Once the newest was heard, the one before it is a loss too: its exchange key may be out of use.
        """
        stood = self.stands
        self.stands = not self._newest or (
            bool(payload) and payload in (self._newest, self._before)
        )
        if payload == self._newest:
            self._before = b""
        return stood and not self.stands

    def pause(self, now: float) -> float:
        """Note that the card was put back; for how many seconds to leave it at that."""
        calm = now - self._restored > self._pause + LONGEST_PAUSE
        self._pause = FIRST_PAUSE if calm else min(2 * self._pause, LONGEST_PAUSE)
        self._restored = now
        return self._pause
