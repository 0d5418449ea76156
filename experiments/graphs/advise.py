"""`gossamer topology advise`: which graph to use for so many peers and so much traffic."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path

from ...topology import Advice, Candidate, TopologyError
from ..results import make_folder, write_json
from .show import number


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


HEADER = ["topology", "links", "error per exchange", "exchanges", "messages", "error left"]


def rows(advice: Advice) -> list[tuple[str, ...]]:
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


def write(advice: Advice, folder: Path, title: str) -> list[Path]:
    """Leave `advice.json` and the picture drawn from it."""
    make_folder(folder)
    ranked = [
        {**asdict(one), "exchanges": one.exchanges if isfinite(one.exchanges) else None}
        for one in advice.ranked
    ]
    refused = [{"topology": spec, "reason": reason} for spec, reason in advice.refused]
    write_json(folder / "advice.json", {"title": title, "ranked": ranked, "refused": refused})
    return [folder / "advice.json", *draw_advice(folder)]


def draw_advice(folder: Path) -> list[Path]:
    """Bars: exchanges and messages per peer of each candidate, best on top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ..study.figures import COLOURS, save

    record = json.loads((folder / "advice.json").read_text("utf-8"))
    ranked = [one for one in record["ranked"] if one["exchanges"] is not None]
    figure = Figure(figsize=(9.5, 1.9 + 0.42 * max(len(ranked), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key, colour, label in (
        (panels[0], "exchanges", COLOURS[0], "exchanges to the tolerance"),
        (panels[1], "messages", COLOURS[4], "messages per peer until then"),
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
        axes.grid(alpha=0.25, axis="x")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(ranked)), [one["topology"] for one in ranked])
    panels[0].invert_yaxis()
    figure.suptitle(record["title"], fontsize=12)
    return save(figure, folder / "advice")
