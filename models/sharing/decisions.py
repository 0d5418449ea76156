"""Decide what a swarm shares: a `Planner` turns what all peers have measured into the next `Plan`.

A plan says which cells are shared and with whom, which changes of that are being compared, and whether
peers hold samples out to compare them. One peer makes and announces plans; all peers follow them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from math import ceil, nan
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from scipy import stats

from ..anatomy import Anatomy
from ..errors import ModelError
from .assignment import MAX_GROUPINGS, Assignment
from .candidates import Candidate, propose
from .records import Count, check_record
from .statistics import Statistics, StatisticsLayout, number_of

MAX_GROUPS = 5
"""The most groups that a planner tries."""
MAX_VALUES = 256
"""The most values of groups that a plan may compare, for each coordinate of the network."""


@dataclass(frozen=True)
class AutoOptions:
    """Constants of the procedure, chosen on seeds 0 to 3 of `gossamer study auto`, which reports others."""

    learned: float = 0.75
    """Losses are compared once the training loss has fallen to this share of its start: networks that have
    learned little differ by chance."""
    latest: int = 6
    """The round from which losses are compared even if the training loss has not fallen that far: where
    peers contradict each other, it may never fall."""
    every: int = 2
    """Rounds between two decisions. Losses are measured in all of them but the last, in which gossip takes
    them to all peers."""
    settle: int = 2
    """Rounds after a change, and at the beginning, before candidates are compared: how training moves
    values is measured in the first, and gossip takes that to all peers in the last."""
    held_out: float = 0.3
    """The share of a peer's training samples that is held out while the swarm decides."""
    max_held_out: int = 60
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
    later_gain: float = 0.05
    """The smallest gain of a change after the first: what a change leaves behind looks like a small gain
    elsewhere, and fades."""
    max_groups: int = MAX_GROUPS
    """The most groups that are tried."""
    quiet: int = 2
    """Comparisons in which nothing gains, after which held-out samples are trained on again."""
    hint: float = 0.5
    """A gain with this share of the errors that it needs is not enough for a change, but one to wait for."""
    patience: int = 6
    """Comparisons without a change, after which held-out samples are trained on again in any case."""
    look_again: float = 2.0
    """A quiet swarm decides again when its round number has grown by this factor."""
    alarm: float = 1.15
    """A quiet swarm decides again when the training loss exceeds the least of the last three plans by this
    factor."""


@dataclass(frozen=True)
class Compared:
    """A candidate that was compared, with what was measured.

    change: the candidate in words. ratio: V/σ² of its cells, the mean over cells.
    """

    round: int
    change: str
    part: str
    gain: float
    error: float
    ratio: float
    chosen: bool


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


@dataclass(frozen=True, eq=False)
class Plan:
    """What a swarm shares and measures now.

    version
        Counts plans.
    round, until
        The plan is followed from the end of one round to the end of the other, when the next one is made.
    candidates
        The changes whose held-out losses peers measure.
    deciding
        Whether peers hold samples out.
    chosen
        Which candidate of the plan before has become the assignment; None if it stayed as it was.
    memory
        What the planner has to remember, so that another peer can go on in its place.
    newcomers
        Peers that try which groups to join; see newcomers.py.
    """

    assignment: Assignment
    version: int = 0
    round: int = 0
    until: int = 1
    candidates: tuple[Candidate, ...] = ()
    deciding: bool = True
    chosen: int | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    newcomers: tuple[str, ...] = ()

    @cached_property
    def layout(self) -> StatisticsLayout:
        """Where each number of the peers' statistics is."""
        return StatisticsLayout(self.assignment, self.candidates, self.deciding)

    def as_record(self) -> dict[str, Any]:
        """Return the plan as plain data, which `from_record` reads."""
        return {
            "assignment": self.assignment.as_record(), "version": self.version, "round": self.round,
            "until": self.until,
            "candidates": [one.as_record() for one in self.candidates],
            "deciding": self.deciding, "chosen": self.chosen, "memory": self.memory,
            "newcomers": list(self.newcomers),
        }  # fmt: skip

    @classmethod
    def from_record(cls, anatomy: Anatomy, record: dict[str, Any]) -> Plan:
        """Return the plan that `as_record` described, for a network with this anatomy.

        Raises ModelError if it is not a plan for it, or one that would cost more than any that is made here.
        """
        check_record(record)
        assignment = Assignment.from_record(anatomy, record["assignment"])
        most = 2 * len(anatomy.parts) * (MAX_GROUPINGS + MAX_GROUPS)
        if len(record["candidates"]) > most:
            raise ModelError(f"a plan compares {len(record['candidates'])} changes; limit {most}")
        candidates = tuple(Candidate.from_record(assignment, one) for one in record["candidates"])
        values = sum(
            number_of(columns) * one.groups for one in candidates for _, columns in one.changes
        )
        if values > MAX_VALUES * anatomy.size:
            raise ModelError(f"a plan compares groups by {values} values, which is too many")
        return cls(
            assignment, record["version"], record["round"], record["until"], candidates,
            record["deciding"], record["chosen"], asdict(Memory.from_record(record["memory"])),
            tuple(record["newcomers"]),
        )  # fmt: skip


@dataclass
class Memory:
    """What a planner remembers from one plan to the next."""

    steps: Count = 0
    """Changes made so far."""
    comparisons: Count = 0
    """Comparisons since the last change, or since samples were last held out."""
    comparisons_without_hint: Count = 0
    """Those of them at which nothing gained."""
    first_loss: float = 0.0
    """The largest training loss at the beginning."""
    learned: bool = False
    """Whether the training loss has fallen enough for losses to be compared."""
    next_look: Count = 0
    """The round at which a swarm that holds nothing out decides again."""
    recent_losses: list[float] = field(default_factory=list)
    """Training losses at the ends of the last plans without held-out samples."""

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Memory:
        """Return the memory that a plan holds as plain data; ModelError if it is something else."""
        try:
            if unknown := record.keys() - {each.name for each in fields(cls)}:
                raise ValueError(f"it has no {min(unknown)}")
            return TypeAdapter(cls).validate_json(json.dumps(record), strict=True)
        except (TypeError, ValueError) as error:
            raise ModelError(f"the memory of a plan cannot be read: {error!s:.200}") from None


class Planner:
    """Makes plans from the means over peers of what they have measured.

        if round >= plan.until:
            plan = planner.next(plan, statistics)

    To go on where another planner stopped, pass the memory of its last plan: Memory(**plan.memory).

    dry_run: report decisions, but take none. frozen: parts that are not trained, and stay as they are.
    """

    def __init__(
        self,
        options: AutoOptions,
        memory: Memory | None = None,
        *,
        dry_run: bool = False,
        frozen: Collection[str] = (),
    ):
        self.options, self.memory, self.dry_run = options, memory or Memory(), dry_run
        self._frozen = frozen
        self.decisions: list[Decision] = []
        self.compared: list[Compared] = []
        """Every comparison that this planner has made."""

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to wait for."""
        memory, options = self.memory, self.options
        return (
            memory.comparisons_without_hint >= options.quiet
            or memory.comparisons >= options.patience
        )

    def wake(self) -> None:
        """Begin to decide again."""
        self.memory.comparisons = self.memory.comparisons_without_hint = 0

    def first(self, assignment: Assignment, *, deciding: bool = True) -> Plan:
        """Return the first plan of a swarm."""
        return Plan(assignment, until=self.options.settle, deciding=deciding)

    def next(self, plan: Plan, statistics: Statistics) -> Plan:
        """Return the plan that follows when a plan ends, at the end of the round `plan.until`.

        statistics: the means over peers, as this peer knows them.
        """
        loss = statistics.training_loss
        if not plan.deciding:
            return self._next(plan, deciding=self._looks_again(loss, plan.until))
        if not plan.candidates:
            if not self._has_learned(loss, plan.until):
                return self._next(plan)
            candidates = self._propose(plan, statistics)
            if candidates:
                return self._next(plan, candidates=candidates)
            return self._release(plan)  # nothing is left that could change
        rows = statistics.losses
        rows = rows[statistics.present & (rows[:, 0] > 0)]
        now, with_heads, changed = rows[:, 0], rows[:, 1], rows[:, 2:].T
        # Output layers that are never averaged are trained more: compare them with their own mean.
        control = min(now, with_heads, key=np.mean)
        changes = np.stack(
            [
                losses - (control if one.level == 0 else now)
                for one, losses in zip(plan.candidates, changed, strict=True)
            ]
        )
        decision = self.decide(plan.until, plan.candidates, now, changes, statistics.ratios)
        if decision is not None:
            self.decisions.append(decision)
        if self.quiet:
            return self._release(plan)
        if decision is None or self.dry_run:
            return self._next(plan, candidates=self._propose(plan, statistics))
        return self._next(
            plan,
            assignment=decision.candidate.assignment,
            chosen=plan.candidates.index(decision.candidate),
        )

    def _release(self, plan: Plan) -> Plan:
        """Let peers train on the held-out samples again, until it is time to look again."""
        self.memory.next_look = ceil(self.options.look_again * plan.until) + 1
        self.memory.recent_losses = []
        return self._next(plan, deciding=False)

    def _next(
        self,
        plan: Plan,
        *,
        assignment: Assignment | None = None,
        candidates: tuple[Candidate, ...] = (),
        deciding: bool = True,
        chosen: int | None = None,
    ) -> Plan:
        lasts = self.options.every if candidates or not deciding else self.options.settle
        return Plan(
            assignment or plan.assignment, plan.version + 1, plan.until, plan.until + lasts,
            candidates, deciding, chosen, asdict(self.memory),
        )  # fmt: skip

    def _propose(self, plan: Plan, statistics: Statistics) -> tuple[Candidate, ...]:
        found = propose(
            plan.assignment, statistics.sketches, statistics.ratios, self.options.max_groups,
            self._frozen,
        )  # fmt: skip
        return tuple(found)

    def _looks_again(self, loss: float, round_number: int) -> bool:
        """While samples are not held out: whether it is time to, or the training loss has risen."""
        recent = self.memory.recent_losses
        risen = bool(recent) and loss > self.options.alarm * min(recent)
        self.memory.recent_losses = [*recent[-2:], loss]
        if not risen and round_number < self.memory.next_look:
            return False
        self.wake()
        return True

    def _has_learned(self, loss: float, round_number: int) -> bool:
        """Whether the training loss has fallen enough for differences between peers to show."""
        self.memory.first_loss = max(self.memory.first_loss, loss)
        fallen = loss < self.options.learned * self.memory.first_loss
        self.memory.learned |= fallen or round_number >= self.options.latest
        return self.memory.learned

    def decide(
        self,
        round_number: int,
        candidates: Sequence[Candidate],
        losses: np.ndarray,
        changes: np.ndarray,
        ratios: np.ndarray | None = None,
    ) -> Decision | None:
        """Choose by held-out losses.

        losses: of every peer as it is now. changes: [candidates, peers], what each candidate adds to them.
        ratios: V/σ² of every cell, for the report.
        """
        options, memory = self.options, self.memory
        memory.comparisons += 1
        scale = float(losses.mean())
        if not candidates or not scale > 0:
            memory.comparisons_without_hint += 1
            return None
        relative = changes / scale
        gains = -relative.mean(axis=1)
        errors = _standard_errors(relative)
        needed = np.array(
            [options.norm_errors if one.level < 0 else options.errors for one in candidates]
        )
        needed *= _quantile_ratio(changes.shape[1])
        large = gains > (options.later_gain if memory.steps else options.min_gain)
        by_level: dict[int, list[int]] = {}
        for index in np.flatnonzero(large & (gains > needed * errors)).tolist():
            by_level.setdefault(candidates[index].level, []).append(index)
        best_of = {level: float(max(gains[each])) for level, each in by_level.items()}
        largest = max(best_of.values(), default=0.0)
        leading = [level for level in sorted(by_level) if best_of[level] >= options.lead * largest]
        chosen = (
            self._simplest(by_level[leading[0]], candidates, gains, relative) if leading else None
        )
        self.compared += [
            Compared(round_number, str(one), one.part, float(gain), float(error),
                     _mean_ratio(one, ratios), index == chosen)
            for index, (one, gain, error) in enumerate(zip(candidates, gains, errors, strict=True))
        ]  # fmt: skip
        if chosen is None:
            hints = large & (gains > options.hint * needed * errors)
            memory.comparisons_without_hint += not hints.any()
            return None
        memory.steps += 1
        self.wake()
        return Decision(
            round_number, candidates[chosen], float(gains[chosen]), float(errors[chosen])
        )

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


def _mean_ratio(candidate: Candidate, ratios: np.ndarray | None) -> float:
    if ratios is None:
        return nan
    anatomy = candidate.assignment.anatomy
    first = anatomy.first_cells[anatomy.find(candidate.part)]
    return float(ratios[first + np.asarray(candidate.cells, int)].mean())


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
