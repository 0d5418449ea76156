"""A peer that was given up comes back in the same life: no nonce and no packet of before comes back too."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trust_kit import ONLINE, SWARM, group, introduce, person, received, settle, wake

from gossamer.gossip import topics
from gossamer.gossip.security import TrustError
from gossamer.gossip.security import channels as module
from gossamer.gossip.security import keyring as keyring_module
from gossamer.gossip.security.channel import WINDOW, Window, packet_key
from gossamer.gossip.security.channels import Past
from gossamer.gossip.security.keyring import Keyring


@pytest.fixture
def used(monkeypatch):
    """Every (key, nonce) that anything was sealed with."""
    found: list[tuple[bytes, int]] = []
    keys: dict[int, bytes] = {}
    seal = Keyring._seal

    def key_spy(*args):
        keys[0] = packet_key(*args)
        return keys[0]

    def seal_spy(self, channel, model, epoch, packet):
        self._ciphers.clear()  # so that the key is derived, and seen, every time
        sealed = seal(self, channel, model, epoch, packet)
        found.append((keys[0], int.from_bytes(sealed[16:24], "little")))
        return sealed

    monkeypatch.setattr(keyring_module, "packet_key", key_spy)
    monkeypatch.setattr(Keyring, "_seal", seal_spy)
    return found


def given_up_and_back(one, other, clock):
    """One gives the other up, wrongly; the other publishes its card and status again."""
    one.trust.gone(other.name, other.session)
    clock.now += 1
    assert one.trust.hear(topics.card(SWARM, other.name), other.trust.card(b"{}"))
    assert one.trust.hear(topics.status(SWARM, other.name), other.trust.status(ONLINE))


@pytest.mark.parametrize("who", [0, 1, 2])
def test_no_nonce_is_used_again_for_a_life_that_comes_back(used, who):
    people, clock = group("anna", "ben", "carl")
    one, other = people[who], people[(who + 1) % 3]
    for _ in range(3):
        for _ in range(5):
            assert one.packets(other)
        given_up_and_back(one, other, clock)
        settle(people, clock)
    assert one.packets(other)
    assert len(used) > 15
    assert len(set(used)) == len(used)


def test_a_session_that_changes_and_changes_back_repeats_no_nonce(used):
    (anna, ben), clock = group("anna", "ben")
    member = anna.trust.register.members[ben.name]
    for session in (ben.session, "another", ben.session):
        anna.trust.keyring.admit(replace(member, session=session), clock.now)
        for _ in range(5):
            assert anna.packets(ben)
    assert len(set(used)) == len(used) >= 15


def test_packets_pass_both_ways_when_a_life_is_back():
    """The other end has not noticed anything: it goes on where it was."""
    (anna, ben, carl), clock = group("anna", "ben", "carl")
    for one, other in ((carl, ben), (ben, carl)):
        for _ in range(5):
            assert received(other, one.packets(other))
    given_up_and_back(carl, ben, clock)
    settle([anna, ben, carl], clock)
    assert received(ben, carl.packets(ben))
    assert received(carl, ben.packets(carl))


def test_packets_of_before_do_not_count_again_when_a_life_is_back():
    """Carl is not the keeper: the key is the same, and old packets would fit."""
    (_, ben, carl), clock = group("anna", "ben", "carl")
    old = [packet for _ in range(5) for packet in ben.packets(carl)]
    assert len(received(carl, old)) == 5
    given_up_and_back(carl, ben, clock)
    assert received(carl, old) == []
    assert carl.trust.counters == {"untrusted-replayed": 5}
    # Nor after another life of Ben was here in between.
    clock.now += 1
    introduce([carl, wake(ben.identity, ben.admission, clock)])
    clock.now += 1
    assert carl.trust.hear(topics.card(SWARM, ben.name), ben.trust.card(b"{}"))
    assert received(carl, old) == []
    assert carl.trust.counters == {"untrusted-replayed": 10}


def test_lives_beyond_those_remembered_are_refused_and_newer_ones_are_not():
    (anna, ben), clock = group("anna", "ben")
    first = anna.trust.register.members[ben.name]
    for number in range(module.MAX_LIVES + 1):
        clock.now += 1
        life = wake(ben.identity, ben.admission, clock, session=f"s{number}")
        introduce([anna, life])
        settle([anna, life], clock)  # or nothing came of it that could come back
    clock.now += 1
    with pytest.raises(
        TrustError, match=r"began before others of it that are over: start it again"
    ):
        anna.trust.keyring.admit(first, clock.now)
    assert anna.trust.hear(topics.card(SWARM, ben.name), ben.trust.card(b"{}")) == []
    assert anna.trust.counters == {"untrusted-stale": 1}
    assert received(anna, life.packets(anna))  # and nothing was changed by the attempt
    assert anna.trust.register.members[ben.name].session == life.session
    clock.now += 1
    introduce([anna, wake(ben.identity, ben.admission, clock, session="next")])
    assert anna.trust.register.members[ben.name].session == "next"


def test_a_past_takes_up_bounded_room():
    past = Past()
    for number in range(10 * module.MAX_LIVES):
        past.note(number.to_bytes(32, "big"), float(number), 7)
    assert len(past._tops) == module.MAX_LIVES


def test_more_names_than_can_be_remembered_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    (anna, ben, carl), clock = group("anna", "ben", "carl")
    anna.trust.gone(ben.name, ben.session)  # remembered, so it counts
    introduce([anna, person("dora", clock)])
    assert anna.trust.counters == {"untrusted-used-up": 1}
    assert list(anna.trust.register.members) == [carl.name]
    given_up_and_back(anna, carl, clock)  # who is known may return


def test_a_window_that_goes_on_refuses_all_up_to_its_top():
    window = Window(9000)
    assert not any(window.fresh(number) for number in range(9001))
    assert window.fresh(9001)
    window.note(9000 + 2 * WINDOW)
    assert window.fresh(9001 + WINDOW)
    assert not window.fresh(9001)
