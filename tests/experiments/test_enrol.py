"""`gossamer enrol` and what a device makes of its file: one line for every mistake, and nothing lost."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest
from cli_kit import Run, runs
from ports import unused_port
from waiting import wait_until

from gossamer.experiments.config.tables import ConfigError
from gossamer.experiments.live.enrolment import Enrolment
from gossamer.gossip import MqttTransport, TlsFiles, TransportError, topics
from gossamer.gossip.security import Admission, Identity, SwarmSecurity, read_public
from gossamer.peer import Broker, BrokerSettings, BrokerTls, Summary, read_rules
from gossamer.peer.presence import Card, Status

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


def rows(text: str) -> dict[str, tuple[str, str]]:
    """Value and source by setting."""
    cells = [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()
    ]
    return {row[0]: (row[1], row[2]) for row in cells if len(row) == 3}


def test_settings_say_what_comes_from_the_enrolment_and_nothing_is_written(
    gossamer: Run, enrolled: Path
) -> None:
    Path("dev.toml").write_text('entry = "m:f"\narguments = {start = 3}\nlease = 70\n')
    with_file = rows(join(gossamer, str(enrolled), "--config", "dev.toml").out)
    assert with_file["rounds"] == ("forever", "enrolment")
    assert with_file["entry"] == ("m:f", "device file")
    assert with_file["arguments"] == ("{start = 3}", "device file")
    assert with_file["lease"] == ("70.0", "device file")
    for name in (
        "name",
        "swarm",
        "trust",
        "identity",
        "invitation",
        "owner",
        "url",
        "ca",
        "password",
    ):
        assert with_file[name][1] == "enrolment", name
    assert with_file["guards"][0].startswith("{distance = 0.5")  # which trust brings along
    assert with_file["out"] == ("results/garden-ann", "default")
    with_entry = rows(join(gossamer, str(enrolled), "--entry", "m:f", "--out", "o").out)
    assert with_entry["rounds"] == ("forever", "enrolment")
    assert with_entry["entry"] == ("m:f", "command line")
    assert with_entry["out"] == ("o", "command line")
    assert not Path("results").exists()
    assert not Path("o").exists()


def test_a_devices_own_file_takes_precedence_over_the_settings_of_its_enrolment(
    gossamer: Run, enrolled: Path
) -> None:
    Path("dev.toml").write_text('entry = "m:f"\nrounds = 7\n')
    shown = rows(join(gossamer, str(enrolled), "--config", "dev.toml").out)
    assert shown["rounds"] == ("7", "device file")


def test_join_says_at_once_what_it_connects_to(
    gossamer: Run, enrolled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    Path("m.py").write_text("raise RuntimeError('no sensor')\n")
    assert gossamer("join", str(enrolled), "--entry", "m:f").code == 2
    first = caplog.messages[0]
    assert (
        first
        == "peer ann: loading torch, then connecting to mqtts://broker.lan:8883 for swarm garden"
    )
    assert (Path("results/garden-ann/ann.key").stat().st_mode & 0o777) == 0o600


def test_the_brokers_folder_has_no_file_of_passwords_that_it_does_not_need(
    gossamer: Run, enrolled: Path
) -> None:
    names = {path.name for path in Path("garden/broker").iterdir()}
    assert names == {
        "swarm.json", "acl", "passwords", "mosquitto.conf", "nats.conf", "ca.pem", "server.pem",
        "server.key",
    }  # fmt: skip
    assert {"owner", "observer"} < {path.name for path in Path("garden/secrets").iterdir()}
    before = Path("garden/secrets/observer").read_text()
    assert gossamer("enrol", *BROKER, "cat").code == 0
    assert Path("garden/secrets/observer").read_text() == before


@pytest.mark.parametrize("option", ["--enrolled", "--acl"])
def test_a_broker_with_rules_keeps_retained_messages_such_as_revocations(
    gossamer: Run, enrolled: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    seen: list[BrokerSettings] = []
    monkeypatch.setattr("gossamer.peer.serve", lambda settings, **_: seen.append(settings) or 0)
    words = ["garden"] if option == "--enrolled" else ["r", "--swarm", "garden", "--peer", "ann"]
    assert gossamer("broker", option, *words).code == 0
    assert gossamer("broker").code == 0
    folder = Path("garden/broker" if option == "--enrolled" else "r")
    assert [settings.store for settings in seen] == [folder / "store", None]


def test_the_line_for_a_broker_on_another_machine_is_printed(gossamer: Run) -> None:
    result = gossamer("enrol", *BROKER, "ann")
    assert "scp -rp garden/broker broker.lan:garden/" in result.out


NODES = "mqtts://a.lan:8883,mqtts://b.lan:8883,mqtts://c.lan:8883"


def test_devices_are_enrolled_for_the_nodes_of_a_cluster(gossamer: Run) -> None:
    cluster = ("--swarm", "garden", "--broker", NODES)
    assert gossamer("enrol", *cluster, "ann").code == 0
    result = gossamer("enrol", *cluster, "ben")
    assert result.code == 0, result.err
    assert "scp -rp garden/b.lan b.lan:" in result.out
    ann, ben = (Enrolment.read(Path(f"garden/{name}.gossamer")) for name in ("ann", "ben"))
    assert ann.broker == ben.broker == NODES
    assert ann.ca == Path("garden/b.lan/ca.pem").read_text()
    for node in ("a.lan", "b.lan", "c.lan"):
        users = (Path("garden") / node / "nats.conf").read_text()
        for device in (ann, ben):
            assert device.password in users
    joined = join(gossamer, "garden/ann.gossamer", "--entry", "my_device:make_learner")
    assert joined.code == 0, joined.err
    assert "c.lan:8883" in joined.out
    started = gossamer("broker", "--enrolled", "garden")
    assert started.code == 2
    assert "nats-server -c nats.conf" in started.err


@pytest.mark.parametrize(
    ("broker", "text"),
    [
        ("mqtts://a.lan,mqtts://b.lan", "3 or 5 nodes, not 2"),
        ("mqtt://a.lan,mqtt://b.lan,mqtt://c.lan", "write mqtts://"),
        ("mqtts://a.lan,mqtts://b.lan:8884,mqtts://c.lan", "one port"),
        ("mqtts://me@a.lan,mqtts://b.lan,mqtts://c.lan", "leave the user out"),
    ],
)
def test_nodes_that_are_no_cluster_are_refused(gossamer: Run, broker: str, text: str) -> None:
    result = gossamer("enrol", "--swarm", "garden", "--broker", broker, "ann")
    assert result.code == 2
    assert text in result.err
    assert not Path("garden").exists()


def mistakes(file: Path) -> dict[str, tuple[list[str], str]]:
    table = json.loads(file.read_text())
    for name, changes in {"newer": {"version": 9}, "short": {"owner": None}}.items():
        path = file.with_name(f"{name}.gossamer")
        path.write_text(json.dumps(table | changes))
        path.chmod(0o600)
    other = file.with_name("open.gossamer")
    other.write_text(file.read_text())
    other.chmod(0o644)
    Path("pump.py").write_text("import torch\n")
    Path("pump.py").chmod(0o644)
    file.with_name("peer.toml").write_text("name = 'ann'\n")
    file.with_name("peer.toml").chmod(0o600)
    entry = ["--entry", "my_device:make"]
    return {
        "no file": (["join", "no.gossamer", *entry], "no.gossamer: cannot be read"),
        "newer": (["join", "garden/newer.gossamer", *entry], "enrolment of version 9"),
        "damaged": (["join", "garden/short.gossamer", *entry], "key 'owner'"),
        "open to others": (["join", "garden/open.gossamer", *entry], "other users can read it"),
        "open, and no enrolment": (
            ["join", "pump.py", *entry],
            "pump.py: is not a file of gossamer enrol",
        ),
        "no function": (["join", str(file), "--entry", "pump"], "'pump' is not an entry point"),
        "no module": (
            ["join", str(file), "--entry", "pumpx:make"],
            "there is no module 'pumpx' in",
        ),
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
        "no file", "newer", "damaged", "open to others", "open, and no enrolment", "no function",
        "no module", "a TOML file", "no entry", "broker too", "nothing",
        "enrolled twice", "another broker", "a user", "rounds", "no folder",
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
    Enrolment.read(enrolled).unpack(Path("results/garden-ann"))
    key = Path("results/garden-ann/ann.key").read_text()
    gossamer("enrol", *BROKER, "ann", "--folder", "second/garden")
    result = join(gossamer, "second/garden/ann.gossamer", *entry)
    assert result.code == 2
    assert "belongs to another enrolment of ann" in result.err
    assert Path("results/garden-ann/ann.key").read_text() == key


def test_a_corrected_file_of_the_same_enrolment_replaces_the_certificate(
    gossamer: Run, enrolled: Path
) -> None:
    folder, table = Path("results/garden-ann"), json.loads(enrolled.read_text())
    mistaken = Enrolment.model_validate(table | {"ca": "of another authority\n"})
    mistaken.unpack(folder)
    assert join(gossamer, str(enrolled), "--entry", "m:f").code == 0
    Enrolment.read(enrolled).unpack(folder)
    assert (folder / "ca.pem").read_text() == table["ca"]
    assert (folder / "ca.pem").stat().st_mode & 0o777 == 0o600
    (folder / "ann.key").unlink()
    with pytest.raises(ConfigError, match="another enrolment of ann"):  # whose certificate is it?
        mistaken.unpack(folder)


def test_a_refused_password_or_authority_names_the_file_that_has_it(
    gossamer: Run, authority
) -> None:
    Path("kit.py").write_text(
        "from my_device import make_learner\n\n\ndef make(name):\n    return make_learner()\n"
    )
    example = Path(__file__).parents[2] / "docs/examples/my_device.py"
    Path("my_device.py").write_text(example.read_text())
    port = unused_port()
    words = ("--swarm", "garden", "--broker", f"mqtts://localhost:{port}")
    assert gossamer("enrol", *words, "ann").code == 0
    table = json.loads(Path("garden/ann.gossamer").read_text())
    for name, change in {
        "password": {"password": "wrong"},
        "authority": {"ca": authority.certificate.read_text()},
    }.items():
        path = Path(f"{name}.gossamer")
        path.write_text(json.dumps(table | change))
        path.chmod(0o600)
    Path("dev.toml").write_text('entry = "kit:make"\narguments = {nam = "ann"}\n')
    files = Path("garden/broker")
    tls = BrokerTls(files / "ca.pem", files / "server.pem", files / "server.key")
    settings = BrokerSettings(host="localhost", port=port, tls=tls, rules=read_rules(files))
    with Broker(settings, kind="nats"):
        for name in ("password", "authority"):
            refused = gossamer("join", f"{name}.gossamer", "--entry", "my_device:make_learner")
            assert refused.code == 2
            last = refused.err.splitlines()[-1]
            assert f"password and authority (CA) are those in {name}.gossamer" in last
    mistaken = gossamer("join", "garden/ann.gossamer", "--config", "dev.toml")
    assert mistaken.code == 2
    last = mistaken.err.splitlines()[-1]
    assert "has no argument 'nam'; did you mean 'name'? (key 'arguments' of dev.toml)" in last


def test_a_table_gossip_in_a_devices_file_is_told_where_its_keys_stand(
    gossamer: Run, enrolled: Path
) -> None:
    Path("dev.toml").write_text('entry = "m:f"\n[gossip]\nlease = 70\n')
    result = join(gossamer, str(enrolled), "--config", "dev.toml")
    assert result.code == 2
    assert (
        "dev.toml: unknown key 'gossip'; the keys of a config's [gossip] stand at the top"
        in result.err
    )


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


@pytest.mark.parametrize("kind", ["nats", "mosquitto"])
def test_the_owner_looks_at_a_swarm_with_trust_over_tls_with_a_password(
    gossamer: Run, kind, run, mosquitto_required
) -> None:
    if kind == "mosquitto":
        mosquitto_required()
    files, port = Path("garden/broker"), unused_port()
    url = f"mqtts://localhost:{port}"
    enrolled = gossamer("enrol", "--swarm", "garden", "--broker", url, "ann")
    assert enrolled.code == 0
    (line,) = [each for each in enrolled.out.splitlines() if "gossamer status" in each]
    words = shlex.split(line.partition("gossamer ")[2])
    device = Enrolment.read(Path("garden/ann.gossamer"))
    Path("ann").mkdir()
    papers, now = device.unpack(Path("ann")), time.time()
    identity = Identity.load(papers["identity"])
    security = SwarmSecurity(
        identity, Admission.load(papers["invitation"], identity), read_public(device.owner),
        swarm="garden", session="s1", models=["global"], since=now,
    )  # fmt: skip
    fields = [("layer.weight (global)", [4, 3], "float32")]
    card = Card("s1", now, 5, {"global": fields}, lease=60.0).encode()
    shown = Status("online", "s1", "training", counts={"global": 1}).encode()
    summary = Summary(
        session="s1", time=now, since=now, state="training", phase="training", round=3, rounds=None,
        version="0", neighbours=(), neighbour_count=0,
    ).encode()  # fmt: skip
    assert summary is not None

    async def publishes() -> None:
        transport = MqttTransport(
            url.replace("://", f"://{identity.name}@").replace("@", "%40", 1), "ann",
            password=device.password, tls=TlsFiles(files / "ca.pem"),
        )  # fmt: skip
        async with transport:
            for name, payload in (
                ("card", security.card(card)),
                ("status", security.status(shown)),
                ("summary", security.summary(summary)),
            ):
                topic = str(topics.Topic("garden", identity.name, name))
                await transport.publish(topic, payload, retain=True, qos=1)

    password = Path("garden/secrets/observer").read_text().strip()

    async def clears_as_observer() -> None:
        """Try to clear the card: whoever may only read does not."""
        transport = MqttTransport(
            url.replace("://", "://observer@"), "observer", tls=TlsFiles(files / "ca.pem"),
            password=password,
        )  # fmt: skip
        async with transport:
            await transport.publish(topics.card("garden", identity.name), b"", retain=True, qos=0)

    tls = BrokerTls(files / "ca.pem", files / "server.pem", files / "server.key")
    settings = BrokerSettings(host="localhost", port=port, tls=tls, rules=read_rules(files))
    with Broker(settings, kind=kind):
        run(publishes())
        result = gossamer(*words)
        assert result.code == 0, result.err + result.out
        assert identity.name in result.out
        assert "member" in result.out
        run(clears_as_observer())
        assert gossamer(*words).out.count("member") == result.out.count("member")
        Path("wrong").write_text("not it\n")
        wrong = gossamer(*words, "--password-file", "wrong")
        assert wrong.code == 2
        (told,) = wrong.err.splitlines()
        assert "observer" in told or "password" in told
