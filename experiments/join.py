"""The file that an edge device joins with: what to train, how to behave."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..gossip.trust import Identity, TrustError
from ..peer.host import PeerSpec
from ..peer.settings import Matching, Settings
from .build import Swarm
from .config import Compress, ConfigError, DriftBound, first_mistake, load_config
from .config_matching import without_networks
from .config_reading import read_table
from .config_trust import Trust, named_kind
from .config_values import Keepalive, Packet, Positive


class PeerTrust(Trust):
    """What a peer proves itself with, and whom it believes. Paths are relative to the peer's file."""

    identity: str | None = None
    """The peer's key file (`gossamer keygen`). With one, `kind` is "swarm" unless it says otherwise."""
    invitation: str | None = None
    """The invitation or ticket that the owner sent."""
    owner: str | None = None
    """The owner's public key, `gossamer-ed25519:…`, as `gossamer invite` printed it."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says of trust; it goes before the file."""

    identity: Path | None = None
    invitation: Path | None = None
    owner: str | None = None


class MatchingTable(BaseModel):
    """How one partial model's cells are matched; the same on all its peers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["align", "fuse"]
    """align: permute the cells of a trained network. fuse: average at a common width."""
    width: str | None = None
    """fuse: the common layout, as in 64-100-10."""
    bound: str | None = None
    """fuse: the layout up to which newcomers' cells may make the model grow."""
    seed: int = 0
    """fuse: where peers that bring no network start."""


class JoinConfig(BaseModel):
    """A peer's file. Give either an entry point of your own, or a swarm config and an index in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = None
    """The peer's name, unique in the swarm."""
    entry: str | None = None
    """`module:function`; the function is called with `arguments` and returns a Learner."""
    arguments: dict[str, Any] = {}
    config: Path | None = None
    """A swarm config whose built-in data and network to use, and …"""
    index: Annotated[int, Field(ge=0)] = 0
    """… which of its peers to be."""
    samples: Annotated[int, Field(ge=1)] = 1
    """How much the peer counts with weigh = "samples"."""
    seed: int = 0
    rounds: Annotated[int, Field(ge=1)] = 30
    mode: Literal["async", "rounds", "server"] = "async"
    exchanges: Annotated[int, Field(ge=1)] = 2
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    weigh: Literal["peers", "samples"] = "peers"
    dtype: Literal["float32", "float64", "float16"] = "float32"
    compress: Compress = None
    drift: DriftBound = None
    """Both as in a swarm config's [gossip]; peers of one swarm need not agree on them."""
    expect: list[str] = []
    """Peers to wait for before training."""
    neighbours: list[str] | None = None
    """Peers to talk to; everybody who shares a model if left out."""
    servers: dict[str, str] = {}
    """server mode: the peer that averages each partial model."""
    max_packet: Packet = None
    """Bytes of the largest packet to send the broker, as in a swarm config's [gossip]."""
    keepalive: Keepalive = None
    """Seconds of silence before the link to the broker is tested, 1 to 65535; 30 if left out. Lower it on
    links that die silently, raise it to save a battery."""
    password_file: Path | None = None
    """A file beside this one whose first line is the password of the user that the broker's URL names, so
    that it need not stand in the URL."""
    lease: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a peer that vanished is given up for good. Raise it for devices that sleep."""
    start_timeout: Positive = 120.0
    """Seconds to wait for the peers of `expect`. Raise it where they are slow to start."""
    settle_timeout: Positive = 30.0
    """Seconds after which the peer stops settling when training is over, whatever it sees. Raise it on slow
    links."""
    leave_timeout: Positive = 15.0
    """Seconds that the peer has for handing over its mass when it leaves; then it goes anyway."""
    checkpoint: bool = True
    network: Path | None = None
    """A network that was trained before (safetensors), beside this file: what it knows counts with the
    peer's weight, once `matching` has brought its cells into the others' order."""
    matching: dict[str, MatchingTable] = {}
    """Partial models whose cells are matched: `matching.global = {kind = "align"}`. With `config`, that
    one says so."""
    trust: Annotated[PeerTrust, BeforeValidator(named_kind)] = PeerTrust()
    """`[trust]`: the peer's key and papers; without it, whoever reaches the broker is believed."""


def read_join(path: Path) -> JoinConfig:
    """Read a peer's file."""
    try:
        return JoinConfig.model_validate(read_table(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_mistake(error, JoinConfig)}") from None


def load_join(
    path: Path,
    swarm: str,
    name: str | None,
    given: Given | None = None,
    network: Path | None = None,
) -> PeerSpec:
    """Read a peer's file into what its process needs; a `network` given here goes before the file's."""
    join = read_join(path)
    if (join.entry is None) == (join.config is None):
        raise ConfigError(f"{path}: give either 'entry' or 'config' (with 'index')")
    trust = _trust(join.trust, path.parent, given or Given())
    name = name or join.name or _label(trust["identity"])
    if name is None:
        raise ConfigError(f"{path}: key 'name': a peer needs a name; add it, or use --name")
    if network is None and join.network is not None:
        network = path.parent / join.network
    matching = {
        model: Matching(how.kind, how.width, how.bound, how.seed)
        for model, how in join.matching.items()
    }
    if join.entry is not None:
        entry, arguments = join.entry, join.arguments
    else:
        assert join.config is not None
        found = path.parent / join.config if not join.config.is_absolute() else join.config
        config = load_config(found)
        if join.index >= config.peers:
            raise ConfigError(f"{path}: key 'index': {found} has peers 0 to {config.peers - 1}")
        entry = "gossamer.experiments.entry:make_learner"
        if join.matching:
            raise ConfigError(f"{path}: key 'matching': {found} says how cells are matched")
        built = Swarm(config, str(found))
        matching = built.matching(join.index)
        network = network or built.trained_file(join.index)
        config = without_networks(config)
        arguments = {"config": json.dumps(config.model_dump(mode="json")), "index": join.index}
    settings = Settings(
        swarm=swarm,
        mode=join.mode,
        rounds=join.rounds,
        exchanges=join.exchanges,
        fraction=join.fraction,
        weigh=join.weigh,
        dtype=join.dtype,
        compress=join.compress,
        drift=join.drift,
        neighbours=None if join.neighbours is None else tuple(join.neighbours),
        servers=join.servers,
        expect=tuple(join.expect),
        lease=join.lease,
        start_timeout=join.start_timeout,
        settle_timeout=join.settle_timeout,
        leave_timeout=join.leave_timeout,
        guards=join.trust.guards,
        private=join.trust.private,
        dp=join.trust.dp,
        trained=network is not None,
        matching=matching,
        **trust,
    )
    return PeerSpec(
        name, entry, arguments, settings,
        samples=join.samples, seed=join.seed, checkpoint=join.checkpoint,
        network=None if network is None else str(network),
    )  # fmt: skip


def _trust(table: PeerTrust, folder: Path, given: Given) -> dict[str, Any]:
    """The settings of trust, from the command line and the file."""

    def place(said: Path | None, written: str | None) -> str | None:
        if said is not None:
            return str(said)
        return None if written is None else str(folder / written)

    identity = place(given.identity, table.identity)
    implied = identity is not None and "kind" not in table.model_fields_set
    return {
        "trust": "swarm" if implied else table.kind,
        "identity": identity,
        "invitation": place(given.invitation, table.invitation),
        "owner": given.owner or table.owner,
    }


def _label(identity: str | None) -> str | None:
    """What the holder of a key is called."""
    if identity is None:
        return None
    try:
        return Identity.load(Path(identity)).label
    except TrustError as error:
        raise ConfigError(str(error)) from None
