"""Comparisons: several methods on the same clients, from a TOML file to a table and a picture.

Accuracies are compared at equal rounds and at equal bytes.
"""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gossamer.names import hint

from ...gossip import Count
from ...gossip.compress import CompressError
from ...models import Metrics, ModelError, SgdLearner, seeded_rng
from ...topology import TopologyError
from ..build import Swarm
from ..config.named_files import digest, named_files, refuse_changed, topology_files
from ..config.needs import warn_unused_keys
from ..config.tables import Config, Experiment, Model, parse_table, read_table, require_table
from ..data import load_once
from ..errors import ConfigError
from ..results import Record, write_json
from ..study import Frame, Job, Study, StudyCell, as_text, frame_of, key_of
from . import METHODS
from .method import WHOLE, Client, Method

if TYPE_CHECKING:  # it takes a second, which only those who draw should wait
    from matplotlib.axes import Axes

SWARMS = ("models", "gossip", "trust", "time", "sweep", "fednp")
"""Keys that only a swarm's config has."""


class Comparison(Experiment):
    """Several methods on the same clients, with the same seeds, for the same number of rounds."""

    RENAMED: ClassVar = {
        "split": "its keys are in [data] now, where kind is called partition and the samples of all clients "
        'together total; tasks = "swaps" is a table [[tasks]] with kind = "swaps"'
    }

    seeds: Count = 3
    """Runs of every method: the split, the starting values and the order of samples follow the seed."""
    server: bool = True
    """Whether there is a server. Without one, methods that need it are refused."""
    methods: dict[str, dict[str, Any]] = {"fedavg": {}, "gossamer": {}, "local": {}}
    """A table for every line of the picture. Its name is the method's, or `method` inside it is:
    `[methods.strong-prox]` with `method = "fedprox"` and `mu = 1.0`."""

    def method(self, name: str) -> Method:
        """The method of one table, with its knobs."""
        knobs = {key: value for key, value in self.methods[name].items() if key != "method"}
        if (kind := self.kind(name)) not in METHODS:
            near = hint(kind, METHODS, are="there are")
            raise ConfigError(f"no method is called {kind!r}; {near}")
        return parse_table(METHODS[kind], knobs, f"in [methods.{name}]")

    def kind(self, name: str) -> str:
        """The name under which a table's method is registered."""
        return str(self.methods[name].get("method", name))


def load_comparison(path: str | Path) -> Comparison:
    """Read a comparison's file."""
    return parse_comparison(read_table(path), str(path))


def parse_comparison(table: dict[str, Any], source: str = "config") -> Comparison:
    """Check a table that was read or written by hand; `source` starts every error."""
    require_table(table, source, "load_comparison")
    if "methods" not in table and (foreign := [key for key in SWARMS if key in table]):
        raise ConfigError(
            f"{source}: has {foreign[0]!r}, so it is a swarm's config: run it with gossamer simulate or "
            "gossamer swarm. A comparison has a table [methods.NAME] for each method"
        )
    config = parse_table(Comparison, table, source)
    mistakes = {
        f"'peers': should be at least 2 clients, not {config.peers}": config.peers < 2,
        "'network.layout': methods need gradients, which the associative network has not": (
            "<>" in config.network.layout or config.data.set == "sparse"
        ),
        "'methods': names none; write a table such as [methods.fedavg] for each of those to compare. There "
        f"are {', '.join(METHODS)}": not config.methods,
    }
    for mistake, made in mistakes.items():
        if made:
            raise ConfigError(f"{source}: key {mistake}")
    for name in config.methods:
        try:
            method = config.method(name)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        if method.needs_server and not config.server:
            raise ConfigError(
                f"{source}: {name!r} ({config.kind(name)}) needs a server, and this comparison has none "
                f"(server = false); the nearest method without one is {method.nearest_without!r}"
            )
    return config


def choose(config: Comparison, only: list[str] | None) -> Comparison:
    """The comparison with some of its methods left out."""
    for name in only or []:
        if name not in config.methods:
            near = hint(name, config.methods, are="there are")
            raise ConfigError(f"--only {name}: the config has no such method; {near}")
    if not only:
        return config
    kept = {name: knobs for name, knobs in config.methods.items() if name in only}
    return config.model_copy(update={"methods": kept})


# --- one run --------------------------------------------------------------------------------------------


def clients_of(
    config: Comparison, method: Method, seed: int, source: str = "config"
) -> list[Client]:
    """All clients of one run. They depend on the seed, and on no method but by its rate and epochs."""
    own = {"rate": method.rate, "epochs": method.epochs}
    changes = {key: value for key, value in own.items() if value is not None}
    training = config.training.model_copy(update=changes)
    swarm = Config(
        seed=seed, peers=config.peers, data=config.data, tasks=config.tasks,
        network=config.network, training=training, models=[Model(name=WHOLE, share=1.0)],
    )  # fmt: skip
    clients = []
    for member in Swarm(swarm, source, load_once).members():
        assert isinstance(member.learner, SgdLearner)  # what would wrap it is refused
        clients.append(Client(member.learner, training.epochs or 1))
    return clients


@dataclass(frozen=True)
class Cell(StudyCell):
    """One run: a comparison's method, by the name of its table, which is the line, and a seed."""

    config: Comparison
    seed: int
    source: str = "config"

    @cached_property
    def key(self) -> str:
        """Names the run by all that decides its result; other methods and the number of seeds do not."""
        decisive = self.config.model_dump(
            mode="json", exclude={"name", "methods", "seeds", "seed", "server"}
        )
        knobs = self.config.method(self.line).model_dump(mode="json")
        text = json.dumps([decisive, self.config.kind(self.line), knobs, self.seed], sort_keys=True)
        files = named_files(self.config, self.source)
        if "topology" in knobs:  # a graph may be a file, or a function of the user's
            files += topology_files(knobs["topology"], Path())
        return key_of(text + digest(files))


def check(config: Comparison, source: str = "config") -> None:
    """Start every method once, so that one which cannot work is refused before any has run."""
    warn_unused_keys(config, "compare", source)
    for name in config.methods:
        method = config.method(name)
        _start(method, clients_of(config, method, config.seed, source), name, source)


def run(cell: Cell) -> Record:
    """The curve of one run: accuracy of every client, bytes and seconds so far, at every test.

    Seconds are those that this machine computed, without testing; all else depends on the cell alone.
    """
    config, method = cell.config, cell.config.method(cell.line)
    clients = clients_of(config, method, cell.seed, cell.source)
    sent, taken = 0, 0.0
    state = _start(method, clients, cell.line, cell.source)
    curve = [_point(0, sent, taken, method.test(state, clients))]
    for index in range(1, config.rounds + 1):
        # Dice of its own for every round: methods that throw them more often have the same participants.
        turn = method.turn(clients, seeded_rng(cell.seed, "round", index))
        began = time.process_time()
        try:
            state = method.round(state, clients, turn)
        except CompressError as error:
            raise ConfigError(f"{cell.source}: in [methods.{cell.line}]: {error}") from None
        taken += time.process_time() - began
        sent += turn.bytes
        if index % config.test_every == 0 or index == config.rounds:
            curve.append(_point(index, sent, taken, method.test(state, clients)))
    return {
        "key": cell.key, "method": cell.line, "seed": cell.seed, "bound": method.bound,
        "samples": [client.samples for client in clients], "curve": curve,
    }  # fmt: skip


def run_cells(cells: list[Cell], job: Job) -> list[Record]:
    """Run each cell."""
    records = [run(cell) for cell in cells]
    refuse_changed(cells)
    return records


def _start(method: Method, clients: list[Client], name: str, source: str) -> Any:
    try:
        return method.start(clients)
    except (ModelError, TopologyError) as error:
        raise ConfigError(f"{source}: in [methods.{name}]: {error}") from None


def _point(index: int, sent: int, taken: float, tests: list[Metrics]) -> Record:
    accuracies = [round(test.accuracy, 6) for test in tests]
    return {"round": index, "bytes": sent, "seconds": round(taken, 4), "accuracy": accuracies}


# --- all runs -------------------------------------------------------------------------------------------


def cells_of(config: Comparison, source: str = "config") -> list[Cell]:
    """Every run, seed by seed, so that an interrupted comparison has all methods for some seeds."""
    seeds = range(config.seed, config.seed + config.seeds)
    return [Cell(name, config, seed, source) for seed in seeds for name in config.methods]


def comparison_study(config: Comparison, source: str = "config") -> Study[Cell]:
    """Return the study of all methods and seeds; raises ConfigError for one that cannot be run."""
    check(config, source)
    cells = cells_of(config, source)

    def latest(record: Record) -> str:
        return f"{record['method']}: {float(np.mean(record['curve'][-1]['accuracy'])):.3f}"

    def figure(folder: Path, records: Sequence[Record]) -> list[Path]:
        return write_report(records, folder, config.name, describe(config), len(cells))

    return Study(
        config.name, cells, run_cells, table, figure,
        titles={"summary": f"{config.name}: after {config.rounds} rounds"},
        latest=latest,
        about={"config.json": config.model_dump(mode="json")},
    )  # fmt: skip


def describe(config: Comparison) -> str:
    """The setting, as a caption says it."""
    data, training = config.data, config.training
    dealt = {"dirichlet": f"Dirichlet({data.alpha:g})", "shards": f"{data.shards} shards each"}
    amounts = [f"{data.total} samples"] if data.total else []
    amounts += [f"{data.samples} samples each"] if data.samples else []
    tasks = [", two labels swapped at each" if one.kind == "swaps" else f", task {one.kind}"
             for one in config.tasks]  # fmt: skip
    tested = "each client's own classes" if data.tested == "own" else "all classes"
    return (
        f"{data.set}, {', '.join(amounts) or 'all samples'}, {config.peers} clients, "
        f"{dealt.get(data.partition, data.partition)}{''.join(tasks)}; "
        f"{config.network.name_or_entry or config.network.layout}; "
        f"E = {training.epochs or 1}, B = {training.batch}, η = {training.rate:g}; tested on {tested}."
    )


# --- accuracy at equal rounds and at equal bytes --------------------------------------------------------


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


def standings(records: Sequence[Record]) -> Frame:
    """Return a row for every method, in the order in which they first occur: means over its seeds.

    accuracy, worst: after the last round; the second is the worst decile's.
    deviation: the standard deviation of accuracy over seeds; missing of a single one.
    at_bytes, worst_at_bytes: the same as the first two at the common budget; missing of a bound.
    rounds, bytes, seconds: what it took; the fewest rounds of its runs.
    """
    limit = budget(records)
    rows = []
    for run in records:
        end = run["curve"][-1]
        paid = None if limit is None or run["bound"] else at(run, limit)["accuracy"]
        rows.append(
            {
                "method": run["method"], "bound": run["bound"], "rounds": end["round"],
                "accuracy": float(np.mean(end["accuracy"])), "worst": worst_decile(end["accuracy"]),
                "at_bytes": np.mean(paid) if paid else None,
                "worst_at_bytes": worst_decile(paid) if paid else None,
                "bytes": end["bytes"], "seconds": end["seconds"],
            }
        )  # fmt: skip
    frame = frame_of(rows).astype({"at_bytes": float, "worst_at_bytes": float})
    means = ("worst", "at_bytes", "worst_at_bytes", "bytes", "seconds")
    found = (
        frame.groupby("method", sort=False)
        .agg(
            bound=("bound", "first"), seeds=("bound", "size"), rounds=("rounds", "min"),
            accuracy=("accuracy", "mean"), deviation=("accuracy", "std"),
            **{name: (name, "mean") for name in means},
        )
        .reset_index()
    )  # fmt: skip
    return found.astype({"bytes": int})


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
    methods = json.loads(standings(records).to_json(orient="records", double_precision=15))
    about = {"name": title, "setting": caption, "budget": budget(records), "methods": methods}
    write_json(summary, about)
    return [summary, *draw(records, out / "comparison", title, caption, planned)]


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return the standings as a table, best first; bounds last."""
    limit = budget(records)
    paid = "equal bytes" if limit is None else f"at {limit / 1e6:.3g} MB"
    found = standings(records).sort_values(
        ["bound", "accuracy"], ascending=[True, False], kind="stable"
    )
    found["method"] += [" (bound)" if bound else "" for bound in found["bound"]]
    found["bytes"] = found["bytes"].replace(0, float("nan")) / 1e6
    names = {
        "method": "method", "seeds": "seeds", "accuracy": "accuracy", "deviation": "± sd",
        "worst": "worst decile", "at_bytes": paid, "worst_at_bytes": f"worst decile {paid}",
        "bytes": "MB sent", "seconds": "CPU s",
    }  # fmt: skip
    formats = {**dict.fromkeys(found.columns[4:9], ".3f"), "bytes": ".2f", "seconds": ".1f"}
    return {"summary": as_text(found[list(names)], formats).rename(columns=names)}


# --- the picture: over rounds, over bytes, and client by client ---------------------------------------------

# Paul Tol's muted scheme, told apart with any kind of colour vision; bounds are grey and dashed.
COLOURS = (
    "#332288", "#DDCC77", "#117733", "#88CCEE", "#882255", "#44AA99", "#999933", "#CC6677",
    "#AA4499",
)  # fmt: skip
OWN = "gossamer"
DASHES = ((0, (6, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)))
Look = dict[str, Any]
"""How a method is drawn everywhere: colour, linestyle and linewidth."""


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
        runs, style = groups[method], looks[method]
        x = [point["round"] for point in runs[0]["curve"]]
        y = np.mean([_means(run) for run in runs], axis=0)
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
        colour = looks[method]["color"]
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
    colours, dashes = cycle(COLOURS), cycle(DASHES)

    def look(method: str, bound: bool) -> Look:
        if bound:
            return {"color": "#777777", "linestyle": next(dashes), "linewidth": 1.3}
        if method == OWN:
            return {"color": "#000000", "linestyle": "-", "linewidth": 2.6}
        return {"color": next(colours), "linestyle": "-", "linewidth": 1.6}

    return {method: look(method, runs[0]["bound"]) for method, runs in groups.items()}


def _means(run: Record) -> list[float]:
    return [float(np.mean(point["accuracy"])) for point in run["curve"]]


def _final(runs: Sequence[Record]) -> float:
    return float(np.mean([_means(run)[-1] for run in runs]))
