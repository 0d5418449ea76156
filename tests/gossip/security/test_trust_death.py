"""A death notice counts if the owner signed it, for the peer and the session that it names."""

from __future__ import annotations

import pytest
from trust_kit import OWNER, SWARM, group

from gossamer.gossip import topics
from gossamer.gossip.security import Death, Identity, NoTrust, TrustError, sign_death

DEATH = Death("s-anna", "its disk burnt", "owner", 1.8e9)


def test_the_owners_notice_is_heard_by_the_others_and_by_the_peer_itself():
    (anna, ben), _ = group("anna", "ben")
    notice = sign_death(OWNER, SWARM, anna.name, DEATH)
    for listener in (anna, ben):
        (heard,) = listener.trust.hear(topics.death(SWARM, anna.name), notice)
        assert (heard.kind, heard.peer, Death.decode(heard.body)) == ("death", anna.name, DEATH)


def test_nobody_elses_notice_counts():
    (anna, ben, carl), _ = group("anna", "ben", "carl")
    topic = topics.death(SWARM, anna.name)
    for forged in (
        sign_death(Identity.generate("owner"), SWARM, anna.name, DEATH),
        sign_death(carl.identity, SWARM, anna.name, DEATH),
        sign_death(OWNER, SWARM, carl.name, DEATH),
        sign_death(OWNER, "meadow", anna.name, DEATH),
    ):
        assert ben.trust.hear(topic, forged) == []
    assert ben.trust.counters == {"untrusted-signature": 4}
    assert ben.trust.hear(topic, DEATH.encode()) == []
    assert ben.trust.hear(topic, b"") == []
    assert ben.trust.counters["untrusted-malformed"] == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b"[" * 100_000, b'{"session": 1, "reason": "", "by": "", "time": 0}',
     b'{"session": "a b", "reason": "", "by": "", "time": 0}',
     b'{"session": "s", "reason": "", "by": "", "time": NaN}'],
)  # fmt: skip
def test_a_notice_of_another_form_is_malformed(body):
    with pytest.raises(TrustError, match="a death notice of a form"):
        Death.decode(body)


def test_what_is_logged_of_a_notice_is_short_and_printable():
    death = Death.decode(Death("s", "a\nb" + "c" * 500, "\x1b[31mme", 0.0).encode())
    assert "\n" not in death.reason
    assert len(death.reason) <= 200
    assert death.by == "[31mme"


def test_without_trust_a_notice_is_believed_as_it_is():
    trust, topic = NoTrust("ben"), topics.death(SWARM, "anna")
    (heard,) = trust.hear(topic, DEATH.encode())
    assert (heard.kind, heard.peer, heard.body) == ("death", "anna", DEATH.encode())
    assert trust.hear(topic, b"") == []


def test_a_death_is_state_that_no_transport_drops():
    topic = topics.death(SWARM, "anna")
    assert topics.is_state(topic)
    assert topics.parse(topic).kind == "death"
    assert topics.matches(topics.every(SWARM, "death"), topic)
