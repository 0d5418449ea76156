"""Benchmarks of simulations in virtual time: seconds per event, and overhead of learning over training."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from ...topology import build
from ..arena import Conditions, LearningSimulation, VectorisedPushSum, parse, peak_memory
from ..config.tables import parse_config
from . import Row, alternate, in_own_process, race

FEW, MANY, MOST = 1_000, 10_000, 100_000
COORDINATES = 100
_EVENTS = 60_000  # approximately, per repetition


def virtual() -> list[Row]:
    """Time an event of 10,000 peers against one of 1,000; measure 100,000 peers; time learning."""
    large, small = TimedSwarm(MANY), TimedSwarm(FEW)
    seconds = alternate(large, small)
    many_us, few_us = 1e6 * seconds[0] / large.events, 1e6 * seconds[1] / small.events
    rate, peak = in_own_process(largest, MOST)
    note = f"{1e6 / many_us:,.0f} events/s; baseline: {FEW:,} peers, {1e6 / few_us:,.0f} events/s"
    most_note = f"{rate:,.0f} events/s, peak memory {peak / 1e6:,.0f} MB"
    return [
        Row(f"virtual time, {MANY:,} peers", "µs/event", many_us, few_us, 1.5, "at most", note),
        Row(f"virtual time, {MOST:,} peers", "µs/event", 1e6 / rate, few_us, note=most_note),
        learning(),
    ]


class TimedSwarm:
    """A simulated swarm; every call simulates a few more seconds, about `events` events."""

    def __init__(self, peers: int, events: int = _EVENTS):
        self._swarm = swarm(peers)
        self._seconds = events / (2 * peers)  # every peer pushes and receives once per second
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        for _ in self._swarm.run(self._seconds):
            pass

    @property
    def events(self) -> float:
        """The mean number of events per call so far."""
        return self._swarm.events / self._calls


def swarm(peers: int) -> VectorisedPushSum:
    """Push-sum of random values on a random 4-regular graph; training times and delays are exponential."""
    values = np.random.default_rng(0).standard_normal((peers, COORDINATES))
    conditions = Conditions(training=parse("exponential:1"), delay=parse("exponential:0.5"))
    return VectorisedPushSum(values, build("regular:4", peers, 0), conditions)


def largest(peers: int, seconds: float = 5.0) -> tuple[float, int]:
    """Events per second of a large swarm, and the peak bytes of this process."""
    simulation = swarm(peers)
    started = time.perf_counter()
    for _ in simulation.run(seconds):
        pass
    return simulation.events / (time.perf_counter() - started), peak_memory()


def learning(peers: int = 256, rounds: int = 4, repeats: int = 5) -> Row:
    """Time a swarm that learns in virtual time against as many trainings without the simulation."""
    table = {
        "peers": peers,
        "rounds": rounds,
        "topology": "regular:4",
        "data": {"samples": 5},
        "network": {"layout": "64=32=10", "activation": "sigmoid", "output": "sigmoid"},
        "training": {"local_samples": 200, "rate": 0.1, "loss": "squared", "reduction": "sum"},
        "models": [{"name": "global", "layout": "64-32-0"}],
        "time": {"training": "lognormal:1:0.3", "delay": "exponential:0.2", "loss": 0.1},
    }
    config = parse_config(table)
    simulations = [LearningSimulation(config, threads=2) for _ in range(repeats + 1)]
    members = LearningSimulation(config).members
    trainings = 0

    def simulate() -> None:
        nonlocal trainings
        simulation = simulations.pop()
        simulation.run()
        trainings = sum(simulation.rounds)

    def train_only() -> None:
        for number in range(trainings):
            members[number % peers].learner.train(1)

    row = race(f"{peers} peers learn in virtual time", simulate, train_only, repeats=repeats)
    return replace(row, note=f"baseline: its {trainings:,} trainings, learner by learner")
