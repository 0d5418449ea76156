"""Cards and exchange keys that grow old: refused, issued again, renewed, deleted."""

from __future__ import annotations

import pytest
from trust_kit import ONLINE, SWARM, Clock, group, person, received, settle, wake

from gossamer.gossip import topics
from gossamer.gossip.security.channel import packet_key
from gossamer.gossip.security.channels import OVERLAP
from gossamer.gossip.security.invitation import CLOCK_SKEW
from gossamer.gossip.security.register import MAX_CARD_AGE
from gossamer.gossip.security.trust import CARD_INTERVAL, EXCHANGE_INTERVAL


def hears_card(listener, speaker, card=None):
    card = card or speaker.trust.card(b"{}")
    return bool(listener.trust.hear(topics.card(SWARM, speaker.name), card))


def reissues(person):
    """Whether a tick asks for the card to be published again."""
    return [each.kind for each in person.trust.tick()[1]] == ["reissue-card"]


# --- the age of cards --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "known"), [(MAX_CARD_AGE, True), (MAX_CARD_AGE + CLOCK_SKEW + 1, False), (300 * 86_400, False)]
)  # fmt: skip
def test_an_old_card_is_refused_by_name(caplog, age, known):
    clock = Clock()
    ben = person("ben", clock)
    card = ben.trust.card(b"{}")
    clock.now += age
    anna = person("anna", clock)
    assert hears_card(anna, ben, card) is known
    assert anna.trust.counters == ({} if known else {"untrusted-old-card": 1})
    assert (f"the card of {ben.name} was issued {age / 3600:.0f} h ago" in caplog.text) is not known


def test_a_card_is_issued_again_long_before_it_is_too_old():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    assert not reissues(ben)  # nothing was published yet
    ben.trust.card(b"{}")
    clock.now += CARD_INTERVAL - 1
    assert not reissues(ben)
    clock.now += 1
    assert ben.trust.card_due()
    assert reissues(ben)
    clock.now += 5
    assert hears_card(anna, ben)
    assert not reissues(ben)
    assert CARD_INTERVAL < MAX_CARD_AGE / 2


def test_a_card_is_issued_again_when_the_clock_was_set():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    assert hears_card(anna, ben)
    ben.trust._wall = lambda: clock.wall() - 2 * CARD_INTERVAL
    assert ben.trust.card_due()
    assert hears_card(anna, ben)  # numbered higher in the same incarnation, whatever its date
    assert anna.trust.register.members[ben.name].edition.issued < clock.wall()


def test_an_older_card_of_the_same_start_does_not_come_back():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    old, new = ben.trust.card(b"old"), ben.trust.card(b"new")
    assert hears_card(anna, ben, new)
    assert not hears_card(anna, ben, old)
    assert anna.trust.counters == {"untrusted-stale": 1}


# --- exchange keys -----------------------------------------------------------------------------------


def renewed(*labels):
    """A group whose first member has just renewed its exchange key, and not shown its card yet."""
    people, clock = group(*labels)
    people[0].trust.keyring.renew_exchange(clock.now)
    return people, clock


def test_an_exchange_key_is_renewed_every_day():
    (anna, _), clock = group("anna", "ben")
    seen = {anna.trust.keyring.exchange}
    for _ in range(3):
        clock.now += EXCHANGE_INTERVAL - 60
        anna.trust.tick()
        assert anna.trust.keyring.exchange in seen
        clock.now += 60
        anna.trust.tick()
        seen.add(anna.trust.keyring.exchange)
    assert len(seen) == 4


def test_a_device_that_slept_renews_its_key_too():
    """While it sleeps, the clock that only goes on stands still."""
    (anna, _), clock = group("anna", "ben")
    anna.trust._wall = lambda: clock.wall() + EXCHANGE_INTERVAL
    before = anna.trust.keyring.exchange
    anna.trust.tick()
    assert anna.trust.keyring.exchange != before


def test_packets_pass_both_ways_all_through_a_renewal():
    (anna, ben, carl), _ = renewed("anna", "ben", "carl")
    under_way = ben.packets(anna, sequence=7)
    # Ben has not seen the new card: both use the former key.
    assert received(ben, anna.packets(ben))
    assert received(anna, ben.packets(anna))
    late = anna.packets(ben, sequence=8)
    assert hears_card(ben, anna)
    # Ben has, and Anna does not know that yet.
    assert received(ben, anna.packets(ben))
    assert received(anna, ben.packets(anna))
    # Now both use the new one; what was sealed before still counts, once.
    assert received(ben, anna.packets(ben))
    assert received(ben, late)
    assert received(anna, under_way)
    assert not received(anna, under_way)
    assert received(anna, carl.packets(anna))
    assert anna.trust.counters == {"untrusted-replayed": 1}
    assert not ben.trust.counters
    assert not carl.trust.counters


def test_both_ends_may_renew_at_once():
    (anna, ben), clock = group("anna", "ben")
    clock.now += EXCHANGE_INTERVAL
    crossing = anna.packets(ben, sequence=5), ben.packets(anna, sequence=5)
    assert reissues(anna)
    assert reissues(ben)
    cards = anna.trust.card(b"{}"), ben.trust.card(b"{}")
    assert hears_card(ben, anna, cards[0])
    assert hears_card(anna, ben, cards[1])
    assert received(ben, crossing[0])
    assert received(anna, crossing[1])
    for _ in range(2):
        assert received(ben, anna.packets(ben))
        assert received(anna, ben.packets(anna))
    clock.now += OVERLAP
    settle([anna, ben], clock)
    assert received(ben, anna.packets(ben))
    assert received(anna, ben.packets(anna))


def test_a_renewal_changes_neither_presence_nor_the_models_keys():
    (anna, ben), _ = renewed("anna", "ben")
    epoch = ben.trust.keyring.epoch("global")
    assert hears_card(ben, anna)
    assert ben.trust.keyring.present() == [anna.name]
    assert ben.trust.keyring.epoch("global") == epoch
    assert ben.trust.tick() == ([], [])
    assert ben.trust.hear(topics.status(SWARM, anna.name), anna.trust.status(ONLINE))


def test_a_former_key_is_deleted_and_opens_nothing_any_more():
    (anna, ben), clock = renewed("anna", "ben")
    late = ben.packets(anna, sequence=9)
    clock.now += OVERLAP
    anna.trust.tick()
    assert received(anna, late) == []
    assert anna.trust.counters == {"untrusted-stale": 1}
    assert anna.packets(ben)  # with the new key, whether Ben has seen it or not
    assert received(ben, anna.packets(ben)) == []
    assert hears_card(ben, anna)
    assert received(ben, anna.packets(ben))
    assert received(anna, ben.packets(anna))


def test_a_running_peers_memory_does_not_open_what_was_recorded_days_before():
    """Ben goes on; Anna, with whom he spoke, was started again. Both her cards were recorded."""
    (anna, ben), clock = group("anna", "ben")
    recorded, her_key = ben.packets(anna)[0], anna.trust.keyring.exchange
    first = ben.trust.keyring.exchange
    again = wake(anna.identity, anna.admission, clock)
    assert hears_card(ben, again)
    clock.now += EXCHANGE_INTERVAL
    ben.trust.tick()
    clock.now += OVERLAP
    ben.trust.tick()
    keyring = ben.trust.keyring
    assert recorded
    assert first not in [key.public for key in keyring._own]
    assert [len(channel.exchanges) for channel in keyring._channels._by_name.values()] == [1]
    assert not keyring._ciphers
    # His new key and her old card make another secret than the one that sealed the recording.
    place = b"any"
    then = packet_key(SWARM, keyring._own[0], anna.name, her_key, b"", place)
    assert then != packet_key(SWARM, anna.trust.keyring._own[0], ben.name, first, b"", place)
