"""The seam for stacks that are spread over machines: what one of them needs to know of the others.

Everything else in the arena is local. Training reads and writes rows of a stack, and rows of different
peers never meet; so a machine that holds some of the peers trains them with the code as it is. Peers
meet in averaging alone, block by block of coordinates, in one of two ways:

- the exact mean needs the sum over all machines of a vector as long as the block (`total`), and the
  same reference row on all of them (`one`): an all-reduce and a broadcast of a few kilobytes;
- a product with a mixing matrix needs the rows of neighbours that live elsewhere. Cut the graph so that
  few edges cross machines, append the foreign rows to the block before the product, and leave out
  their results; the matrices of `Mixing` are those of the whole swarm, so nothing else changes.

To spread a swarm: give every machine an `Arena` over its own learners with the same rounds, blocks
(plan.py does not look at the machine) and seeds, and a `Shards` that talks to the others, over
torch.distributed, say. Blocks must then be averaged in the same order everywhere: use one thread for
them, or number them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Shards(Protocol):
    """What averaging asks of the other machines. All of them ask the same, in the same order."""

    def one(self, row: Tensor) -> Tensor:
        """The same row on every machine: that of the first."""
        ...

    def total(self, part: Tensor) -> Tensor:
        """The sum over all machines, on every machine."""
        ...


class OneMachine:
    """All peers are here."""

    def one(self, row: Tensor) -> Tensor:
        """It is the first."""
        return row

    def total(self, part: Tensor) -> Tensor:
        """There is no other part."""
        return part
