"""Learning in virtual time: learners train at their own pace and gossip by the rules of live peers.

A stretch begins from the values that its peer has then; mass that arrives while it lasts is mixed in
beside it. When it ends, what it changed is added to what the peer has by then: training moves a value
by Δ, and push-sum does not mind. So stretches of different peers are independent, and nobody asks for
one before it ends: all that have begun by then are trained at once, stacked in an arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np
import torch

from ...gossip import ONE, Array
from ...models import Metrics
from ..arena import Arena
from ..build import Member, Swarm, members_in_order
from ..config.tables import Config, ConfigError
from ..graphs.swarm import PUSHES, require_push
from ..live import check_compression, graph_of, shared_owners
from .exact import ExactSwarm, Shared
from .settings import seconds_of, world_of
from .wire import wire_of

_LAST_MOMENT = 1e-9
"""What ends with the run still counts, though sums of stretches may be a few roundings beyond it."""


@dataclass(frozen=True)
class Reading:
    """A peer's test: at which virtual time, after how many rounds of its own."""

    time: float
    round: int
    peer: int
    metrics: Metrics


@dataclass(frozen=True)
class _Begun:
    """A stretch that has begun: from which shared vectors, and the test that is due before it."""

    start: dict[str, Array]
    due: Reading | None


@dataclass(frozen=True)
class _Trained:
    """A stretch that was trained: the network before it, what was tested, what shared vectors became."""

    start: dict[str, Array]
    flat: torch.Tensor
    tested: Reading | None
    after: dict[str, Array]


class LearningSwarm:
    """A config's swarm in virtual time.

    threads: peers that are trained side by side; the numbers are the same for any.
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
        require_push(config, source, "peers in virtual time", "leave out [time]")
        self.members, _ = members_in_order(Swarm(config, source))
        graph = _graph(config, self.members, source)
        self.world = world_of(config, graph, source)
        self.seconds = seconds_of(config, self.world)
        owners = shared_owners(self.members)
        check_compression(config, self.members, owners, source)
        self.swarm = ExactSwarm(
            self.world,
            _shared(config, self.members, graph, owners),
            fanout=config.gossip.exchanges or PUSHES,
            fraction=config.gossip.fraction,
            wire=wire_of(config, self.members, owners),
            on_stretch=self._ended,
            on_arrival=self._begin,
        )
        self._lanes = [
            {lane.shared.name: lane for lane in self.swarm.lanes if peer in lane.stores}
            for peer in range(len(self.members))
        ]
        self._arena = Arena(
            [member.learner for member in self.members], every=config.every, threads=threads
        )
        self._on_test = on_test
        self._begun: dict[int, _Begun] = {}
        self._trained: dict[int, _Trained] = {}
        self._in_training: dict[int, torch.Tensor] = {}
        """What networks held before a training that has not ended yet."""
        self.rounds = [0] * len(self.members)
        """Stretches that each peer has ended."""
        # Tests keep to virtual time rather than to rounds, or the slow would hardly ever be tested.
        self._turns = [0.0] * len(self.members)

    def run(self) -> None:
        """Let the config's time pass, then test every peer that is there."""
        for peer in self._present(0.0):
            self._begin(peer, 0.0)
        self.swarm.run(self.seconds * (1 + _LAST_MOMENT))
        self._give_up_the_rest()
        self._bring_home()
        here = self._present(self.seconds)
        for peer, metrics in zip(here, self._arena.test(here), strict=True):
            self._on_test(Reading(self.seconds, self.rounds[peer], peer, metrics))

    def stop(self) -> None:
        """Interrupted: let networks have what their peers held by then. Nothing is tested any more."""
        for peer, flat in self._in_training.items():
            self.members[peer].network.flat.copy_(flat)
        for peer in list(self._trained):
            self._undo(peer)
        self._bring_home()

    def _bring_home(self) -> None:
        """Write what peers hold of shared models into their networks."""
        for peer, member in enumerate(self.members):
            for owner, lane in self._lanes[peer].items():
                member.network.write(owner, lane.stores[peer].read(owner))

    def _begin(self, peer: int, time: float) -> None:
        """Start a stretch from the values of now."""
        if peer in self._trained:
            self._undo(peer)  # its last life ended before its last stretch did
        start = {owner: lane.stores[peer].read(owner) for owner, lane in self._lanes[peer].items()}
        done = self.rounds[peer]
        turn = time // (self.config.test_every * self.world.conditions.pace)
        due = done > 0 and turn > self._turns[peer]
        due = due and time < self.seconds * (1 - _LAST_MOMENT)  # at the end all are tested anyway
        self._turns[peer] = turn
        self._begun[peer] = _Begun(start, Reading(time, done, peer, Metrics()) if due else None)

    def _ended(self, peer: int, count: int, time: float) -> None:
        """Add what a stretch changed to the values of now, and start the next."""
        if peer in self._begun:
            self._train(time)
        if (tested := self._trained[peer].tested) is not None:
            self._on_test(tested)
        stretch = self._trained.pop(peer)
        for owner, lane in self._lanes[peer].items():
            store = lane.stores[peer]
            now, before, after = store.read(owner), stretch.start[owner], stretch.after[owner]
            store.write(owner, after if now is before else now + (after - before))
        self.rounds[peer] += 1
        self._begin(peer, time)

    def _train(self, time: float) -> None:
        """Train every stretch that has begun, except of those who are gone: theirs will not end."""
        here = set(self._present(time))
        peers = [peer for peer in sorted(self._begun) if peer in here]
        tests = self._test(peers)
        networks = {peer: self.members[peer].network for peer in peers}
        self._in_training = {peer: network.flat.clone() for peer, network in networks.items()}
        self._arena.train(peers)
        for peer, network in networks.items():
            start = self._begun.pop(peer).start
            after = {owner: network.read(owner).cpu().numpy() for owner in start}
            flat = self._in_training[peer]
            self._trained[peer] = _Trained(start, flat, tests.get(peer), after)
        self._in_training = {}

    def _test(self, peers: Iterable[int]) -> dict[int, Reading]:
        """Bring networks to where their stretches begin, and test those that are due."""
        due: dict[int, Reading] = {}
        for peer in peers:
            begun = self._begun[peer]
            for owner, value in begun.start.items():
                self.members[peer].network.write(owner, value)
            if begun.due is not None:
                due[peer] = begun.due
        metrics = self._arena.test(list(due))
        return {
            peer: replace(due[peer], metrics=found)
            for peer, found in zip(due, metrics, strict=True)
        }

    def _give_up_the_rest(self) -> None:
        """Stretches that time did not suffice for: their tests count, what they learned does not."""
        tests = self._test(sorted(self._begun))
        for peer in sorted({*self._begun, *self._trained}):
            tested = self._undo(peer) if peer in self._trained else tests.get(peer)
            if tested is not None:
                self._on_test(tested)
        self._begun.clear()

    def _undo(self, peer: int) -> Reading | None:
        """A stretch that does not end leaves the network as it found it."""
        stretch = self._trained.pop(peer)
        self.members[peer].network.flat.copy_(stretch.flat)
        return stretch.tested

    def _present(self, time: float) -> list[int]:
        everyone = np.arange(len(self.members))
        return everyone[self.world.present(everyone, np.full(len(everyone), time))].tolist()


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


def _shared(
    config: Config, members: list[Member], graph: nx.Graph, owners: dict[str, list[int]]
) -> list[Shared]:
    weights = [ONE * (m.samples if config.weights == "samples" else 1) for m in members]
    return [
        Shared(
            owner,
            nx.subgraph(graph, who),
            {peer: members[peer].network.read(owner).cpu().numpy() for peer in who},
            {peer: weights[peer] for peer in who},
        )
        for owner, who in owners.items()
    ]
