"""Benchmarks of live peers: throughput against bare aiomqtt clients on the same broker, and memory.

The peers gossip but do not train. Bare clients only move bytes with aiomqtt: in every trial each client sends
`messages` payloads to its neighbours, one after the other, and waits until it has received as many. Bare
clients run in processes of their own, `python -m gossamer.experiments.bench.live SPEC.json`, which import
nothing heavy: they cost only what aiomqtt and the broker cost.

Peers and bare clients run alternately, in trials. The parent process starts each trial by a gate, which is a
file lock: it holds an exclusive lock on one file per trial; a process that waits for the trial asks for a
shared lock on that file and gets it when the parent releases its own. Waiting needs no processor time, and if
the parent is killed, all gates open.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import aiomqtt

from ... import models, peer  # both load their modules, and torch, only when a name is used
from . import PARAMETERS, Row, sliced_perceptron

if TYPE_CHECKING:
    from ...models import Metrics
    from ...peer import Broker, LocalSwarm

LEARNER = "gossamer.experiments.bench.live:IdleLearner"
VALUE_BYTES = 4 * PARAMETERS
TIMEOUT = 180.0
"""Seconds to wait until all peers or clients are ready, or have finished a trial."""


# --- trials -----------------------------------------------------------------------------------------

READY = -1
"""A peer or client that reports trial -1 as done is ready for the first trial, number 0."""
_POLL_SECONDS = 0.02


def wait_for_trial(folder: Path, side: str, trial: int) -> None:
    """Block until the parent opens this trial; side: "peers" or "bare"."""
    descriptor = os.open(folder / f"gate-{side}-{trial}", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def report_done(folder: Path, side: str, trial: int, name: str) -> None:
    """Report to the parent that `name` has finished a trial, and its process's processor time so far."""
    unfinished = folder / f"part-{side}-{trial}-{name}"
    report = f"{time.monotonic_ns()} {os.getpid()} {time.process_time_ns()}"
    unfinished.write_text(report, encoding="utf-8")
    unfinished.replace(folder / f"done-{side}-{trial}-{name}")


@dataclass(frozen=True)
class Trial:
    """The time that peers or clients took for one trial; processor seconds exclude the broker's."""

    seconds: float
    processor_seconds: float


class Gates:
    """Starts the trials of one side of a comparison, and times them; used by the parent process.

    names: the peers or clients that take part.
    check_alive: called while waiting; raises if one of their processes ended too early.
    """

    def __init__(
        self,
        folder: Path,
        side: str,
        trials: int,
        names: Sequence[str],
        check_alive: Callable[[], None],
    ):
        self._folder, self._side, self._names, self._check_alive = folder, side, names, check_alive
        self._locks: list[int] = []
        self._processor_ns = 0
        for trial in range(trials):
            flags = os.O_RDWR | os.O_CREAT
            self._locks.append(os.open(folder / f"gate-{side}-{trial}", flags, 0o600))
            fcntl.flock(self._locks[-1], fcntl.LOCK_EX)

    def ready(self, timeout: float = TIMEOUT) -> None:
        """Wait until all peers or clients are ready for the first trial."""
        _, self._processor_ns = self._wait(READY, timeout)

    def open(self, trial: int) -> None:
        """Let all peers or clients begin a trial."""
        os.close(self._locks[trial])

    def run(
        self, trial: int, timeout: float = TIMEOUT, on_poll: Callable[[], object] = lambda: None
    ) -> Trial:
        """Open a trial and wait until all have finished it; `on_poll` is called repeatedly while waiting."""
        started = time.monotonic_ns()
        self.open(trial)
        ended, processor_ns = self._wait(trial, timeout, on_poll)
        used, self._processor_ns = processor_ns - self._processor_ns, processor_ns
        return Trial((ended - started) / 1e9, used / 1e9)

    def _wait(
        self, trial: int, timeout: float, on_poll: Callable[[], object] = lambda: None
    ) -> tuple[int, int]:
        """Return when the last finished, and the processor time of all processes since their start (ns)."""
        deadline = time.monotonic() + timeout
        files = [self._folder / f"done-{self._side}-{trial}-{name}" for name in self._names]
        while missing := [file for file in files if not file.exists()]:
            self._check_alive()
            on_poll()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"benchmark {self._side}, trial {trial}: {len(missing)} of {len(files)} had not "
                    f"finished after {timeout:g} s; the machine may be busy: try again"
                )
            time.sleep(_POLL_SECONDS)
        reports = [[int(word) for word in file.read_text("utf-8").split()] for file in files]
        processor_ns: dict[int, int] = {}
        for _, process, used in reports:  # of peers that share a process, take the latest report
            processor_ns[process] = max(used, processor_ns.get(process, 0))
        return max(report[0] for report in reports), sum(processor_ns.values())


# --- the bare clients -------------------------------------------------------------------------------


async def run_client(spec: dict[str, Any], name: str, neighbours: list[str]) -> None:
    """Connect one bare client and take part in every trial."""
    folder, messages, window = Path(spec["folder"]), spec["messages"], 2 * len(neighbours)
    payload = bytes(spec["bytes"])
    received = 0
    arrived = asyncio.Condition()

    # The receiving task is in a task group, which ends it however the client ends.
    client = aiomqtt.Client("127.0.0.1", spec["port"], identifier=f"bare-{name}")
    async with client, asyncio.TaskGroup() as group:
        await client.subscribe(f"bare/{name}")

        async def receive() -> None:
            nonlocal received
            async for message in client.messages:
                if len(message.payload) != len(payload):
                    raise RuntimeError(f"client {name} received a payload of a wrong length")
                received += 1
                async with arrived:
                    arrived.notify_all()

        async def until_received(count: int) -> None:
            async with arrived:
                await arrived.wait_for(lambda: received >= count)

        receiver = group.create_task(receive())
        report_done(folder, "bare", READY, name)
        for trial in range(spec["trials"]):
            await asyncio.to_thread(wait_for_trial, folder, "bare", trial)
            for index in range(messages):
                # Send at most `window` messages more than were received, or the broker would queue them all.
                await until_received(trial * messages + index - window)
                await client.publish(f"bare/{neighbours[index % len(neighbours)]}", payload)
            await until_received((trial + 1) * messages)
            report_done(folder, "bare", trial, name)
        receiver.cancel()


async def run_clients(spec: dict[str, Any]) -> None:
    """Run all bare clients of this process."""
    async with asyncio.TaskGroup() as group:
        for name, neighbours in spec["clients"].items():
            group.create_task(run_client(spec, name, neighbours))


def _first_error(errors: BaseExceptionGroup) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def _bare_clients(traffic: Traffic, folder: Path, broker: Broker, trials: int) -> Iterator[Gates]:
    processes: list[subprocess.Popen[bytes]] = []

    def check_alive() -> None:
        if any(process.poll() not in (None, 0) for process in processes):
            raise RuntimeError(
                "a bare client of the benchmark failed; it has printed its error above"
            )

    gates = Gates(folder, "bare", trials, traffic.names, check_alive)
    try:
        for first in range(0, traffic.peers, traffic.per_process):
            members = range(first, min(first + traffic.per_process, traffic.peers))
            spec = {
                "folder": str(folder),
                "port": broker.port,
                "clients": {traffic.names[i]: traffic.neighbours(i) for i in members},
                "messages": traffic.messages,
                "bytes": VALUE_BYTES,
                "trials": trials,
            }
            path = folder / f"bare-{first}.json"
            path.write_text(json.dumps(spec), encoding="utf-8")
            processes.append(subprocess.Popen([sys.executable, "-m", __name__, str(path)]))
        yield gates
        for process in processes:
            process.wait(TIMEOUT)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


# --- the peers --------------------------------------------------------------------------------------


class IdleLearner:
    """A learner that waits for the next trial instead of training, and reports when the averaging is done.

    folder: the folder of the gates; without it there are no trials, and a round of training sleeps `pause`
    seconds.
    """

    def __init__(self, peer: str, folder: str | None = None, pause: float = 0.0):
        self.network = sliced_perceptron(peer)
        self._folder, self._pause = None if folder is None else Path(folder), pause
        self._trial = READY

    def train(self, steps: int) -> Metrics:
        """Wait for the next trial, or sleep; the parameters do not change."""
        if self._folder is None:
            time.sleep(self._pause)
        else:
            if self._trial == READY:
                report_done(self._folder, "peers", READY, self.network.peer)
            self._trial += 1
            wait_for_trial(self._folder, "peers", self._trial)
        return models.Metrics()

    def test(self) -> Metrics:
        """Report the trial as done: peers test after each averaging. Nothing is measured."""
        if self._folder is not None:
            report_done(self._folder, "peers", self._trial, self.network.peer)
        return models.Metrics()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, which is empty."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the empty state."""


@dataclass(frozen=True)
class Traffic:
    """The traffic of one trial: `peers` on a ring, each sending to the two nearest on either side.

    exchanges: exchanges per trial; raise it if trials are too short to time.
    trials: timed trials of peers and of bare clients, after one trial to warm up.
    per_process: how many peers, or bare clients, share a process.
    checkpoint: whether peers save a checkpoint before they send.
    """

    peers: int = 16
    exchanges: int = 8
    trials: int = 5
    per_process: int = 4
    checkpoint: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the peers, which are also those of the bare clients."""
        return [f"p{index}" for index in range(self.peers)]

    def neighbours(self, index: int) -> tuple[str, ...]:
        """The peers that a peer sends to and receives from."""
        others = sorted({(index + step) % self.peers for step in (-2, -1, 1, 2)} - {index})
        return tuple(f"p{other}" for other in others)

    @property
    def messages(self) -> int:
        """Payloads that one peer sends, and receives, in a trial."""
        return self.exchanges * len(self.neighbours(0))

    @property
    def trial_bytes(self) -> int:
        """Bytes of parameters that all peers together receive in a trial."""
        return self.peers * self.messages * VALUE_BYTES


@contextmanager
def _folder_and_broker() -> Iterator[tuple[Path, Broker]]:
    """Yield a temporary folder and a running broker; remove and stop them afterwards."""
    with tempfile.TemporaryDirectory(prefix="gossamer-bench-") as folder, peer.Broker() as broker:
        yield Path(folder), broker


@contextmanager
def running_peers(
    traffic: Traffic, folder: Path, broker: Broker, learner: dict[str, Any], **settings: Any
) -> Iterator[tuple[LocalSwarm, Callable[[], None]]]:
    """Run peers as processes; yield their swarm and a function that raises if the swarm failed.

    The peers have ended when the block is left. learner: parameters of every `IdleLearner`.
    """
    specs = [
        peer.PeerSpec(
            name,
            LEARNER,
            {"peer": name, **learner},
            peer.Settings(
                swarm="bench",
                neighbours=traffic.neighbours(index),
                expect=tuple(traffic.names),
                founder=True,
                checkpoint=traffic.checkpoint,
                **settings,
            ),
        )
        for index, name in enumerate(traffic.names)
    ]
    address = peer.BrokerAddress(broker.url)
    swarm = peer.LocalSwarm(
        peer.SwarmSpec("bench", address, folder, specs, traffic.per_process, restarts=0)
    )
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(swarm.run())
        except BaseException as error:
            failures.append(error)

    def check_alive() -> None:
        if failures:
            raise failures[0]

    thread = threading.Thread(target=run, name="bench swarm")
    thread.start()
    try:
        yield swarm, check_alive
    except BaseException:
        swarm.stop()
        raise
    finally:
        thread.join()
    check_alive()


@contextmanager
def _peers_in_trials(
    traffic: Traffic, folder: Path, broker: Broker, trials: int
) -> Iterator[tuple[Gates, LocalSwarm]]:
    learner = {"folder": str(folder)}
    settings = {"mode": "rounds", "rounds": trials, "exchanges": traffic.exchanges}
    gates = Gates(folder, "peers", trials, traffic.names, lambda: check_alive())
    with running_peers(traffic, folder, broker, learner, **settings) as (swarm, check_alive):
        yield gates, swarm


# --- throughput -------------------------------------------------------------------------------------


def throughput() -> list[Row]:
    """Measure the bytes of parameters that arrive per second, peers against bare clients."""
    return _comparison_rows("gossip of 16 peers", Traffic(), wanted=0.7)


def checkpoint() -> list[Row]:
    """Measure throughput when peers save a checkpoint before every message that they send."""
    return _comparison_rows("gossip with checkpoints", Traffic(checkpoint=True), wanted=None)


def _comparison_rows(name: str, traffic: Traffic, wanted: float | None) -> list[Row]:
    sides = compare(traffic)
    speed, bare_speed = (
        traffic.trial_bytes / median(t.seconds for t in side) / 1e6 for side in sides
    )
    messages = traffic.peers * traffic.messages
    cost, bare_cost = (1e3 * median(t.processor_seconds for t in side) / messages for side in sides)
    return [
        Row(name, "MB/s", speed, bare_speed, wanted, note="baseline: a bare aiomqtt loop"),
        Row(f"{name}: processor", "ms/message", cost, bare_cost, note="without the broker"),
    ]


def compare(traffic: Traffic) -> tuple[list[Trial], list[Trial]]:
    """Return the timed trials of peers and of bare clients, run alternately on one broker."""
    trials = traffic.trials + 1
    with (
        _folder_and_broker() as (folder, broker),
        _bare_clients(traffic, folder, broker, trials) as bare,
        _peers_in_trials(traffic, folder, broker, trials) as (peers, _),
    ):
        for side in (bare, peers):
            side.ready()
        pairs = [(peers.run(trial), bare.run(trial)) for trial in range(trials)]
    return [by_peers for by_peers, _ in pairs[1:]], [by_clients for _, by_clients in pairs[1:]]


# --- memory -----------------------------------------------------------------------------------------

FEW, MANY = 5, 13
"""Two numbers of peers in one process: memory per peer is the slope between them, so that the memory of
the process itself does not count."""
_ROUNDS, _WARM_UP_ROUNDS, _ROUND_SECONDS = 12, 4, 1.0


def memory() -> list[Row]:
    """Measure the memory that one more peer adds to a process: at rest, while learning, while gossiping."""
    if not Path("/proc/self/statm").exists():
        return [Row("memory per peer", "MB", note="needs Linux: /proc is missing")]
    (few_rest, few_busy), (many_rest, many_busy) = _memory_in_trials(FEW), _memory_in_trials(MANY)
    rows = []
    for activity, few, many, wanted in (
        ("at rest", few_rest, many_rest, 4.0),
        (
            "learning, a push each second",
            _memory_while_learning(FEW),
            _memory_while_learning(MANY),
            4.0,
        ),
        ("gossiping without pause", few_busy, many_busy, None),
    ):
        figures = (many - few) / (MANY - FEW) / 1e6, VALUE_BYTES / 1e6
        note = "ratio: copies of its parameters"
        rows.append(Row(f"memory per peer, {activity}", "MB", *figures, wanted, "at most", note))
    return rows


def _memory_while_learning(peers: int) -> float:
    """Bytes of a process whose peers train for a second and push, again and again, in async mode."""
    traffic, samples = Traffic(peers=peers, per_process=peers), list[int]()
    learner, settings = {"pause": _ROUND_SECONDS}, {"rounds": _ROUNDS, "settle_timeout": 5.0}
    with (
        _folder_and_broker() as (folder, broker),
        running_peers(traffic, folder, broker, learner, **settings) as (swarm, check_alive),
    ):
        files = [folder / f"{name}.jsonl" for name in traffic.names]
        while True:
            check_alive()
            time.sleep(_POLL_SECONDS)
            rounds = [file.read_bytes().count(b"\n") if file.exists() else 0 for file in files]
            if min(rounds) >= _WARM_UP_ROUNDS and swarm.pids:
                if max(rounds) >= _ROUNDS:
                    break
                samples.append(anonymous_rss(next(iter(swarm.pids.values()))))
        swarm.stop()
    return median(samples)


def _memory_in_trials(peers: int) -> tuple[float, float]:
    """Bytes of a process with this many peers: while all wait for a trial, and during a trial."""
    traffic = Traffic(peers=peers, per_process=peers, exchanges=40 // peers + 4)
    samples: list[int] = []
    with (
        _folder_and_broker() as (folder, broker),
        _peers_in_trials(traffic, folder, broker, trials=2) as (gates, swarm),
    ):
        gates.ready()
        process = next(iter(swarm.pids.values()))
        at_rest = anonymous_rss(process)
        gates.run(0)
        gates.run(1, on_poll=lambda: samples.append(anonymous_rss(process)))
    return at_rest, median(samples)


def anonymous_rss(process: int) -> int:
    """Resident bytes of a process that are not mapped from a file: heap, stacks, arrays."""
    for line in Path(f"/proc/{process}/status").read_text("utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{process}/status has no line RssAnon; use Linux 4.5 or newer")


if __name__ == "__main__":
    try:
        asyncio.run(run_clients(json.loads(Path(sys.argv[1]).read_text("utf-8"))))
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseExceptionGroup as errors:
        if not isinstance(_first_error(errors), aiomqtt.MqttError):
            raise
        sys.exit(f"bare client: {_first_error(errors)}")  # the broker has ended: no traceback
