"""Assignments that a swarm may change to: one part of the network, made own or given to groups of peers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage

from ..anatomy import Anatomy
from ..errors import ModelError
from ..slicing import Places
from .assignment import GLOBAL, OWN, Assignment, Labels, renumbered


@dataclass(frozen=True, eq=False)
class Candidate:
    """An assignment that differs from the present one in one part.

    level
        The order in which parts are preferred: norms are below 0, the outputs 0, parts below them 1, 2, …
    cells
        Which cells of the part change.
    scheme
        OWN, or the groups that average them.
    assignment
        The assignment with this change.
    changes
        The coordinates that it averages among other peers than the present assignment does, in blocks,
        with the groups of those peers.
    """

    part: str
    level: int
    cells: tuple[int, ...]
    scheme: int | Labels
    assignment: Assignment
    changes: tuple[tuple[Labels, Places], ...]

    @classmethod
    def of(
        cls, present: Assignment, part: str, cells: Sequence[int] | np.ndarray, scheme: int | Labels
    ) -> Candidate:
        """Return the candidate that gives cells of a part to a scheme."""
        anatomy = present.anatomy
        chosen, first = np.asarray(cells, int), anatomy.first_cells[anatomy.find(part)]
        level = next(level for level, name in levels(anatomy) if name == part)
        changed, changes = present.change(part, chosen, scheme), []
        for code, others, columns in present.blocks_of(first + chosen):
            labels = changed.together(others | 1 << int(changed.scheme_of[first + chosen[0]]))
            if labels != present.together(code):
                changes.append((labels, columns))
        return cls(part, level, tuple(chosen.tolist()), scheme, changed, tuple(changes))

    @property
    def groups(self) -> int:
        """The number of groups that average the cells; 0 if each peer keeps its own."""
        return 0 if isinstance(self.scheme, int) else max(self.scheme) + 1

    def __str__(self) -> str:
        change = f"averaged in {self.groups} groups" if self.groups else "each peer's own"
        return f"{self._cells_in_words()} of {self._part_in_words()}: {change}"

    def as_record(self) -> dict[str, Any]:
        """Return the change as plain data, which `from_record` reads."""
        scheme = self.scheme if isinstance(self.scheme, int) else list(self.scheme)
        return {"part": self.part, "cells": list(self.cells), "scheme": scheme}

    @classmethod
    def from_record(cls, present: Assignment, record: dict[str, Any]) -> Candidate:
        """Return the candidate that `as_record` described; ModelError if it is none of this assignment."""
        scheme, name, cells = record["scheme"], record["part"], record["cells"]
        part = present.anatomy.parts[present.anatomy.find(name)]
        if not all(0 <= cell < part.cells for cell in cells):
            raise ModelError(f"a candidate changes cells that part {name!r} does not have")
        if not isinstance(scheme, int):
            scheme = renumbered(scheme)
        elif not 0 <= scheme < len(present.schemes):
            raise ModelError(f"a candidate names scheme {scheme}, which the assignment lacks")
        return cls.of(present, name, cells, scheme)

    def _cells_in_words(self) -> str:
        part = self.assignment.anatomy.parts[self.assignment.anatomy.find(self.part)]
        if len(self.cells) == part.cells:
            return "all cells"
        if len(self.cells) > 5:
            return f"{len(self.cells)} of {part.cells} cells"
        return f"cell{'s' * (len(self.cells) > 1)} {', '.join(map(str, self.cells))}"

    def _part_in_words(self) -> str:
        if self.level < 0:
            return self.part.replace("-", " ")
        if self.level == 0:
            return f"the outputs ({self.part})"
        return "the inputs" if self.part == "input" else f"part {self.part}"


def propose(
    assignment: Assignment,
    sketches: Mapping[str, np.ndarray],
    ratios: np.ndarray,
    max_groups: int,
    frozen: Collection[str] = (),
) -> list[Candidate]:
    """Return the candidates for the next step.

    Of every part, all cells that all peers still share, and those whose V/σ² is above 1, become own, or
    are given to known groupings or to groups of peers whose values move alike.

    sketches
        For each part, one row of numbers per peer: how far, and in which direction, training moves the
        part's values away from the average.
    ratios
        For every cell, V/σ²: how much values really differ between peers, relative to the noise of their
        samples.
    frozen
        Parts that are not trained. They could only seem to gain, by the weights that lead out of them.
    """
    anatomy = assignment.anatomy
    candidates: list[Candidate] = []
    for _, part in levels(anatomy):
        shared = assignment.cells(part, GLOBAL)
        if not len(shared) or part in frozen:
            continue
        first = anatomy.first_cells[anatomy.find(part)]
        differing = shared[ratios[first + shared] > 1]
        groupings = [
            *assignment.schemes[OWN + 1 :],
            *groupings_of(sketches[part], max_groups),
        ]
        chosen = [shared]
        if 0 < len(differing) < len(shared):
            chosen.append(differing)
        for cells in chosen:
            schemes: list[int | Labels] = [OWN, *dict.fromkeys(groupings)]
            candidates += [Candidate.of(assignment, part, cells, scheme) for scheme in schemes]
    return candidates


def levels(anatomy: Anatomy) -> list[tuple[int, str]]:
    """Return the parts with their levels: norms first, then from the outputs down to the inputs."""
    norms = [name for name in NORM_PARTS if name in anatomy.names]
    others = [name for name in reversed(anatomy.names) if name not in NORM_PARTS]
    return [(index - len(norms), name) for index, name in enumerate([*norms, *others])]


NORM_PARTS = ("norm-statistics", "norms")
"""Names of parts that stand for batch norm's statistics and for the gains and biases of norm layers."""


def groupings_of(sketches: np.ndarray, most: int) -> list[Labels]:
    """Group peers by the directions of their sketches, into 2, 3, … groups (average linkage, cosine).

    Peers whose sketches are 0, as those of peers that are offline, are alone.
    """
    lengths = np.linalg.norm(sketches, axis=1)
    known = np.flatnonzero(lengths > 0)
    if len(known) < 3:
        return []
    tree = linkage(sketches[known] / lengths[known, None], "average", metric="cosine")
    found = []
    for groups in range(2, min(most, len(known) - 1) + 1):
        clusters = fcluster(tree, groups, "maxclust")
        if clusters.max() > 1:
            labels = -1 - np.arange(len(sketches))  # peers of which nothing is known are alone
            labels[known] = clusters
            found.append(renumbered(labels.tolist()))
    return list(dict.fromkeys(found))
