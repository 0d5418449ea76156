"""Runs several federated methods on the same clients: `gossamer compare`, and `compare` for Python.

Accuracies, or another metric, are compared after equal numbers of rounds and of bytes sent; differences of
methods are paired seed by seed.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gossamer import __version__
from gossamer.entry import EntryError, import_from, load_entry
from gossamer.errors import hint

from ...gossip import Count
from ...gossip.compress import CompressError
from ...models import ModelError
from ..cli import console
from ..config.named_files import digest, entry_files, named_files, refuse_changed, topology_files
from ..config.needs import warn_unused_keys
from ..config.tables import Config, Experiment, Model, parse_table, read_table, require_table
from ..errors import ConfigError
from ..results import Record, client_rows, write_json
from ..study import Frame, Job, Study, StudyCell, as_text, frame_of, key_of, torch_threads
from . import METHODS
from .method import GLOBAL_MODEL, Client, Method

# Torch and matplotlib take seconds to import: functions that need them import them.
if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ...models import Callback, Metrics, SgdLearner

SWARM_KEYS = ("models", "gossip", "trust", "time", "sweep", "fednp")
"""Keys that a swarm's config may have and a comparison's config may not."""


class Comparison(Experiment):
    """Several methods on the same clients, with the same seeds, for the same number of rounds."""

    RENAMED: ClassVar = {
        "split": "its keys are in [data] now, where kind is called partition and the samples of all clients "
        'together total; tasks = "swaps" is a table [[tasks]] with kind = "swaps"'
    }

    seeds: Count = 3
    """Runs of every method. The data split, starting values and order of samples depend on the seed."""
    server: bool = True
    """Whether there is a server. Without one, methods that need it are refused."""
    metric: str = "accuracy"
    """What is compared: accuracy, loss, or the name of a metric in `training.metrics`. Of a loss or an error
    less is better."""
    reference: str | None = None
    """The method with which differences.csv compares the others, seed by seed; the first one if left out."""
    methods: dict[str, dict[str, Any]] = {"fedavg": {}, "gossamer": {}, "local": {}}
    """One table for every line of the picture. The table has the name of a method, or any other name and
    the key `method`: `[methods.strong-prox]` with `method = "fedprox"` and `mu = 1.0`. A method of your own
    is `method = "my_module:MyMethod"`, a subclass of `gossamer.experiments.federated.Method`."""

    def method(self, name: str) -> Method:
        """Return the method that the table [methods.NAME] describes, with its settings."""
        settings = {key: value for key, value in self.methods[name].items() if key != "method"}
        if ":" in (registered := self.registered_name(name)):
            return parse_table(_own_method(registered, name), settings, f"in [methods.{name}]")
        if registered not in METHODS:
            remedy = RECIPES.get(registered) or hint(
                registered, METHODS, are="there are", cutoff=0.75
            )
            raise ConfigError(f"no method is called {registered!r}; {remedy}")
        return parse_table(METHODS[registered], settings, f"in [methods.{name}]")

    def registered_name(self, name: str) -> str:
        """Return the name in `METHODS` of the method that the table [methods.NAME] describes."""
        return str(self.methods[name].get("method", name))


RECIPES = {
    "fedbn": 'write method = "gossamer", outputs = "shared" and buffers = "local"',
    "lg-fedavg": 'write method = "gossamer" and outputs = "own"',
}
"""How methods of other papers are written whose names are not those of a method here."""


def _own_method(entry: str, name: str) -> type[Method]:
    """Return the user's own class of a method, `module:class`."""
    try:
        found = load_entry(entry)
    except EntryError as error:
        raise ConfigError(f"in [methods.{name}]: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(
            f"in [methods.{name}]: {entry} is not a subclass of gossamer.experiments.federated.Method"
        )
    return found


def load_comparison(path: str | Path) -> Comparison:
    """Read a comparison's file, whose name is that of a comparison without one."""
    name = re.sub(r"[^A-Za-z0-9._&@-]", "-", Path(path).stem)
    return parse_comparison({"name": name} | read_table(path), str(path))


def parse_comparison(table: dict[str, Any], source: str = "config") -> Comparison:
    """Return the comparison that a table describes; raises ConfigError, which begins with `source`."""
    require_table(table, source, "load_comparison")
    import_from(Path(source).parent)  # methods of one's own
    if "methods" not in table and (swarm_keys := [key for key in SWARM_KEYS if key in table]):
        raise ConfigError(
            f"{source}: has {swarm_keys[0]!r}, so it is a swarm's config: run it with gossamer simulate or "
            "gossamer swarm. A comparison has a table [methods.NAME] for each method"
        )
    config = parse_table(Comparison, table, source)
    folder = Path(source).parent
    methods = {name: _with_path(settings, folder) for name, settings in config.methods.items()}
    config = config.model_copy(update={"methods": methods})
    reference = config.reference or ""
    mistakes = {
        f"'peers': should be at least 2 clients, not {config.peers}": config.peers < 2,
        "'network.layout': methods need gradients, and the associative network has none": (
            "<>" in config.network.layout or config.data.set == "sparse"
        ),
        "'methods': is empty; write a table such as [methods.fedavg] for each method to compare. Methods "
        f"are {', '.join(METHODS)}": not config.methods,
        f"'reference': no method is called {reference!r}; {hint(reference, config.methods)}": (
            bool(reference) and reference not in config.methods
        ),
    }
    for mistake, is_made in mistakes.items():
        if is_made:
            raise ConfigError(f"{source}: key {mistake}")
    for name in config.methods:
        try:
            method = config.method(name)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        if method.needs_server and not config.server:
            raise ConfigError(
                f"{source}: {name!r} ({config.registered_name(name)}) needs a server, and this comparison "
                "has none (server = false); the nearest method without one is "
                f"{method.nearest_without_server!r}"
            )
    return config


def _with_path(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a method's settings, with `folder` before the path of its graph if the file is there."""
    topology = settings.get("topology")
    if not isinstance(topology, str):
        return settings
    from ...topology import TopologyError
    from ..graphs.swarm import complete_path

    try:
        completed = complete_path(topology, folder)
    except TopologyError:
        return settings  # the method will raise the error when it starts
    is_file = isinstance(completed, dict)
    return settings | {"topology": f"file:{completed['path']}"} if is_file else settings


def choose(config: Comparison, only: list[str] | None) -> Comparison:
    """Return the comparison with only these methods; with all of them if `only` is empty or None."""
    for name in only or []:
        if name not in config.methods:
            suggestion = hint(name, config.methods, are="there are")
            raise ConfigError(f"--only {name}: the config has no such method; {suggestion}")
    if not only:
        return config
    methods = {name: settings for name, settings in config.methods.items() if name in only}
    return config.model_copy(update={"methods": methods})


# --- one run --------------------------------------------------------------------------------------------


def clients_of(
    config: Comparison, method: Method, seed: int, source: str = "config"
) -> list[Client]:
    """Return all clients of one run, which are the same for all methods with the same rate and epochs."""
    from ...models import SgdLearner
    from ..build import Swarm
    from ..data import load_once

    settings = {"rate": method.rate, "epochs": method.epochs}
    overrides = {key: value for key, value in settings.items() if value is not None}
    training = config.training.model_copy(update=overrides)
    swarm = Config(
        seed=seed, peers=config.peers, data=config.data, tasks=config.tasks,
        network=config.network, training=training, models=[Model(name=GLOBAL_MODEL, share=1.0)],
        callbacks=config.callbacks,
    )  # fmt: skip
    clients = []
    for member in Swarm(swarm, source, load_once).members():
        assert isinstance(member.learner, SgdLearner)  # settings that would wrap it are refused
        clients.append(Client(member.learner, training.epochs or 1))
    return clients


@dataclass(frozen=True)
class Cell(StudyCell):
    """One run: a method of a comparison with one seed; `line` is the name of the method's table.

    source: the file of the config, for errors.
    """

    config: Comparison
    seed: int
    source: str = "config"

    @cached_property
    def key(self) -> str:
        """A hash of all that the result of this run depends on.

        It leaves out other methods and the number of seeds: with more of them, finished runs stay valid. So
        they do when a release adds keys: defaults change only with the major version.
        """
        shared_settings = self.config.model_dump(
            mode="json", exclude_defaults=True,
            exclude={"name", "methods", "seeds", "seed", "server", "reference"},
        )  # fmt: skip
        settings = self.config.method(self.line)
        method_settings = settings.model_dump(mode="json", exclude_defaults=True)
        method, major = self.config.registered_name(self.line), __version__.partition(".")[0]
        everything = [major, shared_settings, method, method_settings, self.seed]
        text = json.dumps(everything, sort_keys=True)
        files = named_files(self.config, self.source)
        # The graph of a method may come from a file or from a function of the user.
        if "topology" in method_settings:
            files += topology_files(method_settings["topology"], Path(self.source).parent)
        files += entry_files(method, Path(self.source).parent)
        return key_of(text + digest(files))


def check(config: Comparison, source: str = "config") -> None:
    """Start every method once, so that a method that cannot work is refused before the first run."""
    warn_unused_keys(config, "compare", source)
    for name in config.methods:
        method = config.method(name)
        clients = clients_of(config, method, config.seed, source)
        state = _try(method, clients, name, config.metric, source)
        if warning := method.warning(state):
            console.warn(f"{source}: in [methods.{name}]: {warning}")


def run(cell: Cell, callbacks: Sequence[Callback] = ()) -> Record:
    """Run one cell and return its record; everything but seconds depends only on the cell.

    callbacks: follow the run, and may stop it.
    """
    import_from(Path(cell.source).parent)  # a worker of a cluster has not read the config
    config, method = cell.config, cell.config.method(cell.line)
    clients = clients_of(config, method, cell.seed, cell.source)
    record = run_method(
        method, clients, name=cell.line, seed=cell.seed, rounds=config.round_count,
        test_every=config.test_every, metric=config.metric, callbacks=callbacks, source=cell.source,
    )  # fmt: skip
    return {"key": cell.key, **record}


def run_method(
    method: Method,
    clients: list[Client],
    *,
    name: str,
    seed: int,
    rounds: int,
    test_every: int = 1,
    metric: str = "accuracy",
    callbacks: Sequence[Callback] = (),
    source: str = "compare",
) -> Record:
    """Run a method on clients and return the run's record.

    Its curve has, for every test, the accuracy of every client, its value of the metric if that is another,
    and the bytes and seconds so far. Seconds are processor time without testing.

    source: begins the message of an error.
    """
    from ...models import CallbackList, Progress, seeded_rng

    sent_bytes, seconds = 0, 0.0
    # Counted before the start, because a method may hold some samples out.
    samples = [client.sample_count for client in clients]
    state = _start(method, clients, name, source)
    tests = method.test(state, clients)
    _require_metric(metric, tests, name, source)
    curve = [_curve_point(0, sent_bytes, seconds, tests, metric)]
    callback_list, learners = CallbackList(callbacks), [client.learner for client in clients]
    stop = callback_list.start(Progress(0, rounds, learners))
    with callback_list.ending():
        for round_number in range(1, 0 if stop else rounds + 1):  # no rounds if stopped
            # Every round has its own random generator: participants are the same for all methods, however
            # many random numbers a method draws.
            context = method.round_context(clients, seeded_rng(seed, "round", round_number))
            began = time.process_time()
            try:
                state = method.round(state, clients, context)
            except CompressError as error:
                raise ConfigError(f"{source}: in [methods.{name}]: {error}") from None
            seconds += time.process_time() - began
            sent_bytes += context.total_bytes
            progress = Progress(round_number, rounds, learners)
            stop = callback_list.round(progress)
            if round_number % test_every == 0 or round_number == rounds or stop:
                tests = method.test(state, clients)
                curve.append(_curve_point(round_number, sent_bytes, seconds, tests, metric))
                by_name = {c.name: test for c, test in zip(clients, tests, strict=True)}
                stop = callback_list.test(replace(progress, tests=by_name)) or stop
            if stop:
                break
    is_short = curve[-1]["round"] < rounds
    return {
        "method": name, "seed": seed, "bound": method.is_bound, "samples": samples,
        "metric": metric, "curve": curve,
        **({"stopped_by": callback_list.stopped_by} if is_short else {}),
    }  # fmt: skip


def run_cells(cells: list[Cell], job: Job) -> list[Record]:
    """Run the cells one after the other and return their records.

    Raises ConfigError if a file that they read has changed meanwhile.
    """
    from ...models import make_callbacks

    records = []
    for cell in cells:
        name = f"{cell.line}-{cell.seed}"
        records.append(run(cell, make_callbacks(cell.config.callbacks, job.folder, name)))
    refuse_changed(cells)
    return records


def _start(method: Method, clients: list[Client], name: str, source: str) -> Any:
    """Return the method's first state; an error names the file and the method's table."""
    from ...topology import TopologyError

    try:
        return method.start(clients)
    except (ModelError, TopologyError) as error:
        raise ConfigError(f"{source}: in [methods.{name}]: {error}") from None


def _try(method: Method, clients: list[Client], name: str, metric: str, source: str) -> Any:
    """Start a method and return its first state; refuse a metric that its tests do not measure."""
    state = _start(method, clients, name, source)
    if metric not in ("accuracy", "loss"):
        _require_metric(metric, method.test(state, clients), name, source)
    return state


def _require_metric(metric: str, tests: Sequence[Metrics], method: str, source: str) -> None:
    """Raise ConfigError if no test has the metric."""
    known = dict.fromkeys(["accuracy", "loss", *(name for test in tests for name in test.values)])
    if metric not in known:
        raise ConfigError(
            f"{source}: key 'metric': tests of {method!r} measure no {metric!r}; name it in "
            "training.metrics too (in Python: `metrics` of the learners), or compare another: "
            f"{hint(metric, known)}"
        )


def _curve_point(
    round_number: int, sent_bytes: int, seconds: float, tests: list[Metrics], metric: str
) -> Record:
    """Return one point of a run's curve as plain data."""
    from ...models import value_of

    accuracies = [round(test.accuracy, 6) for test in tests]
    point = {
        "round": round_number, "bytes": sent_bytes, "seconds": round(seconds, 4),
        "accuracy": accuracies,
    }  # fmt: skip
    if metric != "accuracy":
        point["values"] = [round(value_of(test, metric), 6) for test in tests]
    named = dict.fromkeys(name for test in tests for name in test.values)
    metrics = {name: [round(value_of(test, name), 6) for test in tests] for name in named}
    return point | ({"metrics": metrics} if metrics else {})


def values_at(point: Record) -> list[float]:
    """Return every client's value of the metric that is compared, at a point of a run's curve."""
    return point.get("values", point["accuracy"])


def other_values(point: Record, metric: str) -> dict[str, list[float]]:
    """Return clients' values of all metrics but the one that is compared; a regression has no accuracy."""
    values = {"accuracy": point["accuracy"], **point.get("metrics", {})}
    return {
        name: each for name, each in values.items() if name != metric and not np.isnan(each).all()
    }


# --- all runs -------------------------------------------------------------------------------------------


def cells_of(config: Comparison, source: str = "config") -> list[Cell]:
    """Return every run, seed by seed, so that an interrupted comparison has all methods for some seeds."""
    seeds = range(config.seed, config.seed + config.seeds)
    return [Cell(name, config, seed, source) for seed in seeds for name in config.methods]


def comparison_study(config: Comparison, source: str = "config") -> Study[Cell]:
    """Return the study of all methods and seeds; raises ConfigError if a method cannot be run."""
    check(config, source)
    cells = cells_of(config, source)

    def latest(record: Record) -> str:
        return f"{record['method']}: {float(np.mean(values_at(record['curve'][-1]))):.3f}"

    def figure(folder: Path, records: Sequence[Record]) -> list[Path]:
        return write_report(records, folder, config.name, describe(config), len(cells))

    def tables(records: Sequence[Record]) -> dict[str, Frame]:
        return table(records, config.reference)

    return Study(
        config.name, cells, run_cells, tables, figure,
        titles={
            "summary": f"{config.name}: after {'at most ' * bool(config.callbacks)}"
            f"{config.round_count} rounds",
            "differences": "differences, paired by seed, with 95 % intervals"
            if config.seeds >= FEWEST_SEEDS
            else f"differences, paired by seed; intervals take {FEWEST_SEEDS} seeds or more",
        },
        shown=lambda name, frame: (
            frame[frame["measure"] == config.metric] if name == "differences" else frame
        ),
        warnings=early_stops,
        latest=latest,
        json_files={"config.json": config.model_dump(mode="json")},
    )  # fmt: skip


def describe(config: Comparison) -> str:
    """Return a text that describes the clients, their data and their training, for a picture's caption."""
    data, training = config.data, config.training
    partitions = {"dirichlet": f"Dirichlet({data.alpha:g})", "shards": f"{data.shards} shards each"}
    amounts = [f"{data.total} samples"] if data.total else []
    amounts += [f"{data.samples} samples each"] if data.samples else []
    tasks = [", two labels swapped at each" if task.kind == "swaps" else f", task {task.kind}"
             for task in config.tasks]  # fmt: skip
    tested = "each client's own classes" if data.tested == "own" else "all classes"
    prior = "" if training.prior == "none" else f", log-prior {training.prior}"
    given = training.optimizer
    optimizer = "" if given == "sgd" else f", {given if isinstance(given, str) else given['name']}"
    return (
        f"{data.set}, {', '.join(amounts) or 'all samples'}, {config.peers} clients, "
        f"{partitions.get(data.partition, data.partition)}{''.join(tasks)}; "
        f"{config.network.name_or_entry or config.network.layout}; "
        f"E = {training.epochs or 1}, B = {training.batch}, η = {training.rate:g}{optimizer}{prior}; "
        f"tested on {tested}."
    )


# --- accuracy at equal rounds and at equal bytes --------------------------------------------------------


def worst_decile(values: Sequence[float], metric: str = "accuracy") -> float:
    """Return the mean value of the worst tenth of the clients, rounded up to whole clients."""
    from ...models import less_is_better  # loads torch, which reading settings does not need

    count = math.ceil(len(values) / 10)
    return float(np.mean(sorted(values, reverse=less_is_better(metric))[:count]))


def name_of_worst(records: Sequence[Record]) -> str:
    """Return what the worst tenth of the clients is called: of fewer than ten, it is a single one."""
    return "worst decile" if len(values_at(records[0]["curve"][-1])) >= 10 else "worst client"


def common_budget(records: Sequence[Record]) -> int | None:
    """Return the fewest bytes that a run, other than a bound, has sent in all; None if all are bounds.

    Every such run has sent that many bytes at some time, so their accuracies can be compared there.
    """
    totals = [record["curve"][-1]["bytes"] for record in records if not record["bound"]]
    return min(totals, default=None)


def values_within(record: Record, limit: int) -> list[float] | None:
    """Return the clients' values when a run has sent `limit` bytes, interpolated between two tests.

    None if the run had not been tested after a round by then: its networks would be the untrained ones.
    """
    points = [point for point in record["curve"] if point["round"] > 0]
    if not points or points[0]["bytes"] > limit:
        return None
    before = [point for point in points if point["bytes"] <= limit][-1]
    after = next((point for point in points if point["bytes"] > limit), before)
    width = after["bytes"] - before["bytes"]
    part = (limit - before["bytes"]) / width if width else 0.0
    pairs = zip(values_at(before), values_at(after), strict=True)
    return [(1 - part) * left + part * right for left, right in pairs]


def by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the runs by method, in the order in which methods first occur."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record["method"], []).append(record)
    return runs


def metric_of(records: Sequence[Record]) -> str:
    """Return the metric that runs are compared by."""
    return records[0].get("metric", "accuracy")


def measures_of(records: Sequence[Record]) -> tuple[str, ...]:
    """Return what is compared of every run, by the names of columns.

    These are the metric's mean over clients and over the worst decile, after the last round and at the common
    budget of bytes.
    """
    return (metric_of(records), "worst", "at_bytes", "worst_at_bytes")


def early_stops(records: Sequence[Record]) -> list[str]:
    """Return a sentence for every method of which callbacks have stopped runs."""
    sentences = []
    for method, runs in by_method(records).items():
        if stopped := [run for run in runs if "stopped_by" in run]:
            names = ", ".join(dict.fromkeys(run["stopped_by"] for run in stopped))
            ends = (
                f"seed {run['seed']} after round {run['curve'][-1]['round']}" for run in stopped
            )
            sentences.append(f"{method}: stopped by callback {names}: {', '.join(ends)}")
    return sentences


def run_frame(records: Sequence[Record]) -> Frame:
    """Return a row for every run: method, seed, and the columns of `standings`, without means over seeds."""
    budget, metric = common_budget(records), metric_of(records)
    rows = []
    for run in records:
        end = run["curve"][-1]
        at_budget = None
        if budget is not None and not run["bound"]:
            at_budget = values_within(run, budget)
        rows.append(
            {
                "method": run["method"], "seed": run["seed"], "bound": run["bound"],
                "rounds": end["round"], "stopped": "stopped_by" in run,
                metric: float(np.mean(values_at(end))),
                "worst": worst_decile(values_at(end), metric),
                "at_bytes": np.mean(at_budget) if at_budget else None,
                "worst_at_bytes": worst_decile(at_budget, metric) if at_budget else None,
                "bytes": end["bytes"], "seconds": end["seconds"],
                **{name: np.mean(values) for name, values in other_values(end, metric).items()},
            }
        )  # fmt: skip
    return frame_of(rows).astype({"at_bytes": float, "worst_at_bytes": float})


def standings(records: Sequence[Record]) -> Frame:
    """Return a row of means over seeds for every method, in the order in which methods first occur.

    accuracy, worst: after the last round, the mean over all clients and over the worst decile. If another
        metric is compared, its column has its name instead of accuracy.
    deviation: the standard deviation of accuracy, or of that metric, over seeds; missing for a single seed.
    at_bytes, worst_at_bytes: the same two at the common budget of bytes, interpolated between two tests;
        missing for bounds, and for a method with a run that was not tested by then.
    bytes, seconds: those of the whole run. The columns after them are the means of all other metrics.
    rounds: the fewest of the method's runs. stopped: how many of them a callback has stopped early.
    """
    frame, measures = run_frame(records), measures_of(records)
    ends = ["bytes", "seconds", *other_values(records[0]["curve"][-1], measures[0])]
    summary = (
        frame.groupby("method", sort=False)
        .agg(
            bound=("bound", "first"), seeds=("bound", "size"), rounds=("rounds", "min"),
            stopped=("stopped", "sum"), deviation=(measures[0], "std"),
            **{name: (name, "mean") for name in (measures[0], "worst", *ends)},
            # Missing if one of the runs has none: the mean of the others would be of other seeds.
            **{n: (n, lambda v: v.mean(skipna=False)) for n in ("at_bytes", "worst_at_bytes")},
        )
        .reset_index()
    )  # fmt: skip
    counts = ["method", "bound", "seeds", "rounds", "stopped"]
    columns = [*counts, measures[0], "deviation", *measures[1:], *ends]
    return summary[columns].astype({"bytes": int})


def differences(records: Sequence[Record], reference: str | None = None) -> Frame:
    """Return how methods differ from a reference, paired seed by seed: a row for every method and measure.

    difference: the mean over the seeds that both have, method minus reference. low, high: its 95 % interval
    by Student's t distribution; missing for fewer than three seeds, which say too little about the spread.
    measure: see `measures_of`.

    reference: a method; the first one if left out.
    """
    from ...models import Difference

    runs = run_frame(records).set_index(["method", "seed"])
    methods = list(dict.fromkeys(run["method"] for run in records))
    first = reference if reference in methods else methods[0]
    rows = []
    for method in methods:
        if method == first:
            continue
        for measure in measures_of(records):
            pairs = (runs.loc[method][measure] - runs.loc[first][measure]).dropna()
            if not len(pairs):
                continue
            found = Difference.of(pairs.to_numpy())
            low, high = (found.count >= FEWEST_SEEDS and found.interval) or (None, None)
            rows.append([method, first, measure, found.mean, low, high, found.count])
    columns = ["method", "reference", "measure", "difference", "low", "high", "seeds"]
    return frame_of(rows, columns).astype({"low": float, "high": float})


FEWEST_SEEDS = 3
"""The fewest seeds for which differences have an interval."""


def coverage(records: Sequence[Record], planned: int | None = None) -> str:
    """Return over how many seeds the methods' means are taken, as text: `3 seeds`.

    If the comparison was stopped early: `2 to 3 seeds; 31 of 39 runs`. planned: the number of runs of the
    whole comparison; by default those in `records`.
    """
    counts = [len({run["seed"] for run in runs}) for runs in by_method(records).values()]
    fewest, most = min(counts), max(counts)
    seeds = f"{most} seed{'s' * (most != 1)}"
    if fewest < most:
        seeds = f"{fewest} to {seeds}"
    is_incomplete = planned is not None and len(records) < planned
    return f"{seeds}; {len(records)} of {planned} runs" if is_incomplete else seeds


def write_report(
    records: Sequence[Record], out: Path, title: str, caption: str, planned: int | None = None
) -> list[Path]:
    """Write summary.json, comparison.png and comparison.svg from the records; return the files.

    Nothing is written if there are no records. planned: the number of runs of the whole comparison, which may
    have been stopped early.
    """
    if not records:
        return []
    summary = out / "summary.json"
    methods = json.loads(standings(records).to_json(orient="records", double_precision=15))
    budget = common_budget(records)
    write_json(summary, {"name": title, "setting": caption, "budget": budget, "methods": methods})
    return [summary, *draw(records, out / "comparison", title, caption, planned)]


def table(records: Sequence[Record], reference: str | None = None) -> dict[str, Frame]:
    """Return text tables: the standings, methods from best to worst, then bounds; and the differences."""
    from ...models import less_is_better  # loads torch, which reading settings does not need

    budget, metric = common_budget(records), metric_of(records)
    at_budget = "equal bytes" if budget is None else f"at {budget / 1e6:.3g} MB"
    rows = standings(records).sort_values(
        ["bound", metric], ascending=[True, less_is_better(metric)], kind="stable"
    )
    rows["bytes"] = rows["bytes"].replace(0, float("nan")) / 1e6
    most = {
        name: max(r["curve"][-1]["round"] for r in rs) for name, rs in by_method(records).items()
    }
    rows["rounds"] = [
        f"{few}" if few == most[name] else f"{few} to {most[name]}"
        for name, few in zip(rows["method"], rows["rounds"], strict=True)
    ]
    rows["method"] += [" (bound)" if bound else "" for bound in rows["bound"]]
    worst = name_of_worst(records)
    names = {
        "method": "method", "seeds": "seeds", **({"rounds": "rounds"} if any(rows["stopped"]) else {}),
        metric: metric, "deviation": "± sd", "worst": worst, "at_bytes": at_budget,
        "worst_at_bytes": f"{worst} {at_budget}", "bytes": "MB sent", "seconds": "CPU s",
    }  # fmt: skip
    names |= {name: name for name in other_values(records[0]["curve"][-1], metric)}
    formats = {**dict.fromkeys(rows.columns[5:], ".3f"), "bytes": ".2f", "seconds": ".1f"}
    tables = {"summary": as_text(rows[list(names)], formats).rename(columns=names)}
    paired = differences(records, reference)
    if len(paired):
        paired["measure"] = paired["measure"].map(names)
        paired.insert(0, "what", paired.pop("method") + " − " + paired.pop("reference"))
        formats = dict.fromkeys(("difference", "low", "high"), "+.3f")
        tables["differences"] = as_text(paired, formats)
    return tables


# --- in Python ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """What `compare` found, as pandas tables.

    summary: a row for every method; see `standings`.
    differences: how methods differ from the reference, with 95 % intervals; see `differences`.
    clients: a row for every method, seed, tested round and client, with a column for every metric; `read` of
        gossamer.experiments gives the same of a folder of `gossamer compare`.
    records: the same as plain data, as runs.jsonl has it.
    """

    summary: Frame
    differences: Frame
    clients: Frame
    records: list[Record]

    def draw(self, path: str | Path, title: str = "comparison") -> list[Path]:
        """Draw the picture of `gossamer compare` as PATH.png and PATH.svg; return the files."""
        return draw(self.records, Path(path), title)


def compare(
    methods: Mapping[str, Method],
    learners: Callable[[int], Sequence[SgdLearner]],
    *,
    rounds: int = 30,
    seeds: int | Sequence[int] = 3,
    test_every: int = 1,
    metric: str = "accuracy",
    reference: str | None = None,
    callbacks: Callable[[str, int], Sequence[Callback]] = lambda method, seed: (),
    threads: int = 1,
) -> Compared:
    """Run methods on the same clients, with networks and data of one's own, and return tables.

        compare({"fedavg": FedAvg(), "prox": FedProx(mu=0.1)}, learners=make_learners, rounds=20)

    methods: by the names that tables and pictures have. Their `epochs` count; their rate is the learners'.
    learners: called with a seed for every method anew; returns the clients' learners, with their samples. It
        is called once more for every method at first, so that a method that cannot work is refused at once.
    seeds: how many, or which ones.
    metric: accuracy, loss, or the name of a metric of the learners.
    reference: the method with which the others are compared; the first one if left out.
    callbacks: called with a method's name and a seed; returns what follows that run, and may stop it.
    threads: of torch while methods run, as `gossamer --threads`. More seldom help networks of this size, and
        are much slower where other programs use the cores too.

    A terminal shows the progress.
    """
    from ...models import Callback, Progress

    if not methods:
        raise ModelError("compare: give at least one method, as in {'fedavg': FedAvg()}")
    for name, method in methods.items():
        if not isinstance(method, Method):
            raise ModelError(
                f"compare: method {name!r} is {method!r}: give an object, as in {{'fedavg': FedAvg()}}"
            )
    if not callable(learners):
        raise ModelError(
            "compare: learners: give a function that takes a seed and returns the learners"
        )
    if reference is not None and reference not in methods:
        raise ModelError(f"compare: no method is called {reference!r}; {hint(reference, methods)}")
    all_seeds = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not all_seeds:
        raise ModelError("compare: give at least one seed")

    def clients(method: Method, seed: int) -> list[Client]:
        return [Client(learner, method.epochs or 1) for learner in learners(seed)]

    with torch_threads(threads), console.progress("rounds") as bar:
        for name, method in methods.items():
            if method.rate is not None:
                raise ModelError(
                    f"compare: method {name!r} has a rate: give it to the learners instead"
                )
            _try(method, clients(method, all_seeds[0]), name, metric, "compare")
        task = bar.add_task("", total=rounds * len(methods) * len(all_seeds), latest="")

        class Advance(Callback):
            """Moves the bar."""

            def round(self, progress: Progress) -> None:
                bar.advance(task)

        records: list[Record] = []
        for seed, (name, method) in product(all_seeds, methods.items()):
            bar.update(task, completed=rounds * len(records), description=f"{name}, seed {seed}")
            record = run_method(
                method, clients(method, seed), name=name, seed=seed, rounds=rounds,
                test_every=test_every, metric=metric, callbacks=[*callbacks(name, seed), Advance()],
            )  # fmt: skip
            records.append(record)
        bar.update(task, completed=rounds * len(records))  # callbacks may have stopped the last run
    tests = frame_of([row for record in records for row in client_rows(record)])
    return Compared(standings(records), differences(records, reference), tests, records)


# --- the picture: a panel for each method, and all clients ----------------------------------------------

PANEL_COLUMNS = 4
"""Panels of methods side by side."""
METHOD_COLOUR, BOUND_COLOUR, OTHERS_COLOUR = "#0072B2", "#7F7F7F", "#D0D0D0"


def draw(
    records: Sequence[Record], path: Path, title: str, caption: str = "", planned: int | None = None
) -> list[Path]:
    """Draw a panel by rounds for every method, and all clients after the last round, as PNG and SVG.

    All methods are drawn alike; bounds are grey and dashed. planned: runs of the whole comparison, as for
    `coverage`. Returns the files.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ...models import less_is_better  # loads torch, which reading settings does not need
    from ..study.figures import save, tidy, whole_rounds

    groups, metric = by_method(records), metric_of(records)
    sign = -1 if less_is_better(metric) else 1
    order = sorted(groups, key=lambda m: (groups[m][0]["bound"], -sign * _final_value(groups[m])))
    budget = common_budget(records)
    at_budget = "" if not budget else f" Squares: the mean when {budget / 1e6:.3g} MB were sent."
    stopped = sum("stopped_by" in run for run in records)
    notes = (
        f"{caption} Left: mean over clients and {coverage(records, planned)}; band: lowest to highest seed; "
        "pale: the other methods. "
        f"Right: dots are clients; a bar goes from the {name_of_worst(records)} (diamond) to the mean (line, "
        f"number).{at_budget}"
        + " Grey, dashed: bounds, whose bytes are not counted." * any(r["bound"] for r in records)
        + " A run that was stopped early counts with its last test; the summary has the rounds."
        * bool(stopped)
    )
    wrapped = textwrap.fill(notes.strip(), 215)
    columns = min(PANEL_COLUMNS, len(order))
    rows = -(-len(order) // columns)
    height = max(1.45 * rows, 0.33 * len(order) + 1.2) + 0.6 + 0.17 * (wrapped.count("\n") + 1)
    figure = Figure(figsize=(14, height), layout="constrained")
    FigureCanvasAgg(figure)
    halves: Any = figure.subfigures(1, 2, width_ratios=(1.5, 1))
    left, right = halves
    panels = left.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    by_seed = {method: _curves(runs) for method, runs in groups.items()}
    curves = {method: (x, y.mean(0)) for method, (x, y) in by_seed.items()}
    for axes, method in zip(panels, order, strict=False):
        for other in order:
            axes.plot(*curves[other], color=OTHERS_COLOUR, linewidth=0.8, zorder=1)
        is_bound = groups[method][0]["bound"]
        axes.plot(
            *curves[method], color=_colour(groups[method]), linewidth=1.8, zorder=2,
            linestyle="--" if is_bound else "-",
        )  # fmt: skip
        rounds, values = by_seed[method]
        axes.fill_between(
            rounds,
            values.min(0),
            values.max(0),
            color=_colour(groups[method]),
            alpha=0.15,
            linewidth=0,
        )
        axes.set_title(f"{method}  {_final_value(groups[method]):.3f}", fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        tidy(axes)
    for axes in panels[len(order) :]:
        axes.set_visible(False)
    for axes in panels[max(len(order) - columns, 0) : len(order)]:  # the lowest of every column
        axes.tick_params(labelbottom=True)
    # All methods start with a steep change; the axis begins after it, where they differ.
    early = [y[len(y) // 6] for _, y in curves.values()]
    low, high = min(early), max(max(y) for _, y in curves.values())
    if sign > 0:
        panels[0].set_ylim(bottom=max(low - 0.03, 0))
    else:
        panels[0].set_ylim(top=max(early), bottom=min(0, high))
    whole_rounds(panels[0])
    left.supxlabel("round", fontsize=9)
    left.supylabel(metric, fontsize=9)
    axes = right.subplots()
    tidy(axes)
    _draw_clients(axes, groups, order, metric, budget)
    heading = (
        f"{title}: {len(groups)} ways to learn together, {metric} by round and client by client"
        + f"; {stopped} of {len(records)} runs stopped early" * bool(stopped)
    )
    figure.suptitle(heading, fontsize=13, fontweight="bold", x=0.01, ha="left")
    figure.supxlabel(wrapped, fontsize=8, color="#444444", x=0.01, ha="left")
    return save(figure, path)


def _draw_clients(
    axes: Axes,
    groups: dict[str, list[Record]],
    order: Sequence[str],
    metric: str,
    budget: int | None,
) -> None:
    """Draw a row per method: every client of every seed, their mean, the worst decile, and equal bytes."""
    best_last = order[::-1]  # the last row is on top
    for row, method in enumerate(best_last):
        runs = groups[method]
        ends, mean, colour = (
            [values_at(r["curve"][-1]) for r in runs],
            _final_value(runs),
            _colour(runs),
        )
        worst = float(np.mean([worst_decile(values, metric) for values in ends]))
        axes.barh(row, mean - worst, left=worst, height=0.6, color=colour, alpha=0.25, linewidth=0)
        axes.vlines(mean, row - 0.3, row + 0.3, color=colour, linewidth=2.2)
        dots = np.concatenate(ends)
        # Dots are offset, by the same amounts every time, so that equal values do not overlap.
        offsets = 0.22 * np.sin(2.4 * np.arange(len(dots)))
        axes.scatter(dots, row + offsets, s=6, color=colour, alpha=0.6, linewidths=0)
        axes.scatter([worst], [row], s=30, marker="D", color=colour, edgecolors="white", zorder=3)
        within = [values_within(run, budget) for run in runs] if budget else []
        if within and not runs[0]["bound"] and all(values is not None for values in within):
            value = float(np.mean([np.mean(values) for values in within if values is not None]))
            axes.scatter(
                [value], [row], s=26, marker="s", facecolors="none", edgecolors="#222222", zorder=4
            )
        axes.annotate(
            f"{mean:.3f}", (1, row), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8.5, color="#222222",
        )  # fmt: skip
    axes.set_yticks(range(len(best_last)), best_last, fontsize=9)
    axes.set(xlabel=f"{metric} after the last round")


def _colour(runs: Sequence[Record]) -> str:
    """Return the colour of a method: the same for all, and another for bounds."""
    return BOUND_COLOUR if runs[0]["bound"] else METHOD_COLOUR


def _curves(runs: Sequence[Record]) -> tuple[list[int], np.ndarray]:
    """Return the tested rounds of a method, and the mean over clients there: a row for every run.

    A run that a callback has stopped early keeps the value of its last test.
    """
    longest = max((run["curve"] for run in runs), key=lambda curve: curve[-1]["round"])
    rounds = [point["round"] for point in longest]
    rows = []
    for run in runs:
        tested = [point["round"] for point in run["curve"]]
        means = [float(np.mean(values_at(point))) for point in run["curve"]]
        rows.append([means[bisect_right(tested, number) - 1] for number in rounds])
    return rounds, np.array(rows)


def _final_value(runs: Sequence[Record]) -> float:
    """Return the mean of the metric after the last round, over clients and runs."""
    return float(np.mean([np.mean(values_at(run["curve"][-1])) for run in runs]))
