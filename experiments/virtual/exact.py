"""The same timetable through the gossipers of live peers: slower, and the rule that arrays must keep to.

Every peer has one `Gossiper` per shared vector, the object that a live peer drives. Messages are
theirs; when they are sent and what becomes of them is the timetable's.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import numpy as np

from ...gossip import FLOOR, Array, DictStore, Gossiper, Message
from ...gossip.compress import Traffic
from .holdings import share_rule
from .timetable import Clock, Timetable
from .wire import End, Wire
from .world import World

# At one moment, events happen in this order: the order of `flow`, with training before the push.
CHANGE, CREDIT, SETTLE, TRAIN, PUSH = range(5)


@dataclass(frozen=True)
class Shared:
    """A vector that several peers average: who may give it to whom, and each one's value and weight."""

    name: str
    graph: nx.Graph
    values: Mapping[int, Array]
    weights: Mapping[int, int]


@dataclass
class _Transfer:
    """A transfer as the timetable has it, with the messages that the gossipers made of it."""

    lane: int
    sender: int
    receiver: int
    arrives: float
    closes: float
    heard: bool
    give: Message | None = None
    answer: Message | None = None


@dataclass
class _Push:
    lane: int
    transfers: list[_Transfer] = field(default_factory=list)


class Lane:
    """One shared vector: the gossipers and stores of the peers that implement it.

    seed: of a peer's random choices in one of its lives, called as seed(peer, life).
    bytes: of all values that were sent.
    """

    def __init__(self, shared: Shared, wire: Wire, seed: Callable[[int, int], int]):
        self.shared, self._wire, self._seed = shared, wire, seed
        self.stores = {p: DictStore({shared.name: value}) for p, value in shared.values.items()}
        self.gossipers: dict[int, Gossiper] = {}
        self.bytes = 0
        self._ends: dict[int, End] = {}
        self._lives: Counter[int] = Counter()
        self._past = Traffic()

    @property
    def traffic(self) -> Traffic:
        """What compression and skipped pushes saved and distorted, over all peers and lives."""
        return sum((end.traffic(self.shared.name) for end in self._ends.values()), self._past)

    def arrive(self, peer: int, *, founder: bool) -> None:
        """A peer begins a life: its weight counts at once, or after it heard from a neighbour."""
        name = self.shared.name
        self._lives[peer] += 1
        session = f"{peer}/{self._lives[peer]}"
        end = self._ends[peer] = self._wire.end()
        new = Gossiper(
            str(peer), session, self.stores[peer], seed=self._seed(peer, self._lives[peer]),
            lossy=self._wire.lossy, links=end.links,
        )  # fmt: skip
        new.inject(name, self.shared.weights[peer], after_hearing=not founder)
        self.gossipers[peer] = new
        for other in self._around(peer):
            if other in self.gossipers:
                known = self.gossipers[other]
                new.peer_online(str(other), known.session, [name])
                known.peer_online(str(peer), session, [name])

    def leave(self, peer: int) -> None:
        """A peer dies. Others see that it is not there; what is on its way to it they settle later."""
        del self.gossipers[peer]
        self._past += self._ends.pop(peer).traffic(self.shared.name)
        for other in self._around(peer):
            if other in self.gossipers:
                self.gossipers[other].peer_offline(str(peer))

    def push(self, peer: int, transfers: Sequence[_Transfer], share: int, now: float) -> bool:
        """Let the gossiper give, and attach what it sends to the transfers; False if it cannot."""
        gossiper = self.gossipers[peer]
        if not gossiper.push(self.shared.name, {str(t.receiver): share for t in transfers}, now):
            return False  # its value cannot be written: the gossiper counts and tells that
        messages = gossiper.poll()
        self.bytes += self._ends[peer].sent(messages)
        sent = {message.receiver: message for message in messages}
        for transfer in transfers:
            transfer.give = sent[str(transfer.receiver)]
        return True

    def skips(self, peer: int, messages: int) -> bool:
        """Whether a peer keeps a push to itself, because its value has hardly moved."""
        name = self.shared.name
        return self._ends[peer].skips(name, self.stores[peer].read(name), messages)

    def settle(self, transfer: _Transfer, now: float) -> None:
        """The answer arrives, or the sender, tired of waiting, asks what became of its mass."""
        give = transfer.give
        sender = self.gossipers.get(transfer.sender)
        if give is None or sender is None or sender.session != give.session:
            return  # nothing was given, or the giver is gone with its books
        edge = (give.receiver, self.shared.name)
        if edge not in sender.ledger.open or sender.ledger.open[edge].give is not give:
            return  # taken back already: its receiver has begun another life
        if transfer.heard:
            assert transfer.answer is not None
            sender.handle(transfer.answer, now)
            return
        receiver = self.gossipers.get(transfer.receiver)
        addressed = sender.ledger.open[edge].give.receiver_session
        if receiver is None or receiver.session != addressed:
            sender.peer_gone(give.receiver, addressed)
            return
        sender.recall(*edge, now)
        for recall in sender.poll():
            receiver.handle(recall, now)
        for answer in receiver.poll():
            sender.handle(answer, now)

    def _around(self, peer: int) -> set[int]:
        return set(nx.all_neighbors(self.shared.graph, peer))


class ExactSwarm:
    """Drives gossipers through a world's timetable, one event at a time.

    shared: the vectors; the random choices of each are its own, by its place in the list.
    wire: what becomes of values on it.
    on_stretch: called as (peer, count, time) when a stretch of training ends, before the peer pushes.
    on_arrival: called as (peer, time) when a peer begins another life.
    """

    def __init__(
        self,
        world: World,
        shared: Sequence[Shared],
        *,
        fanout: int = 1,
        fraction: float | None = None,
        wire: Wire | None = None,
        on_stretch: Callable[[int, int, float], None] = lambda peer, count, time: None,
        on_arrival: Callable[[int, float], None] = lambda peer, time: None,
    ):
        self.world, self.now = world, 0.0
        self.lanes = [
            Lane(one, wire or Wire(), lambda peer, life, lane=lane: self._seed(lane, peer, life))
            for lane, one in enumerate(shared)
        ]
        self._rule = share_rule(fraction)
        self._on_stretch, self._on_arrival = on_stretch, on_arrival
        self._tables = [
            Timetable(world, one.graph, fanout=fanout, lane=lane) for lane, one in enumerate(shared)
        ]
        everyone = np.arange(world.peers)
        self._clock = Clock(world, everyone)
        here = world.present(everyone, np.zeros(world.peers))
        for lane in self.lanes:
            for peer in lane.stores:
                if here[peer]:
                    lane.arrive(peer, founder=True)
        self._queue: list[tuple[float, int, int, int, int, Any]] = []
        self._number = 0

    def run(self, seconds: float, window: float | None = None) -> None:
        """Let time pass."""
        end = self.now + seconds
        step = window or self.world.conditions.pace
        while self.now < end:
            stop = min(self.now + step, end)
            self._lay_out(stop)
            while self._queue and self._queue[0][0] < stop:
                time, kind, peer, _, _, what = heapq.heappop(self._queue)
                self._handle(time, kind, peer, what)
            self.now = stop

    def estimate(self, lane: int, peer: int) -> Array:
        """A peer's value of a vector."""
        return self.lanes[lane].stores[peer].read(self.lanes[lane].shared.name)

    def weight(self, lane: int, peer: int) -> int:
        """A peer's weight for a vector; 0 if it is away."""
        known = self.lanes[lane].gossipers.get(peer)
        return 0 if known is None else known.weight(self.lanes[lane].shared.name)

    def _seed(self, lane: int, peer: int, life: int) -> int:
        return int(self.world.draws.hashes(f"wire {lane}", np.array([peer]), np.array([life]))[0])

    def _lay_out(self, end: float) -> None:
        for _, peers, times, counts in self._clock.until(end):
            rows = zip(times.tolist(), peers.tolist(), counts.tolist(), strict=True)
            for time, peer, count in rows:
                self._add(time, TRAIN, peer, 0, count)
        for peer, time, arrives in zip(*self.world.changes(self.now, end), strict=True):
            self._add(float(time), CHANGE, int(peer), int(arrives), bool(arrives))
        for lane, table in enumerate(self._tables):
            plan = table.until(end)
            pushes = [_Push(lane) for _ in range(len(plan.pushes))]
            known = plan.transfers
            columns = (known.sender, known.receiver, known.arrives, known.closes, known.heard)
            for push, *rest in zip(
                known.push.tolist(), *(c.tolist() for c in columns), strict=True
            ):
                pushes[push].transfers.append(_Transfer(lane, *rest))
            moments = zip(plan.pushes.time.tolist(), plan.pushes.peer.tolist(), pushes, strict=True)
            for time, peer, push in moments:
                self._add(time, PUSH, peer, lane, push)

    def _add(self, time: float, kind: int, peer: int, other: int, what: Any) -> None:
        self._number += 1
        heapq.heappush(self._queue, (time, kind, peer, other, self._number, what))

    def _handle(self, now: float, kind: int, peer: int, what: Any) -> None:
        if kind == TRAIN:
            self._on_stretch(peer, what, now)
        elif kind == PUSH:
            self._push(peer, what, now)
        elif kind == CREDIT:
            receiver = self.lanes[what.lane].gossipers[what.receiver]
            receiver.handle(what.give, now)
            (what.answer,) = receiver.poll()
        elif kind == SETTLE:
            self.lanes[what.lane].settle(what, now)
        else:
            self._change(peer, what, now)

    def _push(self, peer: int, push: _Push, now: float) -> None:
        lane = self.lanes[push.lane]
        weight, fan = self.weight(push.lane, peer), len(push.transfers)
        share = int(self._rule(np.array([weight]), np.array([fan]))[0])
        if min(share, weight - share * fan) < FLOOR:
            return  # too little to split: the push is let pass
        if lane.skips(peer, fan) or not lane.push(peer, push.transfers, share, now):
            return
        for transfer in push.transfers:
            if transfer.arrives < np.inf:
                self._add(transfer.arrives, CREDIT, transfer.receiver, peer, transfer)
            self._add(transfer.closes, SETTLE, peer, transfer.receiver, transfer)

    def _change(self, peer: int, arrives: bool, now: float) -> None:
        for lane in self._with(peer):
            if arrives:
                lane.arrive(peer, founder=False)
            else:
                lane.leave(peer)
        if arrives:
            self._on_arrival(peer, now)

    def _with(self, peer: int) -> Iterable[Lane]:
        return [lane for lane in self.lanes if peer in lane.stores]
