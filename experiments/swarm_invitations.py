"""Throw-away keys and invitations for the peers of one local swarm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..gossip.trust import Identity, TrustError, invite, public_text, save_invitation
from .build import Member
from .config.tables import ConfigError


@dataclass(frozen=True, slots=True)
class SwarmPapers:
    """Where everybody's files are, and what everybody is called."""

    folder: Path
    owner: str
    names: tuple[str, ...]

    def key(self, label: str) -> str:
        """A peer's key file."""
        return str(self.folder / f"{label}.key")

    def invitation(self, label: str) -> str:
        """A peer's invitation."""
        return str(self.folder / f"{label}.invitation")


def make_papers(folder: Path, swarm: str, members: Iterable[Member]) -> SwarmPapers:
    """New keys for an owner and every peer; an invitation admits to what its peer implements alone.

    Keys of a former run in the same folder are replaced. The owner's is kept beside them: with it
    `gossamer revoke` can put a peer out while the swarm runs.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = _new_key(folder, "owner")
        names = []
        for member in members:
            identity = _new_key(folder, member.name)
            models = {part for each in member.network.owners for part in each.split("&")}
            paper = invite(owner, swarm, identity.label, identity.public, models=models)
            save_invitation(folder / f"{member.name}.invitation", paper)
            names.append(identity.name)
    except (TrustError, OSError) as error:
        raise ConfigError(f"{folder}: no keys can be made for the swarm: {error}") from None
    return SwarmPapers(folder, public_text(owner.public), tuple(names))


def _new_key(folder: Path, label: str) -> Identity:
    path = folder / f"{label}.key"
    path.unlink(missing_ok=True)
    identity = Identity.generate(label)
    identity.save(path)
    return identity
