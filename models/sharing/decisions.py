"""Decide what a swarm shares: a `Planner` turns what all peers have measured into the next `Plan`.

A plan says which cells are shared and with whom, which changes of that (*candidates*) are being compared, and
whether peers hold samples out to compare them. One peer makes and announces plans; all peers follow them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import ceil, nan
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..anatomy import Anatomy
from ..errors import ModelError
from .assignment import MAX_GROUPINGS, OWN, Assignment
from .candidates import MAX_GROUPS, NORM_STATISTICS, Candidate, propose
from .statistics import Statistics, StatisticsLayout, count_coordinates

# --- the form of a plan that a peer publishes on its card: it comes from outside, so every field is checked

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""A number that every JSON reader reads exactly."""
Index = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=64)]


class _Record(BaseModel):
    """Plain data; a field of another type is an error, not converted."""

    model_config = ConfigDict(strict=True)


class AssignmentRecord(_Record):
    """An Assignment; fields with the same name have the same meaning.

    schemes: for each, the number of every peer's group. cells: by part and number of the scheme, the cells of
    the part that have the scheme.
    """

    given: Count = 0
    suffix: Annotated[str, Field(max_length=16, pattern="^[0-9a-f]*$")]
    peers: Annotated[list[Name], Field(min_length=1)]
    schemes: list[list[Index]]
    cells: dict[str, dict[str, list[Index]]]


class CandidateRecord(_Record):
    """A Candidate. scheme: the number of a scheme of the assignment, or a new one: every peer's group."""

    part: str
    cells: Annotated[list[Index], Field(min_length=1)]
    scheme: Index | list[Index]


class PlanRecord(_Record):
    """A Plan; the fields have the same meaning."""

    assignment: AssignmentRecord
    version: Count
    round: Count
    until: Count
    candidates: list[CandidateRecord]
    deciding: bool
    chosen: Count | None
    memory: dict[str, Any]
    newcomers: list[Name]
    spread: Annotated[int, Field(ge=0, le=1000)] = 0


def check_record(record: object) -> None:
    """Raise ModelError unless plain data is a plan with valid fields (it may still not fit a network)."""
    try:
        PlanRecord.model_validate_json(json.dumps(record))
    except (ValidationError, TypeError, ValueError, RecursionError) as error:
        text = repr(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            text = f"{first['loc']}: {first['msg']}"
        raise ModelError(f"it is not a valid plan: {text:.200}") from None


MAX_VALUES = 256
"""A limit on the work that a received plan may cause: how many values the groups of all its candidates may
average for trials, as a multiple of the network's number of parameters."""


MIN_PEERS = 4
"""The fewest peers that can decide: a standard error estimated from fewer is too unreliable."""
SPREAD = 4
"""The value of `Plan.spread` where one averaging does not take values to all peers (in async mode, and on a
sparse graph): values usually reach all peers within so many rounds, and then losses within as many. A plan
lasts until they have."""


@dataclass(frozen=True)
class AutoOptions:
    """Constants of the procedure by which a swarm decides what to share.

    They were chosen on seeds below 3000 of `gossamer study auto`, which reports the results of other seeds;
    the rule for small changes, on seeds 0 to 2.
    """

    learned_loss_share: float = 0.75
    """Held-out losses are compared once the training loss has fallen to this share of its first value.
    Networks that have learned little differ mostly by chance."""
    latest_start: int = 6
    """The round from which losses are compared even if the training loss has not fallen that far: where
    peers contradict each other, it may never fall."""
    plan_rounds: int = 2
    """For how many rounds a plan is followed. At the beginning and after a change there is a plan without
    candidates; under the next one they are compared. Held-out losses are measured in the first of its rounds;
    until the last, gossip takes them to all peers."""
    held_out: float = 0.3
    """The share of a peer's training samples that is held out in rounds in which losses are measured."""
    max_held_out: int = 60
    """The most samples that a peer holds out."""
    min_gain: float = 0.005
    """The smallest gain that counts, relative to the loss."""
    min_errors: float = 3.0
    """How many standard errors the gain of a change of outputs must exceed, in a swarm of 16 peers; with
    fewer peers it is more (`_few_peers_factor`). Half as many are enough for norm layers, which have few
    values, so that a wrong decision costs little, and for sharing cells again. 1.5 times as many are needed
    for the parts below the outputs, which have many values."""
    min_lead: float = 1 / 3
    """A part is chosen before the parts below it (those nearer to the inputs) only if its gain is at least
    this share of the largest gain. Otherwise peers differ in a lower part, which only shows in this one."""
    min_later_gain: float = 0.05
    """The smallest gain that counts after the first change. For some rounds after a change, other candidates
    seem to gain a little. For sharing cells again, `min_gain` still counts; for small changes
    (`Candidate.is_small`) it does if no other change gains enough."""
    max_without_hint: int = 2
    """After so many comparisons without a hint of a gain (`hint_share`), no more samples are held out."""
    hint_share: float = 0.5
    """A gain is a hint if it exceeds this share of the standard errors that a change needs."""
    patience: int = 6
    """After so many comparisons without a change, no more samples are held out in any case."""
    next_look_factor: float = 2.0
    """A swarm that has stopped holding samples out decides again when its round number has grown by this
    factor."""
    alarm_factor: float = 1.15
    """A swarm that has stopped holding samples out decides again at once when the training loss exceeds the
    smallest of the last three plans by this factor."""


@dataclass(frozen=True)
class Compared:
    """A candidate that was compared, with what was measured.

    change: the candidate in words. gain, error: as in Decision. ratio: the mean V/σ² of its cells, which is
    how much their values vary between peers, relative to the noise of samples (see `Statistics.ratios`).
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
    """A candidate that was chosen at the end of a round.

    gain, error: by how much it lowers the mean held-out loss, relative to that loss, and the standard error.
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
        The number of the plan; each is one more than that of the plan before.
    round, until
        The plan is followed from the end of `round` to the end of `until`, when the next plan is made.
    candidates
        The changes whose held-out losses peers measure.
    deciding
        Whether peers hold samples out to decide.
    chosen
        The index of the candidate of the plan before that has become the assignment; None if none has.
    memory
        What the planner remembers (`Memory`), so that another peer can go on in its place.
    newcomers
        Peers that are still trying which groups to join; see assignment.GroupValues.
    spread
        How many rounds gossip usually needs to take values to all peers; 0 if one averaging does.
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
    spread: int = 0

    @cached_property
    def layout(self) -> StatisticsLayout:
        """Where each number of the peers' statistics is."""
        return StatisticsLayout(self.assignment, self.candidates, self.deciding)

    def as_record(self) -> dict[str, Any]:
        """Return the plan as plain data, which `from_record` reads."""
        return {
            "assignment": self.assignment.as_record(), "version": self.version, "round": self.round,
            "until": self.until,
            "candidates": [candidate.as_record() for candidate in self.candidates],
            "deciding": self.deciding, "chosen": self.chosen, "memory": self.memory,
            "newcomers": list(self.newcomers), "spread": self.spread,
        }  # fmt: skip

    @classmethod
    def from_record(cls, anatomy: Anatomy, record: dict[str, Any]) -> Plan:
        """Return the plan that `as_record` described, for a network with this anatomy.

        Raises ModelError if it is not a plan for such a network, or if following it would take more work than
        any plan that a Planner makes.
        """
        check_record(record)
        assignment = Assignment.from_record(anatomy, record["assignment"])
        max_candidates = 2 * len(anatomy.parts) * (MAX_GROUPINGS + MAX_GROUPS)
        if len(record["candidates"]) > max_candidates:
            raise ModelError(
                f"a plan compares {len(record['candidates'])} changes; the limit is {max_candidates}"
            )
        candidates = tuple(
            Candidate.from_record(assignment, candidate) for candidate in record["candidates"]
        )
        values = sum(  # each group averages the changed coordinates for itself
            count_coordinates(coordinates) * candidate.groups
            for candidate in candidates
            for _, coordinates in candidate.changes
        )
        max_values = MAX_VALUES * anatomy.size
        if values > max_values:
            raise ModelError(
                f"a plan makes groups average {values} values; the limit is {max_values}"
            )
        return cls(
            assignment, record["version"], record["round"], record["until"], candidates,
            record["deciding"], record["chosen"], asdict(Memory.from_record(record["memory"])),
            tuple(record["newcomers"]), record.get("spread", 0),
        )  # fmt: skip


@dataclass
class Memory:
    """What a planner remembers from one plan to the next."""

    steps: Count = 0
    """Changes made so far."""
    comparisons: Count = 0
    """Comparisons since the last change, or since samples were last held out."""
    comparisons_without_hint: Count = 0
    """Those of them in which no candidate had a gain that was at least a hint (see AutoOptions)."""
    first_loss: float = 0.0
    """The largest training loss at the beginning."""
    learned: bool = False
    """Whether the training loss has fallen enough for held-out losses to be compared."""
    next_look: Count = 0
    """The round at which a swarm that has stopped holding samples out decides again."""
    recent_losses: list[float] = field(default_factory=list)
    """Training losses at the ends of the last plans without held-out samples."""
    moved: list[Count] = field(default_factory=list)
    """Cells that all peers shared until a decision changed that, numbered through the whole network. All
    peers may share them again."""

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Memory:
        """Return the memory that a plan holds as plain data; ModelError if it is something else."""
        try:
            return _MEMORY.validate_json(json.dumps(record), strict=True)
        except (TypeError, ValueError) as error:
            raise ModelError(f"the memory of a plan cannot be read: {error!s:.200}") from None


_MEMORY = TypeAdapter(Memory)  # made only once: that takes as long as reading a plan


class Planner:
    """Makes plans from the means over peers of what they have measured.

        if round >= plan.until:
            plan = planner.next(plan, statistics)

    To go on where another planner stopped, pass the memory of its last plan: Memory(**plan.memory).

    dry_run: whether decisions are only reported, and not carried out. frozen: parts that are not trained,
    about which nothing is decided.
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
    def should_stop(self) -> bool:
        """Whether peers should stop holding samples out.

        See `max_without_hint` and `patience` of AutoOptions.
        """
        memory, options = self.memory, self.options
        return (
            memory.comparisons_without_hint >= options.max_without_hint
            or memory.comparisons >= options.patience
        )

    def _restart_comparisons(self) -> None:
        """Count comparisons from 0 again, so that `should_stop` is False."""
        self.memory.comparisons = self.memory.comparisons_without_hint = 0

    def first(self, assignment: Assignment, *, deciding: bool = True, spread: int = 0) -> Plan:
        """Return the first plan of a swarm."""
        return Plan(assignment, until=self.length(spread), deciding=deciding, spread=spread)

    def length(self, spread: int) -> int:
        """Return how many rounds a plan lasts if it need not wait for measurements; spread: as in Plan."""
        return 2 * spread or self.options.plan_rounds

    def extended(self, plan: Plan, round_number: int) -> Plan:
        """Return the same plan for one more round."""
        return replace(plan, version=plan.version + 1, until=round_number + 1, chosen=None)

    def next_if_measured(
        self, plan: Plan, statistics: Statistics, round_number: int, online: int, is_slow: bool
    ) -> Plan | None:
        """Return the plan that follows after a round; None while measurements of peers are missing.

        The measurements of MIN_PEERS peers are needed; if values spread slowly (`Plan.spread`), those of all
        peers of the plan that are online, until the plan has lasted twice as long as usual.

        online: how many peers of the plan are online. is_slow: whether values turned out not to reach all
        peers in one averaging.
        """
        plan = replace(plan, until=round_number)
        if not plan.deciding:
            return self.next(plan, statistics)
        if not plan.spread and not plan.candidates:
            return (
                self._next(replace(plan, spread=SPREAD)) if is_slow else self.next(plan, statistics)
            )
        needed = MIN_PEERS
        if plan.spread and round_number < plan.round + 2 * self.length(plan.spread):
            needed = max(needed, online)
        arrived = statistics.measured if plan.candidates else int(statistics.present.sum())
        return self.next(plan, statistics) if arrived >= needed else None

    def next(self, plan: Plan, statistics: Statistics) -> Plan:
        """Return the plan that follows when a plan ends, at the end of the round `plan.until`.

        statistics: the means over peers, as this peer knows them.
        """
        loss = statistics.training_loss
        if not plan.deciding:
            return self._next(plan, deciding=self._should_decide_again(loss, plan.until))
        if not plan.candidates:
            if not self._has_learned(loss, plan.until):
                return self._next(plan)
            candidates = self._propose(plan, statistics)
            if candidates:
                return self._next(plan, candidates=candidates)
            return self._stop_holding_out(plan)  # nothing is left that could change
        losses = statistics.losses
        losses = losses[statistics.present & (losses[:, 0] > 0)]  # rows of peers that have measured
        current, with_output_copies, by_candidate = losses[:, 0], losses[:, 1], losses[:, 2:].T
        # Every peer also trains a copy of its output layer that the network does not use (see statistics.py).
        # Candidates for the outputs (level 0) try averages of these copies, which are trained more than the
        # shared layer. So they are compared with the mean of all copies, if that has the lower loss.
        baseline = min(current, with_output_copies, key=np.mean)
        changes = np.stack(
            [
                candidate_losses - (baseline if candidate.level == 0 else current)
                for candidate, candidate_losses in zip(plan.candidates, by_candidate, strict=True)
            ]
        )
        decision = self.decide(plan.until, plan.candidates, current, changes, statistics.ratios)
        if decision is not None:
            self.decisions.append(decision)
        if self.should_stop:
            return self._stop_holding_out(plan)
        if decision is None or self.dry_run:
            return self._next(plan, candidates=self._propose(plan, statistics))
        self._remember_moved(decision.candidate)
        return self._next(
            plan,
            assignment=decision.candidate.assignment,
            chosen=plan.candidates.index(decision.candidate),
        )

    def _remember_moved(self, candidate: Candidate) -> None:
        """Remember which cells all peers may share again (`Memory.moved`) after a candidate was chosen."""
        moved = set(self.memory.moved)
        if candidate.shares_again:
            moved.difference_update(candidate.cell_numbers)
        else:
            moved.update(candidate.cell_numbers)
        self.memory.moved = sorted(moved)

    def _stop_holding_out(self, plan: Plan) -> Plan:
        """Return a plan under which peers train on all samples, until the swarm decides again."""
        self.memory.next_look = ceil(self.options.next_look_factor * plan.until) + 1
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
        """Return the plan after `plan`, with the same assignment unless another one is given."""
        until = plan.until + self.length(plan.spread)
        return Plan(
            assignment or plan.assignment, plan.version + 1, plan.until, until,
            candidates, deciding, chosen, asdict(self.memory), spread=plan.spread,
        )  # fmt: skip

    def _propose(self, plan: Plan, statistics: Statistics) -> tuple[Candidate, ...]:
        """Return the candidates for changing a plan's assignment."""
        candidates = propose(
            plan.assignment, statistics.sketches, statistics.ratios, self._frozen, self.memory.moved
        )  # fmt: skip
        return tuple(candidates)

    def _should_decide_again(self, loss: float, round_number: int) -> bool:
        """Return whether a swarm that holds no samples out should decide again.

        It should if the round `next_look` has come, or if the training loss has risen.
        """
        recent = self.memory.recent_losses
        has_risen = bool(recent) and loss > self.options.alarm_factor * min(recent)
        self.memory.recent_losses = [*recent[-2:], loss]
        if not has_risen and round_number < self.memory.next_look:
            return False
        self._restart_comparisons()
        return True

    def _has_learned(self, loss: float, round_number: int) -> bool:
        """Return whether networks have learned enough to be compared.

        See `learned_loss_share` and `latest_start` of AutoOptions.
        """
        self.memory.first_loss = max(self.memory.first_loss, loss)
        has_fallen = loss < self.options.learned_loss_share * self.memory.first_loss
        self.memory.learned |= has_fallen or round_number >= self.options.latest_start
        return self.memory.learned

    def decide(
        self,
        round_number: int,
        candidates: Sequence[Candidate],
        losses: np.ndarray,
        changes: np.ndarray,
        ratios: np.ndarray | None = None,
    ) -> Decision | None:
        """Compare candidates by their held-out losses; return the one that is chosen, or None.

        losses: the current loss of every peer. changes: [candidates, peers], by how much each candidate would
        change it. ratios: V/σ² of every cell (see Compared), for the report.
        """
        options, memory = self.options, self.memory
        memory.comparisons += 1
        mean_loss = float(losses.mean())
        if not candidates or not mean_loss > 0:
            memory.comparisons_without_hint += 1
            return None
        relative = changes / mean_loss
        gains = -relative.mean(axis=1)
        errors = _standard_errors(relative)
        needed_errors = self._needed_errors(candidates) * _few_peers_factor(changes.shape[1])
        min_gains = [
            options.min_later_gain
            if memory.steps and not candidate.shares_again
            else options.min_gain
            for candidate in candidates
        ]
        is_large, is_certain = gains > min_gains, gains > needed_errors * errors
        certain = np.flatnonzero(is_large & is_certain).tolist()
        chosen = self._choose(certain, candidates, gains, relative)
        if chosen is None and memory.steps:  # small changes may gain less: see `min_later_gain`
            certain = np.flatnonzero(is_certain & (gains > options.min_gain)).tolist()
            small = [index for index in certain if candidates[index].is_small]
            chosen = max(small, key=lambda index: float(gains[index]), default=None)
        results = enumerate(zip(candidates, gains, errors, strict=True))
        self.compared += [
            Compared(round_number, str(candidate), candidate.part, float(gain), float(error),
                     _mean_ratio(candidate, ratios), index == chosen)
            for index, (candidate, gain, error) in results
        ]  # fmt: skip
        if chosen is None:
            is_hint = is_large & (gains > options.hint_share * needed_errors * errors)
            memory.comparisons_without_hint += not is_hint.any()
            return None
        memory.steps += 1
        self._restart_comparisons()
        return Decision(
            round_number, candidates[chosen], float(gains[chosen]), float(errors[chosen])
        )

    def _needed_errors(self, candidates: Sequence[Candidate]) -> np.ndarray:
        """Return how many standard errors each candidate's gain must exceed.

        See `min_errors` of AutoOptions. Levels are 0 for the outputs, more for parts below them, and less for
        norm layers.
        """
        factors = [
            0.5 if candidate.shares_again else 1 + np.sign(candidate.level) / 2
            for candidate in candidates
        ]
        return self.options.min_errors * np.array(factors)

    def _choose(
        self,
        certain: Sequence[int],
        candidates: Sequence[Candidate],
        gains: np.ndarray,
        relative: np.ndarray,
    ) -> int | None:
        """Return the index of the candidate to choose; None if no gain is certain.

        It is one of the lowest level (see Candidate) that gains enough compared with others: see `min_lead`
        of AutoOptions. Norm layers, whose levels are negative, need no such share of the largest gain.

        certain: the indices of candidates whose gain is certain. relative: [candidates, peers], the change of
        the loss, relative to the mean loss.
        """
        by_level: dict[int, list[int]] = {}
        for index in certain:
            by_level.setdefault(candidates[index].level, []).append(index)
        best_gains = {level: float(max(gains[indices])) for level, indices in by_level.items()}
        largest = max(best_gains.values(), default=0.0)
        for level in sorted(by_level):
            if level < 0 or best_gains[level] >= self.options.min_lead * largest:
                return self._most_shared(by_level[level], candidates, gains, relative)
        return None

    def _most_shared(
        self,
        indices: Sequence[int],
        candidates: Sequence[Candidate],
        gains: np.ndarray,
        relative: np.ndarray,
    ) -> int:
        """Return the candidate that shares most, of those that are within one standard error of the best.

        An exception are norm statistics: that each peer keeps its own is preferred to groups, even if the
        gain of that is not certain by itself. Statistics are means over samples, not trained, so one peer's
        samples are enough for them. But groups are chosen if their gain would be certain even by the stricter
        rule for outputs: then the groups really exist, and may average other parts later.

        indices: of the candidates to choose from, which are of one level.
        """
        best = max(indices, key=lambda index: gains[index])
        needed_errors = self.options.min_errors * _few_peers_factor(relative.shape[1])
        is_certain = gains[best] > needed_errors * _standard_errors(relative)[best]
        own_statistics = [
            index
            for index, candidate in enumerate(candidates)
            if candidate.part == candidates[best].part == NORM_STATISTICS
            and candidate.scheme == OWN
            and not is_certain
        ]
        compared = [*indices, *own_statistics]
        difference = relative[compared] - relative[best]
        is_close = difference.mean(axis=1) <= _standard_errors(difference)
        close = [index for index, keep in zip(compared, is_close, strict=True) if keep]
        if preferred := [index for index in close if index in own_statistics]:
            return preferred[0]
        return min(close, key=lambda index: candidates[index].assignment.distinct_values)


def _mean_ratio(candidate: Candidate, ratios: np.ndarray | None) -> float:
    """Return the mean V/σ² of a candidate's cells; NaN if it was not measured."""
    if ratios is None:
        return nan
    anatomy = candidate.assignment.anatomy
    first = anatomy.first_cells[anatomy.find(candidate.part)]
    return float(ratios[first + np.asarray(candidate.cells, int)].mean())


def _standard_errors(values: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean of each row."""
    return values.std(axis=1, ddof=1) / np.sqrt(values.shape[1])


def _few_peers_factor(peers: int) -> float:
    """Return the factor by which more standard errors are needed than with 16 peers, for equal certainty.

    A standard error that is estimated from few peers is unreliable: a mean divided by it has Student's t
    distribution.
    """
    from scipy.special import stdtr, stdtrit  # slow to import: only the peer that plans needs it

    probability = stdtr(15, -3.0)  # of a gain above 3 standard errors by chance, with 16 peers
    return float(-stdtrit(peers - 1, probability) / 3.0)
