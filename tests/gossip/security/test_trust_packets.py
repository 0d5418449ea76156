"""What somebody with full access to the broker, or another member, can do with packets: nothing.

Each test has a twin in spirit: it names a protection, and fails if that protection is taken away.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from trust_kit import SCHEMA, SWARM, Clock, group, introduce, person, received, settle, wake

from gossamer.gossip import topics
from gossamer.gossip.chunks import Chunker
from gossamer.gossip.security import OVERHEAD, NoTrust, TrustError
from gossamer.gossip.security import keyring as keyring_module
from gossamer.gossip.security.channel import WINDOW, Window, packet_key
from gossamer.gossip.security.keyring import _HEADER, Keyring
from gossamer.gossip.security.opened import check_inside
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
    assert not ben.trust.counters


def test_a_sealed_packet_costs_what_overhead_says():
    (anna, ben), _ = group("anna", "ben")
    (chunk,) = anna.chunks(anna.give(ben))
    assert len(anna.trust.seal(ben.name, "global", chunk)) == len(chunk) + OVERHEAD


def test_no_parameter_can_be_read():
    """The outsider searches what it captured for any four bytes of the value."""
    (anna, ben), _ = group("anna", "ben")
    give = anna.give(ben, size=2000)
    packets = [anna.trust.seal(ben.name, "global", chunk) for chunk in anna.chunks(give)]
    raw = give.value.tobytes()
    for at in range(0, len(raw), 8):
        assert not any(raw[at : at + 8] in packet for packet in packets)
    plain = b"".join(anna.chunks(give))
    assert all(raw[at : at + 8] in plain for at in range(0, 64, 8))  # the search does find


def test_the_same_packet_never_looks_the_same():
    (anna, ben), _ = group("anna", "ben")
    (chunk,) = anna.chunks(anna.give(ben))
    sealed = {anna.trust.seal(ben.name, "global", chunk) for _ in range(100)}
    assert len({packet[_HEADER.size :] for packet in sealed}) == 100


def test_nonces_are_never_used_twice_under_one_key(monkeypatch):
    """Whatever changes (models, epochs, keys told): (key, nonce) pairs stay unique."""
    used: list[tuple[bytes, int]] = []
    keys: list[bytes] = []
    original = Keyring._seal

    def key_spy(*args):
        keys.append(packet_key(*args))
        return keys[-1]

    def spy(self, channel, model, epoch, packet):
        self._ciphers.clear()  # so that the key is derived, and seen, every time
        sealed = original(self, channel, model, epoch, packet)
        used.append((keys[-1], _HEADER.unpack_from(sealed)[4]))
        return sealed

    monkeypatch.setattr(keyring_module, "packet_key", key_spy)
    monkeypatch.setattr(Keyring, "_seal", spy)
    (anna, ben, carl), clock = group("anna", "ben", "carl", models=("global", "blue"))
    for round in range(3):
        for model in ("global", "blue"):
            anna.packets(ben, model, size=3000)
            anna.packets(carl, model)
        if round == 1:
            anna.trust.gone(carl.name, carl.session)
            settle([anna, ben], clock)
            anna.trust.keyring.renew_exchange(clock.now)
            ben.trust.hear(topics.card(SWARM, anna.name), anna.trust.card(b"{}"))
            received(anna, ben.packets(anna))  # so that Anna uses her new key
    assert len(used) > 20
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("place", ["header", "tag", "number", "epoch", "keeper", "body", "proof"])
def test_a_changed_byte_is_noticed(place):
    (anna, ben), _ = group("anna", "ben")
    (packet,) = anna.packets(ben)
    offsets = {
        "header": 6, "tag": 9, "number": 17, "epoch": 24, "keeper": 33, "body": 60, "proof": -1,
    }  # fmt: skip
    changed = bytearray(packet)
    changed[offsets[place]] ^= 1
    assert ben.trust.open("global", bytes(changed)) is None
    assert sum(ben.trust.counters.values()) == 1
    assert ben.trust.open("global", packet) is not None  # and the true one still counts


def test_an_outsider_cannot_inject():
    """It knows every public key and tag, and makes packets with a key of its own."""
    (anna, ben), clock = group("anna", "ben")
    eve = person("anna", clock)  # the same label, another key
    assert ben.trust.open("global", anna.chunks(anna.give(ben))[0]) is None  # unsealed
    assert only(ben.trust.counters, "malformed") == 1
    eve.trust.keyring._models["global"].since = 0.0  # she says she is the eldest
    eve.trust.keyring.admit(anna.trust.register.members[ben.name], clock.now)
    eve.trust.keyring.seen(ben.name)
    settle([eve], clock)
    (packet,) = eve.packets(ben)
    assert ben.trust.open("global", packet) is None
    assert ben.trust.counters["untrusted-unknown-sender"] == 1
    borrowed = packet[:8] + anna.trust.keyring._own[0].tag + packet[16:]
    assert ben.trust.open("global", borrowed) is None
    assert ben.trust.counters["untrusted-no-key"] == 1
    epoch = anna.packets(ben)[0][24:40]
    assert ben.trust.open("global", borrowed[:24] + epoch + borrowed[40:]) is None
    assert ben.trust.counters["untrusted-forged"] == 1


def test_a_member_cannot_speak_for_another():
    """Carl has the group's key and all of Anna's public papers, and still cannot be Anna to Ben."""
    (anna, ben, carl), _ = group("anna", "ben", "carl")
    give = replace(carl.give(ben), sender=anna.name, session=anna.session)
    for named in (f"{anna.name}/{anna.session}", f"{carl.name}/{carl.session}"):
        (chunk,) = Chunker(named).split(encode(give, SCHEMA))
        opened = ben.trust.open("global", carl.trust.seal(ben.name, "global", chunk))
        if opened is not None:
            assert not ben.trust.genuine(opened, decode(opened.packet[40:]).message)
    assert only(ben.trust.counters, "impersonated") == 2
    # With Anna's tag on it, the key does not fit.
    sealed = carl.packets(ben)[0]
    forged = sealed[:8] + anna.trust.keyring._own[0].tag + sealed[16:]
    assert ben.trust.open("global", forged) is None
    assert ben.trust.counters["untrusted-forged"] == 1
    # Nor is a message from Anna to Carl one to Ben.
    assert ben.trust.open("global", anna.packets(carl)[0]) is None


def test_the_check_of_senders_agrees_with_the_chunker():
    (packet,) = Chunker("anna@x/s").split([b"payload"])
    check_inside("anna@x", "s", packet)
    assert packet[8:16] == hashlib.blake2b(b"anna@x/s", digest_size=8).digest()
    for wrong in (("anna@x", "t"), ("ben@x", "s")):
        with pytest.raises(TrustError, match="somebody else's message"):
            check_inside(*wrong, packet)
    with pytest.raises(TrustError):
        check_inside("anna@x", "s", packet[:20])


def test_a_packet_counts_once():
    (anna, ben), _ = group("anna", "ben")
    packets = anna.packets(ben, size=3000)
    assert len(received(ben, [packets[2], packets[0], packets[1], *packets[3:]])) == 1
    for packet in packets:
        assert ben.trust.open("global", packet) is None
    assert only(ben.trust.counters, "replayed") == len(packets)


def test_nothing_of_a_former_session_comes_back():
    (anna, ben), clock = group("anna", "ben")
    old = anna.packets(ben)
    clock.now += 1
    for change in ("ben", "anna"):
        if change == "ben":  # the receiver restarts: same session, new life
            ben = wake(ben.identity, ben.admission, clock, session=ben.session)
        else:  # the sender starts afresh
            anna = wake(anna.identity, anna.admission, clock, session="another")
        introduce([anna, ben])
        settle([anna, ben], clock)
        assert [ben.trust.open("global", packet) for packet in old] == [None] * len(old)
        fresh = anna.packets(ben)
        assert len(received(ben, fresh)) == 1
        old += fresh
        clock.now += 1
    causes = {cause.removeprefix("untrusted-") for cause in ben.trust.counters}
    assert causes <= {"forged", "no-key", "stale", "unknown-sender"}


def test_the_session_itself_is_bound():
    """Were it not, a card that claims another session would make old packets count again."""
    (anna, ben), clock = group("anna", "ben")
    (packet,) = anna.packets(ben)
    member = ben.trust.register.members[anna.name]
    ben.trust.keyring.admit(replace(member, session="another"), clock.now)
    assert ben.trust.open("global", packet) is None
    assert only(ben.trust.counters, "forged") == 1


def test_chunks_cannot_be_moved_into_another_message():
    """The outsider swaps chunks of two messages, or gives one the header of another."""
    (anna, ben), _ = group("anna", "ben")
    first, second = anna.packets(ben, size=3000, seed=1), anna.packets(ben, size=3000, seed=2)
    mixed = [first[0], second[1], *first[2:]]
    assert received(ben, mixed) == []  # each stays a part of its own message
    header = _HEADER.size
    spliced = first[1][:header] + second[1][header:]
    assert ben.trust.open("global", spliced) is None
    assert only(ben.trust.counters, "forged") == 1


def test_a_packet_counts_in_its_own_inbox_alone():
    (anna, ben), _ = group("anna", "ben", models=("global", "blue"))
    (packet,) = anna.packets(ben, "blue")
    assert ben.trust.open("global", packet) is None
    assert ben.trust.open("blue", packet) is not None


def test_members_of_one_group_cannot_read_anothers():
    """Anna is in both groups, Ben in A, Carl in B: Ben gets nothing of B, sealed, told or handed."""
    clock = Clock()
    anna = person("anna", clock, ("global", "group-a", "group-b"))
    ben = person("ben", clock, ("global", "group-a"))
    carl = person("carl", clock, ("global", "group-b"))
    people = [anna, ben, carl]
    introduce(people)
    settle(people, clock)
    assert anna.trust.seal(ben.name, "group-b", b"x") is None
    assert only(anna.trust.counters, "not-a-member") == 1
    packets = anna.packets(carl, "group-b")
    assert received(carl, packets, "group-b")
    for model in ("group-b", "group-a", "global"):
        for packet in anna.packets(carl, "group-b"):
            assert ben.trust.open(model, packet) is None
    assert ben.trust.keyring.epoch("group-b") is None
    assert ben.trust.keyring.epoch("group-a") is not None
    secret = anna.trust.keyring._models["group-b"].keys[anna.trust.keyring.epoch("group-b")]
    assert all(secret not in key.keys.values() for key in ben.trust.keyring._models.values())
    # What Ben sends into group B is not taken either, though he has a channel to Carl.
    chunk = ben.chunks(ben.give(carl, "group-b"))[0]
    channel = ben.trust.keyring._channels.get(carl.name)
    ben.trust.keyring._models["group-b"] = ben.trust.keyring._models["group-a"]
    forged = ben.trust.keyring._seal(channel, "group-b", ben.trust.keyring.epoch("group-a"), chunk)
    assert carl.trust.open("group-b", forged) is None
    assert only(carl.trust.counters, "not-a-member") == 1


def test_a_card_cannot_claim_models_beyond_its_paper():
    clock = Clock()
    anna, ben = person("anna", clock, ("global", "group-b")), person("ben", clock)
    ben.trust._models = frozenset({"global", "group-b"})
    anna.trust.hear(topics.card(SWARM, ben.name), ben.trust.card(b"{}"))
    assert anna.trust.register.members[ben.name].models == {"global"}


def test_the_group_key_is_part_of_the_packet_key():
    """Two peers who share a channel but not the epoch's key cannot read each other."""
    (anna, ben), _ = group("anna", "ben")
    (packet,) = anna.packets(ben)
    model = ben.trust.keyring._models["global"]
    model.keys[model.current] = bytes(32)
    ben.trust.keyring._ciphers.clear()
    assert ben.trust.open("global", packet) is None
    assert only(ben.trust.counters, "forged") == 1


@pytest.mark.parametrize("key", ["exchange", "masks"])
def test_a_key_of_no_use_is_refused(key):
    """A key for masks that is of no use would end a private round of whoever took it in."""
    (anna, ben), clock = group("anna", "ben")
    member = ben.trust.register.members[anna.name]
    with pytest.raises(TrustError, match="not a usable key"):
        ben.trust.keyring.admit(replace(member, **{key: bytes(32)}), clock.now)
    assert received(ben, anna.packets(ben))  # and nothing was changed by the attempt


def test_the_window_lets_every_number_through_once():
    window, rng = Window(), np.random.default_rng(0)
    order = np.arange(20_000)
    for start in range(0, len(order), 500):  # overtaking within a window
        rng.shuffle(order[start : start + 500])
    for number in map(int, order):
        assert window.fresh(number)
        window.note(number)
        assert not window.fresh(number)
    assert not window.fresh(20_000 - WINDOW - 1)
    window.note(10**9)
    assert not window.fresh(19_999)
    assert window.fresh(10**9 - 1)
    assert window.fresh(10**9 + 1)


def test_without_trust_everything_passes_unchanged():
    trust = NoTrust("anna")
    assert trust.seal("ben", "global", b"packet") == b"packet"
    opened = trust.open("global", b"packet")
    assert opened is not None
    assert opened.packet == b"packet"
    (heard,) = trust.hear(topics.card(SWARM, "ben"), b"card")
    assert (heard.kind, heard.peer, heard.body) == ("card", "ben", b"card")
    assert trust.card(b"x") == trust.status(b"x") == trust.will(b"x") == b"x"


def test_what_no_member_can_have_sealed_is_told_without_opening_it():
    """So that it need not be kept until there is time to open it."""
    (anna, ben), _ = group("anna", "ben")
    (packet,) = anna.packets(ben)
    assert ben.trust.expects("global", packet)
    assert not ben.trust.counters
    for stranger, cause in (
        (bytes(1000), "malformed"),
        (b"", "malformed"),
        (packet[:8] + bytes(8) + packet[16:], "unknown-sender"),
    ):
        assert not ben.trust.expects("global", stranger)
        assert ben.trust.counters.pop(f"untrusted-{cause}") == 1
    assert not ben.trust.expects("other", packet)
    assert ben.trust.counters == {"untrusted-not-a-member": 1}
    assert ben.trust.open("global", packet) is not None  # nothing was used up
