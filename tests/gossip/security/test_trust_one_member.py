"""One invitation, or one use of a ticket, admits one member, whatever names its holder makes up."""

from __future__ import annotations

import numpy as np
import pytest
from trust_kit import OWNER, SWARM, Clock, person, wake

from gossamer.gossip import topics
from gossamer.gossip.messages import Give
from gossamer.gossip.pushsum import ONE
from gossamer.gossip.security import (
    Admission,
    Guards,
    GuardSettings,
    Identity,
    TrustError,
    endorse,
    invite,
    open_ticket,
    read_terms,
    signed,
)
from gossamer.gossip.security.invitation import check


def renamed(identity, label):
    return Identity.from_secret(label, identity.secret())


def ticket_holder(ticket, identity, clock):
    return wake(identity, endorse(*ticket, identity), clock)


def hears_card(listener, speaker):
    card = speaker.trust.card(b"{}")
    return bool(listener.trust.hear(topics.card(SWARM, speaker.name), card))


def test_an_invitation_admits_one_label_alone():
    eve = Identity.generate("eve")
    paper = Admission(invite(OWNER, SWARM, eve.label, eve.public, days=30_000))
    other = renamed(eve, "somebody")
    with pytest.raises(TrustError, match=f"the invitation is for {eve.name}") as error:
        check(paper, OWNER.public, SWARM, other.name, other.public)
    assert error.value.cause == "uninvited"


def test_fifty_names_of_one_invitation_are_one_member():
    clock = Clock()
    ben, eve = person("ben", clock), person("eve", clock)
    for number in range(50):
        alias = renamed(eve.identity, f"eve{number}")
        eve.trust.identity = alias  # a hostile peer signs what it likes
        assert ben.trust.hear(topics.card(SWARM, alias.name), eve.trust.card(b"{}")) == []
    assert ben.trust.counters == {"untrusted-uninvited": 50}
    eve.trust.identity = eve.identity
    assert hears_card(ben, eve)
    assert list(ben.trust.register.members) == [eve.name]


def test_ten_names_on_a_ticket_of_one_use_are_one_member():
    clock = Clock()
    ben, ticket = person("ben", clock), open_ticket(OWNER, SWARM, uses=1, days=30_000)
    eve = Identity.generate("eve")
    holders = [ticket_holder(ticket, renamed(eve, f"eve{number}"), clock) for number in range(10)]
    admitted = [hears_card(ben, holder) for holder in holders]
    assert admitted == [True] + [False] * 9
    assert ben.trust.counters == {"untrusted-second-name": 9}


def test_a_holder_may_take_another_name_once_the_first_is_no_member():
    clock = Clock()
    ben, ticket = person("ben", clock), open_ticket(OWNER, SWARM, uses=1, days=30_000)
    eve = Identity.generate("eve")
    first, second = (ticket_holder(ticket, renamed(eve, label), clock) for label in ("eve", "eva"))
    assert hears_card(ben, first)
    ben.trust.gone(first.name, first.session)
    clock.now += 1
    assert hears_card(ben, second)
    assert not hears_card(ben, first)


def test_an_endorsement_names_its_label():
    ticket = open_ticket(OWNER, SWARM, uses=3)
    anna = Identity.generate("anna")
    admission, other = endorse(*ticket, anna), renamed(anna, "other")
    check(admission, OWNER.public, SWARM, anna.name, anna.public)
    with pytest.raises(TrustError, match="was not endorsed for this peer"):
        check(admission, OWNER.public, SWARM, other.name, other.public)


def test_a_paper_of_an_older_version_is_refused_in_one_line():
    anna = Identity.generate("anna")
    head, _ = signed.read(
        invite(OWNER, SWARM, anna.label, anna.public), "invitation", lambda _: OWNER.public
    )
    del head["version"], head["label"]
    with pytest.raises(TrustError, match=r"of version 1.*ask the swarm's owner for a new one"):
        read_terms(signed.sign(OWNER, "invitation", head), OWNER.public)


def test_another_label_washes_no_strikes():
    own = np.linspace(-1, 1, 101)
    guards = Guards(GuardSettings(strikes=3))
    for label in ("eve", "eva", "evi"):
        give = Give("v", f"{label}@id", "s", 1, "anna@x", "t", ONE, -own)
        assert guards.inspect(give, own, ONE, ONE, 0.0) == "distance"
    assert guards.is_quarantined("another@id", 0.0)
    assert not guards.is_quarantined("eve@other", 0.0)
