"""The commands of docs/secure-swarm.md, as they stand there: four devices with trust, TLS and passwords."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from waiting import wait_until

pytestmark = pytest.mark.live

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "secure-swarm.md").read_text("utf-8")
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]
STAY = ("gossamer broker", "gossamer join")
"""Commands that run until they are stopped."""


def start(command: str, folder: Path, number: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", *shlex.split(command)]
    # Wide: a table has one column more when a device is behind, and shortens the others to fit.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with (folder / f"{number}.log").open("wb") as log:
        return subprocess.Popen(
            words, cwd=folder, stdout=log, stderr=log, env=environment,
            # A shell's background ignores Ctrl-C, and what it starts inherits that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip


def rounds(folder: Path, name: str) -> int:
    """Return how many rounds a device has trained while all four counted."""
    try:
        lines = (folder / f"results/garden-{name}/{name}.jsonl").read_text().splitlines()
    except OSError:
        return 0
    records = (json.loads(line) for line in lines)
    return sum(record["members"].get("global") == [4, 4] for record in records)


def look_at_it(folder: Path, names: list[str]) -> None:
    """Run the line that `enrol` has printed for the owner, with `status` and with `watch`."""
    (line,) = re.findall(r"gossamer status .*", (folder / "0.log").read_text())
    status = start(line, folder, 7)
    assert status.wait() == 0, (folder / "7.log").read_text()
    text = (folder / "7.log").read_text()
    for name in names:
        (row,) = [each for each in text.splitlines() if each.strip().startswith(f"{name}@")]
        assert "member" in row
    watch = start(line.replace("gossamer status", "gossamer watch"), folder, 8)
    try:
        log = folder / "8.log"
        wait_until(lambda: "http://" in log.read_text(), "the page is served")
        (address,) = re.findall(r"http://\S+", log.read_text())
        with urlopen(address) as page:
            assert page.status == 200
    finally:
        watch.send_signal(signal.SIGINT)
        watch.wait()
    assert "Traceback" not in log.read_text()


def test_at_most_six_commands_make_a_secure_swarm_of_four(tmp_path):
    assert len(COMMANDS) <= 6
    with socket.socket() as probe:
        if probe.connect_ex(("localhost", 28883)) == 0:
            pytest.skip("something listens on the port of the page")
    shutil.copy(DOCS / "examples" / "my_device.py", tmp_path)
    running: list[subprocess.Popen[bytes]] = []
    names = [f"greenhouse-{number}" for number in range(1, 5)]
    try:
        for number, command in enumerate(COMMANDS):
            process = start(command, tmp_path, number)
            if not command.startswith(STAY):
                assert process.wait() == 0, (tmp_path / f"{number}.log").read_text()
                continue
            running.append(process)
            if command.startswith("gossamer broker"):
                log = tmp_path / f"{number}.log"
                wait_until(lambda log=log: "mqtts://localhost:28883" in log.read_text())
        wait_until(lambda: all(rounds(tmp_path, name) >= 3 for name in names), "four devices learn")
        look_at_it(tmp_path, names)
        twice = start(COMMANDS[2] + " --out elsewhere", tmp_path, 9)
        assert twice.wait() == 2
        last = (tmp_path / "9.log").read_text().splitlines()[-1]
        assert "the name is already online" in last
        assert "give each device an enrolment of its own" in last
        for process in running[1:]:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait() for process in running[1:]]
    finally:
        for process in running:
            process.terminate()
            process.wait()
    assert codes == [0, 0, 0, 0]
    reports = [
        json.loads((tmp_path / f"results/garden-{name}/{name}.report.json").read_text())
        for name in names
    ]
    assert {report["ended"] for report in reports} == {"left"}
    weights = [report["weight"]["global"] for report in reports]
    assert sum(held + moving for held, moving, _ in weights) == sum(own for *_, own in weights)
