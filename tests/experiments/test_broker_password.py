"""A broker's password comes from a file or the environment, and is shown to nobody."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from cli_kit import runner

from gossamer.experiments.cli.live import PASSWORD_VARIABLE, broker_password
from gossamer.experiments.errors import ConfigError
from gossamer.experiments.live import run as watch
from gossamer.experiments.live.device import load_join
from gossamer.gossip import Address, MqttTransport, TransportError
from gossamer.peer import Broker, BrokerAddress, BrokerSettings, ProcessSpec, mqtt_transport

HOST = "mqtt://127.0.0.1:1"
URL = "mqtt://anna@127.0.0.1:1"
OWN = "mqtt://anna:own@127.0.0.1:1"
ENVIRONMENT = {PASSWORD_VARIABLE: "of the environment"}


@pytest.fixture(autouse=True)
def _no_password(monkeypatch):
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("of a file: ü \nsecond line\n", "utf-8")
    return file


def test_the_file_goes_before_the_environment(secret):
    assert broker_password(URL) is None
    assert broker_password(URL, None, ENVIRONMENT) == "of the environment"
    assert broker_password(URL, secret, ENVIRONMENT) == "of a file: ü "
    secret.write_bytes(b"written elsewhere\r\n")
    assert broker_password(URL, secret) == "written elsewhere"


@pytest.mark.parametrize("url", [HOST, OWN])
def test_the_environment_is_not_for_urls_without_a_user_or_with_a_password(url):
    assert broker_password(url, None, ENVIRONMENT) is None


@pytest.mark.parametrize(
    ("url", "content", "words"),
    [
        (OWN, b"x", "has a password too"),
        (HOST, b"x", "needs a user name"),
        (URL, b"", "no password in its first line"),
        (URL, b"\nx", "no password in its first line"),
        (URL, b"\xff\xfe", "not text in UTF-8"),
        (URL, None, "secret: cannot be read: No such file"),
    ],
)
def test_a_file_that_does_not_do_is_one_line(secret, url, content, words):
    secret.unlink() if content is None else secret.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        broker_password(url, secret)
    assert "own" not in str(error.value)


@pytest.mark.parametrize(("url", "user"), [(HOST, "anna@xq7"), ("mqtt://ben@127.0.0.1:1", "ben")])
def test_a_devices_password_is_that_of_its_own_name_unless_the_url_says_otherwise(
    tmp_path, secret, url, user
):
    device = tmp_path / "anna.toml"
    device.write_text('name = "anna@xq7"\nentry = "my:learner"\npassword_file = "secret"\n')
    broker = load_join(device, BrokerAddress(url)).broker
    assert Address.parse(broker.url).username == user
    assert broker.password == "of a file: ü "


def test_an_address_takes_a_password_for_the_user_in_the_url():
    assert Address.parse(URL, "given").password == "given"
    assert Address.parse(OWN, "given").password == "own"
    with pytest.raises(TransportError, match="a password needs a user name"):
        Address.parse(HOST, "given")
    address = BrokerAddress(URL, password="given")
    assert mqtt_transport(address, "a").address.password == "given"
    assert "given" not in repr(address)


def test_a_process_file_is_for_our_own_eyes(tmp_path):
    path = tmp_path / "host.json"
    path.write_text("of a former run")
    path.chmod(0o644)
    for file in (path, tmp_path / "new.json"):
        ProcessSpec(BrokerAddress(URL, password="given"), "out").write(file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert ProcessSpec.read(file).broker.password == "given"


def passwords_of_join(folder, monkeypatch, capsys, text: str, *options: str) -> list[Any]:
    seen: list[ProcessSpec] = []
    monkeypatch.setattr("gossamer.peer.run_guarded", lambda spec, **_: seen.append(spec) or 1)
    (folder / "device").mkdir(exist_ok=True)
    (folder / "device/m.py").write_text("")
    (folder / "device/anna.toml").write_text(f'name = "anna"\nentry = "m:f"\n{text}\n')
    arguments = ["--broker", URL, "--swarm", "s", "--config", "device/anna.toml", "-o", "out"]
    assert runner(folder, monkeypatch, capsys, "join")(*arguments, *options).code == 1
    return [spec.broker.password for spec in seen]


def test_join_has_an_option_a_key_and_the_environment(tmp_path, monkeypatch, capsys, secret):
    def join(*given: str) -> list[Any]:
        return passwords_of_join(tmp_path, monkeypatch, capsys, *given)

    key = 'password_file = "beside"'
    assert join("") == [None]
    monkeypatch.setenv(PASSWORD_VARIABLE, "of the environment")
    assert join("") == ["of the environment"]
    (tmp_path / "device/beside").write_text("of the key\n")
    assert join(key) == ["of the key"]
    assert join(key, "--password-file", str(secret)) == ["of a file: ü "]


def test_swarm_and_demo_have_it_too(tmp_path, monkeypatch, capsys, secret):
    seen: list[BrokerAddress] = []

    def run_live(_config, _folder, broker, **_):
        with broker as address:
            seen.append(address)
        raise ConfigError("enough")

    monkeypatch.setattr(watch, "run_live", run_live)
    monkeypatch.setenv(PASSWORD_VARIABLE, "of the environment")
    (tmp_path / "swarm.toml").write_text("peers = 2\n")
    run = runner(tmp_path, monkeypatch, capsys, "swarm", "swarm.toml", "--broker", URL)
    assert run().code == 2
    assert run("--password-file", str(secret)).code == 2
    with watch.broker_for(URL) as address:  # of the demo
        seen.append(address)
    words = ["of the environment", "of a file: ü ", "of the environment"]
    assert [address.password for address in seen] == words


def test_revoke_has_it_too_and_tells_nobody(tmp_path, monkeypatch, capsys, secret):
    run = runner(tmp_path, monkeypatch, capsys)
    assert run("keygen", "owner").code == 0
    revoke = ["revoke", "--owner", "owner.key", "--swarm", "mine", "--force"]
    revoke += ["--paper", "0123456789abcdef"]
    with Broker(BrokerSettings(users={"anna": "right"}), kind="nats") as broker:
        url = broker.url.replace("//", "//anna@")
        refused = run(*revoke, "--broker", url, "--password-file", str(secret))
        assert (refused.code, "of a file" in refused.err) == (2, False)
        monkeypatch.setenv(PASSWORD_VARIABLE, "right")
        assert run(*revoke, "--broker", url).code == 0

    async def never(*_args, **_options):
        raise TimeoutError

    with Broker(kind="nats") as broker:
        monkeypatch.setattr(MqttTransport, "publish", never)
        late = run(*revoke, "--broker", broker.url.replace("//", "//anna:hidden@"))
    assert late.code == 2
    assert "did not acknowledge the list within 15 s" in late.err
    assert "hidden" not in late.err


def test_a_password_of_its_own_opens_a_broker(run):
    async def scenario(broker: Broker) -> str:
        address = BrokerAddress(broker.url.replace("//", "//anna@"), password="rig/ht:word@")
        with pytest.raises(TransportError, match="check name and password") as error:
            async with mqtt_transport(address.updated(password="wrong"), "a"):
                pass
        assert "wrong" not in str(error.value)
        with pytest.raises(TransportError, match="'anna' without a password: give --password-file"):
            async with mqtt_transport(address.updated(password=None), "a"):
                pass
        async with mqtt_transport(address, "a") as transport:
            return transport.connection.state

    with Broker(BrokerSettings(users={"anna": "rig/ht:word@"}), kind="nats") as broker:
        assert run(scenario(broker)) == "connected"
