"""Benchmarks measure what they say: both sides of a comparison do the same work, and make no fuss."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import parameters_to_vector

from gossamer.experiments.arena import Arena, peak_memory
from gossamer.experiments.bench import (
    Row,
    in_own_process,
    median_seconds,
    models,
    run_benchmarks,
)
from gossamer.experiments.bench.arena import (
    SwarmCost,
    TorchLoop,
    Workload,
    averaging,
    draw,
    measure,
    most_peers,
    rounds,
    share_of_peak,
)
from gossamer.experiments.bench.device import MeasuredProcess
from gossamer.experiments.bench.gossip import codec, steady
from gossamer.experiments.bench.live import (
    READY,
    VALUE_BYTES,
    Gates,
    Traffic,
    anonymous_rss,
    compare,
    report_done,
    wait_for_trial,
)
from gossamer.experiments.bench.models import prepare
from gossamer.experiments.bench.peers import own_times, peers, run_simulator
from gossamer.experiments.config.tables import ConfigError
from gossamer.experiments.results import Results
from gossamer.models import mlp
from gossamer.peer import Broker


def ticking(steps: list[float]) -> Iterator[float]:
    now = 0.0
    for step in steps:
        yield now
        now += step
        yield now


def test_medians_come_from_alternating_runs() -> None:
    calls: list[str] = []
    clock = ticking([5.0, 1.0, 7.0, 3.0, 6.0, 2.0])  # work, baseline, work, baseline, …
    mine, plain = median_seconds(
        lambda: calls.append("work"),
        lambda: calls.append("base"),
        repeats=3,
        clock=lambda: next(clock),
    )
    assert (mine, plain) == (6.0, 2.0)
    assert calls == ["work", "base"] * 4  # the first pair warms up


def test_no_repetitions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        median_seconds(lambda: None, lambda: None, repeats=0)


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_claim_is_met_on_the_right_side(ratio: float, wanted: float) -> None:
    least = Row("x", "s", ratio, 1.0, wanted)
    most = Row("x", "s", ratio, 1.0, wanted, "at most")
    assert least.met == (ratio >= wanted)
    assert most.met == (ratio <= wanted)
    assert Row("x", "s", 2.0, 8.0, speedup=True).ratio == 4.0


def test_without_a_claim_or_a_figure_nothing_is_met() -> None:
    assert Row("x", "s", 1.0, 1.0).met is None
    assert Row("x", "s", wanted=0.7, note="no broker").met is None


def test_rows_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path / "deep", "bench", exact=True)
    rows = [Row("good", "s", 2.0, 1.0, 1.5), Row("bad", "s", 1.0, 1.0, 1.5)]
    known = {"two": lambda: rows, "other": lambda: pytest.fail("it was not asked for")}
    assert run_benchmarks(["two"], results, known) == rows
    written = json.loads((tmp_path / "deep" / "bench.json").read_text("utf-8"))
    told = [(row["name"], row["ratio"], row["met"]) for row in written["rows"]]
    assert told == [("good", 2.0, True), ("bad", 1.0, False)]
    shown = capsys.readouterr().out
    assert "good" in shown
    assert "NO" in shown


def test_an_unknown_benchmark_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'speed'; there are codec"):
        run_benchmarks(["speed"], Results(tmp_path, "bench"), {"codec": codec})
    assert list(tmp_path.iterdir()) == []


def test_the_codec_is_measured() -> None:
    absolute, relative = codec()
    assert absolute.measured == relative.measured == absolute.ratio
    assert relative.ratio is not None
    assert relative.ratio > 0


def test_a_gate_holds_until_it_is_opened(tmp_path: Path) -> None:
    gates = Gates(tmp_path, "side", 1, ["a"], lambda: None)
    passed = threading.Event()

    def member() -> None:
        report_done(tmp_path, "side", READY, "a")
        wait_for_trial(tmp_path, "side", 0)
        passed.set()
        report_done(tmp_path, "side", 0, "a")

    thread = threading.Thread(target=member)
    thread.start()
    gates.ready(30)
    assert not passed.is_set()
    trial = gates.run(0, 30)
    thread.join()
    assert passed.is_set()
    assert trial.seconds > 0
    assert trial.processor_seconds >= 0


def test_clients_that_have_not_finished_are_counted(tmp_path: Path) -> None:
    gates = Gates(tmp_path, "side", 1, ["a", "b"], lambda: None)
    report_done(tmp_path, "side", READY, "a")
    with pytest.raises(TimeoutError, match="1 of 2"):
        gates.ready(0.05)


def test_a_dead_process_ends_the_wait(tmp_path: Path) -> None:
    def check_alive() -> None:
        raise RuntimeError("it died")

    gates = Gates(tmp_path, "side", 1, ["a"], check_alive)
    with pytest.raises(RuntimeError, match="it died"):
        gates.ready(30)


def test_traffic_is_counted_once_per_receiver() -> None:
    traffic = Traffic(peers=16, exchanges=3)
    assert traffic.neighbours(0) == ("p1", "p2", "p14", "p15")
    assert traffic.messages == 12
    assert traffic.trial_bytes == 16 * 12 * VALUE_BYTES
    assert all(f"p{i}" not in traffic.neighbours(i) for i in range(16))
    for i, j in ((0, 15), (3, 5)):
        assert (f"p{j}" in traffic.neighbours(i)) == (f"p{i}" in traffic.neighbours(j))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_peak_memory_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    with mmap(-1, 512 << 20, flags=MAP_PRIVATE | MAP_ANONYMOUS) as block:
        for page in range(0, len(block), 4096):
            block[page] = 1
        assert peak_memory() > 512 << 20
        assert in_own_process(peak_memory) < 512 << 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_resident_memory_sees_an_array() -> None:
    before = anonymous_rss(os.getpid())
    # Fresh pages: an allocator may give out what it kept.
    with mmap(-1, 32 << 20, flags=MAP_PRIVATE | MAP_ANONYMOUS) as block:
        for page in range(0, len(block), 4096):
            block[page] = 1
        assert anonymous_rss(os.getpid()) - before > 24 << 20


def test_the_bare_client_needs_nothing_heavy() -> None:
    code = f"import sys, {compare.__module__}; print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"


@pytest.mark.live
@pytest.mark.timeout(600)
def test_peers_and_bare_clients_run_alternately_on_one_broker() -> None:
    peers, bare = compare(Traffic(peers=4, per_process=4, exchanges=1, trials=2))
    assert len(peers) == len(bare) == 2
    for trial in (*peers, *bare):
        assert trial.seconds > 0
        assert trial.processor_seconds > 0


# A parent in the background may have told its children to ignore Ctrl-C: undo that first.
PROGRAM = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    f"runpy.run_module('{Gates.__module__}', run_name='__main__')"
)


@pytest.fixture
def broker():
    with Broker(kind="nats") as broker:
        yield broker


@pytest.mark.parametrize("how", ["interrupted", "without a broker"])
def test_bare_clients_end_quietly(tmp_path, broker, how):
    names = ("a", "b")
    gates = Gates(tmp_path, "bare", 1, names, lambda: None)
    spec = {
        "folder": str(tmp_path), "port": broker.port, "clients": {"a": ["b"], "b": ["a"]},
        "messages": 1, "bytes": 10, "trials": 1,
    }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "spec.json")],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        gates.ready(100.0)
        if how == "interrupted":
            process.send_signal(signal.SIGINT)
        else:
            broker.stop()
        gates.open(0)
        _, said = process.communicate()
    finally:
        process.kill()
    if how == "interrupted":
        assert (process.returncode, said) == (130, "")
    else:
        assert process.returncode == 1
        assert "bare client: " in said
        # What aiomqtt's own futures say as they are collected is not ours to silence.
        assert "Task exception was never retrieved" not in said


torch.set_num_threads(1)


def test_what_is_timed() -> None:
    work = prepare(widths=(8, 16), blocks=1)
    # Less than 0.8 of the values: a weight is shared only if the cells at both ends are.
    assert 0.5 * work.value_count < work.shared_count < 0.8 * work.value_count
    work.exchange()
    work.step()


def test_the_ratio_is_of_the_exchange_to_the_step() -> None:
    small = prepare(widths=(4,), blocks=1)
    threads: list[int] = []

    def alternate(exchange: object, step: object, *, repeats: int) -> tuple[float, float]:
        assert (exchange, step) == (small.exchange, small.step)
        threads.append(torch.get_num_threads())
        return 0.02, 1.0

    (row,) = models.networks(lambda: small, alternate)
    assert (row.ratio, row.met, threads) == (0.02, True, [1])


torch.set_num_threads(1)

# A batch of all samples has no order that could differ.
WORKLOAD = Workload("tiny", "6=8=4", 8, 12, 1, "sum", 50, "mean", 12, 1.0)


@pytest.mark.parametrize("mixing", ["mean", "plain", "push-sum"])
@pytest.mark.parametrize("level", [50, 100])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_loop_computes_what_the_arena_computes(
    mixing: Literal["mean", "plain", "push-sum"], level: int, reduction: Literal["sum", "mean"]
) -> None:
    workload = replace(WORKLOAD, mixing=mixing, level=level, reduction=reduction)
    data = workload.data()
    learners = workload.learners(data)
    loop = TorchLoop(workload, data, [learner.network for learner in learners])
    arena = Arena(learners, mixing=workload.mix())
    for _ in range(3):
        arena.train()
        arena.average()
        loop.round()
    for learner, module in zip(learners, loop.modules, strict=True):
        plain = parameters_to_vector(module.parameters()).detach()
        torch.testing.assert_close(learner.network.flat, plain, rtol=0, atol=1e-5)


def test_a_row_has_both_figures() -> None:
    before = torch.get_num_threads()
    row = rounds(WORKLOAD, repeats=1)
    assert row.ratio is not None
    assert row.measured is not None
    assert row.baseline is not None
    assert row.ratio == pytest.approx(row.baseline / row.measured)
    assert torch.get_num_threads() == before


def test_a_round_is_compared_with_the_peak_of_the_machine() -> None:
    row = share_of_peak(WORKLOAD, repeats=1)
    assert WORKLOAD.flops == 8 * 12 * (4 * 6 * 8 + 6 * 8 * 4)
    assert WORKLOAD.bytes == 4 * 8 * (4 * (7 * 8 + 9 * 4) + 12 * 6)
    assert row.ratio is not None
    assert 0 < row.ratio < 1  # products of a few cells are far from the peak
    assert re.search(r"shapes alone reach \d\.\d\d of it; the 14\.1 kB", row.note)


def test_a_swarm_too_large_for_the_memory_is_skipped_with_the_reason() -> None:
    (row,) = most_peers(10**9)
    assert row.measured is None
    assert row.note.startswith("skipped: needs 80 TB of free memory, there are ")


def test_simulators_without_an_environment_are_skipped_with_the_remedy() -> None:
    rows = peers()
    assert len(rows) == 18, "three works, on one thread and on two, against three simulators"
    assert {row.measured for row in rows} == {None}
    assert rows[0].note == (
        "skipped: no environment given (--pfl); pfl-research: pip install 'pfl[pytorch]'"
    )


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        (
            Path("/nowhere/python"),
            r"/nowhere/python does not run \(No such file or directory\); give",
        ),
        (
            Path(sys.executable),
            r"pfl failed \(ModuleNotFoundError: No module named 'pfl'\); pfl-res",
        ),
    ],
)
def test_a_simulator_that_does_not_run_says_why(python: Path, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        run_simulator("pfl", python, WORKLOAD)


def test_the_peak_is_printed_beside_the_ratio(tmp_path: Path) -> None:
    simulator = tmp_path / "python"
    simulator.write_text('#!/bin/sh\necho \'{"wall": 1e6, "cpu": 1e6}\'\n', encoding="utf-8")
    simulator.chmod(0o700)
    rows = peers({"pfl": simulator}, [WORKLOAD])
    measured = [row for row in rows if row.measured is not None]
    assert [row.name for row in measured] == [
        "tiny, 1 thread, against pfl",
        "tiny, 2 threads, against pfl",
    ]
    for row in measured:
        assert row.ratio is not None
        assert row.ratio > 1
        # A round of few operations that takes 10⁶ seconds is nothing beside the peak.
        assert re.fullmatch(
            r"baseline: pfl, the fastest of them; 0\.\d\d of the machine's peak, the baseline 0\.00",
            row.note,
        )


def test_an_arena_is_timed_on_one_thread() -> None:
    wall, processor = own_times(WORKLOAD)
    assert wall > 0 < processor
    assert torch.get_num_threads() == 1


def test_averaging_alone_is_measured() -> None:
    row = averaging(peers=6, repeats=1)
    assert row.ratio is not None
    assert row.ratio > 0
    assert "6×208,328" in row.note  # the coordinates of level 80


def test_one_size_is_measured(tmp_path: Path) -> None:
    size = measure("small", 8, rounds=1)
    assert size.peers == 8
    assert size.round > size.average > 0
    assert size.peak > size.needs > 0
    text = str(size)
    assert text.startswith("8 peers of 64=32=10")
    assert "peak" in text


def test_growth_is_drawn_from_the_file(tmp_path: Path) -> None:
    sizes = [
        SwarmCost(kind, peers, 1.0, 1e-3 * peers, 1e-4 * peers, 10**8 + 10**5 * peers, 10**6, 0.5)
        for kind in ("small", "large")
        for peers in (16, 256, 1000)
    ]
    lines = [json.dumps(asdict(size)) for size in sizes]
    (tmp_path / "sizes.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    files = draw(tmp_path)
    assert {file.name for file in files} == {"growth.png", "growth.svg"}
    assert "10,000 peers" not in (tmp_path / "growth.svg").read_text("utf-8")


def test_deciding_is_measured_while_changes_are_compared_and_while_nothing_is() -> None:
    tiny = models.Workload("tiny", lambda: mlp("6=5=10"), (6,))
    rows = models.auto([tiny], peers=4, local_samples=40, rounds=1)
    assert [row.name.split(",")[:2] for row in rows] == [
        ["auto", " quiet"], ["arena", " quiet"], ["auto", " deciding"], ["arena", " deciding"]
    ]  # fmt: skip
    assert [row.wanted for row in rows] == [0.1, None, 0.35, None]
    plans = {}
    for name, options in (("quiet", models.QUIET), ("deciding", models.DECIDING)):
        swarm = models.OneByOne(tiny.learners(4, 40), options)
        for _ in range(models.WARM_UP):
            swarm.round()
        plans[name] = swarm.plan
    assert not plans["quiet"].deciding
    assert plans["deciding"].candidates


def test_scoring_is_timed_against_a_round_of_training() -> None:
    (row,) = steady(("64=8=10",), repeats=1)
    assert row.name == "following 4 values in steady mode, 64=8=10"
    assert row.ratio is not None
    assert row.wanted == 0.25


def test_a_process_that_fails_before_it_is_ready_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"ended with exit code 1\nno such broker$"):
        MeasuredProcess([sys.executable, "-c", "raise SystemExit('no such broker')"], lambda: False)


def test_a_process_that_ends_while_it_is_measured_is_not_idle(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"import os, pathlib; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); input()"
    process = MeasuredProcess(
        [sys.executable, "-c", code], lambda: file.exists() and file.read_text() != ""
    )
    assert process.load(1e-6) >= 0
    pid = int(file.read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RuntimeError, match="ended with exit code -9"):
        process.load(1e-6)
    process.kill()
