"""Comparisons: several methods on the same clients, from a TOML file to the curve of every run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import ValidationError

from gossamer.names import hint

from ...gossip import Count
from ...gossip.compress import CompressError
from ...models import Metrics, ModelError, SgdLearner, stream
from ...topology import TopologyError
from ..build import Swarm
from ..config.named_files import digest, named_files, refuse_changed, topology_files
from ..config.needs import warn_unused_keys
from ..config.tables import Config, Experiment, Model, first_mistake, read_table, require_table
from ..data import load_once
from ..errors import ConfigError
from ..results import Record
from ..study import Job, Study, key_of
from . import METHODS, find
from .method import WHOLE, Client, Method
from .report import table, write_report

SWARMS = ("models", "gossip", "trust", "time", "sweep", "fednp")
"""Keys that only a swarm's config has."""


class Comparison(Experiment):
    """Several methods on the same clients, with the same seeds, for the same number of rounds."""

    RENAMED: ClassVar = {
        "split": "its keys are in [data] now, where kind is called partition and the samples of all clients "
        'together total; tasks = "swaps" is a table [[tasks]] with kind = "swaps"'
    }

    seeds: Count = 3
    """Runs of every method: the split, the starting values and the order of samples follow the seed."""
    server: bool = True
    """Whether there is a server. Without one, methods that need it are refused."""
    methods: dict[str, dict[str, Any]] = {"fedavg": {}, "gossamer": {}, "local": {}}
    """A table for every line of the picture. Its name is the method's, or `method` inside it is:
    `[methods.strong-prox]` with `method = "fedprox"` and `mu = 1.0`."""

    def method(self, name: str) -> Method:
        """The method of one table, with its knobs."""
        knobs = {key: value for key, value in self.methods[name].items() if key != "method"}
        kind = find(self.kind(name))
        try:
            return kind.model_validate(knobs)
        except ValidationError as error:
            raise ConfigError(f"in [methods.{name}]: {first_mistake(error, kind)}") from None

    def kind(self, name: str) -> str:
        """The name under which a table's method is registered."""
        return str(self.methods[name].get("method", name))


def load_comparison(path: str | Path) -> Comparison:
    """Read a comparison's file."""
    return parse_comparison(read_table(path), str(path))


def parse_comparison(table: dict[str, Any], source: str = "config") -> Comparison:
    """Check a table that was read or written by hand; `source` starts every error."""
    require_table(table, source, "load_comparison")
    if "methods" not in table and (foreign := [key for key in SWARMS if key in table]):
        raise ConfigError(
            f"{source}: has {foreign[0]!r}, so it is a swarm's config: run it with gossamer simulate or "
            "gossamer swarm. A comparison has a table [methods.NAME] for each method"
        )
    try:
        config = Comparison.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_mistake(error, Comparison)}") from None
    if config.peers < 2:
        raise ConfigError(
            f"{source}: key 'peers': should be at least 2 clients, not {config.peers}"
        )
    if "<>" in config.network.layout or config.data.set == "sparse":
        raise ConfigError(
            f"{source}: key 'network.layout': methods need gradients, which the associative network "
            "has not"
        )
    if not config.methods:
        raise ConfigError(
            f"{source}: key 'methods': names none; write a table such as [methods.fedavg] for each of "
            f"those to compare. There are {', '.join(METHODS)}"
        )
    for name in config.methods:
        try:
            method = config.method(name)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        if method.needs_server and not config.server:
            raise ConfigError(
                f"{source}: {name!r} ({config.kind(name)}) needs a server, and this comparison has none "
                f"(server = false); the nearest method without one is {method.nearest_without!r}"
            )
    return config


def choose(config: Comparison, only: list[str] | None) -> Comparison:
    """The comparison with some of its methods left out."""
    for name in only or []:
        if name not in config.methods:
            near = hint(name, config.methods, are="there are")
            raise ConfigError(f"--only {name}: the config has no such method; {near}")
    if not only:
        return config
    kept = {name: knobs for name, knobs in config.methods.items() if name in only}
    return config.model_copy(update={"methods": kept})


# --- one run --------------------------------------------------------------------------------------------


def clients_of(
    config: Comparison, method: Method, seed: int, source: str = "config"
) -> list[Client]:
    """All clients of one run. They depend on the seed, and on no method but by its rate and epochs."""
    own = {"rate": method.rate, "epochs": method.epochs}
    changes = {key: value for key, value in own.items() if value is not None}
    training = config.training.model_copy(update=changes)
    swarm = Config(
        seed=seed, peers=config.peers, data=config.data, tasks=config.tasks,
        network=config.network, training=training, models=[Model(name=WHOLE, share=1.0)],
    )  # fmt: skip
    clients = []
    for member in Swarm(swarm, source, load_once).members():
        assert isinstance(member.learner, SgdLearner)  # what would wrap it is refused
        clients.append(Client(member.learner, training.epochs or 1))
    return clients


@dataclass(frozen=True)
class Cell:
    """One run: a comparison's method, by the name of its table, and a seed."""

    config: Comparison
    name: str
    seed: int
    source: str = "config"

    @property
    def key(self) -> str:
        """Names the run by all that decides its result; other methods and the number of seeds do not."""
        return self._key

    @property
    def line(self) -> str:
        """The method's name."""
        return self.name

    @cached_property
    def _key(self) -> str:  # kept, so that a worker has the key of when the comparison was started
        decisive = self.config.model_dump(
            mode="json", exclude={"name", "methods", "seeds", "seed", "server"}
        )
        knobs = self.config.method(self.name).model_dump(mode="json")
        text = json.dumps([decisive, self.config.kind(self.name), knobs, self.seed], sort_keys=True)
        files = named_files(self.config, self.source)
        if "topology" in knobs:  # a graph may be a file, or a function of the user's
            files += topology_files(knobs["topology"], Path())
        return key_of(text + digest(files))


def check(config: Comparison, source: str = "config") -> None:
    """Start every method once, so that one which cannot work is refused before any has run."""
    warn_unused_keys(config, "compare", source)
    for name in config.methods:
        method = config.method(name)
        _start(method, clients_of(config, method, config.seed, source), name, source)


def run(cell: Cell) -> Record:
    """The curve of one run: accuracy of every client, bytes and seconds so far, at every test.

    Seconds are those that this machine computed, without testing; all else depends on the cell alone.
    """
    config, method = cell.config, cell.config.method(cell.name)
    clients = clients_of(config, method, cell.seed, cell.source)
    sent, taken = 0, 0.0
    state = _start(method, clients, cell.name, cell.source)
    curve = [_point(0, sent, taken, method.test(state, clients))]
    for index in range(1, config.rounds + 1):
        # Dice of its own for every round: methods that throw them more often have the same participants.
        turn = method.turn(clients, stream(cell.seed, "round", index))
        began = time.process_time()
        try:
            state = method.round(state, clients, turn)
        except CompressError as error:
            raise ConfigError(f"{cell.source}: in [methods.{cell.name}]: {error}") from None
        taken += time.process_time() - began
        sent += turn.report().bytes
        if index % config.test_every == 0 or index == config.rounds:
            curve.append(_point(index, sent, taken, method.test(state, clients)))
    return {
        "key": cell.key,
        "method": cell.name,
        "seed": cell.seed,
        "bound": method.bound,
        "samples": [client.samples for client in clients],
        "curve": curve,
    }


def run_cells(cells: list[Cell], job: Job) -> list[Record]:
    """Run each cell."""
    records = [run(cell) for cell in cells]
    refuse_changed(cells)
    return records


def _start(method: Method, clients: list[Client], name: str, source: str) -> Any:
    try:
        return method.start(clients)
    except (ModelError, TopologyError) as error:
        raise ConfigError(f"{source}: in [methods.{name}]: {error}") from None


def _point(index: int, sent: int, taken: float, tests: list[Metrics]) -> Record:
    return {
        "round": index,
        "bytes": sent,
        "seconds": round(taken, 4),
        "accuracy": [round(test.accuracy, 6) for test in tests],
    }


# --- all runs -------------------------------------------------------------------------------------------


def cells_of(config: Comparison, source: str = "config") -> list[Cell]:
    """Every run, seed by seed, so that an interrupted comparison has all methods for some seeds."""
    seeds = range(config.seed, config.seed + config.seeds)
    return [Cell(config, name, seed, source) for seed in seeds for name in config.methods]


def comparison_study(config: Comparison, source: str = "config") -> Study[Cell]:
    """Return the study of all methods and seeds; raises ConfigError for one that cannot be run."""
    check(config, source)
    cells = cells_of(config, source)

    def latest(record: Record) -> str:
        return f"{record['method']}: {float(np.mean(record['curve'][-1]['accuracy'])):.3f}"

    def figure(folder: Path, records: Sequence[Record]) -> list[Path]:
        return write_report(records, folder, config.name, describe(config), len(cells))

    return Study(
        config.name, cells, run_cells, table, figure,
        titles={"summary": f"{config.name}: after {config.rounds} rounds"},
        latest=latest,
        about={"config.json": config.model_dump(mode="json")},
    )  # fmt: skip


def describe(config: Comparison) -> str:
    """The setting, as a caption says it."""
    data, training = config.data, config.training
    dealt = {"dirichlet": f"Dirichlet({data.alpha:g})", "shards": f"{data.shards} shards each"}
    amounts = [f"{data.total} samples"] if data.total else []
    amounts += [f"{data.samples} samples each"] if data.samples else []
    tasks = [", two labels swapped at each" if one.kind == "swaps" else f", task {one.kind}"
             for one in config.tasks]  # fmt: skip
    tested = "each client's own classes" if data.tested == "own" else "all classes"
    return (
        f"{data.set}, {', '.join(amounts) or 'all samples'}, {config.peers} clients, "
        f"{dealt.get(data.partition, data.partition)}{''.join(tasks)}; "
        f"{config.network.named or config.network.layout}; "
        f"E = {training.epochs or 1}, B = {training.batch}, η = {training.rate:g}; tested on {tested}."
    )
