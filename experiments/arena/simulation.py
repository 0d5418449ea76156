"""Run a config in lockstep: round by round, all peers train, then average. Write its results.

`source`, an argument of many functions, is the path of the config's file: errors and warnings begin with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
import torch

from gossamer import __version__

from ...models import AssociativeNetwork, Callback, Gain, Layout, ModelError
from ...models.sharing import by_hand_text, check_learner, untrained_text
from ...models.stack import MemoryNeeds, estimate_memory, free_memory
from ...peer import MatchedStore, save_checkpoint
from ...topology import Schedule
from ..build import (
    Member,
    PeerFacts,
    Swarm,
    check_compression,
    choose_twins,
    matched_members,
    shared_models,
)
from ..cli import console
from ..config.named_files import fingerprint
from ..config.needs import refuse_conflicts, warn_unused_keys
from ..config.tables import Config, ConfigError, differing_key
from ..data import Dataset, PeerDatasets, load_or_stream
from ..graphs.swarm import (
    MAX_STEPS,
    check_robust,
    fixed_graph,
    mixing_of,
    push_graph,
    pushes_of,
    swarm_graph,
)
from ..results import CHECKPOINT_FILE, SHARING_FILE, Results, make_folder, read_records, write_json
from .arena import Arena, Round, read_arena_state
from .events import Wire
from .lockstep import Gossip, Mixing, Robust, Server, Steady
from .run_files import (
    all_callbacks,
    gain_record,
    open_run_folder,
    save_networks,
    test_record,
    write_gains,
)
from .sharing import AutoSharing

if TYPE_CHECKING:  # imports torch.distributed, needed only with several ranks
    from .shards import RankGroup, Shard


@dataclass(frozen=True)
class Simulation:
    """A config's swarm in lockstep; iterate over `rounds()` to run it."""

    config: Config
    members: list[Member]
    """The peers, each with its name, task and learner."""
    mixing: Mixing | None = None
    """How peers average; None for the exact mean of all peers that share a partial model."""
    stores: list[MatchedStore] | None = None
    """A store for each peer, if a partial model is averaged at a common width."""
    wire: Wire | None = None
    """How values are transmitted, if peers send simulated messages; None if they average by matrices."""
    sharing: AutoSharing | None = None
    """Decides what peers share, with `sharing = "auto"`."""
    shard: Shard | None = None
    """Which peers of the config `members` are, if the others are on other ranks."""

    @classmethod
    def of(
        cls,
        config: Config,
        source: str = "config",
        *,
        warn: bool = True,
        ranks: RankGroup | None = None,
        load_data: Callable[..., Dataset | PeerDatasets] = load_or_stream,
    ) -> Simulation:
        """Build every peer of a config; raise ConfigError if the peers will not fit into memory.

        A config with [time] or [sweep] is refused, because it is not a single run in lockstep.

        warn: whether to print a warning about keys that have no effect in lockstep.
        ranks: the processes among which the peers are divided; this process builds its own only.
        load_data: as for `Swarm`.
        """
        if ranks is not None:
            refuse_conflicts("shards", config, source)
        if warn:
            warn_unused_keys(config, "lockstep", source)
        if ranks is not None:
            return cls._of_rank(config, source, ranks)
        _check_memory(config, source)
        members, stores = matched_members(Swarm(config, source, load_data))
        models, gossip = shared_models(members), config.gossip
        if gossip.mode == "steady":
            graph = push_graph(config, members, source)
            mixing: Mixing | None = Steady(graph, pushes_of(config), gossip.hostile)
        elif gossip.robust != "none":
            mixing = robust_mixing(config, models, source)
        else:
            mixing = _mixing_on_graph(config, models, source)
            sharing = _auto_sharing(config, members, source) if config.sharing == "auto" else None
            if not gossip.lossy_keys:
                return cls(config, members, mixing, stores, sharing=sharing)
            mixing = _mixing_over_wire(config, members, mixing, source)
        return cls(config, members, mixing, stores, Wire.of(gossip))

    @classmethod
    def _of_rank(cls, config: Config, source: str, ranks: RankGroup) -> Simulation:
        """Build the peers of this rank; raise ConfigError if the ranks differ in config or data."""
        from .shards import Shard, divide_peers, facts_of, require_agreement

        require_agreement(ranks, facts_of(config), source)
        if config.peers < ranks.count:
            raise ConfigError(
                f"{source}: key 'peers': {config.peers} cannot be divided among {ranks.count} ranks; start "
                "fewer ranks"
            )
        # Peers are divided before they are built, so their partial models, which `bridge` needs, are not
        # known yet. The links that it would add are few, and the division does without them.
        unbridged = swarm_graph(config.model_copy(update={"bridge": False}), {}, source)
        rank_of = divide_peers(config.peers, ranks.count, unbridged and unbridged.graph)
        own_peers = np.flatnonzero(rank_of == ranks.rank).tolist()
        _check_memory(config, source, ranks)
        swarm = Swarm(config, source, only=own_peers)
        data = {} if config.data.set == "sparse" else {"key 'data.set'": swarm.dataset.checksum()}
        links = [] if unbridged is None else sorted(map(sorted, unbridged.graph.edges))
        digest = hashlib.sha256(json.dumps(links).encode()).hexdigest()[:12]
        require_agreement(ranks, data | {"the graph of key 'topology'": digest}, source)
        members = swarm.members()
        shard = Shard(ranks, rank_of, [member.network for member in members])
        mixing = _mixing_on_graph(config, shard.models, source)
        return cls(config, members, mixing, shard=shard)

    def peers(self) -> list[PeerFacts]:
        """Return the facts of all peers; on a rank other than 0, of its own peers only."""
        facts = [PeerFacts.of(member) for member in self.members]
        return (None if self.shard is None else self.shard.by_peer_on_first(facts)) or facts

    def arena(self, threads: int | None = None) -> Arena:
        """Put the members into an arena; the number of threads does not affect the result."""
        config = self.config
        by_samples = config.weights == "samples"
        weights = [member.samples for member in self.members] if by_samples else None
        twins = choose_twins(config.gain, config.peers, config.seed)
        if self.shard is not None:
            twins = [index for index, peer in enumerate(self.shard.own_peers) if peer in twins]
        return Arena(
            [member.learner for member in self.members],
            every=config.every,
            weights=weights,
            test_every=config.test_every,
            mixing=self.mixing,
            stores=self.stores,
            wire=self.wire,
            sharing=self.sharing,
            threads=threads,
            twins=twins,
            shard=self.shard,
        )

    def graph(self) -> nx.Graph | None:
        """Return the graph of the config's topology; None if it has none.

        If links change from step to step, it has all links of a period, or of MAX_STEPS without one.
        """
        if self.config.topology is None or not isinstance(self.mixing, Gossip | Steady | Robust):
            return None
        links = self.mixing.graph
        if links is None:
            return None
        return links.union(0, links.period or MAX_STEPS) if isinstance(links, Schedule) else links

    def rounds(
        self, arena: Arena | None = None, callbacks: Sequence[Callback] = ()
    ) -> Iterator[Round]:
        """Run the config's rounds, in a new arena if none is given.

        With several ranks, rank 0 yields the metrics of all peers, and the others those of their own.

        callbacks: see Arena.run. Those that the config names are made by `simulate`.
        """
        for round in (arena or self.arena()).run(self.config.round_count, callbacks):
            yield round if self.shard is None else self.shard.gather_round(round)


def _check_memory(config: Config, source: str, ranks: RankGroup | None = None) -> None:
    """Raise ConfigError if the peers of this process will not fit into memory."""
    free = free_memory(torch.device("cpu"))
    if ranks is not None:
        from .shards import ranks_on_this_machine

        config = config.model_copy(update={"peers": -(-config.peers // ranks.count)})
        free //= ranks_on_this_machine()
    try:
        minimum_memory(config).check_fits(free)
    except ModelError as error:
        raise ConfigError(f"{source}: key 'peers': {error}") from None


def _auto_sharing(config: Config, members: Sequence[Member], source: str) -> AutoSharing:
    """Return the object that decides what peers share; ConfigError if another key does not allow that."""
    refuse_conflicts("auto", config, source)
    sharing = AutoSharing(seed=config.seed, dry_run=config.dry_run, keep_models=bool(config.models))
    try:
        assignment = sharing.first_assignment([member.learner for member in members])
    except ModelError as error:
        raise ConfigError(f"{source}: key 'sharing': {error}") from None
    if text := by_hand_text(assignment):
        console.warn(text)
    if text := untrained_text(check_learner(members[0].learner)):
        console.warn(text)
    return sharing


def minimum_memory(config: Config) -> MemoryNeeds:
    """Return a lower bound of the memory that a config's swarm needs, without loading data."""
    layout = config.network.layout
    try:
        if "<>" in layout:
            module = AssociativeNetwork(layout)
            features, parameters = module.hidden.shape[1], 2 * module.hidden.numel()
        else:
            cells = Layout.network(layout).cells
            features = cells[0]
            parameters = sum((inputs + 1) * outputs for inputs, outputs in pairwise(cells))
    except ModelError:
        features = parameters = 0  # building the network will raise an error that names the key
    if config.network.name_or_entry:  # its size is known only when it is built; the arena checks it
        features = parameters = 0
    peers, data = config.peers, config.data
    bytes_per_sample = 4 * features + 8  # float32 inputs and an int64 label
    # A slice that is not the whole network has an index for every coordinate; peers with equal slices
    # share it.
    shares_everything = [model.layout for model in config.models] == [layout.replace("=", "-")]
    return estimate_memory(
        peers=peers,
        parameters=parameters,
        optimizer_values={"momentum": 1, "adam": 2}.get(str(config.training.optimizer), 0),
        sample_bytes=peers * (data.samples or 0) * bytes_per_sample,
        index_bytes=0 if shares_everything or not config.models else 8 * parameters,
    )


def robust_mixing(config: Config, peers_of_model: Mapping[str, list[int]], source: str) -> Robust:
    """Return how peers combine values with gossip.robust: on the config's graph, or through a server."""
    check_robust(config, source)
    gossip, remedy = config.gossip, "with gossip.robust; name one graph"
    graph = fixed_graph(config, peers_of_model, source, remedy)  # refuses a topology with a server
    if gossip.mode == "server":
        return Robust(gossip.robust, hostile=gossip.hostile)
    return Robust(gossip.robust, graph, gossip.exchanges or 1, gossip.hostile)


def _mixing_on_graph(
    config: Config, peers_of_model: Mapping[str, list[int]], source: str
) -> Gossip | None:
    """Return how peers average on the config's graph; None for exact means, if it sets no graph or rule."""
    if config.topology is None and not config.bridge and config.gossip.rule == "push":
        return None
    return mixing_of(config, peers_of_model, source)


def _mixing_over_wire(
    config: Config, members: list[Member], mixing: Mixing | None, source: str
) -> Mixing:
    """Return how peers average in lockstep if their values change on the way.

    That is with `compress`, `drift` or `dtype`: peers then send messages, as live peers do, instead of
    computing the exact mean.

    mixing: that of the config's topology, if it has one. Without a topology, live peers push equal parts to
    all peers in `rounds` mode, and send all their mass to one server in `server` mode.
    """
    lossy_key = config.gossip.lossy_keys[0]
    refuse_conflicts("messages", config, source)
    check_compression(config, members, shared_models(members), source)
    if mixing is not None:
        return mixing
    if config.gossip.mode == "server":
        return Server()
    if config.gossip.mode == "rounds":
        complete = nx.complete_graph(config.peers)
        return Gossip(complete, exchanges=config.gossip.exchanges or 1)
    raise ConfigError(
        f"{source}: key 'gossip.{lossy_key}': without a topology and a [time] table async peers "
        'are averaged exactly, and send no messages; add one of them, or use mode = "rounds" or "server"'
    )


def simulate(
    simulation: Simulation,
    results: Results,
    *,
    networks: bool = False,
    on_round: Callable[[Round], None] = lambda _: None,
    callbacks: Sequence[Callback] = (),
    checkpoint_every: int | None = None,
    resume: Path | None = None,
    source: str = "config",
) -> list[Path]:
    """Run a simulation in lockstep, write its results, and return the paths of the files.

    Always written are config.json, peers.json, metrics.jsonl, summary.csv, accuracy.png and accuracy.svg. If
    values are compressed, rounded or skipped, traffic.csv has the bytes of each shared model. If peers decide
    what they share, every decision is printed, and sharing.json has all of them. If peers have lone twins,
    gain.json has what these peers gained by the last test. After Ctrl-C, the files hold the results so far,
    and KeyboardInterrupt is raised again.

    networks: whether every peer's network is saved too, as safetensors.
    on_round: called after every round; with several ranks, on rank 0, with the metrics of all peers.
    callbacks: follow the run, as those do that the config names, and may stop it.
    checkpoint_every: rounds from one checkpoint to the next; they are written to checkpoint.safetensors. If
        left out, a run that is resumed writes them as often as before.
    resume: the folder of an earlier run, which is continued from its checkpoint: its records up to there are
        copied, and those of the other rounds are the same, bit for bit, as without the interruption. Raises
        ConfigError, which names the key, if the config is another one.
    source: the config's file, with whose named files the checkpoint is compared.
    """
    # Before the results folder is created, since this raises if memory is too small.
    arena, peers = simulation.arena(), simulation.peers()
    earlier: list[dict[str, Any]] = []
    if resume is not None or checkpoint_every:
        refuse_conflicts("checkpoints", simulation.config, source)
    if resume is not None:
        earlier, interval = _resume(simulation, arena, resume, source)
        checkpoint_every = checkpoint_every or interval
    wire, graph, shard = arena.wire_simulation, simulation.graph(), simulation.shard
    if shard is not None and shard.rank:
        return _simulate_other_rank(simulation, arena, shard, networks)
    traffic = None if wire is None else wire.traffic_by_model
    with open_run_folder(
        simulation.config, simulation.members, peers, graph, results, networks, traffic
    ) as (file, written):
        console.warn(f"{arena.needs()}{' on rank 0' if shard is not None else ''}")
        gains: Sequence[Gain] = ()
        for record in earlier:
            file.write(record)
        try:
            with _write_sharing(arena.sharing, results.folder) as print_new_decisions:
                callback_list = all_callbacks(callbacks, simulation.config, results.folder)
                for round in simulation.rounds(arena, callback_list):
                    gains = round.gains or gains
                    gain_records = {gain.peer: gain_record(gain) for gain in round.gains}
                    for peer, test in zip(
                        peers, round.tests, strict=False
                    ):  # some rounds have none
                        record = test_record(peer, test) | gain_records.get(peer.name, {})
                        file.write({"round": round.index, **record})
                    print_new_decisions()
                    on_round(round)
                    if round.stopped_by and round.index < (rounds := simulation.config.round_count):
                        console.warn(
                            f"stopped by callback {round.stopped_by} after round {round.index} of {rounds}"
                        )
                    if checkpoint_every and round.index % checkpoint_every == 0:
                        save_checkpoint(
                            results.folder / CHECKPOINT_FILE,
                            _checkpoint_tree(simulation.config, arena, source, checkpoint_every),
                        )
        finally:
            written += write_gains(results.folder, gains, len(peers))
        for sentence in arena.one_by_one():
            console.warn(sentence)
        if shard is not None:
            shard.ranks.all_gather(str(results.folder.resolve()))
    if arena.sharing is not None:
        written.append(results.folder / SHARING_FILE)
    return written


CHANGEABLE_KEYS = ("name", "rounds", "callbacks")
"""Keys of a config that may change when a run is continued from its checkpoint."""


def _checkpoint_tree(config: Config, arena: Arena, source: str, interval: int) -> dict[str, Any]:
    """Return what a checkpoint of a simulation holds; interval: rounds from one checkpoint to the next."""
    return {
        "arena": arena.state(), "gossamer": __version__, "config": config.model_dump(mode="json"),
        "files": fingerprint(_without_callbacks(config), source), "interval": interval,
    }  # fmt: skip


def _resume(
    simulation: Simulation, arena: Arena, folder: Path, source: str
) -> tuple[list[dict[str, Any]], int]:
    """Let an arena continue from an earlier run's checkpoint.

    Returns the records of the rounds before it, and the rounds from one of its checkpoints to the next.
    """
    config, path = simulation.config, folder / CHECKPOINT_FILE
    try:
        tree = read_arena_state(path)
    except ModelError as error:
        raise ConfigError(f"--resume {folder}: {error}") from None
    current = config.model_dump(mode="json")
    fixed = [
        {key: table.get(key) for key in current if key not in CHANGEABLE_KEYS}
        for table in (tree["config"], current)
    ]
    if key := differing_key(*fixed):
        raise ConfigError(
            f"{source}: key {key!r}: {path} is from a run with another value; continue with "
            f"the same config, which is in {folder / 'config.json'}"
        )
    if tree["files"] != fingerprint(_without_callbacks(config), source):
        raise ConfigError(
            f"{source}: a file or module that it names has changed since {path} was written; run it from "
            "the beginning, without --resume"
        )
    try:
        arena.restore(tree["arena"])
    except ModelError as error:
        raise ConfigError(f"{source}: {path}: {error}") from None
    last = tree["arena"]["round"]
    if last >= config.round_count:
        raise ConfigError(
            f"{source}: key 'rounds': {path} is of round {last}, so nothing is left to run; raise 'rounds'"
        )
    console.warn(f"continues after round {last} of {folder.resolve()}")
    records = read_records(folder / "metrics.jsonl")
    return [record for record in records if record["round"] <= last], tree["interval"]


def _simulate_other_rank(
    simulation: Simulation, arena: Arena, shard: Shard, networks: bool
) -> list[Path]:
    """Run a simulation on a rank other than 0, which writes at most the networks of its own peers.

    They are in the folder of rank 0; on another machine, in a folder of the same name.
    """
    for _ in simulation.rounds(arena):
        pass
    folder, *_ = shard.ranks.all_gather("")
    return save_networks(simulation.members, make_folder(Path(folder))) if networks else []


@contextmanager
def _write_sharing(sharing: AutoSharing | None, folder: Path) -> Iterator[Callable[[], None]]:
    """Write all decisions about sharing to a file when the run ends.

    Yields a function that prints the decisions since its last call.
    """
    printed = 0

    def print_new_decisions() -> None:
        nonlocal printed
        for sentence in [] if sharing is None else sharing.sentences()[printed:]:
            console.warn(sentence)
            printed += 1

    if sharing is not None and sharing.reason:
        console.warn(f"everything stays shared as it is: {sharing.reason}")
    try:
        yield print_new_decisions
    finally:
        if sharing is not None:
            write_json(folder / SHARING_FILE, sharing.as_record())


def _without_callbacks(config: Config) -> Config:
    """Return a config without its callbacks, which a resumed run may change."""
    return config.model_copy(update={"callbacks": ()})
