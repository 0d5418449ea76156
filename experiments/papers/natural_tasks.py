"""Experiments of paper 003 whose peers have naturally different data: writers (section V.2), sensors (V.4).

The paper's data is replaced where it cannot be had, and every caption says so: FEMNIST's characters are
grouped by style if LEAF's files are missing, its digits are replaced by MNIST's digits of 64 writers, and
VSN's vehicles by people who sit or stand. With `--quick` the peers have no natural groups: their tasks, on
scikit-learn's digits, differ by swapped labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..config.tables import Data, Model
from ..results import Record
from ..study import EachCell, Study
from ..study.sweep import Cell
from . import StudyEntry
from .partial_models import AUTO, SWAPPED, Scheme, Setup, figure_study, run_with_tests

_STYLES = (
    "Without LEAF's files, peers are groups of characters of similar style (stroke thickness, size and "
    "slant), not writers."
)
_WRITERS = "MNIST's digits by their 64 most productive writers stand in for FEMNIST's."
_PEOPLE = (
    "People who sit or stand, by 100 features of their movements, stand in for VSN's sensor nodes. There are "
    "50 test samples of each, where the paper has 200, and two output cells, where it has one."
)
_QUICK_NOTE = (
    "Scikit-learn's digits have no writers: labels 8 and 9 are swapped for half of the peers instead. Hidden "
    "cells are tanh."
)


def _setup(entry: StudyEntry, quick: bool, rounds: int, **changes: object) -> tuple[Setup, str]:
    """Return the swarm of a study, with the paper's sizes, and a sentence about its data for captions.

    The groups of a data set are the peers. FEMNIST's variants are A (all characters), M (with look-alikes
    merged) and D (digits only); VSN has none.
    """
    name, layout, samples, test, mini_batch, note = {
        "A": ("femnist-a", "784=300=100=62", 360, 60, 180, _STYLES),
        "M": ("femnist-m", "784=300=100=47", 360, 60, 180, _STYLES),
        "D": ("mnist-writers", "784=300=100=10", 100, 30, 50, _WRITERS),
        "": ("hapt-sitstand", "100=50=20=2", 50, 50, 25, _PEOPLE),
    }[entry.variant]
    data = Data(set=name, partition="natural", samples=samples, test=test)
    setup = Setup(entry.name, data, rounds, mini_batch, layout, tasks=())
    if quick:
        hidden = "300=100" if entry.variant else "50=20"
        data = Data(set="digits", samples=80, test=360)
        tasks = [SWAPPED[0].model_copy(update={"peers": 8})]
        setup, note = (
            Setup(entry.name, data, rounds, 40, f"64={hidden}=10", tasks=tasks),
            _QUICK_NOTE,
        )
    return replace(setup, **changes), note  # type: ignore[arg-type]


def _caption(setup: Setup, note: str) -> str:
    """Return what the captions of two experiments begin with."""
    return (
        f"16 peers with {setup.data.samples} training samples each; they averaged after every "
        f"{setup.mini_batch}. {note}"
    )


def _by_mini_batches(mini_batch_counts: Sequence[int], records: Sequence[Record]) -> list[Record]:
    """Return the records of the figure's points: a curve for each number of mini-batches, by level.

    records: those of the runs, whose line is the level, with a test after each number of mini-batches.
    """
    return [
        {
            "line": f"{count}",
            "settings": {"x": None if record["line"] == AUTO else int(record["line"])},
            "accuracy": dict(map(tuple, record["tests"]))[count],
        }
        for count in mini_batch_counts
        for record in records
    ]


def _level_study(
    entry: StudyEntry, quick: bool, seeds: range, mini_batch_counts: Sequence[int],
    schemes: Mapping[int, int] | None, cells: str,
) -> Study[Cell]:  # fmt: skip
    """Return the study of averaging levels, with a curve for each number of mini-batches.

    A run has the largest number of mini-batches, and is tested after the smaller ones too. schemes: the cells
    of both hidden layers that are shared at each level; the paper's levels for FEMNIST if None. cells: those
    that a level counts.
    """
    every = min(mini_batch_counts)
    setup, note = _setup(entry, quick, max(mini_batch_counts), test_every=every)
    levels = setup.levels()
    if schemes is not None:
        fixed = {f"{first}": setup.shared(first, second) for first, second in schemes.items()}
        levels = {**fixed, AUTO: AUTO}
    runs = [setup.run(seed, name, scheme) for seed in seeds for name, scheme in levels.items()]
    return figure_study(
        entry, runs, x_label="averaging level", legend="mini-batches",
        caption=f"{_caption(setup, note)} The averaging level is the number of cells that all peers share, "
        f"of {cells} hidden layer. Dashed: peers decide by themselves what they share.",
        rearrange=partial(_by_mini_batches, mini_batch_counts), run=EachCell(run_with_tests),
    )  # fmt: skip


def femnist_level(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.2.a of the paper: how much of a network should be averaged? (figures 8 to 10)"""
    counts = (10, 20, 40) if quick else (50, 100, 200, 500, 1000)
    return _level_study(entry, quick, seeds, counts, None, "100 in the second")


def vsn(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.4 of the paper: sensors that see the same vehicles from different places (figure 26)."""
    counts = (10, 20, 40) if quick else (100, 200, 300, 400)
    schemes = {0: 0, 7: 3, 15: 6, 30: 12, 40: 16, 50: 20}
    return _level_study(entry, quick, seeds, counts, schemes, "50 in the first")


def femnist_scheme(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.2.b of the paper: share a part of every layer, or whole layers (figures 11 to 13)."""
    rounds, every = (40, 10) if quick else (200, 20)
    setup, note = _setup(entry, quick, rounds, test_every=every)
    inputs, *_, classes = setup.layout.split("=")
    layouts = [
        f"{inputs}-300-100-{classes}", f"{inputs}-250-80-{classes}", f"{inputs}-300-100-0",
        f"{inputs}-300-0-0", f"0-0-100-{classes}",
    ]  # fmt: skip
    schemes: dict[str, Scheme] = {
        "no averaging": [],
        **{layout: [Model(name="global", layout=layout)] for layout in layouts},
        AUTO: AUTO,
    }
    runs = [setup.run(seed, name, scheme) for seed in seeds for name, scheme in schemes.items()]
    caption = (
        f"{_caption(setup, note)} Curves are named by the cells of every layer that all peers share; the "
        "paper's text names only two of its schemes. auto: peers decide by themselves."
    )
    return figure_study(
        entry, runs, x_label="mini-batches", legend="shared cells", caption=caption,
        run=EachCell(run_with_tests),
    )  # fmt: skip


def femnist_peers(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.2.c of the paper: accuracy by the number of peers that share a model (figures 14 to 16).

    There are 64 peers for every size (16 if quick), divided into groups that share nothing with each other.
    """
    setup, note = _setup(entry, quick, 20 if quick else 200)
    if not quick:
        # The paper's sizes, but for D: fewer than 64 writers have 100 + 30 digits, so that 26 are tested.
        sizes_of_data = {"test": 26} if entry.variant == "D" else {"samples": 350}
        setup = replace(
            setup, peers=64, mini_batch=50 if entry.variant == "D" else 175,
            data=setup.data.model_copy(update=sizes_of_data),
        )  # fmt: skip
    sizes = (4, 8, 16) if quick else (4, 8, 16, 32, 64)
    runs = [
        setup.run(seed, level, _in_groups(scheme, setup.peers, size), x=size)
        for seed in seeds
        for level, scheme in setup.levels().items()
        for size in (sizes if isinstance(scheme, list) and scheme else sizes[-1:])
    ]
    caption = (
        f"{setup.peers} peers with {setup.data.samples} training samples each, in groups that share nothing "
        f"with each other; they averaged {setup.rounds} times, after every {setup.mini_batch} samples. "
        f"{note} The averaging level is the number of cells that the peers of a group share, of 100 in the "
        "second hidden layer; auto: all peers decide by themselves what they share."
    )
    return figure_study(
        entry, runs, x_label="peers that share a model", legend="averaging level", caption=caption,
        rearrange=partial(_for_all_sizes, sizes),
    )  # fmt: skip


def _for_all_sizes(sizes: Sequence[int], records: Sequence[Record]) -> list[Record]:
    """Return records for every size of groups: peers that share nothing are run only once, for all sizes."""
    return [
        {**record, "settings": {"x": size}}
        for record in records
        for size in (sizes if record["line"] == "0" else [record["settings"]["x"]])
    ]


def _in_groups(scheme: Scheme, peers: int, size: int) -> Scheme:
    """Return a copy of the global model, if there is one, for each group of `size` peers."""
    if scheme == AUTO:
        return AUTO
    return [
        model.model_copy(
            update={"name": f"group-{start // size}", "peers": [*range(start, start + size)]}
        )
        for model in scheme
        for start in range(0, peers, size)
    ]
