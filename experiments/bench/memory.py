"""Resident memory of live peers, in copies of their parameters."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from ...peer import Broker, BrokerAddress, LocalSwarm, PeerSpec, Settings, SwarmSpec, find_mosquitto
from .harness import Row
from .throughput import NO_BROKER, VALUE_BYTES, Traffic, live_peers

FEW, MANY = 5, 13
"""Peers in one process. The slope between the two leaves out what a process costs by itself."""
_SAMPLE_SECONDS = 0.02
_TIMEOUT = 180.0
_STRETCHES, _WARM, _STRETCH_SECONDS = 12, 4, 1.0


def memory() -> list[Row]:
    """What one more peer adds to a process that has torch anyway: at rest, and while it gossips."""
    if not Path("/proc/self/statm").exists():
        return [
            Row("memory per peer", "MB", None, None, None, note="needs Linux: /proc is missing")
        ]
    if find_mosquitto() is None:
        return [Row("memory per peer", "MB", None, None, None, note=NO_BROKER)]
    few, many = _resident(FEW), _resident(MANY)
    calm = (_learning(FEW), _learning(MANY))
    return [
        _row("at rest", few[0], many[0], wanted=4.0),
        _row("learning, a push each second", *calm, wanted=4.0),
        _row("gossiping without pause", few[1], many[1], wanted=None),
    ]


def _row(what: str, few: float, many: float, wanted: float | None) -> Row:
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
        broker = stack.enter_context(Broker(kind="mosquitto"))
        settings = Settings(
            swarm="bench", rounds=_STRETCHES, expect=tuple(traffic.names), founder=True,
            settle_timeout=5.0, checkpoint=False,
        )  # fmt: skip
        specs = [
            PeerSpec(
                name,
                "gossamer.experiments.bench.idle:make_learner",
                {"peer": name, "folder": None, "pause": _STRETCH_SECONDS},
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
                    if any(_rounds(folder, name) >= _STRETCHES for name in traffic.names):
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
        broker = stack.enter_context(Broker(kind="mosquitto"))
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
