"""`gossamer study auto`: a swarm that decides by itself what to share, compared with fixed schemes.

Sixteen peers learn digits or activities. In each benchmark their tasks differ in another way: labels, inputs,
class shares, writers, or not at all. The same runs are made with fixed schemes (nothing shared, everything,
everything but the outputs or the norms, 80 % of the cells), with the partial models that somebody who knew
the differences would write by hand, and with `AutoSharing`, which does not know the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models import (
    Part,
    SgdLearner,
    SlicedNetwork,
    Start,
    discover,
    norm_layers,
    resnet,
    seeded_rng,
)
from ...models.sharing import NORM_PARTS, OWN, Assignment, AutoOptions
from ..arena import Arena, AutoSharing
from ..data import Samples, Task, load_once, partition
from ..results import Record
from ..study import EachCell, Frame, Job, Study, StudyCell, as_text, frame_of

if TYPE_CHECKING:
    from . import StudyEntry

PEERS = 16
FIRST_SEED = 7000
"""The first seed of the full study: the results of lower seeds were seen while constants were chosen."""
LAST_ROUNDS = 5
"""Accuracy is the mean over this many last rounds: that of a single round is noisy, above all with batch
norm."""
LOCAL_SAMPLES, BATCH, RATE = 160, 10, 0.05
TEST_SAMPLES = 500
"""Test samples per peer."""

FIXED_SCHEMES = ("local", "all shared", "outputs own", "norms own", "80 % of cells")
"""The schemes that do not depend on the benchmark: what peers keep for themselves ("own")."""
BY_HAND, AUTO = "by hand", "auto"
"""The scheme that somebody who knows the benchmark would write, and the swarm that decides by itself."""
Labels = tuple[int, ...]
"""The group of every peer."""
NetworkName = Literal["perceptron", "normed perceptron", "resnet"]


@dataclass(eq=False)
class SwarmData:
    """The training and test samples of all peers in one benchmark.

    groups: the group of every peer, if all peers of a group have the same task. later: the training and test
    labels of all peers after a third of the rounds, if tasks change.
    """

    train: list[tuple[Tensor, Tensor]]
    test: list[tuple[Tensor, Tensor]]
    groups: Labels | None = None
    later: tuple[list[Tensor], list[Tensor]] | None = None


@dataclass(frozen=True)
class Benchmark:
    """One way in which peers differ.

    make: returns the data, given a seed, the number of training samples per peer, and whether it is quick.
    by_hand: the parts (input, outputs or norms) that somebody who knew the difference would let each group
        average, or each peer keep if there are no groups; empty to share everything.
    samples: training samples per peer.
    """

    name: str
    title: str
    make: Callable[[int, int, bool], SwarmData]
    by_hand: tuple[str, ...] = ()
    samples: int = 400
    rounds: int = 30
    network: NetworkName = "perceptron"


@dataclass(frozen=True)
class Cell(StudyCell):
    """One run: a benchmark and a seed; the scheme is `line`.

    options: the constants of the procedure, if the scheme is `auto`.
    """

    benchmark: str
    seed: int
    quick: bool
    rounds: int
    options: AutoOptions | None = None


# --- data ---------------------------------------------------------------------------------------


def _flat_samples(samples: Samples) -> tuple[Tensor, Tensor]:
    """Return inputs as flat vectors, images at 14×14 pixels or less, and labels."""
    x = samples.x
    while x.ndim == 4 and x.shape[-1] > 14:
        x = F.avg_pool2d(x, 2)
    return x.flatten(1), samples.y


def _digits_swarm(
    seed: int, samples: int, quick: bool, change: Callable[[int, Samples], Samples] | None = None
) -> SwarmData:
    """Return random digits for every peer, changed for each peer by `change(peer, samples)`."""
    data = load_once("digits" if quick else "mnist")
    assert data.test is not None
    count = min(samples, len(data.train) // PEERS)
    parts = partition.iid(len(data.train), PEERS, count, seed)
    generator = seeded_rng(seed, "test samples")
    swarm = SwarmData([], [])
    for peer, indices in enumerate(parts):
        test = data.test.take(generator.permutation(len(data.test))[:TEST_SAMPLES])
        for target, part in ((swarm.train, data.train.take(indices)), (swarm.test, test)):
            target.append(_flat_samples(part if change is None else change(peer, part)))
    return swarm


def _relabelled_swarm(
    seed: int, samples: int, quick: bool, tasks: Sequence[Task], groups: Labels
) -> SwarmData:
    """Return random digits for every peer, with the labels of its group's task."""
    swarm = _digits_swarm(
        seed, samples, quick, lambda peer, part: replace(part, y=tasks[groups[peer]].apply(part.y))
    )
    return replace(swarm, groups=groups if len(set(groups)) < PEERS else None)


def swapped_for_some(seed: int, samples: int, quick: bool) -> SwarmData:
    """Return data in which labels 8 and 9 are swapped for seven peers."""
    chosen = seeded_rng(seed, "swapped").permutation(PEERS)[:7].tolist()
    groups = tuple(int(peer in chosen) for peer in range(PEERS))
    return _relabelled_swarm(seed, samples, quick, [Task.identity(10), Task.swap(10, 8, 9)], groups)


def own_swaps(seed: int, samples: int, quick: bool) -> SwarmData:
    """Return data in which two labels are swapped for every peer, another pair for each."""
    pairs = [(a, b) for a in range(10) for b in range(a)]
    chosen = seeded_rng(seed, "pairs").permutation(len(pairs))[:PEERS].tolist()
    tasks = [Task.swap(10, *pairs[index]) for index in chosen]
    return _relabelled_swarm(seed, samples, quick, tasks, tuple(range(PEERS)))


def three_tasks(seed: int, samples: int, quick: bool) -> SwarmData:
    """Return data of three groups of peers, each with its own permutation of all labels."""
    generator = seeded_rng(seed, "permutations")
    tasks = [Task(f"task {index}", tuple(generator.permutation(10).tolist())) for index in range(3)]
    groups = tuple(generator.permutation(np.arange(PEERS) % 3).tolist())
    return _relabelled_swarm(seed, samples, quick, tasks, groups)


def later_swapped(seed: int, samples: int, quick: bool) -> SwarmData:
    """Return data in which all tasks are equal at first; later labels 8 and 9 are swapped for seven peers."""
    later = swapped_for_some(seed, samples, quick)
    labels = [y for _, y in later.train], [y for _, y in later.test]
    return replace(_digits_swarm(seed, samples, quick), groups=later.groups, later=labels)


def skewed_classes(seed: int, samples: int, quick: bool) -> SwarmData:
    """Return data in which the class shares of every peer, in tests too, are drawn from Dirichlet(0.3)."""
    data = load_once("digits" if quick else "mnist")
    assert data.test is not None
    generator, swarm = seeded_rng(seed, "class shares"), SwarmData([], [])
    # Indices of training samples that no peer has yet, and of all test samples, by class.
    free = [generator.permutation(np.flatnonzero(data.train.y == c)).tolist() for c in range(10)]
    tests = [np.flatnonzero(data.test.y == c) for c in range(10)]
    count = min(samples, len(data.train) // PEERS)
    for _ in range(PEERS):
        shares = generator.dirichlet(np.full(10, 0.3))
        counts = generator.multinomial(count, shares).tolist()
        train = [free[c].pop() for c in range(10) for _ in range(min(counts[c], len(free[c])))]
        test = np.concatenate(
            [
                generator.choice(tests[c], n)
                for c, n in enumerate(generator.multinomial(TEST_SAMPLES, shares))
            ]
        )
        swarm.train.append(_flat_samples(data.train.take(generator.permutation(train))))
        swarm.test.append(_flat_samples(data.test.take(test)))
    return swarm


def rotated(seed: int, samples: int, quick: bool) -> SwarmData:
    """Return data in which the images of peer i are rotated by i · 22.5°."""

    def rotate(peer: int, part: Samples) -> Samples:
        angle = torch.deg2rad(torch.tensor(22.5 * peer))
        cos, sin = torch.cos(angle).item(), torch.sin(angle).item()
        matrix = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(part), 2, 3)
        grid = F.affine_grid(matrix, list(part.x.shape), align_corners=False)
        return replace(part, x=F.grid_sample(part.x, grid, align_corners=False))

    return _digits_swarm(seed, samples, quick, rotate)


def inverted(seed: int, samples: int, quick: bool) -> SwarmData:
    """Return data in which the images of every second peer are inverted."""
    swarm = _digits_swarm(
        seed, samples, quick, lambda peer, part: replace(part, x=1 - part.x) if peer % 2 else part
    )
    return replace(swarm, groups=tuple(peer % 2 for peer in range(PEERS)))


def inverted_images(seed: int, samples: int, quick: bool) -> SwarmData:
    """Return the data of `inverted` with samples as images, not as flat vectors."""
    swarm = inverted(seed, samples, quick)
    side = round(swarm.train[0][0].shape[1] ** 0.5)
    train, test = (
        [(x.view(-1, 1, side, side), y) for x, y in peers] for peers in (swarm.train, swarm.test)
    )
    return replace(swarm, train=train, test=test)


def _grouped_swarm(seed: int, samples: int, quick: bool, *, name: str) -> SwarmData:
    """Return the samples of one group (a writer or a person) of a data set for every peer.

    In a quick run, they are random digits.
    """
    if quick:
        return _digits_swarm(seed, samples, quick)
    data = load_once(name)
    groups = partition.by_group(data.train.group, PEERS, None, seeded_rng(seed, "groups"))
    generator, swarm = seeded_rng(seed, "halves"), SwarmData([], [])
    for indices in groups:
        order = generator.permutation(indices)
        swarm.train.append(_flat_samples(data.train.take(order[:samples])))
        swarm.test.append(_flat_samples(data.train.take(order[samples : samples + TEST_SAMPLES])))
    return swarm


writers, persons = (partial(_grouped_swarm, name=name) for name in ("pendigits", "hapt"))
"""Return the pen digits of one writer, or the activities of one person, for every peer."""
BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("a", "labels 8 and 9 swapped for 7 of 16", swapped_for_some, ("outputs",)),
        Benchmark("b", "every peer its own swap", own_swaps, ("outputs",)),
        Benchmark("c", "no difference", _digits_swarm),
        Benchmark("c, 20 samples", "no difference, 20 samples each", _digits_swarm, samples=20),
        Benchmark("c, 1600 samples", "no difference, 1600 samples each", _digits_swarm, samples=1600),
        Benchmark("d", "3 groups of permuted labels", three_tasks, ("outputs",)),
        Benchmark("e", "class shares from Dirichlet(0.3)", skewed_classes, ("outputs",)),
        Benchmark("f", "persons of HAPT", persons, ("norms",), 120, 90, "normed perceptron"),
        Benchmark("gp", "pen digits by writer", writers, ("outputs",), 100),
        Benchmark("h", "inputs rotated by 22.5° · i", rotated, ("input", "norms"),
                  network="normed perceptron"),
        Benchmark("hi", "inputs inverted for every second", inverted, ("input", "norms"),
                  network="normed perceptron"),
        Benchmark("hi, deep", "inputs inverted for every second, ResNet", inverted_images,
                  ("input", "norms"), network="resnet"),
        Benchmark("drift", "8 and 9 swapped for 7 from round 15 on", later_swapped, ("outputs",),
                  rounds=45),
    )
}  # fmt: skip


# --- runs ---------------------------------------------------------------------------------------


def run_cell(cell: Cell, job: Job) -> Record:
    """Train one swarm under one scheme, and return its accuracies and decisions."""
    benchmark = BENCHMARKS[cell.benchmark]
    seed = cell.seed if cell.quick else FIRST_SEED + cell.seed
    swarm = benchmark.make(seed, benchmark.samples, cell.quick)
    learners = make_learners(swarm, benchmark.network, seed)
    sharing = AutoSharing(cell.options, seed=seed) if cell.line == AUTO else None
    if sharing is None:
        networks = [learner.network for learner in learners]
        assignment = fixed_assignment(cell.line, benchmark, networks, swarm.groups)
        for network in networks:
            slices, graph = assignment.slices(network.peer)
            network.reslice(slices, graph, anatomy=assignment.anatomy)
    arena = Arena(learners, sharing=sharing, threads=job.threads)
    rounds_before_change = cell.rounds // 3 if swarm.later else 0
    accuracies = [round.accuracy for round in arena.run(rounds_before_change)]
    if swarm.later:
        _change_labels(learners, swarm, sharing)
        arena.renew()
    accuracies += [round.accuracy for round in arena.run(cell.rounds - rounds_before_change)]
    groupings = sharing.assignment.schemes[OWN + 1 :] if sharing else ()
    return {
        "benchmark": cell.benchmark, "scheme": cell.line, "seed": seed,
        "accuracy": float(np.mean(accuracies[-LAST_ROUNDS:])), "by_round": accuracies,
        "decisions": [str(decision) for decision in sharing.decisions] if sharing else [],
        "groups": [list(labels) for labels in groupings], "truth": swarm.groups,
        "rand": _best_rand_index(groupings, swarm.groups),
    }  # fmt: skip


def make_learners(swarm: SwarmData, network: NetworkName, seed: int) -> list[SgdLearner]:
    """Return a learner for every peer; all have the same initial values."""
    inputs = swarm.train[0][0]
    classes = 1 + max(int(y.max()) for _, y in (*swarm.train, *swarm.test))
    anatomy = discover(_module(network, inputs.shape[1], classes), inputs[:2])
    return [
        SgdLearner(
            SlicedNetwork(
                _module(network, inputs.shape[1], classes), {"global": 1.0},
                anatomy=anatomy, peer=f"peer{peer}", rest=None, seed=seed, start=Start(gain=2**0.5),
            ),
            train, test, local_samples=LOCAL_SAMPLES, batch=BATCH, rate=RATE,
            seed=int(seeded_rng(seed, "order", peer).integers(2**31)),
        )
        for peer, (train, test) in enumerate(zip(swarm.train, swarm.test, strict=True))
    ]  # fmt: skip


def _module(network: NetworkName, inputs: int, classes: int) -> nn.Sequential:
    """Return a perceptron with two hidden layers, or a ResNet with ten parts, two of which are its norms."""
    if network == "resnet":
        return resnet(inputs, classes, widths=(6, 8, 12))
    layers: list[nn.Module] = []
    for cells, width in ((inputs, 60), (60, 30)):
        layers += [
            nn.Linear(cells, width),
            *([nn.BatchNorm1d(width)] if network == "normed perceptron" else []),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Linear(30, classes))


def fixed_assignment(
    scheme: str, benchmark: Benchmark, networks: Sequence[SlicedNetwork], groups: Labels | None
) -> Assignment:
    """Return the assignment of a scheme that does not change while the swarm trains."""
    anatomy = networks[0].slicing.anatomy.with_norm_parts(norm_layers(networks[0].module))
    assignment = Assignment.shared(anatomy, [network.peer for network in networks])
    hidden = [part for part in anatomy.parts if part.name not in ("input", *NORM_PARTS)]
    outputs = hidden.pop()
    parts_of = {
        "input": anatomy.parts[:1], "outputs": (outputs,),
        "norms": tuple(part for part in anatomy.parts if part.name in NORM_PARTS),
    }  # fmt: skip
    changes: dict[str, list[tuple[Part, int]]] = {
        "local": [(part, part.cells) for part in anatomy.parts],
        "all shared": [],
        "outputs own": [(outputs, outputs.cells)],
        "norms own": [(part, part.cells) for part in parts_of["norms"]],
        "80 % of cells": [(part, round(0.2 * part.cells)) for part in hidden],
        BY_HAND: [(part, part.cells) for name in benchmark.by_hand for part in parts_of[name]],
    }
    for part, count in changes[scheme]:
        own_or_groups = groups if scheme == BY_HAND and groups else OWN
        cells = np.arange(part.cells - count, part.cells)
        assignment = assignment.change(part.name, cells, own_or_groups)
    return assignment


def _change_labels(
    learners: Sequence[SgdLearner], swarm: SwarmData, sharing: AutoSharing | None
) -> None:
    """Give all peers the labels that they have after the change of tasks."""
    assert swarm.later is not None
    for peer, learner in enumerate(learners):
        learner.held_out = learner.held_out[0], swarm.later[1][peer]
        if sharing is None:
            learner.samples = learner.samples[0], swarm.later[0][peer]
    if sharing is not None:
        sharing.replace_samples(
            [(x, labels) for (x, _), labels in zip(swarm.train, swarm.later[0], strict=True)]
        )


def _best_rand_index(groupings: Sequence[Labels], truth: Labels | None) -> float | None:
    """Return the largest adjusted Rand index of some groupings, compared with the true groups.

    It is 0 if there is no grouping, and None if there are no true groups.
    """
    from sklearn.metrics import adjusted_rand_score

    if truth is None:
        return None
    return max((float(adjusted_rand_score(truth, labels)) for labels in groupings), default=0.0)


# --- the study ----------------------------------------------------------------------------------


def auto(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Return the study: all schemes on all benchmarks."""
    cells = [
        Cell(
            scheme, benchmark.name, seed, quick, benchmark.rounds,
            AutoOptions() if scheme == AUTO else None,
        )
        for seed in seeds
        for benchmark in BENCHMARKS.values()
        if not quick or benchmark.name in QUICK_BENCHMARKS
        for scheme in (*FIXED_SCHEMES, BY_HAND, AUTO)
        if scheme != "norms own" or benchmark.network != "perceptron"
    ]  # fmt: skip
    return Study(
        entry.name, cells, EachCell(run_cell), table, draw,
        latest=lambda record: f"{record['benchmark']}, {record['scheme']}: {record['accuracy']:.3f}",
        note=NOTE,
    )  # fmt: skip


QUICK_BENCHMARKS = ("a", "c", "d", "hi")
"""The benchmarks of a quick run."""
SETTING = (
    "16 peers have perceptrons of 60 and 30 hidden cells (deep: a ResNet of ten parts); they average exactly "
    "after every 160 samples, and train by plain SGD."
)
"""The caption of the figure."""
NOTE = (
    "The best fixed scheme is the one with the best mean over seeds of local, all shared, outputs own, norms "
    "own and 80 % of cells. auto − best is a mean over seeds; the next column says for how many seeds it is "
    "above 0. Rand is the adjusted Rand index of the groups that auto formed, a mean over seeds. "
    f"{SETTING} Accuracy is the mean of the last 5 rounds."
)
"""Explains the columns of the table."""


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return accuracies by benchmark and scheme, and auto's difference to the best fixed scheme."""
    frame = frame_of(records, ordered=["benchmark"])
    by_seed = frame.pivot_table(
        index=["benchmark", "seed"], columns="scheme", values="accuracy", observed=True
    )
    means = by_seed.groupby("benchmark", observed=True).mean()
    order = [scheme for scheme in (*FIXED_SCHEMES, BY_HAND, AUTO) if scheme in means]
    summary = means[order].copy()
    if AUTO in means and any(scheme in means for scheme in FIXED_SCHEMES):
        best = means[[scheme for scheme in FIXED_SCHEMES if scheme in means]].idxmax(axis=1)
        differences = {
            name: by_seed.loc[name, AUTO] - by_seed.loc[name, scheme]
            for name, scheme in best.items()
        }
        summary["best fixed"] = best
        summary["auto − best"] = [f"{differences[name].mean():+.3f}" for name in summary.index]
        summary["above"] = [
            f"{(differences[name] > 0).sum()} of {len(differences[name])}" for name in summary.index
        ]
        runs = frame[frame["scheme"] == AUTO]
        summary["Rand"] = runs.groupby("benchmark", observed=True)["rand"].mean()
    formats = {**dict.fromkeys(order, ".3f"), "Rand": ".2f"}
    decisions = [
        (record["benchmark"], record["seed"], text)
        for record in records
        if record["scheme"] == AUTO
        for text in record["decisions"] or ["nothing was made own"]
    ]
    return {
        "summary": as_text(summary.reset_index(), formats),
        "decisions": frame_of(decisions, ["benchmark", "seed", "decision"]),
    }


def draw(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draw accuracy over rounds, a panel for every benchmark."""
    from ..study.figures import COLOURS, panels, save

    names = list(dict.fromkeys(record["benchmark"] for record in records))
    rows = ceil(len(names) / 3)
    figure, grid = panels(rows, 3, SETTING, 11.5, 2.6 * rows + 0.5)
    all_axes = [axes for row in grid for axes in row]
    for axes in all_axes[len(names) :]:
        axes.set_visible(False)
    schemes = (*FIXED_SCHEMES, BY_HAND, AUTO)
    handles: dict[str, Any] = {}
    for name, axes in zip(names, all_axes, strict=False):
        for number, scheme in enumerate(schemes):
            curves = [
                record["by_round"]
                for record in records
                if record["benchmark"] == name and record["scheme"] == scheme
            ]
            if curves:
                mean = np.mean(curves, axis=0)
                (handles[scheme],) = axes.plot(
                    range(1, len(mean) + 1), mean, label=scheme, color=COLOURS[number % len(COLOURS)],
                    linewidth=2.5 if scheme == AUTO else 1.2,
                    linestyle=":" if scheme == BY_HAND else "-",
                )  # fmt: skip
        axes.set(title=f"{name}: {BENCHMARKS[name].title}", xlabel="round", ylabel="accuracy")
        axes.title.set_fontsize(8)
    shown = [scheme for scheme in schemes if scheme in handles]
    figure.legend(
        [handles[scheme] for scheme in shown], shown, loc="outside right center", frameon=False
    )
    figure.suptitle("Accuracy of a swarm that decides by itself what to share")
    return save(figure, folder / "figure")
