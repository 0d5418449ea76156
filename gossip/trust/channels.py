"""A life's channels to the others, and what must not be forgotten of those that are closed.

A peer that was given up may come back in the same life: somebody showed us its last will while it lived.
Its channel then has the keys of the one before, so neither our numbers nor its own may begin again. Ours
go on above every number of any channel that was closed: one count, whatever else is forgotten. Of its own
the highest is remembered, for each of its last lives; lives before those are told by when they began.
"""

from __future__ import annotations

from math import inf
from typing import Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from .channel import Channel, Window
from .errors import TrustError
from .register import Member

MAX_LIVES: Final = 16
"""Former lives of one peer that are remembered one by one."""

MAX_NAMES: Final = 20_000
"""Peers that one life of ours can meet. Only invited ones count, so this is a bound, not a policy."""


class Past:
    """The former lives of one peer: a packet of theirs that counted once never counts again."""

    __slots__ = ("_before", "_tops")

    def __init__(self) -> None:
        self._tops: dict[bytes, tuple[float, int]] = {}
        self._before = -inf
        """Lives that began no later, and are not among those remembered, may be ones we forgot."""

    def note(self, exchange: bytes, since: float, top: int) -> None:
        """Remember how far a life has counted."""
        self._tops.pop(exchange, None)
        self._tops[exchange] = (since, top)
        if len(self._tops) > MAX_LIVES:
            since, _ = self._tops.pop(next(iter(self._tops)))
            self._before = max(self._before, since)

    def top(self, member: Member) -> int:
        """How far this life has counted, -1 if it is new. TrustError if that may be forgotten."""
        if member.exchange in self._tops:
            return self._tops[member.exchange][1]
        if member.since <= self._before:
            raise TrustError(
                "stale",
                f"a life of {member.name} that began before others of it that are over: start it again",
            )
        return -1


class Channels:
    """The channels of one life of ours, by name and by the tag on the other's packets."""

    def __init__(self, swarm: str, name: str, private: X25519PrivateKey) -> None:
        self._swarm, self._own = swarm, (name, private)
        self._by_name: dict[str, Channel] = {}
        self._by_tag: dict[bytes, Channel] = {}
        self._past: dict[str, Past] = {}
        self._floor = 0
        """No closed channel has taken a higher number."""

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, peer: str) -> Channel | None:
        """The channel to this peer's present life."""
        return self._by_name.get(peer)

    def tagged(self, tag: bytes) -> Channel | None:
        """The channel on which packets with this tag come."""
        return self._by_tag.get(tag)

    def open(self, member: Member) -> Channel:
        """A channel to this life of a member, in place of any other to it.

        TrustError, and nothing changed, if its key is of no use or its packets could count twice.
        """
        name = member.name
        met = self._by_name.keys() | self._past.keys()
        if name not in met and len(met) >= MAX_NAMES:
            raise TrustError(
                "used-up",
                f"over {MAX_NAMES} peers were here: {name} is not taken in; start this peer again",
            )
        if name in self._past:
            self._past[name].top(member)
        channel = Channel(
            self._swarm, self._own, name, member.exchange, member.session, member.since
        )
        self.close(name)
        channel.number = self._floor
        if name in self._past:
            channel.window = Window(self._past[name].top(member))
        self._by_name[name] = self._by_tag[channel.in_tag] = channel
        return channel

    def close(self, peer: str) -> Channel | None:
        """Close the channel to a peer, if there is one; what may never come twice is kept."""
        old = self._by_name.pop(peer, None)
        if old is None:
            return None
        self._by_tag.pop(old.in_tag, None)
        self._floor = max(self._floor, old.number)
        if old.window.top >= 0:
            self._past.setdefault(peer, Past()).note(old.exchange, old.since, old.window.top)
        return old
