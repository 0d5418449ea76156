"""The knobs of an MQTT connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    max_packet: largest packet to send, when the broker does not say (3.1.1). Should the broker close
        the connection on smaller ones, chunks are halved until it does not: see `PacketLimit`. A
        broker that drops them without a word (mosquitto: message_size_limit) cannot be noticed: lower
        this to its limit.
    max_inbound_messages, max_inbound_bytes: bounds of what waits to be read; see `Inbox`.
    max_inbound_payload: larger payloads are dropped, and refused beforehand in MQTT 5.
    max_outbound_bytes: bound of what waits to be written; gossip beyond it is dropped and counted.
    """

    version: Literal["3.1.1", "5"] = "3.1.1"
    connect_timeout: float = 10.0
    keepalive: int = 30
    first_delay: float = 0.2
    longest_delay: float = 15.0
    max_packet: int = 16 * 1024 * 1024
    max_inbound_messages: int = 1024
    max_inbound_bytes: int = 64 * 1024 * 1024
    max_inbound_payload: int = 16 * 1024 * 1024
    max_outbound_bytes: int = 64 * 1024 * 1024
