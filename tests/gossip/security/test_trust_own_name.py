"""Under one's own name: a life that goes on is heard, words of one that is over are not."""

from __future__ import annotations

import pytest
from trust_kit import SWARM, Clock, papers, wake

from gossamer.gossip import topics
from gossamer.gossip.security import TrustError
from gossamer.gossip.security.own_name import MAX_MET, OwnName


def lives(number):
    """As many lives of one peer, and its status topic."""
    clock = Clock()
    identity, admission = papers("anna")
    people = [wake(identity, admission, clock, session=f"s{each}") for each in range(number)]
    return [one.trust for one in people], topics.status(SWARM, identity.name)


def said(trust, place, payload):
    return [heard.body for heard in trust.hear(place, payload) if heard.kind == "status"]


def test_an_old_status_is_refused_while_the_name_is_asked_for():
    (old, new), place = lives(2)
    words = [old.status(b"online"), old.status(b"left"), old.will(b"offline")]
    assert [said(new, place, each) for each in words] == [[]] * 3
    assert new.counters == {"untrusted-unanswered": 3}
    assert said(new, place, new.status(b"free?")) == [b"free?"]  # our own question comes back


def test_a_life_that_answers_is_believed_and_so_is_its_end():
    (first, second), place = lives(2)
    first.card(b"{}")
    before = first.status(b"online")
    assert said(second, place, before) == []
    assert said(first, place, second.status(b"free?")) == [b"free?"]  # so that it answers
    assert said(second, place, first.status(b"online")) == [b"online"]
    assert said(second, place, first.will(b"offline")) == [b"offline"]


def test_an_answer_to_one_life_is_none_to_another():
    (first, second, third), place = lives(3)
    first.card(b"{}")
    first.hear(place, second.status(b"free?"))
    answer = first.status(b"online")
    assert said(second, place, answer) == [b"online"]
    assert said(third, place, answer) == []


def test_once_the_name_is_ours_late_wills_are_heard():
    """They are contradicted: the broker would else keep them as our last word."""
    (old, new), place = lives(2)
    new.card(b"{}")
    assert said(new, place, old.will(b"offline")) == [b"offline"]


def test_lives_met_are_bounded_and_nonsense_is_refused():
    own = OwnName(bytes(16))
    own.ours = True
    for number in range(1, 21):
        own.hear({"incarnation": bytes([number] * 16), "answers": []}, b"")
    assert own.met == [bytes([number] * 16) for number in range(21 - MAX_MET, 21)]
    for wrong in ({}, {"incarnation": b"short"}, {"incarnation": bytes([1] * 16), "answers": 3}):
        with pytest.raises(TrustError, match="lacks what trust needs"):
            own.hear(wrong, b"")


def test_the_echo_waits_for_a_life_that_may_still_answer():
    """Whoever asks would else take silence for a free name, when the other is only slow."""
    (first, second), place = lives(2)
    online, will = first.status(b'{"state": "online"}'), first.will(b'{"state": "offline"}')
    question = second.status(b"free?")
    assert said(second, place, question) == [b"free?"]
    assert said(second, place, online) == []
    assert said(second, place, question) == []
    assert said(second, place, will) == []  # it is over: nothing to wait for
    assert said(second, place, question) == [b"free?"]
    second.hear(place, online)
    second.card(b"{}")
    assert said(second, place, question) == [b"free?"]


def test_a_card_under_our_name_is_heard_if_our_key_has_signed_it():
    """It tells the generation of the device that has or had the name; the last will does not."""
    (old, new), _ = lives(2)
    place = topics.card(SWARM, old.name)
    (heard,) = new.hear(place, old.card(b"generation 2"))
    assert (heard.kind, heard.peer, heard.body) == ("card", old.name, b"generation 2")
    stranger, admission = papers("anna")
    forged = wake(stranger, admission, Clock()).trust.card(b"generation 9")
    assert new.hear(place, forged) == []
    assert new.counters["untrusted-signature"] == 1


def test_a_card_is_never_dated_before_the_one_it_follows():
    """Others take the newest card: one whose clock was set back would be shut out until it has caught up."""
    clock = Clock()
    identity, admission = papers("anna")
    before = wake(identity, admission, clock, session="s1").trust.card(b"{}")
    ben = wake(*papers("ben"), clock).trust
    place = topics.card(SWARM, identity.name)
    assert ben.hear(place, before)
    for back, accepted in ((24.0, True), (7200.0, False)):  # nobody is to be dated hours ahead
        clock.epoch -= back
        again = wake(identity, admission, clock, session=f"s{back}").trust
        again.hear(place, before)
        card = again.card(b"{}")
        clock.epoch += back
        assert bool(ben.hear(place, card)) == accepted
