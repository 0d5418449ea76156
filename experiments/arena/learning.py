"""Configs in the event-driven simulator: learning in virtual time, and lockstep over a wire.

In virtual time learners train at their own pace and gossip by the rules of live peers. Local steps begin
from the values that their peer has then; mass that arrives while they last is mixed in beside them. When they
end, what they changed is added to what the peer has by then: training moves a value by Δ, and push-sum does
not mind. So the training jobs of different peers are independent, and nobody asks for one before it ends: all
that have begun by then are trained at once, stacked in an arena.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import networkx as nx
import numpy as np
import torch

from ...gossip import ONE, Array, DictStore, Partition
from ...models import Metrics
from ...peer import blocks, schema_entries
from ...topology import Event, TopologyError, draw_events, read_events
from ..build import Member, Swarm, members_in_order
from ..config.tables import Churn, Config, ConfigError, Time
from ..graphs.swarm import PUSHES, require_push
from ..live.layout import check_compression, graph_of, shared_owners
from .arena import Arena
from .events import VirtualTime, Wire
from .lockstep import Gossip, Mixing, Server
from .network import Conditions, TimeError, World, parse

_LAST_MOMENT = 1e-9
"""What ends with the run still counts, though sums of durations may be a few roundings beyond it."""


@dataclass(frozen=True)
class Reading:
    """A peer's test: at which virtual time, after how many rounds of its own."""

    time: float
    round: int
    peer: int
    metrics: Metrics


@dataclass
class _Job:
    """Local steps of a peer: the shared vectors they begin from, and the test that is due before them.

    flat: the network before them, once they are being trained. after: what shared vectors became.
    """

    start: dict[str, Array]
    test: Reading | None
    flat: torch.Tensor | None = None
    after: dict[str, Array] | None = None


class LearningSimulation:
    """A config's swarm in virtual time.

    threads: peers that are trained side by side; the numbers are the same for any.
    on_test: called with every test, in an order that the seed decides.

    `events` drives the gossipers; `rounds` counts the training jobs that each peer has ended.
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
        shared: list[dict[str, Array]] = [{} for _ in self.members]
        for owner, who in owners.items():
            for peer in who:
                shared[peer][owner] = self.members[peer].network.read(owner).cpu().numpy()
        self._stores = [DictStore(vectors) for vectors in shared]
        self.events = VirtualTime(
            self.world,
            graph,
            owners,
            self._stores,
            [ONE * (m.samples if config.weights == "samples" else 1) for m in self.members],
            fanout=config.gossip.exchanges or PUSHES,
            fraction=config.gossip.fraction,
            wire=wire_of(config, self.members, owners),
            on_trained=self._ended,
            on_arrival=self._begin,
        )
        learners = [member.learner for member in self.members]
        self._arena = Arena(learners, every=config.every, threads=threads)
        self._on_test = on_test
        self._jobs: dict[int, _Job] = {}
        self.rounds = [0] * len(self.members)
        # Tests keep to virtual time rather than to rounds, or the slow would hardly ever be tested.
        self._turns = [0.0] * len(self.members)

    def run(self) -> None:
        """Let the config's time pass, then test every peer that is there."""
        for peer in self._present(0.0):
            self._begin(peer, 0.0)
        self.events.run(self.seconds * (1 + _LAST_MOMENT))
        self._drop_unfinished()
        self._write_networks()
        here = self._present(self.seconds)
        for peer, metrics in zip(here, self._arena.test(here), strict=True):
            self._on_test(Reading(self.seconds, self.rounds[peer], peer, metrics))

    def stop(self) -> None:
        """Let networks have what their peers held when the run was interrupted; nothing is tested."""
        for peer in self._jobs:
            self._undo(peer)
        self._write_networks()

    def _write_networks(self) -> None:
        """Write what peers hold of shared models into their networks."""
        for peer, member in enumerate(self.members):
            for owner in self._stores[peer].names():
                member.network.write(owner, self._stores[peer].read(owner))

    def _begin(self, peer: int, time: float) -> None:
        """Start local steps from the values of now."""
        if peer in self._jobs:
            self._undo(peer)  # its last session ended before its last training job did
        store = self._stores[peer]
        start = {owner: store.read(owner) for owner in store.names()}
        done = self.rounds[peer]
        turn = time // (self.config.test_every * self.world.conditions.push_interval)
        due = done > 0 and turn > self._turns[peer]
        due = due and time < self.seconds * (1 - _LAST_MOMENT)  # at the end all are tested anyway
        self._turns[peer] = turn
        self._jobs[peer] = _Job(start, Reading(time, done, peer, Metrics()) if due else None)

    def _ended(self, peer: int, time: float) -> None:
        """Add what local steps changed to the values of now, and start the next."""
        if self._jobs[peer].after is None:
            self._train(time)
        if (tested := self._jobs[peer].test) is not None:
            self._on_test(tested)
        job, store = self._jobs.pop(peer), self._stores[peer]
        for owner, after in (job.after or {}).items():
            now, before = store.read(owner), job.start[owner]
            store.write(owner, after if now is before else now + (after - before))
        self.rounds[peer] += 1
        self._begin(peer, time)

    def _train(self, time: float) -> None:
        """Do every training job that has begun, except of peers that are gone: theirs will not end."""
        here = set(self._present(time))
        peers = [peer for peer in self._waiting() if peer in here]
        self._test(peers)
        for peer in peers:
            self._jobs[peer].flat = self.members[peer].network.flat.clone()
        self._arena.train(peers)
        for peer in peers:
            job, network = self._jobs[peer], self.members[peer].network
            job.after = {owner: network.read(owner).cpu().numpy() for owner in job.start}

    def _waiting(self) -> list[int]:
        """Peers whose training jobs have begun and were not done yet."""
        return [peer for peer, job in sorted(self._jobs.items()) if job.after is None]

    def _test(self, peers: Iterable[int]) -> None:
        """Bring networks to where their training jobs begin, and test those that are due."""
        due: dict[int, Reading] = {}
        for peer in peers:
            job = self._jobs[peer]
            for owner, value in job.start.items():
                self.members[peer].network.write(owner, value)
            if job.test is not None:
                due[peer] = job.test
        for peer, metrics in zip(due, self._arena.test(list(due)), strict=True):
            self._jobs[peer].test = replace(due[peer], metrics=metrics)

    def _drop_unfinished(self) -> None:
        """Drop training jobs that do not end in time: their tests count, what they learned does not."""
        self._test(self._waiting())
        for peer, job in sorted(self._jobs.items()):
            self._undo(peer)
            if job.test is not None:
                self._on_test(job.test)
        self._jobs.clear()

    def _undo(self, peer: int) -> None:
        """Leave the network as a training job that does not end found it."""
        if (flat := self._jobs[peer].flat) is not None:
            self.members[peer].network.flat.copy_(flat)

    def _present(self, time: float) -> list[int]:
        return np.flatnonzero(self.world.present_at(time)).tolist()


# --- from configs -----------------------------------------------------------------------------------


def world_of(config: Config, graph: nx.Graph, source: str = "config") -> World:
    """The world that a config with a [time] table describes; errors name the file and the key."""
    time = config.time or Time()
    if config.gossip.mode != "async":
        raise ConfigError(
            f"{source}: key 'gossip.mode': virtual time is for mode = 'async', not {config.gossip.mode!r}; "
            "without a [time] table the arena averages in rounds"
        )
    try:
        training = parse(time.training, "training")
        seconds = time.seconds or config.rounds * config.every * training.mean
        conditions = Conditions(
            training=training,
            delay=parse(time.delay, "delay"),
            stragglers=time.stragglers,
            slowdown=time.slowdown,
            loss=time.loss,
            timeout=time.timeout,
            events=_events(time.churn, config, graph, seconds, source),
            step=time.churn.step if time.churn else 1.0,
            partitions=tuple(
                Partition(each.start, each.end, _side(each.peers, config.peers))
                for each in time.partitions
            ),
            every=config.every,
        )
        return World(conditions, graph, config.seed)
    except (TimeError, TopologyError) as error:
        key = "time.churn" if isinstance(error, TopologyError) else "time"
        raise ConfigError(f"{source}: key {key!r}: {error}") from None


def seconds_of(config: Config, world: World) -> float:
    """How long a config runs."""
    given = None if config.time is None else config.time.seconds
    return given or config.rounds * world.conditions.push_interval


def wire_of(config: Config, members: Sequence[Member], owners: Mapping[str, Sequence[int]]) -> Wire:
    """The wire that a config's [gossip] table describes."""
    gossip = config.gossip
    shapes = {
        owner: blocks(schema_entries(members[who[0]].network, owner))
        for owner, who in owners.items()
    }
    return Wire(gossip.dtype, gossip.compress, gossip.drift, shapes)


def wiring_of(
    config: Config, members: Sequence[Member], mixing: Mixing | None, source: str = "config"
) -> tuple[Mixing, Wire]:
    """How peers average in lockstep and over which wire: an arena's `mixing` and `wire`.

    For a config with `compress`, `drift` or `dtype`. mixing: that of the config's topology, if it has one.
    Without one, live peers in `rounds` mode give everybody an equal part, and in `server` mode all they have
    to one of them.
    """
    lossy = config.gossip.lossy[0]
    require_push(config, source, "peers that send messages", f"leave out 'gossip.{lossy}'")
    owners = shared_owners(list(members))
    check_compression(config, list(members), owners, source)
    wire = wire_of(config, members, owners)
    if mixing is not None:
        return mixing, wire
    if config.gossip.mode == "server":
        return Server(), wire
    if config.gossip.mode == "rounds":
        everybody = nx.complete_graph(config.peers)
        return Gossip(everybody, exchanges=config.gossip.exchanges or 1), wire
    raise ConfigError(
        f"{source}: key 'gossip.{lossy}': without a topology and a [time] table async peers "
        'are averaged exactly, and send no messages; add one of them, or use mode = "rounds" or "server"'
    )


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


def _events(
    churn: Churn | None, config: Config, graph: nx.Graph, seconds: float, source: str
) -> tuple[Event, ...]:
    if churn is None:
        return ()
    if churn.trace is not None:
        return tuple(read_events(Path(source).parent / churn.trace))
    steps = math.ceil(seconds / churn.step) + 1
    chances = {k: getattr(churn, k) for k in ("leave", "arrive", "link_down", "link_up")}
    return tuple(draw_events(graph, steps, **chances, seed=config.seed))


def _side(who: int | list[int] | str, peers: int) -> frozenset[int]:
    if isinstance(who, str):
        return frozenset(range(peers))
    return frozenset(range(who) if isinstance(who, int) else who)
