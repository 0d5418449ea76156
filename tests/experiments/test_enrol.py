"""`gossamer enrol` and what a device makes of its file: one line for every mistake, and nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_kit import Run, runs
from waiting import wait_until

from gossamer.experiments.live.enrolment import Enrolment
from gossamer.gossip import MqttTransport, TlsFiles, TransportError
from gossamer.peer import Broker, BrokerSettings, BrokerTls, read_rules

gossamer = runs()
BROKER = ("--swarm", "garden", "--broker", "mqtts://broker.lan:8883")


@pytest.fixture
def enrolled(gossamer: Run) -> Path:
    assert gossamer("enrol", *BROKER, "ann", "ben").code == 0
    return Path("garden/ann.gossamer")


def join(gossamer: Run, *arguments: str):
    return gossamer("join", *arguments, "--show-settings")


def test_one_file_has_all_that_a_device_needs(gossamer: Run, enrolled: Path) -> None:
    assert enrolled.stat().st_mode & 0o777 == 0o600
    result = join(gossamer, str(enrolled), "--entry", "my_device:make_learner")
    assert result.code == 0, result.err
    for text in ("garden", "broker.lan:8883", "forever", "swarm", "ca.pem"):
        assert text in result.out
    password = Enrolment.read(enrolled).password
    assert password not in result.out
    again = join(gossamer, str(enrolled), "--entry", "my_device:make_learner")
    assert again.out == result.out


def test_the_line_for_a_broker_on_another_machine_is_printed(gossamer: Run) -> None:
    result = gossamer("enrol", *BROKER, "ann")
    assert "scp -rp garden/broker broker.lan:garden/" in result.out


def mistakes(file: Path) -> dict[str, tuple[list[str], str]]:
    table = json.loads(file.read_text())
    for name, changes in {"newer": {"version": 9}, "short": {"owner": None}}.items():
        path = file.with_name(f"{name}.gossamer")
        path.write_text(json.dumps(table | changes))
        path.chmod(0o600)
    other = file.with_name("open.gossamer")
    other.write_text(file.read_text())
    other.chmod(0o644)
    file.with_name("peer.toml").write_text("name = 'ann'\n")
    file.with_name("peer.toml").chmod(0o600)
    entry = ["--entry", "my_device:make"]
    return {
        "no file": (["join", "no.gossamer", *entry], "no.gossamer: cannot be read"),
        "newer": (["join", "garden/newer.gossamer", *entry], "enrolment of version 9"),
        "damaged": (["join", "garden/short.gossamer", *entry], "key 'owner'"),
        "open to others": (["join", "garden/open.gossamer", *entry], "other users can read it"),
        "a TOML file": (["join", "garden/peer.toml", *entry], "is not a file of gossamer enrol"),
        "no entry": (["join", str(file)], "give --entry module:function"),
        "broker too": (["join", str(file), "--broker", "mqtt://x", *entry], "leave out --broker"),
        "nothing": (["join"], "give the file that gossamer enrol wrote"),
        "enrolled twice": (["enrol", *BROKER, "ann"], "ann is enrolled in garden already"),
        "another broker": (
            ["enrol", "--swarm", "garden", "--broker", "mqtts://other", "cat"],
            "broker is mqtts://broker.lan:8883 here",
        ),
        "a user": (
            ["enrol", "--swarm", "x", "--broker", "mqtts://me@b", "cat"],
            "leave the user out",
        ),
        "rounds": (["enrol", *BROKER, "cat", "--rounds", "0"], "should be a number of rounds"),
        "no folder": (["broker", "--enrolled", "nowhere"], "nowhere/broker/swarm.json: cannot be"),
    }


@pytest.mark.parametrize(
    "mistake",
    [
        "no file", "newer", "damaged", "open to others", "a TOML file", "no entry", "broker too",
        "nothing", "enrolled twice", "another broker", "a user", "rounds", "no folder",
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_changes_nothing(
    mistake: str, gossamer: Run, enrolled: Path
) -> None:
    arguments, reason = mistakes(enrolled)[mistake]
    before = {path: path.read_bytes() for path in Path("garden").rglob("*") if path.is_file()}
    result = gossamer(*arguments)
    assert result.code == 2
    assert reason in result.err
    assert len(result.err.strip().splitlines()) == 1
    after = {path: path.read_bytes() for path in Path("garden").rglob("*") if path.is_file()}
    assert after == before


def test_another_enrolment_of_the_same_name_does_not_replace_the_first(
    gossamer: Run, enrolled: Path
) -> None:
    entry = ("--entry", "my_device:make_learner")
    assert join(gossamer, str(enrolled), *entry).code == 0
    key = Path("results/garden-ann/ann.key").read_text()
    gossamer("enrol", *BROKER, "ann", "--folder", "second/garden")
    result = join(gossamer, "second/garden/ann.gossamer", *entry)
    assert result.code == 2
    assert "belongs to another enrolment of ann" in result.err
    assert Path("results/garden-ann/ann.key").read_text() == key


@pytest.mark.parametrize("kind", ["nats", "mosquitto"])
def test_a_running_broker_learns_of_new_devices(
    gossamer: Run, kind, run, mosquitto_required
) -> None:
    if kind == "mosquitto":
        mosquitto_required()
    broker = ("--swarm", "garden", "--broker", "mqtts://localhost:8883")
    assert gossamer("enrol", *broker, "ann").code == 0
    files = Path("garden/broker")
    tls = BrokerTls(files / "ca.pem", files / "server.pem", files / "server.key")

    async def connects(name: str, url: str) -> None:
        device = Enrolment.read(Path(f"garden/{name}.gossamer"))
        full = json.loads((files / "swarm.json").read_text())["peers"][name]
        address = url.replace("://", f"://{full}@").replace("@", "%40", 1)
        transport = MqttTransport(
            address, f"test-{name}", password=device.password, tls=TlsFiles(files / "ca.pem")
        )
        async with transport:
            await transport.publish(f"gossamer/garden/peer/{full}/status", b"x")

    with Broker(BrokerSettings(tls=tls, rules=read_rules(files)), kind=kind) as started:
        run(connects("ann", started.url))
        pid = started.pid
        assert gossamer("enrol", *broker, "ben").code == 0
        with pytest.raises(TransportError):
            run(connects("ben", started.url))
        started.reload()

        def is_admitted() -> bool:
            try:
                run(connects("ben", started.url))
            except TransportError:
                return False
            return True

        wait_until(is_admitted, "the broker reads its users again")
        assert started.pid == pid
