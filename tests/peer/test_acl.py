"""A mosquitto with a swarm's rules: everybody writes under its own name, and reads its own mail."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time

import aiomqtt
import pytest

from gossamer.gossip import TopicError, topics
from gossamer.gossip.trust import Identity, revocation_topic
from gossamer.peer.acl import acl_text, write_rules
from gossamer.peer.broker import Broker, BrokerError, BrokerSettings, find_mosquitto, free_port

SWARM = "garden"
ANNA, BEN = (
    Identity.from_secret(label, bytes([n]) * 32).name for n, label in ((1, "anna"), (2, "ben"))
)


def test_files_are_private_and_passwords_stay(tmp_path):
    files = write_rules(tmp_path, SWARM, [ANNA, BEN], observers=["watch"])
    for path in (files.passwords, files.acl, files.config, *files.secrets.values()):
        assert path.stat().st_mode & 0o777 == 0o600
    words = {user: path.read_text() for user, path in files.secrets.items()}
    assert set(words) == {ANNA, BEN, "owner", "watch"}
    assert len(set(words.values())) == 4
    assert all(word.strip() not in files.passwords.read_text() for word in words.values())
    carl = Identity.generate("carl").name
    again = write_rules(tmp_path, SWARM, [ANNA, BEN, carl], observers=["watch"])
    assert {user: again.secrets[user].read_text() for user in words} == words
    assert carl in again.acl.read_text()


def test_wrong_names_are_refused(tmp_path):
    with pytest.raises(TopicError, match="user name 'a/b'"):
        acl_text(SWARM, ["a/b"])
    with pytest.raises(TopicError, match=r"contains '\+'"):
        write_rules(tmp_path, SWARM, ["+"])
    with pytest.raises(TopicError, match="contains"):
        acl_text(SWARM, ["anna\ntopic #"])
    with pytest.raises(BrokerError, match="the user 'owner' has two parts"):
        write_rules(tmp_path, SWARM, ["owner"])


@pytest.fixture
def broker(tmp_path):
    program = find_mosquitto()
    if program is None:
        pytest.skip("mosquitto is not on PATH")
    port = free_port("127.0.0.1")
    files = write_rules(tmp_path / "rules", SWARM, [ANNA, BEN], observers=["watch"], port=port)
    process = subprocess.Popen(
        [program, "-c", str(files.config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "mosquitto did not take the rules"
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield port, {user: path.read_text().strip() for user, path in files.secrets.items()}
    finally:
        process.terminate()
        process.wait(120)


def client(broker, user, password=None):
    port, words = broker
    return aiomqtt.Client(
        "127.0.0.1", port, username=user, password=password or words[user], identifier=user,
        timeout=120,
    )  # fmt: skip


async def heard(one, listener, attempts, last):
    """The topics on which `listener` hears something when `one` publishes to `attempts`, then `last`."""
    await listener.subscribe("#", qos=1)
    for topic in [*attempts, last]:
        await one.publish(topic, b"x", qos=1)
    found = []
    async for message in listener.messages:
        found.append(str(message.topic))
        if found[-1] == last:
            return found
    return found


def test_nobody_writes_under_anothers_name(broker, run):
    async def scenario():
        async with client(broker, ANNA) as anna, client(broker, "watch") as watch:
            foreign = [
                topics.card(SWARM, BEN),
                topics.status(SWARM, BEN),
                topics.metrics(SWARM, BEN),
            ]
            foreign += [revocation_topic(SWARM), f"{topics.ROOT}/{SWARM}/other", "elsewhere"]
            own = [topics.card(SWARM, ANNA), topics.status(SWARM, ANNA)]
            return await heard(anna, watch, [*foreign, *own], topics.metrics(SWARM, ANNA))

    own = [topics.card(SWARM, ANNA), topics.status(SWARM, ANNA), topics.metrics(SWARM, ANNA)]
    assert run(scenario()) == own


def test_everybody_reads_its_own_mail_alone(broker, run):
    async def scenario():
        async with client(broker, ANNA) as anna, client(broker, BEN) as ben:
            mail = [topics.inbox(SWARM, ANNA, "global"), topics.inbox(SWARM, BEN, "global")]
            return await heard(anna, ben, mail, topics.card(SWARM, ANNA))

    assert run(scenario()) == [topics.inbox(SWARM, BEN, "global"), topics.card(SWARM, ANNA)]


def test_the_owner_revokes_and_nobody_else(broker, run):
    async def scenario():
        async with client(broker, "owner") as owner, client(broker, BEN) as ben:
            attempts = [topics.card(SWARM, BEN), topics.death(SWARM, ANNA)]
            return await heard(owner, ben, attempts, revocation_topic(SWARM))

    assert run(scenario()) == [topics.death(SWARM, ANNA), revocation_topic(SWARM)]


def test_no_peer_declares_another_dead(broker, run):
    async def scenario():
        async with client(broker, ANNA) as anna, client(broker, BEN) as ben:
            deaths = [topics.death(SWARM, BEN), topics.death(SWARM, ANNA)]
            return await heard(anna, ben, deaths, topics.card(SWARM, ANNA))

    assert run(scenario()) == [topics.card(SWARM, ANNA)]


@pytest.mark.parametrize(("user", "password"), [(ANNA, "wrong"), ("stranger", "x"), (None, None)])
def test_strangers_stay_outside(broker, run, user, password):
    async def scenario():
        port, _ = broker
        async with aiomqtt.Client("127.0.0.1", port, username=user, password=password):
            pass

    with pytest.raises(aiomqtt.MqttError):
        run(scenario())


def test_mosquitto_understands_the_password_file(tmp_path):
    if shutil.which("mosquitto_passwd") is None:
        pytest.skip("mosquitto_passwd is not on PATH")
    files = write_rules(tmp_path, SWARM, [ANNA])
    done = subprocess.run(
        ["mosquitto_passwd", "-D", str(files.passwords), ANNA],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ANNA not in files.passwords.read_text()


def test_a_broker_of_ours_keeps_the_rules(tmp_path, run):
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not on PATH")
    files = write_rules(tmp_path, SWARM, [ANNA])
    settings = BrokerSettings(password_file=files.passwords, acl_file=files.acl)
    word = files.secrets[ANNA].read_text().strip()

    async def scenario():
        async with Broker(settings, kind="mosquitto") as ours:
            with pytest.raises(aiomqtt.MqttError):
                async with aiomqtt.Client("127.0.0.1", ours.port):
                    pass
            async with aiomqtt.Client("127.0.0.1", ours.port, username=ANNA, password=word) as anna:
                await anna.subscribe(topics.every(SWARM, "card"))
                for peer in (BEN, ANNA):  # the first is not hers to write
                    await anna.publish(topics.card(SWARM, peer), peer, qos=1)
                message = await anext(aiter(anna.messages))
                return message.payload.decode()

    assert run(scenario()) == ANNA


def test_the_embedded_broker_says_that_it_knows_no_rules(tmp_path):
    files = write_rules(tmp_path, SWARM, [ANNA])
    with pytest.raises(BrokerError, match="cannot keep a swarm's rules"):
        Broker(BrokerSettings(acl_file=files.acl), kind="amqtt")
