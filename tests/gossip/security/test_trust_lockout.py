"""Whom the others refuse: they say whose clock is wrong, and it notices that nobody answers."""

from __future__ import annotations

import pytest
from trust_kit import ONLINE, SWARM, Clock, group, introduce, person, settle, wake

from gossamer.gossip import topics
from gossamer.gossip.security import Identity, signed
from gossamer.gossip.security.invitation import CLOCK_SKEW
from gossamer.gossip.security.register import MAX_CARD_AGE
from gossamer.gossip.security.unanswered import PATIENCE, Unanswered
from gossamer.gossip.security.waiting import MAX_MISDATED, MAX_STATUS, MAX_WAITING, MisdatedCards


def lines(caplog, text):
    return [r.getMessage() for r in caplog.records if text in r.getMessage()]


@pytest.mark.parametrize(("ahead", "known"), [(CLOCK_SKEW, True), (CLOCK_SKEW + 1, False)])
def test_a_card_from_the_future_is_refused_by_name(caplog, ahead, known):
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    ben.trust._wall = lambda: clock.wall() + ahead
    heard = anna.trust.hear(topics.card(SWARM, ben.name), ben.trust.card(b"{}"))
    assert bool(heard) is (ben.name in anna.trust.register.members) is known
    assert anna.trust.counters["untrusted-clock"] == (not known)
    told = (
        f"the card of {ben.name} is dated {ahead:.0f} s ahead of our time: its clock is ahead, or"
    )
    assert (told in caplog.text) is not known


def test_a_clock_that_was_ahead_once_does_not_lock_its_peer_out():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    ben.trust._wall = lambda: clock.wall() + 86_400
    introduce([anna, ben])
    clock.now += 10
    again = wake(ben.identity, ben.admission, clock)
    introduce([anna, again])
    settle([anna, again], clock)
    assert again.trust.keyring.answered
    assert "untrusted-stale" not in anna.trust.counters


@pytest.mark.parametrize("wrong", [-3600.0, 3 * 86_400.0], ids=["behind", "ahead"])
def test_a_device_that_starts_with_its_clock_wrong_takes_the_others_in_later(wrong):
    """Retained cards come once, when it connects: with its clock set, it must know them all the same."""
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    anna.trust._wall = lambda: clock.wall() + wrong
    introduce([anna, ben])
    assert anna.trust.register.members == {}
    anna.trust.tick()
    assert anna.trust.register.members == {}
    anna.trust._wall = clock.wall
    found = [each for each in anna.trust.tick()[1] if each.kind != "reissue-card"]
    assert [(each.kind, each.peer) for each in found] == [
        ("card", ben.name),
        ("status", ben.name),
    ]
    settle([anna, ben], clock)
    assert anna.trust.can_seal(ben.name, "global")


def test_misdated_cards_are_bounded_and_wait_for_our_clock():
    waiting = MisdatedCards()
    for number in range(MAX_MISDATED + 5):
        waiting.keep(f"p{number}", b"old", 1e9)
    waiting.keep("p0", b"new", 1e9)
    assert waiting.due(0.0) == waiting.due(1e9 + 2 * MAX_CARD_AGE) == []
    cards = waiting.due(1e9)
    assert len(cards) == MAX_MISDATED
    assert cards[0] == ("p0", b"new")
    assert waiting.due(1e9) == []


def test_who_is_not_answered_says_so_once_and_shows_its_card_again(caplog):
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    ben.trust._wall = lambda: clock.wall() + 3600
    introduce([anna, ben])  # Ben hears Anna, and Anna refuses Ben
    again = []
    for _ in range(12):
        settle([anna], clock, rounds=1, seconds=0.0)
        again += [each.kind for each in ben.trust.tick()[1]]
        clock.now += PATIENCE / 4
    assert again == ["reissue-card"] * 2
    (line,) = lines(caplog, "nobody has answered")
    assert line.startswith(f"peer {ben.name}: nobody has answered for {PATIENCE:g} s")
    assert anna.name in line
    ben.trust._wall = clock.wall
    introduce([ben, anna])
    settle([anna, ben], clock)
    clock.now += 10 * PATIENCE
    assert ben.trust.tick()[1] == []


def test_who_is_answered_or_alone_does_not_complain(caplog):
    (anna, ben), clock = group("anna", "ben")
    alone = person("carl", clock)
    # The card of somebody who is not there, and somebody there with whom nothing is shared.
    alone.trust.hear(topics.card(SWARM, ben.name), ben.trust.card(b"{}"))
    other = person("dora", clock, ("blue",))
    introduce([alone, other])
    for _ in range(3):
        clock.now += PATIENCE
        for one in (anna, ben, alone, other):
            assert one.trust.tick()[1] == []
    assert lines(caplog, "nobody has answered") == []


def test_the_warning_names_a_few_of_many(caplog):
    watch = Unanswered("me")
    others = [f"p{number}" for number in range(10)]
    assert not watch.look(others, 0.0)
    assert watch.look(others, PATIENCE)
    assert "(p0, p1, p2 and 7 more)" in caplog.text


# --- strangers -------------------------------------------------------------------------------------


def stranger_status(number, size):
    stranger = Identity.generate(f"x{number}")
    topic = topics.status(SWARM, stranger.name)
    head = {"version": 2, "key": stranger.public, "incarnation": bytes(16), "number": 1}
    return topic, signed.sign(stranger, topic, head, b"." * size)


def kept(trust):
    return sum(map(len, trust._waiting._statuses.values()))


def test_long_statuses_of_strangers_are_dropped_and_counted(caplog):
    anna = person("anna", Clock())
    for number in range(5):
        assert anna.trust.hear(*stranger_status(number, MAX_STATUS)) == []
    assert kept(anna.trust) == 0
    assert anna.trust.counters == {"untrusted-malformed": 5}
    assert len(lines(caplog, "whose card is not known")) == 3  # the 1st, the 2nd, the 4th


def test_statuses_of_many_strangers_give_way_and_are_counted():
    anna = person("anna", Clock())
    for number in range(MAX_WAITING + 20):
        anna.trust.hear(*stranger_status(number, 3000))
    assert len(anna.trust._waiting) == MAX_WAITING
    assert kept(anna.trust) <= MAX_WAITING * MAX_STATUS
    assert anna.trust.counters == {"untrusted-unknown-sender": 20}


def test_a_long_goodbye_of_a_member_is_heard():
    """It says what became of every transfer: the bound is one for strangers."""
    (anna, ben), _ = group("anna", "ben")
    goodbye = ben.trust.status(ONLINE + b" " * 10 * MAX_STATUS)
    assert anna.trust.hear(topics.status(SWARM, ben.name), goodbye)
