"""`gossamer keygen`, `invite`, `revoke` and `study`, as a person would use them."""

from __future__ import annotations

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
from gossamer.gossip.security import Admission, Identity, Revocations, check, revocation_topic

UNLABELLED = f"gossamer-ed25519:{'A' * 43}"


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


def test_a_list_of_revocations_only_grows(here):
    keygen("owner")
    revoke = ("revoke", "--owner", "owner.key", "--swarm", "garden")
    assert "list 1: 1 peer, 0 invitations" in gossamer(*revoke, "--peer", "ben@abc")
    assert "list 2: 2 peers, 1 invitation" in gossamer(
        *revoke, "--peer", "xyz", "--invitation", "0a"
    )
    owner = Identity.load(here / "owner.key")
    saved = Revocations.load(here / "garden.revocations", owner.public, "garden")
    assert (saved.number, saved.peers, saved.invitations) == (2, {"abc", "xyz"}, {"0a"})
    again = gossamer(*revoke)
    assert "list 2: 2 peers" in again  # as it is
    assert "not published: peers learn of it when" in " ".join(again.split())


def test_a_list_is_published_and_retained(here, mosquitto, run):
    keygen("owner")
    gossamer(
        "revoke", "--owner", "owner.key", "--swarm", "garden",
        "--peer", "ben@abc", "--broker", mosquitto.url,
    )  # fmt: skip

    async def retained():
        from gossamer.gossip import MqttTransport

        async with MqttTransport(mosquitto.url, "reader") as transport:
            await transport.subscribe(revocation_topic("garden"))
            async for message in transport.messages():
                return message
        return None

    message = run(retained())
    owner = Identity.load(here / "owner.key")
    assert message.retain
    assert Revocations.read(message.payload, owner.public, "garden").peers == {"abc"}


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
    gossamer("revoke", "--owner", "owner.key", "--swarm", "garden", "--peer", "a")
    (here / "owner.key").rename(here / "old.key")
    keygen("owner")
    with pytest.raises(GossamerError, match=r"garden\.revocations: is not this owner's list"):
        gossamer("revoke", "--owner", "owner.key", "--swarm", "garden", "--peer", "b")


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
