"""How much memory a peer has for what others send: what its own models make likely, and no more."""

from __future__ import annotations

from collections.abc import Mapping

from ..gossip import MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, Reassembler, WireDtype
from .errors import PeerError

MESSAGE_OVERHEAD = 2 * MAX_HEADER_BYTES
"""Bytes of a message besides its value, and more."""
VALUE_BYTES: Mapping[WireDtype, int] = {"float16": 2, "float32": 4, "float64": 8}
MAX_VALUE_BYTES = 8
"""Bytes of a value, at most. Whoever sends it decides, and each message says so."""
MIN_WAITING_BYTES = 4 << 20
"""Bytes that may wait, however small the models are: answers and keys come beside them."""
MAX_WAITING_BYTES = 1 << 30
"""Bytes that may wait, however many the neighbours are, unless a single message takes more."""

MIN_UNFINISHED = 64
"""Messages of which some chunks may be missing, however few the neighbours are."""


class InboundLimits:
    """The bounds of one peer.

    sizes: values of each partial model. dtype: how the peer writes them. PeerError, by name, for one that
    no message can carry.
    """

    def __init__(self, name: str, sizes: Mapping[str, int], dtype: WireDtype) -> None:
        width = VALUE_BYTES[dtype]
        for model, size in sizes.items():
            if (total := size * width + MESSAGE_OVERHEAD) > MAX_MESSAGE_BYTES:
                raise PeerError(
                    f"peer {name}: model {model}: its {size} values make a message of {total} bytes, and "
                    f"{MAX_MESSAGE_BYTES} are the most: share it as several partial models"
                    + ("" if width == 2 else ", or send float16")
                )
        self._each = sum(size * width + MESSAGE_OVERHEAD for size in sizes.values())
        """One message about every partial model."""
        self._models = len(sizes)
        widest = max(sizes.values(), default=0) * MAX_VALUE_BYTES + MESSAGE_OVERHEAD
        self.largest = min(MAX_MESSAGE_BYTES, widest)
        """Bytes of the largest message that can be of any use here."""

    def waiting(self, neighbours: int) -> int:
        """Bytes that may wait while the peer trains: twice what each of its neighbours, and one who is
        not known yet, has to say about every partial model."""
        likely = 2 * self._each * (neighbours + 1)
        return max(MIN_WAITING_BYTES, 2 * self.largest, min(likely, MAX_WAITING_BYTES))

    def reassembler(self) -> Reassembler:
        """One that takes every message which is of use, and from each sender one that waits besides."""
        sender = 2 * (self._each + self.largest)
        return Reassembler(
            max_message_bytes=self.largest,
            max_sender_bytes=sender,
            max_total_bytes=self.unfinished(0),
        )

    def fit(self, reassembler: Reassembler, neighbours: int) -> None:
        """Let it hold what so many neighbours may have on its way at once."""
        reassembler.max_total_bytes = self.unfinished(neighbours)
        reassembler.max_unfinished = max(MIN_UNFINISHED, 2 * self._models * (neighbours + 1))

    def unfinished(self, neighbours: int) -> int:
        """Bytes of all messages of which some chunks are missing."""
        return 2 * (self._each + self.largest) + self.waiting(neighbours)
