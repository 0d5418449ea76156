"""Benchmarks: reading and writing a partial model against a training step; matching against naive loops."""

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
SHARED_FRACTION = 0.8
"""The fraction of the cells of every hidden layer that is averaged."""
MAX_RATIO = 0.05
"""The claim: reading and writing take at most this fraction of a training step's time."""
NETWORK_REPEATS = 3
"""Timed repetitions; few, since a training step of ResNet-18 takes seconds."""


@dataclass(frozen=True)
class Work:
    """The two functions that are timed, and how many values the network has and shares."""

    exchange: Callable[[], object]
    step: Callable[[], object]
    value_count: int
    shared_count: int


def prepare(widths: tuple[int, ...] = (64, 128, 256, 512), blocks: int = 2) -> Work:
    """Make a residual network for 32×32 images that shares most of its cells; ResNet-18 by default."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(BATCH, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (BATCH,), generator=generator)
    module = resnet(widths=widths, blocks=blocks)
    network = SlicedNetwork(
        module, {"global": SHARED_FRACTION}, example=images[:1], seed=0, check=False
    )
    module.train()

    def exchange() -> None:
        """Read and write the shared values, as every averaging does."""
        network.write("global", network.read("global"))

    def step() -> None:
        """One step of plain SGD."""
        module.zero_grad(set_to_none=True)
        F.cross_entropy(module(images), labels).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.01)

    return Work(exchange, step, len(network.flat), len(network.slicing.coordinates("global")))


def networks(
    make_work: Callable[[], Work] = prepare,
    time_both: Callable[..., tuple[float, float]] = alternate,
) -> list[Row]:
    """Time reading and writing 80 % of the cells against one training step of batch 32, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        work = make_work()
        exchange_seconds, step_seconds = time_both(
            work.exchange, work.step, repeats=NETWORK_REPEATS
        )
    finally:
        torch.set_num_threads(threads)
    name = f"read and write {work.shared_count / 1e6:.1f} of {work.value_count / 1e6:.1f} million values"
    note = (
        f"ResNet-18, {SHARED_FRACTION:.0%} of the cells shared; baseline: one training step of {BATCH} "
        "images of 32×32"
    )
    return [Row(name, "s", exchange_seconds, step_seconds, MAX_RATIO, "at most", note)]


# --- matching ---------------------------------------------------------------------------------------

PEERS, INPUTS, OUTPUTS = 10, 784, 10
WIDTHS = (50, 100, 200, 400, 800)
MATCHING_REPEATS = 1
"""Timed repetitions, after one that warms up; only one, since the naive loops take seconds."""
MIN_SPEEDUP = 20.0
"""The claim: matching is at least this many times as fast as the naive loops."""


def matching() -> list[Row]:
    """Speed-up over plain loops at 100 cells, then seconds from 50 to 800 cells.

    Measured in a new process, in which numpy has one thread: on a busy machine, a product of this size waits
    longer for its second thread than it computes. The thread count is read from the environment only when
    numpy is imported.
    """
    one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return in_own_process(measure, **one_thread)


def measure() -> list[Row]:
    """Return the rows of `matching`, measured in this process."""
    peers = planted(100)
    assignments: dict[str, list[np.ndarray]] = {}

    def vectorised() -> None:
        assignments["vectorised"] = list(match(peers).assignments)

    def naive() -> None:
        assignments["naive"] = match_naively(peers)

    name = f"matching, {PEERS} peers, {INPUTS} inputs, 100 cells, to convergence"
    row = race(name, vectorised, naive, wanted=MIN_SPEEDUP, repeats=MATCHING_REPEATS)
    if not same_partition(assignments["vectorised"], assignments["naive"]):
        raise AssertionError("vectorised and naive matching grouped the cells differently")
    limited = match(peers)  # with the default limit on fused cells
    note = f"baseline: plain loops; {len(limited.atoms)} fused cells, {limited.sweeps} sweeps"
    rows = [replace(row, note=note)]
    narrowest_seconds = None
    for width in WIDTHS:
        cells = planted(width)
        started = time.perf_counter()
        unlimited = match(cells, MatchOptions(limit=None))
        seconds = time.perf_counter() - started
        narrowest_seconds = narrowest_seconds or seconds
        sizes = f"{len(unlimited.atoms)} fused cells, {unlimited.sweeps} sweeps"
        note = f"ratio: against {WIDTHS[0]} cells; {sizes}"
        rows.append(Row(f"matching, {width} cells", "s", seconds, narrowest_seconds, note=note))
    return rows


def planted(width: int, seed: int = 0, inputs: int = INPUTS) -> list[Cells]:
    """Random cells for every peer: two thirds of a common set of cells, with noise, in random order."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(width * 3 // 2, inputs + 1 + OUTPUTS)) * 0.15
    peers = []
    for _ in range(PEERS):
        chosen = common[rng.permutation(len(common))[:width]]
        peers.append(Cells.of(chosen + 0.05 * rng.normal(size=chosen.shape)))
    return peers


def match_naively(peers: list[Cells], sweeps: int = 20) -> list[np.ndarray]:
    """The algorithm of `match` as plain loops: the reference for its result, and the baseline for its speed.

    Returns the fused cell (PFNM's atom) of each cell, by peer. The sums over each atom's cells are computed
    again in every step, and costs are computed one by one, for each cell and each atom.
    """
    options = MatchOptions()
    prior, count = options.prior_precision, len(peers)
    assigned: list[np.ndarray | None] = [None] * count
    rng = np.random.default_rng(0)

    def step(j: int) -> bool:
        """Assign peer j's cells again, given all other peers' assignments; return whether any changed."""
        sums: dict[int, np.ndarray] = {}
        precision_sums: dict[int, np.ndarray] = {}
        members: dict[int, int] = {}
        for k, labels in enumerate(assigned):
            if k == j or labels is None:
                continue
            for cell, atom in enumerate(labels):
                a = int(atom)
                value = peers[k].values[cell] * peers[k].precision
                sums[a] = sums[a] + value if a in sums else value
                precision = peers[k].precision
                precision_sums[a] = (
                    precision_sums[a] + precision if a in precision_sums else precision
                )
                members[a] = members.get(a, 0) + 1
        atoms = sorted(sums)
        cells = peers[j].values
        new_atoms = min(len(cells), max((options.limit or 10**9) - len(atoms), 1))
        cost = np.empty((len(cells), len(atoms) + new_atoms))
        before = {a: np.sum(sums[a] ** 2 / (prior + precision_sums[a])) for a in atoms}
        for row, cell in enumerate(cells):
            value = cell * peers[j].precision
            for column, a in enumerate(atoms):
                after = np.sum(
                    (sums[a] + value) ** 2 / (prior + precision_sums[a] + peers[j].precision)
                )
                log_odds = math.log(members[a] / (count - members[a]))
                cost[row, column] = -(after - before[a]) - 2 * log_odds
            own_score = np.sum(value**2 / (prior + peers[j].precision))
            for rank in range(new_atoms):
                cost[row, len(atoms) + rank] = (
                    -own_score
                    - 2 * math.log(options.concentration / count)
                    + 2 * math.log(rank + 1)
                )
        _, columns = linear_sum_assignment(cost)
        next_atom = max(atoms, default=-1) + 1
        labels = np.array([atoms[c] if c < len(atoms) else next_atom + c for c in columns])
        old, assigned[j] = assigned[j], labels
        if old is None:
            return True
        shared_atoms = set(atoms)  # a cell that moves between new atoms of its own has not changed
        return any(
            int(a) != int(b) and (int(a) in shared_atoms or int(b) in shared_atoms)
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
    """Whether two assignments group the cells in the same way, whatever the numbers of the atoms."""
    pairs = np.unique(np.stack([np.concatenate(one), np.concatenate(two)], axis=1), axis=0)
    return len(pairs) == len(np.unique(pairs[:, 0])) == len(np.unique(pairs[:, 1]))
