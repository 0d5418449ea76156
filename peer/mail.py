"""A peer's mail: what arrives is sorted, and turn after turn it goes in and what is due goes out."""

from __future__ import annotations

import json
import logging
import time

from ..gossip import topics
from .engine import Outgoing
from .membership import Membership
from .presence import Status

_log = logging.getLogger(__name__)

MAX_PENDING = 256
"""Packets that may wait for a busy peer; more are dropped and counted: their senders repeat them."""

MAX_PACKET = 4 << 20
"""Bytes of the largest packet, if the broker takes it. Cutting a message costs a checksum and a copy on
either side; lower this when large packets hold up other traffic on a slow link."""


async def receive(member: Membership) -> None:
    """Sort what arrives: gossip waits for the next turn, cards and statuses go to the roster."""
    async for topic, payload, _ in member.transport.messages():
        try:
            where = topics.parse(topic)
        except topics.TopicError:
            member.engine.dropped["topic"] += 1
            continue
        if where.kind == "inbox" and where.vector is not None:
            if len(member.pending) < MAX_PENDING:
                member.pending.append((where.vector, payload))
            else:
                member.engine.dropped["busy"] += 1
        elif where.kind == "card":
            member.events += member.roster.card(where.peer, bytes(payload))
        elif where.kind == "status":
            if where.peer == member.name:
                _hear_oneself(member, bytes(payload))
            member.events += member.roster.status(where.peer, bytes(payload), time.monotonic())
        member.wake()


def _hear_oneself(member: Membership, payload: bytes) -> None:
    """Our own status topic tells whether somebody else lives under our name."""
    try:
        table = json.loads(payload)
        status = Status(table["state"], table["session"])
    except (ValueError, KeyError, TypeError):
        return
    own = status.session == member.session
    if own:
        member.asked.set()
    if not (own and status.state == "offline"):  # our question, or our last will
        member.own_status = status
    if status.state == "online" and not own and member.born:
        _log.warning("peer %s: somebody else came online under this name", member.name)
    if status.state == "offline" and member.born:
        # A late last will of ours, or somebody who asks whether the name is free.
        member.contradict()


async def gossip(member: Membership) -> None:
    """Turn after turn: what arrived goes in, what is due goes out."""
    limit = min(member.transport.max_payload(member.topic("metrics")), MAX_PACKET)
    while True:
        await member.rest()
        member.check_lease()
        now = time.monotonic()
        events, member.events = [*member.events, *member.roster.tick(now)], []
        arrived, member.pending = member.pending, []
        outgoing = await member.worker.run(member.engine.turn, arrived, events, now, limit)
        await _send(member, outgoing)
        await member.turned()


async def _send(member: Membership, outgoing: list[Outgoing]) -> None:
    for message in outgoing:
        topic = topics.inbox(member.settings.swarm, message.receiver, message.vector)
        for packet in message.packets:
            await member.transport.publish(topic, packet)
            member.packets += 1
            member.bytes += len(packet)
