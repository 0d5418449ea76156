"""What a study of matching is: settings and methods, whose outcomes become a table and a figure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from ..results import Record
from .fusing_methods import METHODS, Outcome, Peers
from .fusing_setting import Setting
from .fusing_streaming import run_stream


@dataclass(frozen=True)
class Run:
    """One setting under several methods: all of them see the same peers' networks.

    panel, x
        Where it goes in the figure: which set of axes, and where on it.
    steps
        Above 0 for the streaming experiment, whose steps are the figure's x.
    """

    panel: str
    x: float
    setting: Setting
    methods: tuple[str, ...]
    steps: int = 0

    @property
    def key(self) -> str:
        """Names the run by all that decides its result, so that finished runs are not run again."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class FusionStudy:
    """A table or figure of a paper.

    `runs(full, seed)` lists the runs of one seed: a minute on the built-in digits, or the paper's own
    size on MNIST. `printed` holds what the paper (or the reference) prints, by panel, x and method.
    """

    name: str
    title: str
    section: str
    x_label: str
    runs: Callable[[bool, int], Sequence[Run]]
    caption: Callable[[bool], str]
    seeds: int
    quick_seeds: int = 3
    measures: tuple[str, ...] = ("accuracy", "cells")
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"": ()})
    """Which methods share a figure, by its name: eight can be told apart. () is all of them."""
    printed: Mapping[tuple[str, float, str], float] = field(default_factory=dict)
    printed_by: str = "paper"
    """Who printed those figures: the head of their column."""


def run_all(runs: list[Run], threads: int = 1) -> list[Record]:
    """What a worker does: every method of every run. The matrices are too small for more threads."""
    return [run_one(run) for run in runs]


def run_one(run: Run) -> Record:
    """Outcomes by x and method; one x, unless the run is a stream."""
    if run.steps:
        found = run_stream(run.setting, run.steps)
    else:
        peers = Peers(run.setting)
        found = {run.x: {name: METHODS[name](peers) for name in run.methods}}
    return {
        "key": run.key,
        "panel": run.panel,
        "seed": run.setting.seed,
        "setting": asdict(run.setting),
        "outcomes": [
            {"x": x, "method": name, **asdict(outcome)}
            for x, each in found.items()
            for name, outcome in each.items()
        ],
    }


@dataclass(frozen=True)
class Mark:
    """The runs of one method at one place: means and the standard error of the accuracy."""

    panel: str
    x: float
    method: str
    seeds: int
    accuracy: float
    error: float
    cells: float
    parameters: float


def marks(records: Sequence[Record]) -> list[Mark]:
    """Summaries in the order in which panels and methods first appear, x rising."""
    groups: dict[tuple[str, str, float], list[Outcome]] = {}
    for record in records:
        for each in record["outcomes"]:
            outcome = Outcome(each["accuracy"], each["cells"], each["parameters"])
            groups.setdefault((record["panel"], each["method"], each["x"]), []).append(outcome)
    panels = list(dict.fromkeys(panel for panel, _, _ in groups))
    methods = list(dict.fromkeys(method for _, method, _ in groups))
    order = sorted(groups, key=lambda g: (panels.index(g[0]), methods.index(g[1]), g[2]))
    found = []
    for panel, method, x in order:
        each = groups[panel, method, x]
        values = np.array([outcome.accuracy for outcome in each])
        error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
        found.append(
            Mark(
                panel,
                x,
                method,
                len(each),
                float(values.mean()),
                error,
                float(np.mean([outcome.cells for outcome in each])),
                float(np.mean([outcome.parameters for outcome in each])),
            )
        )
    return found


@dataclass(frozen=True)
class Difference:
    """One method less another on the same seeds, in points of accuracy, with its standard error."""

    panel: str
    x: float
    method: str
    less: str
    seeds: int
    points: float
    error: float


def differences(records: Sequence[Record]) -> list[Difference]:
    """MAGI less PFNM at the same σ², paired by seed: what is left of a claim with the seeds held fixed."""
    pairs: dict[tuple[str, float, str], list[float]] = {}
    for record in records:
        known = {(e["x"], e["method"]): e["accuracy"] for e in record["outcomes"]}
        for (x, method), value in known.items():
            base = known.get((x, _without_kl(method)))
            if method.startswith("MAGI") and base is not None:
                pairs.setdefault((record["panel"], x, method), []).append(100 * (value - base))
    found = []
    for (panel, x, method), values in pairs.items():
        error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
        less = _without_kl(method)
        found.append(Difference(panel, x, method, less, len(values), float(np.mean(values)), error))
    return found


def _without_kl(method: str) -> str:
    return method.partition(" λ=")[0].replace("MAGI", "PFNM")
