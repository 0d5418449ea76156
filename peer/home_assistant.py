"""Records with which a peer appears in Home Assistant, by its MQTT discovery. No IO.

A peer with `discovery = true` publishes, retained, one record per sensor below homeassistant/sensor/, and the
sensors' values as plain JSON on a topic of its own. Home Assistant cannot check signatures, so neither is
signed: with trust, whoever reaches the broker can forge what Home Assistant shows, and nothing else.

A peer that leaves says that it is not available. For one that is killed, values expire after its lease.
"""

from __future__ import annotations

import json
import re
from math import ceil
from typing import Any, Final

from gossamer import __version__

from ..gossip import topics
from .presence import LEASE_MARGIN
from .summary import Summary

DISCOVERY_PREFIX: Final = "homeassistant"
"""The first level of discovery topics, as Home Assistant expects it unless it is told otherwise."""

SENSORS: Final[dict[str, dict[str, Any]]] = {
    "state": {"name": "State", "icon": "mdi:state-machine"},
    "round": {"name": "Round", "state_class": "measurement", "icon": "mdi:counter"},
    "accuracy": {"name": "Accuracy", "state_class": "measurement", "unit_of_measurement": "%",
                 "suggested_display_precision": 1, "icon": "mdi:bullseye-arrow"},
}  # fmt: skip
"""The sensors of a peer, with what is particular to each."""


def node_of(swarm: str, peer: str) -> str:
    """Return the id of a peer's device: Home Assistant allows letters, digits, _ and - only."""
    return "gossamer_" + re.sub(r"[^A-Za-z0-9_-]", "_", f"{swarm}_{peer}")


def discovery_topics(swarm: str, peer: str) -> dict[str, str]:
    """Return the topic of each sensor's record."""
    node = node_of(swarm, peer)
    return {sensor: f"{DISCOVERY_PREFIX}/sensor/{node}/{sensor}/config" for sensor in SENSORS}


def discovery_records(swarm: str, peer: str, lease: float) -> dict[str, bytes]:
    """Return the records that make a peer appear, by their topics; to be published retained."""
    node, topic = node_of(swarm, peer), topics.state(swarm, peer)
    device = {
        "identifiers": [node],
        "name": f"{peer} ({swarm})",
        "manufacturer": "Gossamer",
        "model": "peer",
        "sw_version": __version__,
    }
    shared = {
        "state_topic": topic,
        "availability_topic": topic,
        "availability_template": "{{ value_json.availability }}",
        "payload_available": "online",
        "payload_not_available": "offline",
        "expire_after": ceil(LEASE_MARGIN * lease),
        "device": device,
        "origin": {"name": "gossamer", "sw_version": __version__},
    }
    records = {}
    for sensor, where in discovery_topics(swarm, peer).items():
        own = {"unique_id": f"{node}_{sensor}", "value_template": f"{{{{ value_json.{sensor} }}}}"}
        records[where] = json.dumps({**SENSORS[sensor], **own, **shared}).encode()
    return records


def state_payload(summary: Summary) -> bytes:
    """Return the values of a peer's sensors, as plain JSON."""
    accuracy = summary.metrics.get("accuracy")
    return json.dumps({
        "availability": "online" if summary.ended is None else "offline",
        "state": summary.state.replace("_", " "),
        "round": summary.round,
        "accuracy": None if accuracy is None else round(100 * accuracy, 2),
    }).encode()  # fmt: skip
