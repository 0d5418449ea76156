"""`gossamer topology compare` and `advise`: how fast graphs agree, what they cost, what is learned on them.

`compare` measures the graphs that it is given; `advise` ranks candidates by what is predicted of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ...models import Learner, mlp
from ...topology import Advice, Candidate, Rule, TopologyError, exchanges_to, log_errors
from ..arena import Arena, Gossip
from ..build import Swarm
from ..config.tables import parse_config
from ..study.figures import COLOURS, MARKERS, panels
from .show import number, write_with_picture
from .swarm import SwarmGraph

MOST = 8
"""Graphs that one picture can tell apart."""
EXCHANGES = 20_000
"""Exchanges after which measuring gives up on a slow graph."""
POINTS = 120
"""Points of a curve that are kept."""


@dataclass(frozen=True)
class Entry:
    """One graph's line. Infinite figures mean never; `measured` is None beyond what was measured."""

    name: str
    peers: int
    messages_per_exchange: float
    rate: float
    exact_after: int | None
    predicted: float
    measured: int | None
    measured_rate: float
    curve: list[tuple[int, float]]
    learning: list[Step]

    @property
    def exchanges(self) -> float:
        """Exchanges to the tolerance: measured if it was reached, else predicted."""
        return self.predicted if self.measured is None else float(self.measured)

    @property
    def messages(self) -> float:
        """Messages of the whole swarm until the tolerance is met."""
        return self.exchanges * self.messages_per_exchange

    @property
    def accuracy(self) -> float | None:
        """What the learning run reached; None if there was none."""
        return reached(self.learning) if self.learning else None


def compare(
    graphs: Sequence[SwarmGraph],
    *,
    rule: Rule | None = None,
    tolerance: float = 1e-6,
    learning: Learning | None = None,
    budget: float | None = None,
    seed: int = 0,
    on_graph: Callable[[str], None] = lambda _: None,
) -> list[Entry]:
    """Measure every graph; all must have the same number of peers.

    rule
        The weights of exchanges; if left out, those that a swarm on each graph runs.
    budget
        Bytes that the whole swarm may send in a learning run; if left out, one exchange per round on
        the graph of median cost. The runs differ in nothing but how they spend it.
    """
    if len(graphs) > MOST:
        raise TopologyError(f"{len(graphs)} graphs: one picture tells at most {MOST} apart")
    sizes = {given.name: len(given.graph) for given in graphs}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in sizes.items())
        raise TopologyError(f"graphs of different sizes do not compare: {told} peers")
    if len(sizes) < len(graphs):
        raise TopologyError("the same graph was named twice")
    if learning is not None and budget is None:
        budget = default_budget(graphs, learning)
    entries = []
    for given in graphs:
        on_graph(given.name)
        used = rule or given.rule
        steps = [] if learning is None else learn(given, learning, budget or 0.0, used)
        entries.append(_entry(given, used, tolerance, steps, seed))
    return entries


def default_budget(graphs: Sequence[SwarmGraph], learning: Learning) -> float:
    """Bytes for one exchange per round on the graph of median cost."""
    return learning.rounds * learning.message * median(given.messages() for given in graphs)


def worth_learning(graphs: Sequence[SwarmGraph]) -> bool:
    """Whether a learning run ends within a minute or so."""
    return max(len(given.graph) for given in graphs) <= PEERS


def _entry(given: SwarmGraph, rule: Rule, tolerance: float, steps: list[Step], seed: int) -> Entry:
    pace = given.pace(rule, tolerance)
    predicted = pace.exchanges
    length = int(min(max(1.1 * predicted, 12) if isfinite(predicted) else inf, EXCHANGES))
    logs = log_errors(lambda step: given.schedule.matrix(step, rule), length, seed=seed)
    half = length // 2
    measured = (
        float(np.exp((logs[-1] - logs[half]) / (length - half))) if isfinite(logs[-1]) else 0.0
    )
    at = np.unique(np.geomspace(1, length, POINTS).astype(int))
    curve = [(int(t), float(logs[t])) for t in at if isfinite(logs[t])]
    return Entry(
        given.name, len(given.graph), given.messages(), pace.rate, pace.exact_after, predicted,
        exchanges_to(logs, tolerance), measured, curve, steps,
    )  # fmt: skip


PACE = ["graph", "error per exchange", "measured", "exchanges", "measured"]
COST = ["graph", "per exchange", "messages", "MB", "accuracy"]


def pace_rows(entries: Sequence[Entry]) -> list[tuple[str, ...]]:
    """How fast each graph agrees, predicted and measured; the fastest first."""
    return [
        (
            entry.name,
            f"exact after {entry.exact_after}" if entry.exact_after else f"{entry.rate:.4f}",
            f"{entry.measured_rate:.4f}" if entry.measured_rate else "exact",
            number(entry.predicted),
            f"> {EXCHANGES:,}" if entry.measured is None else number(entry.measured),
        )
        for entry in sorted(entries, key=lambda entry: entry.exchanges)
    ]


def cost_rows(entries: Sequence[Entry], message: int) -> list[tuple[str, ...]]:
    """What each graph spends until it agrees, and what a swarm learns on it; the cheapest first."""
    return [
        (
            entry.name,
            number(entry.messages_per_exchange),
            number(entry.messages),
            number(entry.messages * message / 1e6),
            "" if entry.accuracy is None else f"{entry.accuracy:.3f}",
        )
        for entry in sorted(entries, key=lambda entry: entry.messages)
    ]


def write(
    entries: Sequence[Entry], folder: Path, *, tolerance: float, message: int, budget: float | None
) -> list[Path]:
    """Leave `compare.json` and the picture drawn from it."""
    head = {"tolerance": tolerance, "message_bytes": message, "budget_bytes": budget}
    graphs = [asdict(entry) for entry in entries]
    return write_with_picture(folder, "compare", {**head, "graphs": graphs}, figure_of_comparison)


def figure_of_comparison(record: dict[str, Any]) -> Figure:
    """Disagreement per exchange, predicted and measured; beside it, accuracy at equal bytes."""
    graphs = record["graphs"]
    learned = any(graph["learning"] for graph in graphs)
    figure, (row,) = panels(1, 2 if learned else 1, width=11.5 if learned else 7.5, height=5.0)
    handles = []
    for index, graph in enumerate(graphs):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        x, logs = zip(*graph["curve"], strict=True) if graph["curve"] else ((1,), (0.0,))
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.5}
        row[0].plot(x, np.exp(logs), markevery=max(1, len(x) // 6), linewidth=1.6, **look)
        _draw_prediction(row[0], graph, max(x), colour)
        if learned:
            found = [step["accuracy"] for step in graph["learning"]]
            wide = max(1, len(found) // 4)
            y = [float(np.mean(found[max(0, i - wide + 1) : i + 1])) for i in range(len(found))]
            x = np.linspace(0, record["budget_bytes"] / 1e6, len(found) + 1)[1:].tolist()
            row[1].plot(x, y, markevery=max(1, len(x) // 8), linewidth=1.6, **look)
        handles.append(Line2D([], [], linewidth=1.6, label=graph["name"], **look))
    low = record["tolerance"] / 100
    row[0].set(
        xscale="log", yscale="log", ylim=(low, 2), xlabel="exchanges", ylabel="as a share of the first",
        title=f"disagreement of {graphs[0]['peers']} peers",
    )  # fmt: skip
    row[0].axhline(record["tolerance"], color="#888888", linewidth=0.8, linestyle=":")
    handles += [
        Line2D([], [], color="#444444", linewidth=1.6, label="measured, random start"),
        Line2D([], [], color="#444444", linewidth=1.1, linestyle="--",
               label="predicted, slowest start"),
        Line2D([], [], color="#888888", linewidth=0.8, linestyle=":",
               label=f"tolerance {record['tolerance']:g}"),
    ]  # fmt: skip
    if learned:
        row[1].set(
            xlabel="MB that the swarm was allowed to send so far",
            ylabel="accuracy: mean of peers,\nover a quarter of the run", ylim=(0, 1),
            title=f"digits, {record['budget_bytes'] / 1e6:.3g} MB for every graph",
        )  # fmt: skip
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    return figure


def _draw_prediction(axes: Any, graph: dict[str, Any], last: int, colour: str) -> None:
    look = {"color": colour, "linestyle": "--", "linewidth": 1.1}
    if graph["exact_after"]:  # as it was, then nothing: a fall at the step that makes it exact
        step = graph["exact_after"]
        axes.plot([1, step, step], [1.0, 1.0, 1e-300], **look)
        return
    x = np.geomspace(1, max(last, 2), 100)
    axes.plot(x, graph["rate"] ** x, **look)


# --- learning: the same swarm on each graph, which may send the same bytes ------------------------------

LAYOUT = "64=24=10"
PEERS = 128
"""Peers up to which a learning run is worth its time."""


@dataclass(frozen=True)
class Learning:
    """A swarm of perceptrons on the built-in digits.

    Peers start equal and hold few labels each (`shards` of the sorted digits), so that whoever mixes
    badly knows less. Raise `rounds` for a longer run, `local_samples` for more drift between exchanges.
    """

    rounds: int = 40
    local_samples: int = 80
    rate: float = 0.3
    shards: int = 2
    seed: int = 0

    @property
    def message(self) -> int:
        """Bytes of one message: the network's parameters as float32."""
        return 4 * sum(p.numel() for p in mlp(LAYOUT).parameters())

    def learners(self, peers: int) -> list[Learner]:
        """The peers."""
        table = {
            "peers": peers,
            "seed": self.seed,
            "data": {"partition": "shards", "shards": self.shards},
            "network": {"layout": LAYOUT, "activation": "sigmoid", "output": "sigmoid"},
            "models": [{"name": "everybody", "layout": LAYOUT.replace("=", "-")}],
            "training": {
                "local_samples": self.local_samples,
                "rate": self.rate,
                "loss": "squared",
                "reduction": "sum",
            },
        }
        return [member.learner for member in Swarm(parse_config(table)).members()]


@dataclass(frozen=True)
class Step:
    """After a round: megabytes that the swarm has sent, mean accuracy and that of its worst peer."""

    megabytes: float
    accuracy: float
    worst: float


@dataclass(frozen=True, eq=False)
class Paid(Gossip):
    """Gossip that makes, after each round, the exchanges which the bytes allowed so far pay for."""

    cost: float = 1.0
    """Bytes of one exchange."""
    allowance: float = 1.0
    """Bytes per round."""

    def exchanges_before(self, step: int) -> int:
        return int(step * self.allowance / self.cost * (1 + 1e-9))


def learn(given: SwarmGraph, learning: Learning, budget: float, rule: Rule = "push") -> list[Step]:
    """Train in rounds; whenever the bytes allowed so far pay for it, the graph makes an exchange.

    `budget` is what the whole swarm may send in all rounds together. Push-sum's weights go on from
    exchange to exchange, so that few exchanges forget nobody.
    """
    paid = Paid(
        given.schedule,
        rule=rule,
        cost=given.messages() * learning.message,
        allowance=budget / learning.rounds,
    )
    steps = []
    for round in Arena(learning.learners(len(given.graph)), mixing=paid).run(learning.rounds):
        found = [test.accuracy for test in round.tests]
        sent = paid.exchanges_before(round.index) * paid.cost / 1e6
        steps.append(Step(sent, float(np.mean(found)), float(min(found))))
    return steps


def reached(steps: list[Step]) -> float:
    """The accuracy of a run: its last quarter's mean.

    The last round alone would flatter graphs with rare, dear exchanges when one falls on it.
    """
    last = steps[-max(1, len(steps) // 4) :]
    return float(np.mean([step.accuracy for step in last]))


# --- advice: which graph to use for so many peers and so much traffic ----------------------------------


def groups_from(text: str, peers: int) -> dict[str, list[int]]:
    """Semi-local groups of peers that stand one after the other: `4` equal ones, or sizes `10,10,12`."""
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        raise TopologyError(
            f"--groups {text!r}: give a number of groups, or sizes, as in 4 or 10,10,12"
        ) from None
    if len(sizes) == 1:
        count = sizes[0]
        if not 1 <= count <= peers // 2:
            raise TopologyError(
                f"--groups {count}: {peers} peers form 1 … {peers // 2} groups of 2 or more"
            )
        sizes = [peers // count + (index < peers % count) for index in range(count)]
    if min(sizes) < 1 or sum(sizes) != peers:
        raise TopologyError(f"--groups {text}: sizes sum to {sum(sizes)}, not to {peers} peers")
    found, start = {}, 0
    for index, size in enumerate(sizes):
        found[f"group {index}"] = list(range(start, start + size))
        start += size
    return found


ADVICE = ["topology", "links", "error per exchange", "exchanges", "messages", "error left"]


def advice_rows(advice: Advice) -> list[tuple[str, ...]]:
    """Candidates as a table, best first."""
    return [
        (
            one.topology,
            str(one.sends),
            "exact" if one.rate < 1e-12 else f"{one.rate:.4f}",
            number(one.exchanges),
            number(one.messages),
            "" if one.error is None else f"{one.error:.2g}",
        )
        for one in advice.ranked
    ]


def reason(one: Candidate) -> str:
    """Why a candidate mixes as it does, and what it takes."""
    added = f"; bridge = true adds {len(one.added)} links to join groups" if one.added else ""
    return one.reason + added


def write_advice(advice: Advice, folder: Path, title: str) -> list[Path]:
    """Leave `advice.json` and the picture drawn from it."""
    ranked = [asdict(one) for one in advice.ranked]
    refused = [{"topology": spec, "reason": reason} for spec, reason in advice.refused]
    record = {"title": title, "ranked": ranked, "refused": refused}
    return write_with_picture(folder, "advice", record, figure_of_advice)


def figure_of_advice(record: dict[str, Any]) -> Figure:
    """Bars: exchanges and messages per peer of each candidate, best on top."""
    ranked = [one for one in record["ranked"] if one["exchanges"] is not None]
    height = 1.7 + 0.42 * max(len(ranked), 1)
    figure, (row,) = panels(1, 2, width=9.5, height=height, sharey=True)
    for axes, key, colour, label in (
        (row[0], "exchanges", COLOURS[0], "exchanges to the tolerance"),
        (row[1], "messages", COLOURS[4], "messages per peer until then"),
    ):
        values = [one[key] for one in ranked]
        axes.barh(range(len(ranked)), values, color=colour, height=0.65)
        for place, value in enumerate(values):
            axes.annotate(
                number(value), (value, place), xytext=(3, 0), textcoords="offset points",
                va="center", fontsize=9,
            )  # fmt: skip
        axes.set(xscale="log", xlabel=label)
        if values:
            axes.set_xlim(min(min(values), 1) * 0.8, max(values) * 6)
        axes.grid(visible=False, axis="y")
    row[0].set_yticks(range(len(ranked)), [one["topology"] for one in ranked])
    row[0].invert_yaxis()
    figure.suptitle(record["title"], fontsize=12)
    return figure
