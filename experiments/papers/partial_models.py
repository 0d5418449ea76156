"""The experiments of the paper on partial models (003): how much to average, and with which peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..config.tables import Config, Data, Model, Network, TaskEntry, Training
from ..results import Record
from ..study import Frame, Study, as_text, frame_of
from ..study.sweep import Cell, run_cells, stackable
from . import StudyEntry


def figure_study(
    entry: StudyEntry, cells: Sequence[Cell], *, x_label: str, legend: str, caption: str
) -> Study[Cell]:
    """Return the study of a figure: medians over seeds by curve and x, with the paper's quintiles as bars.

    cells: the runs of all seeds; `line` is the curve, and the settings have the figure's x.
    """

    def table(records: Sequence[Record]) -> dict[str, Frame]:
        names = {
            "line": legend, "x": x_label, "low": "second quintile", "high": "third quintile",
        }  # fmt: skip
        formats = dict.fromkeys(("median", "low", "high", "mean"), ".4f")
        frame = as_text(points(records), {"x": "g", **formats})
        return {"summary": frame.rename(columns=names)}

    def figure(folder: Path, records: Sequence[Record]) -> list[Path]:
        from ..study.figures import draw_lines

        medians = points(records)
        full_caption = (
            f"{entry.origin}; median of {medians['runs'].min()} runs, bars as in the paper: second and "
            f"third quintile (quantiles 0.4 and 0.6, a fifth of the runs).\n{caption}"
        )
        return draw_lines(
            folder / "figure", medians, ("line", "x", "median", "low", "high"),
            title=entry.title, x_label=x_label, legend=legend, caption=full_caption,
        )  # fmt: skip

    return Study(
        entry.name, cells, run_cells, table, figure,
        batches=stackable,
        latest=lambda r: f"{r['line']} at {r['settings']['x']:g}: {r['accuracy']:.3f}",
    )  # fmt: skip


def points(records: Sequence[Record]) -> Frame:
    """Return a row for every curve and x: runs, median, quantiles 0.4 (low) and 0.6 (high), and mean.

    Curves are in the order in which they first appear, x increases.
    """
    rows = [{"line": r["line"], "accuracy": r["accuracy"], **r["settings"]} for r in records]
    groups = frame_of(rows, ordered=["line"]).groupby(["line", "x"], observed=True)["accuracy"]
    columns = {
        "runs": groups.size(), "median": groups.median(), "low": groups.quantile(0.4),
        "high": groups.quantile(0.6), "mean": groups.mean(),
    }  # fmt: skip
    return frame_of(columns).reset_index().astype({"line": str})


# --- V.3: perceptrons --------------------------------------------------------------------------------

# Averaging levels: cells of the second hidden layer in the global model → cells of the first hidden layer.
LEVELS = {0: 0, 15: 50, 30: 100, 60: 200, 80: 250, 100: 300}


def _swarm(
    entry: StudyEntry,
    quick: bool,
    seed: int,
    peers: int,
    rounds: int,
    data: Data,
    *tasks: TaskEntry,
) -> Config:
    """The paper's swarm: networks `784=300=100=10` of sigmoid cells; with `quick`, the built-in digits.

    In a quick run hidden cells are tanh: sigmoid cells would stay on their initial plateau during its few
    rounds, and the figure would show no differences.
    """
    inputs, activation = (64, "tanh") if quick else (784, "sigmoid")
    network = Network(layout=f"{inputs}=300=100=10", activation=activation, output="sigmoid")
    return Config(
        name=entry.name, seed=seed, peers=peers, rounds=rounds, data=data, tasks=list(tasks),
        network=network,
    )  # fmt: skip


def _cell(line: str, x: int, swarm: Config, models: list[Model], size: int) -> Cell:
    """A run with mini-batches of `size` samples at the paper's learning rate; half of it for tanh cells."""
    rate = 0.05 if swarm.network.activation == "tanh" else 0.1
    training = Training(local_samples=size, rate=rate, loss="squared", reduction="sum")
    return Cell(line, swarm.model_copy(update={"models": models, "training": training}), {"x": x})


def _level(quick: bool, level: int) -> list[Model]:
    """The models of the paper's averaging level: `784-250-80-10` for 80; nothing is shared for 0."""
    inputs = 64 if quick else 784
    layout = f"{inputs}-{LEVELS[level]}-{level}-10"
    return [Model(name="global", layout=layout)] if level else []


def _data(quick: bool, digits: int | None, mnist: int) -> Data:
    if quick:
        return Data(set="digits", samples=digits, test=360)
    return Data(set="mnist", samples=mnist, test=1000)


def _swap(a: int, b: int, peers: int | list[int]) -> TaskEntry:
    return TaskEntry(kind="swap", labels=(a, b), peers=peers)


def averaging_level(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """V.3.a: how much of a network should be averaged? (figure 17)"""
    rounds, data = 20 if quick else 30, _data(quick, None, 3500)
    cells = [
        _cell(f"{size}", level, swarm, _level(quick, level), size)
        for seed in seeds
        for swarm in [_swarm(entry, quick, seed, 16, rounds, data, _swap(8, 9, 7))]
        for size in ((40, 80) if quick else (50, 100, 200, 500, 1000, 1500, 3000))
        for level in LEVELS
    ]
    caption = (
        "16 peers with 89 of scikit-learn's digits each, 8 and 9 swapped for 7 of them; 20 averagings; tanh "
        "cells."
        if quick
        else "16 peers with 3500 MNIST digits each, 8 and 9 swapped for 7 of them; 30 averagings."
    )
    return figure_study(
        entry, cells, x_label="averaging level", legend="mini-batch size", caption=caption
    )


def _schemes_study(
    entry: StudyEntry,
    quick: bool,
    swarms: Sequence[Config],
    schemes: dict[str, list[Model]],
    sizes: Sequence[int],
    caption: str,
) -> Study[Cell]:
    """Compare `schemes` with the four schemes that are in both experiments."""
    all_schemes = {
        "no averaging": [],
        "100": _level(quick, 100),
        "100 per class": [Model(name="{task}", layout=f"{64 if quick else 784}-300-100-10")],
        "80": _level(quick, 80),
        **schemes,
    }
    cells = [
        _cell(scheme, size, swarm, models, size)
        for swarm in swarms
        for size in sizes
        for scheme, models in all_schemes.items()
    ]
    return figure_study(
        entry, cells, x_label="mini-batch size", legend="averaging scheme", caption=caption
    )


def semi_local(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """V.3.d: a global model, and one for every group of peers with the same task (figure 20)."""

    def groups(*depends: str) -> list[Model]:
        group = Model(name="{task}", layout="0-50-20-0", depends=list(depends))
        return [*_level(quick, 80), group]

    source, rounds = ("110 of scikit-learn's digits", 20) if quick else ("200 MNIST digits", 100)
    data, task = _data(quick, 110, 200), TaskEntry(kind="symmetric", last=3)
    return _schemes_study(
        entry, quick, [_swarm(entry, quick, seed, 12, rounds, data, task) for seed in seeds],
        {
            "80 + 20 per class, no dependency": groups(),
            "80 + 20 per class, dependency": groups("global"),
        },
        (25, 50, 100) if quick else (25, 50, 75, 100, 150),
        f"12 peers with {source} each, all six permutations of the last three labels; "
        f"{rounds} averagings{'; tanh cells' if quick else ''}.",
    )  # fmt: skip


def semi_local_and_local(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """V.3.e: peers 0 and 1 have the same task, 2 and 3 similar tasks; other cells are local (figure 21)."""

    def pairs(*depends: str) -> list[Model]:
        return [
            Model(name="global", layout=f"{64 if quick else 784}-220-70-10"),
            Model(name="alike", layout="0-80-30-0", peers=[0, 1], depends=list(depends)),
            Model(name="half-alike", layout="0-40-15-0", peers=[2, 3], depends=list(depends)),
        ]

    source, rounds = ("350 of scikit-learn's digits", 25) if quick else ("1000 MNIST digits", 50)
    data, tasks = _data(quick, 350, 1000), (_swap(8, 9, [2, 3]), _swap(6, 7, [3]))
    return _schemes_study(
        entry, quick, [_swarm(entry, quick, seed, 4, rounds, data, *tasks) for seed in seeds],
        {"70 + 30 / 15, no dependency": pairs(), "70 + 30 / 15, dependency": pairs("global")},
        (50, 100, 200) if quick else (100, 200, 400, 800),
        f"4 peers with {source} each; 8 and 9 swapped for peers 2 and 3, 6 and 7 for peer 3 as well; "
        f"{rounds} averagings{'; tanh cells' if quick else ''}.",
    )  # fmt: skip


# --- V.5: the associative network on sparse binary vectors -------------------------------------------

_HIDDEN = (0, 100, 200, 300, 350, 400)
_X_LABEL = "averaging level (of 400 hidden cells)"


def _associative(line: str, level: int, seed: int, mini_batches: int, network: Network) -> Cell:
    config = Config(
        name="associative", seed=seed, peers=15, rounds=mini_batches,
        data=Data(set="sparse", samples=9, test=100),
        tasks=[TaskEntry(kind="modified", peers=2)],
        network=network,
        models=[Model(name="global", layout=f"50-{level}")] if level else [],
        training=Training(local_samples=3, rate=0.1),
    )  # fmt: skip
    return Cell(line, config, {"x": level})


def _uniform(low: float, high: float, *, equal: bool) -> Network:
    return Network(
        layout="50<>400", start="uniform", gain=(high - low) / 2, shift=(high + low) / 2,
        equal_starts=equal,
    )  # fmt: skip


def associative(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Figure 27: accuracy by averaged hidden cells."""
    start = _uniform(-0.3, 0.3, equal=False)
    cells = [
        _associative(f"{count}", level, seed, count, start)
        for seed in seeds
        for count in ((10, 40) if quick else (10, 20, 30, 40))
        for level in _HIDDEN
    ]
    caption = (
        "15 peers, one of three vectors changed for 2 of them. The paper does not give the starting "
        "weights; here they are uniform in [−0.3, 0.3], drawn per peer. Complete averaging is the worst, "
        "as in the paper, but partial averaging gains nothing over none, and more mini-batches change "
        "little: no initialisation that was tried shows both of the paper's claims. See associative-starts."
    )
    return figure_study(entry, cells, x_label=_X_LABEL, legend="mini-batches", caption=caption)


# The paper does not say how weights are initialised, and its figure depends on it. About fifty uniform
# distributions between −1 and 1 were tried, drawn per peer ("own") or the same on all peers ("equal"). These
# show every outcome.
STARTS = {
    "[−1, 1], own": _uniform(-1, 1, equal=False),
    "[−0.3, 0.3], own": _uniform(-0.3, 0.3, equal=False),
    "[−0.15, 0.12], own": _uniform(-0.15, 0.12, equal=False),
    "[−0.15, 0.12], equal": _uniform(-0.15, 0.12, equal=True),
    "[−0.12, 0.1], equal": _uniform(-0.12, 0.1, equal=True),
}


def associative_starts(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Compare initial weights: which of them show the paper's curve?"""
    cells = [
        _associative(name, level, seed, 10, network)
        for seed in seeds
        for name, network in STARTS.items()
        for level in ((0, 200, 400) if quick else _HIDDEN)
    ]
    caption = (
        "Which initial weights show the paper's two claims? Partial averaging beats complete averaging: "
        "weights drawn per peer ('own') in small intervals ([−0.3, 0.3]). Averaging beats no averaging: "
        "equal weights just above the threshold at which cells fire ([−0.15, 0.12]), but complete as much as "
        "partial. Both claims: none that was tried; at the threshold itself ([−0.12, 0.1]) it depends on the "
        "seed. Wide intervals: neither."
    )
    return figure_study(entry, cells, x_label=_X_LABEL, legend="starting weights", caption=caption)
