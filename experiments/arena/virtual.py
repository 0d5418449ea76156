"""Run a config in virtual time, a simulated clock: each peer trains at its own pace, with live peers' gossip.

A training job (the local steps of one peer) begins with the peer's current values. Mass that arrives during
the job is mixed into the peer's values, not into the job. When the job ends, the change that training made is
added to the peer's values, as push-sum allows. So the jobs of different peers are independent, and their
results are needed only when a job ends. Then all jobs that have begun are trained together, stacked in an
arena.

Gossip is computed in one of two ways: on arrays of all peers (`ArrayJobs`), or, where arrays cannot do what
the config asks for, by a Gossiper for each peer, as in live peers.

A peer does its local steps `config.every` times between two pushes; their mean time is the push interval.

`source`, an argument of many functions, is the path of the config's file: errors and warnings begin with it,
and files that the config names are looked for in its folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch

from ...gossip import ONE, Array, DictStore, Partition, SteadyMode
from ...gossip.compress import Shapes, Traffic
from ...models import Callback, CallbackList, Gain, Metrics, Progress
from ...peer import blocks, schema_entries
from ...topology import Event, TopologyError, draw_events, read_events
from ..build import (
    PeerFacts,
    Swarm,
    check_compression,
    choose_twins,
    matched_members,
    select_peers,
    shared_models,
)
from ..cli import console
from ..config.needs import refuse_conflicts, warn_unused_keys
from ..config.tables import Churn, Config, ConfigError, Time
from ..graphs.swarm import push_graph, pushes_of
from ..results import Results, write_csv
from .arena import Arena, Twins
from .events import VirtualTime, Wire, score_of
from .network import Conditions, TimeError, World
from .network import parse as parse_distribution
from .run_files import (
    CURVE_POINTS,
    AccuracyLog,
    Mean,
    all_callbacks,
    open_run_folder,
    presence_of,
    test_record,
    write_gains,
)
from .vectorised import VectorisedPushSum

_TIME_TOLERANCE = 1e-9
"""The relative error that the time of an event may have. An event at the very end of a run is still processed
if its time was rounded up."""

_MOST_CHURN_STEPS = 10**7
"""The most steps for which churn is drawn, which takes minutes for few peers."""

_WINDOW_INTERVALS = 4
"""Push intervals whose events are computed at once on arrays. With more of them each array operation has more
to do, which is faster, and more transfers are kept in memory."""

_BLOCK_ROWS = 32
"""Rows of arrays that are read, changed and written at once, while they are in the processor's cache."""


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

    push_sum: the peers' gossip; its estimates are the peers' values of the shared model.
    arena: trains and tests. parameters: of all peers, a row each, in the arena's own memory.
    model, shared: the partial model, and its coordinates among a peer's parameters.
    is_due: (peers, times, rounds) → whether a test is due; called once for each job, when it begins.
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
        self.push_sum = VectorisedPushSum(
            values,
            dtype=values.dtype.type,
            on_trained=self._finish,
            on_credit=self._store_start,
            **options,
        )
        self._values = torch.from_numpy(self.push_sum.estimates)
        self._is_due, self._report = is_due, report
        self.rounds = np.zeros(peers, np.int64)
        # Of each peer's present job: the values and the number of credited transfers with which it began,
        # when it began, whether a test is due before it, and whether it is computed (trained, not finished).
        # A job's starting values are stored at its first credit: until then they are the peer's values, and
        # until the job is computed, also the parameters of its network.
        self._start_values = torch.empty_like(self._values)
        self._start_credits = self.push_sum.credits.copy()
        self._start_times = np.zeros(peers)
        self._is_test_due = np.zeros(peers, bool)
        self._computed = np.zeros(peers, bool)
        self._tests: dict[int, PeerTestResult] = {}
        """By peer: the result of the test before its present job, which is not reported yet."""
        self._tests_to_report: list[tuple[float, int, PeerTestResult]] = []
        """(time at which the job after the test ended, peer, result)"""

    def run(self, seconds: float) -> None:
        """Let virtual time pass, then undo the jobs that have not ended.

        A test is reported when the job after it ends; if that does not end, at the end of the run.
        """
        interval = self.push_sum.world.conditions.push_interval
        while self.push_sum.now < seconds:
            self.push_sum.advance(min(self.push_sum.now + _WINDOW_INTERVALS * interval, seconds))
            for *_, test in sorted(self._tests_to_report, key=lambda entry: entry[:2]):
                self._report(test)
            self._tests_to_report.clear()
        # Jobs that do not end are not trained, but the tests before them are run.
        self._run_due_tests(np.flatnonzero(~self._computed))
        for _, test in sorted(self._tests.items()):
            self._report(test)
        self.write_networks()

    def write_networks(self) -> None:
        """Write the peers' values into their networks, without what jobs that have not ended changed."""
        unfinished = torch.from_numpy(np.flatnonzero(self._computed))
        if len(self._private):
            self._parameters[unfinished[:, None], self._private] = self._private_before[unfinished]
        self._parameters[:, self._shared] = self._values

    def values_sent(self) -> int:
        """Return how many values were sent so far."""
        return self.push_sum.counters["transfer"] * self._values[0].numel()

    def _finish(self, peers: np.ndarray, times: np.ndarray) -> None:
        """Finish the jobs of some peers: add their changes to the peers' values, and begin the next jobs."""
        if not self._computed[peers].all():
            self._train(np.flatnonzero(~self._computed))
        # A peer without credits during its job takes over its values after training.
        is_mixed = self._is_mixed(peers)
        for rows, mixed in ((peers[~is_mixed], False), (peers[is_mixed], True)):
            for block in torch.from_numpy(rows).split(_BLOCK_ROWS):
                after = self._parameters.index_select(0, block)[:, self._shared]
                if mixed:
                    after -= self._start_values.index_select(0, block)
                    after += self._values.index_select(0, block)
                    self._write_parameters(block, after)
                self._values.index_copy_(0, block, after)
        for peer, time in zip(peers.tolist(), times.tolist(), strict=True) if self._tests else ():
            if (test := self._tests.pop(peer, None)) is not None:
                self._tests_to_report.append((time, peer, test))
        self.rounds[peers] += 1
        self._start_credits[peers] = self.push_sum.credits[peers]
        self._computed[peers] = False
        self._start_times[peers] = times
        self._is_test_due[peers] = self._is_due(peers, times, self.rounds[peers])

    def _is_mixed(self, peers: np.ndarray) -> np.ndarray:
        """Return whether mass was credited to some peers since their jobs began."""
        return self.push_sum.credits[peers] != self._start_credits[peers]

    def _store_start(self, peers: np.ndarray) -> None:
        """Store the values with which jobs began, of peers that are about to get their first credit."""
        for block in torch.from_numpy(peers[~self._is_mixed(peers)]).split(_BLOCK_ROWS):
            self._start_values.index_copy_(0, block, self._values.index_select(0, block))

    def _write_parameters(self, peers: torch.Tensor, values: torch.Tensor) -> None:
        """Write values of the shared model into the networks of some peers."""
        if isinstance(self._shared, slice):
            self._parameters[:, self._shared].index_copy_(0, peers, values)
        else:
            self._parameters[peers[:, None], self._shared] = values

    def _run_due_tests(self, peers: np.ndarray) -> None:
        """Run the tests that are due before the jobs of some peers, which are not computed yet."""
        due = peers[self._is_test_due[peers]].tolist()
        for peer, metrics in zip(due, self._arena.test(due), strict=True):
            self._tests[peer] = PeerTestResult(
                float(self._start_times[peer]), int(self.rounds[peer]), peer, metrics
            )
        self._is_test_due[peers] = False

    def _train(self, peers: np.ndarray) -> None:
        """Compute the jobs of some peers."""
        self._run_due_tests(peers)
        if len(self._private):
            rows = torch.from_numpy(peers)
            self._private_before[rows] = self._parameters[rows[:, None], self._private]
        # Set before training, so that an interrupted training is undone.
        self._computed[peers] = True
        self._arena.train(peers.tolist())


class LearningSimulation:
    """A config's swarm in virtual time; `run` runs it, once only.

    threads: the threads that train peers in parallel; they do not affect the result.
    arrays: whether gossip may be computed on arrays, which is faster and differs only in rounding. It is
        then if all peers are stacked and share one partial model, none leaves, messages are exact, the mode
        is async, and there are no callbacks.
    on_test: called with the result of every test, in an order that depends only on the config.

    graph: which peers may push to which.
    world: who is online, and what delays and losses messages have, at any virtual time.
    seconds: the virtual time at which the run ends.
    array_jobs: jobs and gossip on arrays; None if every peer has a Gossiper.
    events: simulates these Gossipers; set only if `array_jobs` is None.
    rounds: the number of training jobs that each peer has finished.
    tests: the accuracies of all tests so far. latest_tests: the latest test of each peer, by its name.
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
        self._callback_rounds = 0
        self._stopped_by = ""
        """The method of a callback that has stopped the run: "start", "round" or "test"; "" if none has."""
        self.latest_tests: dict[str, Metrics] = {}
        self._latest_training: dict[str, Metrics] = {}
        if any(model.matching == "fuse" for model in config.models):
            raise ConfigError(
                f"{source}: key 'models': matching 'fuse' is not supported in virtual time; leave out "
                "[time], or run live peers with gossamer swarm"
            )
        refuse_conflicts("virtual", config, source)
        self.members, _ = matched_members(Swarm(config, source))
        self.graph = graph = push_graph(config, self.members, source)
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
        self.array_jobs = self._make_array_jobs(peers_of_model, threads) if arrays else None
        self._stores: list[DictStore] = []
        if self.array_jobs is None:
            self._stores, self.events = self._make_gossipers(peers_of_model)
        self._on_test = on_test
        self._jobs: dict[int, _Job] = {}
        self.rounds = [0] * len(self.members)
        # Tests are due by virtual time, not by rounds; otherwise slow peers would hardly ever be tested. Time
        # is divided into intervals; this is the number of the interval in which each peer's last job began.
        self._last_interval = np.zeros(len(self.members))

    def _weights(self) -> list[int]:
        """The push-sum weight with which each peer begins."""
        by_samples = self.config.weights == "samples"
        return [ONE * (member.samples if by_samples else 1) for member in self.members]

    def _make_array_jobs(
        self, peers_of_model: Mapping[str, Sequence[int]], threads: int
    ) -> ArrayJobs | None:
        """Return the jobs as arrays; None if peers need a Gossiper each."""
        config, parameters = self.config, self._arena.stacked_values()
        needs_gossipers = config.gossip.mode == "steady" or config.gossip.lossy_keys
        if needs_gossipers or self.world.churns or parameters is None or len(peers_of_model) != 1:
            return None
        ((model, peers),) = peers_of_model.items()
        # Many peers share one slicing, a large object: each slicing is looked at once.
        slicings = {id(member.network.slicing): member.network.slicing for member in self.members}
        shared, *others = (
            slicing.coordinates_or_slice(model)
            for slicing in slicings.values()
            if model in slicing.averaged_models
        )
        if len(peers) < config.peers or any(not _are_equal(shared, other) for other in others):
            return None
        return ArrayJobs(
            self._arena, parameters, model, shared, self._note_starts, self._report,
            graph=self.graph, conditions=self.world.conditions, seed=config.seed, threads=threads,
            weights=np.array(self._weights()), fanout=pushes_of(config), fraction=config.gossip.fraction,
            window=_WINDOW_INTERVALS * self.world.conditions.push_interval,
        )  # fmt: skip

    def _make_gossipers(
        self, peers_of_model: Mapping[str, Sequence[int]]
    ) -> tuple[list[DictStore], VirtualTime]:
        """Return the stores of all peers, and the simulator of their gossipers."""
        config = self.config
        shared_values: list[dict[str, Array]] = [{} for _ in self.members]
        shapes: dict[str, Shapes] = {}
        for model, peers in peers_of_model.items():
            if config.gossip.compress is not None:
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
            wire=replace(Wire.of(config.gossip), shapes=shapes),
            on_trained=self._finish_job,
            on_arrival=self._begin_job,
        )

    def traffic_by_model(self) -> list[tuple[str, int, Traffic]]:
        """Return, for each model that was sent, its name, the bytes sent, and statistics of compression."""
        if self.array_jobs is None:
            return self.events.traffic_by_model()
        sent = self.array_jobs.values_sent() * np.dtype(self.config.gossip.dtype).itemsize
        return [(self.array_jobs.model, sent, Traffic())]

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
        for name in store.names():
            network.write(name, store.read(name))
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
        if self._callbacks and self.array_jobs is not None:
            self.array_jobs = None
            self._stores, self.events = self._make_gossipers(self._peers_of_model)
        end = self.seconds * (1 + _TIME_TOLERANCE)
        with self._callbacks.ending():
            if self.array_jobs is not None:
                self.array_jobs.run(end)
                self.rounds = self.array_jobs.rounds.tolist()
            else:
                for peer in self._online(0.0):
                    self._begin_job(peer, 0.0)
                if self._callbacks.start(self._progress(0.0)):
                    self.seconds, self._stopped_by = 0.0, "start"
                else:
                    self.events.run(end, self._call_callbacks)
                self._drop_unfinished_jobs()
                self._write_shared_values()
            online = self._online(self.seconds)
            for peer, metrics in zip(online, self._arena.test(online), strict=True):
                self._report(PeerTestResult(self.seconds, self.rounds[peer], peer, metrics))
            if not self._stopped_by:
                self._callback_rounds += 1
                self._callbacks.round(self._progress(self.seconds))
            if self._stopped_by in ("", "round"):
                self._callbacks.test(self._progress(self.seconds, tested=True))
        if self._stopped_by:
            console.warn(
                f"stopped by callback {self._callbacks.stopped_by} after {self.seconds:.4g} virtual seconds"
            )
        self._measure_gains(online)

    def _call_callbacks(self) -> bool:
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
            elif is_due and self.latest_tests and self._callbacks.test(tested):
                self._stopped_by = "test"
        if self._stopped_by:
            self.seconds = now
        return bool(self._stopped_by)

    def _progress(self, time: float, *, tested: bool = False) -> Progress:
        """Return the progress for callbacks; tested: whether with the latest test of every online peer."""
        names = [self.members[peer].name for peer in self._online(time)]
        tests = {name: self.latest_tests[name] for name in names if name in self.latest_tests}
        return Progress(
            self._callback_rounds, self._planned_rounds, [member.learner for member in self.members],
            dict(self._latest_training), tests if tested else {}, time,
        )  # fmt: skip

    @contextmanager
    def _current_networks(self) -> Iterator[None]:
        """Write the peers' current values into their networks, and restore the networks at the end.

        In between, the networks lack what unfinished jobs have changed.
        """
        flats = [member.network.flat.clone() for member in self.members]
        self.write_networks()
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

    def write_networks(self) -> None:
        """Write the peers' current values into their networks, without the changes of unfinished jobs."""
        if self.array_jobs is not None:
            self.array_jobs.write_networks()
            return
        for peer in self._jobs:
            self._restore_network(peer)
        self._write_shared_values()

    def _write_shared_values(self) -> None:
        """Write the peers' values of shared models into their networks."""
        for peer, member in enumerate(self.members):
            for model in self._stores[peer].names():
                member.network.write(model, self._stores[peer].read(model))

    def _begin_job(self, peer: int, time: float) -> None:
        """Begin a training job with the peer's current values, and note whether a test is due before it."""
        if peer in self._jobs:
            self._restore_network(peer)  # the peer's last session ended during a training job
        store = self._stores[peer]
        start = {model: store.read(model) for model in store.names()}
        rounds = self.rounds[peer]
        (is_due,) = self._note_starts(np.array([peer]), np.array([time]), np.array([rounds]))
        test = PeerTestResult(time, rounds, peer, Metrics()) if is_due else None
        self._jobs[peer] = _Job(start, test)

    def _note_starts(self, peers: np.ndarray, times: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        """Note that peers begin jobs at these times; return which of them are to be tested before.

        rounds: the number of jobs that each of them has finished.
        """
        interval = times // (self.config.test_every * self.world.conditions.push_interval)
        is_due = (rounds > 0) & (interval > self._last_interval[peers])
        self._last_interval[peers] = interval
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
            # If no mass was credited during the job, the store still has the array with which it began.
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
            self._latest_training[self.members[peer].name] = metrics
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
        self.latest_tests[name] = test.metrics
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


def _are_equal(first: slice | np.ndarray, second: slice | np.ndarray) -> bool:
    """Return whether two Python slices, or two arrays, of coordinates are equal."""
    if isinstance(first, slice) or isinstance(second, slice):
        return isinstance(first, slice) and isinstance(second, slice) and first == second
    return first is second or np.array_equal(first, second)


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
                Partition(
                    table.start, table.end, frozenset(select_peers(table.peers, config.peers))
                )
                for table in time.partitions
            ),
            every=config.every,
            **time.model_dump(include={"stragglers", "slowdown", "loss", "timeout"}),
        )
        return World(conditions, graph, config.seed), seconds
    except (TimeError, TopologyError) as error:
        key = "time.churn" if isinstance(error, TopologyError) else "time"
        raise ConfigError(f"{source}: key {key!r}: {error}") from None


def _churn_events(
    churn: Churn | None, config: Config, graph: nx.Graph, seconds: float, source: str
) -> tuple[Event, ...]:
    """Return when peers and links come and go: read from the trace of [time.churn], or drawn at random."""
    if churn is None:
        return ()
    if churn.trace is not None:
        return tuple(read_events(Path(source).parent / churn.trace))
    steps = math.ceil(seconds / churn.step) + 1
    if steps > _MOST_CHURN_STEPS:
        raise ConfigError(
            f"{source}: key 'time.churn.step': {churn.step:g} s make {steps:.1e} steps of churn in a run of "
            f"{seconds:g} virtual seconds, more than {_MOST_CHURN_STEPS:.0e}; raise it"
        )
    keys = ("leave", "arrive", "link_down", "link_up")
    probabilities = {key: getattr(churn, key) for key in keys}
    return tuple(draw_events(graph, steps, **probabilities, seed=config.seed))


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
    """Run a config with a [time] table in virtual time, and write the same files as `simulate`.

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
        record = test_record(run.members[test.peer], test.metrics)
        metrics_file.write({"time": test.time, "round": test.round, **record})
        on_test(test)
        if test.time >= next_mean:
            next_mean = test.time + run.seconds / CURVE_POINTS
            on_mean(run.tests.mean(test.time), run.seconds)

    warn_unused_keys(config, "virtual", source)
    # Before the results folder is created, since this raises if the config is wrong.
    run = LearningSimulation(config, source, threads=threads, on_test=record_test)
    graph = None if config.topology is None else run.graph
    peers = [PeerFacts.of(member) for member in run.members]
    with open_run_folder(
        config, run.members, peers, graph, results, networks, run.traffic_by_model
    ) as (metrics_file, written):
        rows = (
            [peer, arrived, left]
            for peer, online_periods in run.tests.presence.items()
            for arrived, left in online_periods
        )
        write_csv(results.folder / "presence.csv", ["peer", "from", "until"], rows)
        try:
            run.run(all_callbacks(callbacks, config, results.folder))
        except KeyboardInterrupt:
            run.write_networks()
            raise
        written += write_gains(results.folder, run.gains, config.peers)
        on_mean(run.tests.mean(run.seconds), run.seconds)
    return written
