"""The experiments of the paper on partial models (003): how much peers should average, and with which peers.

docs/explanation/vocabulary.md explains the layouts: `784=300=100=10` is a network with 300 and 100 cells in
its hidden layers, `784-250-80-10` are the cells of it that belong to one partial model, and `50<>400` is an
associative network. A cell is a neuron, except in the name `Cell`: a cell of a study is one run of its grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..arena.simulation import Simulation
from ..config.tables import Config, Data, Model, Network, TaskEntry, Training
from ..results import Record
from ..study import C, EachCell, Frame, Job, Study, as_text, frame_of
from ..study.sweep import Cell, Outcome, load_for_runs, run_cells, stackable_batches
from . import StudyEntry

AUTO: Literal["auto"] = "auto"
"""The scheme of peers that decide by themselves what they share, and the name of its curve."""


def figure_study(
    entry: StudyEntry,
    runs: Sequence[C],
    *,
    x_label: str,
    legend: str,
    caption: str,
    rearrange: Callable[[Sequence[Record]], Sequence[Record]] = lambda records: records,
    run: Callable[[list[C], Job], list[Record]] = run_cells,
) -> Study[C]:
    """Return the study of one figure, which shows the median accuracy over seeds by curve and x.

    entry: the study's entry in the table of papers, with its name, title and origin.
    runs: one cell per run, of all seeds; `line` is the name of its curve, and `settings["x"]` its x. A run
        with `sharing = "auto"` has no averaging level: where x is one, its x is None, and the figure has a
        dashed line at its accuracy. A run without an x is tested every `test_every` mini-batches, and
        has a point of the curve for each test (see `run_with_tests`).
    legend: the title of the legend, which says what the curves' names mean.
    rearrange: turns the records of the runs into those of the figure's points; by default they are equal.
    run: runs a batch of cells; by default those of configs, small networks of several runs in one stack.
    """

    def table(records: Sequence[Record]) -> dict[str, Frame]:
        titles = {
            "line": legend, "x": x_label, "low": "second quintile", "high": "third quintile",
        }  # fmt: skip
        formats = dict.fromkeys(("median", "low", "high", "mean", "deviation"), ".4f")
        frame = as_text(points(rearrange(records)), {"x": "g", **formats})
        frame["x"] = frame["x"].replace("", AUTO)
        return {"summary": frame.rename(columns=titles)}

    def figure(folder: Path, records: Sequence[Record]) -> list[Path]:
        from ..study.figures import draw_lines

        medians = points(rearrange(records))
        count = int(medians["runs"].min())
        full_caption = (
            f"{entry.origin}. A point is the median of {count} run{'s' * (count != 1)}. A bar goes from the "
            "second to the third quintile, as in paper 003: from the quantile 0.4 to 0.6, so it holds the "
            f"middle fifth of the runs.\n{caption}"
        )
        return draw_lines(
            folder / "figure", medians, ("line", "x", "median", "low", "high"),
            title=entry.title, x_label=x_label, legend=legend, caption=full_caption,
        )  # fmt: skip

    def latest(record: Record) -> str:
        x = f" at {record['settings']['x']}" if "x" in record["settings"] else ""
        return f"{record['line']}{x}: {record['accuracy']:.3f}"

    study = Study(entry.name, runs, run, table, figure, latest=latest)
    return replace(study, batches=stackable_batches) if run is run_cells else study


def run_with_tests(cell: Cell, job: Job) -> Record:
    """Run one cell; the record has the mean accuracy after every `test_every` mini-batches.

    Peers may train several mini-batches between two averagings (`every`); tests between them show the
    peers' own progress.
    """
    config = cell.config
    by_mini_batch = config.model_copy(update={"every": 1, "gain": 0.0})
    simulation = Simulation.of(by_mini_batch, cell.source, warn=False, load_data=load_for_runs)
    arena = simulation.arena(job.threads)
    tests: list[tuple[int, float]] = []
    for number in range(1, config.round_count * config.every + 1):
        if number % config.every:
            arena.train()
        else:
            arena.train_and_average()
        if number % config.test_every == 0:
            tests.append((number, Outcome.of(arena.test()).accuracy))
    return {
        "line": cell.line, "settings": dict(cell.settings), "seed": config.seed,
        "accuracy": tests[-1][1], "tests": tests,
    }  # fmt: skip


def points(records: Sequence[Record]) -> Frame:
    """Return a row for every curve and x: runs, median, quantiles 0.4 (low) and 0.6 (high), mean, deviation.

    Curves are in the order in which they first appear, and x increases; NaN is last.
    """
    rows = [
        {"line": record["line"], "x": x, "accuracy": accuracy}
        for record in records
        for x, accuracy in record.get("tests") or [(record["settings"]["x"], record["accuracy"])]
    ]
    groups = frame_of(rows, ordered=["line"]).groupby(["line", "x"], observed=True, dropna=False)
    accuracies = groups["accuracy"]
    columns = {
        "runs": accuracies.size(), "median": accuracies.median(), "low": accuracies.quantile(0.4),
        "high": accuracies.quantile(0.6), "mean": accuracies.mean(),
        "deviation": accuracies.std(),
    }  # fmt: skip
    return frame_of(columns).reset_index().astype({"line": str})


# --- V.3: perceptrons --------------------------------------------------------------------------------

FIRST_LAYER_CELLS = {0: 0, 15: 50, 30: 100, 60: 200, 80: 250, 100: 300}
"""The paper's averaging levels. A level is the number of cells of the second hidden layer, of 100, in the
global model; the value is the number of cells of the first hidden layer, of 300, that go with it."""
Scheme: TypeAlias = list[Model] | Literal["auto"]
"""What peers share: these partial models, or what they decide by themselves."""
SWAPPED = (TaskEntry(kind="swap", labels=(8, 9), peers=7),)
"""The usual tasks: labels 8 and 9 are swapped for the first 7 peers."""


@dataclass(frozen=True)
class Setup:
    """A swarm of the paper, except for what it shares.

    study: the name of the study, which is that of its configs. mini_batch: samples between two averagings.

    Cells are sigmoid. With the digits, in a quick run, hidden cells are tanh, and the rate is half the
    paper's: sigmoid cells would hardly learn during the few rounds, and the figure would show no differences.
    """

    study: str
    data: Data
    rounds: int
    mini_batch: int
    layout: str = "784=300=100=10"
    peers: int = 16
    tasks: Sequence[TaskEntry] = SWAPPED
    every: int = 1
    test_every: int = 1

    @property
    def quick(self) -> bool:
        """Whether the data are scikit-learn's digits."""
        return self.data.set == "digits"

    def run(self, seed: int, curve: str, scheme: Scheme, **settings: int | None) -> Cell:
        """Return one run of this swarm, which shares by a scheme; settings: the run's `x`, if it has one."""
        config = Config(
            name=self.study, seed=seed, peers=self.peers, rounds=self.rounds, every=self.every,
            test_every=self.test_every, data=self.data, tasks=list(self.tasks),
            network=Network(
                layout=self.layout, activation="tanh" if self.quick else "sigmoid", output="sigmoid"
            ),
            training=Training(
                local_samples=self.mini_batch, rate=0.05 if self.quick else 0.1, loss="squared",
                reduction="sum",
            ),
            models=[] if scheme == AUTO else scheme,
            sharing="auto" if scheme == AUTO else "models",
        )  # fmt: skip
        return Cell(curve, config, settings)

    def shared(self, first: int, second: int) -> list[Model]:
        """Return the global model with these cells of the hidden layers; no model for 0."""
        inputs, *_, outputs = self.layout.split("=")
        layout = f"{inputs}-{first}-{second}-{outputs}"
        return [Model(name="global", layout=layout)] if second else []

    def levels(self, levels: Iterable[int] = FIRST_LAYER_CELLS) -> dict[str, Scheme]:
        """Return the schemes of averaging levels (`784-250-80-10` for 80), and `auto`, by their names."""
        schemes = {f"{level}": self.shared(FIRST_LAYER_CELLS[level], level) for level in levels}
        return {**schemes, AUTO: AUTO}


def _setup(
    entry: StudyEntry, quick: bool, rounds: int, mini_batch: int = 0, digits: int | None = None,
    mnist: int = 3500, **others: Any,
) -> Setup:  # fmt: skip
    """Return a setup with so many samples of MNIST for each peer, or, in a quick run, of the digits.

    digits: None divides all of them among the peers.
    """
    if quick:
        data, inputs = Data(set="digits", samples=digits, test=360), 64
    else:
        data, inputs = Data(set="mnist", samples=mnist, test=1000), 784
    return Setup(entry.name, data, rounds, mini_batch, f"{inputs}=300=100=10", **others)


def _tanh_note(quick: bool) -> str:
    """Return the sentence that a quick run's caption ends with."""
    return " Hidden cells are tanh." if quick else ""


def averaging_level(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.3.a of the paper: how much of a network should be averaged? (figure 17)"""
    setup = _setup(entry, quick, 20 if quick else 30)
    runs = [
        replace(setup, mini_batch=size).run(seed, f"{size}", scheme, x=x)
        for seed in seeds
        for size in ((40, 80) if quick else (50, 100, 200, 500, 1000, 1500, 3000))
        for x, scheme in zip((*FIRST_LAYER_CELLS, None), setup.levels().values(), strict=True)
    ]
    source = "89 of scikit-learn's digits" if quick else "3500 MNIST digits"
    caption = (
        f"16 peers have {source} each; labels 8 and 9 are swapped for 7 of the peers. The averaging level is "
        "the number of cells, of 100 in the second hidden layer, that all peers share. Peers averaged "
        f"{setup.rounds} times. Dashed: peers decide by themselves what they share.{_tanh_note(quick)}"
    )
    return figure_study(
        entry, runs, x_label="averaging level", legend="mini-batch size", caption=caption
    )


def _schemes_study(
    entry: StudyEntry,
    seeds: range,
    setup: Setup,
    schemes: dict[str, Scheme],
    mini_batches: Sequence[int],
    caption: str,
) -> Study[Cell]:
    """Return the study that compares `schemes` with the four schemes of both following experiments.

    A scheme is the list of partial models that peers share; its name is that of a curve. Numbers in a name
    are cells of the second hidden layer.
    """
    (everything,) = setup.shared(300, 100)
    all_schemes: dict[str, Scheme] = {
        "no averaging": [],
        "global 100": [everything],
        "100 per task": [everything.model_copy(update={"name": "{task}"})],
        "global 80": setup.shared(250, 80),
        **schemes,
        AUTO: AUTO,
    }
    runs = [
        replace(setup, mini_batch=size).run(seed, name, scheme, x=size)
        for seed in seeds
        for size in mini_batches
        for name, scheme in all_schemes.items()
    ]
    caption += (
        f" Peers averaged {setup.rounds} times. Numbers in the legend are cells, of 100 in the second hidden "
        "layer: those that all peers share (global) and those that peers with the same task share (per "
        f"task). auto: peers decide by themselves.{_tanh_note(setup.quick)}"
    )
    return figure_study(
        entry, runs, x_label="mini-batch size", legend="averaging scheme", caption=caption
    )


def semi_local(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.3.d of the paper: a global model, and one per group of peers with the same task (figure 20)."""
    setup = _setup(
        entry, quick, 20 if quick else 100, digits=110, mnist=200, peers=12,
        tasks=[TaskEntry(kind="symmetric", last=3)],
    )  # fmt: skip

    def global_and_task(*depends: str) -> list[Model]:
        task_model = Model(name="{task}", layout="0-50-20-0", depends=list(depends))
        return [*setup.shared(250, 80), task_model]

    source = "110 of scikit-learn's digits" if quick else "200 MNIST digits"
    return _schemes_study(
        entry, seeds, setup,
        {
            "global 80 + 20 per task, no dependency": global_and_task(),
            "global 80 + 20 per task, dependency": global_and_task("global"),
        },
        (25, 50, 100) if quick else (25, 50, 75, 100, 150),
        f"12 peers have {source} each. Each of the six permutations of the last three labels is the task of "
        "two peers.",
    )  # fmt: skip


def semi_local_and_local(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.3.e of the paper: global, semi-local and local models together (figure 21).

    Peers 0 and 1 have the same task and share a large semi-local model; 2 and 3 have similar tasks and share
    a small one. The cells that are left are local to each peer.
    """
    swaps = [((8, 9), [2, 3]), ((6, 7), [3])]
    setup = _setup(
        entry, quick, 25 if quick else 50, digits=350, mnist=1000, peers=4,
        tasks=[TaskEntry(kind="swap", labels=labels, peers=peers) for labels, peers in swaps],
    )  # fmt: skip

    def global_and_pairs(*depends: str) -> list[Model]:
        return [
            *setup.shared(220, 70),
            Model(name="alike", layout="0-80-30-0", peers=[0, 1], depends=list(depends)),
            Model(name="half-alike", layout="0-40-15-0", peers=[2, 3], depends=list(depends)),
        ]

    source = "350 of scikit-learn's digits" if quick else "1000 MNIST digits"
    return _schemes_study(
        entry, seeds, setup,
        {
            "global 70 + 30 or 15 per pair, no dependency": global_and_pairs(),
            "global 70 + 30 or 15 per pair, dependency": global_and_pairs("global"),
        },
        (50, 100, 200) if quick else (100, 200, 400, 800),
        f"4 peers have {source} each. Labels 8 and 9 are swapped for peers 2 and 3; 6 and 7 are swapped for "
        "peer 3 as well. With pairs, peers 0 and 1 share 30 cells more than all four, peers 2 and 3 share 15 "
        "more.",
    )  # fmt: skip


_LEVELS_NOTE = (
    "The averaging level is the number of cells, of 100 in the second hidden layer, that all peers share; "
    "auto: peers decide by themselves what they share."
)


def convergence(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.3.b of the paper: accuracy over time, averaging after every ten mini-batches (figure 18)."""
    setup = _setup(entry, quick, *((6, 20) if quick else (3, 100)), every=10)
    levels = setup.levels((0, 80, 100))
    runs = [setup.run(seed, name, scheme) for seed in seeds for name, scheme in levels.items()]
    caption = (
        f"16 peers; labels 8 and 9 are swapped for 7 of them. They train mini-batches of {setup.mini_batch} "
        f"samples, and average after every tenth. {_LEVELS_NOTE}{_tanh_note(quick)}"
    )
    return figure_study(
        entry, runs, x_label="mini-batches", legend="averaging level", caption=caption,
        run=EachCell(run_with_tests),
    )  # fmt: skip


def _levels_study(
    entry: StudyEntry, seeds: range, setups: Mapping[int, Setup], x_label: str, caption: str
) -> Study[Cell]:
    """Return a study with a curve for every averaging level; setups: by x."""
    runs = [
        setup.run(seed, name, scheme, x=x)
        for seed in seeds
        for x, setup in setups.items()
        for name, scheme in setup.levels().items()
    ]
    first = next(iter(setups.values()))
    full_caption = (
        f"{caption} They averaged {first.rounds} times, after every {first.mini_batch} samples. "
        f"{_LEVELS_NOTE}{_tanh_note(first.quick)}"
    )
    return figure_study(
        entry, runs, x_label=x_label, legend="averaging level", caption=full_caption
    )


def _swapped_for(peers: int) -> list[TaskEntry]:
    """Return the tasks of a swarm in which labels 8 and 9 are swapped for the first peers."""
    return [SWAPPED[0].model_copy(update={"peers": peers})]


def _rotated(rate: int) -> list[TaskEntry]:
    """Return the tasks of a difference rate: the last `rate` labels are rotated for 7 peers."""
    return [TaskEntry(kind="cycle", last=rate, peers=7)] if rate else []


def number_of_peers(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.3.c of the paper: accuracy by the number of peers, a quarter of them with 8 and 9 swapped."""
    setup = _setup(entry, quick, *((20, 80) if quick else (30, 500)), digits=85)
    setups = {
        peers: replace(setup, peers=peers, tasks=_swapped_for(peers // 4))
        for peers in ((4, 8, 16) if quick else (4, 8, 12, 16))
    }
    return _levels_study(
        entry, seeds, setups, "number of peers",
        f"Peers have {setup.data.samples} samples each; labels 8 and 9 are swapped for a quarter of them.",
    )  # fmt: skip


def difference_rate(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.3.f of the paper: accuracy by the number of labels that differ between peers (figure 22)."""
    setup = _setup(entry, quick, *((20, 80) if quick else (30, 500)))
    rates = (0, 2, 6, 10) if quick else (0, 2, 4, 6, 8, 10)
    return _levels_study(
        entry, seeds, {rate: replace(setup, tasks=_rotated(rate)) for rate in rates},
        "difference rate",
        "The difference rate is the number of labels, counted from 9 downwards, that are rotated for 7 of 16 "
        "peers.",
    )  # fmt: skip


def permuted_peers(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.3.g of the paper: accuracy by the number of peers with 8 and 9 swapped (figure 23)."""
    setup = _setup(entry, quick, *((20, 80) if quick else (30, 500)))
    counts = (0, 4, 8) if quick else (0, 2, 4, 6, 8)
    return _levels_study(
        entry, seeds, {count: replace(setup, tasks=_swapped_for(count)) for count in counts},
        "peers with swapped labels", "Labels 8 and 9 are swapped for some of 16 peers.",
    )  # fmt: skip


def training_size(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.3.h of the paper: accuracy by the number of training samples of a peer (figure 24)."""
    setups = {
        size: _setup(entry, quick, *((30, 40) if quick else (50, 200)), digits=size, mnist=size)
        for size in ((20, 40, 85) if quick else (250, 500, 1000, 2000, 3500))
    }
    return _levels_study(
        entry, seeds, setups, "training samples of a peer",
        "Labels 8 and 9 are swapped for 7 of 16 peers.",
    )  # fmt: skip


def layouts(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.3.i of the paper: networks of four and five layers, and which cells they share (figure 25)."""
    setup = _setup(entry, quick, *((30, 80) if quick else (50, 500)))
    inputs = setup.layout.partition("=")[0]
    schemes: dict[tuple[str, str], Scheme] = {}  # by the layout of the network, and the curve
    for layout, cells in {
        setup.layout: ("300-100-10", "250-80-10", "300-100-0"),
        f"{setup.layout}=10": ("300-100-10-10", "250-80-10-10", "300-100-10-0"),
    }.items():
        layers = f"{layout.count('=') + 1} layers"
        schemes[layout, f"{layers}: no averaging"] = []
        for shared in (f"{inputs}-{later_layers}" for later_layers in cells):
            schemes[layout, f"{layers}: {shared}"] = [Model(name="global", layout=shared)]
        schemes[layout, f"{layers}: {AUTO}"] = AUTO
    runs = [
        replace(setup, layout=layout, tasks=_rotated(rate)).run(seed, name, scheme, x=rate)
        for seed in seeds
        for rate in ((0, 6) if quick else (0, 2, 4, 6, 8, 10))
        for (layout, name), scheme in schemes.items()
    ]
    caption = (
        "The difference rate is the number of labels, counted from 9 downwards, that are rotated for 7 of 16 "
        f"peers. They averaged {setup.rounds} times, after every {setup.mini_batch} samples. Curves are "
        "named by the cells of every layer that all peers share; auto: peers decide by themselves."
        f"{_tanh_note(quick)}"
    )
    return figure_study(
        entry, runs, x_label="difference rate", legend="layers, and shared cells", caption=caption
    )


# --- V.5: the associative network on sparse binary vectors -------------------------------------------

_HIDDEN_CELLS = (0, 100, 200, 300, 350, 400)
"""Averaging levels of the associative network: how many of its hidden cells are in the global model."""
_X_LABEL = "averaging level (of 400 hidden cells)"


def _associative_run(
    curve: str, level: int, seed: int, mini_batches: int, network: Network
) -> Cell:
    """Return one run of the associative network, which averages after each of its mini-batches."""
    config = Config(
        name="associative", seed=seed, peers=15, rounds=mini_batches,
        data=Data(set="sparse", samples=9, test=100),
        tasks=[TaskEntry(kind="modified", peers=2)],
        network=network,
        models=[Model(name="global", layout=f"50-{level}")] if level else [],
        training=Training(local_samples=3, rate=0.1),
    )  # fmt: skip
    return Cell(curve, config, {"x": level})


def _network_with_uniform_start(low: float, high: float, *, equal: bool) -> Network:
    """Return the network table of an associative network whose weights start uniform in [low, high].

    equal: whether the starting weights are the same on all peers, or drawn for each peer.
    """
    return Network(
        layout="50<>400", start="uniform", gain=(high - low) / 2, shift=(high + low) / 2,
        equal_starts=equal,
    )  # fmt: skip


def associative(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.5 of the paper: accuracy by the number of averaged hidden cells (figure 27)."""
    network = _network_with_uniform_start(-0.3, 0.3, equal=False)
    runs = [
        _associative_run(f"{mini_batches}", level, seed, mini_batches, network)
        for seed in seeds
        for mini_batches in ((10, 40) if quick else (10, 20, 30, 40))
        for level in _HIDDEN_CELLS
    ]
    caption = (
        "There are 15 peers; one of three vectors is changed for 2 of them. The paper does not give the "
        "starting weights; here they are uniform in [−0.3, 0.3] and drawn per peer. Averaging all hidden "
        "cells is the worst, as in the paper. But averaging some gains nothing over averaging none, and more "
        "mini-batches change little. No starting weights that were tried show both of the paper's claims: "
        "see the study associative-starts."
    )
    return figure_study(entry, runs, x_label=_X_LABEL, legend="mini-batches", caption=caption)


# The paper does not say how weights are initialised, and its figure depends on it. About fifty uniform
# distributions between −1 and 1 were tried, drawn per peer ("own") or the same on all peers ("equal"). These
# show every outcome.
STARTS = {
    "[−1, 1], own": _network_with_uniform_start(-1, 1, equal=False),
    "[−0.3, 0.3], own": _network_with_uniform_start(-0.3, 0.3, equal=False),
    "[−0.15, 0.12], own": _network_with_uniform_start(-0.15, 0.12, equal=False),
    "[−0.15, 0.12], equal": _network_with_uniform_start(-0.15, 0.12, equal=True),
    "[−0.12, 0.1], equal": _network_with_uniform_start(-0.12, 0.1, equal=True),
}


def associative_starts(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study which starting weights show the curve of the paper's figure 27."""
    runs = [
        _associative_run(start, level, seed, mini_batches=10, network=network)
        for seed in seeds
        for start, network in STARTS.items()
        for level in ((0, 200, 400) if quick else _HIDDEN_CELLS)
    ]
    caption = (
        "Starting weights are uniform in an interval, and drawn per peer ('own') or the same on all peers "
        "('equal'). The paper has two claims. The first, that averaging some hidden cells beats averaging "
        "all, holds for own weights in small intervals ([−0.3, 0.3]). The second, that averaging beats no "
        "averaging, holds for equal weights just above the threshold at which cells fire ([−0.15, 0.12]), "
        "but for all cells as much as for some. No starting weights that were tried show both. At the "
        "threshold itself ([−0.12, 0.1]) it depends on the seed; in wide intervals neither claim holds."
    )
    return figure_study(entry, runs, x_label=_X_LABEL, legend="starting weights", caption=caption)
