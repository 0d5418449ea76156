"""Decide which cells peers share, and with whom, while a swarm trains.

An `Assignment` says for every cell whether all peers average it, each peer keeps its own, or groups of peers
average it among themselves. `propose` lists assignments that differ from the present one in one part of the
network, and a `Decider` chooses among them by the losses that peers measure on held-out samples.

Nothing here trains a network or sends a message: the caller measures and passes numbers in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy import stats
from scipy.cluster.hierarchy import fcluster, linkage

from .anatomy import Anatomy
from .errors import ModelError
from .slicing import ModelGraph

GLOBAL = 0
"""The scheme of cells that all peers average."""
OWN = 1
"""The scheme of cells that every peer keeps for itself."""
MAX_GROUPINGS = 30
"""The most groupings in one assignment: coordinates keep their schemes as bits of one integer."""

Labels = tuple[int, ...]
"""The group of every peer, in the order of the swarm's peers."""


@dataclass(frozen=True)
class AutoOptions:
    """Constants of the procedure. The defaults are still being chosen, on seeds below those of the study."""

    first: int = 5
    """The round of the first decision. Raise it if networks learn little in the first rounds."""
    learned: float = 0.75
    """Losses are compared once the training loss has fallen to this share of its start: networks that have
    learned little differ by chance."""
    latest: int = 8
    """The round from which losses are compared even if the training loss has not fallen that far: where
    peers contradict each other, it may never fall."""
    every: int = 3
    """Rounds between two decisions, over which losses are averaged."""
    held_out: float = 0.3
    """The share of a peer's training samples that is held out while the swarm decides."""
    max_held_out: int = 120
    """The most samples that a peer holds out."""
    min_gain: float = 0.005
    """The smallest gain that counts, relative to the loss."""
    errors: float = 3.0
    """How many standard errors a gain must be above 0, in a swarm of 16 peers; with fewer peers more."""
    norm_errors: float = 1.5
    """The same for norm layers, which have few values: a wrong decision costs little."""
    lead: float = 1 / 3
    """A part is chosen before the parts below it only with this share of the largest gain: otherwise the
    difference lies in a lower part, and only shows in this one."""
    persistence: float = 0.7
    """After a first step, a gain must be found at two successive decisions, the second time with at least
    this share of the first: a gain that only followed from the step before fades."""
    sure_gain: float = 0.05
    """A gain of this size, relative to the loss, with `sure_errors`, needs no second decision."""
    sure_errors: float = 8.0
    """See `sure_gain`."""
    max_groups: int = 5
    """The most groups that are tried."""
    quiet: int = 2
    """Decisions without a change after which held-out samples are trained on again."""
    look_again: float = 2.0
    """A quiet swarm decides again when its round number has grown by this factor."""
    alarm: float = 1.15
    """A quiet swarm decides again when the training loss exceeds the least of the last five rounds by this
    factor."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """For every cell of a network, the peers that average it together.

        assignment = Assignment.shared(anatomy, ["anna", "ben", "carl"])
        assignment = assignment.change(anatomy.names[-1], [8, 9], OWN)
        network.reslice(*assignment.slices("anna"), anatomy=anatomy)

    peers
        The names of all peers of the swarm.
    schemes
        The groups of the peers under each scheme: all in one group (GLOBAL), each alone (OWN), or a grouping
        that was found.
    scheme_of
        The scheme of every cell.
    """

    anatomy: Anatomy
    peers: tuple[str, ...]
    schemes: tuple[Labels, ...]
    scheme_of: np.ndarray

    @classmethod
    def shared(cls, anatomy: Anatomy, peers: Sequence[str]) -> Assignment:
        """Return the assignment under which all peers average every cell."""
        count = len(peers)
        schemes = ((0,) * count, tuple(range(count)))
        cells = np.full(anatomy.first_cells[-1], GLOBAL)
        return cls(anatomy, tuple(peers), schemes, cells)

    def change(
        self, part: str, cells: Sequence[int] | np.ndarray, scheme: int | Labels
    ) -> Assignment:
        """Return an assignment that gives cells of a part to a scheme, or to a new grouping of the peers."""
        schemes = self.schemes
        if not isinstance(scheme, int):
            labels = _renumbered(scheme)
            if len(labels) != len(self.peers):
                raise ModelError(f"{len(labels)} groups were given for {len(self.peers)} peers")
            if labels not in schemes:
                schemes = (*schemes, labels)
                if len(schemes) > MAX_GROUPINGS:
                    raise ModelError(f"an assignment has at most {MAX_GROUPINGS} groupings")
            scheme = schemes.index(labels)
        scheme_of = self.scheme_of.copy()
        scheme_of[self.anatomy.first_cells[self.anatomy.find(part)] + np.asarray(cells, int)] = (
            scheme
        )
        return replace(self, schemes=schemes, scheme_of=scheme_of)

    def cells(self, part: str, scheme: int) -> np.ndarray:
        """Return the indices of the cells of a part that have a scheme."""
        index = self.anatomy.find(part)
        first, end = self.anatomy.first_cells[index : index + 2]
        return np.flatnonzero(self.scheme_of[first:end] == scheme)

    def slices(self, peer: str) -> tuple[dict[str, dict[str, list[int]]], ModelGraph]:
        """Return a peer's slices and the dependencies of its partial models.

        A grouping's models are called `group2-0`, `group2-1`, … after its scheme and the group. Groups depend
        on `global`, the peer's own model on all others. Weights between cells of two groupings are averaged
        by the peers that are together in both, so slice with `cross=True`.
        """
        index = self.peers.index(peer)
        slices: dict[str, dict[str, list[int]]] = {}
        for scheme in np.unique(self.scheme_of).tolist():
            cells = {part: self.cells(part, scheme).tolist() for part in self.anatomy.names}
            slices[self._model(scheme, index)] = {
                name: each for name, each in cells.items() if each
            }
        depends = {"global": []}
        own = self._model(OWN, index)
        groups = [model for model in slices if model not in ("global", own)]
        depends |= {model: ["global"] for model in groups}
        if "global" not in slices:
            depends = {model: [] for model in groups}
        if own in slices:
            depends[own] = [model for model in depends if model != own]
        return slices, ModelGraph(depends)

    def _model(self, scheme: int, peer: int) -> str:
        if scheme == GLOBAL:
            return "global"
        if scheme == OWN:
            return f"local-{self.peers[peer]}"
        return f"group{scheme}-{self.schemes[scheme][peer]}"

    @cached_property
    def codes(self) -> np.ndarray:
        """For every coordinate of the flat vector, the schemes of its cells, as bits."""
        bits = 1 << self.scheme_of.astype(np.int64)
        codes = np.zeros(self.anatomy.size, np.int64)
        for one in self.anatomy.parameters:
            code = np.zeros(one.shape, np.int64)
            for number, axis in enumerate(one.axes):
                if axis is not None:
                    shape = [1] * len(one.shape)
                    shape[number] = len(axis)
                    code |= bits[axis].reshape(shape)
            for cell in (one.cell, one.extra_cell):
                if cell is not None:
                    code |= bits[cell]
            codes[self.anatomy.spans[one.name]] = code.ravel()
        return codes

    def together(self, code: int) -> Labels:
        """Return the groups of peers that average coordinates with a code: together in all its schemes."""
        chosen = [labels for scheme, labels in enumerate(self.schemes) if code >> scheme & 1]
        return _renumbered(zip(*chosen, strict=True))

    def average(self, rows: np.ndarray, coordinates: np.ndarray) -> np.ndarray:
        """Return some coordinates of all peers' values, [peers, coordinates], averaged as assigned."""
        averaged = rows[:, coordinates]
        codes = self.codes[coordinates]
        for code in np.unique(codes).tolist():
            labels = np.asarray(self.together(code))
            same = (labels[:, None] == labels).astype(rows.dtype)
            columns = codes == code
            averaged[:, columns] = same / same.sum(axis=1, keepdims=True) @ averaged[:, columns]
        return averaged

    def differs(self, other: Assignment) -> np.ndarray:
        """Return the coordinates that the two assignments average among different peers."""
        pairs, numbers = np.unique(self.codes << MAX_GROUPINGS | other.codes, return_inverse=True)
        different = [
            self.together(pair >> MAX_GROUPINGS) != other.together(pair & (1 << MAX_GROUPINGS) - 1)
            for pair in pairs.tolist()
        ]
        return np.flatnonzero(np.array(different)[numbers])

    @cached_property
    def distinct_values(self) -> int:
        """How many different values the swarm holds: fewer mean more sharing."""
        codes, counts = np.unique(self.codes, return_counts=True)
        pairs = zip(codes.tolist(), counts.tolist(), strict=True)
        return sum(count * (max(self.together(code)) + 1) for code, count in pairs)


def _renumbered(labels: Iterable[object]) -> Labels:
    """Return labels as numbers in the order of their first appearance."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(label, len(numbers)) for label in labels)


# --- candidates ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Candidate:
    """An assignment that differs from the present one in one part.

    level
        The order in which parts are preferred: norms are below 0, the outputs 0, parts below them 1, 2, …
    cells
        Which cells of the part change, in words: "all cells", "cells 8, 9".
    groups
        The number of groups that average them; 0 if each peer keeps its own.
    coordinates
        The coordinates that it averages among other peers than the present assignment does.
    """

    part: str
    level: int
    cells: str
    groups: int
    assignment: Assignment
    coordinates: np.ndarray

    def __str__(self) -> str:
        change = f"averaged in {self.groups} groups" if self.groups else "each peer's own"
        return f"{self.cells} of {self._part_in_words()}: {change}"

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
    options: AutoOptions,
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
    """
    anatomy = assignment.anatomy
    candidates: list[Candidate] = []
    for level, part in levels(anatomy):
        shared = assignment.cells(part, GLOBAL)
        if not len(shared):
            continue
        first = anatomy.first_cells[anatomy.find(part)]
        differing = shared[ratios[first + shared] > 1]
        groupings = [
            *assignment.schemes[OWN + 1 :],
            *groupings_of(sketches[part], options.max_groups),
        ]
        chosen = [("all cells", shared)]
        if 0 < len(differing) < len(shared):
            chosen.append((_listed(differing), differing))
        for what, cells in chosen:
            schemes: list[int | Labels] = [OWN, *dict.fromkeys(groupings)]
            for scheme in schemes:
                changed = assignment.change(part, cells, scheme)
                groups = 0 if isinstance(scheme, int) else max(scheme) + 1
                candidates.append(
                    Candidate(part, level, what, groups, changed, assignment.differs(changed))
                )
    return candidates


def levels(anatomy: Anatomy) -> list[tuple[int, str]]:
    """Return the parts with their levels: norms first, then from the outputs down to the inputs."""
    norms = [name for name in NORM_PARTS if name in anatomy.names]
    others = [name for name in reversed(anatomy.names) if name not in NORM_PARTS]
    return [(index - len(norms), name) for index, name in enumerate([*norms, *others])]


NORM_PARTS = ("norm-statistics", "norms")
"""Names of parts that stand for batch norm's statistics and for the gains and biases of norm layers."""


def groupings_of(sketches: np.ndarray, most: int) -> list[Labels]:
    """Group peers by the directions of their sketches, into 2, 3, … groups (average linkage, cosine)."""
    lengths = np.linalg.norm(sketches, axis=1)
    if len(sketches) < 3 or not lengths.min() > 0:
        return []
    tree = linkage(sketches / lengths[:, None], "average", metric="cosine")
    found = [
        _renumbered(fcluster(tree, groups, "maxclust").tolist())
        for groups in range(2, min(most, len(sketches) - 1) + 1)
    ]
    return list(dict.fromkeys(labels for labels in found if max(labels)))


def _listed(cells: np.ndarray) -> str:
    if len(cells) > 5:
        return f"{len(cells)} cells"
    return f"cell{'s' * (len(cells) > 1)} {', '.join(map(str, cells))}"


# --- decisions ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Decision:
    """A step that was taken.

    gain, error: the fall of the mean held-out loss relative to the loss, and its standard error.
    """

    round: int
    candidate: Candidate
    gain: float
    error: float

    def __str__(self) -> str:
        return (
            f"round {self.round}: {self.candidate} (held-out loss fell by {self.gain:.1%} "
            f"± {self.error:.1%})"
        )


@dataclass
class Decider:
    """Chooses a candidate at each date, or none.

    After `options.quiet` dates without a choice, `quiet` is True.
    """

    options: AutoOptions
    steps: int = 0
    """Steps taken so far."""
    dates_without_step: int = 0
    _earlier: dict[int, float] = field(default_factory=dict)
    """The gain that each level had at the date before."""

    @property
    def quiet(self) -> bool:
        """Whether the last dates brought no change."""
        return self.dates_without_step >= self.options.quiet

    def wake(self) -> None:
        """Begin to decide again."""
        self.dates_without_step, self._earlier = 0, {}

    def decide(
        self,
        round_number: int,
        candidates: Sequence[Candidate],
        losses: np.ndarray,
        changes: np.ndarray,
    ) -> Decision | None:
        """Choose by held-out losses.

        losses: of every peer as it is now. changes: [candidates, peers], what each candidate adds to them.
        """
        options = self.options
        scale = float(losses.mean())
        if not candidates or not scale > 0:
            self.dates_without_step += 1
            return None
        relative = changes / scale
        gains = -relative.mean(axis=1)
        errors = _standard_errors(relative)
        needed = np.array(
            [options.norm_errors if one.level < 0 else options.errors for one in candidates]
        )
        needed *= _quantile_ratio(changes.shape[1])
        passed = np.flatnonzero((gains > options.min_gain) & (gains > needed * errors))
        by_level: dict[int, list[int]] = {}
        for index in passed.tolist():
            by_level.setdefault(candidates[index].level, []).append(index)
        best_of = {level: max(gains[each]) for level, each in by_level.items()}
        waiting = False
        if self.steps:
            lasting = {
                level
                for level, each in by_level.items()
                if best_of[level] >= options.persistence * self._earlier.get(level, np.inf)
                or any(
                    gains[i] > options.sure_gain and gains[i] > options.sure_errors * errors[i]
                    for i in each
                )
            }
            waiting = bool(by_level) and not lasting
            by_level = {level: each for level, each in by_level.items() if level in lasting}
        self._earlier = best_of
        largest = max((best_of[level] for level in by_level), default=0.0)
        for level in sorted(by_level):
            if best_of[level] >= options.lead * largest:
                chosen = self._simplest(by_level[level], candidates, gains, relative)
                self.steps += 1
                self.wake()
                return Decision(
                    round_number, candidates[chosen], float(gains[chosen]), float(errors[chosen])
                )
        if not waiting:
            self.dates_without_step += 1
        return None

    @staticmethod
    def _simplest(
        indices: Sequence[int],
        candidates: Sequence[Candidate],
        gains: np.ndarray,
        relative: np.ndarray,
    ) -> int:
        """Of candidates no worse than the best by one standard error, return the one that shares most."""
        best = max(indices, key=lambda index: gains[index])
        behind = relative[indices] - relative[best]
        near = behind.mean(axis=1) <= _standard_errors(behind)
        close = [index for index, is_near in zip(indices, near, strict=True) if is_near]
        return min(close, key=lambda index: candidates[index].assignment.distinct_values)


def _standard_errors(values: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean of each row."""
    return values.std(axis=1, ddof=1) / np.sqrt(values.shape[1])


def _quantile_ratio(peers: int) -> float:
    """Return how much larger than with 16 peers a ratio to its standard error must be to mean as much.

    A standard error that is itself estimated from few peers is unreliable: the ratio has Student's t
    distribution.
    """
    chance = stats.t.sf(3.0, df=15)
    return float(stats.t.isf(chance, df=peers - 1) / 3.0)
