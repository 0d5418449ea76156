"""The key of a partial model: everybody gets it, leavers lose it, two keepers agree."""

from __future__ import annotations

import numpy as np
import pytest
from trust_kit import SWARM, Clock, group, introduce, person, received, settle, wake

from gossamer.gossip import topics
from gossamer.gossip.security import TrustError
from gossamer.gossip.security.epochs import KEPT, MAX_JUMP, Epoch, ModelKey


def epochs(people):
    return {one.trust.keyring.epoch("global") for one in people}


def all_pairs_understand(people):
    for one in people:
        for other in people:
            if one is not other:
                assert received(other, one.packets(other)), (one.name, other.name)


def test_the_eldest_keeps_the_key_and_everybody_gets_it():
    people, _ = group("anna", "ben", "carl", "dora")
    assert epochs(people) == {Epoch(1, people[0].name)}
    all_pairs_understand(people)


def test_a_newcomer_gets_the_same_key():
    people, clock = group("anna", "ben")
    people.append(person("carl", clock))
    introduce(people)
    settle(people, clock)
    assert epochs(people) == {Epoch(1, people[0].name)}
    all_pairs_understand(people)


@pytest.mark.parametrize("leaver", [0, 1])
def test_the_key_changes_when_somebody_is_out(leaver):
    """Also when it is the keeper itself; and the leaver does not get the new one."""
    people, clock = group("anna", "ben", "carl")
    gone = people.pop(leaver)
    old = gone.trust.keyring.epoch("global")
    for one in people:
        one.trust.gone(gone.name, gone.session)
    settle([*people, gone], clock)
    (new,) = epochs(people)
    assert new.number == 2
    assert new.keeper == people[0].name
    assert gone.trust.keyring.epoch("global") == old
    all_pairs_understand(people)
    assert not received(people[0], gone.packets(people[0]))


def test_who_is_only_offline_keeps_its_place():
    """Keys change when a session is gone for good, not when a link is down for a while."""
    people, clock = group("anna", "ben")
    clock.now += 300
    settle(people, clock)
    assert epochs(people) == {Epoch(1, people[0].name)}


def test_a_late_word_about_an_old_session_changes_nothing():
    people, clock = group("anna", "ben")
    anna, ben = people
    anna.trust.gone(ben.name, "some older session")
    settle(people, clock)
    assert epochs(people) == {Epoch(1, anna.name)}
    all_pairs_understand(people)


def test_a_lost_key_is_told_again():
    clock = Clock()
    anna = person("anna", clock)
    clock.now += 1
    ben = person("ben", clock)
    introduce([anna, ben])
    assert len(anna.trust.tick()[0]) == 1  # lost
    assert anna.trust.tick()[0] == []
    assert ben.packets(anna) == []
    assert ben.trust.counters["untrusted-no-key"] == 1
    clock.now += 2
    settle([anna, ben], clock)
    all_pairs_understand([anna, ben])
    assert anna.trust.tick()[0] == []  # answered: no more of it
    clock.now += 1000
    assert anna.trust.tick()[0] == []


def test_a_restarted_member_is_told_again_and_a_restarted_keeper_gives_way():
    people, clock = group("anna", "ben", "carl")
    for index in (1, 0):
        old = people[index]
        clock.now += 5
        people[index] = wake(old.identity, old.admission, clock, session=old.session)
        introduce(people)
        settle(people, clock)
        (epoch,) = epochs(people)
        assert epoch.number >= 1
        all_pairs_understand(people)
    assert people[2].trust.keyring.epoch("global").keeper == people[2].name


def test_two_halves_that_meet_agree_on_one_key():
    clock = Clock()
    people = []
    for label in ("anna", "ben", "carl", "dora"):
        people.append(person(label, clock))
        clock.now += 0.01
    left, right = people[:2], people[2:]
    introduce(left)
    introduce(right)
    settle(left, clock)
    settle(right, clock)
    extra = person("eric", clock)
    introduce([*right, extra])
    for one in right:  # the right half has been through one more change of members
        one.trust.gone(extra.name, extra.session)
    settle(right, clock)
    assert {e.number for e in epochs(left)} == {1}
    assert {e.number for e in epochs(right)} == {2}
    introduce(people)
    settle(people, clock, rounds=20)
    assert epochs(people) == {Epoch(3, people[0].name)}
    all_pairs_understand(people)


def test_equal_epochs_of_two_keepers_go_to_the_smaller_name():
    low, high = Epoch(4, "anna"), Epoch(4, "ben")
    assert low.beats(high)
    assert not high.beats(low)
    assert Epoch(5, "ben").beats(low)
    assert not low.beats(low)


def test_under_any_order_of_messages_and_losses_members_end_with_one_key():
    """Joins, leaves and losses at random; then quiet: one key, known to those who stayed."""
    for seed in range(15):
        rng = np.random.default_rng(seed)
        now, keys, since = 0.0, {}, {}
        network: list[tuple[str, str, dict]] = []
        for step in range(60):
            now += rng.random()
            action = rng.random()
            if action < 0.3 and len(keys) < 6:
                name = f"p{step}"
                since[name] = rng.random() * 10
                keys[name] = ModelKey("m", name, since[name])
            elif action < 0.4 and len(keys) > 2:
                gone = sorted(keys)[rng.integers(len(keys))]
                del keys[gone]
                for key in keys.values():
                    key.leave(gone, now)
            for a in keys.values():  # cards arrive, sooner or later
                for b in keys:
                    if b != a.me and b not in a.members and rng.random() < 0.5:
                        a.join(b, since[b], now)
                    elif b in a.members and rng.random() < 0.5:  # and so do statuses
                        a.seen(b)
            network = deliver(keys, network, now, rng, loss=0.4)
        for _ in range(200):
            now += 1.0
            for a in keys.values():
                for b in keys:
                    if b != a.me and b not in a.members:
                        a.join(b, since[b], now)
                    a.seen(b)
            network = deliver(keys, network, now, rng, loss=0.0)
        eldest = min(keys, key=lambda name: (since[name], name))
        assert {key.keeper for key in keys.values()} == {eldest}
        assert len({key.current for key in keys.values()}) == 1, seed
        assert len({key.keys[key.current] for key in keys.values()}) == 1
        assert all(len(key.keys) <= KEPT for key in keys.values())


def deliver(keys, network, now, rng, loss):
    for key in keys.values():
        key.pass_over(now)
        network += [(key.me, to, message) for to, message in key.due(now)]
    later = []
    for sender, to, message in network:
        if rng.random() < loss or to not in keys or sender not in keys[to].members:
            continue
        later += [(to, sender, answer) for answer in keys[to].hear(sender, message, now)]
    return later


def test_nonsense_about_keys_changes_nothing():
    key = ModelKey("m", "anna", 0.0)
    key.join("ben", 1.0, 0.0)
    before = (key.current, dict(key.keys))
    good = {"kind": "key", "number": 5, "keeper": "ben", "key": bytes(32)}
    for change in (
        {"kind": "other"}, {"number": -1}, {"number": MAX_JUMP + 2}, {"number": "5"},
        {"keeper": 7}, {"keeper": "carl"}, {"key": bytes(31)}, {"key": "x" * 32}, {"keeper": "x" * 65},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r".+"):
            key.hear("ben", good | change, 0.0)
        assert (key.current, dict(key.keys)) == before


def test_two_peers_share_a_secret_for_masks_that_outlives_a_restart():
    people, clock = group("anna", "ben", "carl")
    anna, ben, carl = people
    secret = anna.trust.keyring.mask_secret(ben.name)
    assert secret == ben.trust.keyring.mask_secret(anna.name)
    assert secret != carl.trust.keyring.mask_secret(anna.name)
    memory = ben.trust.snapshot()
    for session, same in ((ben.session, True), ("afresh", False)):
        clock.now += 1
        again = wake(ben.identity, ben.admission, clock, session=session, memory=memory)
        introduce([anna, again])
        found = again.trust.keyring.mask_secret(anna.name)
        assert found == anna.trust.keyring.mask_secret(ben.name)
        assert (found == secret) is same


def test_masks_cannot_be_drawn_again_from_the_key_file_alone():
    """Whoever seizes a device must not unmask what was averaged in sessions whose checkpoint is gone."""
    (anna, ben), clock = group("anna", "ben")
    secret = anna.trust.keyring.mask_secret(ben.name)
    clock.now += 1
    seized = wake(ben.identity, ben.admission, clock, session=ben.session)
    seized.trust.hear(topics.card(SWARM, anna.name), anna.trust.card(b"{}"))
    assert seized.trust.keyring.mask_secret(anna.name) != secret


def test_the_key_of_masks_is_deleted_with_its_session():
    (anna, ben), _ = group("anna", "ben")
    assert anna.trust.snapshot()["masks"]["session"] == anna.session
    anna.trust.end_session()
    assert "masks" not in anna.trust.snapshot()
    with pytest.raises(TrustError, match="the session is over"):
        anna.trust.keyring.mask_secret(ben.name)
