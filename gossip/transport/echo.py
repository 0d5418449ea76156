"""What a transport says to itself: to notice a broker that delivers nothing, or no large packets.

Both need a topic that a subscription of our own covers: only what comes back shows that the others' messages
would too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable

from .base import HEADER_BYTES, TransportError
from .connection import Link
from .options import SMALLEST_PACKET

_log = logging.getLogger(__name__)

LARGEST = 256 * 1024 * 1024
"""Bytes of the largest packet that MQTT itself allows."""
FLOOR = SMALLEST_PACKET
MIN_PROBED_PACKET = 256
"""Packets up to this size, such as a status, are never blamed for anything."""
CUTS = 3
"""Times in a row that a packet must not get through before it is blamed: links fail for other reasons too."""
LAST_CUTS = 6
"""The same, before we give up on a packet that cannot be made smaller."""
_SLACK = 256  # a header that grows by a few bytes is no reason to try again
_PAUSE = 0.1  # seconds before a packet that did not come back is tried again; longer each time
_END = b"\0"  # what follows a packet that is tried; an echo's own calls are empty
_STEPS = 10  # counted, not measured: a process that was frozen has not listened meanwhile


class Echo:
    """Says something to itself every half keepalive, and notices when nothing at all comes back.

    A connection can be up, its pings answered and its messages acknowledged, while the broker has forgotten
    what we subscribed to.

    topic: where; None never listens. Anything that arrives counts as hearing, so that a broker that is
    slow because it is busy is not taken for a deaf one.
    """

    def __init__(self, topic: str | None, keepalive: float) -> None:
        self._topic = topic
        self._interval = keepalive / 2
        self._patience = float(keepalive)
        self._heard = False

    def heard(self, topic: str) -> bool:
        """Note that something arrived; True if it was our own call."""
        self._heard = True
        return topic == self._topic

    async def listen(self, link: Link, covered: Callable[[str], bool]) -> None:
        """Return once a connection is deaf; ends never on a good one.

        covered: whether we are subscribed to a topic, by now.
        """
        while True:
            await asyncio.sleep(self._interval)
            if self._topic is None or not covered(self._topic):
                continue
            self._heard = False
            call = asyncio.ensure_future(link.publish(self._topic, b"", 1, False))
            try:
                silence = 0
                while silence < _STEPS and not self._heard:
                    await asyncio.sleep(self._patience / _STEPS)
                    silence += not link.congested()
            finally:
                call.cancel()
            if not self._heard:
                return


class PacketLimit:
    """The largest packet to send over a transport's connections, which come one after the other.

    MQTT 5 lets a broker name its limit. One that speaks 3.1.1 hangs up on a larger packet without a word, and
    would hang up again on every repetition; others drop it without a word (mosquitto: message_size_limit). So
    whenever a packet is larger than all before, we send ourselves one of that size, and a small one after it.
    If the connection is closed before the large one is back, or the small one comes back alone, several times
    in a row, then packets must become smaller: whoever cuts messages into chunks asks for the size anew each
    time.

    broker: its address, for messages.
    ceiling: the limit to begin with; a broker may name a lower one.
    counters: where to count how often packets became smaller.
    """

    def __init__(self, broker: str, ceiling: int, counters: Counter[str] | None = None) -> None:
        self._broker = broker
        self._counters = Counter() if counters is None else counters
        self._ceiling = self._guess = ceiling
        self._named: int | None = None
        self._sent, self._whole = 0, False
        """The largest packet that went out on this connection, and whether it is one that cannot be cut."""
        self.proven = MIN_PROBED_PACKET
        """The largest packet that came back on this connection."""
        self._failures, self._blamed = 0, LARGEST
        """How often in a row one did not, and the smallest that this may be due to."""
        self._searching = self._warned = False
        self._unsure, self._ended = asyncio.Event(), asyncio.Event()
        self._echoed = 0

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
        self._sent, self.proven = 0, MIN_PROBED_PACKET
        self._unsure.clear()

    def sending(self, size: int, *, whole: bool) -> None:
        """Note a packet. whole: it cannot be cut into chunks."""
        if size > self._sent:
            self._sent, self._whole = size, whole
        if self._sent > self.proven:
            self._unsure.set()

    def came_back(self, size: int) -> None:
        """Note a packet that got through."""
        self.proven = max(self.proven, size)
        if size >= self._blamed:
            self._failures, self._blamed = 0, LARGEST
        if size > self._guess // 4:
            self._searching = False

    def heard(self, payload: int) -> None:
        """Note what we heard of ourselves, in bytes."""
        if payload == len(_END):
            self._ended.set()
        else:
            self._echoed = max(self._echoed, payload)

    async def probe(
        self, link: Link, topic: str | None, covered: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Try whether packets larger than all before get through, for as long as the connection lives.

        topic: where we hear ourselves. covered: whether we are subscribed to it, by now. TransportError if a
        packet never gets through and cannot be cut.
        """
        while True:
            await self._unsure.wait()
            self._unsure.clear()
            size, whole = self._sent, self._whole
            if topic is None or not covered(topic) or size <= self.proven:
                continue
            tried = max(size, min(size + _SLACK, self.size))
            payload = tried - len(topic.encode()) - HEADER_BYTES
            self._echoed = 0
            self._ended.clear()
            await link.publish(topic, bytes(payload), 0, False)
            await link.publish(topic, _END, 0, False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), link.patience)
            if self._echoed >= payload:
                self.came_back(tried)
            elif self._ended.is_set():
                what = "drops packets of {size} bytes without a word"
                if self._failed(size, whole, what, "message_size_limit"):
                    self._sent = 0
                else:
                    await asyncio.sleep(_PAUSE * self._failures)
                    self._unsure.set()

    def lost(self, cause: str) -> bool:
        """A connection is over, or did not come about; True if packets are smaller from now on.

        cause: of the TransportError. Raises another one when nothing is left to try.
        """
        size, self._sent = self._sent, 0
        if size <= self.proven or self._named is not None:
            return False  # nothing was under way that might be too large
        if cause not in ("unreachable", "too-large"):
            return False  # it was not the broker that hung up
        what = "closed the connection on packets of {size} bytes"
        told = cause == "too-large"
        return self._failed(size, self._whole, what, "max_packet_size", at_once=told)

    def _failed(
        self, size: int, whole: bool, what: str, option: str, *, at_once: bool = False
    ) -> bool:
        """Note that a packet did not get through; True if packets are smaller from now on."""
        self._failures += 1
        self._blamed = min(self._blamed, size)
        what = what.format(size=size)
        if whole or size <= FLOOR:
            if self._failures < LAST_CUTS:
                return False
            raise TransportError(
                "too-large",
                f"{self._broker} {what}, {self._failures} times in a row, and this one cannot be cut "
                f"smaller: raise the broker's packet limit (mosquitto: {option})",
            )
        if self._failures < CUTS and not self._searching and not at_once:
            return False
        self._guess = max(FLOOR, min(size, self.size) // 2)
        _log.log(
            logging.INFO if self._warned else logging.WARNING,
            "%s %s: they are cut to %d from now on; raise the broker's packet limit (mosquitto: %s) to spare "
            "this",
            self._broker, what, self._guess, option,
        )  # fmt: skip
        self._searching = self._warned = True
        self._counters["packets-halved"] += 1
        self._failures, self._blamed = 0, LARGEST
        return True
