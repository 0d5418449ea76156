"""How a swarm begins, shown on its own: whoever comes when, everybody soon counts in each of its models."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from gossamer.gossip import ONE

from .broker import Network
from .history import Event, Member, Plan, Stage

pytestmark = pytest.mark.lives

MODELS = {
    "ann": ("global", "red"),
    "ben": ("global", "red"),
    "cat": ("global", "blue"),
    "dan": ("global", "blue"),
}
WITHIN = 10.0
"""Virtual seconds after the last arrival or death in which everybody comes to count."""


def plan(order: tuple[str, ...], gap: float, *, equal: bool, events: tuple[Event, ...]) -> Plan:
    """Four peers in two groups, which start one after the other."""
    members = tuple(
        Member(name, MODELS[name], order.index(name) * gap, float(i), step=0.3, slowness=0.003)
        for i, name in enumerate(MODELS)
    )
    return Plan(
        seed=0, mode="async", start="none", equal=equal, trust=False, rounds=10**6, lease=600.0,
        network=Network(), members=members, events=events,
    )  # fmt: skip


def injected(stage: Stage) -> dict[str, float]:
    """Return the weight that peers who run now have brought into each shared model, in peers."""
    sums = dict.fromkeys(("global", "red", "blue"), 0.0)
    for peer in stage.peers.values():
        assert peer.link is not None
        gossiper = peer.link.engine.gossiper
        for model in sums.keys() & set(gossiper.models):
            sums[model] += gossiper.injected(model) / ONE
    return sums


def members_of(names: set[str]) -> dict[str, float]:
    return {m: float(sum(m in MODELS[n] for n in names)) for m in ("global", "red", "blue")}


def look(made: Plan, at: float) -> dict[str, float]:
    """Play a plan until a time, and return what is injected then."""
    stage, seen = Stage(made), dict[str, float]()
    stage.loop.call_at(at, lambda: seen.update(injected(stage)))
    history = stage.play(until=at + 0.1)
    assert history.crash is None
    return seen


@pytest.mark.parametrize("gap", [0.0, 0.2, 2.0])
def test_in_whatever_order_peers_come_all_count(gap):
    for number, order in enumerate(permutations(MODELS)):
        made = plan(order, gap, equal=bool(number % 2), events=())
        seen = look(made, 3 * gap + WITHIN)
        assert seen == members_of(set(MODELS)), order


@pytest.mark.parametrize("gap", [0.0, 0.2, 2.0])
def test_in_whatever_order_peers_come_and_one_is_killed_all_count(gap):
    """The kill comes at another moment in every history: before, while and after models are founded."""
    for number, order in enumerate(permutations(MODELS)):
        victim, for_good = order[number % 4], bool(number // 4 % 2)
        at = 3 * gap + 0.3 + number * 0.45
        kill = Event(at, "kill", victim, float("inf") if for_good else 1.0)
        made = plan(order, gap, equal=bool(number % 2), events=(kill,))
        seen = look(made, (at if for_good else at + 1.0) + WITHIN)
        online = set(MODELS) - {victim} if for_good else set(MODELS)
        assert seen == members_of(online), (order, str(kill))


@pytest.mark.parametrize("equal", [False, True])
def test_a_newcomer_counts_where_only_the_stored_statuses_of_dead_peers_are_left(equal):
    """All die while the broker is down, which then says of each that it is online and counts."""
    dead = set(MODELS) - {"dan"}
    events = (
        Event(12.0, "broker", "", 2.0),
        *(Event(12.1, "kill", name, float("inf")) for name in sorted(dead)),
    )
    arrival = 20.0
    made = plan(tuple(MODELS), 0.0, equal=equal, events=events)
    members = tuple(
        replace(each, start=arrival) if each.name == "dan" else each for each in made.members
    )
    seen = look(replace(made, members=members), arrival + WITHIN)
    assert seen == members_of({"dan"})
