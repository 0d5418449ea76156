"""A process whose disk is full: metrics are left out, a checkpoint or a network that cannot be written is
one line and exit code 2."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from peer_kit import quick

from gossamer.peer.machine import Files, Machine
from gossamer.peer.process import PeerSpec, ProcessSpec, run_guarded
from gossamer.peer.settings import Limits
from gossamer.peer.spec import BrokerAddress

HERE = Path(__file__).parent


class FullDisk(Files):
    """Files of which none can be written."""

    def save(self, path: Path, tree: dict[str, Any], *, sync: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def start(tmp_path, empty_broker, monkeypatch):
    """Run a process of one peer to its end: the exit code."""
    monkeypatch.chdir(HERE)
    address = BrokerAddress(empty_broker.url)

    def run(machine: Machine | None = None) -> int:
        spec = PeerSpec("a", "learner_kit:make_learner", {"name": "a"}, quick(rounds=2))
        host = ProcessSpec(address, str(tmp_path), [spec])
        return run_guarded(host, limits=Limits(save_retry=0.0), machine=machine)

    return run


def only_line(capsys) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: peer a: ")
    return line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_without_room_for_metrics_a_peer_goes_on(start, tmp_path, caplog):
    (tmp_path / "a.jsonl").symlink_to("/dev/full")
    assert start() == 0
    assert caplog.text.count("a.jsonl: cannot be written: No space left on device") == 1
    assert (tmp_path / "a.safetensors").exists()


def test_without_room_for_its_checkpoint_a_peer_ends_in_one_line(start, tmp_path, capsys):
    machine = Machine()
    machine.files = FullDisk()
    assert start(machine) == 2
    line = only_line(capsys)
    assert "a.checkpoint cannot be written: No space left on device" in line


def test_without_room_for_its_network_a_peer_keeps_its_checkpoint(start, tmp_path, capsys):
    in_the_way = tmp_path / "a.safetensors.part"
    in_the_way.mkdir()
    assert start() == 2
    assert "cannot save its network and report" in only_line(capsys)
    in_the_way.rmdir()
    assert (tmp_path / "a.checkpoint").exists()
    assert start() == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "a.jsonl", "a.network.json", "a.report.json", "a.safetensors",
    ]  # fmt: skip
