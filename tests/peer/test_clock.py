"""How long ago something was: after a restart of the machine, or with a clock set back, nobody can tell."""

from __future__ import annotations

import pytest

from gossamer.peer import clock
from gossamer.peer.clock import mark, moment

NOW = 1e9


@pytest.fixture(params=["some boot", None])
def boot(request, monkeypatch):
    monkeypatch.setattr(clock, "boot", lambda: request.param)
    return request.param


def set_clock(monkeypatch, seconds: float) -> None:
    """The clock on the wall goes wrong by so much."""
    monkeypatch.setattr(clock.time, "time", lambda: NOW + seconds)


def test_a_moment_comes_back_as_it_was(boot, monkeypatch):
    monkeypatch.setattr(clock, "clock", lambda: 1000.0)
    set_clock(monkeypatch, 0.0)
    assert moment(mark(950.0)) == pytest.approx(950.0, abs=1e-3)


def test_after_another_boot_nobody_can_tell(monkeypatch):
    monkeypatch.setattr(clock, "boot", lambda: "one")
    then = mark(clock.clock())
    monkeypatch.setattr(clock, "boot", lambda: "two")
    assert moment(then) is None


def test_a_clock_on_the_wall_that_is_set_matters_only_where_boots_have_no_names(boot, monkeypatch):
    monkeypatch.setattr(clock, "clock", lambda: 1000.0)
    set_clock(monkeypatch, 0.0)
    then = mark(900.0)
    set_clock(monkeypatch, -7200.0)
    assert moment(then) == (900.0 if boot else None)
    set_clock(monkeypatch, 500.0)
    assert moment(then) == pytest.approx(900.0 if boot else 400.0, abs=1e-3)


def test_a_moment_a_little_ahead_is_now(boot, monkeypatch):
    monkeypatch.setattr(clock, "clock", lambda: 1000.0)
    set_clock(monkeypatch, 0.0)
    then = mark(1000.5)
    assert moment(then) == pytest.approx(1000.0, abs=1e-3)
    assert moment({**then, "clock": 1002.0, "wall": then["wall"] + 2.0}) is None
