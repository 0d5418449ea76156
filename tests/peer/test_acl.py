"""A broker with a swarm's rules: everybody writes under its own name, and reads its own mail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from dataclasses import replace
from io import StringIO

import aiomqtt
import pytest
from ports import unused_port
from waiting import wait_until

from gossamer.gossip import TopicError, topics
from gossamer.gossip.security import Identity, revocation_topic
from gossamer.peer import (
    Broker,
    BrokerError,
    BrokerSettings,
    find_mosquitto,
    find_nats,
    serve,
    write_cluster,
    write_rules,
)

SWARM = "garden"
ANNA, BEN = (
    Identity.from_secret(label, bytes([n]) * 32).name for n, label in ((1, "anna.v2"), (2, "ben"))
)


PATTERNS = [
    "#",
    *(
        topics.of_all(SWARM, kind)
        for kind in ("card", "status", "metrics", "summary", "death", "inbox")
    ),
    *(topics.inboxes(SWARM, peer) for peer in (ANNA, BEN)),
    revocation_topic(SWARM),
]


def test_files_are_private_and_passwords_stay(tmp_path):
    files = write_rules(tmp_path, SWARM, [ANNA, BEN], observers=["watch"])
    for path in (
        files.passwords, files.acl, files.config, files.nats_config, *files.secrets.values()
    ):  # fmt: skip
        assert path.stat().st_mode & 0o777 == 0o600
    words = {user: path.read_text() for user, path in files.secrets.items()}
    assert set(words) == {ANNA, BEN, "owner", "watch"}
    assert len(set(words.values())) == 4
    assert all(word.strip() not in files.passwords.read_text() for word in words.values())
    carl = Identity.generate("carl").name
    again = write_rules(tmp_path, SWARM, [ANNA, BEN, carl], observers=["watch"])
    assert {user: again.secrets[user].read_text() for user in words} == words
    assert carl in again.acl.read_text()


def test_users_that_are_being_copied_are_read_when_they_are_complete(tmp_path):
    rules = write_rules(tmp_path, SWARM, [ANNA])
    complete = rules.nats_config.read_text("utf-8")

    class Screen(StringIO):
        """Copies the rest once the broker has seen a part."""

        def write(self, text: str) -> int:
            if "users and permissions stay as they are" in text:
                rules.nats_config.write_text(complete, "utf-8")
            if "users and permissions were read again" in text:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().write(text)

    def copy_a_part(broker: Broker) -> None:
        rules.nats_config.write_text(complete[:99], "utf-8")
        os.utime(rules.nats_config, (0.0, 0.0))

    screen = Screen()
    assert serve(BrokerSettings(rules=rules), kind="nats", out=screen, ready=copy_a_part) == 0
    assert f"{rules.nats_config}: cannot be read: it is incomplete or damaged" in screen.getvalue()


def test_wrong_names_are_refused(tmp_path):
    with pytest.raises(TopicError, match="user name 'a/b'"):
        write_rules(tmp_path, SWARM, ["a/b"])
    with pytest.raises(TopicError, match=r"contains '\+'"):
        write_rules(tmp_path, SWARM, ["+"])
    with pytest.raises(TopicError, match="contains"):
        write_rules(tmp_path, SWARM, ["anna\ntopic #"])
    with pytest.raises(BrokerError, match="the user 'owner' has two roles"):
        write_rules(tmp_path, SWARM, ["owner"])


@pytest.fixture(
    params=["mosquitto", "nats", "nats of a cluster", "mosquitto's own", "nats' own", "nats before"]
)
def broker(tmp_path, request):
    """A broker of ours with the rules; or one that is started with the file that they were written to.

    Of a cluster: with the users in the file of a node. Before: with rules that were written when an observer
    had an empty list of what it may publish, which nats-server takes for no restriction.
    """
    kind = "nats" if request.param.startswith("nats") else "mosquitto"
    program = {"nats": find_nats, "mosquitto": find_mosquitto}[kind]()
    if program is None:
        pytest.skip(f"{kind} is not installed")
    port = unused_port()
    files = write_rules(tmp_path / "rules", SWARM, [ANNA, BEN], observers=["watch"], port=port)
    words = {user: path.read_text().strip() for user, path in files.secrets.items()}
    if request.param == "nats of a cluster":
        hosts = ["a.lan", "b.lan", "c.lan"]
        node, *_ = write_cluster(
            tmp_path / "cluster", hosts, swarm=SWARM, peers=[ANNA, BEN], observers=["watch"],
            passwords_in=tmp_path / "rules" / "secrets",
        )  # fmt: skip
        files = replace(files, nats_config=node / "nats.conf")
    if request.param == "nats before":
        config = json.loads(files.nats_config.read_text())
        for user in config["authorization"]["users"]:
            if user["user"] == "watch":
                user["permissions"]["publish"] = {"allow": []}
        files.nats_config.write_text(json.dumps(config))
    if not request.param.endswith("own"):
        with Broker(BrokerSettings(rules=files, port=port), kind=kind) as ours:
            yield ours.port, words
        return
    config = files.nats_config if kind == "nats" else files.config
    process = subprocess.Popen(
        [program, "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:

        def listens() -> bool:
            assert process.poll() is None, f"{kind} did not take the rules"
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(listens, f"{kind} to listen")
        yield port, words
    finally:
        process.terminate()
        process.wait(120)


def client(broker, user, password=None):
    port, words = broker
    return aiomqtt.Client(
        "127.0.0.1", port, username=user, password=password or words[user], timeout=120,
    )  # fmt: skip


async def heard(one, listener, attempts, ends):
    """The topics on which `listener` hears something when `one` publishes to `attempts`.

    ends: who says afterwards, on which topic, that it was all. Only topics of one subscription keep their
    order, so every subscription that an attempt could reach needs an end.
    """
    for (
        pattern
    ) in PATTERNS:  # mosquitto leaves out what may not be read; nats refuses a pattern with such
        await listener.subscribe(pattern, qos=1)
    for topic in attempts:
        await one.publish(topic, b"x", qos=1)
    for client, topic in ends:
        await client.publish(topic, b"end", qos=1)
    found, ended = set(), set()
    async for message in listener.messages:
        (ended if message.payload == b"end" else found).add(str(message.topic))
        if ended == {topic for _, topic in ends}:
            return found
    return None


def test_nobody_writes_under_anothers_name(broker, run):
    async def scenario():
        async with client(broker, ANNA) as anna, client(broker, "watch") as watch:
            foreign = [
                topics.card(SWARM, BEN),
                topics.status(SWARM, BEN),
                topics.metrics(SWARM, BEN),
                topics.summary(SWARM, BEN),
            ]
            foreign += [revocation_topic(SWARM), f"{topics.ROOT}/{SWARM}/other", "elsewhere"]
            return await heard(anna, watch, [*foreign, *own], [(anna, topic) for topic in own])

    own = [
        topics.card(SWARM, ANNA),
        topics.status(SWARM, ANNA),
        topics.metrics(SWARM, ANNA),
        topics.summary(SWARM, ANNA),
    ]
    assert run(scenario()) == set(own)


def test_everybody_reads_its_own_mail_alone(broker, run):
    async def scenario():
        async with client(broker, ANNA) as anna, client(broker, BEN) as ben:
            mail = [topics.inbox(SWARM, ANNA, "global"), topics.inbox(SWARM, BEN, "global")]
            return await heard(anna, ben, mail, [(anna, mail[1])])

    assert run(scenario()) == {topics.inbox(SWARM, BEN, "global")}


def test_the_owner_revokes_and_nobody_else(broker, run):
    async def scenario():
        async with (
            client(broker, "owner") as owner,
            client(broker, ANNA) as anna,
            client(broker, BEN) as ben,
        ):
            ends = [*((owner, topic) for topic in own), (anna, topics.card(SWARM, ANNA))]
            return await heard(owner, ben, [topics.card(SWARM, BEN), *own], ends)

    own = [topics.death(SWARM, ANNA), revocation_topic(SWARM)]
    assert run(scenario()) == set(own)


def test_no_peer_declares_another_dead(broker, run):
    async def scenario():
        async with (
            client(broker, "owner") as owner,
            client(broker, ANNA) as anna,
            client(broker, BEN) as ben,
        ):
            deaths = [topics.death(SWARM, BEN), topics.death(SWARM, ANNA)]
            return await heard(anna, ben, deaths, [(owner, topics.death(SWARM, ANNA))])

    assert run(scenario()) == set()


RETAINED = {
    topics.card(SWARM, ANNA): b"card",
    topics.status(SWARM, ANNA): b"online",
    topics.summary(SWARM, ANNA): b"summary",
    topics.death(SWARM, BEN): b"death",
    revocation_topic(SWARM): b"list 1",
}


async def publishes_what_is_retained(broker):
    async with client(broker, ANNA) as anna, client(broker, "owner") as owner:
        for topic, payload in RETAINED.items():
            author = anna if ANNA in topic else owner
            await author.publish(topic, payload, qos=1, retain=True)


async def retained(broker, user):
    """What a user is given when it subscribes, until it has all that should be there."""
    found = {}
    with contextlib.suppress(TimeoutError):
        async with client(broker, user) as reader, asyncio.timeout(20):
            for topic in RETAINED:
                await reader.subscribe(topic, qos=1)
            async for message in reader.messages:
                found[str(message.topic)] = message.payload
                if set(found) >= set(RETAINED):
                    break
    return found


async def tries_to_publish(broker, user, attempts):
    """Publish as a user in every way there is; a broker may refuse by hanging up."""
    will = aiomqtt.Will(revocation_topic(SWARM), b"", qos=1, retain=True)
    port, words = broker
    for topic in attempts:
        for payload in (b"x", b""):  # an empty one clears what is retained
            for qos, keep in ((1, True), (0, True), (1, False), (0, False)):
                with contextlib.suppress(aiomqtt.MqttError):
                    async with client(broker, user) as one:
                        await one.publish(topic, payload, qos=qos, retain=keep, timeout=2.0)
    with contextlib.suppress(aiomqtt.MqttError):
        async with aiomqtt.Client(
            "127.0.0.1", port, username=user, password=words[user], will=will, timeout=120
        ) as one:
            one._client._sock_close()


ELSEWHERE = [
    topics.card(SWARM, "nobody"),
    "$JS/API/STREAM/PURGE/$MQTT_rmsgs",  # with which nats-server keeps what is retained
    "elsewhere",
]


@pytest.mark.parametrize(
    ("user", "attempts"),
    [
        ("watch", [*RETAINED, topics.inbox(SWARM, BEN, "global"), *ELSEWHERE]),
        (
            ANNA,
            [
                topics.card(SWARM, BEN),
                topics.death(SWARM, BEN),
                revocation_topic(SWARM),
                *ELSEWHERE,
            ],
        ),
    ],
    ids=["observer", "peer"],
)
def test_nobody_changes_what_others_have_published(broker, run, user, attempts):
    """An observer changes nothing at all, whether by publishing, retained or not, or by its last will."""

    async def scenario():
        await publishes_what_is_retained(broker)
        before = await retained(broker, "watch")
        async with client(broker, BEN) as ben, client(broker, ANNA) as anna:
            for pattern in PATTERNS:
                await ben.subscribe(pattern, qos=1)
            await tries_to_publish(broker, user, attempts)
            ends = [topics.card(SWARM, ANNA), topics.inbox(SWARM, BEN, "global")]
            for topic in ends:
                await anna.publish(topic, b"end", qos=1)
            heard = []
            async for message in ben.messages:
                if message.payload == b"end":
                    ends.remove(str(message.topic))
                elif not message.retain:
                    heard.append((str(message.topic), message.payload))
                if not ends:
                    break
        return before, heard, await retained(broker, "watch")

    before, heard, after = run(scenario())
    assert before == RETAINED
    assert heard == []
    assert after == RETAINED


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


def test_a_user_has_no_other_way_into_nats(tmp_path):
    """The port of NATS' own protocol knows no permissions on MQTT's sessions: nobody is let in there."""
    files = write_rules(tmp_path, SWARM, [ANNA])
    users = json.loads(files.nats_config.read_text())["authorization"]["users"]
    assert {tuple(user["allowed_connection_types"]) for user in users} == {("MQTT", "MQTT_WS")}
    assert all("permissions" in user for user in users)
