"""Swarms of real processes for the live tests."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from waiting import until

from gossamer.experiments.config.tables import Config, Data, Gossip, Model, Network, Training
from gossamer.experiments.live.layout import plan
from gossamer.peer import BrokerAddress, LocalSwarm, SwarmSpec

LONGEST = 2400.0
"""Seconds that the slowest of the live tests may take."""


def small_config(peers: int, rounds: int, **gossip: Any) -> Config:
    """A small network on the built-in digits."""
    return Config(
        name="small",
        peers=peers,
        rounds=rounds,
        test_every=rounds,
        data=Data(set="digits", samples=40),
        network=Network(layout="64=12=10", activation="sigmoid", output="sigmoid"),
        models=[Model(name="global", layout="64-10-0")],
        training=Training(local_samples=40, rate=0.1, loss="squared", reduction="sum"),
        gossip=Gossip(**gossip),
    )


def small_swarm(config: Config, folder: Path, url: str, **settings: Any) -> SwarmSpec:
    """The config's processes, with some settings changed."""
    spec = plan(config, folder, BrokerAddress(url))
    peers = [replace(peer, settings=peer.settings.updated(**settings)) for peer in spec.peers]
    return replace(spec, peers=peers)


class Watched:
    """A swarm that runs while a test interferes; knows how far each peer is, and how large.

    It reads what the peers write on disk: what they publish may be lost, which is what the tests are
    about.
    """

    def __init__(self, spec: SwarmSpec):
        self._over = False
        self.events: list[str] = []
        self.records: list[dict[str, Any]] = []
        self.memory: dict[str, list[int]] = {}
        """Resident bytes over time, by peer and process, from joining on: before, torch is loaded."""
        self.swarm = LocalSwarm(spec, on_record=self.records.append, on_event=self.events.append)

    async def run(self) -> None:
        """Run the swarm to its end, sampling the size of every process."""
        sampling = asyncio.create_task(self._sample())
        try:
            await self.swarm.run()
        finally:
            self._over = True
            sampling.cancel()

    async def _sample(self) -> None:
        lives: dict[str, list[int]] = {}

        def look() -> bool:
            for name, pid in self.swarm.pids.items():
                pids = lives.setdefault(name, [])
                if pid not in pids:
                    pids.append(pid)
                size = resident_bytes(pid)
                if size and self.joined(name) >= len(pids):
                    self.memory.setdefault(f"{name}/{pid}", []).append(size)
            return self._over

        await until(look, patience=LONGEST, pause=0.5)

    def joined(self, name: str) -> int:
        """How often a peer has joined: once, and again after every crash."""
        log = self.swarm.spec.folder / f"host-{name}.log"
        return len(re.findall(rf"peer {name}(@\w+)? joins swarm", log.read_text()))

    def round(self, name: str) -> int:
        """The last round that a peer has trained."""
        file = self.swarm.spec.folder / f"{name}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        rounds = [json.loads(line)["round"] for line in lines if line.endswith("}")]
        return max(rounds, default=0)

    async def returned(self, *names: str) -> None:
        """Until every named peer, killed once, is back."""
        await until(
            lambda: self._over or all(self.joined(name) > 1 for name in names),
            f"{', '.join(names)} came back",
            patience=LONGEST,
            pause=0.05,
        )
        assert not self._over, f"the swarm ended before {', '.join(names)} came back"

    async def reached(self, number: int, *names: str) -> None:
        """Until every named peer has trained that many rounds."""
        await until(
            lambda: self._over or all(self.round(name) >= number for name in names),
            f"{', '.join(names)} trained {number} rounds",
            patience=LONGEST,
            pause=0.05,
        )
        assert not self._over, f"the swarm ended before {', '.join(names)} trained {number} rounds"


def resident_bytes(pid: int) -> int:
    """A process's resident memory; 0 if it has just ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0
