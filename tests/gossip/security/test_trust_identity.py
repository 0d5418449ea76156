"""Keys in private files, names that prove themselves, papers that the owner signed."""

from __future__ import annotations

import time

import pytest
from trust_kit import OWNER, SWARM, Clock, group, introduce, papers, person, wake

from gossamer.gossip import topics
from gossamer.gossip.security import (
    Admission,
    Identity,
    Revocations,
    TrustError,
    endorse,
    invite,
    open_ticket,
    peer_id,
    public_text,
    read_public,
    read_terms,
    revocation_topic,
    save_invitation,
    save_ticket,
)
from gossamer.gossip.security.identity import check_key
from gossamer.gossip.security.invitation import check


def test_a_key_file_is_private_and_comes_back(tmp_path):
    identity = Identity.generate("anna")
    path = tmp_path / "keys" / "anna.key"
    identity.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    again = Identity.load(path)
    assert (again.name, again.public) == (identity.name, identity.public)
    assert "private" not in repr(again).lower()
    assert again.secret().hex() not in repr(again)


def test_a_key_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "anna.key"
    Identity.generate("anna").save(path)
    path.chmod(0o640)
    with pytest.raises(TrustError, match=r"anna\.key: others can read it .*chmod 600"):
        Identity.load(path)


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "anna.key"
    Identity.generate("anna").save(path)
    before = path.read_text()
    with pytest.raises(TrustError, match="is there already"):
        Identity.generate("anna").save(path)
    assert path.read_text() == before


@pytest.mark.parametrize("text", ["", "nonsense", "gossamer-ed25519-private:anna:zz", "\x00\x01"])
def test_other_files_are_no_keys(tmp_path, text):
    path = tmp_path / "anna.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(TrustError, match="is not a key file"):
        Identity.load(path)


def test_the_name_follows_from_the_key():
    anna, other = Identity.generate("anna"), Identity.generate("anna")
    assert anna.name == f"anna@{peer_id(anna.public)}"
    topics.check_name("peer", anna.name)
    check_key(anna.name, anna.public)
    for name in (other.name, "anna", f"anna@{anna.id[:-1]}"):
        with pytest.raises(TrustError, match="is not the name of the key"):
            check_key(name, anna.public)


def test_labels_stay_short_and_plain():
    for label in ("a@b", "x" * 41):
        with pytest.raises(TrustError, match="label"):
            Identity.generate(label)
    with pytest.raises(topics.TopicError):
        Identity.generate("a/b")


def test_public_keys_travel_as_one_line():
    key = Identity.generate("anna").public
    assert read_public(public_text(key) + "\n") == key
    for text in ("", "gossamer-ed25519:abc", "schlüssel", public_text(key) + "AA"):
        with pytest.raises(TrustError, match="is not a public key"):
            read_public(text)


# --- papers ------------------------------------------------------------------------------------------


def test_an_invitation_admits_its_peer_and_nobody_else():
    anna, ben = Identity.generate("anna"), Identity.generate("ben")
    paper = Admission(invite(OWNER, SWARM, anna.label, anna.public, models=["global"]))
    terms = check(paper, OWNER.public, SWARM, anna.name, anna.public)
    assert terms.admits("global")
    assert not terms.admits("blue")
    with pytest.raises(TrustError, match="the invitation is for") as error:
        check(paper, OWNER.public, SWARM, ben.name, ben.public)
    assert error.value.cause == "uninvited"


def test_a_pair_of_models_needs_both():
    anna = Identity.generate("anna")
    terms = read_terms(
        invite(OWNER, SWARM, anna.label, anna.public, models=["a", "b"]), OWNER.public
    )
    assert terms.admits("a&b")
    assert not terms.admits("a&c")
    assert read_terms(invite(OWNER, SWARM, anna.label, anna.public), OWNER.public).admits(
        "anything&else"
    )


def test_papers_of_others_do_not_count():
    anna, stranger = Identity.generate("anna"), Identity.generate("stranger")
    forged = invite(stranger, SWARM, anna.label, anna.public)
    with pytest.raises(TrustError, match="no valid invitation") as error:
        check(Admission(forged), OWNER.public, SWARM, anna.name, anna.public)
    assert error.value.cause == "uninvited"
    changed = bytearray(invite(OWNER, SWARM, anna.label, anna.public))
    changed[-3] ^= 1
    with pytest.raises(TrustError, match="no valid invitation"):
        check(Admission(bytes(changed)), OWNER.public, SWARM, anna.name, anna.public)
    with pytest.raises(TrustError, match="invited to swarm 'meadow'"):
        check(
            Admission(invite(OWNER, "meadow", anna.label, anna.public)),
            OWNER.public,
            SWARM,
            anna.name,
            anna.public,
        )


def test_papers_expire():
    anna = Identity.generate("anna")
    paper = Admission(invite(OWNER, SWARM, anna.label, anna.public, days=1))
    check(paper, OWNER.public, SWARM, anna.name, anna.public, time.time() + 86_000)
    for late in (86_401, 1e9):
        with pytest.raises(TrustError, match="expired") as error:
            check(paper, OWNER.public, SWARM, anna.name, anna.public, time.time() + late)
        assert error.value.cause == "expired"
    with pytest.raises(TrustError, match="not valid yet: is the clock right"):
        check(paper, OWNER.public, SWARM, anna.name, anna.public, time.time() - 86_400)


def test_a_ticket_read_off_a_card_is_useless():
    """A card shows the paper and the endorsement; neither admits the stranger who read them."""
    paper, secret = open_ticket(OWNER, SWARM, uses=3)
    anna, thief = Identity.generate("anna"), Identity.generate("thief")
    shown = endorse(paper, secret, anna)
    assert check(shown, OWNER.public, SWARM, anna.name, anna.public).uses == 3
    for attempt in (shown, Admission(paper), Admission(paper, thief.sign(thief.public))):
        with pytest.raises(TrustError, match="was not endorsed for this peer"):
            check(attempt, OWNER.public, SWARM, thief.name, thief.public)
    assert secret not in shown.paper + shown.endorsement


def test_paper_files(tmp_path):
    anna = Identity.generate("anna")
    save_invitation(tmp_path / "invitation", invite(OWNER, SWARM, anna.label, anna.public))
    save_ticket(tmp_path / "ticket", *open_ticket(OWNER, SWARM))
    for name in ("invitation", "ticket"):
        admission = Admission.load(tmp_path / name, anna)
        check(admission, OWNER.public, SWARM, anna.name, anna.public)
    assert (tmp_path / "ticket").stat().st_mode & 0o777 == 0o600
    (tmp_path / "ticket").chmod(0o644)
    with pytest.raises(TrustError, match="others can read it"):
        Admission.load(tmp_path / "ticket", anna)
    (tmp_path / "other").write_text("something else")
    with pytest.raises(TrustError, match="neither an invitation nor a ticket"):
        Admission.load(tmp_path / "other", anna)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda key: open_ticket(OWNER, SWARM, uses=0), "admits nobody"),
        (lambda key: invite(OWNER, SWARM, "anna", key, models=[]), "0 models"),
        (lambda key: invite(OWNER, SWARM, "anna", key, days=0), "it would never be"),
    ],
)
def test_senseless_papers_are_not_written(make, message):
    with pytest.raises(TrustError, match=message):
        make(Identity.generate("anna").public)


# --- cards -------------------------------------------------------------------------------------------


def test_cards_without_a_valid_paper_are_refused():
    clock = Clock()
    anna = person("anna", clock)
    stranger = papers("eve", owner=Identity.generate("eve-owner"))
    with pytest.raises(TrustError, match="no valid invitation"):
        wake(*stranger, clock)  # it cannot even start by itself, so it borrows our eyes
    eve = person("eve", clock)
    eve.trust._admission = stranger[1]
    card = eve.trust.card(b"{}")
    assert anna.trust.hear(topics.card(SWARM, eve.name), card) == []
    assert anna.trust.counters["untrusted-uninvited"] == 1
    assert not anna.trust.register.members


def test_a_card_counts_under_its_own_name_alone():
    clock = Clock()
    anna, ben, carl = (person(label, clock) for label in ("anna", "ben", "carl"))
    card = ben.trust.card(b"{}")
    assert anna.trust.hear(topics.card(SWARM, carl.name), card) == []
    assert anna.trust.counters["untrusted-identity"] == 1
    assert anna.trust.hear(topics.card("meadow", ben.name), card) == []
    ben.trust.swarm = "meadow"
    assert anna.trust.hear(topics.card(SWARM, ben.name), ben.trust.card(b"{}")) == []
    assert anna.trust.counters["untrusted-signature"] == 1
    changed = card[:-2] + bytes([card[-2] ^ 1]) + card[-1:]
    assert anna.trust.hear(topics.card(SWARM, ben.name), changed) == []
    assert anna.trust.hear(topics.card(SWARM, ben.name), b'{"session": "plain"}') == []
    (heard,) = anna.trust.hear(topics.card(SWARM, ben.name), card)
    assert (heard.kind, heard.peer, heard.body) == ("card", ben.name, b"{}")


def test_an_old_card_does_not_come_back():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    old = ben.trust.card(b"old")
    clock.now += 10
    again = wake(ben.identity, ben.admission, clock)
    assert anna.trust.hear(topics.card(SWARM, ben.name), again.trust.card(b"new"))
    assert anna.trust.hear(topics.card(SWARM, ben.name), old) == []
    assert anna.trust.counters["untrusted-stale"] == 1
    assert anna.trust.register.members[ben.name].exchange == again.trust.keyring.exchange


def test_the_first_holders_of_a_ticket_get_in_and_stay_in():
    clock = Clock()
    paper, secret = open_ticket(OWNER, SWARM, uses=2, days=30_000)
    anna = person("anna", clock)
    guests = []
    for label in ("ben", "carl", "dora"):
        identity = Identity.generate(label)
        guests.append(wake(identity, endorse(paper, secret, identity), clock))
    admitted = [
        bool(anna.trust.hear(topics.card(SWARM, guest.name), guest.trust.card(b"{}")))
        for guest in guests
    ]
    assert admitted == [True, True, False]
    assert anna.trust.counters["untrusted-used-up"] == 1
    clock.now += 1
    assert anna.trust.hear(topics.card(SWARM, guests[0].name), guests[0].trust.card(b"{}"))
    anna.trust.gone(guests[0].name, guests[0].session)  # a place is not freed by leaving
    assert not anna.trust.hear(topics.card(SWARM, guests[2].name), guests[2].trust.card(b"{}"))
    next_life = wake(anna.identity, anna.admission, clock, memory=anna.trust.snapshot())
    assert not next_life.trust.hear(topics.card(SWARM, guests[2].name), guests[2].trust.card(b"{}"))


# --- statuses ----------------------------------------------------------------------------------------


def test_statuses_are_signed_numbered_and_wait_for_their_card():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    at = topics.status(SWARM, ben.name)
    first, second, will = (
        ben.trust.status(b"1"), ben.trust.status(b"2"), ben.trust.will(b"will"),
    )  # fmt: skip
    assert anna.trust.hear(at, first) == []  # retained statuses may come before cards
    heard = anna.trust.hear(topics.card(SWARM, ben.name), ben.trust.card(b"{}"))
    assert [(h.kind, h.body) for h in heard] == [("card", b"{}"), ("status", b"1")]
    assert [h.body for h in anna.trust.hear(at, second)] == [b"2"]
    assert anna.trust.hear(at, first) == []
    assert anna.trust.counters["untrusted-stale"] == 1
    assert [h.body for h in anna.trust.hear(at, will)] == [b"will"]
    assert anna.trust.hear(at, b'{"state": "left"}') == []
    assert anna.trust.hear(topics.status(SWARM, anna.name), second) == []
    assert anna.trust.hear(topics.status(SWARM, anna.name), anna.trust.status(b"own"))


def test_statuses_of_strangers_take_up_bounded_room():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    for number in range(300):
        stranger = Identity.generate(f"x{number}")
        ben.trust.identity = stranger
        anna.trust.hear(topics.status(SWARM, stranger.name), ben.trust.status(b"."))
    assert len(anna.trust._waiting) == 256


# --- revocations -------------------------------------------------------------------------------------


def test_who_is_revoked_is_out_at_once_and_cannot_return():
    (anna, ben, carl), _ = group("anna", "ben", "carl")
    first = Revocations().add([ben.name])
    (heard,) = anna.trust.hear(revocation_topic(SWARM), first.sign(OWNER, SWARM))
    assert (heard.kind, heard.peer) == ("out", ben.name)
    assert anna.trust.seal(ben.name, "global", b"x") is None
    assert not anna.trust.hear(topics.card(SWARM, ben.name), ben.trust.card(b"{}"))
    assert anna.trust.counters["untrusted-revoked"] == 1
    assert carl.name in anna.trust.register.members
    number = carl.trust.register.members[ben.name].terms.number
    (heard,) = carl.trust.hear(
        revocation_topic(SWARM), Revocations().add(papers=[number]).sign(OWNER, SWARM)
    )
    assert heard.peer == ben.name


def test_lists_are_the_owners_and_never_older():
    (anna, ben), _ = group("anna", "ben")
    at = revocation_topic(SWARM)
    forged = Revocations().add([ben.name]).sign(ben.identity, SWARM)
    elsewhere = Revocations().add([ben.name]).sign(OWNER, "meadow")
    for wrong in (forged, elsewhere, b"nonsense", b""):
        assert anna.trust.hear(at, wrong) == []
    first, second = Revocations().add(["x@y"]), Revocations().add(["x@y"]).add([ben.name])
    assert anna.trust.hear(at, second.sign(OWNER, SWARM))
    assert anna.trust.hear(at, first.sign(OWNER, SWARM)) == []
    assert anna.trust.counters["untrusted-stale"] == 1
    assert anna.trust.register.revocations.number == 2
    memory = anna.trust.snapshot()
    with pytest.raises(TrustError, match="was revoked: ask the swarm's owner"):
        wake(ben.identity, ben.admission, Clock(), memory=memory)


def test_an_expired_member_is_out():
    clock = Clock(epoch=time.time())
    anna, ben = person("anna", clock), None
    identity = Identity.generate("ben")
    ben = wake(
        identity, Admission(invite(OWNER, SWARM, identity.label, identity.public, days=1)), clock
    )
    introduce([anna, ben])
    assert anna.trust.tick()[1] == []
    clock.now += 90_000
    heard = [each for each in anna.trust.tick()[1] if each.kind != "reissue-card"]
    assert [(each.kind, each.peer) for each in heard] == [("out", ben.name)]


def test_a_peer_does_not_start_with_models_it_is_not_admitted_to():
    with pytest.raises(TrustError, match=r"implements blue, which paper .* does not admit"):
        wake(*papers("anna", ("global",)), Clock(), ("global", "blue"))
