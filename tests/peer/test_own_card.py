"""A card that somebody cleared or replaced at the broker comes back, so that late comers find the peer."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from papers_kit import Papers
from peer_kit import Gate, Nest, Still, held, injected, make_learner, quick
from waiting import until

from gossamer.gossip import topics
from gossamer.peer.presence import FIRST_PAUSE, LONGEST_PAUSE, Card, OwnCard, Status, read_card

FOREIGN = Card("other", 0.0, 1, {}).encode()


def test_what_is_not_ours_is_a_loss_once():
    card = OwnCard()
    assert not card.receive(b"")  # of a former life, before we said anything
    assert not card.receive(b"former")
    card.about_to_publish(b"ours")
    assert not card.receive(b"ours")
    for wrong in (b"", b"theirs"):
        assert card.receive(wrong)
        assert not card.is_intact
        assert not card.receive(wrong)  # known by now
        assert not card.receive(b"ours")
        assert card.is_intact


def test_a_reconnection_hears_the_card_before_the_newest():
    card = OwnCard()
    card.about_to_publish(b"first")
    card.about_to_publish(b"second")
    assert not card.receive(b"first")
    card.about_to_publish(b"second")  # the same again is not a card before
    assert not card.receive(b"first")
    assert not card.receive(b"second")
    assert card.receive(b"first")  # somebody put it back
    assert not card.receive(b"second")
    card.about_to_publish(b"third")
    assert not card.receive(b"second")
    assert card.receive(b"first")
    assert card.receive(b"") is False
    assert not card.is_intact


def test_who_insists_is_answered_ever_more_seldom():
    card, now, pauses = OwnCard(), 100.0, []
    for _ in range(12):
        pauses.append(card.pause_after_restoring(now))
        now += pauses[-1]
    assert pauses[0] == FIRST_PAUSE
    assert pauses[-1] == LONGEST_PAUSE
    assert all(one < two or one == LONGEST_PAUSE for one, two in pairwise(pauses))
    assert (
        card.pause_after_restoring(now + 2 * LONGEST_PAUSE) == FIRST_PAUSE
    )  # it was left in peace


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("put", [b"", FOREIGN, b"nonsense"], ids=["cleared", "foreign", "nonsense"])
def test_a_late_comer_finds_a_peer_whose_card_was_taken_away(run, tmp_path, caplog, trust, put):
    settings = quick(rounds=4)
    of = dict.fromkeys("ab", settings)
    if trust:
        papers = Papers(tmp_path)
        papers.names("a", "b")
        of = {name: papers.settings(name, settings) for name in "ab"}

    async def scenario():
        nest, gate = Nest(settings), Gate()
        newcomer = make_learner("b")
        first = nest.start("a", Still(make_learner("a"), 1.0, gate), of["a"])
        await gate.wait()
        place = topics.card(first.peer.settings.swarm, first.peer.name)
        card = nest.broker.retained[place]
        nest.broker.publish("eve", place, put, True)
        await until(lambda: len(nest.broker.retained.get(place, b"")) >= len(card))
        other = Gate()
        nest.start("b", Still(newcomer, 2.0, other), of["b"])
        await other.wait()
        gate.open()
        other.open()
        return await nest.all(), newcomer.network.read("global")

    with caplog.at_level(logging.INFO):
        reports, values = run(scenario())
    lines = [record.getMessage() for record in caplog.records]
    assert sum("publishes its card again" in line for line in lines) == 1
    assert (values == 1.0).all()  # it heard of the first, and took its values over
    assert held(reports) == injected(reports) == 2


def test_a_status_that_was_cleared_or_left_comes_back(run):
    async def scenario():
        nest, gate = Nest(quick(rounds=2)), Gate()
        nest.start("a", Still(make_learner("a"), 1.0, gate))
        await gate.wait()
        place = topics.status("nest", "a")
        for put in (b"", Status("left", "other", "done").encode()):
            nest.broker.publish("eve", place, put, True)
            await until(lambda: b"online" in nest.broker.retained.get(place, b""))
        gate.open()
        await nest.all()

    run(scenario())


def test_two_lives_of_one_name_do_not_fight_for_the_card(run):
    async def scenario():
        nest, gate = Nest(quick(rounds=2)), Gate()
        life = nest.start("a", Still(make_learner("a"), 1.0, gate))
        await gate.wait()
        status = Status("online", "other", "training").encode()
        nest.broker.publish("eve", topics.status("nest", "a"), status, True)
        nest.broker.publish("eve", topics.card("nest", "a"), FOREIGN, True)
        member = life.peer.link
        await until(lambda: member._own_card._restored_at > 0)  # it thought of putting it back
        kept = read_card(nest.broker.retained[topics.card("nest", "a")])
        gate.open()
        await nest.all()
        return kept

    kept = run(scenario())
    assert kept is not None
    assert kept.session == "other"


def test_nobody_puts_back_the_card_of_a_peer_that_left(run):
    async def scenario():
        nest = Nest(quick(rounds=2))
        nest.start("a")
        await nest.all()
        return nest.broker.retained

    assert topics.card("nest", "a") not in run(scenario())
