"""Timeouts, the MQTT keepalive and the largest packet: what is refused, and how options hand them on.

`test_settings_once.py` shows that configs, devices' files and child processes hand on every such key.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_kit import runner, setting

from gossamer.experiments.config.tables import ConfigError, load_config, parse_config
from gossamer.experiments.live.device import read_join
from gossamer.gossip import LARGEST_PACKET, LONGEST_KEEPALIVE, MqttOptions
from gossamer.peer import BrokerAddress, mqtt_transport

URL = "mqtt://127.0.0.1:1"
TOPIC = "gossamer/v1/x/peer/y/inbox/v"
NO_KEEPALIVE = "a keepalive has 1 to 65535 seconds, not {}"
NO_PACKET = "packets have 512 to 16777216 bytes, not {}: give the broker's limit"


def device_file(folder: Path, text: str) -> Path:
    file = folder / "anna.toml"
    file.write_text(f'name = "anna"\nentry = "m:f"\n{text}\n')
    return file


@pytest.mark.parametrize("key", ["start_timeout", "settle_timeout", "leave_timeout"])
@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", '"long"'])
def test_the_error_of_an_invalid_timeout_names_file_and_key(tmp_path, key, value):
    with pytest.raises(ConfigError, match=f"anna.toml: key '{key}': "):
        read_join(device_file(tmp_path, f"{key} = {value}"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *(("keepalive", value, NO_KEEPALIVE) for value in (0, -1, LONGEST_KEEPALIVE + 1)),
        *(("max_packet", value, NO_PACKET) for value in (511, 0, -4096, LARGEST_PACKET + 1)),
    ],
)
def test_what_mqtt_does_not_allow_is_refused_in_one_line(tmp_path, key, value, message):
    message = message.format(value)
    with pytest.raises(ConfigError, match=f"anna.toml: key '{key}': {message}"):
        read_join(device_file(tmp_path, f"{key} = {value}"))
    with pytest.raises(ConfigError, match=f"^config: key 'gossip.{key}': {message}"):
        parse_config({"gossip": {key: value}})
    with pytest.raises(ValueError, match=message):
        MqttOptions(**{key: value})


@pytest.mark.parametrize("size", ['"4k"', "true", "4096.5"])
def test_a_config_takes_numbers_only(size, tmp_path):
    file = tmp_path / "swarm.toml"
    file.write_text(f"[gossip]\nmax_packet = {size}\n")
    with pytest.raises(ConfigError, match=r"swarm.toml: key 'gossip.max_packet'"):
        load_config(file)


def test_both_reach_the_connection():
    plain = mqtt_transport(BrokerAddress(URL), "a")
    small = mqtt_transport(BrokerAddress(URL, keepalive=7, max_packet=4096), "a")
    assert (plain.options.keepalive, small.options.keepalive) == (30, 7)
    assert plain.max_payload(TOPIC) - small.max_payload(TOPIC) == LARGEST_PACKET - 4096


@pytest.mark.parametrize(("key", "default"), [("keepalive", 30), ("max_packet", LARGEST_PACKET)])
def test_options_go_before_files_and_files_before_the_default(
    tmp_path, monkeypatch, capsys, key, default
):
    option = [f"--{key.replace('_', '-')}", "700"]
    join = runner(tmp_path, monkeypatch, capsys, "join", "--broker", URL, "--swarm", "s")
    swarm = runner(tmp_path, monkeypatch, capsys, "swarm", "swarm.toml", "--broker", URL)
    for text, options, expected in (
        ("", [], default),
        (" = 900", [], 900),
        (" = 900", option, 700),
    ):
        device_file(tmp_path, text and key + text)
        (tmp_path / "swarm.toml").write_text(f"peers = 2\n{text and f'gossip.{key}{text}'}\n")
        joined = join("--config", "anna.toml", "-o", "out", *options, "--show-settings")
        assert setting(joined, key) == str(expected)
        assert setting(swarm(*options, "--show-settings"), key) == str(expected)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--keepalive", "65536", "a keepalive has 1 to 65535 seconds, not 65536"),
        ("--max-packet", "511", "packets have 512 to 16777216 bytes"),
    ],
)
def test_an_option_that_mqtt_does_not_allow_is_one_line(
    tmp_path, monkeypatch, capsys, option, value, message
):
    device_file(tmp_path, "")
    (tmp_path / "swarm.toml").write_text("peers = 2\n")
    for command, arguments in {
        "swarm": ["swarm.toml", "--broker", URL],
        "join": ["--broker", URL, "--swarm", "s", "--config", "anna.toml"],
    }.items():
        result = runner(tmp_path, monkeypatch, capsys, command)(*arguments, option, value)
        assert result.code == 2
        assert f"{option} {value}: {message}" in result.err
