"""What a swarm has decided about its sharing, as plain data for files and as sentences for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..learner import SgdLearner
from .assignment import GLOBAL, Assignment
from .candidates import NORM_PARTS
from .decisions import Compared, Decision
from .member import frozen_parts
from .statistics import outputs_of

Record = dict[str, Any]
"""Plain data, as it is written to JSON files."""
_STATISTICS, _PARAMETERS = NORM_PARTS
NORMS_IN_WORDS = {
    _STATISTICS: "statistics of norm layers",
    _PARAMETERS: "gains and biases of norm layers",
}
"""What sentences call the two parts that stand for norm layers."""


class SharingReport:
    """All decisions and comparisons of a run, and the assignments that followed from them.

    dry_run: whether decisions were reported only. reason: why nothing was decided; empty if it was.
    """

    def __init__(self, assignment: Assignment, *, dry_run: bool = False, reason: str = ""):
        self.dry_run, self.reason = dry_run, reason
        self._history = [(0, assignment)]

    def add(self, round_number: int, assignment: Assignment) -> None:
        """Record the assignment after a round, if it has changed."""
        if assignment.digest != self._history[-1][1].digest:
            self._history.append((round_number, assignment))

    def as_record(self, decisions: Sequence[Decision], compared: Sequence[Compared]) -> Record:
        """Return the whole report as plain data, as it is written to files."""
        anatomy = self._history[-1][1].anatomy
        return {
            "dry_run": self.dry_run,
            "reason": self.reason,
            "network": {
                "parts": [asdict(part) for part in anatomy.parts],
                "connections": [list(pair) for pair in anatomy.connections()],
                "outputs": outputs_of(anatomy),
            },
            "decisions": [self.decision(decision) for decision in decisions],
            "compared": [asdict(comparison) for comparison in compared],
            "assignment": self._history[-1][1].as_record(),
            "history": [
                {"round": round_number, "assignment": assignment.as_record()}
                for round_number, assignment in self._history
            ],
        }

    @staticmethod
    def merged(records: Sequence[Record]) -> Record:
        """Return the record of a swarm from the records of its peers, of which several may have decided."""
        longest = max(records, key=lambda record: len(record["history"]))
        all_entries = {
            key: [entry for record in records for entry in record[key]]
            for key in ("decisions", "compared")
        }
        return longest | {
            key: sorted(entries, key=lambda entry: entry["round"])
            for key, entries in all_entries.items()
        }

    def decision(self, decision: Decision) -> Record:
        """Return one decision as plain data, with the sentence that describes it.

        `groups` in it has the names of the peers of every group that averages the cells; it is None if the
        cells became each peer's own, or are shared by all again.
        """
        candidate, names = decision.candidate, decision.candidate.assignment.peers
        groups: list[list[str]] | None = None
        if not isinstance(candidate.scheme, int):
            groups = [[] for _ in range(candidate.groups)]
            for name, group in zip(names, candidate.scheme, strict=True):
                groups[group].append(name)
        anatomy = candidate.assignment.anatomy
        record: Record = {
            "round": decision.round,
            "part": candidate.part,
            "cells": list(candidate.cells),
            "groups": groups,
            "shared_again": candidate.shares_again,
            "gain": decision.gain,
            "error": decision.error,
        }
        part = cells_in_words(
            candidate.part, candidate.cells, anatomy.parts[anatomy.find(candidate.part)].cells,
            is_output=candidate.part == outputs_of(anatomy),
        )  # fmt: skip
        return record | {"sentence": sentence(record, part, dry_run=self.dry_run)}


def sentence(decision: Mapping[str, Any], cells: str, *, dry_run: bool) -> str:
    """Return a sentence that describes a decision; cells: the cells in words."""
    groups = decision["groups"]
    loss = f"{percent(decision['gain'])} ± {percent(decision['error'])}"
    round_text = f"after round {decision['round']}"
    verb = "would become" if dry_run else "became"
    if decision["shared_again"]:
        change = f"{cells} {verb} shared by all peers again {round_text}"
    elif groups is None:
        change = f"{cells} {verb} the peers' own {round_text}"
    else:
        sizes = _join_with_and([str(len(group)) for group in groups])
        change = f"{cells} {verb} those of {len(groups)} groups of {sizes} peers {round_text}"
    return f"{change}: held-out loss {'would fall' if dry_run else 'fell'} by {loss}"


def cells_in_words(part: str, cells: Sequence[int], part_size: int, *, is_output: bool) -> str:
    """Return what people call some cells of a part: "outputs 8 and 9", "all cells of part 2".

    part_size: how many cells the part has. is_output: whether the part is the network's outputs.
    """
    if part in NORMS_IN_WORDS:
        return NORMS_IN_WORDS[part]
    kind = "outputs" if is_output else "inputs" if part == "input" else "cells"
    of_part = f" of part {part}" if kind == "cells" else ""
    if len(cells) == part_size:
        return f"all {kind}{of_part}"
    if len(cells) > 6:
        return f"{len(cells)} of {part_size} {kind}{of_part}"
    numbers = _join_with_and([str(cell) for cell in cells])
    return f"{kind.removesuffix('s') if len(cells) == 1 else kind} {numbers}{of_part}"


def untrained_text(learner: SgdLearner) -> str:
    """Return a text that says which parts stay shared because they are not trained; empty if all are."""
    parts = frozen_parts(learner, learner.network.slicing.anatomy)
    if not parts:
        return ""
    is_one = len(parts) == 1
    names = _join_with_and(sorted(parts))
    subject = f"part {names} stays" if is_one else f"parts {names} stay"
    return f"{subject} shared, because {'it is' if is_one else 'they are'} not trained"


def by_hand_text(assignment: Assignment) -> str:
    """Return a text that says how much stays as it was given by hand; empty if nothing does."""
    kept, cells = int((assignment.scheme_of != GLOBAL).sum()), len(assignment.scheme_of)
    if not kept:
        return ""
    return (
        f"{kept} of {cells} cells stay with the partial models given by hand; peers decide about those that "
        "all of them share"
    )


def percent(share: float) -> str:
    """Return a share as text: 4.2 %, 24 %."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def _join_with_and(texts: Sequence[str]) -> str:
    """Return texts as one: `a, b and c`."""
    *others, last = texts
    return f"{', '.join(others)} and {last}" if others else last
