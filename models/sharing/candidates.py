"""Candidates: changes that a swarm may make to its assignment, which says who averages each cell.

Each changes who averages some cells of one part: groups of peers, each peer for itself, or all peers again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..anatomy import Anatomy
from ..errors import ModelError
from ..slicing import Coordinates
from .assignment import GLOBAL, OWN, Assignment, Labels, renumbered

MAX_GROUPS = 5
"""The most groups that are tried."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A change of the present assignment in one part.

    level
        Where the part is in the network, counted from the outputs: 0 for the outputs, 1, 2, … for the parts
        before them, and negative numbers for the parts that stand for norm layers. Candidates of lower levels
        are preferred.
    cells
        Which cells of the part change.
    scheme
        Who averages them: OWN for each peer alone, GLOBAL for all peers again, or a grouping: for each peer
        the number of its group.
    assignment
        The assignment with this change.
    changes
        The coordinates that other groups of peers average than under the present assignment, as pairs: for
        each peer the number of its group, and the coordinates with these groups.
    """

    part: str
    level: int
    cells: tuple[int, ...]
    scheme: int | Labels
    assignment: Assignment
    changes: tuple[tuple[Labels, Coordinates], ...]

    @classmethod
    def of(
        cls, present: Assignment, part: str, cells: Sequence[int] | np.ndarray, scheme: int | Labels
    ) -> Candidate:
        """Return the candidate that gives cells of a part to a scheme."""
        anatomy = present.anatomy
        chosen, first = np.asarray(cells, int), anatomy.first_cells[anatomy.find(part)]
        level = next(level for level, name in levels(anatomy) if name == part)
        changed, changes = present.change(part, chosen, scheme), []
        # A coordinate has the schemes of all its cells: a set, as an int with bit s for scheme s.
        new_scheme = 1 << int(changed.scheme_of[first + chosen[0]])
        for schemes, schemes_of_others, coordinates in present.blocks_of(first + chosen):
            groups = changed.peer_groups(schemes_of_others | new_scheme)
            if groups != present.peer_groups(schemes):
                changes.append((groups, coordinates))
        return cls(part, level, tuple(chosen.tolist()), scheme, changed, tuple(changes))

    @property
    def groups(self) -> int:
        """The number of groups that average the cells; 0 if there are none."""
        return 0 if isinstance(self.scheme, int) else max(self.scheme) + 1

    @property
    def shares_again(self) -> bool:
        """Whether all peers share the cells again."""
        return self.scheme == GLOBAL

    @property
    def is_small(self) -> bool:
        """Whether it makes norms each peer's own, or lets more cells be averaged by groups that exist.

        Norms have few values, and groups that exist have shown that their peers differ, so less evidence is
        enough.
        """
        if self.scheme == OWN:
            return self.level < 0
        scheme_of = self.assignment.scheme_of
        scheme = scheme_of[self.cell_numbers[0]]
        return self.groups > 0 and (scheme_of == scheme).sum() > len(self.cells)

    @property
    def cell_numbers(self) -> list[int]:
        """The cells, numbered through the whole network."""
        anatomy = self.assignment.anatomy
        first = int(anatomy.first_cells[anatomy.find(self.part)])
        return [first + cell for cell in self.cells]

    def __str__(self) -> str:
        change = f"averaged in {self.groups} groups" if self.groups else "each peer's own"
        if self.shares_again:
            change = "shared by all peers again"
        return f"{self._cells_in_words()} of {self._part_in_words()}: {change}"

    def as_record(self) -> dict[str, Any]:
        """Return the change as plain data, which `from_record` reads."""
        scheme = self.scheme if isinstance(self.scheme, int) else list(self.scheme)
        return {"part": self.part, "cells": list(self.cells), "scheme": scheme}

    @classmethod
    def from_record(cls, present: Assignment, record: dict[str, Any]) -> Candidate:
        """Return the candidate that `as_record` described; ModelError if it does not fit the assignment."""
        scheme, name, cells = record["scheme"], record["part"], record["cells"]
        part = present.anatomy.parts[present.anatomy.find(name)]
        if cells and not (min(cells) >= 0 and max(cells) < part.cells):
            raise ModelError(f"a candidate changes cells that part {name!r} does not have")
        if not isinstance(scheme, int):
            scheme = renumbered(scheme)
        elif not 0 <= scheme < len(present.schemes):
            raise ModelError(f"a candidate names scheme {scheme}, which the assignment lacks")
        return cls.of(present, name, cells, scheme)

    def _cells_in_words(self) -> str:
        """Return the cells as text: `all cells`, `cells 8, 9`."""
        part = self.assignment.anatomy.parts[self.assignment.anatomy.find(self.part)]
        if len(self.cells) == part.cells:
            return "all cells"
        if len(self.cells) > 5:
            return f"{len(self.cells)} of {part.cells} cells"
        return f"cell{'s' * (len(self.cells) > 1)} {', '.join(map(str, self.cells))}"

    def _part_in_words(self) -> str:
        """Return the part as text: `part 2`, `the outputs (4)`."""
        if self.level < 0:
            return self.part.replace("-", " ")
        if self.level == 0:
            return f"the outputs ({self.part})"
        return "the inputs" if self.part == "input" else f"part {self.part}"


def propose(
    assignment: Assignment,
    sketches: Mapping[str, np.ndarray],
    ratios: np.ndarray,
    frozen: Collection[str] = (),
    moved: Collection[int] = (),
) -> list[Candidate]:
    """Return the candidates for the next step.

    For every part, take the cells that all peers still share. One candidate gives each peer its own values of
    them. There is one more for each grouping of the peers: those in use, and those of peers whose training
    moves the part's values in similar directions. If only some of the cells have a V/σ² above 1, there are
    further candidates for just those: all of these in the outputs, only the first one in other parts. One
    more candidate shares the cells in `moved` among all peers again.

    sketches
        For each part, one row of numbers per peer: how far, and in which direction, training moves the
        part's values away from the average.
    ratios
        For every cell, V/σ²: the variance of its values between peers, relative to the noise that comes from
        the choice of samples.
    frozen
        Parts that are not trained. Only the weights that lead out of their cells could gain by a change, so
        there are no candidates for them.
    moved
        Cells that all peers shared before a decision, numbered through the network.
    """
    anatomy = assignment.anatomy
    candidates: list[Candidate] = []
    for level, part in levels(anatomy):
        if part in frozen:
            continue
        first, end = anatomy.first_cells[(index := anatomy.find(part)) : index + 2]
        moved_cells = [cell - first for cell in moved if first <= cell < end]
        if moved_cells:
            candidates.append(Candidate.of(assignment, part, moved_cells, GLOBAL))
        shared = assignment.cells(part, GLOBAL)
        if not len(shared):
            continue
        differing = shared[ratios[first + shared] > 1]
        groupings = [
            *assignment.schemes[OWN + 1 :],
            *groupings_of(sketches[part], MAX_GROUPS),
        ]
        schemes: list[int | Labels] = [OWN, *dict.fromkeys(groupings)]
        candidates += [Candidate.of(assignment, part, shared, scheme) for scheme in schemes]
        if 0 < len(differing) < len(shared):
            tried = schemes if level == 0 else [OWN]
            candidates += [Candidate.of(assignment, part, differing, scheme) for scheme in tried]
    return candidates


def levels(anatomy: Anatomy) -> list[tuple[int, str]]:
    """Return (level, part) of every part: norms first, then from the outputs down to the inputs."""
    norms = [name for name in NORM_PARTS if name in anatomy.names]
    others = [name for name in reversed(anatomy.names) if name not in NORM_PARTS]
    return [(index - len(norms), name) for index, name in enumerate([*norms, *others])]


NORM_STATISTICS = "norm-statistics"
NORM_PARTS = (NORM_STATISTICS, "norms")
"""Names of parts that stand for batch norm's statistics and for the gains and biases of norm layers."""


def groupings_of(sketches: np.ndarray, max_groups: int) -> list[Labels]:
    """Return groupings of the peers into 2, 3, … groups whose sketches have similar directions.

    They are found by hierarchical clustering (average linkage, cosine distance). A peer whose sketch is 0,
    as that of a peer that is offline, is a group of its own.
    """
    lengths = np.linalg.norm(sketches, axis=1)
    has_sketch = np.flatnonzero(lengths > 0)
    if len(has_sketch) < 3:
        return []
    from scipy.cluster.hierarchy import fcluster, linkage  # slow: only the peer that plans needs it

    directions = sketches[has_sketch] / lengths[has_sketch, None]
    tree = linkage(directions, "average", metric="cosine")
    groupings = []
    for groups in range(2, min(max_groups, len(has_sketch) - 1) + 1):
        clusters = fcluster(tree, groups, "maxclust")
        if clusters.max() > 1:
            labels = -1 - np.arange(len(sketches))  # different for every peer without a sketch
            labels[has_sketch] = clusters
            groupings.append(renumbered(labels.tolist()))
    return list(dict.fromkeys(groupings))
