"""A newcomer's first opinion: the median of its elders, and nobody is judged before it."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.gossip import DictStore
from gossamer.gossip.gossiper import Gossiper
from gossamer.gossip.memory import introduce
from gossamer.gossip.messages import Give
from gossamer.gossip.pushsum import ONE
from gossamer.gossip.security import FirstOpinion, Guards, GuardSettings
from gossamer.gossip.security.guarded import guard

SIZE = 200
START = np.random.default_rng(0).normal(0, 0.1, SIZE)
TRAINED = 4.5 * START


def give(value, sender="anna@a", sequence=1, model="v"):
    return Give(model, sender, "s", sequence, "new@n", "t", ONE, np.asarray(value, np.float64))


def test_enough_elders_make_an_opinion_and_what_was_held_is_handed_on():
    opinion = FirstOpinion({"v": SIZE}, enough=3, wait=10.0)
    values = [TRAINED + shift for shift in (0.0, 0.1, 0.5)]
    assert opinion.form("v", 5, 0.0) is None
    for number, value in enumerate(values):
        assert opinion.form("v", 5, 1.0) is None
        assert opinion.hold(give(value, f"p@{number}"), 1.0)
    formed = opinion.form("v", 5, 1.0)
    np.testing.assert_array_equal(formed.value, values[1])
    assert [each.sender for each in formed.gives] == ["p@0", "p@1", "p@2"]
    assert opinion.open == []
    assert not opinion.hold(give(TRAINED), 2.0)  # from now on the guards judge
    assert opinion.form("v", 5, 2.0) is None


@pytest.mark.parametrize(("elders", "heard"), [(1, 1), (2, 2), (4, 4), (9, 5), (0, 1)])
def test_nobody_waits_for_more_elders_than_there_are(elders, heard):
    opinion = FirstOpinion({"v": SIZE}, wait=1e9)
    for number in range(heard):
        assert opinion.form("v", elders, 0.0) is None
        opinion.hold(give(TRAINED, f"p@{number}"), 0.0)
    assert opinion.form("v", elders, 0.0) is not None


def test_after_the_wait_those_that_were_heard_are_enough():
    opinion = FirstOpinion({"v": SIZE, "w": SIZE}, wait=10.0)
    opinion.hold(give(TRAINED), 5.0)
    assert opinion.form("v", 5, 14.9) is None
    assert opinion.form("v", 5, 15.0) is not None
    assert opinion.form("w", 5, 1e9) is None  # nobody was heard: nothing to think
    assert opinion.open == ["w"]


def test_one_elder_counts_once_whatever_its_label():
    opinion = FirstOpinion({"v": SIZE}, enough=3, wait=10.0)
    for number in range(10):
        assert opinion.hold(give(-TRAINED, f"eve{number}@e", sequence=number + 1), 0.0)
    assert opinion.form("v", 5, 0.0) is None
    opinion.hold(give(TRAINED, "anna@a"), 0.0)
    opinion.hold(give(TRAINED, "ben@b"), 0.0)
    assert opinion.hold(give(TRAINED, "carl@c"), 0.0)  # one too many: neither kept nor handled
    formed = opinion.form("v", 5, 0.0)
    assert [each.sender for each in formed.gives] == ["eve9@e", "anna@a", "ben@b"]
    np.testing.assert_array_equal(formed.value, TRAINED)


@pytest.mark.parametrize("value", [TRAINED[1:], TRAINED * np.nan, []])
def test_what_can_be_no_opinion_is_left_to_the_guards(value):
    opinion = FirstOpinion({"v": SIZE})
    assert not opinion.hold(give(value), 0.0)
    assert not opinion.hold(give(TRAINED, model="other"), 0.0)
    assert opinion.form("v", 1, 1e9) is None


def test_an_opinion_can_be_dropped():
    opinion = FirstOpinion({"v": SIZE})
    opinion.hold(give(TRAINED), 0.0)
    assert [each.sender for each in opinion.drop("v")] == ["anna@a"]
    assert opinion.drop("v") == ()
    assert not opinion.hold(give(TRAINED), 0.0)


def test_senseless_settings_are_refused():
    for wrong in ({"enough": 0}, {"wait": -1.0}, {"wait": float("nan")}):
        with pytest.raises(ValueError, match="first opinion: "):
            FirstOpinion({"v": SIZE}, **wrong)


# --- with gossipers and guards ---------------------------------------------------------------------


def swarm(values):
    """A newcomer with guards, which holds back what elders with these values give to it."""
    elders = [
        Gossiper(f"elder@{number}", f"s{number}", DictStore({"v": np.array(value)}), seed=number)
        for number, value in enumerate(values)
    ]
    for elder in elders:
        elder.inject("v", ONE)
    newcomer = Gossiper("new@n", "t", DictStore({"v": START.copy()}), seed=9)
    guards = Guards(GuardSettings(strikes=1))
    guard(newcomer, guards, lambda: 0.0)
    introduce([newcomer, *elders])
    return newcomer, elders, guards


def join(newcomer, elders, opinion):
    """What a peer does: hold back, form an opinion, count at it, then handle what was held back."""
    for elder in elders:
        elder.push("v", {newcomer.peer: ONE // 2}, 0.0)
        for message in elder.poll():
            assert opinion.hold(message, 0.0)
    formed = opinion.form("v", len(elders), 0.0)
    newcomer.set_value("v", formed.value)
    newcomer.inject("v", ONE)
    for message in formed.gives:
        newcomer.handle(message, 0.0)
    by_name = {elder.peer: elder for elder in elders}
    for answer in newcomer.poll():
        by_name[answer.receiver].handle(answer, 0.0)
    return newcomer.value("v")


def test_elders_far_from_the_start_are_followed_and_none_is_quarantined():
    rng = np.random.default_rng(1)
    values = [TRAINED + rng.normal(0, 0.01, SIZE) for _ in range(5)]
    newcomer, elders, guards = swarm(values)
    found = join(newcomer, elders, FirstOpinion({"v": SIZE}))
    np.testing.assert_allclose(found, TRAINED, atol=0.03)
    assert guards.quarantined(0.0) == []
    assert not guards.counters
    assert newcomer.weight("v") == ONE + 5 * (ONE // 2)


@pytest.mark.parametrize("lie", [-TRAINED, 100 * TRAINED, np.zeros(SIZE), np.full(SIZE, 1e30)],
                         ids=["flipped", "blown up", "zero", "huge"])  # fmt: skip
@pytest.mark.parametrize("enough", [3, 5])
def test_one_liar_among_five_elders_is_not_followed(lie, enough):
    rng = np.random.default_rng(2)
    values = [lie, *(TRAINED + rng.normal(0, 0.01, SIZE) for _ in range(4))]  # it comes first
    newcomer, elders, guards = swarm(values)
    found = join(newcomer, elders, FirstOpinion({"v": SIZE}, enough=enough))
    np.testing.assert_allclose(found, TRAINED, atol=0.03)
    assert guards.quarantined(0.0) == ["0"]
    liar, *honest = elders
    assert liar.counters["acknowledged-void"] == 1
    assert sum(elder.counters["acknowledged-credited"] for elder in honest) == enough - 1
