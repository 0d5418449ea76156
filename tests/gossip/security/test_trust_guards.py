"""Guards refuse or clip what is out of bounds, and the books of both sides stay right."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from gossamer.gossip import DictStore
from gossamer.gossip.gossiper import Gossiper
from gossamer.gossip.memory import MemoryNetwork, introduce, run
from gossamer.gossip.messages import Give
from gossamer.gossip.modes import RoundsMode
from gossamer.gossip.pushsum import ONE, Mass, total
from gossamer.gossip.security import Guards, GuardSettings
from gossamer.gossip.security.guarded import guard

OWN = np.linspace(-1, 1, 101).astype(np.float32)


def give(value, sender="eve", weight=ONE, sequence=1):
    return Give("v", sender, "s", sequence, "anna", "t", weight, np.asarray(value, np.float32))


def inspect(guards, value, now=0.0, held=ONE, **fields):
    return guards.inspect(give(value, **fields), OWN, held, ONE, now)


WRONG = {
    "a NaN": (np.where(OWN > 0.5, np.nan, OWN), "not-finite"),
    "an infinity": (np.where(OWN > 0.5, np.inf, OWN), "not-finite"),
    "huge": (np.full_like(OWN, 1e30), "norm"),
    "ten times ours": (10 * OWN, "norm"),
    "sign flipped": (-OWN, "distance"),
    "random": (np.random.default_rng(0).normal(0, OWN.std(), OWN.size), "distance"),
    "too short": (OWN[1:], "wrong-length"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_out_of_bounds_is_refused(what):
    value, cause = WRONG[what]
    guards = Guards()
    assert inspect(guards, value) == cause
    assert guards.counters == {cause: 1}


@pytest.mark.parametrize("value", [OWN, 1.4 * OWN, OWN + 0.2, 0.6 * OWN])
def test_what_is_close_passes_untouched(value):
    passed = inspect(Guards(), value)
    assert isinstance(passed, Give)
    np.testing.assert_array_equal(passed.value, np.asarray(value, np.float32))


@pytest.mark.parametrize(
    ("weight", "passes"), [(1, True), (16 * ONE, True), (16 * ONE + 1, False), (0, False)]
)
def test_weights_are_bounded(weight, passes):
    assert (inspect(Guards(), OWN, weight=weight) == "weight") is not passes


def test_a_newcomer_has_no_opinion_but_norms_still_bind():
    assert isinstance(inspect(Guards(), -OWN, held=0), Give)
    assert inspect(Guards(), 10 * OWN, held=0) == "norm"


def test_a_vector_of_zeros_can_be_joined():
    guards, zeros = Guards(), np.zeros(100, np.float32)
    assert isinstance(guards.inspect(give(np.full(100, 3e-4)), zeros, ONE, ONE, 0.0), Give)
    assert guards.inspect(give(np.full(100, 1.0)), zeros, ONE, ONE, 0.0) == "norm"


@pytest.mark.parametrize(("value", "cause"), [(-OWN, "distance"), (10 * OWN, "norm")])
def test_clipping_shortens_the_pull(value, cause):
    guards = Guards(GuardSettings(beyond="clip", distance=0.5))
    passed = inspect(guards, value)
    assert isinstance(passed, Give)
    centre, reach = (OWN, 0.5) if cause == "distance" else (0 * OWN, 4.0)
    length = np.linalg.norm(OWN)
    assert np.linalg.norm(passed.value - centre) == pytest.approx(reach * length, rel=1e-5)
    assert np.dot(passed.value - centre, value - centre) > 0
    assert guards.counters == {f"clipped-{cause}": 1}
    assert inspect(guards, np.full_like(OWN, np.nan)) == "not-finite"  # nothing to shorten
    assert inspect(guards, np.full_like(OWN, 3e38)) == "norm"


def test_rates_are_bounded_and_recover():
    guards = Guards(GuardSettings(rate=10, burst=20))
    assert [guards.allow("eve", 0.0) for _ in range(25)] == [True] * 20 + [False] * 5
    assert guards.allow("ben", 0.0)  # one's flood is not another's
    assert [guards.allow("eve", 1.0) for _ in range(11)] == [True] * 10 + [False]
    assert guards.counters["rate"] == 6


def test_quarantine_and_reinstatement(caplog):
    guards = Guards(GuardSettings(strikes=3, quarantine=60))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert inspect(guards, -OWN) == "distance"
    assert (
        "peer eve is in quarantine for 60 s: 3 transfers refused, the last (v) for its distance"
        in caplog.text
    )
    assert inspect(guards, OWN, now=1.0) == "quarantined"  # even what would be right
    assert isinstance(inspect(guards, OWN, now=1.0, sender="ben"), Give)
    assert guards.quarantined(1.0) == ["eve"]
    with caplog.at_level(logging.WARNING):
        assert guards.reinstate("eve")
    assert "peer eve is reinstated: it was asked for" in caplog.text
    assert isinstance(inspect(guards, OWN, now=2.0), Give)
    for _ in range(2):  # on probation: the good one counts for it
        inspect(guards, -OWN, now=3.0)
    assert guards.quarantined(3.0) == ["eve"]
    assert guards.quarantined(63.1) == []  # its time is over
    assert not guards.reinstate("eve")


def test_a_peer_that_does_not_count_yet_strikes_nobody():
    """Its values are untrained: what is far from them is refused, and no offence."""
    guards, far = Guards(GuardSettings(strikes=3)), 4.5 * OWN
    for _ in range(10):
        assert guards.inspect(give(far), OWN, 0, ONE, 0.0, counting=False) == "norm"
    assert guards.quarantined(0.0) == []
    assert guards.counters == {"norm": 10}
    for _ in range(3):
        assert inspect(guards, far) == "norm"
    assert guards.quarantined(0.0) == ["eve"]


def test_a_newcomer_strikes_nobody_before_it_counts():
    newcomer = Gossiper("new", "s-new", DictStore({"v": OWN.astype(np.float64)}), seed=1)
    newcomer.inject("v", ONE, after_hearing=True)
    guards = Guards(GuardSettings(strikes=2))
    guard(newcomer, guards, lambda: 0.0)
    for sequence in range(1, 6):
        far = Give("v", "anna", "s", sequence, "new", "s-new", ONE, 4.5 * OWN.astype(np.float64))
        newcomer.handle(far, 0.0)
    assert newcomer.counters["refused-norm"] == 5
    assert guards.quarantined(0.0) == []


def test_honest_mistakes_are_forgiven():
    guards = Guards(GuardSettings(strikes=3))
    for _ in range(20):
        inspect(guards, -OWN)
        inspect(guards, OWN)
    assert guards.quarantined(0.0) == []


def test_a_restart_lets_nobody_out():
    guards = Guards(GuardSettings(strikes=1, quarantine=60))
    inspect(guards, -OWN, now=100.0)
    later = Guards()
    later.restore(guards.snapshot(110.0), 5.0)
    assert later.quarantined(54.0) == ["eve"]
    assert later.quarantined(56.0) == []


def test_records_are_bounded():
    guards = Guards()
    for number in range(5000):
        guards.allow(f"x{number}", 0.0)
    assert len(guards._records) == 4096


@pytest.mark.parametrize(
    "wrong", [{"distance": 0}, {"norm": -1.0}, {"strikes": 0}, {"rate": float("nan")}]
)
def test_settings_without_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="guards: "):
        GuardSettings(**wrong)


# --- between gossiper and balances -------------------------------------------------------------------


def pair(**settings):
    clock = [0.0]
    anna, eve = (
        Gossiper(name, f"s-{name}", DictStore({"v": OWN.astype(np.float64) + shift}), seed=1)
        for name, shift in (("anna", 0.0), ("eve", 0.1))
    )
    for gossiper in (anna, eve):
        gossiper.inject("v", ONE)
    guards = Guards(GuardSettings(**settings))
    guard(anna, guards, lambda: clock[0])
    introduce([anna, eve])
    return anna, eve, guards


def held(*gossipers):
    masses = [Mass(g.value("v"), g.weight("v")) for g in gossipers]
    return total(masses)


def exchange(anna, eve):
    run({"anna": anna, "eve": eve}, MemoryNetwork(0), seconds=1.0)


def test_a_refused_transfer_goes_back_to_its_sender():
    anna, eve, guards = pair()
    eve.set_value("v", -OWN.astype(np.float64))
    flipped, weight = held(anna, eve)
    eve.push("v", {"anna": ONE // 2}, 0.0)
    exchange(anna, eve)
    assert guards.counters == {"distance": 1}
    assert anna.counters["refused-distance"] == 1
    assert eve.counters["acknowledged-void"] == 1
    assert (anna.weight("v"), eve.weight("v")) == (ONE, ONE)  # as if nothing had been sent
    after, same = held(anna, eve)
    assert same == weight
    np.testing.assert_allclose(after, flipped)
    np.testing.assert_allclose(anna.value("v"), OWN.astype(np.float64))


def test_an_honest_transfer_is_credited_exactly():
    anna, eve, guards = pair()
    before, weight = held(anna, eve)
    eve.push("v", {"anna": ONE // 2}, 0.0)
    exchange(anna, eve)
    after, same = held(anna, eve)
    assert (same, anna.weight("v")) == (weight, ONE + ONE // 2)
    np.testing.assert_allclose(after, before, rtol=1e-12)
    assert not guards.counters


def test_a_clipped_transfer_is_credited_at_the_clipped_value():
    anna, eve, guards = pair(beyond="clip", distance=0.5)
    own = OWN.astype(np.float64)
    eve.set_value("v", -own)
    eve.push("v", {"anna": ONE // 2}, 0.0)
    exchange(anna, eve)
    assert guards.counters == {"clipped-distance": 1}
    np.testing.assert_allclose(anna.value("v"), own + (0.5 / 1.5) * (0.5 * own - own))
    assert eve.counters["acknowledged-credited"] == 1


def test_duplicates_of_a_refused_transfer_get_the_same_answer():
    anna, eve, guards = pair()
    eve.set_value("v", -OWN.astype(np.float64))
    eve.push("v", {"anna": ONE // 2}, 0.0)
    (message,) = eve.poll()
    for _ in range(3):
        anna.handle(message, 0.0)
    assert [ack.verdict for ack in anna.poll()] == ["void"] * 3
    assert guards.counters == {"distance": 1}
    anna.handle(replace(message, sequence=2, value=np.full(101, np.nan)), 0.0)
    assert [ack.verdict for ack in anna.poll()] == ["void"]


def test_what_is_usual_bounds_what_is_allowed():
    """Six senders are close; a seventh, far beyond them but below the ceiling, is out of place."""
    rng = np.random.default_rng(0)
    near = [OWN + rng.normal(0, 0.05 * OWN.std(), OWN.size) for _ in range(6)]
    guards, lax = Guards(), Guards(GuardSettings(outlier=None))
    far = 0.7 * OWN
    for each in (guards, lax):
        for number, value in enumerate(near):
            assert isinstance(inspect(each, value, sender=f"p{number}"), Give)
    assert inspect(guards, far) == "distance"
    assert isinstance(inspect(lax, far), Give)
    assert isinstance(inspect(Guards(), far), Give)  # nobody else was heard: only the ceiling binds


def test_a_refused_sender_in_rounds_is_not_waited_for():
    """In lockstep a peer waits for every neighbour's part: a refused one must not stop the round."""
    names = ["anna", "ben", "eve"]
    gossipers = {
        name: Gossiper(
            name, f"s-{name}", DictStore({"v": OWN.astype(np.float64)}), mode=RoundsMode(3), seed=1
        )
        for name in names
    }
    for gossiper in gossipers.values():
        gossiper.inject("v", ONE)
    introduce(gossipers.values())
    for name in ("anna", "ben"):
        guard(gossipers[name], Guards(), lambda: 0.0)
    gossipers["eve"].set_value("v", -OWN.astype(np.float64))
    for gossiper in gossipers.values():
        gossiper.mode.begin_round(gossiper, 0)
    run(gossipers, MemoryNetwork(0), seconds=5)
    for name in ("anna", "ben"):
        assert gossipers[name].mode.finished(0)
        assert gossipers[name].counters["refused-distance"] > 0
        np.testing.assert_allclose(gossipers[name].value("v"), OWN.astype(np.float64))
