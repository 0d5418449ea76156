"""How a life ends, shown on its own: nobody ends alone beside the others, or is called finished too early."""

from __future__ import annotations

from .broker import Network
from .history import Event, History, Member, Plan, Stage
from .laws import check
from .mutants import MUTANTS


def play(*events: Event) -> History:
    """Two peers of one model that train eight short rounds each, and what happens to them."""
    members = tuple(
        Member(name, ("global",), start, value, step=0.05, slowness=0.003, lease=8.0)
        for name, start, value in (("ann", 0.2, -1.0), ("ben", 0.0, -2.0))
    )
    plan = Plan(
        seed=0, mode="async", start="none", equal=False, trust=False, rounds=8, lease=8.0,
        network=Network(), members=members, events=events,
    )  # fmt: skip
    return Stage(plan).play()


CUT = Event(0.65, "cut", "ben", 7.0)
"""Ben is cut off when it has told of itself, and ann has not: it trains its rounds, and knows of nobody."""


def test_one_who_was_cut_off_looks_for_the_others_before_it_ends():
    history = play(CUT)
    assert check(history) == []
    with MUTANTS["end-unheard"].patch():
        broken = play(CUT)
    assert [law for law, _ in check(broken)] == ["agree", "agree"]


def test_one_who_leaves_before_it_counts_in_its_new_session_has_not_finished():
    frozen = Event(1.0, "freeze", "ann", 16.0, after='"settling"')
    history = play(frozen, Event(17.0, "leave", "ann", after='"starting"'))
    assert check(history) == []
    (report,) = (e.report for e in history.endings if e.member.name == "ann" and e.report)
    assert report.ended == "left"
    assert report.weight["global"] == [0, 0, 0]
