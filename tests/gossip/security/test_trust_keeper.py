"""Who keeps the keys when somebody is dead: cards and last words that outlive their peers."""

from __future__ import annotations

import logging

from trust_kit import ONLINE, SWARM, Clock, group, introduce, person, received, settle

from gossamer.gossip import topics
from gossamer.gossip.security.epochs import SILENCE, Epoch, ModelKey

OFFLINE = b'{"state": "offline"}'


def three(clock):
    people = []
    for label in ("anna", "ben", "carl"):
        people.append(person(label, clock))
        clock.now += 1
    return people


def left_behind(dead, people, status):
    """The broker shows a card and a status of somebody who is dead."""
    card = dead.trust.card(b"{}")
    for one in people:
        assert one.trust.hear(topics.card(SWARM, dead.name), card)
        one.trust.hear(topics.status(SWARM, dead.name), status)


def test_the_card_of_a_dead_peer_does_not_make_it_the_keeper():
    clock = Clock()
    anna, *people = three(clock)
    left_behind(anna, people, anna.trust.will(OFFLINE))
    introduce(people)
    settle(people, clock, rounds=3)  # no time passes to speak of
    assert {one.trust.keyring.epoch("global") for one in people} == {Epoch(1, people[0].name)}
    assert received(people[1], people[0].packets(people[1]))


def test_nobody_tells_keys_to_a_card_alone():
    clock = Clock()
    anna, ben, carl = three(clock)
    left_behind(anna, [ben], anna.trust.will(OFFLINE))
    assert ben.trust.tick() == ([], [])
    introduce([ben, carl])
    clock.now += 1000
    assert [receiver for receiver, _, _ in ben.trust.tick()[0]] == [carl.name]


def test_who_is_there_is_told_the_key_of_a_model_that_it_is_admitted_to_later():
    """Its card changes, and no new status has to come."""
    clock = Clock()
    anna, ben = (person(label, clock, ("global", "blue")) for label in ("anna", "ben"))
    ben.trust._models = frozenset({"global"})
    introduce([anna, ben])
    ben.trust._models = frozenset({"global", "blue"})
    anna.trust.hear(topics.card(SWARM, ben.name), ben.trust.card(b"{}"))
    assert ("blue", ben.name) in {(model, to) for to, model, _ in anna.trust.tick()[0]}


def test_who_was_there_and_is_offline_stays_the_keeper():
    """Keys change when a session is gone for good, not with every link that is down."""
    (anna, ben, carl), clock = group("anna", "ben", "carl")
    for one in (ben, carl):
        one.trust.hear(topics.status(SWARM, anna.name), anna.trust.will(OFFLINE))
    clock.now += 10 * SILENCE
    settle([ben, carl], clock)
    assert {one.trust.keyring.epoch("global").keeper for one in (ben, carl)} == {anna.name}


def test_a_keeper_that_never_speaks_is_passed_over_with_one_warning(caplog):
    """Its last status says that it is online: the broker went down together with it."""
    clock = Clock()
    anna, *people = three(clock)
    left_behind(anna, people, anna.trust.status(ONLINE))
    introduce(people)
    with caplog.at_level(logging.WARNING):
        settle(people, clock, rounds=3)
        assert {one.trust.keyring.epoch("global") for one in people} == {None}
        assert "has had no key" not in caplog.text
        clock.now += SILENCE
        settle(people, clock)
        clock.now += 10 * SILENCE
        settle(people, clock)
    assert {one.trust.keyring.epoch("global") for one in people} == {Epoch(1, people[0].name)}
    assert received(people[0], people[1].packets(people[0]))
    (line,) = [r.getMessage() for r in caplog.records if "has had no key" in r.getMessage()]
    assert line == (
        f"peer {people[0].name} has had no key of model global for {SILENCE:g} s: it is expected from "
        f"{anna.name}, which is passed over now"
    )


def test_a_keeper_that_was_only_slow_keeps_the_key_when_it_speaks():
    clock = Clock()
    people = three(clock)
    anna, *others = people
    introduce(people)
    settle(others, clock, rounds=2)
    clock.now += SILENCE
    settle(others, clock)
    assert {one.trust.keyring.epoch("global").keeper for one in others} == {others[0].name}
    settle(people, clock, rounds=20)
    (epoch,) = {one.trust.keyring.epoch("global") for one in people}
    assert epoch.keeper == anna.name
    clock.now += 10 * SILENCE
    settle(people, clock)
    assert {one.trust.keyring.epoch("global") for one in people} == {epoch}  # and there is peace


def test_who_lacks_a_key_gets_one_though_all_before_it_are_silent():
    """They live, but believe in a keeper that does not: each is passed over, and told in the end."""
    key = ModelKey("m", "carl", 3.0)
    for name, since in (("anna", 1.0), ("ben", 2.0)):
        key.join(name, since, 0.0)
        key.seen(name)
    assert [key.pass_over(now) for now in (0.0, SILENCE, 2 * SILENCE)] == [None, "anna", "ben"]
    assert {member for member, _ in key.due(2 * SILENCE)} == {"anna", "ben"}
    assert key.pass_over(9 * SILENCE) is None


def test_a_key_message_proves_that_its_sender_is_there():
    """Though no status of it has come: else two keepers would take turns for ever."""
    ben = ModelKey("m", "ben", 2.0)
    ben.join("anna", 1.0, 0.0)
    assert ben.keeper == "ben"
    ben.hear("anna", {"kind": "key", "number": 1, "keeper": "anna", "key": bytes(32)}, 0.0)
    assert ben.keeper == "anna"
    assert ben.due(100.0) == []


def test_a_key_that_a_leaver_knows_is_told_to_nobody_new():
    """Also if nobody else was there when it left."""
    (anna, ben), clock = group("anna", "ben")
    known = anna.trust.keyring.epoch("global")
    anna.trust.gone(ben.name, ben.session)
    carl = person("carl", clock)
    introduce([anna, carl])
    settle([anna, carl], clock)
    assert carl.trust.keyring.epoch("global").number > known.number
    assert received(carl, anna.packets(carl))
