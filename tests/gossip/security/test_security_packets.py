"""What somebody with full access to the broker, or another member, can do with packets: nothing.

Each test has a twin in spirit: it names a protection, and fails if that protection is taken away.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from security_kit import (
    ONLINE,
    SCHEMA,
    SWARM,
    Clock,
    WrongClock,
    exchange,
    group,
    hears_card,
    introduce,
    person,
    received,
    restarted,
    understand,
    wake,
)

from gossamer.gossip import topics
from gossamer.gossip.chunks import Chunker
from gossamer.gossip.security import OVERHEAD, Keyring, NullSecurity, TrustError
from gossamer.gossip.security.channels import (
    BLOCK_BITS,
    HEADER,
    MAX_INCARNATIONS,
    OVERLAP,
    WINDOW,
    ExchangeKey,
    FormerIncarnations,
    ReplayWindow,
    check_chunk_sender,
)
from gossamer.gossip.security.invitation import CLOCK_SKEW
from gossamer.gossip.security.layer import CARD_INTERVAL, EXCHANGE_INTERVAL
from gossamer.gossip.security.members import MAX_CARD_AGE
from gossamer.gossip.wire import decode, encode


def only(counters, cause):
    """The one cause that was counted, so far."""
    assert set(counters) == {f"untrusted-{cause}"}, counters
    return counters[f"untrusted-{cause}"]


def test_a_message_arrives_whole():
    (anna, ben), _ = group("anna", "ben")
    packets = anna.packets(ben, size=5000, limit=4096)
    assert len(packets) == 5
    assert max(map(len, packets)) <= 4096 + OVERHEAD
    (whole,) = received(ben, packets)
    message = decode(whole).message
    assert message.sender == anna.name
    np.testing.assert_array_equal(message.value, anna.give(ben, size=5000).value)
    assert not ben.security.counters


def test_a_sealed_packet_costs_what_overhead_says():
    (anna, ben), _ = group("anna", "ben")
    (chunk,) = anna.chunks(anna.give(ben))
    assert HEADER.size == 32
    assert len(anna.security.seal(ben.name, "global", chunk)) == len(chunk) + OVERHEAD


def test_nothing_has_to_be_said_before_the_first_packet():
    """Cards are enough: no key is handed around, whoever comes and goes."""
    people, clock = group("anna", "ben", "carl", "dora")
    assert exchange(people, clock, rounds=5) == 0
    assert all(understand(one, other) for one in people for other in people if one is not other)
    gone, *others = people
    for one in others:
        one.security.remove(gone.name, gone.session)
    assert exchange(others, clock, rounds=5) == 0
    assert understand(*others[:2])
    assert not received(others[0], gone.packets(others[0]))


def test_no_parameter_can_be_read():
    """The outsider searches what it captured for any eight bytes of the value."""
    (anna, ben), _ = group("anna", "ben")
    give = anna.give(ben, size=2000)
    packets = [anna.security.seal(ben.name, "global", chunk) for chunk in anna.chunks(give)]
    raw = give.value.tobytes()
    for at in range(0, len(raw), 8):
        assert not any(raw[at : at + 8] in packet for packet in packets)
    plain = b"".join(anna.chunks(give))
    assert all(raw[at : at + 8] in plain for at in range(0, 64, 8))  # the search does find


def test_the_same_packet_never_looks_the_same():
    (anna, ben), _ = group("anna", "ben")
    (chunk,) = anna.chunks(anna.give(ben))
    sealed = {anna.security.seal(ben.name, "global", chunk) for _ in range(100)}
    assert len({packet[HEADER.size :] for packet in sealed}) == 100


@pytest.mark.parametrize("place", ["mark", "tag", "number", "list", "body", "proof"])
def test_a_changed_byte_is_noticed(place):
    (anna, ben), _ = group("anna", "ben")
    (packet,) = anna.packets(ben)
    offsets = {"mark": 6, "tag": 9, "number": 17, "list": 24, "body": 60, "proof": -1}
    changed = bytearray(packet)
    changed[offsets[place]] ^= 1
    assert ben.security.open("global", bytes(changed)) is None
    assert sum(ben.security.counters.values()) == 1
    assert ben.security.open("global", packet) is not None  # and the true one still counts


def test_an_outsider_cannot_inject():
    """It knows every public key and tag, and makes packets with a key of its own."""
    (anna, ben), clock = group("anna", "ben")
    eve = person("anna", clock)  # the same label, another key
    assert ben.security.open("global", anna.chunks(anna.give(ben))[0]) is None  # unsealed
    assert only(ben.security.counters, "malformed") == 1
    assert hears_card(eve, ben)
    (packet,) = eve.packets(ben)
    assert ben.security.open("global", packet) is None
    assert ben.security.counters["untrusted-unknown-sender"] == 1
    borrowed = packet[:8] + anna.packets(ben)[0][8:16] + packet[16:]
    assert ben.security.open("global", borrowed) is None
    assert ben.security.counters["untrusted-forged"] == 1


def test_a_member_cannot_speak_for_another():
    """Carl is a member too, has all of Anna's public statements, and still cannot be Anna to Ben."""
    (anna, ben, carl), _ = group("anna", "ben", "carl")
    give = replace(carl.give(ben), sender=anna.name, session=anna.session)
    for named in (f"{anna.name}/{anna.session}", f"{carl.name}/{carl.session}"):
        (chunk,) = Chunker(named).split(encode(give, SCHEMA))
        opened = ben.security.open("global", carl.security.seal(ben.name, "global", chunk))
        if opened is not None:
            assert not ben.security.is_genuine(opened, decode(opened.packet[40:]).message)
    assert only(ben.security.counters, "impersonated") == 2
    # With Anna's tag on it, the key does not fit.
    sealed = carl.packets(ben)[0]
    forged = sealed[:8] + anna.packets(ben)[0][8:16] + sealed[16:]
    assert ben.security.open("global", forged) is None
    assert ben.security.counters["untrusted-forged"] == 1
    # Nor is a message from Anna to Carl one to Ben.
    assert ben.security.open("global", anna.packets(carl)[0]) is None


def test_the_check_of_senders_agrees_with_the_chunker():
    (packet,) = Chunker("anna@x/s").split([b"payload"])
    check_chunk_sender("anna@x", "s", packet)
    assert packet[8:16] == hashlib.blake2b(b"anna@x/s", digest_size=8).digest()
    for wrong in (("anna@x", "t"), ("ben@x", "s")):
        with pytest.raises(TrustError, match="another peer's message"):
            check_chunk_sender(*wrong, packet)
    with pytest.raises(TrustError):
        check_chunk_sender("anna@x", "s", packet[:20])


def test_a_packet_counts_once():
    (anna, ben), _ = group("anna", "ben")
    packets = anna.packets(ben, size=3000)
    assert len(received(ben, [packets[2], packets[0], packets[1], *packets[3:]])) == 1
    for packet in packets:
        assert ben.security.open("global", packet) is None
    assert only(ben.security.counters, "replayed") == len(packets)


def test_nothing_of_a_former_session_comes_back():
    (anna, ben), clock = group("anna", "ben")
    old = anna.packets(ben)
    clock.now += 1
    for change in ("ben", "anna"):
        if change == "ben":  # the receiver restarts: same session, new incarnation
            ben = wake(ben.identity, ben.admission, clock, session=ben.session)
        else:  # the sender starts afresh
            anna = wake(anna.identity, anna.admission, clock, session="another")
        introduce([anna, ben])
        assert [ben.security.open("global", packet) for packet in old] == [None] * len(old)
        fresh = anna.packets(ben)
        assert len(received(ben, fresh)) == 1
        old += fresh
        clock.now += 1
    causes = {cause.removeprefix("untrusted-") for cause in ben.security.counters}
    assert causes <= {"forged", "stale", "unknown-sender"}


def test_the_session_itself_is_bound():
    """Were it not, a card that claims another session would make old packets count again."""
    (anna, ben), clock = group("anna", "ben")
    (packet,) = anna.packets(ben)
    member = ben.security.register.members[anna.name]
    ben.security.keyring.admit(replace(member, session="another"), clock.now)
    assert ben.security.open("global", packet) is None
    assert only(ben.security.counters, "forged") == 1


def test_chunks_cannot_be_moved_into_another_message():
    """The outsider swaps chunks of two messages, or gives one the header of another."""
    (anna, ben), _ = group("anna", "ben")
    first, second = anna.packets(ben, size=3000, seed=1), anna.packets(ben, size=3000, seed=2)
    mixed = [first[0], second[1], *first[2:]]
    assert received(ben, mixed) == []  # each stays a part of its own message
    spliced = first[1][: HEADER.size] + second[1][HEADER.size :]
    assert ben.security.open("global", spliced) is None
    assert only(ben.security.counters, "forged") == 1


def test_a_packet_counts_in_its_own_inbox_alone():
    (anna, ben), _ = group("anna", "ben", models=("global", "blue"))
    (packet,) = anna.packets(ben, "blue")
    assert ben.security.open("global", packet) is None
    assert ben.security.open("blue", packet) is not None


def test_members_of_one_group_cannot_read_or_write_anothers():
    """Anna is in both groups, Ben in A, Carl in B: Ben gets nothing of B, and nothing in."""
    clock = Clock()
    anna = person("anna", clock, ("global", "group-a", "group-b"))
    ben = person("ben", clock, ("global", "group-a"))
    carl = person("carl", clock, ("global", "group-b"))
    introduce([anna, ben, carl])
    assert anna.security.seal(ben.name, "group-b", b"x") is None
    assert only(anna.security.counters, "not-a-member") == 1
    assert received(carl, anna.packets(carl, "group-b"), "group-b")
    for model in ("group-b", "group-a", "global"):
        for packet in anna.packets(carl, "group-b"):
            assert ben.security.open(model, packet) is None
    # A keyring that takes itself for a member's of B seals, and Carl does not take it.
    cheating = Keyring(ben.identity, anna.security.register.owner, ben.session, SWARM, ["group-b"])
    cheating.admit(ben.security.register.members[carl.name], clock.now)
    member = carl.security.register.members[ben.name]
    member = replace(member, incarnation=cheating.incarnation, exchange=cheating.exchange)
    carl.security.keyring.admit(member, 0.0)
    chunk = ben.chunks(ben.give(carl, "group-b"))[0]
    assert carl.security.open("group-b", cheating.seal(carl.name, "group-b", chunk)) is None
    assert only(carl.security.counters, "not-a-member") == 1


def test_a_card_cannot_claim_models_beyond_its_invitation():
    clock = Clock()
    anna, ben = person("anna", clock, ("global", "group-b")), person("ben", clock)
    assert hears_card(anna, ben, ben.forged_card(models=frozenset({"global", "group-b"})))
    assert anna.security.register.members[ben.name].models == {"global"}


def test_a_pair_has_another_secret_in_another_swarm_and_under_another_owner():
    one, other = ExchangeKey("anna@x"), ExchangeKey("ben@y")
    secret = one.pair_secret(b"owner", SWARM, other.name, other.public)
    assert secret == other.pair_secret(b"owner", SWARM, one.name, one.public)
    assert secret != one.pair_secret(b"owner", "meadow", other.name, other.public)
    assert secret != one.pair_secret(b"another", SWARM, other.name, other.public)
    assert secret != one.pair_secret(b"owner", SWARM, "carl@y", other.public)


@pytest.mark.parametrize("key", ["exchange", "masks"])
def test_a_key_of_no_use_is_refused(key):
    """All zeros make a secret that everybody knows, and would end a private round of whoever took it in."""
    (anna, ben), clock = group("anna", "ben")
    member = ben.security.register.members[anna.name]
    with pytest.raises(TrustError, match="not a usable key"):
        ben.security.keyring.admit(replace(member, **{key: bytes(32)}), clock.now)
    assert received(ben, anna.packets(ben))  # and nothing was changed by the attempt


def test_the_window_lets_every_number_through_once():
    window, rng = ReplayWindow(), np.random.default_rng(0)
    order = np.arange(20_000)
    for start in range(0, len(order), 500):  # overtaking within a window
        rng.shuffle(order[start : start + 500])
    for number in map(int, order):
        assert window.is_new(number)
        window.add(number)
        assert not window.is_new(number)
    assert not window.is_new(20_000 - WINDOW - 1)
    window.add(10**9)
    assert not window.is_new(19_999)
    assert window.is_new(10**9 - 1)
    assert window.is_new(10**9 + 1)


def test_without_security_everything_passes_unchanged():
    security = NullSecurity("anna")
    assert security.seal("ben", "global", b"packet") == b"packet"
    opened = security.open("global", b"packet")
    assert opened is not None
    assert opened.packet == b"packet"
    (heard,) = security.receive(topics.card(SWARM, "ben"), b"card")
    assert (heard.kind, heard.peer, heard.body) == ("card", "ben", b"card")
    assert security.card(b"x") == security.status(b"x") == security.will(b"x") == b"x"


def test_what_no_member_can_have_sealed_is_told_without_opening_it():
    """So that it need not be kept until there is time to open it."""
    (anna, ben), _ = group("anna", "ben")
    (packet,) = anna.packets(ben)
    assert ben.security.expects("global", packet)
    assert not ben.security.counters
    for stranger, cause in (
        (bytes(1000), "malformed"),
        (b"", "malformed"),
        (packet[:4] + b"\2" + packet[5:], "malformed"),  # of the version before
        (packet[:8] + bytes(8) + packet[16:], "unknown-sender"),
    ):
        assert not ben.security.expects("global", stranger)
        assert ben.security.counters.pop(f"untrusted-{cause}") == 1
    assert not ben.security.expects("other", packet)
    assert ben.security.counters == {"untrusted-not-a-member": 1}
    assert ben.security.open("global", packet) is not None  # nothing was used up


# --- numbers: no nonce and no packet comes back -------------------------------------------------------


class Nonces:
    """What was sealed by whom for whom: a nonce counts under a key of the sender and one receiver."""

    def __init__(self):
        self.seen, self.count = set(), 0

    def note(self, sender, receiver, packets):
        assert packets
        for packet in packets:
            self.count += 1
            self.seen.add((sender.name, receiver.name, packet[16:24]))

    @property
    def repeated(self):
        return self.count - len(self.seen)


def given_up_and_back(one, other, clock):
    """One gives the other up, wrongly; the other publishes its card and status again."""
    one.security.remove(other.name, other.session)
    clock.now += 1
    assert hears_card(one, other)
    assert one.security.receive(topics.status(SWARM, other.name), other.security.status(ONLINE))


def test_nonces_are_never_used_twice():
    """Whatever changes: models, exchange keys, members."""
    (anna, ben, carl), clock = group("anna", "ben", "carl", models=("global", "blue"))
    nonces = Nonces()
    for round in range(3):
        for model in ("global", "blue"):
            nonces.note(anna, ben, anna.packets(ben, model, size=3000))
            if round < 2:
                nonces.note(anna, carl, anna.packets(carl, model))
        if round == 1:
            anna.security.remove(carl.name, carl.session)
            anna.security.keyring.renew_exchange(clock.now)
            hears_card(ben, anna)
            received(anna, ben.packets(anna))  # so that Anna uses her new key
    assert nonces.count > 20
    assert nonces.repeated == 0


@pytest.mark.parametrize("who", [0, 1, 2])
def test_no_nonce_is_used_again_for_an_incarnation_that_comes_back(who):
    people, clock = group("anna", "ben", "carl")
    one, other = people[who], people[(who + 1) % 3]
    nonces = Nonces()
    for _ in range(3):
        for _ in range(5):
            nonces.note(one, other, one.packets(other))
        given_up_and_back(one, other, clock)
    nonces.note(one, other, one.packets(other))
    assert nonces.count > 15
    assert nonces.repeated == 0


def test_a_session_that_changes_and_changes_back_repeats_no_nonce():
    (anna, ben), clock = group("anna", "ben")
    member, nonces = anna.security.register.members[ben.name], Nonces()
    for session in (ben.session, "another", ben.session):
        anna.security.keyring.admit(replace(member, session=session), clock.now)
        for _ in range(5):
            nonces.note(anna, ben, anna.packets(ben))
    assert nonces.count == 15
    assert nonces.repeated == 0


def test_keys_change_every_so_many_packets_and_nobody_notices():
    (anna, ben), _ = group("anna", "ben")
    ben.packets(anna)
    to_ben = anna.security.keyring.claimed_channel("global", ben.packets(anna)[0])
    to_ben.last_number = (1 << BLOCK_BITS) - 4
    packets = [packet for _ in range(8) for packet in anna.packets(ben)]
    order = [*packets[5:], *packets[:5]]  # also where the order is lost
    assert len(received(ben, order)) == 8
    assert not ben.security.counters


def test_packets_pass_both_ways_when_an_incarnation_is_back():
    """The other end has not noticed anything: it goes on where it was."""
    (_, ben, carl), clock = group("anna", "ben", "carl")
    for _ in range(5):
        assert understand(ben, carl)
    given_up_and_back(carl, ben, clock)
    assert understand(ben, carl)


def test_packets_of_before_do_not_count_again_when_an_incarnation_is_back():
    """The keys are the same, and old packets would fit."""
    (_, ben, carl), clock = group("anna", "ben", "carl")
    old = [packet for _ in range(5) for packet in ben.packets(carl)]
    assert len(received(carl, old)) == 5
    given_up_and_back(carl, ben, clock)
    assert received(carl, old) == []
    assert carl.security.counters == {"untrusted-replayed": 5}
    # Nor after another incarnation of Ben was here in between.
    clock.now += 1
    introduce([carl, wake(ben.identity, ben.admission, clock)])
    clock.now += 1
    assert hears_card(carl, ben)
    assert received(carl, old) == []
    assert carl.security.counters == {"untrusted-replayed": 10}


def test_incarnations_beyond_those_remembered_are_refused_and_newer_ones_are_not():
    (anna, ben), clock = group("anna", "ben")
    first = anna.security.register.members[ben.name]
    assert received(anna, ben.packets(anna))
    for number in range(MAX_INCARNATIONS + 1):
        clock.now += 1
        again = wake(ben.identity, ben.admission, clock, session=f"s{number}")
        introduce([anna, again])
        assert received(anna, again.packets(anna))  # or nothing came of it that could come back
    clock.now += 1
    with pytest.raises(
        TrustError, match=r"started before other incarnations of it that have ended"
    ):
        anna.security.keyring.admit(first, clock.now)
    assert not hears_card(anna, ben)
    assert anna.security.counters == {"untrusted-stale": 1}
    assert received(anna, again.packets(anna))  # and nothing was changed by the attempt
    assert anna.security.register.members[ben.name].session == again.session
    clock.now += 1
    introduce([anna, wake(ben.identity, ben.admission, clock, session="next")])
    assert anna.security.register.members[ben.name].session == "next"


def test_a_past_takes_up_bounded_room():
    past = FormerIncarnations()
    for number in range(10 * MAX_INCARNATIONS):
        past.add(number.to_bytes(32, "big"), float(number), 7)
    assert len(past) == MAX_INCARNATIONS


def test_more_names_than_can_be_remembered_are_refused():
    (ben, carl, dora), clock = group("ben", "carl", "dora")
    anna = person("anna", clock, max_names=2)
    introduce([anna, ben, carl])
    assert received(anna, ben.packets(anna))
    anna.security.remove(ben.name, ben.session)  # remembered, so it counts
    assert not hears_card(anna, dora)
    assert anna.security.counters == {"untrusted-used-up": 1}
    assert list(anna.security.register.members) == [carl.name]
    given_up_and_back(anna, carl, clock)  # who is known may return


def test_a_window_that_goes_on_refuses_all_up_to_its_top():
    window = ReplayWindow(9000)
    assert not any(window.is_new(number) for number in range(9001))
    assert window.is_new(9001)
    window.add(9000 + 2 * WINDOW)
    assert window.is_new(9001 + WINDOW)
    assert not window.is_new(9001)


# --- cards and exchange keys that grow old ------------------------------------------------------------


def reissues(person):
    """Whether a tick asks for the card to be published again."""
    return [each.kind for each in person.security.tick()[1]] == ["reissue-card"]


@pytest.mark.parametrize(
    ("age", "known"), [(MAX_CARD_AGE, True), (MAX_CARD_AGE + CLOCK_SKEW + 1, False), (300 * 86_400, False)]
)  # fmt: skip
def test_an_old_card_is_refused_by_name(caplog, age, known):
    clock = Clock()
    ben = person("ben", clock)
    card = ben.security.card(b"{}")
    clock.now += age
    anna = person("anna", clock)
    assert hears_card(anna, ben, card) is known
    assert anna.security.counters == ({} if known else {"untrusted-old-card": 1})
    assert (f"the card of {ben.name} was issued {age / 3600:.0f} h ago" in caplog.text) is not known


def test_a_card_is_issued_again_long_before_it_is_too_old():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    assert not reissues(ben)  # nothing was published yet
    ben.security.card(b"{}")
    clock.now += CARD_INTERVAL - 1
    assert not reissues(ben)
    clock.now += 1
    assert ben.security.card_due()
    assert reissues(ben)
    clock.now += 5
    assert hears_card(anna, ben)
    assert not reissues(ben)
    assert CARD_INTERVAL < MAX_CARD_AGE / 2


def test_a_card_is_issued_again_when_the_clock_was_set():
    clock = Clock()
    wrong = WrongClock(clock, 0.0)
    anna, ben = person("anna", clock), person("ben", wrong)
    assert hears_card(anna, ben)
    wrong.by = -2 * CARD_INTERVAL
    assert ben.security.card_due()
    assert hears_card(anna, ben)  # numbered higher in the same incarnation, whatever its date
    assert anna.security.register.members[ben.name].issued < clock.wall()


def test_an_older_card_of_the_same_start_does_not_come_back():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    old, new = ben.security.card(b"old"), ben.security.card(b"new")
    assert hears_card(anna, ben, new)
    assert not hears_card(anna, ben, old)
    assert anna.security.counters == {"untrusted-stale": 1}


def renewed(*labels):
    """A group whose first member has just renewed its exchange key, and not shown its card yet."""
    people, clock = group(*labels)
    people[0].security.keyring.renew_exchange(clock.now)
    return people, clock


def test_an_exchange_key_is_renewed_every_day():
    (anna, _), clock = group("anna", "ben")
    seen = {anna.security.keyring.exchange}
    for _ in range(3):
        clock.now += EXCHANGE_INTERVAL - 60
        anna.security.tick()
        assert anna.security.keyring.exchange in seen
        clock.now += 60
        anna.security.tick()
        seen.add(anna.security.keyring.exchange)
    assert len(seen) == 4


def test_a_device_that_slept_renews_its_key_too():
    """While it sleeps, the clock that only goes on stands still."""
    wrong = WrongClock(Clock(), 0.0)
    anna = person("anna", wrong)
    wrong.by = EXCHANGE_INTERVAL
    before = anna.security.keyring.exchange
    anna.security.tick()
    assert anna.security.keyring.exchange != before


def test_packets_pass_both_ways_all_through_a_renewal():
    (anna, ben, carl), _ = renewed("anna", "ben", "carl")
    under_way = ben.packets(anna, sequence=7)
    assert understand(anna, ben)  # Ben has not seen the new card: both use the former key
    late = anna.packets(ben, sequence=8)
    assert hears_card(ben, anna)
    assert understand(anna, ben)  # Ben has, and Anna does not know that yet
    # Now both use the new one; what was sealed before still counts, once.
    assert received(ben, anna.packets(ben))
    assert received(ben, late)
    assert received(anna, under_way)
    assert not received(anna, under_way)
    assert received(anna, carl.packets(anna))
    assert anna.security.counters == {"untrusted-replayed": 1}
    assert not ben.security.counters
    assert not carl.security.counters


def test_both_ends_may_renew_at_once():
    (anna, ben), clock = group("anna", "ben")
    clock.now += EXCHANGE_INTERVAL
    crossing = anna.packets(ben, sequence=5), ben.packets(anna, sequence=5)
    assert reissues(anna)
    assert reissues(ben)
    cards = anna.security.card(b"{}"), ben.security.card(b"{}")
    assert hears_card(ben, anna, cards[0])
    assert hears_card(anna, ben, cards[1])
    assert received(ben, crossing[0])
    assert received(anna, crossing[1])
    for _ in range(2):
        assert understand(anna, ben)
    clock.now += OVERLAP
    exchange([anna, ben], clock)
    assert understand(anna, ben)


def test_a_renewal_says_nothing_new_about_its_peer():
    (anna, ben), _ = renewed("anna", "ben")
    assert hears_card(ben, anna)
    assert ben.security.keyring.online_members() == [anna.name]
    assert ben.security.tick() == ([], [])
    assert ben.security.receive(topics.status(SWARM, anna.name), anna.security.status(ONLINE))


def test_a_former_key_is_deleted_and_opens_nothing_any_more():
    (anna, ben), clock = renewed("anna", "ben")
    late = ben.packets(anna, sequence=9)
    clock.now += OVERLAP
    anna.security.tick()
    assert received(anna, late) == []
    assert anna.security.counters == {"untrusted-stale": 1}
    assert anna.packets(ben)  # with the new key, whether Ben has seen it or not
    assert received(ben, anna.packets(ben)) == []
    assert hears_card(ben, anna)
    assert understand(anna, ben)


def test_a_running_peers_memory_does_not_open_what_was_recorded_days_before():
    """Ben goes on; Anna, with whom he spoke, was started again. Both her cards were recorded."""
    (anna, ben), clock = group("anna", "ben")
    recorded = anna.packets(ben)[0]
    member = ben.security.register.members[anna.name]
    clock.now += 1
    again = wake(anna.identity, anna.admission, clock)
    assert hears_card(ben, again)
    clock.now += EXCHANGE_INTERVAL
    ben.security.tick()
    clock.now += OVERLAP
    ben.security.tick()
    # Whoever seizes all that he holds takes her old card in again, and the recording with it.
    ben.security.keyring.admit(member, clock.now)
    assert ben.security.open("global", recorded) is None
    assert only(ben.security.counters, "stale") == 1


# --- masks --------------------------------------------------------------------------------------------


def test_two_peers_share_a_secret_for_masks_that_outlives_a_restart():
    (anna, ben, carl), clock = group("anna", "ben", "carl")
    secret = anna.security.keyring.mask_secret(ben.name)
    assert secret == ben.security.keyring.mask_secret(anna.name)
    assert secret != carl.security.keyring.mask_secret(anna.name)
    memory = ben.security.snapshot()
    for session, same in ((ben.session, True), ("afresh", False)):
        clock.now += 1
        again = wake(ben.identity, ben.admission, clock, session=session, memory=memory)
        introduce([anna, again])
        found = again.security.keyring.mask_secret(anna.name)
        assert found == anna.security.keyring.mask_secret(ben.name)
        assert (found == secret) is same


def test_masks_cannot_be_drawn_again_from_the_key_file_alone():
    """Whoever seizes a device must not unmask what was averaged in sessions whose checkpoint is gone."""
    (anna, ben), clock = group("anna", "ben")
    secret = anna.security.keyring.mask_secret(ben.name)
    clock.now += 1
    seized = wake(ben.identity, ben.admission, clock, session=ben.session)
    assert hears_card(seized, anna)
    assert seized.security.keyring.mask_secret(anna.name) != secret


def test_the_key_of_masks_is_deleted_with_its_session():
    (anna, ben), clock = group("anna", "ben")
    assert anna.security.snapshot()["masks"]["session"] == anna.session
    anna.security.end_session()
    assert "masks" not in anna.security.snapshot()
    with pytest.raises(TrustError, match="the session is over"):
        anna.security.keyring.mask_secret(ben.name)
    assert "masks" in restarted(ben, clock).security.snapshot()
