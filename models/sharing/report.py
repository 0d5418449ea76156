"""What a swarm has decided about its sharing, as plain data for files and as sentences for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .assignment import Assignment
from .candidates import NORM_PARTS
from .decisions import Compared, Decision
from .statistics import outputs_of

Record = dict[str, Any]
_STATISTICS, _PARAMETERS = NORM_PARTS
NORMS_IN_WORDS = {
    _STATISTICS: "statistics of norm layers",
    _PARAMETERS: "gains and biases of norm layers",
}


class SharingReport:
    """All decisions and comparisons of a run, and the assignments that followed from them.

    dry_run: whether decisions were reported only. reason: why nothing was decided; empty if it was.
    """

    def __init__(self, assignment: Assignment, *, dry_run: bool = False, reason: str = ""):
        self.dry_run, self.reason = dry_run, reason
        self._history = [(0, assignment)]

    def add(self, round_number: int, assignment: Assignment) -> None:
        """Note the assignment after a round, if it is another one than before."""
        if assignment.digest != self._history[-1][1].digest:
            self._history.append((round_number, assignment))

    def as_record(self, decisions: Sequence[Decision], compared: Sequence[Compared]) -> Record:
        """Return everything as plain data, as it is written to files."""
        anatomy = self._history[-1][1].anatomy
        return {
            "dry_run": self.dry_run,
            "reason": self.reason,
            "network": {
                "parts": [asdict(part) for part in anatomy.parts],
                "connections": [list(pair) for pair in anatomy.connections()],
                "outputs": outputs_of(anatomy),
            },
            "decisions": [self.decision(one) for one in decisions],
            "compared": [asdict(one) for one in compared],
            "assignment": self._history[-1][1].as_record(),
            "history": [
                {"round": number, "assignment": one.as_record()} for number, one in self._history
            ],
        }

    @staticmethod
    def merged(records: Sequence[Record]) -> Record:
        """Return the record of a swarm from those of its peers, of which several may have decided."""
        longest = max(records, key=lambda record: len(record["history"]))
        return longest | {
            key: sorted(
                (one for record in records for one in record[key]), key=lambda one: one["round"]
            )
            for key in ("decisions", "compared")
        }

    def decision(self, decision: Decision) -> Record:
        """Return one decision as plain data, with the sentence that describes it.

        groups: the names of the peers of every group that averages the cells; None if they are each peer's
        own.
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
            "gain": decision.gain,
            "error": decision.error,
        }
        part = cells_in_words(
            candidate.part, candidate.cells, anatomy.parts[anatomy.find(candidate.part)].cells,
            is_output=candidate.part == outputs_of(anatomy),
        )  # fmt: skip
        return record | {"sentence": sentence(record, part, dry_run=self.dry_run)}


def sentence(decision: Mapping[str, Any], cells: str, *, dry_run: bool) -> str:
    """Describe a decision in one sentence; cells: the cells in words."""
    groups = decision["groups"]
    loss = f"{percent(decision['gain'])} ± {percent(decision['error'])}"
    after = f"after round {decision['round']}"
    become = "would become" if dry_run else "became"
    if groups is None:
        change = f"{cells} {become} the peers' own {after}"
    else:
        sizes = _listed([str(len(group)) for group in groups])
        change = f"{cells} {become} those of {len(groups)} groups of {sizes} peers {after}"
    return f"{change}: held-out loss {'would fall' if dry_run else 'fell'} by {loss}"


def cells_in_words(part: str, cells: Sequence[int], of: int, *, is_output: bool) -> str:
    """Name some cells of a part, which has `of` cells: "outputs 8 and 9", "all cells of part 2"."""
    if part in NORMS_IN_WORDS:
        return NORMS_IN_WORDS[part]
    kind = "outputs" if is_output else "inputs" if part == "input" else "cells"
    where = f" of part {part}" if kind == "cells" else ""
    if len(cells) == of:
        return f"all {kind}{where}"
    if len(cells) > 6:
        return f"{len(cells)} of {of} {kind}{where}"
    return (
        f"{kind[: -1 if len(cells) == 1 else None]} {_listed([str(cell) for cell in cells])}{where}"
    )


def percent(share: float) -> str:
    """Return a share as text: 4.2 %, 24 %."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def _listed(texts: Sequence[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last
