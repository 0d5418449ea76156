"""Match the cells of one part of several networks (PFNM, MAGI) by sweeps of optimal assignments.

A *cell* is a neuron, a *part* a layer's interchangeable cells, and an *atom* a cell of the fused network. A
cell is described by a vector v of its weights, whose entries are *columns*; σ² is their variance. Every cell
of a peer is assigned to an atom, and no two cells of one peer to the same atom. A step assigns one peer's
cells again, with all other peers' assignments fixed; a sweep is one step for every peer.

The cost of assigning each cell to each atom is computed for all pairs at once, with two matrix products. With
R = Σ v/σ² and A = Σ 1/σ² over the cells v of an atom, prior mean µ, prior precision a and columns d:

    Q(R, A) = Σ_d (µa + R)²/(a + A) − µ²a             evidence of the data for the atom
    T(R, A) = Σ_d A (θ − µ)²,  θ = (µa + R)/(a + A)   MAGI's distance from the prior

The *worth* of an atom is Q − λT. Adding the cell v of a peer with precision p changes Q and T. As a + A + p
does not depend on v, the change is a constant per atom, plus a product linear in v, plus a product in v².
Columns that have equal precisions on every peer form a *column class*: the product in v² needs only one
column per class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import gammaln

from ..errors import ModelError, check_choice, check_number

PartitionPrior = Literal["printed", "set", "efpf"]
"""The priors of the partition of cells into atoms: see `kind` of MatchOptions."""

MAGI_KL = 0.1
"""The default λ of MAGI, for `MatchOptions.kl`."""


@dataclass(frozen=True)
class MatchOptions:
    """How cells are matched. The defaults are those of the PFNM paper.

    variance
        Variance σ² of a peer's cells around their atom, for peers that give no variance of their own.
        Lower it (0.1) for larger, usually more accurate networks; raise it to merge more cells.
    prior_variance
        Variance σ0² of atoms around the prior mean. The prior shrinks fused weights: those of an atom with
        one cell are multiplied by σ0²/(σ0² + σ²).
    concentration
        γ0 of the Beta process: raise it for more atoms. 1e-5 makes a network as wide as the widest peer.
    kind
        The prior of the partition of cells into atoms, that is, the cost of a new atom. `efpf` is the
        exchangeable feature probability function, and `set` is K! times that, with K atoms. They are joint
        distributions, so every step raises the objective; `set` merges few cells, `efpf` creates few atoms.
        `printed`, the formula of the paper, lies between them. It belongs to no joint distribution, so sweeps
        may cycle; they stop when a partition repeats.
    kl
        MAGI's λ, from 0 (PFNM) to 1: raise it for smaller networks. With λ above 0.5 even equal cells may get
        different atoms; with λ above about 0.7 lower accuracy was measured.
    limit
        The largest number of atoms in a part, however many networks are fused; but the widest network (with
        groups: the widest of each group) always gets an atom per cell. At the limit, cells are forced into
        the atoms that fit best, which makes those less accurate. Raise it when accuracy falls as more
        networks are fused; None sets no limit.
    sweeps
        The largest number of sweeps after the first pass; matching usually converges earlier.
    tolerance
        With `set` and `efpf`, sweeps end when one raises the objective by less than this fraction.
    shrink
        Whether fused values include the prior. False gives the plain weighted mean of the cells.
    """

    variance: float = 1.0
    prior_variance: float = 10.0
    concentration: float = 1.0
    kind: PartitionPrior = "printed"
    kl: float = 0.0
    limit: int | None = 700
    sweeps: int = 20
    tolerance: float = 1e-12
    shrink: bool = True

    def __post_init__(self) -> None:
        for name in ("variance (σ²)", "prior_variance (σ0²)", "concentration (γ0)"):
            check_number(f"matching: {name}", getattr(self, name.split()[0]), above=0)
        check_choice("matching: kind", self.kind, get_args(PartitionPrior))
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
    """One peer's cells of one part: one row of values per cell, one precision per column.

    precision
        1/σ² per column; 0 marks a column as *not observed*, which differs from a value of zero: this peer
        lacks the cell that the column's weights lead to.
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
        """Return cells in float64; a single number is the precision of every column."""
        rows = np.asarray(values, dtype=np.float64)
        columns = np.broadcast_to(np.asarray(precision, dtype=np.float64), rows.shape[1:])
        return cls(rows, columns, group)


@dataclass(frozen=True, eq=False)
class Atoms:
    """Fused cells, one per row.

    `sums` is Σ v/σ² and `precisions` Σ 1/σ² over the cells of an atom, `counts` the number of these cells.
    Atoms of two sets of peers add row by row, so merging in any order gives the same atoms. The prior is
    not part of the sums; `read` includes it.
    """

    sums: np.ndarray
    precisions: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)

    def read(self, prior_precision: float, mean: np.ndarray, *, shrink: bool = True) -> np.ndarray:
        """Return the values of the atoms: the posterior mean, or without `shrink` the weighted mean.

        Columns that no peer observed have the prior mean either way.
        """
        if shrink:
            return (self.sums + mean * prior_precision) / (self.precisions + prior_precision)
        observed = self.precisions > 0
        return np.where(observed, self.sums / np.where(observed, self.precisions, 1), mean)

    def extended(self, size: int) -> Atoms:
        """Return the same atoms followed by empty ones, up to `size`."""
        missing = size - len(self)
        return Atoms(
            np.pad(self.sums, ((0, missing), (0, 0))),
            np.pad(self.precisions, ((0, missing), (0, 0))),
            np.pad(self.counts, (0, missing)),
        )

    def plus(self, other: Atoms) -> Atoms:
        """Return the atoms of both sets of peers together; row i is the same atom in both."""
        size = max(len(self), len(other))
        a, b = self.extended(size), other.extended(size)
        return Atoms(a.sums + b.sums, a.precisions + b.precisions, a.counts + b.counts)


def sum_atoms(peers: Sequence[Cells], assignments: Sequence[np.ndarray], size: int) -> Atoms:
    """Sum the cells of each atom; `assignments[j][l]` is the atom of cell l of peer j."""
    columns = peers[0].values.shape[1]
    sums, precisions = np.zeros((size, columns)), np.zeros((size, columns))
    counts = np.zeros(size, dtype=np.int64)
    for peer, atoms in zip(peers, assignments, strict=True):
        # At most one cell of a peer is in an atom, so plain indexing adds each row once.
        sums[atoms] += peer.values * peer.precision
        precisions[atoms] += peer.precision
        counts[atoms] += 1
    return Atoms(sums, precisions, counts)


StopReason = Literal["settled", "repeated", "tolerance", "sweep limit"]
"""settled: a sweep changed nothing. repeated: a sweep led back to an earlier partition. tolerance, sweep
limit: see `tolerance` and `sweeps` of MatchOptions."""


@dataclass(frozen=True, eq=False)
class MatchResult:
    """The result of matching one part.

    assignments
        For each peer the atom of each of its cells. The numbers of atoms are arbitrary; what counts is which
        cells share one.
    atoms, values
        The atoms, and their values (`Atoms.read`).
    objective
        The log posterior, up to a constant, after the first pass and after every later step. With `printed`
        and with a history no joint posterior exists; the objective is then that of `set`, and may fall.
    sweeps, stop_reason
        The number of sweeps after the first pass, and why they ended.
    """

    assignments: tuple[np.ndarray, ...]
    atoms: Atoms
    values: np.ndarray
    objective: tuple[float, ...]
    sweeps: int
    stop_reason: StopReason

    @property
    def matched_cells(self) -> int:
        """How many cells share their atom with a cell of another peer."""
        return int(sum((self.atoms.counts[atoms] > 1).sum() for atoms in self.assignments))


def match(
    peers: Sequence[Cells],
    options: MatchOptions | None = None,
    *,
    mean: float | np.ndarray = 0.0,
    seed: int | np.random.Generator = 0,
    history: History | None = None,
) -> MatchResult:
    """Match the cells of any number of peers; peers may have different numbers of cells.

    mean
        The prior mean, one number or one per column.
    seed
        Of the random order of peers within a sweep. That order can change a fused network's accuracy by a few
        points, so compare methods with the same seed.
    history
        Atoms of earlier networks of the same peers, if their networks arrive as a stream; see `fuse`.
    """
    options = options or MatchOptions()
    _check(peers, history)
    columns = peers[0].values.shape[1]
    prior_mean = np.broadcast_to(np.asarray(mean, dtype=np.float64), (columns,))
    state = MatchState(peers, options, prior_mean, history)
    rng = np.random.default_rng(seed)
    # The first pass begins with the widest peer: other peers' cells can then match its atoms, instead of
    # making new ones.
    for peer in sorted(range(len(peers)), key=lambda j: -len(peers[j].values)):
        state.step(peer)
    objective = [state.objective()]
    partitions = [state.partition()]
    is_joint = options.kind != "printed" and history is None
    sweeps, stop_reason = 0, None
    while stop_reason is None and sweeps < options.sweeps:
        before = objective[-1]
        for peer in rng.permutation(len(peers)):
            state.step(int(peer))
            objective.append(state.objective())
        sweeps += 1
        partition = state.partition()
        if partition == partitions[-1]:
            stop_reason = "settled"
        elif partition in partitions:
            stop_reason = "repeated"
        elif is_joint and objective[-1] - before <= options.tolerance * (1 + abs(before)):
            stop_reason = "tolerance"
        else:
            partitions.append(partition)
    assignments = state.renumbered_assignments()
    # Sum again from the cells: thousands of additions and subtractions have left rounding errors in `state`.
    size = 1 + max(int(atoms.max()) for atoms in assignments)
    atoms = sum_atoms(peers, assignments, max(size, len(history.atoms) if history else 0))
    if history is not None:
        atoms = history.atoms.plus(atoms)
    values = atoms.read(options.prior_precision, prior_mean, shrink=options.shrink)
    return MatchResult(
        assignments, atoms, values, tuple(objective), sweeps, stop_reason or "sweep limit"
    )


def _check(peers: Sequence[Cells], history: History | None) -> None:
    """Raise ModelError if peers cannot be matched together, or do not fit the history."""
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
            f"matching: the history has {history.uses.shape[0]} peers, {len(peers)} were given"
        )
    if history.atoms.sums.shape[1] != columns:
        raise ModelError(
            f"matching: the history's atoms have {history.atoms.sums.shape[1]} columns, "
            f"the cells have {columns}"
        )
    if history.step < 1 or (history.uses >= history.step).any():
        raise ModelError(
            "matching: in the history an atom was used more often than there were steps"
        )


@dataclass(frozen=True, eq=False)
class History:
    """The state of a stream of networks: its atoms so far, and how often each peer used each atom.

    `step` is the place in the stream of the networks that are matched now, counted from 1.
    """

    atoms: Atoms
    uses: np.ndarray  # [peers, atoms]
    step: int


class MatchState:
    """Current assignments, and statistics of every atom in rows; a step updates only the rows it changes."""

    def __init__(
        self,
        peers: Sequence[Cells],
        options: MatchOptions,
        mean: np.ndarray,
        history: History | None,
    ):
        self._options, self._history = options, history
        empty = np.zeros((0, peers[0].values.shape[1]))
        earlier = history.atoms if history else Atoms(empty, empty, np.zeros(0, dtype=np.int64))
        self._costs = Costs(
            options, mean, [*(peer.precision[None] for peer in peers), earlier.precisions]
        )
        self._peers = [self._costs.prepare(peer) for peer in peers]
        self.assignments = [np.empty(0, dtype=np.int64) for _ in peers]
        self._history_size = len(earlier)
        """The number of the history's atoms, which come first and stay even without a cell."""
        self._sums = earlier.sums.copy()
        self._precisions = self._costs.fold(earlier.precisions).copy()
        self._counts = np.zeros(self._history_size, dtype=np.int64)
        self._worth = self._costs.worth(self._sums, self._precisions)
        # A history has no groups: a stream's networks are matched without them.
        self._group = np.zeros(self._history_size, dtype=np.int64)
        self._widest = _widest_by_group(self._peers)

    def step(self, j: int) -> None:
        """Assign the cells of peer j again, with all other assignments fixed."""
        peer = self._peers[j]
        self._remove(j)
        cost = self._cost_matrix(j, *self._new_atoms(peer))
        self.assignments[j] = self._add(peer, linear_sum_assignment(cost)[1])

    def objective(self) -> float:
        """Return the log posterior, up to a constant: ½ Σ (Q − λT), plus the log prior of the partition."""
        used = self._counts > 0
        data = 0.5 * float(self._worth[used].sum())
        counts, peers = self._counts[used], len(self._peers)
        prior = float(
            len(counts) * (np.log(self._options.concentration) - gammaln(peers + 1))
            + (gammaln(counts) + gammaln(peers - counts + 1)).sum()
        )
        if self._options.kind == "efpf":
            prior -= float(gammaln(len(counts) + 1))
        return data + prior

    def partition(self) -> bytes:
        """Return bytes that are equal for equal partitions, however the atoms are numbered."""
        return np.concatenate(self.renumbered_assignments()).tobytes()

    def renumbered_assignments(self) -> tuple[np.ndarray, ...]:
        """Return assignments with new atoms numbered as they first appear, after those of the history."""
        flat = np.concatenate(self.assignments)
        used, first_cell = np.unique(flat, return_index=True)
        by_appearance = used[np.argsort(first_cell)]
        new = by_appearance[by_appearance >= self._history_size]
        number_of_atom = np.arange(len(self._counts))
        number_of_atom[new] = self._history_size + np.arange(len(new))
        ends = np.cumsum([len(atoms) for atoms in self.assignments])[:-1]
        return tuple(np.split(number_of_atom[flat], ends))

    def _remove(self, j: int) -> None:
        """Subtract a peer's cells from their atoms, and delete atoms that have no cell left."""
        peer, atoms = self._peers[j], self.assignments[j]
        if not len(atoms):
            return
        self._sums[atoms] -= peer.scaled
        self._precisions[atoms] -= peer.precision
        self._counts[atoms] -= 1
        keep = self._counts > 0
        keep[: self._history_size] = True
        changed = atoms[keep[atoms]]
        self._worth[changed] = self._costs.worth(self._sums[changed], self._precisions[changed])
        self.assignments[j] = atoms[:0]
        if keep.all():
            return
        new_number = np.cumsum(keep) - 1
        self._sums, self._precisions = self._sums[keep], self._precisions[keep]
        self._counts, self._worth = self._counts[keep], self._worth[keep]
        self._group = self._group[keep]
        self.assignments = [new_number[other] for other in self.assignments]

    def _new_atoms(self, peer: PeerCells) -> tuple[int, np.ndarray]:
        """Return how many new atoms any of the peer's cells may take, and the group of each reserved atom.

        Only cells of its group may take a reserved atom. Atoms are reserved so that, under the limit, every
        group can have as many atoms as its widest peer has cells: an assignment then always exists. All other
        cells must share atoms that exist.
        """
        limit = self._options.limit
        if limit is None:
            return peer.cells, np.empty(0, dtype=np.int64)
        existing = {group: int((self._group == group).sum()) for group in self._widest}
        existing_or_reserved = sum(max(existing[g], cells) for g, cells in self._widest.items())
        free = max(limit, sum(self._widest.values())) - existing_or_reserved
        if free >= peer.cells:
            return peer.cells, np.empty(0, dtype=np.int64)
        missing = [
            np.full(max(cells - existing[group], 0), group) for group, cells in self._widest.items()
        ]
        return max(free, 0), np.concatenate(missing)

    def _cost_matrix(self, j: int, free: int, reserved: np.ndarray) -> np.ndarray:
        """Return costs [cells, atoms and new atoms]; the smallest sum is the most probable assignment.

        A cost is −2 times the log of the odds. free, reserved: what `_new_atoms` returned.
        """
        peer, options, peers = self._peers[j], self._options, len(self._peers)
        existing, new = len(self._counts), free + len(reserved)
        cost = np.empty((peer.cells, existing + new))
        if existing:
            gains = self._costs.gains(self._sums, self._precisions, self._worth, peer)
            cost[:, :existing] = -gains - 2 * self._log_odds(j)
            if peer.group is not None:
                cost[:, :existing][peer.group[:, None] != self._group] = np.inf
        step = self._history.step if self._history else 1
        # What the prior divides the odds of the k-th new atom by; k if `printed`.
        divisor = np.arange(1, new + 1, dtype=np.float64)
        if options.kind == "set":
            divisor[:] = 1
        elif options.kind == "efpf":
            divisor += existing
        log_odds = np.log(options.concentration / (step * peers))
        cost[:, existing:] = -peer.single_worth[:, None] - 2 * log_odds + 2 * np.log(divisor)
        if peer.group is not None:
            cost[:, existing + free :][peer.group[:, None] != reserved] = np.inf
        return cost

    def _log_odds(self, j: int) -> np.ndarray:
        """Return the log of the prior odds that peer j uses each atom."""
        if self._history is None:
            return np.log(self._counts / (len(self._peers) - self._counts))
        # The heuristic of PFNM for streams: a peer tends to use the atoms that it used before.
        uses = np.zeros(len(self._counts))
        uses[: self._history_size] = self._history.uses[j]
        return np.log((1 + uses) / (self._history.step - uses))

    def _add(self, peer: PeerCells, choices: np.ndarray) -> np.ndarray:
        """Add each cell to its choice, a column of the cost matrix; return the atom of each cell."""
        atoms, existing = choices.copy(), len(self._counts)
        is_new = choices >= existing
        count = int(is_new.sum())
        atoms[is_new] = existing + np.arange(count)
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


def _widest_by_group(peers: Sequence[PeerCells]) -> dict[int, int]:
    """Return the most cells that one peer has of each group; without groups all cells are of group 0."""
    widest: dict[int, int] = {}
    for peer in peers:
        labels = np.zeros(peer.cells, dtype=np.int64) if peer.group is None else peer.group
        for group, cells in zip(*np.unique(labels, return_counts=True), strict=True):
            widest[int(group)] = max(widest.get(int(group), 0), int(cells))
    return widest


@dataclass(frozen=True, eq=False)
class PeerCells:
    """What costs need of a peer's cells (values v, precisions p) in every step, computed once."""

    scaled: np.ndarray  # v p [cells, columns]
    squares: np.ndarray  # Σ (v p)² over each column class [cells, classes]
    precision: np.ndarray  # p [classes]
    single_worth: np.ndarray  # worth of an atom with only this cell [cells]
    group: np.ndarray | None

    @property
    def cells(self) -> int:
        """How many cells the peer has."""
        return len(self.scaled)


class Costs:
    """Computes the worth of atoms, and what each cell would add to it; rows are atoms.

    Precisions are kept per column class (see the module's docstring): 784 inputs are usually one class.
    """

    def __init__(self, options: MatchOptions, mean: np.ndarray, precisions: Sequence[np.ndarray]):
        # Columns are compared as bytes: faster than np.unique along an axis, which sorts rows of floats.
        stacked = np.ascontiguousarray(np.vstack(precisions).T)
        keys = stacked.view(np.dtype((np.void, stacked.dtype.itemsize * stacked.shape[1]))).ravel()
        _, self._first, self._class_of = np.unique(keys, return_index=True, return_inverse=True)
        self._by_class = np.argsort(self._class_of, kind="stable")  # the columns, sorted by class
        self._starts = np.searchsorted(self._class_of[self._by_class], np.arange(len(self._first)))
        self._kl, self._prior_precision, self._mean = options.kl, options.prior_precision, mean
        self._prior_sum = mean * self._prior_precision  # µa
        self._zero_mean = not mean.any()
        self._prior_square = float((mean * self._prior_sum).sum())  # Σ_d µ²a

    def fold(self, precisions: np.ndarray) -> np.ndarray:
        """Return precisions [..., columns] as [..., classes]: that of the first column of each class."""
        return precisions[..., self._first]

    def _sum_classes(self, values: np.ndarray) -> np.ndarray:
        """Sum values [rows, columns] over each column class: [rows, classes]."""
        return np.add.reduceat(values[:, self._by_class], self._starts, axis=1)

    def prepare(self, cells: Cells) -> PeerCells:
        """Compute the terms of a peer's cells that every step needs."""
        scaled = cells.values * cells.precision
        precision = self.fold(cells.precision)
        rows = np.broadcast_to(precision, (len(scaled), len(precision)))
        squares = self._sum_classes(scaled**2)
        return PeerCells(scaled, squares, precision, self.worth(scaled, rows), cells.group)

    def worth(self, sums: np.ndarray, precisions: np.ndarray) -> np.ndarray:
        """Return Q − λT of every atom."""
        total = precisions + self._prior_precision
        worth = self._weighted_squares(sums + self._prior_sum, 1 / total) - self._prior_square
        if self._kl:
            shift = self._shift(sums, precisions)
            worth -= self._kl * self._weighted_squares(shift, precisions / total**2)
        return worth

    def gains(
        self, sums: np.ndarray, precisions: np.ndarray, worth: np.ndarray, peer: PeerCells
    ) -> np.ndarray:
        """Return by how much each cell would raise the worth of each atom: [cells, atoms].

        `square`, `linear` and `constant` are the coefficients of v² (per column class), of v and of 1.
        """
        after = precisions + peer.precision
        square = 1 / (after + self._prior_precision)
        posterior_sums = sums + self._prior_sum
        linear = posterior_sums * square[..., self._class_of]
        constant = np.einsum("ij,ij->i", posterior_sums, linear) - self._prior_square
        if self._kl:
            square_penalty = self._kl * after * square**2
            shift = self._shift(sums, after)
            linear_penalty = shift * square_penalty[..., self._class_of]
            constant -= np.einsum("ij,ij->i", shift, linear_penalty)
            linear -= linear_penalty
            square -= square_penalty
        gains = peer.scaled @ linear.T
        gains *= 2
        gains += peer.squares @ square.T
        gains += constant - worth
        return gains

    def _shift(self, sums: np.ndarray, precisions: np.ndarray) -> np.ndarray:
        """Return R − µA, which is (a + A)(θ − µ)."""
        if self._zero_mean:
            return sums
        return sums - self._mean * precisions[..., self._class_of]

    def _weighted_squares(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return Σ_d weight · value² of every row; weights are given per column class."""
        return np.einsum("ij,ij->i", self._sum_classes(rows**2), weights)
