"""What it costs to give a cell to an atom, for all pairs at once, as two matrix products.

With R = Σ v/σ² and A = Σ 1/σ² of the cells in an atom, prior mean µ and prior precision a:

    Q(R, A) = Σ_d (µa + R)²/(a + A) − µ²a          what the data say for the atom
    T(R, A) = Σ_d A (θ − µ)²,  θ = (µa + R)/(a + A)   MAGI's distance from the prior

An atom is worth Q − λT. Adding the cell v of a peer with precision p changes both, and since a + A + p
does not depend on the cell, the change is a constant per atom, plus a product that is linear in v, plus
one in v². Columns on which all peers bring the same precisions are folded together for the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .cells import Cells
from .options import MatchOptions


class Folding:
    """Columns that always share their precision, found once: 784 inputs then count as one."""

    def __init__(self, precisions: Sequence[np.ndarray]):
        # as bytes a column compares at once; np.unique along an axis would sort rows of floats
        stacked = np.ascontiguousarray(np.vstack(precisions).T)
        keys = stacked.view(np.dtype((np.void, stacked.dtype.itemsize * stacked.shape[1]))).ravel()
        _, self.first, self.kind = np.unique(keys, return_index=True, return_inverse=True)
        self._order = np.argsort(self.kind, kind="stable")
        self._starts = np.searchsorted(self.kind[self._order], np.arange(len(self.first)))

    def fold(self, columns: np.ndarray) -> np.ndarray:
        """Precisions [..., columns] as [..., kinds]."""
        return columns[..., self.first]

    def unfold(self, kinds: np.ndarray) -> np.ndarray:
        """Values [..., kinds] as [..., columns]."""
        return kinds[..., self.kind]

    def total(self, columns: np.ndarray) -> np.ndarray:
        """Values [rows, columns] added up within each kind."""
        return np.add.reduceat(columns[:, self._order], self._starts, axis=1)


@dataclass(frozen=True, eq=False)
class Prepared:
    """What does not change about a peer's cells while its neighbours move."""

    scaled: np.ndarray  # v p           [cells, columns]
    squares: np.ndarray  # (v p)² folded [cells, kinds]
    precision: np.ndarray  # p folded    [kinds]
    alone: np.ndarray  # worth of an atom that has this cell alone
    group: np.ndarray | None

    @property
    def cells(self) -> int:
        """How many cells the peer has."""
        return len(self.scaled)


class Costs:
    """Worths and gains of atoms whose precisions are folded; rows are atoms."""

    def __init__(self, options: MatchOptions, mean: np.ndarray, folding: Folding):
        self._folding, self._kl = folding, options.kl
        self._prior, self._mean = options.prior_precision, mean
        self._push = mean * self._prior
        # most columns have no mean: what depends on it is left out where it is all zero
        self._centred = not mean.any()
        self._rest = float((mean * self._push).sum())

    def prepare(self, cells: Cells) -> Prepared:
        """Do once what each step needs of a peer."""
        scaled = cells.values * cells.precision
        precision = self._folding.fold(cells.precision)
        alone = self.worth(scaled, np.broadcast_to(precision, (len(scaled), len(precision))))
        squares = self._folding.total(scaled**2)
        return Prepared(scaled, squares, precision, alone, cells.group)

    def worth(self, sums: np.ndarray, precisions: np.ndarray) -> np.ndarray:
        """Q − λT of every atom."""
        total = precisions + self._prior
        found = self._squared(sums + self._push, 1 / total) - self._rest
        if self._kl:
            found -= self._kl * self._squared(self._lift(sums, precisions), precisions / total**2)
        return found

    def gains(
        self, sums: np.ndarray, precisions: np.ndarray, worth: np.ndarray, peer: Prepared
    ) -> np.ndarray:
        """By how much every atom's worth rises with every cell: [cells, atoms]."""
        after = precisions + peer.precision
        square = 1 / (after + self._prior)
        pushed = sums + self._push
        linear = pushed * self._folding.unfold(square)
        constant = np.einsum("ij,ij->i", pushed, linear) - self._rest
        if self._kl:
            penalty = self._kl * after * square**2
            lifted = self._lift(sums, after)
            pull = lifted * self._folding.unfold(penalty)
            constant -= np.einsum("ij,ij->i", lifted, pull)
            linear -= pull
            square -= penalty
        gains = peer.scaled @ linear.T
        gains *= 2
        gains += peer.squares @ square.T
        gains += constant - worth
        return gains

    def _lift(self, sums: np.ndarray, precisions: np.ndarray) -> np.ndarray:
        """(a + A)(θ − µ), which is R − µA."""
        if self._centred:
            return sums
        return sums - self._mean * self._folding.unfold(precisions)

    def _squared(self, rows: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """Σ_d rows² · factor, the factor given by kind."""
        return np.einsum("ij,ij->i", self._folding.total(rows**2), kinds)
