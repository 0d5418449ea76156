"""Timeouts and the MQTT keepalive in configs, in devices' files and on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_kit import runner, setting

from gossamer.experiments.config.tables import ConfigError, parse_config
from gossamer.experiments.live.device import load_join, read_join
from gossamer.experiments.live.layout import plan
from gossamer.gossip import LONGEST_KEEPALIVE, MqttOptions
from gossamer.peer import BrokerAddress, Settings, mqtt_transport

URL = "mqtt://127.0.0.1:1"
TIMEOUTS = ("start_timeout", "settle_timeout", "leave_timeout")


def device_file(folder: Path, text: str) -> Path:
    file = folder / "anna.toml"
    file.write_text(f'name = "anna"\nentry = "m:f"\n{text}\n')
    return file


@pytest.mark.parametrize("key", TIMEOUTS)
def test_a_devices_file_and_a_config_set_timeouts(tmp_path, key):
    default = getattr(Settings(), key)
    for text, expected in (("", default), (f"{key} = 77", 77.0), (f"{key} = 0.5", 0.5)):
        settings = load_join(
            device_file(tmp_path, text), BrokerAddress(URL), swarm="s"
        ).spec.settings
        assert getattr(settings, key) == expected
    model = {"name": "all", "layout": "64-32-10"}
    table = {"peers": 2, "data": {"samples": 20}, "models": [model]}
    for gossip, expected in (({}, default), ({key: 77}, 77.0)):
        spec = plan(parse_config({**table, "gossip": gossip}), tmp_path, BrokerAddress(URL))
        assert [getattr(peer.settings, key) for peer in spec.peers] == [expected] * 2


@pytest.mark.parametrize("key", TIMEOUTS)
@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", '"long"'])
def test_the_error_of_an_invalid_timeout_names_file_and_key(tmp_path, key, value):
    with pytest.raises(ConfigError, match=f"anna.toml: key '{key}': "):
        read_join(device_file(tmp_path, f"{key} = {value}"))


@pytest.mark.parametrize("seconds", [0, -1, LONGEST_KEEPALIVE + 1])
def test_a_keepalive_that_mqtt_does_not_allow_is_refused(tmp_path, seconds):
    message = f"a keepalive has 1 to 65535 seconds, not {seconds}"
    with pytest.raises(ConfigError, match=f"anna.toml: key 'keepalive': {message}"):
        read_join(device_file(tmp_path, f"keepalive = {seconds}"))
    with pytest.raises(ConfigError, match=f"config: key 'gossip.keepalive': {message}"):
        parse_config({"gossip": {"keepalive": seconds}})
    with pytest.raises(ValueError, match=message):
        MqttOptions(keepalive=seconds)


def test_the_keepalive_reaches_the_connection():
    assert mqtt_transport(BrokerAddress(URL), "a").options.keepalive == 30
    assert mqtt_transport(BrokerAddress(URL, keepalive=7), "a").options.keepalive == 7


@pytest.mark.parametrize(
    ("text", "option", "expected"),
    [("", [], 30), ("keepalive = 9", [], 9), ("keepalive = 9", ["--keepalive", "7"], 7)],
)
def test_join_hands_the_keepalive_to_the_broker(
    tmp_path, monkeypatch, capsys, text, option, expected
):
    device_file(tmp_path, text)
    arguments = ["--broker", URL, "--swarm", "s", "--config", "anna.toml", "-o", "out"]
    run = runner(tmp_path, monkeypatch, capsys, "join")
    assert setting(run(*arguments, *option, "--show-settings"), "keepalive") == str(expected)


def test_swarm_hands_the_keepalive_to_the_broker(tmp_path, monkeypatch, capsys):
    (tmp_path / "swarm.toml").write_text("peers = 2\ngossip.keepalive = 9\n")
    run = runner(tmp_path, monkeypatch, capsys, "swarm", "swarm.toml", "--show-settings")
    for options, expected in (([], "9"), (["--keepalive", "7"], "7")):
        assert setting(run("--broker", URL, *options), "keepalive") == expected


def test_an_option_that_mqtt_does_not_allow_is_refused(tmp_path, monkeypatch, capsys):
    device_file(tmp_path, "")
    (tmp_path / "swarm.toml").write_text("peers = 2\n")
    message = "--keepalive 65536: a keepalive has 1 to 65535 seconds, not 65536"
    for command, arguments in {
        "swarm": ["swarm.toml", "--broker", URL],
        "join": ["--broker", URL, "--swarm", "s", "--config", "anna.toml"],
    }.items():
        result = runner(tmp_path, monkeypatch, capsys, command)(*arguments, "--keepalive", "65536")
        assert result.code == 2
        assert message in result.err
