"""`gossamer topology show` and `stress`: measure and draw one graph, and how gossip on it bears failures.

`show` writes a graph's size, spectrum and weak spots with a picture; `stress` removes peers and links, and
adds churn and delay.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
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
from .drawing import MOST_LABELS, Map, draw_map, page_size, positions
from .swarm import SwarmGraph, describe_bridging, groups_of, name_links

SUMMARY_PEERS = 1000
"""Graphs with at least this many peers have plots of degrees and errors beside the map."""
MOST_DRAWN_LINKS = 40_000
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


def examine(
    topology: SwarmGraph,
    rule: Rule | None = None,
    tolerance: float = 1e-6,
    group: str | None = None,
) -> GraphReport:
    """Measure a graph for `show`; raises TopologyError, which names the components, if it is disconnected.

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
    write_json(folder / f"{name}.json", finite(record))
    return [folder / f"{name}.json", *redraw(folder, name, draw)]


def redraw(folder: Path, name: str, draw: Callable[[dict[str, Any]], Figure]) -> list[Path]:
    """Draw the picture of a record that `write_with_picture` has written; return the files."""
    return save(draw(json.loads((folder / f"{name}.json").read_text("utf-8"))), folder / name)


def number(value: float) -> str:
    """Format a number for a table: four digits, or no decimals if it is large; "never" for infinity."""
    if not isfinite(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _size_rows(topology: SwarmGraph, graph_facts: Facts) -> list[tuple[str, str]]:
    links = f"{graph_facts.links:,} {'one-way' if graph_facts.directed else 'two-way'}"
    degrees = f"{graph_facts.least_degree} to {graph_facts.most_degree}, mean {graph_facts.mean_degree:.3g}"
    return [
        ("peers", f"{graph_facts.peers:,}"),
        ("links", links + (f" in {topology.steps} steps" if topology.changing else "")),
        ("links per peer", degrees),
    ]


def _rate_rows(graph_facts: Facts, rule: Rule) -> list[tuple[str, str]]:
    return [
        ("weights", rule),
        ("spectral gap", f"{graph_facts.gap:.6g}"),
        ("error per exchange", f"× {graph_facts.second:.6g}"),
        (f"exchanges to {graph_facts.tolerance:g}", number(graph_facts.exchanges)),
        ("messages until then", number(graph_facts.messages)),
    ]


def _time_rows(topology: SwarmGraph, rule: Rule, tolerance: float) -> list[tuple[str, str]]:
    pace, period = topology.pace(rule, tolerance), topology.schedule.period
    rate = "exact after one period" if pace.exact_after else f"× {pace.rate:.6g} over a period"
    return [
        ("period", f"{period} steps" if period else f"none; measured over {topology.steps} steps"),
        ("error per exchange", rate),
        (f"exchanges to {tolerance:g}", number(pace.exchanges)),
        ("messages until then", number(pace.exchanges * topology.messages())),
    ]


def _shape_rows(graph_facts: Facts, labels: Mapping[int, str]) -> list[tuple[str, str]]:
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
    return (
        model, str(measured.peers), str(measured.links), f"{measured.gap:.4g}",
        number(measured.exchanges), str(len(measured.cut_edges)), str(len(measured.bridge_peers)),
    )  # fmt: skip


def _record(
    topology: SwarmGraph, graph_facts: Facts, rule: Rule, group: str | None
) -> dict[str, Any]:
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


def finite(value: Any) -> Any:
    """Replace infinities and NaN by None, since JSON has none; None stands for "never"."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def figure_of(record: dict[str, Any]) -> Figure:
    """Draw a graph's map; for large graphs also its degrees and errors."""
    count = len(record["places"])
    large = count >= SUMMARY_PEERS
    graph_map = map_of(record)
    drawn = len(graph_map.links)
    measured = record["facts"]
    notes = [f"{drawn:,} of {measured['links']:,} links drawn"] if drawn < measured["links"] else []
    if count > MOST_LABELS:
        notes.append(f"more than {MOST_LABELS} peers are not numbered")
    width, height = page_size(graph_map, 8.2)
    height += 0.2 if notes else 0.0
    inches = (11.5, max(height, 6.0)) if large else (width, height)
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2 if large else 1, width_ratios=[2.2, 1] if large else [1])
    axes = figure.add_subplot(grid[:, 0])
    draw_map(axes, graph_map)
    size = f"{count:,} peers, {measured['links']:,} links"
    exchanges = f"{number(measured['exchanges'] or inf)} exchanges to {measured['tolerance']:g}"
    pace = f"gap {measured['gap']:.4g}, {exchanges}"
    subtitle = f"{size} in all its steps" if record["changes"] else f"{size}, {pace}"
    figure.suptitle(f"{textwrap.shorten(record['name'], 70)}\n{subtitle}", fontsize=12)
    if large:
        _draw_degrees(figure.add_subplot(grid[0, 1]), record)
        _draw_errors(figure.add_subplot(grid[1, 1]), record)
    if notes:
        figure.supxlabel("; ".join(notes), fontsize=8, color="#444444", x=0.02, ha="left")
    return figure


def map_of(record: dict[str, Any]) -> Map:
    """Return the map that a `topology.json` describes, with at most MOST_DRAWN_LINKS links."""
    links = [(u, v) for u, v in record["links"]]
    step = -(-len(links) // MOST_DRAWN_LINKS)
    measured = record["facts"]
    return Map(
        positions=np.array(record["places"]),
        links=links[::step],
        shares=record["shares"][::step],
        directed=record["directed"],
        labels=record["labels"],
        groups=record["groups"],
        bridges=_as_drawn(links, measured["cut_edges"]),
        cut_peers=frozenset(measured["bridge_peers"]),
        added=_as_drawn(links, record["added"]),
    )


def _as_drawn(
    links: Sequence[tuple[int, int]], some: Sequence[Sequence[int]]
) -> frozenset[tuple[int, int]]:
    """Return those of `links` that `some` lists, in either direction."""
    listed = {tuple(link) for link in some}
    return frozenset(link for link in links if link in listed or link[::-1] in listed)


def _draw_degrees(axes: Any, record: dict[str, Any]) -> None:
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
    logs = [x for x in record["log_errors"] if x is not None]
    second = 1.0 - record["facts"]["gap"]
    steps = np.arange(len(logs))
    axes.semilogy(steps, np.exp(logs), color=BLUE, label="measured, random start")
    axes.semilogy(
        steps, np.maximum(second, 1e-300) ** steps, color=GREY, linestyle="--",
        label="predicted, slowest start",
    )  # fmt: skip
    axes.set(title="disagreement", xlabel="exchange", ylabel="as a share of the first")
    tidy(axes)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))


# --- stress ---------------------------------------------------------------------------------------

MOST_STRESSED_PEERS = 2000
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
    """Remove peers and links in all ways, add churn and delay, and say what splits or slows gossip most.

    rule: how a peer weights what it sends; the rule of a swarm on this graph if left out.
    """
    graph, rule = topology.graph, rule or topology.rule
    if topology.changing:
        raise TopologyError(f"{topology.name} changes over time: stress takes only a fixed graph")
    if len(graph) > MOST_STRESSED_PEERS:
        raise TopologyError(
            f"{len(graph)} peers: stress takes at most {MOST_STRESSED_PEERS}; use a smaller graph from the "
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
    slowdowns = _churn(topology, rule, seed)
    on_step("delay")
    slowdowns += _delay(topology, rule, seed)
    exchanges = losses[0].points[0].exchanges  # the first point has lost nothing
    verdict = _verdict(topology, losses, slowdowns)
    links = graph.number_of_edges()
    return Stress(topology.name, len(graph), links, exchanges, losses, slowdowns, verdict)


def _churn(topology: SwarmGraph, rule: Rule, seed: int, exchanges: int = 120) -> list[Slowdown]:
    graph = topology.graph
    undisturbed = log_errors(mixing_matrix(graph, rule), exchanges, seed=seed)
    end = _last_measured(undisturbed)
    slowdowns = []
    for trouble, leave, fail in CHURN:
        events = draw_events(
            graph, exchanges, leave=leave, arrive=0.2, link_down=fail, link_up=0.5, seed=seed
        )
        schedule = churn(graph, events)
        disturbed = log_errors(lambda step, s=schedule: s.matrix(step, rule), exchanges, seed=seed)
        # exchanges until the error is as small as without churn; extrapolated if it never is
        as_small = np.flatnonzero(disturbed <= undisturbed[end])
        if as_small.size:
            needed = float(as_small[0])
        else:
            needed = exchanges * undisturbed[end] / disturbed[-1] if disturbed[-1] < 0 else inf
        slowdowns.append(Slowdown(trouble, needed / end))
    return slowdowns


def _last_measured(logs: Any) -> int:
    """The last exchange with an error above a millionth: rounding does not affect it yet."""
    measurable = np.flatnonzero(np.isfinite(logs) & (logs > np.log(1e-6)))
    return max(int(measurable[-1]), 1)


def _delay(topology: SwarmGraph, rule: Rule, seed: int) -> list[Slowdown]:
    undelayed = predicted_exchanges(spectral_gap(mixing_matrix(topology.graph, rule)))
    slowdowns = []
    for longest in DELAYS:
        matrix = delayed_matrix(link_delays(topology.graph, longest, seed), rule)
        needed = predicted_exchanges(spectral_gap(matrix))
        slowdowns.append(Slowdown(f"links delayed by up to {longest}", needed / undelayed))
    return slowdowns


def _verdict(topology: SwarmGraph, losses: Sequence[Loss], slowdowns: Sequence[Slowdown]) -> str:
    splitting = [loss for loss in losses if loss.first_split is not None]
    sentences = []
    if splitting:
        loss = min(splitting, key=lambda loss: loss.first_split or 0.0)
        total = len(topology.graph) if loss.kind == "peers" else topology.graph.number_of_edges()
        count = round((loss.first_split or 0.0) * total)
        noun = loss.kind[:-1] if count == 1 else loss.kind
        sentences.append(
            f"Splits first by losing {_HOW[loss.how]} {loss.kind}: {count} {noun} of {total} "
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
    return "infinitely" if not isfinite(factor) else f"{factor:.3g} times"


LOSS_HEADER = [
    "lost", "splits at", "connected at 10 %", "30 %", "50 %", "exchanges at 10 %", "30 %",
]  # fmt: skip
_HOW = {"random": "random", "worst": "the worst"}


def loss_rows(results: Stress) -> list[tuple[str, ...]]:
    """The table of losses: a row for random and for worst losses of peers and of links."""
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
        by = f" (by {loss['attack']})" if loss["attack"] else ""
        label = f"{loss['how']} {loss['kind']}{by}"
        y = [p["exchanges"] if p["exchanges"] is not None else np.nan for p in loss["points"]]
        pace.plot(x, y, label=label, **style)
    connected.set(title="still connected", xlabel="% lost",
                  ylabel="% of survivors in the largest component", ylim=(0, 103))  # fmt: skip
    pace.set(title="exchanges in that component", xlabel="% lost", ylabel="predicted", yscale="log")
    slowdowns = record["slowdowns"]
    largest = max([s["factor"] for s in slowdowns if s["factor"] is not None], default=1.0)
    for row, slowdown in enumerate(reversed(slowdowns)):
        never = slowdown["factor"] is None
        length = 1.2 * largest if never else slowdown["factor"]
        slow.barh(row, length, color=GREY if never else SKY_BLUE, height=0.65)
        text = "never" if never else f"× {slowdown['factor']:.3g}"
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
