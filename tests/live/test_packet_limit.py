"""Real processes on a mosquitto that hangs up on large packets, or drops them without a word."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from swarm_kit import small_config

from gossamer.experiments.live.layout import plan
from gossamer.experiments.live.run import collect
from gossamer.peer import Broker, BrokerAddress, BrokerSettings, LocalSwarm, PeerError

pytestmark = pytest.mark.live


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["3.1.1", "5"])
@pytest.mark.parametrize("hangs_up", [True, False])
def test_peers_average_through_a_broker_that_refuses_or_drops_large_packets(
    mosquitto: Broker, tmp_path: Path, version: str, hangs_up: bool
) -> None:
    config = small_config(2, 4, mode="rounds", per_process=2)
    drops = BrokerSettings(mosquitto_options=("message_size_limit 2000",))
    settings = BrokerSettings(max_packet=2000) if hangs_up else drops
    with Broker(settings, kind="mosquitto") as broker:
        spec = plan(config, tmp_path, BrokerAddress(broker.url, version=version))
        asyncio.run(LocalSwarm(spec).run())
    outcome = collect(config, spec, [])
    held, injected = outcome.weight["global"]
    assert held == injected == 2
    assert outcome.consensus["global"] < 1e-2
    for peer in spec.peers:
        report = json.loads((tmp_path / f"{peer.name}.report.json").read_text())
        assert report["gossip"]["credited"] >= config.rounds
        reconnects = report["transport"].get("reconnects", 0)
        tells = (
            hangs_up and version == "5"
        )  # a broker of MQTT 5 says its limit when it is connected to
        assert tells or report["transport"].get("packets-halved", 0) >= 1
        assert reconnects >= 3 if hangs_up and not tells else not reconnects


@pytest.mark.timeout(900)
def test_a_broker_too_small_for_a_card_ends_peers_with_one_line(
    mosquitto: Broker, tmp_path: Path
) -> None:
    config = small_config(2, 2, mode="rounds", per_process=2)
    with Broker(BrokerSettings(max_packet=340), kind="mosquitto") as broker:
        spec = plan(config, tmp_path, BrokerAddress(broker.url))
        with pytest.raises(PeerError, match=r"cannot be made smaller: .*max_packet_size") as error:
            asyncio.run(LocalSwarm(spec).run())
    assert broker.url in str(error.value)
