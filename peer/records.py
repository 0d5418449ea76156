"""Metrics records as others publish them, read with caution: nobody signs them.

Whoever reaches the broker can publish a record, of any form and under any name. One that is taken in has
all that a peer's record has (see `Membership.publish_record`), each of its kind, so that whoever shows,
counts or stores records need not look again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from ..gossip import topics

Record = dict[str, Any]

MAX_BYTES: Final = 1 << 18
"""No record is longer; one of a hundred models takes a tenth of it."""
MAX_DEPTH: Final = 3
"""How deep tables and lists may lie in one another."""


def read_record(topic: str, payload: bytes, names: Collection[str]) -> Record | None:
    """The record in a payload, if one of these peers may have published it there; else None."""
    if len(payload) > MAX_BYTES:
        return None
    try:
        record, peer = json.loads(payload), topics.parse(topic).peer
    except (ValueError, RecursionError):
        return None
    if not is_record(record) or record["peer"] != peer:
        return None
    return record if label(peer) in names else None


def is_record(value: Any) -> bool:
    """Whether this has all that a record needs, and nothing that cannot be shown or stored."""
    return (
        isinstance(value, dict)
        and _is_plain(value, MAX_DEPTH)
        and all(name in value and valid(value[name]) for name, valid in _NEEDED.items())
        and all(valid(value[name]) for name, valid in _MEASURED.items() if name in value)
    )


def label(peer: str) -> str:
    """What a peer is called by whoever runs the swarm: of a name with a key (`label@id`), the label."""
    return peer.partition("@")[0]


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    return value is None or isinstance(value, str) or _is_number(value)


def _is_number(value: Any) -> bool:
    """Of any size as a float, a NaN too (of a network that diverged); as an int it must fit one."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_name(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(topics.check_name("", value))
    except topics.TopicError:
        return False


def _are_distances(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _is_name(model) and _is_number(distance) for model, distance in value.items()
    )


_NEEDED: Final[dict[str, Callable[[Any], bool]]] = {
    "peer": _is_name,
    "session": _is_name,
    "time": _is_number,
    "round": _is_count,
    "phase": lambda phase: phase in ("starting", "training", "settling", "done"),
    "disagreement": _are_distances,
    "received": _is_count,
    "packets": _is_count,
    "bytes": _is_count,
    "neighbours": _is_count,
}
_MEASURED: Final[dict[str, Callable[[Any], bool]]] = dict.fromkeys(
    ("accuracy", "own_accuracy", "loss", "training_loss"), _is_number
)
