"""Keys and papers for tests of peers that trust each other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.gossip.security import Identity, Revocations, invite, public_text, save_invitation
from gossamer.peer import Settings


@dataclass
class Papers:
    """An owner, and the files of the peers it invited."""

    folder: Path
    swarm: str = "nest"
    owner: Identity = field(default_factory=lambda: Identity.generate("owner"))
    people: dict[str, Identity] = field(default_factory=dict)
    revoked: Revocations = field(default_factory=Revocations)

    def invite(
        self, label: str, models: Collection[str] | None = None, *, days: float = 1.0
    ) -> str:
        """A key and an invitation for a peer; returns its whole name."""
        identity = self.people[label] = Identity.generate(label)
        identity.save(self.folder / f"{label}.key")
        paper = invite(self.owner, self.swarm, label, identity.public, models=models, days=days)
        save_invitation(self.folder / f"{label}.invitation", paper)
        return identity.name

    def names(self, *labels: str) -> tuple[str, ...]:
        """Whole names, of new peers where there are none yet."""
        return tuple(
            self.people[label].name if label in self.people else self.invite(label)
            for label in labels
        )

    def settings(self, label: str, settings: Settings) -> Settings:
        """A peer's settings, with trust."""
        return settings.updated(
            trust="swarm",
            identity=str(self.folder / f"{label}.key"),
            invitation=str(self.folder / f"{label}.invitation"),
            owner=public_text(self.owner.public),
        )

    def revoke(self, *names: str) -> bytes:
        """The next list, with these peers on it."""
        self.revoked = self.revoked.add(names)
        return self.revoked.sign(self.owner, self.swarm)
