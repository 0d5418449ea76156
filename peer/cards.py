"""What a peer publishes about itself, a card and a status, and how those of others are read. No IO.

Whoever reaches the broker can publish what they like under any name. So nothing is converted here, only
checked: what does not have the very form that `encode` writes is neither a card nor a status.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal

from ..gossip import SchemaEntry, check_name, is_line, is_reclaimed

Phase = Literal["starting", "training", "settling", "done"]
State = Literal["online", "offline", "left"]
Statement = list[list[Any]]

MAX_KEPT_BYTES = 32 << 10
"""Bytes of others' goodbyes on a card. The newest are kept: each is of use for one lease of who missed it."""

MAX_GENERATION = 1 << 31
"""Nobody is replaced more often; a larger number is a forgery that would lock the name for ever."""

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What is raised by bytes that are no JSON or are nested too deep, and by tables of another form."""


@dataclass(frozen=True)
class Goodbye:
    """The last words of a session, in the books' own rows.

    statement: what became of the last transfer from each sender.
    reclaimed: transfers that the peer took back without their receivers' word.
    """

    session: str
    statement: Statement
    reclaimed: Statement

    def names(self, peer: str) -> bool:
        """Return whether it concerns a peer's transfers."""
        return any(row[0] == peer for row in (*self.statement, *self.reclaimed))


@dataclass(frozen=True)
class Card:
    """What others must know of a peer to average with it, the same for a whole session.

    since: when the session began, by the peer's wall clock; the order in which waiting peers may found.
    vectors: for every partial model the fields that it is made of.
    generation: how often a device of this name was replaced by another one; the highest is the real one.
    lease: seconds after which this peer, once offline, is to be given up.
    agree: settings that must be the same on all peers, by name.
    starts: for every partial model a digest of the values that the session began with.
    former: the goodbye of the device's last session, which this session's status has replaced at the broker.
    goodbyes: what peers that have left published last, by name, in base64: for neighbours of theirs that
        were away, because a broker that restarts may forget it.
    """

    session: str
    since: float
    samples: int
    vectors: dict[str, list[SchemaEntry]]
    generation: int = 1
    lease: float = 600.0
    agree: dict[str, str] = field(default_factory=dict)
    starts: dict[str, str] = field(default_factory=dict)
    former: Goodbye | None = None
    goodbyes: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the card as JSON."""
        table = dict(self.__dict__)
        table["former"] = None if self.former is None else self.former.__dict__
        return json.dumps(table).encode()


@dataclass(frozen=True)
class Status:
    """Whether a peer is there, and how far it is.

    statement: with "left": what became of the last transfer from each sender.
    leaving: still online, but about to go: it takes no mass any more.
    counts: the partial models in which the peer's own weight counts, and for how many rounds it has.
    reclaimed: with "left": transfers that the peer took back without their receivers' word.
    """

    state: State
    session: str
    phase: Phase = "starting"
    reason: str = ""
    statement: Statement = field(default_factory=list)
    leaving: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    generation: int = 1
    reclaimed: Statement = field(default_factory=list)

    def encode(self) -> bytes:
        """Return the status as JSON."""
        return json.dumps(self.__dict__).encode()


def kept_goodbyes(goodbyes: dict[str, str]) -> dict[str, str]:
    """Return the newest of these, the last ones, that a card has room for."""
    kept, total = dict[str, str](), 0
    for peer, text in reversed(goodbyes.items()):
        total += len(text)
        if total > MAX_KEPT_BYTES:
            break
        kept[peer] = text
    return dict(reversed(kept.items()))


def read_card(payload: bytes) -> Card | None:
    """Return the card in a payload; None if there is none in it, whatever else is."""
    try:
        table = json.loads(payload)
        vectors = {
            vector: [_field(*each) for each in fields]
            for vector, fields in table["vectors"].items()
        }
        lease = _time(table["lease"])
        return Card(
            _session(table),
            _time(table["since"]),
            _count(table["samples"]),
            vectors,
            _generation(table),
            lease if lease > 0 else 0.0,
            _texts(table["agree"]),
            _texts(table["starts"]),
            None if table["former"] is None else _goodbye(table["former"]),
            kept_goodbyes(_texts(table["goodbyes"])),
        )
    except _UNREADABLE:
        return None


def read_status(payload: bytes) -> Status | None:
    """Return the status in a payload; None if there is none in it, whatever else is."""
    try:
        table = json.loads(payload)
        state, phase = table["state"], table["phase"]
        if state not in ("online", "offline", "left"):
            return None
        if phase not in ("starting", "training", "settling", "done"):
            return None
        last_words = _goodbye(table)
        counts = {_text(model): _count(rounds) for model, rounds in table["counts"].items()}
        return Status(
            state,
            _session(table),
            phase,
            _reason(table["reason"]),
            last_words.statement,
            table["leaving"] is True,
            counts,
            _generation(table),
            last_words.reclaimed,
        )
    except _UNREADABLE:
        return None


def _goodbye(table: dict[str, Any]) -> Goodbye:
    statement, reclaimed = table["statement"], table["reclaimed"]
    if not isinstance(statement, list) or not all(is_line(row) for row in statement):
        raise TypeError("not a statement")
    if not isinstance(reclaimed, list) or not all(is_reclaimed(row) for row in reclaimed):
        raise TypeError("not a list of what was taken back")
    return Goodbye(_session(table), statement, reclaimed)


def _session(table: dict[str, Any]) -> str:
    """Return a session, which stands in every message to its peer: it must be a name."""
    return check_name("session", _text(table["session"]))


def _generation(table: dict[str, Any]) -> int:
    generation = _count(table["generation"])
    if not 1 <= generation <= MAX_GENERATION:
        raise ValueError("not a generation")
    return generation


def _field(name: Any, shape: Any, dtype: Any) -> SchemaEntry:
    if not isinstance(shape, list):
        raise TypeError("a shape is a list")
    return _text(name), [_count(size) for size in shape], _text(dtype)


def _reason(value: Any) -> str:
    return "".join(filter(str.isprintable, _text(value)[:200]))  # it is logged


def _texts(value: Mapping[Any, Any]) -> dict[str, str]:
    return {_text(key): _text(each) for key, each in value.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError("not a count")
    return value


def _time(value: Any) -> float:
    if not isinstance(value, int | float) or not isfinite(value):
        raise ValueError("not a time")
    return float(value)


FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds after a card was put back before it is put back once more. They double each time, and start
over once the card was left in peace for the longest of them."""


class OwnCard:
    """What is heard on our own card topic, compared with what we published there."""

    def __init__(self) -> None:
        self.stands = True
        """Whether what was last heard there is ours. True too before we have published anything."""
        self._newest = self._before = b""
        self._pause, self._restored = 0.0, -inf

    def published(self, payload: bytes) -> None:
        """Note what we are about to publish. The one before it is ours too: a reconnection hears it."""
        if payload != self._newest:
            self._newest, self._before = payload, self._newest

    def hear(self, payload: bytes) -> bool:
        """Take in what came on the topic; whether the card has just been lost.

        Once the newest was heard, the one before it is a loss too: its exchange key may be out of use.
        """
        stood = self.stands
        self.stands = not self._newest or (
            bool(payload) and payload in (self._newest, self._before)
        )
        if payload == self._newest:
            self._before = b""
        return stood and not self.stands

    def pause(self, now: float) -> float:
        """Note that the card was put back; for how many seconds to leave it at that."""
        calm = now - self._restored > self._pause + LONGEST_PAUSE
        self._pause = FIRST_PAUSE if calm else min(2 * self._pause, LONGEST_PAUSE)
        self._restored = now
        return self._pause
