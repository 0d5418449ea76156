"""A goodbye proves itself: who was away learns from it who left, and nobody can bring an old one back."""

from __future__ import annotations

import pytest
from trust_kit import ONLINE, OWNER, SWARM, Clock, group, introduce, papers, person, wake

from gossamer.gossip import topics
from gossamer.gossip.security import Identity, endorse, open_ticket
from gossamer.gossip.security.register import MAX_CARD_AGE, sign_status

LEFT = b'{"state": "left", "session": "s"}'


def hear(listener, speaker, status):
    heard = listener.trust.hear(topics.status(SWARM, speaker.name), status)
    return [(each.kind, each.peer, each.body) for each in heard]


def restarted(person, clock):
    """The same peer after a crash, with what its checkpoint kept."""
    clock.now += 1
    return wake(
        person.identity, person.admission, clock,
        session=person.session, memory=person.trust.snapshot(),
    )  # fmt: skip


def test_a_returning_peer_learns_who_left_without_a_card():
    (anna, ben), clock = group("anna", "ben")
    again = restarted(ben, clock)
    # Anna has cleared her card: the broker keeps only her last status.
    assert hear(again, anna, anna.trust.status(LEFT)) == [("status", anna.name, LEFT)]
    assert not again.trust.counters


def test_a_peer_that_came_back_and_left_meanwhile_is_known_to_have_left():
    (anna, ben), clock = group("anna", "ben")
    clock.now += 1
    next_life = wake(anna.identity, anna.admission, clock, session="next")
    next_life.trust.card(b"{}")  # Ben never saw it
    goodbye = next_life.trust.status(LEFT)
    assert hear(ben, anna, goodbye) == [("status", anna.name, LEFT)]
    assert hear(ben, anna, goodbye) == []
    assert ben.trust.counters == {"untrusted-stale": 1}


def test_only_a_goodbye_is_believed_without_a_card():
    (anna, ben), clock = group("anna", "ben")
    again = restarted(ben, clock)
    for status in (anna.trust.status(ONLINE), anna.trust.will(LEFT)):
        assert hear(again, anna, status) == []
    assert hear(again, anna, LEFT) == []
    assert again.trust.counters == {"untrusted-malformed": 1}  # the others wait for a card


@pytest.mark.parametrize("crashed", [False, True])
def test_an_old_goodbye_does_not_make_a_present_peer_leave(crashed):
    """The broker shows Ben the goodbye of an incarnation of Anna's before the one that he knows."""
    clock = Clock()
    identity, admission = papers("anna")
    old = wake(identity, admission, clock, session="old")
    old.trust.card(b"{}")
    goodbye = old.trust.status(LEFT)
    clock.now += 10
    anna, ben = wake(identity, admission, clock), person("ben", clock)
    introduce([anna, ben])
    if crashed:
        ben = restarted(ben, clock)
    assert hear(ben, anna, goodbye) == []
    assert ben.trust.counters == {"untrusted-stale": 1}


def test_cards_from_before_a_goodbye_do_not_count():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    card = anna.trust.card(b"{}")
    assert hear(ben, anna, anna.trust.status(LEFT))
    assert ben.trust.hear(topics.card(SWARM, anna.name), card) == []
    assert ben.trust.counters == {"untrusted-stale": 1}
    clock.now += 1
    again = wake(anna.identity, anna.admission, clock)
    assert ben.trust.hear(topics.card(SWARM, anna.name), again.trust.card(b"{}"))


def test_a_goodbye_of_a_stranger_is_refused():
    clock = Clock()
    ben = person("ben", clock)
    eve, admission = papers("eve", owner=Identity.generate("somebody"))
    stranger = person("eve", clock)
    stranger.trust.identity = eve
    for paper in (admission, stranger.admission):  # forged; somebody else's
        stranger.trust._admission = paper
        assert ben.trust.hear(topics.status(SWARM, eve.name), stranger.trust.status(LEFT)) == []
    assert ben.trust.counters == {"untrusted-uninvited": 2}
    bare = sign_status(eve, SWARM, bytes(16), 1, LEFT)
    assert ben.trust.hear(topics.status(SWARM, eve.name), bare) == []
    assert ben.trust.counters["untrusted-malformed"] == 1


def test_goodbyes_of_a_ticket_count_for_those_that_were_admitted():
    """Whoever has a ticket can make up keys without end: their goodbyes must not fill anything."""
    clock = Clock()
    ticket = open_ticket(OWNER, SWARM, uses=5, days=30_000)
    ben, known, unknown = (
        person("ben", clock),
        *(wake(one, endorse(*ticket, one), clock) for one in map(Identity.generate, "xy")),
    )
    introduce([ben, known])
    again = restarted(ben, clock)
    assert hear(again, known, known.trust.status(LEFT))
    assert hear(again, unknown, unknown.trust.status(LEFT)) == []  # it waits, in little room
    assert again.trust.register._left.keys() == {known.name}


def test_what_is_remembered_of_cards_is_bounded_by_their_age():
    (anna, ben), clock = group("anna", "ben")
    assert ben.trust.snapshot()["editions"].keys() == {anna.name}
    again = restarted(ben, clock)
    assert again.trust.snapshot()["editions"].keys() == {anna.name}
    clock.now += 2 * MAX_CARD_AGE
    assert again.trust.snapshot()["editions"] == {}


def test_a_peer_that_restarts_refuses_cards_older_than_those_it_knew():
    clock = Clock()
    ben, (identity, admission) = person("ben", clock), papers("anna")
    old = wake(identity, admission, clock, session="old").trust.card(b"{}")
    clock.now += 10
    anna = wake(identity, admission, clock)
    card = anna.trust.card(b"{}")
    ben.trust.hear(topics.card(SWARM, anna.name), card)
    again = restarted(ben, clock)
    assert again.trust.hear(topics.card(SWARM, anna.name), old) == []
    assert again.trust.counters == {"untrusted-stale": 1}
    assert again.trust.hear(topics.card(SWARM, anna.name), card)
