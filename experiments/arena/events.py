"""The event-driven simulator: the gossipers of live peers over a simulated network, with one heap of events.

The gossipers decide what messages contain; when messages are sent, delivered or lost is planned in advance.
`VirtualTime` follows a timetable with delays, losses and churn, and calls back when a peer has trained.
`Lockstep` is the same loop with nearly no delay, for wires that round or compress values: all peers push at
the same time, and no message is lost, repeated or recalled. Both are slower than the matrix products of
`lockstep.py` and the arrays of `vectorised.py`, and are the reference for their results.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import networkx as nx
import numpy as np

from ...gossip import (
    MIN_WEIGHT,
    ONE,
    Array,
    Drift,
    Give,
    Gossiper,
    Message,
    RobustMean,
    RoundsMode,
    ServerMode,
    SteadyMode,
    Store,
    WireDtype,
    WireSettings,
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
from ...models import Learner, ModelError, Scorer, WeightAware, check_weights, networks_by_model
from ...models.stack import MemoryItem, MemoryNeeds
from ...peer import MatchedStore, NetworkStore, blocks, schema_entries
from .lockstep import Gossip, Mixing, Robust, Server, Steady
from .network import CHANGE, CREDIT, PUSH, SETTLE, TRAIN, Clock, Timetable, World

MOMENT = 1e-9
"""Virtual seconds that a message takes in lockstep; not 0, so that all messages of an exchange are sent
before the first arrives."""
MAX_STEPS = 64
"""How many steps of a schedule that never repeats are looked at to estimate the number of its links."""


# --- links ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """How values are transmitted: rounded, compressed, or not sent because they hardly changed.

    Compressors, their references and their limits are those of live peers.

    dtype: the type of values that are sent uncompressed.
    compress: a compressor's name, as in a config.
    drift: by how much a value must have changed to be sent, see `gossip.Drift`.
    shapes: the shapes of each model's blocks, for compressors that work on matrices.
    """

    dtype: WireDtype = "float32"
    compress: str | None = None
    drift: float | Mapping[str, float] | None = None
    shapes: Mapping[str, Shapes] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: WireSettings) -> Wire:
        """Return the wire that a config's [gossip] table describes."""
        return cls(settings.dtype, settings.compress, settings.drift)

    @property
    def lossy(self) -> Callable[[str, Array], Array] | None:
        """The function that changes an uncompressed value as sending it does; None if nothing changes it."""
        if self.dtype != "float16":
            return None
        return lambda _, value: as_sent(value, sufficient_dtype(value, "float16"))

    def fitted(self, shapes: Mapping[str, Shapes], sizes: Mapping[str, int]) -> Wire:
        """Return the wire for models made of these blocks; ModelError if its compressor does not fit one.

        As with live peers, blocks are ignored if their sizes do not add up to the size of their model.
        """
        fitting_shapes = {
            model: model_shapes
            for model, model_shapes in shapes.items()
            if sum(math.prod(shape) for shape in model_shapes) == sizes[model]
        }
        if self.compress is not None:
            if self.dtype != "float32":
                raise ModelError(
                    f"compress = {self.compress!r} and dtype = {self.dtype!r} exclude each other: leave "
                    "out one of them"
                )
            for model, model_shapes in fitting_shapes.items():
                try:
                    parse(self.compress).check_shapes(model_shapes)
                except CompressError as error:
                    raise ModelError(f"model {model!r}: {error}") from None
        return replace(self, shapes=fitting_shapes)


class LinkState:
    """What one session of a peer keeps per link: the compressors' references, and the values pushed last."""

    def __init__(self, wire: Wire):
        pipeline = None if wire.compress is None else parse(wire.compress)
        self.links = Links(pipeline, wire.shapes)
        self._drift = None if wire.drift is None else Drift(wire.drift, self.links.traffic)
        self._dtype: WireDtype = wire.dtype

    def skips(self, gossiper: Gossiper, model: str, messages: int) -> bool:
        """Return whether a push is skipped because the value has hardly changed since the last push."""
        if self._drift is None:
            return False
        return self._drift.skips(model, gossiper.value(model), messages)

    def count_sent(self, give: Give) -> int:
        """Count a transfer that is sent; return the bytes of its value, without headers."""
        uncompressed = (
            np.dtype(sufficient_dtype(give.value, self._dtype)).itemsize * give.value.size
        )
        if give.packed is None:
            return uncompressed
        self.links.traffic[give.model].count_sent(give.packed.nbytes, uncompressed)
        return give.packed.nbytes


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


ShareRule = Callable[[Any, Any], Any]
"""(weights, numbers of receivers) → the units of weight that each receiver gets; ints or arrays."""


def share_rule(fraction: float | None) -> ShareRule:
    """Return the rule: equal parts for receivers and sender, or a fraction of its weight for the receivers.

    Weights are whole units. The fraction is approximated by a ratio of integers that are small enough that
    products with weights never overflow.
    """
    if fraction is None:
        return lambda weight, count: weight // (count + 1)
    if not 0 < fraction < 1:
        raise ValueError(f"fraction is {fraction}, it must lie between 0 and 1")
    numerator, denominator = Fraction(fraction).limit_denominator(1 << 20).as_integer_ratio()
    return lambda weight, count: (
        (weight // denominator * numerator + weight % denominator * numerator // denominator)
        // count
    )


class EventSimulator:
    """One gossiper for each peer, as live peers have it, and one heap of events.

    names: the names of the peers; elsewhere peers have their indices in this list.
    stores: the peers' values.
    weights: the push-sum weight that each peer adds when it joins, in units of which a peer has `ONE`.
    modes: the modes of the gossipers; by default, they push when `push` is called.
    steady: makes the mode of a peer's next session, for peers that send values without weight.
    fraction: the fraction of its mass that a peer sends, see `share_rule`.

    gossipers: those of the peers that are online, by index.
    bytes: the bytes of the values sent so far, by model.
    """

    def __init__(
        self,
        names: Sequence[str],
        stores: Sequence[Store],
        weights: Sequence[int],
        wire: Wire,
        *,
        modes: Sequence[ServerMode | RoundsMode] = (),
        steady: Callable[[int], SteadyMode] | None = None,
        fraction: float | None = None,
    ) -> None:
        self._steady = steady
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
        self._scheduled = 0  # calls so far; the last tie-breaker in the queue

    @property
    def sent(self) -> int:
        """The bytes of all values sent so far."""
        return self.bytes.total()

    def traffic(self, model: str) -> Traffic:
        """Return what compression and skipped pushes saved and distorted in one model, over all sessions."""
        current = (state.links.traffic.get(model, Traffic()) for state in self._links.values())
        return sum(current, self._ended_traffic.get(model, Traffic()))

    def traffic_by_model(self) -> list[tuple[str, int, Traffic]]:
        """Return, for each model that was sent or skipped, its name, the bytes sent, and its statistics."""
        seen = {model for state in self._links.values() for model in state.links.traffic}
        return [
            (model, self.bytes[model], self.traffic(model))
            for model in sorted(seen | self._ended_traffic.keys() | self.bytes.keys())
        ]

    def units(self, index: int, model: str) -> int:
        """Return the weight that a peer holds, in units of which a peer starts with `ONE`; 0 if offline."""
        return self.gossipers[index].weight(model) if index in self.gossipers else 0

    def begin(self, index: int, seed: int, *, founder: bool) -> None:
        """Begin a session. A founder adds its weight at once, a newcomer after its first transfer arrived."""
        self._sessions[index] += 1
        name, state = self._names[index], LinkState(self._wire)
        mode = self._modes[index] if self._modes else None
        self.gossipers[index] = gossiper = Gossiper(
            name, f"{name}/{self._sessions[index]}", self.stores[index],
            mode=mode if self._steady is None else self._steady(index),
            seed=seed, lossy=self._wire.lossy, links=state.links,
        )  # fmt: skip
        self._links[index] = state
        for model in gossiper.models:
            gossiper.inject(model, self._weights[index], after_first_transfer=not founder)
        if self._steady is not None:
            gossiper.tick(self.now)  # the mode records the values before the first training

    def end(self, index: int) -> None:
        """End a session without notice; neighbours settle their open transfers to this peer later."""
        del self.gossipers[index]
        for model, traffic in self._links.pop(index).links.traffic.items():
            self._ended_traffic[model] += traffic

    def introduce(self, first: int, second: int) -> None:
        """Announce two gossipers to each other."""
        for receiver, announced in ((first, second), (second, first)):
            gossiper = self.gossipers[announced]
            self.gossipers[receiver].peer_online(
                gossiper.peer, gossiper.session, gossiper.models, weight=self._weights[announced]
            )

    def push(self, model: str, index: int, outcomes: Mapping[int, Outcome], now: float) -> bool:
        """Let a peer push a share to each of its receivers; False if its value is not finite.

        The push is skipped if the weight is too small to be split or the value has hardly changed. With
        `steady`, a peer sends its value without weight, and nothing while it is a newcomer that waits for
        the values of others.
        """
        gossiper, receivers = self.gossipers[index], len(outcomes)
        names = sorted(self._names[other] for other in outcomes)
        if self._steady is not None:
            if not gossiper.injected(model):
                return True
            is_sent = gossiper.send_values(model, names, now)
        else:
            weight = gossiper.weight(model)
            share: int = self._share(weight, receivers)
            if min(share, weight - share * receivers) < MIN_WEIGHT:
                return True
            if self._links[index].skips(gossiper, model, receivers):
                return True
            is_sent = gossiper.push(model, dict.fromkeys(names, share), now)
        if is_sent:
            self._transmit(index, outcomes)
        return bool(is_sent)

    def _transmit(self, index: int, outcomes: Mapping[int, Outcome]) -> int:
        """Schedule the outcomes of the transfers that a gossiper sends; return their number."""
        messages = self.gossipers[index].poll()
        for give in messages:
            assert isinstance(give, Give)
            self.bytes[give.model] += self._links[index].count_sent(give)
            receiver = self._indices[give.receiver]
            arrives, closes, acknowledged = outcomes[receiver]
            if arrives < math.inf:
                answered = closes if acknowledged else None
                self._schedule(
                    arrives, CREDIT, receiver, index, partial(self._credit, give, answered)
                )
            if not acknowledged:
                self._schedule(closes, SETTLE, index, receiver, partial(self._settle, give))
        return len(messages)

    def _credit(self, give: Give, answered: float | None, now: float) -> None:
        """Credit a transfer; its acknowledgement reaches the sender at the time `answered`, or never."""
        receiver = self.gossipers[self._indices[give.receiver]]
        receiver.handle(give, now)
        for answer in receiver.poll():
            if answered is not None:
                ends = self._indices[answer.receiver], self._indices[answer.sender]
                self._schedule(answered, SETTLE, *ends, partial(self._deliver_answer, answer))

    def _deliver_answer(self, answer: Message, now: float) -> None:
        """Give an answer to the sender of the transfer, if it is still online."""
        if (sender := self.gossipers.get(self._indices[answer.receiver])) is not None:
            sender.handle(answer, now)

    def _settle(self, give: Give, now: float) -> None:
        """Let a sender that received no answer in time ask the receiver whether the transfer was credited."""
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

    def _schedule(
        self, time: float, kind: int, index: int, other: int, call: Callable[[float], object]
    ) -> None:
        """Schedule a call; events at the same time are ordered by kind, then by the peers' indices."""
        self._scheduled += 1
        heapq.heappush(self._queue, (time, kind, index, other, self._scheduled, call))

    def _run_until(self, end: float) -> None:
        """Process the scheduled events before `end`, in order."""
        while self._queue and self._queue[0][0] < end:
            time, *_, call = heapq.heappop(self._queue)
            call(time)


# --- virtual time -----------------------------------------------------------------------------------


class VirtualTime(EventSimulator):
    """Gossipers that follow the timetables of a world: when peers train, push, leave and return.

    graph: which peers may push to which.
    members: for each model the peers that average it. The random choices of different models are independent;
        they depend on a model's position here.
    stores, weights, fraction: see `EventSimulator`.
    fanout: the number of neighbours that receive a share in one push.
    steady: see `EventSimulator`.
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
        steady: Callable[[int], SteadyMode] | None = None,
        wire: Wire | None = None,
        on_trained: Callable[[int, float], None] = lambda peer, time: None,
        on_arrival: Callable[[int, float], None] = lambda peer, time: None,
    ):
        names = [str(peer) for peer in range(world.peers)]
        super().__init__(names, stores, weights, wire or Wire(), steady=steady, fraction=fraction)
        self.world, self._graph = world, graph
        self._on_trained, self._on_arrival = on_trained, on_arrival
        self._timetables = {
            model: Timetable(
                world,
                nx.subgraph(graph, peers),
                fanout=fanout,
                lane=lane,
                in_turn=steady is not None,
            )
            for lane, (model, peers) in enumerate(members.items())
        }
        self._clock = Clock(world, np.arange(world.peers))
        for peer in np.flatnonzero(world.present_at(0.0)).tolist():
            self._begin_session(peer, founder=True)

    def run(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let virtual time pass; events are planned one push interval ahead.

        stop: called after every push interval; if it returns True, time stops there.
        """
        end = self.now + seconds
        while self.now < end:
            until = min(self.now + self.world.conditions.push_interval, end)
            self._schedule_until(until)
            self._run_until(until)
            self.now = until
            if until < end and stop():
                return

    def _schedule_until(self, end: float) -> None:
        """Schedule all events before `end`, except for those of transfers, which their pushes schedule."""
        for _, peers, times, _ in self._clock.until(end):
            for time, peer in zip(times.tolist(), peers.tolist(), strict=True):
                self._schedule(time, TRAIN, peer, 0, partial(self._trained, peer))
        for peer, time, arrives in zip(*self.world.changes(self.now, end), strict=True):
            change = self._return if arrives else self._leave
            self._schedule(float(time), CHANGE, int(peer), int(arrives), partial(change, int(peer)))
        for lane, (model, timetable) in enumerate(self._timetables.items()):
            plan = timetable.until(end)
            outcomes: list[dict[int, Outcome]] = [{} for _ in plan.peer]
            transfers = plan.transfers
            columns = (
                transfers.push, transfers.receiver, transfers.arrives, transfers.closes,
                transfers.acknowledged,
            )  # fmt: skip
            for push, receiver, *outcome in zip(*(c.tolist() for c in columns), strict=True):
                outcomes[push][receiver] = Outcome(*outcome)
            pushes = zip(plan.time.tolist(), plan.peer.tolist(), outcomes, strict=True)
            for time, peer, push_outcomes in pushes:
                self._schedule(
                    time, PUSH, peer, lane, partial(self.push, model, peer, push_outcomes)
                )

    def _trained(self, peer: int, now: float) -> None:
        self._on_trained(peer, now)
        if self._steady is not None and peer in self.gossipers:
            mode = self.gossipers[peer].mode
            assert isinstance(mode, SteadyMode)
            mode.end_round(self.gossipers[peer])

    def _begin_session(self, peer: int, *, founder: bool) -> None:
        """Begin a session of a peer, and introduce it to its neighbours that are online."""
        keys = np.array([peer]), np.array([self._sessions[peer] + 1])
        self.begin(peer, int(self.world.draws.hashes("gossiper", *keys)[0]), founder=founder)
        for other in set(nx.all_neighbors(self._graph, peer)):
            if other in self.gossipers and other != peer:
                self.introduce(peer, other)

    def _return(self, peer: int, now: float) -> None:
        """Let a peer come back with a new session."""
        self._begin_session(peer, founder=False)
        self._on_arrival(peer, now)

    def _leave(self, peer: int, now: float) -> None:
        """Let a peer leave without notice."""
        self.end(peer)
        for other in set(nx.all_neighbors(self._graph, peer)):
            if other in self.gossipers:
                self.gossipers[other].peer_offline(self._names[peer])


# --- lockstep ---------------------------------------------------------------------------------------


class Lockstep(EventSimulator):
    """Gossipers that all exchange at the same time; the weights of all peers count from the start.

    weights: each peer's weight in averages; by default a peer has 1.
    servers: for each model the index of the peer that averages it, for `serve`.
    robust: how a server, or every peer on a graph, combines values.
    steady, graph: the peers' modes and links, for `exchange_values`.
    """

    def __init__(
        self,
        names: Sequence[str],
        stores: Sequence[Store],
        weights: Sequence[float],
        wire: Wire,
        *,
        servers: Mapping[str, int] | None = None,
        robust: Robust | None = None,
        steady: Callable[[int], SteadyMode] | None = None,
        graph: nx.Graph | None = None,
    ) -> None:
        modes: list[ServerMode | RoundsMode] = []
        if robust is not None and robust.graph is not None:
            modes = [
                RoundsMode(robust.exchanges, robust=RobustMean(robust.rule, robust.hostile))
                for _ in names
            ]
        if servers is not None:
            server_names = {model: names[server] for model, server in servers.items()}
            # A model without a server has only one peer, which then is its own server.
            for name, store in zip(names, stores, strict=True):
                server_of = {model: server_names.get(model, name) for model in store.names()}
                mean = None if robust is None else RobustMean(robust.rule, robust.hostile)
                modes.append(ServerMode(name, server_of, robust=mean))
        units = [round(ONE * weight) for weight in weights]
        super().__init__(names, stores, units, wire, modes=modes, steady=steady)
        self._introduced: set[tuple[int, int]] = set()
        self._round = 0
        for index in range(len(names)):
            self.begin(index, index, founder=True)
        for model, server in (servers or {}).items():
            for index, gossiper in self.gossipers.items():
                if index != server and model in gossiper.models:
                    self._introduce_once(index, server)
        for first, second in () if graph is None else graph.edges:
            self._introduce_once(first, second)

    def weight(self, index: int, model: str) -> float:
        """Return the weight that a peer holds; a peer of weight 1 starts with 1."""
        return self.units(index, model) / ONE

    def exchange(self, model: str, targets: Mapping[int, Sequence[int]]) -> None:
        """Let all peers push at the same time, in equal parts to targets and themselves; then credit all."""
        outcome = self._immediate_outcome()
        for index, others in targets.items():
            for other in others:
                self._introduce_once(index, other)
            if others:
                outcomes = dict.fromkeys(others, outcome)
                self._schedule(
                    self.now, PUSH, index, 0, partial(self._push_or_raise, model, index, outcomes)
                )
        self._run_all_events()

    def serve(self) -> None:
        """Average every model once through its server."""
        self._raise_if_any_not_finite()
        for index, gossiper in self.gossipers.items():
            self._modes[index].begin_round(gossiper, self._round)
        sent = 1
        while sent:
            outcomes = dict.fromkeys(self.gossipers, self._immediate_outcome())
            for gossiper in self.gossipers.values():
                gossiper.tick(self.now)
            sent = sum(self._transmit(index, outcomes) for index in self.gossipers)
            self._run_all_events()
        self._round += 1

    def exchange_values(self) -> None:
        """Let all peers send values to some neighbours at once, then step towards those received."""
        outcomes = dict.fromkeys(self.gossipers, self._immediate_outcome())
        self._raise_if_any_not_finite()
        for gossiper in self.gossipers.values():
            assert isinstance(gossiper.mode, SteadyMode)
            gossiper.mode.request()
            gossiper.tick(self.now)
        for index in self.gossipers:
            self._transmit(index, outcomes)
        self._run_all_events()

    def _immediate_outcome(self) -> Outcome:
        """Return the outcome of all transfers: they arrive after one `MOMENT`, and answers after two."""
        return Outcome(self.now + MOMENT, self.now + 2 * MOMENT, True)

    def _run_all_events(self) -> None:
        """Process all events that are scheduled, and let their time pass."""
        self._run_until(math.inf)
        self.now += 3 * MOMENT

    def _push_or_raise(
        self, model: str, index: int, outcomes: Mapping[int, Outcome], now: float
    ) -> None:
        """Let a peer push; raise ModelError if its value is not finite."""
        if not self.push(model, index, outcomes, now):
            self._raise_if_not_finite(index, model)

    def _introduce_once(self, first: int, second: int) -> None:
        """Announce two gossipers to each other, if that was not done before."""
        if (first, second) not in self._introduced:
            self._introduced |= {(first, second), (second, first)}
            self.introduce(first, second)

    def _raise_if_any_not_finite(self) -> None:
        """Raise ModelError, naming peer and model, if a value of any peer is NaN or infinite."""
        for index, gossiper in self.gossipers.items():
            for model in gossiper.models:
                self._raise_if_not_finite(index, model)

    def _raise_if_not_finite(self, index: int, model: str) -> None:
        """Raise ModelError if a peer's value is NaN or infinite; live peers would skip such a push."""
        if not is_finite(self.stores[index].read(model)):
            raise ModelError(
                f"peer {self._names[index]!r}, model {model!r}: values are not finite; lower the learning "
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
        members = {m: peers for m, peers in networks_by_model(networks).items() if len(peers) > 1}
        self._members, self._mixing = members, _require_messages(mixing)
        self._exchanges = 0
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
        robust = mixing if isinstance(mixing, Robust) else None
        has_server = isinstance(mixing, Server) or (robust is not None and robust.graph is None)
        self.lockstep = Lockstep(
            [network.peer for network in networks],
            all_stores,
            check_weights(networks, weights),
            self._wire,
            servers=servers if has_server else None,
            robust=robust,
            steady=partial(_steady_mode, learners, mixing) if isinstance(mixing, Steady) else None,
            graph=mixing.graph if isinstance(mixing, Steady | Robust) else None,
        )
        self._cached_targets: dict[tuple[str, int], Mapping[int, Sequence[int]]] = {}
        for index, learner in enumerate(learners):
            if isinstance(learner, WeightAware):
                learner.weight_of = partial(self.lockstep.weight, index)

    def average(self) -> None:
        """Average every partial model once."""
        if isinstance(self._mixing, Steady):
            self.lockstep.exchange_values()
            return
        if not isinstance(self._mixing, Gossip):
            self.lockstep.serve()
            return
        for _ in range(self._mixing.exchanges):
            for model in self._members:
                self.lockstep.exchange(model, self._targets(self._mixing, model))
            self._exchanges += 1

    def needs(self) -> MemoryNeeds:
        """Return the memory for the references that both ends of every compressed link keep."""
        total = 0
        for model, peers in self._members.items() if self._wire.compress is not None else ():
            links = 2 * len(peers)
            if isinstance(self._mixing, Gossip):
                schedule = self._mixing.schedule
                union = schedule.union(0, schedule.period or MAX_STEPS).subgraph(peers)
                links = union.number_of_edges() * (1 if union.is_directed() else 2)
            # An upper bound: both ends of a link share the arrays that are equal.
            total += min(
                len(peers) * MAX_REFERENCE_BYTES, SENT_KEPT * links * 4 * self._sizes[model]
            )
        return MemoryNeeds((MemoryItem("references of compressed links", total),))

    def _targets(self, mixing: Gossip, model: str) -> Mapping[int, Sequence[int]]:
        """Return to which peers each peer pushes in the next exchange."""
        schedule = mixing.schedule
        step = self._exchanges % schedule.period if schedule.period else self._exchanges
        if (model, step) in self._cached_targets:
            return self._cached_targets[model, step]
        graph = schedule.graph(step).subgraph(self._members[model])
        targets = {peer: list(graph.neighbors(peer)) for peer in sorted(graph)}
        if schedule.period:
            self._cached_targets[model, step] = targets
        return targets


def score_of(learner: Learner, model: str, value: Array | None) -> float:
    """Return the loss of a learner's own samples, with another value of a partial model if one is given.

    NaN if the learner is no Scorer.
    """
    if not isinstance(learner, Scorer):
        return math.nan
    return learner.score({} if value is None else {model: value})


def _steady_mode(learners: Sequence[Learner], mixing: Steady, index: int) -> SteadyMode:
    score = partial(score_of, learners[index])
    return SteadyMode(mixing.fanout, hostile=mixing.hostile, score=score)


def _require_messages(mixing: Mixing) -> Gossip | Server | Steady | Robust:
    """Return the mixing if its peers send messages as live peers do; otherwise raise ModelError."""
    if isinstance(mixing, Server | Steady | Robust):
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
