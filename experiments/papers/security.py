"""Studies of security, in one process and virtual time, with the gossip core of live peers.

`gossamer study private`: what masks hide from a curious neighbour, and what they cost. Peers with random
values average over a random graph, once without and once with masks. One neighbour of a peer is curious: it
follows the protocol, and then computes the linear combination of all received messages that best estimates
its neighbour's value. Every coordinate of the vectors is one trial: the combination is fitted on one half of
the coordinates and evaluated on the other half.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from ...peer import NetworkStore
from ..build import Member, Swarm
from ..config.tables import Config, Data, Model, Network, Training
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import StudyEntry

Array = np.ndarray[Any, Any]
VECTOR = "v"


def digits_swarm(peers: int, seed: int = 0) -> list[Member]:
    """Return peers with 50 of the built-in digits each; all parameters are shared."""
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
    """Return a peer's gossiper; all peers have the same weight."""
    gossiper = Gossiper(name, f"s-{name}", store, mode=mode, seed=seed)
    for model in gossiper.models:
        gossiper.inject(model, ONE)
    return gossiper


# --- private averaging ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObservationRun(StudyCell):
    """One run: a curious neighbour observes one averaging.

    scale: the size of masks, in standard deviations of the values; None for no masks.
    peers: so many that the average reveals little about each of them.
    trials: coordinates of the averaged vector.
    """

    scale: float | None
    peers: int = 128
    degree: int = 6
    trials: int = 12_000
    exchanges: int = 90
    seed: int = 0


@dataclass(frozen=True)
class LearningRun(StudyCell):
    """One run: twelve peers on a ring of degree 4 learn the digits; a round has `exchanges` exchanges.

    scale: as in ObservationRun.
    """

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


def shared_secret(a: str, b: str) -> bytes:
    """Return the shared secret of two simulated peers; live peers agree on one by a key exchange."""
    return hashlib.sha256("\0".join(sorted((a, b))).encode()).digest()


def average_once(
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
            enter_round(gossiper, round, partial(shared_secret, name), plans)
        assert isinstance(gossiper.mode, RoundsMode)
        gossiper.mode.begin_round(gossiper, round)
        modes.append(gossiper.mode)
    return run(
        gossipers, network,
        start=start, seconds=1000.0, until=lambda: all(mode.finished(round) for mode in modes),
    )  # fmt: skip


def estimate_correlation(features: list[Array], target: Array) -> float:
    """Return how well the best linear estimate of a target correlates with it.

    The estimate is fitted on even coordinates and evaluated on odd ones.
    """
    design = np.stack([*features, np.ones_like(target)], axis=1).astype(np.float64)
    design[:, :-1] /= design[:, :-1].std(axis=0) + 1e-300
    even, odd = slice(0, None, 2), slice(1, None, 2)
    weights = np.linalg.lstsq(design[even], target[even], rcond=1e-13)[0]
    estimate = design[odd] @ weights
    if estimate.std() < 1e-12:
        return 0.0
    return abs(float(np.corrcoef(estimate, target[odd])[0, 1]))


def watch_neighbour(cell: ObservationRun) -> Record:
    """Return how well a curious neighbour can estimate a peer's value, and how fast the average converges.

    first: correlation of the best estimate from the peer's first message with the true value.
    everything: the same for all messages that the neighbour received, and its own value and masks.
    exchanges: the number of exchanges until all values were within 1e-6 of the average.
    error: the largest distance of a final value from the average.
    """
    rng = np.random.default_rng(cell.seed)
    numbers = nx.random_regular_graph(cell.degree, cell.peers, seed=cell.seed)
    graph = nx.relabel_nodes(numbers, {i: f"p{i}" for i in numbers})
    values = {name: rng.standard_normal(cell.trials) for name in sorted(graph)}
    target = sorted(graph)[0]
    curious = sorted(graph[target])[0]
    stores = {name: DictStore({VECTOR: value}) for name, value in values.items()}
    gossipers = {
        name: gossiper_of(name, store, RoundsMode(cell.exchanges)) for name, store in stores.items()
    }
    introduce(gossipers.values(), {pair for a, b in graph.edges for pair in ((a, b), (b, a))})
    mean = np.mean(list(values.values()), axis=0)
    network = ObservedNetwork(curious, mean)
    average_once(gossipers, network, cell.scale)
    # What the curious peer knows besides the messages: its own value, and the masks that it shares.
    own = [values[curious]]
    if cell.scale is not None:
        own += [
            mask(shared_secret(curious, other), VECTOR, 0, cell.trials, cell.scale)
            for other in sorted(graph[curious])
        ]
    first = next(give.value for give in network.seen if give.sender == target)
    close_enough = (n for n, distance in sorted(network.spread.items()) if distance <= 1e-6)
    return {
        "first": estimate_correlation([first, *own], values[target]),
        "everything": estimate_correlation(
            [*(give.value for give in network.seen), *own], values[target]
        ),
        "exchanges": next(close_enough, None),
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
        now = average_once(gossipers, network, cell.scale, round, now)
    accuracy = float(np.mean([member.learner.test().accuracy for member in members]))
    return {"exchanges": cell.exchanges, "accuracy": accuracy}


def run_private(cell: ObservationRun | LearningRun, job: Job) -> Record:
    """Run one cell of either class and return its record."""
    result = watch_neighbour(cell) if isinstance(cell, ObservationRun) else learn(cell)
    return {"protocol": cell.line, **result}


def private(entry: StudyEntry, quick: bool, seeds: range) -> Study[ObservationRun | LearningRun]:
    """Return the study: what a curious neighbour learns with and without masks, and the accuracy of both."""
    sizes = {"peers": 32, "trials": 4000, "exchanges": 60} if quick else {}
    plain, masked = ObservationRun("plain", None, **sizes), ObservationRun("private", 64.0, **sizes)
    rounds = 5 if quick else 20
    learning_runs = [
        LearningRun("plain" if scale is None else "private", scale, exchanges, rounds)
        for scale, exchanges in ((None, 6), (16.0, 6), (16.0, 20))
    ]
    return Study(
        entry.name, [plain, masked, *learning_runs], EachCell(run_private), private_tables,
        titles={
            "summary": f"private averaging: {plain.peers} peers of degree {plain.degree}, masks up to "
            f"{masked.scale:g} standard deviations",
            "accuracy": f"digits, 12 peers on a ring of degree 4, {rounds} rounds",
        },
        latest=lambda record: record["protocol"],
        note="Columns 2 and 3 are correlations of a curious neighbour's linear estimate with the true value. "
        "The average itself, which all peers are meant to learn, has the correlation "
        f"{1 / np.sqrt(plain.peers - 1):.3f}. The best estimate from everything is at least as good, but one "
        "that is fitted to many messages has noise and may be worse.",
    )  # fmt: skip


def private_tables(records: Sequence[Record]) -> dict[str, Frame]:
    """Return tables of the neighbours' estimates and of the accuracies; tables without runs are left out."""
    titles = {
        "first": "first message", "everything": "everything seen", "exchanges": "exchanges to 1e-6",
        "error": "error of the mean",
    }  # fmt: skip
    formats = {"first": ".3f", "everything": ".3f", "exchanges": ".0f", "error": ".1e"}
    tables = {}
    if observations := [r for r in records if "first" in r]:
        frame = as_text(frame_of(observations)[["protocol", *titles]], formats)
        tables["summary"] = frame.rename(columns=titles)
    if learning := [r for r in records if "accuracy" in r]:
        frame = as_text(
            frame_of(learning)[["protocol", "exchanges", "accuracy"]], {"accuracy": ".3f"}
        )
        tables["accuracy"] = frame.rename(columns={"protocol": "averaging"})
    return tables
