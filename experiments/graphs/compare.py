"""`gossamer topology compare` and `advise`: how fast peers on different graphs agree, and at what cost.

`compare` measures the given graphs and trains a swarm on each; `advise` ranks graphs by predictions.
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
from ..study.figures import BLUE, COLOURS, MARKERS, ORANGE, panels
from .show import number, write_with_picture
from .swarm import SwarmGraph

MAX_GRAPHS = 8
"""The most graphs in one comparison: there are as many colours and markers."""
MAX_EXCHANGES = 20_000
"""The most exchanges that are simulated on one graph; a slow graph may need more to reach the tolerance."""
CURVE_POINTS = 120
"""The most points that are saved of a curve."""


@dataclass(frozen=True)
class GraphResult:
    """The measures of one graph.

    rate, predicted: the factor of the error per exchange, and the number of exchanges to the tolerance, as
        predicted; infinite means never.
    measured, measured_rate: the same in a simulation. measured is None if MAX_EXCHANGES were not enough.
    exact_after: exchanges after which all peers agree exactly; None if they only converge.
    curve: points (exchange, logarithm of the error) of the simulation.
    learning: the learning run, round by round; empty if there was none.
    """

    name: str
    peers: int
    messages_per_exchange: float
    rate: float
    exact_after: int | None
    predicted: float
    measured: int | None
    measured_rate: float
    curve: list[tuple[int, float]]
    learning: list[RoundResult]

    @property
    def exchanges(self) -> float:
        """Exchanges to the tolerance: as measured, or as predicted if it was not reached."""
        return self.predicted if self.measured is None else float(self.measured)

    @property
    def messages(self) -> float:
        """Messages that all peers together send until the tolerance is met."""
        return self.exchanges * self.messages_per_exchange

    @property
    def accuracy(self) -> float | None:
        """The accuracy at the end of the learning run; None without a learning run."""
        return final_accuracy(self.learning) if self.learning else None


def compare(
    graphs: Sequence[SwarmGraph],
    *,
    rule: Rule | None = None,
    tolerance: float = 1e-6,
    learning: Learning | None = None,
    budget: float | None = None,
    seed: int = 0,
    on_graph: Callable[[str], None] = lambda _: None,
) -> list[GraphResult]:
    """Measure every graph; all must have the same number of peers.

    rule: how a peer weights what it sends; if left out, the rule of a swarm on each graph.
    learning: the settings of a learning run on each graph; None for no learning run.
    budget: bytes that the whole swarm may send in each learning run; if left out, that of `default_budget`.
    on_graph: is called with the name of each graph before it is measured.
    """
    if len(graphs) > MAX_GRAPHS:
        raise TopologyError(f"{len(graphs)} graphs: compare at most {MAX_GRAPHS} at once")
    sizes = {topology.name: len(topology.graph) for topology in graphs}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{name} has {count}" for name, count in sizes.items())
        raise TopologyError(f"graphs must have the same number of peers: {counts} peers")
    if len(sizes) < len(graphs):
        raise TopologyError("the same graph was named twice")
    if learning is not None and budget is None:
        budget = default_budget(graphs, learning)
    entries = []
    for topology in graphs:
        on_graph(topology.name)
        used_rule = rule or topology.rule
        steps = [] if learning is None else learn(topology, learning, budget or 0.0, used_rule)
        entries.append(_measure(topology, used_rule, tolerance, steps, seed))
    return entries


def default_budget(graphs: Sequence[SwarmGraph], learning: Learning) -> float:
    """Return the bytes of one exchange per round on the graph of median cost."""
    return learning.rounds * learning.message * median(topology.messages() for topology in graphs)


def worth_learning(graphs: Sequence[SwarmGraph]) -> bool:
    """Return whether the graphs are small enough for learning runs of about a minute."""
    return max(len(topology.graph) for topology in graphs) <= MAX_LEARNING_PEERS


def _measure(
    topology: SwarmGraph, rule: Rule, tolerance: float, steps: list[RoundResult], seed: int
) -> GraphResult:
    """Predict the pace of a graph, simulate push-sum on it, and return both; steps: the learning run."""
    pace = topology.pace(rule, tolerance)
    predicted = pace.exchanges
    length = int(min(max(1.1 * predicted, 12) if isfinite(predicted) else inf, MAX_EXCHANGES))
    logs = log_errors(lambda step: topology.schedule.matrix(step, rule), length, seed=seed)
    half = length // 2
    measured_rate = (
        float(np.exp((logs[-1] - logs[half]) / (length - half))) if isfinite(logs[-1]) else 0.0
    )
    saved_exchanges = np.unique(np.geomspace(1, length, CURVE_POINTS).astype(int))
    curve = [(int(t), float(logs[t])) for t in saved_exchanges if isfinite(logs[t])]
    return GraphResult(
        topology.name, len(topology.graph), topology.messages(), pace.rate, pace.exact_after, predicted,
        exchanges_to(logs, tolerance), measured_rate, curve, steps,
    )  # fmt: skip


PACE_HEADER = ["graph", "error per exchange", "measured", "exchanges", "measured"]
"""Titles of the columns of `pace_rows`."""
COST_HEADER = ["graph", "per exchange", "messages", "MB", "accuracy"]
"""Titles of the columns of `cost_rows`."""


def pace_rows(entries: Sequence[GraphResult]) -> list[tuple[str, ...]]:
    """Return the table of predicted and measured convergence, the fastest graph first."""
    return [
        (
            entry.name,
            f"exact after {entry.exact_after}" if entry.exact_after else f"{entry.rate:.4f}",
            f"{entry.measured_rate:.4f}" if entry.measured_rate else "exact",
            number(entry.predicted),
            f"> {MAX_EXCHANGES:,}" if entry.measured is None else number(entry.measured),
        )
        for entry in sorted(entries, key=lambda entry: entry.exchanges)
    ]


def cost_rows(entries: Sequence[GraphResult], message: int) -> list[tuple[str, ...]]:
    """Return the table of messages until agreement, and of accuracy; the cheapest graph first.

    message: bytes of one message.
    """
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
    entries: Sequence[GraphResult],
    folder: Path,
    *,
    tolerance: float,
    message: int,
    budget: float | None,
) -> list[Path]:
    """Write `compare.json` and the picture drawn from it; return the files."""
    settings = {"tolerance": tolerance, "message_bytes": message, "budget_bytes": budget}
    graphs = [asdict(entry) for entry in entries]
    return write_with_picture(
        folder, "compare", {**settings, "graphs": graphs}, figure_of_comparison
    )


def figure_of_comparison(record: dict[str, Any]) -> Figure:
    """Draw predicted and measured disagreement by exchange; beside it, accuracy at equal bytes."""
    graphs = record["graphs"]
    has_learning = any(graph["learning"] for graph in graphs)
    columns, width = (2, 11.5) if has_learning else (1, 7.5)
    figure, (row,) = panels(1, columns, width=width, height=5.0)
    handles = []
    for index, graph in enumerate(graphs):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        x, logs = zip(*graph["curve"], strict=True) if graph["curve"] else ((1,), (0.0,))
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.5}
        row[0].plot(x, np.exp(logs), markevery=max(1, len(x) // 6), linewidth=1.6, **style)
        _draw_prediction(row[0], graph, max(x), colour)
        if has_learning:
            accuracies = [step["accuracy"] for step in graph["learning"]]
            count = len(accuracies)
            window = max(1, count // 4)  # the mean of so many rounds is drawn
            y = [float(np.mean(accuracies[max(0, i - window + 1) : i + 1])) for i in range(count)]
            x = np.linspace(0, record["budget_bytes"] / 1e6, count + 1)[1:].tolist()
            row[1].plot(x, y, markevery=max(1, len(x) // 8), linewidth=1.6, **style)
        handles.append(Line2D([], [], linewidth=1.6, label=graph["name"], **style))
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
    if has_learning:
        row[1].set(
            xlabel="MB that the swarm was allowed to send so far",
            ylabel="accuracy: mean of peers,\nover a quarter of the run", ylim=(0, 1),
            title=f"digits, {record['budget_bytes'] / 1e6:.3g} MB for every graph",
        )  # fmt: skip
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    return figure


def _draw_prediction(axes: Any, graph: dict[str, Any], last: int, colour: str) -> None:
    """Draw the predicted error from exchange 1 to `last`."""
    style = {"color": colour, "linestyle": "--", "linewidth": 1.1}
    if graph["exact_after"]:  # the error is drawn as 1 until it vanishes in one step
        step = graph["exact_after"]
        axes.plot([1, step, step], [1.0, 1.0, 1e-300], **style)
        return
    x = np.geomspace(1, max(last, 2), 100)
    axes.plot(x, graph["rate"] ** x, **style)


# --- learning: the same swarm on each graph, with the same budget of bytes ------------------------------

LAYOUT = "64=24=10"
"""The network of a learning run."""
MAX_LEARNING_PEERS = 128
"""The most peers for which a learning run is made unless --learn asks for it."""


@dataclass(frozen=True)
class Learning:
    """The settings of a learning run: a swarm of perceptrons on the built-in digits.

    All peers start with the same values. Each has samples of few classes (`shards` of the sorted digits), so
    that accuracy is low on graphs that mix slowly. Raise `rounds` for a longer run, `local_samples` for more
    drift between exchanges.
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
        """Return the learners of all peers."""
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
class RoundResult:
    """The swarm after a round: megabytes sent so far, mean accuracy, accuracy of the worst peer."""

    megabytes: float
    accuracy: float
    worst: float


@dataclass(frozen=True, eq=False)
class BudgetedGossip(Gossip):
    """Gossip with a budget: after each round, as many exchanges as the bytes allowed so far suffice for."""

    cost: float = 1.0
    """Bytes of one exchange."""
    allowance: float = 1.0
    """Bytes per round."""

    def exchanges_before(self, step: int) -> int:
        """Return how many exchanges the bytes allowed in the first `step` rounds suffice for."""
        return int(step * self.allowance / self.cost * (1 + 1e-9))


def learn(
    topology: SwarmGraph, learning: Learning, budget: float, rule: Rule = "push"
) -> list[RoundResult]:
    """Train in rounds, with an exchange whenever the bytes allowed so far suffice for one; return all rounds.

    budget: bytes that the whole swarm may send in all rounds together. Push-sum's weights are kept from
    exchange to exchange, so that no peer's contribution is lost however rare exchanges are.
    """
    gossip = BudgetedGossip(
        topology.schedule,
        rule=rule,
        cost=topology.messages() * learning.message,
        allowance=budget / learning.rounds,
    )
    steps = []
    for round in Arena(learning.learners(len(topology.graph)), mixing=gossip).run(learning.rounds):
        accuracies = [test.accuracy for test in round.tests]
        sent = gossip.exchanges_before(round.index) * gossip.cost / 1e6
        steps.append(RoundResult(sent, float(np.mean(accuracies)), float(min(accuracies))))
    return steps


def final_accuracy(steps: list[RoundResult]) -> float:
    """Return the mean accuracy over the last quarter of a run.

    The last round by itself would favour graphs with rare, expensive exchanges if one falls on that round.
    """
    last_quarter = steps[-max(1, len(steps) // 4) :]
    return float(np.mean([step.accuracy for step in last_quarter]))


# --- advice: which graph to use for a number of peers and a budget of traffic --------------------------


def groups_from(text: str, peers: int) -> dict[str, list[int]]:
    """Return consecutive groups of peers by name; text: `4` for equal groups, or sizes as in `10,10,12`."""
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        raise TopologyError(
            f"--groups {text!r}: give a number of groups, or their sizes, as in 4 or 10,10,12"
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
    groups, start = {}, 0
    for index, size in enumerate(sizes):
        groups[f"group {index}"] = list(range(start, start + size))
        start += size
    return groups


ADVICE_HEADER = ["topology", "links", "error per exchange", "exchanges", "messages", "error left"]
"""Titles of the columns of `advice_rows`."""


def advice_rows(advice: Advice) -> list[tuple[str, ...]]:
    """Return the table of candidates, the best first."""
    return [
        (
            candidate.topology,
            str(candidate.sends),
            "exact" if candidate.rate < 1e-12 else f"{candidate.rate:.4f}",
            number(candidate.exchanges),
            number(candidate.messages),
            "" if candidate.error is None else f"{candidate.error:.2g}",
        )
        for candidate in advice.ranked
    ]


def reason(candidate: Candidate) -> str:
    """Return why peers on a candidate graph agree fast or slowly, and how many links connect its groups."""
    links = len(candidate.added)
    note = f"; bridge = true adds {links} links to join groups" if links else ""
    return candidate.reason + note


def write_advice(advice: Advice, folder: Path, title: str) -> list[Path]:
    """Write `advice.json` and the picture drawn from it; return the files."""
    ranked = [asdict(candidate) for candidate in advice.ranked]
    refused = [{"topology": spec, "reason": reason} for spec, reason in advice.refused]
    record = {"title": title, "ranked": ranked, "refused": refused}
    return write_with_picture(folder, "advice", record, figure_of_advice)


def figure_of_advice(record: dict[str, Any]) -> Figure:
    """Draw bars of each candidate's exchanges and messages per peer, the best on top."""
    ranked = [candidate for candidate in record["ranked"] if candidate["exchanges"] is not None]
    height = 1.7 + 0.42 * max(len(ranked), 1)
    figure, (row,) = panels(1, 2, width=9.5, height=height, sharey=True)
    for axes, key, colour, label in (
        (row[0], "exchanges", BLUE, "exchanges to the tolerance"),
        (row[1], "messages", ORANGE, "messages per peer until then"),
    ):
        values = [candidate[key] for candidate in ranked]
        axes.barh(range(len(ranked)), values, color=colour, height=0.65)
        for index, value in enumerate(values):
            axes.annotate(
                number(value), (value, index), xytext=(3, 0), textcoords="offset points",
                va="center", fontsize=9,
            )  # fmt: skip
        axes.set(xscale="log", xlabel=label)
        if values:
            axes.set_xlim(min(min(values), 1) * 0.8, max(values) * 6)
        axes.grid(visible=False, axis="y")
    row[0].set_yticks(range(len(ranked)), [candidate["topology"] for candidate in ranked])
    row[0].invert_yaxis()
    figure.suptitle(record["title"], fontsize=12)
    return figure
