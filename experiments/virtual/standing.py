"""Whose accuracy counts at a moment of virtual time. Curves, means and sweeps all ask here.

The rule: peers that are there at that moment, each by its latest test until then. Who has left counts no
more, whatever it knew; who is back but was not tested since counts by the test before it left.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..results import write_csv
from .world import World

RULE = "peers that are there at the time, each by its latest test on its own task"
"""The same, for captions."""

Test = tuple[float, int, float]
"""When, after how many rounds of the peer's own, and the accuracy."""
Lives = Mapping[str, Sequence[tuple[float, float]]]
"""Per peer when it came and when it left, in order; infinity if it did not leave."""


def standing(tests: Mapping[str, Sequence[Test]], lives: Lives, time: float) -> dict[str, float]:
    """The accuracy of everybody who counts at a moment. Tests of a peer are sorted by time.

    A peer without an entry in `lives` is there all the time.
    """
    found = {}
    for peer, rows in tests.items():
        place = bisect_right(rows, time, key=lambda row: row[0])
        if place and is_there(lives, peer, time):
            found[peer] = rows[place - 1][2]
    return found


def is_there(lives: Lives, peer: str, time: float) -> bool:
    """Whether a peer is there at a moment; at the very moment of leaving it is not."""
    return peer not in lives or any(start <= time < end for start, end in lives[peer])


def lives_of(world: World, names: Sequence[str]) -> Lives:
    """When peers come and go in a world; empty if nobody does."""
    if not world.churns:
        return {}
    return {
        name: [(float(a), float(b)) for a, b in zip(starts, ends, strict=True) if a < float("inf")]
        for name, starts, ends in zip(names, world.starts, world.ends, strict=True)
    }


def write_lives(path: Path, lives: Lives) -> None:
    """A table of who was there from when until when, without those who were there all the time."""
    rows = ([peer, start, end] for peer, each in lives.items() for start, end in each)
    write_csv(path, ["peer", "from", "until"], rows)


def read_lives(path: Path) -> Lives:
    """What `write_lives` wrote; empty if there is no such file."""
    found: dict[str, list[tuple[float, float]]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found.setdefault(row["peer"], []).append((float(row["from"]), float(row["until"])))
    return found
