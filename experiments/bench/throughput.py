"""Gossip on a real broker, against a bare aiomqtt loop that moves the same bytes on it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ...peer import Broker, BrokerAddress, LocalSwarm, PeerSpec, Settings, SwarmSpec, find_mosquitto
from .gate import Gates
from .harness import Row

PARAMETERS = 266_610
VALUE_BYTES = 4 * PARAMETERS
NO_BROKER = "mosquitto is not on PATH: install it"
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
    return _rows("gossip of 16 peers", Traffic(), wanted=0.7)


def checkpoint() -> list[Row]:
    """The same with a checkpoint before every message that leaves: what it costs to lose nothing."""
    return _rows("gossip with checkpoints", Traffic(checkpoint=True), wanted=None)


def _rows(name: str, traffic: Traffic, wanted: float | None) -> list[Row]:
    if find_mosquitto() is None:
        return [Row(name, "MB/s", None, None, None, wanted, note=NO_BROKER)]
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
        broker = stack.enter_context(Broker(kind="mosquitto"))
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
            "gossamer.experiments.bench.idle:make_learner",
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
