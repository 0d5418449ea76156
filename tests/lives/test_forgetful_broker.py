"""A broker that forgets: what a peer said when it left must reach those who were away, shown on its own."""

from __future__ import annotations

from gossamer.gossip import ONE

from .broker import Network
from .history import Event, Member, Plan, Stage
from .laws import conserved
from .mutants import MUTANTS

NAMES = ("ann", "ben", "cat")


def broken(offset: float) -> list[str]:
    """Kill one peer, let another leave, and let the broker forget; then the first one comes back."""
    members = tuple(
        Member(name, ("global",), 0.1 * i, float(i), step=0.06, slowness=0.003)
        for i, name in enumerate(NAMES)
    )
    events = (
        Event(1.3 + offset, "kill", "ben", 18.0),
        Event(1.9 + offset, "leave", "ann"),
        Event(4.5 + offset, "broker", "", 2.0, forget=True),
    )
    plan = Plan(
        seed=0, mode="async", start="expect", equal=True, trust=False, rounds=25, lease=40.0,
        network=Network(delay=(0.001, 0.1)), members=members, events=events,
    )  # fmt: skip
    history = Stage(plan).play()
    assert history.crash is None
    assert sum(report.weight["global"][2] for report in history.reports()) == 3 * ONE
    return list(conserved(history))


OFFSETS = [0.5, 0.7, 0.9]
"""Moments at which all count, and a transfer to the one who is killed is on its way."""


def test_nobody_counts_what_a_leaver_took_back():
    assert not [text for offset in OFFSETS for text in broken(offset)]


def test_without_goodbyes_that_others_keep_mass_is_counted_twice():
    with MUTANTS["forget-goodbyes"].patch():
        assert any(broken(offset) for offset in OFFSETS)
