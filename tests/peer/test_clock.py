"""How long ago something was: after a restart of the machine, or with a clock set back, nobody can tell."""

from __future__ import annotations

import pytest
from peer_kit import Clocks

from gossamer.peer.machine import portable_time, uptime_of


@pytest.fixture(params=["some boot", None])
def machine(request):
    clocks = Clocks(request.param)
    clocks.frozen = 1000.0
    return clocks


def test_a_moment_comes_back_as_it_was(machine):
    assert uptime_of(machine, portable_time(machine, 950.0)) == pytest.approx(950.0, abs=1e-3)


def test_after_another_boot_nobody_can_tell():
    machine = Clocks("one")
    then = portable_time(machine, machine.uptime())
    machine.boot_name = "two"
    assert uptime_of(machine, then) is None


def test_a_wall_clock_that_is_set_matters_only_where_boots_have_no_names(machine):
    then = portable_time(machine, 900.0)
    machine.wall_ahead = -7200.0
    assert uptime_of(machine, then) == (900.0 if machine.boot_name else None)
    machine.wall_ahead = 500.0
    expected = 900.0 if machine.boot_name else 400.0
    assert uptime_of(machine, then) == pytest.approx(expected, abs=1e-3)


def test_a_moment_a_little_ahead_is_now(machine):
    then = portable_time(machine, 1000.5)
    assert uptime_of(machine, then) == pytest.approx(1000.0, abs=1e-3)
    assert uptime_of(machine, {**then, "clock": 1002.0, "wall": then["wall"] + 2.0}) is None
