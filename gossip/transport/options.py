"""Settings of an MQTT connection."""

from __future__ import annotations

from typing import Annotated, Literal

from ..settings import Positive, SettingsTable, checked

SMALLEST_PACKET = 512
"""Packets are made no smaller than this: with the longest topic and a seal, little less would do."""
LARGEST_PACKET = 16 * 1024 * 1024
"""Peers take in no larger ones."""
LONGEST_KEEPALIVE = 65535
"""Seconds: MQTT has two bytes for them."""


def check_packet(size: int) -> None:
    """Raise ValueError unless packets may be made of this size."""
    if not SMALLEST_PACKET <= size <= LARGEST_PACKET:
        raise ValueError(
            f"packets have {SMALLEST_PACKET} to {LARGEST_PACKET} bytes, not {size}: give the broker's "
            "limit (mosquitto: max_packet_size or message_size_limit), or leave it out"
        )


def check_keepalive(seconds: int) -> None:
    """Raise ValueError unless a connection can be tested after so many seconds."""
    if not 1 <= seconds <= LONGEST_KEEPALIVE:
        raise ValueError(f"a keepalive has 1 to {LONGEST_KEEPALIVE} seconds, not {seconds}")


class LinkSettings(SettingsTable):
    """The link to the broker, as far as a config or a device's file has a say in it."""

    connect_timeout: Positive = 15.0
    """Seconds that the first connection may fail before that is an error. Raise it when broker and peers
    start together."""
    keepalive: Annotated[int, checked(check_keepalive)] = 30
    """Seconds of silence before the link is tested, 1 to 65535; a dead link, or a broker that answers but
    delivers nothing, is noticed after up to twice that. Lower it on links that die silently, raise it to save
    a device's battery."""
    max_packet: Annotated[int, checked(check_packet)] = LARGEST_PACKET
    """Bytes of the largest packet to send, 512 to 16777216; less if the broker says so (MQTT 5). Should the
    broker close the connection on smaller ones, or drop them without a word, chunks are halved until it does
    not: see `PacketLimit`. Lower it to the broker's limit, where you know it, to spare the search."""


class MqttOptions(LinkSettings):
    """All settings of a connection."""

    version: Literal["3.1.1", "5"] = "3.1.1"
    """The protocol's version. 5 reports why a broker cut us off and how large a packet may be; 3.1.1 is what
    nats-server and old brokers speak."""
    first_delay: float = 0.2
    """Seconds of the first wait between attempts to reconnect; each wait is shortened by up to half at
    random, so that a swarm does not return all at once."""
    longest_delay: float = 15.0
    """Seconds of the longest such wait."""
    max_inbound_messages: int = 16 * 1024
    """Bound of the messages that wait to be read; see `Inbox`."""
    max_inbound_bytes: int = 64 * 1024 * 1024
    """Bound of their bytes."""
    max_inbound_payload: int = LARGEST_PACKET
    """Larger payloads are dropped, and refused beforehand in MQTT 5."""
    max_outbound_bytes: int = 64 * 1024 * 1024
    """Bound of what waits to be written; gossip beyond it is dropped and counted."""
