"""How large a packet a broker takes: what it says, or, where it says nothing, what it bears.

MQTT 5 lets a broker name its limit. One that speaks 3.1.1 hangs up on a larger packet without a word,
and would hang up again on every repetition. So we count: a connection that the broker closes while a
large packet is not known to have got through counts against that packet, and a few such in a row mean
that packets must become smaller. Whoever cuts messages into chunks asks for the size anew each time.

Others drop a large message without a word, in MQTT 5 too where it is not one to be answered (mosquitto:
message_size_limit). So whenever a packet is larger than all before, we send ourselves one of that size,
and a small one after it: where only the small one comes back, again and again, the same follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable

from .base import TransportError
from .connection import Link
from .options import SMALLEST_PACKET

_log = logging.getLogger(__name__)

LARGEST = 256 * 1024 * 1024
"""What MQTT itself allows."""
FLOOR = SMALLEST_PACKET
MIN_PROBED_PACKET = 256
"""Packets up to this size, such as a status, are never blamed for anything."""
HEADER_BYTES = 16
"""Bytes of a packet besides topic and payload: header, lengths, packet id, properties."""
CUTS = 3
"""Lost connections, or packets, in a row before a large one is blamed: links fail for other reasons too."""
LAST_CUTS = 6
"""The same, before we give up on a packet that cannot be made smaller."""
_SLACK = 256  # a header that grows by a few bytes is no reason to try again
_PAUSE = 0.1  # seconds before a packet that did not come back is tried again; longer each time
_END = b"\0"  # what follows a packet that is tried; the echo's own calls are empty


class PacketLimit:
    """The largest packet to send over a transport's connections, which come one after the other.

    broker: its address, for messages.
    ceiling: the limit to begin with; a broker may name a lower one.
    counters: where to count how often packets became smaller.
    """

    def __init__(self, broker: str, ceiling: int, counters: Counter[str] | None = None) -> None:
        self._broker = broker
        self._counters = Counter() if counters is None else counters
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
        self.proven = MIN_PROBED_PACKET
        """The largest packet that was seen to come back."""
        self._missed = self._echoed = 0
        """How many in a row did not; and the largest payload that did of late."""
        self._ended = asyncio.Event()

    @property
    def size(self) -> int:
        """Bytes of the largest packet that a chunk should make."""
        return self._guess if self._named is None else min(self._named, self._guess)

    def allows(self, size: int) -> bool:
        """Whether to try a packet at all. A guess forbids nothing, as not all packets can be cut."""
        return size <= (self._ceiling if self._named is None else min(self._named, self._ceiling))

    def connected(self, named: int | None) -> None:
        """A new connection; `named` is the limit that the broker told us, if any."""
        self._named = named
        # It may be another broker, or the same with another limit.
        self.proven, self._missed = MIN_PROBED_PACKET, 0
        self._unsure.clear()

    def sending(self, size: int, *, whole: bool) -> int:
        """Note a packet. Once the broker has answered it, call `took` with what this returns.

        whole: it cannot be cut into chunks.
        """
        if size > self._sent:
            self._sent, self._whole = size, whole
        if self.suspect() or self._sent > self.proven:
            self._unsure.set()
        return self._sent

    def took(self, size: int) -> None:
        """The broker answered something that came after a packet of this size: it has kept that one."""
        self._taken = max(self._taken, size)
        if size >= self._blamed:
            self._cuts, self._blamed = 0, LARGEST
        if size > self._guess // 4:
            self._searching = False

    async def ask(
        self, link: Link, topic: str | None, covered: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Follow large packets with one that must be answered, for as long as the connection lives.

        topic: where we hear ourselves. covered: whether we are subscribed to it, by now: then what is
        larger than all before must come back. TransportError if it never does and cannot be cut.
        """
        while True:
            await self._unsure.wait()
            self._unsure.clear()
            if topic is None:
                continue
            size = self._sent
            if self.suspect() and await link.publish(topic, b"", 1, False):
                self.took(size)
            if size > self.proven and covered(topic):
                await self._try(link, topic, size, self._whole)

    def heard(self, payload: int) -> None:
        """What came back to us, in bytes."""
        if payload == len(_END):
            self._ended.set()
        else:
            self._echoed = max(self._echoed, payload)

    async def _try(self, link: Link, topic: str, size: int, whole: bool) -> None:
        """Send ourselves a packet of this size, and see whether it comes back."""
        tried = max(size, min(size + _SLACK, self.size))
        payload = tried - len(topic.encode()) - HEADER_BYTES
        self._echoed = 0
        self._ended.clear()
        await link.publish(topic, bytes(payload), 0, False)
        await link.publish(topic, _END, 0, False)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), link.patience)
        if self._echoed >= payload:
            self.proven, self._missed, self._searching = tried, 0, False
        elif self._ended.is_set():
            self._missed += 1
            if not self._dropped(size, whole):
                await asyncio.sleep(_PAUSE * self._missed)
                self._unsure.set()

    def _dropped(self, size: int, whole: bool) -> bool:
        """A packet did not come back; True if packets are smaller from now on."""
        if whole or size <= FLOOR:
            if self._missed < LAST_CUTS:
                return False
            raise TransportError(
                "too-large",
                f"{self._broker} takes packets of {size} bytes and drops them without a word, and this "
                "one cannot be cut smaller: raise the broker's limit (mosquitto: message_size_limit)",
            )
        if self._missed < CUTS and not self._searching:
            return False
        self._halve(size, "drops packets of %d bytes without a word", "message_size_limit")
        self._sent = self._taken = self._missed = 0
        return True

    def lost(self, cause: str) -> bool:
        """A connection is over, or did not come about; True if packets are smaller from now on.

        cause: of the TransportError. Raises another one when nothing is left to try.
        """
        size, whole = self.suspect(), self._whole
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
        self._halve(size, "closed the connection on packets of up to %d bytes", "max_packet_size")
        self._cuts, self._blamed = 0, LARGEST
        return True

    def _halve(self, size: int, what: str, option: str) -> None:
        self._guess = max(FLOOR, min(size, self.size) // 2)
        _log.log(
            logging.INFO if self._warned else logging.WARNING,
            f"%s {what}: they are cut to %d from now on; raise the broker's packet limit (mosquitto: %s) "
            "to spare this",
            self._broker, size, self._guess, option,
        )  # fmt: skip
        self._searching = self._warned = True
        self._counters["packets-halved"] += 1

    def suspect(self) -> int:
        """The largest packet of this connection that may not have got through; 0 for none."""
        if self._named is not None or self._sent <= max(self._taken, MIN_PROBED_PACKET):
            return 0
        return self._sent
