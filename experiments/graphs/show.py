"""One graph: its facts and picture (`gossamer topology show`), and what it loses with its peers and links, in
churn and by delay (`gossamer topology stress`).
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
from ..study.figures import COLOURS, MARKERS, panels, save, tidy
from .drawing import LABELLED, Map, draw_map, page, places
from .swarm import SwarmGraph, describe_bridging, groups_of, name_links

SUMMARY = 1000
"""From so many peers on the picture has degrees and errors beside the map."""
LINES = 40_000
"""Links drawn at most; of more, every so many-th."""


@dataclass(frozen=True)
class Shown:
    """What a graph's file `topology.json` holds, and the rows of the tables on the terminal."""

    rows: list[tuple[str, str]]
    models: list[tuple[str, ...]]
    record: dict[str, Any]


MODEL_HEADER = ["partial model", "peers", "links", "gap", "exchanges", "cut links", "bridge peers"]


def examine(
    given: SwarmGraph, rule: Rule | None = None, tolerance: float = 1e-6, group: str | None = None
) -> Shown:
    """Everything that `show` says about a graph; a disconnected one raises with its components.

    rule: the weights of exchanges; those that a swarm on the graph runs if left out.
    """
    graph, rule = given.graph, rule or given.rule
    whole = facts(graph, rule, tolerance, what=given.name)
    rows = _time_rows(given, rule, tolerance) if given.changing else _rate_rows(whole, rule)
    rows = [*_size_rows(given, whole), *rows, *_shape_rows(whole, given.labels)]
    if given.added.edges:
        rows.append(("added links", describe_bridging(given.added, given.labels)))
    models = {} if given.changing else model_facts(graph, given.models, rule, tolerance)
    told = [_model_row(model, found) for model, found in models.items()]
    return Shown(rows, told, _record(given, whole, rule, group))


def show(shown: Shown, folder: Path) -> list[Path]:
    """Leave `topology.json` and the picture drawn from it."""
    return write_with_picture(folder, "topology", shown.record, figure_of)


def write_with_picture(
    folder: Path, name: str, record: dict[str, Any], draw: Callable[[dict[str, Any]], Figure]
) -> list[Path]:
    """Write a record as `name`.json, and the picture that is drawn from that file."""
    make_folder(folder)
    write_json(folder / f"{name}.json", finite(record))
    return [folder / f"{name}.json", *redraw(folder, name, draw)]


def redraw(folder: Path, name: str, draw: Callable[[dict[str, Any]], Figure]) -> list[Path]:
    """Draw the picture of a record that was written."""
    return save(draw(json.loads((folder / f"{name}.json").read_text("utf-8"))), folder / name)


def number(value: float) -> str:
    """A figure for a table: four digits, or whole when large."""
    if not isfinite(value):
        return "never"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _size_rows(given: SwarmGraph, whole: Facts) -> list[tuple[str, str]]:
    links = f"{whole.links:,} {'one-way' if whole.directed else 'two-way'}"
    degrees = f"{whole.least_degree} to {whole.most_degree}, mean {whole.mean_degree:.3g}"
    return [
        ("peers", f"{whole.peers:,}"),
        ("links", links + (f" in {given.steps} steps" if given.changing else "")),
        ("links per peer", degrees),
    ]


def _rate_rows(whole: Facts, rule: Rule) -> list[tuple[str, str]]:
    return [
        ("weights", rule),
        ("spectral gap", f"{whole.gap:.6g}"),
        ("error per exchange", f"× {whole.second:.6g}"),
        (f"exchanges to {whole.tolerance:g}", number(whole.exchanges)),
        ("messages until then", number(whole.messages)),
    ]


def _time_rows(given: SwarmGraph, rule: Rule, tolerance: float) -> list[tuple[str, str]]:
    pace, period = given.pace(rule, tolerance), given.schedule.period
    told = "exact after one period" if pace.exact_after else f"× {pace.rate:.6g} over a period"
    return [
        ("period", f"{period} steps" if period else f"none; judged over {given.steps} steps"),
        ("error per exchange", told),
        (f"exchanges to {tolerance:g}", number(pace.exchanges)),
        ("messages until then", number(pace.exchanges * given.messages())),
    ]


def _shape_rows(whole: Facts, labels: Mapping[int, str]) -> list[tuple[str, str]]:
    links, peers = whole.cut_edges, whole.bridge_peers
    return [
        ("effective diameter", f"{whole.effective_diameter:.3g} hops for 90 % of pairs"),
        ("cut links", f"{len(links)}: {name_links(links, labels)}" if links else "none"),
        (
            "bridge peers",
            f"{len(peers)}: {name_peers(peers, labels=labels)[1:-1]}" if peers else "none",
        ),
    ]


def _model_row(model: str, found: Facts) -> tuple[str, ...]:
    return (
        model, str(found.peers), str(found.links), f"{found.gap:.4g}", number(found.exchanges),
        str(len(found.cut_edges)), str(len(found.bridge_peers)),
    )  # fmt: skip


def _record(given: SwarmGraph, whole: Facts, rule: Rule, group: str | None) -> dict[str, Any]:
    graph = given.graph
    nodes = sorted(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    matrix = mixing_matrix(graph, rule)
    links = sorted((index[u], index[v]) for u, v in graph.edges)
    ends = [u for u, _ in links], [v for _, v in links]
    shares = np.asarray(matrix[ends[1], ends[0]]).ravel()
    if not whole.directed:  # one line for both ways: what they carry on the average
        shares = (shares + np.asarray(matrix[ends[0], ends[1]]).ravel()) / 2
    groups = groups_of(given, group)
    labels = given.labels
    record = {
        "name": given.name,
        "facts": asdict(whole),
        "directed": whole.directed,
        "changes": given.changing is not None,
        "places": places(graph).round(5).tolist(),
        "links": links,
        "shares": shares.round(9).tolist(),
        "labels": [labels.get(node, str(node)) for node in nodes],
        "groups": [groups[node] for node in nodes] if groups else [],
        "added": [[index[u], index[v]] for u, v in given.added.edges],
        "degrees": [len(graph[node]) for node in nodes],
    }
    if len(nodes) >= SUMMARY:
        logs = log_errors(matrix, int(min(max(whole.exchanges, 10), 300)))
        record["log_errors"] = logs.round(6).tolist()
    return record


def finite(value: Any) -> Any:
    """The same for JSON, which has no infinity: null stands for never."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def figure_of(record: dict[str, Any]) -> Figure:
    """Draw a map, and for large graphs a summary beside it."""
    count = len(record["places"])
    large = count >= SUMMARY
    found = map_of(record)
    drawn = len(found.links)
    known = record["facts"]
    notes = [f"{drawn:,} of {known['links']:,} links drawn"] if drawn < known["links"] else []
    if count > LABELLED:
        notes.append(f"more than {LABELLED} peers are not numbered")
    width, height = page(found, 8.2)
    height += 0.2 if notes else 0.0
    paper = (11.5, max(height, 6.0)) if large else (width, height)
    figure = Figure(figsize=paper, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2 if large else 1, width_ratios=[2.2, 1] if large else [1])
    axes = figure.add_subplot(grid[:, 0])
    draw_map(axes, found)
    size = f"{count:,} peers, {known['links']:,} links"
    pace = f"gap {known['gap']:.4g}, {number(known['exchanges'] or inf)} exchanges to {known['tolerance']:g}"
    told = f"{size} in all its steps" if record["changes"] else f"{size}, {pace}"
    figure.suptitle(f"{textwrap.shorten(record['name'], 70)}\n{told}", fontsize=12)
    if large:
        _draw_degrees(figure.add_subplot(grid[0, 1]), record)
        _draw_errors(figure.add_subplot(grid[1, 1]), record)
    if notes:
        figure.supxlabel("; ".join(notes), fontsize=8, color="#444444", x=0.02, ha="left")
    return figure


def map_of(record: dict[str, Any]) -> Map:
    """The map that a `topology.json` describes; very many links are thinned out evenly."""
    links = [(u, v) for u, v in record["links"]]
    every = -(-len(links) // LINES)
    known = record["facts"]
    cut = {tuple(link) for link in known["cut_edges"]}
    return Map(
        places=np.array(record["places"]),
        links=links[::every],
        shares=record["shares"][::every],
        directed=record["directed"],
        labels=record["labels"],
        groups=record["groups"],
        cut_links=frozenset(link for link in links if link in cut or link[::-1] in cut),
        bridge_peers=frozenset(known["bridge_peers"]),
        added=frozenset((u, v) for u, v in record["added"]),
    )


def _draw_degrees(axes: Any, record: dict[str, Any]) -> None:
    degrees = np.array(record["degrees"])
    low, high = int(degrees.min()), int(degrees.max())
    edges = np.arange(low - 0.5, high + 1.5, max(1, (high - low) // 40))
    axes.hist(degrees, bins=edges, color=COLOURS[0], edgecolor="white", linewidth=0.4)
    axes.set(title="links per peer", xlabel="links", ylabel="peers")
    tidy(axes)
    if low == high:
        axes.set_xticks([low])
        axes.set_xlim(low - 2, low + 2)


def _draw_errors(axes: Any, record: dict[str, Any]) -> None:
    logs = [x for x in record["log_errors"] if x is not None]
    second = 1.0 - record["facts"]["gap"]
    steps = np.arange(len(logs))
    axes.semilogy(steps, np.exp(logs), color=COLOURS[0], label="measured, random start")
    axes.semilogy(
        steps, np.maximum(second, 1e-300) ** steps, color=COLOURS[7], linestyle="--",
        label="predicted, slowest start",
    )  # fmt: skip
    axes.set(title="disagreement", xlabel="exchange", ylabel="as a share of the first")
    tidy(axes)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))


# --- stress ---------------------------------------------------------------------------------------

ATTACKED_PEERS = 2000
"""Peers up to which attacks are played through."""
CHURN = (("1 % of peers leave per exchange", 0.01, 0.0), ("5 % leave", 0.05, 0.0),
         ("20 % leave", 0.2, 0.0), ("10 % of links fail", 0.0, 0.1),
         ("30 % fail", 0.0, 0.3))  # fmt: skip
"""Traces: who leaves and which links fail, by chance per exchange. Peers come back after five exchanges
on the average, links after two."""
DELAYS = (1, 2, 4)
"""Longest delays that are tried, in exchanges."""


@dataclass(frozen=True)
class Slowdown:
    """How much longer gossip takes under one trouble: 2 is twice the exchanges; inf is never."""

    trouble: str
    factor: float


@dataclass(frozen=True)
class Stress:
    """Everything that `stress` found."""

    name: str
    peers: int
    links: int
    exchanges: float
    losses: list[Loss]
    slowdowns: list[Slowdown]
    verdict: str


def stress(
    given: SwarmGraph,
    *,
    rule: Rule | None = None,
    tolerance: float = 1e-6,
    seed: int = 0,
    on_step: Callable[[str], None] = lambda _: None,
) -> Stress:
    """Take a graph apart in every way, and say what breaks first; rule: the graph's own if left out."""
    graph, rule = given.graph, rule or given.rule
    if given.changing:
        raise TopologyError(f"{given.name} changes over time: stress takes one graph")
    if len(graph) > ATTACKED_PEERS:
        raise TopologyError(
            f"{len(graph)} peers: attacks are played through up to {ATTACKED_PEERS}; take a smaller graph of "
            "the same kind"
        )
    if len(graph) < 3:
        raise TopologyError(f"{len(graph)} peers: with fewer than 3 there is nothing to lose")
    losses = []
    for kind in ("peers", "links"):
        on_step(f"random {kind}")
        losses.append(random_loss(graph, kind, rule=rule, tolerance=tolerance, seed=seed))
        on_step(f"worst {kind}")
        losses.append(worst_loss(graph, kind, rule=rule, tolerance=tolerance))
    on_step("churn")
    slowdowns = _churn(given, rule, seed)
    on_step("delay")
    slowdowns += _delay(given, rule, seed)
    calm = losses[0].points[0].exchanges
    verdict = _verdict(given, losses, slowdowns)
    return Stress(given.name, len(graph), graph.number_of_edges(), calm, losses, slowdowns, verdict)


def _churn(given: SwarmGraph, rule: Rule, seed: int, exchanges: int = 120) -> list[Slowdown]:
    graph = given.graph
    calm = log_errors(mixing_matrix(graph, rule), exchanges, seed=seed)
    until = _last_measured(calm)
    found = []
    for trouble, leave, fail in CHURN:
        events = draw_events(
            graph, exchanges, leave=leave, arrive=0.2, link_down=fail, link_up=0.5, seed=seed
        )
        schedule = churn(graph, events)
        rough = log_errors(lambda step, s=schedule: s.matrix(step, rule), exchanges, seed=seed)
        # how many exchanges until as good as calm gossip was; beyond the trace, by its mean pace
        as_good = np.flatnonzero(rough <= calm[until])
        if as_good.size:
            needed = float(as_good[0])
        else:
            needed = exchanges * calm[until] / rough[-1] if rough[-1] < 0 else inf
        found.append(Slowdown(trouble, needed / until))
    return found


def _last_measured(logs: Any) -> int:
    """The last exchange worth measuring by: not exact yet, and not below a millionth."""
    fine = np.flatnonzero(np.isfinite(logs) & (logs > np.log(1e-6)))
    return max(int(fine[-1]), 1)


def _delay(given: SwarmGraph, rule: Rule, seed: int) -> list[Slowdown]:
    calm = predicted_exchanges(spectral_gap(mixing_matrix(given.graph, rule)))
    found = []
    for most in DELAYS:
        late = delayed_matrix(link_delays(given.graph, most, seed), rule)
        needed = predicted_exchanges(spectral_gap(late))
        found.append(Slowdown(f"links late by up to {most}", needed / calm))
    return found


def _verdict(given: SwarmGraph, losses: Sequence[Loss], slowdowns: Sequence[Slowdown]) -> str:
    split = [loss for loss in losses if loss.first_split is not None]
    lines = []
    if split:
        first = min(split, key=lambda loss: loss.first_split or 0.0)
        total = len(given.graph) if first.kind == "peers" else given.graph.number_of_edges()
        count = round((first.first_split or 0.0) * total)
        what = first.kind[:-1] if count == 1 else first.kind
        lines.append(
            f"First to break: {_HOW[first.how]} {first.kind}. {count} {what} of {total} "
            f"{'splits' if count == 1 else 'split'} the swarm{_cut_off(given, first)}."
        )
    else:
        lines.append("No loss that was tried splits the swarm.")
    slowest = max(slowdowns, key=lambda slowdown: slowdown.factor)
    lines.append(f"Slowest under: {slowest.trouble} ({_times(slowest.factor)} as many exchanges).")
    return " ".join(lines)


def _cut_off(given: SwarmGraph, loss: Loss) -> str:
    if not loss.first:
        return ""
    labels = given.labels
    if loss.kind == "peers":
        told = name_peers(loss.first, labels=labels)[1:-1]
    else:
        told = name_links(loss.first, labels)  # pyright: ignore[reportArgumentType]
    parts = components(without(given.graph, loss.kind, loss.first))
    return (
        f": without {told}, {name_peers(parts[-1], labels=labels)} is cut off"
        if len(parts) > 1
        else ""
    )


def _times(factor: float) -> str:
    return "infinitely" if not isfinite(factor) else f"{factor:.3g} times"


LOSS_HEADER = ["lost", "splits at", "whole at 10 %", "30 %", "50 %", "exchanges at 10 %", "30 %"]
_HOW = {"random": "random", "worst": "the worst"}


def loss_rows(found: Stress) -> list[tuple[str, ...]]:
    """One line per kind of loss."""
    table = []
    for loss in found.losses:
        at = {point.share: point for point in loss.points}
        split = "never" if loss.first_split is None else f"{loss.first_split:.1%}"
        whole = [f"{at[share].whole:.0%}" for share in (0.1, 0.3, 0.5)]
        pace = [number(at[share].exchanges) for share in (0.1, 0.3)]
        table.append((f"{loss.how} {loss.kind}", split, *whole, *pace))
    return table


def write_stress(found: Stress, folder: Path) -> list[Path]:
    """Leave `stress.json` and the picture drawn from it."""
    return write_with_picture(folder, "stress", asdict(found), figure_of_stress)


def figure_of_stress(record: dict[str, Any]) -> Figure:
    """Three panels: what holds together, how fast it mixes, and what churn and delay cost."""
    figure, ((whole, pace, slow),) = panels(1, 3, width=13, height=5.2)
    for index, loss in enumerate(record["losses"]):
        x = [100 * point["share"] for point in loss["points"]]
        look: dict[str, Any] = {
            "color": COLOURS[index], "marker": MARKERS[index], "markersize": 5, "linewidth": 1.6,
        }  # fmt: skip
        whole.plot(x, [100 * p["whole"] for p in loss["points"]], **look)
        by = f" (by {loss['attack']})" if loss["attack"] else ""
        label = f"{loss['how']} {loss['kind']}{by}"
        y = [p["exchanges"] if p["exchanges"] is not None else np.nan for p in loss["points"]]
        pace.plot(x, y, label=label, **look)
    whole.set(title="still together", xlabel="% lost", ylabel="% of survivors in the largest part",
              ylim=(0, 103))  # fmt: skip
    pace.set(title="exchanges of that part", xlabel="% lost", ylabel="predicted", yscale="log")
    told = record["slowdowns"]
    most = max([s["factor"] for s in told if s["factor"] is not None], default=1.0)
    for place, slowdown in enumerate(reversed(told)):
        never = slowdown["factor"] is None
        length = 1.2 * most if never else slowdown["factor"]
        slow.barh(place, length, color=COLOURS[7] if never else COLOURS[5], height=0.65)
        text = "never" if never else f"× {slowdown['factor']:.3g}"
        slow.text(length + 0.02 * most, place, text, va="center", fontsize=9)
    slow.set_yticks(range(len(told)), [s["trouble"] for s in reversed(told)], fontsize=9)
    slow.axvline(1, color="#444444", linewidth=0.8, linestyle=":")
    slow.set(title="slowdown by churn and delay", xlim=(0, 1.35 * most))
    figure.suptitle(
        f"{record['name']}: {record['peers']} peers, {record['links']} links; "
        f"{number(record['exchanges'])} exchanges while nothing is lost", fontsize=12,
    )  # fmt: skip
    handles, labels = pace.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    return figure
