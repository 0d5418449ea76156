"""Sweeps: one config with a [sweep] table is many runs, one for every combination of its values.

Runs of small networks share a stack (`stackable`, `outcomes`); a paper's figures are made of the same cells.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from ...models import Learner, Metrics, ModelGraph, SlicedNetwork
from ..arena import Arena
from ..arena.simulation import Simulation
from ..build import Member, Swarm
from ..config.named_files import fingerprint, refuse_changed
from ..config.needs import refuse_unused_axes, warn_unused_in_sweep
from ..config.tables import Config, ConfigError, parse_config
from ..results import Record
from . import Frame, Job, Study, StudyCell, as_text, frame_of, key_of

STACK_COORDINATES = 1 << 20
"""Runs go side by side in one stack while all their networks together have no more coordinates. Beyond
it products are large enough to be worth their while alone, and a worker process per run is better."""
MOST_RUNS = 8
"""Runs in one stack: they are finished, and on disk, together."""


@dataclass(frozen=True)
class Cell(StudyCell):
    """One run of a config: the values that set it apart from others, and the file that it came from."""

    config: Config
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str = "config"

    @cached_property
    def key(self) -> str:
        """Names the run by its config, and what is in the files and modules that the config names."""
        text = self.config.model_dump_json()
        return key_of(text + fingerprint(self.config, self.source))


def sweep_study(config: Config, source: str = "config") -> Study[Cell]:
    """Return the study of a config's [sweep] table; raises ConfigError for one that cannot be run."""
    cells = expand(config, source)
    warn_unused_in_sweep(config, axes_of(config, source), [cell.config for cell in cells], source)
    return Study(
        config.name, cells, run_cells, table,
        lambda folder, records: draw(folder, records, config.name),
        batches=stackable,
        latest=lambda record: f"{record['line']}: {record['accuracy']:.3f}",
        about={"config.json": config.model_dump(mode="json")},
    )  # fmt: skip


def expand(config: Config, source: str = "config") -> list[Cell]:
    """Every run of a config's sweep, seeds innermost; without a sweep, the config itself.

    A key that does not exist, a list without values, a value that its key does not take, or a key that
    changes nothing in any of the runs is a `ConfigError` that names it.
    """
    axes = axes_of(config, source)
    plain = config.model_dump(mode="json") | {"sweep": {}}
    cells = []
    for values in product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        table = json.loads(json.dumps(plain))  # a copy of its own, lists and all
        for path, value in settings.items():
            _put(table, path, value, source)
        run = parse_config(table, f"{source}, [sweep]")
        cells.append(Cell(_label(settings), run, settings, source))
    refuse_unused_axes(axes, [cell.config for cell in cells], source)
    return cells


def axes_of(config: Config, source: str = "config") -> dict[str, list[Any]]:
    """What is varied: every key with its values, `seed` last."""
    axes: dict[str, list[Any]] = {}
    for path, values in _flat(config.sweep):
        if path == "seeds":
            if isinstance(values, bool) or not isinstance(values, int) or values < 1:
                raise _mistake(source, path, f"should be a number of seeds, not {values!r}")
            path, values = "seed", list(range(config.seed, config.seed + values))
        if not isinstance(values, list):
            raise _mistake(source, path, f"should be a list of values, as in [{values!r}]")
        if not values:
            raise _mistake(source, path, "is an empty list; give it a value, or leave it out")
        if path in axes:
            raise _mistake(source, path, "is there twice; write either seed = [0, 1] or seeds = 2")
        if twice := [value for place, value in enumerate(values) if value in values[:place]]:
            raise _mistake(source, path, f"names {twice[0]!r} twice")
        axes[path] = values
    if "seed" in axes:
        axes["seed"] = axes.pop("seed")
    return axes


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """`[sweep]`'s keys as paths, whether they were written with dots, in quotes or as tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _put(table: Any, path: str, value: Any, source: str) -> None:
    *way, last = path.split(".")
    for step in way:
        table = _inside(table, step, path, source)
    if isinstance(table, list):
        _inside(table, last, path, source)
        table[int(last)] = value
    elif isinstance(table, dict):
        table[last] = value
    else:
        raise _mistake(source, path, f"{'.'.join(way)} is not a table, it has no {last!r}")


def _inside(table: Any, step: str, path: str, source: str) -> Any:
    if isinstance(table, list):
        if not step.isdigit() or int(step) >= len(table):
            raise _mistake(source, path, f"the list has {len(table)} entries, numbered from 0")
        return table[int(step)]
    if not isinstance(table, dict):
        raise _mistake(source, path, f"there is no table that could have {step!r}")
    if table.get(step) is None:
        table[step] = {}  # an optional table that was left out, or a key that parsing will refuse
    return table[step]


def _mistake(source: str, path: str, text: str) -> ConfigError:
    return ConfigError(f"{source}: key 'sweep.{path}': {text}")


# --- runs -------------------------------------------------------------------------------------------


def run_cells(cells: list[Cell], job: Job) -> list[Record]:
    """Run a batch of cells in one stack: for each the accuracy after the last round."""
    found = outcomes([cell.config for cell in cells], [cell.source for cell in cells], job.threads)
    refuse_changed(cells)
    return [
        {
            "key": cell.key, "line": cell.line, "settings": dict(cell.settings),
            "seed": cell.config.seed, "accuracy": one.accuracy, "worst": one.worst,
        }
        for cell, one in zip(cells, found, strict=True)
    ]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Accuracy after the last round: the mean over peers, and the worst peer's."""

    accuracy: float
    worst: float

    @classmethod
    def of(cls, tests: Sequence[Metrics]) -> Outcome:
        """From every peer's last test."""
        return cls.over([test.accuracy for test in tests if test.samples] or [nan])

    @classmethod
    def over(cls, accuracies: Sequence[float]) -> Outcome:
        """From the accuracies of all peers that count."""
        return cls(float(np.mean(accuracies)), min(accuracies))


def outcome(config: Config, source: str = "config", threads: int = 1) -> Outcome:
    """Run one config, in lockstep or in virtual time; threads change no result."""
    config = config.model_copy(update={"test_every": config.rounds})
    if config.time is not None:
        return _outcome_in_time(config, source, threads)
    simulation = Simulation.of(config, source, say=False)  # a sweep says it once, for all its runs
    arena = simulation.arena(threads)
    return Outcome.of(list(simulation.rounds(arena))[-1].tests)


def _outcome_in_time(config: Config, source: str, threads: int) -> Outcome:
    """By the rule of a run's own figure: peers that are there at the end."""
    from ..arena import LearningSimulation

    run = LearningSimulation(config, source, threads=threads)
    run.run()
    here = run.tests.at(run.seconds)
    if not here:
        raise ConfigError(
            f"{source}: key 'time.churn': all peers have left by the end, so there is no accuracy; lower "
            "'leave', raise 'arrive', or stop earlier with 'seconds'"
        )
    return Outcome.over(list(here.values()))


def outcomes(configs: Sequence[Config], sources: Sequence[str], threads: int = 1) -> list[Outcome]:
    """Run configs that `stackable` put together, as one arena of all their peers.

    Peers and partial models of each run get names of their own, so that runs have nothing in common but
    the tensor that they live in.
    """
    if len(configs) == 1:
        return [outcome(configs[0], sources[0], threads)]
    learners: list[Learner] = []
    weights: list[float] = []
    counts: list[int] = []
    for number, (config, source) in enumerate(zip(configs, sources, strict=True)):
        members = Swarm(config, source).members()
        names = sorted({model for member in members for model in member.network.models})
        rename = {name: f"run-{number}.model-{place}" for place, name in enumerate(names)}
        learners += [apart(member, f"run-{number}", rename, config.cross) for member in members]
        weights += [m.samples if config.weights == "samples" else 1.0 for m in members]
        counts.append(len(members))
    first = configs[0]
    arena = Arena(
        learners, every=first.every, weights=weights, test_every=first.rounds, threads=threads
    )
    tests = list(arena.run(first.rounds))[-1].tests
    starts = np.cumsum([0, *counts])
    return [Outcome.of(tests[a:b]) for a, b in pairwise(starts)]


def apart(member: Member, run: str, rename: Mapping[str, str], cross: bool) -> Learner:
    """A member's learner, its network and models renamed; its values stay as they are."""
    old = member.network
    slicing = old.slicing
    depends = {
        rename[model]: [rename[other] for other in slicing.graph.dependencies(model)]
        for model in old.models
    }
    member.learner.network = SlicedNetwork(
        old.module,
        {rename[model]: [cells.tolist() for cells in slicing.cells[model]] for model in old.models},
        graph=ModelGraph(depends),
        peer=f"{run}.{old.peer}",
        rest=None,
        cross=cross,
        anatomy=slicing.anatomy,
        buffers=old.buffers,
    )
    return member.learner


def stackable(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Batches of cells that can share an arena: small networks, the same rounds, exact averaging."""
    open_: dict[tuple[int, int], list[Cell]] = {}
    batches: list[list[Cell]] = []
    for cell in cells:
        config = cell.config
        room = min(MOST_RUNS, STACK_COORDINATES // max(_coordinates(config), 1))
        exact = config.time is None and config.topology is None and not config.bridge
        exact = exact and not config.gossip.lossy_keys and config.gossip.rule == "push"
        exact = exact and all(model.matching == "none" for model in config.models)
        exact = exact and not config.network.name_or_entry  # of unknown size until it is built
        if not exact or room < 2:
            batches.append([cell])
            continue
        batch = open_.setdefault((config.rounds, config.every), [])
        if not batch:
            batches.append(batch)
        batch.append(cell)
        if len(batch) >= room:
            del open_[config.rounds, config.every]
    return batches


def _coordinates(config: Config) -> int:
    """About how many coordinates a swarm has: its layout's products, and a bias for every cell."""
    sizes = [
        int(size) for size in config.network.layout.replace("<>", "=").split("=") if size.isdigit()
    ]
    products = sum(a * b + b for a, b in pairwise(sizes))
    return config.peers * products


# --- what a sweep leaves ----------------------------------------------------------------------------

_FIGURES: dict[str, str] = dict.fromkeys(("mean", "± sd", "median", "worst peer"), ".4f")


def combine(records: Sequence[Record]) -> Frame:
    """Return a row for every combination of values, in the order in which they first occur.

    `± sd` is the standard deviation over seeds, missing of a single run; `worst peer` is that of the worst
    run.
    """
    keys = [key for key in records[0]["settings"] if key != "seed"]
    rows = [
        {
            **{key: _shown(r["settings"][key]) for key in keys},
            **{m: r[m] for m in ("accuracy", "worst")},
        }
        for r in records
    ]
    groups = frame_of(rows).groupby(keys or (lambda _: 0), sort=False)
    combined = groups["accuracy"].agg(["size", "mean", "std", "median"])
    combined["worst peer"] = groups["worst"].min()
    names = {"size": "runs", "std": "± sd"}
    return combined.rename(columns=names).reset_index(drop=not keys)


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return the table of every combination."""
    return {"summary": as_text(combine(records), _FIGURES)}


def draw(folder: Path, records: Sequence[Record], title: str) -> list[Path]:
    """Draw accuracy along the last key that has several numbers and nothing else; nothing without one."""
    keys = [key for key in records[0]["settings"] if key != "seed"]
    axis = next((key for key in reversed(keys) if _is_numeric(records, key)), None)
    if axis is None:
        return []
    from .figures import draw_lines  # matplotlib takes a second

    rest = [key for key in keys if key != axis]
    frame = combine(records)
    frame[axis] = frame[axis].astype(float)
    frame["label"] = frame[rest].agg(", ".join, axis=1) if rest else "all"
    columns = ["label", axis, "mean"]
    if frame["± sd"].notna().any():  # else nothing is known of the spread
        deviation = frame["± sd"].fillna(0)
        frame["low"], frame["high"] = frame["mean"] - deviation, frame["mean"] + deviation
        columns += ["low", "high"]
    return draw_lines(
        folder / "figure", frame, columns, title=title, x_label=axis, legend=", ".join(rest),
        caption=_caption(int(frame["runs"].min()), int(frame["runs"].max())),
    )  # fmt: skip


def _caption(fewest: int, most: int) -> str:
    if most == 1:
        return "one run each, so nothing is known of the spread; seeds = 5 in [sweep] repeats them."
    counts = f"{most}" if fewest == most else f"{fewest} to {most}"
    return f"mean of {counts} runs, bars: one standard deviation over seeds to either side."


def _is_numeric(records: Sequence[Record], key: str) -> bool:
    values = [record["settings"][key] for record in records]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return numbers and len(set(values)) > 1


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _label(settings: Mapping[str, Any]) -> str:
    return ", ".join(_shown(value) for value in settings.values())
