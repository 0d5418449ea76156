"""Settings of a peer, in one table per topic; `Settings` and the classes that read config files inherit them.

Nothing here loads torch, so that a mistake in a config is reported at once.
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
"""Most packets of one message. Receivers can hold that many, and guards do not treat them as a flood."""

TrustMode = Literal["none", "swarm"]
"""none: every client of the broker is trusted, and can read everything. swarm: only peers that the
swarm's owner invited take part, and their messages are encrypted; see SECURITY.md."""


class ScheduleSettings(SettingsTable):
    """How long peers train, and with which weight they are averaged; the top-level keys of a config."""

    rounds: Count = 30
    """Number of rounds: in each, a peer trains and then averages (or pushes, in async mode)."""
    every: Count = 1
    """How many times `local_samples` samples are trained in a round."""
    test_every: Count = 1
    """Rounds from one test to the next; the last round is always tested. Raise it when testing takes longer
    than training."""
    weights: Literal["peers", "samples"] = "peers"
    """Whether every peer has the same weight in the average, or one proportional to its samples."""
    gain: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The fraction of peers that measure what they gain by taking part: each of them also trains a lone twin,
    a second network with the same starting values, samples and settings that is never averaged. So 0.1 makes
    the swarm train a tenth more, and a peer with a twin twice as much. At least one peer of a config has a
    twin, chosen by the seed; a device without a config draws by a hash of the swarm's name and its own. Raise
    it for a narrower interval: it takes two peers, and from about four on it is narrow enough to be of use
    (of 16 peers on the digits, a width of 0.61 with two twins, 0.16 with four). 0 measures nothing."""


class SharingSettings(SettingsTable):
    """Who decides what is shared."""

    sharing: Literal["models", "auto"] = "models"
    """models: peers share what the partial models say. auto: peers begin by sharing every cell, and decide
    while they learn which cells become each peer's own or are averaged in groups of peers: a change is made
    where it lowers the loss on training samples that are held out for a while. If there are `models`, only
    cells that all peers share can change. For four peers or more: in simulations in lockstep, and live in
    the modes async and rounds, without `models`, compression, matching, trust and differential privacy."""


class LifecycleSettings(SettingsTable):
    """Timeouts of a live peer, and when it saves its checkpoint."""

    lease: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a peer that is offline is given up: other peers take back mass on its way to it,
    and if it returns, it joins as a newcomer. Raise it for devices that sleep."""
    silence: Positive = 5.0
    """Seconds without a status of a peer that counts in a partial model, after which a waiting peer founds
    the model with its own values."""
    start_timeout: Positive = 120.0
    """Seconds to wait for the peers of `expect` before training. Raise it when many processes start on a slow
    machine."""
    settle_tolerance: Annotated[float, Field(gt=0)] = 1e-4
    """async: after training, gossip continues until the values that a peer receives differ from its own by
    less than this (relative): the peer *settles*."""
    settle_timeout: Positive = 30.0
    """async: seconds after which a peer stops settling even without agreement; time in which an online
    neighbour still trains does not count. Raise it on slow connections and busy machines."""
    leave_timeout: Positive = 15.0
    """Seconds for a leaving peer to hand over its mass and publish its goodbye; then it leaves anyway."""
    checkpoint: bool = True
    """Whether peers write checkpoints, from which they continue after a crash. Without them a crash loses the
    mass that the peer held."""
    save_every: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Seconds of training that a crash may cost a peer with a checkpoint while it sends nothing; a peer that
    gossips saves more often. Large models are saved less often, so that saving takes at most a twentieth of
    the time."""
    tick: Positive = 0.05
    """Seconds from one check for due repetitions and recalls of transfers to the next, if nothing arrives."""


class DiscoverySettings(SettingsTable):
    """Whether a peer appears in a home automation system."""

    discovery: bool = False
    """Whether the peer publishes its state, round and accuracy as plain JSON, with the MQTT discovery records
    of Home Assistant, in which it then appears as a device. Neither is signed, also with trust: anyone who
    reaches the broker can read and forge what Home Assistant shows. A broker with access rules needs
    `gossamer broker --acl … --discovery`."""


class NeighbourSettings(SettingsTable):
    """A peer's neighbours and its role towards them. `gossamer swarm`, and a device that joins with a config,
    compute these settings from the config's graph and names; a device without a config has them in its
    file."""

    exchanges: Count = 2
    """async: neighbours that a peer pushes to after every round of training; rounds: exchanges per
    averaging. Raise it if peers disagree too much while training, at that many more messages."""
    neighbours: Names | None = None
    """Peers to push to; all peers that share a partial model if left out."""
    sources: Names | None = None
    """On a directed graph: peers that push to this one; its neighbours if left out."""
    turns: Annotated[tuple[Names, ...], Field(strict=False)] = ()
    """async, on a graph that changes over time: the neighbours of the first push, of the second, and so on,
    repeated cyclically."""
    servers: Mapping[str, str] = {}
    """server mode: the peer that averages each partial model."""
    expect: Names = ()
    """Peers that must be online before training starts."""
    founder: bool | None = None
    """true: the own weight counts from the start. false: wait for a value from a peer that counts, for at
    least `silence` seconds. Left out: if a peer that shares a model counts, start from its values; if none
    does, found the model at once if all peers of `expect` are online, else after `silence` seconds."""


class ProtectionSettings(SettingsTable):
    """Guards against harmful values, masks and differential privacy; with the trust mode, the keys of a
    config's `[trust]`."""

    guards: Annotated[GuardSettings | Literal["off"] | None, table_of(GuardSettings)] = None
    """Bounds on the values that other peers may send, as in `{distance = 2.0}`: see gossip/security/guards.py
    for all keys. If left out: the default bounds with trust (but not with `private`, whose masks look like
    attacks), and none without trust; "off" for none."""
    private: Mapping[str, float] = {}
    """Lockstep modes with trust: partial models whose values are masked while they are averaged, and the
    masks' scale, a power of two well above the values: `{global = 64.0}`. Raise `exchanges` with it."""
    dp: Annotated[ReleasePlan | None, table_of(ReleasePlan)] = None
    """Differential privacy of everything that is trained, `{clip = 1.0, noise = 1.0}`: see gossip/dp.py.
    The report then states epsilon."""


class CredentialSettings(SettingsTable):
    """A peer's credentials in a swarm with trust; paths in a device's file are relative to that file."""

    identity: str | None = None
    """trust: the peer's key file (`gossamer keygen`)."""
    invitation: str | None = None
    """trust: the file with the peer's invitation or ticket (`gossamer invite`)."""
    owner: str | None = None
    """trust: the public key of the swarm's owner, `gossamer-ed25519:…`, as `gossamer invite` printed it."""


@dataclass(frozen=True)
class Matching:
    """How cells with the same function on two peers get the same index in one partial model.

    kind: align: a newcomer with a trained network permutes its cells to match those of its neighbours
        before its weight counts. fuse: the same, but peers may have different widths: all of them
        average vectors of a common width, and each peer trains the cells that its own network has.
    width: fuse: the layout of the common starting values, at least as wide as the widest peer; the same on
        all peers.
    bound: fuse: the layout up to which the partial model may grow, by cells of newcomers that match no
        cell in use; `width` if left out, and the same on all peers.
    seed, start: fuse: the common starting values, the same on all peers. They replace the values of
        untrained networks.
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
    """Times and sizes that are the same for all peers; not user settings, but tests and studies set them."""

    name_grace: float = 5.0
    """Seconds for which a starting peer waits while its name is online under another session, before it
    fails."""
    save_retry: float = 30.0
    """Seconds for which a checkpoint that cannot be written is tried again."""
    save_pauses: tuple[float, float] = (0.25, 4.0)
    """Seconds between two attempts: the first pause, which doubles, and the longest."""
    save_share: float = 0.05
    """Most of a peer's time, as a fraction, that periodic saving may take: large models are saved less
    often."""
    max_packet: int = 4 << 20
    """Bytes of the largest packet, if the broker accepts it. Splitting a message costs a checksum and a copy
    on both sides; lower this when large packets delay other traffic on a slow connection."""
    max_pieces: int = MAX_PIECES
    """Most packets of one message."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """When to repeat a transfer, and when to ask for it back."""


class Settings(
    ScheduleSettings,
    SharingSettings,
    GossipSettings,
    LifecycleSettings,
    DiscoverySettings,
    NeighbourSettings,
    ProtectionSettings,
    CredentialSettings,
    MatchingSettings,
):
    """All settings of a peer except its network, its data and its broker."""

    swarm: str = "swarm"
    """Name of the swarm: peers with the same swarm name on the same broker average with each other."""
    trust: TrustMode = "none"
    """none: every client of the broker is trusted, and can read everything. swarm: only peers that the
    swarm's owner invited take part, and their messages are encrypted; see SECURITY.md."""
    trained: bool = False
    """Whether the peer's network was trained before it joined. Its values are then averaged with its own
    weight, after `matching` has permuted its cells into its neighbours' order; without matching they are
    averaged as they are, which spoils the average. Of several trained peers the first to join founds the
    models. Guards reject values that are far from their own: raise their `distance`."""
    replace: bool = False
    """Whether this process replaces another device of the same name that may still be running; see
    join --replace."""

    @property
    def bounds(self) -> GuardSettings | None:
        """The guards' bounds, or None without guards."""
        if self.guards is None:
            return GuardSettings() if self.trust == "swarm" and not self.private else None
        return None if self.guards == "off" else self.guards

    def contradiction(self) -> str | None:
        """Return which of these settings exclude each other, and what to do about it; None if none do."""
        private, compress = bool(self.private), self.compress is not None
        auto = self.sharing == "auto"
        lockstep = self.mode != "async"
        before, masks = "a network that was trained before", "private averaging"
        reasons = {
            f"{before}: its values would be sent without noise; leave out dp, or start untrained":
                self.trained and self.dp is not None,
            f"{before}: its cells are matched when it joins, and no peer joins midway in {self.mode} mode; "
            "use async mode":
                self.trained and bool(self.matching) and lockstep,
            "gain: a lone twin trains without the noise of dp, and its accuracy is published; leave out "
            "one of them":
                self.gain > 0 and self.dp is not None,
            f'{masks}: masks need secrets between peers; set trust = "swarm"':
                private and self.trust != "swarm",
            f"{masks}: it works in rounds, which async mode has not; use mode rounds or server":
                private and not lockstep,
            f"{masks}: float16 cannot carry masks; use dtype float32 or float64":
                private and self.dtype == "float16",
            f'{masks}: guards would reject masked values as attacks; set guards = "off"':
                private and self.bounds is not None,
            f"compress = {self.compress!r} and dtype = {self.dtype!r} exclude each other: leave dtype out, "
            "the compressor determines how values are encoded":
                compress and self.dtype != "float32",
            'sharing = "auto": a server is named for each partial model, and these names are made later; use '
            'mode = "async" or "rounds"':
                auto and self.mode == "server",
            'sharing = "auto": compressors need partial models that do not change; leave compress out':
                auto and compress,
            'sharing = "auto": cells are matched by their partial model, which changes; leave matching out':
                auto and bool(self.matching),
            'sharing = "auto": invitations name the partial models, and these names are made later; leave '
            'trust out':
                auto and self.trust == "swarm",
            'sharing = "auto": what peers measure would be sent without noise; leave dp out':
                auto and self.dp is not None,
            "compress: masked values look like random noise, which cannot be compressed; leave compress out, "
            "or private":
                compress and private,
            f"drift: in {self.mode} mode other peers wait for every push, so none can be skipped; use mode = "
            '"async", or leave drift out':
                self.drift is not None and lockstep,
        }  # fmt: skip
        return next((reason for reason, excluded in reasons.items() if excluded), None)
