"""From a peer's messages to packets for its neighbours' inboxes: encoded, cut to size, and sealed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..gossip.chunks import HEADER_BYTES, Chunker
from ..gossip.messages import Message
from ..gossip.trust import Trusting
from ..gossip.wire import WireDtype, encode
from .compression import Compression


@dataclass(frozen=True)
class Outgoing:
    """Packets for one neighbour's inbox, to be taken once: each is made when it is asked for."""

    receiver: str
    vector: str
    packets: Iterator[bytes]


class Dispatch:
    """Makes packets of messages, on the peer's own thread.

    schemas: the hash of every vector that the peer has. dtype: values on the wire. compression: counts
    what leaves.
    """

    def __init__(
        self,
        name: str,
        schemas: Mapping[str, str],
        dtype: WireDtype,
        compression: Compression,
        trust: Trusting,
    ) -> None:
        self._name, self._schemas = name, schemas
        self._dtype: WireDtype = dtype
        self._compression = compression
        self._waiting: dict[tuple[str, str, type[Message]], Message] = {}
        """Messages that cannot be sealed yet."""
        self.set_trust(trust)

    def set_trust(self, trust: Trusting) -> None:
        """Seal with the trust of a new session."""
        self._trust = trust
        self._chunker: Chunker | None = None

    def renew(self) -> None:
        """Forget what an old session still had to say."""
        self._waiting.clear()
        self._chunker = None

    def gone(self, peer: str) -> None:
        """Forget what waits for a peer that is gone."""
        for at in [each for each in self._waiting if each[0] == peer]:
            del self._waiting[at]

    def pack(self, messages: list[Message], session: str, max_packet: int) -> list[Outgoing]:
        """Return the packets of all messages that can leave now."""
        overhead = self._trust.overhead
        if overhead:
            messages = self._sealable(messages)
        limit = max_packet - overhead
        if self._chunker is None or self._chunker.limit != limit:
            self._chunker = Chunker(f"{self._name}/{session}", limit)
        outgoing = []
        for message in messages:
            buffers = encode(message, self._schemas[message.vector], self._dtype)
            self._compression.sent(message, buffers)
            packets = self._chunker.split(buffers)
            if overhead:
                sealed = self._seal(message, packets)
                if sealed is None:
                    continue  # just now out, or without a key: the ledger repeats or gives up
                packets = iter(sealed)
            elif sum(len(buffer) for buffer in buffers) > max_packet - HEADER_BYTES:
                packets = iter(list(packets))  # a checksum over much: not on the event loop
            outgoing.append(Outgoing(message.receiver, message.vector, packets))
        return outgoing

    def _sealable(self, messages: list[Message]) -> list[Message]:
        """What can be sealed by now; the newest of the rest waits for its receiver's card or a key."""
        for message in messages:
            self._waiting[message.receiver, message.vector, type(message)] = message
        ready = [at for at in self._waiting if self._trust.can_seal(*at[:2])]
        return [self._waiting.pop(at) for at in ready]

    def _seal(self, message: Message, packets: Iterator[bytes]) -> list[bytes] | None:
        """A message's packets as its receiver alone can open them; here, not on the event loop."""
        sealed = []
        for packet in packets:
            closed = self._trust.seal(message.receiver, message.vector, packet)
            if closed is None:
                return None
            sealed.append(closed)
        return sealed
