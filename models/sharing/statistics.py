"""The statistics from which a swarm decides what to share, as one vector that gossip averages.

The vector has a row for every peer, and the values of groups. A peer fills in what it has measured: its own
row, and the values of the groups that it is in; the rest is 0. So the mean over peers, which push-sum
computes, has the measurements of all peers. Each row and each group also has an entry to which its peers
contribute 1. Other entries are divided by it when they are read, so they are right even before gossip has
reached all peers equally.

Some of the values are not the network's, but those of *copies* of the output layer and of the norm
statistics, which each peer trains but never averages (member.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from ..anatomy import Anatomy
from ..slicing import Coordinates, seeded_rng, slice_if_contiguous
from .assignment import Assignment, Group, members
from .candidates import NORM_STATISTICS, Candidate, levels

SKETCH_SIZE = 32
"""Numbers in a sketch, which describes how training moves a part: random sums of its coordinates' changes.
All peers use the same sums, so their sketches can be compared."""
LOSSES_BEFORE_CANDIDATES = 2
"""Losses in a row before those of the candidates: with the present values, and with the mean of the copies of
the output layers."""

MAX_UNEVEN = 3.0
"""Losses are measured when the values of no peer count more than this many times as much as those of another:
a mean in which a peer's own values count most makes small groups look too good."""

Source = Literal["values", "copies"]
"""What is averaged on trial: the values after training, or the copies (see the module's docstring)."""


class StatisticsLayout:
    """Where each number of the vector is; equal for all peers that follow the same plan.

        1, training loss                       means over all peers
        1                                      for every peer that contributes values
        products, squares                      of every cell's movement, see `_Movement` in member.py
        1, losses, sketches                    a row for every peer
        1, values                              for every group

    While the swarm does not decide, only the first line and the first entry of every row are there.
    """

    def __init__(self, assignment: Assignment, candidates: Sequence[Candidate], deciding: bool):
        self.assignment, self.deciding = assignment, deciding
        self.peers = len(assignment.peers)
        anatomy = assignment.anatomy
        self.parts = anatomy.names
        self.cells = int(anatomy.first_cells[-1]) if deciding else 0
        self.losses = LOSSES_BEFORE_CANDIDATES + len(candidates) if deciding else 0
        self.columns = 1 + self.losses + (SKETCH_SIZE * len(self.parts) if deciding else 0)
        self.trials = _trials(assignment, candidates)
        """The averages that peers try. The first is that of the copies of the output layers under the present
        assignment; then there is one for every candidate."""
        coordinates: dict[tuple[Source, Group], list[Coordinates]] = {}
        for source, groups in self.trials:
            for group, columns in groups:
                if len(group) > 1:
                    coordinates.setdefault((source, group), []).append(columns)
        # All groups of one grouping have the same pieces, whose union is computed once: it takes long.
        unions: dict[tuple[int, ...], Coordinates] = {}
        self.groups: dict[tuple[Source, Group], Coordinates] = {}
        """The coordinates at which the vector has values of each group."""
        for key, pieces in coordinates.items():
            piece_ids = tuple(map(id, pieces))
            if piece_ids not in unions:
                unions[piece_ids] = _union(pieces, anatomy.size)
            self.groups[key] = unions[piece_ids]
        self._positions: dict[tuple[int, int], Coordinates] = {}
        first = 2 + (self.peers if deciding else 0)
        # The entries to which each peer contributes 1 together with its values.
        self._weights = slice(2, first)
        self._cells = slice(first, first + 2 * self.cells)
        self._rows = slice(self._cells.stop, self._cells.stop + self.peers * self.columns)
        self._starts: dict[tuple[Source, Group], int] = {}
        self.size = self._rows.stop
        content = hashlib.blake2b(f"{deciding} {assignment.digest}".encode(), digest_size=4)
        for candidate in candidates:
            content.update(f"{candidate.part} {candidate.scheme}".encode())
            content.update(np.array(candidate.cells, "<u4").tobytes())
        self.name = content.hexdigest()
        """The name of the layout: only vectors of the same layout may be averaged."""
        for key, columns in self.groups.items():
            self._starts[key] = self.size + 1  # after the entry to which members contribute 1
            self.size += 1 + count_coordinates(columns)
        self.measured = slice(first, self._rows.stop)
        """The entries that peers have measured; the others are their training losses and values."""

    def pack(
        self,
        peer: int | None,
        training_loss: float,
        products: np.ndarray,
        squares: np.ndarray,
        losses: np.ndarray,
        sketches: np.ndarray,
        sources: dict[Source, np.ndarray],
    ) -> np.ndarray:
        """Return one peer's contribution. While the swarm does not decide, it has only the training loss.

        peer: its number; None if it is not in the assignment, and contributes only its training loss.
        products, squares, sketches: see `_Movement` and `sketch`. losses: as in `Statistics.losses`.
        sources: the flat parameter vectors that groups average.
        """
        vector = np.zeros(self.size, np.float32)
        vector[:2] = 1.0, training_loss
        if not self.deciding or peer is None:
            return vector
        vector[self._weights][peer] = 1.0
        vector[self._cells] = np.concatenate([products, squares])
        row = vector[self._rows].reshape(self.peers, self.columns)[peer]
        row[0] = 1.0
        row[1 : 1 + self.losses] = losses
        row[1 + self.losses :] = sketches.ravel()
        for (source, group), columns in self.groups.items():
            if peer in group:
                start = self._starts[source, group]
                vector[start - 1] = 1.0
                vector[start : start + count_coordinates(columns)] = sources[source][columns]
        return vector

    def is_complete(self, vector: np.ndarray, peers: Iterable[int]) -> bool:
        """Return whether the values of all these peers have arrived, and count about the same (MAX_UNEVEN).

        Always True while the swarm does not decide.
        """
        if not self.deciding:
            return True
        weights = vector[self._weights][list(peers)]
        return bool(weights.min(initial=np.inf) * MAX_UNEVEN >= weights.max(initial=0.0))

    def rows(self, vector: np.ndarray) -> np.ndarray:
        """Return the rows of all peers, [peers, columns], as they are in the vector."""
        return vector[self._rows].reshape(self.peers, self.columns)

    def movements(self, vector: np.ndarray) -> np.ndarray:
        """Return the products and the squares of movements, [2, cells]."""
        return vector[self._cells].reshape(2, self.cells)

    def group_mean(self, vector: np.ndarray, trial: int, number: int) -> np.ndarray:
        """Return the mean over the peers of a group of `trials[trial]`, at its coordinates."""
        source, groups = self.trials[trial]
        group, columns = groups[number]
        if (trial, number) not in self._positions:  # the same in every round, and for every peer
            in_group = _positions(columns, self.groups[source, group])
            self._positions[trial, number] = _shift(in_group, self._starts[source, group])
        total = vector[self._positions[trial, number]]
        weight = vector[self._starts[source, group] - 1]
        return total / weight if weight > 0 else total


Trial = tuple[Source, list[tuple[Group, Coordinates]]]
"""What is averaged, and by which groups at which coordinates."""


def _trials(assignment: Assignment, candidates: Sequence[Candidate]) -> list[Trial]:
    """Return the averages that peers try for some candidates; see `StatisticsLayout.trials`."""
    if not candidates:
        return []
    anatomy = assignment.anatomy
    outputs = coordinates_into(anatomy, outputs_of(anatomy))
    trials: list[Trial] = [("copies", _with_slices(assignment.groups_at(outputs)))]
    for candidate in candidates:
        groups = [
            (group, columns) for labels, columns in candidate.changes for group in members(labels)
        ]
        if candidate.level == 0:
            # All outputs are those of the copies, also the cells that the candidate does not change.
            is_unchanged = np.ones(anatomy.size, bool)
            for _, columns in candidate.changes:
                is_unchanged[columns] = False
            groups += _with_slices(assignment.groups_at(outputs[is_unchanged[outputs]]))
        has_copy = candidate.level == 0 or candidate.part == NORM_STATISTICS
        trials.append(("copies" if has_copy else "values", groups))
    return trials


def _with_slices(groups: Iterable[tuple[Group, np.ndarray]]) -> list[tuple[Group, Coordinates]]:
    """Return groups with their coordinates as slices where these are contiguous."""
    return [(group, slice_if_contiguous(columns)) for group, columns in groups]


def count_coordinates(columns: Coordinates) -> int:
    """Return how many coordinates there are."""
    return columns.stop - columns.start if isinstance(columns, slice) else len(columns)


def _shift(columns: Coordinates, by: int) -> Coordinates:
    """Return coordinates with a number added to each."""
    if isinstance(columns, slice):
        return slice(columns.start + by, columns.stop + by)
    return columns + by


def _positions(columns: Coordinates, superset: Coordinates) -> Coordinates:
    """Return the index of each coordinate in a superset, which is in ascending order."""
    if isinstance(superset, slice):
        return _shift(columns, -superset.start)
    if isinstance(columns, slice):
        start = int(np.searchsorted(superset, columns.start))
        return slice(start, start + count_coordinates(columns))
    return np.searchsorted(superset, columns)


def _contains(columns: Coordinates, others: Coordinates) -> bool:
    """Return whether `columns` is a slice that contains the slice `others`; False for arrays."""
    if not isinstance(columns, slice) or not isinstance(others, slice):
        return False
    return columns.start <= others.start and others.stop <= columns.stop


def _union(pieces: Sequence[Coordinates], size: int) -> Coordinates:
    """Return the coordinates that are in one of the pieces, in ascending order; size: of the flat vector."""
    largest = max(pieces, key=count_coordinates)
    if all(piece is largest or _contains(largest, piece) for piece in pieces):
        return largest
    inside = np.zeros(size, bool)
    for piece in pieces:
        inside[piece] = True
    return slice_if_contiguous(np.flatnonzero(inside))


class Statistics:
    """The measurements of all peers, as one peer knows them from the averaged vector.

    spread: as in Plan. If it is not 0, peers sketch how far training moves values, not how far it moves them
    away from the average: then `sketches` subtracts the mean over peers.
    """

    def __init__(self, layout: StatisticsLayout, vector: np.ndarray, *, spread: int = 0):
        self._layout, self._vector, self._subtracts_mean = layout, vector, bool(spread)
        self.training_loss = float(vector[1] / vector[0])
        rows = layout.rows(vector)
        self.present = rows[:, 0] > 0
        """For every peer, whether its row has arrived."""
        self._rows = rows / np.where(self.present, rows[:, 0], 1.0)[:, None]

    @property
    def measured(self) -> int:
        """How many peers have measured held-out losses."""
        return int((self.present & (self.losses[:, 0] > 0)).sum())

    @property
    def losses(self) -> np.ndarray:
        """Held-out losses, [peers, losses]: see LOSSES_BEFORE_CANDIDATES, then one for each candidate."""
        return self._rows[:, 1 : 1 + self._layout.losses]

    @property
    def sketches(self) -> dict[str, np.ndarray]:
        """For each part, the sketch of every peer, [peers, SKETCH_SIZE]."""
        by_part = self._rows[:, 1 + self._layout.losses :].reshape(
            self._layout.peers, -1, SKETCH_SIZE
        )
        if self._subtracts_mean and self.present.any():
            by_part = by_part.copy()
            by_part[self.present] -= by_part[self.present].mean(axis=0)
        return {part: by_part[:, index] for index, part in enumerate(self._layout.parts)}

    @property
    def ratios(self) -> np.ndarray:
        """V/σ² of every cell: the variance of its values between peers, relative to the noise of samples.

        The noise of two successive rounds is independent. So the mean product of a peer's movements in two
        rounds estimates V, and the mean square exceeds it by the noise.
        """
        product, square = self._layout.movements(self._vector)
        noise = (square - product) / 2
        # Cells that hardly move, such as those that are never active, differ by rounding only.
        has_noise = noise > 1e-6 * noise.max(initial=0.0)
        return np.divide(product, noise, out=np.zeros_like(noise), where=has_noise)


def sketch(anatomy: Anatomy, moved: dict[str, np.ndarray]) -> np.ndarray:
    """Return the sketch of every part, [parts, SKETCH_SIZE]: random sums of its movement.

    moved: for each part, how far training has moved the coordinates that lead into its cells.
    """
    rows = []
    for part in anatomy.names:
        buckets, signs = _random_sums(part, len(moved[part]))
        rows.append(np.bincount(buckets, moved[part] * signs, SKETCH_SIZE))
    return np.stack(rows)


@lru_cache(maxsize=64)
def _random_sums(part: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each coordinate of a part, to which of the sums it is added, and with which sign."""
    generator = seeded_rng(0, "sketch", part)
    return generator.integers(SKETCH_SIZE, size=size), generator.choice((-1.0, 1.0), size=size)


@lru_cache(maxsize=64)
def coordinates_into(anatomy: Anatomy, part: str) -> np.ndarray:
    """Return the coordinates that lead into a part's cells; for the inputs, those that lead out of them."""
    index = anatomy.find(part)
    first, end = anatomy.first_cells[index : index + 2]
    inside = np.zeros(anatomy.size, bool)
    for axis in (0, -1):
        cells = cell_of_coordinates(anatomy, axis)
        if (inside := (cells >= first) & (cells < end)).any():
            break
    return np.flatnonzero(inside)


def outputs_of(anatomy: Anatomy) -> str:
    """Return the name of the output part."""
    return next(part for level, part in levels(anatomy) if level == 0)


@lru_cache(maxsize=8)
def cell_of_coordinates(anatomy: Anatomy, axis: int) -> np.ndarray:
    """Return, for every coordinate, its cell on the first (axis=0) or last (axis=-1) axis that has cells.

    Coordinates of norm layers have the one cell of their part.
    """
    cells = np.zeros(anatomy.size, np.int64)
    for parameter in anatomy.parameters:
        with_cells = [
            i for i, cells_on_axis in enumerate(parameter.axes) if cells_on_axis is not None
        ]
        grid = np.zeros(parameter.shape, np.int64)
        if parameter.extra_cell is not None:
            grid[:] = parameter.extra_cell
        elif with_cells:
            chosen = with_cells[axis]
            other_axes = [i for i in range(len(parameter.shape)) if i != chosen]
            grid[:] = np.expand_dims(np.asarray(parameter.axes[chosen]), other_axes)
        elif parameter.cell is not None:
            grid[...] = parameter.cell
        cells[anatomy.spans[parameter.name]] = grid.ravel()
    return cells
