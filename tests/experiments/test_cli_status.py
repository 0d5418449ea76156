"""`gossamer status`: what it shows, and every exit code with the line that says why."""

from __future__ import annotations

import json
import re
import secrets
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from cli_kit import runner, runs

from gossamer.experiments.cli import console, views
from gossamer.gossip import MqttTransport, topics
from gossamer.gossip.security import Admission, Identity, SwarmSecurity, invite, public_text
from gossamer.peer import Ended, ModelSummary, PeerEvent, Summary, SwarmState, find_problems
from gossamer.peer.presence import Card, Status

FIELDS = [("layer.weight (global)", [4, 3], "float32")]
status = runs("status")


class Swarm:
    """A swarm's name on a broker, and what its peers have published."""

    def __init__(self, run, broker, name) -> None:
        self._run, self.url, self.name = run, broker.url, name

    def publish(self, *messages) -> None:
        async def all_of_them():
            async with MqttTransport(self.url, "publisher") as transport:
                for peer, kind, payload in messages:
                    topic = str(topics.Topic(self.name, peer, kind))
                    await transport.publish(topic, payload, retain=True, qos=1)

        self._run(all_of_them())

    def peer(
        self, peer="anna", *, state="online", counts=True, ago=0.0, joined=500.0, group=None, **more
    ):
        """Let the broker retain what a peer has published.

        ago: seconds since its last summary; None if it has published none. group: a second partial model.
        more: of its summary.
        """
        now = time.time()
        models = ["global", *([group] if group else [])]
        counted = dict.fromkeys(models, 3) if counts else {}
        card = Card("s1", now - joined, 5, dict.fromkeys(models, FIELDS), lease=60.0).encode()
        messages = [
            (peer, "card", card),
            (
                peer,
                "status",
                Status(state, "s1", "training", "as it says", counts=counted).encode(),
            ),
        ]
        if ago is not None:
            messages.append((peer, "summary", summary(now - ago, **more)))
        self.publish(*messages)


def summary(when, **more):
    values = {
        "session": "s1", "time": when, "since": when, "state": "averaging", "phase": "training",
        "round": 12, "rounds": 30, "version": "0.1.0", "metrics": {"accuracy": 0.875},
        "models": {"global": ModelSummary(True, 3, 2, 2, 0.001, 1.5)}, "received_bytes": 2_500_000,
    }  # fmt: skip
    data = Summary(**{**values, **more}).encode()
    assert data is not None
    return data


@pytest.fixture
def garden(run, mosquitto):
    """A swarm of its own for every test, on the broker that they share."""
    name = f"garden-{secrets.token_hex(4)}"
    return Swarm(run, mosquitto, name)


def test_it_says_who_is_in_which_group_and_what_was_decided(status, garden):
    sentence = "all outputs became those of 2 groups of 2 and 1 peers after round 25"
    event = PeerEvent(time.time(), "decided", f"decides: {sentence}")
    for peer, group in (("anna", "group2-0"), ("ben", "group2-1"), ("carl", "group2-0")):
        garden.peer(peer, group=group, events=(event,) if peer == "anna" else ())
    garden.peer("dora", group="group2-1")
    lines = status(garden.url, garden.name).out.splitlines()
    who = {line.split()[0]: line.rstrip() for line in lines if line.strip().startswith("g")}
    assert who["global"].endswith("all")
    assert who["group2-0"].endswith("anna, carl")
    assert who["group2-1"].endswith("ben, dora")
    assert any(line.endswith(f"anna decides: {sentence}") for line in lines)


def test_a_swarm_in_which_all_is_well_is_shown_and_gives_0(status, garden):
    garden.peer("anna")
    garden.peer("ben", round=4)
    garden.peer(
        "carl", state="left", ago=90.0, ended=Ended("left", "told to stop", time.time() - 90)
    )
    result = status(garden.url, garden.name)
    assert (result.code, result.err) == (0, "")
    assert f"swarm {garden.name}: 2 online, 1 left; rounds 4 to 12" in result.out
    anna, ben, carl = (
        next(line for line in result.out.splitlines() if line.strip().startswith(name))
        for name in ("anna", "ben", "carl")
    )
    assert anna.split() == [
        "anna",
        "online",
        "8",
        "min",
        "12/30",
        "0.875",
        "0",
        "2.5",
        "0.0",
        "averaging",
    ]
    assert ben.split()[4:6] == ["4/30", "4"]  # behind the median of 8
    assert "left" in carl
    assert carl.rstrip().endswith("as it says")
    assert next(line for line in result.out.splitlines() if line.strip().startswith("global")).split() == [
        "global", "2", "2", "1.0e-03", "1.50", "to", "1.50",
    ]  # fmt: skip
    assert "carl left: as it says" in result.out
    assert "nothing needs attention" in result.out


def test_one_peer_alone_agrees_with_nobody(status, garden):
    garden.peer("anna")
    result = status(garden.url, garden.name)
    assert result.code == 0
    assert "partial model" not in result.out


def causes(result):
    """What needs attention, as the tables say it."""
    return [
        line.removeprefix("needs attention: ")
        for line in result.out.splitlines()
        if line.startswith("needs attention: ")
    ]


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"counts": False}, "nobody counts in model global after "),
        ({"state": "offline", "ago": 100.0}, "peer anna is past its lease of 60 s, silent for 10"),
        ({"state": "online", "ago": 100.0}, "peer anna is past its lease of 60 s"),
        ({"metrics": {"loss": None}}, "peer anna: its loss diverged (NaN or infinite): lower its learning"),
        ({"models": {"global": ModelSummary(True, diverged=True)}}, "peer anna: global diverged"),
        ({"refused": {"eve": "mode is 'async' here"}}, "peer anna refuses peer eve: mode is 'async' here"),
        (
            {"state": "left", "ended": Ended("failed", "peer anna: cannot average with ben", time.time())},
            "peer anna could not take part: cannot average with ben",
        ),
        ({"ago": None}, "no summary of 1 online peer (anna): upgrade them"),
    ],
)  # fmt: skip
def test_what_needs_a_person_gives_1_and_one_line_with_the_remedy(status, garden, told, text):
    garden.peer(**told)
    result = status(garden.url, garden.name)
    assert result.code == 1
    (cause,) = causes(result)
    assert cause.startswith(text)


def test_quiet_prints_the_causes_alone(status, garden):
    garden.peer(counts=False)
    quiet = status(garden.url, garden.name, "--quiet")
    assert quiet.code == 1
    assert quiet.out.startswith("nobody counts in model global after ")
    assert quiet.out.count("\n") == 1


@pytest.mark.parametrize(
    "told",
    [
        {"counts": False, "joined": 5.0},  # it has only just come
        {
            "state": "offline",
            "ago": 5.0,
            "counts": False,
        },  # its lease still runs; a will counts nothing
        {"state": "left", "ago": 9e5, "ended": Ended("failed", "x", time.time() - 9e5)},  # long ago
        {"refused": {"gone": "mode is 'async' here"}, "state": "left"},
    ],
)
def test_what_will_pass_needs_nobody(status, garden, told):
    garden.peer(**told)
    result = status(garden.url, garden.name, "--quiet")
    assert (result.code, result.out) == (0, "")


def test_json_has_all_of_it_and_the_same_exit_code(status, garden):
    garden.peer("anna", metrics={"loss": None})
    result = status(garden.url, garden.name, "--json")
    record = json.loads(result.out)
    assert result.code == 1
    assert result.out.count("\n") == 1
    assert record["peers"]["anna"]["summary"]["metrics"] == {"loss": None}
    assert record["models"]["global"]["counting"] == ["anna"]
    assert [problem["kind"] for problem in record["problems"]] == ["diverged"]
    assert [event["kind"] for event in record["timeline"]] == ["joined"]


PUMPS = [f"pump-{number}@{letter * 20}" for number, letter in enumerate("abc")]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_narrow_terminal_shows_short_names_and_fewer_columns(status, garden, monkeypatch, width):
    monkeypatch.setattr(console.out, "width", width)
    for name in PUMPS[:2]:
        garden.peer(name)
    garden.peer(PUMPS[2], state="offline", ago=5.0)
    result = status(garden.url, garden.name)
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= width
    rows = [
        line.split() for line in lines if line.strip().startswith("pump-") and "joined" not in line
    ]
    shown = PUMPS if width == 160 else [f"{name[:11]}…" for name in PUMPS]
    assert [row[0] for row in rows] == shown
    assert [row[1] for row in rows] == ["online", "online", "offline"]
    assert all("12/30" in row for row in rows)
    text = " ".join(result.out.split())
    assert text.count("averaging") == 2
    if width >= 80:
        assert re.search(r"as it says; given up in \d+ s unless it returns", text)
    (header,) = (line for line in lines if "peer" in line.split()[:1])
    assert ("MB in" in header) == (width >= 100)
    assert ("accuracy" in header) == (width >= 80)
    assert f"{shown[0]} joined {garden.name}" in text
    assert "nothing needs attention yet" in result.out


def test_short_names_stay_different():
    names = ["anna", "ben@1234", "ben@abcdefgh", "ben@abcdzzzz", "carl@abcdefgh"]
    short = views.short_names(names)
    assert list(short) == names
    assert short["anna"] == "anna"
    assert short["ben@1234"] == "ben@1234"
    assert short["ben@abcdefgh"] == "ben@abcde…"
    assert len({*short.values()}) == len(names)


def test_a_log_of_a_swarm_has_one_line_for_each_change():
    state, log, now = SwarmState("garden"), views.ChangeLog(), time.time()
    quiet = views.ChangeLog(only_problems=True)

    def tell(kind, payload, when):
        state.receive(str(topics.Topic("garden", "anna", kind)), payload, when)

    def told(when, lost=""):
        problems = find_problems(state, when)
        lines = [line[21:] for line in log.lines(state, problems, when, lost)]
        return lines, quiet.lines(state, problems, when)

    tell("card", Card("s1", now, 5, {"global": FIELDS}, lease=60.0).encode(), now)
    tell("status", Status("online", "s1", "training", "", counts={"global": 1}).encode(), now)
    tell("summary", summary(now), now)
    assert told(now) == (["swarm garden: 1 online; rounds 12 to 12", "anna joined garden"], [])
    tell("summary", summary(now + 1, round=13), now + 1)
    assert told(now + 1) == ([], [])
    assert told(now + 2, "refused")[0] == ["the broker cannot be reached: refused"]
    assert told(now + 3)[0] == ["the broker is reached again"]
    state.tick(now + 200)
    lines, short = told(now + 200)
    assert lines[0].startswith("anna is given up: silent for longer")
    assert lines[1] == f"needs attention: {short[0]}"
    assert told(now + 260) == ([], [])  # the same, though it has been silent for longer
    tell("status", Status("online", "s1", "training", "", counts={"global": 1}).encode(), now + 300)
    assert told(now + 300) == (["anna is online again", "nothing needs attention any more"], [])


# --- mistakes -----------------------------------------------------------------------------------------


def mistake(result):
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    return line


def test_a_swarm_that_is_not_there_is_one_line(status, garden):
    line = mistake(status(garden.url, garden.name))
    assert (
        f"no peer of a swarm '{garden.name}' has published a card here: check the swarm's name"
        in line
    )


def test_a_broker_that_is_not_there_is_one_line(status, silent_port):
    url = f"mqtt://127.0.0.1:{silent_port}"
    assert url.removeprefix("mqtt://") in mistake(status(url, "garden"))


@contextmanager
def silent_broker(*, accepts: bool):
    """The address of a broker that says at most that a connection is accepted, and then nothing more."""

    def answer(client):
        with client, suppress(OSError):
            while packet := client.recv(4096):
                if accepts and packet[0] >> 4 == 1:  # CONNECT of MQTT 3.1.1
                    client.sendall(b"\x20\x02\x00\x00")

    def serve():
        with suppress(OSError):  # closed
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"mqtt://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.live  # it waits for the end of real timeouts
@pytest.mark.parametrize(
    ("command", "accepts", "text"),
    [
        ("status", False, " does not answer: is that an MQTT port of a broker?"),
        ("watch", True, ": the connection was lost at once; is that an MQTT broker?"),
    ],
)
def test_a_broker_that_stays_silent_is_one_line(
    tmp_path, monkeypatch, capsys, command, accepts, text
):
    with silent_broker(accepts=accepts) as url:
        run = runner(tmp_path, monkeypatch, capsys, command)
        assert mistake(run(url, "garden")) == f"error: {url}{text}"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("nonsense", "garden"), "nonsense"),
        (("mqtt://127.0.0.1", "a/b"), "the swarm name 'a/b' contains '/'"),
        (("mqtt://127.0.0.1", "garden", "--owner", "x"), "'x' is not a public key"),
        (("mqtt://127.0.0.1", "garden", "--password-file", "none"), "a password needs a user name"),
        (("mqtt://127.0.0.1", "garden", "--ca", "none.pem"), "does not use TLS"),
    ],
)
def test_what_is_wrong_with_the_command_is_one_line(status, words, text):
    assert text in mistake(status(*words))


# --- trust --------------------------------------------------------------------------------------------


def test_with_trust_it_shows_whom_the_owner_invited(status, garden, tmp_path):
    owner, stranger = Identity.generate("owner"), Identity.generate("stranger")
    now = time.time()
    for label, by in (("anna", owner), ("eve", stranger)):
        one = Identity.generate(label)
        paper = Admission(invite(by, garden.name, label, one.public))
        security = SwarmSecurity(
            one, paper, by.public, swarm=garden.name, session="s1", models=["global"], since=now
        )
        card = Card("s1", now, 5, {"global": FIELDS}, lease=60.0).encode()
        shown = Status("online", "s1", "training", counts={"global": 1}).encode()
        garden.publish(
            (one.name, "card", security.card(card)),
            (one.name, "status", security.status(shown)),
            (one.name, "summary", security.summary(summary(now))),
        )
    without = status(garden.url, garden.name)
    assert without.code == 0
    assert without.out.count("signed") == 2
    result = status(garden.url, garden.name, "--owner", public_text(owner.public))
    assert result.code == 1
    assert "member" in next(
        line for line in result.out.splitlines() if line.strip().startswith("anna@")
    )
    (cause,) = causes(result)
    assert "eve@" in cause
    assert "its card is refused: no valid invitation" in cause
