"""What a comparison comes to: accuracy at equal rounds and at equal bytes, as a table and a picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..results import Record, write_json
from ..study import Frame, as_text, frame_of

if TYPE_CHECKING:  # it takes a second, which only those who draw should wait
    from matplotlib.axes import Axes

# Paul Tol's muted scheme, told apart with any kind of colour vision; bounds are grey and dashed.
COLOURS = (
    "#332288", "#DDCC77", "#117733", "#88CCEE", "#882255", "#44AA99", "#999933", "#CC6677",
    "#AA4499",
)  # fmt: skip
OWN = "gossamer"
DASHES = ((0, (6, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)))


@dataclass(frozen=True)
class Standing:
    """One method over its seeds.

    `accuracy` and `worst` (the worst decile) are means over seeds after the last round; `deviation` is
    the standard deviation of accuracy over seeds, None of a single one; `at_bytes` and `worst_at_bytes`
    are the same at the common budget, None for a bound.
    """

    method: str
    bound: bool
    seeds: int
    rounds: int
    accuracy: float
    deviation: float | None
    worst: float
    at_bytes: float | None
    worst_at_bytes: float | None
    bytes: int
    seconds: float


def worst_decile(accuracies: Sequence[float]) -> float:
    """The mean of the worst tenth of the clients, of one client at least."""
    count = math.ceil(len(accuracies) / 10)
    return float(np.mean(sorted(accuracies)[:count]))


def budget(records: Sequence[Record]) -> int | None:
    """The most bytes that every run which sends any has sent in the end; None if none does."""
    ends = [record["curve"][-1]["bytes"] for record in records if not record["bound"]]
    return min(ends, default=None)


def at(record: Record, limit: int) -> Record:
    """The last test of a run before it had sent more than `limit` bytes."""
    return [point for point in record["curve"] if point["bytes"] <= limit][-1]


def by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Runs by method, in the order in which methods first occur."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["method"], []).append(record)
    return found


def standings(records: Sequence[Record]) -> list[Standing]:
    """One entry per method, in the order in which they first occur."""
    limit = budget(records)
    found = []
    for method, runs in by_method(records).items():
        ends = [run["curve"][-1] for run in runs]
        means = [float(np.mean(end["accuracy"])) for end in ends]
        paid = None
        if limit is not None and not runs[0]["bound"]:
            paid = [at(run, limit)["accuracy"] for run in runs]
        found.append(
            Standing(
                method=method,
                bound=runs[0]["bound"],
                seeds=len(runs),
                rounds=min(end["round"] for end in ends),
                accuracy=float(np.mean(means)),
                deviation=float(np.std(means, ddof=1)) if len(means) > 1 else None,
                worst=float(np.mean([worst_decile(end["accuracy"]) for end in ends])),
                at_bytes=None if paid is None else float(np.mean([np.mean(p) for p in paid])),
                worst_at_bytes=None
                if paid is None
                else float(np.mean([worst_decile(p) for p in paid])),
                bytes=round(np.mean([end["bytes"] for end in ends])),
                seconds=float(np.mean([end["seconds"] for end in ends])),
            )
        )
    return found


def coverage(records: Sequence[Record], planned: int | None = None) -> str:
    """Over how many seeds a method's mean goes: `3 seeds`, or, of a comparison that was stopped, `2 to 3
    seeds; 31 of 39 runs`. planned: runs of the whole comparison; as many as there are if left out.
    """
    counts = [len({run["seed"] for run in runs}) for runs in by_method(records).values()]
    fewest, most = min(counts), max(counts)
    seeds = f"{most} seed{'s' * (most != 1)}"
    if fewest < most:
        seeds = f"{fewest} to {seeds}"
    missing = planned is not None and len(records) < planned
    return f"{seeds}; {len(records)} of {planned} runs" if missing else seeds


def write_report(
    records: Sequence[Record], out: Path, title: str, caption: str, planned: int | None = None
) -> list[Path]:
    """Write summary.json and draw comparison.png and .svg from the records; nothing if there are none.

    planned: runs of the whole comparison, where it may have been stopped.
    """
    if not records:
        return []
    summary = out / "summary.json"
    write_json(
        summary,
        {
            "name": title,
            "setting": caption,
            "budget": budget(records),
            "methods": [asdict(one) for one in standings(records)],
        },
    )
    return [summary, *draw(records, out / "comparison", title, caption, planned)]


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return the same as a table, best first; bounds last."""
    limit = budget(records)
    paid = "equal bytes" if limit is None else f"at {limit / 1e6:.3g} MB"
    rows = [
        {
            "method": one.method + (" (bound)" if one.bound else ""),
            "seeds": one.seeds,
            "accuracy": one.accuracy,
            "± sd": one.deviation,
            "worst decile": one.worst,
            paid: one.at_bytes,
            f"worst decile {paid}": one.worst_at_bytes,
            "MB sent": one.bytes / 1e6 or None,
            "CPU s": one.seconds,
        }
        for one in sorted(standings(records), key=lambda s: (s.bound, -s.accuracy))
    ]
    three = ("accuracy", "± sd", "worst decile", paid, f"worst decile {paid}")
    formats = {**dict.fromkeys(three, ".3f"), "MB sent": ".2f", "CPU s": ".1f"}
    return {"summary": as_text(frame_of(rows), formats)}


# --- the picture: over rounds, over bytes, and client by client ---------------------------------------------


@dataclass(frozen=True)
class Look:
    """How a method is drawn everywhere."""

    colour: str
    line: Any
    width: float


def draw(
    records: Sequence[Record], path: Path, title: str, caption: str = "", planned: int | None = None
) -> list[Path]:
    """Draw a comparison's records as PNG and SVG; returns the files. planned: as for `coverage`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ..study.figures import save

    groups = by_method(records)
    looks = _looks(groups)
    notes = (
        f"{caption} Lines: mean over clients and {coverage(records, planned)}. Right: dots are clients; "
        "a bar goes from the worst decile (diamond) to the mean (line, number). Grey, dashed: bounds, which "
        "send nothing that is counted."
    )
    wrapped = textwrap.fill(notes, 225)
    figure = Figure(figsize=(14, 5.0 + 0.16 * wrapped.count("\n")), layout="constrained")
    FigureCanvasAgg(figure)
    rounds, sent, clients = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    sent.sharey(rounds)
    order = sorted(groups, key=lambda m: (groups[m][0]["bound"], -_final(groups[m])))
    for method in order:
        runs, look = groups[method], looks[method]
        x = [point["round"] for point in runs[0]["curve"]]
        y = np.mean([_means(run) for run in runs], axis=0)
        style = {"color": look.colour, "linestyle": look.line, "linewidth": look.width}
        rounds.plot(x, y, label=method, **style)
        if not runs[0]["bound"]:
            mb = np.mean([[p["bytes"] for p in run["curve"]] for run in runs], axis=0) / 1e6
            some = mb > 0  # nothing sent has no place on a logarithmic axis
            sent.plot(mb[some], y[some], **style)
    rounds.set(xlabel="round", ylabel="accuracy", title="at equal rounds")
    label_bytes(sent, budget(records))
    _client_by_client(clients, groups, looks, order)
    for axes in (rounds, sent, clients):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    # The steep start is common to all: what tells them apart begins later.
    low = min(_means(run)[len(run["curve"]) // 6] for run in records)
    rounds.set_ylim(bottom=max(low - 0.03, 0))
    rounds.legend(loc="lower right", ncols=2, fontsize=8, frameon=False)
    heading = f"{title}: {len(groups)} ways to learn together"
    figure.suptitle(heading, fontsize=13, fontweight="bold", x=0.01, ha="left")
    figure.supxlabel(wrapped, fontsize=8, color="#444444", x=0.01, ha="left")
    return save(figure, path)


def label_bytes(axes: Axes, limit: int | None) -> None:
    """Label the axis of megabytes with as many labels as have room, and mark the common budget."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    axes.set(xlabel="megabytes sent by all", title="at equal bytes", xscale="log")
    low, high = axes.get_xlim()
    decades = np.log10(high / low)
    # As many labels as have room: 1, 2, 5 of each decade, or decades alone; evenly within half of one.
    subs = (1, 2, 5) if decades < 3.2 else (1,)
    axes.xaxis.set_major_locator(
        MaxNLocator(6) if decades < 0.5 else LogLocator(subs=subs, numticks=9)
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelleft=False)
    if limit:
        axes.axvline(limit / 1e6, color="#444444", linewidth=0.8, linestyle=":")
        axes.annotate(
            "all have sent this much", (limit / 1e6, 0.02), xycoords=("data", "axes fraction"),
            xytext=(4, 0), textcoords="offset points", fontsize=8, color="#444444",
        )  # fmt: skip


def _client_by_client(
    axes: Axes, groups: dict[str, list[Record]], looks: dict[str, Look], order: Sequence[str]
) -> None:
    """A row per method: every client of every seed, their mean, the worst decile."""
    best_first = sorted(order, key=lambda method: _final(groups[method]))
    for row, method in enumerate(best_first):
        ends = [run["curve"][-1]["accuracy"] for run in groups[method]]
        mean, worst = _final(groups[method]), float(np.mean([worst_decile(end) for end in ends]))
        colour = looks[method].colour
        axes.barh(row, mean - worst, left=worst, height=0.6, color=colour, alpha=0.3, linewidth=0)
        axes.vlines(mean, row - 0.3, row + 0.3, color=colour, linewidth=2.2)
        dots = np.concatenate(ends)
        # spread so that clients of equal accuracy are seen, without chance
        offsets = 0.22 * np.sin(2.4 * np.arange(len(dots)))
        axes.scatter(dots, row + offsets, s=7, color=colour, alpha=0.75, linewidths=0)
        axes.scatter([worst], [row], s=34, marker="D", color=colour, edgecolors="white", zorder=3)
        axes.annotate(
            f"{mean:.3f}", (1, row), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8.5, color="#222222",
        )  # fmt: skip
    axes.set_yticks(range(len(best_first)), best_first, fontsize=9)
    for label, method in zip(axes.get_yticklabels(), best_first, strict=True):
        label.set_fontweight("bold" if method == OWN else "normal")
    lowest = min(min(run["curve"][-1]["accuracy"]) for runs in groups.values() for run in runs)
    axes.set(xlabel="accuracy after the last round", title="client by client")
    axes.set_xlim(max(0.0, np.floor(lowest * 10) / 10 - 0.02), 1.005)


def _looks(groups: dict[str, list[Record]]) -> dict[str, Look]:
    looks, colours, dashes = {}, 0, 0
    for method, runs in groups.items():
        if runs[0]["bound"]:
            looks[method] = Look("#777777", DASHES[dashes % len(DASHES)], 1.3)
            dashes += 1
        elif method == OWN:
            looks[method] = Look("#000000", "-", 2.6)
        else:
            looks[method] = Look(COLOURS[colours % len(COLOURS)], "-", 1.6)
            colours += 1
    return looks


def _means(run: Record) -> list[float]:
    return [float(np.mean(point["accuracy"])) for point in run["curve"]]


def _final(runs: Sequence[Record]) -> float:
    return float(np.mean([_means(run)[-1] for run in runs]))
