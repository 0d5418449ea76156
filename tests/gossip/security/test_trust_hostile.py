"""Signed and still unsound: whatever a stranger or a member puts into a statement, it is counted."""

from __future__ import annotations

import pytest
from trust_kit import OWNER, SWARM, Clock, group, papers, person, wake

from gossamer.gossip import topics
from gossamer.gossip.security import Identity, TrustError, invite, revocation_topic, signed
from gossamer.gossip.security import register as module
from gossamer.gossip.security.fields import state_of
from gossamer.gossip.security.invitation import read_terms
from gossamer.gossip.security.revocation import Revocations


def nested(depth: int) -> list:
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


DEEP = nested(400)


def card(identity: Identity, **bad: object) -> bytes:
    head = {
        "version": 2, "key": identity.public, "incarnation": bytes(16), "number": 1,
        "exchange": bytes(32), "masks": bytes(32), "session": "x",
        "since": 0.0, "issued": 0.0, "models": ["global"],
        "paper": invite(OWNER, SWARM, identity.label, identity.public), "endorsement": b"",
    }  # fmt: skip
    return signed.sign(identity, topics.card(SWARM, identity.name), head | bad)


@pytest.mark.parametrize(
    "bad",
    [{"paper": 2**64 - 1}, {"paper": 2**45}, {"paper": 3}, {"endorsement": 2**62}, {"masks": 32},
     {"version": 1}, {"incarnation": bytes(32)}, {"number": -1},
     {"exchange": 2**62}, {"exchange": 32}, {"exchange": bytes(31)}, {"models": 7},
     {"models": "global"}, {"models": [DEEP]}, {"session": DEEP}, {"session": 3},
     {"session": "a b"}, {"session": "x" * 65}, {"since": float("inf")}, {"since": "0"},
     {"issued": float("nan")}, {"issued": True}],
    ids=lambda bad: ", ".join(f"{key} {value!s:.20}" for key, value in bad.items()),
)  # fmt: skip
def test_a_card_with_a_field_of_another_kind_is_malformed(bad):
    ben = person("ben", Clock())
    eve = Identity.generate("eve")
    assert ben.trust.hear(topics.card(SWARM, eve.name), card(eve, **bad)) == []
    assert ben.trust.counters == {"untrusted-malformed": 1}
    assert not ben.trust.register.members


def test_the_same_card_without_it_is_a_card():
    """Or the test before would only show that nothing gets through."""
    clock = Clock()
    ben, eve = person("ben", clock), Identity.generate("eve")
    issued = {"issued": clock.wall(), "paper": papers("x")[1].paper}
    assert ben.trust.hear(topics.card(SWARM, eve.name), card(eve, **issued)) == []
    assert ben.trust.counters == {"untrusted-uninvited": 1}  # read to its end, and refused for that


@pytest.mark.parametrize("error", [MemoryError("no"), RecursionError("deep"), OverflowError("far")])
@pytest.mark.parametrize("kind", ["card", "status", "inbox"])
def test_whatever_else_goes_wrong_in_reading_is_counted(monkeypatch, error, kind):
    (anna, ben), _ = group("anna", "ben")

    def fail(*_args, **_options):
        raise error

    if kind == "inbox":
        (packet,) = anna.packets(ben)
        monkeypatch.setattr(ben.trust.keyring, "_epoch", fail)
        assert ben.trust.open("global", packet) is None
    else:
        monkeypatch.setattr(ben.trust.register, kind, fail)
        topic = getattr(topics, kind)(SWARM, anna.name)
        assert ben.trust.hear(topic, getattr(anna.trust, kind)(b"{}")) == []
    assert ben.trust.counters == {"untrusted-malformed": 1}


@pytest.mark.parametrize("number", [True, -1, 2**63, 1.5, "1", None])
def test_a_status_without_a_number_is_malformed(number):
    (anna, ben), _ = group("anna", "ben")
    incarnation = anna.trust.keyring.incarnation
    head = {"version": 2, "key": anna.identity.public, "incarnation": incarnation, "number": number}
    topic = topics.status(SWARM, anna.name)
    assert ben.trust.hear(topic, signed.sign(anna.identity, topic, head, b"{}")) == []
    assert ben.trust.counters == {"untrusted-malformed": 1}


@pytest.mark.parametrize("bad", [{"uses": float("inf")}, {"expires": float("nan")}, {"key": 32},
                                 {"models": [DEEP]}, {"number": DEEP}])  # fmt: skip
def test_a_paper_of_another_form_admits_nobody(bad):
    terms, _ = signed.read(papers("x")[1].paper, "invitation", lambda _: OWNER.public)
    paper = signed.sign(OWNER, "invitation", terms | bad)
    with pytest.raises(TrustError, match="of a form that is not known"):
        read_terms(paper, OWNER.public)


@pytest.mark.parametrize("bad", [{"peers": [DEEP]}, {"papers": 3}, {"number": -1}])
def test_a_revocation_list_of_another_form_is_malformed(bad):
    head = {"number": 1, "peers": [], "papers": []} | bad
    with pytest.raises(TrustError, match="of a form that is not known"):
        Revocations.read(signed.sign(OWNER, revocation_topic(SWARM), head), OWNER.public, SWARM)


def test_a_status_nested_too_deep_is_not_online():
    assert state_of(b"[" * 200_000) is None


def test_deep_nesting_in_a_head_is_malformed():
    ben, eve = person("ben", Clock()), Identity.generate("eve")
    topic = topics.card(SWARM, eve.name)
    lists = b"\x91" * 200_000  # each holds the next
    assert ben.trust.hear(topic, signed.sign(eve, topic, {})[:72] + lists) == []
    assert ben.trust.counters == {"untrusted-malformed": 1}


# --- what was said before a peer left -------------------------------------------------------------


def hears(listener, kind, speaker, payload):
    topic = getattr(topics, kind)(SWARM, speaker.name)
    return [each.kind for each in listener.trust.hear(topic, payload)]


def lives(clock, count=2):
    """One peer, life after life, each with the card and the status that the broker saw."""
    identity, admission = papers("ben")
    found = []
    for number in range(count):
        clock.now += 10
        life = wake(identity, admission, clock, session=f"s{number}")
        found.append((life, life.trust.card(b"{}"), life.trust.status(b"online")))
    return found


def test_an_old_card_is_not_believed_again_after_its_peer_left():
    clock = Clock()
    anna = person("anna", clock)
    (_, old_card, old_status), (ben, new_card, new_status) = lives(clock)
    assert hears(anna, "card", ben, new_card) == ["card"]
    assert hears(anna, "status", ben, new_status) == ["status"]
    anna.trust.gone(ben.name, "s1")
    for card_ in (old_card, new_card):
        assert hears(anna, "card", ben, card_) == []
    assert hears(anna, "status", ben, old_status) == []
    assert anna.trust.counters == {"untrusted-stale": 2}
    assert not anna.trust.register.members


def test_a_life_that_comes_back_cannot_be_given_its_old_status():
    clock = Clock()
    anna = person("anna", clock)
    ((ben, first, status),) = lives(clock, 1)
    newer = ben.trust.status(b"done")
    assert hears(anna, "card", ben, first) == ["card"]
    assert hears(anna, "status", ben, newer) == ["status"]
    anna.trust.gone(ben.name, "s0")
    clock.now += 10
    assert hears(anna, "card", ben, ben.trust.card(b"{}")) == ["card"]
    assert hears(anna, "status", ben, status) == []
    assert hears(anna, "status", ben, newer) == []
    assert hears(anna, "status", ben, ben.trust.status(b"online")) == ["status"]


def test_a_new_life_is_believed_after_the_old_one_left():
    clock = Clock()
    anna = person("anna", clock)
    (ben, first, _), (_, second, status) = lives(clock)
    assert hears(anna, "card", ben, first) == ["card"]
    anna.trust.gone(ben.name, "s0")
    assert hears(anna, "card", ben, second) == ["card"]
    assert hears(anna, "status", ben, status) == ["status"]


def test_of_many_who_left_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(module, "MAX_LEFT", 2)
    clock = Clock()
    anna = person("anna", clock)
    gone = [person(label, clock) for label in ("ben", "carl", "dora")]
    cards = [one.trust.card(b"{}") for one in gone]
    for one, card_ in zip(gone, cards, strict=True):
        assert hears(anna, "card", one, card_) == ["card"]
        assert hears(anna, "status", one, one.trust.status(b"online")) == ["status"]
        anna.trust.gone(one.name, one.session)
    register = anna.trust.register
    assert list(register._left) == list(register._numbers) == [one.name for one in gone[1:]]
    again = [hears(anna, "card", one, card_) for one, card_ in zip(gone, cards, strict=True)]
    assert again == [["card"], [], []]
