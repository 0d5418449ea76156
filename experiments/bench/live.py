"""Live peers that learn nothing: gossip against bare aiomqtt clients on the same broker, and their memory.

Bare clients move bytes with aiomqtt and no more: in every turn each client sends `messages` payloads to its
neighbours, one after the other, and waits until it has received as many. They are processes that run
`python -m gossamer.experiments.bench.live SPEC.json` and import nothing heavy: what they cost is what aiomqtt
and the broker cost.

Peers and clients take turns, which are gates. The parent holds a lock on one file per turn; whoever waits
for that turn asks for a shared lock on it, and gets it when the parent lets go. Waiting costs nothing, and a
killed parent opens every gate.
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

from ... import models, peer  # their names are loaded when they are used, torch among them
from . import PARAMETERS, Row, sliced_perceptron

if TYPE_CHECKING:
    from ...models import Metrics
    from ...peer import Broker, LocalSwarm

LEARNER = "gossamer.experiments.bench.live:IdleLearner"
VALUE_BYTES = 4 * PARAMETERS
PATIENCE = 180.0
"""Seconds to wait for a turn, or for everybody to be ready, before the benchmark gives up."""


# --- turns ------------------------------------------------------------------------------------------

READY = -1
"""The turn before the first: to be through with it is to wait for the first."""
_POLL_SECONDS = 0.02


def wait_for_turn(folder: Path, side: str, turn: int) -> None:
    """Block until the parent opens this turn of this side."""
    descriptor = os.open(folder / f"gate-{side}-{turn}", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def say_through(folder: Path, side: str, turn: int, name: str) -> None:
    """Tell the parent that `name` is through with this turn, and what its process has cost so far."""
    part = folder / f"part-{side}-{turn}-{name}"
    stamp = f"{time.monotonic_ns()} {os.getpid()} {time.process_time_ns()}"
    part.write_text(stamp, encoding="utf-8")
    part.replace(folder / f"through-{side}-{turn}-{name}")


@dataclass(frozen=True)
class Turn:
    """What one side took to move a turn's bytes; processor seconds are without the broker's."""

    seconds: float
    processor_seconds: float


class Gates:
    """The parent's end, for one side of a comparison.

    names: who takes part. alive: called while waiting; raises if a process ended before its time.
    """

    def __init__(
        self, folder: Path, side: str, turns: int, names: Sequence[str], alive: Callable[[], None]
    ):
        self._folder, self._side, self._names, self._alive = folder, side, names, alive
        self._locks: list[int] = []
        self._processor = 0
        for turn in range(turns):
            flags = os.O_RDWR | os.O_CREAT
            self._locks.append(os.open(folder / f"gate-{side}-{turn}", flags, 0o600))
            fcntl.flock(self._locks[-1], fcntl.LOCK_EX)

    def ready(self, timeout: float = PATIENCE) -> None:
        """Wait until everybody waits for the first turn."""
        _, self._processor = self._wait(READY, timeout)

    def open(self, turn: int) -> None:
        """Let everybody begin a turn."""
        os.close(self._locks[turn])

    def run(
        self, turn: int, timeout: float = PATIENCE, on_poll: Callable[[], object] = lambda: None
    ) -> Turn:
        """Open a turn and wait until the last was through; on_poll: called again and again meanwhile."""
        started = time.monotonic_ns()
        self.open(turn)
        ended, processor = self._wait(turn, timeout, on_poll)
        used, self._processor = processor - self._processor, processor
        return Turn((ended - started) / 1e9, used / 1e9)

    def _wait(
        self, turn: int, timeout: float, on_poll: Callable[[], object] = lambda: None
    ) -> tuple[int, int]:
        """When the last was through, and the processor time of all processes since they began."""
        deadline = time.monotonic() + timeout
        files = [self._folder / f"through-{self._side}-{turn}-{name}" for name in self._names]
        while missing := [file for file in files if not file.exists()]:
            self._alive()
            on_poll()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"benchmark {self._side}, turn {turn}: {len(missing)} of {len(files)} were not "
                    f"through after {timeout:g} s; the machine may be busy: try again"
                )
            time.sleep(_POLL_SECONDS)
        stamps = [[int(word) for word in file.read_text("utf-8").split()] for file in files]
        processor: dict[int, int] = {}
        for _, process, used in stamps:  # peers that share a process: its latest figure counts
            processor[process] = max(used, processor.get(process, 0))
        return max(stamp[0] for stamp in stamps), sum(processor.values())


# --- the bare clients -------------------------------------------------------------------------------


async def run_client(spec: dict[str, Any], name: str, neighbours: list[str]) -> None:
    """One client: take part in every turn."""
    folder, messages, window = Path(spec["folder"]), spec["messages"], 2 * len(neighbours)
    payload = bytes(spec["bytes"])
    received = 0
    arrived = asyncio.Condition()

    # The receiver in a group of its own: whatever ends the client, it is seen to its end too.
    client = aiomqtt.Client("127.0.0.1", spec["port"], identifier=f"bare-{name}")
    async with client, asyncio.TaskGroup() as group:
        await client.subscribe(f"bare/{name}")

        async def receive() -> None:
            nonlocal received
            async for message in client.messages:
                if len(message.payload) != len(payload):
                    raise RuntimeError(f"client {name} received something else than was sent")
                received += 1
                async with arrived:
                    arrived.notify_all()

        async def until(count: int) -> None:
            async with arrived:
                await arrived.wait_for(lambda: received >= count)

        receiver = group.create_task(receive())
        say_through(folder, "bare", READY, name)
        for turn in range(spec["turns"]):
            await asyncio.to_thread(wait_for_turn, folder, "bare", turn)
            for index in range(messages):
                # Never far ahead of what comes in, or the broker would have to hold it all.
                await until(turn * messages + index - window)
                await client.publish(f"bare/{neighbours[index % len(neighbours)]}", payload)
            await until((turn + 1) * messages)
            say_through(folder, "bare", turn, name)
        receiver.cancel()


async def run_clients(spec: dict[str, Any]) -> None:
    """All clients of this process."""
    async with asyncio.TaskGroup() as group:
        for name, neighbours in spec["clients"].items():
            group.create_task(run_client(spec, name, neighbours))


def _first(errors: BaseExceptionGroup) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def _bare_clients(traffic: Traffic, folder: Path, broker: Broker, turns: int) -> Iterator[Gates]:
    processes: list[subprocess.Popen[bytes]] = []

    def alive() -> None:
        if any(process.poll() not in (None, 0) for process in processes):
            raise RuntimeError("a bare client of the benchmark failed; its error is above")

    gates = Gates(folder, "bare", turns, traffic.names, alive)
    try:
        for first in range(0, traffic.peers, traffic.per_process):
            members = range(first, min(first + traffic.per_process, traffic.peers))
            spec = {
                "folder": str(folder),
                "port": broker.port,
                "clients": {traffic.names[i]: traffic.neighbours(i) for i in members},
                "messages": traffic.messages,
                "bytes": VALUE_BYTES,
                "turns": turns,
            }
            path = folder / f"bare-{first}.json"
            path.write_text(json.dumps(spec), encoding="utf-8")
            processes.append(subprocess.Popen([sys.executable, "-m", __name__, str(path)]))
        yield gates
        for process in processes:
            process.wait(PATIENCE)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


# --- the peers --------------------------------------------------------------------------------------


class IdleLearner:
    """Waits for its turn instead of training, and says when the averaging after it is over.

    Without a folder there are no turns: a round of training takes `pause` seconds.
    """

    def __init__(self, peer: str, folder: str | None = None, pause: float = 0.0):
        self.network = sliced_perceptron(peer)
        self._folder, self._pause = None if folder is None else Path(folder), pause
        self._turn = READY

    def train(self, steps: int) -> Metrics:
        """Change nothing."""
        if self._folder is None:
            time.sleep(self._pause)
        else:
            if self._turn == READY:
                say_through(self._folder, "peers", READY, self.network.peer)
            self._turn += 1
            wait_for_turn(self._folder, "peers", self._turn)
        return models.Metrics()

    def test(self) -> Metrics:
        """Measure nothing. Peers test when an averaging is over."""
        if self._folder is not None:
            say_through(self._folder, "peers", self._turn, self.network.peer)
        return models.Metrics()

    def state(self) -> dict[str, Any]:
        """Hold nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over nothing."""


@dataclass(frozen=True)
class Traffic:
    """What is exchanged: `peers` on a ring, each with the two nearest on either side.

    exchanges: per turn; raise it if turns are too short to time.
    turns: timed turns of each side, after one to warm up.
    per_process: peers, and bare clients, that share a process.
    """

    peers: int = 16
    exchanges: int = 8
    turns: int = 5
    per_process: int = 4
    checkpoint: bool = False

    @property
    def names(self) -> list[str]:
        """The peers."""
        return [f"p{index}" for index in range(self.peers)]

    def neighbours(self, index: int) -> tuple[str, ...]:
        """The peers that a peer gives to, and hears from."""
        near = sorted({(index + step) % self.peers for step in (-2, -1, 1, 2)} - {index})
        return tuple(f"p{other}" for other in near)

    @property
    def messages(self) -> int:
        """Payloads that one peer sends, and receives, in a turn."""
        return self.exchanges * len(self.neighbours(0))

    @property
    def turn_bytes(self) -> int:
        """Bytes of parameters that all peers together receive in a turn."""
        return self.peers * self.messages * VALUE_BYTES


@contextmanager
def _place() -> Iterator[tuple[Path, Broker]]:
    """A folder and a broker, for a while."""
    with tempfile.TemporaryDirectory(prefix="gossamer-bench-") as folder, peer.Broker() as broker:
        yield Path(folder), broker


@contextmanager
def running_peers(
    traffic: Traffic, folder: Path, broker: Broker, learner: dict[str, Any], **settings: Any
) -> Iterator[tuple[LocalSwarm, Callable[[], None]]]:
    """Peers as real processes, and what raises if they failed; they end before the block does.

    learner: parameters of every `IdleLearner`.
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

    def alive() -> None:
        if failures:
            raise failures[0]

    thread = threading.Thread(target=run, name="bench swarm")
    thread.start()
    try:
        yield swarm, alive
    except BaseException:
        swarm.stop()
        raise
    finally:
        thread.join()
    alive()


@contextmanager
def _peers_in_turns(
    traffic: Traffic, folder: Path, broker: Broker, turns: int
) -> Iterator[tuple[Gates, LocalSwarm]]:
    learner = {"folder": str(folder)}
    settings = {"mode": "rounds", "rounds": turns, "exchanges": traffic.exchanges}
    gates = Gates(folder, "peers", turns, traffic.names, lambda: alive())
    with running_peers(traffic, folder, broker, learner, **settings) as (swarm, alive):
        yield gates, swarm


# --- throughput -------------------------------------------------------------------------------------


def throughput() -> list[Row]:
    """Bytes of parameters that reach the other side per second, peers against bare clients."""
    return _compared("gossip of 16 peers", Traffic(), wanted=0.7)


def checkpoint() -> list[Row]:
    """The same with a checkpoint before every message that leaves: what it costs to lose nothing."""
    return _compared("gossip with checkpoints", Traffic(checkpoint=True), wanted=None)


def _compared(name: str, traffic: Traffic, wanted: float | None) -> list[Row]:
    sides = compare(traffic)
    mine, bare = (traffic.turn_bytes / median(t.seconds for t in side) / 1e6 for side in sides)
    messages = traffic.peers * traffic.messages
    cost, plain = (1e3 * median(t.processor_seconds for t in side) / messages for side in sides)
    return [
        Row(name, "MB/s", mine, bare, wanted, note="baseline: a bare aiomqtt loop"),
        Row(f"{name}: processor", "ms/message", cost, plain, note="without the broker"),
    ]


def compare(traffic: Traffic) -> tuple[list[Turn], list[Turn]]:
    """The timed turns of the peers and of the bare clients, who took turns on one broker."""
    turns = traffic.turns + 1
    with (
        _place() as (folder, broker),
        _bare_clients(traffic, folder, broker, turns) as bare,
        _peers_in_turns(traffic, folder, broker, turns) as (peers, _),
    ):
        for side in (bare, peers):
            side.ready()
        taken = [(peers.run(turn), bare.run(turn)) for turn in range(turns)]
    return [mine for mine, _ in taken[1:]], [plain for _, plain in taken[1:]]


# --- memory -----------------------------------------------------------------------------------------

FEW, MANY = 5, 13
"""Peers in one process. The slope between the two leaves out what a process costs by itself."""
_ROUNDS, _WARM, _ROUND_SECONDS = 12, 4, 1.0


def memory() -> list[Row]:
    """What one more peer adds to a process that has torch anyway: at rest, and while it gossips."""
    if not Path("/proc/self/statm").exists():
        return [Row("memory per peer", "MB", note="needs Linux: /proc is missing")]
    (few_rest, few_busy), (many_rest, many_busy) = _resident(FEW), _resident(MANY)
    rows = []
    for what, few, many, wanted in (
        ("at rest", few_rest, many_rest, 4.0),
        ("learning, a push each second", _learning(FEW), _learning(MANY), 4.0),
        ("gossiping without pause", few_busy, many_busy, None),
    ):
        figures = (many - few) / (MANY - FEW) / 1e6, VALUE_BYTES / 1e6
        note = "ratio: copies of its parameters"
        rows.append(Row(f"memory per peer, {what}", "MB", *figures, wanted, "at most", note))
    return rows


def _learning(peers: int) -> float:
    """Bytes of a process whose peers train and push at a usual pace, in async mode."""
    traffic, samples = Traffic(peers=peers, per_process=peers), list[int]()
    learner, settings = {"pause": _ROUND_SECONDS}, {"rounds": _ROUNDS, "settle_timeout": 5.0}
    with (
        _place() as (folder, broker),
        running_peers(traffic, folder, broker, learner, **settings) as (swarm, alive),
    ):
        files = [folder / f"{name}.jsonl" for name in traffic.names]
        while True:
            alive()
            time.sleep(_POLL_SECONDS)
            rounds = [file.read_bytes().count(b"\n") if file.exists() else 0 for file in files]
            if min(rounds) >= _WARM and swarm.pids:
                if max(rounds) >= _ROUNDS:
                    break
                samples.append(rss(next(iter(swarm.pids.values()))))
        swarm.stop()
    return median(samples)


def _resident(peers: int) -> tuple[float, float]:
    """Bytes of a process with this many peers: connected and waiting, and in the midst of a turn."""
    traffic = Traffic(peers=peers, per_process=peers, exchanges=40 // peers + 4)
    samples: list[int] = []
    with (
        _place() as (folder, broker),
        _peers_in_turns(traffic, folder, broker, turns=2) as (gates, swarm),
    ):
        gates.ready()
        process = next(iter(swarm.pids.values()))
        at_rest = rss(process)
        gates.run(0)
        gates.run(1, on_poll=lambda: samples.append(rss(process)))
    return at_rest, median(samples)


def rss(process: int) -> int:
    """Resident bytes of a process that it does not share with a file: heap, stacks, arrays."""
    for line in Path(f"/proc/{process}/status").read_text("utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{process}/status has no line RssAnon: this kernel is too old")


if __name__ == "__main__":
    try:
        asyncio.run(run_clients(json.loads(Path(sys.argv[1]).read_text("utf-8"))))
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseExceptionGroup as errors:
        if not isinstance(_first(errors), aiomqtt.MqttError):
            raise
        sys.exit(f"bare client: {_first(errors)}")  # the broker ended first: one line will do
