"""How large a packet a broker takes: what it says, or, where it says nothing, what it bears.

MQTT 5 lets a broker name its limit. One that speaks 3.1.1 hangs up on a larger packet without a word,
and would hang up again on every repetition. So we count: a connection that the broker closes while a
large packet is not known to have got through counts against that packet, and a few such in a row mean
that packets must become smaller. Whoever cuts messages into chunks asks for the size anew each time.
"""

from __future__ import annotations

import asyncio
import logging

from .mqtt_link import Link
from .transport import TransportError

_log = logging.getLogger(__name__)

LARGEST = 256 * 1024 * 1024
"""What MQTT itself allows."""
FLOOR = 512
"""Packets are made no smaller than this: with the longest topic and a seal, little less would do."""
HARMLESS = 256
"""Packets up to this size, such as a status, are never blamed for a lost connection."""
CUTS = 3
"""Lost connections in a row before a large packet is blamed: links fail for other reasons too."""
LAST_CUTS = 6
"""The same, before we give up on a packet that cannot be made smaller."""


class PacketLimit:
    """The largest packet to send over a transport's connections, which come one after the other.

    broker: its address, for messages.
    ceiling: the limit to begin with, where the broker does not name its own.
    """

    def __init__(self, broker: str, ceiling: int) -> None:
        self._broker = broker
        self._ceiling = self._guess = ceiling
        self._named: int | None = None
        self._sent = self._taken = 0
        """The largest packets of this connection: that went out, and that surely got through."""
        self._whole = False
        """Whether the largest that went out is one that cannot be cut."""
        self._cuts = 0
        self._blamed = LARGEST
        """The smallest packet that the last cuts in a row may be due to."""
        self._searching = self._warned = False
        self._unsure = asyncio.Event()

    @property
    def size(self) -> int:
        """Bytes of the largest packet that a chunk should make."""
        return self._guess if self._named is None else min(self._named, LARGEST)

    def allows(self, size: int) -> bool:
        """Whether to try a packet at all. A guess forbids nothing, as not all packets can be cut."""
        return size <= (self._ceiling if self._named is None else self.size)

    def connected(self, named: int | None) -> None:
        """A new connection; `named` is the limit that the broker told us, if any."""
        self._named = named
        self._unsure.clear()

    def sending(self, size: int, *, whole: bool) -> int:
        """Note a packet. Once the broker has answered it, call `took` with what this returns.

        whole: it cannot be cut into chunks.
        """
        if size > self._sent:
            self._sent, self._whole = size, whole
        if self._suspect():
            self._unsure.set()
        return self._sent

    def took(self, size: int) -> None:
        """The broker answered something that came after a packet of this size: it has kept that one."""
        self._taken = max(self._taken, size)
        if size >= self._blamed:
            self._cuts, self._blamed = 0, LARGEST
        if size > self._guess // 4:
            self._searching = False

    async def ask(self, link: Link, topic: str | None) -> None:
        """Follow large packets with one that must be answered, for as long as the connection lives."""
        while topic is not None:
            await self._unsure.wait()
            self._unsure.clear()
            size = self._sent
            if self._suspect() and await link.publish(topic, b"", 1, False):
                self.took(size)

    def lost(self, cause: str) -> bool:
        """A connection is over, or did not come about; True if packets are smaller from now on.

        cause: of the TransportError. Raises another one when nothing is left to try.
        """
        size, whole = self._suspect(), self._whole
        self._sent = self._taken = 0
        if not size or cause not in ("unreachable", "too-large"):
            return False  # nothing large is open, or it was not the broker that hung up
        self._cuts += 1
        self._blamed = min(self._blamed, size)
        if whole or size <= FLOOR:
            if self._cuts < LAST_CUTS:
                return False
            raise TransportError(
                "too-large",
                f"{self._broker} closed the connection {self._cuts} times in a row on a packet of "
                f"{size} bytes, which cannot be cut smaller: raise the broker's packet limit "
                "(mosquitto: max_packet_size)",
            )
        if self._cuts < CUTS and not self._searching and cause != "too-large":
            return False
        self._guess = max(FLOOR, min(size, self._guess) // 2)
        _log.log(
            logging.INFO if self._warned else logging.WARNING,
            "%s closed the connection on packets of up to %d bytes: they are cut to %d from now on; "
            "raise the broker's packet limit (mosquitto: max_packet_size) to spare this",
            self._broker, size, self._guess,
        )  # fmt: skip
        self._cuts, self._blamed = 0, LARGEST
        self._searching = self._warned = True
        return True

    def _suspect(self) -> int:
        """The largest packet of this connection that may not have got through; 0 for none."""
        if self._named is not None or self._sent <= max(self._taken, HARMLESS):
            return 0
        return self._sent
