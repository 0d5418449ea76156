"""Settings of a peer by concern, each knob declared once: `Settings` and the readers of files inherit them.

Nothing here loads torch, so that a mistake in a config is told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from ..gossip import (
    Count,
    GossipSettings,
    Names,
    Positive,
    ReleasePlan,
    RetryPolicy,
    SettingsTable,
    table_of,
)
from ..gossip.security import GuardSettings
from ..models import Start

MAX_PIECES = 8192
"""Packets of one message. Receivers have room for them, and guards do not take them for a flood."""

TrustKind = Literal["none", "swarm"]
"""none: whoever reaches the broker is believed, and can read everything. swarm: only peers that the
swarm's owner invited take part, and what they send is sealed; see SECURITY.md."""


class ScheduleSettings(SettingsTable):
    """How long peers train, and how much each of them counts; the top of a config."""

    rounds: Count = 30
    """How often a peer trains and then averages (or pushes, in async mode)."""
    every: Count = 1
    """How often `local_samples` are trained between two averagings."""
    test_every: Count = 1
    """Rounds between two tests; the last round is always tested. Raise it when testing takes longer than
    training."""
    weights: Literal["peers", "samples"] = "peers"
    """Whether every peer counts the same in the average, or by its number of samples."""


class LifeSettings(SettingsTable):
    """How long a live peer waits for whom, and what it saves."""

    lease: Annotated[float, Field(gt=0)] = 600.0
    """A peer that was away for longer than this many seconds is given up for good: mass on its way to
    it is taken back, and if it returns, it returns as a newcomer. Raise it for devices that sleep."""
    silence: Positive = 5.0
    """Seconds without word from anybody who counts in a partial model before a peer founds it at its own
    values."""
    start_timeout: Positive = 120.0
    """Seconds to wait for the peers of `expect` before training. Raise it when many processes start on a slow
    machine."""
    settle_tolerance: Annotated[float, Field(gt=0)] = 1e-4
    """async: after training, gossip goes on until received values differ by less than this (relative)."""
    settle_timeout: Positive = 30.0
    """async: seconds after which a peer stops settling, whatever it sees; they count while no neighbour that
    is online still trains. Raise it on slow links and busy machines."""
    leave_timeout: Positive = 15.0
    """Seconds that a leaving peer has to hand over its mass and say goodbye; then it goes anyway."""
    checkpoint: bool = True
    """Whether peers survive a crash. Without it a crash loses the mass that the peer held."""
    save_every: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Seconds of training that a crash may cost a peer with a checkpoint while nobody hears from it; less,
    while it gossips. Large models are saved less often, so that it takes a twentieth of the time at most."""
    tick: Positive = 0.05
    """Seconds between two looks at what must be repeated or recalled when nothing arrives."""


class PlaceSettings(SettingsTable):
    """A peer's place among the others: `gossamer swarm` and a device that joins with a config compute it from
    the config's graph and names, a device without one states it in its file."""

    exchanges: Count = 2
    """async: neighbours that a peer pushes to after every round of training; rounds: exchanges per
    averaging. Raise it if peers disagree too much while training, at that many more messages."""
    neighbours: Names | None = None
    """Peers to talk to; everybody who implements the same model if left out."""
    sources: Names | None = None
    """rounds mode on a directed graph: peers to hear from, where they are not the neighbours."""
    turns: Annotated[tuple[Names, ...], Field(strict=False)] = ()
    """async, on a graph that changes over time: the neighbours of one push after the other, in turn."""
    servers: Mapping[str, str] = {}
    """server mode: the peer that averages each partial model."""
    expect: Names = ()
    """Peers that must be online before training starts."""
    founder: bool | None = None
    """true: own weight counts from the start. false: wait to hear from somebody who counts, for `silence`
    seconds at least. Left out: where somebody who shares a model counts, take over its values first; where
    nobody does, found it at once if all of `expect` are there, else after `silence` seconds."""


class ProtectionSettings(SettingsTable):
    """Bounds on what others may send, and what a peer keeps to itself; with the kind of trust, the keys of a
    config's `[trust]`."""

    guards: Annotated[GuardSettings | Literal["off"] | None, table_of(GuardSettings)] = None
    """Bounds on what others may send, as in `{distance = 2.0}`: see gossip/security/guards.py for all keys.
    If left out, the usual ones with trust (but not with `private`, whose masks look like attacks), and none
    without it; "off" for none."""
    private: Mapping[str, float] = {}
    """Lockstep modes with trust: partial models whose values are masked while they are averaged, and the
    masks' scale, a power of two well above the values: `{global = 64.0}`. Raise `exchanges` with it."""
    dp: Annotated[ReleasePlan | None, table_of(ReleasePlan)] = None
    """Differential privacy of everything that is trained, `{clip = 1.0, noise = 1.0}`: see gossip/dp.py.
    The report then states epsilon."""


class CredentialSettings(SettingsTable):
    """What a peer proves itself with in a swarm with trust; a device's file has paths relative to itself."""

    identity: str | None = None
    """trust: the peer's key file (`gossamer keygen`)."""
    invitation: str | None = None
    """trust: the invitation or ticket that lets it in (`gossamer invite`)."""
    owner: str | None = None
    """trust: the public key of the swarm's owner, `gossamer-ed25519:…`, as `gossamer invite` printed it."""


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


@dataclass(frozen=True)
class Limits:
    """Times and sizes that are the same for all peers and that no user sets; tests and studies may."""

    name_grace: float = 5.0
    """Seconds that a name may stay online under another session before a peer gives it up."""
    save_retry: float = 30.0
    """Seconds for which a checkpoint that cannot be written is tried again."""
    save_pauses: tuple[float, float] = (0.25, 4.0)
    """Seconds between two attempts: the first pause, which doubles, and the longest."""
    save_share: float = 0.05
    """Of a peer's time, what saving may take where nobody waits for it: large models are saved less often."""
    max_packet: int = 4 << 20
    """Bytes of the largest packet, if the broker takes it. Cutting a message costs a checksum and a copy on
    either side; lower this when large packets hold up other traffic on a slow link."""
    max_pieces: int = MAX_PIECES
    """Packets of one message."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """When to repeat a transfer, and when to ask for it back."""


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

    def contradiction(self) -> str | None:
        """Return which of these settings exclude each other, and what to do about it; None if none do."""
        private, compress = bool(self.private), self.compress is not None
        lockstep = self.mode != "async"
        before, masks = "a network that was trained before", "private averaging"
        reasons = {
            f"{before}: what it brings would leave it without noise; leave out dp, or start untrained":
                self.trained and self.dp is not None,
            f"{before}: its cells are matched when it joins, and nobody joins midway in {self.mode} mode; "
            "use async mode":
                self.trained and bool(self.matching) and lockstep,
            f'{masks}: masks need secrets between peers; set trust = "swarm"':
                private and self.trust != "swarm",
            f"{masks}: it needs rounds to begin from; use mode rounds or server":
                private and not lockstep,
            f"{masks}: float16 cannot carry masks; use dtype float32 or float64":
                private and self.dtype == "float16",
            f'{masks}: guards take masked values for attacks; set guards = "off"':
                private and self.bounds is not None,
            f"compress = {self.compress!r} and dtype = {self.dtype!r} exclude each other: leave dtype out, "
            "compressors say how values are written":
                compress and self.dtype != "float32",
            "compress: masked values look like noise, which no compressor makes shorter; leave compress out, "
            "or private":
                compress and private,
            f"drift: in {self.mode} mode the others wait for every push, so none can be skipped; use mode = "
            '"async", or leave drift out':
                self.drift is not None and lockstep,
        }  # fmt: skip
        return next((why for why, excluded in reasons.items() if excluded), None)
