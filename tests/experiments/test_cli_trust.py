"""`gossamer keygen`, `invite`, `revoke` and `study`, as a person would use them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re

import pytest
import torch
from typer.testing import CliRunner

from gossamer.errors import GossamerError
from gossamer.experiments.cli.app import app
from gossamer.experiments.papers.security import (
    ObservationRun,
    watch_neighbour,
)
from gossamer.gossip import MqttTransport, topics
from gossamer.gossip.security import (
    Admission,
    Identity,
    Revocations,
    SwarmSecurity,
    check,
    invite,
    read_claims,
    revocation_topic,
)
from gossamer.peer import Broker, BrokerSettings, write_rules

UNLABELLED = f"gossamer-ed25519:{'A' * 43}"


pytestmark = pytest.mark.usefixtures("short_wait_for_retained")


@pytest.fixture(autouse=True)
def _one_thread():
    """Small matrices: threads only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def gossamer(*words):
    """Run a command; its output, or the one-line error that `main` would print."""
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def keygen(label):
    output = gossamer("keygen", label)
    return re.search(r"gossamer-ed25519:\S+", output).group()


def test_from_keys_to_papers(here):
    keygen("owner")
    anna = keygen("anna")
    assert (here / "anna.key").stat().st_mode & 0o777 == 0o600
    output = gossamer(
        "invite", "--owner", "owner.key", "--swarm", "garden", "--peer", anna,
        "--model", "global", "--model", "blue*", "-o", "anna.invitation",
    )  # fmt: skip
    assert "for garden, admits to blue*, global" in output
    owner, identity = Identity.load(here / "owner.key"), Identity.load(here / "anna.key")
    assert identity.label == "anna"
    admission = Admission.load(here / "anna.invitation", identity)
    assert check(admission, owner.public, "garden", identity.name, identity.public).models == {
        "global",
        "blue*",
    }
    gossamer("invite", "--owner", "owner.key", "--swarm", "garden", "--uses", "3", "-o", "ticket")
    ticket = Admission.load(here / "ticket", identity)
    assert check(ticket, owner.public, "garden", identity.name, identity.public).uses == 3


BEN, CARL = (Identity.from_secret(label, bytes([n]) * 32) for n, label in ((1, "ben"), (2, "carl")))
NUMBER = "0123456789abcdef"
REVOKE = ("revoke", "--owner", "owner.key", "--swarm", "garden")


def test_a_list_of_revocations_only_grows(here):
    keygen("owner")
    first = gossamer(*REVOKE, "--peer", BEN.name)
    assert "list 1: 1 peer, 0 invitations" in first
    assert f"revoked: peer {BEN.name}" in first
    assert "nobody knows it here" in " ".join(first.split())
    assert "list 2: 2 peers, 1 invitation" in gossamer(
        *REVOKE, "--peer", CARL.id, "--invitation", NUMBER
    )
    owner = Identity.load(here / "owner.key")
    saved = Revocations.load(here / "garden.revocations", owner.public, "garden")
    assert (saved.number, saved.peers, saved.invitations) == (2, {BEN.id, CARL.id}, {NUMBER})
    again = gossamer(*REVOKE)
    assert "list 2: 2 peers" in again  # as it is
    assert "not published: peers learn of it when" in " ".join(again.split())


def retained_list(run, broker, swarm="garden", seconds=None):
    """The message that the broker holds for a swarm's revocations; None if none comes within the seconds."""

    async def retained():
        async with MqttTransport(broker.url, "reader") as transport, asyncio.timeout(seconds):
            await transport.subscribe(revocation_topic(swarm))
            async for message in transport.messages():
                return message
        return None

    with contextlib.suppress(TimeoutError):
        return run(retained())
    return None


def publish_cards(run, broker, owner, *members, swarm="garden"):
    """Publish the cards of members with trust, of which the owner has invited each; return the numbers."""
    numbers = []

    async def publish():
        async with MqttTransport(broker.url, "publisher") as transport:
            for one in members:
                paper = Admission(invite(owner, swarm, one.label, one.public))
                numbers.append(read_claims(paper.invitation, owner.public).number)
                security = SwarmSecurity(
                    one, paper, owner.public, swarm=swarm, session="s", models=["m"], since=0.0
                )
                card = security.card(json.dumps({"session": "s"}).encode())
                await transport.publish(topics.card(swarm, one.name), card, retain=True, qos=1)

    run(publish())
    return numbers


def test_a_list_is_published_and_retained(here, empty_broker, run):
    keygen("owner")
    owner = Identity.load(here / "owner.key")
    number, _ = publish_cards(run, empty_broker, owner, BEN, CARL)
    words = ("--broker", empty_broker.url)
    output = gossamer(*REVOKE, "--peer", "ben", "--invitation", number, *words)
    assert f"revoked: peer {BEN.name}" in output
    assert "published at gossamer/v1/garden/owner/revocations; the broker holds it" in output
    message = retained_list(run, empty_broker)
    assert message.retain
    held = Revocations.read(message.payload, owner.public, "garden")
    assert (held.peers, held.invitations) == ({BEN.id}, {number})


def test_a_stranger_cannot_prevent_a_revocation(here, empty_broker, run):
    """Its cards have names that no peer may have, or no invitation."""
    owner = Identity.generate("owner")
    owner.save(here / "owner.key")
    publish_cards(run, empty_broker, owner, BEN)

    async def intrude():
        async with MqttTransport(empty_broker.url, "stranger") as transport:
            for name in ("a!b", "x" * 300, "eve", CARL.name):
                topic = f"gossamer/v1/garden/peer/{name}/card"
                await transport.publish(topic, b"nonsense", retain=True)

    run(intrude())
    words = (*REVOKE, "--peer", BEN.name, "--broker", empty_broker.url)
    assert "the broker holds it" in gossamer(*words)


def test_a_list_that_would_exclude_nobody_is_refused_and_changes_nothing(here, empty_broker, run):
    keygen("owner")
    owner = Identity.load(here / "owner.key")
    twin = Identity.from_secret("ben", bytes([3]) * 32)
    publish_cards(run, empty_broker, owner, BEN, CARL, twin)
    broker = ("--broker", empty_broker.url)
    for words, message in (
        (("--peer", "bem"), "peer 'bem': is no full name, NAME@ID"),
        (("--peer", ""), "peer '': is no full name"),
        (("--peer", "ben@"), "peer 'ben@': has no id of 20 letters"),
        (("--peer", "ben@abc"), "peer 'ben@abc': has no id of 20 letters"),
        (("--peer", "ben"), f"there are {', '.join(sorted([BEN.name, twin.name]))}: write the one"),
        (("--peer", f"ben@{CARL.id}"), f"this id is that of {CARL.name}"),
        (
            ("--peer", f"ben@{'a' * 20}"),
            f"nobody of this name is in the cards at {empty_broker.url}",
        ),
        (("--invitation", "7"), "invitation '7': is no number of an invitation"),
        (("--invitation", NUMBER), "no peer at the broker has it"),
    ):
        with pytest.raises(GossamerError, match=re.escape(message)) as error:
            gossamer(*REVOKE, *words, *broker)
        assert "\n" not in str(error.value)
    misspelt = ("revoke", "--owner", "owner.key", "--swarm", "gardn", "--peer", BEN.name, *broker)
    with pytest.raises(GossamerError, match="has no card of a swarm 'gardn'"):
        gossamer(*misspelt)
    (here / "owner.key").rename(here / "old.key")
    keygen("owner")
    with pytest.raises(GossamerError, match="was invited with this owner's key"):
        gossamer(*REVOKE, "--peer", BEN.name, *broker)
    assert not list(here.glob("*.revocations"))
    assert retained_list(run, empty_broker, seconds=1.0) is None
    assert retained_list(run, empty_broker, "gardn", seconds=1.0) is None
    assert "the broker holds it" in gossamer(*misspelt, "--force")


def test_a_label_is_looked_up_among_the_enrolled_devices(here):
    gossamer("enrol", "--swarm", "garden", "--broker", "mqtt://broker.lan", "ben", "carl")
    name = json.loads((here / "garden/broker/swarm.json").read_text())["peers"]["ben"]
    revoke = ("revoke", "--owner", "garden/owner.key", "--swarm")
    with pytest.raises(GossamerError, match="did you mean 'ben@") as error:
        gossamer(*revoke, "garden", "--peer", "bem")
    assert "garden/broker/swarm.json" in str(error.value)
    with pytest.raises(GossamerError, match="is of swarm 'garden', not 'gardn'"):
        gossamer(*revoke, "gardn", "--peer", "ben")
    assert f"revoked: peer {name}" in gossamer(*revoke, "garden", "--peer", "ben")


def test_a_broker_that_does_not_keep_the_list_is_found_out(
    here, run, monkeypatch, mosquitto_required
):
    """A user who may not publish it: in MQTT 3.1.1 mosquitto acknowledges the list and drops it."""
    mosquitto_required()
    monkeypatch.setattr("gossamer.experiments.cli.trust._PUBLISH_SECONDS", 3.0)
    keygen("owner")
    rules = write_rules(here / "rules", "garden", [BEN.name])
    words = {user: str(path) for user, path in rules.secrets.items()}
    with Broker(BrokerSettings(rules=rules), kind="mosquitto") as broker:
        for user in (BEN.name, "owner"):
            url = broker.url.replace("//", f"//{user.replace('@', '%40')}@")
            command = (*REVOKE, "--peer", BEN.name, "--broker", url, "--password-file", words[user])
            if user == "owner":
                assert "the broker holds it" in gossamer(*command, "--force")
                continue
            with pytest.raises(GossamerError, match="acknowledged the list, but does not hold it"):
                gossamer(*command, "--force")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["keygen", "owner"], "owner.key: exists already"),
        (
            ["invite", "--owner", "none.key", "--swarm", "g", "--uses", "1", "-o", "x"],
            "cannot be read",
        ),
        (
            ["invite", "--owner", "owner.key", "--swarm", "g", "-o", "x"],
            "either --peer KEY or --uses N",
        ),
        (
            ["invite", "--owner", "owner.key", "--swarm", "g", "--peer", "zzz", "-o", "x"],
            "'zzz' is not a public key",
        ),
        (
            ["invite", "--owner", "owner.key", "--swarm", "g", "-o", "x", "--peer", UNLABELLED],
            "has no label: use the whole line",
        ),
        (
            [
                "invite",
                "--owner",
                "owner.key",
                "--swarm",
                "g",
                "-o",
                "x",
                "--uses",
                "1",
                "--model",
                "*",
            ],
            "the pattern * would admit to every model: leave the models out if that is meant",
        ),
        (
            ["invite", "--owner=owner.key", "--swarm=g", "--out=x", "--days=0", "--uses=1"],
            "an invitation is valid for a finite number of days above 0, not 0",
        ),
        (["revoke", "--owner", "owner.key", "--swarm", "g"], "nothing to revoke"),
        (["study", "nothing"], "there are auto, private, hostile"),
    ],
)
def test_mistakes_are_one_clear_line(here, words, message):
    keygen("owner")
    with pytest.raises(GossamerError, match=re.escape(message)) as error:
        gossamer(*words)
    assert "\n" not in str(error.value)


def test_another_owners_list_is_not_continued(here):
    keygen("owner")
    gossamer(*REVOKE, "--peer", BEN.name)
    (here / "owner.key").rename(here / "old.key")
    keygen("owner")
    with pytest.raises(GossamerError, match=r"garden\.revocations: is not this owner's list"):
        gossamer(*REVOKE, "--peer", CARL.name)


# --- studies -----------------------------------------------------------------------------------------


def test_private_averaging_hides_what_plain_shows():
    sizes = {"peers": 20, "degree": 6, "trials": 1000, "exchanges": 50}
    plain, masked = (watch_neighbour(ObservationRun("", scale, **sizes)) for scale in (None, 64.0))
    assert plain["first"] == pytest.approx(1.0, abs=1e-9)
    assert plain["everything"] == pytest.approx(1.0, abs=1e-6)
    assert masked["first"] < 0.1
    assert masked["everything"] < 19**-0.5 + 0.1  # no more than the average itself tells
    assert masked["error"] < 1e-6
    assert plain["exchanges"] < masked["exchanges"] <= 50


def test_without_masks_the_study_would_notice():
    """With masks that are far smaller than the values, the curious neighbour does find the value."""
    found = watch_neighbour(
        ObservationRun("", 2.0**-40, peers=12, degree=4, trials=1000, exchanges=5)
    )
    assert found["first"] == pytest.approx(1.0, abs=1e-9)
