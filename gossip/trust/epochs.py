"""The key of one partial model: who makes it, who has it, and when there must be a new one.

The eldest member keeps the key: the one whose card says the earliest (since, name). The keeper draws a
key, hands it to every member, and draws a new one, of the next *epoch*, when a member is gone. Members
answer with the epoch they have; who does not answer is told again. Two keepers (a partition has healed,
cards are still under way) meet by the rule that the higher epoch wins, and of equal ones the keeper
with the smaller name; a keeper that hears of a higher epoch than its own goes one beyond it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

MAX_JUMP: Final = 1 << 32
"""How far beyond ours another epoch may be: a member cannot use up all numbers there are."""
KEPT: Final = 3
"""Epochs whose packets can still be opened, so that what was under way at a change is not lost."""
REPEAT: Final = 1.0
"""Seconds after which a member that did not answer is told the key again; doubled every time."""
LONGEST: Final = 30.0


class Epoch(NamedTuple):
    """Names one key of a partial model."""

    number: int
    keeper: str

    def beats(self, other: Epoch | None) -> bool:
        """Whether this one is used if both are known."""
        if other is None:
            return True
        return (-self.number, self.keeper) < (-other.number, other.keeper)


@dataclass(slots=True)
class _Told:
    """A member that was told an epoch and has not said that it has it."""

    due: float
    wait: float = REPEAT


@dataclass(slots=True)
class ModelKey:
    """One peer's view of a partial model's key. `now` is any clock that goes on."""

    model: str
    me: str
    since: float
    members: dict[str, float] = field(default_factory=dict)
    """The other members, and since when they are there."""
    current: Epoch | None = None
    keys: dict[Epoch, bytes] = field(default_factory=dict, repr=False)
    adopted: int = 0
    """How many keys were taken up so far."""
    _waiting: dict[str, _Told] = field(default_factory=dict)

    @property
    def keeper(self) -> str:
        """The member whose key counts, as far as we know the members."""
        return min([(self.since, self.me), *((s, name) for name, s in self.members.items())])[1]

    def join(self, member: str, since: float, now: float) -> None:
        """Note a member, or a new life of one, which knows no key."""
        self.members[member] = since
        if self.keeper == self.me:
            if self.current is None:
                self._rotate(now)
            self._waiting[member] = _Told(now)

    def leave(self, member: str, now: float) -> None:
        """Note that a member is out for good: its key must open nothing that is sealed from now on."""
        if self.members.pop(member, None) is not None:
            self._waiting.pop(member, None)
            if self.keeper == self.me and self.members:
                self._rotate(now)

    def _rotate(self, now: float, beyond: int = 0) -> None:
        number = max(beyond, self.current.number if self.current else 0) + 1
        self._adopt(Epoch(number, self.me), secrets.token_bytes(32))
        self._waiting = {member: _Told(now) for member in self.members}

    def _adopt(self, epoch: Epoch, key: bytes) -> None:
        self.current = epoch
        self.keys[epoch] = key
        self.adopted += 1
        while len(self.keys) > KEPT:
            del self.keys[next(iter(self.keys))]

    # --- messages between members -----------------------------------------------------------------

    def hear(self, member: str, message: dict[str, Any], now: float) -> list[dict[str, Any]]:
        """Take in what a member says about keys; returns what to answer it. ValueError if nonsense."""
        kind, number, keeper = message.get("kind"), message.get("number"), message.get("keeper")
        if not isinstance(number, int) or not isinstance(keeper, str) or len(keeper) > 64:
            raise ValueError("a key message without an epoch")
        mine = self.current.number if self.current else 0
        if not 0 <= number <= mine + MAX_JUMP:
            raise ValueError(f"epoch {number} is out of reach from {mine}")
        epoch = Epoch(number, keeper)
        if kind == "have":
            self._heard_of(member, epoch, now)
            return []
        key = message.get("key")
        if kind != "key" or not isinstance(key, bytes) or len(key) != 32 or keeper != member:
            raise ValueError("a key message of a form that is not known here")
        if epoch not in self.keys and epoch.beats(self.current):
            self._adopt(epoch, key)
        assert self.current is not None
        return [{"kind": "have", "number": self.current.number, "keeper": self.current.keeper}]

    def _heard_of(self, member: str, epoch: Epoch, now: float) -> None:
        if epoch == self.current:
            self._waiting.pop(member, None)
        elif self.keeper == self.me and epoch.beats(self.current):
            self._rotate(now, beyond=epoch.number)

    def due(self, now: float) -> list[tuple[str, dict[str, Any]]]:
        """What a keeper has to tell whom now: (member, message)."""
        current = self.current
        if current is None or current.keeper != self.me:
            if self.keeper == self.me and self.members:  # the keeper before us is gone
                self._rotate(now)
                current = self.current
            else:
                return []
        assert current is not None
        messages = []
        for member, told in self._waiting.items():
            if now >= told.due:
                told.due, told.wait = now + told.wait, min(2 * told.wait, LONGEST)
                key = self.keys[current]
                told_key = {"kind": "key", "number": current.number, "keeper": self.me, "key": key}
                messages.append((member, told_key))
        return messages
