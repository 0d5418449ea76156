"""Who may take part no longer: one list, signed by the owner, retained by the broker, never older.

Lists carry a number that rises; a peer keeps the highest it has seen and refuses lower ones. A broker
can withhold a list from those who never saw it, but cannot make one up or bring an old one back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..topics import ROOT, check_name
from . import fields, signed
from .errors import TrustError
from .identity import Identity

MAX_ENTRIES: Final = 10_000


def revocation_topic(swarm: str) -> str:
    """Where the owner publishes the list (retained)."""
    return f"{ROOT}/{check_name('swarm', swarm)}/owner/revocations"


@dataclass(frozen=True, slots=True)
class Revocations:
    """Ids of peers and numbers of papers that count no more."""

    number: int = 0
    peers: frozenset[str] = field(default_factory=frozenset)
    papers: frozenset[str] = field(default_factory=frozenset)

    def add(self, peers: Iterable[str] = (), papers: Iterable[str] = ()) -> Revocations:
        """The next list, with more on it; `peers` are ids or whole names (`label@id`)."""
        ids = self.peers | {peer.rpartition("@")[2] for peer in peers}
        numbers = self.papers | set(papers)
        if len(ids) + len(numbers) > MAX_ENTRIES:
            raise TrustError(
                "malformed", f"over {MAX_ENTRIES} revocations: start a swarm with a new owner key"
            )
        return Revocations(self.number + 1, ids, numbers)

    def names(self, peer: str, paper: str) -> bool:
        """Whether a peer (by its whole name) or its paper is on the list."""
        return peer.rpartition("@")[2] in self.peers or paper in self.papers

    def sign(self, owner: Identity, swarm: str) -> bytes:
        """The list as it is published."""
        head = {
            "number": self.number,
            "peers": sorted(self.peers),
            "papers": sorted(self.papers),
            "issued": time.time(),
        }
        return signed.sign(owner, revocation_topic(swarm), head)

    @classmethod
    def read(cls, data: bytes, owner: bytes, swarm: str) -> Revocations:
        """A published list, if the owner signed it."""
        head, _ = signed.read(data, revocation_topic(swarm), lambda _: owner)
        try:
            number = fields.count(head["number"])
            peers, papers = fields.texts(head["peers"]), fields.texts(head["papers"])
            if len(peers) + len(papers) > MAX_ENTRIES:
                raise ValueError
        except (KeyError, ValueError):
            raise TrustError(
                "malformed", "a revocation list of a form that is not known here"
            ) from None
        return cls(number, frozenset(peers), frozenset(papers))

    @classmethod
    def load(cls, path: Path, owner: bytes, swarm: str) -> Revocations:
        """The list in a file; an empty one if there is no such file."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise TrustError("file", f"{path}: cannot be read: {error.strerror}") from None
        try:
            return cls.read(data, owner, swarm)
        except TrustError as error:
            raise TrustError(
                "file", f"{path}: is not this owner's list for swarm {swarm!r}: {error}"
            ) from None
