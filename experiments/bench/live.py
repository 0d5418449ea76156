"""Live peers that learn nothing: gossip against a bare aiomqtt loop on the same broker, and their memory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...models import Metrics, SlicedNetwork, mlp
from ...peer import Broker, BrokerAddress, LocalSwarm, PeerSpec, Settings, SwarmSpec
from . import Row
from .bare import Gates, say_through, wait_for_turn

LEARNER = f"{__name__}:make_learner"
LAYOUT = "784=300=100=10"


def idle_network(peer: str) -> SlicedNetwork:
    """The paper's network of 266,610 parameters, all of it global."""
    return SlicedNetwork(
        mlp(LAYOUT, activation="sigmoid", output="sigmoid"),
        {"global": LAYOUT.replace("=", "-")},
        peer=peer,
        seed=1,
    )


class IdleLearner:
    """Waits for its turn instead of training, and says when the averaging after it is over.

    Without a folder there are no turns: a round of training takes `pause` seconds.
    """

    def __init__(self, peer: str, folder: Path | None, pause: float = 0.0):
        self.network = idle_network(peer)
        self._folder, self._pause = folder, pause
        self._turn = -1

    def train(self, steps: int) -> Metrics:
        """Change nothing."""
        if self._folder is None:
            time.sleep(self._pause)
        else:
            if self._turn < 0:
                say_through(self._folder, "peers", -1, self.network.peer)
            self._turn += 1
            wait_for_turn(self._folder, "peers", self._turn)
        return Metrics()

    def test(self) -> Metrics:
        """Measure nothing. Peers test when an averaging is over."""
        if self._folder is not None:
            say_through(self._folder, "peers", self._turn, self.network.peer)
        return Metrics()

    def state(self) -> dict[str, Any]:
        """Hold nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over nothing."""


def make_learner(peer: str, folder: str | None, pause: float = 0.0) -> IdleLearner:
    """The entry point of the benchmark's peers."""
    return IdleLearner(peer, None if folder is None else Path(folder), pause)


# --- throughput -------------------------------------------------------------------------------------

PARAMETERS = 266_610
VALUE_BYTES = 4 * PARAMETERS
_START_SECONDS = 120.0
_TURN_SECONDS = 120.0


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
        Row(name, "MB/s", mine, bare, mine / bare, wanted, note="baseline: a bare aiomqtt loop"),
        Row(
            f"{name}: processor", "ms/message", cost, plain, cost / plain, note="without the broker"
        ),
    ]


@dataclass(frozen=True)
class Turn:
    """What one side took to move a turn's bytes; processor seconds are without the broker's."""

    seconds: float
    processor_seconds: float


def compare(traffic: Traffic) -> tuple[list[Turn], list[Turn]]:
    """The timed turns of the peers and of the bare clients, who took turns on one broker."""
    turns = traffic.turns + 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gossamer-bench-")))
        broker = stack.enter_context(Broker())
        bare = stack.enter_context(_bare_clients(traffic, folder, broker, turns))
        peers, _ = stack.enter_context(live_peers(traffic, folder, broker, turns))
        for side in (bare, peers):
            side.ready(_START_SECONDS)
        taken: tuple[list[Turn], list[Turn]] = ([], [])
        for turn in range(turns):
            for side, sides in zip((peers, bare), taken, strict=True):
                sides.append(Turn(*side.run(turn, _TURN_SECONDS)))
    return taken[0][1:], taken[1][1:]


@contextmanager
def _bare_clients(traffic: Traffic, folder: Path, broker: Broker, turns: int) -> Iterator[Gates]:
    processes: list[subprocess.Popen[bytes]] = []

    def alive() -> None:
        if any(process.poll() not in (None, 0) for process in processes):
            raise RuntimeError("a bare client of the benchmark failed; its error is above")

    gates = Gates(folder, "bare", turns, traffic.names, alive)
    script = Path(__file__).with_name("bare.py")
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
            processes.append(subprocess.Popen([sys.executable, str(script), str(path)]))
        yield gates
        for process in processes:
            process.wait(_TURN_SECONDS)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def live_peers(
    traffic: Traffic, folder: Path, broker: Broker, turns: int
) -> Iterator[tuple[Gates, LocalSwarm]]:
    """The peers, as real processes that wait for their turns; they end with the block."""
    peers = [
        PeerSpec(
            name,
            LEARNER,
            {"peer": name, "folder": str(folder)},
            Settings(
                swarm="bench",
                mode="rounds",
                rounds=turns,
                exchanges=traffic.exchanges,
                neighbours=traffic.neighbours(index),
                expect=tuple(traffic.names),
                founder=True,
                checkpoint=traffic.checkpoint,
            ),
        )
        for index, name in enumerate(traffic.names)
    ]
    address = BrokerAddress(broker.url)
    spec = SwarmSpec("bench", address, folder, peers, traffic.per_process, restarts=0)
    swarm = LocalSwarm(spec)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(swarm.run())
        except BaseException as error:
            failures.append(error)

    def alive() -> None:
        if failures:
            raise failures[0]

    gates = Gates(folder, "peers", turns, traffic.names, alive)
    thread = threading.Thread(target=run, name="bench swarm")
    thread.start()
    try:
        yield gates, swarm
    except BaseException:
        swarm.stop()
        raise
    finally:
        thread.join()
    alive()


# --- memory -----------------------------------------------------------------------------------------

FEW, MANY = 5, 13
"""Peers in one process. The slope between the two leaves out what a process costs by itself."""
_SAMPLE_SECONDS = 0.02
_TIMEOUT = 180.0
_ROUNDS, _WARM, _ROUND_SECONDS = 12, 4, 1.0


def memory() -> list[Row]:
    """What one more peer adds to a process that has torch anyway: at rest, and while it gossips."""
    if not Path("/proc/self/statm").exists():
        return [
            Row("memory per peer", "MB", None, None, None, note="needs Linux: /proc is missing")
        ]
    few, many = _resident(FEW), _resident(MANY)
    calm = (_learning(FEW), _learning(MANY))
    return [
        _slope("at rest", few[0], many[0], wanted=4.0),
        _slope("learning, a push each second", *calm, wanted=4.0),
        _slope("gossiping without pause", few[1], many[1], wanted=None),
    ]


def _slope(what: str, few: float, many: float, wanted: float | None) -> Row:
    slope = (many - few) / (MANY - FEW)
    return Row(
        f"memory per peer, {what}",
        "MB",
        slope / 1e6,
        VALUE_BYTES / 1e6,
        slope / VALUE_BYTES,
        wanted=wanted,
        sense="at most",
        note="ratio: copies of its parameters",
    )


def _learning(peers: int) -> float:
    """Bytes of a process whose peers train and push at a usual pace, in async mode."""
    traffic = Traffic(peers=peers)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gossamer-bench-")))
        broker = stack.enter_context(Broker())
        settings = Settings(
            swarm="bench", rounds=_ROUNDS, expect=tuple(traffic.names), founder=True,
            settle_timeout=5.0, checkpoint=False,
        )  # fmt: skip
        specs = [
            PeerSpec(
                name,
                LEARNER,
                {"peer": name, "folder": None, "pause": _ROUND_SECONDS},
                settings.updated(neighbours=traffic.neighbours(index)),
            )
            for index, name in enumerate(traffic.names)
        ]
        swarm = LocalSwarm(
            SwarmSpec("bench", BrokerAddress(broker.url), folder, specs, peers, restarts=0)
        )
        samples: list[int] = []

        async def watch() -> None:
            running = asyncio.create_task(swarm.run())
            while not running.done():
                await asyncio.sleep(_SAMPLE_SECONDS)
                if all(_rounds(folder, name) >= _WARM for name in traffic.names) and swarm.pids:
                    if any(_rounds(folder, name) >= _ROUNDS for name in traffic.names):
                        swarm.stop()
                        break
                    samples.append(rss(next(iter(swarm.pids.values()))))
            await running

        asyncio.run(watch())
    return median(samples)


def _rounds(folder: Path, name: str) -> int:
    """How many rounds a peer has reported so far."""
    file = folder / f"{name}.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _resident(peers: int) -> tuple[float, float]:
    """Bytes of a process with this many peers: connected and waiting, and in the midst of a turn."""
    traffic = Traffic(peers=peers, per_process=peers, exchanges=40 // peers + 4)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gossamer-bench-")))
        broker = stack.enter_context(Broker())
        gates, swarm = stack.enter_context(live_peers(traffic, folder, broker, turns=2))
        gates.ready(_TIMEOUT)
        process = next(iter(swarm.pids.values()))
        at_rest = rss(process)
        gates.run(0, _TIMEOUT)
        samples: list[int] = []
        over = threading.Event()

        def sample() -> None:
            while not over.is_set():
                samples.append(rss(process))
                time.sleep(_SAMPLE_SECONDS)

        sampler = threading.Thread(target=sample, name="bench memory")
        sampler.start()
        try:
            gates.run(1, _TIMEOUT)
        finally:
            over.set()
            sampler.join()
    return at_rest, median(samples)


def rss(process: int) -> int:
    """Resident bytes of a process that it does not share with a file: heap, stacks, arrays."""
    for line in Path(f"/proc/{process}/status").read_text("utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{process}/status has no line RssAnon: this kernel is too old")
