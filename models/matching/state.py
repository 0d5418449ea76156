"""Which cell is in which atom, and the one step that changes it: an optimal assignment of one peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import gammaln

from .cells import Atoms, Cells
from .costs import Costs, Folding, Prepared
from .options import MatchOptions


@dataclass(frozen=True, eq=False)
class History:
    """What streaming remembers: the atoms so far, and how often each peer used each of them.

    `step` counts from 1: the step that is being matched now.
    """

    atoms: Atoms
    uses: np.ndarray  # [peers, atoms]
    step: int


class MatchState:
    """Atoms in rows; a peer's step touches the statistics of its own atoms only."""

    def __init__(
        self,
        peers: Sequence[Cells],
        options: MatchOptions,
        mean: np.ndarray,
        history: History | None,
    ):
        self._options, self._history = options, history
        precisions = [peer.precision[None] for peer in peers]
        if history is not None:
            precisions.append(history.atoms.precisions)
        self._folding = folding = Folding(precisions)
        self._costs = Costs(options, mean, folding)
        self._peers = [self._costs.prepare(peer) for peer in peers]
        self.assignments = [np.empty(0, dtype=np.int64) for _ in peers]
        self._pinned = len(history.atoms) if history else 0
        columns = peers[0].values.shape[1]
        self._sums = history.atoms.sums.copy() if history else np.zeros((0, columns))
        self._precisions = folding.fold(
            history.atoms.precisions if history else np.zeros((0, columns))
        ).copy()
        self._counts = np.zeros(self._pinned, dtype=np.int64)
        self._worth = self._costs.worth(self._sums, self._precisions)
        # History knows no groups: streaming matches whole parts.
        self._group = np.zeros(self._pinned, dtype=np.int64)
        self._widest = _widest(self._peers)
        self._table = np.empty(0, dtype=np.int64)  # labels before the latest removal → after it

    def step(self, j: int) -> bool:
        """Free the cells of peer j and assign them anew; says whether the partition changed."""
        peer = self._peers[j]
        old = self.assignments[j]
        companions = self._counts[old]
        self._remove(j)
        existing = len(self._counts)
        cost = self._cost_matrix(j, *self._growth(peer))
        _, atoms = linear_sum_assignment(cost)
        atoms = self._add(peer, atoms, existing)
        new = self._after_removal(old, companions)
        self.assignments[j] = atoms
        # Fresh atoms are new labels for old ones where the cell stood alone before.
        return not np.array_equal(np.where(atoms < existing, atoms, -1), new)

    def objective(self) -> float:
        """½ Σ (Q − λT), plus the log prior of the partition."""
        used = self._counts > 0
        data = 0.5 * float(self._worth[used].sum())
        counts, peers = self._counts[used], len(self._peers)
        prior = float(
            len(counts) * (np.log(self._options.mass) - gammaln(peers + 1))
            + (gammaln(counts) + gammaln(peers - counts + 1)).sum()
        )
        if self._options.kind == "efpf":
            prior -= float(gammaln(len(counts) + 1))
        return data + prior

    def partition(self) -> bytes:
        """The same bytes for the same partition, whatever the labels."""
        return np.concatenate(self.labels()).tobytes()

    def labels(self) -> tuple[np.ndarray, ...]:
        """Assignments with atoms numbered as they first appear; earlier steps' atoms keep theirs."""
        flat = np.concatenate(self.assignments)
        known, first = np.unique(flat, return_index=True)
        if self._pinned:
            table = np.arange(len(self._counts))
            late = known[np.argsort(first)]
            late = late[late >= self._pinned]
            table[late] = self._pinned + np.arange(len(late))
        else:
            table = np.empty(len(self._counts), dtype=np.int64)
            table[known[np.argsort(first)]] = np.arange(len(known))
        cuts = np.cumsum([len(atoms) for atoms in self.assignments])[:-1]
        return tuple(np.split(table[flat], cuts))

    def _remove(self, j: int) -> None:
        """Take a peer's cells out and drop the atoms that are empty now."""
        peer, atoms = self._peers[j], self.assignments[j]
        if not len(atoms):
            return
        self._sums[atoms] -= peer.scaled
        self._precisions[atoms] -= peer.precision
        self._counts[atoms] -= 1
        keep = self._counts > 0
        keep[: self._pinned] = True
        stale = atoms[keep[atoms]]
        self._worth[stale] = self._costs.worth(self._sums[stale], self._precisions[stale])
        self.assignments[j] = atoms[:0]
        if keep.all():
            return
        table = np.cumsum(keep) - 1
        self._sums, self._precisions = self._sums[keep], self._precisions[keep]
        self._counts, self._worth = self._counts[keep], self._worth[keep]
        self._group = self._group[keep]
        self.assignments = [table[other] for other in self.assignments]
        self._table = table

    def _after_removal(self, old: np.ndarray, companions: np.ndarray) -> np.ndarray:
        """Where the cells stood before, in labels after the removal; -1 for those that stood alone."""
        if not len(old):
            return np.full(0, -1)
        alone = (companions == 1) & (old >= self._pinned)
        if not alone.any():
            return old
        return np.where(alone, -1, self._table[old])

    def _growth(self, peer: Prepared) -> tuple[int, np.ndarray]:
        """New atoms that any of the peer's cells may take, and the group of each that is for one group only.

        At capacity a group still gets as many atoms as its widest peer has cells: the rest is forced into
        atoms that exist. Each step leaves that room to the others, so an assignment always exists.
        """
        limit = self._options.limit
        if limit is None:
            return peer.cells, np.empty(0, dtype=np.int64)
        existing = {group: int((self._group == group).sum()) for group in self._widest}
        reserved = sum(max(existing[group], cells) for group, cells in self._widest.items())
        free = max(limit, sum(self._widest.values())) - reserved
        if free >= peer.cells:
            return peer.cells, np.empty(0, dtype=np.int64)
        missing = [
            np.full(max(cells - existing[group], 0), group) for group, cells in self._widest.items()
        ]
        return max(free, 0), np.concatenate(missing)

    def _cost_matrix(self, j: int, free: int, reserved: np.ndarray) -> np.ndarray:
        """[cells, atoms and new atoms]; the smallest total is the likeliest assignment."""
        peer, options, peers = self._peers[j], self._options, len(self._peers)
        existing, fresh = len(self._counts), free + len(reserved)
        cost = np.empty((peer.cells, existing + fresh))
        if existing:
            gains = self._costs.gains(self._sums, self._precisions, self._worth, peer)
            cost[:, :existing] = -gains - 2 * self._log_odds(j)
            if peer.group is not None:
                cost[:, :existing][peer.group[:, None] != self._group] = np.inf
        step = self._history.step if self._history else 1
        rank = np.arange(1, fresh + 1, dtype=np.float64)
        if options.kind == "set":
            rank[:] = 1
        elif options.kind == "efpf":
            rank += existing
        new = -peer.alone[:, None] - 2 * np.log(options.mass / (step * peers)) + 2 * np.log(rank)
        cost[:, existing:] = new
        if peer.group is not None:
            cost[:, existing + free :][peer.group[:, None] != reserved] = np.inf
        return cost

    def _log_odds(self, j: int) -> np.ndarray:
        """How likely peer j is to use each atom, before looking at its values."""
        if self._history is None:
            return np.log(self._counts / (len(self._peers) - self._counts))
        # The streaming heuristic: a peer comes back to the atoms that it used itself.
        uses = np.zeros(len(self._counts))
        uses[: self._pinned] = self._history.uses[j]
        return np.log((1 + uses) / (self._history.step - uses))

    def _add(self, peer: Prepared, columns: np.ndarray, existing: int) -> np.ndarray:
        """Put the cells into the atoms that were chosen; returns their labels."""
        atoms = columns.copy()
        fresh = columns >= existing
        count = int(fresh.sum())
        atoms[fresh] = existing + np.arange(count)
        if count:
            pad = ((0, count), (0, 0))
            self._sums, self._precisions = np.pad(self._sums, pad), np.pad(self._precisions, pad)
            self._counts = np.pad(self._counts, (0, count))
            self._worth = np.pad(self._worth, (0, count))
            self._group = np.pad(self._group, (0, count))
        self._sums[atoms] += peer.scaled
        self._precisions[atoms] += peer.precision
        self._counts[atoms] += 1
        self._worth[atoms] = self._costs.worth(self._sums[atoms], self._precisions[atoms])
        if peer.group is not None:
            self._group[atoms] = peer.group
        return atoms


def _widest(peers: Sequence[Prepared]) -> dict[int, int]:
    """For every group, the most cells that a peer has of it; without groups all cells are of group 0."""
    found: dict[int, int] = {}
    for peer in peers:
        labels = np.zeros(peer.cells, dtype=np.int64) if peer.group is None else peer.group
        for group, cells in zip(*np.unique(labels, return_counts=True), strict=True):
            found[int(group)] = max(found.get(int(group), 0), int(cells))
    return found
