"""Our channels to the others, and what must not be forgotten of those that are closed.

A peer that was given up may come back in the same incarnation: somebody showed us its last will while it
lived. Its channel then has the keys of the one before, so neither our numbers nor its own may begin again.
Ours go on above every number of any channel that was closed: one count, whatever else is forgotten. Of its
own the highest is remembered, for each of its last incarnations; those before are told by when they began.
"""

from __future__ import annotations

from math import inf
from typing import Final

from .channel import Channel, Window, exchange_tag
from .errors import TrustError
from .register import Member

MAX_LIVES: Final = 16
"""Former incarnations of one peer that are remembered one by one."""

OVERLAP: Final = 600.0
"""Seconds for which a peer's former exchange key is of use after the next one: packets under way, and
peers that have not seen its new card. Raise it if training holds up a peer's packets for longer."""

MAX_NAMES: Final = 20_000
"""Peers that one start of ours can meet. Only invited ones count, so this is a bound, not a policy."""


class Past:
    """The former incarnations of one peer: a packet of theirs that counted once never counts again."""

    __slots__ = ("_before", "_tops")

    def __init__(self) -> None:
        self._tops: dict[bytes, tuple[float, int]] = {}
        self._before = -inf
        """Incarnations that began no later, and are not among those remembered, may be ones we forgot."""

    def note(self, incarnation: bytes, since: float, top: int) -> None:
        """Remember how far an incarnation has counted."""
        self._tops.pop(incarnation, None)
        self._tops[incarnation] = (since, top)
        if len(self._tops) > MAX_LIVES:
            since, _ = self._tops.pop(next(iter(self._tops)))
            self._before = max(self._before, since)

    def top(self, member: Member) -> int:
        """How far this incarnation has counted, -1 if it is new. TrustError if that may be forgotten."""
        if member.incarnation in self._tops:
            return self._tops[member.incarnation][1]
        if member.since <= self._before:
            raise TrustError(
                "stale",
                f"an incarnation of {member.name} that began before others of it that are over: start "
                "it again",
            )
        return -1


class Channels:
    """The channels of one start of ours, by name and by the tags on the other's packets."""

    def __init__(self) -> None:
        self._by_name: dict[str, Channel] = {}
        self._by_tag: dict[bytes, Channel] = {}
        self._past: dict[str, Past] = {}
        self._overlaps: dict[str, float] = {}
        """Peers with two exchange keys, and until when the former one is of use."""
        self._floor = 0
        """No closed channel has taken a higher number."""

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, peer: str) -> Channel | None:
        """The channel to this peer's present incarnation."""
        return self._by_name.get(peer)

    def tagged(self, tag: bytes) -> Channel | None:
        """The channel on which packets with this tag come."""
        return self._by_tag.get(tag)

    def open(self, member: Member) -> Channel:
        """A channel to this incarnation of a member, in place of any other to it.

        TrustError, and nothing changed, if its packets could count twice.
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
        channel = Channel(name, member.incarnation, member.exchange, member.session, member.since)
        self.close(name)
        channel.number = self._floor
        if name in self._past:
            channel.window = Window(self._past[name].top(member))
        self._by_name[name] = self._by_tag[channel.newest] = channel
        return channel

    def renew(self, channel: Channel, exchange: bytes, now: float) -> None:
        """Note the next exchange key of a peer; its former one is of use for a while."""
        self._drop_former(channel)
        tag = exchange_tag(channel.name, exchange)
        channel.exchanges[tag] = exchange
        self._by_tag[tag] = channel
        self._overlaps[channel.name] = now + OVERLAP

    def end_overlaps(self, now: float) -> list[str]:
        """Forget former exchange keys whose time is over; returns the peers that had one."""
        over = [name for name, until in self._overlaps.items() if now >= until]
        for name in over:
            del self._overlaps[name]
            self._drop_former(self._by_name[name])
        return over

    def close(self, peer: str) -> Channel | None:
        """Close the channel to a peer, if there is one; what may never come twice is kept."""
        old = self._by_name.pop(peer, None)
        if old is None:
            return None
        self._overlaps.pop(peer, None)
        for tag in old.exchanges:
            self._by_tag.pop(tag, None)
        self._floor = max(self._floor, old.number)
        if old.window.top >= 0:
            self._past.setdefault(peer, Past()).note(old.incarnation, old.since, old.window.top)
        return old

    def _drop_former(self, channel: Channel) -> None:
        for tag in list(channel.exchanges)[:-1]:
            del channel.exchanges[tag], self._by_tag[tag]
