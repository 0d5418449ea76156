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
from waiting import turns

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
    both = service("a.gossamer", "--entry", "json:loads", "--out", "other.service", "--", *words)
    assert "leave out --entry, which gossamer join does not take here" in str(both.exception)
    mistaken = service("a.gossamer", "--out", "other.service", "--", *words, "--metrics", "1")
    assert mistaken.exit_code == 2
    assert "No such option: --metrics" in mistaken.output
    assert not Path("other.service").exists()


def test_a_unit_runs_the_broker_of_enrolled_devices(service, tmp_path: Path) -> None:
    """It is started again after any failure, and changes nothing but the broker's own folder."""
    enrol = ("--swarm", "garden", "--broker", "mqtt://broker.lan", "ann")
    assert CliRunner().invoke(app, ["enrol", *enrol]).exit_code == 0
    result = service("--enrolled", "garden", "--user", "pi", "--", "--websockets", "9001")
    assert result.exit_code == 0, result.output
    assert "systemctl enable --now gossamer-broker-garden" in result.output.replace("\n", " ")
    unit = values((tmp_path / "gossamer-broker-garden.service").read_text())
    folder = tmp_path.resolve() / "garden"
    command = f'"broker" "--enrolled" "{folder}" "--websockets" "9001"'
    assert unit["ExecStart"] == f'"{sys.executable}" "-m" "gossamer" {command}'
    assert (unit["Type"], unit["Restart"], unit["User"]) == ("exec", "on-failure", "pi")
    assert "RestartPreventExitStatus" not in unit
    assert unit["ReadWritePaths"].startswith(f'"{folder}/broker"')
    assert f'"{folder}"' not in unit["ReadWritePaths"]
    mistaken = service("--enrolled", "garden", "--out", "other", "--", "--porto", "1")
    assert (mistaken.exit_code, "No such option: --porto" in mistaken.output) == (2, True)


def test_a_unit_for_root_is_warned_of(service) -> None:
    Path("m.py").write_text("")
    Path("a.gossamer").write_text("")
    said = {
        user: service("a.gossamer", "--entry", "m:f", "--user", user).output
        for user in ("root", "pi")
    }
    assert [("runs as root" in said[user]) for user in said] == [True, False]


def test_results_elsewhere_can_be_written(service, tmp_path: Path) -> None:
    Path("m.py").write_text("")
    Path("a.gossamer").write_text("")
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere" / "out"
    result = service("a.gossamer", "--entry", "m:f", "--", "--out", str(elsewhere))
    assert result.exit_code == 0, result.output
    unit = values((tmp_path / "gossamer-a.service").read_text())
    assert unit["ReadWritePaths"].startswith(f'"{tmp_path.resolve()}" "{elsewhere.resolve()}"')
    assert elsewhere.is_dir()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "give the device's file, or --enrolled FOLDER"),
        (("--enrolled", "nowhere"), "nowhere/broker/swarm.json: cannot be read"),
        (("--enrolled", "nowhere", "--entry", "m:f"), "leave out --entry, which is for a device's"),
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


needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here"
)
UNITS = {"peer": {"is_broker": False}, "broker": {"is_broker": True, "writes": [Path("/srv/a b")]}}


@needs_systemd
@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.parametrize("user", ["root", "pi"])
def test_systemd_understands_the_unit(tmp_path: Path, kind: str, user: str) -> None:
    words = [sys.executable, "-c", 'print("100 % of $HOME\\\\")']
    unit = tmp_path / "gossamer-test.service"
    text = unit_text("a peer, 100 %", words, tmp_path, user=user, memory="1G", **UNITS[kind])
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    ours = [line for line in done.stderr.splitlines() if unit.name in line]
    assert ours == []


@needs_systemd
@pytest.mark.parametrize("kind", UNITS)
def test_a_unit_is_confined(tmp_path: Path, kind: str) -> None:
    """By systemd's own measure, in which a unit without protection has 9.6 of 10."""
    unit = tmp_path / "gossamer-test.service"
    home = Path("/home/pi/garden")
    text = unit_text("a peer", ["join"], home, user="pi", memory="1G", **UNITS[kind])
    unit.write_text(text.replace('"join"', sys.executable))
    options = ["--offline=true", "--threshold=50", "--no-pager"]
    done = subprocess.run(
        ["systemd-analyze", "security", *options, str(unit)], capture_output=True, text=True
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot judge a file")
    assert done.returncode == 0, done.stdout + done.stderr
    of_unit = values(text)
    assert of_unit["PrivateTmp"] == "yes"
    folder = {"peer": home, "broker": "/srv/a b"}[kind]
    assert of_unit["ReadWritePaths"] == f'"{folder}"'


def test_signs_of_life_come_at_half_the_watchdogs_time(tmp_path: Path, run) -> None:
    async def scenario() -> list[bytes]:
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "20000"}
        task = asyncio.create_task(report_alive(environment))
        await turns(5)  # nobody takes the first message
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(tmp_path / "notify"))
            manager.setblocking(False)
            loop = asyncio.get_running_loop()
            messages = [await loop.sock_recv(manager, 99) for _ in range(3)]
            task.cancel()
            return messages

    assert run(scenario()) == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    run(report_alive({}))  # not started by systemd
