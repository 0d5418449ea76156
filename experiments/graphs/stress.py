"""`gossamer topology stress`: what a graph loses with its peers and links, in churn and by delay."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from ...topology import (
    Loss,
    Rule,
    TopologyError,
    churn,
    components,
    delayed_matrix,
    draw_events,
    link_delays,
    log_errors,
    mixing_matrix,
    name_peers,
    predicted_exchanges,
    random_loss,
    spectral_gap,
    without,
    worst_loss,
)
from ..results import make_folder, write_json
from ..study.figures import COLOURS, MARKERS, panels, save
from .show import finite, number
from .swarm import SwarmGraph, name_links

PEERS = 2000
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
    if len(graph) > PEERS:
        raise TopologyError(
            f"{len(graph)} peers: attacks are played through up to {PEERS}; take a smaller graph of "
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
    until = _last(calm)
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


def _last(logs: Any) -> int:
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


HEADER = ["lost", "splits at", "whole at 10 %", "30 %", "50 %", "exchanges at 10 %", "30 %"]
_HOW = {"random": "random", "worst": "the worst"}


def rows(found: Stress) -> list[tuple[str, ...]]:
    """One line per kind of loss."""
    table = []
    for loss in found.losses:
        at = {point.share: point for point in loss.points}
        split = "never" if loss.first_split is None else f"{loss.first_split:.1%}"
        whole = [f"{at[share].whole:.0%}" for share in (0.1, 0.3, 0.5)]
        pace = [number(at[share].exchanges) for share in (0.1, 0.3)]
        table.append((f"{loss.how} {loss.kind}", split, *whole, *pace))
    return table


def write(found: Stress, folder: Path) -> list[Path]:
    """Leave `stress.json` and the picture drawn from it."""
    make_folder(folder)
    write_json(folder / "stress.json", finite(asdict(found)))
    return [folder / "stress.json", *draw_stress(folder)]


def draw_stress(folder: Path) -> list[Path]:
    """Three panels: what holds together, how fast it mixes, and what churn and delay cost."""
    record = json.loads((folder / "stress.json").read_text("utf-8"))
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
    return save(figure, folder / "stress")
