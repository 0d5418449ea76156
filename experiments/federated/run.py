"""One run of a comparison: a method, a seed, and the curve that they give."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...gossip.compress import CompressError
from ...models import Metrics, ModelError, stream
from ...topology import TopologyError
from ..config.named_files import digest, entry_files, refuse_changed, topology_files
from ..config.tables import ConfigError
from ..results import Record
from ..study import Job
from .client import Client
from .config import Comparison
from .deal import clients_of
from .method import Method


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
        files = entry_files(self.config.data.set, Path(self.source).parent)
        if "topology" in knobs:  # a graph may be a file, or a function of the user's
            files += topology_files(knobs["topology"], Path())
        text += digest(files)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def cells_of(config: Comparison, source: str = "config") -> list[Cell]:
    """Every run, seed by seed, so that an interrupted comparison has all methods for some seeds."""
    seeds = range(config.seed, config.seed + config.seeds)
    return [Cell(config, name, seed, source) for seed in seeds for name in config.methods]


def check(config: Comparison, source: str = "config") -> None:
    """Start every method once, so that one which cannot work is refused before any has run."""
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
