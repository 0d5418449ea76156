"""The event-driven simulator: live peers' own Gossipers, driven over a simulated network on one heap.

Messages are the gossipers'; when they are sent, and what becomes of them, is told to the simulator in
advance. `VirtualTime` follows a timetable with delays, losses and churn, and calls back when a peer has
trained. `Lockstep` is the same loop with delay 0, for links that round or compress what they carry: everybody
gives at once, and nothing is ever waited for, repeated or asked back. Both are slower than products and
arrays, and the rule that those must keep to.
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
    wide_enough,
)
from ...gossip.compress import ROOM, SENT_KEPT, CompressError, Links, Shapes, Traffic, parse
from ...models import Learner, ModelError, Weighted, check_weights, implementers
from ...models.stack import Needs, Term
from ...peer import MatchedStore, NetworkStore, blocks, schema_entries
from .lockstep import Gossip, Mixing, Server
from .network import CHANGE, CREDIT, PUSH, SETTLE, TRAIN, Clock, Timetable, World, share_rule

MOMENT = 1e-9
"""Seconds that a message takes in lockstep: enough to arrive after all that were sent with it."""
WINDOW = 64
"""Steps after which a schedule without a period is taken to have shown all its links."""


# --- links ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """What becomes of values on their way: rounded, compressed, or not sent because they hardly moved.

    The compressors, references and bounds are those of live peers.

    dtype: of values that travel as they are. compress: a compressor's name, as in a config. drift: see
    `gossip.Drift`. shapes: the blocks of each vector, for compressors that look at matrices.
    """

    dtype: WireDtype = "float32"
    compress: str | None = None
    drift: float | Mapping[str, float] | None = None
    shapes: Mapping[str, Shapes] = field(default_factory=dict)

    @property
    def lossy(self) -> Callable[[str, Array], Array] | None:
        """What a receiver reads of a value that is sent as it is, if that is not the value itself."""
        return _as_float16 if self.dtype == "float16" else None

    def fitted(self, shapes: Mapping[str, Shapes], sizes: Mapping[str, int]) -> Wire:
        """The wire for vectors made of these blocks; ModelError if its compressor does not fit one of them.

        Blocks that do not make up their vector are of no use to anybody, here as with live peers.
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
                    "one out"
                )
            for vector, each in fit.items():
                try:
                    parse(self.compress).fit(each)
                except CompressError as error:
                    raise ModelError(f"model {vector!r}: {error}") from None
        return replace(self, shapes=fit)


class LinkState:
    """What one session of a peer remembers of its links: references of compressors, what it pushed last."""

    def __init__(self, wire: Wire):
        pipeline = None if wire.compress is None else parse(wire.compress)
        self.links = Links(pipeline, wire.shapes)
        self._drift = None if wire.drift is None else Drift(wire.drift, self.links.traffic)
        self._dtype: WireDtype = wire.dtype

    def skips(self, gossiper: Gossiper, vector: str, messages: int) -> bool:
        """Whether a push is left out because the value has hardly moved since the last."""
        if self._drift is None:
            return False
        return self._drift.skips(vector, gossiper.value(vector), messages)

    def sent(self, give: Give) -> int:
        """Count a transfer that leaves; the bytes of its value, without headers."""
        plain = np.dtype(wide_enough(give.value, self._dtype)).itemsize * give.value.size
        if give.packed is None:
            return plain
        self.links.traffic[give.model].sent(give.packed.nbytes, plain)
        return give.packed.nbytes


def _as_float16(_vector: str, value: Array) -> Array:
    return as_sent(value, wide_enough(value, "float16"))


# --- the loop ---------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What becomes of a transfer.

    arrives: when it is credited; infinity if it never is.
    closes: when its sender hears of that or, not `heard`, settles it with its receiver.
    """

    arrives: float
    closes: float
    heard: bool


class EventSimulator:
    """One gossiper for each peer, as live peers have it, and one heap of events.

    names: of the peers, in order of their places. stores: their vectors. weights: units of push-sum weight
    that each brings along. modes: of the gossipers, which push when they are told to by default.
    fraction: see `share_rule`.

    `gossipers` are those of the peers that are there, `bytes` of the values that were sent, by vector.
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
        self._places = {name: place for place, name in enumerate(names)}
        self._share = share_rule(fraction)
        self._links: dict[int, LinkState] = {}
        self._past: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._sessions: Counter[int] = Counter()
        self._queue: list[tuple[float, int, int, int, int, Callable[[float], object]]] = []
        self._number = 0

    @property
    def sent(self) -> int:
        """Bytes of all values that were sent so far."""
        return self.bytes.total()

    def traffic(self, vector: str) -> Traffic:
        """What compression and skipped pushes saved and distorted of one vector, over all sessions."""
        now = (each.links.traffic.get(vector, Traffic()) for each in self._links.values())
        return sum(now, self._past.get(vector, Traffic()))

    def counted(self) -> list[tuple[str, int, Traffic]]:
        """Per vector that was sent, or kept back: its bytes, and what was saved of it."""
        seen = {vector for each in self._links.values() for vector in each.links.traffic}
        return [
            (vector, self.bytes[vector], self.traffic(vector))
            for vector in sorted(seen | self._past.keys() | self.bytes.keys())
        ]

    def units(self, place: int, vector: str) -> int:
        """The units of weight that a peer holds; 0 if it is away."""
        return self.gossipers[place].weight(vector) if place in self.gossipers else 0

    def begin(self, place: int, seed: int, *, founder: bool) -> None:
        """Begin a session: the peer's weight counts at once, or after it heard from a neighbour."""
        self._sessions[place] += 1
        name, state = self._names[place], LinkState(self._wire)
        self.gossipers[place] = gossiper = Gossiper(
            name, f"{name}/{self._sessions[place]}", self.stores[place],
            mode=self._modes[place] if self._modes else None,
            seed=seed, lossy=self._wire.lossy, links=state.links,
        )  # fmt: skip
        self._links[place] = state
        for vector in gossiper.models:
            gossiper.inject(vector, self._weights[place], after_hearing=not founder)

    def end(self, place: int) -> None:
        """End a session, without a word: neighbours settle later what is on its way to it."""
        del self.gossipers[place]
        for vector, each in self._links.pop(place).links.traffic.items():
            self._past[vector] += each

    def introduce(self, one: int, other: int) -> None:
        """Tell two gossipers of each other."""
        for here, there in ((one, other), (other, one)):
            known = self.gossipers[there]
            self.gossipers[here].peer_online(known.peer, known.session, known.models)

    def push(self, vector: str, place: int, outcomes: Mapping[int, Outcome], now: float) -> bool:
        """Let a peer give a share to each of its receivers; False if its value cannot be written.

        A weight too small to be split, and a value that has hardly moved, let the push pass.
        """
        gossiper, fan = self.gossipers[place], len(outcomes)
        weight = gossiper.weight(vector)
        share: int = self._share(weight, fan)
        if min(share, weight - share * fan) < FLOOR:
            return True
        if self._links[place].skips(gossiper, vector, fan):
            return True
        names = sorted(self._names[other] for other in outcomes)
        if not gossiper.push(vector, dict.fromkeys(names, share), now):
            return False
        self._transmit(place, outcomes)
        return True

    def _transmit(self, place: int, outcomes: Mapping[int, Outcome]) -> int:
        """Schedule what becomes of the transfers that a gossiper sends; how many they are."""
        messages = self.gossipers[place].poll()
        for give in messages:
            assert isinstance(give, Give)
            self.bytes[give.model] += self._links[place].sent(give)
            receiver = self._places[give.receiver]
            arrives, closes, heard = outcomes[receiver]
            if arrives < math.inf:
                answered = closes if heard else None
                self._at(arrives, CREDIT, receiver, place, partial(self._credit, give, answered))
            if not heard:
                self._at(closes, SETTLE, place, receiver, partial(self._settle, give))
        return len(messages)

    def _credit(self, give: Give, answered: float | None, now: float) -> None:
        """A transfer arrives; its answer is heard at the time `answered`, or never."""
        receiver = self.gossipers[self._places[give.receiver]]
        receiver.handle(give, now)
        for answer in receiver.poll():
            if answered is not None:
                ends = self._places[answer.receiver], self._places[answer.sender]
                self._at(answered, SETTLE, *ends, partial(self._hear, answer))

    def _hear(self, answer: Message, now: float) -> None:
        if (giver := self.gossipers.get(self._places[answer.receiver])) is not None:
            giver.handle(answer, now)

    def _settle(self, give: Give, now: float) -> None:
        """A sender that heard no answer in time asks what became of its mass."""
        sender = self.gossipers.get(self._places[give.sender])
        if sender is None or sender.session != give.session:
            return  # the giver is gone with its ledger
        edge = (give.receiver, give.model)
        transfer = sender.ledger.open.get(edge)
        if transfer is None or transfer.give is not give:
            return  # taken back already: its receiver has begun another session
        receiver = self.gossipers.get(self._places[give.receiver])
        if receiver is None or receiver.session != give.receiver_session:
            sender.peer_gone(give.receiver, give.receiver_session)
            return
        sender.recall(*edge, now)
        for recall in sender.poll():
            receiver.handle(recall, now)
        for answer in receiver.poll():
            sender.handle(answer, now)

    def _at(
        self, time: float, kind: int, place: int, other: int, call: Callable[[float], object]
    ) -> None:
        """Schedule a call; of events at one time, those of lower kind and then of lower places come first."""
        self._number += 1
        heapq.heappush(self._queue, (time, kind, place, other, self._number, call))

    def _run_until(self, end: float) -> None:
        while self._queue and self._queue[0][0] < end:
            time, *_, call = heapq.heappop(self._queue)
            call(time)


# --- virtual time -----------------------------------------------------------------------------------


class VirtualTime(EventSimulator):
    """Gossipers that follow the timetables of a world.

    graph: who may give to whom. owners: per vector the peers that average it; the random choices of each
    vector are its own, by its place among them. stores, weights, fraction: see `EventSimulator`.
    fanout: neighbours that share in one push.
    on_trained: called as (peer, time) when a peer has done its local steps, before it pushes.
    on_arrival: called as (peer, time) when a peer begins another session.
    """

    def __init__(
        self,
        world: World,
        graph: nx.Graph,
        owners: Mapping[str, Sequence[int]],
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
            vector: Timetable(world, nx.subgraph(graph, who), fanout=fanout, lane=lane)
            for lane, (vector, who) in enumerate(owners.items())
        }
        self._clock = Clock(world, np.arange(world.peers))
        for peer in np.flatnonzero(world.present_at(0.0)).tolist():
            self._arrive(peer, founder=True)

    def run(self, seconds: float) -> None:
        """Let time pass; what happens is laid out one push interval at a time."""
        end = self.now + seconds
        while self.now < end:
            stop = min(self.now + self.world.conditions.push_interval, end)
            self._lay_out(stop)
            self._run_until(stop)
            self.now = stop

    def _lay_out(self, end: float) -> None:
        """Schedule what happens before `end`, except for transfers: they follow from their pushes."""
        for _, peers, times, _ in self._clock.until(end):
            for time, peer in zip(times.tolist(), peers.tolist(), strict=True):
                self._at(time, TRAIN, peer, 0, partial(self._on_trained, peer))
        for peer, time, arrives in zip(*self.world.changes(self.now, end), strict=True):
            change = self._arrived if arrives else self._left
            self._at(float(time), CHANGE, int(peer), int(arrives), partial(change, int(peer)))
        for lane, (vector, table) in enumerate(self._tables.items()):
            plan = table.until(end)
            outcomes: list[dict[int, Outcome]] = [{} for _ in plan.peer]
            some = plan.transfers
            columns = (some.push, some.receiver, some.arrives, some.closes, some.heard)
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
    """Gossipers that all exchange at once; all of them count from the start.

    weights: how much each peer counts, 1 for a peer like any other. servers: per vector the place of the
    peer that averages it, for `serve`.
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
            serving = {vector: names[place] for vector, place in servers.items()}
            # A vector without a server is averaged by its peer alone.
            modes = [
                ServerMode(name, {vector: serving.get(vector, name) for vector in store.names()})
                for name, store in zip(names, stores, strict=True)
            ]
        super().__init__(
            names, stores, [round(ONE * weight) for weight in weights], wire, modes=modes
        )
        self._met: set[tuple[int, int]] = set()
        self._round = 0
        for place in range(len(names)):
            self.begin(place, place, founder=True)
        for vector, server in (servers or {}).items():
            for place, gossiper in self.gossipers.items():
                if place != server and vector in gossiper.models:
                    self._meet(place, server)

    def weight(self, place: int, vector: str) -> float:
        """The weight that a peer holds, in peers."""
        return self.units(place, vector) / ONE

    def exchange(self, vector: str, targets: Mapping[int, Sequence[int]]) -> None:
        """Let peers give at once, equal parts to their targets and to themselves; then credit it all."""
        outcome = self._at_once()
        for place, others in targets.items():
            for other in others:
                self._meet(place, other)
            if others:
                outcomes = dict.fromkeys(others, outcome)
                self._at(self.now, PUSH, place, 0, partial(self._give, vector, place, outcomes))
        self._finish()

    def serve(self) -> None:
        """One round of every vector through its server."""
        for place, gossiper in self.gossipers.items():
            for vector in gossiper.models:
                self._refuse_not_finite(place, vector)
            self._modes[place].begin_round(gossiper, self._round)
        sent = 1
        while sent:
            outcomes = dict.fromkeys(self.gossipers, self._at_once())
            for gossiper in self.gossipers.values():
                gossiper.tick(self.now)
            sent = sum(self._transmit(place, outcomes) for place in self.gossipers)
            self._finish()
        self._round += 1

    def _at_once(self) -> Outcome:
        """All transfers of a moment arrive in the next, and all answers in the one after it."""
        return Outcome(self.now + MOMENT, self.now + 2 * MOMENT, True)

    def _finish(self) -> None:
        self._run_until(math.inf)
        self.now += 3 * MOMENT

    def _give(self, vector: str, place: int, outcomes: Mapping[int, Outcome], now: float) -> None:
        if not self.push(vector, place, outcomes, now):
            self._refuse_not_finite(place, vector)

    def _meet(self, one: int, other: int) -> None:
        if (one, other) not in self._met:
            self._met |= {(one, other), (other, one)}
            self.introduce(one, other)

    def _refuse_not_finite(self, place: int, vector: str) -> None:
        """Name the peer whose value is no number; live peers would go on without it."""
        if not is_finite(self.stores[place].read(vector)):
            raise ModelError(
                f"peer {self._names[place]!r}, model {vector!r}: values are not finite; lower the learning "
                "rate or look at the peer's data"
            )


class WiredAverager:
    """Averages the partial models of learners over a wire, through gossipers whose stores are the networks.

    The graph, its exchanges and their shares are those that the arena's products stand for, so that a
    wire which changes nothing gives the same, to rounding.
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
        owners = {o: who for o, who in implementers(networks).items() if len(who) > 1}
        self._owners, self._mixing, self._exchanges = owners, _checked(mixing), 0
        held = list(stores) or [NetworkStore(network) for network in networks]
        # Peers of different widths agree on the blocks of the width that they have in common.
        common = {o: stores[who[0]].common if stores else None for o, who in owners.items()}
        shapes = {
            o: blocks(schema_entries(networks[who[0]], o, common[o])) for o, who in owners.items()
        }
        self._sizes = {o: held[who[0]].read(o).size for o, who in owners.items()}
        self._wire = wire.fitted(shapes, self._sizes)
        # As in a live swarm, models take turns in choosing which of their peers serves.
        servers = {o: who[turn % len(who)] for turn, (o, who) in enumerate(owners.items())}
        self.lockstep = Lockstep(
            [network.peer for network in networks],
            held,
            check_weights(networks, weights),
            self._wire,
            servers=servers if isinstance(mixing, Server) else None,
        )
        self._kept: dict[tuple[str, int], Mapping[int, Sequence[int]]] = {}
        for place, learner in enumerate(learners):
            if isinstance(learner, Weighted):
                learner.weight_of = partial(self.lockstep.weight, place)

    def average(self) -> None:
        """One averaging of every partial model."""
        if not isinstance(self._mixing, Gossip):
            self.lockstep.serve()
            return
        for _ in range(self._mixing.exchanges):
            for owner in self._owners:
                self.lockstep.exchange(owner, self._targets(self._mixing, owner))
            self._exchanges += 1

    def needs(self) -> Needs:
        """What both ends of all links will remember of what passed between them."""
        total = 0
        for owner, who in self._owners.items() if self._wire.compress is not None else ():
            links = 2 * len(who)
            if isinstance(self._mixing, Gossip):
                schedule = self._mixing.schedule
                union = schedule.union(0, schedule.period or WINDOW).subgraph(who)
                links = union.number_of_edges() * (1 if union.is_directed() else 2)
            # At most: both ends share what they have in common.
            total += min(len(who) * ROOM, SENT_KEPT * links * 4 * self._sizes[owner])
        return Needs((Term("references of compressed links", total),))

    def _targets(self, mixing: Gossip, owner: str) -> Mapping[int, Sequence[int]]:
        """Whom each peer gives to in the next exchange; those of a graph that repeats are kept."""
        schedule = mixing.schedule
        step = self._exchanges % schedule.period if schedule.period else self._exchanges
        if (owner, step) in self._kept:
            return self._kept[owner, step]
        some = schedule.graph(step).subgraph(self._owners[owner])
        targets = {peer: list(some.neighbors(peer)) for peer in sorted(some)}
        if schedule.period:
            self._kept[owner, step] = targets
        return targets


def _checked(mixing: Mixing) -> Gossip | Server:
    """The mixing, if messages are sent in it, and sent as live peers send them."""
    if isinstance(mixing, Server):
        return mixing
    if not isinstance(mixing, Gossip):
        raise ModelError(
            "a wire is for peers that send messages, and exact averaging sends none: give "
            "mixing=Gossip(graph) or Server(), or leave out wire"
        )
    if mixing.kind != "push-sum" or mixing.rule not in (None, "push"):
        raise ModelError(
            f"{mixing.rule or mixing.kind} gossip has no place on a wire, over which live peers push equal "
            "parts: leave out wire, or kind and rule"
        )
    return mixing
