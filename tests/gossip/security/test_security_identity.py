"""Keys in private files, names that prove themselves, invitations that the owner signed and revoked."""

from __future__ import annotations

import math
import time

import pytest
from disk_kit import largest_file
from security_kit import (
    OWNER,
    SWARM,
    Clock,
    group,
    hears_card,
    introduce,
    invited,
    person,
    received,
    understand,
    wake,
)

from gossamer.gossip import topics
from gossamer.gossip.security import (
    Admission,
    Identity,
    Revocations,
    TrustError,
    check,
    endorse,
    invite,
    open_ticket,
    peer_id,
    public_text,
    read_claims,
    read_public,
    revocation_topic,
    save_invitation,
    save_ticket,
    signed,
)
from gossamer.gossip.security.identity import check_key
from gossamer.gossip.security.members import MAX_CARD_MODELS

# --- keys and names ----------------------------------------------------------------------------------


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
    with pytest.raises(TrustError, match=r"anna\.key: other users can read it .*chmod 600"):
        Identity.load(path)


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "anna.key"
    Identity.generate("anna").save(path)
    before = path.read_text()
    with pytest.raises(TrustError, match="exists already"):
        Identity.generate("anna").save(path)
    assert path.read_text() == before


def test_no_part_of_a_key_stays_on_a_full_disk(tmp_path):
    path = tmp_path / "anna.key"
    with (
        largest_file(8),
        pytest.raises(TrustError, match=r"anna\.key: cannot be written: File too"),
    ):
        Identity.generate("anna").save(path)
    Identity.generate("anna").save(path)
    assert Identity.load(path).label == "anna"


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
        with pytest.raises(TrustError, match="does not end with its key's id"):
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


# --- invitations ------------------------------------------------------------------------------------------


def test_an_invitation_admits_its_peer_and_nobody_else():
    anna, ben = Identity.generate("anna"), Identity.generate("ben")
    admission = Admission(invite(OWNER, SWARM, anna.label, anna.public, models=["global"]))
    claims = check(admission, OWNER.public, SWARM, anna.name, anna.public)
    assert claims.admits("global")
    assert not claims.admits("blue")
    with pytest.raises(TrustError, match="the invitation is for") as error:
        check(admission, OWNER.public, SWARM, ben.name, ben.public)
    assert error.value.cause == "uninvited"


def test_a_pair_of_models_needs_both():
    anna = Identity.generate("anna")
    claims = read_claims(
        invite(OWNER, SWARM, anna.label, anna.public, models=["a", "b"]), OWNER.public
    )
    assert claims.admits("a&b")
    assert not claims.admits("a&c")
    assert read_claims(invite(OWNER, SWARM, anna.label, anna.public), OWNER.public).admits(
        "anything&else"
    )


def test_a_pattern_admits_to_models_that_begin_like_it():
    anna = Identity.generate("anna")
    claims = read_claims(
        invite(OWNER, SWARM, anna.label, anna.public, models=["global", "group*"]), OWNER.public
    )
    for model in ("global", "group2-0-1f", "group", "group2-0-1f&group3-1-1f", "group2*"):
        assert claims.admits(model), model
    for model in ("globally", "grou", "my-group", "group2-0-1f&blue", "GROUP2", "*", "g*", ""):
        assert not claims.admits(model), model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("*", "would admit to every model: leave the models out"),
        ("**", "one \\*, at its end"),
        ("*-group", "one \\*, at its end"),
        ("group*-1", "one \\*, at its end"),
        ("group?", "contains '\\?'"),
        ("group[12]*", "contains '\\['"),
        ("a/b*", "contains '/'"),
        ("a&b*", "name both models"),
        ("x" * 65 + "*", "limit 64"),
        ("", "is empty"),
    ],
)
def test_what_is_neither_a_name_nor_a_pattern_is_not_signed(model, message):
    with pytest.raises(TrustError, match=message):
        invite(OWNER, SWARM, "anna", Identity.generate("anna").public, models=["global", model])


def test_invitations_of_others_do_not_count():
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


def test_invitations_expire():
    anna = Identity.generate("anna")
    admission = Admission(invite(OWNER, SWARM, anna.label, anna.public, days=1))
    check(admission, OWNER.public, SWARM, anna.name, anna.public, time.time() + 86_000)
    for late in (86_401, 1e9):
        with pytest.raises(TrustError, match="expired") as error:
            check(admission, OWNER.public, SWARM, anna.name, anna.public, time.time() + late)
        assert error.value.cause == "expired"
    with pytest.raises(TrustError, match="not valid yet: is the clock right"):
        check(admission, OWNER.public, SWARM, anna.name, anna.public, time.time() - 86_400)


def test_a_ticket_read_off_a_card_is_useless():
    """A card shows the ticket and the endorsement; neither admits the stranger who read them."""
    ticket, secret = open_ticket(OWNER, SWARM, uses=3)
    anna, thief = Identity.generate("anna"), Identity.generate("thief")
    shown = endorse(ticket, secret, anna)
    assert check(shown, OWNER.public, SWARM, anna.name, anna.public).uses == 3
    for attempt in (shown, Admission(ticket), Admission(ticket, thief.sign(thief.public))):
        with pytest.raises(TrustError, match="has not endorsed this peer"):
            check(attempt, OWNER.public, SWARM, thief.name, thief.public)
    assert secret not in shown.invitation + shown.endorsement


def test_invitation_files(tmp_path):
    anna = Identity.generate("anna")
    save_invitation(tmp_path / "invitation", invite(OWNER, SWARM, anna.label, anna.public))
    save_ticket(tmp_path / "ticket", *open_ticket(OWNER, SWARM))
    for name in ("invitation", "ticket"):
        admission = Admission.load(tmp_path / name, anna)
        check(admission, OWNER.public, SWARM, anna.name, anna.public)
    assert (tmp_path / "ticket").stat().st_mode & 0o777 == 0o600
    (tmp_path / "ticket").chmod(0o644)
    with pytest.raises(TrustError, match="other users can read it"):
        Admission.load(tmp_path / "ticket", anna)
    (tmp_path / "other").write_text("something else")
    with pytest.raises(TrustError, match="neither an invitation nor a ticket"):
        Admission.load(tmp_path / "other", anna)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda key: open_ticket(OWNER, SWARM, uses=0), "admits no peer"),
        (lambda key: invite(OWNER, SWARM, "anna", key, models=[]), "1 to 256 models, not 0"),
        (lambda key: invite(OWNER, SWARM, "anna", key, days=0), "days above 0, not 0"),
        (lambda key: invite(OWNER, SWARM, "anna", key, days=math.inf), "days above 0, not inf"),
    ],
)
def test_senseless_invitations_are_not_written(make, message):
    with pytest.raises(TrustError, match=message):
        make(Identity.generate("anna").public)


# --- cards -------------------------------------------------------------------------------------------


def test_cards_without_a_valid_invitation_are_refused():
    clock = Clock()
    anna, eve = person("anna", clock), person("eve", clock)
    identity, forged = invited("eve", owner=Identity.generate("eve-owner"))
    with pytest.raises(TrustError, match="no valid invitation"):
        wake(identity, forged, clock)  # it cannot even start by itself
    assert not hears_card(anna, eve, eve.forged_card(admission=forged))
    assert anna.security.counters["untrusted-uninvited"] == 1
    assert not anna.security.register.members


def test_a_card_counts_under_its_own_name_alone():
    clock = Clock()
    anna, ben, carl = (person(label, clock) for label in ("anna", "ben", "carl"))
    card = ben.security.card(b"{}")
    assert anna.security.receive(topics.card(SWARM, carl.name), card) == []
    assert anna.security.counters["untrusted-identity"] == 1
    assert anna.security.receive(topics.card("meadow", ben.name), card) == []
    assert not hears_card(anna, ben, ben.forged_card(swarm="meadow"))
    assert anna.security.counters["untrusted-signature"] == 1
    changed = card[:-2] + bytes([card[-2] ^ 1]) + card[-1:]
    assert anna.security.receive(topics.card(SWARM, ben.name), changed) == []
    assert anna.security.receive(topics.card(SWARM, ben.name), b'{"session": "plain"}') == []
    (heard,) = anna.security.receive(topics.card(SWARM, ben.name), card)
    assert (heard.kind, heard.peer, heard.body) == ("card", ben.name, b"{}")


def test_an_old_card_does_not_come_back():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    old = ben.security.card(b"old")
    clock.now += 10
    again = wake(ben.identity, ben.admission, clock)
    assert anna.security.receive(topics.card(SWARM, ben.name), again.security.card(b"new"))
    assert anna.security.receive(topics.card(SWARM, ben.name), old) == []
    assert anna.security.counters["untrusted-stale"] == 1
    assert anna.security.register.members[ben.name].exchange == again.security.keyring.exchange


def test_the_first_holders_of_a_ticket_get_in_and_stay_in():
    clock = Clock()
    ticket, secret = open_ticket(OWNER, SWARM, uses=2, days=30_000)
    anna = person("anna", clock)
    guests = []
    for label in ("ben", "carl", "dora"):
        identity = Identity.generate(label)
        guests.append(wake(identity, endorse(ticket, secret, identity), clock))
    admitted = [
        bool(anna.security.receive(topics.card(SWARM, guest.name), guest.security.card(b"{}")))
        for guest in guests
    ]
    assert admitted == [True, True, False]
    assert anna.security.counters["untrusted-used-up"] == 1
    clock.now += 1
    assert anna.security.receive(topics.card(SWARM, guests[0].name), guests[0].security.card(b"{}"))
    anna.security.remove(guests[0].name, guests[0].session)  # a place is not freed by leaving
    assert not anna.security.receive(
        topics.card(SWARM, guests[2].name), guests[2].security.card(b"{}")
    )
    next_life = wake(anna.identity, anna.admission, clock, memory=anna.security.snapshot())
    assert not next_life.security.receive(
        topics.card(SWARM, guests[2].name), guests[2].security.card(b"{}")
    )


# --- statuses ----------------------------------------------------------------------------------------


def test_statuses_are_signed_numbered_and_wait_for_their_card():
    clock = Clock()
    anna, ben = person("anna", clock), person("ben", clock)
    at = topics.status(SWARM, ben.name)
    first, second, will = (
        ben.security.status(b"1"), ben.security.status(b"2"), ben.security.will(b"will"),
    )  # fmt: skip
    assert anna.security.receive(at, first) == []  # retained statuses may come before cards
    heard = anna.security.receive(topics.card(SWARM, ben.name), ben.security.card(b"{}"))
    assert [(h.kind, h.body) for h in heard] == [("card", b"{}"), ("status", b"1")]
    assert [h.body for h in anna.security.receive(at, second)] == [b"2"]
    assert anna.security.receive(at, first) == []
    assert anna.security.counters["untrusted-stale"] == 1
    assert [h.body for h in anna.security.receive(at, will)] == [b"will"]
    assert anna.security.receive(at, b'{"state": "left"}') == []
    assert anna.security.receive(topics.status(SWARM, anna.name), second) == []
    assert anna.security.receive(topics.status(SWARM, anna.name), anna.security.status(b"own"))


# --- revocations -------------------------------------------------------------------------------------


def test_who_is_revoked_is_out_at_once_and_cannot_return():
    (anna, ben, carl), _ = group("anna", "ben", "carl")
    first = Revocations().add([ben.name])
    heard = anna.security.receive(revocation_topic(SWARM), first.sign(OWNER, SWARM))
    assert [(h.kind, h.peer) for h in heard] == [
        ("removed", ben.name), ("reissue-status", anna.name),
    ]  # fmt: skip
    assert anna.security.seal(ben.name, "global", b"x") is None
    assert not anna.security.receive(topics.card(SWARM, ben.name), ben.security.card(b"{}"))
    assert anna.security.counters["untrusted-revoked"] == 1
    assert carl.name in anna.security.register.members
    number = carl.security.register.members[ben.name].claims.number
    heard = carl.security.receive(
        revocation_topic(SWARM), Revocations().add(invitations=[number]).sign(OWNER, SWARM)
    )
    assert (heard[0].kind, heard[0].peer) == ("removed", ben.name)
    heard = ben.security.receive(revocation_topic(SWARM), first.sign(OWNER, SWARM))
    assert (heard[0].kind, heard[0].peer, heard[0].body) == ("removed", ben.name, b"revoked")


def test_lists_are_the_owners_and_never_older():
    (anna, ben), _ = group("anna", "ben")
    at = revocation_topic(SWARM)
    forged = Revocations().add([ben.name]).sign(ben.identity, SWARM)
    elsewhere = Revocations().add([ben.name]).sign(OWNER, "meadow")
    for wrong in (forged, elsewhere, b"nonsense", b""):
        assert anna.security.receive(at, wrong) == []
    first, second = Revocations().add(["x@y"]), Revocations().add(["x@y"]).add([ben.name])
    assert anna.security.receive(at, second.sign(OWNER, SWARM))
    assert anna.security.receive(at, first.sign(OWNER, SWARM)) == []
    assert anna.security.counters["untrusted-stale"] == 1
    assert anna.security.register.revocations.number == 2
    memory = anna.security.snapshot()
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
    assert anna.security.tick()[1] == []
    clock.now += 90_000
    heard = [each for each in anna.security.tick()[1] if each.kind != "reissue-card"]
    assert [(each.kind, each.peer) for each in heard] == [("removed", ben.name)]
    own = [each for each in ben.security.tick()[1] if each.kind == "removed"]
    assert (ben.name, b"expired") in [(each.peer, each.body) for each in own]


def test_a_peer_does_not_start_with_models_it_is_not_admitted_to():
    with pytest.raises(TrustError, match=r"implements blue, which invitation .* does not admit"):
        wake(*invited("anna", ("global",)), Clock(), ("global", "blue"))


def test_a_peer_does_not_start_without_the_patterns_of_models_that_may_begin():
    for models in (("global",), ("global", "group2*"), ("global*",)):
        with pytest.raises(TrustError, match=r"implements group\*, which invitation"):
            wake(*invited("anna", models), Clock(), later_models=["group*"])
    for models in (("global", "group*"), ("g*",), None):
        wake(*invited("anna", models), Clock(), later_models=["group*"])


def test_models_that_begin_while_peers_run_are_exchanged_if_invitations_admit_them():
    clock = Clock()
    anna, ben, carl = (
        wake(*invited(label, models), clock)
        for label, models in (
            ("anna", ("global*", "group*")), ("ben", ("global*", "group*")), ("carl", ("global",)),
        )
    )  # fmt: skip
    people, new = (anna, ben, carl), ("global-1f", "group2-0-1f")
    introduce(people)
    assert understand(anna, carl)
    for one in (anna, ben):
        one.security.set_models(new)
    introduce(people)
    for model in (*new, "global"):  # of the model that has ended, transfers may be on their way
        assert understand(anna, ben, model)
    assert anna.security.register.members[ben.name].models == set(new)
    for model in new:
        assert not anna.packets(carl, model)
    # Carl is hostile: its card names the group, and it seals for it.
    carl.security.keyring.add_models(new)
    hears_card(anna, carl, carl.forged_card(models=frozenset((*new, "global"))))
    assert anna.security.register.members[carl.name].models == {"global"}
    assert not anna.packets(carl, new[1])
    assert not received(anna, carl.packets(anna, new[1]), new[1])
    assert anna.security.counters["untrusted-not-a-member"]
    assert understand(anna, carl)
    with pytest.raises(TrustError, match="implements group2-0-1f, which"):
        carl.security.set_models(["group2-0-1f"])


def test_a_restarted_peer_settles_transfers_of_models_that_have_ended():
    clock = Clock()
    anna, ben = (wake(*invited(label, ("global*",)), clock) for label in ("anna", "ben"))
    ben.security.set_models(["global-2"], former=["global", "global-1"])
    anna.security.set_models(["global-2"], former=["global", "global-1"])
    introduce((anna, ben))
    assert understand(anna, ben, "global-1")
    assert not anna.packets(ben, "global-3")


@pytest.mark.parametrize(
    "models",
    [
        {f"group{number}" for number in range(MAX_CARD_MODELS + 1)},
        {"group/+"},
        {"group" + "x" * 60},
        {"group#"},
        {""},
        {"group 1"},
    ],
)
def test_a_card_with_too_many_or_impossible_names_of_models_is_refused(models):
    clock = Clock()
    anna, eve = (wake(*invited(label, ("g*",)), clock) for label in ("anna", "eve"))
    assert not hears_card(anna, eve, eve.forged_card(models=frozenset(models)))
    assert anna.security.counters["untrusted-malformed"] == 1
    most = frozenset(sorted(f"group{number}" for number in range(MAX_CARD_MODELS)))
    assert hears_card(anna, eve, eve.forged_card(models=most))


# --- one invitation, one member ----------------------------------------------------------------------


def renamed(identity, label):
    return Identity.from_secret(label, identity.secret())


def ticket_holder(ticket, identity, clock):
    return wake(identity, endorse(*ticket, identity), clock)


def test_an_invitation_admits_one_label_alone():
    eve = Identity.generate("eve")
    admission = Admission(invite(OWNER, SWARM, eve.label, eve.public, days=30_000))
    other = renamed(eve, "somebody")
    with pytest.raises(TrustError, match=f"the invitation is for {eve.name}") as error:
        check(admission, OWNER.public, SWARM, other.name, other.public)
    assert error.value.cause == "uninvited"


def test_fifty_names_of_one_invitation_are_one_member():
    clock = Clock()
    ben, eve = person("ben", clock), person("eve", clock)
    for number in range(50):
        alias = renamed(eve.identity, f"eve{number}")
        card = eve.forged_card(identity=alias)
        assert ben.security.receive(topics.card(SWARM, alias.name), card) == []
    assert ben.security.counters == {"untrusted-uninvited": 50}
    assert hears_card(ben, eve)
    assert list(ben.security.register.members) == [eve.name]


def test_ten_names_on_a_ticket_of_one_use_are_one_member():
    clock = Clock()
    ben, ticket = person("ben", clock), open_ticket(OWNER, SWARM, uses=1, days=30_000)
    eve = Identity.generate("eve")
    holders = [ticket_holder(ticket, renamed(eve, f"eve{number}"), clock) for number in range(10)]
    admitted = [hears_card(ben, holder) for holder in holders]
    assert admitted == [True] + [False] * 9
    assert ben.security.counters == {"untrusted-second-name": 9}


def test_a_holder_may_take_another_name_once_the_first_is_no_member():
    clock = Clock()
    ben, ticket = person("ben", clock), open_ticket(OWNER, SWARM, uses=1, days=30_000)
    eve = Identity.generate("eve")
    first, second = (ticket_holder(ticket, renamed(eve, label), clock) for label in ("eve", "eva"))
    assert hears_card(ben, first)
    ben.security.remove(first.name, first.session)
    clock.now += 1
    assert hears_card(ben, second)
    assert not hears_card(ben, first)


def test_an_endorsement_names_its_label():
    ticket = open_ticket(OWNER, SWARM, uses=3)
    anna = Identity.generate("anna")
    admission, other = endorse(*ticket, anna), renamed(anna, "other")
    check(admission, OWNER.public, SWARM, anna.name, anna.public)
    with pytest.raises(TrustError, match="has not endorsed this peer"):
        check(admission, OWNER.public, SWARM, other.name, other.public)


def test_an_invitation_of_an_older_version_is_refused_in_one_line():
    anna = Identity.generate("anna")
    head, _ = signed.read(
        invite(OWNER, SWARM, anna.label, anna.public), "invitation", lambda _: OWNER.public
    )
    del head["version"], head["label"]
    with pytest.raises(TrustError, match=r"of version 1.*ask the swarm's owner for a new one"):
        read_claims(signed.sign(OWNER, "invitation", head), OWNER.public)
