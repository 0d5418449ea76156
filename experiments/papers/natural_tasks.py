"""Experiments of paper 003 whose peers have naturally different data: writers (section V.2), sensors (V.4).

The paper's data is replaced where it cannot be had, and every caption says so: FEMNIST's characters are
grouped by style if LEAF's files are missing, its digits are replaced by MNIST's digits of 64 writers, and
VSN's vehicles by people who sit or stand. With `--quick` the peers have no natural groups: their tasks, on
scikit-learn's digits, differ by swapped labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from ..config.tables import Config, Data, Model, Network, TaskEntry, Training
from ..results import Record
from ..study import Study
from ..study.sweep import Cell
from . import StudyEntry
from .partial_models import AUTO, FIRST_LAYER_CELLS, Scheme, figure_study


@dataclass(frozen=True)
class Source:
    """A data set whose groups are the peers, with the paper's sizes.

    samples, test: training and test samples per peer. mini_batch: samples between two averagings.
    note: a sentence for captions. hidden: cells of the hidden layers. tasks: how labels differ between peers,
    for data without natural groups.
    """

    data_set: str
    inputs: int
    classes: int
    samples: int
    test: int
    mini_batch: int
    note: str
    hidden: tuple[int, int] = (300, 100)
    partition: Literal["natural", "successive"] = "natural"
    tasks: tuple[TaskEntry, ...] = ()

    def config(self, name: str, seed: int, peers: int, rounds: int, scheme: Scheme) -> Config:
        """Return the config of a swarm that shares by this scheme."""
        first, second = self.hidden
        return Config(
            name=name, seed=seed, peers=peers, rounds=rounds, tasks=list(self.tasks),
            data=Data(
                set=self.data_set, partition=self.partition, samples=self.samples, test=self.test
            ),
            network=Network(
                layout=f"{self.inputs}={first}={second}={self.classes}",
                activation="tanh" if self.tasks else "sigmoid",
                output="sigmoid",
            ),
            training=Training(
                local_samples=self.mini_batch, rate=0.05 if self.tasks else 0.1, loss="squared",
                reduction="sum",
            ),
            models=[] if scheme == AUTO else scheme,
            sharing="auto" if scheme == AUTO else "models",
        )  # fmt: skip

    def shared(self, first: int, second: int) -> list[Model]:
        """Return the global model with `first` and `second` cells of the hidden layers; no model for 0."""
        layout = f"{self.inputs}-{first}-{second}-{self.classes}"
        return [Model(name="global", layout=layout)] if second else []


_STYLES = (
    "Without LEAF's files, peers are groups of characters of similar style (stroke thickness, size and "
    "slant), not writers."
)
_WRITERS = "MNIST's digits by their 64 most productive writers stand in for FEMNIST's."
SOURCES = {
    "A": Source("femnist-a", 784, 62, samples=360, test=60, mini_batch=180, note=_STYLES),
    "M": Source("femnist-m", 784, 47, samples=360, test=60, mini_batch=180, note=_STYLES),
    "D": Source("mnist-writers", 784, 10, samples=100, test=30, mini_batch=50, note=_WRITERS),
}
"""The three variants of FEMNIST: all characters, with look-alikes merged, and digits only."""
_QUICK = Source(
    "digits", 64, 10, 80, 360, 40,
    "Scikit-learn's digits have no writers: labels 8 and 9 are swapped for half of the peers instead. Hidden "
    "cells are tanh.",
    partition="successive", tasks=(TaskEntry(kind="swap", labels=(8, 9), peers=8),),
)  # fmt: skip
_PEOPLE = Source(
    "hapt-sitstand", 100, 2, 50, 50, 25,
    "People who sit or stand, by 100 features of their movements, stand in for VSN's sensor nodes. There are "
    "50 test samples of each, where the paper has 200, and two output cells, where it has one.",
    hidden=(50, 20),
)  # fmt: skip


def _levels(source: Source) -> dict[str, Scheme]:
    """Return the scheme of every averaging level of the paper's perceptron, and `auto`."""
    fixed = {f"{level}": source.shared(first, level) for level, first in FIRST_LAYER_CELLS.items()}
    return {**fixed, AUTO: AUTO}


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
    entry: StudyEntry,
    source: Source,
    schemes: Mapping[str, Scheme],
    seeds: range,
    mini_batch_counts: Sequence[int],
    caption: str,
) -> Study[Cell]:
    """Return the study of averaging levels, with a curve for each number of mini-batches.

    A run has the largest number of mini-batches, and is tested after the smaller ones too.
    """
    runs = [
        Cell(
            name,
            source.config(entry.name, seed, 16, max(mini_batch_counts), scheme).model_copy(
                update={"test_every": min(mini_batch_counts)}
            ),
        )
        for seed in seeds
        for name, scheme in schemes.items()
    ]
    caption = (
        f"16 peers with {source.samples} training samples each; they averaged after every "
        f"{source.mini_batch}. {source.note} {caption} Dashed: peers decide by themselves what they share."
    )
    return figure_study(
        entry, runs, x_label="averaging level", legend="mini-batches", caption=caption,
        rearrange=partial(_by_mini_batches, mini_batch_counts),
    )  # fmt: skip


def femnist_level(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.2.a of the paper: how much of a network should be averaged? (figures 8 to 10)"""
    source = _QUICK if quick else SOURCES[entry.variant]
    return _level_study(
        entry, source, _levels(source), seeds, (10, 20, 40) if quick else (50, 100, 200, 500, 1000),
        "The averaging level is the number of cells that all peers share, of 100 in the second hidden layer.",
    )  # fmt: skip


def femnist_scheme(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.2.b of the paper: share a part of every layer, or whole layers (figures 11 to 13)."""
    source = _QUICK if quick else SOURCES[entry.variant]
    inputs, classes = source.inputs, source.classes
    layouts = [
        f"{inputs}-300-100-{classes}", f"{inputs}-250-80-{classes}", f"{inputs}-300-100-0",
        f"{inputs}-300-0-0", f"0-0-100-{classes}",
    ]  # fmt: skip
    schemes: dict[str, Scheme] = {
        "no averaging": [],
        **{layout: [Model(name="global", layout=layout)] for layout in layouts},
        AUTO: AUTO,
    }
    rounds, every = (40, 10) if quick else (200, 20)
    runs = [
        Cell(
            name,
            source.config(entry.name, seed, 16, rounds, scheme).model_copy(
                update={"test_every": every}
            ),
        )
        for seed in seeds
        for name, scheme in schemes.items()
    ]
    caption = (
        f"16 peers with {source.samples} training samples each; they averaged after every "
        f"{source.mini_batch}. {source.note} Curves are named by the cells of every layer that all peers "
        "share; the paper's text names only two of its schemes. auto: peers decide by themselves."
    )
    return figure_study(entry, runs, x_label="mini-batches", legend="shared cells", caption=caption)


def femnist_peers(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.2.c of the paper: accuracy by the number of peers that share a model (figures 14 to 16).

    There are 64 peers for every size (16 if quick), divided into groups that share nothing with each other.
    """
    source = _QUICK if quick else SOURCES[entry.variant]
    peers, rounds = (16, 20) if quick else (64, 200)
    if not quick:
        # The paper's sizes, but for D: fewer than 64 writers have 100 + 30 digits, so that 26 are tested.
        smaller = {"D": {"test": 26}}.get(entry.variant, {"samples": 350, "mini_batch": 175})
        source = replace(source, **smaller)
    sizes = (4, 8, 16) if quick else (4, 8, 16, 32, 64)
    runs = []
    for seed in seeds:
        for level, scheme in _levels(source).items():
            for size in sizes if isinstance(scheme, list) and scheme else sizes[-1:]:
                groups = scheme if scheme == AUTO else _in_groups(scheme, peers, size)
                config = source.config(entry.name, seed, peers, rounds, groups)
                runs.append(Cell(level, config, {"x": size}))
    caption = (
        f"{peers} peers with {source.samples} training samples each, in groups that share nothing with each "
        f"other; they averaged {rounds} times, after every {source.mini_batch} samples. {source.note} The "
        "averaging level is the number of cells that the peers of a group share, of 100 in the second hidden "
        "layer; auto: all peers decide by themselves what they share."
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


def _in_groups(models: Sequence[Model], peers: int, size: int) -> list[Model]:
    """Return a copy of the global model, if there is one, for each group of `size` peers."""
    return [
        model.model_copy(
            update={"name": f"group-{start // size}", "peers": [*range(start, start + size)]}
        )
        for model in models
        for start in range(0, peers, size)
    ]


def vsn(entry: StudyEntry, quick: bool, seeds: range) -> Study[Cell]:
    """Study V.4 of the paper: sensors that see the same vehicles from different places (figure 26)."""
    source = replace(_QUICK, hidden=(50, 20)) if quick else _PEOPLE
    second_layer = {0: 0, 7: 3, 15: 6, 30: 12, 40: 16, 50: 20}
    schemes: dict[str, Scheme] = {
        f"{level}": source.shared(level, second) for level, second in second_layer.items()
    }
    return _level_study(
        entry, source, {**schemes, AUTO: AUTO}, seeds,
        (10, 20, 40) if quick else (100, 200, 300, 400),
        "The averaging level is the number of cells that all peers share, of 50 in the first hidden layer.",
    )  # fmt: skip
