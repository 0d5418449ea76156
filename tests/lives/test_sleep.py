"""One of four devices is awake for two minutes an hour only: it is waited for, and every sum stays exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .broker import Network
from .history import Event, History, Member, Plan, Stage
from .laws import check

pytestmark = pytest.mark.lives

HOUR, AWAKE, LEASE = 120.0, 4.0, 20.0
"""Seconds of an hour, of the two minutes awake in it, and of the lease: a thirtieth of real ones."""
HOURS = 2


def play(asleep: float, *, kill: bool = False, trust: bool = False) -> History:
    """Four peers train for some hours and leave; dan sleeps but for the first minutes of each.

    kill: dan's process does not sleep, but is killed, and started again when dan wakes.
    """
    members = tuple(
        Member(name, ("global",), 0.0, float(i), step=1.0, slowness=0.003, lease=LEASE)
        for i, name in enumerate(("ann", "ben", "cat", "dan"))
    )
    members = (*members[:3], replace(members[3], asleep=asleep))
    kind = "kill" if kill else "freeze"
    end = HOURS * HOUR + AWAKE
    events = (
        *(Event(hour * HOUR + AWAKE, kind, "dan", HOUR - AWAKE) for hour in range(HOURS)),
        *(Event(end + i, "leave", each.name) for i, each in enumerate(members)),
    )
    plan = Plan(
        seed=0, mode="async", start="none", equal=False, trust=trust, rounds=10**6,
        lease=LEASE, network=Network(), members=members, events=events,
    )  # fmt: skip
    return Stage(plan).play()


def sessions_of(history: History, name: str) -> set[str]:
    """Return the sessions that others have seen of a device."""
    processes = (process for device in history.devices[name] for process in device.processes)
    return {session for each in processes for session in each.sessions} & history.announced


@pytest.mark.parametrize(("kill", "trust"), [(False, False), (True, True)])
def test_one_that_sleeps_keeps_its_session_and_every_sum_is_exact(kill, trust):
    history = play(HOUR - AWAKE, kill=kill, trust=trust)
    assert check(history) == []
    reports = [each.report for each in history.endings if each.report]
    assert len(reports) == 4
    assert all(report.abandoned == [] for report in reports)
    held, moving, injected = (
        sum(report.weight["global"][i] for report in reports) for i in range(3)
    )
    assert (held, moving) == (injected, 0)
    assert len(sessions_of(history, "dan")) == 1


def test_one_that_does_not_say_so_is_given_up_while_it_sleeps():
    history = play(0.0)
    assert check(history) == []
    assert len(sessions_of(history, "dan")) == HOURS + 1
