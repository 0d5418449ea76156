"""Run a config in the arena, the simulator of swarms in one process, and write its results.

There are two ways to run it. `Simulation` runs in lockstep: round by round, all peers train, then average.
`LearningSimulation`, for a config with a [time] table, runs in virtual time, a simulated clock: each peer
trains at its own pace and gossips by the rules of live peers.

In virtual time, a training job (the local steps of one peer) begins with the peer's current values. Mass that
arrives during the job is mixed into the peer's values, not into the job. When the job ends, the change that
training made is added to the peer's values, as push-sum allows. So the jobs of different peers are
independent, and their results are needed only when a job ends. Then all jobs that have begun are trained
together, stacked in an arena.

`source`, an argument of many functions, is the path of the config's file: errors and warnings begin with it,
and files that the config names are looked for in its folder.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
import torch

from gossamer import __version__

from ...gossip import ONE, Array, DictStore, Partition, SteadyMode
from ...gossip.compress import Shapes, Traffic
from ...models import (
    AssociativeNetwork,
    Callback,
    CallbackList,
    Gain,
    Layout,
    Metrics,
    ModelError,
    Progress,
    Scorer,
    SwarmGain,
    as_record,
    make_callbacks,
)
from ...models.sharing import by_hand_text, check_learner, untrained_text
from ...models.stack import MemoryNeeds, estimate_memory, free_memory
from ...peer import MatchedStore, blocks, save_checkpoint, schema_entries
from ...topology import Event, Schedule, TopologyError, draw_events, read_events
from ..build import (
    Member,
    PeerFacts,
    Swarm,
    check_compression,
    choose_twins,
    members_in_order,
    refuse_auto_sharing,
    require_push,
    shared_models,
    write_peers,
)
from ..cli import console
from ..config.named_files import fingerprint
from ..config.needs import warn_unused_keys
from ..config.tables import Churn, Config, ConfigError, Time
from ..data import Dataset, PeerDatasets, load_or_stream
from ..graphs.swarm import (
    WINDOW,
    check_robust,
    graph_of,
    pushes_of,
    steady_graph,
    swarm_graph,
)
from ..results import (
    PEERS_FILE,
    SHARING_FILE,
    RecordFile,
    Results,
    atomic_path,
    make_folder,
    read_records,
    write_csv,
    write_json,
)
from .arena import Arena, Round, Twins, read_arena_state
from .events import EventSimulator, VirtualTime, Wire, score_of
from .lockstep import Gossip, Mixing, Robust, Server, Steady
from .network import Conditions, TimeError, World
from .network import parse as parse_distribution
from .sharing import AutoSharing
from .vectorised import VectorisedPushSum

if TYPE_CHECKING:  # imports torch.distributed, needed only with several ranks
    from .shards import RankGroup, Shard

# --- in lockstep ------------------------------------------------------------------------------------


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
            refuse_in_shards(config, source)
        if warn:
            warn_unused_keys(config, "lockstep", source)
        if ranks is not None:
            return cls._of_rank(config, source, ranks)
        _check_memory(config, source)
        members, stores = members_in_order(Swarm(config, source, load_data))
        if config.gossip.mode == "steady":
            graph = _graph(config, members, source)
            mixing = Steady(graph, pushes_of(config), config.gossip.hostile)
            return cls(config, members, mixing, stores, _wire_of(config))
        if config.gossip.robust != "none":
            mixing = robust_mixing(config, shared_models(members), source)
            return cls(config, members, mixing, stores, _wire_of(config))
        mixing = None
        if config.topology is not None or config.bridge or config.gossip.rule != "push":
            from ..graphs import mixing_of  # scipy is slow to import, and needed only with a graph

            mixing = mixing_of(config, shared_models(members), source)
        sharing = _auto_sharing(config, members, source) if config.sharing == "auto" else None
        if not config.gossip.lossy_keys:
            return cls(config, members, mixing, stores, sharing=sharing)
        mixing = _mixing_over_wire(config, members, mixing, source)
        return cls(config, members, mixing, stores, _wire_of(config))

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
        unchecked = swarm_graph(config.model_copy(update={"bridge": False}), {}, source)
        rank_of = divide_peers(config.peers, ranks.count, unchecked and unchecked.graph)
        own = np.flatnonzero(rank_of == ranks.rank).tolist()
        _check_memory(config, source, ranks)
        swarm = Swarm(config, source, only=own)
        data = {} if config.data.set == "sparse" else {"key 'data.set'": swarm.dataset.checksum()}
        links = [] if unchecked is None else sorted(map(sorted, unchecked.graph.edges))
        digest = hashlib.sha256(json.dumps(links).encode()).hexdigest()[:12]
        require_agreement(ranks, data | {"the graph of key 'topology'": digest}, source)
        members = swarm.members()
        shard = Shard(ranks, rank_of, [member.network for member in members])
        mixing = None
        if config.topology is not None or config.bridge or config.gossip.rule != "push":
            from ..graphs import mixing_of

            mixing = mixing_of(config, shard.models, source)
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
            twins = [index for index, peer in enumerate(self.shard.own) if peer in twins]
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

        If links change from step to step, it has all links of a period, or of WINDOW steps without one.
        """
        if self.config.topology is None or not isinstance(self.mixing, Gossip | Steady | Robust):
            return None
        links = self.mixing.graph
        if links is None:
            return None
        return links.union(0, links.period or WINDOW) if isinstance(links, Schedule) else links

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


def refuse_in_shards(config: Config, source: str) -> None:
    """Raise ConfigError, which names the key, if a config cannot be simulated over several ranks."""
    gossip = config.gossip
    messages = "messages are simulated in one process"
    # Keys that several ranks do not support: why not, and whether the config uses them.
    reasons = {
        "time": ("virtual time is simulated in one process", config.time is not None),
        "callbacks": ("callbacks see all peers", bool(config.callbacks)),
        "sharing": ("what peers share is decided in one process", config.sharing == "auto"),
        "fednp": ("FedNP is simulated in one process", config.fednp is not None),
        "training.metrics": ("named metrics are not sent to rank 0", bool(config.training.metrics)),
        "training.prior": ('"auto" compares the labels of all peers', config.training.prior == "auto"),
        "gossip.mode": (messages, gossip.mode == "steady"),
        "gossip.robust": (messages, gossip.robust != "none"),
        **{f"gossip.{key}": (messages, True) for key in gossip.lossy_keys},
        **{
            f"models.{number}.matching": ("cells are matched in one process", model.matching != "none")
            for number, model in enumerate(config.models)
        },
    }  # fmt: skip
    for key, (reason, is_used) in reasons.items():
        if is_used:
            raise ConfigError(
                f"{source}: key {key!r}: not over several processes: {reason}; leave out the key, or use one "
                "process"
            )


def _auto_sharing(config: Config, members: Sequence[Member], source: str) -> AutoSharing:
    """Return the object that decides what peers share; ConfigError if another key does not allow that."""
    # Keys that cannot be combined with it: what each asks for, and whether the config uses it.
    refused = {
        "data.set": ("sparse vectors, which are not learned by gradients", config.data.set == "sparse"),
        "fednp": ("FedNP, whose loss is not a sum over samples", config.fednp is not None),
        "training.proximal": ("a penalty beside the loss of samples", config.training.proximal > 0),
        "network.sizes": ("networks of several sizes", bool(config.network.sizes)),
        **{
            f"models.{number}.matching": ("matched cells", model.matching != "none")
            for number, model in enumerate(config.models)
        },
        **{f"gossip.{key}": ("inexact or skipped messages", True) for key in config.gossip.lossy_keys},
    }  # fmt: skip
    for key, (feature, is_used) in refused.items():
        if is_used:
            raise ConfigError(
                f"{source}: key 'sharing': peers cannot decide what they share with {feature} ({key}); "
                "leave one of them out"
            )
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


# --- in virtual time --------------------------------------------------------------------------------

_TIME_TOLERANCE = 1e-9
"""The relative error that the time of an event may have. An event at the very end of a run is still processed
if its time was rounded up."""


@dataclass(frozen=True)
class PeerTestResult:
    """The result of one test of a peer in virtual time.

    time: the virtual time of the test. round: the rounds that the peer had trained by then.
    """

    time: float
    round: int
    peer: int
    metrics: Metrics


@dataclass
class _Job:
    """A training job: the local steps of one peer.

    start: the peer's values of shared models when the job began.
    test: the test that was due when the job began, if any; its metrics are empty until it is run.
    flat_before: all parameters of the network before training; None until the job is computed.
    after: the values of shared models after training; None until the job is computed.
    """

    start: dict[str, Array]
    test: PeerTestResult | None
    flat_before: torch.Tensor | None = None
    after: dict[str, Array] | None = None


class ArrayJobs:
    """The training jobs of all peers as rows of arrays, and gossip on arrays: no object per job or message.

    For stacked peers that all share one partial model, never leave, and send values that nothing rounds or
    compresses. It does with them what `LearningSimulation` does with a `_Job` and a Gossiper for each peer.

    swarm: the peers' gossip; its estimates are the peers' values of the shared model.
    arena: trains and tests. parameters: of all peers, a row each, in the arena's own memory.
    model, shared: the partial model, and its coordinates among a peer's parameters.
    is_due: (peers, times, rounds) → whether a test is due when a job begins.
    report: called with the result of every test. options: further arguments of VectorisedPushSum.
    """

    def __init__(
        self,
        arena: Arena,
        parameters: torch.Tensor,
        model: str,
        shared: slice | np.ndarray,
        is_due: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
        report: Callable[[PeerTestResult], None],
        **options: Any,
    ):
        peers, all_coordinates = parameters.shape
        self.model, self._arena, self._parameters = model, arena, parameters
        self._shared = shared if isinstance(shared, slice) else torch.from_numpy(np.array(shared))
        private = np.delete(np.arange(all_coordinates), shared)
        self._private = torch.from_numpy(private)
        self._private_before = parameters[:, self._private].clone()
        values = parameters[:, self._shared].numpy()
        self.swarm = VectorisedPushSum(
            values, dtype=values.dtype.type, on_trained=self._finish, **options
        )
        self._values = torch.from_numpy(self.swarm.estimates)
        self._start = self._values.clone()
        self.rounds = np.zeros(peers, np.int64)
        self._credits = self.swarm.credits.copy()
        self._computed = np.zeros(peers, bool)
        self._is_due, self._report = is_due, report
        self._begun = np.zeros(peers)
        self._due = np.zeros(peers, bool)
        self._tests: dict[int, PeerTestResult] = {}
        self._finished_tests: list[tuple[float, int, PeerTestResult]] = []

    def run(self, seconds: float) -> None:
        """Let virtual time pass, then undo the jobs that have not ended.

        A test is reported when the job after it has ended; the others at the end, by peer.
        """
        interval = self.swarm.world.conditions.push_interval
        while self.swarm.now < seconds:
            self.swarm.advance(min(self.swarm.now + _WINDOW * interval, seconds))
            for *_, test in sorted(self._finished_tests, key=lambda each: each[:2]):
                self._report(test)
            self._finished_tests.clear()
        self._begin_training(
            np.flatnonzero(~self._computed)
        )  # runs the tests before jobs that do not end
        for _, test in sorted(self._tests.items()):
            self._report(test)
        self.write_networks()

    def write_networks(self) -> None:
        """Write the peers' values into their networks, without what jobs that have not ended changed."""
        undone = torch.from_numpy(np.flatnonzero(self._computed))
        if len(self._private):
            self._parameters[undone[:, None], self._private] = self._private_before[undone]
        self._parameters[:, self._shared] = self._values

    def values_sent(self) -> int:
        """Return how many values were sent so far."""
        return self.swarm.counters["transfer"] * self._values[0].numel()

    def _finish(self, peers: np.ndarray, times: np.ndarray) -> None:
        """Finish the jobs of some peers: add their changes to the peers' values, and begin the next jobs."""
        if not self._computed[peers].all():
            self._train(np.flatnonzero(~self._computed))
        is_mixed = self.swarm.credits[peers] != self._credits[peers]
        for rows, mixed in ((peers[~is_mixed], False), (peers[is_mixed], True)):
            for block in torch.from_numpy(rows).split(_BLOCK_ROWS):
                after = self._parameters.index_select(0, block)[:, self._shared]
                if mixed:
                    after -= self._start.index_select(0, block)
                    after += self._values.index_select(0, block)
                self._values.index_copy_(0, block, after)
                self._start.index_copy_(0, block, after)
        for peer, time in zip(peers.tolist(), times.tolist(), strict=True) if self._tests else ():
            if (test := self._tests.pop(peer, None)) is not None:
                self._finished_tests.append((time, peer, test))
        self.rounds[peers] += 1
        self._credits[peers] = self.swarm.credits[peers]
        self._computed[peers] = False
        self._begun[peers] = times
        self._due[peers] = self._is_due(peers, times, self.rounds[peers])

    def _begin_training(self, peers: np.ndarray) -> None:
        """Write the values with which jobs began into the networks, and run the tests that are due."""
        for block in torch.from_numpy(peers).split(_BLOCK_ROWS):
            start = self._start.index_select(0, block)
            if isinstance(self._shared, slice):
                self._parameters[:, self._shared].index_copy_(0, block, start)
            else:
                self._parameters[block[:, None], self._shared] = start
        due = peers[self._due[peers]].tolist()
        for peer, metrics in zip(due, self._arena.test(due), strict=True):
            self._tests[peer] = PeerTestResult(
                float(self._begun[peer]), int(self.rounds[peer]), peer, metrics
            )
        self._due[peers] = False

    def _train(self, peers: np.ndarray) -> None:
        """Compute the jobs of some peers."""
        self._begin_training(peers)
        if len(self._private):
            rows = torch.from_numpy(peers)
            self._private_before[rows] = self._parameters[rows[:, None], self._private]
        self._computed[peers] = (
            True  # set before training, so that an interrupted training is undone
        )
        self._arena.train(peers.tolist())


_WINDOW = 4
"""Push intervals whose events are computed at once on arrays: more make better use of each call, and keep
more transfers in memory."""
_BLOCK_ROWS = 32
"""Rows of arrays that are read, changed and written at once, while they are in the cache."""


class LearningSimulation:
    """A config's swarm in virtual time; `run` runs it, once only.

    threads: the threads that train peers in parallel; they do not affect the result.
    arrays: whether gossip may be computed on arrays, which is faster and differs only in rounding. It is if
        all peers are stacked and share one partial model, none leaves, messages are exact, the mode is
        async, and there are no callbacks.
    on_test: called with the result of every test, in an order that depends only on the config.

    graph: which peers may push to which.
    world: who is online, and what delays and losses messages have, at any virtual time.
    seconds: the virtual time at which the run ends.
    arrays: jobs and gossip on arrays; None if every peer has a Gossiper.
    events: simulates these Gossipers; set only if `arrays` is None.
    rounds: the number of training jobs that each peer has finished.
    tests: the accuracies of all tests so far.
    gains: what peers gained by taking part, measured at the end of the run: of those that are online and have
        a lone twin (a copy that trains without the others).
    """

    def __init__(
        self,
        config: Config,
        source: str = "config",
        *,
        threads: int = 1,
        arrays: bool = True,
        on_test: Callable[[PeerTestResult], None] = lambda _: None,
    ):
        self.config = config
        self._callbacks = CallbackList()
        self._callback_rounds, self._stopped_by = 0, ""
        self._latest_tests: dict[str, Metrics] = {}
        self._training: dict[str, Metrics] = {}
        if any(model.matching == "fuse" for model in config.models):
            raise ConfigError(
                f"{source}: key 'models': matching 'fuse' is not supported in virtual time; leave out "
                "[time], or run live peers with gossamer swarm"
            )
        require_push(config, source, "peers in virtual time", "leave out [time]")
        refuse_auto_sharing(config, source, "peers in virtual time", "leave out [time]")
        self.members, _ = members_in_order(Swarm(config, source))
        self.graph = graph = _graph(config, self.members, source)
        self.world, self.seconds = _world(config, graph, source)
        rounds = self.seconds / self.world.conditions.push_interval * (1 - _TIME_TOLERANCE)
        self._planned_rounds = math.ceil(rounds)
        self.tests = AccuracyLog(presence_of(self.world, [member.name for member in self.members]))
        self._peers_of_model = peers_of_model = shared_models(self.members)
        check_compression(config, self.members, peers_of_model, source)
        learners = [member.learner for member in self.members]
        self.gains: list[Gain] = []
        self._peers_with_twin = choose_twins(config.gain, config.peers, config.seed)
        self._twins: Twins | None = None
        if self._peers_with_twin:
            learners_with_twin = [learners[peer] for peer in self._peers_with_twin]
            self._twins = Twins(learners_with_twin, every=config.every, threads=threads)
        self._arena = Arena(learners, every=config.every, threads=threads)
        self.arrays = self._make_arrays(peers_of_model, threads) if arrays else None
        self._stores: list[DictStore] = []
        if self.arrays is None:
            self._stores, self.events = self._make_gossipers(peers_of_model)
        self._on_test = on_test
        self._jobs: dict[int, _Job] = {}
        self.rounds = [0] * len(self.members)
        # Tests are due by virtual time, not by rounds; otherwise slow peers would hardly ever be tested. Time
        # is divided into intervals; this is, for each peer, the interval in which its last job began.
        self._test_intervals = np.zeros(len(self.members))

    def _weights(self) -> list[int]:
        """The push-sum weight with which each peer begins."""
        by_samples = self.config.weights == "samples"
        return [ONE * (member.samples if by_samples else 1) for member in self.members]

    def _make_arrays(
        self, peers_of_model: Mapping[str, Sequence[int]], threads: int
    ) -> ArrayJobs | None:
        """Return the jobs as arrays; None if peers need a Gossiper each."""
        config, parameters = self.config, self._arena.stacked_values()
        lossy = config.gossip.mode == "steady" or config.gossip.lossy_keys
        if lossy or self.world.churns or parameters is None or len(peers_of_model) != 1:
            return None
        ((model, peers),) = peers_of_model.items()
        slicings = {id(member.network.slicing): member.network.slicing for member in self.members}
        shared, *others = (
            slicing.coordinates_or_slice(model)
            for slicing in slicings.values()
            if model in slicing.averaged_models
        )
        if len(peers) < config.peers or any(not _are_equal(shared, other) for other in others):
            return None
        return ArrayJobs(
            self._arena, parameters, model, shared, self._are_due, self._report,
            graph=self.graph, conditions=self.world.conditions, seed=config.seed, threads=threads,
            weights=np.array(self._weights()), fanout=pushes_of(config), fraction=config.gossip.fraction,
            window=_WINDOW * self.world.conditions.push_interval,
        )  # fmt: skip

    def _make_gossipers(
        self, peers_of_model: Mapping[str, Sequence[int]]
    ) -> tuple[list[DictStore], VirtualTime]:
        """Return the stores and the gossipers of all peers."""
        config = self.config
        shared_values: list[dict[str, Array]] = [{} for _ in self.members]
        shapes: dict[str, Shapes] = {}
        for model, peers in peers_of_model.items():
            shapes[model] = blocks(schema_entries(self.members[peers[0]].network, model))
            for peer in peers:
                values = self.members[peer].network.read(model)
                shared_values[peer][model] = values.cpu().numpy()
        stores = [DictStore(values) for values in shared_values]
        return stores, VirtualTime(
            self.world,
            self.graph,
            peers_of_model,
            stores,
            self._weights(),
            fanout=pushes_of(config),
            fraction=config.gossip.fraction,
            steady=self._steady_mode if config.gossip.mode == "steady" else None,
            wire=replace(_wire_of(config), shapes=shapes),
            on_trained=self._finish_job,
            on_arrival=self._begin_job,
        )

    def traffic_by_model(self) -> list[tuple[str, int, Traffic]]:
        """Return, for each model that was sent, its name, the bytes sent, and statistics of compression."""
        if self.arrays is None:
            return self.events.traffic_by_model()
        sent = self.arrays.values_sent() * np.dtype(self.config.gossip.dtype).itemsize
        return [(self.arrays.model, sent, Traffic())]

    def _steady_mode(self, peer: int) -> SteadyMode:
        """Return a new SteadyMode, for a peer's next session."""
        gossip = self.config.gossip
        return SteadyMode(
            pushes_of(self.config), hostile=gossip.hostile, score=partial(self._score, peer)
        )

    def _score(self, peer: int, model: str, value: Array | None) -> float:
        """Return a peer's current loss on its own samples; `value` replaces its values of `model`, if given.

        During a training job, the parameters that are not shared are those from before the job.
        """
        learner, store = self.members[peer].learner, self._stores[peer]
        network, job = self.members[peer].network, self._jobs.get(peer)
        flat = network.flat.clone()
        if job is not None and job.flat_before is not None:
            network.flat.copy_(job.flat_before)
        for each in store.names():
            network.write(each, store.read(each))
        try:
            return score_of(learner, model, value)
        finally:
            network.flat.copy_(flat)

    def run(self, callbacks: Sequence[Callback] = ()) -> None:
        """Run for the config's virtual time, then test every peer that is online.

        callbacks: follow the run, and may stop it; see gossamer.models.Callback. A round of theirs is one
            push interval, the mean time that a peer trains between two pushes. Every `test_every` rounds
            they get the latest test of each online peer; a test is known once the job after it has ended.
            Arrays compute many events at once, so runs with callbacks use Gossipers.
        """
        self._callbacks = CallbackList(callbacks)
        if self._callbacks and self.arrays is not None:
            self.arrays = None
            self._stores, self.events = self._make_gossipers(self._peers_of_model)
        end = self.seconds * (1 + _TIME_TOLERANCE)
        try:
            if self.arrays is not None:
                self.arrays.run(end)
                self.rounds = self.arrays.rounds.tolist()
            else:
                for peer in self._online(0.0):
                    self._begin_job(peer, 0.0)
                if self._callbacks.start(self._progress(0.0)):
                    self.seconds, self._stopped_by = 0.0, "start"
                else:
                    self.events.run(end, self._follow)
                self._drop_unfinished_jobs()
                self._write_networks()
            online = self._online(self.seconds)
            for peer, metrics in zip(online, self._arena.test(online), strict=True):
                self._report(PeerTestResult(self.seconds, self.rounds[peer], peer, metrics))
            if not self._stopped_by:
                self._callback_rounds += 1
                self._callbacks.round(self._progress(self.seconds))
            if self._stopped_by in ("", "round"):
                self._callbacks.test(self._progress(self.seconds, tested=True))
        finally:
            self._callbacks.end()
        self._measure_gains(online)

    def _follow(self) -> bool:
        """Call the callbacks after a push interval; return whether to stop, and set `seconds` then."""
        now = self.events.now
        if not self._callbacks or now >= self.seconds * (1 - _TIME_TOLERANCE):
            return False
        self._callback_rounds += 1
        with self._current_networks():
            is_due = self._callback_rounds % self.config.test_every == 0
            tested = self._progress(now, tested=True)
            if self._callbacks.round(self._progress(now)):
                self._stopped_by = "round"
            elif is_due and self._latest_tests and self._callbacks.test(tested):
                self._stopped_by = "test"
        if self._stopped_by:
            self.seconds = now
        return bool(self._stopped_by)

    def _progress(self, time: float, *, tested: bool = False) -> Progress:
        """Return what callbacks are told; tested: with the latest test of every peer that is online."""
        names = [self.members[peer].name for peer in self._online(time)]
        tests = {name: self._latest_tests[name] for name in names if name in self._latest_tests}
        return Progress(
            self._callback_rounds, self._planned_rounds, [each.learner for each in self.members],
            dict(self._training), tests if tested else {}, time,
        )  # fmt: skip

    @contextmanager
    def _current_networks(self) -> Iterator[None]:
        """Let the networks have the peers' values of now, without the training that is under way."""
        flats = [member.network.flat.clone() for member in self.members]
        self.stop()
        try:
            yield
        finally:
            for member, flat in zip(self.members, flats, strict=True):
                member.network.flat.copy_(flat)

    def _measure_gains(self, online: Sequence[int]) -> None:
        """Train each twin for as many rounds as its peer, and compare the two if the peer is online."""
        if self._twins is None:
            return
        rounds = [self.rounds[peer] for peer in self._peers_with_twin]
        for round in range(max(rounds)):
            self._twins.train([twin for twin, count in enumerate(rounds) if count > round])
        gains = zip(self._peers_with_twin, self._twins.gains(), strict=True)
        self.gains = [gain for peer, gain in gains if peer in online]

    def stop(self) -> None:
        """Write the peers' current values into their networks, without the changes of unfinished jobs."""
        if self.arrays is not None:
            self.arrays.write_networks()
            return
        for peer in self._jobs:
            self._restore_network(peer)
        self._write_networks()

    def _write_networks(self) -> None:
        """Write the peers' values of shared models into their networks."""
        for peer, member in enumerate(self.members):
            for model in self._stores[peer].names():
                member.network.write(model, self._stores[peer].read(model))

    def _begin_job(self, peer: int, time: float) -> None:
        """Begin a training job with the peer's current values, and note whether a test is due before it."""
        if peer in self._jobs:
            self._restore_network(peer)  # the peer's last session ended before its training job
        store = self._stores[peer]
        start = {model: store.read(model) for model in store.names()}
        rounds = self.rounds[peer]
        (is_due,) = self._are_due(np.array([peer]), np.array([time]), np.array([rounds]))
        test = PeerTestResult(time, rounds, peer, Metrics()) if is_due else None
        self._jobs[peer] = _Job(start, test)

    def _are_due(self, peers: np.ndarray, times: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        """Note that peers begin jobs at these times; return which of them are to be tested before."""
        interval = times // (self.config.test_every * self.world.conditions.push_interval)
        is_due = (rounds > 0) & (interval > self._test_intervals[peers])
        self._test_intervals[peers] = interval
        # At the end, all peers are tested anyway.
        return is_due & (times < self.seconds * (1 - _TIME_TOLERANCE))

    def _finish_job(self, peer: int, time: float) -> None:
        """Finish a training job: add its change to the peer's current values, and begin the next job."""
        if self._jobs[peer].after is None:
            self._train_jobs(time)
        if (test := self._jobs[peer].test) is not None:
            self._report(test)
        job, store = self._jobs.pop(peer), self._stores[peer]
        for model, after in (job.after or {}).items():
            current, start = store.read(model), job.start[model]
            store.write(model, after if current is start else current + (after - start))
        self.rounds[peer] += 1
        self._begin_job(peer, time)

    def _train_jobs(self, time: float) -> None:
        """Train all jobs that have begun, except those of peers that have left: their jobs never end."""
        online = set(self._online(time))
        peers = [peer for peer in self._peers_with_untrained_job() if peer in online]
        self._run_due_tests(peers)
        for peer in peers:
            self._jobs[peer].flat_before = self.members[peer].network.flat.clone()
        for peer, metrics in zip(peers, self._arena.train(peers), strict=True):
            self._training[self.members[peer].name] = metrics
        for peer in peers:
            job, network = self._jobs[peer], self.members[peer].network
            job.after = {model: network.read(model).cpu().numpy() for model in job.start}

    def _peers_with_untrained_job(self) -> list[int]:
        """Return the peers whose job has begun and is not computed yet, in ascending order."""
        return [peer for peer, job in sorted(self._jobs.items()) if job.after is None]

    def _run_due_tests(self, peers: Iterable[int]) -> None:
        """Write the values with which jobs began into the networks, and run the tests that are due."""
        due: dict[int, PeerTestResult] = {}
        for peer in peers:
            job = self._jobs[peer]
            for model, value in job.start.items():
                self.members[peer].network.write(model, value)
            if job.test is not None:
                due[peer] = job.test
        for peer, metrics in zip(due, self._arena.test(list(due)), strict=True):
            self._jobs[peer].test = replace(due[peer], metrics=metrics)

    def _report(self, test: PeerTestResult) -> None:
        """Add the result of a test to `tests`, and pass it to `on_test`."""
        name = self.members[test.peer].name
        self.tests.add(name, test.time, test.round, test.metrics.accuracy)
        self._latest_tests[name] = test.metrics
        self._on_test(test)

    def _drop_unfinished_jobs(self) -> None:
        """Drop the jobs that do not end before the run does; only the tests before them are reported."""
        self._run_due_tests(self._peers_with_untrained_job())
        for peer, job in sorted(self._jobs.items()):
            self._restore_network(peer)
            if job.test is not None:
                self._report(job.test)
        self._jobs.clear()

    def _restore_network(self, peer: int) -> None:
        """Write the values from before a peer's job into its network, if the job was computed."""
        if (flat := self._jobs[peer].flat_before) is not None:
            self.members[peer].network.flat.copy_(flat)

    def _online(self, time: float) -> list[int]:
        """Return the peers that are online at a time, in ascending order."""
        return np.flatnonzero(self.world.present_at(time)).tolist()


def _are_equal(one: slice | np.ndarray, other: slice | np.ndarray) -> bool:
    """Return whether two peers have a partial model at the same coordinates."""
    if isinstance(one, slice) or isinstance(other, slice):
        return one is other or (isinstance(one, slice) and one == other)
    return one is other or np.array_equal(one, other)


# --- from configs -----------------------------------------------------------------------------------


def _world(config: Config, graph: nx.Graph, source: str) -> tuple[World, float]:
    """Return the world that a config's [time] table describes, and the virtual seconds to run.

    Raises ConfigError, which names file and key, if the table is wrong.
    """
    time = config.time or Time()
    if not config.gossip.paced:
        raise ConfigError(
            f"{source}: key 'gossip.mode': virtual time is for the modes 'async' and 'steady', not "
            f"{config.gossip.mode!r}; "
            "without a [time] table the arena averages in rounds"
        )
    try:
        training = parse_distribution(time.training, "training")
        seconds = time.seconds or config.round_count * (training.mean * config.every)
        conditions = Conditions(
            training=training,
            delay=parse_distribution(time.delay, "delay"),
            events=_churn_events(time.churn, config, graph, seconds, source),
            step=time.churn.step if time.churn else 1.0,
            partitions=tuple(
                Partition(each.start, each.end, _select_peers(each.peers, config.peers))
                for each in time.partitions
            ),
            every=config.every,
            **time.model_dump(include={"stragglers", "slowdown", "loss", "timeout"}),
        )
        return World(conditions, graph, config.seed), seconds
    except (TimeError, TopologyError) as error:
        key = "time.churn" if isinstance(error, TopologyError) else "time"
        raise ConfigError(f"{source}: key {key!r}: {error}") from None


def _wire_of(config: Config) -> Wire:
    """Return the wire that a config's [gossip] table describes."""
    return Wire(config.gossip.dtype, config.gossip.compress, config.gossip.drift)


def robust_mixing(config: Config, peers_of_model: Mapping[str, list[int]], source: str) -> Robust:
    """How peers combine values with gossip.robust: on the config's graph, or through a server."""
    check_robust(config, source)
    gossip = config.gossip
    if gossip.mode == "server":
        return Robust(gossip.robust, hostile=gossip.hostile)
    topology = swarm_graph(config, peers_of_model, source)
    graph = nx.complete_graph(config.peers) if topology is None else topology.graph
    return Robust(gossip.robust, graph, gossip.exchanges or 1, gossip.hostile)


def _mixing_over_wire(
    config: Config, members: list[Member], mixing: Mixing | None, source: str
) -> Mixing:
    """Return how peers average in lockstep if their values change on the way.

    For a config with `compress`, `drift` or `dtype`: then peers send messages, as live peers do, instead of
    computing the exact mean.

    mixing: that of the config's topology, if it has one. Without a topology, live peers push equal parts to
    all peers in `rounds` mode, and send all their mass to one server in `server` mode.
    """
    lossy_key = config.gossip.lossy_keys[0]
    require_push(config, source, "peers that send messages", f"leave out 'gossip.{lossy_key}'")
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


def _graph(config: Config, members: list[Member], source: str) -> nx.Graph:
    """Return which peers may push to each other: all, if the config has no topology."""
    if config.gossip.mode == "steady":
        if not all(isinstance(member.learner, Scorer) for member in members):
            console.warn(
                f"{source}: learners of this kind have no method score, so values of other peers are bounded "
                "by their distance alone, whatever their loss"
            )
        return steady_graph(config, shared_models(members), source)
    if config.topology is None:
        return nx.complete_graph(config.peers)
    graph = graph_of(config, shared_models(members), source)
    if graph is None:
        raise ConfigError(
            f"{source}: key 'topology': a graph that changes in steps is not supported in virtual time; name "
            "one graph, and let links fail with [time.churn]"
        )
    return graph


def _churn_events(
    churn: Churn | None, config: Config, graph: nx.Graph, seconds: float, source: str
) -> tuple[Event, ...]:
    """Return when peers and links come and go: read from the trace of [time.churn], or drawn at random."""
    if churn is None:
        return ()
    if churn.trace is not None:
        return tuple(read_events(Path(source).parent / churn.trace))
    steps = math.ceil(seconds / churn.step) + 1
    keys = ("leave", "arrive", "link_down", "link_up")
    probabilities = {key: getattr(churn, key) for key in keys}
    return tuple(draw_events(graph, steps, **probabilities, seed=config.seed))


def _select_peers(selection: int | list[int] | str, count: int) -> frozenset[int]:
    """Return the numbers of selected peers: of a list, of the first so many, or of all `count` for "all"."""
    if isinstance(selection, str):
        return frozenset(range(count))
    return frozenset(range(selection) if isinstance(selection, int) else selection)


# --- results ----------------------------------------------------------------------------------------


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
    checkpoint_every: rounds from one checkpoint to the next; they are written to checkpoint.safetensors.
    resume: the folder of an earlier run, which is continued from its checkpoint: its records up to there are
        copied, and those of the other rounds are the same, bit for bit, as without the interruption. Raises
        ConfigError, which names the key, if the config is another one.
    source: the config's file, with whose named files the checkpoint is compared.
    """
    # Before the results folder is created, since this raises if memory is too small.
    arena, members, peers = simulation.arena(), simulation.members, simulation.peers()
    earlier: list[dict[str, Any]] = []
    if resume is not None or checkpoint_every:
        _check_checkpoints(simulation, source)
    if resume is not None:
        earlier = _resume(simulation, arena, resume, source)
    simulator, graph, shard = arena.wire_simulation, simulation.graph(), simulation.shard
    if shard is not None and shard.rank:
        return _simulate_other_rank(simulation, arena, shard, networks)
    with _open_run_folder(
        simulation.config, members, peers, graph, results, networks, simulator
    ) as (
        file,
        written,
    ):
        console.warn(f"{arena.needs()}{' on rank 0' if shard is not None else ''}")
        gains: Sequence[Gain] = ()
        for record in earlier:
            file.write(record)
        try:
            with _write_sharing(arena.sharing, results.folder) as print_new_decisions:
                followers = _all_callbacks(callbacks, simulation.config, results.folder)
                for round in simulation.rounds(arena, followers):
                    gains = round.gains or gains
                    gain_records = {gain.peer: _gain_record(gain) for gain in round.gains}
                    for peer, test in zip(
                        peers, round.tests, strict=False
                    ):  # no tests in some rounds
                        record = _test_record(peer, test) | gain_records.get(peer.name, {})
                        file.write({"round": round.index, **record})
                    print_new_decisions()
                    on_round(round)
                    if checkpoint_every and round.index % checkpoint_every == 0:
                        save_checkpoint(
                            results.folder / CHECKPOINT_FILE,
                            _checkpoint_tree(simulation.config, arena, source),
                        )
        finally:
            written += _write_gains(results.folder, gains, len(peers))
        for sentence in arena.one_by_one():
            console.warn(sentence)
        if shard is not None:
            shard.ranks.all_gather(str(results.folder.resolve()))
    if arena.sharing is not None:
        written.append(results.folder / SHARING_FILE)
    return written


CHECKPOINT_FILE = "checkpoint.safetensors"
"""The file with the state of a simulation in its results folder."""
FREE_KEYS = ("name", "rounds", "callbacks")
"""Keys in which a config may differ from that of the checkpoint which it continues."""


def _checkpoint_tree(config: Config, arena: Arena, source: str) -> dict[str, Any]:
    """Return what a checkpoint of a simulation holds."""
    return {
        "arena": arena.state(), "gossamer": __version__, "config": config.model_dump(mode="json"),
        "files": fingerprint(_without_callbacks(config), source),
    }  # fmt: skip


def _check_checkpoints(simulation: Simulation, source: str) -> None:
    """Raise ConfigError, which names the key, if a simulation cannot be saved and continued."""
    config, gossip = simulation.config, simulation.config.gossip
    reasons = {
        "sharing": ("the measurements by which peers decide", config.sharing == "auto"),
        "gossip.mode": ("what peers know of their neighbours", gossip.mode == "steady"),
        "gossip.robust": ("what peers know of their neighbours", gossip.robust != "none"),
        **{f"gossip.{key}": ("what was sent over each link", True) for key in gossip.lossy_keys},
        "models": ("cells at a common width", bool(simulation.stores)),
    }
    for key, (what, is_used) in reasons.items():
        if is_used:
            raise ConfigError(
                f"{source}: key {key!r}: checkpoints do not hold {what}; leave out the key, or --checkpoint "
                "and --resume"
            )


def _resume(
    simulation: Simulation, arena: Arena, folder: Path, source: str
) -> list[dict[str, Any]]:
    """Let an arena continue from an earlier run's checkpoint; return the records of the rounds before it."""
    config, path = simulation.config, folder / CHECKPOINT_FILE
    try:
        tree = read_arena_state(path)
    except ModelError as error:
        raise ConfigError(f"--resume {folder}: {error}") from None
    saved, own = tree["config"], config.model_dump(mode="json")
    if key := _first_difference(saved, own, FREE_KEYS):
        raise ConfigError(
            f"{source}: key {key!r}: {path} is of a run with another value; continue with the same config, "
            f"which is in {folder / 'config.json'}"
        )
    if tree["files"] != fingerprint(_without_callbacks(config), source):
        raise ConfigError(
            f"{source}: a file or module that it names has changed since {path} was written; run it as a "
            "whole"
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
    return [each for each in read_records(folder / "metrics.jsonl") if each["round"] <= last]


def _first_difference(one: Any, other: Any, leave_out: Sequence[str] = ()) -> str:
    """Return the path of the first key in which two tables differ; empty if none does."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in (*one, *(key for key in other if key not in one)):
            if key in leave_out or one.get(key) == other.get(key):
                continue
            inner = _first_difference(one.get(key), other.get(key))
            return f"{key}.{inner}" if inner else str(key)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            if left != right:
                inner = _first_difference(left, right)
                return f"{index}.{inner}" if inner else str(index)
    return ""


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


def simulate_in_time(
    config: Config,
    results: Results,
    source: str = "config",
    *,
    networks: bool = False,
    threads: int = 1,
    on_test: Callable[[PeerTestResult], None] = lambda _: None,
    on_mean: Callable[[Mean, float], None] = lambda mean, seconds: None,
    callbacks: Sequence[Callback] = (),
) -> list[Path]:
    """Run a config with a [time] table in virtual time, and write the files of `simulate`.

    traffic.csv is always written, and presence.csv too: it lists when each peer was online, if peers come and
    go. If the config cannot be run, no results folder is created.

    on_test: called with the result of every test of a peer.
    on_mean: called about a hundred times, and at the end, with the mean accuracy of the online peers and the
        virtual seconds of the whole run.
    callbacks: follow the run, as those do that the config names, and may stop it; a run with callbacks is
        slower (see LearningSimulation.run).
    """
    next_mean = 0.0

    def record_test(test: PeerTestResult) -> None:
        nonlocal next_mean
        record = _test_record(run.members[test.peer], test.metrics)
        file.write({"time": test.time, "round": test.round, **record})
        on_test(test)
        if test.time >= next_mean:
            next_mean = test.time + run.seconds / _CURVE_POINTS
            on_mean(run.tests.mean(test.time), run.seconds)

    warn_unused_keys(config, "virtual", source)
    # Before the results folder is created, since this raises if the config is wrong.
    run = LearningSimulation(config, source, threads=threads, on_test=record_test)
    graph = None if config.topology is None else run.graph
    peers = [PeerFacts.of(member) for member in run.members]
    with _open_run_folder(config, run.members, peers, graph, results, networks, run) as (
        file,
        written,
    ):
        rows = (
            [peer, arrived, left]
            for peer, online_periods in run.tests.presence.items()
            for arrived, left in online_periods
        )
        write_csv(results.folder / "presence.csv", ["peer", "from", "until"], rows)
        try:
            run.run(_all_callbacks(callbacks, config, results.folder))
        except KeyboardInterrupt:
            run.stop()
            raise
        written += _write_gains(results.folder, run.gains, config.peers)
        on_mean(run.tests.mean(run.seconds), run.seconds)
    return written


def _without_callbacks(config: Config) -> Config:
    """Return a config without its callbacks, which a resumed run may change."""
    return config.model_copy(update={"callbacks": ()})


def _all_callbacks(callbacks: Sequence[Callback], config: Config, folder: Path) -> list[Callback]:
    """Return the given callbacks and those that a config names; folder: of the results."""
    return [*callbacks, *make_callbacks(config.callbacks, folder, config.name)]


@contextmanager
def _open_run_folder(
    config: Config,
    members: Sequence[Member],
    peers: Sequence[PeerFacts],
    graph: nx.Graph | None,
    results: Results,
    networks: bool,
    simulator: EventSimulator | LearningSimulation | None,
) -> Iterator[tuple[RecordFile, list[Path]]]:
    """Create a run's folder and its metrics.jsonl; when the run ends, write tables, figure and networks.

    Yields metrics.jsonl, and a list to which the paths of the other files are added when the run ends.

    members: the peers whose networks are saved. peers: all peers of the run.
    simulator: what counts the bytes for traffic.csv; None if nothing does.
    """
    written: list[Path] = []
    with results.run_folder() as out:
        try:
            with RecordFile(out / "metrics.jsonl") as file:
                write_json(out / "config.json", config.model_dump(mode="json"))
                write_peers(out / PEERS_FILE, peers, graph)
                yield file, written
        except KeyboardInterrupt:
            if networks:
                save_networks(members, out)
            raise
        finally:
            written += summarise(out, config.name)
            if simulator is not None:
                written.append(write_traffic(out / "traffic.csv", simulator.traffic_by_model()))
        if networks:
            written += save_networks(members, out)


def _test_record(peer: Member | PeerFacts, test: Metrics) -> dict[str, object]:
    """Return what metrics.jsonl says about every test of a peer."""
    return {"peer": peer.name, "task": peer.task, **as_record(test)}


def _gain_record(gain: Gain) -> dict[str, object]:
    """Return what the record of a test has in addition if the peer has a lone twin."""
    return {"alone_accuracy": gain.alone_accuracy, "alone_loss": gain.alone_loss}


def _write_gains(out: Path, gains: Sequence[Gain], peers: int) -> list[Path]:
    """Write the gains of peers with a lone twin to gain.json; nothing if there are none."""
    if not gains:
        return []
    swarm = SwarmGain.of(gains, peers).as_dict()
    write_json(out / "gain.json", {"swarm": swarm, "peers": [gain.as_dict() for gain in gains]})
    return [out / "gain.json"]


def read_gain(out: Path) -> SwarmGain | None:
    """Return the gain of a run's swarm, read from its gain.json; None if there is no such file."""
    path = out / "gain.json"
    if not path.exists():
        return None
    table = json.loads(path.read_text("utf-8"))
    gains = [Gain.from_dict(each) for each in table["peers"]]
    return SwarmGain.of(gains, table["swarm"]["peers"])


def save_networks(members: Sequence[Member], out: Path) -> list[Path]:
    """Save every peer's current network as safetensors; return the paths of the files."""
    files = []
    for member in members:
        files.append(out / f"peer-{member.name}.safetensors")
        with atomic_path(files[-1]) as temporary:
            member.network.save(temporary)
    return files


def write_traffic(path: Path, traffic_by_model: Iterable[tuple[str, int, Traffic]]) -> Path:
    """Write a table with a row for each model: bytes sent, bytes without compression, distortion.

    traffic_by_model: for each model its name, the bytes sent, and statistics of its compression. Only the
    bytes of values are counted, not those of headers and acknowledgements.
    """
    header = ["model", "bytes", "plain_bytes", "skipped", "mean_distortion", "worst_distortion"]
    rows = [
        [
            model, sent, sent + traffic.saved, traffic.skipped,
            f"{traffic.mean_distortion:.4g}", f"{traffic.worst:.4g}",
        ]
        for model, sent, traffic in traffic_by_model
    ]  # fmt: skip
    write_csv(path, header, rows)
    return path


def summarise(out: Path, title: str) -> list[Path]:
    """Write a table and a figure from metrics.jsonl and presence.csv; nothing if no peer was tested.

    title: of the figure. Returns the paths of the files.
    """
    tests, tasks = AccuracyLog(read_presence(out / "presence.csv")), dict[str, str]()
    accuracies_by_round: dict[int, list[float]] = {}
    named: dict[str, dict[str, float]] = {}
    in_virtual_time = False
    for record in read_records(out / "metrics.jsonl"):
        peer, round, accuracy = record["peer"], record["round"], record["accuracy"]
        in_virtual_time, tasks[peer] = "time" in record, record["task"]
        tests.add(peer, record.get("time", round), round, accuracy)
        accuracies_by_round.setdefault(round, []).append(accuracy)
        named[peer] = record.get("metrics", {})
    if not tasks:
        return []
    from ..study.figures import band, canvas, draw_metrics, save  # matplotlib is slow to import

    mean, latest = tests.mean(tests.last_time), tests.at(tests.last_time)
    legend, peers = "peers; line: mean, band: worst to best", len(tests.by_peer)
    if in_virtual_time:
        header = ["peer", "task", "rounds", "accuracy", "there"]
        last_tests = {peer: peer_tests[-1] for peer, peer_tests in tests.by_peer.items()}
        rows = [
            [peer, tasks[peer], round, f"{accuracy:.4f}", "yes" if peer in latest else "no"]
            # By length first, so that peer 10 comes after peer 9.
            for peer, (_, round, accuracy) in sorted(
                last_tests.items(), key=lambda item: (len(item[0]), item[0])
            )
        ]
        rows.append(["mean", "", "", f"{mean.accuracy:.4f}", f"{mean.peers}"])
        figure, axes = canvas(
            f"{peers} {legend}, of the peers online at the time, each by its latest test on its own task; "
            f"at the last test {mean.accuracy:.3f}, the mean of {mean.peers}"
        )
    else:
        header = ["peer", "task", "accuracy"]
        rows = [[peer, tasks[peer], f"{accuracy:.4f}"] for peer, accuracy in latest.items()]
        figure, axes = canvas(f"{peers} {legend} peer, each on its own task")
    names = sorted({name for values in named.values() for name in values})
    for row in rows:
        values = named.get(row[0], {})
        row += [f"{values[name]:.4f}" if name in values else "" for name in names]
    write_csv(out / "summary.csv", [*header, *names], rows)
    band(axes, tests.curve() if in_virtual_time else accuracies_by_round)
    x_label = "virtual time in seconds" if in_virtual_time else "round"
    after = (
        f"{tests.last_time:g} virtual seconds" if in_virtual_time else f"{tests.last_time:g} rounds"
    )
    heading = f"{title}: accuracy {mean.accuracy:.3f} after {after}" if mean.peers else title
    axes.set(xlabel=x_label, ylabel="accuracy")
    axes.set_title("\n".join([heading, *_what_was_run(out, peers)]), fontsize=11)
    pictures = save(figure, out / "accuracy")
    return [out / "summary.csv", *pictures, *draw_metrics(out, title, x_label)]


def _what_was_run(out: Path, peers: int) -> list[str]:
    """Return a line about a run's peers, data, network and graph, from its config.json; none without it."""
    try:
        config = json.loads((out / "config.json").read_text("utf-8"))
        data, network, graph = config["data"]["set"], config["network"], config.get("topology")
    except (OSError, ValueError, LookupError):
        return []
    name = network.get("name") or network.get("entry") or network["layout"]
    kind = graph.get("kind", "graph") if isinstance(graph, dict) else graph
    return [f"{peers} peers, {data}, {name}{f', {kind}' if kind else ''}"]


# --- accuracy over time -----------------------------------------------------------------------------

_CURVE_POINTS = 100
"""The number of points of a drawn curve."""

Presence = Mapping[str, Sequence[tuple[float, float]]]
"""For each peer the periods in which it was online, in order: when it arrived, and when it left. A peer that
did not leave again has infinity there."""


@dataclass(frozen=True)
class Mean:
    """The mean accuracy, at one time, of the peers that are online and were tested, and their number.

    The mean over no peers is NaN.
    """

    time: float
    accuracy: float
    peers: int


class AccuracyLog:
    """The accuracies of all tests by virtual time; in lockstep, by round.

    The accuracy of a swarm at a time is taken over the peers that are online then and were tested before,
    each with its latest test. A peer that has come back and was not tested since has the accuracy of its last
    test before it left. Curves, means and sweeps all follow this rule.

    presence: a peer without an entry is always online; at the time of leaving, a peer is offline.
    by_peer: for each peer its tests in order of time: (time, rounds that it had trained, accuracy).
    """

    def __init__(self, presence: Presence):
        self.presence = presence
        self.by_peer: dict[str, list[tuple[float, int, float]]] = {}

    @property
    def last_time(self) -> float:
        """The time of the last test."""
        return max(tests[-1][0] for tests in self.by_peer.values())

    def add(self, peer: str, time: float, round: int, accuracy: float) -> None:
        """Add a test: when it was, how many rounds the peer had trained, and its result."""
        insort(self.by_peer.setdefault(peer, []), (time, round, accuracy))

    def at(self, time: float) -> dict[str, float]:
        """Return the latest accuracy of every peer that is online at this time and was tested by then."""
        accuracies: dict[str, float] = {}
        for peer, tests in self.by_peer.items():
            tests_so_far = bisect_right(tests, time, key=lambda test: test[0])
            online_periods = self.presence.get(peer, [(-math.inf, math.inf)])
            is_online = any(arrived <= time < left for arrived, left in online_periods)
            if tests_so_far and is_online:
                *_, accuracies[peer] = tests[tests_so_far - 1]
        return accuracies

    def mean(self, time: float) -> Mean:
        """Return the mean of the accuracies at this time."""
        accuracies = self.at(time)
        mean = fmean(accuracies.values()) if accuracies else math.nan
        return Mean(time, mean, len(accuracies))

    def curve(self) -> dict[Any, list[float]]:
        """Return the accuracies at evenly spaced times from the first test to the last."""
        start = min(tests[0][0] for tests in self.by_peer.values())
        end = self.last_time
        steps = (start + (end - start) * step / _CURVE_POINTS for step in range(_CURVE_POINTS))
        by_time = {time: list(self.at(time).values()) for time in [*steps, end]}
        return {time: accuracies for time, accuracies in by_time.items() if accuracies}


def presence_of(world: World, names: Sequence[str]) -> Presence:
    """Return the periods in which each peer of a world is online; empty if all always are."""
    if not world.churns:
        return {}
    return {
        name: [
            (float(arrived), float(left))
            for arrived, left in zip(starts, ends, strict=True)
            if arrived < math.inf
        ]
        for name, starts, ends in zip(names, world.starts, world.ends, strict=True)
    }


def read_presence(path: Path) -> Presence:
    """Read the online periods from a run's presence.csv; empty if there is no such file."""
    presence: dict[str, list[tuple[float, float]]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                online_period = (float(row["from"]), float(row["until"]))
                presence.setdefault(row["peer"], []).append(online_period)
    return presence
