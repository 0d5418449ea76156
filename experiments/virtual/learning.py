"""Learning in virtual time: learners train at their own pace and gossip by the rules of live peers.

A stretch begins from the values that its peer has then; mass that arrives while it lasts is mixed in
beside it. When it ends, what it changed is added to what the peer has by then: training moves a value
by Δ, and push-sum does not mind. So stretches of different peers are independent and may run on
several threads; the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import networkx as nx
import numpy as np
import torch

from ...gossip.pushsum import ONE, Array
from ...gossip.wire import as_sent
from ...models import Metrics
from ..build import Member, Swarm
from ..config import Config, ConfigError
from ..live import graph_of, shared_owners
from ..matching import members_in_order
from .exact import ExactSwarm, Shared
from .settings import seconds_of, world_of

FANOUT = 2
"""Neighbours that a peer pushes to after a round, as live peers do unless told otherwise."""


@dataclass(frozen=True)
class Reading:
    """A peer's test: at which virtual time, after how many rounds of its own."""

    time: float
    round: int
    peer: int
    metrics: Metrics


@dataclass(frozen=True)
class _Stretch:
    """A stretch that was trained: where it began, what was tested then, what shared vectors became."""

    start: dict[str, Array]
    flat: torch.Tensor
    tested: Reading | None
    after: dict[str, Array]


class LearningSwarm:
    """A config's swarm in virtual time.

    threads: stretches that are trained at once.
    on_test: called with every test, in an order that the seed decides.
    """

    def __init__(
        self,
        config: Config,
        source: str = "config",
        *,
        threads: int = 1,
        on_test: Callable[[Reading], None] = lambda _: None,
    ):
        self.config = config
        if any(model.matching == "fuse" for model in config.models):
            raise ConfigError(
                f"{source}: key 'models': fuse has no place in virtual time; leave out [time], or run live "
                "peers with gossamer swarm"
            )
        self.members, _ = members_in_order(Swarm(config, source))
        graph = _graph(config, self.members, source)
        self.world = world_of(config, graph, source)
        self.seconds = seconds_of(config, self.world)
        self.swarm = ExactSwarm(
            self.world,
            _shared(config, self.members, graph),
            fanout=config.gossip.exchanges or FANOUT,
            fraction=config.gossip.fraction,
            lossy=_as_float16 if config.gossip.dtype == "float16" else None,
            on_stretch=self._ended,
            on_arrival=self._begin,
        )
        self._lanes = [
            {lane.shared.name: lane for lane in self.swarm.lanes if peer in lane.stores}
            for peer in range(len(self.members))
        ]
        self._executor = ThreadPoolExecutor(threads) if threads > 1 else None
        self._on_test = on_test
        self._running: dict[int, Future[_Stretch]] = {}
        self._rounds = [0] * len(self.members)
        # Tests keep to virtual time rather than to rounds, or the slow would hardly ever be tested.
        self._turns = [0.0] * len(self.members)

    def run(self) -> None:
        """Let the config's time pass, then test every peer that is there."""
        everyone = np.arange(len(self.members))
        for peer in everyone[self.world.present(everyone, np.zeros(len(everyone)))].tolist():
            self._begin(peer, 0.0)
        try:
            self.swarm.run(self.seconds)
        except BaseException:
            if self._executor is not None:
                self._executor.shutdown(wait=False, cancel_futures=True)
            raise
        for peer in sorted(self._running):
            self._give_up(peer, report=True)
        if self._executor is not None:
            self._executor.shutdown()
        here = self.world.present(everyone, np.full(len(everyone), self.swarm.now))
        for peer in range(len(self.members)):
            self._load(peer)
            if here[peer]:
                metrics = self.members[peer].learner.test()
                self._on_test(Reading(self.swarm.now, self._rounds[peer], peer, metrics))

    def _begin(self, peer: int, time: float) -> None:
        """Start a stretch from the values of now."""
        if peer in self._running:
            self._give_up(peer, report=False)  # its last life ended before its last stretch did
        start = {owner: lane.stores[peer].read(owner) for owner, lane in self._lanes[peer].items()}
        done = self._rounds[peer]
        turn = time // (self.config.test_every * self.world.conditions.pace)
        due = done > 0 and turn > self._turns[peer]
        self._turns[peer] = turn
        moment = Reading(time, done, peer, Metrics()) if due else None
        if self._executor is not None:
            self._running[peer] = self._executor.submit(self._train, peer, start, moment)
        else:
            self._running[peer] = Future()
            self._running[peer].set_result(self._train(peer, start, moment))

    def _train(self, peer: int, start: dict[str, Array], moment: Reading | None) -> _Stretch:
        learner = self.members[peer].learner
        for owner, value in start.items():
            learner.network.write(owner, value)
        flat = learner.network.flat.clone()
        if moment is not None:
            moment = Reading(moment.time, moment.round, peer, learner.test())
        learner.train(self.config.every)
        after = {owner: learner.network.read(owner).cpu().numpy() for owner in start}
        return _Stretch(start, flat, moment, after)

    def _ended(self, peer: int, count: int, time: float) -> None:
        """Add what a stretch changed to the values of now, and start the next."""
        stretch = self._running.pop(peer).result()
        if stretch.tested is not None:
            self._on_test(stretch.tested)
        for owner, lane in self._lanes[peer].items():
            store = lane.stores[peer]
            now, before, after = store.read(owner), stretch.start[owner], stretch.after[owner]
            store.write(owner, after if now is before else now + (after - before))
        self._rounds[peer] += 1
        self._begin(peer, time)

    def _give_up(self, peer: int, *, report: bool) -> None:
        """A stretch that did not end leaves the network as it found it."""
        stretch = self._running.pop(peer).result()
        if report and stretch.tested is not None:
            self._on_test(stretch.tested)
        self.members[peer].network.flat.copy_(stretch.flat)

    def _load(self, peer: int) -> None:
        for owner, lane in self._lanes[peer].items():
            self.members[peer].network.write(owner, lane.stores[peer].read(owner))


def _graph(config: Config, members: list[Member], source: str) -> nx.Graph:
    """Who may talk to whom; everybody if the config does not say."""
    if config.topology is None:
        return nx.complete_graph(config.peers)
    graph = graph_of(config, members, source)
    if graph is None:
        raise ConfigError(
            f"{source}: key 'topology': a graph that changes in steps has no place in virtual time; name one "
            "graph, and let links fail with [time.churn]"
        )
    return graph


def _shared(config: Config, members: list[Member], graph: nx.Graph) -> list[Shared]:
    weights = [ONE * (m.samples if config.weights == "samples" else 1) for m in members]
    return [
        Shared(
            owner,
            nx.subgraph(graph, who),
            {peer: members[peer].network.read(owner).cpu().numpy() for peer in who},
            {peer: weights[peer] for peer in who},
        )
        for owner, who in shared_owners(members).items()
    ]


def _as_float16(_vector: str, value: Array) -> Array:
    return as_sent(value, "float16")
