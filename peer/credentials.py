"""Who a peer is to the others: its key, the invitation that lets it in, and whose word it believes."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..gossip.security import (
    Admission,
    Identity,
    NullSecurity,
    SecurityLayer,
    SwarmSecurity,
    TrustError,
    read_public,
)
from .errors import PeerError
from .machine import Machine
from .settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a peer shows, and checks others by, in a swarm with `trust = "swarm"`."""

    identity: Identity
    admission: Admission
    owner: bytes

    @classmethod
    def load(cls, name: str, settings: Settings) -> Self | None:
        """Read the files that the settings name; None without trust. PeerError says what is wrong.

        name: the whole name of the key (`label@id`), or its label alone.
        """
        files = {key: getattr(settings, key) for key in ("identity", "invitation", "owner")}
        given = [key for key, value in files.items() if value is not None]
        if settings.trust == "none":
            if given:
                raise PeerError(
                    f'peer {name}: has an {given[0]}, but trust is "none"; set trust = "swarm" to use it'
                )
            return None
        if missing := sorted(files.keys() - given):
            raise PeerError(f'peer {name}: trust = "swarm" needs {", ".join(missing)} too')
        try:
            identity = Identity.load(Path(files["identity"]))
            admission = Admission.load(Path(files["invitation"]), identity)
            owner = read_public(files["owner"])
        except TrustError as error:
            raise PeerError(f"peer {name}: {error}") from None
        if name not in (identity.label, identity.name):
            raise PeerError(
                f"peer {name}: {files['identity']} is the key of {identity.name}; "
                f"call the peer {identity.label}, or make it a key of its own"
            )
        return cls(identity, admission, owner)


def begin_trust(
    credentials: Credentials | None,
    name: str,
    settings: Settings,
    *,
    session: str,
    since: float,
    models: Collection[str],
    memory: dict[str, Any],
    machine: Machine,
) -> SecurityLayer:
    """The trust of one session. Every one draws new keys, so that nothing outlives it."""
    if credentials is None:
        _log.warning(
            "peer %s: trust is off: whoever reaches the broker can read and forge", name
        )  # fmt: skip
        return NullSecurity(name)
    try:
        return SwarmSecurity(
            credentials.identity, credentials.admission, credentials.owner,
            swarm=settings.swarm, session=session, models=models, since=since, memory=memory,
            wall=machine.wall, clock=machine.monotonic,
        )  # fmt: skip
    except TrustError as error:
        raise PeerError(f"peer {name}: {error}") from None
