"""A broker that lies: packets reach their inboxes only through the hands of an outsider."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Self

from trusting import Outsider
from waiting import until

from gossamer.gossip import Hook, Transport, Will, topics
from gossamer.gossip.security import revocation_topic
from gossamer.gossip.security.channels import HEADER
from gossamer.peer import BrokerAddress, Connect, mqtt_connect

HELD = "-held"
"""Added to the swarm's name in the topics where packets wait for the relay."""
HOLD_UP = 6
"""How often to look for more packets before those that are held are passed on."""
SEALED = HEADER.size
CHUNK = SEALED + 40
"""Where the header of a chunk would end if it were not sealed."""


def diverted(url: str) -> Connect:
    """Transports whose packets for inboxes go to the relay, as a broker could arrange it."""
    connect = mqtt_connect(BrokerAddress(url))

    def divert(client_id: str, will: Will, on_connect: Hook) -> Transport:
        transport: Any = connect(client_id, will, on_connect)
        publish = transport.publish

        async def elsewhere(topic: str, payload: Any, **options: Any) -> bool:
            if topics.is_gossip(topic):
                where = topics.parse(topic)
                assert where.model is not None
                topic = topics.inbox(where.swarm + HELD, where.peer, where.model)
            return await publish(topic, payload, **options)

        transport.publish = elsewhere
        return transport

    return divert


def withholding(url: str, shown_to: str) -> Connect:
    """Transports of a broker that shows the revocation list to peers whose name begins so, and no others."""
    connect = mqtt_connect(BrokerAddress(url))

    def withhold(client_id: str, will: Will, on_connect: Hook) -> Transport:
        transport: Any = connect(client_id, will, on_connect)
        messages = transport.messages

        async def censored() -> AsyncIterator[Any]:
            async for message in messages():
                if message.topic != revocation_topic(topics.parse(will.topic).swarm):
                    yield message

        if not client_id.startswith(shown_to):
            transport.messages = censored
        return transport

    return withhold


class Relay(Outsider):
    """Hands packets on in the wrong order, each after splices of it with others of its sender."""

    def __init__(self, url: str, swarm: str):
        super().__init__(url, swarm + HELD)
        self.counts: Counter[str] = Counter()
        self.react = self._hold
        self._swarm = swarm
        self._held: dict[str, list[bytes]] = {}
        self._before: dict[tuple[str, bytes], list[bytes]] = {}

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._passing = asyncio.create_task(self._pass_on())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._passing.done():
            self._passing.result()
        self._passing.cancel()
        await asyncio.gather(self._passing, return_exceptions=True)
        await super().__aexit__(*exc)

    def _hold(self, topic: str, packet: bytes) -> list[tuple[str, bytes]]:
        self._held.setdefault(topic, []).append(packet)
        return []

    async def _pass_on(self) -> None:
        while True:
            await until(lambda: self._held, patience=float("inf"))
            looks = itertools.count()
            await until(lambda looks=looks: next(looks) >= HOLD_UP)
            held, self._held = self._held, {}
            for topic, packets in held.items():
                where = topics.parse(topic)
                assert where.model is not None
                inbox = topics.inbox(self._swarm, where.peer, where.model)
                for packet in reversed(packets):
                    for splice in self._splices(topic, packet):
                        self.counts["splices"] += 1
                        await self.say(inbox, splice)
                    self.counts["packets"] += 1
                    await self.say(inbox, packet)

    def _splices(self, topic: str, packet: bytes) -> list[bytes]:
        """This packet and the last one of its sender and size, which may be of another message.

        All under this packet's number, which is new: they are not refused as replays.
        """
        before = self._before.setdefault((topic, packet[8:16]), [])
        alike = [each for each in before[-16:] if len(each) == len(packet)]
        before.append(packet)
        if not alike:
            return []
        other = alike[-1]
        self.counts["pairs"] += 1
        return [
            packet[:SEALED] + other[SEALED:],  # the other's chunk under this one's number
            packet[:SEALED]
            + other[SEALED:CHUNK]
            + packet[CHUNK:],  # this body in the other's place
            packet[:CHUNK] + other[CHUNK:],  # the other's body in this one's place
        ]
