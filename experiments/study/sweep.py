"""Sweeps: a config with a [sweep] table is many runs, one for every combination of the table's values.

Runs of small networks are trained together in one stack (`stackable_batches`, `outcomes`). Studies of papers
use `Cell` too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from gossamer import __version__

from ...models import Learner, Metrics, ModelGraph, SlicedNetwork
from ..arena import Arena
from ..arena.simulation import Simulation
from ..build import Member, Swarm
from ..cli import console
from ..config.named_files import fingerprint, refuse_changed
from ..config.needs import refuse_forever, refuse_unused_axes, warn_unused_in_sweep
from ..config.tables import Config, ConfigError, parse_config
from ..data import Dataset, PeerDatasets, load_once, load_or_stream
from ..results import Record
from . import Frame, Job, Study, StudyCell, as_text, frame_of, key_of

MOST_STACKED_COORDINATES = 1 << 20
"""The most coordinates that all networks of a stack have together. Larger networks gain nothing from a
stack, and one worker process per run is faster."""
MOST_STACKED_RUNS = 8
"""The most runs in one stack; more would delay their records, which are written when the stack is done."""


@dataclass(frozen=True)
class Cell(StudyCell):
    """One run of a sweep.

    config: the config of this run. settings: the swept keys and their values in this run. source: the file
    of the config with the [sweep] table.
    """

    config: Config
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str = "config"

    @cached_property
    def key(self) -> str:
        """A hash of what the config sets, and of the files and modules that it names.

        Results stay valid when a release adds keys to configs: defaults change only with the major version.
        """
        major = __version__.partition(".")[0]
        text = self.config.model_dump_json(exclude_defaults=True)
        return key_of(f"{major} {text}{fingerprint(self.config, self.source)}")


def sweep_study(config: Config, source: str = "config") -> Study[Cell]:
    """Return the study of a config's [sweep] table; raises ConfigError if a run is not possible."""
    cells = expand(config, source)
    warn_unused_in_sweep(config, axes_of(config, source), [cell.config for cell in cells], source)
    return Study(
        config.name, cells, run_cells, table,
        lambda folder, records: draw(folder, records, config.name),
        batches=stackable_batches,
        latest=lambda record: f"{record['line']}: {record['accuracy']:.3f}",
        json_files={"config.json": config.model_dump(mode="json")},
    )  # fmt: skip


def expand(config: Config, source: str = "config") -> list[Cell]:
    """Every run of a config's sweep, with seeds varied fastest; without a sweep, the config itself.

    Raises ConfigError, which names the key, for a key that does not exist, an empty list, a value that its
    key does not accept, or a key that changes nothing in any of the runs.
    """
    axes = axes_of(config, source)
    without_sweep = config.model_dump(mode="json") | {"sweep": {}}
    cells = []
    for values in product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        table = json.loads(json.dumps(without_sweep))  # a deep copy
        for path, value in settings.items():
            _set_key(table, path, value, source)
        run_config = parse_config(table, f"{source}, [sweep]")
        refuse_forever(run_config, source)
        cells.append(Cell(_label(settings), run_config, settings, source))
    refuse_unused_axes(axes, [cell.config for cell in cells], source)
    return cells


def axes_of(config: Config, source: str = "config") -> dict[str, list[Any]]:
    """The swept keys with their values, `seed` last."""
    axes: dict[str, list[Any]] = {}
    for path, values in _flat(config.sweep):
        if path == "seeds":
            if isinstance(values, bool) or not isinstance(values, int) or values < 1:
                raise _sweep_error(source, path, f"should be a number of seeds, not {values!r}")
            path, values = "seed", list(range(config.seed, config.seed + values))
        if not isinstance(values, list):
            raise _sweep_error(source, path, f"should be a list of values, as in [{values!r}]")
        if not values:
            raise _sweep_error(source, path, "is an empty list; give it a value, or leave it out")
        if path in axes:
            raise _sweep_error(
                source, path, "is there twice; write either seed = [0, 1] or seeds = 2"
            )
        if repeated := [value for index, value in enumerate(values) if value in values[:index]]:
            raise _sweep_error(source, path, f"names {repeated[0]!r} twice")
        axes[path] = values
    if "seed" in axes:
        axes["seed"] = axes.pop("seed")
    return axes


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of [sweep] as dotted paths, whether written with dots, in quotes or as tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _set_key(table: Any, path: str, value: Any, source: str) -> None:
    """Set the key at a dotted path of a config's table."""
    *parents, last = path.split(".")
    for key in parents:
        table = _child(table, key, path, source)
    if isinstance(table, list):
        _child(table, last, path, source)  # raises if the list has no such entry
        table[int(last)] = value
    elif isinstance(table, dict):
        table[last] = value
    else:
        raise _sweep_error(source, path, f"{'.'.join(parents)} is not a table, it has no {last!r}")


def _child(table: Any, key: str, path: str, source: str) -> Any:
    """The table or list at a key of a config's table, or at an index of a list."""
    if isinstance(table, list):
        if not key.isdigit() or int(key) >= len(table):
            raise _sweep_error(source, path, f"the list has {len(table)} entries, numbered from 0")
        return table[int(key)]
    if not isinstance(table, dict):
        raise _sweep_error(source, path, f"there is no table that could have {key!r}")
    if table.get(key) is None:
        table[key] = {}  # an optional table that was left out, or a key that parsing will refuse
    return table[key]


def _sweep_error(source: str, path: str, text: str) -> ConfigError:
    return ConfigError(f"{source}: key 'sweep.{path}': {text}")


# --- runs -------------------------------------------------------------------------------------------


def run_cells(cells: list[Cell], job: Job) -> list[Record]:
    """Run a batch of cells in one stack; the records have the accuracy after the last round."""
    results = outcomes(
        [cell.config for cell in cells], [cell.source for cell in cells], job.threads
    )
    refuse_changed(cells)
    return [
        {
            "key": cell.key, "line": cell.line, "settings": dict(cell.settings),
            "seed": cell.config.seed, "accuracy": result.accuracy, "worst": result.worst,
            **({"metrics": dict(result.metrics)} if result.metrics else {}),
            **({} if result.decisions is None else {"decisions": list(result.decisions)}),
        }
        for cell, result in zip(cells, results, strict=True)
    ]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Accuracy after the last round: the mean over peers, and that of the worst peer.

    metrics: the means over peers of named metrics.
    decisions: what peers have decided about their sharing; None unless `sharing = "auto"` is configured.
    """

    accuracy: float
    worst: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    decisions: tuple[str, ...] | None = None

    @classmethod
    def of(cls, tests: Sequence[Metrics]) -> Outcome:
        """The outcome of a run from each peer's last test; peers without test samples are left out."""
        named = dict.fromkeys(name for test in tests for name in test.values)
        metrics = {
            name: float(np.mean([test.values[name] for test in tests if name in test.values]))
            for name in named
        }
        result = cls.over([test.accuracy for test in tests if test.samples] or [nan])
        return replace(result, metrics=metrics)

    @classmethod
    def over(cls, accuracies: Sequence[float]) -> Outcome:
        """The mean and the worst of these accuracies."""
        return cls(float(np.mean(accuracies)), min(accuracies))


def outcome(config: Config, source: str = "config", threads: int = 1) -> Outcome:
    """Run one config, in lockstep or in virtual time; the result does not depend on `threads`."""
    # Only the last round is tested, and no peer trains a lone twin: nobody would read the results.
    refuse_forever(config, source)
    test_every = config.test_every if config.rounds == "forever" else config.rounds
    config = config.model_copy(update={"test_every": test_every, "gain": 0.0})
    if config.time is not None:
        return _outcome_in_virtual_time(config, source, threads)
    # The sweep warns once, for all runs.
    simulation = Simulation.of(config, source, warn=False, load_data=load_for_runs)
    arena = simulation.arena(threads)
    result = Outcome.of(list(simulation.rounds(arena))[-1].tests)
    if (sharing := arena.sharing) is None:
        return result
    if sharing.reason:
        console.warn(f"{source}: everything stays shared as it is: {sharing.reason}")
    return replace(result, decisions=tuple(sharing.sentences()))


def load_for_runs(name: str, **options: Any) -> Dataset | PeerDatasets:
    """Load a data set and keep it for this process's next run; what a user's function makes is not kept."""
    return load_or_stream(name, **options) if ":" in name else load_once(name)


def _outcome_in_virtual_time(config: Config, source: str, threads: int) -> Outcome:
    """The outcome over the peers that are online at the end of the simulation."""
    from ..arena import LearningSimulation

    simulation = LearningSimulation(config, source, threads=threads)
    simulation.run()
    accuracies = simulation.tests.at(simulation.seconds)
    if not accuracies:
        raise ConfigError(
            f"{source}: key 'time.churn': all peers have left by the end, so there is no accuracy; lower "
            "'leave', raise 'arrive', or stop earlier with 'seconds'"
        )
    return Outcome.of([simulation.latest_tests[peer] for peer in accuracies])


def outcomes(configs: Sequence[Config], sources: Sequence[str], threads: int = 1) -> list[Outcome]:
    """Run configs that `stackable_batches` put in one batch, as one arena with the peers of all runs.

    Peers and partial models are renamed, so that no two runs share a name: runs do not affect each other.
    """
    if len(configs) == 1:
        return [outcome(configs[0], sources[0], threads)]
    learners: list[Learner] = []
    weights: list[float] = []
    counts: list[int] = []
    for number, (config, source) in enumerate(zip(configs, sources, strict=True)):
        members = Swarm(config, source, load_for_runs).members()
        names = sorted({model for member in members for model in member.network.models})
        rename = {name: f"run-{number}.model-{index}" for index, name in enumerate(names)}
        learners += [
            renamed_learner(member, f"run-{number}", rename, config.cross) for member in members
        ]
        weights += [m.samples if config.weights == "samples" else 1.0 for m in members]
        counts.append(len(members))
    first = configs[0]  # `stackable_batches` has put together only runs with equal rounds
    rounds = first.round_count
    arena = Arena(learners, every=first.every, weights=weights, test_every=rounds, threads=threads)
    tests = list(arena.run(rounds))[-1].tests
    starts = np.cumsum([0, *counts])
    return [Outcome.of(tests[a:b]) for a, b in pairwise(starts)]


def renamed_learner(member: Member, run: str, rename: Mapping[str, str], cross: bool) -> Learner:
    """A member's learner, with its peer and partial models renamed; the parameters do not change.

    run: the prefix of the peer's new name. rename: new names of partial models by their old names.
    """
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


def stackable_batches(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Divide cells into batches that can run in one arena: small networks, equal rounds, exact averaging.

    Every other cell is a batch of its own.
    """
    unfilled: dict[tuple[int, int], list[Cell]] = {}
    batches: list[list[Cell]] = []
    for cell in cells:
        config = cell.config
        capacity = min(MOST_STACKED_RUNS, MOST_STACKED_COORDINATES // max(_coordinates(config), 1))
        gossip = config.gossip
        can_stack = (
            config.time is None
            and config.topology is None
            and not config.bridge
            and not gossip.lossy_keys
            and gossip.rule == "push"
            and gossip.mode != "steady"
            and gossip.robust == "none"
            and config.sharing == "models"
            and config.fednp is None
            and all(model.matching == "none" for model in config.models)
            and not config.network.name_or_entry  # of unknown size until it is built
        )
        if not can_stack or capacity < 2:
            batches.append([cell])
            continue
        batch = unfilled.setdefault((config.round_count, config.every), [])
        if not batch:
            batches.append(batch)
        batch.append(cell)
        if len(batch) >= capacity:
            del unfilled[config.round_count, config.every]
    return batches


def _coordinates(config: Config) -> int:
    """About how many coordinates all peers of a run have together, computed from the layout."""
    sizes = [
        int(size) for size in config.network.layout.replace("<>", "=").split("=") if size.isdigit()
    ]
    products = sum(a * b + b for a, b in pairwise(sizes))
    return config.peers * products


# --- a sweep's table and figure ---------------------------------------------------------------------

_FORMATS: dict[str, str] = dict.fromkeys(("mean", "± sd", "median", "worst peer"), ".4f")


def combine(records: Sequence[Record]) -> Frame:
    """Return a row for every combination of values, in the order in which they first occur.

    `± sd` is the standard deviation over seeds, missing for a single run; `worst peer` is the lowest accuracy
    of any peer in any run. The last columns are the means of named metrics.
    """
    keys = [key for key in records[0]["settings"] if key != "seed"]
    rows = [
        {
            **{key: _value_text(r["settings"][key]) for key in keys},
            **{m: r[m] for m in ("accuracy", "worst")},
            **r.get("metrics", {}),
        }
        for r in records
    ]
    groups = frame_of(rows).groupby(keys or (lambda _: 0), sort=False)
    combined = groups["accuracy"].agg(["size", "mean", "std", "median"])
    combined["worst peer"] = groups["worst"].min()
    for name in records[0].get("metrics", {}):
        combined[name] = groups[name].mean()
    names = {"size": "runs", "std": "± sd"}
    return combined.rename(columns=names).reset_index(drop=not keys)


def table(records: Sequence[Record]) -> dict[str, Frame]:
    """Return the text table of all combinations of values."""
    metrics = dict.fromkeys(records[0].get("metrics", {}), ".4f")
    return {"summary": as_text(combine(records), _FORMATS | metrics)}


def draw(folder: Path, records: Sequence[Record], title: str) -> list[Path]:
    """Draw accuracy against the last swept key whose values are all numbers, if there is one."""
    keys = [key for key in records[0]["settings"] if key != "seed"]
    axis = next((key for key in reversed(keys) if _is_numeric(records, key)), None)
    if axis is None:
        return []
    from .figures import draw_lines  # matplotlib takes a second

    other_keys = [key for key in keys if key != axis]
    frame = combine(records)
    frame[axis] = frame[axis].astype(float)
    frame["label"] = frame[other_keys].agg(", ".join, axis=1) if other_keys else "all"
    columns = ["label", axis, "mean"]
    if frame["± sd"].notna().any():  # there are several seeds
        deviation = frame["± sd"].fillna(0)
        frame["low"], frame["high"] = frame["mean"] - deviation, frame["mean"] + deviation
        columns += ["low", "high"]
    return draw_lines(
        folder / "figure", frame, columns, title=title, x_label=axis, legend=", ".join(other_keys) or None,
        caption=_caption(int(frame["runs"].min()), int(frame["runs"].max())),
    )  # fmt: skip


def _caption(fewest: int, most: int) -> str:
    if most == 1:
        return "one run each, so the spread is not known; seeds = 5 in [sweep] repeats each run."
    counts = f"{most}" if fewest == most else f"{fewest} to {most}"
    return f"mean of {counts} runs; error bars: ± one standard deviation over seeds."


def _is_numeric(records: Sequence[Record], key: str) -> bool:
    values = [record["settings"][key] for record in records]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return numbers and len(set(values)) > 1


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _label(settings: Mapping[str, Any]) -> str:
    return ", ".join(_value_text(value) for value in settings.values())
