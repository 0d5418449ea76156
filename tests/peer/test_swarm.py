"""A swarm of processes: what is restarted, what is not, and that it always ends.

Most tests put a few lines of shell in the place of the peers' Python: only the supervisor is under test.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from peer_kit import quick
from waiting import until

from gossamer.gossip import ONE
from gossamer.peer.exits import PeerError
from gossamer.peer.process import PeerSpec
from gossamer.peer.spec import BrokerAddress
from gossamer.peer.swarm import LocalSwarm, SwarmSpec

HERE = Path(__file__).parent


@pytest.fixture
def spec(tmp_path, empty_broker):
    """Three peers in two processes."""
    names, swarm = ("a", "b", "c"), "nest"
    peers = [
        PeerSpec(
            name,
            "learner_kit:make_learner",
            {"name": name},
            quick(swarm=swarm, expect=names, founder=True, leave_timeout=0.2),
        )
        for name in names
    ]
    address = BrokerAddress(empty_broker.url)
    return SwarmSpec(swarm, address, tmp_path / "run", peers, per_process=2, restarts=2)


@pytest.fixture
def pretend(tmp_path):
    """Make a shell script for processes to run; $3 is their spec file, $count how often it ran."""

    def put(script: str) -> str:
        file = tmp_path / "python"
        head = '#!/bin/sh\necho x >> "$3.count"\ncount=$(wc -l < "$3.count")\n'
        file.write_text(head + script)
        file.chmod(0o755)
        return str(file)

    return put


def counts(spec) -> list[int]:
    return [
        len((spec.folder / f"host-{index}.json.count").read_text().splitlines()) for index in (0, 1)
    ]


@pytest.mark.live
@pytest.mark.timeout(600)  # torch is loaded twice, on whatever machine this is
def test_peers_in_processes_learn_to_the_end_and_are_watched(spec, monkeypatch):
    monkeypatch.chdir(HERE)
    records = []
    limits = {"start_timeout": 300.0, "leave_timeout": 120.0}
    patient = [replace(p, settings=p.settings.updated(**limits)) for p in spec.peers]
    asyncio.run(LocalSwarm(replace(spec, peers=patient), on_record=records.append).run())
    assert {record["peer"] for record in records} <= {"a", "b", "c"}
    reports = [json.loads((spec.folder / f"{name}.report.json").read_text()) for name in "abc"]
    assert [report["rounds"] for report in reports] == [6, 6, 6]
    assert sum(sum(report["weight"]["global"][:2]) for report in reports) == 3 * ONE
    log = (spec.folder / "host-0.log").read_text()
    assert log.count(f"left swarm {spec.swarm}: its training is over") == 2
    assert log.count("peer c is online") == 2  # once for each peer of this process


@pytest.mark.parametrize("log_json", [False, True])
def test_logs_are_json_if_that_is_wanted(run, spec, pretend, log_json):
    python = pretend('echo "$@" >&2\n')
    run(LocalSwarm(replace(spec, log_json=log_json), python=python).run())
    options = (spec.folder / "host-1.log").read_text().split()
    assert ("--log-json" in options) is log_json


def test_a_crashed_process_is_restarted_alone(run, spec, pretend):
    python = pretend('case "$3.$count" in *host-0.json.1) echo "KeyError: oh" >&2; exit 1;; esac\n')
    events = []
    run(LocalSwarm(spec, on_event=events.append, python=python, restart_pause=0.0).run())
    assert events == [
        "peer a, b crashed (exit code 1): KeyError: oh; it is restarted from its checkpoint"
    ]
    assert counts(spec) == [2, 1]


def test_who_crashes_too_often_ends_the_swarm(run, spec, pretend):
    python = pretend(
        'case "$3" in *host-0*) '
        'while [ ! -e "${3%0.json}1.json.count" ]; do sleep 0.02; done; exit 3;; esac\n'
        "exec sleep 600\n"
    )
    with pytest.raises(PeerError, match=r"peer a, b crashed 3 times; see .*host-0\.log"):
        run(LocalSwarm(spec, python=python, restart_pause=0.0).run())
    assert counts(spec) == [3, 1]


def test_who_cannot_take_part_ends_the_swarm_with_its_own_words(run, spec, pretend):
    python = pretend(
        'case "$3" in *host-1*) echo "error: peer c: no" >&2; exit 2;; esac\nexec sleep 600\n'
    )
    swarm = LocalSwarm(spec, python=python)
    with pytest.raises(PeerError, match=r"^peer c: no$"):
        run(swarm.run())
    assert swarm.pids == {}


def test_a_process_with_restarts_disabled_stays_dead(run, spec, pretend):
    python = pretend('case "$3" in *host-1*) exec sleep 600;; esac\n')
    events = []

    async def scenario():
        swarm = LocalSwarm(spec, on_event=events.append, python=python)
        task = asyncio.create_task(swarm.run())
        await until(lambda: "c" in swarm.pids and "a" not in swarm.pids)
        swarm.disable_restart("c")
        os.kill(swarm.pids["c"], signal.SIGKILL)
        await task

    run(scenario())
    assert events == ["peer c was killed by signal 9; it is not restarted"]


def test_a_process_that_cannot_be_started_ends_the_swarm_in_one_line(run, spec, tmp_path):
    with pytest.raises(
        PeerError, match=r"host-\d\.json cannot be started: No such file or directory"
    ):
        run(LocalSwarm(spec, python=str(tmp_path / "python")).run())


def test_stop_ends_all_and_restarts_none(run, spec, pretend):
    python = pretend("exec sleep 600\n")

    async def scenario():
        swarm = LocalSwarm(spec, python=python)
        task = asyncio.create_task(swarm.run())
        files = [spec.folder / f"host-{index}.json.count" for index in (0, 1)]
        begun = lambda: all(file.exists() and file.stat().st_size for file in files)  # noqa: E731
        await until(lambda: len(swarm.pids) == 3 and begun())
        swarm.stop()
        await task
        return swarm.pids

    assert run(scenario()) == {}
    assert counts(spec) == [1, 1]


def test_stop_waits_for_no_restart(run, spec, pretend):
    python = pretend('case "$3" in *host-0*) exit 1;; esac\nexec sleep 600\n')
    crashed = asyncio.Event()

    async def scenario():
        swarm = LocalSwarm(spec, on_event=lambda _: crashed.set(), python=python, restart_pause=9e9)
        task = asyncio.create_task(swarm.run())
        await crashed.wait()
        await until(lambda: "c" in swarm.pids)
        swarm.stop()
        await task

    run(scenario())
    assert (spec.folder / "host-0.json.count").read_text() == "x\n"


def test_who_does_not_leave_in_time_is_killed(run, spec, pretend):
    python = pretend('trap "" TERM\ntouch "$3.deaf"\nwhile true; do sleep 0.05; done\n')
    events = []

    async def scenario():
        swarm = LocalSwarm(spec, on_event=events.append, python=python, stop_grace=0.1)
        task = asyncio.create_task(swarm.run())
        files = [spec.folder / f"host-{index}.json.deaf" for index in (0, 1)]
        await until(lambda: all(file.exists() for file in files))
        swarm.stop()
        await task

    run(scenario())
    assert sorted(events) == [
        "peer a, b did not leave within 0.3 s; it is killed",
        "peer c did not leave within 0.3 s; it is killed",
    ]
