"""The runner of all studies: what is finished is kept, and an interruption costs nothing."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gossamer.experiments.errors import ConfigError, Stopped
from gossamer.experiments.results import Record, Results, find_run, read_records
from gossamer.experiments.study import (
    Failure,
    Frame,
    Job,
    Runs,
    Study,
    StudyCell,
    Workers,
    as_text,
    frame_of,
    run_study,
)

HERE = Workers(count=1)


@dataclass(frozen=True)
class Cell(StudyCell):
    x: int

    @property
    def key(self) -> str:  # legible
        return f"{self.line}-{self.x}"


CELLS = [Cell(line, x) for line in ("slow", "fast") for x in (1, 2, 3)]


def square(cells: list[Cell], job: Job) -> list[Record]:
    return [{"key": cell.key, "line": cell.line, "square": cell.x**2} for cell in cells]


def table(records: Sequence[Record]) -> dict[str, Frame]:
    return {"summary": as_text(frame_of(records)[["line", "square"]], {"square": ".1f"})}


def figure(folder: Path, records: Sequence[Record]) -> list[Path]:
    (folder / "figure.txt").write_text(f"{len(records)} runs")
    return [folder / "figure.txt"]


def key_of(result: Record | Failure) -> str:
    assert not isinstance(result, Failure)
    return result["key"]


STUDY = Study("tiny", CELLS, square, table, figure, json_files={"study.json": {"name": "tiny"}})


def results(path: Path) -> Results:
    return Results(path, "paper tiny")


def keys(path: Path) -> list[str]:
    return [record["key"] for record in read_records(find_run(path) / "runs.jsonl")]


def counting(ran: list[str], stop_at: str = "") -> Callable[[list[Cell], Job], list[Record]]:
    """Runs cells in this process and says which; Ctrl-C comes in the midst of one."""

    def run(cells: list[Cell], job: Job) -> list[Record]:
        ran.extend(cell.key for cell in cells)
        if any(cell.key == stop_at for cell in cells):
            raise KeyboardInterrupt
        return square(cells, job)

    return run


def test_tables_figures_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, files = run_study(STUDY, results(tmp_path), on="local:1")
    assert [record["square"] for record in records] == [1, 4, 9] * 2
    assert [file.name for file in files] == ["summary.csv", "figure.txt"]
    with (tmp_path / "latest" / "summary.csv").open(newline="") as file:
        assert list(csv.reader(file))[:2] == [["line", "square"], ["slow", "1.0"]]
    assert (tmp_path / "latest" / "study.json").exists()
    shown = capsys.readouterr()
    assert "9.0" in shown.out
    assert "figure.txt" in shown.out
    assert "6/6" in shown.err


def test_finished_runs_are_copied_and_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    study = replace(STUDY, run=counting(ran))
    first, _ = run_study(replace(study, cells=CELLS[:4]), results(tmp_path), on="local:1")
    again, _ = run_study(study, results(tmp_path), on="local:1")
    assert ran == [cell.key for cell in CELLS]
    assert again[:4] == first
    assert f"4 of 6 runs are copied from {tmp_path / '001'}" in capsys.readouterr().err
    assert sorted(keys(tmp_path)) == sorted(cell.key for cell in CELLS)
    run_study(study, Results(tmp_path, "paper tiny", force=True), on="local:1")
    assert len(ran) == 12


def test_live_runs_take_turns_here_and_are_never_copied(tmp_path: Path) -> None:
    ran: list[str] = []
    study = replace(STUDY, run=counting(ran), live=True)
    for _ in range(2):
        run_study(study, results(tmp_path), on="local:4")
    assert ran == [cell.key for cell in CELLS] * 2


def test_interrupted_it_says_what_is_kept_and_goes_on_from_there(tmp_path: Path) -> None:
    ran: list[str] = []
    with pytest.raises(
        Stopped, match=r"3 of 6 runs are saved in .*001; the same command runs the rest"
    ):
        run_study(replace(STUDY, run=counting(ran, "fast-1")), results(tmp_path), on="local:1")
    assert (tmp_path / "latest" / "figure.txt").read_text() == "3 runs"
    assert keys(tmp_path) == ["slow-1", "slow-2", "slow-3"]
    ran.clear()
    run_study(replace(STUDY, run=counting(ran)), results(tmp_path), on="local:1")
    assert ran == ["fast-1", "fast-2", "fast-3"]
    assert [each.name for each in tmp_path.glob("0*")] == ["001"]


def test_a_batch_that_was_half_written_is_finished(tmp_path: Path) -> None:
    study = replace(STUDY, batches=lambda cells: [list(cells)])
    path = tmp_path / "runs.jsonl"
    finishing = Runs(CELLS, path).finish(study, Job(tmp_path), HERE)
    assert [key_of(next(finishing)) for _ in range(2)] == ["slow-1", "slow-2"]
    del finishing  # killed
    with path.open("a", encoding="utf-8") as cut_off:
        cut_off.write('{"key": "cut o')
    left = [key_of(result) for result in Runs(CELLS, path).finish(study, Job(tmp_path), HERE)]
    assert left == [cell.key for cell in CELLS[2:]]
    assert [r["key"] for r in read_records(path)] == [cell.key for cell in CELLS]


def failing(cells: list[Cell], job: Job) -> list[Record]:
    for cell in cells:
        if cell.key in ("slow-2", "fast-3"):
            raise ValueError(f"{cell.key} cannot be squared")
    return square(cells, job)


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("on", ["local:1", "local:2"])
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, on: str, size: int) -> None:
    def batches(cells: Sequence[Cell]) -> list[list[Cell]]:
        return [[*cells[start : start + size]] for start in range(0, len(cells), size)]

    study = replace(STUDY, run=failing, batches=batches)
    with pytest.raises(
        ConfigError, match=r"2 of 6 runs failed, the first with: .* cannot be squared"
    ):
        run_study(study, results(tmp_path), on=on)
    assert sorted(keys(tmp_path)) == ["fast-1", "fast-2", "slow-1", "slow-3"]
    assert "in failing" in (tmp_path / "latest" / "failed.txt").read_text()
    assert (tmp_path / "latest" / "figure.txt").read_text() == "4 runs"
    ran: list[str] = []
    run_study(replace(STUDY, run=counting(ran)), results(tmp_path), on="local:1")
    assert ran == ["slow-2", "fast-3"]


def test_if_all_fail_their_error_is_raised_as_it_is(tmp_path: Path) -> None:
    study = replace(STUDY, cells=[CELLS[1], CELLS[5]], run=failing)
    with pytest.raises(ValueError, match=r"^slow-2 cannot be squared$"):
        run_study(study, results(tmp_path), on="local:1")


@pytest.mark.parametrize(
    "on", ["4", "local:0", "local:-1", "local:many", "dask", "dask:", "slurm:x", ""]
)
def test_places_that_do_not_exist(tmp_path: Path, on: str) -> None:
    with pytest.raises(ConfigError, match=f"--on {on}: not a place to run on; write local:4"):
        run_study(STUDY, results(tmp_path), on=on)
    assert not list(tmp_path.iterdir())


def test_only_some_lines(tmp_path: Path) -> None:
    assert {cell.line for cell in STUDY.only(["fast"]).cells} == {"fast"}
    assert STUDY.only(None) == STUDY
    assert len(replace(STUDY, always_run={"slow"}).only(["fast"]).cells) == 6
    with pytest.raises(ConfigError, match="tiny has no line 'medium'; lines are 'slow', 'fast'"):
        STUDY.only(["medium"])


def test_missing_values_are_empty_cells() -> None:
    shown = as_text(frame_of([{"a": 0.5, "b": None}, {"a": float("nan"), "b": "x"}]), {"a": ".2f"})
    assert shown.to_numpy().tolist() == [["0.50", ""], ["", "x"]]


def test_order_of_first_appearance() -> None:
    frame = frame_of([{"name": name, "x": x} for name in "ba" for x in (2, 1)], ordered=["name"])
    assert list(frame.sort_values(["name", "x"])["name"]) == ["b", "b", "a", "a"]


# --- worker processes ------------------------------------------------------------------------------------

WORKERS = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from dataclasses import replace
from pathlib import Path
from test_study import STUDY, interrupt, kill_once, kill_parent, kill_worker, results
from gossamer.experiments.study import run_study

if __name__ == "__main__":
    print("parent", os.getpid(), flush=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    run = dict(
        interrupt=interrupt, parent=kill_parent, worker=kill_worker, once=kill_once
    )[sys.argv[1]]
    try:
        run_study(replace(STUDY, run=run), results(Path("out")), on="local:2")
    except Exception as error:
        print("raised", type(error).__name__, error)
"""


def in_worker(cells: list[Cell], job: Job) -> list[Record]:
    """Says where it ran, and how many threads torch will use there."""
    told = {"process": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}
    return [record | told for record in square(cells, job)]


def interrupt(cells: list[Cell], job: Job) -> list[Record]:
    """Ctrl-C in the third run: it reaches the whole group, workers that still import included."""
    if cells[0].key == "slow-3":
        os.killpg(0, signal.SIGINT)
        signal.pause()  # the parent ends this worker
    return in_worker(cells, job)


def kill_worker(cells: list[Cell], job: Job) -> list[Record]:
    if cells[0].key == "slow-3":
        os.kill(os.getpid(), signal.SIGKILL)
    return in_worker(cells, job)


def kill_once(cells: list[Cell], job: Job) -> list[Record]:
    """Kill the worker the first time that it computes the third run."""
    mark = job.folder / "killed"
    if cells[0].key == "slow-3" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return in_worker(cells, job)


def kill_parent(cells: list[Cell], job: Job) -> list[Record]:
    """Kill the parent in the third run; this worker then ends, or the test would wait for its output."""
    if cells[0].key == "slow-3":
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return in_worker(cells, job)


def run_workers(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(WORKERS, "utf-8")
    return subprocess.run(
        [sys.executable, "script.py", how], cwd=folder, capture_output=True, text=True, timeout=280,
        check=False, start_new_session=True,
    )  # fmt: skip


def test_workers_get_the_same_numbers_and_compute_again_what_a_killed_one_did(
    tmp_path: Path,
) -> None:
    ran = run_workers(tmp_path, "once")
    assert ran.returncode == 0, ran.stderr
    assert "raised" not in ran.stdout
    found = list(read_records(find_run(tmp_path / "out") / "runs.jsonl"))
    assert sorted(r["key"] for r in found) == sorted(cell.key for cell in CELLS)
    assert {(r["key"], r["square"]) for r in found} == {(c.key, c.x**2) for c in CELLS}
    parent = int(ran.stdout.split()[1])
    assert parent not in {r["process"] for r in found}  # one quick worker may have run all
    assert {r["threads"] for r in found} == {"1"}


@pytest.mark.live
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("interrupt", "raised Stopped interrupted; "),
        (
            "worker",
            "raised ConfigError a worker process was killed again and again, perhaps for lack of memory",
        ),
    ],
)
def test_interrupted_and_killed_workers_say_nothing_themselves(
    tmp_path: Path, how: str, message: str
) -> None:
    ran = run_workers(tmp_path, how)
    assert message in ran.stdout
    assert "Traceback" not in ran.stderr


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    ran = run_workers(tmp_path, "parent")  # returns when the last process has closed its output
    assert ran.returncode == -signal.SIGKILL
    assert "slow-3" not in keys(tmp_path / "out")
