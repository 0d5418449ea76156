"""Running a config in the arena: in lockstep, or in virtual time if it has a [time] table.

`Simulation` trains and averages in rounds. In `LearningSimulation` learners train at their own pace and
gossip by the rules of live peers. Local steps begin from the values that their peer has then; mass that
arrives while they last is mixed in beside them. When they end, what they changed is added to what the peer
has by then: training moves a value by Δ, and push-sum does not mind. So the training jobs of different peers
are independent, and nobody asks for one before it ends: all that have begun by then are trained at once,
stacked in an arena.
"""

from __future__ import annotations

import csv
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
from ...models import AssociativeNetwork, Layout, Metrics, ModelError
from ...models.stack import Needs, estimate, free_memory
from ...peer import MatchedStore, blocks, schema_entries
from ...topology import Event, TopologyError, draw_events, read_events
from ..build import Member, Swarm, members_in_order
from ..cli import console
from ..config.needs import warn_unused_keys
from ..config.tables import Churn, Config, ConfigError, Time
from ..live.layout import PUSHES, check_compression, graph_of, require_push, shared_models
from ..results import RecordFile, Results, read_records, replacing, write_csv, write_json
from .arena import Arena, Round
from .events import EventSimulator, VirtualTime, Wire
from .lockstep import Gossip, Mixing, Server
from .network import Conditions, TimeError, World, parse

# --- in lockstep ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Simulation:
    """A swarm in the arena; iterate `rounds()` to run it."""

    config: Config
    members: list[Member]
    mixing: Mixing | None = None
    stores: list[MatchedStore] | None = None
    """The peers' vectors, where a partial model is averaged at a common width."""
    wire: Wire | None = None
    """What becomes of values between peers, where it is not the values themselves that arrive."""

    @classmethod
    def of(cls, config: Config, source: str = "config", *, say: bool = True) -> Simulation:
        """Build every peer of a config, unless it can be told beforehand that they do not fit.

        A config with [time] or [sweep] is refused: it is not one run in lockstep. say: name keys that have
        no effect in lockstep, on the terminal.
        """
        if say:
            warn_unused_keys(config, "lockstep", source)
        try:
            expected_needs(config).refuse_beyond(free_memory(torch.device("cpu")))
        except ModelError as error:
            raise ConfigError(f"{source}: key 'peers': {error}") from None
        members, stores = members_in_order(Swarm(config, source))
        mixing = None
        if config.topology is not None or config.bridge or config.gossip.rule != "push":
            from ..graphs import mixing_of  # scipy takes a while: only for those who have a graph

            mixing = mixing_of(config, shared_models(members), source)
        if not config.gossip.lossy:
            return cls(config, members, mixing, stores)
        mixing, wire = _wiring(config, members, mixing, source)
        return cls(config, members, mixing, stores, wire)

    def arena(self, threads: int | None = None) -> Arena:
        """The members in an arena, ready to run; threads change no result."""
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
            threads=threads,
        )

    def rounds(self, arena: Arena | None = None) -> Iterator[Round]:
        """Run the config's rounds, in a new arena if none is given."""
        yield from (arena or self.arena()).run(self.config.rounds)


def expected_needs(config: Config) -> Needs:
    """What a config's swarm will need at least, from the config alone: no data is loaded for it."""
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
        features = parameters = 0  # building it says what is wrong, and where
    if config.network.named:  # its size is known once it is built, and the arena then looks again
        features = parameters = 0
    peers, data = config.peers, config.data
    row = 4 * features + 8
    # A slice of part of a network has an index for every coordinate, which peers that are cut alike
    # share; a whole network has none.
    whole = [model.layout for model in config.models] == [layout.replace("=", "-")]
    return estimate(
        peers=peers,
        parameters=parameters,
        slots={"sgd": 0, "momentum": 1, "adam": 2}[config.training.optimizer],
        sample_bytes=peers * (data.samples or 0) * row,
        index_bytes=0 if whole or not config.models else 8 * parameters,
    )


# --- in virtual time --------------------------------------------------------------------------------

_LAST_MOMENT = 1e-9
"""What ends with the run still counts, though sums of durations may be a few roundings beyond it."""


@dataclass(frozen=True)
class Reading:
    """A peer's test: at which virtual time, after how many rounds of its own."""

    time: float
    round: int
    peer: int
    metrics: Metrics


@dataclass
class _Job:
    """Local steps of a peer: the shared vectors they begin from, and the test that is due before them.

    flat: the network before them, once they are being trained. after: what shared vectors became.
    """

    start: dict[str, Array]
    test: Reading | None
    flat: torch.Tensor | None = None
    after: dict[str, Array] | None = None


class LearningSimulation:
    """A config's swarm in virtual time.

    threads: peers that are trained side by side; the numbers are the same for any.
    on_test: called with every test, in an order that the seed decides.

    `events` drives the gossipers; `rounds` counts the training jobs that each peer has ended; `tests` are all
    tests so far.
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
                f"{source}: key 'models': fuse has no place in virtual time; leave out [time], or run live "
                "peers with gossamer swarm"
            )
        require_push(config, source, "peers in virtual time", "leave out [time]")
        self.members, _ = members_in_order(Swarm(config, source))
        graph = _graph(config, self.members, source)
        self.world, self.seconds = _world(config, graph, source)
        self.tests = AccuracyLog(presence_of(self.world, [member.name for member in self.members]))
        owners = shared_models(self.members)
        check_compression(config, self.members, owners, source)
        shared: list[dict[str, Array]] = [{} for _ in self.members]
        shapes: dict[str, Shapes] = {}
        for owner, who in owners.items():
            shapes[owner] = blocks(schema_entries(self.members[who[0]].network, owner))
            for peer in who:
                shared[peer][owner] = self.members[peer].network.read(owner).cpu().numpy()
        self._stores = [DictStore(vectors) for vectors in shared]
        self.events = VirtualTime(
            self.world,
            graph,
            owners,
            self._stores,
            [ONE * (m.samples if config.weights == "samples" else 1) for m in self.members],
            fanout=config.gossip.exchanges or PUSHES,
            fraction=config.gossip.fraction,
            wire=replace(_wire(config), shapes=shapes),
            on_trained=self._ended,
            on_arrival=self._begin,
        )
        learners = [member.learner for member in self.members]
        self._arena = Arena(learners, every=config.every, threads=threads)
        self._on_test = on_test
        self._jobs: dict[int, _Job] = {}
        self.rounds = [0] * len(self.members)
        # Tests keep to virtual time rather than to rounds, or the slow would hardly ever be tested.
        self._turns = [0.0] * len(self.members)

    def run(self) -> None:
        """Let the config's time pass, then test every peer that is there."""
        for peer in self._present(0.0):
            self._begin(peer, 0.0)
        self.events.run(self.seconds * (1 + _LAST_MOMENT))
        self._drop_unfinished()
        self._write_networks()
        here = self._present(self.seconds)
        for peer, metrics in zip(here, self._arena.test(here), strict=True):
            self._report(Reading(self.seconds, self.rounds[peer], peer, metrics))

    def stop(self) -> None:
        """Let networks have what their peers held when the run was interrupted; nothing is tested."""
        for peer in self._jobs:
            self._undo(peer)
        self._write_networks()

    def _write_networks(self) -> None:
        """Write what peers hold of shared models into their networks."""
        for peer, member in enumerate(self.members):
            for owner in self._stores[peer].names():
                member.network.write(owner, self._stores[peer].read(owner))

    def _begin(self, peer: int, time: float) -> None:
        """Start local steps from the values of now."""
        if peer in self._jobs:
            self._undo(peer)  # its last session ended before its last training job did
        store = self._stores[peer]
        start = {owner: store.read(owner) for owner in store.names()}
        done = self.rounds[peer]
        turn = time // (self.config.test_every * self.world.conditions.push_interval)
        due = done > 0 and turn > self._turns[peer]
        due = due and time < self.seconds * (1 - _LAST_MOMENT)  # at the end all are tested anyway
        self._turns[peer] = turn
        self._jobs[peer] = _Job(start, Reading(time, done, peer, Metrics()) if due else None)

    def _ended(self, peer: int, time: float) -> None:
        """Add what local steps changed to the values of now, and start the next."""
        if self._jobs[peer].after is None:
            self._train(time)
        if (tested := self._jobs[peer].test) is not None:
            self._report(tested)
        job, store = self._jobs.pop(peer), self._stores[peer]
        for owner, after in (job.after or {}).items():
            now, before = store.read(owner), job.start[owner]
            store.write(owner, after if now is before else now + (after - before))
        self.rounds[peer] += 1
        self._begin(peer, time)

    def _train(self, time: float) -> None:
        """Do every training job that has begun, except of peers that are gone: theirs will not end."""
        here = set(self._present(time))
        peers = [peer for peer in self._waiting() if peer in here]
        self._test(peers)
        for peer in peers:
            self._jobs[peer].flat = self.members[peer].network.flat.clone()
        self._arena.train(peers)
        for peer in peers:
            job, network = self._jobs[peer], self.members[peer].network
            job.after = {owner: network.read(owner).cpu().numpy() for owner in job.start}

    def _waiting(self) -> list[int]:
        """Peers whose training jobs have begun and were not done yet."""
        return [peer for peer, job in sorted(self._jobs.items()) if job.after is None]

    def _test(self, peers: Iterable[int]) -> None:
        """Bring networks to where their training jobs begin, and test those that are due."""
        due: dict[int, Reading] = {}
        for peer in peers:
            job = self._jobs[peer]
            for owner, value in job.start.items():
                self.members[peer].network.write(owner, value)
            if job.test is not None:
                due[peer] = job.test
        for peer, metrics in zip(due, self._arena.test(list(due)), strict=True):
            self._jobs[peer].test = replace(due[peer], metrics=metrics)

    def _report(self, test: Reading) -> None:
        name = self.members[test.peer].name
        self.tests.add(name, test.time, test.round, test.metrics.accuracy)
        self._on_test(test)

    def _drop_unfinished(self) -> None:
        """Drop training jobs that do not end in time: their tests count, what they learned does not."""
        self._test(self._waiting())
        for peer, job in sorted(self._jobs.items()):
            self._undo(peer)
            if job.test is not None:
                self._report(job.test)
        self._jobs.clear()

    def _undo(self, peer: int) -> None:
        """Leave the network as a training job that does not end found it."""
        if (flat := self._jobs[peer].flat) is not None:
            self.members[peer].network.flat.copy_(flat)

    def _present(self, time: float) -> list[int]:
        return np.flatnonzero(self.world.present_at(time)).tolist()


# --- from configs -----------------------------------------------------------------------------------


def _world(config: Config, graph: nx.Graph, source: str) -> tuple[World, float]:
    """The world that a config's [time] table describes, and how long to run; errors name file and key."""
    time = config.time or Time()
    if config.gossip.mode != "async":
        raise ConfigError(
            f"{source}: key 'gossip.mode': virtual time is for mode = 'async', not {config.gossip.mode!r}; "
            "without a [time] table the arena averages in rounds"
        )
    try:
        training = parse(time.training, "training")
        seconds = time.seconds or config.rounds * (training.mean * config.every)
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

    mixing: that of the config's topology, if it has one. Without one, live peers in `rounds` mode give
    everybody an equal part, and in `server` mode all they have to one of them.
    """
    lossy = config.gossip.lossy[0]
    require_push(config, source, "peers that send messages", f"leave out 'gossip.{lossy}'")
    check_compression(config, members, shared_models(members), source)
    if mixing is not None:
        return mixing, _wire(config)
    if config.gossip.mode == "server":
        return Server(), _wire(config)
    if config.gossip.mode == "rounds":
        everybody = nx.complete_graph(config.peers)
        return Gossip(everybody, exchanges=config.gossip.exchanges or 1), _wire(config)
    raise ConfigError(
        f"{source}: key 'gossip.{lossy}': without a topology and a [time] table async peers "
        'are averaged exactly, and send no messages; add one of them, or use mode = "rounds" or "server"'
    )


def _graph(config: Config, members: list[Member], source: str) -> nx.Graph:
    """Who may talk to whom; everybody if the config does not say."""
    if config.topology is None:
        return nx.complete_graph(config.peers)
    graph = graph_of(config, members, source)
    if graph is None:
        raise ConfigError(
            f"{source}: key 'topology': a graph that changes in steps has no place in virtual time; name one "
            "graph, and let links fail with [time.churn]"
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
    chances = {k: getattr(churn, k) for k in ("leave", "arrive", "link_down", "link_up")}
    return tuple(draw_events(graph, steps, **chances, seed=config.seed))


def _side(who: int | list[int] | str, peers: int) -> frozenset[int]:
    if isinstance(who, str):
        return frozenset(range(peers))
    return frozenset(range(who) if isinstance(who, int) else who)


# --- results ----------------------------------------------------------------------------------------


def simulate(
    simulation: Simulation,
    results: Results,
    *,
    networks: bool = False,
    on_round: Callable[[Round], None] = lambda _: None,
) -> list[Path]:
    """Run a simulation and leave config.json, metrics.jsonl, summary.csv and accuracy.png / .svg.

    Where values are compressed, rounded or skipped, traffic.csv has the bytes of each shared model. With
    `networks` every peer's network is left as safetensors too. Stopped by Ctrl-C, the files hold what was
    computed until then, and KeyboardInterrupt goes on to the caller.
    """
    # First, since it refuses what does not fit: until then no folder is taken.
    arena, members = simulation.arena(), simulation.members
    with _recorded(simulation.config, members, results, networks, arena.wire_simulation) as (
        file,
        written,
    ):
        console.warn(str(arena.needs()))
        for round in simulation.rounds(arena):
            for member, test in zip(members, round.tests, strict=False):
                file.write({"round": round.index, **_test_record(member, test)})
            on_round(round)
    return written


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
    """Run a config with a [time] table, and leave the files of `simulate`.

    presence.csv says who was present when, where peers come and go; traffic.csv is always there. A config
    that cannot be run takes no folder.

    on_mean: called about a hundred times, and at the end, with the mean accuracy of those who are present.
    """
    next_mean = 0.0

    def note(tested: Reading) -> None:
        nonlocal next_mean
        record = _test_record(run.members[tested.peer], tested.metrics)
        file.write({"time": tested.time, "round": tested.round, **record})
        on_test(tested)
        if tested.time >= next_mean:
            next_mean = tested.time + run.seconds / _MOMENTS
            on_mean(run.tests.mean(tested.time))

    warn_unused_keys(config, "virtual", source)
    # First, since it finds what is wrong with the config: until then no folder is taken.
    run = LearningSimulation(config, source, threads=threads, on_test=note)
    with _recorded(config, run.members, results, networks, run.events) as (file, written):
        on_start(run.seconds)
        stays = ([peer, *stay] for peer, times in run.tests.presence.items() for stay in times)
        write_csv(results.folder / "presence.csv", ["peer", "from", "until"], stays)
        try:
            run.run()
        except KeyboardInterrupt:
            run.stop()
            raise
        on_mean(run.tests.mean(run.seconds))
    return written


@contextmanager
def _recorded(
    config: Config,
    members: Sequence[Member],
    results: Results,
    networks: bool,
    sent: EventSimulator | None,
) -> Iterator[tuple[RecordFile, list[Path]]]:
    """Open a run's folder and its metrics.jsonl; when the run ends, write all that follows from it.

    Yields that file, and a list that names what else was written once the run is over.
    """
    written: list[Path] = []
    with results.begun() as out:
        try:
            with RecordFile(out / "metrics.jsonl") as file:
                write_json(out / "config.json", config.model_dump(mode="json"))
                yield file, written
        except KeyboardInterrupt:
            if networks:
                save_networks(members, out)
            raise
        finally:
            written += summarise(out, config.name)
            if sent is not None:
                written.append(write_traffic(out / "traffic.csv", sent.counted()))
        if networks:
            written += save_networks(members, out)


def _test_record(member: Member, test: Metrics) -> dict[str, object]:
    accuracy, loss = test.accuracy, test.mean_loss
    return {"peer": member.name, "task": member.task, "accuracy": accuracy, "loss": loss}


def save_networks(members: Sequence[Member], out: Path) -> list[Path]:
    """Leave every peer's network, as it is now, as safetensors."""
    files = []
    for member in members:
        files.append(out / f"peer-{member.name}.safetensors")
        with replacing(files[-1]) as part:
            member.network.save(part)
    return files


def write_traffic(path: Path, counted: Iterable[tuple[str, int, Traffic]]) -> Path:
    """A table of bytes that were sent, and what was saved and distorted, from a row for each model.

    Sizes are those of the values alone: headers and answers are left out.
    """
    header = ["model", "bytes", "plain_bytes", "skipped", "mean_distortion", "worst_distortion"]
    rows = [
        [name, size, size + each.saved, each.skipped, f"{each.mean_distortion:.4g}", f"{each.worst:.4g}"]
        for name, size, each in counted
    ]  # fmt: skip
    write_csv(path, header, rows)
    return path


def summarise(out: Path, title: str) -> list[Path]:
    """Draw and tabulate what metrics.jsonl and presence.csv hold; nothing if nobody was tested."""
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
    from ..study.figures import band, canvas, save  # matplotlib takes a second

    mean, here = tests.mean(tests.last), tests.at(tests.last)
    line, peers = "peers; line: mean, band: worst to best", len(tests.of)
    if timed:
        header = ["peer", "task", "rounds", "accuracy", "there"]
        rows = [
            [peer, tasks[peer], round, f"{accuracy:.4f}", "yes" if peer in here else "no"]
            for peer, (*_, (_, round, accuracy)) in sorted(
                tests.of.items(), key=lambda item: (len(item[0]), item[0])
            )
        ]
        rows.append(["mean", "", "", f"{mean.accuracy:.4f}", f"{mean.peers}"])
        figure, axes = canvas(
            f"{peers} {line}, of peers that are there at the time, each by its latest test on its own "
            f"task; at the last test {mean.accuracy:.3f}, the mean of {mean.peers}"
        )
    else:
        header = ["peer", "task", "accuracy"]
        rows = [[peer, tasks[peer], f"{accuracy:.4f}"] for peer, accuracy in here.items()]
        figure, axes = canvas(f"{peers} {line} peer, each on its own task")
    write_csv(out / "summary.csv", header, rows)
    band(axes, tests.curve() if timed else rounds)
    axes.set(title=title, xlabel="virtual time in seconds" if timed else "round", ylabel="accuracy")
    return [out / "summary.csv", *save(figure, out / "accuracy")]


# --- whose accuracy counts --------------------------------------------------------------------------

_MOMENTS = 100  # at which the mean is told, and a curve is drawn

Presence = Mapping[str, Sequence[tuple[float, float]]]
"""Per peer when it came and when it left, in order; infinity if it did not leave."""


@dataclass(frozen=True)
class Mean:
    """The mean accuracy of those who count at a moment, and how many they are; NaN if nobody does."""

    time: float
    accuracy: float
    peers: int


class AccuracyLog:
    """The tests of all peers in virtual time.

    At any moment those peers count that are present then, each by its latest test so far. A peer that has
    left counts no more, whatever it knew; one that is back but was not tested since counts by the test before
    it left. Curves, means and sweeps all follow this rule.

    presence: a peer without an entry is there all the time; at the very moment of leaving it is not.

    `of` has (time, rounds of the peer's own, accuracy) for each test of each peer, in order of time.
    """

    def __init__(self, presence: Presence):
        self.presence = presence
        self.of: dict[str, list[tuple[float, int, float]]] = {}

    @property
    def last(self) -> float:
        """The time of the last test."""
        return max(tests[-1][0] for tests in self.of.values())

    def add(self, peer: str, time: float, round: int, accuracy: float) -> None:
        """Note a test."""
        insort(self.of.setdefault(peer, []), (time, round, accuracy))

    def at(self, time: float) -> dict[str, float]:
        """Return the accuracy of every peer that counts at a moment."""
        accuracies: dict[str, float] = {}
        for peer, tests in self.of.items():
            count = bisect_right(tests, time, key=lambda test: test[0])
            stays = self.presence.get(peer, [(-math.inf, math.inf)])
            if count and any(start <= time < end for start, end in stays):
                accuracies[peer] = tests[count - 1][2]
        return accuracies

    def mean(self, time: float) -> Mean:
        """Return the mean at a moment."""
        accuracies = self.at(time)
        mean = fmean(accuracies.values()) if accuracies else math.nan
        return Mean(time, mean, len(accuracies))

    def curve(self) -> dict[Any, list[float]]:
        """Return everybody's accuracies at moments from the first test to the last, where any count."""
        first = min(tests[0][0] for tests in self.of.values())
        last = self.last
        steps = (first + (last - first) * step / _MOMENTS for step in range(_MOMENTS))
        found = {time: list(self.at(time).values()) for time in [*steps, last]}
        return {time: accuracies for time, accuracies in found.items() if accuracies}


def presence_of(world: World, names: Sequence[str]) -> Presence:
    """When peers come and go in a world; empty if nobody does."""
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
