"""How cost grows with the swarm: rounds of the arena, events in virtual time.

Each size is measured in a process of its own, so that its memory is its own.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ...models import SgdLearner, SlicedNetwork, mlp
from ...models.stack import amount
from ...topology import build
from ..arena import (
    Arena,
    Conditions,
    ExactMean,
    Gossip,
    LearningSimulation,
    VectorisedPushSum,
    parse,
    peak_memory,
)
from ..cli import console
from ..config.tables import parse_config
from ..data import DataError, load
from ..results import RecordFile, Results, read_records
from . import Row, alternate, in_own_process

# --- the arena --------------------------------------------------------------------------------------

SIZES = {"small": (16, 64, 256, 1024, 4096, 10_000), "large": (16, 64, 256, 1000)}
ROUNDS = 8
OWN = 60
"""Samples that each peer holds."""
PLACE = Path("results/scale")
TITLES = {
    "small": "64=32=10, digits, push-sum on a 4-regular graph",
    "large": "784=300=100=10, MNIST, exact average at level 80",
}


@dataclass(frozen=True)
class Size:
    """What one size took: seconds to build, per round of training and averaging, and peak bytes."""

    kind: str
    peers: int
    build: float
    round: float
    average: float
    peak: int
    needs: int
    accuracy: float


def measure(kind: str, peers: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Build a swarm of one size and run some rounds of it; returns the fields of a `Size`."""
    torch.set_num_threads(1)
    started = perf_counter()
    arena = small(peers) if kind == "small" else large(peers)
    built = perf_counter() - started
    whole: list[float] = []
    averaging: list[float] = []
    for _ in range(rounds):
        started = perf_counter()
        arena.train()
        middle = perf_counter()
        arena.average()
        whole.append(perf_counter() - started)
        averaging.append(perf_counter() - middle)
    peak = peak_memory()
    tests = arena.test()
    accuracy = sum(test.accuracy for test in tests) / len(tests)
    needs = arena.needs().total
    size = Size(kind, peers, built, median(whole), median(averaging), peak, needs, accuracy)
    return asdict(size)


def small(peers: int) -> Arena:
    """64=32=10 on the built-in digits: 20 steps of 32, push-sum on a random 4-regular graph."""
    learners = _learners(
        "digits", peers, "64=32=10", {"global": "64-32-10"}, local_samples=640, batch=32, rate=0.1,
        reduction="sum",
    )  # fmt: skip
    return Arena(learners, mixing=Gossip(build("regular:4", peers, 1)))


def large(peers: int) -> Arena:
    """The paper's network on MNIST: 50 steps of 10, summed, then the mean at level 80."""
    learners = _learners(
        "mnist", peers, "784=300=100=10", {"global": "784-240-80-8"}, local_samples=500, batch=10, rate=0.1,
        reduction="sum",
    )  # fmt: skip
    return Arena(learners, mixing=ExactMean())


def _learners(
    name: str, peers: int, layout: str, slices: dict[str, str], **settings: object
) -> list[SgdLearner]:
    """Peers that look at windows of one tensor, so that samples are never copied."""
    data = load(name)
    inputs, labels = data.train.flat(), data.train.y
    assert data.test is not None
    held = data.test.flat()[:200], data.test.y[:200]
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs, labels = inputs[shuffled], labels[shuffled]
    starts = [index * OWN % (len(labels) - OWN + 1) for index in range(peers)]
    return [
        SgdLearner(
            SlicedNetwork(
                mlp(layout, activation="sigmoid", output="sigmoid"), slices, peer=str(index), seed=1
            ),
            (inputs[start : start + OWN], labels[start : start + OWN]),
            held,
            seed=index,
            loss="squared",
            **settings,  # type: ignore[arg-type]
        )
        for index, start in enumerate(starts)
    ]


def scale() -> list[Row]:
    """Measure every size, write and draw the growth, and show the largest."""
    rows: list[Row] = []
    with Results(PLACE, "bench scale").begun() as folder:
        with RecordFile(folder / "sizes.jsonl") as file:
            for kind, sizes in SIZES.items():
                try:
                    load("digits" if kind == "small" else "mnist")
                except DataError as error:
                    title = f"peers of {TITLES[kind]}"
                    rows.append(Row(title, "s", None, None, None, note=str(error)))
                    continue
                for peers in sizes:
                    size = Size(**in_own_process(measure, kind, peers))
                    file.write(asdict(size))
                    console.err.print(describe(size), soft_wrap=True)
                    rows.append(_row(size))
        console.print_written(draw(folder))
    return rows


def describe(size: Size) -> str:
    """One line for people."""
    return (
        f"{size.peers:,} peers of {TITLES[size.kind]}: built in {size.build:.1f} s, "
        f"{size.round:.3g} s a round ({size.average:.2g} s averaging), peak {amount(size.peak)} "
        f"(arena's estimate {amount(size.needs)}), accuracy {size.accuracy:.3f}"
    )


def _row(size: Size) -> Row:
    layout = TITLES[size.kind].split(",")[0]
    note = f"peak {amount(size.peak)}"
    return Row(f"{size.peers:,} × {layout}", "s a round", size.round, None, None, note=note)


def draw(folder: Path) -> list[Path]:
    """Time and memory against the number of peers, from the file that was written."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    from ..study.figures import COLOURS, MARKERS, panels, save

    sizes = [Size(**record) for record in read_records(folder / "sizes.jsonl")]
    figure, (row,) = panels(1, 2, "", 9, 4.03)
    for axes, field, label in zip(
        row, ("round", "peak"), ("seconds a round", "peak memory, GB"), strict=True
    ):
        for index, kind in enumerate(kind for kind in SIZES if any(s.kind == kind for s in sizes)):
            some = [size for size in sizes if size.kind == kind]
            values = [getattr(size, field) / (1e9 if field == "peak" else 1) for size in some]
            axes.loglog(
                [size.peers for size in some], values, color=COLOURS[index], marker=MARKERS[index],
                label=TITLES[kind], linewidth=1.6, markersize=5,
            )  # fmt: skip
        axes.set(xlabel="peers", ylabel=label)
        ticks = sorted({size.peers for size in sizes} - {1000})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    handles = row[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=1, frameon=False, fontsize=9)
    return save(figure, folder / "growth")


# --- virtual time -----------------------------------------------------------------------------------

FEW, MANY, MOST = 1_000, 10_000, 100_000
COORDINATES = 100
LEARNERS = 256
THREADS = 2
_EVENTS = 60_000  # per repetition, about


def virtual() -> list[Row]:
    """Microseconds per event of 10,000 peers against 1,000, 100,000 peers with their memory, learning."""
    large, small = Meter(MANY), Meter(FEW)
    seconds = alternate(large, small)
    many, few = (
        1e6 * taken / meter.events for taken, meter in zip(seconds, (large, small), strict=True)
    )
    rate, peak = in_own_process(largest, MOST)
    note = f"{1e6 / many:,.0f} events/s; baseline: {FEW:,} peers, {1e6 / few:,.0f} events/s"
    return [
        Row(
            f"virtual time, {MANY:,} peers", "µs/event", many, few, many / few, 1.5, "at most", note
        ),
        Row(
            f"virtual time, {MOST:,} peers",
            "µs/event",
            1e6 / rate,
            few,
            1e6 / rate / few,
            note=f"{rate:,.0f} events/s, peak memory {peak / 1e6:,.0f} MB",
        ),
        learning(),
    ]


def learning(peers: int = LEARNERS, rounds: int = 4, repeats: int = 5) -> Row:
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
    made = [LearningSimulation(config, threads=THREADS) for _ in range(repeats + 1)]
    apart = LearningSimulation(config)
    trainings = 0

    def together() -> None:
        nonlocal trainings
        swarm = made.pop()
        swarm.run()
        trainings = sum(swarm.rounds)

    def one_by_one() -> None:
        for number in range(trainings):
            apart.members[number % peers].learner.train(1)

    mine, plain = alternate(together, one_by_one, repeats=repeats)
    note = f"baseline: its {trainings:,} trainings, learner by learner"
    return Row(f"{peers} peers learn in virtual time", "s", mine, plain, plain / mine, note=note)


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
