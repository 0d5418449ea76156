"""A device as a service: its unit, what is wrong with the command, and signs of life for systemd."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gossamer.experiments.cli.app import app
from gossamer.peer.exits import report_alive, unit_text


@pytest.fixture
def service(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words: str):
        return CliRunner().invoke(app, ["service", "install", *words])

    return run


def values(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_a_unit_runs_join_and_is_not_restarted_in_vain(service, tmp_path: Path) -> None:
    """It runs where the command was given, in which `join` finds the module and the results so far."""
    Path("garden").mkdir()
    Path("garden/greenhouse 1.gossamer").write_text("{}")
    Path("my_device.py").write_text("")
    result = service(
        "garden/greenhouse 1.gossamer", "--entry", "my_device:make", "--memory", "512M"
    )
    assert result.exit_code == 0, result.output
    assert "systemctl enable --now gossamer-greenhouse_1" in result.output.replace("\n", " ")
    unit = values((tmp_path / "gossamer-greenhouse_1.service").read_text())
    file = tmp_path.resolve() / "garden" / "greenhouse 1.gossamer"
    assert unit["ExecStart"] == (
        f'"{sys.executable}" "-m" "gossamer" "join" "{file}" "--entry" "my_device:make"'
    )
    assert unit["WorkingDirectory"] == str(tmp_path.resolve())
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("on-failure", "2 4")
    assert (unit["Type"], unit["MemoryMax"]) == ("notify", "512M")


def test_a_device_with_a_toml_file_names_broker_and_swarm(service, tmp_path: Path) -> None:
    Path("peer.toml").write_text('name = "anna"\n')
    words = ("--broker", "mqtt://broker.lan", "--swarm", "garden", "--out", "unit.service")
    assert service("peer.toml", *words).exit_code == 0
    command = values((tmp_path / "unit.service").read_text())["ExecStart"]
    assert command.endswith('"--broker" "mqtt://broker.lan" "--swarm" "garden"')


def test_other_options_of_join_are_passed_on(service, tmp_path: Path) -> None:
    for name in ("a.gossamer", "dev.toml"):
        Path(name).write_text("")
    words = ("--config", "dev.toml", "--metrics-port", "9464", "--log-json", "--out", "my results")
    result = service("a.gossamer", "--out", "unit.service", "--", *words)
    assert result.exit_code == 0, result.output
    command = values((tmp_path / "unit.service").read_text())["ExecStart"]
    assert command.endswith(f'/a.gossamer" {" ".join(chr(34) + word + chr(34) for word in words)}')
    mistaken = service("a.gossamer", "--out", "other.service", "--", *words, "--metrics", "1")
    assert mistaken.exit_code == 2
    assert "No such option: --metrics" in mistaken.output
    assert not Path("other.service").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("nowhere.gossamer",), "nowhere.gossamer: there is no such file"),
        (("a.gossamer",), "a.gossamer: --entry is missing"),
        (("a.gossamer", "--entry", "no_device:make"), "there is no module 'no_device' in"),
        (("a.gossamer", "--entry", "m:f", "--swarm", "s"), "a.gossamer: leave out --swarm"),
        (("peer.toml", "--swarm", "s"), "peer.toml: --broker is missing"),
        (("a.gossamer", "--entry", "m:f", "--memory", "much"), "--memory much: write a number"),
    ],
)
def test_mistakes_are_one_line(service, words: tuple[str, ...], text: str) -> None:
    for name in ("a.gossamer", "peer.toml", "m.py"):
        Path(name).write_text("")
    result = service(*words)
    assert result.exit_code != 0
    assert text in str(result.exception)
    assert not list(Path().glob("*.service"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    words = [sys.executable, "-c", 'print("100 % of $HOME\\\\")']
    unit = tmp_path / "gossamer-test.service"
    unit.write_text(unit_text("a peer, 100 %", words, tmp_path, user="root", memory="1G"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    ours = [line for line in done.stderr.splitlines() if unit.name in line]
    assert ours == []


def test_signs_of_life_come_at_half_the_watchdogs_time(tmp_path: Path, run) -> None:
    async def scenario() -> list[bytes]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(tmp_path / "notify"))
            manager.setblocking(False)
            environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "20000"}
            task = asyncio.create_task(report_alive(environment))
            loop = asyncio.get_running_loop()
            messages = [await loop.sock_recv(manager, 99) for _ in range(3)]
            task.cancel()
            return messages

    assert run(scenario()) == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    run(report_alive({}))  # not started by systemd
