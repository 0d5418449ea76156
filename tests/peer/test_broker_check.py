"""gossamer broker check: what it finds out about brokers that we can start, and one that peers cannot use."""

from __future__ import annotations

import pytest
from bad_broker import BadBroker

from gossamer.gossip import TransportError
from gossamer.peer import (
    Broker,
    BrokerAddress,
    BrokerSettings,
    Cluster,
    Finding,
    check_broker,
    write_rules,
)


async def checked(address: BrokerAddress, swarm: str, name: str) -> list[Finding]:
    return await check_broker(address, swarm, name, rate_seconds=0.1)


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {each.subject: each.verdict for each in findings if each.verdict != "ok"}


def found(findings: list[Finding], subject: str) -> Finding:
    (finding,) = (each for each in findings if each.subject == subject)
    return finding


@pytest.fixture(params=["mosquitto", "nats"])
def kind(request, mosquitto_required):
    if request.param == "mosquitto":
        mosquitto_required()
    return request.param


def test_peers_can_work_with_the_brokers_that_gossamer_starts(run, kind):
    with Broker(kind=kind) as broker:
        findings = run(checked(BrokerAddress(broker.url), "garden", "anna"))
    assert verdicts(findings) == {}
    assert found(findings, "MQTT versions").result == (
        "3.1.1, 5" if kind == "mosquitto" else "3.1.1"
    )
    rates = [each.result for each in findings if each.subject.startswith("packets a second")]
    assert len(rates) == 2
    assert all(not rate.startswith("0 ") for rate in rates)


def test_a_packet_limit_is_found_and_a_slow_reader_is_noticed(run, kind):
    settings = BrokerSettings(
        max_packet=200_000, max_queued_bytes=1_000_000, max_queued_messages=20
    )
    with Broker(settings, kind=kind) as broker:
        findings = run(checked(BrokerAddress(broker.url), "garden", "anna"))
    assert verdicts(findings).items() >= {"packet limit": "note", "slow reader": "note"}.items()
    assert "fails" not in verdicts(findings).values()
    limit = found(findings, "packet limit")
    assert limit.result == "at least 131 kB, less than 261 kB"
    assert "--max-packet 130560" in limit.setting
    outcome = "dropped" if kind == "mosquitto" else "cut off"
    assert outcome in found(findings, "slow reader").result


def test_rules_that_leave_out_a_peer_fail(run, kind, tmp_path):
    files = write_rules(tmp_path, "garden", ["anna@x", "ben@y"])
    password = files.secrets["anna@x"].read_text().strip()
    with Broker(BrokerSettings(rules=files), kind=kind) as broker:
        url = broker.url.replace("://", "://anna%40x@")
        address = BrokerAddress(url, password=password)
        assert verdicts(run(checked(address, "garden", "anna@x"))) == {}
        refused = run(checked(address, "garden", "ben@y"))
    assert found(refused, "access rules").verdict == "fails"
    assert "its inbox" in found(refused, "access rules").result


def test_a_broker_that_accepts_no_retained_messages_fails_with_the_setting(run, mosquitto_required):
    mosquitto_required()
    settings = BrokerSettings(mosquitto_options=("retain_available false",))
    with Broker(settings, kind="mosquitto") as broker:
        findings = run(checked(BrokerAddress(broker.url), "garden", "anna"))
    assert verdicts(findings) == {"retained messages": "fails"}
    assert "retain_available" in found(findings, "retained messages").setting


def test_a_broker_without_qos_1_fails_with_the_setting(run):
    async def scenario() -> list[Finding]:
        async with BadBroker(has_qos_1=False) as broker:
            return await checked(BrokerAddress(broker.url), "garden", "anna")

    findings = run(scenario())
    assert verdicts(findings) == {"QoS 1": "fails"}
    assert "max_qos" in found(findings, "QoS 1").setting


def test_a_broker_like_rabbitmq_fails_with_the_reason(run):
    async def scenario() -> list[Finding]:
        async with BadBroker(wildcards_get_retained=False, publishes_wills=False) as broker:
            return await checked(BrokerAddress(broker.url), "garden", "anna")

    findings = run(scenario())
    assert verdicts(findings) == {"retained, wildcard filters": "fails", "last will": "note"}
    assert (
        "not delivered to gossamer/v1/garden/peer/+/card"
        in found(findings, "retained, wildcard filters").result
    )


def test_brokers_that_are_no_cluster_are_told_from_one(run):
    with Cluster(3) as cluster:
        findings = run(checked(BrokerAddress(cluster.url), "garden", "anna"))
    assert verdicts(findings) == {}
    assert found(findings, "retained, from another node").result == "delivered by all 3 nodes"
    with Broker(kind="nats") as one, Broker(kind="nats") as two:
        findings = run(checked(BrokerAddress(f"{one.url},{two.url}"), "garden", "anna"))
    assert verdicts(findings) == {"retained, from another node": "fails"}


def test_a_broker_that_is_not_there_is_an_error(run, silent_port):
    address = BrokerAddress(f"mqtt://127.0.0.1:{silent_port}", connect_timeout=0.2)
    with pytest.raises(TransportError, match="nothing listens"):
        run(checked(address, "garden", "anna"))


def test_a_broker_that_is_gone_before_the_last_check_costs_no_finding(run):
    async def scenario() -> list[Finding]:
        async with BadBroker() as broker:
            address = BrokerAddress(broker.url, connect_timeout=0.2)

            def hang_up(text: str) -> None:
                if text == "checking: slow reader":
                    broker.stop_listening()

            return await check_broker(address, "garden", "anna", hang_up, rate_seconds=0.1)

    findings = run(scenario())
    last = findings.pop()
    assert (last.subject, last.result, last.verdict) == (
        "slow reader", "Connection refused", "fails",
    )  # fmt: skip
    assert "fails" not in verdicts(findings).values()
