"""Parts of a swarm on several hosts: which peers run where, and whether the configs are equal."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import pytest

from gossamer.experiments.config.tables import Config, ConfigError, differing_key
from gossamer.experiments.live.hosts import HostPart, parse_peers
from gossamer.gossip import ROOT
from gossamer.peer import BrokerAddress, Report, mqtt_transport


@pytest.mark.parametrize(
    ("text", "peers"),
    [("0-3", [0, 1, 2, 3]), ("7", [7]), ("0-1,4, 6-7", [0, 1, 4, 6, 7]), ("2-3,3-4", [2, 3, 4])],
)
def test_indices_of_peers_are_read(text, peers):
    assert parse_peers(text, 8) == peers


@pytest.mark.parametrize("text", ["", "a", "0-", "3-1", "0-8", "-1", "1--2", "²"])
def test_wrong_indices_are_one_line(text):
    with pytest.raises(ConfigError, match="--peers") as error:
        parse_peers(text, 8)
    assert "\n" not in str(error.value)


def test_the_differing_key_is_named():
    one = {"peers": 4, "data": {"set": "digits", "samples": 40}, "models": [{"name": "a"}]}
    assert differing_key(one, one) is None
    assert differing_key(one, one | {"peers": 5}) == "peers"
    assert differing_key(one, one | {"data": {"set": "digits", "samples": 41}}) == "data.samples"
    assert differing_key(one, one | {"models": [{"name": "b"}]}) == "models.0.name"
    assert differing_key(one, one | {"rounds": 3}) == "rounds"


CONFIG = Config(name="small", peers=2, rounds=5)
NONSENSE = [b"nonsense", b"[]", b"{}", b'{"version": 1, "peers": 2, "config": 3}']


def report(peer: str) -> dict:
    counts = {"global": {"messages": 3}}
    values = Report(peer, "s1", 5, 0.5, "finished", "", {}, [], [], [], {}, {}, {}, {}, {}, counts)
    return asdict(values)


def test_nonsense_where_hosts_publish_is_ignored(run, empty_broker):
    address = BrokerAddress(empty_broker.url)

    async def scenario() -> dict[str, dict]:
        async with mqtt_transport(address, "stranger") as stranger:

            async def publish(topic: str, *payloads: bytes) -> None:
                for payload in payloads:
                    topic_of_hosts = f"{ROOT}/small/hosts/{topic}"
                    await stranger.publish(topic_of_hosts, payload, retain=True, qos=1)

            for number, payload in enumerate(NONSENSE):
                await publish(f"{number}-{number}/status", payload)
            part = HostPart(CONFIG, "small", address, [1])
            await asyncio.to_thread(part.announce)
            own = {"1": report("1")}
            exchange = asyncio.create_task(asyncio.to_thread(part.exchange_reports, own))
            while not exchange.done():
                await publish("report/0/summary", *NONSENSE, json.dumps(report("0")).encode())
            return exchange.result()

    assert run(scenario()) == {"0": report("0"), "1": report("1")}


def test_without_a_broker_a_host_keeps_its_own_reports(capsys, silent_port):
    address = BrokerAddress(f"mqtt://127.0.0.1:{silent_port}", connect_timeout=0.2)
    part = HostPart(CONFIG, "small", address, [1])
    part.withdraw()  # nothing can be withdrawn, and nobody is told of anything
    own = {"1": report("1")}
    assert part.exchange_reports(own) == own
    assert "no reports are exchanged with other hosts" in capsys.readouterr().err
