"""Studies of security, in one process and virtual time, with the gossip core of live peers.

`gossamer study private`: what masks hide from a curious neighbour, and what they cost. Peers with random
values average over a random graph, once without and once with masks. One neighbour of a peer is curious: it
follows the protocol, and then computes the linear combination of all received messages that best estimates
its neighbour's value. Every coordinate of the vectors is one trial: the combination is fitted on one half of
the coordinates and evaluated on the other half.

`gossamer study byzantine`: what three hostile peers of sixteen can do, with and without guards. Hostile peers
keep correct ledgers, but send other values than they hold.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import networkx as nx
import numpy as np

from ...gossip import (
    ONE,
    DictStore,
    Give,
    Gossiper,
    MaskPlan,
    MemoryNetwork,
    Message,
    PacedMode,
    RoundsMode,
    enter_round,
    introduce,
    mask,
    run,
)
from ...gossip.security import Guards, GuardSettings, guard
from ...peer import NetworkStore
from ..build import Member, Swarm
from ..config.tables import Config, Data, Model, Network, Training
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import StudyEntry

Array = np.ndarray[Any, Any]
VECTOR = "v"


def digits_swarm(peers: int, seed: int = 0) -> list[Member]:
    """Peers with 50 of the built-in digits each; all parameters are shared, so attacks affect all of them."""
    config = Config(
        seed=seed, peers=peers,
        data=Data(set="digits", samples=50),
        network=Network(layout="64=30=10", activation="sigmoid", output="sigmoid"),
        models=[Model(name="global", layout="64-30-10")],
        training=Training(local_samples=80, batch=10, rate=0.3, loss="squared", reduction="sum"),
    )  # fmt: skip
    return Swarm(config).members()


def gossiper_of(
    name: str, store: DictStore | NetworkStore, mode: RoundsMode | PacedMode, seed: int = 1
) -> Gossiper:
    """A peer's gossiper; all peers have the same weight."""
    gossiper = Gossiper(name, f"s-{name}", store, mode=mode, seed=seed)
    for model in gossiper.models:
        gossiper.inject(model, ONE)
    return gossiper


# --- private averaging ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObservationRun(StudyCell):
    """One run: a curious neighbour observes one averaging.

    scale: of the masks; None for no masks. peers: so many that the average reveals little about each.
    """

    scale: float | None
    peers: int = 128
    degree: int = 6
    trials: int = 12_000
    exchanges: int = 90
    seed: int = 0


@dataclass(frozen=True)
class LearningRun(StudyCell):
    """One run: twelve peers on a ring of degree 4 learn the digits; a round has `exchanges` exchanges."""

    scale: float | None
    exchanges: int
    rounds: int = 20


class ObservedNetwork(MemoryNetwork[Message]):
    """A network that records the messages to the curious peer, and the distance of values from the average.

    spread: for each number of exchanges, the largest distance of a value from the average.
    """

    def __init__(self, curious: str, mean: Array):
        super().__init__(0)
        self.seen: list[Give] = []
        self.spread: dict[int, float] = {}
        self._curious, self._mean = curious, mean
        self._previous: Array | None = None

    def send(self, message: Message, now: float) -> None:
        """Record the message, then send it."""
        if isinstance(message, Give) and message.tag is not None:
            if message.receiver == self._curious:
                self.seen.append(message)
            if message.value is not self._previous:  # the same value is sent to all neighbours
                self._previous = message.value
                distance = float(np.abs(message.value - self._mean).max())
                exchange = message.tag[1]
                self.spread[exchange] = max(distance, self.spread.get(exchange, 0.0))
        super().send(message, now)


def secret(a: str, b: str) -> bytes:
    """The shared secret of two simulated peers; live peers agree on one by a key exchange."""
    return hashlib.sha256("\0".join(sorted((a, b))).encode()).digest()


def average(
    gossipers: Mapping[str, Gossiper],
    network: MemoryNetwork[Message],
    scale: float | None,
    round: int = 0,
    start: float = 0.0,
) -> float:
    """Average once, with masks unless `scale` is None; return the time at which all peers have finished."""
    modes: list[RoundsMode] = []
    for name, gossiper in gossipers.items():
        if scale is not None:
            plans = dict.fromkeys(gossiper.models, MaskPlan(scale))
            enter_round(gossiper, round, partial(secret, name), plans)
        assert isinstance(gossiper.mode, RoundsMode)
        gossiper.mode.begin_round(gossiper, round)
        modes.append(gossiper.mode)
    return run(
        gossipers, network,
        start=start, seconds=1000.0, until=lambda: all(mode.finished(round) for mode in modes),
    )  # fmt: skip


def correlation(features: list[Array], target: Array) -> float:
    """Correlation of a target with its best linear estimate, fitted on even, evaluated on odd coordinates."""
    table = np.stack([*features, np.ones_like(target)], axis=1).astype(np.float64)
    table[:, :-1] /= table[:, :-1].std(axis=0) + 1e-300
    even, odd = slice(0, None, 2), slice(1, None, 2)
    weights = np.linalg.lstsq(table[even], target[even], rcond=1e-13)[0]
    estimate = table[odd] @ weights
    if estimate.std() < 1e-12:
        return 0.0
    return abs(float(np.corrcoef(estimate, target[odd])[0, 1]))


def watch_neighbour(watch: ObservationRun) -> Record:
    """Return how well a curious neighbour can estimate a peer's value, and how fast the average converges.

    first: correlation of the best estimate from the peer's first message with the true value.
    everything: the same for all messages that the neighbour received, and its own value and masks.
    exchanges: the number of exchanges until all values were within 1e-6 of the average.
    error: the largest distance of a final value from the average.
    """
    rng = np.random.default_rng(watch.seed)
    numbers = nx.random_regular_graph(watch.degree, watch.peers, seed=watch.seed)
    graph = nx.relabel_nodes(numbers, {i: f"p{i}" for i in numbers})
    values = {name: rng.standard_normal(watch.trials) for name in sorted(graph)}
    target = sorted(graph)[0]
    curious = sorted(graph[target])[0]
    stores = {name: DictStore({VECTOR: value}) for name, value in values.items()}
    gossipers = {
        name: gossiper_of(name, store, RoundsMode(watch.exchanges))
        for name, store in stores.items()
    }
    introduce(gossipers.values(), {pair for a, b in graph.edges for pair in ((a, b), (b, a))})
    mean = np.mean(list(values.values()), axis=0)
    network = ObservedNetwork(curious, mean)
    average(gossipers, network, watch.scale)
    own = [values[curious]]
    if watch.scale is not None:
        own += [
            mask(secret(curious, other), VECTOR, 0, 0, watch.trials, watch.scale)
            for other in sorted(graph[curious])
        ]
    first = next(give.value for give in network.seen if give.sender == target)
    converged = (n for n, distance in sorted(network.spread.items()) if distance <= 1e-6)
    return {
        "first": correlation([first, *own], values[target]),
        "everything": correlation([*(give.value for give in network.seen), *own], values[target]),
        "exchanges": next(converged, None),
        "error": max(float(np.abs(store.read(VECTOR) - mean).max()) for store in stores.values()),
    }


def learn(cell: LearningRun) -> Record:
    """Train peers that average in rounds; return their mean accuracy."""
    members = digits_swarm(12)
    gossipers = {
        member.name: gossiper_of(
            member.name, NetworkStore(member.network), RoundsMode(cell.exchanges)
        )
        for member in members
    }
    ring = nx.circulant_graph(len(members), (1, 2)).to_directed()
    nx.relabel_nodes(ring, dict(enumerate(gossipers)), copy=False)
    introduce(gossipers.values(), set(ring.edges))
    network: MemoryNetwork[Message] = MemoryNetwork(0)
    now = 0.0
    for round in range(cell.rounds):
        for member in members:
            member.learner.train(1)
        now = average(gossipers, network, cell.scale, round, now)
    accuracy = float(np.mean([member.learner.test().accuracy for member in members]))
    return {"exchanges": cell.exchanges, "accuracy": accuracy}


def run_private(cell: ObservationRun | LearningRun, job: Job) -> Record:
    """Run one cell of either class."""
    result = watch_neighbour(cell) if isinstance(cell, ObservationRun) else learn(cell)
    return {"protocol": cell.line, **result}


def private(entry: StudyEntry, quick: bool, seeds: range) -> Study[ObservationRun | LearningRun]:
    """Return the study: what a curious neighbour learns with and without masks, and the accuracy of both."""
    sizes = {"peers": 32, "trials": 4000, "exchanges": 60} if quick else {}
    plain, masked = ObservationRun("plain", None, **sizes), ObservationRun("private", 64.0, **sizes)
    rounds = 5 if quick else 20
    learned = [
        LearningRun("plain" if scale is None else "private", scale, exchanges, rounds)
        for scale, exchanges in ((None, 6), (16.0, 6), (16.0, 20))
    ]
    return Study(
        entry.name, [plain, masked, *learned], EachCell(run_private), private_tables,
        titles={
            "summary": f"private averaging: {plain.peers} peers of degree {plain.degree}, masks up to "
            f"{masked.scale:g} standard deviations",
            "accuracy": f"digits, 12 peers on a ring of degree 4, {rounds} rounds",
        },
        latest=lambda record: record["protocol"],
        note="Columns 2 and 3: correlation of a curious neighbour's linear estimate with the true value. The "
        "average itself, which all peers are meant to learn, gives "
        f"{1 / np.sqrt(plain.peers - 1):.3f}; a best estimate from everything is at least that, but one "
        "fitted to many messages has noise and may fall below.",
    )  # fmt: skip


def private_tables(records: Sequence[Record]) -> dict[str, Frame]:
    """Return tables of the neighbours' estimates and of the accuracies; tables without runs are left out."""
    names = {
        "first": "first message", "everything": "everything seen", "exchanges": "exchanges to 1e-6",
        "error": "error of the mean",
    }  # fmt: skip
    formats = {"first": ".3f", "everything": ".3f", "exchanges": ".0f", "error": ".1e"}
    tables = {}
    if watched := [r for r in records if "first" in r]:
        frame = as_text(frame_of(watched)[["protocol", *names]], formats)
        tables["summary"] = frame.rename(columns=names)
    if learned := [r for r in records if "accuracy" in r]:
        frame = as_text(
            frame_of(learned)[["protocol", "exchanges", "accuracy"]], {"accuracy": ".3f"}
        )
        tables["accuracy"] = frame.rename(columns={"protocol": "averaging"})
    return tables


# --- hostile peers ----------------------------------------------------------------------------------

Attack = Callable[[Array, np.random.Generator], Array]

ATTACKS: dict[str, Attack] = {
    "NaN": lambda value, _: np.full_like(value, np.nan),
    "1e30": lambda value, _: np.full_like(value, 1e30),
    "random": lambda value, rng: rng.normal(0, value.std(), value.size).astype(value.dtype),
    "sign flipped": lambda value, _: -value,
    "half of it": lambda value, _: value / 2,
    "a tenth less": lambda value, _: 0.9 * value,
}
"""The value that a hostile peer sends instead of its own. The last one stays within the guards' bounds."""
CLEAN = "clean"
"""The run without attack; its accuracy is that of the same honest peers as in the other runs."""
TOLERANCE = 0.02
"""The claim: with guards, honest peers lose at most this much accuracy against the run without attack."""


@dataclass(frozen=True)
class AttackRun(StudyCell):
    """One run with or without guards; `line` is the name of the attack."""

    guarded: bool
    peers: int = 16
    hostile: int = 3
    rounds: int = 40
    seed: int = 0


class HostileNetwork(MemoryNetwork[Message]):
    """A network that replaces the values in transfers from hostile senders."""

    def __init__(self, hostile: Collection[str], attack: Attack | None, seed: int):
        super().__init__(seed)
        self._hostile, self._attack = hostile, attack
        self._noise = np.random.default_rng(seed + 1)

    def send(self, message: Message, now: float) -> None:
        """Replace the value if the sender is hostile, then send the message."""
        if isinstance(message, Give) and message.sender in self._hostile and self._attack:
            message = replace(message, value=self._attack(message.value, self._noise))
        super().send(message, now)


def run_attacked(cell: AttackRun, job: Job) -> Record:
    """Train and gossip; return the honest peers' mean accuracy, and the quarantines in force at the end.

    quarantined: honest peers' quarantines of hostile peers, counted as pairs; wronged: of honest peers.
    """
    members = digits_swarm(cell.peers, cell.seed)
    step = cell.peers // cell.hostile
    hostile = {member.name for member in members[::step][: cell.hostile]}
    modes = {member.name: PacedMode(2) for member in members}
    gossipers = {
        member.name: gossiper_of(
            member.name, NetworkStore(member.network), modes[member.name], number
        )
        for number, member in enumerate(members)
    }
    introduce(gossipers.values())
    now = 0.0
    honest = [member for member in members if member.name not in hostile]
    guards = {member.name: Guards(GuardSettings()) for member in honest if cell.guarded}
    for name, each in guards.items():
        guard(gossipers[name], each, lambda: now)
    network = HostileNetwork(hostile, ATTACKS.get(cell.line), cell.seed)
    log = logging.getLogger("gossamer.gossip.security.guards")
    level = log.level
    log.setLevel(logging.ERROR)  # no warnings about hundreds of expected quarantines
    try:
        for _ in range(cell.rounds):
            for member in members:
                member.learner.train(1)
                modes[member.name].request()
            now = run(gossipers, network, start=now, seconds=0.1)
        # Long enough for the messages in transit to arrive.
        now = run(gossipers, network, start=now, seconds=2.0)
    finally:
        log.setLevel(level)
    accuracy = float(np.mean([member.learner.test().accuracy for member in honest]))
    quarantined = [other for each in guards.values() for other in each.quarantined(now)]
    return {
        "attack": cell.line, "guarded": cell.guarded, "accuracy": accuracy,
        "quarantined": sum(other in hostile for other in quarantined),
        "wronged": sum(other not in hostile for other in quarantined),
    }  # fmt: skip


def byzantine(entry: StudyEntry, quick: bool, seeds: range) -> Study[AttackRun]:
    """Return the study: every attack, without and with guards."""
    clean = AttackRun(CLEAN, True, rounds=12 if quick else 40)
    attacked = [
        replace(clean, line=attack, guarded=guarded)
        for attack in ATTACKS
        for guarded in (False, True)
    ]
    return Study(
        entry.name, [clean, *attacked], EachCell(run_attacked), byzantine_table,
        titles={
            "summary": f"{clean.hostile} of {clean.peers} peers hostile, digits, {clean.rounds} rounds:"
            " accuracy of the honest peers"
        },
        latest=lambda record: f"{record['attack']}: {record['accuracy']:.3f}",
        always_run={CLEAN},
    )  # fmt: skip


def byzantine_table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return a row for every attack: accuracies, whether guards suffice, and quarantined honest peers."""
    frame = frame_of(records, ordered=["attack"])
    clean = frame.loc[frame["attack"] == CLEAN, "accuracy"].max()
    runs = frame[frame["attack"] != CLEAN]
    summary = runs.pivot_table(["accuracy", "wronged"], "attack", "guarded", observed=True)
    summary = summary.reindex(columns=[("accuracy", False), ("accuracy", True), ("wronged", True)])
    summary.columns = ["no guards", "guards", "honest quarantined"]
    summary.insert(0, "attack sends", summary.index)
    summary.insert(1, "no attack", clean)
    within = ["yes" if accuracy >= clean - TOLERANCE else "NO" for accuracy in summary["guards"]]
    summary.insert(4, f"within {TOLERANCE:g}", within)
    formats = dict.fromkeys(("no attack", "no guards", "guards"), ".3f")
    return {"summary": as_text(summary, {**formats, "honest quarantined": ".0f"})}
