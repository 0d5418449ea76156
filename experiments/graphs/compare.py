"""`gossamer topology compare`: how fast each graph agrees, what it costs, what a swarm learns on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ...topology import (
    Rule,
    TopologyError,
    exchanges_to,
    log_errors,
    mixing_matrix,
    predicted_exchanges,
    schedule_rate,
    spectral_gap,
)
from ..results import make_folder, write_json
from .given import Given
from .learning import PEERS, Learning, Step, learn, reached
from .show import number

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
    graphs: Sequence[Given],
    *,
    rule: Rule | None = None,
    tolerance: float = 1e-6,
    learning: Learning | None = None,
    budget: float | None = None,
    seed: int = 0,
    on_graph: Callable[[str], None] = lambda _: None,
    on_done: Callable[[], None] = lambda: None,
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
        on_done()
    return entries


def default_budget(graphs: Sequence[Given], learning: Learning) -> float:
    """Bytes for one exchange per round on the graph of median cost."""
    return learning.rounds * learning.message * median(given.messages() for given in graphs)


def worth_learning(graphs: Sequence[Given]) -> bool:
    """Whether a learning run ends within a minute or so."""
    return max(len(given.graph) for given in graphs) <= PEERS


def _entry(given: Given, rule: Rule, tolerance: float, steps: list[Step], seed: int) -> Entry:
    if given.changes:
        rate = schedule_rate(given.schedule, rule, given.window)
        exact = given.window if rate < 1e-12 else None
    else:
        matrix = mixing_matrix(given.graph, rule)
        rate = 1.0 - spectral_gap(matrix)
        exact = 1 if rate < 1e-12 else None
    predicted = float(exact) if exact else predicted_exchanges(1.0 - rate, tolerance)
    # the same matrices again and again: made once for schedules with a period
    cache: dict[int, Any] = {}

    def exchange(step: int) -> Any:
        at = step % given.schedule.period if given.schedule.period else step
        if at not in cache:
            cache[at] = given.schedule.matrix(at, rule)
        return cache[at]

    length = int(min(max(1.1 * predicted, 12) if isfinite(predicted) else inf, EXCHANGES))
    logs = log_errors(exchange, length, seed=seed)
    half = length // 2
    pace = float(np.exp((logs[-1] - logs[half]) / (length - half))) if isfinite(logs[-1]) else 0.0
    at = np.unique(np.geomspace(1, length, POINTS).astype(int))
    curve = [(int(t), float(logs[t])) for t in at if isfinite(logs[t])]
    return Entry(
        given.name, len(given.graph), given.messages(), rate, exact, predicted,
        exchanges_to(logs, tolerance), pace, curve, steps,
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
    make_folder(folder)
    told = [
        {**asdict(entry), "predicted": entry.predicted if isfinite(entry.predicted) else None}
        for entry in entries
    ]
    head = {"tolerance": tolerance, "message_bytes": message, "budget_bytes": budget}
    write_json(folder / "compare.json", {**head, "graphs": told})
    return [folder / "compare.json", *draw_compare(folder)]


def draw_compare(folder: Path) -> list[Path]:
    """Disagreement per exchange, predicted and measured; beside it, accuracy at equal bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from ..study.figures import COLOURS, MARKERS, save

    record = json.loads((folder / "compare.json").read_text("utf-8"))
    graphs = record["graphs"]
    learned = any(graph["learning"] for graph in graphs)
    figure = Figure(figsize=(11.5 if learned else 7.5, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if learned else 1, squeeze=False)[0]
    handles = []
    for index, graph in enumerate(graphs):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        x, logs = zip(*graph["curve"], strict=True) if graph["curve"] else ((1,), (0.0,))
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.5}
        panels[0].plot(x, np.exp(logs), markevery=max(1, len(x) // 6), linewidth=1.6, **look)
        _draw_prediction(panels[0], graph, max(x), colour)
        if learned:
            found = [step["accuracy"] for step in graph["learning"]]
            wide = max(1, len(found) // 4)
            y = [float(np.mean(found[max(0, i - wide + 1) : i + 1])) for i in range(len(found))]
            x = np.linspace(0, record["budget_bytes"] / 1e6, len(found) + 1)[1:].tolist()
            panels[1].plot(x, y, markevery=max(1, len(x) // 8), linewidth=1.6, **look)
        handles.append(Line2D([], [], linewidth=1.6, label=graph["name"], **look))
    low = record["tolerance"] / 100
    panels[0].set(
        xscale="log", yscale="log", ylim=(low, 2), xlabel="exchanges", ylabel="as a share of the first",
        title=f"disagreement of {graphs[0]['peers']} peers",
    )  # fmt: skip
    panels[0].axhline(record["tolerance"], color="#888888", linewidth=0.8, linestyle=":")
    handles += [
        Line2D([], [], color="#444444", linewidth=1.6, label="measured, random start"),
        Line2D([], [], color="#444444", linewidth=1.1, linestyle="--",
               label="predicted, slowest start"),
        Line2D([], [], color="#888888", linewidth=0.8, linestyle=":",
               label=f"tolerance {record['tolerance']:g}"),
    ]  # fmt: skip
    if learned:
        panels[1].set(
            xlabel="MB that the swarm was allowed to send so far",
            ylabel="accuracy: mean of peers,\nover a quarter of the run", ylim=(0, 1),
            title=f"digits, {record['budget_bytes'] / 1e6:.3g} MB for every graph",
        )  # fmt: skip
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    return save(figure, folder / "compare")


def _draw_prediction(axes: Any, graph: dict[str, Any], last: int, colour: str) -> None:
    look = {"color": colour, "linestyle": "--", "linewidth": 1.1}
    if graph["exact_after"]:  # as it was, then nothing: a fall at the step that makes it exact
        step = graph["exact_after"]
        axes.plot([1, step, step], [1.0, 1.0, 1e-300], **look)
        return
    x = np.geomspace(1, max(last, 2), 100)
    axes.plot(x, graph["rate"] ** x, **look)
