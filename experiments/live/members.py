"""Who is known to be in a swarm with trust: from the owner's folder, and from the cards at the broker.

`gossamer revoke` and `forget` look a name up here: a name with a mistake in it would exclude nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import ConfigError
from .enrolment import read_description

if TYPE_CHECKING:
    from ...gossip import MqttTransport

QUIET_SECONDS = 1.0
"""Seconds without another retained message after which there is none."""
SHOWN_NAMES = 10
"""Known names that an error shows at most."""
_ID = re.compile(r"[a-z2-7]{20}")
_INVITATION = re.compile(r"[0-9a-f]{16}")


@dataclass
class KnownMembers:
    """The members of a swarm that its owner can know of.

    names: their full names. invitations: the numbers of those invitations and tickets that are on cards.
    sources: where they were looked up; cards: whether that includes a broker's cards.
    """

    swarm: str
    names: set[str] = field(default_factory=set)
    invitations: set[str] = field(default_factory=set)
    sources: list[str] = field(default_factory=list)
    cards: bool = False

    def add_enrolled(self, owner: Path) -> None:
        """Add the devices that `gossamer enrol` has enrolled, if the owner's key is in such a folder."""
        path = owner.parent / "broker" / "swarm.json"
        if not path.exists():
            return
        described = read_description(owner.parent)
        if described["swarm"] != self.swarm:
            raise ConfigError(
                f"{path}: is of swarm {described['swarm']!r}, not {self.swarm!r}: write --swarm "
                f"{described['swarm']}, or give that swarm's owner key; --force overrides this"
            )
        self.names |= set(described["peers"].values())
        self.sources.append(str(path))

    async def add_cards(self, transport: MqttTransport, owner: bytes, within: float) -> None:
        """Add the peers that the owner invited, as the broker's cards and last statuses show.

        within: seconds in which the first should come. Raises ConfigError if there is none, or if there are
        cards and none of them is of a peer that the owner invited.
        """
        from ...gossip.security import TrustError, read_claims, read_published

        messages = await _read_retained(transport, self.swarm, within)
        where = transport.address
        for (kind, name), payload in messages.items():
            with contextlib.suppress(TrustError, TypeError, KeyError):
                head, _ = read_published(self.swarm, name, kind, payload)
                self.invitations.add(read_claims(head["invitation"], owner).number)
                self.names.add(name)
                self.cards = True
        self.sources.append(f"the cards at {where}")
        if not messages:
            raise ConfigError(
                f"{where}: has no card of a swarm {self.swarm!r}, or this user may not read it: check "
                "--swarm, the broker and the user; --force overrides this"
            )
        if not self.cards and any(kind == "card" for kind, _ in messages):
            raise ConfigError(
                f"{where}: no peer of swarm {self.swarm!r} there was invited with this owner's key: give "
                "that of its owner; --force overrides this"
            )

    def full_name(self, text: str) -> str | None:
        """Return the full name of the peer that is meant by a name, a label or an id.

        None for a full name or an id that is possible, but not known. ConfigError if nobody can be meant.
        """
        label, at, id = text.rpartition("@")
        if text in self.names:
            return text
        if not at and (found := self.of_label(text)):
            return found
        by_id = {name.rpartition("@")[2]: name for name in self.names}
        if (name := by_id.get(id)) and label:
            raise ConfigError(f"{text!r}: this id is that of {name}: write that, or the other's id")
        if name:
            return name
        if _ID.fullmatch(id) and (label or not at):
            return None
        reason = (
            "has no id of 20 letters and digits after its @" if at else "is no full name, NAME@ID"
        )
        looked = f"; in {' and '.join(self.sources)}: {self._nearest(text)}" if self.sources else ""
        raise ConfigError(f"peer {text!r}: {reason}{looked}")

    def of_label(self, label: str) -> str | None:
        """Return the full name of the one peer with this label, None if there is none."""
        found = sorted(name for name in self.names if name.rpartition("@")[0] == label)
        if len(found) > 1:
            raise ConfigError(f"peer {label!r}: there are {', '.join(found)}: write the one meant")
        return found[0] if found else None

    def check_peer(self, text: str, *, force: bool) -> str:
        """Return the full name of the peer to revoke; an unknown one is an error, unless it is forced."""
        if name := self.full_name(text):
            return name
        if self.sources and not force:
            raise ConfigError(
                f"peer {text!r}: nobody of this name is in {' or '.join(self.sources)}; "
                f"{self._nearest(text)}; --force revokes it all the same"
            )
        return text

    def check_invitation(self, number: str, *, force: bool) -> str:
        """Return the number of an invitation to revoke; an unknown one is an error, unless it is forced."""
        if not _INVITATION.fullmatch(number):
            raise ConfigError(
                f"invitation {number!r}: is no number of an invitation, 16 digits and letters a to f, as "
                "gossamer invite printed it"
            )
        if self.cards and number not in self.invitations and not force:
            raise ConfigError(
                f"invitation {number!r}: no peer at the broker has it: check it; if nobody has used it "
                "yet, add --force"
            )
        return number

    def _nearest(self, text: str) -> str:
        """Return a hint at the names like this one, or else at some of those that there are."""
        by_label = {name.rpartition("@")[0]: name for name in sorted(self.names)}
        near = get_close_matches(text.partition("@")[0], by_label, n=1, cutoff=0.5)
        if near:
            return f"did you mean {by_label[near[0]]!r}?"
        return f"known are {', '.join(self._some()) or 'none'}"

    def _some(self) -> list[str]:
        names = sorted(self.names)
        return names if len(names) <= SHOWN_NAMES else [*names[:SHOWN_NAMES], "…"]


async def _read_retained(
    transport: MqttTransport, swarm: str, within: float
) -> dict[tuple[Literal["card", "status"], str], bytes]:
    """Receive the retained cards and statuses of a swarm, by the peers' names.

    A peer that has left has cleared its card; its last status shows that it was there.
    """
    from ...gossip import topics

    found: dict[tuple[Literal["card", "status"], str], bytes] = {}
    await transport.subscribe(topics.of_all(swarm, "card"))
    await transport.subscribe(topics.of_all(swarm, "status"))
    clock = asyncio.get_running_loop().time
    last = clock() + 2 * within  # peers may go on publishing
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within) as deadline:
            async for message in transport.messages():
                # Any client can publish under a name that no peer may have.
                with contextlib.suppress(topics.TopicError):
                    topic = topics.parse(message.topic)
                    if message.payload and topic.kind in ("card", "status"):
                        found[topic.kind, topic.peer] = bytes(message.payload)
                deadline.reschedule(min(last, clock() + QUIET_SECONDS))
    return found
