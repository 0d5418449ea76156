"""The event-driven simulator: the gossipers of live peers over a simulated network, with one event heap.

The gossipers decide what the messages contain. When messages are sent, delivered or lost is planned before.
`VirtualTime` follows a timetable with delays, losses and churn, and calls back when a peer has trained.
`Lockstep` is the same loop with delay 0, for links that round or compress values: all peers push at the same
time, and no message is lost, repeated or recalled. Both are slower than the matrix products of `lockstep.py`
and the arrays of `vectorised.py`, and are the reference for their results.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import networkx as nx
import numpy as np

from ...gossip import (
    FLOOR,
    ONE,
    Array,
    Drift,
    Give,
    Gossiper,
    Message,
    ServerMode,
    Store,
    WireDtype,
    as_sent,
    is_finite,
    sufficient_dtype,
)
from ...gossip.compress import (
    MAX_REFERENCE_BYTES,
    SENT_KEPT,
    CompressError,
    Links,
    Shapes,
    Traffic,
    parse,
)
from ...models import Learner, ModelError, WeightAware, check_weights, implementers
from ...models.stack import MemoryItem, MemoryNeeds
from ...peer import MatchedStore, NetworkStore, blocks, schema_entries
from .lockstep import Gossip, Mixing, Server
from .network import CHANGE, CREDIT, PUSH, SETTLE, TRAIN, Clock, Timetable, World, share_rule

MOMENT = 1e-9
"""Seconds that a message takes in lockstep: all messages of an exchange are sent before the first arrives."""
WINDOW = 64
"""Steps of a schedule without a period from which the number of its links is estimated."""


# --- links ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """How values are transmitted: rounded, compressed, or not sent because they hardly changed.

    Compressors, their references and their limits are those of live peers.

    dtype: of values that are sent uncompressed. compress: a compressor's name, as in a config. drift: see
    `gossip.Drift`. shapes: the shapes of each vector's blocks, for compressors that work on matrices.
    """

    dtype: WireDtype = "float32"
    compress: str | None = None
    drift: float | Mapping[str, float] | None = None
    shapes: Mapping[str, Shapes] = field(default_factory=dict)

    @property
    def lossy(self) -> Callable[[str, Array], Array] | None:
        """How sending an uncompressed value changes it; None if the receiver reads the exact value."""
        return _as_float16 if self.dtype == "float16" else None

    def fitted(self, shapes: Mapping[str, Shapes], sizes: Mapping[str, int]) -> Wire:
        """The wire for vectors made of these blocks; ModelError if its compressor does not fit one of them.

        As with live peers, blocks are ignored if their sizes do not add up to the size of their vector.
        """
        fit = {
            vector: each
            for vector, each in shapes.items()
            if sum(math.prod(shape) for shape in each) == sizes[vector]
        }
        if self.compress is not None:
            if self.dtype != "float32":
                raise ModelError(
                    f"compress = {self.compress!r} and dtype = {self.dtype!r} exclude each other: leave "
                    "out one of them"
                )
            for vector, each in fit.items():
                try:
                    parse(self.compress).check_shapes(each)
                except CompressError as error:
                    raise ModelError(f"model {vector!r}: {error}") from None
        return replace(self, shapes=fit)


class LinkState:
    """The link state of one session of a peer: references of compressors, and the values pushed last."""

    def __init__(self, wire: Wire):
        pipeline = None if wire.compress is None else parse(wire.compress)
        self.links = Links(pipeline, wire.shapes)
        self._drift = None if wire.drift is None else Drift(wire.drift, self.links.traffic)
        self._dtype: WireDtype = wire.dtype

    def skips(self, gossiper: Gossiper, vector: str, messages: int) -> bool:
        """Whether a push is skipped because the value has hardly changed since the last push."""
        if self._drift is None:
            return False
        return self._drift.skips(vector, gossiper.value(vector), messages)

    def sent(self, give: Give) -> int:
        """Count a transfer that is sent; return the bytes of its value, without headers."""
        uncompressed = (
            np.dtype(sufficient_dtype(give.value, self._dtype)).itemsize * give.value.size
        )
        if give.packed is None:
            return uncompressed
        self.links.traffic[give.model].count_sent(give.packed.nbytes, uncompressed)
        return give.packed.nbytes


def _as_float16(_vector: str, value: Array) -> Array:
    return as_sent(value, sufficient_dtype(value, "float16"))


# --- the loop ---------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The outcome of a transfer.

    arrives: when it is credited; infinity if it never is.
    closes: when the acknowledgement reaches the sender or, if not `acknowledged`, when the sender asks the
        receiver whether it was credited.
    """

    arrives: float
    closes: float
    acknowledged: bool


class EventSimulator:
    """One gossiper for each peer, as live peers have it, and one heap of events.

    names: of the peers, by index. stores: their vectors. weights: units of push-sum weight that each peer
    adds when it joins. modes: of the gossipers; by default, they push when `push` is called. fraction: see
    `share_rule`.

    `gossipers` are those of the peers that are online, by index; `bytes` counts the values sent, by vector.
    """

    def __init__(
        self,
        names: Sequence[str],
        stores: Sequence[Store],
        weights: Sequence[int],
        wire: Wire,
        *,
        modes: Sequence[ServerMode] = (),
        fraction: float | None = None,
    ) -> None:
        self.stores, self.now = list(stores), 0.0
        self.gossipers: dict[int, Gossiper] = {}
        self.bytes: Counter[str] = Counter()
        self._names, self._weights, self._wire, self._modes = list(names), weights, wire, modes
        self._indices = {name: index for index, name in enumerate(names)}
        self._share = share_rule(fraction)
        self._links: dict[int, LinkState] = {}
        self._ended_traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._sessions: Counter[int] = Counter()
        self._queue: list[tuple[float, int, int, int, int, Callable[[float], object]]] = []
        self._number = 0

    @property
    def sent(self) -> int:
        """Bytes of all values sent so far."""
        return self.bytes.total()

    def traffic(self, vector: str) -> Traffic:
        """What compression and skipped pushes saved and distorted in one vector, over all sessions."""
        now = (each.links.traffic.get(vector, Traffic()) for each in self._links.values())
        return sum(now, self._ended_traffic.get(vector, Traffic()))

    def counted(self) -> list[tuple[str, int, Traffic]]:
        """For each vector that was sent or skipped: the bytes sent, and its traffic statistics."""
        seen = {vector for each in self._links.values() for vector in each.links.traffic}
        return [
            (vector, self.bytes[vector], self.traffic(vector))
            for vector in sorted(seen | self._ended_traffic.keys() | self.bytes.keys())
        ]

    def units(self, index: int, vector: str) -> int:
        """The units of weight that a peer holds; 0 if it is offline."""
        return self.gossipers[index].weight(vector) if index in self.gossipers else 0

    def begin(self, index: int, seed: int, *, founder: bool) -> None:
        """Begin a session. A founder's weight counts at once, another's after it has received a transfer."""
        self._sessions[index] += 1
        name, state = self._names[index], LinkState(self._wire)
        self.gossipers[index] = gossiper = Gossiper(
            name, f"{name}/{self._sessions[index]}", self.stores[index],
            mode=self._modes[index] if self._modes else None,
            seed=seed, lossy=self._wire.lossy, links=state.links,
        )  # fmt: skip
        self._links[index] = state
        for vector in gossiper.models:
            gossiper.inject(vector, self._weights[index], after_first_transfer=not founder)

    def end(self, index: int) -> None:
        """End a session without notice; neighbours settle their open transfers to this peer later."""
        del self.gossipers[index]
        for vector, each in self._links.pop(index).links.traffic.items():
            self._ended_traffic[vector] += each

    def introduce(self, one: int, other: int) -> None:
        """Announce two gossipers to each other."""
        for receiver, announced in ((one, other), (other, one)):
            gossiper = self.gossipers[announced]
            self.gossipers[receiver].peer_online(gossiper.peer, gossiper.session, gossiper.models)

    def push(self, vector: str, index: int, outcomes: Mapping[int, Outcome], now: float) -> bool:
        """Let a peer push a share to each of its receivers; False if its value is not finite.

        The push is skipped if the weight is too small to be split or the value has hardly changed.
        """
        gossiper, fan = self.gossipers[index], len(outcomes)
        weight = gossiper.weight(vector)
        share: int = self._share(weight, fan)
        if min(share, weight - share * fan) < FLOOR:
            return True
        if self._links[index].skips(gossiper, vector, fan):
            return True
        names = sorted(self._names[other] for other in outcomes)
        if not gossiper.push(vector, dict.fromkeys(names, share), now):
            return False
        self._transmit(index, outcomes)
        return True

    def _transmit(self, index: int, outcomes: Mapping[int, Outcome]) -> int:
        """Schedule the outcomes of the transfers that a gossiper sends; return their number."""
        messages = self.gossipers[index].poll()
        for give in messages:
            assert isinstance(give, Give)
            self.bytes[give.model] += self._links[index].sent(give)
            receiver = self._indices[give.receiver]
            arrives, closes, acknowledged = outcomes[receiver]
            if arrives < math.inf:
                answered = closes if acknowledged else None
                self._at(arrives, CREDIT, receiver, index, partial(self._credit, give, answered))
            if not acknowledged:
                self._at(closes, SETTLE, index, receiver, partial(self._settle, give))
        return len(messages)

    def _credit(self, give: Give, answered: float | None, now: float) -> None:
        """Credit a transfer; its acknowledgement reaches the sender at the time `answered`, or never."""
        receiver = self.gossipers[self._indices[give.receiver]]
        receiver.handle(give, now)
        for answer in receiver.poll():
            if answered is not None:
                ends = self._indices[answer.receiver], self._indices[answer.sender]
                self._at(answered, SETTLE, *ends, partial(self._deliver_answer, answer))

    def _deliver_answer(self, answer: Message, now: float) -> None:
        if (giver := self.gossipers.get(self._indices[answer.receiver])) is not None:
            giver.handle(answer, now)

    def _settle(self, give: Give, now: float) -> None:
        """A sender that received no answer in time asks the receiver whether the transfer was credited."""
        sender = self.gossipers.get(self._indices[give.sender])
        if sender is None or sender.session != give.session:
            return  # the sender's session ended, and its ledger with it
        edge = (give.receiver, give.model)
        transfer = sender.ledger.open.get(edge)
        if transfer is None or transfer.give is not give:
            return  # taken back already, because the receiver began another session
        receiver = self.gossipers.get(self._indices[give.receiver])
        if receiver is None or receiver.session != give.receiver_session:
            sender.peer_gone(give.receiver, give.receiver_session)
            return
        sender.recall(*edge, now)
        for recall in sender.poll():
            receiver.handle(recall, now)
        for answer in receiver.poll():
            sender.handle(answer, now)

    def _at(
        self, time: float, kind: int, index: int, other: int, call: Callable[[float], object]
    ) -> None:
        """Schedule a call; events at the same time are ordered by kind, then by the peers' indices."""
        self._number += 1
        heapq.heappush(self._queue, (time, kind, index, other, self._number, call))

    def _run_until(self, end: float) -> None:
        while self._queue and self._queue[0][0] < end:
            time, *_, call = heapq.heappop(self._queue)
            call(time)


# --- virtual time -----------------------------------------------------------------------------------


class VirtualTime(EventSimulator):
    """Gossipers that follow the timetables of a world.

    graph: which peers may push to which. members: for each vector the peers that average it; the random
    choices of each vector are independent, numbered by its position here. stores, weights, fraction: see
    `EventSimulator`. fanout: neighbours that receive a share in one push.
    on_trained: called as (peer, time) when a peer has done its local steps, before it pushes.
    on_arrival: called as (peer, time) when a peer begins another session.
    """

    def __init__(
        self,
        world: World,
        graph: nx.Graph,
        members: Mapping[str, Sequence[int]],
        stores: Sequence[Store],
        weights: Sequence[int],
        *,
        fanout: int = 1,
        fraction: float | None = None,
        wire: Wire | None = None,
        on_trained: Callable[[int, float], None] = lambda peer, time: None,
        on_arrival: Callable[[int, float], None] = lambda peer, time: None,
    ):
        names = [str(peer) for peer in range(world.peers)]
        super().__init__(names, stores, weights, wire or Wire(), fraction=fraction)
        self.world, self._graph = world, graph
        self._on_trained, self._on_arrival = on_trained, on_arrival
        self._tables = {
            vector: Timetable(world, nx.subgraph(graph, peers), fanout=fanout, lane=lane)
            for lane, (vector, peers) in enumerate(members.items())
        }
        self._clock = Clock(world, np.arange(world.peers))
        for peer in np.flatnonzero(world.present_at(0.0)).tolist():
            self._arrive(peer, founder=True)

    def run(self, seconds: float) -> None:
        """Let virtual time pass; events are planned one push interval ahead."""
        end = self.now + seconds
        while self.now < end:
            stop = min(self.now + self.world.conditions.push_interval, end)
            self._schedule_until(stop)
            self._run_until(stop)
            self.now = stop

    def _schedule_until(self, end: float) -> None:
        """Schedule all events before `end`, except for those of transfers, which their pushes schedule."""
        for _, peers, times, _ in self._clock.until(end):
            for time, peer in zip(times.tolist(), peers.tolist(), strict=True):
                self._at(time, TRAIN, peer, 0, partial(self._on_trained, peer))
        for peer, time, arrives in zip(*self.world.changes(self.now, end), strict=True):
            change = self._arrived if arrives else self._left
            self._at(float(time), CHANGE, int(peer), int(arrives), partial(change, int(peer)))
        for lane, (vector, table) in enumerate(self._tables.items()):
            plan = table.until(end)
            outcomes: list[dict[int, Outcome]] = [{} for _ in plan.peer]
            t = plan.transfers
            columns = (t.push, t.receiver, t.arrives, t.closes, t.acknowledged)
            for push, receiver, *outcome in zip(*(c.tolist() for c in columns), strict=True):
                outcomes[push][receiver] = Outcome(*outcome)
            pushes = zip(plan.time.tolist(), plan.peer.tolist(), outcomes, strict=True)
            for time, peer, each in pushes:
                self._at(time, PUSH, peer, lane, partial(self.push, vector, peer, each))

    def _arrive(self, peer: int, *, founder: bool) -> None:
        keys = np.array([peer]), np.array([self._sessions[peer] + 1])
        self.begin(peer, int(self.world.draws.hashes("gossiper", *keys)[0]), founder=founder)
        for other in set(nx.all_neighbors(self._graph, peer)):
            if other in self.gossipers and other != peer:
                self.introduce(peer, other)

    def _arrived(self, peer: int, now: float) -> None:
        self._arrive(peer, founder=False)
        self._on_arrival(peer, now)

    def _left(self, peer: int, now: float) -> None:
        self.end(peer)
        for other in set(nx.all_neighbors(self._graph, peer)):
            if other in self.gossipers:
                self.gossipers[other].peer_offline(self._names[peer])


# --- lockstep ---------------------------------------------------------------------------------------


class Lockstep(EventSimulator):
    """Gossipers that all exchange at the same time; the weights of all peers count from the start.

    weights: each peer's weight in averages; 1 is an ordinary peer's. servers: for each vector the index of
    the peer that averages it, for `serve`.
    """

    def __init__(
        self,
        names: Sequence[str],
        stores: Sequence[Store],
        weights: Sequence[float],
        wire: Wire,
        *,
        servers: Mapping[str, int] | None = None,
    ) -> None:
        modes: list[ServerMode] = []
        if servers is not None:
            server_names = {vector: names[server] for vector, server in servers.items()}
            # A vector without a server has only one peer, which then is its own server.
            modes = [
                ServerMode(
                    name, {vector: server_names.get(vector, name) for vector in store.names()}
                )
                for name, store in zip(names, stores, strict=True)
            ]
        super().__init__(
            names, stores, [round(ONE * weight) for weight in weights], wire, modes=modes
        )
        self._introduced: set[tuple[int, int]] = set()
        self._round = 0
        for index in range(len(names)):
            self.begin(index, index, founder=True)
        for vector, server in (servers or {}).items():
            for index, gossiper in self.gossipers.items():
                if index != server and vector in gossiper.models:
                    self._introduce_once(index, server)

    def weight(self, index: int, vector: str) -> float:
        """The weight that a peer holds; 1 is the weight of one ordinary peer."""
        return self.units(index, vector) / ONE

    def exchange(self, vector: str, targets: Mapping[int, Sequence[int]]) -> None:
        """Let all peers push at the same time, in equal parts to targets and themselves; then credit all."""
        outcome = self._at_once()
        for index, others in targets.items():
            for other in others:
                self._introduce_once(index, other)
            if others:
                outcomes = dict.fromkeys(others, outcome)
                self._at(
                    self.now, PUSH, index, 0, partial(self._push_or_raise, vector, index, outcomes)
                )
        self._finish()

    def serve(self) -> None:
        """Average every vector once through its server."""
        for index, gossiper in self.gossipers.items():
            for vector in gossiper.models:
                self._raise_if_not_finite(index, vector)
            self._modes[index].begin_round(gossiper, self._round)
        sent = 1
        while sent:
            outcomes = dict.fromkeys(self.gossipers, self._at_once())
            for gossiper in self.gossipers.values():
                gossiper.tick(self.now)
            sent = sum(self._transmit(index, outcomes) for index in self.gossipers)
            self._finish()
        self._round += 1

    def _at_once(self) -> Outcome:
        """All transfers arrive one `MOMENT` after they are sent, and all answers one `MOMENT` after that."""
        return Outcome(self.now + MOMENT, self.now + 2 * MOMENT, True)

    def _finish(self) -> None:
        self._run_until(math.inf)
        self.now += 3 * MOMENT

    def _push_or_raise(
        self, vector: str, index: int, outcomes: Mapping[int, Outcome], now: float
    ) -> None:
        if not self.push(vector, index, outcomes, now):
            self._raise_if_not_finite(index, vector)

    def _introduce_once(self, one: int, other: int) -> None:
        if (one, other) not in self._introduced:
            self._introduced |= {(one, other), (other, one)}
            self.introduce(one, other)

    def _raise_if_not_finite(self, index: int, vector: str) -> None:
        """Raise if a peer's value is NaN or infinite; live peers would skip such a push."""
        if not is_finite(self.stores[index].read(vector)):
            raise ModelError(
                f"peer {self._names[index]!r}, model {vector!r}: values are not finite; lower the learning "
                "rate or check the peer's data"
            )


class WiredAverager:
    """Averages the partial models of learners over a simulated wire; gossipers read and write the networks.

    Graph, exchanges and shares are the same as in the arena's matrix products. So a wire without rounding,
    compression or skipped pushes gives the same result, up to rounding errors.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        mixing: Mixing,
        weights: Sequence[float] | None,
        wire: Wire,
        stores: Sequence[MatchedStore] = (),
    ):
        networks = [learner.network for learner in learners]
        members = {m: peers for m, peers in implementers(networks).items() if len(peers) > 1}
        self._members, self._mixing, self._exchanges = members, _checked(mixing), 0
        all_stores = list(stores) or [NetworkStore(network) for network in networks]
        # Peers of different widths exchange blocks of the common width.
        common = {
            m: stores[peers[0]].common_width if stores else None for m, peers in members.items()
        }
        shapes = {
            model: blocks(schema_entries(networks[peers[0]], model, common[model]))
            for model, peers in members.items()
        }
        self._sizes = {m: all_stores[peers[0]].read(m).size for m, peers in members.items()}
        self._wire = wire.fitted(shapes, self._sizes)
        # As in a live swarm, the n-th model is served by the n-th of its peers, to spread the load.
        servers = {
            model: peers[number % len(peers)]
            for number, (model, peers) in enumerate(members.items())
        }
        self.lockstep = Lockstep(
            [network.peer for network in networks],
            all_stores,
            check_weights(networks, weights),
            self._wire,
            servers=servers if isinstance(mixing, Server) else None,
        )
        self._cached_targets: dict[tuple[str, int], Mapping[int, Sequence[int]]] = {}
        for index, learner in enumerate(learners):
            if isinstance(learner, WeightAware):
                learner.weight_of = partial(self.lockstep.weight, index)

    def average(self) -> None:
        """Average every partial model once."""
        if not isinstance(self._mixing, Gossip):
            self.lockstep.serve()
            return
        for _ in range(self._mixing.exchanges):
            for model in self._members:
                self.lockstep.exchange(model, self._targets(self._mixing, model))
            self._exchanges += 1

    def needs(self) -> MemoryNeeds:
        """The memory for the references that both ends of every compressed link keep."""
        total = 0
        for model, peers in self._members.items() if self._wire.compress is not None else ():
            links = 2 * len(peers)
            if isinstance(self._mixing, Gossip):
                schedule = self._mixing.schedule
                union = schedule.union(0, schedule.period or WINDOW).subgraph(peers)
                links = union.number_of_edges() * (1 if union.is_directed() else 2)
            # An upper bound: both ends of a link share the arrays that are equal.
            total += min(
                len(peers) * MAX_REFERENCE_BYTES, SENT_KEPT * links * 4 * self._sizes[model]
            )
        return MemoryNeeds((MemoryItem("references of compressed links", total),))

    def _targets(self, mixing: Gossip, model: str) -> Mapping[int, Sequence[int]]:
        """The peers to which each peer pushes in the next exchange; cached if the schedule has a period."""
        schedule = mixing.schedule
        step = self._exchanges % schedule.period if schedule.period else self._exchanges
        if (model, step) in self._cached_targets:
            return self._cached_targets[model, step]
        graph = schedule.graph(step).subgraph(self._members[model])
        targets = {peer: list(graph.neighbors(peer)) for peer in sorted(graph)}
        if schedule.period:
            self._cached_targets[model, step] = targets
        return targets


def _checked(mixing: Mixing) -> Gossip | Server:
    """The mixing, if its peers send messages as live peers do; otherwise raise ModelError."""
    if isinstance(mixing, Server):
        return mixing
    if not isinstance(mixing, Gossip):
        raise ModelError(
            "`wire` needs peers that send messages, and exact averaging sends none: give "
            "mixing=Gossip(graph) or Server(), or leave out `wire`"
        )
    if mixing.kind != "push-sum" or mixing.rule not in (None, "push"):
        raise ModelError(
            f"{mixing.rule or mixing.kind} gossip cannot be combined with `wire`, which simulates live "
            "peers, and these push equal parts: leave out `wire`, or kind and rule"
        )
    return mixing
