from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.experiments.bench import Row, alternate, run_benchmarks
from gossamer.experiments.bench.bare import READY, Gates, say_through, wait_for_turn
from gossamer.experiments.bench.live import VALUE_BYTES, Traffic, compare, rss
from gossamer.experiments.bench.wire import codec
from gossamer.experiments.config.tables import ConfigError
from gossamer.experiments.results import Results


def ticking(steps: list[float]) -> Iterator[float]:
    now = 0.0
    for step in steps:
        yield now
        now += step
        yield now


def test_medians_come_from_alternating_runs() -> None:
    calls: list[str] = []
    clock = ticking([5.0, 1.0, 7.0, 3.0, 6.0, 2.0])  # work, baseline, work, baseline, …
    mine, plain = alternate(
        lambda: calls.append("work"),
        lambda: calls.append("base"),
        repeats=3,
        clock=lambda: next(clock),
    )
    assert (mine, plain) == (6.0, 2.0)
    assert calls == ["work", "base"] * 4  # the first pair warms up


def test_no_repetitions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        alternate(lambda: None, lambda: None, repeats=0)


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_claim_is_met_on_the_right_side(ratio: float, wanted: float) -> None:
    least = Row("x", "s", 1.0, 1.0, ratio, wanted)
    most = Row("x", "s", 1.0, 1.0, ratio, wanted, "at most")
    assert least.met == (ratio >= wanted)
    assert most.met == (ratio <= wanted)


def test_without_a_claim_or_a_figure_nothing_is_met() -> None:
    assert Row("x", "s", 1.0, 1.0, 1.0).met is None
    assert Row("x", "s", None, None, None, 0.7, note="no broker").met is None


def test_rows_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path / "deep", "bench", exact=True)
    rows = [Row("good", "s", 2.0, 1.0, 2.0, 1.5), Row("bad", "s", 1.0, 1.0, 1.0, 1.5)]
    known = {"two": lambda: rows, "other": lambda: pytest.fail("it was not asked for")}
    assert run_benchmarks(["two"], results, known) == rows
    written = json.loads((tmp_path / "deep" / "bench.json").read_text("utf-8"))
    assert [(row["name"], row["met"]) for row in written["rows"]] == [
        ("good", True),
        ("bad", False),
    ]
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
        say_through(tmp_path, "side", READY, "a")
        wait_for_turn(tmp_path, "side", 0)
        passed.set()
        say_through(tmp_path, "side", 0, "a")

    thread = threading.Thread(target=member)
    thread.start()
    gates.ready(30)
    assert not passed.is_set()
    seconds, processor = gates.run(0, 30)
    thread.join()
    assert passed.is_set()
    assert seconds > 0
    assert processor >= 0


def test_who_is_not_through_is_counted(tmp_path: Path) -> None:
    gates = Gates(tmp_path, "side", 1, ["a", "b"], lambda: None)
    say_through(tmp_path, "side", READY, "a")
    with pytest.raises(TimeoutError, match="1 of 2"):
        gates.ready(0.05)


def test_a_dead_process_ends_the_wait(tmp_path: Path) -> None:
    def alive() -> None:
        raise RuntimeError("it died")

    gates = Gates(tmp_path, "side", 1, ["a"], alive)
    with pytest.raises(RuntimeError, match="it died"):
        gates.ready(30)


def test_traffic_is_counted_once_per_receiver() -> None:
    traffic = Traffic(peers=16, exchanges=3)
    assert traffic.neighbours(0) == ("p1", "p2", "p14", "p15")
    assert traffic.messages == 12
    assert traffic.turn_bytes == 16 * 12 * VALUE_BYTES
    assert all(f"p{i}" not in traffic.neighbours(i) for i in range(16))
    for i, j in ((0, 15), (3, 5)):
        assert (f"p{j}" in traffic.neighbours(i)) == (f"p{i}" in traffic.neighbours(j))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_resident_memory_sees_an_array() -> None:
    before = rss(os.getpid())
    # Fresh pages: an allocator may give out what it kept.
    with mmap(-1, 32 << 20, flags=MAP_PRIVATE | MAP_ANONYMOUS) as block:
        for page in range(0, len(block), 4096):
            block[page] = 1
        assert rss(os.getpid()) - before > 24 << 20


def test_the_bare_client_needs_nothing_heavy() -> None:
    folder = Path(sys.modules[codec.__module__].__file__ or "").parent
    code = "import sys; sys.path.insert(0, sys.argv[1]); import bare; print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"


@pytest.mark.timeout(600)
def test_peers_and_bare_clients_take_turns_on_one_broker() -> None:
    peers, bare = compare(Traffic(peers=4, per_process=4, exchanges=1, turns=2))
    assert len(peers) == len(bare) == 2
    for turn in (*peers, *bare):
        assert turn.seconds > 0
        assert turn.processor_seconds > 0
