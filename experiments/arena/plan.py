"""How the work is cut up: every choice that was measured rather than derived, in one place.

Measured on two cores with 512 KB of L2 each and 32 MB of L3; `gossamer bench arena` shows what the
choices are worth. None of them depends on the number of threads, so neither does any result.

- Every product runs on one thread, and peers run side by side. Torch's threads inside a product split
  it too finely for networks of this size, and collapse when another process holds a core.
- Peer-major: a task is some peers' whole stretch between two averagings, so that their weights stay in
  cache. Step-major, every step of every peer, reads the whole stack from memory once per step.
- Large networks go few at a time, in place; with large batches one at a time, for then their products
  take so long that calls do not count. Small ones go many at a time, packed: a product takes less than
  calling it does.
"""

from __future__ import annotations

from math import ceil

ALONE = 32_768
"""Parameters from which a peer is large: its own products keep a core busy, and packing it is not free."""
FEW = 4
"""Large peers that share the cost of calls…"""
LARGE_STEP = 65_536
"""… unless one step of one of them fills so many values that the cost of calls is nothing to it."""
LARGE_IMAGES = 4096
"""Values that one step of a convolutional network reads, from which peers are faster one by one: stacked,
their convolutions become one with groups, which is 1.5 to 3.5 times as fast below and slower above."""
TASK_BYTES = 2 << 20
"""Parameters and one step's activations of the peers in a task: more falls out of the cache."""
TASKS = 4
"""Tasks that a small swarm is cut into at least, so that there is something to run side by side, and a
large one into multiples of, so that threads end together…"""
FEWEST = 8
"""… unless that leaves fewer peers than this in a task, when calls would cost more than products."""
DEFERRED_ROWS = 100
"""Samples, over the steps that are deferred together; see kernel.py."""
TEST_ROWS = 8192
"""Test samples, over all peers of a task, that go through the network at once."""

BLOCK_BYTES = 1 << 20
"""One block of averaging, peers × coordinates: read, mixed and written back while in cache."""
WIDEST_BLOCK = 1 << 16
DENSE_COST = 0.2
"""Time of one entry of a mixing matrix in a dense product, against one in a sparse product."""
FOLD_PEERS = 2048
"""Exchanges are multiplied into one matrix for at most so many peers; it fills up as it is folded."""


def peers_per_task(peers: int, parameters: int, activations: int) -> int:
    """How many peers of a stack train together; `activations`: values that one step of one peer fills."""
    if parameters >= ALONE:
        return 1 if activations >= LARGE_STEP else FEW
    fit = TASK_BYTES // (4 * max(parameters + activations, 1))
    size = max(1, min(fit, max(ceil(peers / TASKS), FEWEST)))
    if size * TASKS >= peers:
        return size
    return ceil(peers / (TASKS * ceil(peers / (TASKS * size))))


def deferred_steps(parameters: int, cells: int, inputs: int, batch: int) -> int:
    """Steps of plain descent whose first layer is computed together; `cells` × `inputs` is its size.

    Worth it where the first layer is most of a large network. More steps cost more products of inputs
    with each other, fewer read the weights more often.
    """
    if parameters < ALONE or 2 * cells * inputs < parameters:
        return 1
    return max(1, min(DEFERRED_ROWS, inputs // 4) // batch)


def block_width(members: int, coordinates: int) -> int:
    """How many coordinates of a partial model are averaged at once."""
    return max(16, min(coordinates, WIDEST_BLOCK, BLOCK_BYTES // (4 * members)))


def is_dense(members: int, entries: int) -> bool:
    """Whether a mixing matrix with so many entries is quicker as a dense one."""
    return entries > DENSE_COST * members * members


def fold(members: int, single: int, folded: int) -> bool:
    """Whether one product with all exchanges' matrix (`folded` entries) beats one per exchange."""
    cost = min(folded, DENSE_COST * members * members)
    return cost < single
