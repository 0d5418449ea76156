"""What will expire is mentioned a week before, once a day."""

from __future__ import annotations

import logging
import time

import pytest
from learner_kit import make_learner
from peer_kit import Clocks, Nest, quick
from waiting import until

from gossamer.gossip.security import Identity, invite, public_text, save_invitation
from gossamer.peer import Authority, BrokerAddress
from gossamer.peer.membership import DAY, Reminders, certificate_expiries

INVITATION = "its invitation expires: ask for a new one"


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [each.getMessage() for each in caplog.records]


def test_it_is_mentioned_once_a_day_in_the_last_week(lines):
    reminders = Reminders("ann", {INVITATION: 30 * DAY})
    for hour in range(24 * 32):
        reminders.check(hour * 3600.0)
    assert lines()[:2] == [
        "peer ann: its invitation expires in 6 days: ask for a new one",
        "peer ann: its invitation expires in 5 days: ask for a new one",
    ]
    assert lines()[6:8] == [
        "peer ann: its invitation expires in 23 hours: ask for a new one",
        "peer ann: its invitation has expired: ask for a new one",
    ]
    assert len(lines()) == 9


def test_the_last_hour_is_mentioned_in_words(lines):
    Reminders("ann", {INVITATION: 30 * DAY}).check(30 * DAY - 60)
    assert lines() == ["peer ann: its invitation expires in less than an hour: ask for a new one"]


def test_a_clock_that_was_set_back_does_not_silence_it(lines):
    reminders = Reminders("ann", {INVITATION: 30 * DAY})
    reminders.check(29 * DAY)
    reminders.check(25 * DAY)
    assert len(lines()) == 2


def test_a_peer_mentions_its_invitation(run, tmp_path, lines):
    owner, ann = Identity.generate("owner"), Identity.generate("a")
    ann.save(tmp_path / "a.key")
    save_invitation(tmp_path / "a.invitation", invite(owner, "nest", "a", ann.public, days=20))
    settings = quick(
        rounds="forever", founder=True, trust="swarm", identity=str(tmp_path / "a.key"),
        invitation=str(tmp_path / "a.invitation"), owner=public_text(owner.public),
    )  # fmt: skip

    async def live(days):
        machine = Clocks()
        machine.wall_ahead = days * DAY
        life = Nest(settings).start("a", make_learner("a"), machine=machine)
        await until(life.trains)
        life.peer.leave()
        await life.task

    run(live(1))
    assert not any("invitation" in line for line in lines())
    run(live(14))
    assert any("its invitation expires in 5 days" in line for line in lines())


def test_the_certificates_of_a_connection_are_read(tmp_path):
    authority = Authority.open(tmp_path)
    client = authority.issue_client("ann")
    address = BrokerAddress(
        "mqtts://broker.lan",
        ca=str(authority.certificate), certificate=str(client.certificate), key=str(client.key),
    )  # fmt: skip
    years = [(end - time.time()) / DAY / 365 for end in certificate_expiries(address).values()]
    assert years == pytest.approx([10, 2], rel=0.01)


def test_a_certificate_that_cannot_be_read_is_left_to_the_connection(tmp_path):
    (tmp_path / "ca.pem").write_text("nothing")
    assert certificate_expiries(BrokerAddress("mqtts://b", ca=str(tmp_path / "ca.pem"))) == {}
    assert certificate_expiries(BrokerAddress("mqtts://b", ca=str(tmp_path / "no.pem"))) == {}
