"""Run a config in the arena: in lockstep, or in virtual time if it has a [time] table.

`Simulation` trains and averages in rounds. In `LearningSimulation`, each learner trains at its own pace and
gossips by the rules of live peers. A training job (the local steps of one peer) begins with the peer's
current values. Mass that arrives during the job is mixed into the peer's values, not into the job. When the
job ends, the change Δ made by training is added to the peer's values, as push-sum allows. So the jobs of
different peers are independent, and results are needed only when a job ends. Then all jobs that have begun
are trained together, stacked in an arena.
"""

from __future__ import annotations

import csv
import json
import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import networkx as nx
import numpy as np
import torch

from ...gossip import ONE, Array, DictStore, Partition
from ...gossip.compress import Shapes, Traffic
from ...models import (
    AssociativeNetwork,
    Gain,
    Layout,
    Metrics,
    ModelError,
    SwarmGain,
)
from ...models.stack import MemoryNeeds, estimate_memory, free_memory
from ...peer import MatchedStore, blocks, schema_entries
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
from ..config.needs import warn_unused_keys
from ..config.tables import Churn, Config, ConfigError, Time
from ..graphs.swarm import PUSHES, WINDOW, graph_of
from ..results import (
    PEERS_FILE,
    SHARING_FILE,
    RecordFile,
    Results,
    atomic_path,
    read_records,
    write_csv,
    write_json,
)
from .arena import Arena, Round, Twins
from .events import EventSimulator, VirtualTime, Wire
from .lockstep import Gossip, Mixing, Server
from .network import Conditions, TimeError, World, parse
from .sharing import AutoSharing

# --- in lockstep ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Simulation:
    """A config's swarm in the arena; iterate over `rounds()` to run it."""

    config: Config
    members: list[Member]
    mixing: Mixing | None = None
    stores: list[MatchedStore] | None = None
    """A store for each peer, if a partial model is averaged at a common width."""
    wire: Wire | None = None
    """How values are transmitted, if they are rounded, compressed or skipped."""
    sharing: AutoSharing | None = None
    """Decides what peers share, with `sharing = "auto"`."""

    @classmethod
    def of(cls, config: Config, source: str = "config", *, warn: bool = True) -> Simulation:
        """Build every peer of a config; raise ConfigError if they will not fit into memory.

        A config with [time] or [sweep] is refused, because it is not a single run in lockstep. warn: whether
        to print a warning about keys that have no effect in lockstep.
        """
        if warn:
            warn_unused_keys(config, "lockstep", source)
        try:
            expected_needs(config).check_fits(free_memory(torch.device("cpu")))
        except ModelError as error:
            raise ConfigError(f"{source}: key 'peers': {error}") from None
        members, stores = members_in_order(Swarm(config, source))
        mixing = None
        if config.topology is not None or config.bridge or config.gossip.rule != "push":
            from ..graphs import mixing_of  # scipy is slow to import, and needed only with a graph

            mixing = mixing_of(config, shared_models(members), source)
        sharing = _auto_sharing(config, members, source) if config.sharing == "auto" else None
        if not config.gossip.lossy_keys:
            return cls(config, members, mixing, stores, sharing=sharing)
        mixing, wire = _wiring(config, members, mixing, source)
        return cls(config, members, mixing, stores, wire)

    def arena(self, threads: int | None = None) -> Arena:
        """Put the members into an arena; the number of threads does not affect the result."""
        config = self.config
        weights = [m.samples for m in self.members] if config.weights == "samples" else None
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
            twins=choose_twins(config.gain, config.peers, config.seed),
        )

    def graph(self) -> nx.Graph | None:
        """Return the links of the config's topology, of one period if they change; None if it has none."""
        if self.config.topology is None or not isinstance(self.mixing, Gossip):
            return None
        links = self.mixing.graph
        return links.union(0, links.period or WINDOW) if isinstance(links, Schedule) else links

    def rounds(self, arena: Arena | None = None) -> Iterator[Round]:
        """Run the config's rounds, in a new arena if none is given."""
        yield from (arena or self.arena()).run(self.config.round_count)


def _auto_sharing(config: Config, members: Sequence[Member], source: str) -> AutoSharing:
    """Return what decides about sharing; raises ConfigError if other keys do not allow that."""
    refused = {
        "data.set": ("sparse vectors, which are not learned by gradients", config.data.set == "sparse"),
        "fednp": ("FedNP, whose loss is not a sum over samples", config.fednp is not None),
        "training.proximal": ("a penalty beside the loss of samples", config.training.proximal > 0),
        "network.sizes": ("networks of several sizes", bool(config.network.sizes)),
        **{
            f"models.{number}.matching": ("matched cells", model.matching != "none")
            for number, model in enumerate(config.models)
        },
        **{f"gossip.{key}": ("values that change on the way", True) for key in config.gossip.lossy_keys},
    }  # fmt: skip
    for key, (what, given) in refused.items():
        if given:
            raise ConfigError(
                f"{source}: key 'sharing': peers cannot decide what they share with {what} ({key}); leave "
                "one of them out"
            )
    sharing = AutoSharing(seed=config.seed, dry_run=config.dry_run, keep_models=bool(config.models))
    try:
        sharing.first_assignment([member.learner for member in members])
    except ModelError as error:
        raise ConfigError(f"{source}: key 'sharing': {error}") from None
    return sharing


def expected_needs(config: Config) -> MemoryNeeds:
    """A lower bound of the memory that a config's swarm needs, computed without loading data."""
    layout = config.network.layout
    try:
        if "<>" in layout:
            module = AssociativeNetwork(layout)
            features, parameters = module.hidden.shape[1], 2 * module.hidden.numel()
        else:
            cells = Layout.network(layout).cells
            features = cells[0]
            parameters = sum((a + 1) * b for a, b in pairwise(cells))
    except ModelError:
        features = parameters = 0  # building the network will raise an error that names the key
    if config.network.name_or_entry:  # its size is known only when it is built; the arena checks it
        features = parameters = 0
    peers, data = config.peers, config.data
    row = 4 * features + 8
    # A slice that is not the whole network has an index for every coordinate; peers with equal slices
    # share it.
    shares_everything = [model.layout for model in config.models] == [layout.replace("=", "-")]
    return estimate_memory(
        peers=peers,
        parameters=parameters,
        optimizer_values={"sgd": 0, "momentum": 1, "adam": 2}[config.training.optimizer],
        sample_bytes=peers * (data.samples or 0) * row,
        index_bytes=0 if shares_everything or not config.models else 8 * parameters,
    )


# --- in virtual time --------------------------------------------------------------------------------

_TIME_TOLERANCE = 1e-9
"""Relative tolerance of the end of the run: events at the end still count if their time was rounded up."""


@dataclass(frozen=True)
class Reading:
    """The result of one test of a peer: the virtual time, and the rounds that the peer has trained."""

    time: float
    round: int
    peer: int
    metrics: Metrics


@dataclass
class _Job:
    """A training job: the local steps of one peer.

    start: the shared vectors at the beginning. test: the test that is due at the beginning, if any.
    flat: all parameters before training, once the job is computed. after: the shared vectors after training.
    """

    start: dict[str, Array]
    test: Reading | None
    flat: torch.Tensor | None = None
    after: dict[str, Array] | None = None


class LearningSimulation:
    """A config's swarm in virtual time.

    threads: threads that train peers in parallel; they do not affect the result.
    on_test: called with every test, in an order that depends only on the config.

    `graph` has the links; `events` drives the gossipers; `rounds` counts the training jobs that each peer has
    finished; `tests` are all tests so far; `gains`, at the end, of the peers that are online and have a lone
    twin.
    """

    def __init__(
        self,
        config: Config,
        source: str = "config",
        *,
        threads: int = 1,
        on_test: Callable[[Reading], None] = lambda _: None,
    ):
        self.config = config
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
        self.tests = AccuracyLog(presence_of(self.world, [member.name for member in self.members]))
        peers_of_model = shared_models(self.members)
        check_compression(config, self.members, peers_of_model, source)
        shared: list[dict[str, Array]] = [{} for _ in self.members]
        shapes: dict[str, Shapes] = {}
        for model, peers in peers_of_model.items():
            shapes[model] = blocks(schema_entries(self.members[peers[0]].network, model))
            for peer in peers:
                shared[peer][model] = self.members[peer].network.read(model).cpu().numpy()
        self._stores = [DictStore(vectors) for vectors in shared]
        self.events = VirtualTime(
            self.world,
            graph,
            peers_of_model,
            self._stores,
            [ONE * (m.samples if config.weights == "samples" else 1) for m in self.members],
            fanout=config.gossip.exchanges or PUSHES,
            fraction=config.gossip.fraction,
            wire=replace(_wire(config), shapes=shapes),
            on_trained=self._ended,
            on_arrival=self._begin,
        )
        learners = [member.learner for member in self.members]
        self.gains: list[Gain] = []
        self._with_twin = choose_twins(config.gain, config.peers, config.seed)
        self._twins: Twins | None = None
        if self._with_twin:
            twins_of = [learners[peer] for peer in self._with_twin]
            self._twins = Twins(twins_of, every=config.every, threads=threads)
        self._arena = Arena(learners, every=config.every, threads=threads)
        self._on_test = on_test
        self._jobs: dict[int, _Job] = {}
        self.rounds = [0] * len(self.members)
        # Tests are due by virtual time, not by rounds; otherwise slow peers would hardly ever be tested.
        self._test_intervals = [0.0] * len(self.members)

    def run(self) -> None:
        """Run for the config's virtual time, then test every peer that is online."""
        for peer in self._online(0.0):
            self._begin(peer, 0.0)
        self.events.run(self.seconds * (1 + _TIME_TOLERANCE))
        self._drop_unfinished()
        self._write_networks()
        online = self._online(self.seconds)
        for peer, metrics in zip(online, self._arena.test(online), strict=True):
            self._report(Reading(self.seconds, self.rounds[peer], peer, metrics))
        self._measure_gains(online)

    def _measure_gains(self, online: Sequence[int]) -> None:
        """Train each twin for as many rounds as its peer, and compare the two if the peer is online."""
        if self._twins is None:
            return
        rounds = [self.rounds[peer] for peer in self._with_twin]
        for number in range(max(rounds)):
            self._twins.train([twin for twin, count in enumerate(rounds) if count > number])
        gains = zip(self._with_twin, self._twins.gains(), strict=True)
        self.gains = [gain for peer, gain in gains if peer in online]

    def stop(self) -> None:
        """After an interrupt, write the peers' current values into their networks, without testing."""
        for peer in self._jobs:
            self._undo(peer)
        self._write_networks()

    def _write_networks(self) -> None:
        """Write the peers' values of shared models into their networks."""
        for peer, member in enumerate(self.members):
            for model in self._stores[peer].names():
                member.network.write(model, self._stores[peer].read(model))

    def _begin(self, peer: int, time: float) -> None:
        """Begin a training job with the peer's current values."""
        if peer in self._jobs:
            self._undo(peer)  # the peer's last session ended before its training job
        store = self._stores[peer]
        start = {model: store.read(model) for model in store.names()}
        done = self.rounds[peer]
        interval = time // (self.config.test_every * self.world.conditions.push_interval)
        due = done > 0 and interval > self._test_intervals[peer]
        # At the end, all peers are tested anyway.
        due = due and time < self.seconds * (1 - _TIME_TOLERANCE)
        self._test_intervals[peer] = interval
        self._jobs[peer] = _Job(start, Reading(time, done, peer, Metrics()) if due else None)

    def _ended(self, peer: int, time: float) -> None:
        """Finish a training job: add its change to the peer's current values, and begin the next job."""
        if self._jobs[peer].after is None:
            self._train(time)
        if (tested := self._jobs[peer].test) is not None:
            self._report(tested)
        job, store = self._jobs.pop(peer), self._stores[peer]
        for model, after in (job.after or {}).items():
            current, start = store.read(model), job.start[model]
            store.write(model, after if current is start else current + (after - start))
        self.rounds[peer] += 1
        self._begin(peer, time)

    def _train(self, time: float) -> None:
        """Compute every training job that has begun, except for peers that left: their jobs never end."""
        online = set(self._online(time))
        peers = [peer for peer in self._waiting() if peer in online]
        self._test(peers)
        for peer in peers:
            self._jobs[peer].flat = self.members[peer].network.flat.clone()
        self._arena.train(peers)
        for peer in peers:
            job, network = self._jobs[peer], self.members[peer].network
            job.after = {model: network.read(model).cpu().numpy() for model in job.start}

    def _waiting(self) -> list[int]:
        """Peers whose training jobs have begun and are not computed yet."""
        return [peer for peer, job in sorted(self._jobs.items()) if job.after is None]

    def _test(self, peers: Iterable[int]) -> None:
        """Write the initial values of training jobs into the networks, and run the tests that are due."""
        due: dict[int, Reading] = {}
        for peer in peers:
            job = self._jobs[peer]
            for model, value in job.start.items():
                self.members[peer].network.write(model, value)
            if job.test is not None:
                due[peer] = job.test
        for peer, metrics in zip(due, self._arena.test(list(due)), strict=True):
            self._jobs[peer].test = replace(due[peer], metrics=metrics)

    def _report(self, test: Reading) -> None:
        name = self.members[test.peer].name
        self.tests.add(name, test.time, test.round, test.metrics.accuracy)
        self._on_test(test)

    def _drop_unfinished(self) -> None:
        """Drop training jobs that do not end before the run does; only their tests are reported."""
        self._test(self._waiting())
        for peer, job in sorted(self._jobs.items()):
            self._undo(peer)
            if job.test is not None:
                self._report(job.test)
        self._jobs.clear()

    def _undo(self, peer: int) -> None:
        """Restore the network's parameters from before a training job that does not end."""
        if (flat := self._jobs[peer].flat) is not None:
            self.members[peer].network.flat.copy_(flat)

    def _online(self, time: float) -> list[int]:
        return np.flatnonzero(self.world.present_at(time)).tolist()


# --- from configs -----------------------------------------------------------------------------------


def _world(config: Config, graph: nx.Graph, source: str) -> tuple[World, float]:
    """The world that a config's [time] table describes, and the seconds to run; errors name file and key."""
    time = config.time or Time()
    if config.gossip.mode != "async":
        raise ConfigError(
            f"{source}: key 'gossip.mode': virtual time is for mode = 'async', not {config.gossip.mode!r}; "
            "without a [time] table the arena averages in rounds"
        )
    try:
        training = parse(time.training, "training")
        seconds = time.seconds or config.round_count * (training.mean * config.every)
        conditions = Conditions(
            training=training,
            delay=parse(time.delay, "delay"),
            events=_events(time.churn, config, graph, seconds, source),
            step=time.churn.step if time.churn else 1.0,
            partitions=tuple(
                Partition(each.start, each.end, _side(each.peers, config.peers))
                for each in time.partitions
            ),
            every=config.every,
            **time.model_dump(include={"stragglers", "slowdown", "loss", "timeout"}),
        )
        return World(conditions, graph, config.seed), seconds
    except (TimeError, TopologyError) as error:
        key = "time.churn" if isinstance(error, TopologyError) else "time"
        raise ConfigError(f"{source}: key {key!r}: {error}") from None


def _wire(config: Config) -> Wire:
    """The wire that a config's [gossip] table describes."""
    return Wire(config.gossip.dtype, config.gossip.compress, config.gossip.drift)


def _wiring(
    config: Config, members: list[Member], mixing: Mixing | None, source: str
) -> tuple[Mixing, Wire]:
    """How peers average in lockstep and over which wire, for a config with `compress`, `drift` or `dtype`.

    mixing: that of the config's topology, if it has one. Without a topology, live peers push equal parts to
    all peers in `rounds` mode, and send all their mass to one server in `server` mode.
    """
    lossy = config.gossip.lossy_keys[0]
    require_push(config, source, "peers that send messages", f"leave out 'gossip.{lossy}'")
    check_compression(config, members, shared_models(members), source)
    if mixing is not None:
        return mixing, _wire(config)
    if config.gossip.mode == "server":
        return Server(), _wire(config)
    if config.gossip.mode == "rounds":
        complete = nx.complete_graph(config.peers)
        return Gossip(complete, exchanges=config.gossip.exchanges or 1), _wire(config)
    raise ConfigError(
        f"{source}: key 'gossip.{lossy}': without a topology and a [time] table async peers "
        'are averaged exactly, and send no messages; add one of them, or use mode = "rounds" or "server"'
    )


def _graph(config: Config, members: list[Member], source: str) -> nx.Graph:
    """The graph of peers that may push to each other; complete if the config has no topology."""
    if config.topology is None:
        return nx.complete_graph(config.peers)
    graph = graph_of(config, shared_models(members), source)
    if graph is None:
        raise ConfigError(
            f"{source}: key 'topology': a graph that changes in steps is not supported in virtual time; name "
            "one graph, and let links fail with [time.churn]"
        )
    return graph


def _events(
    churn: Churn | None, config: Config, graph: nx.Graph, seconds: float, source: str
) -> tuple[Event, ...]:
    if churn is None:
        return ()
    if churn.trace is not None:
        return tuple(read_events(Path(source).parent / churn.trace))
    steps = math.ceil(seconds / churn.step) + 1
    probabilities = {k: getattr(churn, k) for k in ("leave", "arrive", "link_down", "link_up")}
    return tuple(draw_events(graph, steps, **probabilities, seed=config.seed))


def _side(spec: int | list[int] | str, peers: int) -> frozenset[int]:
    """The peers on one side of a partition: a list, the first so many, or all peers for any text."""
    if isinstance(spec, str):
        return frozenset(range(peers))
    return frozenset(range(spec) if isinstance(spec, int) else spec)


# --- results ----------------------------------------------------------------------------------------


def simulate(
    simulation: Simulation,
    results: Results,
    *,
    networks: bool = False,
    on_round: Callable[[Round], None] = lambda _: None,
) -> list[Path]:
    """Run a simulation and write config.json, peers.json, metrics.jsonl, summary.csv and accuracy.png / .svg.

    If values are compressed, rounded or skipped, traffic.csv has the bytes of each shared model. If peers
    decide what they share, every decision is printed, and sharing.json has all of them. If peers have lone
    twins, gain.json has what these peers gained by the last test. With `networks`, every peer's network is
    saved as safetensors too. After Ctrl-C, the files hold the results so far, and
    KeyboardInterrupt is raised again.
    """
    # Before the results folder is created, since this raises if memory is too small.
    arena, members = simulation.arena(), simulation.members
    simulator, graph = arena.wire_simulation, simulation.graph()
    with _recorded(simulation.config, members, graph, results, networks, simulator) as (
        file,
        written,
    ):
        console.warn(str(arena.needs()))
        gains: Sequence[Gain] = ()
        try:
            with _recorded_sharing(arena.sharing, results.folder) as tell:
                for round in simulation.rounds(arena):
                    gains = round.gains or gains
                    alone = {gain.peer: _gain_record(gain) for gain in round.gains}
                    for member, test in zip(members, round.tests, strict=False):
                        record = _test_record(member, test) | alone.get(member.name, {})
                        file.write({"round": round.index, **record})
                    tell()
                    on_round(round)
        finally:
            written += _write_gains(results.folder, gains, len(members))
    if arena.sharing is not None:
        written.append(results.folder / SHARING_FILE)
    return written


@contextmanager
def _recorded_sharing(sharing: AutoSharing | None, folder: Path) -> Iterator[Callable[[], None]]:
    """Write what was decided about sharing when the run ends; yields a function that prints new decisions."""
    told = 0

    def tell() -> None:
        nonlocal told
        for sentence in [] if sharing is None else sharing.sentences()[told:]:
            console.warn(sentence)
            told += 1

    if sharing is not None and sharing.reason:
        console.warn(f"everything stays shared as it is: {sharing.reason}")
    try:
        yield tell
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
    on_start: Callable[[float], None] = lambda seconds: None,
    on_test: Callable[[Reading], None] = lambda _: None,
    on_mean: Callable[[Mean], None] = lambda _: None,
) -> list[Path]:
    """Run a config with a [time] table, and write the files of `simulate`.

    presence.csv lists when each peer was online, if peers come and go; traffic.csv is always written. If the
    config cannot be run, no results folder is created.

    on_mean: called about a hundred times, and at the end, with the mean accuracy of the online peers.
    """
    next_mean = 0.0

    def record_test(tested: Reading) -> None:
        nonlocal next_mean
        record = _test_record(run.members[tested.peer], tested.metrics)
        file.write({"time": tested.time, "round": tested.round, **record})
        on_test(tested)
        if tested.time >= next_mean:
            next_mean = tested.time + run.seconds / _CURVE_POINTS
            on_mean(run.tests.mean(tested.time))

    warn_unused_keys(config, "virtual", source)
    # Before the results folder is created, since this raises if the config is wrong.
    run = LearningSimulation(config, source, threads=threads, on_test=record_test)
    graph = None if config.topology is None else run.graph
    with _recorded(config, run.members, graph, results, networks, run.events) as (file, written):
        on_start(run.seconds)
        stays = ([peer, *stay] for peer, times in run.tests.presence.items() for stay in times)
        write_csv(results.folder / "presence.csv", ["peer", "from", "until"], stays)
        try:
            run.run()
        except KeyboardInterrupt:
            run.stop()
            raise
        written += _write_gains(results.folder, run.gains, config.peers)
        on_mean(run.tests.mean(run.seconds))
    return written


@contextmanager
def _recorded(
    config: Config,
    members: Sequence[Member],
    graph: nx.Graph | None,
    results: Results,
    networks: bool,
    simulator: EventSimulator | None,
) -> Iterator[tuple[RecordFile, list[Path]]]:
    """Create a run's folder and its metrics.jsonl; when the run ends, write tables, figure and networks.

    Yields that file, and a list to which the paths of all other files are added when the run ends.
    """
    written: list[Path] = []
    with results.run_folder() as out:
        try:
            with RecordFile(out / "metrics.jsonl") as file:
                write_json(out / "config.json", config.model_dump(mode="json"))
                write_peers(out / PEERS_FILE, [PeerFacts.of(member) for member in members], graph)
                yield file, written
        except KeyboardInterrupt:
            if networks:
                save_networks(members, out)
            raise
        finally:
            written += summarise(out, config.name)
            if simulator is not None:
                written.append(write_traffic(out / "traffic.csv", simulator.counted()))
        if networks:
            written += save_networks(members, out)


def _test_record(member: Member, test: Metrics) -> dict[str, object]:
    accuracy, loss = test.accuracy, test.mean_loss
    return {"peer": member.name, "task": member.task, "accuracy": accuracy, "loss": loss}


def _gain_record(gain: Gain) -> dict[str, object]:
    """What the record of a peer's test has if the peer has a lone twin."""
    return {"alone_accuracy": gain.alone_accuracy, "alone_loss": gain.alone_loss}


def _write_gains(out: Path, gains: Sequence[Gain], peers: int) -> list[Path]:
    """Write the gains of peers with a lone twin to gain.json; nothing if there are none."""
    if not gains:
        return []
    swarm = SwarmGain.of(gains, peers).as_dict()
    write_json(out / "gain.json", {"swarm": swarm, "peers": [gain.as_dict() for gain in gains]})
    return [out / "gain.json"]


def read_gain(out: Path) -> SwarmGain | None:
    """Read the mean gain from a run's gain.json; None if it has no such file."""
    path = out / "gain.json"
    if not path.exists():
        return None
    table = json.loads(path.read_text("utf-8"))
    gains = [Gain.from_dict(each) for each in table["peers"]]
    return SwarmGain.of(gains, table["swarm"]["peers"])


def save_networks(members: Sequence[Member], out: Path) -> list[Path]:
    """Save every peer's current network as safetensors."""
    files = []
    for member in members:
        files.append(out / f"peer-{member.name}.safetensors")
        with atomic_path(files[-1]) as temporary:
            member.network.save(temporary)
    return files


def write_traffic(path: Path, counted: Iterable[tuple[str, int, Traffic]]) -> Path:
    """Write a table with a row for each model: bytes sent, bytes without compression, distortion.

    Bytes are those of values only; headers and answers are not counted.
    """
    header = ["model", "bytes", "plain_bytes", "skipped", "mean_distortion", "worst_distortion"]
    rows = [
        [name, size, size + each.saved, each.skipped, f"{each.mean_distortion:.4g}", f"{each.worst:.4g}"]
        for name, size, each in counted
    ]  # fmt: skip
    write_csv(path, header, rows)
    return path


def summarise(out: Path, title: str) -> list[Path]:
    """Write a table and a figure from metrics.jsonl and presence.csv; nothing if no peer was tested."""
    tests, tasks = AccuracyLog(read_presence(out / "presence.csv")), dict[str, str]()
    rounds: dict[int, list[float]] = {}
    timed = False
    for record in read_records(out / "metrics.jsonl"):
        peer, round, accuracy = record["peer"], record["round"], record["accuracy"]
        timed, tasks[peer] = "time" in record, record["task"]
        tests.add(peer, record.get("time", round), round, accuracy)
        rounds.setdefault(round, []).append(accuracy)
    if not tasks:
        return []
    from ..study.figures import band, canvas, save  # matplotlib is slow to import

    mean, latest = tests.mean(tests.last), tests.at(tests.last)
    legend, peers = "peers; line: mean, band: worst to best", len(tests.of)
    if timed:
        header = ["peer", "task", "rounds", "accuracy", "there"]
        rows = [
            [peer, tasks[peer], round, f"{accuracy:.4f}", "yes" if peer in latest else "no"]
            for peer, (*_, (_, round, accuracy)) in sorted(
                tests.of.items(), key=lambda item: (len(item[0]), item[0])
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
    write_csv(out / "summary.csv", header, rows)
    band(axes, tests.curve() if timed else rounds)
    axes.set(title=title, xlabel="virtual time in seconds" if timed else "round", ylabel="accuracy")
    return [out / "summary.csv", *save(figure, out / "accuracy")]


# --- accuracy over time -----------------------------------------------------------------------------

_CURVE_POINTS = 100  # times at which `on_mean` is called, and points of a drawn curve

Presence = Mapping[str, Sequence[tuple[float, float]]]
"""For each peer the times when it arrived and left, in order; infinity if it did not leave."""


@dataclass(frozen=True)
class Mean:
    """The mean accuracy of the peers that count at one time, and their number; NaN if there are none."""

    time: float
    accuracy: float
    peers: int


class AccuracyLog:
    """The tests of all peers in virtual time.

    At any time, the peers that are online count, each with its latest test so far. A peer that has left does
    not count; a peer that is back and was not tested since counts with its last test before it left. Curves,
    means and sweeps all follow this rule.

    presence: a peer without an entry is always online; at the time of leaving, a peer is offline.

    `of` has (time, rounds of this peer, accuracy) for each test of each peer, in order of time.
    """

    def __init__(self, presence: Presence):
        self.presence = presence
        self.of: dict[str, list[tuple[float, int, float]]] = {}

    @property
    def last(self) -> float:
        """The time of the last test."""
        return max(tests[-1][0] for tests in self.of.values())

    def add(self, peer: str, time: float, round: int, accuracy: float) -> None:
        """Add a test."""
        insort(self.of.setdefault(peer, []), (time, round, accuracy))

    def at(self, time: float) -> dict[str, float]:
        """Return the accuracy of every peer that counts at this time."""
        accuracies: dict[str, float] = {}
        for peer, tests in self.of.items():
            count = bisect_right(tests, time, key=lambda test: test[0])
            stays = self.presence.get(peer, [(-math.inf, math.inf)])
            if count and any(start <= time < end for start, end in stays):
                accuracies[peer] = tests[count - 1][2]
        return accuracies

    def mean(self, time: float) -> Mean:
        """Return the mean at this time."""
        accuracies = self.at(time)
        mean = fmean(accuracies.values()) if accuracies else math.nan
        return Mean(time, mean, len(accuracies))

    def curve(self) -> dict[Any, list[float]]:
        """Return the accuracies of all counting peers at times from the first test to the last."""
        start = min(tests[0][0] for tests in self.of.values())
        end = self.last
        steps = (start + (end - start) * step / _CURVE_POINTS for step in range(_CURVE_POINTS))
        by_time = {time: list(self.at(time).values()) for time in [*steps, end]}
        return {time: accuracies for time, accuracies in by_time.items() if accuracies}


def presence_of(world: World, names: Sequence[str]) -> Presence:
    """The times at which peers arrive and leave in a world; empty if none does."""
    if not world.churns:
        return {}
    return {
        name: [(float(a), float(b)) for a, b in zip(starts, ends, strict=True) if a < math.inf]
        for name, starts, ends in zip(names, world.starts, world.ends, strict=True)
    }


def read_presence(path: Path) -> Presence:
    """Read a run's presence.csv; empty if there is no such file."""
    presence: dict[str, list[tuple[float, float]]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                stay = (float(row["from"]), float(row["until"]))
                presence.setdefault(row["peer"], []).append(stay)
    return presence
