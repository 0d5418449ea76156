"""The key of one partial model: who makes it, who has it, and when there must be a new one.

The eldest member keeps the key: of those that said they are there, the one whose card says the earliest
(since, name). A card alone proves nothing: the broker keeps those of the dead. The keeper draws a key,
hands it to every member, and draws a new one, of the next *epoch*, when a member is gone. Members answer
with the epoch they have; who does not answer is told again. Two keepers (a partition has healed, cards
are still under way) meet by the rule that the higher epoch wins, and of equal ones the keeper with the
smaller name; a keeper that hears of a higher epoch than its own goes one beyond it.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

_log = logging.getLogger(__name__)

MAX_JUMP: Final = 1 << 32
"""How far beyond ours another epoch may be: a member cannot use up all numbers there are."""
KEPT: Final = 3
"""Epochs whose packets can still be opened, so that what was under way at a change is not lost."""
REPEAT: Final = 1.0
"""Seconds after which a member that did not answer is told the key again; doubled every time."""
LONGEST: Final = 30.0
SILENCE: Final = 60.0
"""Seconds without any key after which the keeper is passed over: its last word may have outlived it. If it
lives after all, two keepers meet; so this need not outlast a keeper's longest stretch of training."""


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
    present: set[str] = field(default_factory=set)
    """Those of them that said they are there: keys come from and go to no others."""
    current: Epoch | None = None
    keys: dict[Epoch, bytes] = field(default_factory=dict, repr=False)
    adopted: int = 0
    """How many keys were taken up so far."""
    _waiting: dict[str, _Told] = field(default_factory=dict)
    _lacking: float | None = None
    """Since when the present keeper owes us a first key."""
    _silent: set[str] = field(default_factory=set)
    """Keepers that were passed over."""

    @property
    def keeper(self) -> str:
        """The member whose key counts, as far as we know the members."""
        others = ((self.members[name], name) for name in self.present - self._silent)
        return min([(self.since, self.me), *others])[1]

    def join(self, member: str, since: float, now: float) -> None:
        """Note a member, or a new life of one, which knows no key and has not said that it is there."""
        self.members[member] = since
        self.present.discard(member)
        self._silent.discard(member)
        self._waiting[member] = _Told(now)

    def seen(self, member: str) -> None:
        """Note that a member is there. It stays so until it is out, whether it is in reach or not."""
        if member in self.members:
            self.present.add(member)

    def leave(self, member: str, now: float) -> None:
        """Note that a member is out for good: its key must open nothing that is sealed from now on."""
        if self.members.pop(member, None) is not None:
            self.present.discard(member)
            self._silent.discard(member)
            self._waiting.pop(member, None)
            if self.keeper == self.me and self.current is not None:
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
            self._speaks(member)
            self._heard_of(member, epoch, now)
            return []
        key = message.get("key")
        if kind != "key" or not isinstance(key, bytes) or len(key) != 32 or keeper != member:
            raise ValueError("a key message of a form that is not known here")
        self._speaks(member)
        if epoch not in self.keys and epoch.beats(self.current):
            self._adopt(epoch, key)
        assert self.current is not None
        return [{"kind": "have", "number": self.current.number, "keeper": self.current.keeper}]

    def _speaks(self, member: str) -> None:
        """It has just sealed this for us, so it is there, whatever its status says."""
        self._silent.discard(member)
        self.seen(member)

    def _heard_of(self, member: str, epoch: Epoch, now: float) -> None:
        if epoch == self.current:
            self._waiting.pop(member, None)
        elif self.keeper == self.me and epoch.beats(self.current):
            self._rotate(now, beyond=epoch.number)

    def pass_over(self, now: float) -> str | None:
        """Pass over a keeper that owes us a first key for too long; returns it. The next one counts."""
        if self.current is not None or self.keeper == self.me:
            self._lacking = None
        elif self._lacking is None:
            self._lacking = now
        elif now - self._lacking >= SILENCE:
            silent, self._lacking = self.keeper, now
            self._silent.add(silent)
            _log.warning(
                "peer %s has had no key of model %s for %g s: it is expected from %s, which is passed "
                "over now", self.me, self.model, SILENCE, silent,
            )  # fmt: skip
            return silent
        return None

    def due(self, now: float) -> list[tuple[str, dict[str, Any]]]:
        """What a keeper has to tell whom now: (member, message)."""
        current = self.current
        if current is None or current.keeper != self.me:
            if self.keeper == self.me and self.present:  # the first one, or the keeper is gone
                self._rotate(now)
                current = self.current
            else:
                return []
        assert current is not None
        messages = []
        for member, told in self._waiting.items():
            if member in self.present and now >= told.due:
                told.due, told.wait = now + told.wait, min(2 * told.wait, LONGEST)
                key = self.keys[current]
                told_key = {"kind": "key", "number": current.number, "keeper": self.me, "key": key}
                messages.append((member, told_key))
        return messages
