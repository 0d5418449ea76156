"""The knobs of matching, what it sees of a peer, and what it keeps of an atom: sums that add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

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
