"""A process of peers: its spec, the results that it saves, the signals to leave, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from peer_kit import make_learner, quick
from waiting import until

from gossamer.gossip import ONE, MqttTransport, Will
from gossamer.peer.broker import Broker, BrokerSettings
from gossamer.peer.exits import ExitCode, PeerError, unit_text
from gossamer.peer.process import (
    PeerSpec,
    ProcessSpec,
    main,
    mqtt_connect,
    run_guarded,
    run_peer,
    run_process,
)
from gossamer.peer.spec import BrokerAddress

HERE = Path(__file__).parent


def peer_spec(name: str, entry: str = "learner_kit:make_learner", **settings) -> PeerSpec:
    return PeerSpec(name, entry, {"name": name}, quick(**settings))


def start(path: Path) -> subprocess.Popen[str]:
    """Start a process from a spec file; the entry points are in this folder."""
    command = [sys.executable, "-m", "gossamer.peer", str(path)]
    return subprocess.Popen(command, cwd=HERE, stderr=subprocess.PIPE, text=True)


def test_a_spec_survives_its_file(tmp_path):
    settings = {"neighbours": ("b",), "expect": ("b", "c"), "servers": {"global": "b"}}
    spec = ProcessSpec(
        BrokerAddress("mqtts://broker.lan", ca="ca.pem"),
        str(tmp_path),
        [peer_spec("a", **settings)],
    )
    spec.write(tmp_path / "host.json")
    assert ProcessSpec.read(tmp_path / "host.json") == spec


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "No such file"),
        ("{", "the file: Invalid JSON"),
        ('{"broker": {"url": 1, "password": "hush"}, "folder": "."}', "broker"),
    ],
)
def test_a_spec_that_cannot_be_read_is_one_line(tmp_path, capsys, text, complaint):
    path = tmp_path / "spec.json"
    if text is not None:
        path.write_text(text)
    assert main([str(path)]) == ExitCode.CANNOT_TAKE_PART
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: ")
    assert complaint in line
    assert "hush" not in line


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    path = tmp_path / "spec.json"
    ProcessSpec(BrokerAddress("mqtt://127.0.0.1:1"), str(path / "results")).write(path)
    assert main([str(path)]) == ExitCode.CANNOT_TAKE_PART
    error = f"error: {path}/results: cannot be made: Not a directory\n"
    assert capsys.readouterr().err == error


def test_a_process_without_a_spec_prints_its_usage(capsys):
    assert main([]) == ExitCode.CANNOT_TAKE_PART
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: usage: python -m gossamer.peer SPEC.json")


def test_peers_of_one_process_leave_networks_metrics_and_reports(
    run, tmp_path, empty_broker, monkeypatch
):
    monkeypatch.chdir(HERE)
    names = ("a", "b")
    peers = [peer_spec(name, rounds=3, expect=names, founder=True) for name in names]
    address = BrokerAddress(empty_broker.url)
    reports = run(run_process(ProcessSpec(address, str(tmp_path), peers)))
    assert [report.peer for report in reports] == ["a", "b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}.{what}"
        for name in names
        for what in ("jsonl", "network.json", "report.json", "safetensors")
    )
    for report in reports:
        saved = json.loads((tmp_path / f"{report.peer}.report.json").read_text())
        assert saved["rounds"] == 3
        lines = (tmp_path / f"{report.peer}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["round"] for record in records][:3] == [1, 2, 3]
        make_learner(report.peer).network.load(tmp_path / f"{report.peer}.safetensors")
    assert sum(sum(report.weight["global"][:2]) for report in reports) == 2 * ONE


def test_the_log_says_where_figures_are_served(run, tmp_path, empty_broker, monkeypatch, caplog):
    pytest.importorskip("prometheus_client")
    monkeypatch.chdir(HERE)
    spec = ProcessSpec(BrokerAddress(empty_broker.url), str(tmp_path), [peer_spec("a", rounds=1)])
    with caplog.at_level(logging.INFO):
        run(run_process(spec, metrics=("127.0.0.1", 0)))
    (line,) = (line for line in caplog.messages if line.startswith("figures for Prometheus"))
    assert re.fullmatch(r"figures for Prometheus: http://127\.0\.0\.1:[1-9]\d*/metrics", line)


def test_an_entry_point_that_returns_no_learner_is_named(run, tmp_path):
    spec = PeerSpec("a", "builtins:dict", {}, quick())
    connect = mqtt_connect(BrokerAddress("mqtt://127.0.0.1"))
    with pytest.raises(PeerError, match=r"peer a: builtins:dict returned a dict, not a learner"):
        run(run_peer(spec, connect, tmp_path, asyncio.Event()))


def ends(folder: Path, capsys, address: BrokerAddress, **settings) -> tuple[int, str]:
    """Run a peer to its end: its exit code, and the only line about it that is no log line."""
    code = run_guarded(ProcessSpec(address, str(folder), [peer_spec("a", **settings)]))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return code, line


def test_what_a_restart_can_mend_has_an_exit_code_after_which_systemd_restarts(
    tmp_path, monkeypatch, capsys, silent_port, empty_broker
):
    """After a power cut a device may be faster than its broker, or than a peer that it expects."""
    monkeypatch.chdir(HERE)
    url = f"mqtt://127.0.0.1:{silent_port}"
    code, line = ends(tmp_path, capsys, BrokerAddress(url, connect_timeout=0.2))
    assert (code, url in line) == (ExitCode.NOT_REACHED, True)
    expects = {"expect": ("a", "nobody"), "start_timeout": 0.1}
    code, line = ends(tmp_path, capsys, BrokerAddress(empty_broker.url), **expects)
    assert (code, "nobody did not come online" in line) == (ExitCode.NOT_REACHED, True)
    unit = unit_text("a", ["join"], tmp_path, user="u", memory="1G")
    (final,) = [each for each in unit.splitlines() if each.startswith("RestartPreventExitStatus=")]
    assert str(int(ExitCode.NOT_REACHED)) not in final


def test_a_refusal_that_a_restart_would_repeat_is_one_line_and_exit_code_2(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(HERE)
    with Broker(BrokerSettings(users={"anna": "right"}), kind="nats") as broker:
        address = BrokerAddress(broker.url.replace("://", "://anna@"), password="wrong")
        code, line = ends(tmp_path, capsys, address)
    assert code == ExitCode.CANNOT_TAKE_PART
    assert "check name and password" in line


def test_an_entry_that_fails_ends_the_process_with_one_line(
    tmp_path, empty_broker, monkeypatch, capsys
):
    monkeypatch.chdir(HERE)
    spec = peer_spec("a", "learner_kit:make_nothing_at_all")
    address = BrokerAddress(empty_broker.url)
    assert run_guarded(ProcessSpec(address, str(tmp_path), [spec])) == 2
    broken = PeerSpec("a", "learner_kit:make_learner", {"name": "a", "samples": -1}, quick())
    assert run_guarded(ProcessSpec(address, str(tmp_path), [broken])) == 2
    assert "error: learner_kit:make_learner raised " in capsys.readouterr().err


def test_a_mistake_of_the_learner_is_a_crash_with_its_traceback(
    tmp_path, empty_broker, monkeypatch
):
    monkeypatch.chdir(HERE)
    address = BrokerAddress(empty_broker.url)
    mistaken = peer_spec("a", "learner_kit:make_mistaken")
    with pytest.raises(BaseExceptionGroup) as caught:
        run_guarded(ProcessSpec(address, str(tmp_path), [mistaken]))
    assert caught.group_contains(ZeroDivisionError)


def test_each_peer_has_an_echo_topic_of_its_own(run):
    async def made():
        connect = mqtt_connect(BrokerAddress("mqtt://127.0.0.1"))
        return connect("a-1", Will("gossamer/v1/garden/peer/a/status", b""), _nothing)

    transport = run(made())
    assert isinstance(transport, MqttTransport)
    assert transport.echo_topic == "gossamer/v1/garden/peer/a/inbox/@echo"


@pytest.mark.live
@pytest.mark.timeout(600)  # torch is loaded, on whatever machine this is
def test_told_to_stop_with_the_broker_gone_a_process_ends_and_says_so(
    tmp_path, monkeypatch, capsys
):
    """A second process with the same checkpoint ends at once, with an error."""
    with Broker(kind="nats") as broker:
        entry = "learner_kit:make_resting"
        peer = peer_spec("a", entry, rounds=10**9, leave_timeout=0.5, test_every=10**9)
        path = tmp_path / "host.json"
        ProcessSpec(BrokerAddress(broker.url), str(tmp_path), [peer]).write(path)
        first = start(path)
        try:
            metrics = tmp_path / "a.jsonl"
            asyncio.run(until(lambda: metrics.exists() and metrics.stat().st_size > 0))
            monkeypatch.chdir(HERE)
            assert main([str(path)]) == ExitCode.CANNOT_TAKE_PART  # this is the second
            said = capsys.readouterr().err.strip().splitlines()
            assert said[-1].startswith(
                f"error: peer a runs here already, as process {first.pid}, with"
            )
            broker.stop()
            os.kill(first.pid, signal.SIGTERM)
            _, log = first.communicate(timeout=250)
        finally:
            first.kill()
    assert first.returncode == ExitCode.GOODBYE_NOT_DELIVERED
    line = (
        "peer a left swarm nest: it was told to stop; the broker did not accept its goodbye within "
    )
    assert line in log
    assert "Traceback" not in log
    assert (
        log.strip().splitlines()[-1].startswith("error: peer a: no broker accepted its goodbye (")
    )
    assert f"{tmp_path}/a.checkpoint keeps it: start the peer again to deliver it" in log
    assert (tmp_path / "a.checkpoint").exists()
    assert not (tmp_path / "a.report.json").exists()  # it comes with the goodbye


async def _nothing() -> None:
    return
