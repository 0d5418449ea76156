"""How one peer behaves in its swarm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ..gossip import GossipSettings, SettingsTable, table_of
from ..gossip.trust import GuardSettings
from ..models import Start
from .tables import (
    CredentialSettings,
    LifeSettings,
    PlaceSettings,
    ProtectionSettings,
    ScheduleSettings,
    TrustKind,
)

__all__ = [
    "CredentialSettings",
    "GossipSettings",
    "LifeSettings",
    "Matching",
    "MatchingSettings",
    "PlaceSettings",
    "ProtectionSettings",
    "ScheduleSettings",
    "Settings",
]


@dataclass(frozen=True)
class Matching:
    """How cells of one partial model that mean the same on two peers are brought to the same place.

    kind: align: a newcomer with a network of its own permutes its cells to agree with its neighbours
        before its weight counts. fuse: the same, and peers may have different widths: all of them
        average vectors of a common width, of which each trains the cells that it has.
    width: fuse: the layout in which peers start afresh, at least as wide as the widest of them; the
        same on all peers.
    bound: fuse: the layout up to which the partial model may grow, by newcomers' cells that match none
        of those in use; `width` if left out, and the same on all peers.
    seed, start: fuse: where peers start afresh, the same on all of them. The values that their
        networks had before are replaced.
    """

    kind: Literal["align", "fuse"]
    width: str | None = None
    bound: str | None = None
    seed: int = 0
    start: Start = field(default_factory=Start)


class MatchingSettings(SettingsTable):
    """Which partial models are matched."""

    matching: Mapping[str, Annotated[Matching, table_of(Matching)]] = {}
    """Partial models whose cells are matched, `matching.global = {kind = "align"}`; see Matching. The same on
    all peers of a model."""


class Settings(
    ScheduleSettings,
    GossipSettings,
    LifeSettings,
    PlaceSettings,
    ProtectionSettings,
    CredentialSettings,
    MatchingSettings,
):
    """Everything about a peer that is not its network, its data or its broker."""

    swarm: str = "swarm"
    """Peers of one swarm name on one broker find each other."""
    trust: TrustKind = "none"
    """none: whoever reaches the broker is believed, and can read everything. swarm: only peers that the
    swarm's owner invited take part, and what they send is sealed; see SECURITY.md."""
    trained: bool = False
    """Whether the peer's network was trained before it came. What a newcomer knows then counts with its
    own weight, after `matching` has brought its cells into its neighbours' order; without matching it
    counts as it is, and spoils the average. Of several trained peers the first to come founds the swarm.
    Guards take it for an attack where it is far from what they know: raise their `distance`."""
    replace: bool = False
    """Whether this process replaces another device of the same name that may still be alive; see
    join --replace."""

    @property
    def bounds(self) -> GuardSettings | None:
        """The guards' bounds, if there are any."""
        if self.guards is None:
            return GuardSettings() if self.trust == "swarm" and not self.private else None
        return None if self.guards == "off" else self.guards
