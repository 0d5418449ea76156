"""One swarm by two commands on one broker, as on two hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from gossamer.experiments.config.tables import ConfigError, load_config
from gossamer.experiments.live.hosts import HostPart
from gossamer.peer import Broker, BrokerAddress

pytestmark = pytest.mark.live

CONFIG = """
name = "two-hosts"
peers = 4
rounds = 4
test_every = 4
topology = "ring"

[data]
set = "digits"
samples = 40

[network]
layout = "64=12=10"

[[models]]
name = "global"
layout = "64-12-10"

[gossip]
per_process = 2
"""


def start(folder: Path, url: str, peers: str, config: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gossamer", "swarm", config, "--broker", url, "--peers", peers]
    command += ["--out", f"out-{peers}"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)


def test_two_commands_make_one_swarm(tmp_path):
    (tmp_path / "one.toml").write_text(CONFIG)
    (tmp_path / "other.toml").write_text(CONFIG.replace("rounds = 4", "rounds = 5"))
    with Broker(kind="nats") as broker:
        running = [start(tmp_path, broker.url, peers, "one.toml") for peers in ("0-1", "2-3")]
        ends = [process.communicate() for process in running]
        assert [process.returncode for process in running] == [0, 0], ends
    outcomes = {
        peers: json.loads((tmp_path / f"out-{peers}" / "outcome.json").read_text())
        for peers in ("0-1", "2-3")
    }
    assert sorted(outcomes["2-3"]["accuracy"]) == ["0", "1", "2", "3"]  # it has the last peer
    assert sorted(outcomes["0-1"]["accuracy"]) == ["0", "1"]
    assert outcomes["2-3"]["weight"]["global"] == [4.0, 4.0]
    assert not list((tmp_path / "out-2-3").glob("0.*"))  # its files stay on its own host


def test_another_config_on_another_host_is_refused_by_its_key(tmp_path):
    (tmp_path / "one.toml").write_text(CONFIG)
    (tmp_path / "other.toml").write_text(CONFIG.replace("samples = 40", "samples = 41"))
    with Broker(kind="nats") as broker:
        first = start(tmp_path, broker.url, "0-1", "one.toml")
        try:
            config = tmp_path / "out-0-1" / "config.json"
            # It is written after the host's record was published.
            wait_until(lambda: config.exists() or first.poll() is not None, "the first host runs")
            second = start(tmp_path, broker.url, "2-3", "other.toml")
            _, errors = second.communicate()
        finally:
            first.terminate()
            first.communicate()
    assert second.returncode == 2
    assert "key 'data.samples' is not the same here and on the host of peers 0-1" in errors


def test_peers_of_a_crashed_host_may_run_elsewhere(tmp_path):
    (tmp_path / "one.toml").write_text(CONFIG)
    config = load_config(tmp_path / "one.toml")
    with Broker(kind="nats") as broker:
        address = BrokerAddress(broker.url)
        crashed = subprocess.Popen(
            [sys.executable, "-c", STAY, str(tmp_path / "one.toml"), broker.url],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert crashed.stdout is not None
        assert crashed.stdout.readline() == "present\n"
        with pytest.raises(ConfigError, match="peer 1 runs on the host of peers 0-1 too"):
            HostPart(config, "two-hosts", address, [1, 2]).announce()
        crashed.kill()
        crashed.communicate()

        def is_free() -> bool:
            try:
                HostPart(config, "two-hosts", address, [1, 2]).announce()
            except ConfigError:
                return False
            return True

        wait_until(is_free, "the broker publishes the last will of the crashed host")


# A host that stays in its swarm until it is killed.
STAY = """
import asyncio, sys
from gossamer.experiments.config.tables import load_config
from gossamer.experiments.live.hosts import HostPart
from gossamer.peer import BrokerAddress

async def stay(part):
    async with part.keep_published():
        print("present", flush=True)
        await asyncio.Event().wait()

asyncio.run(stay(HostPart(load_config(sys.argv[1]), "two-hosts", BrokerAddress(sys.argv[2]), [0, 1])))
"""
