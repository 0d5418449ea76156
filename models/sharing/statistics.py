"""What peers tell each other to decide together, as one vector that gossip averages like a partial model.

Every peer fills in the vector what it has measured: in the rows of peers only its own row, in the values of
groups only those of its own groups. The mean over peers, which push-sum finds, then holds everybody's. A peer
also adds 1 to a number of its own. Values are read relative to that number, so they are right even where
gossip has not yet reached all peers alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from ..anatomy import Anatomy
from ..slicing import Places, as_slice, seeded_rng
from .assignment import Assignment, Labels, members
from .candidates import Candidate, levels

SKETCH = 32
"""Numbers in a sketch: random sums of the coordinates of a part, the same on every peer."""
LOSSES_BEFORE_CANDIDATES = 2
"""Losses in a row before those of the candidates: as things are, and with averaged output layers."""

Source = Literal["values", "heads"]
"""What a group averages: the values that training led to, or output layers that are never averaged."""


class StatisticsLayout:
    """Where each number of the vector is; equal for all peers that follow the same plan."""

    def __init__(self, assignment: Assignment, candidates: Sequence[Candidate], deciding: bool):
        self.assignment, self.deciding = assignment, deciding
        self.peers = len(assignment.peers)
        anatomy = assignment.anatomy
        self.parts = anatomy.names
        self.cells = int(anatomy.first_cells[-1]) if deciding else 0
        self.losses = LOSSES_BEFORE_CANDIDATES + len(candidates) if deciding else 0
        self.columns = 1 + self.losses + (SKETCH * len(self.parts) if deciding else 0)
        self.mixes: list[tuple[Source, list[tuple[Labels, Places]]]] = []
        """What is averaged by whom, and at which coordinates: with output layers that are never averaged, and
        under every candidate."""
        outputs = coordinates_into(anatomy, outputs_of(anatomy))
        if candidates:
            self.mixes.append(("heads", _compact(assignment.groups_at(outputs))))
        for one in candidates:
            groups = [
                (group, columns) for labels, columns in one.changes for group in members(labels)
            ]
            if one.level == 0:
                stays = np.ones(anatomy.size, bool)
                for _, columns in one.changes:
                    stays[columns] = False
                groups += _compact(assignment.groups_at(outputs[stays[outputs]]))
            self.mixes.append(("heads" if one.level == 0 else "values", groups))
        needed: dict[tuple[Source, Labels], list[Places]] = {}
        for source, groups in self.mixes:
            for group, columns in groups:
                if len(group) > 1:
                    needed.setdefault((source, group), []).append(columns)
        self.groups = {key: _union(pieces, anatomy.size) for key, pieces in needed.items()}
        self._positions: dict[tuple[int, int], Places] = {}
        self._rows = slice(2 + 2 * self.cells, 2 + 2 * self.cells + self.peers * self.columns)
        self._starts: dict[tuple[Source, Labels], int] = {}
        self.size = self._rows.stop
        content = hashlib.blake2b(f"{deciding} {assignment.digest}".encode(), digest_size=4)
        for one in candidates:
            content.update(f"{one.part} {one.scheme}".encode())
            content.update(np.array(one.cells, "<u4").tobytes())
        self.name = content.hexdigest()
        """Vectors of layouts with the same name may be averaged."""
        for key, columns in self.groups.items():
            self._starts[key] = self.size + 1  # behind the number to which members add 1
            self.size += 1 + number_of(columns)
        self.measured = slice(2, self._rows.stop)
        """What peers have measured; the rest are their training losses and values."""

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
        """Return what one peer adds. While nothing is decided, only the training loss is used.

        peer: its number; None if it is not in the assignment, and only tells its training loss.
        """
        vector = np.zeros(self.size, np.float32)
        vector[:2] = 1.0, training_loss
        if not self.deciding or peer is None:
            return vector
        vector[2 : 2 + self.cells] = products
        vector[2 + self.cells : 2 + 2 * self.cells] = squares
        row = vector[self._rows].reshape(self.peers, self.columns)[peer]
        row[0] = 1.0
        row[1 : 1 + self.losses] = losses
        row[1 + self.losses :] = sketches.ravel()
        for (source, group), columns in self.groups.items():
            if peer in group:
                start = self._starts[source, group]
                vector[start - 1] = 1.0
                vector[start : start + number_of(columns)] = sources[source][columns]
        return vector

    def rows(self, vector: np.ndarray) -> np.ndarray:
        """Return the rows of all peers, as they are in the vector."""
        return vector[self._rows].reshape(self.peers, self.columns)

    def group_mean(self, vector: np.ndarray, mix: int, number: int) -> np.ndarray:
        """Return the mean over the peers of a group of `mixes[mix]`, at its coordinates."""
        source, groups = self.mixes[mix]
        group, columns = groups[number]
        if (mix, number) not in self._positions:  # the same in every round, and for every peer
            within = _positions(columns, self.groups[source, group])
            self._positions[mix, number] = _shifted(within, self._starts[source, group])
        total = vector[self._positions[mix, number]]
        weight = vector[self._starts[source, group] - 1]
        return total / weight if weight > 0 else total


def _compact(groups: Iterable[tuple[Labels, np.ndarray]]) -> list[tuple[Labels, Places]]:
    return [(group, as_slice(columns)) for group, columns in groups]


def number_of(columns: Places) -> int:
    """Return how many coordinates there are."""
    return columns.stop - columns.start if isinstance(columns, slice) else len(columns)


def _shifted(columns: Places, by: int) -> Places:
    if isinstance(columns, slice):
        return slice(columns.start + by, columns.stop + by)
    return columns + by


def _positions(columns: Places, every: Places) -> Places:
    """Return where coordinates are among others, which are in ascending order and contain them."""
    if isinstance(every, slice):
        return _shifted(columns, -every.start)
    if isinstance(columns, slice):
        start = int(np.searchsorted(every, columns.start))
        return slice(start, start + number_of(columns))
    return np.searchsorted(every, columns)


def _contains(columns: Places, others: Places) -> bool:
    """Return whether the one slice contains the other; False for anything but slices."""
    if not isinstance(columns, slice) or not isinstance(others, slice):
        return False
    return columns.start <= others.start and others.stop <= columns.stop


def _union(pieces: Sequence[Places], size: int) -> Places:
    """Return all coordinates of some pieces, in ascending order."""
    largest = max(pieces, key=number_of)
    if all(piece is largest or _contains(largest, piece) for piece in pieces):
        return largest
    inside = np.zeros(size, bool)
    for piece in pieces:
        inside[piece] = True
    return as_slice(np.flatnonzero(inside))


class Statistics:
    """The means over peers, as one peer knows them."""

    def __init__(self, layout: StatisticsLayout, vector: np.ndarray):
        self._layout, self._vector = layout, vector
        self.training_loss = float(vector[1] / vector[0])
        rows = layout.rows(vector)
        self.present = rows[:, 0] > 0
        """Whose row has arrived."""
        self._rows = rows / np.where(self.present, rows[:, 0], 1.0)[:, None]

    @property
    def measured(self) -> int:
        """How many peers have measured held-out losses."""
        return int((self.present & (self.losses[:, 0] > 0)).sum())

    @property
    def losses(self) -> np.ndarray:
        """[peers, losses]: held-out losses as things are, with averaged output layers, and by candidate."""
        return self._rows[:, 1 : 1 + self._layout.losses]

    @property
    def sketches(self) -> dict[str, np.ndarray]:
        """For each part, a row of numbers per peer: where training moves the part's values."""
        by_part = self._rows[:, 1 + self._layout.losses :].reshape(self._layout.peers, -1, SKETCH)
        return {part: by_part[:, index] for index, part in enumerate(self._layout.parts)}

    @property
    def ratios(self) -> np.ndarray:
        """V/σ² of every cell.

        The noise of a peer's samples differs from round to round, so the product of two successive
        movements is what lasts.
        """
        cells = self._layout.cells
        product, square = self._vector[2 : 2 + 2 * cells].reshape(2, cells)
        noise = (square - product) / 2
        # Cells that hardly move, such as those that are never active, differ by rounding only.
        moves = noise > 1e-6 * noise.max(initial=0.0)
        return np.divide(product, noise, out=np.zeros_like(noise), where=moves)


def sketch(anatomy: Anatomy, moved: dict[str, np.ndarray]) -> np.ndarray:
    """Return random sums of every part's movement, [parts, SKETCH], the same sums on every peer.

    moved: for each part, how far training has moved the coordinates that lead into its cells.
    """
    rows = []
    for part in anatomy.names:
        buckets, signs = _random_sums(part, len(moved[part]))
        rows.append(np.bincount(buckets, moved[part] * signs, SKETCH))
    return np.stack(rows)


@lru_cache(maxsize=64)
def _random_sums(part: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum that each coordinate of a part is added to, and its sign."""
    generator = seeded_rng(0, "sketch", part)
    return generator.integers(SKETCH, size=size), generator.choice((-1.0, 1.0), size=size)


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
    """Return, for every coordinate, the cell on the first or last axis with cells; for norms, their own."""
    cells = np.zeros(anatomy.size, np.int64)
    for one in anatomy.parameters:
        with_cells = [number for number, each in enumerate(one.axes) if each is not None]
        grid = np.zeros(one.shape, np.int64)
        if one.extra_cell is not None:
            grid[:] = one.extra_cell
        elif with_cells:
            number = with_cells[axis]
            grid[:] = np.expand_dims(
                np.asarray(one.axes[number]),
                [other for other in range(len(one.shape)) if other != number],
            )
        elif one.cell is not None:
            grid[...] = one.cell
        cells[anatomy.spans[one.name]] = grid.ravel()
    return cells
