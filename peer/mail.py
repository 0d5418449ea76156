"""A peer's mail: what arrives is sorted, and turn after turn it goes in and what is due goes out."""

from __future__ import annotations

import logging
import time

from ..gossip import topics
from ..gossip.chunks import HEADER_BYTES, MIN_LIMIT
from ..gossip.trust import Heard
from .cards import read_status
from .errors import PeerError
from .membership import Membership
from .outgoing import MAX_PIECES, Outgoing
from .presence import Gone

_log = logging.getLogger(__name__)

MAX_PACKET = 4 << 20
"""Bytes of the largest packet, if the broker takes it. Cutting a message costs a checksum and a copy on
either side; lower this when large packets hold up other traffic on a slow link."""

MAX_PENDING = 2 * MAX_PIECES
"""Packets that may wait for a busy peer; more, or more bytes than its models make likely (see Room), are
dropped and counted: their senders repeat them. A message in many small packets finds room as a whole."""


async def receive(member: Membership) -> None:
    """Sort what arrives: gossip waits for the next turn, cards and statuses go to the roster."""
    async for topic, payload, _ in member.transport.messages():
        try:
            if topics.is_gossip(topic):
                _file(member, topics.parse(topic), payload)
            else:
                member.hear_own(topic, bytes(payload))
                _heed(member, member.trust.hear(topic, bytes(payload)))
        except topics.TopicError:
            member.engine.dropped["topic"] += 1
            continue
        del payload  # the next message may be long in coming
        member.wake()


def _file(member: Membership, where: topics.Topic, payload: bytes | memoryview) -> None:
    if where.vector is None:
        return
    if not member.trust.expects(where.vector, payload):
        return  # counted there: strangers take up no memory
    if len(payload) > member.engine.room.largest + HEADER_BYTES + member.trust.overhead:
        member.engine.dropped["packet-too-large"] += 1
    elif (
        len(member.pending) < MAX_PENDING
        and member.pending_bytes + len(payload) <= member.pending_limit
    ):
        member.pending.append((where.vector, payload))
        member.pending_bytes += len(payload)
    else:
        member.engine.dropped["busy"] += 1


def _heed(member: Membership, heard: list[Heard]) -> None:
    """Tell the roster what trust believes."""
    for each in heard:
        match each.kind:
            case "card":
                member.events += member.roster.card(each.peer, each.body)
            case "status":
                if each.peer == member.name:
                    _hear_oneself(member, each.body)
                member.events += member.roster.status(each.peer, each.body, time.monotonic())
            case "out" if each.peer == member.name:
                raise PeerError(
                    f"peer {member.name}: may take part no longer, its paper was revoked or has "
                    "expired; ask the swarm's owner"
                )
            case "reissue-card":
                member.introduce_again()
            case "out":
                member.events += member.roster.expel(each.peer)


def _hear_oneself(member: Membership, payload: bytes) -> None:
    """Our own status topic tells whether somebody else lives under our name."""
    status = read_status(payload)
    if status is None:
        if payload:
            member.engine.dropped["unreadable-status"] += 1
        return
    own = status.session == member.session
    if own:
        member.asked.set()
    if not (own and status.state == "offline"):  # our question, or our last will
        member.own_status = status
    if status.state == "online" and not own and member.born:
        member.engine.dropped["name-taken"] += 1
        count = member.engine.dropped["name-taken"]
        if count & (count - 1) == 0:  # 1, 2, 4, 8, …: a flood cannot flood the log
            _log.warning("peer %s: somebody else came online under this name", member.name)
    if status.state != "online" and member.born:
        # A late last will of ours, another life that left, or somebody who asks whether the name is free.
        member.contradict()


async def gossip(member: Membership) -> None:
    """Turn after turn: what arrived goes in, what is due goes out."""
    while True:
        await member.rest()
        member.check_lease()
        now = time.monotonic()
        events, member.events = [*member.events, *member.roster.tick(now)], []
        arrived, member.pending, member.pending_bytes = member.pending, [], 0
        member.pending_limit = member.engine.room.waiting(len(member.roster.online()))
        limit = _room(member)
        outgoing = await member.worker.run(member.engine.turn, arrived, events, now, limit)
        arrived.clear()  # megabytes, which would else be held until the next turn
        for event in events:
            if isinstance(
                event, Gone
            ):  # not before: a round that begins counts on its neighbours' secrets
                member.trust.gone(event.peer, event.session)
        await _send(member, outgoing)
        if member.introduced:
            await _send_keys(member)
        await member.turned()


def _room(member: Membership) -> int:
    """Bytes of the largest packet, as of now: a broker may come back with another limit."""
    room = member.transport.max_payload(topics.longest(member.settings.swarm))
    least = MIN_LIMIT + member.trust.overhead
    if room < least:
        raise PeerError(
            f"peer {member.name}: the broker takes {room} bytes a message at most, and gossip needs "
            f"{least}: raise the broker's packet limit (mosquitto: max_packet_size)"
        )
    return min(room, MAX_PACKET)


async def _send_keys(member: Membership) -> None:
    """What trust has to tell others about keys; and who is out because a paper expired."""
    keys, out = member.trust.tick()
    _heed(member, out)
    for receiver, model, packet in keys:
        await member.transport.publish(
            topics.inbox(member.settings.swarm, receiver, model), packet
        )  # fmt: skip
        member.packets += 1
        member.bytes += len(packet)


async def _send(member: Membership, outgoing: list[Outgoing]) -> None:
    for message in outgoing:
        topic = topics.inbox(member.settings.swarm, message.receiver, message.vector)
        for packet in message.packets:
            if len(packet) > member.transport.max_payload(topic):
                # Cut before the limit became less; the ledger repeats the message, and then it fits.
                member.engine.dropped["cut-too-large"] += 1
                break
            await member.transport.publish(topic, packet)
            member.packets += 1
            member.bytes += len(packet)
