"""Small peers on a broker in memory, for tests of how peers live together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gossamer.gossip.memory_transport import MemoryBroker, MemoryTransport
from gossamer.gossip.pushsum import ONE
from gossamer.gossip.transport import Hook, Will
from gossamer.models import Metrics, ModelGraph, SgdLearner, SlicedNetwork, mlp
from gossamer.peer.checkpoint import load_checkpoint, save_checkpoint
from gossamer.peer.peer import Peer, Report
from gossamer.peer.settings import Settings

GLOBAL: dict[str, str] = {"global": "4-4-2"}


def make_learner(
    name: str,
    slices: Mapping[str, str] = GLOBAL,
    *,
    layout: str = "4=6=2",
    seed: int = 0,
    samples: int = 20,
    stretch: int = 10,
    cross: bool = False,
    depends: Mapping[str, list[str]] | None = None,
) -> SgdLearner:
    """A tiny learner whose data depend on its name."""
    graph = ModelGraph({model: (depends or {}).get(model, []) for model in slices})
    network = SlicedNetwork(
        mlp(layout), dict(slices), graph=graph, peer=name, cross=cross, seed=seed
    )
    inputs, outputs = (int(part) for part in (layout.split("=")[0], layout.split("=")[-1]))
    random = torch.Generator().manual_seed(sum(name.encode()))
    x = torch.randn(samples, inputs, generator=random)
    y = torch.randint(0, outputs, (samples,), generator=random)
    return SgdLearner(network, (x, y), (x, y), stretch=stretch, batch=5, rate=0.2, seed=1)


class Still:
    """A learner that never moves: its values change by gossip alone. Hooks let a test act in between."""

    def __init__(
        self, inner: SgdLearner, value: float, during: Callable[[int], None] | None = None
    ):
        self.network = inner.network
        self.rounds = 0
        self._during = during
        with torch.no_grad():
            self.network.flat.fill_(value)

    def train(self, steps: int) -> Metrics:
        self.rounds += 1
        if self._during is not None:
            self._during(self.rounds)
        return Metrics(0.0, 0, 1)

    def test(self) -> Metrics:
        return Metrics(0.0, 1, 1)

    def state(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def restore(self, state: dict[str, Any]) -> None:
        self.rounds = state["rounds"]


class Gate:
    """Lets a peer's training go on only as far as the test has come."""

    def __init__(self, limit: int = 0):
        self.limit = limit
        self.reached = 0

    def __call__(self, number: int) -> None:
        self.reached = max(self.reached, number)
        time.sleep(0.002)
        for _ in range(100_000):
            if number <= self.limit:
                return
            time.sleep(0.002)  # on the peer's own thread
        raise RuntimeError("the test never opened this gate")

    async def wait(self) -> None:
        """Until the peer stands before the closed gate."""
        await wait_for(lambda: self.reached > self.limit)

    def open(self) -> None:
        self.limit = 10**9


@dataclass
class Life:
    """One peer that runs, and the means to pull its plug."""

    peer: Peer
    transports: list[MemoryTransport]
    task: asyncio.Task[Report] = field(init=False)
    crashed: bool = False

    def trains(self) -> bool:
        """Whether it has joined, and is not through yet: wait for it only if its training is endless."""
        return self.peer._member is not None and self.peer._member.phase == "training"

    def counts(self) -> bool:
        """Whether it trains, and has heard enough to give weight of its own."""
        return self.trains() and self.peer._member.engine.counts()

    def go_on_for(self, more: int) -> None:
        """End an endless training after so many rounds more."""
        rounds = self.peer._member.engine.round + more
        self.peer.settings = self.peer.settings.updated(rounds=rounds)

    async def outlive(self, name: str) -> None:
        """Let the lease of somebody who is offline be over for this peer, however little time has passed.

        A lease that is really short would run out for everybody when the machine is slow.
        """
        entries, lease = self.peer._member.roster._entries, self.peer.settings.lease
        await wait_for(lambda: entries[name].offline_since is not None)
        entries[name].offline_since -= 10 * lease

    async def crash(self) -> None:
        """End it as kill -9 would: no goodbye, nothing saved, nothing sent from now on."""
        self.crashed = True
        await self.transports[-1].abort()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass
class Nest:
    """Starts peers on one memory broker."""

    settings: Settings
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    lives: list[Life] = field(default_factory=list)

    def start(
        self,
        name: str,
        learner: Any = None,
        settings: Settings | None = None,
        *,
        samples: int = 1,
        checkpoint: Path | None = None,
        on_record: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> Life:
        made: list[MemoryTransport] = []

        def connect(client_id: str, will: Will, on_connect: Hook) -> MemoryTransport:
            made.append(MemoryTransport(self.broker, client_id, will=will, on_connect=on_connect))
            return made[-1]

        peer = Peer(
            name, learner or make_learner(name), settings or self.settings, connect,
            samples=samples, checkpoint=checkpoint, seed=sum(name.encode()), on_record=on_record,
        )  # fmt: skip
        life = Life(peer, made)
        life.task = asyncio.create_task(peer.run(), name=name)
        self.lives.append(life)
        return life

    async def all(self) -> list[Report]:
        """Wait for every peer that was not crashed."""
        return [await life.task for life in self.lives if not life.crashed]

    async def finish(self, more: int) -> list[Report]:
        """End an endless training after so many rounds more, and wait."""
        for life in self.lives:
            life.go_on_for(more)
        return await self.all()


def quick(**changes: Any) -> Settings:
    """Settings for tests: short waits, everything else as users have it."""
    values: dict[str, Any] = {
        "swarm": "nest", "rounds": 6, "tick": 0.01, "settle_tolerance": 1e-5,
        "start_timeout": 120.0, "settle_timeout": 120.0,
    }  # fmt: skip
    return Settings(**{**values, **changes})


def held(reports: list[Report], vector: str = "global") -> float:
    """Weight held or open at the end, in peers."""
    return sum(r.weight[vector][0] + r.weight[vector][1] for r in reports) / ONE


def injected(reports: list[Report], vector: str = "global") -> float:
    """Weight that came in, in peers."""
    return sum(r.weight[vector][2] for r in reports) / ONE


def consensus(learners: list[Any], vector: str = "global") -> float:
    """The largest relative distance of a peer's values from their mean."""
    values = np.stack([learner.network.read(vector).numpy() for learner in learners]).astype(float)
    mean = values.mean(axis=0)
    return float(np.linalg.norm(values - mean, axis=1).max() / (np.linalg.norm(mean) or 1.0))


def last_seen(path: Path, ago: float) -> None:
    """Let a checkpoint say that its peer was last in touch so many seconds earlier than it was."""
    tree = load_checkpoint(path)
    assert tree is not None
    at = tree["in_touch"]
    at = {**at, "clock": at["clock"] - ago, "wall": at["wall"] - ago}
    save_checkpoint(path, {**tree, "in_touch": at})


async def wait_for(condition: Callable[[], bool]) -> None:
    """Give the loop turns until something is true; the test's own timeout is the limit."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
