"""How one peer behaves in its swarm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..gossip.privacy import ReleasePlan
from ..gossip.trust import GuardSettings
from ..models import Start


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

    kind: Literal["align", "fuse"] = "align"
    width: str | None = None
    bound: str | None = None
    seed: int = 0
    start: Start = field(default_factory=Start)


@dataclass(frozen=True)
class Settings:
    """Everything about a peer that is not its network, its data or its broker."""

    swarm: str = "swarm"
    """Peers of one swarm name on one broker find each other."""
    mode: Literal["async", "rounds", "server"] = "async"
    """async: train and push, never wait. rounds: train, then average in lockstep. server: train, then
    give everything to the averaging server of each partial model and take the mean home."""
    rounds: int = 30
    """How often the peer trains and then averages (or pushes, in async mode)."""
    every: int = 1
    """Stretches trained between two averagings."""
    test_every: int = 1
    """Rounds between two tests; the last round is always tested."""
    exchanges: int = 2
    """async: neighbours that a peer pushes to after every round of training; rounds: exchanges per
    averaging. Raise it if peers disagree too much while training, at that many more messages."""
    fraction: float | None = None
    """async: the share of its weight that a peer gives away in one push; None gives the neighbours and
    itself equal parts."""
    weigh: Literal["peers", "samples"] = "peers"
    """Whether every peer counts the same in the average, or by its number of samples."""
    dtype: Literal["float32", "float64", "float16"] = "float32"
    """Values on the wire. float16 halves the traffic; what it rounds off stays with the sender, and a message
    with a value that it cannot hold (beyond 65504) goes in float32."""
    compress: str | None = None
    """How values are compressed: float16, int8, mask:0.1, subsample:0.1, top-k:0.01, low-rank:4, or several
    joined by +, as in top-k:0.05+int8. What is left out stays with the sender and follows later; int8 takes
    a quarter of the bytes and hardly shows. Costs a copy of the vector per neighbour and direction."""
    drift: float | Mapping[str, float] | None = None
    """async: skip a push of what has moved less than this (relative distance) since it was last pushed,
    for all partial models or each by name. Raise it while the accuracy allows."""
    neighbours: tuple[str, ...] | None = None
    """Peers to talk to; None talks to everybody who implements the same model."""
    sources: tuple[str, ...] | None = None
    """rounds mode on a directed graph: peers to hear from, where they are not the neighbours."""
    turns: tuple[tuple[str, ...], ...] = ()
    """async, on a graph that changes over time: the neighbours of one push after the other, in turn."""
    servers: Mapping[str, str] = field(default_factory=dict)
    """server mode: the peer that averages each partial model."""
    expect: tuple[str, ...] = ()
    """Peers that must be online before training starts."""
    start_timeout: float = 120.0
    """Seconds to wait for them. Raise it when many processes start on a slow machine."""
    founder: bool | None = None
    """True: own weight counts from the start. False: a newcomer takes over its neighbours' values
    first. None: a newcomer if somebody who shares a model is already training."""
    trained: bool = False
    """Whether the peer's network was trained before it came. What a newcomer knows then counts with its
    own weight, after `matching` has brought its cells into its neighbours' order; without matching it
    counts as it is, and spoils the average. Of several trained peers the first to come founds the swarm.
    Guards take it for an attack where it is far from what they know: raise their `distance`."""
    matching: Mapping[str, Matching] = field(default_factory=dict)
    """Partial models whose cells are matched; see Matching."""
    tick: float = 0.05
    """Seconds between two looks at what must be repeated or recalled when nothing arrives."""
    settle_tolerance: float = 1e-4
    """async: after training, gossip goes on until received values differ by less than this (relative)."""
    settle_timeout: float = 30.0
    """Seconds after which a peer stops settling, whatever it sees; they count while no neighbour that
    is online still trains. Raise it on slow links and busy machines."""
    silence: float = 5.0
    """Seconds without word from anybody who counts in a partial model before a peer founds it at its own
    values. Raise it where the broker or links are slow to come back."""
    replace: bool = False
    """Whether this process replaces another device of the same name that may still be alive; see `gossamer
    join --replace`."""
    lease: float = 600.0
    """A peer that was away for longer than this many seconds is given up for good: mass on its way to
    it is taken back, and if it returns, it returns as a newcomer. Raise it for devices that sleep."""
    save_every: float = 10.0
    """Seconds of training that a crash may cost a peer with a checkpoint while nobody hears from it; less,
    while it gossips. Large models are saved less often, so that it takes a twentieth of the time at most."""
    leave_timeout: float = 15.0
    """Seconds that a leaving peer has to hand over its mass and say goodbye; then it goes anyway."""
    trust: Literal["none", "swarm"] = "none"
    """none: whoever reaches the broker is believed, and can read everything. swarm: only peers that the
    swarm's owner invited take part, and what they send is sealed; see SECURITY.md."""
    identity: str | None = None
    """trust: the peer's key file (`gossamer keygen`)."""
    invitation: str | None = None
    """trust: the invitation or ticket that lets it in (`gossamer invite`)."""
    owner: str | None = None
    """trust: the public key of the swarm's owner, `gossamer-ed25519:…`."""
    guards: GuardSettings | Literal["off"] | None = None
    """Bounds on what others may send. None: the usual ones with trust (but not with `private`, whose
    masks look like attacks), none without it."""
    private: Mapping[str, float] = field(default_factory=dict)
    """Lockstep modes with trust: partial models whose values are masked while they are averaged, and the
    masks' scale, a power of two well above the values. Raise `exchanges` with it."""
    dp: ReleasePlan | None = None
    """Differential privacy of everything that is trained; the report then states epsilon."""

    @property
    def bounds(self) -> GuardSettings | None:
        """The guards' bounds, if there are any."""
        if self.guards is None:
            return GuardSettings() if self.trust == "swarm" and not self.private else None
        return None if self.guards == "off" else self.guards
