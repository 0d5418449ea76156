"""What private averaging hides, and what it costs: `gossamer study private`.

Peers with random values average over a random graph, once plainly and once with masks. One neighbour of a
peer is curious: it does all that the protocol asks, and then looks for the linear combination of
everything it saw that fits its neighbour's value best. Every coordinate of the vectors is one trial: the
combination is fitted on one half of them and judged on the other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    RoundsMode,
    enter_round,
    introduce,
    mask,
    run,
)
from ...peer import NetworkStore
from ..build import Swarm
from ..config.tables import Config, Data, Model, Network, Training
from ..results import Record
from ..study import EachCell, Frame, Job, Study, as_text, frame_of, key_of
from . import Paper

Array = np.ndarray[Any, Any]
VECTOR = "v"


@dataclass(frozen=True)
class Setting:
    """The experiment: enough peers that the average alone tells little of each."""

    peers: int = 128
    degree: int = 6
    trials: int = 12_000
    exchanges: int = 90
    scale: float = 64.0
    seed: int = 0


class Watched(MemoryNetwork[Message]):
    """A network that remembers what the curious peer was sent, and how far apart values were."""

    def __init__(self, curious: str, mean: Array):
        super().__init__(0)
        self.seen: list[Give] = []
        self.spread: dict[int, float] = {}
        self._curious, self._mean = curious, mean
        self._previous: Array | None = None

    def send(self, message: Message, now: float) -> None:
        """Look, and carry on."""
        if isinstance(message, Give) and message.tag is not None:
            if message.receiver == self._curious:
                self.seen.append(message)
            if message.value is not self._previous:  # one value goes to all neighbours
                self._previous = message.value
                far = float(np.abs(message.value - self._mean).max())
                at = message.tag[1]
                self.spread[at] = max(far, self.spread.get(at, 0.0))
        super().send(message, now)


@dataclass(frozen=True)
class Averaged:
    """One averaging: what was seen, and how it went."""

    seen: list[Give]
    spread: dict[int, float]
    """After how many exchanges values were at most how far from the average."""
    error: float
    """The largest distance of a final value from the true average."""

    def exchanges_to(self, tolerance: float) -> int | None:
        """How many exchanges brought everybody this close, if they did."""
        return next((at for at, far in sorted(self.spread.items()) if far <= tolerance), None)


def secret(a: str, b: str) -> bytes:
    """What two peers of the experiment share; live peers have an exchange of keys for this."""
    return hashlib.sha256("\0".join(sorted((a, b))).encode()).digest()


def average(
    values: Mapping[str, Array],
    graph: nx.Graph,
    exchanges: int,
    curious: str,
    plan: MaskPlan | None,
) -> Averaged:
    """Average with the real gossip core, in virtual time, masked if there is a plan."""
    stores = {name: DictStore({VECTOR: value}) for name, value in values.items()}
    gossipers = {}
    for name, store in stores.items():
        gossipers[name] = Gossiper(name, f"s-{name}", store, mode=RoundsMode(exchanges), seed=1)
        gossipers[name].inject(VECTOR, ONE)
    edges = {pair for a, b in graph.edges for pair in ((a, b), (b, a))}
    introduce(gossipers.values(), edges)
    mean = np.mean([value.astype(np.float64) for value in values.values()], axis=0)
    network = Watched(curious, mean)
    modes: list[RoundsMode] = []
    for name, gossiper in gossipers.items():
        if plan is not None:
            enter_round(gossiper, 0, _secrets_of(name), {VECTOR: plan})
        assert isinstance(gossiper.mode, RoundsMode)
        gossiper.mode.begin_round(gossiper, 0)
        modes.append(gossiper.mode)
    run(
        gossipers, network,
        seconds=10.0 * exchanges, until=lambda: all(mode.finished(0) for mode in modes),
    )  # fmt: skip
    finals = [store.read(VECTOR) for store in stores.values()]
    error = max(float(np.abs(final - mean).max()) for final in finals)
    return Averaged(network.seen, network.spread, error)


def _secrets_of(name: str) -> Callable[[str], bytes]:
    return lambda other: secret(name, other)


def correlation(features: list[Array], target: Array) -> float:
    """Of a target and its best linear estimate, fitted on even coordinates and judged on odd ones."""
    table = np.stack([*features, np.ones_like(target)], axis=1).astype(np.float64)
    table[:, :-1] /= table[:, :-1].std(axis=0) + 1e-300
    fit, judge = slice(0, None, 2), slice(1, None, 2)
    weights = np.linalg.lstsq(table[fit], target[fit], rcond=1e-13)[0]
    estimate = table[judge] @ weights
    if estimate.std() < 1e-12:
        return 0.0
    return abs(float(np.corrcoef(estimate, target[judge])[0, 1]))


@dataclass(frozen=True)
class Finding:
    """What one protocol showed the curious neighbour, and what it cost."""

    protocol: str
    first: float
    """Correlation of the best estimate from the peer's first message."""
    everything: float
    """The same from all that the curious neighbour ever saw, knew or computed."""
    exchanges: int | None
    """Exchanges until everybody was within 1e-6 of the average."""
    error: float


def watch_neighbour(setting: Setting, plan: MaskPlan | None) -> Finding:
    """Return what a curious neighbour makes of one protocol; a plan masks values."""
    rng = np.random.default_rng(setting.seed)
    numbers = nx.random_regular_graph(setting.degree, setting.peers, seed=setting.seed)
    graph = nx.relabel_nodes(numbers, {i: f"p{i}" for i in numbers})
    values = {name: rng.standard_normal(setting.trials) for name in sorted(graph)}
    target = sorted(graph)[0]
    curious = sorted(graph[target])[0]
    averaged = average(values, graph, setting.exchanges, curious, plan)
    own = [values[curious]]
    if plan is not None:
        own += [
            mask(secret(curious, other), VECTOR, 0, 0, setting.trials, plan.scale)
            for other in sorted(graph[curious])
        ]
    first = next(give for give in averaged.seen if give.sender == target)
    return Finding(
        "plain" if plan is None else "private",
        correlation([first.value, *own], values[target]),
        correlation([*(give.value for give in averaged.seen), *own], values[target]),
        averaged.exchanges_to(1e-6),
        averaged.error,
    )


def accuracy(exchanges: int, plan: MaskPlan | None, rounds: int = 20, seed: int = 0) -> float:
    """Mean accuracy of twelve peers that learn the digits, averaging in rounds, masked or not."""
    config = Config(
        name="private", seed=seed, peers=12, rounds=rounds,
        data=Data(set="digits", samples=50),
        network=Network(layout="64=30=10", activation="sigmoid", output="sigmoid"),
        models=[Model(name="global", layout="64-30-10")],
        training=Training(local_samples=80, batch=10, rate=0.3, loss="squared", reduction="sum"),
    )  # fmt: skip
    members = Swarm(config).members()
    gossipers: dict[str, Gossiper] = {}
    modes: list[RoundsMode] = []
    for member in members:
        modes.append(RoundsMode(exchanges))
        gossipers[member.name] = Gossiper(
            member.name, f"s-{member.name}", NetworkStore(member.network), mode=modes[-1], seed=1
        )
        for vector in gossipers[member.name].models:
            gossipers[member.name].inject(vector, ONE)
    names = list(gossipers)
    ring = {
        (name, names[(at + step) % len(names)])
        for at, name in enumerate(names)
        for step in (-2, -1, 1, 2)
    }
    introduce(gossipers.values(), ring)
    network: MemoryNetwork[Message] = MemoryNetwork(seed)
    now = 0.0
    for number in range(rounds):
        for member, mode in zip(members, modes, strict=True):
            gossiper = gossipers[member.name]
            member.learner.train(1)
            if plan is not None:
                enter_round(gossiper, number, _secrets_of(member.name), {"global": plan})
            mode.begin_round(gossiper, number)
        over = _finished(modes, number)
        now = run(gossipers, network, start=now, seconds=10.0 * exchanges, until=over)
    return float(np.mean([member.learner.test().accuracy for member in members]))


def _finished(modes: list[RoundsMode], number: int) -> Callable[[], bool]:
    return lambda: all(mode.finished(number) for mode in modes)


# --- the study --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run: what a neighbour of a `setting` sees, or the accuracy after `rounds` of learning.

    scale: of the masks; None averages plainly.
    """

    scale: float | None
    setting: Setting | None = None
    exchanges: int = 0
    rounds: int = 0

    @property
    def line(self) -> str:
        """The protocol."""
        return "plain" if self.scale is None else "private"

    @property
    def key(self) -> str:
        """Names the run by all that decides its result."""
        return key_of(json.dumps(["private", asdict(self)]))


def run_cell(cell: Cell, job: Job) -> Record:
    """Let a neighbour watch, or learn."""
    plan = None if cell.scale is None else MaskPlan(cell.scale)
    if cell.setting is not None:
        return {"protocol": cell.line} | asdict(watch_neighbour(cell.setting, plan))
    learned = accuracy(cell.exchanges, plan, cell.rounds)
    return {"protocol": cell.line, "exchanges": cell.exchanges, "accuracy": learned}


def private(paper: Paper, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study: both protocols before a curious neighbour, and what masks cost in accuracy."""
    setting = Setting(peers=32, trials=4000, exchanges=60) if quick else Setting()
    rounds = 5 if quick else 20
    cells = [Cell(scale, setting) for scale in (None, setting.scale)]
    cells += [
        Cell(scale, None, exchanges, rounds)
        for scale, exchanges in ((None, 6), (16.0, 6), (16.0, 20))
    ]
    return Study(
        paper.name, cells, EachCell(run_cell), table,
        titles={
            "summary": f"private averaging: {setting.peers} peers of degree {setting.degree}, masks up to "
            f"{setting.scale:g} standard deviations",
            "accuracy": f"digits, 12 peers on a ring of degree 4, {rounds} rounds",
        },
        latest=lambda record: record["protocol"],
        note="Columns 2 and 3: correlation of a curious neighbour's linear estimate with the true value. The "
        "average itself, which everybody is meant to learn, gives "
        f"{1 / np.sqrt(setting.peers - 1):.3f}; a best estimate from everything is at least that, but one "
        "fitted to many messages has noise and may fall below.",
    )  # fmt: skip


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return what neighbours saw, and the accuracies; a table without runs is left out."""
    names = {
        "first": "first message", "everything": "everything seen", "exchanges": "exchanges to 1e-6",
        "error": "error of the mean",
    }  # fmt: skip
    seen = [{k: r[k] for k in ("protocol", *names)} for r in records if "first" in r]
    learned = [
        {"averaging": r["protocol"], **{k: r[k] for k in ("exchanges", "accuracy")}}
        for r in records
        if "accuracy" in r
    ]
    formats = {"first": ".3f", "everything": ".3f", "exchanges": ".0f", "error": ".1e"}
    tables = {
        "summary": as_text(frame_of(seen), formats).rename(columns=names),
        "accuracy": as_text(frame_of(learned), {"accuracy": ".3f"}),
    }
    return {name: frame for name, frame in tables.items() if len(frame)}
