"""The table of a config that is about trust: who is believed, and what peers keep to themselves."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from ...peer import CredentialSettings, ProtectionSettings, TrustKind


class Trust(ProtectionSettings):
    """Whom live peers believe. `trust = "swarm"` is short for a table with that kind alone."""

    kind: TrustKind = "none"
    """none: whoever reaches the broker can read and forge. swarm: peers have keys and invitations, and
    what they send is sealed; `gossamer swarm` makes throw-away ones for its own peers. The peer's setting
    `trust`."""


class PeerTrust(Trust, CredentialSettings):
    """The same in a device's file, with the device's key and invitation: paths relative to that file.
    With an identity, `kind` is "swarm" unless it says otherwise."""


def named_kind(value: Any) -> Any:
    """Let the kind's name stand for a table."""
    return {"kind": value} if isinstance(value, str) else value


TrustTable = Annotated[Trust, BeforeValidator(named_kind)]
PeerTrustTable = Annotated[PeerTrust, BeforeValidator(named_kind)]
