"""Swarms of real processes for the live tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gossamer.experiments.config import Config, Data, Gossip, Model, Network, Training
from gossamer.experiments.live import plan
from gossamer.peer.host import BrokerAddress
from gossamer.peer.swarm import LocalSwarm, SwarmSpec


def small_config(peers: int, rounds: int, **gossip: Any) -> Config:
    """A small network on the built-in digits."""
    return Config(
        name="small",
        peers=peers,
        rounds=rounds,
        test_every=rounds,
        data=Data(set="digits", samples=40),
        network=Network(layout="64=12=10"),
        models=[Model(name="global", layout="64-10-0")],
        training=Training(stretch=40, rate=0.1),
        gossip=Gossip(**gossip),
    )


def small_swarm(config: Config, folder: Path, url: str, **settings: Any) -> SwarmSpec:
    """The config's processes, with some settings changed."""
    spec = plan(config, folder, BrokerAddress(url))
    peers = [replace(peer, settings=replace(peer.settings, **settings)) for peer in spec.peers]
    return replace(spec, peers=peers)


class Watched:
    """A swarm that runs while a test interferes; knows the round that each peer has reached."""

    def __init__(self, spec: SwarmSpec):
        self.rounds: dict[str, int] = {}
        self.events: list[str] = []
        self.memory: dict[str, list[int]] = {}
        self.swarm = LocalSwarm(spec, on_record=self._record, on_event=self.events.append)

    def _record(self, record: dict[str, Any]) -> None:
        name = record["peer"]
        self.rounds[name] = max(record["round"], self.rounds.get(name, 0))
        pid = self.swarm.pids.get(name)
        if pid is not None:
            self.memory.setdefault(f"{name}/{pid}", []).append(resident_bytes(pid))

    async def reached(self, number: int, *names: str) -> None:
        """Until every named peer has trained that many rounds."""
        await wait_for(lambda: all(self.rounds.get(name, 0) >= number for name in names))


def resident_bytes(pid: int) -> int:
    """A process's resident memory; 0 if it has just ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0


async def wait_for(condition: Callable[[], bool]) -> None:
    """Until something is true; the test's own timeout is the limit."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
