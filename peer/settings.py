"""Settings of a peer, one class per topic; `Settings` and the classes that read config files inherit them.

Nothing here loads torch, so that a mistake in a config is reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import inf
from typing import Annotated, Final, Literal

from pydantic import Field

from ..gossip import (
    Count,
    GossipSettings,
    Names,
    Positive,
    ReleasePlan,
    RetryPolicy,
    SettingsTable,
    alternatives,
    needed_neighbours,
    table_of,
)
from ..gossip.security import GuardSettings
from ..models import Prior, Start

MAX_PIECES = 8192
"""Most packets of one message. Receivers can hold that many, and guards do not treat them as a flood."""

AUTO_GUARDS = GuardSettings(distance=1.0, outlier=None)
"""The default bounds of peers that decide by themselves what they share. In a swarm with two tasks, peers
refused honest transfers with `distance = 0.5` until the tasks had their own models, with `outlier = 3` even
then."""

TrustMode = Literal["none", "swarm"]
"""none: every client of the broker is trusted, and can read everything. swarm: only peers that the
swarm's owner invited take part, and their messages are encrypted; see SECURITY.md."""


FOREVER: Final = "forever"
"""The value of `rounds` of a peer that learns until it is told to leave."""


class ScheduleSettings(SettingsTable):
    """How long peers train, and with which weight they are averaged; the top-level keys of a config."""

    rounds: Annotated[
        Count | Literal["forever"], alternatives('should be a number of rounds, or "forever"')
    ] = 30
    """Number of rounds: in each, a peer trains and then averages (or pushes, in async mode). Live peers also
    take "forever": they learn until they are told to leave, and continue from there when they are started
    again. A peer with a number, in a swarm with others that learn for ever, stays and averages when its
    rounds are over, until it is told to leave."""
    every: Count = 1
    """How many times a peer trains on `local_samples` samples in a round."""
    test_every: Count = 1
    """Rounds from one test to the next; the last round is always tested. Raise it when testing takes longer
    than training."""
    weights: Literal["peers", "samples"] = "peers"
    """Whether every peer has the same weight in the average, or one proportional to its samples. In steady
    mode "samples" makes a peer follow others that have fewer samples than itself by smaller steps."""
    gain: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The fraction of peers that measure what they gain by taking part: each of them also trains a lone twin,
    a second network with the same starting values, samples and settings that is never averaged. So 0.1 makes
    the swarm train a tenth more, and a peer with a twin twice as much. At least one peer of a config has a
    twin, chosen by the seed; for a device without a config, a hash of the swarm's name and its own decides.
    Raise it for a narrower confidence interval of the gain, which needs two twins or more (of 16 peers on the
    digits, its width is 0.61 with two twins, 0.16 with four). 0 measures nothing."""

    callbacks: Names = ()
    """Functions of yours, `my_module:make`, that return a `gossamer.models.Callback`: an object that is
    called at the start, after every round and test, and at the end, and may stop the run by returning True.
    The module's file is in the folder of this file, or in the working directory. A function gets `folder`,
    that of the results, and `name`, that of the run or peer, if it has such parameters;
    `gossamer.models:TensorBoard` is one. Live, every peer has its own callbacks; `gossamer compare` makes new
    ones for every run."""

    @property
    def last_round(self) -> float:
        """The number of the last round; infinity if there is none."""
        return inf if self.rounds == FOREVER else self.rounds


AUTO_MODELS = ("global*", "group*", "statistics-*")
"""Patterns of the names of all partial models that peers begin by themselves, for their invitations."""


class SharingSettings(SettingsTable):
    """Who decides what is shared."""

    sharing: Literal["models", "auto"] = "models"
    """models: peers share what the partial models say. auto: peers begin by sharing every cell, and decide
    while they learn which cells become each peer's own or are averaged in groups of peers: a change is made
    where it lowers the loss on training samples that are held out for a while. If there are `models`, only
    cells that all peers share can change. On a graph, cells that all peers share are averaged over its links;
    those that only a group shares, among its peers as if all of them were neighbours. For four peers or more:
    in simulations in lockstep, and live, without matching. Compression, `drift` and float16 are for the
    partial models; what peers measure is sent exactly. Invitations name the models by patterns, as `gossamer
    invite` says. Not with `private`: what one peer measures stands alone in the average, so masks would not
    hide it. Not with `dp`: its noise is larger than the differences that decide."""


class PriorSettings(SettingsTable):
    """How peers whose classes are not equally frequent learn together."""

    prior: Prior = "none"
    """Whether a peer adds the logarithms of its class shares to the network's outputs, in training and in
    tests: for peers whose classes are not equally frequent, so that they can share the whole network. own:
    shares from the peer's own labels, each class counted once more. auto: shares drawn towards those of all
    peers, the more so the less they differ, and no prior if they differ by chance only; live peers average
    totals of their counts for that, and have no prior before the first averaging. Classes must be as frequent
    in tests as in training: set `data.tested = "own"` if the data set has a test set. Does not help where
    labels mean something else to every peer. Saved networks are without the prior."""


class LifecycleSettings(SettingsTable):
    """Timeouts of a live peer, and when it saves its checkpoint."""

    lease: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a peer that is offline is given up: other peers take back mass on its way to it,
    and if it returns, it joins as a newcomer."""
    asleep: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """async: seconds for which this device is regularly offline between two times awake, as 3500 for one that
    wakes for two minutes every hour to save energy. Its card says so, and its lease is longer by twice that:
    other peers wait for it, even if it fails to connect once. What it holds of the average stays with it
    meanwhile."""
    round_every: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Least seconds from the beginning of a round to that of the next, as 60 for a device that learns for
    ever on a battery, or beside other work. In between, it averages what others send. In the modes rounds and
    server all peers wait for the slowest."""
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
    """Seconds for a leaving peer to hand over its mass and publish its goodbye; then it ends anyway."""
    checkpoint: bool = True
    """Whether peers write checkpoints, from which they continue after a crash. Without them a crash loses the
    mass that the peer held."""
    save_every: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    """Seconds of training that a crash may cost a peer with a checkpoint while it sends nothing; a peer that
    gossips saves more often. Large models are saved less often, so that saving takes at most a twentieth of
    the time."""
    save_network_every: Positive = 300.0
    """Seconds from one writing of the peer's network to the next, as NAME.safetensors with NAME.network.json
    beside it; less in the first minutes. Both are also written when its rounds are over, when it has settled,
    and at the end. Other programs, and `gossamer predict`, may read them at any time. Lower it if they need
    newer values."""
    tick: Positive = 0.05
    """Seconds between two checks whether transfers must be repeated or recalled, if nothing arrives."""

    @property
    def full_lease(self) -> float:
        """The lease with the time for which the device sleeps: seconds offline after which it is given up."""
        return self.lease + 2.0 * self.asleep


class NeighbourSettings(SettingsTable):
    """A peer's neighbours and its role towards them. `gossamer swarm`, and a device that joins with a config,
    compute these settings from the config's graph and names; a device without a config has them in its
    file."""

    exchanges: Count = 2
    """async: neighbours that a peer pushes to after every round of training; steady: the same, 4 by default;
    rounds: exchanges per averaging. Raise it if peers disagree too much while training, at that many more
    messages."""
    neighbours: Names | None = None
    """Peers to push to; all peers that share a partial model if left out."""
    sources: Names | None = None
    """On a directed graph: peers that push to this one; its neighbours if left out."""
    turns: Annotated[tuple[Names, ...], Field(strict=False)] = ()
    """async, on a graph that changes over time: the neighbours of the first push, of the second, and so on,
    repeated cyclically."""
    hops: Annotated[int, Field(ge=1)] = 16
    """With `neighbours`: how many links away the farthest peer of the swarm may be. A peer on a graph hears
    of its neighbours alone, and ends when it knows from them that all peers within so many links have
    finished. Raise it on a larger graph; one that is too large costs a few more statuses at the end."""
    servers: Mapping[str, str] = {}
    """server mode: the peer that averages each partial model. With `sharing = "auto"` the first peer that has
    a model averages it."""
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
    """Bounds on the values that other peers may send, as in `{distance = 2.0}`; the table
    `trust.guards` has all keys. If left out: the default bounds with trust (but not with `private`, whose
    masks look like attacks), and none without trust; "off" for none. With `sharing = "auto"` the default is
    wider, a `distance` of 1 and no `outlier`: peers with different tasks would refuse each other before
    they have separate models."""
    private: Mapping[str, float] = {}
    """Lockstep modes with trust: partial models whose values are masked while they are averaged, and the
    masks' scale, a power of two well above the values: `{global = 64.0}`. Raise `exchanges` with it."""
    dp: Annotated[ReleasePlan | None, table_of(ReleasePlan)] = None
    """Differential privacy of everything that is trained, `{clip = 1.0, noise = 1.0}`; the
    table `trust.dp` has all keys. The report then states epsilon."""


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
    """How cells with the same function on two peers get the same index in one partial model."""

    kind: Literal["align", "fuse"]
    """align: a newcomer with a trained network permutes its cells to match those of its neighbours before its
    weight counts. fuse: the same, but peers may have different widths: all of them average vectors of a
    common width, and each peer trains the cells that its own network has."""
    width: str | None = None
    """fuse: the layout of the common starting values, at least as wide as the widest peer; the same on all
    peers."""
    bound: str | None = None
    """fuse: the layout up to which the partial model may grow, by cells of newcomers that match no cell in
    use; `width` if left out, and the same on all peers."""
    seed: int = 0
    """fuse: the seed of the common starting values, which replace those of untrained networks; the same on
    all peers."""
    start: Start = field(default_factory=Start)
    """fuse: how the common starting values are drawn; the same on all peers."""


class MatchingSettings(SettingsTable):
    """Which partial models are matched."""

    matching: Mapping[str, Annotated[Matching, table_of(Matching)]] = {}
    """Partial models whose cells are matched, `matching.global = {kind = "align"}`. The same on all peers
    of a model."""


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


class DeviceSettings(
    ScheduleSettings,
    SharingSettings,
    PriorSettings,
    GossipSettings,
    LifecycleSettings,
    NeighbourSettings,
    MatchingSettings,
):
    """The settings of a peer that are keys at the top of a device's file; `[trust]` has the others."""

    samples_folder: str | None = None
    """A folder in which new training samples arrive while the peer runs, a path relative to the device's
    file: .npz files with the arrays x and y. It is looked through between two rounds, and at the start, the
    newest files first until `window` is full; files are not removed. A file that cannot be used is logged and
    left out until it changes. Write a file under another ending and rename it, so that it is never half
    there. Accuracy is still measured on the test samples that the learner was made with."""
    window: Count | None = None
    """How many training samples the peer keeps: the newest. Set it when new samples arrive for ever; lower it
    to forget faster when the data change."""
    discovery: bool = False
    """Whether the peer publishes its state, round and accuracy as plain JSON, with the MQTT discovery records
    of Home Assistant, in which it then appears as a device. Neither is signed, also with trust: anyone who
    reaches the broker can read and forge what Home Assistant shows. A broker with access rules needs
    `gossamer broker --acl … --discovery`."""


class Settings(DeviceSettings, ProtectionSettings, CredentialSettings):
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

    @cached_property  # read several times in every turn of the gossip loop
    def watched(self) -> frozenset[str] | None:
        """The peers whose cards and statuses this peer follows: its neighbours, on a graph; None for all.

        All peers are followed if peers decide what they share: they elect the one that plans, and groups form
        among peers that are not neighbours. In server mode too, where servers need not be neighbours.
        """
        if self.neighbours is None or self.sharing == "auto" or self.mode == "server":
            return None
        return frozenset((*self.neighbours, *(self.sources or ()), *chain(*self.turns)))

    @property
    def bounds(self) -> GuardSettings | None:
        """The guards' bounds, or None without guards."""
        if self.guards is not None:
            return None if self.guards == "off" else self.guards
        if self.trust != "swarm" or self.private:
            return None
        return AUTO_GUARDS if self.sharing == "auto" else GuardSettings()

    def contradiction(self) -> str | None:
        """Return which of these settings exclude each other, and what to do about it; None if none do."""
        private, compress = bool(self.private), self.compress is not None
        auto, averages_counts = self.sharing == "auto", self.prior == "auto"
        lockstep, steady = not self.paced, self.mode == "steady"
        robust = self.robust != "none"
        needed = needed_neighbours(self.hostile) if steady else 0
        trained, masking = "a network that was trained before", "private averaging"
        reasons = {
            f"robust: it is for the modes rounds and server, not for {self.mode}; leave it out":
                robust and not lockstep,
            "robust: values are combined without weight; leave compress, private and weights out":
                robust and (compress or private or self.weights == "samples"),
            "robust: one hostile member could decide what all share; leave sharing out":
                robust and auto,
            'robust: class counts are averaged with weight; use prior = "own"':
                robust and averages_counts,
            "steady mode: a compressor's error stays with weight, and values have none; leave compress out":
                steady and compress,
            "steady mode: neighbours judge values by the last ones that they saw; leave drift out":
                steady and self.drift is not None,
            "steady mode: one hostile member could decide what all share; leave sharing out":
                steady and auto,
            "steady mode: cells are matched by averages with weight; leave matching and trained out":
                steady and (bool(self.matching) or self.trained),
            'steady mode: class counts are averaged with weight; use prior = "own"':
                steady and averages_counts,
            "steady mode: neighbours change before they are known well enough to be judged; leave turns out":
                steady and bool(self.turns),
            "steady mode: on a directed graph a peer cannot choose whom it listens to; leave sources out":
                steady and self.sources is not None
                and set(self.sources) != set(self.neighbours or ()),
            f"steady mode: to withstand {self.hostile} hostile neighbours a peer needs {needed}, and it has "
            f"{len(self.neighbours or ())}; lower hostile, or name more neighbours":
                steady and self.hostile != "auto" and self.neighbours is not None
                and len(self.neighbours) < needed,
            f"{trained}: its values would be sent without noise; leave out dp, or start untrained":
                self.trained and self.dp is not None,
            f"{trained}: its cells are matched when it joins, and no peer joins midway in {self.mode} mode; "
            "use async mode":
                self.trained and bool(self.matching) and lockstep,
            "gain: a lone twin trains without the noise of dp, and its accuracy is published; leave out "
            "one of them":
                self.gain > 0 and self.dp is not None,
            f'{masking}: masks need secrets between peers; set trust = "swarm"':
                private and self.trust != "swarm",
            f"{masking}: it works in rounds, which async mode has not; use mode rounds or server":
                private and not lockstep,
            f"{masking}: float16 cannot carry masks; use dtype float32 or float64":
                private and self.dtype == "float16",
            f'{masking}: guards would reject masked values as attacks; set guards = "off"':
                private and self.bounds is not None,
            f"compress = {self.compress!r} and dtype = {self.dtype!r} exclude each other: leave dtype out, "
            "the compressor determines how values are encoded":
                compress and self.dtype != "float32",
            'sharing = "auto": rounds of groups that form later need a graph without directions; use mode = '
            '"async" or "server"':
                auto and self.mode == "rounds" and self.sources is not None,
            'sharing = "auto": cells are matched by their partial model, which changes; leave matching out':
                auto and bool(self.matching),
            'sharing = "auto": what peers measure would be sent without masks; leave private out':
                auto and private,
            'sharing = "auto": what peers measure would be sent without noise; leave dp out':
                auto and self.dp is not None,
            'prior = "auto": compressors distort class counts; leave compress out, or use prior = "own"':
                averages_counts and compress,
            'prior = "auto": invitations and guards do not know class counts; use prior = "own"':
                averages_counts and (self.trust == "swarm" or self.bounds is not None),
            'prior = "auto": class counts would be sent without noise; leave dp out, or use prior = "own"':
                averages_counts and self.dp is not None,
            "compress: masked values look like random noise, which cannot be compressed; leave compress out, "
            "or private":
                compress and private,
            f"asleep: in {self.mode} mode other peers wait for every push, so they would sleep too; use "
            'mode = "async"':
                self.asleep > 0 and lockstep,
            f"drift: in {self.mode} mode other peers wait for every push, so none can be skipped; use mode = "
            '"async", or leave drift out':
                self.drift is not None and lockstep,
        }  # fmt: skip
        return next((reason for reason, excluded in reasons.items() if excluded), None)
