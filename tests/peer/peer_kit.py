"""Small peers on a broker in memory, for tests of how peers live together."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from learner_kit import GLOBAL as GLOBAL
from learner_kit import make_learner as make_learner
from waiting import PATIENCE, until

from gossamer.gossip import (
    ONE,
    Hook,
    MemoryBroker,
    MemoryTransport,
    Payload,
    Received,
    RetryPolicy,
    Will,
    topics,
)
from gossamer.gossip.security import NullSecurity, SecurityLayer
from gossamer.models import Metrics, SgdLearner
from gossamer.peer.engine import Engine, View
from gossamer.peer.lifecycle import Peer, Report, State
from gossamer.peer.link import Link
from gossamer.peer.machine import Machine, Worker, load_checkpoint, save_checkpoint
from gossamer.peer.presence import RETURN_GRACE
from gossamer.peer.settings import Limits, Settings
from gossamer.peer.store import NetworkFile
from gossamer.peer.traffic import InboundLimits


class Clocks(Machine):
    """This machine, with clocks and a boot that a test can set."""

    def __init__(self, boot: str | None = "some boot") -> None:
        super().__init__()
        self.boot_name = boot
        self.ahead = 0.0
        """Seconds by which all clocks have gone on."""
        self.wall_ahead = 0.0
        """Seconds by which the clock on the wall alone was set."""
        self.frozen: float | None = None

    def monotonic(self) -> float:
        return (super().monotonic() if self.frozen is None else self.frozen) + self.ahead

    def wall(self) -> float:
        return (
            (super().wall() if self.frozen is None else 1e9 + self.frozen)
            + self.ahead
            + self.wall_ahead
        )

    def uptime(self) -> float:
        return (super().uptime() if self.frozen is None else self.frozen) + self.ahead

    def boot_id(self) -> str | None:
        return self.boot_name


def begin(engine: Engine, *, as_founder: bool = True) -> Engine:
    """Let an engine take part: at its own values, or after hearing."""
    engine.record_session()
    engine.open_session(0.0, 1)
    engine.begin(0.0, as_founder=as_founder, all_online=False)
    assert engine.save()
    return engine


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
        self.reached = 0
        self._limit = limit
        self._moved = threading.Condition()

    def __call__(self, number: int) -> None:
        """Stand before round `number` until the gate is open for it: on the peer's own thread."""
        with self._moved:
            self.reached = max(self.reached, number)
            if not self._moved.wait_for(lambda: number <= self._limit, PATIENCE):
                raise RuntimeError("the test never opened this gate")

    @property
    def limit(self) -> int:
        """The last round that may be trained."""
        return self._limit

    @limit.setter
    def limit(self, rounds: int) -> None:
        with self._moved:
            self._limit = rounds
            self._moved.notify_all()

    async def wait(self) -> None:
        """Until the peer stands before the closed gate."""
        await until(lambda: self.reached > self.limit)

    def open(self) -> None:
        self.limit = 10**9


MEMORY = RetryPolicy(first=0.1, longest=1.0)
"""For a broker in memory: what is lost of the first messages is repeated as soon as the later ones are, and
no later because the machine has stood still before."""
ASK_BACK_SOON = Limits(retry=replace(MEMORY, recall_longest=0.5))
"""For tests in which somebody stands before a gate and answers nobody: the others ask their mass back, not
only after twenty times the longest delay they have seen, which on a slow machine is too long for any test."""


@dataclass
class Life:
    """One peer that runs, and the means to pull its plug."""

    peer: Peer
    transports: list[MemoryTransport]
    task: asyncio.Task[Report] = field(init=False)
    crashed: bool = False

    def trains(self) -> bool:
        """Whether it has joined, and is not through yet: wait for it only if its training is endless."""
        return self.peer.state in (State.TRAINING, State.AVERAGING)

    def counts(self) -> bool:
        """Whether it trains, and has heard enough to give weight of its own."""
        return self.trains() and not self.view.waiting

    @property
    def view(self) -> View:
        """What the peer's engine says of itself."""
        assert self.peer.link is not None
        return self.peer.link.view

    def go_on_for(self, more: int) -> None:
        """End an endless training after so many rounds more."""
        rounds = self.view.round + more
        self.peer.settings = self.peer.settings.updated(rounds=rounds)

    async def outlive(self, name: str) -> None:
        """Let the lease of somebody who is offline be over for this peer, however little time has passed.

        A lease that is really short would run out for everybody when the machine is slow.
        """
        entries = self.peer.link.roster._entries
        await until(lambda: entries[name].offline_since is not None)
        self.set_back(name, "offline_since")

    def set_back(self, name: str, since: str) -> None:
        """Let something have begun long ago for a peer, and our connection even before that."""
        roster, long = self.peer.link.roster, RETURN_GRACE + 10 * self.peer.settings.lease
        entry = roster._entries[name]
        setattr(entry, since, getattr(entry, since) - long)
        roster._connected_since -= long

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
    transport: type[MemoryTransport] = MemoryTransport
    limits: Limits = field(default_factory=lambda: Limits(retry=MEMORY))
    accuracies: dict[str, float] = field(default_factory=dict)
    """What every peer that has tested its network measured the last time."""

    def start(
        self,
        name: str,
        learner: Any = None,
        settings: Settings | None = None,
        *,
        samples: int = 1,
        checkpoint: Path | None = None,
        machine: Clocks | None = None,
        network_file: NetworkFile | None = None,
        on_record: Callable[[dict[str, Any]], None] = lambda _: None,
        on_report: Callable[[Report], None] = lambda _: None,
    ) -> Life:
        made: list[MemoryTransport] = []

        def connect(client_id: str, will: Will, on_connect: Hook) -> MemoryTransport:
            made.append(self.transport(self.broker, client_id, will=will, on_connect=on_connect))
            return made[-1]

        def keep(record: dict[str, Any]) -> None:
            if "accuracy" in record:
                self.accuracies[name] = record["accuracy"]
            on_record(record)

        peer = Peer(
            name, learner or make_learner(name), settings or self.settings, connect,
            samples=samples, checkpoint=checkpoint, seed=sum(name.encode()), machine=machine,
            limits=self.limits, network_file=network_file, on_record=keep, on_report=on_report,
        )  # fmt: skip
        life = Life(peer, made)
        life.task = asyncio.create_task(peer.run(), name=name)
        self.lives.append(life)
        return life

    async def all(self) -> list[Report]:
        """Wait for every peer that was not crashed."""
        return [await life.task for life in self.lives if not life.crashed]

    async def learned(self, accuracy: float) -> None:
        """Wait until the peers of an endless training are better than this in the mean.

        How many rounds that takes depends on how much of the others' values each round has received, and
        so on the machine.
        """
        names = {life.peer.name for life in self.lives}
        await until(
            lambda: self.accuracies.keys() >= names and mean(self.accuracies.values()) > accuracy,
            f"a mean accuracy above {accuracy:g}",
        )

    async def finish(self, more: int) -> list[Report]:
        """End an endless training after so many rounds more, and wait."""
        for life in self.lives:
            life.go_on_for(more)
        return await self.all()


class Script(MemoryTransport):
    """A transport on which these messages arrive and no others; what is published is written down."""

    def __init__(self, arrivals: Sequence[tuple[str, bytes]]):
        super().__init__(MemoryBroker(), "script")
        self._arrivals = arrivals
        self.published: list[tuple[str, bytes]] = []

    async def messages(self) -> AsyncIterator[Received]:
        for topic, payload in self._arrivals:
            yield Received(topic, payload, False)

    async def publish(self, topic: str, payload: Payload, **_: Any) -> bool:
        self.published.append((topic, bytes(payload)))
        return True


async def delivered(
    arrivals: Sequence[tuple[str, bytes]],
    *,
    limits: InboundLimits | None = None,
    security: SecurityLayer | None = None,
    joined: bool = False,
    engine: Engine | None = None,
) -> tuple[Link, list[tuple[str, bytes]]]:
    """Let these messages arrive at a peer "a" that never takes a turn; returns its link and its answers.

    joined: whether it has joined the swarm. engine: that of "a"; a new one if left out.
    """
    engine = engine or Engine("a", make_learner("a"), quick())
    engine.inbound_limits = limits or engine.inbound_limits
    async with Worker("a") as worker:
        link = Link(engine, worker, on_record=lambda _: None)
        link.transport = script = Script(arrivals)
        link.security, link.joined = security or NullSecurity("a"), joined
        await link.receive()
    return link, script.published


async def flooded(
    limits: InboundLimits, packets: Sequence[bytes], security: SecurityLayer | None = None
) -> Counter[str]:
    """Return what a peer that is busy all the time drops of these packets, by cause."""
    inbox = topics.inbox("nest", "a", "global")
    link, _ = await delivered(
        [(inbox, packet) for packet in packets], limits=limits, security=security
    )
    return link.dropped


def quick(**changes: Any) -> Settings:
    """Settings for tests: short waits, everything else as users have it."""
    values: dict[str, Any] = {
        "swarm": "nest", "rounds": 6, "tick": 0.01, "settle_tolerance": 1e-5,
        "start_timeout": 120.0, "settle_timeout": 120.0, "silence": 0.2,
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
