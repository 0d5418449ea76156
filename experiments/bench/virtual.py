"""Virtual time: what an event costs as swarms grow, and what learning costs beside its training alone."""

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
_EVENTS = 60_000  # per repetition, about


def virtual() -> list[Row]:
    """Microseconds per event of 10,000 peers against 1,000, 100,000 peers with their memory, learning."""
    large, small = Meter(MANY), Meter(FEW)
    seconds = alternate(large, small)
    many, few = 1e6 * seconds[0] / large.events, 1e6 * seconds[1] / small.events
    rate, peak = in_own_process(largest, MOST)
    note = f"{1e6 / many:,.0f} events/s; baseline: {FEW:,} peers, {1e6 / few:,.0f} events/s"
    most = f"{rate:,.0f} events/s, peak memory {peak / 1e6:,.0f} MB"
    return [
        Row(f"virtual time, {MANY:,} peers", "µs/event", many, few, 1.5, "at most", note),
        Row(f"virtual time, {MOST:,} peers", "µs/event", 1e6 / rate, few, note=most),
        learning(),
    ]


class Meter:
    """A swarm that goes on a little with every call; `events` is the mean number of events of a call."""

    def __init__(self, peers: int, events: int = _EVENTS):
        self._swarm = swarm(peers)
        self._seconds = events / (2 * peers)  # a push and an arrival per peer and second
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        for _ in self._swarm.run(self._seconds):
            pass

    @property
    def events(self) -> float:
        """Events per call."""
        return self._swarm.events / self._calls


def swarm(peers: int) -> VectorisedPushSum:
    """Random numbers on a random 4-regular graph; pauses and delays are exponential."""
    values = np.random.default_rng(0).standard_normal((peers, COORDINATES))
    conditions = Conditions(training=parse("exponential:1"), delay=parse("exponential:0.5"))
    return VectorisedPushSum(values, build("regular:4", peers, 0), conditions)


def largest(peers: int, seconds: float = 5.0) -> tuple[float, int]:
    """Events per second of a large swarm, and the most bytes that the process held."""
    made = swarm(peers)
    started = time.perf_counter()
    for _ in made.run(seconds):
        pass
    return made.events / (time.perf_counter() - started), peak_memory()


def learning(peers: int = 256, rounds: int = 4, repeats: int = 5) -> Row:
    """A swarm that learns in virtual time, against its training alone, learner by learner."""
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
    made = [LearningSimulation(config, threads=2) for _ in range(repeats + 1)]
    apart = LearningSimulation(config)
    trainings = 0

    def together() -> None:
        nonlocal trainings
        simulation = made.pop()
        simulation.run()
        trainings = sum(simulation.rounds)

    def one_by_one() -> None:
        for number in range(trainings):
            apart.members[number % peers].learner.train(1)

    row = race(f"{peers} peers learn in virtual time", together, one_by_one, repeats=repeats)
    return replace(row, note=f"baseline: its {trainings:,} trainings, learner by learner")
