"""`gossamer topology show`: a graph's facts and its picture."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...topology import (
    Facts,
    Rule,
    facts,
    log_errors,
    mixing_matrix,
    model_facts,
    name_peers,
)
from ..results import make_folder, write_json
from ..study.figures import COLOURS, save, tidy
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
    given: SwarmGraph,
    rule: Rule | None = None,
    tolerance: float = 1e-6,
    group: str | None = None,
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
    models = []
    if given.models and not given.changing:
        for model, found in model_facts(graph, given.models, rule, tolerance).items():
            models.append(_model_row(model, found))
    return Shown(rows, models, _record(given, whole, rule, group))


def show(shown: Shown, folder: Path) -> list[Path]:
    """Leave `topology.json` and the picture drawn from it."""
    make_folder(folder)
    write_json(folder / "topology.json", shown.record)
    return [folder / "topology.json", *draw_show(folder)]


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
        "facts": finite(asdict(whole)),
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
        record["log_errors"] = finite(logs.round(6).tolist())
    return record


def finite(value: Any) -> Any:
    """The same for JSON, which has no infinity: null stands for never."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def draw_show(folder: Path) -> list[Path]:
    """The picture of a `topology.json`."""
    record = json.loads((folder / "topology.json").read_text("utf-8"))
    return save(figure_of(record), folder / "topology")


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
