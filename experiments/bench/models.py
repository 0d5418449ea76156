"""What partial models cost on a large network, and matching cells against the same in plain loops."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch.nn import functional as F

from ...models import SlicedNetwork, resnet
from ...models.matching import Cells, MatchOptions, match
from . import Row, alternate, in_own_process, race

# --- gathering and scattering against training ------------------------------------------------------

BATCH = 32
LEVEL = 0.8
"""The share of every hidden part that is averaged."""
WANTED = 0.05
"""The most that reading and writing may take of one step."""
REPEATS = 3
"""A step of ResNet-18 takes seconds."""


@dataclass(frozen=True)
class Work:
    """The two things that are timed, and what they work on."""

    exchange: Callable[[], object]
    step: Callable[[], object]
    values: int
    shared: int


def prepare(widths: tuple[int, ...] = (64, 128, 256, 512), blocks: int = 2) -> Work:
    """A residual network for 32×32 images, most of whose cells are global; ResNet-18 by default."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    module = resnet(widths=widths, blocks=blocks)
    network = SlicedNetwork(module, {"global": LEVEL}, example=images[:1], seed=0, check=False)
    module.train()

    def exchange() -> None:
        """What one averaging asks of a network: its values out, other values in."""
        network.write("global", network.read("global"))

    def step() -> None:
        """One step of plain descent."""
        module.zero_grad(set_to_none=True)
        F.cross_entropy(module(images), labels).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.01)

    return Work(exchange, step, len(network.flat), len(network.slicing.coordinates("global")))


def networks(
    prepared: Callable[[], Work] = prepare, timed: Callable[..., tuple[float, float]] = alternate
) -> list[Row]:
    """Read and write a partial model at level 80 beside one training step of batch 32, one thread each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work = prepared()
        taken, step = timed(work.exchange, work.step, repeats=REPEATS)
    finally:
        torch.set_num_threads(threads)
    name = f"read and write {work.shared / 1e6:.1f} of {work.values / 1e6:.1f} million values"
    note = f"ResNet-18 at level {LEVEL:.0%}; baseline: one training step of {BATCH} images of 32×32"
    return [Row(name, "s", taken, step, WANTED, "at most", note)]


# --- matching ---------------------------------------------------------------------------------------

PEERS, INPUTS, OUTPUTS = 10, 784, 10
WIDTHS = (50, 100, 200, 400, 800)
_REPEATS = 1  # after one that warms up; the loops take seconds


def matching() -> list[Row]:
    """The ratio at 100 cells, then seconds from 50 to 800 cells.

    In a process of its own, where numpy has one thread: on a busy machine a product of this size waits longer
    for its second thread than it computes, and numpy takes no advice once it is loaded.
    """
    one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return in_own_process(measure, **one)


def measure() -> list[Row]:
    """Return the rows."""
    peers = planted(100)
    found: dict[str, list[np.ndarray]] = {}

    def products() -> None:
        found["products"] = list(match(peers).assignments)

    def loops() -> None:
        found["loops"] = looped(peers)

    name = f"matching, {PEERS} peers, {INPUTS} inputs, 100 cells, to convergence"
    row = race(name, products, loops, 20.0, repeats=_REPEATS)
    if not same_partition(found["products"], found["loops"]):
        raise AssertionError("the loops and the products found different partitions")
    fast = match(peers)
    note = f"baseline: plain loops; {len(fast.atoms)} atoms, {fast.sweeps} sweeps"
    rows = [replace(row, note=note)]
    first = None
    for width in WIDTHS:
        cells = planted(width)
        started = time.perf_counter()
        grown = match(cells, MatchOptions(limit=None))
        seconds = time.perf_counter() - started
        first = first or seconds
        note = f"ratio: against {WIDTHS[0]} cells; {len(grown.atoms)} atoms, {grown.sweeps} sweeps"
        rows.append(Row(f"matching, {width} cells", "s", seconds, first, note=note))
    return rows


def planted(width: int, seed: int = 0, inputs: int = INPUTS) -> list[Cells]:
    """Peers that each have a noisy two thirds of common cells, in an order of their own."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(width * 3 // 2, inputs + 1 + OUTPUTS)) * 0.15
    found = []
    for _ in range(PEERS):
        mine = common[rng.permutation(len(common))[:width]]
        found.append(Cells.of(mine + 0.05 * rng.normal(size=mine.shape)))
    return found


def looped(peers: list[Cells], sweeps: int = 20) -> list[np.ndarray]:
    """The same algorithm as one writes it down: a loop over cells, a loop over atoms, sums afresh."""
    options = MatchOptions()
    prior, count = options.prior_precision, len(peers)
    assigned: list[np.ndarray | None] = [None] * count
    rng = np.random.default_rng(0)

    def step(j: int) -> bool:
        sums: dict[int, np.ndarray] = {}
        totals: dict[int, np.ndarray] = {}
        members: dict[int, int] = {}
        for k, labels in enumerate(assigned):
            if k == j or labels is None:
                continue
            for cell, atom in enumerate(labels):
                a = int(atom)
                value = peers[k].values[cell] * peers[k].precision
                sums[a] = sums[a] + value if a in sums else value
                totals[a] = totals[a] + peers[k].precision if a in totals else peers[k].precision
                members[a] = members.get(a, 0) + 1
        atoms = sorted(sums)
        cells = peers[j].values
        fresh = min(len(cells), max((options.limit or 10**9) - len(atoms), 1))
        cost = np.empty((len(cells), len(atoms) + fresh))
        before = {a: np.sum(sums[a] ** 2 / (prior + totals[a])) for a in atoms}
        for row, cell in enumerate(cells):
            value = cell * peers[j].precision
            for column, a in enumerate(atoms):
                after = np.sum((sums[a] + value) ** 2 / (prior + totals[a] + peers[j].precision))
                odds = math.log(members[a] / (count - members[a]))
                cost[row, column] = -(after - before[a]) - 2 * odds
            alone = np.sum(value**2 / (prior + peers[j].precision))
            for rank in range(fresh):
                cost[row, len(atoms) + rank] = (
                    -alone - 2 * math.log(options.mass / count) + 2 * math.log(rank + 1)
                )
        _, columns = linear_sum_assignment(cost)
        free = max(atoms, default=-1) + 1
        labels = np.array([atoms[c] if c < len(atoms) else free + c for c in columns])
        old, assigned[j] = assigned[j], labels
        if old is None:
            return True
        known = set(atoms)
        return any(
            int(a) != int(b) and (int(a) in known or int(b) in known)
            for a, b in zip(old, labels, strict=True)
        )

    for j in range(count):
        step(j)
    for _ in range(sweeps):
        changed = [step(int(j)) for j in rng.permutation(count)]
        if not any(changed):
            break
    return [labels for labels in assigned if labels is not None]


def same_partition(one: list[np.ndarray], two: list[np.ndarray]) -> bool:
    """Whether the same cells are together, whatever the atoms are called."""
    pairs = np.unique(np.stack([np.concatenate(one), np.concatenate(two)], axis=1), axis=0)
    return len(pairs) == len(np.unique(pairs[:, 0])) == len(np.unique(pairs[:, 1]))
