"""`gossamer topology show` and `stress`: measure and draw one graph, and how gossip on it bears failures.

`show` writes a graph's size, spectrum and weak spots with a picture; `stress` removes peers and links, and
adds churn and delay.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...topology import (
    Facts,
    Loss,
    Rule,
    TopologyError,
    churn,
    components,
    delayed_matrix,
    draw_events,
    facts,
    link_delays,
    log_errors,
    mixing_matrix,
    model_facts,
    name_peers,
    predicted_exchanges,
    random_loss,
    spectral_gap,
    without,
    worst_loss,
)
from ..results import make_folder, write_json
from ..study.figures import BLUE, COLOURS, GREY, MARKERS, SKY_BLUE, panels, save, tidy
from .drawing import MAX_LABELS, Map, draw_map, page_size
from .placement import positions
from .swarm import SwarmGraph, describe_bridging, groups_of, name_links

SUMMARY_PEERS = 1000
"""Graphs with at least this many peers have plots of degrees and errors beside the map."""
MAX_DRAWN_LINKS = 40_000
"""The most links that are drawn; of a graph with more links, an even selection is drawn."""


@dataclass(frozen=True)
class GraphReport:
    """The results of `show`: rows of the tables on the terminal, and the content of `topology.json`.

    rows: the graph's measures. models: a row of measures for every partial model, on its own subgraph.
    """

    rows: list[tuple[str, str]]
    models: list[tuple[str, ...]]
    record: dict[str, Any]


MODEL_HEADER = ["partial model", "peers", "links", "gap", "exchanges", "bridges", "cut peers"]
"""Titles of the columns of `GraphReport.models`."""


def examine(
    topology: SwarmGraph,
    rule: Rule | None = None,
    tolerance: float = 1e-6,
    group: str | None = None,
) -> GraphReport:
    """Return the measures of a graph; raise TopologyError, which names the components, if it is disconnected.

    rule: how a peer weights what it sends; the rule of a swarm on this graph if left out.
    group: the node attribute that colours peers.
    """
    graph, rule = topology.graph, rule or topology.rule
    graph_facts = facts(graph, rule, tolerance, graph_name=topology.name)
    rows = (
        _time_rows(topology, rule, tolerance)
        if topology.changing
        else _rate_rows(graph_facts, rule)
    )
    rows = [*_size_rows(topology, graph_facts), *rows, *_shape_rows(graph_facts, topology.labels)]
    if topology.added.edges:
        rows.append(("added links", describe_bridging(topology.added, topology.labels)))
    models = {} if topology.changing else model_facts(graph, topology.models, rule, tolerance)
    model_rows = [_model_row(model, measured) for model, measured in models.items()]
    return GraphReport(rows, model_rows, _record(topology, graph_facts, rule, group))


def show(report: GraphReport, folder: Path) -> list[Path]:
    """Write `topology.json` and the picture drawn from it; return the files."""
    return write_with_picture(folder, "topology", report.record, figure_of)


def write_with_picture(
    folder: Path, name: str, record: dict[str, Any], draw: Callable[[dict[str, Any]], Figure]
) -> list[Path]:
    """Write a record as NAME.json and the picture drawn from that file; return the files."""
    make_folder(folder)
    write_json(folder / f"{name}.json", without_infinities(record))
    return [folder / f"{name}.json", *redraw(folder, name, draw)]


def redraw(folder: Path, name: str, draw: Callable[[dict[str, Any]], Figure]) -> list[Path]:
    """Draw the picture of a record that `write_with_picture` has written; return the files."""
    return save(draw(json.loads((folder / f"{name}.json").read_text("utf-8"))), folder / name)


def number(value: float) -> str:
    """Return a number as text for a table: four digits, or no decimals if large; "never" for infinity."""
    if not isfinite(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _size_rows(topology: SwarmGraph, graph_facts: Facts) -> list[tuple[str, str]]:
    """Return the rows about peers and links."""
    links = f"{graph_facts.links:,} {'one-way' if graph_facts.directed else 'two-way'}"
    degrees = f"{graph_facts.least_degree} to {graph_facts.most_degree}, mean {graph_facts.mean_degree:.3g}"
    return [
        ("peers", f"{graph_facts.peers:,}"),
        ("links", links + (f" in {topology.steps} steps" if topology.changing else "")),
        ("links per peer", degrees),
    ]


def _rate_rows(graph_facts: Facts, rule: Rule) -> list[tuple[str, str]]:
    """Return the rows about the speed of gossip on a fixed graph."""
    return [
        ("weights", rule),
        ("spectral gap", f"{graph_facts.gap:.6g}"),
        ("error per exchange", f"× {graph_facts.rate:.6g}"),
        (f"exchanges to {graph_facts.tolerance:g}", number(graph_facts.exchanges)),
        ("messages until then", number(graph_facts.messages)),
    ]


def _time_rows(topology: SwarmGraph, rule: Rule, tolerance: float) -> list[tuple[str, str]]:
    """Return the rows about the speed of gossip on a graph that changes over time."""
    pace, period = topology.pace(rule, tolerance), topology.schedule.period
    rate = "exact after one period" if pace.exact_after else f"× {pace.rate:.6g} over a period"
    return [
        ("period", f"{period} steps" if period else f"none; measured over {topology.steps} steps"),
        ("error per exchange", rate),
        (f"exchanges to {tolerance:g}", number(pace.exchanges)),
        ("messages until then", number(pace.exchanges * topology.messages())),
    ]


def _shape_rows(graph_facts: Facts, labels: Mapping[int, str]) -> list[tuple[str, str]]:
    """Return the rows about distances and about links and peers whose loss splits the graph."""
    bridges, cut_peers = graph_facts.cut_edges, graph_facts.bridge_peers
    return [
        ("effective diameter", f"{graph_facts.effective_diameter:.3g} hops for 90 % of pairs"),
        ("bridges", f"{len(bridges)}: {name_links(bridges, labels)}" if bridges else "none"),
        (
            "cut peers",
            f"{len(cut_peers)}: {name_peers(cut_peers, labels=labels)[1:-1]}"
            if cut_peers
            else "none",
        ),
    ]


def _model_row(model: str, measured: Facts) -> tuple[str, ...]:
    """Return the row of a partial model; see MODEL_HEADER."""
    return (
        model, str(measured.peers), str(measured.links), f"{measured.gap:.4g}",
        number(measured.exchanges), str(len(measured.cut_edges)), str(len(measured.bridge_peers)),
    )  # fmt: skip


def _record(
    topology: SwarmGraph, graph_facts: Facts, rule: Rule, group: str | None
) -> dict[str, Any]:
    """Return the content of `topology.json`, from which the picture is drawn."""
    graph = topology.graph
    nodes = sorted(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    matrix = mixing_matrix(graph, rule)
    links = sorted((index[u], index[v]) for u, v in graph.edges)
    ends = [u for u, _ in links], [v for _, v in links]
    shares = np.asarray(matrix[ends[1], ends[0]]).ravel()
    if not graph_facts.directed:  # one line is drawn for both directions: the mean of their shares
        shares = (shares + np.asarray(matrix[ends[0], ends[1]]).ravel()) / 2
    groups = groups_of(topology, group)
    labels = topology.labels
    record = {
        "name": topology.name,
        "facts": asdict(graph_facts),
        "directed": graph_facts.directed,
        "changes": topology.changing is not None,
        "places": positions(graph).round(5).tolist(),
        "links": links,
        "shares": shares.round(9).tolist(),
        "labels": [labels.get(node, str(node)) for node in nodes],
        "groups": [groups[node] for node in nodes] if groups else [],
        "added": [[index[u], index[v]] for u, v in topology.added.edges],
        "degrees": [len(graph[node]) for node in nodes],
    }
    if len(nodes) >= SUMMARY_PEERS:
        logs = log_errors(matrix, int(min(max(graph_facts.exchanges, 10), 300)))
        record["log_errors"] = logs.round(6).tolist()
    return record


def without_infinities(value: Any) -> Any:
    """Return plain data with None for infinities and NaN, which JSON does not have; None means "never"."""
    if isinstance(value, dict):
        return {key: without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def figure_of(record: dict[str, Any]) -> Figure:
    """Draw a graph's map; for large graphs also its degrees and errors."""
    count = len(record["places"])
    is_large = count >= SUMMARY_PEERS
    graph_map = map_of(record)
    drawn_links = len(graph_map.links)
    measured = record["facts"]
    notes = []
    if drawn_links < measured["links"]:
        notes.append(f"{drawn_links:,} of {measured['links']:,} links drawn")
    if count > MAX_LABELS:
        notes.append(f"more than {MAX_LABELS} peers are not numbered")
    width, height = page_size(graph_map, 8.2)
    height += 0.2 if notes else 0.0
    inches = (11.5, max(height, 6.0)) if is_large else (width, height)
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    width_ratios = [2.2, 1] if is_large else [1]
    grid = figure.add_gridspec(2, len(width_ratios), width_ratios=width_ratios)
    axes = figure.add_subplot(grid[:, 0])
    draw_map(axes, graph_map)
    size = f"{count:,} peers, {measured['links']:,} links"
    exchanges = f"{number(measured['exchanges'] or inf)} exchanges to {measured['tolerance']:g}"
    pace = f"gap {measured['gap']:.4g}, {exchanges}"
    subtitle = f"{size} in all its steps" if record["changes"] else f"{size}, {pace}"
    figure.suptitle(f"{textwrap.shorten(record['name'], 70)}\n{subtitle}", fontsize=12)
    if is_large:
        _draw_degrees(figure.add_subplot(grid[0, 1]), record)
        _draw_errors(figure.add_subplot(grid[1, 1]), record)
    if notes:
        figure.supxlabel("; ".join(notes), fontsize=8, color="#444444", x=0.02, ha="left")
    return figure


def map_of(record: dict[str, Any]) -> Map:
    """Return the map that a `topology.json` describes, with at most MAX_DRAWN_LINKS links."""
    links = [(u, v) for u, v in record["links"]]
    step = ceil(len(links) / MAX_DRAWN_LINKS)
    measured = record["facts"]
    return Map(
        positions=np.array(record["places"]),
        links=links[::step],
        shares=record["shares"][::step],
        directed=record["directed"],
        labels=record["labels"],
        groups=record["groups"],
        bridges=_in_drawn_order(links, measured["cut_edges"]),
        cut_peers=frozenset(measured["bridge_peers"]),
        added=_in_drawn_order(links, record["added"]),
    )


def _in_drawn_order(
    links: Sequence[tuple[int, int]], marked: Sequence[Sequence[int]]
) -> frozenset[tuple[int, int]]:
    """Return those of `links` that `marked` lists, in either direction, each as it is in `links`."""
    listed = {tuple(link) for link in marked}
    return frozenset(link for link in links if link in listed or link[::-1] in listed)


def _draw_degrees(axes: Any, record: dict[str, Any]) -> None:
    """Draw how many peers have how many links."""
    degrees = np.array(record["degrees"])
    low, high = int(degrees.min()), int(degrees.max())
    edges = np.arange(low - 0.5, high + 1.5, max(1, (high - low) // 40))
    axes.hist(degrees, bins=edges, color=BLUE, edgecolor="white", linewidth=0.4)
    axes.set(title="links per peer", xlabel="links", ylabel="peers")
    tidy(axes)
    if low == high:
        axes.set_xticks([low])
        axes.set_xlim(low - 2, low + 2)


def _draw_errors(axes: Any, record: dict[str, Any]) -> None:
    """Draw the measured and the predicted error by exchange."""
    logs = [x for x in record["log_errors"] if x is not None]
    rate = 1.0 - record["facts"]["gap"]
    steps = np.arange(len(logs))
    axes.semilogy(steps, np.exp(logs), color=BLUE, label="measured, random start")
    axes.semilogy(
        steps, np.maximum(rate, 1e-300) ** steps, color=GREY, linestyle="--",
        label="predicted, slowest start",
    )  # fmt: skip
    axes.set(title="disagreement", xlabel="exchange", ylabel="as a share of the first")
    tidy(axes)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))


# --- stress ---------------------------------------------------------------------------------------

MAX_STRESSED_PEERS = 2000
"""The largest graph that `stress` takes: beyond it, removing peers and links in all ways takes too long."""
CHURN = (("1 % of peers leave per exchange", 0.01, 0.0), ("5 % leave", 0.05, 0.0),
         ("20 % leave", 0.2, 0.0), ("10 % of links fail", 0.0, 0.1),
         ("30 % fail", 0.0, 0.3))  # fmt: skip
"""Churn that is simulated: its description, and the probabilities per exchange that a peer leaves and that a
link fails. Peers come back after five exchanges on average, links after two."""
DELAYS = (1, 2, 4)
"""The longest delays of links that are simulated, in exchanges."""


@dataclass(frozen=True)
class Slowdown:
    """How much longer gossip takes under one disturbance.

    trouble: describes the disturbance. factor: 2 means twice as many exchanges, infinity never.
    """

    trouble: str
    factor: float


@dataclass(frozen=True)
class Stress:
    """The results of `stress`; `exchanges` are those needed without any failure."""

    name: str
    peers: int
    links: int
    exchanges: float
    losses: list[Loss]
    slowdowns: list[Slowdown]
    verdict: str


def stress(
    topology: SwarmGraph,
    *,
    rule: Rule | None = None,
    tolerance: float = 1e-6,
    seed: int = 0,
    on_step: Callable[[str], None] = lambda _: None,
) -> Stress:
    """Simulate losses of peers and links, churn and delay; return what splits or slows gossip most.

    rule: how a peer weights what it sends; the rule of a swarm on this graph if left out. on_step: is called
    with the name of each simulation before it begins.
    """
    graph, rule = topology.graph, rule or topology.rule
    if topology.changing:
        raise TopologyError(f"{topology.name} changes over time: stress takes only a fixed graph")
    if len(graph) > MAX_STRESSED_PEERS:
        raise TopologyError(
            f"{len(graph)} peers: stress takes at most {MAX_STRESSED_PEERS}; use a smaller graph from the "
            "same builder"
        )
    if len(graph) < 3:
        raise TopologyError(f"{len(graph)} peers: stress needs at least 3")
    losses = []
    for kind in ("peers", "links"):
        on_step(f"random {kind}")
        losses.append(random_loss(graph, kind, rule=rule, tolerance=tolerance, seed=seed))
        on_step(f"worst {kind}")
        losses.append(worst_loss(graph, kind, rule=rule, tolerance=tolerance))
    on_step("churn")
    slowdowns = _churn_slowdowns(topology, rule, seed)
    on_step("delay")
    slowdowns += _delay_slowdowns(topology, rule, seed)
    exchanges = losses[0].points[0].exchanges  # the first point has lost nothing
    verdict = _verdict(topology, losses, slowdowns)
    links = graph.number_of_edges()
    return Stress(topology.name, len(graph), links, exchanges, losses, slowdowns, verdict)


def _churn_slowdowns(topology: SwarmGraph, rule: Rule, seed: int) -> list[Slowdown]:
    """Return how much longer gossip takes under each kind of CHURN, by simulations of 120 exchanges."""
    graph, exchanges = topology.graph, 120
    undisturbed = log_errors(mixing_matrix(graph, rule), exchanges, seed=seed)
    end = _last_measured(undisturbed)
    slowdowns = []
    for trouble, leave, fail in CHURN:
        events = draw_events(
            graph, exchanges, leave=leave, arrive=0.2, link_down=fail, link_up=0.5, seed=seed
        )
        schedule = churn(graph, events)
        disturbed = log_errors(lambda step, s=schedule: s.matrix(step, rule), exchanges, seed=seed)
        # The exchanges until the error is as small as without churn, extrapolated if it never is.
        as_small = np.flatnonzero(disturbed <= undisturbed[end])
        if as_small.size:
            needed = float(as_small[0])
        else:
            needed = exchanges * undisturbed[end] / disturbed[-1] if disturbed[-1] < 0 else inf
        slowdowns.append(Slowdown(trouble, needed / end))
    return slowdowns


def _last_measured(logs: Any) -> int:
    """Return the last exchange with an error above a millionth, which rounding does not affect yet."""
    measurable = np.flatnonzero(np.isfinite(logs) & (logs > np.log(1e-6)))
    return max(int(measurable[-1]), 1)


def _delay_slowdowns(topology: SwarmGraph, rule: Rule, seed: int) -> list[Slowdown]:
    """Return how much longer gossip takes with each of DELAYS, as predicted."""
    undelayed = predicted_exchanges(spectral_gap(mixing_matrix(topology.graph, rule)))
    slowdowns = []
    for longest in DELAYS:
        matrix = delayed_matrix(link_delays(topology.graph, longest, seed), rule)
        needed = predicted_exchanges(spectral_gap(matrix))
        slowdowns.append(Slowdown(f"links delayed by up to {longest}", needed / undelayed))
    return slowdowns


def _verdict(topology: SwarmGraph, losses: Sequence[Loss], slowdowns: Sequence[Slowdown]) -> str:
    """Return two sentences: which loss splits the swarm first, and what slows it most."""
    splitting = [loss for loss in losses if loss.first_split is not None]
    sentences = []
    if splitting:
        loss = min(splitting, key=lambda loss: loss.first_split or 0.0)
        total = len(topology.graph) if loss.kind == "peers" else topology.graph.number_of_edges()
        count = round((loss.first_split or 0.0) * total)
        noun = loss.kind[:-1] if count == 1 else loss.kind
        sentences.append(
            f"Splits first by losing {_HOW_IN_WORDS[loss.how]} {loss.kind}: {count} {noun} of {total} "
            f"{'splits' if count == 1 else 'split'} the swarm{_separated_peers(topology, loss)}."
        )
    else:
        sentences.append("No loss of peers or links that was simulated splits the swarm.")
    slowest = max(slowdowns, key=lambda slowdown: slowdown.factor)
    sentences.append(
        f"Slowest under: {slowest.trouble} ({_times(slowest.factor)} as many exchanges)."
    )
    return " ".join(sentences)


def _separated_peers(topology: SwarmGraph, loss: Loss) -> str:
    """Return which peers are disconnected after the first removals of an attack, as the end of a sentence."""
    if not loss.first:
        return ""
    labels = topology.labels
    if loss.kind == "peers":
        removed = name_peers(loss.first, labels=labels)[1:-1]
    else:
        removed = name_links(loss.first, labels)  # pyright: ignore[reportArgumentType]
    remaining = components(without(topology.graph, loss.kind, loss.first))
    if len(remaining) < 2:
        return ""
    return f": without {removed}, {name_peers(remaining[-1], labels=labels)} is disconnected"


def _times(factor: float) -> str:
    """Return a factor as text: `2 times`."""
    return "infinitely" if not isfinite(factor) else f"{factor:.3g} times"


LOSS_HEADER = [
    "lost", "splits at", "connected at 10 %", "30 %", "50 %", "exchanges at 10 %", "30 %",
]  # fmt: skip
_HOW_IN_WORDS = {"random": "random", "worst": "the worst"}


def loss_rows(results: Stress) -> list[tuple[str, ...]]:
    """Return the table of losses: a row for random and for worst losses of peers and of links."""
    table = []
    for loss in results.losses:
        points = {point.share: point for point in loss.points}
        split = "never" if loss.first_split is None else f"{loss.first_split:.1%}"
        connected = [f"{points[share].whole:.0%}" for share in (0.1, 0.3, 0.5)]
        pace = [number(points[share].exchanges) for share in (0.1, 0.3)]
        table.append((f"{loss.how} {loss.kind}", split, *connected, *pace))
    return table


def write_stress(results: Stress, folder: Path) -> list[Path]:
    """Write `stress.json` and the picture drawn from it; return the files."""
    return write_with_picture(folder, "stress", asdict(results), figure_of_stress)


def figure_of_stress(record: dict[str, Any]) -> Figure:
    """Draw three panels: peers that stay connected, exchanges they need, slowdown by churn and delay."""
    figure, ((connected, pace, slow),) = panels(1, 3, width=13, height=5.2)
    for index, loss in enumerate(record["losses"]):
        x = [100 * point["share"] for point in loss["points"]]
        style: dict[str, Any] = {
            "color": COLOURS[index], "marker": MARKERS[index], "markersize": 5, "linewidth": 1.6,
        }  # fmt: skip
        connected.plot(x, [100 * p["whole"] for p in loss["points"]], **style)
        attack = f" (by {loss['attack']})" if loss["attack"] else ""
        label = f"{loss['how']} {loss['kind']}{attack}"
        y = [p["exchanges"] if p["exchanges"] is not None else np.nan for p in loss["points"]]
        pace.plot(x, y, label=label, **style)
    connected.set(title="still connected", xlabel="% lost",
                  ylabel="% of survivors in the largest component", ylim=(0, 103))  # fmt: skip
    pace.set(title="exchanges in that component", xlabel="% lost", ylabel="predicted", yscale="log")
    slowdowns = record["slowdowns"]
    largest = max([s["factor"] for s in slowdowns if s["factor"] is not None], default=1.0)
    for row, slowdown in enumerate(reversed(slowdowns)):
        is_infinite = slowdown["factor"] is None
        length = 1.2 * largest if is_infinite else slowdown["factor"]
        slow.barh(row, length, color=GREY if is_infinite else SKY_BLUE, height=0.65)
        text = "never" if is_infinite else f"× {slowdown['factor']:.3g}"
        slow.text(length + 0.02 * largest, row, text, va="center", fontsize=9)
    slow.set_yticks(range(len(slowdowns)), [s["trouble"] for s in reversed(slowdowns)], fontsize=9)
    slow.axvline(1, color="#444444", linewidth=0.8, linestyle=":")
    slow.set(title="slowdown by churn and delay", xlim=(0, 1.35 * largest))
    figure.suptitle(
        f"{record['name']}: {record['peers']} peers, {record['links']} links; "
        f"{number(record['exchanges'])} exchanges without losses", fontsize=12,
    )  # fmt: skip
    handles, labels = pace.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    return figure
