"""The knobs of an MQTT connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SMALLEST_PACKET = 512
"""Packets are made no smaller than this: with the longest topic and a seal, little less would do."""
LARGEST_PACKET = 16 * 1024 * 1024
"""Peers take in no larger ones."""
KEEPALIVE, LONGEST_KEEPALIVE = 30, 65535
"""Seconds, as usual and at most: MQTT has two bytes for them."""


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


@dataclass(frozen=True, slots=True)
class MqttOptions:
    """Knobs of the connection.

    version: 5 reports why a broker cut us off and how large a packet may be; 3.1.1 ("3.1.1") is
        what the embedded broker and old ones speak.
    connect_timeout: how long the first connection may fail before that is an error. Raise it when
        broker and peers start together.
    keepalive: seconds of silence before the link is tested; a dead link, or a broker that answers
        but delivers nothing, is noticed after up to twice that. Lower it on links that die silently,
        raise it to save a device's battery.
    first_delay, longest_delay: seconds of the first and longest wait between attempts to reconnect;
        each is shortened by up to half at random, so that a swarm does not return all at once.
    max_packet: largest packet to send; less if the broker says so (MQTT 5). Should the broker close the
        connection on smaller ones, or drop them without a word, chunks are halved until it does not:
        see `PacketLimit`. Lower it to the broker's limit, where you know it, to spare the search.
    max_inbound_messages, max_inbound_bytes: bounds of what waits to be read; see `Inbox`.
    max_inbound_payload: larger payloads are dropped, and refused beforehand in MQTT 5.
    max_outbound_bytes: bound of what waits to be written; gossip beyond it is dropped and counted.
    """

    version: Literal["3.1.1", "5"] = "3.1.1"
    connect_timeout: float = 10.0
    keepalive: int = KEEPALIVE
    first_delay: float = 0.2
    longest_delay: float = 15.0
    max_packet: int = LARGEST_PACKET
    max_inbound_messages: int = 16 * 1024
    max_inbound_bytes: int = 64 * 1024 * 1024
    max_inbound_payload: int = LARGEST_PACKET
    max_outbound_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        check_packet(self.max_packet)
        check_keepalive(self.keepalive)
