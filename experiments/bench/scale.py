"""How a round's time and memory grow with the swarm: each size in a process of its own.

`python -m gossamer.experiments.bench.scale KIND PEERS` measures one size and prints it as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from ...models import SgdLearner, SlicedNetwork, mlp
from ...models.stack import amount, peak_memory
from ..arena import Arena, ExactMean, Gossip
from ..data import DataError, load
from ..results import RecordFile, Results, read_records
from .harness import Row

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


def measure(kind: str, peers: int, rounds: int = ROUNDS) -> Size:
    """Build a swarm of one size and run some rounds of it."""
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
    peak = peak_memory() or 0
    tests = arena.test()
    accuracy = sum(test.accuracy for test in tests) / len(tests)
    needs = arena.needs().total
    return Size(kind, peers, built, median(whole), median(averaging), peak, needs, accuracy)


def small(peers: int) -> Arena:
    """64=32=10 on the built-in digits: 20 steps of 32, push-sum on a random 4-regular graph."""
    from ...topology import build

    learners = _learners(
        "digits", peers, "64=32=10", {"global": "64-32-10"}, stretch=640, batch=32, rate=0.1,
        reduction="sum",
    )  # fmt: skip
    return Arena(learners, mixing=Gossip(build("regular:4", peers, 1)))


def large(peers: int) -> Arena:
    """The paper's network on MNIST: 50 steps of 10, summed, then the mean at level 80."""
    learners = _learners(
        "mnist", peers, "784=300=100=10", {"global": "784-240-80-8"}, stretch=500, batch=10, rate=0.1,
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
            SlicedNetwork(mlp(layout), slices, peer=str(index), seed=1),
            (inputs[start : start + OWN], labels[start : start + OWN]),
            held,
            seed=index,
            **settings,  # type: ignore[arg-type]
        )
        for index, start in enumerate(starts)
    ]


def scale() -> list[Row]:
    """Measure every size, write and draw the growth, and show the largest."""
    from ..cli import console

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
                    size = _apart(kind, peers)
                    file.write(asdict(size))
                    console.err.print(describe(size), soft_wrap=True)
                    rows.append(_row(size))
        console.wrote(draw(folder))
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


def _apart(kind: str, peers: int) -> Size:
    """In a process of its own: the peak of memory belongs to a process."""
    command = [sys.executable, "-m", __name__, kind, str(peers)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(f"measuring {peers} peers failed: {answer.stderr.strip()[-500:]}")
    return Size(**json.loads(answer.stdout))


def draw(folder: Path) -> list[Path]:
    """Time and memory against the number of peers, from the file that was written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    from ..study.figures import COLOURS, MARKERS, save

    sizes = [Size(**record) for record in read_records(folder / "sizes.jsonl")]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Sequence[tuple[str, str]] = (("round", "seconds a round"), ("peak", "peak memory, GB"))
    for place, (field, label) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, 2, place)
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
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if place == 1:
            figure.legend(loc="outside upper center", ncols=1, frameon=False, fontsize=9)
    return save(figure, folder / "growth")


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1], int(sys.argv[2])))))
