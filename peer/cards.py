"""What a peer publishes about itself, a card and a status, and how those of others are read. No IO.

Whoever reaches the broker can publish what they like under any name. So nothing is converted here, only
checked: what is not of the very form that `encode` writes is no card and no status.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from ..gossip.ledger import is_line
from ..gossip.topics import check_name
from ..gossip.wire import SchemaEntry

Phase = Literal["starting", "training", "settling", "done"]
State = Literal["online", "offline", "left"]
Statement = list[list[Any]]

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What is raised by bytes that are no JSON or are nested too deep, and by tables of another form."""


@dataclass(frozen=True)
class Card:
    """What a peer can average: for every vector the fields that it is made of."""

    session: str
    since: float
    samples: int
    vectors: dict[str, list[SchemaEntry]]

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(self.__dict__).encode()


@dataclass(frozen=True)
class Status:
    """Whether a peer lives, and how far it is. `statement` settles what a leaver left open.

    leaving: still online, but about to go: it takes no mass any more, so leave none to it.
    """

    state: State
    session: str
    phase: Phase = "starting"
    reason: str = ""
    statement: Statement = field(default_factory=list)
    leaving: bool = False

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(self.__dict__).encode()


def read_card(payload: bytes) -> Card | None:
    """The card in a payload; None if there is none in it, whatever else is."""
    try:
        table = json.loads(payload)
        vectors = {
            vector: [_field(*each) for each in fields]
            for vector, fields in table["vectors"].items()
        }
        return Card(_session(table), _time(table["since"]), _count(table["samples"]), vectors)
    except _UNREADABLE:
        return None


def read_status(payload: bytes) -> Status | None:
    """The status in a payload; None if there is none in it, whatever else is."""
    try:
        table = json.loads(payload)
        state, phase = table["state"], table["phase"]
        if state not in ("online", "offline", "left"):
            return None
        if phase not in ("starting", "training", "settling", "done"):
            return None
        reason = "".join(filter(str.isprintable, _text(table["reason"])[:200]))  # it is logged
        statement = table["statement"]
        if not isinstance(statement, list) or not all(is_line(row) for row in statement):
            return None
        # Peers of an older version do not say whether they are about to leave.
        leaving = table.get("leaving") is True
        return Status(state, _session(table), phase, reason, statement, leaving)
    except _UNREADABLE:
        return None


def _session(table: dict[str, Any]) -> str:
    """A session stands in every message to its peer: it must be a name that can be written there."""
    return check_name("session", _text(table["session"]))


def _field(name: Any, shape: Any, dtype: Any) -> SchemaEntry:
    if not isinstance(shape, list):
        raise TypeError("a shape is a list")
    return _text(name), [_count(size) for size in shape], _text(dtype)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError("not a count")
    return value


def _time(value: Any) -> float:
    if not isinstance(value, int | float) or not isfinite(value):
        raise ValueError("not a time")
    return float(value)
