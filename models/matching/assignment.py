"""Matching the cells of one part: sweeps over the peers, one optimal assignment per step.

An *atom* is a cell of the fused network. Every cell of a peer goes to an atom, no two of them to the
same one; a step frees one peer's cells and gives them back in the best way, all others standing still.

What it costs to give a cell to an atom is computed for all pairs at once, as two matrix products. With
R = Σ v/σ² and A = Σ 1/σ² of the cells in an atom, prior mean µ and prior precision a:

    Q(R, A) = Σ_d (µa + R)²/(a + A) − µ²a          what the data say for the atom
    T(R, A) = Σ_d A (θ − µ)²,  θ = (µa + R)/(a + A)   MAGI's distance from the prior

An atom is worth Q − λT. Adding the cell v of a peer with precision p changes both, and since a + A + p
does not depend on the cell, the change is a constant per atom, plus a product that is linear in v, plus
one in v². Columns on which all peers bring the same precisions are folded together for the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import gammaln

from ..errors import ModelError, check_choice, check_number

Kind = Literal["printed", "set", "efpf"]

MAGI = 0.1
"""The `kl` with which MAGI is run unless somebody chose another."""


@dataclass(frozen=True)
class MatchOptions:
    """How cells are matched. The defaults are those of the PFNM paper.

    variance
        How far a cell of one peer lies from its atom (σ²), when peers do not bring a variance of their
        own. Lower it (0.1) for larger, usually more accurate networks; raise it to merge more.
    prior_variance
        How far atoms lie from the prior mean (σ0²). It shrinks what is read: weights seen once are
        multiplied by σ0²/(σ0² + σ²).
    mass
        γ0 of the Beta process: raise it for more atoms. 1e-5 makes a network as wide as the widest peer.
    kind
        What a new atom costs beside the data. `set` and `efpf` are joint distributions: every step
        raises the objective; `set` barely merges, `efpf` barely grows. `printed` is the paper's own,
        lies between, and belongs to no joint distribution, so that its sweeps may run in circles; they
        are stopped when a partition comes back.
    kl
        MAGI's λ, from 0 (PFNM) to 1: raise it for smaller networks. Above 0.5 even equal cells may be
        kept apart; measured accuracy falls from about 0.7.
    limit
        The capacity: a fused part is never wider than this, or than the widest network if that is wider
        (with groups: than the widest of each together), however many networks a stream brings. Cells that
        find no room are forced into the atoms that fit them best, which blurs those. Raise it when
        accuracy falls as more networks come; None lets the network grow freely.
    sweeps
        Passes over the peers after the first; matching usually settles before.
    tolerance
        Under `set` and `efpf`, a sweep that raises the objective by less than this share is the last.
    shrink
        Whether the prior counts when atoms are read. False gives the plain weighted mean of the cells.
    """

    variance: float = 1.0
    prior_variance: float = 10.0
    mass: float = 1.0
    kind: Kind = "printed"
    kl: float = 0.0
    limit: int | None = 700
    sweeps: int = 20
    tolerance: float = 1e-12
    shrink: bool = True

    def __post_init__(self) -> None:
        for name in ("variance (σ²)", "prior_variance (σ0²)", "mass (γ0)"):
            check_number(f"matching: {name}", getattr(self, name.split()[0]), above=0)
        check_choice("matching: kind", self.kind, get_args(Kind))
        check_number("matching: kl (λ)", self.kl, least=0, most=1)
        if self.limit is not None and self.limit < 1:
            raise ModelError(
                f"matching: limit is {self.limit}; give at least 1 atom, or None for no limit"
            )
        check_number("matching: sweeps", self.sweeps, least=0)
        check_number("matching: tolerance", self.tolerance, least=0)

    @property
    def prior_precision(self) -> float:
        """1/σ0²."""
        return 1 / self.prior_variance


@dataclass(frozen=True, eq=False)
class Cells:
    """One peer's cells of one part: a row of values for each, and how far each column is to be trusted.

    precision
        1/σ² per column; 0 masks a column that means nothing here (a connection to a cell that this
        peer lacks). A masked column is *not observed*, which is not the same as a zero.
    group
        A label per cell, or None: cells match only atoms of their own label (a partial model, say).
    """

    values: np.ndarray
    precision: np.ndarray
    group: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.precision.shape != self.values.shape[1:]:
            raise ModelError(
                f"matching: values of shape {self.values.shape} need one precision per column, "
                f"not {self.precision.shape}"
            )
        if not len(self.values):
            raise ModelError("matching: a peer without a cell has nothing to match")
        if not np.isfinite(self.values).all():
            raise ModelError("matching: a value is not finite")
        if not (np.isfinite(self.precision) & (self.precision >= 0)).all():
            raise ModelError("matching: a precision is negative or not finite")
        if self.group is not None and self.group.shape != (len(self.values),):
            raise ModelError(
                f"matching: {len(self.values)} cells were given {len(self.group)} group labels"
            )

    @classmethod
    def of(
        cls,
        values: np.ndarray,
        precision: float | np.ndarray = 1.0,
        group: np.ndarray | None = None,
    ) -> Cells:
        """Cells in double precision; one number serves as every column's precision."""
        rows = np.asarray(values, dtype=np.float64)
        columns = np.broadcast_to(np.asarray(precision, dtype=np.float64), rows.shape[1:])
        return cls(rows, columns, group)


@dataclass(frozen=True, eq=False)
class Atoms:
    """Fused cells as sums: `sums` Σ v/σ², `precisions` Σ 1/σ², `counts` how many peers are in each.

    Sums of two sets of peers add, row by row, so that merging in any order gives the same atoms; the
    prior enters only when they are read.
    """

    sums: np.ndarray
    precisions: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)

    def read(self, prior_precision: float, mean: np.ndarray, *, shrink: bool = True) -> np.ndarray:
        """The values of the atoms: the posterior mean, or without `shrink` the weighted mean alone.

        Columns that nobody observed are at the prior mean either way.
        """
        if shrink:
            return (self.sums + mean * prior_precision) / (self.precisions + prior_precision)
        seen = self.precisions > 0
        return np.where(seen, self.sums / np.where(seen, self.precisions, 1), mean)

    def extended(self, size: int) -> Atoms:
        """The same atoms followed by empty ones, up to `size`."""
        more = size - len(self)
        return Atoms(
            np.pad(self.sums, ((0, more), (0, 0))),
            np.pad(self.precisions, ((0, more), (0, 0))),
            np.pad(self.counts, (0, more)),
        )

    def plus(self, other: Atoms) -> Atoms:
        """Both sets of peers together; row i is the same atom in both."""
        size = max(len(self), len(other))
        one, two = self.extended(size), other.extended(size)
        return Atoms(one.sums + two.sums, one.precisions + two.precisions, one.counts + two.counts)


def gather(peers: Sequence[Cells], assignments: Sequence[np.ndarray], size: int) -> Atoms:
    """The atoms that assignments make: `assignments[j][l]` is the atom of cell l of peer j."""
    columns = peers[0].values.shape[1]
    sums, precisions = np.zeros((size, columns)), np.zeros((size, columns))
    counts = np.zeros(size, dtype=np.int64)
    for peer, atoms in zip(peers, assignments, strict=True):
        # A peer gives an atom at most one cell, so plain indexing adds each row once.
        sums[atoms] += peer.values * peer.precision
        precisions[atoms] += peer.precision
        counts[atoms] += 1
    return Atoms(sums, precisions, counts)


Ending = Literal["settled", "repeated", "tolerance", "sweep limit"]


@dataclass(frozen=True, eq=False)
class Matched:
    """The outcome for one part.

    assignments
        For each peer the atom of each of its cells. Labels are arbitrary: compare partitions.
    atoms, values
        Sums per atom, and what they read as.
    objective
        The log posterior, up to a constant, after the first pass and after every step since. Under
        `printed` and in streaming there is none: it is that of `set`, as a yardstick, and may fall.
    sweeps, ended
        Passes over the peers after the first, and why there was no further one.
    """

    assignments: tuple[np.ndarray, ...]
    atoms: Atoms
    values: np.ndarray
    objective: tuple[float, ...]
    sweeps: int
    ended: Ending

    @property
    def matched(self) -> int:
        """Cells that share their atom with another peer's."""
        return int(sum((self.atoms.counts[atoms] > 1).sum() for atoms in self.assignments))


def match(
    peers: Sequence[Cells],
    options: MatchOptions | None = None,
    *,
    mean: float | np.ndarray = 0.0,
    seed: int | np.random.Generator = 0,
    history: History | None = None,
) -> Matched:
    """Match the cells of any number of peers, whatever the number of cells of each.

    mean
        The prior mean, one number or one per column.
    seed
        Orders the peers within a sweep. The order alone can move a fused network's accuracy by a few
        points: fix it, and compare methods under the same one.
    history
        The outcome of earlier steps, for streaming; see `Stream`.
    """
    options = options or MatchOptions()
    _check(peers, history)
    columns = peers[0].values.shape[1]
    centre = np.broadcast_to(np.asarray(mean, dtype=np.float64), (columns,))
    state = MatchState(peers, options, centre, history)
    rng = np.random.default_rng(seed)
    # The widest first: the others then find atoms to match instead of making their own.
    for peer in sorted(range(len(peers)), key=lambda j: -len(peers[j].values)):
        state.step(peer)
    trace = [state.objective()]
    seen = [state.partition()]
    joint = options.kind != "printed" and history is None
    sweeps, ended = 0, None
    while ended is None and sweeps < options.sweeps:
        before = trace[-1]
        for peer in rng.permutation(len(peers)):
            state.step(int(peer))
            trace.append(state.objective())
        sweeps += 1
        partition = state.partition()
        if partition == seen[-1]:
            ended = "settled"
        elif partition in seen:
            ended = "repeated"
        elif joint and trace[-1] - before <= options.tolerance * (1 + abs(before)):
            ended = "tolerance"
        else:
            seen.append(partition)
    assignments = state.labels()
    # Added up afresh: thousands of steps that add and subtract leave round-off behind.
    size = 1 + max(int(atoms.max()) for atoms in assignments)
    atoms = gather(peers, assignments, max(size, len(history.atoms) if history else 0))
    if history is not None:
        atoms = history.atoms.plus(atoms)
    values = atoms.read(options.prior_precision, centre, shrink=options.shrink)
    return Matched(assignments, atoms, values, tuple(trace), sweeps, ended or "sweep limit")


def _check(peers: Sequence[Cells], history: History | None) -> None:
    if not peers:
        raise ModelError("matching: no peers were given")
    columns = peers[0].values.shape[1]
    for j, peer in enumerate(peers):
        if peer.values.shape[1] != columns:
            raise ModelError(
                f"matching: the cells of peer {j} have {peer.values.shape[1]} columns, "
                f"those of peer 0 have {columns}"
            )
        if (peer.group is None) != (peers[0].group is None):
            raise ModelError("matching: give group labels to every peer or to none")
    if history is None:
        return
    if history.uses.shape != (len(peers), len(history.atoms)):
        raise ModelError(
            f"matching: the history knows {history.uses.shape[0]} peers, {len(peers)} were given"
        )
    if history.atoms.sums.shape[1] != columns:
        raise ModelError(
            f"matching: the history's atoms have {history.atoms.sums.shape[1]} columns, "
            f"the cells have {columns}"
        )
    if history.step < 1 or (history.uses >= history.step).any():
        raise ModelError("matching: an atom was used more often than there were steps before it")


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
        none = np.zeros((0, peers[0].values.shape[1]))
        earlier = history.atoms if history else Atoms(none, none, np.zeros(0, dtype=np.int64))
        self._costs = Costs(
            options, mean, [*(peer.precision[None] for peer in peers), earlier.precisions]
        )
        self._peers = [self._costs.prepare(peer) for peer in peers]
        self.assignments = [np.empty(0, dtype=np.int64) for _ in peers]
        self._pinned = len(earlier)
        self._sums = earlier.sums.copy()
        self._precisions = self._costs.fold(earlier.precisions).copy()
        self._counts = np.zeros(self._pinned, dtype=np.int64)
        self._worth = self._costs.worth(self._sums, self._precisions)
        # History knows no groups: streaming matches whole parts.
        self._group = np.zeros(self._pinned, dtype=np.int64)
        self._widest = _widest(self._peers)

    def step(self, j: int) -> None:
        """Free the cells of peer j and assign them anew."""
        peer = self._peers[j]
        self._remove(j)
        cost = self._cost_matrix(j, *self._growth(peer))
        self.assignments[j] = self._add(peer, linear_sum_assignment(cost)[1])

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
        late = known[np.argsort(first)]
        late = late[late >= self._pinned]
        table = np.arange(len(self._counts))
        table[late] = self._pinned + np.arange(len(late))
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

    def _add(self, peer: Prepared, columns: np.ndarray) -> np.ndarray:
        """Put the cells into the atoms that were chosen; returns their labels."""
        atoms, existing = columns.copy(), len(self._counts)
        fresh = columns >= existing
        count = int(fresh.sum())
        atoms[fresh] = existing + np.arange(count)
        if count:
            pad = ((0, count), (0, 0))
            self._sums, self._precisions = np.pad(self._sums, pad), np.pad(self._precisions, pad)
            self._counts, self._worth, self._group = (
                np.pad(values, (0, count)) for values in (self._counts, self._worth, self._group)
            )
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
    """Worths and gains of atoms; rows are atoms.

    Columns that always share their precision are found once and folded: 784 inputs then count as one kind.
    """

    def __init__(self, options: MatchOptions, mean: np.ndarray, precisions: Sequence[np.ndarray]):
        # as bytes a column compares at once; np.unique along an axis would sort rows of floats
        stacked = np.ascontiguousarray(np.vstack(precisions).T)
        keys = stacked.view(np.dtype((np.void, stacked.dtype.itemsize * stacked.shape[1]))).ravel()
        _, self._first, self._kind = np.unique(keys, return_index=True, return_inverse=True)
        self._order = np.argsort(self._kind, kind="stable")
        self._starts = np.searchsorted(self._kind[self._order], np.arange(len(self._first)))
        self._kl, self._prior, self._mean = options.kl, options.prior_precision, mean
        self._push = mean * self._prior
        # most columns have no mean: what depends on it is left out where it is all zero
        self._centred = not mean.any()
        self._rest = float((mean * self._push).sum())

    def fold(self, columns: np.ndarray) -> np.ndarray:
        """Precisions [..., columns] as [..., kinds]."""
        return columns[..., self._first]

    def _total(self, columns: np.ndarray) -> np.ndarray:
        """Values [rows, columns] added up within each kind."""
        return np.add.reduceat(columns[:, self._order], self._starts, axis=1)

    def prepare(self, cells: Cells) -> Prepared:
        """Do once what each step needs of a peer."""
        scaled = cells.values * cells.precision
        precision = self.fold(cells.precision)
        alone = self.worth(scaled, np.broadcast_to(precision, (len(scaled), len(precision))))
        squares = self._total(scaled**2)
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
        linear = pushed * square[..., self._kind]
        constant = np.einsum("ij,ij->i", pushed, linear) - self._rest
        if self._kl:
            penalty = self._kl * after * square**2
            lifted = self._lift(sums, after)
            pull = lifted * penalty[..., self._kind]
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
        return sums - self._mean * precisions[..., self._kind]

    def _squared(self, rows: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """Σ_d rows² · factor, the factor given by kind."""
        return np.einsum("ij,ij->i", self._total(rows**2), kinds)
