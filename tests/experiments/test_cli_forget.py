"""`gossamer forget`: an operator declares a dead peer's session over, and nobody else's."""

from __future__ import annotations

import json
import re

import pytest
import typer
from typer.testing import CliRunner

from gossamer.experiments.cli import trust as cli_trust
from gossamer.experiments.cli.console import with_options
from gossamer.experiments.config.tables import ConfigError
from gossamer.gossip import MqttTransport, topics
from gossamer.gossip.security import (
    Admission,
    Death,
    Identity,
    NullSecurity,
    SwarmSecurity,
    TrustError,
    invite,
)

SWARM = "garden"
app = typer.Typer()
app.command("forget")(with_options(cli_trust.forget_command))


pytestmark = pytest.mark.usefixtures("short_wait_for_retained")


def forget(broker, name, *words):
    result = CliRunner().invoke(app, [broker.url, SWARM, name, *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def mistake(broker, name, *words):
    with pytest.raises(ConfigError) as error:
        forget(broker, name, *words)
    assert "\n" not in str(error.value)
    return str(error.value)


def body(session, state=None):
    return json.dumps({"session": session} | ({"state": state} if state else {})).encode()


def publish(run, broker, *messages):
    async def all_of_them():
        async with MqttTransport(broker.url, "publisher") as transport:
            for topic, payload in messages:
                await transport.publish(topic, payload, retain=True, qos=1)

    run(all_of_them())


def retained(run, broker, topic):
    async def first():
        async with MqttTransport(broker.url, "reader") as transport:
            await transport.subscribe(topic)
            async for message in transport.messages():
                return message
        raise AssertionError("it has ended")

    message = run(first())
    assert message.retain
    return bytes(message.payload)


def plain_peer(run, broker, name, state="offline"):
    publish(
        run, broker,
        (topics.card(SWARM, name), body("s1")),
        (topics.status(SWARM, name), body("s1", state)),
    )  # fmt: skip


def trusted_peer(run, broker, owner, state="offline"):
    """A dead peer's card and last status; another member, to hear the notice."""
    members = []
    for label in ("anna", "ben"):
        one = Identity.generate(label)
        paper = Admission(invite(owner, SWARM, one.label, one.public))
        members.append(
            SwarmSecurity(
                one, paper, owner.public, swarm=SWARM, session="s1", models=["m"], since=0.0
            )
        )
    anna, ben = members
    publish(
        run, broker,
        (topics.card(SWARM, anna.name), anna.card(body("s1"))),
        (topics.status(SWARM, anna.name), anna.status(body("s1", state))),
    )  # fmt: skip
    return anna, ben


def test_a_dead_peers_session_is_declared_over(mosquitto, run):
    plain_peer(run, mosquitto, "dead-a")
    output = forget(mosquitto, "dead-a", "--reason", "the disk burnt")
    assert output == "dead-a of swarm garden: session s1 is declared dead\n"
    topic = topics.death(SWARM, "dead-a")
    (heard,) = NullSecurity("b").receive(topic, retained(run, mosquitto, topic))
    death = Death.decode(heard.body)
    assert (heard.kind, heard.peer) == ("death", "dead-a")
    assert (death.session, death.reason, death.by) == ("s1", "the disk burnt", "operator")


def test_with_trust_the_owner_signs(mosquitto, run, tmp_path):
    owner = Identity.generate("owner")
    owner.save(tmp_path / "owner.key")
    anna, ben = trusted_peer(run, mosquitto, owner)
    assert "so only its owner can do this: give --owner" in mistake(mosquitto, anna.name)
    other = Identity.generate("other")
    other.save(tmp_path / "other.key")
    words = ("--owner", str(tmp_path / "other.key"))
    assert "is not the owner that invited" in mistake(mosquitto, anna.name, *words)
    assert "(with trust: NAME@ID, and --owner)" in mistake(mosquitto, "anna")
    output = forget(mosquitto, "anna", "--owner", str(tmp_path / "owner.key"))
    assert output.startswith(f"{anna.name} of swarm garden: session s1")
    topic = topics.death(SWARM, anna.name)
    (heard,) = ben.receive(topic, retained(run, mosquitto, topic))
    assert (heard.kind, Death.decode(heard.body).session) == ("death", "s1")
    assert Death.decode(heard.body).by == owner.name


def test_a_peer_that_is_online_is_forgotten_by_force_alone(mosquitto, run):
    plain_peer(run, mosquitto, "alive", "online")
    message = "forget: alive is online in session s1: stop it first, or add --force"
    assert mistake(mosquitto, "alive") == message
    assert "session s1" in forget(mosquitto, "alive", "--force")
    # A session before the one that is online may be declared over.
    assert "session s0" in forget(mosquitto, "alive", "--session", "s0")


def test_mistakes_are_one_clear_line(mosquitto, run, tmp_path):
    assert "has no card or status of nobody in swarm garden" in mistake(mosquitto, "nobody")
    assert "session s9" in forget(mosquitto, "nobody", "--session", "s9")
    plain_peer(run, mosquitto, "gone", "left")
    assert (
        mistake(mosquitto, "gone") == "forget: gone has left by itself: there is nothing to forget"
    )
    Identity.generate("owner").save(tmp_path / "owner.key")
    words = ("--owner", str(tmp_path / "owner.key"))
    plain_peer(run, mosquitto, "dead-b")
    assert "has no trust: leave out --owner" in mistake(mosquitto, "dead-b", *words)
    with pytest.raises(TrustError, match=re.escape("none.key: cannot be read")):
        forget(mosquitto, "dead-b", "--owner", "none.key")
    with pytest.raises(topics.TopicError, match="the peer name 'a/b' contains"):
        forget(mosquitto, "a/b")
