"""The largest packet that a broker is sent: a key of configs and peers' files, and an option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_kit import runner, setting

from gossamer.experiments.config.tables import ConfigError, load_config, parse_config
from gossamer.experiments.live.device import read_join
from gossamer.experiments.live.layout import plan
from gossamer.gossip import LARGEST_PACKET, MqttOptions, MqttTransport
from gossamer.peer import BrokerAddress, ProcessSpec, mqtt_transport

URL = "mqtt://127.0.0.1:1"
SMALL: dict[str, Any] = {
    "peers": 2,
    "data": {"samples": 20},
    "models": [{"name": "all", "layout": "64-32-10"}],
}
TOPIC = "gossamer/v1/x/peer/y/inbox/v"


def room(address: BrokerAddress) -> int:
    transport = mqtt_transport(address, "a")
    assert isinstance(transport, MqttTransport)
    return transport.max_payload(TOPIC)


def test_a_config_says_it_and_the_command_line_goes_before(tmp_path: Path) -> None:
    config = parse_config({**SMALL, "gossip": {"max_packet": 4096}})
    spec = plan(config, tmp_path, BrokerAddress(URL))
    assert room(spec.broker) == room(BrokerAddress(URL)) - LARGEST_PACKET + 4096
    given = plan(config, tmp_path, BrokerAddress(URL, max_packet=2000))
    assert given.broker.max_packet == 2000
    assert (
        plan(parse_config(SMALL), tmp_path, BrokerAddress(URL)).broker.max_packet == LARGEST_PACKET
    )
    ProcessSpec(spec.broker, str(tmp_path), []).write(tmp_path / "host.json")
    assert ProcessSpec.read(tmp_path / "host.json").broker.max_packet == 4096


@pytest.mark.parametrize("size", [511, 0, -4096, LARGEST_PACKET + 1])
def test_what_no_packet_can_be_is_one_line(tmp_path: Path, size: int) -> None:
    words = f"packets have 512 to 16777216 bytes, not {size}: give the broker's limit"
    with pytest.raises(ConfigError, match=f"^config: key 'gossip.max_packet': {words}"):
        parse_config({**SMALL, "gossip": {"max_packet": size}})
    file = tmp_path / "anna.toml"
    file.write_text(f'entry = "m:f"\nmax_packet = {size}\n')
    with pytest.raises(ConfigError, match=f"anna.toml: key 'max_packet': {words}"):
        read_join(file)
    with pytest.raises(ValueError, match=words):
        MqttOptions(max_packet=size)


@pytest.mark.parametrize("size", ['"4k"', "true", "4096.5"])
def test_a_config_takes_numbers_only(size: str, tmp_path: Path) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text(f"[gossip]\nmax_packet = {size}\n")

    with pytest.raises(ConfigError, match=r"swarm.toml: key 'gossip.max_packet'"):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "option", "expected"),
    [
        ("", [], LARGEST_PACKET),
        ("max_packet = 9000", [], 9000),
        ("max_packet = 9000", ["700"], 700),
    ],
)
def test_join_hands_it_to_the_broker(
    tmp_path, monkeypatch, capsys, text: str, option: list[str], expected: int
) -> None:
    (tmp_path / "anna.toml").write_text(f'name = "anna"\nentry = "m:f"\n{text}\n')
    arguments = ["--broker", URL, "--swarm", "s", "--config", "anna.toml", "-o", "out"]
    options = ["--max-packet", *option] if option else []
    run = runner(tmp_path, monkeypatch, capsys, "join")
    assert setting(run(*arguments, *options, "--show-settings"), "max_packet") == str(expected)


def test_swarm_hands_it_to_the_broker(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "swarm.toml").write_text("peers = 2\n")
    run = runner(tmp_path, monkeypatch, capsys, "swarm", "swarm.toml", "--show-settings")
    for options, expected in (([], LARGEST_PACKET), (["--max-packet", "700"], 700)):
        assert setting(run("--broker", URL, *options), "max_packet") == str(expected)


def test_an_option_that_no_packet_can_be_is_one_line(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "anna.toml").write_text('name = "anna"\nentry = "m:f"\n')
    (tmp_path / "swarm.toml").write_text("peers = 2\n")
    for command, arguments in {
        "swarm": ["swarm.toml"],
        "join": ["--broker", URL, "--swarm", "s", "--config", "anna.toml"],
    }.items():
        run = runner(tmp_path, monkeypatch, capsys, command)
        result = run(*arguments, "--max-packet", "511", "--show-settings")
        assert result.code == 2
        assert "--max-packet 511: packets have 512 to 16777216 bytes" in result.err
