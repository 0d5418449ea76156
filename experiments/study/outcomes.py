"""What a run comes to: the accuracies of its peers at the end, for one config or several in one stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from typing import Protocol, TypeVar

import numpy as np

from ...models import Learner, Metrics, ModelGraph, SlicedNetwork
from ..arena import Arena
from ..arena.simulation import Simulation
from ..build import Member, Swarm
from ..config.tables import Config, ConfigError

STACK_COORDINATES = 1 << 20
"""Runs go side by side in one stack while all their networks together have no more coordinates. Beyond
it products are large enough to be worth their while alone, and a worker process per run is better."""
MOST_RUNS = 8
"""Runs in one stack: they are finished, and on disk, together."""


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


class Configured(Protocol):
    """Anything that runs a config."""

    @property
    def config(self) -> Config:
        """The config."""
        ...


C = TypeVar("C", bound=Configured)


def stackable(cells: Sequence[C]) -> list[list[C]]:
    """Batches of cells that can share an arena: small networks, the same rounds, exact averaging."""
    open_: dict[tuple[int, int], list[C]] = {}
    batches: list[list[C]] = []
    for cell in cells:
        config = cell.config
        room = min(MOST_RUNS, STACK_COORDINATES // max(_coordinates(config), 1))
        exact = config.time is None and config.topology is None and not config.bridge
        exact = exact and not config.gossip.lossy and config.gossip.rule == "push"
        exact = exact and all(model.matching == "none" for model in config.models)
        exact = exact and not config.network.named  # large, and of a size that only building tells
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
