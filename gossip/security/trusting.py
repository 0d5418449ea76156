"""What a peer asks of its trust, and the trust of peers that believe everything.

`Trusting` is the list of questions; `Trust` answers them with keys, `NoTrust` with yes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from .. import topics
from ..messages import Message
from ..wire import Buffer
from .opened import Opened


@dataclass(frozen=True, slots=True)
class Heard:
    """What presence should know: a genuine card or status, a status of our own key that nobody alive may
    stand behind (former), a death notice (see `Death.decode`), that a
    peer is out (body empty), or that our own card should be published again (reissue-card; body empty)."""

    kind: Literal["card", "status", "former", "death", "out", "reissue-card"]
    peer: str
    body: bytes = b""


class Trusting(Protocol):
    """What a peer asks of its trust."""

    name: str
    overhead: int
    """Bytes that sealing adds to a packet."""
    counters: Counter[str]
    """What was refused, by cause."""

    def patterns(self) -> list[str]: ...
    def card(self, body: bytes) -> bytes: ...
    def status(self, body: bytes) -> bytes: ...
    def will(self, body: bytes) -> bytes: ...
    def hear(self, topic: str, payload: bytes) -> list[Heard]: ...
    def can_seal(self, receiver: str, model: str) -> bool: ...
    def seal(self, receiver: str, model: str, packet: bytes) -> bytes | None: ...
    def expects(self, model: str, packet: Buffer) -> bool: ...
    def open(self, model: str, packet: Buffer) -> Opened | None: ...
    def early(self) -> list[tuple[str, Buffer]]: ...
    def genuine(self, opened: Opened, message: Message) -> bool: ...
    def gone(self, peer: str, session: str) -> None: ...
    def tick(self) -> tuple[list[tuple[str, str, bytes]], list[Heard]]: ...
    def end_session(self) -> None: ...
    def snapshot(self) -> dict[str, Any]: ...


class NoTrust:
    """Believes everything: anybody with access to the broker can read, forge and disturb."""

    def __init__(self, name: str) -> None:
        self.name, self.overhead = name, 0
        self.counters: Counter[str] = Counter()

    def patterns(self) -> list[str]:
        """Nothing more to hear."""
        return []

    def card(self, body: bytes) -> bytes:
        """As it is."""
        return body

    status = will = card

    def hear(self, topic: str, payload: bytes) -> list[Heard]:
        """As it is."""
        where = topics.parse(topic)
        if where.kind not in ("card", "status", "death") or (where.kind == "death" and not payload):
            return []
        return [Heard(where.kind, where.peer, payload)]

    def can_seal(self, receiver: str, model: str) -> bool:
        """Always."""
        return True

    def seal(self, receiver: str, model: str, packet: bytes) -> bytes | None:
        """As it is."""
        return packet

    def expects(self, model: str, packet: Buffer) -> bool:
        """Always."""
        return True

    def open(self, model: str, packet: Buffer) -> Opened | None:
        """As it is, from whomever."""
        return Opened("", "", packet)

    def early(self) -> list[tuple[str, Buffer]]:
        """Nothing comes too early."""
        return []

    def genuine(self, opened: Opened, message: Message) -> bool:
        """Always."""
        return True

    def gone(self, peer: str, session: str) -> None:
        """Need no note."""

    def tick(self) -> tuple[list[tuple[str, str, bytes]], list[Heard]]:
        """Nothing is ever due."""
        return [], []

    def end_session(self) -> None:
        """Nothing to delete."""

    def snapshot(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}
