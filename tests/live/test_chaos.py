"""Real processes, real brokers, and everything that goes wrong at once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import pytest
from proxy import FaultyProxy
from swarm_kit import Watched, small_config, small_swarm
from waiting import let_run

from gossamer.experiments.live.run import collect
from gossamer.gossip import ONE
from gossamer.peer import Broker, load_checkpoint

pytestmark = pytest.mark.live


async def frozen(pid: int, seconds: float) -> None:
    """Freeze a process for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.to_thread(let_run, seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


async def chaos(
    broker: Broker,
    folder: Path,
    peers: int,
    rounds: int,
    *,
    killed: list[str],
    dead: str,
    pause: float,
) -> tuple[Watched, FaultyProxy, object]:
    """Run a swarm through a bad link; kill, pause and cut off as it goes."""
    config = small_config(peers, rounds, mode="async")
    names = [str(index) for index in range(peers)]
    async with FaultyProxy(broker.port, drop=0.1, duplicate=0.1, seed=11) as proxy:
        # Long limits: a slow machine must not look like a lost peer. Only the dead one is waited for.
        spec = small_swarm(
            config, folder, proxy.url,
            lease=90.0, start_timeout=300.0, settle_timeout=1000.0, settle_tolerance=1e-3,
        )  # fmt: skip
        watched = Watched(spec)
        task = asyncio.create_task(watched.run())
        others = [name for name in names if name != dead]
        try:
            await watched.reached(3, *names)
            for name in killed:
                os.kill(watched.swarm.pids[name], signal.SIGKILL)
            watched.swarm.disable_restart(dead)
            os.kill(watched.swarm.pids[dead], signal.SIGKILL)
            paused = next(name for name in others if name not in killed)
            freeze = asyncio.create_task(frozen(watched.swarm.pids[paused], pause))
            await watched.reached(6, *(name for name in others if name not in (paused, *killed)))
            await asyncio.to_thread(broker.restart)
            await freeze
            await watched.returned(*killed)
            await watched.reached(10, *others)
            await asyncio.to_thread(broker.restart)
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return watched, proxy, collect(config, spec, watched.events)


def check(folder: Path, watched: Watched, proxy: FaultyProxy, outcome, peers, killed, dead) -> None:
    survivors = [str(index) for index in range(peers) if str(index) != dead]
    assert proxy.counters["drop"]
    assert proxy.counters["duplicate"]
    assert sorted(outcome.accuracy, key=int) == survivors
    assert watched.swarm.pids == {}  # every process has ended
    assert outcome.consensus["global"] < 1e-2

    # Counted as its last checkpoint has it, the dead one loses nothing. What was between it and the
    # others when it died may count twice: it had arrived, and its sender never learnt of it.
    tree = load_checkpoint(folder / f"{dead}.checkpoint")
    assert tree is not None
    vault, ledger = tree["gossip"]["vault"], tree["gossip"]["ledger"]
    held = vault["weights"]["global"] - vault["debts"].get("global", 0)
    sent = sum(row[4] for row in ledger["open"])
    reports = [json.loads((folder / f"{n}.report.json").read_text()) for n in survivors]
    taken_back = sum(row[4] for report in reports for row in report["reclaimed"] if row[0] == dead)
    total = sum(sum(report["weight"]["global"][:2]) for report in reports) + held + sent
    assert all(report["weight"]["global"][2] == ONE for report in reports)
    assert 0 <= total - peers * ONE <= sent + taken_back

    # Every loss is in the log, with its cause: of packets, of connections, of the dead one.
    logs = {n: (folder / f"host-{n}.log").read_text() for n in survivors}
    for name, report in zip(survivors, reports, strict=True):
        (counted,) = re.findall(rf"peer {name}: counters of this session: (.*)", logs[name])
        losses = {**report["dropped"], **report["transport"]}
        assert sorted(counted.split(", ")) == sorted(f"{c} {n}" for c, n in losses.items())
        assert "trying again" in logs[name]  # the broker's absence
        # The notice is lost where the broker restarted before it was read: then the lease decides.
        declared = rf"peer {dead} was declared dead by its supervisor: was killed by signal 9"
        given_up = rf"peer {dead} is given up: no status for \d+ s, its lease is 90 s"
        assert re.search(f"{declared}|{given_up}", logs[name]) or name in killed
    log = "".join(logs.values())
    for name in killed:  # of the dead one the supervisor's notice may be there before its last will
        assert f"peer {name} is offline: " in log
    assert "Traceback" not in log

    # Nobody was stuck, or went by a time limit: they agreed, said goodbye and were gone.
    for name in survivors:
        assert f"peer {name} left swarm small: its training is over\n" in logs[name]
    for limit in ("stopped settling", "stops waiting", "did not accept its goodbye", "is killed"):
        assert limit not in log
    assert sum(
        "was killed by signal 9; it is restarted" in event for event in watched.events
    ) == len(killed)
    assert any(
        f"peer {dead} was killed" in event and "not restarted" in event for event in watched.events
    )

    # Memory stays where it was once training has begun.
    assert {key.split("/")[0] for key in watched.memory} >= set(survivors)
    for samples in watched.memory.values():
        if len(samples) > 20:
            early = max(samples[: len(samples) // 2])
            assert max(samples[len(samples) // 2 :]) < 1.2 * early + 32e6


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("kind", "peers", "killed", "dead", "pause"),
    [("mosquitto", 8, ["3", "6"], "5", 10.0), ("nats", 4, ["2"], "3", 3.0)],
)
def test_processes_survive_everything(
    tmp_path, mosquitto_required, kind, peers, killed, dead, pause
):
    if kind == "mosquitto":
        mosquitto_required()
    with Broker(kind=kind) as broker:
        result = asyncio.run(
            chaos(broker, tmp_path, peers, 40, killed=killed, dead=dead, pause=pause)
        )
    check(tmp_path, *result, peers, killed, dead)
